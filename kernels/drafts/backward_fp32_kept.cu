// 22_backward_fp32: the gradients of Q, K and V, in one pass of five products, and always the same
//
// idea:      P is not kept for the way back but formed again, tile by tile, from Q, K and LSE. A CTA owns a tile of keys and
//            keeps its dK and dV in registers while Q and dO stream past; its share of dQ goes to HBM when it is its turn.
// changed:   three outputs instead of one, five products instead of two, all with 04's register tiles; the slabs arrive by
//            cp.async, row-major: nothing is transposed on the way
// op:        attention_backward
// features:  causal, window, gqa
// inputs:    Q O dO (B,H,Nq,D), K V (B,Hkv,Nk,D), LSE (B,H,Nq) fp32; rows and strides multiples of 16 bytes
// outputs:   dQ (B,H,Nq,D), dK dV (B,Hkv,Nk,D) fp32
// dtypes:    fp32
// D:         32, 64, 128
// workspace: delta (B,H,Nq) fp32; turn (2,B,H,Nq) integers; ticket (1) integer
// tiles:     D=32:  Br=64  Bc=128 threads=128 smem=95 KB CTAs/SM=2
//            D=64:  Br=64  Bc=128 threads=128 smem=95 KB CTAs/SM=2
//            D=128: Br=128 Bc=128 threads=256 smem=221 KB CTAs/SM=1
// arch:      sm_80
// paper:     FlashAttention, Algorithm 4 (arXiv 2205.14135); FlashAttention-2, Algorithm 2 (arXiv 2307.08691)
// speed:     H200: not measured yet
//
// With P = exp(scale Q K^T - LSE) and delta = rowsum(dO o O), all of it by rows of queries i and keys j:
//   dV = P^T dO     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K     dK = scale dS^T Q
//
// Two loop orders. With queries outside and keys inside, dQ stays in registers, and dK and dV of every key tile have to be
// added up in HBM once per query tile: two tensors. With keys outside and queries inside (here, and in both papers), dK and
// dV stay, and only dQ is added up: one tensor. FlashAttention-1 runs the outer loop in one CTA per head, FlashAttention-2
// gives each turn of it a CTA of its own, so that several CTAs add to the same rows of dQ: by atomics, in whatever order
// they come, so that the last digits differ from run to run. Here they add in turn, by key tile, and the result is the same
// bit by bit. Two kernels, one per loop order, would need no turns, but S and dP twice: seven products instead of five.
#ifndef V_STAYS
#define V_STAYS 0
#endif
#ifndef AGAIN
#define AGAIN 1
#endif
#ifndef RED
#define RED 1
#endif
#ifndef FAST
#define FAST 1
#endif
#ifndef COLS_UNROLL
#define COLS_UNROLL 8
#endif
constexpr int cols_unroll = COLS_UNROLL;
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm80.cuh>

// [region: tile]
// A thread has 64 elements each of the tiles S, dP (Br, Bc), dK, dV (Bc, d), and dQ (Br, d).
template <int d> struct Tile {
  static constexpr int threads = d == 128 ? 256 : 128, ctas = d == 128 ? 1 : 2;
  static constexpr int Br = d == 128 ? 128 : 64;       // queries per step of the loop
  static constexpr int Bc = 128;                       // keys per CTA
  static constexpr int Ks = 16, Kp = V_STAYS ? 16 : 8; // columns of a slab of Q, of dO (and V): depth of S, of dP
  static constexpr int rows = 8 * threads / d;         // rows of a slab of dO, of Q: depth of dV and dK
  static constexpr int TX_s = Bc / 8, TX_kv = d / 8 < 8 ? 8 : d / 8,
                       TX_q = d / 8 < 8 ? 8 : d / 8; // threads along the columns of S, dK, dQ
  // Row lengths in shared memory. Slabs are read 16 bytes at a time: 8 rows begin in 8 different places. P is written an
  // element at a time, 4 rows by 8 columns per warp: rows begin 8 banks apart.
  static constexpr int ld_s = Br + 4, ld_k = Bc + 4, ld_p = Bc + 4;
  static constexpr int for_dP = Kp * (ld_s + (V_STAYS ? 0 : ld_k)),
                       for_S = Ks * ld_s > 8 * threads ? Ks * ld_s : 8 * threads;
  static constexpr int stages = 2, slab = for_dP > for_S ? for_dP : for_S;
  static constexpr int smem_bytes =
      int(sizeof(float)) * ((1 + V_STAYS) * d * ld_k + stages * slab + Br * ld_p + 2 * Br);
};

