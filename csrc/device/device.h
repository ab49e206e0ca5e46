/* device.h - one vtable for memory, streams and kernels: cpu, ref (cpu with the double kernels), null
 * (records instead of computing), later cuda.
 *
 * Memory. `reserve` takes virtual addresses without bytes behind them; `mem_open` makes a physical object;
 * `map` puts (a part of) an object behind reserved addresses. Several ranges may map the same bytes: they
 * read each other's writes in stream order. Everything is counted in units of caps.granule bytes (a page on
 * the CPU, 2 MiB on CUDA). `alloc` is the short form for memory that nobody maps twice or shares.
 *
 * Streams. Work on a stream runs in order; between streams only events and flags order. CPU streams run
 * inline at the call. With a delay seed they are queues, executed in a random order that respects only the
 * promised order: what such a run computes must be the same, or the caller forgot an event.
 *
 * Nothing waits by itself: memory is freed or unmapped, and what a stream works with is closed, only after a sync.
 * Work that runs on a stream cannot sync.
 *
 * Flags are 8-byte words in device memory, also in memory imported from another rank. A flag lives in a slot
 * of its own of ZX_FLAG_BYTES, aligned to that; the first ZX_FLAG_OWN_BYTES are the device's and start as
 * zeros (the CPU notes behind the value that somebody sleeps), the rest is free for data that travels with the
 * flag in one cache line. `signal` stores a value, after everything before it on
 * the stream is visible; `wait` holds the stream until the flag is >= value. Waits carry no deadline: who may
 * hang releases them with zx_device_flag_store(ZX_FLAG_ABORT). On an inline CPU stream a wait blocks the
 * caller: it spins, then sleeps, and every 100 ms calls the interrupt hook.
 *
 * Threads. A device and everything opened on it belong to one thread at a time; zx_device_interrupted and
 * zx_device_flag_store may be called from any. Delayed streams make progress only inside calls on their
 * device (zx_device_interrupted is one): a thread that blocks on something else calls it while it waits.
 */
#ifndef ZX_DEVICE_DEVICE_H
#define ZX_DEVICE_DEVICE_H

#include "kernels/kernels.h"

#define ZX_FLAG_ABORT UINT64_MAX
enum { ZX_FLAG_BYTES = 64, ZX_FLAG_OWN_BYTES = 16 };

typedef struct zx_device zx_device;
typedef struct zx_stream zx_stream;
typedef struct zx_event zx_event;
typedef struct zx_mem zx_mem; /* a physical memory object */

typedef struct zx_device_caps {
    const char *name;      /* "cpu", "ref", "null", "cuda" */
    size_t granule;        /* bytes; reserve, map and mem_open count in it */
    size_t alignment;      /* of every allocation and of parameters inside a unit, bytes: 256 */
    size_t total_bytes;    /* of the device; what a plan may use */
    int n_threads;         /* CPU: of the pool */
    bool host_addressable; /* the host may read and write device memory directly, when the streams are idle */
    bool exports;          /* memory objects can be sent to other processes */
    bool computes;         /* false on null */
} zx_device_caps;

typedef enum zx_device_kind { ZX_DEVICE_CPU = 0, ZX_DEVICE_REF, ZX_DEVICE_NULL, ZX_DEVICE_CUDA } zx_device_kind;

typedef struct zx_device_config {
    zx_device_kind kind;
    int n_threads;           /* CPU: 0 = 1 */
    uint64_t delay_seed;     /* CPU: 0 = inline streams */
    const char *blas_path;   /* CPU: library to open for products; NULL or "" = plain loops */
    size_t null_total_bytes; /* null: what it pretends to have; 0 = without limit */
} zx_device_config;

ZX_CHECKED zx_status zx_device_open(const zx_device_config *config, zx_device **out);
/* Finishes all work first. Memory, streams and events must have been closed; what is left is logged as a
 * leak. */
void zx_device_close(zx_device *dev);
const zx_device_caps *zx_device_caps_get(const zx_device *dev);

/* Called every 100 ms by a thread that blocks in a wait or sync; returning true ends the wait with
 * ZX_ERR_INTERRUPTED. ctx is borrowed until the next set. */
typedef bool (*zx_interrupt_hook)(void *ctx);
void zx_device_set_interrupt(zx_device *dev, zx_interrupt_hook hook, void *ctx);
/* Used by whoever blocks on something else (sockets): true = stop. Safe without a hook. */
bool zx_device_interrupted(zx_device *dev);

