/* type_partitioner.c - Partitioner: opening and closing a store without a model; the base of Engine. */
#include "py/py.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

/* ---- shared with Engine ---- */

bool zx_py_partitioner_join(zx_py_partitioner *self, PyObject *comm)
{
    zx_py_state *st = self->base.st;
    if (Py_TYPE(comm) != st->comm_type) {
        PyErr_Format(PyExc_TypeError, "comm must be a Comm, not %.80s", Py_TYPE(comm)->tp_name);
        return false;
    }
    zx_py_comm *c = (zx_py_comm *)comm;
    if (c->closed) {
        ZX_PY_FAIL(st, ZX_ERR_STATE, "%s on a Comm that is closed", zx_py_type_name(self));
        return false;
    }
    self->comm = (zx_py_comm *)Py_NewRef(comm);
    self->base.guard = c->base.guard;
    self->dev = c->dev;
    self->joined = true;
    c->n_children++;
    return true;
}

static bool choose(zx_py_state *st, const char *what, const char *value, const char *first, const char *second,
                   int *out)
{
    *out = strcmp(value, second) == 0;
    if (*out || strcmp(value, first) == 0) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG, "%s '%.40s': use %s or %s", what, value, first, second);
    return false;
}

static bool read_options(zx_py_partitioner *self, const zx_py_store_options *o, zx_optimizer *optimizer)
{
    zx_py_state *st = self->base.st;
    int at, sgd;
    zx_dtype wire;
    if (!choose(st, "reduce_at", o->reduce_at, "micro", "step", &at) ||
        !choose(st, "optimizer", o->optimizer, "adamw", "sgd", &sgd) || !zx_py_dtype(st, o->reduce_dtype, &wire))
        return false;
    *optimizer = sgd ? ZX_OPTIMIZER_SGD : ZX_OPTIMIZER_ADAMW;
    self->policy = (zx_policy){.shard_state = o->shard_state,
                               .shard_grads = o->shard_grads,
                               .shard_params = o->shard_params,
                               .reduce_at = at ? ZX_REDUCE_STEP : ZX_REDUCE_MICRO,
                               .n_slots = o->slots,
                               .n_grad_slots = o->grad_slots,
                               .n_moments = o->moments == -1 ? (sgd ? 1 : 2) : o->moments,
                               .prefetch = o->prefetch,
                               .reduce_dtype = wire};
    zx_status rc = zx_policy_check(&self->policy);
    if (rc != ZX_OK) zx_py_raise(st, rc);
    return rc == ZX_OK;
}

bool zx_py_partitioner_lay_out(zx_py_partitioner *self, PyObject *records, PyObject *units, int world,
                               const zx_py_store_options *options, zx_optimizer *optimizer)
{
    zx_py_state *st = self->base.st;
    PyObject *keep_records = NULL, *keep_units = NULL;
    zx_param *params = NULL;
    const char **names = NULL;
    int64_t n_params;
    int32_t n_units;
    bool ok = read_options(self, options, optimizer) && zx_py_records(st, records, &params, &n_params, &keep_records) &&
              zx_py_names(st, units, &names, &n_units, &keep_units);
    if (ok) {
        size_t granule = zx_device_caps_get(self->dev)->granule;
        zx_status rc = zx_layout_open(params, n_params, names, n_units, world, granule, &self->layout);
        if (rc != ZX_OK) zx_py_raise(st, rc);
        ok = rc == ZX_OK;
    }
    PyMem_Free(params);
    PyMem_Free((void *)names);
    Py_XDECREF(keep_records);
    Py_XDECREF(keep_units);
    return ok;
}

bool zx_py_partitioner_check_open(zx_py_partitioner *self, const char *method)
{
    if (!self->closed) return true;
    const char *type = zx_py_type_name(self);
    ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "%s.%s: this %s is closed", type, method, type);
    return false;
}

bool zx_py_partitioner_enter(zx_py_partitioner *self, const char *method, bool needs_store)
{
    if (!zx_py_partitioner_check_open(self, method)) return false;
    if (needs_store && !self->store) {
        ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "%s.%s: this Engine only plans; one with a Comm can do it",
                   zx_py_type_name(self), method);
        return false;
    }
    return zx_py_enter(self, method);
}

/* Without the GIL. */
static void close_all(zx_py_partitioner *self)
{
    if (self->totals) zx_device_free(self->dev, self->totals);
    self->totals = NULL;
    if (self->engine) {
        zx_engine_shutdown(self->engine);
    } else {
        zx_store_close(self->store);
        zx_stream_close(self->stream);
    }
    self->store = NULL;
    self->stream = NULL;
    zx_device_close(self->own_dev);
    self->own_dev = NULL;
    self->dev = NULL;
}

static void let_go(zx_py_partitioner *self)
{
    if (self->joined) self->comm->n_children--;
    self->joined = false;
    Py_CLEAR(self->inputs);
    Py_CLEAR(self->names);
}

