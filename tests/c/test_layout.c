/* Layout against a naive model: places, ranges, slices, bytes; what it refuses; every allocation failing
 * once. */
#include <stdlib.h>

#include "check.h"
#include "store/slots.h"

static uint64_t rng_state;

static int64_t rnd(int64_t n) /* in [0, n) */
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((rng_state >> 33) % (uint64_t)n);
}

enum { MAX_PARAMS = 24, MAX_UNITS = 5 };

static const char *const unit_names[] = {"root", "b0", "b1", "b2", "b3"};
static char param_names[MAX_PARAMS][16];

static void set_shape(zx_param *p, int ndim, const int64_t *shape)
{
    p->ndim = ndim;
    for (int i = 0; i < ndim; i++)
        p->shape[i] = p->global_shape[i] = shape[i];
}

static zx_param simple(const char *name, int32_t unit, zx_dtype dtype, int64_t n, bool trainable)
{
    zx_param p = {.name = name, .unit = unit, .dtype = dtype, .trainable = trainable, .tied_to = -1};
    set_shape(&p, 1, &n);
    return p;
}

static int64_t random_params(zx_param *params, int32_t n_units)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 5, 7, 31, 64, 127, 255, 256, 257, 1021};
    int64_t n = rnd(MAX_PARAMS + 1);
    for (int64_t i = 0; i < n; i++) {
        snprintf(param_names[i], sizeof param_names[i], "p%d", (int)i);
        int64_t shape[2] = {sizes[rnd(13)], rnd(4)};
        params[i] = (zx_param){.name = param_names[i],
                               .unit = (int32_t)rnd(n_units),
                               .dtype = (zx_dtype)rnd(3), /* F32, BF16, F64 */
                               .trainable = rnd(3) > 0,
                               .group = (int32_t)rnd(3),
                               .reduce_group = rnd(8) == 0,
                               .tied_to = -1};
        set_shape(&params[i], (int)rnd(3), shape);
        if (i > 0 && rnd(5) == 0) { /* a tie: the twin of an earlier one */
            int64_t owner = rnd(i), root = owner;
            while (params[root].tied_to >= 0)
                root = params[root].tied_to;
            int32_t unit = params[root].unit == 0 ? params[i].unit : params[root].unit;
            params[i] = params[owner];
            params[i].name = param_names[i];
            params[i].unit = unit;
            params[i].tied_to = (int32_t)owner;
        }
    }
    return n;
}

static int64_t numel(const zx_param *p)
{
    int64_t n = 1;
    for (int i = 0; i < p->ndim; i++)
        n *= p->shape[i];
    return n;
}

/* Every owner, in index order, at the next multiple of 64 bytes in the range of its key; slices from the end.
 */
static void check_places(const zx_layout *l, const zx_param *params, int64_t n)
{
    int64_t used[MAX_PARAMS] = {0}, total = 0, padded = 0, trainable_padded = 0;
    for (int64_t i = 0; i < n; i++) {
        const zx_param *p = &params[i];
        const zx_place *at = &l->places[i];
        CHECK(strcmp(l->params[i].name, p->name) == 0 && l->params[i].name != p->name);
        if (p->tied_to >= 0) {
            CHECK(memcmp(at, &l->places[p->tied_to], sizeof *at) == 0);
            continue;
        }
        const zx_range *r = &l->ranges[at->range];
        CHECK(r->unit == p->unit && r->dtype == p->dtype && r->trainable == p->trainable &&
              r->reduce_group == p->reduce_group);
        int64_t item = (int64_t)zx_dtype_bytes(p->dtype);
        int64_t want = (used[at->range] * item + 63) / 64 * 64 / item;
        CHECK_EQ_I64(at->offset, want);
        CHECK_EQ_I64(at->n, numel(p));
        if (at->n > 0) used[at->range] = want + at->n;
        total += at->n;
    }
    size_t shard = 0;
    int64_t state = 0, full_state = 0;
    for (int32_t r = 0; r < l->n_ranges; r++) {
        const zx_range *range = &l->ranges[r];
        int64_t slice = (used[r] + l->world - 1) / l->world;
        slice = (slice + 255) / 256 * 256;
        CHECK_EQ_I64(range->n_used, used[r]);
        CHECK_EQ_I64(range->slice, slice);
        CHECK_EQ_I64(range->n_padded, slice * l->world);
        CHECK_EQ_I64(range->shard_offset, shard);
        shard += (size_t)slice * zx_dtype_bytes(range->dtype);
        padded += slice * l->world;
        if (!range->trainable) continue;
        CHECK_EQ_I64(range->state_offset, state);
        CHECK_EQ_I64(range->full_state_offset, full_state);
        state += slice;
        full_state += slice * l->world;
        trainable_padded += slice * l->world;
    }
    CHECK_EQ_I64(l->shard_bytes, shard);
    CHECK_EQ_I64(l->state_elems, state);
    CHECK_EQ_I64(l->full_state_elems, full_state);
    CHECK_EQ_I64(l->n_elems, total);
    CHECK_EQ_I64(l->n_padded, padded);
    CHECK_EQ_I64(l->n_trainable_padded, trainable_padded);
}

