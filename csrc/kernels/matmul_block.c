/* matmul_block.c - how a product is cut into blocks: a pure function of its shape. */
#include "kernels/kernels.h"

enum {
    MIN_BLOCKS = 8,   /* so that up to 8 threads share a product evenly */
    MIN_SIDE = 64,    /* blocks smaller than this lose too much to packing */
    MAX_SIDE = 1024,
    STEP = 32         /* sides are multiples of the register tiles of the usual BLAS kernels */
};

/* The sides of a block are halved, the longer one first, until there are enough blocks. */
void zx_matmul_block(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, int64_t *block_m,
                     int64_t *block_n) {
    (void)k;
    (void)trans_a;
    (void)trans_b;
    int64_t bm = zx_max64(1, zx_min64(m, MAX_SIDE)), bn = zx_max64(1, zx_min64(n, MAX_SIDE));
    while (zx_ceil_div(m, bm) * zx_ceil_div(n, bn) < MIN_BLOCKS) {
        bool cut_m = bm >= bn;
        int64_t side = cut_m ? bm : bn;
        if (side < 2 * MIN_SIDE) break;
        side = zx_round_up(zx_ceil_div(side, 2), STEP);
        *(cut_m ? &bm : &bn) = side;
    }
    *block_m = bm;
    *block_n = bn;
}
