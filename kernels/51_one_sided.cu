// 51_one_sided: attention across GPUs in one kernel: CTAs fetch the other ranks' keys
//
// idea:      Some CTAs first copy the other ranks' K and V into this GPU's memory by TMA, each tile once, and set a flag for
//            each; the others start with their own keys and go on with a tile of another rank as soon as its flag is set.
// changed:   against 32_ping_pong: copiers, flags between CTAs and between GPUs, and the tiles of other ranks behind a query
//            tile's own, all from the last on; K is fetched with its V, as one flag stands for both; thread 0 chooses the query
//            tiles and fetches Q, too. The consumers are 32's, repeated so that this file is complete by itself; they differ in
//            where a piece's rows and keys begin and end; tests/run/test_one_sided.py holds all else equal
// op:        one_sided
// features:  causal, gqa, peers
// workspace: counter (1)
// inputs:    Q (B,H,N,D), K V (B,Hkv,N,D) of this rank, fp16 or bf16; K V of the other ranks, contiguous; flags. with more than one rank N is a
//            multiple of 128; under a causal mask of 256, the rows dealt out zigzag: of 2 * ranks pieces, rank r has piece r from both ends
// outputs:   O (B,H,N,D) as Q, LSE (B,H,N) fp32
// dtypes:    fp16, bf16
// D:         64, 128
// tiles:     D=64:  Br=192 Bc=128 threads=512 smem=193 KB CTAs/SM=1
//            D=128: Br=128 Bc=128 threads=384 smem=225 KB CTAs/SM=1
// arch:      sm_90a
// paper:     ParallelKittens (arXiv 2511.13940); Ring Attention with Blockwise Transformers (arXiv 2310.01889)
#include <fa/bulk.cuh>
#include <fa/flags.cuh>
#include <fa/half.cuh>
#include <fa/launch.cuh>
#include <fa/math.cuh>
#include <fa/peers.cuh>
#include <fa/sm90.cuh>
#include <fa/wgmma.cuh>

// [region: tile]
template <int d> struct Tile {
  static constexpr int consumers = d == 64 ? 3 : 2;     // warpgroups that multiply
  static constexpr int threads = 128 * (1 + consumers); // the first warpgroup fetches, and sends O
  static constexpr int Br = 64 * consumers;             // query rows per CTA, 64 per consumer: the rows of one wgmma
  static constexpr int Bc = 128;                        // keys per tile
  static constexpr int K_stages = d == 64 ? 5 : 3;      // buffers for K_j
  static constexpr int V_stages = d == 64 ? 4 : 2;      // buffers for V_j
  static constexpr int registers = d == 64 ? 160 : 232; // of a consumer's thread; of a producer's:
  static constexpr int producer_registers = d == 64 ? 32 : 40;
  static constexpr int Q_bytes = 2 * Br * d;    // of each of two Q_smem, whose place O_i takes
  static constexpr int tile_bytes = 2 * Bc * d; // of K_j, and of V_j
  static constexpr int K_at = 2 * Q_bytes, V_at = K_at + K_stages * tile_bytes;
  static constexpr int barriers_at = V_at + V_stages * tile_bytes;
  static constexpr int work_at = barriers_at + 16 * (3 + K_stages + V_stages);
  static constexpr int votes_at = work_at + 2 * 20; // behind two of Work
  static constexpr int slots = 98304 / tile_bytes;  // pairs of a K_j and a V_j on their way, in a CTA that copies
  static constexpr int copied_at = votes_at + 8 * consumers;
  static constexpr int smem_bytes = copied_at + 8 * slots;
  static_assert(2 * slots * tile_bytes <= barriers_at, "too many slots: tiles being copied lie where Q, K and V will");
  static_assert(K_stages > 1, "S of the next tile is started while K_j is kept: there have to be two K_stages");
  static_assert(V_stages % 2 == 0,
                "neighbouring tiles vote at places stage % 2: the number of V_stages has to be even");
  static_assert(Bc % 16 == 0, "O += P V goes in steps of 16 keys: Bc has to be a multiple of 16");
  static_assert(fa::whole_swizzles(Q_bytes, K_at, tile_bytes),
                "TMA and wgmma swizzle 1024 bytes at a time: tiles have to begin at multiples of 1024");
  static_assert(smem_bytes <= fa::smem_of_cta, "a CTA has 227 KB of shared memory: too few for these tiles");
  static_assert(128 * (producer_registers + consumers * registers) <= threads * fa::registers_at_launch(threads),
                "the consumers take more registers than the producer gives back: they would wait for ever");
};
// [end: tile]

// [region: schedule]
// Under a causal mask each of several ranks has `count` = 2 pieces of the sequence, which lie far apart, else one: of each head `rows` rows,
// which are `tiles` tiles. A piece sees `keys` keys, of which the first `far` are other ranks', so that they come last: own
// key j is key far + j. Row i of the piece sees those up to i + shift. Its tiles of `heads` heads are worked on at a time.
struct Pieces {
  int count, rows, tiles, far[2], keys[2], shift[2], heads[2];
};

// What this rank sees of the other ranks' keys, in the order of the ring: of the first `early` ranks (rank - 1, rank - 2, ..)
// `early_rows` rows each, of the others all. They lie one behind the other in near_K, the first at its end, and are copied
// for `heads` heads of K and V at a time.
struct Far {
  int early, early_rows, heads, rows, tiles, all; // rows: in all; their tiles, and those of all heads
};

