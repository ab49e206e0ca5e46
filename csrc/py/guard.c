/* guard.c - who may be inside a call, what a signal left behind, and when dead objects end; see py.h. */
#include "py/py.h"

#include <string.h>
#include <unistd.h>

zx_py_state *zx_py_state_of(PyTypeObject *type)
{
    for (PyTypeObject *t = type; t; t = t->tp_base) {
        if (!PyType_HasFeature(t, Py_TPFLAGS_HEAPTYPE)) continue;
        PyObject *module = PyType_GetModule(t);
        if (module && PyModule_GetDef(module) == &zx_py_module) return PyModule_GetState(module);
        PyErr_Clear(); /* a class made in Python has no module of ours; its base has */
    }
    PyErr_Format(PyExc_TypeError, "%s is no type of zerox._C", type->tp_name);
    return NULL;
}

const char *zx_py_type_name(const void *self)
{
    const char *name = Py_TYPE(self)->tp_name, *dot = strrchr(name, '.');
    return dot ? dot + 1 : name;
}

void *zx_py_new(PyTypeObject *type, void (*end)(void *self))
{
    zx_py_state *st = zx_py_state_of(type);
    zx_py_object *o = st ? (zx_py_object *)type->tp_alloc(type, 0) : NULL;
    if (!o) return NULL;
    o->st = st;
    o->end = end;
    return o;
}

/* ---- exceptions that are kept aside ---- */

static PyObject *take_raised(void)
{
#if PY_VERSION_HEX >= 0x030c0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (!type) return NULL;
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback) PyException_SetTraceback(value, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return value;
#endif
}

static void put_raised(PyObject *exception) /* stolen; NULL = none */
{
#if PY_VERSION_HEX >= 0x030c0000
    PyErr_SetRaisedException(exception);
#else
    if (!exception) {
        PyErr_Clear();
        return;
    }
    PyObject *type = (PyObject *)Py_TYPE(exception);
    Py_INCREF(type);
    PyErr_Restore(type, exception, PyException_GetTraceback(exception));
#endif
}

bool zx_py_interrupt_hook(void *ctx)
{
    zx_py_guard *g = ctx;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (!g->interrupt && PyErr_CheckSignals() != 0) g->interrupt = take_raised();
    bool stop = g->interrupt != NULL;
    PyGILState_Release(gil);
    return stop;
}

/* ---- objects that died while their guard was held ---- */

static void end_now(zx_py_object *o)
{
    PyTypeObject *type = Py_TYPE(o);
    PyObject *raised = take_raised();
    o->end(o);
    put_raised(raised);
    type->tp_free((PyObject *)o);
    Py_DECREF(type);
}

void zx_py_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    zx_py_object *o = (zx_py_object *)self;
    if (o->guard && o->guard->holder) {
        o->next = o->guard->deferred;
        o->guard->deferred = o;
        return;
    }
    end_now(o);
}

static void end_deferred(zx_py_guard *g)
{
    while (g->deferred && !g->holder) {
        zx_py_object *oldest = NULL;
        while (g->deferred) { /* they end in the order in which they died */
            zx_py_object *o = g->deferred;
            g->deferred = o->next;
            o->next = oldest;
            oldest = o;
        }
        while (oldest) {
            zx_py_object *o = oldest;
            oldest = o->next;
            end_now(o);
        }
    }
}

/* ---- calls ---- */

bool zx_py_enter(void *self, const char *method)
{
    zx_py_object *o = self;
    zx_py_guard *g = o->guard;
    const char *type = zx_py_type_name(self);
    if (g->pid != getpid()) {
        ZX_PY_FAIL(o->st, ZX_ERR_STATE,
                   "%s.%s in process %d, a fork of process %d that opened it: a child must open its own; start "
                   "processes with the 'spawn' method",
                   type, method, (int)getpid(), (int)g->pid);
        return false;
    }
    end_deferred(g);
    if (g->holder) {
        ZX_PY_FAIL(o->st, ZX_ERR_STATE,
                   "%s is in use by another thread, inside %s.%s: one thread at a time may use a Comm and what was "
                   "opened on it; open a Comm for each thread",
                   type, g->holder_type, g->holder);
        return false;
    }
    g->holder_type = type;
    g->holder = method;
    zx_error_clear();
    return true;
}

bool zx_py_leave(void *self, zx_status status)
{
    zx_py_object *o = self;
    zx_py_guard *g = o->guard;
    zx_error saved;
    if (status != ZX_OK) saved = *zx_error_last(); /* the deferred may run calls that record */
    PyObject *interrupt = g->interrupt;
    g->interrupt = NULL;
    g->holder = NULL;
    end_deferred(g);
    if (interrupt) { /* also where the call was done before it noticed: no signal is lost */
        put_raised(interrupt);
        return false;
    }
    if (status == ZX_OK) return true;
    zx_py_raise(o->st, zx_error_raise(&saved));
    return false;
}

bool zx_py_enter_end(void *self)
{
    zx_py_guard *g = ((zx_py_object *)self)->guard;
    if (g->pid != getpid()) return false;
    g->holder_type = zx_py_type_name(self);
    g->holder = "close";
    return true;
}

void zx_py_leave_end(void *self)
{
    zx_py_guard *g = ((zx_py_object *)self)->guard;
    PyObject *interrupt = g->interrupt;
    g->interrupt = NULL;
    g->holder = NULL;
    end_deferred(g);
    if (!interrupt) return;
    if (PyErr_GivenExceptionMatches(interrupt, PyExc_KeyboardInterrupt)) {
        PyErr_SetInterrupt(); /* raised again as soon as the interpreter looks */
        Py_DECREF(interrupt);
    } else {
        put_raised(interrupt);
        PyErr_WriteUnraisable((PyObject *)Py_TYPE(self));
    }
}

PyObject *zx_py_exit(PyObject *args, PyObject *closed)
{
    if (closed || PyTuple_GET_SIZE(args) == 0 || PyTuple_GET_ITEM(args, 0) == Py_None) return closed;
    PyErr_Clear();
    Py_RETURN_NONE;
}

PyObject *zx_py_return_self(PyObject *self, PyObject *Py_UNUSED(none))
{
    return Py_NewRef(self);
}
