/* kernel_cases_reduce.h - cases of sum, colsum, sqnorm, finite, sum_sources; part of test_kernels.c. */
#include "kernel_cases.h"

/* ---- sum ---------------------------------------------------------------------------------------------- */

static void sum_case(zx_dtype t, zx_dtype out, int ndim, const int64_t *shape, kc_layout layout, unsigned flat,
                     bool accumulate)
{
    KC_LABEL("%s to %s (%d,...) ndim %d layout %d flat %u acc %d", zx_dtype_name(t), zx_dtype_name(out), (int)shape[0],
             ndim, layout, flat, accumulate);
    zx_sum_args args = {.factor = 0.25, .accumulate = accumulate, .out = kc_new_1d(out, 1)};
    args.x = kc_new_broadcast(t, ndim, shape, layout, flat);
    kc_fill_normal(&args.x, 1);
    if (accumulate) kc_fill_normal(&args.out, 1);
    /* Sums are held in double: n additions of numbers of about one, far below the rounding of the output. */
    double n = (double)zx_view_numel(&args.x);
    long double exact = 0;
    for (int64_t i = 0; i < (int64_t)n; i++)
        exact += kc_get(&args.x, i);
    double total = (double)(args.factor * exact + (accumulate ? kc_get(&args.out, 0) : 0));
    KC_CHECK(sum, args, ((kc_bound){.abs = 8 * n * 0x1p-53}), (&args.x), (&args.out));
    KC_CHECK_NAIVE(args.out, &total, 64 * n * 0x1p-53);
    kc_end();
}

static void test_sum(void)
{
    for (int d = 0; d < 3; d++)
        for (int acc = 0; acc < 2; acc++) {
            zx_dtype t = float_dtypes[d];
            for (int s = 0; s < N_SIZES; s++) {
                sum_case(t, t, 1, &sizes[s], KC_DENSE, 0, acc);
                sum_case(t, zx_dtype_sum(t), 1, &sizes[s], KC_EVERY2, 0, acc);
            }
            for (unsigned flat = 0; flat < 8; flat++)
                sum_case(t, t, 3, (int64_t[]){7, 3, 257}, (kc_layout)(flat % 3), flat, acc);
            sum_case(t, t, 0, (int64_t[]){0}, KC_DENSE, 0, acc);
        }
}

/* The order of the sum is that of the elements, not of the memory: a strided copy gives the same bits. */
static void test_sum_does_not_depend_on_strides(void)
{
    for (int d = 0; d < 3; d++) {
        zx_sum_args args = {.factor = 1, .out = kc_new_1d(zx_dtype_sum(float_dtypes[d]), 1)};
        zx_view dense = kc_new_2d(float_dtypes[d], 1000, 67, KC_DENSE);
        zx_view rows = kc_new_2d(float_dtypes[d], 1000, 67, KC_EVERY2);
        kc_fill_normal(&dense, 1);
        for (int64_t i = 0; i < 67000; i++)
            kc_set(&rows, i, kc_get(&dense, i));
        args.x = dense;
        CHECK_OK(kc_launch(KC_PLAIN, 2, ZX_OP_sum, &args));
        double first = kc_get(&args.out, 0);
        args.x = rows;
        CHECK_OK(kc_launch(KC_PLAIN, 1, ZX_OP_sum, &args));
        CHECK(kc_get(&args.out, 0) == first);
        kc_end();
    }
}

/* ---- colsum ------------------------------------------------------------------------------------------- */

static void colsum_case(zx_dtype t, zx_dtype out, int64_t rows, int64_t cols, kc_layout layout, int y, unsigned flat_y,
                        bool accumulate)
{
    KC_LABEL("%s to %s (%d,%d) layout %d y %d flat %u acc %d", zx_dtype_name(t), zx_dtype_name(out), (int)rows,
             (int)cols, layout, y, flat_y, accumulate);
    zx_colsum_args args = {.accumulate = accumulate, .x = kc_new_2d(t, rows, cols, layout)};
    kc_fill_normal(&args.x, 1);
    if (y) {
        args.y = kc_new_broadcast(t, 2, (int64_t[]){rows, cols}, layout, flat_y);
        kc_fill_normal(&args.y, 1);
    }
    args.out = kc_new_1d(out, cols);
    if (accumulate) kc_fill_normal(&args.out, 1);
    double *want = calloc((size_t)cols + 1, sizeof *want);
    for (int64_t i = 0; i < rows * cols; i++)
        want[i % cols] += kc_get(&args.x, i) * (y ? kc_get(&args.y, i) : 1);
    for (int64_t c = 0; c < cols && accumulate; c++)
        want[c] += kc_get(&args.out, c);
    KC_CHECK(colsum, args, ((kc_bound){.abs = 32 * (double)rows * 0x1p-53}), (&args.x, &args.y), (&args.out));
    KC_CHECK_NAIVE(args.out, want, 64 * (double)rows * 0x1p-53);
    free(want);
    kc_end();
}

