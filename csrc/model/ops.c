/* ops.c - the list of built-in operations, and what their files share. */
#include "model/ops.h"

#include <stdio.h>
#include <string.h>

static const zx_opdef *const builtin[] = {
    &zx_op_add,       &zx_op_mul,       &zx_op_scale,         &zx_op_sum,
    &zx_op_gelu,      &zx_op_matmul,    &zx_op_linear,        &zx_op_embedding,
    &zx_op_layernorm, &zx_op_attention, &zx_op_cross_entropy, &zx_op_linear_cross_entropy,
};

const zx_opdef *zx_opdef_builtin(int32_t index)
{
    return index >= 0 && index < (int32_t)(sizeof builtin / sizeof *builtin) ? builtin[index] : NULL;
}

const zx_opdef *zx_opdef_find(const char *name)
{
    for (int32_t i = 0; zx_opdef_builtin(i); i++)
        if (strcmp(builtin[i]->name, name) == 0) return builtin[i];
    return NULL;
}

const char *zx_shape_text(const zx_shape *s, char buf[96])
{
    int at = snprintf(buf, 96, "(");
    for (int i = 0; i < s->ndim && at < 80; i++)
        at += snprintf(buf + at, (size_t)(96 - at), i ? ", %lld" : "%lld", (long long)s->dim[i]);
    if (at < 96) snprintf(buf + at, (size_t)(96 - at), ") %s", zx_dtype_name(s->dtype));
    return buf;
}

int64_t zx_shape_numel(const zx_shape *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim; i++)
        n *= s->dim[i];
    return n;
}

int64_t zx_shape_rows(const zx_shape *s)
{
    int64_t n = 1;
    for (int i = 0; i < s->ndim - 1; i++)
        n *= s->dim[i];
    return n;
}

zx_status zx_expect_dtype(const char *op, const char *what, const zx_shape *s, zx_dtype dtype)
{
    if (s->dtype == dtype) return ZX_OK;
    ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s where %s is expected: pass ids as whole numbers and all else as floats", op, what,
            zx_dtype_name(s->dtype), zx_dtype_name(dtype));
}

zx_view zx_rows_view(const zx_view *v)
{
    int64_t cols = v->ndim ? v->shape[v->ndim - 1] : 1, rows = 1;
    for (int i = 0; i < v->ndim - 1; i++)
        rows *= v->shape[i];
    return zx_view_2d(v->data, v->dtype, rows, cols, cols);
}

zx_view zx_rows_slice(const zx_view *v, int64_t first, int64_t n)
{
    zx_view s = *v;
    s.shape[0] = n;
    if (s.data) s.data = (char *)s.data + (size_t)(first * v->stride[0]) * zx_dtype_bytes(v->dtype);
    return s;
}
