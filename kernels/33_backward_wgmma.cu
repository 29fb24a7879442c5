// 33_backward_wgmma: backward pass with wgmma: two warpgroups take turns
//
// idea:      Two warpgroups own 64 keys each and hold P^T and dS^T as operands A in registers. A warpgroup that starts
//            products is held until the tensor cores have taken them, so they take turns: by plan one forms dS while the
//            other's dP and dV run (D=64: 5/8 of dV), and P while its S, dK and dQ do (the clocks show how far that holds).
// changed:   23's transposed products as wgmma; tiles come by TMA from a warp of its own; a token goes round; two more warps
//            send dQ: the first CTA stores it, the L2 adds the others' to it; D=64: a CTA per SM takes tiles of keys one
//            after another, and starts the next one's S in a tile's last step
// op:        attention_backward
// features:  causal, gqa, deterministic
// inputs:    Q O dO (B,H,Nq,D), K V (B,Hkv,Nk,D) fp16 or bf16, LSE (B,H,Nq) fp32; rows and strides multiples of 16 bytes
// outputs:   dQ (B,H,Nq,D), dK dV (B,Hkv,Nk,D) as Q; dK and dV are the same bit by bit every time, dQ if deterministic
// dtypes:    fp16, bf16
// D:         64, 128
// workspace: dQ_sum (B,H,Nq128,D) fp32; stats (3,B,H,Nq128) fp32; dK_dV (B,Hshared,Nk,D) fp32
// tiles:     D=64:  Br=128 Bc=128 threads=384 smem=227 KB CTAs/SM=1
//            D=128: Br=64  Bc=128 threads=384 smem=210 KB CTAs/SM=1
// arch:      sm_90a
// paper:     FlashAttention-2, Algorithm 2 (arXiv 2307.08691); FlashAttention-3 (arXiv 2407.08608)
// speed:     H200, N >= 1024: 491 to 607 TFLOP/s at D=64, 513 to 695 at D=128: 1.30 x and 1.16 x SDPA CUDNN; causal 1.42 x
//            and 1.22 x
#include <fa/bulk.cuh>
#include <fa/flags.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/model.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

// [region: tile]
// An item of work: keys j0 .. j0 + 128 of head (b, hk), and of head (b, h), which is number `head` of all, the tiles of queries
// that see one of them: `steps` tiles from `start` on, where the first one follows the last. By default nothing: keys in front
// of the first, and one step, whose S is started and not used.
struct alignas(16) Work {
  int head = 0, h = 0, hk = 0, b = 0, j0 = -128, start = 0, steps = 1;
};

template <int d> struct Tile {
  static constexpr int Br = d == 64 ? 128 : 64;     // queries per step of the loop
  static constexpr int Bc = 128;                    // keys per item of work: 64 for each of two warpgroups
  static constexpr int threads = 128 + 2 * 128;     // the producer's warpgroup, which sends dQ too, and two consumers
  static constexpr int Q_stages = 3;                // buffers for Q_i and LSE
  static constexpr int dO_stages = 2;               // for dO_i and delta; dS has two as well
  static constexpr int K_stages = d == 64 ? 2 : 1;  // for K_j: two, where there is room
  static constexpr bool persistent = K_stages == 2; // then a CTA takes one item after another, else it has one
  static constexpr int dQ_columns = Br * d / 128;   // queries of a warpgroup's half of dQ^T, with 64 columns of d
  static constexpr int dQ_half = 64 * dQ_columns;   // floats

  // Shared memory, in bytes; what TMA and wgmma swizzle begins at multiples of 1024.
  static constexpr int kv_bytes = 2 * Bc * d, q_bytes = 2 * Br * d, dS_bytes = 2 * Br * Bc, stats_bytes = 4 * Br;
  static constexpr int K = 0, V = K + K_stages * kv_bytes;   // (Bc, d) both
  static constexpr int Q = V + kv_bytes;                     // Q_stages x (Br, d)
  static constexpr int dO = Q + Q_stages * q_bytes;          // dO_stages x (Br, d)
  static constexpr int dS = dO + dO_stages * q_bytes;        // 2 x (Br, Bc), in a panel of 64 keys for each warpgroup
  static constexpr int dQ = dS + 2 * dS_bytes;               // 2 x half of dQ^T, as the accumulators lie
  static constexpr int LSE = dQ + 8 * dQ_half;               // Q_stages x (Br)
  static constexpr int delta = LSE + Q_stages * stats_bytes; // dO_stages x (Br)
  static constexpr int barriers = delta + dO_stages * stats_bytes;
  static constexpr int Q_full = barriers, dO_full = Q_full + 8 * Q_stages; // 8 bytes each
  static constexpr int Q_empty = dO_full + 8 * dO_stages, dO_empty = Q_empty + 8 * Q_stages;
  static constexpr int K_empty = dO_empty + 8 * dO_stages, V_empty = K_empty + 8 * K_stages;
  static constexpr int works = (V_empty + 8 + 15) / 16 * 16; // 8 x Work, of 32 bytes
  static constexpr int smem_bytes = works + 8 * 32;
  static_assert(Q_stages >= 2, "Q_i is read until the next one's S has been started: there have to be two stages");
  static_assert(Bc == 128, "each of two warpgroups has 64 keys: Bc has to be 128");
  static_assert(128 % Br == 0 && Br % 32 == 0,
                "the workspace has rows for whole tiles of 128: Br has to be a part of that");
  static_assert(fa::whole_swizzles(V, Q, q_bytes, dO, dS, dS_bytes),
                "TMA and wgmma swizzle 1024 bytes at a time: tiles have to begin at multiples of 1024");
  static_assert(smem_bytes <= fa::smem_of_cta, "a CTA has 227 KB of shared memory: too few for these tiles");
};

