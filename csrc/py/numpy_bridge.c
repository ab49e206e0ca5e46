/* numpy_bridge.c - the only file that uses NumPy's C interface: looking at arrays, making them, and converting what
 * a pass is given. NumPy has no bfloat16: raw values are uint16 arrays, float32 holds them exactly. */
#include "py/py.h"

#include <math.h>
#include <string.h>

#define NPY_NO_DEPRECATED_API NPY_1_22_API_VERSION
#define NPY_TARGET_VERSION NPY_1_22_API_VERSION
#include <numpy/arrayobject.h>

bool zx_py_numpy_open(void)
{
    return _import_array() >= 0;
}

static int numpy_type(zx_dtype dtype)
{
    static const int types[ZX_N_DTYPE] = {NPY_FLOAT32, NPY_UINT16, NPY_FLOAT64, NPY_INT32,
                                          NPY_INT64,   NPY_UINT8,  NPY_FLOAT16};
    return types[dtype];
}

/* int64 has two type numbers on some platforms, so kind and size decide. */
static bool dtype_of(PyArrayObject *array, zx_dtype *out)
{
    char kind = PyArray_DESCR(array)->kind;
    npy_intp size = PyArray_ITEMSIZE(array);
    if (kind == 'f' && size == 4)
        *out = ZX_F32;
    else if (kind == 'f' && size == 8)
        *out = ZX_F64;
    else if (kind == 'i' && size == 4)
        *out = ZX_I32;
    else if (kind == 'i' && size == 8)
        *out = ZX_I64;
    else if (kind == 'u' && size == 1)
        *out = ZX_U8;
    else
        return false;
    return true;
}

static void fill_look(PyArrayObject *array, zx_dtype dtype, zx_py_array *out)
{
    out->object = (PyObject *)array;
    out->data = PyArray_DATA(array);
    out->dtype = dtype;
    out->ndim = PyArray_NDIM(array);
    for (int i = 0; i < out->ndim; i++)
        out->shape[i] = PyArray_DIM(array, i);
    out->n = PyArray_SIZE(array);
    out->bytes = (size_t)PyArray_NBYTES(array);
    out->writeable = PyArray_ISWRITEABLE(array);
}

static bool check_layout(zx_py_state *st, PyArrayObject *array, const char *what)
{
    if (PyArray_NDIM(array) > ZX_PY_MAX_DIMS) {
        ZX_PY_FAIL(st, ZX_ERR_ARG, "%s has %d dimensions, at most %d are possible", what, PyArray_NDIM(array),
                   (int)ZX_PY_MAX_DIMS);
        return false;
    }
    if (PyArray_ISCARRAY_RO(array)) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG,
               "%s is not C-contiguous in the machine's byte order: pass numpy.ascontiguousarray(...) of it", what);
    return false;
}

static const char *spelling(PyArrayObject *array, char *buf, size_t n)
{
    PyOS_snprintf(buf, n, "%c%zd", PyArray_DESCR(array)->kind, (Py_ssize_t)PyArray_ITEMSIZE(array));
    return buf;
}

bool zx_py_look(zx_py_state *st, PyObject *object, const char *what, const char *dtype_name, zx_py_array *out)
{
    memset(out, 0, sizeof *out);
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a NumPy array, not %.80s", what, Py_TYPE(object)->tp_name);
        return false;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    char buf[32];
    zx_dtype held = ZX_F32, wanted = ZX_F32;
    bool known = dtype_of(array, &held);
    if (!check_layout(st, array, what) || (dtype_name[0] && !zx_py_dtype(st, dtype_name, &wanted))) return false;
    bool bf16 = PyArray_DESCR(array)->kind == 'u' && PyArray_ITEMSIZE(array) == 2;
    if (dtype_name[0] && wanted == ZX_BF16 && bf16) {
        known = true;
        held = ZX_BF16;
    }
    if (!known) {
        ZX_PY_FAIL(st, ZX_ERR_ARG,
                   "%s is of NumPy type %s: use float32, float64, int32, int64, uint8, or uint16 with "
                   "dtype=\"bfloat16\"",
                   what, spelling(array, buf, sizeof buf));
        return false;
    }
    if (dtype_name[0] && wanted != held) {
        ZX_PY_FAIL(st, ZX_ERR_ARG, "%s is of NumPy type %s and dtype says %s: convert the array or leave dtype out",
                   what, spelling(array, buf, sizeof buf), dtype_name);
        return false;
    }
    fill_look(array, held, out);
    return true;
}

