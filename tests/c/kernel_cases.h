/* kernel_cases.h - what every test of kernels needs.
 *
 * A case makes views with kc_new (each in a buffer of its own, 256 sentinel bytes around it, all bits set:
 * NaN for floats), fills the inputs, and calls KC_CHECK with the inputs and outputs of the argument struct.
 * That runs plain and AVX2 with one thread, one of them with two and the other with three threads (by turns),
 * and one a second time: bits must not depend on threads or on the run. Both are compared with the table `ref`
 * on float64 copies of all float views. Inputs, sentinels, and the gaps between the rows of outputs must be as
 * before. kc_end closes the case.
 * Operations with plain pointers use kc_alloc, kc_launch and kc_save / kc_restore directly.
 *
 * Each operation belongs to one test program (kc_owner below). kc_report fails for an operation of this
 * program that no case has launched in every variant, and for one that belongs to none.
 */
#ifndef ZX_TESTS_KERNEL_CASES_H
#define ZX_TESTS_KERNEL_CASES_H

#include <stdlib.h>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/load.h"

#define KC_UNUSED __attribute__((unused))

/* ---- which test program has the cases of which operation ---------------------------------------------- */

KC_UNUSED static const struct {
    zx_op_id op;
    const char *program;
} kc_owner[] = {
    {ZX_OP_matmul, "math"},
    {ZX_OP_layernorm_fwd, "math"},
    {ZX_OP_layernorm_bwd_in, "math"},
    {ZX_OP_layernorm_bwd_w, "math"},
    {ZX_OP_gelu_fwd, "math"},
    {ZX_OP_gelu_bwd, "math"},
    {ZX_OP_attention_fwd, "attention"},
    {ZX_OP_attention_bwd, "attention"},
    {ZX_OP_xent_fwd, "math"},
    {ZX_OP_xent_bwd, "math"},
    {ZX_OP_embed_fwd, "kernels"},
    {ZX_OP_embed_bwd, "kernels"},
    {ZX_OP_add, "kernels"},
    {ZX_OP_mul, "kernels"},
    {ZX_OP_scale, "kernels"},
    {ZX_OP_sum, "kernels"},
    {ZX_OP_colsum, "kernels"},
    {ZX_OP_sum_sources, "kernels"},
    {ZX_OP_cast, "kernels"},
    {ZX_OP_fill, "kernels"},
    {ZX_OP_sqnorm, "kernels"},
    {ZX_OP_finite, "kernels"},
    {ZX_OP_step_control, "kernels"},
    {ZX_OP_adamw, "kernels"},
    {ZX_OP_sgd, "kernels"},
};

/* ---- variants: table, instruction set, threads -------------------------------------------------------- */

typedef enum kc_path { KC_REF = 0, KC_PLAIN, KC_AVX2, KC_N_PATHS } kc_path;
enum { KC_MAX_THREADS = 3 };
KC_UNUSED static const char *const kc_path_name[KC_N_PATHS] = {"ref", "plain", "avx2"};

static zx_pool *kc_pools[KC_MAX_THREADS + 1];
static long kc_launched[ZX_N_OPS][KC_N_PATHS];
KC_UNUSED static const zx_gemm *kc_gemm; /* what launches get as exec->gemm */
KC_UNUSED static zx_isa kc_wide = ZX_ISA_AVX2; /* what KC_AVX2 runs; a test may raise it to ZX_ISA_AVX512 */
KC_UNUSED static char kc_label[200];     /* what is being tested, for failures */

#define KC_LABEL(...) snprintf(kc_label, sizeof kc_label, __VA_ARGS__)

KC_UNUSED static bool kc_have_avx2(void)
{
    return zx_isa_detect() >= ZX_ISA_AVX2;
}

/* ---- buffers ------------------------------------------------------------------------------------------ */

enum { KC_SENTINEL = 256, KC_MAX_BUFS = 160 };

typedef struct kc_buf {
    char *base; /* sentinel, bytes, sentinel */
    char *data;
    size_t bytes;
    char *saved; /* contents at kc_save */
} kc_buf;

