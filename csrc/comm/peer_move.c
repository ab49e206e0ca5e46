/* peer_move.c - what a round of a collective copies and sums.
 *
 * A phase moves one unit per pair of ranks. Shared: everybody reads the whole unit of a rank (all_gather, broadcast,
 * the second phase of all_reduce). Sliced: a rank's source holds one unit for each reader (reduce_scatter, all_to_all,
 * the first phase of all_reduce). A round moves the elements [lo, hi) of every unit. A small all_reduce is one shared
 * phase: every rank sums everything, in the same order, so the bits are those of the two phases.
 */
#include "comm/peer.h"

#include <string.h>

typedef struct phase {
    bool sliced;
    bool sums;
    int64_t unit;    /* elements; the longest where they differ */
    int64_t total;   /* of all units of all_reduce, whose last ones are shorter; else world x unit */
    int64_t cap;     /* elements of a unit in one round through the ring */
    int64_t lo, hi;  /* of this round */
    size_t elem;     /* bytes */
    bool data;       /* false: the empty last round */
} phase;

static int64_t ring_cap(const zx_peer *p, bool sliced, size_t elem)
{
    return (int64_t)(p->half_bytes / (elem * (sliced ? (size_t)p->comm->world : 1)));
}

static bool is_sliced(zx_comm_op op)
{
    return op == ZX_COMM_REDUCE_SCATTER || op == ZX_COMM_ALL_TO_ALL;
}

int zx_peer_n_rounds(const zx_peer *p, const zx_call *call, int *out_n_first, bool *out_eager)
{
    int64_t world = p->comm->world;
    size_t elem = zx_dtype_bytes(call->send_dtype);
    bool sliced = is_sliced(call->op);
    int64_t source = (sliced ? world : 1) * call->n * (int64_t)elem;
    int64_t limit = ZX_PEER_EAGER_BYTES;
    if (call->op == ZX_COMM_ALL_REDUCE && world > 1) {
        /* Every rank sums everything: more additions, but no second exchange of fresh lines. Two ranks, 64 KB and
         * 256 KB registered: 3 and 9 us instead of 9 and 23; through the ring 10 and 36 instead of 15 and 42. */
        limit = zx_min64(zx_max64(limit, ZX_PEER_SUM_BYTES / (world - 1)), (int64_t)p->half_bytes);
    }
    *out_eager = source <= limit;
    *out_n_first = 1;
    if (*out_eager) {
        return 1;
    }
    if (call->op == ZX_COMM_ALL_REDUCE) {
        int64_t piece = zx_ceil_div(call->n, world);
        *out_n_first = (int)zx_ceil_div(piece, ring_cap(p, true, elem));
        return *out_n_first + (int)zx_ceil_div(piece, ring_cap(p, false, elem)) + 1;
    }
    *out_n_first = (int)zx_ceil_div(call->n, ring_cap(p, sliced, elem));
    return *out_n_first + 1;
}

/* reads: as a reader, who takes everything in the first round where all sources lie in place; else as a source. */
static phase phase_of(const zx_ticket *t, bool reads)
{
    const zx_call *call = &t->call;
    zx_comm *comm = t->comm;
    bool reduce = call->op == ZX_COMM_ALL_REDUCE, second = reduce && !t->eager && t->step >= t->n_first;
    phase f = {.elem = zx_dtype_bytes(call->send_dtype)};
    f.sliced = is_sliced(call->op) || (reduce && !t->eager && !second);
    f.sums = call->op == ZX_COMM_REDUCE_SCATTER || (reduce && !second);
    f.unit = reduce && !t->eager ? zx_ceil_div(call->n, comm->world) : call->n;
    f.total = reduce && !t->eager ? call->n : f.unit * comm->world;
    f.data = t->eager ? t->step == 0 : t->step < t->n_rounds - 1;
    f.cap = t->eager ? f.unit : ring_cap(zx_peer_of(comm), f.sliced, f.elem);
    int64_t chunk = second ? t->step - t->n_first : t->step;
    f.lo = zx_min64(chunk * f.cap, f.unit);
    f.hi = zx_min64(f.lo + f.cap, f.unit);
    if (reads && t->all_in_place) {
        f.hi = f.unit;
        f.data = f.data && chunk == 0;
    }
    return f;
}

/* Elements of this round in the unit with number `at`. */
static int64_t round_elems(const phase *f, int at)
{
    int64_t len = zx_min64(f->unit, zx_max64(f->total - f->unit * at, 0));
    return zx_max64(zx_min64(f->hi, len) - f->lo, 0);
}

const void *zx_peer_source(const zx_ticket *t, size_t *out_bytes)
{
    const zx_call *call = &t->call;
    phase f = phase_of(t, false);
    int me = t->comm->rank;
    if (call->op == ZX_COMM_ALL_REDUCE && !f.sliced && !t->eager) {
        *out_bytes = (size_t)zx_min64(f.unit, zx_max64(f.total - f.unit * me, 0)) * f.elem;
        return (const char *)call->recv + (size_t)(f.unit * me) * f.elem;
    }
    *out_bytes = (size_t)(f.sliced ? f.total : f.unit) * f.elem;
    if (call->op == ZX_COMM_BARRIER || (call->op == ZX_COMM_BROADCAST && call->peer != me)) {
        *out_bytes = 0;
    }
    return call->send;
}

