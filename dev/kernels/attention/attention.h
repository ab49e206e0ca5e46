/* Flash attention: the launcher's interface and its double-precision reference.
 *
 * Activations are (tokens, heads, d) views with any token and head stride, as a fused QKV projection leaves
 * them, so nothing is transposed or copied around a kernel. A batch is n_docs documents laid end to end on
 * the token axis; cu_q and cu_k hold their offsets, or are NULL when all documents have the same length.
 * Query row i of a document may see key j if j < len_k and, when causal, j <= i + len_k - len_q (the last
 * query row is aligned with the last key). A row that sees nothing gets zeros and lse = -infinity.
 */
#ifndef ZX_ATTENTION_H
#define ZX_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { ZX_ATTN_BF16 = 0, ZX_ATTN_FP16 = 1 };
enum { ZX_ATTN_PATH_PLAIN = 0, ZX_ATTN_PATH_HOPPER = 1 };
enum { ZX_ATTN_OK = 0, ZX_ATTN_ARG = 1, ZX_ATTN_UNSUPPORTED = 2, ZX_ATTN_CUDA = 3 };

/* Element (t, h, i) lies at data[t * token_stride + h * head_stride + i]; strides count elements. */
typedef struct zx_attn_view {
    void *data;
    int64_t token_stride;
    int64_t head_stride;
} zx_attn_view;

typedef struct zx_attn_problem {
    int32_t dtype;         /* ZX_ATTN_BF16 or ZX_ATTN_FP16 */
    int32_t path;          /* ZX_ATTN_PATH_PLAIN (sm_80 and up) or ZX_ATTN_PATH_HOPPER (sm_90a) */
    int32_t n_heads;       /* query heads, a multiple of n_heads_kv */
    int32_t n_heads_kv;
    int32_t head_dim;      /* 64 or 128 */
    int32_t causal;        /* 0 or 1 */
    int32_t deterministic; /* backward: 1 sums dQ in a fixed order */
    float scale;           /* positive; multiplies q.k before the softmax */
    int64_t n_docs;
    int64_t n_tokens_q;    /* rows of q, o, dq */
    int64_t n_tokens_k;    /* rows of k, v, dk, dv */
    int64_t max_len_q;     /* longest document, an upper bound is enough */
    int64_t max_len_k;
    const int32_t *cu_q;   /* (n_docs + 1) offsets into the tokens, or NULL: n_tokens_q / n_docs each */
    const int32_t *cu_k;
} zx_attn_problem;

/* All pointers are borrowed: device memory for the launchers, host memory for the reference. */
typedef struct zx_attn_forward_args {
    zx_attn_problem problem;
    zx_attn_view q;        /* (n_tokens_q, n_heads, d) */
    zx_attn_view k;        /* (n_tokens_k, n_heads_kv, d) */
    zx_attn_view v;        /* (n_tokens_k, n_heads_kv, d) */
    zx_attn_view o;        /* (n_tokens_q, n_heads, d), written */
    float *lse;            /* (n_heads, n_tokens_q), written: log of the sum of exp(scale q.k) */
    void *workspace; /* zx_attn_forward_workspace bytes, zero before its first use, left zero by each call */
} zx_attn_forward_args;

typedef struct zx_attn_backward_args {
    zx_attn_problem problem;
    zx_attn_view q, k, v, o, d_o; /* as above; o and lse as the forward pass left them */
    const float *lse;
    zx_attn_view dq, dk, dv; /* written; shapes of q, k, v */
    void *workspace; /* zx_attn_backward_workspace bytes; need not be initialised */
} zx_attn_backward_args;

size_t zx_attn_forward_workspace(const zx_attn_problem *problem);
size_t zx_attn_backward_workspace(const zx_attn_problem *problem);

/* Queue one pass on a CUDA stream (a cudaStream_t). Returns ZX_ATTN_OK, or a code whose sentence
 * zx_attn_message gives. Nothing is queued when the arguments are refused. */
int zx_attn_forward(const zx_attn_forward_args *args, void *stream);
int zx_attn_backward(const zx_attn_backward_args *args, void *stream);

/* The last error's sentence of the calling thread. */
const char *zx_attn_message(void);

/* The same contracts on the host in double arithmetic, but for the last rounding: q, k, v, d_o are read in
 * problem.dtype, results are written as doubles into dense arrays (tokens, heads, d). */
int zx_attn_forward_ref(const zx_attn_forward_args *args, double *o, double *lse);
int zx_attn_backward_ref(const zx_attn_backward_args *args, double *dq, double *dk, double *dv);

#ifdef __cplusplus
}
#endif

#endif
