/* kernel_cases_elementwise.h - cases of add, mul, scale, cast, fill; part of test_kernels.c. */
#include "kernel_cases.h"

static const int64_t sizes[] = {0, 1, 2, 31, 33, 127, 255, 257, 1000, 65537};
enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
static const zx_dtype float_dtypes[] = {ZX_F32, ZX_BF16, ZX_F64};
/* Of one operation of the arithmetic that belongs to a storage dtype. */
static double unit(zx_dtype t)
{
    return t == ZX_F64 ? 0x1p-53 : 0x1p-24;
}

/* ---- add, mul ----------------------------------------------------------------------------------------- */

typedef enum alias { APART, OUT_IS_A, OUT_IS_B } alias;

static void binary_case(zx_op_id op, int ndim, const int64_t *shape, zx_dtype t, kc_layout layout, unsigned flat_a,
                        unsigned flat_b, bool accumulate, alias alias)
{
    KC_LABEL("%s ndim %d (%d,%d) layout %d flat %u %u acc %d alias %d", zx_dtype_name(t), ndim, (int)shape[0],
             ndim > 1 ? (int)shape[1] : 0, layout, flat_a, flat_b, accumulate, alias);
    zx_add_args args = {.accumulate = accumulate};
    args.a = kc_new_broadcast(t, ndim, shape, layout, flat_a);
    args.b = kc_new_broadcast(t, ndim, shape, layout, flat_b);
    kc_fill_normal(&args.a, 1);
    kc_fill_normal(&args.b, 1);
    args.out = alias == OUT_IS_A ? args.a : alias == OUT_IS_B ? args.b : kc_new(t, ndim, shape, layout);
    if (accumulate && alias == APART) kc_fill_normal(&args.out, 1);
    /* Two roundings of values up to about 30, and one store. */
    kc_bound bound = {.abs = 60 * unit(t), .rel = 2 * unit(t)};
    int64_t n = zx_view_numel(&args.out);
    double *want = malloc((size_t)n * sizeof *want + 1);
    for (int64_t i = 0; i < n; i++) {
        double x = kc_get(&args.a, i), y = kc_get(&args.b, i);
        want[i] = (op == ZX_OP_add ? x + y : x * y) + (accumulate ? kc_get(&args.out, i) : 0);
    }
    if (op == ZX_OP_add)
        KC_CHECK(add, args, bound, (&args.a, &args.b), (&args.out));
    else
        KC_CHECK(mul, args, bound, (&args.a, &args.b), (&args.out));
    KC_CHECK_NAIVE(args.out, want, 100 * unit(t));
    free(want);
    kc_end();
}

static void binary_cases(zx_op_id op)
{
    for (size_t d = 0; d < 3; d++) {
        zx_dtype t = float_dtypes[d];
        for (int s = 0; s < N_SIZES - (d > 0); s++)
            for (int acc = 0; acc < 2; acc++)
                binary_case(op, 1, &sizes[s], t, KC_DENSE, 0, 0, acc, APART);
        int64_t shape[4] = {2, 3, 11, 65};
        for (unsigned flat = 0; flat < 16; flat++)
            for (int acc = 0; acc < 2; acc++) {
                binary_case(op, 4, shape, t, (kc_layout)(flat % 3), 0, flat, acc, APART);
                binary_case(op, 4, shape, t, (kc_layout)(flat % 3), flat, 15 - flat, acc, APART);
            }
        for (int layout = 0; layout < 3; layout++)
            for (int alias = APART; alias <= OUT_IS_B; alias++) {
                binary_case(op, 2, (int64_t[]){17, 257}, t, (kc_layout)layout, 0, 0, alias == OUT_IS_B,
                            (enum alias)alias);
                binary_case(op, 2, (int64_t[]){1000, 3}, t, (kc_layout)layout, 0, 0, false, (enum alias)alias);
            }
        binary_case(op, 2, (int64_t[]){512, 384}, t, KC_DENSE, 0, 1, false, OUT_IS_A); /* bias over tokens */
    }
}

static void test_add(void)
{
    binary_cases(ZX_OP_add);
}
static void test_mul(void)
{
    binary_cases(ZX_OP_mul);
}

