/* Delayed streams: whatever order the device chooses within what events promise, training gives the same bits. */
#define CHECK_DEADLINE_S 110
#include "store_drive.h"

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { N_SEEDS = 8 }; /* a training takes many times longer there */
#else
enum { N_SEEDS = 30 };
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

static void all_seeds(int world, int n_seeds)
{
    for (int at = 0; at < 2; at++) {
        train_case c = {.world = world,
                        .n_steps = 2,
                        .n_micro = 2,
                        .n_slots = 2,
                        .reduce_at = (zx_reduce_at)at,
                        .max_norm = 0.1,
                        .dtype = at ? ZX_F32 : ZX_BF16,
                        .bad_step = -1};
        CHECK_OR_RETURN(train(&c, reference));
        for (int seed = 1; seed <= n_seeds; seed++)
            for (int stage = 0; stage < 4; stage++) {
                c.delay_seed = (uint64_t)(seed * 16 + stage);
                c.stage = stage;
                c.prefetch = seed % 4 != 0;
                c.poison = seed % 2 == 0;
                c.n_slots = 1 + seed % 3;
                CHECK_OR_RETURN(train(&c, results));
                for (int r = 0; r < world; r++)
                    if (!CHECK(results[r].hash == reference[r].hash))
                        printf("    world %d stage %d at %d seed %d: other bits\n", world, stage, at, seed);
            }
    }
}

static void test_world_1(void)
{
    all_seeds(1, N_SEEDS);
}
static void test_world_2(void)
{
    all_seeds(2, N_SEEDS);
}
static void test_world_3(void)
{
    all_seeds(3, N_SEEDS);
}
static void test_world_4(void)
{
    all_seeds(4, N_SEEDS / 4);
}

int main(void)
{
    RUN(test_world_1);
    RUN(test_world_2);
    RUN(test_world_3);
    RUN(test_world_4);
    return check_report();
}
