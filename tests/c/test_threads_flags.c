/* test_threads_flags.c - signal and wait among threads: order, sleeping, many waiters, release, interrupt, latency. */
#include "device_tools.h"

#include <sched.h>
#include <stdlib.h>

typedef struct side {
    zx_device *dev;
    zx_stream *stream;
} side;

static bool side_open(side *s)
{
    *s = (side){0};
    s->dev = open_cpu(1);
    return s->dev != NULL && CHECK_OK(zx_stream_open(s->dev, "comm", &s->stream));
}

static void side_close(side *s)
{
    zx_stream_close(s->stream);
    zx_device_close(s->dev);
}

/* A slot of its own for each flag, as device.h asks. */
typedef union slot {
    _Alignas(ZX_FLAG_BYTES) uint64_t flag;
    char bytes[ZX_FLAG_BYTES];
} slot;

/* ---- ping and pong ---- */

typedef struct table {
    slot ping, pong;
    int64_t ball[8]; /* plain memory that the flags protect */
    int n_rounds;
    int64_t pause_ns;  /* before each answer: 0, or drawn up to this */
    int64_t *round_ns; /* what each round took */
} table;

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void pause_up_to(int64_t most_ns, unsigned *seed)
{
    if (most_ns == 0) return;
    int64_t end = zx_now_ns() + rand_r(seed) % most_ns;
    while (zx_now_ns() < end) {
        if (rand_r(seed) % 2) sched_yield();
    }
}

static void *answers(void *arg)
{
    table *t = arg;
    side s;
    unsigned seed = 7;
    if (!side_open(&s)) return NULL;
    for (int64_t i = 1; i <= t->n_rounds; i++) {
        if (!CHECK_OK(zx_stream_wait(s.stream, &t->ping.flag, (uint64_t)i))) break;
        for (int j = 0; j < 8; j++)
            t->ball[j] += i;
        pause_up_to(t->pause_ns, &seed);
        if (!CHECK_OK(zx_stream_signal(s.stream, &t->pong.flag, (uint64_t)i))) break;
    }
    side_close(&s);
    return NULL;
}

/* Plays all rounds and sorts what they took. */
static void play(table *t)
{
    side s;
    pthread_t thread;
    unsigned seed = 3;
    if (!side_open(&s)) return;
    CHECK_OR_RETURN(CHECK(pthread_create(&thread, NULL, answers, t) == 0));
    int64_t want = 0, n_wrong = 0;
    for (int64_t i = 1; i <= t->n_rounds; i++) {
        int64_t begin = zx_now_ns();
        if (!CHECK_OK(zx_stream_signal(s.stream, &t->ping.flag, (uint64_t)i))) break;
        if (!CHECK_OK(zx_stream_wait(s.stream, &t->pong.flag, (uint64_t)i))) break;
        t->round_ns[i - 1] = zx_now_ns() - begin;
        want += i;
        for (int j = 0; j < 8; j++)
            n_wrong += t->ball[j] != want;
        pause_up_to(t->pause_ns, &seed);
    }
    pthread_join(thread, NULL);
    CHECK_EQ_I64(n_wrong, 0);
    side_close(&s);
    qsort(t->round_ns, (size_t)t->n_rounds, sizeof *t->round_ns, by_value);
}

static int64_t g_round_ns[20000];

static void test_ping_pong(void)
{
    static table t = {.n_rounds = 20000, .round_ns = g_round_ns};
    play(&t);
    printf("one way between two threads: %.0f ns (median)\n", (double)g_round_ns[10000] / 2);
    CHECK(g_round_ns[10000] < 50000000);
}

/* Pauses around the ends of spinning and yielding put both sides to sleep and wake them at every point. A lost
 * wake-up shows as a round of 100 ms, the sleeper's own look; a busy machine may make one or two look like it. */
static void test_no_wake_up_is_lost(void)
{
    static const int64_t pauses[] = {20000, 150000, 400000};
    static table tables[3];
    for (int p = 0; p < 3; p++) {
        table *t = &tables[p];
        *t = (table){.n_rounds = 1500, .pause_ns = pauses[p], .round_ns = g_round_ns};
        play(t);
        CHECK(g_round_ns[1500 - 3] < 90000000);
    }
}

/* ---- many waiters on one flag ---- */

enum { N_WAITERS = 5, N_STEPS = 40 };

typedef struct crowd {
    slot flag;
    _Atomic int n_arrived[N_STEPS + 1];
} crowd;

static void *waits_in_crowd(void *arg)
{
    crowd *c = arg;
    side s;
    if (!side_open(&s)) return NULL;
    for (int step = 1; step <= N_STEPS; step++) {
        if (!CHECK_OK(zx_stream_wait(s.stream, &c->flag.flag, (uint64_t)step))) break;
        atomic_fetch_add(&c->n_arrived[step], 1);
    }
    side_close(&s);
    return NULL;
}

