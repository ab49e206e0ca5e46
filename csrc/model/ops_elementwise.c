/* ops_elementwise.c - add, mul, scale, sum, gelu.
 *
 * Broadcasting is of one kind: the second operand's shape is a suffix of the first one's, or it has one element. The
 * first is then looked at as (R, C) with C the elements of the second, whose gradient is a sum over rows. */
#include "model/ops.h"

static zx_status infer_binary(const char *name, const zx_shape *in, zx_shape *out)
{
    char a[96], b[96];
    *out = in[0];
    ZX_TRY(zx_expect_dtype(name, "the second operand", &in[1], in[0].dtype));
    bool ok = in[1].ndim <= in[0].ndim;
    for (int i = 1; ok && i <= in[1].ndim; i++)
        ok = in[1].dim[in[1].ndim - i] == in[0].dim[in[0].ndim - i];
    if (ok || zx_shape_numel(&in[1]) == 1) return ZX_OK;
    ZX_FAIL(ZX_ERR_ARG,
            "%s of %s and %s: the second shape must equal the first, end like it, or have one element (put the larger "
            "operand first)",
            name, zx_shape_text(&in[0], a), zx_shape_text(&in[1], b));
}

static int64_t view_numel_or_one(const zx_view *v)
{
    int64_t n = zx_view_numel(v);
    return n > 0 ? n : 1;
}

/* v as (R, C) with C = the elements of b. */
static zx_view rows_of(const zx_view *v, const zx_view *b)
{
    int64_t cols = view_numel_or_one(b);
    return zx_view_2d(v->data, v->dtype, zx_view_numel(v) / cols, cols, cols);
}

/* b repeated over the rows of a. */
static zx_view broadcast(const zx_view *a, const zx_view *b)
{
    int64_t cols = view_numel_or_one(b);
    return zx_view_2d(b->data, b->dtype, zx_view_numel(a) / cols, cols, 0);
}

static zx_status add_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    return infer_binary("add", in, out);
}

static zx_status add_forward(zx_op_call *c)
{
    zx_add_args args = {.a = rows_of(&c->in[0], &c->in[1]),
                        .b = broadcast(&c->in[0], &c->in[1]),
                        .out = rows_of(&c->out[0], &c->in[1])};
    return ZX_CALL(c, add, &args);
}

static zx_status copy_or_add(zx_op_call *c, const zx_view *from, const zx_view *to, double factor, bool add)
{
    zx_scale_args args = {.a = *from, .out = *to, .factor = factor, .accumulate = add};
    return ZX_CALL(c, scale, &args);
}

static zx_status add_backward(zx_op_call *c)
{
    if (c->want_din[0]) {
        zx_view from = rows_of(&c->dout[0], &c->in[1]), to = rows_of(&c->din[0], &c->in[1]);
        ZX_TRY(copy_or_add(c, &from, &to, 1, c->din_add[0]));
    }
    if (c->want_din[1]) {
        zx_view to = zx_view_1d(c->din[1].data, c->din[1].dtype, view_numel_or_one(&c->in[1]));
        if (zx_view_numel(&c->in[1]) == 0) return ZX_OK;
        zx_colsum_args args = {.x = rows_of(&c->dout[0], &c->in[1]), .out = to, .accumulate = c->din_add[1]};
        return ZX_CALL(c, colsum, &args);
    }
    return ZX_OK;
}

const zx_opdef zx_op_add = {.name = "add",
                            .min_in = 2,
                            .max_in = 2,
                            .n_out = 1,
                            .pass_in = 3,
                            .infer = add_infer,
                            .forward = add_forward,
                            .backward_input = add_backward};

static zx_status mul_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    return infer_binary("mul", in, out);
}

static zx_status mul_forward(zx_op_call *c)
{
    zx_mul_args args = {.a = rows_of(&c->in[0], &c->in[1]),
                        .b = broadcast(&c->in[0], &c->in[1]),
                        .out = rows_of(&c->out[0], &c->in[1])};
    return ZX_CALL(c, mul, &args);
}

static zx_status mul_backward(zx_op_call *c)
{
    if (c->want_din[0]) {
        zx_mul_args args = {.a = rows_of(&c->dout[0], &c->in[1]),
                            .b = broadcast(&c->in[0], &c->in[1]),
                            .out = rows_of(&c->din[0], &c->in[1]),
                            .accumulate = c->din_add[0]};
        ZX_TRY(ZX_CALL(c, mul, &args));
    }
    if (c->want_din[1] && zx_view_numel(&c->in[1]) > 0) {
        zx_colsum_args args = {.x = rows_of(&c->dout[0], &c->in[1]),
                               .y = rows_of(&c->in[0], &c->in[1]),
                               .out = zx_view_1d(c->din[1].data, c->din[1].dtype, zx_view_numel(&c->in[1])),
                               .accumulate = c->din_add[1]};
        return ZX_CALL(c, colsum, &args);
    }
    return ZX_OK;
}

