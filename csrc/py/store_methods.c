/* store_methods.c - the store's verbs, for Partitioner and Engine alike. */
#include "py/py.h"

/* ---- views of the store's memory ---- */

static void views_gone(PyObject *capsule)
{
    zx_py_partitioner *self = PyCapsule_GetContext(capsule);
    self->n_views--;
    Py_DECREF((PyObject *)self);
}

/* What the arrays of one acquire or grad hold; it holds the store. */
static PyObject *views_base(zx_py_partitioner *self)
{
    PyObject *capsule = PyCapsule_New(self->layout, "zerox.memory", NULL);
    if (!capsule) return NULL;
    if (PyCapsule_SetContext(capsule, self) < 0 || PyCapsule_SetDestructor(capsule, views_gone) < 0) {
        Py_DECREF(capsule);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    self->n_views++;
    return capsule;
}

static PyObject *unit_views(zx_py_partitioner *self, int unit, bool grads)
{
    const zx_layout *l = self->layout;
    PyObject *dict = PyDict_New(), *base = dict ? views_base(self) : NULL;
    bool ok = base != NULL;
    for (int64_t i = 0; ok && i < l->n_params; i++) {
        const zx_param *p = &l->params[i];
        if (l->ranges[l->places[i].range].unit != unit || (grads && !p->trainable)) continue;
        void *data = grads ? zx_store_grad_addr(self->store, i) : zx_store_param_addr(self->store, i);
        zx_dtype dtype = grads ? zx_dtype_sum(p->dtype) : p->dtype;
        ok = zx_py_put(dict, p->name, zx_py_array_over(dtype, p->ndim, p->shape, data, Py_NewRef(base), grads));
    }
    Py_XDECREF(base);
    if (!ok) Py_CLEAR(dict);
    return dict;
}

/* Arrays are the host's business: what fills them has to be done. */
static zx_status open_views(zx_py_partitioner *self, int unit, bool grads)
{
    const zx_device_caps *caps = zx_device_caps_get(self->dev);
    void *base;
    if (!caps->host_addressable)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "memory of the device %s cannot be a NumPy array", caps->name);
    if (grads)
        ZX_TRY(zx_store_grad(self->store, unit, self->stream, &base));
    else
        ZX_TRY(zx_store_acquire(self->store, unit, self->stream, &base));
    ZX_TRY(zx_stream_sync(self->stream));
    ZX_TRY(zx_comm_check(self->comm->comm));
    return ZX_OK;
}

static PyObject *views(PyObject *object, PyObject *args, PyObject *kw, bool grads, const char *format,
                       const char *method)
{
    static char *names[] = {"unit", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int unit;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, format, names, &unit) || !zx_py_partitioner_enter(self, method, true))
        return NULL;
    Py_BEGIN_ALLOW_THREADS rc = open_views(self, unit, grads);
    Py_END_ALLOW_THREADS PyObject *dict = rc == ZX_OK ? unit_views(self, unit, grads) : NULL;
    if (zx_py_leave(self, rc)) return dict;
    Py_XDECREF(dict);
    return NULL;
}

PyObject *zx_py_store_acquire(PyObject *self, PyObject *args, PyObject *kw)
{
    return views(self, args, kw, false, "i:acquire", "acquire");
}

PyObject *zx_py_store_grad(PyObject *self, PyObject *args, PyObject *kw)
{
    return views(self, args, kw, true, "i:grad", "grad");
}

/* ---- verbs without a result ---- */

typedef zx_status (*unit_verb)(zx_py_partitioner *self, int unit);

static zx_status do_release(zx_py_partitioner *self, int unit)
{
    ZX_TRY(zx_store_release(self->store, unit, self->stream));
    return ZX_OK;
}

static zx_status do_prefetch(zx_py_partitioner *self, int unit)
{
    ZX_TRY(zx_store_prefetch(self->store, unit));
    return ZX_OK;
}

static zx_status do_reduce(zx_py_partitioner *self, int unit)
{
    ZX_TRY(zx_store_reduce(self->store, unit, self->stream));
    return ZX_OK;
}

static zx_status do_zero_grad(zx_py_partitioner *self, int Py_UNUSED(unit))
{
    ZX_TRY(zx_store_zero_grad(self->store, self->stream));
    return ZX_OK;
}

static zx_status do_begin_pass(zx_py_partitioner *self, int Py_UNUSED(unit))
{
    ZX_TRY(zx_store_begin_pass(self->store));
    return ZX_OK;
}

static zx_status do_abandon_pass(zx_py_partitioner *self, int Py_UNUSED(unit))
{
    zx_store_abandon_pass(self->store, self->stream);
    return ZX_OK;
}

