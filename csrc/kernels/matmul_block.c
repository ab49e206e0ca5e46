/* matmul_block.c - how a product is cut into blocks: a pure function of its shape.
 *
 * DESIGN. A model of what a block costs, fitted to measurements, and a search over even cuts for the one that is
 * cheapest on 1, 2, 4 and 8 threads together. The time of a BLAS call on a block of (bm, bn), one core (Sapphire
 * Rapids, OpenBLAS 0.3.34, 1,585 blocks of the products of GPT steps with C = 192 and 384, all three transposes; see
 * dev/kernels/matmul/notes.md), follows
 *     12.2 ps * bm*bn*k + 0.28..0.39 ns * bm*k + 0.32..0.42 ns * bn*k + 0..0.69 ns * bm*bn + about 2 us
 * within 12 to 14%: arithmetic at 164 GFLOP/s, packing of a and of b, writing of c, the call. Divided by the first
 * figure these are the constants below. With them the shapes of a 10 M GPT step, 2,048 tokens, are cut as
 *     forward      (2048,1152,384) 512 x 576   (2048,384,384) 512 x 384   (2048,1536,384) 512 x 768
 *                  (2048,384,1536) 512 x 384   (2048,256,384) 512 x 256
 *     weights      (1152,384,2048) 288 x 384   (384,384,2048) 192 x 192   (1536,384,2048) 384 x 384
 * that is into 8 blocks, or 4 where packing would cost more than balance gains. */
#include "kernels/kernels.h"

#define PACK 28.0   /* elements of a and b, per k */
#define WRITE 40.0  /* elements of c */
#define CALL 160000.0
#define LARGE 0x1p31 /* multiply-adds */

enum {
    STEP_M = 16, /* sides are multiples of the register tiles of the usual BLAS kernels */
    STEP_N = 32,
    MIN_SIDE = 32,
    MAX_M = 1024, /* a block's panels stay in the cache that the cores share */
    MAX_N = 1536,
    N_CUTS = 16 /* cuts tried in each direction, and blocks over the least number of them */
};

/* Blocks are equal, so t threads take as many rounds as there are blocks for the busiest one. 2 threads count most: it
 * is the default number for two ranks on a small machine. 8 threads count as much as 1 from LARGE on only: 8 blocks
 * cost 4 to 8% more than 4 do, and on 4 threads a smaller product is done in 4 ms anyway. */
static double score(double bm, double bn, double k, int64_t n_blocks, bool large)
{
    const struct {
        int64_t threads;
        double weight;
    } mix[] = {{1, 2}, {2, 4}, {4, 2}, {8, large ? 1 : 0.2}};
    double cost = bm * bn * k + PACK * k * (bm + bn) + WRITE * bm * bn + CALL, sum = 0;
    for (size_t i = 0; i < sizeof mix / sizeof mix[0]; i++)
        sum += mix[i].weight * (double)(mix[i].threads * zx_ceil_div(n_blocks, mix[i].threads));
    return sum * cost;
}

void zx_matmul_block(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, int64_t *block_m, int64_t *block_n)
{
    (void)trans_a; /* the fits of the three transposes differ by less than their scatter */
    (void)trans_b;
    m = zx_max64(1, m);
    n = zx_max64(1, n);
    *block_m = m;
    *block_n = n;
    const int64_t first_m = zx_ceil_div(m, MAX_M), first_n = zx_ceil_div(n, MAX_N);
    const bool large = (double)m * (double)n * (double)k >= LARGE;
    double best = -1;
    for (int64_t cut_m = first_m; cut_m < first_m + N_CUTS; cut_m++) {
        const int64_t bm = cut_m == 1 ? m : zx_round_up(zx_ceil_div(m, cut_m), STEP_M);
        if (cut_m > first_m && bm < MIN_SIDE) break;
        for (int64_t cut_n = first_n; cut_n < first_n + N_CUTS; cut_n++) {
            if (cut_m * cut_n > first_m * first_n * N_CUTS) break;
            const int64_t bn = cut_n == 1 ? n : zx_round_up(zx_ceil_div(n, cut_n), STEP_N);
            if (cut_n > first_n && bn < MIN_SIDE) break;
            double s = score((double)bm, (double)bn, (double)k, zx_ceil_div(m, bm) * zx_ceil_div(n, bn), large);
            if (best >= 0 && s >= best) continue;
            best = s;
            *block_m = bm;
            *block_n = bn;
        }
    }
}
