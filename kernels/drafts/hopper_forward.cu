// hopper_forward: 32_ping_pong with its choices open, for hopper_variants.py to build and time
//
// idea:      every choice is a macro; README.md lists them
// op:        attention
// features:  causal, gqa
// dtypes:    fp16, bf16
// D:         64, 128
// workspace: counter (1)
// arch:      sm_90a
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

#ifndef ONLY_D // compile this head dimension only
#define ONLY_D 0
#endif
#ifndef CONSUMERS // warpgroups that multiply; 0: 3 with D = 64, 2 with D = 128
#define CONSUMERS 0
#endif
#ifndef BC // keys per tile
#define BC 128
#endif
#ifndef STAGES // buffers for K, and for V; 0: as many as fit
#define STAGES 0
#endif
#ifndef PRODUCER // registers of the producer's threads with 2 consumers
#define PRODUCER 24
#endif
#ifndef PING_PONG // 1: warpgroups issue their products in turn
#define PING_PONG 1
#endif
#ifndef WINDOW // of the Bc / 8 columns of accumulators, how many are exponentiated before P V is waited for; -1: ptxas
#define WINDOW -1
#endif
#ifndef FENCE // what keeps them there: 1 a barrier that is known to be complete, 2 __syncwarp, 3 a branch never taken
#define FENCE 1
#endif
#ifndef CONVERT // 1: what is exponentiated in the window is rounded there too
#define CONVERT 0
#endif
#ifndef RESCALE // of O: 0 always, 1 where a warp found a new maximum, 2 where it rose by more than 8, 3 always, behind QK
#define RESCALE 0
#endif
#ifndef FREE // 1: P with the maximum there is; the tile once more where a row's sum is out of bounds
#define FREE 0
#endif
#ifndef POLY // of 8 columns, how many are exponentiated by a polynomial
#define POLY 0
#endif
#ifndef Q_REG // 1: Q_i in registers
#define Q_REG 0
#endif
#ifndef DYNAMIC // 1: query tiles come from a counter; 0: in turns
#define DYNAMIC 1
#endif
#ifndef L2_MB // heads at a time: as many as have their keys in so many MB
#define L2_MB 32
#endif
#ifndef VOLATILE_EX2 // 1: exponentials in the order in which they are written
#define VOLATILE_EX2 0
#endif
#ifndef SPLIT // 1: S in two halves of keys, each a group of products of its own, in INNER
#define SPLIT 0
#endif
#ifndef INNER // 1: FREE as a loop of its own, which leaves for whatever is rare
#define INNER 0
#endif
#ifndef ORDER // of the query tiles: 0 heads of a group in turns, the longest tiles first; 1 head by head; 2 that if not causal
#define ORDER 0
#endif
#ifndef PANELS // 1: a box per panel of 64 columns
#define PANELS 0
#endif
#ifndef MASK // 0: WRONG where a tile is not seen whole; what stepping over the mask's instructions costs
#define MASK 1
#endif
#ifndef DRAIN // 1: every query tile is finished before the next one's first product
#define DRAIN 0
#endif

