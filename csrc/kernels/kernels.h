/* kernels.h - the one table of operations, with plain argument structs.
 *
 * A kernel is launched through device.h (zx_device_launch), never directly: the device adds the stream, scratch
 * memory and pool, the null device records it, a delayed stream queues it (argument structs are copied by value, so
 * they hold device pointers only; memory they point to stays valid until the stream has passed the launch).
 *
 * Rules for every implementation:
 *  - arithmetic in float for F32 and BF16 storage, in double for F64; the table of the device `ref` computes in double
 *    whatever the storage is. Rounding to BF16 is to nearest even. Parameter gradients (dtable, dgamma, weight
 *    gradients) are F32 (F64 for F64).
 *  - results depend on the arguments only: not on the number of threads, not on memory addresses. Work is cut by pure
 *    functions of the shapes. Outputs are written whole; nothing outside is touched; outputs may not alias inputs
 *    unless the struct says so.
 *  - any size from 0 up is legal. Wrong dtypes, shapes or strides are ZX_ERR_ARG / ZX_ERR_UNSUPPORTED with the
 *    operation's name and the values.
 *  - no allocation, no synchronisation: scratch comes from zx_exec, its size from the table's `scratch` function.
 */
#ifndef ZX_KERNELS_KERNELS_H
#define ZX_KERNELS_KERNELS_H

#include "kernels/types.h"

/* BLAS, row-major, single-threaded calls on blocks: c (m,n; ldc) = beta*c + op(a) op(b). See device/gemm.c. */
typedef struct zx_gemm {
    void (*sgemm)(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, float alpha, const float *a, int64_t lda,
                  const float *b, int64_t ldb, float beta, float *c, int64_t ldc);
    void (*dgemm)(bool trans_a, bool trans_b, int64_t m, int64_t n, int64_t k, double alpha, const double *a,
                  int64_t lda, const double *b, int64_t ldb, double beta, double *c, int64_t ldc);
    const char *path; /* of the library, for reports */
} zx_gemm;

/* AVX512 (F, BW, DQ, VL) gives the bits of AVX2, faster. */
typedef enum zx_isa { ZX_ISA_PLAIN = 0, ZX_ISA_AVX2, ZX_ISA_AVX512 } zx_isa;

typedef struct zx_exec {
    void *stream; /* cudaStream_t on CUDA, NULL on the CPU */
    zx_pool *pool;
    void *scratch; /* at least what the table's scratch function asks for */
    size_t scratch_bytes;
    const zx_gemm *gemm; /* NULL: plain loops */
    zx_isa isa;
} zx_exec;

/* Documents of a batch: document d holds rows [cu_seqlens[d], cu_seqlens[d+1]). n_docs is the capacity: unused
 * entries repeat the last offset (empty documents). Rows past the last offset belong to nobody: attention gives them
 * zeros. cu_seqlens is device memory, (n_docs + 1) int32. max_len bounds the longest document. */
typedef struct zx_docs {
    const int32_t *cu_seqlens;
    int64_t n_docs;
    int64_t max_len;
} zx_docs;

/* Strides: matrices need stride 1 in the last dimension; row strides are free. */

typedef struct zx_matmul_args {
    zx_view a, b; /* (M,K) or, transposed, (K,M); (K,N) or, transposed, (N,K); one dtype */
    zx_view c;    /* (M,N); dtype of a, or the sum type (fp32 for bf16 operands) */
    zx_view bias; /* (N), dtype of b, or data == NULL */
    bool trans_a, trans_b;
    bool accumulate; /* c += instead of c = */
} zx_matmul_args;

typedef struct zx_embed_fwd_args {
    zx_view index; /* (N) int32; a row outside [0,V) is filled with NaN */
    zx_view table; /* (V,C) */
    zx_view out;   /* (N,C), dtype of table */
    bool accumulate;
} zx_embed_fwd_args;

typedef struct zx_embed_bwd_args {
    zx_view index;  /* (N) int32; rows outside [0,V) are left out */
    zx_view dout;   /* (N,C) */
    zx_view dtable; /* (V,C) sum type, always added to */
} zx_embed_bwd_args;

