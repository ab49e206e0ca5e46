/* states.c - the tables. A missing entry is an illegal event. */
#include "store/states.h"

enum { ILLEGAL = 0 }; /* entries hold 1 + the next state */

#define TO(state) (1 + ZX_PARAM_##state)
static const uint8_t param_next[ZX_N_PARAM_STATES][ZX_N_PARAM_EVENTS] = {
    [ZX_PARAM_SHARDED] = {[ZX_ON_PREFETCH] = TO(GATHERING), [ZX_ON_RAISE] = TO(SHARDED)},
    [ZX_PARAM_GATHERING] = {[ZX_ON_PREFETCH] = TO(GATHERING),
                            [ZX_ON_ACQUIRE] = TO(LIVE),
                            [ZX_ON_EVICT] = TO(SHARDED),
                            [ZX_ON_RAISE] = TO(SHARDED)},
    [ZX_PARAM_LIVE] = {[ZX_ON_ACQUIRE] = TO(LIVE), [ZX_ON_RELEASE] = TO(LIVE), [ZX_ON_LAST_RELEASE] = TO(RESIDENT)},
    [ZX_PARAM_RESIDENT] = {[ZX_ON_PREFETCH] = TO(GATHERING),
                           [ZX_ON_ACQUIRE] = TO(LIVE),
                           [ZX_ON_EVICT] = TO(SHARDED),
                           [ZX_ON_RAISE] = TO(SHARDED)},
};
#undef TO

#define TO(state) (1 + ZX_GRAD_##state)
static const uint8_t grad_next[ZX_N_GRAD_STATES][ZX_N_GRAD_EVENTS] = {
    [ZX_GRAD_NONE] = {[ZX_ON_GRAD] = TO(FULL), [ZX_ON_DISCARD] = TO(NONE)},
    [ZX_GRAD_FULL] = {[ZX_ON_GRAD] = TO(FULL),
                      [ZX_ON_KEEP] = TO(HELD),
                      [ZX_ON_REDUCE] = TO(REDUCING),
                      [ZX_ON_DISCARD] = TO(NONE)},
    [ZX_GRAD_HELD] = {[ZX_ON_GRAD] = TO(FULL), [ZX_ON_REDUCE] = TO(REDUCING), [ZX_ON_DISCARD] = TO(NONE)},
    [ZX_GRAD_REDUCING] = {[ZX_ON_DONE] = TO(NONE), [ZX_ON_DISCARD] = TO(NONE)},
};
#undef TO

static const char *const param_states[ZX_N_PARAM_STATES] = {"SHARDED", "GATHERING", "LIVE", "RESIDENT"};
static const char *const param_events[ZX_N_PARAM_EVENTS] = {"prefetch",     "acquire", "release",
                                                            "last release", "evict",   "a new version"};
static const char *const grad_states[ZX_N_GRAD_STATES] = {"NONE", "FULL", "HELD", "REDUCING"};
static const char *const grad_events[ZX_N_GRAD_EVENTS] = {"grad", "reduce", "reduce", "done", "discard"};

const char *zx_param_state_name(zx_param_state state)
{
    return param_states[state];
}

const char *zx_grad_state_name(zx_grad_state state)
{
    return grad_states[state];
}

static const char *advice(zx_param_state state, zx_param_event event)
{
    if (state == ZX_PARAM_LIVE) return "release it first";
    if (event == ZX_ON_RELEASE || event == ZX_ON_LAST_RELEASE) return "each release needs an acquire before it";
    return "this is a fault of the store";
}

zx_status zx_param_state_move(zx_param_state *state, zx_param_event event, const char *unit)
{
    uint8_t next = param_next[*state][event];
    if (next == ILLEGAL)
        ZX_FAIL(ZX_ERR_STATE, "the parameters of unit %s are %s, where %s is not possible: %s", unit,
                param_states[*state], param_events[event], advice(*state, event));
    *state = (zx_param_state)(next - 1);
    return ZX_OK;
}

zx_status zx_grad_state_move(zx_grad_state *state, zx_grad_event event, const char *unit)
{
    uint8_t next = grad_next[*state][event];
    if (next == ILLEGAL)
        ZX_FAIL(
            ZX_ERR_STATE,
            "the gradient of unit %s is %s, where %s is not possible: call grad before each reduce, and reduce once "
            "after the last use in a micro-step",
            unit, grad_states[*state], grad_events[event]);
    *state = (zx_grad_state)(next - 1);
    return ZX_OK;
}
