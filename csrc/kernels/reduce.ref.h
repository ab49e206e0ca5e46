/* reduce.ref.h - sums in double over elements that are read as REAL; see reduce.h. */
#include "kernels/rows.ref.h"

/* Lane i % ZX_REDUCE_LANES takes element i; n is at most a chunk. */
static inline void ZX_INST(add_chunk)(const REAL *restrict x, int64_t n, bool square, double *restrict lanes)
{
    double acc[ZX_REDUCE_LANES];
    for (int l = 0; l < ZX_REDUCE_LANES; l++)
        acc[l] = lanes[l];
    int64_t whole = n - n % ZX_REDUCE_LANES;
    if (square) {
        for (int64_t i = 0; i < whole; i += ZX_REDUCE_LANES)
            for (int l = 0; l < ZX_REDUCE_LANES; l++)
                acc[l] += (double)x[i + l] * (double)x[i + l];
    } else {
        for (int64_t i = 0; i < whole; i += ZX_REDUCE_LANES)
            for (int l = 0; l < ZX_REDUCE_LANES; l++)
                acc[l] += (double)x[i + l];
    }
    for (int64_t i = whole; i < n; i++)
        acc[i - whole] += square ? (double)x[i] * (double)x[i] : (double)x[i];
    for (int l = 0; l < ZX_REDUCE_LANES; l++)
        lanes[l] = acc[l];
}

double ZX_INST(zx_reduce)(const zx_walk *w, zx_dtype t, bool square, int64_t begin, int64_t end)
{
    double lanes[ZX_REDUCE_LANES] = {0};
    REAL buffer[ZX_REDUCE_CHUNK];
    bool dense = t == ZX_INST(real_dtype)() && w->row_stride[0] == 1;
    for (int64_t at = begin; at < end;) {
        int64_t n = zx_min64(end - at, ZX_REDUCE_CHUNK);
        const REAL *chunk = buffer;
        for (int64_t filled = 0; filled < n;) {
            int64_t row = (at + filled) / w->row, col = (at + filled) % w->row;
            int64_t piece = zx_min64(n - filled, w->row - col);
            char *p = zx_walk_row(w, 0, row) + col * w->row_stride[0] * (int64_t)zx_dtype_bytes(t);
            if (dense && piece == n)
                chunk = (const REAL *)(void *)p;
            else
                ZX_INST(get_row)(t, p, w->row_stride[0], piece, buffer + filled);
            filled += piece;
        }
        ZX_INST(add_chunk)(chunk, n, square, lanes);
        at += n;
    }
    double sum = 0;
    for (int l = 0; l < ZX_REDUCE_LANES; l++)
        sum += lanes[l];
    return sum;
}

void ZX_INST(zx_colsum_rows)(const zx_view *x, const zx_view *y, int64_t row, int64_t n_rows, int64_t col,
                             int64_t n_cols, double *restrict acc)
{
    REAL x_buffer[ZX_REDUCE_CHUNK], y_buffer[ZX_REDUCE_CHUNK];
    const zx_view *views[2] = {x, y};
    REAL *buffers[2] = {x_buffer, y_buffer};
    for (int64_t r = row; r < row + n_rows; r++) {
        const REAL *at[2] = {NULL, NULL};
        for (int v = 0; v < (y ? 2 : 1); v++) {
            const zx_view *view = views[v];
            const void *p = zx_at(view->data, view->dtype, r * view->stride[0] + col * view->stride[1]);
            if (view->dtype == ZX_INST(real_dtype)() && view->stride[1] == 1) {
                at[v] = p;
            } else {
                ZX_INST(get_row)(view->dtype, p, view->stride[1], n_cols, buffers[v]);
                at[v] = buffers[v];
            }
        }
        const REAL *restrict a = at[0], *restrict b = at[1];
        if (y)
            for (int64_t c = 0; c < n_cols; c++)
                acc[c] += (double)a[c] * (double)b[c];
        else
            for (int64_t c = 0; c < n_cols; c++)
                acc[c] += (double)a[c];
    }
}

#ifdef ZX_REDUCE_FINITE
/* Infinities and NaNs have all exponent bits set. Looks at a chunk as a whole before it looks for the place.
 */
#define ZX_FINITE_SCAN(type, mask)                                                                                     \
    do {                                                                                                               \
        const type *bits = x;                                                                                          \
        for (int64_t at = begin; at < end; at += ZX_REDUCE_CHUNK) {                                                    \
            int64_t stop = zx_min64(end, at + ZX_REDUCE_CHUNK);                                                        \
            type found = 0;                                                                                            \
            for (int64_t i = at; i < stop; i++)                                                                        \
                found |= (type) - ((bits[i] & (mask)) == (mask));                                                      \
            for (int64_t i = at; found && i < stop; i++)                                                               \
                if ((bits[i] & (mask)) == (mask)) return i;                                                            \
        }                                                                                                              \
        return -1;                                                                                                     \
    } while (0)

int64_t ZX_INST(zx_finite)(const void *x, zx_dtype t, int64_t begin, int64_t end)
{
    if (t == ZX_F32) ZX_FINITE_SCAN(uint32_t, 0x7f800000u);
    if (t == ZX_BF16) ZX_FINITE_SCAN(uint16_t, 0x7f80u);
    ZX_FINITE_SCAN(uint64_t, 0x7ff0000000000000ull);
}
#undef ZX_FINITE_SCAN
#endif
