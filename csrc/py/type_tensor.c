/* type_tensor.c - Tensor: a handle on a value of the tape, its operators, and reading it. */
#include "py/py.h"

#include <math.h>
#include <string.h>

/* ---- life ---- */

static void tensor_end(void *object)
{
    zx_py_tensor *self = object;
    /* After a fork the tape is the parent's; nothing of it is touched here. */
    if (self->t && zx_py_enter_end(self)) {
        zx_tensor_unhold(self->t);
        zx_tensor_unref(self->t);
        zx_py_leave_end(self);
    }
    Py_XDECREF((PyObject *)self->engine);
}

zx_py_tensor *zx_py_tensor_new(zx_py_partitioner *engine)
{
    zx_py_tensor *self = zx_py_new(engine->base.st->tensor_type, tensor_end);
    if (!self) return NULL;
    self->base.guard = engine->base.guard;
    self->engine = (zx_py_partitioner *)Py_NewRef((PyObject *)engine);
    return self;
}

static int tensor_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)((zx_py_tensor *)object)->engine);
    return 0;
}

/* ---- operations ---- */

PyObject *zx_py_apply(zx_py_partitioner *engine, const char *op, zx_py_tensor *const *in, int n_in,
                      const zx_attrs *attrs)
{
    zx_py_state *st = engine->base.st;
    const zx_opdef *def = zx_opdef_find(op);
    zx_tensor *inputs[ZX_OP_MAX_IN] = {0};
    zx_status rc;
    if (!def) return ZX_PY_FAIL(st, ZX_ERR_ARG, "no operation is named '%.60s': zerox._C.ops() lists them", op);
    for (int k = 0; k < n_in; k++) {
        if (in[k] && in[k]->engine != engine)
            return ZX_PY_FAIL(st, ZX_ERR_ARG, "%s: input %d belongs to another engine", op, k);
        inputs[k] = in[k] ? in[k]->t : NULL;
    }
    zx_py_tensor *made = zx_py_tensor_new(engine);
    if (!made) return NULL;
    bool ok = zx_py_partitioner_enter(engine, "apply", false);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS rc = zx_engine_apply(engine->engine, def, inputs, n_in, attrs, &made->t);
        Py_END_ALLOW_THREADS ok = zx_py_leave(engine, rc);
    }
    if (ok) return (PyObject *)made;
    Py_DECREF(made);
    return NULL;
}

static PyObject *unary(zx_py_tensor *a, const char *op, double factor)
{
    zx_attrs attrs = {.f = {factor}};
    return zx_py_apply(a->engine, op, &a, 1, &attrs);
}

/* add and mul repeat their second operand: the larger one goes first. */
static PyObject *binary(zx_py_tensor *a, zx_py_tensor *b, const char *op)
{
    int64_t n_a = zx_tensor_numel(a->t), n_b = zx_tensor_numel(b->t);
    bool swap = n_a < n_b || (n_a == n_b && a->t->ndim < b->t->ndim);
    zx_py_tensor *in[2] = {swap ? b : a, swap ? a : b};
    zx_attrs attrs = {0};
    return zx_py_apply(a->engine, op, in, 2, &attrs);
}

static PyObject *tensor_repr(PyObject *object)
{
    const zx_tensor *t = ((zx_py_tensor *)object)->t;
    PyObject *shape = zx_py_shape_tuple(t->ndim, t->shape);
    if (!shape) return NULL;
    PyObject *text =
        PyUnicode_FromFormat("<Tensor %R %s%s>", shape, zx_dtype_name(t->dtype), t->is_total ? ", a counted loss" : "");
    Py_DECREF(shape);
    return text;
}

/* Operators get their operands in either order; no class derives from Tensor. */
static zx_py_tensor *as_tensor(PyObject *object)
{
    return Py_TYPE(object)->tp_repr == tensor_repr ? (zx_py_tensor *)object : NULL;
}

static PyObject *not_with_number(const char *op)
{
    PyErr_Format(
        PyExc_TypeError,
        "Tensor %s number is no operation: add a Tensor (engine.input of a one-element array, or a parameter); "
        "multiplying and dividing by numbers is possible",
        op);
    return NULL;
}

static bool is_zero(PyObject *object)
{
    int overflow;
    return PyLong_CheckExact(object) && PyLong_AsLongAndOverflow(object, &overflow) == 0 && !overflow;
}

