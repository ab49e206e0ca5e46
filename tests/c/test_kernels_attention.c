/* test_kernels_attention.c - attention: cases for kernel_cases.h, documents, faults, and gradients of the double
 * reference against central differences. */
#include "device/device.h"
#include "kernel_gradients.h"

static const zx_dtype dtypes[] = {ZX_F32, ZX_BF16, ZX_F64};

typedef struct attention_case {
    int64_t rows, heads, kv_heads, dim;
    int n_docs;
    int32_t cu[12];
    bool causal, fused; /* fused: q, k and v are columns of one matrix */
} attention_case;

typedef struct attention_views {
    zx_view q, k, v, out, lse, dout, dq, dk, dv;
    zx_docs docs;
} attention_views;

static attention_views attention_new(zx_dtype t, const attention_case *s)
{
    attention_views w = {0};
    int64_t row = s->fused ? (s->heads + 2 * s->kv_heads) * s->dim : 0;
    if (s->fused) {
        zx_view all = kc_new_2d(t, s->rows, row, KC_DENSE);
        kc_fill_normal(&all, 1);
        w.q = zx_view_3d(all.data, t, s->rows, s->heads, s->dim, row, s->dim);
        w.k = zx_view_3d(zx_at(all.data, t, s->heads * s->dim), t, s->rows, s->kv_heads, s->dim, row, s->dim);
        w.v = zx_view_3d(zx_at(all.data, t, (s->heads + s->kv_heads) * s->dim), t, s->rows, s->kv_heads, s->dim, row,
                         s->dim);
    } else {
        w.q = kc_new(t, 3, (int64_t[]){s->rows, s->heads, s->dim}, KC_ROWS);
        w.k = kc_new(t, 3, (int64_t[]){s->rows, s->kv_heads, s->dim}, KC_ROWS);
        w.v = kc_new(t, 3, (int64_t[]){s->rows, s->kv_heads, s->dim}, KC_DENSE);
        kc_fill_normal(&w.q, 1);
        kc_fill_normal(&w.k, 1);
        kc_fill_normal(&w.v, 1);
    }
    w.out = kc_new(t, 3, (int64_t[]){s->rows, s->heads, s->dim}, s->fused ? KC_DENSE : KC_ROWS);
    w.lse = kc_new_2d(zx_dtype_sum(t), s->heads, s->rows, s->fused ? KC_DENSE : KC_ROWS);
    w.docs.n_docs = s->n_docs;
    int32_t *cu = kc_alloc((size_t)(s->n_docs + 1) * sizeof *cu);
    memcpy(cu, s->cu, (size_t)(s->n_docs + 1) * sizeof *cu);
    for (int d = 0; d < s->n_docs; d++)
        w.docs.max_len = zx_max64(w.docs.max_len, cu[d + 1] - cu[d]);
    w.docs.cu_seqlens = cu;
    return w;
}

static zx_attention_fwd_args attention_fwd_of(const attention_views *w, bool causal)
{
    return (zx_attention_fwd_args){.q = w->q,
                                   .k = w->k,
                                   .v = w->v,
                                   .out = w->out,
                                   .lse = w->lse,
                                   .docs = w->docs,
                                   .scale = w->q.shape[2] > 0 ? 1 / sqrt((double)w->q.shape[2]) : 1,
                                   .causal = causal};
}

static zx_attention_bwd_args attention_bwd_of(const attention_views *w, bool causal)
{
    zx_attention_fwd_args f = attention_fwd_of(w, causal);
    return (zx_attention_bwd_args){.q = w->q,
                                   .k = w->k,
                                   .v = w->v,
                                   .out = w->out,
                                   .lse = w->lse,
                                   .dout = w->dout,
                                   .dq = w->dq,
                                   .dk = w->dk,
                                   .dv = w->dv,
                                   .docs = w->docs,
                                   .scale = f.scale,
                                   .causal = causal};
}

