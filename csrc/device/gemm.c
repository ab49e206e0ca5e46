/* gemm.c - opens a BLAS by path and gives its products a plain face.
 *
 * DESIGN. The library is not linked: its path is known at run time only (a wheel, or ZEROX_BLAS). One is
 * opened per process and stays open, because the wrappers below have no context to tell two apart. Wheels
 * rename the symbols (scipy_cblas_sgemm), so a few names are tried. The library must take 32-bit integers:
 * the names of 64-bit builds end differently and are not tried. Threads are ours: the library is set to one,
 * since its own would change the bits.
 *
 * Sizes of 0 are settled here: libraries differ on whether k = 0 scales c, and complain about strides of
 * matrices that have no second row. */
#define _GNU_SOURCE 1
#include "device/internal.h"

#include <dlfcn.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

typedef void (*cblas_sgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a,
                               int lda, const float *b, int ldb, float beta, float *c, int ldc);
typedef void (*cblas_dgemm_fn)(int order, int trans_a, int trans_b, int m, int n, int k, double alpha, const double *a,
                               int lda, const double *b, int ldb, double beta, double *c, int ldc);
typedef void (*set_threads_fn)(int n);

static struct {
    pthread_mutex_t lock;
    bool open;
    char path[4096];
    cblas_sgemm_fn sgemm;
    cblas_dgemm_fn dgemm;
    zx_gemm face;
} g_blas = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* A matrix of one row is read with no stride at all, yet libraries check the stride. */
static int64_t stride_for(int64_t n_rows, int64_t n_cols, int64_t stride)
{
    int64_t least = zx_max64(n_cols, 1);
    return n_rows <= 1 && stride < least ? least : stride;
}

static bool fits(int64_t a, int64_t b, int64_t c)
{
    return a <= INT_MAX && b <= INT_MAX && c <= INT_MAX;
}

/* One wrapper for each type: settles empty products, passes what fits 32-bit integers to the library (k is
 * never cut), and walks over rows and columns itself where sizes or strides do not fit. */
#define DEFINE_GEMM(fn, real, library)                                                                                 \
    static void fn##_scale(int64_t m, int64_t n, real beta, real *c, int64_t ldc)                                      \
    {                                                                                                                  \
        for (int64_t i = 0; i < m; i++)                                                                                \
            for (int64_t j = 0; j < n; j++)                                                                            \
                c[i * ldc + j] = beta == 0 ? 0 : beta * c[i * ldc + j];                                                \
    }                                                                                                                  \
    static void fn##_plain(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, real alpha, const real *a,     \
                           int64_t lda, const real *b, int64_t ldb, real beta, real *c, int64_t ldc)                   \
    {                                                                                                                  \
        for (int64_t i = 0; i < m; i++)                                                                                \
            for (int64_t j = 0; j < n; j++) {                                                                          \
                real sum = 0;                                                                                          \
                for (int64_t p = 0; p < k; p++)                                                                        \
                    sum += (trans_a ? a[p * lda + i] : a[i * lda + p]) * (trans_b ? b[j * ldb + p] : b[p * ldb + j]);  \
                c[i * ldc + j] = alpha * sum + (beta == 0 ? 0 : beta * c[i * ldc + j]);                                \
            }                                                                                                          \
    }                                                                                                                  \
    static void fn(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, real alpha, const real *a,             \
                   int64_t lda, const real *b, int64_t ldb, real beta, real *c, int64_t ldc)                           \
    {                                                                                                                  \
        if (m <= 0 || n <= 0) return;                                                                                  \
        if (k <= 0) {                                                                                                  \
            fn##_scale(m, n, beta, c, ldc);                                                                            \
            return;                                                                                                    \
        }                                                                                                              \
        lda = trans_a ? stride_for(k, m, lda) : stride_for(m, k, lda);                                                 \
        ldb = trans_b ? stride_for(n, k, ldb) : stride_for(k, n, ldb);                                                 \
        ldc = stride_for(m, n, ldc);                                                                                   \
        if (!fits(m, n, k) || !fits(lda, ldb, ldc)) {                                                                  \
            fn##_plain(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);                                \
            return;                                                                                                    \
        }                                                                                                              \
        library(ROW_MAJOR, trans_a ? TRANS : NO_TRANS, trans_b ? TRANS : NO_TRANS, (int)m, (int)n, (int)k, alpha, a,   \
                (int)lda, b, (int)ldb, beta, c, (int)ldc);                                                             \
    }

