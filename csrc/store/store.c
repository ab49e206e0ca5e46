/* store.c - opening and closing, the verbs' common ground, and everything that only looks in. */
#include <string.h>

#include "store/internal.h"

static zx_status check_config(const zx_layout *layout, const zx_store_config *config, zx_device *dev, zx_comm *comm)
{
    const zx_policy *p = &config->policy;
    const zx_updater *updater = zx_updater_get(config->optimizer);
    ZX_TRY(zx_policy_check(p));
    if (!updater) ZX_FAIL(ZX_ERR_ARG, "unknown optimizer %d", (int)config->optimizer);
    if (p->n_moments < updater->min_moments || p->n_moments > updater->max_moments)
        ZX_FAIL(ZX_ERR_ARG, "%s keeps %d to %d moments, the policy has %d", updater->name, updater->min_moments,
                updater->max_moments, p->n_moments);
    if (layout->world != zx_comm_world(comm))
        ZX_FAIL(ZX_ERR_ARG, "the layout is cut for %d ranks, but the communicator has %d: cut it again", layout->world,
                zx_comm_world(comm));
    if (layout->granule % zx_device_caps_get(dev)->granule != 0)
        ZX_FAIL(ZX_ERR_ARG, "the layout's granule of %zu bytes is no multiple of the device's %zu", layout->granule,
                zx_device_caps_get(dev)->granule);
    for (int32_t r = 0; r < layout->n_ranges; r++)
        if (layout->ranges[r].reduce_group != 0)
            ZX_FAIL(ZX_ERR_UNSUPPORTED,
                    "unit %s has a parameter of reduce group %d: only group 0, all ranks, is possible",
                    layout->units[layout->ranges[r].unit].name, layout->ranges[r].reduce_group);
    return ZX_OK;
}

static zx_status open_parts(zx_store *s)
{
    ZX_TRY(ZX_NEW(ZX_MEM_STORE, s->failure));
    ZX_TRY(ZX_NEW(ZX_MEM_STORE, s->result));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->layout->n_units, s->units));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->layout->n_ranges, s->ranges));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, ZX_HYPER_RING * (int64_t)s->layout->n_groups, s->hyper_ring));
    ZX_TRY(zx_stream_open(s->dev, "store", &s->stream));
    ZX_TRY(zx_event_open(s->dev, &s->handoff));
    ZX_TRY(zx_store_open_memory(s));
    ZX_TRY(zx_store_open_segments(s));
    return zx_stream_sync(s->stream);
}

zx_status zx_store_open(const zx_layout *layout, const zx_store_config *config, zx_device *dev, zx_comm *comm,
                        zx_store **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_store *s = NULL;
    *out = NULL;
    ZX_TRY(check_config(layout, config, dev, comm));
    ZX_TRY(ZX_NEW(ZX_MEM_STORE, s));
    s->layout = layout;
    s->config = *config;
    s->policy = zx_policy_at_world(&config->policy, layout->world);
    s->dev = dev;
    s->comm = comm;
    s->rank = zx_comm_rank(comm);
    s->world = layout->world;
    zx_store_arena *arenas[] = {&s->params, &s->param_slots, &s->grads, &s->sums, &s->wire, &s->control};
    for (size_t i = 0; i < sizeof arenas / sizeof arenas[0]; i++)
        arenas[i]->comm_id = -1;
    ZX_TRY_GOTO(open_parts(s), fail);
    *out = s;
    return ZX_OK;
fail:
    zx_store_close(s);
    return zx_rc_;
}

void zx_store_close(zx_store *s)
{
    if (!s) return;
    if (s->stream && zx_stream_sync(s->stream) != ZX_OK)
        zx_log(ZX_LOG_DEBUG, "closing a store with failed work: %s", zx_error_last()->text);
    zx_store_close_memory(s);
    zx_event_close(s->handoff);
    zx_stream_close(s->stream);
    zx_free(s->units);
    zx_free(s->ranges);
    zx_free(s->hyper_ring);
    zx_free(s->result);
    zx_free(s->failure);
    zx_free(s);
}