static kc_buf kc_bufs[KC_MAX_BUFS];
static int kc_n_bufs;

/* bytes of poison (all bits set) between sentinels, `skew` bytes past a 64-byte boundary. Lives until kc_end.
 */
KC_UNUSED static void *kc_alloc_skewed(size_t bytes, size_t skew)
{
    if (kc_n_bufs == KC_MAX_BUFS) {
        printf("kernel_cases.h: too many buffers in one case\n");
        exit(1);
    }
    kc_buf *b = &kc_bufs[kc_n_bufs++];
    size_t total = bytes + 2 * KC_SENTINEL + skew + 64;
    *b = (kc_buf){.bytes = bytes};
    b->base = aligned_alloc(64, (total + 63) / 64 * 64);
    if (!b->base) exit(1);
    b->data = b->base + KC_SENTINEL + skew;
    memset(b->base, 0xa5, total);
    memset(b->data, 0xff, bytes);
    return b->data;
}
KC_UNUSED static void *kc_alloc(size_t bytes)
{
    return kc_alloc_skewed(bytes, 0);
}

KC_UNUSED static kc_buf *kc_find(const void *data)
{
    for (int i = 0; i < kc_n_bufs; i++)
        if ((const char *)data >= kc_bufs[i].data && (const char *)data <= kc_bufs[i].data + kc_bufs[i].bytes)
            return &kc_bufs[i];
    printf("kernel_cases.h: %s: a view is not in a buffer of this case\n", kc_label);
    exit(1);
}

KC_UNUSED static void kc_save(void)
{
    for (int i = 0; i < kc_n_bufs; i++) {
        kc_buf *b = &kc_bufs[i];
        free(b->saved);
        b->saved = malloc(b->bytes + 1);
        memcpy(b->saved, b->data, b->bytes);
    }
}

KC_UNUSED static void kc_restore(void)
{
    for (int i = 0; i < kc_n_bufs; i++)
        if (kc_bufs[i].saved) memcpy(kc_bufs[i].data, kc_bufs[i].saved, kc_bufs[i].bytes);
}

KC_UNUSED static bool kc_sentinels_intact(void)
{
    for (int i = 0; i < kc_n_bufs; i++) {
        const kc_buf *b = &kc_bufs[i];
        for (const char *p = b->base; p < b->data; p++)
            if (*p != (char)0xa5) return false;
        for (int k = 0; k < KC_SENTINEL; k++)
            if (b->data[b->bytes + (size_t)k] != (char)0xa5) return false;
    }
    return true;
}

/* Closes a case: sentinels are checked, buffers freed. */
KC_UNUSED static void kc_end(void)
{
    if (!CHECK(kc_sentinels_intact())) printf("    %s: wrote outside a buffer\n", kc_label);
    for (int i = 0; i < kc_n_bufs; i++) {
        free(kc_bufs[i].base);
        free(kc_bufs[i].saved);
    }
    kc_n_bufs = 0;
}

/* ---- views -------------------------------------------------------------------------------------------- */

typedef enum kc_layout {
    KC_DENSE = 0,
    KC_ROWS,  /* rows 5 elements further apart than they are long, the first 3 elements into the buffer */
    KC_EVERY2 /* the same, with stride 2 along the last dimension */
} kc_layout;

