/* grad.c - full gradients and their reduction.
 *
 * DESIGN
 * reduce_at micro: a unit's full gradient lives in a slot from grad() to the end of its reduction, which adds this
 * rank's slice of the sum to an accumulator. The first reduction of a step stores, so accumulators need no clearing.
 * reduce_at step (and world 1): every unit has a full gradient of its own, which writers add to in all micro-steps; it
 * is zeroed at the first grad() unless it is known to be zero, as it is after an update that cleared the whole of it.
 *
 * Abandoning a pass. What the pass wrote into slots is dropped without a trace. What it added to sums that earlier
 * passes share cannot be taken out again: then the next step is refused until zero_grad, rather than made with wrong
 * numbers.
 */
#include "store/internal.h"

static bool at_micro(const zx_store *s)
{
    return s->policy.reduce_at == ZX_REDUCE_MICRO;
}

/* Elements of the unit's gradient: all of it, from its address, padding included. */
static size_t grad_bytes(const zx_layout *l, int32_t unit)
{
    size_t bytes = 0;
    for (int32_t r = l->units[unit].first_range; r < l->units[unit].first_range + l->units[unit].n_ranges; r++)
        if (l->ranges[r].trainable) bytes += (size_t)l->ranges[r].n_padded * zx_sum_bytes(&l->ranges[r]);
    return bytes;
}

/* Makes the unit's slot its own; its last reduction must have passed before `stream` writes. */
static zx_status take_slot(zx_store *s, int32_t unit, zx_stream *stream)
{
    if (s->grad_slots->slot_of[unit] < 0) return ZX_OK;
    zx_store_slot *slot = &s->grad_slot[s->grad_slots->slot_of[unit]];
    const char *name = s->layout->units[unit].name;
    if (slot->unit >= 0 && slot->unit != unit) {
        zx_store_unit *holder = &s->units[slot->unit];
        const char *other = s->layout->units[slot->unit].name;
        if (holder->grad == ZX_GRAD_FULL)
            ZX_FAIL(ZX_ERR_STATE,
                    "the gradient of unit %s has no room: its slot %d holds that of unit %s, which is not reduced yet: "
                    "reduce %s first, or raise grad_slots from %d",
                    name, s->grad_slots->slot_of[unit], other, other, s->grad_slots->n_slots - 1);
        if (holder->grad == ZX_GRAD_REDUCING) ZX_TRY(zx_grad_state_move(&holder->grad, ZX_ON_DONE, other));
    }
    if (slot->recorded) ZX_TRY(zx_stream_wait_event(stream, slot->event));
    slot->recorded = false;
    slot->unit = unit;
    return ZX_OK;
}

static zx_status make_full(zx_store *s, int32_t unit, zx_stream *stream)
{
    zx_store_unit *u = &s->units[unit];
    const char *name = s->layout->units[unit].name;
    if (u->grad == ZX_GRAD_FULL) return ZX_OK;
    if (at_micro(s)) {
        ZX_TRY(take_slot(s, unit, stream));
        if (u->grad == ZX_GRAD_REDUCING) ZX_TRY(zx_grad_state_move(&u->grad, ZX_ON_DONE, name));
    }
    if (u->grads && u->grad == ZX_GRAD_NONE && (at_micro(s) || !u->grad_clean))
        ZX_TRY(zx_stream_fill(stream, u->grads, 0, grad_bytes(s->layout, unit)));
    return zx_grad_state_move(&u->grad, ZX_ON_GRAD, name);
}

