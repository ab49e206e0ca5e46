// Launcher of the Hopper backward kernels.
#include <algorithm>

#include "bwd_sm90.cuh"
#include "launch.cuh"

namespace zx
{

template <class T, bool CAUSAL, bool ORDERED> using Tile64 = BackwardTile<T, 64, 128, CAUSAL, ORDERED>;
template <class T, bool CAUSAL, bool ORDERED> using Tile128 = BackwardTile<T, 128, 64, CAUSAL, ORDERED>;

static int query_rows(int head_dim)
{
    return head_dim == 64 ? 128 : 64;
}

static int64_t query_blocks(const zx_attn_problem &p)
{
    return p.n_tokens_q / query_rows(p.head_dim) + p.n_docs;
}

static size_t dq_sum_bytes(const zx_attn_problem &p)
{
    return sizeof(float) * p.n_heads * query_blocks(p) * query_rows(p.head_dim) * p.head_dim;
}

static size_t stats_bytes(const zx_attn_problem &p)
{
    return sizeof(float2) * p.n_heads * query_blocks(p) * query_rows(p.head_dim);
}

static size_t turns_bytes(const zx_attn_problem &p)
{
    return sizeof(unsigned) * 2 * p.n_heads * query_blocks(p);
}

size_t hopper_backward_workspace(const zx_attn_problem &p)
{
    return 256 + dq_sum_bytes(p) + stats_bytes(p) + turns_bytes(p);
}

// Heads whose tiles are mixed. Causal: those whose queries fit together in about half of the L2 cache, so
// that the longest tiles of many heads come first, but enough for some tiles for every multiprocessor.
// Ordered: enough heads that few blocks at a time wait for each other. Otherwise all tiles cost the same: one
// head at a time.
static int heads_together(const zx_attn_problem &p, int n_key_blocks, int n_sm, size_t l2_bytes)
{
    if (!p.causal && !p.deterministic) return 1;
    const int64_t one = std::max<int64_t>(p.max_len_q, 1) * p.head_dim * 8 * (p.n_heads / p.n_heads_kv);
    const int64_t fit = std::max<int64_t>(1, (int64_t)l2_bytes / 2 / one), n = p.n_docs * p.n_heads_kv;
    const int64_t enough =
        p.deterministic ? n_sm / 4 : (2 * n_sm + n_key_blocks - 1) / std::max(1, n_key_blocks);
    const int64_t n_sets = std::max<int64_t>(1, std::min((n + fit - 1) / fit, n / enough));
    return (int)((n + n_sets - 1) / n_sets);
}

static int aligned(const zx_attn_view &view, const char *name)
{
    if (((uintptr_t)view.data & 15) || view.token_stride % 8 || view.head_stride % 8)
        return fail(ZX_ATTN_UNSUPPORTED,
                    "%s must lie at a multiple of 16 bytes with strides of multiples of 8 elements", name);
    return ZX_ATTN_OK;
}

template <class C> static int launch(const zx_attn_backward_args &a, cudaStream_t stream)
{
    const zx_attn_problem &p = a.problem;
    BackwardParams b;
    b.shape = make_shape(p);
    b.o = a.o, b.d_o = a.d_o, b.dq = a.dq, b.dk = a.dk, b.dv = a.dv, b.lse = a.lse;
    ZX_ATTN_TRY(aligned(a.o, "o"));
    ZX_ATTN_TRY(aligned(a.dq, "dq"));
    ZX_ATTN_TRY(aligned(a.dk, "dk"));
    ZX_ATTN_TRY(aligned(a.dv, "dv"));
    char *work = static_cast<char *>(a.workspace);
    b.counter = reinterpret_cast<unsigned *>(work);
    b.dq_sum = reinterpret_cast<float *>(work + 256);
    b.stats = reinterpret_cast<float *>(work + 256 + dq_sum_bytes(p));
    b.turns = reinterpret_cast<unsigned *>(work + 256 + dq_sum_bytes(p) + stats_bytes(p));
    b.n_query_blocks = (int)query_blocks(p);
    b.n_key_blocks = (int)((p.max_len_k + C::BN - 1) / C::BN);
    int n_sm;
    size_t l2_bytes;
    ZX_ATTN_TRY(multiprocessors(&n_sm, &l2_bytes));
    b.heads_together = heads_together(p, b.n_key_blocks, n_sm, l2_bytes);
    const int64_t n_tiles = p.n_docs * p.n_heads_kv * b.n_key_blocks;
    if (n_tiles > INT32_MAX / 2)
        return fail(ZX_ATTN_UNSUPPORTED, "%lld tiles are too many", (long long)n_tiles);
    b.n_tiles = (int)n_tiles;
    const dim3 rows((unsigned)std::max<int64_t>(1, (p.max_len_q + C::BM - 1) / C::BM), p.n_heads,
                    (unsigned)p.n_docs);
    backward_begin_kernel<C><<<rows, 256, 0, stream>>>(b);
    ZX_ATTN_TRY(check_cuda(cudaGetLastError(), "launch of the first backward kernel"));
    if (n_tiles > 0 && p.n_tokens_k > 0) {
        CUtensorMap map_q, map_k, map_v, map_do;
        const bool queries = p.n_tokens_q > 0;
        ZX_ATTN_TRY(make_map(&map_k, p.dtype, a.k, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "k"));
        ZX_ATTN_TRY(make_map(&map_v, p.dtype, a.v, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "v"));
        map_q = map_do = map_k; /* not read when there are no queries */
        if (queries) ZX_ATTN_TRY(make_map(&map_q, p.dtype, a.q, p.n_tokens_q, p.n_heads, C::D, C::BM, "q"));
        if (queries)
            ZX_ATTN_TRY(make_map(&map_do, p.dtype, a.d_o, p.n_tokens_q, p.n_heads, C::D, C::BM, "d_o"));
        const auto kernel = backward_kernel<C>;
        ZX_ATTN_TRY(check_cuda(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES),
            "shared memory of the backward kernel"));
        kernel<<<std::min(n_sm, b.n_tiles), C::THREADS, C::SMEM_BYTES, stream>>>(b, map_q, map_k, map_v,
                                                                                 map_do);
        ZX_ATTN_TRY(check_cuda(cudaGetLastError(), "launch of the backward kernel"));
    }
    backward_end_kernel<C><<<rows, 256, 0, stream>>>(b);
    return check_cuda(cudaGetLastError(), "launch of the last backward kernel");
}

template <class T, bool ORDERED> static int dispatch(const zx_attn_backward_args &a, cudaStream_t stream)
{
    const bool causal = a.problem.causal;
    if (a.problem.head_dim == 64)
        return causal ? launch<Tile64<T, true, ORDERED>>(a, stream)
                      : launch<Tile64<T, false, ORDERED>>(a, stream);
    return causal ? launch<Tile128<T, true, ORDERED>>(a, stream)
                  : launch<Tile128<T, false, ORDERED>>(a, stream);
}

int hopper_backward(const zx_attn_backward_args &a, cudaStream_t stream)
{
    if (a.problem.deterministic)
        return a.problem.dtype == ZX_ATTN_BF16 ? dispatch<__nv_bfloat16, true>(a, stream)
                                               : dispatch<__half, true>(a, stream);
    return a.problem.dtype == ZX_ATTN_BF16 ? dispatch<__nv_bfloat16, false>(a, stream)
                                           : dispatch<__half, false>(a, stream);
}

}  // namespace zx
