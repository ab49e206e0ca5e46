/* instances.h - includes the file named by ZX_BODY once for each pair of arithmetic and storage (see load.h).
 *
 *     #define ZX_BODY "kernels/gelu.ref.h"
 *     #include "kernels/instances.h"
 *
 * has no include guard: a .c file may use it for several bodies. */
#define REAL float
#define SUMS f32
#define STORAGE f32
#include ZX_BODY
#undef STORAGE
#define STORAGE bf16
#include ZX_BODY
#undef STORAGE
#undef REAL
#define REAL double
#define STORAGE f32
#include ZX_BODY
#undef STORAGE
#define STORAGE bf16
#include ZX_BODY
#undef STORAGE
#undef SUMS
#define SUMS f64
#define STORAGE f64
#include ZX_BODY
#undef STORAGE
#undef SUMS
#undef REAL
#undef ZX_BODY