// Rows of the workspace per head: whole tiles.
template <int d> inline __host__ __device__ int64_t padded(int Nq) {
  return fa::ceil_div(Nq, Tile<d>::Br) * Tile<d>::Br;
}

struct Maps {
  CUtensorMap Q, dO;  // tiles of Br rows
  CUtensorMap K, V;   // of Bc
  CUtensorMap dK, dV; // of the 64 rows that a warpgroup writes, of every query head
};
// [end: tile]

// LSE is divided by it: never 0. With 1e-30 every score is 0, too.
inline __device__ float scale_of(const fa_backward_args &a) { return fabsf(a.scale) < 1e-30f ? 1e-30f : a.scale; }

// [region: delta]
// Before everything else, d / 16 lanes per row: stats (3, B, H, padded Nq): zeros, of which each tile has two to say what has been
// added to its dQ, and the last one counts the items taken; then -LSE / scale and -delta = -rowsum(dO o O), where
// the sums of Q K^T and of dO V^T begin. A row past the end, and one that sees no key (LSE = -inf), begins with the infinity by
// which P = exp(scale * S) is 0, whatever finite number is added. All reads are asked for before any is used.
template <int d, typename T> __global__ __launch_bounds__(256) void prepare(const fa_backward_args a) {
  constexpr int lanes = d / 16; // of a row; each has 8 elements of its first half and 8 of its second
  static_assert(Tile<d>::Br % (256 / lanes) == 0, "whole CTAs: a tile of queries has to be a multiple of their rows");
  const int Nq = int(padded<d>(a.Nq));
  const int64_t rows = int64_t(a.B) * a.H * Nq; // the launcher has seen that they are fewer than 2^31
  const int row = int(blockIdx.x) * (256 / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int i = row % Nq, head = row / Nq, h = head % a.H, b = head / a.H;
  float delta = 0.f, LSE = -FA_INFINITY;
  if (i < a.Nq) {
    const T *O = static_cast<const T *>(a.O) + b * a.O_stride[0] + h * a.O_stride[1] + i * a.O_stride[2];
    const T *dO = static_cast<const T *>(a.dO) + b * a.dO_stride[0] + h * a.dO_stride[1] + i * a.dO_stride[2];
    LSE = a.LSE[int64_t(head) * a.Nq + i];
    uint4 o[2], g[2];
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      o[part] = reinterpret_cast<const uint4 *>(O)[part * lanes + lane];
      g[part] = reinterpret_cast<const uint4 *>(dO)[part * lanes + lane];
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const uint32_t O_reg[4] = {o[part].x, o[part].y, o[part].z, o[part].w};
      const uint32_t dO_reg[4] = {g[part].x, g[part].y, g[part].z, g[part].w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float2 x = fa::unpack2<T>(O_reg[c]), y = fa::unpack2<T>(dO_reg[c]);
        delta += x.x * y.x + x.y * y.y;
      }
    }
  }
#pragma unroll
  for (int mask = lanes / 2; mask > 0; mask /= 2) delta += __shfl_xor_sync(0xffffffff, delta, mask);
  if (lane == 0) {
    float *stats = static_cast<float *>(a.workspace[1]) + row;
    stats[0] = 0.f;
    stats[rows] = LSE == -FA_INFINITY ? copysignf(FA_INFINITY, -scale_of(a)) : -LSE / scale_of(a);
    stats[2 * rows] = -delta;
  }
}
// [end: delta]

