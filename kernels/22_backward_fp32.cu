// 22_backward_fp32: deterministic backward pass: P recomputed tile by tile from LSE
//
// idea:      The backward pass forms P again, tile by tile, from Q, K and LSE. A CTA owns a tile of keys and
//            keeps its dK and dV in registers while Q and dO stream past; its share of dQ goes to HBM when it is its turn.
// changed:   three outputs instead of one, five products instead of two, all with 04's register tiles; K_j stays in shared
//            memory, and what comes in slabs comes by cp.async, transposed on the way where the product wants it so
// op:        attention_backward
// features:  causal, window, gqa, deterministic
// inputs:    Q O dO (B,H,Nq,D), K V (B,Hkv,Nk,D), LSE (B,H,Nq) fp32; rows and strides multiples of 16 bytes
// outputs:   dQ (B,H,Nq,D), dK dV (B,Hkv,Nk,D) fp32
// dtypes:    fp32
// D:         32, 64, 128
// workspace: delta (B,H,Nq) fp32; turn (B,H,Nq) integers; ticket (1) integer
// tiles:     D=32:  Br=64  Bc=128 threads=128 smem=63 KB  CTAs/SM=2
//            D=64:  Br=64  Bc=128 threads=128 smem=79 KB  CTAs/SM=2
//            D=128: Br=128 Bc=128 threads=256 smem=150 KB CTAs/SM=1
//            D=128, 99 KB per block: Br=64 Bc=64 threads=128 smem=60 KB CTAs/SM=1
// arch:      sm_80
// paper:     FlashAttention, Algorithm 4 (arXiv 2205.14135); FlashAttention-2, Algorithm 2 (arXiv 2307.08691)
// speed:     H200, N >= 1024: 37 to 38 TFLOP/s at D=64, 37 to 40 at D=128, 1.07 x and 0.83 x SDPA MATH without a mask;
//            2.00 x and 1.53 x with a causal one

// With P = exp(scale Q K^T - LSE) and delta = rowsum(dO o O), all of it by rows of queries i and keys j:
//   dV = P^T dO     dP = dO V^T     dS = P o (dP - delta)     dQ = scale dS K     dK = scale dS^T Q
//
// Two loop orders. With queries outside and keys inside, dQ stays in registers, and dK and dV of every key tile have to be
// added up in HBM once per query tile: two tensors. With keys outside and queries inside (here, and in both papers), dK and
// dV stay, and only dQ is added up: one tensor. FlashAttention-1 runs the outer loop in one CTA per head, FlashAttention-2
// gives each turn of it a CTA of its own, so that several CTAs add to the same rows of dQ: by atomics, in whatever order
// they come, so that the last digits differ from run to run. Here they add in turn, by key tile, and the result is the same
// bit by bit. Two kernels, one per loop order, would need no turns, but S and dP twice: seven products instead of five.
#include <fa/arch.cuh>
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm80.cuh>
#include <fa/transposed.cuh>

// [region: tile]
// A thread has 8 x 8 elements of the tiles S, dP (Br, Bc), dK, dV (Bc, d) and dQ (Br, d), or half as many; of dQ at d = 32 a quarter.
template <int d> struct Tile {
  static constexpr int large = d == 128 && FA_SMEM_KB >= 150, small = d == 128 && !large; // rows of the table above
  static constexpr int threads = large ? 256 : 128, ctas = d == 128 ? 1 : 2;              // ctas: per SM
  static constexpr int Br = large ? 128 : 64;                    // queries per step of the loop
  static constexpr int Bc = small ? 64 : 128;                    // keys per CTA
  static constexpr int Ks = 16;                                  // columns of a slab of Q: depth of S
  static constexpr int Kp = 8;                                   // columns of a slab of dO and V: depth of dP
  static constexpr int rows = 8 * threads / d;                   // rows of a slab of dO or Q: depth of dV and dK
  static constexpr int TX_s = Bc / 8, TX_d = d < 64 ? 8 : d / 8; // threads along the columns of S; of dK, dV and dQ
  // Row lengths of what lies in shared memory transposed, 4 banks more than a multiple of 32: of the 8 columns by 4 rows
  // that a warp copies no two elements go to one bank, and 8 rows read 16 bytes at a time begin in 8 different places.
  static constexpr int ld_r = Br + 4, ld_c = Bc + 4;
  static constexpr int slab = Kp * (ld_r + ld_c);
  static constexpr int smem_bytes = int(sizeof(float)) * (d * ld_c + 2 * slab + Br * ld_c + 2 * Br);
  static_assert(Ks * ld_r <= slab && rows * d <= slab && Br <= threads,
                "slabs fit in a stage; a thread per row of a tile");
  static_assert(d / Ks % 2 == 0 && d / Kp % 2 == 0 && Br / rows % 2 == 0, "a product begins with the first stage");
};

