/* fault.c - fault points: the n-th fallible primitive from now fails once, so that tests can walk through
 * every failure that a piece of code can meet. */
#include "base/zx.h"

#include <errno.h>
#include <stdatomic.h>

static _Atomic int64_t g_target; /* 0 = disarmed */
static _Atomic int64_t g_passed;

zx_status zx_fault_point(const char *name)
{
    int64_t target = atomic_load_explicit(&g_target, memory_order_relaxed);
    if (__builtin_expect(target == 0, 1)) return ZX_OK;
    int64_t n = atomic_fetch_add(&g_passed, 1) + 1;
    if (n != target) return ZX_OK;
    ZX_FAIL_SYS(EIO, name, "injected failure at fault point %lld, %s", (long long)n, name);
}

void zx_fault_arm(int64_t n)
{
    atomic_store(&g_target, 0); /* nobody counts against the old target once the count is reset */
    atomic_store(&g_passed, 0);
    atomic_store(&g_target, n > 0 ? n : 0);
}

int64_t zx_fault_passed(void)
{
    return atomic_load(&g_passed);
}
