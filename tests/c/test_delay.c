/* test_delay.c - delayed streams: they reorder what nothing orders, and only that. */
#include "device_tools.h"

#include <stdlib.h>

enum { N_SEEDS = 40, N_ELEMS = 8 };

/* x *= factor, x += 1 */
static zx_status scale(zx_stream *s, float *x, double factor)
{
    zx_scale_args args = {.a = zx_view_1d(x, ZX_F32, N_ELEMS), .out = zx_view_1d(x, ZX_F32, N_ELEMS), .factor = factor};
    ZX_TRY(ZX_LAUNCH(s, scale, &args));
    return ZX_OK;
}

/* Two streams work on x in turns; with events the order is fixed, without them it is not. Returns x[0]. */
static float ping_pong(uint64_t seed, bool with_events)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, seed);
    zx_stream *s[2];
    zx_event *done[2];
    float *x, result;
    if (dev == NULL) return -1;
    for (int i = 0; i < 2; i++) {
        CHECK_OK(zx_stream_open(dev, i == 0 ? "a" : "b", &s[i]));
        CHECK_OK(zx_event_open(dev, &done[i]));
    }
    CHECK_OK(zx_device_alloc(dev, N_ELEMS * sizeof *x, (void **)&x));
    for (int turn = 0; turn < 10; turn++) {
        int me = turn % 2;
        if (with_events) CHECK_OK(zx_stream_wait_event(s[me], done[1 - me]));
        CHECK_OK(scale(s[me], x, 1 + turn % 3));
        if (with_events) CHECK_OK(zx_event_record(done[me], s[me]));
    }
    CHECK_OK(zx_stream_sync(s[0]));
    CHECK_OK(zx_stream_sync(s[1]));
    result = x[0];
    zx_device_free(dev, x);
    for (int i = 0; i < 2; i++) {
        zx_event_close(done[i]);
        zx_stream_close(s[i]);
    }
    zx_device_close(dev);
    return result;
}

static void test_a_missing_event_is_caught(void)
{
    float right = ping_pong(0, true);
    CHECK(right == ping_pong(0, false)); /* inline streams hide the mistake */
    int n_caught = 0;
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        CHECK(ping_pong(seed, true) == right);
        n_caught += ping_pong(seed, false) != right;
    }
    printf("a missing event shows with %d of %d seeds\n", n_caught, N_SEEDS);
    CHECK(n_caught > N_SEEDS / 4);
}

/* A seed gives the same order each time. */
static void test_a_seed_repeats(void)
{
    for (uint64_t seed = 1; seed <= 10; seed++)
        CHECK(ping_pong(seed, false) == ping_pong(seed, false));
}

/* Only one result must be reached by flags: the second stream computes after the first signalled. */
static void test_flags_order_streams(void)
{
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        zx_device *dev = open_device(ZX_DEVICE_CPU, 1, seed);
        zx_stream *a, *b;
        float *x;
        uint64_t *flag;
        CHECK_OR_RETURN(dev != NULL);
        CHECK_OK(zx_stream_open(dev, "a", &a));
        CHECK_OK(zx_stream_open(dev, "b", &b));
        CHECK_OK(zx_device_alloc(dev, N_ELEMS * sizeof *x, (void **)&x));
        CHECK_OK(zx_device_alloc(dev, ZX_FLAG_BYTES, (void **)&flag));
        for (int round = 1; round <= 5; round++) {
            CHECK_OK(zx_stream_wait(b, flag, (uint64_t)(2 * round - 1))); /* enqueued before the signal is */
            CHECK_OK(scale(b, x, 3));
            CHECK_OK(zx_stream_signal(b, flag, (uint64_t)(2 * round)));
            CHECK_OK(scale(a, x, 2));
            CHECK_OK(zx_stream_signal(a, flag, (uint64_t)(2 * round - 1)));
            CHECK_OK(zx_stream_wait(a, flag, (uint64_t)(2 * round)));
        }
        CHECK_OK(zx_stream_sync(a));
        float want = 0;
        for (int round = 0; round < 5; round++)
            want = (want * 2 + 1) * 3 + 1;
        CHECK(x[0] == want);
        zx_stream_close(b);
        zx_stream_close(a);
        zx_device_free(dev, flag);
        zx_device_free(dev, x);
        zx_device_close(dev);
    }
}

