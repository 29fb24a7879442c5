// 23_backward_mma: backward pass on tensor cores: S and P transposed in registers
//
// idea:      Form S and P transposed, keys by queries: then a warp's accumulator of P^T is its operand A of dV = P^T dO, and
//            that of dS^T its operand A of dK. Only dS crosses between all warps, once per step, for dQ. At D = 128 two
//            warps share 32 keys and exchange P and dS: twice the rows for each operand B that is read.
// changed:   tensor cores instead of 22's register tiles, 16-bit tiles swizzled as in 11 and double buffered as in 12;
//            sums of S begin with -LSE / scale, of dP with -delta: nothing to subtract, and where P counts S ends near 0;
//            dQ is added up by atomics in whatever order the CTAs come: its last digits differ from run to run
// op:        attention_backward
// features:  causal, window, gqa
// inputs:    Q O dO (B,H,Nq,D), K V (B,Hkv,Nk,D) fp16 or bf16, LSE (B,H,Nq) fp32; rows and strides multiples of 16 bytes
// outputs:   dQ (B,H,Nq,D), dK dV (B,Hkv,Nk,D) as Q; dK and dV are the same bit by bit every time, dQ is not
// dtypes:    fp16, bf16
// D:         64, 128
// workspace: dQ_sum (B,H,Nq128,D) fp32; stats (2,B,H,Nq128) fp32; dK_dV (B,Hshared,Nk,D) fp32, as 2 * D 16-bit ones
// tiles:     D=64:  Br=64 Bc=128 threads=128 smem=81 KB CTAs/SM=2
//            D=128: Br=64 Bc=128 threads=256 smem=161 KB CTAs/SM=1
//            D=128, 99 KB per block: Br=32 Bc=64 threads=128 smem=81 KB CTAs/SM=1
// arch:      sm_80
// paper:     FlashAttention-2, Algorithm 2 (arXiv 2307.08691)
// speed:     H200, N >= 1024: 267 to 331 TFLOP/s at D=64, 249 to 316 at D=128: 1.20 x and 1.06 x SDPA FLASH; causal 1.27 x
//            and 1.10 x
#include <fa/arch.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm80.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int small = d == 128 && FA_SMEM_KB < 161; // the last row of the table above
  static constexpr int Br = small ? 32 : 64;                 // queries per step of the loop
  static constexpr int Bc = small ? 64 : 128;                // keys per CTA
  static constexpr int Bq = small ? 16 : 32;    // queries at a time: S and dP take at most 32 registers each
  static constexpr int ld = 64;                 // row length of P^T and dS^T in shared memory
  static constexpr int keys = 32, columns = 64; // of dK and dV per warp, which take 128 registers per lane
  static constexpr int share = d / columns;     // warps with the same keys: each forms S and dP of its own queries
  static constexpr int warps = Bc / keys * share, threads = 32 * warps;
  static constexpr int down = Br / 32; // of dQ a warp has 32 x 32 elements: so many warps below each other
  static constexpr int stages = 2;     // buffers for Q_i and dO_i
  static constexpr int ctas = d == 64 ? 2 : 1;
  static constexpr int stage = 2 * Br * d; // elements
  static constexpr int smem_bytes = 2 * (2 * Bc * d + stages * stage + share * Bc * ld) + 4 * stages * 2 * Br;
};

// Rows of the workspace per head, Nq128 above: whole tiles.
inline __host__ __device__ int64_t padded(int Nq) { return fa::ceil_div(Nq, 128) * 128; }
// [end: tile]

// [region: swizzle]
// Where chunk `chunk` (16 bytes) of row `row` of a (rows, d) tile lies, in elements: as in 11_swizzled.
template <int d> __device__ constexpr int at(int row, int chunk) { return row * d + (chunk ^ row % 8) * 8; }
// [end: swizzle]

