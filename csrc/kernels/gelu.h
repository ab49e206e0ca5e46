/* gelu.h - inside the kernels layer: what the paths of GELU share. */
#ifndef ZX_KERNELS_GELU_H
#define ZX_KERNELS_GELU_H

#include "kernels/types.h"

#define ZX_GELU_A 1.5957691216057308 /* 2 sqrt(2 / pi) */
#define ZX_GELU_B 0.044715
#define ZX_GELU_CLAMP_FWD 16.0
#define ZX_GELU_CLAMP_BWD 10.0

typedef void (*zx_gelu_fwd_fn)(const void *x, void *out, int64_t n);
typedef void (*zx_gelu_bwd_fn)(const void *x, const void *dout, void *dx, int64_t n, bool accumulate);

/* gelu_avx2.c: float32 and bfloat16, the same bits as the plain path. */
void zx_gelu_fwd_f32_avx2(const void *x, void *out, int64_t n);
void zx_gelu_fwd_bf16_avx2(const void *x, void *out, int64_t n);
void zx_gelu_bwd_f32_avx2(const void *x, const void *dout, void *dx, int64_t n, bool accumulate);
void zx_gelu_bwd_bf16_avx2(const void *x, const void *dout, void *dx, int64_t n, bool accumulate);
/* gelu_avx512.c: likewise. */
void zx_gelu_fwd_f32_avx512(const void *x, void *out, int64_t n);
void zx_gelu_fwd_bf16_avx512(const void *x, void *out, int64_t n);
void zx_gelu_bwd_f32_avx512(const void *x, const void *dout, void *dx, int64_t n, bool accumulate);
void zx_gelu_bwd_bf16_avx512(const void *x, const void *dout, void *dx, int64_t n, bool accumulate);

#endif
