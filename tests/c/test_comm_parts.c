/* Pairs, counters, split, aliases, several communicators at once, and nothing left behind after a thousand of them. */
#include "comm_ranks.h"

#include <dirent.h>

/* ---- pairs ------------------------------------------------------------------------------------------ */

static float value(int from, int to, int64_t i, int n_call)
{
    return (float)(from * 1000 + to * 100 + n_call) + (float)(i % 911) / 1024;
}

/* Around the ring of ranks; even ranks send first. Three calls a size, so that staging is used again. */
static void ring_of(ranks_env *e, float *send, float *recv, int64_t n)
{
    int next = (e->rank + 1) % e->world, before = (e->rank + e->world - 1) % e->world;
    for (int k = 0; k < 3; k++) {
        for (int64_t i = 0; i < n; i++) {
            send[i] = value(e->rank, next, i, k);
            recv[i] = -1;
        }
        recv[n] = 123;
        bool first = e->rank % 2 == 0;
        for (int half = 0; half < 2; half++) {
            if ((half == 0) == first) {
                CHECK_OK(zx_comm_send(e->comm, e->stream, send, n, ZX_F32, next));
                CHECK_OK(zx_stream_fill(e->stream, send, 0xab, (size_t)n * 4));
            } else {
                CHECK_OK(zx_comm_recv(e->comm, e->stream, recv, n, ZX_F32, before));
            }
        }
        CHECK_OK(zx_stream_sync(e->stream));
        int64_t wrong = 0;
        for (int64_t i = 0; i < n; i++) {
            wrong += recv[i] != value(before, e->rank, i, k);
        }
        CHECK_EQ_I64(wrong, 0);
        CHECK(recv[n] == 123);
    }
}

static void pairs(ranks_env *e)
{
    static const int64_t sizes[] = {0, 1, 997, 16384, 16385, 100003};
    void *send = NULL, *recv = NULL, *base = NULL;
    zx_mem *mem = NULL;
    int id = -1;
    size_t bytes = 512 * 1024;
    CHECK_OR_RETURN(CHECK_OK(zx_device_alloc(e->dev, bytes, &send)) && CHECK_OK(zx_device_alloc(e->dev, bytes, &recv)));
    for (int i = 0; i < 6; i++) {
        ring_of(e, send, recv, sizes[i]);
    }
    CHECK_OR_RETURN(CHECK_OK(zx_mem_open(e->dev, bytes, true, &mem)) &&
                    CHECK_OK(zx_device_reserve(e->dev, bytes, &base)) &&
                    CHECK_OK(zx_device_map(e->dev, base, mem, 0, bytes)));
    CHECK_OK(zx_comm_register(e->comm, mem, base, &id));
    for (int i = 0; i < 6; i++) { /* every other rank sends in place */
        ring_of(e, e->rank % 2 ? base : send, recv, sizes[i]);
    }
    /* To everybody and from everybody, with one's own pair numbers. */
    for (int r = 0; r < e->world; r++) {
        float x = (float)(e->rank * 10 + r), y = -1;
        if (r == e->rank) {
            continue;
        }
        if (e->rank < r) {
            CHECK_OK(zx_comm_send(e->comm, e->stream, &x, 1, ZX_F32, r));
            CHECK_OK(zx_comm_recv(e->comm, e->stream, &y, 1, ZX_F32, r));
        } else {
            CHECK_OK(zx_comm_recv(e->comm, e->stream, &y, 1, ZX_F32, r));
            CHECK_OK(zx_comm_send(e->comm, e->stream, &x, 1, ZX_F32, r));
        }
        CHECK_OK(zx_stream_sync(e->stream));
        CHECK(y == (float)(r * 10 + e->rank));
    }
    CHECK_STATUS(zx_comm_send(e->comm, e->stream, send, 1, ZX_F32, e->rank), ZX_ERR_ARG);
    CHECK_STATUS(zx_comm_recv(e->comm, e->stream, recv, 1, ZX_F32, e->world), ZX_ERR_ARG);
    CHECK_OK(zx_comm_barrier(e->comm, e->stream));
    CHECK_OK(zx_stream_sync(e->stream));
    CHECK_OK(zx_comm_unregister(e->comm, id));
    zx_device_unreserve(e->dev, base, bytes);
    zx_mem_close(mem);
    zx_device_free(e->dev, send);
    zx_device_free(e->dev, recv);
}

