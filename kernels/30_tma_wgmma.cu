// 30_tma_wgmma: Hopper: TMA copies tiles, wgmma reads them from shared memory
//
// idea:      One thread asks the copy engine (TMA) for a whole tile, and a barrier in shared memory hears when it has
//            come; one instruction of four warps (wgmma) multiplies 64 rows by a tile in shared memory, without ldmatrix.
// changed:   a tile is one TMA copy, swizzled and filled up with zeros by the hardware, and an mbarrier says when it is
//            there; S = Q K^T by wgmma with both operands in shared memory, O += P V with P in registers; a warpgroup
//            has 64 rows, and two of them share the tiles of K and V; a stage is free again when an mbarrier has heard
//            from all warps, so that the warpgroups don't wait for each other's softmax
// op:        attention
// features:  causal, gqa
// inputs:    Q (B,H,Nq,D), K V (B,Hkv,Nk,D) fp16 or bf16; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         64, 128
// tiles:     D=64:  Br=128 Bc=96 threads=256 smem=89 KB CTAs/SM=2
//            D=128: Br=128 Bc=128 threads=256 smem=225 KB CTAs/SM=1
// arch:      sm_90a
// paper:     FlashAttention-3, section 3 (arXiv 2407.08608)
// speed:     H200, N >= 1024: 399 to 476 TFLOP/s at D=64, 408 to 549 at D=128: 1.5 x SDPA FLASH, 0.99 x and 0.79 x SDPA
//            CUDNN; causal 1.6 x, 1.04 x and 0.84 x
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int warpgroups = 2, threads = 128 * warpgroups;
  static constexpr int Br = 64 * warpgroups;    // query rows per CTA, 64 per warpgroup: the rows of one wgmma
  static constexpr int Bc = d == 64 ? 96 : 128; // keys per tile
  static constexpr int stages = 3;              // buffers for K_j and V_j
  static constexpr int ctas = d == 64 ? 2 : 1;  // per SM at once: leaves 128 or 255 registers
  static constexpr int Q_bytes = 2 * Br * d;    // Q_smem, then per stage K_smem and V_smem, then the barriers
  static constexpr int tile_bytes = 2 * Bc * d; // of K_j, and of V_j
  static constexpr int barriers_at = Q_bytes + stages * 2 * tile_bytes;
  static constexpr int smem_bytes = barriers_at + 8 * (1 + 2 * stages);
  static_assert(stages >= 2, "a stage is filled again while another one is read: there have to be two");
  static_assert(Bc % 16 == 0, "O += P V goes in steps of 16 keys: Bc has to be a multiple of 16");
  static_assert(fa::whole_swizzles(Q_bytes, tile_bytes),
                "TMA and wgmma swizzle 1024 bytes at a time: tiles have to begin at multiples of 1024");
  static_assert(ctas * (smem_bytes + 1024) <= fa::smem_of_sm,
                "an SM has 228 KB of shared memory, and each CTA takes 1 KB more: too few for these tiles");
};
// [end: tile]

// [region: schedule]
// A head has `tiles` tiles of queries; `heads` heads are worked on at a time.
struct Order {
  int tiles, heads;
};

// What a CTA works on. The longest tiles under a causal mask first: of each head the last queries.
__device__ __forceinline__ int2 head_and_tile(const fa_model_args &a, const Order &order) {
  const int group = blockIdx.x / (order.heads * order.tiles), in_group = blockIdx.x % (order.heads * order.tiles);
  const int heads = min(order.heads, a.B * a.H - group * order.heads); // the last group may have fewer
  return {group * order.heads + in_group % heads, order.tiles - 1 - in_group / heads};
}
// [end: schedule]

