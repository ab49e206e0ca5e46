/* How ranks meet: gathers, descriptors, groups, strangers, duplicates, deadlines, deaths, aborts; in processes and in
 * threads. */
#include "comm_ranks.h"

#include <errno.h>
#include <fcntl.h>

static int64_t now_ms(void)
{
    return zx_now_ns() / 1000000;
}

static void sleep_ms(int64_t ms)
{
    struct timespec t = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    nanosleep(&t, NULL);
}

static const ranks_options bare = {.no_comm = true, .timeout_s = 20};

static void both(int world, ranks_fn fn)
{
    ranks_threads(world, &bare, fn);
    ranks_processes(world, &bare, fn);
}

/* ---- gathers ---------------------------------------------------------------------------------------- */

static void gathers(ranks_env *e)
{
    static const size_t sizes[] = {0, 1, 8, 4097, 300000};
    for (int i = 0; i < 5; i++) {
        size_t n = sizes[i];
        unsigned char *in = malloc(n + 1), *out = malloc(n * (size_t)e->world + 1);
        out[n * (size_t)e->world] = 0x77;
        memset(in, 10 + e->rank, n);
        CHECK_OK(zx_bootstrap_all_gather(e->bs, "sizes", in, n, out));
        int64_t wrong = 0;
        for (int r = 0; r < e->world; r++) {
            for (size_t k = 0; k < n; k++) {
                wrong += out[(size_t)r * n + k] != 10 + r;
            }
        }
        CHECK_EQ_I64(wrong, 0);
        CHECK(out[n * (size_t)e->world] == 0x77);
        free(in);
        free(out);
    }
    for (int k = 0; k < 200; k++) {
        int32_t mine = e->rank * 1000 + k, all[RANKS_MAX];
        CHECK_OK(zx_bootstrap_all_gather(e->bs, "many", &mine, sizeof mine, all));
        for (int r = 0; r < e->world; r++) {
            CHECK_EQ_I64(all[r], r * 1000 + k);
        }
    }
    CHECK_OK(zx_bootstrap_barrier(e->bs, "end"));
    CHECK_EQ_I64(zx_bootstrap_rank(e->bs), e->rank);
    CHECK_EQ_I64(zx_bootstrap_world(e->bs), e->world);
    CHECK(zx_bootstrap_timeout(e->bs) == 20);
    CHECK_EQ_I64(zx_bootstrap_pid(e->bs, e->rank), getpid());
    CHECK_OK(zx_bootstrap_health(e->bs));
}

static void test_gathers(void)
{
    for (int world = 1; world <= 8; world += world < 3 ? 1 : 5) {
        both(world, gathers);
    }
}

/* Each pair of ranks and the world, out of step with each other. */
static void groups(ranks_env *e)
{
    int32_t members[2] = {e->rank / 2 * 2, e->rank / 2 * 2 + 1};
    zx_group pair = {.key = 100 + (uint64_t)(e->rank / 2), .n_ranks = 2, .ranks = members};
    for (int k = 0; k < 20 + 10 * (e->rank / 2); k++) {
        int32_t mine = e->rank + 100 * k, all[2];
        CHECK_OK(zx_group_all_gather(e->bs, &pair, "pair", &mine, sizeof mine, all));
        CHECK(all[0] == members[0] + 100 * k && all[1] == members[1] + 100 * k);
    }
    CHECK_OK(zx_bootstrap_barrier(e->bs, "end"));
}

static void test_groups(void)
{
    both(4, groups);
}

/* ---- descriptors ------------------------------------------------------------------------------------ */

static void descriptors(ranks_env *e)
{
    for (int k = 0; k < 10; k++) {
        int pipe_fds[2], got[RANKS_MAX];
        bool gives = (e->rank + k) % 3 != 0;
        char back = 0;
        CHECK_OR_RETURN(CHECK(pipe(pipe_fds) == 0));
        CHECK(write(pipe_fds[1], "0123456789abcdef", (size_t)e->world) == e->world);
        CHECK_OK(zx_bootstrap_exchange_fds(e->bs, "pipes", gives ? pipe_fds[0] : -1, got));
        for (int r = 0; r < e->world; r++) {
            bool expected = r != e->rank && (r + k) % 3 != 0;
            CHECK((got[r] >= 0) == expected);
            if (got[r] >= 0) { /* each reads one byte of each pipe */
                CHECK(read(got[r], &back, 1) == 1);
                CHECK((fcntl(got[r], F_GETFD) & FD_CLOEXEC) != 0);
                close(got[r]);
            }
        }
        CHECK_OK(zx_bootstrap_barrier(e->bs, "read"));
        if (gives) { /* one byte is left: its own */
            CHECK(read(pipe_fds[0], &back, 1) == 1);
        }
        close(pipe_fds[0]);
        close(pipe_fds[1]);
    }
}

