/* test_device.c - memory, streams, launches and scratch of the cpu device; opening, leaks and faults of all. */
#define _GNU_SOURCE 1

#include "device_tools.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096 };

/* Whether the process may read at addr, without dying when it may not. */
static bool readable(const void *addr)
{
    int ends[2];
    if (!CHECK(pipe2(ends, O_CLOEXEC) == 0)) return false;
    bool ok = write(ends[1], addr, 1) == 1;
    close(ends[0]);
    close(ends[1]);
    return ok;
}

/* ---- memory ---- */

static void test_addresses_alias_one_slot(void)
{
    zx_device *dev = open_cpu(1);
    char *base;
    zx_mem *mem;
    CHECK_OR_RETURN(dev != NULL);
    int64_t bytes = zx_mem_get(ZX_MEM_DEVICE).live_bytes;
    CHECK_OR_RETURN(CHECK_OK(zx_device_reserve(dev, 8 * PAGE, (void **)&base)));
    CHECK(!readable(base) && !readable(base + 8 * PAGE - 1));
    CHECK_OR_RETURN(CHECK_OK(zx_mem_open(dev, 3 * PAGE, false, &mem)));
    CHECK_EQ_I64(zx_mem_bytes(mem), 3 * PAGE);
    char *unit[3] = {base, base + 2 * PAGE, base + 5 * PAGE};
    for (int i = 0; i < 3; i++)
        CHECK_OK(zx_device_map(dev, unit[i], mem, i == 2 ? PAGE : 0, 2 * PAGE));
    for (int i = 0; i < 2 * PAGE; i++)
        CHECK_OR_RETURN(CHECK(unit[0][i] == 0));
    unit[0][PAGE + 5] = 42;
    CHECK(unit[1][PAGE + 5] == 42);
    CHECK(unit[2][5] == 42); /* its first page is the object's second */
    unit[2][PAGE] = 7;       /* the object's third page: in nobody else's range */
    CHECK_OK(zx_device_unmap(dev, unit[1], 2 * PAGE));
    CHECK(!readable(unit[1]));
    CHECK(readable(unit[0]) && readable(unit[2]));
    CHECK_OK(zx_device_map(dev, unit[1], mem, PAGE, 2 * PAGE)); /* the same address, other bytes */
    CHECK(unit[1][5] == 42 && unit[1][PAGE] == 7);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_DEVICE).live_bytes, bytes + 3 * PAGE); /* aliases count once */
    zx_mem_close(mem);
    CHECK(unit[0][PAGE + 5] == 42); /* mappings keep the bytes */
    zx_device_unreserve(dev, base, 8 * PAGE);
    CHECK(!readable(unit[0]));
    zx_device_close(dev);
}

static void test_object_lives_until_its_last_mapping(void)
{
    zx_device *dev = open_cpu(1);
    char *base;
    zx_mem *mem;
    CHECK_OR_RETURN(dev != NULL);
    int64_t bytes = zx_mem_get(ZX_MEM_DEVICE).live_bytes;
    CHECK_OK(zx_device_reserve(dev, 4 * PAGE, (void **)&base));
    CHECK_OK(zx_mem_open(dev, 2 * PAGE, false, &mem));
    CHECK_OK(zx_device_map(dev, base, mem, 0, 2 * PAGE));
    CHECK_OK(zx_device_map(dev, base + 2 * PAGE, mem, 0, PAGE));
    zx_mem_close(mem);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_DEVICE).live_bytes, bytes + 2 * PAGE);
    CHECK_OK(zx_device_unmap(dev, base, 4 * PAGE)); /* two whole mappings and a gap */
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_DEVICE).live_bytes, bytes);
    zx_device_unreserve(dev, base, 4 * PAGE);
    zx_device_close(dev);
}

