/* engine.h - one model on one rank: the tape, the activation arena and the store's verbs, joined into passes.
 *
 * A pass: begin -> inputs, enter / apply / exit as the user's forward calls them -> backward -> end. Its signature (the
 * mode and all input shapes) decides the plan: the first time it is run dry (begin with dry = true), which allocates
 * nothing; zx_engine_plan then sizes the arena, refuses if it does not fit, and makes the prefetch plan.
 * An error in a pass is followed by zx_engine_abandon: the engine is then as before the pass (but
 * see zx_store_abandon_pass: sums that earlier micro-steps share need zero_grad).
 */
#ifndef ZX_MODEL_ENGINE_H
#define ZX_MODEL_ENGINE_H

#include "model/tape.h"
#include "store/store.h"

typedef struct zx_engine_config {
    zx_policy policy;
    zx_optimizer optimizer;
    zx_dtype dtype;       /* of activations: F32, BF16 or F64 */
    size_t memory_limit;  /* bytes this rank may use; 0 = the device's total */
    size_t spare_bytes;   /* arena room for passes that deviate from their plan */
    bool poison;
} zx_engine_config;

/* layout, dev and comm are borrowed. comm NULL: only dry runs (planning for any world; no store is opened). */
ZX_CHECKED zx_status zx_engine_open(const zx_engine_config *config, const zx_layout *layout, zx_device *dev,
                                    zx_comm *comm, zx_engine **out);
/* Gives back store, arena and stream; every later call but close is ZX_ERR_STATE. Tensors stay valid objects. */
void zx_engine_shutdown(zx_engine *e);
void zx_engine_close(zx_engine *e); /* also the tensors' descriptions: nobody may hold one any more */

typedef enum zx_pass_mode { ZX_PASS_EVAL = 0, ZX_PASS_TRAIN } zx_pass_mode;

/* signature: any number that stands for mode and shapes, chosen by the caller. planned tells whether it was run dry. */
bool zx_engine_planned(const zx_engine *e, uint64_t signature);
ZX_CHECKED zx_status zx_engine_begin(zx_engine *e, uint64_t signature, zx_pass_mode mode, bool dry);
ZX_CHECKED zx_status zx_engine_end(zx_engine *e); /* ends the pass; after a dry one: plan, check, grow the arena */
void zx_engine_abandon(zx_engine *e);

/* An input of this pass: bytes are copied from host (unless dry); host memory must live until the next sync. */
ZX_CHECKED zx_status zx_engine_input(zx_engine *e, const char *name, zx_dtype dtype, int32_t ndim, const int64_t *shape,
                                     const void *host, zx_tensor **out);
ZX_CHECKED zx_status zx_engine_param(zx_engine *e, int64_t param, zx_tensor **out); /* a new reference and hold */
ZX_CHECKED zx_status zx_engine_enter(zx_engine *e, int32_t unit, bool recompute);
ZX_CHECKED zx_status zx_engine_exit(zx_engine *e, int32_t unit);
/* The result comes with one reference and one hold. in[k] may be NULL for optional inputs. */
ZX_CHECKED zx_status zx_engine_apply(zx_engine *e, const zx_opdef *op, zx_tensor *const *in, int32_t n_in,
                                     const zx_attrs *attrs, zx_tensor **out);
/* loss: a total {sum, count}, or a scalar (then its denominator is 1 a rank and micro-step). Adds the gradients, hands
 * every unit to reduce after its last use, counts the loss, and drops the tape. */
ZX_CHECKED zx_status zx_engine_backward(zx_engine *e, zx_tensor *loss);
ZX_CHECKED zx_status zx_engine_step(zx_engine *e, const zx_step_options *options, zx_step_ctl *out);

void zx_tensor_ref(zx_tensor *t);
void zx_tensor_hold(zx_tensor *t);
void zx_tensor_unhold(zx_tensor *t);
void zx_tensor_unref(zx_tensor *t);
/* Waits, then copies all elements to host memory. ZX_ERR_STATE: in a dry run, stale, or its bytes are gone. */
ZX_CHECKED zx_status zx_tensor_read(zx_tensor *t, void *host);
ZX_CHECKED zx_status zx_tensor_keep(zx_tensor *t, zx_tensor **out);

zx_store *zx_engine_store(const zx_engine *e);
zx_device *zx_engine_device(const zx_engine *e);
zx_stream *zx_engine_stream(const zx_engine *e);
const zx_layout *zx_engine_layout(const zx_engine *e);
bool zx_engine_dry(const zx_engine *e);
bool zx_engine_in_pass(const zx_engine *e);
int64_t zx_engine_generation(const zx_engine *e); /* number of the pass; tensors of another are stale */

typedef struct zx_engine_memory { /* bytes of this rank */
    zx_store_bytes store;
    size_t activations; /* largest planned pass */
    size_t spare;
    size_t scratch;     /* of kernels */
    size_t comm;        /* rings, flags */
    size_t total;
    size_t limit;
    int64_t n_deviations;
    double flops;       /* of the last planned training pass: forward and backward with recomputation */
} zx_engine_memory;
zx_engine_memory zx_engine_memory_get(const zx_engine *e);

#endif
