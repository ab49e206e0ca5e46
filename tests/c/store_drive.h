/* store_drive.h - trains store_model.h's model with the store's verbs, on one rank; what it saw goes into a hash. */
#ifndef ZX_TESTS_STORE_DRIVE_H
#define ZX_TESTS_STORE_DRIVE_H

#include "store_model.h"

enum { MAX_STEPS = 3, MAX_MICRO = 3, MAX_TRACE = 64 };

typedef struct drive_result {
    const train_case *c;
    uint64_t hash; /* of every parameter seen in every forward, the final values, norms and losses */
    zx_step_ctl ctl[MAX_STEPS];
    zx_store_stats stats;
    int64_t comm_sent; /* what the communicator counted, control scalars included */
    zx_store_bytes held, planned;
    int64_t planned_sent, plan_gathers_first, plan_gathers_next;
    float master[N_PARAMS][MAX_PARAM_ELEMS]; /* own slices only, NaN elsewhere */
    float moment[2][N_PARAMS][MAX_PARAM_ELEMS];
    float param[N_PARAMS][MAX_PARAM_ELEMS]; /* in the end, whole */
} drive_result;

typedef struct driver {
    rank_ctx *ctx;
    const train_case *c;
    drive_result *out;
    zx_layout *layout;
    zx_slots *slots;
    zx_plan *plan;
    zx_store *store;
    zx_unit_event trace[MAX_TRACE];
    int64_t n_trace;
    float grads[MAX_MICRO][N_PARAMS][MAX_PARAM_ELEMS]; /* sources of queued additions: alive until the sync */
    double totals[MAX_MICRO][2];
    char seen[MAX_MICRO][N_PARAMS][4 * MAX_PARAM_ELEMS]; /* what the forward read */
} driver;

static void mix_hash(uint64_t *hash, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        *hash = (*hash ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
}

static bool unit_trains(const zx_layout *l, int32_t unit)
{
    return l->units[unit].trainable;
}

/* The order of a micro-step; the driver below follows it. */
static int64_t micro_trace(const zx_layout *l, zx_unit_event *e)
{
    int64_t n = 0;
    e[n++] = (zx_unit_event){ZX_ACQUIRE, 0};
    for (int32_t u = 1; u < N_UNITS; u++) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        e[n++] = (zx_unit_event){ZX_RELEASE, u};
    }
    e[n++] = (zx_unit_event){ZX_GRAD, 0};
    for (int32_t u = N_UNITS - 1; u >= 1; u--) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        if (unit_trains(l, u)) e[n++] = (zx_unit_event){ZX_GRAD, u};
        e[n++] = (zx_unit_event){ZX_RELEASE, u};
        if (unit_trains(l, u)) e[n++] = (zx_unit_event){ZX_REDUCE, u};
    }
    e[n++] = (zx_unit_event){ZX_REDUCE, 0};
    e[n++] = (zx_unit_event){ZX_RELEASE, 0};
    return n;
}

static zx_status load_initial(driver *d)
{
    const zx_layout *l = d->layout;
    ZX_TRY(zx_store_load_begin(d->store));
    for (int i = 0; i < N_PARAMS; i++) {
        const zx_place *at = &l->places[i];
        const zx_range *range = &l->ranges[at->range];
        bool whole = d->ctx->world > 1 && d->c->stage == 0;
        int64_t from = whole ? 0 : d->ctx->rank * range->slice, to = whole ? range->n_padded : from + range->slice;
        char values[4 * MAX_PARAM_ELEMS];
        if (param_defs[i].tied_to >= 0) continue;
        for (int64_t k = 0; k < at->n; k++) {
            if (range->dtype == ZX_BF16)
                zx_store_bf16(values, k, initial_value(i, k));
            else
                zx_store_f32(values, k, initial_value(i, k));
        }
        int64_t begin = zx_max64(from, at->offset), end = zx_min64(to, at->offset + at->n);
        if (begin < end)
            ZX_TRY(zx_store_write_slice(d->store, at->range, ZX_SLICE_PARAM, begin, end - begin,
                                        zx_at(values, range->dtype, begin - at->offset)));
    }
    return zx_store_load_end(d->store);
}

static zx_status see_unit(driver *d, int32_t unit, int micro)
{
    void *base;
    ZX_TRY(zx_store_acquire(d->store, unit, d->ctx->stream, &base));
    for (int i = 0; i < N_PARAMS; i++) {
        const zx_range *range = &d->layout->ranges[d->layout->places[i].range];
        if (range->unit != unit || param_defs[i].n == 0) continue;
        CHECK(base != NULL);
        ZX_TRY(zx_stream_copy(d->ctx->stream, d->seen[micro][i], zx_store_param_addr(d->store, i),
                              (size_t)param_defs[i].n * zx_dtype_bytes(range->dtype)));
    }
    return ZX_OK;
}

