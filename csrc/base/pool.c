/* pool.c - the thread pool.
 *
 * DESIGN. One word, `state`, holds the number of the run (upper half), an open bit and the count of workers
 * that are inside the run. The caller writes the job, publishes the word with a new number and the open
 * bit, takes part, and when no index is left clears the bit and waits until the count is zero. A worker may
 * touch the job only after it has counted itself in, which the open bit must permit: a worker that wakes up
 * late finds the run closed and never sees the job of another one half-written. So a run does not wait for
 * workers that the scheduler has not woken, which is what keeps the pool usable with more threads than
 * cores.
 *
 * Idle workers spin for a moment, then sleep on `gate`, which changes with each run. The caller wakes them
 * only when `n_asleep` says that there are any: back-to-back runs make no system call. Both sides touch
 * their own word before they look at the other's (sequentially consistent), so no wake-up is lost.
 *
 * A run inside a task of the same pool is a mistake of ours. It is recorded, logged and then computed by
 * the calling worker alone, so the result is right. A forked child has no workers: there, runs are inline
 * too. */
#define _GNU_SOURCE 1
#include "base/thread.h"

#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

enum { SPIN_NS = 40000, SPIN_CROWDED_NS = 2000, SPIN_BATCH = 32, MAX_THREADS = 1024 };

#define OPEN ((uint64_t)1 << 31)
#define COUNT_MASK (OPEN - 1)

typedef struct worker {
    zx_pool *pool;
    int index;
    pthread_t thread;
} worker;

struct zx_pool {
    int n_threads;
    int n_started; /* workers that exist; the caller is worker 0 and not among them */
    int rank;      /* of the opener, for the log lines of the workers */
    int64_t spin_ns;
    unsigned born; /* fork generation */
    worker *workers;
    pthread_mutex_t run_lock;
    /* The job: written by the caller while nobody is inside. */
    zx_task task;
    void *arg;
    int64_t n_tasks;
    _Alignas(64) _Atomic uint64_t state;
    _Alignas(64) _Atomic int64_t next; /* index to hand out */
    _Alignas(64) _Atomic uint32_t gate;
    _Atomic uint32_t n_asleep;
    _Atomic uint32_t left; /* changes when the last worker leaves while the caller sleeps */
    _Atomic bool caller_asleep;
    _Atomic bool stop;
};

static _Thread_local const zx_pool *t_pool; /* whose task this thread is running */
static _Thread_local int t_worker;

static _Atomic unsigned g_forks;
static pthread_once_t g_once = PTHREAD_ONCE_INIT;

static void count_fork(void)
{
    atomic_fetch_add(&g_forks, 1);
}

