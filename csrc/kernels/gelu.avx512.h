/* gelu.avx512.h - the loops of GELU over n elements, once per storage; the arithmetic is in gelu_avx512.c. */

void ZX_V16_NAME(zx_gelu_fwd)(const void *x, void *out, int64_t n)
{
    for (int64_t i = 0; i < n; i += 16)
        ZX_STORE_V16(out, i, n, fwd_v16(ZX_LOAD_V16(x, i, n)));
}

void ZX_V16_NAME(zx_gelu_bwd)(const void *x, const void *dout, void *dx, int64_t n, bool accumulate)
{
    for (int64_t i = 0; i < n; i += 16) {
        __m512 g = bwd_v16(ZX_LOAD_V16(x, i, n), ZX_LOAD_V16(dout, i, n));
        if (accumulate) g = _mm512_add_ps(ZX_LOAD_V16(dx, i, n), g);
        ZX_STORE_V16(dx, i, n, g);
    }
}
