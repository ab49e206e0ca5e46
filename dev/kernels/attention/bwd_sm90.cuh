// Flash attention backward for Hopper.
//
// DESIGN. Three kernels. The first works out delta = rowsum(dO o O) and clears the fp32 sum of dQ; the last
// turns that sum into dq. Between them a block owns 128 keys of one key head (64 for each of its two consumer
// warp groups) and walks over all query blocks that see them, of all query heads of the group, so dK and dV
// stay in registers to the end and grouped heads need no further sum. With everything transposed (keys are
// rows)
//     S^T = K Q^T,  dP^T = V dO^T,  P^T = exp2(S^T - lse),  dS^T = P^T o (dP^T - delta)
//     dV += P^T dO,  dK += dS^T Q,  dQ = dS K
// P^T and dS^T are where the next product wants its A operand: in registers. Only dQ sums over keys, so both
// groups' dS go through shared memory, and dQ is added into global memory in the order of the registers (rows
// are put in place by the last kernel) while the product of dK runs.
//
// In the ordered (deterministic) mode a block adds to a query block's dQ once all blocks of earlier keys
// have: a counter per query block and group says how many have. Tiles are taken in the order of their keys,
// so whoever is waited for was begun before, and nobody waits in a circle: a turn is passed on before the
// next tile is waited for. One more warp for each group watches the counters and passes the turns on, so that
// the group does not wait for memory.
//
// Rows of queries are counted in blocks of BM that do not cross documents: document i begins at block
// q0 / BM + i, which leaves room for every document's last, partly filled block.
#pragma once

#include "hopper.cuh"
#include "shape.cuh"