static PyObject *tensor_add(PyObject *left, PyObject *right)
{
    zx_py_tensor *a = as_tensor(left), *b = as_tensor(right);
    if (a && b) return binary(a, b, "add");
    PyObject *other = a ? right : left;
    if (is_zero(other)) return Py_NewRef(a ? left : right); /* where sum() begins */
    if (zx_py_is_number(other)) return not_with_number("+");
    Py_RETURN_NOTIMPLEMENTED;
}

static PyObject *tensor_subtract(PyObject *left, PyObject *right)
{
    zx_py_tensor *a = as_tensor(left), *b = as_tensor(right);
    if (!a || !b) {
        if (zx_py_is_number(a ? right : left)) return not_with_number("-");
        Py_RETURN_NOTIMPLEMENTED;
    }
    PyObject *minus = unary(b, "scale", -1.0);
    if (!minus) return NULL;
    PyObject *made = binary(a, (zx_py_tensor *)minus, "add");
    Py_DECREF(minus);
    return made;
}

static PyObject *tensor_multiply(PyObject *left, PyObject *right)
{
    zx_py_tensor *a = as_tensor(left), *b = as_tensor(right);
    if (a && b) return binary(a, b, "mul");
    PyObject *other = a ? right : left;
    if (!zx_py_is_number(other)) Py_RETURN_NOTIMPLEMENTED;
    double factor = PyFloat_AsDouble(other);
    if (factor == -1.0 && PyErr_Occurred()) return NULL;
    return unary(a ? a : b, "scale", factor);
}

static PyObject *tensor_divide(PyObject *left, PyObject *right)
{
    zx_py_tensor *a = as_tensor(left);
    if (!a || !zx_py_is_number(right)) Py_RETURN_NOTIMPLEMENTED;
    double divisor = PyFloat_AsDouble(right);
    if (divisor == -1.0 && PyErr_Occurred()) return NULL;
    if (divisor != 0) return unary(a, "scale", 1.0 / divisor);
    PyErr_SetString(PyExc_ZeroDivisionError, "Tensor divided by zero");
    return NULL;
}

static PyObject *tensor_negative(PyObject *object)
{
    return unary((zx_py_tensor *)object, "scale", -1.0);
}

static PyObject *tensor_matmul(PyObject *left, PyObject *right)
{
    zx_py_tensor *in[2] = {as_tensor(left), as_tensor(right)};
    zx_attrs attrs = {0};
    if (!in[0] || !in[1]) Py_RETURN_NOTIMPLEMENTED;
    return zx_py_apply(in[0]->engine, "matmul", in, 2, &attrs);
}

static PyObject *tensor_sum(PyObject *object, PyObject *Py_UNUSED(none))
{
    return unary((zx_py_tensor *)object, "sum", 1.0);
}

static PyObject *tensor_mean(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_tensor *self = (zx_py_tensor *)object;
    return unary(self, "sum", 1.0 / (double)zx_tensor_numel(self->t));
}

/* ---- reading ---- */

static bool read_into(zx_py_tensor *self, const char *method, void *host)
{
    zx_status rc;
    if (!zx_py_partitioner_enter(self->engine, method, false)) return false;
    Py_BEGIN_ALLOW_THREADS rc = zx_tensor_read(self->t, host);
    Py_END_ALLOW_THREADS return zx_py_leave(self->engine, rc);
}

static PyObject *tensor_numpy(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_tensor *self = (zx_py_tensor *)object;
    const zx_tensor *t = self->t;
    PyObject *raw = zx_py_array_new(t->dtype, t->ndim, t->shape);
    if (raw && !read_into(self, "read", zx_py_array_data(raw))) Py_CLEAR(raw);
    if (!raw || t->dtype != ZX_BF16) return raw;
    PyObject *wide = zx_py_array_widened(t->ndim, t->shape, zx_py_array_data(raw));
    Py_DECREF(raw);
    return wide;
}

static double element(const void *data, zx_dtype dtype, int i)
{
    switch (dtype) {
    case ZX_F32:
        return ((const float *)data)[i];
    case ZX_F64:
        return ((const double *)data)[i];
    case ZX_I32:
        return ((const int32_t *)data)[i];
    case ZX_I64:
        return (double)((const int64_t *)data)[i];
    case ZX_U8:
        return ((const uint8_t *)data)[i];
    case ZX_BF16: {
        uint32_t bits = (uint32_t)((const uint16_t *)data)[i] << 16;
        float f;
        memcpy(&f, &bits, sizeof f);
        return f;
    }
    default:
        return NAN;
    }
}

