/* test_device_processes.c - memory and flags between processes: descriptors over a socket, order, sleeping, a peer
 * that dies; a pool that a fork leaves behind. */
#include "device_tools.h"

#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>

enum { PAGE = 4096, N_PAGES = 16, N_ROUNDS = 20000 };

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static bool send_fd(int socket, int fd)
{
    char byte = 'x';
    struct iovec io = {.iov_base = &byte, .iov_len = 1};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &fd, sizeof fd);
    return sendmsg(socket, &m, 0) == 1;
}

static int receive_fd(int socket)
{
    char byte;
    int fd = -1;
    struct iovec io = {.iov_base = &byte, .iov_len = 1};
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    if (recvmsg(socket, &m, MSG_CMSG_CLOEXEC) != 1) return -1;
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (c != NULL && c->cmsg_type == SCM_RIGHTS) memcpy(&fd, CMSG_DATA(c), sizeof fd);
    return fd;
}

/* One side: the shared pages twice behind its own addresses. Page 0 holds flags, the rest data. */
typedef struct side {
    zx_device *dev;
    zx_stream *stream;
    zx_mem *mem;
    char *base;
    uint64_t *ping, *pong;
    int64_t *data, *alias;
} side;

static bool side_map(side *s)
{
    size_t bytes = N_PAGES * PAGE;
    bool ok = CHECK_OK(zx_stream_open(s->dev, "comm", &s->stream)) &&
              CHECK_OK(zx_device_reserve(s->dev, 2 * bytes, (void **)&s->base)) &&
              CHECK_OK(zx_device_map(s->dev, s->base, s->mem, 0, bytes)) &&
              CHECK_OK(zx_device_map(s->dev, s->base + bytes, s->mem, 0, bytes));
    s->ping = (uint64_t *)(void *)s->base;
    s->pong = (uint64_t *)(void *)(s->base + ZX_FLAG_BYTES);
    s->data = (int64_t *)(void *)(s->base + PAGE);
    s->alias = (int64_t *)(void *)(s->base + bytes + PAGE);
    return ok;
}

static void side_close(side *s)
{
    zx_stream_close(s->stream);
    zx_mem_close(s->mem);
    if (s->base != NULL) zx_device_unreserve(s->dev, s->base, 2 * N_PAGES * PAGE);
    zx_device_close(s->dev);
}

static int count_wrong(const int64_t *data, int64_t base)
{
    int n_wrong = 0;
    for (int i = 0; i < 512; i++)
        n_wrong += data[i] != base + i;
    return n_wrong;
}

/* The child: imports, adds 1000 to what it is given, dies asleep at the end if told to. */
static void child(int socket)
{
    side s = {.dev = open_cpu(1)};
    int fd = receive_fd(socket);
    if (s.dev == NULL || !CHECK(fd >= 0)) return;
    CHECK_OK(zx_mem_import(s.dev, fd, N_PAGES * PAGE, &s.mem));
    close(fd);
    if (!side_map(&s)) return;
    CHECK_OK(zx_stream_wait(s.stream, s.ping, 1));
    CHECK_EQ_I64(count_wrong(s.alias, 5), 0);
    for (int i = 0; i < 512; i++)
        s.alias[i] += 1000;
    CHECK_OK(zx_stream_signal(s.stream, s.pong, 1));
    for (uint64_t i = 2; i <= N_ROUNDS; i++) { /* the race */
        if (!CHECK_OK(zx_stream_wait(s.stream, s.ping, i))) break;
        if (!CHECK_OK(zx_stream_signal(s.stream, s.pong, i))) break;
    }
    for (uint64_t i = N_ROUNDS + 1; i <= N_ROUNDS + 20; i++) { /* asleep each time */
        if (!CHECK_OK(zx_stream_wait(s.stream, s.ping, i))) break;
        usleep(3000);
        if (!CHECK_OK(zx_stream_signal(s.stream, s.pong, i))) break;
    }
    side_close(&s);
}

static pid_t spawn(void (*body)(int), int *out_socket)
{
    int ends[2];
    if (!CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0)) return -1;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        body(ends[1]);
        _exit(check_report());
    }
    close(ends[1]);
    *out_socket = ends[0];
    return pid;
}

static bool parent_open(side *s, int socket)
{
    int fd = -1;
    *s = (side){.dev = open_cpu(1)};
    bool ok = s->dev != NULL && CHECK_OK(zx_mem_open(s->dev, N_PAGES * PAGE, true, &s->mem)) && side_map(s) &&
              CHECK_OK(zx_mem_export(s->mem, &fd)) && CHECK(send_fd(socket, fd));
    if (fd >= 0) close(fd);
    return ok;
}

