/* functions.c - functions of the module: operations, checkpoint slices, fault points, memory, environment, timeline. */
#include "py/py.h"

#include <string.h>

static PyObject *list_ops(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *dict = PyDict_New();
    const zx_opdef *op;
    for (int32_t i = 0; dict && (op = zx_opdef_builtin(i)) != NULL; i++)
        if (!zx_py_put(dict, op->name, Py_BuildValue("(iii)", op->min_in, op->max_in, op->n_out))) Py_CLEAR(dict);
    return dict;
}

/* ---- checkpoint slices ---- */

static bool read_box(zx_py_state *st, PyObject *object, const char *what, zx_box *box)
{
    PyObject *parts[3];
    int64_t *const into[3] = {box->global_shape, box->begin, box->shape};
    int n[3];
    memset(box, 0, sizeof *box);
    if (!PyTuple_Check(object) || PyTuple_GET_SIZE(object) != 3) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple (global shape, begin, shape)", what);
        return false;
    }
    for (int i = 0; i < 3; i++) {
        parts[i] = PyTuple_GET_ITEM(object, i);
        if (!zx_py_ints(st, parts[i], what, ZX_MAX_DIMS, into[i], &n[i])) return false;
    }
    box->ndim = n[0];
    bool ok = n[0] == n[1] && n[0] == n[2];
    for (int d = 0; ok && d < n[0]; d++)
        ok = box->begin[d] >= 0 && box->shape[d] >= 0 && box->begin[d] <= box->global_shape[d] &&
             box->shape[d] <= box->global_shape[d] - box->begin[d];
    if (!ok) ZX_PY_FAIL(st, ZX_ERR_ARG, "%s does not lie in its tensor: give (global shape, begin, shape)", what);
    return ok;
}

static bool check_run(zx_py_state *st, const char *what, const zx_box *box, long long begin, long long n)
{
    int64_t size = 1;
    bool ok = begin >= 0 && n >= 0;
    for (int d = 0; ok && d < box->ndim; d++)
        ok = !__builtin_mul_overflow(size, box->shape[d], &size);
    if (ok && begin <= size && n <= size - begin) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG, "%s run [%lld, +%lld) does not lie in its box of %lld elements", what, begin, n,
               (long long)size);
    return false;
}

static PyObject *run_list(const zx_box *src, int64_t src_begin, int64_t src_n, const zx_box *dst, int64_t dst_begin,
                          int64_t dst_n)
{
    int64_t n = zx_checkpoint_overlap(src, src_begin, src_n, dst, dst_begin, dst_n, NULL, 0);
    zx_copy_run *runs = PyMem_Calloc((size_t)n + 1, sizeof *runs);
    if (!runs) return PyErr_NoMemory();
    zx_checkpoint_overlap(src, src_begin, src_n, dst, dst_begin, dst_n, runs, n);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list && i < n; i++) {
        PyObject *item = Py_BuildValue("(LLL)", (long long)runs[i].src, (long long)runs[i].dst, (long long)runs[i].n);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    PyMem_Free(runs);
    return list;
}

static PyObject *checkpoint_overlap(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = {"src_box", "src_begin", "src_n", "dst_box", "dst_begin", "dst_n", NULL};
    zx_py_state *st = PyModule_GetState(module);
    PyObject *src_object, *dst_object;
    long long src_begin, src_n, dst_begin, dst_n;
    zx_box src, dst;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "OLLOLL:checkpoint_overlap", names, &src_object, &src_begin, &src_n,
                                     &dst_object, &dst_begin, &dst_n) ||
        !read_box(st, src_object, "src_box", &src) || !read_box(st, dst_object, "dst_box", &dst) ||
        !check_run(st, "src", &src, src_begin, src_n) || !check_run(st, "dst", &dst, dst_begin, dst_n))
        return NULL;
    if (src.ndim != dst.ndim || memcmp(src.global_shape, dst.global_shape, sizeof src.global_shape) != 0)
        return ZX_PY_FAIL(st, ZX_ERR_ARG, "src_box and dst_box are of tensors of different shapes");
    return run_list(&src, src_begin, src_n, &dst, dst_begin, dst_n);
}

/* ---- fault points ---- */

static PyObject *fault_point(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = {"name", NULL};
    const char *name;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "s:fault_point", names, &name)) return NULL;
    zx_status rc = zx_fault_point(name);
    if (rc != ZX_OK) return zx_py_raise(PyModule_GetState(module), rc);
    Py_RETURN_NONE;
}

static PyObject *fault_arm(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = {"n", NULL};
    long long n;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "L:fault_arm", names, &n)) return NULL;
    if (n < 0)
        return ZX_PY_FAIL(PyModule_GetState(module), ZX_ERR_ARG, "n is %lld: 1 is the next fault point, 0 disarms", n);
    zx_fault_arm(n);
    Py_RETURN_NONE;
}

static PyObject *fault_passed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    return PyLong_FromLongLong(zx_fault_passed());
}

/* ---- memory, environment, processor ---- */

