/* attention.c - launchers of attention_fwd and attention_bwd on the CPU.
 *
 * Forward: one task per tile of queries and head. Backward, plain: one task per tile of queries and head for dq, one
 * per tile of keys and key/value head for dk and dv; tiled (attention_avx2.c): one per document and key/value head.
 * Every output element has one task that sums it in an order of its own, so results do not depend on the number of
 * threads. */
#include "kernels/attention.h"

#include "kernels/launch.h"
#include "kernels/load.h"
#include "kernels/vmath.h"

enum { ATTN_KEYS = 64 }; /* keys of a step of the online softmax */

#define ZX_BODY "kernels/attention.ref.h"
#include "kernels/instances.h"

typedef void (*fwd_fn)(const zx_attention_fwd_args *a, const zx_attn_tile *tile, int64_t head);
typedef void (*bwd_fn)(const zx_attention_bwd_args *a, const zx_attn_tile *tile, int64_t head);

/* The tiled path needs AVX2 and a BLAS, float arithmetic, and at least one head and channel. */
static bool is_tiled(const zx_exec *exec, const zx_view *q)
{
    return exec->isa >= ZX_ISA_AVX2 && exec->gemm && (q->dtype == ZX_F32 || q->dtype == ZX_BF16) && q->shape[1] > 0 &&
           q->shape[2] > 0;
}

#if defined(__x86_64__)
static const zx_attn_softmax *softmax_of(const zx_exec *exec)
{
    return exec->isa >= ZX_ISA_AVX512 ? &zx_attn_softmax_avx512 : &zx_attn_softmax_avx2;
}

static size_t worker_bytes(zx_dtype dtype, int64_t n_floats)
{
    return dtype == ZX_F64 ? 0 : (size_t)zx_round_up(n_floats, 16) * sizeof(float);
}
#endif

/* ---- documents ---------------------------------------------------------------------------------------- */

/* Fills `tiles` from the documents, cut every tile_rows rows; outputs how many, and the rows [*used_begin, *used_end)
 * that belong to any. */
static zx_status list_tiles(const char *op, const zx_docs *docs, int64_t n_rows, int64_t tile_rows, zx_attn_tile *tiles,
                            int64_t *n_tiles, int64_t *used_begin, int64_t *used_end)
{
    *n_tiles = *used_begin = *used_end = 0;
    if (docs->n_docs == 0) return ZX_OK;
    const int32_t *cu = docs->cu_seqlens;
    if (cu[0] < 0) ZX_FAIL(ZX_ERR_ARG, "%s: the first document begins at row %d, which is negative", op, (int)cu[0]);
    for (int64_t d = 0; d < docs->n_docs; d++) {
        int64_t len = (int64_t)cu[d + 1] - cu[d];
        if (len < 0 || cu[d + 1] > n_rows || len > docs->max_len)
            ZX_FAIL(ZX_ERR_ARG,
                    "%s: document %lld holds rows [%d, %d): offsets must not fall, must stay within %lld rows, and "
                    "no document may be longer than max_len %lld",
                    op, (long long)d, (int)cu[d], (int)cu[d + 1], (long long)n_rows, (long long)docs->max_len);
        for (int64_t first = 0; first < len; first += tile_rows)
            tiles[(*n_tiles)++] =
                (zx_attn_tile){cu[d], (int32_t)len, (int32_t)first, (int32_t)zx_min64(tile_rows, len - first)};
    }
    *used_begin = cu[0];
    *used_end = cu[docs->n_docs];
    return ZX_OK;
}

static void zero_rows(const zx_view *v, int64_t begin, int64_t end)
{
    for (int64_t row = begin; row < end; row++)
        for (int64_t head = 0; head < v->shape[1]; head++)
            memset(zx_at(v->data, v->dtype, zx_attn_at(v, row, head)), 0,
                   (size_t)v->shape[2] * zx_dtype_bytes(v->dtype));
}

static void empty_lse(const zx_view *lse, int64_t begin, int64_t end)
{
    for (int64_t head = 0; head < lse->shape[0]; head++)
        for (int64_t row = begin; row < end; row++) {
            int64_t at = head * lse->stride[0] + row;
            if (lse->dtype == ZX_F64)
                zx_store_f64(lse->data, at, -INFINITY);
            else
                zx_store_f32(lse->data, at, -INFINITY);
        }
}

