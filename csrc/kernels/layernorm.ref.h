/* layernorm.ref.h - out = (x - mean) * rstd * gamma + beta, with rstd = 1 / sqrt(mean((x - mean)^2) + eps).
 *
 * Mean and variance take two passes over the row, which lies in the cache: no cancellation. Sums over a row run over
 * ZX_LN_LANES interleaved partial sums that are then added in order, the shape of vector registers. */

static inline REAL ZX_NAME(ln_total)(const REAL *lane)
{
    REAL sum = 0;
    for (int l = 0; l < ZX_LN_LANES; l++)
        sum += lane[l];
    return sum;
}

static void ZX_NAME(layernorm_fwd)(const void *x, const void *gamma, const void *beta, void *out, void *mean,
                                   void *rstd, int64_t row, int64_t n_cols, double eps)
{
    const REAL n = (REAL)zx_max64(1, n_cols);
    REAL lane[ZX_LN_LANES] = {0};
    for (int64_t i = 0; i < n_cols; i++)
        lane[i % ZX_LN_LANES] += ZX_LOAD(x, i);
    const REAL m = ZX_NAME(ln_total)(lane) / n;
    for (int l = 0; l < ZX_LN_LANES; l++)
        lane[l] = 0;
    for (int64_t i = 0; i < n_cols; i++) {
        REAL d = ZX_LOAD(x, i) - m;
        lane[i % ZX_LN_LANES] += d * d;
    }
    const REAL r = (REAL)1 / ZX_SQRT(ZX_NAME(ln_total)(lane) / n + (REAL)eps);
    ZX_STORE_SUM(mean, row, m);
    ZX_STORE_SUM(rstd, row, r);
    for (int64_t i = 0; i < n_cols; i++) {
        REAL y = (ZX_LOAD(x, i) - m) * r * ZX_LOAD(gamma, i);
        ZX_STORE(out, i, beta ? y + ZX_LOAD(beta, i) : y);
    }
}

/* With g = dout * gamma and h = (x - mean) * rstd: dx = rstd * (g - mean(g) - h * mean(g * h)). */
static void ZX_NAME(layernorm_bwd_in)(const void *dout, const void *x, const void *gamma, const void *mean,
                                      const void *rstd, int64_t row, int64_t n_cols, void *dx, bool accumulate)
{
    const REAL n = (REAL)zx_max64(1, n_cols), m = ZX_LOAD_SUM(mean, row), r = ZX_LOAD_SUM(rstd, row);
    REAL lane_g[ZX_LN_LANES] = {0}, lane_gh[ZX_LN_LANES] = {0};
    for (int64_t i = 0; i < n_cols; i++) {
        REAL g = ZX_LOAD(dout, i) * ZX_LOAD(gamma, i), h = (ZX_LOAD(x, i) - m) * r;
        lane_g[i % ZX_LN_LANES] += g;
        lane_gh[i % ZX_LN_LANES] += g * h;
    }
    const REAL mean_g = ZX_NAME(ln_total)(lane_g) / n, mean_gh = ZX_NAME(ln_total)(lane_gh) / n;
    for (int64_t i = 0; i < n_cols; i++) {
        REAL g = ZX_LOAD(dout, i) * ZX_LOAD(gamma, i), h = (ZX_LOAD(x, i) - m) * r;
        REAL d = r * (g - mean_g - h * mean_gh);
        ZX_STORE(dx, i, accumulate ? ZX_LOAD(dx, i) + d : d);
    }
}

static void ZX_NAME(layernorm_bwd_w)(const zx_layernorm_cols *job, int64_t begin, int64_t end)
{
    REAL dgamma[ZX_LN_COLS] = {0}, dbeta[ZX_LN_COLS] = {0};
    for (int64_t from = 0; from < job->n_rows; from += ZX_LN_ROWS) {
        REAL part_g[ZX_LN_COLS] = {0}, part_b[ZX_LN_COLS] = {0};
        int64_t to = zx_min64(job->n_rows, from + ZX_LN_ROWS);
        for (int64_t row = from; row < to; row++) {
            REAL m = ZX_LOAD_SUM(job->mean, row), r = ZX_LOAD_SUM(job->rstd, row);
            for (int64_t c = begin; c < end; c++) {
                REAL g = ZX_LOAD(job->dout, row * job->dout_stride + c);
                part_g[c - begin] += g * ((ZX_LOAD(job->x, row * job->x_stride + c) - m) * r);
                part_b[c - begin] += g;
            }
        }
        for (int c = 0; c < ZX_LN_COLS; c++) {
            dgamma[c] += part_g[c];
            dbeta[c] += part_b[c];
        }
    }
    for (int64_t c = begin; c < end; c++) {
        if (job->dgamma) ZX_STORE_SUM(job->dgamma, c, ZX_LOAD_SUM(job->dgamma, c) + dgamma[c - begin]);
        if (job->dbeta) ZX_STORE_SUM(job->dbeta, c, ZX_LOAD_SUM(job->dbeta, c) + dbeta[c - begin]);
    }
}
