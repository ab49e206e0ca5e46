/* slots.h - pure: which physical slot lies behind which unit, and the proof that this is enough.
 *
 * Trace of one step: the planned order of acquire, release, grad and reduce. Slots are coloured by size class along the
 * order of first use, so that neighbours in the order never share a slot while one of them may be prefetched.
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
} zx_slots;

/* Blocks get n_slots (>= 1) slots by colour; before a trace exists units are coloured in index order. Too few slots for
 * what the trace holds live at once is ZX_ERR_ARG naming the units and the number needed. bytes_of[unit]. */
ZX_CHECKED zx_status zx_slots_open(const size_t *bytes_of, int32_t n_units, int32_t n_slots,
                                   const zx_unit_event *trace, int64_t n_events, zx_slots **out);
void zx_slots_close(zx_slots *slots);

/* Replays the trace with these slots: ZX_OK, or ZX_ERR_BUG / ARG naming the two units that want one slot together. */
ZX_CHECKED zx_status zx_slots_prove(const zx_slots *slots, const zx_unit_event *trace, int64_t n_events);

#endif