/* Room for the most tiles that n_rows rows can have in these documents. */
static size_t tiles_bytes(int64_t n_rows, const zx_docs *docs)
{
    int64_t n = n_rows / ZX_ATTN_ROWS + zx_min64(n_rows, docs->n_docs);
    return (size_t)zx_round_up(n * (int64_t)sizeof(zx_attn_tile), 64);
}

/* ---- checks ------------------------------------------------------------------------------------------- */

static zx_status check_heads(const char *op, const char *name, const zx_view *v, const zx_view *q)
{
    ZX_TRY(zx_check_ndim(op, name, v, 3));
    ZX_TRY(zx_check_float(op, name, v->dtype));
    ZX_TRY(zx_check_dtype(op, name, v->dtype, q->dtype));
    ZX_TRY(zx_check_rows(op, name, v));
    ZX_TRY(zx_check_dim(op, name, v, 0, q->shape[0]));
    return zx_check_dim(op, name, v, 2, q->shape[2]);
}

static zx_status check(const char *op, const zx_view *q, const zx_view *k, const zx_view *v, const zx_view *out,
                       const zx_view *lse, const zx_docs *docs)
{
    ZX_TRY(check_heads(op, "q", q, q));
    ZX_TRY(check_heads(op, "k", k, q));
    ZX_TRY(check_heads(op, "v", v, q));
    ZX_TRY(check_heads(op, "out", out, q));
    ZX_TRY(zx_check_dim(op, "v", v, 1, k->shape[1]));
    ZX_TRY(zx_check_dim(op, "out", out, 1, q->shape[1]));
    if (q->shape[1] > 0 && (k->shape[1] == 0 || q->shape[1] % k->shape[1] != 0))
        ZX_FAIL(ZX_ERR_ARG, "%s: %lld query heads cannot share %lld key heads evenly", op, (long long)q->shape[1],
                (long long)k->shape[1]);
    if (q->shape[2] > ZX_ATTN_MAX_DIM)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s: the head dimension is %lld, at most %d is supported", op,
                (long long)q->shape[2], ZX_ATTN_MAX_DIM);
    if (q->shape[0] > INT32_MAX)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s: %lld rows, offsets of documents are 32-bit", op, (long long)q->shape[0]);
    ZX_TRY(zx_check_ndim(op, "lse", lse, 2));
    ZX_TRY(zx_check_dtype(op, "lse", lse->dtype, zx_dtype_sum(q->dtype)));
    ZX_TRY(zx_check_rows(op, "lse", lse));
    ZX_TRY(zx_check_dim(op, "lse", lse, 0, q->shape[1]));
    ZX_TRY(zx_check_dim(op, "lse", lse, 1, q->shape[0]));
    if (docs->n_docs < 0 || docs->max_len < 0 || (docs->n_docs > 0 && !docs->cu_seqlens))
        ZX_FAIL(ZX_ERR_ARG, "%s: n_docs %lld, max_len %lld, cu_seqlens %s", op, (long long)docs->n_docs,
                (long long)docs->max_len, docs->cu_seqlens ? "given" : "NULL");
    return ZX_OK;
}

/* ---- forward ------------------------------------------------------------------------------------------ */

typedef struct fwd_job {
    const zx_attention_fwd_args *a;
    fwd_fn plain; /* NULL: tiled */
    const zx_exec *exec;
    const zx_attn_tile *tiles;
    char *scratch;
    size_t worker_bytes;
} fwd_job;

static void fwd_task(void *arg, int64_t index, int worker)
{
    const fwd_job *job = arg;
    int64_t n_heads = job->a->q.shape[1], head = index % n_heads;
    const zx_attn_tile *tile = &job->tiles[index / n_heads];
#if defined(__x86_64__)
    if (!job->plain) {
        void *scratch = job->scratch + (size_t)worker * job->worker_bytes;
        zx_attn_fwd_tiled(job->a, job->exec->gemm, softmax_of(job->exec), tile, head, scratch);
        return;
    }
#endif
    (void)worker;
    job->plain(job->a, tile, head);
}

