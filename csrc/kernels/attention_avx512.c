/* attention_avx512.c - the softmax of attention_avx2.c on sixteen lanes: lanes are queries, so the bits are the same.
 */
#include "kernels/attention.h"
#include "kernels/vmath_avx512.h"

enum { R = ZX_ATTN_ROWS };

static bool softmax_step(float *s, int64_t n_keys, int64_t from, int64_t n_rows, float *max, float *sum, float *shrink)
{
    const __m512 minus_inf = _mm512_set1_ps(-INFINITY);
    unsigned moved = 0;
    for (int64_t i = from; i < n_rows; i += 16) {
        const __m512 old = _mm512_loadu_ps(max + i);
        __m512 top = old, top1 = minus_inf, part = _mm512_setzero_ps();
        int64_t r = 0;
        for (; r + 2 <= n_keys; r += 2) {
            top = _mm512_max_ps(top, _mm512_loadu_ps(s + r * R + i));
            top1 = _mm512_max_ps(top1, _mm512_loadu_ps(s + (r + 1) * R + i));
        }
        if (r < n_keys) top = _mm512_max_ps(top, _mm512_loadu_ps(s + r * R + i));
        top = _mm512_max_ps(top, top1);
        const __m512 shift = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(top, minus_inf, _CMP_NEQ_UQ), top);
        const __m512 factor = zx_exp_v16(_mm512_sub_ps(old, shift));
        for (r = 0; r < n_keys; r++) {
            __m512 p = zx_exp_v16(_mm512_sub_ps(_mm512_loadu_ps(s + r * R + i), shift));
            _mm512_storeu_ps(s + r * R + i, p);
            part = _mm512_add_ps(part, p);
        }
        moved |= _mm512_cmp_ps_mask(top, old, _CMP_NEQ_UQ);
        _mm512_storeu_ps(max + i, top);
        _mm512_storeu_ps(shrink + i, factor);
        _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_mul_ps(_mm512_loadu_ps(sum + i), factor), part));
    }
    return moved != 0;
}

static void probabilities(float *s, float *dp, int64_t n_keys, int64_t from, int64_t n_rows, const float *lse,
                          const float *delta, float scale)
{
    const __m512 by = _mm512_set1_ps(scale);
    for (int64_t r = 0; r < n_keys; r++)
        for (int64_t i = from; i < n_rows; i += 16) {
            float *at = s + r * R + i, *at_dp = dp + r * R + i;
            __m512 p = zx_exp_v16(_mm512_sub_ps(_mm512_loadu_ps(at), _mm512_loadu_ps(lse + i)));
            __m512 d = _mm512_sub_ps(_mm512_loadu_ps(at_dp), _mm512_loadu_ps(delta + i));
            _mm512_storeu_ps(at, p);
            _mm512_storeu_ps(at_dp, _mm512_mul_ps(by, _mm512_mul_ps(p, d)));
        }
}

const zx_attn_softmax zx_attn_softmax_avx512 = {softmax_step, probabilities};
