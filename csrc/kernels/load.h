/* load.h - one element in, one element out, for each storage type; and the names of template instances.
 *
 * A file <op>.ref.h writes the mathematics once. It is included through instances.h, which defines
 *   REAL     the arithmetic: float or double
 *   STORAGE  how the elements lie in memory: f32, bf16 or f64
 *   SUMS     how sums, statistics and parameter gradients lie in memory: f32, or f64 for f64
 * and the body says ZX_LOAD(p, i), ZX_STORE(p, i, x), ZX_LOAD_SUM, ZX_STORE_SUM and ZX_NAME(function).
 */
#ifndef ZX_KERNELS_LOAD_H
#define ZX_KERNELS_LOAD_H

#include <string.h>

#include "kernels/types.h"

static inline float zx_bf16_to_f32(uint16_t x)
{
    uint32_t bits = (uint32_t)x << 16;
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

/* To nearest, ties to even; a NaN stays a (quiet) NaN whatever its payload; overflow gives infinity. */
static inline uint16_t zx_bf16_from_f32(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline float zx_load_f32(const void *p, int64_t i)
{
    return ((const float *)p)[i];
}
static inline float zx_load_bf16(const void *p, int64_t i)
{
    return zx_bf16_to_f32(((const uint16_t *)p)[i]);
}
static inline double zx_load_f64(const void *p, int64_t i)
{
    return ((const double *)p)[i];
}

static inline void zx_store_f32(void *p, int64_t i, float x)
{
    ((float *)p)[i] = x;
}
static inline void zx_store_bf16(void *p, int64_t i, float x)
{
    ((uint16_t *)p)[i] = zx_bf16_from_f32(x);
}
static inline void zx_store_f64(void *p, int64_t i, double x)
{
    ((double *)p)[i] = x;
}

/* The address of element i of a buffer of this dtype. */
static inline void *zx_at(const void *p, zx_dtype t, int64_t i)
{
    return (char *)(uintptr_t)p + i * (int64_t)zx_dtype_bytes(t);
}

#define ZX_CAT2_(a, b) a##_##b
#define ZX_CAT2(a, b) ZX_CAT2_(a, b)
#define ZX_CAT3_(a, b, c) a##_##b##_##c
#define ZX_CAT3(a, b, c) ZX_CAT3_(a, b, c)

#define ZX_LOAD(p, i) ((REAL)ZX_CAT2(zx_load, STORAGE)((p), (i)))
#define ZX_STORE(p, i, x) ZX_CAT2(zx_store, STORAGE)((p), (i), (x))
#define ZX_LOAD_SUM(p, i) ((REAL)ZX_CAT2(zx_load, SUMS)((p), (i)))
#define ZX_STORE_SUM(p, i, x) ZX_CAT2(zx_store, SUMS)((p), (i), (x))
#define ZX_NAME(function) ZX_CAT3(function, REAL, STORAGE)

/* The instance of a function that a dtype asks for, in the table `cpu` (float, double for float64) and in the table
 * `ref` (double); NULL for dtypes that are no floats. */
#define ZX_PICK_CPU(function, dtype)                                                                                   \
    ((dtype) == ZX_F32    ? function##_float_f32                                                                       \
     : (dtype) == ZX_BF16 ? function##_float_bf16                                                                      \
     : (dtype) == ZX_F64  ? function##_double_f64                                                                      \
                          : NULL)
#define ZX_PICK_REF(function, dtype)                                                                                   \
    ((dtype) == ZX_F32    ? function##_double_f32                                                                      \
     : (dtype) == ZX_BF16 ? function##_double_bf16                                                                     \
     : (dtype) == ZX_F64  ? function##_double_f64                                                                      \
                          : NULL)

#endif
