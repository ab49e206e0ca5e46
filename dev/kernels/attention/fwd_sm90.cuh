// Flash attention forward for Hopper.
//
// DESIGN. A block is one producer warp and two or three consumer warp groups; a consumer group owns 64 query
// rows of the block's tile. The producer takes tiles off a global counter (longest first when causal) and
// feeds Q once and K, V block by block through the copy engine, as far ahead as the stages allow, across tile
// boundaries. A consumer keeps its output, its scores and its probabilities in registers: the score
// accumulator of the first product has the register layout that the second product wants of its A operand.
// A step issues S(n) = Q K(n)^T and O += P(m) V(m) of the block before it together, and does the softmax of
// S(n) while the second runs. The block before the first of a tile is the last of the tile before: the stream
// of blocks never drains, and a tile's output is stored one step later. The groups take turns to issue (named
// barriers in a ring), so that one group's softmax runs under another group's products. Key blocks go from
// last to first: the masked ones come first, and a group passes over those that none of its rows sees.
#pragma once

#include <type_traits>

#include "hopper.cuh"
#include "shape.cuh"

namespace zx
{

template <class Element, int HEAD_DIM, int KEYS, int GROUPS, int STAGE_COUNT, bool IS_CAUSAL>
struct ForwardTile {
    using T = Element;
    static constexpr int D = HEAD_DIM, BN = KEYS, WG = GROUPS, STAGES = STAGE_COUNT, BM = 64 * GROUPS;
    static constexpr bool CAUSAL = IS_CAUSAL;
    static constexpr int THREADS = 128 * (WG + 1);
    static_assert((STAGES & (STAGES - 1)) == 0, "the stage is taken from the low bits of a counter");
    static constexpr int Q_BYTES = BM * D * 2, KV_BYTES = BN * D * 2;
    static constexpr int Q_AT = 0, K_AT = 2 * Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES;
    static constexpr int BARS_AT = V_AT + STAGES * KV_BYTES;
    static constexpr int SMEM_BYTES = BARS_AT + 256 + 1024; /* room to align the tiles to 1024 bytes */
    static constexpr int PRODUCER_REGISTERS = WG == 2 ? 40 : 32, CONSUMER_REGISTERS = WG == 2 ? 232 : 160;
};

struct ForwardParams {
    Shape shape;
    void *o;
    int64_t o_token_stride, o_head_stride;
    float *lse;
    unsigned *counter; /* [0] next tile, [1] blocks that are done; both zero between launches */
    int n_tiles, n_row_blocks, heads_together;
};

// Barrier addresses; each pair is (filled by the producer, emptied by the consumers). Q has two stages, the
// descriptions of tiles have four, since a tile's is read until its output is stored.
template <int STAGES> struct ForwardBars {
    uint32_t base;
    __device__ uint32_t q_full(int i) const
    {
        return base + 8 * i;
    }
    __device__ uint32_t q_empty(int i) const
    {
        return base + 16 + 8 * i;
    }
    __device__ uint32_t tile_full(int i) const
    {
        return base + 32 + 8 * i;
    }
    __device__ uint32_t tile_empty(int i) const
    {
        return base + 64 + 8 * i;
    }
    __device__ uint32_t k_full(int i) const
    {
        return base + 96 + 8 * i;
    }
    __device__ uint32_t k_empty(int i) const
    {
        return base + 96 + 8 * (STAGES + i);
    }
    __device__ uint32_t v_full(int i) const
    {
        return base + 96 + 8 * (2 * STAGES + i);
    }
    __device__ uint32_t v_empty(int i) const
    {
        return base + 96 + 8 * (3 * STAGES + i);
    }
};

struct ForwardWork {
    int head, row0, n_blocks; /* n_blocks < 0: no more tiles */
    int q0, k0, len_q, len_k, shift;
};

// Which rows a tile number stands for. Heads are taken heads_together at a time, so that their keys and
// values stay in the L2 cache; within such a set the longest rows of all heads come first.
template <class C> __device__ __forceinline__ ForwardWork forward_work(const ForwardParams &p, int tile)
{
    const int per_set = p.heads_together * p.n_row_blocks;
    const int set = tile / per_set, within = tile - set * per_set;
    const int n_all = p.shape.n_docs * p.shape.n_heads;
    const int n_here = min(p.heads_together, n_all - set * p.heads_together);
    const int row_block = p.n_row_blocks - 1 - within / n_here;
    const int doc_head = set * p.heads_together + within % n_here;
    ForwardWork w;
    const int doc = doc_head / p.shape.n_heads;
    const Document at = document(p.shape, doc);
    w.head = doc_head - doc * p.shape.n_heads;
    w.q0 = at.q0, w.k0 = at.k0, w.len_q = at.len_q, w.len_k = at.len_k, w.shift = at.shift;
    w.row0 = row_block * C::BM;
    int n_keys = w.len_k;
    if (C::CAUSAL) n_keys = min(n_keys, min(w.row0 + C::BM, w.len_q) + w.shift);
    w.n_blocks = n_keys > 0 ? (n_keys + C::BN - 1) / C::BN : 0;
    return w;
}

template <class C>
__device__ __forceinline__ void forward_producer(const ForwardParams &p, const CUtensorMap *map_q,
                                                 const CUtensorMap *map_k, const CUtensorMap *map_v,
                                                 uint32_t smem, ForwardWork *slots)
{
    constexpr int CHUNKS = C::D / 64;
    const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
    int stage = 0, phase = 0, n_taken = 0;

    // Takes tiles from the one given on until one has rows, describes it to the consumers and loads its Q.
    const auto begin = [&](int tile) {
        ForwardWork w;
        w.n_blocks = -1;
        for (; tile < p.n_tiles; tile = gridDim.x + atomicAdd(&p.counter[0], 1)) {
            w = forward_work<C>(p, tile);
            if (w.row0 < w.len_q) break;
            w.n_blocks = -1;
        }
        const int slot = n_taken & 1, at = n_taken & 3;
        mbar_wait(bars.tile_empty(at), (n_taken >> 2 & 1) ^ 1);
        slots[at] = w;
        mbar_arrive(bars.tile_full(at));
        if (w.n_blocks < 0) return w;
        mbar_wait(bars.q_empty(slot), (n_taken >> 1 & 1) ^ 1);
        n_taken++;
        if (w.n_blocks == 0) {
            mbar_arrive(bars.q_full(slot));
            return w;
        }
        mbar_arrive_expect(bars.q_full(slot), C::Q_BYTES);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            tma_load(smem + C::Q_AT + slot * C::Q_BYTES + c * C::BM * 128, map_q, bars.q_full(slot), c * 64,
                     w.head, w.q0 + w.row0);
        return w;
    };

    for (ForwardWork w = begin(blockIdx.x); w.n_blocks >= 0;) {
        // The next tile is asked for two blocks before this one's end and begun one block later, which hides
        // the ways of the counter and of Q; not sooner, so that no block holds a tile that another could
        // begin.
        int tile = 0;
        ForwardWork next;
        if (w.n_blocks == 0) tile = gridDim.x + atomicAdd(&p.counter[0], 1);
        const int head_kv = w.head / p.shape.group;
#pragma unroll 1
        for (int n = w.n_blocks - 1; n >= 0; n--) {
            if (n == min(2, w.n_blocks - 1)) tile = gridDim.x + atomicAdd(&p.counter[0], 1);
            const int token = w.k0 + n * C::BN;
            const uint32_t k_at = smem + C::K_AT + stage * C::KV_BYTES,
                           v_at = smem + C::V_AT + stage * C::KV_BYTES;
            mbar_wait(bars.k_empty(stage), phase ^ 1);
            mbar_arrive_expect(bars.k_full(stage), C::KV_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                tma_load(k_at + c * C::BN * 128, map_k, bars.k_full(stage), c * 64, head_kv, token);
            if (n == 0) next = begin(tile);
            mbar_wait(bars.v_empty(stage), phase ^ 1);
            mbar_arrive_expect(bars.v_full(stage), C::KV_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                tma_load(v_at + c * C::BN * 128, map_v, bars.v_full(stage), c * 64, head_kv, token);
            if (++stage == C::STAGES) stage = 0, phase ^= 1;
        }
        if (w.n_blocks == 0) next = begin(tile);
        w = next;
    }
    // Every block has taken its last tile number once all of them have come here.
    __threadfence();
    if (atomicAdd(&p.counter[1], 1) == gridDim.x - 1) {
        p.counter[0] = 0;
        p.counter[1] = 0;
    }
}

// Running softmax of one thread's two rows (i = 0: row lane / 4, i = 1: eight rows further down).
struct Rows {
    float max[2], sum[2];
};

// New row maxima; base is what exponents are measured from, alpha what earlier sums shrink by. limit[i]
// counts the columns that row i may see, relative to this thread's first column; scores beyond it become
// -infinity.
template <int BN, bool MASKED>
__device__ __forceinline__ void row_maxima(float (&s)[BN / 2], Rows &rows, float (&base)[2],
                                           float (&alpha)[2], const int (&limit)[2], float scale_log2)
{
    // Two chains a row, both rows at once: the chains' latencies hide each other.
    float top[2][2] = {{rows.max[0], -INFINITY}, {rows.max[1], -INFINITY}};
#pragma unroll
    for (int j = 0; j < BN / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[4 * j + 2 * i + c];
                if (MASKED && 8 * j + c >= limit[i]) x = -INFINITY;
                top[i][c] = fmaxf(top[i][c], x);
            }
#pragma unroll
    for (int i = 0; i < 2; i++)
        top[i][0] = fmaxf(top[i][0], top[i][1]);
#pragma unroll
    for (int i = 0; i < 2; i++)
        top[i][0] = fmaxf(top[i][0], __shfl_xor_sync(0xffffffffu, top[i][0], 1));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i][0] = fmaxf(top[i][0], __shfl_xor_sync(0xffffffffu, top[i][0], 2));
        base[i] = MASKED && top[i][0] == -INFINITY ? 0.f : top[i][0] * scale_log2;
        alpha[i] = exp2_fast(rows.max[i] * scale_log2 - base[i]);
        rows.max[i] = top[i][0];
    }
}

// Turns scores into probabilities and adds them to the row sums.
template <int BN>
__device__ __forceinline__ void exponentials(float (&s)[BN / 2], Rows &rows, const float (&base)[2],
                                             const float (&alpha)[2], float scale_log2)
{
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < BN / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[4 * j + 2 * i + c];
                x = exp2_fast(x * scale_log2 - base[i]);
                sum[i][c] += x;
            }
#pragma unroll
    for (int i = 0; i < 2; i++)
        rows.sum[i] = rows.sum[i] * alpha[i] + (sum[i][0] + sum[i][1]);
}

