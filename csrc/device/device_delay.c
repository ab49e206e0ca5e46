/* device_delay.c - delayed streams: the same work in another order, to find orders that nobody promised.
 *
 * DESIGN. A stream is a queue of copies of the work. Work runs on the calling thread, one piece at a time,
 * and only when something asks for progress: a sync, a full queue, zx_device_interrupted, or chance. The next
 * stream is drawn by a seeded generator among those whose first piece is ready: its flag is reached, its
 * event has passed. An event is (stream, position): it has passed when that stream has finished its piece of
 * that position, or is gone, since a stream is emptied before it goes. So a run may differ from an inline run
 * only where no event or flag orders it, and where the result then differs, one is missing.
 *
 * Some draws prefer one stream for a while, since a lone straggler finds other mistakes than a fair shuffle
 * does.
 *
 * An error of queued work stays with its stream until a sync of it reports it; what is queued behind still
 * runs, so that peers get their signals. */
#define _GNU_SOURCE 1
#include "device/internal.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <time.h>

enum { QUEUE_CAPACITY = 128, BURST_MAX = 8, CHANCE_AT_SUBMIT = 8, FAVOUR_MAX = 32 };
#define YIELD_NS 100000
#define NAP_NS 100000
#define CLOSE_NS 5000000000 /* a queue that is stuck when its stream is closed is dropped after this */

typedef union any_args {
#define X(op) zx_##op##_args op;
#include "kernels/kernels.def"
#undef X
} any_args;

typedef struct item {
    zx_work work;
    uint64_t after_stream, after_position; /* wait_event: what must have passed; stream 0 = nothing */
    any_args args;
} item;

typedef struct zx_queue {
    item *items; /* a ring of QUEUE_CAPACITY */
    int64_t first, n;
    uint64_t n_submitted, n_done;
    zx_error *error; /* the first that a sync has not reported; status ZX_OK = none */
} zx_queue;

struct zx_delay {
    uint64_t random;
    uint64_t favourite; /* stream id */
    int64_t favour_left;
    bool running;            /* inside a piece of work */
    _Atomic uint64_t thread; /* that used the device last: only it may make progress */
};

/* ---- chance ----------------------------------------------------------------------------------------- */