/* A view in a buffer of its own. broadcast: bit d makes the stride of dimension d 0. */
KC_UNUSED static zx_view kc_new_broadcast(zx_dtype t, int ndim, const int64_t *shape, kc_layout layout,
                                          unsigned broadcast)
{
    zx_view v = {.dtype = t, .ndim = ndim};
    int64_t stride = layout == KC_EVERY2 ? 2 : 1, span = 1;
    for (int d = ndim - 1; d >= 0; d--) {
        bool flat = broadcast >> d & 1;
        v.shape[d] = shape[d];
        v.stride[d] = flat ? 0 : stride;
        if (!flat) {
            if (shape[d] > 0) span += stride * (shape[d] - 1);
            stride *= zx_max64(1, shape[d]);
        }
        if (d == ndim - 1 && layout != KC_DENSE) stride += 5;
    }
    int64_t skip = layout == KC_DENSE ? 0 : 3;
    size_t bytes = zx_view_numel(&v) == 0 ? 0 : (size_t)(span + skip) * zx_dtype_bytes(t);
    v.data = zx_at(kc_alloc(bytes), t, bytes == 0 ? 0 : skip);
    return v;
}
KC_UNUSED static zx_view kc_new(zx_dtype t, int ndim, const int64_t *shape, kc_layout layout)
{
    return kc_new_broadcast(t, ndim, shape, layout, 0);
}
KC_UNUSED static zx_view kc_new_1d(zx_dtype t, int64_t n)
{
    return kc_new(t, 1, &n, KC_DENSE);
}
KC_UNUSED static zx_view kc_new_2d(zx_dtype t, int64_t rows, int64_t cols, kc_layout layout)
{
    return kc_new(t, 2, (int64_t[]){rows, cols}, layout);
}

/* Address of logical element i (row-major). */
KC_UNUSED static void *kc_at(const zx_view *v, int64_t i)
{
    int64_t at = 0;
    for (int d = v->ndim - 1; d >= 0; d--) {
        at += i % v->shape[d] * v->stride[d];
        i /= v->shape[d];
    }
    return zx_at(v->data, v->dtype, at);
}
KC_UNUSED static double kc_read(zx_dtype t, const void *p)
{
    switch (t) {
    case ZX_F32:
        return *(const float *)p;
    case ZX_BF16:
        return zx_bf16_to_f32(*(const uint16_t *)p);
    case ZX_F64:
        return *(const double *)p;
    case ZX_I32:
        return *(const int32_t *)p;
    case ZX_I64:
        return (double)*(const int64_t *)p;
    default:
        return *(const uint8_t *)p;
    }
}
/* To 8 significant bits in one rounding, to nearest even; written apart from the kernels' way to do it. */
KC_UNUSED static uint16_t kc_bfloat16(double x)
{
    float rounded = (float)x;
    if (isfinite(x) && x != 0) {
        int exponent;
        frexp(x, &exponent);
        int last = exponent - 8 > -133 ? exponent - 8 : -133;
        rounded = (float)ldexp(rint(ldexp(x, -last)), last);
    }
    uint32_t bits;
    memcpy(&bits, &rounded, sizeof bits);
    return (uint16_t)(bits >> 16 | (isnan(x) ? 0x40 : 0));
}
KC_UNUSED static void kc_write(zx_dtype t, void *p, double x)
{
    switch (t) {
    case ZX_F32:
        *(float *)p = (float)x;
        break;
    case ZX_BF16:
        *(uint16_t *)p = kc_bfloat16(x);
        break;
    case ZX_F64:
        *(double *)p = x;
        break;
    case ZX_I32:
        *(int32_t *)p = (int32_t)x;
        break;
    case ZX_I64:
        *(int64_t *)p = (int64_t)x;
        break;
    default:
        *(uint8_t *)p = (uint8_t)x;
    }
}
KC_UNUSED static double kc_get(const zx_view *v, int64_t i)
{
    return kc_read(v->dtype, kc_at(v, i));
}
KC_UNUSED static void kc_set(const zx_view *v, int64_t i, double x)
{
    kc_write(v->dtype, kc_at(v, i), x);
}

/* ---- random numbers ----------------------------------------------------------------------------------- */