namespace zx
{

template <class Element, int HEAD_DIM, int QUERIES, bool IS_CAUSAL, bool IN_ORDER> struct BackwardTile {
    using T = Element;
    static constexpr int D = HEAD_DIM, BM = QUERIES, BN = 128, STAGES = 2;
    static constexpr bool CAUSAL = IS_CAUSAL, ORDERED = IN_ORDER;
    // With 128 queries a step, P and dP do not fit in the registers together with both gradients of the keys,
    // unless P and dS are worked out at once; with 64, P is worked out while dP is.
    static constexpr bool JOINT = BM == 128;
    static constexpr int THREADS = 384, CHUNKS = D / 64;
    static constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;
    static constexpr int KV_BYTES = BN * D * 2, Q_BYTES = BM * D * 2, DS_BYTES = BM * BN * 2,
                         STAT_BYTES = BM * 8;
    static constexpr int K_AT = 0, V_AT = K_AT + 2 * KV_BYTES, Q_AT = V_AT + KV_BYTES,
                         DO_AT = Q_AT + 2 * Q_BYTES;
    static constexpr int DS_AT = DO_AT + 2 * Q_BYTES, STAT_AT = DS_AT + 2 * DS_BYTES,
                         BARS_AT = STAT_AT + 2 * STAT_BYTES;
    static constexpr int SMEM_BYTES = BARS_AT + 256 + 1024; /* room to align the tiles to 1024 bytes */
    static_assert(SMEM_BYTES <= 232448, "shared memory of one block");
};

struct BackwardParams {
    Shape shape;
    zx_attn_view o, d_o, dq, dk, dv;
    const float *lse;
    float *
        stats; /* (n_heads, n_query_blocks, 2, BM): lse * log2(e), or infinity for rows without keys; delta */
    float *dq_sum; /* (n_heads, n_query_blocks, BM * D) in the order of the registers */
    unsigned
        *turns; /* (n_heads, n_query_blocks, 2): key blocks that have added to dq_sum; ordered mode only */
    unsigned *counter; /* [0] next tile, [1] blocks that are done; the first kernel clears both */
    int n_query_blocks, n_tiles, n_key_blocks, heads_together;
};

struct BackwardWork {
    int head_kv, key0, n_steps; /* n_steps < 0: no more tiles */
    int q0, k0, len_k, shift;
    int query_block0; /* of the document */
    int first, end; /* query blocks that see the tile's keys, counted in the document */
};

template <int BM> __device__ __forceinline__ int first_query_block(const Document &d, int doc)
{
    return d.q0 / BM + doc;
}

// Tiles by set of heads, in a set from the first keys (seen by most queries when causal) to the last.
template <class C> __device__ __forceinline__ BackwardWork backward_work(const BackwardParams &p, int tile)
{
    const int per_set = p.heads_together * p.n_key_blocks;
    const int set = tile / per_set, within = tile - set * per_set;
    const int n_here = min(p.heads_together, p.shape.n_docs * p.shape.n_heads_kv - set * p.heads_together);
    const int doc_head = set * p.heads_together + within % n_here;
    const int doc = doc_head / p.shape.n_heads_kv;
    const Document at = document(p.shape, doc);
    BackwardWork w;
    w.head_kv = doc_head - doc * p.shape.n_heads_kv;
    w.key0 = within / n_here * C::BN;
    w.q0 = at.q0, w.k0 = at.k0, w.len_k = at.len_k, w.shift = at.shift;
    w.query_block0 = first_query_block<C::BM>(at, doc);
    w.end = (at.len_q + C::BM - 1) / C::BM;
    w.first = C::CAUSAL ? min(max(0, w.key0 - at.shift) / C::BM, w.end) : 0;
    w.n_steps = (w.end - w.first) * p.shape.group;
    return w;
}

struct BackwardBars {
    uint32_t base;
    __device__ uint32_t k_full(int i) const
    {
        return base + 8 * i;
    }
    __device__ uint32_t k_empty(int i) const
    {
        return base + 16 + 8 * i;
    }
    __device__ uint32_t q_full(int i) const
    {
        return base + 32 + 8 * i;
    }
    __device__ uint32_t q_empty(int i) const
    {
        return base + 48 + 8 * i;
    }
    __device__ uint32_t do_full(int i) const
    {
        return base + 64 + 8 * i;
    }
    __device__ uint32_t do_empty(int i) const
    {
        return base + 80 + 8 * i;
    }
    __device__ uint32_t tile_full(int i) const
    {
        return base + 96 + 8 * i;
    }
    __device__ uint32_t tile_empty(int i) const
    {
        return base + 128 + 8 * i;
    }
    __device__ uint32_t turn(int group, int i) const
    {
        return base + 176 + 16 * group + 8 * i;
    }
    __device__ uint32_t added(int group, int i) const
    {
        return base + 208 + 16 * group + 8 * i;
    }
    __device__ uint32_t v_full() const
    {
        return base + 160;
    }
    __device__ uint32_t v_empty() const
    {
        return base + 168;
    }
};

template <class C>
__device__ __forceinline__ void
backward_producer(const BackwardParams &p, const CUtensorMap *map_q, const CUtensorMap *map_k,
                  const CUtensorMap *map_v, const CUtensorMap *map_do, uint32_t smem, BackwardWork *slots)
{
    const BackwardBars bars{smem + C::BARS_AT};
    unsigned step = 0, n_taken = 0, n_loaded = 0;
    for (int tile = blockIdx.x;; tile = gridDim.x + atomicAdd(&p.counter[0], 1)) {
        BackwardWork w;
        w.n_steps = -1;
        if (tile < p.n_tiles) {
            w = backward_work<C>(p, tile);
            if (w.key0 >= w.len_k) continue;
        }
        const int at = n_taken & 3;
        mbar_wait(bars.tile_empty(at), (n_taken >> 2 & 1) ^ 1);
        slots[at] = w;
        mbar_arrive(bars.tile_full(at));
        n_taken++;
        if (w.n_steps < 0) break;
        if (w.n_steps == 0) continue;
        const int k = n_loaded & 1;
        mbar_wait(bars.k_empty(k), (n_loaded >> 1 & 1) ^ 1);
        mbar_arrive_expect(bars.k_full(k), C::KV_BYTES);
#pragma unroll
        for (int c = 0; c < C::CHUNKS; c++)
            tma_load(smem + C::K_AT + k * C::KV_BYTES + c * C::BN * 128, map_k, bars.k_full(k), c * 64,
                     w.head_kv, w.k0 + w.key0);
        bool first = true;
#pragma unroll 1
        for (int head = w.head_kv * p.shape.group; head < (w.head_kv + 1) * p.shape.group; head++)
#pragma unroll 1
            for (int m = w.first; m < w.end; m++, step++) {
                const int s = step & 1, round = step >> 1 & 1, token = w.q0 + m * C::BM;
                const float *stats =
                    p.stats + ((int64_t)head * p.n_query_blocks + w.query_block0 + m) * (2 * C::BM);
                mbar_wait(bars.q_empty(s), round ^ 1);
                mbar_arrive_expect(bars.q_full(s), C::Q_BYTES + C::STAT_BYTES);
#pragma unroll
                for (int c = 0; c < C::CHUNKS; c++)
                    tma_load(smem + C::Q_AT + s * C::Q_BYTES + c * C::BM * 128, map_q, bars.q_full(s), c * 64,
                             head, token);
                bulk_load(smem + C::STAT_AT + s * C::STAT_BYTES, stats, C::STAT_BYTES, bars.q_full(s));
                if (first) {
                    // V has one stage: it comes after the first Q, which need not wait for it.
                    first = false;
                    mbar_wait(bars.v_empty(), (n_loaded & 1) ^ 1);
                    n_loaded++;
                    mbar_arrive_expect(bars.v_full(), C::KV_BYTES);
#pragma unroll
                    for (int c = 0; c < C::CHUNKS; c++)
                        tma_load(smem + C::V_AT + c * C::BN * 128, map_v, bars.v_full(), c * 64, w.head_kv,
                                 w.k0 + w.key0);
                }
                mbar_wait(bars.do_empty(s), round ^ 1);
                mbar_arrive_expect(bars.do_full(s), C::Q_BYTES);
#pragma unroll
                for (int c = 0; c < C::CHUNKS; c++)
                    tma_load(smem + C::DO_AT + s * C::Q_BYTES + c * C::BM * 128, map_do, bars.do_full(s),
                             c * 64, head, token);
            }
    }
}

// Ordered mode: waits for each step's turn to add to dQ, tells the group, and passes the turn on once it has
// added.
template <class C>
__device__ __forceinline__ void backward_turns(const BackwardParams &p, uint32_t smem,
                                               const BackwardWork *slots, int group)
{
    const BackwardBars bars{smem + C::BARS_AT};
    unsigned step = 0;
    for (unsigned n_taken = 0;; n_taken++) {
        const int at = n_taken & 3;
        mbar_wait(bars.tile_full(at), n_taken >> 2 & 1);
        const BackwardWork w = slots[at];
        mbar_arrive(bars.tile_empty(at));
        if (w.n_steps < 0) return;
        unsigned *last = nullptr;
        const auto pass_on = [&] {
            if (!last) return;
            mbar_wait(bars.added(group, (step - 1) & 1), (step - 1) >> 1 & 1);
            add_release(last, 1);
        };
        for (int left = w.n_steps, m = w.first, head = w.head_kv * p.shape.group; left > 0; left--, step++) {
            unsigned *turn = p.turns + ((int64_t)head * p.n_query_blocks + w.query_block0 + m) * 2 + group;
            while (load_acquire(turn) != (unsigned)w.key0 / C::BN) {
            }
            mbar_arrive(bars.turn(group, step & 1));
            pass_on();
            last = turn;
            if (++m == w.end) m = w.first, head++;
        }
        pass_on();
    }
}

// acc (64 keys of this group, BM queries) = rows of a (K or V) times rows of b (Q or dO), both read along d.
template <class C>
__device__ __forceinline__ void issue_transposed(float (&acc)[C::BM / 2], uint32_t a, uint32_t b)
{
#pragma unroll
    for (int i = 0; i < C::D / 16; i++)
        Wgmma<typename C::T, C::BM>::template ss<0, 0>(acc, operand(a, (i / 4) * C::BN * 128 + (i % 4) * 32),
                                                       operand(b, (i / 4) * C::BM * 128 + (i % 4) * 32),
                                                       i > 0);
    wgmma_commit();
}

// acc (64 keys, D) += x^T (64 keys, BM queries, in registers) times b (BM queries, D).
template <class C>
__device__ __forceinline__ void issue_key_gradient(float (&acc)[C::D / 2], uint32_t (&x)[C::BM / 4],
                                                   uint32_t b)
{
#pragma unroll
    for (int i = 0; i < C::BM / 16; i++)
        Wgmma<typename C::T, C::D>::template rs<1>(acc, x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3],
                                                   operand(b, i * 2048), 1);
    wgmma_commit();
}

