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
# [← 90 · Proving it right](90_proving_it_right.ipynb) | [glossary](glossary.md) | [92 · The X-ray against hardware →](92_xray_against_hardware.ipynb)
#
# **After this notebook you can**
# - explain fifteen bugs that attention kernels have had or could have, each a change of a line or two;
# - find the wrong line from the shape of an error map, a message or an X-ray;
# - judge which kind of test finds which kind of bug, and which bugs an output may never show.
#
# **Time** 55 minutes.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb) and [90 · Proving it right](90_proving_it_right.ipynb); for the fourth room notebooks 10 to 12 as well. No GPU.
#
# **The idea in one line**: the pattern of wrong numbers points to the line that made them.
#
# *The exhibits run on the emulator, on every machine: on a GPU some would give the right answer by luck, and one could end the process's use of the device.*

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd

from helpers import check, checks, draw_proof, exercise, museum, predict, progress, show

# %% [markdown]
# ## How to visit
#
# Each exhibit shows what was changed (`-`, red: the line as it should be; `+`, green: the bug). Before you go on, ask: on which inputs is the kernel still right? Where is it wrong: which rows, which columns, everything? Who notices: the check, the emulator, the X-ray, nobody? For some exhibits a cell takes your prediction.
#
# Then fix it. `fix()` puts the red text back and checks the same inputs again; `fix("this", "that")` changes the green text instead, for a fix of your own.
#
# For the first exhibit, the steps that `visit()` takes for the others are written out.

# %% [markdown]
# ## Room 1 · Wrong numbers
#
# ### A maximum that starts at zero
#
# A sum starts at zero; a running maximum has to start at the neutral element of max, $-\infty$. (`FLT_MIN` is as wrong as zero: it is the smallest positive normal number, not the lowest.)
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
# **What to see.** The map draws $|\text{error}|$ in units of the error budget (notebook 90), LSE as a strip beside $O$. A dashed line is the border of a tile of queries. Random inputs are *right*: among a hundred random scores some are positive, and from the first of them on the maximum is correct. With all scores near $-10^4$ every $e^{S - 0}$ underflows, $l = 0$, and the guard against empty rows turns the output into zeros: the whole map is wrong, without structure. That points to the arithmetic of a row, not to indices.
#
# **Fix.** Start at $-\infty$. The first tile then has $\alpha = e^{-\infty - m} = 0$, which is what an empty state has to contribute. The second line tries FlashInfer's −50000 instead.

# %%
exhibit.fix()
exhibit.fix("m_reg[r] = 0.f", "m_reg[r] = -5e4f")

# %% [markdown]
# The second line says "fixed" as well: −50000 is lower than these scores. The model had lower ones. A check knows only its inputs.
#
# ### A sum that is not rescaled
#
# When a tile brings a larger maximum, everything summed so far belongs to the old one and has to be multiplied by $\alpha = e^{m - m^{new}}$. Here $O$ is, and $l$ is not. With one tile of keys nothing is wrong; here there are four ($B_c = 64$, $N = 256$).

# %%
museum.EXHIBITS["l_not_rescaled"].diff()

# %%
right_rows = ...  # your prediction: how many of the 256 rows are still right?

# %% tags=["reveal"]
exhibit = museum.EXHIBITS["l_not_rescaled"]
predict(right_rows, exhibit.right_rows(), "of 256 rows are right", within=0.15)
exhibit.visit()

# %% [markdown]
# **What to see.** Whole rows are wrong. Right are those whose largest score lies in the first tile, so that $\alpha = 1$ afterwards: about a quarter, as the four tiles have equal chances. Stripes across all columns are the mark of *one number per row*: $m$, $l$, $\alpha$.
#
# **Fix.** `l = l * alpha + row_sum`. $O$ and $l$ are the same sum, with and without $V$, so both are rescaled.

# %%
museum.EXHIBITS["l_not_rescaled"].fix()

# %% [markdown]
# ### Zero is not nothing
#
# Keys past the end are filled with zeros, which looks safe. But a score of 0 is a score, and $e^{0 - m}$ is a weight.
#
# *Known*: FlashInfer's block-sparse kernel, [pull request 5090](https://github.com/flashinfer-ai/flashinfer/pull/5090): out-of-bounds keys zero-filled by the copy engine "produced score=0, giving exp(0)=1 softmax weight".

