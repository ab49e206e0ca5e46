/* kernel_gradients.h - gradients of the double reference against central differences: L = sum(w * out), and the
 * gradient of L by the backward operation equals (L(x + h) - L(x - h)) / 2h with h = 1e-5. */
#ifndef ZX_TESTS_KERNEL_GRADIENTS_H
#define ZX_TESTS_KERNEL_GRADIENTS_H

#include "kernel_cases.h"

/* Rounding of the arithmetic that a dtype is computed in. */
KC_UNUSED static double unit(zx_dtype t)
{
    return t == ZX_F64 ? 0x1p-53 : 0x1p-24;
}

typedef double (*loss_fn)(void *context);

KC_UNUSED static void check_gradient(const char *what, const zx_view *x, const zx_view *dx, loss_fn loss, void *context)
{
    int64_t n = zx_view_numel(x), step = n > 60 ? n / 53 : 1;
    double scale = 0;
    for (int64_t i = 0; i < n; i++)
        scale = fmax(scale, fabs(kc_get(dx, i)));
    for (int64_t i = 0; i < n; i += step) {
        const double kept = kc_get(x, i), h = 1e-5;
        kc_set(x, i, kept + h);
        double up = loss(context);
        kc_set(x, i, kept - h);
        double down = loss(context);
        kc_set(x, i, kept);
        double want = (up - down) / (2 * h), got = kc_get(dx, i);
        if (!CHECK(fabs(got - want) <= 1e-6 * fmax(fabs(want), 0.1 * scale)))
            printf("    d%s[%lld]: %.12g by the operation, %.12g by differences\n", what, (long long)i, got, want);
    }
}

typedef struct run_ref {
    zx_op_id op;
    void *args;
    const zx_view *out, *weight;
} run_ref;

KC_UNUSED static double weighted_loss(void *context)
{
    const run_ref *r = context;
    double sum = 0;
    CHECK_OK(kc_launch(KC_REF, 1, r->op, r->args));
    for (int64_t i = 0, n = zx_view_numel(r->out); i < n; i++)
        sum += kc_get(r->out, i) * kc_get(r->weight, i);
    return sum;
}

#endif
