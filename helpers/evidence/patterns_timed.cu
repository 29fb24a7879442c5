// How long a cp.async takes whose 32 addresses are data, as in patterns.cu: eight warps of one SM issue it thousands of
// times, and O gets the cycles per warp instruction. For a GPU alone: the emulator has no clock.
#include <fa/args.cuh>
#include <fa/sm80.cuh>

constexpr int room = 16384, rounds = 64, copies = 16;

template <int bytes, bool past_L1> __device__ __forceinline__ void copy(unsigned to, const char *from, int read) {
  if constexpr (past_L1)
    asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(read)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(bytes), "r"(read)
                 : "memory");
}

template <int bytes, bool past_L1> __global__ void timed(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  const float *q = static_cast<const float *>(a.Q) + 4 * (threadIdx.x % 32);
  const int offset = int(q[0]), read = int(q[1]);
  const char *from = static_cast<const char *>(a.K) + int(q[2]);
  const unsigned to = fa::smem_address(X_smem + (offset < 0 ? 0 : offset));
  long long begin = 0;
  for (int round = -4; round < rounds; ++round) { // the first ones bring the source into the cache
    if (round == 0) __syncthreads(), begin = clock64();
    if (offset >= 0) {
#pragma unroll
      for (int i = 0; i < copies; ++i) copy<bytes, past_L1>(to, from, read);
    }
    fa::cp_async_commit();
    fa::cp_async_wait<2>();
  }
  fa::cp_async_wait<0>();
  __syncthreads();
  const float warps = blockDim.x / 32.f;
  if (threadIdx.x == 0) static_cast<float *>(a.O)[0] = float(clock64() - begin) / (rounds * copies * warps);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const int which = int(args->scale); // along patterns.WIDTHS: copy4, copy8, copy16, copy16g
  if (which < 6 || which > 9) return cudaErrorInvalidValue;
  void (*const kernels[])(const fa_args) = {timed<4, false>, timed<8, false>, timed<16, false>, timed<16, true>};
  kernels[which - 6]<<<1, 256, room, stream>>>(*args);
  return cudaGetLastError();
}