/* Sums the unit's full gradient into this rank's slices. The store's stream comes after its writers. */
static zx_status reduce_ranges(zx_store *s, int32_t unit)
{
    const zx_unit *u = &s->layout->units[unit];
    bool add = at_micro(s) && s->units[unit].accumulating;
    if (u->trainable) s->stats.n_reductions++;
    for (int32_t r = u->first_range; s->world > 1 && r < u->first_range + u->n_ranges; r++) {
        const zx_range *range = &s->layout->ranges[r];
        if (!range->trainable || range->slice == 0) continue;
        zx_dtype sum = zx_dtype_sum(range->dtype), wire = sum;
        char *send = s->units[unit].grads + range->grad_offset;
        if (s->policy.reduce_dtype != ZX_F32 && sum == ZX_F32) {
            wire = s->policy.reduce_dtype;
            zx_cast_args cast = {.a = zx_view_1d(send, sum, range->n_padded),
                                 .out = zx_view_1d(s->wire.base, wire, range->n_padded)};
            ZX_TRY(ZX_LAUNCH(s->stream, cast, &cast));
            send = s->wire.base;
        }
        zx_comm_label(s->comm, s->layout->units[unit].name);
        ZX_TRY(zx_comm_reduce_scatter(s->comm, s->stream, send, s->ranges[r].sum_slice, range->slice, wire, sum, add));
        s->stats.sent_elems += range->slice * (s->world - 1);
    }
    s->units[unit].accumulating = at_micro(s);
    return ZX_OK;
}

static zx_status reduce_slot(zx_store *s, int32_t unit, zx_stream *stream)
{
    ZX_TRY(zx_store_hand_over(s, stream, s->stream));
    ZX_TRY(reduce_ranges(s, unit));
    if (s->grad_slots->slot_of[unit] < 0) return ZX_OK;
    zx_store_slot *slot = &s->grad_slot[s->grad_slots->slot_of[unit]];
    if (s->config.poison) ZX_TRY(zx_stream_fill(s->stream, s->units[unit].grads, 0xff, grad_bytes(s->layout, unit)));
    ZX_TRY(zx_event_record(slot->event, s->stream));
    slot->recorded = true;
    return ZX_OK;
}

static zx_status check_has_grads(const zx_store *s, int32_t unit, const char *verb)
{
    ZX_TRY(zx_store_ready(s, unit));
    if (!s->units[unit].has_grads)
        ZX_FAIL(ZX_ERR_STATE, "%s of unit %s: all its parameters are frozen, so it has no gradient", verb,
                s->layout->units[unit].name);
    return ZX_OK;
}

zx_status zx_store_grad(zx_store *s, int32_t unit, zx_stream *stream, void **out_base)
{
    *out_base = NULL;
    ZX_TRY(check_has_grads(s, unit, "grad"));
    ZX_TRY(make_full(s, unit, stream));
    s->pass_grads |= !at_micro(s);
    *out_base = s->units[unit].grads;
    return zx_store_follow(s, ZX_GRAD, unit);
}

zx_status zx_store_reduce(zx_store *s, int32_t unit, zx_stream *stream)
{
    ZX_TRY(check_has_grads(s, unit, "reduce"));
    zx_store_unit *u = &s->units[unit];
    ZX_TRY(zx_grad_state_move(&u->grad, at_micro(s) ? ZX_ON_REDUCE : ZX_ON_KEEP, s->layout->units[unit].name));
    s->pass_grads = true;
    if (at_micro(s) && reduce_slot(s, unit, stream) != ZX_OK) return zx_store_break(s);
    return zx_store_follow(s, ZX_REDUCE, unit);
}

/* What is FULL goes first: it holds slots that untouched units need for their zeros. */
static zx_status reduce_rest_micro(zx_store *s, zx_stream *stream)
{
    for (int pass = 0; pass < 2; pass++)
        for (int32_t u = 0; u < s->layout->n_units; u++) {
            zx_store_unit *unit = &s->units[u];
            bool full = unit->grad == ZX_GRAD_FULL;
            if (!unit->has_grads || (pass == 0 ? !full : unit->accumulating)) continue;
            ZX_TRY(make_full(s, u, stream));
            ZX_TRY(zx_grad_state_move(&unit->grad, ZX_ON_REDUCE, s->layout->units[u].name));
            ZX_TRY(reduce_slot(s, u, stream));
        }
    return ZX_OK;
}

