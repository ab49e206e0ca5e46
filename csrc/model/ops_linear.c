/* ops_linear.c - matmul, linear, embedding, layernorm. Activations are (..., channels), looked at as (N, C). */
#include "model/ops.h"

static double product_flops(int64_t m, int64_t n, int64_t k)
{
    return 2.0 * (double)m * (double)n * (double)k;
}

/* a (..., K) times b (K, N): both may be activations. */
static zx_status matmul_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs,
                              zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    char a[96], b[96];
    ZX_TRY(zx_expect_dtype("matmul", "the second operand", &in[1], in[0].dtype));
    if (in[0].ndim < 1 || in[1].ndim != 2 || in[0].dim[in[0].ndim - 1] != in[1].dim[0])
        ZX_FAIL(ZX_ERR_ARG, "matmul of %s and %s: shapes must be (..., K) and (K, N)", zx_shape_text(&in[0], a),
                zx_shape_text(&in[1], b));
    out[0] = in[0];
    out[0].dim[in[0].ndim - 1] = in[1].dim[1];
    return ZX_OK;
}

static zx_status matmul_forward(zx_op_call *c)
{
    zx_matmul_args args = {.a = zx_rows_view(&c->in[0]), .b = c->in[1], .c = zx_rows_view(&c->out[0])};
    return ZX_CALL(c, matmul, &args);
}

static zx_status matmul_backward(zx_op_call *c)
{
    zx_view dout = zx_rows_view(&c->dout[0]), a = zx_rows_view(&c->in[0]);
    if (c->want_din[0]) {
        zx_matmul_args args = {
            .a = dout, .b = c->in[1], .c = zx_rows_view(&c->din[0]), .trans_b = true, .accumulate = c->din_add[0]};
        ZX_TRY(ZX_CALL(c, matmul, &args));
    }
    if (c->want_din[1]) {
        zx_matmul_args args = {.a = a, .b = dout, .c = c->din[1], .trans_a = true, .accumulate = c->din_add[1]};
        return ZX_CALL(c, matmul, &args);
    }
    return ZX_OK;
}

static zx_cost matmul_cost(const zx_op_call *c)
{
    zx_view a = zx_rows_view(&c->in[0]);
    double flops = product_flops(a.shape[0], c->in[1].shape[1], a.shape[1]);
    return (zx_cost){.flops = flops, .backward_input = flops * (c->want_din[0] + c->want_din[1])};
}

const zx_opdef zx_op_matmul = {.name = "matmul",
                               .min_in = 2,
                               .max_in = 2,
                               .n_out = 1,
                               .save_in = 3,
                               .infer = matmul_infer,
                               .forward = matmul_forward,
                               .backward_input = matmul_backward,
                               .cost = matmul_cost};

/* x (..., K), weight (N, K), [bias (N)] -> (..., N) */
static zx_status linear_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs,
                              zx_shape *out)
{
    (void)attrs;
    char a[96], b[96];
    ZX_TRY(zx_expect_dtype("linear", "the weight", &in[1], in[0].dtype));
    if (in[0].ndim < 1 || in[1].ndim != 2 || in[0].dim[in[0].ndim - 1] != in[1].dim[1])
        ZX_FAIL(ZX_ERR_ARG, "linear: input %s does not fit weight %s: shapes must be (..., in) and (out, in)",
                zx_shape_text(&in[0], a), zx_shape_text(&in[1], b));
    if (n_in > 2 && has_in[2]) {
        ZX_TRY(zx_expect_dtype("linear", "the bias", &in[2], in[0].dtype));
        if (in[2].ndim != 1 || in[2].dim[0] != in[1].dim[0])
            ZX_FAIL(ZX_ERR_ARG, "linear: bias %s does not fit weight %s", zx_shape_text(&in[2], a),
                    zx_shape_text(&in[1], b));
    }
    out[0] = in[0];
    out[0].dim[in[0].ndim - 1] = in[1].dim[0];
    return ZX_OK;
}

static zx_status linear_forward(zx_op_call *c)
{
    zx_matmul_args args = {.a = zx_rows_view(&c->in[0]), .b = c->in[1], .c = zx_rows_view(&c->out[0]), .trans_b = true};
    if (c->has_in[2]) args.bias = c->in[2];
    return ZX_CALL(c, matmul, &args);
}

static zx_status linear_backward_input(zx_op_call *c)
{
    zx_matmul_args args = {
        .a = zx_rows_view(&c->dout[0]), .b = c->in[1], .c = zx_rows_view(&c->din[0]), .accumulate = c->din_add[0]};
    return ZX_CALL(c, matmul, &args);
}

static zx_status linear_backward_weight(zx_op_call *c)
{
    zx_view dout = zx_rows_view(&c->dout[0]);
    if (c->want_din[1]) {
        zx_matmul_args args = {
            .a = dout, .b = zx_rows_view(&c->in[0]), .c = c->din[1], .trans_a = true, .accumulate = true};
        ZX_TRY(ZX_CALL(c, matmul, &args));
    }
    if (c->want_din[2]) {
        zx_colsum_args args = {.x = dout, .out = c->din[2], .accumulate = true};
        return ZX_CALL(c, colsum, &args);
    }
    return ZX_OK;
}

