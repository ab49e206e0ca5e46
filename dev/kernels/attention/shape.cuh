// What the kernels need to know of a problem, by value, and how documents lie in it.
#pragma once

#include "attention.h"

namespace zx
{

struct Shape {
    int n_docs, n_heads, n_heads_kv, group; /* group = n_heads / n_heads_kv */
    int n_tokens_q, n_tokens_k, max_len_q, max_len_k;
    const int32_t *cu_q, *cu_k;
    float scale, scale_log2; /* scale_log2 = scale * log2(e) */
};

struct Document {
    int q0, k0, len_q, len_k;
    int shift; /* causal: row i sees keys j <= i + shift */
};

inline Shape make_shape(const zx_attn_problem &p)
{
    Shape s;
    s.n_docs = (int)p.n_docs, s.n_heads = p.n_heads, s.n_heads_kv = p.n_heads_kv,
    s.group = p.n_heads / p.n_heads_kv;
    s.n_tokens_q = (int)p.n_tokens_q, s.n_tokens_k = (int)p.n_tokens_k;
    s.max_len_q = (int)p.max_len_q, s.max_len_k = (int)p.max_len_k;
    s.cu_q = p.cu_q, s.cu_k = p.cu_k;
    s.scale = p.scale, s.scale_log2 = (float)(p.scale * 1.4426950408889634);
    return s;
}

__device__ __forceinline__ Document document(const Shape &s, int doc)
{
    Document d;
    const int even_q = s.n_tokens_q / s.n_docs, even_k = s.n_tokens_k / s.n_docs;
    d.q0 = s.cu_q ? s.cu_q[doc] : doc * even_q;
    d.len_q = s.cu_q ? s.cu_q[doc + 1] - d.q0 : even_q;
    d.k0 = s.cu_k ? s.cu_k[doc] : doc * even_k;
    d.len_k = s.cu_k ? s.cu_k[doc + 1] - d.k0 : even_k;
    d.shift = d.len_k - d.len_q;
    return d;
}

}  // namespace zx
