/* comm.c - opening, splitting and closing communicators, and the first failure. The calls are in comm_call.c; what
 * moves data is the transport (transport.h).
 */
#include "comm/transport.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* In order of preference. */
static const zx_transport *const transports[] = {&zx_transport_local, &zx_transport_peer};
enum { N_TRANSPORTS = sizeof transports / sizeof transports[0] };

const char *zx_comm_op_name(zx_comm_op op)
{
    static const char *const names[] = {"?",          "all_gather", "reduce_scatter", "all_reduce", "broadcast",
                                        "all_to_all", "barrier",    "send",           "recv"};
    return op >= ZX_COMM_ALL_GATHER && op <= ZX_COMM_RECV ? names[op] : names[0];
}

/* 1234567 -> 1,234,567 */
static void count_text(int64_t n, char text[32])
{
    char digits[24];
    int len = snprintf(digits, sizeof digits, "%lld", (long long)n), at = 0;
    for (int i = 0; i < len; i++) {
        if (i > 0 && (len - i) % 3 == 0 && digits[i - 1] != '-') {
            text[at++] = ',';
        }
        text[at++] = digits[i];
    }
    text[at] = '\0';
}

void zx_call_text(const zx_comm *comm, const zx_call *call, char text[ZX_CALL_TEXT])
{
    char count[32], more[48] = "";
    count_text(call->n, count);
    if (call->op == ZX_COMM_BARRIER) {
        snprintf(text, ZX_CALL_TEXT, "barrier #%llu", (unsigned long long)call->seq);
        return;
    }
    int peer = call->peer >= 0 && call->peer < comm->world ? comm->ranks[call->peer] : call->peer;
    if (call->op == ZX_COMM_REDUCE_SCATTER && call->recv_dtype != call->send_dtype) {
        snprintf(more, sizeof more, " to %s", zx_dtype_name(call->recv_dtype));
    } else if (call->op == ZX_COMM_BROADCAST) {
        snprintf(more, sizeof more, " from rank %d", peer);
    } else if (call->op == ZX_COMM_SEND || call->op == ZX_COMM_RECV) {
        snprintf(more, sizeof more, " %s rank %d", call->op == ZX_COMM_SEND ? "to" : "from", peer);
    }
    int at = snprintf(text, ZX_CALL_TEXT, "%s #%llu (%s %s%s)", zx_comm_op_name(call->op),
                      (unsigned long long)call->seq, count, zx_dtype_name(call->send_dtype), more);
    if (call->label[0] && at > 0 && at < ZX_CALL_TEXT) {
        snprintf(text + at, (size_t)(ZX_CALL_TEXT - at), " of '%.*s'", ZX_LABEL, call->label);
    }
}

/* ---- failure ---------------------------------------------------------------------------------------- */

void zx_comm_fail(zx_comm *comm, zx_status status, bool tell, const char *text)
{
    zx_comm *root = comm->root;
    pthread_mutex_lock(&root->fault.lock);
    bool first = atomic_load(&root->fault.status) == ZX_OK;
    if (first) {
        snprintf(root->fault.text, sizeof root->fault.text, "%s", text);
        atomic_store(&root->fault.status, (int)status);
    }
    pthread_mutex_unlock(&root->fault.lock);
    if (first && tell) {
        zx_bootstrap_fail(root->bs, status, text);
    }
    root->transport->release(root);
}

zx_status zx_comm_check(zx_comm *c)
{
    if (zx_comm_failed(c)) {
        ZX_FAIL((zx_status)atomic_load(&c->root->fault.status), "%s", c->root->fault.text);
    }
    return ZX_OK;
}

void zx_comm_abort(zx_comm *c, const char *why)
{
    char text[ZX_ERROR_TEXT];
    snprintf(text, sizeof text, "rank %d aborted: %.700s", (int)c->ranks[c->rank], why);
    zx_comm_fail(c, ZX_ERR_PEER, true, text);
}

/* ---- open, split, close ----------------------------------------------------------------------------- */

