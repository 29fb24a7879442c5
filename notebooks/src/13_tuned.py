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
# - take the row maximum out of the loop, and say when the result is as accurate as with it;
# - choose tile shapes by measurement, and know what such a choice is worth on another card.
#
# **Time** 75 minutes.
#
# **Needs** [12 · Double-buffered](12_double_buffered.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: the tensor cores wait for shared memory, for the softmax and for addresses; give each of these less to do.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

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
# because $2^{-m}$ cancels. The maximum is there so that nothing overflows, and so that the largest terms do not vanish. It need not be the *true* maximum: any $m$ that is not too far below it will do.
#
# So: **do not look for the maximum. Form $P$ with the $m$ of earlier tiles and see how the row sum comes out.** If it stays below a bound in all rows of the warp, all is well: no maximum, no shuffle, no rescaling of $O$. If not, do the tile again: multiply $Q K^\top$ once more ($P$ has taken its place), take the true maximum, rescale, and form $P$ anew.
#
# **Which bound?** fp16's largest number is 65504: up to 32768 no $P$ overflows. But digits are lost before. Rounding $P$ to 16 bits costs the same share of it at any size, except that *$P = 1$ is exact*. With the true maximum that is the $P$ of the key that leads its row; if it takes most of the row, most of the row is exact. With a stale maximum it is rounded like any other. Let us try, with the sums that the kernel forms: of the 16 columns of a tile that a lane has of a row.


# %%
def attend(q, k, v, bound):
    """O (rows, 64), it and P in bf16, tiles of 64 keys from the last on; the share of tiles whose maximum is sought."""
    O, sought = [], []
    for rows in (q @ k.T / 8 * 1.4427).split(32):  # a warp
        m, l, o, take_to = torch.full((32, 1), -torch.inf), 0.0, 0.0, len(k) - 2 * 64
        for j0 in range(len(k) - 64, -1, -64):
            s, v_j, alpha = rows[:, j0 : j0 + 64], v[j0 : j0 + 64], 1.0
            take = j0 <= take_to
            sums = torch.exp2(s - m).unflatten(1, (-1, 4, 2)).sum((1, 3))
            fits = take and bool((sums <= bound).all())
            if not fits:
                m_old, m = m, torch.maximum(m, s.amax(1, keepdim=True))
                alpha, take_to = torch.exp2(m_old - m), -1 if take else take_to  # -1: to the end
            P = torch.exp2(s - m)
            l, o = alpha * l + P.sum(1, keepdim=True), alpha * o + P.bfloat16().float() @ v_j
            sought.append(not fits)
        O.append((o / l).bfloat16())
    return torch.cat(O), sum(sought) / len(sought)


# %%
found = {}
for factor in (1, 2, 4):
    q, k, v = factor * torch.randn(256, 64), torch.randn(4096, 64), torch.randn(4096, 64)
    exact = torch.softmax(q.double() @ k.double().T / 8, 1) @ v.double()
    least = (attend(q, k, v, 0)[0] - exact).norm()  # always the true maximum
    for bound in (8, 16, 32, 128, 1024, 32768):
        o, sought = attend(q, k, v, bound)
        error = (o - exact).norm() / least
        found[bound, f"Q × {factor}"] = {"error": error.item(), "maximum sought": sought}
pd.DataFrame(found).T.unstack().rename_axis("bound").round(2)

# %% [markdown]
# **What to see.** Normal random scores never break a bound of 32, and soon break one below. (0.02 is the first of 64 tiles, whose maximum is always sought.) Where scores lie further apart it is broken, and rightly: at 32768 the error is 15 to 25 % larger, at 32 it is that of a true maximum. (Not always: where a peak in the first tile is later passed by little, as in a sawtooth, nothing is missed and an eighth is lost.)
#
# **Track, or take what there is.** What was missed once is likely missed again, as where scores rise along the way. So a warp that has missed *tracks*: from there on it forms the maximum before the exponentials, as rung 12 does, to the end of its query tile. $S$ is multiplied twice for one tile at most. The first whole tile is always tracked: the maximum of a ragged one, perhaps a single key, would be poor.

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
# The loop body shows the plan: take $P$ with the maximum at hand; if it does not fit, do it again with a new one, and track. `__all_sync` asks all lanes of the warp, so that they take the branch together.
#
# So **a row's bits depend on the other rows of its warp**: if one of the 32 misses its maximum, all track from there on, and their $P$ are rounded differently. Both results are within the error's budget, and neighbours that miss nothing make no difference (`tests/run/test_maximum.py`).

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
# The loop of 13 holds the products of $S$ twice, and with them a softmax of the old kind: the way of a tile whose maximum is tracked. All of its `FMNMX` and `FMUL` belong to that branch, which random inputs hardly ever take. What does run for a tile are 256 `HMMA` and 80 `LDSM`, of which 16 read Q: 0.31 for each `HMMA` instead of 0.5. Of the addresses' `IMAD`, `LEA` and `IADD3` little is left; the `LOP3` are the XORs.
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
# How this kernel was made: each row is a draft that differs from an earlier one in the step named, with why it was tried, what it reached as a ratio to SDPA FLASH, and whether it stayed. The steps that brought nothing, or cost something, are in it, too. Cover the column `ratio` and guess before you look.

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
# - Steps 2 to 4 are three answers to what to do about the maximum. Rescaling only when a vote asks for it (2) *lost* at $d = 64$ and $N = 1024$: of 32 maxima, one nearly always rises. Tolerating a stale one (3) pays, and not looking for it at all (4) pays again.
# - Many plausible steps cost time: bigger tiles (14), other divisions of the warps (17, 19), smaller tiles with more CTAs (13, 15). Registers decide.
# - Some speed was left for a kernel that can be read and compiled fast: steps 20 to 22 (the softmax of one tile under another's products, better at $d = 64$, too many registers at 128), 25 (the fastest at 128, with the loop's code twice), and what 7 and 8 cost, 3 % at $d = 64$.
# - For the bound of 32, two more were tried. To scale $P$ in registers instead of a second product costs 5 % on random inputs and 20 to 40 % where every tile asks for it. Nor did a bound that grows with the row sum $l$ pay.

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
# The four best shapes for each $d$, in milliseconds at three lengths. At $d = 64$ a third stage makes next to no difference; at $d = 128$ there is no shared memory for one at two CTAs per SM. There tiles of 64 keys are faster than those of 48 at every length: the loader takes 64.
# A winner wins at the lengths that were timed: at $N = 256$, far below them, its lead over FLASH is least.

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
# ### The price, by family
#
# Random inputs are this kernel's best case. The others, from $Q$ two to eight times as large to heads of trained models, are described in [data/README.md](../data/README.md#families-of-inputs).

