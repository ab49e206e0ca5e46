/* table.c - the tables of the devices cpu and ref. */
#include "kernels/launch.h"

const zx_kernels *zx_kernels_cpu(void)
{
    static const zx_kernels table = {
        .name = "cpu",
        .op =
            {
#define X(op) {#op, sizeof(zx_##op##_args), zx_##op##_cpu, zx_##op##_cpu_scratch},
#include "kernels/kernels.def"
#undef X
            },
    };
    return &table;
}

const zx_kernels *zx_kernels_ref(void)
{
    static const zx_kernels table = {
        .name = "ref",
        .op =
            {
#define X(op) {#op, sizeof(zx_##op##_args), zx_##op##_ref, zx_##op##_ref_scratch},
#include "kernels/kernels.def"
#undef X
            },
    };
    return &table;
}

zx_isa zx_isa_detect(void)
{
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return ZX_ISA_AVX512;
    if (avx2) return ZX_ISA_AVX2;
#endif
    return ZX_ISA_PLAIN;
}