// Rows i0 .. i0 + Br of a piece of head (b, h), and the tiles of keys they see: j_last, j_last - Bc, .. 0; 0 even if no row
// sees it. i0 < 0: no query tile is left.
struct Work {
  int b, h, piece, i0, j_last;
};

// Query tile `index` of all. The longest under a causal mask first: the late pieces of all heads, of each head the last
// queries. The shortest tiles come last, so that all CTAs end at about the same time. Past the last one there is none.
template <int Br, int Bc>
__device__ __forceinline__ Work find_work(int index, const fa_peers_args &a, const Pieces &pieces) {
  if (index >= a.B * a.H * pieces.count * pieces.tiles) return {0, 0, 0, -1, 0};
  const int of_piece = a.B * a.H * pieces.tiles, piece = pieces.count - 1 - index / of_piece;
  const int most = pieces.heads[piece], keys = pieces.keys[piece];
  const int group = index % of_piece / (most * pieces.tiles), in_group = index % of_piece % (most * pieces.tiles);
  const int heads = min(most, a.B * a.H - group * most); // the last group may have fewer
  const int head = group * most + in_group % heads, i0 = (pieces.tiles - 1 - in_group / heads) * Br;
  const int last_key = a.causal ? max(min(i0 + Br + pieces.shift[piece], keys) - 1, 0) : keys - 1; // that any row sees
  return {head / a.H, head % a.H, piece, i0, last_key / Bc * Bc};
}
// [end: schedule]

struct Maps {
  CUtensorMap Q[2], K, V, O[2], near_K, near_V; // how TMA finds their tiles; Q and O by piece
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

// [region: copy]
// Tile `index` of all that this rank sees of the others, in the order in which they are wanted: whose it is, and where.
struct Remote {
  int rank;
  int64_t from, to; // in tiles: in its rank's K, in near_K
};

template <int Bc> __device__ __forceinline__ Remote find_remote(int index, const fa_peers_args &a, const Far &far) {
  const int whole = a.Nk / Bc, part = far.early_rows / Bc, parts = far.early * part, tiles = far.tiles;
  const int group = index / (far.heads * tiles), in_group = index % (far.heads * tiles);
  const int heads = min(far.heads, a.B * a.Hkv - group * far.heads);
  const int head = group * far.heads + in_group % heads, t = in_group / heads; // t = 0 is the head's first
  const int step = t < parts ? t / part : far.early + (t - parts) / whole;     // of the ring
  const int from = t < parts ? part - 1 - t % part : whole - 1 - (t - parts) % whole;
  return {(a.rank - 1 - step + a.ranks) % a.ranks, int64_t(head) * whole + from, int64_t(head) * tiles + tiles - 1 - t};
}

// One thread of each copier: all tiles of other ranks pass through its CTA's shared memory, `slots` of them at a time.
// It waits for no CTA of this GPU, so that it comes to its end whatever the others do. But while it waits for a late rank's
// keys, tiles of other ranks that have landed in its slots wait with it.
template <int d> __device__ __forceinline__ void copy_remote(const fa_peers_args &a, const Far &far, uint32_t smem) {
  constexpr int slots = Tile<d>::slots, tile_bytes = Tile<d>::tile_bytes, Bc = Tile<d>::Bc;
  const uint32_t full = smem + Tile<d>::copied_at;
  const int mine =
      (far.all - int(blockIdx.x) + a.copiers - 1) / a.copiers; // tiles blockIdx.x, blockIdx.x + copiers, ..
  const auto find = [&](int i) { return find_remote<Bc>(blockIdx.x + i * a.copiers, a, far); };
  uint32_t ready = 0; // a bit for each rank
  const auto ask = [&](int i) {
    const Remote tile = find(i);
    if (!(ready >> tile.rank & 1)) {
      fa::await_sys(a.signals[a.rank] + tile.rank, a.epoch); // its K and V are there
      fa::fence_proxy_async_global();
      ready |= 1u << tile.rank;
    }
    const uint32_t slot = smem + i % slots * 2 * tile_bytes, barrier = full + i % slots * 8;
    fa::mbarrier_arrive_expect_tx(barrier, 2 * tile_bytes);
    const int64_t at = tile.from * tile_bytes;
    fa::cp_async_bulk(slot, static_cast<const char *>(a.peer_K[tile.rank]) + at, tile_bytes, barrier);
    fa::cp_async_bulk(slot + tile_bytes, static_cast<const char *>(a.peer_V[tile.rank]) + at, tile_bytes, barrier);
  };

  for (int i = 0; i < min(slots, mine); ++i) ask(i);
  for (int i = 0; i <= mine; ++i) {
    if (i < mine) {
      fa::mbarrier_wait(full + i % slots * 8, i / slots & 1);
      const uint32_t slot = smem + i % slots * 2 * tile_bytes;
      const int64_t at = find(i).to * tile_bytes;
      fa::cp_async_bulk_store(static_cast<char *>(a.near_K) + at, slot, tile_bytes);
      fa::cp_async_bulk_store(static_cast<char *>(a.near_V) + at, slot + tile_bytes, tile_bytes);
      fa::cp_async_bulk_commit_group();
      if (i == 0) continue;
      fa::cp_async_bulk_wait_group<1>(); // the tile before is there, and its slot is free
    } else {
      fa::cp_async_bulk_wait_group<0>();
    }
    if (i > 0) fa::publish_gpu(a.arrived + blockIdx.x + (i - 1) * a.copiers, a.epoch);
    if (i > 0 && i - 1 + slots < mine) ask(i - 1 + slots);
  }
  for (int r = 0; r < a.ranks; ++r) { // all reads of the others' tensors are done
    if (r != a.rank) fa::publish_sys(a.signals[r] + fa::done_signal(a.rank, blockIdx.x), a.epoch);
  }
}

// Are all tiles of other ranks there? A copier sets its flags one after the other, so the last ones speak for all.
__device__ __forceinline__ bool all_copied(const fa_peers_args &a, int all) {
  for (int c = 1; c <= a.copiers && c <= all; ++c) {
    if (!fa::is_set_gpu(a.arrived + all - c, a.epoch)) return false;
  }
  fa::fence_proxy_async_global();
  return true;
}
// [end: copy]

// [region: signals]
// This rank's K and V are there: tells the others.
__device__ __forceinline__ void announce(const fa_peers_args &a) {
  for (int r = 0; r < a.ranks; ++r) {
    if (r != a.rank) fa::publish_sys(a.signals[r] + a.rank, a.epoch);
  }
}

// Waits until the others have read them: what follows this kernel may overwrite K and V.
__device__ __forceinline__ void settle(const fa_peers_args &a) {
  for (int r = 0; r < a.ranks; ++r) {
    for (int c = 0; c < a.copiers && r != a.rank; ++c)
      fa::await_sys(a.signals[a.rank] + fa::done_signal(r, c), a.epoch);
  }
}
// [end: signals]

template <int d, typename T>
__global__ __launch_bounds__(Tile<d>::threads, 1) void one_sided(const __grid_constant__ fa_peers_args a,
                                                                 const __grid_constant__ Maps maps,
                                                                 const __grid_constant__ Pieces pieces, Far far,
                                                                 float scale_log2) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br, tile_bytes = Tile<d>::tile_bytes, Q_bytes = Tile<d>::Q_bytes;
  constexpr int consumers = Tile<d>::consumers, K_stages = Tile<d>::K_stages, V_stages = Tile<d>::V_stages;

