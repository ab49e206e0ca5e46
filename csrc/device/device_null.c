/* device_null.c - the device that records instead of computing: plans and schedules of any size on any
 * machine.
 *
 * DESIGN. Addresses are numbers from a range that no processor maps, so reading one is caught at once; they
 * are handed out upwards and never twice, so a run gives the same addresses each time. Bytes are counted
 * against what the device pretends to have. Waits never wait and calls are not called. */
#include "device/internal.h"

#include <string.h>

#define FIRST_ADDRESS ((uintptr_t)1 << 56)
#define LAST_ADDRESS ((uintptr_t)1 << 62)
#define ADDRESS_ALIGN ((size_t)1 << 21)
enum { GRANULE = 4096, ALIGN = 256 };

/* Records are read after their streams are closed, so the names of streams live here. */
typedef struct stream_name {
    struct stream_name *next;
    char text[sizeof((zx_stream *)0)->name];
} stream_name;

struct zx_null {
    zx_record *records;
    int64_t n_records, capacity;
    uintptr_t next_address;
    size_t used_bytes; /* of objects and allocations */
    stream_name *names;
    zx_ranges allocated; /* owner: the size, as the allocation was asked for */
};

static zx_status take_addresses(zx_device *dev, size_t bytes, size_t align, void **out)
{
    struct zx_null *null = dev->null;
    uintptr_t begin = (null->next_address + align - 1) / align * align;
    if (begin > LAST_ADDRESS || bytes > LAST_ADDRESS - begin)
        ZX_FAIL(ZX_ERR_NOMEM, "the null device has no addresses left for %zu bytes", bytes);
    null->next_address = begin + bytes;
    *out = (void *)begin;
    return ZX_OK;
}

static zx_status take_bytes(zx_device *dev, size_t bytes)
{
    ZX_TRY(zx_fault_point("null_memory"));
    size_t free_bytes = dev->caps.total_bytes - dev->null->used_bytes;
    if (bytes > free_bytes)
        ZX_FAIL(ZX_ERR_NOMEM, "%zu bytes exceed what is left of the null device: %zu of %zu bytes", bytes, free_bytes,
                dev->caps.total_bytes);
    dev->null->used_bytes += bytes;
    return ZX_OK;
}

static zx_status null_reserve(zx_device *dev, size_t bytes, void **out_addr)
{
    ZX_TRY(take_addresses(dev, bytes, ADDRESS_ALIGN, out_addr));
    return ZX_OK;
}

static void null_unreserve(zx_device *dev, void *addr, size_t bytes)
{
    (void)dev, (void)addr, (void)bytes;
}

static zx_status null_mem_open(zx_mem *mem)
{
    ZX_TRY(take_bytes(mem->dev, mem->bytes));
    return ZX_OK;
}

static void null_mem_close(zx_mem *mem)
{
    (void)mem;
}

static void null_mem_release(zx_mem *mem)
{
    mem->dev->null->used_bytes -= mem->bytes;
}

static zx_status null_map(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes)
{
    (void)dev, (void)addr, (void)mem, (void)offset, (void)bytes;
    return ZX_OK;
}

static zx_status null_unmap(zx_device *dev, void *addr, size_t bytes)
{
    (void)dev, (void)addr, (void)bytes;
    return ZX_OK;
}

static zx_status null_alloc(zx_device *dev, size_t bytes, void **out)
{
    struct zx_null *null = dev->null;
    zx_status zx_rc_ = ZX_OK;
    void *addr = NULL;
    ZX_TRY(zx_ranges_grow(&null->allocated));
    ZX_TRY(take_bytes(dev, bytes));
    ZX_TRY_GOTO(take_addresses(dev, bytes + 1, ALIGN, &addr), fail); /* an address of its own for 0 bytes too */
    zx_ranges_insert(&null->allocated, (zx_range){.begin = (uintptr_t)addr, .end = (uintptr_t)addr + bytes + 1});
    *out = addr;
    return ZX_OK;
fail:
    null->used_bytes -= bytes;
    return zx_rc_;
}

