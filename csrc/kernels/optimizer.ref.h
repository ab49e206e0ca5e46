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

typedef struct ZX_INST(adamw_numbers) {
    REAL factor, beta1, rest1, beta2, rest2, step, decay, root, eps;
} ZX_INST(adamw_numbers);

/* g = grad * factor; m, v; p -= lr / bc1 * m / (sqrt(v) / sqrt(bc2) + eps) + lr * weight_decay * p */
static inline __attribute__((always_inline)) void ZX_INST(adamw_span)(ZX_INST(adamw_numbers) k, int64_t n,
                                                                      REAL *restrict p, REAL *restrict m,
                                                                      REAL *restrict v, REAL *restrict g)
{
    for (int64_t i = 0; i < n; i++) {
        const REAL old = p[i]; /* all loads before all stores: the arrays often lie alike within their pages */
        REAL grad = g[i] * k.factor;
        REAL first = ZX_OPT_FLUSH(k.beta1 * m[i] + k.rest1 * grad);
        REAL second = ZX_OPT_FLUSH(k.beta2 * v[i] + k.rest2 * (grad * grad));
        m[i] = first;
        v[i] = second;
        g[i] = 0;
        p[i] = old - (k.step * (first / (ZX_OPT_SQRT(second) * k.root + k.eps)) + k.decay * old);
    }
}

/* A cache line at a time. The divisions fill the reorder window, so loads are asked for 2 KB ahead by hand (one
 * thread, against a bare stream over the same arrays: 1.0 of its time, 1.15 without). */
static inline void ZX_INST(adamw_block)(const zx_hyper *h, REAL factor, int64_t n, ZX_INST(opt_at) at)
{
    enum { LINE = 64 / sizeof(REAL), AHEAD = 2048 };
    const ZX_INST(adamw_numbers) k = {
        .factor = factor,
        .beta1 = (REAL)h->beta1,
        .rest1 = (REAL)(1 - h->beta1),
        .beta2 = (REAL)h->beta2,
        .rest2 = (REAL)(1 - h->beta2),
        .step = (REAL)(h->lr / h->bias_correction1),
        .decay = (REAL)(h->lr * h->weight_decay),
        .root = (REAL)(1 / __builtin_sqrt(h->bias_correction2)),
        .eps = (REAL)h->eps,
    };
    int64_t i = 0;
    for (; i + LINE <= n; i += LINE) {
        __builtin_prefetch((const char *)(at.p + i) + AHEAD, 1);
        __builtin_prefetch((const char *)(at.m + i) + AHEAD, 1);
        __builtin_prefetch((const char *)(at.v + i) + AHEAD, 1);
        __builtin_prefetch((const char *)(at.g + i) + AHEAD, 1);
        ZX_INST(adamw_span)(k, LINE, at.p + i, at.m + i, at.v + i, at.g + i);
    }
    ZX_INST(adamw_span)(k, n - i, at.p + i, at.m + i, at.v + i, at.g + i);
}

/* g = grad * factor + weight_decay * p; m = momentum * m + g; p -= lr * m */
static inline void ZX_INST(sgd_block)(const zx_hyper *h, REAL factor, int64_t n, ZX_INST(opt_at) at)
{
    REAL *restrict p = at.p, *restrict m = at.m, *restrict g = at.g;
    const REAL lr = (REAL)h->lr, decay = (REAL)h->weight_decay, momentum = (REAL)h->momentum;
    if (m && momentum != 0) {
        for (int64_t i = 0; i < n; i++) {
            const REAL old = p[i];
            REAL first = ZX_OPT_FLUSH(momentum * m[i] + (g[i] * factor + decay * old));
            m[i] = first;
            g[i] = 0;
            p[i] = old - lr * first;
        }
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const REAL old = p[i];
        REAL grad = g[i] * factor + decay * old;
        if (m) m[i] = grad;
        g[i] = 0;
        p[i] = old - lr * grad;
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