/* A stream keeps its own order whatever else happens, past many times the length of its queue. */
static void test_one_stream_stays_in_order(void)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        zx_device *dev = open_device(ZX_DEVICE_CPU, 1, seed);
        zx_stream *s[3];
        float *x;
        CHECK_OR_RETURN(dev != NULL);
        CHECK_OK(zx_device_alloc(dev, 3 * 64 * sizeof *x, (void **)&x));
        for (int i = 0; i < 3; i++)
            CHECK_OK(zx_stream_open(dev, "s", &s[i]));
        float want = 0;
        for (int turn = 0; turn < 1000; turn++) {
            double factor = turn % 20 == 0 ? 0.25 : 1 - turn % 2;
            for (int i = 0; i < 3; i++)
                CHECK_OK(scale(s[i], x + 64 * i, factor));
            want = want * (float)factor + 1;
        }
        for (int i = 0; i < 3; i++) {
            CHECK_OK(zx_stream_sync(s[i]));
            CHECK(x[64 * i] == want);
            zx_stream_close(s[i]);
        }
        zx_device_free(dev, x);
        zx_device_close(dev);
    }
}

/* Arguments are copied: the caller's struct may go at once. */
static void test_arguments_are_copied(void)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, 3);
    zx_stream *s;
    float *x;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "s", &s));
    CHECK_OK(zx_device_alloc(dev, 60 * N_ELEMS * sizeof *x, (void **)&x));
    zx_fill_args args;
    for (int i = 0; i < 60; i++) {
        args = (zx_fill_args){.out = zx_view_1d(x + i * N_ELEMS, ZX_F32, N_ELEMS), .value = i + 1};
        CHECK_OK(ZX_LAUNCH(s, fill, &args));
        memset(&args, 0xff, sizeof args);
    }
    CHECK_OK(zx_stream_sync(s));
    for (int i = 0; i < 60; i++)
        CHECK(x[i * N_ELEMS] == i + 1 && x[i * N_ELEMS + N_ELEMS - 1] == i + 1);
    zx_stream_close(s);
    zx_device_free(dev, x);
    zx_device_close(dev);
}

static zx_status fails_with_42(void *arg)
{
    ++*(int *)arg;
    ZX_FAIL(ZX_ERR_PEER, "rank 42 went away");
}

static zx_status counts(void *arg)
{
    ++*(int *)arg;
    return ZX_OK;
}

static void test_errors_wait_for_sync(void)
{
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        zx_device *dev = open_device(ZX_DEVICE_CPU, 1, seed);
        zx_stream *s, *other;
        int n_failed = 0, n_after = 0;
        CHECK_OR_RETURN(dev != NULL);
        CHECK_OK(zx_stream_open(dev, "s", &s));
        CHECK_OK(zx_stream_open(dev, "other", &other));
        zx_error_clear();
        CHECK_OK(zx_stream_call(s, "fails", fails_with_42, &n_failed));
        for (int i = 0; i < 10; i++)
            CHECK_OK(zx_stream_call(s, "counts", counts, &n_after));
        CHECK_OK(zx_stream_call(other, "counts", counts, &n_after));
        CHECK_OK(zx_stream_sync(other));
        CHECK_EQ_I64(zx_error_last()->status, ZX_OK); /* nobody was told yet */
        CHECK_STATUS(zx_stream_sync(s), ZX_ERR_PEER);
        CHECK_ERROR_HAS("rank 42");
        CHECK_EQ_I64(n_failed, 1);
        CHECK_EQ_I64(n_after, 11);
        CHECK_OK(zx_stream_sync(s)); /* reported once */
        zx_stream_close(other);
        zx_stream_close(s);
        zx_device_close(dev);
    }
}