// Thread (ty, tx) of the grid of 128 / TX by TX threads over a product's tile. A warp is 4 x 8 of them, and lanes that differ
// in bit 0 share ty, in bit 1 tx: a 16-byte load of which pairs of lanes ask for the same takes half the time.
template <int TX> __device__ __forceinline__ int2 thread_in() {
  const int warp = threadIdx.x / 32, lane = threadIdx.x;
  const int ly = lane / 2 % 2 + lane / 8 % 2 * 2, lx = lane % 2 + lane / 4 % 2 * 2 + lane / 16 % 2 * 4;
  return make_int2(warp % (TX / 8) * 8 + lx, warp / (TX / 8) * 4 + ly); // tx, ty
}
// [end: tile]

// [region: delta]
// Before everything else: delta (B, H, Nq) = rowsum(dO o O), a warp per row; dQ = 0, nobody has had a turn.
template <int d> __global__ void prepare(const fa_backward_args a) {
  const int64_t row = int64_t(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32, rows = int64_t(a.B) * a.H * a.Nq;
  const int lane = threadIdx.x % 32, i = int(row % a.Nq), h = int(row / a.Nq % a.H), b = int(row / a.Nq / a.H);
  if (row >= rows) return; // the whole warp
  const float *O = static_cast<const float *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2];
  const float *dO = static_cast<const float *>(a.dO) + b * a.dO_stride[0] + h * a.dO_stride[1] + i * a.dO_stride[2];
  float *dQ = static_cast<float *>(a.dQ) + b * a.dQ_stride[0] + h * a.dQ_stride[1] + i * a.dQ_stride[2];
  float delta = 0.f;
#pragma unroll
  for (int c = lane; c < d; c += 32) delta += O[c] * dO[c], dQ[c] = 0.f;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) delta += __shfl_xor_sync(0xffffffff, delta, mask);
  if (lane == 0) static_cast<float *>(a.workspace[0])[row] = delta;
  unsigned *turn = static_cast<unsigned *>(a.workspace[1]), *ticket = static_cast<unsigned *>(a.workspace[2]);
  if (lane < 2) turn[lane * rows + row] = 0;
  if (row == 0 && lane == 0) *ticket = 0;
}
// [end: delta]

// [region: load_slab]
// Sends n rows of X on their way to X_smem (n, cols), 16 bytes per thread at a time, neighbours along a row. Rows from
// rows_left on become zero and are not read.
template <int n, int cols, int threads>
__device__ __forceinline__ void load_rows(float *X_smem, const float *X, int64_t stride, int i, int rows_left) {
  constexpr int step = threads / (cols / 4); // rows that all threads together copy at a time
  const int row = threadIdx.x / (cols / 4), col = threadIdx.x % (cols / 4) * 4;
  const float *from = X + (i + row) * stride + col;
  float *to = X_smem + row * cols + col;
#pragma unroll
  for (int r = 0; r < n; r += step) {
    fa::cp_async_16(to + r * cols, from, r + row < rows_left ? 16 : 0);
    from += step * stride;
  }
}

// Sends columns of X (n, ..) on their way to X_smem (cols, ld), transposed: 4 bytes at a time.
template <int n, int cols, int ld, int threads>
__device__ __forceinline__ void load_columns(float *X_smem, const float *X, int64_t stride, int i, int rows_left) {
  constexpr int step = threads / 8;
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  const float *from = X + (i + row) * stride + col;
  const uint32_t to = fa::smem_address(X_smem + col * ld + row);
#if FAST
  if (rows_left >= n) {
#pragma unroll
    for (int r = 0; r < n; r += step) {
#pragma unroll
      for (int c = 0; c < cols; c += 8)
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to + 4 * (c * ld + r)), "l"(from + c) : "memory");
      from += step * stride;
    }
    return;
  }
