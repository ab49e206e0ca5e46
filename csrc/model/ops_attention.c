/* ops_attention.c - attention inside documents, on the fused projection.
 *
 * qkv (N, (H + 2G) * D) as one linear layer leaves it: query heads, then key heads, then value heads; cu_seqlens
 * (n_docs + 1) int32. i = {query heads H, key/value heads G, causal, longest document}; f[0] = scale of the scores.
 * Result (N, H * D); note: log-sum-exp (H, N). */
#include "model/ops.h"

static zx_status attention_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs,
                                 zx_shape *out)
{
    (void)has_in, (void)n_in;
    char a[96];
    int64_t heads = attrs->i[0], groups = attrs->i[1];
    ZX_TRY(zx_expect_dtype("attention", "cu_seqlens", &in[1], ZX_I32));
    if (heads < 1 || groups < 1 || heads % groups)
        ZX_FAIL(ZX_ERR_ARG,
                "attention: %lld query heads cannot share %lld key/value heads: the first must be a multiple "
                "of the second",
                (long long)heads, (long long)groups);
    if (in[0].ndim != 2 || in[0].dim[1] % (heads + 2 * groups) || in[1].ndim != 1 || in[1].dim[0] < 1)
        ZX_FAIL(ZX_ERR_ARG, "attention: qkv %s does not hold %lld query and 2 x %lld key/value heads of equal size",
                zx_shape_text(&in[0], a), (long long)heads, (long long)groups);
    int64_t dim = in[0].dim[1] / (heads + 2 * groups);
    out[0] = (zx_shape){.dtype = in[0].dtype, .ndim = 2, .dim = {in[0].dim[0], heads * dim}};
    out[1] = (zx_shape){.dtype = zx_dtype_sum(in[0].dtype), .ndim = 2, .dim = {heads, in[0].dim[0]}};
    return ZX_OK;
}

/* `heads` heads of the fused rows, beginning at head `first`. */
static zx_view heads_of(const zx_view *fused, int64_t first, int64_t heads, int64_t dim)
{
    char *data = fused->data;
    if (data) data += (size_t)(first * dim) * zx_dtype_bytes(fused->dtype);
    return zx_view_3d(data, fused->dtype, fused->shape[0], heads, dim, fused->stride[0], dim);
}

static zx_docs docs_of(const zx_op_call *c)
{
    return (zx_docs){.cu_seqlens = c->in[1].data, .n_docs = c->in[1].shape[0] - 1, .max_len = c->attrs->i[3]};
}

static zx_status attention_forward(zx_op_call *c)
{
    int64_t h = c->attrs->i[0], g = c->attrs->i[1], d = c->in[0].shape[1] / (h + 2 * g);
    zx_attention_fwd_args args = {.q = heads_of(&c->in[0], 0, h, d),
                                  .k = heads_of(&c->in[0], h, g, d),
                                  .v = heads_of(&c->in[0], h + g, g, d),
                                  .out = heads_of(&c->out[0], 0, h, d),
                                  .lse = c->out[1],
                                  .docs = docs_of(c),
                                  .scale = c->attrs->f[0],
                                  .causal = c->attrs->i[2] != 0};
    return ZX_CALL(c, attention_fwd, &args);
}

static zx_status attention_backward(zx_op_call *c)
{
    int64_t h = c->attrs->i[0], g = c->attrs->i[1], d = c->in[0].shape[1] / (h + 2 * g);
    zx_view dqkv = c->din[0];
    zx_temp temp = {0};
    if (c->din_add[0]) { /* the kernel overwrites */
        ZX_TRY(zx_call_temp(c, (size_t)zx_view_numel(&dqkv) * zx_dtype_bytes(dqkv.dtype), &temp));
        dqkv.data = temp.data;
    }
    zx_attention_bwd_args args = {.q = heads_of(&c->in[0], 0, h, d),
                                  .k = heads_of(&c->in[0], h, g, d),
                                  .v = heads_of(&c->in[0], h + g, g, d),
                                  .out = heads_of(&c->out[0], 0, h, d),
                                  .lse = c->out[1],
                                  .dout = heads_of(&c->dout[0], 0, h, d),
                                  .dq = heads_of(&dqkv, 0, h, d),
                                  .dk = heads_of(&dqkv, h, g, d),
                                  .dv = heads_of(&dqkv, h + g, g, d),
                                  .docs = docs_of(c),
                                  .scale = c->attrs->f[0],
                                  .causal = c->attrs->i[2] != 0};
    zx_status status = ZX_CALL(c, attention_bwd, &args);
    if (c->din_add[0]) {
        zx_add_args add = {.a = c->din[0], .b = dqkv, .out = c->din[0]};
        if (status == ZX_OK) status = ZX_CALL(c, add, &add);
        zx_call_temp_end(c, &temp);
    }
    return status;
}

/* Causal attention looks at half of the pairs; documents shorter than the longest cost less: an upper bound. */
static zx_cost attention_cost(const zx_op_call *c)
{
    double rows = (double)c->out[0].shape[0], width = (double)c->out[0].shape[1];
    double flops = 4.0 * rows * width * (double)c->attrs->i[3] * (c->attrs->i[2] ? 0.5 : 1.0);
    return (zx_cost){.flops = flops, .backward_input = 2 * flops};
}

const zx_opdef zx_op_attention = {.name = "attention",
                                  .min_in = 2,
                                  .max_in = 2,
                                  .n_out = 2,
                                  .save_in = 3,
                                  .save_out = 3,
                                  .infer = attention_infer,
                                  .forward = attention_forward,
                                  .backward_input = attention_backward,
                                  .cost = attention_cost};
