/* internal.h - what the files of device share: the objects, the vtable behind device.h, and one struct for
 * everything that can be put into a stream.
 *
 * device.c checks arguments, keeps the books (reservations, mappings, counts) and calls the vtable; an
 * implementation may rely on what it checked. `submit` is the one way into a stream: it executes (inline),
 * queues (delayed) or records (null) the work. */
#ifndef ZX_DEVICE_INTERNAL_H
#define ZX_DEVICE_INTERNAL_H

#include "base/thread.h"
#include "device/device.h"
#include "device/ranges.h"

/* Between two looks at the interrupt hook. */
#define ZX_HOOK_NS 100000000

typedef enum zx_work_kind {
    ZX_WORK_COPY = 0,
    ZX_WORK_FILL,
    ZX_WORK_SIGNAL,
    ZX_WORK_WAIT,
    ZX_WORK_CALL,
    ZX_WORK_LAUNCH,
    ZX_WORK_RECORD,
    ZX_WORK_WAIT_EVENT,
} zx_work_kind;

typedef struct zx_work {
    zx_work_kind kind;
    const char *name;     /* a literal, for records and the timeline */
    void *dst;            /* copy, fill */
    const void *src;      /* copy */
    int byte;             /* fill */
    size_t bytes;         /* copy, fill; launch: of the views it names */
    uint64_t *flag;       /* signal, wait */
    uint64_t value;
    zx_host_fn fn; /* call */
    void *arg;
    zx_op_id op; /* launch */
    const void *args;
    size_t args_bytes;
    size_t scratch_bytes;
    zx_event *event; /* record, wait_event */
} zx_work;

struct zx_mem {
    zx_device *dev;
    size_t bytes;
    bool shareable;
    bool imported;
    int fd;         /* -1 where there is none */
    int64_t n_refs; /* the opener's, and one for each mapping */
};

struct zx_stream {
    zx_device *dev;
    zx_stream *next;
    uint64_t id; /* never used twice on a device */
    char name[32];
    const char *label; /* null: the name in memory that outlives the stream */
    int lane;          /* of the timeline */
    void *scratch;
    size_t scratch_bytes;
    size_t scratch_limit; /* SIZE_MAX: the device's bound */
    struct zx_queue *queue; /* delayed streams */
};

struct zx_event {
    zx_device *dev;
    uint64_t stream_id; /* of the last record; 0 = never recorded */
    uint64_t position;  /* in that stream, 1 = its first work */
};

typedef struct zx_device_ops {
    void (*close)(zx_device *dev);
    zx_status (*reserve)(zx_device *dev, size_t bytes, void **out_addr);
    void (*unreserve)(zx_device *dev, void *addr, size_t bytes);
    zx_status (*mem_open)(zx_mem *mem);            /* dev, bytes, shareable are set */
    zx_status (*mem_import)(zx_mem *mem, int fd);  /* likewise */
    zx_status (*mem_export)(zx_mem *mem, int *out_fd);
    void (*mem_close)(zx_mem *mem); /* the opener lets go: no exports any more; accepts a half-open object */
    void (*mem_release)(zx_mem *mem); /* the last mapping is gone too */
    zx_status (*map)(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes);
    zx_status (*unmap)(zx_device *dev, void *addr, size_t bytes);
    zx_status (*alloc)(zx_device *dev, size_t bytes, void **out);
    bool (*free)(zx_device *dev, void *ptr); /* false: refused and logged */
    zx_status (*stream_open)(zx_stream *stream);
    void (*stream_close)(zx_stream *stream);
    zx_status (*stream_sync)(zx_stream *stream);
    zx_status (*submit)(zx_stream *stream, const zx_work *work);
    void (*progress)(zx_device *dev); /* do what can be done without blocking; NULL where work needs no help */
    void (*flag_store)(uint64_t *flag, uint64_t value);
} zx_device_ops;

struct zx_device {
    const zx_device_ops *ops;
    zx_device_caps caps;
    const zx_kernels *kernels;
    bool at_once; /* cpu: streams run inline, so small work may skip `submit` when nobody watches */
    zx_pool *pool;
    const zx_gemm *gemm;
    zx_isa isa;
    _Atomic(zx_interrupt_hook) hook;
    _Atomic(void *) hook_ctx;
    zx_ranges reserved; /* address ranges */
    zx_ranges mapped; /* with the object behind them */
    zx_stream *streams;
    uint64_t n_streams_ever;
    int64_t n_mems, n_allocs, n_events; /* open now */
    size_t scratch_bytes; /* SIZE_MAX: grows on demand */
    int64_t spin_ns; /* how long a wait spins before it lets others run; adapts */
    int64_t n_waits;
    struct zx_delay *delay;
    struct zx_null *null;
};

/* Each fills caps, ops and what it needs; on failure the caller closes the device. */
ZX_CHECKED zx_status zx_cpu_init(zx_device *dev, const zx_device_config *config);
ZX_CHECKED zx_status zx_null_init(zx_device *dev, const zx_device_config *config);

/* device.c: calls the hook. Unlike zx_device_interrupted it does not make progress. */
bool zx_device_hook(zx_device *dev);
/* Makes the stream's scratch at least `bytes` large. */
ZX_CHECKED zx_status zx_stream_grow_scratch(zx_stream *stream, size_t bytes);

/* args.c: sizes of the views in an argument struct, in bytes; what records and the timeline show. */
int64_t zx_args_bytes(zx_op_id op, const void *args);

/* device_cpu_mem.c */
ZX_CHECKED zx_status zx_cpu_reserve(zx_device *dev, size_t bytes, void **out_addr);
void zx_cpu_unreserve(zx_device *dev, void *addr, size_t bytes);
ZX_CHECKED zx_status zx_cpu_mem_open(zx_mem *mem);
ZX_CHECKED zx_status zx_cpu_mem_import(zx_mem *mem, int fd);
ZX_CHECKED zx_status zx_cpu_mem_export(zx_mem *mem, int *out_fd);
void zx_cpu_mem_close(zx_mem *mem);
void zx_cpu_mem_release(zx_mem *mem);
ZX_CHECKED zx_status zx_cpu_map(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes);
ZX_CHECKED zx_status zx_cpu_unmap(zx_device *dev, void *addr, size_t bytes);
ZX_CHECKED zx_status zx_cpu_alloc(zx_device *dev, size_t bytes, void **out);
bool zx_cpu_free(zx_device *dev, void *ptr);
size_t zx_cpu_total_bytes(void);

/* device_cpu.c: executes now, on the calling thread; a wait blocks. */
ZX_CHECKED zx_status zx_cpu_execute(zx_stream *stream, const zx_work *work);
void zx_cpu_close(zx_device *dev);
void zx_cpu_copy(zx_device *dev, void *dst, const void *src, size_t bytes);

/* device_delay.c: replaces the streams of a cpu device. */
ZX_CHECKED zx_status zx_delay_init(zx_device *dev, uint64_t seed);

/* flag.c */
static inline bool zx_flag_reached(const uint64_t *flag, uint64_t value)
{
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE) >= value;
}
void zx_flag_store(uint64_t *flag, uint64_t value);
ZX_CHECKED zx_status zx_flag_wait(zx_device *dev, const char *stream, const uint64_t *flag, uint64_t value);

#endif