/* splitmix64 */
static uint64_t draw(struct zx_delay *d)
{
    uint64_t z = (d->random += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static int64_t draw_below(struct zx_delay *d, int64_t n)
{
    return (int64_t)(draw(d) % (uint64_t)n);
}

/* ---- what is ready ---------------------------------------------------------------------------------- */

static item *head_of(const zx_stream *s)
{
    return &s->queue->items[s->queue->first];
}

static bool event_passed(const zx_device *dev, const item *it)
{
    if (it->after_stream == 0) return true;
    for (const zx_stream *s = dev->streams; s != NULL; s = s->next)
        if (s->id == it->after_stream) return s->queue->n_done >= it->after_position;
    return true;
}

static bool head_ready(const zx_stream *s)
{
    if (s->queue->n == 0) return false;
    const item *it = head_of(s);
    if (it->work.kind == ZX_WORK_WAIT) return zx_flag_reached(it->work.flag, it->work.value);
    if (it->work.kind == ZX_WORK_WAIT_EVENT) return event_passed(s->dev, it);
    return true;
}

static zx_stream *pick(zx_device *dev)
{
    struct zx_delay *d = dev->delay;
    zx_stream *chosen = NULL, *favourite = NULL;
    int64_t n_ready = 0;
    for (zx_stream *s = dev->streams; s != NULL; s = s->next) {
        if (!head_ready(s)) continue;
        n_ready++;
        if (draw_below(d, n_ready) == 0) chosen = s; /* each of the ready ones with the same chance */
        if (s->id == d->favourite) favourite = s;
    }
    if (chosen == NULL) return NULL;
    if (d->favour_left > 0) {
        d->favour_left--;
        return favourite != NULL ? favourite : chosen;
    }
    d->favourite = chosen->id;
    d->favour_left = draw_below(d, 4) == 0 ? draw_below(d, FAVOUR_MAX) : 0;
    return chosen;
}

/* ---- progress --------------------------------------------------------------------------------------- */

/* The error of a piece goes to its stream; the thread's own record stays as it was. */
static void run_head(zx_stream *s)
{
    zx_queue *q = s->queue;
    struct zx_delay *d = s->dev->delay;
    const item *it = head_of(s); /* stays where it is while it runs: only then is its place given up */
    zx_error before = *zx_error_last();
    d->running = true;
    zx_status status = zx_cpu_execute(s, &it->work);
    d->running = false;
    q->first = (q->first + 1) % QUEUE_CAPACITY;
    q->n--;
    q->n_done++;
    if (status == ZX_OK) return;
    if (q->error->status == ZX_OK) *q->error = *zx_error_last();
    zx_error_raise(&before);
}

/* Runs at most n_most pieces; returns whether any ran. */
static bool run_ready(zx_device *dev, int64_t n_most)
{
    bool any = false;
    for (int64_t i = 0; i < n_most; i++) {
        zx_stream *s = pick(dev);
        if (s == NULL) break;
        run_head(s);
        any = true;
    }
    return any;
}

/* Nothing is ready: every head waits for a flag that another rank stores. */
static void nap(int64_t idle_since_ns)
{
    struct timespec t = {.tv_nsec = NAP_NS};
    if (zx_now_ns() - idle_since_ns < YIELD_NS)
        sched_yield();
    else
        nanosleep(&t, NULL);
}

/* Runs work of any stream until this one's queue holds at most n_left pieces. deadline_ns < 0: none. */
static zx_status run_until(zx_stream *s, int64_t n_left, int64_t deadline_ns)
{
    zx_device *dev = s->dev;
    int64_t idle_since = 0, next_hook = zx_now_ns() + ZX_HOOK_NS;
    while (s->queue->n > n_left) {
        bool any = run_ready(dev, 1);
        int64_t now = zx_now_ns();
        if (any)
            idle_since = 0;
        else if (idle_since == 0)
            idle_since = now;
        if (now >= next_hook) {
            if (zx_device_hook(dev))
                ZX_FAIL(ZX_ERR_INTERRUPTED,
                        "stopped by the interrupt hook while stream '%s' had %lld pieces of work left", s->name,
                        (long long)s->queue->n);
            next_hook = now + ZX_HOOK_NS;
        }
        if (deadline_ns >= 0 && now >= deadline_ns)
            ZX_FAIL(ZX_ERR_TIMEOUT, "stream '%s' still waits, with %lld pieces of work behind", s->name,
                    (long long)s->queue->n);
        if (!any) nap(idle_since);
    }
    return ZX_OK;
}

static void delay_progress(zx_device *dev)
{
    struct zx_delay *d = dev->delay;
    /* Another thread may ask too (a watchdog); it must not even look at what the owner's thread changes. */
    if (atomic_load(&d->thread) != (uint64_t)pthread_self() || d->running) return;
    (void)run_ready(dev, QUEUE_CAPACITY);
}

/* ---- the vtable ------------------------------------------------------------------------------------- */

static zx_status delay_stream_open(zx_stream *stream)
{
    zx_queue *q = NULL;
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, q));
    stream->queue = q;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_MISC, QUEUE_CAPACITY, q->items));
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, q->error));
    return ZX_OK;
}

/* For closing, which cannot fail and leaves the thread's error record alone. */
static void drain(zx_stream *stream)
{
    zx_queue *q = stream->queue;
    zx_error before = *zx_error_last();
    if (run_until(stream, 0, zx_now_ns() + CLOSE_NS) != ZX_OK)
        zx_log(ZX_LOG_WARN, "closing drops work: %s", zx_error_last()->text);
    if (q->error->status != ZX_OK)
        zx_log(ZX_LOG_WARN, "stream '%s' is closed with an error that no sync reported: %s", stream->name,
               q->error->text);
    zx_error_raise(&before);
}