static void test_map_refuses_what_is_wrong(void)
{
    zx_device *dev = open_cpu(1), *other = open_cpu(1);
    char *base;
    zx_mem *mem, *foreign;
    CHECK_OR_RETURN(dev != NULL && other != NULL);
    CHECK_OK(zx_device_reserve(dev, 8 * PAGE, (void **)&base));
    CHECK_OK(zx_mem_open(dev, 4 * PAGE, false, &mem));
    CHECK_OK(zx_mem_open(other, 4 * PAGE, false, &foreign));
    CHECK_STATUS(zx_device_map(dev, base + 8, mem, 0, PAGE), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_map(dev, base, mem, 100, PAGE), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_map(dev, base, mem, 0, 100), ZX_ERR_ARG);
    CHECK_ERROR_HAS("100");
    CHECK_STATUS(zx_device_map(dev, base, mem, PAGE, 4 * PAGE), ZX_ERR_ARG);
    CHECK_ERROR_HAS("[4096, 20480)");
    CHECK_STATUS(zx_device_map(dev, base, mem, 8 * PAGE, 0), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_map(dev, base + 6 * PAGE, mem, 0, 4 * PAGE), ZX_ERR_ARG);
    CHECK_ERROR_HAS("one reservation");
    CHECK_STATUS(zx_device_map(dev, base - PAGE, mem, 0, 2 * PAGE), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_map(dev, base, foreign, 0, PAGE), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_map(dev, base, NULL, 0, PAGE), ZX_ERR_ARG);
    CHECK(!readable(base));
    CHECK_OK(zx_device_map(dev, base, mem, 0, 0));
    CHECK_OK(zx_device_map(dev, base + PAGE, mem, 0, 4 * PAGE));
    CHECK_STATUS(zx_device_map(dev, base + 4 * PAGE, mem, 0, 2 * PAGE), ZX_ERR_STATE);
    CHECK_STATUS(zx_device_map(dev, base, mem, 0, 2 * PAGE), ZX_ERR_STATE);
    CHECK_STATUS(zx_device_unmap(dev, base + 2 * PAGE, PAGE), ZX_ERR_ARG);
    CHECK_ERROR_HAS("whole");
    CHECK_STATUS(zx_device_unmap(dev, base, 3 * PAGE), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_unmap(dev, base, PAGE), ZX_ERR_STATE);
    CHECK(readable(base + PAGE) && readable(base + 5 * PAGE - 1));
    CHECK_OK(zx_device_unmap(dev, base, 8 * PAGE));
    CHECK_OK(zx_device_unmap(dev, base, 0));
    zx_mem_close(mem);
    zx_mem_close(foreign);
    zx_device_unreserve(dev, base, 8 * PAGE);
    zx_device_close(dev);
    zx_device_close(other);
}

static void test_nothing_is_a_size_too(void)
{
    zx_device *dev = open_cpu(1);
    void *a, *b, *p, *q;
    zx_mem *mem;
    int fd;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_device_reserve(dev, 0, &a));
    CHECK_OK(zx_device_reserve(dev, 0, &b));
    CHECK(a != NULL && b != NULL && a != b);
    CHECK_OK(zx_mem_open(dev, 0, true, &mem));
    CHECK_OK(zx_device_map(dev, a, mem, 0, 0));
    CHECK_OK(zx_mem_export(mem, &fd));
    close(fd);
    CHECK_OK(zx_device_alloc(dev, 0, &p));
    CHECK_OK(zx_device_alloc(dev, 0, &q));
    CHECK(p != NULL && q != NULL && p != q);
    zx_device_free(dev, p);
    zx_device_free(dev, q);
    zx_device_free(dev, NULL);
    zx_mem_close(mem);
    zx_mem_close(NULL);
    zx_device_unreserve(dev, a, 0);
    zx_device_unreserve(dev, b, 0);
    zx_device_unreserve(dev, NULL, 0);
    CHECK_STATUS(zx_device_reserve(dev, 100, &a), ZX_ERR_ARG);
    CHECK(a == NULL);
    CHECK_STATUS(zx_mem_open(dev, PAGE + 1, false, &mem), ZX_ERR_ARG);
    CHECK(mem == NULL);
    zx_device_close(dev);
}

