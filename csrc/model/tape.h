/* tape.h - operations with their gradients, and the tape that records them.
 *
 * An operation is a zx_opdef: shape inference, forward, the two halves of backward, and its cost. Built-in ones are
 * composed from the kernel table (ops_*.c);. The tape of a pass is an array of nodes;
 * backward walks it from the end; a block whose activations were not kept is replayed from its nodes, not from Python.
 */
#ifndef ZX_MODEL_TAPE_H
#define ZX_MODEL_TAPE_H

#include "device/device.h"
#include "model/tensor.h"

enum { ZX_OP_MAX_IN = 6, ZX_OP_MAX_OUT = 3, ZX_OP_MAX_ATTR = 4 };

typedef struct zx_attrs {
    int64_t i[ZX_OP_MAX_ATTR];
    double f[ZX_OP_MAX_ATTR];
} zx_attrs;

typedef struct zx_shape {
    zx_dtype dtype;
    int32_t ndim;
    int64_t dim[ZX_MAX_DIMS];
} zx_shape;

/* What an operation sees. Views of absent tensors have ndim 0 and data NULL; test presence with `has_in`, since in a
 * dry run all data are NULL. */
typedef struct zx_op_call {
    zx_engine *engine;
    const char *name;
    const zx_attrs *attrs;
    int32_t n_in, n_out;
    zx_view in[ZX_OP_MAX_IN];
    zx_view out[ZX_OP_MAX_OUT];
    /* backward only */
    zx_view dout[ZX_OP_MAX_OUT];   /* has_dout[k]: a gradient arrived for output k */
    zx_view din[ZX_OP_MAX_IN];     /* want_din[k]: write (or add to, if din_add[k]) the gradient of input k */
    bool has_in[ZX_OP_MAX_IN], has_dout[ZX_OP_MAX_OUT];
    bool want_din[ZX_OP_MAX_IN], din_add[ZX_OP_MAX_IN];
} zx_op_call;

typedef struct zx_cost {
    double flops; /* of the forward, and of the weights' half of backward; a multiply-add counts 2 */
    double backward_input; /* of the other half */
} zx_cost;

typedef struct zx_opdef {
    const char *name;
    int32_t min_in, max_in, n_out;
    /* Bits: which inputs and outputs backward reads the bytes of. */
    uint32_t save_in, save_out;
    /* Bits: inputs that are weights: their gradients come from backward_weight, in the sum type, always added. */
    uint32_t weight_in;
    /* Bits: inputs whose gradient is the output's gradient itself, wherever the shapes are equal (add). */
    uint32_t pass_in;
    bool is_total; /* output 0 is a counted loss {sum, number of labels} */
    /* Shapes of the outputs, or an error that names shapes and what was expected. */
    zx_status (*infer)(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out);
    zx_status (*forward)(zx_op_call *call);
    zx_status (*backward_input)(zx_op_call *call);  /* NULL: no input but the weights has a gradient */
    zx_status (*backward_weight)(zx_op_call *call); /* NULL: no weights */
    /* Both halves at once, where that saves work; used when both are wanted. NULL: the two in turn. */
    zx_status (*backward)(zx_op_call *call);
    zx_cost (*cost)(const zx_op_call *call);        /* NULL: bound by memory, counts as none */
} zx_opdef;

/* Output 0 is the result; further outputs are the operation's own notes for its backward and have no gradient. */

/* The built-in operations; NULL past the end. */
const zx_opdef *zx_opdef_builtin(int32_t index);
const zx_opdef *zx_opdef_find(const char *name);

/* For operations: launch (or, in a dry run, only count scratch), and temporary bytes that live until the call ends. */
ZX_CHECKED zx_status zx_call_launch(zx_op_call *call, zx_op_id op, const void *args, size_t args_bytes);
#define ZX_CALL(call, op, args_ptr)                                                                                    \
    zx_call_launch((call), ZX_OP_##op, 1 ? (args_ptr) : (const zx_##op##_args *)0, sizeof(zx_##op##_args))
typedef struct zx_temp {
    zx_block block;
    void *data;
} zx_temp;
ZX_CHECKED zx_status zx_call_temp(zx_op_call *call, size_t bytes, zx_temp *out);
void zx_call_temp_end(zx_op_call *call, zx_temp *temp);

#endif