// [region: load_tile]
// Sends rows of X on their way to X_smem (rows, d), 16 bytes per thread at a time, neighbours along a row. Rows from
// rows_left on become zero and are not read.
template <int rows, int d, typename T>
__device__ __forceinline__ void load_tile(T *X_smem, const T *X, int64_t stride, int rows_left) {
  constexpr int step = Tile<d>::threads / (d / 8); // rows that all threads together copy at a time
  static_assert(rows % step == 0, "a tile is a whole number of passes");
  const int row = threadIdx.x / (d / 8), chunk = threadIdx.x % (d / 8);
  X += row * stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < rows; r += step)
    fa::cp_async_16(X_smem + at<d>(row + r, chunk), X + r * stride, row + r < rows_left ? 16 : 0);
}
// [end: load_tile]

// LSE is divided by it: never 0. With 1e-30 every score is 0, too.
inline __device__ float scale_of(const fa_backward_args &a) { return fabsf(a.scale) < 1e-30f ? 1e-30f : a.scale; }

// The score whose P = exp(scale * S) is 0, whatever finite number is added to it: -inf, or inf where the scale is negative.
inline __device__ float unseen(const fa_backward_args &a) { return copysignf(FA_INFINITY, -scale_of(a)); }

// [region: delta]
// Before everything else, 16 bytes of a row per lane: dQ_sum = 0, and stats (2, B, H, padded Nq): where the sums begin,
// -LSE / scale for Q K^T and -delta = -rowsum(dO o O) for dO V^T. The first, of a row past the end or of one that sees no
// key (LSE = -inf), begins with the score of an unseen key.
template <int d, typename T> __global__ void prepare(const fa_backward_args a) {
  constexpr int lanes = d / 8; // of a row
  const int64_t row = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const int64_t Nq = padded(a.Nq), rows = a.B * a.H * Nq, head = row / Nq;
  const int chunk = threadIdx.x % lanes, i = int(row % Nq), h = int(head % a.H), b = int(head / a.H);
  float *dQ_sum = static_cast<float *>(a.workspace[0]) + row * d, *stats = static_cast<float *>(a.workspace[1]) + row;
  float delta = 0.f;
  if (i < a.Nq) {
    const T *O = static_cast<const T *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2];
    const T *dO = static_cast<const T *>(a.dO) + b * a.dO_stride[0] + h * a.dO_stride[1] + i * a.dO_stride[2];
    const uint4 O_bits = reinterpret_cast<const uint4 *>(O)[chunk],
                dO_bits = reinterpret_cast<const uint4 *>(dO)[chunk];
    const T *O_reg = reinterpret_cast<const T *>(&O_bits), *dO_reg = reinterpret_cast<const T *>(&dO_bits);
#pragma unroll
    for (int e = 0; e < 8; ++e) delta += float(O_reg[e]) * float(dO_reg[e]);
  }
#pragma unroll
  for (int mask = lanes / 2; mask > 0; mask /= 2) delta += __shfl_xor_sync(0xffffffff, delta, mask);