static void test_descriptors(void)
{
    both(2, descriptors);
    both(5, descriptors);
}

/* ---- disagreement, leaving -------------------------------------------------------------------------- */

static void disagree(ranks_env *e)
{
    int32_t x = 0, all[RANKS_MAX];
    CHECK_STATUS(zx_bootstrap_all_gather(e->bs, e->rank == 1 ? "apples" : "pears", &x, sizeof x, all), ZX_ERR_PEER);
    CHECK_ERROR_HAS("'apples'");
    CHECK_ERROR_HAS("'pears'");
    CHECK_ERROR_HAS("rank 1");
    CHECK_STATUS(zx_bootstrap_all_gather(e->bs, "size", &x, e->rank == 0 ? 2 : 4, all), ZX_ERR_PEER);
    CHECK_ERROR_HAS("2 bytes");
    CHECK_ERROR_HAS("4 bytes");
    CHECK_OK(zx_bootstrap_barrier(e->bs, "in step again"));
}

static void test_disagree(void)
{
    both(2, disagree);
    both(4, disagree);
}

static void leaves(ranks_env *e)
{
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    if (e->rank == 1) { /* orderly: no death */
        return;
    }
    sleep_ms(100);
    CHECK_OK(zx_bootstrap_health(e->bs));
    int64_t begin = now_ms();
    CHECK_STATUS(zx_bootstrap_barrier(e->bs, "without one"), ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 1 has closed its bootstrap");
    CHECK(now_ms() - begin < 1000);
    CHECK_OK(zx_bootstrap_health(e->bs));
    sleep_ms(200); /* rank 0 stays until the others have asked */
}

static void test_leaves(void)
{
    both(3, leaves);
}

static void rank0_leaves(ranks_env *e)
{
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    if (e->rank == 0) {
        return;
    }
    sleep_ms(200);
    CHECK_OK(zx_bootstrap_health(e->bs));
    CHECK_STATUS(zx_bootstrap_barrier(e->bs, "without the first"), ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 0");
    CHECK_ERROR_HAS("closed its bootstrap");
}

static void test_rank0_leaves(void)
{
    both(3, rank0_leaves);
}

/* ---- death and abort -------------------------------------------------------------------------------- */

static void hook(void *ctx)
{
    atomic_fetch_add((atomic_int *)ctx, 1);
}

static void dies(ranks_env *e)
{
    int victim = *(int *)e->arg;
    atomic_int n_called = 0;
    char part[32];
    int64_t pid = zx_bootstrap_pid(e->bs, victim);
    CHECK_OK(zx_bootstrap_on_death(e->bs, hook, &n_called));
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    if (e->rank == victim) {
        kill(getpid(), SIGKILL);
    }
    int64_t begin = now_ms();
    CHECK_STATUS(zx_bootstrap_barrier(e->bs, "with a dead rank"), ZX_ERR_PEER);
    snprintf(part, sizeof part, "rank %d (pid %lld) died", victim, (long long)pid);
    CHECK_ERROR_HAS(part);
    CHECK(now_ms() - begin < 1000);
    CHECK_STATUS(zx_bootstrap_health(e->bs), ZX_ERR_PEER);
    CHECK_ERROR_HAS(part);
    while (atomic_load(&n_called) == 0 && now_ms() - begin < 2000) {
        sleep_ms(5);
    }
    zx_bootstrap_off_death(e->bs, &n_called);
    CHECK_EQ_I64(atomic_load(&n_called), 1);
}

static void test_dies(void)
{
    for (int victim = 0; victim < 3; victim++) {
        pid_t pids[3];
        ranks_options o = bare;
        o.arg = &victim;
        ranks_start(3, &o, dies, pids);
        ranks_wait(3, pids, victim);
    }
}

static void aborts(ranks_env *e)
{
    atomic_int n_called = 0;
    CHECK_OK(zx_bootstrap_on_death(e->bs, hook, &n_called));
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    int64_t begin = now_ms();
    if (e->rank == 1) {
        zx_bootstrap_abort(e->bs, "out of paper");
        zx_bootstrap_abort(e->bs, "again");
    }
    zx_status status = ZX_OK;
    while (status == ZX_OK && now_ms() - begin < 2000) {
        status = zx_bootstrap_barrier(e->bs, "after an abort");
    }
    CHECK_EQ_I64(status, ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 1 aborted: out of paper");
    while (atomic_load(&n_called) == 0 && now_ms() - begin < 2000) {
        sleep_ms(5);
    }
    zx_bootstrap_off_death(e->bs, &n_called);
    CHECK_EQ_I64(atomic_load(&n_called), 1);
    sleep_ms(100); /* rank 0 passes the abort on */
}

static void test_aborts(void)
{
    both(3, aborts);
}

static void overdue(ranks_env *e)
{
    int missing = *(int *)e->arg;
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    int64_t begin = now_ms();
    if (e->rank == missing) {
        sleep_ms(1500);
        CHECK(zx_bootstrap_health(e->bs) != ZX_OK);
        return;
    }
    zx_status status = zx_bootstrap_barrier(e->bs, "where is he");
    CHECK(status == ZX_ERR_TIMEOUT || status == ZX_ERR_PEER);
    CHECK_ERROR_HAS("'where is he'");
    char part[32];
    snprintf(part, sizeof part, "by rank %d", missing);
    CHECK_ERROR_HAS(part);
    CHECK(now_ms() - begin >= 900 && now_ms() - begin < 3500);
}

static void test_overdue(void)
{
    for (int missing = 0; missing < 3; missing += 2) {
        ranks_options o = {.no_comm = true, .timeout_s = 1, .arg = &missing};
        ranks_threads(3, &o, overdue);
        ranks_processes(3, &o, overdue);
    }
}

static bool always(void *ctx)
{
    (void)ctx;
    return true;
}

static void interrupted(ranks_env *e)
{
    CHECK_OK(zx_bootstrap_barrier(e->bs, "all are here"));
    if (e->rank == 1) {
        sleep_ms(1000);
        CHECK_STATUS(zx_bootstrap_health(e->bs), ZX_ERR_PEER);
        CHECK_ERROR_HAS("rank 0 aborted: interrupted");
        return;
    }
    int64_t begin = now_ms();
    zx_device_set_interrupt(e->dev, always, NULL);
    CHECK_STATUS(zx_bootstrap_barrier(e->bs, "for ever"), ZX_ERR_INTERRUPTED);
    CHECK_ERROR_HAS("'for ever'");
    CHECK(now_ms() - begin < 800);
    zx_device_set_interrupt(e->dev, NULL, NULL);
    sleep_ms(300);
}

static void test_interrupted(void)
{
    both(2, interrupted);
}

/* ---- the rendezvous --------------------------------------------------------------------------------- */

typedef struct joiner { /* a bootstrap opened in a thread of its own, as a process would */
    zx_bootstrap_config config;
    zx_bootstrap *bs;
    zx_status status;
    char text[ZX_ERROR_TEXT];
} joiner;

static void *join_main(void *arg)
{
    joiner *j = arg;
    j->status = zx_bootstrap_open(&j->config, NULL, &j->bs);
    snprintf(j->text, sizeof j->text, "%s", zx_error_last()->text);
    return NULL;
}

static joiner make_joiner(int rank, int world, int port, int listen_fd, double timeout_s)
{
    joiner j = {.config = {.rank = rank,
                           .world = world,
                           .address = "127.0.0.1",
                           .port = port,
                           .listen_fd = listen_fd,
                           .token = "right",
                           .job = "job",
                           .timeout_s = timeout_s}};
    return j;
}

static int dial(int port)
{
    struct sockaddr_in at = {
        .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK), .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof at) == 0);
    return fd;
}

/* Wrong in one respect each; all are refused by name, and the two real ranks meet all the same. */
static void test_strangers(void)
{
    int port = 0, fd = ranks_listen(&port), mute[70];
    joiner zero = make_joiner(0, 2, port, fd, 20), one = make_joiner(1, 2, port, -1, 20);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, join_main, &zero) == 0);
    for (int i = 0; i < 70; i++) { /* more than rank 0 keeps; they never say a word */
        mute[i] = dial(port);
    }
    int loud = dial(port);
    static const char request[] =
        "GET / HTTP/1.1\r\nHost: somebody who wants something else here, and says so at length\r\n"
        "Accept: */*\r\n\r\n";
    CHECK(write(loud, request, sizeof request) > 0);
    joiner wrong[3];
    static const char *const parts[] = {"token", "job 'another'", "world of 3"};
    for (int i = 0; i < 3; i++) {
        wrong[i] = make_joiner(1, 2, port, -1, 20);
    }
    wrong[0].config.token = "wrong";
    wrong[1].config.job = "another";
    wrong[2].config.world = 3;
    for (int i = 0; i < 3; i++) {
        int64_t begin = now_ms();
        join_main(&wrong[i]);
        CHECK_EQ_I64(wrong[i].status, ZX_ERR_PEER);
        CHECK(wrong[i].bs == NULL);
        if (!CHECK(strstr(wrong[i].text, parts[i]) != NULL)) {
            printf("    %s\n", wrong[i].text);
        }
        CHECK(strstr(wrong[i].text, "right") == NULL); /* the secret is not told */
        CHECK(now_ms() - begin < 2000);
    }
    int64_t begin = now_ms();
    join_main(&one);
    pthread_join(thread, NULL);
    CHECK(now_ms() - begin < 2000);
    if (CHECK_EQ_I64(one.status, ZX_OK) && CHECK_EQ_I64(zero.status, ZX_OK)) {
        CHECK_OK(zx_bootstrap_health(zero.bs));
    }
    zx_bootstrap_close(one.bs);
    zx_bootstrap_close(zero.bs);
    for (int i = 0; i < 70; i++) {
        close(mute[i]);
    }
    close(loud);
}

