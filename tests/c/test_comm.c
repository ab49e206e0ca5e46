/* Every collective against a naive model, bit for bit: worlds 1-8, dtypes, sizes, registered, other and mixed memory,
 * in place and not, threads and processes, inline and delayed streams. The source is overwritten, in stream order,
 * right after each call: a rank that reads it too late gets wrong numbers. */
#include "comm_ranks.h"

#ifdef __SANITIZE_THREAD__
enum { FEWER = 7 }; /* of the combinations, where each costs so much more */
#else
enum { FEWER = 1 };
#endif
enum { GUARD = 64, GUARD_BYTE = 0x5a };

typedef enum test_op { AG, RS, RS_ADD, AR, BC, A2A, N_TEST_OPS } test_op;
typedef enum place { OTHER, REGISTERED, MIXED, N_PLACES } place;

static uint64_t hash(uint64_t x)
{
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdu;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53u;
    return x ^ x >> 33;
}

static float bf16_value(uint16_t bits)
{
    uint32_t u = (uint32_t)bits << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint16_t bf16_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

/* Element i of a rank's source in call number `salt`. */
static void put(void *at, zx_dtype t, int64_t i, int rank, uint64_t salt)
{
    uint64_t h = hash(salt << 40 ^ (uint64_t)rank << 32 ^ (uint64_t)i);
    double v = (double)(int64_t)(h >> 11) / 9007199254740992.0 * 2 - 1;
    switch (t) {
    case ZX_F32:
        ((float *)at)[i] = (float)v;
        break;
    case ZX_F64:
        ((double *)at)[i] = v;
        break;
    case ZX_BF16:
        ((uint16_t *)at)[i] = bf16_bits((float)v);
        break;
    case ZX_I32:
        ((int32_t *)at)[i] = (int32_t)(h % 100000) - 50000;
        break;
    case ZX_I64:
        ((int64_t *)at)[i] = (int64_t)(h >> 8);
        break;
    default:
        ((uint8_t *)at)[i] = (uint8_t)h;
        break;
    }
}

/* out[at] = [out[at] +] sum over ranks of their element i, in rank order. */
static void put_sum(void *out, int64_t at, zx_dtype t, zx_dtype to, int64_t i, int world, uint64_t salt, bool add)
{
    char one[8];
    float f = 0;
    double d = 0;
    int64_t n = 0;
    for (int r = 0; r < world; r++) {
        char *base = one - i * (int64_t)zx_dtype_bytes(t);
        put(base, t, i, r, salt);
        float vf = t == ZX_F32 ? *(float *)one : t == ZX_BF16 ? bf16_value(*(uint16_t *)one) : 0;
        double vd = t == ZX_F64 ? *(double *)one : 0;
        f = r == 0 ? vf : f + vf;
        d = r == 0 ? vd : d + vd;
        n += t == ZX_I32 ? *(int32_t *)one : t == ZX_I64 ? *(int64_t *)one : 0;
    }
    if (to == ZX_F32) {
        ((float *)out)[at] = add ? ((float *)out)[at] + f : f;
    } else if (to == ZX_F64) {
        ((double *)out)[at] = add ? ((double *)out)[at] + d : d;
    } else if (to == ZX_BF16) {
        ((uint16_t *)out)[at] = bf16_bits(add ? bf16_value(((uint16_t *)out)[at]) + f : f);
    } else if (to == ZX_I32) {
        ((int32_t *)out)[at] = (int32_t)(n + (add ? ((int32_t *)out)[at] : 0));
    } else {
        ((int64_t *)out)[at] = n + (add ? ((int64_t *)out)[at] : 0);
    }
}

typedef struct arena { /* one send and one receive buffer, and the model's result */
    size_t bytes;
    char *send, *recv;
    char *want;
    zx_mem *mem;
    char *base;
    int id;
} arena;

static bool arena_open(ranks_env *e, bool registered, size_t bytes, arena *a)
{
    size_t granule = zx_device_caps_get(e->dev)->granule;
    void *at = NULL;
    *a = (arena){.bytes = (size_t)zx_round_up((int64_t)bytes, (int64_t)granule), .id = -1};
    a->want = malloc(a->bytes);
    if (!registered) {
        bool ok = CHECK_OK(zx_device_alloc(e->dev, 2 * a->bytes, &at));
        a->send = at;
        a->recv = a->send + a->bytes;
        return ok;
    }
    if (!CHECK_OK(zx_mem_open(e->dev, 2 * a->bytes, true, &a->mem)) ||
        !CHECK_OK(zx_device_reserve(e->dev, 2 * a->bytes, &at)) ||
        !CHECK_OK(zx_device_map(e->dev, at, a->mem, 0, 2 * a->bytes))) {
        return false;
    }
    a->base = at;
    a->send = a->base;
    a->recv = a->base + a->bytes;
    return true;
}

static void arena_close(ranks_env *e, arena *a)
{
    if (a->base != NULL) {
        zx_device_unreserve(e->dev, a->base, 2 * a->bytes);
        zx_mem_close(a->mem);
    } else {
        zx_device_free(e->dev, a->send);
    }
    free(a->want);
}

typedef struct shape {
    test_op op;
    zx_dtype t, to;
    int64_t n;
    bool in_place;
    int root;
    uint64_t salt;
} shape;

/* Bytes of source and destination, and where the destination lies when in place. */
static void measure(const ranks_env *e, const shape *s, int64_t *n_send, int64_t *n_recv)
{
    *n_send = s->n * (s->op == RS || s->op == RS_ADD || s->op == A2A ? e->world : 1);
    *n_recv = s->n * (s->op == AG || s->op == A2A ? e->world : 1);
}

static void model(const ranks_env *e, const shape *s, void *want)
{
    int64_t n = s->n;
    size_t elem = zx_dtype_bytes(s->t);
    for (int64_t i = 0; i < n; i++) {
        if (s->op == RS || s->op == RS_ADD) {
            put_sum(want, i, s->t, s->to, e->rank * n + i, e->world, s->salt, s->op == RS_ADD);
        } else if (s->op == AR) {
            put_sum(want, i, s->t, s->to, i, e->world, s->salt, false);
        } else if (s->op == BC) {
            put(want, s->t, i, s->root, s->salt);
        } else {
            for (int r = 0; r < e->world; r++) {
                int64_t from = s->op == AG ? i : e->rank * n + i;
                put((char *)want + (size_t)(r * n + i - from) * elem, s->t, from, r, s->salt);
            }
        }
    }
}

static zx_status call(const ranks_env *e, const shape *s, const void *send, void *recv)
{
    switch (s->op) {
    case AG:
        return zx_comm_all_gather(e->comm, e->stream, send, recv, s->n, s->t);
    case RS:
    case RS_ADD:
        return zx_comm_reduce_scatter(e->comm, e->stream, send, recv, s->n, s->t, s->to, s->op == RS_ADD);
    case AR:
        return zx_comm_all_reduce(e->comm, e->stream, send, recv, s->n, s->t);
    case BC:
        return zx_comm_broadcast(e->comm, e->stream, recv, s->n, s->t, s->root);
    default:
        return zx_comm_all_to_all(e->comm, e->stream, send, recv, s->n, s->t);
    }
}

static void one_call(ranks_env *e, arena *a, const shape *s)
{
    int64_t n_send, n_recv;
    measure(e, s, &n_send, &n_recv);
    size_t se = zx_dtype_bytes(s->t), re = zx_dtype_bytes(s->to);
    size_t send_bytes = (size_t)n_send * se, recv_bytes = (size_t)n_recv * re;
    char *send = a->send, *recv = a->recv;
    if (s->in_place && s->op == AG) {
        send = recv + (size_t)(e->rank * s->n) * se;
    } else if (s->in_place && s->op == RS) {
        recv = send + (size_t)(e->rank * s->n) * se;
    } else if (s->in_place && s->op == AR) {
        recv = send;
    }
    if (!s->in_place || s->op == AG) {
        memset(recv, GUARD_BYTE, recv_bytes + GUARD);
    }
    memset(a->want, GUARD_BYTE, recv_bytes + GUARD);
    if (s->op == RS_ADD) {
        for (int64_t i = 0; i < n_recv; i++) {
            put(recv, s->to, i, 77, s->salt);
        }
        memcpy(a->want, recv, recv_bytes);
    }
    if (s->op != BC) {
        for (int64_t i = 0; i < n_send; i++) {
            put(send, s->t, i, e->rank, s->salt);
        }
    } else if (e->rank == s->root) {
        for (int64_t i = 0; i < s->n; i++) {
            put(recv, s->t, i, s->root, s->salt);
        }
    }
    model(e, s, a->want);
    if (!CHECK_OK(call(e, s, send, recv))) {
        return;
    }
    if (!s->in_place && s->op != BC) {
        CHECK_OK(zx_stream_fill(e->stream, send, 0xab, send_bytes));
    }
    CHECK_OK(zx_stream_sync(e->stream));
    bool guards = s->in_place && s->op != AG; /* behind it lies the rest of the source */
    if (!CHECK(memcmp(recv, a->want, recv_bytes + (guards ? 0 : GUARD)) == 0)) {
        printf("    op %d, %s to %s, n %lld, world %d, rank %d, in place %d, registered %d\n", s->op,
               zx_dtype_name(s->t), zx_dtype_name(s->to), (long long)s->n, e->world, e->rank, s->in_place,
               a->base != NULL);
    }
}

static const zx_dtype dtypes[] = {ZX_F32, ZX_BF16, ZX_F64, ZX_I32, ZX_I64, ZX_U8};
enum { N_DTYPES = sizeof dtypes / sizeof dtypes[0] };

/* stride: of all the combinations, every stride-th is taken; large sizes more rarely. */
static void sweep(ranks_env *e, place where, int stride, const int64_t *sizes, int n_sizes)
{
    arena a;
    uint64_t salt = 1;
    bool mine = where == REGISTERED || (where == MIXED && e->rank % 2 == 1);
    int count = 0;
    int64_t largest = 0;
    for (int i = 0; i < n_sizes; i++) {
        largest = zx_max64(largest, sizes[i]);
    }
    if (!arena_open(e, mine, (size_t)(largest * e->world) * 8 + GUARD, &a)) {
        return;
    }
    int id = -1;
    if (where != OTHER) {
        CHECK_OK(zx_comm_register(e->comm, a.mem, a.base, &id));
    }
    for (int op = 0; op < N_TEST_OPS; op++) {
        for (int d = 0; d < N_DTYPES; d++) {
            for (int i = 0; i < n_sizes; i++) {
                for (int form = 0; form < 2; form++) {
                    shape s = {.op = op, .t = dtypes[d], .to = dtypes[d], .n = sizes[i], .in_place = form == 1};
                    bool sums = op == RS || op == RS_ADD || op == AR;
                    if ((sums && s.t == ZX_U8) || (form == 1 && (op == RS_ADD || op == BC || op == A2A))) {
                        continue;
                    }
                    if (++count % stride != 0) {
                        continue;
                    }
                    s.salt = salt++;
                    s.root = (int)(s.salt % (uint64_t)e->world);
                    one_call(e, &a, &s);
                    if ((op == RS || op == RS_ADD) && s.t == ZX_BF16 && !s.in_place) {
                        s.to = ZX_F32;
                        s.salt = salt++;
                        one_call(e, &a, &s);
                    }
                }
            }
        }
    }
    if (where != OTHER) {
        CHECK_OK(zx_comm_unregister(e->comm, id));
    }
    arena_close(e, &a);
}

typedef struct plan {
    int stride;
    bool large;
} plan;

static void matrix(ranks_env *e)
{
    const plan *p = e->arg;
    int64_t w = e->world;
    int64_t small[] = {0, 1, w - 1, w, w + 1, 31, 997, 4099};
    int64_t large[] = {65537, 1 << 20};
    for (int where = 0; where < N_PLACES; where++) {
        if (p->large) {
            sweep(e, where, p->stride * FEWER, large, w > 4 || FEWER > 1 ? 1 : 2);
        } else {
            sweep(e, where, p->stride * FEWER, small, 8);
        }
    }
}

static void test_threads_small(void)
{
    for (int world = 1; world <= 8; world++) {
        plan p = {.stride = world <= 4 ? 1 : 3};
        ranks_threads(world, &(ranks_options){.arg = &p, .ring_bytes = 64 * 1024}, matrix);
    }
}

/* A small ring: many rounds. */
static void test_threads_large(void)
{
    for (int world = 2; world <= 8; world += world == 2 ? 1 : 5) {
        plan p = {.stride = world == 8 ? 13 : 7, .large = true};
        ranks_threads(world, &(ranks_options){.arg = &p, .ring_bytes = 128 * 1024}, matrix);
    }
}

static void test_processes(void)
{
    for (int world = 2; world <= 5; world += 3) {
        plan small = {.stride = 5}, large = {.stride = 17, .large = true};
        ranks_processes(world, &(ranks_options){.arg = &small}, matrix);
        ranks_processes(world, &(ranks_options){.arg = &large}, matrix);
    }
}

static void test_delayed(void)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        plan p = {.stride = 29, .large = seed == 1};
        int world = 2 + (int)(seed % 3);
        ranks_threads(world, &(ranks_options){.arg = &p, .delay_seed = seed * 1000, .ring_bytes = 64 * 1024}, matrix);
    }
}

static void test_local(void)
{
    plan p = {.stride = 1};
    ranks_threads(1, &(ranks_options){.arg = &p, .transport = "local"}, matrix);
}

int main(void)
{
    RUN(test_local);
    RUN(test_threads_small);
    RUN(test_threads_large);
    RUN(test_processes);
    RUN(test_delayed);
    return check_report();
}
