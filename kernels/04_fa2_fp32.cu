// 04_fa2_fp32: FlashAttention-2: one CTA per query tile, O stays in registers
//
// idea:      A CTA keeps one query tile and its O, m, l in registers while K and V stream past; O is divided by l once.
// changed:   the loop over query tiles becomes the grid, so O, m and l never travel to HBM and back;
//            the division by l moves behind the loop; exp becomes exp2, with log2(e) folded into Q;
//            both products use 8 x 8 register tiles fed by k-major shared memory, as a fast SGEMM does;
//            K and V arrive in slabs, the next one on its way while this one is multiplied
// op:        attention
// inputs:    Q (B,H,Nq,D), K V (B,H,Nk,D) fp32; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) fp32, LSE (B,H,Nq) fp32
// dtypes:    fp32
// D:         32, 64, 128
// tiles:     D=32:  Br=256 Bc=32  slabs of 16, threads=128 smem=58 KB CTAs/SM=2
//            D=64:  Br=128 Bc=64  slabs of 32, threads=128 smem=84 KB CTAs/SM=2
//            D=128: Br=64  Bc=128 slabs of 16, threads=128 smem=84 KB CTAs/SM=2
//            D=64,  64 KB per block: slabs of 8, smem=58 KB CTAs/SM=1 (Turing)
//            D=128, 64 KB per block: slabs of 4, smem=60 KB CTAs/SM=1
// arch:      sm_75
// paper:     FlashAttention-2, Algorithm 1 (arXiv 2307.08691)
// speed:     H200, N >= 1024: 42 to 43 TFLOP/s at D=64, 45 to 47 at D=128, 63 to 70 % of the FMA peak. 1.20 x SDPA
//            EFFICIENT at D=64 and 1.02 x at D=128, 2.3 x and 1.7 x SDPA MATH (TF32 off). Where CTAs are
//            few it can fall behind: 0.94 x EFFICIENT at B=8 H=8 N=256 D=64.
#include <fa/arch.cuh>
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>

// [region: tile]
// A warp's 32 threads form a TY x TX grid, each with 8 x 8 elements of S (and of O: Bc = d makes both tiles one shape).
// A warp owns its rows of S over all columns, so the softmax needs no other warp.
template <int d> struct Tile {
  static constexpr int warps = 4, threads = 32 * warps;
  static constexpr int Bc = d;                   // keys per tile
  static constexpr int TX = d / 8, TY = 32 / TX; // threads of a warp along columns and rows
  static constexpr int warp_rows = 8 * TY;       // query rows per warp
  static constexpr int Br = warps * warp_rows;   // query rows per CTA
  // Depth of a slab: K_j and V_j come in pieces along the product's inner dimension, d for S = Q K^T and Bc for P V
  static constexpr int Ks = d > 32 && FA_SMEM_KB < 84 ? 512 / d : d == 64 ? 32 : 16;
  static constexpr int slabs = d / Ks;
  static constexpr int stage = d * Ks / 4 / threads; // float4s of a slab that one thread fetches, from as many rows
  static constexpr int ld_q = Br + 4, ld_k = d + 4; // row lengths in shared memory; + 4 floats spread transposed stores
  static constexpr int smem_bytes = int(sizeof(float)) * (d * ld_q + Bc / 2 * ld_q + 4 * Ks * ld_k);
};
// [end: tile]

