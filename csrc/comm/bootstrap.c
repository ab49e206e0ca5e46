/* bootstrap.c - opening, calling and closing a bootstrap; see bootstrap.h.
 *
 * DESIGN
 * A gather goes to the hub (hub.h): by a frame to rank 0 for processes, by a call under the meeting's lock for threads.
 * The answer finds the caller's waiter. The caller itself only waits: for its waiter, for a fault, for the interrupt
 * hook, and as a last resort for the deadline. The hub's owner watches the deadline of a call and names who is missing;
 * a rank far from the hub adds a grace to its own deadline, so that this better verdict arrives first.
 */
#include "comm/boot.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const double grace_s = 2.0;

zx_status zx_boot_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attr;
    int err = pthread_condattr_init(&attr);
    if (err == 0) {
        err = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        if (err == 0) {
            err = pthread_cond_init(cond, &attr);
        }
        pthread_condattr_destroy(&attr);
    }
    if (err != 0) {
        ZX_FAIL_SYS(err, "pthread_cond_init", "no condition variable");
    }
    return ZX_OK;
}

void zx_boot_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns)
{
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    int64_t end = (int64_t)at.tv_sec * 1000000000 + at.tv_nsec + ns;
    at.tv_sec = end / 1000000000;
    at.tv_nsec = end % 1000000000;
    pthread_cond_timedwait(cond, lock, &at);
}

void zx_boot_deliver(zx_bootstrap *bs, uint64_t key, uint64_t seq, zx_status status, const char *text, const void *data,
                     size_t data_bytes)
{
    for (zx_waiter *w = bs->waiters; w != NULL; w = w->next) {
        if (w->key != key || w->seq != seq || w->done) {
            continue;
        }
        w->status = status;
        if (status != ZX_OK) {
            snprintf(w->text, sizeof w->text, "%s", text);
        } else if (data_bytes != w->out_bytes) {
            w->status = ZX_ERR_BUG;
            snprintf(w->text, sizeof w->text, "a gather returned %zu bytes, %zu were expected", data_bytes,
                     w->out_bytes);
        } else if (data_bytes > 0) {
            memcpy(w->out, data, data_bytes);
        }
        w->done = true;
        pthread_cond_broadcast(bs->changed);
        return;
    }
}

bool zx_boot_fault(zx_bootstrap *bs, zx_status status, const char *text)
{
    if (bs->fault != ZX_OK) {
        return false;
    }
    snprintf(bs->fault_text, sizeof bs->fault_text, "%s", text);
    bs->fault = status;
    pthread_cond_broadcast(bs->changed);
    return true;
}

bool zx_boot_claim_hooks(zx_bootstrap *bs)
{
    if (bs->fault == ZX_OK || bs->hooks_called) {
        return false;
    }
    bs->hooks_called = true;
    bs->hooks_running = true;
    bs->hooks_thread = pthread_self();
    return true;
}

void zx_boot_call_hooks(zx_bootstrap *bs)
{
    zx_boot_hook hooks[ZX_BOOT_HOOKS];
    pthread_mutex_lock(bs->lock);
    memcpy(hooks, bs->hooks, sizeof hooks);
    pthread_mutex_unlock(bs->lock);
    for (int i = 0; i < ZX_BOOT_HOOKS; i++) {
        if (hooks[i].call != NULL) {
            hooks[i].call(hooks[i].ctx);
        }
    }
    pthread_mutex_lock(bs->lock);
    bs->hooks_running = false;
    pthread_cond_broadcast(bs->changed);
    pthread_mutex_unlock(bs->lock);
}

zx_status zx_boot_pause(zx_bootstrap *bs, const char *what)
{
    zx_boot_cond_wait(bs->changed, bs->lock, 100 * 1000000);
    pthread_mutex_unlock(bs->lock);
    bool stop = bs->interrupts != NULL && zx_device_interrupted(bs->interrupts);
    pthread_mutex_lock(bs->lock);
    if (stop) {
        ZX_FAIL(ZX_ERR_INTERRUPTED, "interrupted while rank %d waited in '%s'", bs->rank, what);
    }
    return ZX_OK;
}

/* ---- open and close --------------------------------------------------------------------------------- */

