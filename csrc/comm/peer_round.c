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
    atomic_store_explicit(&place->inside, 1, memory_order_release);
    /* One thread drives a device, so this counter has one writer and needs no locked addition. */
    atomic_store_explicit(&board->n_inside, atomic_load_explicit(&board->n_inside, RELAXED) + 1, memory_order_release);
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

void zx_peer_describe(zx_ticket *t, const void *source, size_t bytes)
{
    const zx_call *call = &t->call;
    zx_header *h = &t->header;
    int up = 0, id = -1;
    size_t offset = 0;
    if (t->eager || bytes == 0 || !zx_peer_find(t->comm, source, bytes, &up, &id, &offset)) {
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
                     .up = (uint8_t)up};
    memcpy(h->label, call->label, sizeof h->label);
}

static void describe_header(const zx_comm *comm, const zx_header *h, char text[ZX_CALL_TEXT])
{
    zx_call call = {.op = h->op,
                    .send_dtype = h->send_dtype,
                    .recv_dtype = h->recv_dtype,
                    .n = h->n,
                    .peer = h->peer,
                    .seq = h->seq};
    memcpy(call.label, h->label, sizeof call.label);
    zx_call_text(comm, &call, text);
}

zx_status zx_peer_compare(zx_ticket *t, int peer, const zx_header *theirs)
{
    const zx_header *mine = &t->header;
    bool pairwise = mine->op == ZX_COMM_RECV;
    bool same = theirs->seq == mine->seq && theirs->n == mine->n && theirs->send_dtype == mine->send_dtype &&
                theirs->recv_dtype == mine->recv_dtype && memcmp(theirs->label, mine->label, sizeof mine->label) == 0 &&
                (pairwise || (theirs->op == mine->op && theirs->peer == mine->peer));
    if (same) {
        return ZX_OK;
    }
    zx_comm *comm = t->comm;
    char a[ZX_CALL_TEXT], b[ZX_CALL_TEXT], text[ZX_ERROR_TEXT];
    describe_header(comm, mine, a);
    describe_header(comm, theirs, b);
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
    uint64_t round = t->first_round + (uint64_t)t->step;
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
    for (int r = 0; begins && r < comm->world; r++) {
        if (r != comm->rank) {
            zx_peer_round_slot(p, r, comm->rank, round)->header = t->header;
        }
    }
    zx_peer_wait_for(p, ZX_WAIT_ROUND, 0, round);
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
    uint64_t round = t->first_round + (uint64_t)t->step;
    for (int r = 0; r < comm->world; r++) {
        if (r != comm->rank) {
            ZX_TRY(zx_peer_compare(t, r, &zx_peer_round_slot(p, comm->rank, r, round)->header));
        }
    }
    ZX_TRY(zx_peer_meet(t));
    return ZX_OK;
}

static zx_status on_step(void *arg)
{
    zx_ticket *t = arg;
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
    t->step++;
    if (t->step == t->n_rounds) {
        zx_peer_leave(t);
    } else {
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

zx_status zx_peer_collective(zx_ticket *t, zx_stream *stream)
{
    zx_peer *p = zx_peer_of(t->comm);
    const char *name = zx_comm_op_name(t->call.op);
    t->n_rounds = zx_peer_n_rounds(p, &t->call, &t->n_first, &t->eager);
    t->first_round = p->round + 1;
    p->round += (uint64_t)t->n_rounds;
    uint64_t first = t->first_round;
    int n_rounds = t->n_rounds; /* an inline stream may end the ticket in its last step */
    ZX_TRY(zx_stream_call(stream, name, on_begin, t));
    for (int k = 0; k < n_rounds; k++) {
        ZX_TRY(put_round(t, stream, first + (uint64_t)k));
        ZX_TRY(zx_stream_call(stream, name, on_step, t));
    }
    return ZX_OK;
}
