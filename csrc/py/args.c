/* args.c - from Python values to the structs of the layers below, and back. */
#include "py/py.h"

#include <string.h>

bool zx_py_dtype(zx_py_state *st, const char *name, zx_dtype *out)
{
    static const zx_dtype known[] = {ZX_F32, ZX_BF16, ZX_F64, ZX_I32, ZX_I64, ZX_U8};
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        if (strcmp(name, zx_dtype_name(known[i])) != 0) continue;
        *out = known[i];
        return true;
    }
    ZX_PY_FAIL(st, ZX_ERR_ARG, "dtype '%.40s': use float32, bfloat16, float64, int32, int64 or uint8", name);
    return false;
}

bool zx_py_slice_kind(zx_py_state *st, const char *name, zx_slice_kind *out)
{
    static const char *const names[] = {"param", "master", "moment1", "moment2"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *out = (zx_slice_kind)i;
        return true;
    }
    ZX_PY_FAIL(st, ZX_ERR_ARG, "kind '%.40s': use param, master, moment1 or moment2", name);
    return false;
}

/* ---- sequences ---- */

static PyObject *as_fast(PyObject *object, const char *what)
{
    PyObject *fast = PySequence_Fast(object, "");
    if (!fast && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_Format(PyExc_TypeError, "%s must be a sequence, not %.80s", what, Py_TYPE(object)->tp_name);
    return fast;
}

static bool as_int64(PyObject *object, const char *what, int64_t *out)
{
    PyObject *index = PyNumber_Index(object);
    if (!index) {
        if (PyErr_ExceptionMatches(PyExc_TypeError))
            PyErr_Format(PyExc_TypeError, "%s must be an integer, not %.80s", what, Py_TYPE(object)->tp_name);
        return false;
    }
    *out = PyLong_AsLongLong(index);
    Py_DECREF(index);
    return !(*out == -1 && PyErr_Occurred());
}

bool zx_py_shape(zx_py_state *st, PyObject *shape, int max_dims, int *ndim, int64_t *dims)
{
    bool ok = true;
    *ndim = 0;
    if (PyIndex_Check(shape)) {
        *ndim = 1;
        ok = as_int64(shape, "shape", &dims[0]);
    } else {
        ok = zx_py_ints(st, shape, "shape", max_dims, dims, ndim);
    }
    for (int i = 0; ok && i < *ndim; i++) {
        if (dims[i] >= 0) continue;
        ZX_PY_FAIL(st, ZX_ERR_ARG, "shape has %lld in dimension %d: sizes count from 0", (long long)dims[i], i);
        ok = false;
    }
    return ok;
}

static bool check_count(zx_py_state *st, const char *what, Py_ssize_t n, int n_max)
{
    if (n <= n_max) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG, "%s has %zd entries, at most %d are possible", what, n, n_max);
    return false;
}

bool zx_py_ints(zx_py_state *st, PyObject *sequence, const char *what, int n_max, int64_t *out, int *n)
{
    PyObject *fast = as_fast(sequence, what);
    *n = 0;
    if (!fast) return false;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    bool ok = check_count(st, what, size, n_max);
    for (Py_ssize_t i = 0; ok && i < size; i++)
        ok = as_int64(PySequence_Fast_GET_ITEM(fast, i), what, &out[i]);
    *n = ok ? (int)size : 0;
    Py_DECREF(fast);
    return ok;
}

bool zx_py_floats(zx_py_state *st, PyObject *sequence, const char *what, int n_max, double *out, int *n)
{
    PyObject *fast = as_fast(sequence, what);
    *n = 0;
    if (!fast) return false;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    bool ok = check_count(st, what, size, n_max);
    for (Py_ssize_t i = 0; ok && i < size; i++) {
        out[i] = PyFloat_AsDouble(PySequence_Fast_GET_ITEM(fast, i));
        ok = !(out[i] == -1.0 && PyErr_Occurred());
    }
    *n = ok ? (int)size : 0;
    Py_DECREF(fast);
    return ok;
}

/* ---- parameter records ---- */

static bool read_record(zx_py_state *st, PyObject *record, Py_ssize_t number, zx_param *p)
{
    if (!PyTuple_Check(record) || PyTuple_GET_SIZE(record) != 7) {
        PyErr_Format(PyExc_TypeError,
                     "record %zd must be a tuple (name, unit, dtype, shape, trainable, group, tied_to), not %.200R",
                     number, record);
        return false;
    }
    const char *dtype;
    PyObject *shape;
    int trainable, ndim;
    if (!PyArg_ParseTuple(record, "sisOpii;a record is (name, unit, dtype, shape, trainable, group, tied_to)", &p->name,
                          &p->unit, &dtype, &shape, &trainable, &p->group, &p->tied_to) ||
        !zx_py_dtype(st, dtype, &p->dtype) || !zx_py_shape(st, shape, ZX_MAX_DIMS, &ndim, p->shape))
        return false;
    p->ndim = ndim;
    memcpy(p->global_shape, p->shape, sizeof p->shape);
    p->trainable = trainable != 0;
    if (p->tied_to < 0) p->tied_to = -1;
    return true;
}