// A stage of a ring of buffers, and the parity of the phase that its barriers are in.
template <int stages> struct Ring {
  int stage = 0, parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, 1) void backward_wgmma(const __grid_constant__ Maps maps,
                                                                      const fa_backward_args a, int heads,
                                                                      int *counter) {
  using C = Tile<d>;
  constexpr int Br = C::Br, Bc = C::Bc, Q_stages = C::Q_stages, dO_stages = C::dO_stages;

  // A step: a tile of queries that see one of an item's keys. Query i sees the keys up to i + shift. There is always one: the
  // last query sees every key.
  const int key_tiles = int(fa::ceil_div(a.Nk, Bc));
  const int shift = a.Nk - a.Nq, last = int(fa::ceil_div(a.Nq, Br)); // one past the last tile
  const auto next_of = [&](int tile) { return tile + 1 < last ? tile + 1 : 0; };

  // Every query head has items of its own. `heads` heads are a set (the last may have fewer): one tile of keys of each, then
  // the next, and so on. The tiles that take longest come first, so that none of them begins last: under a causal mask tile 0,
  // without one the last, which is masked if the keys end within it. If dQ is to be the same every time, the last is first under
  // a mask, too: an item waits for those with later keys of its head, which running CTAs have taken. Otherwise, without a mask,
  // a head's items begin with different queries: they don't all add to the same dQ at once.
  const auto work_of = [&](int index) -> Work {
    if (index >= key_tiles * a.B * a.H) return Work();
    const int set = index / (heads * key_tiles), in_set = index % (heads * key_tiles);
    const int of = min(heads, a.B * a.H - set * heads), head = set * heads + in_set % of, h = head % a.H;
    const int tile_k = a.causal && !a.deterministic ? in_set / of : key_tiles - 1 - in_set / of;
    Work work;
    work.head = head, work.h = h, work.hk = h / (a.H / a.Hkv), work.b = head / a.H;
    const int first = a.causal ? max(0, tile_k * Bc - shift) / Br : 0;
    work.j0 = tile_k * Bc, work.steps = last - first;
    work.start = a.causal || a.deterministic ? first : tile_k * (Bc / Br) % last;
    return work;
  };

  extern __shared__ __align__(1024) unsigned char smem_base[];
  const uint32_t smem = fa::smem_address(smem_base);
  // This CTA's item n: the only one, or what the producer has written: with items of one step up to four ahead of the warps that
  // send dQ, so four places would be too few. (The X-ray doesn't see it.) CTAs take items by a counter where an item waits for
  // those before it: CUDA does not promise to start CTAs by blockIdx.
  Work only, *works = reinterpret_cast<Work *>(smem_base + C::works);
  const auto item = [&](int n) -> const Work & { return C::persistent ? works[n % 8] : only; };
  const auto next_work = [&] { return work_of(atomicAdd(counter, 1)); };
  const int warpgroup = threadIdx.x / 128;
  // Named barriers: one of both warpgroups, and two of each other kind, + half
  constexpr int both = 1, own = 2, turn = 4, dS_full = 6, dQ_full = 8, dQ_empty = 10;

  // [region: barriers]
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Q_stages; ++stage)
      fa::mbarrier_init(smem + C::Q_full + 8 * stage, 1), fa::mbarrier_init(smem + C::Q_empty + 8 * stage, 256);
    for (int stage = 0; stage < dO_stages; ++stage)
      fa::mbarrier_init(smem + C::dO_full + 8 * stage, 1), fa::mbarrier_init(smem + C::dO_empty + 8 * stage, 256);
    for (int stage = 0; stage < C::K_stages; ++stage) fa::mbarrier_init(smem + C::K_empty + 8 * stage, 256);
    fa::mbarrier_init(smem + C::V_empty, 256);
    fa::fence_mbarrier_init();
    if (C::persistent || a.deterministic) works[0] = next_work();
  }
  __syncthreads(); // the mbarriers are initialised before any thread uses them, and the first item is known
  if constexpr (!C::persistent) only = a.deterministic ? works[0] : work_of(blockIdx.x);
  if (item(0).j0 < 0) return;
  // [end: barriers]

  if (warpgroup == 0) {
    fa::setmaxnreg_dec<24>();
    const int warp = __shfl_sync(0xffffffff, threadIdx.x / 32, 0); // by a shuffle, as `half` below by a vote
    if (threadIdx.x == 0) {
      // [region: producer]
      const int rows = a.B * a.H * last * Br; // the launcher has seen that it is an int
      const float *stats = static_cast<const float *>(a.workspace[1]) + rows;
      int n = 0, tile = item(0).start; // of item n
      Ring<Q_stages> Q;
      Ring<dO_stages> dO;
      for (int step = 0; step < item(n).steps; Q.next(), dO.next()) {
        const Work &work = item(n);
        const float *LSE = stats + (work.head * last + tile) * Br;
        // Q_i, and with the first one K, once both warpgroups have read what was there
        const uint32_t Q_full = smem + C::Q_full + 8 * Q.stage, dO_full = smem + C::dO_full + 8 * dO.stage;
        fa::mbarrier_wait(smem + C::Q_empty + 8 * Q.stage, Q.parity ^ 1);
        fa::mbarrier_arrive_expect_tx(Q_full, C::q_bytes + C::stats_bytes + (step == 0 ? C::kv_bytes : 0));
        if (step == 0) {
          const int stage = n % C::K_stages;
          fa::mbarrier_wait(smem + C::K_empty + 8 * stage, n / C::K_stages % 2 ^ 1);
          fa::cp_async_bulk_tensor_5d(smem + C::K + stage * C::kv_bytes, &maps.K, Q_full, 0, work.j0, 0, work.hk,
                                      work.b);
        }
        fa::cp_async_bulk_tensor_5d(smem + C::Q + Q.stage * C::q_bytes, &maps.Q, Q_full, 0, tile * Br, 0, work.h,
                                    work.b);
        fa::cp_async_bulk(smem + C::LSE + Q.stage * C::stats_bytes, LSE, C::stats_bytes, Q_full);
        // dO_i, and with the first one V
        const uint32_t dO_smem = smem + C::dO + dO.stage * C::q_bytes;
        fa::mbarrier_wait(smem + C::dO_empty + 8 * dO.stage, dO.parity ^ 1);
        fa::mbarrier_arrive_expect_tx(dO_full, C::q_bytes + C::stats_bytes + (step == 0 ? C::kv_bytes : 0));
        if (step == 0) {
          fa::mbarrier_wait(smem + C::V_empty, n % 2 ^ 1);
          fa::cp_async_bulk_tensor_5d(smem + C::V, &maps.V, dO_full, 0, work.j0, 0, work.hk, work.b);
        }
        fa::cp_async_bulk_tensor_5d(dO_smem, &maps.dO, dO_full, 0, tile * Br, 0, work.h, work.b);
        fa::cp_async_bulk(smem + C::delta + dO.stage * C::stats_bytes, LSE + rows, C::stats_bytes, dO_full);

        tile = next_of(tile), ++step;
        if constexpr (C::persistent) {
          if (step == work.steps && work.j0 >= 0) { // the next item, while the last steps of this one are computed
            ++n;
            works[n % 8] = next_work();
            tile = item(n).start, step = 0;
          }
        }
      }
      // [end: producer]
    } else if (warp == 1 || warp == 2) {
      // [region: send_dQ]
      const int half = warp - 1, mine = half * C::dQ_half;
      for (int n = 0; item(n).j0 >= 0; ++n) {
        const Work work = item(n);
        int tile = work.start;
        // Before this item's turn at a tile of queries come those with later keys that these queries see.
        const int later = (a.Nk - 1 - work.j0) / Bc, ahead = a.causal ? Br - 1 + shift - work.j0 : 1 << 30;
        for (int left = work.steps; left > 0; --left, tile = next_of(tile)) {
          // Nobody has set dQ_sum to 0: whoever is first at a tile stores, the others add. Its turn is 0, 1 while somebody is
          // storing, then 2; or, if dQ is to be the same every time, how many have been there.
          const auto turn = [&] {
            return static_cast<unsigned *>(a.workspace[1]) + (work.head * last + tile) * 2 + half;
          };
          const bool stored = !a.deterministic && fa::is_set_gpu(turn(), 2);
          bool first = false;
          fa::bar_sync(dQ_full + half, 128 + 32); // this half of dQ is written
          if (threadIdx.x % 32 == 0) {
            if (a.deterministic) { // when they have added theirs
              const unsigned before = min((tile * Br + ahead) / Bc, later);
              fa::await_gpu(turn(), before);
              first = before == 0;
            } else if (!stored) {
              first = atomicCAS(turn(), 0u, 1u) == 0;
              if (!first) fa::await_gpu(turn(), 2);
            }
            fa::fence_proxy_async_global();
            float *to = static_cast<float *>(a.workspace[0]) + int64_t(work.head * last + tile) * (Br * d) + mine;
            if (first)
              fa::cp_async_bulk_store(to, smem + C::dQ + 4 * mine, 4 * C::dQ_half);
            else
              fa::cp_reduce_async_bulk_add(to, smem + C::dQ + 4 * mine, 4 * C::dQ_half);
            fa::cp_async_bulk_commit_group();
            fa::cp_async_bulk_wait_group_read<0>();
          }
          __syncwarp(); // all lanes are here before the warp arrives, as one
          if (left > 1 || (C::persistent && item(n + 1).j0 >= 0)) fa::bar_arrive(dQ_empty + half, 128 + 32);
          if (first || (a.deterministic && threadIdx.x % 32 == 0)) {
            fa::cp_async_bulk_wait_group<0>(); // it is there
            __threadfence();
            atomicAdd(turn(), 1u);
          }
        }
        if (!C::persistent) break;
      }
      // [end: send_dQ]
    }
    return;
  }

  fa::setmaxnreg_inc<240>(); // 128 x 24 + 256 x 240 registers: the 384 x 168 of the launch, there are no more
  // Keys 64 half .. + 64 of the tile. By a vote, of whose result the compiler knows that it is the whole warp's: descriptors
  // of wgmma lie in uniform registers, and one that depended on threadIdx would be moved there before every product.
  const int half = __any_sync(0xffffffff, threadIdx.x >= 256);
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int g = lane / 4, t = lane % 4; // of an accumulator a lane holds rows 16 warp + g, + 8, columns 8n + 2t, + 1
  const bool elected = threadIdx.x % 128 == 0;
  // Item n, as far as steps need it. That is the same for all lanes, and the compiler is told so.
  const auto read_work = [&](int n) {
    const auto same = [](int x) { return __reduce_max_sync(0xffffffff, x); };
    Work work = item(n);
    if constexpr (C::persistent) work.j0 = same(work.j0), work.start = same(work.start), work.steps = same(work.steps);
    return work;
  };
  int n = 0;
  Work work = read_work(n);
  int tile = work.start, begin_step = 0, end_step = work.steps; // steps are counted through all items

  // [region: products]
  // acc (64 keys, Br) += A B^T: S^T of K_j and Q_i, dP^T of V_j and dO_i
  const auto product = [&](float (&acc)[Br / 8][4], uint32_t A_smem, uint32_t B_smem) {
    const uint64_t A = fa::k_major(A_smem + half * 64 * 128), B = fa::k_major(B_smem);
#pragma unroll
    for (int k = 0; k < d / 16; ++k)
      fa::wgmma_mma_async<T, 0, 0>(acc, A + fa::k_major_step(k, Bc), B + fa::k_major_step(k, Br), true);
    fa::wgmma_commit_group();
  };
  // Fragment k of an operand A: two neighbouring accumulators, rounded to 16 bits. The same lane holds the same elements.
  const auto pack = [](uint32_t (&A)[4], int k, const float (&acc)[Br / 8][4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) A[e] = fa::pack2<T>(acc[2 * k + e / 2][e % 2 * 2], acc[2 * k + e / 2][e % 2 * 2 + 1]);
  };
  // [end: products]

  // [region: scores]
  // P^T = exp2(scale_log2 (S^T - LSE / scale)) in the place of S^T - LSE / scale. A query is a column here.
  float S_reg[Br / 8][4];
  const float scale_log2 = scale_of(a) * fa::log2_e;
  const auto scores = [&](int i0) {
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (d == 64) // as one statement on one register: of two ptxas makes copies of S, and spills
          asm("mul.f32 %0, %0, %1;\nex2.approx.ftz.f32 %0, %0;" : "+f"(S_reg[n][e]) : "f"(scale_log2));
        else
          S_reg[n][e] = fa::ex2_approx_ftz(S_reg[n][e] * scale_log2);
      }
    }
    const int j0 = work.j0;
    if (j0 + Bc > a.Nk || (a.causal && j0 + Bc - 1 > i0 + shift)) { // something here is out of sight
      // Of element 0 of the first fragment: keys from its own on, and how many its query sees beyond its own.
      const int j = j0 + 64 * half + 16 * warp + g, left = a.Nk - j, ahead = i0 + 2 * t + shift - j;
#pragma unroll
      for (int n = 0; n < Br / 8; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = e / 2 * 8, query = 8 * n + e % 2; // from element 0's on
          if (key >= left || (a.causal && key - query > ahead)) S_reg[n][e] = 0.f;
        }
      }
    }
  };
  // [end: scores]

  constexpr int F = Br / 16; // fragments A of P^T or dS^T
  // dS is formed from P as it was before rounding. With d = 64 there are registers for that if P's last fragments are
  // rounded after dS only, and their part of dV comes with dK: so many come before, with dP.
  constexpr int early = d == 64 ? 5 : F;
  uint32_t P_reg[F][4], dS_reg[F][4];
  float dP_reg[Br / 8][4];
  float dK_reg[d / 8][4] = {}, dV_reg[d / 8][4] = {}; // (64 keys, d) of this warpgroup, dK without scale
  const auto pack_P = [&] {
#pragma unroll
    for (int k = 0; k < early; ++k) pack(P_reg[k], k, S_reg);
  };

  // [region: turns]
  // A token goes round: who holds it starts products, and the other one computes. It keeps them together, too: nobody
  // arrives at dS_full a second time before the other one has been there.
  const auto take_turn = [&] { fa::bar_sync(turn + half, 256); };
  const auto pass_turn = [&] { fa::bar_arrive(turn + 1 - half, 256); };
  // [end: turns]

  Ring<Q_stages> Q, Q_next;
  Ring<dO_stages> dO;
  // The sums of S begin with -LSE / scale, those of dP with -delta: one number per query, which lies in shared memory.
  const auto begin = [&](float (&acc)[Br / 8][4], int stats) {
    const float *stats_smem = reinterpret_cast<const float *>(smem_base + stats) + 2 * t;
#pragma unroll
    for (int n = 0; n < Br / 8; ++n) {
      const float2 x = *reinterpret_cast<const float2 *>(stats_smem + 8 * n);
      acc[n][0] = acc[n][2] = x.x, acc[n][1] = acc[n][3] = x.y;
    }
    fa::pin(acc);
  };

  fa::mbarrier_wait(smem + C::Q_full, 0); // K_j and the first Q_i
  begin(S_reg, C::LSE);
  fa::wgmma_fence();
  product(S_reg, smem + C::K, smem + C::Q);
  fa::wgmma_wait_group<0>();
  scores(tile * Br);
  pack_P();
  fa::pin(dK_reg), fa::pin(dV_reg);
  fa::mbarrier_wait(smem + C::dO_full, 0); // V_j and the first dO_i
  if (half == 1) pass_turn();              // warpgroup 0 is first

  // This half of dQ goes to the warp that sends it. With d = 128 the fence stands right behind the stores, and the warp is told
  // in front of the next products; with d = 64 both come when those have started: sooner took up to 6 % longer under a mask.
  constexpr bool sooner = d == 128;
  const auto hand_over = [&] {
    if constexpr (!sooner) fa::fence_proxy_async();
    fa::bar_arrive(dQ_full + half, 128 + 32);
  };

  // [region: tile_loop]
  // A step. P and dO are there, no product is under way. An item's last step starts S of the next item. A CTA's only item has
  // nothing to start there, and its last step is compiled apart: with S in a branch ptxas would let no two products overlap.
  const auto advance = [&](int step, auto has_next) {
    constexpr bool next = decltype(has_next)::value;
    const bool begins = C::persistent && step == begin_step, ends = C::persistent && step + 1 == end_step;
    const uint32_t Q_smem = smem + C::Q + Q.stage * C::q_bytes, dO_smem = smem + C::dO + dO.stage * C::q_bytes;
    const uint32_t K_smem = smem + C::K + n % C::K_stages * C::kv_bytes;
    const uint32_t dS_smem = smem + C::dS + step % 2 * C::dS_bytes, dO_empty = smem + C::dO_empty + 8 * dO.stage;

    // [region: dP]
    // (1) dP - delta, and dV += P^T dO, with d = 64 the first queries' part
    begin(dP_reg, C::delta + dO.stage * C::stats_bytes);
    if (sooner && step > 0) hand_over(); // of the step before
    take_turn();
    fa::wgmma_fence();
    product(dP_reg, smem + C::V, dO_smem);
#pragma unroll
    for (int k = 0; k < early; ++k)
      fa::wgmma_mma_async<T, 1>(dV_reg, P_reg[k], fa::mn_major(dO_smem, Br) + fa::mn_major_step(k), true);
    fa::wgmma_commit_group();
    pass_turn();
    // [end: dP]

    if (!sooner && step > 0) hand_over();
    if (begins) { // where dS goes dK and dV of the item before may still lie
      if (elected) fa::cp_async_bulk_wait_group_read<0>();
      fa::bar_sync(own + half, 128);
    }

    // [region: dS]
    // (2) dS = P o (dP - delta), for dK in registers, for dQ in shared memory. P is S_reg's, which isn't rounded.
    fa::wgmma_wait_group<1>(); // dP is there
    if (ends) fa::mbarrier_arrive(smem + C::V_empty);
    const uint32_t dS_row = dS_smem + half * Br * 128 + (lane % 8 + lane / 16 * 8) * 128 +
                            ((2 * warp + lane / 8 % 2) ^ lane % 8) * 16; // stmatrix
#pragma unroll
    for (int k = 0; k < F; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float *dP = dP_reg[2 * k + e / 2] + e % 2 * 2;
        const float *P = S_reg[2 * k + e / 2] + e % 2 * 2;
        dS_reg[k][e] = fa::pack2<T>(P[0] * dP[0], P[1] * dP[1]);
      }
      if (k >= early) pack(P_reg[k], k, S_reg);
      fa::stmatrix_x4_trans(dS_row + 16 * k * 128, dS_reg[k]); // queries by keys
    }
    fa::fence_proxy_async();
    fa::bar_arrive(dS_full + 1 - half, 256); // the other one may read this half of dS
    // [end: dS]

    // [region: next_S]
    // (3) S of the next step comes first: its exponentials are the longest work. LSE is read in front of the turn, for which
    // the warpgroup waits anyway.
    if constexpr (next) {
      Q_next.next();
      fa::mbarrier_wait(smem + C::Q_full + 8 * Q_next.stage, Q_next.parity);
    }
    fa::wgmma_wait_group<0>(); // dV has been added
    if (ends) work = read_work(++n);
    if constexpr (next) begin(S_reg, C::LSE + Q_next.stage * C::stats_bytes);
    take_turn();
    fa::wgmma_fence();
    if constexpr (next)
      product(S_reg, smem + C::K + n % C::K_stages * C::kv_bytes, smem + C::Q + Q_next.stage * C::q_bytes);
    // [end: next_S]

    // [region: dK]
    // (4) what is left of dV, and dK += dS^T Q
