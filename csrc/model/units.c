/* units.c - the store's verbs as the tape calls them: each is also written down in a dry run, which is the trace that
 * slots are proved with and prefetch is planned from. */
#include "model/state.h"

static zx_status note(zx_engine *e, zx_unit_verb verb, int32_t unit)
{
    zx_signature *sig = e->current;
    if (!e->dry) return ZX_OK;
    if (sig->n_events == sig->events_capacity)
        ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&sig->events, sig->n_events, &sig->events_capacity,
                             sizeof *sig->events));
    sig->events[sig->n_events++] = (zx_unit_event){.verb = verb, .unit = unit};
    return ZX_OK;
}

zx_status zx_engine_acquire(zx_engine *e, int32_t unit)
{
    void *base;
    ZX_TRY(note(e, ZX_ACQUIRE, unit));
    if (!e->dry) ZX_TRY(zx_store_acquire(e->store, unit, e->stream, &base));
    e->units[unit].live++;
    return ZX_OK;
}

zx_status zx_engine_release(zx_engine *e, int32_t unit)
{
    ZX_TRY(note(e, ZX_RELEASE, unit));
    e->units[unit].live--;
    return e->dry ? ZX_OK : zx_store_release(e->store, unit, e->stream);
}

zx_status zx_engine_grad(zx_engine *e, int32_t unit)
{
    void *base;
    if (e->units[unit].has_grad) return ZX_OK;
    ZX_TRY(note(e, ZX_GRAD, unit));
    if (!e->dry) ZX_TRY(zx_store_grad(e->store, unit, e->stream, &base));
    e->units[unit].has_grad = true;
    return ZX_OK;
}

zx_status zx_engine_reduce(zx_engine *e, int32_t unit)
{
    if (!e->layout->units[unit].trainable) return ZX_OK;
    ZX_TRY(zx_engine_grad(e, unit)); /* a unit that got no gradient counts as zero */
    ZX_TRY(note(e, ZX_REDUCE, unit));
    e->units[unit].has_grad = false;
    return e->dry ? ZX_OK : zx_store_reduce(e->store, unit, e->stream);
}
