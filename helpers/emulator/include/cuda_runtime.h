// Stands in for CUDA's header of this name: the same words, for the host's C++ compiler.
#pragma once
#define __CUDACC__ 1
#ifndef __CUDA_ARCH_LIST__  // the launcher may name another
#define __CUDA_ARCH_LIST__ 900
#endif
#define __CUDA_ARCH__ __CUDA_ARCH_LIST__
#define CUDART_VERSION 13000

#include <assert.h>  // ours
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>  // clock()

#define __host__
#define __device__
#if defined(__ELF__)
#pragma GCC diagnostic ignored "-Wattributes"  // a static variable can't be protected
#define __constant__ __attribute__((visibility("protected")))  // by which the runtime knows what kernels can't write
#else
#define __constant__
#endif
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)  // launch_bounds in emulator/launch.h
#define __maxnreg__(...)
#if defined(__clang__)
#define EMU_GUARDED  // all functions are
#define __global__ __attribute__((noinline))
#else
#define EMU_GUARDED __attribute__((stack_protect))
#define __global__ EMU_GUARDED __attribute__((noipa))  // a kernel is compiled by itself, as on a GPU
#endif

#include "emulator/runtime.h"
#include "emulator/driver.h"
#include "emulator/vector_types.h"
#include "emulator/api.h"
#include "emulator/launch.h"
#include "emulator/ptx.h"
#include "emulator/warp.h"
#include "emulator/atomics.h"
#include "emulator/math.h"

namespace emu {
inline uint3 unpack_thread(uint64_t i) { return {unsigned(i & 0xffff), unsigned(i >> 16 & 0xffff), unsigned(i >> 32)}; }
inline uint3 unpack_block(uint64_t i) { return {unsigned(i), unsigned(i >> 32 & 0xffff), unsigned(i >> 48)}; }
}  // namespace emu
#define threadIdx (::emu::unpack_thread(::emu::thread_index()))
#define blockIdx (::emu::unpack_block(::emu::block_index()))
#define blockDim (::dim3(::emu::unpack_thread(::emu::block_extent())))
#define gridDim (::dim3(::emu::unpack_block(::emu::grid_extent())))
constexpr int warpSize = 32;

inline void __threadfence() { emu::memory_fence(); }
inline void __threadfence_block() { emu::memory_fence(); }
inline void __threadfence_system() { emu::memory_fence(); }
inline void __nanosleep(unsigned) { emu::yield(); }
inline long long clock64() { return (long long)emu::clock(); }
inline unsigned long long globaltimer() { return emu::clock(); }
inline void cudaGridDependencySynchronize() { emu::yield(); }  // grids run one after the other
inline void cudaTriggerProgrammaticLaunchCompletion() { emu::yield(); }
[[noreturn]] inline void __trap(EMU_HERE) { emu::trap(EMU_SITE("__trap")); }
#define __builtin_assume(condition) ((void)0)
#define __assume(condition) ((void)0)

// Loads and stores with cache hints, which have nothing to hint at here.
#define EMU_LOAD(name)                   \
  template <class T>                     \
  inline T name(const T* p) {            \
    return *p;                           \
  }
#define EMU_STORE(name)                  \
  template <class T>                     \
  inline void name(T* p, std::decay_t<T> v) { \
    *p = v;                              \
  }
EMU_LOAD(__ldg) EMU_LOAD(__ldca) EMU_LOAD(__ldcg) EMU_LOAD(__ldcs) EMU_LOAD(__ldlu) EMU_LOAD(__ldcv)
EMU_STORE(__stwb) EMU_STORE(__stcg) EMU_STORE(__stcs) EMU_STORE(__stwt)
#undef EMU_LOAD
#undef EMU_STORE

inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }
inline size_t __cvta_generic_to_shared(const void* p) { return emu::shared_address(p); }
