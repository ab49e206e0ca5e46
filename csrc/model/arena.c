/* arena.c - DESIGN: see arena.h. The planner is the usual "largest first, lowest free offset" for intervals; a step of
 * a 24-layer GPT has some 2,000 items, planned in a few milliseconds. Live blocks are kept in one array sorted by
 * offset: the check that bytes are free is a binary search.
 */
#define _GNU_SOURCE /* qsort_r */
#include "model/arena.h"

#include <stdlib.h>
#include <string.h>

static size_t round_bytes(size_t bytes)
{
    return (bytes + ZX_ARENA_ALIGN - 1) / ZX_ARENA_ALIGN * ZX_ARENA_ALIGN;
}

void zx_trace_reset(zx_trace *trace)
{
    trace->n_items = 0;
    trace->clock = 0;
    trace->planned_bytes = 0;
    trace->peak_bytes = 0;
}

void zx_trace_free(zx_trace *trace)
{
    zx_free(trace->items);
    memset(trace, 0, sizeof *trace);
}

zx_status zx_trace_add(zx_trace *trace, const char *name, size_t bytes, int64_t *out_id)
{
    *out_id = -1;
    if (trace->n_items == trace->capacity)
        ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&trace->items, trace->n_items, &trace->capacity,
                             sizeof *trace->items));
    zx_trace_item *item = &trace->items[trace->n_items];
    *item = (zx_trace_item){.name = name, .bytes = round_bytes(bytes), .born = trace->clock++, .dies = INT64_MAX};
    *out_id = trace->n_items++;
    return ZX_OK;
}

void zx_trace_end(zx_trace *trace, int64_t id)
{
    if (id >= 0 && id < trace->n_items) trace->items[id].dies = trace->clock++;
}

static int by_size(const void *pa, const void *pb, void *items)
{
    const zx_trace_item *a = (zx_trace_item *)items + *(const int64_t *)pa;
    const zx_trace_item *b = (zx_trace_item *)items + *(const int64_t *)pb;
    if (a->bytes != b->bytes) return a->bytes > b->bytes ? -1 : 1;
    return a->born < b->born ? -1 : 1;
}

static int by_offset(const void *pa, const void *pb)
{
    const zx_block *a = pa, *b = pb;
    return a->offset < b->offset ? -1 : a->offset > b->offset;
}

/* The most bytes alive at once, by walking births and deaths in order of time. */
static zx_status find_peak(zx_trace *trace)
{
    int64_t *change;
    ZX_TRY(zx_alloc_array(ZX_MEM_MODEL, trace->clock + 1, sizeof *change, (void **)&change));
    for (int64_t i = 0; i < trace->n_items; i++) {
        change[trace->items[i].born] += (int64_t)trace->items[i].bytes;
        if (trace->items[i].dies < trace->clock) change[trace->items[i].dies] -= (int64_t)trace->items[i].bytes;
    }
    int64_t now = 0, peak = 0;
    for (int64_t t = 0; t < trace->clock; t++) {
        now += change[t];
        peak = zx_max64(peak, now);
    }
    trace->peak_bytes = (size_t)peak;
    zx_free(change);
    return ZX_OK;
}

zx_status zx_trace_plan(zx_trace *trace)
{
    zx_status zx_rc_ = ZX_OK;
    int64_t n = trace->n_items, *order = NULL;
    zx_block *busy = NULL;
    ZX_TRY_GOTO(find_peak(trace), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_MODEL, n, order), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_MODEL, n, busy), done);
    for (int64_t i = 0; i < n; i++)
        order[i] = i;
    qsort_r(order, (size_t)n, sizeof *order, by_size, trace->items);

    trace->planned_bytes = 0;
    for (int64_t k = 0; k < n; k++) {
        zx_trace_item *item = &trace->items[order[k]];
        int64_t n_busy = 0; /* placed items whose lives overlap this one's */
        for (int64_t j = 0; j < k; j++) {
            const zx_trace_item *other = &trace->items[order[j]];
            if (other->born < item->dies && item->born < other->dies && other->bytes)
                busy[n_busy++] = (zx_block){.offset = other->offset, .bytes = other->bytes};
        }
        qsort(busy, (size_t)n_busy, sizeof *busy, by_offset);
        size_t at = 0;
        for (int64_t j = 0; j < n_busy && busy[j].offset < at + item->bytes; j++)
            if (busy[j].offset + busy[j].bytes > at) at = busy[j].offset + busy[j].bytes;
        item->offset = at;
        if (at + item->bytes > trace->planned_bytes) trace->planned_bytes = at + item->bytes;
    }
