/* peer_pair.c - send and recv.
 *
 * Each ordered pair of ranks has two slots in the receiver's control memory (header and "sent" flag, alternating), an
 * acknowledging flag in the sender's, and two halves of staging in the sender's. Round t of a pair is sent when flag t
 * is signalled; the sender may use a half again when t - 2 is acknowledged. Registered sources are read in place in the
 * first round, and the sender then waits for the last acknowledgement; else it is done when its data is in the staging.
 * So a send of more than 128 KB, or of registered memory, waits for its recv.
 */
#include "comm/peer.h"

#include <string.h>

static int64_t pair_cap(const zx_call *call)
{
    return ZX_PEER_PAIR_BYTES / (int64_t)zx_dtype_bytes(call->send_dtype);
}

static int pair_rounds(const zx_call *call)
{
    return (int)zx_max64(zx_ceil_div(call->n, pair_cap(call)), 1);
}

static size_t chunk_bytes(const zx_ticket *t, size_t *out_from)
{
    int64_t cap = pair_cap(&t->call), lo = zx_min64(t->step * cap, t->call.n);
    size_t elem = zx_dtype_bytes(t->call.send_dtype);
    *out_from = (size_t)lo * elem;
    return (size_t)(zx_min64(lo + cap, t->call.n) - lo) * elem;
}

/* ---- sender ----------------------------------------------------------------------------------------- */

static zx_status on_send_begin(void *arg)
{
    zx_ticket *t = arg;
    if (zx_comm_failed(t->comm)) {
        return zx_peer_ticket_drop(t);
    }
    zx_peer_enter(t);
    if (t->first_round > 2) {
        zx_peer_wait_for(zx_peer_of(t->comm), ZX_WAIT_ACK, t->call.peer, t->first_round - 2);
    }
    return ZX_OK;
}

static zx_status on_send_step(void *arg)
{
    zx_ticket *t = arg;
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    int to = t->call.peer;
    uint64_t round = t->first_round + (uint64_t)t->step;
    if (zx_comm_failed(comm)) {
        return zx_peer_ticket_drop(t);
    }
    if (t->header.id < 0) {
        size_t from = 0, bytes = chunk_bytes(t, &from);
        if (bytes > 0) {
            memcpy(zx_peer_staging(p, comm->rank, to, round), (const char *)t->call.send + from, bytes);
        }
    }
    zx_peer_pair_slot(p, to, comm->rank, round)->header = t->header;
    t->step++;
    if (t->step < t->n_rounds) {
        zx_peer_wait_for(p, ZX_WAIT_ACK, to, round > 1 ? round - 1 : 0);
    } else {
        zx_peer_wait_for(p, ZX_WAIT_ACK, to, t->header.id >= 0 ? round : 0);
    }
    return ZX_OK;
}

static zx_status on_send_end(void *arg)
{
    zx_ticket *t = arg;
    if (zx_comm_failed(t->comm)) {
        return zx_peer_ticket_drop(t);
    }
    zx_peer_leave(t);
    return ZX_OK;
}

zx_status zx_peer_send(zx_ticket *t, zx_stream *stream)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    const zx_call *call = &t->call;
    int to = call->peer;
    t->call.seq = ++p->n_sends[to];
    t->eager = false;
    t->n_rounds = pair_rounds(call);
    t->first_round = p->out[to] + 1;
    p->out[to] += (uint64_t)t->n_rounds;
    uint64_t first = t->first_round, last = p->out[to];
    zx_peer_describe(t, call->send, (size_t)call->n * zx_dtype_bytes(call->send_dtype));
    bool in_place = t->header.id >= 0;
    const uint64_t *ack = zx_peer_ack(p, comm->rank, to);
    /* From here on an inline stream may end the ticket: only the copies above are used. */
    ZX_TRY(zx_stream_call(stream, "send", on_send_begin, t));
    for (uint64_t round = first; round <= last; round++) {
        if (round > 2) {
            ZX_TRY(zx_stream_wait(stream, ack, round - 2));
        }
        ZX_TRY(zx_stream_call(stream, "send", on_send_step, t));
        ZX_TRY(zx_stream_signal(stream, zx_peer_pair_slot(p, to, comm->rank, round)->flag, round));
    }
    if (in_place) {
        ZX_TRY(zx_stream_wait(stream, ack, last));
    }
    ZX_TRY(zx_stream_call(stream, "send", on_send_end, t));
    return ZX_OK;
}

/* ---- receiver --------------------------------------------------------------------------------------- */

static zx_status on_recv_begin(void *arg)
{
    zx_ticket *t = arg;
    if (zx_comm_failed(t->comm)) {
        return zx_peer_ticket_drop(t);
    }
    zx_peer_enter(t);
    zx_peer_wait_for(zx_peer_of(t->comm), ZX_WAIT_SENT, t->call.peer, t->first_round);
    return ZX_OK;
}

static zx_status find_sent(zx_ticket *t, const zx_header *theirs)
{
    size_t bytes = (size_t)t->call.n * zx_dtype_bytes(t->call.send_dtype);
    ZX_TRY(zx_peer_compare(t, t->call.peer, theirs));
    ZX_TRY(zx_peer_resolve(t->comm, t->call.peer, theirs, bytes, &t->src[0].base));
    if (t->src[0].base != NULL && bytes > 0) {
        memcpy(t->call.recv, t->src[0].base, bytes);
    }
    return ZX_OK;
}

static zx_status on_recv_step(void *arg)
{
    zx_ticket *t = arg;
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    int from_rank = t->call.peer;
    uint64_t round = t->first_round + (uint64_t)t->step;
    if (zx_comm_failed(comm)) {
        return zx_peer_ticket_drop(t);
    }
    if (t->step == 0) {
        zx_status status = find_sent(t, &zx_peer_pair_slot(p, comm->rank, from_rank, round)->header);
        if (status != ZX_OK) {
            if (!zx_comm_failed(comm)) {
                zx_comm_fail(comm, status, true, zx_error_last()->text);
            }
            return zx_peer_ticket_drop(t);
        }
    }
    if (t->src[0].base == NULL) {
        size_t at = 0, bytes = chunk_bytes(t, &at);
        if (bytes > 0) {
            memcpy((char *)t->call.recv + at, zx_peer_staging(p, from_rank, comm->rank, round), bytes);
        }
    }
    t->step++;
    if (t->step < t->n_rounds) {
        zx_peer_wait_for(p, ZX_WAIT_SENT, from_rank, round + 1);
    } else {
        zx_peer_leave(t);
    }
    return ZX_OK;
}

zx_status zx_peer_recv(zx_ticket *t, zx_stream *stream)
{
    zx_comm *comm = t->comm;
    zx_peer *p = zx_peer_of(comm);
    const zx_call *call = &t->call;
    int from = call->peer;
    t->call.seq = ++p->n_recvs[from];
    t->eager = true; /* its own memory is of no interest to the sender */
    t->n_rounds = pair_rounds(call);
    t->first_round = p->in[from] + 1;
    p->in[from] += (uint64_t)t->n_rounds;
    uint64_t first = t->first_round, last = p->in[from];
    zx_peer_describe(t, NULL, 0);
    ZX_TRY(zx_stream_call(stream, "recv", on_recv_begin, t));
    for (uint64_t round = first; round <= last; round++) {
        ZX_TRY(zx_stream_wait(stream, zx_peer_pair_slot(p, comm->rank, from, round)->flag, round));
        ZX_TRY(zx_stream_call(stream, "recv", on_recv_step, t));
        ZX_TRY(zx_stream_signal(stream, zx_peer_ack(p, from, comm->rank), round));
    }
    return ZX_OK;
}
