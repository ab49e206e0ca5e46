// The Hopper instructions that the attention kernels use, one small function each.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "wgmma.cuh"

namespace zx
{

__device__ __forceinline__ uint32_t smem_address(const void *p)
{
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- mbarriers: addresses are shared-memory addresses of 8-byte barriers ----

__device__ __forceinline__ void mbar_init(uint32_t bar, uint32_t arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbar_init_fence()
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(uint32_t bar)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void mbar_arrive_expect(uint32_t bar, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

__device__ __forceinline__ void mbar_wait(uint32_t bar, uint32_t parity)
{
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n}\n" ::"r"(bar),
                 "r"(parity)
                 : "memory");
}

// ---- named barriers among warp groups ----

template <int THREADS> __device__ __forceinline__ void named_sync(int id)
{
    asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

template <int THREADS> __device__ __forceinline__ void named_arrive(int id)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(THREADS) : "memory");
}

// ---- the bulk tensor copy engine ----

// Box of a (tokens, heads, d) tensor at (token, head, column) into shared memory; counts bytes on bar.
__device__ __forceinline__ void tma_load(uint32_t dst, const CUtensorMap *map, uint32_t bar, int column,
                                         int head, int token)
{
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(dst),
                 "l"(map), "r"(bar), "r"(column), "r"(head), "r"(token)
                 : "memory");
}

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap *map)
{
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Bytes from global to shared memory, both 16-byte aligned; counts bytes on bar.
__device__ __forceinline__ void bulk_load(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
}

// Ordinary stores to shared memory become visible to wgmma and the copy engine.
__device__ __forceinline__ void async_proxy_fence()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- registers ----

template <int N> __device__ __forceinline__ void registers_give()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> __device__ __forceinline__ void registers_take()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// ---- warp-group products ----

__device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int PENDING> __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Ties a register array to this point of the program, so that no access moves across an asynchronous product.
template <int N> __device__ __forceinline__ void pin(float (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+f"(r[i])::"memory");
}

template <int N> __device__ __forceinline__ void pin(uint32_t (&r)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++)
        asm volatile("" : "+r"(r[i])::"memory");
}

// The same value in all lanes, said so that the compiler knows it and keeps what follows from it in uniform
// registers, where the operands of products are wanted.
__device__ __forceinline__ int uniform(int x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

// Shared-memory operand in the 128-byte swizzle. Tiles are chunks of 64 columns: row r of a chunk is 128
// bytes at 128 r, groups of 8 rows are 1024 bytes. chunk_bytes is the distance between chunks along the
// contiguous axis; only an operand whose M or N axis is the contiguous one reads it. The low word is worked
// out once per tile, from uniform values; a step along the tile adds a constant number of bytes to it.
__device__ __forceinline__ uint32_t operand_low(uint32_t address, uint32_t chunk_bytes)
{
    return (address & 0x3FFFF) >> 4 | (chunk_bytes >> 4) << 16;
}

__device__ __forceinline__ uint64_t operand(uint32_t low, uint32_t bytes_on)
{
    return (uint64_t)(1024 >> 4 | 1 << 30) << 32 | (low + (bytes_on >> 4));
}

// ---- small arithmetic ----

__device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <class T> __device__ __forceinline__ uint32_t pack(float low, float high);
template <> __device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}
template <> __device__ __forceinline__ uint32_t pack<__half>(float low, float high)
{
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// Transposes a 4 x 4 matrix of words held by four neighbouring lanes: lane t gives w[k], gets lane k's w[t].
__device__ __forceinline__ void quad_transpose(uint32_t (&w)[4], int lane)
{
    const bool odd = lane & 1, high = lane & 2;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? w[i] : w[i + 1], 1);
        w[i] = odd ? got : w[i];
        w[i + 1] = odd ? w[i + 1] : got;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? w[i] : w[i + 2], 2);
        w[i] = high ? got : w[i];
        w[i + 2] = high ? w[i + 2] : got;
    }
}

// Stores row i (0: lane / 4, 1: eight rows further down) of a 64 x COLS accumulator as T, 16 bytes a lane.
template <class T, int COLS>
__device__ __forceinline__ void store_row(const float (&acc)[COLS / 2], int i, float factor, bool inside,
                                          int lane, uint16_t *out)
{
#pragma unroll
    for (int j = 0; j < COLS / 32; j++) {
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int at = 4 * (4 * j + k) + 2 * i;
            words[k] = pack<T>(acc[at] * factor, acc[at + 1] * factor);
        }
        quad_transpose(words, lane);
        if (inside)
            *reinterpret_cast<uint4 *>(out + 32 * j + 8 * (lane & 3)) =
                make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Four 8 x 8 matrices of 16-bit elements into shared memory; lane l gives the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c,
                                               uint32_t d)
{
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a),
                 "r"(b), "r"(c), "r"(d)
                 : "memory");
}

// ---- turns among blocks ----

__device__ __forceinline__ void device_fence()
{
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

__device__ __forceinline__ unsigned load_acquire(const unsigned *p)
{
    unsigned x;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}

__device__ __forceinline__ void add_release(unsigned *p, unsigned x)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}

__device__ __forceinline__ void add_to_global(float *p, float a, float b, float c, float d)
{
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

}  // namespace zx
