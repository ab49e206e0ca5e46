/* store_mini.h - a store of a few small parameters on one rank, for tests that say every verb themselves. Streams run
 * inline, so gradients are written directly. */
#ifndef ZX_TESTS_STORE_MINI_H
#define ZX_TESTS_STORE_MINI_H

#include "kernels/load.h"
#include "store_world.h"

typedef struct mini {
    rank_ctx *ctx;
    zx_layout *layout;
    zx_store *store;
    zx_step_ctl ctl;
    int32_t n_groups;
} mini;

typedef struct mini_config {
    int stage;
    zx_reduce_at reduce_at;
    int n_slots, n_moments;
    zx_optimizer optimizer;
    bool poison;
} mini_config;

enum { MINI_MAX_UNITS = 8 };
static const char *const mini_units[MINI_MAX_UNITS] = {"R", "b0", "b1", "b2", "b3", "b4", "b5", "b6"};

static zx_param mini_param(const char *name, int32_t unit, int64_t n)
{
    zx_param p = {.name = name, .unit = unit, .trainable = true, .tied_to = -1, .ndim = 1};
    p.shape[0] = p.global_shape[0] = n;
    return p;
}

__attribute__((unused)) static zx_status mini_open(mini *m, rank_ctx *ctx, const zx_param *params, int64_t n_params,
                                                   int32_t n_units, mini_config c)
{
    zx_store_config config = {.optimizer = c.optimizer, .poison = c.poison};
    *m = (mini){.ctx = ctx};
    ZX_TRY(zx_policy_for_stage(c.stage, &config.policy));
    config.policy.reduce_at = c.reduce_at;
    config.policy.n_moments = c.n_moments;
    if (c.n_slots > 0) config.policy.n_slots = config.policy.n_grad_slots = c.n_slots;
    ZX_TRY(zx_layout_open(params, n_params, mini_units, n_units, ctx->world, 4096, &m->layout));
    return zx_store_open(m->layout, &config, ctx->dev, ctx->comm, &m->store);
}

__attribute__((unused)) static void mini_close(mini *m)
{
    zx_store_close(m->store);
    zx_layout_close(m->layout);
    *m = (mini){0};
}

/* Sets a parameter to values (float32, or rounded to bfloat16), each rank what it owns. */
__attribute__((unused)) static zx_status mini_set(mini *m, int64_t param, const float *values)
{
    const zx_place *at = &m->layout->places[param];
    const zx_range *range = &m->layout->ranges[at->range];
    char stored[4096];
    for (int64_t k = 0; k < at->n; k++) {
        if (range->dtype == ZX_BF16)
            zx_store_bf16(stored, k, values[k]);
        else
            zx_store_f32(stored, k, values[k]);
    }
    ZX_TRY(zx_store_load_begin(m->store));
    for (int64_t k = 0; k < at->n; k++) { /* an element at a time; those of other ranks are refused */
        zx_status rc = zx_store_write_slice(m->store, at->range, ZX_SLICE_PARAM, at->offset + k, 1,
                                            zx_at(stored, range->dtype, k));
        if (rc == ZX_ERR_ARG)
            zx_error_clear();
        else
            ZX_TRY(rc);
    }
    return zx_store_load_end(m->store);
}

__attribute__((unused)) static zx_status mini_get(mini *m, int64_t param, float *values)
{
    const zx_place *at = &m->layout->places[param];
    const zx_range *range = &m->layout->ranges[at->range];
    void *base;
    ZX_TRY(zx_store_acquire(m->store, range->unit, m->ctx->stream, &base));
    const void *p = zx_store_param_addr(m->store, param);
    for (int64_t k = 0; k < at->n; k++)
        values[k] = range->dtype == ZX_BF16 ? zx_load_bf16(p, k) : zx_load_f32(p, k);
    return zx_store_release(m->store, range->unit, m->ctx->stream);
}

/* grad(), then adds; no reduce. */
__attribute__((unused)) static zx_status mini_add(mini *m, int64_t param, const float *g)
{
    const zx_place *at = &m->layout->places[param];
    void *base;
    ZX_TRY(zx_store_grad(m->store, m->layout->ranges[at->range].unit, m->ctx->stream, &base));
    float *grad = zx_store_grad_addr(m->store, param);
    for (int64_t k = 0; k < at->n; k++)
        grad[k] += g[k];
    return ZX_OK;
}

__attribute__((unused)) static zx_status mini_reduce(mini *m, int32_t unit)
{
    return zx_store_reduce(m->store, unit, m->ctx->stream);
}

__attribute__((unused)) static zx_status mini_count(mini *m, double loss, double n)
{
    double totals[2] = {loss, n};
    return zx_store_count(m->store, m->ctx->stream, totals, ZX_F64);
}

__attribute__((unused)) static zx_status mini_step(mini *m, double lr, double max_norm)
{
    zx_hyper h = {
        .lr = lr, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .bias_correction1 = 0.1, .bias_correction2 = 0.01};
    zx_step_options options = {.hyper = &h, .n_groups = m->layout->n_groups, .max_norm = max_norm, .loss_scale = 1};
    ZX_TRY(zx_store_step(m->store, m->ctx->stream, &options));
    return zx_store_step_result(m->store, m->ctx->stream, &m->ctl);
}

/* Runs fn at worlds lo .. hi, every stage and both reduce_at; the case reaches it through ctx->arg. */
__attribute__((unused)) static void mini_everywhere(int lo, int hi, rank_fn fn)
{
    for (int world = lo; world <= hi; world++)
        for (int stage = 0; stage < 4; stage++)
            for (int at = 0; at < 2; at++) {
                mini_config c = {.stage = stage, .reduce_at = (zx_reduce_at)at, .optimizer = ZX_OPTIMIZER_SGD};
                if (!run_ranks(world, 0, 10, fn, &c, 0))
                    printf("    world %d stage %d reduce_at %d\n", world, stage, at);
            }
}

#endif
