/* device.c - the part of every device: opens it, checks arguments, keeps the books, calls the vtable.
 *
 * DESIGN. What is legal must not depend on the device, so addresses, granules, overlaps and life times are
 * checked here: `reserved` and `mapped` are the only truth about the address space, and an implementation
 * never sees a bad call. The rules are those of CUDA's virtual memory: map only inside one reservation and
 * onto nothing, unmap only whole mappings. */
#include "device/internal.h"

#include <string.h>

/* ---- open and close --------------------------------------------------------------------------------- */

zx_status zx_device_open(const zx_device_config *config, zx_device **out)
{
    *out = NULL;
    if (config == NULL) ZX_FAIL(ZX_ERR_ARG, "a device needs a configuration, got NULL");
    zx_status zx_rc_ = ZX_OK;
    zx_device *dev = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, dev));
    dev->scratch_bytes = SIZE_MAX;
    switch (config->kind) {
    case ZX_DEVICE_CPU:
    case ZX_DEVICE_REF:
        ZX_TRY_GOTO(zx_cpu_init(dev, config), fail);
        break;
    case ZX_DEVICE_NULL:
        ZX_TRY_GOTO(zx_null_init(dev, config), fail);
        break;
    case ZX_DEVICE_CUDA:
        ZX_FAIL_GOTO(ZX_ERR_UNSUPPORTED, fail,
                     "this build has no CUDA device: use the device 'cpu', or build with ZEROX_CUDA=1");
    default:
        ZX_FAIL_GOTO(ZX_ERR_ARG, fail, "there is no device of kind %d", (int)config->kind);
    }
    *out = dev;
    return ZX_OK;
fail:
    zx_device_close(dev);
    return zx_rc_;
}

static void log_leaks(const zx_device *dev)
{
    int64_t n_streams = 0;
    for (const zx_stream *s = dev->streams; s != NULL; s = s->next)
        n_streams++;
    if (n_streams + dev->n_events + dev->n_mems + dev->n_allocs + dev->reserved.n == 0) return;
    zx_log(ZX_LOG_WARN,
           "device '%s' is closed with %lld streams, %lld events, %lld memory objects, %lld allocations and "
           "%lld "
           "reservations open: close them first",
           dev->caps.name, (long long)n_streams, (long long)dev->n_events, (long long)dev->n_mems,
           (long long)dev->n_allocs, (long long)dev->reserved.n);
}

void zx_device_close(zx_device *dev)
{
    if (dev == NULL) return;
    log_leaks(dev);
    if (dev->ops != NULL) dev->ops->close(dev);
    zx_ranges_close(&dev->reserved);
    zx_ranges_close(&dev->mapped);
    zx_free(dev);
}

const zx_device_caps *zx_device_caps_get(const zx_device *dev)
{
    return &dev->caps;
}

/* ---- interrupt hook --------------------------------------------------------------------------------- */

void zx_device_set_interrupt(zx_device *dev, zx_interrupt_hook hook, void *ctx)
{
    /* A thread that looks in between finds no hook, never a hook with another's context. */
    atomic_store(&dev->hook, NULL);
    atomic_store(&dev->hook_ctx, ctx);
    atomic_store(&dev->hook, hook);
}

bool zx_device_hook(zx_device *dev)
{
    zx_interrupt_hook hook = atomic_load(&dev->hook);
    return hook != NULL && hook(atomic_load(&dev->hook_ctx));
}

bool zx_device_interrupted(zx_device *dev)
{
    if (dev == NULL) return false;
    if (dev->ops->progress != NULL) dev->ops->progress(dev);
    return zx_device_hook(dev);
}

/* ---- address space ---------------------------------------------------------------------------------- */

static bool aligned(uintptr_t value, size_t to)
{
    return value % to == 0;
}

static zx_status check_granule(const zx_device *dev, const char *what, size_t bytes)
{
    size_t g = dev->caps.granule;
    if (!aligned(bytes, g))
        ZX_FAIL(ZX_ERR_ARG, "%s of %zu bytes on device '%s': it must be a multiple of the granule, %zu bytes", what,
                bytes, dev->caps.name, g);
    if (bytes > (size_t)PTRDIFF_MAX - g)
        ZX_FAIL(ZX_ERR_NOMEM, "%s of %zu bytes exceeds the address space", what, bytes);
    return ZX_OK;
}

