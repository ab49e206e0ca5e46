/* type_engine.c - Engine: a Partitioner with a model's tape and activation arena. */
#include "py/py.h"

#include <string.h>
#include <unistd.h>

/* ---- opening ---- */

typedef struct engine_options {
    zx_py_store_options store;
    PyObject *records, *units, *comm;
    int world;
    long long total_bytes, memory_limit, spare_bytes;
    const char *dtype;
} engine_options;

static bool parse(PyObject *args, PyObject *kw, engine_options *o)
{
    static char *names[] = {"records",      "units",        "comm",        "world",       "total_bytes",
                            "dtype",        "memory_limit", "spare_bytes", "shard_state", "shard_grads",
                            "shard_params", "reduce_at",    "slots",       "grad_slots",  "prefetch",
                            "reduce_dtype", "optimizer",    "moments",     "poison",      NULL};
    zx_py_store_options *s = &o->store;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|$OiLsLLpppsiipssip:Engine", names, &o->records, &o->units, &o->comm,
                                     &o->world, &o->total_bytes, &o->dtype, &o->memory_limit, &o->spare_bytes,
                                     &s->shard_state, &s->shard_grads, &s->shard_params, &s->reduce_at, &s->slots,
                                     &s->grad_slots, &s->prefetch, &s->reduce_dtype, &s->optimizer, &s->moments,
                                     &s->poison))
        return false;
    if (o->comm) return true;
    PyErr_SetString(PyExc_TypeError, "Engine() needs the keyword argument 'comm' (None: planning only)");
    return false;
}

static bool check(zx_py_state *st, const engine_options *o)
{
    if (o->total_bytes < 0 || o->memory_limit < 0 || o->spare_bytes < 0)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "total_bytes %lld, memory_limit %lld, spare_bytes %lld: none may be negative",
                   o->total_bytes, o->memory_limit, o->spare_bytes);
    else if (o->comm == Py_None && o->world < 1)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "world %d with comm=None: say for how many ranks to plan", o->world);
    else
        return true;
    return false;
}

static bool open_device(zx_py_partitioner *self, const engine_options *o)
{
    if (o->comm != Py_None) {
        if (!zx_py_partitioner_join(self, o->comm)) return false;
        if (o->world == 0 || o->world == self->comm->world) return true;
        ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "world %d, but the Comm has %d ranks: leave world out", o->world,
                   self->comm->world);
        return false;
    }
    self->own.pid = getpid();
    self->base.guard = &self->own;
    zx_device_config config = {.kind = ZX_DEVICE_NULL, .null_total_bytes = (size_t)o->total_bytes};
    zx_status rc = zx_device_open(&config, &self->own_dev);
    self->dev = self->own_dev;
    if (rc != ZX_OK) zx_py_raise(self->base.st, rc);
    return rc == ZX_OK;
}

static zx_status open_engine(zx_py_partitioner *self, const engine_options *o, zx_optimizer optimizer)
{
    zx_engine_config config = {.policy = self->policy,
                               .optimizer = optimizer,
                               .dtype = self->dtype,
                               .memory_limit = (size_t)o->memory_limit,
                               .spare_bytes = (size_t)o->spare_bytes,
                               .poison = o->store.poison};
    zx_comm *comm = self->comm ? self->comm->comm : NULL;
    ZX_TRY(zx_engine_open(&config, self->layout, self->dev, comm, &self->engine));
    self->store = zx_engine_store(self->engine);
    self->stream = zx_engine_stream(self->engine);
    return ZX_OK;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    engine_options o = {.store = ZX_PY_STORE_DEFAULTS, .dtype = "float32"};
    zx_optimizer optimizer;
    zx_status rc = ZX_ERR_ARG;
    if (!parse(args, kw, &o)) return NULL;
    zx_py_partitioner *self = zx_py_new(type, zx_py_partitioner_end);
    if (!self) return NULL;
    self->inputs = PyList_New(0);
    self->names = PyDict_New();
    if (!self->inputs || !self->names || !check(self->base.st, &o) ||
        !zx_py_dtype(self->base.st, o.dtype, &self->dtype) || !open_device(self, &o) || !zx_py_enter(self, "open"))
        goto fail;
    int world = self->comm ? self->comm->world : o.world;
    if (zx_py_partitioner_lay_out(self, o.records, o.units, world, &o.store, &optimizer)) {
        Py_BEGIN_ALLOW_THREADS rc = open_engine(self, &o, optimizer);
        Py_END_ALLOW_THREADS
    }
    if (zx_py_leave(self, rc)) return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* ---- passes ---- */

static bool enter(PyObject *object, const char *method)
{
    return zx_py_partitioner_enter((zx_py_partitioner *)object, method, false);
}

static PyObject *none_after(PyObject *self, zx_status rc)
{
    if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *engine_planned(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"signature", NULL};
    unsigned long long signature;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "K:planned", names, &signature) || !enter(object, "planned"))
        return NULL;
    bool planned = zx_engine_planned(((zx_py_partitioner *)object)->engine, signature);
    return zx_py_leave(object, ZX_OK) ? PyBool_FromLong(planned) : NULL;
}

