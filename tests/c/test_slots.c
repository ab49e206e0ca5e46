/* Slots against a naive replay: chains, random traces, what has to be refused. */
#include <stdlib.h>

#include "check.h"
#include "store/slots.h"

static uint64_t rng_state;

static int64_t rnd(int64_t n)
{
    rng_state = rng_state * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((rng_state >> 33) % (uint64_t)n);
}

enum { MAX_UNITS = 12, MAX_EVENTS = 200 };

/* Root held throughout; blocks 1..n forwards, then backwards. */
static int64_t chain(zx_unit_event *e, int32_t n_blocks)
{
    int64_t n = 0;
    e[n++] = (zx_unit_event){ZX_ACQUIRE, 0};
    for (int32_t i = 1; i <= 2 * n_blocks; i++) {
        int32_t u = i <= n_blocks ? i : 2 * n_blocks + 1 - i;
        e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        e[n++] = (zx_unit_event){ZX_RELEASE, u};
    }
    e[n++] = (zx_unit_event){ZX_RELEASE, 0};
    return n;
}

static void test_chain(void)
{
    size_t bytes[MAX_UNITS];
    zx_unit_event e[MAX_EVENTS];
    for (int32_t blocks = 0; blocks < MAX_UNITS; blocks++)
        for (int32_t k = 1; k < MAX_UNITS + 2; k++) {
            zx_slots *s;
            for (int u = 0; u <= blocks; u++)
                bytes[u] = (size_t)(u + 1) * 4096;
            int64_t n = chain(e, blocks);
            for (int traced = 0; traced < 2; traced++) {
                CHECK_OR_RETURN(CHECK_OK(zx_slots_open(bytes, blocks + 1, k, traced ? e : NULL, n, &s)));
                CHECK_OK(zx_slots_prove(s, e, n));
                CHECK_EQ_I64(s->slot_of[0], 0);
                CHECK_EQ_I64(s->slot_bytes[0], 4096);
                for (int u = 1; u <= blocks; u++) {
                    CHECK(s->slot_of[u] >= 1 && s->slot_of[u] < s->n_slots);
                    CHECK(s->slot_bytes[s->slot_of[u]] >= bytes[u]);
                    for (int v = u + 1; v <= blocks && v < u + k; v++)
                        CHECK(s->slot_of[u] != s->slot_of[v]);
                }
                zx_slots_close(s);
            }
        }
}

/* A random trace that holds at most `most` blocks at once; the held units in use[]. */
static int64_t random_trace(zx_unit_event *e, int32_t n_units, int32_t most)
{
    int refs[MAX_UNITS] = {0}, held = 0;
    int64_t n = 0;
    while (n < MAX_EVENTS - MAX_UNITS * 2) {
        int32_t u = (int32_t)rnd(n_units);
        bool acquire = rnd(2) == 0;
        if (acquire && refs[u] < 2 && (refs[u] > 0 || u == 0 || held < most)) {
            held += u != 0 && refs[u] == 0;
            refs[u]++;
            e[n++] = (zx_unit_event){ZX_ACQUIRE, u};
        } else if (!acquire && refs[u] > 0) {
            refs[u]--;
            held -= u != 0 && refs[u] == 0;
            e[n++] = (zx_unit_event){ZX_RELEASE, u};
        } else if (rnd(4) == 0) {
            e[n++] = (zx_unit_event){rnd(2) ? ZX_GRAD : ZX_REDUCE, u};
        }
    }
    return n;
}

/* The first event at which two held units share a slot, or -1. */
static int64_t naive_clash(const zx_slots *s, const zx_unit_event *e, int64_t n, int32_t n_units)
{
    int refs[MAX_UNITS] = {0};
    for (int64_t i = 0; i < n; i++) {
        if (e[i].verb == ZX_ACQUIRE) refs[e[i].unit]++;
        if (e[i].verb == ZX_RELEASE) refs[e[i].unit]--;
        for (int32_t a = 0; a < n_units; a++)
            for (int32_t b = a + 1; b < n_units; b++)
                if (refs[a] > 0 && refs[b] > 0 && s->slot_of[a] >= 0 && s->slot_of[a] == s->slot_of[b]) return i;
    }
    return -1;
}

