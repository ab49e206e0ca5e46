/* internal.h - what the files of store share: the object and its parts.
 *
 * open.c     memory, addresses, tables         gather.c   acquire, release, prefetch
 * grad.c     grad, reduce, count, discard      step.c     norm, decision, update, spreading
 * update.c   the updaters and their segments   values.c   slices in and out
 * store.c    everything that only looks in
 *
 * Streams. `stream` is the store's own: every collective runs there, in the order of the verbs, which is the same on
 * all ranks. Three kinds of events order it against the caller's streams:
 *  - gathered (of a unit): recorded on `stream` after a gather; the first acquire on each stream waits for it;
 *  - released (of a slot): recorded by release; a gather into the slot waits for it;
 *  - reduced (of a gradient slot): recorded on `stream` after a reduction; the next grad() of that slot waits for it.
 * And `handoff`, recorded and waited for at once, orders everything before it on one side before what follows on the
 * other. At world 1 there are no collectives and no events but the one that ends a step.
 */
#ifndef ZX_STORE_INTERNAL_H
#define ZX_STORE_INTERNAL_H

#include "kernels/load.h"
#include "store/states.h"
#include "store/store.h"

typedef struct zx_store_arena { /* one shareable memory object, mapped once as a whole */
    zx_mem *mem;
    char *base;
    size_t bytes;
    int comm_id; /* -1: not registered */
} zx_store_arena;

typedef struct zx_store_unit {
    char *params; /* the unit's address for life; NULL without bytes */
    char *grads;
    zx_param_state state;
    int32_t refs;
    bool own_params, own_grads; /* the addresses are reservations of the unit's own (slots behind them) */
    zx_event *gathered;         /* NULL where nothing is ever gathered or spread */
    bool gather_recorded;
    const zx_stream *waited; /* the last stream that waited for it */
    zx_grad_state grad;
    bool has_grads;    /* it has a trainable range, perhaps without elements */
    bool grad_clean;   /* full gradient known to be zero (reduce_at step) */
    bool accumulating; /* the accumulator holds a sum (reduce_at micro) */
} zx_store_unit;

typedef struct zx_store_slot {
    int32_t unit; /* whose values it holds or will; -1 = none */
    zx_event *event; /* released, or reduced */
    bool recorded;
    const zx_stream *recorded_on;
} zx_store_slot;

typedef struct zx_store_range {
    int64_t own_begin, own_n; /* elements this rank steps: its slice, or the whole range (state not sharded) */
    char *own_param;          /* where they lie */
    char *own_grad;           /* the gradient that is stepped */
    char *sum_slice;          /* where this rank's slice of the reduced gradient goes */
    char *master;             /* sum type; own_param where that is the sum type itself */
    char *moment[2];
    const zx_segment *segments; /* device memory */
    int64_t n_segments;
    int64_t nth; /* among the trainable ranges with elements; -1 */
} zx_store_range;

enum { ZX_HYPER_RING = 16 }; /* steps whose hyper-parameters may be on their way to the device */

struct zx_store {
    const zx_layout *layout;
    zx_store_config config;
    zx_policy policy; /* at this world size */
    zx_device *dev;
    zx_comm *comm;
    int32_t rank, world;
    zx_stream *stream;
    zx_event *handoff;

    zx_store_arena params;      /* full parameters, or this rank's shards */
    zx_store_arena param_slots; /* at shard_params */
    zx_store_arena grads;       /* full gradients, or their slots */
    zx_store_arena sums;        /* accumulators, at reduce_at micro */
    zx_store_arena wire;        /* a range in reduce_dtype */
    zx_store_arena control;
    char *master, *moment[2];
    size_t master_bytes, moment_bytes;
    zx_control_places places;

    zx_slots *slots, *grad_slots; /* NULL where there are none */
    zx_store_slot *slot, *grad_slot;
    zx_store_unit *units;
    zx_store_range *ranges;
    zx_hyper *hyper_ring; /* (ZX_HYPER_RING, n_groups) host memory */
    int64_t hyper_next, n_in_flight;
    zx_step_ctl *result; /* host memory */

    const zx_plan *plan;
    int64_t plan_pos;
    bool on_plan;

    int64_t version, n_live;
    bool loading;
    bool earlier_grads;  /* gradients of passes before this one are held for the next step */
    bool pass_grads;     /* this pass has changed a gradient that outlives it */
    bool pass_counted;   /* this pass has changed the totals; what they were is in saved_totals */
    bool incomplete;     /* an abandoned pass left a part of its gradients behind */
    zx_error *failure;   /* status ZX_OK, or what broke the store for good */
    zx_store_stats stats;
};

static inline size_t zx_sum_bytes(const zx_range *range)
{
    return zx_dtype_bytes(zx_dtype_sum(range->dtype));
}

/* The recorded failure, and the bounds of a unit's index. */
ZX_CHECKED zx_status zx_store_ready(const zx_store *store, int32_t unit);
/* Keeps this thread's error record: from now on every verb fails with it. Returns its status. */
zx_status zx_store_break(zx_store *store);
/* What `from` has been given before this, before what `to` is given after it. */
ZX_CHECKED zx_status zx_store_hand_over(zx_store *store, zx_stream *from, zx_stream *to);

/* open.c */
void zx_store_close_memory(zx_store *store);
ZX_CHECKED zx_status zx_store_open_memory(zx_store *store);

/* Bytes of the control block. */
static inline void *zx_control_at(const zx_store *s, size_t offset)
{
    return s->control.base + offset;
}

/* gather.c */
/* Compares an event with the plan and, where it agrees, does the prefetches that follow it. */
ZX_CHECKED zx_status zx_store_follow(zx_store *store, zx_unit_verb verb, int32_t unit);
/* All-gathers the updated slices of a unit in place (parameters not sharded); all: frozen ranges too. */
ZX_CHECKED zx_status zx_store_spread(zx_store *store, int32_t unit, bool all);
/* A new version: slots hold nothing any more. */
ZX_CHECKED zx_status zx_store_raise(zx_store *store);

/* grad.c */
/* Before a step: every trainable unit's gradient is reduced, untouched ones as zeros. */
ZX_CHECKED zx_status zx_store_reduce_rest(zx_store *store, zx_stream *stream);
ZX_CHECKED zx_status zx_store_clear_totals(zx_store *store, zx_stream *stream);
/* Takes back what this pass added, or marks the step as incomplete where that is impossible. */
ZX_CHECKED zx_status zx_store_discard_pass(zx_store *store, zx_stream *stream);

/* update.c */
typedef struct zx_updater {
    const char *name;
    int32_t min_moments, max_moments;
    zx_op_id op;
} zx_updater;
const zx_updater *zx_updater_get(zx_optimizer optimizer); /* NULL if unknown */
ZX_CHECKED zx_status zx_updater_check(const zx_store *store, const zx_step_options *options);
/* Segments of every range's own part, copied to the control block and waited for. */
ZX_CHECKED zx_status zx_store_open_segments(zx_store *store);
/* Steps the own part of a range. */
ZX_CHECKED zx_status zx_store_update(zx_store *store, zx_stream *stream, int32_t range);

#endif
