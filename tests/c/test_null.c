/* test_null.c - the null device: records in order, addresses without bytes, a limit. */
#include "device_tools.h"

static zx_status must_not_run(void *arg)
{
    *(bool *)arg = true;
    return ZX_OK;
}

static void test_records_everything_in_order(void)
{
    zx_device *dev = open_device(ZX_DEVICE_NULL, 3, 0);
    zx_stream *compute, *comm;
    zx_event *event;
    float *x;
    uint64_t *flag;
    bool ran = false;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "compute", &compute));
    CHECK_OK(zx_stream_open(dev, "comm", &comm));
    CHECK_OK(zx_event_open(dev, &event));
    CHECK_OK(zx_device_alloc(dev, 4096, (void **)&x));
    CHECK_OK(zx_device_alloc(dev, ZX_FLAG_BYTES, (void **)&flag));
    CHECK_EQ_I64(zx_null_n_records(dev), 0);
    zx_fill_args fill = {.out = zx_view_1d(x, ZX_F32, 100), .value = 1};
    zx_matmul_args matmul = {.a = zx_view_2d(x, ZX_BF16, 3, 5, 5),
                             .b = zx_view_2d(x, ZX_BF16, 5, 7, 7),
                             .c = zx_view_2d(x, ZX_F32, 3, 7, 7)};
    zx_sum_sources_args sum = {.n_src = 4, .src_dtype = ZX_BF16, .out_dtype = ZX_F32, .n = 10};
    zx_sqnorm_args norm = {.x = x, .dtype = ZX_F64, .n = 11};
    CHECK_OK(ZX_LAUNCH(compute, fill, &fill));
    CHECK_OK(ZX_LAUNCH(compute, matmul, &matmul)); /* the table of the test lacks it: nothing runs here */
    CHECK_OK(ZX_LAUNCH(compute, sum_sources, &sum));
    CHECK_OK(ZX_LAUNCH(compute, sqnorm, &norm));
    CHECK_OK(zx_event_record(event, compute));
    CHECK_OK(zx_stream_wait_event(comm, event));
    CHECK_OK(zx_stream_copy(comm, x, x + 512, 1000));
    CHECK_OK(zx_stream_fill(comm, x, 0, 77));
    CHECK_OK(zx_stream_wait(comm, flag, 5)); /* does not wait */
    CHECK_OK(zx_stream_signal(comm, flag, 6));
    CHECK_OK(zx_stream_call(comm, "exchange", must_not_run, &ran));
    CHECK_OK(zx_stream_sync(comm));
    zx_device_flag_store(dev, flag, ZX_FLAG_ABORT);
    CHECK(!ran && !zx_device_interrupted(dev));
    zx_stream_close(comm);
    zx_stream_close(compute);
    static const zx_record want[] = {
        {"fill", "compute", 400},
        {"matmul", "compute", 2 * 15 + 2 * 35 + 4 * 21},
        {"sum_sources", "compute", 4 * 10 * 2 + 40},
        {"sqnorm", "compute", 88},
        {"event", "compute", 0},
        {"wait_event", "comm", 0},
        {"copy", "comm", 1000},
        {"fill", "comm", 77},
        {"wait", "comm", 0},
        {"signal", "comm", 0},
        {"call", "comm", 0},
    };
    const zx_record *got = zx_null_records(dev);
    CHECK_OR_RETURN(CHECK_EQ_I64(zx_null_n_records(dev), 11));
    for (int i = 0; i < 11; i++) {
        CHECK(strcmp(got[i].what, want[i].what) == 0);
        CHECK(strcmp(got[i].stream, want[i].stream) == 0); /* readable after the streams are closed */
        CHECK_EQ_I64(got[i].bytes, want[i].bytes);
    }
    zx_null_clear(dev);
    CHECK_EQ_I64(zx_null_n_records(dev), 0);
    zx_device_free(dev, x);
    zx_device_free(dev, flag);
    zx_event_close(event);
    zx_device_close(dev);
}

