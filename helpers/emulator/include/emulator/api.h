// The part of the CUDA runtime API that launchers use. Launches are synchronous, so streams and events are formal.
// C++ linkage keeps these apart from a real libcudart in the same process.
#pragma once
#include <cstdlib>
#include <cstring>

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoDevice = 100,
  cudaErrorInvalidDevice = 101,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorAssert = 710,
  cudaErrorIllegalInstruction = 715,
  cudaErrorMisalignedAddress = 716,
  cudaErrorLaunchFailure = 719,
  cudaErrorNotSupported = 801,
  cudaErrorUnknown = 999,
};
typedef cudaError_t cudaError;
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9
};
enum cudaSharedCarveout {
  cudaSharedmemCarveoutDefault = -1,
  cudaSharedmemCarveoutMaxL1 = 0,
  cudaSharedmemCarveoutMaxShared = 100
};
enum cudaFuncCache { cudaFuncCachePreferNone, cudaFuncCachePreferShared, cudaFuncCachePreferL1, cudaFuncCachePreferEqual };
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxBlockDimX = 2,
  cudaDevAttrMaxBlockDimY = 3,
  cudaDevAttrMaxBlockDimZ = 4,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess = 0,
  cudaDriverEntryPointSymbolNotFound = 1,
  cudaDriverEntryPointVersionNotSufficent = 2
};
constexpr unsigned long long cudaEnableDefault = 0, cudaEnableLegacyStream = 1, cudaEnablePerThreadDefaultStream = 2;

inline const char* cudaGetErrorString(cudaError_t e) { return emu::error_text(e); }
inline const char* cudaGetErrorName(cudaError_t e) { return emu::error_name(e); }
inline cudaError_t cudaGetLastError() { return cudaError_t(emu::get_last_error(true)); }
inline cudaError_t cudaPeekAtLastError() { return cudaError_t(emu::get_last_error(false)); }

namespace emu {
// What GPUs differ in ("CUDA C++ Programming Guide", "Compute Capabilities"): shared memory of an SM, what a block may have
// of it, and an SM's threads.
constexpr int arch = __CUDA_ARCH__;
constexpr bool turing = arch < 800, gaming = !turing && (arch < 900 ? arch % 100 != 0 && arch != 870 : arch >= 1200);
constexpr int shared_of_sm = (turing ? 64 : gaming ? 100 : arch < 900 ? 164 : 228) << 10;
constexpr int shared_opt_in = turing ? shared_of_sm : shared_of_sm - (1 << 10);
constexpr int threads_of_sm = turing ? 1024 : gaming ? 1536 : 2048;
}  // namespace emu

template <class... P>
inline cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;  // a hint
  return cudaError_t(emu::set_dynamic_shared_limit(reinterpret_cast<const void*>(kernel), value, emu::shared_opt_in));
}
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) return cudaSuccess;
  return cudaError_t(emu::set_dynamic_shared_limit(kernel, value, emu::shared_opt_in));
}
template <class K>
inline cudaError_t cudaFuncSetCacheConfig(K*, cudaFuncCache) {
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  return device == 0 ? cudaSuccess : cudaError_t(emu::set_error(cudaErrorInvalidDevice));
}

// The emulated device has the figures of an H200, but for those that come with the compute capability.
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (device != 0) return cudaError_t(emu::set_error(cudaErrorInvalidDevice));
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY: *value = 65535; break;
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMultiProcessorCount: *value = emu::multiprocessors(); break;
    case cudaDevAttrL2CacheSize: *value = 60 << 20; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = emu::threads_of_sm; break;
    case cudaDevAttrComputeCapabilityMajor: *value = emu::arch / 100; break;
    case cudaDevAttrComputeCapabilityMinor: *value = emu::arch / 10 % 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = emu::shared_of_sm; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = emu::shared_opt_in; break;
    default: return cudaError_t(emu::set_error(cudaErrorInvalidValue));
  }
  return cudaSuccess;
}

