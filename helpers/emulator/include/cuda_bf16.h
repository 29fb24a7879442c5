// Stands in for CUDA's header of this name (CUDA Math API, "Bfloat16 Precision Intrinsics").
#pragma once
#include "cuda_runtime.h"
#include "emulator/rounding.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};
struct __nv_bfloat16 {
  unsigned short emu_bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float x) : emu_bits(emu::bfloat16_bits(x)) {}
  __nv_bfloat16(double x) : emu_bits(emu::bfloat16_bits(emu::to_odd(x))) {}
  __nv_bfloat16(int x) : __nv_bfloat16(double(x)) {}
  __nv_bfloat16(unsigned x) : __nv_bfloat16(double(x)) {}
  __nv_bfloat16(long long x) : __nv_bfloat16(double(x)) {}
  __nv_bfloat16(short x) : __nv_bfloat16(double(x)) {}
  __nv_bfloat16(unsigned short x) : __nv_bfloat16(double(x)) {}
  __nv_bfloat16(__nv_bfloat16_raw x) : emu_bits(x.x) {}
  operator float() const { return emu::bfloat16_value(emu_bits); }
  operator __nv_bfloat16_raw() const { return {emu_bits}; }
};
typedef __nv_bfloat16 nv_bfloat16;
struct __attribute__((aligned(4))) __nv_bfloat162 {
  __nv_bfloat16 x, y;
  __nv_bfloat162() = default;
  constexpr __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};
typedef __nv_bfloat162 nv_bfloat162;

#define T __nv_bfloat16
#define T2 __nv_bfloat162
#include "emulator/arithmetic16.h"
#undef T
#undef T2

inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rz(float x) {
  return __nv_bfloat16(__nv_bfloat16_raw{x != x ? (unsigned short)0x7fff : (unsigned short)(emu::bit_cast<unsigned>(x) >> 16)});
}
inline __nv_bfloat16 __double2bfloat16(double x) { return __nv_bfloat16(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
inline __nv_bfloat162 __float2bfloat162_rn(float x) { return {__nv_bfloat16(x), __nv_bfloat16(x)}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
inline float2 __bfloat1622float2(__nv_bfloat162 x) { return {float(x.x), float(x.y)}; }
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 x) { return x.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 x) { return x.y; }
inline __nv_bfloat162 __low2bfloat162(__nv_bfloat162 x) { return {x.x, x.x}; }
inline __nv_bfloat162 __high2bfloat162(__nv_bfloat162 x) { return {x.y, x.y}; }
inline __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 x, __nv_bfloat162 y) { return {x.x, y.x}; }
inline __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 x, __nv_bfloat162 y) { return {x.y, y.y}; }
inline __nv_bfloat162 __lowhigh2highlow(__nv_bfloat162 x) { return {x.y, x.x}; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.emu_bits; }
inline short __bfloat16_as_short(__nv_bfloat16 x) { return short(x.emu_bits); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) { return __nv_bfloat16(__nv_bfloat16_raw{x}); }
inline __nv_bfloat16 __short_as_bfloat16(short x) { return __nv_bfloat16(__nv_bfloat16_raw{(unsigned short)x}); }
inline __nv_bfloat16 __int2bfloat16_rn(int x) { return __nv_bfloat16(x); }
inline int __bfloat162int_rn(__nv_bfloat16 x) { return __float2int_rn(float(x)); }
inline int __bfloat162int_rz(__nv_bfloat16 x) { return __float2int_rz(float(x)); }
#define CUDART_INF_BF16 __ushort_as_bfloat16((unsigned short)0x7f80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16((unsigned short)0x7fff)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16((unsigned short)0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16((unsigned short)0x3f80)
