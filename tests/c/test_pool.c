/* test_pool.c - every task runs once, with any number of threads; nested, concurrent and failing uses. */
#include "check.h"

#include <stdlib.h>

#include "base/thread.h"

enum { N_MOST = 1000 };

typedef struct counts {
    _Atomic int seen[N_MOST];
    _Atomic int n_bad_workers;
    int n_threads;
} counts;

static void count_task(void *arg, int64_t index, int worker)
{
    counts *c = arg;
    atomic_fetch_add(&c->seen[index], 1);
    if (worker < 0 || worker >= c->n_threads) atomic_fetch_add(&c->n_bad_workers, 1);
}

/* Whether exactly the first n indices were seen, each `times` times. */
static bool seen_exactly(counts *c, int64_t n, int times)
{
    int64_t n_wrong = atomic_load(&c->n_bad_workers);
    for (int64_t i = 0; i < N_MOST; i++)
        n_wrong += atomic_load(&c->seen[i]) != (i < n ? times : 0);
    return n_wrong == 0;
}

static void test_each_task_once(void)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 7, 64, 997};
    for (int n_threads = 1; n_threads <= 9; n_threads++) {
        zx_pool *pool;
        CHECK_OR_RETURN(CHECK_OK(zx_pool_open(n_threads, &pool)));
        CHECK_EQ_I64(zx_pool_n_threads(pool), n_threads);
        for (int s = 0; s < 7; s++) {
            counts c = {.n_threads = n_threads};
            for (int round = 0; round < 5; round++)
                zx_pool_run(pool, count_task, &c, sizes[s]);
            CHECK(seen_exactly(&c, sizes[s], 5));
        }
        zx_pool_close(pool);
    }
    counts c = {.n_threads = 1};
    zx_pool_run(NULL, count_task, &c, 10);
    CHECK(seen_exactly(&c, 10, 1));
    CHECK_EQ_I64(zx_pool_n_threads(NULL), 1);
    zx_pool_close(NULL);
}

/* Back to back, so that workers of the last run meet the next: what a run wrote must be there when it
 * returns. */
static void plain_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    ((int64_t *)arg)[index] += index;
}

static void test_results_are_visible(void)
{
    int64_t sums[16] = {0};
    zx_pool *pool;
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(3, &pool)));
    for (int round = 1; round <= 5000; round++) {
        zx_pool_run(pool, plain_task, sums, 16);
        if (sums[15] != (int64_t)round * 15) break;
    }
    zx_pool_close(pool);
    for (int i = 0; i < 16; i++)
        CHECK_EQ_I64(sums[i], 5000 * i);
}

static void test_pool_wakes_after_sleep(void)
{
    zx_pool *pool;
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(4, &pool)));
    for (int round = 0; round < 20; round++) {
        counts c = {.n_threads = 4};
        usleep(2000);
        zx_pool_run(pool, count_task, &c, 100);
        CHECK(seen_exactly(&c, 100, 1));
    }
    zx_pool_close(pool);
}

typedef struct nested {
    zx_pool *pool;
    counts *inner;
} nested;

static void nested_task(void *arg, int64_t index, int worker)
{
    nested *n = arg;
    (void)index, (void)worker;
    zx_pool_run(n->pool, count_task, n->inner, 5);
}

/* A mistake of ours, but the numbers are right all the same, and the record says what happened. */
static void test_nested_run_is_a_bug_not_a_hang(void)
{
    zx_pool *pool, *other;
    counts c = {.n_threads = 2};
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(2, &pool)));
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(2, &other)));
    nested n = {pool, &c};
    printf("two lines that say bug follow:\n");
    zx_pool_run(pool, nested_task, &n, 2);
    CHECK(seen_exactly(&c, 5, 2));
    zx_error_clear();
    counts d = {.n_threads = 2};
    n = (nested){other, &d};
    zx_pool_run(pool, nested_task, &n, 3); /* another pool inside a task is fine */
    CHECK(seen_exactly(&d, 5, 3));
    CHECK_EQ_I64(zx_error_last()->status, ZX_OK);
    zx_pool_close(pool);
    zx_pool_close(other);
}

static void *runs_on_shared_pool(void *arg)
{
    nested *n = arg;
    for (int i = 0; i < 300; i++)
        zx_pool_run(n->pool, count_task, n->inner, 50);
    return NULL;
}

static void test_two_callers_take_turns(void)
{
    zx_pool *pool;
    pthread_t threads[2];
    counts c = {.n_threads = 3};
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(3, &pool)));
    nested n = {pool, &c};
    for (int i = 0; i < 2; i++)
        CHECK(pthread_create(&threads[i], NULL, runs_on_shared_pool, &n) == 0);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    CHECK(seen_exactly(&c, 50, 600));
    zx_pool_close(pool);
}

typedef struct meeting {
    _Atomic int n_here;
    _Atomic bool met;
} meeting;

/* Two tasks that wait for each other: ends only if two threads really work at once. */
static void meet_task(void *arg, int64_t index, int worker)
{
    meeting *m = arg;
    (void)index, (void)worker;
    atomic_fetch_add(&m->n_here, 1);
    int64_t end = zx_now_ns() + 10000000000;
    while (atomic_load(&m->n_here) < 2 && zx_now_ns() < end)
        usleep(10);
    if (atomic_load(&m->n_here) == 2) atomic_store(&m->met, true);
}

