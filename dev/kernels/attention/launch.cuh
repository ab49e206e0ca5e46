// What the launchers share: error sentences, checks, tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "attention.h"

namespace zx
{

int fail(int status, const char *format, ...);
int check_cuda(cudaError_t e, const char *what);
int make_map(CUtensorMap *map, int dtype, const zx_attn_view &view, int64_t n_tokens, int n_heads,
             int head_dim, int box_tokens, const char *name);
int multiprocessors(int *n, size_t *l2_bytes);

int plain_forward(const zx_attn_forward_args &a, cudaStream_t stream);
int plain_backward(const zx_attn_backward_args &a, cudaStream_t stream);
int hopper_forward(const zx_attn_forward_args &a, cudaStream_t stream);
int hopper_backward(const zx_attn_backward_args &a, cudaStream_t stream);
size_t hopper_backward_workspace(const zx_attn_problem &p);
size_t plain_backward_workspace(const zx_attn_problem &p);

#define ZX_ATTN_TRY(expression)                                                                              \
    do {                                                                                                     \
        const int status_ = (expression);                                                                    \
        if (status_ != ZX_ATTN_OK) return status_;                                                           \
    } while (0)

}  // namespace zx
