/* kernel_cases_embed.h - cases of embed_fwd and embed_bwd; part of test_kernels.c. */
#include "kernel_cases.h"

typedef enum index_mix { ALL_ONE_ROW, RANDOM_ROWS, DISTINCT_ROWS, HALF_ONE_ROW, SOME_OUTSIDE, N_INDEX_MIXES } index_mix;

static void fill_index(const zx_view *index, index_mix mix, int64_t n_rows)
{
    for (int64_t i = 0, n = zx_view_numel(index); i < n; i++) {
        int64_t any = (int64_t)(kc_random() % (uint64_t)zx_max64(1, n_rows));
        int64_t row = mix == ALL_ONE_ROW ? n_rows / 2 : mix == DISTINCT_ROWS ? (i * 7 + 3) % zx_max64(1, n_rows) : any;
        if (mix == HALF_ONE_ROW && i % 2) row = 0;
        if (mix == SOME_OUTSIDE && i % 3 == 0) row = i % 2 ? -1 - i : n_rows + i;
        if (n_rows == 0) row = -1;
        kc_set(index, i, (double)row);
    }
}

static void embed_fwd_case(zx_dtype t, int64_t n, int64_t n_rows, int64_t cols, kc_layout layout, index_mix mix,
                           bool accumulate)
{
    KC_LABEL("%s %d of %d rows, %d columns, layout %d, mix %d, acc %d", zx_dtype_name(t), (int)n, (int)n_rows,
             (int)cols, layout, mix, accumulate);
    zx_embed_fwd_args args = {.accumulate = accumulate,
                              .index = kc_new(ZX_I32, 1, &n, layout == KC_ROWS ? KC_EVERY2 : KC_DENSE)};
    args.table = kc_new_2d(t, n_rows, cols, layout);
    args.out = kc_new_2d(t, n, cols, layout);
    fill_index(&args.index, mix, n_rows);
    kc_fill_normal(&args.table, 1);
    if (accumulate) kc_fill_normal(&args.out, 1);
    double *want = malloc((size_t)(n * cols) * sizeof *want + 1);
    for (int64_t i = 0; i < n * cols; i++) {
        int64_t row = (int64_t)kc_get(&args.index, i / cols);
        want[i] = row < 0 || row >= n_rows ? NAN : kc_get(&args.table, row * cols + i % cols);
        want[i] += accumulate ? kc_get(&args.out, i) : 0;
    }
    KC_CHECK(embed_fwd, args, ((kc_bound){0}), (&args.index, &args.table), (&args.out));
    KC_CHECK_NAIVE(args.out, want, 0);
    free(want);
    kc_end();
}

static void test_embed_fwd(void)
{
    static const int64_t shapes[][3] = {{0, 5, 7},   {3, 0, 7},    {5, 9, 0},      {1, 1, 1},        {2, 31, 33},
                                        {31, 33, 1}, {33, 2, 127}, {127, 257, 31}, {255, 1000, 257}, {65537, 3, 1}};
    for (int d = 0; d < 3; d++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0] - (d > 0); s++)
            for (int acc = 0; acc < 2; acc++)
                embed_fwd_case(float_dtypes[d], shapes[s][0], shapes[s][1], shapes[s][2], (kc_layout)(s % 2),
                               (index_mix)(s % N_INDEX_MIXES), acc);
        embed_fwd_case(float_dtypes[d], 512, 256, 384, KC_DENSE, RANDOM_ROWS, false);
        embed_fwd_case(float_dtypes[d], 64, 40, 600, KC_ROWS, SOME_OUTSIDE, true);
    }
}

/* Rows outside the table are NaN, the others exactly the table's rows. */
static void test_embed_fwd_marks_unknown_rows(void)
{
    zx_embed_fwd_args args = {.index = kc_new_1d(ZX_I32, 3), .table = kc_new_2d(ZX_BF16, 2, 5, KC_DENSE)};
    args.out = kc_new_2d(ZX_BF16, 3, 5, KC_DENSE);
    kc_fill_normal(&args.table, 1);
    static const int rows[] = {1, 2, -1};
    for (int i = 0; i < 3; i++)
        kc_set(&args.index, i, rows[i]);
    CHECK_OK(kc_launch(KC_PLAIN, 1, ZX_OP_embed_fwd, &args));
    for (int c = 0; c < 5; c++) {
        CHECK(kc_get(&args.out, c) == kc_get(&args.table, 5 + c));
        CHECK(isnan(kc_get(&args.out, 5 + c)));
        CHECK(isnan(kc_get(&args.out, 10 + c)));
    }
    kc_end();
}