struct Maps {
  CUtensorMap Q, K, V; // how TMA finds their tiles
};

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, Tile<d>::ctas) void tma_wgmma(const fa_model_args a,
                                                                             const __grid_constant__ Maps maps,
                                                                             Order order) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br, stages = Tile<d>::stages, tile_bytes = Tile<d>::tile_bytes;

  extern __shared__ __align__(1024) unsigned char Q_KV_smem[];
  const uint32_t Q_smem = fa::smem_address(Q_KV_smem), KV_smem = Q_smem + Tile<d>::Q_bytes;
  const uint32_t Q_full = Q_smem + Tile<d>::barriers_at;       // Q_i has landed
  const uint32_t full = Q_full + 8, empty = full + 8 * stages; // per stage: K_j and V_j have landed; have been read

  // This CTA's query tile: rows i0 .. i0 + Br of head (b, h)
  const int2 work = head_and_tile(a, order);
  const int i0 = work.y * Br, b = work.x / a.H, h = work.x % a.H, hk = h / (a.H / a.Hkv);

  // Row i sees the keys up to i + shift. The tiles come backwards: j_last, j_last - Bc, .. 0; 0 even if no row sees it.
  const int shift = a.Nk - a.Nq;
  const int last_key = a.causal ? max(min(i0 + Br + shift, a.Nk) - 1, 0) : a.Nk - 1; // that any row sees
  const int j_last = last_key / Bc * Bc;

  // [region: barriers]
  if (threadIdx.x == 0) {
    fa::mbarrier_init(Q_full, 1);
#pragma unroll
    for (int s = 0; s < stages; ++s) {
      fa::mbarrier_init(full + 8 * s, 1);                      // the thread that asks for the tiles, and their bytes
      fa::mbarrier_init(empty + 8 * s, Tile<d>::threads / 32); // every warp
    }
    fa::fence_mbarrier_init();
  }
  __syncthreads(); // the barriers are there before anyone uses one
  // [end: barriers]

  // [region: fetch]
  // Asks for tile pair j0; one thread does. The barrier hears when all of its bytes have come.
  const auto fetch = [&](int j0, int stage) {
    const uint32_t K_smem = KV_smem + stage * 2 * tile_bytes;
    fa::mbarrier_arrive_expect_tx(full + 8 * stage, 2 * tile_bytes);
    fa::cp_async_bulk_tensor_5d(K_smem, &maps.K, full + 8 * stage, 0, j0, 0, hk, b);
    fa::cp_async_bulk_tensor_5d(K_smem + tile_bytes, &maps.V, full + 8 * stage, 0, j0, 0, hk, b);
  };

  if (threadIdx.x == 0) {
    fa::mbarrier_arrive_expect_tx(Q_full, Tile<d>::Q_bytes);
    fa::cp_async_bulk_tensor_5d(Q_smem, &maps.Q, Q_full, 0, i0, 0, h, b);
    for (int s = 0; s < stages && j_last - s * Bc >= 0; ++s) fetch(j_last - s * Bc, s);
  }
  // [end: fetch]

  const int warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of 8 columns of an accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1
  const int row0 = i0 + 64 * warpgroup,
            row = row0 + threadIdx.x % 128 / 32 * 16 + g; // the first of the warpgroup; mine

  // [region: sign]
  // The maximum of S is sought before S is scaled, so the scale may not be negative: rather turn Q_i around.
  fa::mbarrier_wait(Q_full, 0);
  if (a.scale < 0.f) {
#pragma unroll
    for (int panel = 0; panel < d / 64; ++panel) { // this warpgroup's rows of it
      uint4 *Q = reinterpret_cast<uint4 *>(Q_KV_smem + 128 * (panel * Br + 64 * warpgroup));
      for (int i = threadIdx.x % 128; i < 512; i += 128)
        Q[i] = {Q[i].x ^ 0x80008000, Q[i].y ^ 0x80008000, Q[i].z ^ 0x80008000, Q[i].w ^ 0x80008000};
    }
    fa::fence_proxy_async();
    fa::bar_sync(1 + warpgroup, 128); // they are turned before any wgmma reads them
  }
  // S in units of log2, so that P = exp2(S - m). A scale of 0 would make a NaN of a masked score.
  const float scale_log2 = fmaxf(fabsf(a.scale), 1e-30f) * fa::log2_e;
  // [end: sign]

  float O_reg[d / 8][4] = {};                    // (64, d) of this warpgroup, not yet divided by l
  float m_reg[2] = {-FA_INFINITY, -FA_INFINITY}; // of rows g and g + 8, before scaling
  float l_reg[2] = {0.f, 0.f};                   // of this lane's columns, until the end

  // [region: tile_loop]
  int stage = 0, parity = 0; // of the full barrier's phase that this tile completes
  for (int j0 = j_last; j0 >= 0; j0 -= Bc) {
    const uint32_t K_smem = KV_smem + stage * 2 * tile_bytes, V_smem = K_smem + tile_bytes; // (Bc, d) each
    fa::mbarrier_wait(full + 8 * stage, parity);

    if (!a.causal || j0 <= row0 + 63 + shift) { // else not even the last row sees any of these keys
      // [region: scores]
      // S (64, Bc) = Q_i K_j^T: d / 16 steps
      float S_reg[Bc / 8][4];
      const uint64_t Q_desc = fa::k_major(Q_smem + 64 * 128 * warpgroup), K_desc = fa::k_major(K_smem);
      fa::wgmma_fence();
#pragma unroll
      for (int k = 0; k < d / 16; ++k)
        fa::wgmma_mma_async<T, 0, 0>(S_reg, Q_desc + fa::k_major_step(k, Br), K_desc + fa::k_major_step(k, Bc), k > 0);
      fa::wgmma_commit_group();
      fa::wgmma_wait_group<0>();
      // [end: scores]

      // [region: mask]
      if (j0 + Bc > (a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk)) { // not all rows see all of these keys
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int seen = (a.causal ? min(row + 8 * r + shift + 1, a.Nk) : a.Nk) - j0 - 2 * t; // keys from mine on
#pragma unroll
          for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (8 * n + e >= seen) S_reg[n][2 * r + e] = -FA_INFINITY;
            }
          }
        }
      }
      // [end: mask]

      // [region: online_update]
      // m_new = max(m, rowmax S); P = exp2(S - m_new); l = l * alpha + rowsum P; O = O * alpha, alpha = exp2(m - m_new)
