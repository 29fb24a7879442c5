// 20_causal_gqa: causal mask, grouped heads, packed sequences: masked tiles are skipped
//
// idea:      Half of S is masked under a causal mask: skip those tiles, and let only the tiles on the diagonal pay for
//            the mask. Then tiles of queries differ in length: the longest start first, so that no SM is left with one
//            at the end.
// changed:   a CTA visits the tiles of keys that its queries see, a warp multiplies those that its rows see, and masks
//            where a row's keys end in the tile; the grid runs from the last queries to the first, over as many heads
//            at a time as have 32 MiB of K and V (12 MiB without a mask); query heads share a head of K and V; in
//            a packed batch a CTA finds its sequence by itself; D = 96; three stages at D = 64
// op:        attention
// features:  causal, window, gqa, varlen
// inputs:    Q (B,H,Nq,D), K V (B,Hkv,Nk,D) fp16 or bf16; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         64, 96, 128
// tiles:     D=64:  Br=128 Bc=64 threads=128 smem=65 KB CTAs/SM=2
//            D=64, 99 KB per block or less: Br=128 Bc=64 threads=128 smem=49 KB CTAs/SM=2
//            D=96:  Br=128 Bc=64 threads=128 smem=73 KB CTAs/SM=2
//            D=128: Br=128 Bc=64 threads=128 smem=97 KB CTAs/SM=2
// arch:      sm_80
// paper:     FlashAttention-2, section 3.1.1, causal masking (arXiv 2307.08691); GQA (arXiv 2305.13245)
// speed:     H200, causal, N = 1024 to 16384: 272 to 405 TFLOP/s at D=64, 306 to 432 at D=128: 1.29 x and 1.31 x SDPA
//            FLASH; 64 heads on 8 1.00 to 1.02 x as fast as 64 on 64; packed batches of random lengths at 0.91 to 0.99 of
//            what their sequences reach in full batches of one length
#include <fa/arch.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/rows32.cuh>
#include <fa/sm80.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int Br = 32 * warps; // query rows per CTA, 32 per warp
  static constexpr int Bc = 64;         // keys per tile
  // Buffers for K_j and V_j: three where two CTAs of an SM have room for them
  static constexpr int stages = d == 64 && FA_SMEM_KB >= 2 * 65 ? 3 : 2, ctas = 2;
  static constexpr int Q_steps = d == 64 ? 4 : 0;    // of Q_i in registers; the others are read for every tile
  static constexpr int stage_bytes = 2 * 2 * Bc * d; // K_smem, V_smem
  static constexpr int Q_at = stages * stage_bytes;  // Q_smem follows the stages
  static constexpr int work_at = Q_at + 2 * Br * d;  // then work_smem
  static constexpr int smem_bytes = work_at + 32;
};
// [end: tile]

// [region: swizzle]
// Where chunk `chunk` (16 bytes) of row `row` of a (rows, d) tile lies, in bytes: as in 11_swizzled, the low bits of
// the chunk's number XOR those of the row's. With d = 96 a row has 12 chunks, and two rows fill the banks three times:
// the chunks trade places in fours, and rows do it in pairs.
template <int d> constexpr int swapped = d % 64 == 0 ? 8 : 4; // chunks that trade places
template <int d> __device__ constexpr int at(int row, int chunk) {
  return row * 2 * d + (chunk ^ row / (8 / swapped<d>) % swapped<d>)*16;
}

// From the place of a row's chunk 0 or 1 to that of the chunk 2k further right: XOR once more. Rows lie a multiple of
// 64 or 128 bytes apart, so that the bits it flips belong to the chunk alone.
template <int d> __device__ constexpr uint32_t right(uint32_t place, int k) {
  constexpr int steps = swapped<d> / 2;
  return (place ^ k % steps * 32) + k / steps * swapped<d> * 16;
}
// [end: swizzle]

