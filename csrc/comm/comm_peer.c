/* comm_peer.c - ranks of one host that read each other's memory.
 *
 * DESIGN
 * Each rank owns one shareable memory object, its control memory, which every other rank maps: slots with flags and
 * headers, a ring for sources that nobody else can see, staging for pairs, and what the watchdogs look at. Between
 * processes the object travels as a descriptor; threads take the same way, so that each rank has mappings of its own
 * and no rank's close pulls memory from under another.
 *
 * A collective is a fixed number of rounds, known when it is put into the stream: a function of the call, the world and
 * the ring alone, so that all ranks agree on it. In round k (counted over all calls of the communicator) a rank writes
 * its header into its slot of each other rank, signals k there, waits until every other rank has signalled k to it, and
 * then moves data. Slots and ring halves alternate: who signals k + 1 has finished reading in round k, so that
 * everything used in round k may be overwritten in round k + 2, after the wait of round k + 1. That is the only rule
 * that the protocol needs; one wait per round serves as "my data is there" and as "I have read yours".
 *
 * Where the source lies in registered memory, the header says where, and the others read it in place, all of it in the
 * first round; a last, empty round tells that everybody has read it. A source that is not registered is copied into the
 * ring, half a ring per round. The ranks of one call may differ in this. Small calls take the ring in a single round,
 * on inline streams only if they are not registered.
 *
 * Headers are compared before data moves. Waits end by the flag, or because the watchdog (peer_watch.c) has recorded a
 * failure and stored ZX_FLAG_ABORT into this rank's slots; every step looks at the failure first and then moves
 * nothing.
 *
 * All calls of one communicator must be ordered: one stream, or streams that wait for each other by events.
 */
#include "comm/peer.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static bool peer_probe(zx_device *dev, zx_bootstrap *bs, int world, char why[ZX_WHY_TEXT])
{
    const zx_device_caps *caps = zx_device_caps_get(dev);
    (void)bs;
    if (!caps->exports || !caps->host_addressable || !caps->computes) {
        snprintf(why, ZX_WHY_TEXT, "needs memory that other ranks can map, device '%s' has none", caps->name);
    } else if (world > ZX_PEER_MAX) {
        snprintf(why, ZX_WHY_TEXT, "serves at most %d ranks, there are %d", ZX_PEER_MAX, world);
    } else {
        return true;
    }
    return false;
}

/* ---- memory of other ranks -------------------------------------------------------------------------- */

zx_status zx_peer_import(zx_comm *comm, int fd, size_t bytes, zx_import *out)
{
    zx_status zx_rc_ = ZX_OK;
    void *addr = NULL;
    *out = (zx_import){0};
    ZX_TRY(zx_mem_import(comm->dev, fd, bytes, &out->mem));
    ZX_TRY_GOTO(zx_device_reserve(comm->dev, bytes, &addr), fail);
    out->addr = addr;
    out->bytes = bytes;
    ZX_TRY_GOTO(zx_device_map(comm->dev, addr, out->mem, 0, bytes), fail);
    return ZX_OK;
fail:
    zx_peer_drop(comm, out);
    return zx_rc_;
}

void zx_peer_drop(zx_comm *comm, zx_import *import)
{
    if (import->addr != NULL && import->bytes > 0) {
        zx_device_unreserve(comm->dev, import->addr, import->bytes);
    }
    zx_mem_close(import->mem);
    *import = (zx_import){0};
}

static void lay_out(zx_peer *p, int world, size_t granule)
{
    zx_control_layout *l = &p->lay;
    size_t n = (size_t)world;
    size_t ring = (size_t)zx_round_up((int64_t)zx_max64((int64_t)p->comm->ring_bytes, (int64_t)n * 2 * 4096), 8192);
    p->half_bytes = ring / 2;
    if (p->half_bytes < (size_t)ZX_PEER_EAGER_BYTES) {
        p->half_bytes = ZX_PEER_EAGER_BYTES;
    }
    l->place = 0;
    l->board = 128;
    l->round_slots = l->board + (size_t)zx_round_up(sizeof(zx_board), 128);
    l->pair_slots = l->round_slots + n * 2 * sizeof(zx_slot); /* the two slots of a pair of ranks: 128 bytes */
    l->acks = l->pair_slots + n * 2 * sizeof(zx_slot);
    l->ring = (size_t)zx_round_up((int64_t)(l->acks + n * 128), 4096);
    l->pairs = l->ring + 2 * p->half_bytes;
    l->total = (size_t)zx_round_up((int64_t)(l->pairs + n * 2 * ZX_PEER_PAIR_BYTES), (int64_t)granule);
}

/* An import whose addr is set is mapped: nobody touches a reservation without bytes. */
static zx_status open_control(zx_comm *comm, int *out_fd)
{
    zx_status zx_rc_ = ZX_OK;
    zx_peer *p = zx_peer_of(comm);
    zx_import own = {.bytes = p->lay.total};
    void *addr = NULL;
    ZX_TRY(zx_mem_open(comm->dev, p->lay.total, true, &own.mem));
    ZX_TRY_GOTO(zx_device_reserve(comm->dev, p->lay.total, &addr), fail);
    own.addr = addr;
    ZX_TRY_GOTO(zx_device_map(comm->dev, addr, own.mem, 0, p->lay.total), fail);
    ZX_TRY_GOTO(zx_mem_export(own.mem, out_fd), fail);
    p->control[comm->rank] = own;
    return ZX_OK;
fail:
    zx_peer_drop(comm, &own);
    return zx_rc_;
}

