/* test_arena.c - the planner of activation memory: no two tensors alive at once overlap, whatever the trace. */
#include <stdlib.h>

#include "check.h"
#include "model/arena.h"

static uint64_t seed_state;
static uint32_t draw(uint32_t n)
{
    seed_state = seed_state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed_state >> 33) % n;
}

static const char *const names[] = {"linear", "gelu", "add"};

/* A random life of tensors: births, deaths in any order, some that never die. */
static void random_trace(zx_trace *trace, int n)
{
    int64_t alive[256], id;
    int n_alive = 0;
    zx_trace_reset(trace);
    for (int i = 0; i < n; i++) {
        while (n_alive > 0 && (n_alive == 256 || draw(3) == 0)) {
            int k = (int)draw((uint32_t)n_alive);
            zx_trace_end(trace, alive[k]);
            alive[k] = alive[--n_alive];
        }
        size_t bytes = draw(10) == 0 ? 0 : 1 + draw(100000);
        CHECK_OK(zx_trace_add(trace, names[i % 3], bytes, &id));
        alive[n_alive++] = id;
    }
}

static void test_no_overlap(void)
{
    zx_trace trace = {0};
    for (int round = 0; round < 200; round++) {
        seed_state = (uint64_t)round;
        random_trace(&trace, 1 + (int)draw(120));
        CHECK_OK(zx_trace_plan(&trace));
        CHECK(trace.planned_bytes >= trace.peak_bytes);
        for (int64_t i = 0; i < trace.n_items; i++)
            for (int64_t j = 0; j < i; j++) {
                const zx_trace_item *a = &trace.items[i], *b = &trace.items[j];
                bool together = a->born < b->dies && b->born < a->dies;
                bool overlap = a->offset < b->offset + b->bytes && b->offset < a->offset + a->bytes;
                CHECK(!(together && overlap && a->bytes && b->bytes));
            }
    }
    zx_trace_free(&trace);
}

/* A chain of layers is the case that matters: forward keeps, backward frees in reverse. The plan must be tight. */
static void test_chain_is_tight(void)
{
    zx_trace trace = {0};
    int64_t kept[24], grad = -1, next;
    for (int i = 0; i < 24; i++)
        CHECK_OK(zx_trace_add(&trace, "forward", 4096, &kept[i]));
    for (int i = 23; i >= 0; i--) {
        CHECK_OK(zx_trace_add(&trace, "backward", 4096, &next));
        if (grad >= 0) zx_trace_end(&trace, grad);
        zx_trace_end(&trace, kept[i]);
        grad = next;
    }
    CHECK_OK(zx_trace_plan(&trace));
    CHECK_EQ_I64((int64_t)trace.peak_bytes, 25 * 4096 + 4096 * 0);
    CHECK_EQ_I64((int64_t)trace.planned_bytes, (int64_t)trace.peak_bytes);
    zx_trace_free(&trace);
}

static void test_pass_follows_plan(void)
{
    zx_trace trace = {0};
    zx_arena arena = {0};
    zx_block a, b, c;
    int64_t id0, id1;
    CHECK_OK(zx_trace_add(&trace, "x", 1000, &id0));
    CHECK_OK(zx_trace_add(&trace, "y", 3000, &id1));
    zx_trace_end(&trace, id0);
    CHECK_OK(zx_trace_plan(&trace));
    for (int pass = 0; pass < 3; pass++) {
        zx_arena_begin(&arena, &trace, NULL, 4096);
        CHECK_OK(zx_arena_take(&arena, "x", 1000, &a));
        CHECK_OK(zx_arena_take(&arena, "y", 3000, &b));
        CHECK_EQ_I64((int64_t)a.offset, (int64_t)trace.items[0].offset);
        CHECK_EQ_I64((int64_t)b.offset, (int64_t)trace.items[1].offset);
        zx_arena_give(&arena, &a);
        zx_arena_give(&arena, &b);
    }
    CHECK_EQ_I64(arena.n_deviations, 0);

    /* another size, another name, one too many: spare room, until it is used up */
    zx_arena_begin(&arena, &trace, NULL, 4096);
    CHECK_OK(zx_arena_take(&arena, "x", 2000, &a));
    CHECK(a.offset >= trace.planned_bytes);
    CHECK_OK(zx_arena_take(&arena, "z", 1000, &b));
    CHECK(b.offset >= a.offset + a.bytes);
    CHECK_EQ_I64(arena.n_deviations, 2);
    CHECK_STATUS(zx_arena_take(&arena, "gelu", 4000, &c), ZX_ERR_STATE);
    CHECK(strstr(zx_error_last()->text, "'gelu'") != NULL);
    zx_error_clear();
    zx_arena_give(&arena, &a);
    CHECK_OK(zx_arena_take(&arena, "w", 2048, &c)); /* room that came back is used again */
    CHECK_EQ_I64((int64_t)c.offset, (int64_t)a.offset);
    zx_arena_free(&arena);
    zx_trace_free(&trace);
}

/* A tensor that is kept longer than planned: the next one must not get its bytes. */
static void test_late_release(void)
{
    zx_trace trace = {0};
    zx_arena arena = {0};
    zx_block a, b;
    int64_t id;
    CHECK_OK(zx_trace_add(&trace, "x", 1000, &id));
    zx_trace_end(&trace, id);
    CHECK_OK(zx_trace_add(&trace, "y", 1000, &id));
    CHECK_OK(zx_trace_plan(&trace));
    CHECK_EQ_I64((int64_t)trace.items[0].offset, (int64_t)trace.items[1].offset);
    zx_arena_begin(&arena, &trace, NULL, 4096);
    CHECK_OK(zx_arena_take(&arena, "x", 1000, &a));
    CHECK_OK(zx_arena_take(&arena, "y", 1000, &b));
    CHECK(b.offset >= a.offset + a.bytes);
    zx_arena_free(&arena);
    zx_trace_free(&trace);
}

int main(void)
{
    RUN(test_no_overlap);
    RUN(test_chain_is_tight);
    RUN(test_pass_follows_plan);
    RUN(test_late_release);
    return check_report();
}