static void test_duplicate(void)
{
    int port = 0, fd = ranks_listen(&port);
    joiner zero = make_joiner(0, 3, port, fd, 20), one = make_joiner(1, 3, port, -1, 20), two = one, twin = one;
    pthread_t threads[2];
    two.config.rank = 2;
    CHECK(pthread_create(&threads[0], NULL, join_main, &zero) == 0);
    CHECK(pthread_create(&threads[1], NULL, join_main, &one) == 0);
    sleep_ms(300);
    join_main(&twin);
    CHECK_EQ_I64(twin.status, ZX_ERR_PEER);
    CHECK(strstr(twin.text, "rank 1 is here already") != NULL);
    join_main(&two);
    pthread_join(threads[0], NULL);
    pthread_join(threads[1], NULL);
    CHECK(zero.status == ZX_OK && one.status == ZX_OK && two.status == ZX_OK);
    zx_bootstrap_close(two.bs);
    zx_bootstrap_close(one.bs);
    zx_bootstrap_close(zero.bs);
}

/* The others may start before rank 0 does. */
static void test_late_rank0(void)
{
    int port = 0, fd = ranks_listen(&port);
    close(fd);
    joiner zero = make_joiner(0, 2, port, -1, 20), one = make_joiner(1, 2, port, -1, 20);
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, join_main, &one) == 0);
    sleep_ms(400);
    join_main(&zero);
    pthread_join(thread, NULL);
    if (!CHECK(zero.status == ZX_OK && one.status == ZX_OK)) {
        printf("    %s | %s\n", zero.text, one.text);
    }
    zx_bootstrap_close(one.bs);
    zx_bootstrap_close(zero.bs);
}