// acc (64 queries, 64 columns) = dS (64 queries, 128 keys) K (128 keys, 64 columns), both with keys as rows.
template <class C>
__device__ __forceinline__ void issue_query_gradient(float (&acc)[32], uint32_t ds, uint32_t k)
{
#pragma unroll
    for (int i = 0; i < C::BN / 16; i++)
        Wgmma<typename C::T, 64>::template ss<1, 1>(acc, operand(ds, i * 2048), operand(k, i * 2048), i > 0);
    wgmma_commit();
}

template <class C>
__device__ __forceinline__ void store_key_gradient(const BackwardParams &p, const BackwardWork &w,
                                                   const zx_attn_view &view, const float (&acc)[C::D / 2],
                                                   float factor, int row_in_tile, int lane)
{
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = w.key0 + row_in_tile + 8 * i;
        store_row<typename C::T, C::D>(acc, i, factor, row < w.len_k, lane,
                                       static_cast<uint16_t *>(view.data) +
                                           (int64_t)(w.k0 + row) * view.token_stride +
                                           w.head_kv * view.head_stride);
    }
}

template <class C>
__device__ __forceinline__ void backward_consumer(const BackwardParams &p, uint32_t smem,
                                                  const char *smem_generic, const BackwardWork *slots)
{
    using T = typename C::T;
    constexpr int BM = C::BM, D = C::D;
    const BackwardBars bars{smem + C::BARS_AT};
    const int group = uniform(threadIdx.x / 128 - 1), lane = threadIdx.x % 32, thread = threadIdx.x % 128;
    const int row_in_tile = (threadIdx.x - 128) / 32 * 16 + lane / 4;
    const float scale_log2 = p.shape.scale_log2;
    // dS^T of this warp: 16 keys; matrix l / 8 of a store is keys 0-7 or 8-15 (bit 0) of queries 0-7 or 8-15
    // (bit 1).
    const int ds_row = (threadIdx.x - 128) / 32 * 16 + lane % 16;
    const uint32_t ds_at = smem + C::DS_AT + ds_row * 128;

    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2];
    uint32_t prob[BM / 4], ds[BM / 4];
    const auto release = [&](uint32_t bar) {
        if (lane == 0) mbar_arrive(bar);
    };
    const auto a_operand = [&](int at, unsigned tile) {
        return operand_low(smem + at + (tile & 1) * C::KV_BYTES + group * 64 * 128, 0);
    };
    const auto b_operand = [&](int at, unsigned step, int chunk_bytes) {
        return operand_low(smem + at + (step & 1) * C::Q_BYTES, chunk_bytes);
    };

    unsigned n_taken = 0; /* tiles taken off the slots */
    // The next tile with work: its slot, or -1. Tiles that no query sees get their zeros here.
    const auto take = [&]() -> int {
        for (;; n_taken++) {
            const int at = n_taken & 3;
            mbar_wait(bars.tile_full(at), n_taken >> 2 & 1);
            const BackwardWork &w = slots[at];
            if (w.n_steps < 0) return -1;
            if (w.n_steps > 0) {
                n_taken++;
                return at;
            }
            const int row = w.key0 + (threadIdx.x - 128) / 2;
            if (row < w.len_k)
                for (int i = threadIdx.x % 2; i < 2 * D / 8; i += 2) {
                    const zx_attn_view &view = i < D / 8 ? p.dk : p.dv;
                    uint16_t *out = static_cast<uint16_t *>(view.data) +
                                    (int64_t)(w.k0 + row) * view.token_stride + w.head_kv * view.head_stride;
                    *reinterpret_cast<uint4 *>(out + i % (D / 8) * 8) = make_uint4(0, 0, 0, 0);
                }
            __syncwarp();
            release(bars.tile_empty(at));
        }
    };

    const auto say_added = [&](unsigned at) {
        device_fence();
        __syncwarp();
        release(bars.added(group, at & 1));
    };

    unsigned step = 0; /* counted through the whole kernel */
    for (unsigned n_tiles = 0;; n_tiles++) {
        const int slot = uniform(take());
        if (slot < 0) break;
        const BackwardWork &w = slots[slot];
        const uint32_t k = a_operand(C::K_AT, n_tiles), v = a_operand(C::V_AT, 0);
        const uint32_t k_all = operand_low(
            smem + C::K_AT + (n_tiles & 1) * C::KV_BYTES + (D == 128 ? group * C::BN * 128 : 0), 0);
#pragma unroll
        for (int i = 0; i < D / 2; i++)
            dk[i] = dv[i] = 0.f;
        int m = w.first, head = w.head_kv * p.shape.group;
        const int n_steps = uniform(w.n_steps);
        mbar_wait(bars.k_full(n_tiles & 1), n_tiles >> 1 & 1);
#pragma unroll 1
        for (int left = n_steps; left > 0; left--, step++) {
            const int stage = step & 1, parity = step >> 1 & 1;
            const uint32_t q = b_operand(C::Q_AT, step, BM * 128), d_o = b_operand(C::DO_AT, step, BM * 128);
            mbar_wait(bars.q_full(stage), parity);
            pin(s);
            wgmma_fence();
            issue_transposed<C>(s, k, q);
            mbar_wait(bars.v_full(), n_tiles & 1);
            mbar_wait(bars.do_full(stage), parity);
            pin(dp);
            wgmma_fence();
            issue_transposed<C>(dp, v, d_o);

            // lse, then delta, of the two queries of each eight that this thread holds.
            const float2 *stats =
                reinterpret_cast<const float2 *>(smem_generic + C::STAT_AT + stage * C::STAT_BYTES) +
                (lane & 3);
            float2 lse[C::JOINT ? 1 : BM / 8];
#pragma unroll
            for (int j = 0; j < BM / 8 && !C::JOINT; j++)
                lse[j] = stats[4 * j];
            // Of this thread's keys, query column j is seen from low[i] on.
            const bool masked =
                w.key0 + C::BN > w.len_k || (C::CAUSAL && m * BM + w.shift < w.key0 + C::BN - 1);
            int low[2];
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int key = w.key0 + row_in_tile + 8 * i;
                low[i] = C::CAUSAL ? key - w.shift - m * BM - 2 * (lane & 3) : 0;
                if (key >= w.len_k) low[i] = BM;
            }
            float *sum = p.dq_sum + ((int64_t)head * p.n_query_blocks + w.query_block0 + m) * (BM * D) +
                         group * (BM * D / 2) + thread * 4;
            if (++m == w.end) m = w.first, head++;
            wgmma_wait<C::JOINT ? 0 : 1>();
            pin(s);
            if (C::JOINT) pin(dp);
            if (masked) {
#pragma unroll
                for (int i = 0; i < 2; i++)
#pragma unroll
                    for (int j = 0; j < BM / 8; j++)
#pragma unroll
                        for (int c = 0; c < 2; c++)
                            if (8 * j + c < low[i]) s[4 * j + 2 * i + c] = -INFINITY;
            }
            const auto score_gradients = [&](int j) {
                const float2 delta = stats[BM / 2 + 4 * j];
                ds[2 * j] =
                    pack<T>(s[4 * j] * (dp[4 * j] - delta.x), s[4 * j + 1] * (dp[4 * j + 1] - delta.y));
                ds[2 * j + 1] = pack<T>(s[4 * j + 2] * (dp[4 * j + 2] - delta.x),
                                        s[4 * j + 3] * (dp[4 * j + 3] - delta.y));
            };
#pragma unroll
            for (int j = 0; j < BM / 8; j++) {
                const float2 x = C::JOINT ? stats[4 * j] : lse[C::JOINT ? 0 : j];
                s[4 * j] = exp2_fast(s[4 * j] * scale_log2 - x.x);
                s[4 * j + 1] = exp2_fast(s[4 * j + 1] * scale_log2 - x.y);
                s[4 * j + 2] = exp2_fast(s[4 * j + 2] * scale_log2 - x.x);
                s[4 * j + 3] = exp2_fast(s[4 * j + 3] * scale_log2 - x.y);
                prob[2 * j] = pack<T>(s[4 * j], s[4 * j + 1]);
                prob[2 * j + 1] = pack<T>(s[4 * j + 2], s[4 * j + 3]);
                if (C::JOINT) score_gradients(j);
            }
            pin(prob);
            pin(dv);
            wgmma_fence();
            issue_key_gradient<C>(dv, prob, d_o);
            if (!C::JOINT) {
                wgmma_wait<1>();
                pin(dp);
#pragma unroll
                for (int j = 0; j < BM / 8; j++)
                    score_gradients(j);
            }
            if (left == 1) release(bars.v_empty());
#pragma unroll
            for (int i = 0; i < BM / 16; i++) {
                const int chunk = 2 * (i % 4) + lane / 16;
                store_matrices(ds_at + stage * C::DS_BYTES + i / 4 * C::BN * 128 +
                                   ((chunk ^ (ds_row & 7)) << 4),
                               ds[4 * i], ds[4 * i + 1], ds[4 * i + 2], ds[4 * i + 3]);
            }
            async_proxy_fence();
            const uint32_t ds_all =
                operand_low(smem + C::DS_AT + stage * C::DS_BYTES + (BM == 128 ? group * C::BN * 128 : 0), 0);
            // What the step before added to dQ is in memory by now; after a tile's last step see below.
            if (C::ORDERED && left < n_steps) say_added(step - 1);
            named_sync<256>(1);
            // Each group has half of dQ: of its columns with D 128, of its rows with D 64. They are added to
            // memory under dK's product.
            float dq[32];
            pin(dq);
            pin(ds);
            pin(dk);
            wgmma_fence();
            issue_query_gradient<C>(dq, ds_all, k_all);
            issue_key_gradient<C>(dk, ds, q);
            wgmma_wait<1>();
            pin(dv);
            pin(prob);
            pin(dq);
            release(bars.do_empty(stage));
            if (C::ORDERED) mbar_wait(bars.turn(group, stage), parity);
#pragma unroll
            for (int i = 0; i < 8; i++)
                add_to_global(sum + i * 512, dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
            wgmma_wait<0>();
            pin(dk);
            pin(ds);
            release(bars.q_empty(stage));
        }
        release(bars.k_empty(n_tiles & 1));
        if (C::ORDERED) say_added(step - 1);
        store_key_gradient<C>(p, w, p.dk, dk, p.shape.scale, row_in_tile, lane);
        store_key_gradient<C>(p, w, p.dv, dv, 1.f, row_in_tile, lane);
        __syncwarp();
        release(bars.tile_empty(slot));
    }
}

