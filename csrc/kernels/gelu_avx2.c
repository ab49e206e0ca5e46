/* gelu_avx2.c - gelu.ref.h on eight lanes, operation by operation in the same order: the same bits. */
#include "kernels/gelu.h"
#include "kernels/vmath_avx2.h"

static inline __m256 clamp_v8(__m256 x, float bound)
{
    x = _mm256_max_ps(_mm256_set1_ps(-bound), x);
    return _mm256_min_ps(_mm256_set1_ps(bound), x);
}

static inline __m256 exp_v8(__m256 x, __m256 square)
{
    __m256 cubic = _mm256_add_ps(_mm256_set1_ps(1.0f), _mm256_mul_ps(_mm256_set1_ps((float)ZX_GELU_B), square));
    __m256 two_u = _mm256_mul_ps(_mm256_mul_ps(_mm256_set1_ps((float)ZX_GELU_A), x), cubic);
    return zx_exp_v8(_mm256_xor_ps(two_u, _mm256_set1_ps(-0.0f)));
}

static inline __m256 fwd_v8(__m256 x)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    __m256 c = clamp_v8(x, (float)ZX_GELU_CLAMP_FWD), e = exp_v8(c, _mm256_mul_ps(c, c));
    return _mm256_mul_ps(x, _mm256_div_ps(one, _mm256_add_ps(one, e)));
}

static inline __m256 bwd_v8(__m256 x, __m256 dout)
{
    const __m256 one = _mm256_set1_ps(1.0f);
    x = clamp_v8(x, (float)ZX_GELU_CLAMP_BWD);
    __m256 square = _mm256_mul_ps(x, x), e = exp_v8(x, square), s = _mm256_div_ps(one, _mm256_add_ps(one, e));
    __m256 cubic = _mm256_add_ps(one, _mm256_mul_ps(_mm256_set1_ps((float)(3 * ZX_GELU_B)), square));
    __m256 slope = _mm256_mul_ps(_mm256_set1_ps((float)ZX_GELU_A), cubic);
    __m256 bend = _mm256_mul_ps(_mm256_mul_ps(_mm256_mul_ps(x, s), _mm256_mul_ps(s, e)), slope);
    return _mm256_mul_ps(dout, _mm256_add_ps(s, bend));
}

#define ZX_BODY "kernels/gelu.avx2.h"
#include "kernels/instances_simd.h"