#pragma unroll
  for (int e = 0; e < 2; ++e) reinterpret_cast<float4 *>(dQ_sum)[e * lanes + chunk] = make_float4(0.f, 0.f, 0.f, 0.f);
  if (chunk == 0) {
    const float LSE = i < a.Nq ? a.LSE[head * a.Nq + i] : -FA_INFINITY;
    stats[0] = LSE == -FA_INFINITY ? unseen(a) : -LSE / scale_of(a);
    stats[rows] = -delta;
  }
}
// [end: delta]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void backward_mma(const fa_backward_args a, int heads) {
  using C = Tile<d>;
  constexpr int Br = C::Br, Bc = C::Bc, Bq = C::Bq, ld = C::ld, keys = C::keys, M = keys / 16, down = C::down;
  constexpr bool shared = C::share > 1;

  // This CTA's keys: rows j0 .. j0 + Bc of head (b, hk), and of the queries those of head h: heads that share K and V have
  // CTAs of their own. `heads` heads are a set, the last set may have fewer: tile 0 of all its heads, then tile 1 of all,
  // and so on. Under a causal mask the first tiles are the longest.
  const int key_tiles = int(fa::ceil_div(a.Nk, Bc));
  const int set = blockIdx.x / (heads * key_tiles), in_set = blockIdx.x % (heads * key_tiles);
  const int of = min(heads, a.B * a.H - set * heads), head = set * heads + in_set % of, j0 = in_set / of * Bc;
  const int h = head % a.H, hk = h / (a.H / a.Hkv), b = head / a.H;
  const T *K = static_cast<const T *>(a.K) + b * a.K_stride[0] + hk * a.K_stride[1] + j0 * a.K_stride[2];
  const T *V = static_cast<const T *>(a.V) + b * a.V_stride[0] + hk * a.V_stride[1] + j0 * a.V_stride[2];

  extern __shared__ __align__(1024) unsigned char smem[];
  T *K_smem = reinterpret_cast<T *>(smem);                          // (Bc, d)
  T *V_smem = K_smem + Bc * d;                                      // (Bc, d)
  T *QdO_smem = V_smem + Bc * d;                                    // stages x {Q_i (Br, d), dO_i (Br, d)}
  T *P_smem = QdO_smem + C::stages * C::stage;                      // (Bc, Br) P^T where warps share their keys
  T *dS_smem = P_smem + (C::share - 1) * Bc * ld;                   // (Bc, Br) dS^T
  float *stats_smem = reinterpret_cast<float *>(dS_smem + Bc * ld); // stages x {-LSE / scale (Br), -delta (Br)}

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int part = warp % C::share, row_K = warp / C::share * keys; // which queries and columns; first key
  const int g = lane / 4, t = lane % 4; // of a 16 x 8 accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1
  const int row_A = lane % 16, chunk_A = lane / 16; // ldmatrix as in 10
  const int row_B = lane % 8 + lane / 16 * 8, chunk_B = lane / 8 % 2;

  // [region: steps]
  // A step: a tile of queries that see one of these keys. Query i sees the keys up to i + shift, and of those the last
  // `window`.
  const int shift = a.Nk - a.Nq, all = int(fa::ceil_div(a.Nq, Br));
  const int first = a.causal ? max(0, j0 - shift) / Br : 0;
  const int last = a.window ? min(all, (max(-1, j0 + Bc - 2 - shift + a.window) + Br) / Br) : all; // one past the last
  // [end: steps]

  // [region: pipeline]
  // Q_i, dO_i and their rows' stats on their way to a stage, as one group; empty after the last step.
  const auto fetch = [&](int tile, int stage) {
    if (tile < last) {
      const int i0 = tile * Br;
      const T *Q = static_cast<const T *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1] + i0 * a.Q_stride[2];
      const T *dO = static_cast<const T *>(a.dO) + b * a.dO_stride[0] + h * a.dO_stride[1] + i0 * a.dO_stride[2];
      load_tile<Br, d>(QdO_smem + stage * C::stage, Q, a.Q_stride[2], a.Nq - i0);
      load_tile<Br, d>(QdO_smem + stage * C::stage + Br * d, dO, a.dO_stride[2], a.Nq - i0);
      if (threadIdx.x < 2 * Br / 4) { // 16 bytes each; the workspace has whole tiles
        const int which = threadIdx.x / (Br / 4), i = threadIdx.x % (Br / 4) * 4;
        const float *stats = static_cast<const float *>(a.workspace[1]);
        fa::cp_async_16(stats_smem + (stage * 2 + which) * Br + i,
                        stats + ((which * int64_t(a.B) + b) * a.H + h) * padded(a.Nq) + i0 + i);
      }
    }
    fa::cp_async_commit();
  };
  load_tile<Bc, d>(K_smem, K, a.K_stride[2], a.Nk - j0);
  load_tile<Bc, d>(V_smem, V, a.V_stride[2], a.Nk - j0);
  fetch(first, 0);
  // [end: pipeline]

  const float scale_log2 = scale_of(a) * fa::log2_e;
  float dK_reg[M][C::columns / 8][4] = {}, dV_reg[M][C::columns / 8][4] = {}; // of this warp, dK without scale

  // [region: tile_loop]
  for (int tile = first, stage = 0; tile < last; ++tile, stage ^= 1) {
    const int i0 = tile * Br;
    const T *Q_smem = QdO_smem + stage * C::stage, *dO_smem = Q_smem + Br * d;
    fa::cp_async_wait<0>();
    // This step's tiles have landed before any warp reads them; the other stage, which the next copies overwrite,
    // dS_smem and P_smem have been read by all warps.
    __syncthreads(); // as above
    fetch(tile + 1, stage ^ 1);

    // [region: products]
    // acc (keys, Bq) = A B^T + x for this warp's keys and queries q0 .. + Bq: S^T - LSE / scale of K_j and Q_i, dP^T - delta
    // of V_j and dO_i. A query is a column, so x, one number per query, differs along a row.
    const auto product = [&](float (&acc)[M][Bq / 8][4], const T *A_smem, const T *B_smem, const float *x_smem,
                             int q0) {
#pragma unroll
      for (int n = 0; n < Bq / 8; ++n) {
        const float2 x = *reinterpret_cast<const float2 *>(x_smem + q0 + 8 * n + 2 * t);
#pragma unroll
        for (int m = 0; m < M; ++m) acc[m][n][0] = acc[m][n][2] = x.x, acc[m][n][1] = acc[m][n][3] = x.y;
      }
#pragma unroll
      for (int k = 0; k < d / 16; ++k) {
        uint32_t A_reg[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m)
          fa::ldmatrix_x4(A_reg[m], A_smem + (row_K + 16 * m) * d + at<d>(row_A, 2 * k + chunk_A));
#pragma unroll
        for (int n = 0; n < Bq / 16; ++n) {
          uint32_t B_reg[4]; // two B fragments: 16 columns of d by queries 16n + {0..7} and 16n + {8..15}
          fa::ldmatrix_x4(B_reg, B_smem + (q0 + 16 * n) * d + at<d>(row_B, 2 * k + chunk_B));
#pragma unroll
          for (int m = 0; m < M; ++m) {
            fa::mma_m16n8k16<T>(acc[m][2 * n], A_reg[m], B_reg[0], B_reg[1]);
            fa::mma_m16n8k16<T>(acc[m][2 * n + 1], A_reg[m], B_reg[2], B_reg[3]);
          }
        }
      }
    };
    // acc (keys, columns) += X^T Y over queries q .. + 16: dV of P and dO_i, dK of dS and Q_i. Two neighbouring
    // accumulators of X^T, rounded to 16 bits, are a fragment A: the same lane holds the same elements.
    const auto accumulate = [&](float (&acc)[M][C::columns / 8][4], const uint32_t (&X_reg)[M][4], const T *Y_smem,
                                int q) {
#pragma unroll
      for (int n = 0; n < C::columns / 16; ++n) {
        uint32_t Y_reg[4]; // two B fragments: 16 queries by columns 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4_trans(Y_reg, Y_smem + at<d>(q + row_A, part * 8 + 2 * n + chunk_A));
#pragma unroll
        for (int m = 0; m < M; ++m) {
          fa::mma_m16n8k16<T>(acc[m][2 * n], X_reg[m], Y_reg[0], Y_reg[1]);
          fa::mma_m16n8k16<T>(acc[m][2 * n + 1], X_reg[m], Y_reg[2], Y_reg[3]);
        }
      }
    };
    // [end: products]

    // S and P, dP and dS of this warp's keys and queries i0 + q0 .. + Bq, and what they add to dV and dK
    const auto pass = [&](int q0) {
      // [region: scores]
      // Where in P_smem and dS_smem elements 0 and 1 (pair 0), or 2 and 3 (1), of accumulator (m, n) lie: at<ld>(row,
      // q0 / 8 + n) + 2t. Eight rows, eight places: no conflicts.
      const auto place = [&](int m, int n, int pair) {
        const int row = row_K + 16 * m + g + 8 * pair;
        return (row * ld + g * 8 + 2 * t) ^ (q0 + 8 * n);
      };

      // P = exp2(scale_log2 (S - LSE / scale))
      float S_reg[M][Bq / 8][4];
      product(S_reg, K_smem, Q_smem, stats_smem + stage * 2 * Br, q0);
      if (j0 + Bc > a.Nk || (a.causal && j0 + Bc - 1 > i0 + shift) ||
          (a.window && j0 <= i0 + Br - 1 + shift - a.window)) { // something here is out of sight
        const float masked = unseen(a);
        // Of element 0 of the first fragment: keys from its own on, and how many its query sees beyond its own.
        const int j = j0 + row_K + g, left = a.Nk - j, ahead = i0 + q0 + 2 * t + shift - j;
#pragma unroll
        for (int n = 0; n < Bq / 8; ++n) {
#pragma unroll
          for (int m = 0; m < M; ++m) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key = 16 * m + e / 2 * 8, query = 8 * n + e % 2; // from element 0's on
              if (key >= left || (a.causal && key - query > ahead) || (a.window && key - query <= ahead - a.window))
                S_reg[m][n][e] = masked;
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < Bq / 8; ++n) {
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) S_reg[m][n][e] = fa::ex2_approx_ftz(S_reg[m][n][e] * scale_log2);
        }
      }
      // [end: scores]

      // [region: dV]
#pragma unroll
      for (int k = 0; k < Bq / 16; ++k) {
        uint32_t P_reg[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int n = 2 * k + e / 2, c = e % 2 * 2;
            P_reg[m][e] = fa::pack2<T>(S_reg[m][n][c], S_reg[m][n][c + 1]);
            if (shared) *reinterpret_cast<uint32_t *>(P_smem + place(m, n, e % 2)) = P_reg[m][e];
          }
        }
        accumulate(dV_reg, P_reg, dO_smem, q0 + 16 * k);
      }
      // [end: dV]

      // [region: dK]
      // dS = P o (dP - delta): fragments A of dK, and to shared memory for dQ
      float dP_reg[M][Bq / 8][4];
      product(dP_reg, V_smem, dO_smem, stats_smem + (stage * 2 + 1) * Br, q0);