static void run_attention(zx_dtype t, attention_case s)
{
    KC_LABEL("%s N %lld H %lld G %lld D %lld docs %d causal %d fused %d %s", zx_dtype_name(t), (long long)s.rows,
             (long long)s.heads, (long long)s.kv_heads, (long long)s.dim, s.n_docs, s.causal, s.fused,
             kc_gemm ? "blas" : "no blas");
    attention_views w = attention_new(t, &s);
    zx_attention_fwd_args fwd = attention_fwd_of(&w, s.causal);
    double grow = 1 + sqrt((double)w.docs.max_len) / 4;
    /* The tiled path differs in the order of its sums; BLAS sums D products in one go, the plain path eight sums apart.
     */
    double floor = unit(t) * (4 + 2 * sqrt((double)s.dim));
    kc_bound bound = {.rel = 32 * unit(t), .abs = 32 * unit(t), .avx2_differs = true, .avx2_floor = floor};
    KC_CHECK(attention_fwd, fwd, bound, (&fwd.q, &fwd.k, &fwd.v), (&fwd.out, &fwd.lse));
    w.dout = kc_new(t, 3, (int64_t[]){s.rows, s.heads, s.dim}, KC_ROWS);
    kc_fill_normal(&w.dout, 1);
    w.dq = kc_new(t, 3, (int64_t[]){s.rows, s.heads, s.dim}, KC_ROWS);
    w.dk = kc_new(t, 3, (int64_t[]){s.rows, s.kv_heads, s.dim}, KC_DENSE);
    w.dv = kc_new(t, 3, (int64_t[]){s.rows, s.kv_heads, s.dim}, KC_ROWS);
    zx_attention_bwd_args bwd = attention_bwd_of(&w, s.causal);
    bound = (kc_bound){.rel = 64 * unit(t),
                       .abs = 256 * grow * unit(t) * (double)zx_max64(1, s.heads / zx_max64(1, s.kv_heads)),
                       .avx2_differs = true,
                       .avx2_floor = floor};
    KC_CHECK(attention_bwd, bwd, bound, (&bwd.q, &bwd.k, &bwd.v, &bwd.out, &bwd.lse, &bwd.dout),
             (&bwd.dq, &bwd.dk, &bwd.dv));
    kc_end();
}

static const attention_case attention_cases[] = {
    {.rows = 1, .heads = 1, .kv_heads = 1, .dim = 1, .n_docs = 1, .cu = {0, 1}},
    {.rows = 0, .heads = 2, .kv_heads = 1, .dim = 8, .n_docs = 1, .cu = {0, 0}},
    {.rows = 5, .heads = 2, .kv_heads = 1, .dim = 8, .n_docs = 0, .cu = {0}},
    {.rows = 37, .heads = 2, .kv_heads = 2, .dim = 8, .n_docs = 3, .cu = {0, 1, 1, 33}},
    {.rows = 200, .heads = 3, .kv_heads = 1, .dim = 33, .n_docs = 6, .cu = {3, 34, 36, 163, 163, 196, 196}},
    {.rows = 259, .heads = 2, .kv_heads = 1, .dim = 40, .n_docs = 2, .cu = {0, 257, 258}, .fused = true},
    {.rows = 192, .heads = 2, .kv_heads = 2, .dim = 32, .n_docs = 1, .cu = {0, 192}, .fused = true},
    {.rows = 90, .heads = 2, .kv_heads = 1, .dim = 128, .n_docs = 2, .cu = {0, 70, 90}},
    {.rows = 70, .heads = 1, .kv_heads = 1, .dim = 256, .n_docs = 1, .cu = {0, 67}},
    {.rows = 70, .heads = 8, .kv_heads = 1, .dim = 16, .n_docs = 4, .cu = {0, 31, 64, 65, 65}, .fused = true},
};

static void test_attention(void)
{
    for (int d = 0; d < 3; d++)
        for (size_t i = 0; i < sizeof attention_cases / sizeof attention_cases[0]; i++)
            for (int causal = 0; causal < 2; causal++) {
                attention_case s = attention_cases[i];
                s.causal = causal;
                run_attention(dtypes[d], s);
            }
}

/* A long document, where the cut into tiles matters, on every path. */
static void test_attention_long(void)
{
    for (int causal = 0; causal < 2; causal++)
        run_attention(
            ZX_F32,
            (attention_case){
                .rows = 389, .heads = 1, .kv_heads = 1, .dim = 24, .n_docs = 1, .cu = {0, 389}, .causal = causal});
}

/* Documents do not see each other: changing one leaves the bits of the others. */
static void test_attention_documents(void)
{
    attention_case s = {
        .rows = 150, .heads = 2, .kv_heads = 1, .dim = 32, .n_docs = 3, .cu = {0, 70, 71, 150}, .causal = true};
    for (int path = KC_REF; path < KC_N_PATHS; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        KC_LABEL("%s", kc_path_name[path]);
        attention_views w = attention_new(ZX_F32, &s);
        zx_attention_fwd_args fwd = attention_fwd_of(&w, true);
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_attention_fwd, &fwd));
        int64_t n = zx_view_numel(&w.out), per_row = s.heads * s.dim;
        float *before = malloc((size_t)n * sizeof *before);
        for (int64_t i = 0; i < n; i++)
            before[i] = (float)kc_get(&w.out, i);
        for (int64_t i = 0; i < 70 * s.dim; i++) {
            kc_set(&w.k, i, NAN);
            kc_set(&w.v, i, NAN);
        }
        CHECK_OK(kc_launch((kc_path)path, 1, ZX_OP_attention_fwd, &fwd));
        bool same = true, seen = true;
        for (int64_t i = 0; i < n; i++) {
            float now = (float)kc_get(&w.out, i);
            if (i < 70 * per_row)
                seen = seen && isnan(now);
            else
                same = same && now == before[i];
        }
        CHECK(same);
        CHECK(seen);
        free(before);
        kc_end();
    }
}

