/* test_base.c - error record, counted memory, fault points, environment, log, timeline. */
#define _GNU_SOURCE 1

#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>

#include "base/thread.h"

/* ---- error record ---- */

static zx_status fails_at_the_bottom(int value)
{
    ZX_FAIL(ZX_ERR_ARG, "value %d must be even", value);
}

static zx_status passes_on(int value)
{
    ZX_TRY(fails_at_the_bottom(value));
    return ZX_OK;
}

static void test_error_has_text_and_frames(void)
{
    CHECK_STATUS(passes_on(7), ZX_ERR_ARG);
    const zx_error *e = zx_error_last();
    CHECK(strcmp(e->text, "value 7 must be even") == 0);
    CHECK_EQ_I64(e->n_frames, 2);
    CHECK(strcmp(e->frames[0].func, "fails_at_the_bottom") == 0);
    CHECK(strcmp(e->frames[1].expr, "fails_at_the_bottom(value)") == 0);
    zx_error_clear();
    CHECK_EQ_I64(zx_error_last()->status, ZX_OK);
    CHECK_EQ_I64(zx_error_last()->n_frames, 0);
}

static void test_error_appends_errno(void)
{
    zx_error_set(ZX_ERR_SYSTEM, ENOENT, "open(path)", "f", "f.c", 1, "cannot open '%s'", "x");
    CHECK_ERROR_HAS("cannot open 'x': No such file");
    CHECK_ERROR_HAS("errno 2");
    CHECK_EQ_I64(zx_error_last()->native, ENOENT);
}

static void test_error_may_quote_itself(void)
{
    zx_error_set(ZX_ERR_ARG, 0, NULL, "f", "f.c", 1, "inner");
    zx_error_set(ZX_ERR_STATE, 0, NULL, "f", "f.c", 2, "outer (%s)", zx_error_last()->text);
    CHECK(strcmp(zx_error_last()->text, "outer (inner)") == 0);
}

