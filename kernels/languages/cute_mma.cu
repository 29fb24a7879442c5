/* CUTLASS's CuTe, C++

needs: nvidia-cutlass
runs: GPU
dtypes: fp16 bf16
D: 64 128
*/
#include <cuda_runtime.h>
#include <cute/tensor.hpp>

using namespace cute;

// [region: shapes]
// The warps share the queries: the layouts say where each element lies, the atoms how it is moved and multiplied.
template <class T, int D> struct Shapes {
  static constexpr int Br = 128, Bc = 64, Warps = 4, Threads = 32 * Warps;
  using Mma = TiledMMA<
      MMA_Atom<std::conditional_t<std::is_same_v<T, half_t>, SM80_16x8x16_F32F16F16F32_TN, SM80_16x8x16_F32BF16BF16F32_TN>>,
      Layout<Shape<Int<Warps>, _1, _1>>, Tile<Int<16 * Warps>, _16, _16>>;
  using Rows = decltype(composition(Swizzle<3, 3, 3>{}, Layout<Shape<_8, _64>, Stride<_64, _1>>{}));
  using Q = decltype(tile_to_shape(Rows{}, Shape<Int<Br>, Int<D>>{}));
  using K = decltype(tile_to_shape(Rows{}, Shape<Int<Bc>, Int<D>>{}));
  using Vt = decltype(composition(K{}, Layout<Shape<Int<D>, Int<Bc>>, Stride<Int<Bc>, _1>>{}));  // K's layout, transposed
  using FromGlobal = decltype(make_tiled_copy(Copy_Atom<SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<uint128_t>, T>{},
                                              Layout<Shape<Int<4 * Warps>, _8>, Stride<_8, _1>>{}, Layout<Shape<_1, _8>>{}));
  static constexpr int Bytes = (Br + 2 * Bc) * D * int(sizeof(T));
};
// [end: shapes]

struct Arguments {
  const void *q, *k, *v;
  void *o;
  float *lse;
  int Nq, Nk;
  float scale_log2;
};

// [region: copy]
// A tile of rows from global memory, zeros for those past the end.
template <class Copy, class G, class S, class I>
__device__ void load(const Copy &copy_, const G &from, S &&to, const I &at, int rows) {
  CUTE_UNROLL
  for (int r = 0; r < size<1>(from); ++r) {
    const bool there = get<0>(at(0, r, 0)) < rows;
    CUTE_UNROLL
    for (int c = 0; c < size<2>(from); ++c) copy(copy_.with(there), from(_, r, c), to(_, r, c));
  }
}
// [end: copy]