static void test_alloc_is_zeroed_and_aligned(void)
{
    static const size_t sizes[] = {1, 255, 256, 4097, 131071, 131072, 131073, 5000001, 9 << 20};
    zx_device *dev = open_cpu(1);
    unsigned char *p[9];
    CHECK_OR_RETURN(dev != NULL);
    live before = live_now();
    for (int i = 0; i < 9; i++) {
        CHECK_OR_RETURN(CHECK_OK(zx_device_alloc(dev, sizes[i], (void **)&p[i])));
        CHECK_EQ_I64((uintptr_t)p[i] % 256, 0);
        int64_t n_set = 0;
        for (size_t b = 0; b < sizes[i]; b++)
            n_set += p[i][b] != 0;
        CHECK_EQ_I64(n_set, 0);
        memset(p[i], 0xee, sizes[i]);
    }
    CHECK(((uintptr_t)p[8] & ((2 << 20) - 1)) == 0); /* large ones start on a huge page */
    CHECK_EQ_I64(live_now().blocks, before.blocks + 9);
    for (int i = 0; i < 9; i++)
        zx_device_free(dev, p[i]);
    check_live_is(before);
    void *none;
    CHECK_STATUS(zx_device_alloc(dev, SIZE_MAX, &none), ZX_ERR_NOMEM);
    CHECK_STATUS(zx_device_alloc(dev, zx_device_caps_get(dev)->total_bytes + 1, &none), ZX_ERR_NOMEM);
    CHECK(none == NULL);
    zx_mem *mem;
    size_t too_many = (zx_device_caps_get(dev)->total_bytes / PAGE + 1) * PAGE;
    CHECK_STATUS(zx_mem_open(dev, too_many, false, &mem), ZX_ERR_NOMEM);
    zx_device_close(dev);
}

static void test_export_and_import_check(void)
{
    zx_device *dev = open_cpu(1), *other = open_cpu(1);
    zx_mem *kept, *shared, *imported;
    char *a, *b;
    int fd, ends[2];
    CHECK_OR_RETURN(dev != NULL && other != NULL);
    CHECK_OK(zx_mem_open(dev, 2 * PAGE, false, &kept));
    CHECK_STATUS(zx_mem_export(kept, &fd), ZX_ERR_STATE);
    CHECK_EQ_I64(fd, -1);
    CHECK_OK(zx_mem_open(dev, 2 * PAGE, true, &shared));
    CHECK_OK(zx_mem_export(shared, &fd));
    CHECK(ftruncate(fd, 0) != 0 && errno == EPERM); /* sealed */
    CHECK_STATUS(zx_mem_import(other, fd, 3 * PAGE, &imported), ZX_ERR_ARG);
    CHECK_ERROR_HAS("8192");
    CHECK(imported == NULL);
    CHECK_STATUS(zx_mem_import(other, -1, PAGE, &imported), ZX_ERR_SYSTEM);
    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    CHECK_STATUS(zx_mem_import(other, ends[0], PAGE, &imported), ZX_ERR_ARG);
    close(ends[0]);
    close(ends[1]);
    int plain = memfd_create("plain", MFD_CLOEXEC);
    CHECK(plain >= 0 && ftruncate(plain, PAGE) == 0);
    CHECK_STATUS(zx_mem_import(other, plain, PAGE, &imported), ZX_ERR_ARG); /* its owner could shrink it */
    close(plain);
    int64_t bytes = zx_mem_get(ZX_MEM_DEVICE).live_bytes;
    CHECK_OK(zx_mem_import(other, fd, 2 * PAGE, &imported));
    close(fd);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_DEVICE).live_bytes, bytes); /* the bytes are the exporter's */
    CHECK_OK(zx_device_reserve(dev, 2 * PAGE, (void **)&a));
    CHECK_OK(zx_device_reserve(other, 2 * PAGE, (void **)&b));
    CHECK_OK(zx_device_map(dev, a, shared, 0, 2 * PAGE));
    CHECK_OK(zx_device_map(other, b, imported, 0, 2 * PAGE));
    zx_mem_close(shared);
    a[PAGE] = 9;
    CHECK(b[PAGE] == 9);
    zx_device_unreserve(dev, a, 2 * PAGE);
    b[0] = 3; /* the importer's mapping outlives the exporter's */
    CHECK(b[PAGE] == 9);
    zx_device_unreserve(other, b, 2 * PAGE);
    zx_mem_close(imported);
    zx_mem_close(kept);
    zx_device_close(dev);
    zx_device_close(other);
}

