# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 91 · The bug museum
#
# **After this notebook you can**
# - explain fifteen bugs that attention kernels have had or could have, each a change of a line or two;
# - go from the shape of an error map, a message or an X-ray to the line that is wrong;
# - judge which kind of test finds which kind of bug, and which bugs no output ever shows.
#
# **Time** 60 minutes.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb) and [90 · Proving it right](90_proving_it_right.ipynb); for the fourth room notebooks 10 to 12 as well. No GPU.
#
# **The idea in one line**: a bug is a small change with a large shadow, and the shadow has the bug's shape.
#
# *The exhibits run on the emulator, on every machine: on a GPU some of them would hang, and some would leave the device in a state in which nothing runs any more.*

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd

from helpers import check, draw_proof, exercise, museum, show, xray

# %% [markdown]
# ## How to visit
#
# Each exhibit shows what was changed (red: the line as it should be; green: the bug). **Before you run the cell after it, predict**: on which inputs is the kernel still right? When it is wrong, where: which rows, which columns, all of it? And who notices: the check, the emulator, the X-ray, or nobody? Then run and compare.
#
# Then mend it. `fix()` puts the red text back and looks at the same inputs again. `fix("this", "that")` changes the green text instead: a cure of your own.
#
# The first exhibit in slow motion, with what `visit()` does for the others written out.

# %% [markdown]
# ## Room 1 · Wrong numbers
#
# ### A maximum that starts at zero
#
# Zero is where one starts a sum, so it is what fingers type. The running maximum has to start at the neutral element of max, which is $-\infty$. (A tiny number such as `1e-30` or `FLT_MIN` is zero all over again: small is not low.)
#
# *Known*: [FlashInfer 4267](https://github.com/flashinfer-ai/flashinfer/issues/4267): the maximum began at −50000; a row of a real model had all its scores below that, and its output was zero.

# %%
exhibit = museum.EXHIBITS["max_from_zero"]
exhibit.diff()

# %%
for name in ("random", "not a multiple", "very negative"):
    report = check(exhibit.kernel, [exhibit.case(name)])
    print(f"{exhibit.case(name).name}: {'right' if report.ok else 'WRONG'}")
print("\n".join(wrong.explain() for wrong in report.failures))

# %%
exhibit.map()

# %% [markdown]
# **What to see.** The map draws $|\text{error}|$ in units of the error budget (notebook 90), LSE as a strip beside $O$. Random inputs are *right*: among a hundred random scores some are positive, and from the first of them on the maximum is what it should be. With all scores near $-10^4$ every $e^{S - 0}$ underflows, $l = 0$, and the guard against empty rows turns the output into zeros: the whole map, no structure. An error without structure says: look at the arithmetic of a row, not at indices.
#
# **Fix.** Start at $-\infty$. The first tile then has $\alpha = e^{-\infty - m} = 0$, which is just what an empty state has to contribute. The second line tries FlashInfer's −50000 instead: **predict** what it prints.

# %%
exhibit.fix()
exhibit.fix("m_reg[r] = 0.f", "m_reg[r] = -5e4f")

# %% [markdown]
# Mended, says the second line too: −50000 is lower than these scores. The model had lower ones. A check knows its inputs, not the bug.
#
# ### A sum that is not rescaled
#
# When a tile brings a larger maximum, everything summed so far belongs to the old one and has to be multiplied by $\alpha = e^{m - m^{new}}$. Here $O$ is, and $l$ is not. **Predict**: at which $N$ does it begin to show ($B_c = 64$)? In all rows?

# %%
museum.EXHIBITS["l_not_rescaled"].diff()

# %%
museum.EXHIBITS["l_not_rescaled"].visit()

# %% [markdown]
# **What to see.** One tile: exact. More: whole rows are wrong, all columns alike, and some rows are right: those whose largest score lies in the first tile, so that $\alpha = 1$ ever after. About a quarter of the rows should be right here, four tiles having equal chances; count the light ones. Stripes across all columns are the mark of anything that is *one number per row*: $m$, $l$, $\alpha$.
#
# **Fix.** `l = l * alpha + row_sum`. $O$ and $l$ are the same sum, with and without $V$, so whatever is done to one has to be done to the other.

# %%
museum.EXHIBITS["l_not_rescaled"].fix()