zx_status zx_store_ready(const zx_store *s, int32_t unit)
{
    if (s->failure->status != ZX_OK) return zx_error_raise(s->failure);
    if (unit < 0 || unit >= s->layout->n_units)
        ZX_FAIL(ZX_ERR_ARG, "there is no unit %d: the layout has %d", unit, s->layout->n_units);
    if (s->loading) ZX_FAIL(ZX_ERR_STATE, "values are being loaded: call load_end first");
    return ZX_OK;
}

zx_status zx_store_break(zx_store *s)
{
    if (s->failure->status == ZX_OK) *s->failure = *zx_error_last();
    return s->failure->status;
}

zx_status zx_store_hand_over(zx_store *s, zx_stream *from, zx_stream *to)
{
    ZX_TRY(zx_event_record(s->handoff, from));
    return zx_stream_wait_event(to, s->handoff);
}

zx_status zx_store_set_plan(zx_store *s, const zx_plan *plan)
{
    if (s->failure->status != ZX_OK) return zx_error_raise(s->failure);
    for (int64_t e = 0; plan && e < plan->n_events; e++)
        if (plan->events[e].unit >= s->layout->n_units)
            ZX_FAIL(ZX_ERR_ARG, "the plan's event %lld names unit %d, but there are %d: plan this layout", (long long)e,
                    plan->events[e].unit, s->layout->n_units);
    s->plan = plan;
    s->plan_pos = 0;
    s->on_plan = plan != NULL && s->policy.shard_params;
    return ZX_OK;
}

zx_status zx_store_begin_pass(zx_store *s)
{
    ZX_TRY(zx_store_ready(s, 0));
    s->plan_pos = 0;
    s->on_plan = s->plan != NULL && s->policy.shard_params;
    s->earlier_grads |= s->pass_grads;
    s->pass_grads = s->pass_counted = false;
    return ZX_OK;
}

/* ---- looking in ---- */

const zx_layout *zx_store_layout(const zx_store *s)
{
    return s->layout;
}

void *zx_store_param_addr(const zx_store *s, int64_t param)
{
    const zx_place *place = &s->layout->places[param];
    const zx_range *range = &s->layout->ranges[place->range];
    char *base = s->units[range->unit].params;
    return base ? base + range->param_offset + (size_t)place->offset * zx_dtype_bytes(range->dtype) : NULL;
}

void *zx_store_grad_addr(const zx_store *s, int64_t param)
{
    const zx_place *place = &s->layout->places[param];
    const zx_range *range = &s->layout->ranges[place->range];
    char *base = s->units[range->unit].grads;
    return base && range->trainable ? base + range->grad_offset + (size_t)place->offset * zx_sum_bytes(range) : NULL;
}

int64_t zx_store_version(const zx_store *s)
{
    return s->version;
}

zx_store_stats zx_store_stats_get(const zx_store *s)
{
    return s->stats;
}

void zx_store_stats_reset(zx_store *s)
{
    s->stats = (zx_store_stats){.max_live = s->n_live};
}

zx_store_bytes zx_store_bytes_held(const zx_store *s)
{
    bool micro = s->policy.reduce_at == ZX_REDUCE_MICRO;
    zx_store_bytes b = {.params = s->params.bytes,
                        .master = s->master_bytes,
                        .grads = micro ? s->sums.bytes : s->grads.bytes,
                        .param_slots = s->param_slots.bytes,
                        .grad_slots = micro ? s->grads.bytes : 0,
                        .wire = s->wire.bytes,
                        .control = s->control.bytes};
    for (int k = 0; k < 2; k++)
        b.moments += s->moment[k] ? s->moment_bytes : 0;
    b.total = b.params + b.master + b.moments + b.grads + b.param_slots + b.grad_slots + b.wire + b.control;
    return b;
}

const char *zx_store_param_state_name(const zx_store *s, int32_t unit)
{
    return unit >= 0 && unit < s->layout->n_units ? zx_param_state_name(s->units[unit].state) : "?";
}

const char *zx_store_grad_state_name(const zx_store *s, int32_t unit)
{
    return unit >= 0 && unit < s->layout->n_units ? zx_grad_state_name(s->units[unit].grad) : "?";
}

const zx_slots *zx_store_slots(const zx_store *s)
{
    return s->slots;
}
