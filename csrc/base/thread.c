/* thread.c - futexes, cores, the monotonic clock. */
#define _GNU_SOURCE 1
#include "base/thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(_Atomic uint32_t) == 4, "the kernel's futex word is a plain 32-bit integer");

int64_t zx_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Cores that the control group grants, rounded up; containers see all cores of the machine but may not use them. */
static int64_t quota_cores(void)
{
    int64_t cores = INT64_MAX;
    long long quota, period;
    FILE *f = fopen("/sys/fs/cgroup/cpu.max", "re");
    if (f == NULL) return cores;
    if (fscanf(f, "%lld %lld", &quota, &period) == 2 && quota > 0 && period > 0) cores = zx_ceil_div(quota, period);
    fclose(f);
    return cores; /* "max 100000": no number, no limit */
}

int zx_n_cores(void)
{
    cpu_set_t set;
    int64_t n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return (int)zx_max64(zx_min64(n, quota_cores()), 1);
}

void zx_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns, bool shared)
{
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    int saved_errno = errno;
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, timeout_ns < 0 ? NULL : &t, NULL, 0);
    errno = saved_errno;
}

void zx_futex_wake(_Atomic uint32_t *word, int n_most, bool shared)
{
    int saved_errno = errno;
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, n_most, NULL, NULL, 0);
    errno = saved_errno;
}
