/* timeline.c - the ring of the last events.
 *
 * DESIGN. Any thread adds without a lock. An adder takes the next number from `head`; number i belongs to
 * slot i % n. A slot's `seq` is 2i+1 while number i is being written and 2i+2 when it is there, so a reader
 * knows whether what it copied was whole, and a writer that was overtaken by a lap (or meets one) drops its
 * event instead of mixing two. Fields are atomics (released and acquired: a reader that sees a new field also
 * sees the odd seq), since a reader may look while they change, and then discards.
 *
 * The ring can be freed while others add. Users count themselves under the parity of the epoch in which they came;
 * replacing the ring puts the new one in place, begins an epoch, and waits for the users of the old one only, so that
 * a stream of newcomers cannot hold it up. A user that finds the epoch changed while it counted itself counts anew. */
#include "base/thread.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

typedef struct slot {
    _Atomic uint64_t seq;
    _Atomic(const char *) name;
    _Atomic int lane, rank;
    _Atomic int64_t begin_ns, end_ns, bytes;
} slot;

typedef struct ring {
    uint64_t n;
    _Atomic uint64_t head; /* events ever added */
    slot *slots;
} ring;

static _Atomic(ring *) g_ring;
static _Atomic uint64_t g_epoch;
static _Atomic int64_t g_users[2];
static pthread_mutex_t g_replace = PTHREAD_MUTEX_INITIALIZER;

/* The ring, which stays until ring_leave(*out_epoch). */
static ring *ring_enter(uint64_t *out_epoch)
{
    for (;;) {
        uint64_t epoch = atomic_load(&g_epoch);
        atomic_fetch_add(&g_users[epoch & 1], 1);
        if (atomic_load(&g_epoch) == epoch) {
            *out_epoch = epoch;
            return atomic_load(&g_ring);
        }
        atomic_fetch_sub(&g_users[epoch & 1], 1);
    }
}

static void ring_leave(uint64_t epoch)
{
    atomic_fetch_sub(&g_users[epoch & 1], 1);
}

static void ring_free(ring *r)
{
    if (r == NULL) return;
    zx_free(r->slots);
    zx_free(r);
}

static void ring_replace(ring *r)
{
    pthread_mutex_lock(&g_replace);
    ring *old = atomic_exchange(&g_ring, r);
    uint64_t epoch = atomic_fetch_add(&g_epoch, 1);
    while (atomic_load(&g_users[epoch & 1]) != 0)
        sched_yield();
    pthread_mutex_unlock(&g_replace);
    ring_free(old);
}

zx_status zx_timeline_enable(int64_t n_events)
{
    if (n_events < 0)
        ZX_FAIL(ZX_ERR_ARG, "a timeline of %lld events: the count must be 0 (off) or more", (long long)n_events);
    zx_status zx_rc_ = ZX_OK;
    ring *r = NULL;
    if (n_events > 0) {
        ZX_TRY_GOTO(ZX_NEW(ZX_MEM_MISC, r), fail);
        ZX_TRY_GOTO(ZX_NEW_ARRAY(ZX_MEM_MISC, n_events, r->slots), fail);
        r->n = (uint64_t)n_events;
    }
    ring_replace(r);
    return ZX_OK;
fail:
    ring_free(r);
    return zx_rc_;
}

bool zx_timeline_on(void)
{
    return atomic_load_explicit(&g_ring, memory_order_relaxed) != NULL;
}

static void slot_write(slot *s, uint64_t number, const zx_event_rec *e)
{
    uint64_t seen = atomic_load_explicit(&s->seq, memory_order_relaxed);
    bool busy = (seen & 1) != 0, newer = seen > 2 * number;
    if (busy || newer ||
        !atomic_compare_exchange_strong_explicit(&s->seq, &seen, 2 * number + 1, memory_order_acquire,
                                                 memory_order_relaxed))
        return;
    atomic_store_explicit(&s->name, e->name, memory_order_release);
    atomic_store_explicit(&s->lane, e->lane, memory_order_release);
    atomic_store_explicit(&s->rank, e->rank, memory_order_release);
    atomic_store_explicit(&s->begin_ns, e->begin_ns, memory_order_release);
    atomic_store_explicit(&s->end_ns, e->end_ns, memory_order_release);
    atomic_store_explicit(&s->bytes, e->bytes, memory_order_release);
    atomic_store_explicit(&s->seq, 2 * number + 2, memory_order_release);
}

static bool slot_read(slot *s, uint64_t number, zx_event_rec *e)
{
    if (atomic_load_explicit(&s->seq, memory_order_acquire) != 2 * number + 2) return false;
    e->name = atomic_load_explicit(&s->name, memory_order_acquire);
    e->lane = atomic_load_explicit(&s->lane, memory_order_acquire);
    e->rank = atomic_load_explicit(&s->rank, memory_order_acquire);
    e->begin_ns = atomic_load_explicit(&s->begin_ns, memory_order_acquire);
    e->end_ns = atomic_load_explicit(&s->end_ns, memory_order_acquire);
    e->bytes = atomic_load_explicit(&s->bytes, memory_order_acquire);
    return atomic_load_explicit(&s->seq, memory_order_relaxed) == 2 * number + 2;
}

void zx_timeline_add(const char *name, int lane, int64_t begin_ns, int64_t end_ns, int64_t bytes)
{
    if (!zx_timeline_on()) return;
    uint64_t epoch;
    ring *r = ring_enter(&epoch);
    if (r != NULL) {
        zx_event_rec e = {name, lane, zx_log_rank(), begin_ns, end_ns, bytes};
        uint64_t number = atomic_fetch_add_explicit(&r->head, 1, memory_order_relaxed);
        slot_write(&r->slots[number % r->n], number, &e);
    }
    ring_leave(epoch);
}

int64_t zx_timeline_read(zx_event_rec *out, int64_t n_max)
{
    uint64_t epoch;
    ring *r = ring_enter(&epoch);
    int64_t n = 0;
    if (r != NULL && n_max > 0) {
        uint64_t head = atomic_load_explicit(&r->head, memory_order_acquire);
        uint64_t kept = head < r->n ? head : r->n;
        if (kept > (uint64_t)n_max) kept = (uint64_t)n_max;
        for (uint64_t i = head - kept; i < head; i++)
            if (slot_read(&r->slots[i % r->n], i, &out[n])) n++;
    }
    ring_leave(epoch);
    return n;
}
