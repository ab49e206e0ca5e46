/* watch.c - the thread behind the open sockets of a bootstrap: reads frames, sends what did not fit at once, looks at
 * the deadlines of rank 0's hub, and turns a closed connection into the error that everybody gets. */
#include "comm/boot.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

void zx_watch_wake(zx_bootstrap *bs)
{
    uint64_t one = 1;
    if (bs->wake_fd >= 0 && write(bs->wake_fd, &one, sizeof one) < 0) {
        return; /* EAGAIN: it is awake already */
    }
}

/* Rank 0 tells the others before its own callers wake up and perhaps end the process. */
static void declare(zx_bootstrap *bs, zx_status status, int not_to, const char *text)
{
    if (bs->fault != ZX_OK) {
        return;
    }
    for (int i = 0; bs->rank == 0 && i < bs->world; i++) {
        zx_wire_head head = {.type = ZX_FRAME_ABORT, .status = (uint16_t)status, .from = 0};
        if (bs->conns[i].fd < 0 || i == not_to) {
            continue;
        }
        if (zx_conn_send(&bs->conns[i], head, text, strlen(text) + 1, NULL, 0) != ZX_OK) {
            zx_error_clear();
        }
    }
    zx_boot_fault(bs, status, text);
}

static void declare_death(zx_bootstrap *bs, int rank)
{
    char text[ZX_HUB_TEXT];
    snprintf(text, sizeof text, "rank %d (pid %lld) died", rank, (long long)bs->pids[rank]);
    declare(bs, ZX_ERR_PEER, rank, text);
}

static void on_bye(zx_bootstrap *bs, int rank)
{
    bs->gone[rank] = true;
    if (bs->rank == 0) {
        zx_hub_leave(&bs->hub, rank);
        return;
    }
    for (zx_waiter *w = bs->waiters; w != NULL; w = w->next) {
        if (!w->done) {
            w->done = true;
            w->status = ZX_ERR_PEER;
            snprintf(w->text, sizeof w->text, "rank 0 (pid %lld) has closed its bootstrap", (long long)bs->pids[0]);
        }
    }
    pthread_cond_broadcast(bs->changed);
}

static zx_status on_gather(zx_bootstrap *bs, int rank, const zx_wire_head *head, const char *payload)
{
    int32_t ranks[ZX_BOOT_MAX_WORLD];
    size_t list_bytes = (size_t)head->n_ranks * sizeof *ranks;
    if (bs->rank != 0 || head->n_ranks < 1 || list_bytes > sizeof ranks || list_bytes > head->bytes) {
        ZX_FAIL(ZX_ERR_BUG, "rank %d sent a gather of %d ranks and %llu bytes to rank %d", rank, head->n_ranks,
                (unsigned long long)head->bytes, bs->rank);
    }
    memcpy(ranks, payload, list_bytes);
    zx_hub_entry entry = {.from = rank,
                          .key = head->key,
                          .seq = head->seq,
                          .n_ranks = head->n_ranks,
                          .ranks = ranks,
                          .what = head->what,
                          .bytes = (size_t)head->bytes - list_bytes,
                          .data = payload + list_bytes};
    return zx_hub_enter(&bs->hub, &entry);
}

static zx_status on_frame(zx_bootstrap *bs, int rank, const zx_wire_head *head, const char *payload)
{
    char text[ZX_ERROR_TEXT];
    switch ((zx_frame_type)head->type) {
    case ZX_FRAME_GATHER:
        return on_gather(bs, rank, head, payload);
    case ZX_FRAME_RESULT:
        if (head->status != ZX_OK) {
            snprintf(text, sizeof text, "%.*s", (int)zx_min64((int64_t)head->bytes, ZX_ERROR_TEXT - 1), payload);
        }
        zx_boot_deliver(bs, head->key, head->seq, (zx_status)head->status, text, payload, (size_t)head->bytes);
        return ZX_OK;
    case ZX_FRAME_ABORT:
        snprintf(text, sizeof text, "%.*s", (int)zx_min64((int64_t)head->bytes, ZX_ERROR_TEXT - 1), payload);
        declare(bs, head->status < ZX_N_STATUS ? (zx_status)head->status : ZX_ERR_PEER, rank, text);
        return ZX_OK;
    case ZX_FRAME_BYE:
        on_bye(bs, rank);
        return ZX_OK;
    default:
        ZX_FAIL(ZX_ERR_BUG, "rank %d sent a message of unknown type %u", rank, head->type);
    }
}

