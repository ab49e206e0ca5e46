/* xent_avx2.c - xent.ref.h with its 16 partial sums in two registers: the same bits. */
#include "kernels/xent.h"

#include "kernels/vmath_avx2.h"

static inline float sum_in_order(const float *lane)
{
    float sum = 0;
    for (int l = 0; l < ZX_XENT_LANES; l++)
        sum += lane[l];
    return sum;
}

static inline __m256 fill_tail(__m256 x, int64_t n)
{
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(zx_mask_v8(n)));
}

#define ZX_BODY "kernels/xent.avx2.h"
#include "kernels/instances_simd.h"