template <class T, int N>
__device__ __forceinline__ void to_operand(const float (&s)[2 * N], uint32_t (&p)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

// S = Q K^T for this group's 64 rows.
template <class C> __device__ __forceinline__ void issue_scores(float (&s)[C::BN / 2], uint32_t q, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < C::D / 16; i++)
        Wgmma<typename C::T, C::BN>::template ss<0, 0>(s, operand(q, (i / 4) * C::BM * 128 + (i % 4) * 32),
                                                       operand(k, (i / 4) * C::BN * 128 + (i % 4) * 32),
                                                       i > 0);
    wgmma_commit();
}

// O += P V.
template <class C>
__device__ __forceinline__ void issue_output(float (&o)[C::D / 2], uint32_t (&p)[C::BN / 4], uint32_t v)
{
#pragma unroll
    for (int i = 0; i < C::BN / 16; i++)
        Wgmma<typename C::T, C::D>::template rs<1>(o, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3],
                                                   operand(v, i * 2048), 1);
    wgmma_commit();
}

template <class C>
__device__ __forceinline__ void store_output(const ForwardParams &p, const ForwardWork &w,
                                             float (&o)[C::D / 2], Rows &rows, int row_in_tile, int lane)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = rows.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const int row = w.row0 + row_in_tile + 8 * i;
        const bool inside = row < w.len_q;
        const int64_t token = w.q0 + row;
        if (inside && (lane & 3) == 0)
            p.lse[(int64_t)w.head * p.shape.n_tokens_q + token] =
                sum > 0.f ? rows.max[i] * p.shape.scale + logf(sum) : -INFINITY;
        store_row<typename C::T, C::D>(o, i, inverse, inside, lane,
                                       static_cast<uint16_t *>(p.o) + token * p.o_token_stride +
                                           w.head * p.o_head_stride);
    }
}

