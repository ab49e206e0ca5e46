/* reduce_avx2.c - the float instance of reduce.ref.h, compiled for AVX2. */
#include "kernels/reduce.h"

#define REAL float
#define ISA avx2
#define ZX_REDUCE_FINITE
#include "kernels/reduce.ref.h"
