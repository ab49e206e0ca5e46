/* types.h - dtypes and views: how the layers above name a piece of device memory. */
#ifndef ZX_KERNELS_TYPES_H
#define ZX_KERNELS_TYPES_H

#include "base/zx.h"

typedef enum zx_dtype {
    ZX_F32 = 0,
    ZX_BF16,
    ZX_F64, /* storage of the double reference */
    ZX_I32,
    ZX_I64,
    ZX_U8,
    ZX_F16,
    ZX_N_DTYPE
} zx_dtype;

static inline size_t zx_dtype_bytes(zx_dtype t)
{
    static const uint8_t bytes[ZX_N_DTYPE] = {4, 2, 8, 4, 8, 1, 2};
    return bytes[t];
}
static inline const char *zx_dtype_name(zx_dtype t)
{
    static const char *const names[ZX_N_DTYPE] = {"float32", "bfloat16", "float64", "int32",
                                                  "int64",   "uint8",    "float16"};
    return t >= 0 && t < ZX_N_DTYPE ? names[t] : "?";
}
/* The type in which sums over elements of t are held: float64 for float64, else float32. */
static inline zx_dtype zx_dtype_sum(zx_dtype t)
{
    return t == ZX_F64 ? ZX_F64 : ZX_F32;
}

enum { ZX_MAX_DIMS = 4 };

/* A strided piece of device memory. Strides count elements. `scale` and `block` describe quantised storage: one
 * scale for each `block` elements along the last dimension; NULL and 0 for plain dtypes. */
typedef struct zx_view {
    void *data;
    void *scale;
    zx_dtype dtype;
    int32_t block;
    int32_t ndim;
    int64_t shape[ZX_MAX_DIMS];
    int64_t stride[ZX_MAX_DIMS];
} zx_view;

static inline int64_t zx_view_numel(const zx_view *v)
{
    int64_t n = 1;
    for (int i = 0; i < v->ndim; i++)
        n *= v->shape[i];
    return n;
}

/* Row-major views. */
static inline zx_view zx_view_1d(void *data, zx_dtype t, int64_t n)
{
    zx_view v = {.data = data, .dtype = t, .ndim = 1, .shape = {n}, .stride = {1}};
    return v;
}
static inline zx_view zx_view_2d(void *data, zx_dtype t, int64_t rows, int64_t cols, int64_t row_stride)
{
    zx_view v = {.data = data, .dtype = t, .ndim = 2, .shape = {rows, cols}, .stride = {row_stride, 1}};
    return v;
}
static inline zx_view zx_view_3d(void *data, zx_dtype t, int64_t a, int64_t b, int64_t c, int64_t stride_a,
                                 int64_t stride_b)
{
    zx_view v = {.data = data, .dtype = t, .ndim = 3, .shape = {a, b, c}, .stride = {stride_a, stride_b, 1}};
    return v;
}

#endif
