/* thread.h - what code that waits and wakes needs: the spin hint, futexes, cores, the thread's rank. For
 * base, device and comm. */
#ifndef ZX_BASE_THREAD_H
#define ZX_BASE_THREAD_H

#include "base/zx.h"

#include <stdatomic.h>

/* Tells the processor that this is a spin loop. */
static inline void zx_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int zx_n_cores(void);  /* cores that this process may run on, at least 1 */
int zx_log_rank(void); /* this thread's rank as zx_log_set_rank left it; -1 = none */

/* Sleep while *word == seen, until woken or timeout_ns passed (< 0: no limit); may return early, so the
 * caller looks again. shared: the word lies in memory that other processes map too. */
void zx_futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t timeout_ns, bool shared);
void zx_futex_wake(_Atomic uint32_t *word, int n_most, bool shared);

#endif
