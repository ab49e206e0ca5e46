/* xent_avx512.c - softmax cross-entropy on sixteen lanes: the bits of the plain and the AVX2 path. */
#include "kernels/vmath_avx512.h"
#include "kernels/xent.h"

#define ZX_BODY "kernels/xent.avx512.h"
#include "kernels/instances_simd.h"