/* Operands of different dtypes; an infinity and a NaN pass through. */
static void test_add_mixed_dtypes(void)
{
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++)
            for (int out = 0; out < 3; out++) {
                KC_LABEL("dtypes %d %d %d", a, b, out);
                zx_add_args args = {.a = kc_new_1d(float_dtypes[a], 700), .b = kc_new_1d(float_dtypes[b], 700)};
                args.out = kc_new_1d(float_dtypes[out], 700);
                kc_fill_normal(&args.a, 1);
                kc_fill_normal(&args.b, 1);
                kc_set(&args.a, 5, INFINITY);
                kc_set(&args.b, 6, NAN);
                KC_CHECK(add, args, ((kc_bound){.rel = 0x1p-24}), (&args.a, &args.b), (&args.out));
                kc_end();
            }
}

/* ---- scale -------------------------------------------------------------------------------------------- */

static void scale_case(zx_dtype t, int ndim, const int64_t *shape, kc_layout layout, unsigned flat, bool accumulate,
                       bool in_place)
{
    KC_LABEL("%s (%d,...) layout %d flat %u acc %d in place %d", zx_dtype_name(t), (int)shape[0], layout, flat,
             accumulate, in_place);
    zx_scale_args args = {.factor = -0.7, .accumulate = accumulate};
    args.a = kc_new_broadcast(t, ndim, shape, layout, flat);
    kc_fill_normal(&args.a, 1);
    args.out = in_place ? args.a : kc_new(t, ndim, shape, layout);
    if (accumulate && !in_place) kc_fill_normal(&args.out, 1);
    int64_t n = zx_view_numel(&args.out);
    double *want = malloc((size_t)n * sizeof *want + 1);
    for (int64_t i = 0; i < n; i++)
        want[i] = args.factor * kc_get(&args.a, i) + (accumulate ? kc_get(&args.out, i) : 0);
    KC_CHECK(scale, args, ((kc_bound){.abs = 30 * unit(t), .rel = 2 * unit(t)}), (&args.a), (&args.out));
    KC_CHECK_NAIVE(args.out, want, 100 * unit(t));
    free(want);
    kc_end();
}

static void test_scale(void)
{
    for (size_t d = 0; d < 3; d++)
        for (int acc = 0; acc < 2; acc++) {
            zx_dtype t = float_dtypes[d];
            for (int s = 0; s < N_SIZES - (d > 0); s++)
                scale_case(t, 1, &sizes[s], KC_DENSE, 0, acc, false);
            for (unsigned flat = 0; flat < 8; flat++)
                scale_case(t, 3, (int64_t[]){7, 3, 257}, (kc_layout)(flat % 3), flat, acc, flat == 0);
        }
}

/* ---- cast --------------------------------------------------------------------------------------------- */

static void cast_case(zx_dtype from, zx_dtype to, int ndim, const int64_t *shape, kc_layout in, kc_layout out)
{
    KC_LABEL("%s to %s, (%d,...), layouts %d %d", zx_dtype_name(from), zx_dtype_name(to), (int)shape[0], in, out);
    zx_cast_args args = {.a = kc_new(from, ndim, shape, in), .out = kc_new(to, ndim, shape, out)};
    kc_fill_normal(&args.a, 100);
    int64_t n = zx_view_numel(&args.out);
    double *want = malloc((size_t)n * sizeof *want + 1);
    for (int64_t i = 0; i < n; i++)
        want[i] = kc_get(&args.a, i);
    KC_CHECK(cast, args, ((kc_bound){0}), (&args.a), (&args.out)); /* one rounding and nothing else */
    KC_CHECK_NAIVE(args.out, want, 0);
    free(want);
    kc_end();
}

static void test_cast(void)
{
    for (int from = 0; from < 3; from++)
        for (int to = 0; to < 3; to++) {
            for (int s = 0; s < N_SIZES; s++)
                cast_case(float_dtypes[from], float_dtypes[to], 1, &sizes[s], KC_DENSE, KC_DENSE);
            for (int layout = 0; layout < 9; layout++)
                cast_case(float_dtypes[from], float_dtypes[to], 3, (int64_t[]){5, 3, 130}, (kc_layout)(layout / 3),
                          (kc_layout)(layout % 3));
        }
    static const zx_dtype integers[] = {ZX_I32, ZX_I64, ZX_U8};
    for (int i = 0; i < 3; i++)
        cast_case(integers[i], integers[i], 2, (int64_t[]){33, 65}, KC_ROWS, KC_EVERY2);
}

