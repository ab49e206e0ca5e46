/* py.h - private to csrc/py: the module's state, the objects behind the types, and what the files share.
 *
 * DESIGN
 * Every object of the module begins with zx_py_object. What lives on one device shares one guard: a root Comm's, or
 * that of an Engine which only plans. Between zx_py_enter and zx_py_leave a call owns the guard and may give up the
 * GIL; the guard itself is read and written only with the GIL held, so a plain pointer does for a flag. A second
 * thread gets a StateError instead of waiting.
 *
 * An object may die in any thread, also while another thread is inside a call on the same device. It is then put on
 * the guard's list with its memory and its references to parents as they are, and ended when that call leaves.
 */
#ifndef ZX_PY_PY_H
#define ZX_PY_PY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sys/types.h>

#include "model/engine.h"
#include "store/checkpoint.h"

typedef struct zx_py_state {
    PyObject *error;              /* ZeroxError */
    PyObject *class_of[ZX_N_STATUS]; /* the exception of a status; NULL for OK and INTERRUPTED */
    PyTypeObject *meeting_type, *comm_type, *partitioner_type, *engine_type, *tensor_type;
    int64_t n_timeline_events; /* as enabled last */
} zx_py_state;

typedef struct zx_py_object zx_py_object;

typedef struct zx_py_guard {
    const char *holder_type, *holder; /* the call that is inside: "Engine", "backward"; NULL = free */
    int n_aborts;                     /* calls of abort, which any thread may make, under way */
    pid_t pid;                        /* of the process that opened the device */
    PyObject *interrupt;              /* what a signal handler raised during a wait */
    zx_py_object *deferred;           /* dead objects that wait until the guard is free */
} zx_py_guard;

struct zx_py_object {
    PyObject_HEAD zx_py_state *st;    /* the type keeps the module alive */
    zx_py_guard *guard; /* in a root Comm that this object keeps alive, or in itself; NULL while half built */
    zx_py_object *next; /* on the guard's list */
    void (*end)(void *self); /* closes what is open, frees, drops references; with the GIL and a free guard */
};

typedef struct zx_py_meeting {
    zx_py_object base;
    zx_meeting *meeting;
    int world;
    int64_t n_comms; /* not yet closed */
    pid_t pid;
} zx_py_meeting;

typedef struct zx_py_region { /* what one Comm.empty allocated */
    struct zx_py_region *next;
    zx_mem *mem;
    void *addr;
    size_t bytes;
} zx_py_region;

typedef struct zx_py_comm {
    zx_py_object base;
    zx_py_guard own;       /* a root's */
    zx_py_meeting *meeting; /* strong, or NULL */
    struct zx_py_comm *parent; /* strong; NULL for a root */
    bool joined;               /* counts among the parent's open children */
    zx_device *dev;        /* a root owns device, bootstrap and stream; a child borrows them */
    zx_bootstrap *bs;
    zx_comm *comm;
    zx_stream *stream;
    int rank, world;
    PyObject *device_name, *transport, *choice;
    bool closed;
    int64_t n_children; /* Partitioners, Engines and children of split, not yet closed */
    zx_py_region *regions;
    int64_t n_arrays; /* of regions, alive */
} zx_py_comm;

/* Partitioner and Engine: one struct, so that the store's methods serve both. */
typedef struct zx_py_partitioner {
    zx_py_object base;
    zx_py_guard own; /* of an engine that only plans */
    zx_py_comm *comm; /* strong; NULL for an engine that only plans */
    bool joined;      /* counts among the Comm's open children */
    zx_device *dev;
    zx_device *own_dev; /* of an engine that only plans */
    zx_layout *layout;
    zx_policy policy;
    zx_stream *stream; /* a Partitioner owns it, an Engine's belongs to its zx_engine */
    zx_store *store;   /* NULL: closed, or only planning */
    zx_engine *engine; /* NULL for a Partitioner; an Engine's lives until its object dies */
    double *totals;    /* device memory for `count`, (2); NULL until it is needed */
    zx_dtype dtype;    /* of activations */
    bool closed;
    int64_t n_views;  /* sets of arrays from acquire and grad, alive */
    /* Engine: */
    PyObject *inputs; /* list: arrays that the pass's inputs were copied from */
    PyObject *names;  /* dict: names of inputs, which plans refer to as long as the engine lives */
} zx_py_partitioner;

typedef struct zx_py_tensor {
    zx_py_object base;
    zx_py_partitioner *engine; /* strong */
    zx_tensor *t;              /* one reference and one hold; NULL while half built */
} zx_py_tensor;

/* ---- errors.c ---- */
/* Makes the exception classes and adds them to the module; false with a Python error. */
bool zx_py_errors_open(PyObject *module, zx_py_state *st);
/* Raises what the thread's record holds for a call that returned `status`. Always returns NULL. */
PyObject *zx_py_raise(zx_py_state *st, zx_status status);
/* Records and raises; an expression of value NULL. */
#define ZX_PY_FAIL(st, status, ...)                                                                                    \
    zx_py_raise((st), zx_error_set((status), 0, NULL, __func__, __FILE__, __LINE__, __VA_ARGS__))

