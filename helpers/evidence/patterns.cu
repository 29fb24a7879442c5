// One warp, one access whose 32 addresses are data: helpers/evidence/patterns.py says what lies where.
//
// Q (.., 4): of lane l, in row l: the byte offset (-1: the lane takes no part), how many bytes a cp.async reads and from
// which byte of K. a.scale: the operation, counted along patterns.WIDTHS. O gets what was loaded, so that nothing is dropped.
#include <fa/args.cuh>
#include <fa/bulk.cuh>
#include <fa/sm80.cuh>

constexpr int room = 16384;

__device__ __forceinline__ int offset(const fa_args &a) {
  return int(static_cast<const float *>(a.Q)[4 * threadIdx.x]);
}

// Loads and atomics find something in shared memory: 16 bytes per lane at a time, without conflicts.
__device__ __forceinline__ void fill(unsigned char *X_smem) {
  for (int i = 16 * threadIdx.x; i < room; i += 512) *reinterpret_cast<float4 *>(X_smem + i) = make_float4(1, 2, 3, 4);
  __syncthreads();
}

__device__ __forceinline__ float sum(float x) { return x; }
__device__ __forceinline__ float sum(float2 x) { return x.x + x.y; }
__device__ __forceinline__ float sum(float4 x) { return x.x + x.y + x.z + x.w; }

template <typename T> __device__ __forceinline__ T some(float x);
template <> __device__ __forceinline__ float some(float x) { return x; }
template <> __device__ __forceinline__ float2 some(float x) { return make_float2(x, x); }
template <> __device__ __forceinline__ float4 some(float x) { return make_float4(x, x, x, x); }

__device__ __forceinline__ void keep(const fa_args &a, float x) { static_cast<float *>(a.O)[threadIdx.x] = x; }

template <typename T> __global__ void load(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  fill(X_smem);
  const int to = offset(a);
  T x = some<T>(0.f);
  if (to >= 0) x = *reinterpret_cast<const T *>(X_smem + to);
  keep(a, sum(x));
}

template <typename T> __global__ void store(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  const int to = offset(a);
  volatile unsigned char *seen = X_smem; // what is stored has to be there: somebody might look
  if (to >= 0) *reinterpret_cast<T *>(X_smem + to) = some<T>(a.scale);
  __syncthreads();
  if (to == -2) keep(a, seen[threadIdx.x]);
}

template <int bytes, bool past_L1> __global__ void copy(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  const float *q = static_cast<const float *>(a.Q) + 4 * threadIdx.x;
  const int to = offset(a), read = int(q[1]);
  const char *from = static_cast<const char *>(a.K) + int(q[2]);
  if (to >= 0) {
    if constexpr (past_L1)
      asm volatile("cp.async.cg.shared.global [%0], [%1], %2, %3;" ::"r"(fa::smem_address(X_smem + to)), "l"(from),
                   "n"(bytes), "r"(read)
                   : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(fa::smem_address(X_smem + to)), "l"(from),
                   "n"(bytes), "r"(read)
                   : "memory");
  }
  fa::cp_async_commit();
  fa::cp_async_wait<0>();
}

template <int matrices, bool transposed> __global__ void matrix(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  fill(X_smem);
  const unsigned char *row = X_smem + offset(a);
  uint32_t x[matrices], all = 0;
  if constexpr (matrices == 1) fa::ldmatrix_x1(x, row);
  if constexpr (matrices == 2) fa::ldmatrix_x2(x, row);
  if constexpr (matrices == 4 && !transposed) fa::ldmatrix_x4(x, row);
  if constexpr (matrices == 4 && transposed) fa::ldmatrix_x4_trans(x, row);
  for (int i = 0; i < matrices; ++i) all ^= x[i];
  keep(a, float(all));
}

template <int matrices, bool transposed> __global__ void stmatrix(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
#if !defined __CUDA_ARCH__ || __CUDA_ARCH__ >= 900
  const uint32_t row = fa::smem_address(X_smem + offset(a)), x[4] = {1, 2, 3, 4};
  if constexpr (matrices == 1)
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(row), "r"(x[0]) : "memory");
  if constexpr (matrices == 2)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(x[0]), "r"(x[1])
                 : "memory");
  if constexpr (matrices == 4 && !transposed) fa::stmatrix_x4(row, x);
  if constexpr (matrices == 4 && transposed) fa::stmatrix_x4_trans(row, x);
#endif
}

__global__ void atomic(const fa_args a) {
  extern __shared__ __align__(1024) unsigned char X_smem[];
  fill(X_smem);
  const int to = offset(a);
  if (to >= 0) atomicAdd(reinterpret_cast<unsigned *>(X_smem + to), threadIdx.x);
}

template <typename T> __global__ void global_load(const fa_args a) {
  const int to = offset(a);
  T x = some<T>(0.f);
  if (to >= 0) x = *reinterpret_cast<const T *>(static_cast<const char *>(a.K) + to);
  if (sum(x) == -1.f) keep(a, 1.f); // never: the source is ones
}

template <typename T> __global__ void global_store(const fa_args a) {
  const int to = offset(a);
  if (to >= 0) *reinterpret_cast<T *>(static_cast<char *>(a.O) + to) = some<T>(a.scale);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  using Kernel = void (*)(const fa_args);
  const Kernel kernels[] = {
      load<float>,
      load<float2>,
      load<float4>, // load4, load8, load16
      store<float>,
      store<float2>,
      store<float4>, // store4, ..
      copy<4, false>,
      copy<8, false>,
      copy<16, false>, // copy4, ..
      copy<16, true>,  // copy16g
      matrix<1, false>,
      matrix<2, false>,
      matrix<4, false>, // ldmatrix1, ..
      matrix<4, true>,  // ldmatrix4t
      atomic,           // atomic4
      global_load<float>,
      global_load<float2>,
      global_load<float4>, // global_load4, ..
      global_store<float>,
      global_store<float2>,
      global_store<float4>,
      stmatrix<1, false>,
      stmatrix<2, false>,
      stmatrix<4, false>, // stmatrix1, ..: before Hopper empty kernels
      stmatrix<4, true>,  // stmatrix4t
  };
  const int which = int(args->scale);
  if (which < 0 || which >= int(sizeof kernels / sizeof *kernels)) return cudaErrorInvalidValue;
  const Kernel kernel = kernels[which];
  kernel<<<1, 32, room, stream>>>(*args);
  return cudaGetLastError();
}
