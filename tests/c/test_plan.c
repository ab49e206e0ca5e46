/* Plans: the traced step of the design as a golden list, the counts of chains, and random traces against a
 * naive replay. */
#include <stdlib.h>

#include "check.h"
#include "store/plan.h"

static uint64_t rng_state;

static int64_t rnd(int64_t n)
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((rng_state >> 33) % (uint64_t)n);
}

enum { MAX_UNITS = 14, MAX_EVENTS = 300 };
static const char *const names[MAX_UNITS] = {"R",  "b0", "b1", "b2", "b3",  "b4",  "b5",
                                             "b6", "b7", "b8", "b9", "b10", "b11", "b12"};

static zx_layout *make_layout(int32_t n_units, int32_t world, const int64_t *sizes)
{
    zx_param params[MAX_UNITS] = {{0}};
    zx_layout *l = NULL;
    for (int32_t u = 0; u < n_units; u++) {
        int64_t n = sizes ? sizes[u] : 1000;
        params[u] = (zx_param){.name = names[u], .unit = u, .trainable = true, .tied_to = -1, .ndim = 1};
        params[u].shape[0] = params[u].global_shape[0] = n;
    }
    CHECK_OK(zx_layout_open(params, n_units, names, n_units, world, 4096, &l));
    return l;
}

static int64_t chain(zx_unit_event *e, int32_t n_blocks)
{
    int64_t n = 0;
    e[n++] = (zx_unit_event){ZX_ACQUIRE, 0};
    for (int32_t i = 1; i <= n_blocks; i++) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, i};
        e[n++] = (zx_unit_event){ZX_RELEASE, i};
    }
    e[n++] = (zx_unit_event){ZX_GRAD, 0};
    for (int32_t i = n_blocks; i >= 1; i--) {
        e[n++] = (zx_unit_event){ZX_ACQUIRE, i};
        e[n++] = (zx_unit_event){ZX_GRAD, i};
        e[n++] = (zx_unit_event){ZX_RELEASE, i};
        e[n++] = (zx_unit_event){ZX_REDUCE, i};
    }
    e[n++] = (zx_unit_event){ZX_REDUCE, 0};
    e[n++] = (zx_unit_event){ZX_RELEASE, 0};
    return n;
}

static zx_policy policy_of(int stage, int32_t k)
{
    zx_policy p = {0};
    CHECK_OK(zx_policy_for_stage(stage, &p));
    p.n_slots = k;
    return p;
}

static void test_traced_step(void)
{
    static const char *const verbs[] = {"acquire", "release", "grad", "reduce"};
    static const char *const want = "acquire R prefetch b0; acquire b0 prefetch b1; release b0; "
                                    "acquire b1 prefetch b2; release b1; acquire b2; release b2; grad R; "
                                    "acquire b2; grad b2; release b2; reduce b2; "
                                    "acquire b1 prefetch b0; grad b1; release b1; reduce b1; "
                                    "acquire b0; grad b0; release b0; reduce b0; reduce R; release R; ";
    zx_unit_event e[MAX_EVENTS];
    int64_t n = chain(e, 3);
    char text[1024];
    int at = 0;
    zx_layout *l = make_layout(4, 2, NULL);
    zx_policy p = policy_of(3, 2);
    zx_slots *slots = NULL;
    zx_plan *plan = NULL;
    CHECK_OK(zx_slots_open_for(l, &p, false, e, n, &slots));
    CHECK(slots->slot_of[1] == slots->slot_of[3] && slots->slot_of[1] != slots->slot_of[2]);
    CHECK_OR_RETURN(CHECK_OK(zx_plan_open(l, &p, slots, e, n, &plan)));
    for (int64_t i = 0; i < plan->n_events; i++) {
        at += snprintf(text + at, sizeof text - (size_t)at, "%s %s", verbs[e[i].verb], names[e[i].unit]);
        for (int64_t j = plan->prefetch_begin[i]; j < plan->prefetch_begin[i + 1]; j++)
            at += snprintf(text + at, sizeof text - (size_t)at, " prefetch %s", names[plan->prefetch_unit[j]]);
        at += snprintf(text + at, sizeof text - (size_t)at, "; ");
    }
    if (!CHECK(strcmp(text, want) == 0)) printf("got  %s\nwant %s\n", text, want);
    CHECK_EQ_I64(plan->gathers_first, 5);
    CHECK_EQ_I64(plan->gathers_next, 2);
    CHECK_EQ_I64(plan->reductions, 4);
    zx_plan_close(plan);
    zx_slots_close(slots);
    zx_layout_close(l);
}