# %% [markdown]
# ### Zero is not nothing
#
# Keys past the end are filled with zeros, which looks safe. But a score of 0 is a score, and $e^{0 - m}$ is a weight like any other.
#
# *Known*: FlashInfer's block-sparse kernel, [pull request 5090](https://github.com/flashinfer-ai/flashinfer/pull/5090): out-of-bounds keys zero-filled by the copy engine "produced score=0, giving exp(0)=1 softmax weight".

# %%
museum.EXHIBITS["tail_not_masked"].diff()

# %%
museum.EXHIBITS["tail_not_masked"].visit()

# %% [markdown]
# **What to see.** Every row and column, by about the same factor: with $N = 100$ there are 28 intruders beside 100 keys, so the denominator is too large and $O$ too small, and LSE too large everywhere. Any test whose $N$ is a multiple of the tile passes. That is why the case list has lengths one off every tile edge.
#
# **Fix.** Scores past the last key become $-\infty$ before the maximum is taken. Filling $K$ and $V$ with zeros is still needed: zero times garbage is not zero (room 2).

# %%
museum.EXHIBITS["tail_not_masked"].fix()

# %% [markdown]
# ### Infinity minus infinity
#
# A row whose scores are all $-\infty$, as a mask makes it, has the maximum $-\infty$. Then $-\infty - (-\infty)$ is NaN, and NaN is contagious.
#
# *Known*: [PyTorch 103963](https://github.com/pytorch/pytorch/issues/103963), NaN from `scaled_dot_product_attention` for rows that a mask hides, settled by a [safe softmax](https://github.com/pytorch/pytorch/pull/131060); [Burn 4697](https://github.com/tracel-ai/burn/pull/4697) and others since.

# %%
museum.EXHIBITS["inf_minus_inf"].diff()

# %%
museum.EXHIBITS["inf_minus_inf"].visit()

# %% [markdown]
# **What to see.** Rows 5, 9 and 13, which are masked; and nothing else. In this kernel the guard protects not only masked rows: a *thread* none of whose elements exists ($N = 100$, 32 lanes, four elements each: seven lanes get nothing) has an empty part of a healthy row, and without the guard its NaN spreads to the whole row in the merge.
#
# **Fix.** Subtract 0 instead of $m$ where $m$ is $-\infty$: $e^{-\infty - 0} = 0$. And guard the division by $l = 0$ as well.

# %%
museum.EXHIBITS["inf_minus_inf"].fix()

# %% [markdown]
# ### The output nobody looks at
#
# $O$ is what a model uses. LSE is for the backward pass and for merging parts of the keys, so a forward test often ignores it. Inside, the kernel works in powers of two.
#
# *Known*: [PyTorch 181645](https://github.com/pytorch/pytorch/issues/181645): flex attention returned LSE off by a factor of $\ln 2$ with one of its back ends; a conversion was applied twice.

# %%
museum.EXHIBITS["lse_in_log2"].diff()

# %%
museum.EXHIBITS["lse_in_log2"].visit()

# %% [markdown]
# **What to see.** $O$ untouched, LSE wrong throughout. The ratio *got / expected* is the diagnosis: $8.2506 / 5.71888 = 1.4427 = \log_2 e$. Ratios that are $\ln 2$, $\log_2 e$, $\sqrt d$, 2 or $B_c / N$ are signatures; divide before you debug.
#
# **Fix.** Multiply by $\ln 2$ once. And check LSE wherever $O$ is checked.

# %%
museum.EXHIBITS["lse_in_log2"].fix()

# %% [markdown]
# ## Room 2 · Stopped at the door
#
# What is in this room need not produce a wrong number: on a GPU it may give an error code, a hang, a crash, somebody else's data, or the right answer. The emulator stops it at the instruction and says why.
#
# ### The launch that never happened
#
# A block gets 48 KB of shared memory without asking. This kernel needs 84 KB, so it has to ask (`cudaFuncSetAttribute`), and a launch that fails says so only to those who look.
#
# *Known*: [flash-attention-minimal](https://github.com/tspeterkim/flash-attention-minimal/blob/main/flash.cu) asks for $3 \cdot 32 \cdot d \cdot 4 + 4096$ bytes and neither opts in nor looks at the error: at $d = 128$ that is 52 KB, and its output is a tensor of zeros that the kernel would have filled. (Read, not run. To its credit it prints both sizes.)