static PyObject *memory_stats(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *dict = PyDict_New();
    for (int c = 0; dict && c < ZX_N_MEM_CLASS; c++) {
        zx_mem_stats s = zx_mem_get((zx_mem_class)c);
        PyObject *item =
            Py_BuildValue("{s:L, s:L, s:L, s:L}", "n_allocs", (long long)s.n_allocs, "n_live", (long long)s.n_live,
                          "live_bytes", (long long)s.live_bytes, "peak_bytes", (long long)s.peak_bytes);
        if (!zx_py_put(dict, zx_mem_class_name((zx_mem_class)c), item)) Py_CLEAR(dict);
    }
    return dict;
}

static PyObject *env_table(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(none))
{
    PyObject *list = PyList_New(ZX_N_ENV);
    for (int i = 0; list && i < ZX_N_ENV; i++) {
        zx_env var = (zx_env)i;
        PyObject *value = PyUnicode_DecodeFSDefault(zx_env_text(var));
        PyObject *item =
            value ? Py_BuildValue("(sNss)", zx_env_name(var), value, zx_env_default(var), zx_env_help(var)) : NULL;
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyObject *isa(PyObject *module, PyObject *Py_UNUSED(none))
{
    const char *wish = zx_env_text(ZX_ENV_ISA);
    zx_isa best = zx_isa_detect();
    if (strcmp(wish, "plain") == 0 || (strcmp(wish, "auto") == 0 && best == ZX_ISA_PLAIN))
        return PyUnicode_FromString("plain");
    if (strcmp(wish, "avx2") == 0 ? best >= ZX_ISA_AVX2 : strcmp(wish, "auto") == 0 && best == ZX_ISA_AVX2)
        return PyUnicode_FromString("avx2");
    if ((strcmp(wish, "auto") == 0 || strcmp(wish, "avx512") == 0) && best == ZX_ISA_AVX512)
        return PyUnicode_FromString("avx512");
    return ZX_PY_FAIL(PyModule_GetState(module), ZX_ERR_ARG,
                      "ZEROX_ISA=%.40s: use auto, plain, or avx2 or avx512 where the processor has it", wish);
}

/* ---- timeline ---- */

static PyObject *timeline_enable(PyObject *module, PyObject *args, PyObject *kw)
{
    static char *names[] = {"n_events", NULL};
    zx_py_state *st = PyModule_GetState(module);
    long long n;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "L:timeline_enable", names, &n)) return NULL;
    zx_status rc = zx_timeline_enable(n);
    if (rc != ZX_OK) return zx_py_raise(st, rc);
    st->n_timeline_events = n;
    Py_RETURN_NONE;
}

static PyObject *timeline_read(PyObject *module, PyObject *Py_UNUSED(none))
{
    int64_t n_max = ((zx_py_state *)PyModule_GetState(module))->n_timeline_events;
    zx_event_rec *events = PyMem_Calloc((size_t)n_max + 1, sizeof *events);
    if (!events) return PyErr_NoMemory();
    int64_t n = zx_timeline_read(events, n_max);
    PyObject *list = PyList_New((Py_ssize_t)n);
    for (int64_t i = 0; list && i < n; i++) {
        const zx_event_rec *e = &events[i];
        PyObject *item = Py_BuildValue("(siiLLL)", e->name, e->lane, e->rank, (long long)e->begin_ns,
                                       (long long)e->end_ns, (long long)e->bytes);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)i, item);
    }
    PyMem_Free(events);
    return list;
}

#define KW(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

PyMethodDef zx_py_functions[] = {
    {"ops", list_ops, METH_NOARGS,
     "ops($module, /)\n--\n\nBuilt-in operations: name -> (fewest inputs, most inputs, outputs)."},
    {"checkpoint_overlap", KW(checkpoint_overlap),
     "checkpoint_overlap($module, /, src_box, src_begin, src_n, dst_box, dst_begin, dst_n)\n--\n\n"
     "(src, dst, n) runs of elements shared by a saved and a wanted run; a box is (global shape, begin, shape)."},
    {"fault_point", KW(fault_point),
     "fault_point($module, /, name)\n--\n\nPasses a fault point; tests make the n-th fail."},
    {"fault_arm", KW(fault_arm),
     "fault_arm($module, /, n)\n--\n\nThe n-th fault point from now fails once (1: the next); 0 disarms."},
    {"fault_passed", fault_passed, METH_NOARGS,
     "fault_passed($module, /)\n--\n\nFault points passed since fault_arm was called last."},
    {"memory_stats", memory_stats, METH_NOARGS,
     "memory_stats($module, /)\n--\n\nCounted memory by class: n_allocs, n_live, live_bytes, peak_bytes."},
    {"env_table", env_table, METH_NOARGS,
     "env_table($module, /)\n--\n\n"
     "(name, value, default, help) of every environment variable that zerox reads."},
    {"isa", isa, METH_NOARGS, "isa($module, /)\n--\n\nInstruction set that the CPU kernels use: \"plain\", \"avx2\"."},
    {"timeline_enable", KW(timeline_enable),
     "timeline_enable($module, /, n_events)\n--\n\nKeeps the last n_events events; 0 turns it off."},
    {"timeline_read", timeline_read, METH_NOARGS,
     "timeline_read($module, /)\n--\n\n(name, lane, rank, begin_ns, end_ns, bytes), oldest first."},
    {0},
};
