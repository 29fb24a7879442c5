// The few lines of arithmetic and data movement that every fp32 rung writes the same way.
#pragma once
#include <cuda_runtime.h>

namespace fa {

#define FA_INFINITY __int_as_float(0x7f800000)
constexpr float log2_e = 1.4426950408889634f; // exp(x) = exp2(x * log2_e)
constexpr float ln_2 = 0.6931471805599453f;   // ln(x) = log2(x) * ln_2

// Four floats at once: one 16-byte access to memory, four registers. `p` is 16-byte aligned.
__device__ __forceinline__ void load4(float *x_reg, const float *p) {
  const float4 v = *reinterpret_cast<const float4 *>(p);
  x_reg[0] = v.x, x_reg[1] = v.y, x_reg[2] = v.z, x_reg[3] = v.w;
}

__device__ __forceinline__ void store4(float *p, const float *x_reg) {
  *reinterpret_cast<float4 *>(p) = make_float4(x_reg[0], x_reg[1], x_reg[2], x_reg[3]);
}

// n floats, n = 1, 2 or 4, in one access
template <int n> __device__ __forceinline__ void store(float *p, const float *x_reg) {
  static_assert(n == 1 || n == 2 || n == 4, "accesses have 4, 8 or 16 bytes");
  if constexpr (n == 4)
    store4(p, x_reg);
  else if constexpr (n == 2)
    *reinterpret_cast<float2 *>(p) = make_float2(x_reg[0], x_reg[1]);
  else
    *p = *x_reg;
}

} // namespace fa