# %%
three = ["13_tuned", "12_double_buffered", "SDPA FLASH"]
draw = lambda samples: plot.families(samples, three)  # noqa: E731
plot.recorded("13_tuned", "families", draw, by="python -m helpers record families 13")

# %% [markdown]
# **What to see.** With a sink, nothing is missed before the last tile; when scores grow along the keys, the first tile has the maximum. Nearly everywhere else warps track: the softmax of rung 12, on fragments that serve 32 rows, still ahead of it. $Q \times 2$ and the sawtooth would be faster with a larger bound; there speed is paid for digits.

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
# The Triton tutorial's kernel, above, is ahead: Triton's compiler emits `wgmma` on Hopper. What cuDNN reaches at $d = 128$ is about all that `mma.sync` alone can do on this card, with no softmax beside it: no kernel on `mma.sync` will pass it. It is where this series goes after the detour of the 2x notebooks, which give this kernel what a model needs of it.

# %% [markdown]
# ## Exercises
#
# ### Exercise 13.1 · How stale may it be?
#
# A colleague wants a bound of $2^{20}$, to track less: fp32 holds such sums easily. Give a (1, 1, 64, 64) `q` and (1, 1, 128, 64) `k` for which that kernel is *wrong* in fp16, with finite inputs. And what is the largest power of two as a bound with which no $P$ overflows?

# %%
stale = {
    n: load(source=rung("13_tuned").replace("row_sum[r] <= 32.f", f"row_sum[r] <= {2**n}.f"), quiet=True)
    for n in (15, 20)
}

# %%
# Exercise 13.1
q_mine, k_mine = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 128, 64)
safe = 2**20


# %%
def overflows():
    case = reference.Case("yours", *(t.to(device).half() for t in (q_mine, k_mine, torch.randn(1, 1, 128, 64))))
    assert case.q.isfinite().all() and case.k.isfinite().all(), "inputs have to be finite in fp16"
    assert check(kernel, [case]).ok and check(stale[15], [case]).ok, "with a bound of 32 or 32768 it is wrong, too"
    assert not check(stale[20], [case]).ok, "with a bound of 2**20 it is right"
    return safe == 2**15


exercise.verify("13.1", overflows, hint="P is fp16: which score, above the m of the first tile, makes it infinite?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The tiles come from the last key to the first. Let the last 64 keys have small scores, and one of the first 64 a score larger by 17 to 19, in units of $\log_2$.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# q_mine, k_mine, safe = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 128, 64), 2**15
# q_mine[..., 0], k_mine[:, :, 0, 0] = 8, 12.5
# ```
#
# The score of key 0 is $8 \cdot 12.5 / 8 \cdot \log_2 e = 18$ above the others: $P = 2^{18}$ is infinite in fp16, and below $2^{20}$. With $2^{15}$ such a tile is done again; digits are lost with that bound, too (section 2).
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
# It cancels in the division. If it is far too small, P overflows fp16; long before, the keys that count most lose digits, which a true maximum keeps exact.
#
# </details>
# <details><summary>3. What happens in this kernel when the scores rise along the way?</summary>
#
# The first tile whose row sums pass the bound is done again with a new maximum, and every later one's is formed before its exponentials: as accurate, but slower.
#
# </details>
# <details><summary>4. What does it mean that tile shapes were measured on an H200?</summary>
#
# That they are best there, among those tried. On another GPU they are a starting point; `python -m helpers record tiles` measures again.
#
# </details>
# <details><summary>5. What would you look at to find the next percent?</summary>
#
# The loop's machine code, per product: whatever stands there beside `HMMA`, `MUFU` and `F2FP`.
#
# </details>