#pragma unroll
      for (int k = 0; k < Bq / 16; ++k) {
        uint32_t dS_reg[M][4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int n = 2 * k + e / 2, c = e % 2 * 2;
#pragma unroll
          for (int m = 0; m < M; ++m) {
            dS_reg[m][e] = fa::pack2<T>(S_reg[m][n][c] * dP_reg[m][n][c], S_reg[m][n][c + 1] * dP_reg[m][n][c + 1]);
            *reinterpret_cast<uint32_t *>(dS_smem + place(m, n, e % 2)) = dS_reg[m][e];
          }
        }
        accumulate(dK_reg, dS_reg, Q_smem, q0 + 16 * k);
      }
      // [end: dK]
    };
    if constexpr (shared)
      pass(part * Bq);
    else
#pragma unroll 1 // unrolled, it wants more registers than there are; counted by queries, it spills on sm_86 and sm_89
      for (int n = 0; n < Br / Bq; ++n) pass(n * Bq);

    __syncthreads(); // all of dS, and of P, is written before any warp reads it

    // [region: share]
    // The other half of the queries: of these P and dS of this warp's keys were formed by the warp that shares them.
    if (shared) {
      const int q0 = (part ^ 1) * Bq;
#pragma unroll
      for (int k = 0; k < Bq / 16; ++k) {
        uint32_t P_reg[M][4], dS_reg[M][4];
#pragma unroll
        for (int m = 0; m < M; ++m) {
          const int place = at<ld>(row_K + 16 * m + row_A, q0 / 8 + 2 * k + chunk_A);
          fa::ldmatrix_x4(P_reg[m], P_smem + place);
          fa::ldmatrix_x4(dS_reg[m], dS_smem + place);
        }
        accumulate(dV_reg, P_reg, dO_smem, q0 + 16 * k);
        accumulate(dK_reg, dS_reg, Q_smem, q0 + 16 * k);
      }
    }
    // [end: share]

    // [region: dQ]
    // dQ_i (Br, d) += dS K_j: 32 rows and 32 columns by each warp, over all keys
    float dQ_reg[2][4][4] = {};
    const int row_q = warp % down * 32, col_q = warp / down * 32;
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
      uint32_t dS_reg[2][4];
