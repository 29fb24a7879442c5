// 13_tuned: less shared memory traffic, softmax and address work per product
//
// idea:      The tensor cores wait for shared memory, for the softmax and for addresses: give each of these less to do.
// changed:   a warp takes 32 query rows: each fragment of K and V that is read from shared memory serves twice;
//            no row maximum while the last one will do: where a row's sum says that it doesn't, the warp reads the new
//            one from P and divides P by it; so O is rarely rescaled, and scale and maximum are one FMA;
//            K and V come backwards, the ragged tile first: in the loop a copy counts no rows;
//            32-bit addresses that move by one XOR; copies that leave after the softmax, before P is rounded; tile shapes
//            that measured best
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp16 or bf16; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         64, 128
// tiles:     D=64:  Br=128 Bc=64 threads=128 smem=48 KB CTAs/SM=2
//            D=128: Br=128 Bc=64 threads=128 smem=96 KB CTAs/SM=2
//            D=128, 163 KB per block or less: Br=256 Bc=32 threads=256 smem=96 KB CTAs/SM=1
// arch:      sm_80
// paper:     FlashAttention-2, Algorithm 1 and section 3.3 (arXiv 2307.08691)
// speed:     H200, N >= 1024: 359 to 406 TFLOP/s at D=64, 395 to 440 at D=128; 1.30 x SDPA FLASH at D=64 and 1.22 x at
//            D=128, at N=512 1.19 x and 1.13 x (D=64 with the tiles tuned there: three stages, 64 KB)
#include <fa/arch.cuh>
#include <fa/args.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/rows32.cuh>
#include <fa/sm80.cuh>

// [region: tile]
// Warps; keys per tile; stages; CTAs per SM at once; and how many of Q_i's d / 16 steps stay in registers. Where
// `python -m helpers record tiles` has measured a GPU (data/<device>/13_tuned.tiles.csv), the loader defines FA_TILES with the
// best it found; these rows are for all others.
#ifndef FA_TILES
#if FA_SMEM_KB >= 2 * 96
#define FA_TILES {4, 64, 2, 2, 4}, {4, 64, 2, 2, 0}, {4, 64, 2, 2, 4}, {4, 64, 2, 2, 0}
#else // an SM has no place for two CTAs with d = 128: one with all the warps
#define FA_TILES {4, 64, 2, 2, 4}, {8, 32, 2, 1, 0}, {4, 64, 2, 2, 4}, {8, 32, 2, 1, 0}
#endif
#endif
constexpr int tile_shapes[4][5] = {FA_TILES}; // fp16 with d = 64 and 128, bf16 with d = 64 and 128
template <typename T> constexpr int first_shape = 0;
template <> constexpr int first_shape<fa::bf16> = 2;

template <int d, typename T = fa::fp16> struct Tile {
  static constexpr const int *shape = tile_shapes[first_shape<T> + d / 128];
  static constexpr int warps = shape[0], threads = 32 * warps;
  static constexpr int Br = 32 * warps;   // query rows per CTA, 32 per warp
  static constexpr int Bc = shape[1];     // keys per tile
  static constexpr int stages = shape[2]; // buffers for K_j and V_j; stages - 1 tiles are on their way
  static constexpr int ctas = shape[3];
  static constexpr int Q_steps = shape[4];           // of Q_i in registers; the others are read for every tile
  static constexpr int stage_bytes = 2 * 2 * Bc * d; // K_smem, V_smem
  static constexpr int Q_at = stages * stage_bytes;  // Q_smem follows the stages
  static constexpr int smem_bytes = Q_at + 2 * Br * d;
  static_assert(stages > 1 && Q_steps <= d / 16, "a stage to fill while another is read; no more steps than there are");
};
// [end: tile]

// [region: swizzle]
// Where chunk `chunk` of row `row` of a (rows, d) tile lies, in bytes. A chunk is 8 elements, 16 bytes: what a thread
// copies at a time, and a row of the 8 x 8 matrices that ldmatrix loads.
//
// The banks are 8 chunks wide. ldmatrix reads the same chunk of 8 rows at once, and row-major they lie one below the
// other, in the same 4 banks. So a row's chunks trade places: XOR with the number of the row sends those 8 to 8
// different places. A row's chunks stay together, so writing a tile is as before.
template <int d> __device__ constexpr int at(int row, int chunk) { return row * 2 * d + (chunk ^ row % 8) * 16; }

// From the place of a row's chunk 0 or 1 to that of the chunk 2k further right: XOR once more. Rows lie 128 or 256
// bytes apart, so that the bits it flips belong to the chunk alone.
__device__ constexpr uint32_t right(uint32_t place, int k) { return (place ^ k % 4 * 32) + k / 4 * 128; }
// [end: swizzle]

