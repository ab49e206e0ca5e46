/* memory.c - counted host memory.
 *
 * DESIGN. A block is calloc'ed with room for a header of one cache line in front of the aligned payload;
 * calloc gives large blocks as untouched zero pages, so zeroing costs nothing there. The header remembers
 * class and size, which is what keeps the books right at free time, and a magic number, which makes a
 * second free or a foreign pointer an error in the log instead of a corrupted heap. */
#include "base/zx.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { ALIGN = 64 };

static const uint64_t MAGIC_LIVE = 0x7a65726f782d6d65u;
static const uint64_t MAGIC_FREE = 0x64656164626c6f63u;

typedef struct header {
    uint64_t magic;
    void *raw; /* what calloc returned */
    size_t bytes;
    zx_mem_class cls;
} header;

_Static_assert(sizeof(header) <= ALIGN, "the header shares the line in front of the payload");

typedef struct counters {
    _Atomic int64_t n_allocs, n_live, live_bytes, peak_bytes;
} counters;

static counters g_counters[ZX_N_MEM_CLASS];

void zx_mem_account(zx_mem_class cls, int64_t n_blocks, int64_t bytes)
{
    counters *c = &g_counters[cls];
    if (n_blocks > 0) atomic_fetch_add_explicit(&c->n_allocs, n_blocks, memory_order_relaxed);
    atomic_fetch_add_explicit(&c->n_live, n_blocks, memory_order_relaxed);
    int64_t live = atomic_fetch_add_explicit(&c->live_bytes, bytes, memory_order_relaxed) + bytes;
    int64_t peak = atomic_load_explicit(&c->peak_bytes, memory_order_relaxed);
    while (live > peak && !atomic_compare_exchange_weak_explicit(&c->peak_bytes, &peak, live, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
}

zx_mem_stats zx_mem_get(zx_mem_class cls)
{
    zx_mem_stats s = {0};
    if ((unsigned)cls >= ZX_N_MEM_CLASS) return s;
    counters *c = &g_counters[cls];
    s.n_allocs = atomic_load_explicit(&c->n_allocs, memory_order_relaxed);
    s.n_live = atomic_load_explicit(&c->n_live, memory_order_relaxed);
    s.live_bytes = atomic_load_explicit(&c->live_bytes, memory_order_relaxed);
    s.peak_bytes = atomic_load_explicit(&c->peak_bytes, memory_order_relaxed);
    return s;
}

const char *zx_mem_class_name(zx_mem_class cls)
{
    static const char *const names[ZX_N_MEM_CLASS] = {"misc", "comm", "store", "model", "device"};
    return (unsigned)cls < ZX_N_MEM_CLASS ? names[cls] : "?";
}

zx_status zx_alloc(zx_mem_class cls, size_t bytes, void **out)
{
    *out = NULL;
    if ((unsigned)cls >= ZX_N_MEM_CLASS) ZX_FAIL(ZX_ERR_BUG, "memory class %d does not exist", (int)cls);
    ZX_TRY(zx_fault_point("zx_alloc"));
    void *raw = NULL;
    if (bytes <= (size_t)PTRDIFF_MAX - 2 * ALIGN) raw = calloc(1, bytes + 2 * ALIGN);
    if (raw == NULL)
        ZX_FAIL(ZX_ERR_NOMEM, "cannot allocate %zu bytes of host memory for %s, which holds %lld bytes already", bytes,
                zx_mem_class_name(cls), (long long)zx_mem_get(cls).live_bytes);
    char *payload = (char *)(((uintptr_t)raw + 2 * ALIGN - 1) & ~(uintptr_t)(ALIGN - 1));
    header *h = (header *)(void *)(payload - ALIGN);
    *h = (header){.magic = MAGIC_LIVE, .raw = raw, .bytes = bytes, .cls = cls};
    zx_mem_account(cls, 1, (int64_t)bytes);
    *out = payload;
    return ZX_OK;
}

zx_status zx_alloc_array(zx_mem_class cls, int64_t n, size_t size, void **out)
{
    *out = NULL;
    size_t bytes = 0;
    if (n < 0) ZX_FAIL(ZX_ERR_ARG, "an array of %lld elements: the count must be 0 or more", (long long)n);
    if (__builtin_mul_overflow((size_t)n, size, &bytes))
        ZX_FAIL(ZX_ERR_NOMEM, "an array of %lld elements of %zu bytes exceeds the address space", (long long)n, size);
    ZX_TRY(zx_alloc(cls, bytes, out));
    return ZX_OK;
}

/* Read once: released memory is overwritten when ZEROX_DEBUG is set, so that a stale pointer is noticed. */
static bool poison_released(void)
{
    static _Atomic int known; /* 0 not read yet, 1 no, 2 yes */
    int k = atomic_load_explicit(&known, memory_order_relaxed);
    if (k == 0) {
        const char *text = zx_env_text(ZX_ENV_DEBUG);
        k = strcmp(text, "0") != 0 ? 2 : 1;
        atomic_store_explicit(&known, k, memory_order_relaxed);
    }
    return k == 2;
}

zx_status zx_grow_array(zx_mem_class cls, void **array, int64_t n_used, int64_t *capacity, size_t size)
{
    int64_t wanted = *capacity ? *capacity * 2 : 16;
    void *bigger;
    ZX_TRY(zx_alloc_array(cls, wanted, size, &bigger));
    if (n_used) memcpy(bigger, *array, (size_t)n_used * size);
    zx_free(*array);
    *array = bigger;
    *capacity = wanted;
    return ZX_OK;
}

void zx_free(void *block)
{
    if (block == NULL) return;
    header *h = (header *)(void *)((char *)block - ALIGN);
    if (h->magic != MAGIC_LIVE) {
        zx_log(ZX_LOG_ERROR, "zx_free(%p): %s; the block is left alone", block,
               h->magic == MAGIC_FREE ? "freed twice" : "not a block of zx_alloc, or its header was overwritten");
        return;
    }
    void *raw = h->raw;
    zx_mem_account(h->cls, -1, -(int64_t)h->bytes);
    if (poison_released()) memset(block, 0xDD, h->bytes);
    h->magic = MAGIC_FREE;
    free(raw);
}
