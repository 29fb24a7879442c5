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
#ifndef ROWS_UNROLL
#define ROWS_UNROLL 1
#endif
#ifndef COLS_UNROLL
#define COLS_UNROLL 8
#endif
#ifndef MIXED_K
#define MIXED_K 2
#endif
#ifndef MIXED_UNROLL
#define MIXED_UNROLL 1
#endif
#ifndef B_BUF
#define B_BUF 2
#endif
#ifndef TWO
#define TWO 0
#endif
#ifndef NO_WAIT // diagnostics, wrong on purpose
#define NO_WAIT 0
#endif
#ifndef NO_FETCH
#define NO_FETCH 0
#endif
#ifndef WALK
#define WALK 0
#endif
#ifndef STAGGER
#define STAGGER 0
#endif
#ifndef RED
#define RED 0
#endif
constexpr int rows_unroll = ROWS_UNROLL, cols_unroll = COLS_UNROLL, mixed_unroll = MIXED_UNROLL;
#include <fa/args.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm80.cuh>

// [region: tile]
// A thread has 64 elements each of the tiles S, dP (Br, Bc), dK, dV (Bc, d), and dQ (Br, d).
template <int d> struct Tile {
  static constexpr int threads = d == 128 && !TWO ? 256 : 128, ctas = d == 128 && !TWO ? 1 : 2;
  static constexpr int Br = d == 128 ? 128 : 64;                                       // queries per step of the loop
  static constexpr int Bc = d == 128 && TWO ? 64 : 128, dq = d == 128 && TWO ? 64 : d; // keys per CTA
  static constexpr int slab_size = 8 * threads;                                        // of Q or dO, in elements
  static constexpr int Ks = slab_size / Br;  // columns of a slab: depth of S and dP
  static constexpr int rows = slab_size / d; // rows of a slab: depth of dV and dK
  static constexpr int TX_s = Bc / 8, TX_kv = d / 8 < 8 ? 8 : d / 8,
                       TX_q = dq / 8 < 8 ? 8 : dq / 8; // threads along the columns of S, dK, dQ
  // Row lengths in shared memory. Slabs are read 16 bytes at a time: 8 rows begin in 8 different places. P is written an
  // element at a time, 4 rows by 8 columns per warp: rows begin 8 banks apart.
  static constexpr int ld_s = Br + 4, ld_k = Bc + 4, ld_p = Bc + 4;
  static constexpr int stages = 2, slab = Ks * ld_s;
  static constexpr int smem_bytes = int(sizeof(float)) * (2 * d * ld_k + stages * slab + Br * ld_p + 2 * Br);
  static_assert(slab_size <= slab && Br <= threads, "each slab fits in a stage; a thread per row of a tile");
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
// Sends n x cols elements of X on their way to X_smem (n, ld), 16 bytes per thread at a time, neighbours along a row. Rows
// from rows_left on become zero and are not read.
template <int n, int cols, int ld, int threads>
__device__ __forceinline__ void load_slab(float *X_smem, const float *X, int64_t stride, int rows_left) {
  constexpr int step = threads / (cols / 4); // rows that all threads together copy at a time
  static_assert(n % step == 0, "a slab is a whole number of passes");
  const int row = threadIdx.x / (cols / 4), col = threadIdx.x % (cols / 4) * 4;
#pragma unroll
  for (int r = row; r < n + row; r += step)
    fa::cp_async_16(X_smem + r * ld + col, X + r * stride + col, r < rows_left ? 16 : 0);
}
// The same, transposed on the way: 4 bytes at a time. A warp copies 4 rows of 8 columns, 32 bytes next to
// each other in memory; in shared memory columns lie 4 banks apart.
template <int n, int cols, int ld, int threads>
__device__ __forceinline__ void load_transposed(float *X_smem, const float *X, int64_t stride, int rows_left) {
  constexpr int step = threads / cols, across = cols / 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = warp / across * 4 + lane / 8, col = warp % across * 8 + lane % 8;
  const float *from = X + row * stride + col;
#pragma unroll
  for (int r = 0; r < n; r += step) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(fa::smem_address(X_smem + col * ld + row + r)),
                 "l"(from), "r"(row + r < rows_left ? 4 : 0)
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
#pragma unroll rows_unroll
  for (int k = 0; k < K; k += 4) {
    float a_reg[M][4];
#pragma unroll
    for (int r = 0; r < M; ++r) fa::load4(a_reg[r], A_smem + r * TY * ld_a + k);
    float b_reg[B_BUF][4];
#pragma unroll
    for (int c = 0; c < B_BUF - 1; ++c) fa::load4(b_reg[c], B_smem + c * TX * ld_b + k);
#pragma unroll
    for (int c = 0; c < N; ++c) {
      if (c + B_BUF - 1 < N) fa::load4(b_reg[(c + B_BUF - 1) % B_BUF], B_smem + (c + B_BUF - 1) * TX * ld_b + k);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
#pragma unroll
        for (int r = 0; r < M; ++r) acc[r][c] += a_reg[r][e] * b_reg[c % B_BUF][e];
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
  float *slab_smem = V_smem + d * ld_k;            // stages x one slab
  float *P_smem = slab_smem + T::stages * T::slab; // (Br, Bc)   P, then dS
  float *LSE_smem = P_smem + Br * ld_p;            // (Br)       in units of log2
  float *delta_smem = LSE_smem + Br;               // (Br)

  // [region: work]
  // What this CTA does, in shared memory: registers are scarce. Keys `tile` of head (b, hk); and of each query head that
  // reads them the tiles first .. last - 1 of queries that see one of them: query i sees the keys up to i + shift, and of
  // those the last `window`.
  struct Work {
    int b, hk, tile, first, last;
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
  }
  __syncthreads(); // work_smem is written before any thread reads it
  const Work &work = work_smem;
  // [end: work]

  // [region: pipeline]
  // K_j and V_j stay. Q_i and dO_i come in slabs, in the order in which the products need them: columns of Q for S, rows of
  // dO for dV, columns of dO for dP, rows of Q for dK. One is on its way while another is multiplied.
  constexpr int S_end = d / Ks, dV_end = S_end + Br / T::rows, dP_end = dV_end + d / Ks, dK_end = dP_end + Br / T::rows;
  const int group = a.H / a.Hkv;
  // This step: query head and tile of queries, the last one first. Under a causal mask the CTAs of a head have their last
  // tile in common and their first one not: whoever began with that would wait there for all the CTAs before.
  int h = work.hk * group, tile_q = work.last - 1;
  if (work.first >= work.last) h += group; // no step at all
  int slabs = 0; // slabs of this step that have been taken; the next is in stage slabs % stages
  static_assert(dK_end % T::stages == 0, "a step begins with the first stage");
#if WALK
  const float *from = nullptr;    // this thread's part of the next slab
  const auto fetch = [&](int n) { // slab n of this step, or the first one of the next
    float *X_smem = slab_smem + n % T::stages * T::slab;
    int next_h = h, next_tile = tile_q;
    if (n == dK_end) {
      n = 0;
      if (--next_tile < work.first) next_tile = work.last - 1, ++next_h;
    }
    if (next_h < (work.hk + 1) * group && (!NO_FETCH || next_tile == work.last - 1)) {
      const int i0 = next_tile * Br;
      const bool is_columns = n < S_end || (n >= dV_end && n < dP_end), is_Q = n < S_end || n >= dP_end;
      const int64_t stride = is_Q ? a.Q_stride[2] : a.dO_stride[2];
      const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      const int row = is_columns ? warp / (Ks / 8) * 4 + lane / 8 : threadIdx.x / (d / 4);
      const int col = is_columns ? warp % (Ks / 8) * 8 + lane % 8 : threadIdx.x % (d / 4) * 4;
      if (n == 0 || n == S_end || n == dV_end || n == dP_end) { // the first slab of its product
        const int64_t *strides = is_Q ? a.Q_stride : a.dO_stride;
        from = static_cast<const float *>(is_Q ? a.Q : a.dO) + work.b * strides[0] + next_h * strides[1] +
               (i0 + row) * stride + col;
      }
      if (is_columns) {
        constexpr int step = threads / Ks;
        const float *p = from;
#pragma unroll
        for (int r = 0; r < Br; r += step) {
          asm volatile(
              "cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(fa::smem_address(X_smem + col * ld_s + row + r)),
              "l"(p), "r"(r < a.Nq - i0 - row ? 4 : 0)
              : "memory");
          p += step * stride;
        }
        from += Ks;
      } else {
        constexpr int step = threads / (d / 4);
        const int left = a.Nq - i0 - (n < dV_end ? n - S_end : n - dP_end) * T::rows - row;
#pragma unroll
        for (int r = 0; r < T::rows; r += step)
          fa::cp_async_16(X_smem + (row + r) * d + col, from + r * stride, r < left ? 16 : 0);
        from += T::rows * stride;
      }
    }
#else
  const auto fetch = [&](int n) { // slab n of this step, or the first one of the next
    float *X_smem = slab_smem + n % T::stages * T::slab;
    int next_h = h, next_tile = tile_q;
    if (n == dK_end) {
      n = 0;
      if (--next_tile < work.first) next_tile = work.last - 1, ++next_h;
    }
    if (next_h < (work.hk + 1) * group && (!NO_FETCH || next_tile == work.last - 1)) {
      const bool is_Q = n < S_end || n >= dP_end;
      const int64_t *strides = is_Q ? a.Q_stride : a.dO_stride, stride = strides[2];
      const int i0 = next_tile * Br;
      const float *X =
          static_cast<const float *>(is_Q ? a.Q : a.dO) + work.b * strides[0] + next_h * strides[1] + i0 * stride;
      if (n < S_end || (n >= dV_end && n < dP_end)) {
        load_transposed<Br, Ks, ld_s, threads>(X_smem, X + (n < S_end ? n : n - dV_end) * Ks, stride, a.Nq - i0);
      } else {
        const int row = (n < dV_end ? n - S_end : n - dP_end) * T::rows;
        load_slab<T::rows, d, d, threads>(X_smem, X + row * stride, stride, a.Nq - i0 - row);
      }
    }
#endif
    fa::cp_async_commit();
  };
  const int mine = STAGGER && Ks > 8 ? threadIdx.x / 128 * 8 : 0; // of two warps of a scheduler one fetches later
  const auto next_slab = [&] {
    fa::cp_async_wait<0>();
    // This slab has landed before any warp reads it, and the one before it has been read before the next fetch overwrites
    // it; what was written to P_smem, LSE_smem and delta_smem between two slabs likewise.
    __syncthreads(); // as above
#if !STAGGER
    fetch(slabs + 1);
#endif
    return slab_smem + slabs++ % T::stages * T::slab;
  };
  {
    const int b = work.b, hk = work.hk, j0 = work.tile * Bc;
    const float *K = static_cast<const float *>(a.K) + b * a.K_stride[0] + hk * a.K_stride[1] + j0 * a.K_stride[2];
    const float *V = static_cast<const float *>(a.V) + b * a.V_stride[0] + hk * a.V_stride[1] + j0 * a.V_stride[2];
#pragma unroll 1
    for (int c = 0; c < d; c += 16) {
      load_transposed<Bc, 16, ld_k, threads>(K_smem + c * ld_k, K + c, a.K_stride[2], a.Nk - j0);
      load_transposed<Bc, 16, ld_k, threads>(V_smem + c * ld_k, V + c, a.V_stride[2], a.Nk - j0);
    }
  }
  fetch(0);
  // [end: pipeline]

  const int2 at_s = thread_in<TX_s>(), at_kv = thread_in<TX_kv>(), at_q = thread_in<TX_q>();
  const float scale_log2 = a.scale * fa::log2_e;
  float dK_reg[8][d / TX_kv] = {}, dV_reg[8][d / TX_kv] = {}; // (Bc, d), dK without scale

  // [region: tile_loop]
#pragma unroll 1
  while (h < (work.hk + 1) * group) {
    const int i0 = tile_q * Br;
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
      while (slabs < S_end) {
        const int col = slabs * Ks;
        const float *slab = next_slab();

#if STAGGER
#pragma unroll 1
        for (int k = 0; k < Ks; k += 8) {
          if (k == mine) fetch(slabs);
          multiply_columns<8, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(S_reg, slab + 4 * at_s.y + k * ld_s,
                                                              K_smem + col * ld_k + 4 * at_s.x + k * ld_k);
        }
#else
        multiply_columns<Ks, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(S_reg, slab + 4 * at_s.y,
                                                             K_smem + col * ld_k + 4 * at_s.x);
#endif
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
    while (slabs < dV_end) {
      const int row = (slabs - S_end) * T::rows;
      const float *slab = next_slab();

#if STAGGER
#pragma unroll 1
      for (int k = 0; k < T::rows; k += 8) {
        if (k == mine) fetch(slabs);
        multiply_columns<8, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dV_reg, P_smem + row * ld_p + 4 * at_kv.y + k * ld_p,
                                                           slab + 4 * at_kv.x + k * d);
      }
#else
      multiply_columns<T::rows, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dV_reg, P_smem + row * ld_p + 4 * at_kv.y,
                                                               slab + 4 * at_kv.x);
#endif
    }
    // [end: dV]

    // [region: dS]
    // dP (Br, Bc) = dO_i V_j^T, and dS = P o (dP - delta) in the place of P
    {
      float dP_reg[8][8] = {};
#pragma unroll 1
      while (slabs < dP_end) {
        const int col = (slabs - dV_end) * Ks;
        const float *slab = next_slab();

#if STAGGER
#pragma unroll 1
        for (int k = 0; k < Ks; k += 8) {
          if (k == mine) fetch(slabs);
          multiply_columns<8, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(dP_reg, slab + 4 * at_s.y + k * ld_s,
                                                              V_smem + col * ld_k + 4 * at_s.x + k * ld_k);
        }
#else
        multiply_columns<Ks, 4 * TY_s, 4 * TX_s, ld_s, ld_k>(dP_reg, slab + 4 * at_s.y,
                                                             V_smem + col * ld_k + 4 * at_s.x);
#endif
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
    while (slabs < dK_end) {
      const int row = (slabs - dP_end) * T::rows;
      const float *slab = next_slab();

#if STAGGER
#pragma unroll 1
      for (int k = 0; k < T::rows; k += 8) {
        if (k == mine) fetch(slabs);
        multiply_columns<8, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dK_reg, P_smem + row * ld_p + 4 * at_kv.y + k * ld_p,
                                                           slab + 4 * at_kv.x + k * d);
      }
#else
      multiply_columns<T::rows, 4 * TY_kv, 4 * TX_kv, ld_p, d>(dK_reg, P_smem + row * ld_p + 4 * at_kv.y,
                                                               slab + 4 * at_kv.x);
#endif
    }
    // [end: dK]

    // [region: dQ]
    // dQ_i (Br, d) += scale dS K_j, when the key tiles before this one have done so
    const int first_tile = a.window ? max(0, i0 + shift - a.window + 1) / Bc : 0; // the first one that comes here
#pragma unroll 1
    for (int pass = 0; pass < d / T::dq; ++pass) {
      float dQ_reg[Br / TY_q][T::dq / TX_q] = {};
      if (pass == 0) __syncthreads(); // dS is written before other threads read it
      multiply_rows<Bc, TY_q, TX_q, ld_p, ld_k>(dQ_reg, P_smem + at_q.y * ld_p,
                                                K_smem + (pass * T::dq + at_q.x) * ld_k);
      unsigned *turn = static_cast<unsigned *>(a.workspace[1]);
      turn += ((int64_t(pass) * a.B + work.b) * a.H + h) * a.Nq + i0;
      if (threadIdx.x == 0) {
        while (!NO_WAIT && atomicAdd(turn, 0u) != unsigned(work.tile - first_tile)) {
        }
        __threadfence();
      }
      __syncthreads(); // it is this CTA's turn before any thread reads dQ
      const int rows_left = a.Nq - i0 - at_q.y;
      float *dQ_row = static_cast<float *>(a.dQ) + work.b * a.dQ_stride[0] + h * a.dQ_stride[1] +
                      (i0 + at_q.y) * a.dQ_stride[2] + pass * T::dq + at_q.x;
#pragma unroll
      for (int r = 0; r < Br / TY_q; ++r) {
        if (r * TY_q < rows_left) { // from the L2: other SMs have written it
          float *p = dQ_row + r * TY_q * a.dQ_stride[2];
#if RED
#pragma unroll
          for (int c = 0; c < T::dq / TX_q; ++c) atomicAdd(p + c * TX_q, a.scale * dQ_reg[r][c]);
#else
          float x[T::dq / TX_q];
#pragma unroll
          for (int c = 0; c < T::dq / TX_q; ++c) x[c] = __ldcg(p + c * TX_q);
#pragma unroll
          for (int c = 0; c < T::dq / TX_q; ++c) __stcg(p + c * TX_q, x[c] + a.scale * dQ_reg[r][c]);
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
    slabs = 0;
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