static void register_fork_handler(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

static void run_indices(zx_pool *pool, int index)
{
    const zx_pool *outer_pool = t_pool;
    int outer_worker = t_worker;
    t_pool = pool;
    t_worker = index;
    zx_task task = pool->task;
    void *arg = pool->arg;
    int64_t n = pool->n_tasks, i;
    while ((i = atomic_fetch_add_explicit(&pool->next, 1, memory_order_relaxed)) < n)
        task(arg, i, index);
    t_pool = outer_pool;
    t_worker = outer_worker;
}

/* Joins the open run if it is not the one this worker has already worked for. */
static bool join(zx_pool *pool, uint32_t *last_run)
{
    uint64_t s = atomic_load_explicit(&pool->state, memory_order_acquire);
    while ((s & OPEN) != 0 && (uint32_t)(s >> 32) != *last_run) {
        if (atomic_compare_exchange_weak_explicit(&pool->state, &s, s + 1, memory_order_acq_rel,
                                                  memory_order_acquire)) {
            *last_run = (uint32_t)(s >> 32);
            return true;
        }
    }
    return false;
}

static void leave(zx_pool *pool)
{
    uint64_t s = atomic_fetch_sub(&pool->state, 1) - 1;
    if ((s & (OPEN | COUNT_MASK)) == 0 && atomic_load(&pool->caller_asleep)) {
        atomic_fetch_add(&pool->left, 1);
        zx_futex_wake(&pool->left, 1, false);
    }
}

static bool spin_for_run(zx_pool *pool, uint32_t *last_run)
{
    int64_t end = zx_now_ns() + pool->spin_ns;
    do {
        for (int i = 0; i < SPIN_BATCH; i++) {
            if (join(pool, last_run)) return true;
            zx_cpu_relax();
        }
    } while (zx_now_ns() < end && !atomic_load_explicit(&pool->stop, memory_order_relaxed));
    return false;
}

static void *worker_main(void *arg)
{
    worker *w = arg;
    zx_pool *pool = w->pool;
    zx_log_set_rank(pool->rank);
    uint32_t last_run = 0;
    for (;;) {
        uint32_t gate = atomic_load(&pool->gate);
        if (atomic_load(&pool->stop)) return NULL;
        if (join(pool, &last_run) || spin_for_run(pool, &last_run)) {
            run_indices(pool, w->index);
            leave(pool);
            continue;
        }
        atomic_fetch_add(&pool->n_asleep, 1);
        zx_futex_wait(&pool->gate, gate, -1, false); /* returns at once when a run began since `gate` was read */
        atomic_fetch_sub(&pool->n_asleep, 1);
    }
}

static zx_status start_worker(zx_pool *pool, int index)
{
    worker *w = &pool->workers[index - 1];
    w->pool = pool;
    w->index = index;
    ZX_TRY(zx_fault_point("pthread_create"));
    /* Signals belong to the threads of the application. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int err = pthread_create(&w->thread, NULL, worker_main, w);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (err != 0)
        ZX_FAIL_SYS(err, "pthread_create", "cannot start worker %d of %d: lower the number of threads", index,
                    pool->n_threads);
    pool->n_started++;
    pthread_setname_np(w->thread, "zx-worker");
    return ZX_OK;
}

zx_status zx_pool_open(int n_threads, zx_pool **out)
{
    *out = NULL;
    if (n_threads < 1 || n_threads > MAX_THREADS)
        ZX_FAIL(ZX_ERR_ARG, "a pool of %d threads: the number must be from 1 to %d", n_threads, MAX_THREADS);
    zx_status zx_rc_ = ZX_OK;
    zx_pool *pool = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, pool));
    pthread_once(&g_once, register_fork_handler);
    pthread_mutex_init(&pool->run_lock, NULL);
    pool->n_threads = n_threads;
    pool->rank = zx_log_rank();
    pool->born = atomic_load(&g_forks);
    pool->spin_ns = n_threads <= zx_n_cores() ? SPIN_NS : SPIN_CROWDED_NS;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_MISC, n_threads - 1, pool->workers), fail);
    for (int i = 1; i < n_threads; i++)
        ZX_TRY_GOTO(start_worker(pool, i), fail);
    *out = pool;
    return ZX_OK;
fail:
    zx_pool_close(pool);
    return zx_rc_;
}

void zx_pool_close(zx_pool *pool)
{
    if (pool == NULL) return;
    if (pool->born == atomic_load(&g_forks)) {
        atomic_store(&pool->stop, true);
        atomic_fetch_add(&pool->gate, 1);
        zx_futex_wake(&pool->gate, INT_MAX, false);
        for (int i = 0; i < pool->n_started; i++)
            pthread_join(pool->workers[i].thread, NULL);
        pthread_mutex_destroy(&pool->run_lock);
    }
    zx_free(pool->workers);
    zx_free(pool);
}

int zx_pool_n_threads(const zx_pool *pool)
{
    return pool == NULL ? 1 : pool->n_threads;
}

static void run_inline(zx_task task, void *arg, int64_t n_tasks, int index)
{
    for (int64_t i = 0; i < n_tasks; i++)
        task(arg, i, index);
}

static void wait_until_empty(zx_pool *pool)
{
    int64_t end = 0;
    for (int i = 0;; i++) {
        uint32_t left = atomic_load(&pool->left);
        if ((atomic_load_explicit(&pool->state, memory_order_acquire) & COUNT_MASK) == 0) return;
        zx_cpu_relax();
        if (i % SPIN_BATCH != SPIN_BATCH - 1) continue;
        int64_t now = zx_now_ns();
        if (end == 0) end = now + pool->spin_ns;
        if (now < end) continue;
        atomic_store(&pool->caller_asleep, true);
        if ((atomic_load(&pool->state) & COUNT_MASK) != 0) zx_futex_wait(&pool->left, left, -1, false);
        atomic_store(&pool->caller_asleep, false);
    }
}

static void run_shared(zx_pool *pool, zx_task task, void *arg, int64_t n_tasks)
{
    pool->task = task;
    pool->arg = arg;
    pool->n_tasks = n_tasks;
    atomic_store_explicit(&pool->next, 0, memory_order_relaxed);
    uint64_t run = (atomic_load_explicit(&pool->state, memory_order_relaxed) >> 32) + 1;
    if ((uint32_t)run == 0) run = 1; /* 0 is what a new worker believes to have done */
    atomic_store(&pool->state, run << 32 | OPEN);
    atomic_fetch_add(&pool->gate, 1);
    int64_t n_useful = zx_min64(n_tasks, pool->n_threads) - 1;
    if (atomic_load(&pool->n_asleep) != 0) zx_futex_wake(&pool->gate, (int)n_useful, false);
    run_indices(pool, 0);
    atomic_fetch_and(&pool->state, ~OPEN);
    wait_until_empty(pool);
}

void zx_pool_run(zx_pool *pool, zx_task task, void *arg, int64_t n_tasks)
{
    if (pool != NULL && t_pool == pool) {
        zx_error_set(ZX_ERR_BUG, 0, NULL, __func__, __FILE__, __LINE__,
                     "zx_pool_run was called inside a task of the same pool: its %lld tasks run on "
                     "worker %d alone",
                     (long long)n_tasks, t_worker);
        zx_log(ZX_LOG_ERROR, "bug: %s", zx_error_last()->text);
        run_inline(task, arg, n_tasks, t_worker);
        return;
    }
    if (pool == NULL || pool->n_threads == 1 || n_tasks <= 1 || pool->born != atomic_load(&g_forks)) {
        run_inline(task, arg, n_tasks, 0);
        return;
    }
    pthread_mutex_lock(&pool->run_lock);
    run_shared(pool, task, arg, n_tasks);
    pthread_mutex_unlock(&pool->run_lock);
}