static void test_pairs(void)
{
    ranks_threads(2, &(ranks_options){0}, pairs);
    ranks_threads(4, &(ranks_options){0}, pairs);
    ranks_threads(4, &(ranks_options){.delay_seed = 5}, pairs);
    ranks_processes(2, &(ranks_options){0}, pairs);
}

/* ---- counters --------------------------------------------------------------------------------------- */

static void expect(ranks_env *e, int64_t n_calls, int64_t elems, int64_t bytes)
{
    zx_comm_counters c = zx_comm_counters_get(e->comm);
    CHECK_EQ_I64(c.n_calls, n_calls);
    CHECK_EQ_I64(c.sent_elems, elems);
    CHECK_EQ_I64(c.sent_bytes, bytes);
    zx_comm_counters_reset(e->comm);
}

static void counters(ranks_env *e)
{
    float *in = calloc(4 * 1030, 4), *out = calloc(4 * 1030, 4);
    int64_t w = e->world, n = 1027, piece = (n + w - 1) / w, mine = zx_min64(piece, n - piece * e->rank);
    CHECK_OK(zx_comm_all_gather(e->comm, e->stream, in, out, n, ZX_F32));
    expect(e, 1, n * (w - 1), n * (w - 1) * 4);
    CHECK_OK(zx_comm_reduce_scatter(e->comm, e->stream, in, out, n, ZX_BF16, ZX_F32, false));
    expect(e, 1, n * (w - 1), n * (w - 1) * 2);
    CHECK_OK(zx_comm_all_reduce(e->comm, e->stream, in, out, n, ZX_F32));
    expect(e, 1, n - mine + mine * (w - 1), (n - mine + mine * (w - 1)) * 4);
    CHECK_OK(zx_comm_all_reduce(e->comm, e->stream, in, out, 4 * w, ZX_F64)); /* divisible: 2 n (w - 1) / w */
    expect(e, 1, 2 * 4 * (w - 1), 2 * 4 * (w - 1) * 8);
    CHECK_OK(zx_comm_broadcast(e->comm, e->stream, out, n, ZX_U8, 1));
    expect(e, 1, e->rank == 1 ? n * (w - 1) : 0, e->rank == 1 ? n * (w - 1) : 0);
    CHECK_OK(zx_comm_all_to_all(e->comm, e->stream, in, out, 17, ZX_I64));
    expect(e, 1, 17 * (w - 1), 17 * (w - 1) * 8);
    CHECK_OK(zx_comm_barrier(e->comm, e->stream));
    expect(e, 1, 0, 0);
    if (e->rank == 0) {
        CHECK_OK(zx_comm_send(e->comm, e->stream, in, 5, ZX_F32, 1));
        expect(e, 1, 5, 20);
    } else if (e->rank == 1) {
        CHECK_OK(zx_comm_recv(e->comm, e->stream, out, 5, ZX_F32, 0));
        expect(e, 1, 0, 0);
    }
    CHECK_OK(zx_comm_barrier(e->comm, e->stream));
    free(in);
    free(out);
}

static void test_counters(void)
{
    ranks_threads(3, &(ranks_options){0}, counters);
}

/* ---- split ------------------------------------------------------------------------------------------ */

static void sum_of_ranks(ranks_env *e, zx_comm *c, float mine, float want)
{
    float out = -1;
    CHECK_OK(zx_comm_all_reduce(c, e->stream, &mine, &out, 1, ZX_F32));
    CHECK_OK(zx_stream_sync(e->stream));
    CHECK(out == want);
}

