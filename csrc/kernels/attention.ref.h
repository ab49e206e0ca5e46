/* attention.ref.h - softmax(scale * q k^T) v inside each document, forward and backward.
 *
 * Forward: online softmax over blocks of keys. Backward, with p = exp(s - lse) recomputed from the scores:
 *   delta_i = dout_i . out_i,  ds_ij = p_ij (dout_i . v_j - delta_i)
 *   dv_j = sum_i p_ij dout_i,  dk_j = scale sum_i ds_ij q_i,  dq_i = scale sum_j ds_ij k_j
 * where the sums over i take all heads that share the key: one pass per tile of keys, one per tile of queries, so that
 * no two tasks add to the same place. */

#include "kernels/dot.ref.h"

static void ZX_NAME(attn_fwd)(const zx_attention_fwd_args *a, const zx_attn_tile *tile, int64_t head)
{
    const int64_t dim = a->q.shape[2], kv = head / zx_max64(1, a->q.shape[1] / a->k.shape[1]);
    REAL s[ATTN_KEYS], acc[ZX_ATTN_MAX_DIM];
    for (int64_t i = tile->first; i < tile->first + tile->n_rows; i++) {
        const int64_t row = tile->begin + i, at_q = zx_attn_at(&a->q, row, head);
        const int64_t n_keys = zx_attn_n_keys(tile, i, a->causal);
        REAL max = -(REAL)INFINITY, sum = 0;
        for (int64_t d = 0; d < dim; d++)
            acc[d] = 0;
        for (int64_t j0 = 0; j0 < n_keys; j0 += ATTN_KEYS) {
            const int64_t n = zx_min64(ATTN_KEYS, n_keys - j0);
            REAL top = max;
            for (int64_t j = 0; j < n; j++) {
                int64_t at_k = zx_attn_at(&a->k, tile->begin + j0 + j, kv);
                s[j] = (REAL)a->scale * ZX_NAME(dot)(a->q.data, at_q, 1, a->k.data, at_k, dim);
                top = top > s[j] ? top : s[j];
            }
            const REAL shift = top == -(REAL)INFINITY ? 0 : top; /* all scores so far are -infinity */
            const REAL shrink = ZX_EXP(max - shift);
            sum *= shrink;
            for (int64_t d = 0; d < dim; d++)
                acc[d] *= shrink;
            for (int64_t j = 0; j < n; j++) {
                REAL p = ZX_EXP(s[j] - shift);
                int64_t at_v = zx_attn_at(&a->v, tile->begin + j0 + j, kv);
                sum += p;
                for (int64_t d = 0; d < dim; d++)
                    acc[d] += p * ZX_LOAD(a->v.data, at_v + d);
            }
            max = top;
        }
        const REAL inverse = sum == 0 ? 0 : (REAL)1 / sum;
        for (int64_t d = 0; d < dim; d++)
            ZX_STORE(a->out.data, zx_attn_at(&a->out, row, head) + d, acc[d] * inverse);
        ZX_STORE_SUM(a->lse.data, head * a->lse.stride[0] + row, sum == 0 ? -(REAL)INFINITY : max + ZX_LOG(sum));
    }
}

/* p_ij and ds_ij of one pair; a query that sees nothing has no gradient. */
static inline void ZX_NAME(attn_pair)(const zx_attention_bwd_args *a, int64_t q_row, int64_t head, int64_t k_row,
                                      int64_t kv, REAL delta, REAL *p, REAL *ds)
{
    const int64_t dim = a->q.shape[2];
    const REAL lse = ZX_LOAD_SUM(a->lse.data, head * a->lse.stride[0] + q_row);
    REAL s = (REAL)a->scale *
             ZX_NAME(dot)(a->q.data, zx_attn_at(&a->q, q_row, head), 1, a->k.data, zx_attn_at(&a->k, k_row, kv), dim);
    REAL dp =
        ZX_NAME(dot)(a->dout.data, zx_attn_at(&a->dout, q_row, head), 1, a->v.data, zx_attn_at(&a->v, k_row, kv), dim);
    *p = lse == -(REAL)INFINITY ? 0 : ZX_EXP(s - lse);
    *ds = *p * (dp - delta);
}

static REAL ZX_NAME(attn_delta)(const zx_attention_bwd_args *a, int64_t row, int64_t head)
{
    return ZX_NAME(dot)(a->dout.data, zx_attn_at(&a->dout, row, head), 1, a->out.data, zx_attn_at(&a->out, row, head),
                        a->q.shape[2]);
}

static void ZX_NAME(attn_bwd_q)(const zx_attention_bwd_args *a, const zx_attn_tile *tile, int64_t head)
{
    const int64_t dim = a->q.shape[2], kv = head / zx_max64(1, a->q.shape[1] / a->k.shape[1]);
    REAL dq[ZX_ATTN_MAX_DIM];
    for (int64_t i = tile->first; i < tile->first + tile->n_rows; i++) {
        const int64_t row = tile->begin + i, n_keys = zx_attn_n_keys(tile, i, a->causal);
        const REAL delta = ZX_NAME(attn_delta)(a, row, head);
        for (int64_t d = 0; d < dim; d++)
            dq[d] = 0;
        for (int64_t j = 0; j < n_keys; j++) {
            REAL p, ds;
            ZX_NAME(attn_pair)(a, row, head, tile->begin + j, kv, delta, &p, &ds);
            for (int64_t d = 0; d < dim; d++)
                dq[d] += ds * ZX_LOAD(a->k.data, zx_attn_at(&a->k, tile->begin + j, kv) + d);
        }
        for (int64_t d = 0; d < dim; d++)
            ZX_STORE(a->dq.data, zx_attn_at(&a->dq, row, head) + d, (REAL)a->scale * dq[d]);
    }
}

static void ZX_NAME(attn_bwd_kv)(const zx_attention_bwd_args *a, const zx_attn_tile *tile, int64_t kv)
{
    const int64_t dim = a->q.shape[2], group = a->q.shape[1] / a->k.shape[1];
    REAL dk[ZX_ATTN_MAX_DIM], dv[ZX_ATTN_MAX_DIM];
    for (int64_t j = tile->first; j < tile->first + tile->n_rows; j++) {
        const int64_t k_row = tile->begin + j;
        for (int64_t d = 0; d < dim; d++)
            dk[d] = dv[d] = 0;
        for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
            for (int64_t i = a->causal ? j : 0; i < tile->len; i++) {
                const int64_t row = tile->begin + i;
                REAL p, ds;
                ZX_NAME(attn_pair)(a, row, head, k_row, kv, ZX_NAME(attn_delta)(a, row, head), &p, &ds);
                for (int64_t d = 0; d < dim; d++) {
                    dv[d] += p * ZX_LOAD(a->dout.data, zx_attn_at(&a->dout, row, head) + d);
                    dk[d] += ds * ZX_LOAD(a->q.data, zx_attn_at(&a->q, row, head) + d);
                }
            }
        }
        for (int64_t d = 0; d < dim; d++) {
            ZX_STORE(a->dk.data, zx_attn_at(&a->dk, k_row, kv) + d, (REAL)a->scale * dk[d]);
            ZX_STORE(a->dv.data, zx_attn_at(&a->dv, k_row, kv) + d, dv[d]);
        }
    }
}
