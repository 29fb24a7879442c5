// cp.async of one element: a tile may change its arrangement on the way; with cp_async_16 of sm80.cuh it can't.
#pragma once
#include <fa/sm80.cuh>

namespace fa {

// "Non-bulk copy: cp.async". 4 bytes from global to shared memory, past the registers (.ca: there is no other for 4 bytes).
// `bytes`, 0 or 4, are read and the rest filled with zeros: with 0 the global address is not looked at.
__device__ __forceinline__ void cp_async_4(void *to, const void *from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

} // namespace fa