typedef struct zx_layernorm_fwd_args {
    zx_view x, gamma, beta, out; /* (N,C) (C) (C) (N,C); beta.data may be NULL */
    zx_view mean, rstd;          /* (N) sum type */
    double eps;
} zx_layernorm_fwd_args;

typedef struct zx_layernorm_bwd_in_args {
    zx_view dout, x, gamma, mean, rstd;
    zx_view dx; /* may alias dout */
    bool accumulate;
} zx_layernorm_bwd_in_args;

typedef struct zx_layernorm_bwd_w_args {
    zx_view dout, x, mean, rstd;
    zx_view dgamma, dbeta; /* (C) sum type, added to; either data may be NULL */
} zx_layernorm_bwd_w_args;

typedef struct zx_gelu_fwd_args {
    zx_view x, out; /* (N,C) */
} zx_gelu_fwd_args;

typedef struct zx_gelu_bwd_args {
    zx_view x, dout, dx; /* dx may alias dout */
    bool accumulate;
} zx_gelu_bwd_args;

typedef struct zx_attention_fwd_args {
    zx_view q, k, v; /* (N,H,D) (N,G,D) (N,G,D); any row and head stride; H is a multiple of G */
    zx_view out;     /* (N,H,D) */
    zx_view lse;     /* (H,N) sum type; -inf for rows that see nothing */
    zx_docs docs;
    double scale; /* of the scores; 1/sqrt(D) usually */
    bool causal;
} zx_attention_fwd_args;

typedef struct zx_attention_bwd_args {
    zx_view q, k, v, out, lse, dout;
    zx_view dq, dk, dv; /* shapes of q, k, v; overwritten */
    zx_docs docs;
    double scale;
    bool causal;
} zx_attention_bwd_args;

enum { ZX_IGNORE_LABEL = -100 }; /* any negative label is ignored */

typedef struct zx_xent_fwd_args {
    zx_view logits; /* (N,V) */
    zx_view target; /* (N) int32; negative = ignored; >= V gives a NaN total */
    zx_view lse;    /* (N) sum type */
    zx_view total;  /* (2) sum type: {sum of losses over counted rows, number of counted rows} */
    bool accumulate; /* total += (chunks of rows) */
} zx_xent_fwd_args;

typedef struct zx_xent_bwd_args {
    zx_view logits, target, lse;
    zx_view dloss;   /* (1) sum type, in device memory: gradient of the sum of losses */
    zx_view dlogits; /* (N,V), may be the logits themselves; ignored rows get zeros */
} zx_xent_bwd_args;

typedef struct zx_add_args {
    zx_view a, b, out; /* equal shapes; a stride of 0 broadcasts; out may alias a or b */
    bool accumulate;
} zx_add_args;
typedef zx_add_args zx_mul_args;

typedef struct zx_scale_args {
    zx_view a, out; /* equal shapes; strides of a may be 0; out may alias a */
    double factor;
    bool accumulate;
} zx_scale_args;

typedef struct zx_sum_args {
    zx_view x;   /* any shape */
    zx_view out; /* (1), dtype of x or the sum type */
    double factor;
    bool accumulate;
} zx_sum_args;

typedef struct zx_colsum_args {
    zx_view x;   /* (R,C) */
    zx_view y;   /* (R,C) or data == NULL: multiplied in; strides may be 0 */
    zx_view out; /* (C) sum type or the dtype of x */
    bool accumulate;
} zx_colsum_args;

enum { ZX_MAX_SOURCES = 64 };

typedef struct zx_sum_sources_args {
    const void *src[ZX_MAX_SOURCES]; /* n elements each */
    int32_t n_src;
    zx_dtype src_dtype; /* F32, BF16, F64, I32, I64 (integers are summed as integers, out has the same dtype) */
    void *out;          /* may be one of the sources */
    zx_dtype out_dtype;
    int64_t n;
    bool accumulate; /* out = out + (sum of the sources), the sources summed first */
} zx_sum_sources_args;

typedef struct zx_cast_args {
    zx_view a, out; /* equal shapes, any strides; float dtypes and equal integer dtypes */
} zx_cast_args;