static void test_colsum(void)
{
    static const int64_t shapes[][2] = {{0, 5},    {5, 0},     {1, 1},     {2, 31},     {33, 127}, {127, 255},
                                        {257, 33}, {1000, 65}, {65537, 1}, {130, 1000}, {3, 4099}, {2049, 7}};
    for (int d = 0; d < 3; d++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            zx_dtype t = float_dtypes[d];
            int64_t rows = shapes[s][0], cols = shapes[s][1];
            colsum_case(t, zx_dtype_sum(t), rows, cols, KC_DENSE, false, 0, s % 2);
            colsum_case(t, t, rows, cols, KC_ROWS, true, 0, s % 2 == 0);
            if (rows * cols > 9000) continue;
            for (unsigned flat = 0; flat < 4; flat++)
                colsum_case(t, zx_dtype_sum(t), rows, cols, (kc_layout)(flat % 3), true, flat, flat % 2);
        }
    colsum_case(ZX_F32, ZX_F32, 512, 384, KC_DENSE, false, 0, true); /* the gradient of a bias */
}

/* ---- sqnorm, finite ----------------------------------------------------------------------------------- */

static void test_sqnorm(void)
{
    for (int d = 0; d < 3; d++)
        for (int s = 0; s < N_SIZES; s++)
            for (size_t skew = 0; skew < 16; skew += 8) {
                zx_dtype t = float_dtypes[d];
                int64_t n = sizes[s];
                KC_LABEL("%s n %d skew %d", zx_dtype_name(t), (int)n, (int)skew);
                void *x = kc_alloc_skewed((size_t)n * zx_dtype_bytes(t), skew);
                double *out = kc_alloc(sizeof *out);
                zx_view v = zx_view_1d(x, t, n);
                kc_fill_normal(&v, t == ZX_BF16 ? 1e18 : 1e19); /* squares overflow float32 */
                long double want = 0;
                for (int64_t i = 0; i < n; i++)
                    want += (long double)kc_get(&v, i) * kc_get(&v, i);
                zx_sqnorm_args args = {.x = x, .dtype = t, .n = n, .out = out};
                double first = 0;
                for (kc_path path = KC_REF; path <= KC_AVX2; path++)
                    for (int threads = 1; threads <= KC_MAX_THREADS; threads++) {
                        if (path == KC_AVX2 && !kc_have_avx2()) continue;
                        *out = NAN;
                        CHECK_OK(kc_launch(path, threads, ZX_OP_sqnorm, &args));
                        if (path == KC_REF && threads == 1) first = *out;
                        CHECK(*out == first);
                    }
                CHECK_NEAR(first, (double)want, 1e-13);
                kc_end();
            }
}

static void test_finite(void)
{
    for (int d = 0; d < 3; d++)
        for (int s = 0; s < N_SIZES; s++)
            for (int bad = -1; bad < 4; bad++) {
                zx_dtype t = float_dtypes[d];
                int64_t n = sizes[s], *out = kc_alloc(sizeof *out), want = -1;
                void *x = kc_alloc((size_t)n * zx_dtype_bytes(t));
                zx_view v = zx_view_1d(x, t, n);
                kc_fill_normal(&v, 1e38);
                if (t != ZX_F64)
                    for (int64_t i = 0; i < n; i++)
                        if (!isfinite(kc_get(&v, i))) kc_set(&v, i, 0x1.fep127);
                KC_LABEL("%s n %d bad %d", zx_dtype_name(t), (int)n, bad);
                if (bad >= 0 && n > 0) {
                    want = (int64_t)(kc_random() % (uint64_t)n);
                    kc_set(&v, want, bad % 2 ? NAN : bad == 0 ? INFINITY : -INFINITY);
                    if (bad > 1)
                        for (int64_t i = want; i < n; i += 1 + (int64_t)(kc_random() % 100)) /* others behind it */
                            kc_set(&v, i, NAN);
                }
                zx_finite_args args = {.x = x, .dtype = t, .n = n, .out = out};
                for (kc_path path = KC_REF; path <= KC_AVX2; path++)
                    for (int threads = 1; threads <= KC_MAX_THREADS; threads++) {
                        if (path == KC_AVX2 && !kc_have_avx2()) continue;
                        *out = 77;
                        CHECK_OK(kc_launch(path, threads, ZX_OP_finite, &args));
                        CHECK_EQ_I64(*out, want);
                    }
                kc_end();
            }
}

