/* plan.c - prefetch points and traffic of a micro-step.
 *
 * DESIGN
 * After acquire event e the plan looks along the coming acquires. Up to K-1 further blocks are looked at;
 * each that is not in its slot is prefetched there and then, unless another unit of the same slot is held at
 * e or is acquired before it is: such a unit is wanted earlier and keeps the slot. The rule depends on the
 * trace and the slots alone, not on what an earlier pass left in the slots, so one list serves every pass: in
 * a warm pass some of its prefetches find their unit resident and cost nothing, and none evicts what that
 * pass wants earlier. The root has a slot of its own: it is prefetched when the lookahead meets it and does
 * not count.
 */
#include "store/plan.h"

#include <string.h>

typedef struct sim {
    const zx_layout *l;
    const zx_slots *slots;
    const zx_plan *plan;
    int32_t *owner; /* n_slots: unit + 1 whose values the slot holds; 0 = none */
    int32_t *refs;  /* n_units */
    int64_t *looked, *wanted; /* n_units, n_slots: event + 1 of the last lookahead that met them */
} sim;

static void sim_close(sim *s)
{
    zx_free(s->owner);
    zx_free(s->refs);
    zx_free(s->looked);
    zx_free(s->wanted);
}

static zx_status sim_open(sim *s)
{
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->slots->n_slots, s->owner));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->l->n_units, s->refs));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->l->n_units, s->looked));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, s->slots->n_slots, s->wanted));
    return ZX_OK;
}

static int64_t sent_by_gather(const zx_layout *l, int32_t unit)
{
    int64_t n = 0;
    for (int32_t r = l->units[unit].first_range; r < l->units[unit].first_range + l->units[unit].n_ranges; r++)
        n += l->ranges[r].slice * (l->world - 1);
    return n;
}

static int64_t sent_by_reduction(const zx_layout *l, int32_t unit)
{
    int64_t n = 0;
    for (int32_t r = l->units[unit].first_range; r < l->units[unit].first_range + l->units[unit].n_ranges; r++)
        n += l->ranges[r].trainable ? l->ranges[r].slice * (l->world - 1) : 0;
    return n;
}

/* Puts a unit into its slot; true if that costs a gather. */
static bool fetch(sim *s, int32_t unit)
{
    int32_t slot = s->slots->slot_of[unit];
    if (slot < 0 || s->owner[slot] == unit + 1) return false;
    s->owner[slot] = unit + 1;
    return true;
}

/* Lists what to prefetch after acquire event e; out may hold n_slots units. */
static int32_t look_ahead(sim *s, int64_t e, int32_t depth, int32_t *out)
{
    int32_t n_out = 0, n_met = 0;
    for (int64_t f = e + 1; f < s->plan->n_events && n_met < depth; f++) {
        int32_t u = s->plan->events[f].unit, slot = s->slots->slot_of[u];
        if (s->plan->events[f].verb != ZX_ACQUIRE || slot < 0 || s->looked[u] == e + 1) continue;
        s->looked[u] = e + 1;
        if (s->refs[u] == 0 && u != 0) n_met++;
        bool free = s->wanted[slot] != e + 1;
        s->wanted[slot] = e + 1; /* from here on this slot belongs to u, even if u cannot have it yet */
        if (!free || s->owner[slot] == u + 1) continue;
        if (s->owner[slot] != 0 && s->refs[s->owner[slot] - 1] > 0) continue;
        out[n_out++] = u;
    }
    return n_out;
}

typedef struct cost {
    int64_t n, elems;
} cost;

/* One pass from whatever the slots hold. build: write the prefetch lists; otherwise follow them. */
static cost run_pass(sim *s, zx_plan *plan, int32_t depth, bool build)
{
    cost c = {0, 0};
    int64_t n_prefetch = 0;
    memset(s->refs, 0, (size_t)s->l->n_units * sizeof *s->refs);
    for (int64_t e = 0; e < plan->n_events; e++) {
        int32_t u = plan->events[e].unit;
        if (plan->events[e].verb == ZX_RELEASE && s->refs[u] > 0) s->refs[u]--;
        if (plan->events[e].verb == ZX_ACQUIRE) {
            if (s->refs[u]++ == 0 && fetch(s, u)) {
                c.n++;
                c.elems += sent_by_gather(s->l, u);
            }
        }
        if (build) {
            plan->prefetch_begin[e] = n_prefetch;
            if (plan->events[e].verb == ZX_ACQUIRE && depth > 0)
                n_prefetch += look_ahead(s, e, depth, &plan->prefetch_unit[n_prefetch]);
            plan->prefetch_begin[e + 1] = n_prefetch;
        }
        for (int64_t i = plan->prefetch_begin[e]; i < plan->prefetch_begin[e + 1]; i++) {
            if (!fetch(s, plan->prefetch_unit[i])) continue;
            c.n++;
            c.elems += sent_by_gather(s->l, plan->prefetch_unit[i]);
        }
    }
    return c;
}

