/* Random verbs against a naive model of what each must do: which are refused, what memory holds after those that are
 * not. All ranks draw the same verbs; garbage plans make prefetch start at odd moments. */
#define CHECK_DEADLINE_S 110
#include "store_mini.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { N_ROUNDS = 6 };
#else
enum { N_ROUNDS = 24 };
#endif
enum { N_UNITS = 6, N_VERBS = 400, FROZEN = 4 };

typedef struct fuzz_case {
    mini_config config;
    uint64_t seed, delay;
    int n_done, n_refused, n_steps;
} fuzz_case;

typedef struct model { /* every element of a unit holds the same value */
    double value[N_UNITS], held[N_UNITS], full[N_UNITS]; /* sums over ranks: earlier or kept; of FULL gradients */
    int refs[N_UNITS];
    bool is_full[N_UNITS];
    double denominator, pass_denominator;
    bool earlier, pass_grads, incomplete, sharded, micro;
    int n_slots;
    uint64_t random;
} model;

static int64_t rnd(model *m, int64_t n)
{
    m->random = m->random * 6364136223846793005ull + 1442695040888963407ull;
    return (int64_t)((m->random >> 33) % (uint64_t)n);
}

static int slot_of(const model *m, int u)
{
    return u == 0 ? 0 : 1 + (u - 1) % m->n_slots;
}

/* Units with gradients are coloured without the frozen one. */
static int grad_slot_of(const model *m, int u)
{
    return u == 0 ? 0 : 1 + (u < FROZEN ? u - 1 : u - 2) % m->n_slots;
}

static bool slot_is_live(const model *m, int u)
{
    for (int v = 0; v < N_UNITS; v++)
        if (m->sharded && v != u && slot_of(m, v) == slot_of(m, u) && m->refs[v] > 0) return true;
    return false;
}

static bool grad_is_blocked(const model *m, int u)
{
    for (int v = 0; v < N_UNITS; v++)
        if (m->micro && v != u && v != FROZEN && grad_slot_of(m, v) == grad_slot_of(m, u) && m->is_full[v]) return true;
    return false;
}

static int64_t elems(int u)
{
    return 300 + 100 * u;
}

static zx_status expect(fuzz_case *f, zx_status rc, bool allowed)
{
    if (!allowed) {
        CHECK(rc == ZX_ERR_STATE);
        f->n_refused++;
        zx_error_clear();
        return rc == ZX_ERR_STATE ? ZX_OK : rc;
    }
    f->n_done++;
    return rc;
}

static void check_values(const mini *s, const model *m, int u)
{
    const float *p = zx_store_param_addr(s->store, u);
    bool same = true;
    for (int64_t k = 0; k < elems(u); k++)
        same &= fabs(p[k] - m->value[u]) <= 1e-4 * fmax(1, fabs(m->value[u]));
    if (!CHECK(same)) printf("    unit %d holds %g, want %g\n", u, p[0], m->value[u]);
}

static zx_status add_gradient(mini *s, model *m, fuzz_case *f, int u)
{
    void *base;
    int world = s->ctx->world;
    bool allowed = u != FROZEN && !grad_is_blocked(m, u);
    zx_status rc = zx_store_grad(s->store, u, s->ctx->stream, &base);
    ZX_TRY(expect(f, rc, allowed));
    if (!allowed) return ZX_OK;
    float *grad = zx_store_grad_addr(s->store, u);
    for (int64_t k = 0; k < elems(u); k++)
        grad[k] += (float)((s->ctx->rank + 1) * (u + 1));
    m->full[u] += (u + 1) * world * (world + 1) / 2;
    m->is_full[u] = true;
    m->pass_grads |= !m->micro;
    return ZX_OK;
}