static void serve(zx_bootstrap *bs, int rank)
{
    zx_conn *conn = &bs->conns[rank];
    bool closed = false;
    zx_status status = zx_conn_flush(conn);
    if (status == ZX_ERR_SYSTEM) { /* broken; but what came in before it broke counts */
        zx_error_clear();
        conn->out.len = 0;
        status = ZX_OK;
    }
    if (status == ZX_OK) {
        status = zx_conn_read(conn, 2 * ZX_WIRE_MAX_BYTES, &closed);
    }
    while (status == ZX_OK) {
        zx_wire_head head;
        const char *payload = NULL;
        status = zx_conn_next(conn, ZX_WIRE_MAX_BYTES, &head, &payload);
        if (status != ZX_OK || payload == NULL) {
            break;
        }
        status = on_frame(bs, rank, &head, payload);
        zx_conn_pop(conn, &head);
    }
    if (status != ZX_OK) {
        char text[ZX_ERROR_TEXT];
        snprintf(text, sizeof text, "the connection of ranks %d and %d failed: %.600s", bs->rank, rank,
                 zx_error_last()->text);
        zx_error_clear();
        declare(bs, status, -1, text);
    }
    if (closed || status != ZX_OK) {
        zx_conn_close(conn);
        if (!bs->gone[rank] && !bs->closing) {
            declare_death(bs, rank);
        }
    }
}

static void *watch_main(void *arg)
{
    zx_bootstrap *bs = arg;
    struct pollfd fds[ZX_BOOT_MAX_WORLD + 1];
    int ranks[ZX_BOOT_MAX_WORLD + 1];
    zx_log_set_rank(bs->rank);
    pthread_mutex_lock(bs->lock);
    for (int i = 0; i < bs->world; i++) { /* what came in together with the end of the rendezvous */
        if (bs->conns[i].fd >= 0) {
            serve(bs, i);
        }
    }
    for (;;) {
        int n = 0, n_out = 0;
        fds[n++] = (struct pollfd){.fd = bs->wake_fd, .events = POLLIN};
        for (int i = 0; i < bs->world; i++) {
            if (bs->conns[i].fd >= 0) {
                bool out = bs->conns[i].out.len > 0;
                n_out += out;
                ranks[n] = i;
                fds[n++] = (struct pollfd){.fd = bs->conns[i].fd, .events = POLLIN | (out ? POLLOUT : 0)};
            }
        }
        if (bs->closing && (n == 1 || n_out == 0)) {
            break;
        }
        int wait_ms = bs->closing || zx_hub_pending(&bs->hub) ? 50 : -1;
        pthread_mutex_unlock(bs->lock);
        int n_ready = poll(fds, (nfds_t)n, wait_ms);
        pthread_mutex_lock(bs->lock);
        if (n_ready > 0 && fds[0].revents != 0) {
            uint64_t count;
            if (read(bs->wake_fd, &count, sizeof count) < 0) {
                count = 0;
            }
        }
        for (int i = 1; i < n && n_ready > 0; i++) {
            if (fds[i].revents != 0 && bs->conns[ranks[i]].fd == fds[i].fd) {
                serve(bs, ranks[i]);
            }
        }
        char text[ZX_HUB_TEXT];
        if (bs->rank == 0 && bs->fault == ZX_OK && zx_hub_overdue(&bs->hub, bs->timeout_s, text)) {
            declare(bs, ZX_ERR_TIMEOUT, -1, text);
        }
        if (zx_boot_claim_hooks(bs)) {
            pthread_mutex_unlock(bs->lock);
            zx_boot_call_hooks(bs);
            pthread_mutex_lock(bs->lock);
        }
        if (bs->closing) {
            pthread_cond_broadcast(bs->changed); /* who says goodbye waits for the buffers to empty */
        }
    }
    pthread_cond_broadcast(bs->changed);
    pthread_mutex_unlock(bs->lock);
    return NULL;
}

zx_status zx_watch_start(zx_bootstrap *bs)
{
    ZX_TRY(zx_fault_point("watch thread"));
    bs->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (bs->wake_fd < 0) {
        ZX_FAIL_SYS(errno, "eventfd", "no descriptor to wake the bootstrap's thread with");
    }
    int err = pthread_create(&bs->watch, NULL, watch_main, bs);
    if (err != 0) {
        ZX_FAIL_SYS(err, "pthread_create", "no thread to watch the bootstrap's connections");
    }
    bs->watch_runs = true;
    return ZX_OK;
}

void zx_watch_stop(zx_bootstrap *bs)
{
    if (!bs->watch_runs) {
        return;
    }
    pthread_mutex_lock(bs->lock);
    bs->closing = true;
    for (int i = 0; i < bs->world; i++) {
        bs->conns[i].out.len = 0; /* the goodbye had its time */
    }
    zx_watch_wake(bs);
    pthread_mutex_unlock(bs->lock);
    pthread_join(bs->watch, NULL);
    bs->watch_runs = false;
}