static uint64_t kc_random_state = 1;
KC_UNUSED static uint64_t kc_random(void) /* splitmix64 */
{
    uint64_t z = kc_random_state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
}
KC_UNUSED static double kc_uniform(double lo, double hi)
{
    return lo + (hi - lo) * (double)(kc_random() >> 11) * 0x1p-53;
}
/* Mean 0, variance 1, within 3.5: four uniform numbers added up. */
KC_UNUSED static double kc_normal(void)
{
    uint64_t a = kc_random(), b = kc_random();
    double sum = (double)(a >> 32) + (double)(a & 0xffffffff) + (double)(b >> 32) + (double)(b & 0xffffffff);
    return (sum * 0x1p-32 - 2) * 1.7320508075688772;
}
KC_UNUSED static void kc_fill_normal(const zx_view *v, double scale)
{
    for (int64_t i = 0, n = zx_view_numel(v); i < n; i++)
        kc_set(v, i, scale * kc_normal());
}
KC_UNUSED static void kc_fill_uniform(const zx_view *v, double lo, double hi)
{
    for (int64_t i = 0, n = zx_view_numel(v); i < n; i++)
        kc_set(v, i, kc_uniform(lo, hi));
}
KC_UNUSED static void kc_fill_int(const zx_view *v, int64_t lo, int64_t hi) /* [lo, hi] */
{
    for (int64_t i = 0, n = zx_view_numel(v); i < n; i++)
        kc_set(v, i, (double)(lo + (int64_t)(kc_random() % (uint64_t)(hi - lo + 1))));
}

/* ---- launching ---------------------------------------------------------------------------------------- */

/* One launch with poisoned scratch of exactly the size that the table asks for. */
KC_UNUSED static zx_status kc_launch(kc_path path, int n_threads, zx_op_id op, const void *args)
{
    const zx_kernel *k = &(path == KC_REF ? zx_kernels_ref() : zx_kernels_cpu())->op[op];
    if (!k->launch) ZX_FAIL(ZX_ERR_UNSUPPORTED, "the table has no %s", k->name);
    if (!kc_pools[n_threads] && n_threads > 1) ZX_TRY(zx_pool_open(n_threads, &kc_pools[n_threads]));
    size_t bytes = k->scratch ? k->scratch(args, n_threads) : 0;
    char *scratch = aligned_alloc(64, (bytes + 2 * KC_SENTINEL + 63) / 64 * 64);
    memset(scratch, 0xa5, bytes + 2 * KC_SENTINEL);
    memset(scratch + KC_SENTINEL, 0xff, bytes);
    zx_exec exec = {.pool = kc_pools[n_threads],
                    .scratch = bytes ? scratch + KC_SENTINEL : NULL,
                    .scratch_bytes = bytes,
                    .gemm = kc_gemm,
                    .isa = path == KC_AVX2 ? kc_wide : ZX_ISA_PLAIN};
    zx_status status = k->launch(&exec, args);
    bool intact = true;
    for (int i = 0; i < KC_SENTINEL; i++)
        intact = intact && scratch[i] == (char)0xa5 && scratch[KC_SENTINEL + bytes + (size_t)i] == (char)0xa5;
    free(scratch);
    kc_launched[op][path]++;
    if (!intact) ZX_FAIL(ZX_ERR_BUG, "%s wrote outside its scratch memory", k->name);
    return status;
}

/* ---- comparison --------------------------------------------------------------------------------------- */

typedef struct kc_bound {
    double rel;        /* |got - ref| <= rel * |ref| + abs + rounding of one store in the output's dtype */
    double abs;
    bool avx2_differs; /* plain and AVX2 need not agree in bits (say why where it is set); the error of AVX2 is
                        * then at most twice that of plain, give or take one rounding of the largest output */
    double avx2_floor; /* and give or take this, where the plain sums happen to be the better ones */
} kc_bound;

/* Half a unit in the last place of x in dtype t. */
KC_UNUSED static double kc_half_ulp(zx_dtype t, double x)
{
    static const int digits[ZX_N_DTYPE] = {[ZX_F32] = 24, [ZX_BF16] = 8, [ZX_F64] = 53};
    if (!isfinite(x) || digits[t] == 0) return 0;
    return fmax(ldexp(fabs(x), -digits[t]), t == ZX_F64 ? 0 : t == ZX_F32 ? 0x1p-150 : 0x1p-134);
}

