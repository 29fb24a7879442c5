# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 13 · Tuned: past FlashAttention-2
#
# **After this notebook you can**
# - follow a kernel's optimisation step by step, from what was tried to what it brought;
# - read the machine code of a loop as a budget: which instructions stand beside the products, and what each class of them costs;
# - take the row maximum out of the loop, and argue that the result is still right;
# - choose tile shapes by measurement, and know what such a choice is worth on another card.
#
# **Time** 75 minutes.
#
# **Needs** [12 · Double-buffered](12_double_buffered.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: the tensor cores wait for shared memory, for the softmax and for addresses; give each of these less to do.

# %%
import pandas as pd
import torch

from helpers import check, draw_mma, exercise, load, plot, record, reference, rung, sass, scoreboard, show, tune, xray

torch.manual_seed(0)
kernel = load("13_tuned")
device = kernel.device

# %% [markdown]
# ## The problem
#
# `12_double_buffered` is 5 to 9 % behind FlashAttention-2's own kernel at $d = 64$, and an eighth at $d = 128$. Nothing in it is plainly wasted any more. What is left is a *budget*: an SM issues at most four instructions per clock, shared memory delivers one wavefront per clock, the special function units 16 exponentials. While any of these is the narrow place, the tensor cores wait. Here is what stands in the tile loop of rung 12, per warp and tile of 64 keys:

# %%
sass.opcodes("12_double_buffered", D=128, loop=True).pipe(lambda counts: counts[counts > 0])

# %% [markdown]
# 128 of these are products (`HMMA`). Group the rest by what they are for, and a plan follows.
#
# | instructions | what for | what could reduce them |
# |---|---|---|
# | `LDSM` | fragments of K and V, each used for 16 query rows | more rows per warp |
# | `FMUL`, `FADD`, `FMNMX`, `SHFL` | scale, row maximum, $S - m$, row sums, rescaling of $O$ | less softmax |
# | `MUFU` | one exponential per element of $S$ | nothing: they are the softmax |
# | `F2FP` | rounding $P$ to 16 bits | nothing |
# | `IADD3`, `IMAD`, `LOP3`, `LEA`, `SHF`, `SEL`, `SETP` | addresses, bounds, predicates | simpler addresses |
#
# The sections below take the three lines that can be reduced, one after the other.

# %% [markdown]
# ## 1 · Two strips of rows for each fragment
#
# Notebook 10 counted 256 bytes of shared memory per `mma`: two wavefronts for 2048 multiply-adds. The SM does one wavefront per clock and, at the rate of a large matrix product, an `mma` takes 1.4 clocks. So at 16 rows per warp, reading K and V alone takes longer than multiplying.
#
# Give a warp 32 query rows instead, two strips of 16. Every fragment of K or V that `ldmatrix` brings then serves two `mma`: one wavefront per `mma`. The price is registers. $S$ and $O$ have twice the rows:

# %%
budget = pd.DataFrame(index=["16 rows", "32 rows"])
for d, Bc in ((64, 64), (128, 64)):
    budget[f"S and O, d = {d}"] = [rows * (Bc + d) // 32 for rows in (16, 32)]
    budget[f"Q in registers, d = {d}"] = [rows * d // 64 for rows in (16, 32)]
budget["wavefronts per mma"] = [2.0, 1.0]
budget

# %% [markdown]
# A thread has 255 registers. At $d = 128$, $S$ and $O$ take 192 of them, and the fragments of $Q$ do not fit beside. So $Q$ stays in shared memory and its fragments are read again for every tile: they serve all 64 keys each time, so this adds a quarter to the wavefronts: 1.25 per `mma`, still fewer than 2.

# %% [markdown]
# ## 2 · A softmax without a maximum
#
# Per element of $S$, rung 12 multiplies by the scale, takes part in the maximum, subtracts $m$, takes the exponential, and adds to the row sum. Two of the five can be merged: with $c = \text{scale} \cdot \log_2 e$,
#
# $$ P = 2^{\,c\,s - m} , $$
#
# and $c\,s - m$ is *one* instruction, a fused multiply-add. That leaves the maximum. What is it for? Notebook 02: for *any* number $m$,
#
# $$ o = \frac{\sum_j 2^{\,c s_j - m} v_j}{\sum_j 2^{\,c s_j - m}} , $$
#
# because $2^{-m}$ cancels. The maximum is there so that nothing overflows, and so that the largest terms do not vanish. It need not be the *true* maximum. Any $m$ that is not too far below it will do. How far? $P$ is rounded to fp16, whose largest number is 65504. A row whose terms add up to at most 32768 has no term that overflows, and as the format is a floating one, a $P$ of 20000 is as exact as one of 0.7.
#
# So: **do not look for the maximum. Form $P$ with the $m$ of earlier tiles and see how the row sum comes out.** If it stays below 32768 in all rows of the warp, all is well: no maximum, no shuffle, no rescaling of $O$. If not, and only then, do the tile again: multiply $Q K^\top$ once more ($P$ has taken its place), take the true maximum, rescale, and form $P$ anew. The first tile always goes this way.
#
# How often is that? The kernel adds up the 16 columns of a tile that a lane has of a row. For that sum to pass $32768 = 2^{15}$, one score has to lie 15 above $m$, in units of $\log_2$, or all 16 of them 11 above. Let us count for random inputs, and for the worst ones:


# %%
def redone(scores, Bc=64):
    """Tiles done twice, and all tiles, of warps of 32 rows. scores (rows, N) in units of log2, taken from the last key on."""
    again, tiles = 0, 0
    for rows in scores.split(32):
        m = None  # the first tile always takes the long way
        for tile in rows.split(Bc, dim=1)[::-1]:
            top = tile.amax(1, keepdim=True)
            if m is not None:  # sums of what a lane has of a row: 2 of every 8 columns
                sums = torch.exp2(tile - m).reshape(len(tile), -1, 4, 2).sum((1, 3))
            twice = m is not None and (sums > 32768).any()
            m = top if m is None else torch.maximum(m, top) if twice else m
            again, tiles = again + bool(twice), tiles + 1
    return again, tiles


# %%
q, k = torch.randn(512, 64), torch.randn(4096, 64)
usual = q @ k.T / 8 * 1.4427
rising = usual + torch.linspace(300, 0, 4096)  # the kernel goes from the last key to the first
for name, scores in (("random", usual), ("eight times as large", 8 * usual), ("rising along the way", rising)):
    again, tiles = redone(scores)
    print(f"{name}: {again} of {tiles} tiles done twice")

# %% [markdown]
# **What to see.** For inputs of a usual size, none. When scores are eight times as large, so that a softmax is nearly one-hot, about one in eleven. Even scores that rise steadily along the way cost one tile in three, not every one. And the answer is right in all cases; only the speed depends on the inputs. That is a property worth knowing before one times a kernel: random inputs are this kernel's best case.

# %% [markdown]
# ## 3 · Fewer instructions for addresses
#
# - **32-bit addresses.** Shared memory is addressed with 32 bits. A C++ pointer has 64, and the compiler carries both halves. The kernel computes the 32-bit address once per lane.
# - **One XOR.** In a swizzled tile, the chunk $2k$ places further right is at `place ^ 32 k`: a lane begins at chunk 0 or 1, so that adding $2k$ to its chunk number changes other bits, which an XOR does as well, and XORs may be done in any order. So a step along $d$ costs one instruction (or, from one line of 128 bytes to the next, a constant), and a step of 16 rows down is a constant inside the instruction that reads.
# - **The ragged tile first.** The last tile of keys may be cut short, and masking it costs instructions. Taken *first* it needs no test in the loop: all later tiles are whole. So K and V are walked backwards. (FlashAttention-2 does so, too.)

# %% [markdown]
# ## The kernel

# %%
show.region("13_tuned", "tile")

# %%
show.region("13_tuned", "swizzle")

# %%
show.region("13_tuned", "scores")

# %% [markdown]
# `mma_m32n8k16` is two `mma` that share the operand B (`fa/rows32.cuh`). Section 2 is this region:

# %%
show.region("13_tuned", "online_update")

# %%
show.region("13_tuned", "tile_loop")

# %% [markdown]
# The loop body shows the plan: form $P$ with the maximum at hand; if it does not fit, do it again with a new one. `__all_sync` asks all lanes of the warp, so that they take the branch together.

# %% [markdown]
# ## Run and check
#
# Among the cases are those made to defeat a stale maximum: scores that rise along the keys, that fall, that lie around $\pm 10^4$, one-hot rows.

# %%
check(kernel)

# %%
plot.error(record.load("13_tuned", "error"))

# %% [markdown]
# ## Predict, then measure
#
# ### The budget, before and after
#
# Predict, per `HMMA`: how many `LDSM`, how many `FMNMX`, how many `FMUL` are left?

# %%
pair = sass.compare("12_double_buffered", "13_tuned", D=128, loop=True)
per_mma = (pair[["12_double_buffered", "13_tuned"]] / pair.loc["HMMA", ["12_double_buffered", "13_tuned"]]).round(2)
pd.concat({"in the code": pair, "per HMMA": per_mma}, axis=1)

# %% [markdown]
# The loop of 13 holds the products of $S$ twice, and with them a softmax of the old kind: the way of a tile that is done again. All of its `FMNMX` and `FMUL` belong to that branch, which hardly ever runs. What does run for a tile are 256 `HMMA` and 80 `LDSM`, of which 16 read Q: 0.31 for each `HMMA` instead of 0.5. Of the arithmetic of addresses, `IMAD` and `LEA` are all but gone, and `IADD3` is down to a quarter per `HMMA`; the `LOP3` are the XORs.
#
# ### The X-ray

# %%
q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
rays = {name: xray(name, q, k, v) for name in ("12_double_buffered", "13_tuned")}
totals = {name: ray.total(space="shared", op="ldmatrix") for name, ray in rays.items()}
pd.DataFrame(totals.values(), index=totals.keys())

# %% [markdown]
# Here, at $d = 64$, Q stays in registers: 512 wavefronts in both kernels. Those of K and V have halved, from 16384 to 8192.
#
# ### Every step
#
# How this kernel was made: each row is a draft that differs from an earlier one in the step named, with why it was tried, what it reached as a ratio to SDPA FLASH, and whether it stayed. The steps that brought nothing, or cost something, are in it, too. (The reasons were partly written down afterwards, so they are no record of predictions. Make your own: cover the column `ratio` and guess before you look.)

# %%
steps = record.load("13_tuned", "steps")
with pd.option_context("display.max_colwidth", None):
    display(steps.query("D == 128")[["step", "what", "reason", "kept", "ratio"]].set_index("step").round(2))

# %%
draw_mma.steps(steps, "Times as fast as SDPA FLASH after each step, fp16, geometric mean of N = 1024, 4096, 16384")

# %% [markdown]
# **What to see.** Steps 1 to 8 follow one another, the others are side tracks from one of them.
#
# - The big gain is the first step, more rows per warp. It halves what each product asks of shared memory.
# - Steps 2 to 4 are three answers to one question, what to do about the maximum. Rescaling only when a vote asks for it (2) *lost* at $d = 64$ and $N = 1024$, and gained next to nothing at $N = 16384$: with 32 maxima per warp, in a short sequence one of them nearly always rises. Tolerating a stale one (3) pays, and not looking for it at all (4) pays again.
# - Many plausible steps cost time: bigger tiles (14), other divisions of the warps (17, 19), smaller tiles with more CTAs (13, 15). Registers decide: at 255 per thread there is nothing left for loading ahead.
# - Steps 20 to 22 are *better* at $d = 64$ and worse at $d = 128$. They overlap the softmax of one tile with the products of another, within a warp, for which $d = 128$ lacks the registers. Two kernels would be faster than one; for a rung to be read, one was kept.
# - Step 25 is the fastest at $d = 128$. It needs the first tile peeled, that is, the loop's code twice, and then an edit takes three seconds to compile; this series allows two.
# - Steps 7 and 8 cost 3 % together at $d = 64$ and 1 % at $d = 128$, and stayed: 7 for a third less code and a build within two seconds, 8 for row sums in the order of the rung before.
#
# And what each step did to the instructions of the loop (at $d = 128$; for 4 to 8 the code counts the products of $S$ twice, for the tile that is done again):

# %%
opcodes = ["registers", "spill_bytes", "instructions", "HMMA", "LDSM", "MUFU", "FFMA", "FMUL", "FADD", "FMNMX"]
steps.query("D == 128 and step <= 8").set_index("step")[[*opcodes, "IADD3", "LOP3", "IMAD", "MOV", "ratio"]]

# %% [markdown]
# ## Tile shapes by measurement
#
# Rows per CTA, keys per tile, stages, CTAs per SM, and how much of Q stays in registers: five numbers, each with a handful of sensible values, and no formula that would predict the best combination. So they are *measured*: `python -m helpers record tiles 13_tuned` compiles a declared grid of shapes, times each at three lengths, and records the result in `data/`. The loader then compiles the rung with the winners for the GPU at hand.

# %%
tiles = record.load("13_tuned", "tiles").query("dtype == 'fp16'")
shape = ["D", *tune.COLUMNS]
ms = tiles.groupby([*shape, "Nk"])["ms"].median().unstack("Nk").dropna()  # a row per shape, a column per length
ms["geometric mean"] = ms.prod(axis=1) ** (1 / 3)
ms["slower than the best"] = ms["geometric mean"] / ms.groupby("D")["geometric mean"].transform("min") - 1
ms.sort_values(["D", "geometric mean"]).groupby("D").head(4).round(3)

# %% [markdown]
# The four best shapes for each $d$, in milliseconds at three lengths. At $d = 64$ a third stage wins by 2 %, at $d = 128$ there is no shared memory for one at two CTAs per SM. There tiles of 48 keys and of 64 are level: 64 are faster by 1 % at $N = 1024$, 48 by 1 % at 16384, and by the mean the loader takes 48. (The instructions counted further up are those of the shape in the kernel file, with 64.) How flat it is near the top, and how steep further down, is the reason to measure rather than to argue.
#
# A winner wins at the lengths that were timed. The figures below are of the winners, and at $N = 256$, which the grid doesn't time, $d = 128$ is where they are weakest: 256 keys are four tiles of 64, and five and a third of 48.

# %% [markdown]
# ## Beside its peers

# %%
samples = record.load("13_tuned")
plot.throughput(samples)

# %% [markdown]
# **What to see.** Past SDPA FLASH at every length of the headline workload, in both formats, and between it and cuDNN. Like FLASH it gains with length: a longer loop pays better for its prologue.

# %%
plot.ratio(samples, "13_tuned", ["SDPA FLASH", "SDPA CUDNN"])

# %%
record.summary(samples, "13_tuned", "SDPA FLASH")

# %% [markdown]
# The columns: how many times as long as ours FLASH takes, as the geometric mean over the shapes of the figure with $N \ge 1024$, the lowest and the highest of those, and the worst of *all* recorded shapes with its place. The staircase so far:

# %%
board = scoreboard.speeds("fp16")
plot.staircase(board.query("dtype == 'fp16' or kind != 'rung'"))

# %% [markdown]
# ## What still hurts

# %%
top = record.load("device", "ceilings").query("name == 'fp16 matmul'").value.median()
best = record.headline(record.medians(samples)).query("name == '13_tuned'").groupby(["dtype", "D"]).tflops.max()
pd.DataFrame({"TFLOP/s": best.round(0), "share of a large fp16 matrix product": (best / top).round(2)})

# %% [markdown]
# How much of that is `mma.sync`'s own limit? A kernel that does nothing else, its operands in registers, was timed on the same card:

# %%
notes = record.about("13_tuned", "steps")
pd.DataFrame({"measured on this card": {key: notes[key] for key in ("ceilings", "counters")}}).style

# %% [markdown]
# Two walls are left, and neither yields to tuning.
#
# 1. **`mma.sync` itself.** It was made for Ampere. Even alone it does not reach what a large matrix product does on this card, because Hopper's tensor cores are fed at full rate only by an instruction that reads its operands from shared memory by itself: `wgmma`, notebook 30.
# 2. **One thing at a time.** A warp multiplies, or it computes exponentials. Other warps of the SM fill the gaps, if they happen to be at another stage. Notebooks 31 and 32 arrange for that instead of hoping for it.
#
# The Triton tutorial's kernel, above, is ahead: it runs at 1.38 and 1.51 times FLASH's speed at $d = 64$ and 128, this one at 1.23 and 1.16 times (fp16, $N \ge 1024$). Triton's compiler emits `wgmma` on Hopper. What cuDNN reaches at $d = 128$ is about all that `mma.sync` alone can do on this card, with no softmax beside it: no kernel on `mma.sync` will pass it. It is where this series goes after the detour of the 2x notebooks, which give this kernel what a model needs of it.

# %% [markdown]
# ## Exercises
#
# ### Exercise 13.1 · How stale may it be?
#
# The kernel accepts a lane's row sum of up to 32768. A colleague wants $2^{40}$, to redo fewer tiles: fp32 holds that easily. Give a (1, 1, 64, 64) `q` and (1, 1, 128, 64) `k` for which that kernel is *wrong* in fp16, with finite inputs.

# %%
stale = load(source=rung("13_tuned").replace("row_sum[r] <= 32768.f", "row_sum[r] <= 1.1e12f"), quiet=True)

# %%
# Exercise 13.1
q_mine, k_mine = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 128, 64)


# %%
def overflows():
    case = reference.Case("yours", *(t.to(device).half() for t in (q_mine, k_mine, torch.randn(1, 1, 128, 64))))
    assert case.q.isfinite().all() and case.k.isfinite().all(), "inputs have to be finite in fp16"
    assert check(kernel, [case]).ok, "the kernel as it stands is wrong, too"
    return not check(stale, [case]).ok


exercise.verify("13.1", overflows, hint="P is fp16: which score, above the m of the first tile, makes it infinite?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The tiles come from the last key to the first. Let the last 64 keys have small scores and the first 64 have scores larger by 17 to 36, in units of $\log_2$.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# q_mine, k_mine = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 128, 64)
# q_mine[..., 0], k_mine[:, :, :64, 0] = 8, 20
# ```
#
# The scores of the first 64 keys are $8 \cdot 20 / 8 \cdot \log_2 e = 29$ above those of the others: $P = 2^{29}$ is infinite in fp16, but adds up to less than $2^{40}$.
#
# </details>

# %% [markdown]
# ### Exercise 13.2 · Registers before building
#
# Predict for $d = 128$: how many registers per thread do the *arrays* of the kernel take that live through the tile loop, if `Q_steps` is 0, for $B_c = 64$ and for $B_c = 32$? Count `S_reg`, `P_reg`, `O_reg`, `m_reg`, `l_reg`, `row_sum` and one step of `Q_reg`. Then, `P_reg` is formed while `S_reg` dies: what is the least the compiler needs for the two together?

# %%
# Exercise 13.2
arrays = {64: None, 32: None}  # registers for all of them at once
S_and_P_at_least = {64: None, 32: None}


# %%
def counted():
    for Bc in (64, 32):
        S, P, O, rest = Bc // 8 * 8, Bc // 16 * 8, 128 // 8 * 8, 3 * 4 + 8
        assert arrays[Bc] == S + P + O + rest, f"not {arrays[Bc]} at Bc = {Bc}"
        assert S_and_P_at_least[Bc] == S, f"not {S_and_P_at_least[Bc]} at Bc = {Bc}"
    return True


exercise.verify(
    "13.2", counted, hint="an accumulator of 32 x 8 is 8 registers per lane, a rounded fragment of 32 x 16 too"
)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `S_reg[Bc / 8][8]`, `P_reg[Bc / 16][8]`, `O_reg[d / 8][8]`, three arrays of 4, and 8 for a step of Q.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# arrays = {64: 64 + 32 + 128 + 12 + 8, 32: 32 + 16 + 128 + 12 + 8}
# S_and_P_at_least = {64: 64, 32: 32}
# ```
#
# 244 and 196, of 255. Two elements of S become one register of P, which can take the place of either; so the two need no more than S alone. What is left over has to do for addresses and fragments on their way.
#
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why does a warp with 32 rows need half the shared-memory bytes per product?</summary>
#
# A fragment of K or V, once in registers, is multiplied with two strips of 16 query rows.
#
# </details>
# <details><summary>2. Why may m be any number, and why not too small a one?</summary>
#
# It cancels in the division. If it is far too small, P overflows fp16.
#
# </details>
# <details><summary>3. What happens in this kernel when the scores rise along the way?</summary>
#
# Tiles whose row sums pass the limit are done again with a new maximum: right, but slower.
#
# </details>
# <details><summary>4. What does it mean that tile shapes were measured on an H200?</summary>
#
# That they are best there, among those tried. On another GPU they are a starting point; `helpers.tune` measures again.
#
# </details>
# <details><summary>5. What would you look at to find the next percent?</summary>
#
# The loop's machine code, per product: whatever stands there beside `HMMA`, `MUFU` and `F2FP`.
#
# </details>
