/* store_model.h - a small model that is trained twice: by the store, on ranks, and by plain loops in double.
 *
 * Unit 0 is the root (tied to a twin in the last block), then blocks of unequal sizes with zero-element parameters, a
 * frozen block, a block of nothing, a block with two option groups. Gradients are a fixed function of (parameter,
 * element, rank, micro-step, step), so both sides can form them alone; some are not exact in float, so order would
 * show. */
#ifndef ZX_TESTS_STORE_MODEL_H
#define ZX_TESTS_STORE_MODEL_H

#include "kernels/load.h"
#include "store_world.h"

enum { N_UNITS = 7, N_PARAMS = 14, N_GROUPS = 2, MAX_PARAM_ELEMS = 1300 };

static const char *const unit_names[N_UNITS] = {"root", "b0", "b1", "b2", "frozen", "nothing", "b5"};

typedef struct param_def {
    const char *name;
    int32_t unit;
    int64_t n;
    bool trainable;
    int32_t group, tied_to;
    bool adapter; /* float32 even in a bfloat16 model */
} param_def;

static const param_def param_defs[N_PARAMS] = {
    {"root.empty", 0, 0, true, 0, -1, false},  {"root.embed", 0, 1021, true, 0, -1, false},
    {"root.bias", 0, 3, true, 1, -1, false},   {"b0.w", 1, 1300, true, 0, -1, false},
    {"b0.b", 1, 1, true, 1, -1, false},        {"b1.frozen", 2, 257, false, 0, -1, false},
    {"b1.w", 2, 511, true, 0, -1, false},      {"b1.adapter", 2, 31, true, 0, -1, true},
    {"b2.w", 3, 64, true, 0, -1, false},       {"b2.v", 3, 64, true, 1, -1, false},
    {"frozen.w", 4, 700, false, 0, -1, false}, {"nothing.w", 5, 0, true, 0, -1, false},
    {"b5.w", 6, 900, true, 1, -1, false},      {"b5.tied", 6, 1021, true, 0, 1, false},
};

static zx_status model_layout(zx_dtype dtype, int world, zx_layout **out)
{
    zx_param params[N_PARAMS];
    memset(params, 0, sizeof params);
    for (int i = 0; i < N_PARAMS; i++) {
        const param_def *d = &param_defs[i];
        params[i] = (zx_param){.name = d->name,
                               .unit = d->unit,
                               .dtype = d->adapter ? ZX_F32 : dtype,
                               .ndim = 1,
                               .shape = {d->n},
                               .global_shape = {d->n},
                               .trainable = d->trainable,
                               .group = d->group,
                               .tied_to = d->tied_to};
    }
    return zx_layout_open(params, N_PARAMS, unit_names, N_UNITS, world, 4096, out);
}

/* In [-1, 1), the same everywhere. */
static float noise(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e)
{
    uint64_t x = (uint64_t)(a * 1000003 + b) * 0x9e3779b97f4a7c15u;
    x ^= (uint64_t)(c * 10007 + d * 101 + e) * 0xbf58476d1ce4e5b9u;
    x ^= x >> 31;
    x *= 0x94d049bb133111ebu;
    x ^= x >> 29;
    return (float)((double)(x >> 40) / (double)(1 << 23) - 1.0);
}

static float initial_value(int param, int64_t i)
{
    return noise(param, i, 77, 0, 0);
}

/* Storage of the gradient is float; parameter 9 (b2.v) gets none in odd micro-steps. */
static float gradient(int param, int64_t i, int rank, int micro, int step)
{
    return noise(param, i, rank + 1, micro + 1, step + 1) * 0.37f;
}

static bool has_gradient(int param, int micro)
{
    return param_defs[param].trainable && param_defs[param].tied_to < 0 && !(param == 9 && micro % 2 == 1);
}

static double total_loss(int rank, int micro, int step)
{
    return 0.25 * (rank + 1) + micro + 8 * step;
}

static double total_count(int rank, int micro, int step)
{
    return 1 + (rank + micro + step) % 3;
}

/* ---- the same training by plain loops ---- */

typedef struct train_case {
    int world, stage, n_micro, n_steps, n_slots;
    zx_reduce_at reduce_at;
    zx_dtype dtype;
    zx_optimizer optimizer;
    double max_norm;
    bool prefetch, poison, bf16_wire;
    uint64_t delay_seed;
    int bad_step; /* a gradient is infinite in this step; -1 = never */
} train_case;

