// 32_1_turns: two products are started together, by one warpgroup at a time
//
// idea:      The next S and this tile's O are started together, and the warpgroups take turns at that: while the products
//            of one run, the other is at its softmax.
// changed:   from 31: S of the next tile is started with O of this one; a warpgroup waits for its turn at a barrier of
//            its own. It still waits for both products before its softmax. One loop, with a branch for the mask. Under a mask
//            groups of heads are evened out, and smaller for short sequences
// op:        attention
// features:  causal, gqa
// workspace: counter (1)
// inputs:    Q (B,H,Nq,D), K V (B,Hkv,Nk,D) fp16 or bf16; rows and strides multiples of 16 bytes
// outputs:   O (B,H,Nq,D) as Q, LSE (B,H,Nq) fp32
// dtypes:    fp16, bf16
// D:         64, 128
// tiles:     D=64:  Br=192 Bc=128 threads=512 smem=201 KB CTAs/SM=1
//            D=128: Br=128 Bc=128 threads=384 smem=225 KB CTAs/SM=1
// arch:      sm_90a
// paper:     FlashAttention-3, section 3.1 (arXiv 2407.08608)
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int consumers = d == 64 ? 3 : 2;     // warpgroups that multiply
  static constexpr int threads = 128 * (1 + consumers); // the first warpgroup fetches
  static constexpr int Br = 64 * consumers;             // query rows per CTA, 64 per consumer: the rows of one wgmma
  static constexpr int Bc = 128;                        // keys per tile
  static constexpr int stages = d == 64 ? 4 : 2;        // buffers for K_j and V_j
  static constexpr int registers = d == 64 ? 160 : 232; // of a consumer's thread; of a producer's:
  static constexpr int producer_registers = d == 64 ? 32 : 40;
  static constexpr int Q_bytes = 2 * Br * d;    // of each of two Q_smem, and of O_smem
  static constexpr int tile_bytes = 2 * Bc * d; // of K_j, and of V_j
  static constexpr int O_at = 2 * Q_bytes, K_at = 3 * Q_bytes, V_at = K_at + stages * tile_bytes;
  static constexpr int barriers_at = V_at + stages * tile_bytes, work_at = barriers_at + 8 * (4 + 4 * stages);
  static constexpr int smem_bytes = work_at + 2 * 16; // two of Work
  static_assert(Bc % 16 == 0, "O += P V goes in steps of 16 keys: Bc has to be a multiple of 16");
  static_assert(fa::whole_swizzles(Q_bytes, O_at, K_at, tile_bytes),
                "TMA and wgmma swizzle 1024 bytes at a time: tiles have to begin at multiples of 1024");
  static_assert(smem_bytes <= fa::smem_of_cta, "a CTA has 227 KB of shared memory: too few for these tiles");
  static_assert(128 * (producer_registers + consumers * registers) <= threads * fa::registers_at_launch(threads),
                "the consumers take more registers than the producer gives back: they would wait for ever");
};
// [end: tile]

// [region: schedule]
// A head has `tiles` tiles of queries; `heads` heads are worked on at a time.
struct Order {
  int tiles, heads;
};

// Rows i0 .. i0 + Br of head (b, h), and the tiles of keys they see: j_last, j_last - Bc, .. 0; 0 even if no row sees it.
// i0 < 0: no query tile is left.
struct Work {
  int b, h, i0, j_last;
};

// Query tile `index` of all, the longest under a causal mask first: of each head the last queries. Past the last, none.
template <int Br, int Bc>
__device__ __forceinline__ Work find_work(int index, const fa_model_args &a, const Order &order) {
  if (index >= a.B * a.H * order.tiles) return {0, 0, -1, 0};
  const int group = index / (order.heads * order.tiles), in_group = index % (order.heads * order.tiles);
  const int heads = min(order.heads, a.B * a.H - group * order.heads); // the last group may have fewer
  const int head = group * order.heads + in_group % heads, i0 = (order.tiles - 1 - in_group / heads) * Br;
  const int last_key = a.causal ? max(min(i0 + Br + a.Nk - a.Nq, a.Nk) - 1, 0) : a.Nk - 1; // that any row sees
  return {head / a.H, head % a.H, i0, last_key / Bc * Bc};
}
// [end: schedule]

