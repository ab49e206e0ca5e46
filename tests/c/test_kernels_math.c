/* test_kernels_math.c - matmul, layer norm, GELU, softmax cross-entropy: cases for kernel_cases.h, and gradients of the
 * double reference against central differences. */
#include "device/device.h"
#include "kernel_gradients.h"

static const int64_t sizes[] = {0, 1, 2, 31, 33, 127, 255, 257, 1000};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
static const zx_dtype dtypes[] = {ZX_F32, ZX_BF16, ZX_F64};

/* ---- GELU --------------------------------------------------------------------------------------------- */

static void gelu_case(zx_dtype t, int64_t rows, int64_t cols, kc_layout layout, bool in_place, bool accumulate)
{
    KC_LABEL("%s (%lld,%lld) layout %d in place %d accumulate %d", zx_dtype_name(t), (long long)rows, (long long)cols,
             layout, in_place, accumulate);
    kc_bound bound = {.rel = 8 * unit(t), .abs = 4 * unit(t)};
    zx_view x = kc_new_2d(t, rows, cols, layout), y = kc_new_2d(t, rows, cols, layout);
    kc_fill_normal(&x, 3);
    zx_gelu_fwd_args fwd = {.x = x, .out = y};
    KC_CHECK(gelu_fwd, fwd, bound, (&fwd.x), (&fwd.out));
    zx_view dout = kc_new_2d(t, rows, cols, layout), dx = in_place ? dout : kc_new_2d(t, rows, cols, layout);
    kc_fill_normal(&dout, 1);
    if (accumulate && !in_place) kc_fill_normal(&dx, 1);
    zx_gelu_bwd_args bwd = {.x = x, .dout = dout, .dx = dx, .accumulate = accumulate};
    bound.abs = 16 * unit(t);
    if (in_place)
        KC_CHECK(gelu_bwd, bwd, bound, (&bwd.x), (&bwd.dout, &bwd.dx));
    else
        KC_CHECK(gelu_bwd, bwd, bound, (&bwd.x, &bwd.dout), (&bwd.dx));
    kc_end();
}

static void test_gelu(void)
{
    for (int d = 0; d < 3; d++) {
        for (int i = 0; i < N_SIZES; i++) {
            gelu_case(dtypes[d], 3, sizes[i], i % 2 ? KC_ROWS : KC_DENSE, false, i % 3 == 1);
            gelu_case(dtypes[d], sizes[i], 5, KC_DENSE, i % 2, false);
        }
        gelu_case(dtypes[d], 70, 384, KC_DENSE, false, true);
        gelu_case(dtypes[d], 1, 65537, KC_DENSE, true, false);
        gelu_case(dtypes[d], 5, 16391, KC_ROWS, true, false);
    }
}

/* Large arguments, infinities and NaN. */
static void test_gelu_extremes(void)
{
    static const double in[] = {0, -0.0, 1e-30, 15.9, 16.1, -15.9, 1e30, -1e30, INFINITY, NAN};
    enum { N = sizeof in / sizeof in[0] };
    for (int path = KC_REF; path < KC_N_PATHS; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        KC_LABEL("%s", kc_path_name[path]);
        zx_gelu_fwd_args fwd = {.x = kc_new_2d(ZX_F32, 1, N, KC_DENSE), .out = kc_new_2d(ZX_F32, 1, N, KC_DENSE)};
        zx_gelu_bwd_args bwd = {
            .x = fwd.x, .dout = kc_new_2d(ZX_F32, 1, N, KC_DENSE), .dx = kc_new_2d(ZX_F32, 1, N, KC_DENSE)};
        for (int i = 0; i < N; i++) {
            kc_set(&fwd.x, i, in[i]);
            kc_set(&bwd.dout, i, 1);
        }
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_gelu_fwd, &fwd));
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_gelu_bwd, &bwd));
        for (int i = 0; i < N; i++) {
            double x = kc_get(&fwd.x, i), y = kc_get(&fwd.out, i), g = kc_get(&bwd.dx, i);
            bool is_nan = isnan(x);
            CHECK(isnan(y) == is_nan && isnan(g) == is_nan);
            if (is_nan) continue;
            CHECK(x > 10 ? y == x && g == 1 : x < -10 ? fabs(y) < 1e-30 && fabs(g) < 1e-30 : true);
            if (fabs(x) < 1e-20) CHECK(y == 0.5 * x && g == 0.5);
        }
        kc_end();
    }
}