/* A reservation of 0 bytes has an address of its own all the same, so it takes one granule. */
static size_t reserved_bytes(const zx_device *dev, size_t bytes)
{
    return bytes == 0 ? dev->caps.granule : bytes;
}

zx_status zx_device_reserve(zx_device *dev, size_t bytes, void **out_addr)
{
    *out_addr = NULL;
    ZX_TRY(check_granule(dev, "a reservation", bytes));
    ZX_TRY(zx_ranges_grow(&dev->reserved));
    size_t taken = reserved_bytes(dev, bytes);
    void *addr = NULL;
    ZX_TRY(dev->ops->reserve(dev, taken, &addr));
    zx_ranges_insert(&dev->reserved, (zx_range){.begin = (uintptr_t)addr, .end = (uintptr_t)addr + taken});
    *out_addr = addr;
    return ZX_OK;
}

static void mem_unref(zx_mem *mem)
{
    if (--mem->n_refs > 0) return;
    mem->dev->ops->mem_release(mem);
    zx_free(mem);
}

static void forget_mapping(zx_device *dev, int64_t index)
{
    zx_mem *mem = dev->mapped.at[index].owner;
    zx_ranges_remove(&dev->mapped, index);
    mem_unref(mem);
}

void zx_device_unreserve(zx_device *dev, void *addr, size_t bytes)
{
    if (addr == NULL) return;
    uintptr_t begin = (uintptr_t)addr, end = begin + reserved_bytes(dev, bytes);
    int64_t i = zx_ranges_find(&dev->reserved, begin);
    if (i == dev->reserved.n || dev->reserved.at[i].begin != begin || dev->reserved.at[i].end != end) {
        zx_log(ZX_LOG_ERROR, "zx_device_unreserve(%p, %zu): no such reservation on device '%s'", addr, bytes,
               dev->caps.name);
        return;
    }
    dev->ops->unreserve(dev, addr, end - begin); /* takes the mappings along */
    zx_ranges_remove(&dev->reserved, i);
    int64_t m;
    while ((m = zx_ranges_find(&dev->mapped, begin)) < dev->mapped.n && dev->mapped.at[m].begin < end)
        forget_mapping(dev, m);
}

static zx_status check_mapping(const zx_device *dev, uintptr_t begin, const zx_mem *mem, size_t offset, size_t bytes)
{
    if (!aligned(begin, dev->caps.granule))
        ZX_FAIL(ZX_ERR_ARG, "cannot map at %#llx: addresses are multiples of the granule, %zu bytes",
                (unsigned long long)begin, dev->caps.granule);
    ZX_TRY(check_granule(dev, "a mapping", bytes));
    ZX_TRY(check_granule(dev, "an offset of a mapping", offset));
    if (mem->dev != dev) ZX_FAIL(ZX_ERR_ARG, "cannot map a memory object of another device: import it first");
    if (offset > mem->bytes || bytes > mem->bytes - offset)
        ZX_FAIL(ZX_ERR_ARG, "cannot map bytes [%zu, %zu) of a memory object of %zu bytes", offset, offset + bytes,
                mem->bytes);
    int64_t i = zx_ranges_find(&dev->reserved, begin);
    if (i == dev->reserved.n || begin < dev->reserved.at[i].begin || bytes > dev->reserved.at[i].end - begin)
        ZX_FAIL(ZX_ERR_ARG, "cannot map %zu bytes at %#llx: they do not lie in one reservation", bytes,
                (unsigned long long)begin);
    if (zx_ranges_overlap(&dev->mapped, begin, begin + bytes))
        ZX_FAIL(ZX_ERR_STATE, "cannot map %zu bytes at %#llx: something is mapped there, unmap it first", bytes,
                (unsigned long long)begin);
    return ZX_OK;
}

zx_status zx_device_map(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes)
{
    uintptr_t begin = (uintptr_t)addr;
    if (mem == NULL) ZX_FAIL(ZX_ERR_ARG, "cannot map: the memory object is NULL");
    ZX_TRY(check_mapping(dev, begin, mem, offset, bytes));
    if (bytes == 0) return ZX_OK;
    ZX_TRY(zx_ranges_grow(&dev->mapped));
    ZX_TRY(dev->ops->map(dev, addr, mem, offset, bytes));
    zx_ranges_insert(&dev->mapped, (zx_range){.begin = begin, .end = begin + bytes, .owner = mem});
    mem->n_refs++;
    return ZX_OK;
}

