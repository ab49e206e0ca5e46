/* attention_avx2.c - attention on tiles: products by BLAS, softmax by AVX2.
 *
 * DESIGN. Scores are kept transposed, keys x queries: S^T = K Q^T with the tile of queries transposed once per task.
 * So every product is of a kind that BLAS does fast on small operands (the form Q K^T, second operand transposed, runs
 * at half the speed), operands are read where they lie, and the softmax runs along registers whose lanes are queries:
 * maxima and sums need no steps across lanes.
 *
 *   forward, per tile of queries and head:   S^T = K Q^T;  P^T = exp(S^T - max);  O = shrink * O + (P^T)^T V
 *   backward, per document and key/value head, for each of its query heads and tiles of queries, in this order:
 *     S^T = K Q^T;  P^T = exp(S^T - lse);  dP^T = V dO^T;  dS^T = scale * P^T * (dP^T - delta)
 *     dV += P^T dO;  dK += dS^T Q;  dQ += (dS^T)^T K
 *
 * One task owns dk and dv of a document and a key/value head, so their sums have one order whatever the number of
 * threads. Tiles of bfloat16, or with rows that overlap, are first copied to scratch as float.
 * Sums are in another order than in attention.ref.h, so bits differ from the plain path; the error does not. */
#include "kernels/attention.h"
#include "kernels/vmath_avx2.h"

enum { R = ZX_ATTN_ROWS, KEYS = ZX_ATTN_KEYS, DIAGONAL = ZX_ATTN_KEYS / 2 };

/* ---- tiles -------------------------------------------------------------------------------------------- */

static bool direct(const zx_view *v)
{
    return v->dtype == ZX_F32 && v->stride[0] >= v->shape[2];
}

static void copy_rows(const zx_view *v, int64_t row, int64_t n_rows, int64_t head, float *out)
{
    const int64_t dim = v->shape[2];
    for (int64_t i = 0; i < n_rows; i++) {
        const int64_t at = zx_attn_at(v, row + i, head);
        if (v->dtype == ZX_F32)
            memcpy(out + i * dim, (const float *)v->data + at, (size_t)dim * sizeof *out);
        else
            for (int64_t d = 0; d < dim; d++)
                out[i * dim + d] = zx_load_bf16(v->data, at + d);
    }
}

/* Rows of one head as floats, *ld apart: where they lie, or copied to `room`. */
static const float *rows_of(const zx_view *v, int64_t row, int64_t n_rows, int64_t head, float *room, int64_t *ld)
{
    if (direct(v)) {
        *ld = v->stride[0];
        return (const float *)v->data + zx_attn_at(v, row, head);
    }
    copy_rows(v, row, n_rows, head, room);
    *ld = v->shape[2];
    return room;
}

static void put_rows(const zx_view *v, int64_t row, int64_t n_rows, int64_t head, const float *in, int64_t ld)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const int64_t at = zx_attn_at(v, row + i, head), dim = v->shape[2];
        if (v->dtype == ZX_F32)
            memcpy((float *)v->data + at, in + i * ld, (size_t)dim * sizeof *in);
        else
            for (int64_t d = 0; d < dim; d++)
                zx_store_bf16(v->data, at + d, in[i * ld + d]);
    }
}

