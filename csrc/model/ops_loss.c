/* ops_loss.c - softmax cross-entropy over labels, alone or joined with the head's product.
 *
 * Both return a total {sum of losses over counted labels, number of counted labels}: the engine divides once, at the
 * step, by the labels of all ranks and micro-steps, so that the loss does not depend on how a batch is cut.
 * linear_cross_entropy never holds all logits: it works on chunks of rows, in forward and again in backward (one
 * product more, and N x V elements less). */
#include "model/ops.h"

static zx_status check_target(const char *op, const zx_shape *x, const zx_shape *target)
{
    char a[96], b[96];
    ZX_TRY(zx_expect_dtype(op, "the target", target, ZX_I32));
    if (x->ndim != 2 || target->ndim != 1 || target->dim[0] != x->dim[0])
        ZX_FAIL(ZX_ERR_ARG, "%s: %s does not fit targets %s: shapes must be (N, ...) and (N)", op, zx_shape_text(x, a),
                zx_shape_text(target, b));
    return ZX_OK;
}

static void set_outputs(const zx_shape *x, zx_shape *out)
{
    zx_dtype sum = zx_dtype_sum(x->dtype);
    out[0] = (zx_shape){.dtype = sum, .ndim = 1, .dim = {2}};
    out[1] = (zx_shape){.dtype = sum, .ndim = 1, .dim = {x->dim[0]}};
}

/* logits (N, V), target (N). Notes: lse (N). */
static zx_status xent_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    ZX_TRY(check_target("cross_entropy", &in[0], &in[1]));
    set_outputs(&in[0], out);
    return ZX_OK;
}

static zx_status xent_forward(zx_op_call *c)
{
    zx_xent_fwd_args args = {.logits = c->in[0], .target = c->in[1], .lse = c->out[1], .total = c->out[0]};
    return ZX_CALL(c, xent_fwd, &args);
}

static zx_view first_of(const zx_view *total)
{
    return zx_view_1d(total->data, total->dtype, 1);
}

static zx_status xent_backward(zx_op_call *c)
{
    zx_temp temp = {0};
    zx_view dlogits = c->din[0];
    if (c->din_add[0]) {
        ZX_TRY(zx_call_temp(c, (size_t)zx_view_numel(&dlogits) * zx_dtype_bytes(dlogits.dtype), &temp));
        dlogits.data = temp.data;
    }
    zx_xent_bwd_args args = {
        .logits = c->in[0], .target = c->in[1], .lse = c->out[1], .dloss = first_of(&c->dout[0]), .dlogits = dlogits};
    zx_status status = ZX_CALL(c, xent_bwd, &args);
    if (c->din_add[0]) {
        zx_add_args add = {.a = c->din[0], .b = dlogits, .out = c->din[0]};
        if (status == ZX_OK) status = ZX_CALL(c, add, &add);
        zx_call_temp_end(c, &temp);
    }
    return status;
}

const zx_opdef zx_op_cross_entropy = {.name = "cross_entropy",
                                      .min_in = 2,
                                      .max_in = 2,
                                      .n_out = 2,
                                      .is_total = true,
                                      .save_in = 3,
                                      .save_out = 2,
                                      .infer = xent_infer,
                                      .forward = xent_forward,
                                      .backward_input = xent_backward};

/* x (N, C), weight (V, C), target (N); i[0] = rows in a chunk, 0 = chosen. Notes: lse (N). */
static zx_status head_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    char a[96], b[96];
    ZX_TRY(check_target("linear_cross_entropy", &in[0], &in[2]));
    ZX_TRY(zx_expect_dtype("linear_cross_entropy", "the weight", &in[1], in[0].dtype));
    if (in[1].ndim != 2 || in[1].dim[1] != in[0].dim[1])
        ZX_FAIL(ZX_ERR_ARG, "linear_cross_entropy: input %s does not fit weight %s", zx_shape_text(&in[0], a),
                zx_shape_text(&in[1], b));
    set_outputs(&in[0], out);
    return ZX_OK;
}

/* 4 Mi logits at a time (16 MB in fp32), and at least 128 rows, below which products lose speed. Rounded to 64 rows. */
static int64_t chunk_rows(const zx_op_call *c)
{
    int64_t rows = c->attrs->i[0], vocab = zx_max64(c->in[1].shape[0], 1);
    if (rows <= 0) rows = zx_max64(((int64_t)4 << 20) / vocab / 64 * 64, 128);
    return zx_max64(zx_min64(rows, c->in[0].shape[0]), 1);
}

