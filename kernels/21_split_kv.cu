// 21_split_kv: decode: keys split across the GPU, partial results merged
//
// idea:      A few queries against a long cache fill no machine by themselves. Cut the keys into pieces, give each to
//            CTAs of its own, and merge their (O, LSE) with the operator of notebook 02.
// changed:   the grid runs over pieces of the keys instead of tiles of queries; the query heads that share a K and V
//            head are rows of one tile, so that K and V are read once for all of them; each warp has keys and stages
//            of its own and waits for no other; a second kernel merges
// op:        attention
// features:  causal, gqa, lengths, pages, splits
// inputs:    Q (B,H,Nq,D), K V (B,Hkv,Nk,D) or, paged, (pages,Hkv,page,D) fp16 or bf16; rows and strides multiples of
//            16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         64, 128
// workspace: O_part (splits,B,H,Nq,D) fp32; LSE_part (splits,B,H,Nq) fp32
// tiles:     16 rows (queries x heads of a group), 16 keys per warp and step, 4 warps
//            D=64:  4 stages, threads=128 smem=64 KB CTAs/SM=3
//            D=128: 3 stages, threads=128 smem=96 KB CTAs/SM=2
// arch:      sm_80
// paper:     FlashAttention-2, section 3.1, and Flash-Decoding (Dao, Haziza, Massa, Sizov 2023)
// speed:     H200, one query, caches of 0.3 to 1 GB, own number of pieces: 0.86 to 1.01 of a copy, 1.23 x SDPA FLASH
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm80.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int Br = 16;                  // rows: queries x query heads of one K and V head
  static constexpr int Bc = 16;                  // keys per warp and step
  static constexpr int stages = d == 64 ? 4 : 3; // per warp, each with Bc rows of K and of V
  static constexpr int ctas = d == 64 ? 3 : 2;   // per SM
  static constexpr int stage = 2 * Bc * d;       // elements
  static constexpr int smem_bytes = 2 * warps * stages * stage;
  static_assert(warps * (d + 2) * Br * 4 <= warps * stages * stage * 2, "the merge of the warps fits in the stages");
  static_assert(Br <= 2 * Bc, "and Q in one");
};
// [end: tile]

// [region: swizzle]
// Where chunk `chunk` (16 bytes) of row `row` of a (rows, d) tile lies, in elements: as in 11_swizzled.
template <int d> __device__ constexpr int at(int row, int chunk) { return row * d + (chunk ^ row % 8) * 8; }
// [end: swizzle]

// [region: state]
// What a piece of the keys says of one row: its largest score, the sum of exp2(score - m). merge is notebook 02's.
struct State {
  float m, l;
};

__device__ __forceinline__ float weight(const State &part, float m) { // of a part in a whole whose maximum is m
  return part.l > 0.f ? exp2f(part.m - m) : 0.f;                      // an empty part weighs nothing
}