#pragma unroll
      for (int m = 0; m < 2; ++m) // from dS^T, so transposed, and matrices 1 and 2 change places
        fa::ldmatrix_x4_trans(dS_reg[m], dS_smem + at<ld>(16 * k + row_B, (row_q + 16 * m) / 8 + chunk_B));
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t K_reg[4];
        fa::ldmatrix_x4_trans(K_reg, K_smem + at<d>(16 * k + row_A, (col_q + 16 * n) / 8 + chunk_A));
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          fa::mma_m16n8k16<T>(dQ_reg[m][2 * n], dS_reg[m], K_reg[0], K_reg[1]);
          fa::mma_m16n8k16<T>(dQ_reg[m][2 * n + 1], dS_reg[m], K_reg[2], K_reg[3]);
        }
      }
    }
    // The sum lies in the order of the fragments, so that a warp's 32 additions are to neighbours; finish() sorts it.
    float *dQ_sum = static_cast<float *>(a.workspace[0]);
    dQ_sum += ((int64_t(b) * a.H + h) * padded(a.Nq) + i0) * d + threadIdx.x;
#pragma unroll
    for (int e = 0; e < 32; ++e) atomicAdd(dQ_sum + e * C::threads, dQ_reg[e / 16][e / 4 % 4][e % 4]);
    // [end: dQ]
  }
  // [end: tile_loop]

  // [region: epilogue]
  fa::cp_async_wait<0>(); // where there was no step, K and V are still on their way
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int j = j0 + row_K + 16 * m + g + 8 * r;
      if (j < a.Nk) {
        T *dK = static_cast<T *>(a.dK) + b * a.dK_stride[0] + h * a.dK_stride[1] + j * a.dK_stride[2] +
                part * C::columns + 2 * t;
        T *dV = static_cast<T *>(a.dV) + b * a.dV_stride[0] + h * a.dV_stride[1] + j * a.dV_stride[2] +
                part * C::columns + 2 * t;
#pragma unroll
        for (int n = 0; n < C::columns / 8; ++n) {
          const float *k = dK_reg[m][n] + 2 * r, *v = dV_reg[m][n] + 2 * r;
          *reinterpret_cast<uint32_t *>(dK + 8 * n) = fa::pack2<T>(k[0] * a.scale, k[1] * a.scale);
          *reinterpret_cast<uint32_t *>(dV + 8 * n) = fa::pack2<T>(v[0], v[1]);
        }
      }
    }
  }
  // [end: epilogue]
}

