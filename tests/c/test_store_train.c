/* Training by the store equals training by plain loops, and every stage, slot count and prefetch gives the same bits.
 */
#define CHECK_DEADLINE_S 110
#include "store_drive.h"

#if defined(__SANITIZE_THREAD__)
enum { SKIP_HALF = 1 }; /* a training takes many times longer there */
#else
enum { SKIP_HALF = 0 };
#endif

static drive_result results[MAX_WORLD], reference[MAX_WORLD];

static bool train(const train_case *c, drive_result *out)
{
    for (int r = 0; r < c->world; r++) {
        memset(&out[r], 0, sizeof out[r]);
        out[r].c = c;
    }
    return run_ranks(c->world, c->delay_seed, 20, drive, out, sizeof *out);
}

static double worst_error(const train_case *c, const naive_model *m, const drive_result *r)
{
    double worst = 0;
    for (int i = 0; i < N_PARAMS; i++) {
        bool stepped = param_defs[i].trainable && param_defs[i].tied_to < 0;
        int owner = param_defs[i].tied_to >= 0 ? param_defs[i].tied_to : i;
        for (int64_t k = 0; k < param_defs[i].n; k++) {
            double p = c->dtype == ZX_BF16 && !param_defs[i].adapter ? r->master[i][k] : r->param[i][k];
            if (!param_defs[i].trainable) p = r->param[i][k];
            if (!isnan(p)) worst = fmax(worst, fabs(p - m->p[owner][k]));
            if (isnan(r->param[i][k])) worst = INFINITY;
            if (!stepped) continue;
            if (!isnan(r->moment[0][i][k])) worst = fmax(worst, fabs(r->moment[0][i][k] - m->m[i][k]));
            if (c->optimizer == ZX_OPTIMIZER_ADAMW && !isnan(r->moment[1][i][k]))
                worst = fmax(worst, fabs(r->moment[1][i][k] - m->v[i][k]));
        }
    }
    return worst;
}

/* Masters are whole over the ranks, and a bfloat16 parameter is its rounded master. */
static void check_masters(const train_case *c, const drive_result *ranks)
{
    int64_t n_missing = 0, n_wrong = 0;
    for (int i = 0; i < N_PARAMS; i++)
        for (int64_t k = 0; k < param_defs[i].n; k++) {
            bool found = !param_defs[i].trainable;
            for (int r = 0; r < c->world; r++) {
                float master = ranks[r].master[i][k];
                if (!param_defs[i].trainable || isnan(master)) continue;
                found = true;
                bool rounds = c->dtype == ZX_BF16 && !param_defs[i].adapter;
                n_wrong += ranks[r].param[i][k] != (rounds ? round_bf16(master) : master);
            }
            n_missing += !found;
        }
    CHECK_EQ_I64(n_missing, 0);
    CHECK_EQ_I64(n_wrong, 0);
}

static void check_against_naive(const train_case *c, const drive_result *ranks)
{
    naive_model *m = malloc(sizeof *m);
    double tolerance = c->bf16_wire ? 2e-4 : 4e-6;
    naive_init(m, c->dtype);
    for (int step = 0; step < c->n_steps; step++) {
        naive_step(c, m, step);
        for (int r = 0; r < c->world; r++) {
            const zx_step_ctl *ctl = &ranks[r].ctl[step];
            CHECK(ctl->skip == m->skipped);
            CHECK_NEAR(ctl->norm, m->norm, 1e-6);
            CHECK_NEAR(ctl->loss_sum, m->loss, 1e-15);
            CHECK_NEAR(ctl->denominator, m->denominator, 1e-15);
        }
    }
    for (int r = 0; r < c->world; r++) {
        double worst = worst_error(c, m, &ranks[r]);
        if (!CHECK(worst <= tolerance))
            printf("    world %d stage %d at %d m %d: error %g\n", c->world, c->stage, c->reduce_at, c->n_micro, worst);
    }
    check_masters(c, ranks);
    free(m);
}

