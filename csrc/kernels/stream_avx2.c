/* stream_avx2.c - see stream.h. Streaming stores need 32-byte addresses; the ends are written in the ordinary way. */
#include "kernels/stream.h"

#include <immintrin.h>
#include <string.h>

static size_t head_of(const void *dst, size_t bytes)
{
    size_t head = (32 - ((uintptr_t)dst & 31)) & 31;
    return head < bytes ? head : bytes;
}

void zx_stream_copy_avx2(void *dst, const void *src, size_t bytes)
{
    char *to = dst;
    const char *from = src;
    size_t head = head_of(dst, bytes), end = bytes - (bytes - head) % 128;
    memcpy(to, from, head);
    for (size_t i = head; i < end; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(const void *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(const void *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(const void *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(const void *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(void *)(to + i), a);
        _mm256_stream_si256((__m256i *)(void *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(void *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(void *)(to + i + 96), d);
    }
    memcpy(to + end, from + end, bytes - end);
    _mm_sfence();
}

void zx_stream_fill_avx2(void *dst, uint64_t pattern, size_t bytes)
{
    char *to = dst;
    size_t head = head_of(dst, bytes), end = bytes - (bytes - head) % 32;
    __m256i value = _mm256_set1_epi64x((long long)pattern);
    char block[32];
    _mm256_storeu_si256((__m256i *)(void *)block, value);
    memcpy(to, block, head);
    for (size_t i = head; i < end; i += 32)
        _mm256_stream_si256((__m256i *)(void *)(to + i), value);
    memcpy(to + end, block, bytes - end);
    _mm_sfence();
}
