// Launcher of the Hopper backward kernels.
#include "launch.cuh"

namespace zx {

int hopper_backward(const zx_attn_backward_args &, cudaStream_t) {
    return fail(ZX_ATTN_UNSUPPORTED, "the backward pass has no Hopper path: use ZX_ATTN_PATH_PLAIN");
}

size_t hopper_backward_workspace(const zx_attn_problem &) { return 0; }

}  // namespace zx
