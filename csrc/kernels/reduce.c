/* reduce.c - sum, colsum, sqnorm, finite: fixed cuts, partial sums in double, added up in order. */
#include "kernels/reduce.h"

#include <stdatomic.h>

#include "kernels/launch.h"

#define ISA plain
#define REAL double
#include "kernels/reduce.ref.h"
#undef REAL
#define REAL float
#define ZX_REDUCE_FINITE
#include "kernels/reduce.ref.h"
#undef REAL

static void store_one(zx_dtype t, void *out, bool accumulate, double x)
{
    double old = 0;
    if (accumulate) get_row_double_plain(t, out, 1, 1, &old);
    x = accumulate ? old + x : x;
    put_row_double_plain(t, out, 1, 1, &x);
}

/* ---- sum, sqnorm -------------------------------------------------------------------------------------- */

typedef struct sum_job {
    const zx_walk *walk;
    zx_dtype dtype;
    bool square;
    int64_t n, block;
    zx_reduce_fn fn;
    double partial[ZX_REDUCE_BLOCKS];
} sum_job;

static void sum_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    sum_job *job = arg;
    int64_t begin = index * job->block;
    int64_t end = zx_min64(job->n, begin + job->block);
    job->partial[index] = job->fn(job->walk, job->dtype, job->square, begin, end);
}

static double reduce(const zx_exec *exec, bool ref, const zx_view *x, bool square)
{
    zx_walk walk;
    zx_walk_init(&walk, &x, 1, true);
    sum_job job;
    job.walk = &walk;
    job.dtype = x->dtype;
    job.square = square;
    job.n = zx_view_numel(x);
    job.block = zx_reduce_block(job.n);
    job.fn =
        ref || x->dtype == ZX_F64 ? zx_reduce_double_plain : ZX_PICK(exec, zx_reduce_float_plain, zx_reduce_float_avx2);
    int64_t n_blocks = zx_ceil_div(job.n, job.block);
    zx_pool_run(exec->pool, sum_task, &job, n_blocks);
    double sum = 0;
    for (int64_t i = 0; i < n_blocks; i++)
        sum += job.partial[i];
    return sum;
}

static zx_status sum(const zx_exec *exec, bool ref, const zx_sum_args *args)
{
    ZX_TRY(zx_check_view("sum", "x", &args->x));
    ZX_TRY(zx_check_float("sum", "x", args->x.dtype));
    ZX_TRY(zx_check_out("sum", "out", &args->out));
    ZX_TRY(zx_check_sum_dtype("sum", "out", args->out.dtype, args->x.dtype));
    if (zx_view_numel(&args->out) != 1)
        ZX_FAIL(ZX_ERR_ARG, "sum: out has %lld elements, it needs one", (long long)zx_view_numel(&args->out));
    double total = reduce(exec, ref, &args->x, false);
    store_one(args->out.dtype, args->out.data, args->accumulate, args->factor * total);
    return ZX_OK;
}

zx_status zx_sum_cpu(const zx_exec *exec, const void *args)
{
    return sum(exec, false, args);
}
zx_status zx_sum_ref(const zx_exec *exec, const void *args)
{
    return sum(exec, true, args);
}

static zx_status sqnorm(const zx_exec *exec, bool ref, const zx_sqnorm_args *args)
{
    ZX_TRY(zx_check_flat("sqnorm", "x", args->x, args->n));
    ZX_TRY(zx_check_float("sqnorm", "x", args->dtype));
    ZX_TRY(zx_check_flat("sqnorm", "out", args->out, 1));
    zx_view x = zx_view_1d((void *)(uintptr_t)args->x, args->dtype, args->n);
    *args->out = reduce(exec, ref, &x, true);
    return ZX_OK;
}

zx_status zx_sqnorm_cpu(const zx_exec *exec, const void *args)
{
    return sqnorm(exec, false, args);
}
zx_status zx_sqnorm_ref(const zx_exec *exec, const void *args)
{
    return sqnorm(exec, true, args);
}

/* ---- colsum ------------------------------------------------------------------------------------------- */

enum { COLSUM_BLOCKS = 16, COLSUM_MIN_ROWS = 128 };

static int64_t colsum_rows_per_block(int64_t n_rows)
{
    return zx_max64(COLSUM_MIN_ROWS, zx_ceil_div(n_rows, COLSUM_BLOCKS));
}

typedef struct colsum_job {
    const zx_colsum_args *args;
    zx_colsum_fn fn;
    double *partial; /* (row blocks, C) */
    int64_t rows_per_block, n_row_blocks, n_col_blocks;
} colsum_job;

static void colsum_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const colsum_job *job = arg;
    const zx_view *x = &job->args->x;
    int64_t row = index / job->n_col_blocks * job->rows_per_block;
    int64_t col = index % job->n_col_blocks * ZX_REDUCE_CHUNK;
    int64_t n_rows = zx_min64(job->rows_per_block, x->shape[0] - row);
    int64_t n_cols = zx_min64(ZX_REDUCE_CHUNK, x->shape[1] - col);
    double *acc = job->partial + index / job->n_col_blocks * x->shape[1] + col;
    memset(acc, 0, (size_t)n_cols * sizeof *acc);
    job->fn(x, job->args->y.data ? &job->args->y : NULL, row, n_rows, col, n_cols, acc);
}