/* ---- sum_sources -------------------------------------------------------------------------------------- */

/* Source after source in the arithmetic of the contract: float for 4 and 2 byte floats, double for float64.
 */
static double sum_in_order(const zx_sum_sources_args *args, const double *old, int64_t i)
{
    float narrow = 0;
    double wide = 0;
    for (int s = 0; s < args->n_src; s++) {
        double x = kc_read(args->src_dtype, zx_at(args->src[s], args->src_dtype, i));
        narrow = s == 0 ? (float)x : narrow + (float)x;
        wide = s == 0 ? x : wide + x;
    }
    bool in_double = args->src_dtype == ZX_F64 || args->out_dtype == ZX_F64;
    if (args->accumulate) {
        narrow = (float)old[i] + narrow;
        wide = old[i] + wide;
    }
    return in_double ? wide : (double)narrow;
}

static void sources_case(int n_src, zx_dtype from, zx_dtype to, int64_t n, bool accumulate, int in_place, size_t skew)
{
    KC_LABEL("%d sources %s to %s n %d acc %d in place %d skew %d", n_src, zx_dtype_name(from), zx_dtype_name(to),
             (int)n, accumulate, in_place, (int)skew);
    zx_sum_sources_args args = {.n_src = n_src, .src_dtype = from, .out_dtype = to, .n = n};
    args.accumulate = accumulate;
    bool integers = from == ZX_I32 || from == ZX_I64;
    for (int s = 0; s < n_src; s++) {
        args.src[s] = kc_alloc_skewed((size_t)n * zx_dtype_bytes(from), skew);
        zx_view v = zx_view_1d((void *)(uintptr_t)args.src[s], from, n);
        if (integers)
            kc_fill_int(&v, -2000000000, 2000000000);
        else
            kc_fill_normal(&v, 1);
    }
    args.out =
        in_place >= 0 ? (void *)(uintptr_t)args.src[in_place] : kc_alloc_skewed((size_t)n * zx_dtype_bytes(to), skew);
    zx_view out = zx_view_1d(args.out, to, n);
    if (accumulate && in_place < 0) {
        if (integers)
            kc_fill_int(&out, -5, 5);
        else
            kc_fill_normal(&out, 1);
    }
    double *want = malloc((size_t)n * sizeof *want + 1), *old = malloc((size_t)n * sizeof *old + 1);
    kc_save();
    for (int64_t i = 0; i < n; i++)
        old[i] = kc_get(&out, i);
    for (int64_t i = 0; i < n; i++) {
        if (integers) {
            uint64_t sum = accumulate ? (uint64_t)(int64_t)old[i] : 0;
            for (int s = 0; s < n_src; s++)
                sum += from == ZX_I32 ? (uint64_t)((const int32_t *)args.src[s])[i]
                                      : (uint64_t)((const int64_t *)args.src[s])[i];
            want[i] = from == ZX_I32 ? (double)(int32_t)(uint32_t)sum : (double)(int64_t)sum;
        } else {
            double x = sum_in_order(&args, old, i);
            char rounded[8];
            kc_write(to, rounded, x);
            want[i] = kc_read(to, rounded);
        }
    }
    for (kc_path path = KC_PLAIN; path <= KC_AVX2; path++)
        for (int threads = 1; threads <= KC_MAX_THREADS; threads++) {
            if (path == KC_AVX2 && !kc_have_avx2()) continue;
            kc_restore();
            CHECK_OK(kc_launch(path, threads, ZX_OP_sum_sources, &args));
            int64_t wrong = 0;
            for (int64_t i = 0; i < n; i++)
                wrong += kc_get(&out, i) != want[i];
            if (!CHECK_EQ_I64(wrong, 0)) printf("    %s on %s\n", kc_label, kc_path_name[path]);
            zx_view *outs[] = {&out};
            CHECK(kc_outside_unchanged(1, outs));
        }
    kc_restore();
    CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_sum_sources, &args));
    bool near = true;
    for (int64_t i = 0; i < n; i++)
        near = near && fabs(kc_get(&out, i) - want[i]) <= (n_src + 1) * 8 * 0x1p-24 + 2 * kc_half_ulp(to, want[i]);
    if (!CHECK(near)) printf("    %s on ref\n", kc_label);
    free(want);
    free(old);
    kc_end();
}