static inline void transpose_8x8(const float *in, int64_t ld_in, float *out, int64_t ld_out)
{
    __m256 r[8], t[8];
    for (int i = 0; i < 8; i++)
        r[i] = _mm256_loadu_ps(in + i * ld_in);
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        _mm256_storeu_ps(out + i * ld_out, _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
        _mm256_storeu_ps(out + (i + 4) * ld_out, _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
    }
}

/* out (dim, R) = scale * in^T, in (n_rows, dim). Columns past n_rows are not written. */
static void transpose(const float *in, int64_t ld, int64_t n_rows, int64_t dim, float scale, float *out)
{
    int64_t whole_rows = n_rows / 8 * 8, whole_dim = dim / 8 * 8;
    for (int64_t i = 0; i < whole_rows; i += 8)
        for (int64_t d = 0; d < whole_dim; d += 8)
            transpose_8x8(in + i * ld + d, ld, out + d * R + i, R);
    for (int64_t i = 0; i < n_rows; i++)
        for (int64_t d = i < whole_rows ? whole_dim : 0; d < dim; d++)
            out[d * R + i] = in[i * ld + d];
    if (scale == 1.0f) return;
    const __m256 s = _mm256_set1_ps(scale);
    for (int64_t d = 0; d < dim; d++) {
        int64_t i = 0;
        for (; i < whole_rows; i += 8)
            _mm256_storeu_ps(out + d * R + i, _mm256_mul_ps(s, _mm256_loadu_ps(out + d * R + i)));
        for (; i < n_rows; i++)
            out[d * R + i] *= scale;
    }
}

/* A step over keys [key, key + n_keys) for the queries [from, n_rows) of a tile. */
typedef struct step {
    int64_t key, n_keys, from;
    bool masked; /* some of these queries do not see some of these keys */
} step;

/* The step at `key` of a tile whose queries are rows [first, first + n_rows) of its document, n_seen keys in all. On
 * the diagonal steps are shorter and leave out the queries that see none of their keys. */
static step step_at(int64_t key, int64_t first, int64_t n_seen, bool causal)
{
    if (!causal || key < first) return (step){key, zx_min64(KEYS, (causal ? first : n_seen) - key), 0, false};
    return (step){key, zx_min64(DIAGONAL, n_seen - key), key - first, true};
}

/* Row r of s (n_keys, R) is key `key + r`, column i query `first + i`: scores of later keys become -infinity. */
static void mask_later(float *s, int64_t first, int64_t n_rows, const step *at)
{
    for (int64_t r = 1; r < at->n_keys; r++) {
        int64_t n = zx_min64(n_rows, at->key + r - first);
        for (int64_t i = at->from; i < n; i++)
            s[r * R + i] = -INFINITY;
    }
}

/* ---- forward ------------------------------------------------------------------------------------------ */

typedef struct fwd_scratch {
    float *q_t, *s, *acc, *max, *sum, *shrink, *rows;
} fwd_scratch;

static fwd_scratch fwd_scratch_of(float *base, int64_t dim)
{
    fwd_scratch w = {.q_t = base};
    dim = zx_round_up(dim, 8);
    w.s = w.q_t + dim * R;
    w.acc = w.s + KEYS * R;
    w.max = w.acc + R * dim;
    w.sum = w.max + R;
    w.shrink = w.sum + R;
    w.rows = w.shrink + R;
    return w;
}

int64_t zx_attn_fwd_tiled_floats(const zx_attention_fwd_args *a)
{
    const int64_t dim = zx_round_up(a->q.shape[2], 8);
    return 2 * dim * R + KEYS * R + 3 * R + KEYS * dim;
}

/* See zx_attn_softmax. */
static bool softmax_step(float *s, int64_t n_keys, int64_t from, int64_t n_rows, float *max, float *sum, float *shrink)
{
    const __m256 minus_inf = _mm256_set1_ps(-INFINITY);
    int moved = 0;
    for (int64_t i = from; i < n_rows; i += 8) {
        const __m256 old = _mm256_loadu_ps(max + i);
        __m256 top = old, top1 = minus_inf;
        int64_t r = 0;
        for (; r + 2 <= n_keys; r += 2) {
            top = _mm256_max_ps(top, _mm256_loadu_ps(s + r * R + i));
            top1 = _mm256_max_ps(top1, _mm256_loadu_ps(s + (r + 1) * R + i));
        }
        if (r < n_keys) top = _mm256_max_ps(top, _mm256_loadu_ps(s + r * R + i));
        top = _mm256_max_ps(top, top1);
        /* Where all scores so far are -infinity, 0 stands in for the maximum. */
        __m256 shift = _mm256_andnot_ps(_mm256_cmp_ps(top, minus_inf, _CMP_EQ_OQ), top);
        __m256 factor = zx_exp_v8(_mm256_sub_ps(old, shift)), part = _mm256_setzero_ps();
        for (r = 0; r < n_keys; r++) {
            __m256 p = zx_exp_v8(_mm256_sub_ps(_mm256_loadu_ps(s + r * R + i), shift));
            _mm256_storeu_ps(s + r * R + i, p);
            part = _mm256_add_ps(part, p);
        }
        moved |= _mm256_movemask_ps(_mm256_cmp_ps(top, old, _CMP_NEQ_UQ));
        _mm256_storeu_ps(max + i, top);
        _mm256_storeu_ps(shrink + i, factor);
        _mm256_storeu_ps(sum + i, _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(sum + i), factor), part));
    }
    return moved != 0;
}

static void probabilities(float *s, float *dp, int64_t n_keys, int64_t from, int64_t n_rows, const float *lse,
                          const float *delta, float scale)
{
    const __m256 by = _mm256_set1_ps(scale);
    for (int64_t r = 0; r < n_keys; r++)
        for (int64_t i = from; i < n_rows; i += 8) {
            float *at = s + r * R + i, *at_dp = dp + r * R + i;
            __m256 p = zx_exp_v8(_mm256_sub_ps(_mm256_loadu_ps(at), _mm256_loadu_ps(lse + i)));
            __m256 d = _mm256_sub_ps(_mm256_loadu_ps(at_dp), _mm256_loadu_ps(delta + i));
            _mm256_storeu_ps(at, p);
            _mm256_storeu_ps(at_dp, _mm256_mul_ps(by, _mm256_mul_ps(p, d)));
        }
}

