/* xent.avx2.h - softmax cross-entropy of a row, once per storage. Lanes past the end of the row hold -infinity, whose
 * exponential is 0 and which no maximum takes. */

static inline __m256 ZX_V8_NAME(row_part)(const void *logits, int64_t i, int64_t n)
{
    if (i + 8 <= n) return ZX_LOAD_V8(logits, i);
    if (i >= n) return _mm256_set1_ps(-INFINITY);
    return fill_tail(ZX_LOAD_TAIL(logits, i, n - i), n - i);
}

static float ZX_V8_NAME(row_max)(const void *logits, int64_t n, bool *any_nan)
{
    __m256 m0 = _mm256_set1_ps(-INFINITY), m1 = m0, nan = _mm256_setzero_ps();
    for (int64_t i = 0; i < n; i += ZX_XENT_LANES) {
        __m256 x0 = ZX_V8_NAME(row_part)(logits, i, n), x1 = ZX_V8_NAME(row_part)(logits, i + 8, n);
        nan = _mm256_or_ps(nan, _mm256_cmp_ps(x0, x1, _CMP_UNORD_Q));
        m0 = _mm256_max_ps(m0, x0);
        m1 = _mm256_max_ps(m1, x1);
    }
    *any_nan = _mm256_movemask_ps(nan) != 0;
    float lane[8], max = -INFINITY;
    _mm256_storeu_ps(lane, _mm256_max_ps(m0, m1));
    for (int l = 0; l < 8; l++)
        max = max > lane[l] ? max : lane[l];
    return max;
}

void ZX_V8_NAME(zx_xent_fwd)(const void *logits, int64_t n, void *lse, int64_t row)
{
    bool any_nan;
    float max = ZX_V8_NAME(row_max)(logits, n, &any_nan), lane[ZX_XENT_LANES];
    if (any_nan || max == -INFINITY) {
        zx_store_f32(lse, row, any_nan ? NAN : max);
        return;
    }
    __m256 s0 = _mm256_setzero_ps(), s1 = s0, m = _mm256_set1_ps(max);
    for (int64_t i = 0; i < n; i += ZX_XENT_LANES) {
        s0 = _mm256_add_ps(s0, zx_exp_v8(_mm256_sub_ps(ZX_V8_NAME(row_part)(logits, i, n), m)));
        s1 = _mm256_add_ps(s1, zx_exp_v8(_mm256_sub_ps(ZX_V8_NAME(row_part)(logits, i + 8, n), m)));
    }
    _mm256_storeu_ps(lane, s0);
    _mm256_storeu_ps(lane + 8, s1);
    zx_store_f32(lse, row, max + logf(sum_in_order(lane)));
}

void ZX_V8_NAME(zx_xent_bwd)(const void *logits, int64_t n, const void *lse, int64_t row, int64_t label,
                             const void *dloss, void *dlogits)
{
    if (label < 0) {
        for (int64_t i = 0; i < n; i++)
            ZX_STORE(dlogits, i, 0);
        return;
    }
    float scale = label < n ? zx_load_f32(dloss, 0) : NAN, l = zx_load_f32(lse, row);
    float at_label = label < n ? ZX_CAT2(zx_load, STORAGE)(logits, label) : 0;
    __m256 vscale = _mm256_set1_ps(scale), vl = _mm256_set1_ps(l);
    for (int64_t i = 0; i < n; i += 8) {
        __m256 x = ZX_V8_NAME(row_part)(logits, i, n);
        __m256 g = _mm256_mul_ps(zx_exp_v8(_mm256_sub_ps(x, vl)), vscale);
        ZX_STORE_PART(dlogits, i, n, g);
    }
    if (label < n) ZX_STORE(dlogits, label, (zx_exp_float(at_label - l) - 1.0f) * scale);
}
