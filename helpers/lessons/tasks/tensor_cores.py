"""Region tasks of the rungs on Ampere's tensor cores, 10 to 13."""

from .task import Task, whole

LANES = "g = lane / 4, t = lane % 4: of a 16 x 8 accumulator x[4] a lane holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)"
ROWS = "fa::ldmatrix_x4(r, p), fa::ldmatrix_x4_trans(r, p): lane l names row l % 8 of matrix l / 8, 16 bytes"
MMA = "fa::mma_m16n8k16<T>(c, a, b0, b1): c (16, 8) += a (16, 16) b (16, 8)"
COPY_LOOP = "row = threadIdx.x / (d / 8) and chunk = threadIdx.x % (d / 8): neighbours along a row, 16 bytes each; then the rows {step} further on."

TASKS = (
    Task(
        "10.1",
        "load_tile",
        1,
        "Write `load_tile`: all threads of a CTA copy rows of a tile to shared memory, 16 bytes at a time.",
        (
            "template parameters rows, d, T (16-bit elements); Tile<d>::threads threads call it",
            "at<d>(row, chunk): where chunk (8 elements) of a row lies in shared memory, in elements",
            "X: the tile's first row in global memory, `stride` elements from row to row; rows_left: rows of X from here on, possibly <= 0",
        ),
        (
            "template <int rows, int d, typename T> __device__ void load_tile(T *X_smem, const T *X, int64_t stride, int rows_left)",
            "X_smem (rows, d) = the rows of X; rows from rows_left on are zero and are not read",
        ),
        (
            COPY_LOOP.format(step="Tile<d>::threads / (d / 8)"),
            "A uint4 is 16 bytes: x = *reinterpret_cast<const uint4 *>(address).",
            "Start from make_uint4(0, 0, 0, 0) and read only where row + r < rows_left.",
        ),
    ),
    Task(
        "10.2",
        "scores",
        3,
        "Write S (16, Bc) = Q_i K_j^T of a warp with ldmatrix and mma.sync, scaled and masked.",
        (
            "Q_reg[d / 16][4]: the warp's A fragments of Q_i; K_smem (Bc, d) by at<d>(row, chunk), zeros past the last key",
            "row_B = lane % 8 + lane / 16 * 8, chunk_B = lane / 8 % 2; " + LANES,
            ROWS + "; " + MMA,
            "scale_log2; j0: the tile's first key; a.Nk",
        ),
        (
            "float S_reg[Bc / 8][4] is declared: accumulator n has keys 8n .. 8n + 7",
            "S_reg = scale_log2 * Q K^T, -inf for keys from a.Nk on",
        ),
        (
            "One ldmatrix_x4 brings 16 keys by 16 columns of d: two B fragments, of keys 16n + {0..7} and 16n + {8..15}.",
            "Address: K_smem + at<d>(16 * n + row_B, 2 * k + chunk_B); the first fragment is registers 0 and 1, the second 2 and 3.",
            "Element e of accumulator n is key j0 + 8n + 2t + e % 2. Scale first, then mask: a negative scale turns -inf around.",
        ),
    ),
    Task(
        "10.3",
        "output",
        3,
        "Write O (16, d) += P V_j of a warp; P goes from accumulators to fragments without leaving the registers.",
        (
            "S_reg[Bc / 8][4] holds P; O_reg[d / 8][4]; " + LANES,
            "V_smem (Bc, d) by at<d>(row, chunk); row_A = lane % 16, chunk_A = lane / 16",
            "fa::pack2<T>(x, y): two floats as 16-bit numbers, x in the low half; " + ROWS + "; " + MMA,
        ),
        ("O_reg += P V_j; accumulator n has columns 8n .. 8n + 7 of d",),
        (
            "Accumulators 2k and 2k + 1 of S are the A fragment of keys 16k .. 16k + 15.",
            "a[0], a[1]: rows g and g + 8 of the left accumulator; a[2], a[3]: of the right one.",
            "V's rows are keys, the product's inner dimension: ldmatrix with .trans, at V_smem + at<d>(16 * k + row_A, 2 * n + chunk_A).",
        ),
    ),
    Task(
        "10.4",
        "online_update",
        2,
        "Write the online softmax on fragments: a row is spread over four lanes, two rows per lane.",
        (
            "S_reg[Bc / 8][4] in units of log2, -inf past the last key; " + LANES,
            "m_reg[2], l_reg[2], O_reg[d / 8][4]: of rows g (elements 0, 1) and g + 8 (2, 3); l of this lane's columns alone",
            "fa::ex2_approx_ftz(x): 2^x",
        ),
        (
            "m_reg: maximum including this tile, the same in the four lanes of a row",
            "S_reg = exp2(S - m_reg): P; l_reg and O_reg multiplied by exp2(m_before - m_reg), l_reg plus this lane's P",
        ),
        (
            "The four lanes of a row differ in bits 0 and 1: two shuffles, mask 1 and 2.",
            "For r = 0, 1 the row's elements are 2r and 2r + 1 of every accumulator, of S and of O.",
        ),
    ),
    whole(
        "10",
        "Four warps, 16 query rows each; tiles of 64 keys in shared memory; Q's fragments stay in registers.",
        "Get S right first: store it instead of O and compare. Then the online softmax of 04, then P V with ldmatrix .trans.",
        "The layout of an accumulator is that of an A fragment: two accumulators side by side, packed. No shuffles are needed.",
    ),
    Task(
        "11.1",
        "swizzle",
        2,
        "Write `at`: where a chunk of a row lies, so that ldmatrix meets no bank conflict at any head dimension.",
        (
            "d is 32, 64 or 128: a row has d / 8 chunks of 16 bytes; the 32 banks are 8 chunks wide",
            "ldmatrix reads the same chunk of 8 neighbouring rows (from a multiple of 8 on) at once",
        ),
        (
            "template <int d> __device__ constexpr int at(int row, int chunk): in elements, a multiple of 8",
            "each chunk of a (rows, d) tile has a place of its own inside the tile, and stays in its row",
            "the 8 chunks that ldmatrix reads at once lie in 8 different places of the banks",
        ),
        (
            "Leave the row where it is and let its chunks trade places: XOR with something that differs from row to row.",
            "d = 64 and more: chunk ^ row % 8. The XOR must not leave the row: 8 values need 8 chunks.",
            "d = 32: two rows fill the banks, so pairs of rows need different places: chunk ^ row / 2 % 4.",
        ),
        lean=True,
    ),
    Task(
        "11.2",
        "load_tile",
        1,
        "Write `load_tile` for swizzled tiles: the copy of 10, with the places that `at` gives.",
        (
            "template parameters rows, d, T (16-bit elements); Tile<d>::threads threads call it",
            "at<d>(row, chunk): where chunk (8 elements) of a row lies in shared memory, in elements",
            "X: the tile's first row in global memory, `stride` elements from row to row; rows_left: rows of X from here on, possibly <= 0",
        ),
        (
            "template <int rows, int d, typename T> __device__ void load_tile(T *X_smem, const T *X, int64_t stride, int rows_left)",
            "X_smem (rows, d) = the rows of X, chunk by chunk at at<d>(row, chunk); rows from rows_left on are zero and are not read",
            "no bank conflicts: 8 neighbouring lanes write 8 chunks in different places of the banks",
        ),
        (
            COPY_LOOP.format(step="Tile<d>::threads / (d / 8)"),
            "Only the address in shared memory knows of the swizzle.",
        ),
        lean=True,
    ),
    Task(
        "11.3",
        "fragments",
        3,
        "Write the addresses of ldmatrix for both operands, and load Q_i's fragments for the whole loop.",
        (
            "load_tile<rows, d>(X_smem, X, stride, rows_left), by all threads; at<d>(row, chunk)",
            "Q: the head's first row, a.Q_stride[2] elements from row to row; i0: this CTA's first query; a.Nq",
            "Q_smem (Br, d); warp, lane; " + ROWS,
        ),
        (
            "const int row_A, chunk_A, row_B, chunk_B are declared: lane l's row and chunk for four 8 x 8 matrices. A (and V with "
            ".trans): matrices 0, 1 one below the other, 2 and 3 right of them; B (K): 0, 1 side by side, 2 and 3 below them",
            "uint32_t Q_reg[d / 16][4]: A fragments of rows 16 * warp .. + 16 of Q_i, zeros past the last query",
            "a barrier separates what was written to Q_smem from what is read",
        ),
        (
            "Lanes 0-7 name the rows of matrix 0, lanes 8-15 of matrix 1, and so on.",
            "A: row = lane % 16, chunk = lane / 16. B: the other way: row = lane % 8 + lane / 16 * 8, chunk = lane / 8 % 2.",
            "Step k of Q: at<d>(16 * warp + row_A, 2 * k + chunk_A).",
        ),
    ),
    whole(
        "11",
        "Everything of 10; only where a chunk lies in shared memory is new.",
        "Put the place of a chunk into one function and use it in every copy and every ldmatrix.",
        "XOR with the row's number, modulo the chunks that may trade places. The X-ray says whether conflicts are left.",
    ),
    Task(
        "12.1",
        "load_tile",
        1,
        "Write `load_tile` with cp.async: the rows are sent on their way, and nobody waits.",
        (
            "template parameters rows, d, T; Tile<d>::threads threads call it; at<d>(row, chunk) in elements",
            "fa::cp_async_16(to, from, bytes): 16 bytes to shared memory, of which `bytes` (0 or 16) are read and the rest is zero",
            "X, stride, rows_left as in 10",
        ),
        (
            "template <int rows, int d, typename T> __device__ void load_tile(T *X_smem, const T *X, int64_t stride, int rows_left)",
            "the copies of X_smem (rows, d) are issued, neither committed nor waited for; rows from rows_left on become zero, "
            "without being read",
        ),
        (
            COPY_LOOP.format(step="Tile<d>::threads / (d / 8)"),
            "The zeros are cp.async's: pass row + r < rows_left ? 16 : 0.",
        ),
        without=("cp_async_commit", "cp_async_wait"),
    ),
    Task(
        "12.2",
        "pipeline",
        3,
        "Write the pipeline's start: `fetch`, Q_i's copies, and the first stages - 1 tiles on their way. With the rung's two stages a "
        "group that is missing does not show: try yours with three, by "
        'check(load(source=my_pipeline.rung.replace("stages = 2", "stages = 3"))).',
        (
            "load_tile<rows, d>(X_smem, X, stride, rows_left); fa::cp_async_commit(): the copies since the last commit become a group",
            "KV_smem: stages x {K (Bc, d), V (Bc, d)}; Q_smem: in the last stage",
            "K, V, Q: the head's first rows, a.K_stride[2], a.V_stride[2], a.Q_stride[2] elements from row to row; i0; a.Nq, a.Nk",
        ),
        (
            "fetch(j0, stage) is callable: sends keys j0 .. j0 + Bc of K and V to a stage and makes one group of them; past the last "
            "key the group is empty",
            "groups so far, the oldest first: Q_i (Br rows from i0 on, zeros past Nq), then tiles 0 .. stages - 2 in stages 0 .. stages - 2",
        ),
        (
            "fetch is a lambda [&](int j0, int stage): two load_tile if j0 < a.Nk, and a commit in any case.",
            "Counting groups is counting tiles only if every fetch commits, empty or not.",
            "rows_left is a.Nk - j0 for K and V, a.Nq - i0 for Q.",
        ),
    ),
    Task(
        "12.3",
        "epilogue",
        1,
        "Finish on fragments: the sum of l over the four lanes of a row, O / l and LSE to global memory.",
        (
            "O_reg[d / 8][4], m_reg[2] in units of log2, l_reg[2] of this lane's columns alone; " + LANES,
            "i0 + 16 * warp + g + 8 * r: the query of row r; b, h, head = b * H + h; fa::pack2<T>(x, y), fa::ln_2",
            "static_cast<T *>(a.O), with a.O_stride[0], [1] and [2] elements from b to b, h to h and row to row",
        ),
        (
            "O (Nq,d) = O_reg / l rounded to T, 0 where l = 0, for queries below Nq",
            "a.LSE[head * Nq + i] = ln(l * 2^m)",
        ),
        (
            "Two shuffles, mask 1 and 2, with all lanes of the warp taking part. Inside if (i < a.Nq) their result is undefined, even "
            "where the check finds it right.",
            "Elements 2r and 2r + 1 of accumulator n are columns 8n + 2t and + 1 of a row: one 32-bit store.",
        ),
    ),
    whole(
        "12",
        "Rung 11 with cp.async in load_tile, `stages` buffers, and a commit per tile.",
        "In the loop: wait until at most stages - 2 groups are under way, a barrier, then send the tile that is stages - 1 away.",
        "The stage that is refilled has been read by all warps only after the barrier: fetch behind it, never before.",
    ),
    Task(
        "13.1",
        "epilogue",
        1,
        "Finish on fragments of 32 rows: four rows per lane.",
        (
            "O_reg[d / 8][8], m_reg[4] in units of log2, l_reg[4] of this lane's columns alone; g = lane / 4, t = lane % 4",
            "elements 2r and 2r + 1 of accumulator n: query i0 + 32 * warp + g + 8 * r, columns 8n + 2t and + 1",
            "b, h, head = b * H + h; fa::pack2<T>(x, y), fa::ln_2",
            "static_cast<T *>(a.O), with a.O_stride[0], [1] and [2] elements from b to b, h to h and row to row",
        ),
        (
            "O (Nq,d) = O_reg / l rounded to T, 0 where l = 0, for queries below Nq",
            "a.LSE[head * Nq + i] = ln(l * 2^m)",
        ),
        (
            "As in 12, for r = 0 .. 3.",
            "All lanes shuffle, also those whose query is past the end: else the result is undefined, even where the check finds it right.",
        ),
    ),
    Task(
        "13.2",
        "online_update",
        3,
        "Write the parts of the softmax: `probabilities` with the maximum there is, `raise_maximum` from S, `raise_maximum_by_P` and `round_P`.",
        (
            "S_reg[Bc / 8][8] as mma.sync left it, not scaled; P_reg[Bc / 16][8]; row_sum[4], m_reg[4], l_reg[4], O_reg[d / 8][8]; "
            "largest_sum, 32.f at first",
            "elements 2r and 2r + 1 of accumulator n: row g + 8r, columns 8n + 2t and + 1 (g = lane / 4, t = lane % 4); scale_log2, never 0, may be negative; m_reg in units of log2, finite",
            "a fragment A of 32 rows is that of rows 0-15 (4 registers), then that of rows 16-31; fa::pack2<T>, fa::ex2_approx_ftz",
        ),
        (
            "probabilities() is callable: S_reg = exp2(S * scale_log2 - m_reg), row_sum its sums over this lane's columns; it returns, "
            "the same for all lanes of the warp, whether every row_sum is <= largest_sum",
            "raise_maximum(keys_left) is callable: columns from keys_left on become -inf once they are scaled; m_reg = the "
            "maximum with this tile, the same in the four lanes of a row; l_reg and O_reg multiplied by exp2(m_before - m_reg)",
            "raise_maximum_by_P() is callable where S_reg is exp2(S - m_reg) already, with a sum above largest_sum: it does the same, and "
            "divides S_reg and row_sum as well, and sets largest_sum to 4; it returns false, for the whole warp, and changes nothing "
            "where a sum is 1e30 or more (no case tells 4 from 32, nor 1e30 from 3e38)",
            "round_P() is callable: P_reg is S_reg rounded, as A fragments",
        ),
        (
            "One FMA scales and subtracts: __fmaf_rn(S, scale_log2, -m).",
            "Register e of fragment k: accumulator n = 2k + e / 2 % 2, row r = e / 4 * 2 + e % 2, elements 2r and 2r + 1.",
            "__all_sync(0xffffffff, fits) gives the warp's verdict. A negative scale needs +inf where the mask is.",
            "raise_maximum_by_P: the largest P of a row, at least 1, is exp2(m_new - m): shuffle as for S, m += __log2f(largest).",
        ),
    ),
    Task(
        "13.3",
        "swizzle",
        2,
        "Write `at` in bytes, and `right`: one XOR that moves a lane's address along its row.",
        (
            "d is 64 or 128: a row has d / 8 chunks of 16 bytes; the banks are 8 chunks wide",
            "addresses are 32-bit offsets; a tile begins at a multiple of 1024",
        ),
        (
            "template <int d> __device__ constexpr int at(int row, int chunk): in bytes; each chunk a place of its own in its row; the "
            "same chunk of 8 neighbouring rows lies in 8 different places of the banks",
            "at<d> repeats every 8 rows: at<d>(row + 8, chunk) = at<d>(row, chunk) + 8 rows",
            "__device__ constexpr uint32_t right(uint32_t place, int k): from the place of chunk 0 or 1 of a row to that of the chunk "
            "2k further right",
        ),
        (
            "at: row * 2 * d + (chunk ^ row % 8) * 16.",
            "A step along the row is one more XOR: the chunk's number sits in bits 4 to 6 of the address, so XOR with k % 4 * 32 moves it by 2k.",
            "With d = 128 a row has 16 chunks: the upper eight lie 128 bytes further on.",
        ),
        lean=True,
    ),
    whole(
        "13",
        "Rung 12 with 32 rows per warp: every fragment of K and V that is read serves two strips of 16 rows.",
        "Backwards through the tiles, the ragged one first; the maximum is sought only where a row's sum says that it must be.",
        "Start with a maximum at every tile: it is right, if slower. Then let the warp try the old one first.",
    ),
)