/* ---- guard.c ---- */
extern PyModuleDef zx_py_module;
zx_py_state *zx_py_state_of(PyTypeObject *type); /* also of a class derived in Python; NULL with a Python error */
const char *zx_py_type_name(const void *self);   /* "Engine" */
/* A new object of a type, zeroed but for its head. */
void *zx_py_new(PyTypeObject *type, void (*end)(void *self));
/* Takes the guard for a call; `method` is a literal. False with StateError: another thread is inside, or this is
 * a forked child. */
bool zx_py_enter(void *self, const char *method);
/* Gives the guard back and raises what `status` and a signal handler left; true if neither did. */
bool zx_py_leave(void *self, zx_status status);
/* The same for `end`, which cannot raise. False: this process did not open the device and must not touch it. */
bool zx_py_enter_end(void *self);
void zx_py_leave_end(void *self);
/* The interrupt hook of a device; ctx is a guard. */
bool zx_py_interrupt_hook(void *ctx);
void zx_py_dealloc(PyObject *self); /* tp_dealloc of all types */
/* __exit__: what close() returned, or None where an exception is under way that a failure to close would hide. */
PyObject *zx_py_exit(PyObject *args, PyObject *closed);
PyObject *zx_py_return_self(PyObject *self, PyObject *none);

/* ---- args.c: each false / NULL with ArgumentError or TypeError ---- */
bool zx_py_dtype(zx_py_state *st, const char *name, zx_dtype *out);
bool zx_py_shape(zx_py_state *st, PyObject *shape, int max_dims, int *ndim, int64_t *dims); /* int or sequence */
bool zx_py_ints(zx_py_state *st, PyObject *sequence, const char *what, int n_max, int64_t *out, int *n);
bool zx_py_floats(zx_py_state *st, PyObject *sequence, const char *what, int n_max, double *out, int *n);
/* PyMem memory; *keep holds the objects that own the names until the caller is done. */
bool zx_py_records(zx_py_state *st, PyObject *records, zx_param **out, int64_t *n, PyObject **keep);
bool zx_py_names(zx_py_state *st, PyObject *names, const char ***out, int32_t *n, PyObject **keep);
bool zx_py_hypers(zx_py_state *st, PyObject *sequence, int32_t n_groups, zx_hyper **out);
bool zx_py_slice_kind(zx_py_state *st, const char *name, zx_slice_kind *out);
PyObject *zx_py_shape_tuple(int ndim, const int64_t *shape);
/* Puts a value into a dictionary and gives up the reference; false with a Python error, also when value is NULL. */
bool zx_py_put(PyObject *dict, const char *key, PyObject *value);
bool zx_py_put_int(PyObject *dict, const char *key, int64_t value);
PyObject *zx_py_store_bytes_dict(const zx_store_bytes *b);

/* ---- numpy_bridge.c: the only file that knows NumPy's C interface ---- */
enum { ZX_PY_MAX_DIMS = 32 };

typedef struct zx_py_array { /* a look at an ndarray; borrowed */
    PyObject *object;
    void *data;
    zx_dtype dtype;
    int ndim;
    int64_t shape[ZX_PY_MAX_DIMS];
    int64_t n;
    size_t bytes;
    bool writeable;
} zx_py_array;

bool zx_py_numpy_open(void);
/* A C-contiguous ndarray in the machine's byte order. dtype_name "bfloat16" reads uint16 so; "" takes the array's. */
bool zx_py_look(zx_py_state *st, PyObject *object, const char *what, const char *dtype_name, zx_py_array *out);
PyObject *zx_py_array_new(zx_dtype dtype, int ndim, const int64_t *shape); /* bfloat16 as uint16; not filled */
void *zx_py_array_data(PyObject *array);
/* An array over memory that `base` (stolen, also on failure) keeps alive. */
PyObject *zx_py_array_over(zx_dtype dtype, int ndim, const int64_t *shape, void *data, PyObject *base, bool writeable);
/* bfloat16 widened to float32. */
PyObject *zx_py_array_widened(int ndim, const int64_t *shape, const void *bf16);
bool zx_py_is_number(PyObject *object); /* a Python or NumPy number, not an array and no bool */
/* Converts what a pass is given: out is a new reference to a C-contiguous array in out_dtype. values false: only its
 * shape matters. */
bool zx_py_convert(zx_py_state *st, PyObject *object, const char *name, const char *dtype_name, zx_dtype float_dtype,
                   bool values, zx_py_array *out);

/* ---- types ---- */
extern PyType_Spec zx_py_meeting_spec, zx_py_comm_spec, zx_py_partitioner_spec, zx_py_engine_spec, zx_py_tensor_spec;
extern PyMethodDef zx_py_functions[];

