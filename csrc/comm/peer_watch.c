/* peer_watch.c - the watchdog: one thread per root communicator that turns a wait without end into an error with a
 * name.
 *
 * DESIGN
 * Every 50 ms it counts its own beat on the board, which the others see, and looks at four things: the bootstrap (a
 * rank died or aborted), the boards of the others (a rank gives up; that also works while rank 0, the bootstrap's
 * centre, is stopped), whether a rank that is waited for has closed, and whether a wait has stood still for longer than
 * the deadline. For the last it names the true culprit. Among the ranks that have not come: one without a heartbeat is
 * stopped; one that is in no call is late; one that is in a call waits for somebody itself, and then the same questions
 * go to all ranks. No clock is read in a call: the watchdog notes itself since when a wait has not moved.
 *
 * After a failure it stores ZX_FLAG_ABORT into every flag that this rank can wait for, again and again until the end,
 * because a late signal of another rank may overwrite it. Only this rank's own waits are released here; each rank
 * releases its own.
 */
#include "comm/peer.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static void abort_flags(zx_peer *p)
{
    zx_comm *comm = p->comm;
    for (int r = 0; r < comm->world; r++) {
        for (uint64_t parity = 0; parity < 2 && r != comm->rank; parity++) {
            zx_device_flag_store(comm->dev, zx_peer_round_slot(p, comm->rank, r, parity)->flag, ZX_FLAG_ABORT);
            zx_device_flag_store(comm->dev, zx_peer_pair_slot(p, comm->rank, r, parity)->flag, ZX_FLAG_ABORT);
        }
        zx_device_flag_store(comm->dev, zx_peer_ack(p, comm->rank, r), ZX_FLAG_ABORT);
    }
}

void zx_peer_release(zx_comm *root)
{
    zx_peer *rp = zx_peer_of(root);
    if (rp == NULL || !rp->watch_ready) {
        return;
    }
    pthread_mutex_lock(&rp->watch_lock);
    zx_board *board = zx_peer_board(rp, root->rank);
    if (atomic_load(&board->failed) == 0) {
        memcpy(board->text, root->fault.text, sizeof board->text);
        atomic_store(&board->failed, 1);
    }
    for (zx_peer *p = rp->family; p != NULL; p = p->next) {
        abort_flags(p);
    }
    pthread_mutex_unlock(&rp->watch_lock);
}

/* ---- who is missing --------------------------------------------------------------------------------- */

static bool reached(const uint64_t *flag, uint64_t value)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE) >= value;
}

/* Ranks of p's communicator that the current wait still needs; returns how many. */
static int list_missing(const zx_peer *p, int missing[ZX_PEER_MAX])
{
    const zx_waiting *w = &p->waiting;
    uint32_t kind = atomic_load_explicit(&w->kind, memory_order_relaxed);
    int peer = atomic_load_explicit(&w->peer, memory_order_relaxed);
    uint64_t value = atomic_load_explicit(&w->value, memory_order_relaxed);
    int n = 0, me = p->comm->rank;
    switch ((zx_wait_kind)kind) {
    case ZX_WAIT_NONE:
        break;
    case ZX_WAIT_ROUND:
        for (int r = 0; r < p->comm->world; r++) {
            if (r != me && !reached(zx_peer_round_slot(p, me, r, value)->flag, value)) {
                missing[n++] = r;
            }
        }
        break;
    case ZX_WAIT_SENT:
        if (!reached(zx_peer_pair_slot(p, me, peer, value)->flag, value)) {
            missing[n++] = peer;
        }
        break;
    case ZX_WAIT_ACK:
        if (!reached(zx_peer_ack(p, me, peer), value)) {
            missing[n++] = peer;
        }
        break;
    }
    return n;
}

static void place_text(const zx_comm *comm, const zx_place *place, char text[ZX_CALL_TEXT])
{
    uint32_t kind = atomic_load(&place->kind);
    zx_call call = {.op = (zx_comm_op)(kind & 0xff),
                    .send_dtype = (zx_dtype)(kind >> 8 & 0xff),
                    .recv_dtype = (zx_dtype)(kind >> 16 & 0xff),
                    .n = atomic_load(&place->n),
                    .peer = atomic_load(&place->peer),
                    .seq = atomic_load(&place->seq)};
    zx_peer_read_label(place, call.label);
    if (call.seq == 0) {
        snprintf(text, ZX_CALL_TEXT, "none yet");
    } else {
        zx_call_text(comm, &call, text);
    }
}

static bool is_silent(const zx_peer *rp, int rank, int64_t now)
{
    return (double)(now - rp->beat_ns[rank]) > rp->silent_s * 1e9;
}

static bool is_idle(const zx_peer *rp, int rank)
{
    return atomic_load(&zx_peer_board(rp, rank)->n_inside) == 0;
}

