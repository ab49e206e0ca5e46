/* comm_calls.c - the collectives of a Comm on NumPy arrays. Each looks at its arrays, makes the result, and then runs
 * without the GIL: onto the Comm's stream, a sync, a look for errors. */
#include "py/py.h"

#include <string.h>

typedef enum call_kind { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL, BROADCAST, SEND, RECV, BARRIER } call_kind;

typedef struct call {
    call_kind kind;
    const void *in;
    void *out;
    int64_t n; /* as the collective counts: elements a rank */
    zx_dtype dtype;
    int peer; /* or root */
} call;

static zx_status run(zx_py_comm *self, const call *c)
{
    zx_comm *comm = self->comm;
    zx_stream *s = self->stream;
    switch (c->kind) {
    case ALL_GATHER:
        ZX_TRY(zx_comm_all_gather(comm, s, c->in, c->out, c->n, c->dtype));
        break;
    case REDUCE_SCATTER:
        ZX_TRY(zx_comm_reduce_scatter(comm, s, c->in, c->out, c->n, c->dtype, c->dtype, false));
        break;
    case ALL_REDUCE:
        ZX_TRY(zx_comm_all_reduce(comm, s, c->in, c->out, c->n, c->dtype));
        break;
    case ALL_TO_ALL:
        ZX_TRY(zx_comm_all_to_all(comm, s, c->in, c->out, c->n, c->dtype));
        break;
    case BROADCAST:
        ZX_TRY(zx_comm_broadcast(comm, s, c->out, c->n, c->dtype, c->peer));
        break;
    case SEND:
        ZX_TRY(zx_comm_send(comm, s, c->in, c->n, c->dtype, c->peer));
        break;
    case RECV:
        ZX_TRY(zx_comm_recv(comm, s, c->out, c->n, c->dtype, c->peer));
        break;
    case BARRIER:
        ZX_TRY(zx_comm_barrier(comm, s));
        break;
    }
    ZX_TRY(zx_stream_sync(s));
    ZX_TRY(zx_comm_check(comm));
    return ZX_OK;
}

static bool run_unlocked(zx_py_comm *self, const char *method, const call *c)
{
    zx_status rc;
    if (!zx_py_comm_enter(self, method)) return false;
    Py_BEGIN_ALLOW_THREADS rc = run(self, c);
    Py_END_ALLOW_THREADS return zx_py_leave(self, rc);
}

/* ---- results ---- */

static bool same_shape(const zx_py_array *a, int ndim, const int64_t *shape)
{
    return a->ndim == ndim && memcmp(a->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

/* Two pieces of memory that overlap must be the in-place form of the collective: in == out + offset bytes. */
static bool check_overlap(zx_py_state *st, const zx_py_array *in, const zx_py_array *out, int64_t in_place)
{
    const char *a = in->data, *b = out->data;
    bool apart = in->bytes == 0 || out->bytes == 0 || a + in->bytes <= b || b + out->bytes <= a;
    if (apart || (in_place != INT64_MIN && a - b == in_place)) return true;
    ZX_PY_FAIL(st, ZX_ERR_ARG, "out shares memory with array: give it memory of its own");
    return false;
}

/* The result: `out` after a check, or a new array. A new reference. in_place: where array may lie in it, in bytes from
 * out's start; INT64_MIN = nowhere. */
static PyObject *result(zx_py_comm *self, const zx_py_array *in, PyObject *out, const char *dtype, int ndim,
                        const int64_t *shape, int64_t in_place, void **data)
{
    zx_py_state *st = self->base.st;
    if (out == Py_None) {
        PyObject *made = zx_py_array_new(in->dtype, ndim, shape);
        if (made) *data = zx_py_array_data(made);
        return made;
    }
    zx_py_array a;
    if (!zx_py_look(st, out, "out", dtype, &a)) return NULL;
    if (a.dtype != in->dtype)
        return ZX_PY_FAIL(st, ZX_ERR_ARG, "out is %s and array is %s: use one dtype", zx_dtype_name(a.dtype),
                          zx_dtype_name(in->dtype));
    if (!a.writeable) return ZX_PY_FAIL(st, ZX_ERR_ARG, "out is read-only");
    if (!same_shape(&a, ndim, shape)) {
        PyObject *has = zx_py_shape_tuple(a.ndim, a.shape), *needs = zx_py_shape_tuple(ndim, shape);
        PyObject *text = has && needs ? PyUnicode_FromFormat("out has shape %R and needs %R", has, needs) : NULL;
        if (text) ZX_PY_FAIL(st, ZX_ERR_ARG, "%s", PyUnicode_AsUTF8(text));
        Py_XDECREF(has);
        Py_XDECREF(needs);
        Py_XDECREF(text);
        return NULL;
    }
    if (!check_overlap(st, in, &a, in_place)) return NULL;
    *data = a.data;
    return Py_NewRef(out);
}

/* array is (world, n...). */
static bool check_rows(zx_py_comm *self, const zx_py_array *a)
{
    if (a->ndim > 0 && a->shape[0] == self->world) return true;
    ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "array has %lld rows and needs one for each of the %d ranks",
               a->ndim ? (long long)a->shape[0] : 0LL, self->world);
    return false;
}

static bool check_rank(zx_py_comm *self, const char *what, int rank)
{
    if (rank >= 0 && rank < self->world) return true;
    ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "%s %d: ranks count from 0 to %d", what, rank, self->world - 1);
    return false;
}

