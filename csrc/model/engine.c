/* engine.c - opening and closing an engine, and the life of a pass; see engine.h. */
#include "model/state.h"

zx_status zx_engine_open(const zx_engine_config *config, const zx_layout *layout, zx_device *dev, zx_comm *comm,
                         zx_engine **out)
{
    *out = NULL;
    zx_status zx_rc_ = ZX_OK;
    zx_engine *e;
    ZX_TRY(ZX_NEW(ZX_MEM_MODEL, e));
    e->config = *config;
    e->layout = layout;
    e->dev = dev;
    e->comm = comm;
    e->current_unit = -1;
    e->current_enter = -1;
    if (config->dtype != ZX_F32 && config->dtype != ZX_BF16 && config->dtype != ZX_F64)
        ZX_FAIL_GOTO(ZX_ERR_UNSUPPORTED, fail, "activations in %s: use float32, bfloat16 or float64",
                     zx_dtype_name(config->dtype));
    if (comm && zx_comm_world(comm) != layout->world)
        ZX_FAIL_GOTO(ZX_ERR_ARG, fail, "the layout is cut for %d ranks and the communicator has %d", layout->world,
                     zx_comm_world(comm));
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_MODEL, layout->n_units, e->units), fail);
    if (comm) {
        ZX_TRY_GOTO(zx_engine_check_limit(e), fail);
        zx_store_config store = {.policy = config->policy, .optimizer = config->optimizer, .poison = config->poison};
        ZX_TRY_GOTO(zx_stream_open(dev, "compute", &e->stream), fail);
        ZX_TRY_GOTO(zx_store_open(layout, &store, dev, comm, &e->store), fail);
    }
    *out = e;
    return ZX_OK;
fail:
    zx_engine_close(e);
    return zx_rc_;
}

void zx_engine_shutdown(zx_engine *e)
{
    if (!e || e->closed) return;
    if (e->in_pass) zx_engine_abandon(e);
    e->closed = true;
    zx_store_close(e->store);
    e->store = NULL;
    if (e->stream) zx_stream_close(e->stream);
    e->stream = NULL;
    zx_tensor_drop_kept(e);
    zx_engine_free_arena(e);
    for (int64_t i = 0; i < e->n_signatures; i++) {
        zx_plan_close(e->signatures[i]->plan);
        zx_trace_free(&e->signatures[i]->trace);
        zx_free(e->signatures[i]->events);
        zx_free(e->signatures[i]);
    }
    zx_free(e->signatures);
    e->signatures = NULL;
    e->n_signatures = 0;
    e->current = NULL;
}

void zx_engine_close(zx_engine *e)
{
    if (!e) return;
    zx_engine_shutdown(e);
    zx_arena_free(&e->arena);
    zx_tensor_free_slabs(e);
    zx_free(e->nodes);
    zx_free(e->units);
    zx_free(e);
}

static zx_signature *find_signature(const zx_engine *e, uint64_t key)
{
    for (int64_t i = 0; i < e->n_signatures; i++)
        if (e->signatures[i]->key == key) return e->signatures[i];
    return NULL;
}

bool zx_engine_planned(const zx_engine *e, uint64_t key)
{
    const zx_signature *sig = find_signature(e, key);
    return sig && sig->planned;
}

static zx_status signature_for(zx_engine *e, uint64_t key, zx_pass_mode mode, bool dry, zx_signature **out)
{
    *out = find_signature(e, key);
    if (*out && (*out)->mode != mode)
        ZX_FAIL(ZX_ERR_BUG, "signature %llu stands for two modes", (unsigned long long)key);
    if (!dry && !(*out && (*out)->planned))
        ZX_FAIL(ZX_ERR_STATE, "signature %llu was not run dry yet", (unsigned long long)key);
    if (*out) return ZX_OK;
    if (e->n_signatures == e->signatures_capacity)
        ZX_TRY(zx_grow_array(ZX_MEM_MODEL, (void **)&e->signatures, e->n_signatures, &e->signatures_capacity,
                             sizeof *e->signatures));
    zx_signature *sig;
    ZX_TRY(ZX_NEW(ZX_MEM_MODEL, sig));
    sig->key = key;
    sig->mode = mode;
    e->signatures[e->n_signatures++] = sig;
    *out = sig;
    return ZX_OK;
}

