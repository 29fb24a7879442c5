// 03_fa1_fp32: FlashAttention-1, S never reaches HBM
//
// idea:      Work on tiles of Q, K and V that fit into shared memory; S and P never leave the SM, only O, m and l are kept.
// changed:   the three kernels of 01 become one: scores, softmax and output on one tile at a time;
//            the (m, l) merge of 02 joins the tiles: every new tile rescales what O, m and l held;
//            workspace O(N) instead of O(N^2)
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp32; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) fp32, LSE (B,H,Nq) fp32
// dtypes:    fp32
// D:         32, 64, 128
// workspace: m (B,H,Nq) fp32; l (B,H,Nq) fp32
// tiles:     D=32:  Br=64 Bc=32 threads=256 smem=27 KB
//            D=64:  Br=64 Bc=32 threads=256 smem=43 KB
//            D=128: Br=32 Bc=32 threads=256 smem=54 KB
// arch:      sm_75
// paper:     FlashAttention, Algorithm 1 (arXiv 2205.14135)
// speed:     H200, N = 1024 / 4096 / 16384: 17.6 / 12.2 / 3.2 TFLOP/s at D=64, 16.5 / 5.8 / 1.5 at D=128. One CTA per
//            head leaves most SMs idle once N is long: from 0.95 of SDPA MATH (many heads) to 0.17 (few) at D=64, from
//            0.60 to 0.05 at D=128.
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int Br = d == 128 ? 32 : 64, Bc = 32; // queries and keys per tile
  static constexpr int threads = 256, TX = d == 128 ? 16 : 8, TY = threads / TX;
  static constexpr int rows = Br / TY, keys = Bc / TX; // each thread's share of S (Br, Bc): rows x keys
  static constexpr int cols = d / TX;                  // each thread's share of O (Br, d):  rows x cols, by fours
  static constexpr int ld = d + 4, ld_p = Bc + 4;      // row lengths in shared memory: + 4 floats put the 8 rows that
                                                       // neighbouring threads read into different banks
  static constexpr int smem_bytes = int(sizeof(float)) * (2 * Bc * ld + Br * ld + Br * ld_p);
};
// [end: tile]

// [region: load_tile]
// X_smem (n, d), row length ld = rows r0 .. r0 + n of X (N, d), zeros past row N.
template <int d> __device__ void load_tile(float *X_smem, const float *X, int64_t stride, int r0, int n, int N) {
  using T = Tile<d>;
  for (int e = threadIdx.x; e < n * d / 4; e += T::threads) {
    const int r = e / (d / 4), c = e % (d / 4) * 4;
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    if (r0 + r < N) fa::load4(x, X + (r0 + r) * stride + c);
    fa::store4(X_smem + r * T::ld + c, x);
  }
}
// [end: load_tile]

// Over the TX threads that share a row: lanes that differ in the low bits.
template <int TX> __device__ float row_max(float x) {
  for (int mask = TX / 2; mask > 0; mask /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, mask));
  return x;
}
template <int TX> __device__ float row_sum(float x) {
  for (int mask = TX / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffff, x, mask);
  return x;
}

