/* attention.h - inside the kernels layer: how attention is cut, and what its paths share.
 *
 * A tile is up to ZX_ATTN_ROWS rows of one document. The list of tiles is made from cu_seqlens at each launch, in
 * document order, so that the cut depends on the documents alone. */
#ifndef ZX_KERNELS_ATTENTION_H
#define ZX_KERNELS_ATTENTION_H

#include "kernels/kernels.h"

enum {
    ZX_ATTN_ROWS = 64,    /* rows of a tile */
    ZX_ATTN_KEYS = 64,   /* keys of a step of the tiled path */
    ZX_ATTN_MAX_DIM = 256 /* head dimension */
};

typedef struct zx_attn_tile {
    int32_t begin, len; /* the document: its first row and its length */
    int32_t first;      /* first row of the tile, counted in the document */
    int32_t n_rows;
} zx_attn_tile;

/* Row i of a document sees its keys 0 to n - 1. */
static inline int64_t zx_attn_n_keys(const zx_attn_tile *tile, int64_t i, bool causal)
{
    return causal ? i + 1 : tile->len;
}

/* Element offset of (row, head) in q, k, v, out and their gradients. */
static inline int64_t zx_attn_at(const zx_view *v, int64_t row, int64_t head)
{
    return row * v->stride[0] + head * v->stride[1];
}

/* The softmax on tiles (keys, ZX_ATTN_ROWS) of transposed scores, queries [from, n_rows), 8 or 16 at a time: columns up
 * to the next multiple of that may be read and written. step: of the online softmax, s becomes the probabilities
 * relative to the new maxima; returns whether any maximum moved. probabilities: s becomes P^T = exp(s - lse), dp
 * becomes dS^T = scale * P^T * (dp - delta). */
typedef struct zx_attn_softmax {
    bool (*step)(float *s, int64_t n_keys, int64_t from, int64_t n_rows, float *max, float *sum, float *shrink);
    void (*probabilities)(float *s, float *dp, int64_t n_keys, int64_t from, int64_t n_rows, const float *lse,
                          const float *delta, float scale);
} zx_attn_softmax;
extern const zx_attn_softmax zx_attn_softmax_avx2, zx_attn_softmax_avx512; /* the same bits */

/* The tiled path (attention_avx2.c): float32 and bfloat16, AVX2 and a BLAS. Scratch counts floats. */
int64_t zx_attn_fwd_tiled_floats(const zx_attention_fwd_args *a);
void zx_attn_fwd_tiled(const zx_attention_fwd_args *a, const zx_gemm *gemm, const zx_attn_softmax *softmax,
                       const zx_attn_tile *tile, int64_t head, float *scratch);
/* A document and a key/value head with all query heads that share it. `tile` names the document. */
int64_t zx_attn_bwd_tiled_floats(const zx_attention_bwd_args *a);
void zx_attn_bwd_tiled(const zx_attention_bwd_args *a, const zx_gemm *gemm, const zx_attn_softmax *softmax,
                       const zx_attn_tile *tile, int64_t kv, float *scratch);

#endif