static zx_status reduce(mini *s, model *m, fuzz_case *f, int u)
{
    bool allowed = m->is_full[u];
    ZX_TRY(expect(f, mini_reduce(s, u), allowed));
    if (!allowed) return ZX_OK;
    m->held[u] += m->full[u];
    m->full[u] = 0;
    m->is_full[u] = false;
    m->pass_grads = true;
    return ZX_OK;
}

static void forget_grads(model *m, bool sums)
{
    for (int u = 0; u < N_UNITS; u++) {
        m->full[u] = 0;
        m->is_full[u] = false;
        if (sums) m->held[u] = 0;
    }
}

static zx_status step(mini *s, model *m, fuzz_case *f)
{
    bool live = false;
    for (int u = 0; u < N_UNITS; u++)
        live |= m->refs[u] > 0;
    bool allowed = !live && !m->incomplete;
    ZX_TRY(expect(f, mini_step(s, 0.125, 0), allowed));
    if (!allowed) return ZX_OK;
    f->n_steps++;
    double n = m->denominator * s->ctx->world;
    CHECK(s->ctl.skip == (n == 0));
    CHECK(s->ctl.denominator == n);
    for (int u = 0; u < N_UNITS && n > 0; u++)
        m->value[u] -= 0.125 * (m->held[u] + m->full[u]) / n;
    forget_grads(m, true);
    m->denominator = m->pass_denominator = 0;
    m->earlier = m->pass_grads = false;
    return ZX_OK;
}

static void abandon(mini *s, model *m)
{
    zx_store_abandon_pass(s->store, s->ctx->stream);
    memset(m->refs, 0, sizeof m->refs);
    if (!m->earlier) {
        forget_grads(m, true);
    } else if (m->micro) {
        m->incomplete |= m->pass_grads;
        forget_grads(m, false);
    } else {
        m->incomplete |= m->pass_grads;
    }
    m->denominator -= m->pass_denominator;
    m->pass_denominator = 0;
    m->pass_grads = false;
}

static void begin_pass(model *m)
{
    m->earlier |= m->pass_grads;
    m->pass_grads = false;
    m->pass_denominator = 0;
}

static zx_status one_verb(mini *s, model *m, fuzz_case *f)
{
    int u = (int)rnd(m, N_UNITS);
    zx_stream *stream = s->ctx->stream;
    void *base;
    bool allowed;
    switch (rnd(m, 14)) {
    case 0:
    case 1:
    case 2:
        allowed = !slot_is_live(m, u);
        ZX_TRY(expect(f, zx_store_acquire(s->store, u, stream, &base), allowed));
        m->refs[u] += allowed;
        if (allowed) check_values(s, m, u);
        return ZX_OK;
    case 3:
    case 4:
    case 5:
        allowed = m->refs[u] > 0;
        if (allowed) check_values(s, m, u); /* nobody has touched it since */
        ZX_TRY(expect(f, zx_store_release(s->store, u, stream), allowed));
        m->refs[u] -= allowed;
        return ZX_OK;
    case 6:
        return expect(f, zx_store_prefetch(s->store, u), !slot_is_live(m, u));
    case 7:
    case 8:
        return add_gradient(s, m, f, u);
    case 9:
    case 10:
        return reduce(s, m, f, u);
    case 11:
        m->denominator++;
        m->pass_denominator++;
        return mini_count(s, 1, 1);
    case 12:
        if (rnd(m, 3) > 0) return step(s, m, f);
        if (rnd(m, 2) > 0) {
            forget_grads(m, true);
            m->denominator = m->pass_denominator = 0;
            m->earlier = m->pass_grads = m->incomplete = false;
            return zx_store_zero_grad(s->store, stream);
        }
        abandon(s, m);
        return ZX_OK;
    default:
        begin_pass(m);
        return zx_store_begin_pass(s->store);
    }
}

