/* test_gemm.c - products of the BLAS at ZEROX_BLAS against a plain loop: sizes from 0, transposes, strides, beta. */
#include "device_tools.h"

#include <math.h>
#include <stdlib.h>

enum { MOST = 17, LD = 24 };

static const zx_gemm *g_gemm;

static double element(int64_t seed, int64_t i)
{
    uint64_t z = (uint64_t)(seed * 1000003 + i + 1) * 0x9e3779b97f4a7c15u;
    z ^= z >> 29;
    return (double)(z % 2001) / 1000.0 - 1.0;
}

/* One case in both types, on matrices with a row stride of LD; c carries NaN where beta is 0. */
static void one_case(bool ta, bool tb, int64_t m, int64_t n, int64_t k, double alpha, double beta)
{
    static float fa[MOST * LD], fb[MOST * LD], fc[MOST * LD];
    static double da[MOST * LD], db[MOST * LD], dc[MOST * LD];
    for (int64_t i = 0; i < MOST * LD; i++) {
        fa[i] = (float)(da[i] = element(1, i));
        fb[i] = (float)(db[i] = element(2, i));
        dc[i] = beta == 0 ? NAN : element(3, i);
        fc[i] = (float)dc[i];
    }
    g_gemm->sgemm(ta, tb, m, n, k, (float)alpha, fa, LD, fb, LD, (float)beta, fc, LD);
    g_gemm->dgemm(ta, tb, m, n, k, alpha, da, LD, db, LD, beta, dc, LD);
    int64_t n_wrong = 0;
    for (int64_t i = 0; i < MOST; i++)
        for (int64_t j = 0; j < LD; j++) {
            double old = element(3, i * LD + j), got = dc[i * LD + j], got_f = fc[i * LD + j];
            if (i >= m || j >= n) { /* outside: as before */
                n_wrong += beta == 0 ? !isnan(got) || !isnan(got_f) : got != old || got_f != (float)old;
                continue;
            }
            double sum = 0, size = fabs(beta * old);
            for (int64_t p = 0; p < k; p++) {
                double x = ta ? da[p * LD + i] : da[i * LD + p], y = tb ? db[j * LD + p] : db[p * LD + j];
                sum += x * y;
                size += fabs(alpha * x * y);
            }
            double want = alpha * sum + (beta == 0 ? 0 : beta * old);
            n_wrong += !(fabs(got - want) <= 1e-14 * (size + 1)) || !(fabs(got_f - want) <= 4e-6 * (size + 1));
        }
    if (!CHECK_EQ_I64(n_wrong, 0))
        printf("    trans %d %d, m %d n %d k %d, beta %g\n", ta, tb, (int)m, (int)n, (int)k, beta);
}

static void test_products(void)
{
    static const int64_t sizes[] = {0, 1, 2, 7, 17};
    for (int t = 0; t < 4; t++)
        for (int i = 0; i < 125; i++)
            for (int b = 0; b < 3; b++)
                one_case(t & 1, t & 2, sizes[i % 5], sizes[i / 5 % 5], sizes[i / 25], 1.5,
                         (const double[]){0, 1, -0.5}[b]);
}

/* Strides that no 32-bit integer holds, of matrices with one row; strides that one row does not need. */
static void test_strides(void)
{
    float a[3] = {1, 2, 3}, b[3] = {4, 5, 6}, c[3] = {7, 7, 7};
    int64_t far = (int64_t)1 << 33;
    g_gemm->sgemm(false, true, 1, 1, 3, 1, a, far, b, far, 0, c, far);
    CHECK(c[0] == 32 && c[1] == 7);
    g_gemm->sgemm(false, false, 1, 3, 1, 2, a, 0, b, 0, 1, c, 0);
    CHECK(c[0] == 40 && c[1] == 17 && c[2] == 19);
    g_gemm->sgemm(true, false, 1, 1, 3, 1, a, 1, b, 1, 1, c, far);
    CHECK(c[0] == 72);
}

static void test_one_library_a_process(void)
{
    const zx_gemm *again, *none = g_gemm;
    char link[] = "/tmp/zx-gemm-XXXXXX";
    CHECK_OK(zx_gemm_open(getenv("ZEROX_BLAS"), &again));
    CHECK(again == g_gemm && strcmp(again->path, getenv("ZEROX_BLAS")) == 0);
    int fd = mkstemp(link);
    CHECK(fd >= 0);
    close(fd);
    CHECK_STATUS(zx_gemm_open(link, &none), ZX_ERR_STATE);
    CHECK_ERROR_HAS(getenv("ZEROX_BLAS"));
    CHECK(none == NULL);
    unlink(link);
    zx_device_config config = {.kind = ZX_DEVICE_CPU, .blas_path = getenv("ZEROX_BLAS")};
    zx_device *dev;
    CHECK_OR_RETURN(CHECK_OK(zx_device_open(&config, &dev)));
    CHECK(dev->gemm == g_gemm);
    zx_device_close(dev);
}

static void test_what_is_no_blas(void)
{
    const zx_gemm *gemm;
    char text[] = "/tmp/zx-gemm-XXXXXX";
    CHECK_OK(zx_gemm_open(NULL, &gemm));
    CHECK(gemm == NULL);
    CHECK_OK(zx_gemm_open("", &gemm));
    CHECK(gemm == NULL);
    CHECK_STATUS(zx_gemm_open("/nowhere/libblas.so", &gemm), ZX_ERR_SYSTEM);
    CHECK_ERROR_HAS("'/nowhere/libblas.so'");
    CHECK_STATUS(zx_gemm_open("libm.so.6", &gemm), ZX_ERR_UNSUPPORTED);
    CHECK_ERROR_HAS("cblas_sgemm");
    int fd = mkstemp(text);
    CHECK(fd >= 0 && write(fd, "not a library", 13) == 13);
    close(fd);
    CHECK_STATUS(zx_gemm_open(text, &gemm), ZX_ERR_SYSTEM);
    CHECK_ERROR_HAS(text);
    unlink(text);
}

static _Atomic int n_opened;

static void *opens(void *arg)
{
    const zx_gemm *gemm;
    if (CHECK_OK(zx_gemm_open(arg, &gemm)) && CHECK(gemm != NULL)) atomic_fetch_add(&n_opened, 1);
    return NULL;
}

static void test_threads_open_it_once(void)
{
    pthread_t threads[4];
    for (int i = 0; i < 4; i++)
        CHECK(pthread_create(&threads[i], NULL, opens, getenv("ZEROX_BLAS")) == 0);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
    CHECK_EQ_I64(atomic_load(&n_opened), 4);
}

int main(void)
{
    RUN(test_what_is_no_blas);
    const char *path = getenv("ZEROX_BLAS");
    if (path == NULL || path[0] == '\0') {
        printf("ZEROX_BLAS names no library: products are not tested\n");
        return check_report();
    }
    RUN(test_threads_open_it_once);
    if (!CHECK_OK(zx_gemm_open(path, &g_gemm))) return check_report();
    RUN(test_products);
    RUN(test_strides);
    RUN(test_one_library_a_process);
    return check_report();
}