#pragma unroll
      for (int r = 0; r < 2; ++r) { // row g, elements 0 and 1 of the fragments; row g + 8, elements 2 and 3
        float m_new = m_reg[r];
#pragma unroll
        for (int n = 0; n < Bc / 8; ++n) m_new = fmaxf(m_new, fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
          m_new = fmaxf(m_new, __shfl_xor_sync(0xffffffff, m_new, mask));

        const float m_log2 = m_new == -FA_INFINITY ? 0.f : m_new * scale_log2; // all -inf so far: exp2(-inf - 0) = 0
        const float alpha = fa::ex2_approx_ftz(__fmul_rn(m_reg[r], scale_log2) - m_log2); // 1 where m stays
        float row_sum = 0.f;
#pragma unroll
        for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            S_reg[n][e] = fa::ex2_approx_ftz(__fmaf_rn(S_reg[n][e], scale_log2, -m_log2)); // P
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
      // O (64, d) += P V_j: Bc / 16 steps. Sixteen columns of S, rounded to 16 bits, are a fragment A of P: the same lane
      // holds the same elements.
      uint32_t P_reg[Bc / 16][4];
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          P_reg[k][e] = fa::pack2<T>(S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]);
      }
      const uint64_t V_desc = fa::mn_major(V_smem, Bc);
      fa::wgmma_fence();
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) fa::wgmma_mma_async<T, 1>(O_reg, P_reg[k], V_desc + fa::mn_major_step(k), true);
      fa::wgmma_commit_group();
      // [end: output]
    }

    // [region: refill]
    // While the product runs: the tile before this one has been read by all warps, or soon will be; its stage takes the
    // tile that is `stages - 1` away.
    const int before = stage == 0 ? stages - 1 : stage - 1, next = j0 - (stages - 1) * Bc;
    if (threadIdx.x == 0 && j0 < j_last && next >= 0) {
      fa::mbarrier_wait(empty + 8 * before, stage == 0 ? parity ^ 1 : parity);
      fetch(next, before);
    }
    // [end: refill]
    fa::wgmma_wait_group<0>();
    if (lane == 0) fa::mbarrier_arrive(empty + 8 * stage); // this warp has read K_j and V_j
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  // [end: tile_loop]

  // [region: epilogue]
  // O (Nq, d) = O / l and LSE = ln(l * 2^m), once. A row that sees no key has l = 0: O = 0 (of finite V), LSE = -inf.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float l = l_reg[r];
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

    const int i = row + 8 * r;
    if (i < a.Nq) {
      const float l_inv = l > 0.f ? 1.f / l : 0.f;
      T *O = static_cast<T *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2] + 2 * t;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) // four lanes write 16 bytes of a row
        *reinterpret_cast<uint32_t *>(O + 8 * n) = fa::pack2<T>(O_reg[n][2 * r] * l_inv, O_reg[n][2 * r + 1] * l_inv);
      if (t == 0) a.LSE[int64_t(work.x) * a.Nq + i] = (m_reg[r] * scale_log2 + log2f(l)) * fa::ln_2;
    }
  }
  // [end: epilogue]
}

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  // Without a mask head by head, so that CTAs side by side want the same keys at the same time. Under a causal mask as
  // many heads at a time as have their keys in 32 MiB of the L2, the longest tiles of all of them first.
  const int64_t bytes = int64_t(4) * a.Nk * d, heads = max(int64_t(1), (int64_t(32) << 20) / bytes) * (a.H / a.Hkv);
  const int64_t tiles = fa::ceil_div(a.Nq, Tile<d>::Br), ctas = tiles * a.B * a.H;
  if (ctas > fa::max_grid_x) return cudaErrorInvalidValue;
  const Order order = {int(tiles), a.causal ? int(min(heads, int64_t(a.B) * a.H)) : 1};

  Maps maps;
  constexpr int Br = Tile<d>::Br, Bc = Tile<d>::Bc;
  if (cudaError_t error = fa::encode_tile(&maps.Q, a.dtype, a.Q, a.Q_stride, a.B, a.H, a.Nq, d, Br)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.K, a.dtype, a.K, a.K_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.V, a.dtype, a.V, a.V_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::allow_smem(tma_wgmma<d, T>, Tile<d>::smem_bytes)) return error;
  tma_wgmma<d, T><<<unsigned(ctas), Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a, maps, order);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_model_args &a = fa::model(args);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.window || a.lengths || a.pages || a.q_starts ||
      !fa::half_rows_aligned16(a.Q, a.Q_stride) || !fa::half_rows_aligned16(a.K, a.K_stride) ||
      !fa::half_rows_aligned16(a.V, a.V_stride) || !fa::half_rows_aligned16(a.O, a.O_stride))
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
