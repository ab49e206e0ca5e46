/* backward.c - walking the tape from its end.
 *
 * DESIGN. Each tensor collects its gradient in `grad` (a tensor of its own); the first contribution is written, later
 * ones are added, always in tape order, so that recomputation and sharding change no bit. A parameter's gradient goes
 * straight to its place in the store, in the sum type. `add` hands its output's gradient on instead of copying it: two
 * owners then share one tensor, and whoever wants to add to a shared one copies it first.
 *
 * A block is reduced after the last of its uses in the pass. A recomputed block is replayed from its nodes just before
 * its backward: first a look from its end finds which nodes must run again (those whose outputs some backward reads),
 * then they run in order; bytes live as long as a consumer or a saved reference needs them.
 */
#include "model/state.h"

static zx_status fill_with(zx_engine *e, zx_view view, double value)
{
    zx_fill_args args = {.out = view, .value = value};
    zx_op_call call = {.engine = e, .name = "fill"};
    return ZX_CALL(&call, fill, &args);
}

static zx_status new_grad(const zx_tensor *t, zx_tensor **out)
{
    zx_shape shape = zx_tensor_shape(t);
    ZX_TRY(zx_tensor_new(t->engine, &shape, out));
    zx_status status = zx_tensor_take(*out, "gradient");
    if (status != ZX_OK) {
        zx_tensor_unref(*out);
        *out = NULL;
    }
    return status;
}

/* t->grad may be written to: it exists and nobody else owns it. */
static zx_status own_grad(zx_tensor *t)
{
    if (!t->grad) return new_grad(t, &t->grad);
    if (t->grad->refs == 1) return ZX_OK;
    zx_tensor *copy;
    ZX_TRY(new_grad(t, &copy));
    zx_cast_args args = {.a = zx_tensor_view(t->grad), .out = zx_tensor_view(copy)};
    zx_op_call call = {.engine = t->engine, .name = "copy gradient"};
    zx_status status = ZX_CALL(&call, cast, &args);
    zx_tensor_drop_grad(t);
    t->grad = copy;
    return status;
}

/* The gradient of in is dout itself. */
static zx_status pass_grad(zx_tensor *in, zx_tensor *dout)
{
    if (!in->grad) {
        in->grad = dout;
        zx_tensor_ref(dout);
        zx_tensor_hold(dout);
        return ZX_OK;
    }
    ZX_TRY(own_grad(in));
    zx_view sum = zx_tensor_view(in->grad);
    zx_add_args args = {.a = sum, .b = zx_tensor_view(dout), .out = sum};
    zx_op_call call = {.engine = in->engine, .name = "add gradient"};
    return ZX_CALL(&call, add, &args);
}

static zx_status param_grad_view(zx_engine *e, const zx_tensor *t, zx_view *out)
{
    ZX_TRY(zx_engine_grad(e, t->unit));
    *out = zx_tensor_view(t);
    out->dtype = zx_dtype_sum(t->dtype);
    out->data = e->dry ? NULL : zx_store_grad_addr(e->store, t->param);
    return ZX_OK;
}

/* ---- one node ---- */

/* A gradient that the kernel cannot write where it belongs: made aside, then added. */
typedef struct side {
    bool used;
    bool weight; /* made in the sum type */
    zx_temp temp;
} side;

static bool same_shape(const zx_tensor *a, const zx_tensor *b)
{
    if (a->ndim != b->ndim || a->dtype != b->dtype) return false;
    for (int i = 0; i < a->ndim; i++)
        if (a->shape[i] != b->shape[i]) return false;
    return true;
}

