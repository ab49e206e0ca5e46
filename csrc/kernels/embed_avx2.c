/* embed_avx2.c - the float instance of embed.ref.h, compiled for AVX2. */
#include "kernels/embed.h"

#define REAL float
#define ISA avx2
#include "kernels/embed.ref.h"