/* ---- memory ---- */
ZX_CHECKED zx_status zx_device_reserve(zx_device *dev, size_t bytes, void **out_addr);
void zx_device_unreserve(zx_device *dev, void *addr, size_t bytes); /* unmaps what is mapped */
/* Zeroed bytes. shareable: can be exported. */
ZX_CHECKED zx_status zx_mem_open(zx_device *dev, size_t bytes, bool shareable, zx_mem **out);
void zx_mem_close(zx_mem *mem); /* mappings keep the bytes alive until they are unmapped */
size_t zx_mem_bytes(const zx_mem *mem);
ZX_CHECKED zx_status zx_device_map(zx_device *dev, void *addr, zx_mem *mem, size_t offset, size_t bytes);
ZX_CHECKED zx_status zx_device_unmap(zx_device *dev, void *addr, size_t bytes);
/* A descriptor that the caller owns (close it) and that another process can import. */
ZX_CHECKED zx_status zx_mem_export(zx_mem *mem, int *out_fd);
ZX_CHECKED zx_status zx_mem_import(zx_device *dev, int fd, size_t bytes, zx_mem **out); /* duplicates fd */
ZX_CHECKED zx_status zx_device_alloc(zx_device *dev, size_t bytes, void **out); /* zeroed, aligned */
void zx_device_free(zx_device *dev, void *ptr);

/* ---- streams and events ---- */
ZX_CHECKED zx_status zx_stream_open(zx_device *dev, const char *name, zx_stream **out);
void zx_stream_close(zx_stream *stream);
/* Returns when the stream is empty; reports errors of queued work; see the interrupt hook. */
ZX_CHECKED zx_status zx_stream_sync(zx_stream *stream);
zx_device *zx_stream_device(const zx_stream *stream);
const char *zx_stream_name(const zx_stream *stream);
ZX_CHECKED zx_status zx_event_open(zx_device *dev, zx_event **out);
void zx_event_close(zx_event *event);
ZX_CHECKED zx_status zx_event_record(zx_event *event, zx_stream *stream);
ZX_CHECKED zx_status zx_stream_wait_event(zx_stream *stream, zx_event *event); /* never recorded = no wait */

/* ---- work, in stream order ---- */
/* In any direction; the places do not overlap. */
ZX_CHECKED zx_status zx_stream_copy(zx_stream *stream, void *dst, const void *src, size_t bytes);
ZX_CHECKED zx_status zx_stream_fill(zx_stream *stream, void *dst, int byte, size_t bytes);
ZX_CHECKED zx_status zx_stream_signal(zx_stream *stream, uint64_t *flag, uint64_t value);
ZX_CHECKED zx_status zx_stream_wait(zx_stream *stream, const uint64_t *flag, uint64_t value);
/* Stores at once, in no stream's order, and wakes who waits: how a watchdog releases others. Cannot fail;
 * does nothing on a device that does not compute. */
void zx_device_flag_store(zx_device *dev, uint64_t *flag, uint64_t value);
/* fn(arg) in stream order, on a thread of the device's choice; arg must live until then. For host-side work
 * that a host transport puts into a stream; `name` is a string literal (the timeline keeps it). A status
 * other than ZX_OK is reported by sync (inline: by this call). */
typedef zx_status (*zx_host_fn)(void *arg);
ZX_CHECKED zx_status zx_stream_call(zx_stream *stream, const char *name, zx_host_fn fn, void *arg);
/* Launch an operation of the table. Prefer the typed macro. */
ZX_CHECKED zx_status zx_device_launch(zx_stream *stream, zx_op_id op, const void *args, size_t args_bytes);
#define ZX_LAUNCH(stream, op, args_ptr)                                                                                \
    zx_device_launch((stream), ZX_OP_##op, 1 ? (args_ptr) : (const zx_##op##_args *)0, sizeof(zx_##op##_args))
/* Bytes of scratch that this launch needs; the planner takes the maximum over a step. */
size_t zx_device_scratch_bytes(const zx_device *dev, zx_op_id op, const void *args);
/* Make room for scratch on every stream; called after planning, not in a step. A launch that needs more than
 * there is fails with ZX_ERR_STATE. Before the first call, and with bytes of SIZE_MAX, scratch grows on
 * demand. */
ZX_CHECKED zx_status zx_device_set_scratch(zx_device *dev, size_t bytes);
/* The same for one stream, whatever the device's bound: what an engine plans for the stream that it computes on. */
ZX_CHECKED zx_status zx_stream_set_scratch(zx_stream *stream, size_t bytes);

/* ---- the null device's record ---- */
/* bytes: of a copy or fill; of the views that a launch names (0 for adamw and sgd, whose sizes lie in device
 * memory). The names of streams stay valid after the streams are closed. */
typedef struct zx_record {
    const char *what; /* name of the operation, or "copy", "fill", "signal", "wait", "event", "wait_event", "call" */
    const char *stream; /* name */
    int64_t bytes;
} zx_record;
int64_t zx_null_n_records(const zx_device *dev);
const zx_record *zx_null_records(const zx_device *dev);
void zx_null_clear(zx_device *dev);

/* ---- BLAS (device/gemm.c) ---- */
/* Opens the library once per process (it stays open), sets it to one thread; "" = NULL gemm, no error. */
ZX_CHECKED zx_status zx_gemm_open(const char *path, const zx_gemm **out);

#endif
