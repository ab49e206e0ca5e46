/* layernorm.c - launchers of layernorm_fwd, layernorm_bwd_in and layernorm_bwd_w on the CPU.
 *
 * Rows are independent in the first two. The parameter gradients are cut into columns, each summed over all rows by
 * one task in an order of its own: nothing is combined across threads. */
#include "kernels/layernorm.h"

#include "kernels/cut.h"
#include "kernels/launch.h"
#include "kernels/load.h"
#include "kernels/vmath.h"

#define ZX_BODY "kernels/layernorm.ref.h"
#include "kernels/instances.h"

/* The instance for a dtype on this processor. */
#define PICK(exec, function, dtype)                                                                                    \
    ((dtype) == ZX_F32    ? ZX_PICK(exec, function##_float_f32, zx_##function##_f32_avx2)                              \
     : (dtype) == ZX_BF16 ? ZX_PICK(exec, function##_float_bf16, zx_##function##_bf16_avx2)                            \
                          : function##_double_f64)

static void *row_of(const zx_view *v, int64_t row)
{
    return zx_at(v->data, v->dtype, row * v->stride[0]);
}

static zx_status check_matrix(const char *op, const char *name, const zx_view *v, const zx_view *x)
{
    ZX_TRY(zx_check_ndim(op, name, v, 2));
    ZX_TRY(zx_check_float(op, name, v->dtype));
    ZX_TRY(zx_check_dtype(op, name, v->dtype, x->dtype));
    ZX_TRY(zx_check_rows(op, name, v));
    return zx_check_same_shape(op, name, v, "x", x);
}

static zx_status check_vector(const char *op, const char *name, const zx_view *v, zx_dtype dtype, int64_t n)
{
    ZX_TRY(zx_check_ndim(op, name, v, 1));
    ZX_TRY(zx_check_dtype(op, name, v->dtype, dtype));
    ZX_TRY(zx_check_rows(op, name, v));
    return zx_check_dim(op, name, v, 0, n);
}

/* ---- forward ------------------------------------------------------------------------------------------ */

typedef struct fwd_job {
    const zx_layernorm_fwd_args *a;
    zx_layernorm_fwd_fn fn;
    int64_t rows_per_task;
} fwd_job;

static void fwd_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const fwd_job *job = arg;
    const zx_layernorm_fwd_args *a = job->a;
    int64_t end = zx_min64(a->x.shape[0], (index + 1) * job->rows_per_task);
    for (int64_t row = index * job->rows_per_task; row < end; row++)
        job->fn(row_of(&a->x, row), a->gamma.data, a->beta.data, row_of(&a->out, row), a->mean.data, a->rstd.data, row,
                a->x.shape[1], a->eps);
}

static zx_status launch_fwd(const zx_exec *exec, const zx_layernorm_fwd_args *a, zx_layernorm_fwd_fn fn)
{
    fwd_job job = {a, fn, zx_cut_rows(a->x.shape[1])};
    zx_pool_run(exec->pool, fwd_task, &job, zx_ceil_div(a->x.shape[0], job.rows_per_task));
    return ZX_OK;
}

static zx_status check_fwd(const zx_layernorm_fwd_args *a)
{
    static const char op[] = "layernorm_fwd";
    ZX_TRY(check_matrix(op, "x", &a->x, &a->x));
    ZX_TRY(check_matrix(op, "out", &a->out, &a->x));
    ZX_TRY(zx_check_out(op, "out", &a->out));
    zx_dtype sums = zx_dtype_sum(a->x.dtype);
    ZX_TRY(check_vector(op, "gamma", &a->gamma, a->x.dtype, a->x.shape[1]));
    if (a->beta.data) ZX_TRY(check_vector(op, "beta", &a->beta, a->x.dtype, a->x.shape[1]));
    ZX_TRY(check_vector(op, "mean", &a->mean, sums, a->x.shape[0]));
    return check_vector(op, "rstd", &a->rstd, sums, a->x.shape[0]);
}

zx_status zx_layernorm_fwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_layernorm_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    return launch_fwd(exec, a, PICK(exec, layernorm_fwd, a->x.dtype));
}

zx_status zx_layernorm_fwd_ref(const zx_exec *exec, const void *args)
{
    const zx_layernorm_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    return launch_fwd(exec, a, ZX_PICK_REF(layernorm_fwd, a->x.dtype));
}

/* ---- gradient of the input ---------------------------------------------------------------------------- */

typedef struct bwd_in_job {
    const zx_layernorm_bwd_in_args *a;
    zx_layernorm_bwd_in_fn fn;
    int64_t rows_per_task;
} bwd_in_job;

static void bwd_in_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const bwd_in_job *job = arg;
    const zx_layernorm_bwd_in_args *a = job->a;
    int64_t end = zx_min64(a->x.shape[0], (index + 1) * job->rows_per_task);
    for (int64_t row = index * job->rows_per_task; row < end; row++)
        job->fn(row_of(&a->dout, row), row_of(&a->x, row), a->gamma.data, a->mean.data, a->rstd.data, row,
                a->x.shape[1], row_of(&a->dx, row), a->accumulate);
}

