// 04_fa2_fp32: FlashAttention-2, query tiles outside and O in registers
//
// idea:      A CTA keeps one query tile and its O, m, l in registers while K and V stream past; O is divided by l once.
// changed:   the loop over query tiles becomes the grid, so O, m and l never travel to HBM and back;
//            the division by l moves behind the loop; exp becomes exp2 with log2(e) folded into Q;
//            both products use 8 x 8 register tiles fed by k-major shared memory, as a fast SGEMM does;
//            K and V arrive in slabs, the next slab on its way while this one is multiplied
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp32; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) fp32, LSE (B,H,Nq) fp32
// dtypes:    fp32
// D:         32, 64, 128
// tiles:     D=32:  Br=256 Bc=32  threads=128 smem=74 KB
//            D=64:  Br=128 Bc=64  threads=128 smem=76 KB
//            D=128: Br=64  Bc=128 threads=128 smem=87 KB
// arch:      sm_80
// paper:     FlashAttention-2, Algorithm 1 (arXiv 2307.08691)
// speed:     not measured yet
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

// [region: tile]
// A warp's 32 threads form a TY x TX grid, each with 8 x 8 elements of S (and of O: Bc = d makes both tiles one shape).
// A warp owns its rows of S over all columns, so the softmax needs no other warp.
template <int d> struct Tile {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int Bc = d;                     // keys per tile
  static constexpr int TX = d / 8, TY = 32 / TX;   // threads of a warp along columns and rows
  static constexpr int warp_rows = 8 * TY;         // query rows per warp
  static constexpr int Br = warps * warp_rows;     // query rows per CTA
  static constexpr int Ks = 16;                    // depth of a slab: how much of the inner dimension is staged at a time
  static constexpr int slabs = d / Ks;             // slabs per K tile (along d) and per V tile (along Bc = d)
  static constexpr int ld_q = Br + 4, ld_k = d + 4; // row lengths in shared memory; + 4 floats spread the transposing stores
  static constexpr int stage = d * Ks / 4 / threads; // float4s of a slab that one thread carries
  static constexpr int smem_bytes = int(sizeof(float)) * (2 * d * ld_q + 2 * Ks * ld_k);
};
// [end: tile]

// [region: multiply]
// acc (8, 8) += A^T B over one slab. A_smem (Ks, ld_q) and B_smem (Ks, ld_k) point at this thread's rows and columns:
// {0..3} and {0..3} + half a warp tile, so that a warp reads neighbouring 16-byte pieces.
// Per step of k: 4 shared-memory loads of 16 bytes for 64 FMAs.
template <int d>
__device__ __forceinline__ void multiply(float (&acc)[8][8], const float *A_smem, const float *B_smem) {
  using T = Tile<d>;
#pragma unroll
  for (int k = 0; k < T::Ks; ++k) {
    float a_reg[8], b_reg[8];
    fa::load4(a_reg, A_smem + k * T::ld_q);
    fa::load4(a_reg + 4, A_smem + k * T::ld_q + T::warp_rows / 2);
    fa::load4(b_reg, B_smem + k * T::ld_k);
    fa::load4(b_reg + 4, B_smem + k * T::ld_k + d / 2);
#pragma unroll
    for (int r = 0; r < 8; ++r) {
#pragma unroll
      for (int c = 0; c < 8; ++c) acc[r][c] += a_reg[r] * b_reg[c];
    }
  }
}
// [end: multiply]

