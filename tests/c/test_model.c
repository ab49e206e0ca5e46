/* test_model.c - the tape and the engine from C, under the sanitizers: a small transformer trains on ranks as threads;
 * recomputation and stages change no bit; an abandoned pass leaves nothing behind; faults are errors without leaks. */
#include "model/engine.h"
#include "store/checkpoint.h"
#include "store_world.h"

enum { VOCAB = 13, WIDTH = 16, BLOCKS = 3, ROWS = 10, DOCS = 3, HEADS = 2, STEPS = 4 };
enum { P_EMBED, P_BLOCK0, P_GAMMA = 0, P_BETA, P_QKV, P_PROJ, P_UP, P_UP_BIAS, P_DOWN, PER_BLOCK };
enum { N_PARAMS = 1 + BLOCKS * PER_BLOCK };

typedef struct variant {
    int stage;
    bool recompute, abandon_first;
    float losses[STEPS];
    double norms[STEPS];
    zx_status status;
} variant;

static zx_status make_layout(int world, zx_layout **out)
{
    static const int64_t shapes[PER_BLOCK][2] = {
        [P_GAMMA] = {WIDTH},         [P_BETA] = {WIDTH},        [P_QKV] = {3 * WIDTH, WIDTH}, [P_PROJ] = {WIDTH, WIDTH},
        [P_UP] = {2 * WIDTH, WIDTH}, [P_UP_BIAS] = {2 * WIDTH}, [P_DOWN] = {WIDTH, 2 * WIDTH}};
    char names[N_PARAMS][24];
    static const char *const units[1 + BLOCKS] = {"root", "block 0", "block 1", "block 2"};
    zx_param params[N_PARAMS] = {{.name = "embed", .dtype = ZX_F32, .ndim = 2, .shape = {VOCAB, WIDTH}}};
    for (int i = 0; i < N_PARAMS; i++) {
        zx_param *p = &params[i];
        if (i > 0) {
            const int64_t *shape = shapes[(i - 1) % PER_BLOCK];
            snprintf(names[i], sizeof names[i], "p%d", i);
            *p = (zx_param){.name = names[i], .unit = 1 + (i - 1) / PER_BLOCK, .dtype = ZX_F32};
            p->ndim = shape[1] ? 2 : 1;
            p->shape[0] = shape[0];
            p->shape[1] = shape[1];
        }
        memcpy(p->global_shape, p->shape, sizeof p->shape);
        p->trainable = true;
        p->tied_to = -1;
    }
    return zx_layout_open(params, N_PARAMS, units, 1 + BLOCKS, world, 4096, out);
}

/* Small values that differ everywhere and do not depend on rank or stage. */
static zx_status fill_params(zx_engine *e, int rank, bool whole)
{
    const zx_layout *l = zx_engine_layout(e);
    zx_piece pieces[N_PARAMS * 2];
    int64_t n = zx_checkpoint_pieces(l, rank, whole, pieces, N_PARAMS * 2);
    ZX_TRY(zx_store_load_begin(zx_engine_store(e)));
    for (int64_t i = 0; i < n; i++) {
        float values[3 * WIDTH * WIDTH];
        for (int64_t k = 0; k < pieces[i].n; k++) {
            uint32_t h = (uint32_t)((pieces[i].param * 7919 + pieces[i].begin + k) * 2654435761u);
            values[k] = ((float)(h >> 8) / (float)(1 << 24) - 0.5f) * 0.4f;
        }
        ZX_TRY(zx_store_write_slice(zx_engine_store(e), pieces[i].range, ZX_SLICE_PARAM, pieces[i].range_begin,
                                    pieces[i].n, values));
    }
    return zx_store_load_end(zx_engine_store(e));
}

static void drop(zx_tensor *t)
{
    if (!t) return;
    zx_tensor_unhold(t);
    zx_tensor_unref(t);
}

typedef struct pass {
    zx_engine *e;
    zx_tensor *params[N_PARAMS], *cu;
} pass;

static zx_status op(pass *p, const char *name, zx_tensor *a, zx_tensor *b, zx_tensor *c, const zx_attrs *attrs,
                    zx_tensor **out)
{
    static const zx_attrs none;
    zx_tensor *in[3] = {a, b, c};
    return zx_engine_apply(p->e, zx_opdef_find(name), in, c ? 3 : 2, attrs ? attrs : &none, out);
}