#endif
#pragma unroll
  for (int r = 0; r < n; r += step) {
#pragma unroll
    for (int c = 0; c < cols; c += 8)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + 4 * (c * ld + r)), "l"(from + c),
                   "r"(r + row < rows_left ? 4 : 0)
                   : "memory");
    from += step * stride;
  }
}
// [end: load_slab]

// [region: multiply]
// The three forms that a product takes, by what runs along the rows of its operands. Each loads 16 bytes at a time, and for
// an 8 x 8 tile of accumulators as often: 4 loads for 64 FMAs.

// acc (M, N) += A B^T, A (.., K) and B (.., K) row-major: S and dP. This thread's rows of A: one in TY, of B: one in TX.
template <int K, int TY, int TX, int ld_a, int ld_b, int M, int N>
__device__ __forceinline__ void multiply_rows(float (&acc)[M][N], const float *A_smem, const float *B_smem) {
#pragma unroll 1
  for (int k = 0; k < K; k += 4) {
    float a_reg[M][4];
#pragma unroll
    for (int r = 0; r < M; ++r) fa::load4(a_reg[r], A_smem + r * TY * ld_a + k);
    float b_reg[2][4];
#pragma unroll
    for (int c = 0; c < 2 - 1; ++c) fa::load4(b_reg[c], B_smem + c * TX * ld_b + k);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      if (c + 2 - 1 < N) fa::load4(b_reg[(c + 2 - 1) % 2], B_smem + (c + 2 - 1) * TX * ld_b + k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int r = 0; r < M; ++r) acc[r][c] += a_reg[r][e] * b_reg[c % 2][e];
      }
    }
  }
}

// acc (M, N) += A^T B, A (K, ..) and B (K, ..) row-major: dV and dK. Rows and columns of this thread: {0..3}, and {0..3}
// half a tile further.
template <int K, int half_a, int half_b, int ld_a, int ld_b, int M, int N>
__device__ __forceinline__ void multiply_columns(float (&acc)[M][N], const float *A_smem, const float *B_smem) {
#pragma unroll cols_unroll
  for (int k = 0; k < K; ++k) {
    float a_reg[M], b_reg[N];
#pragma unroll
    for (int r = 0; r < M; r += 4) fa::load4(a_reg + r, A_smem + k * ld_a + r / 4 * half_a);
#pragma unroll
    for (int c = 0; c < N; c += 4) fa::load4(b_reg + c, B_smem + k * ld_b + c / 4 * half_b);
#pragma unroll
    for (int c = 0; c < N; ++c) { // down one column and up the next, as in 04
#pragma unroll
      for (int n = 0; n < M; ++n) {
        const int r = c % 2 ? M - 1 - n : n;
        acc[r][c] += a_reg[r] * b_reg[c];
      }
    }
  }
}

// [end: multiply]

