/* tensor.c - descriptions of tensors and who holds their bytes; see tensor.h. */
#include "model/state.h"

enum { SLAB = 256 };

int64_t zx_tensor_numel(const zx_tensor *t)
{
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        n *= t->shape[i];
    return n;
}

size_t zx_tensor_bytes(const zx_tensor *t)
{
    return (size_t)zx_tensor_numel(t) * zx_dtype_bytes(t->dtype);
}

zx_view zx_tensor_view(const zx_tensor *t)
{
    zx_view v = {.data = t->data, .dtype = t->dtype, .ndim = t->ndim};
    int64_t stride = 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        v.shape[i] = t->shape[i];
        v.stride[i] = stride;
        stride *= t->shape[i];
    }
    return v;
}

zx_shape zx_tensor_shape(const zx_tensor *t)
{
    zx_shape s = {.dtype = t->dtype, .ndim = t->ndim};
    memcpy(s.dim, t->shape, sizeof s.dim);
    return s;
}

zx_status zx_tensor_new(zx_engine *e, const zx_shape *shape, zx_tensor **out)
{
    *out = NULL;
    if (!e->free_tensors) {
        if (e->n_slabs == e->slabs_capacity)
            ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&e->slabs, e->n_slabs, &e->slabs_capacity, sizeof *e->slabs));
        zx_tensor *slab;
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_MODEL, SLAB, slab));
        e->slabs[e->n_slabs++] = slab;
        for (int i = 0; i < SLAB; i++) {
            slab[i].grad = e->free_tensors;
            e->free_tensors = &slab[i];
        }
    }
    zx_tensor *t = e->free_tensors;
    e->free_tensors = t->grad;
    *t = (zx_tensor){.engine = e,
                     .refs = 1,
                     .dtype = shape->dtype,
                     .ndim = shape->ndim,
                     .param = -1,
                     .unit = -1,
                     .generation = e->generation,
                     .node = -1,
                     .block = {.id = -1}};
    memcpy(t->shape, shape->dim, sizeof t->shape);
    *out = t;
    return ZX_OK;
}

void zx_tensor_free_slabs(zx_engine *e)
{
    for (int64_t i = 0; i < e->n_slabs; i++)
        zx_free(e->slabs[i]);
    zx_free(e->slabs);
    e->slabs = NULL;
    e->n_slabs = e->slabs_capacity = 0;
    e->free_tensors = NULL;
}

void zx_tensor_drop_kept(zx_engine *e)
{
    for (int64_t i = 0; i < e->n_slabs; i++)
        for (int k = 0; k < SLAB; k++) {
            zx_tensor *t = &e->slabs[i][k];
            if (t->kind != ZX_TENSOR_KEPT || !t->has_data) continue;
            zx_device_free(e->dev, t->data);
            t->data = NULL;
            t->has_data = false;
        }
}

zx_status zx_tensor_take(zx_tensor *t, const char *name)
{
    ZX_TRY(zx_engine_take(t->engine, name, zx_tensor_bytes(t), &t->block, &t->data));
    t->has_data = true;
    t->holds++;
    return ZX_OK;
}

void zx_tensor_ref(zx_tensor *t)
{
    t->refs++;
}
void zx_tensor_hold(zx_tensor *t)
{
    t->holds++;
}

void zx_tensor_unhold(zx_tensor *t)
{
    if (--t->holds > 0) return;
    t->has_data = false;
    if (t->kind == ZX_TENSOR_VALUE && t->engine->in_pass && t->generation == t->engine->generation)
        zx_engine_give(t->engine, &t->block);
    if (t->kind == ZX_TENSOR_KEPT && !t->engine->closed) zx_device_free(t->engine->dev, t->data);
    t->data = NULL;
}

void zx_tensor_unref(zx_tensor *t)
{
    if (--t->refs > 0) return;
    zx_engine *e = t->engine;
    t->grad = e->free_tensors;
    e->free_tensors = t;
}

void zx_tensor_drop_grad(zx_tensor *t)
{
    if (!t->grad) return;
    zx_tensor_unhold(t->grad);
    zx_tensor_unref(t->grad);
    t->grad = NULL;
}

/* Whether the bytes may be read now; says why not. */
static zx_status check_readable(const zx_tensor *t)
{
    const zx_engine *e = t->engine;
    if (e->closed) ZX_FAIL(ZX_ERR_STATE, "the engine of this tensor is closed");
    if (t->kind == ZX_TENSOR_KEPT) return ZX_OK;
    if (t->kind == ZX_TENSOR_PARAM) {
        if (e->in_pass && e->dry)
            ZX_FAIL(ZX_ERR_STATE, "values do not exist yet: this is the dry run that plans memory; do not read "
                                  "tensors inside forward");
        if (e->units[t->unit].live == 0)
            ZX_FAIL(ZX_ERR_STATE, "parameter '%s' is sharded at this moment: read it with engine.parameter('%s')",
                    e->layout->params[t->param].name, e->layout->params[t->param].name);
        return ZX_OK;
    }
    if (t->generation != e->generation)
        ZX_FAIL(ZX_ERR_STATE,
                "this tensor belongs to pass %lld, and the engine is at pass %lld: its memory is used again; "
                "read it before the next pass, or keep() it",
                (long long)t->generation, (long long)e->generation);
    if (e->dry)
        ZX_FAIL(ZX_ERR_STATE, "values do not exist yet: this is the dry run that plans memory; do not read "
                              "tensors inside forward");
    if (!t->has_data) ZX_FAIL(ZX_ERR_STATE, "the bytes of this tensor were given back already");
    return ZX_OK;
}

zx_status zx_tensor_read(zx_tensor *t, void *host)
{
    ZX_TRY(check_readable(t));
    zx_engine *e = t->engine;
    ZX_TRY(zx_stream_copy(e->stream, host, t->data, zx_tensor_bytes(t)));
    ZX_TRY(zx_stream_sync(e->stream));
    return e->comm ? zx_comm_check(e->comm) : ZX_OK;
}

zx_status zx_tensor_keep(zx_tensor *t, zx_tensor **out)
{
    *out = NULL;
    ZX_TRY(check_readable(t));
    zx_engine *e = t->engine;
    zx_shape shape = zx_tensor_shape(t);
    void *data;
    ZX_TRY(zx_device_alloc(e->dev, zx_tensor_bytes(t), &data));
    zx_status zx_rc_ = ZX_OK;
    ZX_TRY_GOTO(zx_stream_copy(e->stream, data, t->data, zx_tensor_bytes(t)), fail);
    ZX_TRY_GOTO(zx_stream_sync(e->stream), fail);
    ZX_TRY_GOTO(zx_tensor_new(e, &shape, out), fail);
    (*out)->kind = ZX_TENSOR_KEPT;
    (*out)->data = data;
    (*out)->has_data = true;
    (*out)->holds = 1;
    (*out)->is_total = t->is_total;
    return ZX_OK;
fail:
    zx_device_free(e->dev, data);
    return zx_rc_;
}