// [region: finish]
// After everything else: dQ (B, H, Nq, D) = scale * dQ_sum, a CTA per tile, each thread the elements that it had above.
template <int d, typename T> __global__ __launch_bounds__(Tile<d>::threads) void finish(const fa_backward_args a) {
  using C = Tile<d>;
  constexpr int down = C::down;
  const int tiles = int(padded(a.Nq) / C::Br), i0 = blockIdx.x % tiles * C::Br, head = blockIdx.x / tiles;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float *dQ_sum = static_cast<const float *>(a.workspace[0]) + int64_t(blockIdx.x) * C::Br * d + threadIdx.x;
  T *dQ = static_cast<T *>(a.dQ) + head / a.H * a.dQ_stride[0] + head % a.H * a.dQ_stride[1];
#pragma unroll
  for (int e = 0; e < 32; e += 2) {
    const int i = i0 + warp % down * 32 + e / 16 * 16 + g + e / 2 % 2 * 8,
              col = warp / down * 32 + e / 4 % 4 * 8 + 2 * t;
    const float x = dQ_sum[e * C::threads], y = dQ_sum[(e + 1) * C::threads];
    if (i < a.Nq) *reinterpret_cast<uint32_t *>(dQ + i * a.dQ_stride[2] + col) = fa::pack2<T>(x * a.scale, y * a.scale);
  }
}
// [end: finish]