// [region: load_tile]
// Sends rows of X on their way to shared memory, 16 bytes per thread at a time, neighbours along a row. X and X_smem
// are the place of this thread's first chunk. Rows from rows_left on, counted from there, become zero and are not read.
template <int rows, int d, int threads, typename T>
__device__ __forceinline__ void load_tile(uint32_t X_smem, const T *X, int64_t stride, int rows_left) {
  constexpr int step = threads / (d / 8); // rows that all threads together copy at a time
  static_assert(rows % step == 0 && step % 8 == 0,
                "a tile is a whole number of passes, each a whole number of swizzles");
#pragma unroll
  for (int r = 0; r < rows; r += step) fa::cp_async_16(X_smem + r * 2 * d, X + r * stride, r < rows_left ? 16 : 0);
}
// [end: load_tile]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d, T>::threads, Tile<d, T>::ctas) void fa2_mma(const fa_args a) {
  constexpr int Bc = Tile<d, T>::Bc, Br = Tile<d, T>::Br, stages = Tile<d, T>::stages, threads = Tile<d, T>::threads;
  constexpr int Q_steps = Tile<d, T>::Q_steps, Q_at = Tile<d, T>::Q_at, stage_bytes = Tile<d, T>::stage_bytes;

  // This CTA's query tile: rows i0 .. i0 + Br of head (b, h). Neighbouring CTAs share a head, and so K and V in the L2.
  const int tiles = int(fa::ceil_div(a.Nq, Br));
  const int head = blockIdx.x / tiles, i0 = blockIdx.x % tiles * Br;
  const int b = head / a.H, h = head % a.H;
  const T *Q = static_cast<const T *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1]; // (Nq, d)
  const T *K = static_cast<const T *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1]; // (Nk, d)
  const T *V = static_cast<const T *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1]; // (Nk, d)

  extern __shared__ __align__(1024) unsigned char Q_KV_smem[]; // stages x {K_j (Bc, d), V_j (Bc, d)}, Q_i (Br, d)
  const uint32_t smem = fa::smem_address(Q_KV_smem);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of a 16 x 8 accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1

  // [region: fragments]
  // ldmatrix.x4 loads four 8 x 8 matrices; lanes 8m .. 8m + 7 give the addresses of matrix m's rows. For the operand A
  // (Q), and for V with .trans, matrices 0 and 1 lie one below the other and 2 and 3 right of them; for K the other way.
  const uint32_t at_A = smem + at<d>(lane % 16, lane / 16);
  const uint32_t Q_lane = at_A + Q_at + 32 * warp * 2 * d; // V is read at at_A, half a stage further on
  const uint32_t K_lane = smem + at<d>(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  // [region: pipeline]
  // Sends the next tile pair on its way to a stage. A thread's copies for one pair are one group; past the last pair
  // the group is empty, so that counting groups is counting tiles. The tiles come backwards, the ragged one first.
  const int j_last = (a.Nk - 1) / Bc * Bc, row = threadIdx.x / (d / 8), chunk = threadIdx.x % (d / 8);
  const uint32_t copy = smem + at<d>(row, chunk);
  const T *K_next = K + (j_last + row) * a.K_stride[2] + chunk * 8;
  const T *V_next = V + (j_last + row) * a.V_stride[2] + chunk * 8;
  const auto fetch = [&](bool is_tile, int stage_at, int rows_left) {
    if (is_tile) {
      load_tile<Bc, d, threads>(copy + stage_at, K_next, a.K_stride[2], rows_left);
      load_tile<Bc, d, threads>(copy + stage_at + stage_bytes / 2, V_next, a.V_stride[2], rows_left);
      K_next -= Bc * a.K_stride[2], V_next -= Bc * a.V_stride[2];
    }
    fa::cp_async_commit();
  };

  load_tile<Br, d, threads>(copy + Q_at, Q + (i0 + row) * a.Q_stride[2] + chunk * 8, a.Q_stride[2], a.Nq - i0 - row);
  fa::cp_async_commit();
#pragma unroll
  for (int s = 0; s < stages - 1; ++s) fetch(j_last >= s * Bc, s * stage_bytes, s == 0 ? a.Nk - j_last - row : Bc);
  // [end: pipeline]

  // Q_i's A fragments of this warp, (32, 16) each: those that stay for the whole loop, and a place for the others
  fa::cp_async_wait<stages - 1>(); // Q_i's group is the oldest
  __syncthreads();                 // every thread's part of Q_smem has landed before any warp reads it
  uint32_t Q_reg[Q_steps < d / 16 ? Q_steps + 1 : Q_steps][8];
#pragma unroll
  for (int k = 0; k < Q_steps; ++k) fa::ldmatrix_x4_twice(Q_reg[k], right(Q_lane, k), 16 * 2 * d);
  // [end: fragments]

  // S in units of log2, so that P = exp2(S - m). A scale of 0 would make a NaN of a masked score.
  const float scale_log2 = a.scale == 0.f ? 1e-30f : a.scale * fa::log2_e;
  float S_reg[Bc / 8][8];               // (32, Bc) of this warp; P in its place
  uint32_t P_reg[Bc / 16][8];           // the same, rounded
  float O_reg[d / 8][8] = {};           // (32, d) of this warp, not yet divided by l
  float largest_sum = 32.f;             // a row_sum above it asks for a larger m
  float m_reg[4], l_reg[4], row_sum[4]; // of rows g + 8r; l and row_sum of this lane's columns, until the end
#pragma unroll
  for (int r = 0; r < 4; ++r) m_reg[r] = -3e38f, l_reg[r] = 0.f; // below every score, but finite: -inf - m is -inf

  // [region: scores]
  // S (32, Bc) = Q_i K_j^T by each warp: Bc / 8 accumulators side by side, d / 16 steps. K_j (Bc, d) row-major is
  // K_j^T (d, Bc) column-major, which is how mma.sync takes its operand B.
  const auto scores = [&](uint32_t K_at) {
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) S_reg[n][e] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      uint32_t (&Q_step)[8] = Q_reg[k < Q_steps ? k : Q_steps];
      if (k >= Q_steps) fa::ldmatrix_x4_twice(Q_step, right(Q_lane, k), 16 * 2 * d);
#pragma unroll
      for (int n = 0; n < Bc / 16; ++n) {
        uint32_t K_reg[4]; // two B fragments: 16 columns of d by keys 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4(K_reg, right(K_at, k) + 16 * n * 2 * d);
        fa::mma_m32n8k16<T>(S_reg[2 * n], Q_step, K_reg[0], K_reg[1]);
        fa::mma_m32n8k16<T>(S_reg[2 * n + 1], Q_step, K_reg[2], K_reg[3]);
      }
    }
  };
  // [end: scores]

  // [region: online_update]
  // P = exp2(S - m) with the m there is. True if that is accurate in this warp: dividing by l takes out m, but not the
  // rounding of P to 16 bits. A key far above m may take most of its row, and its P is exact only where it is 1.
  const auto probabilities = [&] {
    bool fits = true;
#pragma unroll
    for (int r = 0; r < 4; ++r) { // row g + 8r, elements 2r and 2r + 1 of the fragments
      row_sum[r] = 0.f;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          S_reg[n][e] = fa::ex2_approx_ftz(__fmaf_rn(S_reg[n][e], scale_log2, -m_reg[r])); // P, if |m| < 2^28
          row_sum[r] += S_reg[n][e];
        }
      }
      fits &= row_sum[r] <= largest_sum;
    }
    return __all_sync(0xffffffff, fits);
  };

  // m_new = max(m, rowmax S); l = l * alpha, O = O * alpha, with alpha = exp2(m - m_new). S is as mma.sync left it.
  const auto raise_maximum = [&](int keys_left) {
    if (keys_left < Bc) { // columns past the last key: -inf once they are scaled
      const float masked = scale_log2 < 0.f ? FA_INFINITY : -FA_INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (8 * n + 2 * t + e % 2 >= keys_left) S_reg[n][e] = masked;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float m_new = m_reg[r];
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n)
        m_new = fmaxf(m_new, fmaxf(S_reg[n][2 * r] * scale_log2, S_reg[n][2 * r + 1] * scale_log2));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));

      const float alpha = fa::ex2_approx_ftz(m_reg[r] - m_new);
      m_reg[r] = m_new;
      l_reg[r] *= alpha;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;
    }
  };

  // The same, where P = exp2(S - m) is formed and too large: its largest of a row is exp2(rowmax S - m). So m rises by
  // the log2 of that, and what was formed with the m before (P, its sum, l and O) is divided by it. P is still fp32 and
  // loses no digits; the largest becomes 1, which rounding leaves as it is. A row without a P above 1 stays as it is.
  // False if a P is infinite, or nearly: then S is needed again.
  const auto raise_maximum_by_P = [&] {
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 4; ++r) finite &= row_sum[r] < 1e30f; // __fdividef divides by up to 2^126
    if (!__all_sync(0xffffffff, finite)) return false;
    // Keys stand out here, and such a key may take most of its row: from now on an old m does for small sums only.
    largest_sum = 4.f;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      float largest = 1.f;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) largest = fmaxf(largest, fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, mask));

      const float alpha = __fdividef(1.f, largest);
      m_reg[r] += __log2f(largest);
      l_reg[r] *= alpha, row_sum[r] *= alpha;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) S_reg[n][2 * r] *= alpha, S_reg[n][2 * r + 1] *= alpha;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;
    }
    return true;
  };

  // P to 16 bits: two accumulators side by side are one fragment A, in which the same lane holds the same elements.
  const auto round_P = [&] {
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int n = 2 * k + e / 2 % 2, r = e / 4 * 2 + e % 2;
        P_reg[k][e] = fa::pack2<T>(S_reg[n][2 * r], S_reg[n][2 * r + 1]);
      }
    }
  };
  // [end: online_update]

  // [region: tile_loop]
  int take_to = a.Nk - 2 * Bc; // tiles from here down to 0 form P before any maximum; -1: none any more
  int stage_at = 0, free_at = (stages - 1) * stage_bytes;
  for (int j0 = j_last; j0 >= 0; j0 -= Bc) {
    const uint32_t K_at = K_lane + stage_at; // K_j's place, for this lane
    fa::cp_async_wait<stages - 2>();         // this tile's group; later ones may still be on their way
    // Every thread's part of this tile has landed before any warp reads it; and all warps have read the tile before it,
    // whose stage the next copies overwrite.
    __syncthreads(); // this tile has landed for all warps, and all have read the one before

    const bool take = j0 <= take_to; // not the last whole tile: the maximum of a ragged tile alone would be poor
    bool fits = take;
    if (take) {
      scores(K_at);
      fits = probabilities() || raise_maximum_by_P();
    }
    if (!fits) { // the maximum first: of the tiles at the end, and where P is infinite, which has taken the place of S
      scores(K_at);
      raise_maximum(a.Nk - j0);
      probabilities();
      if (take) take_to = -1;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) l_reg[r] += row_sum[r];
    fetch(j0 >= (stages - 1) * Bc, free_at, Bc);
    round_P(); // which may overlap with the first products

    // [region: output]
    // O (32, d) += P V_j by each warp: d / 8 accumulators, Bc / 16 steps
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
      for (int n = 0; n < d / 16; ++n) {
        uint32_t V_reg[4]; // two B fragments: keys 16k + {0..15} by columns 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4_trans(V_reg, right(at_A + stage_at, n) + stage_bytes / 2 + 16 * k * 2 * d);
        fa::mma_m32n8k16<T>(O_reg[2 * n], P_reg[k], V_reg[0], V_reg[1]);
        fa::mma_m32n8k16<T>(O_reg[2 * n + 1], P_reg[k], V_reg[2], V_reg[3]);
      }
    }
    // [end: output]
    free_at = stage_at;
    stage_at = stage_at + stage_bytes < Q_at ? stage_at + stage_bytes : 0;
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O (Nq, d) = O / l and LSE = ln(l * 2^m), once. A row without any finite score has l = 0: O = 0, LSE = -inf.
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float l = l_reg[r];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

    const int i = i0 + 32 * warp + g + 8 * r;
    if (i < a.Nq) {
      const float l_inv = l > 0.f ? 1.f / l : 0.f;
      T *O = static_cast<T *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2] + 2 * t;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) // four lanes write 16 bytes of a row
        *reinterpret_cast<uint32_t *>(O + 8 * n) = fa::pack2<T>(O_reg[n][2 * r] * l_inv, O_reg[n][2 * r + 1] * l_inv);
      if (t == 0) a.LSE[int64_t(head) * a.Nq + i] = (m_reg[r] + log2f(l)) * fa::ln_2;
    }
  }
  // [end: epilogue]
}

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  const int64_t ctas = fa::ceil_div(a.Nq, Tile<d, T>::Br) * a.B * a.H;
  if (ctas > fa::max_grid_x) return cudaErrorInvalidValue;
  if (cudaError_t error = fa::allow_smem(fa2_mma<d, T>, Tile<d, T>::smem_bytes)) return error;
  fa2_mma<d, T><<<unsigned(ctas), Tile<d, T>::threads, Tile<d, T>::smem_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  if (!fa::is_half(a) || !fa::half_rows_aligned16(a.Q, a.Q_stride) || !fa::half_rows_aligned16(a.K, a.K_stride) ||
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
