/* open.c - the store's memory: one object for each class, addresses of units, where each range's parts lie.
 *
 * DESIGN
 * Full parameters and full gradients (reduce_at step) are one arena, in which unit after unit begins at a granule.
 * Sharded parameters are an arena of slices; behind the units' own addresses lie slots, mapped here once and never
 * again. Gradient slots are the same. What other ranks read (shards or full parameters, full gradients or their slots,
 * accumulators that are gathered, the wire buffer, control scalars) is registered with the communicator once.
 */
#include <string.h>

#include "store/internal.h"

static zx_status open_arena(zx_store *s, size_t bytes, bool registered, zx_store_arena *a)
{
    size_t granule = s->layout->granule;
    a->comm_id = -1;
    a->bytes = (bytes + granule - 1) / granule * granule;
    if (a->bytes == 0) return ZX_OK;
    registered &= s->world > 1;
    ZX_TRY(zx_mem_open(s->dev, a->bytes, registered, &a->mem));
    ZX_TRY(zx_device_reserve(s->dev, a->bytes, (void **)&a->base));
    ZX_TRY(zx_device_map(s->dev, a->base, a->mem, 0, a->bytes));
    if (registered) ZX_TRY(zx_comm_register(s->comm, a->mem, a->base, &a->comm_id));
    return ZX_OK;
}

static void close_arena(zx_store *s, zx_store_arena *a)
{
    if (a->base) zx_device_unreserve(s->dev, a->base, a->bytes);
    zx_mem_close(a->mem);
    *a = (zx_store_arena){.comm_id = -1};
}

/* Unit after unit in one arena, or a reservation of its own with a slot behind it. */
static zx_status place_units(zx_store *s, const zx_slots *slots, const zx_store_arena *a, bool grads)
{
    size_t at = 0;
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        size_t bytes = grads ? s->layout->units[u].grad_bytes : s->layout->units[u].param_bytes;
        char **addr = grads ? &unit->grads : &unit->params;
        if (bytes == 0) continue;
        if (!slots) {
            *addr = a->base + at;
            at += bytes;
            continue;
        }
        size_t offset = 0;
        for (int32_t k = 0; k < slots->slot_of[u]; k++)
            offset += slots->slot_bytes[k];
        ZX_TRY(zx_device_reserve(s->dev, bytes, (void **)addr));
        *(grads ? &unit->own_grads : &unit->own_params) = true;
        ZX_TRY(zx_device_map(s->dev, *addr, a->mem, offset, bytes));
        if (a->comm_id >= 0) ZX_TRY(zx_comm_alias(s->comm, a->comm_id, *addr, offset, bytes));
    }
    return ZX_OK;
}

static zx_status open_slots(zx_store *s, const zx_slots *given, bool grads, zx_slots **out, zx_store_slot **out_slot)
{
    const zx_layout *l = s->layout;
    ZX_TRY(zx_slots_open_for(l, &s->policy, grads, NULL, 0, out));
    if (given) { /* the caller's colours, copied */
        if (given->n_units != l->n_units)
            ZX_FAIL(ZX_ERR_ARG, "slots of %d units for a layout of %d: colour the slots from this layout",
                    given->n_units, l->n_units);
        for (int32_t u = 0; u < l->n_units; u++) {
            int32_t k = given->slot_of[u];
            size_t bytes = grads ? l->units[u].grad_bytes : l->units[u].param_bytes;
            if (bytes > 0 && (k < 0 || k >= given->n_slots || bytes > given->slot_bytes[k]))
                ZX_FAIL(ZX_ERR_ARG,
                        "unit %s needs %zu bytes, more than its slot %d holds: colour the slots from this layout",
                        l->units[u].name, bytes, k);
        }
        zx_slots_close(*out);
        *out = NULL;
        zx_slots *copy;
        ZX_TRY(ZX_NEW(ZX_MEM_STORE, copy));
        *out = copy;
        copy->n_slots = given->n_slots;
        copy->n_units = given->n_units;
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, given->n_slots, copy->slot_bytes));
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, given->n_units, copy->slot_of));
        memcpy(copy->slot_bytes, given->slot_bytes, (size_t)given->n_slots * sizeof *copy->slot_bytes);
        memcpy(copy->slot_of, given->slot_of, (size_t)given->n_units * sizeof *copy->slot_of);
    }
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, (*out)->n_slots, *out_slot));
    for (int32_t k = 0; k < (*out)->n_slots; k++) {
        (*out_slot)[k].unit = -1;
        ZX_TRY(zx_event_open(s->dev, &(*out_slot)[k].event));
    }
    return ZX_OK;
}

static size_t units_bytes(const zx_layout *l, bool grads)
{
    size_t bytes = 0;
    for (int32_t u = 0; u < l->n_units; u++)
        bytes += grads ? l->units[u].grad_bytes : l->units[u].param_bytes;
    return bytes;
}

static zx_status alloc_state(zx_store *s)
{
    bool full = !s->policy.shard_state;
    s->master_bytes = zx_layout_state_bytes(s->layout, full, true);
    s->moment_bytes = zx_layout_state_bytes(s->layout, full, false);
    if (s->master_bytes > 0) ZX_TRY(zx_device_alloc(s->dev, s->master_bytes, (void **)&s->master));
    for (int32_t k = 0; k < s->policy.n_moments && s->moment_bytes > 0; k++)
        ZX_TRY(zx_device_alloc(s->dev, s->moment_bytes, (void **)&s->moment[k]));
    return ZX_OK;
}

