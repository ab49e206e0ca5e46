/* states.h - the two state machines of a unit, as static tables next[state][event].
 *
 * Parameters:
 *   SHARDED -PREFETCH-> GATHERING -ACQUIRE-> LIVE -RELEASE-> LIVE or -LAST_RELEASE-> RESIDENT -ACQUIRE-> LIVE
 *   GATHERING, RESIDENT -EVICT (another unit wants the slot), RAISE (a new version)-> SHARDED
 *   RESIDENT, GATHERING -PREFETCH-> GATHERING: parameters that are spread anew after a step (not sharded)
 * Full gradients:
 *   NONE -GRAD-> FULL -REDUCE-> REDUCING -DONE-> NONE           each micro-step (reduce_at micro)
 *   NONE -GRAD-> FULL -KEEP-> HELD -GRAD-> FULL ...; FULL, HELD -REDUCE-> REDUCING -DONE-> NONE   (reduce_at step)
 *   any -DISCARD-> NONE
 */
#ifndef ZX_STORE_STATES_H
#define ZX_STORE_STATES_H

#include "base/zx.h"

typedef enum zx_param_state {
    ZX_PARAM_SHARDED = 0,
    ZX_PARAM_GATHERING,
    ZX_PARAM_LIVE,
    ZX_PARAM_RESIDENT,
    ZX_N_PARAM_STATES
} zx_param_state;

typedef enum zx_param_event {
    ZX_ON_PREFETCH = 0,
    ZX_ON_ACQUIRE,
    ZX_ON_RELEASE,
    ZX_ON_LAST_RELEASE,
    ZX_ON_EVICT,
    ZX_ON_RAISE,
    ZX_N_PARAM_EVENTS
} zx_param_event;

typedef enum zx_grad_state {
    ZX_GRAD_NONE = 0,
    ZX_GRAD_FULL,
    ZX_GRAD_HELD,
    ZX_GRAD_REDUCING,
    ZX_N_GRAD_STATES
} zx_grad_state;

typedef enum zx_grad_event {
    ZX_ON_GRAD = 0,
    ZX_ON_KEEP,
    ZX_ON_REDUCE,
    ZX_ON_DONE,
    ZX_ON_DISCARD,
    ZX_N_GRAD_EVENTS
} zx_grad_event;

const char *zx_param_state_name(zx_param_state state);
const char *zx_grad_state_name(zx_grad_state state);

/* Moves *state; an event that is illegal in it is ZX_ERR_STATE with both names, the unit's name and what to do. */
ZX_CHECKED zx_status zx_param_state_move(zx_param_state *state, zx_param_event event, const char *unit);
ZX_CHECKED zx_status zx_grad_state_move(zx_grad_state *state, zx_grad_event event, const char *unit);

#endif
