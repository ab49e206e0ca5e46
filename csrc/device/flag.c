/* flag.c - flags on the CPU: signal and wait among threads and processes.
 *
 * DESIGN. A slot of 64 bytes: the value, and behind it `asleep`, a futex word. A waiter that has spun enough
 * sets asleep = 1, looks at the value once more and sleeps while asleep is 1. A signal stores the value, and
 * only if it then reads asleep = 1 sets it to 0 and wakes everybody. Each side writes its word before it
 * reads the other's (sequentially consistent), so either the signal sees the sleeper or the waiter sees the
 * value; and a waiter that comes between the 0 and the wake-up finds asleep != 1 and does not sleep. Without
 * sleepers a signal makes no system call. A waiter that is killed leaves a 1 behind, which costs the next
 * signal one call.
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
enum { SPIN_MIN_NS = 200, SPIN_MAX_NS = 50000, YIELD_UNTIL_NS = 200000, SPIN_BATCH = 4, YIELD_BATCH = 4 };

typedef struct flag_slot {
    uint64_t value;
    _Atomic uint32_t asleep;
} flag_slot;

_Static_assert(sizeof(flag_slot) <= ZX_FLAG_BYTES, "a slot holds both words");

static _Atomic uint32_t *asleep_of(const uint64_t *flag)
{
    return &((flag_slot *)(uintptr_t)flag)->asleep;
}

void zx_flag_store(uint64_t *flag, uint64_t value)
{
    _Atomic uint32_t *asleep = asleep_of(flag);
    __atomic_store_n(flag, value, __ATOMIC_SEQ_CST);
    if (atomic_load(asleep) == 0) return;
    atomic_store(asleep, 0);
    zx_futex_wake(asleep, INT_MAX, true);
}

static bool spin(const uint64_t *flag, uint64_t value, int64_t end_ns)
{
    do {
        for (int i = 0; i < SPIN_BATCH; i++) {
            if (zx_flag_reached(flag, value)) return true;
            zx_cpu_relax();
        }
    } while (zx_now_ns() < end_ns);
    return false;
}

/* Lets others run between two looks: with more ranks than cores, the peer is one of them. */
static bool spin_yielding(const uint64_t *flag, uint64_t value, int64_t end_ns)
{
    do {
        for (int i = 0; i < YIELD_BATCH; i++) {
            if (zx_flag_reached(flag, value)) return true;
            sched_yield();
        }
    } while (zx_now_ns() < end_ns);
    return false;
}

static zx_status sleep_until(zx_device *dev, const char *stream, const uint64_t *flag, uint64_t value)
{
    _Atomic uint32_t *asleep = asleep_of(flag);
    int64_t next_hook = zx_now_ns() + ZX_HOOK_NS;
    for (;;) {
        atomic_store(asleep, 1);
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
        zx_futex_wait(asleep, 1, next_hook - now, true);
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
    if (zx_flag_reached(flag, value)) return ZX_OK;
    int64_t start = zx_now_ns();
    if (spin(flag, value, start + spin_budget(dev))) {
        int64_t enough = 2 * (zx_now_ns() - start);
        dev->spin_ns = zx_min64(zx_max64(dev->spin_ns, enough), SPIN_MAX_NS);
        return ZX_OK;
    }
    dev->spin_ns = zx_max64(dev->spin_ns / 2, SPIN_MIN_NS);
    if (spin_yielding(flag, value, start + YIELD_UNTIL_NS)) return ZX_OK;
    ZX_TRY(sleep_until(dev, stream, flag, value));
    return ZX_OK;
}
