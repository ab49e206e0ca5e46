/* xent.avx512.h - softmax cross-entropy of a row, once per storage: the 16 partial sums of xent.ref.h in one register.
 * Lanes past the end of the row hold -infinity, whose exponential is 0 and which no maximum takes. */

static inline __m512 ZX_V16_NAME(row_part)(const void *logits, int64_t i, int64_t n)
{
    __m512 x = ZX_LOAD_V16(logits, i, n);
    return i + 16 <= n ? x : _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), zx_mask_v16(i, n), x);
}

void ZX_V16_NAME(zx_xent_fwd)(const void *logits, int64_t n, void *lse, int64_t row)
{
    __m512 top = _mm512_set1_ps(-INFINITY), sums = _mm512_setzero_ps();
    __mmask16 nan = 0;
    for (int64_t i = 0; i < n; i += ZX_XENT_LANES) {
        __m512 x = ZX_V16_NAME(row_part)(logits, i, n);
        nan |= _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
        top = _mm512_max_ps(top, x);
    }
    float lane[ZX_XENT_LANES], max = -INFINITY, sum = 0;
    _mm512_storeu_ps(lane, top);
    for (int l = 0; l < ZX_XENT_LANES; l++)
        max = max > lane[l] ? max : lane[l];
    if (nan || max == -INFINITY) {
        zx_store_f32(lse, row, nan ? NAN : max);
        return;
    }
    const __m512 m = _mm512_set1_ps(max);
    for (int64_t i = 0; i < n; i += ZX_XENT_LANES)
        sums = _mm512_add_ps(sums, zx_exp_v16(_mm512_sub_ps(ZX_V16_NAME(row_part)(logits, i, n), m)));
    _mm512_storeu_ps(lane, sums);
    for (int l = 0; l < ZX_XENT_LANES; l++)
        sum += lane[l];
    zx_store_f32(lse, row, max + logf(sum));
}

void ZX_V16_NAME(zx_xent_bwd)(const void *logits, int64_t n, const void *lse, int64_t row, int64_t label,
                              const void *dloss, void *dlogits)
{
    if (label < 0) {
        for (int64_t i = 0; i < n; i++)
            ZX_STORE(dlogits, i, 0);
        return;
    }
    const float scale = label < n ? zx_load_f32(dloss, 0) : NAN, l = zx_load_f32(lse, row);
    const float at_label = label < n ? ZX_CAT2(zx_load, STORAGE)(logits, label) : 0;
    const __m512 vscale = _mm512_set1_ps(scale), vl = _mm512_set1_ps(l);
    for (int64_t i = 0; i < n; i += 16) {
        __m512 x = ZX_V16_NAME(row_part)(logits, i, n);
        ZX_STORE_V16(dlogits, i, n, _mm512_mul_ps(zx_exp_v16(_mm512_sub_ps(x, vl)), vscale));
    }
    if (label < n) ZX_STORE(dlogits, label, (zx_exp_float(at_label - l) - 1.0f) * scale);
}
