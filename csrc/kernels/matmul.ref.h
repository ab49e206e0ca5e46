/* matmul.ref.h - rows [m0, m1) and columns [n0, n1) of c = [c +] op(a) op(b) [+ bias], by plain loops.
 *
 * The order in which an element is summed depends on the transposes, not on the block. */

#include "kernels/dot.ref.h"

static void ZX_NAME(matmul)(const zx_matmul_args *args, int64_t m0, int64_t m1, int64_t n0, int64_t n1)
{
    const zx_view *a = &args->a, *b = &args->b, *c = &args->c;
    const int64_t n_k = a->shape[args->trans_a ? 0 : 1];
    const bool c_is_sum = c->dtype == zx_dtype_sum(a->dtype);
    REAL acc[MATMUL_COLS];
    for (int64_t n = n0; n < n1; n += MATMUL_COLS) {
        const int64_t n_cols = zx_min64(MATMUL_COLS, n1 - n);
        for (int64_t m = m0; m < m1; m++) {
            const int64_t at_a = args->trans_a ? m : m * a->stride[0], step = args->trans_a ? a->stride[0] : 1;
            for (int64_t j = 0; j < n_cols; j++)
                acc[j] = args->bias.data ? ZX_LOAD(args->bias.data, n + j) : 0;
            for (int64_t j = 0; args->trans_b && j < n_cols; j++)
                acc[j] += ZX_NAME(dot)(a->data, at_a, step, b->data, (n + j) * b->stride[0], n_k);
            for (int64_t k = 0; !args->trans_b && k < n_k; k++) {
                const REAL x = ZX_LOAD(a->data, at_a + k * step);
                for (int64_t j = 0; j < n_cols; j++)
                    acc[j] += x * ZX_LOAD(b->data, k * b->stride[0] + n + j);
            }
            for (int64_t j = 0; j < n_cols; j++) {
                const int64_t at = m * c->stride[0] + n + j;
                if (c_is_sum)
                    ZX_STORE_SUM(c->data, at, args->accumulate ? ZX_LOAD_SUM(c->data, at) + acc[j] : acc[j]);
                else
                    ZX_STORE(c->data, at, args->accumulate ? ZX_LOAD(c->data, at) + acc[j] : acc[j]);
            }
        }
    }
}