/* x is taken over; *out = x + down(gelu(up(x'))) with x' = x + proj(attention(qkv(norm(x)))) */
static zx_status block(pass *p, int index, bool recompute, zx_tensor *x, zx_tensor **out)
{
    zx_tensor **w = &p->params[1 + index * PER_BLOCK], *t[8] = {0};
    zx_attrs eps = {.f = {1e-5}}, heads = {.i = {HEADS, HEADS, 1, ROWS}, .f = {0.35}};
    zx_status zx_rc_ = ZX_OK;
    *out = NULL;
    ZX_TRY_GOTO(zx_engine_enter(p->e, 1 + index, recompute), done);
    ZX_TRY_GOTO(op(p, "layernorm", x, w[P_GAMMA], w[P_BETA], &eps, &t[0]), done);
    ZX_TRY_GOTO(op(p, "linear", t[0], w[P_QKV], NULL, NULL, &t[1]), done);
    ZX_TRY_GOTO(op(p, "attention", t[1], p->cu, NULL, &heads, &t[2]), done);
    ZX_TRY_GOTO(op(p, "linear", t[2], w[P_PROJ], NULL, NULL, &t[3]), done);
    ZX_TRY_GOTO(op(p, "add", x, t[3], NULL, NULL, &t[4]), done);
    ZX_TRY_GOTO(op(p, "linear", t[4], w[P_UP], w[P_UP_BIAS], NULL, &t[5]), done);
    zx_tensor *gelu_in[1] = {t[5]};
    zx_attrs none = {0};
    ZX_TRY_GOTO(zx_engine_apply(p->e, zx_opdef_find("gelu"), gelu_in, 1, &none, &t[6]), done);
    ZX_TRY_GOTO(op(p, "linear", t[6], w[P_DOWN], NULL, NULL, &t[7]), done);
    ZX_TRY_GOTO(op(p, "add", t[4], t[7], NULL, NULL, out), done);
    ZX_TRY_GOTO(zx_engine_exit(p->e, 1 + index), done);
done:
    for (int i = 0; i < 8; i++)
        drop(t[i]);
    drop(x);
    return zx_rc_;
}

static zx_status forward(pass *p, int step, int rank, bool recompute, zx_tensor **out_loss)
{
    int32_t ids[ROWS], labels[ROWS], cu[DOCS + 1] = {0, 4, 4, 9};
    for (int i = 0; i < ROWS; i++) {
        ids[i] = (i * 5 + step / 99 + rank * 3) % VOCAB; /* the abandoned pass (99) has other data */
        labels[i] = i % 4 == 3 ? -100 : (i * 7) % VOCAB;
    }
    int64_t rows = ROWS, offsets = DOCS + 1;
    zx_tensor *tokens = NULL, *targets = NULL, *x = NULL, *next;
    zx_status zx_rc_ = ZX_OK;
    *out_loss = NULL;
    p->cu = NULL;
    ZX_TRY_GOTO(zx_engine_input(p->e, "tokens", ZX_I32, 1, &rows, ids, &tokens), done);
    ZX_TRY_GOTO(zx_engine_input(p->e, "targets", ZX_I32, 1, &rows, labels, &targets), done);
    ZX_TRY_GOTO(zx_engine_input(p->e, "cu", ZX_I32, 1, &offsets, cu, &p->cu), done);
    ZX_TRY_GOTO(op(p, "embedding", tokens, p->params[P_EMBED], NULL, NULL, &x), done);
    for (int i = 0; i < BLOCKS; i++) {
        zx_rc_ = block(p, i, recompute, x, &next);
        x = next;
        if (zx_rc_ != ZX_OK) goto done;
    }
    ZX_TRY_GOTO(op(p, "linear_cross_entropy", x, p->params[P_EMBED], targets, NULL, out_loss), done);
done:
    if (zx_rc_ == ZX_OK && zx_engine_stream(p->e)) zx_rc_ = zx_stream_sync(zx_engine_stream(p->e)); /* ids end here */
    drop(x);
    drop(tokens);
    drop(targets);
    return zx_rc_;
}

static zx_status run_pass(pass *p, const variant *v, int step, int rank, bool dry, float *loss)
{
    zx_tensor *total = NULL;
    float pair[2] = {0};
    ZX_TRY(zx_engine_begin(p->e, 1, ZX_PASS_TRAIN, dry));
    zx_status status = forward(p, step, rank, v->recompute, &total);
    if (status == ZX_OK && !dry) status = zx_tensor_read(total, pair);
    if (status == ZX_OK) status = zx_engine_backward(p->e, total);
    drop(total);
    drop(p->cu);
    if (status == ZX_OK) status = zx_engine_end(p->e);
    if (status != ZX_OK) zx_engine_abandon(p->e);
    *loss = pair[0];
    return status;
}