// [region: multiply]
// acc (8, 8) += A^T B over one slab. A_smem (Ks, ld_q) and B_smem (Ks, ld_k) point at this thread's rows and columns:
// {0..3} and {0..3} + half a warp tile, so that a warp reads neighbouring 16-byte pieces.
// Per step of k: 4 loads of 16 bytes from shared memory for 64 FMAs.
template <int d>
__device__ __forceinline__ void multiply(float (&acc)[8][8], const float *A_smem, const float *B_smem) {
  using T = Tile<d>;
#pragma unroll 16 // all 32 steps of D = 64 would be 4 % faster, but compiling would take more than two seconds
  for (int k = 0; k < T::Ks; ++k) {
    float a_reg[8], b_reg[8];
    fa::load4(a_reg, A_smem + k * T::ld_q);
    fa::load4(a_reg + 4, A_smem + k * T::ld_q + T::warp_rows / 2);
    fa::load4(b_reg, B_smem + k * T::ld_k);
    fa::load4(b_reg + 4, B_smem + k * T::ld_k + d / 2);
    // Down one column and up the next: two FMAs in a row share an operand. The SM keeps it at hand (its operand cache), so
    // that each FMA reads two registers anew instead of three.
#pragma unroll
    for (int c = 0; c < 8; ++c) {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int r = c % 2 ? 7 - n : n;
        acc[r][c] += a_reg[r] * b_reg[c];
      }
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
  float *Q_smem = smem;                   // (d, Br)         Q_i^T * scale * log2(e)
  float *P_smem = Q_smem + d * ld_q;      // (Bc / 2, Br)    half of P^T; each warp uses its own columns
  float *K_smem = P_smem + Bc / 2 * ld_q; // 2 x (Ks, Bc)    slabs of K_j^T
  float *V_smem = K_smem + 2 * Ks * ld_k; // 2 x (Ks, d)     slabs of V_j

  const int warp = threadIdx.x / 32, ty = threadIdx.x % T::TY, tx = threadIdx.x % 32 / T::TY;
  const int row0 = warp * T::warp_rows + 4 * ty; // this thread's rows:    row0 + {0..3}, + warp_rows / 2
  const int col0 = 4 * tx;                       // this thread's columns: col0 + {0..3}, + d / 2

  // [region: load_tile]
  // A slab on its way from HBM to shared memory rests in registers while the slab before it is multiplied.
  // K slab: Bc keys, Ks columns, so Ks / 4 threads along a row. V slab: Ks keys, d columns, d / 4 threads along a row.
  // Each thread takes `stage` rows from the one given here; keys past Nk are zero.
  const int k_row = threadIdx.x / (Ks / 4) * T::stage, k_col = threadIdx.x % (Ks / 4) * 4;
  const int v_row = threadIdx.x / (d / 4) * T::stage, v_col = threadIdx.x % (d / 4) * 4;
  float stage_reg[T::stage][4];

  const auto fetch = [&](const float *x, int64_t stride, int row, int rows, int rows_left) {
    if (rows_left >= rows) { // nearly always; without a predicate per row
#pragma unroll
      for (int n = 0; n < T::stage; ++n) fa::load4(stage_reg[n], x + n * stride);
    } else {
#pragma unroll
      for (int n = 0; n < T::stage; ++n) {
        if (row + n < rows_left)
          fa::load4(stage_reg[n], x + n * stride);
        else
          stage_reg[n][0] = stage_reg[n][1] = stage_reg[n][2] = stage_reg[n][3] = 0.f;
      }
    }
  };
  const float *K_next = K + k_row * a.K_stride[2] + k_col, *V_next = V + v_row * a.V_stride[2] + v_col;
  int K_left = a.Nk, V_left = a.Nk; // keys from the next slab's first one on
  const auto fetch_K = [&](int s) { // slab s; slab `slabs` is the first one of the next tile
    fetch(K_next, a.K_stride[2], k_row, Bc, K_left);
    const bool is_last = (s + 1) % T::slabs == 0;
    K_next += is_last ? Bc * a.K_stride[2] - (d - Ks) : Ks;
    K_left -= is_last ? Bc : 0;
  };
  const auto fetch_V = [&] {
    fetch(V_next, a.V_stride[2], v_row, Ks, V_left);
    V_next += Ks * a.V_stride[2];
    V_left -= Ks;
  };
  const auto commit_K = [&](int s) { // transposed: a column of the stage is part of a row of K_smem
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float x[T::stage];
#pragma unroll
      for (int n = 0; n < T::stage; ++n) x[n] = stage_reg[n][e];
      fa::store<T::stage>(K_smem + (s % 2 * Ks + k_col + e) * ld_k + k_row, x);
    }
  };
  const auto commit_V = [&](int s) {
#pragma unroll
    for (int n = 0; n < T::stage; ++n) fa::store4(V_smem + (s % 2 * Ks + v_row + n) * ld_k + v_col, stage_reg[n]);
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
  fetch_K(0);
  commit_K(0);
  fetch_V();
  commit_V(0);

  float O_reg[8][8] = {}; // (rows, columns of d), not yet divided by l
  float m_reg[8], l_reg[8];
#pragma unroll
  for (int r = 0; r < 8; ++r) m_reg[r] = -FA_INFINITY, l_reg[r] = 0.f; // l: of this thread's columns, until the end

  __syncthreads(); // Q_smem and the first slabs are written before any warp reads them

  // [region: tile_loop]
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) {
    // [region: scores]
    // S (Br, Bc) = Q_i K_j^T, slab by slab along d
    float S_reg[8][8] = {};
    for (int s = 0; s < T::slabs; ++s) {
      fetch_K(s + 1);
      multiply<d>(S_reg, Q_smem + s * Ks * ld_q + row0, K_smem + s % 2 * Ks * ld_k + col0);
      commit_K(s + 1);
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
#pragma unroll
      for (int mask = T::TY; mask < 32; mask *= 2) // over the TX threads that share the row
        m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));

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
    // O (Br, d) += P V_j. The product needs whole rows of P, each thread holds 8 of its columns: P goes through shared
    // memory, half of the keys at a time.
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (c / 4 == half) {
          float P_reg[8];
#pragma unroll
          for (int r = 0; r < 8; ++r) P_reg[r] = S_reg[r][c];
          fa::store4(P_smem + (col0 + c % 4) * ld_q + row0, P_reg);
          fa::store4(P_smem + (col0 + c % 4) * ld_q + row0 + T::warp_rows / 2, P_reg + 4);
        }
      }
      __syncwarp(); // P is written before other lanes read it; its rows belong to one warp, so no other warp waits
      for (int s = 0; s < T::slabs / 2; ++s) {
        const int slab = half * T::slabs / 2 + s;
        fetch_V();
        multiply<d>(O_reg, P_smem + s * Ks * ld_q + row0, V_smem + slab % 2 * Ks * ld_k + col0);
        commit_V(slab + 1);
        __syncthreads(); // as above; and P is read before the other half overwrites it
      }
    }
    // [end: output]
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O = O / l and LSE = ln(l * 2^m), once. A row without any finite score has l = 0: O = 0, LSE = -inf.
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    float l = l_reg[r];
#pragma unroll
    for (int mask = T::TY; mask < 32; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

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