/* ---- layer norm --------------------------------------------------------------------------------------- */

static void layernorm_case(zx_dtype t, int64_t rows, int64_t cols, kc_layout layout, bool with_beta, bool in_place,
                           bool accumulate)
{
    KC_LABEL("%s (%lld,%lld) layout %d beta %d in place %d accumulate %d", zx_dtype_name(t), (long long)rows,
             (long long)cols, layout, with_beta, in_place, accumulate);
    zx_dtype sums = zx_dtype_sum(t);
    zx_view x = kc_new_2d(t, rows, cols, layout), gamma = kc_new_1d(t, cols), beta = kc_new_1d(t, cols);
    zx_view mean = kc_new_1d(sums, rows), rstd = kc_new_1d(sums, rows);
    kc_fill_normal(&x, 2);
    kc_fill_uniform(&gamma, 0.5, 1.5);
    kc_fill_normal(&beta, 0.5);
    zx_layernorm_fwd_args fwd = {
        .x = x, .gamma = gamma, .out = kc_new_2d(t, rows, cols, layout), .mean = mean, .rstd = rstd, .eps = 1e-5};
    if (with_beta) fwd.beta = beta;
    /* A row of one element has zero variance: rstd is 316, and the rounding of the mean counts 316 times. */
    double sharp = cols == 1 ? 320 : cols == 2 ? 40 : 1;
    kc_bound bound = {.rel = 16 * unit(t) * sharp, .abs = 64 * unit(t) * sharp};
    KC_CHECK(layernorm_fwd, fwd, bound, (&fwd.x, &fwd.gamma, &fwd.beta), (&fwd.out, &fwd.mean, &fwd.rstd));
    kc_fill_normal(&mean, 0.1);
    kc_fill_uniform(&rstd, 0.3, 0.7);
    zx_view dout = kc_new_2d(t, rows, cols, layout), dx = in_place ? dout : kc_new_2d(t, rows, cols, layout);
    kc_fill_normal(&dout, 1);
    if (accumulate && !in_place) kc_fill_normal(&dx, 1);
    zx_layernorm_bwd_in_args in = {
        .dout = dout, .x = x, .gamma = gamma, .mean = mean, .rstd = rstd, .dx = dx, .accumulate = accumulate};
    bound = (kc_bound){.rel = 16 * unit(t), .abs = 64 * unit(t)};
    if (in_place)
        KC_CHECK(layernorm_bwd_in, in, bound, (&in.x, &in.gamma, &in.mean, &in.rstd), (&in.dout, &in.dx));
    else
        KC_CHECK(layernorm_bwd_in, in, bound, (&in.dout, &in.x, &in.gamma, &in.mean, &in.rstd), (&in.dx));
    kc_fill_normal(&dout, 1);
    zx_layernorm_bwd_w_args w = {.dout = dout, .x = x, .mean = mean, .rstd = rstd, .dgamma = kc_new_1d(sums, cols)};
    kc_fill_normal(&w.dgamma, 1);
    if (with_beta) {
        w.dbeta = kc_new_1d(sums, cols);
        kc_fill_normal(&w.dbeta, 1);
    }
    bound = (kc_bound){.rel = 8 * unit(t), .abs = unit(t) * (32 + 8 * sqrt((double)rows))};
    if (with_beta)
        KC_CHECK(layernorm_bwd_w, w, bound, (&w.dout, &w.x, &w.mean, &w.rstd), (&w.dgamma, &w.dbeta));
    else
        KC_CHECK(layernorm_bwd_w, w, bound, (&w.dout, &w.x, &w.mean, &w.rstd), (&w.dgamma));
    kc_end();
}

static void test_layernorm(void)
{
    for (int d = 0; d < 3; d++) {
        for (int i = 0; i < N_SIZES; i++) {
            layernorm_case(dtypes[d], 5, sizes[i], i % 2 ? KC_ROWS : KC_DENSE, i % 3 != 0, i % 2, false);
            layernorm_case(dtypes[d], sizes[i], 17, i % 2 ? KC_DENSE : KC_ROWS, true, false, i % 2);
        }
        layernorm_case(dtypes[d], 300, 384, KC_DENSE, true, false, false);
    }
}

/* ---- softmax cross-entropy ---------------------------------------------------------------------------- */

