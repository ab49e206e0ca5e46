/* slots.c - colouring of units onto slots.
 *
 * DESIGN
 * Two units conflict when both are held at some moment of the trace. Going along the order of first use, a
 * unit takes the slot that was given away longest ago among those that hold no unit in conflict with it.
 * Without conflicts this is round-robin, so any n_slots consecutive units lie in different slots: n_slots - 1
 * of them can be prefetched while one computes, in the forward order and, mirrored, in the backward order. A
 * slot is as large as its largest unit. Conflicts are found by replaying the trace: whenever a unit starts to
 * be held, it conflicts with whatever is held.
 */
#include "store/slots.h"

#include <string.h>

typedef struct conflict {
    int32_t a, b;
} conflict;

typedef struct replay {
    const size_t *bytes_of;
    int32_t n_units;
    int64_t n_events;
    int32_t *refs;   /* n_units */
    int32_t *held;   /* units held now, blocks with bytes only */
    int32_t *order;  /* units by first use */
    bool *seen;
    int32_t n_held, n_order, most_held;
    conflict *conflicts;
    int64_t n_conflicts, conflict_capacity;
} replay;

static void replay_close(replay *r)
{
    zx_free(r->refs);
    zx_free(r->held);
    zx_free(r->order);
    zx_free(r->seen);
    zx_free(r->conflicts);
}

static zx_status replay_open(replay *r)
{
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, r->n_units, r->refs));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, r->n_units, r->held));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, r->n_units, r->order));
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, r->n_units, r->seen));
    return ZX_OK;
}

static zx_status add_conflict(replay *r, int32_t a, int32_t b)
{
    if (r->n_conflicts == r->conflict_capacity) {
        int64_t capacity = zx_max64(64, 2 * r->conflict_capacity);
        conflict *more;
        ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, capacity, more));
        if (r->n_conflicts > 0) memcpy(more, r->conflicts, (size_t)r->n_conflicts * sizeof *more);
        zx_free(r->conflicts);
        r->conflicts = more;
        r->conflict_capacity = capacity;
    }
    r->conflicts[r->n_conflicts++] = (conflict){a, b};
    return ZX_OK;
}

static zx_status replay_trace(replay *r, const zx_unit_event *trace)
{
    for (int64_t e = 0; e < r->n_events; e++) {
        int32_t u = trace[e].unit;
        if (u < 0 || u >= r->n_units)
            ZX_FAIL(ZX_ERR_ARG, "event %lld of the trace names unit %d, but there are %d units", (long long)e, u,
                    r->n_units);
        if (trace[e].verb == ZX_RELEASE) {
            if (r->refs[u] == 0)
                ZX_FAIL(ZX_ERR_ARG, "event %lld of the trace releases unit %d, which is not held", (long long)e, u);
            if (--r->refs[u] > 0 || u == 0 || r->bytes_of[u] == 0) continue;
            for (int32_t i = 0; i < r->n_held; i++)
                if (r->held[i] == u) {
                    r->held[i] = r->held[--r->n_held];
                    break;
                }
        }
        if (trace[e].verb != ZX_ACQUIRE || r->refs[u]++ > 0 || u == 0 || r->bytes_of[u] == 0) continue;
        for (int32_t i = 0; i < r->n_held; i++)
            ZX_TRY(add_conflict(r, r->held[i], u));
        r->held[r->n_held++] = u;
        if (r->n_held > r->most_held) r->most_held = r->n_held;
        if (!r->seen[u]) r->order[r->n_order++] = u;
        r->seen[u] = true;
    }
    for (int32_t u = 1; u < r->n_units; u++) /* units that the trace does not use, and all of them without a trace */
        if (!r->seen[u] && r->bytes_of[u] > 0) r->order[r->n_order++] = u;
    return ZX_OK;
}

/* The slots that unit u may not take: marks busy[slot]. */
static void mark_conflicts(const replay *r, const zx_slots *slots, int32_t u, int32_t *busy)
{
    for (int64_t i = 0; i < r->n_conflicts; i++) {
        conflict c = r->conflicts[i];
        int32_t other = c.a == u ? c.b : c.b == u ? c.a : -1;
        if (other >= 0 && slots->slot_of[other] >= 0) busy[slots->slot_of[other]] = u;
    }
}

static zx_status colour(const replay *r, int32_t n_slots, zx_slots *slots)
{
    zx_status zx_rc_ = ZX_OK;
    int32_t *busy = NULL;
    int64_t *given = NULL; /* when the slot was last given to a unit; 0 = never */
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, n_slots + 1, busy), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, n_slots + 1, given), done);
    for (int32_t i = 0; i < r->n_order; i++) {
        int32_t u = r->order[i], best = 0;
        if (r->n_conflicts > 0) mark_conflicts(r, slots, u, busy);
        for (int32_t s = 1; s <= n_slots; s++)
            if (busy[s] != u && (best == 0 || given[s] < given[best])) best = s;
        if (best == 0)
            ZX_FAIL_GOTO(ZX_ERR_ARG, done,
                         "unit %d finds no slot: all %d hold units that are used together with it; the trace "
                         "holds up to "
                         "%d units at once: raise n_slots to at least %d",
                         u, n_slots, r->most_held, r->most_held > n_slots ? r->most_held : n_slots + 1);
        slots->slot_of[u] = best;
        given[best] = i + 1;
        if (r->bytes_of[u] > slots->slot_bytes[best]) slots->slot_bytes[best] = r->bytes_of[u];
    }
done:
    zx_free(busy);
    zx_free(given);
    return zx_rc_;
}