static zx_status check_config(const zx_bootstrap_config *c)
{
    if (c->world < 1 || c->rank < 0 || c->rank >= c->world) {
        ZX_FAIL(ZX_ERR_ARG, "rank %d of a world of %d ranks is impossible: 0 <= rank < world is needed", c->rank,
                c->world);
    }
    if (c->world > ZX_BOOT_MAX_WORLD) {
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "a world of %d ranks is larger than the bootstrap's %d", c->world,
                ZX_BOOT_MAX_WORLD);
    }
    if (c->local_world < 0 || c->local_rank < 0 || (c->local_world > 0 && c->local_rank >= c->local_world)) {
        ZX_FAIL(ZX_ERR_ARG, "local rank %d of %d local ranks is impossible: 0 <= local rank < local world is needed",
                c->local_rank, c->local_world);
    }
    if (c->job != NULL && strlen(c->job) >= ZX_JOB_TEXT) {
        ZX_FAIL(ZX_ERR_ARG, "the job's name has %zu bytes, at most %d are possible", strlen(c->job), ZX_JOB_TEXT - 1);
    }
    if (c->token != NULL && strlen(c->token) >= ZX_TOKEN_TEXT) {
        ZX_FAIL(ZX_ERR_ARG, "the job's token has %zu bytes, at most %d are possible", strlen(c->token),
                ZX_TOKEN_TEXT - 1);
    }
    if (c->meeting != NULL || c->world == 1) {
        return ZX_OK;
    }
    if (c->token == NULL || c->token[0] == '\0') {
        ZX_FAIL(ZX_ERR_ARG, "a job of %d processes needs a token, the secret that all of them know: set %s", c->world,
                zx_env_name(ZX_ENV_TOKEN));
    }
    bool listens = c->rank == 0 && c->listen_fd >= 0;
    if (!listens && (c->address == NULL || c->address[0] == '\0' || c->port < 1 || c->port > 65535)) {
        ZX_FAIL(ZX_ERR_ARG, "no place to meet: address '%s', port %d (1 to 65535); set MASTER_ADDR and MASTER_PORT",
                c->address ? c->address : "", c->port);
    }
    return ZX_OK;
}

static void bootstrap_free(zx_bootstrap *bs)
{
    zx_watch_stop(bs);
    if (bs->meeting != NULL) {
        zx_meeting_leave(bs->meeting, bs);
    }
    for (int i = 0; bs->conns != NULL && i < bs->world; i++) {
        zx_conn_close(&bs->conns[i]);
    }
    if (bs->wake_fd >= 0) {
        close(bs->wake_fd);
    }
    zx_hub_close(&bs->hub);
    zx_free(bs->conns);
    zx_free(bs->gone);
    zx_free(bs->pids);
    zx_free(bs->everyone);
    if (bs->own_sync) {
        pthread_mutex_destroy(&bs->own_lock);
        pthread_cond_destroy(&bs->own_changed);
    }
    zx_free(bs);
}

static void deliver_local(void *ctx, int rank, uint64_t key, uint64_t seq, zx_status status, const char *text,
                          const void *data, size_t data_bytes)
{
    zx_bootstrap *bs = ctx;
    if (rank == bs->rank) {
        zx_boot_deliver(bs, key, seq, status, text, data, data_bytes);
        return;
    }
    zx_wire_head head = {.type = ZX_FRAME_RESULT, .status = (uint16_t)status, .key = key, .seq = seq};
    const void *part = status == ZX_OK ? data : text;
    size_t part_bytes = status == ZX_OK ? data_bytes : strlen(text) + 1;
    if (bs->conns[rank].fd >= 0 && zx_conn_send(&bs->conns[rank], head, part, part_bytes, NULL, 0) != ZX_OK) {
        zx_error_clear(); /* the watch finds the broken connection and says whose it was */
    }
    zx_watch_wake(bs);
}

static zx_status init_sync(zx_bootstrap *bs)
{
    int err = pthread_mutex_init(&bs->own_lock, NULL);
    if (err != 0) {
        ZX_FAIL_SYS(err, "pthread_mutex_init", "no mutex for the bootstrap");
    }
    if (zx_boot_cond_init(&bs->own_changed) != ZX_OK) {
        pthread_mutex_destroy(&bs->own_lock);
        return zx_error_last()->status;
    }
    bs->own_sync = true;
    bs->lock = &bs->own_lock;
    bs->changed = &bs->own_changed;
    return ZX_OK;
}