/* Decides where the gradient of input k is written. */
static zx_status open_din(zx_op_call *call, zx_node *node, int32_t k, side *aside)
{
    zx_engine *e = call->engine;
    zx_tensor *t = node->in[k];
    bool weight = node->op->weight_in >> k & 1;
    zx_dtype sum = zx_dtype_sum(t->dtype);
    call->want_din[k] = true;
    if (t->kind == ZX_TENSOR_PARAM && (weight || sum == t->dtype)) {
        call->din_add[k] = true;
        return param_grad_view(e, t, &call->din[k]);
    }
    if (t->kind == ZX_TENSOR_PARAM || (weight && sum != t->dtype)) {
        zx_view v = zx_tensor_view(t);
        v.dtype = weight ? sum : t->dtype;
        ZX_TRY(zx_call_temp(call, (size_t)zx_tensor_numel(t) * zx_dtype_bytes(v.dtype), &aside->temp));
        aside->used = true;
        aside->weight = weight;
        v.data = aside->temp.data;
        call->din[k] = v;
        call->din_add[k] = weight;
        return weight ? fill_with(e, v, 0) : ZX_OK;
    }
    call->din_add[k] = t->grad != NULL;
    ZX_TRY(own_grad(t));
    call->din[k] = zx_tensor_view(t->grad);
    if (weight && !call->din_add[k]) { /* weight gradients are always added to */
        call->din_add[k] = true;
        return fill_with(e, call->din[k], 0);
    }
    return ZX_OK;
}

/* Brings a gradient that was made aside to its place. */
static zx_status close_side(zx_op_call *call, zx_node *node, int32_t k, side *aside)
{
    zx_engine *e = call->engine;
    zx_tensor *t = node->in[k];
    int64_t n = zx_tensor_numel(t);
    if (t->kind == ZX_TENSOR_PARAM) {
        zx_view place;
        ZX_TRY(param_grad_view(e, t, &place));
        zx_sum_sources_args args = {.src = {aside->temp.data},
                                    .n_src = 1,
                                    .src_dtype = t->dtype,
                                    .out = place.data,
                                    .out_dtype = place.dtype,
                                    .n = n,
                                    .accumulate = true};
        return ZX_CALL(call, sum_sources, &args);
    }
    bool first = t->grad == NULL;
    ZX_TRY(own_grad(t));
    zx_view sum = zx_tensor_view(t->grad);
    if (first) {
        zx_cast_args args = {.a = call->din[k], .out = sum};
        return ZX_CALL(call, cast, &args);
    }
    zx_temp rounded;
    ZX_TRY(zx_call_temp(call, zx_tensor_bytes(t), &rounded));
    zx_view r = zx_tensor_view(t);
    r.data = rounded.data;
    zx_cast_args cast = {.a = call->din[k], .out = r};
    zx_status status = ZX_CALL(call, cast, &cast);
    zx_add_args add = {.a = sum, .b = r, .out = sum};
    if (status == ZX_OK) status = ZX_CALL(call, add, &add);
    zx_call_temp_end(call, &rounded);
    return status;
}

static zx_status run_backward(zx_op_call *call, const zx_opdef *op, bool inputs, bool weights)
{
    if (inputs && weights && op->backward) return op->backward(call);
    if (inputs) {
        if (!op->backward_input) ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s has no gradient for its input", op->name);
        ZX_TRY(op->backward_input(call));
    }
    if (weights) {
        if (!op->backward_weight) ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s has no gradient for its weights", op->name);
        ZX_TRY(op->backward_weight(call));
    }
    return ZX_OK;
}

static zx_status node_backward(zx_engine *e, zx_node *node)
{
    const zx_opdef *op = node->op;
    zx_tensor *dout = node->out[0]->grad;
    if (!node->requires_grad || !dout) return ZX_OK;
    zx_op_call call;
    side aside[ZX_OP_MAX_IN] = {0};
    bool inputs = false, weights = false;
    zx_status zx_rc_ = ZX_OK;
    zx_call_open(&call, e, op, &node->attrs, node->in, node->n_in, node->out);
    call.has_dout[0] = true;
    call.dout[0] = zx_tensor_view(dout);
    for (int32_t k = 0; k < node->n_in; k++) {
        zx_tensor *t = node->in[k];
        if (!t || !t->requires_grad) continue;
        if ((op->pass_in >> k & 1) && t->kind != ZX_TENSOR_PARAM && same_shape(t, node->out[0])) {
            ZX_TRY_GOTO(pass_grad(t, dout), done);
            continue;
        }
        ZX_TRY_GOTO(open_din(&call, node, k, &aside[k]), done);
        if (op->weight_in >> k & 1)
            weights = true;
        else
            inputs = true;
    }
    ZX_TRY_GOTO(run_backward(&call, op, inputs, weights), done);
    if (e->dry && op->cost) {
        zx_cost cost = op->cost(&call);
        e->current->flops += (inputs ? cost.backward_input : 0) + (weights ? cost.flops : 0);
    }
    for (int32_t k = 0; k < node->n_in; k++)
        if (aside[k].used) ZX_TRY_GOTO(close_side(&call, node, k, &aside[k]), done);
done:
    for (int32_t k = 0; k < node->n_in; k++)
        if (aside[k].used) zx_call_temp_end(&call, &aside[k].temp);
    return zx_rc_;
}

