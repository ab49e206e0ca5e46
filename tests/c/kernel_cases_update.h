/* kernel_cases_update.h - cases of step_control, adamw, sgd; part of test_kernels.c. */
#include "kernel_cases.h"

/* ---- step_control ------------------------------------------------------------------------------------- */

static zx_step_ctl control(int n_partials, const double *partials, int n_ranks, const double *totals, double max_norm,
                           double loss_scale)
{
    zx_step_ctl first = {0};
    for (kc_path path = KC_REF; path <= KC_AVX2; path++) {
        if (path == KC_AVX2 && !kc_have_avx2()) continue;
        zx_step_ctl *out = kc_alloc(sizeof *out);
        zx_step_control_args args = {partials, n_partials, totals, n_ranks, max_norm, loss_scale, out};
        CHECK_OK(kc_launch(path, 2, ZX_OP_step_control, &args));
        if (path == KC_REF) first = *out;
        CHECK(memcmp(&first, out, sizeof first) == 0 || isnan(first.norm));
        kc_end();
    }
    return first;
}

static void test_step_control(void)
{
    double partials[] = {9, 16, 11}, totals[] = {5, 3, 7, 1}; /* norm of the sum 6, denominator 4 */
    zx_step_ctl c = control(3, partials, 2, totals, 0, 1);
    CHECK(c.skip == 0 && c.norm == 1.5 && c.factor == 0.25 && c.denominator == 4 && c.loss_sum == 12);
    c = control(3, partials, 2, totals, 0, 1024);
    CHECK(c.skip == 0 && c.norm == 1.5 / 1024 && c.factor == 0.25 / 1024);
    c = control(3, partials, 2, totals, 0.75, 1);
    CHECK(c.skip == 0);
    CHECK_NEAR(c.factor, 0.25 * 0.75 / (1.5 + 1e-6), 1e-15);
    c = control(3, partials, 2, totals, 100, 1); /* within the limit: untouched */
    CHECK(c.factor == 0.25);
    c = control(0, NULL, 2, totals, 1, 1); /* a rank that owns nothing */
    CHECK(c.skip == 0 && c.norm == 0 && c.factor == 0.25);
}

static void test_step_control_skips(void)
{
    double partials[] = {9, INFINITY}, totals[] = {5, 3, 7, 1};
    zx_step_ctl c = control(2, partials, 2, totals, 1, 1);
    CHECK(c.skip == 1 && c.factor == 0 && isinf(c.norm) && c.denominator == 4 && c.loss_sum == 12);
    partials[1] = NAN;
    c = control(2, partials, 2, totals, 1, 1);
    CHECK(c.skip == 1 && c.factor == 0 && isnan(c.norm));
    partials[1] = 16;
    double none[] = {0, 0};
    c = control(2, partials, 1, none, 1, 1); /* every label ignored */
    CHECK(c.skip == 1 && c.factor == 0 && isinf(c.norm));
    c = control(2, partials, 0, NULL, 1, 1);
    CHECK(c.skip == 1 && c.factor == 0);
    double negative[] = {0, -2};
    c = control(2, partials, 1, negative, 1, 1);
    CHECK(c.skip == 1 && c.factor == 0);
    double endless[] = {0, INFINITY};
    c = control(2, partials, 1, endless, 1, 1);
    CHECK(c.skip == 1 && c.factor == 0);
    zx_step_control_args bad = {.n_partials = 1, .n_ranks = 0, .loss_scale = 1, .out = kc_alloc(sizeof *bad.out)};
    KC_REFUSES(step_control, bad, ZX_ERR_ARG);
    bad.n_partials = 0;
    bad.loss_scale = 0;
    KC_REFUSES(step_control, bad, ZX_ERR_ARG);
    kc_end();
}

/* ---- adamw, sgd --------------------------------------------------------------------------------------- */

/* The formulas of kernels.h, one element, in long double. */
static void adamw_formula(const zx_hyper *h, double factor, long double *p, long double *m, long double *v, double grad)
{
    long double g = (long double)grad * factor;
    *m = h->beta1 * *m + (1 - h->beta1) * g;
    *v = h->beta2 * *v + (1 - h->beta2) * g * g;
    *p -= h->lr * (*m / h->bias_correction1 / (sqrtl(*v / h->bias_correction2) + h->eps) + h->weight_decay * *p);
}
static void sgd_formula(const zx_hyper *h, double factor, long double *p, long double *m, double grad)
{
    long double g = (long double)grad * factor + h->weight_decay * *p;
    if (h->momentum != 0) *m = h->momentum * *m + g;
    *p -= h->lr * (h->momentum != 0 ? *m : g);
}