static void delay_stream_close(zx_stream *stream)
{
    zx_queue *q = stream->queue;
    if (q == NULL) return;
    if (q->error != NULL) drain(stream);
    zx_free(q->error);
    zx_free(q->items);
    zx_free(q);
    stream->queue = NULL;
}

static zx_status delay_stream_sync(zx_stream *stream)
{
    zx_queue *q = stream->queue;
    if (stream->dev->delay->running)
        ZX_FAIL(ZX_ERR_STATE, "stream '%s' cannot be synchronised by work that runs on a stream", stream->name);
    atomic_store(&stream->dev->delay->thread, (uint64_t)pthread_self());
    ZX_TRY(run_until(stream, 0, -1));
    if (q->error->status == ZX_OK) return ZX_OK;
    zx_status status = zx_error_raise(q->error);
    *q->error = (zx_error){0};
    zx_error_frame("queued work", __func__, __FILE__, __LINE__);
    return status;
}

static void enqueue(zx_stream *stream, const zx_work *work)
{
    zx_queue *q = stream->queue;
    item *it = &q->items[(q->first + q->n) % QUEUE_CAPACITY];
    it->work = *work;
    it->after_stream = 0;
    q->n++;
    q->n_submitted++;
    switch (work->kind) {
    case ZX_WORK_LAUNCH:
        memcpy(&it->args, work->args, work->args_bytes);
        it->work.args = &it->args;
        break;
    case ZX_WORK_RECORD:
        work->event->stream_id = stream->id;
        work->event->position = q->n_submitted;
        break;
    case ZX_WORK_WAIT_EVENT:
        it->after_stream = work->event->stream_id;
        it->after_position = work->event->position;
        break;
    default:
        break;
    }
}

static zx_status delay_submit(zx_stream *stream, const zx_work *work)
{
    struct zx_delay *d = stream->dev->delay;
    if (work->kind == ZX_WORK_LAUNCH && work->args_bytes > sizeof(any_args))
        ZX_FAIL(ZX_ERR_BUG, "the arguments of '%s' have %zu bytes, more than any operation's", work->name,
                work->args_bytes);
    if (d->running && stream->queue->n >= QUEUE_CAPACITY)
        ZX_FAIL(ZX_ERR_STATE, "the queue of stream '%s' is full, and work that runs on a stream cannot wait for it",
                stream->name);
    if (!d->running) {
        atomic_store(&d->thread, (uint64_t)pthread_self());
        ZX_TRY(run_until(stream, QUEUE_CAPACITY - 1, -1));
    }
    enqueue(stream, work);
    if (!d->running && draw_below(d, CHANCE_AT_SUBMIT) == 0) (void)run_ready(stream->dev, 1 + draw_below(d, BURST_MAX));
    return ZX_OK;
}

static void delay_close(zx_device *dev)
{
    for (zx_stream *s = dev->streams; s != NULL; s = s->next)
        drain(s);
    zx_free(dev->delay);
    dev->delay = NULL;
    zx_cpu_close(dev);
}

static const zx_device_ops g_delay_ops = {
    .close = delay_close,
    .reserve = zx_cpu_reserve,
    .unreserve = zx_cpu_unreserve,
    .mem_open = zx_cpu_mem_open,
    .mem_import = zx_cpu_mem_import,
    .mem_export = zx_cpu_mem_export,
    .mem_close = zx_cpu_mem_close,
    .mem_release = zx_cpu_mem_release,
    .map = zx_cpu_map,
    .unmap = zx_cpu_unmap,
    .alloc = zx_cpu_alloc,
    .free = zx_cpu_free,
    .stream_open = delay_stream_open,
    .stream_close = delay_stream_close,
    .stream_sync = delay_stream_sync,
    .submit = delay_submit,
    .progress = delay_progress,
    .flag_store = zx_flag_store,
};

zx_status zx_delay_init(zx_device *dev, uint64_t seed)
{
    ZX_TRY(ZX_NEW(ZX_MEM_MISC, dev->delay));
    dev->delay->random = seed;
    dev->ops = &g_delay_ops;
    return ZX_OK;
}
