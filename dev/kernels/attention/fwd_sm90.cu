// Launcher of the Hopper forward kernel: picks the tile, makes the tensor maps, sizes the persistent grid.
#include <algorithm>
#include <type_traits>

#include "fwd_sm90.cuh"
#include "launch.cuh"

namespace zx {

// Tile choice by head dimension and mask; notes.md has the measurements.
template <class T, int D, bool CAUSAL>
using Tile = std::conditional_t<D == 64, ForwardTile<T, 64, 128, 3, 2, CAUSAL>,
                                ForwardTile<T, 128, CAUSAL ? 128 : 176, 2, 2, CAUSAL>>;

// Heads whose keys and values fit together in about half of the L2 cache, a multiple of the group size.
static int heads_together(const zx_attn_problem &p, size_t l2_bytes) {
    const size_t one = (size_t)std::max<int64_t>(p.max_len_k, 1) * p.head_dim * 4;
    const int64_t fit = std::max<int64_t>(1, (int64_t)(l2_bytes / 2 / one));
    return (int)std::min<int64_t>(fit * (p.n_heads / p.n_heads_kv), p.n_docs * p.n_heads);
}

template <class C> static int launch(const zx_attn_forward_args &a, cudaStream_t stream) {
    const zx_attn_problem &p = a.problem;
    CUtensorMap map_q, map_k, map_v;
    ZX_ATTN_TRY(make_map(&map_q, p.dtype, a.q, p.n_tokens_q, p.n_heads, C::D, C::BM, "q"));
    ZX_ATTN_TRY(make_map(&map_k, p.dtype, a.k, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "k"));
    ZX_ATTN_TRY(make_map(&map_v, p.dtype, a.v, p.n_tokens_k, p.n_heads_kv, C::D, C::BN, "v"));
    int n_sm;
    size_t l2_bytes;
    ZX_ATTN_TRY(multiprocessors(&n_sm, &l2_bytes));
    ForwardParams f;
    f.shape = make_shape(p);
    f.o = a.o.data, f.o_token_stride = a.o.token_stride, f.o_head_stride = a.o.head_stride;
    f.lse = a.lse;
    f.counter = static_cast<unsigned *>(a.workspace);
    f.n_row_blocks = (int)((p.max_len_q + C::BM - 1) / C::BM);
    f.heads_together = heads_together(p, l2_bytes);
    const int64_t n_tiles = p.n_docs * p.n_heads * f.n_row_blocks;
    if (n_tiles > INT32_MAX / 2) return fail(ZX_ATTN_UNSUPPORTED, "%lld tiles are too many", (long long)n_tiles);
    f.n_tiles = (int)n_tiles;
    if (n_tiles == 0) return ZX_ATTN_OK;
    const auto kernel = forward_kernel<C>;
    ZX_ATTN_TRY(check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, C::SMEM_BYTES),
                           "shared memory of the forward kernel"));
    kernel<<<std::min(n_sm, f.n_tiles), C::THREADS, C::SMEM_BYTES, stream>>>(f, map_q, map_k, map_v);
    return check_cuda(cudaGetLastError(), "launch of the forward kernel");
}

template <class T> static int dispatch(const zx_attn_forward_args &a, cudaStream_t stream) {
    const bool causal = a.problem.causal;
    if (a.problem.head_dim == 64)
        return causal ? launch<Tile<T, 64, true>>(a, stream) : launch<Tile<T, 64, false>>(a, stream);
    return causal ? launch<Tile<T, 128, true>>(a, stream) : launch<Tile<T, 128, false>>(a, stream);
}

int hopper_forward(const zx_attn_forward_args &a, cudaStream_t stream) {
    return a.problem.dtype == ZX_ATTN_BF16 ? dispatch<__nv_bfloat16>(a, stream) : dispatch<__half>(a, stream);
}

}  // namespace zx
