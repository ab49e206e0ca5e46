/* engine_memory.c - the arena behind a pass: one range of addresses for the engine's life, into which memory is mapped
 * as signatures are planned. A dry run only writes down. */
#include "model/state.h"

zx_status zx_engine_take(zx_engine *e, const char *name, size_t bytes, zx_block *block, void **data)
{
    *data = NULL;
    *block = (zx_block){.id = -1};
    if (e->dry) return zx_trace_add(&e->current->trace, name, bytes, &block->id);
    ZX_TRY(zx_arena_take(&e->arena, name, bytes, block));
    *data = e->arena_base + block->offset;
    return ZX_OK;
}

void zx_engine_give(zx_engine *e, zx_block *block)
{
    if (e->dry)
        zx_trace_end(&e->current->trace, block->id);
    else
        zx_arena_give(&e->arena, block);
    *block = (zx_block){.id = -1};
}

zx_engine_memory zx_engine_memory_get(const zx_engine *e)
{
    zx_engine_memory m = {.store = zx_layout_bytes(e->layout, &e->config.policy)};
    const zx_device_caps *caps = zx_device_caps_get(e->dev);
    for (int64_t i = 0; i < e->n_signatures; i++) {
        const zx_signature *sig = e->signatures[i];
        if (sig->trace.planned_bytes > m.activations) m.activations = sig->trace.planned_bytes;
        if (sig->planned && sig->mode == ZX_PASS_TRAIN) m.flops = sig->flops;
    }
    m.activations = (size_t)zx_round_up((int64_t)m.activations, (int64_t)caps->granule);
    m.spare = (size_t)zx_round_up((int64_t)e->config.spare_bytes, (int64_t)caps->granule);
    m.scratch = e->scratch_bytes;
    m.comm = e->comm ? zx_comm_bytes(e->comm) : 0;
    m.total = m.store.total + m.activations + m.spare + m.scratch + m.comm;
    m.limit = e->config.memory_limit ? e->config.memory_limit : caps->total_bytes;
    m.n_deviations = e->arena.n_deviations;
    return m;
}

zx_status zx_engine_check_limit(const zx_engine *e)
{
    zx_engine_memory m = zx_engine_memory_get(e);
    const double mb = 1e-6;
    if (m.total <= m.limit) return ZX_OK;
    ZX_FAIL(ZX_ERR_NOMEM,
            "this model needs %.1f MB on each rank and may use %.1f MB: parameters %.1f, optimizer %.1f, gradients "
            "%.1f, slots %.1f, activations %.1f, spare %.1f, scratch %.1f MB. %s",
            (double)m.total * mb, (double)m.limit * mb, (double)m.store.params * mb,
            (double)(m.store.master + m.store.moments) * mb, (double)m.store.grads * mb,
            (double)(m.store.param_slots + m.store.grad_slots) * mb, (double)m.activations * mb, (double)m.spare * mb,
            (double)m.scratch * mb,
            m.activations > m.store.total
                ? "Activations are the largest part: use recompute=True or a smaller micro-batch"
                : "The model's state is the largest part: use a higher zero stage or more ranks");
}

zx_status zx_engine_fit(zx_engine *e, const zx_signature *sig)
{
    ZX_TRY(zx_engine_check_limit(e));
    if (!e->store) return ZX_OK;
    size_t granule = zx_device_caps_get(e->dev)->granule;
    size_t wanted = (size_t)zx_round_up((int64_t)(sig->trace.planned_bytes + e->config.spare_bytes), (int64_t)granule);
    if (wanted > e->arena_mapped) {
        if (e->arena_mapped == 0 && e->arena_base == NULL) {
            e->arena_reserved = (size_t)zx_round_up((int64_t)zx_engine_memory_get(e).limit, (int64_t)granule) + granule;
            ZX_TRY(zx_device_reserve(e->dev, e->arena_reserved, (void **)&e->arena_base));
        }
        if (wanted > e->arena_reserved)
            ZX_FAIL(ZX_ERR_NOMEM, "activations need %zu bytes and %zu were reserved", wanted, e->arena_reserved);
        if (e->n_arena_mems == e->arena_mems_capacity)
            ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&e->arena_mems, e->n_arena_mems, &e->arena_mems_capacity,
                                 sizeof *e->arena_mems));
        size_t more = wanted - e->arena_mapped;
        zx_mem *mem;
        ZX_TRY(zx_mem_open(e->dev, more, false, &mem));
        zx_status status = zx_device_map(e->dev, e->arena_base + e->arena_mapped, mem, 0, more);
        if (status != ZX_OK) {
            zx_mem_close(mem);
            return status;
        }
        e->arena_mems[e->n_arena_mems++] = mem;
        e->arena_mapped = wanted;
    }
    return zx_stream_set_scratch(e->stream, e->scratch_bytes);
}

void zx_engine_free_arena(zx_engine *e)
{
    if (e->arena_base) zx_device_unreserve(e->dev, e->arena_base, e->arena_reserved);
    for (int64_t i = 0; i < e->n_arena_mems; i++)
        zx_mem_close(e->arena_mems[i]);
    zx_free(e->arena_mems);
    e->arena_mems = NULL;
    e->arena_base = NULL;
    e->n_arena_mems = e->arena_mems_capacity = 0;
    e->arena_mapped = e->arena_reserved = 0;
}