__device__ __forceinline__ State merge(const State &a, const State &b) {
  const float m = fmaxf(a.m, b.m);
  return {m, weight(a, m) * a.l + weight(b, m) * b.l};
}
// [end: state]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void split_kv(const fa_model_args a) {
  using C = Tile<d>;
  constexpr int Bc = C::Bc, Br = C::Br, stages = C::stages;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of an accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1

  // [region: rows]
  // This CTA: rows r0 .. r0 + Br of K and V head (b, hk), and piece `split` of its keys. Row r is query r / group of
  // head hk * group + r % group: all of them read the same keys.
  const int group = a.H / a.Hkv, rows = a.Nq * group, tiles = int(fa::ceil_div(rows, Br));
  const int r0 = blockIdx.x % tiles * Br, hk = blockIdx.x / tiles % a.Hkv, b = blockIdx.x / tiles / a.Hkv;
  const int split = blockIdx.y;
  const int Nk = a.lengths ? a.lengths[b] : a.Nk;
  // Pieces are whole steps of all warps, so that only a sequence's last one has a tail.
  const int steps = int(fa::ceil_div(Nk, C::warps * Bc)), per_split = int(fa::ceil_div(steps, a.splits));
  const int step0 = split * per_split, step1 = min(steps, step0 + per_split);
  const T *Q = static_cast<const T *>(a.Q) + b * a.Q_stride[0];
  const auto head_of = [&](int r) { return hk * group + r % group; };
  // [end: rows]

  extern __shared__ __align__(1024) unsigned char smem[];
  T *KV_smem = reinterpret_cast<T *>(smem) + warp * stages * C::stage; // stages x {K (Bc, d), V (Bc, d)} of this warp
  T *Q_smem = KV_smem + (stages - 1) * C::stage;                       // (Br, d), until the loop needs the last stage

  // [region: load_tile]
  // This warp's keys of a step, on their way to a stage. Rows of a paged cache are found through the table of pages.
  constexpr int per_row = d / 8, at_once = 32 / per_row; // lanes along a row, rows that the warp copies at a time
  const int row = lane / per_row, chunk = lane % per_row;
  const T *K = static_cast<const T *>(a.K) + hk * a.K_stride[1] + chunk * 8;
  const T *V = static_cast<const T *>(a.V) + hk * a.V_stride[1] + chunk * 8;
  const auto fetch = [&](int step, int stage) {
    if (step < step1) {
      T *K_smem = KV_smem + stage * C::stage, *V_smem = K_smem + Bc * d;
#pragma unroll
      for (int n = 0; n < Bc; n += at_once) {
        const int j = (step * C::warps + warp) * Bc + row + n, bytes = j < Nk ? 16 : 0;
        int block = b, line = bytes ? j : 0;
        if (a.pages) block = a.pages[b * a.max_pages + line / a.page], line %= a.page;
        fa::cp_async_16(K_smem + at<d>(row + n, chunk), K + block * a.K_stride[0] + line * a.K_stride[2], bytes);
        fa::cp_async_16(V_smem + at<d>(row + n, chunk), V + block * a.V_stride[0] + line * a.V_stride[2], bytes);
      }
    }
    fa::cp_async_commit(); // past the last step too: counting groups is counting steps
  };
  // [end: load_tile]

#pragma unroll
  for (int s = 0; s < stages - 1; ++s) fetch(step0 + s, s);

#pragma unroll
  for (int n = 0; n < Br; n += at_once) { // Q, while the first keys are on their way; each warp for itself
    const int r = r0 + row + n;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (r < rows)
      x = *reinterpret_cast<const uint4 *>(Q + head_of(r) * a.Q_stride[1] + r / group * a.Q_stride[2] + chunk * 8);
    *reinterpret_cast<uint4 *>(Q_smem + at<d>(row + n, chunk)) = x;
  }
  __syncwarp(); // Q_smem is written before any lane reads it
  const int row_A = lane % 16, chunk_A = lane / 16, row_B = lane % 8 + lane / 16 * 8, chunk_B = lane / 8 % 2;
  uint32_t Q_reg[d / 16][4];
#pragma unroll
  for (int k = 0; k < d / 16; ++k) fa::ldmatrix_x4(Q_reg[k], Q_smem + at<d>(row_A, 2 * k + chunk_A));

  const float scale_log2 = a.scale * fa::log2_e;
  float O_reg[d / 8][4] = {};
  State state[2] = {{-FA_INFINITY, 0.f},
                    {-FA_INFINITY, 0.f}}; // of rows g and g + 8; l of this lane's columns until the end
  int last_key[2];                        // the last one that the row sees
#pragma unroll
  for (int r = 0; r < 2; ++r) last_key[r] = a.causal ? min(Nk - 1, (r0 + g + 8 * r) / group + Nk - a.Nq) : Nk - 1;

  // [region: tile_loop]
  for (int step = step0, stage = 0; step < step1; ++step, stage = (stage + 1) % stages) {
    T *K_smem = KV_smem + stage * C::stage, *V_smem = K_smem + Bc * d;
    fa::cp_async_wait<stages - 2>(); // this step's group
    __syncwarp(); // every lane's part has landed before any reads it; all have read the stage that is filled next
    fetch(step + stages - 1, (stage + stages - 1) % stages);

    float S_reg[2][4] = {}; // S (16, Bc) = Q K^T
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      uint32_t K_reg[4];
      fa::ldmatrix_x4(K_reg, K_smem + at<d>(row_B, 2 * k + chunk_B));
      fa::mma_m16n8k16<T>(S_reg[0], Q_reg[k], K_reg[0], K_reg[1]);
      fa::mma_m16n8k16<T>(S_reg[1], Q_reg[k], K_reg[2], K_reg[3]);
    }
    const int j0 = (step * C::warps + warp) * Bc;