static void test_workers_share_long_tasks(void)
{
    zx_pool *pool;
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(2, &pool)));
    for (int round = 0; round < 50; round++) {
        meeting m = {0};
        if (round % 2 == 0) usleep(500); /* a sleeping worker must come too */
        zx_pool_run(pool, meet_task, &m, 2);
        CHECK(atomic_load(&m.met));
    }
    zx_pool_close(pool);
}

static void rank_task(void *arg, int64_t index, int worker)
{
    (void)index, (void)worker;
    atomic_fetch_add((_Atomic int *)arg, zx_log_rank() == 5);
}

static void test_workers_know_the_rank(void)
{
    zx_pool *pool;
    _Atomic int n_right = 0;
    zx_log_set_rank(5);
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(3, &pool)));
    zx_pool_run(pool, rank_task, (void *)&n_right, 200);
    CHECK_EQ_I64(atomic_load(&n_right), 200);
    zx_pool_close(pool);
    zx_log_set_rank(-1);
}

static void test_bad_sizes(void)
{
    zx_pool *pool = (zx_pool *)&pool;
    CHECK_STATUS(zx_pool_open(0, &pool), ZX_ERR_ARG);
    CHECK(pool == NULL);
    CHECK_STATUS(zx_pool_open(-4, &pool), ZX_ERR_ARG);
    CHECK_STATUS(zx_pool_open(100000, &pool), ZX_ERR_ARG);
    CHECK_ERROR_HAS("100000");
}

static void test_open_survives_every_fault(void)
{
    int64_t live = zx_mem_get(ZX_MEM_MISC).n_live;
    int n_failed = 0;
    for (int64_t n = 1;; n++) {
        zx_pool *pool;
        zx_fault_arm(n);
        zx_status status = zx_pool_open(4, &pool);
        bool fired = zx_fault_passed() >= n;
        zx_fault_arm(0);
        CHECK_EQ_I64(status != ZX_OK, fired);
        CHECK_EQ_I64(pool == NULL, fired);
        zx_pool_close(pool);
        CHECK_EQ_I64(zx_mem_get(ZX_MEM_MISC).n_live, live);
        if (!fired) break;
        n_failed++;
    }
    CHECK_EQ_I64(n_failed, 5); /* two allocations, three threads */
}

static void test_open_and_close_leave_nothing(void)
{
    int64_t live = zx_mem_get(ZX_MEM_MISC).n_live;
    for (int i = 0; i < 300; i++) {
        zx_pool *pool;
        counts c = {.n_threads = 1 + i % 4};
        CHECK_OR_RETURN(CHECK_OK(zx_pool_open(1 + i % 4, &pool)));
        if (i % 3 != 0) zx_pool_run(pool, count_task, &c, 8);
        zx_pool_close(pool);
    }
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_MISC).n_live, live);
}

static void empty_task(void *arg, int64_t index, int worker)
{
    (void)arg, (void)index, (void)worker;
}

/* Ends when both tasks have begun, so a run costs the hand-over to the worker and back. */
static void pair_task(void *arg, int64_t index, int worker)
{
    _Atomic int *n_here = arg;
    (void)index, (void)worker;
    atomic_fetch_add(n_here, 1);
    while (atomic_load(n_here) < 2)
        zx_cpu_relax();
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

enum { N_RUNS = 4000 };

static double median_run_ns(zx_pool *pool, bool paired)
{
    static int64_t ns[N_RUNS];
    for (int i = 0; i < N_RUNS; i++) {
        _Atomic int n_here = 0;
        int64_t begin = zx_now_ns();
        zx_pool_run(pool, paired ? pair_task : empty_task, (void *)&n_here, 2);
        ns[i] = zx_now_ns() - begin;
    }
    qsort(ns, N_RUNS, sizeof *ns, by_value);
    return (double)ns[N_RUNS / 2];
}

/* Prints what a run costs; the bound only catches a wake-up that comes by accident. */
static void test_cost_of_a_run(void)
{
    zx_pool *pool;
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(2, &pool)));
    double empty = median_run_ns(pool, false), paired = median_run_ns(pool, true);
    printf("pool of 2 threads, median of %d runs: %.0f ns with empty tasks, %.0f ns with tasks that meet\n", N_RUNS,
           empty, paired);
    CHECK(empty < 1e8 && paired < 1e8);
    zx_pool_close(pool);
}

int main(void)
{
    RUN(test_each_task_once);
    RUN(test_results_are_visible);
    RUN(test_pool_wakes_after_sleep);
    RUN(test_workers_share_long_tasks);
    RUN(test_nested_run_is_a_bug_not_a_hang);
    RUN(test_two_callers_take_turns);
    RUN(test_workers_know_the_rank);
    RUN(test_bad_sizes);
    RUN(test_open_survives_every_fault);
    RUN(test_open_and_close_leave_nothing);
    RUN(test_cost_of_a_run);
    return check_report();
}
