/* xent.h - inside the kernels layer: what the paths of the softmax cross-entropy share. */
#ifndef ZX_KERNELS_XENT_H
#define ZX_KERNELS_XENT_H

#include "kernels/types.h"

enum { ZX_XENT_LANES = 16 };

/* One row each; see xent.ref.h. */
typedef void (*zx_xent_fwd_fn)(const void *logits, int64_t n_vocab, void *lse, int64_t row);
typedef void (*zx_xent_bwd_fn)(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                               const void *dloss, void *dlogits);

/* xent_avx2.c: the same bits as the plain path. */
void zx_xent_fwd_f32_avx2(const void *logits, int64_t n_vocab, void *lse, int64_t row);
void zx_xent_fwd_bf16_avx2(const void *logits, int64_t n_vocab, void *lse, int64_t row);
void zx_xent_bwd_f32_avx2(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                          const void *dloss, void *dlogits);
void zx_xent_bwd_bf16_avx2(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                           const void *dloss, void *dlogits);
/* xent_avx512.c: likewise. */
void zx_xent_fwd_f32_avx512(const void *logits, int64_t n_vocab, void *lse, int64_t row);
void zx_xent_fwd_bf16_avx512(const void *logits, int64_t n_vocab, void *lse, int64_t row);
void zx_xent_bwd_f32_avx512(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                            const void *dloss, void *dlogits);
void zx_xent_bwd_bf16_avx512(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label,
                             const void *dloss, void *dlogits);

#endif