# %%
museum.EXHIBITS["no_opt_in"].diff()

# %%
museum.EXHIBITS["no_opt_in"].visit()

# %% [markdown]
# **What to see.** Nothing was written, in no time at all. With outputs from `torch.empty` the reader of a benchmark sees a wonderful speed-up. The poison (notebook 90) is what makes "never written" a certainty.
#
# **Fix.** Ask for the memory, return every error, and raise it where Python calls. The second line does half of it: it looks at the error, and still doesn't ask.

# %%
museum.EXHIBITS["no_opt_in"].fix()
museum.EXHIBITS["no_opt_in"].fix("cudaSuccess", "cudaGetLastError()")

# %% [markdown]
# ### A thread that goes home early
#
# "No row for me? Return." Right in a kernel without barriers. Here the other threads come to `__syncthreads()` and wait for all threads of the block. **Predict** which lengths survive.
#
# *Known*: threads of one block that don't come to the same barrier were [reported by synccheck](https://github.com/ggml-org/llama.cpp/issues/27678) in llama.cpp's tensor-core attention, in a configuration whose ordinary tests pass. (The language leaves open what happens; on today's GPUs a returned thread often doesn't hang the others, and the bug lives on.)

# %%
museum.EXHIBITS["early_return"].diff()

# %%
museum.EXHIBITS["early_return"].visit()

# %% [markdown]
# **What to see.** No map, as there is no output; but who waits where, and who is gone: 144 threads wait, 112 have returned. Those are the threads of rows 36 to 63 of the second query tile, $64 + 36 = 100 = N$.
#
# **Fix.** Every thread lives to the end; what is guarded is what it reads and writes.

# %%
museum.EXHIBITS["early_return"].fix()

# %% [markdown]
# ### Zero times garbage
#
# The weights of keys past the end are 0. So why fill $K$ and $V$ at all? Shared memory holds what the last kernel left there, and if that happens to be the bits of a NaN or an infinity, $0 \cdot \mathrm{NaN} = \mathrm{NaN}$. **Predict**: $N = 100$ is no multiple of the tile, $B_c = 32$. Is it caught there?

# %%
museum.EXHIBITS["tail_not_filled"].diff()

# %%
museum.EXHIBITS["tail_not_filled"].visit()

# %% [markdown]
# **What to see.** $N = 100$ passes, and by good right: the last tile's missing rows still hold the keys of the tile before it, finite numbers that get the weight 0. Only where the *first* tile is not full, $N < 32$, memory is read that nobody ever wrote. On a GPU even that passes on most days. The emulator marks every byte of shared memory as unwritten when a block starts.
#
# **Fix.** Store zeros where there is no row.

# %%
museum.EXHIBITS["tail_not_filled"].fix()

# %% [markdown]
# ### Reading a little further
#
# The rows past the end are masked anyway, so why guard the load? The memory behind $K$ usually belongs to somebody: the next head, another tensor, PyTorch's cache.

# %%
museum.EXHIBITS["past_the_end"].diff()

# %%
museum.EXHIBITS["past_the_end"].visit()

# %% [markdown]
# **What to see.** How far past its end, and in which tensor. On a GPU this goes well until the tensor lies at the end of its allocation, or a NaN lies behind it. (With $0 \cdot \mathrm{NaN}$ again: *nobody* masks $V$.) The same can be read in flash-attention-minimal's loads, which have no bound: the lengths it takes are multiples of 32.
#
# **Fix.** A predicate per row, and zeros where it is false. Where most tiles are full, test once per tile whether it is.

# %%
museum.EXHIBITS["past_the_end"].fix()

# %% [markdown]
# ## Room 3 · Right, for the moment
#
# ### The barrier that nobody missed
#
# `10_fa2_mma_fp16`, the first rung on tensor cores, has two barriers per tile: one after the loads, one at the end, so that nobody overwrites a tile that others still read. The second one is gone. **Predict**: at which $N$ does the check notice?
#
# *Known*: two missing barriers in llama.cpp's attention kernels, found by [racecheck](https://github.com/ggml-org/llama.cpp/pull/13438); two more later, "masked only by codegen/scheduling luck" ([28358](https://github.com/ggml-org/llama.cpp/pull/28358), open when this was written). Missing synchronisation that did give wrong results for some shapes: [FlashMLA-ETAP 3](https://github.com/pengcuo/FlashMLA-ETAP/pull/3).