#pragma unroll
    for (int r = 0; r < 2; ++r) { // notebook 10's online update, on 16 columns
      float m_new = state[r].m;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          S_reg[n][e] = j0 + 8 * n + 2 * t + e % 2 <= last_key[r] ? S_reg[n][e] * scale_log2 : -FA_INFINITY;
          m_new = fmaxf(m_new, S_reg[n][e]);
        }
      }
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));
      const float m_finite = m_new == -FA_INFINITY ? 0.f : m_new;
      const float alpha = fa::ex2_approx_ftz(state[r].m - m_finite);
      float row_sum = 0.f;
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          S_reg[n][e] = fa::ex2_approx_ftz(S_reg[n][e] - m_finite); // P
          row_sum += S_reg[n][e];
        }
      }
      state[r] = {m_new, state[r].l * alpha + row_sum};
#pragma unroll
      for (int n = 0; n < d / 8; ++n) O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;
    }
    uint32_t P_reg[4]; // O (16, d) += P V
#pragma unroll
    for (int e = 0; e < 4; ++e) P_reg[e] = fa::pack2<T>(S_reg[e / 2][e % 2 * 2], S_reg[e / 2][e % 2 * 2 + 1]);
#pragma unroll
    for (int n = 0; n < d / 16; ++n) {
      uint32_t V_reg[4];
      fa::ldmatrix_x4_trans(V_reg, V_smem + at<d>(row_A, 2 * n + chunk_A));
      fa::mma_m16n8k16<T>(O_reg[2 * n], P_reg, V_reg[0], V_reg[1]);
      fa::mma_m16n8k16<T>(O_reg[2 * n + 1], P_reg, V_reg[2], V_reg[3]);
    }
  }
  // [end: tile_loop]

  // [region: merge_warps]
  // Four warps have four states of the same rows. They go through shared memory, where the stages were.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) state[r].l += __shfl_xor_sync(0xffffffff, state[r].l, mask);
  }
  float *O_smem = reinterpret_cast<float *>(smem);                           // (warps, Br, d)
  State *state_smem = reinterpret_cast<State *>(O_smem + C::warps * Br * d); // (warps, Br)

  // Nothing is on its way any more: the loop has waited for every step, and the groups behind the last are empty.
  __syncthreads(); // no warp reads its stages any more, before others write there
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float *O_row = O_smem + (warp * Br + g + 8 * r) * d;
#pragma unroll
    for (int n = 0; n < d / 8; ++n)
      *reinterpret_cast<float2 *>(O_row + 8 * n + 2 * t) = make_float2(O_reg[n][2 * r], O_reg[n][2 * r + 1]);
    if (t == 0) state_smem[warp * Br + g + 8 * r] = state[r];
  }
  __syncthreads(); // every warp's state and O are written before they are merged

  const int64_t part = int64_t(split) * a.B * a.H * a.Nq;
  float *O_part = static_cast<float *>(a.workspace[0]) + part * d,
        *LSE_part = static_cast<float *>(a.workspace[1]) + part;
  for (int n = threadIdx.x; n < Br * (d / 4); n += C::threads) {
    const int r = n / (d / 4), c = n % (d / 4) * 4;
    if (r0 + r >= rows) break;
    State whole = state_smem[r];
#pragma unroll
    for (int w = 1; w < C::warps; ++w) whole = merge(whole, state_smem[w * Br + r]);
    float sum[4] = {}, x[4];
#pragma unroll
    for (int w = 0; w < C::warps; ++w) {
      const float share = whole.l > 0.f ? weight(state_smem[w * Br + r], whole.m) / whole.l : 0.f;
      fa::load4(x, O_smem + (w * Br + r) * d + c);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[e] += share * x[e];
    }
    const int64_t out = (int64_t(b) * a.H + head_of(r0 + r)) * a.Nq + (r0 + r) / group;
    fa::store4(O_part + out * d + c, sum);
    if (c == 0) LSE_part[out] = whole.m + log2f(whole.l); // in units of log2; -inf for an empty piece
  }
  // [end: merge_warps]
}