template <int d> __global__ __launch_bounds__(Tile<d>::threads, 1) void fa1_fp32(const fa_args a) {
  using T = Tile<d>;
  constexpr int Br = T::Br, Bc = T::Bc;

  // This CTA's head (b, h): one CTA walks over all its tiles.
  const int head = blockIdx.x, b = head / a.H, h = head % a.H;
  const float *Q = static_cast<const float *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1]; // (Nq, d)
  const float *K = static_cast<const float *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1]; // (Nk, d)
  const float *V = static_cast<const float *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1]; // (Nk, d)
  float *O = static_cast<float *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1];             // (Nq, d)
  float *m = static_cast<float *>(a.workspace[0]) + int64_t(head) * a.Nq;                   // (Nq)
  float *l = static_cast<float *>(a.workspace[1]) + int64_t(head) * a.Nq;                   // (Nq)

  extern __shared__ float smem[];
  float *K_smem = smem;                // (Bc, d)
  float *V_smem = K_smem + Bc * T::ld; // (Bc, d)
  float *Q_smem = V_smem + Bc * T::ld; // (Br, d)
  float *P_smem = Q_smem + Br * T::ld; // (Br, Bc)

  const int ty = threadIdx.x / T::TX, tx = threadIdx.x % T::TX;
  const int row0 = ty * T::rows; // this thread's rows: row0 + {0 .. rows}; its keys: tx + {0, TX, ..}
                                 // its columns of O: 4 tx + {0..3}, + 4 TX each

  // [region: initialise]
  // Before the first tile: O = 0, l = 0, m = -inf
  for (int i = threadIdx.x; i < a.Nq; i += T::threads) m[i] = -FA_INFINITY, l[i] = 0.f;
  for (int64_t e = threadIdx.x; e < int64_t(a.Nq) * (d / 4); e += T::threads) {
    const float zero[4] = {0.f, 0.f, 0.f, 0.f};
    fa::store4(O + e / (d / 4) * a.O_stride[2] + e % (d / 4) * 4, zero);
  }
  // [end: initialise]

  // [region: tile_loop]
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) { // outer loop: K_j, V_j
    load_tile<d>(K_smem, K, a.K_stride[2], j0, Bc, a.Nk);
    load_tile<d>(V_smem, V, a.V_stride[2], j0, Bc, a.Nk);

    for (int i0 = 0; i0 < a.Nq; i0 += Br) { // inner loop: Q_i, O_i, m_i, l_i
      load_tile<d>(Q_smem, Q, a.Q_stride[2], i0, Br, a.Nq);
      __syncthreads(); // Q_smem, K_smem, V_smem (and the initial O, m, l) are written before other threads read them

      float m_old[T::rows], l_old[T::rows]; // the rows' state before this tile
#pragma unroll
      for (int r = 0; r < T::rows; ++r) {
        const int i = i0 + row0 + r;
        m_old[r] = i < a.Nq ? m[i] : -FA_INFINITY;
        l_old[r] = i < a.Nq ? l[i] : 0.f;
      }

      // [region: scores]
      // S (Br, Bc) = Q_i K_j^T, not yet scaled
      float S_reg[T::rows][T::keys] = {};
#pragma unroll 4
      for (int k = 0; k < d; k += 4) {
        float q_reg[T::rows][4], k_reg[T::keys][4];
#pragma unroll
        for (int r = 0; r < T::rows; ++r) fa::load4(q_reg[r], Q_smem + (row0 + r) * T::ld + k);
#pragma unroll
        for (int c = 0; c < T::keys; ++c) fa::load4(k_reg[c], K_smem + (tx + c * T::TX) * T::ld + k);
#pragma unroll
        for (int r = 0; r < T::rows; ++r) {
#pragma unroll
          for (int c = 0; c < T::keys; ++c) {
#pragma unroll
            for (int e = 0; e < 4; ++e) S_reg[r][c] += q_reg[r][e] * k_reg[c][e];
          }
        }
      }
      // [end: scores]

      // [region: softmax]
      // This tile alone: m~ = rowmax S, P~ = exp(S - m~), l~ = rowsum P~
      float m_tile[T::rows], l_tile[T::rows];
#pragma unroll
      for (int r = 0; r < T::rows; ++r) {
        m_tile[r] = -FA_INFINITY;
#pragma unroll
        for (int c = 0; c < T::keys; ++c) {
          const bool is_key = j0 + tx + c * T::TX < a.Nk; // columns past the last key count for nothing
          S_reg[r][c] = is_key ? a.scale * S_reg[r][c] : -FA_INFINITY;
          m_tile[r] = fmaxf(m_tile[r], S_reg[r][c]);
        }
        m_tile[r] = row_max<T::TX>(m_tile[r]);
        const float m_finite = m_tile[r] == -FA_INFINITY ? 0.f : m_tile[r]; // all -inf: exp(-inf - 0) = 0, not NaN
        l_tile[r] = 0.f;
#pragma unroll
        for (int c = 0; c < T::keys; ++c) {
          const float p = expf(S_reg[r][c] - m_finite);
          P_smem[(row0 + r) * T::ld_p + tx + c * T::TX] = p;
          l_tile[r] += p;
        }
        l_tile[r] = row_sum<T::TX>(l_tile[r]);
      }
      __syncwarp(); // P_smem is written before other lanes read it, and m, l are read before tx = 0 overwrites them:
                    // a row, its P, m and l belong to lanes of one warp
      // [end: softmax]

      // [region: output]
      // P~ V_j (Br, d)
      float PV_reg[T::rows][T::cols] = {};
#pragma unroll 2
      for (int j = 0; j < Bc; j += 4) {
        float p_reg[T::rows][4];
#pragma unroll
        for (int r = 0; r < T::rows; ++r) fa::load4(p_reg[r], P_smem + (row0 + r) * T::ld_p + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float v_reg[T::cols];
#pragma unroll
          for (int c = 0; c < T::cols; c += 4) fa::load4(v_reg + c, V_smem + (j + e) * T::ld + 4 * tx + c * T::TX);
#pragma unroll
          for (int r = 0; r < T::rows; ++r) {
#pragma unroll
            for (int c = 0; c < T::cols; ++c) PV_reg[r][c] += p_reg[r][e] * v_reg[c];
          }
        }
      }
      // [end: output]

      // [region: merge]
      // Merge the tile (m~, l~, P~ V_j) into (m_i, l_i, O_i) of the tiles before it, and write all three back:
      //   m_new = max(m_i, m~)
      //   l_new = exp(m_i - m_new) l_i + exp(m~ - m_new) l~
      //   O_i   = (exp(m_i - m_new) l_i O_i + exp(m~ - m_new) P~ V_j) / l_new
#pragma unroll
      for (int r = 0; r < T::rows; ++r) {
        const int i = i0 + row0 + r;
        if (i < a.Nq) {
          const float m_new = fmaxf(m_old[r], m_tile[r]);
          const float m_finite = m_new == -FA_INFINITY ? 0.f : m_new;
          const float l_kept = expf(m_old[r] - m_finite) * l_old[r], tile_weight = expf(m_tile[r] - m_finite);
          const float l_new = l_kept + tile_weight * l_tile[r];
          const float l_inv = l_new > 0.f ? 1.f / l_new : 0.f;
#pragma unroll
          for (int c = 0; c < T::cols; c += 4) {
            float *o = O + i * a.O_stride[2] + 4 * tx + c * T::TX;
            float O_reg[4];
            fa::load4(O_reg, o);
#pragma unroll
            for (int e = 0; e < 4; ++e) O_reg[e] = (l_kept * O_reg[e] + tile_weight * PV_reg[r][c + e]) * l_inv;
            fa::store4(o, O_reg);
          }
          if (tx == 0) m[i] = m_new, l[i] = l_new;
          if (tx == 0 && j0 + Bc >= a.Nk) a.LSE[int64_t(head) * a.Nq + i] = m_new + logf(l_new);
        }
      }
      // [end: merge]
      __syncthreads(); // all warps have read Q_smem (and at the end K_smem, V_smem) before the next tile overwrites it;
                       // m_i and l_i are written before the next j reads them
    }
  }
  // [end: tile_loop]
}

// [region: launcher]
template <int d> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  using T = Tile<d>;
  const int64_t heads = int64_t(a.B) * a.H;
  if (heads > fa::max_grid_x) return cudaErrorInvalidValue;
  if (cudaError_t error = fa::allow_smem(fa1_fp32<d>, T::smem_bytes)) return error;
  fa1_fp32<d><<<dim3(heads), T::threads, T::smem_bytes, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  if (!fa::is_fp32(a) || !fa::rows_aligned16(a.Q, a.Q_stride) || !fa::rows_aligned16(a.K, a.K_stride) ||
      !fa::rows_aligned16(a.V, a.V_stride) || !fa::rows_aligned16(a.O, a.O_stride))
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