typedef struct update_case {
    zx_dtype dtype, param_dtype;
    int64_t n;
    bool has_param, has_m, skip;
    int n_segments;
    zx_segment segments[4];
    zx_hyper hyper[3];
    size_t skew;
} update_case;

static void run_update(const update_case *c, bool adamw)
{
    KC_LABEL("%s %s n %d param %d m %d skip %d segments %d", adamw ? "adamw" : "sgd", zx_dtype_name(c->dtype),
             (int)c->n, c->has_param, c->has_m, c->skip, c->n_segments);
    zx_op_id op = adamw ? ZX_OP_adamw : ZX_OP_sgd;
    size_t bytes = (size_t)c->n * zx_dtype_bytes(c->dtype);
    zx_segment *segments = kc_alloc(sizeof c->segments);
    zx_hyper *hyper = kc_alloc(sizeof c->hyper);
    zx_step_ctl *ctl = kc_alloc(sizeof *ctl);
    memcpy(segments, c->segments, sizeof c->segments);
    memcpy(hyper, c->hyper, sizeof c->hyper);
    *ctl = (zx_step_ctl){.factor = c->skip ? 0 : 0.375, .skip = c->skip};
    zx_adamw_args args = {.dtype = c->dtype, .param_dtype = c->param_dtype, .segments = segments};
    args.n_segments = c->n_segments;
    args.hyper = hyper;
    args.ctl = ctl;
    args.master = kc_alloc_skewed(bytes, c->skew);
    args.m = c->has_m ? kc_alloc_skewed(bytes, c->skew) : NULL;
    args.v = adamw ? kc_alloc_skewed(bytes, c->skew) : NULL;
    args.grad = kc_alloc_skewed(bytes, c->skew);
    args.param = c->has_param ? kc_alloc((size_t)c->n * zx_dtype_bytes(c->param_dtype)) : NULL;
    zx_view p = zx_view_1d(args.master, c->dtype, c->n), m = zx_view_1d(args.m, c->dtype, c->n);
    zx_view v = zx_view_1d(args.v, c->dtype, c->n), g = zx_view_1d(args.grad, c->dtype, c->n);
    zx_view param = zx_view_1d(args.param, c->param_dtype, c->n);
    /* Gaps between segments stay poison (NaN), so that touching them shows. */
    zx_view arrays[4] = {p, m, v, g};
    for (int s = 0; s < c->n_segments; s++)
        for (int64_t i = c->segments[s].begin; i < c->segments[s].end; i++)
            for (int k = 0; k < 4; k++)
                if (arrays[k].data) kc_set(&arrays[k], i, k == 2 ? kc_uniform(0, 0.1) : kc_normal());
    kc_save();
    long double *want[3];
    for (int k = 0; k < 3; k++) {
        want[k] = malloc((size_t)c->n * sizeof **want + 1);
        for (int64_t i = 0; i < c->n; i++)
            want[k][i] = arrays[k].data ? kc_get(&arrays[k], i) : 0;
    }
    for (int s = 0; s < c->n_segments && !c->skip; s++)
        for (int64_t i = c->segments[s].begin; i < c->segments[s].end; i++) {
            const zx_hyper *h = &c->hyper[c->segments[s].group];
            if (adamw)
                adamw_formula(h, ctl->factor, &want[0][i], &want[1][i], &want[2][i], kc_get(&g, i));
            else
                sgd_formula(h, ctl->factor, &want[0][i], &want[1][i], kc_get(&g, i));
        }
    char *plain = NULL;
    for (kc_path path = KC_REF; path <= KC_AVX2; path++)
        for (int threads = 1; threads <= KC_MAX_THREADS; threads++) {
            if (path == KC_AVX2 && !kc_have_avx2()) continue;
            kc_restore();
            CHECK_OK(kc_launch(path, threads, op, &args));
            double worst = 0;
            bool zeroed = true, cast = true, kept = true;
            for (int s = 0; s < c->n_segments; s++)
                for (int64_t i = c->segments[s].begin; i < c->segments[s].end; i++) {
                    for (int k = 0; k < 3; k++) {
                        if (!arrays[k].data) continue;
                        double got = kc_get(&arrays[k], i);
                        if (c->hyper[c->segments[s].group].momentum == 0 && k == 1 && !adamw) continue;
                        worst = fmax(worst, fabs(got - (double)want[k][i]) / (1 + fabs((double)want[k][i])));
                    }
                    zeroed = zeroed && kc_get(&g, i) == 0;
                    if (!args.param) continue;
                    char rounded[8];
                    kc_write(c->param_dtype, rounded, kc_get(&p, i));
                    if (c->skip)
                        kept = kept && isnan(kc_get(&param, i));
                    else
                        cast = cast && kc_get(&param, i) == kc_read(c->param_dtype, rounded);
                }
            CHECK(zeroed);
            CHECK(cast);
            CHECK(kept);
            /* A handful of roundings of numbers of about one; a skipped step changes nothing. */
            if (!CHECK(worst <= (c->skip ? 0 : 16 * unit(c->dtype))))
                printf("    %s on %s, %d threads: error %.3g\n", kc_label, kc_path_name[path], threads, worst);
            int64_t n_used = 0;
            zx_view used[20];
            for (int s = 0; s < c->n_segments; s++)
                for (int k = 0; k < 5; k++) {
                    zx_view a = k < 4 ? arrays[k] : param;
                    if (!a.data) continue;
                    a.data = zx_at(a.data, a.dtype, c->segments[s].begin);
                    a.shape[0] = c->segments[s].end - c->segments[s].begin;
                    used[n_used++] = a;
                }
            zx_view *outs[20];
            for (int64_t i = 0; i < n_used; i++)
                outs[i] = &used[i];
            CHECK(kc_outside_unchanged((int)n_used, outs));
            if (path == KC_REF) continue;
            if (!plain) {
                plain = malloc(4 * bytes + 1);
                for (int k = 0; k < 4; k++)
                    if (arrays[k].data) memcpy(plain + (size_t)k * bytes, arrays[k].data, bytes);
            }
            for (int k = 0; k < 4; k++)
                CHECK(!arrays[k].data || memcmp(plain + (size_t)k * bytes, arrays[k].data, bytes) == 0);
        }
    free(plain);
    for (int k = 0; k < 3; k++)
        free(want[k]);
    kc_end();
}

