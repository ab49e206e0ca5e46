/* rows.c - see rows.h. */
#include "kernels/rows.h"

void zx_walk_init(zx_walk *w, const zx_view *const *views, int n_views, bool keep_order)
{
    *w = (zx_walk){.n_views = n_views, .n_rows = 1, .row = 1};
    const zx_view *like = views[0];
    for (int i = 0; i < n_views; i++) {
        w->data[i] = views[i]->data;
        w->elem_bytes[i] = zx_dtype_bytes(views[i]->dtype);
    }
    /* Merged dimensions, outermost first, in w->shape and w->stride; the last becomes the row. */
    int n = 0;
    for (int d = 0; d < like->ndim; d++) {
        if (like->shape[d] == 1) continue;
        bool merges = n > 0;
        for (int i = 0; merges && i < n_views; i++)
            merges = w->stride[i][n - 1] == views[i]->stride[d] * like->shape[d];
        if (merges) {
            w->shape[n - 1] *= like->shape[d];
        } else {
            w->shape[n++] = like->shape[d];
        }
        for (int i = 0; i < n_views; i++)
            w->stride[i][n - 1] = views[i]->stride[d];
    }
    int inner = n - 1;
    if (!keep_order && n > 1 && w->shape[inner] < 16)
        for (int d = n - 2; d >= 0; d--)
            if (w->shape[d] > 4 * w->shape[inner]) inner = d;
    if (n > 0) {
        w->row = w->shape[inner];
        for (int i = 0; i < n_views; i++)
            w->row_stride[i] = w->stride[i][inner];
        for (int d = inner; d + 1 < n; d++) {
            w->shape[d] = w->shape[d + 1];
            for (int i = 0; i < n_views; i++)
                w->stride[i][d] = w->stride[i][d + 1];
        }
        w->n_outer = n - 1;
    }
    for (int d = 0; d < w->n_outer; d++)
        w->n_rows *= w->shape[d];
    if (w->row == 0 || w->n_rows == 0) {
        w->row = w->n_rows = w->n_tasks = 0;
        return;
    }
    w->rows_per_task = zx_max64(1, ZX_WALK_TASK / w->row);
    w->row_per_task = zx_min64(w->row, ZX_WALK_TASK);
    w->n_tasks = zx_ceil_div(w->n_rows, w->rows_per_task) * zx_ceil_div(w->row, w->row_per_task);
}

typedef struct walk_job {
    const zx_walk *walk;
    zx_walk_fn fn;
    const void *arg;
} walk_job;

static void walk_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const walk_job *job = arg;
    const zx_walk *w = job->walk;
    int64_t pieces = zx_ceil_div(w->row, w->row_per_task);
    int64_t begin = index % pieces * w->row_per_task;
    int64_t n = zx_min64(w->row - begin, w->row_per_task);
    int64_t first = index / pieces * w->rows_per_task;
    int64_t last = zx_min64(w->n_rows, first + w->rows_per_task);
    for (int64_t r = first; r < last; r++) {
        char *p[ZX_WALK_VIEWS];
        for (int i = 0; i < w->n_views; i++)
            p[i] = zx_walk_row(w, i, r) + begin * w->row_stride[i] * (int64_t)w->elem_bytes[i];
        job->fn(job->arg, p, w->row_stride, n);
    }
}

void zx_walk_run(const zx_walk *w, zx_pool *pool, zx_walk_fn fn, const void *arg)
{
    walk_job job = {w, fn, arg};
    zx_pool_run(pool, walk_task, &job, w->n_tasks);
}