const zx_opdef zx_op_mul = {.name = "mul",
                            .min_in = 2,
                            .max_in = 2,
                            .n_out = 1,
                            .save_in = 3,
                            .infer = mul_infer,
                            .forward = mul_forward,
                            .backward_input = mul_backward};

/* out = f[0] * in */
static zx_status same_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    out[0] = in[0];
    return ZX_OK;
}

static zx_status scale_forward(zx_op_call *c)
{
    zx_view from = zx_rows_view(&c->in[0]), to = zx_rows_view(&c->out[0]);
    return copy_or_add(c, &from, &to, c->attrs->f[0], false);
}

static zx_status scale_backward(zx_op_call *c)
{
    zx_view from = zx_rows_view(&c->dout[0]), to = zx_rows_view(&c->din[0]);
    return copy_or_add(c, &from, &to, c->attrs->f[0], c->din_add[0]);
}

const zx_opdef zx_op_scale = {.name = "scale",
                              .min_in = 1,
                              .max_in = 1,
                              .n_out = 1,
                              .infer = same_infer,
                              .forward = scale_forward,
                              .backward_input = scale_backward};

/* out (scalar) = f[0] * sum of all elements, in the sum type */
static zx_status sum_infer(const zx_shape *in, const bool *has_in, int32_t n_in, const zx_attrs *attrs, zx_shape *out)
{
    (void)has_in, (void)n_in, (void)attrs;
    out[0] = (zx_shape){.dtype = zx_dtype_sum(in[0].dtype), .ndim = 0};
    return ZX_OK;
}

static zx_status sum_forward(zx_op_call *c)
{
    zx_sum_args args = {.x = c->in[0], .out = zx_view_1d(c->out[0].data, c->out[0].dtype, 1), .factor = c->attrs->f[0]};
    return ZX_CALL(c, sum, &args);
}

static zx_status sum_backward(zx_op_call *c)
{
    zx_temp temp = {0};
    zx_view dout = zx_view_1d(c->dout[0].data, c->dout[0].dtype, 1);
    bool convert = dout.dtype != c->din[0].dtype;
    if (convert) { /* the scalar in the dtype of what it is spread over */
        ZX_TRY(zx_call_temp(c, zx_dtype_bytes(c->din[0].dtype), &temp));
        zx_view small = zx_view_1d(temp.data, c->din[0].dtype, 1);
        zx_cast_args cast = {.a = dout, .out = small};
        zx_status status = ZX_CALL(c, cast, &cast);
        if (status != ZX_OK) {
            zx_call_temp_end(c, &temp);
            return status;
        }
        dout = small;
    }
    zx_view to = zx_view_1d(c->din[0].data, c->din[0].dtype, zx_view_numel(&c->din[0]));
    dout.shape[0] = to.shape[0];
    dout.stride[0] = 0;
    zx_status status = copy_or_add(c, &dout, &to, c->attrs->f[0], c->din_add[0]);
    if (convert) zx_call_temp_end(c, &temp);
    return status;
}

const zx_opdef zx_op_sum = {.name = "sum",
                            .min_in = 1,
                            .max_in = 1,
                            .n_out = 1,
                            .infer = sum_infer,
                            .forward = sum_forward,
                            .backward_input = sum_backward};

/* tanh approximation */
static zx_status gelu_forward(zx_op_call *c)
{
    zx_gelu_fwd_args args = {.x = zx_rows_view(&c->in[0]), .out = zx_rows_view(&c->out[0])};
    return ZX_CALL(c, gelu_fwd, &args);
}

static zx_status gelu_backward(zx_op_call *c)
{
    zx_gelu_bwd_args args = {.x = zx_rows_view(&c->in[0]),
                             .dout = zx_rows_view(&c->dout[0]),
                             .dx = zx_rows_view(&c->din[0]),
                             .accumulate = c->din_add[0]};
    return ZX_CALL(c, gelu_bwd, &args);
}

const zx_opdef zx_op_gelu = {.name = "gelu",
                             .min_in = 1,
                             .max_in = 1,
                             .n_out = 1,
                             .save_in = 1,
                             .infer = same_infer,
                             .forward = gelu_forward,
                             .backward_input = gelu_backward};