static void test_all_sleepers_wake(void)
{
    static crowd c;
    pthread_t threads[N_WAITERS];
    side s;
    CHECK_OR_RETURN(side_open(&s));
    for (int i = 0; i < N_WAITERS; i++)
        CHECK(pthread_create(&threads[i], NULL, waits_in_crowd, &c) == 0);
    int64_t longest = 0;
    for (int step = 1; step <= N_STEPS; step++) {
        usleep(step % 4 == 0 ? 100 : 1500); /* some of them asleep, or all */
        int64_t begin = zx_now_ns();
        CHECK_OK(zx_stream_signal(s.stream, &c.flag.flag, (uint64_t)step));
        while (atomic_load(&c.n_arrived[step]) < N_WAITERS && zx_now_ns() - begin < 20000000000)
            sched_yield();
        CHECK_EQ_I64(atomic_load(&c.n_arrived[step]), N_WAITERS);
        longest = zx_max64(longest, zx_now_ns() - begin);
    }
    for (int i = 0; i < N_WAITERS; i++)
        pthread_join(threads[i], NULL);
    CHECK(longest < 90000000);
    printf("%d sleepers woken within %.0f us at most\n", N_WAITERS, (double)longest / 1e3);
    side_close(&s);
}

/* ---- release and interrupt ---- */

static void *stores_abort(void *arg)
{
    side s;
    if (!side_open(&s)) return NULL;
    usleep(30000); /* the waiter sleeps by now */
    zx_device_flag_store(s.dev, arg, ZX_FLAG_ABORT);
    side_close(&s);
    return NULL;
}

static void test_abort_releases_a_sleeper(void)
{
    static slot flag;
    pthread_t thread;
    side s;
    CHECK_OR_RETURN(side_open(&s));
    CHECK(pthread_create(&thread, NULL, stores_abort, &flag.flag) == 0);
    int64_t begin = zx_now_ns();
    CHECK_OK(zx_stream_wait(s.stream, &flag.flag, 12345));
    double ms = (double)(zx_now_ns() - begin) / 1e6;
    pthread_join(thread, NULL);
    CHECK(ms > 10 && ms < 90);
    CHECK_OK(zx_stream_wait(s.stream, &flag.flag, 99999)); /* stays released */
    side_close(&s);
}

/* A plain store, by a process that knows nothing of sleepers, is found within 100 ms. */
static void *stores_plainly(void *arg)
{
    usleep(30000);
    __atomic_store_n((uint64_t *)arg, 5, __ATOMIC_RELEASE);
    return NULL;
}

static void test_a_plain_store_is_found(void)
{
    static slot flag;
    pthread_t thread;
    side s;
    CHECK_OR_RETURN(side_open(&s));
    CHECK(pthread_create(&thread, NULL, stores_plainly, &flag.flag) == 0);
    int64_t begin = zx_now_ns();
    CHECK_OK(zx_stream_wait(s.stream, &flag.flag, 5));
    CHECK(zx_now_ns() - begin < 250000000);
    pthread_join(thread, NULL);
    side_close(&s);
}

static bool stops_at_the_third(void *arg)
{
    return ++*(int *)arg == 3;
}

static bool stops_at_once(void *arg)
{
    (void)arg;
    return true;
}

static void test_interrupt_ends_a_wait(void)
{
    static slot flag;
    side s;
    int n_looks = 0;
    CHECK_OR_RETURN(side_open(&s));
    zx_device_set_interrupt(s.dev, stops_at_once, NULL);
    int64_t begin = zx_now_ns();
    CHECK_STATUS(zx_stream_wait(s.stream, &flag.flag, 1), ZX_ERR_INTERRUPTED);
    CHECK_ERROR_HAS("comm");
    CHECK(zx_now_ns() - begin < 200000000);
    CHECK(zx_device_interrupted(s.dev));
    zx_device_set_interrupt(s.dev, stops_at_the_third, &n_looks);
    begin = zx_now_ns();
    CHECK_STATUS(zx_stream_wait(s.stream, &flag.flag, 1), ZX_ERR_INTERRUPTED);
    int64_t ms = (zx_now_ns() - begin) / 1000000;
    CHECK_EQ_I64(n_looks, 3);
    CHECK(ms >= 290 && ms < 450);
    CHECK_OK(zx_stream_signal(s.stream, &flag.flag, 1)); /* the stream is as good as before */
    CHECK_OK(zx_stream_wait(s.stream, &flag.flag, 1));
    zx_device_set_interrupt(s.dev, NULL, NULL);
    CHECK(!zx_device_interrupted(s.dev));
    side_close(&s);
}

static void test_flags_need_a_slot(void)
{
    static slot flags[2];
    side s;
    CHECK_OR_RETURN(side_open(&s));
    uint64_t *inside = (uint64_t *)(void *)(flags[0].bytes + 8);
    CHECK_STATUS(zx_stream_signal(s.stream, inside, 1), ZX_ERR_ARG);
    CHECK_STATUS(zx_stream_wait(s.stream, inside, 1), ZX_ERR_ARG);
    CHECK_STATUS(zx_stream_wait(s.stream, NULL, 1), ZX_ERR_ARG);
    CHECK_OK(zx_stream_wait(s.stream, &flags[1].flag, 0));
    CHECK_OK(zx_stream_signal(s.stream, &flags[1].flag, 7));
    CHECK_OK(zx_stream_wait(s.stream, &flags[1].flag, 3)); /* greater is enough */
    CHECK_EQ_I64(flags[1].flag, 7);
    side_close(&s);
}

int main(void)
{
    RUN(test_flags_need_a_slot);
    RUN(test_ping_pong);
    RUN(test_no_wake_up_is_lost);
    RUN(test_all_sleepers_wake);
    RUN(test_abort_releases_a_sleeper);
    RUN(test_a_plain_store_is_found);
    RUN(test_interrupt_ends_a_wait);
    return check_report();
}