/* Written out again from the definitions, not taken from the library: every unit holds these many slices of 256. */
static int64_t padded(const train_case *c, bool trainable_only, int unit)
{
    int64_t sum = 0;
    for (int kind = 0; kind < 4; kind++) { /* (frozen or not) x (float adapter or the model's dtype) */
        int64_t used = 0;
        for (int i = 0; i < N_PARAMS; i++) {
            const param_def *p = &param_defs[i];
            bool adapter = p->adapter && c->dtype == ZX_BF16;
            int64_t align = c->dtype == ZX_BF16 && !adapter ? 32 : 16;
            if (p->tied_to >= 0 || p->unit != unit || p->n == 0 || kind != 2 * adapter + !p->trainable) continue;
            used = (used + align - 1) / align * align + p->n;
        }
        int64_t slice = ((used + c->world - 1) / c->world + 255) / 256 * 256;
        if (kind % 2 == 0 || !trainable_only) sum += slice * c->world;
    }
    return sum;
}

static int64_t sent_by_formula(const train_case *c)
{
    int64_t all = 0, trainable = 0, r = c->reduce_at == ZX_REDUCE_MICRO ? c->n_micro : 1, gathers = 0;
    int blocks[] = {1, 2, 3, 4, 6}, n_blocks = 5, k = c->n_slots; /* unit 5 has no elements */
    for (int u = 0; u < N_UNITS; u++) {
        all += padded(c, false, u);
        trainable += padded(c, true, u);
    }
    if (c->world == 1) return 0;
    if (c->stage < 3) return (r + 1) * trainable / c->world * (c->world - 1);
    /* 2L - K blocks and the root, then 2 (L - K) in each further micro-step: the last K of the forward are kept for the
     * backward, the first K for the next forward */
    for (int i = 0; i < n_blocks; i++) {
        int64_t once = padded(c, false, blocks[i]);
        gathers += once + (i < n_blocks - k ? once : 0);
        gathers += (c->n_micro - 1) * (i >= k ? once : 0);
        gathers += (c->n_micro - 1) * (i < n_blocks - k ? once : 0);
    }
    gathers += padded(c, false, 0);
    return (gathers + r * trainable) / c->world * (c->world - 1);
}

static void check_counts(const train_case *c, const drive_result *ranks)
{
    for (int r = 0; r < c->world; r++) {
        const drive_result *out = &ranks[r];
        int64_t one = sent_by_formula(c), n_units = 5, micro = c->reduce_at == ZX_REDUCE_MICRO && c->world > 1;
        CHECK_EQ_I64(out->planned_sent, one);
        CHECK_EQ_I64(out->stats.sent_elems, c->n_steps * one);
        /* besides, each step: two totals, and where the state is sharded a sum of squares for each trainable range */
        int64_t n_ranges = c->dtype == ZX_BF16 ? 6 : 5, scalars = 2 + (c->stage >= 1 ? n_ranges : 0);
        CHECK_EQ_I64(out->comm_sent - out->stats.sent_elems, c->n_steps * scalars * (c->world - 1));
        CHECK_EQ_I64(out->stats.n_steps, c->n_steps);
        CHECK_EQ_I64(out->stats.n_reductions, c->n_steps * n_units * (micro ? c->n_micro : 1));
        CHECK_EQ_I64(out->stats.n_gathers,
                     c->n_steps * (out->plan_gathers_first + (c->n_micro - 1) * out->plan_gathers_next));
        if (c->world > 1 && c->stage == 3) {
            CHECK_EQ_I64(out->plan_gathers_first, 2 * 5 - c->n_slots + 1);
            CHECK_EQ_I64(out->plan_gathers_next, 2 * (5 - c->n_slots));
            bool ahead = c->prefetch && c->n_slots > 1;
            CHECK_EQ_I64(out->stats.n_blocking_gathers, ahead ? c->n_steps : out->stats.n_gathers);
        }
        CHECK_EQ_I64(out->stats.max_live, 2);
        CHECK(memcmp(&out->held, &out->planned, sizeof out->held) == 0);
    }
}

