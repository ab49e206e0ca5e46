/* gelu.c - launchers of gelu_fwd and gelu_bwd on the CPU. */
#include "kernels/gelu.h"
#include "kernels/cut.h"
#include "kernels/launch.h"
#include "kernels/load.h"
#include "kernels/vmath.h"

#define ZX_BODY "kernels/gelu.ref.h"
#include "kernels/instances.h"

typedef struct gelu_job {
    const zx_view *x, *dout, *out; /* out: the result of either direction */
    zx_gelu_fwd_fn fwd;
    zx_gelu_bwd_fn bwd;
    bool accumulate;
    zx_pieces pieces;
    int64_t per_task;
} gelu_job;

static void gelu_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const gelu_job *job = arg;
    const zx_pieces *p = &job->pieces;
    const zx_dtype t = job->x->dtype;
    int64_t end = zx_min64(p->n_pieces, (index + 1) * job->per_task);
    for (int64_t i = index * job->per_task; i < end; i++) {
        int64_t row = i / p->per_row, col = i % p->per_row * p->width, n = zx_min64(p->width, p->n_cols - col);
        const void *x = zx_at(job->x->data, t, row * job->x->stride[0] + col);
        void *out = zx_at(job->out->data, t, row * job->out->stride[0] + col);
        if (job->fwd)
            job->fwd(x, out, n);
        else
            job->bwd(x, zx_at(job->dout->data, t, row * job->dout->stride[0] + col), out, n, job->accumulate);
    }
}

static void run(const zx_exec *exec, gelu_job *job)
{
    bool contiguous = zx_view_2d_contiguous(job->x) && zx_view_2d_contiguous(job->out) &&
                      (!job->dout || zx_view_2d_contiguous(job->dout));
    job->pieces = zx_pieces_cut(job->x->shape[0], job->x->shape[1], contiguous);
    job->per_task = zx_pieces_per_task(&job->pieces);
    zx_pool_run(exec->pool, gelu_task, job, zx_ceil_div(job->pieces.n_pieces, job->per_task));
}

static zx_status check(const char *op, const zx_view *x, const zx_view *dout, const char *out_name, const zx_view *out)
{
    ZX_TRY(zx_check_ndim(op, "x", x, 2));
    ZX_TRY(zx_check_float(op, "x", x->dtype));
    ZX_TRY(zx_check_rows(op, "x", x));
    if (dout) {
        ZX_TRY(zx_check_ndim(op, "dout", dout, 2));
        ZX_TRY(zx_check_same_shape(op, "dout", dout, "x", x));
        ZX_TRY(zx_check_dtype(op, "dout", dout->dtype, x->dtype));
        ZX_TRY(zx_check_rows(op, "dout", dout));
    }
    ZX_TRY(zx_check_out(op, out_name, out));
    ZX_TRY(zx_check_same_shape(op, out_name, out, "x", x));
    ZX_TRY(zx_check_dtype(op, out_name, out->dtype, x->dtype));
    return zx_check_rows(op, out_name, out);
}

static zx_status launch_fwd(const zx_exec *exec, const zx_gelu_fwd_args *a, zx_gelu_fwd_fn fn)
{
    gelu_job job = {.x = &a->x, .out = &a->out, .fwd = fn};
    run(exec, &job);
    return ZX_OK;
}

zx_status zx_gelu_fwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_gelu_fwd_args *a = args;
    ZX_TRY(check("gelu_fwd", &a->x, NULL, "out", &a->out));
    zx_gelu_fwd_fn fn = ZX_PICK_CPU(gelu_fwd, a->x.dtype);
    if (a->x.dtype == ZX_F32) fn = ZX_PICK3(exec, fn, zx_gelu_fwd_f32_avx2, zx_gelu_fwd_f32_avx512);
    if (a->x.dtype == ZX_BF16) fn = ZX_PICK3(exec, fn, zx_gelu_fwd_bf16_avx2, zx_gelu_fwd_bf16_avx512);
    return launch_fwd(exec, a, fn);
}

zx_status zx_gelu_fwd_ref(const zx_exec *exec, const void *args)
{
    const zx_gelu_fwd_args *a = args;
    ZX_TRY(check("gelu_fwd", &a->x, NULL, "out", &a->out));
    return launch_fwd(exec, a, ZX_PICK_REF(gelu_fwd, a->x.dtype));
}

static zx_status launch_bwd(const zx_exec *exec, const zx_gelu_bwd_args *a, zx_gelu_bwd_fn fn)
{
    gelu_job job = {.x = &a->x, .dout = &a->dout, .out = &a->dx, .bwd = fn, .accumulate = a->accumulate};
    run(exec, &job);
    return ZX_OK;
}

zx_status zx_gelu_bwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_gelu_bwd_args *a = args;
    ZX_TRY(check("gelu_bwd", &a->x, &a->dout, "dx", &a->dx));
    zx_gelu_bwd_fn fn = ZX_PICK_CPU(gelu_bwd, a->x.dtype);
    if (a->x.dtype == ZX_F32) fn = ZX_PICK3(exec, fn, zx_gelu_bwd_f32_avx2, zx_gelu_bwd_f32_avx512);
    if (a->x.dtype == ZX_BF16) fn = ZX_PICK3(exec, fn, zx_gelu_bwd_bf16_avx2, zx_gelu_bwd_bf16_avx512);
    return launch_bwd(exec, a, fn);
}

zx_status zx_gelu_bwd_ref(const zx_exec *exec, const void *args)
{
    const zx_gelu_bwd_args *a = args;
    ZX_TRY(check("gelu_bwd", &a->x, &a->dout, "dx", &a->dx));
    return launch_bwd(exec, a, ZX_PICK_REF(gelu_bwd, a->x.dtype));
}