static void xent_case(zx_dtype t, int64_t rows, int64_t vocab, kc_layout layout, bool in_place, bool accumulate)
{
    KC_LABEL("%s (%lld,%lld) layout %d in place %d accumulate %d", zx_dtype_name(t), (long long)rows, (long long)vocab,
             layout, in_place, accumulate);
    zx_dtype sums = zx_dtype_sum(t);
    zx_view logits = kc_new_2d(t, rows, vocab, layout), target = kc_new_1d(ZX_I32, rows);
    zx_view lse = kc_new_1d(sums, rows), total = kc_new_1d(sums, 2), dloss = kc_new_1d(sums, 1);
    kc_fill_normal(&logits, 4);
    if (vocab > 0) kc_fill_int(&target, -1, vocab - 1);
    for (int64_t i = 0; i < rows; i += vocab > 0 ? 7 : 1)
        kc_set(&target, i, ZX_IGNORE_LABEL);
    if (accumulate) kc_fill_uniform(&total, 1, 2);
    zx_xent_fwd_args fwd = {.logits = logits, .target = target, .lse = lse, .total = total, .accumulate = accumulate};
    kc_bound bound = {.rel = 8 * unit(t), .abs = 32 * unit(t)};
    KC_CHECK(xent_fwd, fwd, bound, (&fwd.logits, &fwd.target), (&fwd.lse, &fwd.total));
    zx_xent_bwd_args bwd = {.logits = logits,
                            .target = target,
                            .lse = lse,
                            .dloss = dloss,
                            .dlogits = in_place ? logits : kc_new_2d(t, rows, vocab, layout)};
    kc_fill_uniform(&dloss, 0.5, 1.5);
    bound = (kc_bound){.rel = 48 * unit(t), .abs = 4 * unit(t)};
    if (in_place)
        KC_CHECK(xent_bwd, bwd, bound, (&bwd.target, &bwd.lse, &bwd.dloss), (&bwd.logits, &bwd.dlogits));
    else
        KC_CHECK(xent_bwd, bwd, bound, (&bwd.logits, &bwd.target, &bwd.lse, &bwd.dloss), (&bwd.dlogits));
    kc_end();
}

static void test_xent(void)
{
    for (int d = 0; d < 3; d++) {
        for (int i = 0; i < N_SIZES; i++) {
            xent_case(dtypes[d], 5, sizes[i], i % 2 ? KC_ROWS : KC_DENSE, i % 2, i % 3 == 0);
            xent_case(dtypes[d], sizes[i], 33, i % 2 ? KC_DENSE : KC_ROWS, false, false);
        }
        xent_case(dtypes[d], 130, 256, KC_DENSE, true, true);
        xent_case(dtypes[d], 2, 50257, KC_DENSE, true, false);
    }
}

/* Masked logits, labels past the vocabulary, NaN: seen in the total, and only where they belong. */
static void test_xent_extremes(void)
{
    for (int path = KC_REF; path < KC_N_PATHS; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        KC_LABEL("%s", kc_path_name[path]);
        enum { N = 4, V = 19 };
        zx_view logits = kc_new_2d(ZX_F32, N, V, KC_DENSE), target = kc_new_1d(ZX_I32, N);
        zx_xent_fwd_args fwd = {
            .logits = logits, .target = target, .lse = kc_new_1d(ZX_F32, N), .total = kc_new_1d(ZX_F32, 2)};
        zx_xent_bwd_args bwd = {.logits = logits,
                                .target = target,
                                .lse = fwd.lse,
                                .dloss = kc_new_1d(ZX_F32, 1),
                                .dlogits = kc_new_2d(ZX_F32, N, V, KC_DENSE)};
        kc_set(&bwd.dloss, 0, 1);
        for (int i = 0; i < N * V; i++)
            kc_set(&logits, i, i % V < 3 ? 0.0 : -INFINITY);
        for (int i = 0; i < V; i++)
            kc_set(&logits, 1 * V + i, i == 5 ? NAN : 1e30); /* ignored */
        for (int i = 0; i < V; i++)
            kc_set(&logits, 2 * V + i, i == 18 ? 1000 : 0);
        static const int32_t labels[N] = {2, -1, 18, -100};
        memcpy(target.data, labels, sizeof labels);
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_xent_fwd, &fwd));
        CHECK_NEAR(kc_get(&fwd.total, 0), log(3), 1e-6);
        CHECK(kc_get(&fwd.total, 1) == 2);
        CHECK_NEAR(kc_get(&fwd.lse, 2), 1000, 1e-6);
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_xent_bwd, &bwd));
        for (int i = 0; i < V; i++) {
            CHECK_NEAR(kc_get(&bwd.dlogits, i), i == 2 ? -2 / 3.0 : i < 2 ? 1 / 3.0 : 0, 1e-6);
            CHECK(kc_get(&bwd.dlogits, V + i) == 0 && kc_get(&bwd.dlogits, 3 * V + i) == 0);
        }
        ((int32_t *)target.data)[3] = V;
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_xent_fwd, &fwd));
        CHECK(isnan(kc_get(&fwd.total, 0)) && kc_get(&fwd.total, 1) == 3);
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_xent_bwd, &bwd));
        CHECK(isnan(kc_get(&bwd.dlogits, 3 * V)) && kc_get(&bwd.dlogits, V) == 0);
        kc_end();
    }
}

