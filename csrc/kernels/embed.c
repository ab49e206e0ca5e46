/* embed.c - embed_fwd, embed_bwd.
 *
 * The backward pass gives each task some columns of the whole table and all tokens in order: no two tasks
 * touch one element, and an element's sum has one order whatever the threads do. */
#include "kernels/embed.h"

#include "kernels/launch.h"

#define ISA plain
#define REAL float
#include "kernels/embed.ref.h"
#undef REAL
#define REAL double
#include "kernels/embed.ref.h"
#undef REAL

static zx_status check(const char *op, const zx_view *index, const char *table_name, const zx_view *table,
                       const char *rows_name, const zx_view *rows)
{
    ZX_TRY(zx_check_ndim(op, "index", index, 1));
    ZX_TRY(zx_check_dtype(op, "index", index->dtype, ZX_I32));
    ZX_TRY(zx_check_ndim(op, table_name, table, 2));
    ZX_TRY(zx_check_rows(op, table_name, table));
    ZX_TRY(zx_check_ndim(op, rows_name, rows, 2));
    ZX_TRY(zx_check_rows(op, rows_name, rows));
    ZX_TRY(zx_check_float(op, rows_name, rows->dtype));
    ZX_TRY(zx_check_dim(op, rows_name, rows, 0, index->shape[0]));
    ZX_TRY(zx_check_dim(op, rows_name, rows, 1, table->shape[1]));
    return ZX_OK;
}

/* ---- embed_fwd ---------------------------------------------------------------------------------------- */

typedef struct gather_job {
    const zx_embed_fwd_args *args;
    zx_embed_fwd_fn fn;
    int64_t tokens_per_task;
} gather_job;

static void gather_task(void *arg, int64_t i, int worker)
{
    (void)worker;
    const gather_job *job = arg;
    int64_t token = i * job->tokens_per_task;
    job->fn(job->args, token, zx_min64(job->tokens_per_task, job->args->out.shape[0] - token));
}

static zx_status gather(const zx_exec *exec, bool ref, const zx_embed_fwd_args *args)
{
    enum { TASK = 32768 };
    const zx_view *out = &args->out;
    ZX_TRY(check("embed_fwd", &args->index, "table", &args->table, "out", out));
    ZX_TRY(zx_check_out("embed_fwd", "out", out));
    ZX_TRY(zx_check_dtype("embed_fwd", "table", args->table.dtype, out->dtype));
    if (zx_view_numel(out) == 0) return ZX_OK;
    gather_job job = {.args = args, .tokens_per_task = zx_max64(1, TASK / out->shape[1])};
    job.fn = ref || out->dtype == ZX_F64 ? zx_embed_gather_double_plain
                                         : ZX_PICK(exec, zx_embed_gather_float_plain, zx_embed_gather_float_avx2);
    zx_pool_run(exec->pool, gather_task, &job, zx_ceil_div(out->shape[0], job.tokens_per_task));
    return ZX_OK;
}

zx_status zx_embed_fwd_cpu(const zx_exec *exec, const void *args)
{
    return gather(exec, false, args);
}
zx_status zx_embed_fwd_ref(const zx_exec *exec, const void *args)
{
    return gather(exec, true, args);
}

/* ---- embed_bwd ---------------------------------------------------------------------------------------- */

typedef struct scatter_job {
    const zx_embed_bwd_args *args;
    zx_embed_bwd_fn fn;
} scatter_job;

static void scatter_task(void *arg, int64_t i, int worker)
{
    (void)worker;
    const scatter_job *job = arg;
    int64_t col = i * ZX_EMBED_COLS;
    job->fn(job->args, col, zx_min64(ZX_EMBED_COLS, job->args->dout.shape[1] - col));
}

static zx_status scatter(const zx_exec *exec, bool ref, const zx_embed_bwd_args *args)
{
    const zx_view *dout = &args->dout, *dtable = &args->dtable;
    ZX_TRY(check("embed_bwd", &args->index, "dtable", dtable, "dout", dout));
    ZX_TRY(zx_check_out("embed_bwd", "dtable", dtable));
    ZX_TRY(zx_check_dtype("embed_bwd", "dtable", dtable->dtype, zx_dtype_sum(dout->dtype)));
    scatter_job job = {.args = args};
    job.fn = ref || dout->dtype == ZX_F64 ? zx_embed_scatter_double_plain
                                          : ZX_PICK(exec, zx_embed_scatter_float_plain, zx_embed_scatter_float_avx2);
    zx_pool_run(exec->pool, scatter_task, &job, zx_ceil_div(dout->shape[1], ZX_EMBED_COLS));
    return ZX_OK;
}

zx_status zx_embed_bwd_cpu(const zx_exec *exec, const void *args)
{
    return scatter(exec, false, args);
}
zx_status zx_embed_bwd_ref(const zx_exec *exec, const void *args)
{
    return scatter(exec, true, args);
}