#pragma unroll
    for (int k = early; k < F; ++k)
      fa::wgmma_mma_async<T, 1>(dV_reg, P_reg[k], fa::mn_major(dO_smem, Br) + fa::mn_major_step(k), true);
#pragma unroll
    for (int k = 0; k < F; ++k)
      fa::wgmma_mma_async<T, 1>(dK_reg, dS_reg[k], fa::mn_major(Q_smem, Br) + fa::mn_major_step(k), true);
    fa::wgmma_commit_group();
    // [end: dK]

    // [region: dQ]
    // (5) dQ^T (d, Br) = K^T dS^T, half of it: 64 columns of d, or all of them for half of the queries
    fa::bar_sync(dS_full + half, 256); // the other half of dS is written
    float dQ_reg[C::dQ_columns / 8][4];
    {
      fa::wgmma_fence();
      const uint64_t K = fa::mn_major(K_smem + (d == 128 ? half * Bc * 128 : 0), Bc);
      const uint64_t dS = fa::k_major(dS_smem + (d == 128 ? 0 : half * C::dQ_columns * 128));
#pragma unroll
      for (int k = 0; k < Bc / 16; ++k)
        fa::wgmma_mma_async<T, 1, 0>(dQ_reg, K + fa::mn_major_step(k), dS + fa::k_major_step(k, Br), k > 0);
      fa::wgmma_commit_group();
    }
    if (next || half == 0) pass_turn(); // with one item nobody waits for the final one
    // [end: dQ]

    tile = ends ? work.start : next_of(tile);

    // [region: next_scores]
    // (6) P of the next step
    if constexpr (next) {
      fa::wgmma_wait_group<2>(); // S is there
      // Delta has been read and, if all of it came before, dV added: with d = 64 that is known a little later. Every thread
      // says so itself: that is what compute-sanitizer can follow.
      if constexpr (early == F) fa::mbarrier_arrive(dO_empty);
      scores(tile * Br);
      dO.next();
      // Here rather than in front of dP: it keeps ptxas from moving the wait for dQ above the exponentials.
      fa::mbarrier_wait(smem + C::dO_full + 8 * dO.stage, dO.parity);
    }
    // [end: next_scores]

    // [region: reduce]
    // (7) dQ to shared memory, for the warp that sends it
    fa::wgmma_wait_group<0>(); // dQ is there, dK and dV have been added
    if constexpr (next) pack_P();
    if (next && early < F) fa::mbarrier_arrive(dO_empty);
    if (step > 0) fa::bar_sync(dQ_empty + half, 128 + 32); // the previous dQ has left shared memory
    if (next) fa::mbarrier_arrive(smem + C::Q_empty + 8 * Q.stage);
    float *dQ_smem = reinterpret_cast<float *>(smem_base + C::dQ) + half * C::dQ_half + threadIdx.x % 128 * 4;
