/* gather.c - acquire, release, prefetch, and spreading after a step.
 *
 * DESIGN
 * A gather into a slot runs on the store's stream after the last release of that slot, one all-gather for each range of
 * the unit, straight from the ranks' shards to the unit's address. Whoever holds the slot is evicted first: a LIVE
 * holder is an error, which makes the number of slots a hard bound on what can be live. An acquire that finds the unit
 * GATHERING or RESIDENT only waits for the gather's event, once for each stream.
 */
#include "store/internal.h"

static zx_status send_ranges(zx_store *s, int32_t unit, bool all)
{
    const zx_unit *u = &s->layout->units[unit];
    for (int32_t r = u->first_range; r < u->first_range + u->n_ranges; r++) {
        const zx_range *range = &s->layout->ranges[r];
        if (range->slice == 0 || !(range->trainable || all)) continue;
        char *full = s->units[unit].params + range->param_offset;
        const char *own =
            s->policy.shard_params ? s->ranges[r].own_param : zx_at(full, range->dtype, s->rank * range->slice);
        zx_comm_label(s->comm, s->layout->units[unit].name);
        ZX_TRY(zx_comm_all_gather(s->comm, s->stream, own, full, range->slice, range->dtype));
        s->stats.sent_elems += range->slice * (s->world - 1);
    }
    return ZX_OK;
}

static zx_status record_gathered(zx_store *s, zx_store_unit *u)
{
    ZX_TRY(zx_event_record(u->gathered, s->stream));
    u->gather_recorded = true;
    u->waited = NULL;
    return ZX_OK;
}

static zx_status fill_slot(zx_store *s, int32_t unit, zx_store_slot *slot)
{
    if (slot->recorded) ZX_TRY(zx_stream_wait_event(s->stream, slot->event));
    slot->recorded = false;
    if (s->config.poison)
        ZX_TRY(zx_stream_fill(s->stream, s->units[unit].params, 0xff, s->layout->units[unit].param_bytes));
    ZX_TRY(send_ranges(s, unit, true));
    return record_gathered(s, &s->units[unit]);
}

/* Starts the gather of a SHARDED unit. */
static zx_status fetch(zx_store *s, int32_t unit)
{
    zx_store_slot *slot = &s->slot[s->slots->slot_of[unit]];
    const char *name = s->layout->units[unit].name;
    if (slot->unit >= 0 && slot->unit != unit) {
        zx_store_unit *holder = &s->units[slot->unit];
        const char *other = s->layout->units[slot->unit].name;
        if (holder->state == ZX_PARAM_LIVE)
            ZX_FAIL(ZX_ERR_STATE,
                    "unit %s cannot be gathered: its slot %d holds unit %s, which is LIVE: release %s first, or raise "
                    "n_slots from %d",
                    name, s->slots->slot_of[unit], other, other, s->slots->n_slots - 1);
        ZX_TRY(zx_param_state_move(&holder->state, ZX_ON_EVICT, other));
    }
    slot->unit = unit;
    ZX_TRY(zx_param_state_move(&s->units[unit].state, ZX_ON_PREFETCH, name));
    s->stats.n_gathers++;
    return fill_slot(s, unit, slot) == ZX_OK ? ZX_OK : zx_store_break(s);
}

static bool can_fetch(const zx_store *s, int32_t unit)
{
    if (s->units[unit].state != ZX_PARAM_SHARDED) return false;
    int32_t holder = s->slot[s->slots->slot_of[unit]].unit;
    return holder < 0 || holder == unit || s->units[holder].state != ZX_PARAM_LIVE;
}

zx_status zx_store_follow(zx_store *s, zx_unit_verb verb, int32_t unit)
{
    if (!s->on_plan) return ZX_OK;
    const zx_plan *plan = s->plan;
    int64_t e = s->plan_pos++;
    if (e >= plan->n_events || plan->events[e].verb != verb || plan->events[e].unit != unit) {
        s->on_plan = false; /* until the next pass begins */
        return ZX_OK;
    }
    for (int64_t i = plan->prefetch_begin[e]; i < plan->prefetch_begin[e + 1]; i++)
        if (can_fetch(s, plan->prefetch_unit[i])) ZX_TRY(fetch(s, plan->prefetch_unit[i]));
    return ZX_OK;
}

