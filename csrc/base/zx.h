/* zx.h - the ground that every layer stands on: status and error record, counted memory, fault points,
 * thread pool, log, environment, clock, timeline.
 *
 * Rules that hold in the whole core:
 *  - a function that can fail returns zx_status; its outputs come last and are set to zero / NULL first;
 *  - the place where something goes wrong fills the thread-local error record (ZX_FAIL) with one sentence
 *    that holds the values and what to do; each caller on the way up adds a frame (ZX_TRY);
 *  - `_open` creates, `_close` ends; `_close` accepts NULL and a half-built object, and cannot fail.
 */
#ifndef ZX_BASE_ZX_H
#define ZX_BASE_ZX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- status and error record ------------------------------------------------------------------------ */

typedef enum zx_status {
    ZX_OK = 0,
    ZX_ERR_ARG,         /* the caller passed something impossible            -> ValueError          */
    ZX_ERR_STATE,       /* right call, wrong moment, or the object is closed -> StateError          */
    ZX_ERR_NOMEM,       /* memory (host or device) is exhausted              -> MemoryError         */
    ZX_ERR_SYSTEM,      /* a system call failed; native = errno              -> OSError             */
    ZX_ERR_CUDA,        /* native = the driver's or runtime's code                                  */
    ZX_ERR_NCCL,        /* native = NCCL's code                                                     */
    ZX_ERR_TIMEOUT,     /* a deadline passed                                 -> TimeoutError        */
    ZX_ERR_PEER,        /* another rank died, aborted or called something else                      */
    ZX_ERR_UNSUPPORTED, /* this device, dtype or build lacks it                                     */
    ZX_ERR_INTERRUPTED, /* the caller's interrupt hook asked to stop (Ctrl-C)                       */
    ZX_ERR_BUG,         /* an invariant of zerox itself is broken                                   */
    ZX_N_STATUS
} zx_status;

#define ZX_CHECKED __attribute__((warn_unused_result))
#define ZX_PRINTF(fmt_index, first) __attribute__((format(printf, fmt_index, first)))

enum { ZX_ERROR_TEXT = 768, ZX_ERROR_FRAMES = 12 };

typedef struct zx_frame {
    const char *expr; /* string literals: they live as long as the library */
    const char *func;
    const char *file;
    int line;
} zx_frame;

typedef struct zx_error {
    zx_status status;
    int native;                    /* errno, CUDA or NCCL code; 0 if none */
    char text[ZX_ERROR_TEXT];      /* one sentence: what, with the values, then what to do */
    int n_frames;                  /* frames[0] is the origin */
    zx_frame frames[ZX_ERROR_FRAMES];
} zx_error;

/* The record of the calling thread; never NULL; status is ZX_OK when nothing was recorded. */
const zx_error *zx_error_last(void);
void zx_error_clear(void);
/* Put a record that another thread made (a worker, a watchdog) into this thread's; returns its status. */
zx_status zx_error_raise(const zx_error *saved);
zx_status zx_error_set(zx_status status, int native, const char *expr, const char *func, const char *file, int line,
                       const char *fmt, ...) ZX_PRINTF(7, 8);
void zx_error_frame(const char *expr, const char *func, const char *file, int line);
const char *zx_status_name(zx_status status); /* "ARG", "STATE", ... */

#define ZX_FAIL(status, ...) return zx_error_set((status), 0, NULL, __func__, __FILE__, __LINE__, __VA_ARGS__)
#define ZX_FAIL_GOTO(status, label, ...)                                                                               \
    do {                                                                                                               \
        zx_rc_ = zx_error_set((status), 0, NULL, __func__, __FILE__, __LINE__, __VA_ARGS__);                           \
        goto label;                                                                                                    \
    } while (0)
/* A system call or library call failed: the text is completed with strerror(err). */
#define ZX_FAIL_SYS(err, expr, ...)                                                                                    \
    return zx_error_set(ZX_ERR_SYSTEM, (err), (expr), __func__, __FILE__, __LINE__, __VA_ARGS__)

