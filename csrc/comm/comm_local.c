/* comm_local.c - a world of one rank: every collective is at most a copy. */
#include "comm/transport.h"

#include <stdio.h>

static bool local_probe(zx_device *dev, zx_bootstrap *bs, int world, char why[ZX_WHY_TEXT])
{
    (void)dev;
    (void)bs;
    if (world != 1) {
        snprintf(why, ZX_WHY_TEXT, "serves one rank, there are %d", world);
    }
    return world == 1;
}

static zx_status local_open(zx_comm *comm)
{
    (void)comm;
    return ZX_OK;
}

static void local_close(zx_comm *comm)
{
    (void)comm;
}

static zx_status local_sum(zx_stream *stream, const zx_call *call)
{
    zx_sum_sources_args args = {.src = {call->send},
                                .n_src = 1,
                                .src_dtype = call->send_dtype,
                                .out = call->recv,
                                .out_dtype = call->recv_dtype,
                                .n = call->n,
                                .accumulate = call->accumulate};
    ZX_TRY(ZX_LAUNCH(stream, sum_sources, &args));
    return ZX_OK;
}

static zx_status local_submit(zx_comm *comm, zx_stream *stream, const zx_call *call)
{
    (void)comm;
    switch (call->op) {
    case ZX_COMM_REDUCE_SCATTER:
        if (call->accumulate || call->send_dtype != call->recv_dtype) {
            ZX_TRY(local_sum(stream, call));
            return ZX_OK;
        }
        break;
    case ZX_COMM_SEND:
    case ZX_COMM_RECV:
        ZX_FAIL(ZX_ERR_ARG, "the only rank of a communicator cannot %s: there is no partner",
                zx_comm_op_name(call->op));
    case ZX_COMM_BROADCAST:
    case ZX_COMM_BARRIER:
        return ZX_OK;
    case ZX_COMM_ALL_GATHER:
    case ZX_COMM_ALL_REDUCE:
    case ZX_COMM_ALL_TO_ALL:
        break;
    }
    if (call->n > 0 && call->send != call->recv) {
        ZX_TRY(zx_stream_copy(stream, call->recv, call->send, (size_t)call->n * zx_dtype_bytes(call->send_dtype)));
    }
    return ZX_OK;
}

static zx_status local_enlist(zx_comm *comm, zx_mem *mem, void *base, int *out_id)
{
    (void)comm;
    (void)mem;
    (void)base;
    *out_id = 0;
    return ZX_OK;
}

static zx_status local_alias(zx_comm *comm, int id, const void *addr, size_t offset, size_t bytes)
{
    (void)comm;
    (void)id;
    (void)addr;
    (void)offset;
    (void)bytes;
    return ZX_OK;
}

static zx_status local_delist(zx_comm *comm, int id)
{
    (void)comm;
    (void)id;
    return ZX_OK;
}

static size_t local_bytes(const zx_comm *comm)
{
    (void)comm;
    return 0;
}

static void local_release(zx_comm *root)
{
    (void)root;
}

const zx_transport zx_transport_local = {
    .name = "local",
    .probe = local_probe,
    .open = local_open,
    .close = local_close,
    .submit = local_submit,
    .enlist = local_enlist,
    .alias = local_alias,
    .delist = local_delist,
    .bytes = local_bytes,
    .release = local_release,
};