# %%
museum.EXHIBITS["no_last_barrier"].diff()

# %%
museum.EXHIBITS["no_last_barrier"].visit()

# %% [markdown]
# **What to see.** Right at every length. The emulator runs the threads of a block in one of many possible orders, a GPU in another, and in this one nobody happens to be overtaken. The X-ray doesn't ask who won. It keeps, for every piece of shared memory, who wrote and who read it, and reports two accesses that *no barrier orders*: which lines, which threads, which place. (It names the first pair it meets; there are thousands, and the count stands beside it.)
#
# **Fix.** The barrier back in. Notebook 12 gets by with one, by writing to a buffer that nobody reads.

# %%
museum.EXHIBITS["no_last_barrier"].fix()

# %% [markdown]
# ### In lock step
#
# The lanes of a warp execute together, don't they? They did until 2017. Since Volta each has a program counter of its own, and the order of two lanes' accesses is only what `__syncwarp()` makes it.

# %%
museum.EXHIBITS["no_syncwarp"].diff()

# %%
museum.EXHIBITS["no_syncwarp"].visit()

# %% [markdown]
# **What to see.** Right again, and three races: a lane reads what its neighbour wrote to `P_smem` a few lines before, and overwrites $m$ and $l$ that the neighbour reads, with nothing between. Today's compilers keep the lanes together here; the next version may not, and no test will say so.
#
# **Fix.** `__syncwarp()`, which costs next to nothing. A shuffle between the two (with a full mask) brings lanes together too, but makes no promise about memory.

# %%
museum.EXHIBITS["no_syncwarp"].fix()

# %% [markdown]
# ## Room 4 · Tensor cores
#
# These need notebooks 10 to 12: `ldmatrix` hands the elements of a tile to lanes, `mma.sync` multiplies what the lanes hold, the swizzle decides where a tile's 16-byte chunks lie, `cp.async` brings them.
#
# ### Five letters
#
# $V_j$ lies in memory with keys as rows, and $P V$ wants it by columns: `ldmatrix` has a variant that transposes on the way, `.trans`. **Predict**: is LSE right? Are all elements of $O$ wrong, or some?

# %%
museum.EXHIBITS["no_trans"].diff()

# %%
museum.EXHIBITS["no_trans"].visit()

# %% [markdown]
# **What to see.** LSE right, $O$ wrong from corner to corner: each 8 × 8 piece of $V$ was transposed in place. The numbers have the right size and look like attention; what they are is a weighted sum of the wrong elements. With $V = 1$ this bug is invisible, as the transpose of a matrix of ones is itself.
#
# **Fix.** `ldmatrix_x4_trans`. And a test with $V$ that isn't constant.

# %%
museum.EXHIBITS["no_trans"].fix()

# %% [markdown]
# ### A swizzle on one side
#
# The swizzle of notebook 11 lets the chunks of a row trade places: chunk $c$ of row $r$ lies at $c \oplus (r \bmod 8)$. Writing and reading have to agree. Here $Q$ is written swizzled and read plainly. **Predict** which rows are right.

# %%
museum.EXHIBITS["one_sided_swizzle"].diff()

# %%
museum.EXHIBITS["one_sided_swizzle"].visit()

# %% [markdown]
# **What to see.** A comb: rows 0, 8, 16, … are right, since $c \oplus 0 = c$; all others were computed from their own row of $Q$ with its chunks out of order. The period of a comb is a number of your code: 8 is the swizzle's, 16 a fragment's, 64 the tile's.
#
# **Fix.** One function for the address, used by every reader and every writer. That is what `at()` is for.

# %%
museum.EXHIBITS["one_sided_swizzle"].fix()

# %% [markdown]
# ### Waiting for one less
#
# `cp.async.wait_group n` waits until *at most n* groups of copies are still on their way. With two stages the tile that is needed now is the newest group: $n = 0$. Here it is 1.

# %%
museum.EXHIBITS["waits_for_one_less"].diff()

# %%
museum.EXHIBITS["waits_for_one_less"].visit()