struct Maps {
  CUtensorMap Q, K, V, O; // how TMA finds their tiles
};

// [region: ring]
// A stage and the parity of the phase that its barriers are in: what the producer and each consumer count for themselves.
template <int stages> struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};
// [end: ring]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, 1) void ping_pong(const fa_model_args a,
                                                                 const __grid_constant__ Maps maps, Order order) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br, stages = Tile<d>::stages, tile_bytes = Tile<d>::tile_bytes;
  constexpr int consumers = Tile<d>::consumers, Q_bytes = Tile<d>::Q_bytes;

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t Q_smem = fa::smem_address(smem), K_smem = Q_smem + Tile<d>::K_at, V_smem = Q_smem + Tile<d>::V_at;
  const uint32_t Q_full = Q_smem + Tile<d>::barriers_at;
  const uint32_t Q_empty = Q_full + 16;                                // of two each: has landed; has been read
  const uint32_t K_full = Q_empty + 16, K_empty = K_full + 8 * stages; // per stage
  const uint32_t V_full = K_empty + 8 * stages, V_empty = V_full + 8 * stages;
  Work *work_smem = reinterpret_cast<Work *>(smem + Tile<d>::work_at); // of the query tiles in Q_smem

  // [region: barriers]
  if (threadIdx.x == 0) {
    constexpr int readers = 4 * consumers; // warps
#pragma unroll
    for (int s = 0; s < 2; ++s) fa::mbarrier_init(Q_full + 8 * s, 1), fa::mbarrier_init(Q_empty + 8 * s, readers);
#pragma unroll
    for (int s = 0; s < stages; ++s) {
      fa::mbarrier_init(K_full + 8 * s, 1), fa::mbarrier_init(K_empty + 8 * s, readers);
      fa::mbarrier_init(V_full + 8 * s, 1), fa::mbarrier_init(V_empty + 8 * s, readers);
    }
    fa::fence_mbarrier_init();
  }
  __syncthreads(); // the barriers are there before anyone uses one
  // [end: barriers]

  // The same for all lanes of a warp, and the compiler is told so: descriptors of wgmma then need no copy per product.
  const int warpgroup = __reduce_max_sync(0xffffffff, threadIdx.x) / 128;
  if (warpgroup == 0) {
    // [region: producer]
    fa::setmaxnreg_dec<Tile<d>::producer_registers>();
    if (threadIdx.x > 0) return; // one thread asks for all tiles

    // Asks for a tile once its place is free. Of a fresh barrier the phase before the first one counts as complete.
    const auto fetch = [&](uint32_t to, const CUtensorMap *map, uint32_t full, uint32_t empty, int parity, int row,
                           int h, int b) {
      fa::mbarrier_wait(empty, parity ^ 1);
      fa::mbarrier_arrive_expect_tx(full, tile_bytes);
      fa::cp_async_bulk_tensor_5d(to, map, full, 0, row, 0, h, b);
    };
    int *counter = static_cast<int *>(a.workspace[0]); // 0 when the kernel starts
    Ring<stages> ring;
    Ring<2> Q_ring;
    const auto fetch_Q = [&](const Work &work) { // and tells the consumers which it is; or that none is left
      const uint32_t barrier = 8 * Q_ring.stage;
      fa::mbarrier_wait(Q_empty + barrier, Q_ring.parity ^ 1);
      work_smem[Q_ring.stage] = work;
      if (work.i0 >= 0) {
        fa::mbarrier_arrive_expect_tx(Q_full + barrier, Q_bytes);
#pragma unroll
        for (int w = 0; w < consumers; ++w) // 64 rows each
          fa::cp_async_bulk_tensor_5d(Q_smem + Q_ring.stage * Q_bytes + w * 128 * d, &maps.Q, Q_full + barrier, 0,
                                      work.i0 + 64 * w, 0, work.h, work.b);
      } else {
        fa::mbarrier_arrive(Q_full + barrier);
      }
      Q_ring.next();
    };
    Work work = find_work<Br, Bc>(blockIdx.x, a, order), next = work;
    for (fetch_Q(work); work.i0 >= 0; work = next) {
      const int hk = work.h / (a.H / a.Hkv);
      for (int j0 = work.j_last; j0 >= 0; j0 -= Bc, ring.next()) {
        const uint32_t at = ring.stage * tile_bytes, barrier = 8 * ring.stage;
        fetch(K_smem + at, &maps.K, K_full + barrier, K_empty + barrier, ring.parity, j0, hk, work.b);
        fetch(V_smem + at, &maps.V, V_full + barrier, V_empty + barrier, ring.parity, j0, hk, work.b);
        // What comes next is found out, with a counter in global memory and divisions, while these tiles are on their way.
        if (j0 == work.j_last) next = find_work<Br, Bc>(gridDim.x + atomicAdd(counter, 1), a, order);
        if (j0 == 0) fetch_Q(next); // it is there long before this one is done
      }
    }
    return;
    // [end: producer]
  }

  // [region: consumer]
  fa::setmaxnreg_inc<Tile<d>::registers>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int g = lane / 4, t = lane % 4; // of 8 columns of an accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1
  const int below = 64 * (warpgroup - 1);         // this warpgroup's rows in the tile
  const uint32_t Q_mine = Q_smem + 2 * d * below; // (d / 64, 64, 64), this warpgroup's; O_smem's too
  unsigned char *O_smem = smem + Tile<d>::O_at + 2 * d * below;
  const float scale_log2 = fmaxf(fabsf(a.scale), 1e-30f) * fa::log2_e; // S in units of log2, so that P = exp2(S - m)
  const int shift = a.Nk - a.Nq;                                       // row i sees the keys up to i + shift
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) fa::mbarrier_arrive(barrier); // this warp has read what the barrier stands for
  };

  // [region: next_work]
  // Waits for the next Q_i; says which it is. The maximum of S is sought before S is scaled, so the scale may not be
  // negative: rather turn Q_i around.
  Ring<2> Q_ring;
  const auto next_work = [&] {
    fa::mbarrier_wait(Q_full + 8 * Q_ring.stage, Q_ring.parity);
    // Read by the lane that gives the place back. The same for all lanes, and the compiler is told so.
    const Work read = lane == 0 ? work_smem[Q_ring.stage] : Work{};
    const auto of_lane_0 = [](int x) { return int(__reduce_or_sync(0xffffffff, x)); };
    const Work work = {of_lane_0(read.b), of_lane_0(read.h), of_lane_0(read.i0), of_lane_0(read.j_last)};
    if (work.i0 >= 0 && a.scale < 0.f) {
      uint4 *Q = reinterpret_cast<uint4 *>(smem + Q_ring.stage * Q_bytes + 2 * d * below);
      for (int i = threadIdx.x % 128; i < 8 * d; i += 128)
        Q[i] = {Q[i].x ^ 0x80008000, Q[i].y ^ 0x80008000, Q[i].z ^ 0x80008000, Q[i].w ^ 0x80008000};
      fa::fence_proxy_async();
      fa::bar_sync(warpgroup, 128); // this warpgroup's rows are turned before any wgmma reads them
    }
    return work;
  };
  // [end: next_work]

  float S_reg[Bc / 8][4], O_reg[d / 8][4]; // (64, Bc) of this warpgroup; (64, d), not yet divided by l
  uint32_t P_reg[Bc / 16][4];              // P of tile j0, rounded
  float m_reg[2],
      l_reg[2]; // of rows g and g + 8 the maximum, before scaling; of this lane's columns the sum, until the end

  // [region: products]
  Ring<stages> K_ring, V_ring; // of the next tile; of this one
  // S (64, Bc) = Q_i K_j^T: d / 16 steps
  const auto start_scores = [&] {
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < d / 16; ++k)
      fa::wgmma_mma_async<T, 0, 0>(S_reg, fa::k_major(Q_mine + Q_ring.stage * Q_bytes) + fa::k_major_step(k, 64),
                                   fa::k_major(K_smem + K_ring.stage * tile_bytes) + fa::k_major_step(k, Bc), k > 0);
    fa::wgmma_commit_group();
  };
  // O (64, d) += P V_j: Bc / 16 steps
  const auto start_output = [&] {
    fa::mbarrier_wait(V_full + 8 * V_ring.stage, V_ring.parity);
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
      fa::wgmma_mma_async<T, 1>(O_reg, P_reg[k],
                                fa::mn_major(V_smem + V_ring.stage * tile_bytes, Bc) + fa::mn_major_step(k), true);
    fa::wgmma_commit_group();
  };
  // [end: products]

  // [region: turns]
  // Barrier `turns` + w is warpgroup w's turn to start its products: its own 128 threads wait there, and the 128 of the
  // warpgroup before it come by when they have started theirs.
  constexpr int turns = 8;
  const auto take_turn = [&] { fa::bar_sync(turns + warpgroup, 256); };
  const auto pass_turn = [&] { fa::bar_arrive(turns + 1 + warpgroup % consumers, 256); };
  // [end: turns]

  if (warpgroup == consumers) pass_turn(); // the first turn is the first warpgroup's
  for (Work work = next_work(); work.i0 >= 0; Q_ring.next(), work = next_work()) {
    const int row0 = work.i0 + below, row = row0 + 16 * warp + g;   // the warpgroup's first; mine
    const int seen = a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk; // keys that all of this warpgroup's rows see
    const int last_seen = row0 >= a.Nq ? 0 : a.causal ? max(row0 + 63 + shift, 0) : a.Nk - 1; // the last that any sees
    m_reg[0] = m_reg[1] = -FA_INFINITY, l_reg[0] = l_reg[1] = 0.f;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) O_reg[n][0] = O_reg[n][1] = O_reg[n][2] = O_reg[n][3] = 0.f;

    // [region: skip]
    int j0 = work.j_last; // of this tile
    fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);
