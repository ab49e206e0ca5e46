/* peer_list.c - registered memory: which addresses of this rank lie in objects that the others have mapped. */
#include "comm/peer.h"

#include <string.h>
#include <unistd.h>

/* ---- spans ------------------------------------------------------------------------------------------ */

/* Number of spans that begin at or before addr. */
static int64_t spans_before(const zx_peer *p, uintptr_t addr)
{
    int64_t lo = 0, hi = p->n_spans;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (p->spans[mid].begin <= addr) {
            lo = mid + 1;
        } else {
            hi = mid;
        }
    }
    return lo;
}

static zx_status add_span(zx_peer *p, zx_span span)
{
    int64_t at = spans_before(p, span.begin);
    if (span.begin == span.end) {
        return ZX_OK;
    }
    if (at > 0 && p->spans[at - 1].begin == span.begin && p->spans[at - 1].end == span.end) {
        p->spans[at - 1] = span; /* the same addresses, other bytes behind them */
        return ZX_OK;
    }
    if ((at > 0 && p->spans[at - 1].end > span.begin) || (at < p->n_spans && p->spans[at].begin < span.end)) {
        ZX_FAIL(ZX_ERR_ARG, "the addresses %p to %p overlap others that are registered already", (void *)span.begin,
                (void *)span.end);
    }
    if (p->n_spans == p->cap_spans) {
        zx_span *spans = NULL;
        int64_t cap = p->cap_spans > 0 ? 2 * p->cap_spans : 16;
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, cap, spans));
        if (p->n_spans > 0) {
            memcpy(spans, p->spans, (size_t)p->n_spans * sizeof *spans);
        }
        zx_free(p->spans);
        p->spans = spans;
        p->cap_spans = cap;
    }
    memmove(p->spans + at + 1, p->spans + at, (size_t)(p->n_spans - at) * sizeof *p->spans);
    p->spans[at] = span;
    p->n_spans++;
    return ZX_OK;
}

static void remove_spans(zx_peer *p, int id)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < p->n_spans; i++) {
        if (p->spans[i].id != id) {
            p->spans[kept++] = p->spans[i];
        }
    }
    p->n_spans = kept;
}

bool zx_peer_find(const zx_comm *comm, const void *addr, size_t bytes, int *out_up, int *out_id, size_t *out_offset)
{
    uintptr_t begin = (uintptr_t)addr;
    *out_up = 0;
    for (const zx_comm *c = comm; c != NULL; c = c->parent, ++*out_up) {
        const zx_peer *p = zx_peer_of(c);
        int64_t at = spans_before(p, begin);
        if (at > 0 && begin + bytes <= p->spans[at - 1].end) {
            *out_id = p->spans[at - 1].id;
            *out_offset = p->spans[at - 1].offset + (size_t)(begin - p->spans[at - 1].begin);
            return true;
        }
    }
    return false;
}

/* ---- objects ---------------------------------------------------------------------------------------- */

static void drop_list(zx_comm *comm, int id)
{
    zx_peer *p = zx_peer_of(comm);
    zx_enlisted *list = p->lists[id];
    if (list == NULL) {
        return;
    }
    for (int r = 0; r < comm->world; r++) {
        if (r != comm->rank) { /* its own memory belongs to whoever registered it */
            zx_peer_drop(comm, &list->peer[r]);
        }
    }
    remove_spans(p, id);
    zx_free(list);
    p->lists[id] = NULL;
}

void zx_peer_delist_all(zx_comm *comm)
{
    zx_peer *p = zx_peer_of(comm);
    for (int id = 0; id < p->n_lists; id++) {
        drop_list(comm, id);
    }
    zx_free(p->lists);
    zx_free(p->spans);
    p->lists = NULL;
    p->spans = NULL;
    p->n_lists = 0;
    p->n_spans = 0;
    p->cap_spans = 0;
}

/* The first id behind all that this rank has in use. Ranks unregister each in its own time, so a new object takes the
 * largest that any rank proposes. */
static int next_id(const zx_peer *p)
{
    int id = p->n_lists;
    while (id > 0 && p->lists[id - 1] == NULL) {
        id--;
    }
    return id;
}

static zx_status new_list(zx_comm *comm, int id)
{
    zx_peer *p = zx_peer_of(comm);
    if (id >= p->n_lists) {
        zx_enlisted **lists = NULL;
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, id + 1, lists));
        if (p->n_lists > 0) {
            memcpy(lists, p->lists, (size_t)p->n_lists * sizeof *lists);
        }
        zx_free(p->lists);
        p->lists = lists;
        p->n_lists = id + 1;
    }
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, p->lists[id]));
    return ZX_OK;
}