/* Both are the same NaN-ness, the same infinity, or numbers. */
KC_UNUSED static bool kc_same_kind(double a, double b)
{
    if (isnan(a) || isnan(b)) return isnan(a) && isnan(b);
    return !(isinf(a) || isinf(b)) || a == b;
}

/* Logical elements that lie next to each other in memory, from any multiple of this number on. */
KC_UNUSED static int64_t kc_run(const zx_view *v)
{
    return v->ndim > 0 && v->stride[v->ndim - 1] == 1 ? zx_max64(1, v->shape[v->ndim - 1]) : 1;
}

/* Everything outside the elements of the outputs is as it was at kc_save. */
KC_UNUSED static bool kc_outside_unchanged(int n_outs, zx_view *const *outs)
{
    for (int i = 0; i < kc_n_bufs; i++) {
        kc_buf *b = &kc_bufs[i];
        if (!b->saved) continue;
        bool is_out = false;
        for (int o = 0; o < n_outs; o++)
            is_out = is_out || (outs[o]->data && kc_find(outs[o]->data) == b);
        if (!is_out && memcmp(b->data, b->saved, b->bytes) != 0) return false;
        if (!is_out) continue;
        char *expected = malloc(b->bytes + 1);
        memcpy(expected, b->saved, b->bytes);
        for (int o = 0; o < n_outs; o++) {
            if (!outs[o]->data || kc_find(outs[o]->data) != b) continue;
            const zx_view *v = outs[o];
            int64_t run = kc_run(v);
            for (int64_t e = 0, n = zx_view_numel(v); e < n; e += run) {
                char *p = kc_at(v, e);
                memcpy(expected + (p - b->data), p, (size_t)run * zx_dtype_bytes(v->dtype));
            }
        }
        bool same = memcmp(expected, b->data, b->bytes) == 0;
        free(expected);
        if (!same) return false;
    }
    return true;
}

/* Points a view at a float64 copy of its buffer (made once per buffer, so aliases stay aliases). */
KC_UNUSED static void kc_widen(zx_view *v, int n_before, void **wide_of)
{
    if (!v->data || (v->dtype != ZX_F32 && v->dtype != ZX_BF16)) return;
    kc_buf *b = kc_find(v->data);
    if (b - kc_bufs >= n_before) return;
    int64_t n = (int64_t)(b->bytes / zx_dtype_bytes(v->dtype));
    int64_t offset = ((char *)v->data - b->data) / (int64_t)zx_dtype_bytes(v->dtype);
    void **wide = &wide_of[b - kc_bufs];
    if (!*wide) {
        *wide = kc_alloc((size_t)n * sizeof(double));
        for (int64_t i = 0; i < n; i++)
            ((double *)*wide)[i] = kc_read(v->dtype, zx_at(b->saved, v->dtype, i));
    }
    v->data = (double *)*wide + offset;
    v->dtype = ZX_F64;
}