  extern __shared__ __align__(1024) unsigned char smem[];
  const uint32_t Q_smem = fa::smem_address(smem), K_smem = Q_smem + Tile<d>::K_at, V_smem = Q_smem + Tile<d>::V_at;
  const uint32_t Q_full = Q_smem + Tile<d>::barriers_at;
  const uint32_t Q_empty = Q_full + 16; // of two each: has landed; O_i has left its place
  const uint32_t O_full = Q_empty + 16; // O_i is in the place of Q_i
  const uint32_t K_full = O_full + 8, K_empty = K_full + 8 * K_stages; // per stage: has landed; has been read
  const uint32_t V_full = K_empty + 8 * K_stages, V_empty = V_full + 8 * V_stages;
  Work *work_smem = reinterpret_cast<Work *>(smem + Tile<d>::work_at); // of the query tiles in Q_smem
  int *votes_smem = reinterpret_cast<int *>(smem + Tile<d>::votes_at); // (consumers, 2)

  // [region: barriers]
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0 && a.steps & fa::announce) announce(a);
    constexpr int warps = 4 * consumers; // that read K_j and V_j, and write O_i
#pragma unroll
    for (int s = 0; s < 2; ++s) fa::mbarrier_init(Q_full + 8 * s, 1), fa::mbarrier_init(Q_empty + 8 * s, 1);
    fa::mbarrier_init(O_full, warps);
#pragma unroll
    for (int s = 0; s < K_stages; ++s) fa::mbarrier_init(K_full + 8 * s, 1), fa::mbarrier_init(K_empty + 8 * s, warps);
#pragma unroll
    for (int s = 0; s < V_stages; ++s) fa::mbarrier_init(V_full + 8 * s, 1), fa::mbarrier_init(V_empty + 8 * s, warps);