template <int d> __global__ __launch_bounds__(Tile<d>::threads, 2) void fa2_fp32(const fa_args a) {
  using T = Tile<d>;
  constexpr int Bc = T::Bc, Br = T::Br, Ks = T::Ks, ld_q = T::ld_q, ld_k = T::ld_k;

  // This CTA's query tile: rows i0 .. i0 + Br of head (b, h). Neighbouring CTAs share a head, and so K and V in the L2.
  const int tiles = int(fa::ceil_div(a.Nq, Br));
  const int head = blockIdx.x / tiles, i0 = blockIdx.x % tiles * Br;
  const int b = head / a.H, h = head % a.H;
  const float *Q = static_cast<const float *>(a.Q) + b * a.Q_stride[0] + h * a.Q_stride[1]; // (Nq, d)
  const float *K = static_cast<const float *>(a.K) + b * a.K_stride[0] + h * a.K_stride[1]; // (Nk, d)
  const float *V = static_cast<const float *>(a.V) + b * a.V_stride[0] + h * a.V_stride[1]; // (Nk, d)
  float *O = static_cast<float *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1];             // (Nq, d)

  extern __shared__ float smem[];
  float *Q_smem = smem;               // (d, Br)  Q_i^T * scale * log2(e)
  float *P_smem = Q_smem + d * ld_q;  // (Bc, Br) P^T, each warp its own columns
  float *KV_smem = P_smem + d * ld_q; // 2 slabs: K^T (Ks, Bc) or V (Ks, d)

  // Lane -> (ty, tx). Bit 0 goes to ty and bit 1 to tx: lanes that differ in one of them read the same 16 bytes of B or
  // of A, and such pairs cost half the shared-memory time.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int ty = (lane & 1) | (lane >> 2) % (T::TY / 2) << 1;
  const int tx = (lane >> 1 & 1) | lane / (2 * T::TY) << 1;
  const int row0 = warp * T::warp_rows + 4 * ty; // this thread's rows:    row0 + {0..3}, + warp_rows / 2
  const int col0 = 4 * tx;                       // this thread's columns: col0 + {0..3}, + d / 2

  // [region: load_tile]
  // A slab in flight from HBM to shared memory rests in registers while the slab before it is multiplied.
  // Slab s of tile j0: s < slabs: K[j0 .. j0 + Bc, 16 s ..]; else V[j0 + 16 (s - slabs) .., :]. Rows past Nk are zero.
  float4 stage_reg[T::stage];
  const int k_row = threadIdx.x / (Ks / 4), k_col = 4 * (threadIdx.x % (Ks / 4)); // K: 4 threads along a row
  const int v_row = threadIdx.x / (d / 4), v_col = 4 * (threadIdx.x % (d / 4));   // V: d / 4 threads along a row
  const auto fetch = [&](int j0, int s) {
#pragma unroll
    for (int n = 0; n < T::stage; ++n) {
      const bool is_K = s < T::slabs;
      const int j = j0 + (is_K ? k_row + n * (T::threads * 4 / Ks) : (s - T::slabs) * Ks + v_row + n * (T::threads * 4 / d));
      const float *p = is_K ? K + j * a.K_stride[2] + s * Ks + k_col : V + j * a.V_stride[2] + v_col;
      stage_reg[n] = j < a.Nk ? *reinterpret_cast<const float4 *>(p) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
  };
  const auto commit = [&](int s) {
    float *slab = KV_smem + s % 2 * Ks * ld_k;
#pragma unroll
    for (int n = 0; n < T::stage; ++n) {
      const float4 x = stage_reg[n];
      if (s < T::slabs) { // K is transposed on the way: one float to each of 4 rows
        float *p = slab + k_col * ld_k + k_row + n * (T::threads * 4 / Ks);
        p[0] = x.x, p[ld_k] = x.y, p[2 * ld_k] = x.z, p[3 * ld_k] = x.w;
      } else {
        *reinterpret_cast<float4 *>(slab + (v_row + n * (T::threads * 4 / d)) * ld_k + v_col) = x;
      }
    }
  };
  // [end: load_tile]

  // Q_i, transposed like K, scaled once for the whole loop: S comes out in units of log2, so that P = exp2(S - m).
  const float scale_log2 = a.scale * fa::log2_e;
  for (int n = threadIdx.x; n < Br * d / 4; n += T::threads) {
    const int k = n % (Ks / 4) * 4 + n / (Br * Ks / 4) * Ks, i = n / (Ks / 4) % Br;
    float x[4] = {0.f, 0.f, 0.f, 0.f};
    if (i0 + i < a.Nq) fa::load4(x, Q + (i0 + i) * a.Q_stride[2] + k);
#pragma unroll
    for (int e = 0; e < 4; ++e) Q_smem[(k + e) * ld_q + i] = x[e] * scale_log2;
  }
  fetch(0, 0);
  commit(0);

  float O_reg[8][8] = {}; // (rows, columns of d), not yet divided by l
  float m_reg[8], l_reg[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) m_reg[r] = -FA_INFINITY, l_reg[r] = 0.f; // l: this thread's columns only, summed at the end
  __syncthreads(); // Q_smem and the first K slab are written before any warp reads them

  // [region: tile_loop]
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) {
    // [region: scores]
    // S (Br, Bc) = Q_i K_j^T, slab by slab along d
    float S_reg[8][8] = {};
    for (int s = 0; s < T::slabs; ++s) {
      fetch(j0, s + 1); // the next K slab, or the first V slab
      multiply<d>(S_reg, Q_smem + s * Ks * ld_q + row0, KV_smem + s % 2 * Ks * ld_k + col0);
      commit(s + 1);
      __syncthreads(); // slab s + 1 is written before it is read, slab s is read before slab s + 2 overwrites it
    }
    if (j0 + Bc > a.Nk) { // columns past the last key
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (j0 + col0 + c % 4 + c / 4 * (d / 2) >= a.Nk) {
#pragma unroll
          for (int r = 0; r < 8; ++r) S_reg[r][c] = -FA_INFINITY;
        }
      }
    }
    // [end: scores]

    // [region: online_update]
    // m_new = max(m, rowmax S); P = exp2(S - m_new); l = l * alpha + rowsum P; O = O * alpha, with alpha = exp2(m - m_new)
