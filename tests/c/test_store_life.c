/* Opening and closing: nothing grows, every failure while opening leaves nothing behind; what world 1 costs. */
#define CHECK_DEADLINE_S 110
#include <dirent.h>

#include "store_mini.h"

static int64_t count_entries(const char *path)
{
    DIR *dir = opendir(path);
    int64_t n = 0;
    while (dir && readdir(dir))
        n++;
    if (dir) closedir(dir);
    return n;
}

static int64_t count_maps(void)
{
    FILE *f = fopen("/proc/self/maps", "r");
    int64_t n = 0;
    for (int ch = f ? fgetc(f) : EOF; ch != EOF; ch = fgetc(f))
        n += ch == '\n';
    if (f) fclose(f);
    return n;
}

/* Sanitizers map memory of their own. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
enum { MAPS_COUNT = 0 };
#else
enum { MAPS_COUNT = 1 };
#endif

typedef struct books {
    int64_t n_live[ZX_N_MEM_CLASS], live_bytes[ZX_N_MEM_CLASS], n_files, n_maps;
} books;

static books read_books(void)
{
    books b;
    for (int c = 0; c < ZX_N_MEM_CLASS; c++) {
        zx_mem_stats s = zx_mem_get((zx_mem_class)c);
        b.n_live[c] = s.n_live;
        b.live_bytes[c] = s.live_bytes;
    }
    b.n_files = count_entries("/proc/self/fd");
    b.n_maps = count_maps();
    return b;
}

/* from: ZX_MEM_COMM leaves out the small tables that a device keeps for its next reservations. */
static void check_books(const books *before, zx_mem_class from, const char *what)
{
    books now = read_books();
    for (int c = (int)from; c < ZX_N_MEM_CLASS; c++)
        if (!CHECK(now.n_live[c] == before->n_live[c] && now.live_bytes[c] == before->live_bytes[c]))
            printf("    %s: class %s has %lld blocks, had %lld\n", what, zx_mem_class_name((zx_mem_class)c),
                   (long long)now.n_live[c], (long long)before->n_live[c]);
    CHECK_EQ_I64(now.n_files, before->n_files);
}

static void some_params(zx_param *p)
{
    for (int u = 0; u < 4; u++) {
        p[u] = mini_param(mini_units[u], u, 1000 + u);
        p[u].dtype = u % 2 ? ZX_BF16 : ZX_F32;
    }
}

static zx_status open_often(rank_ctx *ctx)
{
    zx_param p[4];
    books before = {0};
    some_params(p);
    for (int i = 0; i < 1000; i++) {
        mini m;
        mini_config c = {
            .stage = i % 4, .reduce_at = (zx_reduce_at)(i / 4 % 2), .n_moments = 2, .optimizer = ZX_OPTIMIZER_ADAMW};
        if (i == 8) before = read_books(); /* each combination once */
        ZX_TRY(mini_open(&m, ctx, p, 4, 4, c));
        mini_close(&m);
    }
    check_books(&before, ZX_MEM_COMM, "1,000 stores");
    CHECK(!MAPS_COUNT || count_maps() <= before.n_maps + 8);
    return ZX_OK;
}

static void test_open_often(void)
{
    CHECK(run_ranks(1, 0, 10, open_often, NULL, 0));
}

static zx_status open_often_pair(rank_ctx *ctx)
{
    zx_param p[4];
    some_params(p);
    for (int i = 0; i < 1000; i++) {
        mini m;
        mini_config c = {.stage = i % 4, .n_moments = 2, .optimizer = ZX_OPTIMIZER_ADAMW};
        ZX_TRY(mini_open(&m, ctx, p, 4, 4, c));
        mini_close(&m);
    }
    return ZX_OK;
}

static void test_open_often_pair(void)
{
    books before = read_books();
    CHECK(run_ranks(2, 0, 10, open_often_pair, NULL, 0));
    check_books(&before, ZX_MEM_MISC, "1,000 stores on two ranks");
    CHECK(!MAPS_COUNT || count_maps() <= before.n_maps + 24); /* stacks of threads stay mapped */
}

