/* peer.h - inside of the peer transport; the DESIGN is told in comm_peer.c.
 *
 * comm_peer.c        set-up, close, release
 * peer_round.c       collectives as rounds: headers, flags, order in the stream
 * peer_move.c        what is copied and summed in a round
 * peer_pair.c        send and recv
 * peer_list.c        registered memory
 * peer_watch.c       the watchdog: who does not come
 */
#ifndef ZX_COMM_PEER_H
#define ZX_COMM_PEER_H

#include "comm/transport.h"

enum {
    ZX_PEER_MAX = ZX_MAX_SOURCES,
    ZX_PEER_EAGER_BYTES = 16 * 1024, /* a rank's source up to here takes one round through the ring */
    ZX_PEER_SUM_BYTES = 512 * 1024, /* likewise all_reduce, over the number of other ranks */
    ZX_PEER_DIRECT_BYTES = 512,      /* on inline streams, from here on only if it is not registered */
    ZX_PEER_PAIR_BYTES = 64 * 1024,  /* one half of the staging of a pair */
    ZX_PEER_BEAT_MS = 50,
};

/* ---- what lies in control memory; other ranks read and write it through their mapping ---- */

typedef struct zx_header { /* one rank's description of its call */
    uint64_t seq;
    int64_t n;
    uint64_t offset; /* of the source in the registered object */
    int32_t id;      /* of the registered object; -1: the source passes through the ring */
    int32_t peer;
    uint8_t op, send_dtype, recv_dtype;
    uint8_t up; /* how many communicators up the object was registered */
    uint32_t unused;
    uint64_t label; /* hash of the call's label; 0: none. The words are in the place */
} zx_header;

/* Written by one other rank. The header travels in the line of the flag: a second line would cost a second miss. */
typedef struct zx_slot {
    uint64_t flag[ZX_FLAG_OWN_BYTES / 8]; /* flag[0] counts; the rest is the device's */
    zx_header header;
} zx_slot;

_Static_assert(sizeof(zx_header) == 48 && sizeof(zx_slot) == ZX_FLAG_BYTES, "flag and header fill one line");

/* What this rank is doing in this communicator; written by itself, read by the watchdogs of all ranks. */
typedef struct zx_place {
    _Atomic uint64_t seq; /* of the last call begun, in stream order */
    _Atomic int64_t n;
    _Atomic uint32_t kind;   /* op | send_dtype << 8 | recv_dtype << 16 */
    _Atomic int32_t peer;
    _Atomic uint32_t inside; /* 1: in a call */
    _Atomic uint32_t closed;
    _Atomic uint64_t label[ZX_LABEL / 8];
} zx_place;

/* Of the whole process's rank; the root's is used. */
typedef struct zx_board {
    _Atomic uint64_t beat;     /* counts while the watchdog lives */
    _Atomic uint32_t n_inside; /* calls that are being waited in, over the family */
    _Atomic uint32_t failed;   /* the text below is complete: this rank gives up */
    char text[ZX_ERROR_TEXT];
} zx_board;

typedef struct zx_control_layout { /* offsets in bytes, alike on all ranks */
    size_t place, board, round_slots, pair_slots, acks, ring, pairs, total;
} zx_control_layout;

/* ---- local objects ---- */

typedef struct zx_import {
    zx_mem *mem; /* NULL: nothing */
    char *addr;
    size_t bytes; /* reserved */
} zx_import;

typedef struct zx_enlisted { /* a registered object */
    bool used;
    size_t bytes;
    zx_import peer[ZX_PEER_MAX]; /* [rank]; its own addr is the base */
} zx_enlisted;

typedef struct zx_span { /* [begin, end) of this rank's addresses = bytes of a registered object */
    uintptr_t begin, end;
    size_t offset;
    int id;
} zx_span;

typedef enum zx_wait_kind { ZX_WAIT_NONE = 0, ZX_WAIT_ROUND, ZX_WAIT_SENT, ZX_WAIT_ACK } zx_wait_kind;