/* ---- matmul ------------------------------------------------------------------------------------------- */

typedef struct matmul_case {
    int64_t m, n, k;
    bool trans_a, trans_b, bias, accumulate, c_is_sum;
    kc_layout layout;
} matmul_case;

static void run_matmul(zx_dtype t, matmul_case s)
{
    KC_LABEL("%s (%lld,%lld,%lld) trans %d%d bias %d accumulate %d c sum %d layout %d %s", zx_dtype_name(t),
             (long long)s.m, (long long)s.n, (long long)s.k, s.trans_a, s.trans_b, s.bias, s.accumulate, s.c_is_sum,
             s.layout, kc_gemm ? "blas" : "plain loops");
    zx_matmul_args a = {.trans_a = s.trans_a, .trans_b = s.trans_b, .accumulate = s.accumulate};
    a.a = s.trans_a ? kc_new_2d(t, s.k, s.m, s.layout) : kc_new_2d(t, s.m, s.k, s.layout);
    a.b = s.trans_b ? kc_new_2d(t, s.n, s.k, s.layout) : kc_new_2d(t, s.k, s.n, s.layout);
    a.c = kc_new_2d(s.c_is_sum ? zx_dtype_sum(t) : t, s.m, s.n, s.layout);
    kc_fill_normal(&a.a, 1);
    kc_fill_normal(&a.b, 1);
    if (s.accumulate) kc_fill_normal(&a.c, 1);
    if (s.bias) {
        a.bias = kc_new_1d(t, s.n);
        kc_fill_normal(&a.bias, 1);
    }
    /* Sums of k products: rounding errors add like a random walk; the factor covers the tails. */
    kc_bound bound = {.rel = 16 * unit(t), .abs = 24 * unit(t) * (2 + (double)s.k / 16 + sqrt((double)s.k))};
    KC_CHECK(matmul, a, bound, (&a.a, &a.b, &a.bias), (&a.c));
    kc_end();
}

static void all_matmuls(bool large)
{
    for (int d = 0; d < 3; d++) {
        for (int i = 0; i < 32; i++) {
            matmul_case s = {.trans_a = i & 1,
                             .trans_b = i >> 1 & 1,
                             .bias = i >> 2 & 1,
                             .accumulate = i >> 3 & 1,
                             .c_is_sum = i % 3 == 0,
                             .layout = i % 5 ? KC_ROWS : KC_DENSE};
            s.m = sizes[kc_random() % (N_SIZES - 1)];
            s.n = sizes[kc_random() % (N_SIZES - 1)];
            s.k = sizes[kc_random() % (N_SIZES - 1)];
            run_matmul(dtypes[d], s);
        }
        for (int i = 0; large && i < 4; i++)
            run_matmul(dtypes[d], (matmul_case){.m = i == 3 ? 384 : 520,
                                                .n = i == 1 ? 1000 : 257,
                                                .k = i == 3 ? 2100 : 384,
                                                .trans_a = i == 3,
                                                .trans_b = i == 2,
                                                .accumulate = i == 3,
                                                .bias = i == 1,
                                                .c_is_sum = i == 3});
    }
}

static void test_matmul_plain(void)
{
    const zx_gemm *kept = kc_gemm;
    kc_gemm = NULL;
    all_matmuls(false);
    kc_gemm = kept;
}

static void test_matmul_blas(void)
{
    if (!kc_gemm) printf("    no BLAS here (ZEROX_BLAS): plain loops again\n");
    all_matmuls(true);
}

