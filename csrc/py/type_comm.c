/* type_comm.c - Comm: opening and closing a rank's device, bootstrap, communicator and stream; children by split.
 *
 * DESIGN
 * A root owns everything and the guard; a child of split owns its zx_comm and borrows the rest, so parent and child
 * count as one object when it comes to threads. Arrays from empty() may outlive close(): their bytes, and the device
 * they lie on, then go with the last of them.
 */
#include "py/py.h"

#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <unistd.h>

typedef struct comm_options {
    zx_device_config device;
    zx_bootstrap_config bootstrap;
    zx_comm_config comm;
} comm_options;

/* ---- opening ---- */

static zx_status open_all(zx_py_comm *self, const comm_options *o)
{
    zx_log_set_rank(o->bootstrap.rank);
    ZX_TRY(zx_device_open(&o->device, &self->dev));
    zx_device_set_interrupt(self->dev, zx_py_interrupt_hook, &self->own);
    ZX_TRY(zx_bootstrap_open(&o->bootstrap, self->dev, &self->bs));
    ZX_TRY(zx_comm_open(self->dev, self->bs, &o->comm, &self->comm));
    ZX_TRY(zx_stream_open(self->dev, "comm", &self->stream));
    return ZX_OK;
}

/* In reverse. */
static void close_all(zx_py_comm *self)
{
    if (!self->parent) zx_stream_close(self->stream);
    zx_comm_close(self->comm);
    self->stream = NULL;
    self->comm = NULL;
    if (!self->parent) zx_bootstrap_close(self->bs);
    self->bs = NULL;
    if (self->n_arrays > 0) return;
    if (!self->parent) {
        zx_py_comm_free_regions(self);
        zx_device_close(self->dev);
    }
    self->dev = NULL;
}

static bool read_device(zx_py_state *st, const char *name, zx_device_kind *out)
{
    static const char *const names[] = {"cpu", "ref", "null", "cuda"};
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, names[i]) != 0) continue;
        *out = (zx_device_kind)i;
        return true;
    }
    ZX_PY_FAIL(st, ZX_ERR_ARG, "device '%.40s': use cpu, ref, null or cuda", name);
    return false;
}

static const double MAX_TIMEOUT_S = 1e9; /* its nanoseconds and the clock's fit an int64 */

static bool check_options(zx_py_state *st, const comm_options *o, long long delay_seed, long long ring_bytes)
{
    const zx_bootstrap_config *b = &o->bootstrap;
    if (b->world < 1 || b->rank < 0 || b->rank >= b->world)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "rank %d of a world of %d: ranks count from 0 to world - 1", b->rank, b->world);
    else if (b->local_world < 1 || b->local_rank < 0 || b->local_rank >= b->local_world)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "local_rank %d of local_world %d: ranks count from 0 to local_world - 1",
                   b->local_rank, b->local_world);
    else if (o->device.n_threads < 0 || delay_seed < 0 || ring_bytes < 0)
        ZX_PY_FAIL(st, ZX_ERR_ARG, "threads %d, delay_seed %lld, ring_bytes %lld: none may be negative",
                   o->device.n_threads, delay_seed, ring_bytes);
    else if (!(b->timeout_s >= 0 && b->timeout_s <= MAX_TIMEOUT_S))
        ZX_PY_FAIL(st, ZX_ERR_ARG, "timeout %g: give seconds up to %g, or 0 for ZEROX_TIMEOUT", b->timeout_s,
                   MAX_TIMEOUT_S);
    else
        return true;
    return false;
}

static bool take_meeting(zx_py_comm *self, PyObject *meeting, comm_options *o)
{
    zx_py_state *st = self->base.st;
    if (meeting == Py_None) return true;
    if (Py_TYPE(meeting) != st->meeting_type) {
        PyErr_Format(PyExc_TypeError, "meeting must be a Meeting or None, not %.80s", Py_TYPE(meeting)->tp_name);
        return false;
    }
    zx_py_meeting *m = (zx_py_meeting *)meeting;
    if (!m->meeting) {
        ZX_PY_FAIL(st, ZX_ERR_STATE, "Meeting is closed");
        return false;
    }
    if (m->pid != getpid()) {
        ZX_PY_FAIL(st, ZX_ERR_STATE, "the Meeting belongs to process %d and this is %d: threads of one process meet",
                   (int)m->pid, (int)getpid());
        return false;
    }
    self->meeting = (zx_py_meeting *)Py_NewRef(meeting);
    m->n_comms++;
    o->bootstrap.meeting = m->meeting;
    return true;
}

