/* slots.h - pure: which physical slot lies behind which unit, and the proof that this is enough.
 *
 * Trace of one step: the planned order of acquire, release, grad and reduce. Slots are coloured along the order of
 * first use, so that neighbours in the order never share a slot while one of them may be prefetched; a slot is as large
 * as its largest unit.
 */
#ifndef ZX_STORE_SLOTS_H
#define ZX_STORE_SLOTS_H

#include "store/layout.h"

typedef enum zx_unit_verb { ZX_ACQUIRE = 0, ZX_RELEASE, ZX_GRAD, ZX_REDUCE } zx_unit_verb;

typedef struct zx_unit_event {
    zx_unit_verb verb;
    int32_t unit;
} zx_unit_event;

typedef struct zx_slots {
    int32_t n_slots;
    size_t *slot_bytes; /* n_slots; slot 0 belongs to the root alone */
    int32_t *slot_of;   /* n_units; -1 for a unit without bytes */
    int32_t n_units;
} zx_slots;

/* A unit is held from its first ACQUIRE to its last RELEASE; GRAD and REDUCE do not matter here. Units may
 * not be released more often than acquired; what is held at the end of the trace is held to its end.
 *
 * Blocks get n_slots (>= 1) slots by colour; before a trace exists units are coloured in index order. Too few
 * slots for what the trace holds live at once is ZX_ERR_ARG naming the units and the number needed.
 * bytes_of[unit]. */
ZX_CHECKED zx_status zx_slots_open(const size_t *bytes_of, int32_t n_units, int32_t n_slots, const zx_unit_event *trace,
                                   int64_t n_events, zx_slots **out);
void zx_slots_close(zx_slots *slots);

/* The slots of a layout's parameters, or of its full gradients (grads: GRAD opens, REDUCE closes), under a
 * policy. The trace may be NULL. */
ZX_CHECKED zx_status zx_slots_open_for(const zx_layout *layout, const zx_policy *policy, bool grads,
                                       const zx_unit_event *trace, int64_t n_events, zx_slots **out);
size_t zx_slots_bytes(const zx_slots *slots); /* of all slots together */
/* zx_layout_bytes with slots coloured from a trace; NULL = coloured in index order. */
zx_store_bytes zx_slots_store_bytes(const zx_layout *layout, const zx_policy *policy, const zx_slots *param_slots,
                                    const zx_slots *grad_slots);

/* Replays the trace with these slots: ZX_OK, or ZX_ERR_BUG / ARG naming the two units that want one slot
 * together. */
ZX_CHECKED zx_status zx_slots_prove(const zx_slots *slots, const zx_unit_event *trace, int64_t n_events);

#endif