static zx_status add_grads(driver *d, int32_t unit, int micro, int step)
{
    void *base;
    ZX_TRY(zx_store_grad(d->store, unit, d->ctx->stream, &base));
    for (int i = 0; i < N_PARAMS; i++) {
        if (param_defs[i].unit != unit || !has_gradient(i, micro) || param_defs[i].n == 0) continue;
        for (int64_t k = 0; k < param_defs[i].n; k++)
            d->grads[micro][i][k] = gradient(i, k, d->ctx->rank, micro, step);
        if (step == d->c->bad_step && i == 3 && d->ctx->rank == d->ctx->world - 1) d->grads[micro][i][7] = INFINITY;
        zx_sum_sources_args add = {.src = {d->grads[micro][i]},
                                   .n_src = 1,
                                   .src_dtype = ZX_F32,
                                   .out = zx_store_grad_addr(d->store, i),
                                   .out_dtype = ZX_F32,
                                   .n = param_defs[i].n,
                                   .accumulate = true};
        ZX_TRY(ZX_LAUNCH(d->ctx->stream, sum_sources, &add));
    }
    return ZX_OK;
}

static zx_status run_micro(driver *d, int micro, int step)
{
    zx_stream *stream = d->ctx->stream;
    void *base;
    ZX_TRY(zx_store_begin_pass(d->store));
    ZX_TRY(see_unit(d, 0, micro));
    for (int32_t u = 1; u < N_UNITS; u++) {
        ZX_TRY(see_unit(d, u, micro));
        ZX_TRY(zx_store_release(d->store, u, stream));
    }
    d->totals[micro][0] = total_loss(d->ctx->rank, micro, step);
    d->totals[micro][1] = total_count(d->ctx->rank, micro, step);
    ZX_TRY(zx_store_count(d->store, stream, d->totals[micro], ZX_F64));
    ZX_TRY(add_grads(d, 0, micro, step));
    for (int32_t u = N_UNITS - 1; u >= 1; u--) {
        ZX_TRY(zx_store_acquire(d->store, u, stream, &base));
        if (unit_trains(d->layout, u)) ZX_TRY(add_grads(d, u, micro, step));
        ZX_TRY(zx_store_release(d->store, u, stream));
        if (unit_trains(d->layout, u)) ZX_TRY(zx_store_reduce(d->store, u, stream));
    }
    ZX_TRY(zx_store_reduce(d->store, 0, stream));
    return zx_store_release(d->store, 0, stream);
}

static zx_status run_steps(driver *d)
{
    for (int step = 0; step < d->c->n_steps; step++) {
        zx_hyper hyper[N_GROUPS] = {hyper_of(d->c, 0, step), hyper_of(d->c, 1, step)};
        zx_step_options options = {.hyper = hyper, .n_groups = N_GROUPS, .max_norm = d->c->max_norm, .loss_scale = 1};
        for (int micro = 0; micro < d->c->n_micro; micro++)
            ZX_TRY(run_micro(d, micro, step));
        ZX_TRY(zx_store_step(d->store, d->ctx->stream, &options));
        ZX_TRY(zx_store_step_result(d->store, d->ctx->stream, &d->out->ctl[step]));
        mix_hash(&d->out->hash, &d->out->ctl[step], sizeof(zx_step_ctl));
        for (int micro = 0; micro < d->c->n_micro; micro++)
            for (int i = 0; i < N_PARAMS; i++)
                mix_hash(&d->out->hash, d->seen[micro][i],
                         (size_t)param_defs[i].n * zx_dtype_bytes(d->layout->ranges[d->layout->places[i].range].dtype));
    }
    return ZX_OK;
}

static zx_status read_own(driver *d, int i, zx_slice_kind kind, float *out)
{
    const zx_place *at = &d->layout->places[i];
    const zx_range *range = &d->layout->ranges[at->range];
    bool whole = d->c->stage == 0;
    int64_t from = whole ? 0 : d->ctx->rank * range->slice, to = whole ? range->n_padded : from + range->slice;
    int64_t begin = zx_max64(from, at->offset), end = zx_min64(to, at->offset + at->n);
    for (int64_t k = 0; k < MAX_PARAM_ELEMS; k++)
        out[k] = NAN;
    if (begin >= end) return ZX_OK;
    return zx_store_read_slice(d->store, at->range, kind, begin, end - begin, out + (begin - at->offset));
}

