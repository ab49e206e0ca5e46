/* sources_avx2.c - sum_sources for AVX2: the float instance of sources.ref.h, and a version for large float32
 * arrays that keeps sums in registers and writes past the caches (the lines of out are not read first). */
#include "kernels/sources.h"

#include <immintrin.h>

#define REAL float
#define ISA avx2
#include "kernels/sources.ref.h"

void zx_sources_stream_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    float *out = (float *)args->out + begin;
    /* Streaming stores need 32-byte addresses: the ordinary path takes what lies before and behind. */
    int64_t head = zx_min64(n, (int64_t)((32 - ((uintptr_t)out & 31)) & 31) / 4);
    int64_t whole = (n - head) & ~(int64_t)31;
    zx_sources_float_avx2(args, begin, head);
    for (int64_t i = head; i < head + whole; i += 32) {
        const float *p = (const float *)args->src[0] + begin + i;
        __m256 a = _mm256_loadu_ps(p), b = _mm256_loadu_ps(p + 8);
        __m256 c = _mm256_loadu_ps(p + 16), d = _mm256_loadu_ps(p + 24);
        for (int s = 1; s < args->n_src; s++) {
            p = (const float *)args->src[s] + begin + i;
            a = _mm256_add_ps(a, _mm256_loadu_ps(p));
            b = _mm256_add_ps(b, _mm256_loadu_ps(p + 8));
            c = _mm256_add_ps(c, _mm256_loadu_ps(p + 16));
            d = _mm256_add_ps(d, _mm256_loadu_ps(p + 24));
        }
        _mm256_stream_ps(out + i, a);
        _mm256_stream_ps(out + i + 8, b);
        _mm256_stream_ps(out + i + 16, c);
        _mm256_stream_ps(out + i + 24, d);
    }
    _mm_sfence();
    zx_sources_float_avx2(args, begin + head + whole, n - head - whole);
}