static zx_status exchange_control(zx_comm *comm)
{
    zx_status zx_rc_ = ZX_OK;
    zx_peer *p = zx_peer_of(comm);
    int fd = -1, fds[ZX_PEER_MAX];
    ZX_TRY(open_control(comm, &fd));
    ZX_TRY_GOTO(zx_group_exchange_fds(comm->bs, &comm->group, "comm control memory", fd, fds), done);
    for (int r = 0; r < comm->world; r++) {
        if (fds[r] >= 0 && zx_rc_ == ZX_OK) {
            zx_rc_ = zx_peer_import(comm, fds[r], p->lay.total, &p->control[r]);
        }
        if (fds[r] >= 0) {
            close(fds[r]);
        }
    }
done:
    close(fd);
    return zx_rc_;
}

/* ---- tickets ---------------------------------------------------------------------------------------- */

zx_status zx_peer_ticket(zx_comm *comm, const zx_call *call, zx_ticket **out)
{
    zx_peer *p = zx_peer_of(comm);
    zx_ticket *t = p->free_tickets;
    *out = NULL;
    if (t != NULL) {
        p->free_tickets = t->next;
    } else {
        ZX_TRY(ZX_NEW(ZX_MEM_COMM, t));
        t->comm = comm;
        t->all_next = p->all_tickets;
        p->all_tickets = t;
    }
    t->call = *call;
    t->step = 0;
    t->direct = false;
    t->all_in_place = false;
    t->flying = true;
    p->n_flying++;
    *out = t;
    return ZX_OK;
}

void zx_peer_ticket_land(zx_ticket *t)
{
    zx_peer_of(t->comm)->n_flying -= t->flying;
    t->flying = false;
}

void zx_peer_ticket_done(zx_ticket *t)
{
    zx_peer *p = zx_peer_of(t->comm);
    zx_peer_ticket_land(t);
    t->next = p->free_tickets;
    p->free_tickets = t;
}

zx_status zx_peer_ticket_drop(zx_ticket *t)
{
    zx_peer_ticket_land(t);
    ZX_TRY(zx_comm_check(t->comm));
    ZX_FAIL(ZX_ERR_BUG, "a call was given up in a communicator that is well");
}

zx_status zx_peer_drain(zx_comm *comm)
{
    zx_peer *p = zx_peer_of(comm);
    if (p->n_flying > 0 && p->stream != NULL && !zx_comm_failed(comm)) {
        ZX_TRY(zx_stream_sync(p->stream));
    }
    ZX_TRY(zx_comm_check(comm));
    return ZX_OK;
}

/* ---- open and close --------------------------------------------------------------------------------- */

static zx_status peer_open(zx_comm *comm)
{
    zx_peer *p = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, p));
    comm->state = p;
    p->comm = comm;
    const zx_device_caps *caps = zx_device_caps_get(comm->dev);
    const zx_kernels *kernels = strcmp(caps->name, "ref") == 0 ? zx_kernels_ref() : zx_kernels_cpu();
    p->sum = &kernels->op[ZX_OP_sum_sources];
    p->isa = strcmp(zx_env_text(ZX_ENV_ISA), "plain") == 0 ? ZX_ISA_PLAIN : zx_isa_detect();
    p->inline_streams = comm->inline_streams;
    lay_out(p, comm->world, caps->granule);
    ZX_TRY(exchange_control(comm));
    if (comm->parent == NULL) {
        ZX_TRY(zx_peer_watch_start(comm));
    }
    zx_peer_watch_add(comm);
    return ZX_OK;
}

static void peer_close(zx_comm *comm)
{
    zx_peer *p = zx_peer_of(comm);
    if (p == NULL) {
        return;
    }
    if (p->n_flying > 0 && p->stream != NULL) { /* the watchdog lets these waits go if they cannot end */
        if (zx_stream_sync(p->stream) != ZX_OK) {
            zx_error_clear();
        }
    }
    zx_peer_watch_remove(comm);
    if (comm->parent == NULL) {
        zx_peer_watch_stop(comm);
    }
    zx_peer_delist_all(comm);
    if (p->control[comm->rank].addr != NULL) {
        atomic_store(&zx_peer_place(p, comm->rank)->closed, 1);
    }
    for (int r = 0; r < comm->world; r++) {
        zx_peer_drop(comm, &p->control[r]);
    }
    for (zx_ticket *t = p->all_tickets, *next; t != NULL; t = next) {
        next = t->all_next;
        zx_free(t);
    }
    zx_free(p);
    comm->state = NULL;
}

static zx_status peer_submit(zx_comm *comm, zx_stream *stream, const zx_call *call)
{
    zx_ticket *t = NULL;
    ZX_TRY(zx_peer_ticket(comm, call, &t));
    zx_peer_of(comm)->stream = stream;
    zx_status status = call->op == ZX_COMM_SEND   ? zx_peer_send(t, stream)
                       : call->op == ZX_COMM_RECV ? zx_peer_recv(t, stream)
                                                  : zx_peer_collective(t, stream);
    if (status != ZX_OK) {
        zx_peer_ticket_land(t);
    }
    return status;
}

static size_t peer_bytes(const zx_comm *comm)
{
    return zx_peer_of(comm)->lay.total;
}

const zx_transport zx_transport_peer = {
    .name = "peer",
    .probe = peer_probe,
    .open = peer_open,
    .close = peer_close,
    .submit = peer_submit,
    .enlist = zx_peer_enlist,
    .alias = zx_peer_alias,
    .delist = zx_peer_delist,
    .bytes = peer_bytes,
    .release = zx_peer_release,
};