#if PANELS
inline cudaError_t encode_panel(CUtensorMap *map, int32_t dtype, const void *base, const int64_t (&stride)[3], int B,
                               int H, int N, int d, int rows) {
  static decltype(&cuTensorMapEncodeTiled) encode = nullptr;
  if (!encode) {
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error) return error;
    if (result != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
    encode = reinterpret_cast<decltype(encode)>(found);
  }
  // In bytes, of all dimensions but the innermost. That of a dimension with one element is never used, but looked at.
  using namespace fa;
  const auto bytes = [d](int64_t elements, int n) { return cuuint64_t(n == 1 ? 2 * d : 2 * elements); };
  const cuuint64_t sizes[] = {64, cuuint64_t(N), cuuint64_t(d / 64), cuuint64_t(H), cuuint64_t(B)};
  const cuuint64_t strides[] = {bytes(stride[2], N), 128, bytes(stride[1], H), bytes(stride[0], B)};
  const cuuint32_t box[] = {64, cuuint32_t(rows), 1, 1, 1}, steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, dtype == FA_FP16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5,
             const_cast<void *>(base), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
#define ENCODE encode_panel
#else
#define ENCODE fa::encode_tile
#endif

template <int d> struct Tile {
  static constexpr int consumers = CONSUMERS ? CONSUMERS : d == 64 ? 3 : 2;
  static constexpr int threads = 128 * (1 + consumers);
  static constexpr int Br = 64 * consumers, Bc = BC;
  static constexpr int registers = consumers == 3 ? 160 : PRODUCER == 24 ? 240 : 232;
  static constexpr int producer_registers = consumers == 3 ? 32 : PRODUCER;
  static constexpr int Q_bytes = 2 * Br * d; // of each of two Q_smem, and of O_smem
  static constexpr int tile_bytes = 2 * Bc * d;
  static constexpr int fit = (232448 - 3 * Q_bytes - 256) / (2 * tile_bytes);
  static constexpr int stages = STAGES ? STAGES : fit < 4 ? fit : 4;
  static constexpr int O_at = 2 * Q_bytes, K_at = 3 * Q_bytes, V_at = K_at + stages * tile_bytes;
  static constexpr int barriers_at = V_at + stages * tile_bytes;
  static constexpr int smem_bytes = barriers_at + 8 * (4 + 4 * stages) + 16;
  static_assert(stages > 1 && smem_bytes <= 232448 && Bc % 16 == 0, "two stages, in what an SM has");
};

struct Order {
  int tiles, heads;
};

struct Work {
  int b, h, i0, j_last;
};

template <int Br, int Bc>
__device__ __forceinline__ Work find_work(int index, const fa_model_args &a, const Order &order) {
  const int group = index / (order.heads * order.tiles), in_group = index % (order.heads * order.tiles);
  const int heads = min(order.heads, a.B * a.H - group * order.heads); // the last group may have fewer
#if ORDER == 1
  const int head = group * order.heads + in_group / order.tiles, i0 = (order.tiles - 1 - in_group % order.tiles) * Br;
#else
  const int head = group * order.heads + in_group % heads, i0 = (order.tiles - 1 - in_group / heads) * Br;
#endif
  const int last_key = a.causal ? max(min(i0 + Br + a.Nk - a.Nq, a.Nk) - 1, 0) : a.Nk - 1;
  return {head / a.H, head % a.H, i0, last_key / Bc * Bc};
}

struct Maps {
  CUtensorMap Q, K, V, O;
};

template <int stages> struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

__device__ __forceinline__ float exponential(float x, int n, bool finite = false) {
  if (finite && n % 8 < POLY) { // 2^x = 2^i 2^f, f in [-1/2, 1/2]
    x = fmaxf(x, -126.f);
    const float shifted = x + 12582912.f, f = x - (shifted - 12582912.f);
    float p = fmaf(0.0095701019f, f, 0.0559178639f); // off by 3e-6 of itself at most
    p = fmaf(fmaf(fmaf(p, f, 0.2402474486f), f, 0.6931218143f), f, 0.9999992614f);
    return __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  }
#if VOLATILE_EX2
  float y;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return fa::ex2_approx_ftz(x);
#endif
}

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, 1) void ping_pong(const fa_model_args a,
                                                                 const __grid_constant__ Maps maps, Order order) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br, stages = Tile<d>::stages, tile_bytes = Tile<d>::tile_bytes;
  constexpr int consumers = Tile<d>::consumers, Q_bytes = Tile<d>::Q_bytes;

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t Q_smem = fa::smem_address(smem), K_smem = Q_smem + Tile<d>::K_at, V_smem = Q_smem + Tile<d>::V_at;
  const uint32_t Q_full = Q_smem + Tile<d>::barriers_at, Q_empty = Q_full + 16;
  const uint32_t K_full = Q_empty + 16, K_empty = K_full + 8 * stages;
  const uint32_t V_full = K_empty + 8 * stages, V_empty = V_full + 8 * stages;
  int *index_smem = reinterpret_cast<int *>(smem + Tile<d>::smem_bytes - 16); // of the query tiles in Q_smem; -1: none

  if (threadIdx.x == 0) {
    for (int s = 0; s < 2; ++s) fa::mbarrier_init(Q_full + 8 * s, 1), fa::mbarrier_init(Q_empty + 8 * s, 4 * consumers);
#pragma unroll
    for (int s = 0; s < stages; ++s) {
      fa::mbarrier_init(K_full + 8 * s, 1), fa::mbarrier_init(K_empty + 8 * s, 4 * consumers);
      fa::mbarrier_init(V_full + 8 * s, 1), fa::mbarrier_init(V_empty + 8 * s, 4 * consumers);
    }
    fa::fence_mbarrier_init();
  }
  __syncthreads(); // the barriers are there before anyone uses one

  const int warpgroup = __reduce_max_sync(0xffffffff, threadIdx.x) / 128, all = a.B * a.H * order.tiles;
  if (warpgroup == 0) {
    fa::setmaxnreg_dec<Tile<d>::producer_registers>();
    if (threadIdx.x > 0) return;
    Ring<stages> ring;
    Ring<2> Q_ring;
    int index = blockIdx.x;
    for (int round = 1;; ++round) {
      fa::mbarrier_wait(Q_empty + 8 * Q_ring.stage, Q_ring.parity ^ 1);
      index_smem[Q_ring.stage] = index < all ? index : -1;
      if (index >= all) {
        fa::mbarrier_arrive(Q_full + 8 * Q_ring.stage);
        break;
      }
      const Work work = find_work<Br, Bc>(index, a, order);
#if DYNAMIC
      index = gridDim.x + atomicAdd(static_cast<int *>(a.workspace[0]), 1);
#else
      index = round * gridDim.x + (round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
#endif
      fa::mbarrier_arrive_expect_tx(Q_full + 8 * Q_ring.stage, Q_bytes);
      for (int w = 0; w < consumers; ++w)
        fa::cp_async_bulk_tensor_5d(Q_smem + Q_ring.stage * Q_bytes + w * 128 * d, &maps.Q, Q_full + 8 * Q_ring.stage,
                                    0, work.i0 + 64 * w, 0, work.h, work.b);
      Q_ring.next();
      const int hk = work.h / (a.H / a.Hkv);
      for (int j0 = work.j_last; j0 >= 0; j0 -= Bc, ring.next()) {
        const uint32_t at = ring.stage * tile_bytes, barrier = 8 * ring.stage;
        fa::mbarrier_wait(K_empty + barrier, ring.parity ^ 1);
        fa::mbarrier_arrive_expect_tx(K_full + barrier, tile_bytes);
        for (int p = 0; p < (PANELS ? d / 64 : 1); ++p)
          fa::cp_async_bulk_tensor_5d(K_smem + at + p * 128 * Bc, &maps.K, K_full + barrier, 0, j0, p, hk, work.b);
        fa::mbarrier_wait(V_empty + barrier, ring.parity ^ 1);
        fa::mbarrier_arrive_expect_tx(V_full + barrier, tile_bytes);
        for (int p = 0; p < (PANELS ? d / 64 : 1); ++p)
          fa::cp_async_bulk_tensor_5d(V_smem + at + p * 128 * Bc, &maps.V, V_full + barrier, 0, j0, p, hk, work.b);
      }
    }
    return;
  }

  fa::setmaxnreg_inc<Tile<d>::registers>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int g = lane / 4, t = lane % 4;
  const int below = 64 * (warpgroup - 1);
  const uint32_t Q_mine = Q_smem + 2 * d * below;               // (d / 64, 64, 64), this warpgroup's
  unsigned char *O_smem = smem + Tile<d>::O_at + 2 * d * below; // the same shape
  const float scale_log2 = fmaxf(fabsf(a.scale), 1e-30f) * fa::log2_e;
  const int shift = a.Nk - a.Nq;
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) fa::mbarrier_arrive(barrier);
  };

  Ring<stages> K_ring, V_ring;
  Ring<2> Q_ring; // of the next query tile
  float S_reg[Bc / 8][4], O_reg[d / 8][4];
  uint32_t P_reg[Bc / 16][4];
  float m_reg[2], l_reg[2], alpha[2];
