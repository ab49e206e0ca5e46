/* store_values.c - looking into a store, and values in and out of it: layout, bytes, slices, whole parameters. */
#include "py/py.h"

#include <string.h>

/* ---- layout ---- */

static PyObject *param_dict(const zx_layout *l, int64_t i)
{
    const zx_param *p = &l->params[i];
    const zx_place *at = &l->places[i];
    PyObject *shape = zx_py_shape_tuple(p->ndim, p->shape);
    if (!shape) return NULL;
    return Py_BuildValue("{s:s, s:i, s:i, s:L, s:L, s:N, s:s, s:N, s:i, s:i}", "name", p->name, "unit", p->unit,
                         "range", at->range, "offset", (long long)at->offset, "n", (long long)at->n, "shape", shape,
                         "dtype", zx_dtype_name(p->dtype), "trainable", PyBool_FromLong(p->trainable), "group",
                         p->group, "tied_to", p->tied_to);
}

static PyObject *range_dict(const zx_layout *l, int64_t i)
{
    const zx_range *r = &l->ranges[i];
    return Py_BuildValue("{s:i, s:s, s:N, s:L, s:L, s:L}", "unit", r->unit, "dtype", zx_dtype_name(r->dtype),
                         "trainable", PyBool_FromLong(r->trainable), "n_used", (long long)r->n_used, "n_padded",
                         (long long)r->n_padded, "slice", (long long)r->slice);
}

static PyObject *unit_dict(const zx_layout *l, int64_t i)
{
    const zx_unit *u = &l->units[i];
    return Py_BuildValue("{s:s, s:K, s:K, s:N}", "name", u->name, "param_bytes", (unsigned long long)u->param_bytes,
                         "grad_bytes", (unsigned long long)u->grad_bytes, "trainable", PyBool_FromLong(u->trainable));
}

static PyObject *list_of(const zx_layout *l, int64_t n, PyObject *(*make)(const zx_layout *l, int64_t i))
{
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list && i < n; i++) {
        PyObject *item = make(l, i);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    return list;
}

PyObject *zx_py_store_layout(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (!zx_py_partitioner_check_open(self, "layout")) return NULL;
    const zx_layout *l = self->layout;
    PyObject *dict = PyDict_New();
    if (dict && zx_py_put_int(dict, "world", l->world) && zx_py_put_int(dict, "n_elems", l->n_elems) &&
        zx_py_put_int(dict, "n_padded", l->n_padded) &&
        zx_py_put_int(dict, "n_trainable_padded", l->n_trainable_padded) &&
        zx_py_put(dict, "params", list_of(l, l->n_params, param_dict)) &&
        zx_py_put(dict, "ranges", list_of(l, l->n_ranges, range_dict)) &&
        zx_py_put(dict, "units", list_of(l, l->n_units, unit_dict)))
        return dict;
    Py_XDECREF(dict);
    return NULL;
}

PyObject *zx_py_store_pieces(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"rank", "whole", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int rank, whole = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "i|p:pieces", names, &rank, &whole) ||
        !zx_py_partitioner_check_open(self, "pieces"))
        return NULL;
    const zx_layout *l = self->layout;
    if (rank < 0 || rank >= l->world)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "rank %d: ranks count from 0 to %d", rank, l->world - 1);
    int64_t n = zx_checkpoint_pieces(l, rank, whole, NULL, 0);
    zx_piece *pieces = PyMem_Calloc((size_t)n + 1, sizeof *pieces);
    if (!pieces) return PyErr_NoMemory();
    zx_checkpoint_pieces(l, rank, whole, pieces, n);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list && i < n; i++) {
        const zx_piece *p = &pieces[i];
        PyObject *item = Py_BuildValue("(LiLLL)", (long long)p->param, p->range, (long long)p->range_begin,
                                       (long long)p->begin, (long long)p->n);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    PyMem_Free(pieces);
    return list;
}

/* ---- bytes and counts ---- */

PyObject *zx_py_store_bytes(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (!zx_py_partitioner_check_open(self, "bytes")) return NULL;
    zx_store_bytes bytes = zx_layout_bytes(self->layout, &self->policy);
    return zx_py_store_bytes_dict(&bytes);
}

PyObject *zx_py_store_bytes_held(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (!zx_py_partitioner_enter(self, "bytes_held", true)) return NULL;
    zx_store_bytes bytes = zx_store_bytes_held(self->store);
    return zx_py_leave(self, ZX_OK) ? zx_py_store_bytes_dict(&bytes) : NULL;
}

PyObject *zx_py_store_stats(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"reset", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int reset = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|p:stats", names, &reset) ||
        !zx_py_partitioner_enter(self, "stats", true))
        return NULL;
    zx_store_stats s = zx_store_stats_get(self->store);
    if (reset) zx_store_stats_reset(self->store);
    if (!zx_py_leave(self, ZX_OK)) return NULL;
    PyObject *dict = PyDict_New();
    if (dict && zx_py_put_int(dict, "n_gathers", s.n_gathers) && zx_py_put_int(dict, "n_hits", s.n_hits) &&
        zx_py_put_int(dict, "n_blocking_gathers", s.n_blocking_gathers) &&
        zx_py_put_int(dict, "n_reductions", s.n_reductions) && zx_py_put_int(dict, "n_steps", s.n_steps) &&
        zx_py_put_int(dict, "sent_elems", s.sent_elems) && zx_py_put_int(dict, "max_live", s.max_live))
        return dict;
    Py_XDECREF(dict);
    return NULL;
}

/* ---- slices ---- */

