/* check.c - the argument checks that all launchers share. */
#include <inttypes.h>
#include <stdio.h>

#include "kernels/launch.h"

static int put_list(char *buf, size_t room, const int64_t *values, int n)
{
    int used = snprintf(buf, room, "(");
    for (int i = 0; i < n; i++)
        used += snprintf(buf + used, room - (size_t)used, "%s%" PRId64, i ? "," : "", values[i]);
    used += snprintf(buf + used, room - (size_t)used, ")");
    return used;
}

const char *zx_view_text(const zx_view *v, char *buf)
{
    int n = v->ndim < 0 || v->ndim > ZX_MAX_DIMS ? 0 : v->ndim;
    int used = snprintf(buf, ZX_VIEW_TEXT, "%s ", zx_dtype_name(v->dtype));
    used += put_list(buf + used, ZX_VIEW_TEXT - (size_t)used, v->shape, n);
    used += snprintf(buf + used, ZX_VIEW_TEXT - (size_t)used, "/");
    put_list(buf + used, ZX_VIEW_TEXT - (size_t)used, v->stride, n);
    return buf;
}

zx_status zx_check_view(const char *op, const char *name, const zx_view *v)
{
    if (v->ndim < 0 || v->ndim > ZX_MAX_DIMS)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s has %d dimensions, views have 0 to %d", op, name, (int)v->ndim, ZX_MAX_DIMS);
    char text[ZX_VIEW_TEXT];
    if ((int)v->dtype < 0 || v->dtype >= ZX_N_DTYPE)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s has the unknown dtype %d", op, name, (int)v->dtype);
    if (v->block != 0 || v->scale)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s: %s is quantised (block %d); dequantise it first", op, name, (int)v->block);
    for (int i = 0; i < v->ndim; i++)
        if (v->shape[i] < 0)
            ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, sizes must not be negative", op, name, zx_view_text(v, text));
    if (!v->data && zx_view_numel(v) > 0)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s without data", op, name, zx_view_text(v, text));
    return ZX_OK;
}

zx_status zx_check_ndim(const char *op, const char *name, const zx_view *v, int n)
{
    ZX_TRY(zx_check_view(op, name, v));
    char text[ZX_VIEW_TEXT];
    if (v->ndim != n) ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, it needs %d dimensions", op, name, zx_view_text(v, text), n);
    return ZX_OK;
}

/* Sufficient for the views that occur: sorted by stride, each dimension steps over the whole of the smaller
 * ones. */
zx_status zx_check_out(const char *op, const char *name, const zx_view *v)
{
    ZX_TRY(zx_check_view(op, name, v));
    if (zx_view_numel(v) <= 1) return ZX_OK;
    int64_t stride[ZX_MAX_DIMS], extent[ZX_MAX_DIMS];
    int n = 0;
    for (int i = 0; i < v->ndim; i++) {
        if (v->shape[i] == 1) continue;
        int64_t s = v->stride[i] < 0 ? -v->stride[i] : v->stride[i];
        int at = n++;
        for (; at > 0 && stride[at - 1] > s; at--) {
            stride[at] = stride[at - 1];
            extent[at] = extent[at - 1];
        }
        stride[at] = s;
        extent[at] = v->shape[i];
    }
    int64_t reach = 1; /* elements from the first to past the last of the dimensions so far */
    char text[ZX_VIEW_TEXT];
    for (int i = 0; i < n; i++) {
        if (stride[i] < reach)
            ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, elements of an output must not overlap", op, name,
                    zx_view_text(v, text));
        reach += stride[i] * (extent[i] - 1);
    }
    return ZX_OK;
}

zx_status zx_check_float(const char *op, const char *name, zx_dtype t)
{
    if (t != ZX_F32 && t != ZX_BF16 && t != ZX_F64)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s: %s is %s, it needs float32, bfloat16 or float64", op, name, zx_dtype_name(t));
    return ZX_OK;
}

zx_status zx_check_dtype(const char *op, const char *name, zx_dtype t, zx_dtype wanted)
{
    if (t != wanted)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, it needs %s", op, name, zx_dtype_name(t), zx_dtype_name(wanted));
    return ZX_OK;
}

zx_status zx_check_sum_dtype(const char *op, const char *name, zx_dtype t, zx_dtype of)
{
    if (t != of && t != zx_dtype_sum(of))
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, it needs %s or %s", op, name, zx_dtype_name(t), zx_dtype_name(of),
                zx_dtype_name(zx_dtype_sum(of)));
    return ZX_OK;
}

zx_status zx_check_same_shape(const char *op, const char *name, const zx_view *v, const char *like_name,
                              const zx_view *like)
{
    bool same = v->ndim == like->ndim;
    for (int i = 0; same && i < v->ndim; i++)
        same = v->shape[i] == like->shape[i];
    char a[ZX_VIEW_TEXT], b[ZX_VIEW_TEXT];
    if (!same)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s and %s is %s, their shapes must be equal", op, name, zx_view_text(v, a),
                like_name, zx_view_text(like, b));
    return ZX_OK;
}

zx_status zx_check_dim(const char *op, const char *name, const zx_view *v, int dim, int64_t wanted)
{
    char text[ZX_VIEW_TEXT];
    if (v->shape[dim] != wanted)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, dimension %d needs %" PRId64 " elements", op, name, zx_view_text(v, text),
                dim, wanted);
    return ZX_OK;
}

zx_status zx_check_rows(const char *op, const char *name, const zx_view *v)
{
    char text[ZX_VIEW_TEXT];
    if (v->ndim > 0 && v->shape[v->ndim - 1] > 1 && v->stride[v->ndim - 1] != 1)
        ZX_FAIL(ZX_ERR_ARG, "%s: %s is %s, the last dimension needs stride 1: copy it with `cast` first", op, name,
                zx_view_text(v, text));
    return ZX_OK;
}

zx_status zx_check_flat(const char *op, const char *name, const void *data, int64_t n)
{
    if (n < 0) ZX_FAIL(ZX_ERR_ARG, "%s: n is %" PRId64 ", it must not be negative", op, n);
    if (!data && n > 0) ZX_FAIL(ZX_ERR_ARG, "%s: %s is NULL but has %" PRId64 " elements", op, name, n);
    return ZX_OK;
}

zx_status zx_check_scratch(const char *op, const zx_exec *exec, size_t needed_bytes)
{
    if (needed_bytes > exec->scratch_bytes || (needed_bytes > 0 && !exec->scratch))
        ZX_FAIL(ZX_ERR_STATE, "%s: needs %zu bytes of scratch memory and has %zu: ask the table's scratch function", op,
                needed_bytes, exec->scratch_bytes);
    return ZX_OK;
}