static zx_status train_on(zx_engine *e, rank_ctx *ctx, variant *v)
{
    pass p = {.e = e};
    zx_hyper hyper = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8};
    zx_step_options options = {.hyper = &hyper, .n_groups = 1, .max_norm = 0.5, .loss_scale = 1};
    zx_step_ctl ctl;
    zx_status zx_rc_ = ZX_OK;
    float loss;
    ZX_TRY_GOTO(fill_params(e, ctx->rank, v->stage == 0), done);
    for (int i = 0; i < N_PARAMS; i++)
        ZX_TRY_GOTO(zx_engine_param(e, i, &p.params[i]), done);
    ZX_TRY_GOTO(run_pass(&p, v, 0, ctx->rank, true, &loss), done);
    if (v->abandon_first) {
        zx_tensor *total;
        ZX_TRY_GOTO(zx_engine_begin(e, 1, ZX_PASS_TRAIN, false), done);
        ZX_TRY_GOTO(forward(&p, 99, ctx->rank, v->recompute, &total), done);
        zx_engine_abandon(e);
        drop(total);
        drop(p.cu);
    }
    for (int s = 0; s < STEPS; s++) {
        ZX_TRY_GOTO(run_pass(&p, v, s, ctx->rank, false, &v->losses[s]), done);
        hyper.bias_correction1 = 1 - pow(0.9, s + 1);
        hyper.bias_correction2 = 1 - pow(0.95, s + 1);
        ZX_TRY_GOTO(zx_engine_step(e, &options, &ctl), done);
        v->norms[s] = ctl.norm;
    }
done:
    for (int i = 0; i < N_PARAMS; i++)
        drop(p.params[i]);
    return zx_rc_;
}

static zx_status train_rank(rank_ctx *ctx)
{
    variant *v = ctx->arg;
    zx_engine_config config = {.optimizer = ZX_OPTIMIZER_ADAMW, .dtype = ZX_F32, .poison = true};
    zx_layout *layout;
    zx_engine *e = NULL;
    ZX_TRY(zx_policy_for_stage(v->stage, &config.policy));
    config.policy.reduce_at = ZX_REDUCE_MICRO;
    config.policy.prefetch = v->recompute;
    ZX_TRY(make_layout(ctx->world, &layout));
    zx_status status = zx_engine_open(&config, layout, ctx->dev, ctx->comm, &e);
    if (status == ZX_OK) status = train_on(e, ctx, v);
    zx_engine_close(e);
    zx_layout_close(layout);
    return status;
}

static void test_stages_and_recomputation_change_no_bit(void)
{
    for (int world = 1; world <= 3; world++) {
        variant first[MAX_WORLD] = {{0}};
        CHECK(run_ranks(world, 0, 30, train_rank, first, sizeof *first));
        CHECK(first[0].losses[STEPS - 1] < first[0].losses[0]);
        for (int stage = 0; stage < 4; stage++)
            for (int recompute = 0; recompute < 2; recompute++) {
                variant other[MAX_WORLD] = {{0}};
                for (int r = 0; r < world; r++) {
                    other[r].stage = stage;
                    other[r].recompute = recompute;
                    other[r].abandon_first = stage % 2;
                }
                CHECK(run_ranks(world, recompute ? (uint64_t)stage + 1 : 0, 30, train_rank, other, sizeof *other));
                for (int r = 0; r < world; r++) {
                    CHECK(memcmp(other[r].losses, first[r].losses, sizeof first[r].losses) == 0);
                    CHECK(memcmp(other[r].norms, first[r].norms, sizeof first[r].norms) == 0);
                }
            }
    }
}

/* The n-th primitive fails, for every n: an error, and nothing of it stays. */
static zx_status faulty_rank(rank_ctx *ctx)
{
    variant *v = ctx->arg;
    int64_t live = 0;
    for (int64_t n = 1; n < 2000; n++) {
        zx_fault_arm(n);
        v->status = train_rank(ctx);
        bool fired = zx_fault_passed() >= n;
        zx_fault_arm(0);
        zx_error_clear();
        int64_t now = zx_mem_get(ZX_MEM_MODEL).n_live + zx_mem_get(ZX_MEM_STORE).n_live;
        if (n == 1) live = now;
        CHECK_EQ_I64(now, live);
        if (!fired) {
            CHECK(v->status == ZX_OK);
            return ZX_OK;
        }
        CHECK(v->status != ZX_OK);
    }
    ZX_FAIL(ZX_ERR_BUG, "the sweep did not end");
}

static void test_every_fault_is_an_error_without_a_leak(void)
{
    variant v[MAX_WORLD] = {{.stage = 3, .recompute = true}};
    CHECK(run_ranks(1, 0, 30, faulty_rank, v, sizeof *v));
}

int main(void)
{
    RUN(test_stages_and_recomputation_change_no_bit);
    RUN(test_every_fault_is_an_error_without_a_leak);
    return check_report();
}