# %%
museum.EXHIBITS["tail_not_masked"].diff()

# %%
museum.EXHIBITS["tail_not_masked"].visit()

# %% [markdown]
# **What to see.** Everything is wrong: with $N = 100$ there are 28 false keys beside 100, so the denominator is too large, $O$ too small and LSE too large everywhere. Any test whose $N$ is a multiple of the tile passes, which is why the list of cases has lengths one off every tile edge.
#
# **Fix.** Set scores past the last key to $-\infty$ before the maximum is taken. Filling $K$ and $V$ with zeros is still needed: zero times NaN is not zero (room 2).

# %%
museum.EXHIBITS["tail_not_masked"].fix()

# %% [markdown]
# ### Infinity minus infinity
#
# A row that a mask hides has only scores of $-\infty$, and the maximum $-\infty$. Then $-\infty - (-\infty)$ is NaN, and NaN spreads.
#
# *Known*: [PyTorch 103963](https://github.com/pytorch/pytorch/issues/103963), NaN from `scaled_dot_product_attention` for rows that a mask hides, settled by a [safe softmax](https://github.com/pytorch/pytorch/pull/131060); [Burn 4697](https://github.com/tracel-ai/burn/pull/4697) and others since.

# %%
museum.EXHIBITS["inf_minus_inf"].diff()

# %%
museum.EXHIBITS["inf_minus_inf"].visit()

# %% [markdown]
# **What to see.** Rows 5, 9 and 13, the masked ones, and nothing else. The guard also protects ordinary rows: with $N = 100$, 32 lanes and four elements per lane, seven lanes have no element, and without the guard their NaN spreads to the whole row in the merge.
#
# **Fix.** Subtract 0 instead of $m$ where $m$ is $-\infty$: $e^{-\infty - 0} = 0$. And guard the division by $l = 0$ as well.

# %%
museum.EXHIBITS["inf_minus_inf"].fix()

# %% [markdown]
# ### The output nobody looks at
#
# A model uses $O$. LSE serves the backward pass and the merging of parts of the keys, so a forward test often ignores it. The kernel works in powers of two and has to convert it at the end.
#
# *Known*: [PyTorch 181645](https://github.com/pytorch/pytorch/issues/181645): flex attention returned LSE off by a factor of $\ln 2$ with one of its back ends; a conversion was applied twice.

# %%
museum.EXHIBITS["lse_in_log2"].diff()

# %%
museum.EXHIBITS["lse_in_log2"].visit()

# %% [markdown]
# **What to see.** $O$ is right, LSE wrong throughout. *got / expected* is the diagnosis: $8.2506 / 5.71888 = 1.4427 = \log_2 e$. Other telling ratios are $\ln 2$, $\sqrt d$, 2 and $B_c / N$.
#
# **Fix.** Multiply by $\ln 2$ once. And check LSE wherever $O$ is checked.

# %%
museum.EXHIBITS["lse_in_log2"].fix()

# %% [markdown]
# ## Room 2 · Stopped by the emulator
#
# These bugs need not produce a wrong number: on a GPU they may give an error code, a crash, another tensor's data, or the right answer. The emulator stops at the instruction and says why. (The first one it does not launch at all, which the check notices.)
#
# ### The launch that never happened
#
# A block may use 48 KB of shared memory by default. This kernel needs 84 KB, so it has to opt in (`cudaFuncSetAttribute`); a launch that fails returns an error that the caller has to read.
#
# *Known*: [flash-attention-minimal](https://github.com/tspeterkim/flash-attention-minimal/blob/main/flash.cu) asks for $3 \cdot 32 \cdot d \cdot 4 + 4096$ bytes and neither opts in nor reads the error: at $d = 128$ that is 52 KB, and its output would be a tensor of zeros (by reading its code, which prints both sizes; not run).

# %%
museum.EXHIBITS["no_opt_in"].diff()

# %%
museum.EXHIBITS["no_opt_in"].visit()

# %% [markdown]
# **What to see.** Nothing was written, in no time: a benchmark shows a great speed-up. Poisoned outputs (notebook 90) make "never written" certain.
#
# **Fix.** Opt in, return every error, and raise it where Python calls. The second line does half of it: it reads the error and doesn't opt in.