static void count_reductions(const zx_layout *l, const zx_policy *p, zx_plan *plan, int64_t *looked)
{
    memset(looked, 0, (size_t)l->n_units * sizeof *looked);
    for (int64_t e = 0; e < plan->n_events; e++) {
        if (plan->events[e].verb != ZX_REDUCE) continue;
        looked[plan->events[e].unit] = 1;
        plan->reductions += p->reduce_at == ZX_REDUCE_MICRO && l->units[plan->events[e].unit].trainable;
        plan->reduce_elems += sent_by_reduction(l, plan->events[e].unit);
    }
    for (int32_t u = 0; u < l->n_units; u++) {
        plan->untouched_elems += looked[u] ? 0 : sent_by_reduction(l, u);
        plan->reductions += p->reduce_at == ZX_REDUCE_STEP && l->units[u].trainable;
    }
}

static zx_status fill_plan(const zx_layout *layout, const zx_policy *policy, const zx_slots *slots,
                           const zx_unit_event *trace, sim *s, zx_plan *plan)
{
    zx_policy p = zx_policy_at_world(policy, layout->world);
    int32_t depth = p.prefetch && p.shard_params ? (int32_t)zx_min64(p.n_slots, slots->n_slots - 1) - 1 : 0;
    int64_t n_acquires = 0;
    for (int64_t e = 0; e < plan->n_events; e++)
        n_acquires += trace[e].verb == ZX_ACQUIRE;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, plan->n_events, plan->events));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, plan->n_events + 1, plan->prefetch_begin));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, depth > 0 ? n_acquires * (depth + 1) : 0, plan->prefetch_unit));
    if (plan->n_events > 0) memcpy(plan->events, trace, (size_t)plan->n_events * sizeof *trace);
    ZX_TRY(sim_open(s));
    if (p.shard_params) {
        cost first = run_pass(s, plan, depth, true), next = run_pass(s, plan, depth, false);
        plan->gathers_first = first.n;
        plan->gather_elems_first = first.elems;
        plan->gathers_next = next.n;
        plan->gather_elems_next = next.elems;
    }
    count_reductions(layout, &p, plan, s->looked);
    return ZX_OK;
}

zx_status zx_plan_open(const zx_layout *layout, const zx_policy *policy, const zx_slots *slots,
                       const zx_unit_event *trace, int64_t n_events, zx_plan **out)
{
    zx_status zx_rc_ = ZX_OK;
    zx_plan *plan = NULL;
    sim s = {.l = layout, .slots = slots};
    *out = NULL;
    if (slots->n_units != layout->n_units)
        ZX_FAIL(ZX_ERR_ARG, "slots of %d units for a layout of %d: colour the slots from this layout", slots->n_units,
                layout->n_units);
    ZX_TRY(zx_policy_check(policy));
    for (int64_t e = 0; e < n_events; e++)
        if (trace[e].unit < 0 || trace[e].unit >= layout->n_units)
            ZX_FAIL(ZX_ERR_ARG, "event %lld of the trace names unit %d, but there are %d units", (long long)e,
                    trace[e].unit, layout->n_units);
    if (zx_policy_at_world(policy, layout->world).shard_params) ZX_TRY(zx_slots_prove(slots, trace, n_events));
    ZX_TRY(ZX_NEW(ZX_MEM_STORE, plan));
    plan->n_events = n_events;
    s.plan = plan;
    ZX_TRY_GOTO(fill_plan(layout, policy, slots, trace, &s, plan), fail);
    sim_close(&s);
    *out = plan;
    return ZX_OK;
fail:
    sim_close(&s);
    zx_plan_close(plan);
    return zx_rc_;
}

void zx_plan_close(zx_plan *plan)
{
    if (!plan) return;
    zx_free(plan->events);
    zx_free(plan->prefetch_begin);
    zx_free(plan->prefetch_unit);
    zx_free(plan);
}

int64_t zx_plan_sent_elems(const zx_layout *layout, const zx_policy *policy, const zx_plan *plan, int64_t m)
{
    zx_policy p = zx_policy_at_world(policy, layout->world);
    int64_t others = layout->world - 1, all = layout->state_elems * others; /* every trainable slice, once */
    if (others == 0) return 0;
    int64_t reductions = all;
    if (p.reduce_at == ZX_REDUCE_MICRO) reductions = m * plan->reduce_elems + (m > 0 ? plan->untouched_elems : all);
    if (!p.shard_params) return reductions + all; /* parameters spread, or (stage 0) sums of gradients */
    int64_t gathers = m > 0 ? plan->gather_elems_first + (m - 1) * plan->gather_elems_next : 0;
    return reductions + gathers;
}
