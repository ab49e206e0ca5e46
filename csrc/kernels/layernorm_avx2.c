/* layernorm_avx2.c - layernorm.ref.h with its 16 partial sums in two registers: the same bits. A row's tail of fewer
 * than 8 elements adds zeros to the remaining partial sums, which leaves them as they are. */
#include "kernels/layernorm.h"

#include "kernels/vmath_avx2.h"

static inline float total(__m256 low, __m256 high)
{
    float lane[ZX_LN_LANES], sum = 0;
    _mm256_storeu_ps(lane, low);
    _mm256_storeu_ps(lane + 8, high);
    for (int l = 0; l < ZX_LN_LANES; l++)
        sum += lane[l];
    return sum;
}

/* Sets the lanes past n elements to zero. */
static inline __m256 keep(__m256 x, int64_t n)
{
    return n >= 8 ? x : _mm256_and_ps(x, _mm256_castsi256_ps(zx_mask_v8(n)));
}

#define LAYERNORM(storage)                                                                                             \
    /* Elements i to i + 7 of a row of n; zeros past the end. */                                                       \
    static inline __m256 part_##storage(const void *p, int64_t i, int64_t n)                                           \
    {                                                                                                                  \
        if (i + 8 <= n) return zx_load_v8_##storage(p, i);                                                             \
        if (i >= n) return _mm256_setzero_ps();                                                                        \
        return zx_load_tail_##storage(p, i, n - i);                                                                    \
    }                                                                                                                  \
    static inline void put_##storage(void *p, int64_t i, int64_t n, __m256 x)                                          \
    {                                                                                                                  \
        if (i + 8 <= n)                                                                                                \
            zx_store_v8_##storage(p, i, x);                                                                            \
        else                                                                                                           \
            zx_store_tail_##storage(p, i, x, n - i);                                                                   \
    }                                                                                                                  \
    static inline __m256 square_part_##storage(const void *x, int64_t i, int64_t n, __m256 m)                          \
    {                                                                                                                  \
        __m256 d = keep(_mm256_sub_ps(part_##storage(x, i, n), m), n - i);                                             \
        return _mm256_mul_ps(d, d);                                                                                    \
    }                                                                                                                  \
    void zx_layernorm_fwd_##storage##_avx2(const void *x, const void *gamma, const void *beta, void *out, void *mean,  \
                                           void *rstd, int64_t row, int64_t n, double eps)                             \
    {                                                                                                                  \
        const float count = (float)zx_max64(1, n);                                                                     \
        __m256 s0 = _mm256_setzero_ps(), s1 = s0;                                                                      \
        for (int64_t i = 0; i < n; i += ZX_LN_LANES) {                                                                 \
            s0 = _mm256_add_ps(s0, part_##storage(x, i, n));                                                           \
            s1 = _mm256_add_ps(s1, part_##storage(x, i + 8, n));                                                       \
        }                                                                                                              \
        const float m = total(s0, s1) / count;                                                                         \
        const __m256 vm = _mm256_set1_ps(m);                                                                           \
        s0 = s1 = _mm256_setzero_ps();                                                                                 \
        for (int64_t i = 0; i < n; i += ZX_LN_LANES) {                                                                 \
            s0 = _mm256_add_ps(s0, square_part_##storage(x, i, n, vm));                                                \
            s1 = _mm256_add_ps(s1, square_part_##storage(x, i + 8, n, vm));                                            \
        }                                                                                                              \
        const float r = 1.0f / sqrtf(total(s0, s1) / count + (float)eps);                                              \
        const __m256 vr = _mm256_set1_ps(r);                                                                           \
        zx_store_f32(mean, row, m);                                                                                    \
        zx_store_f32(rstd, row, r);                                                                                    \
        for (int64_t i = 0; i < n; i += 8) {                                                                           \
            __m256 h = _mm256_mul_ps(_mm256_sub_ps(part_##storage(x, i, n), vm), vr);                                  \
            __m256 y = _mm256_mul_ps(h, part_##storage(gamma, i, n));                                                  \
            put_##storage(out, i, n, beta ? _mm256_add_ps(y, part_##storage(beta, i, n)) : y);                         \
        }                                                                                                              \
    }                                                                                                                  \
    void zx_layernorm_bwd_in_##storage##_avx2(const void *dout, const void *x, const void *gamma, const void *mean,    \
                                              const void *rstd, int64_t row, int64_t n, void *dx, bool accumulate)     \
    {                                                                                                                  \
        const float count = (float)zx_max64(1, n);                                                                     \
        const __m256 m = _mm256_set1_ps(zx_load_f32(mean, row)), r = _mm256_set1_ps(zx_load_f32(rstd, row));           \
        __m256 g_sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};                                                  \
        __m256 gh_sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};                                                 \
        for (int64_t i = 0; i < n; i += ZX_LN_LANES) {                                                                 \
            for (int half = 0; half < 2; half++) {                                                                     \
                int64_t at = i + 8 * half;                                                                             \
                __m256 g = _mm256_mul_ps(part_##storage(dout, at, n), part_##storage(gamma, at, n));                   \
                __m256 h = _mm256_mul_ps(_mm256_sub_ps(part_##storage(x, at, n), m), r);                               \
                g_sum[half] = _mm256_add_ps(g_sum[half], g);                                                           \
                gh_sum[half] = _mm256_add_ps(gh_sum[half], keep(_mm256_mul_ps(g, h), n - at));                         \
            }                                                                                                          \
        }                                                                                                              \
        const __m256 mean_g = _mm256_set1_ps(total(g_sum[0], g_sum[1]) / count);                                       \
        const __m256 mean_gh = _mm256_set1_ps(total(gh_sum[0], gh_sum[1]) / count);                                    \
        for (int64_t i = 0; i < n; i += 8) {                                                                           \
            __m256 g = _mm256_mul_ps(part_##storage(dout, i, n), part_##storage(gamma, i, n));                         \
            __m256 h = _mm256_mul_ps(_mm256_sub_ps(part_##storage(x, i, n), m), r);                                    \
            __m256 d = _mm256_sub_ps(_mm256_sub_ps(g, mean_g), _mm256_mul_ps(h, mean_gh));                             \
            d = _mm256_mul_ps(r, d);                                                                                   \
            put_##storage(dx, i, n, accumulate ? _mm256_add_ps(part_##storage(dx, i, n), d) : d);                      \
        }                                                                                                              \
    }                                                                                                                  \
    void zx_layernorm_bwd_w_##storage##_avx2(const zx_layernorm_cols *job, int64_t begin, int64_t end)                 \
    {                                                                                                                  \
        enum { N = ZX_LN_COLS / 8 };                                                                                   \
        __m256 dgamma[N], dbeta[N];                                                                                    \
        for (int j = 0; j < N; j++)                                                                                    \
            dgamma[j] = dbeta[j] = _mm256_setzero_ps();                                                                \
        for (int64_t from = 0; from < job->n_rows; from += ZX_LN_ROWS) {                                               \
            __m256 part_g[N], part_b[N];                                                                               \
            for (int j = 0; j < N; j++)                                                                                \
                part_g[j] = part_b[j] = _mm256_setzero_ps();                                                           \
            int64_t to = zx_min64(job->n_rows, from + ZX_LN_ROWS);                                                     \
            for (int64_t row = from; row < to; row++) {                                                                \
                const __m256 m = _mm256_set1_ps(zx_load_f32(job->mean, row));                                          \
                const __m256 r = _mm256_set1_ps(zx_load_f32(job->rstd, row));                                          \
                const void *dout = zx_at(job->dout, DTYPE_##storage, row * job->dout_stride);                          \
                const void *x = zx_at(job->x, DTYPE_##storage, row * job->x_stride);                                   \
                for (int j = 0; j < N; j++) {                                                                          \
                    __m256 g = part_##storage(dout, begin + 8 * j, end);                                               \
                    __m256 h = _mm256_mul_ps(_mm256_sub_ps(part_##storage(x, begin + 8 * j, end), m), r);              \
                    part_g[j] = _mm256_add_ps(part_g[j], _mm256_mul_ps(g, h));                                         \
                    part_b[j] = _mm256_add_ps(part_b[j], g);                                                           \
                }                                                                                                      \
            }                                                                                                          \
            for (int j = 0; j < N; j++) {                                                                              \
                dgamma[j] = _mm256_add_ps(dgamma[j], part_g[j]);                                                       \
                dbeta[j] = _mm256_add_ps(dbeta[j], part_b[j]);                                                         \
            }                                                                                                          \
        }                                                                                                              \
        for (int j = 0; j < N && begin + 8 * j < end; j++) {                                                           \
            int64_t c = begin + 8 * j;                                                                                 \
            if (job->dgamma) put_f32(job->dgamma, c, end, _mm256_add_ps(part_f32(job->dgamma, c, end), dgamma[j]));    \
            if (job->dbeta) put_f32(job->dbeta, c, end, _mm256_add_ps(part_f32(job->dbeta, c, end), dbeta[j]));        \
        }                                                                                                              \
    }

#define DTYPE_f32 ZX_F32
#define DTYPE_bf16 ZX_BF16
LAYERNORM(f32)
LAYERNORM(bf16)
