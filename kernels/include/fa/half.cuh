// fp16 and bf16: the two types, how two numbers share a register, and the launchers' checks.
#pragma once
#include <cstring>
#include <fa/args.cuh>

namespace fa {

// 16 bits that are moved, multiplied by the tensor cores and rounded to; all else is done in float. __half and
// __nv_bfloat16 can do arithmetic as well: nearly 18,000 lines of cuda_fp16 and cuda_bf16, which would slow every build.
struct fp16 {
  uint16_t bits;
  fp16() = default;
  __device__ explicit fp16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bf16 { // a float's upper half
  uint16_t bits;
  bf16() = default;
  __device__ explicit bf16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};

// Two floats rounded to T (fp16 or bf16), to nearest even, in one register: x in its lower half.
template <typename T> __device__ __forceinline__ uint32_t pack2(float x, float y);

template <> __device__ __forceinline__ uint32_t pack2<fp16>(float x, float y) {
#if __CUDA_ARCH__ >= 800
  uint32_t xy;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(xy) : "f"(y), "f"(x));
  return xy;
#else // Turing rounds one at a time
  return fp16(x).bits | uint32_t(fp16(y).bits) << 16;
#endif
}

template <> __device__ __forceinline__ uint32_t pack2<bf16>(float x, float y) {
  uint32_t xy;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(xy) : "f"(y), "f"(x));
  return xy;
}

// The two numbers of T in a register, the lower half first.
template <typename T> __device__ __forceinline__ float2 unpack2(uint32_t bits) {
  T xy[2];
  memcpy(xy, &bits, sizeof bits);
  return make_float2(float(xy[0]), float(xy[1]));
}

// True for sizes and a dtype that a 16-bit rung accepts. Names, shapes and devices are the caller's contract.
inline bool is_half(const fa_args &a) {
  return (a.dtype == FA_FP16 || a.dtype == FA_BF16) && a.B > 0 && a.H > 0 && a.Nq > 0 && a.Nk > 0 && a.D > 0;
}

// True when 8 elements, 16 bytes, at a time can be read from any row: base address and strides are multiples of that.
inline bool half_rows_aligned16(const void *base, const int64_t (&stride)[3]) {
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && stride[0] % 8 == 0 && stride[1] % 8 == 0 && stride[2] % 8 == 0;
}

} // namespace fa