// [region: merge_splits]
// O and LSE of a row from those of the pieces, by a CTA. A piece is a state with m = LSE, l = 1. The threads share out
// the columns, 4 each, and the pieces, each to one of `lanes`: the order of a merge doesn't matter.
constexpr int merge_threads = 128;
template <int d, typename T> __global__ __launch_bounds__(merge_threads) void merge_splits(const fa_model_args a) {
  constexpr int lanes = merge_threads / (d / 4);
  const int64_t rows = int64_t(a.B) * a.H * a.Nq, row = blockIdx.x;
  const int lane = threadIdx.x / (d / 4), column = threadIdx.x % (d / 4) * 4;
  const float *O_part = static_cast<const float *>(a.workspace[0]) + row * d + column;
  const float *LSE_part = static_cast<const float *>(a.workspace[1]) + row;

  State whole = {-FA_INFINITY, 0.f};
  float O_reg[4] = {};
  const auto add = [&](const State &part, const float (&x)[4]) {
    const State both = merge(whole, part);
    const float kept = weight(whole, both.m), share = weight(part, both.m);
#pragma unroll
    for (int e = 0; e < 4; ++e) O_reg[e] = kept * O_reg[e] + share * x[e];
    whole = both;
  };
#pragma unroll 4
  for (int s = lane; s < a.splits; s += lanes) {
    float x[4];
    fa::load4(x, O_part + s * rows * d);
    const float lse = LSE_part[s * rows];
    add({lse, lse == -FA_INFINITY ? 0.f : 1.f}, x);
  }
  __shared__ State state_smem[lanes];
  __shared__ __align__(16) float O_smem[lanes][d];
  fa::store4(&O_smem[lane][column], O_reg);
  if (column == 0) state_smem[lane] = whole;
  __syncthreads(); // every lane's state and O are written before they are merged
  if (lane > 0) return;
#pragma unroll
  for (int n = 1; n < lanes; ++n) {
    float x[4];
    fa::load4(x, &O_smem[n][column]);
    add(state_smem[n], x);
  }
  const float l_inv = whole.l > 0.f ? 1.f / whole.l : 0.f; // l = 0: no key at all, O = 0, LSE = -inf
  T *O = static_cast<T *>(a.O) + row / a.Nq / a.H * a.O_stride[0] + row / a.Nq % a.H * a.O_stride[1] +
         row % a.Nq * a.O_stride[2] + column;
  *reinterpret_cast<uint2 *>(O) =
      make_uint2(fa::pack2<T>(O_reg[0] * l_inv, O_reg[1] * l_inv), fa::pack2<T>(O_reg[2] * l_inv, O_reg[3] * l_inv));
  if (column == 0) a.LSE[row] = (whole.m + log2f(whole.l)) * fa::ln_2;
}
// [end: merge_splits]

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  const int64_t ctas = fa::ceil_div(int64_t(a.Nq) * (a.H / a.Hkv), Tile<d>::Br) * a.Hkv * a.B;
  const int64_t rows = int64_t(a.B) * a.H * a.Nq;
  if (ctas > fa::max_grid_x || rows > fa::max_grid_x || a.splits > fa::max_grid_y) return cudaErrorInvalidValue;
  if (cudaError_t error = fa::allow_smem(split_kv<d, T>, Tile<d>::smem_bytes)) return error;
  split_kv<d, T><<<dim3(unsigned(ctas), a.splits), Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  merge_splits<d, T><<<unsigned(rows), merge_threads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_model_args &a = fa::model(args);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.splits < 1 || a.window || a.q_starts ||
      !fa::half_rows_aligned16(a.Q, a.Q_stride) || !fa::half_rows_aligned16(a.K, a.K_stride) ||
      !fa::half_rows_aligned16(a.V, a.V_stride) || !fa::half_rows_aligned16(a.O, a.O_stride))
    return cudaErrorInvalidValue;
  switch (a.D) {
  case 64:
    return launch<64>(a, stream);
  case 128:
    return launch<128>(a, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
// [end: launcher]
