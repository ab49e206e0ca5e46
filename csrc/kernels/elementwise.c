/* elementwise.c - add, mul, scale. The mathematics is in elementwise.ref.h. */
#include "kernels/elementwise.h"

#include "kernels/launch.h"
#include "kernels/rows.h"

#define ISA plain
#define REAL float
#include "kernels/elementwise.ref.h"
#undef REAL
#define REAL double
#include "kernels/elementwise.ref.h"
#undef REAL

typedef enum table_kind { TABLE_CPU, TABLE_REF } table_kind;

static zx_status run(const zx_exec *exec, table_kind kind, const char *name, const zx_ew_job *like, const zx_view *out,
                     const zx_view *a, const zx_view *b)
{
    zx_ew_job job = *like;
    const zx_view *views[3] = {out, a, b};
    static const char *const names[3] = {"out", "a", "b"};
    int n_views = b ? 3 : 2;
    bool wide = kind == TABLE_REF;
    for (int i = 0; i < n_views; i++) {
        ZX_TRY(i == 0 ? zx_check_out(name, names[i], views[i]) : zx_check_view(name, names[i], views[i]));
        ZX_TRY(zx_check_float(name, names[i], views[i]->dtype));
        ZX_TRY(zx_check_same_shape(name, names[i], views[i], "out", out));
        job.dtype[i] = views[i]->dtype;
        wide = wide || views[i]->dtype == ZX_F64;
    }
    zx_walk walk;
    zx_walk_init(&walk, views, n_views, false);
    zx_walk_fn fn = wide ? zx_ew_double_plain : ZX_PICK(exec, zx_ew_float_plain, zx_ew_float_avx2);
    zx_walk_run(&walk, exec->pool, fn, &job);
    return ZX_OK;
}

static zx_status binary(const zx_exec *exec, table_kind kind, const char *name, zx_ew_op op, const zx_add_args *args)
{
    zx_ew_job job = {.op = op, .accumulate = args->accumulate};
    ZX_TRY(run(exec, kind, name, &job, &args->out, &args->a, &args->b));
    return ZX_OK;
}

static zx_status scale(const zx_exec *exec, table_kind kind, const zx_scale_args *args)
{
    zx_ew_job job = {.op = ZX_EW_SCALE, .factor = args->factor, .accumulate = args->accumulate};
    ZX_TRY(run(exec, kind, "scale", &job, &args->out, &args->a, NULL));
    return ZX_OK;
}

zx_status zx_add_cpu(const zx_exec *exec, const void *args)
{
    return binary(exec, TABLE_CPU, "add", ZX_EW_ADD, args);
}
zx_status zx_add_ref(const zx_exec *exec, const void *args)
{
    return binary(exec, TABLE_REF, "add", ZX_EW_ADD, args);
}
zx_status zx_mul_cpu(const zx_exec *exec, const void *args)
{
    return binary(exec, TABLE_CPU, "mul", ZX_EW_MUL, args);
}
zx_status zx_mul_ref(const zx_exec *exec, const void *args)
{
    return binary(exec, TABLE_REF, "mul", ZX_EW_MUL, args);
}
zx_status zx_scale_cpu(const zx_exec *exec, const void *args)
{
    return scale(exec, TABLE_CPU, args);
}
zx_status zx_scale_ref(const zx_exec *exec, const void *args)
{
    return scale(exec, TABLE_REF, args);
}
