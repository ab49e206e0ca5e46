/* plan.h - pure: when to gather what. From the trace of a step and the slots: after which event which unit can be
 * prefetched (depth K-1, never evicting a unit that is wanted earlier), and how many gathers and reductions a
 * micro-step and a step cost. The store follows the plan while the step's events agree with it, and falls back to
 * blocking gathers where they do not. */
#ifndef ZX_STORE_PLAN_H
#define ZX_STORE_PLAN_H

#include "store/slots.h"

typedef struct zx_plan {
    int64_t n_events;
    zx_unit_event *events;    /* of one micro-step */
    int64_t
        *prefetch_begin; /* n_events + 1: after event e come prefetch_unit[prefetch_begin[e] .. prefetch_begin[e+1]) */
    int32_t *prefetch_unit;
    int64_t gathers_first; /* in the first micro-step after a step, 2L - K + root for a chain of L blocks */
    int64_t gathers_next; /* in each further one */
    int64_t reductions; /* per reduce point */
    int64_t gather_elems_first, gather_elems_next; /* sent by a rank in these gathers: (world - 1) x slices */
    int64_t reduce_elems; /* sent per reduce point at micro: of the units that the trace reduces */
    int64_t untouched_elems; /* sent once more at step at micro: of trainable units that the trace never reduces */
} zx_plan;

ZX_CHECKED zx_status zx_plan_open(const zx_layout *layout, const zx_policy *policy, const zx_slots *slots,
                                  const zx_unit_event *trace, int64_t n_events, zx_plan **out);
void zx_plan_close(zx_plan *plan);

/* The plan stays valid while layout and slots do not change; it copies the trace. plan may be NULL where reduce_at is
 * step and parameters are not sharded.
 *
 * Elements a rank sends in one step of m micro-steps, control scalars apart (tests/test_memory.py has the formulas). */
int64_t zx_plan_sent_elems(const zx_layout *layout, const zx_policy *policy, const zx_plan *plan, int64_t m);

#endif