#pragma unroll
    for (int n = 0; n < C::dQ_columns / 8; ++n) fa::store4(dQ_smem + n * 128 * 4, dQ_reg[n]);
    if constexpr (sooner) fa::fence_proxy_async();
    // [end: reduce]
    Q.stage = Q_next.stage;
  };
  // [end: tile_loop]

  // [region: epilogue]
  // dK and dV of an item to shared memory, as panels of 64 rows and 64 columns, and from there to HBM: by way of this
  // warpgroup's panel of the next dS, which nobody reads by now, or, where a CTA has one item only, of K and V.
  const auto epilogue = [&] {
    uint32_t dK_smem = smem + C::dS + end_step % 2 * C::dS_bytes + half * Br * 128, dV_smem = dK_smem + 64 * d * 2;
    if constexpr (C::persistent) {
      fa::mbarrier_arrive(smem + C::K_empty + 8 * ((n - 1) % C::K_stages)); // n is the next item
    } else {
      fa::bar_sync(both, 256); // both warpgroups have read K and V
      dK_smem = smem + C::K + half * 64 * d * 2, dV_smem = smem + C::V + half * 64 * d * 2;
    }
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      uint32_t dK_out[4], dV_out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float *dK = dK_reg[2 * k + e / 2] + e % 2 * 2, *dV = dV_reg[2 * k + e / 2] + e % 2 * 2;
        dK_out[e] = fa::pack2<T>(dK[0] * a.scale, dK[1] * a.scale), dV_out[e] = fa::pack2<T>(dV[0], dV[1]);
      }
      const int row = 16 * warp + lane % 16, chunk = (k % 4 * 2 + lane / 16) ^ lane % 8;
      fa::stmatrix_x4(dK_smem + k / 4 * 64 * 128 + row * 128 + chunk * 16, dK_out);
      fa::stmatrix_x4(dV_smem + k / 4 * 64 * 128 + row * 128 + chunk * 16, dV_out);
    }
    fa::fence_proxy_async();
    fa::bar_sync(own + half, 128); // all of this half is written before it is sent
    if (elected) {
      const Work &done = item(n - 1);
      fa::cp_async_bulk_tensor_5d(&maps.dK, dK_smem, 0, done.j0 + 64 * half, 0, done.h, done.b);
      fa::cp_async_bulk_tensor_5d(&maps.dV, dV_smem, 0, done.j0 + 64 * half, 0, done.h, done.b);
      fa::cp_async_bulk_commit_group();
    }
  };
  // [end: epilogue]

  // [region: items]
  while (true) {
#pragma unroll 1
    for (int step = begin_step; step < (C::persistent ? end_step : end_step - 1); ++step)
      advance(step, std::true_type());
    if constexpr (!C::persistent) advance(end_step - 1, std::false_type());
    const bool over = !C::persistent || work.j0 < 0;
    if (over) hand_over();
    epilogue();
    if (over) break;
    begin_step = end_step, end_step += work.steps;
#pragma unroll
    for (int n = 0; n < d / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) dK_reg[n][e] = dV_reg[n][e] = 0.f;
    }
  }
  if (elected) fa::cp_async_bulk_wait_group_read<0>(); // shared memory stays until it has been read
  if (C::persistent && half == 0) take_turn();         // of a step that doesn't come
  // [end: items]
}

