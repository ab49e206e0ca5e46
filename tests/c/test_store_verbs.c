/* The verbs one by one: the traced step of the design, what is refused, deviation from a plan, an abandoned pass. */
#include "store/states.h"
#include "store_mini.h"

enum { N_UNITS = 4, N_ELEMS = 1000 };

static void chain_params(zx_param *p)
{
    for (int u = 0; u < N_UNITS; u++)
        p[u] = mini_param(mini_units[u], u, N_ELEMS);
}

static zx_status chain_open(mini *m, rank_ctx *ctx, mini_config c)
{
    zx_param p[N_UNITS];
    float values[N_ELEMS];
    chain_params(p);
    ZX_TRY(mini_open(m, ctx, p, N_UNITS, N_UNITS, c));
    for (int u = 0; u < N_UNITS; u++) {
        for (int k = 0; k < N_ELEMS; k++)
            values[k] = (float)(u * N_ELEMS + k);
        ZX_TRY(mini_set(m, u, values));
    }
    zx_store_stats_reset(m->store);
    return ZX_OK;
}

static int64_t chain_trace(zx_unit_event *e)
{
    int64_t n = 0;
    e[n++] = (zx_unit_event){ZX_ACQUIRE, 0};
    for (int u = 1; u < N_UNITS; u++) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        e[n++] = (zx_unit_event){ZX_RELEASE, u};
    }
    e[n++] = (zx_unit_event){ZX_GRAD, 0};
    for (int u = N_UNITS - 1; u > 0; u--) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        e[n++] = (zx_unit_event){ZX_GRAD, u};
        e[n++] = (zx_unit_event){ZX_RELEASE, u};
        e[n++] = (zx_unit_event){ZX_REDUCE, u};
    }
    e[n++] = (zx_unit_event){ZX_REDUCE, 0};
    e[n++] = (zx_unit_event){ZX_RELEASE, 0};
    return n;
}

static zx_status run_event(mini *m, zx_unit_event e)
{
    void *base;
    zx_stream *stream = m->ctx->stream;
    switch (e.verb) {
    case ZX_ACQUIRE:
        ZX_TRY(zx_store_acquire(m->store, e.unit, stream, &base));
        for (int k = 0; k < N_ELEMS; k += 333)
            CHECK(((float *)base)[k] == (float)(e.unit * N_ELEMS + k));
        return ZX_OK;
    case ZX_RELEASE:
        return zx_store_release(m->store, e.unit, stream);
    case ZX_GRAD:
        return zx_store_grad(m->store, e.unit, stream, &base);
    case ZX_REDUCE:
        return zx_store_reduce(m->store, e.unit, stream);
    }
    return ZX_OK;
}

/* States after each verb, as in the table of the design: parameters of R b0 b1 b2, gradients of R b0 b1 b2; capitals
 * S G L R for parameters, N F R for gradients. */
static const char *const golden[] = {
    "acquire R  LGSS NNNN", "acquire b0 LLGS NNNN", "release b0 LRGS NNNN", "acquire b1 LSLG NNNN",
    "release b1 LSRG NNNN", "acquire b2 LSRL NNNN", "release b2 LSRR NNNN", "grad R     LSRR FNNN",
    "acquire b2 LSRL FNNN", "grad b2    LSRL FNNF", "release b2 LSRR FNNF", "reduce b2  LSRR FNNR",
    "acquire b1 LGLS FNNR", "grad b1    LGLS FNFR", "release b1 LGRS FNFR", "reduce b1  LGRS FNRR",
    "acquire b0 LLRS FNRR", "grad b0    LLRS FFRN", "release b0 LRRS FFRN", "reduce b0  LRRS FRRN",
    "reduce R   LRRS RRRN", "release R  RRRS RRRN", "step       SSSS NNNN",
};

static void write_states(const mini *m, const char *verb, const char *unit, char *out)
{
    char name[24];
    snprintf(name, sizeof name, "%s %s", verb, unit);
    int at = sprintf(out, "%-10s ", name);
    for (int32_t u = 0; u < N_UNITS; u++)
        out[at++] = zx_store_param_state_name(m->store, u)[0];
    out[at++] = ' ';
    for (int32_t u = 0; u < N_UNITS; u++)
        out[at++] = zx_store_grad_state_name(m->store, u)[0];
    out[at] = '\0';
}

