/* matmul.c - c = [c +] op(a) op(b) [+ bias] on the CPU.
 *
 * DESIGN. BLAS runs single-threaded on blocks of c that zx_matmul_block cuts from the shape alone, so the bits do not
 * depend on the number of threads. A block is never cut along k between tasks. The bias goes into c before the product
 * is added to it: BLAS reads c anyway.
 * bfloat16 operands are widened to float in pieces of PIECE_K along k, into scratch memory of the worker, and BLAS adds
 * the pieces in order to a float block: c itself if that is float, else scratch that is rounded once at the end.
 * Without a BLAS, or with strides or sizes that it cannot take, plain loops do the work. */
#include "kernels/launch.h"
#include "kernels/load.h"

enum {
    MATMUL_COLS = 128, /* columns that the plain loops sum at a time */
    PIECE_K = 1024     /* bounds the scratch memory of a worker */
};

#define ZX_BODY "kernels/matmul.ref.h"
#include "kernels/instances.h"

typedef void (*plain_fn)(const zx_matmul_args *args, int64_t m0, int64_t m1, int64_t n0, int64_t n1);

typedef struct matmul_job {
    const zx_matmul_args *a;
    const zx_gemm *gemm; /* NULL: plain */
    plain_fn plain;
    int64_t m, n, k, block_m, block_n, n_cuts;
    char *scratch;
    size_t worker_bytes;
} matmul_job;

typedef struct block {
    int64_t m0, m, n0, n; /* rows [m0, m0 + m), columns [n0, n0 + n) */
} block;

/* ---- bfloat16 ----------------------------------------------------------------------------------------- */

/* Scratch of a worker: pieces of op(a) and op(b), then a block of c. Lengths in floats. */
typedef struct layout {
    int64_t a, b, c, total;
} layout;

static layout layout_of(const zx_matmul_args *args, int64_t block_m, int64_t block_n, int64_t k)
{
    int64_t piece = zx_min64(k, PIECE_K), step = 16;
    layout l = {.a = 0};
    l.b = zx_round_up(block_m * piece, step);
    l.c = l.b + zx_round_up(block_n * piece, step);
    l.total = l.c + (args->c.dtype == ZX_BF16 ? zx_round_up(block_m * block_n, step) : 0);
    return l;
}

static void widen(const zx_view *v, int64_t row, int64_t n_rows, int64_t col, int64_t n_cols, float *out)
{
    for (int64_t i = 0; i < n_rows; i++) {
        const uint16_t *in = (const uint16_t *)v->data + (row + i) * v->stride[0] + col;
        for (int64_t j = 0; j < n_cols; j++)
            out[i * n_cols + j] = zx_bf16_to_f32(in[j]);
    }
}

/* The value that the product is added to. */
static void begin_block_bf16(const zx_matmul_args *args, const block *at, float *c, int64_t ldc)
{
    const zx_view *v = &args->c;
    for (int64_t i = 0; i < at->m; i++) {
        float *row = c + i * ldc;
        if (!args->accumulate)
            for (int64_t j = 0; j < at->n; j++)
                row[j] = 0;
        else if (v->dtype == ZX_BF16)
            for (int64_t j = 0; j < at->n; j++)
                row[j] = zx_load_bf16(v->data, (at->m0 + i) * v->stride[0] + at->n0 + j);
        if (args->bias.data)
            for (int64_t j = 0; j < at->n; j++)
                row[j] += zx_load_bf16(args->bias.data, at->n0 + j);
    }
}

