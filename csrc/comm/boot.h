/* boot.h - inside of the bootstrap: shared by bootstrap.c (the calls), meeting.c (threads), rendezvous.c (how the
 * sockets come about), watch.c (the thread that reads them) and fds.c (descriptors). Not for other layers.
 *
 * Everything below `lock` is guarded by *lock: a mutex of its own for processes, the meeting's for threads. A call
 * waits on *changed for its waiter to be done or for the fault; nobody calls out (hooks, interrupts) with the lock
 * held.
 */
#ifndef ZX_COMM_BOOT_H
#define ZX_COMM_BOOT_H

#include "comm/bootstrap.h"
#include "comm/wire.h"

#include <pthread.h>
#include <stdatomic.h>

typedef struct zx_waiter { /* on the stack of a thread that waits for a gather */
    struct zx_waiter *next;
    uint64_t key, seq;
    void *out;
    size_t out_bytes;
    bool done;
    zx_status status;
    char text[ZX_HUB_TEXT];
} zx_waiter;

enum { ZX_BOOT_HOOKS = 64, ZX_BOOT_MAX_WORLD = 1024 };

typedef struct zx_boot_hook {
    zx_death_hook call;
    void *ctx;
} zx_boot_hook;

struct zx_bootstrap {
    int rank, world;
    int local_rank, local_world;
    double timeout_s;
    zx_device *interrupts;
    zx_meeting *meeting;
    char job[ZX_JOB_TEXT];
    char token[ZX_TOKEN_TEXT];
    int64_t *pids;     /* (world) */
    int32_t *everyone; /* (world) 0, 1, ...: the members of the world's own group */
    zx_group all;

    pthread_mutex_t *lock;
    pthread_cond_t *changed;
    pthread_mutex_t own_lock;
    pthread_cond_t own_changed;
    bool own_sync; /* own_lock and own_changed are initialised */

    zx_waiter *waiters;
    zx_status fault; /* ZX_OK, or the first failure */
    char fault_text[ZX_ERROR_TEXT];
    bool closing;
    zx_boot_hook hooks[ZX_BOOT_HOOKS];
    bool hooks_called;
    bool hooks_running;
    pthread_t hooks_thread; /* who runs them */

    /* processes: rank 0 has a connection per other rank (index = rank) and the hub; the others have conns[0] */
    zx_conn *conns; /* (world) */
    bool *gone;     /* (world) said goodbye */
    zx_hub hub;
    int wake_fd; /* eventfd; -1 */
    pthread_t watch;
    bool watch_runs;
};

/* meeting.c */
ZX_CHECKED zx_status zx_meeting_join(zx_meeting *meeting, zx_bootstrap *bs);
void zx_meeting_leave(zx_meeting *meeting, zx_bootstrap *bs);
ZX_CHECKED zx_status zx_meeting_enter(zx_meeting *meeting, const zx_hub_entry *entry); /* locked */
void zx_meeting_look(zx_meeting *meeting);                                             /* locked; deadlines */
void zx_meeting_fail(zx_meeting *meeting, zx_bootstrap *from, zx_status status, const char *text);

/* rendezvous.c: fills conns and pids, or fails within the deadline. */
ZX_CHECKED zx_status zx_rendezvous(zx_bootstrap *bs, const zx_bootstrap_config *config);

/* watch.c */
ZX_CHECKED zx_status zx_watch_start(zx_bootstrap *bs);
void zx_watch_stop(zx_bootstrap *bs);
void zx_watch_wake(zx_bootstrap *bs);

/* bootstrap.c, for the files above; the lock is held */
void zx_boot_deliver(zx_bootstrap *bs, uint64_t key, uint64_t seq, zx_status status, const char *text, const void *data,
                     size_t data_bytes);
/* Records the first failure, wakes who waits; returns false if there was one before. */
bool zx_boot_fault(zx_bootstrap *bs, zx_status status, const char *text);
/* Hooks run once: whoever claims them (lock held) calls them (lock not held); the bootstrap lives until then. */
bool zx_boot_claim_hooks(zx_bootstrap *bs);
void zx_boot_call_hooks(zx_bootstrap *bs);
/* Wait on *changed for at most 100 ms, then look at the interrupt hook without the lock. */
ZX_CHECKED zx_status zx_boot_pause(zx_bootstrap *bs, const char *what);
ZX_CHECKED zx_status zx_boot_cond_init(pthread_cond_t *cond); /* on the monotonic clock */
void zx_boot_cond_wait(pthread_cond_t *cond, pthread_mutex_t *lock, int64_t ns);

#endif