/* ---- copies and fills ---- */

static void test_copies_and_fills(void)
{
    static const size_t sizes[] = {0, 1, 4095, 1048575, 1048576, 1048577, 1234567, 3000000};
    for (int n_threads = 1; n_threads <= 3; n_threads++) {
        zx_device *dev = open_cpu(n_threads);
        zx_stream *s;
        unsigned char *a, *b;
        CHECK_OR_RETURN(dev != NULL);
        CHECK_OK(zx_stream_open(dev, "compute", &s));
        CHECK_OK(zx_device_alloc(dev, 3000256, (void **)&a));
        CHECK_OK(zx_device_alloc(dev, 3000256, (void **)&b));
        for (int i = 0; i < 8; i++) {
            size_t n = sizes[i];
            for (size_t j = 0; j < n; j++)
                a[j] = (unsigned char)(j * 31 + j / 4096);
            CHECK_OK(zx_stream_fill(s, b, 0xab, 3000256));
            CHECK_OK(zx_stream_copy(s, b + 64, a, n));
            CHECK_OK(zx_stream_sync(s));
            CHECK(memcmp(b + 64, a, n) == 0);
            CHECK(b[63] == 0xab && b[64 + n] == 0xab);
            CHECK_OK(zx_stream_fill(s, b + 1, 5, n));
            int64_t n_wrong = b[0] != 0xab;
            for (size_t j = 1; j <= n; j++)
                n_wrong += b[j] != 5;
            CHECK_EQ_I64(n_wrong, 0);
        }
        CHECK_OK(zx_stream_copy(s, a, a, 100));
        CHECK_STATUS(zx_stream_copy(s, a + 10, a, 100), ZX_ERR_ARG);
        CHECK_STATUS(zx_stream_copy(s, a, a + 10, 100), ZX_ERR_ARG);
        CHECK_ERROR_HAS("overlap");
        CHECK_OK(zx_stream_copy(s, a, a + 100, 100));
        CHECK_STATUS(zx_stream_copy(s, NULL, a, 1), ZX_ERR_ARG);
        CHECK_STATUS(zx_stream_fill(s, NULL, 0, 1), ZX_ERR_ARG);
        CHECK_OK(zx_stream_copy(s, NULL, NULL, 0));
        zx_device_free(dev, a);
        zx_device_free(dev, b);
        zx_stream_close(s);
        zx_device_close(dev);
    }
}

/* ---- launches and scratch ---- */

static zx_fill_args fill_args(float *out, int64_t n, double value)
{
    return (zx_fill_args){.out = zx_view_1d(out, ZX_F32, n), .value = value};
}

static void test_launch_checks_and_hands_out(void)
{
    zx_device *dev = open_cpu(2);
    zx_stream *s;
    float x[100] = {0};
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "compute", &s));
    zx_fill_args args = fill_args(x, 100, 2.5);
    CHECK_OK(ZX_LAUNCH(s, fill, &args));
    CHECK(x[0] == 2.5f && x[99] == 2.5f);
    CHECK_EQ_I64(zx_pool_n_threads(g_seen.exec.pool), 2);
    CHECK(g_seen.exec.gemm == NULL && g_seen.exec.stream == NULL);
    CHECK(g_seen.exec.scratch != NULL && (uintptr_t)g_seen.exec.scratch % 256 == 0);
    CHECK(g_seen.exec.scratch_bytes >= 200);
    CHECK_STATUS(zx_device_launch(s, ZX_OP_fill, &args, sizeof args - 1), ZX_ERR_BUG);
    CHECK_STATUS(zx_device_launch(s, ZX_OP_fill, NULL, sizeof args), ZX_ERR_BUG);
    CHECK_STATUS(zx_device_launch(s, ZX_N_OPS, &args, sizeof args), ZX_ERR_BUG);
    zx_gelu_fwd_args gelu = {0};
    CHECK_STATUS(ZX_LAUNCH(s, gelu_fwd, &gelu), ZX_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("gelu_fwd");
    CHECK_ERROR_HAS("cpu");
    args.value = -1;
    CHECK_STATUS(ZX_LAUNCH(s, fill, &args), ZX_ERR_ARG);
    CHECK_ERROR_HAS("-1");
    zx_stream_close(s);
    zx_device_close(dev);
}