static void test_error_long_text_and_many_frames(void)
{
    char longer[2 * ZX_ERROR_TEXT];
    memset(longer, 'a', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    zx_error_set(ZX_ERR_SYSTEM, EIO, NULL, "origin", "f.c", 1, "%s", longer);
    CHECK_EQ_I64(strlen(zx_error_last()->text), ZX_ERROR_TEXT - 1);
    for (int i = 0; i < 40; i++)
        zx_error_frame("call", i == 39 ? "entry" : "middle", "f.c", i);
    const zx_error *e = zx_error_last();
    CHECK_EQ_I64(e->n_frames, ZX_ERROR_FRAMES);
    CHECK(strcmp(e->frames[0].func, "origin") == 0);
    CHECK(strcmp(e->frames[ZX_ERROR_FRAMES - 1].func, "entry") == 0);
}

static void *other_thread(void *arg)
{
    zx_error *saved = arg;
    CHECK_EQ_I64(zx_error_last()->status, ZX_OK);
    zx_error_set(ZX_ERR_PEER, 0, NULL, "f", "f.c", 1, "rank 3 died");
    *saved = *zx_error_last();
    return NULL;
}

static void test_error_belongs_to_its_thread(void)
{
    zx_error saved;
    pthread_t thread;
    zx_error_set(ZX_ERR_ARG, 0, NULL, "f", "f.c", 1, "mine");
    CHECK_OR_RETURN(CHECK(pthread_create(&thread, NULL, other_thread, &saved) == 0));
    pthread_join(thread, NULL);
    CHECK_ERROR_HAS("mine");
    CHECK_EQ_I64(zx_error_raise(&saved), ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 3 died");
    CHECK_EQ_I64(zx_error_raise(zx_error_last()), ZX_ERR_PEER);
}

static void test_status_names(void)
{
    for (int s = 0; s < ZX_N_STATUS; s++) {
        CHECK(zx_status_name((zx_status)s) != NULL);
        for (int t = 0; t < s; t++)
            CHECK(strcmp(zx_status_name((zx_status)s), zx_status_name((zx_status)t)) != 0);
    }
    CHECK(strcmp(zx_status_name(ZX_ERR_INTERRUPTED), "INTERRUPTED") == 0);
    CHECK(strcmp(zx_status_name((zx_status)99), "?") == 0);
}

/* ---- memory ---- */

static void test_alloc_is_zeroed_aligned_and_counted(void)
{
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4097, 1 << 20};
    zx_mem_stats before = zx_mem_get(ZX_MEM_STORE);
    size_t total = 0;
    void *blocks[7];
    for (int i = 0; i < 7; i++) {
        CHECK_OR_RETURN(CHECK_OK(zx_alloc(ZX_MEM_STORE, sizes[i], &blocks[i])));
        CHECK_EQ_I64((uintptr_t)blocks[i] % 64, 0);
        int64_t n_set = 0;
        for (size_t b = 0; b < sizes[i]; b++)
            n_set += ((unsigned char *)blocks[i])[b] != 0;
        CHECK_EQ_I64(n_set, 0);
        memset(blocks[i], 0xff, sizes[i]);
        total += sizes[i];
    }
    zx_mem_stats full = zx_mem_get(ZX_MEM_STORE);
    CHECK_EQ_I64(full.n_live, before.n_live + 7);
    CHECK_EQ_I64(full.n_allocs, before.n_allocs + 7);
    CHECK_EQ_I64(full.live_bytes, before.live_bytes + (int64_t)total);
    CHECK(full.peak_bytes >= full.live_bytes);
    for (int i = 0; i < 7; i++)
        zx_free(blocks[i]);
    zx_free(NULL);
    zx_mem_stats after = zx_mem_get(ZX_MEM_STORE);
    CHECK_EQ_I64(after.n_live, before.n_live);
    CHECK_EQ_I64(after.live_bytes, before.live_bytes);
    CHECK(after.peak_bytes >= full.live_bytes);
}

static void test_alloc_refuses_what_cannot_be(void)
{
    void *p = &p;
    CHECK_STATUS(zx_alloc(ZX_MEM_MISC, SIZE_MAX, &p), ZX_ERR_NOMEM);
    CHECK(p == NULL);
    CHECK_ERROR_HAS("18446744073709551615");
    CHECK_STATUS(zx_alloc_array(ZX_MEM_MISC, INT64_MAX, 16, &p), ZX_ERR_NOMEM);
    CHECK_STATUS(zx_alloc_array(ZX_MEM_MISC, -1, 16, &p), ZX_ERR_ARG);
    CHECK_ERROR_HAS("-1");
    CHECK_OK(zx_alloc_array(ZX_MEM_MISC, 0, 16, &p));
    zx_free(p);
}

static void test_accounts_of_others(void)
{
    zx_mem_stats before = zx_mem_get(ZX_MEM_COMM);
    zx_mem_account(ZX_MEM_COMM, 1, 1000);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_COMM).live_bytes, before.live_bytes + 1000);
    zx_mem_account(ZX_MEM_COMM, -1, -1000);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_COMM).live_bytes, before.live_bytes);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_COMM).n_live, before.n_live);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_COMM).n_allocs, before.n_allocs + 1);
}

enum { N_THREADS = 4, N_ROUNDS = 2000 };

static void *allocates(void *arg)
{
    for (int i = 0; i < N_ROUNDS; i++) {
        void *p = NULL;
        if (!CHECK_OK(zx_alloc(ZX_MEM_MODEL, (size_t)(i % 97), &p))) return arg;
        zx_free(p);
    }
    return arg;
}

static void test_counts_hold_among_threads(void)
{
    pthread_t threads[N_THREADS];
    zx_mem_stats before = zx_mem_get(ZX_MEM_MODEL);
    for (int i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, allocates, NULL) == 0);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    zx_mem_stats after = zx_mem_get(ZX_MEM_MODEL);
    CHECK_EQ_I64(after.n_live, before.n_live);
    CHECK_EQ_I64(after.live_bytes, before.live_bytes);
    CHECK_EQ_I64(after.n_allocs, before.n_allocs + (int64_t)N_THREADS * N_ROUNDS);
}

/* ---- fault points ---- */

