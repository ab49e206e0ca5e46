/* attention.h - inside the kernels layer: how attention is cut, and what its paths share.
 *
 * A tile is up to ZX_ATTN_ROWS rows of one document. The list of tiles is made from cu_seqlens at each launch, in
 * document order, so that the cut depends on the documents alone. A task is one tile and one head. */
#ifndef ZX_KERNELS_ATTENTION_H
#define ZX_KERNELS_ATTENTION_H

#include "kernels/kernels.h"

enum {
    ZX_ATTN_ROWS = 64,   /* rows of a tile */
    ZX_ATTN_MAX_DIM = 256 /* head dimension */
};

typedef struct zx_attn_tile {
    int32_t begin, len; /* the document: its first row and its length */
    int32_t first;      /* first row of the tile, counted in the document */
    int32_t n_rows;
} zx_attn_tile;

/* Rows are seen as keys and as queries: row i of a document sees the keys 0 to n - 1. */
static inline int64_t zx_attn_n_keys(const zx_attn_tile *tile, int64_t i, bool causal) {
    return causal ? i + 1 : tile->len;
}

/* Most tiles that n_rows rows in n_docs documents can have. */
static inline int64_t zx_attn_max_tiles(int64_t n_rows, int64_t n_docs) {
    return n_rows / ZX_ATTN_ROWS + zx_min64(n_rows, n_docs);
}

/* Element offset of (row, head) in q, k, v, out and their gradients. */
static inline int64_t zx_attn_at(const zx_view *v, int64_t row, int64_t head) {
    return row * v->stride[0] + head * v->stride[1];
}

typedef void (*zx_attn_fwd_fn)(const zx_attention_fwd_args *a, const zx_attn_tile *tile, int64_t head);

#endif
