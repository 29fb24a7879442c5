// 50_ring: attention across GPUs: merge two partial results in one pass
//
// idea:      Each GPU attends with its queries to the keys that pass by, and merges what it has with what is new: (O, LSE)
//            of two sets of keys give (O, LSE) of both, by the operator of notebook 02.
// op:        merge
// inputs:    O_a (B,H,N,D) fp32 or as O_b, O_b (B,H,N,D); LSE_a and LSE_b (B,H,N) fp32, -inf where a row saw no key
// outputs:   O (B,H,N,D) fp32 or as O_b, LSE (B,H,N) fp32; either may be the memory of O_a and LSE_a
// dtypes:    fp32, fp16, bf16
// D:         32, 64, 128
// tiles:     256 threads; D / 4 of them to a row, 4 numbers each
// arch:      sm_80
// paper:     Ring Attention with Blockwise Transformers (arXiv 2310.01889)
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/merge.cuh>

constexpr int threads = 256;

// Four numbers of a row at once: 16 bytes of fp32, 8 bytes of fp16 and bf16.
template <typename T> __device__ __forceinline__ void load_row(float (&x)[4], const void *O, int64_t at) {
  if constexpr (sizeof(T) == 4) {
    fa::load4(x, static_cast<const float *>(O) + at);
  } else {
    const uint2 bits = *reinterpret_cast<const uint2 *>(static_cast<const T *>(O) + at);
    const float2 low = fa::unpack2<T>(bits.x), high = fa::unpack2<T>(bits.y);
    x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
  }
}

template <typename T> __device__ __forceinline__ void store_row(void *O, int64_t at, const float (&x)[4]) {
  if constexpr (sizeof(T) == 4)
    fa::store4(static_cast<float *>(O) + at, x);
  else
    *reinterpret_cast<uint2 *>(static_cast<T *>(O) + at) =
        make_uint2(fa::pack2<T>(x[0], x[1]), fa::pack2<T>(x[2], x[3]));
}

// [region: merge]
// A, B, R: the types of O_a, O_b and of the result. Each lane has four columns of one row.
template <int d, typename A, typename B, typename R>
__global__ __launch_bounds__(threads, 8) void merge(const fa_merge_args a) {
  constexpr int lanes = d / 4; // of a row
  const int64_t rows = int64_t(a.B) * a.H * a.Nq;
  const int64_t thread = int64_t(blockIdx.x) * threads + threadIdx.x;
  const int64_t row = thread / lanes;
  const int column = thread % lanes * 4;
  const bool inside = row < rows; // lanes past the end take part in the shuffles, and touch no memory
  const int n = row % a.Nq, h = row / a.Nq % a.H, b = row / a.Nq / a.H;
  const auto at = [&](const int64_t (&stride)[3]) { return b * stride[0] + h * stride[1] + n * stride[2] + column; };
  const auto lse_at = [&](const int64_t (&stride)[2]) { return b * stride[0] + h * stride[1] + n; };

  // One lane reads the row's LSE and tells the others: where LSE is the memory of LSE_a, it alone writes there, later.
  // All loads are on their way before the first is waited for.
  float lse_a = 0.f, lse_b = 0.f, x_a[4] = {}, x_b[4] = {}, x[4];
  if (inside) {
    load_row<A>(x_a, a.O_a, at(a.O_a_stride));
    load_row<B>(x_b, a.O_b, at(a.O_b_stride));
    if (column == 0) lse_a = a.LSE_a[lse_at(a.LSE_a_stride)], lse_b = a.LSE_b[lse_at(a.LSE_b_stride)];
  }
  lse_a = __shfl_sync(0xffffffff, lse_a, 0, lanes), lse_b = __shfl_sync(0xffffffff, lse_b, 0, lanes);
  if (!inside) return;

  const float m = fmaxf(lse_a, lse_b), m_finite = m == -FA_INFINITY ? 0.f : m; // both empty: weights 0, not NaN
  const float w_a = exp2f((lse_a - m_finite) * fa::log2_e), w_b = exp2f((lse_b - m_finite) * fa::log2_e);
  const float l = w_a + w_b, l_inv = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = (w_a * x_a[e] + w_b * x_b[e]) * l_inv;
  store_row<R>(a.O, at(a.O_stride), x);
  if (column == 0) a.LSE[lse_at(a.LSE_stride)] = m_finite + log2f(l) * fa::ln_2; // -inf where both are empty
}
// [end: merge]

// [region: launcher]
template <int d, typename A, typename B, typename R> cudaError_t launch(const fa_merge_args &a, cudaStream_t stream) {
  const int64_t blocks = fa::ceil_div(int64_t(a.B) * a.H * a.Nq, threads / (d / 4));
  if (blocks > fa::max_grid_x) return cudaErrorInvalidValue;
  merge<d, A, B, R><<<unsigned(blocks), threads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <int d, typename B> cudaError_t launch(const fa_merge_args &a, cudaStream_t stream) {
  if constexpr (sizeof(B) == 2) {
    if (!a.a_fp32) return a.o_fp32 ? launch<d, B, B, float>(a, stream) : launch<d, B, B, B>(a, stream);
    if (!a.o_fp32) return launch<d, float, B, B>(a, stream);
  }
  return launch<d, float, B, float>(a, stream);
}

template <int d> cudaError_t launch(const fa_merge_args &a, cudaStream_t stream) {
  if (a.dtype == FA_FP32) return launch<d, float>(a, stream);
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_merge_args &a = fa::merging(args);
  if (a.B <= 0 || a.H <= 0 || a.Nq <= 0) return cudaErrorInvalidValue;
  switch (a.D) {
  case 32:
    return launch<32>(a, stream);
  case 64:
    return launch<64>(a, stream);
  case 128:
    return launch<128>(a, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
// [end: launcher]