// [region: kernel]
template <class T, int D, bool Causal> __global__ __launch_bounds__(Shapes<T, D>::Threads) void kernel(const Arguments a) {
  using Z = Shapes<T, D>;
  constexpr int Br = Z::Br, Bc = Z::Bc;
  extern __shared__ __align__(128) unsigned char smem[];
  const int i = (gridDim.x - 1 - blockIdx.x) * Br, t = threadIdx.x;  // the longest first, where the mask is causal
  const size_t head = blockIdx.y;
  T *const s = reinterpret_cast<T *>(smem);
  Tensor sQ = make_tensor(make_smem_ptr(s), typename Z::Q{});
  Tensor sK = make_tensor(make_smem_ptr(s + Br * D), typename Z::K{});
  Tensor sV = make_tensor(make_smem_ptr(s + (Br + Bc) * D), typename Z::K{});
  Tensor sVt = make_tensor(sV.data(), typename Z::Vt{});
  const auto rows_of = [&](const void *x, int N, auto B) {
    return make_tensor(make_gmem_ptr(static_cast<const T *>(x) + head * N * D), make_shape(N, Int<D>{}), make_stride(Int<D>{}, _1{}));
  };
  Tensor gQ = local_tile(rows_of(a.q, a.Nq, 0), Shape<Int<Br>, Int<D>>{}, make_coord(i / Br, 0));
  Tensor gK = local_tile(rows_of(a.k, a.Nk, 0), Shape<Int<Bc>, Int<D>>{}, make_coord(_, 0));
  Tensor gV = local_tile(rows_of(a.v, a.Nk, 0), Shape<Int<Bc>, Int<D>>{}, make_coord(_, 0));

  typename Z::FromGlobal from_global;
  auto mine = from_global.get_slice(t);
  Tensor at_Q = mine.partition_S(make_identity_tensor(Shape<Int<Br>, Int<D>>{}));
  Tensor at_K = mine.partition_S(make_identity_tensor(Shape<Int<Bc>, Int<D>>{}));
  Tensor tKg = mine.partition_S(gK);
  Tensor tVg = mine.partition_S(gV);
  Tensor tKs = mine.partition_D(sK);
  Tensor tVs = mine.partition_D(sV);

  typename Z::Mma mma;
  auto slice = mma.get_slice(t);
  Tensor rQ = slice.partition_fragment_A(sQ);
  Tensor rK = slice.partition_fragment_B(sK);
  Tensor rVt = slice.partition_fragment_B(sVt);
  Tensor S = partition_fragment_C(mma, Shape<Int<Br>, Int<Bc>>{});
  Tensor O = partition_fragment_C(mma, Shape<Int<Br>, Int<D>>{});
  Tensor at_S = slice.partition_C(make_identity_tensor(Shape<Int<Br>, Int<Bc>>{}));
  Copy_Atom<SM75_U32x4_LDSM_N, T> by_rows;
  Copy_Atom<SM75_U16x8_LDSM_T, T> by_columns;
  auto load_Q = make_tiled_copy_A(by_rows, mma);
  auto load_K = make_tiled_copy_B(by_rows, mma);
  auto load_V = make_tiled_copy_B(by_columns, mma);
  Tensor cQ = load_Q.get_slice(t).partition_S(sQ);
  Tensor cK = load_K.get_slice(t).partition_S(sK);
  Tensor cV = load_V.get_slice(t).partition_S(sVt);
  Tensor vQ = load_Q.get_slice(t).retile_D(rQ);
  Tensor vK = load_K.get_slice(t).retile_D(rK);
  Tensor vV = load_V.get_slice(t).retile_D(rVt);

  const int shift = a.Nk - a.Nq;  // query n sees the keys up to n + shift
  const int end = Causal ? max(0, min(a.Nk, i + Br + shift)) : a.Nk;
  const int whole = (Causal ? max(0, min(a.Nk, i + 1 + shift)) : a.Nk) / Bc;  // tiles that need no mask
  const int tiles = (end + Bc - 1) / Bc;

  load(from_global, mine.partition_S(gQ), mine.partition_D(sQ), at_Q, a.Nq - i);
  if (tiles > 0) load(from_global, tKg(_, _, _, 0), tKs, at_K, a.Nk);
  cp_async_fence();

  constexpr int Rows = 2 * size<1>(decltype(O){});  // query rows of a thread
  float m[Rows], l[Rows];
  for (int r = 0; r < Rows; ++r) m[r] = -INFINITY, l[r] = 0;
  clear(O);
  // The fragments as (row, column), whatever the atom's order: ((column pair, row pair), M, N).
  const auto by_row = [](auto &&x) {
    auto v = logical_divide(x.layout(), Shape<_2>{});
    return make_tensor(x.data(), make_layout(make_layout(get<0, 1>(v), get<1>(v)), make_layout(get<0, 0>(v), get<2>(v))));
  };

  for (int n = 0; n < tiles; ++n) {
    cp_async_wait<0>();
    __syncthreads();  // K is there, and everyone has multiplied by the V before
    load(from_global, tVg(_, _, _, n), tVs, at_K, a.Nk - n * Bc);
    cp_async_fence();
    clear(S);
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rQ); ++k) {
      copy(load_Q, cQ(_, _, k), vQ(_, _, k));
      copy(load_K, cK(_, _, k), vK(_, _, k));
      gemm(mma, rQ(_, _, k), rK(_, _, k), S);
    }
    cp_async_wait<0>();
    __syncthreads();  // V is there, and everyone has read K
    if (n + 1 < tiles) load(from_global, tKg(_, _, _, n + 1), tKs, at_K, a.Nk - (n + 1) * Bc);
    cp_async_fence();

    Tensor scores = by_row(S);
    Tensor at = by_row(at_S);
    Tensor sums = by_row(O);
    CUTE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      if (n >= whole) {
        const int row = i + get<0>(at(r, 0)), sees = Causal ? min(a.Nk, row + shift + 1) : a.Nk;
        CUTE_UNROLL
        for (int c = 0; c < size<1>(scores); ++c)
          if (n * Bc + get<1>(at(r, c)) >= sees) scores(r, c) = -INFINITY;
      }
      float most = scores(r, 0);
      CUTE_UNROLL
      for (int c = 1; c < size<1>(scores); ++c) most = fmaxf(most, scores(r, c));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float m_new = fmaxf(m[r], most * a.scale_log2), base = m_new == -INFINITY ? 0 : m_new;
      const float alpha = exp2f(m[r] - base);
      m[r] = m_new, l[r] *= alpha;
      CUTE_UNROLL
      for (int c = 0; c < size<1>(scores); ++c) {
        scores(r, c) = exp2f(scores(r, c) * a.scale_log2 - base);
        l[r] += scores(r, c);
      }
      CUTE_UNROLL
      for (int c = 0; c < size<1>(sums); ++c) sums(r, c) *= alpha;
    }
    // C's layout of two atoms side by side is A's of one: P goes into the next product as it is.
    Tensor P = make_tensor<T>(S.layout());
    CUTE_UNROLL
    for (int e = 0; e < size(S); ++e) P(e) = T(S(e));
    auto split = logical_divide(P.layout(), Shape<Underscore, Underscore, _2>{});
    Tensor rP = make_tensor(P.data(), make_layout(make_layout(get<0>(split), get<2, 0>(split)), get<1>(split), get<2, 1>(split)));
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rP); ++k) {
      copy(load_V, cV(_, _, k), vV(_, _, k));
      gemm(mma, rP(_, _, k), rVt(_, _, k), O);
    }
  }

  Tensor sums = by_row(O);
  Tensor at_O = slice.partition_C(make_identity_tensor(Shape<Int<Br>, Int<D>>{}));
  Tensor at = by_row(at_O);
  T *const o = static_cast<T *>(a.o) + head * a.Nq * D;
  CUTE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    l[r] += __shfl_xor_sync(~0u, l[r], 1);
    l[r] += __shfl_xor_sync(~0u, l[r], 2);
    const int row = i + get<0>(at(r, 0));
    if (row >= a.Nq) continue;
    const float by = l[r] == 0 ? 0 : 1 / l[r];
    CUTE_UNROLL
    for (int c = 0; c < size<1>(sums); ++c) o[size_t(row) * D + get<1>(at(r, c))] = T(sums(r, c) * by);
    if (t % 4 == 0) a.lse[head * a.Nq + row] = (m[r] + log2f(l[r])) * 0.6931471805599453f;
  }
}
// [end: kernel]