static zx_status traced_step(rank_ctx *ctx)
{
    static const char *const verbs[] = {"acquire", "release", "grad", "reduce"};
    zx_unit_event e[64];
    int64_t n = chain_trace(e);
    char line[64];
    zx_plan *plan;
    zx_policy policy;
    mini m;
    ZX_TRY(zx_policy_for_stage(3, &policy));
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .optimizer = ZX_OPTIMIZER_SGD}));
    ZX_TRY(zx_plan_open(m.layout, &policy, zx_store_slots(m.store), e, n, &plan));
    ZX_TRY(zx_store_set_plan(m.store, plan));
    ZX_TRY(zx_store_begin_pass(m.store));
    for (int64_t i = 0; i < n; i++) {
        ZX_TRY(run_event(&m, e[i]));
        write_states(&m, verbs[e[i].verb], mini_units[e[i].unit], line);
        if (!CHECK(strcmp(line, golden[i]) == 0)) printf("    got  %s\n    want %s\n", line, golden[i]);
    }
    zx_store_stats s = zx_store_stats_get(m.store);
    CHECK_EQ_I64(s.n_gathers, 5);
    CHECK_EQ_I64(s.n_blocking_gathers, 1); /* the root's: nothing runs before it */
    CHECK_EQ_I64(s.n_hits, 2);
    CHECK_EQ_I64(s.n_reductions, 4);
    CHECK_EQ_I64(s.max_live, 2);
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 0, 0));
    write_states(&m, "step", "", line);
    if (!CHECK(strcmp(line, golden[n]) == 0)) printf("    got  %s\n    want %s\n", line, golden[n]);
    CHECK_EQ_I64(zx_store_stats_get(m.store).n_reductions, 4);
    mini_close(&m);
    zx_plan_close(plan);
    return ZX_OK;
}

static void test_traced_step(void)
{
    CHECK(run_ranks(2, 0, 10, traced_step, NULL, 0));
}

/* Another order than planned, and a pass that ends early: right values, every further gather on demand. */
static zx_status deviating(rank_ctx *ctx)
{
    static const zx_unit_event other[] = {{ZX_ACQUIRE, 0}, {ZX_ACQUIRE, 3}, {ZX_RELEASE, 3}, {ZX_ACQUIRE, 1},
                                          {ZX_RELEASE, 1}, {ZX_ACQUIRE, 2}, {ZX_RELEASE, 2}, {ZX_RELEASE, 0}};
    zx_unit_event e[64];
    int64_t n = chain_trace(e);
    zx_policy policy;
    zx_plan *plan;
    mini m;
    ZX_TRY(zx_policy_for_stage(3, &policy));
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .optimizer = ZX_OPTIMIZER_SGD, .poison = true}));
    ZX_TRY(zx_plan_open(m.layout, &policy, zx_store_slots(m.store), e, n, &plan));
    ZX_TRY(zx_store_set_plan(m.store, plan));
    ZX_TRY(zx_store_begin_pass(m.store));
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++)
        ZX_TRY(run_event(&m, other[i]));
    zx_store_stats s = zx_store_stats_get(m.store);
    CHECK_EQ_I64(s.n_gathers, 5); /* b0 was prefetched after R and evicted by b2 before its use */
    CHECK_EQ_I64(s.n_blocking_gathers, 4);
    ZX_TRY(zx_store_begin_pass(m.store)); /* the plan is followed again from its start */
    zx_store_stats_reset(m.store);
    for (int64_t i = 0; i < n; i++)
        ZX_TRY(run_event(&m, e[i]));
    CHECK_EQ_I64(zx_store_stats_get(m.store).n_blocking_gathers, 0);
    ZX_TRY(zx_store_set_plan(m.store, NULL));
    ZX_TRY(zx_store_begin_pass(m.store));
    for (size_t i = 0; i < sizeof other / sizeof other[0]; i++)
        ZX_TRY(run_event(&m, other[i]));
    CHECK(strcmp(zx_store_param_state_name(m.store, 3), "SHARDED") == 0);
    ZX_TRY(zx_store_prefetch(m.store, 3));
    CHECK(strcmp(zx_store_param_state_name(m.store, 3), "GATHERING") == 0);
    ZX_TRY(run_event(&m, (zx_unit_event){ZX_ACQUIRE, 3}));
    ZX_TRY(run_event(&m, (zx_unit_event){ZX_RELEASE, 3}));
    mini_close(&m);
    zx_plan_close(plan);
    return ZX_OK;
}