static void place_ranges(zx_store *s)
{
    const zx_policy *p = &s->policy;
    bool full = !p->shard_state, micro = p->reduce_at == ZX_REDUCE_MICRO;
    size_t state = 0, master = 0; /* bytes so far */
    int64_t nth = 0;
    for (int32_t r = 0; r < s->layout->n_ranges; r++) {
        const zx_range *range = &s->layout->ranges[r];
        const zx_store_unit *unit = &s->units[range->unit];
        zx_store_range *at = &s->ranges[r];
        size_t item = zx_dtype_bytes(range->dtype), sum = zx_sum_bytes(range);
        int64_t rank_begin = s->rank * range->slice;
        at->own_begin = full ? 0 : rank_begin;
        at->own_n = full ? range->n_padded : range->slice;
        at->nth = -1;
        if (range->slice == 0) continue;
        at->own_param = p->shard_params ? s->params.base + range->shard_offset
                                        : unit->params + range->param_offset + (size_t)at->own_begin * item;
        if (!range->trainable) continue;
        at->nth = nth++;
        if (micro) {
            at->own_grad = s->sums.base + state;
            at->sum_slice = at->own_grad + (full ? (size_t)rank_begin * sum : 0);
        } else {
            at->own_grad = unit->grads + range->grad_offset + (size_t)at->own_begin * sum;
            at->sum_slice = unit->grads + range->grad_offset + (size_t)rank_begin * sum;
        }
        at->master = at->own_param;
        if (range->dtype != zx_dtype_sum(range->dtype)) {
            at->master = s->master + master;
            master += (size_t)at->own_n * sum;
        }
        for (int32_t k = 0; k < p->n_moments; k++)
            at->moment[k] = s->moment[k] + state;
        state += (size_t)at->own_n * sum;
    }
}

static zx_status open_units(zx_store *s)
{
    const zx_layout *l = s->layout;
    bool spread = s->world > 1; /* even unsharded parameters are spread at a load */
    for (int32_t u = 0; u < l->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        unit->state = s->slots && s->slots->slot_of[u] >= 0 ? ZX_PARAM_SHARDED : ZX_PARAM_RESIDENT;
        unit->grad_clean = true;
        for (int32_t r = l->units[u].first_range; r < l->units[u].first_range + l->units[u].n_ranges; r++)
            unit->has_grads |= l->ranges[r].trainable;
        if (spread && l->units[u].param_bytes > 0) ZX_TRY(zx_event_open(s->dev, &unit->gathered));
    }
    return ZX_OK;
}

zx_status zx_store_open_memory(zx_store *s)
{
    const zx_layout *l = s->layout;
    const zx_policy *p = &s->policy;
    bool micro = p->reduce_at == ZX_REDUCE_MICRO;
    if (p->shard_params) {
        ZX_TRY(open_slots(s, s->config.slots, false, &s->slots, &s->slot));
        ZX_TRY(open_arena(s, l->shard_bytes, true, &s->params));
        ZX_TRY(open_arena(s, zx_slots_bytes(s->slots), false, &s->param_slots));
        ZX_TRY(place_units(s, s->slots, &s->param_slots, false));
    } else {
        ZX_TRY(open_arena(s, units_bytes(l, false), true, &s->params));
        ZX_TRY(place_units(s, NULL, &s->params, false));
    }
    if (micro) {
        ZX_TRY(open_slots(s, s->config.grad_slots, true, &s->grad_slots, &s->grad_slot));
        ZX_TRY(open_arena(s, zx_slots_bytes(s->grad_slots), true, &s->grads));
        ZX_TRY(open_arena(s, zx_layout_state_bytes(l, !p->shard_state, false), !p->shard_state, &s->sums));
    } else {
        ZX_TRY(open_arena(s, units_bytes(l, true), true, &s->grads));
    }
    ZX_TRY(place_units(s, s->grad_slots, &s->grads, true));
    ZX_TRY(open_arena(s, zx_layout_wire_bytes(l, p), true, &s->wire));
    s->places = zx_layout_control(l);
    ZX_TRY(open_arena(s, s->places.bytes, true, &s->control));
    ZX_TRY(alloc_state(s));
    place_ranges(s);
    return open_units(s);
}

static void unregister(zx_store *s, zx_store_arena *a)
{
    if (a->comm_id < 0 || zx_comm_check(s->comm) != ZX_OK) return;
    if (zx_comm_unregister(s->comm, a->comm_id) != ZX_OK)
        zx_log(ZX_LOG_DEBUG, "closing a store: %s", zx_error_last()->text);
}

static void close_slots(zx_slots *slots, zx_store_slot *slot)
{
    for (int32_t k = 0; slot && k < slots->n_slots; k++)
        zx_event_close(slot[k].event);
    zx_free(slot);
    zx_slots_close(slots);
}

void zx_store_close_memory(zx_store *s)
{
    zx_store_arena *arenas[] = {&s->control, &s->wire, &s->sums, &s->grads, &s->param_slots, &s->params};
    enum { N_ARENAS = sizeof arenas / sizeof arenas[0] };
    if (s->comm)
        for (int i = 0; i < N_ARENAS; i++)
            unregister(s, arenas[i]);
    for (int32_t u = 0; s->units && u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        if (unit->own_params) zx_device_unreserve(s->dev, unit->params, s->layout->units[u].param_bytes);
        if (unit->own_grads) zx_device_unreserve(s->dev, unit->grads, s->layout->units[u].grad_bytes);
        zx_event_close(unit->gathered);
    }
    close_slots(s->slots, s->slot);
    close_slots(s->grad_slots, s->grad_slot);
    if (s->master) zx_device_free(s->dev, s->master);
    for (int k = 0; k < 2; k++)
        if (s->moment[k]) zx_device_free(s->dev, s->moment[k]);
    for (int i = 0; i < N_ARENAS; i++)
        close_arena(s, arenas[i]);
}
