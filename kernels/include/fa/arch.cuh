// What the GPU has for which a kernel is compiled. Tiles are the launcher's business too, and in host code there is no
// __CUDA_ARCH__. nvcc's __CUDA_ARCH_LIST__ is there in both; here it is one architecture, that of the GPU at hand.
#pragma once
#include <cuda_runtime.h>

// KB of shared memory that a block may have at most: "CUDA C++ Programming Guide", "Compute Capabilities".
#if __CUDA_ARCH_LIST__ < 800 // Turing: T4, RTX 20
#define FA_SMEM_KB 64
#elif __CUDA_ARCH_LIST__ == 800 || __CUDA_ARCH_LIST__ == 870 // A100, Orin
#define FA_SMEM_KB 163
#elif __CUDA_ARCH_LIST__ < 900 || __CUDA_ARCH_LIST__ >= 1200 // RTX 30, 40 and 50; A10, L4, L40S
#define FA_SMEM_KB 99
#else // Hopper, and Blackwell's data-centre GPUs
#define FA_SMEM_KB 227
#endif
