/* store.h - owns parameters, gradients and optimizer state of a model, sharded over the ranks of a communicator, and
 * exposes the few verbs that whoever computes needs: acquire, release, prefetch, grad, reduce, count, step. It knows
 * neither tensors nor Python: the tape, a torch adapter and a NumPy driver are clients of the same verbs.
 *
 *   param of a unit:  SHARDED -prefetch-> GATHERING -acquire-> LIVE(refs) -last release-> RESIDENT(version)
 *                     RESIDENT -slot wanted-> SHARDED;   RESIDENT of the current version -acquire-> LIVE, no traffic
 *   grad, full:       NONE -grad-> FULL (zeroed once, writers add) -reduce-> REDUCING -> NONE
 *                     at reduce_at step: FULL -reduce-> HELD -grad-> FULL (added to), and REDUCING in step
 *   grad, shard:      EMPTY -> ACCUMULATING (+= per reduction) -step-> EMPTY
 *
 * Static tables next[state][event]; an illegal event is ZX_ERR_STATE with both names and the unit's name.
 *
 * One address for life: parameter p is at zx_store_param_addr(p) whenever its unit is LIVE, its gradient at
 * zx_store_grad_addr(p) whenever its unit's gradient is FULL; units that share a slot alias the same bytes.
 *
 * Stream order: verbs take the stream that computes. Gathers and reductions run on the store's own stream, ordered
 * against it by events. A unit may be acquired and released on several streams. What writes a unit's gradient must come
 * before the reduce of that unit in the stream given to reduce; the step's stream must come after those of the reduces
 * and counts (one compute stream does all that by itself). All ranks call the verbs in the same order for the same
 * units (prefetch is the store's own business, a pure function of that order). The store puts collectives into a stream
 * of its own: another user of the same communicator must not have collectives in flight meanwhile; split a communicator
 * for it.
 *
 * At world 1 a slice is the whole: whatever the policy says, parameters stay where they are, gradients accumulate in
 * place, and nothing is gathered, reduced or copied (zx_policy_at_world).
 *
 * A call that fails before it has changed anything leaves the store as it was. A failure in the middle (a lost peer, a
 * device error) breaks the store: every later verb returns that first error, and only close is left.
 */
#ifndef ZX_STORE_STORE_H
#define ZX_STORE_STORE_H

#include "comm/comm.h"
#include "store/plan.h"

typedef struct zx_store zx_store;

typedef enum zx_optimizer { ZX_OPTIMIZER_ADAMW = 0, ZX_OPTIMIZER_SGD } zx_optimizer;

typedef struct zx_store_config {
    zx_policy policy;
    zx_optimizer optimizer;
    bool poison; /* fill slots with NaN before each gather and after each step, reduced gradients too */
    /* How units are coloured onto slots (zx_slots_open_for, from a dry run's trace); copied. NULL: in index order. */
    const zx_slots *slots, *grad_slots;
} zx_store_config;

/* Collective. layout is copied by reference and must outlive the store; dev and comm are borrowed. Everything
 * persistent is allocated here, exactly zx_layout_bytes. Parameters and state start at zero. */
ZX_CHECKED zx_status zx_store_open(const zx_layout *layout, const zx_store_config *config, zx_device *dev,
                                   zx_comm *comm, zx_store **out);
/* Local; the caller's streams have been synced. Other ranks may not call verbs of this store any more. */
void zx_store_close(zx_store *store);

/* The order of a micro-step's events; prefetch follows it. Borrowed until the next call; NULL = no plan. Made with this
 * store's slots (zx_store_slots). Between passes. */
ZX_CHECKED zx_status zx_store_set_plan(zx_store *store, const zx_plan *plan);
/* A new pass over the model begins (forward of a micro-step, an evaluation): the plan is followed from its start. */
ZX_CHECKED zx_status zx_store_begin_pass(zx_store *store);
/* A pass was abandoned in the middle (the user's forward raised): every LIVE unit becomes RESIDENT, full gradients and
 * totals of this micro-step are discarded. If the pass had already added to sums that hold earlier micro-steps, these
 * cannot be restored: then step is ZX_ERR_STATE until zero_grad. Local. */
void zx_store_abandon_pass(zx_store *store, zx_stream *stream);

/* ---- verbs ---- */
/* out_base: the unit's address, NULL for a unit without bytes. Gathers if need be; a slot that is held by another LIVE
 * unit is ZX_ERR_STATE naming both. Acquires count; each needs a release. */