/* An event whose stream was closed has passed: closing empties the stream. */
static void test_events_of_closed_streams(void)
{
    for (uint64_t seed = 1; seed <= N_SEEDS; seed++) {
        zx_device *dev = open_device(ZX_DEVICE_CPU, 1, seed);
        zx_stream *a, *b;
        zx_event *event;
        float *x;
        CHECK_OR_RETURN(dev != NULL);
        CHECK_OK(zx_stream_open(dev, "a", &a));
        CHECK_OK(zx_stream_open(dev, "b", &b));
        CHECK_OK(zx_event_open(dev, &event));
        CHECK_OK(zx_device_alloc(dev, N_ELEMS * sizeof *x, (void **)&x));
        CHECK_OK(zx_stream_wait_event(a, event)); /* never recorded: no wait */
        CHECK_OK(scale(a, x, 5));
        CHECK_OK(zx_event_record(event, a));
        CHECK_OK(zx_stream_wait_event(b, event));
        zx_event_close(event);
        zx_stream_close(a);
        CHECK(x[0] == 1);
        CHECK_OK(scale(b, x, 2));
        CHECK_OK(zx_stream_sync(b));
        CHECK(x[0] == 3);
        zx_stream_close(b);
        zx_device_free(dev, x);
        zx_device_close(dev);
    }
}

/* ---- blocked queues ---- */

static bool stop_now(void *arg)
{
    ++*(int *)arg;
    return true;
}

static void test_interrupt_ends_a_blocked_sync(void)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, 9);
    zx_stream *s;
    uint64_t *flag;
    int n_hooks = 0;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "s", &s));
    CHECK_OK(zx_device_alloc(dev, ZX_FLAG_BYTES, (void **)&flag));
    CHECK_OK(zx_stream_wait(s, flag, 1));
    zx_device_set_interrupt(dev, stop_now, &n_hooks);
    int64_t begin = zx_now_ns();
    CHECK_STATUS(zx_stream_sync(s), ZX_ERR_INTERRUPTED);
    CHECK(zx_now_ns() - begin < 200000000);
    CHECK_EQ_I64(n_hooks, 1);
    zx_device_set_interrupt(dev, NULL, NULL);
    zx_device_flag_store(dev, flag, ZX_FLAG_ABORT); /* the work is still there, and ends when it may */
    CHECK_OK(zx_stream_sync(s));
    zx_stream_close(s);
    zx_device_free(dev, flag);
    zx_device_close(dev);
}

/* Ranks as threads, each with a delayed device: flags carry the order between them. */
enum { N_RANKS = 3, N_ROUNDS = 60 };

typedef struct ring {
    uint64_t *flags[N_RANKS]; /* of rank r: how many rounds it has finished */
    float *values;            /* one a rank, far apart */
    uint64_t seed;
} ring;

typedef struct rank {
    ring *ring;
    int index;
} rank;

/* Each round, a rank waits for its left neighbour's round and adds its value. */
static void *run_rank(void *arg)
{
    rank *r = arg;
    ring *ring = r->ring;
    int left = (r->index + N_RANKS - 1) % N_RANKS, right = (r->index + 1) % N_RANKS;
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, ring->seed == 0 ? 0 : ring->seed + (uint64_t)r->index);
    zx_stream *s;
    if (dev == NULL || !CHECK_OK(zx_stream_open(dev, "comm", &s))) return NULL;
    float *mine = ring->values + 64 * r->index, *his = ring->values + 64 * left;
    for (int round = 1; round <= N_ROUNDS; round++) {
        zx_add_args add = {
            .a = zx_view_1d(mine, ZX_F32, 1), .b = zx_view_1d(his, ZX_F32, 1), .out = zx_view_1d(mine, ZX_F32, 1)};
        /* The neighbour on the right reads what I write: it must be done with the last round. */
        uint64_t before = r->index == 0 ? (uint64_t)(round - 1) : (uint64_t)round;
        if (!CHECK_OK(zx_stream_wait(s, ring->flags[left], before)) ||
            !CHECK_OK(zx_stream_wait(s, ring->flags[right], (uint64_t)(round - 1))) ||
            !CHECK_OK(ZX_LAUNCH(s, add, &add)) ||
            !CHECK_OK(zx_stream_signal(s, ring->flags[r->index], (uint64_t)round)))
            break;
    }
    CHECK_OK(zx_stream_sync(s));
    zx_stream_close(s);
    zx_device_close(dev);
    return NULL;
}