#if Q_REG
  uint32_t Q_reg[d / 16][4];
#endif

  // The index of the next query tile, -1 after the last; Q_i has landed.
  const auto next_index = [&] {
    fa::mbarrier_wait(Q_full + 8 * Q_ring.stage, Q_ring.parity);
    const int index = __reduce_max_sync(0xffffffff, index_smem[Q_ring.stage]); // uniform, and known to be
    if (index >= 0 && a.scale < 0.f) {
      uint4 *Q = reinterpret_cast<uint4 *>(smem + Q_ring.stage * Q_bytes + 2 * d * below);
      for (int i = threadIdx.x % 128; i < 8 * d; i += 128)
        Q[i] = {Q[i].x ^ 0x80008000, Q[i].y ^ 0x80008000, Q[i].z ^ 0x80008000, Q[i].w ^ 0x80008000};
      fa::fence_proxy_async();
      fa::bar_sync(warpgroup, 128);
    }
#if Q_REG
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      const int r = 16 * warp + lane % 16, chunk = k % 4 * 2 + lane / 16;
      fa::ldmatrix_x4(Q_reg[k],
                      smem + Q_ring.stage * Q_bytes + 2 * d * below + k / 4 * 8192 + r * 128 + (chunk ^ r % 8) * 16);
    }
