/* embed.h - inside the kernels layer: pieces of the embedding operations. */
#ifndef ZX_KERNELS_EMBED_H
#define ZX_KERNELS_EMBED_H

#include "kernels/kernels.h"

/* Tokens [token, token + n_tokens) of embed_fwd. */
typedef void (*zx_embed_fwd_fn)(const zx_embed_fwd_args *args, int64_t token, int64_t n_tokens);
void zx_embed_gather_float_plain(const zx_embed_fwd_args *args, int64_t token, int64_t n_tokens);
void zx_embed_gather_double_plain(const zx_embed_fwd_args *args, int64_t token, int64_t n_tokens);
void zx_embed_gather_float_avx2(const zx_embed_fwd_args *args, int64_t token, int64_t n_tokens);

/* Columns [col, col + n_cols) of embed_bwd, all tokens in order; n_cols at most ZX_EMBED_COLS. */
enum { ZX_EMBED_COLS = 128 };
typedef void (*zx_embed_bwd_fn)(const zx_embed_bwd_args *args, int64_t col, int64_t n_cols);
void zx_embed_scatter_float_plain(const zx_embed_bwd_args *args, int64_t col, int64_t n_cols);
void zx_embed_scatter_double_plain(const zx_embed_bwd_args *args, int64_t col, int64_t n_cols);
void zx_embed_scatter_float_avx2(const zx_embed_bwd_args *args, int64_t col, int64_t n_cols);

#endif