// Thread (ty, tx) of the grid of threads / TX by TX over a product's tile. A warp is 4 x 8 of them, and lanes that differ in
// bit 0 share ty, in bit 1 tx: a 16-byte load of which pairs of lanes ask for the same takes half the time.
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
  if (lane == 0) turn[row] = 0;
  if (row == 0 && lane == 0) *ticket = 0;
}
// [end: delta]

// [region: load_slab]
// Both send rows i .. i + n - 1 of X on their way to shared memory. Rows from N on become zero and are not read.

// All of `cols` columns, to X_smem (n, cols): 16 bytes at a time, neighbours along a row.
template <int n, int cols, int threads>
__device__ __forceinline__ void load_rows(float *X_smem, const float *X, int64_t stride, int i, int N) {
  constexpr int step = threads / (cols / 4); // rows that all threads together copy at a time
  static_assert(n % step == 0, "a slab is a whole number of passes");
  const int row = threadIdx.x / (cols / 4), col = threadIdx.x % (cols / 4) * 4;
  const float *from = X + (i + row) * stride + col;
#pragma unroll
  for (int r = 0; r < n; r += step, from += step * stride)
    fa::cp_async_16(X_smem + (row + r) * cols + col, from, i + row + r < N ? 16 : 0);
}

// The first `cols` columns, transposed, to X_smem (cols, ld): 4 bytes at a time. A warp copies 4 rows of 8 columns, and 8
// neighbours in a row are the 32 bytes that memory gives at a time.
template <int n, int cols, int ld, int threads>
__device__ __forceinline__ void load_columns(float *X_smem, const float *X, int64_t stride, int i, int N) {
  constexpr int step = threads / 8;
  static_assert(n % step == 0 && cols % 8 == 0, "a slab is a whole number of passes");
  const int row = threadIdx.x / 8, col = threadIdx.x % 8;
  const float *from = X + (i + row) * stride + col;
#pragma unroll
  for (int r = 0; r < n; r += step, from += step * stride) {
#pragma unroll
    for (int c = 0; c < cols; c += 8)
      fa::cp_async_4(X_smem + (col + c) * ld + row + r, from + c, i + row + r < N ? 4 : 0);
  }
}
// [end: load_slab]

// [region: multiply]
// The two forms that a product takes: its sum runs down the rows of both operands, or along them. Each loads 16 bytes at a
// time, and for an 8 x 8 tile of accumulators as often: 4 loads for 64 FMAs.

// acc (M, N) += A^T B, A (K, ..) and B (K, ..): S and dP with Q_i, dO_i, K_j and V_j transposed; dV and dK with P, dS, dO_i
// and Q_i as they are. Rows and columns of this thread: {0..3}, and {0..3} half a tile of 4 TY, 4 TX further.
template <int K, int TY, int TX, int ld_a, int ld_b, int M, int N>
__device__ __forceinline__ void multiply_columns(float (&acc)[M][N], const float *A_smem, const float *B_smem) {
#pragma unroll 8
  for (int k = 0; k < K; ++k) {
    float a_reg[M], b_reg[N];
#pragma unroll
    for (int r = 0; r < M; r += 4) fa::load4(a_reg + r, A_smem + k * ld_a + r * TY);
#pragma unroll
    for (int c = 0; c < N; c += 4) fa::load4(b_reg + c, B_smem + k * ld_b + c * TX);
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

// acc (M, N) += A B^T, A (.., K) and B (.., K): dQ, with dS as it is and K_j transposed. This thread's rows of A: one in TY,
// of B: one in TX.
template <int K, int TY, int TX, int ld_a, int ld_b, int M, int N>
__device__ __forceinline__ void multiply_rows(float (&acc)[M][N], const float *A_smem, const float *B_smem) {
#pragma unroll 1 // more at once wants more registers than there are
  for (int k = 0; k < K; k += 4) {
    float a_reg[M][4], b_reg[2][4]; // B's next row comes while this one is multiplied
#pragma unroll
    for (int r = 0; r < M; ++r) fa::load4(a_reg[r], A_smem + r * TY * ld_a + k);
    fa::load4(b_reg[0], B_smem + k);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      if (c + 1 < N) fa::load4(b_reg[(c + 1) % 2], B_smem + (c + 1) * TX * ld_b + k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int r = 0; r < M; ++r) acc[r][c] += a_reg[r][e] * b_reg[c % 2][e];
      }
    }
  }
}
// [end: multiply]