# %% [markdown]
# **What to see.** On a GPU this is right whenever the copy has arrived by chance, which at small sizes and with data in the L2 is nearly always. The emulator lets a copy land as late as the program allows, at the wait that covers it, and knows which bytes are *in flight* until then.
#
# **Fix.** `stages − 2`. Say it aloud: of the groups sent so far, how many may be unfinished when I start to read?

# %%
museum.EXHIBITS["waits_for_one_less"].fix()

# %% [markdown]
# ### 65504
#
# That is the largest fp16 number. The scores are summed in fp32, and here they pass through 16 bits *before* they are multiplied by the scale. **Predict**: random inputs? And with all scores about $10^4$, where the products before scaling are $8 \cdot 10^4$?
#
# *Known*: [metal-flash-attention 8](https://github.com/philipturner/metal-flash-attention/issues/8): scores accumulated in half precision and scaled only afterwards, NaN on a real model's data.

# %%
museum.EXHIBITS["rounded_scores"].diff()

# %%
museum.EXHIBITS["rounded_scores"].visit()

# %%
print(museum.EXHIBITS["rounded_scores"].report("random"))

# %% [markdown]
# **What to see.** Overflow: infinity, then infinity minus infinity. And on random inputs, where nothing overflows, $O$ is within its budget and LSE is not: rounding a score to 11 bits is an error of $10^{-3}$, which $O$'s own rounding hides and LSE, an fp32 number, does not. In bf16 nothing would overflow, and the error would be eight times larger.
#
# **Fix.** Keep $S$ in fp32, which is how the tensor cores deliver it. The second line multiplies first and rounds then. **Predict**: does that do?

# %%
museum.EXHIBITS["rounded_scores"].fix()
museum.EXHIBITS["rounded_scores"].fix("float(T(S_reg[n][e])) * scale_log2", "float(T(S_reg[n][e] * scale_log2))")

# %% [markdown]
# No infinity now, and wrong all the same: in units of log2 these scores are about 14427, where fp16 numbers are 8 apart.
#
# ## The collection
#
# The maps of $O$ (or $P$) side by side. If you remember one picture of this notebook, let it be this one: irregular stripes of rows mean a number per row, $m$, $l$ or $\alpha$; regular ones, a comb, an address computed from the row; one shade everywhere means arithmetic common to all rows, a scale, a tail, an operand; black means infinity or nothing; and an empty map can belong to a wrong kernel too, if its LSE is what is wrong.

# %%
drawn = [e for e in museum.EXHIBITS.values() if e.caught_by == "check"]
draw_proof.gallery({e.title: e.report().comparisons[0] for e in drawn}, columns=3)

# %% [markdown]
# And who caught what:

# %%
by = {"check": "check", "xray": "X-ray: race"}
rows = [
    (e.title, e.rung, "; ".join(e.case(n).name for n in e.hides) or "–", e.case().name)
    + (by.get(e.caught_by, f"emulator: {e.sign}"),)
    for e in museum.EXHIBITS.values()
]
with pd.option_context("display.max_colwidth", None):
    display(
        pd.DataFrame(rows, columns=["exhibit", "kernel", "right on", "looked at", "caught by"]).set_index("exhibit")
    )

# %% [markdown]
# One famous bug is missing because it doesn't fit into the building: an index computed in 32 bits, which overflows once a tensor has more than $2^{31}$ elements. FlashAttention-2 has met it more than once ([1500](https://github.com/Dao-AILab/flash-attention/pull/1500), [2260](https://github.com/Dao-AILab/flash-attention/pull/2260): "multiplication is done in `int` before index_t cast"). No small input shows it; a reader of the code does, or a view with an enormous stride.

# %% [markdown]
# ## Exercises
#
# Three exhibits have lost their labels. In each, find the line and put it right: `mend` is a pair, a piece of the exhibit's text that occurs once, and what belongs there instead. `exhibit.broken` is the rung as it is, so `show.region(exhibit.broken, "online_update")` shows a part of it. (The answer is one `diff()` away. You would only cheat yourself.)


# %%
def mended(exhibit, mend):
    """The exhibit's kernel after the mend, held against all inputs of `check`."""
    assert mend[0], "mend is empty"
    kernel = exhibit.build(exhibit.broken.replace(*mend))
    check(kernel).require()
    return kernel


# %% [markdown]
# ### Exercise 91.1 · Exhibit A
#
# `04_fa2_fp32` with one line changed.

# %%
museum.UNLABELLED["A"].visit()