static float run_ring(uint64_t seed)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, 0);
    ring ring = {.seed = seed};
    rank ranks[N_RANKS];
    pthread_t threads[N_RANKS];
    CHECK_OR_RETURN(dev != NULL, -1);
    for (int i = 0; i < N_RANKS; i++)
        CHECK_OK(zx_device_alloc(dev, ZX_FLAG_BYTES, (void **)&ring.flags[i]));
    CHECK_OK(zx_device_alloc(dev, 64 * N_RANKS * sizeof(float), (void **)&ring.values));
    for (int i = 0; i < N_RANKS; i++)
        ring.values[64 * i] = (float)(i + 1);
    for (int i = 0; i < N_RANKS; i++) {
        ranks[i] = (rank){.ring = &ring, .index = i};
        CHECK(pthread_create(&threads[i], NULL, run_rank, &ranks[i]) == 0);
    }
    for (int i = 0; i < N_RANKS; i++)
        pthread_join(threads[i], NULL);
    float sum = 0;
    for (int i = 0; i < N_RANKS; i++) {
        sum = sum * 3 + ring.values[64 * i];
        zx_device_free(dev, ring.flags[i]);
    }
    zx_device_free(dev, ring.values);
    zx_device_close(dev);
    return sum;
}

/* The same, by one thread in plain C. */
static float ring_by_hand(void)
{
    float v[N_RANKS], sum = 0;
    for (int i = 0; i < N_RANKS; i++)
        v[i] = (float)(i + 1);
    for (int round = 0; round < N_ROUNDS; round++)
        for (int i = 0; i < N_RANKS; i++)
            v[i] = v[i] / 2 + v[(i + N_RANKS - 1) % N_RANKS];
    for (int i = 0; i < N_RANKS; i++)
        sum = sum * 3 + v[i];
    return sum;
}

static void test_ranks_meet_through_flags(void)
{
    float want = ring_by_hand();
    CHECK(isfinite(want));
    CHECK(run_ring(0) == want);
    for (uint64_t seed = 1; seed <= 8; seed++)
        CHECK(run_ring(seed * 100) == want);
}

/* A thread that blocks elsewhere keeps its queues moving by asking whether it was interrupted. */
static void test_progress_while_blocked_elsewhere(void)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, 17);
    zx_stream *s;
    uint64_t *flag;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "s", &s));
    CHECK_OK(zx_device_alloc(dev, ZX_FLAG_BYTES, (void **)&flag));
    for (int i = 1; i <= 50; i++)
        CHECK_OK(zx_stream_signal(s, flag, (uint64_t)i));
    CHECK(!zx_flag_reached(flag, 50)); /* with this seed something is left in the queue */
    CHECK(!zx_device_interrupted(dev));
    CHECK(zx_flag_reached(flag, 50));
    zx_stream_close(s);
    zx_device_free(dev, flag);
    zx_device_close(dev);
}

static zx_status syncs_itself(void *arg)
{
    ZX_TRY(zx_stream_sync(arg));
    return ZX_OK;
}

static void test_work_cannot_wait_for_work(void)
{
    zx_device *dev = open_device(ZX_DEVICE_CPU, 1, 4);
    zx_stream *s;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "s", &s));
    CHECK_OK(zx_stream_call(s, "syncs", syncs_itself, s));
    CHECK_STATUS(zx_stream_sync(s), ZX_ERR_STATE);
    zx_stream_close(s);
    zx_device_close(dev);
}

int main(void)
{
    RUN(test_a_missing_event_is_caught);
    RUN(test_a_seed_repeats);
    RUN(test_flags_order_streams);
    RUN(test_one_stream_stays_in_order);
    RUN(test_arguments_are_copied);
    RUN(test_errors_wait_for_sync);
    RUN(test_events_of_closed_streams);
    RUN(test_interrupt_ends_a_blocked_sync);
    RUN(test_ranks_meet_through_flags);
    RUN(test_progress_while_blocked_elsewhere);
    RUN(test_work_cannot_wait_for_work);
    return check_report();
}