static bool read_facts(zx_py_comm *self)
{
    self->rank = zx_comm_rank(self->comm);
    self->world = zx_comm_world(self->comm);
    self->device_name = PyUnicode_FromString(zx_device_caps_get(self->dev)->name);
    self->transport = PyUnicode_FromString(zx_comm_transport(self->comm));
    self->choice = PyUnicode_FromString(zx_comm_choice(self->comm));
    return self->device_name && self->transport && self->choice;
}

/* After close_all: those who were not allowed to close before it now may. */
static void let_go(zx_py_comm *self)
{
    if (self->meeting) zx_py_meeting_lose(self->meeting);
    self->meeting = NULL;
    if (self->joined) self->parent->n_children--;
    self->joined = false; /* the reference stays: the parent holds the guard */
}

static void comm_end(void *object)
{
    zx_py_comm *self = object;
    if (self->base.guard && (!self->closed || self->dev) && zx_py_enter_end(self)) {
        Py_BEGIN_ALLOW_THREADS self->n_arrays = 0; /* the last of them is gone, or this object would live */
        close_all(self);
        Py_END_ALLOW_THREADS zx_py_leave_end(self);
    }
    while (self->regions) { /* in a forked child: the books alone */
        zx_py_region *r = self->regions;
        self->regions = r->next;
        PyMem_RawFree(r);
    }
    let_go(self);
    Py_XDECREF(self->own.interrupt);
    Py_XDECREF(self->device_name);
    Py_XDECREF(self->transport);
    Py_XDECREF(self->choice);
    Py_XDECREF((PyObject *)self->parent);
}

static PyObject *comm_new(PyTypeObject *type, PyObject *args, PyObject *kw)
{
    static char *names[] = {"rank",    "world",      "local_rank", "local_world", "meeting",    "address",
                            "port",    "listen_fd",  "token",      "job",         "timeout",    "device",
                            "threads", "delay_seed", "blas",       "transport",   "ring_bytes", NULL};
    comm_options o = {
        .bootstrap =
            {.world = 1, .local_rank = -1, .local_world = -1, .address = "", .listen_fd = -1, .token = "", .job = ""},
        .device = {.n_threads = 1, .blas_path = ""},
        .comm = {.transport = "auto"}};
    zx_bootstrap_config *b = &o.bootstrap;
    PyObject *meeting = Py_None;
    const char *device = "cpu";
    long long delay_seed = 0, ring_bytes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "|$iiiiOsiissdsiLssL:Comm", names, &b->rank, &b->world, &b->local_rank,
                                     &b->local_world, &meeting, &b->address, &b->port, &b->listen_fd, &b->token,
                                     &b->job, &b->timeout_s, &device, &o.device.n_threads, &delay_seed,
                                     &o.device.blas_path, &o.comm.transport, &ring_bytes))
        return NULL;
    if (b->local_rank == -1) b->local_rank = b->rank;
    if (b->local_world == -1) b->local_world = b->world;
    o.comm.timeout_s = b->timeout_s;
    o.comm.ring_bytes = (size_t)ring_bytes;
    o.device.delay_seed = (uint64_t)delay_seed;
    zx_py_comm *self = zx_py_new(type, comm_end);
    if (!self) return NULL;
    zx_py_state *st = self->base.st;
    self->own.pid = getpid();
    zx_status rc = ZX_OK;
    if (!read_device(st, device, &o.device.kind) || !check_options(st, &o, delay_seed, ring_bytes) ||
        !take_meeting(self, meeting, &o))
        goto fail;
    self->base.guard = &self->own;
    if (!zx_py_enter(self, "open")) goto fail;
    Py_BEGIN_ALLOW_THREADS rc = open_all(self, &o);
    Py_END_ALLOW_THREADS if (zx_py_leave(self, rc) && read_facts(self)) return (PyObject *)self;
