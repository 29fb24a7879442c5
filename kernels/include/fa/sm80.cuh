// PTX instructions of Ampere (sm_80) and later, one function each, named after the instruction. Turing (sm_75) has ldmatrix,
// ex2 and a smaller mma.
// The chapters are those of NVIDIA's "PTX ISA"; what each lane holds is in the figures of the sections named here.
#pragma once
#include <fa/half.cuh>

namespace fa {

// PTX addresses shared memory with 32 bits: the offset in the CTA's window, not a C++ pointer.
__device__ __forceinline__ uint32_t smem_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }

// --- ldmatrix: "Warp Level Matrix Multiply-Accumulate Instructions", "Warp-level matrix load instruction: ldmatrix"
// A warp loads 8 x 8 matrices of 16-bit elements, each row 16 bytes at any 16-byte aligned address. Lane l gives the
// address of row l % 8 of matrix l / 8 (x1: lanes 0 to 7, x2: 0 to 15) and receives, of every matrix, the elements
// (row l / 4, columns 2 (l % 4) and + 1); with .trans (rows 2 (l % 4) and + 1, column l / 4).

__device__ __forceinline__ void ldmatrix_x1(uint32_t (&r)[1], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(smem_address(row)) : "memory");
}

__device__ __forceinline__ void ldmatrix_x2(uint32_t (&r)[2], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_trans(uint32_t (&r)[2], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(smem_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem_address(row))
               : "memory");
}

// --- mma: "Warp Level Matrix Multiply-Accumulate Instructions", "Matrix Fragments for mma.m16n8k16 with floating point type"
// C (16, 8) += A (16, 16) B (16, 8) by one warp, A and B of 16-bit elements, C in float. With g = lane / 4, t = lane % 4:
// a[0], a[1]: rows g, g + 8 of A, columns 2t and 2t + 1; a[2], a[3]: the same rows, columns 2t + 8 and 2t + 9;
// b0, b1:     column g of B, rows 2t and 2t + 1, and 2t + 8 and 2t + 9;
// c[0], c[1]: row g of C, columns 2t and 2t + 1; c[2], c[3]: row g + 8.
// No memory is touched and nothing waited for: not volatile, the compiler may move it.
// Turing does it in two steps, the left half of A and the upper one of B first: mma.m16n8k8, of fp16 alone.
template <typename T> constexpr bool has_mma = true;
template <> constexpr bool has_mma<bf16> = __CUDA_ARCH_LIST__ >= 800; // the host's half has no __CUDA_ARCH__

template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma_m16n8k16<fp16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#if __CUDA_ARCH__ >= 800
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  const uint32_t b[2] = {b0, b1};
#pragma unroll
  for (int k = 0; k < 2; ++k)
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

template <>
__device__ __forceinline__ void mma_m16n8k16<bf16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- cp.async: "Data Movement and Conversion Instructions", "Non-bulk copy: cp.async"
// 16 bytes from global to shared memory, past the registers and L1 (.cg); both addresses are multiples of 16. `bytes`,
// 0 or 16, are read and the rest filled with zeros: with 0 the global address is not looked at.
__device__ __forceinline__ void cp_async_16(void *to, const void *from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// The copies this thread has issued since the last commit become a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the n youngest groups of this thread are still under way. Other threads' copies are theirs to wait
// for: a barrier comes next.
template <int n> __device__ __forceinline__ void cp_async_wait() {
  static_assert(n >= 0, "a number of groups");
  asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory");
}

// --- ex2: "Floating Point Instructions", "ex2". 2^x in one instruction, off by 2 ulp at most; subnormals are zero.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

} // namespace fa