static void test_scratch_grows_then_is_strict(void)
{
    zx_device *dev = open_cpu(2);
    zx_stream *s, *later;
    float x[100] = {0};
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "compute", &s));
    zx_fill_args small = fill_args(x, 10, 1), large = fill_args(x, 100, 2);
    CHECK_EQ_I64(zx_device_scratch_bytes(dev, ZX_OP_fill, &large), 200);
    CHECK_EQ_I64(zx_device_scratch_bytes(dev, ZX_OP_scale, &large), 0);
    CHECK_OK(ZX_LAUNCH(s, fill, &small));
    CHECK_EQ_I64(g_seen.exec.scratch_bytes, 20);
    CHECK_OK(ZX_LAUNCH(s, fill, &large));
    CHECK_EQ_I64(g_seen.exec.scratch_bytes, 200);
    CHECK_OK(zx_device_set_scratch(dev, 64));
    CHECK_OK(zx_stream_open(dev, "later", &later));
    CHECK_STATUS(ZX_LAUNCH(s, fill, &large), ZX_ERR_STATE);
    CHECK_ERROR_HAS("200");
    CHECK_ERROR_HAS("64");
    int64_t n_allocs = zx_mem_get(ZX_MEM_DEVICE).n_allocs;
    CHECK_OK(ZX_LAUNCH(s, fill, &small));
    CHECK_EQ_I64(g_seen.exec.scratch_bytes, 64);
    CHECK_OK(ZX_LAUNCH(later, fill, &small));
    CHECK_EQ_I64(g_seen.exec.scratch_bytes, 64);
    CHECK_EQ_I64(zx_mem_get(ZX_MEM_DEVICE).n_allocs, n_allocs); /* a planned step allocates nothing */
    CHECK_OK(zx_device_set_scratch(dev, SIZE_MAX));
    CHECK_OK(ZX_LAUNCH(s, fill, &large));
    CHECK_OK(zx_stream_set_scratch(later, 64)); /* a bound of one stream */
    CHECK_STATUS(ZX_LAUNCH(later, fill, &large), ZX_ERR_STATE);
    CHECK_OK(ZX_LAUNCH(s, fill, &large));
    CHECK_OK(zx_device_set_scratch(dev, 0));
    CHECK_STATUS(ZX_LAUNCH(s, fill, &small), ZX_ERR_STATE);
    zx_stream_close(later);
    zx_stream_close(s);
    zx_device_close(dev);
}

static zx_status add_one(void *arg)
{
    ++*(int *)arg;
    return ZX_OK;
}

static zx_status always_fails(void *arg)
{
    (void)arg;
    ZX_FAIL(ZX_ERR_PEER, "rank 7 went away");
}

static void test_calls_events_and_names(void)
{
    zx_device *dev = open_cpu(1), *other = open_cpu(1);
    zx_stream *s;
    zx_event *event, *foreign;
    int n = 0;
    CHECK_OR_RETURN(dev != NULL && other != NULL);
    CHECK_OK(zx_stream_open(dev, "a name that is much longer than a stream keeps", &s));
    CHECK_EQ_I64(strlen(zx_stream_name(s)), 31);
    CHECK(zx_stream_device(s) == dev);
    CHECK_OK(zx_stream_call(s, "one", add_one, &n));
    CHECK_EQ_I64(n, 1);
    CHECK_STATUS(zx_stream_call(s, "two", always_fails, NULL), ZX_ERR_PEER);
    CHECK_ERROR_HAS("rank 7");
    CHECK_STATUS(zx_stream_call(s, "three", NULL, NULL), ZX_ERR_ARG);
    CHECK_OK(zx_stream_sync(s));
    CHECK_OK(zx_event_open(dev, &event));
    CHECK_OK(zx_event_open(other, &foreign));
    CHECK_OK(zx_stream_wait_event(s, event));
    CHECK_OK(zx_event_record(event, s));
    CHECK_OK(zx_stream_wait_event(s, event));
    CHECK_STATUS(zx_event_record(foreign, s), ZX_ERR_ARG);
    CHECK_STATUS(zx_stream_wait_event(s, NULL), ZX_ERR_ARG);
    CHECK(!zx_device_interrupted(dev));
    CHECK(!zx_device_interrupted(NULL));
    zx_event_close(event);
    zx_event_close(foreign);
    zx_event_close(NULL);
    zx_stream_close(s);
    zx_stream_close(NULL);
    zx_device_close(other);
    zx_device_close(dev);
}

