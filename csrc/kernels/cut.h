/* cut.h - how elementwise and row-wise kernels cut their work: by the shapes alone. */
#ifndef ZX_KERNELS_CUT_H
#define ZX_KERNELS_CUT_H

#include "kernels/types.h"

enum { ZX_CUT_ELEMENTS = 16384 }; /* a task: long enough to hide the pool's cost, short enough to share evenly */

/* Rows in a task, for rows of n_cols elements that cannot be cut. */
static inline int64_t zx_cut_rows(int64_t n_cols)
{
    return zx_max64(1, ZX_CUT_ELEMENTS / zx_max64(1, n_cols));
}

/* A (N,C) elementwise pass as pieces of rows. Each of n_pieces pieces lies in one row of every view; contiguous views
 * are one row. */
typedef struct zx_pieces {
    int64_t n_rows, n_cols;
    int64_t per_row; /* pieces in a row */
    int64_t width;   /* of a piece; the last one of a row may be shorter */
    int64_t n_pieces;
} zx_pieces;

static inline zx_pieces zx_pieces_cut(int64_t n_rows, int64_t n_cols, bool contiguous)
{
    zx_pieces p = {.n_rows = n_rows, .n_cols = n_cols, .width = ZX_CUT_ELEMENTS};
    if (contiguous) {
        p.n_cols = n_rows * n_cols;
        p.n_rows = p.n_cols > 0;
    }
    p.per_row = zx_ceil_div(p.n_cols, p.width);
    p.n_pieces = p.n_rows * p.per_row;
    return p;
}

/* Pieces of a task: several short rows together. */
static inline int64_t zx_pieces_per_task(const zx_pieces *p)
{
    return zx_max64(1, ZX_CUT_ELEMENTS / zx_max64(1, zx_min64(p->width, p->n_cols)));
}

static inline bool zx_view_2d_contiguous(const zx_view *v)
{
    return v->shape[0] <= 1 || v->stride[0] == v->shape[1];
}

#endif