typedef struct offer { /* what the ranks tell each other when they open */
    uint32_t can; /* bit i: transports[i] could serve this rank */
    uint32_t inline_streams;
    char asked[16];
    char host[64];
    char why[N_TRANSPORTS][ZX_WHY_TEXT];
    uint64_t ring_bytes;
} offer;

static zx_status count_call(void *arg)
{
    ++*(int *)arg;
    return ZX_OK;
}

/* No promise says so, so it is tried: a queue that runs work by chance does not run all of these at once. */
static zx_status try_streams(zx_device *dev, bool *out_inline)
{
    zx_status zx_rc_ = ZX_OK;
    zx_stream *stream = NULL;
    int n_done = 0;
    *out_inline = true;
    ZX_TRY(zx_stream_open(dev, "comm probe", &stream));
    for (int i = 1; i <= 64; i++) {
        ZX_TRY_GOTO(zx_stream_call(stream, "probe", count_call, &n_done), done);
        *out_inline = *out_inline && n_done == i;
    }
    ZX_TRY_GOTO(zx_stream_sync(stream), done);
done:
    zx_stream_close(stream);
    return zx_rc_;
}

static zx_status make_offer(zx_comm *comm, const char *asked, offer *mine)
{
    memset(mine, 0, sizeof *mine);
    mine->ring_bytes = comm->ring_bytes;
    bool known = strcmp(asked, "auto") == 0;
    for (int i = 0; i < N_TRANSPORTS; i++) {
        known = known || strcmp(asked, transports[i]->name) == 0;
        mine->can |= (uint32_t)transports[i]->probe(comm->dev, comm->bs, comm->world, mine->why[i]) << i;
    }
    if (!known) {
        ZX_FAIL(ZX_ERR_ARG, "there is no transport '%s': 'auto', 'local' and 'peer' are possible", asked);
    }
    bool inline_streams = false;
    if (comm->parent == NULL && zx_device_caps_get(comm->dev)->computes) {
        ZX_TRY(try_streams(comm->dev, &inline_streams));
    } else if (comm->parent != NULL) {
        inline_streams = comm->parent->inline_streams;
    }
    mine->inline_streams = inline_streams;
    snprintf(mine->asked, sizeof mine->asked, "%s", asked);
    if (gethostname(mine->host, sizeof mine->host - 1) != 0) {
        mine->host[0] = '\0';
    }
    return ZX_OK;
}

/* All ranks see the same offers and so choose alike. */
static zx_status choose(zx_comm *comm, const offer *offers)
{
    int at = 0;
    comm->inline_streams = offers[0].inline_streams;
    for (int r = 1; r < comm->world; r++) {
        comm->inline_streams = comm->inline_streams && offers[r].inline_streams;
        if (strcmp(offers[r].asked, offers[0].asked) != 0) {
            ZX_FAIL(ZX_ERR_PEER, "rank %d asks for transport '%s', rank %d for '%s': all ranks must ask for the same",
                    (int)comm->ranks[0], offers[0].asked, (int)comm->ranks[r], offers[r].asked);
        }
        comm->ring_bytes = (size_t)zx_min64((int64_t)comm->ring_bytes, (int64_t)offers[r].ring_bytes);
    }
    comm->ring_bytes = (size_t)zx_min64((int64_t)comm->ring_bytes, (int64_t)offers[0].ring_bytes);
    for (int i = 0; i < N_TRANSPORTS; i++) {
        bool asked = strcmp(offers[0].asked, transports[i]->name) == 0;
        char why[ZX_WHY_TEXT] = "";
        for (int r = 0; r < comm->world && why[0] == '\0'; r++) {
            if (!(offers[r].can >> i & 1)) {
                snprintf(why, sizeof why, "%s", offers[r].why[i]);
            } else if (strcmp(offers[r].host, offers[0].host) != 0 && transports[i] == &zx_transport_peer) {
                snprintf(why, sizeof why, "rank %d is on another host", (int)comm->ranks[r]);
            }
        }
        if (asked && why[0] != '\0') {
            ZX_FAIL(ZX_ERR_UNSUPPORTED, "transport '%s' cannot be used: it %s", transports[i]->name, why);
        }
        if (why[0] == '\0' && (asked || strcmp(offers[0].asked, "auto") == 0)) {
            comm->transport = transports[i];
            snprintf(comm->choice + at, sizeof comm->choice - (size_t)at, "%s%s", transports[i]->name,
                     asked ? " (asked for)" : "");
            return ZX_OK;
        }
        if (why[0] != '\0') {
            at += snprintf(comm->choice + at, sizeof comm->choice - (size_t)at, "not %s: it %s; ", transports[i]->name,
                           why);
        }
    }
    ZX_FAIL(ZX_ERR_UNSUPPORTED, "no transport can connect these ranks: %s", comm->choice);
}

