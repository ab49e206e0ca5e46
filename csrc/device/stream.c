/* stream.c - streams, events, work and scratch of every device: checks, then the vtable's `submit`. */
#include "device/internal.h"

#include <stdio.h>
#include <string.h>

/* ---- scratch ---------------------------------------------------------------------------------------- */

/* Scratch holds nothing between two launches, so growing it copies nothing. */
static zx_status resize_scratch(zx_stream *stream, size_t bytes)
{
    if (bytes == stream->scratch_bytes) return ZX_OK;
    zx_device *dev = stream->dev;
    void *scratch = NULL;
    if (bytes > 0) ZX_TRY(dev->ops->alloc(dev, bytes, &scratch));
    if (stream->scratch != NULL) dev->ops->free(dev, stream->scratch);
    stream->scratch = scratch;
    stream->scratch_bytes = bytes;
    return ZX_OK;
}

zx_status zx_stream_grow_scratch(zx_stream *stream, size_t bytes)
{
    if (bytes > stream->scratch_bytes) ZX_TRY(resize_scratch(stream, bytes));
    return ZX_OK;
}

zx_status zx_device_set_scratch(zx_device *dev, size_t bytes)
{
    if (bytes != SIZE_MAX)
        for (zx_stream *s = dev->streams; s != NULL; s = s->next)
            ZX_TRY(resize_scratch(s, bytes));
    dev->scratch_bytes = bytes;
    return ZX_OK;
}

zx_status zx_stream_set_scratch(zx_stream *stream, size_t bytes)
{
    ZX_TRY(resize_scratch(stream, bytes));
    stream->scratch_limit = bytes;
    return ZX_OK;
}

size_t zx_device_scratch_bytes(const zx_device *dev, zx_op_id op, const void *args)
{
    if ((unsigned)op >= ZX_N_OPS || args == NULL || dev->kernels->op[op].scratch == NULL) return 0;
    return dev->kernels->op[op].scratch(args, dev->caps.n_threads);
}

/* ---- streams and events ----------------------------------------------------------------------------- */

static int lane_of(const char *name)
{
    static const char *const lanes[] = {"compute", "comm", "mem", "file"};
    for (int i = 0; i < 4; i++)
        if (strncmp(name, lanes[i], strlen(lanes[i])) == 0) return i;
    return 0;
}

zx_status zx_stream_open(zx_device *dev, const char *name, zx_stream **out)
{
    *out = NULL;
    zx_status zx_rc_ = ZX_OK;
    zx_stream *stream = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, stream));
    stream->dev = dev;
    stream->scratch_limit = SIZE_MAX;
    stream->id = ++dev->n_streams_ever;
    snprintf(stream->name, sizeof stream->name, "%s", name == NULL ? "" : name);
    stream->lane = lane_of(stream->name);
    ZX_TRY_GOTO(dev->ops->stream_open(stream), fail);
    if (dev->scratch_bytes != SIZE_MAX) ZX_TRY_GOTO(resize_scratch(stream, dev->scratch_bytes), fail);
    stream->next = dev->streams;
    dev->streams = stream;
    *out = stream;
    return ZX_OK;
fail:
    zx_stream_close(stream);
    return zx_rc_;
}

void zx_stream_close(zx_stream *stream)
{
    if (stream == NULL) return;
    zx_device *dev = stream->dev;
    dev->ops->stream_close(stream);
    for (zx_stream **at = &dev->streams; *at != NULL; at = &(*at)->next) {
        if (*at != stream) continue;
        *at = stream->next;
        break;
    }
    if (stream->scratch != NULL) dev->ops->free(dev, stream->scratch);
    zx_free(stream);
}

zx_status zx_stream_sync(zx_stream *stream)
{
    ZX_TRY(stream->dev->ops->stream_sync(stream));
    return ZX_OK;
}

zx_device *zx_stream_device(const zx_stream *stream)
{
    return stream->dev;
}

const char *zx_stream_name(const zx_stream *stream)
{
    return stream->name;
}

zx_status zx_event_open(zx_device *dev, zx_event **out)
{
    *out = NULL;
    zx_event *event = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, event));
    event->dev = dev;
    dev->n_events++;
    *out = event;
    return ZX_OK;
}

void zx_event_close(zx_event *event)
{
    if (event == NULL) return;
    event->dev->n_events--;
    zx_free(event);
}

static zx_status check_event(const zx_event *event, const zx_stream *stream)
{
    if (event == NULL) ZX_FAIL(ZX_ERR_ARG, "the event on stream '%s' is NULL", stream->name);
    if (event->dev != stream->dev)
        ZX_FAIL(ZX_ERR_ARG, "stream '%s' and the event belong to different devices", stream->name);
    return ZX_OK;
}