bool zx_py_records(zx_py_state *st, PyObject *records, zx_param **out, int64_t *n, PyObject **keep)
{
    *out = NULL;
    *n = 0;
    *keep = PySequence_Tuple(records);
    if (!*keep) return false;
    Py_ssize_t size = PyTuple_GET_SIZE(*keep);
    *out = PyMem_Calloc((size_t)size + 1, sizeof **out);
    if (!*out) PyErr_NoMemory();
    bool ok = *out != NULL;
    for (Py_ssize_t i = 0; ok && i < size; i++)
        ok = read_record(st, PyTuple_GET_ITEM(*keep, i), i, &(*out)[i]);
    if (ok) {
        *n = size;
        return true;
    }
    PyMem_Free(*out);
    *out = NULL;
    Py_CLEAR(*keep);
    return false;
}

bool zx_py_names(zx_py_state *st, PyObject *names, const char ***out, int32_t *n, PyObject **keep)
{
    *out = NULL;
    *n = 0;
    *keep = PySequence_Tuple(names);
    if (!*keep) return false;
    Py_ssize_t size = PyTuple_GET_SIZE(*keep);
    bool ok = check_count(st, "units", size, INT32_MAX - 1);
    *out = ok ? PyMem_Calloc((size_t)size + 1, sizeof **out) : NULL;
    if (ok && !*out) PyErr_NoMemory();
    ok = *out != NULL;
    for (Py_ssize_t i = 0; ok && i < size; i++) {
        (*out)[i] = PyUnicode_AsUTF8(PyTuple_GET_ITEM(*keep, i));
        ok = (*out)[i] != NULL;
    }
    if (ok) {
        *n = (int32_t)size;
        return true;
    }
    PyMem_Free(*out);
    *out = NULL;
    Py_CLEAR(*keep);
    return false;
}

bool zx_py_hypers(zx_py_state *st, PyObject *sequence, int32_t n_groups, zx_hyper **out)
{
    *out = NULL;
    PyObject *fast = as_fast(sequence, "hyper");
    if (!fast) return false;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(fast);
    bool ok = size >= n_groups;
    if (!ok)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "hyper has %zd entries and the parameters use %d option groups: give one each", size,
                   n_groups);
    *out = ok ? PyMem_Calloc((size_t)size + 1, sizeof **out) : NULL;
    if (ok && !*out) PyErr_NoMemory();
    ok = *out != NULL;
    for (Py_ssize_t i = 0; ok && i < size; i++) {
        double v[8];
        int n;
        ok = zx_py_floats(st, PySequence_Fast_GET_ITEM(fast, i), "an entry of hyper", 8, v, &n);
        if (ok && n != 8) {
            ZX_PY_FAIL(st, ZX_ERR_ARG,
                       "entry %zd of hyper has %d numbers and needs 8: lr, beta1, beta2, eps, weight_decay, momentum, "
                       "bias_correction1, bias_correction2",
                       i, n);
            ok = false;
        }
        if (ok) (*out)[i] = (zx_hyper){v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]};
    }
    Py_DECREF(fast);
    if (ok) return true;
    PyMem_Free(*out);
    *out = NULL;
    return false;
}

/* ---- back ---- */

PyObject *zx_py_shape_tuple(int ndim, const int64_t *shape)
{
    PyObject *tuple = PyTuple_New(ndim);
    for (int i = 0; tuple && i < ndim; i++) {
        PyObject *n = PyLong_FromLongLong(shape[i]);
        if (!n)
            Py_CLEAR(tuple);
        else
            PyTuple_SET_ITEM(tuple, i, n);
    }
    return tuple;
}

bool zx_py_put(PyObject *dict, const char *key, PyObject *value)
{
    if (!value) return false;
    int rc = PyDict_SetItemString(dict, key, value);
    Py_DECREF(value);
    return rc == 0;
}

bool zx_py_put_int(PyObject *dict, const char *key, int64_t value)
{
    return zx_py_put(dict, key, PyLong_FromLongLong(value));
}

PyObject *zx_py_store_bytes_dict(const zx_store_bytes *b)
{
    const struct {
        const char *name;
        size_t bytes;
    } items[] = {
        {"params", b->params}, {"master", b->master},           {"moments", b->moments},
        {"grads", b->grads},   {"param_slots", b->param_slots}, {"grad_slots", b->grad_slots},
        {"wire", b->wire},     {"control", b->control},         {"total", b->total},
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < sizeof items / sizeof items[0]; i++)
        if (!zx_py_put_int(dict, items[i].name, (int64_t)items[i].bytes)) Py_CLEAR(dict);
    return dict;
}
