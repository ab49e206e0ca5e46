/* comm_ranks.h - ranks for the tests of comm: a function runs once per rank, in threads of this process or in forked
 * processes, with device, bootstrap, communicator and stream opened for it. */
#ifndef ZX_TESTS_COMM_RANKS_H
#define ZX_TESTS_COMM_RANKS_H

#include "check.h"
#include "comm/comm.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { RANKS_MAX = 16 };

typedef struct ranks_options {
    const char *transport;
    uint64_t delay_seed; /* each rank adds its own number */
    double timeout_s;    /* 0: 60 */
    size_t ring_bytes;
    bool no_comm; /* fn opens its own */
    void *arg;
} ranks_options;

typedef struct ranks_env {
    int rank, world;
    zx_device *dev;
    zx_bootstrap *bs;
    zx_comm *comm;
    zx_stream *stream;
    const ranks_options *options;
    void *arg;
} ranks_env;

typedef void (*ranks_fn)(ranks_env *env);

/* A listening socket on a free port of this machine. */
__attribute__((unused)) static int ranks_listen(int *out_port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&at, len) == 0 && listen(fd, 64) == 0);
    CHECK(getsockname(fd, (struct sockaddr *)&at, &len) == 0);
    *out_port = ntohs(at.sin_port);
    return fd;
}

__attribute__((unused)) static void ranks_run_one(const ranks_options *o, const zx_bootstrap_config *place, ranks_fn fn)
{
    ranks_env env = {.rank = place->rank, .world = place->world, .options = o, .arg = o->arg};
    zx_device_config dc = {.kind = ZX_DEVICE_CPU, .delay_seed = o->delay_seed ? o->delay_seed + (uint64_t)env.rank : 0};
    zx_comm_config cc = {.transport = o->transport ? o->transport : "peer", .ring_bytes = o->ring_bytes};
    zx_log_set_rank(env.rank);
    if (!CHECK_OK(zx_device_open(&dc, &env.dev))) {
        return;
    }
    if (CHECK_OK(zx_bootstrap_open(place, env.dev, &env.bs)) &&
        CHECK_OK(zx_stream_open(env.dev, "comm", &env.stream)) &&
        (o->no_comm || CHECK_OK(zx_comm_open(env.dev, env.bs, &cc, &env.comm)))) {
        fn(&env);
    }
    zx_stream_close(env.stream);
    zx_comm_close(env.comm);
    zx_bootstrap_close(env.bs);
    zx_device_close(env.dev);
}

typedef struct ranks_thread {
    const ranks_options *options;
    zx_bootstrap_config place;
    ranks_fn fn;
} ranks_thread;

__attribute__((unused)) static void *ranks_thread_main(void *arg)
{
    ranks_thread *t = arg;
    ranks_run_one(t->options, &t->place, t->fn);
    return NULL;
}

__attribute__((unused)) static void ranks_threads(int world, const ranks_options *o, ranks_fn fn)
{
    zx_meeting *meeting = NULL;
    pthread_t threads[RANKS_MAX];
    ranks_thread args[RANKS_MAX];
    if (!CHECK_OK(zx_meeting_open(world, &meeting))) {
        return;
    }
    for (int r = 0; r < world; r++) {
        args[r] = (ranks_thread){.options = o, .fn = fn};
        args[r].place = (zx_bootstrap_config){.rank = r,
                                              .world = world,
                                              .meeting = meeting,
                                              .listen_fd = -1,
                                              .timeout_s = o->timeout_s > 0 ? o->timeout_s : 60};
        CHECK(pthread_create(&threads[r], NULL, ranks_thread_main, &args[r]) == 0);
    }
    for (int r = 0; r < world; r++) {
        pthread_join(threads[r], NULL);
    }
    zx_meeting_close(meeting);
}

/* Forks; a rank's process ends with the report of its checks. pids may be NULL; then it waits for all. */
__attribute__((unused)) static void ranks_start(int world, const ranks_options *o, ranks_fn fn, pid_t *pids)
{
    int port = 0, fd = ranks_listen(&port);
    fflush(stdout);
    for (int r = 0; r < world; r++) {
        pids[r] = fork();
        if (pids[r] != 0) {
            continue;
        }
        atomic_store(&check_n_failed_, 0); /* its exit status speaks of its own checks */
        zx_bootstrap_config place = {.rank = r,
                                     .world = world,
                                     .address = "127.0.0.1",
                                     .port = port,
                                     .listen_fd = r == 0 ? fd : -1,
                                     .token = "secret of the test",
                                     .job = "test",
                                     .timeout_s = o->timeout_s > 0 ? o->timeout_s : 60};
        if (r != 0) {
            close(fd);
        }
        ranks_run_one(o, &place, fn);
        _exit(check_report());
    }
    close(fd);
}

/* The exit status of each rank must be 0, but for rank `killed` (-1: none). */
__attribute__((unused)) static void ranks_wait(int world, pid_t *pids, int killed)
{
    for (int r = 0; r < world; r++) {
        int status = 0;
        CHECK(waitpid(pids[r], &status, 0) == pids[r]);
        if (r != killed && !CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0)) {
            printf("    rank %d (pid %d) ended with status 0x%x\n", r, (int)pids[r], status);
        }
    }
}

__attribute__((unused)) static void ranks_processes(int world, const ranks_options *o, ranks_fn fn)
{
    pid_t pids[RANKS_MAX];
    ranks_start(world, o, fn, pids);
    ranks_wait(world, pids, -1);
}

#endif