static bool null_free(zx_device *dev, void *ptr)
{
    struct zx_null *null = dev->null;
    int64_t i = zx_ranges_find(&null->allocated, (uintptr_t)ptr);
    if (i == null->allocated.n || null->allocated.at[i].begin != (uintptr_t)ptr) {
        zx_log(ZX_LOG_ERROR, "zx_device_free(%p) on device 'null': not an allocation", ptr);
        return false;
    }
    null->used_bytes -= null->allocated.at[i].end - null->allocated.at[i].begin - 1;
    zx_ranges_remove(&null->allocated, i);
    return true;
}

static zx_status null_stream_open(zx_stream *stream)
{
    struct zx_null *null = stream->dev->null;
    stream_name *name = null->names;
    while (name != NULL && strcmp(name->text, stream->name) != 0)
        name = name->next;
    if (name == NULL) {
        ZX_TRY(ZX_NEW(ZX_MEM_MISC, name));
        memcpy(name->text, stream->name, sizeof name->text);
        name->next = null->names;
        null->names = name;
    }
    stream->label = name->text;
    return ZX_OK;
}

static void null_stream_close(zx_stream *stream)
{
    (void)stream;
}

static zx_status null_stream_sync(zx_stream *stream)
{
    (void)stream;
    return ZX_OK;
}

static zx_status grow_records(struct zx_null *null)
{
    if (null->n_records < null->capacity) return ZX_OK;
    int64_t capacity = null->capacity == 0 ? 256 : 2 * null->capacity;
    zx_record *records = NULL;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_MISC, capacity, records));
    if (null->n_records > 0) memcpy(records, null->records, (size_t)null->n_records * sizeof *records);
    zx_free(null->records);
    null->records = records;
    null->capacity = capacity;
    return ZX_OK;
}

static zx_status null_submit(zx_stream *stream, const zx_work *work)
{
    struct zx_null *null = stream->dev->null;
    ZX_TRY(grow_records(null));
    const char *what = work->kind == ZX_WORK_CALL ? "call" : work->name;
    null->records[null->n_records++] =
        (zx_record){.what = what, .stream = stream->label, .bytes = (int64_t)work->bytes};
    return ZX_OK;
}

static void null_flag_store(uint64_t *flag, uint64_t value)
{
    (void)flag, (void)value;
}

static void null_close(zx_device *dev)
{
    if (dev->null == NULL) return;
    for (stream_name *name = dev->null->names, *next; name != NULL; name = next) {
        next = name->next;
        zx_free(name);
    }
    zx_free(dev->null->records);
    zx_ranges_close(&dev->null->allocated);
    zx_free(dev->null);
    dev->null = NULL;
}

static const zx_device_ops g_null_ops = {
    .close = null_close,
    .reserve = null_reserve,
    .unreserve = null_unreserve,
    .mem_open = null_mem_open,
    .mem_close = null_mem_close,
    .mem_release = null_mem_release,
    .map = null_map,
    .unmap = null_unmap,
    .alloc = null_alloc,
    .free = null_free,
    .stream_open = null_stream_open,
    .stream_close = null_stream_close,
    .stream_sync = null_stream_sync,
    .submit = null_submit,
    .flag_store = null_flag_store,
};

zx_status zx_null_init(zx_device *dev, const zx_device_config *config)
{
    dev->ops = &g_null_ops;
    dev->kernels = zx_kernels_cpu(); /* names and sizes of arguments; nothing of it runs */
    dev->caps = (zx_device_caps){
        .name = "null",
        .granule = GRANULE,
        .alignment = ALIGN,
        .total_bytes = config->null_total_bytes == 0 ? (size_t)1 << 62 : config->null_total_bytes,
        .n_threads = config->n_threads == 0 ? 1 : config->n_threads,
    };
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, dev->null));
    dev->null->next_address = FIRST_ADDRESS;
    return ZX_OK;
}

int64_t zx_null_n_records(const zx_device *dev)
{
    return dev->null == NULL ? 0 : dev->null->n_records;
}

const zx_record *zx_null_records(const zx_device *dev)
{
    return dev->null == NULL ? NULL : dev->null->records;
}

void zx_null_clear(zx_device *dev)
{
    if (dev->null != NULL) dev->null->n_records = 0;
}
