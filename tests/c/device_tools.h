/* device_tools.h - what the tests of the device share: opening, a small table of operations of their own, counts. */
#ifndef ZX_TESTS_DEVICE_TOOLS_H
#define ZX_TESTS_DEVICE_TOOLS_H

#include "check.h"

#include "device/internal.h"

#define UNUSED __attribute__((unused))

typedef struct live {
    int64_t blocks, bytes;
} live;

UNUSED static live live_now(void)
{
    live l = {0, 0};
    for (int c = 0; c < ZX_N_MEM_CLASS; c++) {
        l.blocks += zx_mem_get((zx_mem_class)c).n_live;
        l.bytes += zx_mem_get((zx_mem_class)c).live_bytes;
    }
    return l;
}

UNUSED static bool check_live_is(live want)
{
    live now = live_now();
    return CHECK_EQ_I64(now.blocks, want.blocks) & CHECK_EQ_I64(now.bytes, want.bytes);
}

/* What the operations below saw last. */
static struct {
    zx_exec exec;
    int64_t n_launches;
} g_seen;

/* `fill` fills contiguous float32 views; a value of -1 fails. */
UNUSED static zx_status tool_fill(const zx_exec *exec, const void *args)
{
    const zx_fill_args *a = args;
    g_seen.exec = *exec;
    g_seen.n_launches++;
    if (a->value == -1) ZX_FAIL(ZX_ERR_ARG, "fill: the value is -1");
    float *out = a->out.data;
    for (int64_t i = 0; i < zx_view_numel(&a->out); i++)
        out[i] = (float)a->value;
    return ZX_OK;
}

UNUSED static size_t tool_fill_scratch(const void *args, int n_threads)
{
    const zx_fill_args *a = args;
    return (size_t)zx_view_numel(&a->out) * (size_t)n_threads;
}

/* `scale` multiplies in place and then adds 1, so the order of two of them matters. */
UNUSED static zx_status tool_scale(const zx_exec *exec, const void *args)
{
    const zx_scale_args *a = args;
    (void)exec;
    const float *in = a->a.data;
    float *out = a->out.data;
    for (int64_t i = 0; i < zx_view_numel(&a->out); i++)
        out[i] = in[i] * (float)a->factor + 1;
    return ZX_OK;
}

/* `add` on one element: out = a / 2 + b. */
UNUSED static zx_status tool_add(const zx_exec *exec, const void *args)
{
    const zx_add_args *a = args;
    (void)exec;
    *(float *)a->out.data = *(const float *)a->a.data / 2 + *(const float *)a->b.data;
    return ZX_OK;
}

/* Everything else is missing. */
static zx_kernels g_tool_kernels = {
    .name = "cpu",
    .op =
        {
#define X(o) [ZX_OP_##o] = {.name = #o, .args_bytes = sizeof(zx_##o##_args)},
#include "kernels/kernels.def"
#undef X
        },
};

__attribute__((constructor, used)) static void fill_tool_kernels(void)
{
    g_tool_kernels.op[ZX_OP_fill].launch = tool_fill;
    g_tool_kernels.op[ZX_OP_fill].scratch = tool_fill_scratch;
    g_tool_kernels.op[ZX_OP_scale].launch = tool_scale;
    g_tool_kernels.op[ZX_OP_add].launch = tool_add;
}

/* NULL after a failed check. */
UNUSED static zx_device *open_device(zx_device_kind kind, int n_threads, uint64_t delay_seed)
{
    zx_device_config config = {.kind = kind, .n_threads = n_threads, .delay_seed = delay_seed};
    zx_device *dev = NULL;
    if (!CHECK_OK(zx_device_open(&config, &dev))) return NULL;
    dev->kernels = &g_tool_kernels;
    return dev;
}

UNUSED static zx_device *open_cpu(int n_threads)
{
    return open_device(ZX_DEVICE_CPU, n_threads, 0);
}

#endif
