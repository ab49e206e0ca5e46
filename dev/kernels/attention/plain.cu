// Flash attention, plain: the reading material, and the path for every GPU from sm_80 on.
//
// DESIGN. A block of 128 threads works on a tile of 16 rows; eight neighbouring threads own a row. Tiles of
// 16 rows of the other side pass through shared memory as fp32. Scores never reach memory: the forward pass
// keeps a running maximum and sum per row and rescales its output when the maximum moves; the backward pass
// computes the probabilities again from the stored log-sum-exp. Nothing is added atomically, so all results
// are the same bits every time.
//
//   forward   P = softmax(scale Q K^T), O = P V, lse = log sum exp(scale Q K^T)
//   backward  delta = rowsum(dO o O), dP = dO V^T, dS = P o (dP - delta)
//             dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>

#include "launch.cuh"
#include "shape.cuh"

namespace zx
{

constexpr int ROWS = 16, LANES = 8, THREADS = ROWS * LANES;

__device__ float load(const __nv_bfloat16 *p)
{
    return __bfloat162float(*p);
}
__device__ float load(const __half *p)
{
    return __half2float(*p);
}
__device__ void store(__nv_bfloat16 *p, float x)
{
    *p = __float2bfloat16(x);
}
__device__ void store(__half *p, float x)
{
    *p = __float2half(x);
}

// Rows of one document's head; D + 1 floats a row keep the eight owners of a column in different banks.
template <int D> struct Buffer {
    float at[ROWS][D + 1];
};

template <class T, int D>
__device__ void read_tile(Buffer<D> &tile, const zx_attn_view &view, int head, int token0, int row0,
                          int n_rows)
{
    for (int i = threadIdx.x; i < ROWS * D; i += THREADS) {
        const int r = i / D, c = i % D;
        const T *p = static_cast<const T *>(view.data) + (int64_t)(token0 + row0 + r) * view.token_stride +
                     head * view.head_stride + c;
        tile.at[r][c] = row0 + r < n_rows ? load(p) : 0.f;
    }
}

template <class T, int D>
__device__ void write_row(const float (&x)[D / LANES], float factor, const zx_attn_view &view, int head,
                          int64_t token)
{
    T *p = static_cast<T *>(view.data) + token * view.token_stride + head * view.head_stride +
           threadIdx.x % LANES;
    for (int i = 0; i < D / LANES; i++)
        store(p + i * LANES, x[i] * factor);
}

template <int D> __device__ float dot(const float (&a)[D + 1], const float (&b)[D + 1])
{
    float sum = 0.f;
    for (int c = 0; c < D; c++)
        sum += a[c] * b[c];
    return sum;
}

__device__ float row_sum(float x)
{
    for (int step = 1; step < LANES; step *= 2)
        x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

__device__ float row_max(float x)
{
    for (int step = 1; step < LANES; step *= 2)
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
    return x;
}

__device__ bool sees(const Document &doc, int causal, int row, int key)
{
    return row < doc.len_q && key < doc.len_k && (!causal || key <= row + doc.shift);
}

// Keys that rows below row_end can see.
__device__ int keys_seen(const Document &doc, int causal, int row_end)
{
    return causal ? max(0, min(doc.len_k, row_end + doc.shift)) : doc.len_k;
}

template <class T, int D>
__global__ void plain_forward_kernel(Shape shape, int causal, zx_attn_view q, zx_attn_view k, zx_attn_view v,
                                     zx_attn_view o, float *lse)
{
    __shared__ Buffer<D> tile_q, tile_k, tile_v;
    __shared__ float prob[ROWS][ROWS + 1];
    const Document doc = document(shape, blockIdx.z);
    const int head = blockIdx.y, head_kv = head / shape.group;
    const int row0 = blockIdx.x * ROWS, r = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = row0 + r;
    if (row0 >= doc.len_q) return;
    read_tile<T>(tile_q, q, head, doc.q0, row0, doc.len_q);
    float top = -INFINITY, sum = 0.f, out[D / LANES] = {};
    const int n_keys = keys_seen(doc, causal, row0 + ROWS);
    for (int key0 = 0; key0 < n_keys; key0 += ROWS) {
        __syncthreads();
        read_tile<T>(tile_k, k, head_kv, doc.k0, key0, doc.len_k);
        read_tile<T>(tile_v, v, head_kv, doc.k0, key0, doc.len_k);
        __syncthreads();
        float score[ROWS / LANES], new_top = top;
        for (int j = 0; j < ROWS / LANES; j++) {
            const int key = lane + j * LANES;
            score[j] = sees(doc, causal, row, key0 + key) ? shape.scale * dot<D>(tile_q.at[r], tile_k.at[key])
                                                          : -INFINITY;
            new_top = fmaxf(new_top, score[j]);
        }
        new_top = row_max(new_top);
        const float base = new_top == -INFINITY ? 0.f : new_top, shrink = expf(top - base);
        top = new_top;
        sum *= shrink;
        for (int j = 0; j < ROWS / LANES; j++) {
            const float x = expf(score[j] - base);
            sum += x;
            prob[r][lane + j * LANES] = x;
        }
        __syncwarp();
        for (int i = 0; i < D / LANES; i++) {
            out[i] *= shrink;
            for (int key = 0; key < ROWS; key++)
                out[i] += prob[r][key] * tile_v.at[key][lane + i * LANES];
        }
    }
    sum = row_sum(sum);
    if (row >= doc.len_q) return;
    write_row<T, D>(out, sum > 0.f ? 1.f / sum : 0.f, o, head, doc.q0 + row);
    if (lane == 0)
        lse[(int64_t)head * shape.n_tokens_q + doc.q0 + row] = sum > 0.f ? top + logf(sum) : -INFINITY;
}

// delta (n_heads, n_tokens_q): what dP is measured from.
template <class T, int D>
__global__ void plain_delta_kernel(Shape shape, zx_attn_view o, zx_attn_view d_o, float *delta)
{
    const int token = blockIdx.x * ROWS + threadIdx.x / LANES, head = blockIdx.y, lane = threadIdx.x % LANES;
    float sum = 0.f;
    if (token < shape.n_tokens_q)
        for (int c = lane; c < D; c += LANES)
            sum += load(static_cast<const T *>(o.data) + token * o.token_stride + head * o.head_stride + c) *
                   load(static_cast<const T *>(d_o.data) + token * d_o.token_stride + head * d_o.head_stride +
                        c);
    sum = row_sum(sum);
    if (token < shape.n_tokens_q && lane == 0) delta[(int64_t)head * shape.n_tokens_q + token] = sum;
}

// One thread's probability and score gradient for a row and a key; 0 where the row does not see the key.
template <int D>
__device__ void pair_gradient(const Shape &shape, bool seen, const float (&q)[D + 1], const float (&k)[D + 1],
                              const float (&v)[D + 1], const float (&d_o)[D + 1], float lse, float delta,
                              float &prob, float &d_score)
{
    prob = seen ? expf(shape.scale * dot<D>(q, k) - lse) : 0.f;
    d_score = seen ? prob * (dot<D>(d_o, v) - delta) : 0.f;
}

template <class T, int D>
__global__ void plain_dq_kernel(Shape shape, int causal, zx_attn_view q, zx_attn_view k, zx_attn_view v,
                                zx_attn_view d_o, const float *lse, const float *delta, zx_attn_view dq)
{
    __shared__ Buffer<D> tile_q, tile_do, tile_k, tile_v;
    __shared__ float d_score[ROWS][ROWS + 1];
    const Document doc = document(shape, blockIdx.z);
    const int head = blockIdx.y, head_kv = head / shape.group;
    const int row0 = blockIdx.x * ROWS, r = threadIdx.x / LANES, lane = threadIdx.x % LANES, row = row0 + r;
    if (row0 >= doc.len_q) return;
    read_tile<T>(tile_q, q, head, doc.q0, row0, doc.len_q);
    read_tile<T>(tile_do, d_o, head, doc.q0, row0, doc.len_q);
    const int64_t at = (int64_t)head * shape.n_tokens_q + doc.q0 + row;
    const float row_lse = row < doc.len_q ? lse[at] : 0.f, row_delta = row < doc.len_q ? delta[at] : 0.f;
    float out[D / LANES] = {};
    const int n_keys = keys_seen(doc, causal, row0 + ROWS);
    for (int key0 = 0; key0 < n_keys; key0 += ROWS) {
        __syncthreads();
        read_tile<T>(tile_k, k, head_kv, doc.k0, key0, doc.len_k);
        read_tile<T>(tile_v, v, head_kv, doc.k0, key0, doc.len_k);
        __syncthreads();
        for (int key = lane; key < ROWS; key += LANES) {
            float prob;
            pair_gradient<D>(shape, sees(doc, causal, row, key0 + key), tile_q.at[r], tile_k.at[key],
                             tile_v.at[key], tile_do.at[r], row_lse, row_delta, prob, d_score[r][key]);
        }
        __syncwarp();
        for (int i = 0; i < D / LANES; i++)
            for (int key = 0; key < ROWS; key++)
                out[i] += d_score[r][key] * tile_k.at[key][lane + i * LANES];
    }
    if (row < doc.len_q) write_row<T, D>(out, shape.scale, dq, head, doc.q0 + row);
}

// The tile is 16 keys; all query heads of their group are added up here.
template <class T, int D>
__global__ void plain_dkv_kernel(Shape shape, int causal, zx_attn_view q, zx_attn_view k, zx_attn_view v,
                                 zx_attn_view d_o, const float *lse, const float *delta, zx_attn_view dk,
                                 zx_attn_view dv)
{
    __shared__ Buffer<D> tile_q, tile_do, tile_k, tile_v;
    __shared__ float prob[ROWS][ROWS + 1], d_score[ROWS][ROWS + 1];
    const Document doc = document(shape, blockIdx.z);
    const int head_kv = blockIdx.y, key0 = blockIdx.x * ROWS;
    const int r = threadIdx.x / LANES, lane = threadIdx.x % LANES, key = key0 + r;
    if (key0 >= doc.len_k) return;
    read_tile<T>(tile_k, k, head_kv, doc.k0, key0, doc.len_k);
    read_tile<T>(tile_v, v, head_kv, doc.k0, key0, doc.len_k);
    float out_k[D / LANES] = {}, out_v[D / LANES] = {};
    const int first = causal ? max(0, key0 - doc.shift) / ROWS * ROWS : 0;
    for (int head = head_kv * shape.group; head < (head_kv + 1) * shape.group; head++)
        for (int row0 = first; row0 < doc.len_q; row0 += ROWS) {
            __syncthreads();
            read_tile<T>(tile_q, q, head, doc.q0, row0, doc.len_q);
            read_tile<T>(tile_do, d_o, head, doc.q0, row0, doc.len_q);
            __syncthreads();
            for (int row = lane; row < ROWS; row += LANES) {
                const bool seen = sees(doc, causal, row0 + row, key);
                const int64_t at = (int64_t)head * shape.n_tokens_q + doc.q0 + row0 + row;
                pair_gradient<D>(shape, seen, tile_q.at[row], tile_k.at[r], tile_v.at[r], tile_do.at[row],
                                 seen ? lse[at] : 0.f, seen ? delta[at] : 0.f, prob[r][row], d_score[r][row]);
            }
            __syncwarp();
            for (int i = 0; i < D / LANES; i++)
                for (int row = 0; row < ROWS; row++) {
                    out_k[i] += d_score[r][row] * tile_q.at[row][lane + i * LANES];
                    out_v[i] += prob[r][row] * tile_do.at[row][lane + i * LANES];
                }
        }
    if (key >= doc.len_k) return;
    write_row<T, D>(out_k, shape.scale, dk, head_kv, doc.k0 + key);
    write_row<T, D>(out_v, 1.f, dv, head_kv, doc.k0 + key);
}

static int tiles(int64_t n_rows)
{
    return (int)((n_rows + ROWS - 1) / ROWS);
}

template <class T, int D> static int forward(const zx_attn_forward_args &a, cudaStream_t stream)
{
    const zx_attn_problem &p = a.problem;
    if (p.max_len_q == 0) return ZX_ATTN_OK;
    const dim3 grid(tiles(p.max_len_q), p.n_heads, (unsigned)p.n_docs);
    plain_forward_kernel<T, D>
        <<<grid, THREADS, 0, stream>>>(make_shape(p), p.causal, a.q, a.k, a.v, a.o, a.lse);
    return check_cuda(cudaGetLastError(), "launch of the plain forward kernel");
}

template <class T, int D> static int backward(const zx_attn_backward_args &a, cudaStream_t stream)
{
    const zx_attn_problem &p = a.problem;
    const Shape shape = make_shape(p);
    float *delta = static_cast<float *>(a.workspace);
    if (p.n_tokens_q > 0) {
        const dim3 all(tiles(p.n_tokens_q), p.n_heads),
            rows(tiles(p.max_len_q), p.n_heads, (unsigned)p.n_docs);
        plain_delta_kernel<T, D><<<all, THREADS, 0, stream>>>(shape, a.o, a.d_o, delta);
        ZX_ATTN_TRY(check_cuda(cudaGetLastError(), "launch of the plain delta kernel"));
        plain_dq_kernel<T, D>
            <<<rows, THREADS, 0, stream>>>(shape, p.causal, a.q, a.k, a.v, a.d_o, a.lse, delta, a.dq);
        ZX_ATTN_TRY(check_cuda(cudaGetLastError(), "launch of the plain dQ kernel"));
    }
    if (p.n_tokens_k == 0) return ZX_ATTN_OK;
    const dim3 keys(tiles(p.max_len_k), p.n_heads_kv, (unsigned)p.n_docs);
    plain_dkv_kernel<T, D>
        <<<keys, THREADS, 0, stream>>>(shape, p.causal, a.q, a.k, a.v, a.d_o, a.lse, delta, a.dk, a.dv);
    return check_cuda(cudaGetLastError(), "launch of the plain dK, dV kernel");
}

int plain_forward(const zx_attn_forward_args &a, cudaStream_t stream)
{
    if (a.problem.dtype == ZX_ATTN_BF16)
        return a.problem.head_dim == 64 ? forward<__nv_bfloat16, 64>(a, stream)
                                        : forward<__nv_bfloat16, 128>(a, stream);
    return a.problem.head_dim == 64 ? forward<__half, 64>(a, stream) : forward<__half, 128>(a, stream);
}

int plain_backward(const zx_attn_backward_args &a, cudaStream_t stream)
{
    if (a.problem.dtype == ZX_ATTN_BF16)
        return a.problem.head_dim == 64 ? backward<__nv_bfloat16, 64>(a, stream)
                                        : backward<__nv_bfloat16, 128>(a, stream);
    return a.problem.head_dim == 64 ? backward<__half, 64>(a, stream) : backward<__half, 128>(a, stream);
}

size_t plain_backward_workspace(const zx_attn_problem &p)
{
    return sizeof(float) * p.n_heads * p.n_tokens_q;
}

}  // namespace zx
