/* What breaks for people who train with sharded states, as small inputs with the right answer (cases A1 ... C2). */
#include "store_mini.h"

/* A1: tensors without elements keep their place and disturb nobody: first, last, and alone in a unit. */
static zx_status case_a1(rank_ctx *ctx)
{
    for (int order = 0; order < 3; order++) {
        zx_param z = mini_param("z", order == 2, 0);
        z.ndim = 2;
        z.shape[1] = z.global_shape[1] = 8;
        zx_param a = mini_param("a", 0, 8), c = mini_param("c", 0, 24);
        zx_param first[] = {z, a, c}, last[] = {a, c, z};
        int ia = order == 1 ? 0 : 1, ic = ia + 1, iz = order == 1 ? 2 : 0;
        mini m;
        float ones[24], g[24], out[24];
        for (int k = 0; k < 24; k++)
            ones[k] = 1;
        ZX_TRY(mini_open(&m, ctx, order == 1 ? last : first, 3, 2, *(mini_config *)ctx->arg));
        ZX_TRY(mini_set(&m, ia, ones));
        ZX_TRY(mini_set(&m, ic, ones));
        ZX_TRY(mini_set(&m, iz, ones));
        for (int k = 0; k < 24; k++)
            g[k] = 2.0f / 8;
        ZX_TRY(mini_add(&m, ia, g));
        for (int k = 0; k < 24; k++)
            g[k] = 2.0f / 24;
        ZX_TRY(mini_add(&m, ic, g));
        ZX_TRY(mini_add(&m, iz, g));
        if (order == 2) ZX_TRY(mini_reduce(&m, 1));
        ZX_TRY(mini_reduce(&m, 0));
        ZX_TRY(mini_count(&m, 0, 1));
        ZX_TRY(mini_step(&m, 0.1, 0));
        ZX_TRY(mini_get(&m, ia, out));
        for (int k = 0; k < 8; k++)
            CHECK_NEAR(out[k], 0.975, 1e-6);
        ZX_TRY(mini_get(&m, ic, out));
        for (int k = 0; k < 24; k++)
            CHECK_NEAR(out[k], 0.991667, 1e-6);
        ZX_TRY(mini_get(&m, iz, out));
        CHECK(m.layout->params[iz].shape[0] == 0 && m.layout->params[iz].shape[1] == 8);
        mini_close(&m);
    }
    return ZX_OK;
}

/* A2: a tied tensor is one tensor; rows that the world does not divide all learn. */
static zx_status case_a2(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("in", 0, 5), mini_param("out", 0, 5)};
    float e[5] = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f}, as_input[5] = {0}, as_output[5], out[5];
    static const double want[5] = {0.05, 0.15, 0.25, 0.35, 0.30};
    mini m;
    p[1].tied_to = 0;
    ZX_TRY(mini_open(&m, ctx, p, 2, 1, *(mini_config *)ctx->arg));
    CHECK(zx_store_param_addr(m.store, 0) == zx_store_param_addr(m.store, 1));
    CHECK(zx_store_grad_addr(m.store, 0) == zx_store_grad_addr(m.store, 1));
    ZX_TRY(mini_set(&m, 0, e));
    for (int k = 0; k < 5; k++) {
        as_output[k] = e[4];
        as_input[4] += e[k];
    }
    ZX_TRY(mini_add(&m, 1, as_output));
    ZX_TRY(mini_add(&m, 0, as_input));
    ZX_TRY(mini_reduce(&m, 0));
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 0.1, 0));
    ZX_TRY(mini_get(&m, 1, out));
    for (int k = 0; k < 5; k++)
        CHECK_NEAR(out[k], want[k], 1e-6);
    mini_close(&m);
    return ZX_OK;
}

/* A5: used twice, reduced once, after the last use. */
static zx_status case_a5(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("r", 0, 0), mini_param("w", 1, 1)};
    float w = 2, x = (float)(ctx->rank == 0 ? 3 : 5), g = w * x, out;
    void *base;
    mini m;
    ZX_TRY(mini_open(&m, ctx, p, 2, 2, *(mini_config *)ctx->arg));
    ZX_TRY(mini_set(&m, 1, &w));
    zx_store_stats_reset(m.store);
    for (int use = 0; use < 4; use++) { /* two in the forward, two again in the recomputed backward */
        ZX_TRY(zx_store_acquire(m.store, 1, ctx->stream, &base));
        if (use >= 2) ZX_TRY(mini_add(&m, 1, &g));
        ZX_TRY(zx_store_release(m.store, 1, ctx->stream));
    }
    ZX_TRY(mini_reduce(&m, 1));
    CHECK_STATUS(mini_reduce(&m, 1), ZX_ERR_STATE);
    CHECK_ERROR_HAS("the gradient of unit b0 is");
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 1, 0));
    ZX_TRY(mini_get(&m, 1, &out));
    CHECK_EQ_I64(zx_store_stats_get(m.store).n_reductions, 1);
    CHECK_NEAR(out, ctx->world == 1 ? 2 - 12 : 2 - 16, 1e-7);
    mini_close(&m);
    return ZX_OK;
}