static zx_status open_processes(zx_bootstrap *bs, const zx_bootstrap_config *config)
{
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, bs->world, bs->gone));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_COMM, bs->world, bs->conns));
    for (int i = 0; i < bs->world; i++) {
        zx_conn_init(&bs->conns[i], -1);
    }
    if (bs->rank == 0) {
        ZX_TRY(zx_hub_open(&bs->hub, bs->world, deliver_local, bs));
    }
    if (bs->world > 1) {
        ZX_TRY(zx_rendezvous(bs, config));
        ZX_TRY(zx_watch_start(bs));
    }
    return ZX_OK;
}

zx_status zx_bootstrap_open(const zx_bootstrap_config *config, zx_device *interrupts, zx_bootstrap **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_bootstrap *bs = NULL;
    *out = NULL;
    ZX_TRY(check_config(config));
    ZX_TRY(ZX_NEW(ZX_MEM_COMM, bs));
    bs->wake_fd = -1;
    bs->rank = config->rank;
    bs->world = config->world;
    bs->local_rank = config->local_world > 0 ? config->local_rank : config->rank;
    bs->local_world = config->local_world > 0 ? config->local_world : config->world;
    bs->interrupts = interrupts;
    snprintf(bs->job, sizeof bs->job, "%s", config->job ? config->job : "");
    snprintf(bs->token, sizeof bs->token, "%s", config->token ? config->token : "");
    ZX_TRY_GOTO(init_sync(bs), fail);
    bs->timeout_s = config->timeout_s;
    if (!(bs->timeout_s > 0)) {
        int64_t seconds = 0;
        ZX_TRY_GOTO(zx_env_int(ZX_ENV_TIMEOUT, 1, 1000000, &seconds), fail);
        bs->timeout_s = (double)seconds;
    }
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, bs->world, bs->pids), fail);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_COMM, bs->world, bs->everyone), fail);
    for (int i = 0; i < bs->world; i++) {
        bs->everyone[i] = i;
        bs->pids[i] = getpid();
    }
    bs->all = (zx_group){.n_ranks = bs->world, .ranks = bs->everyone};
    if (config->meeting != NULL) {
        ZX_TRY_GOTO(zx_meeting_join(config->meeting, bs), fail);
    } else {
        ZX_TRY_GOTO(open_processes(bs, config), fail);
    }
    *out = bs;
    return ZX_OK;
fail:
    bootstrap_free(bs);
    return zx_rc_;
}

/* The others are told, and what is still in our buffers goes out, for at most a second. */
static void say_goodbye(zx_bootstrap *bs)
{
    zx_wire_head bye = {.type = ZX_FRAME_BYE, .from = bs->rank};
    pthread_mutex_lock(bs->lock);
    bs->closing = true;
    bool waits = false;
    for (int i = 0; i < bs->world; i++) {
        zx_conn *conn = &bs->conns[i];
        if (conn->fd >= 0 && zx_conn_send(conn, bye, NULL, 0, NULL, 0) != ZX_OK) {
            zx_error_clear();
            zx_conn_close(conn);
        }
        waits = waits || (conn->fd >= 0 && conn->out.len > 0);
    }
    zx_watch_wake(bs);
    int64_t end = zx_now_ns() + 1000000000;
    while (waits && zx_now_ns() < end) {
        zx_boot_cond_wait(bs->changed, bs->lock, 5 * 1000000);
        waits = false;
        for (int i = 0; i < bs->world; i++) {
            waits = waits || (bs->conns[i].fd >= 0 && bs->conns[i].out.len > 0);
        }
    }
    pthread_mutex_unlock(bs->lock);
}

void zx_bootstrap_close(zx_bootstrap *bs)
{
    if (bs == NULL) {
        return;
    }
    if (bs->watch_runs) {
        say_goodbye(bs);
    }
    bootstrap_free(bs);
}

/* ---- questions -------------------------------------------------------------------------------------- */

int zx_bootstrap_rank(const zx_bootstrap *bs)
{
    return bs->rank;
}

int zx_bootstrap_world(const zx_bootstrap *bs)
{
    return bs->world;
}

double zx_bootstrap_timeout(const zx_bootstrap *bs)
{
    return bs->timeout_s;
}

bool zx_bootstrap_threads(const zx_bootstrap *bs)
{
    return bs->meeting != NULL;
}

int64_t zx_bootstrap_pid(const zx_bootstrap *bs, int rank)
{
    return bs->pids[rank];
}