#pragma unroll 1
    for (; j0 > last_seen; j0 -= Bc) {
      release(K_empty + 8 * K_ring.stage), K_ring.next();
      fa::mbarrier_wait(V_full + 8 * V_ring.stage, V_ring.parity);
      release(V_empty + 8 * V_ring.stage), V_ring.next();
      take_turn(), pass_turn(); // all warpgroups have as many
      fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);
    }
    // [end: skip]

    // [region: softmax]
    const auto mask = [&] {
      if (j0 + Bc > seen) { // not all rows see all of these keys
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int mine = (a.causal ? min(row + 8 * r + shift + 1, a.Nk) : a.Nk) - j0 - 2 * t; // keys from mine on
#pragma unroll
          for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (8 * n + e >= mine) S_reg[n][2 * r + e] = -FA_INFINITY;
            }
          }
        }
      }
    };
    const auto softmax = [&] {
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
      // Sixteen columns of S, rounded to 16 bits, are a fragment A of P: the same lane holds the same elements.
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          P_reg[k][e] = fa::pack2<T>(S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]);
      }
    };
    // [end: softmax]

    // [region: tile_loop]
    const auto S_is_there = [&] { // and K_j has been read
      release(K_empty + 8 * K_ring.stage), K_ring.next();
    };
    start_scores();
    fa::wgmma_wait_group<0>();
    S_is_there();
    mask(), softmax();
