/* arena.h - activation memory that is planned before it exists.
 *
 * A pass over the model makes the same tensors in the same order each time. The first pass of a signature is a dry run:
 * nothing is computed, every allocation and release is written down (zx_trace). zx_trace_plan then gives the n-th
 * allocation an offset such that tensors alive at the same time do not overlap (pure). In a real pass the n-th
 * allocation gets the n-th offset after a check: same name and size, and its bytes are free. What deviates takes spare
 * room behind the planned part; past that it is an error that names the operation.
 */
#ifndef ZX_MODEL_ARENA_H
#define ZX_MODEL_ARENA_H

#include "base/zx.h"

enum { ZX_ARENA_ALIGN = 256 };

typedef struct zx_trace_item {
    const char *name; /* literal or interned: the operation that asked */
    size_t bytes;     /* rounded up to ZX_ARENA_ALIGN */
    int64_t born, dies; /* event numbers; alive in [born, dies) */
    size_t offset;    /* planned */
} zx_trace_item;

typedef struct zx_trace {
    zx_trace_item *items;
    int64_t n_items, capacity;
    int64_t clock;
    size_t planned_bytes; /* after zx_trace_plan: the extent of all offsets */
    size_t peak_bytes;    /* the most that was alive at once: what no plan can undercut */
} zx_trace;

void zx_trace_reset(zx_trace *trace);
void zx_trace_free(zx_trace *trace);
ZX_CHECKED zx_status zx_trace_add(zx_trace *trace, const char *name, size_t bytes, int64_t *out_id);
void zx_trace_end(zx_trace *trace, int64_t id);
/* Places every item; what never ended lives to the end. Largest first, at the lowest offset that is free during its
 * whole life. */
ZX_CHECKED zx_status zx_trace_plan(zx_trace *trace);

/* One live block. */
typedef struct zx_block {
    size_t offset, bytes;
    int64_t id; /* of the trace item, or -1 in spare room */
} zx_block;

typedef struct zx_arena {
    const zx_trace *plan;
    char *base;
    size_t spare_bytes;
    int64_t next;  /* allocation number of this pass */
    zx_block *live; /* sorted by offset */
    int64_t n_live, capacity;
    int64_t n_deviations; /* allocations that went to spare room, since the arena was opened */
} zx_arena;

void zx_arena_begin(zx_arena *arena, const zx_trace *plan, char *base, size_t spare_bytes);
void zx_arena_free(zx_arena *arena);
ZX_CHECKED zx_status zx_arena_take(zx_arena *arena, const char *name, size_t bytes, zx_block *out);
void zx_arena_give(zx_arena *arena, const zx_block *block);

#endif