PyObject *zx_py_store_has_slice(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"range", "kind", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int range;
    const char *name;
    zx_slice_kind kind;
    zx_dtype dtype;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "is:has_slice", names, &range, &name) ||
        !zx_py_slice_kind(self->base.st, name, &kind) || !zx_py_partitioner_enter(self, "has_slice", true))
        return NULL;
    bool has = zx_store_has_slice(self->store, range, kind, &dtype);
    return zx_py_leave(self, ZX_OK) ? PyUnicode_FromString(has ? zx_dtype_name(dtype) : "") : NULL;
}

/* The dtype of a slice; false with an error, after leaving. The guard is held. */
static bool slice_dtype(zx_py_partitioner *self, int range, zx_slice_kind kind, const char *name, zx_dtype *dtype)
{
    if (zx_store_has_slice(self->store, range, kind, dtype)) return true;
    (void)zx_py_leave(self, zx_error_set(ZX_ERR_ARG, 0, NULL, __func__, __FILE__, __LINE__,
                                         "range %d of %d has no %s values here: ask has_slice first", range,
                                         self->layout->n_ranges, name));
    return false;
}

PyObject *zx_py_store_read_slice(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"range", "kind", "begin", "n", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int range;
    const char *name;
    long long begin, n;
    zx_slice_kind kind;
    zx_dtype dtype;
    zx_status rc = ZX_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "isLL:read_slice", names, &range, &name, &begin, &n) ||
        !zx_py_slice_kind(self->base.st, name, &kind) || !zx_py_partitioner_enter(self, "read_slice", true) ||
        !slice_dtype(self, range, kind, name, &dtype))
        return NULL;
    int64_t n_max = self->layout->ranges[range].n_padded, shape = n < 0 || n > n_max ? 0 : n;
    PyObject *array = zx_py_array_new(dtype, 1, &shape);
    void *data = array ? zx_py_array_data(array) : NULL;
    if (array) {
        Py_BEGIN_ALLOW_THREADS rc =
            zx_store_read_slice(self->store, range, kind, begin, n, data); /* refuses an n that is not `shape` */
        Py_END_ALLOW_THREADS
    }
    if (!zx_py_leave(self, rc)) Py_CLEAR(array);
    return array;
}

PyObject *zx_py_store_write_slice(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"range", "kind", "begin", "values", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int range;
    const char *name;
    long long begin;
    PyObject *values;
    zx_slice_kind kind;
    zx_dtype dtype;
    zx_py_array a;
    zx_status rc = ZX_ERR_ARG;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "isLO:write_slice", names, &range, &name, &begin, &values) ||
        !zx_py_slice_kind(self->base.st, name, &kind) || !zx_py_partitioner_enter(self, "write_slice", true) ||
        !slice_dtype(self, range, kind, name, &dtype))
        return NULL;
    if (zx_py_look(self->base.st, values, "values", zx_dtype_name(dtype), &a)) {
        Py_BEGIN_ALLOW_THREADS rc = zx_store_write_slice(self->store, range, kind, begin, a.n, a.data);
        Py_END_ALLOW_THREADS
    }
    if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *run_load(PyObject *object, const char *method, zx_status (*call)(zx_store *store))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    zx_status rc;
    if (!zx_py_partitioner_enter(self, method, true)) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = call(self->store);
    if (rc == ZX_OK) rc = zx_comm_check(self->comm->comm);
    Py_END_ALLOW_THREADS if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

PyObject *zx_py_store_load_begin(PyObject *self, PyObject *Py_UNUSED(none))
{
    return run_load(self, "load_begin", zx_store_load_begin);
}

PyObject *zx_py_store_load_end(PyObject *self, PyObject *Py_UNUSED(none))
{
    return run_load(self, "load_end", zx_store_load_end);
}

/* ---- whole parameters ---- */

static zx_status copy_param(zx_py_partitioner *self, int64_t param, void *out)
{
    const zx_place *at = &self->layout->places[param];
    const zx_range *range = &self->layout->ranges[at->range];
    void *base;
    if (self->engine && zx_engine_in_pass(self->engine))
        ZX_FAIL(ZX_ERR_STATE, "gather of parameter '%s' inside a pass: end the pass first",
                self->layout->params[param].name);
    ZX_TRY(zx_store_acquire(self->store, range->unit, self->stream, &base));
    zx_status copied = ZX_OK;
    size_t bytes = (size_t)at->n * zx_dtype_bytes(range->dtype);
    if (bytes) copied = zx_stream_copy(self->stream, out, zx_store_param_addr(self->store, param), bytes);
    if (copied == ZX_OK) copied = zx_stream_sync(self->stream);
    if (copied != ZX_OK) {
        zx_error first = *zx_error_last();
        (void)!zx_store_release(self->store, range->unit, self->stream);
        return zx_error_raise(&first);
    }
    ZX_TRY(zx_store_release(self->store, range->unit, self->stream));
    ZX_TRY(zx_comm_check(self->comm->comm));
    return ZX_OK;
}

PyObject *zx_py_store_gather(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"param", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    long long param;
    zx_status rc = ZX_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "L:gather", names, &param)) return NULL;
    if (param < 0 || param >= self->layout->n_params)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "there is no parameter %lld: the layout has %lld", param,
                          (long long)self->layout->n_params);
    if (!zx_py_partitioner_enter(self, "gather", true)) return NULL;
    const zx_param *p = &self->layout->params[param];
    PyObject *array = zx_py_array_new(p->dtype, p->ndim, p->shape);
    void *data = array ? zx_py_array_data(array) : NULL;
    if (array) {
        Py_BEGIN_ALLOW_THREADS rc = copy_param(self, param, data);
        Py_END_ALLOW_THREADS
    }
    if (!zx_py_leave(self, rc)) Py_CLEAR(array);
    return array;
}
