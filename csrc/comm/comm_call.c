/* comm_call.c - the calls of comm.h: checks, counters, and on to the transport. */
#include "comm/transport.h"

#include <stdio.h>
#include <string.h>

/* Of a call: with 8 bytes each, from every rank, the sum of all still fits 63 bits. */
#define MAX_ELEMS ((int64_t)1 << 46)

static int64_t sent_elems(const zx_comm *c, const zx_call *call)
{
    int64_t others = c->world - 1;
    switch (call->op) {
    case ZX_COMM_ALL_GATHER:
    case ZX_COMM_REDUCE_SCATTER:
    case ZX_COMM_ALL_TO_ALL:
        return call->n * others;
    case ZX_COMM_ALL_REDUCE: {
        int64_t piece = zx_ceil_div(call->n, c->world);
        int64_t mine = zx_min64(piece, zx_max64(call->n - piece * c->rank, 0));
        return call->n - mine + mine * others;
    }
    case ZX_COMM_BROADCAST:
        return call->peer == c->rank ? call->n * others : 0;
    case ZX_COMM_SEND:
        return call->n;
    case ZX_COMM_RECV:
    case ZX_COMM_BARRIER:
        return 0;
    }
    return 0;
}

static zx_status check_call(const zx_comm *c, const zx_stream *s, const zx_call *call, int64_t n_send, int64_t n_recv)
{
    const char *name = zx_comm_op_name(call->op);
    if ((unsigned)call->send_dtype >= ZX_N_DTYPE || (unsigned)call->recv_dtype >= ZX_N_DTYPE) {
        ZX_FAIL(ZX_ERR_ARG, "%s: there is no dtype %d", name,
                (unsigned)call->send_dtype >= ZX_N_DTYPE ? (int)call->send_dtype : (int)call->recv_dtype);
    }
    if (call->n < 0 || call->n > MAX_ELEMS) {
        ZX_FAIL(ZX_ERR_ARG, "%s of %lld elements: the count must be between 0 and %lld", name, (long long)call->n,
                (long long)MAX_ELEMS);
    }
    if ((call->send == NULL && n_send > 0) || (call->recv == NULL && n_recv > 0)) {
        ZX_FAIL(ZX_ERR_ARG, "%s of %lld elements: the %s address is NULL", name, (long long)call->n,
                call->send == NULL && n_send > 0 ? "source" : "destination");
    }
    if (call->peer < 0 || call->peer >= c->world) {
        ZX_FAIL(ZX_ERR_ARG, "%s: there is no rank %d in a communicator of %d", name, call->peer, c->world);
    }
    if (zx_stream_device(s) != c->dev) {
        ZX_FAIL(ZX_ERR_ARG, "%s: stream '%s' belongs to another device than the communicator", name, zx_stream_name(s));
    }
    return ZX_OK;
}

/* In place means exactly the documented place: any other overlap would mix old and new values. */
static zx_status check_overlap(const zx_call *call, int64_t n_send, int64_t n_recv, int64_t place_in_send,
                               int64_t place_in_recv)
{
    size_t se = zx_dtype_bytes(call->send_dtype), re = zx_dtype_bytes(call->recv_dtype);
    uintptr_t send = (uintptr_t)call->send, recv = (uintptr_t)call->recv;
    uintptr_t send_end = send + (size_t)n_send * se, recv_end = recv + (size_t)n_recv * re;
    if (n_send == 0 || n_recv == 0 || send_end <= recv || recv_end <= send) {
        return ZX_OK;
    }
    bool placed = place_in_send >= 0 && send + (size_t)place_in_send * se == recv + (size_t)place_in_recv * re &&
                  !call->accumulate && call->send_dtype == call->recv_dtype;
    if (!placed) {
        ZX_FAIL(ZX_ERR_ARG,
                "%s of %lld elements: source %p and destination %p overlap in a way that is not the in-place "
                "form of this call",
                zx_comm_op_name(call->op), (long long)call->n, call->send, call->recv);
    }
    return ZX_OK;
}

static bool summable(zx_dtype t)
{
    return t == ZX_F32 || t == ZX_BF16 || t == ZX_F64 || t == ZX_I32 || t == ZX_I64;
}

void zx_comm_label(zx_comm *c, const char *label)
{
    memset(c->label, 0, sizeof c->label);
    memcpy(c->label, label, strnlen(label, sizeof c->label - 1));
}

/* The first failure was noticed between two calls: the error also says which call could not begin. */
static zx_status refuse(zx_comm *c, const zx_call *call)
{
    char name[ZX_CALL_TEXT];
    zx_error first = *zx_error_last();
    zx_call next = *call;
    next.seq = c->seq + 1;
    zx_call_text(c, &next, name);
    return zx_error_set(first.status, first.native, NULL, __func__, __FILE__, __LINE__,
                        "%.560s; rank %d had come to %s", first.text, (int)c->ranks[c->rank], name);
}

static zx_status submit(zx_comm *c, zx_stream *s, zx_call *call)
{
    if (zx_comm_check(c) != ZX_OK) return refuse(c, call);
    memcpy(call->label, c->label, sizeof call->label);
    memset(c->label, 0, sizeof c->label);
    bool pairwise = call->op == ZX_COMM_SEND || call->op == ZX_COMM_RECV;
    call->seq = pairwise ? 0 : ++c->seq;
    int64_t sent = sent_elems(c, call);
    c->counters.n_calls++;
    c->counters.sent_elems += sent;
    c->counters.sent_bytes += sent * (int64_t)zx_dtype_bytes(call->send_dtype);
    zx_status status = c->transport->submit(c, s, call);
    if (status != ZX_OK && !zx_comm_failed(c)) { /* half of a call: the ranks are out of step */
        char text[ZX_ERROR_TEXT], name[ZX_CALL_TEXT];
        zx_call_text(c, call, name);
        snprintf(text, sizeof text, "rank %d left %s: %.560s", (int)c->ranks[c->rank], name, zx_error_last()->text);
        zx_comm_fail(c, status == ZX_ERR_INTERRUPTED ? status : ZX_ERR_PEER, true, text);
    }
    return status;
}

