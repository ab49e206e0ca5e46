/* launch.h - inside the kernels layer: the entry points that table.c collects, and what all launchers share.
 *
 * Each operation has zx_<op>_cpu and zx_<op>_ref, with the argument struct of kernels.h behind `args`. One
 * that needs scratch memory defines zx_<op>_cpu_scratch / zx_<op>_ref_scratch too, in the same file as its
 * entry point: bytes for these arguments and this many threads. Nothing else has to be written down anywhere.
 */
#ifndef ZX_KERNELS_LAUNCH_H
#define ZX_KERNELS_LAUNCH_H

#include "kernels/kernels.h"

#define X(op)                                                                                                          \
    ZX_CHECKED zx_status zx_##op##_cpu(const zx_exec *exec, const void *args);                                         \
    ZX_CHECKED zx_status zx_##op##_ref(const zx_exec *exec, const void *args);                                         \
    size_t zx_##op##_cpu_scratch(const void *args, int n_threads) __attribute__((weak, visibility("hidden")));         \
    size_t zx_##op##_ref_scratch(const void *args, int n_threads) __attribute__((weak, visibility("hidden")));
#include "kernels/kernels.def"
#undef X

/* ZX_PICK(exec, f, f_avx2): the function for this exec. Machines without AVX2 files never name the second.
 * ZX_PICK3(exec, f, f_avx2, f_avx512): likewise. */
#if defined(__x86_64__)
#define ZX_PICK(exec, plain, avx2) ((exec)->isa >= ZX_ISA_AVX2 ? (avx2) : (plain))
#define ZX_PICK3(exec, plain, avx2, avx512) ((exec)->isa >= ZX_ISA_AVX512 ? (avx512) : ZX_PICK(exec, plain, avx2))
#else
#define ZX_PICK(exec, plain, avx2) (plain)
#define ZX_PICK3(exec, plain, avx2, avx512) (plain)
#endif

/* ---- argument checks (check.c). `op` is the operation's name, `name` the field's. ---------------------- */

/* A plain (not quantised) view of 0 to 4 dimensions with sizes >= 0, data unless it is empty. */
ZX_CHECKED zx_status zx_check_view(const char *op, const char *name, const zx_view *v);
/* The same, with exactly n dimensions. */
ZX_CHECKED zx_status zx_check_ndim(const char *op, const char *name, const zx_view *v, int n);
/* The same, and no two elements share a place (strides of 0 are for inputs). */
ZX_CHECKED zx_status zx_check_out(const char *op, const char *name, const zx_view *v);
/* F32, BF16 or F64. */
ZX_CHECKED zx_status zx_check_float(const char *op, const char *name, zx_dtype t);
ZX_CHECKED zx_status zx_check_dtype(const char *op, const char *name, zx_dtype t, zx_dtype wanted);
/* t is `of` or the type in which sums over `of` are held. */
ZX_CHECKED zx_status zx_check_sum_dtype(const char *op, const char *name, zx_dtype t, zx_dtype of);
ZX_CHECKED zx_status zx_check_same_shape(const char *op, const char *name, const zx_view *v, const char *like_name,
                                         const zx_view *like);
/* Size of one dimension. */
ZX_CHECKED zx_status zx_check_dim(const char *op, const char *name, const zx_view *v, int dim, int64_t wanted);
/* Stride 1 in the last dimension (free when that has at most one element). */
ZX_CHECKED zx_status zx_check_rows(const char *op, const char *name, const zx_view *v);
/* A flat array: n >= 0, data unless n is 0. */
ZX_CHECKED zx_status zx_check_flat(const char *op, const char *name, const void *data, int64_t n);
ZX_CHECKED zx_status zx_check_scratch(const char *op, const zx_exec *exec, size_t needed_bytes);

/* "float32 (3,4)/(4,1)": dtype, shape, strides. buf holds at least ZX_VIEW_TEXT bytes; returns buf. */
enum { ZX_VIEW_TEXT = 224 };
const char *zx_view_text(const zx_view *v, char *buf);

#endif
