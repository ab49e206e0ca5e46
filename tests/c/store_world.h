/* store_world.h - ranks as threads for the tests of the store: each with a device, a communicator and a stream. */
#ifndef ZX_TESTS_STORE_WORLD_H
#define ZX_TESTS_STORE_WORLD_H

#include <stdlib.h>

#include "check.h"
#include "store/store.h"

enum { MAX_WORLD = 8 };

typedef struct rank_ctx {
    int rank, world;
    zx_device *dev;
    zx_bootstrap *bs;
    zx_comm *comm;
    zx_stream *stream;
    void *arg;
} rank_ctx;

typedef zx_status (*rank_fn)(rank_ctx *ctx);

typedef struct rank_thread {
    rank_ctx ctx;
    rank_fn fn;
    zx_meeting *meeting;
    uint64_t delay_seed;
    double timeout_s;
    zx_status status;
} rank_thread;

static zx_status rank_body(rank_thread *t)
{
    zx_device_config device = {.kind = ZX_DEVICE_CPU, .n_threads = 1, .delay_seed = t->delay_seed};
    zx_bootstrap_config boot = {
        .rank = t->ctx.rank, .world = t->ctx.world, .meeting = t->meeting, .listen_fd = -1, .timeout_s = t->timeout_s};
    ZX_TRY(zx_device_open(&device, &t->ctx.dev));
    ZX_TRY(zx_bootstrap_open(&boot, t->ctx.dev, &t->ctx.bs));
    ZX_TRY(zx_comm_open(t->ctx.dev, t->ctx.bs, NULL, &t->ctx.comm));
    ZX_TRY(zx_stream_open(t->ctx.dev, "compute", &t->ctx.stream));
    return t->fn(&t->ctx);
}

static void *rank_main(void *arg)
{
    rank_thread *t = arg;
    t->status = rank_body(t);
    if (t->status != ZX_OK) {
        check_(false, __FILE__, __LINE__, "a rank failed");
        printf("    rank %d of %d\n", t->ctx.rank, t->ctx.world);
        if (t->ctx.comm) zx_comm_abort(t->ctx.comm, zx_error_last()->text);
        check_print_error_();
    }
    zx_stream_close(t->ctx.stream);
    zx_comm_close(t->ctx.comm);
    zx_bootstrap_close(t->ctx.bs);
    zx_device_close(t->ctx.dev);
    return NULL;
}

/* Runs fn on every rank, each with its argument args + rank * arg_bytes; true if all succeeded. */
__attribute__((unused)) static bool run_ranks(int world, uint64_t delay_seed, double timeout_s, rank_fn fn, void *args,
                                              size_t arg_bytes)
{
    rank_thread ranks[MAX_WORLD];
    memset(ranks, 0, sizeof ranks);
    pthread_t threads[MAX_WORLD];
    zx_meeting *meeting = NULL;
    bool ok = true;
    if (!CHECK_OK(zx_meeting_open(world, &meeting))) return false;
    for (int r = 0; r < world; r++) {
        ranks[r] = (rank_thread){.ctx = {.rank = r, .world = world, .arg = (char *)args + (size_t)r * arg_bytes},
                                 .fn = fn,
                                 .meeting = meeting,
                                 .delay_seed = delay_seed ? delay_seed * 1000 + (uint64_t)r : 0,
                                 .timeout_s = timeout_s};
        if (r > 0 && !CHECK(pthread_create(&threads[r], NULL, rank_main, &ranks[r]) == 0)) abort();
    }
    rank_main(&ranks[0]);
    for (int r = 0; r < world; r++) {
        if (r > 0) pthread_join(threads[r], NULL);
        ok &= ranks[r].status == ZX_OK;
    }
    zx_meeting_close(meeting);
    return ok;
}

#endif
