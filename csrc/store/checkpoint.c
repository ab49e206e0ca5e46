/* checkpoint.c - pieces of slices, and what two runs of one tensor have in common.
 *
 * DESIGN of zx_checkpoint_overlap
 * The common part of two boxes is a box. Dimensions from the last one inwards that both boxes hold whole are
 * one contiguous stretch in both flattenings, so the common box is a list of rows, each contiguous in both;
 * two equal boxes, or boxes cut along the first dimension, are a single row. Each row is clipped to the two
 * runs, and rows that follow one another in both are joined.
 */
#include "store/checkpoint.h"

int64_t zx_checkpoint_pieces(const zx_layout *layout, int32_t rank, bool whole, zx_piece *out, int64_t n_max)
{
    int64_t n_pieces = 0;
    for (int32_t r = 0; r < layout->n_ranges; r++) {
        const zx_range *range = &layout->ranges[r];
        int64_t from = whole ? 0 : rank * range->slice, to = whole ? range->n_padded : from + range->slice;
        for (int64_t i = layout->order_begin[r]; i < layout->order_begin[r + 1]; i++) {
            const zx_place *place = &layout->places[layout->order[i]];
            int64_t begin = zx_max64(from, place->offset), end = zx_min64(to, place->offset + place->n);
            if (begin >= end) continue;
            if (out && n_pieces < n_max)
                out[n_pieces] = (zx_piece){.param = layout->order[i],
                                           .range = r,
                                           .range_begin = begin,
                                           .begin = begin - place->offset,
                                           .n = end - begin};
            n_pieces++;
        }
    }
    return n_pieces;
}

typedef struct rows { /* of the common box of two boxes of one tensor */
    int n_outer;      /* dimensions that count rows; the rest lie inside a row */
    int64_t n_rows, row;
    int64_t shape[ZX_MAX_DIMS];                        /* of the common box */
    int64_t src_stride[ZX_MAX_DIMS], dst_stride[ZX_MAX_DIMS];
    int64_t src_first, dst_first; /* flat places of the common box's first element */
} rows;

static rows common_rows(const zx_box *src, const zx_box *dst)
{
    rows r = {.n_outer = src->ndim, .n_rows = 1, .row = 1};
    int64_t src_stride = 1, dst_stride = 1;
    bool inside = true; /* dimensions after d are whole in both boxes */
    for (int d = src->ndim - 1; d >= 0; d--) {
        int64_t begin = zx_max64(src->begin[d], dst->begin[d]);
        int64_t end = zx_min64(src->begin[d] + src->shape[d], dst->begin[d] + dst->shape[d]);
        r.shape[d] = zx_max64(0, end - begin);
        r.src_stride[d] = src_stride;
        r.dst_stride[d] = dst_stride;
        r.src_first += (begin - src->begin[d]) * src_stride;
        r.dst_first += (begin - dst->begin[d]) * dst_stride;
        src_stride *= src->shape[d];
        dst_stride *= dst->shape[d];
        if (inside) {
            r.row *= r.shape[d];
            r.n_outer = d;
            inside = r.shape[d] == src->shape[d] && r.shape[d] == dst->shape[d];
        }
    }
    for (int d = 0; d < r.n_outer; d++)
        r.n_rows *= r.shape[d];
    if (r.row == 0) r.n_rows = 0;
    return r;
}

int64_t zx_checkpoint_overlap(const zx_box *src_box, int64_t src_begin, int64_t src_n, const zx_box *dst_box,
                              int64_t dst_begin, int64_t dst_n, zx_copy_run *out, int64_t n_max)
{
    rows r = common_rows(src_box, dst_box);
    int64_t index[ZX_MAX_DIMS] = {0}, n_runs = 0;
    zx_copy_run last = {0, 0, 0};
    for (int64_t i = 0; i < r.n_rows; i++) {
        int64_t src = r.src_first, dst = r.dst_first;
        for (int d = 0; d < r.n_outer; d++) {
            src += index[d] * r.src_stride[d];
            dst += index[d] * r.dst_stride[d];
        }
        for (int d = r.n_outer - 1; d >= 0 && ++index[d] == r.shape[d]; d--)
            index[d] = 0;
        int64_t from = zx_max64(0, zx_max64(src_begin - src, dst_begin - dst));
        int64_t to = zx_min64(r.row, zx_min64(src_begin + src_n - src, dst_begin + dst_n - dst));
        if (from >= to) continue;
        zx_copy_run run = {src + from - src_begin, dst + from - dst_begin, to - from};
        if (n_runs > 0 && last.src + last.n == run.src && last.dst + last.n == run.dst) {
            last.n += run.n;
        } else {
            last = run;
            n_runs++;
        }
        if (out && n_runs <= n_max) out[n_runs - 1] = last;
    }
    return n_runs;
}