#endif
    return index;
  };

#if !SPLIT
  const auto start_scores = [&](int Q_stage) {
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      const uint64_t K_desc = fa::k_major(K_smem + K_ring.stage * tile_bytes) + fa::k_major_step(k, Bc);
#if Q_REG
      fa::wgmma_mma_async<T, 0>(S_reg, Q_reg[k], K_desc, k > 0);
#else
      fa::wgmma_mma_async<T, 0, 0>(S_reg, fa::k_major(Q_mine + Q_stage * Q_bytes) + fa::k_major_step(k, 64), K_desc,
                                   k > 0);
#endif
    }
    fa::wgmma_commit_group();
  };
#else
  const auto start_scores = [&](int Q_stage) {
    fa::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int k = 0; k < d / 16; ++k) {
        const uint64_t K_desc =
            fa::k_major(K_smem + K_ring.stage * tile_bytes) + fa::k_major_step(k, Bc) + half * (Bc / 2 * 128 >> 4);
        float(&S)[Bc / 16][4] = reinterpret_cast<float(&)[Bc / 16][4]>(S_reg[half * Bc / 16]);
#if Q_REG
        fa::wgmma_mma_async<T, 0>(S, Q_reg[k], K_desc, k > 0);
#else
        fa::wgmma_mma_async<T, 0, 0>(S, fa::k_major(Q_mine + Q_stage * Q_bytes) + fa::k_major_step(k, 64), K_desc,
                                     k > 0);
#endif
      }
      fa::wgmma_commit_group();
    }
  };
#endif
  const auto start_output = [&](bool accumulate) {
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
      fa::wgmma_mma_async<T, 1>(O_reg, P_reg[k],
                                fa::mn_major(V_smem + V_ring.stage * tile_bytes, Bc) + fa::mn_major_step(k),
                                accumulate || k > 0);
    fa::wgmma_commit_group();
  };
  const auto mask = [&](int i0, int j0) {
    const int row0 = i0 + below;
    if (MASK && j0 + Bc > (a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk)) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int seen = (a.causal ? min(row0 + 16 * warp + g + 8 * r + shift + 1, a.Nk) : a.Nk) - j0 - 2 * t;
#pragma unroll
        for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            if (8 * n + e >= seen) S_reg[n][2 * r + e] = -FA_INFINITY;
          }
        }
      }
    }
  };
  float m_log2[2];
  const auto raise_maximum = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m_new = m_reg[r];
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) m_new = fmaxf(m_new, fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, lanes));
#if RESCALE == 2
      if ((m_new - m_reg[r]) * scale_log2 <= 8.f) m_new = m_reg[r];