static PyObject *to_new_array(PyObject *object, PyObject *args, PyObject *kw, call_kind kind, const char *format,
                              const char *method)
{
    static char *names[] = {"array", "out", "dtype", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    PyObject *array, *out = Py_None;
    const char *dtype = "";
    zx_py_array in;
    if (!PyArg_ParseTupleAndKeywords(args, kw, format, names, &array, &out, &dtype) ||
        !zx_py_look(self->base.st, array, "array", dtype, &in))
        return NULL;
    bool rows = kind == REDUCE_SCATTER || kind == ALL_TO_ALL;
    if (rows && !check_rows(self, &in)) return NULL;
    int64_t shape[ZX_PY_MAX_DIMS + 1], n = rows ? in.n / self->world : in.n;
    int64_t rank_bytes = self->rank * n * (int64_t)zx_dtype_bytes(in.dtype);
    const int64_t *out_shape = in.shape;
    int ndim = in.ndim;
    int64_t in_place = 0;
    if (kind == ALL_GATHER) {
        if (ndim == ZX_PY_MAX_DIMS) {
            ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "array has %d dimensions, one too many to gather", ndim);
            return NULL;
        }
        shape[0] = self->world;
        memcpy(&shape[1], in.shape, (size_t)ndim * sizeof *shape);
        out_shape = shape;
        ndim++;
        in_place = rank_bytes;
    } else if (kind == REDUCE_SCATTER) {
        out_shape = &in.shape[1];
        ndim--;
        in_place = -rank_bytes;
    } else if (kind == ALL_TO_ALL) {
        in_place = INT64_MIN;
    }
    call c = {.kind = kind, .in = in.data, .n = n, .dtype = in.dtype};
    PyObject *made = result(self, &in, out, dtype, ndim, out_shape, in_place, &c.out);
    if (made && !run_unlocked(self, method, &c)) Py_CLEAR(made);
    return made;
}

PyObject *zx_py_comm_all_gather(PyObject *self, PyObject *args, PyObject *kw)
{
    return to_new_array(self, args, kw, ALL_GATHER, "O|$Os:all_gather", "all_gather");
}

PyObject *zx_py_comm_reduce_scatter(PyObject *self, PyObject *args, PyObject *kw)
{
    return to_new_array(self, args, kw, REDUCE_SCATTER, "O|$Os:reduce_scatter", "reduce_scatter");
}

PyObject *zx_py_comm_all_reduce(PyObject *self, PyObject *args, PyObject *kw)
{
    return to_new_array(self, args, kw, ALL_REDUCE, "O|$Os:all_reduce", "all_reduce");
}

PyObject *zx_py_comm_all_to_all(PyObject *self, PyObject *args, PyObject *kw)
{
    return to_new_array(self, args, kw, ALL_TO_ALL, "O|$Os:all_to_all", "all_to_all");
}

PyObject *zx_py_comm_broadcast(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"array", "root", "dtype", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    PyObject *array;
    int root = 0;
    const char *dtype = "";
    zx_py_array a;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "O|$is:broadcast", names, &array, &root, &dtype) ||
        !zx_py_look(self->base.st, array, "array", dtype, &a) || !check_rank(self, "root", root))
        return NULL;
    if (!a.writeable && self->rank != root)
        return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "array is read-only and rank %d is not the root", self->rank);
    call c = {.kind = BROADCAST, .out = a.data, .n = a.n, .dtype = a.dtype, .peer = root};
    return run_unlocked(self, "broadcast", &c) ? Py_NewRef(array) : NULL;
}

