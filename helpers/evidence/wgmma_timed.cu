// How long a wgmma takes: one or two warpgroups of one SM issue nothing else, and O gets the clocks of the SM per wgmma.
// wgmma_timed.py puts in front of this text what fa/wgmma.cuh lacks, N = 256. For a GPU alone: the emulator has no clock.
#include <fa/args.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

constexpr int rounds = 256, steps = 4, repeats = 4; // 16 products in a group, along a tile of 64 columns
constexpr int A_bytes = 64 * 128, B_bytes = 256 * 128;
constexpr int smem_bytes = 2 * A_bytes + B_bytes + 1024;

template <typename T, int N, bool A_in_registers, int transB> __global__ void __launch_bounds__(256) timed(const fa_args a) {
  extern __shared__ unsigned char smem[];
  for (int i = threadIdx.x; i < smem_bytes / 4; i += blockDim.x) reinterpret_cast<uint32_t *>(smem)[i] = 0;
  fa::fence_proxy_async();
  __syncthreads();
  const uint32_t A_smem = (fa::smem_address(smem) + 1023) / 1024 * 1024 + threadIdx.x / 128 * A_bytes;
  const uint32_t B_smem = (fa::smem_address(smem) + 1023) / 1024 * 1024 + 2 * A_bytes;
  const uint64_t A = fa::k_major(A_smem), B = transB ? fa::mn_major(B_smem, 64) : fa::k_major(B_smem);
  uint32_t A_reg[steps][4]; // zeros, which the compiler can't know
#pragma unroll
  for (int i = 0; i < 4 * steps; ++i) A_reg[i / 4][i % 4] = static_cast<const uint32_t *>(a.Q)[i];
  float sums[N / 8][4] = {};
  const auto products = [&](int times) {
#pragma unroll 1
    for (int round = 0; round < times; ++round) {
      fa::wgmma_fence();
#pragma unroll
      for (int i = 0; i < repeats * steps; ++i) {
        const int k = i % steps;
        const uint64_t B_k = B + (transB ? fa::mn_major_step(k) : fa::k_major_step(k, N));
        if constexpr (A_in_registers)
          fa::wgmma_mma_async<T, transB>(sums, A_reg[k], B_k, true);
        else
          fa::wgmma_mma_async<T, 0, transB>(sums, A + fa::k_major_step(k, 64), B_k, true);
      }
      fa::wgmma_commit_group();
      fa::wgmma_wait_group<1>();
    }
    fa::wgmma_wait_group<0>();
    __syncthreads();
  };
  products(4);
  const long long begin = clock64();
  products(rounds);
  const long long clocks = clock64() - begin;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) sum += sums[n][0] + sums[n][1] + sums[n][2] + sums[n][3];
  const int warpgroups = blockDim.x / 128;
  if (threadIdx.x == 0)
    static_cast<float *>(a.O)[0] = float(clocks) / (rounds * repeats * steps * warpgroups) + sum; // the sum is 0
}

template <typename T, int N> cudaError_t launch(const fa_args &a, int variant, cudaStream_t stream) {
  void (*const kernels[])(const fa_args) = {timed<T, N, false, 0>, timed<T, N, true, 0>, timed<T, N, false, 1>,
                                            timed<T, N, true, 1>};
  const auto kernel = kernels[variant % 4];
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error) return error;
  kernel<<<1, 128 * (1 + variant / 4), smem_bytes, stream>>>(a);
  return cudaGetLastError();
}

// scale: dtype * 24 + N's place * 8 + (warpgroups - 1) * 4 + MN-major B * 2 + A in registers
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const int which = int(args->scale), variant = which % 8;
  switch (which / 8) {
  case 0: return launch<fa::fp16, 64>(*args, variant, stream);
  case 1: return launch<fa::fp16, 128>(*args, variant, stream);
  case 2: return launch<fa::fp16, 256>(*args, variant, stream);
  case 3: return launch<fa::bf16, 64>(*args, variant, stream);
  case 4: return launch<fa::bf16, 128>(*args, variant, stream);
  case 5: return launch<fa::bf16, 256>(*args, variant, stream);
  default: return cudaErrorInvalidValue;
  }
}