static PyObject *engine_begin(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"signature", "train", "dry", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    unsigned long long signature;
    int train = -1, dry = -1;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "K|$pp:begin", names, &signature, &train, &dry)) return NULL;
    if (train < 0 || dry < 0) {
        PyErr_SetString(PyExc_TypeError, "begin() needs the keyword arguments 'train' and 'dry'");
        return NULL;
    }
    if (!enter(object, "begin")) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_engine_begin(self->engine, signature, train ? ZX_PASS_TRAIN : ZX_PASS_EVAL, dry);
    Py_END_ALLOW_THREADS
        /* begin has waited for the last pass, whose inputs are copied by now */
        if (rc == ZX_OK && !dry && PyList_SetSlice(self->inputs, 0, PY_SSIZE_T_MAX, NULL) < 0) PyErr_Clear();
    return none_after(object, rc);
}

static PyObject *engine_end(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_status rc;
    if (!enter(object, "end")) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_engine_end(((zx_py_partitioner *)object)->engine);
    Py_END_ALLOW_THREADS return none_after(object, rc);
}

static PyObject *engine_abandon(PyObject *object, PyObject *Py_UNUSED(none))
{
    if (!enter(object, "abandon")) return NULL;
    Py_BEGIN_ALLOW_THREADS zx_engine_abandon(((zx_py_partitioner *)object)->engine);
    Py_END_ALLOW_THREADS return none_after(object, ZX_OK);
}

static PyObject *engine_enter(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"unit", "recompute", NULL};
    int unit, recompute;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "ip:enter", names, &unit, &recompute) || !enter(object, "enter"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_engine_enter(((zx_py_partitioner *)object)->engine, unit, recompute);
    Py_END_ALLOW_THREADS return none_after(object, rc);
}

static PyObject *engine_exit(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"unit", NULL};
    int unit;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "i:exit", names, &unit) || !enter(object, "exit")) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_engine_exit(((zx_py_partitioner *)object)->engine, unit);
    Py_END_ALLOW_THREADS return none_after(object, rc);
}

/* ---- tensors ---- */

/* Gives a Tensor its value and leaves, or gives both up. */
static PyObject *tensor_after(PyObject *self, zx_py_tensor *tensor, zx_tensor *t, zx_status rc)
{
    tensor->t = t;
    if (zx_py_leave(self, rc)) return (PyObject *)tensor;
    Py_DECREF(tensor);
    return NULL;
}

/* The engine's own copy of a name: plans refer to it. */
static const char *kept_name(zx_py_partitioner *self, PyObject *name)
{
    PyObject *kept = PyDict_SetDefault(self->names, name, name);
    return kept ? PyUnicode_AsUTF8(kept) : NULL;
}

static PyObject *engine_input(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"name", "array", "dtype", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    PyObject *name, *array;
    const char *dtype = "", *text;
    zx_py_array a;
    zx_tensor *t = NULL;
    zx_status rc = ZX_ERR_ARG;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "UO|$s:input", names, &name, &array, &dtype) || !enter(object, "input"))
        return NULL;
    zx_py_tensor *tensor = zx_py_tensor_new(self);
    bool values = !zx_engine_dry(self->engine);
    if (tensor && (text = kept_name(self, name)) != NULL &&
        zx_py_convert(self->base.st, array, text, dtype, self->dtype, values, &a)) {
        if (!values || PyList_Append(self->inputs, a.object) == 0) {
            Py_BEGIN_ALLOW_THREADS rc = zx_engine_input(self->engine, text, a.dtype, a.ndim, a.shape, a.data, &t);
            Py_END_ALLOW_THREADS
        }
        Py_DECREF(a.object);
    }
    if (tensor) return tensor_after(object, tensor, t, rc);
    (void)zx_py_leave(self, rc);
    return NULL;
}

static PyObject *engine_param(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"index", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    long long index;
    zx_tensor *t = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "L:param", names, &index) || !enter(object, "param")) return NULL;
    zx_py_tensor *tensor = zx_py_tensor_new(self);
    if (!tensor) {
        (void)zx_py_leave(self, ZX_ERR_NOMEM);
        return NULL;
    }
    zx_status rc = zx_engine_param(self->engine, index, &t);
    return tensor_after(object, tensor, t, rc);
}