template <class C>
__global__ void __launch_bounds__(C::THREADS, 1)
    backward_kernel(const __grid_constant__ BackwardParams p, const __grid_constant__ CUtensorMap map_q,
                    const __grid_constant__ CUtensorMap map_k, const __grid_constant__ CUtensorMap map_v,
                    const __grid_constant__ CUtensorMap map_do)
{
    extern __shared__ char raw[];
    __shared__ BackwardWork slots[4];
    const uint32_t raw_at = smem_address(raw), smem = (raw_at + 1023) & ~1023u;
    if (threadIdx.x == 0) {
        const BackwardBars bars{smem + C::BARS_AT};
        for (int i = 0; i < 2; i++) {
            mbar_init(bars.k_full(i), 1);
            mbar_init(bars.k_empty(i), 8);
            mbar_init(bars.q_full(i), 1);
            mbar_init(bars.q_empty(i), 8);
            mbar_init(bars.do_full(i), 1);
            mbar_init(bars.do_empty(i), 8);
        }
        for (int i = 0; i < 4; i++) {
            mbar_init(bars.turn(i / 2, i % 2), 1);
            mbar_init(bars.added(i / 2, i % 2), 4);
        }
        mbar_init(bars.v_full(), 1);
        mbar_init(bars.v_empty(), 8);
        for (int i = 0; i < 4; i++) {
            mbar_init(bars.tile_full(i), 1);
            mbar_init(bars.tile_empty(i), C::ORDERED ? 10 : 8);
        }
        mbar_init_fence();
        tma_prefetch_map(&map_q);
        tma_prefetch_map(&map_k);
        tma_prefetch_map(&map_v);
        tma_prefetch_map(&map_do);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_give<C::PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) backward_producer<C>(p, &map_q, &map_k, &map_v, &map_do, smem, slots);
        if (C::ORDERED && (threadIdx.x == 32 || threadIdx.x == 64))
            backward_turns<C>(p, smem, slots, threadIdx.x / 32 - 1);
    } else {
        registers_take<C::CONSUMER_REGISTERS>();
        backward_consumer<C>(p, smem, raw + (smem - raw_at), slots);
    }
}