static void test_faults_fire_once(void)
{
    CHECK_OK(zx_fault_point("a"));
    zx_fault_arm(3);
    CHECK_OK(zx_fault_point("a"));
    CHECK_OK(zx_fault_point("b"));
    CHECK_STATUS(zx_fault_point("c"), ZX_ERR_SYSTEM);
    CHECK_ERROR_HAS("injected");
    CHECK_ERROR_HAS("c");
    CHECK_EQ_I64(zx_error_last()->native, EIO);
    CHECK_OK(zx_fault_point("d"));
    CHECK_EQ_I64(zx_fault_passed(), 4);
    zx_fault_arm(1);
    void *p = &p;
    CHECK_STATUS(zx_alloc(ZX_MEM_MISC, 8, &p), ZX_ERR_SYSTEM);
    CHECK(p == NULL);
    zx_fault_arm(0);
    CHECK_OK(zx_fault_point("e"));
    CHECK_EQ_I64(zx_fault_passed(), 0);
}

/* ---- environment ---- */

static void test_environment(void)
{
    int64_t value;
    for (int v = 0; v < ZX_N_ENV; v++) {
        CHECK(strncmp(zx_env_name((zx_env)v), "ZEROX_", 6) == 0);
        CHECK(zx_env_help((zx_env)v)[0] != '\0');
    }
    unsetenv("ZEROX_THREADS");
    CHECK(strcmp(zx_env_text(ZX_ENV_THREADS), "0") == 0);
    setenv("ZEROX_THREADS", "", 1);
    CHECK_OK(zx_env_int(ZX_ENV_THREADS, 0, 64, &value));
    CHECK_EQ_I64(value, 0);
    setenv("ZEROX_THREADS", "12", 1);
    CHECK_OK(zx_env_int(ZX_ENV_THREADS, 0, 64, &value));
    CHECK_EQ_I64(value, 12);
    static const char *const wrong[] = {"65", "-1", "2x", "two", "99999999999999999999", "1.5"};
    for (int i = 0; i < 6; i++) {
        setenv("ZEROX_THREADS", wrong[i], 1);
        CHECK_STATUS(zx_env_int(ZX_ENV_THREADS, 0, 64, &value), ZX_ERR_ARG);
        CHECK_ERROR_HAS("ZEROX_THREADS");
        CHECK_ERROR_HAS(wrong[i]);
        CHECK_EQ_I64(value, 0);
    }
    unsetenv("ZEROX_THREADS");
}

/* ---- log ---- */

/* Runs zx_log with stderr in a pipe and gives back what arrived. */
static void captured_log(zx_log_level level, const char *text, char *out, size_t out_bytes)
{
    int ends[2];
    out[0] = '\0';
    CHECK_OR_RETURN(CHECK(pipe2(ends, O_CLOEXEC) == 0));
    int saved = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    zx_log(level, "%s", text);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(ends[1]);
    ssize_t n = read(ends[0], out, out_bytes - 1);
    out[n < 0 ? 0 : n] = '\0';
    close(ends[0]);
}

static void test_log_lines(void)
{
    char line[4096], longer[3000];
    captured_log(ZX_LOG_WARN, "hello", line, sizeof line);
    CHECK(strcmp(line, "zerox: hello\n") == 0);
    zx_log_set_rank(3);
    CHECK_EQ_I64(zx_log_rank(), 3);
    captured_log(ZX_LOG_ERROR, "hello", line, sizeof line);
    CHECK(strcmp(line, "zerox[3]: hello\n") == 0);
    zx_log_set_rank(-1);
    captured_log(ZX_LOG_INFO, "too much", line, sizeof line); /* the level is warn unless ZEROX_LOG says more */
    CHECK(line[0] == '\0');
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    captured_log(ZX_LOG_WARN, longer, line, sizeof line);
    size_t n = strlen(line);
    CHECK(n > 900 && n <= 1024 && line[n - 1] == '\n' && strchr(line, '\n') == line + n - 1);
}

/* A block that is freed twice, or whose header was overwritten, is reported and left alone. */
static void test_free_reports_overwritten_header(void)
{
    uint64_t foreign[32] = {0};
    char line[512];
    int ends[2];
    CHECK_OR_RETURN(CHECK(pipe2(ends, O_CLOEXEC) == 0));
    int saved = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    zx_free(&foreign[16]);
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(ends[1]);
    ssize_t n = read(ends[0], line, sizeof line - 1);
    line[n < 0 ? 0 : n] = '\0';
    close(ends[0]);
    CHECK(strstr(line, "not a block of zx_alloc") != NULL);
}