#pragma unroll 1
    while (j0 > 0) {
      fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);
      take_turn();
      start_scores(); // of the next tile
      start_output(); // of this one
      pass_turn();
      j0 -= Bc;
      fa::wgmma_wait_group<0>(); // S and O are there
      S_is_there();
      release(V_empty + 8 * V_ring.stage), V_ring.next();
      mask(), softmax();
    }
    // [end: tile_loop]

    // [region: last_output]
    release(Q_empty + 8 * Q_ring.stage);
    start_output(); // of the last tile, which needs no turn
    fa::wgmma_wait_group<0>();
    release(V_empty + 8 * V_ring.stage), V_ring.next();
    // [end: last_output]

    // [region: epilogue]
    // O (64, d) = O / l and LSE = ln(l * 2^m), once. A row that sees no key has l = 0: O = 0 (of finite V), LSE = -inf.
    // O leaves by way of O_smem, swizzled as TMA expects it; what is past the last row stays behind.
    if (threadIdx.x % 128 == 0) fa::cp_async_bulk_wait_group_read<0>();
    fa::bar_sync(warpgroup, 128); // the last O has been read before any warp writes this one
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float l = l_reg[r];
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) l += __shfl_xor_sync(0xffffffff, l, mask);

      const float l_inv = l > 0.f ? 1.f / l : 0.f;