static bool read_inputs(zx_py_state *st, PyObject *tuple, zx_py_tensor **in)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (n > ZX_OP_MAX_IN) {
        ZX_PY_FAIL(st, ZX_ERR_ARG, "%zd inputs, at most %d are possible", n, (int)ZX_OP_MAX_IN);
        return false;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PyTuple_GET_ITEM(tuple, i);
        in[i] = item == Py_None ? NULL : (zx_py_tensor *)item;
        if (!in[i] || Py_TYPE(item) == st->tensor_type) continue;
        PyErr_Format(PyExc_TypeError,
                     "input %zd must be a Tensor or None, not %.80s: a forward gets NumPy arrays as Tensors", i,
                     Py_TYPE(item)->tp_name);
        return false;
    }
    return true;
}

static PyObject *engine_apply(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"op", "inputs", "ints", "floats", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    zx_py_state *st = self->base.st;
    const char *op;
    PyObject *inputs, *ints = NULL, *floats = NULL, *made = NULL;
    zx_py_tensor *in[ZX_OP_MAX_IN] = {0};
    zx_attrs attrs = {0};
    int n;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "sO|OO:apply", names, &op, &inputs, &ints, &floats)) return NULL;
    PyObject *tuple = PySequence_Tuple(inputs); /* holds the inputs, whatever becomes of the caller's list */
    if (!tuple) return NULL;
    if (read_inputs(st, tuple, in) && (!ints || zx_py_ints(st, ints, "ints", ZX_OP_MAX_ATTR, attrs.i, &n)) &&
        (!floats || zx_py_floats(st, floats, "floats", ZX_OP_MAX_ATTR, attrs.f, &n)))
        made = zx_py_apply(self, op, in, (int)PyTuple_GET_SIZE(tuple), &attrs);
    Py_DECREF(tuple);
    return made;
}

static PyObject *engine_backward(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"loss", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    PyObject *loss;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "O!:backward", names, self->base.st->tensor_type, &loss)) return NULL;
    zx_py_tensor *tensor = (zx_py_tensor *)loss;
    if (tensor->engine != self) return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "the loss belongs to another engine");
    if (!enter(object, "backward")) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_engine_backward(self->engine, tensor->t);
    Py_END_ALLOW_THREADS return none_after(object, rc);
}

/* ---- looking in ---- */

static zx_status copy_grad(zx_py_partitioner *self, int64_t param, void *out, size_t bytes)
{
    const zx_layout *l = self->layout;
    int32_t unit = l->ranges[l->places[param].range].unit;
    const char *state = zx_store_grad_state_name(self->store, unit);
    if (!l->params[param].trainable)
        ZX_FAIL(ZX_ERR_STATE, "parameter '%s' is frozen: it has no gradient", l->params[param].name);
    if (strcmp(state, "FULL") != 0 && strcmp(state, "HELD") != 0)
        ZX_FAIL(ZX_ERR_STATE,
                "the full gradient of parameter '%s' is not held (its unit's is %s): read it between backward and step "
                "with reduce_at=\"step\"",
                l->params[param].name, state);
    if (bytes) ZX_TRY(zx_stream_copy(self->stream, out, zx_store_grad_addr(self->store, param), bytes));
    ZX_TRY(zx_stream_sync(self->stream));
    return ZX_OK;
}

static PyObject *engine_read_grad(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"param", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    long long param;
    zx_status rc = ZX_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "L:read_grad", names, &param)) return NULL;
    if (param < 0 || param >= self->layout->n_params)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "there is no parameter %lld: the layout has %lld", param,
                          (long long)self->layout->n_params);
    if (!zx_py_partitioner_enter(self, "read_grad", true)) return NULL;
    const zx_param *p = &self->layout->params[param];
    zx_dtype dtype = zx_dtype_sum(p->dtype);
    PyObject *array = zx_py_array_new(dtype, p->ndim, p->shape);
    void *data = array ? zx_py_array_data(array) : NULL;
    if (array) {
        Py_BEGIN_ALLOW_THREADS rc =
            copy_grad(self, param, data, (size_t)self->layout->places[param].n * zx_dtype_bytes(dtype));
        Py_END_ALLOW_THREADS
    }
    if (!zx_py_leave(self, rc)) Py_CLEAR(array);
    return array;
}