static zx_status launch_fwd(const zx_exec *exec, const zx_attention_fwd_args *a, fwd_fn plain, size_t worker_bytes)
{
    const int64_t n_rows = a->q.shape[0];
    const size_t list_bytes = tiles_bytes(n_rows, &a->docs);
    int64_t n_tiles, used_begin, used_end;
    ZX_TRY(zx_check_scratch("attention_fwd", exec, list_bytes + worker_bytes * (size_t)zx_pool_n_threads(exec->pool)));
    ZX_TRY(
        list_tiles("attention_fwd", &a->docs, n_rows, ZX_ATTN_ROWS, exec->scratch, &n_tiles, &used_begin, &used_end));
    zero_rows(&a->out, 0, used_begin);
    zero_rows(&a->out, used_end, n_rows);
    empty_lse(&a->lse, 0, used_begin);
    empty_lse(&a->lse, used_end, n_rows);
    fwd_job job = {a, plain, exec, exec->scratch, (char *)exec->scratch + list_bytes, worker_bytes};
    zx_pool_run(exec->pool, fwd_task, &job, n_tiles * a->q.shape[1]);
    return ZX_OK;
}

static zx_status check_fwd(const zx_attention_fwd_args *a)
{
    static const char op[] = "attention_fwd";
    ZX_TRY(check(op, &a->q, &a->k, &a->v, &a->out, &a->lse, &a->docs));
    ZX_TRY(zx_check_out(op, "out", &a->out));
    return zx_check_out(op, "lse", &a->lse);
}

static size_t fwd_worker_bytes(const zx_attention_fwd_args *a)
{
#if defined(__x86_64__)
    return worker_bytes(a->q.dtype, zx_attn_fwd_tiled_floats(a));
#else
    (void)a;
    return 0;
#endif
}

zx_status zx_attention_fwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_attention_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    if (is_tiled(exec, &a->q)) return launch_fwd(exec, a, NULL, fwd_worker_bytes(a));
    return launch_fwd(exec, a, ZX_PICK_CPU(attn_fwd, a->q.dtype), 0);
}

zx_status zx_attention_fwd_ref(const zx_exec *exec, const void *args)
{
    const zx_attention_fwd_args *a = args;
    ZX_TRY(check_fwd(a));
    return launch_fwd(exec, a, ZX_PICK_REF(attn_fwd, a->q.dtype), 0);
}

size_t zx_attention_fwd_cpu_scratch(const void *args, int n_threads)
{
    const zx_attention_fwd_args *a = args;
    return tiles_bytes(a->q.shape[0], &a->docs) + fwd_worker_bytes(a) * (size_t)n_threads;
}

size_t zx_attention_fwd_ref_scratch(const void *args, int n_threads)
{
    (void)n_threads;
    const zx_attention_fwd_args *a = args;
    return tiles_bytes(a->q.shape[0], &a->docs);
}

/* ---- backward ----------------------------------------------------------------------------------------- */

typedef struct bwd_job {
    const zx_attention_bwd_args *a;
    bwd_fn plain_q, plain_kv; /* NULL: tiled */
    const zx_exec *exec;
    const zx_attn_tile *tiles;
    int64_t n_q_tasks;
    char *scratch;
    size_t worker_bytes;
} bwd_job;

static void bwd_plain_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const bwd_job *job = arg;
    int64_t n_heads = job->a->q.shape[1], n_kv = job->a->k.shape[1];
    if (index < job->n_q_tasks)
        job->plain_q(job->a, &job->tiles[index / n_heads], index % n_heads);
    else
        job->plain_kv(job->a, &job->tiles[(index - job->n_q_tasks) / n_kv], (index - job->n_q_tasks) % n_kv);
}

#if defined(__x86_64__)
static void bwd_tiled_task(void *arg, int64_t index, int worker)
{
    const bwd_job *job = arg;
    int64_t n_kv = job->a->k.shape[1];
    void *scratch = job->scratch + (size_t)worker * job->worker_bytes;
    zx_attn_bwd_tiled(job->a, job->exec->gemm, softmax_of(job->exec), &job->tiles[index / n_kv], index % n_kv, scratch);
}
#endif

