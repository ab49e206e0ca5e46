/* gelu_avx512.c - gelu_avx2.c on sixteen lanes: the same bits. */
#include "kernels/gelu.h"
#include "kernels/vmath_avx512.h"

static inline __m512 clamp_v16(__m512 x, float bound)
{
    x = _mm512_max_ps(_mm512_set1_ps(-bound), x);
    return _mm512_min_ps(_mm512_set1_ps(bound), x);
}

static inline __m512 exp_v16(__m512 x, __m512 square)
{
    __m512 cubic = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_mul_ps(_mm512_set1_ps((float)ZX_GELU_B), square));
    __m512 two_u = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps((float)ZX_GELU_A), x), cubic);
    return zx_exp_v16(_mm512_xor_ps(two_u, _mm512_set1_ps(-0.0f)));
}

static inline __m512 fwd_v16(__m512 x)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    __m512 c = clamp_v16(x, (float)ZX_GELU_CLAMP_FWD), e = exp_v16(c, _mm512_mul_ps(c, c));
    return _mm512_mul_ps(x, _mm512_div_ps(one, _mm512_add_ps(one, e)));
}

static inline __m512 bwd_v16(__m512 x, __m512 dout)
{
    const __m512 one = _mm512_set1_ps(1.0f);
    x = clamp_v16(x, (float)ZX_GELU_CLAMP_BWD);
    __m512 square = _mm512_mul_ps(x, x), e = exp_v16(x, square), s = _mm512_div_ps(one, _mm512_add_ps(one, e));
    __m512 cubic = _mm512_add_ps(one, _mm512_mul_ps(_mm512_set1_ps((float)(3 * ZX_GELU_B)), square));
    __m512 slope = _mm512_mul_ps(_mm512_set1_ps((float)ZX_GELU_A), cubic);
    __m512 bend = _mm512_mul_ps(_mm512_mul_ps(_mm512_mul_ps(x, s), _mm512_mul_ps(s, e)), slope);
    return _mm512_mul_ps(dout, _mm512_add_ps(s, bend));
}

#define ZX_BODY "kernels/gelu.avx512.h"
#include "kernels/instances_simd.h"
