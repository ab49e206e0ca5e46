/* optimizer.ref.h - the updates over REAL. Master, moments and gradient are F32 or F64 and are read as REAL.
 *
 * Blocks pass through the first-level cache: F32 states under double arithmetic (the reference) are converted
 * there, and so is the parameter in its own dtype. Only IEEE operations in a fixed order: instances of float
 * agree in bits.
 */
#include "kernels/rows.ref.h"

#ifndef ZX_OPT_BLOCK
#define ZX_OPT_BLOCK 512

/* Moments that decayed below the smallest normal number are zero: arithmetic on subnormals is a hundred times slower,
 * and rows of an embedding that are never seen again would stay there for ever. */
static inline float zx_opt_flush_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits & 0x7f800000u ? bits : 0;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static inline double zx_opt_flush_double(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = bits & 0x7ff0000000000000u ? bits : 0;
    memcpy(&x, &bits, sizeof x);
    return x;
}
#define ZX_OPT_FLUSH ZX_CAT2(zx_opt_flush, REAL)
#define ZX_OPT_SQRT_float __builtin_sqrtf
#define ZX_OPT_SQRT_double __builtin_sqrt
#define ZX_OPT_SQRT ZX_CAT2(ZX_OPT_SQRT, REAL)
#endif

typedef struct ZX_INST(opt_at) {
    REAL *p, *m, *v, *g;
} ZX_INST(opt_at);

/* g = grad * factor; m, v; p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps) + lr * weight_decay * p */
static inline void ZX_INST(adamw_block)(const zx_hyper *h, REAL factor, int64_t n, ZX_INST(opt_at) at)
{
    REAL *restrict p = at.p, *restrict m = at.m, *restrict v = at.v, *restrict g = at.g;
    const REAL beta1 = (REAL)h->beta1, rest1 = (REAL)(1 - h->beta1);
    const REAL beta2 = (REAL)h->beta2, rest2 = (REAL)(1 - h->beta2);
    const REAL step = (REAL)(h->lr / h->bias_correction1), decay = (REAL)(h->lr * h->weight_decay);
    const REAL root = (REAL)(1 / __builtin_sqrt(h->bias_correction2)), eps = (REAL)h->eps;
    for (int64_t i = 0; i < n; i++) {
        const REAL old = p[i]; /* all loads before all stores: the arrays often lie alike within their pages */
        REAL grad = g[i] * factor;
        REAL first = ZX_OPT_FLUSH(beta1 * m[i] + rest1 * grad);
        REAL second = ZX_OPT_FLUSH(beta2 * v[i] + rest2 * (grad * grad));
        m[i] = first;
        v[i] = second;
        g[i] = 0;
        p[i] = old - (step * (first / (ZX_OPT_SQRT(second) * root + eps)) + decay * old);
    }
}

/* g = grad * factor + weight_decay * p; m = momentum * m + g; p -= lr * m */
static inline void ZX_INST(sgd_block)(const zx_hyper *h, REAL factor, int64_t n, ZX_INST(opt_at) at)
{
    REAL *restrict p = at.p, *restrict m = at.m, *restrict g = at.g;
    const REAL lr = (REAL)h->lr, decay = (REAL)h->weight_decay, momentum = (REAL)h->momentum;
    if (m && momentum != 0) {
        for (int64_t i = 0; i < n; i++) {
            REAL first = ZX_OPT_FLUSH(momentum * m[i] + (g[i] * factor + decay * p[i]));
            m[i] = first;
            g[i] = 0;
            p[i] = p[i] - lr * first;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        REAL grad = g[i] * factor + decay * p[i];
        if (m) m[i] = grad;
        g[i] = 0;
        p[i] = p[i] - lr * grad;
    }
}

static void ZX_INST(opt_run)(const zx_adamw_args *args, const zx_hyper *h, double factor, bool adamw, int64_t begin,
                             int64_t end)
{
    void *arrays[4] = {args->master, args->m, adamw ? args->v : NULL, args->grad};
    REAL buffer[4][ZX_OPT_BLOCK];
    bool direct = args->dtype == ZX_INST(real_dtype)();
    for (int64_t i = begin; i < end; i += ZX_OPT_BLOCK) {
        int64_t n = zx_min64(end - i, ZX_OPT_BLOCK);
        REAL *at[4];
        for (int k = 0; k < 4; k++) {
            void *from = arrays[k] ? zx_at(arrays[k], args->dtype, i) : NULL;
            at[k] = !from || direct ? from : buffer[k];
            if (from && !direct) ZX_INST(get_row)(args->dtype, from, 1, n, buffer[k]);
        }
        ZX_INST(opt_at) where = {at[0], at[1], at[2], at[3]};
        if (adamw)
            ZX_INST(adamw_block)(h, (REAL)factor, n, where);
        else
            ZX_INST(sgd_block)(h, (REAL)factor, n, where);
        for (int k = 0; k < 4; k++)
            if (arrays[k] && !direct) ZX_INST(put_row)(args->dtype, zx_at(arrays[k], args->dtype, i), 1, n, buffer[k]);
        if (!args->param) continue;
        if (!direct) ZX_INST(get_row)(args->dtype, zx_at(args->master, args->dtype, i), 1, n, buffer[0]);
        ZX_INST(put_row)(args->param_dtype, zx_at(args->param, args->param_dtype, i), 1, n, at[0]);
    }
}

void ZX_INST(zx_adamw)(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end)
{
    ZX_INST(opt_run)(args, h, factor, true, begin, end);
}

void ZX_INST(zx_sgd)(const zx_adamw_args *args, const zx_hyper *h, double factor, int64_t begin, int64_t end)
{
    ZX_INST(opt_run)(args, h, factor, false, begin, end);
}