static zx_status launch_bwd(const zx_exec *exec, const zx_attention_bwd_args *a, bwd_fn plain_q, bwd_fn plain_kv,
                            size_t worker_bytes)
{
    const int64_t n_rows = a->q.shape[0], n_kv = a->k.shape[1];
    const size_t list_bytes = tiles_bytes(n_rows, &a->docs);
    int64_t n_tiles, used_begin, used_end;
    ZX_TRY(zx_check_scratch("attention_bwd", exec, list_bytes + worker_bytes * (size_t)zx_pool_n_threads(exec->pool)));
    ZX_TRY(list_tiles("attention_bwd", &a->docs, n_rows, plain_q ? ZX_ATTN_ROWS : INT32_MAX, exec->scratch, &n_tiles,
                      &used_begin, &used_end));
    const zx_view *outs[] = {&a->dq, &a->dk, &a->dv};
    for (int i = 0; i < 3; i++) {
        zero_rows(outs[i], 0, used_begin);
        zero_rows(outs[i], used_end, n_rows);
    }
    bwd_job job = {.a = a,
                   .plain_q = plain_q,
                   .plain_kv = plain_kv,
                   .exec = exec,
                   .tiles = exec->scratch,
                   .n_q_tasks = n_tiles * a->q.shape[1],
                   .scratch = (char *)exec->scratch + list_bytes,
                   .worker_bytes = worker_bytes};
#if defined(__x86_64__)
    if (!plain_q) {
        zx_pool_run(exec->pool, bwd_tiled_task, &job, n_tiles * n_kv);
        return ZX_OK;
    }
#endif
    zx_pool_run(exec->pool, bwd_plain_task, &job, job.n_q_tasks + n_tiles * n_kv);
    return ZX_OK;
}

static zx_status check_bwd(const zx_attention_bwd_args *a)
{
    static const char op[] = "attention_bwd";
    ZX_TRY(check(op, &a->q, &a->k, &a->v, &a->out, &a->lse, &a->docs));
    ZX_TRY(check_heads(op, "dout", &a->dout, &a->q));
    ZX_TRY(zx_check_dim(op, "dout", &a->dout, 1, a->q.shape[1]));
    const zx_view *outs[] = {&a->dq, &a->dk, &a->dv}, *likes[] = {&a->q, &a->k, &a->k};
    static const char *const names[] = {"dq", "dk", "dv"};
    for (int i = 0; i < 3; i++) {
        ZX_TRY(check_heads(op, names[i], outs[i], &a->q));
        ZX_TRY(zx_check_dim(op, names[i], outs[i], 1, likes[i]->shape[1]));
        ZX_TRY(zx_check_out(op, names[i], outs[i]));
    }
    return ZX_OK;
}

static size_t bwd_worker_bytes(const zx_attention_bwd_args *a)
{
#if defined(__x86_64__)
    return worker_bytes(a->q.dtype, zx_attn_bwd_tiled_floats(a));
#else
    (void)a;
    return 0;
#endif
}

zx_status zx_attention_bwd_cpu(const zx_exec *exec, const void *args)
{
    const zx_attention_bwd_args *a = args;
    ZX_TRY(check_bwd(a));
    if (is_tiled(exec, &a->q)) return launch_bwd(exec, a, NULL, NULL, bwd_worker_bytes(a));
    return launch_bwd(exec, a, ZX_PICK_CPU(attn_bwd_q, a->q.dtype), ZX_PICK_CPU(attn_bwd_kv, a->q.dtype), 0);
}

zx_status zx_attention_bwd_ref(const zx_exec *exec, const void *args)
{
    const zx_attention_bwd_args *a = args;
    ZX_TRY(check_bwd(a));
    return launch_bwd(exec, a, ZX_PICK_REF(attn_bwd_q, a->q.dtype), ZX_PICK_REF(attn_bwd_kv, a->q.dtype), 0);
}

size_t zx_attention_bwd_cpu_scratch(const void *args, int n_threads)
{
    const zx_attention_bwd_args *a = args;
    return tiles_bytes(a->q.shape[0], &a->docs) + bwd_worker_bytes(a) * (size_t)n_threads;
}

size_t zx_attention_bwd_ref_scratch(const void *args, int n_threads)
{
    (void)n_threads;
    const zx_attention_bwd_args *a = args;
    return tiles_bytes(a->q.shape[0], &a->docs);
}
