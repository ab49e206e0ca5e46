/* reduce.h - inside the kernels layer: the pieces that sum, sqnorm and colsum are made of.
 *
 * A sum over n elements is cut into blocks by n alone, at most ZX_REDUCE_BLOCKS; a block is summed in double
 * in ZX_REDUCE_LANES interleaved lanes, lanes and blocks are added up in order. So the bits depend on values
 * and shape.
 */
#ifndef ZX_KERNELS_REDUCE_H
#define ZX_KERNELS_REDUCE_H

#include "kernels/rows.h"

enum { ZX_REDUCE_BLOCKS = 1024, ZX_REDUCE_LANES = 16, ZX_REDUCE_CHUNK = 512, ZX_REDUCE_BLOCK = 4096 };

/* Elements of a block; a multiple of ZX_REDUCE_CHUNK. */
static inline int64_t zx_reduce_block(int64_t n)
{
    return zx_max64(ZX_REDUCE_BLOCK, zx_round_up(zx_ceil_div(n, ZX_REDUCE_BLOCKS), ZX_REDUCE_CHUNK));
}

/* Sum (of the squares) of the logical elements [begin, end) of view 0 of the walk. */
typedef double (*zx_reduce_fn)(const zx_walk *w, zx_dtype t, bool square, int64_t begin, int64_t end);
double zx_reduce_float_plain(const zx_walk *w, zx_dtype t, bool square, int64_t begin, int64_t end);
double zx_reduce_double_plain(const zx_walk *w, zx_dtype t, bool square, int64_t begin, int64_t end);
double zx_reduce_float_avx2(const zx_walk *w, zx_dtype t, bool square, int64_t begin, int64_t end);

/* acc[c] += x[r][c] * y[r][c] over rows [row, row + n_rows) in order, c in [col, col + n_cols), n_cols at
 * most ZX_REDUCE_CHUNK. y may be NULL. */
typedef void (*zx_colsum_fn)(const zx_view *x, const zx_view *y, int64_t row, int64_t n_rows, int64_t col,
                             int64_t n_cols, double *acc);
void zx_colsum_rows_float_plain(const zx_view *x, const zx_view *y, int64_t row, int64_t n_rows, int64_t col,
                                int64_t n_cols, double *acc);
void zx_colsum_rows_double_plain(const zx_view *x, const zx_view *y, int64_t row, int64_t n_rows, int64_t col,
                                 int64_t n_cols, double *acc);
void zx_colsum_rows_float_avx2(const zx_view *x, const zx_view *y, int64_t row, int64_t n_rows, int64_t col,
                               int64_t n_cols, double *acc);

/* Index of the first element in [begin, end) that is infinite or NaN, or -1. */
typedef int64_t (*zx_finite_fn)(const void *x, zx_dtype t, int64_t begin, int64_t end);
int64_t zx_finite_float_plain(const void *x, zx_dtype t, int64_t begin, int64_t end);
int64_t zx_finite_float_avx2(const void *x, zx_dtype t, int64_t begin, int64_t end);

#endif