static void check_units(const zx_layout *l)
{
    int32_t next = 0;
    for (int32_t u = 0; u < l->n_units; u++) {
        const zx_unit *unit = &l->units[u];
        size_t params = 0, grads = 0;
        bool frozen_seen = false, trainable = false;
        CHECK_EQ_I64(unit->first_range, next);
        for (int32_t r = next; r < next + unit->n_ranges; r++) {
            const zx_range *range = &l->ranges[r];
            CHECK(range->unit == u && !(frozen_seen && range->trainable));
            frozen_seen |= !range->trainable;
            CHECK_EQ_I64(range->param_offset, params);
            params += (size_t)range->n_padded * zx_dtype_bytes(range->dtype);
            for (int32_t q = next; q < r; q++)
                CHECK(l->ranges[q].dtype != range->dtype || l->ranges[q].trainable != range->trainable ||
                      l->ranges[q].reduce_group != range->reduce_group);
            if (!range->trainable) continue;
            CHECK_EQ_I64(range->grad_offset, grads);
            grads += (size_t)range->n_padded * (range->dtype == ZX_F64 ? 8 : 4);
            trainable |= range->n_used > 0;
        }
        next += unit->n_ranges;
        CHECK_EQ_I64(unit->param_bytes, (params + l->granule - 1) / l->granule * l->granule);
        CHECK_EQ_I64(unit->grad_bytes, (grads + l->granule - 1) / l->granule * l->granule);
        CHECK(unit->trainable == trainable);
    }
    CHECK_EQ_I64(l->n_ranges, next);
    for (int32_t r = 0; r < l->n_ranges; r++)
        for (int64_t i = l->order_begin[r]; i < l->order_begin[r + 1]; i++) {
            const zx_place *at = &l->places[l->order[i]];
            CHECK(at->range == r && l->params[l->order[i]].tied_to < 0);
            if (i > l->order_begin[r]) CHECK(l->order[i] > l->order[i - 1]);
        }
}

static void test_random_layouts(void)
{
    static const int32_t worlds[] = {1, 2, 3, 4, 8};
    for (int round = 0; round < 400; round++) {
        zx_param params[MAX_PARAMS];
        int32_t n_units = 1 + (int32_t)rnd(MAX_UNITS), world = worlds[round % 5];
        int64_t n = random_params(params, n_units);
        zx_layout *l;
        CHECK_OR_RETURN(CHECK_OK(zx_layout_open(params, n, unit_names, n_units, world, 4096, &l)));
        check_places(l, params, n);
        check_units(l);
        zx_layout_close(l);
    }
}

/* Four units of 3 x 4096 elements, no padding anywhere: the table of persistent bytes, written out. */
static void test_formulas(void)
{
    zx_param params[8];
    for (int i = 0; i < 8; i++) {
        snprintf(param_names[i], sizeof param_names[i], "p%d", i);
        params[i] = simple(param_names[i], i / 2, ZX_F32, i % 2 ? 8192 : 4096, true);
    }
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int32_t world = 1; world <= 8; world *= 2)
            for (int stage = 0; stage < 4; stage++)
                for (int at = 0; at < 2; at++) {
                    size_t p_elems = 4 * 12288, n = (size_t)world, slots = 3; /* two and the root's */
                    zx_layout *l;
                    zx_policy policy;
                    for (int i = 0; i < 8; i++)
                        params[i].dtype = bf16 ? ZX_BF16 : ZX_F32;
                    CHECK_OR_RETURN(CHECK_OK(zx_layout_open(params, 8, unit_names, 4, world, 4096, &l)));
                    CHECK_OR_RETURN(CHECK_OK(zx_policy_for_stage(stage, &policy)));
                    policy.reduce_at = (zx_reduce_at)at;
                    zx_store_bytes b = zx_layout_bytes(l, &policy);
                    bool micro = at == ZX_REDUCE_MICRO && world > 1;
                    size_t width = bf16 ? 2 : 4, shared = stage >= 1 ? n : 1, cut = stage >= 3 ? n : 1;
                    CHECK_EQ_I64(b.params, width * p_elems / cut);
                    CHECK_EQ_I64(b.master, bf16 ? 4 * p_elems / shared : 0);
                    CHECK_EQ_I64(b.moments, 8 * p_elems / shared);
                    CHECK_EQ_I64(b.grads, 4 * p_elems / (micro ? shared : 1));
                    CHECK_EQ_I64(b.grad_slots, micro ? slots * 12288 * 4 : 0);
                    CHECK_EQ_I64(b.param_slots, cut > 1 ? slots * 12288 * width : 0);
                    CHECK_EQ_I64(b.wire, 0);
                    CHECK_EQ_I64(b.total,
                                 b.params + b.master + b.moments + b.grads + b.param_slots + b.grad_slots + b.control);
                    policy.reduce_dtype = ZX_BF16;
                    CHECK_EQ_I64(zx_layout_bytes(l, &policy).wire, world > 1 ? 2 * 12288 : 0);
                    policy.n_moments = 0;
                    CHECK_EQ_I64(zx_layout_bytes(l, &policy).moments, 0);
                    zx_layout_close(l);
                }
}

