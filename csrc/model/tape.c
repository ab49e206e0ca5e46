/* tape.c - running an operation and writing it down.
 *
 * Outside a recomputed block a node holds what its operation's backward will read. Inside one it holds only what comes
 * from outside the block (the block's input); backward runs the block's nodes again first. Parameters are never held:
 * their bytes are the store's.
 */
#include "model/state.h"

void zx_call_open(zx_op_call *call, zx_engine *e, const zx_opdef *op, const zx_attrs *attrs, zx_tensor *const *in,
                  int32_t n_in, zx_tensor *const *out)
{
    memset(call, 0, sizeof *call);
    call->engine = e;
    call->name = op->name;
    call->attrs = attrs;
    call->n_in = n_in;
    call->n_out = op->n_out;
    for (int32_t k = 0; k < n_in; k++) {
        call->has_in[k] = in[k] != NULL;
        if (in[k]) call->in[k] = zx_tensor_view(in[k]);
    }
    for (int32_t k = 0; k < op->n_out; k++)
        call->out[k] = zx_tensor_view(out[k]);
}

zx_status zx_call_launch(zx_op_call *call, zx_op_id op, const void *args, size_t args_bytes)
{
    zx_engine *e = call->engine;
    if (!e->dry) return zx_device_launch(e->stream, op, args, args_bytes);
    size_t scratch = zx_device_scratch_bytes(e->dev, op, args);
    if (scratch > e->scratch_bytes) e->scratch_bytes = scratch;
    return ZX_OK;
}

zx_status zx_call_temp(zx_op_call *call, size_t bytes, zx_temp *out)
{
    return zx_engine_take(call->engine, call->name, bytes, &out->block, &out->data);
}

void zx_call_temp_end(zx_op_call *call, zx_temp *temp)
{
    zx_engine_give(call->engine, &temp->block);
}

zx_status zx_tape_push(zx_engine *e, zx_node **out)
{
    if (e->n_nodes == e->nodes_capacity)
        ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&e->nodes, e->n_nodes, &e->nodes_capacity, sizeof *e->nodes));
    *out = &e->nodes[e->n_nodes++];
    memset(*out, 0, sizeof **out);
    return ZX_OK;
}

void zx_node_drop_holds(zx_node *node)
{
    for (int32_t k = 0; k < node->n_in; k++)
        if (node->held_in >> k & 1) zx_tensor_unhold(node->in[k]);
    for (int32_t k = 0; node->op && k < node->op->n_out; k++)
        if (node->held_out >> k & 1) zx_tensor_unhold(node->out[k]);
    node->held_in = node->held_out = 0;
}

void zx_tape_clear(zx_engine *e)
{
    for (int64_t i = e->n_nodes - 1; i >= 0; i--) {
        zx_node *node = &e->nodes[i];
        if (node->kind != ZX_NODE_OP) continue;
        zx_node_drop_holds(node);
        for (int32_t k = 0; k < node->op->n_out; k++) {
            zx_tensor_drop_grad(node->out[k]);
            zx_tensor_unref(node->out[k]);
        }
        for (int32_t k = 0; k < node->n_in; k++)
            if (node->in[k]) {
                zx_tensor_drop_grad(node->in[k]);
                zx_tensor_unref(node->in[k]);
            }
    }
    e->n_nodes = 0;
}

/* ---- blocks ---- */

zx_status zx_engine_enter(zx_engine *e, int32_t unit, bool recompute)
{
    if (!e->in_pass) ZX_FAIL(ZX_ERR_STATE, "a block is entered outside a pass");
    if (unit <= 0 || unit >= e->layout->n_units)
        ZX_FAIL(ZX_ERR_ARG, "block %d does not exist: this model has %d", unit, e->layout->n_units - 1);
    if (e->current_unit >= 0)
        ZX_FAIL(ZX_ERR_STATE, "block '%s' is called inside block '%s': blocks are gathered one by one and cannot nest",
                e->layout->units[unit].name, e->layout->units[e->current_unit].name);
    ZX_TRY(zx_engine_acquire(e, unit));
    e->current_unit = unit;
    e->current_enter = -1;
    e->current_recompute = false;
    if (e->current->mode != ZX_PASS_TRAIN) return ZX_OK;
    zx_node *node;
    ZX_TRY(zx_tape_push(e, &node));
    node->kind = ZX_NODE_ENTER;
    node->unit = unit;
    node->recompute = recompute;
    e->current_enter = e->n_nodes - 1;
    e->current_recompute = recompute;
    e->units[unit].uses++;
    return ZX_OK;
}

zx_status zx_engine_exit(zx_engine *e, int32_t unit)
{
    if (!e->in_pass || e->current_unit != unit) ZX_FAIL(ZX_ERR_STATE, "block %d is left and was not entered", unit);
    if (e->current->mode == ZX_PASS_TRAIN) {
        zx_node *node;
        ZX_TRY(zx_tape_push(e, &node));
        node->kind = ZX_NODE_EXIT;
        node->unit = unit;
        node->recompute = e->current_recompute;
        node->pair = e->current_enter;
    }
    e->current_unit = -1;
    e->current_enter = -1;
    e->current_recompute = false;
    return zx_engine_release(e, unit);
}

/* ---- apply ---- */

