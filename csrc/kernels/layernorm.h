/* layernorm.h - inside the kernels layer: what the paths of layer norm share. */
#ifndef ZX_KERNELS_LAYERNORM_H
#define ZX_KERNELS_LAYERNORM_H

#include "kernels/types.h"

enum {
    ZX_LN_LANES = 16, /* interleaved partial sums of a row */
    ZX_LN_COLS = 32,  /* columns of a task of layernorm_bwd_w */
    ZX_LN_ROWS = 64   /* rows that it sums before it adds to the total: the rounding errors of long sums stay small */
};

/* One row each; see layernorm.ref.h. */
typedef void (*zx_layernorm_fwd_fn)(const void *x, const void *gamma, const void *beta, void *out, void *mean,
                                    void *rstd, int64_t row, int64_t n_cols, double eps);
typedef void (*zx_layernorm_bwd_in_fn)(const void *dout, const void *x, const void *gamma, const void *mean,
                                       const void *rstd, int64_t row, int64_t n_cols, void *dx, bool accumulate);

typedef struct zx_layernorm_cols {
    const void *dout, *x; /* (N,C) */
    int64_t dout_stride, x_stride;
    const void *mean, *rstd; /* (N) */
    void *dgamma, *dbeta;    /* (C), either may be NULL */
    int64_t n_rows;
} zx_layernorm_cols;

/* Adds the sums of columns [begin, end), end - begin <= ZX_LN_COLS. */
typedef void (*zx_layernorm_bwd_w_fn)(const zx_layernorm_cols *job, int64_t begin, int64_t end);

/* layernorm_avx2.c: the same bits as the plain path. */
#define X(storage)                                                                                                     \
    void zx_layernorm_fwd_##storage##_avx2(const void *x, const void *gamma, const void *beta, void *out, void *mean,  \
                                           void *rstd, int64_t row, int64_t n_cols, double eps);                       \
    void zx_layernorm_bwd_in_##storage##_avx2(const void *dout, const void *x, const void *gamma, const void *mean,    \
                                              const void *rstd, int64_t row, int64_t n_cols, void *dx,                 \
                                              bool accumulate);                                                        \
    void zx_layernorm_bwd_w_##storage##_avx2(const zx_layernorm_cols *job, int64_t begin, int64_t end);
X(f32)
X(bf16)
#undef X

#endif
