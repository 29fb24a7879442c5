// Stands in for CUDA's header of this name (CUDA Math API, "Half Precision Intrinsics").
#pragma once
#include "cuda_runtime.h"
#include "emulator/rounding.h"

#define T __half
#define T2 __half2
#define T_RAW __half_raw
#define T_NAME(before, after) before##half##after
#define T_BITS emu::half_bits
#define T_VALUE emu::half_value
#include "emulator/float16.h"

typedef __half half;
typedef __half2 half2;

inline __half __float2half_rz(float x) {
  const __half h(x);
  return emu::half_value(h.emu_bits & 0x7fff) > ::fabsf(x) ? __half(__half_raw{(unsigned short)(h.emu_bits - 1)}) : h;
}
inline __half2 __half2half2(__half x) { return {x, x}; }
inline __half __uint2half_rn(unsigned x) { return __half(x); }
inline __half __short2half_rn(short x) { return __half(x); }
inline __half __ushort2half_rn(unsigned short x) { return __half(x); }
inline unsigned __half2uint_rn(__half x) { return __float2uint_rn(float(x)); }
inline unsigned __half2uint_rz(__half x) { return __float2uint_rz(float(x)); }
#define CUDART_INF_FP16 __ushort_as_half((unsigned short)0x7c00)
#define CUDART_NAN_FP16 __ushort_as_half((unsigned short)0x7fff)
#define CUDART_MAX_NORMAL_FP16 __ushort_as_half((unsigned short)0x7bff)
#define CUDART_ZERO_FP16 __ushort_as_half((unsigned short)0x0000)
#define CUDART_ONE_FP16 __ushort_as_half((unsigned short)0x3c00)