#endif
      m_log2[r] = m_new == -FA_INFINITY ? 0.f : m_new * scale_log2;
      alpha[r] = fa::ex2_approx_ftz(__fmaf_rn(m_reg[r], scale_log2, -m_log2[r]));
      m_reg[r] = m_new;
      l_reg[r] *= alpha[r];
    }
  };
  // P of columns first to last of the accumulators, and its sums
  const auto probabilities = [&](int first, int last, float (&sum)[2], bool finite = false) {
#pragma unroll
    for (int n = first; n < last; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S_reg[n][e] = exponential(__fmaf_rn(S_reg[n][e], scale_log2, -m_log2[e / 2]), n, finite);
        sum[e / 2] += S_reg[n][e];
      }
    }
  };
  uint32_t P_next[Bc / 16][4]; // while P V reads P_reg
  const auto convert = [&](int first, int last, uint32_t (&P)[Bc / 16][4]) {
#pragma unroll
    for (int k = first; k < last; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        P[k][e] = fa::pack2<T>(S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]);
    }
  };
  const auto rescale = [&] {
#if RESCALE == 1 || RESCALE == 2
    if (__all_sync(0xffffffff, alpha[0] == 1.f && alpha[1] == 1.f)) return;
#endif
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) O_reg[n][e] *= alpha[e / 2];
    }
  };
  // l and m are final: LSE of query tile `index`; l_inv
  const auto finish = [&](int index, float (&l_inv)[2]) {
    const Work work = find_work<Br, Bc>(index, a, order);
    const int row = work.i0 + below + 16 * warp + g;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = l_reg[r];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2) l += __shfl_xor_sync(0xffffffff, l, lanes);
      l_inv[r] = l > 0.f ? __frcp_rn(l) : 0.f;
      if (t == 0 && row + 8 * r < a.Nq)
        a.LSE[int64_t(work.b * a.H + work.h) * a.Nq + row + 8 * r] = (m_reg[r] * scale_log2 + log2f(l)) * fa::ln_2;
    }
  };
  const auto epilogue = [&](int index, const float (&l_inv)[2]) {
    if (threadIdx.x % 128 == 0) fa::cp_async_bulk_wait_group_read<0>();
    fa::bar_sync(warpgroup, 128);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int n = 0; n < d / 8; ++n) {
        unsigned char *chunk = O_smem + n / 8 * 8192 + (16 * warp + g + 8 * r) * 128 + (n % 8 ^ g) * 16;
        *reinterpret_cast<uint32_t *>(chunk + 4 * t) =
            fa::pack2<T>(O_reg[n][2 * r] * l_inv[r], O_reg[n][2 * r + 1] * l_inv[r]);
      }
    }
    fa::fence_proxy_async();
    fa::bar_sync(warpgroup, 128);
    if (threadIdx.x % 128 == 0) {
      const Work work = find_work<Br, Bc>(index, a, order);
      fa::cp_async_bulk_tensor_5d(&maps.O, fa::smem_address(O_smem), 0, work.i0 + below, 0, work.h, work.b);
      fa::cp_async_bulk_commit_group();
    }
  };
  constexpr int turn = 8; // barrier of a warpgroup's turn
  const auto take_turn = [&] {
    if (PING_PONG) fa::bar_sync(turn + warpgroup, 256);
  };
  const auto pass_turn = [&] {
    if (PING_PONG) fa::bar_arrive(turn + 1 + warpgroup % consumers, 256);
  };

  const auto first_tile = [&](int index) -> int2 {
    const Work work = find_work<Br, Bc>(index, a, order);
    return {work.i0, work.j_last};
  };
  int index = next_index();
  if (PING_PONG && warpgroup == consumers) pass_turn(); // the first is the first warpgroup's
  while (index >= 0) {
    // the first tile of the first query tile (of every one, with DRAIN)
    int2 tile = first_tile(index); // row i0, key tile.y
    int Q_stage = Q_ring.stage;
    Q_ring.next();
    fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);
    start_scores(Q_stage);
    fa::wgmma_wait_group<0>();
    release(K_empty + 8 * K_ring.stage), K_ring.next();
    if (tile.y == 0) release(Q_empty + 8 * Q_stage);
    m_reg[0] = m_reg[1] = -FA_INFINITY, l_reg[0] = l_reg[1] = 0.f;
    mask(tile.x, tile.y);
    raise_maximum();
    probabilities(0, Bc / 8, l_reg);
    convert(0, Bc / 16, P_reg);
    bool accumulate = false;
    alpha[0] = alpha[1] = 1.f;

    float l_inv[2];
    int next = index;
    while (true) {
#if INNER
      bool again = false;
#pragma unroll 1
      while (tile.y > 0 && tile.y <= (a.causal ? min(tile.x + below + shift + 1, a.Nk) : a.Nk)) {
        tile.y -= Bc;
        const uint32_t K_barrier = 8 * K_ring.stage, V_barrier = 8 * V_ring.stage;
        fa::mbarrier_wait(K_full + K_barrier, K_ring.parity);
        take_turn();
        start_scores(Q_stage);
        fa::mbarrier_wait(V_full + V_barrier, V_ring.parity);
        start_output(accumulate);
        pass_turn();
        float sum[2] = {};
#if SPLIT
        fa::wgmma_wait_group<2>();
        probabilities(0, Bc / 16, sum, true);
        fa::mbarrier_wait(K_full + K_barrier, K_ring.parity);
        fa::wgmma_wait_group<1>();
        probabilities(Bc / 16, Bc / 8, sum, true);
#else
        fa::wgmma_wait_group<1>();
        probabilities(0, Bc / 8, sum, true);
#endif
        const int bad = !(fmaxf(sum[0], sum[1]) <= 32768.f) || m_reg[0] == -FA_INFINITY || m_reg[1] == -FA_INFINITY;
        int any;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\n"
                     "selp.b32 %0, 1, 0, q;\n}"
                     : "=r"(any)
                     : "r"(bad), "r"(warpgroup)
                     : "memory");
        if (__any_sync(0xffffffff, any)) {
          again = true;
          break;
        }
        l_reg[0] += sum[0], l_reg[1] += sum[1];
        release(K_empty + K_barrier);
        if (tile.y == 0) release(Q_empty + 8 * Q_stage);
        fa::wgmma_wait_group<0>();
        release(V_empty + V_barrier);
        K_ring.next(), V_ring.next();
        convert(0, Bc / 16, P_reg);
        accumulate = true;
      }
      const bool last = !again && tile.y == 0;
      if (again) {
      } else