static zx_status check_input(const zx_engine *e, const zx_opdef *op, const zx_tensor *t, int32_t k)
{
    if (t->engine != e) ZX_FAIL(ZX_ERR_ARG, "%s: input %d belongs to another engine", op->name, k);
    if (t->is_total)
        ZX_FAIL(ZX_ERR_ARG,
                "%s: input %d is a counted loss (a sum and its number of labels); it can only go to engine.backward, "
                "which divides by the labels of all ranks and micro-steps. It cannot be mixed with other terms",
                op->name, k);
    if (t->kind == ZX_TENSOR_PARAM) {
        if (e->units[t->unit].live == 0)
            ZX_FAIL(ZX_ERR_STATE,
                    "%s: parameter '%s' belongs to block '%s', which is not running: use it inside that block's "
                    "forward, or let the root module own it",
                    op->name, e->layout->params[t->param].name, e->layout->units[t->unit].name);
        return ZX_OK;
    }
    if (t->kind == ZX_TENSOR_VALUE && t->generation != e->generation)
        ZX_FAIL(ZX_ERR_STATE, "%s: input %d belongs to an earlier pass; keep() it to use it later", op->name, k);
    if (!t->has_data) ZX_FAIL(ZX_ERR_STATE, "%s: the bytes of input %d were given back already", op->name, k);
    return ZX_OK;
}

static zx_status check_inputs(zx_engine *e, const zx_opdef *op, zx_tensor *const *in, int32_t n_in)
{
    if (!e->in_pass)
        ZX_FAIL(ZX_ERR_STATE, "%s outside a pass: tensors are computed inside engine(...) or train_step", op->name);
    if (n_in < op->min_in || n_in > op->max_in)
        ZX_FAIL(ZX_ERR_ARG, "%s takes %d to %d inputs and got %d", op->name, op->min_in, op->max_in, n_in);
    for (int32_t k = 0; k < n_in; k++) {
        if (!in[k] && k < op->min_in) ZX_FAIL(ZX_ERR_ARG, "%s: input %d is missing", op->name, k);
        if (in[k]) ZX_TRY(check_input(e, op, in[k], k));
    }
    return ZX_OK;
}

/* Made before the current recomputed block began, so replaying cannot make it again. */
static bool from_outside(const zx_engine *e, const zx_tensor *t)
{
    return t->node <= e->current_enter;
}

static zx_status record(zx_engine *e, const zx_opdef *op, zx_tensor *const *in, int32_t n_in, const zx_attrs *attrs,
                        zx_tensor *const *out, bool requires_grad)
{
    zx_node *node;
    ZX_TRY(zx_tape_push(e, &node));
    node->op = op;
    node->attrs = *attrs;
    node->n_in = n_in;
    node->requires_grad = requires_grad;
    for (int32_t k = 0; k < n_in; k++) {
        node->in[k] = in[k];
        if (!in[k]) continue;
        zx_tensor_ref(in[k]);
        bool wanted = e->current_recompute ? from_outside(e, in[k]) : (op->save_in >> k & 1);
        if (wanted && in[k]->kind != ZX_TENSOR_PARAM) {
            zx_tensor_hold(in[k]);
            node->held_in |= 1u << k;
        }
    }
    for (int32_t k = 0; k < op->n_out; k++) {
        node->out[k] = out[k];
        out[k]->node = e->n_nodes - 1;
        zx_tensor_ref(out[k]);
        if (!e->current_recompute && (op->save_out >> k & 1)) {
            zx_tensor_hold(out[k]);
            node->held_out |= 1u << k;
        }
    }
    return ZX_OK;
}

zx_status zx_engine_apply(zx_engine *e, const zx_opdef *op, zx_tensor *const *in, int32_t n_in, const zx_attrs *attrs,
                          zx_tensor **out)
{
    *out = NULL;
    ZX_TRY(check_inputs(e, op, in, n_in));
    zx_shape in_shape[ZX_OP_MAX_IN] = {0}, out_shape[ZX_OP_MAX_OUT] = {0};
    bool has_in[ZX_OP_MAX_IN] = {0}, requires_grad = false;
    for (int32_t k = 0; k < n_in; k++) {
        has_in[k] = in[k] != NULL;
        if (!in[k]) continue;
        in_shape[k] = zx_tensor_shape(in[k]);
        requires_grad |= in[k]->requires_grad;
    }
    requires_grad = requires_grad && e->current->mode == ZX_PASS_TRAIN;
    ZX_TRY(op->infer(in_shape, has_in, n_in, attrs, out_shape));

    zx_tensor *made[ZX_OP_MAX_OUT] = {0};
    zx_status zx_rc_ = ZX_OK;
    zx_op_call call;
    for (int32_t k = 0; k < op->n_out; k++) {
        ZX_TRY_GOTO(zx_tensor_new(e, &out_shape[k], &made[k]), fail);
        ZX_TRY_GOTO(zx_tensor_take(made[k], op->name), fail);
        made[k]->requires_grad = requires_grad && k == 0;
    }
    zx_call_open(&call, e, op, attrs, in, n_in, made);
    ZX_TRY_GOTO(op->forward(&call), fail);
    if (e->dry) e->current->flops += op->cost ? op->cost(&call).flops : 0;
    if (requires_grad || (e->current->mode == ZX_PASS_TRAIN && e->current_recompute))
        ZX_TRY_GOTO(record(e, op, in, n_in, attrs, made, requires_grad), fail);
    for (int32_t k = 1; k < op->n_out; k++) { /* notes belong to the node alone */
        zx_tensor_unhold(made[k]);
        zx_tensor_unref(made[k]);
    }
    made[0]->is_total = op->is_total;
    *out = made[0];
    return ZX_OK;
fail:
    for (int32_t k = 0; k < op->n_out; k++) {
        if (!made[k]) continue;
        if (made[k]->holds) zx_tensor_unhold(made[k]);
        zx_tensor_unref(made[k]);
    }
    return zx_rc_;
}