// [region: finish]
// After everything else: dQ (B, H, Nq, D) = scale * dQ_sum, a CTA per tile, from the last to the first: the L2 still holds the
// last ones. Each thread reads accumulators as it had them above, and whole rows leave through shared memory.
template <int d, typename T> __global__ __launch_bounds__(256) void finish(const fa_backward_args a) {
  using C = Tile<d>;
  constexpr int Br = C::Br, ld = d + 8; // row length in shared memory: pairs of rows begin in different banks
  __shared__ __align__(16) T dQ_smem[Br * ld];
  const int index = gridDim.x - 1 - blockIdx.x, tiles = int(padded<d>(a.Nq) / Br);
  const int i0 = index % tiles * Br, head = index / tiles;
  const int half = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float *dQ_sum = static_cast<const float *>(a.workspace[0]) + int64_t(index) * Br * d + half * C::dQ_half;
  // Queries that no key is visible to: nobody has stored a dQ.
  const bool none = static_cast<const unsigned *>(a.workspace[1])[index * 2 + half] == 0;
  T *to = dQ_smem + ((d == 128 ? 0 : half * C::dQ_columns) + 2 * t) * ld + (d == 128 ? half * 64 : 0) + 16 * warp + g;
#pragma unroll
  for (int n = 0; n < C::dQ_columns / 8; ++n) {
    float x[4] = {};
    if (!none) fa::load4(x, dQ_sum + (n * 128 + threadIdx.x % 128) * 4);
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(8 * n + e % 2) * ld + e / 2 * 8] = T(x[e] * a.scale);
  }
  __syncthreads(); // all of the tile is written before any thread reads it
  T *dQ = static_cast<T *>(a.dQ) + head / a.H * a.dQ_stride[0] + head % a.H * a.dQ_stride[1];
