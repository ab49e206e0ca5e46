/* Attention in double precision on the host: one pair of loops over rows and keys, nothing clever. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"

#define EXPORT __attribute__((visibility("default")))

static double from_bits(uint16_t bits, int dtype)
{
    if (dtype == ZX_ATTN_BF16) {
        const uint32_t wide = (uint32_t)bits << 16;
        float f;
        memcpy(&f, &wide, sizeof f);
        return f;
    }
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24));
}

/* out (d): one row of one head. */
static void read_row(double *out, const zx_attn_view *view, int64_t token, int head, const zx_attn_problem *p)
{
    const uint16_t *row =
        (const uint16_t *)view->data + token * view->token_stride + head * view->head_stride;
    for (int i = 0; i < p->head_dim; i++)
        out[i] = from_bits(row[i], p->dtype);
}

static double dot(const double *a, const double *b, int n)
{
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

typedef struct document {
    int64_t q0, len_q, k0, len_k;
} document;

static document document_of(const zx_attn_problem *p, int64_t doc)
{
    document d;
    d.q0 = p->cu_q ? p->cu_q[doc] : doc * (p->n_tokens_q / p->n_docs);
    d.len_q = p->cu_q ? p->cu_q[doc + 1] - d.q0 : p->n_tokens_q / p->n_docs;
    d.k0 = p->cu_k ? p->cu_k[doc] : doc * (p->n_tokens_k / p->n_docs);
    d.len_k = p->cu_k ? p->cu_k[doc + 1] - d.k0 : p->n_tokens_k / p->n_docs;
    return d;
}

static int64_t keys_seen(const zx_attn_problem *p, const document *d, int64_t row)
{
    if (!p->causal) return d->len_k;
    const int64_t n = row + 1 + d->len_k - d->len_q;
    return n < 0 ? 0 : n < d->len_k ? n : d->len_k;
}

/* prob (n_keys): softmax of one row; returns its log-sum-exp. rows holds the keys (n_keys, d). */
static double row_softmax(double *prob, const double *q, const double *rows, int64_t n_keys,
                          const zx_attn_problem *p)
{
    double top = -INFINITY, sum = 0;
    for (int64_t j = 0; j < n_keys; j++) {
        prob[j] = p->scale * dot(q, rows + j * p->head_dim, p->head_dim);
        if (prob[j] > top) top = prob[j];
    }
    for (int64_t j = 0; j < n_keys; j++)
        sum += prob[j] = exp(prob[j] - top);
    for (int64_t j = 0; j < n_keys; j++)
        prob[j] /= sum;
    return n_keys ? top + log(sum) : -INFINITY;
}

static double *read_head(const zx_attn_view *view, int64_t token0, int64_t n, int head,
                         const zx_attn_problem *p)
{
    double *rows = malloc(sizeof(double) * (size_t)(n * p->head_dim + 1));
    for (int64_t j = 0; rows && j < n; j++)
        read_row(rows + j * p->head_dim, view, token0 + j, head, p);
    return rows;
}

EXPORT int zx_attn_forward_ref(const zx_attn_forward_args *a, double *o, double *lse)
{
    const zx_attn_problem *p = &a->problem;
    const int d = p->head_dim, group = p->n_heads / p->n_heads_kv;
    for (int64_t doc = 0; doc < p->n_docs; doc++)
        for (int head = 0; head < p->n_heads; head++) {
            const document at = document_of(p, doc);
            double *k = read_head(&a->k, at.k0, at.len_k, head / group, p);
            double *v = read_head(&a->v, at.k0, at.len_k, head / group, p);
            double *q = read_head(&a->q, at.q0, at.len_q, head, p);
            double *prob = malloc(sizeof(double) * (size_t)(at.len_k + 1));
            const int ok = k && v && q && prob;
            for (int64_t row = 0; ok && row < at.len_q; row++) {
                const int64_t n = keys_seen(p, &at, row), token = at.q0 + row;
                double *out = o + (token * p->n_heads + head) * d;
                lse[head * p->n_tokens_q + token] = row_softmax(prob, q + row * d, k, n, p);
                memset(out, 0, sizeof(double) * (size_t)d);
                for (int64_t j = 0; j < n; j++)
                    for (int i = 0; i < d; i++)
                        out[i] += prob[j] * v[j * d + i];
            }
            free(k), free(v), free(q), free(prob);
            if (!ok) return ZX_ATTN_ARG;
        }
    return ZX_ATTN_OK;
}

/* One head of one document; o is computed again in double, the stored one is not read. */
static void backward_head(const zx_attn_problem *p, const document *at, int head, const double *const in[4],
                          double *prob, double *out_row, double *dq, double *dk, double *dv)
{
    const int d = p->head_dim, head_kv = head / (p->n_heads / p->n_heads_kv);
    const double *q = in[0], *k = in[1], *v = in[2], *d_o = in[3];
    for (int64_t row = 0; row < at->len_q; row++) {
        const int64_t n = keys_seen(p, at, row);
        const double *q_row = q + row * d, *do_row = d_o + row * d;
        double *dq_row = dq + ((at->q0 + row) * p->n_heads + head) * d;
        row_softmax(prob, q_row, k, n, p);
        memset(out_row, 0, sizeof(double) * (size_t)d);
        for (int64_t j = 0; j < n; j++)
            for (int i = 0; i < d; i++)
                out_row[i] += prob[j] * v[j * d + i];
        const double delta = dot(out_row, do_row, d);
        for (int64_t j = 0; j < n; j++) {
            const double ds = p->scale * prob[j] * (dot(do_row, v + j * d, d) - delta);
            double *dk_row = dk + ((at->k0 + j) * p->n_heads_kv + head_kv) * d;
            double *dv_row = dv + ((at->k0 + j) * p->n_heads_kv + head_kv) * d;
            for (int i = 0; i < d; i++) {
                dq_row[i] += ds * k[j * d + i];
                dk_row[i] += ds * q_row[i];
                dv_row[i] += prob[j] * do_row[i];
            }
        }
    }
}

EXPORT int zx_attn_backward_ref(const zx_attn_backward_args *a, double *dq, double *dk, double *dv)
{
    const zx_attn_problem *p = &a->problem;
    const int group = p->n_heads / p->n_heads_kv;
    const size_t row_bytes = sizeof(double) * (size_t)p->head_dim;
    memset(dq, 0, row_bytes * (size_t)(p->n_tokens_q * p->n_heads));
    memset(dk, 0, row_bytes * (size_t)(p->n_tokens_k * p->n_heads_kv));
    memset(dv, 0, row_bytes * (size_t)(p->n_tokens_k * p->n_heads_kv));
    for (int64_t doc = 0; doc < p->n_docs; doc++)
        for (int head = 0; head < p->n_heads; head++) {
            const document at = document_of(p, doc);
            double *q = read_head(&a->q, at.q0, at.len_q, head, p),
                   *d_o = read_head(&a->d_o, at.q0, at.len_q, head, p);
            double *k = read_head(&a->k, at.k0, at.len_k, head / group, p);
            double *v = read_head(&a->v, at.k0, at.len_k, head / group, p);
            double *prob = malloc(sizeof(double) * (size_t)(at.len_k + 1)), *out_row = malloc(row_bytes);
            const int ok = q && k && v && d_o && prob && out_row;
            if (ok)
                backward_head(p, &at, head, (const double *const[]){q, k, v, d_o}, prob, out_row, dq, dk, dv);
            free(q), free(k), free(v), free(d_o), free(prob), free(out_row);
            if (!ok) return ZX_ATTN_ARG;
        }
    return ZX_ATTN_OK;
}
