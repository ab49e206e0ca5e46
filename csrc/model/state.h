/* state.h - private to csrc/model: what an engine holds. */
#ifndef ZX_MODEL_STATE_H
#define ZX_MODEL_STATE_H

#include <string.h>

#include "model/engine.h"

typedef enum zx_node_kind { ZX_NODE_OP = 0, ZX_NODE_ENTER, ZX_NODE_EXIT } zx_node_kind;

typedef struct zx_node {
    zx_node_kind kind;
    const zx_opdef *op;
    zx_attrs attrs;
    int32_t n_in;
    zx_tensor *in[ZX_OP_MAX_IN]; /* one reference each; NULL = absent */
    zx_tensor *out[ZX_OP_MAX_OUT];
    uint32_t held_in, held_out; /* which of them this node holds */
    bool requires_grad;
    bool replay;                /* recomputation: must be run again */
    /* ENTER and EXIT */
    int32_t unit;
    bool recompute;
    bool acquired; /* backward: the unit is live */
    int64_t pair;  /* EXIT: index of its ENTER */
} zx_node;

typedef struct zx_signature {
    uint64_t key;
    zx_pass_mode mode;
    bool planned;
    zx_trace trace;
    zx_unit_event *events;
    int64_t n_events, events_capacity;
    zx_plan *plan;
    double flops;
} zx_signature;

typedef struct zx_unit_use {
    int32_t live;    /* nesting of acquire */
    int32_t uses;    /* forward uses whose backward is still to come */
    bool has_grad;   /* a full gradient was begun in this pass */
} zx_unit_use;

struct zx_engine {
    zx_engine_config config;
    const zx_layout *layout;
    zx_device *dev;
    zx_comm *comm;
    zx_stream *stream;
    zx_store *store;
    bool closed;

    zx_signature **signatures; /* pointers: the arena borrows a trace while the list grows */
    int64_t n_signatures, signatures_capacity;

    bool in_pass, dry;
    zx_signature *current;
    int64_t generation;
    zx_node *nodes;
    int64_t n_nodes, nodes_capacity;
    zx_unit_use *units;
    int32_t current_unit;    /* a block that was entered, or -1 */
    int64_t current_enter;   /* index of its ENTER node, or -1 (not recorded) */
    bool current_recompute;

    zx_arena arena;
    char *arena_base;
    size_t arena_reserved, arena_mapped;
    zx_mem **arena_mems;
    int64_t n_arena_mems, arena_mems_capacity;
    size_t scratch_bytes; /* the most any launch asked for in a dry run */

    zx_tensor **slabs; /* descriptions of tensors, in blocks that live as long as the engine */
    int64_t n_slabs, slabs_capacity;
    zx_tensor *free_tensors; /* chained through grad */
};

/* ---- bytes (engine_memory.c) ---- */
ZX_CHECKED zx_status zx_engine_take(zx_engine *e, const char *name, size_t bytes, zx_block *block, void **data);
void zx_engine_give(zx_engine *e, zx_block *block);
ZX_CHECKED zx_status zx_engine_check_limit(const zx_engine *e);
ZX_CHECKED zx_status zx_engine_fit(zx_engine *e, const zx_signature *sig); /* checks the limit, grows the arena */
void zx_engine_free_arena(zx_engine *e);

/* ---- tensors (tensor.c) ---- */
/* One reference, no bytes, no hold. */
ZX_CHECKED zx_status zx_tensor_new(zx_engine *e, const zx_shape *shape, zx_tensor **out);
/* Bytes from the arena and one hold. */
ZX_CHECKED zx_status zx_tensor_take(zx_tensor *t, const char *name);
void zx_tensor_drop_grad(zx_tensor *t); /* gives up its gradient, if it has one */
void zx_tensor_free_slabs(zx_engine *e);
void zx_tensor_drop_kept(zx_engine *e); /* the bytes of all kept copies: the device may close before their handles go */
zx_shape zx_tensor_shape(const zx_tensor *t);

/* ---- units (units.c): the store's verbs, or their record in a dry run ---- */
ZX_CHECKED zx_status zx_engine_acquire(zx_engine *e, int32_t unit);
ZX_CHECKED zx_status zx_engine_release(zx_engine *e, int32_t unit);
ZX_CHECKED zx_status zx_engine_grad(zx_engine *e, int32_t unit);
ZX_CHECKED zx_status zx_engine_reduce(zx_engine *e, int32_t unit);

/* ---- tape (tape.c, backward.c) ---- */
/* Fills the call's views of a node's tensors. */
void zx_call_open(zx_op_call *call, zx_engine *e, const zx_opdef *op, const zx_attrs *attrs, zx_tensor *const *in,
                  int32_t n_in, zx_tensor *const *out);
ZX_CHECKED zx_status zx_tape_push(zx_engine *e, zx_node **out);
void zx_node_drop_holds(zx_node *node);
void zx_tape_clear(zx_engine *e); /* drops every node */

#endif