/* ---- recomputation ---- */

static bool inside(const zx_tensor *t, int64_t first)
{
    return t->kind == ZX_TENSOR_VALUE && t->node >= first;
}

/* Whether this node, run again or not, needs the bytes of its input k during the replay. */
static bool replay_uses(const zx_node *node, int32_t k)
{
    return node->replay || (node->requires_grad && (node->op->save_in >> k & 1));
}

/* From the block's end: which nodes must run again. */
static void mark_replay(zx_engine *e, int64_t first, int64_t last)
{
    for (int64_t i = first; i <= last; i++)
        for (int32_t k = 0; k < e->nodes[i].op->n_out; k++) {
            e->nodes[i].out[k]->replay_needed = false;
            e->nodes[i].out[k]->replay_uses = 0;
        }
    for (int64_t i = last; i >= first; i--) {
        zx_node *node = &e->nodes[i];
        const zx_opdef *op = node->op;
        node->replay = false;
        for (int32_t k = 0; k < op->n_out; k++) {
            zx_tensor *t = node->out[k];
            if (node->requires_grad && (op->save_out >> k & 1)) t->replay_needed = true;
            node->replay |= t->replay_needed && !t->has_data;
        }
        for (int32_t k = 0; k < node->n_in; k++) {
            zx_tensor *t = node->in[k];
            if (!t || !inside(t, first) || !replay_uses(node, k)) continue;
            t->replay_needed = true;
            t->replay_uses++;
        }
    }
}

/* What this node's backward reads is held from here on; what came from outside is held already. */
static void hold_saved(zx_node *node)
{
    if (!node->requires_grad) return;
    for (int32_t k = 0; k < node->n_in; k++)
        if ((node->op->save_in >> k & 1) && !(node->held_in >> k & 1) && node->in[k] &&
            node->in[k]->kind == ZX_TENSOR_VALUE) {
            zx_tensor_hold(node->in[k]);
            node->held_in |= 1u << k;
        }
    for (int32_t k = 0; k < node->op->n_out; k++)
        if ((node->op->save_out >> k & 1) && !(node->held_out >> k & 1)) {
            zx_tensor_hold(node->out[k]);
            node->held_out |= 1u << k;
        }
}

static zx_status replay_node(zx_engine *e, zx_node *node, int64_t first)
{
    bool took[ZX_OP_MAX_OUT] = {0};
    for (int32_t k = 0; node->replay && k < node->op->n_out; k++)
        if (!node->out[k]->has_data) {
            ZX_TRY(zx_tensor_take(node->out[k], node->op->name)); /* the hold of the consumers to come */
            took[k] = true;
        }
    if (node->replay) {
        zx_op_call call;
        zx_call_open(&call, e, node->op, &node->attrs, node->in, node->n_in, node->out);
        ZX_TRY(node->op->forward(&call));
        if (e->dry && node->op->cost) e->current->flops += node->op->cost(&call).flops;
    }
    hold_saved(node);
    for (int32_t k = 0; k < node->op->n_out; k++)
        if (took[k]) {
            if (node->out[k]->replay_uses > 0)
                node->out[k]->replay_uses = -node->out[k]->replay_uses;
            else
                zx_tensor_unhold(node->out[k]);
        }
    for (int32_t k = 0; k < node->n_in; k++) {
        zx_tensor *t = node->in[k];
        /* negative: its replay hold is open and that many consumers are still to come */
        if (t && inside(t, first) && replay_uses(node, k) && t->replay_uses < 0 && ++t->replay_uses == 0)
            zx_tensor_unhold(t);
    }
    return ZX_OK;
}

static zx_status replay(zx_engine *e, int64_t first, int64_t last)
{
    mark_replay(e, first, last);
    for (int64_t i = first; i <= last; i++)
        ZX_TRY(replay_node(e, &e->nodes[i], first));
    return ZX_OK;
}

