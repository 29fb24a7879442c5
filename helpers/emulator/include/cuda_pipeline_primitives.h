// Stands in for CUDA's header of this name (CUDA C++ Programming Guide, "Pipeline Primitives Interface").
#pragma once
#include "cuda_runtime.h"

inline void __pipeline_memcpy_async(void* shared, const void* global, size_t bytes, size_t zeros = 0, EMU_HERE) {
  emu::async_copy(shared, global, bytes, bytes - zeros, EMU_SITE("__pipeline_memcpy_async"));
}
inline void __pipeline_commit() { emu::async_commit(); }
inline void __pipeline_wait_prior(size_t groups) { emu::async_wait(unsigned(groups)); }