/* A transposed copy: the inner strides of input and output differ. */
static void test_cast_transposes(void)
{
    for (int d = 0; d < 3; d++) {
        zx_cast_args args = {.a = kc_new_2d(float_dtypes[d], 37, 130, KC_ROWS)};
        args.out = kc_new_2d(ZX_BF16, 130, 37, KC_DENSE);
        kc_fill_normal(&args.a, 1);
        args.a.shape[0] = 130;
        args.a.shape[1] = 37;
        args.a.stride[1] = args.a.stride[0];
        args.a.stride[0] = 1;
        KC_CHECK(cast, args, ((kc_bound){0}), (&args.a), (&args.out));
        CHECK(*(uint16_t *)kc_at(&args.out, 37 + 2) ==
              zx_bf16_from_f32(
                  (float)kc_read(float_dtypes[d], zx_at(args.a.data, float_dtypes[d], 2 * args.a.stride[1] + 1))));
        kc_end();
    }
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Rounding to bfloat16 at its edges, from float32 and from float64, in vectors and tails. */
static void test_cast_rounds_to_nearest_even(void)
{
    static const struct {
        uint32_t f32;
        uint16_t bf16;
    } edge[] = {
        {0x3f800000, 0x3f80}, {0x3f808000, 0x3f80}, {0x3f818000, 0x3f82}, /* ties go to even */
        {0x3f808001, 0x3f81}, {0x3f807fff, 0x3f80}, {0x80000000, 0x8000}, {0x00000000, 0x0000},
        {0x00000001, 0x0000}, {0x00008000, 0x0000}, {0x00008001, 0x0001}, {0x00018000, 0x0002}, /* subnormal */
        {0x7f7fffff, 0x7f80}, {0x7f7f7fff, 0x7f7f}, {0xff7fffff, 0xff80}, {0x7f800000, 0x7f80}, /* overflow */
        {0xff800000, 0xff80}, {0x007fffff, 0x0080},
    };
    enum { N_EDGES = sizeof edge / sizeof edge[0] };
    for (kc_path path = KC_REF; path <= KC_AVX2; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        for (int wide = 0; wide < 2; wide++) {
            zx_cast_args args = {.a = kc_new_1d(wide ? ZX_F64 : ZX_F32, 101), .out = kc_new_1d(ZX_BF16, 101)};
            for (int i = 0; i < 101; i++)
                kc_set(&args.a, i, from_bits(edge[i % N_EDGES].f32));
            CHECK_OK(kc_launch(path, 1, ZX_OP_cast, &args));
            for (int i = 0; i < 101; i++)
                CHECK_EQ_I64(((uint16_t *)args.out.data)[i], edge[i % N_EDGES].bf16);
            /* NaNs with payloads in the low bits only must not become infinities. */
            for (int i = 0; i < 101; i++) {
                uint32_t bits = i % 2 ? 0x7f800001 : 0xffffffff;
                if (wide)
                    ((double *)args.a.data)[i] = NAN;
                else
                    memcpy((float *)args.a.data + i, &bits, 4);
            }
            CHECK_OK(kc_launch(path, 1, ZX_OP_cast, &args));
            for (int i = 0; i < 101; i++)
                CHECK(isnan(kc_get(&args.out, i)));
            kc_end();
        }
        /* A double just above a tie: rounding to float first would land on the tie and then on the even side.
         */
        zx_cast_args args = {.a = kc_new_1d(ZX_F64, 4), .out = kc_new_1d(ZX_BF16, 4)};
        kc_set(&args.a, 0, 1 + 0x1p-8 + 0x1p-40);
        kc_set(&args.a, 1, 1 + 0x1p-7 + 0x1p-8 - 0x1p-40);
        kc_set(&args.a, 2, -(1 + 0x1p-8 + 0x1p-40));
        kc_set(&args.a, 3, 0x1p-134 + 0x1p-170);
        CHECK_OK(kc_launch(path, 1, ZX_OP_cast, &args));
        CHECK_EQ_I64(((uint16_t *)args.out.data)[0], 0x3f81);
        CHECK_EQ_I64(((uint16_t *)args.out.data)[1], 0x3f81);
        CHECK_EQ_I64(((uint16_t *)args.out.data)[2], 0xbf81);
        CHECK_EQ_I64(((uint16_t *)args.out.data)[3], 0x0001);
        kc_end();
    }
}

/* Every bfloat16 goes to float32 and back to the same bits, NaNs to NaNs. */
static void test_cast_of_all_bfloat16(void)
{
    for (kc_path path = KC_REF; path <= KC_AVX2; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        zx_cast_args up = {.a = kc_new_1d(ZX_BF16, 65536), .out = kc_new_1d(ZX_F32, 65536)};
        zx_cast_args down = {.a = up.out, .out = kc_new_1d(ZX_BF16, 65536)};
        for (int i = 0; i < 65536; i++)
            ((uint16_t *)up.a.data)[i] = (uint16_t)i;
        CHECK_OK(kc_launch(path, 2, ZX_OP_cast, &up));
        CHECK_OK(kc_launch(path, 2, ZX_OP_cast, &down));
        int wrong = 0;
        for (int i = 0; i < 65536; i++) {
            float x = ((float *)up.out.data)[i];
            uint16_t back = ((uint16_t *)down.out.data)[i];
            wrong += x != x ? !isnan(zx_bf16_to_f32(back)) || !isnan(zx_bf16_to_f32((uint16_t)i)) : back != i;
        }
        CHECK_EQ_I64(wrong, 0);
        kc_end();
    }
}

/* ---- fill --------------------------------------------------------------------------------------------- */

static void test_fill(void)
{
    static const zx_dtype dtypes[] = {ZX_F32, ZX_BF16, ZX_F64, ZX_I32, ZX_I64, ZX_U8};
    static const double values[] = {0, 1, 0.3, 100};
    for (int d = 0; d < 6; d++)
        for (int v = 0; v < 4; v++) {
            if (d >= 3 && values[v] == 0.3) continue;
            for (int s = 0; s < N_SIZES; s++) {
                KC_LABEL("%s %g n %d", zx_dtype_name(dtypes[d]), values[v], (int)sizes[s]);
                zx_fill_args args = {.out = kc_new_1d(dtypes[d], sizes[s]), .value = values[v]};
                KC_CHECK(fill, args, ((kc_bound){0}), (NULL), (&args.out));
                kc_end();
            }
            for (int layout = 0; layout < 3; layout++) {
                KC_LABEL("%s %g layout %d", zx_dtype_name(dtypes[d]), values[v], layout);
                zx_fill_args args = {.value = values[v]};
                args.out = kc_new(dtypes[d], 3, (int64_t[]){3, 5, 31}, (kc_layout)layout);
                KC_CHECK(fill, args, ((kc_bound){0}), (NULL), (&args.out));
                double want[3 * 5 * 31];
                for (int i = 0; i < 3 * 5 * 31; i++)
                    want[i] = values[v];
                KC_CHECK_NAIVE(args.out, want, 0);
                kc_end();
            }
        }
}

/* Past the size from which outputs are streamed: odd addresses, odd tails, rows with gaps. */
static void test_copy_and_fill_large(void)
{
    static const zx_dtype dtypes[] = {ZX_F32, ZX_BF16, ZX_F64};
    for (int d = 0; d < 3; d++)
        for (int rows = 0; rows < 2; rows++) {
            zx_dtype t = dtypes[d];
            int64_t n = (4 << 20) / (int64_t)zx_dtype_bytes(t) + 1001;
            KC_LABEL("%s rows %d", zx_dtype_name(t), rows);
            zx_cast_args args = {.a = rows ? kc_new_2d(t, 3, n / 2, KC_ROWS) : kc_new_1d(t, n)};
            args.out = args.a;
            size_t bytes = (size_t)(rows ? 3 + 2 * args.a.stride[0] + n / 2 : n) * zx_dtype_bytes(t);
            args.out.data = (char *)kc_alloc_skewed(bytes, 8) + (rows ? 3 * zx_dtype_bytes(t) : 0);
            char *a = kc_find(args.a.data)->data;
            for (size_t i = 0; i + 8 <= bytes; i += 8) {
                uint64_t bits = kc_random();
                memcpy(a + i, &bits, 8);
            }
            kc_save();
            for (kc_path path = KC_PLAIN; path <= KC_AVX2; path++)
                for (int threads = 1; threads <= 2; threads++) {
                    if (path == KC_AVX2 && !kc_have_avx2()) continue;
                    zx_view *outs[] = {&args.out};
                    kc_restore();
                    CHECK_OK(kc_launch(path, threads, ZX_OP_cast, &args));
                    for (int r = 0; r < (rows ? 3 : 1); r++)
                        CHECK(!memcmp(zx_at(args.a.data, t, r * args.a.stride[0] * rows),
                                      zx_at(args.out.data, t, r * args.a.stride[0] * rows),
                                      (size_t)(rows ? n / 2 : n) * zx_dtype_bytes(t)));
                    CHECK(kc_outside_unchanged(1, outs));
                    kc_restore();
                    zx_fill_args fill = {.out = args.out, .value = 0.3};
                    CHECK_OK(kc_launch(path, threads, ZX_OP_fill, &fill));
                    char one[8];
                    kc_write(t, one, 0.3);
                    for (int r = 0; r < (rows ? 3 : 1); r++) {
                        char *row = zx_at(args.out.data, t, r * args.a.stride[0] * rows);
                        size_t size = zx_dtype_bytes(t), n_row = (size_t)(rows ? n / 2 : n);
                        CHECK(!memcmp(row, one, size) && !memcmp(row, row + size, (n_row - 1) * size));
                    }
                    CHECK(kc_outside_unchanged(1, outs));
                }
            kc_end();
        }
}

/* ---- refusals ----------------------------------------------------------------------------------------- */

static void test_elementwise_refuses(void)
{
    KC_LABEL("refusals");
    zx_add_args add = {.a = kc_new_2d(ZX_F32, 3, 4, KC_DENSE), .b = kc_new_2d(ZX_F32, 3, 5, KC_DENSE)};
    add.out = kc_new_2d(ZX_F32, 3, 4, KC_DENSE);
    KC_REFUSES(add, add, ZX_ERR_ARG);
    CHECK_ERROR_HAS("(3,5)");
    add.b = kc_new_2d(ZX_I32, 3, 4, KC_DENSE);
    KC_REFUSES(add, add, ZX_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("int32");
    add.b = add.a;
    add.out.stride[0] = 0; /* rows of the output on top of each other */
    KC_REFUSES(add, add, ZX_ERR_ARG);
    CHECK_ERROR_HAS("overlap");
    add.out.stride[0] = 3;
    KC_REFUSES(add, add, ZX_ERR_ARG);
    add.out.stride[0] = 4;
    add.out.data = NULL;
    KC_REFUSES(add, add, ZX_ERR_ARG);
    zx_scale_args scale = {.a = add.a, .out = add.a};
    scale.a.block = 32;
    KC_REFUSES(scale, scale, ZX_ERR_UNSUPPORTED);
    scale.a.block = 0;
    scale.a.ndim = 5;
    KC_REFUSES(scale, scale, ZX_ERR_ARG);
    zx_cast_args cast = {.a = kc_new_1d(ZX_I32, 4), .out = kc_new_1d(ZX_F32, 4)};
    KC_REFUSES(cast, cast, ZX_ERR_UNSUPPORTED);
    zx_fill_args fill = {.out = kc_new_1d(ZX_U8, 4), .value = 256};
    KC_REFUSES(fill, fill, ZX_ERR_ARG);
    fill.value = 0.5;
    KC_REFUSES(fill, fill, ZX_ERR_ARG);
    fill = (zx_fill_args){.out = kc_new_1d(ZX_I64, 4), .value = 0x1p63};
    KC_REFUSES(fill, fill, ZX_ERR_ARG);
    kc_end();
}
