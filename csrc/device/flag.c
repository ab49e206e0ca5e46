/* flag.c - flags on the CPU: signal and wait among threads and processes.
 *
 * DESIGN. A slot of 64 bytes: the value, and behind it `asleep`, a futex word: its lowest bit says that somebody
 * may sleep, the others count wake-ups. A waiter that has spun enough sets the bit if it is not set, looks at the
 * value once more and sleeps while the word is what it saw. A signal stores the value, and only if it then reads the
 * bit it adds 1, which clears the bit and counts, and wakes everybody. Each side touches its own word before it reads
 * the other's (sequentially consistent), so either the signal sees the sleeper or the waiter sees the value. The
 * count is for a waiter that comes late: between its look and its sleep the word may be cleared by a signal and set
 * again by the next waiter, and must not be what it was. Without sleepers a signal makes no system call. A waiter that
 * is killed leaves its bit behind, which costs the next signal one call.
 *
 * How long a wait spins adapts: where spinning pays (ranks on cores of their own) up to SPIN_MAX_NS, where it
 * does not (more ranks than cores, or a peer that computes for long) SPIN_MIN_NS; then it looks on
 * and lets others run in between (where two ranks share a core, that is the fastest way to hand over), and
 * then it sleeps. */
#define _GNU_SOURCE 1
#include "device/internal.h"

#include <limits.h>
#include <sched.h>

enum { PROBE_EVERY = 32, PROBE_NS = 5000 };
enum { SPIN_MIN_NS = 200, SPIN_MAX_NS = 50000, YIELD_NS = 150000, SPIN_BATCH = 4, YIELD_BATCH = 4 };

typedef struct flag_slot {
    uint64_t value;
    _Atomic uint32_t asleep;
} flag_slot;

_Static_assert(sizeof(flag_slot) <= ZX_FLAG_OWN_BYTES, "the device's part of a slot holds both words");

static _Atomic uint32_t *asleep_of(const uint64_t *flag)
{
    return &((flag_slot *)(uintptr_t)flag)->asleep;
}

void zx_flag_store(uint64_t *flag, uint64_t value)
{
    _Atomic uint32_t *asleep = asleep_of(flag);
    __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
    uint32_t seen = atomic_load(asleep);
    if ((seen & 1) == 0) return;
    /* When this fails another signal has just done it, and its wake-up reaches the same sleepers. */
    if (atomic_compare_exchange_strong(asleep, &seen, seen + 1)) zx_futex_wake(asleep, INT_MAX, true);
}

static bool look(const uint64_t *flag, uint64_t value, int n)
{
    for (int i = 0; i < n; i++) {
        if (zx_flag_reached(flag, value)) return true;
        zx_cpu_relax();
    }
    return false;
}

/* *took_ns is what the clock said last: another look at it would cost as much as the flag's way. */
static bool spin(const uint64_t *flag, uint64_t value, int64_t budget_ns, int64_t *took_ns)
{
    int64_t start = zx_now_ns(), now = start;
    bool reached;
    while (!(reached = look(flag, value, SPIN_BATCH)) && now - start < budget_ns)
        now = zx_now_ns();
    *took_ns = now - start;
    return reached;
}

/* Lets others run between two looks: with more ranks than cores, the peer is one of them. */
static bool spin_yielding(const uint64_t *flag, uint64_t value)
{
    int64_t end = zx_now_ns() + YIELD_NS;
    do {
        for (int i = 0; i < YIELD_BATCH; i++) {
            if (zx_flag_reached(flag, value)) return true;
            sched_yield();
        }
    } while (zx_now_ns() < end);
    return false;
}

/* Makes sure that the bit is set; returns the word with it. */
static uint32_t announce_sleep(_Atomic uint32_t *asleep)
{
    uint32_t seen = atomic_load(asleep);
    while ((seen & 1) == 0 && !atomic_compare_exchange_weak(asleep, &seen, seen | 1)) {
    }
    return seen | 1;
}

static zx_status sleep_until(zx_device *dev, const char *stream, const uint64_t *flag, uint64_t value)
{
    _Atomic uint32_t *asleep = asleep_of(flag);
    int64_t next_hook = zx_now_ns() + ZX_HOOK_NS;
    for (;;) {
        uint32_t seen = announce_sleep(asleep);
        if (__atomic_load_n(flag, __ATOMIC_SEQ_CST) >= value) return ZX_OK;
        int64_t now = zx_now_ns();
        if (now >= next_hook) {
            if (zx_device_hook(dev))
                ZX_FAIL(ZX_ERR_INTERRUPTED,
                        "stopped by the interrupt hook while stream '%s' waited for a flag to become %llu "
                        "(it is %llu)",
                        stream, (unsigned long long)value, (unsigned long long)__atomic_load_n(flag, __ATOMIC_RELAXED));
            next_hook = now + ZX_HOOK_NS;
        }
        zx_futex_wait(asleep, seen, next_hook - now, true);
    }
}

/* How long to spin this time. A side that has given up spinning makes its peer wait longer, which then gives up
 * too; so now and then a longer time is tried, and both find back to spinning where it pays. */
static int64_t spin_budget(zx_device *dev)
{
    bool probe = ++dev->n_waits % PROBE_EVERY == 0;
    return probe ? zx_max64(dev->spin_ns, PROBE_NS) : dev->spin_ns;
}

zx_status zx_flag_wait(zx_device *dev, const char *stream, const uint64_t *flag, uint64_t value)
{
    int64_t took;
    if (look(flag, value, SPIN_BATCH)) return ZX_OK;
    if (spin(flag, value, spin_budget(dev), &took)) {
        dev->spin_ns = zx_min64(zx_max64(dev->spin_ns, 2 * took + SPIN_MIN_NS), SPIN_MAX_NS);
        return ZX_OK;
    }
    dev->spin_ns = zx_max64(dev->spin_ns / 2, SPIN_MIN_NS);
    if (spin_yielding(flag, value)) return ZX_OK;
    ZX_TRY(sleep_until(dev, stream, flag, value));
    return ZX_OK;
}
