// What every launcher does before `<<<>>>`: refuse what the kernel can't do, and ask for more than 48 KB of shared memory.
#pragma once
#include <fa/args.cuh>

namespace fa {

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// True for sizes and a dtype that an fp32 rung accepts. Names, shapes and devices are the caller's contract.
inline bool is_fp32(const fa_args &a) {
  return a.dtype == FA_FP32 && a.B > 0 && a.H > 0 && a.Nq > 0 && a.Nk > 0 && a.D > 0;
}

// True when a float4 access to any row of the tensor is aligned: base address and strides are multiples of 16 bytes.
inline bool rows_aligned16(const void *base, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride[0] % 4 == 0 && stride[1] % 4 == 0 && stride[2] % 4 == 0;
}

// A grid's x dimension takes 2^31 - 1 blocks; y and z only 65535.
constexpr int64_t max_grid_x = 0x7fffffff, max_grid_y = 65535;

// More than 48 KB of dynamic shared memory per block has to be asked for. Without this the launch fails, and a caller
// who doesn't look at the error reads an output that was never written.
template <typename... Params> cudaError_t allow_smem(void (*kernel)(Params...), int bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

} // namespace fa