static void embed_bwd_case(zx_dtype t, int64_t n, int64_t n_rows, int64_t cols, kc_layout layout, index_mix mix)
{
    KC_LABEL("%s %d of %d rows, %d columns, layout %d, mix %d", zx_dtype_name(t), (int)n, (int)n_rows, (int)cols,
             layout, mix);
    zx_embed_bwd_args args = {.index = kc_new(ZX_I32, 1, &n, layout == KC_ROWS ? KC_EVERY2 : KC_DENSE)};
    args.dout = kc_new_2d(t, n, cols, layout);
    args.dtable = kc_new_2d(zx_dtype_sum(t), n_rows, cols, layout);
    fill_index(&args.index, mix, n_rows);
    kc_fill_normal(&args.dout, 1);
    kc_fill_normal(&args.dtable, 1);
    /* k additions, each rounded at a partial sum of about sqrt(k); the factor covers the largest of all. */
    double k = (double)n + 1;
    double *want = malloc((size_t)(n_rows * cols) * sizeof *want + 1);
    for (int64_t i = 0; i < n_rows * cols; i++)
        want[i] = kc_get(&args.dtable, i);
    for (int64_t i = 0; i < n * cols; i++) {
        int64_t row = (int64_t)kc_get(&args.index, i / cols);
        if (row >= 0 && row < n_rows) want[row * cols + i % cols] += kc_get(&args.dout, i);
    }
    KC_CHECK(embed_bwd, args, ((kc_bound){.abs = 4 * k * unit(t)}), (&args.index, &args.dout), (&args.dtable));
    KC_CHECK_NAIVE(args.dtable, want, 4 * k * unit(t));
    free(want);
    kc_end();
}

static void test_embed_bwd(void)
{
    static const int64_t shapes[][3] = {{0, 5, 7},   {3, 0, 7},    {5, 9, 0},       {1, 1, 1},        {2, 31, 33},
                                        {31, 33, 1}, {33, 2, 127}, {127, 257, 129}, {255, 1000, 257}, {65537, 3, 1}};
    for (int d = 0; d < 3; d++) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0] - (d > 0); s++)
            for (int mix = 0; mix < N_INDEX_MIXES; mix += shapes[s][0] > 1000 ? 3 : 1)
                embed_bwd_case(float_dtypes[d], shapes[s][0], shapes[s][1], shapes[s][2], (kc_layout)(s % 2),
                               (index_mix)mix);
        embed_bwd_case(float_dtypes[d], 512, 256, 384, KC_DENSE, RANDOM_ROWS);
    }
}

/* Case N1: 4,096 lookups of one row, of distinct rows, and half and half: one bit pattern in ten runs
 * whatever the threads, and 1e-5 from the sum in double. */
static void test_embed_bwd_hot_row(void)
{
    enum { N = 4096, C = 96 };
    static const index_mix mixes[] = {ALL_ONE_ROW, DISTINCT_ROWS, HALF_ONE_ROW};
    for (int m = 0; m < 3; m++) {
        KC_LABEL("mix %d", mixes[m]);
        zx_embed_bwd_args args = {.index = kc_new_1d(ZX_I32, N), .dout = kc_new_2d(ZX_F32, N, C, KC_DENSE)};
        args.dtable = kc_new_2d(ZX_F32, N, C, KC_DENSE);
        fill_index(&args.index, mixes[m], N);
        kc_fill_normal(&args.dout, 1);
        memset(args.dtable.data, 0, N * C * 4);
        kc_save();
        double *want = calloc(N * C, sizeof *want);
        float *first = malloc(N * C * sizeof *first);
        for (int i = 0; i < N; i++)
            for (int c = 0; c < C; c++)
                want[((int32_t *)args.index.data)[i] * C + c] += ((float *)args.dout.data)[i * C + c];
        for (int run = 0; run < 10; run++) {
            kc_restore();
            CHECK_OK(kc_launch(run % 2 && kc_have_avx2() ? KC_AVX2 : KC_PLAIN, 1 + run % 3, ZX_OP_embed_bwd, &args));
            if (run == 0) memcpy(first, args.dtable.data, N * C * 4);
            CHECK(memcmp(first, args.dtable.data, N * C * 4) == 0);
        }
        double error = 0, norm = 0;
        for (int i = 0; i < N * C; i++) {
            error += (first[i] - want[i]) * (first[i] - want[i]);
            norm += want[i] * want[i];
        }
        CHECK(sqrt(error) <= 1e-5 * sqrt(norm));
        free(want);
        free(first);
        kc_end();
    }
}

static void test_embed_refuses(void)
{
    KC_LABEL("refusals");
    zx_embed_fwd_args fwd = {.index = kc_new_1d(ZX_I64, 3), .table = kc_new_2d(ZX_F32, 4, 5, KC_DENSE)};
    fwd.out = kc_new_2d(ZX_F32, 3, 5, KC_DENSE);
    KC_REFUSES(embed_fwd, fwd, ZX_ERR_ARG);
    CHECK_ERROR_HAS("int64");
    fwd.index = kc_new_1d(ZX_I32, 3);
    fwd.out = kc_new_2d(ZX_F32, 3, 6, KC_DENSE);
    KC_REFUSES(embed_fwd, fwd, ZX_ERR_ARG);
    fwd.out = kc_new_2d(ZX_BF16, 3, 5, KC_DENSE);
    KC_REFUSES(embed_fwd, fwd, ZX_ERR_ARG);
    zx_embed_bwd_args bwd = {.index = fwd.index, .dout = fwd.out, .dtable = kc_new_2d(ZX_BF16, 4, 5, KC_DENSE)};
    KC_REFUSES(embed_bwd, bwd, ZX_ERR_ARG);
    bwd.dtable = kc_new_2d(ZX_F32, 4, 5, KC_EVERY2);
    KC_REFUSES(embed_bwd, bwd, ZX_ERR_ARG);
    CHECK_ERROR_HAS("stride 1");
    kc_end();
}