#pragma unroll
    for (int s = 0; s < Tile<d>::slots; ++s) fa::mbarrier_init(Q_smem + Tile<d>::copied_at + 8 * s, 1);
    fa::fence_mbarrier_init();
  }
  if (threadIdx.x < 2 * consumers) votes_smem[threadIdx.x] = 0;
  __syncthreads(); // the barriers are there before anyone uses one
  // [end: barriers]

  // The same for all lanes of a warp, and the compiler is told so: descriptors of wgmma then need no copy per product.
  const int warpgroup = __reduce_max_sync(0xffffffff, threadIdx.x) / 128;
  if (warpgroup == 0) {
    // [region: producer]
    // The first CTAs copy before they take part: GPUs start them before any other (CUDA does not promise it), and nothing they
    // wait for is done by a CTA of this GPU, so that whoever waits for a tile gets it.
    if (threadIdx.x == 0 && blockIdx.x < a.copiers) copy_remote<d>(a, far, Q_smem);
    __syncwarp(); // the copies are done before any lane gives its registers away
    fa::setmaxnreg_dec<Tile<d>::producer_registers>();
    // One thread sends O_i out while the consumers work on the next query tile; then its place is free for another Q.
    if (threadIdx.x == 32) {
      for (Ring<2> Q_ring;; Q_ring.next()) {
        const uint32_t barrier = 8 * Q_ring.stage;
        fa::mbarrier_wait(Q_full + barrier, Q_ring.parity);
        const Work work = work_smem[Q_ring.stage];
        if (work.i0 < 0) return;
        // Parity: a phase per query tile, none missed: the next O is stored only after the Q behind it has landed in this O's place.
        fa::mbarrier_wait(O_full, Q_ring.stage);
#pragma unroll 1
        for (int w = 0; w < consumers; ++w)
          fa::cp_async_bulk_tensor_5d(&maps.O[work.piece], Q_smem + Q_ring.stage * Q_bytes + w * 128 * d, 0,
                                      work.i0 + 64 * w, 0, work.h, work.b);
        fa::cp_async_bulk_commit_group();
        fa::cp_async_bulk_wait_group_read<0>();
        fa::mbarrier_arrive(Q_empty + barrier);
      }
    }
    if (threadIdx.x > 0) return; // thread 0 asks for all tiles

    // Asks for a tile of K or V once a place is free. Of a fresh barrier the phase before the first one counts as complete.
    const auto fetch = [&](auto &ring, uint32_t to, const CUtensorMap *map, uint32_t full, uint32_t empty, int row,
                           int h, int b) {
      const uint32_t barrier = 8 * ring.stage;
      fa::mbarrier_wait(empty + barrier, ring.parity ^ 1);
      fa::mbarrier_arrive_expect_tx(full + barrier, tile_bytes);
      fa::cp_async_bulk_tensor_5d(to + ring.stage * tile_bytes, map, full + barrier, 0, row, 0, h, b);
      ring.next();
    };
    Ring<K_stages> K_ring;
    Ring<V_stages> V_ring;
    Ring<2> Q_ring;
    const auto fetch_Q = [&](int index) { // and tells the consumers which it is; or that none is left
      const uint32_t barrier = 8 * Q_ring.stage;
      fa::mbarrier_wait(Q_empty + barrier, Q_ring.parity ^ 1);
      const Work work = find_work<Br, Bc>(index, a, pieces);
      work_smem[Q_ring.stage] = work;
      if (work.i0 >= 0) {
        fa::mbarrier_arrive_expect_tx(Q_full + barrier, Q_bytes);
#pragma unroll
        for (int w = 0; w < consumers; ++w) // 64 rows each
          fa::cp_async_bulk_tensor_5d(Q_smem + Q_ring.stage * Q_bytes + w * 128 * d, &maps.Q[work.piece],
                                      Q_full + barrier, 0, work.i0 + 64 * w, 0, work.h, work.b);
      } else {
        fa::mbarrier_arrive(Q_full + barrier);
      }
      Q_ring.next();
      return work;
    };

    int *counter = static_cast<int *>(a.workspace[0]); // 0 when the kernel starts
    // The longest query tiles are the first CTAs' that don't copy.
    const int given = gridDim.x - a.copiers;
    int index = blockIdx.x < a.copiers ? given + atomicAdd(counter, 1) : blockIdx.x - a.copiers;
    bool all_there = false; // from when on it needs no flag
    while (true) {
      const Work work = fetch_Q(index); // once O of the query tile two before it has left the place
      if (work.i0 < 0) break;
      const int hk = work.h / (a.H / a.Hkv);
      index = given + atomicAdd(counter, 1);
      const auto fetch_tile = [&](const CUtensorMap *K, const CUtensorMap *V, int row, auto between) {
        fetch(K_ring, K_smem, K, K_full, K_empty, row, hk, work.b);
        between();
        fetch(V_ring, V_smem, V, V_full, V_empty, row, hk, work.b);
      };
      const int others = pieces.far[work.piece]; // of near_K's rows, the last so many are in view
      for (int row = work.j_last - others; row >= 0; row -= Bc) fetch_tile(&maps.K, &maps.V, row, [] {});
      const int head = work.b * a.Hkv + hk, group = head / far.heads; // flags lie in the order of the copies
      const int side_by_side = min(far.heads, a.B * a.Hkv - group * far.heads);
      const uint32_t *arrived = a.arrived + group * far.heads * far.tiles + head % far.heads;
      bool there = all_there; // has its flag been seen? Between K and V there is time for a look at the next tile's
      for (int row = far.rows - Bc, last = far.rows - others; row >= last; row -= Bc) {
        if (!there) fa::await_gpu(arrived, a.epoch);
        if (!all_there) fa::fence_proxy_async_global(); // TMA reads what the flag speaks of
        arrived += side_by_side;
        fetch_tile(&maps.near_K, &maps.near_V, row,
                   [&] { there = all_there || (row > last && fa::is_set_gpu(arrived, a.epoch)); });
      }
      all_there = all_there || all_copied(a, far.all);
    }
    if (blockIdx.x == 0 && a.steps & fa::settle) settle(a);
    return;
    // [end: producer]
  }

  // [region: consumer]
  fa::setmaxnreg_inc<Tile<d>::registers>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
  const int g = lane / 4, t = lane % 4; // of 8 columns of an accumulator a lane holds rows g, g + 8, columns 2t, 2t + 1
  const int below = 64 * (warpgroup - 1);         // this warpgroup's rows in the tile
  const uint32_t Q_mine = Q_smem + 2 * d * below; // (d / 64, 64, 64), this warpgroup's; O's too
  const auto release = [&](uint32_t barrier) {
    if (lane == 0) fa::mbarrier_arrive(barrier); // this warp is done with what the barrier stands for
  };

  float S_reg[Bc / 8][4], O_reg[d / 8][4] = {}; // (64, Bc) of this warpgroup; (64, d), not yet divided by l
  uint32_t P_reg[Bc / 16][4];                   // P of tile j0, rounded
  // Of rows g and g + 8: m, and how it changed; of this lane's columns of them l, and the last tile's share of it
  float m_reg[2], alpha[2], l_reg[2] = {}, sum_reg[2] = {};

  // [region: next_work]
  // Waits for the next Q_i; says which it is. The maximum of S is sought before S is scaled, so the scale may not be
  // negative: rather turn Q_i around.
  Ring<2> Q_ring;
  const auto next_work = [&] {
    fa::mbarrier_wait(Q_full + 8 * Q_ring.stage, Q_ring.parity);
    // Read by the lane that later arrives at O_full, as only then the place is given back. Uniform, and the compiler is told.
    const Work read = lane == 0 ? work_smem[Q_ring.stage] : Work{};
    const auto of_lane_0 = [](int x) { return int(__reduce_or_sync(0xffffffff, x)); };
    const Work work = {of_lane_0(read.b), of_lane_0(read.h), of_lane_0(read.piece), of_lane_0(read.i0),
                       of_lane_0(read.j_last)};
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

  // [region: products]
  Ring<K_stages> K_next, K_ring; // of the next tile; of this one
  Ring<V_stages> V_ring;         // of this one
  // S (64, Bc) = Q_i K_j^T: d / 16 steps
  const auto start_scores = [&](int stage) {
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < d / 16; ++k)
      fa::wgmma_mma_async<T, 0, 0>(S_reg, fa::k_major(Q_mine + Q_ring.stage * Q_bytes) + fa::k_major_step(k, 64),
                                   fa::k_major(K_smem + stage * tile_bytes) + fa::k_major_step(k, Bc), k > 0);
    fa::wgmma_commit_group();
  };
  // O (64, d) += P V_j: Bc / 16 steps; O = P V_j for the first tile of a query tile
  const auto start_output = [&](bool accumulate) {
    fa::mbarrier_wait(V_full + 8 * V_ring.stage, V_ring.parity);
    fa::wgmma_fence();
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k)
      fa::wgmma_mma_async<T, 1>(O_reg, P_reg[k],
                                fa::mn_major(V_smem + V_ring.stage * tile_bytes, Bc) + fa::mn_major_step(k),
                                accumulate || k > 0);
    fa::wgmma_commit_group();
  };
  // [end: products]

  // [region: maximum]
  // m_new = max(m, rowmax S), and alpha = exp2(m - m_new)
  const auto raise_maximum = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) { // row g, elements 0 and 1 of the fragments; row g + 8, elements 2 and 3
      float S_max = -FA_INFINITY;
#pragma unroll
      for (int n = 0; n < Bc / 8; ++n) S_max = fmaxf(S_max, fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1]));
