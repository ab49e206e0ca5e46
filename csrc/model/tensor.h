/* tensor.h - a node's input or output: shape, dtype and where its bytes are.
 *
 * Two counts: `refs` keeps the description alive (Python handles, tape nodes), `holds` keeps the bytes (Python handles,
 * operations that saved it for their backward). When the last hold goes the bytes go back to the arena, while the
 * tape still knows the tensor: recomputation gives it bytes again.
 */
#ifndef ZX_MODEL_TENSOR_H
#define ZX_MODEL_TENSOR_H

#include "kernels/types.h"
#include "model/arena.h"

typedef struct zx_engine zx_engine;

typedef enum zx_tensor_kind {
    ZX_TENSOR_VALUE = 0, /* made by an operation, or an input: bytes in the arena */
    ZX_TENSOR_PARAM,     /* bytes in the store, valid while its unit is live */
    ZX_TENSOR_KEPT       /* a copy that outlives the pass: bytes of its own */
} zx_tensor_kind;

typedef struct zx_tensor {
    zx_engine *engine; /* borrowed; the Python handle holds the engine */
    zx_tensor_kind kind;
    int32_t refs, holds;
    zx_dtype dtype;
    int32_t ndim;
    int64_t shape[ZX_MAX_DIMS];
    bool has_data;       /* bytes are assigned (in a dry run: on paper) */
    bool requires_grad;
    bool is_total;       /* {loss sum, count}: what a counted loss returns; only backward takes it */
    void *data;          /* NULL in a dry run */
    zx_block block;
    int64_t param;       /* index in the layout, or -1 */
    int32_t unit;        /* of the parameter, or -1 */
    int64_t generation;  /* of the pass that made it */
    int64_t node;        /* the tape node that made it, or -1 */
    struct zx_tensor *grad; /* during backward */
    int32_t replay_uses; /* recomputation: consumers still to come in the segment */
    bool replay_needed;
} zx_tensor;

/* Row-major view of the whole tensor. */
zx_view zx_tensor_view(const zx_tensor *t);
int64_t zx_tensor_numel(const zx_tensor *t);
size_t zx_tensor_bytes(const zx_tensor *t);

#endif