DEFINE_GEMM(call_sgemm, float, g_blas.sgemm)
DEFINE_GEMM(call_dgemm, double, g_blas.dgemm)

/* The first of the prefixes that the library knows `name` with. */
static void *find(void *library, const char *name)
{
    static const char *const prefixes[] = {"", "scipy_", "flexiblas_"};
    for (size_t i = 0; i < sizeof prefixes / sizeof *prefixes; i++) {
        char symbol[96];
        snprintf(symbol, sizeof symbol, "%s%s", prefixes[i], name);
        void *found = dlsym(library, symbol);
        if (found != NULL) return found;
    }
    return NULL;
}

static bool set_one_thread(void *library)
{
    static const char *const setters[] = {"openblas_set_num_threads", "MKL_Set_Num_Threads",
                                          "bli_thread_set_num_threads", "set_num_threads"};
    for (size_t i = 0; i < sizeof setters / sizeof *setters; i++) {
        set_threads_fn set;
        *(void **)&set = find(library, setters[i]);
        if (set == NULL) continue;
        set(1);
        return true;
    }
    return false;
}

static zx_status open_library(const char *path)
{
    if (strlen(path) >= sizeof g_blas.path)
        ZX_FAIL(ZX_ERR_ARG, "the path of the BLAS library has %zu characters, more than %zu", strlen(path),
                sizeof g_blas.path - 1);
    ZX_TRY(zx_fault_point("dlopen"));
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        ZX_FAIL(ZX_ERR_SYSTEM, "cannot open the BLAS library '%s': %s; set ZEROX_BLAS to another one", path,
                why == NULL ? "no reason given" : why);
    }
    *(void **)&g_blas.sgemm = find(library, "cblas_sgemm");
    *(void **)&g_blas.dgemm = find(library, "cblas_dgemm");
    if (g_blas.sgemm == NULL || g_blas.dgemm == NULL) {
        dlclose(library);
        ZX_FAIL(ZX_ERR_UNSUPPORTED,
                "'%s' has no cblas_sgemm and cblas_dgemm with 32-bit integers: set ZEROX_BLAS to a library "
                "that has",
                path);
    }
    if (!set_one_thread(library))
        zx_log(ZX_LOG_WARN, "'%s' has no known way to set its threads: set its environment variable to one thread",
               path);
    snprintf(g_blas.path, sizeof g_blas.path, "%s", path);
    g_blas.face = (zx_gemm){.sgemm = call_sgemm, .dgemm = call_dgemm, .path = g_blas.path};
    g_blas.open = true;
    return ZX_OK;
}

static zx_status open_locked(const char *path)
{
    if (!g_blas.open) {
        ZX_TRY(open_library(path));
        return ZX_OK;
    }
    if (strcmp(g_blas.path, path) != 0)
        ZX_FAIL(ZX_ERR_STATE, "cannot open the BLAS library '%s': this process uses '%s' already", path, g_blas.path);
    return ZX_OK;
}

zx_status zx_gemm_open(const char *path, const zx_gemm **out)
{
    *out = NULL;
    if (path == NULL || path[0] == '\0') return ZX_OK;
    pthread_mutex_lock(&g_blas.lock);
    zx_status status = open_locked(path);
    pthread_mutex_unlock(&g_blas.lock);
    ZX_TRY(status);
    *out = &g_blas.face;
    return ZX_OK;
}
