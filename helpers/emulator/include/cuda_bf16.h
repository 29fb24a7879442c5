// Stands in for CUDA's header of this name (CUDA Math API, "Bfloat16 Precision Intrinsics").
#pragma once
#include "cuda_runtime.h"
#include "emulator/rounding.h"

#define T __nv_bfloat16
#define T2 __nv_bfloat162
#define T_RAW __nv_bfloat16_raw
#define T_NAME(before, after) before##bfloat16##after
#define T_BITS emu::bfloat16_bits
#define T_VALUE emu::bfloat16_value
#include "emulator/float16.h"

typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

inline __nv_bfloat16 __float2bfloat16_rz(float x) {
  return __nv_bfloat16(__nv_bfloat16_raw{x != x ? (unsigned short)0x7fff : (unsigned short)(emu::bit_cast<unsigned>(x) >> 16)});
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
#define CUDART_INF_BF16 __ushort_as_bfloat16((unsigned short)0x7f80)
#define CUDART_NAN_BF16 __ushort_as_bfloat16((unsigned short)0x7fff)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16((unsigned short)0x0000)
#define CUDART_ONE_BF16 __ushort_as_bfloat16((unsigned short)0x3f80)
