/* errors.c - the exception classes, and the one place where an error record becomes an exception. */
#include "py/py.h"

#include <stdio.h>
#include <string.h>

typedef struct class_spec {
    zx_status status;
    const char *name;
    const char *doc;
} class_spec;

static const class_spec CLASSES[] = {
    {ZX_ERR_ARG, "ArgumentError", "A value that is impossible; also a ValueError."},
    {ZX_ERR_STATE, "StateError", "The right call at the wrong moment, or on a closed object; also a RuntimeError."},
    {ZX_ERR_NOMEM, "OutOfMemoryError", "Host or device memory does not suffice; also a MemoryError."},
    {ZX_ERR_SYSTEM, "SystemCallError", "A system call failed; also an OSError, with its errno."},
    {ZX_ERR_TIMEOUT, "DeadlineError", "A wait passed its deadline; also a TimeoutError."},
    {ZX_ERR_PEER, "PeerError", "Another rank died, gave up or called something else; also a ConnectionError."},
    {ZX_ERR_UNSUPPORTED, "UnsupportedError", "This device, dtype or build lacks it; also a NotImplementedError."},
    {ZX_ERR_CUDA, "CudaError", "A call of CUDA failed; `native` is its code; also a RuntimeError."},
    {ZX_ERR_NCCL, "NcclError", "A call of NCCL failed; `native` is its code; also a RuntimeError."},
    {ZX_ERR_BUG, "BugError", "An invariant of zerox itself is broken; also an AssertionError."},
};
enum { N_CLASSES = sizeof CLASSES / sizeof CLASSES[0] };

static const char ZEROX_ERROR_DOC[] =
    "Base of all errors of the core.\n\n"
    "str() is one sentence with the values that matter and what to do, then the frames in brackets.\n"
    "status: name of the kind (\"ARG\", \"STATE\", ...). native: errno, CUDA or NCCL code, 0 if none.\n"
    "where: the place where it arose. trace: all frames, the origin first.";

static PyObject *builtin_base(zx_status status)
{
    switch (status) {
    case ZX_ERR_ARG:
        return PyExc_ValueError;
    case ZX_ERR_NOMEM:
        return PyExc_MemoryError;
    case ZX_ERR_SYSTEM:
        return PyExc_OSError;
    case ZX_ERR_TIMEOUT:
        return PyExc_TimeoutError;
    case ZX_ERR_PEER:
        return PyExc_ConnectionError;
    case ZX_ERR_UNSUPPORTED:
        return PyExc_NotImplementedError;
    case ZX_ERR_BUG:
        return PyExc_AssertionError;
    default:
        return PyExc_RuntimeError;
    }
}

static PyObject *make_class(const char *name, const char *doc, PyObject *bases, PyObject *dict)
{
    char full[64];
    snprintf(full, sizeof full, "zerox._C.%s", name);
    return PyErr_NewExceptionWithDoc(full, doc, bases, dict);
}

bool zx_py_errors_open(PyObject *module, zx_py_state *st)
{
    PyObject *defaults = Py_BuildValue("{s:s, s:i, s:s, s:()}", "status", "", "native", 0, "where", "", "trace");
    if (!defaults) return false;
    st->error = make_class("ZeroxError", ZEROX_ERROR_DOC, PyExc_Exception, defaults);
    Py_DECREF(defaults);
    if (!st->error || PyModule_AddObjectRef(module, "ZeroxError", st->error) < 0) return false;
    for (int i = 0; i < N_CLASSES; i++) {
        PyObject *bases = PyTuple_Pack(2, st->error, builtin_base(CLASSES[i].status));
        if (!bases) return false;
        PyObject *made = make_class(CLASSES[i].name, CLASSES[i].doc, bases, NULL);
        Py_DECREF(bases);
        st->class_of[CLASSES[i].status] = made;
        if (!made || PyModule_AddObjectRef(module, CLASSES[i].name, made) < 0) return false;
    }
    return true;
}

/* __FILE__ may be absolute; frames name files from the repository's root. */
static const char *from_root(const char *file)
{
    const char *at = strstr(file, "csrc/");
    return at ? at : file;
}

static void write_frame(char *out, size_t n, const zx_frame *f, bool with_expr)
{
    if (with_expr && f->expr)
        snprintf(out, n, "%.200s in %s (%s:%d)", f->expr, f->func, from_root(f->file), f->line);
    else
        snprintf(out, n, "%s (%s:%d)", f->func, from_root(f->file), f->line);
}

static PyObject *full_text(const zx_error *e)
{
    char text[ZX_ERROR_TEXT + ZX_ERROR_FRAMES * 160], frame[400];
    size_t used = (size_t)snprintf(text, sizeof text, "%s", e->text);
    for (int i = 0; i < e->n_frames && used < sizeof text; i++) {
        write_frame(frame, sizeof frame, &e->frames[i], i == 0);
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s", i ? " <- " : " [", frame);
    }
    if (e->n_frames && used < sizeof text) snprintf(text + used, sizeof text - used, "]");
    return PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
}

static PyObject *trace_list(const zx_error *e)
{
    char frame[400];
    PyObject *list = PyList_New(e->n_frames);
    for (int i = 0; list && i < e->n_frames; i++) {
        write_frame(frame, sizeof frame, &e->frames[i], true);
        PyObject *text = PyUnicode_DecodeUTF8(frame, (Py_ssize_t)strlen(frame), "replace");
        if (!text)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, text);
    }
    return list;
}

static bool set_attribute(PyObject *object, const char *name, PyObject *value)
{
    if (!value) return false;
    int rc = PyObject_SetAttrString(object, name, value);
    Py_DECREF(value);
    return rc == 0;
}

static PyObject *make_exception(zx_py_state *st, const zx_error *e)
{
    char where[400] = "";
    if (e->n_frames) write_frame(where, sizeof where, &e->frames[0], false);
    PyObject *cls = st->class_of[e->status] ? st->class_of[e->status] : st->error;
    PyObject *text = full_text(e);
    PyObject *made = text ? PyObject_CallOneArg(cls, text) : NULL;
    Py_XDECREF(text);
    if (!made) return NULL;
    bool ok = set_attribute(made, "status", PyUnicode_FromString(zx_status_name(e->status))) &&
              set_attribute(made, "native", PyLong_FromLong(e->native)) &&
              set_attribute(made, "where", PyUnicode_FromString(where)) && set_attribute(made, "trace", trace_list(e));
    if (ok && e->status == ZX_ERR_SYSTEM) ok = set_attribute(made, "errno", PyLong_FromLong(e->native));
    if (!ok) Py_CLEAR(made);
    return made;
}

PyObject *zx_py_raise(zx_py_state *st, zx_status status)
{
    if (PyErr_Occurred()) return NULL;
    zx_error e = *zx_error_last(); /* a copy: making Python objects may run calls that record */
    zx_error_clear();
    if (e.status != status) {
        memset(&e, 0, sizeof e);
        e.status = status;
        snprintf(e.text, sizeof e.text, "a call returned %s and recorded no reason", zx_status_name(status));
    }
    if (status == ZX_ERR_INTERRUPTED) {
        if (PyErr_CheckSignals() == 0) PyErr_SetString(PyExc_KeyboardInterrupt, e.text);
        return NULL;
    }
    PyObject *made = make_exception(st, &e);
    if (made) PyErr_SetObject((PyObject *)Py_TYPE(made), made);
    Py_XDECREF(made);
    return NULL;
}