static zx_hyper hyper_of(double lr, double weight_decay, double momentum, int step)
{
    return (zx_hyper){.lr = lr,
                      .beta1 = 0.9,
                      .beta2 = 0.95,
                      .eps = 1e-8,
                      .weight_decay = weight_decay,
                      .momentum = momentum,
                      .bias_correction1 = 1 - pow(0.9, step),
                      .bias_correction2 = 1 - pow(0.95, step)};
}

static void update_cases(bool adamw)
{
    static const zx_dtype states[] = {ZX_F32, ZX_F64};
    for (int d = 0; d < 2; d++)
        for (int param = 0; param < 4; param++)
            for (int skip = 0; skip < 2; skip++)
                for (int s = 0; s < N_SIZES; s++) {
                    if (sizes[s] > 1000 && (skip || param == 2)) continue;
                    update_case c = {.dtype = states[d], .n = sizes[s], .skip = skip, .has_m = adamw || s % 2};
                    c.has_param = param > 0;
                    c.param_dtype = float_dtypes[param > 0 ? param - 1 : 0];
                    c.skew = s % 3 == 0 ? 8 : 0;
                    c.hyper[0] = hyper_of(0.01, 0.1, c.has_m ? 0.9 : 0, 1 + s);
                    c.n_segments = 1;
                    c.segments[0] = (zx_segment){0, sizes[s], 0, 0};
                    run_update(&c, adamw);
                }
    /* Groups with numbers of their own, gaps, an empty segment, a cut inside a task, a start that is not 0.
     */
    for (int d = 0; d < 2; d++) {
        update_case c = {.dtype = states[d], .n = 40000, .has_param = true, .param_dtype = ZX_BF16, .has_m = true};
        c.n_segments = 4;
        c.hyper[0] = hyper_of(0.01, 0.1, 0.9, 3);
        c.hyper[1] = hyper_of(0.02, 0, 0, 3);
        c.hyper[2] = hyper_of(0, 0, 0.5, 3);
        c.segments[0] = (zx_segment){3, 20, 2, 0};
        c.segments[1] = (zx_segment){20, 17001, 1, 0};
        c.segments[2] = (zx_segment){17010, 17010, 2, 0};
        c.segments[3] = (zx_segment){17064, 39999, 0, 0};
        run_update(&c, adamw);
        c.n_segments = 0;
        run_update(&c, adamw);
    }
}

static void test_adamw(void)
{
    update_cases(true);
}
static void test_sgd(void)
{
    update_cases(false);
}

/* Case F1: two tensors at once, w = 1 and gradient 1, lr 0.1: 0.9 after one step and 0.8 after two, at any
 * size. */