template <class C>
__device__ __forceinline__ void forward_consumer(const ForwardParams &p, uint32_t smem,
                                                 const ForwardWork *slots)
{
    constexpr int BN = C::BN;
    using T = typename C::T;
    const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
    const int group = uniform(threadIdx.x / 128 - 1), lane = threadIdx.x % 32;
    const int row_in_tile = (threadIdx.x - 128) / 32 * 16 + lane / 4;
    const float scale_log2 = p.shape.scale_log2;
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % C::WG;
    if (group == C::WG - 1) named_arrive<256>(1);

    float o[C::D / 2], s[BN / 2];
    uint32_t prob[BN / 4];
#pragma unroll
    for (int i = 0; i < BN / 4; i++)
        prob[i] = 0;
#pragma unroll
    for (int i = 0; i < C::D / 2; i++)
        o[i] = 0.f;

    // Blocks are counted through all tiles: block i lies in stage i % STAGES, its round's parity is i /
    // STAGES % 2.
    unsigned block = 0;
    const auto stage = [](unsigned i) { return (int)(i % C::STAGES); };
    const auto parity = [](unsigned i) { return i / C::STAGES & 1; };
    const auto k_at = [&](unsigned i) { return operand_low(smem + C::K_AT + stage(i) * C::KV_BYTES, 0); };
    const auto v_at = [&](unsigned i) {
        return operand_low(smem + C::V_AT + stage(i) * C::KV_BYTES, BN * 128);
    };
    const auto release = [&](uint32_t bar) {
        if (lane == 0) mbar_arrive(bar);
    };

    bool pending = false; /* the tile before still lacks its last product and its output */
    unsigned n_taken = 0;
    Rows rows, old_rows;
    const auto store_old = [&] {
        const int at = (n_taken - 1) & 3;
        store_output<C>(p, slots[at], o, old_rows, row_in_tile, lane);
        __syncwarp();
        release(bars.tile_empty(at));
        pending = false;
    };
    const auto finish = [&] {
        mbar_wait(bars.v_full(stage(block - 1)), parity(block - 1));
        pin(o);
        pin(prob);
        wgmma_fence();
        issue_output<C>(o, prob, v_at(block - 1));
        wgmma_wait<0>();
        pin(o);
        release(bars.v_empty(stage(block - 1)));
        store_old();
    };

    for (;; n_taken++) {
        mbar_wait(bars.tile_full(n_taken & 3), n_taken >> 2 & 1);
        const ForwardWork &w = slots[n_taken & 3];
        int n = uniform(w.n_blocks) - 1;
        if (n < -1) break;
        // Of this group's rows: blocks from n_group on are seen by none, blocks below n_free whole by all.
        const int first_row = w.row0 + group * 64, end_row = min(first_row + 64, w.len_q);
        int n_group = first_row < w.len_q ? w.n_blocks : 0, n_free = w.len_k / BN;
        if (C::CAUSAL) {
            n_group = min(n_group, max(0, end_row + w.shift + BN - 1) / BN);
            n_free = min(n_free, max(0, first_row + w.shift + 1) / BN);
        }
        n_group = uniform(n_group), n_free = uniform(n_free);
        const int q_slot = n_taken & 1;
        const uint32_t q_at = operand_low(smem + C::Q_AT + q_slot * C::Q_BYTES + group * 64 * 128, 0);
        mbar_wait(bars.q_full(q_slot), n_taken >> 1 & 1);

        if (pending && n >= n_group) finish();
#pragma unroll 1
        for (; n >= n_group; n--, block++) {
            named_sync<256>(my_turn);
            named_arrive<256>(next_turn);
            mbar_wait(bars.k_full(stage(block)), parity(block));
            release(bars.k_empty(stage(block)));
            mbar_wait(bars.v_full(stage(block)), parity(block));
            release(bars.v_empty(stage(block)));
        }
        rows = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
        if (n_group == 0) {
            if (pending) finish();
            release(bars.q_empty(q_slot));
#pragma unroll
            for (int i = 0; i < C::D / 2; i++)
                o[i] = 0.f;
            store_output<C>(p, w, o, rows, row_in_tile, lane);
            __syncwarp();
            release(bars.tile_empty(n_taken & 3));
            continue;
        }

        auto step = [&](auto masked, auto first) {
            const uint32_t k = k_at(block), v = v_at(block - 1);
            mbar_wait(bars.k_full(stage(block)), parity(block));
            named_sync<256>(my_turn);
            pin(s);
            pin(o);
            pin(prob);
            wgmma_fence();
            issue_scores<C>(s, q_at, k);
            // With nothing pending this product is of no use and what it reads of no meaning: o is cleared
            // below.
            if (!first.value || pending) mbar_wait(bars.v_full(stage(block - 1)), parity(block - 1));
            wgmma_fence();
            issue_output<C>(o, prob, v);
            named_arrive<256>(next_turn);
            wgmma_wait<1>();
            pin(s);
            release(bars.k_empty(stage(block)));
            if (n == 0) release(bars.q_empty(q_slot));
            int limit[2];
            if (masked.value) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    limit[i] = w.len_k;
                    if (C::CAUSAL) limit[i] = min(limit[i], w.row0 + row_in_tile + 8 * i + w.shift + 1);
                    limit[i] -= n * BN + 2 * (lane & 3);
                }
            }
            float base[2], alpha[2];
            row_maxima<BN, decltype(masked)::value>(s, rows, base, alpha, limit, scale_log2);
            // The product ends about when the maxima are known. Waiting here rather than after the
            // exponentials lets packing and rescaling fill the issue slots that the special-function unit
            // leaves.
            wgmma_wait<0>();
            pin(o);
            pin(prob);
            if (!first.value || pending) release(bars.v_empty(stage(block - 1)));
            exponentials<BN>(s, rows, base, alpha, scale_log2);
            to_operand<T>(s, prob);
            if (first.value) {
                if (pending) store_old();
#pragma unroll
                for (int i = 0; i < C::D / 2; i++)
                    o[i] = 0.f;
            } else {
#pragma unroll
                for (int i = 0; i < C::D / 2; i++)
                    o[i] *= alpha[(i / 2) & 1];
            }
            n--;
            block++;
        };
        step(std::true_type{}, std::true_type{});