#pragma unroll
      for (int mask = 1; mask < 4; mask *= 2) // over the four lanes that share the row
        S_max = fmaxf(S_max, __shfl_xor_sync(0xffffffff, S_max, mask));
      const float m_new = fmaxf(m_reg[r], S_max * scale_log2);
      alpha[r] = fa::ex2_approx_ftz(m_reg[r] - m_new); // 1 where m stays
      m_reg[r] = m_new;
    }
  };
  // l = l * alpha, O = O * alpha. Not while a product writes O.
  const auto rescale = [&] {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l_reg[r] *= alpha[r];
#pragma unroll
      for (int n = 0; n < d / 8; ++n) O_reg[n][2 * r] *= alpha[r], O_reg[n][2 * r + 1] *= alpha[r];
    }
  };
  // [end: maximum]

  // The sum of x over the four lanes that share a row.
  const auto sum_over_lanes = [](float x) {
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) x += __shfl_xor_sync(0xffffffff, x, mask);
    return x;
  };

  // [region: exponentials]
  // S becomes P = exp2(S - m) in row g + 8 r of fragments [begin, end), with its sum over this lane's columns.
  const auto exponentials = [&](int r, int begin, int end) {
    if (begin == 0) sum_reg[r] = 0.f;
#pragma unroll
    for (int n = begin; n < end; ++n) {
#pragma unroll
      for (int e = 2 * r; e < 2 * r + 2; ++e) {
        S_reg[n][e] = fa::ex2_approx_ftz(__fmaf_rn(S_reg[n][e], scale_log2, -m_reg[r]));
        sum_reg[r] += S_reg[n][e];
      }
    }
  };
  // Sixteen columns of S, rounded to 16 bits, are a fragment A of P: the same lane holds the same elements. Not before
  // the product that reads P_reg is complete.
  const auto round_P = [&] {
#pragma unroll
    for (int k = 0; k < Bc / 16; ++k) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        P_reg[k][e] = fa::pack2<T>(S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]);
    }
  };
  // [end: exponentials]

  // [region: turns]
  // Barrier `turns` + w is warpgroup w's turn to start its products: its own 128 threads wait there, and the 128 of the
  // warpgroup before it come by when they have started theirs.
  constexpr int turns = 8;
  const auto take_turn = [&] { fa::bar_sync(turns + warpgroup, 256); };
  const auto pass_turn = [&] { fa::bar_arrive(turns + 1 + warpgroup % consumers, 256); };
  // [end: turns]

  // [region: votes]
  // A warp whose P may not stand leaves a vote. Whoever takes the next turn has come past a barrier, and sees the votes of
  // all four warps. Tiles use two places in turn, so that no vote is cast where one is still being read.
  bool has_turn = false;
  const auto vote = [&] { return votes_smem + 2 * (warpgroup - 1) + V_ring.stage % 2; };
  const auto stands = [&] { return !__any_sync(0xffffffff, *vote()); };
  // (2) next turn: waits for it, unless it is held since a vote, and for the next K_j. Does P stand?
  const auto next_turn = [&](bool stands_anyway) {
    fa::mbarrier_wait(K_full + 8 * K_next.stage, K_next.parity);
    if (!has_turn) take_turn();
    has_turn = true;
    return stands_anyway || stands();
  };
  const auto end_turn = [&] { pass_turn(), has_turn = false; };
  const auto clear_votes = [&] {
    fa::bar_sync(warpgroup, 128);
    if (threadIdx.x % 128 == 0) *vote() = 0;
    fa::bar_sync(warpgroup, 128);
  };
  // P stands: l = l + rowsum P, and K_j is not needed any more.
  const auto accept = [&] { l_reg[0] += sum_reg[0], l_reg[1] += sum_reg[1], release(K_empty + 8 * K_ring.stage); };
  // Is a maximum likely to be missed? Where few keys take most of one row so far (the key of the maximum alone gives l = 1), but
  // not of another row of the warp, which may not have met its own yet.
  const auto some_peaked = [&](float few) {
    bool peaked = false, flat = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) (sum_over_lanes(l_reg[r] + sum_reg[r]) < few ? peaked : flat) = true;
    if (__any_sync(0xffffffff, peaked) && __any_sync(0xffffffff, flat)) *vote() = 1;
    fa::bar_sync(warpgroup, 128);
    const bool found = !stands();
    if (found) clear_votes();
    return found;
  };
  // [end: votes]

  if (warpgroup == consumers) pass_turn(); // the first turn is the first warpgroup's
  for (Work work = next_work(), next = work; work.i0 >= 0; work = next) {
    const int shift = pieces.shift[work.piece], keys = pieces.keys[work.piece];
    const int row0 = work.i0 + below, row = row0 + 16 * warp + g;   // the warpgroup's first; mine
    const int seen = a.causal ? min(row0 + shift + 1, keys) : keys; // keys that all of this warpgroup's rows see
    const int last_seen = row0 >= pieces.rows ? 0
                          : a.causal          ? max(row0 + 63 + shift, 0)
                                              : keys - 1;    // the last any sees
    m_reg[0] = m_reg[1] = -3e38f, l_reg[0] = l_reg[1] = 0.f; // below every score, but finite: -inf - m is -inf

    // [region: skip]
    int j0 = work.j_last; // of this tile
    fa::mbarrier_wait(K_full + 8 * K_next.stage, K_next.parity);
#pragma unroll 1
    for (; j0 > last_seen; j0 -= Bc) {
      release(K_empty + 8 * K_next.stage), K_next.next();
      fa::mbarrier_wait(V_full + 8 * V_ring.stage, V_ring.parity);
      release(V_empty + 8 * V_ring.stage), V_ring.next();
      take_turn(), pass_turn(); // all warpgroups have as many
      fa::mbarrier_wait(K_full + 8 * K_next.stage, K_next.parity);
    }
    K_ring = K_next, K_next.next();
    // S of the first tile has a turn, too: out of turn it would hold up the products of another warpgroup.
    take_turn();
    start_scores(K_ring.stage);
    pass_turn();
    // [end: skip]

    // [region: tile_loop]
    bool accumulate = false; // tile j0 isn't the first
    // The place of the last tile whose maximum is tracked: two after that of the last key that all rows see. It is the last of all
    // once a maximum was missed, and where that is likely. To take a tile again costs far more than to track one: up to 4 whole
    // tiles are always tracked, and rows of up to 16 on a weaker sign than longer ones.
    int track_to = seen < 5 * Bc ? 0 : (seen - 1) / Bc * Bc - 2 * Bc;
    while (true) {
      // [region: scores]
      // (1) exact tile: S alone is under way, and P of tile j0 is to be exact. It is the first tile, one that not all rows see
      // whole, or one that was voted down.
      fa::wgmma_wait_group<0>();
      // [end: scores]

      // [region: mask]
      if (j0 + Bc > seen) { // not all rows see all of these keys
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int mine = (a.causal ? min(row + 8 * r + shift + 1, keys) : keys) - j0 - 2 * t; // keys from mine on
#pragma unroll
          for (int n = 0; n < Bc / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (8 * n + e >= mine) S_reg[n][2 * r + e] = -FA_INFINITY;
            }
          }
        }
      }
      // [end: mask]

      // [region: online_update]
      raise_maximum();
      if (accumulate) rescale(); // the first product overwrites O
      exponentials(0, 0, Bc / 8), exponentials(1, 0, Bc / 8);
      round_P();
      // [end: online_update]

      // [region: overlap]
      // (3) two products: S of the next tile is started, then O of this one, turn by turn. The next tile's exponentials run under
      // this O (not at d = 64 untracked) and the other warpgroups' products. Compiled twice: a branch inside one loop costs more.
      const auto overlap = [&](auto is, int end) { // to tile `end`; false where P was voted down
        constexpr bool track = decltype(is)::value;
        constexpr int early = !track ? Bc / 8 : d == 64 ? 5 : 10; // fragments of rows g that become P before O is there
        if constexpr (!track) {
          // m stays here. A double is a pair of registers, an even and an odd one, in two banks: were both rows' m in one bank,
          // half of the FFMAs of the exponentials, which ptxas takes from both rows in turn, would fetch two operands from it.
          const double pair = __hiloint2double(__float_as_int(m_reg[1]), __float_as_int(m_reg[0]));
          m_reg[0] = __int_as_float(__double2loint(pair)), m_reg[1] = __int_as_float(__double2hiint(pair));
        }
#pragma unroll 1
        while (j0 > end && j0 <= seen) {
          if (!next_turn(track)) return false;
          // At d = 128 what no product waits for comes after what one waits for: K is given back after S, V after P. At d = 64
          // that is slower.
          d == 128 ? (start_scores(K_next.stage), accept()) : (accept(), start_scores(K_next.stage));
          start_output(accumulate);
          end_turn();
          const uint32_t V_barrier = V_empty + 8 * V_ring.stage;
          K_ring = K_next, K_next.next(), V_ring.next(), j0 -= Bc;

          // S is there, O not yet. At d = 64 O follows soon: without tracking both are waited for here, which leaves one stretch of
          // code, in which ptxas rounds P among the exponentials; the wait below then passes at once.
          fa::wgmma_wait_group<d == 64 && !track ? 0 : 1>();
          // Where the maximum is tracked, the first exponentials are taken before O is there, the others beside the
          // multiplications that rescale it. The wait for K, which landed before S, passes at once: its branch keeps the
          // compiler from moving the wait for O up here.
          if constexpr (track) raise_maximum();
          exponentials(0, 0, early);
          if constexpr (!track) exponentials(1, 0, Bc / 8);
          if constexpr (track) fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);
          // Is the maximum of the tiles so far good enough? A tracked one always is. A lane sums its own columns of a row.
          if (!track && fmaxf(sum_reg[0], sum_reg[1]) > 32.f) *vote() = 1;

          fa::wgmma_wait_group<0>(); // O is there too, and P_reg may be written
          if constexpr (track) rescale(), exponentials(0, early, Bc / 8), exponentials(1, 0, Bc / 8);
          d == 128 ? (round_P(), release(V_barrier)) : (release(V_barrier), round_P());
          accumulate = true;
        }
        return true;
      };
      bool right = true;
