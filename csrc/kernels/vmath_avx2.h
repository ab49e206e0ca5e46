/* vmath_avx2.h - eight lanes at a time; only for files <name>_avx2.c. zx_exp_v8 gives the bits of zx_exp_float. */
#ifndef ZX_KERNELS_VMATH_AVX2_H
#define ZX_KERNELS_VMATH_AVX2_H

#include <immintrin.h>

#include "kernels/load.h"
#include "kernels/vmath.h"

static inline __m256 zx_exp_v8(__m256 x)
{
    const __m256 normal = _mm256_cmp_ps(x, _mm256_set1_ps(ZX_EXP_LO), _CMP_NLT_UQ); /* or NaN */
    x = _mm256_max_ps(_mm256_set1_ps(ZX_EXP_LO), x); /* maxps and minps return the second operand for a NaN */
    x = _mm256_min_ps(_mm256_set1_ps(ZX_EXP_HI), x);
    const __m256 magic = _mm256_set1_ps(ZX_EXP_MAGIC);
    __m256 t = _mm256_fmadd_ps(x, _mm256_set1_ps(ZX_EXP_LOG2E), magic);
    __m256 n = _mm256_sub_ps(t, magic);
    __m256 r = _mm256_fmadd_ps(n, _mm256_set1_ps(-ZX_EXP_LN2_HI), x);
    r = _mm256_fmadd_ps(n, _mm256_set1_ps(-ZX_EXP_LN2_LO), r);
    __m256 q = _mm256_fmadd_ps(_mm256_set1_ps(ZX_EXP_Q4), r, _mm256_set1_ps(ZX_EXP_Q3));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(ZX_EXP_Q2));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(ZX_EXP_Q1));
    q = _mm256_fmadd_ps(q, r, _mm256_set1_ps(ZX_EXP_Q0));
    __m256 p = _mm256_add_ps(_mm256_fmadd_ps(q, _mm256_mul_ps(r, r), r), _mm256_set1_ps(1.0f));
    __m256i whole = _mm256_sub_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(0x4b400000));
    __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    const __m256i bias = _mm256_set1_epi32(127);
    __m256 s1 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23));
    __m256 s2 = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23));
    /* In NaN lanes p is NaN, so the scales do not matter. */
    return _mm256_and_ps(_mm256_mul_ps(_mm256_mul_ps(p, s1), s2), normal);
}

/* The first n lanes (n >= 8: all). */
static inline __m256i zx_mask_v8(int64_t n)
{
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int32_t)zx_min64(n, 8)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

static inline __m256 zx_load_v8_f32(const void *p, int64_t i)
{
    return _mm256_loadu_ps((const float *)p + i);
}
static inline void zx_store_v8_f32(void *p, int64_t i, __m256 x)
{
    _mm256_storeu_ps((float *)p + i, x);
}

static inline __m256 zx_load_v8_bf16(const void *p, int64_t i)
{
    __m128i half = _mm_loadu_si128((const __m128i *)((const uint16_t *)p + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

/* zx_bf16_from_f32 on eight lanes. */
static inline void zx_store_v8_bf16(void *p, int64_t i, __m256 x)
{
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i even = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    __m256i out = _mm256_srli_epi32(_mm256_blendv_epi8(even, quiet, nan), 16);
    __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(out), _mm256_extracti128_si256(out, 1));
    _mm_storeu_si128((__m128i *)((uint16_t *)p + i), packed);
}

/* The n < 8 elements at i; the other lanes are 0. */
static inline __m256 zx_load_tail_f32(const void *p, int64_t i, int64_t n)
{
    return _mm256_maskload_ps((const float *)p + i, zx_mask_v8(n));
}
static inline void zx_store_tail_f32(void *p, int64_t i, __m256 x, int64_t n)
{
    _mm256_maskstore_ps((float *)p + i, zx_mask_v8(n), x);
}
static inline __m256 zx_load_tail_bf16(const void *p, int64_t i, int64_t n)
{
    uint16_t part[8] = {0};
    memcpy(part, (const uint16_t *)p + i, (size_t)n * sizeof *part);
    return zx_load_v8_bf16(part, 0);
}
static inline void zx_store_tail_bf16(void *p, int64_t i, __m256 x, int64_t n)
{
    uint16_t part[8];
    zx_store_v8_bf16(part, 0, x);
    memcpy((uint16_t *)p + i, part, (size_t)n * sizeof *part);
}

/* Elements i to i + 7 of a row that ends before n: zeros past the end; nothing is written past the end. */
static inline __m256 zx_load_part_f32(const void *p, int64_t i, int64_t n)
{
    return i + 8 <= n ? zx_load_v8_f32(p, i) : i < n ? zx_load_tail_f32(p, i, n - i) : _mm256_setzero_ps();
}

static inline __m256 zx_load_part_bf16(const void *p, int64_t i, int64_t n)
{
    return i + 8 <= n ? zx_load_v8_bf16(p, i) : i < n ? zx_load_tail_bf16(p, i, n - i) : _mm256_setzero_ps();
}

static inline void zx_store_part_f32(void *p, int64_t i, int64_t n, __m256 x)
{
    if (i + 8 <= n)
        zx_store_v8_f32(p, i, x);
    else if (i < n)
        zx_store_tail_f32(p, i, x, n - i);
}

static inline void zx_store_part_bf16(void *p, int64_t i, int64_t n, __m256 x)
{
    if (i + 8 <= n)
        zx_store_v8_bf16(p, i, x);
    else if (i < n)
        zx_store_tail_bf16(p, i, x, n - i);
}

/* For bodies that are included through instances_simd.h, once per storage. */
#define ZX_V8_NAME(function) ZX_CAT3(function, STORAGE, avx2)
#define ZX_LOAD_V8(p, i) ZX_CAT2(zx_load_v8, STORAGE)((p), (i))
#define ZX_LOAD_TAIL(p, i, n) ZX_CAT2(zx_load_tail, STORAGE)((p), (i), (n))
#define ZX_LOAD_PART(p, i, n) ZX_CAT2(zx_load_part, STORAGE)((p), (i), (n))
#define ZX_STORE_PART(p, i, n, x) ZX_CAT2(zx_store_part, STORAGE)((p), (i), (n), (x))

#endif