static void test_deviation(void)
{
    CHECK(run_ranks(2, 0, 10, deviating, NULL, 0));
    CHECK(run_ranks(3, 0, 10, deviating, NULL, 0));
}

/* ---- what is refused, and that the store is as before ---- */

static zx_status refused(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    zx_stream *stream = ctx->stream;
    bool sharded = c.stage == 3 && ctx->world > 1, micro = c.reduce_at == ZX_REDUCE_MICRO && ctx->world > 1;
    void *base;
    mini m;
    c.n_slots = 1;
    ZX_TRY(chain_open(&m, ctx, c));
    CHECK_STATUS(zx_store_acquire(m.store, 4, stream, &base), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_acquire(m.store, -1, stream, &base), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_release(m.store, 1, stream), ZX_ERR_STATE);
    CHECK_ERROR_HAS(sharded ? "unit b0 are SHARDED, where last release is not possible" : "unit b0 are ");
    CHECK_STATUS(mini_reduce(&m, 1), ZX_ERR_STATE);
    CHECK_ERROR_HAS("the gradient of unit b0 is NONE, where reduce is not possible");
    ZX_TRY(zx_store_acquire(m.store, 1, stream, &base));
    ZX_TRY(zx_store_acquire(m.store, 1, stream, &base));
    CHECK_STATUS(mini_step(&m, 0.1, 0), ZX_ERR_STATE);
    CHECK_ERROR_HAS("step while unit b0 is LIVE");
    CHECK_STATUS(zx_store_load_begin(m.store), ZX_ERR_STATE);
    if (sharded) {
        CHECK_STATUS(zx_store_acquire(m.store, 2, stream, &base), ZX_ERR_STATE);
        CHECK_ERROR_HAS("unit b1 cannot be gathered: its slot 1 holds unit b0, which is LIVE");
        CHECK_ERROR_HAS("raise n_slots from 1");
        CHECK_STATUS(zx_store_prefetch(m.store, 2), ZX_ERR_STATE);
        CHECK(base == NULL);
    }
    ZX_TRY(zx_store_release(m.store, 1, stream));
    CHECK(strcmp(zx_store_param_state_name(m.store, 1), "LIVE") == 0);
    ZX_TRY(zx_store_release(m.store, 1, stream));
    CHECK(strcmp(zx_store_param_state_name(m.store, 1), "RESIDENT") == 0);
    ZX_TRY(run_event(&m, (zx_unit_event){ZX_ACQUIRE, 2})); /* after the refusals: still right */
    ZX_TRY(run_event(&m, (zx_unit_event){ZX_RELEASE, 2}));
    ZX_TRY(zx_store_grad(m.store, 1, stream, &base));
    if (micro) {
        CHECK_STATUS(zx_store_grad(m.store, 2, stream, &base), ZX_ERR_STATE);
        CHECK_ERROR_HAS("slot 1 holds that of unit b0, which is not reduced yet");
    }
    ZX_TRY(mini_reduce(&m, 1));
    CHECK_STATUS(mini_reduce(&m, 1), ZX_ERR_STATE);
    mini_close(&m);
    return ZX_OK;
}

static void test_illegal_events(void)
{
    mini_everywhere(1, 2, refused);
}