KC_UNUSED static void kc_check_(const char *file, int line, zx_op_id op, void *args, int n_ins, zx_view *const *ins,
                                int n_outs, zx_view *const *outs, kc_bound bound)
{
    enum { MAX_VIEWS = 16 };
    const char *name = zx_kernels_cpu()->op[op].name;
    int n_before = kc_n_bufs, n_views = n_ins + n_outs;
    zx_view narrow[MAX_VIEWS], wide[MAX_VIEWS];
    zx_view *views[MAX_VIEWS];
    void *wide_of[KC_MAX_BUFS] = {0};
    static zx_view nothing;
    for (int i = 0; i < n_views; i++) {
        views[i] = i < n_ins ? ins[i] : outs[i - n_ins];
        if (!views[i]) views[i] = &nothing;
        narrow[i] = *views[i];
    }
    kc_save();
    /* The reference, on copies in float64. */
    for (int i = 0; i < n_views; i++)
        kc_widen(views[i], n_before, wide_of);
    zx_status status = kc_launch(KC_REF, 1, op, args);
    for (int i = 0; i < n_views; i++) {
        wide[i] = *views[i];
        *views[i] = narrow[i];
    }
    if (!check_status_(status, ZX_OK, file, line, name)) {
        printf("    %s: %s on ref\n", name, kc_label);
        return;
    }
    double worst[KC_N_PATHS] = {0}, one_rounding = 0;
    unsigned char *first[KC_N_PATHS][MAX_VIEWS] = {{0}};
    static const struct {
        kc_path path;
        int n_threads;
    } runs[2][5] = {{{KC_PLAIN, 1}, {KC_AVX2, 1}, {KC_PLAIN, 2}, {KC_AVX2, 3}, {KC_AVX2, 1}},
                    {{KC_PLAIN, 1}, {KC_AVX2, 1}, {KC_PLAIN, 3}, {KC_AVX2, 2}, {KC_PLAIN, 1}}};
    static int turn; /* every second case takes the other list */
    turn = !turn;
    for (int run = 0; run < 5; run++) {
        kc_path path = runs[turn][run].path;
        int n_threads = runs[turn][run].n_threads;
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        kc_restore();
        status = kc_launch(path, n_threads, op, args);
        if (!check_status_(status, ZX_OK, file, line, name)) {
            printf("    %s: %s on %s, %d threads\n", name, kc_label, kc_path_name[path], n_threads);
            break;
        }
        if (!check_(kc_outside_unchanged(n_outs, outs), file, line, "only the outputs are written"))
            printf("    %s: %s on %s, %d threads\n", name, kc_label, kc_path_name[path], n_threads);
        bool fresh = first[path][0] == NULL && n_outs > 0;
        bool equal = true, equal_plain = true, near = true;
        for (int o = 0; o < n_outs; o++) {
            const zx_view *v = outs[o], *r = &wide[n_ins + o];
            size_t size = zx_dtype_bytes(v->dtype);
            int64_t n = v->data ? zx_view_numel(v) : 0;
            if (fresh) first[path][o] = malloc((size_t)n * size + 1);
            for (int64_t i = 0, length = kc_run(v); i < n && !fresh; i += length)
                equal = equal && memcmp(first[path][o] + (size_t)i * size, kc_at(v, i), (size_t)length * size) == 0;
            for (int64_t i = 0; i < n && fresh; i++) {
                unsigned char *kept = first[path][o] + (size_t)i * size;
                memcpy(kept, kc_at(v, i), size);
                if (path == KC_AVX2) { /* what equals plain has been compared already */
                    if (memcmp(kept, first[KC_PLAIN][o] + (size_t)i * size, size) == 0) continue;
                    equal_plain = false;
                }
                double got = kc_get(v, i), want = kc_get(r, i), error = fabs(got - want);
                double rounding = kc_half_ulp(v->dtype, want) + kc_half_ulp(v->dtype, got - want);
                bool ok = kc_same_kind(got, want);
                if (ok && isfinite(want)) {
                    ok = error <= bound.rel * fabs(want) + bound.abs + rounding;
                    worst[path] = fmax(worst[path], error - rounding);
                    one_rounding = fmax(one_rounding, kc_half_ulp(v->dtype, want));
                }
                if (!ok && near)
                    printf("    %s: %s on %s: output %d, element %lld is %.9g, ref %.9g\n", name, kc_label,
                           kc_path_name[path], o, (long long)i, got, want);
                near = near && ok;
            }
        }
        check_(near, file, line, "within the bound of the double reference");
        if (!check_(equal, file, line, "the same bits again and with other threads"))
            printf("    %s: %s on %s, %d threads\n", name, kc_label, kc_path_name[path], n_threads);
        if (fresh && path == KC_AVX2) {
            bool fine = equal_plain ||
                        (bound.avx2_differs && worst[KC_AVX2] <= 2 * worst[KC_PLAIN] + one_rounding + bound.avx2_floor);
            if (!check_(fine, file, line, "AVX2 agrees with plain"))
                printf("    %s: %s: error %.3g, plain %.3g (past one rounding)\n", name, kc_label, worst[KC_AVX2],
                       worst[KC_PLAIN]);
        }
    }
    for (int p = 0; p < KC_N_PATHS; p++)
        for (int o = 0; o < n_outs; o++)
            free(first[p][o]);
}