static PyObject *new_array(int type, int ndim, const int64_t *shape)
{
    npy_intp dims[ZX_PY_MAX_DIMS];
    for (int i = 0; i < ndim; i++)
        dims[i] = (npy_intp)shape[i];
    return PyArray_SimpleNew(ndim, dims, type);
}

PyObject *zx_py_array_new(zx_dtype dtype, int ndim, const int64_t *shape)
{
    return new_array(numpy_type(dtype), ndim, shape);
}

void *zx_py_array_data(PyObject *array)
{
    return PyArray_DATA((PyArrayObject *)array);
}

PyObject *zx_py_array_over(zx_dtype dtype, int ndim, const int64_t *shape, void *data, PyObject *base, bool writeable)
{
    npy_intp dims[ZX_PY_MAX_DIMS];
    for (int i = 0; i < ndim; i++)
        dims[i] = (npy_intp)shape[i];
    int flags = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED | (writeable ? NPY_ARRAY_WRITEABLE : 0);
    PyObject *array = PyArray_New(&PyArray_Type, ndim, dims, numpy_type(dtype), NULL, data, 0, flags, NULL);
    if (!array) {
        Py_DECREF(base);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)array, base) == 0) return array;
    Py_DECREF(array);
    return NULL;
}

PyObject *zx_py_array_widened(int ndim, const int64_t *shape, const void *bf16)
{
    PyObject *array = new_array(NPY_FLOAT32, ndim, shape);
    if (!array) return NULL;
    const uint16_t *in = bf16;
    uint32_t *out = PyArray_DATA((PyArrayObject *)array);
    npy_intp n = PyArray_SIZE((PyArrayObject *)array);
    for (npy_intp i = 0; i < n; i++)
        out[i] = (uint32_t)in[i] << 16;
    return array;
}

bool zx_py_is_number(PyObject *object)
{
    if (PyBool_Check(object)) return false;
    return PyFloat_Check(object) || PyLong_Check(object) || PyArray_IsScalar(object, Floating) ||
           PyArray_IsScalar(object, Integer);
}

/* ---- inputs of a pass ---- */

/* To nearest, ties to even; a NaN stays one. */
static uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* array is float32 or float64 and C-contiguous. A float64 goes straight to bfloat16: rounded to odd on the way, its
 * float32 keeps what decides the second rounding. */
static float to_odd(double value)
{
    float f = (float)value;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (f != f || (double)f == value || (bits & 1)) return f;
    bits += fabs((double)f) > fabs(value) ? (uint32_t)-1 : 1; /* the neighbour on the other side is odd */
    memcpy(&f, &bits, sizeof f);
    return f;
}

static PyObject *rounded_to_bf16(PyArrayObject *array)
{
    PyObject *made = PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), NPY_UINT16);
    if (!made) return NULL;
    uint16_t *out = PyArray_DATA((PyArrayObject *)made);
    npy_intp n = PyArray_SIZE(array);
    bool wide = PyArray_ITEMSIZE(array) == 8;
    const float *f = PyArray_DATA(array);
    const double *d = PyArray_DATA(array);
    for (npy_intp i = 0; i < n; i++)
        out[i] = to_bf16(wide ? to_odd(d[i]) : f[i]);
    return made;
}