static void test_timeline_shows_work(void)
{
    zx_device *dev = open_cpu(1);
    zx_stream *s;
    zx_event_rec e[8];
    float x[64];
    int n = 0;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "comm", &s));
    CHECK_OK(zx_timeline_enable(8));
    zx_fill_args args = fill_args(x, 64, 1);
    CHECK_OK(zx_stream_fill(s, x, 0, 128));
    CHECK_OK(ZX_LAUNCH(s, fill, &args));
    CHECK_OK(zx_stream_call(s, "exchange", add_one, &n));
    CHECK_EQ_I64(zx_timeline_read(e, 8), 3);
    CHECK(strcmp(e[0].name, "fill") == 0 && strcmp(e[2].name, "exchange") == 0);
    CHECK_EQ_I64(e[0].bytes, 128);
    CHECK_EQ_I64(e[1].bytes, 256);
    for (int i = 0; i < 3; i++)
        CHECK(e[i].lane == 1 && e[i].end_ns >= e[i].begin_ns);
    CHECK_OK(zx_timeline_enable(0));
    zx_stream_close(s);
    zx_device_close(dev);
}

/* ---- opening ---- */

static void test_open_refuses_what_is_wrong(void)
{
    zx_device *dev;
    zx_device_config config = {.kind = ZX_DEVICE_CUDA};
    live before = live_now();
    CHECK_STATUS(zx_device_open(&config, &dev), ZX_ERR_UNSUPPORTED);
    CHECK(dev == NULL);
    config.kind = (zx_device_kind)77;
    CHECK_STATUS(zx_device_open(&config, &dev), ZX_ERR_ARG);
    CHECK_STATUS(zx_device_open(NULL, &dev), ZX_ERR_ARG);
    config = (zx_device_config){.kind = ZX_DEVICE_CPU, .n_threads = -3};
    CHECK_STATUS(zx_device_open(&config, &dev), ZX_ERR_ARG);
    config = (zx_device_config){.kind = ZX_DEVICE_CPU, .blas_path = "/nowhere/libblas.so"};
    CHECK_STATUS(zx_device_open(&config, &dev), ZX_ERR_SYSTEM);
    CHECK_ERROR_HAS("/nowhere/libblas.so");
    CHECK_ERROR_HAS("No such file");
    check_live_is(before);
    zx_device_close(NULL);
}

static void test_isa_is_limited_by_the_environment(void)
{
    static const zx_device_config config = {.kind = ZX_DEVICE_CPU};
    zx_device *dev;
    setenv("ZEROX_ISA", "plain", 1);
    CHECK_OK(zx_device_open(&config, &dev));
    CHECK_EQ_I64(dev->isa, ZX_ISA_PLAIN);
    zx_device_close(dev);
    setenv("ZEROX_ISA", "sse9", 1);
    CHECK_STATUS(zx_device_open(&config, &dev), ZX_ERR_ARG);
    CHECK_ERROR_HAS("sse9");
    setenv("ZEROX_ISA", "avx2", 1);
    zx_status want = zx_isa_detect() >= ZX_ISA_AVX2 ? ZX_OK : ZX_ERR_UNSUPPORTED;
    CHECK_STATUS(zx_device_open(&config, &dev), want);
    zx_device_close(dev);
    unsetenv("ZEROX_ISA");
    CHECK_OK(zx_device_open(&config, &dev));
    CHECK_EQ_I64(dev->isa, zx_isa_detect());
    zx_device_close(dev);
}