void zx_py_partitioner_end(void *object)
{
    zx_py_partitioner *self = object;
    zx_py_guard *guard = self->base.guard;
    if (guard && !self->closed && zx_py_enter_end(self)) {
        Py_BEGIN_ALLOW_THREADS close_all(self);
        Py_END_ALLOW_THREADS zx_py_leave_end(self);
    }
    if (guard && guard->pid == getpid()) {
        zx_engine_close(self->engine);
        zx_layout_close(self->layout);
    }
    let_go(self);
    Py_XDECREF(self->own.interrupt);
    Py_XDECREF((PyObject *)self->comm);
}

int zx_py_partitioner_traverse(PyObject *object, visitproc visit, void *arg)
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->comm);
    Py_VISIT(self->inputs);
    Py_VISIT(self->names);
    return 0;
}

static PyObject *partitioner_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (self->closed) Py_RETURN_NONE;
    if (self->n_views > 0) {
        PyErr_Format(PyExc_BufferError,
                     "%s.close: arrays of %lld calls of acquire() or grad() still exist, over memory that would go: "
                     "delete them first",
                     zx_py_type_name(self), (long long)self->n_views);
        return NULL;
    }
    if (!zx_py_enter(self, "close")) return NULL;
    self->closed = true;
    Py_BEGIN_ALLOW_THREADS close_all(self);
    Py_END_ALLOW_THREADS bool ok = zx_py_leave(self, ZX_OK);
    let_go(self);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

static PyObject *partitioner_exit(PyObject *self, PyObject *args)
{
    return zx_py_exit(args, partitioner_close(self, NULL));
}

/* ---- Partitioner alone ---- */

static zx_status open_store(zx_py_partitioner *self, zx_optimizer optimizer, bool poison)
{
    zx_store_config config = {.policy = self->policy, .optimizer = optimizer, .poison = poison};
    ZX_TRY(zx_stream_open(self->dev, "partitioner", &self->stream));
    ZX_TRY(zx_store_open(self->layout, &config, self->dev, self->comm->comm, &self->store));
    return ZX_OK;
}

static PyObject *partitioner_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    static char *names[] = {"records",      "units",     "comm",    "shard_state", "shard_grads",
                            "shard_params", "reduce_at", "slots",   "grad_slots",  "prefetch",
                            "reduce_dtype", "optimizer", "moments", "poison",      NULL};
    zx_py_store_options o = ZX_PY_STORE_DEFAULTS;
    PyObject *records, *units, *comm = NULL;
    zx_optimizer optimizer;
    zx_status rc = ZX_ERR_ARG;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|$Opppsiipssip:Partitioner", names, &records, &units, &comm,
                                     &o.shard_state, &o.shard_grads, &o.shard_params, &o.reduce_at, &o.slots,
                                     &o.grad_slots, &o.prefetch, &o.reduce_dtype, &o.optimizer, &o.moments, &o.poison))
        return NULL;
    if (!comm) {
        PyErr_SetString(PyExc_TypeError, "Partitioner() needs the keyword argument 'comm'");
        return NULL;
    }
    zx_py_partitioner *self = zx_py_new(type, zx_py_partitioner_end);
    if (!self) return NULL;
    if (!zx_py_partitioner_join(self, comm) || !zx_py_enter(self, "open")) goto fail;
    if (zx_py_partitioner_lay_out(self, records, units, self->comm->world, &o, &optimizer)) {
        Py_BEGIN_ALLOW_THREADS rc = open_store(self, optimizer, o.poison);
        Py_END_ALLOW_THREADS
    }
    if (zx_py_leave(self, rc)) return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

static PyObject *get_comm(PyObject *object, void *Py_UNUSED(closure))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    return Py_NewRef(self->comm ? (PyObject *)self->comm : Py_None);
}

static PyObject *get_version(PyObject *object, void *Py_UNUSED(closure))
{
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    if (!zx_py_partitioner_enter(self, "version", true)) return NULL;
    int64_t version = zx_store_version(self->store);
    return zx_py_leave(self, ZX_OK) ? PyLong_FromLongLong(version) : NULL;
}

static PyGetSetDef getset[] = {
    {"comm", get_comm, NULL, "The Comm it was opened on; None for an Engine that only plans.", NULL},
    {"version", get_version, NULL, "Of the parameters: +1 for each step and load.", NULL},
    {0},
};

static PyMemberDef members[] = {
    {"closed", T_BOOL, offsetof(zx_py_partitioner, closed), READONLY, "Whether close() was called."},
    {0},
};

