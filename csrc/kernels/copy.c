/* copy.c - cast (conversion or strided copy) and fill. The same in every table: nothing is computed, only
 * rounded. */
#include <inttypes.h>
#include <math.h>

#include "kernels/elementwise.h"
#include "kernels/launch.h"
#include "kernels/rows.h"
#include "kernels/stream.h"

/* Whether an output of this view goes past the caches. */
static bool streams(const zx_exec *exec, const zx_view *out)
{
#if defined(__x86_64__)
    return exec->isa >= ZX_ISA_AVX2 && zx_view_numel(out) >= ZX_STREAM_BYTES / (int64_t)zx_dtype_bytes(out->dtype);
#else
    (void)exec, (void)out;
    return false;
#endif
}

/* A streamed piece costs a fence: short rows are not worth it. */
enum { STREAM_MIN_ROW = 4096 };

/* ---- cast --------------------------------------------------------------------------------------------- */

#define COPY_STRIDED(type)                                                                                             \
    do {                                                                                                               \
        type *to = (type *)(void *)p[0];                                                                               \
        const type *from = (const type *)(const void *)p[1];                                                           \
        for (int64_t i = 0; i < n; i++)                                                                                \
            to[i * stride[0]] = from[i * stride[1]];                                                                   \
    } while (0)

typedef struct copy_job {
    size_t elem_bytes;
    bool streams;
} copy_job;

/* Elements of one size, bit for bit. */
static void copy_row(const void *arg, char *const *p, const int64_t *stride, int64_t n)
{
    const copy_job *job = arg;
    size_t bytes = (size_t)n * job->elem_bytes;
    if (stride[0] == 1 && stride[1] == 1) {
#if defined(__x86_64__)
        if (job->streams && bytes >= STREAM_MIN_ROW) {
            zx_stream_copy_avx2(p[0], p[1], bytes);
            return;
        }
#endif
        memcpy(p[0], p[1], bytes);
        return;
    }
    switch (job->elem_bytes) {
    case 1:
        COPY_STRIDED(uint8_t);
        break;
    case 2:
        COPY_STRIDED(uint16_t);
        break;
    case 4:
        COPY_STRIDED(uint32_t);
        break;
    default:
        COPY_STRIDED(uint64_t);
    }
}

zx_status zx_cast_cpu(const zx_exec *exec, const void *args_)
{
    const zx_cast_args *args = args_;
    const zx_view *views[2] = {&args->out, &args->a};
    ZX_TRY(zx_check_out("cast", "out", &args->out));
    ZX_TRY(zx_check_view("cast", "a", &args->a));
    ZX_TRY(zx_check_same_shape("cast", "a", &args->a, "out", &args->out));
    zx_walk walk;
    zx_walk_init(&walk, views, 2, false);
    if (args->a.dtype == args->out.dtype) {
        copy_job copy = {zx_dtype_bytes(args->a.dtype), streams(exec, &args->out)};
        zx_walk_run(&walk, exec->pool, copy_row, &copy);
        return ZX_OK;
    }
    ZX_TRY(zx_check_float("cast", "a", args->a.dtype));
    ZX_TRY(zx_check_float("cast", "out", args->out.dtype));
    zx_ew_job job = {.op = ZX_EW_COPY, .dtype = {args->out.dtype, args->a.dtype}};
    bool wide = args->a.dtype == ZX_F64 || args->out.dtype == ZX_F64;
    zx_walk_fn fn = wide ? zx_ew_double_plain : ZX_PICK(exec, zx_ew_float_plain, zx_ew_float_avx2);
    zx_walk_run(&walk, exec->pool, fn, &job);
    return ZX_OK;
}

zx_status zx_cast_ref(const zx_exec *exec, const void *args)
{
    return zx_cast_cpu(exec, args);
}

/* ---- fill --------------------------------------------------------------------------------------------- */

typedef struct fill_job {
    size_t elem_bytes;
    bool streams;
    uint64_t bits; /* the element, repeated */
} fill_job;

#define FILL(type)                                                                                                     \
    do {                                                                                                               \
        type *to = (type *)(void *)p[0];                                                                               \
        type value = (type)job->bits;                                                                                  \
        if (stride[0] == 1)                                                                                            \
            for (int64_t i = 0; i < n; i++)                                                                            \
                to[i] = value;                                                                                         \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++)                                                                            \
                to[i * stride[0]] = value;                                                                             \
    } while (0)

static void fill_row(const void *arg, char *const *p, const int64_t *stride, int64_t n)
{
    const fill_job *job = arg;
#if defined(__x86_64__)
    if (job->streams && stride[0] == 1 && (size_t)n * job->elem_bytes >= STREAM_MIN_ROW) {
        zx_stream_fill_avx2(p[0], job->bits, (size_t)n * job->elem_bytes);
        return;
    }
#endif
    switch (job->elem_bytes) {
    case 1:
        FILL(uint8_t);
        break;
    case 2:
        FILL(uint16_t);
        break;
    case 4:
        FILL(uint32_t);
        break;
    default:
        FILL(uint64_t);
    }
}

/* Whole numbers within the range of t; INT64_MAX itself is no double. */
static zx_status integer_bits(zx_dtype t, double value, uint64_t *out)
{
    *out = 0;
    double lo = t == ZX_U8 ? 0.0 : t == ZX_I32 ? INT32_MIN : -0x1p63;
    double hi = t == ZX_U8 ? 255.0 : t == ZX_I32 ? INT32_MAX : 0x1p63 - 1024;
    if (!(value >= lo && value <= hi) || value != floor(value))
        ZX_FAIL(ZX_ERR_ARG, "fill: %.17g is no %s; give a whole number in its range", value, zx_dtype_name(t));
    int64_t whole = (int64_t)value;
    memcpy(out, &whole, zx_dtype_bytes(t));
    return ZX_OK;
}

zx_status zx_fill_cpu(const zx_exec *exec, const void *args_)
{
    const zx_fill_args *args = args_;
    const zx_view *views[1] = {&args->out};
    ZX_TRY(zx_check_out("fill", "out", &args->out));
    zx_dtype t = args->out.dtype;
    fill_job job = {.elem_bytes = zx_dtype_bytes(t), .streams = streams(exec, &args->out)};
    if (t == ZX_I32 || t == ZX_I64 || t == ZX_U8) {
        ZX_TRY(integer_bits(t, args->value, &job.bits));
    } else {
        zx_ew_job convert = {.op = ZX_EW_COPY, .dtype = {t, ZX_F64}};
        double value = args->value;
        char *p[2] = {(char *)&job.bits, (char *)&value};
        int64_t stride[2] = {1, 1};
        ZX_TRY(zx_check_float("fill", "out", t));
        zx_ew_double_plain(&convert, p, stride, 1);
    }
    for (size_t filled = job.elem_bytes; filled < sizeof job.bits; filled *= 2)
        job.bits |= job.bits << (8 * filled);
    zx_walk walk;
    zx_walk_init(&walk, views, 1, false);
    zx_walk_run(&walk, exec->pool, fill_row, &job);
    return ZX_OK;
}

zx_status zx_fill_ref(const zx_exec *exec, const void *args)
{
    return zx_fill_cpu(exec, args);
}
