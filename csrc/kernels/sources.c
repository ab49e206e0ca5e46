/* sources.c - sum_sources: the reduction that communicators are made of. */
#include "kernels/sources.h"

#include "kernels/launch.h"
#include "kernels/stream.h"

#define ISA plain
#define REAL float
#include "kernels/sources.ref.h"
#undef REAL
#define REAL double
#include "kernels/sources.ref.h"
#undef REAL

/* Integers wrap around, as unsigned numbers do. A block of sums stays in the first-level cache. */
#define SUM_INTEGERS(type)                                                                                             \
    do {                                                                                                               \
        enum { BLOCK = 1024 };                                                                                         \
        type sum[BLOCK];                                                                                               \
        for (int64_t at = begin; at < begin + n; at += BLOCK) {                                                        \
            int64_t count = zx_min64(begin + n - at, BLOCK);                                                           \
            type *out = (type *)args->out + at;                                                                        \
            memset(sum, 0, sizeof sum);                                                                                \
            for (int s = 0; s < args->n_src; s++)                                                                      \
                for (int64_t i = 0; i < count; i++)                                                                    \
                    sum[i] += ((const type *)args->src[s])[at + i];                                                    \
            if (args->accumulate)                                                                                      \
                for (int64_t i = 0; i < count; i++)                                                                    \
                    sum[i] += out[i];                                                                                  \
            memcpy(out, sum, (size_t)count * sizeof(type));                                                            \
        }                                                                                                              \
    } while (0)

static void sum_i32(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    SUM_INTEGERS(uint32_t);
}

static void sum_i64(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    SUM_INTEGERS(uint64_t);
}

enum { SOURCES_TASK = 32768 };

typedef struct sources_job {
    const zx_sum_sources_args *args;
    zx_sources_fn fn;
} sources_job;

static void sources_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const sources_job *job = arg;
    int64_t begin = index * SOURCES_TASK;
    job->fn(job->args, begin, zx_min64(SOURCES_TASK, job->args->n - begin));
}

static bool out_is_source(const zx_sum_sources_args *args)
{
    for (int s = 0; s < args->n_src; s++)
        if (args->src[s] == args->out) return true;
    return false;
}

static zx_sources_fn pick(const zx_exec *exec, bool ref, const zx_sum_sources_args *args)
{
    if (args->src_dtype == ZX_I32) return sum_i32;
    if (args->src_dtype == ZX_I64) return sum_i64;
    if (ref || args->src_dtype == ZX_F64 || args->out_dtype == ZX_F64) return zx_sources_double_plain;
#if defined(__x86_64__)
    if (exec->isa >= ZX_ISA_AVX2 && args->n_src > 0) {
        int64_t out_bytes = args->n * (int64_t)zx_dtype_bytes(args->out_dtype);
        bool stream = !args->accumulate && !out_is_source(args) && out_bytes >= ZX_STREAM_BYTES;
        return stream ? zx_sources_stream_avx2 : zx_sources_registers_avx2;
    }
#endif
    return ZX_PICK(exec, zx_sources_float_plain, zx_sources_float_avx2);
}

static zx_status sum_sources(const zx_exec *exec, bool ref, const zx_sum_sources_args *args)
{
    if (args->n_src < 0 || args->n_src > ZX_MAX_SOURCES)
        ZX_FAIL(ZX_ERR_ARG, "sum_sources: n_src is %d, it must be 0 to %d", (int)args->n_src, ZX_MAX_SOURCES);
    if (args->src_dtype == ZX_I32 || args->src_dtype == ZX_I64) {
        ZX_TRY(zx_check_dtype("sum_sources", "out", args->out_dtype, args->src_dtype));
    } else {
        ZX_TRY(zx_check_float("sum_sources", "src", args->src_dtype));
        ZX_TRY(zx_check_float("sum_sources", "out", args->out_dtype));
    }
    ZX_TRY(zx_check_flat("sum_sources", "out", args->out, args->n));
    for (int s = 0; s < args->n_src; s++)
        ZX_TRY(zx_check_flat("sum_sources", "src", args->src[s], args->n));
    if (out_is_source(args) && args->src_dtype != args->out_dtype)
        ZX_FAIL(ZX_ERR_ARG, "sum_sources: out is a source but %s, the sources are %s; give out a place of its own",
                zx_dtype_name(args->out_dtype), zx_dtype_name(args->src_dtype));
    sources_job job = {args, pick(exec, ref, args)};
    zx_pool_run(exec->pool, sources_task, &job, zx_ceil_div(args->n, SOURCES_TASK));
    return ZX_OK;
}

zx_status zx_sum_sources_cpu(const zx_exec *exec, const void *args)
{
    return sum_sources(exec, false, args);
}
zx_status zx_sum_sources_ref(const zx_exec *exec, const void *args)
{
    return sum_sources(exec, true, args);
}