/* type_meeting.c */
void zx_py_meeting_lose(zx_py_meeting *m); /* a Comm that met there is closed; gives up its reference */

/* type_comm.c */
bool zx_py_comm_enter(zx_py_comm *self, const char *method); /* also: it is open */

/* comm_calls.c: the collectives; documented in the table of type_comm.c */
#define ZX_PY_KW(name) PyObject *name(PyObject *self, PyObject *args, PyObject *kw)
#define ZX_PY_NOARGS(name) PyObject *name(PyObject *self, PyObject *none)
ZX_PY_KW(zx_py_comm_all_gather);
ZX_PY_KW(zx_py_comm_reduce_scatter);
ZX_PY_KW(zx_py_comm_all_reduce);
ZX_PY_KW(zx_py_comm_broadcast);
ZX_PY_KW(zx_py_comm_all_to_all);
ZX_PY_KW(zx_py_comm_send);
ZX_PY_KW(zx_py_comm_recv);
ZX_PY_NOARGS(zx_py_comm_barrier);
ZX_PY_KW(zx_py_comm_empty);
ZX_PY_KW(zx_py_comm_all_gather_bytes);
/* Frees what empty() allocated; no array of it may be alive. Without the GIL. */
void zx_py_comm_free_regions(zx_py_comm *c);

/* type_partitioner.c */
typedef struct zx_py_store_options {
    int shard_state, shard_grads, shard_params, prefetch, poison;
    int slots, grad_slots, moments;
    const char *reduce_at, *reduce_dtype, *optimizer;
} zx_py_store_options;
#define ZX_PY_STORE_DEFAULTS                                                                                           \
    {.shard_state = 1,                                                                                                 \
     .shard_grads = 1,                                                                                                 \
     .shard_params = 1,                                                                                                \
     .prefetch = 1,                                                                                                    \
     .slots = 2,                                                                                                       \
     .grad_slots = 2,                                                                                                  \
     .moments = -1,                                                                                                    \
     .reduce_at = "micro",                                                                                             \
     .reduce_dtype = "float32",                                                                                        \
     .optimizer = "adamw"}
/* Becomes a child of the Comm and shares its guard. */
bool zx_py_partitioner_join(zx_py_partitioner *self, PyObject *comm);
/* Fills policy and optimizer, and cuts the layout; self->dev is set. */
bool zx_py_partitioner_lay_out(zx_py_partitioner *self, PyObject *records, PyObject *units, int world,
                               const zx_py_store_options *options, zx_optimizer *optimizer);
bool zx_py_partitioner_check_open(zx_py_partitioner *self, const char *method);
/* Takes the guard of an open object; needs_store: also, it does more than plan. */
bool zx_py_partitioner_enter(zx_py_partitioner *self, const char *method, bool needs_store);
void zx_py_partitioner_end(void *self);
int zx_py_partitioner_traverse(PyObject *self, visitproc visit, void *arg);

/* store_methods.c: the verbs; documented in the table of type_partitioner.c */
ZX_PY_KW(zx_py_store_acquire);
ZX_PY_KW(zx_py_store_release);
ZX_PY_KW(zx_py_store_prefetch);
ZX_PY_KW(zx_py_store_grad);
ZX_PY_KW(zx_py_store_reduce);
ZX_PY_KW(zx_py_store_count);
ZX_PY_KW(zx_py_store_step);
ZX_PY_NOARGS(zx_py_store_zero_grad);
ZX_PY_NOARGS(zx_py_store_begin_pass);
ZX_PY_NOARGS(zx_py_store_abandon_pass);
ZX_PY_KW(zx_py_store_unit_state);

/* store_values.c: looking in, and values in and out; likewise */
ZX_PY_NOARGS(zx_py_store_layout);
ZX_PY_NOARGS(zx_py_store_bytes);
ZX_PY_NOARGS(zx_py_store_bytes_held);
ZX_PY_KW(zx_py_store_stats);
ZX_PY_KW(zx_py_store_has_slice);
ZX_PY_KW(zx_py_store_read_slice);
ZX_PY_NOARGS(zx_py_store_load_begin);
ZX_PY_KW(zx_py_store_write_slice);
ZX_PY_NOARGS(zx_py_store_load_end);
ZX_PY_KW(zx_py_store_gather);
ZX_PY_KW(zx_py_store_pieces);

/* type_tensor.c */
/* A Tensor that waits for its zx_tensor: set t, or give it up. */
zx_py_tensor *zx_py_tensor_new(zx_py_partitioner *engine);
/* Applies an operation; in: n Tensors or NULL, which the caller holds. A new Tensor, or NULL with a Python error. */
PyObject *zx_py_apply(zx_py_partitioner *engine, const char *op, zx_py_tensor *const *in, int n_in,
                      const zx_attrs *attrs);

#endif