/* array is int64 and C-contiguous. */
static PyObject *narrowed_to_int32(zx_py_state *st, PyArrayObject *array, const char *name)
{
    PyObject *made = PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT32);
    if (!made) return NULL;
    int32_t *out = PyArray_DATA((PyArrayObject *)made);
    const int64_t *in = PyArray_DATA(array);
    npy_intp n = PyArray_SIZE(array);
    for (npy_intp i = 0; i < n; i++) {
        out[i] = (int32_t)in[i];
        if (out[i] == in[i]) continue;
        ZX_PY_FAIL(st, ZX_ERR_ARG, "input '%s' holds %lld at element %lld, which does not fit into int32", name,
                   (long long)in[i], (long long)i);
        Py_DECREF(made);
        return NULL;
    }
    return made;
}

/* A new reference to a C-contiguous array of a NumPy type. */
static PyArrayObject *cast_to(PyArrayObject *array, int type)
{
    return (PyArrayObject *)PyArray_FROMANY((PyObject *)array, type, 0, 0, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST);
}

static PyObject *converted(zx_py_state *st, PyArrayObject *array, const char *name, zx_dtype dtype)
{
    char kind = PyArray_DESCR(array)->kind;
    npy_intp size = PyArray_ITEMSIZE(array);
    if (dtype == ZX_BF16) {
        if (kind == 'u' && size == 2) return (PyObject *)cast_to(array, NPY_UINT16);
        PyArrayObject *wide = cast_to(array, kind == 'f' && size <= 4 ? NPY_FLOAT32 : NPY_FLOAT64);
        PyObject *made = wide ? rounded_to_bf16(wide) : NULL;
        Py_XDECREF(wide);
        return made;
    }
    if (dtype == ZX_I32 && !(kind == 'i' && size <= 4)) {
        PyArrayObject *wide = cast_to(array, NPY_INT64);
        PyObject *made = wide ? narrowed_to_int32(st, wide, name) : NULL;
        Py_XDECREF(wide);
        return made;
    }
    return (PyObject *)cast_to(array, numpy_type(dtype));
}

/* What an array becomes: named by the caller, or by its kind. No integer may change its value on the way. */
static bool target_dtype(zx_py_state *st, PyArrayObject *array, const char *name, const char *dtype_name,
                         zx_dtype float_dtype, zx_dtype *out)
{
    char kind = PyArray_DESCR(array)->kind, buf[32];
    npy_intp size = PyArray_ITEMSIZE(array);
    *out = kind == 'f' ? float_dtype : ZX_I32;
    if (!(kind == 'f' || kind == 'i' || kind == 'u') || (kind == 'u' && size == 8)) {
        ZX_PY_FAIL(st, ZX_ERR_ARG, "input '%s' is of NumPy type %s: pass floats, or integers that int64 can hold", name,
                   spelling(array, buf, sizeof buf));
        return false;
    }
    if (!dtype_name[0]) return true;
    if (!zx_py_dtype(st, dtype_name, out)) return false;
    bool integer = *out == ZX_I32 || *out == ZX_I64 || *out == ZX_U8;
    if (!(integer && kind == 'f') && !(*out == ZX_U8 && !(kind == 'u' && size == 1))) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG, "input '%s' is of NumPy type %s and dtype says %s: convert it first", name,
               spelling(array, buf, sizeof buf), dtype_name);
    return false;
}

bool zx_py_convert(zx_py_state *st, PyObject *object, const char *name, const char *dtype_name, zx_dtype float_dtype,
                   bool values, zx_py_array *out)
{
    memset(out, 0, sizeof *out);
    PyArrayObject *array = (PyArrayObject *)PyArray_FROM_O(object);
    if (!array) return false;
    zx_dtype dtype;
    PyObject *made = NULL;
    if (PyArray_NDIM(array) > ZX_MAX_DIMS)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "input '%s' has %d dimensions, at most %d are possible", name, PyArray_NDIM(array),
                   (int)ZX_MAX_DIMS);
    else if (target_dtype(st, array, name, dtype_name, float_dtype, &dtype))
        made = values ? converted(st, array, name, dtype) : Py_NewRef((PyObject *)array);
    Py_DECREF(array);
    if (!made) return false;
    fill_look((PyArrayObject *)made, dtype, out);
    return true;
}