typedef struct zx_fill_args {
    zx_view out;
    double value;
} zx_fill_args;

typedef struct zx_sqnorm_args {
    const void *x; /* n contiguous elements, F32, BF16 or F64 */
    zx_dtype dtype;
    int64_t n;
    double *out;
} zx_sqnorm_args;

typedef struct zx_finite_args {
    const void *x;
    zx_dtype dtype;
    int64_t n;
    int64_t *out;
} zx_finite_args;

/* What a step decides on the device, once for all ranks. */
typedef struct zx_step_ctl {
    double norm;        /* global gradient norm after division by the denominator */
    double factor;      /* gradients are multiplied by it: clip / denominator / loss scale; 0 when skipped */
    double denominator;
    double loss_sum;    /* sum over ranks and micro-steps */
    int64_t skip;       /* 1: the norm is not finite or the denominator is 0: nothing is written */
} zx_step_ctl;

typedef struct zx_step_control_args {
    const double *partials; /* n_partials sums of squares, summed in this order */
    int64_t n_partials;
    const double *totals; /* n_ranks pairs {loss sum, denominator}, summed in rank order */
    int64_t n_ranks;
    double max_norm;   /* <= 0: no clipping. clip = min(1, max_norm / (norm + 1e-6)) */
    double loss_scale; /* 1 unless scaled */
    zx_step_ctl *out;
} zx_step_control_args;

/* One option group's numbers in one step; computed on the host. */
typedef struct zx_hyper {
    double lr, beta1, beta2, eps, weight_decay, momentum;
    double bias_correction1, bias_correction2; /* 1 - beta^t */
} zx_hyper;

/* Elements [begin, end) of a range belong to an option group; gaps are padding. Sorted, disjoint. */
typedef struct zx_segment {
    int64_t begin, end;
    int32_t group;
    int32_t pad_;
} zx_segment;

/* AdamW: g = grad * factor; m, v moving averages; p -= lr * (m/bc1 / (sqrt(v/bc2) + eps) + weight_decay * p)
 * with the decay taken on the old p (decoupled, Loshchilov and Hutter 2019). When ctl->skip: p, m and v stay, grad
 * is zeroed all the same. */
typedef struct zx_adamw_args {
    void *master; /* F32 (F64): the value that is stepped */
    void *m, *v;  /* sum type */
    void *grad;   /* sum type; zeroed after use */
    void *param;  /* NULL, or the parameter in param_dtype: rewritten from master */
    zx_dtype dtype, param_dtype; /* of master, m, v, grad; of param */
    const zx_segment *segments;  /* device memory */
    int64_t n_segments;
    const zx_hyper *hyper; /* device memory, indexed by group */
    const zx_step_ctl *ctl;
} zx_adamw_args;

/* SGD: g = grad * factor + weight_decay * p; m = momentum * m + g (m may be NULL when every momentum is 0);
 * p -= lr * (momentum ? m : g). */
typedef zx_adamw_args zx_sgd_args;

typedef enum zx_op_id {
#define X(op) ZX_OP_##op,
#include "kernels/kernels.def"
#undef X
    ZX_N_OPS
} zx_op_id;

typedef struct zx_kernel {
    const char *name;
    size_t args_bytes;
    zx_status (*launch)(const zx_exec *exec, const void *args); /* NULL: this device lacks it */
    size_t (*scratch)(const void *args, int n_threads);         /* NULL: needs none */
} zx_kernel;

typedef struct zx_kernels {
    const char *name; /* "cpu", "ref", "cuda" */
    zx_kernel op[ZX_N_OPS];
} zx_kernels;

const zx_kernels *zx_kernels_cpu(void); /* float paths, AVX2 where the exec says so */
const zx_kernels *zx_kernels_ref(void); /* the plain mathematics in double */
zx_isa zx_isa_detect(void);             /* what this processor has */

/* Pure: how a product is cut. Blocks of (m, n), never along k; depends on nothing but its arguments. */
void zx_matmul_block(int64_t m, int64_t n, int64_t k, bool trans_a, bool trans_b, int64_t *block_m, int64_t *block_n);

#endif