static zx_status check_open(const zx_engine *e)
{
    if (e->closed) ZX_FAIL(ZX_ERR_STATE, "the engine is closed");
    return ZX_OK;
}

static zx_status check_pass(const zx_engine *e)
{
    ZX_TRY(check_open(e));
    if (!e->in_pass) ZX_FAIL(ZX_ERR_STATE, "no pass has begun: tensors are made inside engine(...) or train_step");
    return ZX_OK;
}

zx_status zx_engine_begin(zx_engine *e, uint64_t key, zx_pass_mode mode, bool dry)
{
    ZX_TRY(check_open(e));
    if (e->in_pass) ZX_FAIL(ZX_ERR_STATE, "a pass is already under way: end it first");
    if (!dry && !e->store) ZX_FAIL(ZX_ERR_STATE, "this engine was opened for planning only: it has no communicator");
    zx_signature *sig;
    ZX_TRY(signature_for(e, key, mode, dry, &sig));
    if (!dry) {
        ZX_TRY(zx_comm_check(e->comm));
        ZX_TRY(zx_stream_sync(e->stream)); /* the host memory of the last pass's inputs is free after this */
        ZX_TRY(zx_store_set_plan(e->store, sig->plan));
        ZX_TRY(zx_store_begin_pass(e->store));
        zx_arena_begin(&e->arena, &sig->trace, e->arena_base, e->config.spare_bytes);
    } else {
        zx_trace_reset(&sig->trace);
        sig->n_events = 0;
        sig->planned = false;
        sig->flops = 0;
    }
    e->current = sig;
    e->dry = dry;
    e->in_pass = true;
    e->generation++;
    e->current_unit = -1;
    e->current_enter = -1;
    for (int32_t u = 0; u < e->layout->n_units; u++)
        e->units[u] = (zx_unit_use){0};
    zx_status status = zx_engine_acquire(e, 0);
    if (status != ZX_OK) zx_engine_abandon(e);
    return status;
}

/* After a dry pass: where everything will lie, whether it fits, what to gather when. */
static zx_status plan_signature(zx_engine *e, zx_signature *sig)
{
    ZX_TRY(zx_trace_plan(&sig->trace));
    zx_slots *slots = NULL;
    zx_status zx_rc_ = ZX_OK;
    ZX_TRY_GOTO(zx_slots_open_for(e->layout, &e->config.policy, false, NULL, 0, &slots), done);
    zx_plan_close(sig->plan);
    sig->plan = NULL;
    ZX_TRY_GOTO(zx_plan_open(e->layout, &e->config.policy, slots, sig->events, sig->n_events, &sig->plan), done);
    ZX_TRY_GOTO(zx_engine_fit(e, sig), done);
    sig->planned = true;
done:
    if (zx_rc_ != ZX_OK) sig->trace.planned_bytes = 0; /* it will not be run: it takes part in no maximum */
    zx_slots_close(slots);
    return zx_rc_;
}

zx_status zx_engine_end(zx_engine *e)
{
    ZX_TRY(check_pass(e));
    if (e->current_unit >= 0)
        ZX_FAIL(ZX_ERR_STATE, "block '%s' was entered and not left", e->layout->units[e->current_unit].name);
    zx_tape_clear(e);
    if (e->units[0].live) ZX_TRY(zx_engine_release(e, 0));
    e->in_pass = false;
    if (!e->dry) return zx_comm_check(e->comm);
    zx_status status = plan_signature(e, e->current);
    e->generation++; /* tensors of a dry run are never read */
    e->dry = false;
    return status;
}

