/* elementwise_avx2.c - the float instance of elementwise.ref.h, compiled for AVX2. */
#include "kernels/elementwise.h"

#define REAL float
#define ISA avx2
#include "kernels/elementwise.ref.h"
