/* instances_simd.h - includes the file named by ZX_BODY for float32 and for bfloat16 storage; see vmath_avx2.h. */
#define STORAGE f32
#include ZX_BODY
#undef STORAGE
#define STORAGE bf16
#include ZX_BODY
#undef STORAGE
#undef ZX_BODY
