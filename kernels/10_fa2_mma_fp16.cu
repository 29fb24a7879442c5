// 10_fa2_mma_fp16: FlashAttention-2 on tensor cores with ldmatrix and mma.sync
//
// idea:      A warp multiplies 16 x 16 by 16 x 8 in one instruction, and the layout in which it leaves S is the one in
//            which it takes P.
// changed:   fp16 or bf16 in, fp32 sums; FMAs on register tiles become mma.sync, operands come by ldmatrix;
//            a warp owns 16 query rows, Q_i's fragments stay in registers, P never leaves them;
//            K and V come in whole tiles, row-major as they lie in HBM, one pair at a time
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp16 or bf16; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         32, 64, 128
// tiles:     D=32:  Br=64 Bc=64 threads=128 smem=12 KB CTAs/SM=4
//            D=64:  Br=64 Bc=64 threads=128 smem=24 KB CTAs/SM=3
//            D=128: Br=64 Bc=64 threads=128 smem=48 KB CTAs/SM=3
//            D=64,  64 KB per block (Turing): CTAs/SM=2
//            D=128, 64 KB per block: CTAs/SM=1
// arch:      sm_75
// paper:     FlashAttention-2, Algorithm 1 and section 3.3 (arXiv 2307.08691)
// speed:     H200, N >= 1024: 49 to 55 TFLOP/s in fp16 and bf16 alike, 0.18 x SDPA FLASH at D=64 and 0.15 x at D=128.
//            Every ldmatrix meets bank conflicts, eight rows in the same banks (D=32: four); the tensor cores wait.
#include <fa/arch.cuh>
#include <fa/args.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/sm80.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int Br = 16 * warps; // query rows per CTA, 16 per warp: the rows of one mma.sync
  static constexpr int Bc = 64;         // keys per tile
  // CTAs per SM at once: leaves each thread 128 or 168 registers. Turing's shared memory has place for fewer
  static constexpr int ctas = d == 32 ? 4 : FA_SMEM_KB == 64 ? 128 / d : 3;
  static constexpr int smem_bytes = 2 * (Br + 2 * Bc) * d; // Q_smem, K_smem, V_smem
};

// Where chunk `chunk` of row `row` of a (rows, d) tile lies, in elements. A chunk is 8 elements, 16 bytes: what a thread
// copies at a time, and a row of the 8 x 8 matrices that ldmatrix loads.
template <int d> __device__ constexpr int at(int row, int chunk) { return row * d + chunk * 8; }
// [end: tile]

// [region: load_tile]
// X_smem (rows, d) = rows of X, 16 bytes per thread at a time, neighbours along a row. Rows from rows_left on are zero.
template <int rows, int d, typename T>
__device__ __forceinline__ void load_tile(T *X_smem, const T *X, int64_t stride, int rows_left) {
  constexpr int step = Tile<d>::threads / (d / 8); // rows that all threads together copy at a time
  static_assert(rows % step == 0, "a tile is a whole number of passes");
  const int row = threadIdx.x / (d / 8), chunk = threadIdx.x % (d / 8);
  X += row * stride + chunk * 8;
#pragma unroll
  for (int r = 0; r < rows; r += step) {
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row + r < rows_left) x = *reinterpret_cast<const uint4 *>(X + r * stride);
    *reinterpret_cast<uint4 *>(X_smem + at<d>(row + r, chunk)) = x;
  }
}
// [end: load_tile]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void fa2_mma(const fa_args a) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br;

  // This CTA's query tile: rows i0 .. i0 + Br of head (b, h). Neighbouring CTAs share a head, and so K and V in the L2.
  const int tiles = int(fa::ceil_div(a.Nq, Br));
  const int head = blockIdx.x / tiles, i0 = blockIdx.x % tiles * Br;
  const int b = head / a.H, h = head % a.H;
  const T *Q = static_cast<const T *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1]; // (Nq, d)
  const T *K = static_cast<const T *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1]; // (Nk, d)
  const T *V = static_cast<const T *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1]; // (Nk, d)

  extern __shared__ __align__(1024) unsigned char smem[];
  T *Q_smem = reinterpret_cast<T *>(smem); // (Br, d)
  T *K_smem = Q_smem + Br * d;             // (Bc, d)
  T *V_smem = K_smem + Bc * d;             // (Bc, d)

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of a 16 x 8 accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1

  // [region: fragments]
  // ldmatrix.x4 loads four 8 x 8 matrices; lanes 8m .. 8m + 7 give the addresses of matrix m's rows. For the operand A
  // (Q), and for V with .trans, matrices 0 and 1 lie one below the other and 2 and 3 right of them; for K the other way.
  const int row_A = lane % 16, chunk_A = lane / 16;
  const int row_B = lane % 8 + lane / 16 * 8, chunk_B = lane / 8 % 2;

  // Q_i's A fragments of this warp, d / 16 of (16, 16), for the whole loop
  load_tile<Br, d>(Q_smem, Q + i0 * a.Q_stride[2], a.Q_stride[2], a.Nq - i0);
  __syncthreads(); // Q_smem is written before any warp reads it
  uint32_t Q_reg[d / 16][4];