zx_status zx_store_acquire(zx_store *s, int32_t unit, zx_stream *stream, void **out_base)
{
    *out_base = NULL;
    ZX_TRY(zx_store_ready(s, unit));
    zx_store_unit *u = &s->units[unit];
    if (u->state == ZX_PARAM_SHARDED) {
        ZX_TRY(fetch(s, unit));
        s->stats.n_blocking_gathers++;
    } else if (u->state == ZX_PARAM_RESIDENT && s->policy.shard_params && u->params) {
        s->stats.n_hits++;
    }
    if (u->gather_recorded && u->waited != stream) {
        ZX_TRY(zx_stream_wait_event(stream, u->gathered));
        u->waited = stream;
    }
    ZX_TRY(zx_param_state_move(&u->state, ZX_ON_ACQUIRE, s->layout->units[unit].name));
    if (u->refs++ == 0 && ++s->n_live > s->stats.max_live) s->stats.max_live = s->n_live;
    *out_base = u->params;
    return zx_store_follow(s, ZX_ACQUIRE, unit);
}

static zx_status record_release(zx_store *s, int32_t unit, zx_stream *stream)
{
    if (!s->slots || s->slots->slot_of[unit] < 0) return ZX_OK;
    zx_store_slot *slot = &s->slot[s->slots->slot_of[unit]];
    if (slot->recorded && slot->recorded_on != stream) ZX_TRY(zx_stream_wait_event(s->stream, slot->event));
    ZX_TRY(zx_event_record(slot->event, stream));
    slot->recorded = true;
    slot->recorded_on = stream;
    return ZX_OK;
}

zx_status zx_store_release(zx_store *s, int32_t unit, zx_stream *stream)
{
    ZX_TRY(zx_store_ready(s, unit));
    zx_store_unit *u = &s->units[unit];
    bool last = u->refs <= 1;
    ZX_TRY(zx_param_state_move(&u->state, last ? ZX_ON_LAST_RELEASE : ZX_ON_RELEASE, s->layout->units[unit].name));
    u->refs--;
    if (last) s->n_live--;
    if (record_release(s, unit, stream) != ZX_OK) return zx_store_break(s);
    return zx_store_follow(s, ZX_RELEASE, unit);
}

zx_status zx_store_prefetch(zx_store *s, int32_t unit)
{
    ZX_TRY(zx_store_ready(s, unit));
    return s->units[unit].state == ZX_PARAM_SHARDED ? fetch(s, unit) : ZX_OK;
}

zx_status zx_store_spread(zx_store *s, int32_t unit, bool all)
{
    zx_store_unit *u = &s->units[unit];
    const zx_unit *layout = &s->layout->units[unit];
    if (s->world == 1 || s->policy.shard_params || !u->params || !(layout->trainable || all)) return ZX_OK;
    ZX_TRY(zx_param_state_move(&u->state, ZX_ON_PREFETCH, layout->name));
    ZX_TRY(send_ranges(s, unit, all));
    return record_gathered(s, u);
}

zx_status zx_store_raise(zx_store *s)
{
    s->version++;
    if (!s->slots) return ZX_OK;
    for (int32_t u = 0; u < s->layout->n_units; u++)
        if (s->slots->slot_of[u] >= 0)
            ZX_TRY(zx_param_state_move(&s->units[u].state, ZX_ON_RAISE, s->layout->units[u].name));
    size_t at = 0;
    for (int32_t k = 0; k < s->slots->n_slots; k++) {
        s->slot[k].unit = -1;
        if (s->config.poison && s->slots->slot_bytes[k] > 0) {
            if (s->slot[k].recorded) ZX_TRY(zx_stream_wait_event(s->stream, s->slot[k].event));
            ZX_TRY(zx_stream_fill(s->stream, s->param_slots.base + at, 0xff, s->slots->slot_bytes[k]));
        }
        at += s->slots->slot_bytes[k];
    }
    return ZX_OK;
}

void zx_store_abandon_pass(zx_store *s, zx_stream *stream)
{
    if (s->failure->status != ZX_OK) return;
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        if (unit->refs == 0) continue;
        unit->refs = 0;
        s->n_live--;
        if (zx_param_state_move(&unit->state, ZX_ON_LAST_RELEASE, s->layout->units[u].name) != ZX_OK ||
            record_release(s, u, stream) != ZX_OK)
            (void)zx_store_break(s);
    }
    if (zx_store_discard_pass(s, stream) != ZX_OK) (void)zx_store_break(s);
    s->on_plan = false;
}
