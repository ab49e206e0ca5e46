/* vmath_avx512.h - sixteen lanes at a time; only for files <name>_avx512.c. Every lane goes through the operations of
 * vmath_avx2.h in the same order, so the bits are those of the AVX2 path. */
#ifndef ZX_KERNELS_VMATH_AVX512_H
#define ZX_KERNELS_VMATH_AVX512_H

#include <immintrin.h>

#include "kernels/load.h"
#include "kernels/vmath.h"

static inline __m512 zx_exp_v16(__m512 x)
{
    const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(ZX_EXP_LO), _CMP_NLT_UQ); /* or NaN */
    x = _mm512_min_ps(_mm512_set1_ps(ZX_EXP_HI), x); /* the second operand for a NaN */
    const __m512 magic = _mm512_set1_ps(ZX_EXP_MAGIC);
    __m512 n = _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(ZX_EXP_LOG2E), magic), magic);
    __m512 r = _mm512_fmadd_ps(n, _mm512_set1_ps(-ZX_EXP_LN2_HI), x);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(-ZX_EXP_LN2_LO), r);
    __m512 q = _mm512_fmadd_ps(_mm512_set1_ps(ZX_EXP_Q4), r, _mm512_set1_ps(ZX_EXP_Q3));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(ZX_EXP_Q2));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(ZX_EXP_Q1));
    q = _mm512_fmadd_ps(q, r, _mm512_set1_ps(ZX_EXP_Q0));
    __m512 p = _mm512_add_ps(_mm512_fmadd_ps(q, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(normal, p, n);
}

/* The lanes of elements i to i + 15 that come before n. */
static inline __mmask16 zx_mask_v16(int64_t i, int64_t n)
{
    return n - i >= 16 ? 0xffff : n > i ? (__mmask16)((1u << (n - i)) - 1) : 0;
}

/* Elements i to i + 15 of a row that ends before n: zeros past the end; nothing is written past the end. */
static inline __m512 zx_load_v16_f32(const void *p, int64_t i, int64_t n)
{
    return _mm512_maskz_loadu_ps(zx_mask_v16(i, n), (const float *)p + i);
}

static inline __m512 zx_load_v16_bf16(const void *p, int64_t i, int64_t n)
{
    __m256i half = _mm256_maskz_loadu_epi16(zx_mask_v16(i, n), (const uint16_t *)p + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

static inline void zx_store_v16_f32(void *p, int64_t i, int64_t n, __m512 x)
{
    _mm512_mask_storeu_ps((float *)p + i, zx_mask_v16(i, n), x);
}

static inline void zx_store_v16_bf16(void *p, int64_t i, int64_t n, __m512 x)
{
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i even = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __m512i out = _mm512_mask_mov_epi32(even, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), quiet);
    _mm512_mask_cvtepi32_storeu_epi16((uint16_t *)p + i, zx_mask_v16(i, n), _mm512_srli_epi32(out, 16));
}

/* For bodies that are included through instances_simd.h, once per storage. */
#define ZX_V16_NAME(function) ZX_CAT3(function, STORAGE, avx512)
#define ZX_LOAD_V16(p, i, n) ZX_CAT2(zx_load_v16, STORAGE)((p), (i), (n))
#define ZX_STORE_V16(p, i, n, x) ZX_CAT2(zx_store_v16, STORAGE)((p), (i), (n), (x))

#endif