static void test_random_traces(void)
{
    int n_ok = 0, n_refused = 0, n_clashes = 0;
    for (int round = 0; round < 2000; round++) {
        zx_unit_event e[MAX_EVENTS];
        size_t bytes[MAX_UNITS];
        int32_t n_units = 1 + (int32_t)rnd(MAX_UNITS), most = 1 + (int32_t)rnd(4), k = 1 + (int32_t)rnd(6);
        zx_slots *s;
        for (int u = 0; u < n_units; u++)
            bytes[u] = (size_t)rnd(5) * 4096;
        int64_t n = random_trace(e, n_units, most);
        zx_status rc = zx_slots_open(bytes, n_units, k, e, n, &s);
        if (rc == ZX_OK) {
            n_ok++;
            CHECK_EQ_I64(naive_clash(s, e, n, n_units), -1);
            CHECK_OK(zx_slots_prove(s, e, n));
            size_t largest[MAX_UNITS + 1] = {0}, total = 0;
            for (int u = 0; u < n_units; u++) {
                CHECK((s->slot_of[u] < 0) == (bytes[u] == 0) && (u == 0 || s->slot_of[u] != 0));
                if (bytes[u] > 0 && bytes[u] > largest[s->slot_of[u]]) largest[s->slot_of[u]] = bytes[u];
            }
            for (int i = 0; i < s->n_slots; i++) {
                CHECK_EQ_I64(s->slot_bytes[i], largest[i]);
                total += largest[i];
            }
            CHECK_EQ_I64(zx_slots_bytes(s), total);
        } else {
            n_refused++;
            CHECK(rc == ZX_ERR_ARG);
            CHECK_ERROR_HAS("raise n_slots to at least");
            CHECK(s == NULL && k < n_units - 1); /* a slot for each unit always suffices */
        }
        zx_slots_close(s);
        /* prove() agrees with the replay for colours that were not made for this trace */
        CHECK_OK(zx_slots_open(bytes, n_units, k, NULL, 0, &s));
        int64_t clash = naive_clash(s, e, n, n_units);
        CHECK_STATUS(zx_slots_prove(s, e, n), clash < 0 ? ZX_OK : ZX_ERR_ARG);
        if (clash >= 0) {
            char part[32];
            snprintf(part, sizeof part, "event %d:", (int)clash);
            CHECK_ERROR_HAS(part);
            n_clashes++;
        }
        zx_slots_close(s);
    }
    CHECK(n_ok > 100 && n_refused > 100 && n_clashes > 100);
}

static void test_refusals(void)
{
    size_t bytes[3] = {4096, 4096, 4096};
    zx_unit_event both[] = {{ZX_ACQUIRE, 1}, {ZX_ACQUIRE, 2}}, early[] = {{ZX_RELEASE, 1}}, far[] = {{ZX_ACQUIRE, 3}};
    zx_slots *s;
    CHECK_STATUS(zx_slots_open(bytes, 3, 1, both, 2, &s), ZX_ERR_ARG);
    CHECK_ERROR_HAS("raise n_slots to at least 2");
    CHECK_STATUS(zx_slots_open(bytes, 3, 2, early, 1, &s), ZX_ERR_ARG);
    CHECK_STATUS(zx_slots_open(bytes, 3, 2, far, 1, &s), ZX_ERR_ARG);
    CHECK_STATUS(zx_slots_open(bytes, 3, 0, NULL, 0, &s), ZX_ERR_ARG);
    CHECK_OK(zx_slots_open(bytes, 3, 1, NULL, 0, &s));
    CHECK_STATUS(zx_slots_prove(s, both, 2), ZX_ERR_ARG);
    CHECK_ERROR_HAS("units 1 and 2 want slot 1");
    CHECK_STATUS(zx_slots_prove(s, early, 1), ZX_ERR_ARG);
    CHECK_STATUS(zx_slots_prove(s, far, 1), ZX_ERR_ARG);
    zx_slots_close(s);
    for (int n = 1;; n++) {
        int64_t live = zx_mem_get(ZX_MEM_STORE).n_live;
        zx_fault_arm(n);
        zx_status rc = zx_slots_open(bytes, 3, 2, both, 2, &s);
        zx_fault_arm(0);
        if (rc == ZX_OK) break;
        CHECK(s == NULL);
        CHECK_EQ_I64(zx_mem_get(ZX_MEM_STORE).n_live, live);
    }
    zx_slots_close(s);
}

int main(void)
{
    rng_state = 777;
    RUN(test_chain);
    RUN(test_random_traces);
    RUN(test_refusals);
    return check_report();
}
