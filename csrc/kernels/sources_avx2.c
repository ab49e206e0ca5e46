/* sources_avx2.c - sum_sources for AVX2: the float instance of sources.ref.h, and versions for float32 and bfloat16
 * that keep 32 sums in registers while the sources pass by (4 times as fast in the first-level cache: 4 KB from 2
 * float32 sources took 287 ns by blocks). Large outputs are written past the caches: their lines are not read. */
#include "kernels/sources.h"

#include <immintrin.h>

#define REAL float
#define ISA avx2
#include "kernels/sources.ref.h"

#define INLINE static inline __attribute__((always_inline))

INLINE void load_block(zx_dtype t, const void *p, int64_t i, __m256 x[4])
{
    for (int k = 0; k < 4; k++) {
        if (t == ZX_F32) {
            x[k] = _mm256_loadu_ps((const float *)p + i + 8 * k);
        } else {
            __m128i half = _mm_loadu_si128((const __m128i *)(const void *)((const uint16_t *)p + i + 8 * k));
            x[k] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        }
    }
}

INLINE void store_32_bytes(void *p, __m256i x, bool stream)
{
    if (stream)
        _mm256_stream_si256(p, x);
    else
        _mm256_storeu_si256(p, x);
}

INLINE void store_block(zx_dtype t, void *p, int64_t i, const __m256 x[4], bool stream)
{
    if (t == ZX_F32) {
        for (int k = 0; k < 4; k++)
            store_32_bytes((float *)p + i + 8 * k, _mm256_castps_si256(x[k]), stream);
    } else {
        for (int k = 0; k < 4; k += 2)
            store_32_bytes((uint16_t *)p + i + 8 * k, zx_bf16_pack_16(x[k], x[k + 1]), stream);
    }
}

/* [begin, end), a multiple of 32 elements, source after source. */
INLINE void sum_blocks(const zx_sum_sources_args *args, zx_dtype from, zx_dtype to, int n_src, bool stream,
                       int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += 32) {
        __m256 sum[4], x[4];
        load_block(from, args->src[0], i, sum);
        for (int s = 1; s < n_src; s++) {
            load_block(from, args->src[s], i, x);
            for (int k = 0; k < 4; k++)
                sum[k] = _mm256_add_ps(sum[k], x[k]);
        }
        if (!stream && args->accumulate) {
            load_block(to, args->out, i, x);
            for (int k = 0; k < 4; k++)
                sum[k] = _mm256_add_ps(x[k], sum[k]);
        }
        store_block(to, args->out, i, sum, stream);
    }
}

/* Streaming stores need 32-byte addresses: the version by blocks takes what lies before and behind. */
INLINE void sum_range(const zx_sum_sources_args *args, zx_dtype from, zx_dtype to, bool stream, int64_t begin,
                      int64_t n)
{
    uintptr_t out = (uintptr_t)zx_at(args->out, to, begin);
    int64_t head = stream ? zx_min64(n, (int64_t)(((32 - (out & 31)) & 31) / zx_dtype_bytes(to))) : 0;
    int64_t whole = (n - head) & ~(int64_t)31;
    if (head > 0) zx_sources_float_avx2(args, begin, head);
    begin += head;
    if (args->n_src == 2)
        sum_blocks(args, from, to, 2, stream, begin, begin + whole);
    else
        sum_blocks(args, from, to, args->n_src, stream, begin, begin + whole);
    if (stream) _mm_sfence();
    if (head + whole < n) zx_sources_float_avx2(args, begin + whole, n - head - whole);
}

INLINE void sum_any(const zx_sum_sources_args *args, bool stream, int64_t begin, int64_t n)
{
    if (args->src_dtype == ZX_F32 && args->out_dtype == ZX_F32)
        sum_range(args, ZX_F32, ZX_F32, stream, begin, n);
    else if (args->src_dtype == ZX_F32)
        sum_range(args, ZX_F32, ZX_BF16, stream, begin, n);
    else if (args->out_dtype == ZX_F32)
        sum_range(args, ZX_BF16, ZX_F32, stream, begin, n);
    else
        sum_range(args, ZX_BF16, ZX_BF16, stream, begin, n);
}

void zx_sources_registers_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    sum_any(args, false, begin, n);
}

void zx_sources_stream_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    sum_any(args, true, begin, n);
}