#pragma unroll 1
      while (right && j0 > 0 && j0 <= seen) {
        if (j0 == track_to && some_peaked(seen < 17 * Bc ? 2.f : 1.3f)) track_to = 0;
        right = j0 <= track_to ? overlap(std::false_type(), 0) : overlap(std::true_type(), track_to);
      }
      // [end: overlap]

      // [region: settle]
      // Why is the loop over? A vote (right is false), no tile is left, or the next tile is one that not all rows see whole:
      // then the loop did not begin, and P is exact.
      // (4) O alone, as the next tile is begun afresh
      if (right && j0 > 0) {
        next_turn(true);
        accept();
        start_output(accumulate);
        end_turn();
        fa::wgmma_wait_group<0>();
        release(V_empty + 8 * V_ring.stage);
        K_ring = K_next, K_next.next(), V_ring.next(), j0 -= Bc;
        accumulate = true;
      } else if (right) {
        // (5) last tile: no turn follows, so a barrier shows the votes
        fa::bar_sync(warpgroup, 128);
        if (stands()) break;
        right = false;
      }
      // (6) voted down: the same tile again. A turn that was taken to find out is held until then.
      if (!right) track_to = 0, clear_votes();
      start_scores(K_ring.stage); // after (4) of the next tile, without a turn
      // [end: settle]
    }
    // [end: tile_loop]

    // [region: last_output]
    // (7) done: O of the last tile, which needs no turn
    accept();
    start_output(accumulate);
    const uint32_t O_smem = Q_mine + Q_ring.stage * Q_bytes;
    Q_ring.next(), next = next_work(); // this and what follows while O is under way
    float l_inv[2], LSE[2];            // LSE = ln(l * 2^m). No key seen: l = 0, O = 0 (of finite V), LSE = -inf
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float l = sum_over_lanes(l_reg[r]);
      l_inv[r] = l > 0.f ? 1.f / l : 0.f, LSE[r] = (m_reg[r] + log2f(l)) * fa::ln_2;
    }
    fa::wgmma_wait_group<0>();
    release(V_empty + 8 * V_ring.stage), V_ring.next();
    // [end: last_output]

    // [region: epilogue]
    // O (64, d) = O / l, once. It leaves through the place of Q_i, whose last reads ended before barrier (5), swizzled for
    // TMA; rows past the last are not stored.
    // Sixteen columns at a time, four 8 x 8 matrices: rows g and g + 8 of the left half, of the right