# %%
museum.EXHIBITS["no_opt_in"].fix()
museum.EXHIBITS["no_opt_in"].fix("cudaSuccess", "cudaGetLastError()")

# %% [markdown]
# ### A thread that returns early
#
# "No row for me? Return." That is fine in a kernel without barriers. Here the other threads come to `__syncthreads()`.
#
# *Related*: a barrier inside a branch that part of a block takes was [reported by synccheck](https://github.com/ggml-org/llama.cpp/issues/27678) in llama.cpp's tensor-core attention, in a configuration whose ordinary tests pass.

# %%
museum.EXHIBITS["early_return"].diff()

# %%
museum.EXHIBITS["early_return"].visit()

# %% [markdown]
# **What to see.** No map, as there is no output, but who waits where and who is gone: 144 threads wait, 112 have returned. Those own rows 36 to 63 of the second query tile, $64 + 36 = 100 = N$.
#
# On a GPU this doesn't hang. Since Volta a barrier waits for all threads that have *not exited* (CUDA C++ Programming Guide), so leaving early is legal there, and the emulator's rule is stricter than the hardware: [92](92_xray_against_hardware.ipynb) counts what that changes. This kernel would still be wrong: the returned threads no longer load their part of the next tiles of $K$ and $V$.
#
# **Fix.** Every thread stays to the end; guard what it reads and writes.

# %%
museum.EXHIBITS["early_return"].fix()

# %% [markdown]
# ### Zero times garbage
#
# The weights of keys past the end are 0. So why fill $K$ and $V$ at all? Shared memory holds what the last kernel left there, and if that happens to be a NaN or an infinity, $0 \cdot \mathrm{NaN} = \mathrm{NaN}$. The tile has $B_c = 32$ keys.

# %%
museum.EXHIBITS["tail_not_filled"].diff()

# %%
passes = ...  # your prediction: is the output right at N = 100, no multiple of the tile, "yes" or "no"?

# %% tags=["reveal"]
exhibit = museum.EXHIBITS["tail_not_filled"]
predict(passes, "yes" if exhibit.report("not a multiple").ok else "no", "(is N = 100 right?)")
exhibit.visit()

# %% [markdown]
# **What to see.** $N = 100$ passes: the last tile's missing rows still hold the keys of the tile before, finite numbers with the weight 0. Unwritten memory is read only where a *first* tile is not full: fewer than 32 keys, as here, or fewer than 64 queries, whose tile the same function loads. On a GPU even that usually passes. The emulator marks every byte of shared memory as unwritten when a block starts.
#
# **Fix.** Store zeros where there is no row.

# %%
museum.EXHIBITS["tail_not_filled"].fix()

# %% [markdown]
# ### Reading a little further
#
# The rows past the end are masked anyway, so why guard the load? The memory behind $K$ usually belongs to something: the next head, another tensor, PyTorch's cache.

# %%
museum.EXHIBITS["past_the_end"].diff()

# %%
museum.EXHIBITS["past_the_end"].visit()

# %% [markdown]
# **What to see.** The tensor, and how far past its end. On a GPU this works until the tensor lies at the end of its allocation, or a NaN lies behind it (*nothing* masks $V$).
#
# **Fix.** A predicate per row, and zeros where it is false. As most tiles are full, test once per tile.

# %%
museum.EXHIBITS["past_the_end"].fix()

# %% [markdown]
# ## Room 3 · Right, in one order of threads
#
# ### The barrier that nobody missed
#
# `10_fa2_mma_fp16`, the first rung on tensor cores, has two barriers per tile: one after the loads, one at the end, so that no thread overwrites a tile that others still read. The second one is removed.
#
# *Known*: two missing barriers in llama.cpp's attention kernels, found by [racecheck](https://github.com/ggml-org/llama.cpp/pull/13438); two more later, "masked only by codegen/scheduling luck" ([28358](https://github.com/ggml-org/llama.cpp/pull/28358), open when this was written). Missing synchronisation that did give wrong results for some shapes: [FlashMLA-ETAP 3](https://github.com/pengcuo/FlashMLA-ETAP/pull/3).