static void test_nobody_comes(void)
{
    int port = 0, fd = ranks_listen(&port);
    joiner zero = make_joiner(0, 3, port, fd, 0.6), one = make_joiner(1, 3, port, -1, 0.6);
    pthread_t thread;
    int64_t begin = now_ms();
    CHECK(pthread_create(&thread, NULL, join_main, &one) == 0);
    join_main(&zero);
    pthread_join(thread, NULL);
    CHECK_EQ_I64(zero.status, ZX_ERR_TIMEOUT);
    CHECK(strstr(zero.text, "missing: rank 2") != NULL);
    CHECK(one.status == ZX_ERR_PEER || one.status == ZX_ERR_TIMEOUT);
    CHECK(strstr(one.text, "missing: rank 2") != NULL);
    CHECK(now_ms() - begin < 2500);
    joiner alone = make_joiner(1, 2, port, -1, 0.5); /* nobody listens there any more */
    join_main(&alone);
    CHECK_EQ_I64(alone.status, ZX_ERR_TIMEOUT);
    CHECK(strstr(alone.text, "could not reach rank 0 at 127.0.0.1") != NULL);
}

static void test_busy_port(void)
{
    int port = 0, fd = ranks_listen(&port);
    char part[32];
    joiner zero = make_joiner(0, 2, port, -1, 5);
    join_main(&zero);
    CHECK_EQ_I64(zero.status, ZX_ERR_SYSTEM);
    snprintf(part, sizeof part, "port %d", port);
    CHECK(strstr(zero.text, part) != NULL && strstr(zero.text, "in use") != NULL);
    CHECK_EQ_I64(zx_error_last()->native, EADDRINUSE);
    zx_error_clear();
    close(fd);
}