template <int d>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void backward_fp32(const fa_backward_args a) {
  using T = Tile<d>;
  constexpr int Br = T::Br, Bc = T::Bc, Ks = T::Ks, ld_s = T::ld_s, ld_k = T::ld_k, ld_p = T::ld_p,
                threads = T::threads;
  constexpr int TX_s = T::TX_s, TX_kv = T::TX_kv, TX_q = T::TX_q;
  constexpr int TY_s = threads / TX_s, TY_kv = threads / TX_kv, TY_q = threads / TX_q;

  extern __shared__ float smem[];
  float *K_smem = smem;                            // (d, Bc)   K_j^T
  float *V_smem = K_smem + d * ld_k;               // (d, Bc)   V_j^T
  float *slab_smem = V_smem + V_STAYS * d * ld_k;  // stages x one slab
  float *P_smem = slab_smem + T::stages * T::slab; // (Br, Bc)   P, then dS
  float *LSE_smem = P_smem + Br * ld_p;            // (Br)       in units of log2
  float *delta_smem = LSE_smem + Br;               // (Br)

  // [region: work]
  // What this CTA does, in shared memory: registers are scarce. Keys `tile` of head (b, hk); and of each query head that
  // reads them the tiles first .. last - 1 of queries that see one of them: query i sees the keys up to i + shift, and of
  // those the last `window`.
  struct Work {
    int b, hk, tile, first, last;
    const float *Q, *dO, *V; // Q and dO of batch b, V_j
  };
  __shared__ Work work_smem;
  const int shift = a.Nk - a.Nq;
  if (threadIdx.x == 0) {
    // CTAs take their work in the order in which they come, so that whoever has to wait for a turn waits for a CTA that is
    // running already.
    const int ticket = int(atomicAdd(static_cast<unsigned *>(a.workspace[2]), 1u));
    const int key_tiles = int(fa::ceil_div(a.Nk, Bc)), tile = ticket % key_tiles, j0 = tile * Bc;
    const int first = a.causal ? max(0, j0 - shift) / Br : 0, all = int(fa::ceil_div(a.Nq, Br));
    const int last = a.window ? min(all, (max(-1, j0 + Bc - 2 - shift + a.window) + Br) / Br) : all;
    work_smem = {ticket / key_tiles / a.Hkv, ticket / key_tiles % a.Hkv, tile, first, last};
    const int b = work_smem.b;
    work_smem.Q = static_cast<const float *>(a.Q) + b * a.Q_stride[0];
    work_smem.dO = static_cast<const float *>(a.dO) + b * a.dO_stride[0];
    work_smem.V =
        static_cast<const float *>(a.V) + b * a.V_stride[0] + work_smem.hk * a.V_stride[1] + j0 * a.V_stride[2];
  }
  __syncthreads(); // work_smem is written before any thread reads it
  const Work &work = work_smem;
  // [end: work]

  // [region: pipeline]
  // K_j and V_j stay. Q_i and dO_i come in slabs, in the order in which the products need them: columns of Q for S, rows of
  // dO for dV, columns of dO for dP, rows of Q for dK. One is on its way while another is multiplied.
  constexpr int col_slabs = d / Ks, dP_slabs = d / T::Kp, row_slabs = Br / T::rows;
  const int group = a.H / a.Hkv;
  // This step: query head and tile of queries, the last one first. Under a causal mask the CTAs of a head have their last
  // tile in common and their first one not: whoever began with that would wait there for all the CTAs before.
  int h = work.hk * group, tile_q = work.last - 1;
  if (work.first >= work.last) h += group; // no step at all
  const auto stage = [&](int n) { return slab_smem + n % T::stages * T::slab; };
  const auto arrived = [] {
    fa::cp_async_wait<0>();
    __syncthreads();
  };
  {
    const int b = work.b, hk = work.hk, j0 = work.tile * Bc;
    const float *K = static_cast<const float *>(a.K) + b * a.K_stride[0] + hk * a.K_stride[1] + j0 * a.K_stride[2];
    const float *V = static_cast<const float *>(a.V) + b * a.V_stride[0] + hk * a.V_stride[1] + j0 * a.V_stride[2];
#pragma unroll 1
    for (int c = 0; c < d; c += 8) {
      load_columns<Bc, 8, ld_k, threads>(K_smem + c * ld_k, K + c, a.K_stride[2], 0, a.Nk - j0);
      if (V_STAYS) load_columns<Bc, 8, ld_k, threads>(V_smem + c * ld_k, V + c, a.V_stride[2], 0, a.Nk - j0);
    }
  }
  // [end: pipeline]

  const int2 at_s = thread_in<TX_s>(), at_kv = thread_in<TX_kv>(), at_q = thread_in<TX_q>();
  const float scale_log2 = a.scale * fa::log2_e;
  float dK_reg[8][d / TX_kv] = {}, dV_reg[8][d / TX_kv] = {}; // (Bc, d), dK without scale

  // [region: tile_loop]
#pragma unroll 1
  while (h < (work.hk + 1) * group) {
    const int i0 = tile_q * Br;
#if AGAIN
#define Q_i (work.Q + h * a.Q_stride[1])
#define dO_i (work.dO + h * a.dO_stride[1])
#else
    const float *Q_i =
        static_cast<const float *>(a.Q) + work.b * a.Q_stride[0] + h * a.Q_stride[1] + i0 * a.Q_stride[2];
    const float *dO_i =
        static_cast<const float *>(a.dO) + work.b * a.dO_stride[0] + h * a.dO_stride[1] + i0 * a.dO_stride[2];
#endif
    const auto Q_columns = [&](int n) {
      load_columns<Br, Ks, ld_s, threads>(stage(n), Q_i + n * Ks, a.Q_stride[2], i0, a.Nq - i0);
      fa::cp_async_commit();
    };
    const auto dO_rows = [&](int n) {
      load_rows<T::rows, d, threads>(stage(n), dO_i, a.dO_stride[2], i0 + n * T::rows, a.Nq - i0 - n * T::rows);
      fa::cp_async_commit();
    };
    const auto dO_columns = [&](int n) {
      load_columns<Br, T::Kp, ld_s, threads>(stage(n), dO_i + n * T::Kp, a.dO_stride[2], i0, a.Nq - i0);
      if (!V_STAYS) {
        const float *V = work.V;
        load_columns<Bc, T::Kp, ld_k, threads>(stage(n) + T::Kp * ld_s, V + n * T::Kp, a.V_stride[2], 0,
                                               a.Nk - work.tile * Bc);
      }
      fa::cp_async_commit();
    };
    const auto Q_rows = [&](int n) {
      load_rows<T::rows, d, threads>(stage(n), Q_i, a.Q_stride[2], i0 + n * T::rows, a.Nq - i0 - n * T::rows);
      fa::cp_async_commit();
    };
    Q_columns(0);
    if (threadIdx.x < Br) {
      const int64_t head = int64_t(work.b) * a.H + h;
      // A row past the end, and one that sees no key (LSE = -inf): P = exp2(S - inf) = 0.
      const int i = i0 + threadIdx.x;
      const float LSE = i < a.Nq ? a.LSE[head * a.Nq + i] : -FA_INFINITY;
      LSE_smem[threadIdx.x] = LSE == -FA_INFINITY ? FA_INFINITY : LSE * fa::log2_e;
      delta_smem[threadIdx.x] = i < a.Nq ? static_cast<const float *>(a.workspace[0])[head * a.Nq + i] : 0.f;
    }

    // [region: scores]
    // S (Br, Bc) = Q_i K_j^T, and P = exp2(S - LSE) to shared memory
    {
      float S_reg[8][8] = {};
#pragma unroll 1
      for (int n = 0; n < col_slabs; ++n) {
        const int col = n * Ks;
        arrived();
        if (n + 1 < col_slabs)
          Q_columns(n + 1);
        else
          dO_rows(0);
        const float *slab = stage(n);

        multiply_columns<Ks, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(S_reg, slab + 4 * at_s.y,
                                                             K_smem + col * ld_k + 4 * at_s.x);
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const float LSE = LSE_smem[4 * at_s.y + r % 4 + r / 4 * 4 * TY_s];
#pragma unroll
        for (int c = 0; c < 8; ++c) S_reg[r][c] = S_reg[r][c] * scale_log2 - LSE;
      }
      const int j0 = work.tile * Bc;
      if (j0 + Bc > a.Nk || (a.causal && j0 + Bc - 1 > i0 + shift) ||
          (a.window && j0 <= i0 + Br - 1 + shift - a.window)) { // something here is out of sight
        const int end = a.Nk - j0 - 4 * at_s.x,
                  diagonal = i0 + 4 * at_s.y + shift - j0 - 4 * at_s.x; // columns, from this thread's first
#pragma unroll
        for (int r = 0; r < 8; ++r) {
          const int seen = diagonal + r % 4 + r / 4 * 4 * TY_s;
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const int col = c % 4 + c / 4 * 4 * TX_s;
            if (col >= end || (a.causal && col > seen) || (a.window && col <= seen - a.window))
              S_reg[r][c] = -FA_INFINITY;
          }
        }
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
#pragma unroll
        for (int c = 0; c < 8; ++c) S_reg[r][c] = exp2f(S_reg[r][c]);
#pragma unroll
        for (int c = 0; c < 8; c += 4)
          fa::store4(P_smem + (4 * at_s.y + r % 4 + r / 4 * 4 * TY_s) * ld_p + 4 * at_s.x + c * TX_s, S_reg[r] + c);
      }
    }
    // [end: scores]

    // [region: dV]
    // dV (Bc, d) += P^T dO_i
#pragma unroll 1
    for (int n = 0; n < row_slabs; ++n) {
      const int row = n * T::rows;
      arrived();
      if (n + 1 < row_slabs)
        dO_rows(n + 1);
      else
        dO_columns(0);
      const float *slab = stage(n);

      multiply_columns<T::rows, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dV_reg, P_smem + row * ld_p + 4 * at_kv.y,
                                                               slab + 4 * at_kv.x);
    }
    // [end: dV]

    // [region: dS]
    // dP (Br, Bc) = dO_i V_j^T, and dS = P o (dP - delta) in the place of P
    {
      float dP_reg[8][8] = {};
#pragma unroll 1
      for (int n = 0; n < dP_slabs; ++n) {
        const int col = n * T::Kp;
        arrived();
        if (n + 1 < dP_slabs)
          dO_columns(n + 1);
        else
          Q_rows(0);
        const float *slab = stage(n);

        multiply_columns<T::Kp, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(
            dP_reg, slab + 4 * at_s.y, (V_STAYS ? V_smem + col * ld_k : slab + T::Kp * ld_s) + 4 * at_s.x);
      }
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        const int row = 4 * at_s.y + r % 4 + r / 4 * 4 * TY_s;
        const float delta = delta_smem[row];
#pragma unroll
        for (int c = 0; c < 8; c += 4) {
          float *p = P_smem + row * ld_p + 4 * at_s.x +
                     c * TX_s; // written by this thread, read by others before the last slab
          float P_reg[4];
          fa::load4(P_reg, p);
#pragma unroll
          for (int e = 0; e < 4; ++e) P_reg[e] *= dP_reg[r][c + e] - delta;
          fa::store4(p, P_reg);
        }
      }
    }
    // [end: dS]

    // [region: dK]
    // dK (Bc, d) += dS^T Q_i
