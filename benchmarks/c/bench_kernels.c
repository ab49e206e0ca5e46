/* bench_kernels.c - the CPU kernels of a GPT step, beside the ceilings of the same run.
 *
 *     bench_kernels [threads [tokens [channels [length]]]]      (2, 2048, 384, 256)
 *
 * Products and attention in GFLOP/s of one square product of 1,024 (fixed blocks, our pool); the others in GB/s of a
 * copy whose sizes are theirs. Least of several rounds: wall time, or with 1 thread its processor time, which other
 * work on the machine disturbs less. "cpu" is the processor time of all threads over wall time times threads: well
 * below 1, something else used the cores, and wall times mean little. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "device/device.h"

enum { ROUNDS = 7 };
static zx_exec exec;
static int n_threads = 2;

static int64_t cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "bench_kernels: %s: %s\n", what, zx_error_last()->text);
    exit(1);
}

typedef struct timing {
    double seconds, busy;
} timing;

static timing time_op(zx_op_id op, const void *args)
{
    const zx_kernel *k = &zx_kernels_cpu()->op[op];
    size_t bytes = k->scratch ? k->scratch(args, n_threads) : 0;
    if (bytes > exec.scratch_bytes) {
        free(exec.scratch);
        exec.scratch = aligned_alloc(64, (bytes + 63) / 64 * 64);
        exec.scratch_bytes = bytes;
        if (!exec.scratch) die("no memory");
    }
    timing best = {1e30, 0};
    for (int i = 0; i < ROUNDS; i++) {
        int64_t begin = zx_now_ns(), cpu = cpu_ns();
        if (k->launch(&exec, args) != ZX_OK) die(k->name);
        double s = (double)(zx_now_ns() - begin) * 1e-9, busy = (double)(cpu_ns() - cpu) * 1e-9;
        double measure = n_threads == 1 ? busy : s;
        if (measure < best.seconds) best = (timing){measure, busy / s / n_threads};
    }
    return best;
}

static void *filled(int64_t n, zx_dtype t)
{
    char *p = aligned_alloc(64, ((size_t)n * zx_dtype_bytes(t) + 63) / 64 * 64 + 64);
    if (!p) die("no memory");
    for (int64_t i = 0; i < n; i++) {
        float x = (float)rand() / (float)RAND_MAX - 0.5f;
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (t == ZX_F32) ((float *)(void *)p)[i] = x;
        if (t == ZX_BF16) ((uint16_t *)(void *)p)[i] = (uint16_t)(bits >> 16);
        if (t == ZX_I32) ((int32_t *)(void *)p)[i] = rand() & 255;
    }
    return p;
}

static double ceiling_flops, ceiling_bytes;

static void report(const char *op, const char *what, zx_dtype t, timing r, double work, bool flops)
{
    double rate = work / r.seconds * 1e-9, ceiling = flops ? ceiling_flops : ceiling_bytes;
    printf("%-18s %-26s %-8s %9.3f ms  %7.1f %s  %5.1f%% of ceiling  cpu %.2f\n", op, what, zx_dtype_name(t),
           r.seconds * 1e3, rate, flops ? "GFLOP/s" : "GB/s   ", 100 * rate / ceiling, r.busy);
}

static timing product(zx_dtype t, int64_t m, int64_t n, int64_t k, bool ta, bool tb, bool weight)
{
    zx_matmul_args a = {.trans_a = ta, .trans_b = tb, .accumulate = weight};
    a.a = zx_view_2d(filled(m * k, t), t, ta ? k : m, ta ? m : k, ta ? m : k);
    a.b = zx_view_2d(filled(k * n, t), t, tb ? n : k, tb ? k : n, tb ? k : n);
    zx_dtype tc = weight ? zx_dtype_sum(t) : t;
    a.c = zx_view_2d(filled(m * n, tc), tc, m, n, n);
    timing r = time_op(ZX_OP_matmul, &a);
    free(a.a.data);
    free(a.b.data);
    free(a.c.data);
    return r;
}

static void products(zx_dtype t, int64_t tokens, int64_t c)
{
    const struct {
        const char *name;
        int64_t out, in;
    } layers[] = {{"qkv", 3 * c, c}, {"proj", c, c}, {"up", 4 * c, c}, {"down", c, 4 * c}, {"head", 256, c}};
    for (size_t i = 0; i < sizeof layers / sizeof layers[0]; i++) {
        int64_t out = layers[i].out, in = layers[i].in;
        double flops = 2.0 * (double)tokens * (double)out * (double)in;
        char what[64];
        snprintf(what, sizeof what, "%s forward", layers[i].name);
        report("matmul", what, t, product(t, tokens, out, in, false, true, false), flops, true);
        snprintf(what, sizeof what, "%s input", layers[i].name);
        report("matmul", what, t, product(t, tokens, in, out, false, false, false), flops, true);
        snprintf(what, sizeof what, "%s weight", layers[i].name);
        report("matmul", what, t, product(t, out, in, tokens, true, false, true), flops, true);
    }
}

static void attention(zx_dtype t, int64_t tokens, int64_t c, int64_t length, int64_t dim)
{
    int64_t n_docs = tokens / length, heads = c / dim;
    if (n_docs == 0 || heads == 0) return;
    tokens = n_docs * length;
    int32_t *cu = filled(n_docs + 1, ZX_I32);
    for (int64_t d = 0; d <= n_docs; d++)
        cu[d] = (int32_t)(d * length);
    char *qkv = filled(3 * tokens * c, t), *dqkv = filled(3 * tokens * c, t);
    zx_view part[6];
    for (int i = 0; i < 6; i++)
        part[i] = zx_view_3d((i < 3 ? qkv : dqkv) + (size_t)(i % 3 * c) * zx_dtype_bytes(t), t, tokens, heads, dim,
                             3 * c, dim);
    zx_view out = zx_view_3d(filled(tokens * c, t), t, tokens, heads, dim, c, dim), dout = out;
    dout.data = filled(tokens * c, t);
    zx_view lse = zx_view_2d(filled(heads * tokens, ZX_F32), ZX_F32, heads, tokens, tokens);
    zx_attention_fwd_args f = {.q = part[0],
                               .k = part[1],
                               .v = part[2],
                               .out = out,
                               .lse = lse,
                               .docs = {cu, n_docs, length},
                               .scale = 1 / sqrt((double)dim),
                               .causal = true};
    zx_attention_bwd_args b = {.q = part[0],
                               .k = part[1],
                               .v = part[2],
                               .out = out,
                               .lse = lse,
                               .dout = dout,
                               .dq = part[3],
                               .dk = part[4],
                               .dv = part[5],
                               .docs = f.docs,
                               .scale = f.scale,
                               .causal = true};
    char what[64];
    snprintf(what, sizeof what, "causal T%lld D%lld", (long long)length, (long long)dim);
    double flops = 2.0 * (double)tokens * (double)length * (double)c;
    report("attention_fwd", what, t, time_op(ZX_OP_attention_fwd, &f), flops, true);
    report("attention_bwd", what, t, time_op(ZX_OP_attention_bwd, &b), 2.5 * flops, true);
    free(cu);
    free(qkv);
    free(dqkv);
    free(out.data);
    free(dout.data);
    free(lse.data);
}

static void streams(zx_dtype t, int64_t tokens, int64_t c)
{
    const double e = (double)zx_dtype_bytes(t), n = (double)tokens;
    zx_view wide[3], narrow[3], vec[6];
    for (int i = 0; i < 3; i++) {
        wide[i] = zx_view_2d(filled(tokens * 4 * c, t), t, tokens, 4 * c, 4 * c);
        narrow[i] = zx_view_2d(filled(tokens * c, t), t, tokens, c, c);
    }
    for (int i = 0; i < 6; i++)
        vec[i] =
            i < 2 ? zx_view_1d(filled(c, t), t, c) : zx_view_1d(filled(tokens, ZX_F32), ZX_F32, i < 4 ? tokens : c);
    zx_gelu_fwd_args gf = {.x = wide[0], .out = wide[1]};
    report("gelu_fwd", "(N,4C)", t, time_op(ZX_OP_gelu_fwd, &gf), 2 * e * n * 4 * (double)c, false);
    zx_gelu_bwd_args gb = {.x = wide[0], .dout = wide[1], .dx = wide[2]};
    report("gelu_bwd", "(N,4C)", t, time_op(ZX_OP_gelu_bwd, &gb), 3 * e * n * 4 * (double)c, false);
    zx_layernorm_fwd_args lf = {
        .x = narrow[0], .gamma = vec[0], .beta = vec[1], .out = narrow[1], .mean = vec[2], .rstd = vec[3], .eps = 1e-5};
    report("layernorm_fwd", "(N,C)", t, time_op(ZX_OP_layernorm_fwd, &lf), 2 * e * n * (double)c, false);
    zx_layernorm_bwd_in_args li = {
        .dout = narrow[1], .x = narrow[0], .gamma = vec[0], .mean = vec[2], .rstd = vec[3], .dx = narrow[2]};
    report("layernorm_bwd_in", "(N,C)", t, time_op(ZX_OP_layernorm_bwd_in, &li), 3 * e * n * (double)c, false);
    vec[4].shape[0] = vec[5].shape[0] = zx_min64(c, tokens);
    zx_layernorm_bwd_w_args lw = {
        .dout = narrow[1], .x = narrow[0], .mean = vec[2], .rstd = vec[3], .dgamma = vec[4], .dbeta = vec[5]};
    if (c <= tokens)
        report("layernorm_bwd_w", "(N,C)", t, time_op(ZX_OP_layernorm_bwd_w, &lw), 2 * e * n * (double)c, false);
    int64_t vocabs[] = {256, 8192};
    for (int i = 0; i < 2; i++) {
        int64_t v = vocabs[i], rows = zx_min64(tokens, 4096 * 2048 / v);
        zx_view logits = zx_view_2d(filled(rows * v, t), t, rows, v, v),
                target = zx_view_1d(filled(rows, ZX_I32), ZX_I32, rows);
        zx_view lse = zx_view_1d(vec[2].data, ZX_F32, rows), total = zx_view_1d(vec[4].data, ZX_F32, 2);
        zx_xent_fwd_args xf = {.logits = logits, .target = target, .lse = lse, .total = total};
        zx_view dlogits = zx_view_2d(filled(rows * v, t), t, rows, v, v);
        zx_xent_bwd_args xb = {.logits = logits,
                               .target = target,
                               .lse = lse,
                               .dloss = zx_view_1d(vec[5].data, ZX_F32, 1),
                               .dlogits = dlogits};
        char what[64];
        snprintf(what, sizeof what, "(%lld,%lld)", (long long)rows, (long long)v);
        report("xent_fwd", what, t, time_op(ZX_OP_xent_fwd, &xf), e * (double)rows * (double)v, false);
        report("xent_bwd", what, t, time_op(ZX_OP_xent_bwd, &xb), 2 * e * (double)rows * (double)v, false);
        free(logits.data);
        free(target.data);
        free(dlogits.data);
    }
    for (int i = 0; i < 3; i++) {
        free(wide[i].data);
        free(narrow[i].data);
    }
    for (int i = 0; i < 6; i++)
        free(vec[i].data);
}

static void ceilings(int64_t tokens, int64_t c)
{
    ceiling_flops = ceiling_bytes = 1;
    timing r = product(ZX_F32, 1024, 1024, 1024, false, false, false);
    ceiling_flops = 2.0 * 1024 * 1024 * 1024 / r.seconds * 1e-9;
    printf("ceiling: product of 1,024: %.1f GFLOP/s (cpu %.2f)\n", ceiling_flops, r.busy);
    zx_cast_args copy = {.a = zx_view_2d(filled(tokens * 4 * c, ZX_F32), ZX_F32, tokens, 4 * c, 4 * c),
                         .out = zx_view_2d(filled(tokens * 4 * c, ZX_F32), ZX_F32, tokens, 4 * c, 4 * c)};
    r = time_op(ZX_OP_cast, &copy);
    ceiling_bytes = 8.0 * (double)(tokens * 4 * c) / r.seconds * 1e-9;
    printf("ceiling: copy of %.1f MB: %.1f GB/s (cpu %.2f)\n", (double)(tokens * 16 * c) * 1e-6, ceiling_bytes, r.busy);
    free(copy.a.data);
    free(copy.out.data);
}

static int64_t number(int argc, char **argv, int i, int64_t otherwise)
{
    int64_t n = argc > i ? strtoll(argv[i], NULL, 10) : otherwise;
    if (n < 1 || n > 1 << 20) {
        fprintf(stderr, "bench_kernels: argument %d is \"%s\": a number from 1 to 2^20 is needed\n", i, argv[i]);
        exit(2);
    }
    return n;
}

int main(int argc, char **argv)
{
    n_threads = (int)number(argc, argv, 1, 2);
    int64_t tokens = number(argc, argv, 2, 2048), c = number(argc, argv, 3, 384), length = number(argc, argv, 4, 256);
    if (zx_gemm_open(zx_env_text(ZX_ENV_BLAS), &exec.gemm) != ZX_OK) die("BLAS");
    if (zx_pool_open(n_threads, &exec.pool) != ZX_OK) die("threads");
    exec.isa = zx_isa_detect();
    printf("%d threads, %lld tokens, %lld channels, BLAS %s, %s\n", n_threads, (long long)tokens, (long long)c,
           exec.gemm ? exec.gemm->path : "none",
           exec.isa >= ZX_ISA_AVX512 ? "avx512"
           : exec.isa >= ZX_ISA_AVX2 ? "avx2"
                                     : "plain");
    ceilings(tokens, c);
    for (int i = 0; i < 2; i++) {
        zx_dtype t = i ? ZX_BF16 : ZX_F32;
        products(t, tokens, c);
        for (int64_t dim = 32; dim <= 128; dim *= 2)
            attention(t, tokens, c, length, dim);
        streams(t, tokens, c);
    }
    zx_pool_close(exec.pool);
    free(exec.scratch);
    return 0;
}