static void block_bf16(const matmul_job *job, const block *at, int worker)
{
    const zx_matmul_args *args = job->a;
    const zx_view *c = &args->c;
    layout l = layout_of(args, job->block_m, job->block_n, job->k);
    float *scratch = (float *)(void *)(job->scratch + (size_t)worker * job->worker_bytes);
    float *pa = scratch + l.a, *pb = scratch + l.b, *pc = scratch + l.c;
    int64_t ldc = at->n;
    if (c->dtype == ZX_F32) {
        pc = (float *)c->data + at->m0 * c->stride[0] + at->n0;
        ldc = zx_max64(c->stride[0], at->n);
    }
    begin_block_bf16(args, at, pc, ldc);
    for (int64_t k0 = 0; k0 < job->k; k0 += PIECE_K) {
        int64_t k = zx_min64(PIECE_K, job->k - k0);
        if (args->trans_a)
            widen(&args->a, k0, k, at->m0, at->m, pa);
        else
            widen(&args->a, at->m0, at->m, k0, k, pa);
        if (args->trans_b)
            widen(&args->b, at->n0, at->n, k0, k, pb);
        else
            widen(&args->b, k0, k, at->n0, at->n, pb);
        job->gemm->sgemm(args->trans_a, args->trans_b, at->m, at->n, k, 1.0f, pa, args->trans_a ? at->m : k, pb,
                         args->trans_b ? k : at->n, 1.0f, pc, ldc);
    }
    if (c->dtype == ZX_BF16)
        for (int64_t i = 0; i < at->m; i++)
            for (int64_t j = 0; j < at->n; j++)
                zx_store_bf16(c->data, (at->m0 + i) * c->stride[0] + at->n0 + j, pc[i * ldc + j]);
}

/* ---- float and double --------------------------------------------------------------------------------- */

/* BLAS wants row strides of at least a row, also where there is only one. */
static int64_t ld(const zx_view *v)
{
    return zx_max64(v->stride[0], zx_max64(1, v->shape[1]));
}

static bool begin_block(const zx_matmul_args *args, const block *at)
{
    if (!args->bias.data) return args->accumulate;
    const zx_view *c = &args->c;
    for (int64_t i = 0; i < at->m; i++) {
        int64_t row = (at->m0 + i) * c->stride[0] + at->n0;
        if (c->dtype == ZX_F64) {
            double *out = (double *)c->data + row, *bias = (double *)args->bias.data + at->n0;
            for (int64_t j = 0; j < at->n; j++)
                out[j] = args->accumulate ? out[j] + bias[j] : bias[j];
        } else {
            float *out = (float *)c->data + row, *bias = (float *)args->bias.data + at->n0;
            for (int64_t j = 0; j < at->n; j++)
                out[j] = args->accumulate ? out[j] + bias[j] : bias[j];
        }
    }
    return true;
}

static void block_gemm(const matmul_job *job, const block *at)
{
    const zx_matmul_args *args = job->a;
    const zx_view *a = &args->a, *b = &args->b, *c = &args->c;
    bool add = begin_block(args, at);
    int64_t at_a = args->trans_a ? at->m0 : at->m0 * a->stride[0];
    int64_t at_b = args->trans_b ? at->n0 * b->stride[0] : at->n0;
    int64_t at_c = at->m0 * c->stride[0] + at->n0;
    if (a->dtype == ZX_F64)
        job->gemm->dgemm(args->trans_a, args->trans_b, at->m, at->n, job->k, 1.0, (const double *)a->data + at_a, ld(a),
                         (const double *)b->data + at_b, ld(b), add ? 1.0 : 0.0, (double *)c->data + at_c, ld(c));
    else
        job->gemm->sgemm(args->trans_a, args->trans_b, at->m, at->n, job->k, 1.0f, (const float *)a->data + at_a, ld(a),
                         (const float *)b->data + at_b, ld(b), add ? 1.0f : 0.0f, (float *)c->data + at_c, ld(c));
}

static void matmul_task(void *arg, int64_t index, int worker)
{
    const matmul_job *job = arg;
    block at = {.m0 = index / job->n_cuts * job->block_m, .n0 = index % job->n_cuts * job->block_n};
    at.m = zx_min64(job->block_m, job->m - at.m0);
    at.n = zx_min64(job->block_n, job->n - at.n0);
    if (!job->gemm)
        job->plain(job->a, at.m0, at.m0 + at.m, at.n0, at.n0 + at.n);
    else if (job->a->a.dtype == ZX_BF16)
        block_bf16(job, &at, worker);
    else
        block_gemm(job, &at);
}

/* ---- launchers ---------------------------------------------------------------------------------------- */

static int64_t rows_of_op(const zx_view *v, bool trans)
{
    return v->shape[trans ? 1 : 0];
}
static int64_t cols_of_op(const zx_view *v, bool trans)
{
    return v->shape[trans ? 0 : 1];
}

