/* elementwise.ref.h - add, mul, scale and conversion over REAL, in blocks that stay in the first-level cache.
 *
 * A block of each operand is used where it lies if it is dense and of type REAL already; otherwise it passes
 * through a buffer. No operation here contracts to a fused multiply-add, so every instance of float gives the
 * same bits.
 */
#include "kernels/rows.ref.h"

/* out may be a or b, element for element: ivdep tells the compiler that this is the only overlap. */
#define ZX_EW_LOOP(expr)                                                                                               \
    if (accumulate) {                                                                                                  \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = out[i] + (expr);                                 \
    } else {                                                                                                           \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = (expr);                                          \
    }

static void ZX_INST(ew_block)(zx_ew_op op, bool accumulate, REAL factor, int64_t n, REAL *out, const REAL *a,
                              const REAL *b)
{
    switch (op) {
    case ZX_EW_ADD:
        ZX_EW_LOOP(a[i] + b[i])
        break;
    case ZX_EW_MUL:
        ZX_EW_LOOP(a[i] * b[i])
        break;
    case ZX_EW_SCALE:
        ZX_EW_LOOP(factor * a[i])
        break;
    case ZX_EW_COPY:
        ZX_EW_LOOP(a[i])
        break;
    }
}

void ZX_CAT3(zx_ew, REAL, ISA)(const void *arg, char *const *p, const int64_t *stride, int64_t n)
{
    enum { BLOCK = 512 };
    const zx_ew_job *job = arg;
    zx_dtype real = ZX_INST(real_dtype)();
    int n_views = job->op == ZX_EW_ADD || job->op == ZX_EW_MUL ? 3 : 2;
    bool dense[3], filled[3] = {false, false, false};
    REAL buffer[3][BLOCK];
    for (int v = 0; v < n_views; v++)
        dense[v] = job->dtype[v] == real && stride[v] == 1;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
        int64_t count = zx_min64(n - begin, BLOCK);
        REAL *at[3] = {buffer[0], buffer[1], buffer[1]};
        for (int v = 0; v < n_views; v++) {
            char *from = p[v] + begin * stride[v] * (int64_t)zx_dtype_bytes(job->dtype[v]);
            at[v] = dense[v] ? (REAL *)(void *)from : buffer[v];
            bool needed = !dense[v] && (v > 0 || job->accumulate) && !(filled[v] && stride[v] == 0);
            if (needed) ZX_INST(get_row)(job->dtype[v], from, stride[v], count, buffer[v]);
            filled[v] = true;
        }
        ZX_INST(ew_block)(job->op, job->accumulate, (REAL)job->factor, count, at[0], at[1], at[2]);
        if (!dense[0]) {
            char *to = p[0] + begin * stride[0] * (int64_t)zx_dtype_bytes(job->dtype[0]);
            ZX_INST(put_row)(job->dtype[0], to, stride[0], count, buffer[0]);
        }
    }
}
#undef ZX_EW_LOOP