/* A6: ranks that use a unit a different number of times, or never, count with what they have, where nothing but the
 * step itself is collective; otherwise both ranks learn at once which units they disagree about. */
static zx_status case_a6(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    zx_param p[] = {mini_param("r", 0, 1), mini_param("w", 1, 1), mini_param("v", 2, 1)};
    bool collective_verbs = c.reduce_at == ZX_REDUCE_MICRO && ctx->world > 1;
    float g, w = 1;
    mini m;
    ZX_TRY(mini_open(&m, ctx, p, 3, 3, c));
    ZX_TRY(mini_set(&m, 1, &w));
    for (int use = 1; use <= (ctx->rank == 0 ? 1 : 3); use++) {
        g = (float)(ctx->rank == 0 ? 2 : use);
        ZX_TRY(mini_add(&m, 1, &g));
    }
    if (ctx->rank == 0) ZX_TRY(mini_add(&m, 2, &g)); /* the other rank never uses v */
    ZX_TRY(mini_reduce(&m, 1));
    ZX_TRY(mini_count(&m, 0, 1));
    zx_status rc = ctx->rank == 0 ? mini_reduce(&m, 2) : ZX_OK;
    if (rc == ZX_OK) rc = mini_step(&m, 1, 0);
    if (collective_verbs) {
        CHECK(rc == ZX_ERR_PEER);
        CHECK_ERROR_HAS("b1"); /* what rank 0 reduces */
        CHECK_ERROR_HAS("R");  /* what rank 1 reduces */
        mini_close(&m);
        zx_error_clear();
        return ZX_OK;
    }
    ZX_TRY(rc);
    ZX_TRY(mini_get(&m, 1, &w));
    CHECK(w == (ctx->world == 1 ? 1 - 2 : 1 - 4));
    ZX_TRY(mini_get(&m, 2, &w));
    CHECK(w == (ctx->world == 1 ? -2 : -1));
    mini_close(&m);
    return ZX_OK;
}

/* A8: each tensor of a unit comes back in its own dtype. */
static zx_status case_a8(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("r", 0, 1), mini_param("base", 1, 3), mini_param("adapter", 1, 2)};
    float tenth[3] = {0.1f, 0.1f, 0.1f}, base[3], adapter[2];
    mini m;
    p[1].dtype = ZX_BF16;
    ZX_TRY(mini_open(&m, ctx, p, 3, 2, *(mini_config *)ctx->arg));
    ZX_TRY(mini_set(&m, 1, tenth));
    ZX_TRY(mini_set(&m, 2, tenth));
    ZX_TRY(mini_get(&m, 1, base));
    ZX_TRY(mini_get(&m, 2, adapter));
    for (int k = 0; k < 3; k++)
        CHECK(base[k] == 0.10009765625f);
    for (int k = 0; k < 2; k++)
        CHECK(adapter[k] == 0.1f);
    mini_close(&m);
    return ZX_OK;
}

/* B3: micro-steps add up alike at every stage and in every step. */
static zx_status case_b3(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("r", 0, 1), mini_param("w", 1, 1)};
    float out;
    mini m;
    ZX_TRY(mini_open(&m, ctx, p, 2, 2, *(mini_config *)ctx->arg));
    for (int step = 1; step <= 2; step++) {
        for (int micro = 1; micro <= 4; micro++) {
            float g = (float)micro;
            ZX_TRY(zx_store_begin_pass(m.store));
            ZX_TRY(mini_add(&m, 1, &g));
            ZX_TRY(mini_reduce(&m, 1));
            ZX_TRY(mini_count(&m, g, 1));
        }
        ZX_TRY(mini_step(&m, 1, 0));
        ZX_TRY(mini_get(&m, 1, &out));
        CHECK(out == -2.5f * (float)step);
        CHECK(m.ctl.loss_sum == 10 * ctx->world && m.ctl.denominator == 4 * ctx->world);
    }
    mini_close(&m);
    return ZX_OK;
}