// [region: load_tile]
// Sends rows of X on their way to shared memory, 16 bytes per thread at a time, `along` neighbours along a row. X and
// X_smem are the place of this thread's first chunk. Rows from rows_left on, counted from there, become zero and are
// not read.
template <int d> constexpr int along = d % 64 == 0 ? d / 8 : 4;
template <int rows, int d, typename T>
__device__ __forceinline__ void load_tile(uint32_t X_smem, const T *X, int64_t stride, int rows_left) {
  constexpr int step = Tile<d>::threads / along<d>; // rows that all threads together copy at a time
  static_assert(rows % step == 0 && step % 8 == 0,
                "a tile is a whole number of passes, each a whole number of swizzles");
#pragma unroll
  for (int r = 0; r < rows; r += step) {
#pragma unroll
    for (int c = 0; c < d; c += along<d> * 8)
      fa::cp_async_16(X_smem + (r * d + c) * 2, X + r * stride + c, r < rows_left ? 16 : 0);
  }
}
// [end: load_tile]

// [region: schedule]
// A head has `tiles` tiles of queries (packed sequences: at most), `heads` heads are worked on at a time.
struct Order {
  int tiles, heads;
};

// What a CTA works on: a tile of queries of a head, in a sequence with Nq queries from row q0 on and Nk keys from row
// k0 on.
struct Work {
  int head, tile, q0, k0, Nq, Nk;
};