zx_status zx_bootstrap_health(zx_bootstrap *bs)
{
    pthread_mutex_lock(bs->lock);
    zx_status status = bs->fault;
    char text[ZX_ERROR_TEXT];
    if (status != ZX_OK) {
        snprintf(text, sizeof text, "%s", bs->fault_text);
    }
    pthread_mutex_unlock(bs->lock);
    if (status != ZX_OK) {
        ZX_FAIL(status, "%s", text);
    }
    return ZX_OK;
}

/* ---- collectives ------------------------------------------------------------------------------------ */

static zx_status enter(zx_bootstrap *bs, const zx_hub_entry *entry)
{
    if (bs->meeting != NULL) {
        return zx_meeting_enter(bs->meeting, entry);
    }
    if (bs->rank == 0) {
        zx_status status = zx_hub_enter(&bs->hub, entry);
        zx_watch_wake(bs); /* it looks at the deadline of a pending call */
        return status;
    }
    zx_wire_head head = {
        .type = ZX_FRAME_GATHER, .from = bs->rank, .n_ranks = entry->n_ranks, .key = entry->key, .seq = entry->seq};
    snprintf(head.what, sizeof head.what, "%s", entry->what);
    if (bs->conns[0].fd < 0) {
        ZX_FAIL(ZX_ERR_PEER, "'%s' cannot complete: rank 0 (pid %lld) has closed its bootstrap", entry->what,
                (long long)bs->pids[0]);
    }
    zx_status status = zx_conn_send(&bs->conns[0], head, entry->ranks, (size_t)entry->n_ranks * sizeof *entry->ranks,
                                    entry->data, entry->bytes);
    zx_watch_wake(bs);
    if (status == ZX_ERR_SYSTEM) { /* a broken connection: the watch says why */
        zx_error_clear();
        return ZX_OK;
    }
    return status;
}

static zx_status wait_done(zx_bootstrap *bs, zx_waiter *w, const char *what)
{
    int64_t end = zx_now_ns() + (int64_t)((bs->timeout_s + grace_s) * 1e9);
    while (!w->done) {
        if (bs->fault != ZX_OK) {
            ZX_FAIL(bs->fault, "%s", bs->fault_text);
        }
        ZX_TRY(zx_boot_pause(bs, what));
        if (bs->meeting != NULL && !w->done && bs->fault == ZX_OK) {
            zx_meeting_look(bs->meeting);
        } else if (!w->done && zx_now_ns() > end) {
            ZX_FAIL(ZX_ERR_TIMEOUT, "rank 0 (pid %lld) did not answer '%s' of rank %d within %.1f s",
                    (long long)bs->pids[0], what, bs->rank, bs->timeout_s);
        }
    }
    if (w->status != ZX_OK && bs->fault != ZX_OK) { /* the others left because of it */
        ZX_FAIL(bs->fault, "%s", bs->fault_text);
    }
    if (w->status != ZX_OK) {
        ZX_FAIL(w->status, "%s", w->text);
    }
    return ZX_OK;
}

zx_status zx_group_all_gather(zx_bootstrap *bs, zx_group *group, const char *what, const void *in, size_t bytes,
                              void *out)
{
    if (bytes > 0) {
        memset(out, 0, bytes * (size_t)group->n_ranks);
    }
    if (strlen(what) >= ZX_WHAT_TEXT || bytes * (size_t)group->n_ranks > ZX_WIRE_MAX_BYTES / 2) {
        ZX_FAIL(ZX_ERR_ARG, "gather '%s' of %zu bytes a rank: names have at most %d bytes, results at most %zu", what,
                bytes, ZX_WHAT_TEXT - 1, ZX_WIRE_MAX_BYTES / 2);
    }
    ZX_TRY(zx_fault_point("gather"));
    zx_hub_entry entry = {.from = bs->rank,
                          .key = group->key,
                          .seq = ++group->seq,
                          .n_ranks = group->n_ranks,
                          .ranks = group->ranks,
                          .what = what,
                          .bytes = bytes,
                          .data = in};
    zx_waiter w = {.key = group->key, .seq = entry.seq, .out = out, .out_bytes = bytes * (size_t)group->n_ranks};
    pthread_mutex_lock(bs->lock);
    zx_status status = bs->fault;
    if (status != ZX_OK) {
        zx_error_set(status, 0, NULL, __func__, __FILE__, __LINE__, "%s", bs->fault_text);
    } else {
        w.next = bs->waiters;
        bs->waiters = &w;
        status = enter(bs, &entry);
        if (status == ZX_OK) {
            status = wait_done(bs, &w, what);
        }
        zx_waiter **link = &bs->waiters;
        while (*link != &w) {
            link = &(*link)->next;
        }
        *link = w.next;
    }
    pthread_mutex_unlock(bs->lock);
    if (status == ZX_OK) {
        return ZX_OK;
    }
    zx_error_frame("gather", __func__, __FILE__, __LINE__);
    if (status == ZX_ERR_INTERRUPTED || status == ZX_ERR_TIMEOUT) {
        char why[ZX_ERROR_TEXT];
        snprintf(why, sizeof why, "%s", zx_error_last()->text);
        zx_bootstrap_abort(bs, why);
    }
    return status;
}