/* ---- timeline ---- */

static void test_timeline_keeps_the_last(void)
{
    zx_event_rec e[8];
    zx_mem_stats before = zx_mem_get(ZX_MEM_MISC);
    zx_timeline_add("lost", 0, 0, 1, 0);
    CHECK(!zx_timeline_on());
    CHECK_EQ_I64(zx_timeline_read(e, 8), 0);
    CHECK_STATUS(zx_timeline_enable(-1), ZX_ERR_ARG);
    CHECK_OK(zx_timeline_enable(5));
    CHECK(zx_timeline_on());
    zx_log_set_rank(2);
    for (int i = 0; i < 13; i++)
        zx_timeline_add("e", i % 4, i, i + 1, 10 * i);
    zx_log_set_rank(-1);
    CHECK_EQ_I64(zx_timeline_read(e, 8), 5);
    for (int i = 0; i < 5; i++) {
        CHECK_EQ_I64(e[i].begin_ns, 8 + i);
        CHECK_EQ_I64(e[i].bytes, 10 * (8 + i));
        CHECK_EQ_I64(e[i].lane, (8 + i) % 4);
        CHECK_EQ_I64(e[i].rank, 2);
    }
    CHECK_EQ_I64(zx_timeline_read(e, 2), 2);
    CHECK_EQ_I64(e[0].begin_ns, 11);
    CHECK_OK(zx_timeline_enable(0));
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_MISC).n_live, before.n_live);
}

static _Atomic bool g_stop;

static void *adds_events(void *arg)
{
    int64_t lane = (int64_t)(intptr_t)arg;
    for (int64_t i = 0; !atomic_load(&g_stop); i++)
        zx_timeline_add("e", (int)lane, i, i + lane, i * lane);
    return NULL;
}

/* Every event that is read is whole, while four threads write and the ring is replaced under them. */
static void test_timeline_events_are_whole(void)
{
    static zx_event_rec e[64];
    pthread_t threads[N_THREADS];
    atomic_store(&g_stop, false);
    CHECK_OK(zx_timeline_enable(7));
    for (int i = 0; i < N_THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, adds_events, (void *)(intptr_t)i) == 0);
    static const int64_t sizes[] = {1, 64, 2}; /* in small ones laps meet */
    int64_t n_read = 0, n_torn = 0;
    int64_t deadline = zx_now_ns() + 20000000000;
    for (int round = 0; round < 10000 || (n_read < 1000 && zx_now_ns() < deadline); round++) {
        if (round % 100 == 50) sched_yield(); /* on a busy machine the writers may not have begun */
        if (round % 100 == 0) CHECK_OK(zx_timeline_enable(sizes[round / 100 % 3]));
        int64_t n = zx_timeline_read(e, 64);
        for (int64_t i = 0; i < n; i++)
            n_torn += e[i].end_ns - e[i].begin_ns != e[i].lane || e[i].bytes != e[i].begin_ns * e[i].lane;
        n_read += n;
    }
    atomic_store(&g_stop, true);
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(threads[i], NULL);
    CHECK_OK(zx_timeline_enable(0));
    CHECK(n_read >= 1000);
    CHECK_EQ_I64(n_torn, 0);
}

int main(void)
{
    unsetenv("ZEROX_LOG");
    unsetenv("ZEROX_DEBUG");
    RUN(test_error_has_text_and_frames);
    RUN(test_error_appends_errno);
    RUN(test_error_may_quote_itself);
    RUN(test_error_long_text_and_many_frames);
    RUN(test_error_belongs_to_its_thread);
    RUN(test_status_names);
    RUN(test_alloc_is_zeroed_aligned_and_counted);
    RUN(test_alloc_refuses_what_cannot_be);
    RUN(test_accounts_of_others);
    RUN(test_counts_hold_among_threads);
    RUN(test_faults_fire_once);
    RUN(test_environment);
    RUN(test_log_lines);
    RUN(test_free_reports_overwritten_header);
    RUN(test_timeline_keeps_the_last);
    RUN(test_timeline_events_are_whole);
    return check_report();
}
