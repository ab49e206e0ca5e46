/* vmath.h - the exponential function of the kernels, one value at a time, in float and in double.
 *
 * exp(x) = 2^n exp(r) with n = round(x / ln 2), |r| <= ln(2)/2, and exp(r) = 1 + r + r^2 q(r) with q of degree 4 fitted
 * for the least relative error (3e-9, far below the rounding of float). 2^n is applied in two halves, so that results
 * past the largest number are infinity. Results below the smallest normal number are 0: processors take a hundred
 * times longer to make a subnormal number, and a masked score makes one of each. Relative error: at most 1e-7 (8.3e-8
 * seen on 4.7e5 arguments). NaN gives NaN.
 * vmath_avx2.h has the same operations in the same order on eight lanes: the same bits. */
#ifndef ZX_KERNELS_VMATH_H
#define ZX_KERNELS_VMATH_H

#include <math.h>
#include <string.h>

#include "kernels/types.h"

#define ZX_EXP_LO (-87.33654f)          /* below, exp is less than the smallest normal number */
#define ZX_EXP_HI 89.0f                 /* above, it overflows */
#define ZX_EXP_LOG2E 0x1.715476p+0f     /* 1 / ln 2 */
#define ZX_EXP_MAGIC 0x1.8p+23f         /* adding it rounds to an integer, which lies in the low bits */
#define ZX_EXP_LN2_HI 0x1.62e430p-1f
#define ZX_EXP_LN2_LO (-0x1.05c610p-29f)
#define ZX_EXP_Q0 0x1.fffffcp-2f
#define ZX_EXP_Q1 0x1.555490p-3f
#define ZX_EXP_Q2 0x1.5558f6p-5f
#define ZX_EXP_Q3 0x1.123a8ep-7f
#define ZX_EXP_Q4 0x1.6a2318p-10f

static inline float zx_bits_to_f32(int32_t bits)
{
    float out;
    memcpy(&out, &bits, sizeof out);
    return out;
}

static inline float zx_exp_float(float x)
{
    if (x < ZX_EXP_LO) return 0;
    x = ZX_EXP_HI < x ? ZX_EXP_HI : x; /* in this order, so that a NaN stays */
    float t = fmaf(x, ZX_EXP_LOG2E, ZX_EXP_MAGIC);
    float n = t - ZX_EXP_MAGIC;
    float r = fmaf(n, -ZX_EXP_LN2_HI, x);
    r = fmaf(n, -ZX_EXP_LN2_LO, r);
    float q = fmaf(ZX_EXP_Q4, r, ZX_EXP_Q3);
    q = fmaf(q, r, ZX_EXP_Q2);
    q = fmaf(q, r, ZX_EXP_Q1);
    q = fmaf(q, r, ZX_EXP_Q0);
    float p = fmaf(q, r * r, r) + 1.0f;
    int32_t bits, magic_bits = 0x4b400000;
    memcpy(&bits, &t, sizeof bits);
    if (x != x) return p;
    int32_t whole = bits - magic_bits, half = whole >> 1;
    return p * zx_bits_to_f32((half + 127) << 23) * zx_bits_to_f32((whole - half + 127) << 23);
}

static inline double zx_exp_double(double x)
{
    return exp(x);
}
static inline float zx_sqrt_float(float x)
{
    return sqrtf(x);
}
static inline double zx_sqrt_double(double x)
{
    return sqrt(x);
}
static inline float zx_log_float(float x)
{
    return logf(x);
}
static inline double zx_log_double(double x)
{
    return log(x);
}

#define ZX_EXP(x) ZX_CAT2(zx_exp, REAL)(x)
#define ZX_SQRT(x) ZX_CAT2(zx_sqrt, REAL)(x)
#define ZX_LOG(x) ZX_CAT2(zx_log, REAL)(x)

#endif
