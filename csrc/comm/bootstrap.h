/* bootstrap.h - how ranks meet, and the channel that stays open between them.
 *
 * Processes: rank 0 listens on MASTER_ADDR:MASTER_PORT, the others connect; each connection proves a shared token, the
 * job's name and the world size, and a stranger is refused without disturbing the job. The sockets stay open: a closed
 * one is how a dead rank is noticed at once; rank 0 tells everybody who it was. Threads of one process meet in a
 * zx_meeting instead. Everything here runs on the host, has a deadline, and is slow (about 100 us): for set-up, errors
 * and small control data, never in a step's hot path.
 *
 * One background thread per bootstrap (the watch) looks at the sockets, answers aborts, and calls on_death.
 */
#ifndef ZX_COMM_BOOTSTRAP_H
#define ZX_COMM_BOOTSTRAP_H

#include "device/device.h"

typedef struct zx_bootstrap zx_bootstrap;

/* Where threads of one process meet; one object for all of them, closed by whoever opened it, after them. */
typedef struct zx_meeting zx_meeting;
ZX_CHECKED zx_status zx_meeting_open(int world, zx_meeting **out);
void zx_meeting_close(zx_meeting *meeting);

typedef struct zx_bootstrap_config {
    int rank, world;
    int local_rank, local_world; /* on this host; 0, 0 = all ranks are on this host */
    zx_meeting *meeting;         /* threads; else NULL */
    const char *address;         /* processes: host name or address of rank 0 */
    int port;                    /* processes */
    int listen_fd;               /* rank 0: an already listening socket (our launcher hands one over), or -1; taken:
                                  * open closes it when everybody is there, or on failure */
    const char *token;           /* shared secret; NULL or "" only where world is 1 or a meeting is used */
    const char *job;             /* name of the job; part of the greeting */
    double timeout_s;            /* for each wait; <= 0: ZEROX_TIMEOUT */
} zx_bootstrap_config;

ZX_CHECKED zx_status zx_bootstrap_open(const zx_bootstrap_config *config, zx_device *interrupts, zx_bootstrap **out);
void zx_bootstrap_close(zx_bootstrap *bs); /* orderly: the others are told that this is no death */
int zx_bootstrap_rank(const zx_bootstrap *bs);
int zx_bootstrap_world(const zx_bootstrap *bs);
double zx_bootstrap_timeout(const zx_bootstrap *bs);
bool zx_bootstrap_threads(const zx_bootstrap *bs); /* ranks are threads of this process */

/* Collective: every rank contributes `bytes` bytes; out holds world x bytes in rank order. Ranks that call something
 * else or another size all get ZX_ERR_PEER. `what` names the call in errors. */
ZX_CHECKED zx_status zx_bootstrap_all_gather(zx_bootstrap *bs, const char *what, const void *in, size_t bytes,
                                             void *out);
ZX_CHECKED zx_status zx_bootstrap_barrier(zx_bootstrap *bs, const char *what);
/* Collective among processes of one host: each gives a descriptor (borrowed) or -1, out_fds gets world descriptors that
 * the caller owns (-1 where none was given, and for itself). Abstract Unix sockets: no file is left behind. */
ZX_CHECKED zx_status zx_bootstrap_exchange_fds(zx_bootstrap *bs, const char *what, int fd, int *out_fds);

/* The same calls among some of the ranks (the members of a communicator). All members compute the same key and list
 * the same ranks in the same order; a group's calls are numbered in it, so that groups do not disturb each other.
 * Key 0 is the world's own. out and out_fds hold n entries in the group's order. */
typedef struct zx_group {
    uint64_t key;
    int n_ranks;
    const int32_t *ranks; /* (n_ranks); borrowed */
    uint64_t seq;         /* calls made so far; start with 0 */
} zx_group;
ZX_CHECKED zx_status zx_group_all_gather(zx_bootstrap *bs, zx_group *group, const char *what, const void *in,
                                         size_t bytes, void *out);
ZX_CHECKED zx_status zx_group_exchange_fds(zx_bootstrap *bs, zx_group *group, const char *what, int fd, int *out_fds);

/* Process id of a rank (its own process's for threads). */
int64_t zx_bootstrap_pid(const zx_bootstrap *bs, int rank);

/* Tell everybody that this rank gives up, and why. Idempotent; never blocks long. */
void zx_bootstrap_abort(zx_bootstrap *bs, const char *why);
/* The same without a sentence of its own before `why`: for a verdict on another rank. */
void zx_bootstrap_fail(zx_bootstrap *bs, zx_status status, const char *text);
/* ZX_OK, or the recorded reason: ZX_ERR_PEER "rank 2 (pid 4711) died" or "rank 1 aborted: ...". Any thread. */
ZX_CHECKED zx_status zx_bootstrap_health(zx_bootstrap *bs);
/* Called once from the watch thread when a rank dies or aborts, so that waits can be released. */
typedef void (*zx_death_hook)(void *ctx);
ZX_CHECKED zx_status zx_bootstrap_on_death(zx_bootstrap *bs, zx_death_hook hook, void *ctx);
void zx_bootstrap_off_death(zx_bootstrap *bs, void *ctx); /* waits until no call is running */

#endif