static zx_status launch_bwd_in(const zx_exec *exec, const zx_layernorm_bwd_in_args *a, zx_layernorm_bwd_in_fn fn)
{
    bwd_in_job job = {a, fn, zx_cut_rows(a->x.shape[1])};
    zx_pool_run(exec->pool, bwd_in_task, &job, zx_ceil_div(a->x.shape[0], job.rows_per_task));
    return ZX_OK;
}

static zx_status check_bwd_in(const zx_layernorm_bwd_in_args *a)
{
    static const char op[] = "layernorm_bwd_in";
    ZX_TRY(check_matrix(op, "x", &a->x, &a->x));
    ZX_TRY(check_matrix(op, "dout", &a->dout, &a->x));
    ZX_TRY(check_matrix(op, "dx", &a->dx, &a->x));
    ZX_TRY(zx_check_out(op, "dx", &a->dx));
    zx_dtype sums = zx_dtype_sum(a->x.dtype);
    ZX_TRY(check_vector(op, "gamma", &a->gamma, a->x.dtype, a->x.shape[1]));
    ZX_TRY(check_vector(op, "mean", &a->mean, sums, a->x.shape[0]));
    return check_vector(op, "rstd", &a->rstd, sums, a->x.shape[0]);
}

zx_status zx_layernorm_bwd_in_cpu(const zx_exec *exec, const void *args)
{
    const zx_layernorm_bwd_in_args *a = args;
    ZX_TRY(check_bwd_in(a));
    return launch_bwd_in(exec, a, PICK(exec, layernorm_bwd_in, a->x.dtype));
}

zx_status zx_layernorm_bwd_in_ref(const zx_exec *exec, const void *args)
{
    const zx_layernorm_bwd_in_args *a = args;
    ZX_TRY(check_bwd_in(a));
    return launch_bwd_in(exec, a, ZX_PICK_REF(layernorm_bwd_in, a->x.dtype));
}

/* ---- gradients of the parameters ---------------------------------------------------------------------- */

typedef struct bwd_w_job {
    zx_layernorm_cols cols;
    zx_layernorm_bwd_w_fn fn;
    int64_t n_cols;
} bwd_w_job;

static void bwd_w_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const bwd_w_job *job = arg;
    job->fn(&job->cols, index * ZX_LN_COLS, zx_min64(job->n_cols, (index + 1) * ZX_LN_COLS));
}

static zx_status launch_bwd_w(const zx_exec *exec, const zx_layernorm_bwd_w_args *a, zx_layernorm_bwd_w_fn fn)
{
    bwd_w_job job = {
        .cols = {a->dout.data, a->x.data, a->dout.stride[0], a->x.stride[0], a->mean.data, a->rstd.data, a->dgamma.data,
                 a->dbeta.data, a->x.shape[0]},
        .fn = fn,
        .n_cols = a->x.shape[1],
    };
    zx_pool_run(exec->pool, bwd_w_task, &job, zx_ceil_div(job.n_cols, ZX_LN_COLS));
    return ZX_OK;
}

static zx_status check_bwd_w(const zx_layernorm_bwd_w_args *a)
{
    static const char op[] = "layernorm_bwd_w";
    ZX_TRY(check_matrix(op, "x", &a->x, &a->x));
    ZX_TRY(check_matrix(op, "dout", &a->dout, &a->x));
    zx_dtype sums = zx_dtype_sum(a->x.dtype);
    ZX_TRY(check_vector(op, "mean", &a->mean, sums, a->x.shape[0]));
    ZX_TRY(check_vector(op, "rstd", &a->rstd, sums, a->x.shape[0]));
    if (a->dgamma.data) ZX_TRY(check_vector(op, "dgamma", &a->dgamma, sums, a->x.shape[1]));
    if (a->dbeta.data) ZX_TRY(check_vector(op, "dbeta", &a->dbeta, sums, a->x.shape[1]));
    return ZX_OK;
}

zx_status zx_layernorm_bwd_w_cpu(const zx_exec *exec, const void *args)
{
    const zx_layernorm_bwd_w_args *a = args;
    ZX_TRY(check_bwd_w(a));
    return launch_bwd_w(exec, a, PICK(exec, layernorm_bwd_w, a->x.dtype));
}

zx_status zx_layernorm_bwd_w_ref(const zx_exec *exec, const void *args)
{
    const zx_layernorm_bwd_w_args *a = args;
    ZX_TRY(check_bwd_w(a));
    return launch_bwd_w(exec, a, ZX_PICK_REF(layernorm_bwd_w, a->x.dtype));
}
