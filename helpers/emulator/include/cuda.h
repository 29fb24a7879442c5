// Stands in for the CUDA driver API's header. C++ linkage keeps its functions apart from a real libcuda in the process.
#pragma once
#include "cuda_runtime.h"

#define CUDA_VERSION 13000

inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                                       const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                                       const cuuint32_t* step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                       CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return emu::encode_tiled(map, type, rank, base, size, stride, box, step, interleave, swizzle, promotion, fill);
}