static void test_memory_and_flags_between_processes(void)
{
    int socket, status = -1;
    side s;
    pid_t pid = spawn(child, &socket);
    CHECK_OR_RETURN(CHECK(pid > 0));
    CHECK_OR_RETURN(parent_open(&s, socket));
    for (int i = 0; i < 512; i++)
        s.data[i] = 5 + i;
    CHECK_OK(zx_stream_signal(s.stream, s.ping, 1));
    CHECK_OK(zx_stream_wait(s.stream, s.pong, 1));
    CHECK_EQ_I64(count_wrong(s.data, 1005), 0);
    CHECK_EQ_I64(count_wrong(s.alias, 1005), 0);
    static int64_t round_ns[N_ROUNDS];
    for (uint64_t i = 2; i <= N_ROUNDS; i++) {
        int64_t begin = zx_now_ns();
        if (!CHECK_OK(zx_stream_signal(s.stream, s.ping, i))) break;
        if (!CHECK_OK(zx_stream_wait(s.stream, s.pong, i))) break;
        round_ns[i - 2] = zx_now_ns() - begin;
    }
    qsort(round_ns, N_ROUNDS - 1, sizeof *round_ns, by_value);
    double ns = (double)round_ns[N_ROUNDS / 2] / 2;
    int64_t longest = 0;
    for (uint64_t i = N_ROUNDS + 1; i <= N_ROUNDS + 20; i++) {
        usleep(3000);
        int64_t round = zx_now_ns();
        if (!CHECK_OK(zx_stream_signal(s.stream, s.ping, i))) break;
        if (!CHECK_OK(zx_stream_wait(s.stream, s.pong, i))) break;
        longest = zx_max64(longest, zx_now_ns() - round);
    }
    printf(
        "one way between two processes: %.0f ns (median); there and back with both asleep and 3 ms of work: %.2f ms at "
        "most\n",
        ns, (double)longest / 1e6);
    CHECK(longest < 90000000); /* else a wake-up was lost */
    side_close(&s);
    close(socket);
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
}

/* ---- a peer that dies ---- */

static void child_dies_asleep(int socket)
{
    side s = {.dev = open_cpu(1)};
    int fd = receive_fd(socket);
    if (s.dev == NULL || !CHECK(fd >= 0)) return;
    CHECK_OK(zx_mem_import(s.dev, fd, N_PAGES * PAGE, &s.mem));
    if (!side_map(&s)) return;
    CHECK(ftruncate(fd, 0) != 0); /* cannot pull the memory from under its peer */
    s.data[0] = 77;
    CHECK_OK(zx_stream_signal(s.stream, s.pong, 1));
    CHECK_OK(zx_stream_wait(s.stream, s.ping, 1));
}

static void test_memory_survives_a_killed_peer(void)
{
    int socket, status = -1;
    side s;
    pid_t pid = spawn(child_dies_asleep, &socket);
    CHECK_OR_RETURN(CHECK(pid > 0));
    CHECK_OR_RETURN(parent_open(&s, socket));
    CHECK_OK(zx_stream_wait(s.stream, s.pong, 1));
    usleep(20000); /* it sleeps in its wait by now */
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, &status, 0) == pid && WIFSIGNALED(status));
    CHECK_EQ_I64(s.data[0], 77);
    s.data[0] = 78;
    CHECK_OK(zx_stream_signal(s.stream, s.ping, 1)); /* the note of the sleeper that is gone does no harm */
    CHECK_OK(zx_stream_wait(s.stream, s.ping, 1));
    CHECK_EQ_I64(s.alias[0], 78);
    side_close(&s);
    close(socket);
}

/* ---- a pool after a fork ---- */

static void count_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    atomic_fetch_add(&((_Atomic int *)arg)[index], 1);
}

static void test_a_forked_pool_runs_inline(void)
{
    zx_pool *pool;
    int status = -1;
    _Atomic int seen[10] = {0};
    CHECK_OR_RETURN(CHECK_OK(zx_pool_open(3, &pool)));
    zx_pool_run(pool, count_task, (void *)seen, 10);
    fflush(stdout);
    pid_t pid = fork();
    CHECK_OR_RETURN(CHECK(pid >= 0));
    if (pid == 0) {
        alarm(10);
        zx_pool_run(pool, count_task, (void *)seen, 10);
        for (int i = 0; i < 10; i++)
            CHECK_EQ_I64(atomic_load(&seen[i]), 2);
        zx_pool_close(pool);
        _exit(check_report());
    }
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    zx_pool_run(pool, count_task, (void *)seen, 10); /* the parent's still works */
    for (int i = 0; i < 10; i++)
        CHECK_EQ_I64(atomic_load(&seen[i]), 2);
    zx_pool_close(pool);
}

int main(void)
{
    live before = live_now();
    RUN(test_memory_and_flags_between_processes);
    RUN(test_memory_survives_a_killed_peer);
    RUN(test_a_forked_pool_runs_inline);
    check_live_is(before);
    return check_report();
}