const zx_attn_softmax zx_attn_softmax_avx2 = {softmax_step, probabilities};

static void scale_row(float *row, int64_t n, float by)
{
    for (int64_t d = 0; d < n; d++)
        row[d] *= by;
}

void zx_attn_fwd_tiled(const zx_attention_fwd_args *a, const zx_gemm *gemm, const zx_attn_softmax *softmax,
                       const zx_attn_tile *tile, int64_t head, float *scratch)
{
    const int64_t dim = a->q.shape[2], kv = head / (a->q.shape[1] / a->k.shape[1]);
    const int64_t m = tile->n_rows, first = tile->first;
    const int64_t n_seen = a->causal ? first + m : tile->len;
    fwd_scratch w = fwd_scratch_of(scratch, dim);
    int64_t ld;
    const float *q = rows_of(&a->q, tile->begin + first, m, head, w.acc, &ld);
    transpose(q, ld, m, dim, (float)a->scale, w.q_t);
    for (int64_t i = 0; i < R; i++) {
        w.max[i] = -INFINITY;
        w.sum[i] = 0;
    }
    for (int64_t j = 0; j < n_seen;) {
        const step at = step_at(j, first, n_seen, a->causal);
        const int64_t n = at.n_keys, i0 = at.from;
        const float *k = rows_of(&a->k, tile->begin + j, n, kv, w.rows, &ld);
        gemm->sgemm(false, false, n, m - i0, dim, 1.0f, k, ld, w.q_t + i0, R, 0.0f, w.s + i0, R);
        if (at.masked) mask_later(w.s, first, m, &at);
        if (softmax->step(w.s, n, i0, m, w.max, w.sum, w.shrink) && j > 0)
            for (int64_t i = i0; i < m; i++)
                scale_row(w.acc + i * dim, dim, w.shrink[i]);
        const float *v = rows_of(&a->v, tile->begin + j, n, kv, w.rows, &ld);
        gemm->sgemm(true, false, m - i0, dim, n, 1.0f, w.s + i0, R, v, ld, j > 0 ? 1.0f : 0.0f, w.acc + i0 * dim, dim);
        j += n;
    }
    for (int64_t i = 0; i < m; i++) {
        const bool none = w.sum[i] == 0;
        scale_row(w.acc + i * dim, dim, none ? 0 : 1.0f / w.sum[i]);
        zx_store_f32(a->lse.data, head * a->lse.stride[0] + tile->begin + first + i,
                     none ? -INFINITY : w.max[i] + logf(w.sum[i]));
    }
    put_rows(&a->out, tile->begin + first, m, head, w.acc, dim);
}

/* ---- backward ----------------------------------------------------------------------------------------- */

typedef struct bwd_scratch {
    float *q_t, *dout_t, *s, *dp, *dq, *lse, *delta, *q, *dout, *k, *v, *dk, *dv;
} bwd_scratch;

/* What a gradient needs that cannot be summed in place. */
static int64_t sum_floats(const zx_attention_bwd_args *a, const zx_view *v)
{
    return direct(v) ? 0 : zx_min64(a->docs.max_len, a->q.shape[0]) * zx_round_up(a->q.shape[2], 8);
}

static bwd_scratch bwd_scratch_of(float *base, const zx_attention_bwd_args *a)
{
    const int64_t dim = zx_round_up(a->q.shape[2], 8);
    bwd_scratch w = {.q_t = base};
    w.dout_t = w.q_t + dim * R;
    w.s = w.dout_t + dim * R;
    w.dp = w.s + KEYS * R;
    w.dq = w.dp + KEYS * R;
    w.lse = w.dq + R * dim;
    w.delta = w.lse + R;
    w.q = w.delta + R;
    w.dout = w.q + R * dim;
    w.k = w.dout + R * dim;
    w.v = w.k + KEYS * dim;
    w.dk = w.v + KEYS * dim;
    w.dv = w.dk + sum_floats(a, &a->dk);
    return w;
}

int64_t zx_attn_bwd_tiled_floats(const zx_attention_bwd_args *a)
{
    const int64_t dim = zx_round_up(a->q.shape[2], 8);
    return 5 * dim * R + 2 * KEYS * R + 2 * R + 2 * KEYS * dim + sum_floats(a, &a->dk) + sum_floats(a, &a->dv);
}

static float dot(const float *a, const float *b, int64_t n)
{
    __m256 sum = _mm256_setzero_ps();
    int64_t d = 0;
    for (; d + 8 <= n; d += 8)
        sum = _mm256_fmadd_ps(_mm256_loadu_ps(a + d), _mm256_loadu_ps(b + d), sum);
    float lane[8], total = 0;
    _mm256_storeu_ps(lane, sum);
    for (; d < n; d++)
        total += a[d] * b[d];
    for (int l = 0; l < 8; l++)
        total += lane[l];
    return total;
}

