/* step.c - one optimizer step.
 *
 * DESIGN
 *   caller's stream            store's stream
 *                              reductions that are left (untouched units as zeros, in index order)
 *                              state not sharded: all-gather of the sums, in place
 *   sums of squares  <-------
 *                    ------->  all-gather of sums of squares and of totals
 *   step_control     <-------
 *   update, unit by unit ----> parameters not sharded: all-gather of the updated slices, in place
 *
 * A sum of squares is always taken over exactly one rank's slice of one range, and step_control adds them in (rank,
 * range) order, so the norm has the same bits whether every rank formed all of them or each its own. The decision to
 * skip is made on the device from the same numbers on every rank: nobody waits for the host.
 */
#include <string.h>

#include "store/internal.h"

static zx_status gather_sums(zx_store *s)
{
    for (int32_t r = 0; r < s->layout->n_ranges; r++) {
        const zx_range *range = &s->layout->ranges[r];
        if (s->ranges[r].nth < 0) continue;
        zx_comm_label(s->comm, s->layout->units[range->unit].name);
        ZX_TRY(zx_comm_all_gather(s->comm, s->stream, s->ranges[r].sum_slice, s->ranges[r].own_grad, range->slice,
                                  zx_dtype_sum(range->dtype)));
        s->stats.sent_elems += range->slice * (s->world - 1);
    }
    return ZX_OK;
}

static zx_status sum_squares(zx_store *s, zx_stream *stream)
{
    int64_t n = s->places.n_trainable_ranges;
    for (int32_t r = 0; r < s->layout->n_ranges; r++) {
        const zx_range *range = &s->layout->ranges[r];
        const zx_store_range *own = &s->ranges[r];
        if (own->nth < 0) continue;
        zx_dtype sum = zx_dtype_sum(range->dtype);
        double *out = zx_control_at(s, s->policy.shard_state ? s->places.own_partials : s->places.partials);
        for (int64_t k = 0; k < own->own_n / range->slice; k++) {
            zx_sqnorm_args args = {.x = zx_at(own->own_grad, sum, k * range->slice),
                                   .dtype = sum,
                                   .n = range->slice,
                                   .out = out + k * n + own->nth};
            ZX_TRY(ZX_LAUNCH(stream, sqnorm, &args));
        }
    }
    return ZX_OK;
}

static zx_status exchange_scalars(zx_store *s, zx_stream *stream)
{
    if (s->world == 1) return ZX_OK;
    ZX_TRY(zx_store_hand_over(s, stream, s->stream));
    zx_comm_label(s->comm, "totals of the step");
    ZX_TRY(zx_comm_all_gather(s->comm, s->stream, zx_control_at(s, s->places.own_totals),
                              zx_control_at(s, s->places.totals), 2, ZX_F64));
    if (s->policy.shard_state && s->places.n_trainable_ranges > 0) {
        zx_comm_label(s->comm, "norms of the step");
        ZX_TRY(zx_comm_all_gather(s->comm, s->stream, zx_control_at(s, s->places.own_partials),
                                  zx_control_at(s, s->places.partials), s->places.n_trainable_ranges, ZX_F64));
    }
    return zx_store_hand_over(s, s->stream, stream);
}

/* The host's numbers stay in a ring until they have surely been read. */
static zx_status send_hyper(zx_store *s, zx_stream *stream, const zx_step_options *options)
{
    size_t bytes = (size_t)options->n_groups * sizeof(zx_hyper);
    if (bytes == 0) return ZX_OK;
    if (s->n_in_flight == ZX_HYPER_RING) {
        ZX_TRY(zx_stream_sync(stream));
        s->n_in_flight = 0;
    }
    zx_hyper *ring = s->hyper_ring + s->hyper_next * options->n_groups;
    memcpy(ring, options->hyper, bytes);
    s->hyper_next = (s->hyper_next + 1) % ZX_HYPER_RING;
    s->n_in_flight++;
    return zx_stream_copy(stream, zx_control_at(s, s->places.hyper), ring, bytes);
}

