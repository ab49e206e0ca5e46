/* Pieces of slices and overlaps of runs, against brute force over every element. */
#include <stdlib.h>

#include "check.h"
#include "store/checkpoint.h"

static uint64_t rng_state;

static int64_t rnd(int64_t n)
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((rng_state >> 33) % (uint64_t)n);
}

enum { MAX_PARAMS = 10, MAX_ELEMS = 2048, MAX_RUNS = 512 };
static const char *const names[MAX_PARAMS] = {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"};

/* Over all ranks, and in the whole, each element of each owner appears exactly once, at its place. */
static void test_pieces_cover(void)
{
    for (int round = 0; round < 300; round++) {
        zx_param params[MAX_PARAMS] = {{0}};
        int64_t n = rnd(MAX_PARAMS + 1);
        int32_t world = 1 + (int32_t)rnd(8);
        for (int64_t i = 0; i < n; i++) {
            params[i] = (zx_param){.name = names[i],
                                   .unit = (int32_t)rnd(3),
                                   .dtype = (zx_dtype)rnd(2),
                                   .tied_to = -1,
                                   .trainable = rnd(2) == 0,
                                   .ndim = 1};
            params[i].shape[0] = params[i].global_shape[0] = rnd(5) == 0 ? 0 : rnd(MAX_ELEMS);
            if (i > 0 && params[0].unit == 0 && rnd(6) == 0) {
                params[i] = params[0];
                params[i].name = names[i];
                params[i].tied_to = 0;
            }
        }
        zx_layout *l;
        CHECK_OR_RETURN(CHECK_OK(zx_layout_open(params, n, names, 3, world, 4096, &l)));
        for (int whole = 0; whole < 2; whole++) {
            uint8_t *seen = calloc((size_t)(MAX_PARAMS * MAX_ELEMS), 1);
            for (int32_t rank = 0; rank < (whole ? 1 : world); rank++) {
                zx_piece pieces[MAX_PARAMS];
                int64_t n_pieces = zx_checkpoint_pieces(l, rank, whole, NULL, 0);
                CHECK(n_pieces <= MAX_PARAMS);
                CHECK_EQ_I64(zx_checkpoint_pieces(l, rank, whole, pieces, MAX_PARAMS), n_pieces);
                for (int64_t k = 0; k < n_pieces; k++) {
                    const zx_piece *q = &pieces[k];
                    const zx_range *range = &l->ranges[q->range];
                    CHECK(q->n > 0 && l->params[q->param].tied_to < 0);
                    CHECK_EQ_I64(q->range_begin, l->places[q->param].offset + q->begin);
                    CHECK(whole || (q->range_begin >= rank * range->slice &&
                                    q->range_begin + q->n <= (rank + 1) * range->slice));
                    CHECK(k == 0 || pieces[k - 1].range < q->range ||
                          (pieces[k - 1].range == q->range && pieces[k - 1].range_begin < q->range_begin));
                    for (int64_t j = q->begin; j < q->begin + q->n; j++)
                        seen[q->param * MAX_ELEMS + j]++;
                }
            }
            bool once = true;
            for (int64_t i = 0; i < n; i++)
                for (int64_t j = 0; j < MAX_ELEMS; j++)
                    once &= seen[i * MAX_ELEMS + j] == (params[i].tied_to < 0 && j < params[i].shape[0]);
            CHECK(once);
            free(seen);
        }
        zx_layout_close(l);
    }
}

/* The place in the whole tensor of element i of a box. */
static int64_t global_of(const zx_box *b, int64_t i)
{
    int64_t at = 0, stride = 1;
    for (int d = b->ndim - 1; d >= 0; d--) {
        at += (b->begin[d] + i % b->shape[d]) * stride;
        i /= b->shape[d];
        stride *= b->global_shape[d];
    }
    return at;
}

static int64_t box_elems(const zx_box *b)
{
    int64_t n = 1;
    for (int d = 0; d < b->ndim; d++)
        n *= b->shape[d];
    return n;
}

static zx_box random_box(const zx_box *like)
{
    zx_box b = *like;
    for (int d = 0; d < b.ndim; d++) {
        bool whole = rnd(2) == 0;
        b.begin[d] = whole ? 0 : rnd(b.global_shape[d] + 1);
        b.shape[d] = whole ? b.global_shape[d] : rnd(b.global_shape[d] - b.begin[d] + 1);
    }
    return b;
}

static void test_overlap_brute_force(void)
{
    int64_t n_joined = 0, n_many = 0;
    for (int round = 0; round < 20000; round++) {
        zx_box base = {.ndim = (int32_t)rnd(4)};
        int64_t total = 1, src_at[512], n_expected = 0;
        for (int d = 0; d < base.ndim; d++)
            total *= base.global_shape[d] = rnd(12) ? 1 + rnd(6) : 0;
        zx_box src = random_box(&base), dst = random_box(&base);
        int64_t n_src = box_elems(&src), n_dst = box_elems(&dst);
        int64_t src_begin = rnd(n_src + 1), src_n = rnd(n_src - src_begin + 1);
        int64_t dst_begin = rnd(n_dst + 1), dst_n = rnd(n_dst - dst_begin + 1);
        if (rnd(3) > 0) src_begin = 0, src_n = n_src;
        if (rnd(3) > 0) dst_begin = 0, dst_n = n_dst;
        for (int64_t g = 0; g < total; g++)
            src_at[g] = -1;
        for (int64_t i = 0; i < src_n; i++)
            src_at[global_of(&src, src_begin + i)] = i;
        zx_copy_run want[MAX_RUNS], got[MAX_RUNS];
        for (int64_t i = 0; i < dst_n; i++) { /* maximal runs, in order of the destination */
            int64_t from = src_at[global_of(&dst, dst_begin + i)];
            if (from < 0) continue;
            zx_copy_run *last = n_expected > 0 ? &want[n_expected - 1] : NULL;
            if (last && last->src + last->n == from && last->dst + last->n == i)
                last->n++;
            else
                want[n_expected++] = (zx_copy_run){from, i, 1};
        }
        CHECK_EQ_I64(zx_checkpoint_overlap(&src, src_begin, src_n, &dst, dst_begin, dst_n, NULL, 0), n_expected);
        CHECK_EQ_I64(zx_checkpoint_overlap(&src, src_begin, src_n, &dst, dst_begin, dst_n, got, MAX_RUNS), n_expected);
        bool same = true;
        for (int64_t i = 0; i < n_expected; i++)
            same &= got[i].src == want[i].src && got[i].dst == want[i].dst && got[i].n == want[i].n;
        CHECK(same);
        n_many += n_expected > 1;
        n_joined += n_expected == 1 && want[0].n > 1;
    }
    CHECK(n_many > 300 && n_joined > 1000);
}

/* Equal boxes of a large matrix are one row, however many rows the matrix has. */
static void test_overlap_large(void)
{
    zx_box b = {.ndim = 2, .global_shape = {1000000, 4096}, .shape = {1000000, 4096}};
    zx_copy_run run;
    int64_t begin = zx_now_ns();
    CHECK_EQ_I64(zx_checkpoint_overlap(&b, 5, 4000000000, &b, 7, 1000, &run, 1), 1);
    CHECK(run.src == 2 && run.dst == 0 && run.n == 1000);
    CHECK(zx_now_ns() - begin < 1000000);
}

int main(void)
{
    rng_state = 99;
    RUN(test_pieces_cover);
    RUN(test_overlap_brute_force);
    RUN(test_overlap_large);
    return check_report();
}