/* 2L - K + root gathers in the first micro-step, 2(L - K) in the others; elements sent from the padded sizes.
 */
static void test_chain_counts(void)
{
    for (int32_t world = 1; world <= 4; world++)
        for (int32_t blocks = 1; blocks < MAX_UNITS; blocks++)
            for (int32_t k = 1; k <= blocks; k++)
                for (int prefetch = 0; prefetch < 2; prefetch++) {
                    zx_unit_event e[MAX_EVENTS];
                    int64_t n = chain(e, blocks), slice = (1000 + world - 1) / world, sent = world - 1;
                    slice = (slice + 255) / 256 * 256;
                    zx_layout *l = make_layout(blocks + 1, world, NULL);
                    zx_policy p = policy_of(3, k);
                    p.prefetch = prefetch;
                    zx_slots *slots = NULL;
                    zx_plan *plan = NULL;
                    CHECK_OK(zx_slots_open_for(l, &p, false, e, n, &slots));
                    CHECK_OR_RETURN(CHECK_OK(zx_plan_open(l, &p, slots, e, n, &plan)));
                    CHECK_EQ_I64(plan->gathers_first, world > 1 ? 2 * blocks - k + 1 : 0);
                    CHECK_EQ_I64(plan->gathers_next, world > 1 ? 2 * (blocks - k) : 0);
                    for (int m = 1; m <= 3; m++) {
                        int64_t units = 2 * blocks - k + 1 + (m - 1) * 2 * (blocks - k) + m * (blocks + 1);
                        CHECK_EQ_I64(zx_plan_sent_elems(l, &p, plan, m), units * slice * sent);
                        for (int stage = 0; stage < 3; stage++)
                            for (int at = 0; at < 2; at++) {
                                zx_policy q = policy_of(stage, k);
                                q.reduce_at = (zx_reduce_at)at;
                                int64_t r = at == ZX_REDUCE_MICRO ? m : 1;
                                CHECK_EQ_I64(zx_plan_sent_elems(l, &q, plan, m), (r + 1) * l->n_padded * sent / world);
                            }
                    }
                    zx_plan_close(plan);
                    zx_slots_close(slots);
                    zx_layout_close(l);
                }
}

static int64_t random_trace(zx_unit_event *e, int32_t n_units, int32_t most)
{
    int refs[MAX_UNITS] = {0}, held = 0;
    int64_t n = 0;
    for (int tries = 0; tries < 400 && n < MAX_EVENTS - 4; tries++) {
        int32_t u = (int32_t)rnd(n_units);
        if (refs[u] == 0 && held < most) {
            e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
            held += refs[u]++ == 0;
        } else if (refs[u] > 0) {
            e[n++] = (zx_unit_event){ZX_RELEASE, u};
            held -= --refs[u] == 0;
        }
    }
    return n;
}

/* Replays a pass: gathers on demand and, with a plan, ahead. Checks that no prefetch touches a held slot,
 * that what was prefetched is used before its slot is taken again, and never more than K-1 blocks ahead.
 * Returns gathers. */
static int64_t replay(const zx_slots *s, const zx_unit_event *e, int64_t n, const zx_plan *plan, int32_t k,
                      int32_t *owner)
{
    int refs[MAX_UNITS] = {0};
    bool unused[MAX_UNITS] = {false};
    int64_t gathers = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t u = e[i].unit, slot = s->slot_of[u];
        if (e[i].verb == ZX_RELEASE) refs[u]--;
        if (e[i].verb == ZX_ACQUIRE) {
            refs[u]++;
            unused[u] = false;
            if (slot >= 0 && owner[slot] != u) {
                CHECK(owner[slot] < 0 || (refs[owner[slot]] == 0 && !unused[owner[slot]]));
                owner[slot] = u;
                gathers++;
            }
        }
        for (int64_t j = plan ? plan->prefetch_begin[i] : 0; plan && j < plan->prefetch_begin[i + 1]; j++) {
            int32_t v = plan->prefetch_unit[j], at = s->slot_of[v];
            CHECK(e[i].verb == ZX_ACQUIRE && at >= 0);
            if (owner[at] == v) continue;
            CHECK(owner[at] < 0 || (refs[owner[at]] == 0 && !unused[owner[at]]));
            owner[at] = v;
            unused[v] = true;
            gathers++;
            int ahead = 0;
            for (int b = 1; b < MAX_UNITS; b++)
                ahead += unused[b];
            CHECK(ahead <= k - 1);
        }
    }
    return gathers;
}