#pragma unroll
  for (int k = 0; k < d / 16; ++k) fa::ldmatrix_x4(Q_reg[k], Q_smem + at<d>(16 * warp + row_A, 2 * k + chunk_A));
  // [end: fragments]

  const float scale_log2 = a.scale * fa::log2_e; // S in units of log2, so that P = exp2(S - m)
  float O_reg[d / 8][4] = {};                    // (16, d) of this warp, not yet divided by l
  float m_reg[2] = {-FA_INFINITY, -FA_INFINITY}; // of rows g and g + 8
  float l_reg[2] = {0.f, 0.f};                   // of this lane's columns, until the end

  // [region: tile_loop]
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) {
    load_tile<Bc, d>(K_smem, K + j0 * a.K_stride[2], a.K_stride[2], a.Nk - j0);
    load_tile<Bc, d>(V_smem, V + j0 * a.V_stride[2], a.V_stride[2], a.Nk - j0);
    __syncthreads(); // K_smem and V_smem are written before any warp reads them

    // [region: scores]
    // S (16, Bc) = Q_i K_j^T by each warp: Bc / 8 accumulators side by side, d / 16 steps. K_j (Bc, d) row-major is
    // K_j^T (d, Bc) column-major, which is how mma.sync takes its operand B.
    float S_reg[Bc / 8][4] = {};
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
#pragma unroll
      for (int n = 0; n < Bc / 16; ++n) {
        uint32_t K_reg[4]; // two B fragments: 16 columns of d by keys 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4(K_reg, K_smem + at<d>(16 * n + row_B, 2 * k + chunk_B));
        fa::mma_m16n8k16<T>(S_reg[2 * n], Q_reg[k], K_reg[0], K_reg[1]);
        fa::mma_m16n8k16<T>(S_reg[2 * n + 1], Q_reg[k], K_reg[2], K_reg[3]);
      }
    }
#pragma unroll
    for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) S_reg[n][e] *= scale_log2;
    }
    if (j0 + Bc > a.Nk) { // columns past the last key
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (j0 + 8 * n + 2 * t + e % 2 >= a.Nk) S_reg[n][e] = -FA_INFINITY;
        }
      }
    }
    // [end: scores]

    // [region: online_update]
    // m_new = max(m, rowmax S); P = exp2(S - m_new); l = l * alpha + rowsum P; O = O * alpha, with alpha = exp2(m - m_new)
#pragma unroll
    for (int r = 0; r < 2; ++r) { // row g, elements 0 and 1 of the fragments; row g + 8, elements 2 and 3
      float m_new = m_reg[r];
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) m_new = fmaxf(m_new, fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));

      const float m_finite = m_new == -FA_INFINITY ? 0.f : m_new; // all -inf so far: exp2(-inf - 0) = 0, not NaN
      const float alpha = fa::ex2_approx_ftz(m_reg[r] - m_finite);
      float row_sum = 0.f;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
          S_reg[n][e] = fa::ex2_approx_ftz(S_reg[n][e] - m_finite); // P
          row_sum += S_reg[n][e];
        }
      }
      m_reg[r] = m_new;
      l_reg[r] = l_reg[r] * alpha + row_sum;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;
    }
    // [end: online_update]

    // [region: output]
    // O (16, d) += P V_j by each warp: d / 8 accumulators, Bc / 16 steps. Two accumulators of S side by side, rounded to
    // 16 bits, are one fragment A of P: the same lane holds the same elements.
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
      uint32_t P_reg[4];
#pragma unroll
      for (int e = 0; e < 4; ++e)
        P_reg[e] = fa::pack2<T>(S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < d / 16; ++n) {
        uint32_t V_reg[4]; // two B fragments: keys 16k + {0..15} by columns 16n + {0..7} and 16n + {8..15}
        fa::ldmatrix_x4_trans(V_reg, V_smem + at<d>(16 * k + row_A, 2 * n + chunk_A));
        fa::mma_m16n8k16<T>(O_reg[2 * n], P_reg, V_reg[0], V_reg[1]);
        fa::mma_m16n8k16<T>(O_reg[2 * n + 1], P_reg, V_reg[2], V_reg[3]);
      }
    }
    // [end: output]
    __syncthreads(); // all warps have read K_smem and V_smem before the next tile overwrites them
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O (Nq, d) = O / l and LSE = ln(l * 2^m), once. A row without any finite score has l = 0: O = 0, LSE = -inf.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float l = l_reg[r];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

    const int i = i0 + 16 * warp + g + 8 * r;
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
  if constexpr (fa::has_mma<T>) {
    const int64_t ctas = fa::ceil_div(a.Nq, Tile<d>::Br) * a.B * a.H;
    if (ctas > fa::max_grid_x) return cudaErrorInvalidValue;
    if (cudaError_t error = fa::allow_smem(fa2_mma<d, T>, Tile<d>::smem_bytes)) return error;
    fa2_mma<d, T><<<unsigned(ctas), Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a);
    return cudaGetLastError();
  }
  return cudaErrorInvalidValue; // bf16 on Turing
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