/* A rank of the root that holds the others up, or -1 when all of them wait. */
static int find_culprit(const zx_peer *rp, const int32_t *candidates, int n, int64_t now)
{
    for (int i = 0; i < n; i++) {
        if (is_silent(rp, candidates[i], now)) {
            return candidates[i];
        }
    }
    for (int i = 0; i < n; i++) {
        if (is_idle(rp, candidates[i])) {
            return candidates[i];
        }
    }
    return -1;
}

static void verdict(zx_peer *rp, zx_peer *p, const int *missing, int n_missing, char text[ZX_ERROR_TEXT])
{
    zx_comm *comm = p->comm, *root = rp->comm;
    int64_t now = zx_now_ns();
    int32_t near[ZX_PEER_MAX];
    char mine[ZX_CALL_TEXT], theirs[ZX_CALL_TEXT];
    place_text(comm, zx_peer_place(p, comm->rank), mine);
    for (int i = 0; i < n_missing; i++) {
        near[i] = comm->ranks[missing[i]];
    }
    int culprit = find_culprit(rp, near, n_missing, now);
    bool behind = culprit < 0; /* those that are missing wait for somebody else */
    if (behind) {
        int32_t all[ZX_PEER_MAX];
        int n = 0;
        for (int r = 0; r < root->world; r++) {
            if (r != root->rank) {
                all[n++] = r;
            }
        }
        culprit = find_culprit(rp, all, n, now);
    }
    const zx_peer *where = p;
    int at = -1;
    for (int r = 0; r < comm->world; r++) {
        at = comm->ranks[r] == (culprit >= 0 ? culprit : near[0]) ? r : at;
    }
    if (at < 0) { /* a rank outside this communicator: its place in the root */
        where = rp;
        at = culprit;
    }
    place_text(where->comm, zx_peer_place(where, at), theirs);
    if (culprit < 0) {
        snprintf(text, ZX_ERROR_TEXT,
                 "rank %d did not reach %s of rank %d within %.1f s; it is in %s: the ranks wait for each other",
                 near[0], mine, (int)comm->ranks[comm->rank], comm->timeout_s, theirs);
        return;
    }
    char through[64] = "";
    if (behind) {
        snprintf(through, sizeof through, " (rank %d waits for it, too)", near[0]);
    }
    snprintf(text, ZX_ERROR_TEXT, "rank %d (pid %lld)%s did not reach %s within %.1f s; its last call was %s%s",
             culprit, (long long)zx_bootstrap_pid(root->bs, culprit),
             is_silent(rp, culprit, now) ? " does not respond, it seems to be stopped, and" : "", mine, comm->timeout_s,
             theirs, through);
}

/* ---- the thread ------------------------------------------------------------------------------------- */

/* Appends what this rank was in, so that the error names operation and number. */
static void add_call(const zx_peer *rp, char text[ZX_ERROR_TEXT])
{
    for (const zx_peer *p = rp->family; p != NULL; p = p->next) {
        const zx_place *place = zx_peer_place(p, p->comm->rank);
        if (atomic_load(&place->inside)) {
            char call[ZX_CALL_TEXT];
            size_t at = strlen(text);
            place_text(p->comm, place, call);
            snprintf(text + at, ZX_ERROR_TEXT - at, "; rank %d was in %s", (int)p->comm->ranks[p->comm->rank], call);
            return;
        }
    }
}

/* True when the family must fail, for the reason in text. */
static bool look(zx_peer *rp, zx_status *out_status, bool *out_tell, char text[ZX_ERROR_TEXT])
{
    zx_comm *root = rp->comm;
    int64_t now = zx_now_ns();
    *out_tell = false;
    *out_status = zx_bootstrap_health(root->bs);
    if (*out_status != ZX_OK) {
        snprintf(text, ZX_ERROR_TEXT, "%s", zx_error_last()->text);
        zx_error_clear();
        add_call(rp, text);
        return true;
    }
    for (int r = 0; r < root->world; r++) {
        zx_board *board = zx_peer_board(rp, r);
        uint64_t beat = atomic_load(&board->beat);
        if (beat != rp->beat[r] || rp->beat_ns[r] == 0) {
            rp->beat[r] = beat;
            rp->beat_ns[r] = now;
        }
        if (r != root->rank && atomic_load(&board->failed)) {
            *out_status = ZX_ERR_PEER;
            memcpy(text, board->text, ZX_ERROR_TEXT);
            text[ZX_ERROR_TEXT - 1] = '\0';
            return true;
        }
    }
    for (zx_peer *p = rp->family; p != NULL; p = p->next) {
        int missing[ZX_PEER_MAX];
        uint64_t ticket = atomic_load_explicit(&p->waiting.ticket, memory_order_acquire);
        int n = list_missing(p, missing);
        if (ticket != p->seen_ticket || n == 0) {
            p->seen_ticket = ticket;
            p->seen_ns = now;
            continue;
        }
        for (int i = 0; i < n; i++) {
            if (atomic_load(&zx_peer_place(p, missing[i])->closed)) {
                char call[ZX_CALL_TEXT];
                place_text(p->comm, zx_peer_place(p, p->comm->rank), call);
                snprintf(text, ZX_ERROR_TEXT, "rank %d closed the communicator while rank %d waits for it in %s",
                         (int)p->comm->ranks[missing[i]], (int)p->comm->ranks[p->comm->rank], call);
                *out_status = ZX_ERR_PEER;
                *out_tell = true;
                return true;
            }
        }
        if ((double)(now - p->seen_ns) >= p->comm->timeout_s * 1e9) {
            verdict(rp, p, missing, n, text);
            *out_status = ZX_ERR_TIMEOUT;
            *out_tell = true;
            return true;
        }
    }
    return false;
}