#pragma unroll
    for (int k = 0; k < d / 16; ++k) {
      uint32_t O_out[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float *O = O_reg[2 * k + e / 2] + e % 2 * 2;
        O_out[e] = fa::pack2<T>(O[0] * l_inv[e % 2], O[1] * l_inv[e % 2]);
      }
      const int chunk = (k % 4 * 2 + lane / 16) ^ lane % 8; // of panel k / 4, in row lane % 16
      fa::stmatrix_x4(O_smem + k / 4 * 8192 + (16 * warp + lane % 16) * 128 + chunk * 16, O_out);
    }
    fa::fence_proxy_async();
    __syncwarp();    // all lanes have stored and fenced before one says so
    release(O_full); // this warp's rows are there. LSE comes after the fence, which would wait for it
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (t == 0 && row + 8 * r < pieces.rows)
        a.LSE[int64_t(work.b * a.H + work.h) * a.Nq + work.piece * pieces.rows + row + 8 * r] = LSE[r];
    }
    // [end: epilogue]
  }
  // [end: consumer]
}

// [region: launcher]
// Sizes that hold together, and what of the other ranks' keys this one sees.
inline bool whole_tiles(const fa_peers_args &a, int Bc) {
  return a.ranks == 1 || (a.Nq == a.Nk && a.Nk % (a.causal ? 2 * Bc : Bc) == 0);
}

// Under a causal mask as many heads at a time as have the keys that they see in 32 MiB of the L2. Without one head by head,
// so that CTAs side by side want the same keys at the same time.
inline int heads_at_a_time(const fa_peers_args &a, int keys) {
  const int64_t fit = (int64_t(32) << 20) / (int64_t(4) * keys * a.D);
  return a.causal ? int(min(max(int64_t(1), fit), int64_t(a.B) * a.Hkv)) : 1;
}

