// 32 rows per warp: mma_m16n8k16 and ldmatrix_x4 of sm80.cuh twice, for two strips of 16 rows that share the operand B.
// A fragment of 32 rows is that of rows 0 to 15, then that of rows 16 to 31. With g = lane / 4 and t = lane % 4,
// c[2r] and c[2r + 1] of an accumulator are row g + 8r, columns 2t and 2t + 1, for r = 0 to 3.
//
// Addresses here are those of PTX, 32-bit offsets in the CTA's shared memory (smem_address of a pointer): one register,
// on which one XOR or one addition moves a whole tile's worth of accesses.
#pragma once
#include <fa/sm80.cuh>

namespace fa {

// "Warp-level matrix load instruction: ldmatrix"
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}

// Four matrices whose rows the lanes name, and the four that lie `below` bytes further on
__device__ __forceinline__ void ldmatrix_x4_twice(uint32_t (&r)[8], uint32_t row, int below) {
  ldmatrix_x4(reinterpret_cast<uint32_t (&)[4]>(r[0]), row);
  ldmatrix_x4(reinterpret_cast<uint32_t (&)[4]>(r[4]), row + below);
}

// "Non-bulk copy: cp.async"
__device__ __forceinline__ void cp_async_16(uint32_t to, const void *from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// C (32, 8) += A (32, 16) B (16, 8)
template <typename T>
__device__ __forceinline__ void mma_m32n8k16(float (&c)[8], const uint32_t (&a)[8], uint32_t b0, uint32_t b1) {
  mma_m16n8k16<T>(reinterpret_cast<float (&)[4]>(c[0]), reinterpret_cast<const uint32_t (&)[4]>(a[0]), b0, b1);
  mma_m16n8k16<T>(reinterpret_cast<float (&)[4]>(c[4]), reinterpret_cast<const uint32_t (&)[4]>(a[4]), b0, b1);
}

} // namespace fa