#pragma unroll 1
    for (int n = 0; n < row_slabs; ++n) {
      const int row = n * T::rows;
      arrived();
      if (n + 1 < row_slabs)
        Q_rows(n + 1);
      else {
      };
      const float *slab = stage(n);

      multiply_columns<T::rows, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dK_reg, P_smem + row * ld_p + 4 * at_kv.y,
                                                               slab + 4 * at_kv.x);
    }
    // [end: dK]

    // [region: dQ]
    // dQ_i (Br, d) += scale dS K_j, when the key tiles before this one have done so
    const int first_tile = a.window ? max(0, i0 + shift - a.window + 1) / Bc : 0; // the first one that comes here
#pragma unroll 1
    for (int pass = 0; pass < 1; ++pass) {
      float dQ_reg[Br / TY_q][d / TX_q] = {};
      multiply_rows<Bc, TY_q, TX_q, ld_p, ld_k>(dQ_reg, P_smem + at_q.y * ld_p, K_smem + (pass * d + at_q.x) * ld_k);
      unsigned *turn = static_cast<unsigned *>(a.workspace[1]);
      turn += ((int64_t(pass) * a.B + work.b) * a.H + h) * a.Nq + i0;
      if (threadIdx.x == 0) {
        while (atomicAdd(turn, 0u) != unsigned(work.tile - first_tile)) {
        }
        __threadfence();
      }
      __syncthreads(); // it is this CTA's turn before any thread reads dQ
      const int rows_left = a.Nq - i0 - at_q.y;
      float *dQ_row = static_cast<float *>(a.dQ) + work.b * a.dQ_stride[0] + h * a.dQ_stride[1] +
                      (i0 + at_q.y) * a.dQ_stride[2] + pass * d + at_q.x;
#pragma unroll
      for (int r = 0; r < Br / TY_q; ++r) {
        if (r * TY_q < rows_left) { // from the L2: other SMs have written it
          float *p = dQ_row + r * TY_q * a.dQ_stride[2];
#if RED
#pragma unroll
          for (int c = 0; c < d / TX_q; ++c) atomicAdd(p + c * TX_q, a.scale * dQ_reg[r][c]);
#else
          float x[d / TX_q];
#pragma unroll
          for (int c = 0; c < d / TX_q; ++c) x[c] = __ldcg(p + c * TX_q);
#pragma unroll
          for (int c = 0; c < d / TX_q; ++c) __stcg(p + c * TX_q, x[c] + a.scale * dQ_reg[r][c]);
#endif
        }
      }
      __syncthreads(); // all threads have written before the turn passes on
      if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(turn, 1u);
      }
    }
    // [end: dQ]
    if (--tile_q < work.first) tile_q = work.last - 1, ++h;
  }
  // [end: tile_loop]

  // [region: epilogue]
