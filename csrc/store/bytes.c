/* bytes.c - policies, and every byte that a store holds, before anything is allocated. */
#include "kernels/kernels.h"
#include "store/slots.h"

zx_status zx_policy_for_stage(int stage, zx_policy *out)
{
    *out = (zx_policy){0};
    if (stage < 0 || stage > 3) ZX_FAIL(ZX_ERR_ARG, "ZeRO stage %d: use 0, 1, 2 or 3", stage);
    *out = (zx_policy){
        .shard_state = stage >= 1,
        .shard_grads = stage >= 2,
        .shard_params = stage >= 3,
        .reduce_at = stage >= 2 ? ZX_REDUCE_MICRO : ZX_REDUCE_STEP,
        .n_slots = 2,
        .n_grad_slots = 2,
        .n_moments = 2,
        .prefetch = true,
        .reduce_dtype = ZX_F32,
    };
    return ZX_OK;
}

zx_status zx_policy_check(const zx_policy *p)
{
    if ((p->shard_params && !p->shard_grads) || (p->shard_grads && !p->shard_state))
        ZX_FAIL(ZX_ERR_ARG,
                "shard_state %d, shard_grads %d, shard_params %d: sharded parameters need sharded gradients, "
                "and these "
                "sharded state",
                p->shard_state, p->shard_grads, p->shard_params);
    if (p->n_slots < 1 || p->n_grad_slots < 1)
        ZX_FAIL(ZX_ERR_ARG, "n_slots %d and n_grad_slots %d: both need at least 1", p->n_slots, p->n_grad_slots);
    if (p->n_moments < 0 || p->n_moments > 2)
        ZX_FAIL(ZX_ERR_ARG, "an optimizer with %d moments: 0, 1 or 2 are possible", p->n_moments);
    if (p->reduce_dtype != ZX_F32 && p->reduce_dtype != ZX_BF16)
        ZX_FAIL(ZX_ERR_ARG, "gradients cannot be reduced in %s: use float32 or bfloat16",
                zx_dtype_name(p->reduce_dtype));
    if (p->reduce_at != ZX_REDUCE_MICRO && p->reduce_at != ZX_REDUCE_STEP)
        ZX_FAIL(ZX_ERR_ARG, "reduce_at %d: use micro (0) or step (1)", (int)p->reduce_at);
    return ZX_OK;
}

zx_policy zx_policy_at_world(const zx_policy *policy, int32_t world)
{
    zx_policy p = *policy;
    if (world == 1) {
        p.shard_state = p.shard_grads = p.shard_params = false;
        p.reduce_at = ZX_REDUCE_STEP;
        p.reduce_dtype = ZX_F32;
    }
    return p;
}

size_t zx_layout_state_bytes(const zx_layout *layout, bool full, bool masters_only)
{
    size_t bytes = 0;
    for (int32_t r = 0; r < layout->n_ranges; r++) {
        const zx_range *range = &layout->ranges[r];
        zx_dtype sum = zx_dtype_sum(range->dtype);
        if (!range->trainable || (masters_only && range->dtype == sum)) continue;
        bytes += (size_t)(full ? range->n_padded : range->slice) * zx_dtype_bytes(sum);
    }
    return bytes;
}

size_t zx_layout_wire_bytes(const zx_layout *layout, const zx_policy *policy)
{
    zx_policy p = zx_policy_at_world(policy, layout->world);
    size_t bytes = 0;
    if (p.reduce_dtype == ZX_F32) return 0;
    for (int32_t r = 0; r < layout->n_ranges; r++) {
        const zx_range *range = &layout->ranges[r];
        size_t needed = (size_t)range->n_padded * zx_dtype_bytes(p.reduce_dtype);
        if (range->trainable && zx_dtype_sum(range->dtype) == ZX_F32 && needed > bytes) bytes = needed;
    }
    return bytes;
}