#pragma unroll
      for (int n = 0; n < d / 8; ++n) { // of each row chunk n % 8 of panel n / 8; four lanes write it
        unsigned char *chunk = O_smem + n / 8 * 8192 + (16 * warp + g + 8 * r) * 128 + (n % 8 ^ g) * 16;
        *reinterpret_cast<uint32_t *>(chunk + 4 * t) =
            fa::pack2<T>(O_reg[n][2 * r] * l_inv, O_reg[n][2 * r + 1] * l_inv);
      }
      if (t == 0 && row + 8 * r < a.Nq)
        a.LSE[int64_t(work.b * a.H + work.h) * a.Nq + row + 8 * r] = (m_reg[r] * scale_log2 + log2f(l)) * fa::ln_2;
    }
    fa::fence_proxy_async();
    fa::bar_sync(warpgroup, 128); // all of O is in O_smem before TMA reads it
    if (threadIdx.x % 128 == 0) {
      fa::cp_async_bulk_tensor_5d(&maps.O, fa::smem_address(O_smem), 0, row0, 0, work.h, work.b);
      fa::cp_async_bulk_commit_group();
    }
    // [end: epilogue]
  }
  if (threadIdx.x % 128 == 0) fa::cp_async_bulk_wait_group_read<0>(); // shared memory stays until TMA has read it
  // [end: consumer]
}

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_model_args &a, cudaStream_t stream) {
  // Without a mask head by head, so that CTAs side by side want the same keys at the same time. Under a causal mask at most
  // as many heads at a time as have their keys in 32 MiB of the L2, the longest tiles of all of them first. Of short sequences
  // only as many as of 2048 keys: there Q and O, which pass through the L2 as well, are as large as K and V.
  // Groups are evened out where one size allows it: the longest tiles of a small last group would begin late.
  const int64_t bytes = int64_t(4) * max(a.Nk, 2048) * d, at_most = max(int64_t(1), (int64_t(32) << 20) / bytes);
  const int64_t KV_heads = int64_t(a.B) * a.Hkv, groups = fa::ceil_div(KV_heads, at_most);
  const int64_t tiles = fa::ceil_div(a.Nq, Tile<d>::Br), all = tiles * a.B * a.H;
  if (all > fa::max_grid_x / 2) return cudaErrorInvalidValue; // an index past the last still fits into an int
  const Order order = {int(tiles), a.causal ? int(fa::ceil_div(KV_heads, groups)) * (a.H / a.Hkv) : 1};

  Maps maps;
  constexpr int Bc = Tile<d>::Bc;
  if (cudaError_t error = fa::encode_tile(&maps.Q, a.dtype, a.Q, a.Q_stride, a.B, a.H, a.Nq, d, 64)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.K, a.dtype, a.K, a.K_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.V, a.dtype, a.V, a.V_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.O, a.dtype, a.O, a.O_stride, a.B, a.H, a.Nq, d, 64)) return error;

  int device, sms;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
  if (cudaError_t error = fa::allow_smem(ping_pong<d, T>, Tile<d>::smem_bytes)) return error;
  if (cudaError_t error = cudaMemsetAsync(a.workspace[0], 0, sizeof(int), stream)) return error; // the counter
  const unsigned ctas = unsigned(min(all, int64_t(sms)));
  ping_pong<d, T><<<ctas, Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a, maps, order);
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