# %%
show.region(museum.UNLABELLED["A"].broken, "online_update")

# %%
# Exercise 91.1: which columns are wrong, and in which rows?
mend = ("", "")

# %%
exercise.verify(
    "91.1",
    lambda: mended(museum.UNLABELLED["A"], mend) is not None,
    hint="half of the columns, in rows whose maximum moved: which loop over columns runs once per tile? See region online_update",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# mend = ("for (int c = 0; c < 4; ++c) O_reg[r][c] *= alpha;", "for (int c = 0; c < 8; ++c) O_reg[r][c] *= alpha;")
# ```
#
# LSE is right, so $m$ and $l$ are. The rows that are right throughout have their maximum in the first tile, so what is missing is a factor $\alpha$; columns 32 to 63 are a thread's columns 4 to 7. Together: the rescaling of half of $O$.
# </details>

# %% [markdown]
# ### Exercise 91.2 · Exhibit B
#
# `04_fa2_fp32` again.

# %%
museum.UNLABELLED["B"].visit()

# %%
# Exercise 91.2: divide got by expected, and look at LSE too
mend = ("", "")

# %%
exercise.verify(
    "91.2",
    lambda: mended(museum.UNLABELLED["B"], mend) is not None,
    hint="O is too large and LSE too small, everywhere: which sum has lost a part? See region epilogue",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# mend = ("for (int mask = 2 * T::TY; mask < 32; mask *= 2) l +=", "for (int mask = T::TY; mask < 32; mask *= 2) l +=")
# ```
#
# $2.766 / 0.936 = 2.95$ in row 14. In row 109 LSE is too small by $5.719 - 4.622 = 1.097 = \ln 3.0$. Within a row all columns of $O$ have one ratio, and LSE its logarithm. A wrong *scale* would have changed the weights; here only the denominator is wrong: $l$ lacks half of its terms, one step of the butterfly (in these two rows, two thirds of the sum).
# </details>

# %% [markdown]
# ### Exercise 91.3 · Exhibit C
#
# `03_fa1_fp32`, and the outputs are right. Mend it so that no wavefront is lost.

# %%
museum.UNLABELLED["C"].visit()

# %%
# Exercise 91.3: which distance between rows puts eight of them into eight different places?
mend = ("", "")


# %%
def third_mended():
    exhibit = museum.UNLABELLED["C"]
    ray = xray(mended(exhibit, mend), *exhibit.case().inputs)
    assert ray.conflicts == 0, f"{ray.conflicts:,} wavefronts are still lost"
    return True


exercise.verify(
    "91.3",
    third_mended,
    hint="in units of 16 bytes the banks are 8 places; rows are ld / 4 units apart. See region tile",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# mend = ("ld = d + 8,", "ld = d + 4,")
# ```
#
# Rows of 72 floats are 18 units of 16 bytes: row $r$ starts at place $18 r \bmod 8 = 2r \bmod 8$, so rows 0 and 4 share a place, as do 1 and 5, and every request takes twice as long. With 17 units it is $r \bmod 8$: eight different places. Any odd number of units does it.
# </details>

# %% [markdown]
# ## Self-check
#
# You can now read an error map, a fault's sentence and an X-ray, and say what to look for. Answer before you unfold:
#
# <details><summary>The map has wrong rows, all columns, and some rows are right. What do you suspect?</summary>
# A number per row (m, l, α) that goes wrong when something happens in that row, such as a new maximum.
# </details>
#
# <details><summary>LSE is right and O is wrong everywhere. Where is the bug not?</summary>
# Not in the scores and not in the softmax: what LSE depends on is right. It is in V, in O's addresses, or in the second product.
# </details>
#
# <details><summary>A kernel passes all tests on your GPU and fails on a colleague's. Name three rooms' worth of reasons.</summary>
# Unwritten shared memory that happened to be finite; an access past the end into memory that happened to be there; a missing barrier with lucky timing.
# </details>
#
# <details><summary>Why run a check at a length below one tile?</summary>
# It is the only place where the first tile is not full: stale rows from an earlier tile can't stand in for missing ones.
# </details>
#
# <details><summary>Which exhibits could no comparison of outputs ever catch?</summary>
# Those of room 3, races that come out right, and exhibit C, a layout with bank conflicts. They need something that looks at the accesses.
# </details>