#pragma unroll
  for (int chunk = threadIdx.x; chunk < Br * d / 8; chunk += 256) {
    const int row = chunk / (d / 8), col = chunk % (d / 8) * 8;
    if (i0 + row < a.Nq)
      *reinterpret_cast<uint4 *>(dQ + (i0 + row) * a.dQ_stride[2] + col) =
          *reinterpret_cast<const uint4 *>(dQ_smem + row * ld + col);
  }
}
// [end: finish]

// [region: add_heads]
// After finish, where query heads share K and V: dK and dV (B, Hkv, Nk, D) = the sum over the heads of a group, in their
// order. A row is d elements of dK and d of dV, and has d / 4 lanes: 8 elements per lane.
template <int d, typename T> __global__ __launch_bounds__(256) void add_heads(const fa_backward_args a) {
  constexpr int lanes = d / 4, of_dK = d / 8;
  const int row = int(blockIdx.x) * (256 / lanes) + threadIdx.x / lanes, lane = threadIdx.x % lanes;
  const int j = row % a.Nk, head = row / a.Nk, hk = head % a.Hkv, b = head / a.Hkv, group = a.H / a.Hkv;
  if (b >= a.B) return;
  const uint4 *from = static_cast<const uint4 *>(a.workspace[2]) + (int64_t(head) * group * a.Nk + j) * lanes + lane;
  float2 sum[4] = {};
#pragma unroll 4
  for (int h = 0; h < group; ++h) {
    const uint4 x = from[int64_t(h) * a.Nk * lanes];
    const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const float2 y = fa::unpack2<T>(pairs[c]);
      sum[c].x += y.x, sum[c].y += y.y;
    }
  }
  T *to = lane < of_dK ? static_cast<T *>(a.dK) + b * a.dK_stride[0] + hk * a.dK_stride[1] + j * a.dK_stride[2]
                       : static_cast<T *>(a.dV) + b * a.dV_stride[0] + hk * a.dV_stride[1] + j * a.dV_stride[2];
  uint4 out;
  out.x = fa::pack2<T>(sum[0].x, sum[0].y), out.y = fa::pack2<T>(sum[1].x, sum[1].y);
  out.z = fa::pack2<T>(sum[2].x, sum[2].y), out.w = fa::pack2<T>(sum[3].x, sum[3].y);
  reinterpret_cast<uint4 *>(to)[lane % of_dK] = out;
}
// [end: add_heads]