static zx_status bad_arguments(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    zx_param p[] = {mini_param("w", 0, 600), mini_param("frozen", 1, 5), mini_param("g", 1, 0)};
    zx_hyper h[2] = {{.momentum = 0.9}, {.momentum = 0}};
    zx_step_options options = {.hyper = h, .n_groups = 2, .loss_scale = 1};
    bool full = c.stage == 0 || ctx->world == 1;
    float values[600] = {0};
    void *base;
    zx_dtype dtype;
    mini m;
    p[1].trainable = false;
    p[2].trainable = false;
    c.optimizer = ZX_OPTIMIZER_ADAMW;
    CHECK_STATUS(mini_open(&m, ctx, p, 3, 2, c), ZX_ERR_ARG);
    CHECK_ERROR_HAS("AdamW keeps 2 to 2 moments");
    mini_close(&m);
    p[0].reduce_group = 1;
    c.optimizer = ZX_OPTIMIZER_SGD;
    CHECK_STATUS(mini_open(&m, ctx, p, 3, 2, c), ZX_ERR_UNSUPPORTED);
    mini_close(&m);
    p[0].reduce_group = 0;
    ZX_TRY(mini_open(&m, ctx, p, 3, 2, c));
    CHECK_STATUS(zx_store_step(m.store, ctx->stream, &options), ZX_ERR_ARG);
    CHECK_ERROR_HAS("2 option groups, but the layout has 1");
    options.n_groups = 1;
    CHECK_STATUS(zx_store_step(m.store, ctx->stream, &options), ZX_ERR_ARG);
    CHECK_ERROR_HAS("momentum 0.9");
    options.hyper = &h[1];
    options.loss_scale = 0;
    CHECK_STATUS(zx_store_step(m.store, ctx->stream, &options), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_step_result(m.store, ctx->stream, &m.ctl), ZX_ERR_STATE);
    CHECK_STATUS(zx_store_grad(m.store, 1, ctx->stream, &base), ZX_ERR_STATE);
    CHECK_ERROR_HAS("grad of unit b0: all its parameters are frozen");
    CHECK_STATUS(zx_store_count(m.store, ctx->stream, values, ZX_BF16), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_write_slice(m.store, 0, ZX_SLICE_PARAM, 0, 1, values), ZX_ERR_STATE);
    CHECK_STATUS(zx_store_load_end(m.store), ZX_ERR_STATE);
    ZX_TRY(zx_store_load_begin(m.store));
    CHECK_STATUS(zx_store_acquire(m.store, 0, ctx->stream, &base), ZX_ERR_STATE);
    CHECK_STATUS(zx_store_write_slice(m.store, 0, ZX_SLICE_MOMENT1, 0, 1, values), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_write_slice(m.store, 1, ZX_SLICE_MASTER, 0, 1, values), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_write_slice(m.store, 0, ZX_SLICE_PARAM, -1, 1, values), ZX_ERR_ARG);
    CHECK_STATUS(zx_store_write_slice(m.store, 0, ZX_SLICE_PARAM, 1 << 20, 1, values), ZX_ERR_ARG);
    CHECK_ERROR_HAS("parameters [1048576, 1048577) of range 0 of unit R");
    CHECK_STATUS(zx_store_write_slice(m.store, 0, ZX_SLICE_PARAM, 0, 600, values),
                 full || (ctx->rank == 0 && m.layout->ranges[0].slice >= 600) ? ZX_OK : ZX_ERR_ARG);
    ZX_TRY(zx_store_load_end(m.store));
    CHECK(zx_store_has_slice(m.store, 0, ZX_SLICE_MASTER, &dtype) && dtype == ZX_F32);
    CHECK(!zx_store_has_slice(m.store, 1, ZX_SLICE_MASTER, &dtype));
    CHECK(!zx_store_has_slice(m.store, 0, ZX_SLICE_MOMENT1, &dtype));
    CHECK_EQ_I64(zx_store_version(m.store), 1);
    mini_close(&m);
    return ZX_OK;
}

static void test_bad_arguments(void)
{
    mini_everywhere(1, 2, bad_arguments);
}

/* ---- an abandoned pass ---- */

/* One micro-step: gradient u + 1 everywhere in unit u, for units [from, N_UNITS). */
static zx_status micro_step(mini *m, int from, int to)
{
    float g[N_ELEMS];
    void *base;
    ZX_TRY(zx_store_begin_pass(m->store));
    ZX_TRY(mini_count(m, 1, 1));
    for (int u = from; u < to; u++) {
        for (int k = 0; k < N_ELEMS; k++)
            g[k] = (float)(u + 1);
        ZX_TRY(zx_store_acquire(m->store, u, m->ctx->stream, &base));
        ZX_TRY(mini_add(m, u, g));
        ZX_TRY(zx_store_release(m->store, u, m->ctx->stream));
        ZX_TRY(mini_reduce(m, u));
    }
    return ZX_OK;
}