ZX_CHECKED zx_status zx_store_acquire(zx_store *store, int32_t unit, zx_stream *stream, void **out_base);
ZX_CHECKED zx_status zx_store_release(zx_store *store, int32_t unit, zx_stream *stream);
ZX_CHECKED zx_status zx_store_prefetch(zx_store *store, int32_t unit);
/* The unit's full gradient, zero where nothing was added yet; writers add to it in `stream`. A unit that has only
 * frozen parameters has none: ZX_ERR_STATE. */
ZX_CHECKED zx_status zx_store_grad(zx_store *store, int32_t unit, zx_stream *stream, void **out_base);
/* The unit's full gradient of this micro-step is complete: summed over ranks (at reduce_at step: kept for the step; the
 * sum happens once, at the last micro-step's step). */
ZX_CHECKED zx_status zx_store_reduce(zx_store *store, int32_t unit, zx_stream *stream);
/* totals (2), F32 or F64 in device memory: {loss sum, denominator} of a micro-step, added to the step's. */
ZX_CHECKED zx_status zx_store_count(zx_store *store, zx_stream *stream, const void *totals, zx_dtype dtype);

typedef struct zx_step_options {
    const zx_hyper *hyper; /* one for each option group of the layout; host memory, copied */
    int32_t n_groups;
    double max_norm; /* <= 0: no clipping */
    double loss_scale; /* 1 */
} zx_step_options;

/* Reduces what is left (trainable units that nobody touched count as zero), forms the global norm in fixed (rank,
 * range) order, decides once for all ranks, steps the owned slices, raises the version, spreads the parameters (stages
 * 0-2). Collective. */
ZX_CHECKED zx_status zx_store_step(zx_store *store, zx_stream *stream, const zx_step_options *options);
/* What the last step decided; waits for it. */
ZX_CHECKED zx_status zx_store_step_result(zx_store *store, zx_stream *stream, zx_step_ctl *out);
/* Throw away the gradients and totals gathered since the last step. Local. */
ZX_CHECKED zx_status zx_store_zero_grad(zx_store *store, zx_stream *stream);

/* ---- looking in ---- */
const zx_layout *zx_store_layout(const zx_store *store);
void *zx_store_param_addr(const zx_store *store, int64_t param);
void *zx_store_grad_addr(const zx_store *store, int64_t param);
int64_t zx_store_version(const zx_store *store); /* +1 for each step and load */

typedef struct zx_store_stats { /* since open or reset */
    int64_t n_gathers, n_hits, n_blocking_gathers, n_reductions, n_steps;
    int64_t sent_elems; /* parameters and gradients; control scalars apart */
    int64_t max_live; /* most units LIVE at once */
} zx_store_stats;
zx_store_stats zx_store_stats_get(const zx_store *store);
void zx_store_stats_reset(zx_store *store);
zx_store_bytes zx_store_bytes_held(const zx_store *store); /* measured from what was allocated, not from the formula */
const char *zx_store_param_state_name(const zx_store *store, int32_t unit); /* "SHARDED", ... */
const char *zx_store_grad_state_name(const zx_store *store, int32_t unit); /* "NONE", ... */
/* The slots behind the parameters, for zx_plan_open; NULL where nothing is gathered (stages 0-2, world 1). */
const zx_slots *zx_store_slots(const zx_store *store);

/* ---- values in and out: slices, for checkpoints and initialisation ---- */
typedef enum zx_slice_kind {
    ZX_SLICE_PARAM = 0, /* in the range's dtype */
    ZX_SLICE_MASTER, /* sum type; equals PARAM where that is its own master */
    ZX_SLICE_MOMENT1, /* AdamW m, SGD momentum */
    ZX_SLICE_MOMENT2 /* AdamW v */
} zx_slice_kind;
/* Whether this store holds such values for a range (frozen ranges have parameters only). */
bool zx_store_has_slice(const zx_store *store, int32_t range, zx_slice_kind kind, zx_dtype *out_dtype);
/* Elements [begin, begin + n) counted from the start of the range; they must lie in this rank's slice (any rank's where
 * the values are not sharded). Host memory; waits for the store's work. */
ZX_CHECKED zx_status zx_store_read_slice(zx_store *store, int32_t range, zx_slice_kind kind, int64_t begin, int64_t n,
                                         void *out);
/* Writing PARAM also sets the master from it; writing MASTER also sets the parameter (rounded). Between load_begin and
 * load_end; at stage 0 every rank writes the whole range, from stage 1 its slice. */
ZX_CHECKED zx_status zx_store_load_begin(zx_store *store);
ZX_CHECKED zx_status zx_store_write_slice(zx_store *store, int32_t range, zx_slice_kind kind, int64_t begin, int64_t n,
                                          const void *values);
ZX_CHECKED zx_status zx_store_load_end(zx_store *store); /* collective: spreads parameters, version + 1 */

#endif