/* B4: no gradient is a contribution of zero, and nothing is carried over. */
static zx_status case_b4(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("r", 0, 1), mini_param("p", 1, 1), mini_param("q", 2, 1)};
    float four = 4, out;
    mini m;
    ZX_TRY(mini_open(&m, ctx, p, 3, 3, *(mini_config *)ctx->arg));
    for (int step = 0; step < 2; step++) {
        for (int micro = 0; micro < 2; micro++) {
            ZX_TRY(zx_store_begin_pass(m.store));
            if (step == 0 && micro == 0) {
                ZX_TRY(mini_add(&m, 1, &four));
                ZX_TRY(mini_reduce(&m, 1));
            }
            ZX_TRY(mini_count(&m, 0, 1));
        }
        ZX_TRY(mini_step(&m, 1, 0));
        ZX_TRY(mini_get(&m, 1, &out));
        CHECK(out == -2);
        ZX_TRY(mini_get(&m, 2, &out));
        CHECK(out == 0);
    }
    CHECK_EQ_I64(m.ctl.skip, 0);
    CHECK_EQ_I64(zx_store_stats_get(m.store).n_reductions, 6); /* each unit once in each step, touched or not */
    mini_close(&m);
    return ZX_OK;
}

/* B6: sums are float32 whatever the parameter is. */
static zx_status case_b6(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("w", 0, 1)};
    const zx_range *range;
    mini m;
    float out;
    p[0].dtype = ZX_BF16;
    ZX_TRY(mini_open(&m, ctx, p, 1, 1, *(mini_config *)ctx->arg));
    for (int micro = 0; micro <= 256; micro++) {
        float g = micro == 0 ? 1 : 1.0f / 512;
        ZX_TRY(zx_store_begin_pass(m.store));
        ZX_TRY(mini_add(&m, 0, &g));
        ZX_TRY(mini_reduce(&m, 0));
        ZX_TRY(mini_count(&m, 0, micro == 0));
    }
    ZX_TRY(mini_step(&m, 1, 0));
    range = &m.layout->ranges[0];
    if (ctx->rank == 0) {
        ZX_TRY(zx_store_read_slice(m.store, 0, ZX_SLICE_MASTER, 0, 1, &out));
        CHECK(out == -1.5f && range->dtype == ZX_BF16);
    }
    ZX_TRY(mini_get(&m, 0, &out));
    CHECK(out == -1.5f);
    mini_close(&m);
    return ZX_OK;
}

/* C1: a norm that is not finite skips the step everywhere; nothing is written, gradients are cleared. */
static zx_status case_c1(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    zx_param p[] = {mini_param("w", 0, 2)};
    float start[2] = {0.5f, -0.5f}, fine[2] = {1, 2}, bad[2] = {1, INFINITY}, out[2], moment[2];
    bool last = ctx->rank == ctx->world - 1;
    mini m;
    c.optimizer = ZX_OPTIMIZER_ADAMW;
    c.n_moments = 2;
    ZX_TRY(mini_open(&m, ctx, p, 1, 1, c));
    ZX_TRY(mini_set(&m, 0, start));
    ZX_TRY(mini_add(&m, 0, last ? bad : fine));
    ZX_TRY(mini_reduce(&m, 0));
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 0.1, 1));
    CHECK(m.ctl.skip == 1 && isinf(m.ctl.norm) && m.ctl.factor == 0);
    ZX_TRY(mini_get(&m, 0, out));
    CHECK(out[0] == start[0] && out[1] == start[1]);
    for (int kind = ZX_SLICE_MOMENT1; ctx->rank == 0 && kind <= ZX_SLICE_MOMENT2; kind++) {
        ZX_TRY(zx_store_read_slice(m.store, 0, (zx_slice_kind)kind, 0, 2, moment));
        CHECK(moment[0] == 0 && moment[1] == 0);
    }
    ZX_TRY(mini_count(&m, 0, 1)); /* no gradient: had the bad one been kept, this step were skipped as well */
    ZX_TRY(mini_step(&m, 0.1, 1));
    CHECK(m.ctl.skip == 0 && m.ctl.norm == 0);
    ZX_TRY(mini_get(&m, 0, out));
    CHECK(out[0] == start[0] && out[1] == start[1]);
    ZX_TRY(mini_add(&m, 0, fine));
    ZX_TRY(mini_reduce(&m, 0));
    ZX_TRY(mini_count(&m, 0, 1));
    ZX_TRY(mini_step(&m, 0.1, 1));
    CHECK_NEAR(m.ctl.norm, sqrt(5), 1e-7);
    ZX_TRY(mini_get(&m, 0, out));
    CHECK(out[0] < start[0] && out[1] < start[1]);
    mini_close(&m);
    return ZX_OK;
}

