/* args.c - how many bytes an operation names, from its argument struct. Most structs begin with their views;
 * the others are listed. */
#include "device/internal.h"

static int64_t views_bytes(const zx_view *v, int n)
{
    int64_t bytes = 0;
    for (int i = 0; i < n; i++)
        if (v[i].data != NULL) bytes += zx_view_numel(&v[i]) * (int64_t)zx_dtype_bytes(v[i].dtype);
    return bytes;
}

static int64_t sources_bytes(const zx_sum_sources_args *a)
{
    return a->n * (a->n_src * (int64_t)zx_dtype_bytes(a->src_dtype) + (int64_t)zx_dtype_bytes(a->out_dtype));
}

int64_t zx_args_bytes(zx_op_id op, const void *args)
{
    static const uint8_t n_views[ZX_N_OPS] = {
        [ZX_OP_matmul] = 4,
        [ZX_OP_embed_fwd] = 3,
        [ZX_OP_embed_bwd] = 3,
        [ZX_OP_layernorm_fwd] = 6,
        [ZX_OP_layernorm_bwd_in] = 6,
        [ZX_OP_layernorm_bwd_w] = 6,
        [ZX_OP_gelu_fwd] = 2,
        [ZX_OP_gelu_bwd] = 3,
        [ZX_OP_attention_fwd] = 5,
        [ZX_OP_attention_bwd] = 9,
        [ZX_OP_xent_fwd] = 4,
        [ZX_OP_xent_bwd] = 5,
        [ZX_OP_add] = 3,
        [ZX_OP_mul] = 3,
        [ZX_OP_scale] = 2,
        [ZX_OP_sum] = 2,
        [ZX_OP_colsum] = 3,
        [ZX_OP_cast] = 2,
        [ZX_OP_fill] = 1,
    };
    switch (op) {
    case ZX_OP_sum_sources:
        return sources_bytes(args);
    case ZX_OP_sqnorm: {
        const zx_sqnorm_args *a = args;
        return a->n * (int64_t)zx_dtype_bytes(a->dtype);
    }
    case ZX_OP_finite: {
        const zx_finite_args *a = args;
        return a->n * (int64_t)zx_dtype_bytes(a->dtype);
    }
    case ZX_OP_step_control: {
        const zx_step_control_args *a = args;
        return (a->n_partials + 2 * a->n_ranks) * (int64_t)sizeof(double);
    }
    default:
        return views_bytes(args, n_views[op]); /* adamw, sgd: their sizes lie in device memory, so 0 */
    }
}