/* Units in random order, one held at a time: a plan that the verbs above follow by accident only. */
static zx_status random_plan(mini *s, model *m, const mini_config *c, zx_plan **out)
{
    zx_unit_event e[80];
    zx_policy policy;
    zx_slots *slots;
    for (int i = 0; i < 80; i += 2) {
        int u = (int)rnd(m, N_UNITS);
        e[i] = (zx_unit_event){ZX_ACQUIRE, u};
        e[i + 1] = (zx_unit_event){ZX_RELEASE, u};
    }
    ZX_TRY(zx_policy_for_stage(3, &policy));
    policy.n_slots = c->n_slots;
    ZX_TRY(zx_slots_open_for(s->layout, &policy, false, NULL, 0, &slots));
    zx_status rc = zx_plan_open(s->layout, &policy, slots, e, 80, out);
    zx_slots_close(slots);
    return rc;
}

static zx_status fuzz(rank_ctx *ctx)
{
    fuzz_case *f = (fuzz_case *)ctx->arg;
    model m = {.random = f->seed, .n_slots = f->config.n_slots};
    zx_param p[N_UNITS];
    float values[1000];
    zx_plan *plan;
    mini s;
    m.sharded = f->config.stage == 3 && ctx->world > 1;
    m.micro = f->config.reduce_at == ZX_REDUCE_MICRO && ctx->world > 1;
    for (int u = 0; u < N_UNITS; u++) {
        p[u] = mini_param(mini_units[u], u, elems(u));
        p[u].trainable = u != FROZEN;
    }
    ZX_TRY(mini_open(&s, ctx, p, N_UNITS, N_UNITS, f->config));
    for (int u = 0; u < N_UNITS; u++) {
        m.value[u] = 10 * u;
        for (int k = 0; k < 1000; k++)
            values[k] = (float)m.value[u];
        ZX_TRY(mini_set(&s, u, values));
    }
    ZX_TRY(random_plan(&s, &m, &f->config, &plan));
    ZX_TRY(zx_store_set_plan(s.store, plan));
    for (int i = 0; i < N_VERBS; i++)
        ZX_TRY(one_verb(&s, &m, f));
    abandon(&s, &m);
    for (int u = 0; u < N_UNITS; u++) {
        void *base;
        ZX_TRY(zx_store_acquire(s.store, u, ctx->stream, &base));
        check_values(&s, &m, u);
        ZX_TRY(zx_store_release(s.store, u, ctx->stream));
    }
    mini_close(&s);
    zx_plan_close(plan);
    return ZX_OK;
}

static void fuzz_world(int world)
{
    int64_t n_done = 0, n_refused = 0, n_steps = 0;
    for (int round = 0; round < N_ROUNDS; round++)
        for (int variant = 0; variant < 8; variant++) {
            fuzz_case f[MAX_WORLD];
            for (int r = 0; r < world; r++)
                f[r] = (fuzz_case){.config = {.stage = variant % 4,
                                              .reduce_at = (zx_reduce_at)(variant / 4),
                                              .n_slots = 1 + round % 3,
                                              .optimizer = ZX_OPTIMIZER_SGD,
                                              .poison = round % 2 == 0},
                                   .seed = (uint64_t)(1 + round * 8 + variant)};
            if (!run_ranks(world, 0, 20, fuzz, f, sizeof f[0])) {
                printf("    world %d round %d variant %d\n", world, round, variant);
                return;
            }
            for (int r = 1; r < world; r++)
                CHECK(f[r].n_done == f[0].n_done && f[r].n_refused == f[0].n_refused);
            n_done += f[0].n_done;
            n_refused += f[0].n_refused;
            n_steps += f[0].n_steps;
        }
    CHECK(n_done > N_ROUNDS * 500 && n_refused > N_ROUNDS * 200 && n_steps > N_ROUNDS * 2);
}

static void test_world_1(void)
{
    fuzz_world(1);
}
static void test_world_2(void)
{
    fuzz_world(2);
}
static void test_world_3(void)
{
    fuzz_world(3);
}

int main(void)
{
    RUN(test_world_1);
    RUN(test_world_2);
    RUN(test_world_3);
    return check_report();
}