/* AVX-512 gives the bits of AVX2. */
static void test_attention_avx512(void)
{
    if (zx_isa_detect() < ZX_ISA_AVX512) {
        printf("    not on this processor\n");
        return;
    }
    for (size_t i = 0; i < sizeof attention_cases / sizeof attention_cases[0]; i++)
        for (int d = 0; d < 2; d++) {
            attention_case s = attention_cases[i];
            s.causal = (i + (size_t)d) % 2;
            KC_LABEL("case %zu %s", i, zx_dtype_name(dtypes[d]));
            attention_views w = attention_new(dtypes[d], &s);
            w.dout = kc_new(dtypes[d], 3, w.q.shape, KC_DENSE);
            w.dq = kc_new(dtypes[d], 3, w.q.shape, KC_DENSE);
            w.dk = kc_new(dtypes[d], 3, w.k.shape, KC_DENSE);
            w.dv = kc_new(dtypes[d], 3, w.k.shape, KC_DENSE);
            kc_fill_normal(&w.dout, 1);
            zx_attention_fwd_args fwd = attention_fwd_of(&w, s.causal);
            zx_attention_bwd_args bwd = attention_bwd_of(&w, s.causal);
            CHECK_OK(kc_launch(KC_AVX2, 1, ZX_OP_attention_fwd, &fwd));
            CHECK_OK(kc_launch(KC_AVX2, 1, ZX_OP_attention_bwd, &bwd));
            kc_save();
            kc_wide = ZX_ISA_AVX512;
            CHECK_OK(kc_launch(KC_AVX2, 2, ZX_OP_attention_fwd, &fwd));
            CHECK_OK(kc_launch(KC_AVX2, 2, ZX_OP_attention_bwd, &bwd));
            kc_wide = ZX_ISA_AVX2;
            if (!CHECK(kc_outside_unchanged(0, NULL))) printf("    %s\n", kc_label);
            kc_end();
        }
}

static void test_attention_refuses(void)
{
    attention_case s = {.rows = 20, .heads = 4, .kv_heads = 2, .dim = 8, .n_docs = 2, .cu = {0, 12, 20}};
    KC_LABEL("faults");
    attention_views w = attention_new(ZX_F32, &s);
    zx_attention_fwd_args good = attention_fwd_of(&w, true), bad;
    int32_t *cu = (int32_t *)(uintptr_t)w.docs.cu_seqlens;
    bad = good;
    bad.docs.max_len = 11;
    KC_REFUSES(attention_fwd, bad, ZX_ERR_ARG);
    cu[2] = 21;
    KC_REFUSES(attention_fwd, good, ZX_ERR_ARG);
    cu[2] = 11;
    KC_REFUSES(attention_fwd, good, ZX_ERR_ARG);
    cu[2] = 20;
    bad = good;
    bad.k.shape[1] = bad.v.shape[1] = 3;
    KC_REFUSES(attention_fwd, bad, ZX_ERR_ARG);
    bad = good;
    bad.v.dtype = ZX_BF16;
    KC_REFUSES(attention_fwd, bad, ZX_ERR_ARG);
    bad = good;
    bad.lse.shape[1] = 19;
    KC_REFUSES(attention_fwd, bad, ZX_ERR_ARG);
    kc_end();
}

static void test_gradient_attention(void)
{
    for (int causal = 0; causal < 2; causal++) {
        attention_case s = {
            .rows = 20, .heads = 4, .kv_heads = 2, .dim = 6, .n_docs = 3, .cu = {1, 11, 11, 18}, .causal = causal};
        attention_views w = attention_new(ZX_F64, &s);
        zx_attention_fwd_args fwd = attention_fwd_of(&w, causal);
        CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_attention_fwd, &fwd));
        w.dout = kc_new(ZX_F64, 3, w.q.shape, KC_DENSE);
        kc_fill_normal(&w.dout, 1);
        w.dq = kc_new(ZX_F64, 3, w.q.shape, KC_DENSE);
        w.dk = kc_new(ZX_F64, 3, w.k.shape, KC_DENSE);
        w.dv = kc_new(ZX_F64, 3, w.k.shape, KC_DENSE);
        zx_attention_bwd_args bwd = attention_bwd_of(&w, causal);
        CHECK_OK(kc_launch(KC_REF, 1, ZX_OP_attention_bwd, &bwd));
        run_ref run = {ZX_OP_attention_fwd, &fwd, &fwd.out, &w.dout};
        check_gradient("q", &w.q, &bwd.dq, weighted_loss, &run);
        check_gradient("k", &w.k, &bwd.dk, weighted_loss, &run);
        check_gradient("v", &w.v, &bwd.dv, weighted_loss, &run);
        kc_end();
    }
}

int main(void)
{
    CHECK_OK(zx_gemm_open(zx_env_text(ZX_ENV_BLAS), &kc_gemm));
    RUN(test_attention);
    RUN(test_attention_long);
    RUN(test_attention_documents);
    RUN(test_attention_avx512);
    RUN(test_attention_refuses);
    RUN(test_gradient_attention);
    kc_report("attention");
    return check_report();
}