static void test_caps(void)
{
    static const char *const names[] = {"cpu", "ref", "null"};
    for (int k = ZX_DEVICE_CPU; k <= ZX_DEVICE_NULL; k++) {
        zx_device *dev = open_device((zx_device_kind)k, 0, 0);
        CHECK_OR_RETURN(dev != NULL);
        const zx_device_caps *caps = zx_device_caps_get(dev);
        CHECK(strcmp(caps->name, names[k]) == 0);
        CHECK_EQ_I64(caps->alignment, 256);
        CHECK_EQ_I64(caps->granule % 4096, 0);
        CHECK_EQ_I64(caps->n_threads, 1);
        CHECK_EQ_I64(caps->computes, k != ZX_DEVICE_NULL);
        CHECK_EQ_I64(caps->exports, k != ZX_DEVICE_NULL);
        CHECK(caps->total_bytes > (size_t)64 << 20);
        zx_device_close(dev);
    }
}

/* ---- mistakes that only the log can report ---- */

/* What fn writes to stderr. */
static void captured(void (*fn)(void), char *out, size_t out_bytes)
{
    int ends[2];
    out[0] = '\0';
    CHECK_OR_RETURN(CHECK(pipe2(ends, O_CLOEXEC) == 0));
    int saved = dup(STDERR_FILENO);
    dup2(ends[1], STDERR_FILENO);
    fn();
    dup2(saved, STDERR_FILENO);
    close(saved);
    close(ends[1]);
    ssize_t n = read(ends[0], out, out_bytes - 1);
    out[n < 0 ? 0 : n] = '\0';
    close(ends[0]);
}

static void makes_mistakes(void)
{
    zx_device *dev = open_cpu(1);
    zx_event *event;
    _Alignas(64) char foreign[1024] = {0};
    void *base, *block;
    CHECK_OK(zx_event_open(dev, &event));
    CHECK_OK(zx_device_reserve(dev, 2 * PAGE, &base));
    CHECK_OK(zx_device_alloc(dev, 10, &block));
    zx_device_unreserve(dev, base, PAGE);
    zx_device_unreserve(dev, foreign, PAGE);
    zx_device_free(dev, foreign + 512);
    zx_device_close(dev); /* an event, a reservation and an allocation are left */
    zx_cpu_unreserve(NULL, base, 2 * PAGE);
    zx_cpu_free(NULL, block);
    zx_free(event);
}

static void test_mistakes_are_logged(void)
{
    char text[4096];
    live before = live_now();
    captured(makes_mistakes, text, sizeof text);
    CHECK(strstr(text, "no such reservation") != NULL);
    CHECK(strstr(text, "not an allocation") != NULL);
    CHECK(strstr(text, "0 streams, 1 events, 0 memory objects, 1 allocations and 1 reservations") != NULL);
    check_live_is(before);
}

/* ---- everything that a device can hold, for the sweeps ---- */

typedef struct everything {
    zx_device *dev;
    zx_stream *streams[2];
    zx_event *event;
    char *base;
    zx_mem *mem, *imported;
    void *block;
    int fd;
} everything;

static zx_status open_everything(everything *e, zx_device_kind kind, uint64_t seed)
{
    zx_device_config config = {.kind = kind, .n_threads = 2, .delay_seed = seed};
    *e = (everything){.fd = -1};
    ZX_TRY(zx_device_open(&config, &e->dev));
    ZX_TRY(zx_stream_open(e->dev, "compute", &e->streams[0]));
    ZX_TRY(zx_device_set_scratch(e->dev, 1000));
    ZX_TRY(zx_stream_open(e->dev, "comm", &e->streams[1]));
    ZX_TRY(zx_event_open(e->dev, &e->event));
    ZX_TRY(zx_device_reserve(e->dev, 8 * PAGE, (void **)&e->base));
    ZX_TRY(zx_mem_open(e->dev, 2 * PAGE, true, &e->mem));
    ZX_TRY(zx_device_map(e->dev, e->base, e->mem, 0, 2 * PAGE));
    ZX_TRY(zx_device_map(e->dev, e->base + 2 * PAGE, e->mem, 0, 2 * PAGE));
    ZX_TRY(zx_device_alloc(e->dev, 300000, &e->block));
    ZX_TRY(zx_stream_fill(e->streams[0], e->base, 1, 2 * PAGE));
    ZX_TRY(zx_event_record(e->event, e->streams[0]));
    ZX_TRY(zx_stream_wait_event(e->streams[1], e->event));
    ZX_TRY(zx_stream_copy(e->streams[1], e->block, e->base + 2 * PAGE, 2 * PAGE));
    ZX_TRY(zx_stream_sync(e->streams[1]));
    if (kind == ZX_DEVICE_NULL) return ZX_OK;
    ZX_TRY(zx_mem_export(e->mem, &e->fd));
    ZX_TRY(zx_mem_import(e->dev, e->fd, 2 * PAGE, &e->imported));
    ZX_TRY(zx_device_map(e->dev, e->base + 4 * PAGE, e->imported, 0, 2 * PAGE));
    ZX_TRY(zx_device_unmap(e->dev, e->base + 2 * PAGE, 2 * PAGE));
    return ZX_OK;
}