zx_status zx_store_reduce_rest(zx_store *s, zx_stream *stream)
{
    if (at_micro(s)) return reduce_rest_micro(s, stream);
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        if (!unit->has_grads) continue;
        if (unit->grad != ZX_GRAD_HELD) ZX_TRY(make_full(s, u, stream));
        ZX_TRY(zx_grad_state_move(&unit->grad, ZX_ON_REDUCE, s->layout->units[u].name));
    }
    if (s->world > 1) ZX_TRY(zx_store_hand_over(s, stream, s->stream));
    for (int32_t u = 0; u < s->layout->n_units; u++)
        if (s->units[u].has_grads) ZX_TRY(reduce_ranges(s, u));
    return ZX_OK;
}

/* ---- totals ---- */

zx_status zx_store_clear_totals(zx_store *s, zx_stream *stream)
{
    return zx_stream_fill(stream, zx_control_at(s, s->places.own_totals), 0, 2 * sizeof(double));
}

static zx_status add_totals(zx_store *s, zx_stream *stream, const void *totals, zx_dtype dtype)
{
    void *own = zx_control_at(s, s->places.own_totals), *scratch = zx_control_at(s, s->places.scratch_totals);
    if (!s->pass_counted)
        ZX_TRY(zx_stream_copy(stream, zx_control_at(s, s->places.saved_totals), own, 2 * sizeof(double)));
    zx_cast_args cast = {.a = zx_view_1d((void *)(uintptr_t)totals, dtype, 2), .out = zx_view_1d(scratch, ZX_F64, 2)};
    ZX_TRY(ZX_LAUNCH(stream, cast, &cast));
    zx_sum_sources_args sum = {
        .src = {scratch}, .n_src = 1, .src_dtype = ZX_F64, .out = own, .out_dtype = ZX_F64, .n = 2, .accumulate = true};
    return ZX_LAUNCH(stream, sum_sources, &sum);
}

zx_status zx_store_count(zx_store *s, zx_stream *stream, const void *totals, zx_dtype dtype)
{
    ZX_TRY(zx_store_ready(s, 0));
    if (dtype != ZX_F32 && dtype != ZX_F64)
        ZX_FAIL(ZX_ERR_ARG, "totals in %s: use float32 or float64", zx_dtype_name(dtype));
    if (add_totals(s, stream, totals, dtype) != ZX_OK) return zx_store_break(s);
    s->pass_counted = true;
    return ZX_OK;
}

/* ---- throwing away ---- */

static zx_status discard_grads(zx_store *s, bool sums)
{
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        bool touched = unit->grad != ZX_GRAD_NONE;
        if (sums) unit->accumulating = false;
        if (!touched || (at_micro(s) && unit->grad == ZX_GRAD_REDUCING)) continue;
        ZX_TRY(zx_grad_state_move(&unit->grad, ZX_ON_DISCARD, s->layout->units[u].name));
        unit->grad_clean = false;
    }
    return ZX_OK;
}

zx_status zx_store_zero_grad(zx_store *s, zx_stream *stream)
{
    ZX_TRY(zx_store_ready(s, 0));
    if (discard_grads(s, true) != ZX_OK || zx_store_clear_totals(s, stream) != ZX_OK) return zx_store_break(s);
    s->earlier_grads = s->pass_grads = s->pass_counted = s->incomplete = false;
    return ZX_OK;
}

zx_status zx_store_discard_pass(zx_store *s, zx_stream *stream)
{
    bool mixed = s->earlier_grads && s->pass_grads;
    if (at_micro(s) || !s->earlier_grads) ZX_TRY(discard_grads(s, !s->earlier_grads));
    s->incomplete |= mixed;
    if (s->pass_counted)
        ZX_TRY(zx_stream_copy(stream, zx_control_at(s, s->places.own_totals), zx_control_at(s, s->places.saved_totals),
                              2 * sizeof(double)));
    s->pass_grads = s->pass_counted = false;
    return ZX_OK;
}