// [region: launch]
template <class T, int D> static cudaError_t start(const Arguments &a, int BH, bool causal, cudaStream_t stream) {
  using Z = Shapes<T, D>;
  auto *const f = causal ? kernel<T, D, true> : kernel<T, D, false>;
  if (const auto e = cudaFuncSetAttribute(f, cudaFuncAttributeMaxDynamicSharedMemorySize, Z::Bytes)) return e;
  f<<<dim3((a.Nq + Z::Br - 1) / Z::Br, BH), Z::Threads, Z::Bytes, stream>>>(a);
  return cudaGetLastError();
}

// q, o (BH,Nq,D), k, v (BH,Nk,D), dense; lse (BH,Nq). scale > 0.
extern "C" cudaError_t attention(const void *q, const void *k, const void *v, void *o, float *lse, int BH, int Nq, int Nk, int D,
                                 float scale, int causal, int bf16, cudaStream_t stream) {
  const Arguments a{q, k, v, o, lse, Nq, Nk, scale * 1.44269504f};
  if (bf16) return D == 64 ? start<bfloat16_t, 64>(a, BH, causal, stream) : start<bfloat16_t, 128>(a, BH, causal, stream);
  return D == 64 ? start<half_t, 64>(a, BH, causal, stream) : start<half_t, 128>(a, BH, causal, stream);
}
// [end: launch]
