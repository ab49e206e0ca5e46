// Flash attention forward for Hopper.
//
// DESIGN. A block is one producer warp and two or three consumer warp groups; a consumer group owns 64 query
// rows of the block's tile. The producer takes tiles off a global counter (longest first when causal) and
// feeds Q once and K, V block by block through the copy engine, as far ahead as the stages allow, across tile
// boundaries. A consumer keeps its output, its scores and its probabilities in registers: the score
// accumulator of the first product has the register layout that the second product wants of its A operand.
// Step n issues S(n) = Q K(n)^T and O += P(n+1) V(n+1) together, and does the softmax of S(n) while the second
// runs. The groups take turns to issue (named barriers in a ring), so that one group's softmax runs under
// another group's products. Key blocks go from last to first: the masked ones come first.
#pragma once

#include <type_traits>

#include "hopper.cuh"
#include "shape.cuh"

namespace zx {

template <class Element, int HEAD_DIM, int KEYS, int GROUPS, int STAGE_COUNT, bool IS_CAUSAL> struct ForwardTile {
    using T = Element;
    static constexpr int D = HEAD_DIM, BN = KEYS, WG = GROUPS, STAGES = STAGE_COUNT, BM = 64 * GROUPS;
    static constexpr bool CAUSAL = IS_CAUSAL;
    static constexpr int THREADS = 128 * (WG + 1);
    static constexpr int Q_BYTES = BM * D * 2, KV_BYTES = BN * D * 2;
    static constexpr int Q_AT = 0, K_AT = Q_BYTES, V_AT = K_AT + STAGES * KV_BYTES;
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

// Barrier addresses; each pair is (filled by the producer, emptied by the consumers).
template <int STAGES> struct ForwardBars {
    uint32_t base;
    __device__ uint32_t q_full() const { return base; }
    __device__ uint32_t q_empty() const { return base + 8; }
    __device__ uint32_t tile_full(int i) const { return base + 16 + 8 * i; }
    __device__ uint32_t tile_empty(int i) const { return base + 32 + 8 * i; }
    __device__ uint32_t k_full(int i) const { return base + 48 + 8 * i; }
    __device__ uint32_t k_empty(int i) const { return base + 48 + 8 * (STAGES + i); }
    __device__ uint32_t v_full(int i) const { return base + 48 + 8 * (2 * STAGES + i); }
    __device__ uint32_t v_empty(int i) const { return base + 48 + 8 * (3 * STAGES + i); }
    static constexpr int COUNT = 6 + 4 * STAGES;
};

struct ForwardWork {
    Document doc;
    int head, row0, n_blocks;
};

// Which rows a tile number stands for. Heads are taken heads_together at a time, so that their keys and values
// stay in the L2 cache; within such a set the longest rows of all heads come first.
template <class C> __device__ __forceinline__ ForwardWork forward_work(const ForwardParams &p, int tile) {
    const int per_set = p.heads_together * p.n_row_blocks;
    const int set = tile / per_set, within = tile - set * per_set;
    const int n_all = p.shape.n_docs * p.shape.n_heads;
    const int n_here = min(p.heads_together, n_all - set * p.heads_together);
    const int row_block = p.n_row_blocks - 1 - within / n_here;
    const int doc_head = set * p.heads_together + within % n_here;
    ForwardWork w;
    const int doc = doc_head / p.shape.n_heads;
    w.head = doc_head - doc * p.shape.n_heads;
    w.doc = document(p.shape, doc);
    w.row0 = row_block * C::BM;
    int n_keys = w.doc.len_k;
    if (C::CAUSAL) n_keys = min(n_keys, w.row0 + C::BM + w.doc.shift);
    w.n_blocks = n_keys > 0 ? (n_keys + C::BN - 1) / C::BN : 0;
    return w;
}

template <class C>
__device__ __forceinline__ void forward_producer(const ForwardParams &p, const CUtensorMap *map_q,
                                                 const CUtensorMap *map_k, const CUtensorMap *map_v, uint32_t smem,
                                                 int *tile_slots) {
    constexpr int CHUNKS = C::D / 64;
    const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
    int stage = 0, phase = 0, n_taken = 0;
    for (int tile = blockIdx.x;; tile = gridDim.x + atomicAdd(&p.counter[0], 1)) {
        ForwardWork w;
        if (tile < p.n_tiles) {
            w = forward_work<C>(p, tile);
            if (w.row0 >= w.doc.len_q) continue;
        }
        const int slot = n_taken & 1, round = n_taken >> 1;
        mbar_wait(bars.tile_empty(slot), (round & 1) ^ 1);
        tile_slots[slot] = tile;
        mbar_arrive(bars.tile_full(slot));
        if (tile >= p.n_tiles) break;
        mbar_wait(bars.q_empty(), (n_taken & 1) ^ 1);
        n_taken++;
        if (w.n_blocks == 0) {
            mbar_arrive(bars.q_full());
            continue;
        }
        mbar_arrive_expect(bars.q_full(), C::Q_BYTES);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
            tma_load(smem + C::Q_AT + c * C::BM * 128, map_q, bars.q_full(), c * 64, w.head, w.doc.q0 + w.row0);
        const int head_kv = w.head / p.shape.group;
        for (int n = w.n_blocks - 1; n >= 0; n--) {
            const int token = w.doc.k0 + n * C::BN;
            const uint32_t k_at = smem + C::K_AT + stage * C::KV_BYTES, v_at = smem + C::V_AT + stage * C::KV_BYTES;
            mbar_wait(bars.k_empty(stage), phase ^ 1);
            mbar_arrive_expect(bars.k_full(stage), C::KV_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                tma_load(k_at + c * C::BN * 128, map_k, bars.k_full(stage), c * 64, head_kv, token);
            mbar_wait(bars.v_empty(stage), phase ^ 1);
            mbar_arrive_expect(bars.v_full(stage), C::KV_BYTES);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++)
                tma_load(v_at + c * C::BN * 128, map_v, bars.v_full(stage), c * 64, head_kv, token);
            if (++stage == C::STAGES) stage = 0, phase ^= 1;
        }
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

// Turns scores into probabilities relative to the new row maxima; alpha is what earlier sums shrink by.
// limit[i] counts the columns that row i may see, relative to this thread's first column.
template <int BN, bool MASKED>
__device__ __forceinline__ void softmax_step(float (&s)[BN / 2], Rows &rows, float (&alpha)[2], const int (&limit)[2],
                                             float scale_log2) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float top = rows.max[i];
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[4 * j + 2 * i + c];
                if (MASKED && 8 * j + c >= limit[i]) x = -INFINITY;
                top = fmaxf(top, x);
            }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float base = MASKED && top == -INFINITY ? 0.f : top * scale_log2;
        alpha[i] = exp2_fast(rows.max[i] * scale_log2 - base);
        rows.max[i] = top;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < BN / 8; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float &x = s[4 * j + 2 * i + c];
                x = exp2_fast(x * scale_log2 - base);
                sum += x;
            }
        rows.sum[i] = rows.sum[i] * alpha[i] + sum;
    }
}

