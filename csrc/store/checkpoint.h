/* checkpoint.h - pure: which bytes of which file go where, when a checkpoint written by one layout is read by another.
 *
 * A piece is a run of elements of a parameter: the box of the parameter that was held, flattened in row-major order,
 * elements [begin, begin + n) of it. Padding is never saved. Files and manifest are the Python side's
 * (zerox.checkpoint). */
#ifndef ZX_STORE_CHECKPOINT_H
#define ZX_STORE_CHECKPOINT_H

#include "store/layout.h"

typedef struct zx_piece {
    int64_t param;        /* index in the layout */
    int32_t range;
    int64_t range_begin;  /* where the run begins in its range, elements */
    int64_t begin, n;     /* the run inside the parameter's box, elements */
} zx_piece;

/* The pieces of rank r's slices, in range order: what that rank saves (and what it needs when it loads). whole: all of
 * every range instead (unsharded values). Ties appear once, under their owner. Two calls: with out == NULL it counts.
 */
int64_t zx_checkpoint_pieces(const zx_layout *layout, int32_t rank, bool whole, zx_piece *out, int64_t n_max);

typedef struct zx_box {
    int32_t ndim;
    int64_t global_shape[ZX_MAX_DIMS], begin[ZX_MAX_DIMS], shape[ZX_MAX_DIMS];
} zx_box;

typedef struct zx_copy_run {
    int64_t src, dst, n; /* elements: from the start of the saved run, from the start of the wanted run */
} zx_copy_run;

/* Elements that a saved run (src_box flattened, [src_begin, +src_n)) shares with a wanted one; runs are maximal and
 * sorted. The boxes are of the same global shape. With out == NULL it counts. */
int64_t zx_checkpoint_overlap(const zx_box *src_box, int64_t src_begin, int64_t src_n, const zx_box *dst_box,
                              int64_t dst_begin, int64_t dst_n, zx_copy_run *out, int64_t n_max);

#endif