static void test_every_operation_has_a_size(void)
{
    zx_device *dev = open_device(ZX_DEVICE_NULL, 1, 0);
    zx_stream *s;
    union {
#define X(op) zx_##op##_args op;
#include "kernels/kernels.def"
#undef X
    } args;
    CHECK_OR_RETURN(dev != NULL);
    CHECK_OK(zx_stream_open(dev, "compute", &s));
    for (int op = 0; op < ZX_N_OPS; op++) {
        memset(&args, 0, sizeof args); /* sizes of 0 and no data */
        CHECK_OK(zx_device_launch(s, (zx_op_id)op, &args, dev->kernels->op[op].args_bytes));
        CHECK_EQ_I64(zx_null_records(dev)[op].bytes, 0);
    }
    zx_stream_close(s);
    zx_device_close(dev);
}

/* A trillion parameters have addresses too, and nobody's memory behind them. */
static void test_addresses_are_distinct_and_empty(void)
{
    zx_device *dev = open_device(ZX_DEVICE_NULL, 1, 0), *again = open_device(ZX_DEVICE_NULL, 1, 0);
    uintptr_t end = 0;
    void *addr, *same;
    CHECK_OR_RETURN(dev != NULL && again != NULL);
    size_t sizes[] = {0, 4096, (size_t)18 << 40, 4096, (size_t)1 << 50};
    for (int i = 0; i < 5; i++) {
        CHECK_OK(zx_device_reserve(dev, sizes[i], &addr));
        CHECK_OK(zx_device_reserve(again, sizes[i], &same));
        CHECK(addr == same); /* traces do not differ from run to run */
        CHECK((uintptr_t)addr >= end && (uintptr_t)addr % 4096 == 0);
        end = (uintptr_t)addr + sizes[i];
        zx_device_unreserve(dev, addr, sizes[i]);
        zx_device_unreserve(again, addr, sizes[i]);
    }
    CHECK_STATUS(zx_device_reserve(dev, (size_t)1 << 62, &addr), ZX_ERR_NOMEM);
    zx_device_close(dev);
    zx_device_close(again);
}

static void test_bytes_are_limited(void)
{
    zx_device_config config = {.kind = ZX_DEVICE_NULL, .null_total_bytes = 100000};
    zx_device *dev;
    zx_mem *mem, *more;
    void *p, *q, *base;
    int fd;
    CHECK_OR_RETURN(CHECK_OK(zx_device_open(&config, &dev)));
    CHECK_EQ_I64(zx_device_caps_get(dev)->total_bytes, 100000);
    CHECK_OK(zx_mem_open(dev, 20 * 4096, true, &mem));
    CHECK_STATUS(zx_mem_export(mem, &fd), ZX_ERR_UNSUPPORTED);
    CHECK_STATUS(zx_mem_import(dev, 0, 4096, &more), ZX_ERR_UNSUPPORTED);
    CHECK_STATUS(zx_mem_open(dev, 5 * 4096, false, &more), ZX_ERR_NOMEM);
    CHECK_ERROR_HAS("18080");
    CHECK_OK(zx_device_reserve(dev, 64 * 4096, &base)); /* addresses are not bytes */
    CHECK_OK(zx_device_map(dev, base, mem, 0, 20 * 4096));
    CHECK_OK(zx_device_map(dev, (char *)base + 20 * 4096, mem, 0, 20 * 4096)); /* aliases cost nothing */
    CHECK_STATUS(zx_device_map(dev, base, mem, 0, 4096), ZX_ERR_STATE);
    CHECK_OK(zx_device_alloc(dev, 18080, &p));
    CHECK_STATUS(zx_device_alloc(dev, 1, &q), ZX_ERR_NOMEM);
    zx_mem_close(mem);
    CHECK_STATUS(zx_device_alloc(dev, 1, &q), ZX_ERR_NOMEM); /* still mapped */
    CHECK_OK(zx_device_unmap(dev, base, 40 * 4096));
    CHECK_OK(zx_device_alloc(dev, 81920, &q));
    CHECK((uintptr_t)q % 256 == 0 && q != p);
    zx_device_free(dev, q);
    zx_device_free(dev, p);
    zx_device_unreserve(dev, base, 64 * 4096);
    zx_device_close(dev);
}

int main(void)
{
    RUN(test_records_everything_in_order);
    RUN(test_every_operation_has_a_size);
    RUN(test_addresses_are_distinct_and_empty);
    RUN(test_bytes_are_limited);
    return check_report();
}