/* Once the transport's own part is done, everybody learns whether it worked everywhere. */
static zx_status agree(zx_comm *comm, zx_status status)
{
    char text[192] = "";
    char *all = NULL;
    if (status != ZX_OK) {
        snprintf(text, sizeof text, "%.180s", zx_error_last()->text);
        if (zx_bootstrap_health(comm->bs) != ZX_OK) {
            return status;
        }
    }
    zx_error saved = *zx_error_last();
    ZX_TRY(zx_alloc_array(ZX_MEM_COMM, comm->world, sizeof text, (void **)&all));
    zx_status gather = zx_group_all_gather(comm->bs, &comm->group, "comm open: done", text, sizeof text, all);
    int bad = -1;
    for (int r = 0; gather == ZX_OK && r < comm->world; r++) {
        bad = bad < 0 && all[(size_t)r * sizeof text] != '\0' ? r : bad;
    }
    if (status != ZX_OK) {
        status = zx_error_raise(&saved);
    } else if (gather != ZX_OK) {
        status = gather;
    } else if (bad >= 0) {
        status = zx_error_set(ZX_ERR_PEER, 0, NULL, __func__, __FILE__, __LINE__,
                              "rank %d could not open the communicator: %s", (int)comm->ranks[bad],
                              all + (size_t)bad * sizeof text);
    }
    zx_free(all);
    return status;
}

static zx_status comm_new(zx_device *dev, zx_bootstrap *bs, zx_comm *parent, int world, zx_comm **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_comm *comm = NULL;
    *out = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, comm));
    comm->dev = dev;
    comm->bs = bs;
    comm->parent = parent;
    comm->root = parent != NULL ? parent->root : comm;
    comm->world = world;
    comm->rank = -1;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, world, comm->ranks), fail);
    if (parent == NULL) {
        pthread_mutex_init(&comm->fault.lock, NULL);
        comm->fault_ready = true;
    }
    *out = comm;
    return ZX_OK;
fail:
    zx_comm_close(comm);
    return zx_rc_;
}

static zx_status connect_ranks(zx_comm *comm, const char *asked)
{
    zx_status zx_rc_ = ZX_OK;
    offer mine, *offers = NULL;
    for (int i = 0; i < comm->world; i++) {
        comm->rank = comm->ranks[i] == zx_bootstrap_rank(comm->bs) ? i : comm->rank;
    }
    comm->group.n_ranks = comm->world;
    comm->group.ranks = comm->ranks;
    ZX_TRY(make_offer(comm, asked, &mine));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, comm->world, offers));
    ZX_TRY_GOTO(zx_group_all_gather(comm->bs, &comm->group, "comm open", &mine, sizeof mine, offers), done);
    ZX_TRY_GOTO(choose(comm, offers), done);
    ZX_TRY_GOTO(agree(comm, comm->transport->open(comm)), done);
done:
    zx_free(offers);
    return zx_rc_;
}