/* World 1: the n-th primitive fails, for every n. */
static zx_status fail_each(rank_ctx *ctx)
{
    zx_param p[4];
    some_params(p);
    for (int stage = 0; stage < 4; stage += 3) {
        mini_config c = {.stage = stage, .n_moments = 2, .optimizer = ZX_OPTIMIZER_ADAMW};
        mini m;
        int n = 1;
        for (;; n++) {
            books before = read_books();
            zx_fault_arm(n);
            zx_status rc = mini_open(&m, ctx, p, 4, 4, c);
            zx_fault_arm(0);
            if (rc == ZX_OK) break;
            CHECK_ERROR_HAS("injected");
            CHECK(m.store == NULL);
            mini_close(&m);
            check_books(&before, ZX_MEM_COMM, "a failed open");
        }
        CHECK(n > 30);
        ZX_TRY(mini_count(&m, 0, 1));
        ZX_TRY(mini_step(&m, 1, 0));
        mini_close(&m);
    }
    zx_error_clear();
    return ZX_OK;
}

static void test_faults(void)
{
    books before = read_books();
    CHECK(run_ranks(1, 0, 10, fail_each, NULL, 0));
    check_books(&before, ZX_MEM_MISC, "failed opens");
}

/* World 2: whichever rank meets the fault, both get an error within the deadline and leave nothing behind. */
typedef struct fault_case {
    int n;
    bool failed[2];
} fault_case;

static zx_status fail_pair(rank_ctx *ctx)
{
    fault_case *f = ctx->arg;
    zx_param p[4];
    mini m;
    some_params(p);
    ZX_TRY(zx_bootstrap_barrier(ctx->bs, "before the fault"));
    if (ctx->rank == 0) zx_fault_arm(f->n);
    zx_status rc =
        mini_open(&m, ctx, p, 4, 4, (mini_config){.stage = 3, .n_moments = 2, .optimizer = ZX_OPTIMIZER_ADAMW});
    if (rc != ZX_OK) zx_comm_abort(ctx->comm, zx_error_last()->text);
    f->failed[ctx->rank] = rc != ZX_OK;
    mini_close(&m);
    zx_error_clear();
    return ZX_OK;
}

static void test_faults_pair(void)
{
    for (int n = 1; n < 400; n += 7) {
        fault_case f = {.n = n};
        books before = read_books();
        bool ok = run_ranks(2, 0, 5, fail_pair, &f, 0);
        bool fired = zx_fault_passed() >= n;
        zx_fault_arm(0);
        CHECK_OR_RETURN(CHECK(ok));
        check_books(&before, ZX_MEM_MISC, "a failed open of two");
        if (!fired) break;
    }
}

/* What was allocated is what was promised, and a steady step allocates nothing. */
static zx_status steady(rank_ctx *ctx)
{
    mini_config c = *(mini_config *)ctx->arg;
    zx_param p[4];
    float g[1003];
    int64_t n_before = 0, n_after = 0;
    void *base;
    mini m;
    some_params(p);
    for (int k = 0; k < 1003; k++)
        g[k] = 1;
    c.optimizer = ZX_OPTIMIZER_ADAMW;
    c.n_moments = 2;
    int64_t device = zx_mem_get(ZX_MEM_DEVICE).live_bytes;
    ZX_TRY(zx_bootstrap_barrier(ctx->bs, "measured"));
    ZX_TRY(mini_open(&m, ctx, p, 4, 4, c));
    ZX_TRY(zx_bootstrap_barrier(ctx->bs, "open"));
    device = zx_mem_get(ZX_MEM_DEVICE).live_bytes - device;
    CHECK_EQ_I64(device, ctx->world * (int64_t)zx_store_bytes_held(m.store).total);
    for (int step = 0; step < 6; step++) {
        for (int u = 0; u < 4; u++) {
            ZX_TRY(zx_store_acquire(m.store, u, ctx->stream, &base));
            ZX_TRY(mini_add(&m, u, g));
            ZX_TRY(zx_store_release(m.store, u, ctx->stream));
            ZX_TRY(mini_reduce(&m, u));
        }
        ZX_TRY(mini_count(&m, 0, 1));
        ZX_TRY(mini_step(&m, 0.1, 1));
        ZX_TRY(zx_bootstrap_barrier(ctx->bs, "between steps"));
        int64_t n = zx_mem_get(ZX_MEM_STORE).n_allocs + zx_mem_get(ZX_MEM_DEVICE).n_allocs;
        if (step == 2) n_before = n;
        n_after = n;
        ZX_TRY(zx_bootstrap_barrier(ctx->bs, "counted"));
    }
    CHECK_EQ_I64(n_after, n_before);
    mini_close(&m);
    return ZX_OK;
}