static void expect(const zx_param *params, int64_t n, const char *part)
{
    zx_layout *l = (zx_layout *)1;
    CHECK_STATUS(zx_layout_open(params, n, unit_names, 2, 2, 4096, &l), ZX_ERR_ARG);
    CHECK_ERROR_HAS(part);
    CHECK(l == NULL);
}

static void test_refusals(void)
{
    zx_param ok[2] = {simple("w", 0, ZX_F32, 8, true), simple("v", 1, ZX_F32, 8, true)}, p[2];
    zx_layout *l;
#define CASE(change, part)                                                                                             \
    do {                                                                                                               \
        memcpy(p, ok, sizeof p);                                                                                       \
        change;                                                                                                        \
        expect(p, 2, part);                                                                                            \
    } while (0)
    CASE(p[1].name = "w", "two parameters are named w");
    CASE(p[1].unit = 2, "v belongs to unit 2");
    CASE(p[1].dtype = ZX_I32, "v is int32");
    CASE(p[1].shape[0] = -1, "v, dimension 0");
    CASE(p[1].box_begin[0] = 1, "a box of 8 at 1");
    CASE(p[1].group = -1, "v has option group -1");
    CASE(p[1].ndim = 5, "v has 5 dimensions");
    CASE(p[1].tied_to = 1, "list the owner first");
    CASE((p[1].tied_to = 0, p[1].dtype = ZX_BF16), "v is tied to w");
    CASE((p[1].tied_to = 0, p[0].unit = 1, p[1].unit = 0), "the owner must lie in unit 0");
    CASE((p[1].ndim = 3, p[1].shape[0] = p[1].shape[1] = p[1].shape[2] = INT64_C(1) << 30,
          memcpy(p[1].global_shape, p[1].shape, sizeof p[1].shape)),
         "more than 2^58");
#undef CASE
    CHECK_STATUS(zx_layout_open(ok, 2, unit_names, 2, 0, 4096, &l), ZX_ERR_ARG);
    CHECK_STATUS(zx_layout_open(ok, 2, unit_names, 2, 1, 1000, &l), ZX_ERR_ARG);
    zx_policy policy;
    CHECK_STATUS(zx_policy_for_stage(4, &policy), ZX_ERR_ARG);
    CHECK_OK(zx_policy_for_stage(3, &policy));
    policy.shard_grads = false;
    CHECK_STATUS(zx_policy_check(&policy), ZX_ERR_ARG);
}

static void test_faults(void)
{
    zx_param p[2] = {simple("w", 0, ZX_F32, 8, true), simple("v", 1, ZX_F32, 8, true)};
    zx_layout *l;
    for (int n = 1;; n++) {
        int64_t live = zx_mem_get(ZX_MEM_STORE).n_live;
        zx_fault_arm(n);
        zx_status rc = zx_layout_open(p, 2, unit_names, 2, 2, 4096, &l);
        zx_fault_arm(0);
        if (rc == ZX_OK) {
            CHECK(n > 5);
            zx_layout_close(l);
            break;
        }
        CHECK(l == NULL);
        CHECK_EQ_I64(zx_mem_get(ZX_MEM_STORE).n_live, live);
    }
}

static void test_trillion(void)
{
    enum { N_BLOCKS = 1000, PER_BLOCK = 12 };
    zx_param *params = calloc(N_BLOCKS * PER_BLOCK, sizeof *params);
    const char **names = calloc(N_BLOCKS, sizeof *names);
    char (*text)[16] = calloc(N_BLOCKS * PER_BLOCK, sizeof *text);
    zx_layout *l;
    zx_policy policy;
    for (int i = 0; i < N_BLOCKS * PER_BLOCK; i++) {
        snprintf(text[i], sizeof text[i], "p%d", i);
        params[i] = simple(text[i], i / PER_BLOCK, ZX_BF16, 83333334, true);
        names[i / PER_BLOCK] = text[i];
    }
    int64_t begin = zx_now_ns();
    if (CHECK_OK(zx_layout_open(params, N_BLOCKS * PER_BLOCK, names, N_BLOCKS, 1024, 2 << 20, &l)) &&
        CHECK_OK(zx_policy_for_stage(3, &policy))) {
        CHECK_EQ_I64(l->n_elems, INT64_C(83333334) * N_BLOCKS * PER_BLOCK);
        zx_store_bytes b = zx_layout_bytes(l, &policy);
        CHECK_NEAR((double)(b.params + b.master + b.moments + b.grads), 18.0 * (double)l->n_elems / 1024, 1e-3);
        zx_layout_close(l);
    }
    CHECK((double)(zx_now_ns() - begin) < 1e9);
    free(params);
    free(names);
    free(text);
}

int main(void)
{
    rng_state = 12345;
    RUN(test_random_layouts);
    RUN(test_formulas);
    RUN(test_refusals);
    RUN(test_faults);
    RUN(test_trillion);
    return check_report();
}