#pragma unroll 1
        while (n >= n_free)
            step(std::true_type{}, std::false_type{});
#pragma unroll 1
        while (n >= 0)
            step(std::false_type{}, std::false_type{});
        pending = true;
        old_rows = rows;
    }
    if (pending) finish();
    // The last turn that was passed on stays with group 0: take it, so that no barrier is left half full.
    if (group == 0) named_sync<256>(1);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ CUtensorMap map_q,
                   const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v)
{
    extern __shared__ char raw[];
    __shared__ ForwardWork slots[4];
    const uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
        for (int i = 0; i < 2; i++) {
            mbar_init(bars.q_full(i), 1);
            mbar_init(bars.q_empty(i), 4 * C::WG);
        }
        for (int i = 0; i < 4; i++) {
            mbar_init(bars.tile_full(i), 1);
            mbar_init(bars.tile_empty(i), 4 * C::WG);
        }
        for (int i = 0; i < C::STAGES; i++) {
            mbar_init(bars.k_full(i), 1);
            mbar_init(bars.k_empty(i), 4 * C::WG);
            mbar_init(bars.v_full(i), 1);
            mbar_init(bars.v_empty(i), 4 * C::WG);
        }
        mbar_init_fence();
        tma_prefetch_map(&map_q);
        tma_prefetch_map(&map_k);
        tma_prefetch_map(&map_v);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) forward_producer<C>(p, &map_q, &map_k, &map_v, smem, slots);
    } else {
        registers_take<C::CONSUMER_REGISTERS>();
        forward_consumer<C>(p, smem, slots);
    }
}

} // namespace zx