static int n_trained;

/* Trains one case at every stage, and at stage 3 with one to three slots with and without prefetch. */
static void all_stages(train_case c)
{
    for (int variant = 0; variant < 9; variant++) {
        static const int stage[] = {0, 1, 2, 3, 3, 3, 3, 3, 3}, slots[] = {2, 2, 2, 1, 2, 3, 1, 2, 3};
        drive_result *out = variant == 0 ? reference : results;
        c.stage = stage[variant];
        c.n_slots = slots[variant];
        c.prefetch = variant < 6;
        c.poison = variant % 2 == 1;
        if (!train(&c, out)) return;
        n_trained++;
        check_counts(&c, out);
        if (variant == 0) check_against_naive(&c, out);
        if (variant == 1 || variant == 4) check_masters(&c, out);
        for (int r = 0; r < c.world; r++)
            if (!CHECK(out[r].hash == reference[0].hash))
                printf("    world %d rank %d stage %d slots %d prefetch %d at %d dtype %d m %d: other bits\n", c.world,
                       r, c.stage, c.n_slots, c.prefetch, c.reduce_at, c.dtype, c.n_micro);
    }
}

static void sweep(int world)
{
    int nth = 0;
    for (int at = 0; at < 2; at++)
        for (int bf16 = 0; bf16 < 2; bf16++)
            for (int sgd = 0; sgd < 2; sgd++, nth++) {
                if (nth % 2 == 1 && SKIP_HALF) continue;
                train_case c = {.world = world, .n_steps = MAX_STEPS, .reduce_at = (zx_reduce_at)at, .bad_step = -1};
                c.dtype = bf16 ? ZX_BF16 : ZX_F32;
                c.optimizer = sgd ? ZX_OPTIMIZER_SGD : ZX_OPTIMIZER_ADAMW;
                c.n_micro = 1 + nth % 3;
                c.max_norm = nth % 2 ? 0.1 : 0;
                c.bad_step = nth % 4 == 3 ? 1 : -1;
                all_stages(c);
            }
}

static void test_world_1(void)
{
    sweep(1);
}
static void test_world_2(void)
{
    sweep(2);
}
static void test_world_3(void)
{
    sweep(3);
}
static void test_world_4(void)
{
    sweep(4);
}

static void test_world_8(void)
{
    all_stages((train_case){.world = 8, .n_steps = 2, .n_micro = 2, .max_norm = 0.1, .bad_step = -1});
}

static void test_bf16_wire(void)
{
    for (int world = 1; world <= 3; world++)
        for (int at = 0; at < 2; at++)
            all_stages((train_case){.world = world,
                                    .n_steps = 2,
                                    .n_micro = 2,
                                    .reduce_at = (zx_reduce_at)at,
                                    .bf16_wire = true,
                                    .bad_step = -1});
}

/* At world 1 reduce_at makes no difference: gradients accumulate in place. */
static void test_world_1_one_meaning(void)
{
    train_case c = {.world = 1, .n_steps = 2, .n_micro = 3, .n_slots = 2, .bad_step = -1};
    CHECK_OR_RETURN(train(&c, reference));
    c.stage = 3;
    c.reduce_at = ZX_REDUCE_STEP;
    CHECK_OR_RETURN(train(&c, results));
    CHECK(results[0].hash == reference[0].hash);
}

int main(void)
{
    RUN(test_world_1);
    RUN(test_world_2);
    RUN(test_world_3);
    RUN(test_world_4);
    RUN(test_world_8);
    RUN(test_bf16_wire);
    RUN(test_world_1_one_meaning);
    printf("%d trainings\n", n_trained);
    return check_report();
}
