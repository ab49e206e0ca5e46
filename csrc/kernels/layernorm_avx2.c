/* layernorm_avx2.c - layernorm.ref.h with its 16 partial sums in two registers: the same bits. A row's tail of fewer
 * than 8 elements adds zeros to the remaining partial sums, which leaves them as they are. */
#include "kernels/layernorm.h"

#include "kernels/vmath_avx2.h"

static inline float total(__m256 low, __m256 high)
{
    float lane[ZX_LN_LANES], sum = 0;
    _mm256_storeu_ps(lane, low);
    _mm256_storeu_ps(lane + 8, high);
    for (int l = 0; l < ZX_LN_LANES; l++)
        sum += lane[l];
    return sum;
}

/* Sets the lanes past n elements to zero. */
static inline __m256 keep(__m256 x, int64_t n)
{
    return n >= 8 ? x : _mm256_and_ps(x, _mm256_castsi256_ps(zx_mask_v8(n)));
}

#define ZX_BODY "kernels/layernorm.avx2.h"
#include "kernels/instances_simd.h"