#define ZX_TRY(call)                                                                                                   \
    do {                                                                                                               \
        zx_status zx_try_ = (call);                                                                                    \
        if (__builtin_expect(zx_try_ != ZX_OK, 0)) {                                                                   \
            zx_error_frame(#call, __func__, __FILE__, __LINE__);                                                       \
            return zx_try_;                                                                                            \
        }                                                                                                              \
    } while (0)
/* For functions with a clean-up label: declare `zx_status zx_rc_ = ZX_OK;` at the top, return it at the end. */
#define ZX_TRY_GOTO(call, label)                                                                                       \
    do {                                                                                                               \
        zx_rc_ = (call);                                                                                               \
        if (__builtin_expect(zx_rc_ != ZX_OK, 0)) {                                                                    \
            zx_error_frame(#call, __func__, __FILE__, __LINE__);                                                       \
            goto label;                                                                                                \
        }                                                                                                              \
    } while (0)

/* ---- counted host memory ---------------------------------------------------------------------------- */

typedef enum zx_mem_class {
    ZX_MEM_MISC = 0, /* small control structures */
    ZX_MEM_COMM,     /* rings, flags, staging */
    ZX_MEM_STORE,    /* tables of the store */
    ZX_MEM_MODEL,    /* tape nodes, tensors */
    ZX_MEM_DEVICE,   /* device memory that the cpu device holds */
    ZX_N_MEM_CLASS
} zx_mem_class;

typedef struct zx_mem_stats {
    int64_t n_allocs;   /* calls since the process started */
    int64_t n_live;     /* blocks not yet freed */
    int64_t live_bytes;
    int64_t peak_bytes;
} zx_mem_stats;

/* Zeroed memory, aligned to 64 bytes; *out is NULL on failure; bytes = 0 gives a valid block. Passes a fault point. */
ZX_CHECKED zx_status zx_alloc(zx_mem_class cls, size_t bytes, void **out);
/* n * size with overflow check, through zx_alloc. */
ZX_CHECKED zx_status zx_alloc_array(zx_mem_class cls, int64_t n, size_t size, void **out);
/* Doubles an array (16 elements at first) whose first n_used elements stay; unchanged on failure. */
ZX_CHECKED zx_status zx_grow_array(zx_mem_class cls, void **array, int64_t n_used, int64_t *capacity, size_t size);
void zx_free(void *block); /* NULL is fine */
/* For memory that zx_alloc did not make (mmap): keep the books right. bytes may be negative. */
void zx_mem_account(zx_mem_class cls, int64_t n_blocks, int64_t bytes);
zx_mem_stats zx_mem_get(zx_mem_class cls);
const char *zx_mem_class_name(zx_mem_class cls);

#define ZX_NEW(cls, ptr) zx_alloc((cls), sizeof *(ptr), (void **)&(ptr))
#define ZX_NEW_ARRAY(cls, n, ptr) zx_alloc_array((cls), (n), sizeof *(ptr), (void **)&(ptr))

/* ---- fault points ----------------------------------------------------------------------------------- */

/* Every fallible primitive (allocation, mmap, socket, file, thread) passes one. Tests arm the n-th from now
 * (1 = the next) in this process; it then fails once with ZX_ERR_SYSTEM / EIO and a text that says "injected".
 * Disarmed cost: one relaxed load. */
ZX_CHECKED zx_status zx_fault_point(const char *name);
void zx_fault_arm(int64_t n);     /* 0 disarms */
int64_t zx_fault_passed(void);    /* points passed since zx_fault_arm was called last */

/* ---- clock, log, environment ------------------------------------------------------------------------ */

int64_t zx_now_ns(void); /* monotonic */

typedef enum zx_log_level { ZX_LOG_ERROR = 0, ZX_LOG_WARN, ZX_LOG_INFO, ZX_LOG_DEBUG } zx_log_level;
/* One line to stderr, "zerox[rank]: text". Default level WARN; ZEROX_LOG=error|warn|info|debug. */
void zx_log(zx_log_level level, const char *fmt, ...) ZX_PRINTF(2, 3);
void zx_log_set_rank(int rank); /* this thread's rank, for the prefix; -1 = none */

/* Every environment variable that zerox reads stands in this table (documented in docs, listed by `doctor`). */
#define ZX_ENV_LIST(X)                                                                                                 \
    X(LOG, "ZEROX_LOG", "warn", "log level: error, warn, info or debug")                                               \
    X(THREADS, "ZEROX_THREADS", "0", "threads a rank computes with; 0 = cores / local ranks")                          \
    X(BLAS, "ZEROX_BLAS", "", "path of a BLAS library to use instead of scipy-openblas32")                             \
    X(ISA, "ZEROX_ISA", "auto", "instruction set of the CPU kernels: auto, plain, avx2, avx512")                       \
    X(TIMEOUT, "ZEROX_TIMEOUT", "300", "seconds until a wait on another rank is an error")                             \
    X(TOKEN, "ZEROX_TOKEN", "", "secret of the job; the launcher sets it")                                             \
    X(JOB, "ZEROX_JOB", "", "name of the job; the launcher sets it")                                                   \
    X(DEBUG, "ZEROX_DEBUG", "0", "1: poison released memory, check every state twice")                                 \
    X(DELAY, "ZEROX_DELAY", "0", "seed of the delayed streams of the cpu device (tests); 0 = streams run inline")

typedef enum zx_env {
#define X(id, name, def, help) ZX_ENV_##id,
    ZX_ENV_LIST(X)
#undef X
        ZX_N_ENV
} zx_env;

const char *zx_env_text(zx_env var); /* the value, or the default; never NULL */
/* A whole number within [lo, hi], else ZX_ERR_ARG that names the variable and its value. */
ZX_CHECKED zx_status zx_env_int(zx_env var, int64_t lo, int64_t hi, int64_t *out);
const char *zx_env_name(zx_env var);
const char *zx_env_default(zx_env var);
const char *zx_env_help(zx_env var);

/* ---- thread pool ------------------------------------------------------------------------------------ */

/* n_threads workers including the caller. One run at a time per pool. What a task computes must not depend on
 * which worker runs it or how many there are. Workers spin for some microseconds, then sleep. */
typedef struct zx_pool zx_pool;
typedef void (*zx_task)(void *arg, int64_t index, int worker); /* index in [0, n_tasks), worker in [0, n_threads) */

ZX_CHECKED zx_status zx_pool_open(int n_threads, zx_pool **out);
void zx_pool_close(zx_pool *pool);
int zx_pool_n_threads(const zx_pool *pool); /* NULL -> 1 */
/* Runs task(arg, i, worker) for each i; returns when all are done. A NULL pool, one thread or one task runs inline. */
void zx_pool_run(zx_pool *pool, zx_task task, void *arg, int64_t n_tasks);

/* ---- timeline --------------------------------------------------------------------------------------- */

/* A ring of the last events of a thread of work ("lane": 0 compute, 1 communication, 2 memory, 3 file). Names are
 * string literals. Off until zx_timeline_enable; then each event costs two clock reads. */
typedef struct zx_event_rec {
    const char *name;
    int lane;
    int rank;
    int64_t begin_ns, end_ns;
    int64_t bytes;
} zx_event_rec;

ZX_CHECKED zx_status zx_timeline_enable(int64_t n_events); /* 0 turns it off and frees the ring */
bool zx_timeline_on(void);
void zx_timeline_add(const char *name, int lane, int64_t begin_ns, int64_t end_ns, int64_t bytes);
int64_t zx_timeline_read(zx_event_rec *out, int64_t n_max); /* oldest first; returns how many */

/* ---- small arithmetic ------------------------------------------------------------------------------- */

static inline int64_t zx_min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}
static inline int64_t zx_max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}
static inline int64_t zx_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}
static inline int64_t zx_round_up(int64_t a, int64_t b)
{
    return zx_ceil_div(a, b) * b;
}

#endif
