/* sources.h - inside the kernels layer: one piece of sum_sources, elements [begin, begin + n). */
#ifndef ZX_KERNELS_SOURCES_H
#define ZX_KERNELS_SOURCES_H

#include "kernels/kernels.h"

typedef void (*zx_sources_fn)(const zx_sum_sources_args *args, int64_t begin, int64_t n);
void zx_sources_float_plain(const zx_sum_sources_args *args, int64_t begin, int64_t n);
void zx_sources_double_plain(const zx_sum_sources_args *args, int64_t begin, int64_t n);
void zx_sources_float_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n);
/* The same for float32 and bfloat16 and at least one source. */
void zx_sources_registers_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n);
/* Likewise, without accumulation, past the caches; out must be none of the sources. */
void zx_sources_stream_avx2(const zx_sum_sources_args *args, int64_t begin, int64_t n);

#endif