zx_status zx_comm_open(zx_device *dev, zx_bootstrap *bs, const zx_comm_config *config, zx_comm **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_comm *comm = NULL;
    const char *asked = config != NULL && config->transport != NULL ? config->transport : "auto";
    *out = NULL;
    ZX_TRY(comm_new(dev, bs, NULL, zx_bootstrap_world(bs), &comm));
    for (int i = 0; i < comm->world; i++) {
        comm->ranks[i] = i;
    }
    comm->timeout_s = config != NULL && config->timeout_s > 0 ? config->timeout_s : zx_bootstrap_timeout(bs);
    comm->ring_bytes = config != NULL && config->ring_bytes > 0 ? config->ring_bytes : (size_t)4 << 20;
    comm->group.key = 1;
    ZX_TRY_GOTO(connect_ranks(comm, asked), fail);
    *out = comm;
    return ZX_OK;
fail:
    zx_comm_close(comm);
    return zx_rc_;
}

static uint64_t mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

typedef struct split_wish {
    int32_t colour, key;
} split_wish;

/* Members of my colour, ordered by (key, rank): insertion into a short list. */
static int sort_members(const split_wish *wishes, int world, int colour, int32_t *members)
{
    int n = 0;
    for (int r = 0; r < world; r++) {
        int at = n;
        if (wishes[r].colour != colour) {
            continue;
        }
        for (; at > 0 && wishes[members[at - 1]].key > wishes[r].key; at--) {
            members[at] = members[at - 1];
        }
        members[at] = r;
        n++;
    }
    return n;
}

zx_status zx_comm_split(zx_comm *c, int colour, int key, zx_comm **out)
{
    zx_status zx_rc_ = ZX_OK;
    split_wish mine = {.colour = colour, .key = key}, *wishes = NULL;
    int32_t *members = NULL;
    zx_comm *child = NULL;
    *out = NULL;
    ZX_TRY(zx_comm_check(c));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, c->world, wishes));
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, c->world, members), fail);
    ZX_TRY_GOTO(zx_group_all_gather(c->bs, &c->group, "comm split", &mine, sizeof mine, wishes), fail);
    c->n_splits++;
    if (colour >= 0) {
        int n = sort_members(wishes, c->world, colour, members);
        ZX_TRY_GOTO(comm_new(c->dev, c->bs, c, n, &child), fail);
        for (int i = 0; i < n; i++) {
            child->ranks[i] = c->ranks[members[i]];
        }
        child->timeout_s = c->timeout_s;
        child->ring_bytes = c->ring_bytes;
        child->group.key = mix(mix(c->group.key ^ c->n_splits << 32) ^ (uint64_t)colour) | 2;
        ZX_TRY_GOTO(connect_ranks(child, n == 1 ? "auto" : c->transport->name), fail);
    }
    *out = child;
    child = NULL;
fail:
    zx_comm_close(child);
    zx_free(wishes);
    zx_free(members);
    return zx_rc_;
}

void zx_comm_close(zx_comm *comm)
{
    if (comm == NULL) {
        return;
    }
    if (comm->transport != NULL) {
        comm->transport->close(comm);
    }
    if (comm->fault_ready) {
        pthread_mutex_destroy(&comm->fault.lock);
    }
    zx_free(comm->ranks);
    zx_free(comm);
}

/* ---- questions -------------------------------------------------------------------------------------- */

int zx_comm_rank(const zx_comm *comm)
{
    return comm->rank;
}

int zx_comm_world(const zx_comm *comm)
{
    return comm->world;
}

zx_device *zx_comm_device(const zx_comm *comm)
{
    return comm->dev;
}

zx_bootstrap *zx_comm_bootstrap(const zx_comm *comm)
{
    return comm->bs;
}

const char *zx_comm_transport(const zx_comm *comm)
{
    return comm->transport->name;
}

const char *zx_comm_choice(const zx_comm *comm)
{
    return comm->choice;
}

size_t zx_comm_bytes(const zx_comm *comm)
{
    return comm->transport->bytes(comm);
}

zx_comm_counters zx_comm_counters_get(const zx_comm *comm)
{
    return comm->counters;
}

void zx_comm_counters_reset(zx_comm *comm)
{
    comm->counters = (zx_comm_counters){0};
}
