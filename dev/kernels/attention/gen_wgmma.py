"""Write wgmma.cuh: one inline-assembly wrapper for each shape of warp-group product that the kernels use.

The instruction names each of its N / 2 accumulator registers, so the wrappers are too long to keep by hand.
"""

import sys

TYPES = {"__nv_bfloat16": "bf16", "__half": "f16"}
WIDTHS = (32, 64, 128, 160)


def wrapper(ctype: str, name: str, n: int, a_in_registers: bool) -> str:
    """Return one specialisation of Wgmma<T, N> for A in shared memory or in registers."""
    count = n // 2
    acc = ", ".join(f"%{i}" for i in range(count))
    outs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    if a_in_registers:
        a_text = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}"
        a_args = ", ".join(f'"r"(a{i})' for i in range(4))
        params = "uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3"
        after, tail, immediates = count + 4, f"p, 1, 1, %{count + 6}", '"n"(TB)'
        head = "template <int TB> static __device__ __forceinline__ void rs"
    else:
        a_text, a_args, params = f"%{count}", '"l"(a)', "uint64_t a"
        after, tail, immediates = count + 1, f"p, 1, 1, %{count + 3}, %{count + 4}", '"n"(TA), "n"(TB)'
        head = "template <int TA, int TB> static __device__ __forceinline__ void ss"
    return (
        f"    {head}(float (&d)[{count}], {params}, uint64_t b, int keep) {{\n"
        f'        asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{after + 1}, 0;\\n"\n'
        f'                     "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{name}.{name} "\n'
        f'                     "{{{acc}}}, "\n'
        f'                     "{a_text}, %{after}, {tail};\\n}}\\n"\n'
        f"                     : {outs}\n"
        f'                     : {a_args}, "l"(b), "r"(keep), {immediates});\n'
        f"    }}\n"
    )


def main() -> None:
    """Write the header to the path given on the command line."""
    out = [
        "// Written by gen_wgmma.py. D (64 x N, fp32) = A (64 x 16) B (16 x N) + keep * D. TA, TB: 1 if the\n"
        "// operand in shared memory has its M or N axis contiguous, 0 if its K axis is.\n"
        "#pragma once\n#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n#include <stdint.h>\n\n"
        "template <class T, int N> struct Wgmma;\n"
    ]
    for ctype, name in TYPES.items():
        for n in WIDTHS:
            body = wrapper(ctype, name, n, False) + wrapper(ctype, name, n, True)
            out.append(f"template <> struct Wgmma<{ctype}, {n}> {{\n{body}}};\n")
    with open(sys.argv[1], "w") as f:
        f.write("".join(out))


if __name__ == "__main__":
    main()
