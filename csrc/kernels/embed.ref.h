/* embed.ref.h - rows of a table by index, and the sum of gradient rows back into it, over REAL. */
#include "kernels/rows.ref.h"

void ZX_INST(zx_embed_gather)(const zx_embed_fwd_args *args, int64_t token, int64_t n_tokens)
{
    enum { BLOCK = 512 };
    REAL row[BLOCK], old[BLOCK];
    const zx_view *table = &args->table, *out = &args->out;
    const int32_t *index = args->index.data;
    zx_dtype t = table->dtype;
    for (int64_t i = token; i < token + n_tokens; i++) {
        int64_t from = index[i * args->index.stride[0]];
        bool known = from >= 0 && from < table->shape[0];
        char *to = zx_at(out->data, t, i * out->stride[0]);
        if (known && !args->accumulate) {
            memcpy(to, zx_at(table->data, t, from * table->stride[0]), (size_t)out->shape[1] * zx_dtype_bytes(t));
            continue;
        }
        for (int64_t col = 0; col < out->shape[1]; col += BLOCK) {
            int64_t n = zx_min64(out->shape[1] - col, BLOCK);
            void *at = to + col * (int64_t)zx_dtype_bytes(t);
            if (known) {
                ZX_INST(get_row)(t, zx_at(table->data, t, from * table->stride[0] + col), 1, n, row);
                ZX_INST(get_row)(t, at, 1, n, old);
                for (int64_t c = 0; c < n; c++)
                    row[c] = old[c] + row[c];
            } else {
                for (int64_t c = 0; c < n; c++)
                    row[c] = (REAL)__builtin_nanf("");
            }
            ZX_INST(put_row)(t, at, 1, n, row);
        }
    }
}

void ZX_INST(zx_embed_scatter)(const zx_embed_bwd_args *args, int64_t col, int64_t n_cols)
{
    REAL row[ZX_EMBED_COLS], sum[ZX_EMBED_COLS];
    const zx_view *dout = &args->dout, *dtable = &args->dtable;
    const int32_t *index = args->index.data;
    bool direct = dtable->dtype == ZX_INST(real_dtype)();
    for (int64_t i = 0; i < dout->shape[0]; i++) {
        int64_t to = index[i * args->index.stride[0]];
        if (to < 0 || to >= dtable->shape[0]) continue;
        const void *from = zx_at(dout->data, dout->dtype, i * dout->stride[0] + col);
        void *at = zx_at(dtable->data, dtable->dtype, to * dtable->stride[0] + col);
        ZX_INST(get_row)(dout->dtype, from, 1, n_cols, row);
        REAL *restrict acc = direct ? at : sum;
        if (!direct) ZX_INST(get_row)(dtable->dtype, at, 1, n_cols, sum);
        for (int64_t c = 0; c < n_cols; c++)
            acc[c] = acc[c] + row[c];
        if (!direct) ZX_INST(put_row)(dtable->dtype, at, 1, n_cols, sum);
    }
}