static zx_cost linear_cost(const zx_op_call *c)
{
    zx_view x = zx_rows_view(&c->in[0]);
    double flops = product_flops(x.shape[0], c->in[1].shape[0], x.shape[1]);
    return (zx_cost){.flops = flops, .backward_input = flops};
}

const zx_opdef zx_op_linear = {.name = "linear",
                               .min_in = 2,
                               .max_in = 3,
                               .n_out = 1,
                               .save_in = 3,
                               .weight_in = 6,
                               .infer = linear_infer,
                               .forward = linear_forward,
                               .backward_input = linear_backward_input,
                               .backward_weight = linear_backward_weight,
                               .cost = linear_cost};

/* index (N) int32, table (V, C) -> (N, C); also used to pick rows of an activation */
static zx_status embedding_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs,
                                 zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    char a[96], b[96];
    ZX_TRY(zx_expect_dtype("embedding", "the index", &in[0], ZX_I32));
    if (in[0].ndim != 1 || in[1].ndim != 2)
        ZX_FAIL(ZX_ERR_ARG, "embedding of index %s in table %s: shapes must be (N) and (V, C)",
                zx_shape_text(&in[0], a), zx_shape_text(&in[1], b));
    out[0] = (zx_shape){.dtype = in[1].dtype, .ndim = 2, .dim = {in[0].dim[0], in[1].dim[1]}};
    return ZX_OK;
}

static zx_status embedding_forward(zx_op_call *c)
{
    zx_embed_fwd_args args = {.index = c->in[0], .table = c->in[1], .out = c->out[0]};
    return ZX_CALL(c, embed_fwd, &args);
}

static zx_status embedding_backward_weight(zx_op_call *c)
{
    zx_embed_bwd_args args = {.index = c->in[0], .dout = c->dout[0], .dtable = c->din[1]};
    return ZX_CALL(c, embed_bwd, &args);
}

const zx_opdef zx_op_embedding = {.name = "embedding",
                                  .min_in = 2,
                                  .max_in = 2,
                                  .n_out = 1,
                                  .save_in = 1,
                                  .weight_in = 2,
                                  .infer = embedding_infer,
                                  .forward = embedding_forward,
                                  .backward_weight = embedding_backward_weight};

/* x (..., C), gamma (C), [beta (C)]; f[0] = epsilon. Notes: mean, rstd (N). */
static zx_status layernorm_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs,
                                 zx_shape *out)
{
    (void)attrs;
    char a[96], b[96];
    for (int k = 1; k < n_in; k++) {
        if (!has_in[k]) continue;
        ZX_TRY(zx_expect_dtype("layernorm", k == 1 ? "the weight" : "the bias", &in[k], in[0].dtype));
        if (in[0].ndim < 1 || in[k].ndim != 1 || in[k].dim[0] != in[0].dim[in[0].ndim - 1])
            ZX_FAIL(ZX_ERR_ARG, "layernorm: input %s does not fit %s %s", zx_shape_text(&in[0], a),
                    k == 1 ? "weight" : "bias", zx_shape_text(&in[k], b));
    }
    out[0] = in[0];
    out[1] = out[2] = (zx_shape){.dtype = zx_dtype_sum(in[0].dtype), .ndim = 1, .dim = {zx_shape_rows(&in[0])}};
    return ZX_OK;
}

static zx_status layernorm_forward(zx_op_call *c)
{
    zx_layernorm_fwd_args args = {.x = zx_rows_view(&c->in[0]),
                                  .gamma = c->in[1],
                                  .out = zx_rows_view(&c->out[0]),
                                  .mean = c->out[1],
                                  .rstd = c->out[2],
                                  .eps = c->attrs->f[0]};
    if (c->has_in[2]) args.beta = c->in[2];
    return ZX_CALL(c, layernorm_fwd, &args);
}

static zx_status layernorm_backward_input(zx_op_call *c)
{
    zx_layernorm_bwd_in_args args = {.dout = zx_rows_view(&c->dout[0]),
                                     .x = zx_rows_view(&c->in[0]),
                                     .gamma = c->in[1],
                                     .mean = c->out[1],
                                     .rstd = c->out[2],
                                     .dx = zx_rows_view(&c->din[0]),
                                     .accumulate = c->din_add[0]};
    return ZX_CALL(c, layernorm_bwd_in, &args);
}

static zx_status layernorm_backward_weight(zx_op_call *c)
{
    zx_layernorm_bwd_w_args args = {
        .dout = zx_rows_view(&c->dout[0]), .x = zx_rows_view(&c->in[0]), .mean = c->out[1], .rstd = c->out[2]};
    if (c->want_din[1]) args.dgamma = c->din[1];
    if (c->want_din[2]) args.dbeta = c->din[2];
    return ZX_CALL(c, layernorm_bwd_w, &args);
}

const zx_opdef zx_op_layernorm = {.name = "layernorm",
                                  .min_in = 2,
                                  .max_in = 3,
                                  .n_out = 3,
                                  .save_in = 3,
                                  .save_out = 6,
                                  .weight_in = 6,
                                  .infer = layernorm_infer,
                                  .forward = layernorm_forward,
                                  .backward_input = layernorm_backward_input,
                                  .backward_weight = layernorm_backward_weight};
