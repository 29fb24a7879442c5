"""Region tasks of the fp32 rungs, 01 to 04."""

from .task import Task, whole

TASKS = (
    Task(
        "01.1",
        "scores",
        1,
        "Write the kernel `scores`: a thread per element of S = scale Q K^T.",
        (
            "const fa_args a: the kernel's only parameter; `tile` = 16",
            "grid: x = B*H * ceil(Nq / tile), the tiles of queries of one head next to each other; y = ceil(Nk / tile)",
            "block: tile x tile threads, x along the keys",
        ),
        (
            "__global__ void scores(const fa_args a) is defined",
            "workspace[0] holds S (B,H,Nq,Nk), contiguous: S[b][h][i][j] = scale * (row i of Q) . (row j of K)",
            "threads past Nq or Nk write nothing",
        ),
        (
            "Head and tile come from blockIdx.x by / and %; the head splits into b and h in the same way.",
            "Rows of Q and K begin at b * stride[0] + h * stride[1] + i * stride[2]; S is contiguous, so its index needs no strides, but "
            "64 bits: S may have more than 2^31 elements.",
            "Leave when i >= a.Nq || j >= a.Nk; then one loop over c < a.D that adds q[c] * k[c].",
        ),
    ),
    Task(
        "01.2",
        "softmax",
        2,
        "Write the kernel `softmax`: a warp turns each row of S into a row of P and its LSE.",
        (
            "const fa_args a; `rows_per_block` = 4; workspace[0] holds S (B,H,Nq,Nk), contiguous",
            "block: 32 x rows_per_block threads, a warp (threadIdx.y) per row; grid: ceil(B*H*Nq / rows_per_block)",
        ),
        (
            "__global__ void softmax(const fa_args a) is defined",
            "workspace[1] holds P (B,H,Nq,Nk): exp(S - max S) / sum, by rows",
            "a.LSE (B,H,Nq) = max S + ln(sum of exp(S - max S)), natural logarithm",
            "a row without a finite score (all -inf) gives P = 0 and LSE = -inf",
        ),
        (
            "Three passes over the row, each lane at elements lane, lane + 32, ..: maximum, sum, quotient.",
            "Five __shfl_xor_sync(0xffffffff, x, mask) with mask 16, 8, .. 1 give every lane the maximum (or the sum) of the warp.",
            "exp(S) overflows from 89 on: subtract the row's maximum. Whole warps may leave early, single lanes may not: a "
            "lane that has left has no x for the others to read.",
        ),
    ),
    Task(
        "01.3",
        "output",
        1,
        "Write the kernel `output`: a thread per element of O = P V.",
        (
            "const fa_args a; `tile` = 16; workspace[1] holds P (B,H,Nq,Nk), contiguous",
            "grid: x = B*H * ceil(Nq / tile) as in `scores`; y = ceil(D / tile); block: tile x tile, x along the columns of V",
        ),
        (
            "__global__ void output(const fa_args a) is defined",
            "O[b][h][i][c] = sum over j of P[b][h][i][j] * V[b][h][j][c], at O's strides",
        ),
        (
            "The same head, tile and query as in `scores`; the other index is a column c < a.D.",
            "Row j of V begins at j * a.V_stride[2]; O's row i at i * a.O_stride[2].",
        ),
    ),
    whole(
        "01",
        "Three kernels, launched one after the other on the same stream: S to workspace[0], P to workspace[1], then O.",
        "Begin with a thread per element and no shared memory: 256 threads a block, one loop each.",
        "Strides of Q, K, V and O are arbitrary, those of the workspace are not. Subtract the row's maximum before exp.",
    ),
    Task(
        "02.1",
        "merge",
        1,
        "Write `State` and `merge`: what a part of a row is summarised by, and how two summaries become one.",
        ("FA_INFINITY, fmaxf, expf",),
        (
            "struct State { float m, l; } is defined: of a part x of a row m = max x and l = sum of exp(x - m); without elements "
            "(-inf, 0)",
            "__device__ State merge(State a, State b) gives the state of both parts together",
            "merging with (-inf, 0) changes nothing, from either side, and never gives a NaN",
        ),
        (
            "The new m is the larger one. Each l counts exponentials relative to its own m: what factor makes it relative to the new one?",
            "l = a.l * expf(a.m - m) + b.l * expf(b.m - m).",
            "Two empty parts: -inf - -inf is NaN. Subtract 0 instead of m where m is -inf.",
        ),
    ),
    Task(
        "02.2",
        "merge_threads",
        3,
        "Write `merge_lanes` and `merge_threads`: every thread of a block brings a state and takes home the merged one.",
        (
            "State and merge(State, State) from above",
            "`threads` is 32, or a power of two up to 1024 that is the whole block; all of them call",
            "with threads = 32 a block may have several warps, each with a row of its own",
        ),
        (
            "template <int lanes> __device__ State merge_lanes(State s): the merged state of groups of `lanes` neighbouring lanes, "
            "in all of them",
            "template <int threads> __device__ State merge_threads(State s): that of `threads` threads, in all of them",
        ),
        (
            "A butterfly: exchange m and l with the lane whose number differs in one bit, and merge; once for every bit.",
            "With several warps: one lane of each writes its warp's state to shared memory, a barrier, and every warp merges those.",
            "With threads = 32 there must be no barrier and no shared memory: another warp's row may have left already.",
        ),
    ),
    Task(
        "02.3",
        "softmax",
        3,
        "Write the kernel `softmax`: a slice of a row in registers, read once, its state merged, P written from what is there.",
        (
            "template parameters threads and V: a thread holds 4 V elements; a slice fits in threads * 4 V",
            "grid (ceil(rows / blockDim.y) * slices), block (threads, rows of the block); Q holds S (rows,N), O receives P; Nq = rows, Nk = N",
            "slice_of(row, N, slices, s) gives a Slice, whose first element is number 4 * slice.vector0 + slice.first of S; "
            "load<threads, V>(x, S, slice) fills x with -inf where the slice ends; "
            "store<threads, V>(P, x, slice) writes only the slice's own; merge_threads<threads>(State)",
        ),
        (
            "template <int threads, int V> __global__ void softmax(const fa_args a, int slices) is defined",
            "slices == 1: P = exp(S - LSE) by rows and a.LSE[row] = m + ln l",
            "slices > 1: the first two elements of each slice's part of P are the slice's m and l, in that order; nothing else is written",
        ),
        (
            "The state of your own 4 V elements first: their maximum, then exp(x - m) in the place of x, then the sum.",
            "After merging, P = exp(x - m_thread) * exp(m_thread - m_row) / l_row: one factor for all of a thread's elements.",
            "Of the threads of a slice one writes its state, at 4 * slice.vector0 + slice.first. A thread without any element has "
            "m = -inf.",
        ),
    ),
    whole(
        "02",
        "Begin with a warp per row that reads the row twice.",
        "Then keep what was read: 32 lanes with 4 V elements each hold rows up to 128 V.",
        "Long rows have to be cut among blocks, and P is the only memory there is for their states: two elements at the start of "
        "each slice.",
    ),
    Task(
        "03.1",
        "scores",
        1,
        "Write the product S (Br, Bc) = Q_i K_j^T of one tile, each thread its rows x keys elements.",
        (
            "Q_smem (Br, d) and K_smem (Bc, d) with row length T::ld, complete, zeros past the last row",
            "row0, tx: this thread's rows are row0 + r (r < T::rows), its keys tx + c * T::TX (c < T::keys)",
            "fa::load4(x_reg, p): four floats from a 16-byte aligned address",
        ),
        (
            "float S_reg[T::rows][T::keys] is declared; S_reg[r][c] = (row row0 + r of Q) . (key tx + c * T::TX), not yet scaled",
        ),
        (
            "Declare S_reg with = {} and loop over k < d by four.",
            "Load T::rows pieces of Q and T::keys pieces of K, then T::rows * T::keys * 4 FMAs.",
        ),
    ),
    Task(
        "03.2",
        "softmax",
        2,
        "Turn the tile's scores into P~ in shared memory, with the row maxima and sums of this tile alone.",
        (
            "S_reg[T::rows][T::keys] as `scores` left it; row0, tx as there; j0: the tile's first key",
            "row_max<T::TX>(x), row_sum<T::TX>(x): over the threads that share a row, which are lanes of one warp",
            "P_smem (Br, Bc) with row length T::ld_p; a.scale, a.Nk",
        ),
        (
            "float m_tile[T::rows], l_tile[T::rows]: maximum of scale * S and sum of exp(scale * S - maximum) over the tile's keys "
            "below Nk",
            "P_smem[row][key] = exp(scale * S - m_tile), 0 for keys from Nk on, visible to all lanes of the warp",
            "m and l of the tiles before have been read by all lanes of the warp (they are overwritten later)",
        ),
        (
            "Scores of keys j0 + tx + c * T::TX >= a.Nk become -FA_INFINITY, whose exponential is 0.",
            "A row whose scores in this tile are all -inf has m_tile = -inf: subtract 0 then, or exp(-inf + inf) is a NaN.",
            "Lanes of a warp don't run in step: a __syncwarp() at the end.",
        ),
    ),
    Task(
        "03.3",
        "merge",
        2,
        "Merge the tile's (m~, l~, P~ V) into m, l and O in global memory.",
        (
            "m_tile, l_tile, m_old, l_old [T::rows]; PV_reg[T::rows][T::cols]: P~ V of this thread's rows and columns, columns "
            "4 tx + c * T::TX + {0..3} for c = 0, 4, ..",
            "i0 + row0 + r: the row of Q; m, l (Nq) and O (row stride a.O_stride[2]) in global memory, O divided by l already",
            "j0, Bc, a.Nk: this tile is the last one if j0 + Bc >= a.Nk",
        ),
        (
            "O = (exp(m_old - m_new) l_old O + exp(m_tile - m_new) PV) / l_new for rows below Nq",
            "one thread of each row has written m[i] = m_new and l[i] = l_new",
            "with the last tile a.LSE[head * Nq + i] = m_new + ln l_new",
        ),
        (
            "m_new = fmaxf(m_old, m_tile); both l become relative to it.",
            "Read O with load4, mix, write with store4: T::cols floats of a row, by fours.",
            "m_old is -inf before the first tile: its weight expf(-inf) is 0. A row of only -inf needs a finite m and 1 / l = 0.",
        ),
    ),
    whole(
        "03",
        "A CTA per head; outer loop over tiles of keys, inner loop over tiles of queries; O, m and l travel.",
        "Write O = 0, l = 0, m = -inf first; then merge every tile into them as in 02.",
        "A tile in shared memory is overwritten while others may still read it: two barriers per inner step.",
    ),
    Task(
        "04.1",
        "online_update",
        2,
        "Write the online softmax: raise the running maximum, turn S into P, rescale l and O.",
        (
            "S_reg[8][8]: scores of this thread's 8 rows and 8 columns, in units of log2, -inf past the last key",
            "m_reg[8]: running maximum of each row, the same in the T::TX lanes that share it; l_reg[8]: sum over this thread's "
            "columns alone; O_reg[8][8]: rows by columns of d, not divided by l",
            "lanes that share a row differ in the bits T::TY, 2 T::TY, .. 16 of their number",
        ),
        (
            "m_reg: maximum including this tile, over all lanes of the row",
            "S_reg[r][c] = exp2(S - m_reg[r]): P; 0 where S was -inf",
            "l_reg, O_reg multiplied by exp2(m_before - m_reg), l_reg plus this thread's P; nothing is ever NaN",
        ),
        (
            "Per row: maximum over 8 columns, then over the lanes by __shfl_xor_sync with mask = T::TY, 2 T::TY, .. < 32.",
            "alpha = exp2f(m_before - m_new) rescales the row's l and its eight O.",
            "m_new may be -inf (no key so far): subtract 0 instead, so that exp2(-inf) = 0.",
        ),
    ),
    Task(
        "04.2",
        "epilogue",
        1,
        "Finish: the sum of l over the lanes of a row, O / l and LSE to global memory.",
        (
            "O_reg[8][8], m_reg[8] in units of log2, l_reg[8] of this thread's columns alone",
            "i0 + row0 + r % 4 + r / 4 * (T::warp_rows / 2): the query of row r; col0 + {0..3} and the same + d / 2: its columns of O",
            "tx: 0 in one of the lanes that share a row; head = b * H + h; O: the head's first row, a.O_stride[2] elements from row to "
            "row; fa::store4(p, x): four floats x[0] .. x[3] to a 16-byte aligned address p; fa::ln_2",
        ),
        (
            "O (Nq,d) = O_reg / l, 0 where l = 0, for queries below Nq",
            "a.LSE[head * Nq + i] = ln(l * 2^m)",
        ),
        (
            "The lanes of a row differ in the bits T::TY .. 16: add l over them, with all lanes of the warp taking part. Inside "
            "if (i < a.Nq) the shuffles' result is undefined, even where the check finds it right.",
            "Columns c = 0..3 of O_reg lie at col0, columns 4..7 at col0 + d / 2: two store4 per row.",
            "ln(l 2^m) = (m + log2(l)) * fa::ln_2.",
        ),
    ),
    Task(
        "04.3",
        "output",
        3,
        "Write O += P V_j: P through shared memory, half of the keys at a time, V slab by slab.",
        (
            "S_reg[8][8] holds P: rows row0 + {0..3}, + T::warp_rows / 2; keys col0 + {0..3}, + d / 2",
            "P_smem (Bc / 2, ld_q) for half of P^T: key by row; each warp uses its own columns. V_smem: 2 x (Ks, ld_k), slab s in "
            "buffer s % 2; slab 0 of this tile is there",
            "fetch_V() brings the next slab to registers, commit_V(s) writes them to slab s's buffer; T::slabs slabs per tile; "
            "multiply<d>(acc, A_smem, B_smem) adds a slab's product",
        ),
        (
            "O_reg[8][8] += P V_j for this thread's rows and columns",
            "slab 0 of the next tile is in its buffer, and all threads are past a barrier behind the last read of V_smem",
        ),
        (
            "For each half: write its columns of P transposed (four rows at a time by fa::store4), __syncwarp(), then T::slabs / 2 slabs.",
            "Around every product: fetch_V() before it, commit_V(slab + 1) and __syncthreads() after it.",
            "A is P_smem + s * Ks * ld_q + row0, with s counted within the half; B is V_smem + slab % 2 * Ks * ld_k + col0.",
        ),
    ),
    whole(
        "04",
        "A CTA per tile of queries; O, m and l in registers; a loop over tiles of keys. Begin without slabs: whole tiles of K and V.",
        "Every thread an 8 x 8 tile of S and of O; P goes through shared memory between the two products.",
        "Rescale O and l whenever m rises, divide once at the end, and mask the last tile before the maximum is taken.",
    ),
)
