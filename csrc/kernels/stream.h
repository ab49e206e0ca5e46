/* stream.h - inside the kernels layer: stores that pass the caches by, for outputs too large to stay in them. */
#ifndef ZX_KERNELS_STREAM_H
#define ZX_KERNELS_STREAM_H

#include <stddef.h>
#include <stdint.h>

/* From here on an output leaves the second-level cache before anybody reads it, so that its lines need not be read
 * first. Against ordinary stores, one thread: a sum of two float32 arrays runs 1.7 times as fast at 8 MB and 1.5 at
 * 67 MB, a copy of 67 MB 1.5, a fill of 67 MB 2.7. */
enum { ZX_STREAM_BYTES = 4 << 20 };

/* Complete when they return: later stores of this thread come after them for every observer. */
void zx_stream_copy_avx2(void *dst, const void *src, size_t bytes);
/* pattern: an element repeated to 8 bytes; dst is aligned to the element. */
void zx_stream_fill_avx2(void *dst, uint64_t pattern, size_t bytes);

#endif
