/* gelu.ref.h - GELU in its tanh form, x * 0.5 * (1 + tanh(u)) with u = sqrt(2/pi) (x + 0.044715 x^3), for n elements.
 *
 * 0.5 (1 + tanh(u)) is the logistic function s = 1 / (1 + e), e = exp(-2u), which keeps its relative accuracy where
 * 1 + tanh cancels; likewise 1 - s = s e. u is taken at a clamped x: forward beyond 16, where s is 0 or 1 in float
 * (and 1e-137 from it in double), backward beyond 10, where e is still finite in float and the slope is 1e-36 from 0
 * or 1. */

static inline REAL ZX_NAME(gelu_exp)(REAL x)
{
    const REAL two_u = (REAL)ZX_GELU_A * x * ((REAL)1 + (REAL)ZX_GELU_B * (x * x));
    return ZX_EXP(-two_u);
}

static inline REAL ZX_NAME(gelu_clamp)(REAL x, REAL bound)
{
    x = -bound > x ? -bound : x; /* in this order, so that a NaN stays */
    return bound < x ? bound : x;
}

static void ZX_NAME(gelu_fwd)(const void *x, void *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        REAL xi = ZX_LOAD(x, i);
        REAL e = ZX_NAME(gelu_exp)(ZX_NAME(gelu_clamp)(xi, (REAL)ZX_GELU_CLAMP_FWD));
        ZX_STORE(out, i, xi * ((REAL)1 / ((REAL)1 + e)));
    }
}

/* d/dx (x s(2u)) = s + x s (1 - s) d(2u)/dx */
static void ZX_NAME(gelu_bwd)(const void *x, const void *dout, void *dx, int64_t n, bool accumulate)
{
    for (int64_t i = 0; i < n; i++) {
        REAL xi = ZX_NAME(gelu_clamp)(ZX_LOAD(x, i), (REAL)ZX_GELU_CLAMP_BWD);
        REAL e = ZX_NAME(gelu_exp)(xi), s = (REAL)1 / ((REAL)1 + e);
        REAL slope = (REAL)ZX_GELU_A * ((REAL)1 + (REAL)(3 * ZX_GELU_B) * (xi * xi));
        REAL g = ZX_LOAD(dout, i) * (s + xi * s * (s * e) * slope);
        if (accumulate) g = ZX_LOAD(dx, i) + g;
        ZX_STORE(dx, i, g);
    }
}