// Delta and lse in base 2 for one block of queries; clears the block's dQ sum and the tile counter.
template <class C>
__global__ void __launch_bounds__(256) backward_begin_kernel(const __grid_constant__ BackwardParams p)
{
    constexpr int LANES = C::D / 8, ROWS = 256 / LANES;
    const int doc = blockIdx.z, head = blockIdx.y, m = blockIdx.x;
    const Document at = document(p.shape, doc);
    if (m == 0 && head == 0 && doc == 0 && threadIdx.x < 2) p.counter[threadIdx.x] = 0;
    if (m * C::BM >= at.len_q) return;
    const int64_t block = (int64_t)head * p.n_query_blocks + first_query_block<C::BM>(at, doc) + m;
    if (threadIdx.x < 2) p.turns[block * 2 + threadIdx.x] = 0;
    float4 *sum = reinterpret_cast<float4 *>(p.dq_sum + block * (C::BM * C::D));
#pragma unroll 4
    for (int i = threadIdx.x; i < C::BM * C::D / 4; i += 256)
        sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    const int lane = threadIdx.x % LANES;
#pragma unroll
    for (int r = threadIdx.x / LANES; r < C::BM; r += ROWS) {
        const int row = m * C::BM + r;
        const int64_t token = at.q0 + row;
        const bool inside = row < at.len_q;
        float delta = 0.f;
        if (inside) {
            const auto *o = static_cast<const typename C::T *>(p.o.data) + token * p.o.token_stride +
                            head * p.o.head_stride + lane * 8;
            const auto *d_o = static_cast<const typename C::T *>(p.d_o.data) + token * p.d_o.token_stride +
                              head * p.d_o.head_stride + lane * 8;
            alignas(16) typename C::T x[8], y[8];
            *reinterpret_cast<uint4 *>(x) = *reinterpret_cast<const uint4 *>(o);
            *reinterpret_cast<uint4 *>(y) = *reinterpret_cast<const uint4 *>(d_o);
#pragma unroll
            for (int i = 0; i < 8; i++)
                delta += static_cast<float>(x[i]) * static_cast<float>(y[i]);
        }
#pragma unroll
        for (int i = 1; i < LANES; i *= 2)
            delta += __shfl_xor_sync(0xffffffffu, delta, i);
        if (lane == 0) {
            const float lse = inside ? p.lse[(int64_t)head * p.shape.n_tokens_q + token] : -INFINITY;
            p.stats[block * (2 * C::BM) + r] = lse == -INFINITY ? INFINITY : lse * 1.44269504f;
            p.stats[block * (2 * C::BM) + C::BM + r] = inside ? delta : 0.f;
        }
    }
}