static void split(ranks_env *e)
{
    zx_comm *half = NULL, *pair = NULL, *none = NULL, *alone = NULL;
    /* Even and odd ranks of six, in reverse order. */
    CHECK_OR_RETURN(CHECK_OK(zx_comm_split(e->comm, e->rank % 2, -e->rank, &half)));
    CHECK_EQ_I64(zx_comm_world(half), 3);
    CHECK_EQ_I64(zx_comm_rank(half), 2 - e->rank / 2);
    sum_of_ranks(e, half, (float)e->rank, e->rank % 2 ? 9 : 6);
    /* One of the halves splits again; the other does not. */
    if (e->rank % 2 == 0) {
        CHECK_OK(zx_comm_split(half, e->rank == 4 ? -1 : 0, 0, &pair));
        CHECK((pair == NULL) == (e->rank == 4));
        if (pair != NULL) {
            sum_of_ranks(e, pair, (float)(e->rank + 1), 4);
        }
    }
    CHECK_OK(zx_comm_split(e->comm, e->rank == 3 ? 0 : -1, 0, &none));
    CHECK((none != NULL) == (e->rank == 3));
    if (none != NULL) {
        CHECK(strcmp(zx_comm_transport(none), "local") == 0);
        sum_of_ranks(e, none, 7, 7);
    }
    /* All of them at once, in the same stream. */
    CHECK_OK(zx_comm_split(e->comm, e->rank, 0, &alone));
    for (int k = 0; k < 20; k++) {
        sum_of_ranks(e, e->comm, (float)(e->rank + k), (float)(15 + 6 * k));
        sum_of_ranks(e, half, (float)(e->rank + k), (float)((e->rank % 2 ? 9 : 6) + 3 * k));
        if (pair != NULL) {
            sum_of_ranks(e, pair, (float)(e->rank + k), (float)(2 + 2 * k));
        }
        sum_of_ranks(e, alone, (float)k, (float)k);
    }
    zx_comm_close(alone);
    zx_comm_close(none);
    zx_comm_close(pair);
    zx_comm_close(half);
}

static void test_split(void)
{
    ranks_threads(6, &(ranks_options){0}, split);
    ranks_threads(6, &(ranks_options){.delay_seed = 11}, split);
    ranks_processes(6, &(ranks_options){0}, split);
}

/* ---- aliases, and registrations of the parent ------------------------------------------------------- */

static void aliases(ranks_env *e)
{
    size_t bytes = 128 * 1024;
    void *base = NULL, *other = NULL;
    zx_mem *mem = NULL;
    zx_comm *child = NULL;
    int id = -1;
    int64_t n = 10000;
    float *out = calloc((size_t)(n * e->world), 4);
    CHECK_OR_RETURN(
        CHECK_OK(zx_mem_open(e->dev, bytes, true, &mem)) && CHECK_OK(zx_device_reserve(e->dev, bytes, &base)) &&
        CHECK_OK(zx_device_map(e->dev, base, mem, 0, bytes)) && CHECK_OK(zx_device_reserve(e->dev, bytes, &other)) &&
        CHECK_OK(zx_device_map(e->dev, other, mem, 65536, 65536)));
    CHECK_OK(zx_comm_register(e->comm, mem, NULL, &id)); /* known, but at no address yet */
    CHECK_STATUS(zx_comm_alias(e->comm, id, other, 65537, 65536), ZX_ERR_ARG);
    CHECK_STATUS(zx_comm_alias(e->comm, id + 1, other, 0, 1), ZX_ERR_ARG);
    CHECK_OK(zx_comm_alias(e->comm, id, base, 0, 65536));
    CHECK_OK(zx_comm_alias(e->comm, id, other, 65536, 65536));
    CHECK_OK(zx_comm_alias(e->comm, id, other, 65536, 65536)); /* again: replaced */
    CHECK_STATUS(zx_comm_alias(e->comm, id, (char *)other + 4096, 0, 65536), ZX_ERR_ARG);
    CHECK_OK(zx_comm_split(e->comm, 0, -e->rank, &child));
    for (int k = 0; k < 4; k++) {
        float *in = k % 2 ? other : base;
        zx_comm *c = k < 2 ? e->comm : child;
        for (int64_t i = 0; i < n; i++) {
            in[i] = (float)(zx_comm_rank(c) * 100000 + i + k);
        }
        CHECK_OK(zx_comm_all_gather(c, e->stream, in, out, n, ZX_F32));
        CHECK_OK(zx_stream_fill(e->stream, in, 0, (size_t)n * 4));
        CHECK_OK(zx_stream_sync(e->stream));
        int64_t wrong = 0;
        for (int64_t i = 0; i < n * e->world; i++) {
            wrong += out[i] != (float)(i / n * 100000 + i % n + k);
        }
        CHECK_EQ_I64(wrong, 0);
    }
    zx_comm_close(child);
    CHECK_OK(zx_comm_unregister(e->comm, id));
    CHECK_STATUS(zx_comm_unregister(e->comm, id), ZX_ERR_ARG);
    zx_device_unreserve(e->dev, base, bytes);
    zx_device_unreserve(e->dev, other, bytes);
    zx_mem_close(mem);
    free(out);
}