static zx_status logits_of(zx_op_call *c, const zx_view *x, const zx_view *logits)
{
    zx_matmul_args args = {.a = *x, .b = c->in[1], .c = *logits, .trans_b = true};
    return ZX_CALL(c, matmul, &args);
}

typedef zx_status (*chunk_fn)(zx_op_call *c, int64_t first, int64_t rows, const zx_view *x, const zx_view *logits);

/* Runs fn on each chunk with its logits computed. */
static zx_status for_chunks(zx_op_call *c, chunk_fn fn)
{
    int64_t n = c->in[0].shape[0], vocab = c->in[1].shape[0], chunk = chunk_rows(c);
    zx_dtype t = c->in[0].dtype;
    zx_temp temp;
    ZX_TRY(zx_call_temp(c, (size_t)(chunk * vocab) * zx_dtype_bytes(t), &temp));
    zx_status zx_rc_ = ZX_OK;
    for (int64_t first = 0; first < n; first += chunk) {
        int64_t rows = zx_min64(chunk, n - first);
        zx_view x = zx_rows_slice(&c->in[0], first, rows);
        zx_view logits = zx_view_2d(temp.data, t, rows, vocab, vocab);
        ZX_TRY_GOTO(logits_of(c, &x, &logits), done);
        ZX_TRY_GOTO(fn(c, first, rows, &x, &logits), done);
    }
done:
    zx_call_temp_end(c, &temp);
    return zx_rc_;
}

static zx_status forward_chunk(zx_op_call *c, int64_t first, int64_t rows, const zx_view *x, const zx_view *logits)
{
    (void)x;
    zx_xent_fwd_args args = {.logits = *logits,
                             .target = zx_rows_slice(&c->in[2], first, rows),
                             .lse = zx_rows_slice(&c->out[1], first, rows),
                             .total = c->out[0],
                             .accumulate = first > 0};
    return ZX_CALL(c, xent_fwd, &args);
}

static zx_status head_forward(zx_op_call *c)
{
    if (c->in[0].shape[0] == 0) {
        zx_fill_args args = {.out = c->out[0], .value = 0};
        return ZX_CALL(c, fill, &args);
    }
    return for_chunks(c, forward_chunk);
}

static zx_status backward_chunk(zx_op_call *c, int64_t first, int64_t rows, const zx_view *x, const zx_view *logits)
{
    zx_xent_bwd_args args = {.logits = *logits,
                             .target = zx_rows_slice(&c->in[2], first, rows),
                             .lse = zx_rows_slice(&c->out[1], first, rows),
                             .dloss = first_of(&c->dout[0]),
                             .dlogits = *logits};
    ZX_TRY(ZX_CALL(c, xent_bwd, &args));
    if (c->want_din[0]) {
        zx_matmul_args dx = {
            .a = *logits, .b = c->in[1], .c = zx_rows_slice(&c->din[0], first, rows), .accumulate = c->din_add[0]};
        ZX_TRY(ZX_CALL(c, matmul, &dx));
    }
    if (c->want_din[1]) {
        zx_matmul_args dw = {.a = *logits, .b = *x, .c = c->din[1], .trans_a = true, .accumulate = true};
        return ZX_CALL(c, matmul, &dw);
    }
    return ZX_OK;
}

static zx_status head_backward(zx_op_call *c)
{
    return for_chunks(c, backward_chunk);
}

static zx_cost head_cost(const zx_op_call *c)
{
    double flops = 2.0 * (double)c->in[0].shape[0] * (double)c->in[1].shape[0] * (double)c->in[0].shape[1];
    return (zx_cost){.flops = flops, .backward_input = flops};
}

const zx_opdef zx_op_linear_cross_entropy = {.name = "linear_cross_entropy",
                                             .min_in = 3,
                                             .max_in = 3,
                                             .n_out = 2,
                                             .is_total = true,
                                             .save_in = 7,
                                             .save_out = 2,
                                             .weight_in = 2,
                                             .infer = head_infer,
                                             .forward = head_forward,
                                             .backward_input = head_backward,
                                             .backward_weight = head_backward,
                                             .backward = head_backward,
                                             .cost = head_cost};
