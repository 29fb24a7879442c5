// fp16 and bf16: the launchers' checks, and how two numbers share a register.
#pragma once
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <fa/args.cuh>

namespace fa {

// True for sizes and a dtype that a 16-bit rung accepts. Names, shapes and devices are the caller's contract.
inline bool is_half(const fa_args &a) {
  return (a.dtype == FA_FP16 || a.dtype == FA_BF16) && a.B > 0 && a.H > 0 && a.Nq > 0 && a.Nk > 0 && a.D > 0;
}

// True when 8 elements, 16 bytes, at a time can be read from any row: base address and strides are multiples of that.
inline bool half_rows_aligned16(const void *base, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride[0] % 8 == 0 && stride[1] % 8 == 0 && stride[2] % 8 == 0;
}

// Two floats rounded to T (__half or __nv_bfloat16), to nearest even, in one register: x in its lower half.
template <typename T> __device__ __forceinline__ uint32_t pack2(float x, float y);

template <> __device__ __forceinline__ uint32_t pack2<__half>(float x, float y) {
  const __half2 xy = __floats2half2_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &xy, sizeof bits);
  return bits;
}

template <> __device__ __forceinline__ uint32_t pack2<__nv_bfloat16>(float x, float y) {
  const __nv_bfloat162 xy = __floats2bfloat162_rn(x, y);
  uint32_t bits;
  memcpy(&bits, &xy, sizeof bits);
  return bits;
}

} // namespace fa