void zx_engine_abandon(zx_engine *e)
{
    if (!e->in_pass) return;
    zx_tape_clear(e);
    if (!e->dry && e->store) zx_store_abandon_pass(e->store, e->stream);
    for (int32_t u = 0; u < e->layout->n_units; u++)
        e->units[u] = (zx_unit_use){0};
    e->in_pass = false;
    e->dry = false;
    e->generation++;
    e->current_unit = -1;
    e->current_enter = -1;
}

zx_status zx_engine_input(zx_engine *e, const char *name, zx_dtype dtype, int32_t ndim, const int64_t *shape,
                          const void *host, zx_tensor **out)
{
    *out = NULL;
    ZX_TRY(check_pass(e));
    if (ndim < 0 || ndim > ZX_MAX_DIMS)
        ZX_FAIL(ZX_ERR_ARG, "input '%s' has %d dimensions; at most %d are possible", name, ndim, ZX_MAX_DIMS);
    zx_shape s = {.dtype = dtype, .ndim = ndim};
    for (int i = 0; i < ndim; i++)
        s.dim[i] = shape[i];
    zx_tensor *t;
    ZX_TRY(zx_tensor_new(e, &s, &t));
    zx_status status = zx_tensor_take(t, name);
    if (status == ZX_OK && !e->dry) status = zx_stream_copy(e->stream, t->data, host, zx_tensor_bytes(t));
    if (status != ZX_OK) {
        if (t->holds) zx_tensor_unhold(t);
        zx_tensor_unref(t);
        return status;
    }
    *out = t;
    return ZX_OK;
}

zx_status zx_engine_param(zx_engine *e, int64_t param, zx_tensor **out)
{
    *out = NULL;
    ZX_TRY(check_open(e));
    if (param < 0 || param >= e->layout->n_params)
        ZX_FAIL(ZX_ERR_ARG, "parameter %lld of %lld", (long long)param, (long long)e->layout->n_params);
    const zx_param *p = &e->layout->params[param];
    zx_shape s = {.dtype = p->dtype, .ndim = p->ndim};
    memcpy(s.dim, p->shape, sizeof s.dim);
    zx_tensor *t;
    ZX_TRY(zx_tensor_new(e, &s, &t));
    t->kind = ZX_TENSOR_PARAM;
    t->param = param;
    t->unit = e->layout->ranges[e->layout->places[param].range].unit;
    t->requires_grad = p->trainable;
    t->has_data = true;
    t->data = e->store ? zx_store_param_addr(e->store, param) : NULL;
    t->holds = 1;
    *out = t;
    return ZX_OK;
}

zx_status zx_engine_step(zx_engine *e, const zx_step_options *options, zx_step_ctl *out)
{
    memset(out, 0, sizeof *out);
    ZX_TRY(check_open(e));
    if (e->in_pass) ZX_FAIL(ZX_ERR_STATE, "step inside a pass: end the pass first");
    if (!e->store) ZX_FAIL(ZX_ERR_STATE, "this engine was opened for planning only");
    ZX_TRY(zx_store_step(e->store, e->stream, options));
    ZX_TRY(zx_store_step_result(e->store, e->stream, out));
    return zx_comm_check(e->comm);
}

zx_store *zx_engine_store(const zx_engine *e)
{
    return e->store;
}
zx_device *zx_engine_device(const zx_engine *e)
{
    return e->dev;
}
zx_stream *zx_engine_stream(const zx_engine *e)
{
    return e->stream;
}
const zx_layout *zx_engine_layout(const zx_engine *e)
{
    return e->layout;
}
bool zx_engine_dry(const zx_engine *e)
{
    return e->in_pass && e->dry;
}
bool zx_engine_in_pass(const zx_engine *e)
{
    return e->in_pass;
}
int64_t zx_engine_generation(const zx_engine *e)
{
    return e->generation;
}