// [region: launcher]
template <int d, typename T> cudaError_t launch(const fa_backward_args &a, cudaStream_t stream) {
  using C = Tile<d>;
  const int64_t rows = int64_t(a.B) * a.H * padded<d>(a.Nq), items = fa::ceil_div(a.Nk, C::Bc) * a.B * a.H;
  // Without a mask a set is one head. With one it is as many as have their Q, dO and dQ_sum in 16 MiB of the L2, at most 8: more
  // were slower where sequences are short. Of long ones it holds no head: there the items of 16 heads that begin at the same
  // time read the same rows at the same time, but in one order they would wait for others of their head. The longer they run,
  // the further they drift apart, and the L2 has to hold what lies between them, for every head of the set: past 32768 queries
  // a set has fewer heads, those with 2^19 queries together.
  int64_t heads = a.causal ? min(int64_t(8), (16 << 20) / (int64_t(8) * a.Nq * d)) : 1;
  if (a.causal && !a.deterministic && (heads == 0 || a.Nk > 16384)) heads = min(16, (1 << 19) / a.Nq);
  heads = max(int64_t(1), min(heads, int64_t(a.B) * a.H));
  int64_t ctas = items; // one for each, or, where they take one after another, one for each SM
  if constexpr (C::persistent) {
    int device, sms;
    if (cudaError_t error = cudaGetDevice(&device)) return error;
    if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
    ctas = min(items, int64_t(sms));
  }
  int *counter = static_cast<int *>(a.workspace[1]) + rows - 1; // of items taken: a 0 of prepare's that no tile uses
  if (items * C::Bc > fa::max_grid_x || rows > fa::max_grid_x) return cudaErrorInvalidValue;
  // Each query head has a dK and a dV of its own. Where heads share K and V they are in the workspace, in 16 bits: a row is
  // d elements of dK, then d of dV.
  fa_backward_args own = a;
  if (a.H > a.Hkv) {
    own.dK = a.workspace[2], own.dV = static_cast<T *>(own.dK) + d;
    own.dK_stride[2] = own.dV_stride[2] = 2 * d;
    own.dK_stride[1] = own.dV_stride[1] = a.Nk * own.dK_stride[2];
    own.dK_stride[0] = own.dV_stride[0] = a.H * own.dK_stride[1];
  }
  Maps maps;
  if (cudaError_t error = fa::encode_tile(&maps.Q, a.dtype, a.Q, a.Q_stride, a.B, a.H, a.Nq, d, C::Br)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.dO, a.dtype, a.dO, a.dO_stride, a.B, a.H, a.Nq, d, C::Br)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.K, a.dtype, a.K, a.K_stride, a.B, a.Hkv, a.Nk, d, C::Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.V, a.dtype, a.V, a.V_stride, a.B, a.Hkv, a.Nk, d, C::Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.dK, a.dtype, own.dK, own.dK_stride, a.B, a.H, a.Nk, d, 64))
    return error;
  if (cudaError_t error = fa::encode_tile(&maps.dV, a.dtype, own.dV, own.dV_stride, a.B, a.H, a.Nk, d, 64))
    return error;
  if (cudaError_t error = fa::allow_smem(backward_wgmma<d, T>, C::smem_bytes)) return error;
  prepare<d, T><<<unsigned(rows * (d / 16) / 256), 256, 0, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  backward_wgmma<d, T><<<unsigned(ctas), C::threads, C::smem_bytes, stream>>>(maps, a, int(heads), counter);
  if (cudaError_t error = cudaGetLastError()) return error;
  finish<d, T><<<unsigned(rows / C::Br), 256, 0, stream>>>(a);
  if (cudaError_t error = cudaGetLastError()) return error;
  const int64_t rows_of_keys = int64_t(a.B) * a.Hkv * a.Nk;
  if (a.H > a.Hkv) add_heads<d, T><<<unsigned(fa::ceil_div(rows_of_keys * (d / 4), 256)), 256, 0, stream>>>(a);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_backward_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_backward_args &a = fa::backward(args);
  const bool aligned = fa::half_rows_aligned16(a.Q, a.Q_stride) && fa::half_rows_aligned16(a.K, a.K_stride) &&
                       fa::half_rows_aligned16(a.V, a.V_stride) && fa::half_rows_aligned16(a.O, a.O_stride) &&
                       fa::half_rows_aligned16(a.dO, a.dO_stride) && fa::half_rows_aligned16(a.dQ, a.dQ_stride) &&
                       fa::half_rows_aligned16(a.dK, a.dK_stride) && fa::half_rows_aligned16(a.dV, a.dV_stride);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.window || a.lengths || a.pages || a.q_starts || !aligned)
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