/* ---- the whole tape ---- */

static bool any_gradient(const zx_engine *e, int64_t first, int64_t last)
{
    for (int64_t i = first; i <= last; i++)
        if (e->nodes[i].requires_grad && e->nodes[i].out[0]->grad) return true;
    return false;
}

static void finish_node(zx_node *node)
{
    zx_node_drop_holds(node);
    for (int32_t k = 0; k < node->op->n_out; k++)
        zx_tensor_drop_grad(node->out[k]);
}

static zx_status walk(zx_engine *e)
{
    for (int64_t i = e->n_nodes - 1; i >= 0; i--) {
        zx_node *node = &e->nodes[i];
        if (node->kind == ZX_NODE_OP) {
            ZX_TRY(node_backward(e, node));
            finish_node(node);
        } else if (node->kind == ZX_NODE_EXIT) {
            if (!any_gradient(e, node->pair + 1, i - 1)) continue;
            ZX_TRY(zx_engine_acquire(e, node->unit));
            e->nodes[node->pair].acquired = true;
            if (node->recompute) ZX_TRY(replay(e, node->pair + 1, i - 1));
        } else {
            if (node->acquired) ZX_TRY(zx_engine_release(e, node->unit));
            node->acquired = false;
            if (--e->units[node->unit].uses == 0) ZX_TRY(zx_engine_reduce(e, node->unit));
        }
    }
    return ZX_OK;
}

/* {loss sum, denominator} of this micro-step, for the step to divide by. */
static zx_status count_loss(zx_engine *e, const zx_tensor *loss)
{
    zx_op_call call = {.engine = e, .name = "count"};
    zx_dtype sum = zx_dtype_sum(loss->dtype);
    if (loss->is_total) return e->dry ? ZX_OK : zx_store_count(e->store, e->stream, loss->data, sum);
    zx_temp pair;
    ZX_TRY(zx_call_temp(&call, 2 * zx_dtype_bytes(sum), &pair));
    zx_view both = zx_view_1d(pair.data, sum, 2), first = zx_view_1d(pair.data, sum, 1);
    zx_status status = fill_with(e, both, 1);
    zx_view value = zx_view_1d(loss->data, loss->dtype, 1);
    zx_cast_args args = {.a = value, .out = first};
    if (status == ZX_OK) status = ZX_CALL(&call, cast, &args);
    if (status == ZX_OK && !e->dry) status = zx_store_count(e->store, e->stream, pair.data, sum);
    zx_call_temp_end(&call, &pair);
    return status;
}

static zx_status check_loss(const zx_engine *e, const zx_tensor *loss)
{
    if (!e->in_pass || loss->engine != e || loss->generation != e->generation)
        ZX_FAIL(ZX_ERR_STATE, "backward takes the loss of the pass that is under way; this one is of pass %lld",
                (long long)loss->generation);
    if (e->current->mode != ZX_PASS_TRAIN)
        ZX_FAIL(ZX_ERR_STATE, "backward in an evaluation pass: nothing was recorded");
    if (e->current_unit >= 0)
        ZX_FAIL(ZX_ERR_STATE, "backward inside block '%s'", e->layout->units[e->current_unit].name);
    if (!loss->is_total && zx_tensor_numel(loss) != 1)
        ZX_FAIL(ZX_ERR_ARG, "backward needs a scalar loss and got %lld elements: take its sum or mean",
                (long long)zx_tensor_numel(loss));
    if (!loss->requires_grad)
        ZX_FAIL(ZX_ERR_ARG, "the loss depends on no trainable parameter: nothing would be learned");
    if (e->units[0].live == 0) ZX_FAIL(ZX_ERR_STATE, "backward was already called in this pass");
    return ZX_OK;
}

zx_status zx_engine_backward(zx_engine *e, zx_tensor *loss)
{
    ZX_TRY(check_loss(e, loss));
    ZX_TRY(count_loss(e, loss));
    ZX_TRY(own_grad(loss));
    ZX_TRY(fill_with(e, zx_tensor_view(loss->grad), 1));
    ZX_TRY(walk(e));
    zx_tensor_drop_grad(loss);
    zx_tape_clear(e);
    ZX_TRY(zx_engine_reduce(e, 0));
    return zx_engine_release(e, 0);
}