typedef struct zx_waiting { /* what the stream waits for; written in stream order, read by the watchdog */
    _Atomic uint64_t ticket; /* counts the waits */
    _Atomic uint32_t kind;
    _Atomic int32_t peer;
    _Atomic uint64_t value;
} zx_waiting;

typedef struct zx_source { /* where a rank's data is found in this phase */
    const char *base; /* in place: its first element; NULL: in its ring */
} zx_source;

typedef struct zx_ticket { /* one call on its way through a stream */
    struct zx_ticket *next;
    struct zx_ticket *all_next;
    zx_comm *comm;
    zx_call call;
    zx_header header;     /* of the phase */
    uint64_t first_round; /* of a pair: its rounds are first_round ... first_round + n_rounds - 1 */
    uint64_t round;       /* of a collective: the current one */
    int n_rounds, n_first; /* all; of the first phase (all_reduce has two), without the last, empty one */
    int step;             /* rounds done */
    bool eager;
    bool direct;       /* registered sources are read in place even in a small call */
    bool all_in_place; /* of those that this rank reads */
    bool any_placed, all_placed; /* among all sources of the phase: known to and alike on every rank */
    bool flying; /* counted in n_flying */
    zx_source src[ZX_PEER_MAX];
} zx_ticket;

typedef struct zx_peer {
    zx_comm *comm;
    zx_control_layout lay;
    zx_import control[ZX_PEER_MAX]; /* [rank]; its own included */
    size_t half_bytes;              /* of the ring */
    uint64_t round;                 /* given out so far */
    uint64_t out[ZX_PEER_MAX], in[ZX_PEER_MAX];             /* pair rounds given out, by partner */
    uint64_t n_sends[ZX_PEER_MAX], n_recvs[ZX_PEER_MAX];    /* pair calls */
    zx_waiting waiting;
    zx_ticket *free_tickets, *all_tickets;
    int64_t n_flying; /* tickets in streams; only touched by threads that drive the device */
    zx_stream *stream; /* the last one used */
    zx_enlisted **lists; /* (n_lists) by id */
    int n_lists;
    zx_span *spans; /* (n_spans) sorted */
    int64_t n_spans, cap_spans;
    bool inline_streams; /* on every rank: work is done when the call returns */
    const zx_kernel *sum;
    zx_isa isa;

    /* family, guarded by the root's watch_lock */
    struct zx_peer *family; /* of a root: all members, itself included */
    struct zx_peer *next;
    uint64_t seen_ticket;   /* the watchdog's: since when the wait has not moved */
    int64_t seen_ns;

    /* of a root */
    pthread_mutex_t watch_lock;
    pthread_cond_t watch_wake;
    pthread_t watch;
    bool watch_ready, watch_runs, watch_stop;
    double silent_s; /* without a beat for so long, a rank is taken to be stopped */
    uint64_t beat[ZX_PEER_MAX];
    int64_t beat_ns[ZX_PEER_MAX];
} zx_peer;

static inline zx_peer *zx_peer_of(const zx_comm *comm)
{
    return comm->state;
}
static inline char *zx_peer_at(const zx_peer *p, int rank, size_t offset)
{
    return p->control[rank].addr + offset;
}
static inline zx_place *zx_peer_place(const zx_peer *p, int rank)
{
    return (zx_place *)zx_peer_at(p, rank, p->lay.place);
}
static inline zx_board *zx_peer_board(const zx_peer *p, int rank)
{
    return (zx_board *)zx_peer_at(p, rank, p->lay.board);
}
/* In the memory of `owner`: what `writer` says to it in rounds of this parity. */
static inline zx_slot *zx_peer_round_slot(const zx_peer *p, int owner, int writer, uint64_t round)
{
    return (zx_slot *)zx_peer_at(p, owner, p->lay.round_slots) + 2 * writer + (round & 1);
}
static inline zx_slot *zx_peer_pair_slot(const zx_peer *p, int owner, int writer, uint64_t count)
{
    return (zx_slot *)zx_peer_at(p, owner, p->lay.pair_slots) + 2 * writer + (count & 1);
}
static inline uint64_t *zx_peer_ack(const zx_peer *p, int owner, int writer)
{
    return (uint64_t *)zx_peer_at(p, owner, p->lay.acks + (size_t)writer * 128);
}
static inline char *zx_peer_ring(const zx_peer *p, int rank, uint64_t round)
{
    return zx_peer_at(p, rank, p->lay.ring + (round & 1) * p->half_bytes);
}
/* Staging in the memory of `from` for `to`. */
static inline char *zx_peer_staging(const zx_peer *p, int from, int to, uint64_t count)
{
    return zx_peer_at(p, from, p->lay.pairs + (size_t)(2 * to + (int)(count & 1)) * ZX_PEER_PAIR_BYTES);
}

