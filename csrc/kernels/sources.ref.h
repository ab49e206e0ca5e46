/* sources.ref.h - the sum of several arrays over REAL, source after source for each element.
 *
 * A block of sums stays in the first-level cache while the sources pass by. All loads of a block come before
 * its store, so out may be a source.
 */
#include "kernels/rows.ref.h"

static inline void ZX_INST(add_source)(zx_dtype t, const void *p, int64_t n, REAL *restrict acc)
{
    const float *f = p;
    const uint16_t *b = p;
    const double *d = p;
    switch (t) {
    case ZX_F32:
        for (int64_t i = 0; i < n; i++)
            acc[i] += (REAL)f[i];
        break;
    case ZX_BF16:
        for (int64_t i = 0; i < n; i++)
            acc[i] += (REAL)zx_bf16_to_f32(b[i]);
        break;
    default:
        for (int64_t i = 0; i < n; i++)
            acc[i] += (REAL)d[i];
    }
}

void ZX_INST(zx_sources)(const zx_sum_sources_args *args, int64_t begin, int64_t n)
{
    enum { BLOCK = 1024 };
    REAL acc[BLOCK], old[BLOCK];
    zx_dtype t = args->src_dtype;
    for (int64_t at = begin; at < begin + n; at += BLOCK) {
        int64_t count = zx_min64(begin + n - at, BLOCK);
        void *out = zx_at(args->out, args->out_dtype, at);
        if (args->n_src > 0)
            ZX_INST(get_row)(t, zx_at(args->src[0], t, at), 1, count, acc);
        else
            memset(acc, 0, sizeof acc);
        for (int s = 1; s < args->n_src; s++)
            ZX_INST(add_source)(t, zx_at(args->src[s], t, at), count, acc);
        if (args->accumulate) {
            ZX_INST(get_row)(args->out_dtype, out, 1, count, old);
            for (int64_t i = 0; i < count; i++)
                acc[i] = old[i] + acc[i];
        }
        ZX_INST(put_row)(args->out_dtype, out, 1, count, acc);
    }
}
