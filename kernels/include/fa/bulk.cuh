// Copies of a run of bytes by one thread, and matrices that a warp stores: what 32, 33 and 51 need of Hopper (sm_90) beyond
// sm90.cuh. The sections named here are those of NVIDIA's "PTX ISA".
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

namespace fa {

// --- cp.async.bulk: "Data Movement and Conversion Instructions", "cp.async.bulk". Addresses and sizes are multiples of 16.

// `bytes` from global to shared memory; `barrier` hears of them.
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// --- cp.reduce.async.bulk: the same chapter. Adds bytes / 4 floats in shared memory to as many in global memory, each in
// one piece, in no order, as part of this thread's next group of copies (cp_async_bulk_commit_group of sm90.cuh).
__device__ __forceinline__ void cp_reduce_async_bulk_add(float *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// Waits until at most the n youngest groups of this thread are under way: what the others moved is where it was to go.
template <int n> __device__ __forceinline__ void cp_async_bulk_wait_group() {
  static_assert(n >= 0, "a number of groups");
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory");
}

// --- stmatrix: "Warp Level Matrix Multiply-Accumulate Instructions", "Warp-level matrix store instruction:
// stmatrix". ldmatrix_x4 the other way: lane l gives the address of row l % 8 of matrix l / 8, and of every matrix the
// elements (row l / 4, columns 2 (l % 4) and + 1); with .trans (rows 2 (l % 4) and + 1, column l / 4).

__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

} // namespace fa
