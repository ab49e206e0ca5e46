/* Bounded failure: a rank that dies, stops, comes late, aborts, is interrupted, closes or calls something else is an
 * error with its name on every other rank, in time, and closing afterwards works. */
#include "comm_ranks.h"

static int64_t now_ms(void)
{
    return zx_now_ns() / 1000000;
}

static void sleep_ms(int64_t ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static zx_status sum_once(ranks_env *e, int64_t n)
{
    float *x = calloc((size_t)n, 4);
    zx_status status = zx_comm_all_reduce(e->comm, e->stream, x, x, n, ZX_F32);
    if (status == ZX_OK) {
        status = zx_stream_sync(e->stream);
    }
    free(x);
    return status;
}

/* A rank that is slow to notice the end of this call would find the failure in it already. */
static void warm_up(ranks_env *e)
{
    CHECK_OK(sum_once(e, 10));
    CHECK_OK(zx_bootstrap_barrier(e->bs, "warm"));
}

/* What every rank that lives must see: this status, these words in the text, within the time; and again afterwards. */
static void expect_failure(ranks_env *e, zx_status got, int64_t begin_ms, int64_t within_ms, const char *part_a,
                           const char *part_b)
{
    CHECK(got == ZX_ERR_PEER || got == ZX_ERR_TIMEOUT);
    CHECK_ERROR_HAS(part_a);
    CHECK_ERROR_HAS(part_b);
    CHECK(now_ms() - begin_ms < within_ms);
    zx_status again = zx_comm_check(e->comm);
    CHECK_EQ_I64(again, got);
    CHECK_ERROR_HAS(part_a);
    CHECK_STATUS(zx_comm_barrier(e->comm, e->stream), again);
    zx_error_clear();
    int64_t at = now_ms();
    zx_comm_close(e->comm);
    e->comm = NULL;
    CHECK(now_ms() - at < 1000);
}

/* ---- death ------------------------------------------------------------------------------------------ */

typedef struct victim {
    int rank;
    int64_t n;
    int moment;   /* 0: instead of a call; 1: inside one, when the others are there */
    int signal;
    uint64_t delay_seed;
} victim;

static void *die_soon(void *arg)
{
    sleep_ms(200);
    kill(getpid(), *(int *)arg);
    return NULL;
}

static void one_dies(ranks_env *e)
{
    victim *v = e->arg;
    char name[32], what[32] = "all_reduce #";
    if (e->rank == v->rank) {
        for (int k = 0; k < 10; k++) {
            CHECK_OK(sum_once(e, v->n));
        }
        if (v->moment == 0) {
            kill(getpid(), v->signal);
        }
        pthread_t thread; /* it dies while it runs one collective after the other */
        CHECK(pthread_create(&thread, NULL, die_soon, &v->signal) == 0);
        for (;;) {
            CHECK_OK(sum_once(e, v->n));
        }
    }
    zx_status status = ZX_OK;
    int64_t begin = now_ms();
    while (status == ZX_OK) {
        status = sum_once(e, v->n);
    }
    snprintf(name, sizeof name, "rank %d (pid", v->rank);
    expect_failure(e, status, begin, v->signal == SIGKILL ? 1500 : 4800, name, what);
}

static void run_victim(int world, victim v, double timeout_s)
{
    pid_t pids[RANKS_MAX];
    ranks_start(world, &(ranks_options){.arg = &v, .timeout_s = timeout_s, .delay_seed = v.delay_seed}, one_dies, pids);
    for (int r = 0; r < world; r++) {
        if (r != v.rank) {
            ranks_wait(1, &pids[r], -1);
        }
    }
    kill(pids[v.rank], SIGKILL);
    waitpid(pids[v.rank], NULL, 0);
}

static void test_kill(void)
{
    for (int r = 0; r < 3; r++) {
        run_victim(3, (victim){.rank = r, .n = 10, .moment = 0, .signal = SIGKILL}, 20);
        run_victim(3, (victim){.rank = r, .n = 100000, .moment = 1, .signal = SIGKILL}, 20);
    }
    run_victim(2, (victim){.rank = 1, .n = 100000, .signal = SIGKILL, .delay_seed = 9}, 20);
}

static void test_stop(void)
{
    run_victim(3, (victim){.rank = 0, .n = 10, .signal = SIGSTOP}, 2);
    run_victim(3, (victim){.rank = 1, .n = 100000, .signal = SIGSTOP}, 2);
    run_victim(2, (victim){.rank = 1, .n = 10, .moment = 1, .signal = SIGSTOP}, 2);
}

/* Rank 0 waits for 1, 1 for 2, and 2 stands still: both name 2. */
static void chain(ranks_env *e)
{
    float x = 0;
    warm_up(e);
    if (e->rank == 2) {
        kill(getpid(), SIGSTOP);
    }
    int64_t begin = now_ms();
    zx_status status = zx_comm_recv(e->comm, e->stream, &x, 1, ZX_F32, e->rank + 1);
    expect_failure(e, status, begin, 4800, "rank 2 (pid", "recv #1");
}

static void test_chain(void)
{
    pid_t pids[3];
    ranks_start(3, &(ranks_options){.timeout_s = 2}, chain, pids);
    ranks_wait(2, pids, -1);
    kill(pids[2], SIGKILL);
    waitpid(pids[2], NULL, 0);
}

/* ---- late, and waiting for each other --------------------------------------------------------------- */

static void late(ranks_env *e)
{
    warm_up(e);
    int64_t begin = now_ms();
    if (e->rank == 1) { /* busy with something else, and not stopped */
        sleep_ms(1800);
        zx_status status = sum_once(e, 5000);
        CHECK(status == ZX_ERR_PEER);
        CHECK_ERROR_HAS("rank 1 (pid");
        CHECK_ERROR_HAS("all_reduce #2 (5,000 float32)");
        return;
    }
    zx_status status = sum_once(e, 5000);
    expect_failure(e, status, begin, 1700, "rank 1 (pid", "did not reach all_reduce #2 (5,000 float32) within 1.0 s");
}

static void test_late(void)
{
    ranks_threads(3, &(ranks_options){.timeout_s = 1}, late);
    ranks_processes(3, &(ranks_options){.timeout_s = 1}, late);
    ranks_threads(3, &(ranks_options){.timeout_s = 1, .delay_seed = 3}, late);
}

/* Slow, but within the deadline: no error. The deadline counts waiting, not the ranks' own work. */
static void slow(ranks_env *e)
{
    for (int k = 0; k < 3; k++) {
        if (e->rank == k % e->world) {
            sleep_ms(600);
        }
        CHECK_OK(sum_once(e, 5000));
    }
}

static void test_slow(void)
{
    ranks_threads(2, &(ranks_options){.timeout_s = 1}, slow);
}

static void crossed(ranks_env *e)
{
    float x = 0;
    int64_t begin = now_ms();
    zx_status status = zx_comm_recv(e->comm, e->stream, &x, 1, ZX_F32, 1 - e->rank);
    expect_failure(e, status, begin, 2500, "wait for each other", "recv #1 (1 float32 from rank");
}

static void test_crossed(void)
{
    ranks_threads(2, &(ranks_options){.timeout_s = 1}, crossed);
}

/* ---- different calls -------------------------------------------------------------------------------- */

static void mismatch(ranks_env *e)
{
    int kind = *(int *)e->arg;
    bool odd = e->rank == 1;
    float *x = calloc(20000, 4), *y = calloc(60000, 4);
    int64_t begin = now_ms();
    zx_status status = ZX_OK;
    static const char *const parts[][2] = {
        {"rank 1 called all_gather #2 (100 float32)", "called all_reduce #2 (100 float32)"},
        {"rank 1 called all_gather #2 (101 float32)", "called all_gather #2 (100 float32)"},
        {"rank 1 called all_gather #2 (100 int32)", "called all_gather #2 (100 float32)"},
        {"rank 1 called broadcast #2 (100 float32 from rank 1)", "called broadcast #2 (100 float32 from rank 0)"},
        {"rank 1 called reduce_scatter #2 (100 bfloat16 to float32)", "called reduce_scatter #2 (100 bfloat16)"},
        {"rank 1 called barrier #2", "called all_gather #2 (15,000 float32)"},
        {"rank 1 called all_gather #2 (20,000 float32)", "called all_gather #2 (1 float32)"},
        {"rank 1 called all_reduce #2 (100 float32) of 'blocks.3'", "called all_reduce #2 (100 float32) of 'blocks.4'"},
        {"rank 1 called recv #1 (6 float32 from rank 0)", "rank 0 called send #1 (5 float32 to rank 1)"},
    };
    warm_up(e);
    switch (kind) {
    case 0:
        status = odd ? zx_comm_all_gather(e->comm, e->stream, x, y, 100, ZX_F32)
                     : zx_comm_all_reduce(e->comm, e->stream, x, y, 100, ZX_F32);
        break;
    case 1:
        status = zx_comm_all_gather(e->comm, e->stream, x, y, odd ? 101 : 100, ZX_F32);
        break;
    case 2:
        status = zx_comm_all_gather(e->comm, e->stream, x, y, 100, odd ? ZX_I32 : ZX_F32);
        break;
    case 3:
        status = zx_comm_broadcast(e->comm, e->stream, x, 100, ZX_F32, odd ? 1 : 0);
        break;
    case 4:
        status = zx_comm_reduce_scatter(e->comm, e->stream, x, y, 100, ZX_BF16, odd ? ZX_F32 : ZX_BF16, false);
        break;
    case 5:
        status =
            odd ? zx_comm_barrier(e->comm, e->stream) : zx_comm_all_gather(e->comm, e->stream, x, y, 15000, ZX_F32);
        break;
    case 6:
        status = zx_comm_all_gather(e->comm, e->stream, x, y, odd ? 20000 : 1, ZX_F32);
        break;
    case 7:
        zx_comm_label(e->comm, odd ? "blocks.3" : "blocks.4");
        status = zx_comm_all_reduce(e->comm, e->stream, x, x, 100, ZX_F32);
        break;
    default:
        if (e->rank == 0) {
            status = zx_comm_send(e->comm, e->stream, x, 5, ZX_F32, 1);
            status = status == ZX_OK ? zx_comm_recv(e->comm, e->stream, x, 5, ZX_F32, 1) : status;
        } else if (odd) {
            status = zx_comm_recv(e->comm, e->stream, x, 6, ZX_F32, 0);
        } else {
            status = zx_comm_recv(e->comm, e->stream, x, 6, ZX_F32, 0);
        }
        break;
    }
    if (status == ZX_OK) {
        status = zx_stream_sync(e->stream);
    }
    expect_failure(e, status, begin, 3000, parts[kind][0], parts[kind][1]);
    free(x);
    free(y);
}

static void test_mismatch(void)
{
    for (int kind = 0; kind < 9; kind++) {
        ranks_threads(2, &(ranks_options){.timeout_s = 20, .arg = &kind}, mismatch);
        ranks_threads(3, &(ranks_options){.timeout_s = 20, .arg = &kind}, mismatch);
        ranks_threads(2, &(ranks_options){.timeout_s = 20, .arg = &kind, .delay_seed = 4}, mismatch);
        ranks_processes(2, &(ranks_options){.timeout_s = 20, .arg = &kind}, mismatch);
    }
}

/* ---- abort, interrupt, close ------------------------------------------------------------------------ */

static void aborts(ranks_env *e)
{
    warm_up(e);
    int64_t begin = now_ms();
    if (e->rank == 1) {
        sleep_ms(100);
        zx_comm_abort(e->comm, "the loss is not a number");
        CHECK_STATUS(sum_once(e, 10), ZX_ERR_PEER);
        CHECK_ERROR_HAS("rank 1 aborted: the loss is not a number");
        return;
    }
    zx_status status = sum_once(e, 10);
    expect_failure(e, status, begin, 1500, "rank 1 aborted: the loss is not a number", "");
}

static void test_abort(void)
{
    ranks_threads(3, &(ranks_options){.timeout_s = 20}, aborts);
    ranks_processes(3, &(ranks_options){.timeout_s = 20}, aborts);
}

static bool stop_now(void *ctx)
{
    return *(atomic_int *)ctx != 0;
}

static void interrupted(ranks_env *e)
{
    atomic_int flag = 1;
    warm_up(e);
    int64_t begin = now_ms();
    if (e->rank == 1) {
        zx_device_set_interrupt(e->dev, stop_now, &flag);
        CHECK_STATUS(sum_once(e, 10), ZX_ERR_INTERRUPTED);
        CHECK(now_ms() - begin < 1000);
        zx_device_set_interrupt(e->dev, NULL, NULL);
        CHECK_STATUS(sum_once(e, 10), ZX_ERR_INTERRUPTED);
        return;
    }
    if (e->rank == 0) {
        sleep_ms(500);
    }
    zx_status status = sum_once(e, 10);
    expect_failure(e, status, begin, 2000, "rank 1 left all_reduce #2 (10 float32)", "interrupt");
}

static void test_interrupt(void)
{
    ranks_threads(3, &(ranks_options){.timeout_s = 20}, interrupted);
    ranks_processes(3, &(ranks_options){.timeout_s = 20}, interrupted);
}

static void closes(ranks_env *e)
{
    warm_up(e);
    int64_t begin = now_ms();
    if (e->rank == 1) {
        zx_comm_close(e->comm);
        e->comm = NULL;
        sleep_ms(600);
        return;
    }
    zx_status status = sum_once(e, 10);
    expect_failure(e, status, begin, 1500, "rank 1 closed the communicator", "all_reduce #2");
}

static void test_close(void)
{
    ranks_threads(2, &(ranks_options){.timeout_s = 20}, closes);
    ranks_processes(3, &(ranks_options){.timeout_s = 20}, closes);
}

/* A child communicator fails with its family. */
static void family(ranks_env *e)
{
    zx_comm *child = NULL;
    float x = 0;
    CHECK_OR_RETURN(CHECK_OK(zx_comm_split(e->comm, e->rank / 2, 0, &child)));
    CHECK_OK(zx_bootstrap_barrier(e->bs, "both pairs are open"));
    int64_t begin = now_ms();
    if (e->rank == 3) {
        zx_comm_abort(child, "enough");
    }
    zx_status status = ZX_OK;
    while (status == ZX_OK && now_ms() - begin < 3000) {
        status = zx_comm_all_reduce(child, e->stream, &x, &x, 1, ZX_F32);
    }
    CHECK_EQ_I64(status, ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 3 aborted: enough");
    zx_comm_close(child);
    status = zx_comm_check(e->comm);
    expect_failure(e, status, begin, 3000, "rank 3 aborted: enough", "");
}

static void test_family(void)
{
    ranks_threads(4, &(ranks_options){.timeout_s = 20}, family);
}

/* ---- the n-th primitive fails ----------------------------------------------------------------------- */

static atomic_int sweep_n, sweep_armed;
static atomic_bool sweep_hit;

/* Fault points count over the whole process, here over both ranks: whoever meets the fault says so, the other one is
 * told, and nothing stays. */
static void sweep_ranks(ranks_env *e)
{
    zx_comm_config config = {.transport = "peer", .ring_bytes = 64 * 1024};
    zx_comm *comm = NULL, *child = NULL;
    zx_mem *mem = NULL;
    int id = -1;
    CHECK_OK(zx_bootstrap_barrier(e->bs, "before the fault"));
    if (e->rank == 0) {
        zx_fault_arm(atomic_load(&sweep_n));
        atomic_store(&sweep_armed, 1);
    }
    while (!atomic_load(&sweep_armed)) {
        sleep_ms(1);
    }
    zx_status status = zx_comm_open(e->dev, e->bs, &config, &comm);
    if (status == ZX_OK) {
        status = zx_mem_open(e->dev, 65536, true, &mem);
    }
    if (status == ZX_OK) {
        status = zx_comm_register(comm, mem, NULL, &id);
    }
    if (status == ZX_OK) {
        status = zx_comm_split(comm, 0, 0, &child);
    }
    if (status == ZX_OK) {
        float x = 1;
        status = zx_comm_all_reduce(child, e->stream, &x, &x, 1, ZX_F32);
    }
    if (status != ZX_OK) {
        atomic_store(&sweep_hit, true);
        bool told = status == ZX_ERR_PEER || status == ZX_ERR_TIMEOUT || strstr(zx_error_last()->text, "injected");
        if (!CHECK(told)) {
            check_print_error_();
        }
        zx_bootstrap_abort(e->bs, "a fault was injected");
    }
    zx_error_clear();
    zx_comm_close(child);
    zx_comm_close(comm);
    zx_mem_close(mem);
}

static int64_t live_blocks(void)
{
    int64_t n = 0;
    for (int i = 0; i < ZX_N_MEM_CLASS; i++) {
        n += zx_mem_get((zx_mem_class)i).n_live;
    }
    return n;
}

static void test_sweep(void)
{
    int n_failed = 0;
    bool hit = true;
    int64_t before = live_blocks();
    for (int n = 1; hit && n < 400; n++) {
        atomic_store(&sweep_n, n);
        atomic_store(&sweep_armed, 0);
        atomic_store(&sweep_hit, false);
        ranks_threads(2, &(ranks_options){.no_comm = true, .timeout_s = 20}, sweep_ranks);
        zx_fault_arm(0);
        hit = atomic_load(&sweep_hit);
        n_failed += hit;
        if (!CHECK_EQ_I64(live_blocks(), before)) {
            printf("    fault %d\n", n);
            before = live_blocks();
        }
    }
    CHECK(n_failed > 20 && !hit);
}

int main(void)
{
    RUN(test_mismatch);
    RUN(test_kill);
    RUN(test_stop);
    RUN(test_chain);
    RUN(test_late);
    RUN(test_slow);
    RUN(test_crossed);
    RUN(test_abort);
    RUN(test_interrupt);
    RUN(test_close);
    RUN(test_family);
    RUN(test_sweep);
    return check_report();
}