zx_status zx_device_unmap(zx_device *dev, void *addr, size_t bytes)
{
    uintptr_t begin = (uintptr_t)addr, end = begin + bytes;
    ZX_TRY(check_granule(dev, "an unmapping", bytes));
    if (bytes == 0) return ZX_OK;
    zx_ranges *r = &dev->mapped;
    int64_t first = zx_ranges_find(r, begin), last = first;
    while (last < r->n && r->at[last].begin < end)
        last++;
    if (first == last) ZX_FAIL(ZX_ERR_STATE, "cannot unmap %zu bytes at %p: nothing is mapped there", bytes, addr);
    if (r->at[first].begin < begin || r->at[last - 1].end > end)
        ZX_FAIL(ZX_ERR_ARG, "cannot unmap %zu bytes at %p: that cuts a mapping, and only whole ones can go", bytes,
                addr);
    for (int64_t i = last - 1; i >= first; i--) {
        zx_range m = r->at[i];
        ZX_TRY(dev->ops->unmap(dev, (void *)m.begin, m.end - m.begin));
        forget_mapping(dev, i);
    }
    return ZX_OK;
}

/* ---- memory objects --------------------------------------------------------------------------------- */

static zx_status mem_new(zx_device *dev, size_t bytes, zx_mem **out)
{
    ZX_TRY(check_granule(dev, "a memory object", bytes));
    zx_mem *mem = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, mem));
    *mem = (zx_mem){.dev = dev, .bytes = bytes, .fd = -1, .n_refs = 1};
    *out = mem;
    return ZX_OK;
}

zx_status zx_mem_open(zx_device *dev, size_t bytes, bool shareable, zx_mem **out)
{
    *out = NULL;
    zx_status zx_rc_ = ZX_OK;
    zx_mem *mem = NULL;
    ZX_TRY(mem_new(dev, bytes, &mem));
    mem->shareable = shareable;
    ZX_TRY_GOTO(dev->ops->mem_open(mem), fail);
    dev->n_mems++;
    *out = mem;
    return ZX_OK;
fail:
    zx_free(mem);
    return zx_rc_;
}

zx_status zx_mem_import(zx_device *dev, int fd, size_t bytes, zx_mem **out)
{
    *out = NULL;
    zx_status zx_rc_ = ZX_OK;
    zx_mem *mem = NULL;
    if (!dev->caps.exports) ZX_FAIL(ZX_ERR_UNSUPPORTED, "device '%s' cannot import memory", dev->caps.name);
    ZX_TRY(mem_new(dev, bytes, &mem));
    mem->imported = true;
    ZX_TRY_GOTO(dev->ops->mem_import(mem, fd), fail);
    dev->n_mems++;
    *out = mem;
    return ZX_OK;
fail:
    zx_free(mem);
    return zx_rc_;
}

zx_status zx_mem_export(zx_mem *mem, int *out_fd)
{
    *out_fd = -1;
    if (!mem->dev->caps.exports) ZX_FAIL(ZX_ERR_UNSUPPORTED, "device '%s' cannot export memory", mem->dev->caps.name);
    if (!mem->shareable)
        ZX_FAIL(ZX_ERR_STATE, "cannot export a memory object of %zu bytes that was not opened as shareable",
                mem->bytes);
    ZX_TRY(mem->dev->ops->mem_export(mem, out_fd));
    return ZX_OK;
}

void zx_mem_close(zx_mem *mem)
{
    if (mem == NULL) return;
    mem->dev->n_mems--;
    mem->dev->ops->mem_close(mem);
    mem_unref(mem);
}

size_t zx_mem_bytes(const zx_mem *mem)
{
    return mem == NULL ? 0 : mem->bytes;
}

zx_status zx_device_alloc(zx_device *dev, size_t bytes, void **out)
{
    *out = NULL;
    if (bytes > (size_t)PTRDIFF_MAX / 2)
        ZX_FAIL(ZX_ERR_NOMEM, "an allocation of %zu bytes exceeds the address space", bytes);
    ZX_TRY(dev->ops->alloc(dev, bytes, out));
    dev->n_allocs++;
    return ZX_OK;
}

void zx_device_free(zx_device *dev, void *ptr)
{
    if (ptr == NULL) return;
    if (dev->ops->free(dev, ptr)) dev->n_allocs--;
}
