/* layout.h - pure: from parameter records to units, ranges and slices; and every persistent byte a rank will hold.
 *
 * A unit is what is gathered together (a transformer block; unit 0 is the root: embedding, final norm, head). Its
 * parameters lie in ranges, one for each (dtype, trainable, reduce group); rank r owns slice r of every range:
 *
 *     range (n_padded elements)  | p0 ..pad | p1 ........pad | p2 ..pad |.......|   parameters at aligned offsets
 *     slices (world of them)     | rank 0        | rank 1        | rank 2       |   equal, aligned
 *
 * No device, no communicator, no allocation but its own tables: property-tested against a naive model.
 */
#ifndef ZX_STORE_LAYOUT_H
#define ZX_STORE_LAYOUT_H

#include "kernels/types.h"

typedef struct zx_param {
    const char *name;
    int32_t unit;
    zx_dtype dtype; /* in which it is gathered and computed with */
    int32_t ndim;
    int64_t shape[ZX_MAX_DIMS];        /* of the box that this rank group holds */
    int64_t global_shape[ZX_MAX_DIMS]; /* of the whole tensor; equal to shape unless split by tensor
                                          parallelism */
    int64_t box_begin[ZX_MAX_DIMS];    /* where the box begins in the whole tensor */
    bool trainable;
    int32_t group;        /* option group: index of its hyper-parameters */
    int32_t reduce_group; /* 0: all data-parallel ranks */
    int32_t tied_to;      /* -1, or the index of the earlier parameter whose storage this one is */
} zx_param;

typedef struct zx_place { /* where a parameter lies; tied ones share their owner's place */
    int32_t range;
    int64_t offset; /* elements from the range's start */
    int64_t n;      /* elements; 0 is legal */
} zx_place;

typedef struct zx_range {
    int32_t unit;
    zx_dtype dtype;
    bool trainable;
    int32_t reduce_group;
    int64_t n_used;   /* elements up to the end of the last parameter */
    int64_t n_padded; /* world x slice */
    int64_t slice;    /* elements a rank owns; a multiple of ZX_SLICE_ALIGN; 0 only if n_used is 0 */
    size_t param_offset; /* bytes from the unit's parameter base (all n_padded elements lie there) */
    size_t grad_offset;  /* bytes from the unit's gradient base; trainable ranges only */
    size_t shard_offset; /* bytes from the start of a rank's shard arena: its slice, in dtype */
    int64_t state_offset; /* elements from the start of each state arena when the state is sharded; trainable
                             only */
    int64_t full_state_offset; /* likewise when it is not */
} zx_range;

typedef struct zx_unit {
    const char *name;
    int32_t first_range, n_ranges; /* ranges of a unit are adjacent; trainable ones first */
    size_t param_bytes; /* rounded up to the granule; 0 for a unit without elements */
    size_t grad_bytes; /* likewise, sum type */
    bool trainable; /* has a trainable range with elements */
} zx_unit;

enum { ZX_SLICE_ALIGN = 256 /* elements */, ZX_PARAM_ALIGN = 64 /* bytes */ };

typedef struct zx_layout {
    int64_t n_params;
    zx_param *params; /* copies, names included */
    zx_place *places;
    int32_t n_units;
    zx_unit *units;
    int32_t n_ranges;
    zx_range *ranges;
    int64_t *order; /* parameters that own storage, by (range, offset) */
    int64_t *order_begin; /* n_ranges + 1: range r's are order[order_begin[r] .. order_begin[r+1]) */
    int32_t world;
    size_t granule;
    int32_t n_groups; /* option groups: 1 + the largest index used */
    size_t shard_bytes; /* of a rank's shard arena, packed at 256 B */
    int64_t state_elems; /* of a state arena, sharded: sum of the trainable slices */
    int64_t full_state_elems;
    int64_t n_elems; /* parameters, without padding, ties once */
    int64_t n_padded; /* with padding: the P of the formulas */
    int64_t n_trainable_padded;
} zx_layout;

/* names of units: n_units strings; every parameter's unit lies in [0, n_units). Errors name the parameter. A
 * tied parameter needs its owner's shape, dtype, trainable and group, and a unit equal to its owner's, or an
 * owner in unit 0. */
ZX_CHECKED zx_status zx_layout_open(const zx_param *params, int64_t n_params, const char *const *unit_names,
                                    int32_t n_units, int32_t world, size_t granule, zx_layout **out);
void zx_layout_close(zx_layout *layout);

typedef enum zx_reduce_at { ZX_REDUCE_MICRO = 0, ZX_REDUCE_STEP } zx_reduce_at;

/* ZeRO stages as three booleans: 0 = {0,0,0}, 1 = {1,0,0}, 2 = {1,1,0}, 3 = {1,1,1}. */
typedef struct zx_policy {
    bool shard_state, shard_grads, shard_params;
    zx_reduce_at reduce_at;
    int32_t n_slots; /* K: physical slots behind the blocks' parameters at shard_params; the root has its own */
    int32_t n_grad_slots; /* at reduce_at micro: 2 unless set; the root has its own */
    int32_t n_moments; /* of the optimizer: AdamW 2, SGD with momentum 1, plain SGD 0 */
    bool prefetch;
    zx_dtype reduce_dtype; /* on the wire: F32, or BF16 */
} zx_policy;

ZX_CHECKED zx_status zx_policy_for_stage(int stage, zx_policy *out); /* with the defaults: bytes.c */
/* What a policy comes to at this world size. One rank's slice is the whole: at world 1 nothing is sharded,
 * gathered or reduced, full gradients accumulate where they are written, and reduce_at makes no difference.
 */
zx_policy zx_policy_at_world(const zx_policy *policy, int32_t world);
/* Impossible combinations are ZX_ERR_ARG. */
ZX_CHECKED zx_status zx_policy_check(const zx_policy *policy);

/* Bytes a rank holds for the model, exactly; what open() will allocate and engine.memory() prints. */
typedef struct zx_store_bytes {
    size_t params; /* full parameters, or the shards at shard_params */
    size_t master; /* fp32 copy of the owned part; 0 where parameters are fp32 (they are their own master) */
    size_t moments;
    size_t grads; /* full gradients (step), or the accumulator (micro) */
    size_t param_slots; /* K slots + the root's, at shard_params */
    size_t grad_slots; /* at micro */
    size_t wire; /* gradients in reduce_dtype, the largest range */
    size_t control; /* norms, totals, segment and hyper tables */
    size_t total;
} zx_store_bytes;
zx_store_bytes zx_layout_bytes(const zx_layout *layout, const zx_policy *policy);

/* The pieces of the formula that the store places things by. */
typedef struct zx_control_places { /* byte offsets in the control block, which all ranks can read */
    size_t partials; /* (world, n) doubles: sums of squares of rank r's slices, n = n_trainable_ranges */
    size_t totals; /* (world, 2) doubles */
    size_t own_partials, own_totals, saved_totals, scratch_totals;
    size_t ctl; /* zx_step_ctl */
    size_t hyper; /* (n_groups) zx_hyper */
    size_t segments; /* at most one for each trainable parameter */
    size_t bytes;
    int64_t n_trainable_ranges; /* with elements */
} zx_control_places;
zx_control_places zx_layout_control(const zx_layout *layout);
/* Bytes per rank of an arena in the sum type for the trainable ranges, or for those whose parameters are no
 * sum type themselves (masters): slices, or whole ranges (full). */
size_t zx_layout_state_bytes(const zx_layout *layout, bool full, bool masters_only);
size_t zx_layout_wire_bytes(const zx_layout *layout, const zx_policy *policy);

#endif