// By threads and dynamic shared memory alone: the emulator doesn't know registers.
template <class K>
inline cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, K*, int threads, size_t bytes) {
  if (threads < 1 || threads > 1024) return cudaError_t(emu::set_error(cudaErrorInvalidValue));
  const int warps = (threads + 31) / 32, of_sm = emu::threads_of_sm / 32;
  const int by_threads = of_sm / warps < 32 ? of_sm / warps : 32;
  const int by_shared = int(unsigned(emu::shared_of_sm) / (bytes + 1024));  // the system keeps 1 KB of each block's
  *blocks = by_threads < by_shared ? by_threads : by_shared;
  return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** p, size_t bytes) { return cudaError_t(emu::allocate(p, bytes)); }
template <class T>
inline cudaError_t cudaMalloc(T** p, size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(p), bytes);
}
inline cudaError_t cudaFree(void* p) { return cudaError_t(emu::release(p)); }
inline cudaError_t cudaMallocAsync(void** p, size_t bytes, cudaStream_t) { return cudaMalloc(p, bytes); }
inline cudaError_t cudaFreeAsync(void* p, cudaStream_t) { return cudaFree(p); }
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaError_t(emu::copy_bytes("cudaMemcpy", to, from, bytes, kind));
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t = nullptr) {
  return cudaError_t(emu::copy_bytes("cudaMemcpyAsync", to, from, bytes, kind));
}
inline cudaError_t cudaMemset(void* p, int byte, size_t bytes) {
  return cudaError_t(emu::set_bytes("cudaMemset", p, byte, bytes));
}
inline cudaError_t cudaMemsetAsync(void* p, int byte, size_t bytes, cudaStream_t = nullptr) {
  return cudaError_t(emu::set_bytes("cudaMemsetAsync", p, byte, bytes));
}
template <class T>
inline cudaError_t cudaMemcpyToSymbol(T& symbol, const void* from, size_t bytes, size_t offset = 0,
                                      cudaMemcpyKind = cudaMemcpyHostToDevice) {
  if (offset > sizeof symbol || bytes > sizeof symbol - offset)
    return cudaError_t(emu::set_error(cudaErrorInvalidValue, "cudaMemcpyToSymbol past the end of the variable"));
  return cudaError_t(emu::copy_bytes("cudaMemcpyToSymbol", reinterpret_cast<char*>(&symbol) + offset, from, bytes, cudaMemcpyDefault));
}
template <class T>
inline cudaError_t cudaMemcpyToSymbolAsync(T& symbol, const void* from, size_t bytes, size_t offset, cudaMemcpyKind kind,
                                           cudaStream_t = nullptr) {
  return cudaMemcpyToSymbol(symbol, from, bytes, offset, kind);
}
template <class T>
inline cudaError_t cudaMemcpyFromSymbol(void* to, const T& symbol, size_t bytes, size_t offset = 0,
                                        cudaMemcpyKind = cudaMemcpyDeviceToHost) {
  if (offset > sizeof symbol || bytes > sizeof symbol - offset)
    return cudaError_t(emu::set_error(cudaErrorInvalidValue, "cudaMemcpyFromSymbol past the end of the variable"));
  return cudaError_t(emu::copy_bytes("cudaMemcpyFromSymbol", to, reinterpret_cast<const char*>(&symbol) + offset, bytes, cudaMemcpyDefault));
}
inline cudaError_t cudaDeviceSynchronize() { return cudaPeekAtLastError(); }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaPeekAtLastError(); }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = nullptr;
  return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

// Of the driver API, what <cuda.h> declares here.
inline cudaError_t cudaGetDriverEntryPoint(const char* symbol, void** function, unsigned long long,
                                           cudaDriverEntryPointQueryResult* result = nullptr) {
  *function = emu::driver_entry_point(symbol);
  if (result != nullptr) *result = *function == nullptr ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long flags,
                                                    cudaDriverEntryPointQueryResult* result = nullptr) {
  return cudaGetDriverEntryPoint(symbol, function, flags, result);
}
