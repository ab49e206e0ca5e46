/* peer_round.c - a collective as rounds in a stream: header, signals, waits, step; see the DESIGN in comm_peer.c. */
#include "comm/peer.h"

#include <stdio.h>
#include <string.h>

#define RELAXED memory_order_relaxed

void zx_peer_enter(zx_ticket *t)
{
    const zx_call *call = &t->call;
    zx_comm *comm = t->comm;
    zx_place *place = zx_peer_place(zx_peer_of(comm), comm->rank);
    zx_board *board = zx_peer_board(zx_peer_of(comm->root), comm->root->rank);
    atomic_store_explicit(&place->seq, call->seq, RELAXED);
    atomic_store_explicit(&place->n, call->n, RELAXED);
    atomic_store_explicit(
        &place->kind, (uint32_t)call->op | (uint32_t)call->send_dtype << 8 | (uint32_t)call->recv_dtype << 16, RELAXED);
    atomic_store_explicit(&place->peer, call->peer, RELAXED);
    uint64_t label[ZX_LABEL / 8];
    memcpy(label, call->label, sizeof label);
    for (int i = 0; i < ZX_LABEL / 8; i++) {
        atomic_store_explicit(&place->label[i], label[i], RELAXED);
    }
    atomic_store_explicit(&place->inside, 1, memory_order_release);
    /* One thread drives a device, so this counter has one writer and needs no locked addition. */
    atomic_store_explicit(&board->n_inside, atomic_load_explicit(&board->n_inside, RELAXED) + 1, memory_order_release);
}

void zx_peer_read_label(const zx_place *place, char label[ZX_LABEL])
{
    uint64_t words[ZX_LABEL / 8];
    for (int i = 0; i < ZX_LABEL / 8; i++) {
        words[i] = atomic_load_explicit(&place->label[i], RELAXED);
    }
    memcpy(label, words, sizeof words);
}

void zx_peer_leave(zx_ticket *t)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    zx_board *board = zx_peer_board(zx_peer_of(comm->root), comm->root->rank);
    zx_peer_wait_for(p, ZX_WAIT_NONE, 0, 0);
    atomic_store_explicit(&zx_peer_place(p, comm->rank)->inside, 0, memory_order_release);
    atomic_store_explicit(&board->n_inside, atomic_load_explicit(&board->n_inside, RELAXED) - 1, memory_order_release);
    zx_peer_ticket_done(t);
}

void zx_peer_wait_for(zx_peer *p, zx_wait_kind kind, int peer, uint64_t value)
{
    zx_waiting *w = &p->waiting;
    atomic_store_explicit(&w->kind, (uint32_t)kind, RELAXED);
    atomic_store_explicit(&w->peer, peer, RELAXED);
    atomic_store_explicit(&w->value, value, RELAXED);
    atomic_store_explicit(&w->ticket, atomic_load_explicit(&w->ticket, RELAXED) + 1, memory_order_release);
}

static uint64_t hash_label(const char label[ZX_LABEL])
{
    uint64_t words[ZX_LABEL / 8], h = 0;
    if (label[0] == '\0') {
        return 0;
    }
    memcpy(words, label, sizeof words);
    for (int i = 0; i < ZX_LABEL / 8; i++) {
        h = (h ^ words[i]) * 0x9e3779b97f4a7c15u;
        h ^= h >> 29;
    }
    return h != 0 ? h : 1;
}

void zx_peer_describe(zx_ticket *t, const void *source, size_t bytes)
{
    const zx_call *call = &t->call;
    zx_header *h = &t->header;
    int up = 0, id = -1;
    size_t offset = 0;
    if ((t->eager && !t->direct) || bytes == 0 || !zx_peer_find(t->comm, source, bytes, &up, &id, &offset)) {
        id = -1;
        offset = 0;
    }
    *h = (zx_header){.seq = call->seq,
                     .n = call->n,
                     .offset = offset,
                     .id = id,
                     .peer = call->peer,
                     .op = (uint8_t)call->op,
                     .send_dtype = (uint8_t)call->send_dtype,
                     .recv_dtype = (uint8_t)call->recv_dtype,
                     .up = (uint8_t)up,
                     .label = hash_label(call->label)};
}