template <int d>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void backward_fp32(const fa_backward_args a) {
  using T = Tile<d>;
  constexpr int Br = T::Br, Bc = T::Bc, Ks = T::Ks, Kp = T::Kp, rows = T::rows, threads = T::threads;
  constexpr int TX_s = T::TX_s, TY_s = threads / TX_s, TX_d = T::TX_d, TY_d = threads / TX_d;
  constexpr int ld_r = T::ld_r, ld_c = T::ld_c, M = Br / TY_s; // M rows of S and dP per thread, 8 columns

  extern __shared__ __align__(128) float smem[]; // slabs begin at multiples of 32 bytes, the size of a sector
  float *K_smem = smem;                          // (d, Bc)    K_j transposed
  float *slab_smem = K_smem + d * ld_c;          // (2, slab)
  float *P_smem = slab_smem + 2 * T::slab;       // (Br, Bc)   P, then dS
  float *LSE_smem = P_smem + Br * ld_c;          // (Br)       in units of log2
  float *delta_smem = LSE_smem + Br;             // (Br)

  // [region: work]
  // What this CTA does, in shared memory: registers are scarce. Keys `tile` of head (b, hk); and of each query head that
  // reads them the tiles first .. last - 1 of queries that see one of them: query i sees the keys up to i + shift, and of
  // those the last `window`.
  struct Work {
    int b, hk, tile, first, last;
    const float *Q, *dO, *V; // of batch b; V of head hk
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
    const int b = ticket / key_tiles / a.Hkv, hk = ticket / key_tiles % a.Hkv;
    work_smem = {b, hk, tile, first, last};
    work_smem.Q = static_cast<const float *>(a.Q) + b * a.Q_stride[0];
    work_smem.dO = static_cast<const float *>(a.dO) + b * a.dO_stride[0];
    work_smem.V = static_cast<const float *>(a.V) + b * a.V_stride[0] + hk * a.V_stride[1];
  }
  __syncthreads(); // work_smem is written before any thread reads it
  const Work &work = work_smem;
  // [end: work]

  // [region: pipeline]
  // K_j stays: S and dQ want it in every step, and in the same arrangement. The rest comes in slabs, one on its way while
  // the one before is multiplied.
  const int group = a.H / a.Hkv;
  // This step: query head and tile of queries, the last one first. Under a causal mask the CTAs of a head have their last
  // tile in common and their first one not: whoever began with that would wait there for all the CTAs before.
  int h = work.hk * group, tile_q = work.last - 1;
  if (work.first >= work.last) h += group; // no step at all

  const auto stage = [&](int n) { return slab_smem + n % 2 * T::slab; };
  const auto fetch_S = [&](int n) { // slab n of S: columns of Q_i
    load_columns<Br, Ks, ld_r, threads>(stage(n), work.Q + h * a.Q_stride[1] + n * Ks, a.Q_stride[2], tile_q * Br,
                                        a.Nq);
    fa::cp_async_commit();
  };
  const auto fetch_dV = [&](int n) { // rows of dO_i
    load_rows<rows, d, threads>(stage(n), work.dO + h * a.dO_stride[1], a.dO_stride[2], tile_q * Br + n * rows, a.Nq);
    fa::cp_async_commit();
  };
  const auto fetch_dP = [&](int n) { // columns of dO_i, and the same of V_j
    load_columns<Br, Kp, ld_r, threads>(stage(n), work.dO + h * a.dO_stride[1] + n * Kp, a.dO_stride[2], tile_q * Br,
                                        a.Nq);
    load_columns<Bc, Kp, ld_c, threads>(stage(n) + Kp * ld_r, work.V + n * Kp, a.V_stride[2], work.tile * Bc, a.Nk);
    fa::cp_async_commit();
  };
  const auto fetch_dK = [&](int n) { // rows of Q_i
    load_rows<rows, d, threads>(stage(n), work.Q + h * a.Q_stride[1], a.Q_stride[2], tile_q * Br + n * rows, a.Nq);
    fa::cp_async_commit();
  };
  const auto arrived = [&](int n) {
    fa::cp_async_wait<0>();
    // Slab n has landed before any warp reads it, and the one before it has been read before the next fetch overwrites it;
    // what was written to P_smem, LSE_smem and delta_smem between two slabs likewise.
    __syncthreads(); // as above
    return stage(n);
  };

  const float *K = static_cast<const float *>(a.K) + work.b * a.K_stride[0] + work.hk * a.K_stride[1];
#pragma unroll 1
  for (int c = work.first < work.last ? 0 : d; c < d; c += 8) // lands with the first slab, if there is one
    load_columns<Bc, 8, ld_c, threads>(K_smem + c * ld_c, K + c, a.K_stride[2], work.tile * Bc, a.Nk);
  // [end: pipeline]

  const int2 at_s = thread_in<TX_s>(), at_d = thread_in<TX_d>();
  const float scale_log2 = a.scale * fa::log2_e;
  float dK_reg[8][d / TX_d] = {}, dV_reg[8][d / TX_d] = {}; // (Bc, d), dK without scale

  // [region: tile_loop]
#pragma unroll 1
  while (h < (work.hk + 1) * group) {
    const int i0 = tile_q * Br;
    fetch_S(0);
    if (threadIdx.x < Br) {
      const int64_t head = int64_t(work.b) * a.H + h;
      // A row past the end, and one that sees no key (LSE = -inf): P = exp2(S - inf) = 0 where S is finite.
      const int i = i0 + threadIdx.x;
      const float LSE = i < a.Nq ? a.LSE[head * a.Nq + i] : -FA_INFINITY;
      LSE_smem[threadIdx.x] = LSE == -FA_INFINITY ? FA_INFINITY : LSE * fa::log2_e;
      delta_smem[threadIdx.x] = i < a.Nq ? static_cast<const float *>(a.workspace[0])[head * a.Nq + i] : 0.f;
    }

    // [region: scores]
    // S (Br, Bc) = Q_i K_j^T, and P = exp2(S - LSE) to shared memory
    {
      constexpr int slabs = d / Ks;
      float S_reg[M][8] = {};
#pragma unroll 1
      for (int n = 0; n < slabs; ++n) {
        const float *slab = arrived(n);
        n + 1 < slabs ? fetch_S(n + 1) : fetch_dV(0);
        multiply_columns<Ks, TY_s, TX_s, ld_r, ld_c>(S_reg, slab + 4 * at_s.y, K_smem + n * Ks * ld_c + 4 * at_s.x);
      }
#pragma unroll
      for (int r = 0; r < M; ++r) {
        const float LSE = LSE_smem[4 * at_s.y + r % 4 + r / 4 * 4 * TY_s];
#pragma unroll
        for (int c = 0; c < 8; ++c) S_reg[r][c] = S_reg[r][c] * scale_log2 - LSE;
      }
      const int j0 = work.tile * Bc;
      if (j0 + Bc > a.Nk || (a.causal && j0 + Bc - 1 > i0 + shift) ||
          (a.window && j0 <= i0 + Br - 1 + shift - a.window)) { // something here is out of sight
        // columns, from this thread's first
        const int end = a.Nk - j0 - 4 * at_s.x, diagonal = i0 + 4 * at_s.y + shift - j0 - 4 * at_s.x;
#pragma unroll
        for (int r = 0; r < M; ++r) {
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
      for (int r = 0; r < M; ++r) {
        float *P_row = P_smem + (4 * at_s.y + r % 4 + r / 4 * 4 * TY_s) * ld_c + 4 * at_s.x;
#pragma unroll
        for (int c = 0; c < 8; ++c) S_reg[r][c] = exp2f(S_reg[r][c]);
#pragma unroll
        for (int c = 0; c < 8; c += 4) fa::store4(P_row + c * TX_s, S_reg[r] + c);
      }
    }
    // [end: scores]

    // [region: dV]
    // dV (Bc, d) += P^T dO_i
#pragma unroll 1
    for (int n = 0; n < Br / rows; ++n) {
      const float *slab = arrived(n);
      n + 1 < Br / rows ? fetch_dV(n + 1) : fetch_dP(0);
      multiply_columns<rows, TY_d, TX_d, ld_c, d>(dV_reg, P_smem + n * rows * ld_c + 4 * at_d.y, slab + 4 * at_d.x);
    }
    // [end: dV]

    // [region: dS]
    // dP (Br, Bc) = dO_i V_j^T, and dS = P o (dP - delta) in the place of P
    {
      constexpr int slabs = d / Kp;
      float dP_reg[M][8] = {};
#pragma unroll 1
      for (int n = 0; n < slabs; ++n) {
        const float *slab = arrived(n);
        n + 1 < slabs ? fetch_dP(n + 1) : fetch_dK(0);
        multiply_columns<Kp, TY_s, TX_s, ld_r, ld_c>(dP_reg, slab + 4 * at_s.y, slab + Kp * ld_r + 4 * at_s.x);
      }
#pragma unroll
      for (int r = 0; r < M; ++r) {
        const int row = 4 * at_s.y + r % 4 + r / 4 * 4 * TY_s;
        const float delta = delta_smem[row];
#pragma unroll
        for (int c = 0; c < 8; c += 4) { // written by this thread, read by others before the last slab
          float *p = P_smem + row * ld_c + 4 * at_s.x + c * TX_s, P_reg[4];
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
    for (int n = 0; n < Br / rows; ++n) {
      const float *slab = arrived(n);
      if (n + 1 < Br / rows) fetch_dK(n + 1);
      multiply_columns<rows, TY_d, TX_d, ld_c, d>(dK_reg, P_smem + n * rows * ld_c + 4 * at_d.y, slab + 4 * at_d.x);
    }
    // [end: dK]

    // [region: dQ]
    // dQ_i (Br, d) += scale dS K_j, when the key tiles before this one have done so
    {
      float dQ_reg[Br / TY_d][d / TX_d] = {};
      multiply_rows<Bc, TY_d, TX_d, ld_c, ld_c>(dQ_reg, P_smem + at_d.y * ld_c, K_smem + at_d.x * ld_c);
      const int first_tile = a.window ? max(0, i0 + shift - a.window + 1) / Bc : 0; // the first one that comes here
      unsigned *turn = static_cast<unsigned *>(a.workspace[1]) + (int64_t(work.b) * a.H + h) * a.Nq + i0;
      if (threadIdx.x == 0) {
        while (atomicAdd(turn, 0u) != unsigned(work.tile - first_tile)) {
        }
        __threadfence();
      }
      __syncthreads(); // it is this CTA's turn before any thread adds to dQ
      float *dQ = static_cast<float *>(a.dQ) + work.b * a.dQ_stride[0] + h * a.dQ_stride[1] + at_d.x;
#pragma unroll
      for (int r = 0; r < Br / TY_d; ++r) {
        const int i = i0 + at_d.y + r * TY_d;
#pragma unroll
        for (int c = 0; c < d / TX_d; ++c) // in the L2: no thread waits for what stands there
          if (i < a.Nq) atomicAdd(dQ + i * a.dQ_stride[2] + c * TX_d, a.scale * dQ_reg[r][c]);
      }
      __syncthreads(); // all threads have added before the turn passes on
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
    const int b = work.b, hk = work.hk, j = work.tile * Bc + 4 * at_d.y + r % 4 + r / 4 * 4 * TY_d;
    float *dK = static_cast<float *>(a.dK) + b * a.dK_stride[0] + hk * a.dK_stride[1] + j * a.dK_stride[2];
    float *dV = static_cast<float *>(a.dV) + b * a.dV_stride[0] + hk * a.dV_stride[1] + j * a.dV_stride[2];
#pragma unroll
    for (int c = 0; c < d / TX_d; c += 4) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dK_reg[r][c + e] *= a.scale;
      if (j < a.Nk) {
        fa::store4(dK + 4 * at_d.x + c * TX_d, dK_reg[r] + c);
        fa::store4(dV + 4 * at_d.x + c * TX_d, dV_reg[r] + c);
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
  if (!fa::is_fp32(a) || a.Hkv < 1 || a.H % a.Hkv || a.window < 0 || (a.window && !a.causal) || a.lengths || a.pages ||
      a.q_starts || !aligned)
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