static PyObject *pairwise(PyObject *object, PyObject *args, PyObject *kw, call_kind kind, const char *format,
                          const char *method, PyObject **array)
{
    static char *names[] = {"array", "peer", "dtype", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    int peer;
    const char *dtype = "";
    zx_py_array a;
    if (!PyArg_ParseTupleAndKeywords(args, kw, format, names, array, &peer, &dtype) ||
        !zx_py_look(self->base.st, *array, "array", dtype, &a) || !check_rank(self, "peer", peer))
        return NULL;
    if (kind == RECV && !a.writeable) return ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "array is read-only");
    call c = {.kind = kind, .in = a.data, .out = a.data, .n = a.n, .dtype = a.dtype, .peer = peer};
    if (!run_unlocked(self, method, &c)) return NULL;
    Py_RETURN_NONE;
}

PyObject *zx_py_comm_send(PyObject *self, PyObject *args, PyObject *kw)
{
    PyObject *array;
    return pairwise(self, args, kw, SEND, "Oi|$s:send", "send", &array);
}

PyObject *zx_py_comm_recv(PyObject *self, PyObject *args, PyObject *kw)
{
    PyObject *array, *none = pairwise(self, args, kw, RECV, "Oi|$s:recv", "recv", &array);
    if (!none) return NULL;
    Py_DECREF(none);
    return Py_NewRef(array);
}

PyObject *zx_py_comm_barrier(PyObject *self, PyObject *Py_UNUSED(none))
{
    call c = {.kind = BARRIER};
    if (!run_unlocked((zx_py_comm *)self, "barrier", &c)) return NULL;
    Py_RETURN_NONE;
}

/* ---- registered memory ---- */

void zx_py_comm_free_regions(zx_py_comm *c)
{
    while (c->regions) {
        zx_py_region *r = c->regions;
        c->regions = r->next;
        if (r->addr) zx_device_unreserve(c->dev, r->addr, r->bytes);
        zx_mem_close(r->mem);
        PyMem_RawFree(r);
    }
}

/* r stays in the books whatever happens: memory that other ranks may know lives until close. */
static zx_status open_region(zx_py_comm *c, zx_py_region *r)
{
    int id;
    ZX_TRY(zx_mem_open(c->dev, r->bytes, true, &r->mem));
    ZX_TRY(zx_device_reserve(c->dev, r->bytes, &r->addr));
    ZX_TRY(zx_device_map(c->dev, r->addr, r->mem, 0, r->bytes));
    ZX_TRY(zx_comm_register(c->comm, r->mem, r->addr, &id));
    return ZX_OK;
}

static void array_gone(PyObject *capsule)
{
    zx_py_comm *c = PyCapsule_GetContext(capsule);
    c->n_arrays--;
    Py_DECREF((PyObject *)c);
}

static PyObject *region_array(zx_py_comm *self, zx_py_region *r, zx_dtype dtype, int ndim, const int64_t *shape)
{
    PyObject *capsule = PyCapsule_New(r->addr, "zerox.memory", NULL);
    if (!capsule) return NULL;
    if (PyCapsule_SetContext(capsule, self) < 0 || PyCapsule_SetDestructor(capsule, array_gone) < 0) {
        Py_DECREF(capsule);
        return NULL;
    }
    Py_INCREF((PyObject *)self);
    self->n_arrays++;
    return zx_py_array_over(dtype, ndim, shape, r->addr, capsule, true);
}

static bool size_of(zx_py_comm *self, zx_dtype dtype, int ndim, const int64_t *shape, size_t *bytes)
{
    int64_t n = (int64_t)zx_dtype_bytes(dtype);
    size_t granule = zx_device_caps_get(self->dev)->granule;
    bool fits = true;
    for (int i = 0; i < ndim; i++)
        fits = fits && !__builtin_mul_overflow(n, shape[i], &n);
    if (!fits || n > INT64_MAX - (int64_t)granule) {
        ZX_PY_FAIL(self->base.st, ZX_ERR_ARG, "an array of more than 2^63 bytes");
        return false;
    }
    *bytes = (size_t)zx_round_up(zx_max64(n, 1), (int64_t)granule);
    return true;
}