zx_status zx_comm_all_gather(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t)
{
    zx_call call = {.op = ZX_COMM_ALL_GATHER, .send_dtype = t, .recv_dtype = t, .n = n, .send = send, .recv = recv};
    ZX_TRY(check_call(c, s, &call, n, n));
    ZX_TRY(check_overlap(&call, n, n * c->world, 0, n * c->rank));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

zx_status zx_comm_reduce_scatter(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype send_dtype,
                                 zx_dtype recv_dtype, bool accumulate)
{
    zx_call call = {.op = ZX_COMM_REDUCE_SCATTER,
                    .send_dtype = send_dtype,
                    .recv_dtype = recv_dtype,
                    .accumulate = accumulate,
                    .n = n,
                    .send = send,
                    .recv = recv};
    ZX_TRY(check_call(c, s, &call, n, n));
    if (!summable(send_dtype) || (recv_dtype != send_dtype && !(send_dtype == ZX_BF16 && recv_dtype == ZX_F32))) {
        ZX_FAIL(ZX_ERR_UNSUPPORTED,
                "reduce_scatter from %s to %s: sums exist for float32, bfloat16 (also to float32), "
                "float64, int32 and int64",
                zx_dtype_name(send_dtype), zx_dtype_name(recv_dtype));
    }
    ZX_TRY(check_overlap(&call, n * c->world, n, n * c->rank, 0));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

zx_status zx_comm_all_reduce(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t)
{
    zx_call call = {.op = ZX_COMM_ALL_REDUCE, .send_dtype = t, .recv_dtype = t, .n = n, .send = send, .recv = recv};
    ZX_TRY(check_call(c, s, &call, n, n));
    if (!summable(t)) {
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "all_reduce of %s: sums exist for float32, bfloat16, float64, int32 and int64",
                zx_dtype_name(t));
    }
    ZX_TRY(check_overlap(&call, n, n, 0, 0));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

zx_status zx_comm_broadcast(zx_comm *c, zx_stream *s, void *buf, int64_t n, zx_dtype t, int root)
{
    zx_call call = {
        .op = ZX_COMM_BROADCAST, .send_dtype = t, .recv_dtype = t, .peer = root, .n = n, .send = buf, .recv = buf};
    ZX_TRY(check_call(c, s, &call, n, n));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

zx_status zx_comm_all_to_all(zx_comm *c, zx_stream *s, const void *send, void *recv, int64_t n, zx_dtype t)
{
    zx_call call = {.op = ZX_COMM_ALL_TO_ALL, .send_dtype = t, .recv_dtype = t, .n = n, .send = send, .recv = recv};
    ZX_TRY(check_call(c, s, &call, n, n));
    ZX_TRY(check_overlap(&call, n * c->world, n * c->world, -1, 0));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

static zx_status pairwise(zx_comm *c, zx_stream *s, zx_call *call)
{
    ZX_TRY(check_call(c, s, call, call->op == ZX_COMM_SEND ? call->n : 0, call->op == ZX_COMM_RECV ? call->n : 0));
    if (call->peer == c->rank) {
        ZX_FAIL(ZX_ERR_ARG, "rank %d cannot %s with itself", c->rank, zx_comm_op_name(call->op));
    }
    ZX_TRY(submit(c, s, call));
    return ZX_OK;
}

zx_status zx_comm_send(zx_comm *c, zx_stream *s, const void *buf, int64_t n, zx_dtype t, int peer)
{
    zx_call call = {.op = ZX_COMM_SEND, .send_dtype = t, .recv_dtype = t, .peer = peer, .n = n, .send = buf};
    return pairwise(c, s, &call);
}

zx_status zx_comm_recv(zx_comm *c, zx_stream *s, void *buf, int64_t n, zx_dtype t, int peer)
{
    zx_call call = {.op = ZX_COMM_RECV, .send_dtype = t, .recv_dtype = t, .peer = peer, .n = n, .recv = buf};
    return pairwise(c, s, &call);
}

zx_status zx_comm_barrier(zx_comm *c, zx_stream *s)
{
    zx_call call = {.op = ZX_COMM_BARRIER, .send_dtype = ZX_U8, .recv_dtype = ZX_U8};
    ZX_TRY(check_call(c, s, &call, 0, 0));
    ZX_TRY(submit(c, s, &call));
    return ZX_OK;
}

zx_status zx_comm_register(zx_comm *c, zx_mem *mem, void *base, int *out_id)
{
    *out_id = -1;
    ZX_TRY(zx_comm_check(c));
    ZX_TRY(c->transport->enlist(c, mem, base, out_id));
    return ZX_OK;
}

zx_status zx_comm_alias(zx_comm *c, int id, const void *addr, size_t offset, size_t bytes)
{
    ZX_TRY(c->transport->alias(c, id, addr, offset, bytes));
    return ZX_OK;
}

zx_status zx_comm_unregister(zx_comm *c, int id)
{
    ZX_TRY(zx_comm_check(c));
    ZX_TRY(c->transport->delist(c, id));
    return ZX_OK;
}