// [region: add_heads]
// After finish, where query heads share K and V: dK and dV (B, Hkv, Nk, D) = the sum over the heads of a group, in their
// order. A CTA per row, which has d elements of dK and d of dV: two per thread.
template <int d, typename T> __global__ __launch_bounds__(d) void add_heads(const fa_backward_args a) {
  const int j = blockIdx.x % a.Nk, head = blockIdx.x / a.Nk, hk = head % a.Hkv, b = head / a.Hkv, group = a.H / a.Hkv;
  const uint32_t *from = static_cast<const uint32_t *>(a.workspace[2]) + int64_t(j) * d + threadIdx.x;
  float2 sum = make_float2(0.f, 0.f);
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    const float2 x = fa::unpack2<T>(from[h * a.Nk * d]);
    sum.x += x.x, sum.y += x.y;
  }
  T *to = threadIdx.x < d / 2 ? static_cast<T *>(a.dK) + b * a.dK_stride[0] + hk * a.dK_stride[1] + j * a.dK_stride[2]
                              : static_cast<T *>(a.dV) + b * a.dV_stride[0] + hk * a.dV_stride[1] + j * a.dV_stride[2];
  reinterpret_cast<uint32_t *>(to)[threadIdx.x % (d / 2)] = fa::pack2<T>(sum.x, sum.y);
}
// [end: add_heads]

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_backward_args &a, cudaStream_t stream) {
  using C = Tile<d>;
  const int64_t rows = int64_t(a.B) * a.H * padded(a.Nq), ctas = fa::ceil_div(a.Nk, C::Bc) * a.B * a.H;
  if (ctas * C::Bc > fa::max_grid_x || rows * d / 1024 > fa::max_grid_x) return cudaErrorInvalidValue;
  // Without a mask all tiles are equal. With one, 16 heads at a time, so that the longest of them come first.
  const int heads = a.causal ? min(16, a.B * a.H) : 1;
  // Each query head has a dK and a dV of its own. Where heads share K and V they are in the workspace (Hshared = H, else 0), in 16 bits: a row is
  // d elements of dK, then d of dV.
  fa_backward_args own = a;
  if (a.H > a.Hkv) {
    own.dK = a.workspace[2], own.dV = static_cast<T *>(own.dK) + d;
    own.dK_stride[2] = own.dV_stride[2] = 2 * d;
    own.dK_stride[1] = own.dV_stride[1] = a.Nk * own.dK_stride[2];
    own.dK_stride[0] = own.dV_stride[0] = a.H * own.dK_stride[1];
  }
  if (cudaError_t error = fa::allow_smem(backward_mma<d, T>, C::smem_bytes)) return error;
  prepare<d, T><<<unsigned(rows * d / 1024), 128, 0, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  backward_mma<d, T><<<unsigned(ctas), C::threads, C::smem_bytes, stream>>>(own, heads);
  if (cudaError_t error = cudaGetLastError()) return error;
  finish<d, T><<<unsigned(rows / C::Br), C::threads, 0, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  if (a.H > a.Hkv) add_heads<d, T><<<unsigned(a.B * a.Hkv * a.Nk), d, 0, stream>>>(a);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_backward_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_backward_args &a = fa::backward(args);
  const bool aligned = fa::half_rows_aligned16(a.O, a.O_stride) && fa::half_rows_aligned16(a.Q, a.Q_stride) &&
                       fa::half_rows_aligned16(a.K, a.K_stride) && fa::half_rows_aligned16(a.V, a.V_stride) &&
                       fa::half_rows_aligned16(a.dO, a.dO_stride) && fa::half_rows_aligned16(a.dQ, a.dQ_stride) &&
                       fa::half_rows_aligned16(a.dK, a.dK_stride) && fa::half_rows_aligned16(a.dV, a.dV_stride);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.window < 0 || (a.window && !a.causal) || a.lengths || a.pages ||
      a.q_starts || a.deterministic || !aligned)
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