typedef struct enlist_wish {
    uint64_t bytes;
    int32_t status; /* of what this rank did so far */
    int32_t id;
} enlist_wish;

/* Everybody learns whether everybody succeeded: a rank must not go on with an object that another lacks. */
static zx_status all_well(zx_comm *comm, const char *what, zx_status status, enlist_wish mine, enlist_wish *all)
{
    zx_error saved = *zx_error_last();
    mine.status = (int32_t)status;
    zx_status gather = zx_group_all_gather(comm->bs, &comm->group, what, &mine, sizeof mine, all);
    if (status != ZX_OK) {
        return zx_error_raise(&saved);
    }
    ZX_TRY(gather);
    for (int r = 0; r < comm->world; r++) {
        if (all[r].status != ZX_OK) {
            ZX_FAIL(ZX_ERR_PEER, "rank %d failed in '%s' (%s)", (int)comm->ranks[r], what,
                    zx_status_name((zx_status)all[r].status));
        }
    }
    return ZX_OK;
}

static zx_status import_all(zx_comm *comm, int id, const enlist_wish *all, const int *fds)
{
    for (int r = 0; r < comm->world; r++) {
        if (fds[r] >= 0) {
            ZX_TRY(zx_peer_import(comm, fds[r], (size_t)all[r].bytes, &zx_peer_of(comm)->lists[id]->peer[r]));
        }
    }
    return ZX_OK;
}

zx_status zx_peer_enlist(zx_comm *comm, zx_mem *mem, void *base, int *out_id)
{
    zx_status zx_rc_ = ZX_OK;
    zx_peer *p = zx_peer_of(comm);
    enlist_wish mine = {.bytes = zx_mem_bytes(mem), .id = -1}, all[ZX_PEER_MAX];
    int fd = -1, fds[ZX_PEER_MAX], id = -1;
    bool listed = false;
    *out_id = -1;
    for (int r = 0; r < comm->world; r++) {
        fds[r] = -1;
    }
    mine.id = next_id(p);
    zx_status status = mine.bytes > 0 ? zx_mem_export(mem, &fd) : ZX_OK;
    ZX_TRY_GOTO(all_well(comm, "comm register", status, mine, all), done);
    for (int r = 0; r < comm->world; r++) {
        id = all[r].id > id ? all[r].id : id;
    }
    ZX_TRY_GOTO(zx_group_exchange_fds(comm->bs, &comm->group, "comm register: memory", fd, fds), done);
    status = new_list(comm, id);
    if (status == ZX_OK) {
        listed = true;
        p->lists[id]->bytes = (size_t)mine.bytes;
        if (base != NULL) {
            status = add_span(p, (zx_span){.begin = (uintptr_t)base, .end = (uintptr_t)base + mine.bytes, .id = id});
        }
    }
    if (status == ZX_OK) {
        status = import_all(comm, id, all, fds);
    }
    ZX_TRY_GOTO(all_well(comm, "comm register: mapped", status, mine, all), done);
    *out_id = id;
done:
    if (zx_rc_ != ZX_OK && listed) {
        drop_list(comm, id);
    }
    for (int r = 0; r < comm->world; r++) {
        if (fds[r] >= 0) {
            close(fds[r]);
        }
    }
    if (fd >= 0) {
        close(fd);
    }
    return zx_rc_;
}

static zx_status check_id(zx_comm *comm, int id)
{
    zx_peer *p = zx_peer_of(comm);
    if (id < 0 || id >= p->n_lists || p->lists[id] == NULL) {
        ZX_FAIL(ZX_ERR_ARG, "there is no registered object %d", id);
    }
    return ZX_OK;
}

zx_status zx_peer_alias(zx_comm *comm, int id, const void *addr, size_t offset, size_t bytes)
{
    ZX_TRY(check_id(comm, id));
    zx_peer *p = zx_peer_of(comm);
    size_t have = p->lists[id]->bytes;
    if (offset > have || bytes > have - offset) {
        ZX_FAIL(ZX_ERR_ARG, "bytes [%zu, %zu) do not lie in registered object %d of %zu bytes", offset, offset + bytes,
                id, have);
    }
    ZX_TRY(
        add_span(p, (zx_span){.begin = (uintptr_t)addr, .end = (uintptr_t)addr + bytes, .offset = offset, .id = id}));
    return ZX_OK;
}

zx_status zx_peer_delist(zx_comm *comm, int id)
{
    ZX_TRY(check_id(comm, id));
    ZX_TRY(zx_peer_drain(comm));
    drop_list(comm, id);
    return ZX_OK;
}