zx_status zx_bootstrap_all_gather(zx_bootstrap *bs, const char *what, const void *in, size_t bytes, void *out)
{
    return zx_group_all_gather(bs, &bs->all, what, in, bytes, out);
}

zx_status zx_bootstrap_barrier(zx_bootstrap *bs, const char *what)
{
    return zx_group_all_gather(bs, &bs->all, what, NULL, 0, NULL);
}

zx_status zx_bootstrap_exchange_fds(zx_bootstrap *bs, const char *what, int fd, int *out_fds)
{
    return zx_group_exchange_fds(bs, &bs->all, what, fd, out_fds);
}

/* ---- failure ---------------------------------------------------------------------------------------- */

void zx_bootstrap_fail(zx_bootstrap *bs, zx_status status, const char *text)
{
    if (bs->meeting != NULL) {
        zx_meeting_fail(bs->meeting, bs, status, text);
        return;
    }
    pthread_mutex_lock(bs->lock);
    bool first = zx_boot_fault(bs, status, text);
    if (first && bs->watch_runs) {
        zx_wire_head head = {.type = ZX_FRAME_ABORT, .status = (uint16_t)ZX_ERR_PEER, .from = bs->rank};
        for (int i = 0; i < bs->world; i++) {
            zx_conn *conn = &bs->conns[i];
            if (conn->fd >= 0 && zx_conn_send(conn, head, text, strlen(text) + 1, NULL, 0) != ZX_OK) {
                zx_error_clear();
            }
        }
        zx_watch_wake(bs);
    }
    bool claimed = zx_boot_claim_hooks(bs);
    pthread_mutex_unlock(bs->lock);
    if (claimed) {
        zx_boot_call_hooks(bs);
    }
}

void zx_bootstrap_abort(zx_bootstrap *bs, const char *why)
{
    char text[ZX_ERROR_TEXT];
    snprintf(text, sizeof text, "rank %d aborted: %.700s", bs->rank, why);
    zx_bootstrap_fail(bs, ZX_ERR_PEER, text);
}

zx_status zx_bootstrap_on_death(zx_bootstrap *bs, zx_death_hook hook, void *ctx)
{
    pthread_mutex_lock(bs->lock);
    int at = 0;
    while (at < ZX_BOOT_HOOKS && bs->hooks[at].call != NULL) {
        at++;
    }
    bool late = at < ZX_BOOT_HOOKS && bs->hooks_called;
    if (at < ZX_BOOT_HOOKS) {
        bs->hooks[at] = (zx_boot_hook){.call = hook, .ctx = ctx};
    }
    pthread_mutex_unlock(bs->lock);
    if (at == ZX_BOOT_HOOKS) {
        ZX_FAIL(ZX_ERR_STATE, "%d communicators hang on one bootstrap already: close some", ZX_BOOT_HOOKS);
    }
    if (late) {
        hook(ctx); /* the death was before */
    }
    return ZX_OK;
}

void zx_bootstrap_off_death(zx_bootstrap *bs, void *ctx)
{
    pthread_mutex_lock(bs->lock);
    for (int i = 0; i < ZX_BOOT_HOOKS; i++) {
        if (bs->hooks[i].ctx == ctx) {
            bs->hooks[i] = (zx_boot_hook){0};
        }
    }
    while (bs->hooks_running && !pthread_equal(bs->hooks_thread, pthread_self())) {
        zx_boot_cond_wait(bs->changed, bs->lock, 100 * 1000000);
    }
    pthread_mutex_unlock(bs->lock);
}
