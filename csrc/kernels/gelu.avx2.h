/* gelu.avx2.h - the loops of GELU over n elements, once per storage; the arithmetic is in gelu_avx2.c. */

void ZX_V8_NAME(zx_gelu_fwd)(const void *x, void *out, int64_t n)
{
    for (int64_t i = 0; i < n; i += 8)
        ZX_STORE_PART(out, i, n, fwd_v8(ZX_LOAD_PART(x, i, n)));
}

void ZX_V8_NAME(zx_gelu_bwd)(const void *x, const void *dout, void *dx, int64_t n, bool accumulate)
{
    for (int64_t i = 0; i < n; i += 8) {
        __m256 g = bwd_v8(ZX_LOAD_PART(x, i, n), ZX_LOAD_PART(dout, i, n));
        if (accumulate) g = _mm256_add_ps(ZX_LOAD_PART(dx, i, n), g);
        ZX_STORE_PART(dx, i, n, g);
    }
}