static PyObject *tensor_item(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_tensor *self = (zx_py_tensor *)object;
    double data[2] = {0};
    int64_t n = zx_tensor_numel(self->t);
    if (n != (self->t->is_total ? 2 : 1))
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "item() of a tensor with %lld elements: it has to have one",
                          (long long)n);
    if (!read_into(self, "read", data)) return NULL;
    double value = element(data, self->t->dtype, 0);
    if (self->t->is_total) {
        double count = element(data, self->t->dtype, 1);
        value = count == 0 ? NAN : value / count;
    }
    return PyFloat_FromDouble(value);
}

static PyObject *tensor_float(PyObject *self)
{
    return tensor_item(self, NULL);
}

/* As of float(): without it every tensor would be true, also where values do not exist yet. */
static int tensor_bool(PyObject *self)
{
    PyObject *value = tensor_item(self, NULL);
    int truth = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    return truth;
}

static PyObject *tensor_keep(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_tensor *self = (zx_py_tensor *)object, *made = zx_py_tensor_new(self->engine);
    zx_status rc;
    if (!made) return NULL;
    bool ok = zx_py_partitioner_enter(self->engine, "keep", false);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS rc = zx_tensor_keep(self->t, &made->t);
        Py_END_ALLOW_THREADS ok = zx_py_leave(self->engine, rc);
    }
    if (ok) return (PyObject *)made;
    Py_DECREF(made);
    return NULL;
}

static PyObject *get_engine(PyObject *object, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)((zx_py_tensor *)object)->engine);
}

static PyObject *get_shape(PyObject *object, void *Py_UNUSED(closure))
{
    const zx_tensor *t = ((zx_py_tensor *)object)->t;
    return zx_py_shape_tuple(t->ndim, t->shape);
}

static PyObject *get_dtype(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(zx_dtype_name(((zx_py_tensor *)object)->t->dtype));
}

static PyObject *get_requires_grad(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((zx_py_tensor *)object)->t->requires_grad);
}

static PyObject *get_is_total(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((zx_py_tensor *)object)->t->is_total);
}

static PyGetSetDef getset[] = {
    {"engine", get_engine, NULL, "The Engine whose tape it is on.", NULL},
    {"shape", get_shape, NULL, "Sizes of the dimensions.", NULL},
    {"dtype", get_dtype, NULL, "\"float32\", \"bfloat16\", \"float64\", \"int32\", ...", NULL},
    {"requires_grad", get_requires_grad, NULL, "Whether backward goes through it.", NULL},
    {"is_total", get_is_total, NULL, "A counted loss {sum, number of labels}.", NULL},
    {0},
};

static PyMethodDef methods[] = {
    {"numpy", tensor_numpy, METH_NOARGS, "numpy($self, /)\n--\n\nA copy; bfloat16 is widened to float32."},
    {"item", tensor_item, METH_NOARGS,
     "item($self, /)\n--\n\nThe value of a one-element tensor; the mean (sum / count) of a counted loss."},
    {"keep", tensor_keep, METH_NOARGS, "keep($self, /)\n--\n\nA copy with memory of its own, which outlives the pass."},
    {"sum", tensor_sum, METH_NOARGS, "sum($self, /)\n--\n\nThe sum of all elements, in float32 (float64 for float64)."},
    {"mean", tensor_mean, METH_NOARGS, "mean($self, /)\n--\n\nThe mean of all elements, likewise."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A value on the tape. Made by Engine.input, param and apply; never by users."},
    {Py_tp_dealloc, zx_py_dealloc},
    {Py_tp_traverse, tensor_traverse},
    {Py_tp_repr, tensor_repr},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_nb_add, tensor_add},
    {Py_nb_subtract, tensor_subtract},
    {Py_nb_multiply, tensor_multiply},
    {Py_nb_true_divide, tensor_divide},
    {Py_nb_negative, tensor_negative},
    {Py_nb_matrix_multiply, tensor_matmul},
    {Py_nb_float, tensor_float},
    {Py_nb_bool, tensor_bool},
    {0},
};

PyType_Spec zx_py_tensor_spec = {
    .name = "zerox._C.Tensor",
    .basicsize = sizeof(zx_py_tensor),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = slots,
};
