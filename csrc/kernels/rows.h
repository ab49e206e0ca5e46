/* rows.h - views of equal shape, walked together as rows with one stride each.
 *
 * zx_walk drops dimensions of one element and merges neighbours that lie in memory as one, so that contiguous
 * views become a single row whatever their shape is. Tasks are pieces of about ZX_WALK_TASK elements; what an
 * element-wise operation computes does not depend on the cut.
 */
#ifndef ZX_KERNELS_ROWS_H
#define ZX_KERNELS_ROWS_H

#include "kernels/load.h"

enum { ZX_WALK_VIEWS = 3, ZX_WALK_TASK = 32768 };

typedef struct zx_walk {
    int n_views;
    int n_outer;                                 /* dimensions outside the row */
    int64_t shape[ZX_MAX_DIMS];                  /* of those */
    int64_t stride[ZX_WALK_VIEWS][ZX_MAX_DIMS];  /* of those, in elements */
    int64_t n_rows, row;                         /* rows; elements in each */
    int64_t row_stride[ZX_WALK_VIEWS];           /* along the row, in elements */
    int64_t n_tasks, rows_per_task, row_per_task; /* a task is some whole rows, or a part of one */
    char *data[ZX_WALK_VIEWS];
    size_t elem_bytes[ZX_WALK_VIEWS];
} zx_walk;

/* keep_order: logical (row-major) order is kept; otherwise a long dimension may become the row. */
void zx_walk_init(zx_walk *w, const zx_view *const *views, int n_views, bool keep_order);

/* Address of view i at the start of a row. */
static inline char *zx_walk_row(const zx_walk *w, int i, int64_t row_index)
{
    int64_t at = 0;
    for (int d = w->n_outer - 1; d >= 0; d--) {
        at += row_index % w->shape[d] * w->stride[i][d];
        row_index /= w->shape[d];
    }
    return w->data[i] + at * (int64_t)w->elem_bytes[i];
}

/* A piece of a row: n elements of each view from p[i], stride[i] apart. */
typedef void (*zx_walk_fn)(const void *arg, char *const *p, const int64_t *stride, int64_t n);

void zx_walk_run(const zx_walk *w, zx_pool *pool, zx_walk_fn fn, const void *arg);

#endif