static zx_status check_stepped(mini *m, double scale)
{
    float out[N_ELEMS];
    for (int u = 0; u < N_UNITS; u++) {
        ZX_TRY(mini_get(m, u, out));
        for (int k = 0; k < N_ELEMS; k += 111)
            CHECK_NEAR(out[k], u * N_ELEMS + k - scale * (u + 1), 1e-6);
    }
    return ZX_OK;
}

static zx_status abandoned(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    void *base;
    mini m;
    c.poison = true;
    ZX_TRY(chain_open(&m, ctx, c));
    /* in the forward, before and between micro-steps: as if it had not been */
    for (int micro = 0; micro < 2; micro++) {
        ZX_TRY(zx_store_begin_pass(m.store));
        ZX_TRY(zx_store_acquire(m.store, 0, ctx->stream, &base));
        ZX_TRY(zx_store_acquire(m.store, 1, ctx->stream, &base));
        ZX_TRY(zx_store_acquire(m.store, 1, ctx->stream, &base));
        ZX_TRY(mini_count(&m, 100, 7));
        ZX_TRY(mini_count(&m, 100, 7)); /* a pass may count in parts */
        zx_store_abandon_pass(m.store, ctx->stream);
        CHECK(strcmp(zx_store_param_state_name(m.store, 1), "RESIDENT") == 0);
        ZX_TRY(micro_step(&m, 0, N_UNITS));
    }
    ZX_TRY(mini_step(&m, 1, 0));
    CHECK(m.ctl.denominator == 2 * ctx->world && m.ctl.loss_sum == 2 * ctx->world);
    ZX_TRY(check_stepped(&m, 1));
    /* in the backward of the first micro-step, after a reduction and with a gradient under way: likewise */
    ZX_TRY(micro_step(&m, 1, 3));
    ZX_TRY(zx_store_acquire(m.store, 3, ctx->stream, &base));
    ZX_TRY(zx_store_grad(m.store, 3, ctx->stream, &base));
    *(float *)base = 1e30f;
    zx_store_abandon_pass(m.store, ctx->stream);
    ZX_TRY(micro_step(&m, 0, N_UNITS));
    ZX_TRY(mini_step(&m, 1, 0));
    CHECK(m.ctl.denominator == ctx->world);
    ZX_TRY(check_stepped(&m, 2));
    /* in the backward of the second: what was added cannot be told apart any more */
    ZX_TRY(micro_step(&m, 0, N_UNITS));
    ZX_TRY(micro_step(&m, 1, 3));
    zx_store_abandon_pass(m.store, ctx->stream);
    CHECK_STATUS(mini_step(&m, 1, 0), ZX_ERR_STATE);
    CHECK_ERROR_HAS("call zero_grad");
    ZX_TRY(zx_store_zero_grad(m.store, ctx->stream));
    ZX_TRY(micro_step(&m, 0, N_UNITS));
    ZX_TRY(mini_step(&m, 1, 0));
    ZX_TRY(check_stepped(&m, 3));
    /* zero_grad with everything pending */
    ZX_TRY(micro_step(&m, 0, N_UNITS));
    ZX_TRY(zx_store_grad(m.store, 2, ctx->stream, &base));
    ZX_TRY(zx_store_zero_grad(m.store, ctx->stream));
    ZX_TRY(micro_step(&m, 2, N_UNITS));
    ZX_TRY(mini_step(&m, 0, 0));
    CHECK_NEAR(m.ctl.norm, sqrt(N_ELEMS * (9.0 + 16.0)), 1e-12);
    ZX_TRY(check_stepped(&m, 3));
    mini_close(&m);
    return ZX_OK;
}

static void test_abandoned_pass(void)
{
    mini_everywhere(1, 3, abandoned);
}

/* ---- slots of the caller's ---- */