static zx_hyper hyper_of(const train_case *c, int group, int step)
{
    zx_hyper h = {.lr = group ? 0.05 : 0.02,
                  .beta1 = 0.9,
                  .beta2 = 0.95,
                  .eps = 1e-6,
                  .weight_decay = group ? 0 : 0.1,
                  .momentum = c->optimizer == ZX_OPTIMIZER_SGD ? 0.9 : 0};
    h.bias_correction1 = 1 - pow(h.beta1, step + 1);
    h.bias_correction2 = 1 - pow(h.beta2, step + 1);
    return h;
}

typedef struct naive_model {
    double p[N_PARAMS][MAX_PARAM_ELEMS], m[N_PARAMS][MAX_PARAM_ELEMS], v[N_PARAMS][MAX_PARAM_ELEMS];
    double norm, loss, denominator;
    bool skipped;
} naive_model;

static float round_bf16(float x)
{
    return zx_bf16_to_f32(zx_bf16_from_f32(x));
}

/* What is summed over ranks: each micro-step's gradient, or (reduce_at step) their sum in float; rounded on the wire.
 */
static double naive_grad(const train_case *c, int i, int64_t k, int step)
{
    bool round = c->bf16_wire && c->world > 1;
    double sum = 0;
    for (int r = 0; r < c->world; r++) {
        float held = 0;
        for (int micro = 0; micro < c->n_micro; micro++) {
            float g = has_gradient(i, micro) ? gradient(i, k, r, micro, step) : 0;
            if (c->reduce_at == ZX_REDUCE_MICRO) sum += round ? round_bf16(g) : g;
            held += g;
        }
        if (c->reduce_at == ZX_REDUCE_STEP) sum += round ? round_bf16(held) : held;
    }
    return sum;
}

__attribute__((unused)) static void naive_init(naive_model *m, zx_dtype dtype)
{
    memset(m, 0, sizeof *m);
    for (int i = 0; i < N_PARAMS; i++)
        for (int64_t k = 0; k < param_defs[i].n; k++) {
            float x = initial_value(param_defs[i].tied_to >= 0 ? param_defs[i].tied_to : i, k);
            if (dtype == ZX_BF16 && !param_defs[i].adapter) x = round_bf16(x);
            m->p[i][k] = x;
        }
}

static void naive_update(const train_case *c, naive_model *m, int i, int64_t k, double g, const zx_hyper *h)
{
    double *p = &m->p[i][k];
    if (c->optimizer == ZX_OPTIMIZER_ADAMW) {
        m->m[i][k] = h->beta1 * m->m[i][k] + (1 - h->beta1) * g;
        m->v[i][k] = h->beta2 * m->v[i][k] + (1 - h->beta2) * g * g;
        *p -= h->lr * (m->m[i][k] / h->bias_correction1 / (sqrt(m->v[i][k] / h->bias_correction2) + h->eps) +
                       h->weight_decay * *p);
    } else {
        m->m[i][k] = h->momentum * m->m[i][k] + g + h->weight_decay * *p;
        *p -= h->lr * m->m[i][k];
    }
}

__attribute__((unused)) static void naive_step(const train_case *c, naive_model *m, int step)
{
    double squares = 0;
    m->loss = m->denominator = 0;
    for (int r = 0; r < c->world; r++)
        for (int micro = 0; micro < c->n_micro; micro++) {
            m->loss += total_loss(r, micro, step);
            m->denominator += total_count(r, micro, step);
        }
    for (int i = 0; i < N_PARAMS; i++)
        for (int64_t k = 0; k < param_defs[i].n; k++)
            squares += pow(naive_grad(c, i, k, step), 2);
    m->norm = sqrt(squares) / m->denominator;
    m->skipped = step == c->bad_step;
    if (m->skipped) {
        m->norm = INFINITY;
        return;
    }
    double clip = c->max_norm > 0 ? fmin(1, c->max_norm / (m->norm + 1e-6)) : 1;
    for (int i = 0; i < N_PARAMS; i++) {
        if (!param_defs[i].trainable || param_defs[i].tied_to >= 0) continue;
        zx_hyper h = hyper_of(c, param_defs[i].group, step);
        for (int64_t k = 0; k < param_defs[i].n; k++)
            naive_update(c, m, i, k, naive_grad(c, i, k, step) * clip / m->denominator, &h);
    }
}

#endif