// The longest tiles first: of each head the last queries. Neighbouring CTAs take the same tile, one head each. In a
// packed batch the sequences come one after the other, and past the last one the tile is -1. Called by whole warps.
template <int Br> __device__ __forceinline__ Work find_work(const fa_model_args &a, const Order &order) {
  const int group = blockIdx.x / (order.heads * order.tiles), in_group = blockIdx.x % (order.heads * order.tiles);
  const int heads = min(order.heads, a.B * a.H - group * order.heads); // the last group may have fewer
  const int head = group * order.heads + in_group % heads, lane = threadIdx.x % 32;
  int rank = in_group / heads;
  if (!a.q_starts) return {head, order.tiles - 1 - rank, 0, 0, a.Nq, a.Nk};
  for (int s0 = 0; s0 < a.sequences; s0 += 32) { // a lane per sequence
    const int s = min(s0 + lane, a.sequences - 1), q0 = a.q_starts[s], Nq = a.q_starts[s + 1] - q0;
    int sum = s0 + lane < a.sequences ? (Nq + Br - 1) / Br : 0; // tiles of this sequence and of those before it
#pragma unroll
    for (int n = 1; n < 32; n *= 2) {
      const int before = __shfl_up_sync(0xffffffff, sum, n);
      sum += lane >= n ? before : 0;
    }
    if (const unsigned past = __ballot_sync(0xffffffff, sum > rank)) {
      const int found = __ffs(past) - 1, k0 = a.k_starts[s0 + found];
      return {head,
              __shfl_sync(0xffffffff, sum, found) - 1 - rank,
              __shfl_sync(0xffffffff, q0, found),
              k0,
              __shfl_sync(0xffffffff, Nq, found),
              a.k_starts[s0 + found + 1] - k0};
    }
    rank -= __shfl_sync(0xffffffff, sum, 31);
  }
  return {head, -1, 0, 0, 0, 0};
}
// [end: schedule]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void causal_gqa(const fa_model_args a, Order order,
                                                                              float scale_log2) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br, stages = Tile<d>::stages;
  constexpr int Q_steps = Tile<d>::Q_steps, Q_at = Tile<d>::Q_at, stage_bytes = Tile<d>::stage_bytes;

  extern __shared__ __align__(1024) unsigned char Q_KV_smem[]; // stages x {K_j (Bc, d), V_j (Bc, d)}, Q_i (Br, d), work
  const uint32_t smem = fa::smem_address(Q_KV_smem);
  Work *work_smem =
      reinterpret_cast<Work *>(Q_KV_smem + Tile<d>::work_at); // until the end: the loop needs the registers

  // This CTA's query tile: rows i0 .. i0 + Br of a sequence of head (b, h)
  const Work work = find_work<Br>(a, order);
  if (work.tile < 0) return; // the whole CTA
  if (threadIdx.x == 0) *work_smem = work;
  const int i0 = work.tile * Br, Nq = work.Nq, Nk = work.Nk;
  const int b = work.head / a.H, h = work.head % a.H, hk = h / (a.H / a.Hkv);
  const T *Q = static_cast<const T *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1] + work.q0 * a.Q_stride[2]; // (Nq, d)
  const T *K =
      static_cast<const T *>(a.K) + b * a.K_stride[0] + hk * a.K_stride[1] + work.k0 * a.K_stride[2]; // (Nk, d)
  const T *V =
      static_cast<const T *>(a.V) + b * a.V_stride[0] + hk * a.V_stride[1] + work.k0 * a.V_stride[2]; // (Nk, d)

  // [region: visible]
  // Row i sees the keys up to i + shift, and of those the last `window` ones. Without a causal mask all rows see the
  // last key. The keys come in tiles j_last, j_last - Bc, .. j_first.
  const int shift = Nk - Nq, window = a.window ? a.window : 1 << 30;
  const int last_key = a.causal ? min(i0 + Br + shift, Nk) - 1 : Nk - 1; // that any row sees; none if negative
  const int j_last = last_key < 0 ? -Bc : last_key / Bc * Bc;
  const int j_first = a.causal ? max(i0 + shift - window + 1, 0) / Bc * Bc : 0;
  // [end: visible]

  // The same for all lanes, and the compiler is told so: otherwise it prepares for a warp whose lanes part at a branch.
  const int warp = __reduce_max_sync(0xffffffff, threadIdx.x / 32);
  const int lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of a 16 x 8 accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1

  // [region: fragments]
  // ldmatrix.x4 loads four 8 x 8 matrices; lanes 8m .. 8m + 7 give the addresses of matrix m's rows. For the operand A
  // (Q), and for V with .trans, matrices 0, 1 lie one below the other and 2 and 3 right of them; for K the other way.
  const uint32_t at_A = smem + at<d>(lane % 16, lane / 16);
  const uint32_t Q_lane = at_A + Q_at + 32 * warp * 2 * d; // V is read at at_A, half a stage further on
  const uint32_t K_lane = smem + at<d>(lane % 8 + lane / 16 * 8, lane / 8 % 2);

  // [region: pipeline]
  // Sends the next tile pair on its way to a stage. A thread's copies for one pair are one group; past the last pair
  // the group is empty, so that counting groups is counting tiles. The tiles come backwards, the ragged one first.
  const int row = threadIdx.x / along<d>, chunk = threadIdx.x % along<d>;
  const uint32_t copy = smem + at<d>(row, chunk);
  const T *K_next = K + (j_last + row) * a.K_stride[2] + chunk * 8;
  const T *V_next = V + (j_last + row) * a.V_stride[2] + chunk * 8;
  const auto fetch = [&](bool is_tile, int stage_at, int rows_left) {
    if (is_tile) {
      load_tile<Bc, d>(copy + stage_at, K_next, a.K_stride[2], rows_left);
      load_tile<Bc, d>(copy + stage_at + stage_bytes / 2, V_next, a.V_stride[2], rows_left);
      K_next -= Bc * a.K_stride[2], V_next -= Bc * a.V_stride[2];
    }
    fa::cp_async_commit();
  };

  load_tile<Br, d>(copy + Q_at, Q + (i0 + row) * a.Q_stride[2] + chunk * 8, a.Q_stride[2], Nq - i0 - row);
  fa::cp_async_commit();