/* b0 and b2 are used together: in index order they share a slot of two, coloured from the trace they do not. */
static zx_status given_slots(rank_ctx *ctx)
{
    static const zx_unit_event trace[] = {{ZX_ACQUIRE, 1}, {ZX_ACQUIRE, 3}, {ZX_RELEASE, 1}, {ZX_RELEASE, 3},
                                          {ZX_GRAD, 1},    {ZX_GRAD, 3},    {ZX_REDUCE, 1},  {ZX_REDUCE, 3}};
    enum { N_EVENTS = sizeof trace / sizeof trace[0] };
    zx_param p[N_UNITS];
    zx_store_config config = {.optimizer = ZX_OPTIMIZER_SGD};
    zx_slots *slots, *grad_slots;
    void *base;
    mini m;
    chain_params(p);
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .optimizer = ZX_OPTIMIZER_SGD}));
    ZX_TRY(run_event(&m, trace[0]));
    CHECK_STATUS(zx_store_acquire(m.store, 3, ctx->stream, &base), ZX_ERR_STATE);
    mini_close(&m);
    ZX_TRY(zx_policy_for_stage(3, &config.policy));
    config.policy.n_moments = 0;
    ZX_TRY(zx_layout_open(p, N_UNITS, mini_units, N_UNITS, ctx->world, 4096, &m.layout));
    ZX_TRY(zx_slots_open_for(m.layout, &config.policy, false, trace, N_EVENTS, &slots));
    ZX_TRY(zx_slots_open_for(m.layout, &config.policy, true, trace, N_EVENTS, &grad_slots));
    config.slots = slots;
    config.grad_slots = grad_slots;
    ZX_TRY(zx_store_open(m.layout, &config, ctx->dev, ctx->comm, &m.store));
    zx_store_bytes held = zx_store_bytes_held(m.store);
    zx_store_bytes planned = zx_slots_store_bytes(m.layout, &config.policy, slots, grad_slots);
    CHECK(memcmp(&held, &planned, sizeof held) == 0);
    m.ctx = ctx;
    for (int i = 0; i < N_EVENTS; i++) {
        if (trace[i].verb == ZX_ACQUIRE)
            ZX_TRY(zx_store_acquire(m.store, trace[i].unit, ctx->stream, &base));
        else
            ZX_TRY(run_event(&m, trace[i]));
    }
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 1, 0));
    zx_store_close(m.store);
    slots->slot_of[1] = 7;
    CHECK_STATUS(zx_store_open(m.layout, &config, ctx->dev, ctx->comm, &m.store), ZX_ERR_ARG);
    CHECK_ERROR_HAS("unit b0 needs");
    mini_close(&m);
    zx_slots_close(slots);
    zx_slots_close(grad_slots);
    return ZX_OK;
}

static void test_given_slots(void)
{
    CHECK(run_ranks(2, 0, 10, given_slots, NULL, 0));
}

/* ---- poison, streams, broken ---- */

static zx_status poisoned(rank_ctx *ctx)
{
    void *params, *grads;
    mini m;
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .optimizer = ZX_OPTIMIZER_SGD, .poison = true}));
    ZX_TRY(zx_store_acquire(m.store, 1, ctx->stream, &params));
    ZX_TRY(zx_store_grad(m.store, 1, ctx->stream, &grads));
    CHECK(((float *)grads)[5] == 0 && ((float *)params)[5] == N_ELEMS + 5);
    ZX_TRY(zx_store_release(m.store, 1, ctx->stream));
    ZX_TRY(mini_reduce(&m, 1));
    CHECK(isnan(((float *)grads)[5])); /* reduced: nobody may read it */
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 0, 0));
    CHECK(isnan(((float *)params)[5])); /* of an older version */
    ZX_TRY(zx_store_grad(m.store, 1, ctx->stream, &grads));
    CHECK(((float *)grads)[5] == 0);
    mini_close(&m);
    return ZX_OK;
}

static void test_poison(void)
{
    CHECK(run_ranks(2, 0, 10, poisoned, NULL, 0));
}

