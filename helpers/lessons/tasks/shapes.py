"""Region tasks of the rungs for models and of the backward passes before Hopper, 20 to 23."""

from .task import IN_TURN, Task, whole

TASKS = (
    Task(
        "20.1",
        "visible",
        1,
        "Say which tiles of keys this CTA visits: the first and the last that any of its rows sees. A tile beyond them is an error.",
        (
            "i0: the CTA's first query; Br rows; Nq, Nk of this sequence; a.causal; a.window (0: none); Bc keys per tile",
            "row i sees the keys up to i + Nk - Nq, and of those the last a.window; without a causal mask all of them",
        ),
        (
            "const int shift = Nk - Nq and window (a.window; if that is 0, more than there are keys, at most 1 << 30) are declared",
            "const int j_last: the first key of the last tile to visit, -Bc if no row sees a key",
            "const int j_first: that of the first tile to visit, 0 without a causal mask; the loop is for (j = j_last; j >= j_first; j -= Bc)",
        ),
        (
            "The last row of the tile decides on the end, the first row on the beginning.",
            "Last key: min(i0 + Br + shift, Nk) - 1 under a causal mask, which may be negative: then / rounds the wrong way.",
            "First key of row i0: i0 + shift - window + 1, at least 0; round down to a multiple of Bc.",
        ),
        lean=True,
    ),
    Task(
        "20.2",
        "mask",
        2,
        "Write the mask of a warp: causal, window, and the end of the keys.",
        (
            "S_reg[Bc / 8][8], not scaled: elements 2r and 2r + 1 of accumulator n are row i0 + 32 * warp + g + 8 * r and keys "
            "j0 + 8n + 2t and + 1",
            "shift = Nk - Nq, window (very large if there is none), a.causal, Nk, Bc; scale_log2, never 0, may be negative",
        ),
        (
            "const int sees: the last key that the warp's first row sees (Nk - 1 without a causal mask; may lie past Nk)",
            "const int whole: a multiple of Bc; all 32 rows see the tiles below it to their ends, but for the window",
            "mask(j0) is callable: scores of keys that a row doesn't see become -inf once they are scaled",
        ),
        (
            "Row r of this lane sees up to last = sees + g + 8 * r under a causal mask, and with a window from last - window + 1 on.",
            "The scores are scaled later: under a negative scale it takes +inf.",
            "whole = min(sees + 1, Nk) / Bc * Bc. Without a causal mask the last visible key is Nk - 1 for all rows.",
        ),
    ),
    whole(
        "20",
        "Rung 13 with j_first and j_last computed per CTA; the head of K and V is h / (a.H / a.Hkv).",
        "Mask only where a row's keys end inside the tile, and skip tiles that a warp's rows don't see at all.",
        "A packed batch: q_starts and k_starts say where a sequence's rows are. A CTA finds its sequence from blockIdx.x.",
    ),
    Task(
        "21.1",
        "state",
        1,
        "Write `State`, `weight` and `merge`: how parts of a row's keys are put together.",
        ("FA_INFINITY, fmaxf, exp2f; scores are in units of log2",),
        (
            "struct State { float m, l; } is defined: the largest score, and the sum of exp2(score - m); an empty part has l = 0",
            "__device__ float weight(const State &part, float m): exp2(part.m - m), the part's factor in a whole whose maximum is m; 0 for an empty part",
            "__device__ State merge(const State &a, const State &b): the state of both together, never NaN",
        ),
        (
            "As in 02, with exp2 in the place of exp.",
            "Ask for part.l > 0 rather than for infinities: an empty part weighs nothing, whatever its m.",
        ),
    ),
    Task(
        "21.2",
        "merge_splits",
        2,
        "Write the kernel `merge_splits`: O and LSE of a row from those of the pieces of its keys.",
        (
            "workspace[0]: O_part (splits,B,H,Nq,D) fp32, each divided by its own l; workspace[1]: LSE_part (splits,B,H,Nq), in "
            "units of log2, -inf for an empty piece",
            "grid: a CTA per row (b, h, i) of B*H*Nq; block: merge_threads, which you define (a multiple of d / 4)",
            "State, weight, merge; a piece is a state with m = LSE and l = 1; fa::pack2<T>, fa::ln_2",
        ),
        (
            "constexpr int merge_threads and template <int d, typename T> __global__ void merge_splits(const fa_model_args a)",
            "O (B,H,Nq,D) rounded to T, a.LSE = natural logarithm; a row without keys gets 0 and -inf",
        ),
        (
            "d / 4 threads cover a row's columns, 4 each; the others share out the pieces.",
            "Keep a running state and O: O = weight(before) * O + weight(piece) * O_piece, relative to the merged maximum.",
            "Then merge those through shared memory, behind a barrier, and divide by l at the end.",
        ),
    ),
    Task(
        "21.3",
        "merge_warps",
        3,
        "Merge the four warps' states and O of the same rows, and write this piece's O_part and LSE_part.",
        (
            "state[2], O_reg[d / 8][4] of rows g and g + 8, O not divided by l; state[r].l of this lane's columns alone",
            "smem: the stages' memory; every copy into it has been waited for by the warp that asked, warps may still read theirs",
            "r0, rows, group, head_of(r), b, split: row r of this CTA, r < Br, is query (r0 + r) / group of head head_of(r0 + r); "
            "C::warps, C::threads",
        ),
        (
            "workspace[0]: O_part (splits,B,H,Nq,D), divided by l (0 for an empty piece); workspace[1]: LSE_part = m + log2(l), for "
            "rows r0 + r below `rows`",
        ),
        (
            "First l over the four lanes of a row. Then (warps, Br, d) floats of O and (warps, Br) states in shared memory.",
            "Two barriers: one before writing there, as others still read their stages; one before reading.",
            "Each thread merges a row's states and adds four columns with the shares weight(state) / l.",
        ),
    ),
    whole(
        "21",
        "The grid has a dimension more: pieces of the keys. Each leaves O and LSE in the workspace, a second kernel merges them.",
        "All query heads that share a head of K and V are rows of one tile: 16 rows = queries x heads of a group.",
        "Lengths, pages, empty pieces: a piece without keys has LSE = -inf and weighs nothing.",
    ),
    Task(
        "22.1",
        "delta",
        1,
        "Write the kernel `prepare`: delta = rowsum(dO o O), dQ = 0, and the counters at 0.",
        (
            "a warp per row (b, h, i) of B*H*Nq, blockDim.x / 32 rows per CTA; O and dO with strides, d columns",
            "workspace[0]: delta (B,H,Nq) fp32; workspace[1]: turn (B,H,Nq), unsigned; workspace[2]: one ticket, unsigned",
        ),
        (
            "template <int d> __global__ void prepare(const fa_backward_args a) is defined",
            "delta = sum over columns of O * dO; dQ = 0 at its strides; every turn and the ticket are 0",
        ),
        (
            "Row number from blockIdx.x and threadIdx.x / 32; b, h, i from it by / and %.",
            "Each lane adds columns lane, lane + 32, ..; five shuffles; one lane writes delta and the row's turn. Where a turn "
            "doesn't begin at 0, CTAs wait for ever.",
        ),
    ),
    Task(
        "22.2",
        "dS",
        3,
        "Write dP = dO V^T slab by slab, and dS = P o (dP - delta) in the place of P.",
        (
            "P_smem (Br, ld_c) holds P; delta_smem (Br); M rows and 8 columns per thread: row r is 4 * at_s.y + r % 4 + r / 4 * 4 * "
            "TY_s, column c is 4 * at_s.x + c % 4 + c / 4 * 4 * TX_s",
            "arrived(n): waits for slab n, a barrier, gives its address: dO (Kp, ld_r) then V (Kp, ld_c), both transposed; slab 0 is on its way",
            "fetch_dP(n), fetch_dK(0); multiply_columns<Kp, TY_s, TX_s, ld_r, ld_c>(acc, A_smem, B_smem)",
        ),
        (
            "P_smem holds dS; d / Kp slabs have been multiplied",
            "slab 0 of dK is on its way (fetch_dK(0))",
        ),
        (
            "Per slab: wait for it, send the next one (behind the last one the first of dK), multiply.",
            "A is slab + 4 * at_s.y, B is slab + Kp * ld_r + 4 * at_s.x.",
            "Each thread changes the elements of P_smem that it wrote itself: no barrier is needed before the next `arrived`.",
        ),
    ),
    Task(
        "22.3",
        "dQ",
        3,
        "Add scale dS K_j to dQ, in turn: every sum in the order of the key tiles. No check here can see turns, since the emulator's "
        "CTAs come in order: on a GPU compare two runs bit by bit.",
        (
            "P_smem (Br, ld_c) holds dS, K_smem (d, ld_c) K_j transposed; multiply_rows<Bc, TY_d, TX_d, ld_c, ld_c>(acc, A, B): rows at_d.y "
            "+ r * TY_d, columns at_d.x + c * TX_d",
            "workspace[1]: turn (B,H,Nq), counts the key tiles that have added to the tile of queries from i0 on, in element [.. + i0]",
            "work.b, work.tile, h, i0, shift, a.window, a.scale; CTAs take their tiles in ascending order",
        ),
        (
            "dQ rows i0 .. i0 + Br below Nq have scale * dS K_j added, after all earlier key tiles that these queries see, and "
            "before all later ones",
            "the turn has passed on",
        ),
        (
            "One thread waits with atomicAdd(turn, 0u) until it equals the number of tiles before this one; then a __threadfence() and a barrier.",
            "Under a window the first tile that comes here is max(0, i0 + shift - a.window + 1) / Bc.",
            "atomicAdd into dQ, a barrier, then one thread: __threadfence() and atomicAdd(turn, 1u).",
        ),
    ),
    whole(
        "22",
        "A CTA per tile of keys, a loop over tiles of queries; P from S and LSE, no maximum is needed.",
        "delta = rowsum(dO o O) first. Then dV += P^T dO, dP = dO V^T, dS = P o (dP - delta), dK += dS^T Q, dQ += dS K.",
        "dQ is shared by all CTAs of a head: set it to 0, then add in turn. Atomics in any order would do but for a.deterministic, "
        "which asks for the same bits every time. The scale goes to dK and dQ.",
        IN_TURN,
        backward=True,
    ),
    Task(
        "23.1",
        "finish",
        2,
        "Write the kernel `finish`: dQ = scale * dQ_sum, from the order of the fragments to rows.",
        (
            "workspace[0]: dQ_sum, per tile of Br queries (padded(Nq) / Br tiles per head) Tile<d>::threads * 32 floats: element e of thread x "
            "at [e * threads + x]",
            "element e of a thread of warp w: row w % down * 32 + e / 16 * 16 + e / 2 % 2 * 8 + g, column w / down * 32 + e / 4 % 4 "
            "* 8 + 2t + e % 2, with g, t as for mma.sync and down = Tile<d>::down",
            "grid: a CTA of Tile<d>::threads threads per tile of every head",
        ),
        (
            "template <int d, typename T> __global__ void finish(const fa_backward_args a) is defined",
            "dQ (B,H,Nq,D) = a.scale * dQ_sum rounded to T, for queries below Nq",
        ),
        (
            "Head and tile from blockIdx.x; the tile's floats begin at blockIdx.x * Br * d.",
            "Elements e and e + 1 (e even) are neighbours in a row: one 32-bit store of fa::pack2<T>.",
        ),
    ),
    Task(
        "23.2",
        "delta",
        2,
        "Write the kernel `prepare`: where the sums of S and of dP begin, and dQ_sum = 0, on whole tiles.",
        (
            "d / 8 lanes per row of B*H*padded(Nq) rows, 16 bytes of a row each; blockDim.x threads; scale_of(a): never 0; unseen(a): a score whose P is 0",
            "workspace[0]: dQ_sum (B,H,padded Nq,D) fp32; workspace[1]: stats (2,B,H,padded Nq) fp32; a.LSE (B,H,Nq)",
        ),
        (
            "template <int d, typename T> __global__ void prepare(const fa_backward_args a) is defined",
            "stats[0] = -LSE / scale, unseen(a) where LSE = -inf and for rows from Nq on (0 would do there: their Q and dO are 0); "
            "stats[1] = -delta = -rowsum(dO o O), 0 from Nq on",
            "dQ_sum = 0, padding included",
        ),
        (
            "A row's lanes are neighbours in a warp: shuffles with mask d / 16, .. 1.",
            "A sum that begins with unseen(a) stays infinite, and P = 0: rows that don't exist then add nothing.",
            "Rows from Nq on must not be read: O, dO and LSE end there.",
        ),
    ),
    whole(
        "23",
        "Rung 22 with the products on tensor cores: S^T and dP^T, so that P and dS are fragments A of dV and dK.",
        "dQ needs dS across all warps: through shared memory, and atomics in fp32 into the workspace; a last kernel rounds.",
        "Where query heads share K and V, their dK and dV are added up at the end.",
        backward=True,
    ),
)