static void test_aliases(void)
{
    ranks_threads(3, &(ranks_options){0}, aliases);
    ranks_processes(2, &(ranks_options){0}, aliases);
}

/* Objects of different sizes, also of none; what is not shareable fails on every rank, and the next one works. */
static void odd_objects(ranks_env *e)
{
    zx_mem *mem = NULL;
    void *base = NULL;
    int id = -1;
    size_t bytes = 4096 * (size_t)e->rank;
    CHECK_OK(zx_mem_open(e->dev, 4096, e->rank != 1, &mem));
    CHECK_STATUS(zx_comm_register(e->comm, mem, NULL, &id), e->rank == 1 ? ZX_ERR_STATE : ZX_ERR_PEER);
    CHECK_EQ_I64(id, -1);
    zx_mem_close(mem);
    CHECK_OK(zx_mem_open(e->dev, bytes, true, &mem));
    CHECK_OK(zx_device_reserve(e->dev, bytes, &base));
    CHECK_OK(zx_device_map(e->dev, base, mem, 0, bytes));
    CHECK_OK(zx_comm_register(e->comm, mem, base, &id));
    CHECK_OK(zx_comm_unregister(e->comm, id));
    zx_device_unreserve(e->dev, base, bytes);
    zx_mem_close(mem);
}

static void test_odd_objects(void)
{
    ranks_threads(3, &(ranks_options){0}, odd_objects);
    ranks_processes(3, &(ranks_options){0}, odd_objects);
}

/* ---- two communicators in two streams --------------------------------------------------------------- */

static void two_streams(ranks_env *e)
{
    enum { N = 5000, ROUNDS = 30 };
    zx_comm *second = NULL;
    zx_stream *stream = NULL;
    static const int64_t n = N;
    float *a = calloc(N, 4), *b = calloc(N, 4), *sum_a = calloc(ROUNDS * N, 4), *sum_b = calloc(ROUNDS * N, 4);
    CHECK_OR_RETURN(CHECK_OK(zx_comm_split(e->comm, 0, 0, &second)) &&
                    CHECK_OK(zx_stream_open(e->dev, "comm2", &stream)));
    for (int k = 0; k < ROUNDS; k++) { /* nothing orders the streams; each communicator keeps to its own */
        CHECK_OK(zx_stream_fill(e->stream, a, e->rank + k, N * 4));
        CHECK_OK(zx_stream_fill(stream, b, e->rank + 2 * k, N * 4));
        CHECK_OK(zx_comm_all_reduce(e->comm, e->stream, a, sum_a + k * N, n, ZX_F32));
        CHECK_OK(zx_comm_all_reduce(second, stream, b, sum_b + k * N, n, ZX_F32));
    }
    CHECK_OK(zx_stream_sync(stream));
    CHECK_OK(zx_stream_sync(e->stream));
    for (int k = 0; k < ROUNDS; k++) {
        float want_a = 0, want_b = 0, x;
        for (int r = 0; r < e->world; r++) {
            memset(&x, r + k, 4);
            want_a = r == 0 ? x : want_a + x;
            memset(&x, r + 2 * k, 4);
            want_b = r == 0 ? x : want_b + x;
        }
        CHECK(sum_a[k * N] == want_a && sum_a[k * N + N - 1] == want_a);
        CHECK(sum_b[k * N] == want_b && sum_b[k * N + N - 1] == want_b);
    }
    zx_stream_close(stream);
    zx_comm_close(second);
    free(a);
    free(b);
    free(sum_a);
    free(sum_b);
}

