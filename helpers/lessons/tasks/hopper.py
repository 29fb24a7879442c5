"""Region tasks of the Hopper rungs, 30 to 33."""

from .task import IN_TURN, Task, whole

FRAGMENT = "S_reg[Bc / 8][4], O_reg[d / 8][4]: of a warp's 16 rows a lane holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1) of every 8 columns"

TASKS = (
    Task(
        "30.1",
        "epilogue",
        1,
        "Finish: the sum of l over the four lanes of a row, O / l and LSE to global memory.",
        (
            "O_reg[d / 8][4], m_reg[2] (not scaled), l_reg[2] of this lane's columns alone; row: this lane's first query, row + 8 its second",
            "scale_log2; b, h; work.x = b * H + h; t = lane % 4; fa::pack2<T>(x, y), fa::ln_2",
        ),
        (
            "O (Nq,d) = O_reg / l rounded to T, 0 where l = 0, for queries below Nq",
            "a.LSE[work.x * Nq + i] = ln(l * 2^(m * scale_log2))",
        ),
        (
            "Two shuffles, mask 1 and 2, with all lanes of the warp taking part.",
            "Elements 2r and 2r + 1 of accumulator n are columns 8n + 2t and + 1 of row + 8 * r.",
        ),
    ),
    Task(
        "30.2",
        "mask",
        2,
        "Write the mask: keys past the end and, under a causal mask, past the row's last key.",
        (
            FRAGMENT,
            "row: this lane's first query, row + 8 its second; row0: the warpgroup's first; shift = Nk - Nq; j0, Bc, a.Nk, a.causal",
        ),
        (
            "S_reg = -inf for keys that the row doesn't see; tiles that all of the warpgroup's rows see whole cost nothing",
        ),
        (
            "Row i sees min(i + shift + 1, Nk) keys under a causal mask, else Nk.",
            "Column 8n + 2t + e of the tile is key j0 + 8n + 2t + e.",
            "All rows see the tile whole if the first one does: j0 + Bc <= min(row0 + shift + 1, Nk).",
        ),
    ),
    Task(
        "30.3",
        "refill",
        3,
        "Refill the ring: while the product runs, the stage of the tile before takes the tile that is stages - 1 away.",
        (
            "fetch(j0, stage): asks TMA for tile pair j0; one thread does. `full` and `empty`: an mbarrier of 8 bytes per stage",
            "empty + 8 * s completes a phase when every warp has read the stage; fa::mbarrier_wait(barrier, parity) waits for the "
            "phase of that parity",
            "stage, parity: of tile j0, the parity of its full barrier's phase; j_last: the first tile; tiles j_last - s * Bc, s < "
            "stages, have been asked for",
        ),
        (
            "tile j0 - (stages - 1) * Bc has been asked for into the stage of tile j0 + Bc, if both exist",
            "not before every warp has read that stage",
        ),
        (
            "One thread only, not in the first step (there is no tile before it), and not past the last tile.",
            "The stage before: stage - 1, or stages - 1 at 0.",
            "Its phase has this tile's parity, or the other one where the ring has just turned (stage == 0).",
        ),
    ),
    whole(
        "30",
        "Rung 12 with TMA instead of cp.async and wgmma instead of mma.sync: 64 rows per warpgroup, K and V from shared memory.",
        "The launcher encodes tensor maps (fa::encode_tile); one thread asks for tiles and an mbarrier per stage counts their bytes.",
        "wgmma: fence, products, commit, wait. A stage may be refilled once every warp has arrived at its `empty` barrier.",
    ),
    Task(
        "31.1",
        "mask",
        2,
        "Write the mask of a step that not all rows see whole.",
        (
            FRAGMENT,
            "whole: whether all of the warpgroup's rows see all of this tile; row: this lane's first query, row + 8 its second",
            "shift = Nk - Nq; j0; a.Nk, a.causal",
        ),
        ("unless `whole`, S_reg = -inf for keys that the row doesn't see",),
        (
            "Row i sees min(i + shift + 1, Nk) keys under a causal mask, else Nk.",
            "Count keys from this lane's first on: seen - j0 - 2t; then element n, e is out of sight if 8n + e is not below that.",
        ),
    ),
    Task(
        "31.2",
        "producer",
        3,
        "Write the producer: one thread that fetches Q, K and V for all query tiles of a CTA.",
        (
            "Q_full, Q_empty (two barriers each), K_full, K_empty, V_full, V_empty (one per stage): 8 bytes apart; `full` wants one arrival and the "
            "bytes, `empty` one arrival of each consumer warp",
            "Q_smem, K_smem, V_smem: rings of Q_bytes, tile_bytes, tile_bytes; maps.Q (64 rows), maps.K, maps.V (Bc rows); work_smem[2]",
            "find_work<Br, Bc>(index, a, order): a query tile's Work: b, h, i0 and j_last; past the last one i0 = -1; Ring<n>: stage, parity, next()",
            "workspace[0]: an int, 0 when the kernel starts; Tile<d>::producer_registers",
        ),
        (
            "query tiles blockIdx.x and then gridDim.x + atomicAdd(counter, 1) have been fetched while they exist (a stride of gridDim.x is "
            "right, too, but slower under a mask); for each Q_i, and K_j and V_j of head h / (a.H / a.Hkv), for j = j_last, j_last - Bc, .. 0",
            "work_smem of a Q stage holds its tile's Work, after the last one i0 = -1, written before its `full` barrier completes",
            "all threads of the warpgroup have returned; its registers are given back",
        ),
        (
            "fa::setmaxnreg_dec<..>(), then all threads but one return.",
            "Each fetch: wait for `empty` with parity ^ 1 (of a fresh barrier the phase before the first counts as complete), "
            "fa::mbarrier_arrive_expect_tx(full, bytes), then TMA. Q_i is `consumers` boxes of 64 rows.",
            "Find out what comes next behind the first K and V of this tile; fetch the next Q_i behind the last. After the last tile arrive at `full` with i0 = -1 in work_smem.",
        ),
    ),
    whole(
        "31",
        "Rung 30 with a warpgroup that only fetches, and CTAs that stay: each takes query tiles until none is left.",
        "Barriers in pairs, full and empty, for Q, K and V; producer and consumers count stage and parity for themselves.",
        "The consumers must see the end: a Work with i0 = -1 in the place of a tile.",
    ),
    Task(
        "32.1",
        "maximum",
        2,
        "Write `raise_maximum` and `rescale`: apart, because O must not be touched while a product writes it.",
        (
            FRAGMENT,
            "S_reg not scaled; scale_log2 > 0; m_reg[2] in units of log2, finite; alpha[2], l_reg[2] of this lane's columns",
        ),
        (
            "raise_maximum() is callable: m_reg = the maximum with this tile, the same in the four lanes of a row; alpha = "
            "exp2(m_before - m_reg); O_reg and l_reg untouched",
            "rescale() is callable: O_reg and l_reg multiplied by alpha",
        ),
        (
            "Maximum over this lane's elements 2r and 2r + 1, two shuffles, then scale once.",
            "m_reg starts at -3e38, so nothing is NaN: -inf - m is -inf.",
        ),
    ),
    Task(
        "32.2",
        "exponentials",
        2,
        "Write `exponentials` and `round_P`: S becomes P with its sums; P becomes fragments.",
        (
            FRAGMENT,
            "m_reg[2] in units of log2; scale_log2; sum_reg[2]; P_reg[Bc / 16][4]; fa::ex2_approx_ftz, fa::pack2<T>",
        ),
        (
            "exponentials(r, begin, end) is callable, r = 0 for row g and 1 for row g + 8: elements 2r and 2r + 1 of S_reg[begin] .. S_reg[end - 1] = "
            "exp2(S * scale_log2 - m_reg[r]), and their sum is added to sum_reg[r], which begins with 0 where begin = 0",
            "round_P() is callable: P_reg[k] = columns 16k .. 16k + 15 of S_reg, rounded, as fragment A",
        ),
        (
            "One FMA scales and subtracts. The loops have to be unrolled, so that S_reg stays in registers.",
            "Register e of fragment k: elements e % 2 * 2 and + 1 of accumulator 2k + e / 2.",
        ),
    ),
    whole(
        "32",
        "Rung 31 whose consumers take turns: one warpgroup's products run while the others compute exponentials.",
        "Start S of the next tile before O of this one, wait for S alone (wgmma_wait_group<1>; at d = 64 for both is faster), exponentials, then wait for O.",
        "Turns are named barriers: bar_sync by those who wait, bar_arrive by those who pass on; every warpgroup takes as many.",
    ),
    Task(
        "33.1",
        "delta",
        2,
        "Write the kernel `prepare`: where the sums of S and of dP begin, and the counters at 0.",
        (
            "B*H*padded<d>(Nq) rows (Nq rounded up to whole tiles), d / 16 lanes for each, so 16 elements of O and of dO per lane; "
            "CTAs of 256 threads, which have exactly these rows; scale_of(a): never 0",
            "workspace[1]: stats (3,B,H,padded Nq) fp32; a.LSE (B,H,Nq)",
        ),
        (
            "template <int d, typename T> __global__ void prepare(const fa_backward_args a) is defined",
            "stats[0] = 0 (counters: what has been added to a tile of dQ_sum, which nobody sets to 0; the last one: tiles of keys taken), padding included",
            "stats[1] = -LSE / scale; for rows from Nq on, and where LSE = -inf, the infinity by which scale * (S + stats[1]) = -inf",
            "stats[2] = -delta = -rowsum(dO o O), 0 from Nq on",
        ),
        (
            "A row's lanes are neighbours in a warp: shuffles with mask d / 32, .. 1, and all lanes take part in them.",
            "scale * x = -inf needs x = -inf for a positive scale and +inf for a negative one.",
            "Rows from Nq on must not be read: O, dO and LSE end there.",
        ),
    ),
    Task(
        "33.2",
        "finish",
        3,
        "Write the kernel `finish`: dQ = scale * dQ_sum, from the order of wgmma's accumulators to whole rows.",
        (
            "workspace[0]: dQ_sum, per tile of Br queries two halves of Tile<d>::dQ_half floats; of a half: float4 n of thread x (of 128) at [(n * 128 + "
            "x) * 4], for n < Tile<d>::dQ_columns / 8",
            "its elements e are dQ^T: column of d 16 * warp + g + e / 2 * 8, query 8n + 2t + e % 2 of the half; d = 128: half h has columns 64 h on, of "
            "all queries; d = 64: all columns of queries dQ_columns * h on",
            "workspace[1]: unsigned counters, 2 * tile + half: 0 where nobody has stored that half of dQ_sum (queries that see no key)",
            "grid: a CTA of 256 threads per tile (padded<d>(Nq) / Br per head)",
        ),
        (
            "template <int d, typename T> __global__ void finish(const fa_backward_args a) is defined",
            "dQ (B,H,Nq,D) = a.scale * dQ_sum rounded to T, for queries below Nq; 0 where nobody has stored",
        ),
        (
            "Threads 0-127 take one half, 128-255 the other; warp is threadIdx.x / 32 % 4.",
            "Write to shared memory, a barrier, then whole rows 16 bytes at a time: global stores stay coalesced.",
            "A row length of d + 8 in shared memory lets pairs of rows begin in different banks.",
        ),
    ),
    whole(
        "33",
        "Rung 23 on Hopper: two warpgroups with 64 keys each, a producer, wgmma on S^T and dP^T.",
        "Begin the sums of S with -LSE / scale and those of dP with -delta: then P = exp2(scale_log2 * S), dS = P o dP.",
        "dQ^T = K^T dS^T needs both halves of dS; it leaves through shared memory with cp.reduce.async.bulk.",
        IN_TURN,
        backward=True,
    ),
)