/* The words of the label are those of the rank's place, if it still is in this call. */
static void describe_header(const zx_comm *comm, int rank, const zx_header *h, char text[ZX_CALL_TEXT])
{
    const zx_place *place = zx_peer_place(zx_peer_of(comm), rank);
    zx_call call = {.op = h->op,
                    .send_dtype = h->send_dtype,
                    .recv_dtype = h->recv_dtype,
                    .n = h->n,
                    .peer = h->peer,
                    .seq = h->seq};
    zx_peer_read_label(place, call.label);
    if (hash_label(call.label) != h->label) {
        memset(call.label, 0, sizeof call.label);
    }
    zx_call_text(comm, &call, text);
}

zx_status zx_peer_compare(zx_ticket *t, int peer, const zx_header *theirs)
{
    const zx_header *mine = &t->header;
    bool pairwise = mine->op == ZX_COMM_RECV;
    bool same = theirs->seq == mine->seq && theirs->n == mine->n && theirs->send_dtype == mine->send_dtype &&
                theirs->recv_dtype == mine->recv_dtype && theirs->label == mine->label &&
                (pairwise || (theirs->op == mine->op && theirs->peer == mine->peer));
    if (same) {
        return ZX_OK;
    }
    zx_comm *comm = t->comm;
    char a[ZX_CALL_TEXT], b[ZX_CALL_TEXT], text[ZX_ERROR_TEXT];
    describe_header(comm, comm->rank, mine, a);
    describe_header(comm, peer, theirs, b);
    snprintf(text, sizeof text,
             "the ranks disagree: rank %d called %s, rank %d called %s; all ranks must make the same calls in the same "
             "order",
             (int)comm->ranks[comm->rank], a, (int)comm->ranks[peer], b);
    zx_comm_fail(comm, ZX_ERR_PEER, true, text);
    return zx_comm_check(comm);
}

zx_status zx_peer_resolve(zx_comm *comm, int peer, const zx_header *h, size_t bytes, const char **out)
{
    *out = NULL;
    if (h->id < 0) {
        return ZX_OK;
    }
    zx_comm *c = comm;
    int rank = peer;
    for (int i = 0; i < h->up && c != NULL; i++) {
        c = c->parent;
    }
    for (int r = 0; c != NULL && c != comm && r < c->world; r++) {
        rank = c->ranks[r] == comm->ranks[peer] ? r : rank;
    }
    zx_peer *p = c != NULL ? zx_peer_of(c) : NULL;
    if (p == NULL || h->id >= p->n_lists || p->lists[h->id] == NULL) {
        ZX_FAIL(ZX_ERR_BUG, "rank %d reads from registered object %d, which rank %d does not know",
                (int)comm->ranks[peer], (int)h->id, (int)comm->ranks[comm->rank]);
    }
    const zx_import *import = &p->lists[h->id]->peer[rank];
    if (h->offset > import->bytes || bytes > import->bytes - h->offset) {
        ZX_FAIL(ZX_ERR_BUG, "rank %d names bytes [%llu, %llu) of its registered object %d, which has %zu",
                (int)comm->ranks[peer], (unsigned long long)h->offset, (unsigned long long)h->offset + bytes,
                (int)h->id, import->bytes);
    }
    *out = import->addr + h->offset;
    return ZX_OK;
}

/* ---- steps ------------------------------------------------------------------------------------------ */

static bool phase_begins(const zx_ticket *t)
{
    return t->step == 0 || (t->step == t->n_first && t->step < t->n_rounds - 1);
}

static void publish(zx_ticket *t)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    uint64_t round = t->round;
    bool begins = phase_begins(t);
    if (begins) {
        size_t bytes = 0;
        const void *source = zx_peer_source(t, &bytes);
        t->all_in_place = false;
        zx_peer_describe(t, source, bytes);
    }
    if (t->header.id < 0) {
        zx_peer_fill_ring(t);
    }
    zx_peer_wait_for(p, ZX_WAIT_ROUND, 0, round);
    for (int r = 0; begins && r < comm->world; r++) {
        if (r != comm->rank) {
            zx_peer_round_slot(p, r, comm->rank, round)->header = t->header;
        }
    }
}

static zx_status on_begin(void *arg)
{
    zx_ticket *t = arg;
    if (zx_comm_failed(t->comm)) {
        return zx_peer_ticket_drop(t);
    }
    zx_peer_enter(t);
    publish(t);
    return ZX_OK;
}

static zx_status meet(zx_ticket *t)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    for (int r = 0; r < comm->world; r++) {
        if (r != comm->rank) {
            ZX_TRY(zx_peer_compare(t, r, &zx_peer_round_slot(p, comm->rank, r, t->round)->header));
        }
    }
    ZX_TRY(zx_peer_meet(t));
    return ZX_OK;
}

/* The step that comes after this one. On inline streams, rounds in which nobody would read anything are left out; all
 * ranks know that alike, from the headers of all. */
