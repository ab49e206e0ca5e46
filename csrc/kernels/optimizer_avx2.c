/* optimizer_avx2.c - the float instance of optimizer.ref.h, compiled for AVX2. */
#include "kernels/optimizer.h"

#define REAL float
#define ISA avx2
#include "kernels/optimizer.ref.h"