zx_status zx_event_record(zx_event *event, zx_stream *stream)
{
    ZX_TRY(check_event(event, stream));
    zx_work work = {.kind = ZX_WORK_RECORD, .name = "event", .event = event};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

zx_status zx_stream_wait_event(zx_stream *stream, zx_event *event)
{
    ZX_TRY(check_event(event, stream));
    zx_work work = {.kind = ZX_WORK_WAIT_EVENT, .name = "wait_event", .event = event};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

/* Copies, signals and waits are as short as a hundred nanoseconds; then the way through `submit` shows. */
static bool at_once(const zx_stream *stream)
{
    return stream->dev->at_once && !zx_timeline_on();
}

/* ---- work ------------------------------------------------------------------------------------------- */

static zx_status check_place(const zx_stream *stream, const char *what, const void *ptr, size_t bytes)
{
    if (ptr == NULL && bytes > 0)
        ZX_FAIL(ZX_ERR_ARG, "%s of %zu bytes on stream '%s': the address is NULL", what, bytes, stream->name);
    return ZX_OK;
}

zx_status zx_stream_copy(zx_stream *stream, void *dst, const void *src, size_t bytes)
{
    ZX_TRY(check_place(stream, "a copy", dst, bytes));
    ZX_TRY(check_place(stream, "a copy", src, bytes));
    uintptr_t d = (uintptr_t)dst, s = (uintptr_t)src;
    if (d != s && bytes > (d > s ? d - s : s - d))
        ZX_FAIL(ZX_ERR_ARG, "a copy of %zu bytes on stream '%s' from %p to %p: the places overlap", bytes, stream->name,
                src, dst);
    if (at_once(stream)) {
        zx_cpu_copy(stream->dev, dst, src, bytes);
        return ZX_OK;
    }
    zx_work work = {.kind = ZX_WORK_COPY, .name = "copy", .dst = dst, .src = src, .bytes = bytes};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

zx_status zx_stream_fill(zx_stream *stream, void *dst, int byte, size_t bytes)
{
    ZX_TRY(check_place(stream, "a fill", dst, bytes));
    zx_work work = {.kind = ZX_WORK_FILL, .name = "fill", .dst = dst, .byte = byte, .bytes = bytes};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

static zx_status check_flag(const zx_stream *stream, const uint64_t *flag)
{
    if (flag == NULL || (uintptr_t)flag % ZX_FLAG_BYTES != 0)
        ZX_FAIL(ZX_ERR_ARG, "the flag at %p on stream '%s' must be the start of a slot of %d bytes aligned to them",
                (const void *)flag, stream->name, ZX_FLAG_BYTES);
    return ZX_OK;
}

zx_status zx_stream_signal(zx_stream *stream, uint64_t *flag, uint64_t value)
{
    ZX_TRY(check_flag(stream, flag));
    if (at_once(stream)) {
        zx_flag_store(flag, value);
        return ZX_OK;
    }
    zx_work work = {.kind = ZX_WORK_SIGNAL, .name = "signal", .flag = flag, .value = value};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

zx_status zx_stream_wait(zx_stream *stream, const uint64_t *flag, uint64_t value)
{
    ZX_TRY(check_flag(stream, flag));
    if (at_once(stream)) {
        ZX_TRY(zx_flag_wait(stream->dev, stream->name, flag, value));
        return ZX_OK;
    }
    zx_work work = {.kind = ZX_WORK_WAIT, .name = "wait", .flag = (uint64_t *)(uintptr_t)flag, .value = value};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

void zx_device_flag_store(zx_device *dev, uint64_t *flag, uint64_t value)
{
    dev->ops->flag_store(flag, value);
}

zx_status zx_stream_call(zx_stream *stream, const char *name, zx_host_fn fn, void *arg)
{
    if (fn == NULL) ZX_FAIL(ZX_ERR_ARG, "a call on stream '%s': the function is NULL", stream->name);
    zx_work work = {.kind = ZX_WORK_CALL, .name = name == NULL ? "call" : name, .fn = fn, .arg = arg};
    ZX_TRY(stream->dev->ops->submit(stream, &work));
    return ZX_OK;
}

zx_status zx_device_launch(zx_stream *stream, zx_op_id op, const void *args, size_t args_bytes)
{
    const zx_device *dev = stream->dev;
    if ((unsigned)op >= ZX_N_OPS) ZX_FAIL(ZX_ERR_BUG, "there is no operation %d", (int)op);
    const zx_kernel *kernel = &dev->kernels->op[op];
    if (args == NULL || args_bytes != kernel->args_bytes)
        ZX_FAIL(ZX_ERR_BUG, "operation '%s' takes an argument struct of %zu bytes, got %zu bytes at %p", kernel->name,
                kernel->args_bytes, args_bytes, args);
    if (dev->caps.computes && kernel->launch == NULL)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "device '%s' lacks the operation '%s'", dev->caps.name, kernel->name);
    size_t scratch_bytes = zx_device_scratch_bytes(dev, op, args);
    size_t limit = stream->scratch_limit != SIZE_MAX ? stream->scratch_limit : dev->scratch_bytes;
    if (scratch_bytes > limit)
        ZX_FAIL(ZX_ERR_STATE, "operation '%s' needs %zu bytes of scratch, %zu were planned: plan for this shape too",
                kernel->name, scratch_bytes, limit);
    bool shown = !dev->caps.computes || zx_timeline_on();
    zx_work work = {.kind = ZX_WORK_LAUNCH,
                    .name = kernel->name,
                    .bytes = shown ? (size_t)zx_args_bytes(op, args) : 0,
                    .op = op,
                    .args = args,
                    .args_bytes = args_bytes,
                    .scratch_bytes = scratch_bytes};
    ZX_TRY(dev->ops->submit(stream, &work));
    return ZX_OK;
}
