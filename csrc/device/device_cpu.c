/* device_cpu.c - the cpu and ref devices: streams that run inline, on the caller's thread with the device's
 * pool. */
#include "device/internal.h"

#include <string.h>
#include <unistd.h>

enum { SPIN_START_NS = 20000 };
/* Copies and fills are cut for the pool in pieces that are large beside the cost of handing one out. */
enum { PIECE_BYTES = 256 * 1024, PARALLEL_FROM_BYTES = 1024 * 1024 };

typedef struct bulk {
    char *dst;
    const char *src; /* NULL: fill */
    int byte;
    size_t bytes;
} bulk;

static void bulk_range(const bulk *b, size_t begin, size_t bytes)
{
    if (b->src != NULL)
        memcpy(b->dst + begin, b->src + begin, bytes);
    else
        memset(b->dst + begin, b->byte, bytes);
}

static void bulk_piece(void *arg, int64_t index, int worker)
{
    (void)worker;
    const bulk *b = arg;
    size_t begin = (size_t)index * PIECE_BYTES, left = b->bytes - begin;
    bulk_range(b, begin, left < PIECE_BYTES ? left : PIECE_BYTES);
}

static void run_bulk(zx_device *dev, bulk b)
{
    if (b.bytes == 0 || b.dst == b.src) return;
    if (dev->pool == NULL || b.bytes < PARALLEL_FROM_BYTES)
        bulk_range(&b, 0, b.bytes);
    else
        zx_pool_run(dev->pool, bulk_piece, &b, zx_ceil_div((int64_t)b.bytes, PIECE_BYTES));
}

void zx_cpu_copy(zx_device *dev, void *dst, const void *src, size_t bytes)
{
    run_bulk(dev, (bulk){.dst = dst, .src = src, .bytes = bytes});
}

static zx_status run_launch(zx_stream *stream, const zx_work *work)
{
    zx_device *dev = stream->dev;
    ZX_TRY(zx_stream_grow_scratch(stream, work->scratch_bytes));
    zx_exec exec = {.pool = dev->pool,
                    .scratch = stream->scratch,
                    .scratch_bytes = stream->scratch_bytes,
                    .gemm = dev->gemm,
                    .isa = dev->isa};
    ZX_TRY(dev->kernels->op[work->op].launch(&exec, work->args));
    return ZX_OK;
}

static zx_status execute(zx_stream *stream, const zx_work *work)
{
    switch (work->kind) {
    case ZX_WORK_COPY:
        zx_cpu_copy(stream->dev, work->dst, work->src, work->bytes);
        break;
    case ZX_WORK_FILL:
        run_bulk(stream->dev, (bulk){.dst = work->dst, .byte = work->byte, .bytes = work->bytes});
        break;
    case ZX_WORK_SIGNAL:
        zx_flag_store(work->flag, work->value);
        break;
    case ZX_WORK_WAIT:
        ZX_TRY(zx_flag_wait(stream->dev, stream->name, work->flag, work->value));
        break;
    case ZX_WORK_CALL:
        ZX_TRY(work->fn(work->arg));
        break;
    case ZX_WORK_LAUNCH:
        ZX_TRY(run_launch(stream, work));
        break;
    case ZX_WORK_RECORD:
    case ZX_WORK_WAIT_EVENT:
        break; /* inline, everything before is done */
    }
    return ZX_OK;
}

zx_status zx_cpu_execute(zx_stream *stream, const zx_work *work)
{
    bool shown = zx_timeline_on() && work->kind != ZX_WORK_RECORD && work->kind != ZX_WORK_WAIT_EVENT;
    if (!shown) return execute(stream, work);
    int64_t begin = zx_now_ns();
    zx_status status = execute(stream, work);
    zx_timeline_add(work->name, stream->lane, begin, zx_now_ns(), (int64_t)work->bytes);
    return status;
}

static zx_status inline_stream_open(zx_stream *stream)
{
    (void)stream;
    return ZX_OK;
}

static void inline_stream_close(zx_stream *stream)
{
    (void)stream;
}

static zx_status inline_stream_sync(zx_stream *stream)
{
    (void)stream;
    return ZX_OK;
}

void zx_cpu_close(zx_device *dev)
{
    zx_pool_close(dev->pool);
}

static const zx_device_ops g_inline_ops = {
    .close = zx_cpu_close,
    .reserve = zx_cpu_reserve,
    .unreserve = zx_cpu_unreserve,
    .mem_open = zx_cpu_mem_open,
    .mem_import = zx_cpu_mem_import,
    .mem_export = zx_cpu_mem_export,
    .mem_close = zx_cpu_mem_close,
    .mem_release = zx_cpu_mem_release,
    .map = zx_cpu_map,
    .unmap = zx_cpu_unmap,
    .alloc = zx_cpu_alloc,
    .free = zx_cpu_free,
    .stream_open = inline_stream_open,
    .stream_close = inline_stream_close,
    .stream_sync = inline_stream_sync,
    .submit = zx_cpu_execute,
    .flag_store = zx_flag_store,
};

static zx_status choose_isa(zx_isa *out)
{
    const char *text = zx_env_text(ZX_ENV_ISA);
    zx_isa has = zx_isa_detect();
    *out = has;
    if (strcmp(text, "auto") == 0) return ZX_OK;
    if (strcmp(text, "plain") == 0) {
        *out = ZX_ISA_PLAIN;
        return ZX_OK;
    }
    *out = strcmp(text, "avx512") == 0 ? ZX_ISA_AVX512 : ZX_ISA_AVX2;
    if (*out == ZX_ISA_AVX2 && strcmp(text, "avx2") != 0)
        ZX_FAIL(ZX_ERR_ARG, "ZEROX_ISA is '%.32s': it must be auto, plain, avx2 or avx512", text);
    if (has < *out) ZX_FAIL(ZX_ERR_UNSUPPORTED, "ZEROX_ISA is %s, but this processor lacks it: use auto", text);
    return ZX_OK;
}

zx_status zx_cpu_init(zx_device *dev, const zx_device_config *config)
{
    int n_threads = config->n_threads == 0 ? 1 : config->n_threads;
    dev->ops = &g_inline_ops;
    dev->kernels = config->kind == ZX_DEVICE_REF ? zx_kernels_ref() : zx_kernels_cpu();
    dev->spin_ns = SPIN_START_NS;
    dev->caps = (zx_device_caps){
        .name = config->kind == ZX_DEVICE_REF ? "ref" : "cpu",
        .granule = (size_t)sysconf(_SC_PAGESIZE),
        .alignment = 256,
        .total_bytes = zx_cpu_total_bytes(),
        .n_threads = n_threads,
        .host_addressable = true,
        .exports = true,
        .computes = true,
    };
    ZX_TRY(choose_isa(&dev->isa));
    ZX_TRY(zx_gemm_open(config->blas_path, &dev->gemm));
    if (n_threads != 1) ZX_TRY(zx_pool_open(n_threads, &dev->pool));
    dev->at_once = config->delay_seed == 0;
    if (!dev->at_once) ZX_TRY(zx_delay_init(dev, config->delay_seed));
    return ZX_OK;
}