static void test_wrong_configurations(void)
{
    joiner j = make_joiner(2, 2, 4000, -1, 1);
    join_main(&j);
    CHECK_EQ_I64(j.status, ZX_ERR_ARG);
    j = make_joiner(0, 2, 70000, -1, 1);
    join_main(&j);
    CHECK(j.status == ZX_ERR_ARG && strstr(j.text, "70000") != NULL);
    j = make_joiner(0, 2, 4000, -1, 1);
    j.config.token = "";
    join_main(&j);
    CHECK(j.status == ZX_ERR_ARG && strstr(j.text, "ZEROX_TOKEN") != NULL);
    j = make_joiner(1, 2, 4000, -1, 1);
    j.config.address = "no.such.host.invalid";
    join_main(&j);
    CHECK(j.status == ZX_ERR_ARG && strstr(j.text, "no.such.host.invalid") != NULL);
    zx_error_clear();
}

static void test_lone_member(void)
{
    zx_meeting *meeting = NULL;
    zx_bootstrap *bs = NULL;
    zx_bootstrap_config c = {.rank = 0, .world = 2, .listen_fd = -1, .timeout_s = 0.3};
    CHECK_OR_RETURN(CHECK_OK(zx_meeting_open(2, &meeting)));
    c.meeting = meeting;
    CHECK_STATUS(zx_bootstrap_open(&c, NULL, &bs), ZX_ERR_TIMEOUT);
    CHECK_ERROR_HAS("rank 1");
    CHECK(bs == NULL);
    c.world = 3;
    CHECK_STATUS(zx_bootstrap_open(&c, NULL, &bs), ZX_ERR_ARG);
    zx_meeting_close(meeting);
}

/* The n-th primitive of both ends fails: an error that says so or names the other end, and nothing stays. */
static void test_sweep(void)
{
    int n_hit = 0;
    for (int n = 1; n < 200; n++) {
        int port = 0, fd = ranks_listen(&port);
        joiner zero = make_joiner(0, 2, port, fd, 0.2), one = make_joiner(1, 2, port, -1, 0.2);
        pthread_t thread;
        int64_t n_live = zx_mem_get(ZX_MEM_COMM).n_live;
        zx_fault_arm(n);
        CHECK(pthread_create(&thread, NULL, join_main, &one) == 0);
        join_main(&zero);
        pthread_join(thread, NULL);
        bool hit = zx_fault_passed() >= n;
        zx_fault_arm(0);
        CHECK(!hit || zero.status != ZX_OK || one.status != ZX_OK || zero.bs != NULL);
        CHECK((zero.status == ZX_OK) == (zero.bs != NULL) && (one.status == ZX_OK) == (one.bs != NULL));
        CHECK(zero.status == ZX_OK || zero.text[0] != '\0');
        zx_bootstrap_close(one.bs);
        zx_bootstrap_close(zero.bs);
        CHECK_EQ_I64(zx_mem_get(ZX_MEM_COMM).n_live, n_live);
        n_hit += hit;
        if (!hit) {
            break;
        }
    }
    CHECK(n_hit > 8);
    zx_error_clear();
}

int main(void)
{
    RUN(test_gathers);
    RUN(test_groups);
    RUN(test_descriptors);
    RUN(test_disagree);
    RUN(test_leaves);
    RUN(test_rank0_leaves);
    RUN(test_dies);
    RUN(test_aborts);
    RUN(test_overdue);
    RUN(test_interrupted);
    RUN(test_strangers);
    RUN(test_duplicate);
    RUN(test_late_rank0);
    RUN(test_nobody_comes);
    RUN(test_busy_port);
    RUN(test_wrong_configurations);
    RUN(test_lone_member);
    RUN(test_sweep);
    return check_report();
}