inline Far far_keys(const fa_peers_args &a, int Bc) {
  const int early = a.causal ? a.rank : 0; // ranks before this one: of them only the first piece is seen
  const int rows = early * (a.Nk / 2) + (a.ranks - 1 - early) * a.Nk;
  return {early, a.Nk / 2, heads_at_a_time(a, a.Nk + rows), rows, rows / Bc, a.B * a.Hkv * (rows / Bc)};
}

inline Pieces pieces_of(const fa_peers_args &a, const Far &far, int count, int Br) {
  Pieces p = {count, a.Nq / count, int(fa::ceil_div(a.Nq / count, Br)), {}, {}, {}, {}};
  for (int i = 0; i < count; ++i) {
    const int own = a.Nk - (count - 1 - i) * p.rows; // keys up to the end of the piece
    p.far[i] = i == count - 1 ? far.rows : far.early * far.early_rows;
    p.keys[i] = own + p.far[i], p.shift[i] = own - p.rows + p.far[i];
    p.heads[i] = a.causal ? heads_at_a_time(a, p.keys[i]) * (a.H / a.Hkv) : 1;
  }
  return p;
}

// Only flags: for ranks that share a GPU, or the emulator, and so take turns.
__global__ void signal(const __grid_constant__ fa_peers_args a) {
  if (a.steps & fa::announce) announce(a);
  if (a.steps & fa::settle) settle(a);
}

template <int d, typename T> cudaError_t launch(const fa_peers_args &a, cudaStream_t stream) {
  constexpr int Bc = Tile<d>::Bc, Br = Tile<d>::Br;
  if (!whole_tiles(a, Bc)) return cudaErrorInvalidValue;
  if (!(a.steps & (fa::attend | fa::fetch))) {
    signal<<<1, 1, 0, stream>>>(a);
    return cudaGetLastError();
  }
  const Far far = far_keys(a, Bc);
  const int count = a.causal && a.ranks > 1 ? 2 : 1;
  Pieces pieces = pieces_of(a, far, count, Br);
  if (!(a.steps & fa::attend)) pieces.count = 0; // the copies alone
  const int64_t all = int64_t(pieces.count) * pieces.tiles * a.B * a.H;
  if (all > fa::max_grid_x / 2) return cudaErrorInvalidValue; // an index past the last still fits into an int
  // S in units of log2, so that P = exp2(S - m). Formed here, it is an argument, which the exponentials' FMA reads without a
  // register: with a third one it would often read two of a bank.
  const float scale_log2 = fmaxf(fabsf(a.scale), 1e-30f) * fa::log2_e;

  Maps maps;
  const int rows = pieces.rows;
  for (int p = 0; p < count; ++p) {
    const char *Q = static_cast<const char *>(a.Q) + 2 * p * rows * a.Q_stride[2];
    const char *O = static_cast<const char *>(a.O) + 2 * p * rows * a.O_stride[2];
    if (cudaError_t error = fa::encode_tile(&maps.Q[p], a.dtype, Q, a.Q_stride, a.B, a.H, rows, d, 64)) return error;
    if (cudaError_t error = fa::encode_tile(&maps.O[p], a.dtype, O, a.O_stride, a.B, a.H, rows, d, 64)) return error;
  }
  if (cudaError_t error = fa::encode_tile(&maps.K, a.dtype, a.K, a.K_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (cudaError_t error = fa::encode_tile(&maps.V, a.dtype, a.V, a.V_stride, a.B, a.Hkv, a.Nk, d, Bc)) return error;
  if (far.rows > 0) {
    const int64_t near[3] = {int64_t(a.Hkv) * far.rows * d, int64_t(far.rows) * d, d};
    if (cudaError_t error = fa::encode_tile(&maps.near_K, a.dtype, a.near_K, near, a.B, a.Hkv, far.rows, d, Bc))
      return error;
    if (cudaError_t error = fa::encode_tile(&maps.near_V, a.dtype, a.near_V, near, a.B, a.Hkv, far.rows, d, Bc))
      return error;
  }

  int device, sms;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return error;
  if (a.copiers > sms) return cudaErrorInvalidValue; // all copiers are on the GPU at a time
  if (cudaError_t error = fa::allow_smem(one_sided<d, T>, Tile<d>::smem_bytes)) return error;
  if (cudaError_t error = cudaMemsetAsync(a.workspace[0], 0, sizeof(int), stream)) return error; // the counter
  const unsigned ctas = unsigned(min(max(all, int64_t(a.copiers)), int64_t(sms)));
  one_sided<d, T><<<ctas, Tile<d>::threads, Tile<d>::smem_bytes, stream>>>(a, maps, pieces, far, scale_log2);
  return cudaGetLastError();
}

template <int d> cudaError_t launch(const fa_peers_args &a, cudaStream_t stream) {
  return a.dtype == FA_FP16 ? launch<d, fa::fp16>(a, stream) : launch<d, fa::bf16>(a, stream);
}

extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_peers_args &a = fa::peers(args);
  if (!fa::is_half(a) || a.Hkv < 1 || a.H % a.Hkv || a.window || a.lengths || a.pages || a.q_starts ||
      !fa::half_rows_aligned16(a.Q, a.Q_stride) || !fa::half_rows_aligned16(a.K, a.K_stride) ||
      !fa::half_rows_aligned16(a.V, a.V_stride) || !fa::half_rows_aligned16(a.O, a.O_stride) || a.ranks < 1 ||
      a.ranks > fa::max_ranks || a.rank < 0 || a.rank >= a.ranks || a.copiers < 1 || a.copiers > fa::max_copiers)
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