# %%
museum.EXHIBITS["no_last_barrier"].diff()

# %%
museum.EXHIBITS["no_last_barrier"].visit()

# %% [markdown]
# **What to see.** Right at every length. The emulator runs the threads of a block in one of many possible orders, a GPU in another, and in this one no thread is overtaken. The X-ray doesn't depend on the order: for every piece of shared memory it keeps who wrote and who read it, and reports two accesses that *no barrier orders*, with lines, threads and place. (It names the first pair and counts the others.)
#
# Is the output always right, then? The emulator can take other orders, drawn from a seed (`kernel.launcher.schedule`).

# %%
right_orders = ...  # your prediction: in how many of four other orders is the output still right?

# %% tags=["reveal"]
exhibit = museum.EXHIBITS["no_last_barrier"]
predict(right_orders, sum(exhibit.in_other_orders(4)), "of 4 orders give the right output")

# %% [markdown]
# A comparison can catch a race if it meets the right order. It proves nothing when it doesn't: the next exhibit is right in all of them.
#
# **Fix.** Put the barrier back. Notebook 12 needs only one, because it writes to a buffer that no thread reads.

# %%
museum.EXHIBITS["no_last_barrier"].fix()

# %% [markdown]
# ### In lock step
#
# Until 2017 the lanes of a warp executed together. Since Volta each has a program counter of its own, and only `__syncwarp()` orders two lanes' accesses.

# %%
museum.EXHIBITS["no_syncwarp"].diff()

# %%
museum.EXHIBITS["no_syncwarp"].visit()
verdicts = museum.EXHIBITS["no_syncwarp"].in_other_orders(2)

# %% [markdown]
# **What to see.** Right again, in other orders too, and three races: a lane reads what its neighbour wrote to `P_smem` a few lines before, and overwrites $m$ and $l$ that the neighbour reads, with no barrier between. The emulator switches threads only where they wait, and a shuffle between the two accesses makes the lanes meet. But a shuffle promises nothing about memory, and a compiler may move the accesses past it.
#
# **Fix.** `__syncwarp()`, which costs next to nothing.

# %%
museum.EXHIBITS["no_syncwarp"].fix()

# %% [markdown]
# ## Room 4 · Tensor cores
#
# These need notebooks 10 to 12: `ldmatrix` deals the elements of a tile to lanes, `mma.sync` multiplies what the lanes hold, the swizzle decides where a tile's 16-byte chunks lie, `cp.async` copies them.
#
# ### Five letters
#
# $V_j$ lies in memory with keys as rows, and $P V$ needs it by columns: the variant `.trans` of `ldmatrix` transposes each 8 × 8 piece.

# %%
museum.EXHIBITS["no_trans"].diff()

# %%
museum.EXHIBITS["no_trans"].visit()

# %% [markdown]
# **What to see.** LSE is right, $O$ is wrong everywhere: a weighted sum of the wrong elements, of plausible size. With $V = 1$ this bug is invisible, as the transpose of a matrix of ones is itself.
#
# **Fix.** `ldmatrix_x4_trans`, and a test whose $V$ isn't constant.

# %%
museum.EXHIBITS["no_trans"].fix()

# %% [markdown]
# ### A swizzle on one side
#
# The swizzle of notebook 11 permutes the chunks of a row: chunk $c$ of row $r$ lies at $c \oplus (r \bmod 8)$. Writing and reading have to agree. Here $Q$ is written swizzled and read plainly.

# %%
museum.EXHIBITS["one_sided_swizzle"].diff()

# %%
right_rows = ...  # your prediction: how many of the 128 rows are still right?

# %% tags=["reveal"]
exhibit = museum.EXHIBITS["one_sided_swizzle"]
predict(right_rows, exhibit.right_rows(), "of 128 rows are right")
exhibit.visit()

# %% [markdown]
# **What to see.** A comb: rows 0, 8, 16, … are right, since $c \oplus 0 = c$; the others have the chunks of their row of $Q$ out of order. The period of a comb is a number of your code: 8 is the swizzle's, 16 a fragment's, 64 the tile's.
#
# **Fix.** One function for the address, used by every reader and every writer: `at()`.

# %%
museum.EXHIBITS["one_sided_swizzle"].fix()