/* Blocks are within the product, cover it, and are the same for one shape. */
static void test_matmul_block(void)
{
    for (int i = 0; i < 20000; i++) {
        int64_t m = (int64_t)(kc_random() % 5000), n = (int64_t)(kc_random() % 5000), k = (int64_t)(kc_random() % 5000);
        int64_t bm, bn, bm2, bn2;
        bool ta = kc_random() & 1, tb = kc_random() & 1;
        zx_matmul_block(m, n, k, ta, tb, &bm, &bn);
        zx_matmul_block(m, n, k, ta, tb, &bm2, &bn2);
        CHECK(bm >= 1 && bn >= 1 && bm == bm2 && bn == bn2);
        if (m >= 256 && n >= 256) CHECK(zx_ceil_div(m, bm) * zx_ceil_div(n, bn) >= 2);
    }
}

/* A row stride of 0 (one row, seen many times) is beyond BLAS. */
static void test_matmul_broadcast(void)
{
    zx_matmul_args a = {.a = kc_new_broadcast(ZX_F32, 2, (int64_t[]){40, 33}, KC_DENSE, 1),
                        .b = kc_new_2d(ZX_F32, 33, 50, KC_ROWS),
                        .c = kc_new_2d(ZX_F32, 40, 50, KC_DENSE)};
    KC_LABEL("broadcast a");
    kc_fill_normal(&a.a, 1);
    kc_fill_normal(&a.b, 1);
    kc_bound bound = {.rel = 4 * unit(ZX_F32), .abs = 200 * unit(ZX_F32)};
    KC_CHECK(matmul, a, bound, (&a.a, &a.b), (&a.c));
    kc_end();
}

/* ---- gradients of the double reference ---------------------------------------------------------------- */

static void test_gradient_gelu(void)
{
    zx_view x = kc_new_2d(ZX_F64, 7, 9, KC_ROWS), w = kc_new_2d(ZX_F64, 7, 9, KC_DENSE);
    kc_fill_normal(&x, 2);
    kc_fill_normal(&w, 1);
    zx_gelu_fwd_args fwd = {.x = x, .out = kc_new_2d(ZX_F64, 7, 9, KC_DENSE)};
    zx_gelu_bwd_args bwd = {.x = x, .dout = w, .dx = kc_new_2d(ZX_F64, 7, 9, KC_DENSE)};
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_gelu_bwd, &bwd));
    run_ref run = {ZX_OP_gelu_fwd, &fwd, &fwd.out, &w};
    check_gradient("x", &x, &bwd.dx, weighted_loss, &run);
    kc_end();
}

static void test_gradient_layernorm(void)
{
    enum { N = 5, C = 11 };
    zx_view x = kc_new_2d(ZX_F64, N, C, KC_ROWS), w = kc_new_2d(ZX_F64, N, C, KC_DENSE);
    zx_view gamma = kc_new_1d(ZX_F64, C), beta = kc_new_1d(ZX_F64, C), mean = kc_new_1d(ZX_F64, N),
            rstd = kc_new_1d(ZX_F64, N);
    kc_fill_normal(&x, 2);
    kc_fill_normal(&w, 1);
    kc_fill_normal(&gamma, 1);
    kc_fill_normal(&beta, 1);
    zx_layernorm_fwd_args fwd = {.x = x,
                                 .gamma = gamma,
                                 .beta = beta,
                                 .out = kc_new_2d(ZX_F64, N, C, KC_DENSE),
                                 .mean = mean,
                                 .rstd = rstd,
                                 .eps = 1e-3};
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_layernorm_fwd, &fwd));
    zx_layernorm_bwd_in_args in = {
        .dout = w, .x = x, .gamma = gamma, .mean = mean, .rstd = rstd, .dx = kc_new_2d(ZX_F64, N, C, KC_DENSE)};
    zx_layernorm_bwd_w_args bw = {
        .dout = w, .x = x, .mean = mean, .rstd = rstd, .dgamma = kc_new_1d(ZX_F64, C), .dbeta = kc_new_1d(ZX_F64, C)};
    kc_fill_uniform(&bw.dgamma, 0, 0);
    kc_fill_uniform(&bw.dbeta, 0, 0);
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_layernorm_bwd_in, &in));
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_layernorm_bwd_w, &bw));
    run_ref run = {ZX_OP_layernorm_fwd, &fwd, &fwd.out, &w};
    check_gradient("x", &x, &in.dx, weighted_loss, &run);
    check_gradient("gamma", &gamma, &bw.dgamma, weighted_loss, &run);
    check_gradient("beta", &beta, &bw.dbeta, weighted_loss, &run);
    kc_end();
}