static void test_two_streams(void)
{
    ranks_threads(2, &(ranks_options){0}, two_streams);
    for (uint64_t seed = 1; seed <= 20; seed++) {
        ranks_threads(2, &(ranks_options){.delay_seed = seed * 77}, two_streams);
    }
}

/* ---- nothing stays ---------------------------------------------------------------------------------- */

static int count_entries(const char *path)
{
    int n = 0;
    DIR *dir = opendir(path);
    while (dir != NULL && readdir(dir) != NULL) {
        n++;
    }
    if (dir != NULL) {
        closedir(dir);
    }
    return n;
}

static int64_t count_maps(void)
{
    int64_t n = 0;
    FILE *f = fopen("/proc/self/maps", "r");
    for (int c; f != NULL && (c = fgetc(f)) != EOF;) {
        n += c == '\n';
    }
    if (f != NULL) {
        fclose(f);
    }
    return n;
}

typedef struct census {
    int n_fds, n_threads;
    int64_t n_maps, n_blocks;
} census;

static census count_all(void)
{
    census c = {
        .n_fds = count_entries("/proc/self/fd"), .n_threads = count_entries("/proc/self/task"), .n_maps = count_maps()};
    for (int i = 0; i < ZX_N_MEM_CLASS; i++) {
        c.n_blocks += zx_mem_get((zx_mem_class)i).n_live;
    }
    return c;
}

static void open_often(ranks_env *e)
{
    int n_times = *(int *)e->arg;
    for (int k = 0; k < n_times; k++) {
        zx_comm *comm = NULL, *child = NULL;
        zx_comm_config config = {.transport = "peer", .ring_bytes = 64 * 1024};
        float x = 1, y = 0;
        CHECK_OR_RETURN(CHECK_OK(zx_comm_open(e->dev, e->bs, &config, &comm)));
        if (k % 50 == 0) {
            CHECK_OK(zx_comm_split(comm, 0, 0, &child));
        }
        CHECK_OK(zx_comm_all_reduce(child != NULL ? child : comm, e->stream, &x, &y, 1, ZX_F32));
        CHECK(y == (float)e->world);
        zx_comm_close(child);
        zx_comm_close(comm);
    }
}

static void test_no_leaks(void)
{
    int few = 5, many = 1000;
    ranks_options o = {.no_comm = true, .arg = &few};
    ranks_threads(2, &o, open_often);
    census before = count_all();
    o.arg = &many;
    ranks_threads(2, &o, open_often);
    for (int k = 0; k < 20; k++) { /* bootstraps, too */
        o.arg = &few;
        ranks_threads(3, &o, open_often);
    }
    census after = count_all();
    CHECK_EQ_I64(after.n_fds, before.n_fds);
    CHECK_EQ_I64(after.n_threads, before.n_threads);
    CHECK_EQ_I64(after.n_blocks, before.n_blocks);
    /* The C library keeps stacks of threads that ended, and arenas. */
    CHECK(after.n_maps <= before.n_maps + 24);
}

int main(void)
{
    RUN(test_counters);
    RUN(test_pairs);
    RUN(test_split);
    RUN(test_aliases);
    RUN(test_odd_objects);
    RUN(test_two_streams);
    RUN(test_no_leaks);
    return check_report();
}