/* A unit acquired and released on two delayed streams is not overwritten under either. */
static zx_status two_streams(rank_ctx *ctx)
{
    zx_stream *other;
    void *base;
    static float seen[2][2][MAX_WORLD][N_ELEMS];
    mini m;
    ZX_TRY(zx_stream_open(ctx->dev, "other", &other));
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .n_slots = 1, .optimizer = ZX_OPTIMIZER_SGD, .poison = true}));
    for (int u = 1; u <= 2; u++) {
        zx_stream *streams[2] = {ctx->stream, other};
        for (int k = 0; k < 2; k++) {
            ZX_TRY(zx_store_acquire(m.store, u, streams[k], &base));
            ZX_TRY(zx_stream_copy(streams[k], seen[u - 1][k][ctx->rank], base, sizeof seen[0][0][0]));
        }
        ZX_TRY(zx_store_release(m.store, u, other));
        ZX_TRY(zx_store_release(m.store, u, ctx->stream));
    }
    ZX_TRY(zx_stream_sync(ctx->stream));
    ZX_TRY(zx_stream_sync(other));
    for (int u = 1; u <= 2; u++)
        for (int k = 0; k < 2; k++)
            for (int i = 0; i < N_ELEMS; i++)
                CHECK(seen[u - 1][k][ctx->rank][i] == (float)(u * N_ELEMS + i));
    mini_close(&m);
    zx_stream_close(other);
    return ZX_OK;
}

static void test_two_streams(void)
{
    for (uint64_t seed = 0; seed <= 30; seed++)
        CHECK(run_ranks(2, seed, 10, two_streams, NULL, 0));
}

/* A lost communicator breaks the store for good, with one and the same error. */
static zx_status broken(rank_ctx *ctx)
{
    void *base;
    mini m;
    ZX_TRY(chain_open(&m, ctx, (mini_config){.stage = 3, .optimizer = ZX_OPTIMIZER_SGD}));
    ZX_TRY(zx_bootstrap_barrier(ctx->bs, "before"));
    zx_comm_abort(ctx->comm, "the test gives up");
    CHECK_STATUS(zx_store_acquire(m.store, 1, ctx->stream, &base), ZX_ERR_PEER);
    CHECK_ERROR_HAS("the test gives up");
    CHECK_STATUS(zx_store_begin_pass(m.store), ZX_ERR_PEER);
    CHECK_STATUS(mini_step(&m, 1, 0), ZX_ERR_PEER);
    CHECK_ERROR_HAS("the test gives up");
    mini_close(&m);
    zx_error_clear();
    return ZX_OK;
}

static void test_broken(void)
{
    CHECK(run_ranks(2, 0, 10, broken, NULL, 0));
}

/* Every (state, event) moves or names both. */
static void test_tables(void)
{
    int n_legal = 0;
    for (int s = 0; s < ZX_N_PARAM_STATES; s++)
        for (int e = 0; e < ZX_N_PARAM_EVENTS; e++) {
            zx_param_state state = (zx_param_state)s;
            zx_status rc = zx_param_state_move(&state, (zx_param_event)e, "unit-name");
            n_legal += rc == ZX_OK;
            if (rc == ZX_OK) continue;
            CHECK(rc == ZX_ERR_STATE && state == (zx_param_state)s);
            CHECK_ERROR_HAS(zx_param_state_name((zx_param_state)s));
            CHECK_ERROR_HAS("unit-name");
        }
    CHECK_EQ_I64(n_legal, 13);
    n_legal = 0;
    for (int s = 0; s < ZX_N_GRAD_STATES; s++)
        for (int e = 0; e < ZX_N_GRAD_EVENTS; e++) {
            zx_grad_state state = (zx_grad_state)s;
            zx_status rc = zx_grad_state_move(&state, (zx_grad_event)e, "unit-name");
            n_legal += rc == ZX_OK;
            if (rc == ZX_OK) continue;
            CHECK(rc == ZX_ERR_STATE && state == (zx_grad_state)s);
            CHECK_ERROR_HAS(zx_grad_state_name((zx_grad_state)s));
            CHECK_ERROR_HAS("unit-name");
        }
    CHECK_EQ_I64(n_legal, 11);
}

int main(void)
{
    RUN(test_tables);
    RUN(test_traced_step);
    RUN(test_deviation);
    RUN(test_illegal_events);
    RUN(test_bad_arguments);
    RUN(test_abandoned_pass);
    RUN(test_given_slots);
    RUN(test_poison);
    RUN(test_two_streams);
    RUN(test_broken);
    return check_report();
}