# %% [markdown]
# ### Waiting for one less
#
# `cp.async.wait_group n` waits until *at most n* groups of copies are unfinished. With two stages the tile that is needed now is the newest group: $n = 0$. Here it is 1.

# %%
museum.EXHIBITS["waits_for_one_less"].diff()

# %%
museum.EXHIBITS["waits_for_one_less"].visit()

# %% [markdown]
# **What to see.** On a GPU this is right whenever the copy happens to have arrived. The emulator lets a copy land as late as the program allows, at the wait that covers it, and knows which bytes are *in flight* until then.
#
# **Fix.** `stages − 2`. Ask: of the groups sent so far, how many may be unfinished when I start to read?

# %%
museum.EXHIBITS["waits_for_one_less"].fix()

# %% [markdown]
# ### 65504
#
# That is the largest fp16 number. The scores are summed in fp32, and here they are rounded to 16 bits *before* they are multiplied by the scale. With scores about $10^4$ the products before scaling are $8 \cdot 10^4$.
#
# *Known*: [metal-flash-attention 8](https://github.com/philipturner/metal-flash-attention/issues/8): scores accumulated in half precision and scaled only afterwards, NaN on a real model's data.

# %%
museum.EXHIBITS["rounded_scores"].diff()

# %%
museum.EXHIBITS["rounded_scores"].visit()

# %%
print(museum.EXHIBITS["rounded_scores"].report("random"))

# %% [markdown]
# **What to see.** Overflow: infinity, then infinity minus infinity. On random inputs, where nothing overflows, $O$ is within its budget and LSE is not: rounding a score to 11 bits is an error of $10^{-3}$, which $O$'s own rounding hides, and LSE, an fp32 number, doesn't. In bf16 nothing would overflow, and the error would be eight times larger.
#
# **Fix.** Keep $S$ in fp32, as the tensor cores deliver it. The second line scales first and rounds afterwards. Is that enough?

# %%
museum.EXHIBITS["rounded_scores"].fix()
museum.EXHIBITS["rounded_scores"].fix("float(T(S_reg[n][e])) * scale_log2", "float(T(S_reg[n][e] * scale_log2))")

# %% [markdown]
# No infinity now, but still wrong: in units of log2 these scores are about 14427, where fp16 numbers are 8 apart.
#
# ## The collection
#
# The maps of $O$ (or $P$) side by side. Irregular stripes of rows mean one number per row ($m$, $l$, $\alpha$). Regular stripes over the whole map, a comb, mean an address computed from the row (rows 5, 9 and 13 are just the masked ones). Black means NaN, infinity or never written. An empty map can belong to a wrong kernel too, if only its LSE is wrong. Everything wrong and no structure can mean several things, and the next figure tells them apart.

# %%
drawn = [e for e in museum.EXHIBITS.values() if e.caught_by == "check"]
draw_proof.gallery({e.title: e.report().comparisons[0] for e in drawn}, columns=3)

# %% [markdown]
# **Divide before you debug.** The same outputs as *got / expected*:

# %%
divided = [museum.EXHIBITS[name] for name in ("tail_not_masked", "l_not_rescaled", "no_trans")]
draw_proof.ratios({e.title: e.outputs() for e in divided})

# %% [markdown]
# **What to see.** On the left each row has one shade, nearly the same for all: the weighted sum is right, and it is divided by a number that is too large. In the middle each row has one shade too, and some rows are exactly 1. On the right every element has a ratio of its own: wrong elements were summed.
#
# And what caught each:

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
# One common bug is missing because its tensors are too large for the emulator: an index computed in 32 bits, which overflows once a tensor has more than $2^{31}$ elements. FlashAttention-2 has had it more than once ([1500](https://github.com/Dao-AILab/flash-attention/pull/1500), [2260](https://github.com/Dao-AILab/flash-attention/pull/2260): "multiplication is done in `int` before index_t cast"). No small input shows it; reading the code does, or a view with an enormous stride.

# %% [markdown]
# ## Exercises
#
# Three exhibits have lost their labels. (More of this, with whole kernels and their symptoms alone: [93](93_detective.ipynb).) In each, find the line and put it right: `fix` is a pair, a piece of the exhibit's text that occurs once, and what belongs there instead. `exhibit.broken` is the rung with its bug, so `show.region(exhibit.broken, "online_update")` shows a part of it. The fix has to keep the rest of the rung: at most one line may change.


