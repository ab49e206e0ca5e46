/* comm.h - collectives behind one vtable: local (world 1), peer (ranks of one host, written over the device vtable),
 * and later nccl (with the CUDA device).
 *
 * Every collective is put into a stream and is complete, in stream order, when every rank has read this rank's source:
 * afterwards the source may be overwritten. All ranks of a communicator make the same calls in the same order; each
 * call has a sequence number and a fingerprint (operation, count, dtype, root, label) which host transports compare
 * before data moves: ranks that disagree both get ZX_ERR_PEER that shows both calls.
 *
 * Counts are elements. Sums are formed in rank order in fp32 (F64 for F64, integers exactly), so every rank and every
 * run gets the same bits; an all_reduce is a reduce_scatter and an all_gather.
 *
 * Failure: a rank that dies, stalls past the deadline, aborts or calls something else is named, with operation and
 * sequence number, in the error of every other rank. The communicator is then poisoned: every later call returns the
 * first error. On inline streams a collective returns its own error; on queued streams zx_comm_check (after a sync)
 * does. Waits themselves carry no deadline: the communicator's watchdog releases them.
 */
#ifndef ZX_COMM_COMM_H
#define ZX_COMM_COMM_H

#include "comm/bootstrap.h"

typedef struct zx_comm zx_comm;

typedef struct zx_comm_counters { /* of this rank, since open or reset; elements and bytes that others had to read */
    int64_t n_calls;
    int64_t sent_elems; /* all_gather: n x (world-1); reduce_scatter: n_out x (world-1); all_reduce: both; and so on */
    int64_t sent_bytes;
} zx_comm_counters;

typedef struct zx_comm_config {
    const char *transport; /* NULL or "auto": first of the preference table whose probe succeeds; or a name */
    double timeout_s; /* <= 0: the bootstrap's */
    size_t ring_bytes; /* peer: staging for memory that is not registered; 0 = 4 MiB a rank */
} zx_comm_config;

/* Collective. dev and bs are borrowed and must outlive the communicator. */
ZX_CHECKED zx_status zx_comm_open(zx_device *dev, zx_bootstrap *bs, const zx_comm_config *config, zx_comm **out);
void zx_comm_close(zx_comm *comm); /* orderly when all is well; never hangs */
int zx_comm_rank(const zx_comm *comm);
int zx_comm_world(const zx_comm *comm);
zx_device *zx_comm_device(const zx_comm *comm);
zx_bootstrap *zx_comm_bootstrap(const zx_comm *comm);
const char *zx_comm_transport(const zx_comm *comm);
const char *zx_comm_choice(const zx_comm *comm); /* why this transport and not those before it, one line */
size_t zx_comm_bytes(const zx_comm *comm); /* device memory of this rank: flags, headers, ring */
zx_comm_counters zx_comm_counters_get(const zx_comm *comm);
void zx_comm_counters_reset(zx_comm *comm);

/* ---- collectives ---- */
/* What the next call is about ("blocks.3"): part of its fingerprint, shown in errors. The first 23 characters count.
 * Without it, two ranks that reduce different things of equal size would go unnoticed. */
void zx_comm_label(zx_comm *c, const char *label);
/* recv (world x n) = every rank's send (n) in rank order. In place: send == recv + rank*n elements. */
ZX_CHECKED zx_status zx_comm_all_gather(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t);
/* recv (n) = [recv +] sum over ranks of their send[rank*n ...]. send (world x n) in send_dtype (wire format); recv in
 * recv_dtype (F32 for F32 or BF16 sends, otherwise equal). In place: recv == send + rank*n when dtypes are equal and
 * accumulate is false. */
ZX_CHECKED zx_status zx_comm_reduce_scatter(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n,
                                            zx_dtype send_dtype, zx_dtype recv_dtype, bool accumulate);
/* recv (n) = sum over ranks of send (n). May be in place. */
ZX_CHECKED zx_status zx_comm_all_reduce(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t);
ZX_CHECKED zx_status zx_comm_broadcast(zx_comm *c, zx_stream *s, void *buf, int64_t n, zx_dtype t, int root);
/* recv[p*n ...] on rank r = send[r*n ...] of rank p. Not in place. */
ZX_CHECKED zx_status zx_comm_all_to_all(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t);
/* Pairwise; only the two ranks take part and only their pair's sequence numbers advance. */
ZX_CHECKED zx_status zx_comm_send(zx_comm *c, zx_stream *s, const void *buf, int64_t n, zx_dtype t, int peer);
ZX_CHECKED zx_status zx_comm_recv(zx_comm *c, zx_stream *s, void *buf, int64_t n, zx_dtype t, int peer);
ZX_CHECKED zx_status zx_comm_barrier(zx_comm *c, zx_stream *s);

/* ---- structure ---- */
/* Collective over all ranks of c; ranks of one colour form a communicator, ordered by (key, rank); a negative colour
 * gets NULL. The child borrows c's device, bootstrap and watchdog; close children first. */
ZX_CHECKED zx_status zx_comm_split(zx_comm *c, int colour, int key, zx_comm **out);
/* Collective: makes a shareable memory object known to all ranks, so that sources inside it are read in place. `base`
 * is where this rank mapped it. Sizes may differ. The object must stay alive until unregister or close. */
ZX_CHECKED zx_status zx_comm_register(zx_comm *c, zx_mem *mem, void *base, int *out_id);
/* Local: [addr, addr + bytes) of this rank maps the bytes at `offset` of registered object `id` (unit addresses). */
ZX_CHECKED zx_status zx_comm_alias(zx_comm *c, int id, const void *addr, size_t offset, size_t bytes);
/* Local, so that a rank which fails can clean up alone: waits for this rank's own calls; the others keep their mapping
 * until they unregister as well. Afterwards no rank may name the object in a call. */
ZX_CHECKED zx_status zx_comm_unregister(zx_comm *c, int id);

/* ---- failure ---- */
void zx_comm_abort(zx_comm *c, const char *why); /* this rank gives up; the others get its reason */
ZX_CHECKED zx_status zx_comm_check(zx_comm *c); /* ZX_OK or the first error */

#endif
