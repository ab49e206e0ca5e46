/* rows.ref.h - strided elements of any float dtype into a dense row of REAL, and back.
 *
 * Included with REAL (float or double) and ISA (plain or avx2: the same source, compiled with other flags).
 * Loads of float32 and bfloat16 are exact; stores round once, to nearest even, also from double to bfloat16.
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "kernels/load.h"

#ifndef ZX_INST
#define ZX_INST(function) ZX_CAT3(function, REAL, ISA)

/* Rounding to float first could meet a tie that was none: round to odd there, which keeps "more than half"
 * visible. */
static inline uint16_t zx_bf16_from_f64(double x)
{
    float f = (float)x;
    if (f == f && (double)f != x) {
        uint32_t bits;
        memcpy(&bits, &f, sizeof bits);
        double back = f;
        if ((back < 0 ? -back : back) > (x < 0 ? -x : x)) bits -= 1;
        bits |= 1;
        memcpy(&f, &bits, sizeof f);
    }
    return zx_bf16_from_f32(f);
}
static inline uint16_t zx_bf16_round_float(float x)
{
    return zx_bf16_from_f32(x);
}
static inline uint16_t zx_bf16_round_double(double x)
{
    return zx_bf16_from_f64(x);
}

#if defined(__AVX2__)
/* zx_bf16_from_f32 of eight numbers, in 32 bits each: a NaN adds nothing, so that it cannot overflow. */
static inline __m256i zx_bf16_round_8(__m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i half = _mm256_andnot_si256(nan, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_and_si256(nan, _mm256_set1_epi32(0x400000));
    return _mm256_srli_epi32(_mm256_or_si256(_mm256_add_epi32(bits, half), quiet), 16);
}
static inline __m256i zx_bf16_pack_16(__m256 lo, __m256 hi)
{
    __m256i packed = _mm256_packus_epi32(zx_bf16_round_8(lo), zx_bf16_round_8(hi));
    return _mm256_permute4x64_epi64(packed, 0xd8);
}
#endif

static inline void zx_bf16_row_float(const float *in, int64_t n, uint16_t *out)
{
    int64_t i = 0;
#if defined(__AVX2__)
    for (; i + 16 <= n; i += 16) {
        __m256i packed = zx_bf16_pack_16(_mm256_loadu_ps(in + i), _mm256_loadu_ps(in + i + 8));
        _mm256_storeu_si256((__m256i *)(void *)(out + i), packed);
    }
#endif
    for (; i < n; i++)
        out[i] = zx_bf16_from_f32(in[i]);
}
static inline void zx_bf16_row_double(const double *in, int64_t n, uint16_t *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = zx_bf16_from_f64(in[i]);
}
#endif

static inline void ZX_INST(get_row)(zx_dtype t, const void *p, int64_t stride, int64_t n, REAL *restrict out)
{
    const float *f = p;
    const uint16_t *b = p;
    const double *d = p;
    switch (t) {
    case ZX_F32:
        if (stride == 1)
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)f[i];
        else
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)f[i * stride];
        break;
    case ZX_BF16:
        if (stride == 1)
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)zx_bf16_to_f32(b[i]);
        else
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)zx_bf16_to_f32(b[i * stride]);
        break;
    default:
        if (stride == 1)
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)d[i];
        else
            for (int64_t i = 0; i < n; i++)
                out[i] = (REAL)d[i * stride];
    }
}

static inline void ZX_INST(put_row)(zx_dtype t, void *p, int64_t stride, int64_t n, const REAL *restrict in)
{
    float *f = p;
    uint16_t *b = p;
    double *d = p;
    switch (t) {
    case ZX_F32:
        if (stride == 1)
            for (int64_t i = 0; i < n; i++)
                f[i] = (float)in[i];
        else
            for (int64_t i = 0; i < n; i++)
                f[i * stride] = (float)in[i];
        break;
    case ZX_BF16:
        if (stride == 1)
            ZX_CAT2(zx_bf16_row, REAL)(in, n, b);
        else
            for (int64_t i = 0; i < n; i++)
                b[i * stride] = ZX_CAT2(zx_bf16_round, REAL)(in[i]);
        break;
    default:
        if (stride == 1)
            for (int64_t i = 0; i < n; i++)
                d[i] = (double)in[i];
        else
            for (int64_t i = 0; i < n; i++)
                d[i * stride] = (double)in[i];
    }
}

/* The dtype that REAL itself is. */
static inline zx_dtype ZX_INST(real_dtype)(void)
{
    return sizeof(REAL) == 4 ? ZX_F32 : ZX_F64;
}