static int next_step(zx_ticket *t, bool may_skip)
{
    bool last_phase = t->step >= t->n_first || t->call.op != ZX_COMM_ALL_REDUCE || t->eager;
    int data_end = t->eager ? 1 : t->n_rounds - 1; /* of the data rounds of the last phase */
    int next = t->step + 1;
    if (!may_skip || t->step >= data_end) {
        return next;
    }
    if (t->eager && t->any_placed) {
        t->n_rounds = 2; /* the second tells that the sources have been read */
    }
    if (t->all_placed) {
        next = last_phase ? data_end : t->n_first;
    }
    return last_phase && next == data_end && !t->any_placed ? t->n_rounds : next;
}

/* Everything between the waits of this round and the next; the ticket is at its end when step is n_rounds. */
static zx_status advance(zx_ticket *t, bool may_skip)
{
    if (zx_comm_failed(t->comm)) {
        return zx_peer_ticket_drop(t);
    }
    zx_status status = phase_begins(t) ? meet(t) : ZX_OK;
    if (status == ZX_OK) {
        status = zx_peer_move(t);
    }
    if (status != ZX_OK) {
        if (!zx_comm_failed(t->comm)) {
            zx_comm_fail(t->comm, status, true, zx_error_last()->text);
        }
        return zx_peer_ticket_drop(t);
    }
    t->step = next_step(t, may_skip);
    return ZX_OK;
}

static zx_status on_step(void *arg)
{
    zx_ticket *t = arg;
    ZX_TRY(advance(t, false));
    if (t->step == t->n_rounds) {
        zx_peer_leave(t);
    } else {
        t->round++;
        publish(t);
    }
    return ZX_OK;
}

static zx_status put_round(zx_ticket *t, zx_stream *stream, uint64_t round)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    for (int i = 1; i < comm->world; i++) { /* each rank begins with its neighbour */
        int r = (comm->rank + i) % comm->world;
        ZX_TRY(zx_stream_signal(stream, zx_peer_round_slot(p, r, comm->rank, round)->flag, round));
    }
    for (int r = 0; r < comm->world; r++) {
        if (r != comm->rank) {
            ZX_TRY(zx_stream_wait(stream, zx_peer_round_slot(p, comm->rank, r, round)->flag, round));
        }
    }
    return ZX_OK;
}

/* The same steps without the detour through the stream, which executes everything at once anyway. */
static zx_status run_inline(zx_ticket *t, zx_stream *stream)
{
    zx_peer *p = zx_peer_of(t->comm);
    int64_t begin_ns = zx_timeline_on() ? zx_now_ns() : 0;
    ZX_TRY(on_begin(t));
    for (;;) {
        p->round = t->round;
        ZX_TRY(put_round(t, stream, t->round));
        ZX_TRY(advance(t, true));
        if (t->step == t->n_rounds) {
            break;
        }
        t->round++;
        publish(t);
    }
    if (begin_ns != 0) {
        int64_t bytes = t->call.n * (int64_t)zx_dtype_bytes(t->call.send_dtype);
        zx_timeline_add(zx_comm_op_name(t->call.op), 1, begin_ns, zx_now_ns(), bytes);
    }
    zx_peer_leave(t);
    return ZX_OK;
}

zx_status zx_peer_collective(zx_ticket *t, zx_stream *stream)
{
    zx_peer *p = zx_peer_of(t->comm);
    const zx_call *call = &t->call;
    const char *name = zx_comm_op_name(call->op);
    t->n_rounds = zx_peer_n_rounds(p, call, &t->n_first, &t->eager);
    t->round = p->round + 1;
    if (p->inline_streams) {
        /* In place, a small all_reduce overwrites what the others would still read. */
        bool in_place = call->op == ZX_COMM_ALL_REDUCE && call->send == call->recv;
        t->direct = !in_place && call->n * (int64_t)zx_dtype_bytes(call->send_dtype) > ZX_PEER_DIRECT_BYTES;
        return run_inline(t, stream);
    }
    uint64_t first = t->round;
    int n_rounds = t->n_rounds; /* a stream that executes early may end the ticket in its last step */
    p->round += (uint64_t)n_rounds;
    ZX_TRY(zx_stream_call(stream, name, on_begin, t));
    for (int k = 0; k < n_rounds; k++) {
        ZX_TRY(put_round(t, stream, first + (uint64_t)k));
        ZX_TRY(zx_stream_call(stream, name, on_step, t));
    }
    return ZX_OK;
}
