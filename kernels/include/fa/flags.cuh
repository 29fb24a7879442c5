// Flags between CTAs and between GPUs: what was written before a flag was set can be read by whoever has seen it. The
// sections named here are those of NVIDIA's "PTX ISA".
#pragma once
#include <cstdint>
#include <cuda_runtime.h>

namespace fa {

// --- "Memory Consistency Model", release and acquire patterns. gpu: among the CTAs of one GPU; sys: among GPUs, too.

__device__ __forceinline__ void publish_gpu(unsigned *flag, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

__device__ __forceinline__ void publish_sys(unsigned *flag, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Looks once: has the flag at least this value?
__device__ __forceinline__ bool is_set_gpu(const unsigned *flag, unsigned value) {
  unsigned seen;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  return seen >= value;
}

// Waits until the flag has at least this value.
__device__ __forceinline__ void await_gpu(const unsigned *flag, unsigned value) {
  unsigned seen;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  while (seen < value);
}

__device__ __forceinline__ void await_sys(const unsigned *flag, unsigned value) {
  unsigned seen;
  do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
  while (seen < value);
}

// --- cp.async.bulk: "Data Movement and Conversion Instructions". Bytes from shared to global memory, as part of this
// thread's next group (cp_async_bulk_commit_group of sm90.cuh). Addresses and sizes are multiples of 16.
__device__ __forceinline__ void cp_async_bulk_store(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

// What generic accesses and waits have seen, before TMA touches the same global memory.
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

} // namespace fa