// dq = scale * sum, rows put in place.
template <class C>
__global__ void __launch_bounds__(256) backward_end_kernel(const __grid_constant__ BackwardParams p)
{
    const int doc = blockIdx.z, head = blockIdx.y, m = blockIdx.x;
    const Document at = document(p.shape, doc);
    if (m * C::BM >= at.len_q) return;
    const int64_t block = (int64_t)head * p.n_query_blocks + first_query_block<C::BM>(at, doc) + m;
    const int group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    const float *sum = p.dq_sum + block * (C::BM * C::D) + group * (C::BM * C::D / 2) + thread * 4;
    float acc[32];
#pragma unroll
    for (int i = 0; i < 8; i++)
        *reinterpret_cast<float4 *>(acc + 4 * i) = *reinterpret_cast<const float4 *>(sum + i * 512);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int row = m * C::BM + (C::BM == 128 ? group * 64 : 0) + thread / 32 * 16 + lane / 4 + 8 * i;
        store_row<typename C::T, 64>(acc, i, p.shape.scale, row < at.len_q, lane,
                                     static_cast<uint16_t *>(p.dq.data) + (at.q0 + row) * p.dq.token_stride +
                                         head * p.dq.head_stride + (C::D == 128 ? group * 64 : 0));
    }
}

} // namespace zx