static void test_steady_step(void)
{
    mini_everywhere(1, 3, steady);
}

/* World 1 on the null device: a micro-step and a step put nothing into streams but the arithmetic itself, the sixteen
 * bytes of totals, and the hyper-parameters. */
static const char *const golden[] = {
    /* count */ "compute copy 16",
    "compute cast 32",
    "compute sum_sources 32",
    /* step: norms, decision, one update for each range, totals cleared, the end of the step */
    "compute sqnorm",
    "compute sqnorm",
    "compute copy 64",
    "compute step_control",
    "compute adamw",
    "compute adamw",
    "compute fill 16",
    "compute event",
    "store wait_event",
};

static void test_world_1_costs_nothing(void)
{
    zx_device_config device = {.kind = ZX_DEVICE_NULL, .null_total_bytes = (size_t)1 << 30};
    zx_bootstrap_config boot = {.world = 1, .listen_fd = -1, .timeout_s = 5};
    rank_ctx ctx = {.world = 1};
    zx_param p[2] = {mini_param("R.w", 0, 1000), mini_param("b0.w", 1, 1000)};
    zx_hyper h = {.lr = 1, .beta1 = 0.9, .beta2 = 0.9, .bias_correction1 = 1, .bias_correction2 = 1};
    zx_step_options options = {.hyper = &h, .n_groups = 1, .loss_scale = 1};
    double totals[2] = {1, 1};
    void *base;
    mini m;
    CHECK_OR_RETURN(CHECK_OK(zx_device_open(&device, &ctx.dev)));
    CHECK_OR_RETURN(CHECK_OK(zx_bootstrap_open(&boot, ctx.dev, &ctx.bs)));
    CHECK_OR_RETURN(CHECK_OK(zx_comm_open(ctx.dev, ctx.bs, NULL, &ctx.comm)));
    CHECK_OR_RETURN(CHECK_OK(zx_stream_open(ctx.dev, "compute", &ctx.stream)));
    mini_config c = {.stage = 3, .reduce_at = ZX_REDUCE_MICRO, .n_moments = 2, .optimizer = ZX_OPTIMIZER_ADAMW};
    CHECK_OR_RETURN(CHECK_OK(mini_open(&m, &ctx, p, 2, 2, c)));
    for (int round = 0; round < 2; round++) {
        zx_null_clear(ctx.dev);
        CHECK_OK(zx_store_begin_pass(m.store));
        CHECK_OK(zx_store_acquire(m.store, 0, ctx.stream, &base));
        CHECK_OK(zx_store_acquire(m.store, 1, ctx.stream, &base));
        CHECK_OK(zx_store_count(m.store, ctx.stream, totals, ZX_F64));
        CHECK_OK(zx_store_grad(m.store, 1, ctx.stream, &base));
        CHECK_OK(zx_store_release(m.store, 1, ctx.stream));
        CHECK_OK(zx_store_reduce(m.store, 1, ctx.stream));
        CHECK_OK(zx_store_release(m.store, 0, ctx.stream)); /* the root's gradient is never asked for */
        CHECK_OK(zx_store_step(m.store, ctx.stream, &options));
        int64_t n = zx_null_n_records(ctx.dev);
        CHECK_EQ_I64(n, (int64_t)(sizeof golden / sizeof golden[0]));
        for (int64_t i = 0; i < n && i < (int64_t)(sizeof golden / sizeof golden[0]); i++) {
            const zx_record *r = &zx_null_records(ctx.dev)[i];
            char line[64];
            snprintf(line, sizeof line, "%s %s %lld", r->stream, r->what, (long long)r->bytes);
            if (!CHECK(strncmp(line, golden[i], strlen(golden[i])) == 0))
                printf("    got \"%s\", want \"%s\"\n", line, golden[i]);
        }
    }
    mini_close(&m);
    zx_stream_close(ctx.stream);
    zx_comm_close(ctx.comm);
    zx_bootstrap_close(ctx.bs);
    zx_device_close(ctx.dev);
}

int main(void)
{
    RUN(test_open_often);
    RUN(test_open_often_pair);
    RUN(test_faults);
    RUN(test_faults_pair);
    RUN(test_steady_step);
    RUN(test_world_1_costs_nothing);
    return check_report();
}
