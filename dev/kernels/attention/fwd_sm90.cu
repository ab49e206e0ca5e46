// Launcher of the Hopper forward kernel: picks the tile, makes the tensor maps, sizes the persistent grid.
#include <algorithm>
#include <type_traits>

#include "fwd_sm90.cuh"
#include "launch.cuh"

namespace zx
{

// notes.md has the measurements behind these. Without a mask 160 keys a block are faster than 128 as long as
// the last block is not mostly empty.
template <class T, bool CAUSAL> using Tile64 = ForwardTile<T, 64, 128, 3, 4, CAUSAL>;
template <class T, bool CAUSAL> using Tile128 = ForwardTile<T, 128, 128, 2, 2, CAUSAL>;
template <class T> using WideTile128 = ForwardTile<T, 128, 160, 2, 2, false>;

static bool wide_pays(const zx_attn_problem &p)
{
    const int64_t n = p.max_len_k, at_128 = (n + 127) / 128 * 128, at_160 = (n + 159) / 160 * 160;
    return !p.causal && at_160 * 50 <= at_128 * 51;
}

// Heads whose rows are mixed. Causal: those whose keys and values fit together in about half of the L2 cache,
// so that the longest rows of many heads come first, but enough for some tiles for every multiprocessor; all
// sets about as large. Otherwise all rows cost the same: one key head at a time.
static int heads_together(const zx_attn_problem &p, int n_row_blocks, int n_sm, size_t l2_bytes)
{
    const int group = p.n_heads / p.n_heads_kv;
    if (!p.causal) return group;
    const int64_t one = std::max<int64_t>(p.max_len_k, 1) * p.head_dim * 4,
                  per_head = (int64_t)n_row_blocks * group;
    const int64_t fit = std::max<int64_t>(1, (int64_t)l2_bytes / 2 / one), n = p.n_docs * p.n_heads_kv;
    const int64_t enough = (3 * n_sm + per_head - 1) / per_head;
    const int64_t n_sets = std::max<int64_t>(1, std::min((n + fit - 1) / fit, n / enough));
    return (int)((n + n_sets - 1) / n_sets) * group;
}

template <class C> static int launch(const zx_attn_forward_args &a, cudaStream_t stream)
{
    const zx_attn_problem &p = a.problem;
    CUtensorMap map_q, map_k, map_v;
    ZX_ATTN_TRY(make_map(&map_q, p.dtype, a.q, p.n_tokens_q, p.n_heads, C::D, C::BM, "q"));
    map_k = map_v = map_q; /* not read when there are no keys */
    const bool keys = p.n_tokens_k > 0;
    if (keys) ZX_ATTN_TRY(make_map(&map_k, p.dtype, a.k, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "k"));
    if (keys) ZX_ATTN_TRY(make_map(&map_v, p.dtype, a.v, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "v"));
    int n_sm;
    size_t l2_bytes;
    ZX_ATTN_TRY(multiprocessors(&n_sm, &l2_bytes));
    ForwardParams f;
    f.shape = make_shape(p);
    f.o = a.o.data, f.o_token_stride = a.o.token_stride, f.o_head_stride = a.o.head_stride;
    f.lse = a.lse;
    f.counter = static_cast<unsigned *>(a.workspace);
    f.n_row_blocks = (int)((p.max_len_q + C::BM - 1) / C::BM);
    const int64_t n_tiles = p.n_docs * p.n_heads * f.n_row_blocks;
    if (n_tiles > INT32_MAX / 2)
        return fail(ZX_ATTN_UNSUPPORTED, "%lld tiles are too many", (long long)n_tiles);
    f.n_tiles = (int)n_tiles;
    if (n_tiles == 0) return ZX_ATTN_OK;
    f.heads_together = heads_together(p, f.n_row_blocks, n_sm, l2_bytes);
    const auto kernel = forward_kernel<C>;
    ZX_ATTN_TRY(
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES),
                   "shared memory of the forward kernel"));
    kernel<<<std::min(n_sm, f.n_tiles), C::THREADS, C::SMEM_BYTES, stream>>>(f, map_q, map_k, map_v);
    return check_cuda(cudaGetLastError(), "launch of the forward kernel");
}

template <class T> static int dispatch(const zx_attn_forward_args &a, cudaStream_t stream)
{
    const bool causal = a.problem.causal;
    if (a.problem.head_dim == 64)
        return causal ? launch<Tile64<T, true>>(a, stream) : launch<Tile64<T, false>>(a, stream);
    if (causal) return launch<Tile128<T, true>>(a, stream);
    return wide_pays(a.problem) ? launch<WideTile128<T>>(a, stream) : launch<Tile128<T, false>>(a, stream);
}

int hopper_forward(const zx_attn_forward_args &a, cudaStream_t stream)
{
    return a.problem.dtype == ZX_ATTN_BF16 ? dispatch<__nv_bfloat16>(a, stream) : dispatch<__half>(a, stream);
}

}  // namespace zx
