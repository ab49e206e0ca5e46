/* xent.c - launchers of xent_fwd and xent_bwd on the CPU.
 *
 * Rows are independent tasks. The total is summed afterwards by one thread in row order, in double, from the rows'
 * lse and one logit each: its bits depend on nothing but the rows. */
#include "kernels/xent.h"

#include "kernels/cut.h"
#include "kernels/launch.h"
#include "kernels/load.h"
#include "kernels/vmath.h"

#define ZX_BODY "kernels/xent.ref.h"
#include "kernels/instances.h"

typedef double (*loss_fn)(const void *logits, int64_t n_vocab, const void *lse, int64_t row, int64_t label);
typedef double (*sum_load_fn)(const void *p, int64_t i);
typedef void (*sum_store_fn)(void *p, int64_t i, double x);

typedef struct xent_job {
    const zx_view *logits, *dlogits;
    const int32_t *target;
    void *lse;
    const void *dloss;
    zx_xent_fwd_fn fwd;
    zx_xent_bwd_fn bwd;
    int64_t rows_per_task;
} xent_job;

static const void *row_of(const zx_view *v, int64_t row)
{
    return zx_at(v->data, v->dtype, row * v->stride[0]);
}

static void xent_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const xent_job *job = arg;
    int64_t n_vocab = job->logits->shape[1];
    int64_t end = zx_min64(job->logits->shape[0], (index + 1) * job->rows_per_task);
    for (int64_t row = index * job->rows_per_task; row < end; row++) {
        if (job->fwd)
            job->fwd(row_of(job->logits, row), n_vocab, job->lse, row);
        else
            job->bwd(row_of(job->logits, row), n_vocab, job->lse, row, job->target[row], job->dloss,
                     (void *)(uintptr_t)row_of(job->dlogits, row));
    }
}

static void run(const zx_exec *exec, xent_job *job)
{
    job->rows_per_task = zx_cut_rows(job->logits->shape[1]);
    zx_pool_run(exec->pool, xent_task, job, zx_ceil_div(job->logits->shape[0], job->rows_per_task));
}

static zx_status check(const char *op, const zx_view *logits, const zx_view *target, const zx_view *lse)
{
    ZX_TRY(zx_check_ndim(op, "logits", logits, 2));
    ZX_TRY(zx_check_float(op, "logits", logits->dtype));
    ZX_TRY(zx_check_rows(op, "logits", logits));
    ZX_TRY(zx_check_ndim(op, "target", target, 1));
    ZX_TRY(zx_check_dtype(op, "target", target->dtype, ZX_I32));
    ZX_TRY(zx_check_rows(op, "target", target));
    ZX_TRY(zx_check_dim(op, "target", target, 0, logits->shape[0]));
    ZX_TRY(zx_check_ndim(op, "lse", lse, 1));
    ZX_TRY(zx_check_dtype(op, "lse", lse->dtype, zx_dtype_sum(logits->dtype)));
    ZX_TRY(zx_check_rows(op, "lse", lse));
    return zx_check_dim(op, "lse", lse, 0, logits->shape[0]);
}

static zx_status check_fwd(const zx_xent_fwd_args *a)
{
    ZX_TRY(check("xent_fwd", &a->logits, &a->target, &a->lse));
    ZX_TRY(zx_check_ndim("xent_fwd", "total", &a->total, 1));
    ZX_TRY(zx_check_dtype("xent_fwd", "total", a->total.dtype, zx_dtype_sum(a->logits.dtype)));
    ZX_TRY(zx_check_rows("xent_fwd", "total", &a->total));
    return zx_check_dim("xent_fwd", "total", &a->total, 0, 2);
}