/* One tile of queries of one head: adds to dk and dv (whose row 0 is the document's first), writes dq. first_head: dk
 * and dv hold nothing yet. */
static void bwd_tile(const zx_attention_bwd_args *a, const zx_gemm *gemm, const zx_attn_softmax *softmax,
                     const zx_attn_tile *doc, int64_t first, int64_t head, int64_t kv, bool first_head, bwd_scratch *w,
                     float *dk, int64_t ld_dk, float *dv, int64_t ld_dv)
{
    const int64_t dim = a->q.shape[2], m = zx_min64(R, doc->len - first), row = doc->begin + first;
    const int64_t n_seen = a->causal ? first + m : doc->len;
    int64_t ld_q, ld_dout, ld_out, ld_k, ld_v;
    const float *dout = rows_of(&a->dout, row, m, head, w->dout, &ld_dout);
    const float *out = rows_of(&a->out, row, m, head, w->q, &ld_out);
    for (int64_t i = 0; i < m; i++) {
        w->delta[i] = dot(out + i * ld_out, dout + i * ld_dout, dim);
        float lse = zx_load_f32(a->lse.data, head * a->lse.stride[0] + row + i);
        w->lse[i] = lse == -INFINITY ? INFINITY : lse; /* a query that sees nothing has no probabilities */
    }
    const float *q = rows_of(&a->q, row, m, head, w->q, &ld_q);
    transpose(q, ld_q, m, dim, (float)a->scale, w->q_t);
    transpose(dout, ld_dout, m, dim, 1.0f, w->dout_t);
    for (int64_t j = 0; j < n_seen;) {
        const step at = step_at(j, first, n_seen, a->causal);
        const int64_t n = at.n_keys, i0 = at.from, seen = m - i0;
        /* The first product that reaches these keys overwrites dk and dv: in a causal step that is the diagonal. */
        const float keep = first_head && (a->causal ? at.masked : first == 0) ? 0.0f : 1.0f;
        const float *k = rows_of(&a->k, doc->begin + j, n, kv, w->k, &ld_k);
        const float *v = rows_of(&a->v, doc->begin + j, n, kv, w->v, &ld_v);
        float *s = w->s + i0, *dp = w->dp + i0;
        gemm->sgemm(false, false, n, seen, dim, 1.0f, k, ld_k, w->q_t + i0, R, 0.0f, s, R);
        gemm->sgemm(false, false, n, seen, dim, 1.0f, v, ld_v, w->dout_t + i0, R, 0.0f, dp, R);
        if (at.masked) mask_later(w->s, first, m, &at);
        softmax->probabilities(w->s, w->dp, n, i0, m, w->lse, w->delta, (float)a->scale);
        gemm->sgemm(false, false, n, dim, seen, 1.0f, s, R, dout + i0 * ld_dout, ld_dout, keep, dv + j * ld_dv, ld_dv);
        gemm->sgemm(false, false, n, dim, seen, 1.0f, dp, R, q + i0 * ld_q, ld_q, keep, dk + j * ld_dk, ld_dk);
        gemm->sgemm(true, false, seen, dim, n, 1.0f, dp, R, k, ld_k, j > 0 ? 1.0f : 0.0f, w->dq + i0 * dim, dim);
        j += n;
    }
    put_rows(&a->dq, row, m, head, w->dq, dim);
}

/* Where a gradient is summed: in place if it is float, else in scratch. */
static float *sum_of(const zx_view *v, const zx_attn_tile *doc, int64_t kv, float *room, int64_t *ld)
{
    *ld = direct(v) ? v->stride[0] : v->shape[2];
    return direct(v) ? (float *)v->data + zx_attn_at(v, doc->begin, kv) : room;
}

void zx_attn_bwd_tiled(const zx_attention_bwd_args *a, const zx_gemm *gemm, const zx_attn_softmax *softmax,
                       const zx_attn_tile *tile, int64_t kv, float *scratch)
{
    const int64_t group = a->q.shape[1] / a->k.shape[1];
    bwd_scratch w = bwd_scratch_of(scratch, a);
    int64_t ld_dk, ld_dv;
    float *dk = sum_of(&a->dk, tile, kv, w.dk, &ld_dk), *dv = sum_of(&a->dv, tile, kv, w.dv, &ld_dv);
    for (int64_t head = kv * group; head < (kv + 1) * group; head++)
        for (int64_t first = 0; first < tile->len; first += R)
            bwd_tile(a, gemm, softmax, tile, first, head, kv, head == kv * group, &w, dk, ld_dk, dv, ld_dv);
    if (!direct(&a->dk)) put_rows(&a->dk, tile->begin, tile->len, kv, dk, ld_dk);
    if (!direct(&a->dv)) put_rows(&a->dv, tile->begin, tile->len, kv, dv, ld_dv);
}