static size_t colsum_scratch(const void *args_, int n_threads)
{
    (void)n_threads;
    const zx_colsum_args *args = args_;
    if (args->x.ndim != 2 || zx_view_numel(&args->x) <= 0) return 0;
    int64_t n_row_blocks = zx_ceil_div(args->x.shape[0], colsum_rows_per_block(args->x.shape[0]));
    return (size_t)(n_row_blocks * args->x.shape[1]) * sizeof(double);
}

static zx_status colsum(const zx_exec *exec, bool ref, const zx_colsum_args *args)
{
    const zx_view *x = &args->x, *y = &args->y, *out = &args->out;
    ZX_TRY(zx_check_ndim("colsum", "x", x, 2));
    ZX_TRY(zx_check_float("colsum", "x", x->dtype));
    bool wide = ref || x->dtype == ZX_F64;
    if (y->data) {
        ZX_TRY(zx_check_ndim("colsum", "y", y, 2));
        ZX_TRY(zx_check_float("colsum", "y", y->dtype));
        ZX_TRY(zx_check_same_shape("colsum", "y", y, "x", x));
        wide = wide || y->dtype == ZX_F64;
    }
    ZX_TRY(zx_check_ndim("colsum", "out", out, 1));
    ZX_TRY(zx_check_out("colsum", "out", out));
    ZX_TRY(zx_check_sum_dtype("colsum", "out", out->dtype, x->dtype));
    ZX_TRY(zx_check_dim("colsum", "out", out, 0, x->shape[1]));
    ZX_TRY(zx_check_scratch("colsum", exec, colsum_scratch(args, 1)));
    int64_t n_rows = x->shape[0], n_cols = x->shape[1];
    colsum_job job = {.args = args, .partial = exec->scratch, .rows_per_block = colsum_rows_per_block(n_rows)};
    job.fn = wide ? zx_colsum_rows_double_plain : ZX_PICK(exec, zx_colsum_rows_float_plain, zx_colsum_rows_float_avx2);
    job.n_row_blocks = zx_ceil_div(n_rows, job.rows_per_block);
    job.n_col_blocks = zx_ceil_div(n_cols, ZX_REDUCE_CHUNK);
    zx_pool_run(exec->pool, colsum_task, &job, job.n_row_blocks * job.n_col_blocks);
    for (int64_t c = 0; c < n_cols; c++) {
        double total = 0;
        for (int64_t b = 0; b < job.n_row_blocks; b++)
            total += job.partial[b * n_cols + c];
        store_one(out->dtype, zx_at(out->data, out->dtype, c * out->stride[0]), args->accumulate, total);
    }
    return ZX_OK;
}

size_t zx_colsum_cpu_scratch(const void *args, int n_threads)
{
    return colsum_scratch(args, n_threads);
}
size_t zx_colsum_ref_scratch(const void *args, int n_threads)
{
    return colsum_scratch(args, n_threads);
}
zx_status zx_colsum_cpu(const zx_exec *exec, const void *args)
{
    return colsum(exec, false, args);
}
zx_status zx_colsum_ref(const zx_exec *exec, const void *args)
{
    return colsum(exec, true, args);
}

/* ---- finite ------------------------------------------------------------------------------------------- */

typedef struct finite_job {
    const zx_finite_args *args;
    zx_finite_fn fn;
    _Atomic int64_t first; /* INT64_MAX: none so far */
} finite_job;

enum { FINITE_TASK = 65536 };

static void finite_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    finite_job *job = arg;
    int64_t begin = index * FINITE_TASK;
    int64_t first = atomic_load_explicit(&job->first, memory_order_relaxed);
    if (begin > first) return;
    int64_t end = zx_min64(job->args->n, begin + FINITE_TASK);
    int64_t at = job->fn(job->args->x, job->args->dtype, begin, end);
    while (at >= 0 && at < first && !atomic_compare_exchange_weak(&job->first, &first, at)) {
    }
}

zx_status zx_finite_cpu(const zx_exec *exec, const void *args_)
{
    const zx_finite_args *args = args_;
    ZX_TRY(zx_check_flat("finite", "x", args->x, args->n));
    ZX_TRY(zx_check_float("finite", "x", args->dtype));
    ZX_TRY(zx_check_flat("finite", "out", args->out, 1));
    finite_job job = {.args = args, .fn = ZX_PICK(exec, zx_finite_float_plain, zx_finite_float_avx2)};
    atomic_init(&job.first, INT64_MAX);
    zx_pool_run(exec->pool, finite_task, &job, zx_ceil_div(args->n, FINITE_TASK));
    int64_t first = atomic_load(&job.first);
    *args->out = first == INT64_MAX ? -1 : first;
    return ZX_OK;
}

zx_status zx_finite_ref(const zx_exec *exec, const void *args)
{
    return zx_finite_cpu(exec, args);
}