template <class T, int N> __device__ __forceinline__ void to_operand(const float (&s)[2 * N], uint32_t (&p)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

// S = Q K^T for this group's 64 rows.
template <class C> __device__ __forceinline__ void issue_scores(float (&s)[C::BN / 2], uint32_t q_at, uint32_t k_at) {
#pragma unroll
    for (int k = 0; k < C::D / 16; k++)
        Wgmma<typename C::T, C::BN>::template ss<0, 0>(
            s, operand(q_at + (k / 4) * C::BM * 128 + (k % 4) * 32, 0),
            operand(k_at + (k / 4) * C::BN * 128 + (k % 4) * 32, 0), k > 0);
    wgmma_commit();
}

// O += P V.
template <class C>
__device__ __forceinline__ void issue_output(float (&o)[C::D / 2], uint32_t (&p)[C::BN / 4], uint32_t v_at, int keep) {
#pragma unroll
    for (int k = 0; k < C::BN / 16; k++)
        Wgmma<typename C::T, C::D>::template rs<1>(o, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                                   operand(v_at + k * 2048, C::BN * 128), k > 0 ? 1 : keep);
    wgmma_commit();
}

template <class C>
__device__ __forceinline__ void store_output(const ForwardParams &p, const ForwardWork &w, float (&o)[C::D / 2],
                                             Rows &rows, int row_in_tile, int lane) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float sum = rows.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float inverse = sum > 0.f ? 1.f / sum : 0.f;
        const int row = w.row0 + row_in_tile + 8 * i;
        const bool inside = row < w.doc.len_q;
        const int64_t token = w.doc.q0 + row;
        if (inside && (lane & 3) == 0)
            p.lse[(int64_t)w.head * p.shape.n_tokens_q + token] =
                sum > 0.f ? rows.max[i] * p.shape.scale + logf(sum) : -INFINITY;
        uint16_t *out = static_cast<uint16_t *>(p.o) + token * p.o_token_stride + w.head * p.o_head_stride;
#pragma unroll
        for (int j = 0; j < C::D / 32; j++) {
            uint32_t words[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const int at = 4 * (4 * j + k) + 2 * i;
                words[k] = pack<typename C::T>(o[at] * inverse, o[at + 1] * inverse);
            }
            quad_transpose(words, lane);
            if (inside)
                *reinterpret_cast<uint4 *>(out + 32 * j + 8 * (lane & 3)) =
                    make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

template <class C>
__device__ __forceinline__ void forward_consumer(const ForwardParams &p, uint32_t smem, const int *tile_slots) {
    constexpr int BN = C::BN;
    const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
    const int group = threadIdx.x / 128 - 1, lane = threadIdx.x % 32;
    const int row_in_tile = (threadIdx.x - 128) / 32 * 16 + lane / 4;
    const uint32_t q_at = smem + C::Q_AT + group * 64 * 128;
    const float scale_log2 = p.shape.scale_log2;
    const int my_turn = 1 + group, next_turn = 1 + (group + 1) % C::WG;
    if (group == C::WG - 1) named_arrive<256>(1);

    float o[C::D / 2], s[BN / 2], alpha[2];
    uint32_t prob[BN / 4];
    int k_stage = 0, k_phase = 0, v_stage = 0, v_phase = 0;
    for (int n_done = 0;; n_done++) {
        const int slot = n_done & 1;
        mbar_wait(bars.tile_full(slot), (n_done >> 1) & 1);
        const int tile = tile_slots[slot];
        __syncwarp();
        if (lane == 0) mbar_arrive(bars.tile_empty(slot));
        if (tile >= p.n_tiles) break;
        const ForwardWork w = forward_work<C>(p, tile);
        Rows rows = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
        mbar_wait(bars.q_full(), n_done & 1);
        if (w.n_blocks == 0) {
            if (lane == 0) mbar_arrive(bars.q_empty());
#pragma unroll
            for (int i = 0; i < C::D / 2; i++) o[i] = 0.f;
            store_output<C>(p, w, o, rows, row_in_tile, lane);
            continue;
        }

        // Columns that each row sees, counted from this thread's first column of key block 0.
        int seen[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            seen[i] = w.doc.len_k;
            if (C::CAUSAL) seen[i] = min(seen[i], w.row0 + row_in_tile + 8 * i + w.doc.shift + 1);
            seen[i] -= 2 * (lane & 3);
        }
        // Blocks below n_free are seen whole by every row of the tile.
        const int n_seen = C::CAUSAL ? min(w.doc.len_k, w.row0 + w.doc.shift + 1) : w.doc.len_k;
        const int n_free = n_seen > 0 ? n_seen / BN : 0;

        int n = w.n_blocks - 1;
        mbar_wait(bars.k_full(k_stage), k_phase);
        pin(s);
        wgmma_fence();
        issue_scores<C>(s, q_at, smem + C::K_AT + k_stage * C::KV_BYTES);
        wgmma_wait<0>();
        pin(s);
        if (lane == 0) mbar_arrive(bars.k_empty(k_stage));
        if (++k_stage == C::STAGES) k_stage = 0, k_phase ^= 1;
        {
            const int limit[2] = {seen[0] - n * BN, seen[1] - n * BN};
            softmax_step<BN, true>(s, rows, alpha, limit, scale_log2);
        }
        to_operand<typename C::T>(s, prob);

        int keep = 0;
        auto step = [&](auto masked) {
            mbar_wait(bars.k_full(k_stage), k_phase);
            named_sync<256>(my_turn);
            pin(s);
            pin(o);
            pin(prob);
            wgmma_fence();
            issue_scores<C>(s, q_at, smem + C::K_AT + k_stage * C::KV_BYTES);
            mbar_wait(bars.v_full(v_stage), v_phase);
            issue_output<C>(o, prob, smem + C::V_AT + v_stage * C::KV_BYTES, keep);
            keep = 1;
            named_arrive<256>(next_turn);
            wgmma_wait<1>();
            pin(s);
            if (lane == 0) mbar_arrive(bars.k_empty(k_stage));
            if (++k_stage == C::STAGES) k_stage = 0, k_phase ^= 1;
            const int limit[2] = {seen[0] - n * BN, seen[1] - n * BN};
            softmax_step<BN, decltype(masked)::value>(s, rows, alpha, limit, scale_log2);
            wgmma_wait<0>();
            pin(o);
            pin(prob);
            if (lane == 0) mbar_arrive(bars.v_empty(v_stage));
            if (++v_stage == C::STAGES) v_stage = 0, v_phase ^= 1;
            to_operand<typename C::T>(s, prob);
#pragma unroll
            for (int i = 0; i < C::D / 2; i++) o[i] *= alpha[(i / 2) & 1];
        };
#pragma unroll 1
        for (n--; n >= n_free; n--) step(std::true_type{});
#pragma unroll 1
        for (; n >= 0; n--) step(std::false_type{});

        if (lane == 0) mbar_arrive(bars.q_empty());
        mbar_wait(bars.v_full(v_stage), v_phase);
        pin(o);
        pin(prob);
        wgmma_fence();
        issue_output<C>(o, prob, smem + C::V_AT + v_stage * C::KV_BYTES, keep);
        wgmma_wait<0>();
        pin(o);
        if (lane == 0) mbar_arrive(bars.v_empty(v_stage));
        if (++v_stage == C::STAGES) v_stage = 0, v_phase ^= 1;
        store_output<C>(p, w, o, rows, row_in_tile, lane);
    }
    // The last turn that was passed on stays with group 0: take it, so that no barrier is left half full.
    if (group == 0) named_sync<256>(1);
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
    forward_kernel(const __grid_constant__ ForwardParams p, const __grid_constant__ CUtensorMap map_q,
                   const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v) {
    extern __shared__ char raw[];
    __shared__ int tile_slots[2];
    const uint32_t smem = (smem_address(raw) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        const ForwardBars<C::STAGES> bars{smem + C::BARS_AT};
        mbar_init(bars.q_full(), 1);
        mbar_init(bars.q_empty(), 4 * C::WG);
        for (int i = 0; i < 2; i++) {
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
        if (threadIdx.x == 0) forward_producer<C>(p, &map_q, &map_k, &map_v, smem, tile_slots);
    } else {
        registers_take<C::CONSUMER_REGISTERS>();
        forward_consumer<C>(p, smem, tile_slots);
    }
}

}  // namespace zx
