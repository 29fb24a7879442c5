// Stands in for CUDA's header of this name (CUDA Math API, "Half Precision Intrinsics").
#pragma once
#include "cuda_runtime.h"
#include "emulator/rounding.h"

struct __half_raw {
  unsigned short x;
};
struct __half {
  unsigned short emu_bits;
  __half() = default;
  __half(float x) : emu_bits(emu::half_bits(x)) {}
  __half(double x) : emu_bits(emu::half_bits(emu::to_odd(x))) {}
  __half(int x) : __half(double(x)) {}
  __half(unsigned x) : __half(double(x)) {}
  __half(long long x) : __half(double(x)) {}
  __half(short x) : __half(double(x)) {}
  __half(unsigned short x) : __half(double(x)) {}
  __half(__half_raw x) : emu_bits(x.x) {}
  operator float() const { return emu::half_value(emu_bits); }
  operator __half_raw() const { return {emu_bits}; }
};
typedef __half half;
struct __attribute__((aligned(4))) __half2 {
  __half x, y;
  __half2() = default;
  constexpr __half2(__half x, __half y) : x(x), y(y) {}
};
typedef __half2 half2;

#define T __half
#define T2 __half2
#include "emulator/arithmetic16.h"
#undef T
#undef T2

inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline __half __float2half_rz(float x) {
  const __half h(x);
  return emu::half_value(h.emu_bits & 0x7fff) > ::fabsf(x) ? __half(__half_raw{(unsigned short)(h.emu_bits - 1)}) : h;
}
inline __half __double2half(double x) { return __half(x); }
inline float __half2float(__half x) { return float(x); }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
inline __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
inline __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
inline float2 __half22float2(__half2 x) { return {float(x.x), float(x.y)}; }
inline __half __low2half(__half2 x) { return x.x; }
inline __half __high2half(__half2 x) { return x.y; }
inline __half2 __low2half2(__half2 x) { return {x.x, x.x}; }
inline __half2 __high2half2(__half2 x) { return {x.y, x.y}; }
inline __half2 __lows2half2(__half2 x, __half2 y) { return {x.x, y.x}; }
inline __half2 __highs2half2(__half2 x, __half2 y) { return {x.y, y.y}; }
inline __half2 __lowhigh2highlow(__half2 x) { return {x.y, x.x}; }
inline unsigned short __half_as_ushort(__half x) { return x.emu_bits; }
inline short __half_as_short(__half x) { return short(x.emu_bits); }
inline __half __ushort_as_half(unsigned short x) { return __half(__half_raw{x}); }
inline __half __short_as_half(short x) { return __half(__half_raw{(unsigned short)x}); }
inline __half __int2half_rn(int x) { return __half(x); }
inline __half __uint2half_rn(unsigned x) { return __half(x); }
inline __half __short2half_rn(short x) { return __half(x); }
inline __half __ushort2half_rn(unsigned short x) { return __half(x); }
inline unsigned __half2uint_rn(__half x) { return __float2uint_rn(float(x)); }
inline unsigned __half2uint_rz(__half x) { return __float2uint_rz(float(x)); }
inline int __half2int_rn(__half x) { return __float2int_rn(float(x)); }
inline int __half2int_rz(__half x) { return __float2int_rz(float(x)); }
#define CUDART_INF_FP16 __ushort_as_half((unsigned short)0x7c00)
#define CUDART_NAN_FP16 __ushort_as_half((unsigned short)0x7fff)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half((unsigned short)0x7bff)
#define CUDART_ZERO_FP16 __ushort_as_half((unsigned short)0x0000)
#define CUDART_ONE_FP16 __ushort_as_half((unsigned short)0x3c00)
