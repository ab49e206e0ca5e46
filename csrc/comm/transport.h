/* transport.h - inside of the communicators: the object, the vtable of a transport, and how failures travel. Shared by
 * comm.c, comm_call.c, comm_local.c and comm_peer*.c. Not for other layers.
 */
#ifndef ZX_COMM_TRANSPORT_H
#define ZX_COMM_TRANSPORT_H

#include "comm/comm.h"

#include <pthread.h>
#include <stdatomic.h>

enum { ZX_WHY_TEXT = 128, ZX_CALL_TEXT = 160, ZX_LABEL = 24 };

typedef enum zx_comm_op {
    ZX_COMM_ALL_GATHER = 1,
    ZX_COMM_REDUCE_SCATTER,
    ZX_COMM_ALL_REDUCE,
    ZX_COMM_BROADCAST,
    ZX_COMM_ALL_TO_ALL,
    ZX_COMM_BARRIER,
    ZX_COMM_SEND,
    ZX_COMM_RECV,
} zx_comm_op;

typedef struct zx_call { /* one collective or pairwise call, checked */
    zx_comm_op op;
    zx_dtype send_dtype, recv_dtype;
    bool accumulate;
    int peer; /* root of a broadcast, partner of send and recv; else 0 */
    int64_t n;
    const void *send;
    void *recv;
    uint64_t seq; /* in the communicator; of the pair for send and recv */
    char label[ZX_LABEL]; /* zero-padded */
} zx_call;

typedef struct zx_transport {
    const char *name;
    /* False: cannot serve these ranks, and why. Local knowledge only; the ranks compare afterwards. */
    bool (*probe)(zx_device *dev, zx_bootstrap *bs, int world, char why[ZX_WHY_TEXT]);
    zx_status (*open)(zx_comm *comm); /* collective over comm->group; on failure close is called */
    void (*close)(zx_comm *comm);
    zx_status (*submit)(zx_comm *comm, zx_stream *stream, const zx_call *call);
    zx_status (*enlist)(zx_comm *comm, zx_mem *mem, void *base, int *out_id); /* register */
    zx_status (*alias)(zx_comm *comm, int id, const void *addr, size_t offset, size_t bytes);
    zx_status (*delist)(zx_comm *comm, int id); /* unregister */
    size_t (*bytes)(const zx_comm *comm); /* device memory of this rank */
    void (*release)(zx_comm *root); /* the fault is set: let every wait of the family go; any thread */
} zx_transport;

extern const zx_transport zx_transport_local;
extern const zx_transport zx_transport_peer;

/* The first failure of a root communicator and its children. */
typedef struct zx_comm_fault {
    pthread_mutex_t lock;
    _Atomic int status; /* zx_status; the text is complete before it is set */
    char text[ZX_ERROR_TEXT];
} zx_comm_fault;

struct zx_comm {
    const zx_transport *transport;
    zx_device *dev;
    zx_bootstrap *bs;
    zx_comm *parent; /* NULL: this is a root */
    zx_comm *root;
    int rank, world;
    int32_t *ranks; /* (world) ranks of the bootstrap */
    zx_group group;
    double timeout_s;
    size_t ring_bytes;
    bool inline_streams; /* on every rank, a stream executes its work inside the call */
    uint64_t n_splits;
    uint64_t seq; /* collectives so far */
    char label[ZX_LABEL]; /* of the next call */
    zx_comm_counters counters;
    char choice[3 * ZX_WHY_TEXT];
    zx_comm_fault fault; /* of a root */
    bool fault_ready;
    void *state; /* the transport's */
};

const char *zx_comm_op_name(zx_comm_op op);
/* "all_gather #17 (1,024 float32)" */
void zx_call_text(const zx_comm *comm, const zx_call *call, char text[ZX_CALL_TEXT]);

/* Records the first failure of the family, tells the other ranks when `tell`, and lets waits go. Any thread. */
void zx_comm_fail(zx_comm *comm, zx_status status, bool tell, const char *text);
static inline bool zx_comm_failed(const zx_comm *comm)
{
    return atomic_load_explicit(&comm->root->fault.status, memory_order_acquire) != ZX_OK;
}

#endif