#define KW(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"acquire", KW(zx_py_store_acquire),
     "acquire($self, /, unit)\n--\n\n"
     "Read-only views of the unit's full parameters by name (bfloat16 as uint16); valid until release."},
    {"release", KW(zx_py_store_release), "release($self, /, unit)\n--\n\nEnds one acquire of the unit."},
    {"prefetch", KW(zx_py_store_prefetch), "prefetch($self, /, unit)\n--\n\nBegins to gather the unit."},
    {"grad", KW(zx_py_store_grad),
     "grad($self, /, unit)\n--\n\n"
     "Views of the unit's full gradients by name, float32 (float64 for float64), to be added to; valid until reduce."},
    {"reduce", KW(zx_py_store_reduce),
     "reduce($self, /, unit)\n--\n\nThe unit's gradients of this micro-step are complete: summed over ranks."},
    {"count", KW(zx_py_store_count),
     "count($self, /, loss_sum, denominator)\n--\n\n"
     "Adds this micro-step's loss sum and number of terms; step divides by the sum of the denominators of all ranks."},
    {"step", KW(zx_py_store_step),
     "step($self, /, hyper, *, max_norm=0.0, loss_scale=1.0)\n--\n\n"
     "Collective: clips by the global norm (max_norm 0: not), updates, raises the version. hyper has one (lr, beta1, "
     "beta2, eps, weight_decay, momentum, bias_correction1, bias_correction2) for each option group. Returns norm, "
     "factor, denominator, loss_sum, skip (1: gradients were not finite, nothing was changed)."},
    {"zero_grad", zx_py_store_zero_grad, METH_NOARGS,
     "zero_grad($self, /)\n--\n\nDrops gradients and totals gathered since the last step."},
    {"begin_pass", zx_py_store_begin_pass, METH_NOARGS,
     "begin_pass($self, /)\n--\n\nA new pass over the model begins."},
    {"abandon_pass", zx_py_store_abandon_pass, METH_NOARGS,
     "abandon_pass($self, /)\n--\n\nEverything acquired is released and this pass's gradients are dropped."},
    {"layout", zx_py_store_layout, METH_NOARGS,
     "layout($self, /)\n--\n\n"
     "world, n_elems, n_padded, n_trainable_padded, params, ranges, units: where every parameter lies."},
    {"bytes", zx_py_store_bytes, METH_NOARGS,
     "bytes($self, /)\n--\n\nWhat the formulas say this rank holds, by kind; `total` is the sum."},
    {"bytes_held", zx_py_store_bytes_held, METH_NOARGS, "bytes_held($self, /)\n--\n\nWhat was allocated, likewise."},
    {"stats", KW(zx_py_store_stats),
     "stats($self, /, reset=False)\n--\n\nGathers, hits, reductions, steps, elements sent, most units live at once."},
    {"unit_state", KW(zx_py_store_unit_state),
     "unit_state($self, /, unit)\n--\n\nSHARDED, GATHERING, LIVE or RESIDENT."},
    {"has_slice", KW(zx_py_store_has_slice),
     "has_slice($self, /, range, kind)\n--\n\n"
     "The dtype in which this store holds such values for a range, or \"\". kind: param, master, moment1, moment2."},
    {"read_slice", KW(zx_py_store_read_slice),
     "read_slice($self, /, range, kind, begin, n)\n--\n\n"
     "Elements [begin, begin + n) of a range, which this rank holds; bfloat16 as uint16."},
    {"load_begin", zx_py_store_load_begin, METH_NOARGS, "load_begin($self, /)\n--\n\nValues may be written from here."},
    {"write_slice", KW(zx_py_store_write_slice),
     "write_slice($self, /, range, kind, begin, values)\n--\n\n"
     "Writes elements from `begin` of a range, in has_slice's dtype. param sets the master too, and master the param."},
    {"load_end", zx_py_store_load_end, METH_NOARGS,
     "load_end($self, /)\n--\n\nCollective: spreads the parameters that were written; raises the version."},
    {"gather", KW(zx_py_store_gather),
     "gather($self, /, param)\n--\n\nCollective: the whole parameter, in its dtype (uint16 for bfloat16)."},
    {"pieces", KW(zx_py_store_pieces),
     "pieces($self, /, rank, whole=False)\n--\n\n"
     "(param, range, range_begin, begin, n): runs of elements in a rank's slices; whole: in all of every range."},
    {"close", partitioner_close, METH_NOARGS,
     "close($self, /)\n--\n\nFrees everything. BufferError while views of its memory exist. May be called twice."},
    {"__enter__", zx_py_return_self, METH_NOARGS, "__enter__($self, /)\n--\n\nself"},
    {"__exit__", partitioner_exit, METH_VARARGS, "__exit__($self, /, *args)\n--\n\nclose()"},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Partitioner(records, units, *, comm, shard_state=True, shard_grads=True, shard_params=True, "
     "reduce_at=\"micro\", slots=2, grad_slots=2, prefetch=True, reduce_dtype=\"float32\", optimizer=\"adamw\", "
     "moments=-1, poison=False)\n--\n\n"
     "Arrays sharded over ranks, and the verbs of the store on them, without a model.\n\n"
     "records: (name, unit, dtype, shape, trainable, option group, tied_to or -1) of each parameter; units: their "
     "names.\nUnits are gathered together; unit 0 is the root. Values are zero until loaded."},
    {Py_tp_new, partitioner_new},
    {Py_tp_dealloc, zx_py_dealloc},
    {Py_tp_traverse, zx_py_partitioner_traverse},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_members, members},
    {0},
};

PyType_Spec zx_py_partitioner_spec = {
    .name = "zerox._C.Partitioner",
    .basicsize = sizeof(zx_py_partitioner),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_BASETYPE,
    .slots = slots,
};
