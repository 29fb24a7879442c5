// 50_ring: attention across GPUs: merge two partial results in one pass
//
// idea:      Each GPU attends with its queries to the keys that pass by, and merges what it has with what is new: (O, LSE)
//            of two sets of keys give (O, LSE) of both, by the operator of notebook 02.
// op:        merge
// inputs:    O_a (B,H,N,D) fp32 or as O_b, O_b (B,H,N,D); LSE_a and LSE_b (B,H,N) fp32, -inf where a row saw no key;
//            rows and strides of O_a, O_b and O multiples of 16 bytes
// outputs:   O (B,H,N,D) fp32 or as O_b, LSE (B,H,N) fp32; either may be the memory of O_a and LSE_a
// dtypes:    fp32, fp16, bf16
// D:         32, 64, 128
// tiles:     256 threads; D / 4 of them to a row, 4 numbers each; D / 8 and 8 where all is fp16 or bf16
// arch:      sm_80
// paper:     Ring Attention with Blockwise Transformers (arXiv 2310.01889)
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/merge.cuh>

constexpr int threads = 256;

// So many numbers has each lane of a row: 16 bytes of what all tensors hold, or of the fp32 ones.
template <typename A, typename R> constexpr int width = sizeof(A) == 2 && sizeof(R) == 2 ? 8 : 4;

// Four or eight neighbouring numbers of a row at once.
template <typename T, int n> __device__ __forceinline__ void load_row(float (&x)[n], const void *O, int64_t at) {
  struct alignas(sizeof(T) * n) Words {
    uint32_t word[sizeof(T) * n / 4];
  };
  const Words bits = *reinterpret_cast<const Words *>(static_cast<const T *>(O) + at);
#pragma unroll
  for (int e = 0; e < n; ++e) {
    if constexpr (sizeof(T) == 4)
      x[e] = __uint_as_float(bits.word[e]);
    else
      x[e] = e % 2 ? fa::unpack2<T>(bits.word[e / 2]).y : fa::unpack2<T>(bits.word[e / 2]).x;
  }
}

template <typename T, int n> __device__ __forceinline__ void store_row(void *O, int64_t at, const float (&x)[n]) {
  struct alignas(sizeof(T) * n) Words {
    uint32_t word[sizeof(T) * n / 4];
  } bits;
#pragma unroll
  for (int e = 0; e < n; ++e) {
    if constexpr (sizeof(T) == 4)
      bits.word[e] = __float_as_uint(x[e]);
    else if (e % 2 == 0)
      bits.word[e / 2] = fa::pack2<T>(x[e], x[e + 1]);
  }
  *reinterpret_cast<Words *>(static_cast<T *>(O) + at) = bits;
}

// [region: merge]
// A, B, R: the types of O_a, O_b and of the result. Each lane has a few columns of one row.
template <int d, typename A, typename B, typename R>
__global__ __launch_bounds__(threads, 6) void merge(const fa_merge_args a) {
  constexpr int columns = width<A, R>, lanes = d / columns; // of a lane; of a row
  const uint32_t rows = uint32_t(a.B) * a.H * a.Nq;         // 64-bit numbers would take longer to divide than all else
  const uint32_t row = blockIdx.x * (threads / lanes) + threadIdx.x / lanes;
  const int column = threadIdx.x % lanes * columns;
  const bool inside = row < rows; // lanes past the end take part in the shuffles, and touch no memory
  const int n = row % a.Nq, h = row / a.Nq % a.H, b = row / a.Nq / a.H;
  const auto at = [&](const int64_t (&stride)[3]) { return b * stride[0] + h * stride[1] + n * stride[2] + column; };
  const auto lse_at = [&](const int64_t (&stride)[2]) { return b * stride[0] + h * stride[1] + n; };

  // One lane reads the row's LSE and tells the others: where LSE is the memory of LSE_a, it alone writes there, later.
  // All loads are on their way before the first is waited for.
  float lse_a = 0.f, lse_b = 0.f, x_a[columns] = {}, x_b[columns] = {}, x[columns];
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
  for (int e = 0; e < columns; ++e) x[e] = (w_a * x_a[e] + w_b * x_b[e]) * l_inv;
  store_row<R>(a.O, at(a.O_stride), x);
  if (column == 0) a.LSE[lse_at(a.LSE_stride)] = m_finite + log2f(l) * fa::ln_2; // -inf where both are empty
}
// [end: merge]

// [region: launcher]
template <int d, typename A, typename B, typename R> cudaError_t launch(const fa_merge_args &a, cudaStream_t stream) {
  const int64_t rows = int64_t(a.B) * a.H * a.Nq, blocks = fa::ceil_div(rows, threads / (d / width<A, R>));
  if (rows > UINT32_MAX || blocks > fa::max_grid_x) return cudaErrorInvalidValue;
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
  const auto aligned = [&](const void *O, const int64_t (&stride)[3], bool fp32) {
    return fp32 || a.dtype == FA_FP32 ? fa::rows_aligned16(O, stride) : fa::half_rows_aligned16(O, stride);
  };
  if (a.dtype < FA_FP32 || a.dtype > FA_BF16 || a.B <= 0 || a.H <= 0 || a.Nq <= 0 ||
      !aligned(a.O_a, a.O_a_stride, a.a_fp32) || !aligned(a.O_b, a.O_b_stride, false) ||
      !aligned(a.O, a.O_stride, a.o_fp32))
    return cudaErrorInvalidValue;
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