#pragma unroll
  for (int r = 0; r < 8; ++r) {
    const int b = work.b, hk = work.hk, j = work.tile * Bc + 4 * at_kv.y + r % 4 + r / 4 * 4 * TY_kv;
    float *dK = static_cast<float *>(a.dK) + b * a.dK_stride[0] + hk * a.dK_stride[1] + j * a.dK_stride[2];
    float *dV = static_cast<float *>(a.dV) + b * a.dV_stride[0] + hk * a.dV_stride[1] + j * a.dV_stride[2];
#pragma unroll
    for (int c = 0; c < d / TX_kv; c += 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dK_reg[r][c + e] *= a.scale;
      if (j < a.Nk) {
        fa::store4(dK + 4 * at_kv.x + c * TX_kv, dK_reg[r] + c);
        fa::store4(dV + 4 * at_kv.x + c * TX_kv, dV_reg[r] + c);
      }
    }
  }
  // [end: epilogue]
}

// [region: launcher]
template <int d> cudaError_t launch(const fa_backward_args &a, cudaStream_t stream) {
  using T = Tile<d>;
  const int64_t ctas = fa::ceil_div(a.Nk, T::Bc) * a.B * a.Hkv, rows = fa::ceil_div(int64_t(a.B) * a.H * a.Nq, 4);
  if (ctas > fa::max_grid_x || rows > fa::max_grid_x) return cudaErrorInvalidValue;
  if (cudaError_t error = fa::allow_smem(backward_fp32<d>, T::smem_bytes)) return error;
  prepare<d><<<unsigned(rows), 128, 0, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  backward_fp32<d><<<unsigned(ctas), T::threads, T::smem_bytes, stream>>>(a);
  return cudaGetLastError();
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_backward_args &a = fa::backward(args);
  const bool aligned = fa::rows_aligned16(a.Q, a.Q_stride) && fa::rows_aligned16(a.K, a.K_stride) &&
                       fa::rows_aligned16(a.V, a.V_stride) && fa::rows_aligned16(a.dO, a.dO_stride) &&
                       fa::rows_aligned16(a.dQ, a.dQ_stride) && fa::rows_aligned16(a.dK, a.dK_stride) &&
                       fa::rows_aligned16(a.dV, a.dV_stride);
  if (!fa::is_fp32(a) || a.Hkv < 1 || a.H % a.Hkv || !aligned) return cudaErrorInvalidValue;
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