static void test_gradient_xent(void)
{
    enum { N = 6, V = 13 };
    zx_view logits = kc_new_2d(ZX_F64, N, V, KC_ROWS), target = kc_new_1d(ZX_I32, N), w = kc_new_1d(ZX_F64, 2);
    kc_fill_normal(&logits, 2);
    kc_fill_int(&target, 0, V - 1);
    kc_set(&target, 3, ZX_IGNORE_LABEL);
    kc_set(&w, 0, 1.25);
    kc_set(&w, 1, 0);
    zx_xent_fwd_args fwd = {
        .logits = logits, .target = target, .lse = kc_new_1d(ZX_F64, N), .total = kc_new_1d(ZX_F64, 2)};
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_xent_fwd, &fwd));
    zx_xent_bwd_args bwd = {.logits = logits,
                            .target = target,
                            .lse = fwd.lse,
                            .dloss = kc_new_1d(ZX_F64, 1),
                            .dlogits = kc_new_2d(ZX_F64, N, V, KC_DENSE)};
    kc_set(&bwd.dloss, 0, 1.25);
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_xent_bwd, &bwd));
    run_ref run = {ZX_OP_xent_fwd, &fwd, &fwd.total, &w};
    check_gradient("logits", &logits, &bwd.dlogits, weighted_loss, &run);
    kc_end();
}

/* The backward products of c = op(a) op(b), as the model runs them. */
static void test_gradient_matmul(void)
{
    enum { M = 5, N = 7, K = 6 };
    for (int trans_b = 0; trans_b < 2; trans_b++) {
        zx_matmul_args fwd = {.a = kc_new_2d(ZX_F64, M, K, KC_ROWS),
                              .b = trans_b ? kc_new_2d(ZX_F64, N, K, KC_DENSE) : kc_new_2d(ZX_F64, K, N, KC_DENSE),
                              .c = kc_new_2d(ZX_F64, M, N, KC_DENSE),
                              .trans_b = trans_b};
        zx_view w = kc_new_2d(ZX_F64, M, N, KC_DENSE);
        kc_fill_normal(&fwd.a, 1);
        kc_fill_normal(&fwd.b, 1);
        kc_fill_normal(&w, 1);
        zx_matmul_args da = {.a = w, .b = fwd.b, .trans_b = !trans_b, .c = kc_new_2d(ZX_F64, M, K, KC_DENSE)};
        zx_matmul_args db = {.a = trans_b ? w : fwd.a,
                             .b = trans_b ? fwd.a : w,
                             .trans_a = true,
                             .accumulate = true,
                             .c = trans_b ? kc_new_2d(ZX_F64, N, K, KC_DENSE) : kc_new_2d(ZX_F64, K, N, KC_DENSE)};
        kc_fill_uniform(&db.c, 0, 0);
        CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_matmul, &da));
        CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_matmul, &db));
        run_ref run = {ZX_OP_matmul, &fwd, &fwd.c, &w};
        check_gradient("a", &fwd.a, &da.c, weighted_loss, &run);
        check_gradient("b", &fwd.b, &db.c, weighted_loss, &run);
        kc_end();
    }
}

/* AVX-512 where the processor has it: the same cases, and so the bits of the plain path. */
static void test_avx512(void)
{
    if (zx_isa_detect() < ZX_ISA_AVX512) {
        printf("    not on this processor\n");
        return;
    }
    kc_wide = ZX_ISA_AVX512;
    test_gelu();
    test_gelu_extremes();
    test_xent();
    test_xent_extremes();
    kc_wide = ZX_ISA_AVX2;
}

int main(void)
{
    CHECK_OK(zx_gemm_open(zx_env_text(ZX_ENV_BLAS), &kc_gemm));
    RUN(test_gelu);
    RUN(test_gelu_extremes);
    RUN(test_layernorm);
    RUN(test_xent);
    RUN(test_xent_extremes);
    RUN(test_avx512);
    RUN(test_matmul_block);
    RUN(test_matmul_plain);
    RUN(test_matmul_blas);
    RUN(test_matmul_broadcast);
    RUN(test_gradient_gelu);
    RUN(test_gradient_layernorm);
    RUN(test_gradient_xent);
    RUN(test_gradient_matmul);
    kc_report("math");
    return check_report();
}
