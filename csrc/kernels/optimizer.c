/* optimizer.c - step_control, adamw, sgd.
 *
 * DESIGN. The elements from the first segment to the last are cut into tasks of OPT_TASK elements; a task
 * finds its segments by bisection and updates the parts that lie in it. Each element's update depends on
 * nothing but itself, so the cut does not matter to the result.
 */
#include "kernels/optimizer.h"

#include <inttypes.h>
#include <math.h>

#include "kernels/launch.h"

#define ISA plain
#define REAL float
#include "kernels/optimizer.ref.h"
#undef REAL
#define REAL double
#include "kernels/optimizer.ref.h"
#undef REAL

/* ---- step_control ------------------------------------------------------------------------------------- */

zx_status zx_step_control_cpu(const zx_exec *exec, const void *args_)
{
    (void)exec;
    const zx_step_control_args *args = args_;
    ZX_TRY(zx_check_flat("step_control", "partials", args->partials, args->n_partials));
    ZX_TRY(zx_check_flat("step_control", "totals", args->totals, args->n_ranks));
    ZX_TRY(zx_check_flat("step_control", "out", args->out, 1));
    if (!(args->loss_scale > 0) || isinf(args->loss_scale))
        ZX_FAIL(ZX_ERR_ARG, "step_control: loss_scale is %g, it must be positive and finite", args->loss_scale);
    zx_step_ctl ctl = {0};
    double squares = 0;
    for (int64_t i = 0; i < args->n_partials; i++)
        squares += args->partials[i];
    for (int64_t r = 0; r < args->n_ranks; r++) {
        ctl.loss_sum += args->totals[2 * r];
        ctl.denominator += args->totals[2 * r + 1];
    }
    double scale = ctl.denominator * args->loss_scale;
    ctl.norm = sqrt(squares) / scale;
    ctl.skip = !isfinite(ctl.norm) || !isfinite(ctl.denominator) || !(ctl.denominator > 0);
    if (!ctl.skip) {
        double clip = args->max_norm > 0 ? fmin(1.0, args->max_norm / (ctl.norm + 1e-6)) : 1.0;
        ctl.factor = clip / scale;
    }
    *args->out = ctl;
    return ZX_OK;
}

zx_status zx_step_control_ref(const zx_exec *exec, const void *args)
{
    return zx_step_control_cpu(exec, args);
}

/* ---- updates ------------------------------------------------------------------------------------------ */

enum { OPT_TASK = 16384 };

typedef struct opt_job {
    const zx_adamw_args *args;
    zx_update_fn fn; /* NULL: only clear the gradient */
    double factor;
    int64_t begin, end;
} opt_job;

static void opt_task(void *arg, int64_t index, int worker)
{
    (void)worker;
    const opt_job *job = arg;
    const zx_adamw_args *args = job->args;
    int64_t begin = job->begin + index * OPT_TASK;
    int64_t end = zx_min64(job->end, begin + OPT_TASK);
    int64_t lo = 0, hi = args->n_segments; /* the first segment that ends behind begin */
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (args->segments[mid].end > begin)
            hi = mid;
        else
            lo = mid + 1;
    }
    for (; lo < args->n_segments && args->segments[lo].begin < end; lo++) {
        const zx_segment *s = &args->segments[lo];
        int64_t from = zx_max64(begin, s->begin), to = zx_min64(end, s->end);
        if (job->fn)
            job->fn(args, &args->hyper[s->group], job->factor, from, to);
        else if (from < to)
            memset(zx_at(args->grad, args->dtype, from), 0, (size_t)(to - from) * zx_dtype_bytes(args->dtype));
    }
}

static zx_status update(const zx_exec *exec, const char *op, const zx_adamw_args *args, bool adamw, zx_update_fn fn)
{
    if (args->dtype != ZX_F32 && args->dtype != ZX_F64)
        ZX_FAIL(ZX_ERR_UNSUPPORTED, "%s: the state is %s, it needs float32 or float64", op, zx_dtype_name(args->dtype));
    if (args->param) ZX_TRY(zx_check_float(op, "param", args->param_dtype));
    ZX_TRY(zx_check_flat(op, "segments", args->segments, args->n_segments));
    ZX_TRY(zx_check_flat(op, "ctl", args->ctl, 1));
    if (args->n_segments == 0) return ZX_OK;
    ZX_TRY(zx_check_flat(op, "hyper", args->hyper, 1));
    int64_t reached = 0, used = 0;
    for (int64_t i = 0; i < args->n_segments; i++) {
        const zx_segment *s = &args->segments[i];
        if (s->begin < reached || s->end < s->begin || s->group < 0)
            ZX_FAIL(ZX_ERR_ARG,
                    "%s: segment %" PRId64 " is [%" PRId64 ", %" PRId64 ") of group %d behind %" PRId64
                    "; segments must be sorted and disjoint",
                    op, i, s->begin, s->end, (int)s->group, reached);
        if (!adamw && !args->m && args->hyper[s->group].momentum != 0)
            ZX_FAIL(ZX_ERR_ARG, "%s: group %d has momentum %g, so m must not be NULL", op, (int)s->group,
                    args->hyper[s->group].momentum);
        reached = s->end;
        used += s->end - s->begin;
    }
    ZX_TRY(zx_check_flat(op, "master", args->master, used));
    ZX_TRY(zx_check_flat(op, "grad", args->grad, used));
    if (adamw) {
        ZX_TRY(zx_check_flat(op, "m", args->m, used));
        ZX_TRY(zx_check_flat(op, "v", args->v, used));
    }
    opt_job job = {args, args->ctl->skip ? NULL : fn, args->ctl->factor, args->segments[0].begin, reached};
    zx_pool_run(exec->pool, opt_task, &job, zx_ceil_div(job.end - job.begin, OPT_TASK));
    return ZX_OK;
}

zx_status zx_adamw_cpu(const zx_exec *exec, const void *args_)
{
    const zx_adamw_args *args = args_;
    zx_update_fn fn =
        args->dtype == ZX_F64 ? zx_adamw_double_plain : ZX_PICK(exec, zx_adamw_float_plain, zx_adamw_float_avx2);
    return update(exec, "adamw", args, true, fn);
}
zx_status zx_adamw_ref(const zx_exec *exec, const void *args)
{
    return update(exec, "adamw", args, true, zx_adamw_double_plain);
}
zx_status zx_sgd_cpu(const zx_exec *exec, const void *args_)
{
    const zx_sgd_args *args = args_;
    zx_update_fn fn =
        args->dtype == ZX_F64 ? zx_sgd_double_plain : ZX_PICK(exec, zx_sgd_float_plain, zx_sgd_float_avx2);
    return update(exec, "sgd", args, false, fn);
}
zx_status zx_sgd_ref(const zx_exec *exec, const void *args)
{
    return update(exec, "sgd", args, false, zx_sgd_double_plain);
}
