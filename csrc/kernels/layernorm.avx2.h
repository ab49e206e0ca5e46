/* layernorm.avx2.h - layer norm, once per storage: layernorm.ref.h with its 16 partial sums in two registers. */

static inline __m256 ZX_V8_NAME(square_part)(const void *x, int64_t i, int64_t n, __m256 m)
{
    __m256 d = keep(_mm256_sub_ps(ZX_LOAD_PART(x, i, n), m), n - i);
    return _mm256_mul_ps(d, d);
}

void ZX_V8_NAME(zx_layernorm_fwd)(const void *x, const void *gamma, const void *beta, void *out, void *mean, void *rstd,
                                  int64_t row, int64_t n, double eps)
{
    const float count = (float)zx_max64(1, n);
    __m256 s0 = _mm256_setzero_ps(), s1 = s0;
    for (int64_t i = 0; i < n; i += ZX_LN_LANES) {
        s0 = _mm256_add_ps(s0, ZX_LOAD_PART(x, i, n));
        s1 = _mm256_add_ps(s1, ZX_LOAD_PART(x, i + 8, n));
    }
    const float m = total(s0, s1) / count;
    const __m256 vm = _mm256_set1_ps(m);
    s0 = s1 = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += ZX_LN_LANES) {
        s0 = _mm256_add_ps(s0, ZX_V8_NAME(square_part)(x, i, n, vm));
        s1 = _mm256_add_ps(s1, ZX_V8_NAME(square_part)(x, i + 8, n, vm));
    }
    const float r = 1.0f / sqrtf(total(s0, s1) / count + (float)eps);
    const __m256 vr = _mm256_set1_ps(r);
    zx_store_f32(mean, row, m);
    zx_store_f32(rstd, row, r);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 h = _mm256_mul_ps(_mm256_sub_ps(ZX_LOAD_PART(x, i, n), vm), vr);
        __m256 y = _mm256_mul_ps(h, ZX_LOAD_PART(gamma, i, n));
        ZX_STORE_PART(out, i, n, beta ? _mm256_add_ps(y, ZX_LOAD_PART(beta, i, n)) : y);
    }
}

void ZX_V8_NAME(zx_layernorm_bwd_in)(const void *dout, const void *x, const void *gamma, const void *mean,
                                     const void *rstd, int64_t row, int64_t n, void *dx, bool accumulate)
{
    const float count = (float)zx_max64(1, n);
    const __m256 m = _mm256_set1_ps(zx_load_f32(mean, row)), r = _mm256_set1_ps(zx_load_f32(rstd, row));
    __m256 g_sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    __m256 gh_sum[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int64_t i = 0; i < n; i += ZX_LN_LANES) {
        for (int half = 0; half < 2; half++) {
            int64_t at = i + 8 * half;
            __m256 g = _mm256_mul_ps(ZX_LOAD_PART(dout, at, n), ZX_LOAD_PART(gamma, at, n));
            __m256 h = _mm256_mul_ps(_mm256_sub_ps(ZX_LOAD_PART(x, at, n), m), r);
            g_sum[half] = _mm256_add_ps(g_sum[half], g);
            gh_sum[half] = _mm256_add_ps(gh_sum[half], keep(_mm256_mul_ps(g, h), n - at));
        }
    }
    const __m256 mean_g = _mm256_set1_ps(total(g_sum[0], g_sum[1]) / count);
    const __m256 mean_gh = _mm256_set1_ps(total(gh_sum[0], gh_sum[1]) / count);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 g = _mm256_mul_ps(ZX_LOAD_PART(dout, i, n), ZX_LOAD_PART(gamma, i, n));
        __m256 h = _mm256_mul_ps(_mm256_sub_ps(ZX_LOAD_PART(x, i, n), m), r);
        __m256 d = _mm256_sub_ps(_mm256_sub_ps(g, mean_g), _mm256_mul_ps(h, mean_gh));
        d = _mm256_mul_ps(r, d);
        ZX_STORE_PART(dx, i, n, accumulate ? _mm256_add_ps(ZX_LOAD_PART(dx, i, n), d) : d);
    }
}

void ZX_V8_NAME(zx_layernorm_bwd_w)(const zx_layernorm_cols *job, int64_t begin, int64_t end)
{
    enum { N = ZX_LN_COLS / 8 };
    __m256 dgamma[N], dbeta[N];
    for (int j = 0; j < N; j++)
        dgamma[j] = dbeta[j] = _mm256_setzero_ps();
    for (int64_t from = 0; from < job->n_rows; from += ZX_LN_ROWS) {
        __m256 part_g[N], part_b[N];
        for (int j = 0; j < N; j++)
            part_g[j] = part_b[j] = _mm256_setzero_ps();
        int64_t to = zx_min64(job->n_rows, from + ZX_LN_ROWS);
        for (int64_t row = from; row < to; row++) {
            const __m256 m = _mm256_set1_ps(zx_load_f32(job->mean, row));
            const __m256 r = _mm256_set1_ps(zx_load_f32(job->rstd, row));
            const int64_t at_d = row * job->dout_stride, at_x = row * job->x_stride;
            for (int j = 0; j < N; j++) {
                const int64_t c = begin + 8 * j;
                __m256 g = ZX_LOAD_PART(job->dout, at_d + c, at_d + end);
                __m256 h = _mm256_mul_ps(_mm256_sub_ps(ZX_LOAD_PART(job->x, at_x + c, at_x + end), m), r);
                part_g[j] = _mm256_add_ps(part_g[j], _mm256_mul_ps(g, h));
                part_b[j] = _mm256_add_ps(part_b[j], g);
            }
        }
        for (int j = 0; j < N; j++) {
            dgamma[j] = _mm256_add_ps(dgamma[j], part_g[j]);
            dbeta[j] = _mm256_add_ps(dbeta[j], part_b[j]);
        }
    }
    for (int j = 0; j < N && begin + 8 * j < end; j++) {
        int64_t c = begin + 8 * j;
        if (job->dgamma)
            zx_store_part_f32(job->dgamma, c, end, _mm256_add_ps(zx_load_part_f32(job->dgamma, c, end), dgamma[j]));
        if (job->dbeta)
            zx_store_part_f32(job->dbeta, c, end, _mm256_add_ps(zx_load_part_f32(job->dbeta, c, end), dbeta[j]));
    }
}