static void launch_fwd(const zx_exec *exec, const zx_xent_fwd_args *a, zx_xent_fwd_fn fn, loss_fn loss,
                       sum_load_fn load, sum_store_fn store)
{
    const int32_t *target = a->target.data;
    xent_job job = {.logits = &a->logits, .lse = a->lse.data, .fwd = fn};
    run(exec, &job);
    double sum = 0;
    int64_t n_counted = 0;
    for (int64_t row = 0; row < a->logits.shape[0]; row++) {
        if (target[row] < 0) continue;
        sum += loss(row_of(&a->logits, row), a->logits.shape[1], a->lse.data, row, target[row]);
        n_counted++;
    }
    store(a->total.data, 0, a->accumulate ? load(a->total.data, 0) + sum : sum);
    store(a->total.data, 1, (a->accumulate ? load(a->total.data, 1) : 0) + (double)n_counted);
}

zx_status zx_xent_fwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_xent_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    zx_dtype t = a->logits.dtype;
    zx_xent_fwd_fn fn = ZX_PICK_CPU(xent_fwd, t);
    if (t == ZX_F32) fn = ZX_PICK3(exec, fn, zx_xent_fwd_f32_avx2, zx_xent_fwd_f32_avx512);
    if (t == ZX_BF16) fn = ZX_PICK3(exec, fn, zx_xent_fwd_bf16_avx2, zx_xent_fwd_bf16_avx512);
    launch_fwd(exec, a, fn, ZX_PICK_CPU(xent_loss, t), ZX_PICK_CPU(xent_sum_load, t), ZX_PICK_CPU(xent_sum_store, t));
    return ZX_OK;
}

zx_status zx_xent_fwd_ref(const zx_exec *exec, const void *args)
{
    const zx_xent_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    zx_dtype t = a->logits.dtype;
    launch_fwd(exec, a, ZX_PICK_REF(xent_fwd, t), ZX_PICK_REF(xent_loss, t), ZX_PICK_REF(xent_sum_load, t),
               ZX_PICK_REF(xent_sum_store, t));
    return ZX_OK;
}

static zx_status check_bwd(const zx_xent_bwd_args *a)
{
    ZX_TRY(check("xent_bwd", &a->logits, &a->target, &a->lse));
    ZX_TRY(zx_check_ndim("xent_bwd", "dloss", &a->dloss, 1));
    ZX_TRY(zx_check_dtype("xent_bwd", "dloss", a->dloss.dtype, zx_dtype_sum(a->logits.dtype)));
    ZX_TRY(zx_check_dim("xent_bwd", "dloss", &a->dloss, 0, 1));
    ZX_TRY(zx_check_out("xent_bwd", "dlogits", &a->dlogits));
    ZX_TRY(zx_check_same_shape("xent_bwd", "dlogits", &a->dlogits, "logits", &a->logits));
    ZX_TRY(zx_check_dtype("xent_bwd", "dlogits", a->dlogits.dtype, a->logits.dtype));
    return zx_check_rows("xent_bwd", "dlogits", &a->dlogits);
}

static void launch_bwd(const zx_exec *exec, const zx_xent_bwd_args *a, zx_xent_bwd_fn fn)
{
    xent_job job = {.logits = &a->logits,
                    .dlogits = &a->dlogits,
                    .target = a->target.data,
                    .lse = a->lse.data,
                    .dloss = a->dloss.data,
                    .bwd = fn};
    run(exec, &job);
}

zx_status zx_xent_bwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_xent_bwd_args *a = args;
    ZX_TRY(check_bwd(a));
    zx_xent_bwd_fn fn = ZX_PICK_CPU(xent_bwd, a->logits.dtype);
    if (a->logits.dtype == ZX_F32) fn = ZX_PICK3(exec, fn, zx_xent_bwd_f32_avx2, zx_xent_bwd_f32_avx512);
    if (a->logits.dtype == ZX_BF16) fn = ZX_PICK3(exec, fn, zx_xent_bwd_bf16_avx2, zx_xent_bwd_bf16_avx512);
    launch_bwd(exec, a, fn);
    return ZX_OK;
}

zx_status zx_xent_bwd_ref(const zx_exec *exec, const void *args)
{
    const zx_xent_bwd_args *a = args;
    ZX_TRY(check_bwd(a));
    launch_bwd(exec, a, ZX_PICK_REF(xent_bwd, a->logits.dtype));
    return ZX_OK;
}