PyObject *zx_py_comm_empty(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"shape", "dtype", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    zx_py_state *st = self->base.st;
    PyObject *shape_object, *array = NULL;
    const char *dtype_name = "float32";
    zx_dtype dtype;
    int64_t shape[ZX_PY_MAX_DIMS];
    int ndim;
    size_t bytes = 0;
    zx_status rc;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "O|s:empty", names, &shape_object, &dtype_name) ||
        !zx_py_dtype(st, dtype_name, &dtype) || !zx_py_shape(st, shape_object, ZX_PY_MAX_DIMS, &ndim, shape) ||
        !zx_py_comm_enter(self, "empty"))
        return NULL;
    if (!zx_device_caps_get(self->dev)->host_addressable)
        rc = zx_error_set(ZX_ERR_UNSUPPORTED, 0, NULL, __func__, __FILE__, __LINE__,
                          "memory of the device %s cannot be a NumPy array", zx_device_caps_get(self->dev)->name);
    else
        rc = size_of(self, dtype, ndim, shape, &bytes) ? ZX_OK : ZX_ERR_ARG;
    zx_py_region *r = rc == ZX_OK ? PyMem_RawCalloc(1, sizeof *r) : NULL;
    if (rc == ZX_OK && !r) PyErr_NoMemory();
    if (r) {
        r->bytes = bytes;
        r->next = self->regions;
        self->regions = r;
        Py_BEGIN_ALLOW_THREADS rc = open_region(self, r);
        Py_END_ALLOW_THREADS if (rc == ZX_OK) array = region_array(self, r, dtype, ndim, shape);
    }
    if (zx_py_leave(self, rc)) return array;
    Py_XDECREF(array);
    return NULL;
}

/* ---- control data ---- */

/* A root talks over the set-up channel, a child over its own collectives. */
static zx_status gather_control(zx_py_comm *self, const char *what, const void *in, size_t bytes, void *out)
{
    if (!self->parent) {
        ZX_TRY(zx_bootstrap_all_gather(self->bs, what, in, bytes, out));
        return ZX_OK;
    }
    ZX_TRY(zx_comm_all_gather(self->comm, self->stream, in, out, (int64_t)bytes, ZX_U8));
    ZX_TRY(zx_stream_sync(self->stream));
    ZX_TRY(zx_comm_check(self->comm));
    return ZX_OK;
}

static zx_status gather_bytes(zx_py_comm *self, const char *what, const char *data, int64_t n, int64_t *lengths,
                              char **all, int64_t *row)
{
    *row = 0;
    *all = NULL;
    ZX_TRY(gather_control(self, what, &n, sizeof n, lengths));
    for (int r = 0; r < self->world; r++)
        *row = zx_max64(*row, lengths[r]);
    if (*row == 0) return ZX_OK;
    zx_status zx_rc_ = ZX_OK;
    char *own;
    ZX_TRY(zx_alloc(ZX_MEM_COMM, (size_t)*row, (void **)&own));
    ZX_TRY_GOTO(zx_alloc_array(ZX_MEM_COMM, self->world, (size_t)*row, (void **)all), done);
    memcpy(own, data, (size_t)n);
    ZX_TRY_GOTO(gather_control(self, what, own, (size_t)*row, *all), done);
done:
    zx_free(own);
    return zx_rc_;
}

static PyObject *bytes_list(int world, const char *all, int64_t row, const int64_t *lengths)
{
    PyObject *list = PyList_New(world);
    for (int r = 0; list && r < world; r++) {
        PyObject *item = PyBytes_FromStringAndSize(all ? all + r * row : "", (Py_ssize_t)lengths[r]);
        if (!item)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, r, item);
    }
    return list;
}

PyObject *zx_py_comm_all_gather_bytes(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"what", "data", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    const char *what;
    Py_buffer data;
    int64_t row;
    char *all = NULL;
    zx_status rc;
    PyObject *list = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "sy*:all_gather_bytes", names, &what, &data)) return NULL;
    int64_t *lengths = PyMem_Calloc((size_t)self->world, sizeof *lengths);
    if (!lengths) PyErr_NoMemory();
    if (lengths && zx_py_comm_enter(self, "all_gather_bytes")) {
        Py_BEGIN_ALLOW_THREADS rc = gather_bytes(self, what, data.buf, data.len, lengths, &all, &row);
        Py_END_ALLOW_THREADS if (zx_py_leave(self, rc)) list = bytes_list(self->world, all, row, lengths);
    }
    zx_free(all);
    PyMem_Free(lengths);
    PyBuffer_Release(&data);
    return list;
}
