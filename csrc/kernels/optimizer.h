/* optimizer.h - inside the kernels layer: elements [begin, end) of one option group, for AdamW and SGD. */
#ifndef ZX_KERNELS_OPTIMIZER_H
#define ZX_KERNELS_OPTIMIZER_H

#include "kernels/kernels.h"

typedef void (*zx_update_fn)(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_adamw_float_plain(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_adamw_float_avx2(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_adamw_double_plain(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_sgd_float_plain(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_sgd_float_avx2(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);
void zx_sgd_double_plain(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end);

#endif