# %% [markdown]
# ### Exercise 91.1 · Exhibit A
#
# `04_fa2_fp32` with one line changed. Say also which columns are wrong, by the first and the last.

# %%
museum.UNLABELLED["A"].visit()

# %%
show.region(museum.UNLABELLED["A"].broken, "online_update")

# %%
# Exercise 91.1: which columns are wrong, and in which rows?
columns = (0, 63)
fix = ("", "")


# %%
exhibit = museum.UNLABELLED["A"]
exercise.verify("91.1", lambda: checks.fixed_in_columns(exhibit, columns, fix))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Half of the columns, in rows whose maximum moved: which loop over columns runs once per tile? See region online_update.
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# columns = (32, 63)
# fix = ("for (int c = 0; c < 4; ++c) O_reg[r][c] *= alpha;", "for (int c = 0; c < 8; ++c) O_reg[r][c] *= alpha;")
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
# Exercise 91.2: got, expected = museum.UNLABELLED["B"].outputs(); divide them, and look at LSE too
fix = ("", "")

# %%
exercise.verify("91.2", lambda: checks.fixed(museum.UNLABELLED["B"], fix) is not None)

# %% [markdown]
# <details><summary>Hint</summary>
#
# O is too large and LSE too small, everywhere: which sum has lost a part? See region epilogue.
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# fix = ("for (int mask = 2 * T::TY; mask < 32; mask *= 2) l +=", "for (int mask = T::TY; mask < 32; mask *= 2) l +=")
# ```
#
# $2.766 / 0.936 = 2.95$ in row 14. In row 109 LSE is too small by $5.719 - 4.622 = 1.097 = \ln 3.0$. Within a row the ratio of $O$ alternates between two values, four columns each (row 14: 1.51 and 2.95), whose reciprocals add up to 1. LSE is off by the logarithm of one of them. A wrong *scale* would have changed the weights; here only the denominator is wrong: threads with even and with odd `tx` each have half of $l$, since the butterfly lacks the step that joins neighbours.
# </details>

# %% [markdown]
# ### Exercise 91.3 · Exhibit C
#
# `03_fa1_fp32`, and the outputs are right. Fix it so that no wavefront is lost.

# %%
museum.UNLABELLED["C"].visit()

# %%
# Exercise 91.3: which distance between rows puts eight of them into eight different places?
fix = ("", "")


# %%
exhibit = museum.UNLABELLED["C"]
exercise.verify("91.3", lambda: checks.fixed_without_conflicts(exhibit, fix))

# %% [markdown]
# <details><summary>Hint</summary>
#
# In units of 16 bytes the banks are 8 places; rows are ld / 4 units apart. See region tile.
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# fix = ("ld = d + 8,", "ld = d + 4,")
# ```
#
# Rows of 72 floats are 18 units of 16 bytes: row $r$ starts at place $18 r \bmod 8 = 2r \bmod 8$, so rows 0 and 4 share a place, as do 1 and 5, and every request takes twice as long. With 17 units it is $r \bmod 8$: eight different places. Any odd number of units does it.
# </details>

# %%
progress()

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
# Not in the scores and not in the softmax, on which LSE depends. It is in V, in O's addresses, or in the second product.
# </details>
#
# <details><summary>A kernel passes all tests on your GPU and fails on a colleague's. Name three reasons.</summary>
# Unwritten shared memory that happened to be finite; an access past the end into memory that happened to be there; a missing barrier with lucky timing.
# </details>
#
# <details><summary>Why run a check at a length below one tile?</summary>
# It is the only place where the first tile is not full: stale rows from an earlier tile can't stand in for missing ones.
# </details>
#
# <details><summary>Which exhibits can a comparison of outputs miss, however many inputs it tries?</summary>
# On a GPU those of room 3, *Zero times garbage*, *Reading a little further* and *Waiting for one less*, whose output depends on order, timing or what lay in memory; and exhibit C, a layout with bank conflicts, whose output is right. They need a tool that looks at the accesses.
# </details>