#pragma unroll
    for (int r = 0; r < 8; ++r) {
      float m_new = m_reg[r];
#pragma unroll
      for (int c = 0; c < 8; ++c) m_new = fmaxf(m_new, S_reg[r][c]);
      m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, 2)); // over the warp's TX threads of this row
#pragma unroll
      for (int mask = 2 * T::TY; mask < 32; mask *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));

      const float m_finite = m_new == -FA_INFINITY ? 0.f : m_new; // all -inf so far: exp2(-inf - 0) = 0, not NaN
      const float alpha = exp2f(m_reg[r] - m_finite);
      float row_sum = 0.f;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        S_reg[r][c] = exp2f(S_reg[r][c] - m_finite); // P
        row_sum += S_reg[r][c];
      }
      m_reg[r] = m_new;
      l_reg[r] = l_reg[r] * alpha + row_sum;
#pragma unroll
      for (int c = 0; c < 8; ++c) O_reg[r][c] *= alpha;
    }
    // [end: online_update]

    // [region: output]
    // O (Br, d) += P V_j. P goes through shared memory: the product needs all of a row, each thread holds 8 of its columns.
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      float *p = P_smem + (col0 + c % 4 + c / 4 * (d / 2)) * ld_q + row0;
      const float P_reg[8] = {S_reg[0][c], S_reg[1][c], S_reg[2][c], S_reg[3][c],
                              S_reg[4][c], S_reg[5][c], S_reg[6][c], S_reg[7][c]};
      fa::store4(p, P_reg);
      fa::store4(p + T::warp_rows / 2, P_reg + 4);
    }
    __syncwarp(); // P is written before other lanes read it; rows belong to one warp, so no other warp waits
    for (int s = T::slabs; s < 2 * T::slabs; ++s) {
      if (s + 1 < 2 * T::slabs) fetch(j0, s + 1); // the next V slab,
      else fetch(j0 + Bc, 0);                     // or the first K slab of the next tile (zeros after the last)
      multiply<d>(O_reg, P_smem + (s - T::slabs) * Ks * ld_q + row0, KV_smem + s % 2 * Ks * ld_k + col0);
      commit((s + 1) % (2 * T::slabs));
      __syncthreads(); // as above; and P is read before the next tile's P overwrites it
    }
    // [end: output]
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O = O / l and LSE = ln(l * 2^m), once. A row without any finite score has l = 0: O = 0, LSE = -inf.
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float l = l_reg[r];
    l += __shfl_xor_sync(0xffffffff, l, 2);
#pragma unroll
    for (int mask = 2 * T::TY; mask < 32; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

    const int i = i0 + row0 + r % 4 + r / 4 * (T::warp_rows / 2);
    if (i < a.Nq) {
      const float l_inv = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
      for (int c = 0; c < 8; ++c) O_reg[r][c] *= l_inv;
      fa::store4(O + i * a.O_stride[2] + col0, O_reg[r]);
      fa::store4(O + i * a.O_stride[2] + col0 + d / 2, O_reg[r] + 4);
      if (tx == 0) a.LSE[int64_t(head) * a.Nq + i] = (m_reg[r] + log2f(l)) * fa::ln_2;
    }
  }
  // [end: epilogue]
}

// [region: launcher]
template <int d> cudaError_t launch(const fa_args &a, cudaStream_t stream) {
  using T = Tile<d>;
  const int64_t ctas = fa::ceil_div(a.Nq, T::Br) * a.B * a.H;
  if (ctas > fa::max_grid_x) return cudaErrorInvalidValue;
  if (cudaError_t error = fa::allow_smem(fa2_fp32<d>, T::smem_bytes)) return error;
  fa2_fp32<d><<<unsigned(ctas), T::threads, T::smem_bytes, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  if (!fa::is_fp32(a) || !fa::rows_aligned16(a.Q, a.Q_stride) || !fa::rows_aligned16(a.K, a.K_stride) ||
      !fa::rows_aligned16(a.V, a.V_stride) || !fa::rows_aligned16(a.O, a.O_stride))
    return cudaErrorInvalidValue;
  switch (a.D) {
  case 32: return launch<32>(a, stream);
  case 64: return launch<64>(a, stream);
  case 128: return launch<128>(a, stream);
  default: return cudaErrorInvalidValue;
  }
}
// [end: launcher]