#else
      const bool last = tile.y == 0;
#endif
      if (last) {
        next = next_index();
        if (DRAIN || next < 0) break;
        Q_stage = Q_ring.stage, Q_ring.next();
        tile = first_tile(next);
      } else {
        tile.y -= Bc;
      }
      const uint32_t K_barrier = 8 * K_ring.stage, V_barrier = 8 * V_ring.stage;

#if INNER
      if (again) {
        start_scores(Q_stage);
        fa::wgmma_wait_group<0>();
      } else
#endif
      {
      fa::mbarrier_wait(K_full + K_barrier, K_ring.parity);
      take_turn();
      start_scores(Q_stage);
#if RESCALE == 3
      rescale();
#endif
      fa::mbarrier_wait(V_full + V_barrier, V_ring.parity);
      start_output(accumulate);
      pass_turn();
      fa::wgmma_wait_group<1>();
      }
#if !FREE
      release(K_empty + K_barrier);
      if (tile.y == 0) release(Q_empty + 8 * Q_stage);
#endif

      if (last) {
        finish(index, l_inv);
        m_reg[0] = m_reg[1] = -FA_INFINITY, l_reg[0] = l_reg[1] = 0.f;
      }
#if FREE
      const int row0 = tile.x + below;
      bool exact = last || tile.y + Bc > (a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk);
      if (!exact) {
        float sum[2] = {};
        probabilities(0, Bc / 8, sum);
        const int bad = !(fmaxf(sum[0], sum[1]) <= 32768.f) || m_reg[0] == -FA_INFINITY || m_reg[1] == -FA_INFINITY;
        int any;
        asm volatile("{\n.reg .pred p, q;\nsetp.ne.b32 p, %1, 0;\nbarrier.cta.red.or.pred q, %2, 128, p;\n"
                     "selp.b32 %0, 1, 0, q;\n}"
                     : "=r"(any)
                     : "r"(bad), "r"(warpgroup)
                     : "memory");
        exact = any;
        if (!exact)
          l_reg[0] += sum[0], l_reg[1] += sum[1];
        else {
          start_scores(Q_stage);
          fa::wgmma_wait_group<0>();
        }
      }
      alpha[0] = alpha[1] = 1.f;
      if (exact) {
        mask(tile.x, tile.y);
        raise_maximum();
        probabilities(0, Bc / 8, l_reg);
      }
      release(K_empty + K_barrier);
      if (tile.y == 0) release(Q_empty + 8 * Q_stage);
      fa::wgmma_wait_group<0>();
      if (exact && !last) rescale();
