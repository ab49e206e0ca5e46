/* update.c - the updaters, and which option group each element of a rank's own part belongs to. */
#include "store/internal.h"

static const zx_updater updaters[] = {
    [ZX_OPTIMIZER_ADAMW] = {"AdamW", 2, 2, ZX_OP_adamw},
    [ZX_OPTIMIZER_SGD] = {"SGD", 0, 1, ZX_OP_sgd},
};

const zx_updater *zx_updater_get(zx_optimizer optimizer)
{
    size_t n = sizeof updaters / sizeof updaters[0];
    return (size_t)optimizer < n ? &updaters[optimizer] : NULL;
}

zx_status zx_updater_check(const zx_store *s, const zx_step_options *options)
{
    const zx_updater *updater = zx_updater_get(s->config.optimizer);
    if (options->n_groups != s->layout->n_groups)
        ZX_FAIL(ZX_ERR_ARG, "hyper-parameters for %d option groups, but the layout has %d: give one set for each",
                options->n_groups, s->layout->n_groups);
    if (!(options->loss_scale > 0))
        ZX_FAIL(ZX_ERR_ARG, "a loss scale of %g: it must be positive, 1 if the loss is not scaled",
                options->loss_scale);
    for (int32_t g = 0; g < options->n_groups; g++) {
        const zx_hyper *h = &options->hyper[g];
        if (updater->op == ZX_OP_sgd && h->momentum != 0 && s->policy.n_moments == 0)
            ZX_FAIL(ZX_ERR_ARG, "option group %d has momentum %g, but the policy keeps no moment: set n_moments to 1",
                    g, h->momentum);
        if (updater->op == ZX_OP_adamw && !(h->bias_correction1 > 0 && h->bias_correction2 > 0))
            ZX_FAIL(ZX_ERR_ARG, "option group %d has bias corrections %g and %g: both are 1 - beta^t and positive", g,
                    h->bias_correction1, h->bias_correction2);
    }
    return ZX_OK;
}

/* Segments of a range's own part, in its order, joined where neighbours touch and agree; counts only if out is NULL. */
static int64_t range_segments(const zx_store *s, int32_t r, zx_segment *out)
{
    const zx_layout *l = s->layout;
    int64_t from = s->ranges[r].own_begin, to = from + s->ranges[r].own_n, n = 0;
    zx_segment last = {0};
    for (int64_t i = l->order_begin[r]; l->ranges[r].trainable && i < l->order_begin[r + 1]; i++) {
        const zx_place *place = &l->places[l->order[i]];
        int64_t begin = zx_max64(from, place->offset), end = zx_min64(to, place->offset + place->n);
        int32_t group = l->params[l->order[i]].group;
        if (begin >= end) continue;
        if (n > 0 && last.end == begin - from && last.group == group)
            last.end = end - from;
        else
            last = (zx_segment){begin - from, end - from, group, 0}, n++;
        if (out) out[n - 1] = last;
    }
    return n;
}

zx_status zx_store_open_segments(zx_store *s)
{
    zx_status zx_rc_ = ZX_OK;
    zx_segment *host = NULL;
    int64_t n = 0, at = 0;
    for (int32_t r = 0; r < s->layout->n_ranges; r++)
        n += range_segments(s, r, NULL);
    if (n == 0) return ZX_OK;
    ZX_TRY(ZX_NEW_ARRAY(ZX_MEM_STORE, n, host));
    zx_segment *device = (zx_segment *)(void *)(s->control.base + s->places.segments);
    for (int32_t r = 0; r < s->layout->n_ranges; r++) {
        s->ranges[r].segments = device + at;
        s->ranges[r].n_segments = range_segments(s, r, host + at);
        at += s->ranges[r].n_segments;
    }
    ZX_TRY_GOTO(zx_stream_copy(s->stream, device, host, (size_t)n * sizeof *host), done);
    ZX_TRY_GOTO(zx_stream_sync(s->stream), done);
done:
    zx_free(host);
    return zx_rc_;
}

zx_status zx_store_update(zx_store *s, zx_stream *stream, int32_t r)
{
    const zx_range *range = &s->layout->ranges[r];
    const zx_store_range *own = &s->ranges[r];
    if (own->n_segments == 0) return ZX_OK; /* all of it is padding */
    zx_dtype sum = zx_dtype_sum(range->dtype);
    zx_adamw_args args = {.master = own->master,
                          .m = own->moment[0],
                          .v = own->moment[1],
                          .grad = own->own_grad,
                          .param = own->master == own->own_param ? NULL : own->own_param,
                          .dtype = sum,
                          .param_dtype = range->dtype,
                          .segments = own->segments,
                          .n_segments = own->n_segments,
                          .hyper = (const zx_hyper *)(void *)(s->control.base + s->places.hyper),
                          .ctl = (const zx_step_ctl *)(void *)(s->control.base + s->places.ctl)};
    return zx_device_launch(stream, zx_updater_get(s->config.optimizer)->op, &args, sizeof args);
}