fail:
    Py_DECREF(self);
    return NULL;
}

/* Takes comm over, also on failure. */
static zx_py_comm *make_child(zx_py_comm *parent, zx_comm *comm)
{
    zx_py_comm *self = zx_py_new(Py_TYPE(parent), comm_end);
    if (!self) {
        Py_BEGIN_ALLOW_THREADS zx_comm_close(comm);
        Py_END_ALLOW_THREADS return NULL;
    }
    self->base.guard = parent->base.guard;
    self->parent = (zx_py_comm *)Py_NewRef((PyObject *)parent);
    self->joined = true;
    parent->n_children++;
    self->dev = parent->dev;
    self->bs = parent->bs;
    self->stream = parent->stream;
    self->comm = comm;
    if (read_facts(self)) return self;
    Py_DECREF(self);
    return NULL;
}

/* ---- methods ---- */

bool zx_py_comm_enter(zx_py_comm *self, const char *method)
{
    if (!self->closed) return zx_py_enter(self, method);
    ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "Comm.%s: this Comm is closed", method);
    return false;
}

static PyObject *comm_close(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_comm *self = (zx_py_comm *)object;
    zx_py_state *st = self->base.st;
    if (self->closed) Py_RETURN_NONE;
    if (self->n_children > 0)
        return ZX_PY_FAIL(st, ZX_ERR_STATE,
                          "Comm.close with %lld open Partitioners, Engines or split Comms: close them first",
                          (long long)self->n_children);
    if (self->base.guard->n_aborts > 0)
        return ZX_PY_FAIL(st, ZX_ERR_STATE, "Comm is in use by another thread, inside Comm.abort");
    if (!zx_py_enter(self, "close")) return NULL;
    self->closed = true;
    Py_BEGIN_ALLOW_THREADS close_all(self);
    Py_END_ALLOW_THREADS bool ok = zx_py_leave(self, ZX_OK);
    let_go(self);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* A rank that leaves by an exception will not come to the next collective: the others learn at once why. */
static void abort_with(zx_py_comm *self, PyObject *type, PyObject *exception)
{
    PyObject *text = PyUnicode_FromFormat("%s: %S", ((PyTypeObject *)type)->tp_name, exception);
    const char *why = text ? PyUnicode_AsUTF8(text) : NULL;
    if (!why) PyErr_Clear();
    if (zx_py_comm_enter(self, "abort")) {
        Py_BEGIN_ALLOW_THREADS zx_comm_abort(self->comm, why ? why : "it left by an exception");
        Py_END_ALLOW_THREADS(void) zx_py_leave(self, ZX_OK);
    }
    PyErr_Clear(); /* the exception under way goes first */
    Py_XDECREF(text);
}

static PyObject *comm_exit(PyObject *object, PyObject *args)
{
    zx_py_comm *self = (zx_py_comm *)object;
    PyObject *type = PyTuple_GET_SIZE(args) >= 2 ? PyTuple_GET_ITEM(args, 0) : Py_None;
    if (PyType_Check(type) && !self->closed && !self->parent && self->world > 1)
        abort_with(self, type, PyTuple_GET_ITEM(args, 1));
    return zx_py_exit(args, comm_close(object, NULL));
}

static PyObject *comm_split(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"colour", "key", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    int colour, key = 0;
    zx_status rc;
    zx_comm *made = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "i|i:split", names, &colour, &key) || !zx_py_comm_enter(self, "split"))
        return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_comm_split(self->comm, colour, key, &made);
    Py_END_ALLOW_THREADS zx_py_comm *child = made ? make_child(self, made) : NULL;
    bool ok = zx_py_leave(self, rc) && (child || !made);
    if (ok && child) return (PyObject *)child;
    Py_XDECREF((PyObject *)child);
    if (!ok) return NULL;
    Py_RETURN_NONE;
}

