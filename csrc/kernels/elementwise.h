/* elementwise.h - inside the kernels layer: one piece of a row of add, mul, scale or a converting cast. */
#ifndef ZX_KERNELS_ELEMENTWISE_H
#define ZX_KERNELS_ELEMENTWISE_H

#include "kernels/types.h"

typedef enum zx_ew_op { ZX_EW_ADD, ZX_EW_MUL, ZX_EW_SCALE, ZX_EW_COPY } zx_ew_op;

typedef struct zx_ew_job {
    zx_ew_op op;
    zx_dtype dtype[3]; /* of out, a, b */
    double factor;
    bool accumulate;
} zx_ew_job;

/* Of type zx_walk_fn, arg is a zx_ew_job; views in the order out, a, b. */
void zx_ew_float_plain(const void *arg, char *const *p, const int64_t *stride, int64_t n);
void zx_ew_double_plain(const void *arg, char *const *p, const int64_t *stride, int64_t n);
void zx_ew_float_avx2(const void *arg, char *const *p, const int64_t *stride, int64_t n);

#endif