static void test_adamw_two_tensors_two_steps(void)
{
    static const int64_t lengths[] = {1, 3, 7, 1023};
    for (int l = 0; l < 4; l++)
        for (kc_path path = KC_REF; path <= KC_AVX2; path++) {
            if (path == KC_AVX2 && !kc_have_avx2()) continue;
            int64_t n = lengths[l];
            float *arrays[4]; /* w, m, v, g of both tensors */
            for (int k = 0; k < 4; k++) {
                arrays[k] = kc_alloc((size_t)(2 * n) * sizeof(float));
                for (int64_t i = 0; i < 2 * n; i++)
                    arrays[k][i] = k == 0;
            }
            zx_segment segments[2] = {{0, n, 0, 0}, {n, 2 * n, 0, 0}};
            zx_step_ctl ctl = {.factor = 1};
            for (int step = 1; step <= 2; step++) {
                zx_hyper h = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
                h.bias_correction1 = 1 - pow(h.beta1, step);
                h.bias_correction2 = 1 - pow(h.beta2, step);
                for (int64_t i = 0; i < 2 * n; i++)
                    arrays[3][i] = 1;
                zx_adamw_args args = {.master = arrays[0], .m = arrays[1], .v = arrays[2], .grad = arrays[3]};
                args.segments = segments;
                args.n_segments = 2;
                args.hyper = &h;
                args.ctl = &ctl;
                CHECK_OK(kc_launch(path, 2, ZX_OP_adamw, &args));
                double worst = 0;
                for (int64_t i = 0; i < 2 * n; i++)
                    worst = fmax(worst, fabs(arrays[0][i] - (step == 1 ? 0.9 : 0.8)));
                CHECK(worst <= 1e-6);
            }
            kc_end();
        }
}

/* Moments end as zeros, not as subnormal numbers, when gradients stay away. */
static void test_adamw_moments_decay_to_zero(void)
{
    float w[9], m[9], v[9], g[9] = {0};
    for (int i = 0; i < 9; i++) {
        w[i] = 1;
        m[i] = i % 2 ? -2e-38f : 2e-38f;
        v[i] = 2e-38f;
    }
    zx_segment segment = {0, 9, 0, 0};
    zx_hyper h = hyper_of(0.1, 0, 0, 1000);
    zx_step_ctl ctl = {.factor = 1};
    zx_adamw_args args = {.master = w, .m = m, .v = v, .grad = g, .segments = &segment, .n_segments = 1};
    args.hyper = &h;
    args.ctl = &ctl;
    for (int step = 0; step < 20; step++)
        CHECK_OK(kc_launch(step % 2 && kc_have_avx2() ? KC_AVX2 : KC_PLAIN, 1, ZX_OP_adamw, &args));
    for (int i = 0; i < 9; i++)
        CHECK(m[i] == 0 && v[i] == 0 && fabsf(w[i] - 1) < 1e-6f);
}

static void test_update_refuses(void)
{
    KC_LABEL("refusals");
    zx_segment *segments = kc_alloc(2 * sizeof *segments);
    zx_hyper *h = kc_alloc(sizeof *h);
    zx_step_ctl *ctl = kc_alloc(sizeof *ctl);
    *h = hyper_of(0.1, 0, 0.9, 1);
    *ctl = (zx_step_ctl){.factor = 1};
    segments[0] = (zx_segment){0, 4, 0, 0};
    segments[1] = (zx_segment){3, 8, 0, 0};
    zx_adamw_args args = {.master = kc_alloc(32), .m = kc_alloc(32), .v = kc_alloc(32), .grad = kc_alloc(32)};
    args.segments = segments;
    args.n_segments = 2;
    args.hyper = h;
    args.ctl = ctl;
    KC_REFUSES(adamw, args, ZX_ERR_ARG); /* overlapping segments */
    CHECK_ERROR_HAS("sorted");
    segments[1] = (zx_segment){4, 8, 0, 0};
    args.dtype = ZX_BF16;
    KC_REFUSES(adamw, args, ZX_ERR_UNSUPPORTED);
    args.dtype = ZX_F32;
    args.m = NULL;
    KC_REFUSES(adamw, args, ZX_ERR_ARG);
    KC_REFUSES(sgd, args, ZX_ERR_ARG);
    CHECK_ERROR_HAS("momentum");
    args.param = kc_alloc(32);
    args.param_dtype = ZX_I32;
    KC_REFUSES(sgd, args, ZX_ERR_UNSUPPORTED);
    kc_end();
}
