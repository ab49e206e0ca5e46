/* ops.h - private: the built-in operations and the shape errors they share. Inputs of each are listed at its table. */
#ifndef ZX_MODEL_OPS_H
#define ZX_MODEL_OPS_H

#include "model/tape.h"

extern const zx_opdef zx_op_add, zx_op_mul, zx_op_scale, zx_op_sum, zx_op_gelu, zx_op_matmul, zx_op_linear,
    zx_op_embedding, zx_op_layernorm, zx_op_attention, zx_op_cross_entropy, zx_op_linear_cross_entropy;

/* "(2, 3) float32" into buf; returns buf. */
const char *zx_shape_text(const zx_shape *s, char buf[96]);
int64_t zx_shape_numel(const zx_shape *s);
int64_t zx_shape_rows(const zx_shape *s); /* product of all dimensions but the last */
ZX_CHECKED zx_status zx_expect_dtype(const char *op, const char *what, const zx_shape *s, zx_dtype dtype);
/* The view as (rows, last dimension). */
zx_view zx_rows_view(const zx_view *v);
/* Rows [first, first + n) of a (rows, columns) view. */
zx_view zx_rows_slice(const zx_view *v, int64_t first, int64_t n);

#endif
