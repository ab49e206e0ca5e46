# The compiler flags, in one place: the Makefile includes this file and setup.py reads it.
# Only lines of the form NAME = words; no references, no continuation lines.
#
# No -ffast-math and no -march: results must not depend on the machine that compiled them. Contraction is off,
# so a fused multiply-add happens only where the source asks for one (intrinsics, fma()).
ZX_CFLAGS = -std=gnu11 -fPIC -fvisibility=hidden -fno-math-errno -ffp-contract=off
ZX_OPT = -O3
ZX_WARN = -Wall -Wextra -Werror=implicit-function-declaration
ZX_LIBS = -lm -ldl -lpthread
# Files <name>_avx2.c and <name>_avx512.c are chosen at run time; only they may use these instructions.
# Machines other than x86-64 leave both kinds out of the build.
ZX_AVX2 = -mavx2 -mfma -mf16c
ZX_AVX512 = -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl
# CUDA: nvcc for .cu files, the C compiler for <name>_cuda.c.
ZX_NVCC = -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden
ZX_GENCODE = -gencode=arch=compute_80,code=sm_80 -gencode=arch=compute_90a,code=sm_90a
ZX_CUDA_LIBS = -lcudart_static -lrt -lstdc++