static void close_everything(everything *e)
{
    if (e->fd >= 0) close(e->fd);
    zx_event_close(e->event);
    zx_stream_close(e->streams[1]);
    zx_stream_close(e->streams[0]);
    if (e->block != NULL) zx_device_free(e->dev, e->block);
    zx_mem_close(e->imported);
    zx_mem_close(e->mem);
    if (e->base != NULL) zx_device_unreserve(e->dev, e->base, 8 * PAGE);
    zx_device_close(e->dev);
}

static int n_open_descriptors(void)
{
    int n = 0;
    for (int fd = 0; fd < 256; fd++)
        n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

/* Fails the 1st, 2nd, ... fallible primitive of a device's whole life; each must surface and leave nothing. */
static void sweep(zx_device_kind kind, uint64_t seed, int64_t n_least)
{
    live before = live_now();
    int n_fds = n_open_descriptors();
    int64_t n = 1;
    for (;; n++) {
        everything e;
        zx_fault_arm(n);
        zx_status status = open_everything(&e, kind, seed);
        bool fired = zx_fault_passed() >= n;
        zx_fault_arm(0);
        CHECK_EQ_I64(status != ZX_OK, fired);
        if (status != ZX_OK) CHECK_ERROR_HAS("injected");
        close_everything(&e);
        if (!check_live_is(before) || !CHECK_EQ_I64(n_open_descriptors(), n_fds)) return;
        if (!fired) break;
    }
    CHECK(n - 1 >= n_least);
}

static void test_every_fault_is_survived(void)
{
    sweep(ZX_DEVICE_CPU, 0, 18);
    sweep(ZX_DEVICE_CPU, 5, 24);
    sweep(ZX_DEVICE_NULL, 0, 10);
}

static void test_a_thousand_lives_leave_nothing(void)
{
    live before = live_now();
    int n_fds = n_open_descriptors();
    for (int i = 0; i < 1000; i++) {
        static const zx_device_kind kinds[] = {ZX_DEVICE_CPU, ZX_DEVICE_CPU, ZX_DEVICE_REF, ZX_DEVICE_NULL};
        everything e;
        zx_status status = open_everything(&e, kinds[i % 4], i % 4 == 1 ? (uint64_t)i : 0);
        close_everything(&e);
        CHECK_OR_RETURN(CHECK_OK(status));
    }
    check_live_is(before);
    CHECK_EQ_I64(n_open_descriptors(), n_fds);
}

int main(void)
{
    unsetenv("ZEROX_ISA");
    RUN(test_addresses_alias_one_slot);
    RUN(test_object_lives_until_its_last_mapping);
    RUN(test_map_refuses_what_is_wrong);
    RUN(test_nothing_is_a_size_too);
    RUN(test_alloc_is_zeroed_and_aligned);
    RUN(test_export_and_import_check);
    RUN(test_copies_and_fills);
    RUN(test_launch_checks_and_hands_out);
    RUN(test_scratch_grows_then_is_strict);
    RUN(test_calls_events_and_names);
    RUN(test_timeline_shows_work);
    RUN(test_open_refuses_what_is_wrong);
    RUN(test_isa_is_limited_by_the_environment);
    RUN(test_caps);
    RUN(test_mistakes_are_logged);
    RUN(test_every_fault_is_survived);
    RUN(test_a_thousand_lives_leave_nothing);
    return check_report();
}
