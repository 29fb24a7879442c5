"""What the tests of mbarriers and bulk copies share: PTX in functions, a kernel around a body, boxes in numpy."""

from __future__ import annotations

import numpy as np
import torch
from emulated import build, launch

PTX = r"""
#include <fa/args.cuh>
#include <fa/sm90.cuh>
__device__ inline uint32_t place(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ inline void bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
__device__ inline void bulk_store(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ inline void bulk_add(void *to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
               ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int n> __device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(n) : "memory"); }
template <int n> __device__ inline void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(n) : "memory");
}
"""


def program(body: str, shape: str = "1, 32", before: str = "", dynamic: int = 0) -> str:
    """A rung around ``body``, which sees `out`, `in` (float), `t`, `a` and `map` (of the ints at a.K, if there are any):
    rank, type, item, swizzle, sizes, strides in bytes, box, steps; the tensor itself is Q, or V if there is one."""
    dims, threads = shape.split(",")
    return f"""{PTX}{before}
__global__ void kernel(const fa_args a, const __grid_constant__ CUtensorMap map) {{
  [[maybe_unused]] float *out = static_cast<float *>(a.O);
  [[maybe_unused]] const float *in = static_cast<const float *>(a.Q);
  [[maybe_unused]] const unsigned t = threadIdx.x;
{body}
}}
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {{
  CUtensorMap map = {{}};
  if (args->K) {{
    int k[24];
    cudaMemcpy(k, args->K, sizeof k, cudaMemcpyDeviceToHost);
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result)) return cudaErrorUnknown;
    const auto encode = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
    cuuint64_t sizes[5], strides[5];
    cuuint32_t box[5], steps[5];
    for (int d = 0; d < 5; ++d) sizes[d] = k[4 + d], strides[d] = k[9 + d], box[d] = k[14 + d], steps[d] = k[19 + d];
    const CUresult e = encode(&map, CUtensorMapDataType(k[1]), k[0], k[3] & 16 ? args->O : const_cast<void *>(args->V ? args->V : args->Q), sizes, strides,
                              box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CUtensorMapSwizzle(k[3] & 15), CU_TENSOR_MAP_L2_PROMOTION_NONE,
                              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (e != CUDA_SUCCESS) return cudaError_t(e);
  }}
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, {dynamic});
  kernel<<<{dims},{threads}, {dynamic}>>>(*args, map);
  return cudaGetLastError();
}}
"""


def run(body: str, out: torch.Tensor, shape: str = "1, 32", before: str = "", **tensors: torch.Tensor) -> torch.Tensor:
    return launch(build(program(body, shape, before)), out, **tensors)


def of_map(rank, kind, item, swizzle, sizes, strides, box, steps=(1, 1, 1, 1, 1), output=False) -> list[int]:
    """The ints by which ``program`` encodes a map."""

    def five(x, fill):
        return [*x, *[fill] * (5 - len(x))]

    return [
        rank,
        kind,
        item,
        swizzle | (16 if output else 0),
        *five(sizes, 1),
        *five(strides, 0),
        *five(box, 1),
        *five(steps, 1),
    ]


def box_of(memory: np.ndarray, sizes, strides, box, steps, at) -> np.ndarray:
    """What a box brings, by the definition in the PTX ISA: elements of ``memory`` (1-D) at strides in elements, innermost
    first; zeros outside. Innermost dimension last in the result."""
    counts = [box[0], *(-(-b // s) for b, s in zip(box[1:], steps[1:]))]
    result = np.zeros(counts[::-1], memory.dtype)
    for index in np.ndindex(*counts[::-1]):
        i = index[::-1]
        place = [at[0] + i[0], *(at[d] + i[d] * steps[d] for d in range(1, len(sizes)))]
        if all(0 <= p < n for p, n in zip(place, sizes)):
            result[index] = memory[sum(p * s for p, s in zip(place, (1, *strides)))]
    return result


def swizzled(flat: np.ndarray, mode: int) -> np.ndarray:
    """Bytes in the order of shared memory from a 1024-byte boundary on: 16-byte chunk c of row r (of 32, 64 or 128 bytes, as
    ``mode`` 1, 2, 3 says; rows counted in lines of 128 bytes) lies at chunk c XOR the line's number."""
    data = flat.view(np.uint8).reshape(-1, 16)
    result = np.empty_like(data)
    for chunk in range(len(data)):
        line = chunk // 8
        result[chunk ^ (line % 8 & (1 << mode) - 1)] = data[chunk]
    return result.reshape(-1)