static zx_status decide(zx_store *s, zx_stream *stream, const zx_step_options *options)
{
    zx_step_control_args args = {
        .partials = zx_control_at(s, s->places.partials),
        .n_partials = s->places.n_trainable_ranges * s->world,
        .totals = zx_control_at(s, s->world == 1 ? s->places.own_totals : s->places.totals),
        .n_ranks = s->world,
        .max_norm = options->max_norm,
        .loss_scale = options->loss_scale,
        .out = zx_control_at(s, s->places.ctl),
    };
    return ZX_LAUNCH(stream, step_control, &args);
}

static zx_status update_units(zx_store *s, zx_stream *stream)
{
    bool spread = s->world > 1 && s->policy.shard_state && !s->policy.shard_params;
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        const zx_unit *unit = &s->layout->units[u];
        if (!unit->trainable) continue;
        for (int32_t r = unit->first_range; r < unit->first_range + unit->n_ranges; r++)
            ZX_TRY(zx_store_update(s, stream, r));
        if (!spread) continue;
        ZX_TRY(zx_store_hand_over(s, stream, s->stream));
        ZX_TRY(zx_store_spread(s, u, false));
    }
    return ZX_OK;
}

static zx_status finish_states(zx_store *s)
{
    bool cleared = !s->policy.shard_state; /* the update cleared whole gradients, not only a slice of them */
    for (int32_t u = 0; u < s->layout->n_units; u++) {
        zx_store_unit *unit = &s->units[u];
        if (unit->grad == ZX_GRAD_REDUCING)
            ZX_TRY(zx_grad_state_move(&unit->grad, ZX_ON_DONE, s->layout->units[u].name));
        unit->grad_clean = cleared;
        unit->accumulating = false;
    }
    s->earlier_grads = s->pass_grads = s->pass_counted = false;
    s->stats.n_steps++;
    return zx_store_raise(s);
}

static zx_status run_step(zx_store *s, zx_stream *stream, const zx_step_options *options)
{
    ZX_TRY(zx_store_reduce_rest(s, stream));
    if (s->world > 1) {
        if (!s->policy.shard_state) ZX_TRY(gather_sums(s));
        ZX_TRY(zx_store_hand_over(s, s->stream, stream));
    }
    ZX_TRY(sum_squares(s, stream));
    ZX_TRY(exchange_scalars(s, stream));
    ZX_TRY(send_hyper(s, stream, options));
    ZX_TRY(decide(s, stream, options));
    ZX_TRY(update_units(s, stream));
    ZX_TRY(zx_store_clear_totals(s, stream));
    ZX_TRY(zx_store_hand_over(s, stream, s->stream)); /* gathers and reads of slices come after the update */
    return finish_states(s);
}

zx_status zx_store_step(zx_store *s, zx_stream *stream, const zx_step_options *options)
{
    ZX_TRY(zx_store_ready(s, 0));
    ZX_TRY(zx_updater_check(s, options));
    for (int32_t u = 0; s->n_live > 0 && u < s->layout->n_units; u++)
        if (s->units[u].refs > 0)
            ZX_FAIL(ZX_ERR_STATE, "step while unit %s is LIVE: release it first, or abandon the pass",
                    s->layout->units[u].name);
    if (s->incomplete)
        ZX_FAIL(
            ZX_ERR_STATE,
            "a pass was abandoned after it had added to gradients of earlier micro-steps: call zero_grad and run the "
            "step's micro-steps again");
    return run_step(s, stream, options) == ZX_OK ? ZX_OK : zx_store_break(s);
}

zx_status zx_store_step_result(zx_store *s, zx_stream *stream, zx_step_ctl *out)
{
    *out = (zx_step_ctl){0};
    ZX_TRY(zx_store_ready(s, 0));
    if (s->stats.n_steps == 0 && s->version == 0)
        ZX_FAIL(ZX_ERR_STATE, "there is no step yet whose result could be read");
    ZX_TRY(zx_stream_copy(stream, s->result, zx_control_at(s, s->places.ctl), sizeof *s->result));
    ZX_TRY(zx_stream_sync(stream));
    s->n_in_flight = 0;
    ZX_TRY(zx_comm_check(s->comm));
    *out = *s->result;
    return ZX_OK;
}