zx_status zx_slots_open(const size_t *bytes_of, int32_t n_units, int32_t n_slots, const zx_unit_event *trace,
                        int64_t n_events, zx_slots **out)
{
    zx_status zx_rc_ = ZX_OK;
    replay r = {.bytes_of = bytes_of, .n_units = n_units, .n_events = trace ? n_events : 0};
    zx_slots *slots = NULL;
    *out = NULL;
    if (n_units < 1 || n_slots < 1)
        ZX_FAIL(ZX_ERR_ARG, "%d slots for %d units: both need at least 1", n_slots, n_units);
    n_slots = (int32_t)zx_min64(n_slots, zx_max64(1, n_units - 1)); /* more would stay empty */
    ZX_TRY_GOTO(replay_open(&r), fail);
    ZX_TRY_GOTO(replay_trace(&r, trace), fail);
    ZX_TRY_GOTO(ZX_NEW(ZX_MEM_STORE, slots), fail);
    slots->n_slots = n_slots + 1;
    slots->n_units = n_units;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, n_slots + 1, slots->slot_bytes), fail);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, n_units, slots->slot_of), fail);
    for (int32_t u = 0; u < n_units; u++)
        slots->slot_of[u] = -1;
    if (bytes_of[0] > 0) slots->slot_of[0] = 0;
    slots->slot_bytes[0] = bytes_of[0];
    ZX_TRY_GOTO(colour(&r, n_slots, slots), fail);
    replay_close(&r);
    *out = slots;
    return ZX_OK;
fail:
    replay_close(&r);
    zx_slots_close(slots);
    return zx_rc_;
}

zx_status zx_slots_open_for(const zx_layout *layout, const zx_policy *policy, bool grads, const zx_unit_event *trace,
                            int64_t n_events, zx_slots **out)
{
    zx_status zx_rc_ = ZX_OK;
    size_t *bytes_of = NULL;
    zx_unit_event *mapped = NULL;
    bool *open = NULL;
    int64_t n_mapped = 0;
    *out = NULL;
    if (!trace) n_events = 0;
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, layout->n_units, bytes_of), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, layout->n_units, open), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, n_events, mapped), done);
    for (int32_t u = 0; u < layout->n_units; u++)
        bytes_of[u] = grads ? layout->units[u].grad_bytes : layout->units[u].param_bytes;
    for (int64_t e = 0; e < n_events; e++) {
        zx_unit_event event = trace[e];
        if (event.unit < 0 || event.unit >= layout->n_units)
            ZX_FAIL_GOTO(ZX_ERR_ARG, done, "event %lld of the trace names unit %d, but there are %d units",
                         (long long)e, event.unit, layout->n_units);
        bool is_grad = event.verb == ZX_GRAD || event.verb == ZX_REDUCE;
        if (is_grad != grads) continue;
        if (grads) { /* GRAD may come often before the REDUCE that ends it */
            bool opens = event.verb == ZX_GRAD;
            if (opens == open[event.unit]) continue;
            open[event.unit] = opens;
            event.verb = opens ? ZX_ACQUIRE : ZX_RELEASE;
        }
        mapped[n_mapped++] = event;
    }
    ZX_TRY_GOTO(
        zx_slots_open(bytes_of, layout->n_units, grads ? policy->n_grad_slots : policy->n_slots, mapped, n_mapped, out),
        done);
done:
    zx_free(bytes_of);
    zx_free(open);
    zx_free(mapped);
    return zx_rc_;
}

void zx_slots_close(zx_slots *slots)
{
    if (!slots) return;
    zx_free(slots->slot_bytes);
    zx_free(slots->slot_of);
    zx_free(slots);
}

size_t zx_slots_bytes(const zx_slots *slots)
{
    size_t bytes = 0;
    for (int32_t s = 0; s < slots->n_slots; s++)
        bytes += slots->slot_bytes[s];
    return bytes;
}

zx_status zx_slots_prove(const zx_slots *slots, const zx_unit_event *trace, int64_t n_events)
{
    zx_status zx_rc_ = ZX_OK;
    int32_t *holder = NULL, *refs = NULL; /* holder: unit + 1 that holds the slot, or 0 */
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, slots->n_slots, holder), done);
    ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_STORE, slots->n_units, refs), done);
    for (int64_t e = 0; e < n_events; e++) {
        int32_t u = trace[e].unit;
        if (trace[e].verb != ZX_ACQUIRE && trace[e].verb != ZX_RELEASE) continue;
        if (u < 0 || u >= slots->n_units)
            ZX_FAIL_GOTO(ZX_ERR_ARG, done, "event %lld of the trace names unit %d, but there are %d units",
                         (long long)e, u, slots->n_units);
        int32_t s = slots->slot_of[u];
        if (trace[e].verb == ZX_RELEASE) {
            if (refs[u] == 0)
                ZX_FAIL_GOTO(ZX_ERR_ARG, done, "event %lld of the trace releases unit %d, which is not held",
                             (long long)e, u);
            if (--refs[u] == 0 && s >= 0) holder[s] = 0;
        } else if (refs[u]++ == 0 && s >= 0) {
            if (holder[s] != 0)
                ZX_FAIL_GOTO(ZX_ERR_ARG, done,
                             "event %lld: units %d and %d want slot %d together: raise n_slots from %d", (long long)e,
                             holder[s] - 1, u, s, slots->n_slots - 1);
            holder[s] = u + 1;
        }
    }
done:
    zx_free(holder);
    zx_free(refs);
    return zx_rc_;
}