done:
    zx_free(order);
    zx_free(busy);
    return zx_rc_;
}

void zx_arena_begin(zx_arena *arena, const zx_trace *plan, char *base, size_t spare_bytes)
{
    arena->plan = plan;
    arena->base = base;
    arena->spare_bytes = spare_bytes;
    arena->next = 0;
    arena->n_live = 0;
}

void zx_arena_free(zx_arena *arena)
{
    zx_free(arena->live);
    memset(arena, 0, sizeof *arena);
}

/* Index of the first live block with offset >= at. */
static int64_t lower_bound(const zx_arena *arena, size_t at)
{
    int64_t lo = 0, hi = arena->n_live;
    while (lo < hi) {
        int64_t mid = (lo + hi) / 2;
        if (arena->live[mid].offset < at)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

static bool is_free(const zx_arena *arena, size_t offset, size_t bytes, int64_t *out_index)
{
    int64_t i = lower_bound(arena, offset);
    *out_index = i;
    if (i < arena->n_live && arena->live[i].offset < offset + bytes) return false;
    return i == 0 || arena->live[i - 1].offset + arena->live[i - 1].bytes <= offset;
}

static void insert(zx_arena *arena, int64_t index, const zx_block *block)
{
    memmove(&arena->live[index + 1], &arena->live[index], (size_t)(arena->n_live - index) * sizeof *arena->live);
    arena->live[index] = *block;
    arena->n_live++;
}

zx_status zx_arena_take(zx_arena *arena, const char *name, size_t bytes, zx_block *out)
{
    *out = (zx_block){.id = -1};
    bytes = round_bytes(bytes);
    int64_t n = arena->next++, index;
    if (bytes == 0) return ZX_OK;
    if (arena->n_live == arena->capacity)
        ZX_TRY(
            zx_grow_array(ZX_MEM_MODEL, (void **)&arena->live, arena->n_live, &arena->capacity, sizeof *arena->live));
    if (n < arena->plan->n_items) {
        const zx_trace_item *item = &arena->plan->items[n];
        if (item->bytes == bytes && strcmp(item->name, name) == 0 && is_free(arena, item->offset, bytes, &index)) {
            *out = (zx_block){.offset = item->offset, .bytes = bytes, .id = n};
            insert(arena, index, out);
            return ZX_OK;
        }
    }
    size_t at = arena->plan->planned_bytes, end = at + arena->spare_bytes;
    for (int64_t i = lower_bound(arena, at); i < arena->n_live && arena->live[i].offset < at + bytes; i++)
        at = arena->live[i].offset + arena->live[i].bytes;
    if (at + bytes > end)
        ZX_FAIL(
            ZX_ERR_STATE,
            "tensor %lld of this pass ('%s', %zu bytes) is not the one that was planned, and the %zu bytes of spare "
            "room are used up: the model's operations must not change between passes of one signature; raise "
            "spare_bytes if they do",
            (long long)n, name, bytes, arena->spare_bytes);
    *out = (zx_block){.offset = at, .bytes = bytes, .id = -1};
    (void)is_free(arena, at, bytes, &index);
    insert(arena, index, out);
    arena->n_deviations++;
    return ZX_OK;
}

void zx_arena_give(zx_arena *arena, const zx_block *block)
{
    if (block->bytes == 0) return;
    int64_t i = lower_bound(arena, block->offset);
    if (i < arena->n_live && arena->live[i].offset == block->offset) {
        memmove(&arena->live[i], &arena->live[i + 1], (size_t)(arena->n_live - i - 1) * sizeof *arena->live);
        arena->n_live--;
    }
}