static PyObject *engine_memory(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (!enter(object, "memory")) return NULL;
    zx_engine_memory m = zx_engine_memory_get(self->engine);
    if (!zx_py_leave(self, ZX_OK)) return NULL;
    PyObject *dict = PyDict_New();
    if (dict && zx_py_put(dict, "store", zx_py_store_bytes_dict(&m.store)) &&
        zx_py_put_int(dict, "activations", (int64_t)m.activations) && zx_py_put_int(dict, "spare", (int64_t)m.spare) &&
        zx_py_put_int(dict, "scratch", (int64_t)m.scratch) && zx_py_put_int(dict, "comm", (int64_t)m.comm) &&
        zx_py_put_int(dict, "total", (int64_t)m.total) && zx_py_put_int(dict, "limit", (int64_t)m.limit) &&
        zx_py_put_int(dict, "n_deviations", m.n_deviations) && zx_py_put(dict, "flops", PyFloat_FromDouble(m.flops)))
        return dict;
    Py_XDECREF(dict);
    return NULL;
}

static PyObject *get_dtype(PyObject *object, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(zx_dtype_name(((zx_py_partitioner *)object)->dtype));
}

static PyObject *get_generation(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromLongLong(zx_engine_generation(((zx_py_partitioner *)object)->engine));
}

static PyObject *get_in_pass(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(zx_engine_in_pass(((zx_py_partitioner *)object)->engine));
}

static PyObject *get_dry(PyObject *object, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(zx_engine_dry(((zx_py_partitioner *)object)->engine));
}

static PyGetSetDef getset[] = {
    {"dtype", get_dtype, NULL, "Of activations.", NULL},
    {"generation", get_generation, NULL, "Number of the pass; Tensors of an earlier one are stale.", NULL},
    {"in_pass", get_in_pass, NULL, "Between begin and end.", NULL},
    {"dry", get_dry, NULL, "In a dry pass, which only plans.", NULL},
    {0},
};

#define KW(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"planned", KW(engine_planned),
     "planned($self, /, signature)\n--\n\nWhether a pass of this signature was run dry."},
    {"begin", KW(engine_begin),
     "begin($self, /, signature, *, train, dry)\n--\n\n"
     "Begins a pass. signature: any number that stands for mode and shapes; its first pass must be dry."},
    {"end", engine_end, METH_NOARGS,
     "end($self, /)\n--\n\nEnds the pass; after a dry one: plans, checks that it fits, makes room."},
    {"abandon", engine_abandon, METH_NOARGS, "abandon($self, /)\n--\n\nDrops the pass: all is as before begin."},
    {"input", KW(engine_input),
     "input($self, /, name, array, *, dtype=\"\")\n--\n\n"
     "An input of the pass. int32 stays, other integers are checked and converted to it; float arrays are converted "
     "to dtype (default: the engine's). The array is kept until the next pass."},
    {"param", KW(engine_param), "param($self, /, index)\n--\n\nA parameter; usable while its unit is live."},
    {"enter", KW(engine_enter),
     "enter($self, /, unit, recompute)\n--\n\n"
     "A block begins: it is gathered. recompute: its activations are made again in backward, not kept."},
    {"exit", KW(engine_exit), "exit($self, /, unit)\n--\n\nThe block ends."},
    {"apply", KW(engine_apply),
     "apply($self, /, op, inputs, ints=(), floats=())\n--\n\n"
     "Applies a built-in operation (see ops()) to Tensors; None for an optional input."},
    {"backward", KW(engine_backward),
     "backward($self, /, loss)\n--\n\n"
     "loss: a counted loss, or a scalar (which counts 1 for each rank and micro-step). Adds the gradients, reduces "
     "every unit after its last use, and drops the tape."},
    {"read_grad", KW(engine_read_grad),
     "read_grad($self, /, param)\n--\n\n"
     "The full gradient of a parameter, where one is held (reduce_at step, or before reduce), in the sum type."},
    {"memory", engine_memory, METH_NOARGS,
     "memory($self, /)\n--\n\n"
     "Bytes of this rank: store (by kind), activations, spare, scratch, comm, total, limit; n_deviations; flops."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Engine(records, units, *, comm, world=0, total_bytes=0, dtype=\"float32\", memory_limit=0, spare_bytes=0, "
     "shard_state=True, shard_grads=True, shard_params=True, reduce_at=\"micro\", slots=2, grad_slots=2, "
     "prefetch=True, reduce_dtype=\"float32\", optimizer=\"adamw\", moments=-1, poison=False)\n--\n\n"
     "A model's tape, activation arena and sharded state on one rank; `zerox.Engine` drives it.\n\n"
     "comm None: planning only, for `world` ranks, on a null device that pretends to have total_bytes."},
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, zx_py_dealloc},
    {Py_tp_traverse, zx_py_partitioner_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {0},
};

PyType_Spec zx_py_engine_spec = {
    .name = "zerox._C.Engine",
    .basicsize = sizeof(zx_py_partitioner),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
