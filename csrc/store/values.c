/* values.c - slices in and out, between host memory and the store, with all of the store's work before them. */
#include "store/internal.h"

typedef struct slice_at {
    char *base;         /* of the first element held */
    int64_t first, n;   /* elements held, counted from the range's start */
    zx_dtype dtype;
} slice_at;

bool zx_store_has_slice(const zx_store *s, int32_t range, zx_slice_kind kind, zx_dtype *out_dtype)
{
    *out_dtype = ZX_F32;
    if (range < 0 || range >= s->layout->n_ranges) return false;
    const zx_range *r = &s->layout->ranges[range];
    *out_dtype = kind == ZX_SLICE_PARAM ? r->dtype : zx_dtype_sum(r->dtype);
    switch (kind) {
    case ZX_SLICE_PARAM:
        return true;
    case ZX_SLICE_MASTER:
        return r->trainable;
    case ZX_SLICE_MOMENT1:
        return r->trainable && s->policy.n_moments >= 1;
    case ZX_SLICE_MOMENT2:
        return r->trainable && s->policy.n_moments >= 2;
    }
    return false;
}

/* whole: parameters that are not sharded may be read anywhere, but are written only where this rank owns them. */
static zx_status find(const zx_store *s, int32_t range, zx_slice_kind kind, int64_t begin, int64_t n, bool whole,
                      slice_at *out)
{
    static const char *const kinds[] = {"parameters", "masters", "first moments", "second moments"};
    *out = (slice_at){0};
    if (s->failure->status != ZX_OK) return zx_error_raise(s->failure);
    if (!zx_store_has_slice(s, range, kind, &out->dtype))
        ZX_FAIL(ZX_ERR_ARG, "range %d of %d: this store holds no such values (kind %d)", range, s->layout->n_ranges,
                (int)kind);
    const zx_range *r = &s->layout->ranges[range];
    const zx_store_range *own = &s->ranges[range];
    *out = (slice_at){.base = own->own_param, .first = own->own_begin, .n = own->own_n, .dtype = out->dtype};
    if (kind == ZX_SLICE_MASTER) out->base = own->master;
    if (kind == ZX_SLICE_MOMENT1 || kind == ZX_SLICE_MOMENT2) out->base = own->moment[kind - ZX_SLICE_MOMENT1];
    if (kind == ZX_SLICE_PARAM && whole && !s->policy.shard_params) {
        char *params = s->units[r->unit].params;
        out->base = params ? params + r->param_offset : NULL;
        out->first = 0;
        out->n = r->n_padded;
    }
    if (n < 0 || begin < out->first || begin > out->first + out->n || n > out->first + out->n - begin)
        ZX_FAIL(ZX_ERR_ARG, "%s [%lld, %lld) of range %d of unit %s: rank %d holds [%lld, %lld)", kinds[kind],
                (long long)begin, (long long)(begin + n), range, s->layout->units[r->unit].name, s->rank,
                (long long)out->first, (long long)(out->first + out->n));
    return ZX_OK;
}

zx_status zx_store_read_slice(zx_store *s, int32_t range, zx_slice_kind kind, int64_t begin, int64_t n, void *out)
{
    slice_at at;
    ZX_TRY(find(s, range, kind, begin, n, true, &at));
    if (n == 0) return ZX_OK;
    ZX_TRY(zx_stream_copy(s->stream, out, zx_at(at.base, at.dtype, begin - at.first),
                          (size_t)n * zx_dtype_bytes(at.dtype)));
    ZX_TRY(zx_stream_sync(s->stream));
    return s->world > 1 ? zx_comm_check(s->comm) : ZX_OK;
}

zx_status zx_store_load_begin(zx_store *s)
{
    if (!s->loading) ZX_TRY(zx_store_ready(s, 0)); /* after a load that failed: begins anew */
    if (s->n_live > 0)
        ZX_FAIL(ZX_ERR_STATE, "values cannot be loaded while %lld units are LIVE: release them first",
                (long long)s->n_live);
    s->loading = true;
    return ZX_OK;
}

zx_status zx_store_write_slice(zx_store *s, int32_t range, zx_slice_kind kind, int64_t begin, int64_t n,
                               const void *values)
{
    slice_at at, other;
    if (!s->loading) ZX_FAIL(ZX_ERR_STATE, "values are written between load_begin and load_end: call load_begin first");
    ZX_TRY(find(s, range, kind, begin, n, false, &at));
    if (n == 0) return ZX_OK;
    void *dst = zx_at(at.base, at.dtype, begin - at.first);
    ZX_TRY(zx_stream_copy(s->stream, dst, values, (size_t)n * zx_dtype_bytes(at.dtype)));
    bool is_param = kind == ZX_SLICE_PARAM;
    if ((is_param && s->layout->ranges[range].trainable) || kind == ZX_SLICE_MASTER) {
        ZX_TRY(find(s, range, is_param ? ZX_SLICE_MASTER : ZX_SLICE_PARAM, begin, n, false, &other));
        void *twin = zx_at(other.base, other.dtype, begin - other.first);
        zx_cast_args cast = {.a = zx_view_1d(dst, at.dtype, n), .out = zx_view_1d(twin, other.dtype, n)};
        if (twin != dst) ZX_TRY(ZX_LAUNCH(s->stream, cast, &cast));
    }
    return zx_stream_sync(s->stream);
}

zx_status zx_store_load_end(zx_store *s)
{
    if (s->failure->status != ZX_OK) return zx_error_raise(s->failure);
    if (!s->loading) ZX_FAIL(ZX_ERR_STATE, "load_end without load_begin");
    s->loading = false;
    for (int32_t u = 0; s->policy.shard_state && u < s->layout->n_units; u++)
        if (zx_store_spread(s, u, true) != ZX_OK) return zx_store_break(s);
    return zx_store_raise(s);
}