static zx_status read_results(driver *d)
{
    drive_result *out = d->out;
    zx_dtype dtype;
    out->stats = zx_store_stats_get(d->store);
    out->comm_sent = zx_comm_counters_get(d->ctx->comm).sent_elems;
    for (int i = 0; i < N_PARAMS; i++) {
        int32_t range = d->layout->places[i].range;
        for (int k = 0; k < 3; k++) {
            zx_slice_kind kind = (zx_slice_kind)(ZX_SLICE_MASTER + k);
            float *to = k == 0 ? out->master[i] : out->moment[k - 1][i];
            if (zx_store_has_slice(d->store, range, kind, &dtype)) ZX_TRY(read_own(d, i, kind, to));
        }
    }
    ZX_TRY(zx_store_begin_pass(d->store));
    ZX_TRY(see_unit(d, 0, 0));
    for (int32_t u = 1; u < N_UNITS; u++) {
        ZX_TRY(see_unit(d, u, 0));
        ZX_TRY(zx_store_release(d->store, u, d->ctx->stream));
    }
    ZX_TRY(zx_store_release(d->store, 0, d->ctx->stream));
    ZX_TRY(zx_stream_sync(d->ctx->stream));
    for (int i = 0; i < N_PARAMS; i++) {
        zx_dtype t = d->layout->ranges[d->layout->places[i].range].dtype;
        mix_hash(&out->hash, d->seen[0][i], (size_t)param_defs[i].n * zx_dtype_bytes(t));
        for (int64_t k = 0; k < param_defs[i].n; k++)
            out->param[i][k] = t == ZX_BF16 ? zx_load_bf16(d->seen[0][i], k) : zx_load_f32(d->seen[0][i], k);
    }
    return ZX_OK;
}

static zx_status drive_open(driver *d)
{
    const train_case *c = d->c;
    zx_store_config config = {.optimizer = c->optimizer, .poison = c->poison};
    ZX_TRY(model_layout(c->dtype, d->ctx->world, &d->layout));
    ZX_TRY(zx_policy_for_stage(c->stage, &config.policy));
    config.policy.reduce_at = c->reduce_at;
    config.policy.n_slots = c->n_slots;
    config.policy.prefetch = c->prefetch;
    config.policy.reduce_dtype = c->bf16_wire ? ZX_BF16 : ZX_F32;
    config.policy.n_moments = c->optimizer == ZX_OPTIMIZER_ADAMW ? 2 : 1;
    d->n_trace = micro_trace(d->layout, d->trace);
    ZX_TRY(zx_store_open(d->layout, &config, d->ctx->dev, d->ctx->comm, &d->store));
    ZX_TRY(zx_slots_open_for(d->layout, &config.policy, false, NULL, 0, &d->slots));
    ZX_TRY(zx_plan_open(d->layout, &config.policy, d->slots, d->trace, d->n_trace, &d->plan));
    ZX_TRY(zx_store_set_plan(d->store, d->plan));
    d->out->held = zx_store_bytes_held(d->store);
    d->out->planned = zx_layout_bytes(d->layout, &config.policy);
    d->out->planned_sent = zx_plan_sent_elems(d->layout, &config.policy, d->plan, c->n_micro);
    d->out->plan_gathers_first = d->plan->gathers_first;
    d->out->plan_gathers_next = d->plan->gathers_next;
    return ZX_OK;
}

static zx_status drive_body(driver *d)
{
    ZX_TRY(drive_open(d));
    ZX_TRY(load_initial(d));
    zx_store_stats_reset(d->store);
    zx_comm_counters_reset(d->ctx->comm);
    ZX_TRY(run_steps(d));
    return read_results(d);
}

/* A rank_fn: ctx->arg is a drive_result whose case is set. */
__attribute__((unused)) static zx_status drive(rank_ctx *ctx)
{
    driver *d = calloc(1, sizeof *d);
    d->ctx = ctx;
    d->out = ctx->arg;
    d->c = d->out->c;
    d->out->hash = 0xcbf29ce484222325u;
    zx_status rc = drive_body(d);
    if (rc != ZX_OK) zx_comm_abort(ctx->comm, zx_error_last()->text);
    /* also after a failure: queued work may still name the driver's buffers */
    if (zx_stream_sync(ctx->stream) != ZX_OK && rc == ZX_OK) rc = zx_error_last()->status;
    zx_store_close(d->store);
    zx_plan_close(d->plan);
    zx_slots_close(d->slots);
    zx_layout_close(d->layout);
    free(d);
    return rc;
}

#endif