static void *watch_main(void *arg)
{
    zx_comm *root = arg;
    zx_peer *rp = zx_peer_of(root);
    zx_log_set_rank(root->rank);
    pthread_mutex_lock(&rp->watch_lock);
    while (!rp->watch_stop) {
        char text[ZX_ERROR_TEXT];
        zx_status status = ZX_OK;
        bool tell = false, failed = zx_comm_failed(root);
        atomic_fetch_add(&zx_peer_board(rp, root->rank)->beat, 1);
        bool fails = !failed && look(rp, &status, &tell, text);
        if (failed || fails) { /* hooks and release take the lock themselves */
            pthread_mutex_unlock(&rp->watch_lock);
            if (fails) {
                zx_comm_fail(root, status, tell, text);
            } else {
                zx_peer_release(root);
            }
            pthread_mutex_lock(&rp->watch_lock);
        }
        struct timespec at;
        clock_gettime(CLOCK_MONOTONIC, &at);
        at.tv_nsec += ZX_PEER_BEAT_MS * 1000000;
        if (at.tv_nsec >= 1000000000) {
            at.tv_nsec -= 1000000000;
            at.tv_sec++;
        }
        if (!rp->watch_stop) {
            pthread_cond_timedwait(&rp->watch_wake, &rp->watch_lock, &at);
        }
    }
    pthread_mutex_unlock(&rp->watch_lock);
    return NULL;
}

/* From the bootstrap's thread: look now rather than at the next beat. */
static void on_death(void *ctx)
{
    zx_peer *rp = ctx;
    pthread_cond_signal(&rp->watch_wake);
}

static zx_status init_wake(zx_peer *rp)
{
    pthread_condattr_t attr;
    int err = pthread_condattr_init(&attr);
    if (err == 0) {
        err = pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
        err = err != 0 ? err : pthread_cond_init(&rp->watch_wake, &attr);
        pthread_condattr_destroy(&attr);
    }
    if (err == 0) {
        err = pthread_mutex_init(&rp->watch_lock, NULL);
    }
    if (err != 0) {
        ZX_FAIL_SYS(err, "pthread_cond_init", "no condition variable for the watchdog of a communicator");
    }
    rp->watch_ready = true;
    return ZX_OK;
}

zx_status zx_peer_watch_start(zx_comm *root)
{
    zx_peer *rp = zx_peer_of(root);
    double half = root->timeout_s / 2;
    rp->silent_s = half > 1.0 ? 1.0 : half < 0.25 ? 0.25 : half;
    ZX_TRY(init_wake(rp));
    ZX_TRY(zx_fault_point("watchdog thread"));
    int err = pthread_create(&rp->watch, NULL, watch_main, root);
    if (err != 0) {
        ZX_FAIL_SYS(err, "pthread_create", "no thread for the watchdog of a communicator");
    }
    rp->watch_runs = true;
    ZX_TRY(zx_bootstrap_on_death(root->bs, on_death, rp));
    return ZX_OK;
}

void zx_peer_watch_stop(zx_comm *root)
{
    zx_peer *rp = zx_peer_of(root);
    if (rp->watch_runs) {
        zx_bootstrap_off_death(root->bs, rp);
        pthread_mutex_lock(&rp->watch_lock);
        rp->watch_stop = true;
        pthread_cond_signal(&rp->watch_wake);
        pthread_mutex_unlock(&rp->watch_lock);
        pthread_join(rp->watch, NULL);
        rp->watch_runs = false;
    }
    if (rp->watch_ready) {
        pthread_mutex_destroy(&rp->watch_lock);
        pthread_cond_destroy(&rp->watch_wake);
        rp->watch_ready = false;
    }
}

void zx_peer_watch_add(zx_comm *comm)
{
    zx_peer *rp = zx_peer_of(comm->root), *p = zx_peer_of(comm);
    pthread_mutex_lock(&rp->watch_lock);
    p->next = rp->family;
    rp->family = p;
    pthread_mutex_unlock(&rp->watch_lock);
}

void zx_peer_watch_remove(zx_comm *comm)
{
    zx_peer *rp = zx_peer_of(comm->root), *p = zx_peer_of(comm);
    if (rp == NULL || !rp->watch_ready) {
        return;
    }
    pthread_mutex_lock(&rp->watch_lock);
    for (zx_peer **link = &rp->family; *link != NULL; link = &(*link)->next) {
        if (*link == p) {
            *link = p->next;
            break;
        }
    }
    pthread_mutex_unlock(&rp->watch_lock);
}