/* Outputs against values that the test computed itself, one element after the other, without the code that `ref` and
 * the fast paths share. tolerance is absolute; two roundings of the output's dtype come on top. */
KC_UNUSED static void kc_check_naive_(const char *file, int line, const zx_view *out, const double *want,
                                      double tolerance)
{
    for (int64_t i = 0, n = zx_view_numel(out); i < n; i++) {
        double got = kc_get(out, i);
        bool ok = kc_same_kind(got, want[i]);
        if (ok && isfinite(want[i])) ok = fabs(got - want[i]) <= tolerance + 2 * kc_half_ulp(out->dtype, want[i]);
        if (ok) continue;
        check_(false, file, line, "equal to the plain formula");
        printf("    %s: element %lld is %.9g, want %.9g\n", kc_label, (long long)i, got, want[i]);
        return;
    }
    check_(true, file, line, "equal to the plain formula");
}
#define KC_CHECK_NAIVE(out, want, tolerance) kc_check_naive_(__FILE__, __LINE__, &(out), (want), (tolerance))

/* KC_CHECK(op, args, bound, (ins...), (outs...)): args is the struct itself; ins and outs are addresses of
 * its views. Each output is listed once; one that is accumulated into or aliases an input is listed as output
 * only. Inputs with data == NULL may be listed; an operation without inputs says (NULL). */
#define KC_VIEWS_(...)                                                                                                 \
    (zx_view *[])                                                                                                      \
    {                                                                                                                  \
        __VA_ARGS__                                                                                                    \
    }
#define KC_COUNT_(...) (int)(sizeof(KC_VIEWS_(__VA_ARGS__)) / sizeof(zx_view *))
#define KC_STRIP_(...) __VA_ARGS__
#define KC_CHECK(op, args, bound, ins, outs)                                                                           \
    kc_check_(__FILE__, __LINE__, ZX_OP_##op, &(args), KC_COUNT_ ins, KC_VIEWS_ ins, KC_COUNT_ outs, KC_VIEWS_ outs,   \
              (bound))

/* The operation refuses the arguments, in every table, and writes nothing. */
#define KC_REFUSES(op, args, status)                                                                                   \
    do {                                                                                                               \
        kc_save();                                                                                                     \
        for (int path_ = KC_REF; path_ <= KC_PLAIN; path_++) {                                                         \
            CHECK_STATUS(kc_launch((kc_path)path_, 1, ZX_OP_##op, &(args)), status);                                   \
            CHECK_ERROR_HAS(#op);                                                                                      \
        }                                                                                                              \
        CHECK(kc_outside_unchanged(0, NULL));                                                                          \
    } while (0)

/* ---- the end of a test program ------------------------------------------------------------------------ */

KC_UNUSED static void kc_report(const char *program)
{
    for (int op = 0; op < ZX_N_OPS; op++) {
        const char *owner = NULL;
        for (size_t i = 0; i < sizeof kc_owner / sizeof kc_owner[0]; i++)
            if ((int)kc_owner[i].op == op) owner = kc_owner[i].program;
        if (!CHECK(owner != NULL)) printf("    %s has no cases: see kc_owner\n", zx_kernels_cpu()->op[op].name);
        if (!owner || strcmp(owner, program) != 0) continue;
        for (int path = 0; path < KC_N_PATHS; path++)
            if ((path != KC_AVX2 || kc_have_avx2()) && !CHECK(kc_launched[op][path] > 0))
                printf("    %s has no case on %s\n", zx_kernels_cpu()->op[op].name, kc_path_name[path]);
    }
    for (int i = 0; i <= KC_MAX_THREADS; i++)
        zx_pool_close(kc_pools[i]);
}

#endif