static void test_random_traces(void)
{
    int64_t n_prefetches = 0, n_refused = 0;
    for (int round = 0; round < 2000; round++) {
        zx_unit_event e[MAX_EVENTS];
        int64_t sizes[MAX_UNITS];
        int32_t n_units = 2 + (int32_t)rnd(MAX_UNITS - 2), k = 1 + (int32_t)rnd(4);
        for (int u = 0; u < n_units; u++)
            sizes[u] = rnd(5) * 700;
        zx_layout *l = make_layout(n_units, 2 + (int32_t)rnd(3), sizes);
        zx_policy p = policy_of(3, k);
        int64_t n = random_trace(e, n_units, 1 + (int32_t)rnd(k));
        zx_slots *slots = NULL;
        zx_plan *plan = NULL;
        if (zx_slots_open_for(l, &p, false, e, n, &slots) == ZX_OK) {
            CHECK_OR_RETURN(CHECK_OK(zx_plan_open(l, &p, slots, e, n, &plan)));
            int32_t ahead[MAX_UNITS + 1], demand[MAX_UNITS + 1];
            for (int i = 0; i <= MAX_UNITS; i++)
                ahead[i] = demand[i] = -1;
            for (int pass = 0; pass < 4; pass++) {
                int64_t want = pass == 0 ? plan->gathers_first : plan->gathers_next;
                CHECK_EQ_I64(replay(slots, e, n, plan, k, ahead), want);
                CHECK_EQ_I64(replay(slots, e, n, NULL, k, demand), want); /* prefetch costs no gather */
                CHECK(memcmp(ahead, demand, sizeof ahead) == 0);
            }
            n_prefetches += plan->prefetch_begin[n];
        } else {
            n_refused++;
        }
        zx_plan_close(plan);
        zx_slots_close(slots);
        zx_layout_close(l);
    }
    CHECK(n_prefetches > 1000 && n_refused < 1500);
}

static void test_refusals(void)
{
    zx_layout *l = make_layout(4, 2, NULL);
    zx_policy p = policy_of(3, 1);
    zx_unit_event both[] = {{ZX_ACQUIRE, 1}, {ZX_ACQUIRE, 2}}, far[] = {{ZX_ACQUIRE, 4}};
    zx_slots *slots = NULL;
    zx_plan *plan = NULL;
    CHECK_OR_RETURN(CHECK_OK(zx_slots_open_for(l, &p, false, NULL, 0, &slots)));
    CHECK_STATUS(zx_plan_open(l, &p, slots, both, 2, &plan), ZX_ERR_ARG);
    CHECK_ERROR_HAS("units 1 and 2 want slot 1");
    CHECK_STATUS(zx_plan_open(l, &p, slots, far, 1, &plan), ZX_ERR_ARG);
    CHECK(plan == NULL);
    for (int n = 1;; n++) {
        int64_t live = zx_mem_get(ZX_MEM_STORE).n_live;
        zx_fault_arm(n);
        zx_status rc = zx_plan_open(l, &p, slots, both, 1, &plan);
        zx_fault_arm(0);
        if (rc == ZX_OK) break;
        CHECK(plan == NULL);
        CHECK_EQ_I64(zx_mem_get(ZX_MEM_STORE).n_live, live);
    }
    zx_plan_close(plan);
    zx_slots_close(slots);
    zx_layout_close(l);
}

int main(void)
{
    rng_state = 4242;
    RUN(test_traced_step);
    RUN(test_chain_counts);
    RUN(test_random_traces);
    RUN(test_refusals);
    return check_report();
}