/* From any thread, also while another is inside a call: that is what it is for. */
static PyObject *comm_abort(PyObject *object, PyObject *args, PyObject *kw)
{
    static char *names[] = {"why", NULL};
    zx_py_comm *self = (zx_py_comm *)object;
    zx_py_guard *g = self->base.guard;
    const char *why;
    if (!PyArg_ParseTupleAndKeywords(args, kw, "s:abort", names, &why)) return NULL;
    if (self->closed) return ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "Comm.abort: this Comm is closed");
    if (g->pid != getpid())
        return ZX_PY_FAIL(self->base.st, ZX_ERR_STATE, "Comm.abort in process %d, a fork of process %d that opened it",
                          (int)getpid(), (int)g->pid);
    g->n_aborts++;
    Py_BEGIN_ALLOW_THREADS zx_comm_abort(self->comm, why);
    Py_END_ALLOW_THREADS g->n_aborts--;
    Py_RETURN_NONE;
}

static PyObject *comm_check(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_comm *self = (zx_py_comm *)object;
    zx_status rc;
    if (!zx_py_comm_enter(self, "check")) return NULL;
    Py_BEGIN_ALLOW_THREADS rc = zx_comm_check(self->comm);
    Py_END_ALLOW_THREADS if (!zx_py_leave(self, rc)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *comm_counters(PyObject *object, PyObject *Py_UNUSED(none))
{
    zx_py_comm *self = (zx_py_comm *)object;
    if (!zx_py_comm_enter(self, "counters")) return NULL;
    zx_comm_counters c = zx_comm_counters_get(self->comm);
    if (!zx_py_leave(self, ZX_OK)) return NULL;
    return Py_BuildValue("{s:L, s:L, s:L}", "n_calls", (long long)c.n_calls, "sent_elems", (long long)c.sent_elems,
                         "sent_bytes", (long long)c.sent_bytes);
}

static PyObject *comm_repr(PyObject *object)
{
    zx_py_comm *self = (zx_py_comm *)object;
    return PyUnicode_FromFormat("<Comm rank %d of %d on %U, transport %U%s>", self->rank, self->world,
                                self->device_name, self->transport, self->closed ? ", closed" : "");
}

static int comm_traverse(PyObject *object, visitproc visit, void *arg)
{
    zx_py_comm *self = (zx_py_comm *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT((PyObject *)self->parent);
    Py_VISIT((PyObject *)self->meeting);
    return 0;
}

/* ---- the type ---- */

static PyMemberDef members[] = {
    {"rank", T_INT, offsetof(zx_py_comm, rank), READONLY, "This rank, from 0."},
    {"world", T_INT, offsetof(zx_py_comm, world), READONLY, "How many ranks there are."},
    {"device", T_OBJECT_EX, offsetof(zx_py_comm, device_name), READONLY, "\"cpu\", \"ref\", \"null\" or \"cuda\"."},
    {"transport", T_OBJECT_EX, offsetof(zx_py_comm, transport), READONLY, "How the ranks talk."},
    {"choice", T_OBJECT_EX, offsetof(zx_py_comm, choice), READONLY, "Why this transport."},
    {"closed", T_BOOL, offsetof(zx_py_comm, closed), READONLY, "Whether close() was called."},
    {0},
};

#define KW(f) (PyCFunction)(void (*)(void))(f), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"all_gather", KW(zx_py_comm_all_gather),
     "all_gather($self, /, array, *, out=None, dtype=\"\")\n--\n\n(n...) on each rank -> (world, n...)."},
    {"reduce_scatter", KW(zx_py_comm_reduce_scatter),
     "reduce_scatter($self, /, array, *, out=None, dtype=\"\")\n--\n\n"
     "(world, n...) on each rank -> (n...), the sum over ranks of their row `rank`."},
    {"all_reduce", KW(zx_py_comm_all_reduce),
     "all_reduce($self, /, array, *, out=None, dtype=\"\")\n--\n\n"
     "The sum over ranks, formed in rank order; out may be the array itself."},
    {"broadcast", KW(zx_py_comm_broadcast),
     "broadcast($self, /, array, *, root=0, dtype=\"\")\n--\n\nIn place; returns array."},
    {"all_to_all", KW(zx_py_comm_all_to_all),
     "all_to_all($self, /, array, *, out=None, dtype=\"\")\n--\n\n"
     "(world, n...) -> (world, n...); row p of the result is row `rank` of rank p's array."},
    {"send", KW(zx_py_comm_send),
     "send($self, /, array, peer, *, dtype=\"\")\n--\n\nTo one rank, which calls recv with an array of this size."},
    {"recv", KW(zx_py_comm_recv),
     "recv($self, /, array, peer, *, dtype=\"\")\n--\n\nFills array with what `peer` sends; returns it."},
    {"barrier", zx_py_comm_barrier, METH_NOARGS, "barrier($self, /)\n--\n\nReturns when every rank has called it."},
    {"empty", KW(zx_py_comm_empty),
     "empty($self, /, shape, dtype=\"float32\")\n--\n\n"
     "Collective: an array of zeros in registered memory, which other ranks read without a staging copy. The memory "
     "lives until the Comm is closed and the array is gone."},
    {"split", KW(comm_split),
     "split($self, /, colour, key=0)\n--\n\n"
     "Collective: ranks of one colour form a Comm, ordered by (key, rank); a negative colour gets None."},
    {"all_gather_bytes", KW(zx_py_comm_all_gather_bytes),
     "all_gather_bytes($self, /, what, data)\n--\n\n"
     "Small control data over the set-up channel (slow); lengths may differ between ranks. `what` names the call in "
     "errors."},
    {"abort", KW(comm_abort),
     "abort($self, /, why)\n--\n\n"
     "This rank gives up; the others get `why` in a PeerError. Any thread may call it, also during another's call."},
    {"check", comm_check, METH_NOARGS, "check($self, /)\n--\n\nRaises the first error of this Comm, if there is one."},
    {"counters", comm_counters, METH_NOARGS,
     "counters($self, /)\n--\n\nn_calls, sent_elems, sent_bytes of this rank since it was opened."},
    {"close", comm_close, METH_NOARGS,
     "close($self, /)\n--\n\nStateError while Partitioners, Engines or split Comms on it are open. May be called "
     "twice."},
    {"__enter__", zx_py_return_self, METH_NOARGS, "__enter__($self, /)\n--\n\nself"},
    {"__exit__", comm_exit, METH_VARARGS,
     "__exit__($self, /, *args)\n--\n\nclose(); after an exception, abort() with its text first."},
    {0},
};

static PyType_Slot slots[] = {
    {Py_tp_doc,
     "Comm(*, rank=0, world=1, local_rank=-1, local_world=-1, meeting=None, address=\"\", port=0, listen_fd=-1, "
     "token=\"\", job=\"\", timeout=0.0, device=\"cpu\", threads=1, delay_seed=0, blas=\"\", transport=\"auto\", "
     "ring_bytes=0)\n--\n\n"
     "One rank's device, its connection to the other ranks, and the collectives between them.\n\n"
     "Ranks are threads that share a Meeting, or processes that find rank 0 at address:port. Collectives take "
     "C-contiguous NumPy arrays\n(float32, float64, int32, int64, uint8; bfloat16 as uint16 with dtype=\"bfloat16\"), "
     "return new arrays unless `out` is given,\nwait until done, and raise PeerError or DeadlineError (naming rank, "
     "operation and sequence number) when another rank\ndies, stalls or calls something else. Ctrl-C works inside. "
     "Concurrent use from two threads is a StateError; so is use\nin a forked child."},
    {Py_tp_new, comm_new},
    {Py_tp_dealloc, zx_py_dealloc},
    {Py_tp_traverse, comm_traverse},
    {Py_tp_repr, comm_repr},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0},
};

PyType_Spec zx_py_comm_spec = {
    .name = "zerox._C.Comm",
    .basicsize = sizeof(zx_py_comm),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};