#else
      mask(tile.x, tile.y);
      raise_maximum();
      constexpr int window = WINDOW < 0 ? Bc / 8 : WINDOW;
      probabilities(0, window, l_reg);
      if (CONVERT) convert(0, window / 2, P_next);
#if WINDOW >= 0
#if FENCE == 1
      fa::mbarrier_wait(V_full + V_barrier, V_ring.parity);
#elif FENCE == 2
      __syncwarp();
#else
      if (l_reg[0] < 0.f) __trap();
#endif
#endif
      fa::wgmma_wait_group<0>();
      probabilities(window, Bc / 8, l_reg);
      if (last) alpha[0] = alpha[1] = 1.f;
#if RESCALE != 3
      rescale();
#endif
#endif
      release(V_empty + V_barrier);
      K_ring.next(), V_ring.next();
#if CONVERT
      convert(window / 2, Bc / 16, P_next);
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e) P_reg[k][e] = P_next[k][e];
      }
#else
      convert(0, Bc / 16, P_reg);
#endif
      if (last) epilogue(index, l_inv), index = next;
      accumulate = !last;
    }

    fa::mbarrier_wait(V_full + 8 * V_ring.stage, V_ring.parity);
#if RESCALE == 3
    rescale();
#endif
    start_output(accumulate);
    fa::wgmma_wait_group<0>();
    release(V_empty + 8 * V_ring.stage), V_ring.next();
    finish(index, l_inv);
    epilogue(index, l_inv);
    index = next;
  }
  if (threadIdx.x % 128 == 0) fa::cp_async_bulk_wait_group_read<0>();
}

template <int d, typename T> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  const int64_t bytes = int64_t(4) * a.Nk * d, heads = max(int64_t(1), (int64_t(L2_MB) << 20) / bytes) * (a.H / a.Hkv);
  const int64_t tiles = fa::ceil_div(a.Nq, Tile<d>::Br), all = tiles * a.B * a.H;
  if (all > fa::max_grid_x / 2) return cudaErrorInvalidValue;
  const Order order = {int(tiles), ORDER == 2 && !a.causal ? 1 : int(min(heads, int64_t(a.B) * a.H))};
  Maps maps;
  constexpr int Bc = Tile<d>::Bc;
  if (cudaError_t error = fa::encode_tile(&maps.Q, a.dtype, a.Q, a.Q_stride, a.B, a.H, a.Nq, d, 64)) return error;
  if (cudaError_t error = ENCODE(&maps.K, a.dtype, a.K, a.K_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = ENCODE(&maps.V, a.dtype, a.V, a.V_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.O, a.dtype, a.O, a.O_stride, a.B, a.H, a.Nq, d, 64)) return error;
  int device, sms;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
  if (cudaError_t error = fa::allow_smem(ping_pong<d, T>, Tile<d>::smem_bytes)) return error;
  if (DYNAMIC)
    if (cudaError_t error = cudaMemsetAsync(a.workspace[0], 0, sizeof(int), stream)) return error;
  const unsigned ctas = unsigned(min(all, int64_t(sms)));
  ping_pong<d, T><<<ctas, Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a, maps, order);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, __half>(a, stream) : launch<d, __nv_bfloat16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_model_args &a = fa::model(args);
  if (!fa::is_half(a)) return cudaErrorInvalidValue;
#if ONLY_D != 128
  if (a.D == 64) return launch<64>(a, stream);
#endif
#if ONLY_D != 64
  if (a.D == 128) return launch<128>(a, stream);
#endif
  return cudaErrorInvalidValue;
}