static size_t put(size_t *end, size_t bytes)
{
    size_t at = *end;
    *end = (at + bytes + 255) / 256 * 256;
    return at;
}

zx_control_places zx_layout_control(const zx_layout *layout)
{
    zx_control_places c = {0};
    size_t world = (size_t)layout->world, n_segments = 0, pair = 2 * sizeof(double);
    for (int32_t r = 0; r < layout->n_ranges; r++)
        c.n_trainable_ranges += layout->ranges[r].trainable && layout->ranges[r].slice > 0;
    for (int64_t i = 0; i < layout->n_params; i++) {
        const zx_param *p = &layout->params[i];
        n_segments += p->trainable && p->tied_to < 0 && layout->places[i].n > 0;
    }
    size_t partials = (size_t)c.n_trainable_ranges * sizeof(double);
    c.partials = put(&c.bytes, world * partials);
    c.totals = put(&c.bytes, world * pair);
    c.own_partials = put(&c.bytes, partials);
    c.own_totals = put(&c.bytes, pair);
    c.saved_totals = put(&c.bytes, pair);
    c.scratch_totals = put(&c.bytes, pair);
    c.ctl = put(&c.bytes, sizeof(zx_step_ctl));
    c.hyper = put(&c.bytes, (size_t)layout->n_groups * sizeof(zx_hyper));
    c.segments = put(&c.bytes, n_segments * sizeof(zx_segment));
    return c;
}

static size_t up(size_t bytes, size_t granule)
{
    return (bytes + granule - 1) / granule * granule;
}

/* Units in index order take slots 1 .. k in turn; the root has its own: what zx_slots_open does without a
 * trace. */
static size_t default_slots(const zx_layout *l, int32_t k, bool grads)
{
    size_t total = grads ? l->units[0].grad_bytes : l->units[0].param_bytes;
    for (int32_t slot = 0; slot < k && slot < l->n_units; slot++) {
        size_t most = 0;
        int64_t nth = 0;
        for (int32_t u = 1; u < l->n_units; u++) {
            size_t bytes = grads ? l->units[u].grad_bytes : l->units[u].param_bytes;
            if (bytes == 0) continue;
            if (nth++ % k == slot && bytes > most) most = bytes;
        }
        total += most;
    }
    return total;
}

zx_store_bytes zx_slots_store_bytes(const zx_layout *layout, const zx_policy *policy, const zx_slots *param_slots,
                                    const zx_slots *grad_slots)
{
    zx_policy p = zx_policy_at_world(policy, layout->world);
    size_t granule = layout->granule;
    bool full = !p.shard_state;
    zx_store_bytes b = {0};
    if (p.shard_params) {
        b.params = up(layout->shard_bytes, granule);
        b.param_slots = param_slots ? zx_slots_bytes(param_slots) : default_slots(layout, p.n_slots, false);
    } else {
        for (int32_t u = 0; u < layout->n_units; u++)
            b.params += layout->units[u].param_bytes;
    }
    b.master = zx_layout_state_bytes(layout, full, true);
    b.moments = zx_layout_state_bytes(layout, full, false) * (size_t)p.n_moments;
    if (p.reduce_at == ZX_REDUCE_STEP) {
        for (int32_t u = 0; u < layout->n_units; u++)
            b.grads += layout->units[u].grad_bytes;
    } else {
        b.grads = up(zx_layout_state_bytes(layout, full, false), granule);
        b.grad_slots = grad_slots ? zx_slots_bytes(grad_slots) : default_slots(layout, p.n_grad_slots, true);
    }
    b.wire = up(zx_layout_wire_bytes(layout, policy), granule);
    b.control = up(zx_layout_control(layout).bytes, granule);
    b.total = b.params + b.master + b.moments + b.grads + b.param_slots + b.grad_slots + b.wire + b.control;
    return b;
}

zx_store_bytes zx_layout_bytes(const zx_layout *layout, const zx_policy *policy)
{
    return zx_slots_store_bytes(layout, policy, NULL, NULL);
}