#pragma unroll
  for (int s = 0; s < stages - 1; ++s)
    fetch(j_last - s * Bc >= j_first, s * stage_bytes, s == 0 ? Nk - j_last - row : Bc);
  // [end: pipeline]

  // Q_i's A fragments of this warp, (32, 16) each: those that stay for the whole loop, and a place for the others
  fa::cp_async_wait<stages - 1>(); // Q_i's group is the oldest
  __syncthreads();                 // every thread's part of Q_i, and work_smem, are there before any warp reads it
  uint32_t Q_reg[Q_steps < d / 16 ? Q_steps + 1 : Q_steps][8];
#pragma unroll
  for (int k = 0; k < Q_steps; ++k) fa::ldmatrix_x4_twice(Q_reg[k], right<d>(Q_lane, k), 16 * 2 * d);
  // [end: fragments]

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
  const auto scores = [&](int stage_at) {
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 8; ++e) S_reg[n][e] = 0.f;
    }
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      uint32_t (&Q_step)[8] = Q_reg[k < Q_steps ? k : Q_steps];
      if (k >= Q_steps) fa::ldmatrix_x4_twice(Q_step, right<d>(Q_lane, k), 16 * 2 * d);
#pragma unroll
      for (int n = 0; n < Bc / 16; ++n) {
        uint32_t K_reg[4]; // two B fragments: 16 columns of d by keys 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4(K_reg, right<d>(K_lane + stage_at, k) + 16 * n * 2 * d);
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
  const auto raise_maximum = [&] {
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

  // [region: mask]
  // The last key that this warp's first row sees; each of its 32 rows sees one more than the row before.
  const int sees = a.causal ? i0 + 32 * warp + shift : Nk - 1;
  const int whole = min(sees + 1, Nk) / Bc * Bc; // each row sees the tiles below it to their ends, but for the window
  // Scores of keys that a row doesn't see become -inf once they are scaled: with a negative scale they are inf before.
  const auto mask = [&](int j0) {
    const float masked = scale_log2 < 0.f ? FA_INFINITY : -FA_INFINITY;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int last = sees + (a.causal ? g + 8 * r : 0), first = a.causal ? last - window : -1; // first is not seen
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int j = j0 + 8 * n + 2 * t + e;
          if (j > last || j <= first) S_reg[n][2 * r + e] = masked;
        }
      }
    }
  };
  // [end: mask]

  // [region: tile_loop]
  // Tiles whose P is formed first: those that all rows of the warp see whole, but for the first of them, which gives m
  int take_to = whole - 2 * Bc; // -1: none any more
  const int take_from = a.causal ? sees + 32 - window : 0;
  int stage_at = 0, free_at = (stages - 1) * stage_bytes;
  for (int j0 = j_last; j0 >= j_first; j0 -= Bc) {
    fa::cp_async_wait<stages - 2>(); // this tile's group; later ones may still be on their way
    // Every thread's part of this tile has landed before any warp reads it; and all warps have read the tile before it,
    // whose stage the next copies overwrite.
    __syncthreads();

    const bool take = j0 <= take_to && j0 >= take_from;
    const bool seen = take || (j0 <= sees + 31 && j0 + Bc > sees - window + 1); // by the last row; by the first row
    if (!seen) { // only copies: other warps need the tiles to come
      fetch(j0 - (stages - 1) * Bc >= j_first, free_at, Bc);
    } else {
      bool fits = take;
      if (take) {
        scores(stage_at);
        fits = probabilities() || raise_maximum_by_P();
      }
      if (!fits) { // the maximum first: of tiles to mask and the one after, and where P is infinite
        scores(stage_at);
        if (j0 >= whole || j0 < take_from) mask(j0);
        raise_maximum();
        probabilities();
        if (take) take_to = -1;
      }
      fetch(j0 - (stages - 1) * Bc >= j_first, free_at, Bc);
#pragma unroll
      for (int r = 0; r < 4; ++r) l_reg[r] += row_sum[r];
      round_P(); // which may overlap with the first products

      // [region: output]
      // O (32, d) += P V_j by each warp: d / 8 accumulators, Bc / 16 steps
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
        for (int n = 0; n < d / 16; ++n) {
          uint32_t V_reg[4]; // two B fragments: keys 16k + {0..15} by columns 16n + {0..7} and 16n + {8..15}
          fa::ldmatrix_x4_trans(V_reg, right<d>(at_A + stage_at, n) + stage_bytes / 2 + 16 * k * 2 * d);
          fa::mma_m32n8k16<T>(O_reg[2 * n], P_reg[k], V_reg[0], V_reg[1]);
          fa::mma_m32n8k16<T>(O_reg[2 * n + 1], P_reg[k], V_reg[2], V_reg[3]);
        }
      }
      // [end: output]
    }
    free_at = stage_at;
    stage_at = stage_at + stage_bytes < Q_at ? stage_at + stage_bytes : 0;
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O (Nq, d) = O / l and LSE = ln(l * 2^m), once. A row that sees no key has l = 0: O = 0 (of finite V), LSE = -inf.
  const Work done = *work_smem;
  T *O = static_cast<T *>(a.O) + done.head / a.H * a.O_stride[0] + done.head % a.H * a.O_stride[1];
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float l = l_reg[r];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

    const int i = done.tile * Br + 32 * warp + g + 8 * r;
    if (i < done.Nq) {
      const float l_inv = l > 0.f ? 1.f / l : 0.f;
      T *O_row = O + (done.q0 + i) * a.O_stride[2] + 2 * t;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) // four lanes write 16 bytes of a row
        *reinterpret_cast<uint32_t *>(O_row + 8 * n) =
            fa::pack2<T>(O_reg[n][2 * r] * l_inv, O_reg[n][2 * r + 1] * l_inv);
      if (t == 0) a.LSE[int64_t(done.head) * a.Nq + done.q0 + i] = (m_reg[r] + log2f(l)) * fa::ln_2;
    }
  }
  // [end: epilogue]
}

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  // As many heads at a time as have this much of K and V. Measured on an H200 (the 32 MiB: notebook 20, section 3).
  const int64_t share_of_L2 = (a.causal ? 32 : 12) << 20, bytes = int64_t(4) * a.Nk * d;
  const int64_t heads = max(int64_t(1), share_of_L2 / bytes) * (a.H / a.Hkv);
  // A sequence has at most one tile that isn't full.
  const int64_t tiles = fa::ceil_div(a.Nq, Tile<d>::Br) + (a.q_starts ? a.sequences : 0), ctas = tiles * a.B * a.H;
  if (ctas > fa::max_grid_x) return cudaErrorInvalidValue;
  const Order order = {int(tiles), int(min(heads, int64_t(a.B) * a.H))};
  if (cudaError_t error = fa::allow_smem(causal_gqa<d, T>, Tile<d>::smem_bytes)) return error;
  // S in units of log2, so that P = exp2(S - m). A scale of 0 would make a NaN of a masked score. Formed here, it is an
  // argument, which an FMA reads without a register.
  const float scale_log2 = a.scale == 0.f ? 1e-30f : a.scale * fa::log2_e;
  causal_gqa<d, T><<<unsigned(ctas), Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a, order, scale_log2);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_model_args &a = fa::model(args);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.window < 0 || (a.window && !a.causal) || a.lengths || a.pages ||
      (a.q_starts && (a.B != 1 || !a.k_starts)) || !fa::half_rows_aligned16(a.Q, a.Q_stride) ||
      !fa::half_rows_aligned16(a.K, a.K_stride) || !fa::half_rows_aligned16(a.V, a.V_stride) ||
      !fa::half_rows_aligned16(a.O, a.O_stride))
    return cudaErrorInvalidValue;
  switch (a.D) {
  case 64:
    return launch<64>(a, stream);
  case 96:
    return launch<96>(a, stream);
  case 128:
    return launch<128>(a, stream);
  default:
    return cudaErrorInvalidValue;
  }
}
// [end: launcher]