static zx_status check(const zx_matmul_args *a)
{
    static const char op[] = "matmul";
    ZX_TRY(zx_check_ndim(op, "a", &a->a, 2));
    ZX_TRY(zx_check_float(op, "a", a->a.dtype));
    ZX_TRY(zx_check_rows(op, "a", &a->a));
    ZX_TRY(zx_check_ndim(op, "b", &a->b, 2));
    ZX_TRY(zx_check_dtype(op, "b", a->b.dtype, a->a.dtype));
    ZX_TRY(zx_check_rows(op, "b", &a->b));
    ZX_TRY(zx_check_ndim(op, "c", &a->c, 2));
    ZX_TRY(zx_check_sum_dtype(op, "c", a->c.dtype, a->a.dtype));
    ZX_TRY(zx_check_rows(op, "c", &a->c));
    ZX_TRY(zx_check_out(op, "c", &a->c));
    char ta[ZX_VIEW_TEXT], tb[ZX_VIEW_TEXT], tc[ZX_VIEW_TEXT];
    if (cols_of_op(&a->a, a->trans_a) != rows_of_op(&a->b, a->trans_b) ||
        a->c.shape[0] != rows_of_op(&a->a, a->trans_a) || a->c.shape[1] != cols_of_op(&a->b, a->trans_b))
        ZX_FAIL(ZX_ERR_ARG, "matmul: a is %s%s, b is %s%s and c is %s: these shapes do not make a product",
                zx_view_text(&a->a, ta), a->trans_a ? " transposed" : "", zx_view_text(&a->b, tb),
                a->trans_b ? " transposed" : "", zx_view_text(&a->c, tc));
    if (a->bias.data) {
        ZX_TRY(zx_check_ndim(op, "bias", &a->bias, 1));
        ZX_TRY(zx_check_dtype(op, "bias", a->bias.dtype, a->a.dtype));
        ZX_TRY(zx_check_rows(op, "bias", &a->bias));
        ZX_TRY(zx_check_dim(op, "bias", &a->bias, 0, a->c.shape[1]));
    }
    return ZX_OK;
}

/* Strides that BLAS takes, numbers that its 32-bit integers hold. */
static bool blas_takes(const zx_view *v)
{
    return (v->shape[0] <= 1 || v->stride[0] >= v->shape[1]) && v->stride[0] <= INT32_MAX && v->shape[0] <= INT32_MAX &&
           v->shape[1] <= INT32_MAX;
}

static matmul_job job_of(const zx_matmul_args *a)
{
    matmul_job job = {.a = a, .m = a->c.shape[0], .n = a->c.shape[1], .k = cols_of_op(&a->a, a->trans_a)};
    zx_matmul_block(job.m, job.n, job.k, a->trans_a, a->trans_b, &job.block_m, &job.block_n);
    job.n_cuts = zx_ceil_div(job.n, job.block_n);
    return job;
}

static void run(const zx_exec *exec, matmul_job *job)
{
    zx_pool_run(exec->pool, matmul_task, job, zx_ceil_div(job->m, job->block_m) * job->n_cuts);
}

static size_t worker_bytes(const matmul_job *job)
{
    if (job->a->a.dtype != ZX_BF16) return 0;
    return (size_t)layout_of(job->a, job->block_m, job->block_n, job->k).total * sizeof(float);
}

size_t zx_matmul_cpu_scratch(const void *args, int n_threads)
{
    matmul_job job = job_of(args);
    return worker_bytes(&job) * (size_t)n_threads;
}

zx_status zx_matmul_cpu(const zx_exec *exec, const void *args)
{
    const zx_matmul_args *a = args;
    ZX_TRY(check(a));
    matmul_job job = job_of(a);
    job.plain = ZX_PICK_CPU(matmul, a->a.dtype);
    if (exec->gemm && job.k > 0 && blas_takes(&a->a) && blas_takes(&a->b) && blas_takes(&a->c)) {
        job.gemm = exec->gemm;
        job.worker_bytes = worker_bytes(&job);
        job.scratch = exec->scratch;
        ZX_TRY(zx_check_scratch("matmul", exec, job.worker_bytes * (size_t)zx_pool_n_threads(exec->pool)));
    }
    run(exec, &job);
    return ZX_OK;
}

zx_status zx_matmul_ref(const zx_exec *exec, const void *args)
{
    const zx_matmul_args *a = args;
    ZX_TRY(check(a));
    matmul_job job = job_of(a);
    job.plain = ZX_PICK_REF(matmul, a->a.dtype);
    run(exec, &job);
    return ZX_OK;
}
