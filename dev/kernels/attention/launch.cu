// Entry points: refuse bad arguments with a sentence, pick the path, launch.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "launch.cuh"

namespace zx
{

static thread_local char message[512];

int fail(int status, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    vsnprintf(message, sizeof message, format, list);
    va_end(list);
    return status;
}

int check_cuda(cudaError_t e, const char *what)
{
    if (e == cudaSuccess) return ZX_ATTN_OK;
    cudaGetLastError();
    return fail(ZX_ATTN_CUDA, "%s: %s", what, cudaGetErrorString(e));
}

int multiprocessors(int *n, size_t *l2_bytes)
{
    int device = 0, l2 = 0;
    ZX_ATTN_TRY(check_cuda(cudaGetDevice(&device), "cudaGetDevice"));
    ZX_ATTN_TRY(check_cuda(cudaDeviceGetAttribute(n, cudaDevAttrMultiProcessorCount, device),
                           "multiprocessor count"));
    ZX_ATTN_TRY(check_cuda(cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device), "L2 size"));
    *l2_bytes = (size_t)l2;
    return ZX_ATTN_OK;
}

int make_map(CUtensorMap *map, int dtype, const zx_attn_view &view, int64_t n_tokens, int n_heads,
             int head_dim, int box_tokens, const char *name)
{
    if (((uintptr_t)view.data & 15) || view.token_stride % 8 || view.head_stride % 8)
        return fail(
            ZX_ATTN_UNSUPPORTED,
            "the copy engine wants %s at a multiple of 16 bytes with strides of multiples of 8 elements, got "
            "%p, token stride %lld, head stride %lld",
            name, view.data, (long long)view.token_stride, (long long)view.head_stride);
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static Encode encode = nullptr;
    if (!encode) {
        void *entry = nullptr;
        cudaDriverEntryPointQueryResult found;
        ZX_ATTN_TRY(check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                                cudaEnableDefault, &found),
                               "cuTensorMapEncodeTiled"));
        if (found != cudaDriverEntryPointSuccess)
            return fail(ZX_ATTN_UNSUPPORTED,
                        "this driver has no cuTensorMapEncodeTiled: update it to CUDA 12");
        encode = reinterpret_cast<Encode>(entry);
    }
    const cuuint64_t sizes[3] = {(cuuint64_t)head_dim, (cuuint64_t)n_heads, (cuuint64_t)n_tokens};
    const cuuint64_t strides[2] = {(cuuint64_t)view.head_stride * 2, (cuuint64_t)view.token_stride * 2};
    const cuuint32_t box[3] = {64, 1, (cuuint32_t)box_tokens};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult r = encode(
        map, dtype == ZX_ATTN_BF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 3,
        view.data, sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (r != CUDA_SUCCESS)
        return fail(ZX_ATTN_CUDA, "no tensor map for %s: driver error %d, %lld tokens, %d heads of %d", name,
                    (int)r, (long long)n_tokens, n_heads, head_dim);
    return ZX_ATTN_OK;
}

static int check_problem(const zx_attn_problem &p)
{
    if (p.dtype != ZX_ATTN_BF16 && p.dtype != ZX_ATTN_FP16)
        return fail(ZX_ATTN_ARG, "dtype %d is neither bf16 nor fp16", p.dtype);
    if (p.path != ZX_ATTN_PATH_PLAIN && p.path != ZX_ATTN_PATH_HOPPER)
        return fail(ZX_ATTN_ARG, "path %d is unknown", p.path);
    if (p.head_dim != 64 && p.head_dim != 128)
        return fail(ZX_ATTN_UNSUPPORTED, "head_dim %d: 64 and 128 are there", p.head_dim);
    if (p.n_heads_kv < 1 || p.n_heads < 1 || p.n_heads % p.n_heads_kv)
        return fail(ZX_ATTN_ARG, "%d query heads are not a multiple of %d key heads", p.n_heads,
                    p.n_heads_kv);
    if (!(p.scale > 0.f) || isinf(p.scale))
        return fail(ZX_ATTN_ARG, "scale %g is not positive", (double)p.scale);
    if (p.n_docs < 0 || p.n_tokens_q < 0 || p.n_tokens_k < 0 || p.max_len_q < 0 || p.max_len_k < 0)
        return fail(ZX_ATTN_ARG, "a count is negative");
    if (p.n_docs > INT32_MAX / 2 || p.n_tokens_q > INT32_MAX / 2 || p.n_tokens_k > INT32_MAX / 2)
        return fail(ZX_ATTN_UNSUPPORTED, "more than 2^30 documents or tokens");
    if (p.n_docs == 0 && (p.n_tokens_q || p.n_tokens_k))
        return fail(ZX_ATTN_ARG, "tokens without a document");
    if (p.n_docs && !p.cu_q && (p.n_tokens_q % p.n_docs || p.max_len_q != p.n_tokens_q / p.n_docs))
        return fail(ZX_ATTN_ARG, "without cu_q, %lld query tokens must be %lld documents of max_len_q = %lld",
                    (long long)p.n_tokens_q, (long long)p.n_docs, (long long)p.max_len_q);
    if (p.n_docs && !p.cu_k && (p.n_tokens_k % p.n_docs || p.max_len_k != p.n_tokens_k / p.n_docs))
        return fail(ZX_ATTN_ARG, "without cu_k, %lld key tokens must be %lld documents of max_len_k = %lld",
                    (long long)p.n_tokens_k, (long long)p.n_docs, (long long)p.max_len_k);
    return ZX_ATTN_OK;
}

}  // namespace zx

using namespace zx;

#define ZX_EXPORT extern "C" __attribute__((visibility("default")))

ZX_EXPORT const char *zx_attn_message(void)
{
    return message;
}

ZX_EXPORT size_t zx_attn_forward_workspace(const zx_attn_problem *)
{
    return 2 * sizeof(unsigned);
}

ZX_EXPORT size_t zx_attn_backward_workspace(const zx_attn_problem *p)
{
    return p->path == ZX_ATTN_PATH_HOPPER ? hopper_backward_workspace(*p) : plain_backward_workspace(*p);
}

ZX_EXPORT int zx_attn_forward(const zx_attn_forward_args *a, void *stream)
{
    ZX_ATTN_TRY(check_problem(a->problem));
    if (a->problem.n_docs == 0 || a->problem.n_tokens_q == 0) return ZX_ATTN_OK;
    const auto s = static_cast<cudaStream_t>(stream);
    return a->problem.path == ZX_ATTN_PATH_HOPPER ? hopper_forward(*a, s) : plain_forward(*a, s);
}

ZX_EXPORT int zx_attn_backward(const zx_attn_backward_args *a, void *stream)
{
    ZX_ATTN_TRY(check_problem(a->problem));
    if (a->problem.n_docs == 0) return ZX_ATTN_OK;
    const auto s = static_cast<cudaStream_t>(stream);
    return a->problem.path == ZX_ATTN_PATH_HOPPER ? hopper_backward(*a, s) : plain_backward(*a, s);
}