static PyObject *run_verb(zx_py_partitioner *self, const char *method, unit_verb verb, int unit)
{
    zx_status rc;
    if (!zx_py_partitioner_enter(self, method, true)) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = verb(self, unit);
    Py_END_ALLOW_THREADS if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *parse_verb(PyObject *self, PyObject *args, PyObject *kw, const char *format, const char *method,
                            unit_verb verb)
{
    static char *names[] = {"unit", NULL};
    int unit;
    if (!PyArg_ParseTupleAndKeywords(args, kw, format, names, &unit)) return NULL;
    return run_verb((zx_py_partitioner *)self, method, verb, unit);
}

PyObject *zx_py_store_release(PyObject *self, PyObject *args, PyObject *kw)
{
    return parse_verb(self, args, kw, "i:release", "release", do_release);
}

PyObject *zx_py_store_prefetch(PyObject *self, PyObject *args, PyObject *kw)
{
    return parse_verb(self, args, kw, "i:prefetch", "prefetch", do_prefetch);
}

PyObject *zx_py_store_reduce(PyObject *self, PyObject *args, PyObject *kw)
{
    return parse_verb(self, args, kw, "i:reduce", "reduce", do_reduce);
}

PyObject *zx_py_store_zero_grad(PyObject *self, PyObject *Py_UNUSED(none))
{
    return run_verb((zx_py_partitioner *)self, "zero_grad", do_zero_grad, 0);
}

PyObject *zx_py_store_begin_pass(PyObject *self, PyObject *Py_UNUSED(none))
{
    return run_verb((zx_py_partitioner *)self, "begin_pass", do_begin_pass, 0);
}

PyObject *zx_py_store_abandon_pass(PyObject *self, PyObject *Py_UNUSED(none))
{
    return run_verb((zx_py_partitioner *)self, "abandon_pass", do_abandon_pass, 0);
}

/* ---- count and step ---- */

static zx_status add_count(zx_py_partitioner *self, const double *totals)
{
    if (!self->totals) ZX_TRY(zx_device_alloc(self->dev, 2 * sizeof *totals, (void **)&self->totals));
    ZX_TRY(zx_stream_copy(self->stream, self->totals, totals, 2 * sizeof *totals));
    ZX_TRY(zx_store_count(self->store, self->stream, self->totals, ZX_F64));
    ZX_TRY(zx_stream_sync(self->stream)); /* the next call writes the same two numbers */
    return ZX_OK;
}

PyObject *zx_py_store_count(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"loss_sum", "denominator", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    double totals[2];
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "dd:count", names, &totals[0], &totals[1]) ||
        !zx_py_partitioner_enter(self, "count", true))
        return NULL;
    Py_BEGIN_ALLOW_THREADS rc = add_count(self, totals);
    Py_END_ALLOW_THREADS if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

static zx_status run_step(zx_py_partitioner *self, const zx_step_options *options, zx_step_ctl *out)
{
    if (self->engine) {
        ZX_TRY(zx_engine_step(self->engine, options, out));
        return ZX_OK;
    }
    ZX_TRY(zx_store_step(self->store, self->stream, options));
    ZX_TRY(zx_store_step_result(self->store, self->stream, out));
    ZX_TRY(zx_comm_check(self->comm->comm));
    return ZX_OK;
}

PyObject *zx_py_store_step(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"hyper", "max_norm", "loss_scale", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    PyObject *sequence;
    zx_hyper *hyper;
    zx_step_options o = {.loss_scale = 1.0};
    zx_step_ctl ctl = {0};
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "O|$dd:step", names, &sequence, &o.max_norm, &o.loss_scale) ||
        !zx_py_hypers(self->base.st, sequence, self->layout->n_groups, &hyper))
        return NULL;
    o.hyper = hyper;
    o.n_groups = self->layout->n_groups;
    bool ok = zx_py_partitioner_enter(self, "step", true);
    if (ok) {
        Py_BEGIN_ALLOW_THREADS rc = run_step(self, &o, &ctl);
        Py_END_ALLOW_THREADS ok = zx_py_leave(self, rc);
    }
    PyMem_Free(hyper);
    if (!ok) return NULL;
    return Py_BuildValue("{s:d, s:d, s:d, s:d, s:L}", "norm", ctl.norm, "factor", ctl.factor, "denominator",
                         ctl.denominator, "loss_sum", ctl.loss_sum, "skip", (long long)ctl.skip);
}

PyObject *zx_py_store_unit_state(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"unit", NULL};
    zx_py_partitioner *self = (zx_py_partitioner *)object;
    int unit;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "i:unit_state", names, &unit)) return NULL;
    if (unit < 0 || unit >= self->layout->n_units)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "there is no unit %d: the layout has %d", unit,
                          self->layout->n_units);
    if (!zx_py_partitioner_enter(self, "unit_state", true)) return NULL;
    const char *name = zx_store_param_state_name(self->store, unit);
    return zx_py_leave(self, ZX_OK) ? PyUnicode_FromString(name) : NULL;
}