static void test_sum_sources(void)
{
    static const zx_dtype pairs[][2] = {{ZX_F32, ZX_F32}, {ZX_BF16, ZX_BF16}, {ZX_BF16, ZX_F32}, {ZX_F32, ZX_BF16},
                                        {ZX_F64, ZX_F64}, {ZX_I32, ZX_I32},   {ZX_I64, ZX_I64}};
    for (int p = 0; p < 7; p++) {
        for (int s = 0; s < N_SIZES; s++) {
            sources_case(1 + s % 4, pairs[p][0], pairs[p][1], sizes[s], s % 2, -1, 0);
            sources_case(2, pairs[p][0], pairs[p][1], sizes[s], s % 2 == 0, -1, 8);
        }
        sources_case(0, pairs[p][0], pairs[p][1], 1000, false, -1, 0);
        sources_case(0, pairs[p][0], pairs[p][1], 1000, true, -1, 0);
        sources_case(8, pairs[p][0], pairs[p][1], 4099, false, -1, 0);
        sources_case(ZX_MAX_SOURCES, pairs[p][0], pairs[p][1], 257, true, -1, 0);
        for (int in_place = 0; in_place < 3 && pairs[p][0] == pairs[p][1]; in_place++)
            sources_case(3, pairs[p][0], pairs[p][1], 5000, in_place == 1, in_place, 0);
    }
}

/* Past the size from which outputs are streamed: odd addresses, an odd tail, and out being a source. */
static void test_sum_sources_large(void)
{
    int64_t n = (1 << 20) + 37;
    sources_case(3, ZX_F32, ZX_F32, n, false, -1, 4);
    sources_case(3, ZX_F32, ZX_F32, n, false, 1, 0);
    sources_case(2, ZX_BF16, ZX_F32, n, false, -1, 4);
    sources_case(3, ZX_BF16, ZX_BF16, 2 * n, false, -1, 2);
    sources_case(2, ZX_F32, ZX_BF16, 2 * n, false, -1, 12);
}

static void test_reduce_refuses(void)
{
    KC_LABEL("refusals");
    zx_sum_args sum = {.x = kc_new_1d(ZX_F32, 4), .out = kc_new_1d(ZX_F32, 2), .factor = 1};
    KC_REFUSES(sum, sum, ZX_ERR_ARG);
    sum.out = kc_new_1d(ZX_BF16, 1);
    KC_REFUSES(sum, sum, ZX_ERR_ARG);
    zx_colsum_args colsum = {.x = kc_new_2d(ZX_F32, 3, 4, KC_DENSE), .out = kc_new_1d(ZX_F32, 5)};
    KC_REFUSES(colsum, colsum, ZX_ERR_ARG);
    colsum.out = kc_new_1d(ZX_F32, 4);
    zx_exec poor = {.scratch = NULL};
    CHECK_STATUS(zx_kernels_cpu()->op[ZX_OP_colsum].launch(&poor, &colsum), ZX_ERR_STATE);
    CHECK_ERROR_HAS("scratch");
    zx_sqnorm_args sqnorm = {.x = NULL, .n = 3, .out = kc_alloc(8)};
    KC_REFUSES(sqnorm, sqnorm, ZX_ERR_ARG);
    zx_finite_args finite = {.x = sum.x.data, .dtype = ZX_I32, .n = 3, .out = kc_alloc(8)};
    KC_REFUSES(finite, finite, ZX_ERR_UNSUPPORTED);
    zx_sum_sources_args sources = {.n_src = 65, .n = 1, .out = kc_alloc(4)};
    KC_REFUSES(sum_sources, sources, ZX_ERR_ARG);
    CHECK_ERROR_HAS("65");
    sources = (zx_sum_sources_args){.n_src = 1, .src_dtype = ZX_I32, .out_dtype = ZX_F32, .n = 1};
    sources.out = kc_alloc(4);
    sources.src[0] = kc_alloc(4);
    KC_REFUSES(sum_sources, sources, ZX_ERR_ARG);
    kc_end();
}
