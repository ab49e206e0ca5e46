/* thread.c - futexes, cores, the monotonic clock. */
#define _GNU_SOURCE 1
#include "base/thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
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

int zx_n_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

void zx_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns, bool shared)
{
    struct timespec t = {.tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000};
    int saved_errno = errno;
    syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, seen, timeout_ns < 0 ? NULL : &t, NULL,
            0);
    errno = saved_errno;
}

void zx_futex_wake(_Atomic uint32_t *word, int n_most, bool shared)
{
    int saved_errno = errno;
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, n_most, NULL, NULL, 0);
    errno = saved_errno;
}