void zx_peer_fill_ring(const zx_ticket *t)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    phase f = phase_of(t, false);
    size_t bytes = 0;
    const char *source = zx_peer_source(t, &bytes);
    char *ring = zx_peer_ring(p, comm->rank, t->round);
    if (!f.data || bytes == 0 || comm->world == 1) {
        return;
    }
    if (!f.sliced) {
        int64_t n = zx_min64(f.hi, (int64_t)(bytes / f.elem)) - f.lo;
        if (n > 0) {
            memcpy(ring, source + (size_t)f.lo * f.elem, (size_t)n * f.elem);
        }
        return;
    }
    for (int d = 0; d < comm->world; d++) {
        int64_t n = round_elems(&f, d);
        if (d != comm->rank && n > 0) {
            memcpy(ring + (size_t)(d * f.cap) * f.elem, source + (size_t)(d * f.unit + f.lo) * f.elem,
                   (size_t)n * f.elem);
        }
    }
}

zx_status zx_peer_meet(zx_ticket *t)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    phase f = phase_of(t, false);
    int n_sources = 0, n_placed = 0;
    bool all_read = true;
    for (int r = 0; r < comm->world; r++) {
        /* A shorter or empty unit of all_reduce's second phase is read as far as it goes. */
        int64_t len = f.sliced ? f.total : zx_min64(f.unit, zx_max64(f.total - f.unit * r, 0));
        t->src[r].base = NULL;
        if (len == 0 || (t->call.op == ZX_COMM_BROADCAST && r != t->call.peer)) {
            continue;
        }
        n_sources++;
        if (r == comm->rank) {
            n_placed += t->header.id >= 0;
            continue;
        }
        const zx_header *h = &zx_peer_round_slot(p, comm->rank, r, t->round)->header;
        ZX_TRY(zx_peer_resolve(comm, r, h, (size_t)len * f.elem, &t->src[r].base));
        n_placed += t->src[r].base != NULL;
        all_read = all_read && t->src[r].base != NULL;
    }
    t->all_in_place = all_read && !t->eager;
    t->any_placed = n_placed > 0;
    t->all_placed = n_placed > 0 && n_placed == n_sources;
    return ZX_OK;
}

/* Where rank r's elements for this rank begin. */
static const char *place_of(const zx_ticket *t, const phase *f, int r)
{
    zx_comm *comm = t->comm;
    size_t slice = f->sliced ? (size_t)(comm->rank * f->unit) : 0;
    if (r == comm->rank) {
        return (const char *)t->call.send + (slice + (size_t)f->lo) * f->elem;
    }
    if (t->src[r].base != NULL) {
        return t->src[r].base + (slice + (size_t)f->lo) * f->elem;
    }
    const char *ring = zx_peer_ring(zx_peer_of(comm), r, t->round);
    return ring + (f->sliced ? (size_t)(comm->rank * f->cap) * f->elem : 0);
}

static zx_status move_sum(zx_ticket *t, const phase *f)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    bool reduce = t->call.op == ZX_COMM_ALL_REDUCE;
    int64_t n = f->sliced ? round_elems(f, reduce ? comm->rank : 0) : f->unit;
    size_t at = (size_t)(f->lo + (reduce && f->sliced ? f->unit * comm->rank : 0));
    zx_sum_sources_args args = {.n_src = comm->world,
                                .src_dtype = t->call.send_dtype,
                                .out = (char *)t->call.recv + at * zx_dtype_bytes(t->call.recv_dtype),
                                .out_dtype = t->call.recv_dtype,
                                .n = n,
                                .accumulate = t->call.accumulate};
    zx_exec exec = {.isa = p->isa};
    if (n <= 0) {
        return ZX_OK;
    }
    for (int r = 0; r < comm->world; r++) {
        args.src[r] = place_of(t, f, r);
    }
    return p->sum->launch(&exec, &args);
}

static void move_copy(zx_ticket *t, const phase *f)
{
    const zx_call *call = &t->call;
    int me = t->comm->rank, world = t->comm->world;
    if (call->op == ZX_COMM_BROADCAST) {
        if (me != call->peer && f->hi > f->lo) {
            memcpy((char *)call->recv + (size_t)f->lo * f->elem, place_of(t, f, call->peer),
                   (size_t)(f->hi - f->lo) * f->elem);
        }
        return;
    }
    bool second = call->op == ZX_COMM_ALL_REDUCE; /* its own piece is in place already */
    for (int i = second ? 1 : 0; i < world; i++) {
        int r = (me + i) % world;
        int64_t n = round_elems(f, second ? r : 0);
        char *to = (char *)call->recv + (size_t)(r * f->unit + f->lo) * f->elem;
        const char *from = n > 0 ? place_of(t, f, r) : to;
        if (n > 0 && from != to) {
            memcpy(to, from, (size_t)n * f->elem);
        }
    }
}

zx_status zx_peer_move(zx_ticket *t)
{
    phase f = phase_of(t, true);
    if (!f.data || t->call.op == ZX_COMM_BARRIER) {
        return ZX_OK;
    }
    if (f.sums) {
        return move_sum(t, &f);
    }
    move_copy(t, &f);
    return ZX_OK;
}