/* C2: the norm does not depend on who holds what. */
static zx_status case_c2(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("w", 0, 512), mini_param("v", 1, 1)};
    float g[512] = {0}, out[512], twelve = 12, v;
    g[0] = 3;
    g[300] = 4; /* at world 2 in the second rank's slice */
    for (int with_v = 0; with_v < 2; with_v++) {
        mini m;
        double norm = with_v ? 13 : 5;
        ZX_TRY(mini_open(&m, ctx, p, 2, 2, *(mini_config *)ctx->arg));
        ZX_TRY(mini_add(&m, 0, g));
        ZX_TRY(mini_reduce(&m, 0));
        if (with_v) {
            ZX_TRY(mini_add(&m, 1, &twelve));
            ZX_TRY(mini_reduce(&m, 1));
        }
        ZX_TRY(mini_count(&m, 0, 1));
        ZX_TRY(mini_step(&m, 1, 1));
        CHECK_NEAR(m.ctl.norm, norm, 1e-12);
        ZX_TRY(mini_get(&m, 0, out));
        CHECK_NEAR(out[0], -3 / norm, 1e-6);
        CHECK_NEAR(out[300], -4 / norm, 1e-6);
        ZX_TRY(mini_get(&m, 1, &v));
        if (with_v) CHECK_NEAR(v, -12 / norm, 1e-6);
        mini_close(&m);
    }
    return ZX_OK;
}

/* float64 parameters are summed, stepped and gathered in float64, beside float32 ones. */
static zx_status case_float64(rank_ctx *ctx)
{
    zx_param p[] = {mini_param("single", 0, 300), mini_param("double", 0, 3), mini_param("other", 1, 2)};
    double g[3] = {0.1, 1e-17, 3}, *grad, *value;
    float ones[300];
    void *base;
    mini m;
    p[1].dtype = p[2].dtype = ZX_F64;
    for (int k = 0; k < 300; k++)
        ones[k] = 1;
    ZX_TRY(mini_open(&m, ctx, p, 3, 2, *(mini_config *)ctx->arg));
    ZX_TRY(mini_add(&m, 0, ones));
    for (int i = 1; i < 3; i++) {
        ZX_TRY(zx_store_grad(m.store, i - 1, ctx->stream, &base));
        grad = zx_store_grad_addr(m.store, i);
        for (int64_t k = 0; k < p[i].shape[0]; k++)
            grad[k] += ctx->rank == 0 ? g[k] : 0;
        ZX_TRY(mini_reduce(&m, i - 1));
    }
    ZX_TRY(mini_count(&m, 0, ctx->rank == 0));
    ZX_TRY(mini_step(&m, 1, 0));
    ZX_TRY(zx_store_acquire(m.store, 0, ctx->stream, &base));
    value = zx_store_param_addr(m.store, 1);
    for (int k = 0; k < 3; k++)
        CHECK(value[k] == -g[k]);
    CHECK(*(float *)zx_store_param_addr(m.store, 0) == (float)-ctx->world);
    ZX_TRY(zx_store_release(m.store, 0, ctx->stream));
    ZX_TRY(zx_store_acquire(m.store, 1, ctx->stream, &base));
    value = zx_store_param_addr(m.store, 2);
    for (int k = 0; k < 2; k++)
        CHECK(value[k] == -g[k]);
    ZX_TRY(zx_store_release(m.store, 1, ctx->stream));
    mini_close(&m);
    return ZX_OK;
}

static void test_float64(void)
{
    mini_everywhere(1, 3, case_float64);
}
static void test_a1_no_elements(void)
{
    mini_everywhere(1, 3, case_a1);
}
static void test_a2_tied(void)
{
    mini_everywhere(1, 4, case_a2);
}
static void test_a5_reduced_once(void)
{
    mini_everywhere(1, 2, case_a5);
}
static void test_a6_uneven_uses(void)
{
    mini_everywhere(1, 2, case_a6);
}
static void test_a8_mixed_dtypes(void)
{
    mini_everywhere(1, 3, case_a8);
}
static void test_b3_accumulation(void)
{
    mini_everywhere(1, 3, case_b3);
}
static void test_b4_missing_gradient(void)
{
    mini_everywhere(1, 3, case_b4);
}
static void test_b6_float_sums(void)
{
    mini_everywhere(1, 2, case_b6);
}
static void test_c1_infinite_norm(void)
{
    mini_everywhere(1, 3, case_c1);
}
static void test_c2_norm(void)
{
    mini_everywhere(1, 3, case_c2);
}

int main(void)
{
    RUN(test_float64);
    RUN(test_a1_no_elements);
    RUN(test_a2_tied);
    RUN(test_a5_reduced_once);
    RUN(test_a6_uneven_uses);
    RUN(test_a8_mixed_dtypes);
    RUN(test_b3_accumulation);
    RUN(test_b4_missing_gradient);
    RUN(test_b6_float_sums);
    RUN(test_c1_infinite_norm);
    RUN(test_c2_norm);
    return check_report();
}