/* comm_peer.c */
ZX_CHECKED zx_status zx_peer_import(zx_comm *comm, int fd, size_t bytes, zx_import *out);
void zx_peer_drop(zx_comm *comm, zx_import *import);
ZX_CHECKED zx_status zx_peer_ticket(zx_comm *comm, const zx_call *call, zx_ticket **out);
void zx_peer_ticket_done(zx_ticket *ticket);
void zx_peer_ticket_land(zx_ticket *ticket); /* not in flight any more; its steps may still come, and do nothing */
/* The same, and the first failure of the family; never ZX_OK. */
ZX_CHECKED zx_status zx_peer_ticket_drop(zx_ticket *ticket);
ZX_CHECKED zx_status zx_peer_drain(zx_comm *comm); /* until no call is in a stream */

/* peer_round.c */
ZX_CHECKED zx_status zx_peer_collective(zx_ticket *t, zx_stream *stream);
void zx_peer_enter(zx_ticket *ticket); /* the place says: in this call */
void zx_peer_read_label(const zx_place *place, char label[ZX_LABEL]);
void zx_peer_wait_for(zx_peer *p, zx_wait_kind kind, int peer, uint64_t value);
void zx_peer_leave(zx_ticket *ticket); /* out of it, and the ticket is free again */
void zx_peer_describe(zx_ticket *ticket, const void *source, size_t bytes); /* fills ticket->header */
/* ZX_OK, or the family fails with both calls in the text. */
ZX_CHECKED zx_status zx_peer_compare(zx_ticket *ticket, int peer, const zx_header *theirs);
/* Address of a source in place, or NULL for the ring. */
ZX_CHECKED zx_status zx_peer_resolve(zx_comm *comm, int peer, const zx_header *h, size_t bytes, const char **out);

/* peer_move.c */
int zx_peer_n_rounds(const zx_peer *p, const zx_call *call, int *out_n_first, bool *out_eager);
const void *zx_peer_source(const zx_ticket *t, size_t *out_bytes); /* of the phase; what a header describes */
ZX_CHECKED zx_status zx_peer_meet(zx_ticket *t); /* finds the sources of a phase; the headers have been compared */
void zx_peer_fill_ring(const zx_ticket *t);
ZX_CHECKED zx_status zx_peer_move(zx_ticket *t);

/* peer_pair.c */
ZX_CHECKED zx_status zx_peer_send(zx_ticket *t, zx_stream *stream);
ZX_CHECKED zx_status zx_peer_recv(zx_ticket *t, zx_stream *stream);

/* peer_list.c */
ZX_CHECKED zx_status zx_peer_enlist(zx_comm *comm, zx_mem *mem, void *base, int *out_id);
ZX_CHECKED zx_status zx_peer_alias(zx_comm *comm, int id, const void *addr, size_t offset, size_t bytes);
ZX_CHECKED zx_status zx_peer_delist(zx_comm *comm, int id);
void zx_peer_delist_all(zx_comm *comm);
/* Finds the registered bytes behind [addr, addr + bytes) in this communicator or one above. */
bool zx_peer_find(const zx_comm *comm, const void *addr, size_t bytes, int *out_up, int *out_id, size_t *out_offset);

/* peer_watch.c */
ZX_CHECKED zx_status zx_peer_watch_start(zx_comm *root);
void zx_peer_watch_stop(zx_comm *root);
void zx_peer_watch_add(zx_comm *comm);
void zx_peer_watch_remove(zx_comm *comm);
void zx_peer_release(zx_comm *root);

#endif
