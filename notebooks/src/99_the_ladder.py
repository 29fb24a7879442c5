# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 99 · The ladder
#
# [← 93 · Detective](93_detective.ipynb) | [glossary](glossary.md)
#
# **After this notebook you can**
# - read the forward passes of the series off one board: what each rung is worth, and what it costs in lines, seconds and memory (decode and the backward passes have boards of their own, in 21, 22, 23 and 33);
# - set a published figure beside your own, and say when that is fair;
# - put a kernel of your own on the board: checked, X-rayed and, on a GPU, timed.
#
# **Time** 40 minutes, and as long as you like for a kernel of your own.
#
# **Needs** one rung that you have read closely, [04](04_fa2_fp32.ipynb) for instance. No GPU: the board is drawn from recorded runs, and your kernel runs on the emulator.
#
# **The idea in one line**: a speed means something beside another one, measured on the same card in the same minutes.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import hashlib

import numpy as np
import pandas as pd
import torch
from IPython.display import display

from helpers import check, checks, exercise, load, plot, predict, progress, record, rung, scoreboard, show, xray

torch.manual_seed(0)
board = scoreboard.speeds(summit=True)
missing = scoreboard.unrecorded()
print("no timings recorded yet for:", ", ".join(missing) or "none, every rung is recorded")

# %% [markdown]
# ## The staircase
#
# Every rung of the series that computes attention, at the **headline workload**: 16384 tokens ($B N$), a model width of 2048 ($H D$), here at $N = 4096$. TFLOP/s count the two products, $4 B H N^2 D$ operations, and not the softmax. Below the rungs stand other people's kernels and two ceilings:
#
# - **SDPA FLASH**: FlashAttention-2 as PyTorch ships it, the goal of rungs 10 to 13;
# - **SDPA CUDNN**: NVIDIA's own kernel, called through the same PyTorch function, the goal of rungs 30 to 32;
# - **FA3** and **FA4**, FlashAttention-3 and -4, their authors' kernels for Hopper and later: where they ran beside a rung, in one process;
# - **Triton tutorial 06**, FlashAttention-2 written in Triton, a Python dialect that compiles to GPU kernels; from an earlier study on the same kind of card, so only roughly comparable;
# - **cuBLAS**: no attention at all, but the product of two square matrices of 8192, as NVIDIA's library multiplies them;
# - **datasheet**: the card's peak for dense products of 16-bit numbers, as NVIDIA states it ([H100](https://www.nvidia.com/en-us/data-center/h100/) and [H200](https://www.nvidia.com/en-us/data-center/h200/), both SXM: the 1,979 TFLOP/s given there are with half of a matrix zero, "with sparsity").
#
# Rungs up to 04 take fp32 and run on CUDA cores; from 10 on, inputs are 16-bit numbers and the products run on tensor cores.

# %%
times = ...  # your prediction: how many times as fast as 01_naive is the fastest kernel, at D = 128

# %% tags=["reveal"]
attention = board[(board["kind"] != "ceiling") & board["tflops"].notna()]
at128 = attention[attention["D"] == 128].set_index("name")["tflops"]
predict(times, at128.max() / at128["01_naive"], f"times as fast is {at128.idxmax()}", within=0.3)
scoreboard.draw(board)

# %% [markdown]
# **What to see.** The scale is logarithmic: each decade is ten times the one before. Between 01 and 04 the arithmetic units are the same: a factor of 30<!--= tflops("04", 64, dtype="fp32") / tflops("01", 64, dtype="fp32"):.0f --> ($D = 64$) comes from the algorithm and from care with memory. From 10 to 11 it is a factor of 4.0<!--= tflops("11", 64) / tflops("10", 64):.1f -->, with the same loads, stores and products. And nothing reaches the datasheet's line, not even cuBLAS, which has no softmax to do.
#
# ### Beside FlashAttention-2
#
# TFLOP/s of two runs can differ because the card was hot, or its clock was lowered. In a **ratio** of two kernels that took turns in one process, most of that cancels. This is the figure to judge rungs 10 and up by: SDPA FLASH's time over the rung's, geometric mean over $N \ge 1024$, with whiskers from the worst length to the best. (FLASH takes 16-bit inputs only, so the fp32 rungs have no such ratio.)
#
# Most of it, not all: two kernels don't slow down alike. cuDNN was 1.95<!--= ratio("32", "FLASH", 128) / ratio("32", "CUDNN", 128):.2f --> times as fast as FLASH in the session of rung 32, and 1.81<!--= ratio("10", "FLASH", 128) / ratio("10", "CUDNN", 128):.2f --> times in that of rung 10 ($D = 128$). So ratios from two sessions can be 8<!--= 100 * (ratio("32", "FLASH", 128) / ratio("32", "CUDNN", 128) / (ratio("10", "FLASH", 128) / ratio("10", "CUDNN", 128)) - 1):.0f --> % apart, and a smaller difference between them means nothing. Where one matters, as between 32 and FA3, the two ran beside each other.

# %%
if board.loc[board["kind"] == "rung", "to_flash"].notna().any():
    display(plot.staircase(board, "to_flash"))
else:
    print("no 16-bit rung has been recorded yet: the ratio to FLASH appears here as soon as one is")

# %% [markdown]
# The figures above show your card if `make bench` has recorded it, otherwise an H200, or an H100 where a kernel has changed since the H200 was recorded. Two cards' figures don't mix, so every other card with records in `data/` has a figure of its own (stale: the kernel has changed since):

# %%
for other in scoreboard.others():
    display(scoreboard.draw(scoreboard.speeds(device=other)))

# %%
both = pd.concat([board, scoreboard.speeds("bf16")]).query("kind == 'rung' and dtype != 'fp32'")
ratios = both.pivot_table(index="name", columns=["D", "dtype"], values="to_flash", dropna=False)
ratios.round(2).astype(object).where(ratios.notna(), "not recorded")

# %% [markdown]
# bf16 has the exponents of fp32 and three bits fewer in the fraction than fp16. The tensor cores multiply both at the same rate, so the two columns of one $D$ should agree to within a few percent; if they don't, look at what the kernel does *around* the products.

# %% [markdown]
# ### One sequence of few heads
#
# The headline workload has work for every SM. One sequence of few heads may not. At $D = 64$ a CTA of rung 32 takes 192 queries at a time, there is one CTA to an SM, and the H200 has 132 SMs. A head of 2048 queries makes 11 such tiles: 8 heads make 88. How many times as long do 16 heads take?

# %%
sixteen_over_eight = ...  # your prediction, at D = 64 and without a mask

# %% tags=["reveal"]
few_heads = record.load("32_ping_pong", "one_sequence", device="nvidia-h200")
ms = record.medians(few_heads).query("name == rung and D == 64 and Nk == 2048 and causal == 0").set_index("H")["ms"]
predict(sixteen_over_eight, ms[16] / ms[8], "times as long", within=0.2)
plot.by_heads(few_heads)

# %% [markdown]
# **What to see.** 16 heads make 176 tiles. 132 of them begin at once, and 44 are left for a second round, in which two thirds of the SMs have nothing to do. cuDNN's times grow as if its tiles had 128 queries. A round of them is shorter: at 8 and 16 heads cuDNN takes 0.90<!--= one_sequence("32", "CUDNN", 64, N=2048)[8]:.2f --> and 0.86<!--= one_sequence("32", "CUDNN", 64, N=2048)[16]:.2f --> of 32's time. But for 32 and 64 heads it needs 4 and 8 rounds, rung 32 only 3 and 6, and it takes longer. At $D = 128$ tiles of 32 have 128 queries, too: 8 heads make 128 of them, nearly one for each SM.
#
# Over all that was recorded (4 to 64 heads of 256 to 8192 queries, together 8,192 to 131,072, with and without a mask), 32 is 0.82<!--= min(one_sequence("32", "CUDNN", 64, c).min() for c in (0, 1)):.2f --> to 1.53<!--= max(one_sequence("32", "CUDNN", 64, c).max() for c in (0, 1)):.2f --> times as fast as cuDNN at $D = 64$ and 1.07<!--= min(one_sequence("32", "CUDNN", 128, c).min() for c in (0, 1)):.2f --> to 1.91<!--= max(one_sequence("32", "CUDNN", 128, c).max() for c in (0, 1)):.2f --> at 128; beside FA3 1.02<!--= min(one_sequence("32", "FA3", D, c).min() for D in (64, 128) for c in (0, 1)):.2f --> to 1.50<!--= max(one_sequence("32", "FA3", D, c).max() for D in (64, 128) for c in (0, 1)):.2f -->, beside FA4 0.92<!--= min(one_sequence("32", "FA4", D, c).min() for D in (64, 128) for c in (0, 1)):.2f --> to 1.24<!--= max(one_sequence("32", "FA4", D, c).max() for D in (64, 128) for c in (0, 1)):.2f -->. The lowest to cuDNN (64 heads of 512 queries, $D = 64$) and FA3 (16 of 2048, $D = 128$) have 192 and 256 tiles: a second round. A counter deals these out, and clearing it first costs more than a microsecond. The lowest to FA4 are those of 32 and 64 heads of 256, where a call takes eight or nine microseconds.

# %% [markdown]
# ## What a step costs
#
# A rung is not only fast or slow. It has to be read, compiled and trusted. For every one: its lines of code (comments and included headers not counted), the seconds of a first build and of a build after an edit (with 16 cores or 32, on which nvcc compiles a rung's instances side by side), the largest error as a share of what the error rule allows (over every recorded length, $D$ and dtype), and the memory in MiB that one head of $N = 16384$ allocates.

# %%
costs = scoreboard.properties()
shown = costs.map(lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.3g}")
shown.where(costs.notna(), "–")

# %% [markdown]
# `of_budget` above 1 would be a wrong kernel, and a wrong kernel is not timed. (`of_budget_o` is that of $P$ in rung 02, and in 22, 23 and 33 the largest of those of $dQ$, $dK$ and $dV$.) The budget is twice the error of plain PyTorch at the same precision and a little more, so a kernel that errs as much as plain PyTorch stands at a half or below. The memory column is the reason why FlashAttention exists: the naive kernel keeps $S$ and $P$ in memory, the others do not.
#
# Now the price of a step against its worth: how many lines of code a rung changes in the one below it, and how many times as fast that made it (geometric mean over $N \ge 1024$). Each divides one record by another, often of a different day, and is good to a tenth: at $d = 128$, 30 over 20 is 1.16 here and 1.26<!--= ratio("30", "FLASH", 128) / ratio("20", "FLASH", 128):.2f --> by their ratios to FLASH. Which step is worth most per changed line?

# %%
worth_most = ...  # your prediction: a rung, such as "04_fa2_fp32"

# %% tags=["reveal"]
steps = scoreboard.steps()
steps.round(2).astype(object).where(steps.notna(), "not recorded")

# %% tags=["reveal"]
if steps.filter(like="times").notna().any(axis=None):
    per_line = np.log(steps["times_faster_D128"]) / steps["changed_lines"].clip(lower=1)
    best = steps.loc[per_line.idxmax()]
    predict(
        worth_most, per_line.idxmax(), f"gains most per line: × {best.times_faster_D128:.2f} for {best.changed_lines}"
    )
    display(show.diff(best.over, per_line.idxmax()))

# %% [markdown]
# ## Published tables beside ours
#
# Others have optimized the same kernels and published what they measured. Each table was taken on another card or on another day, so *in no table below does a time of theirs stand beside a time of ours*. What may be compared is a ratio: theirs to a reference on their card, ours to the same reference on ours.
#
# ### Sixteen steps to FlashAttention-2
#
# The series [flash_attention_from_scratch](https://lubits.ch/flash) goes from a first `mma.sync` kernel to FlashAttention-2's speed in sixteen steps, measured on an A100 and an RTX 3090 at $D = 128$.

# %%
at128 = board[(board["D"] == 128) & (board["kind"] == "rung") & (board["dtype"] != "fp32")]
ours = 100 * at128.set_index("name")["to_flash"]
plot.percent_steps(record.sixteen_steps(), ours.to_dict(), board["device"].dropna().iloc[0])

# %% [markdown]
# **What to see.** On the A100 the second of the sixteen steps, the swizzle, brings more than all others together, and it is all that our rung 11 changes. The RTX 3090 starts at half of FlashAttention-2's speed and has nearly reached it after the same two steps, presumably because its tensor cores are slower in proportion to its memory, so that they hide the rest of the kernel's work.
# The same change is worth different amounts on different cards: a reason to measure on yours. Most of the steps from 6 on have their counterpart in our rung 13.
#
# ### Public kernels on an H200
#
# In an earlier study each of these ran interleaved with SDPA FLASH on one H200. Same card, same reference, same method, other day: the ratios can stand beside ours.

# %%
study = record.headline(record.public_kernels()).query("Nk >= 1024 and dtype == 'fp16' and name != 'FlashAttention-3'")
public = study.groupby(["name", "D"])["to_flash"].agg(lambda r: np.exp(np.log(r).mean())).dropna().reset_index()
here = board[(board["kind"] == "rung") & board["to_flash"].notna()][["name", "D", "to_flash"]]
table = pd.concat([public.assign(source="study"), here.assign(source="this series")])
table = table.pivot(index=["name", "source"], columns="D", values="to_flash")
table.sort_values(128, ascending=False).round(2).astype(object).where(lambda t: t.notna(), "–")

# %% [markdown]
# SDPA FLASH, flash_attention_from_scratch and LeetCUDA multiply with `mma.sync`, as our rungs 10 to 13 and 20 do. Of those in this study none gets past 1.1; 13 is ahead of them at both $D$. FlashAttention-3, which is not in the table, uses [`wgmma`](glossary.md#wgmma), which Hopper alone has: a product of four warps together that reads shared memory by itself. And it uses [TMA](glossary.md#tma), a copy engine that came with Hopper
# (Shah et al. 2024, [arXiv 2407.08608](https://arxiv.org/abs/2407.08608)). That is where the rungs from 30 on go. [Notebook 32](32_ping_pong.ipynb) times it and rung 32 in one process.
#
# ### LeetCUDA's log
#
# [LeetCUDA](https://github.com/xlite-dev/LeetCUDA) logs its kernels beside an unfused attention in PyTorch on a GPU of the Ada generation. SDPA MATH is unfused attention too. So the ratios can be compared, but only roughly: their reference and ours are not the same code.

# %%
log = record.leetcuda_log().assign(source="LeetCUDA, Ada GPU")
samples = scoreboard.samples()
rows, device = [log.rename(columns={"to_unfused": "ratio"})], samples["device"].iloc[0]
for one in sorted(set(samples["rung"])):
    found = record.ratio(record.load(one, device=device), one, "SDPA MATH")
    rows.append(found.assign(name=one, source=f"this series, {device}"))
grid = pd.concat(rows).query("B in (8, 16) and H in (8, 16) and Nk == 1024 and dtype != 'bf16'")
grid = grid.pivot_table(index=["source", "name", "dtype"], columns="D", values="ratio", aggfunc="median")
grid.round(3).astype(object).where(grid.notna(), "–")

# %% [markdown]
# Each number: how many times as fast as unfused PyTorch at $N = 1024$, the median over $B$ and $H$ in {8, 16}. The first row of the log is a FlashAttention-1 in fp32. Its time hardly depends on the number of heads (at $N = 256$: 9.3 ms with 64 of them, 12.1 ms with 256), so most of its card is idle. Fusing
# alone does not make a kernel fast.

# %% [markdown]
# ## Your kernel
#
# Now add a kernel of your own. There are three ways to load it:
#
# - a file: `mine = load("kernels/mine.cu")`, with any path;
# - a cell that opens with the line `%%kernel mine` (after `%load_ext helpers`);
# - a text in Python: `mine = load(source=...)`, for instance a rung with a line replaced.
#
# Like every rung it needs the launcher `fa_launch` and, at the top, a header block that says which dtypes and $D$ it takes; copy a rung and change it. The one below is an example: rung 10 with padded rows, eight elements longer than $d$, so that the rows of a tile begin in different banks. (It keeps rung 10's name; *unchanged* below means that it was compiled before.)

# %%
source = rung("10_fa2_mma_fp16").source.replace("return row * d + chunk * 8", "return row * (d + 8) + chunk * 8")
for name in ("Br", "Bc"):
    source = source.replace(f"_smem + {name} * d;", f"_smem + {name} * (d + 8);")
mine = load(source=source.replace("2 * (Br + 2 * Bc) * d;", "2 * (Br + 2 * Bc) * (d + 8);"))

# %% [markdown]
# **Checked.** A wrong kernel has no speed.

# %%
report = check(mine)
report

# %% [markdown]
# **X-rayed.** The emulator runs it and follows every load and store: which line costs what, in [wavefronts](glossary.md#wavefront) of shared memory and [sectors](glossary.md#sector) of global memory (*excess*: beyond those that the bytes asked for fill), and whether there is a [race](glossary.md#race), an access out of bounds, or a read of what was never written.

# %%
dtype = getattr(torch, {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}[mine.rung.dtypes[0]])
ray = xray(mine, *torch.randn(3, 1, 2, 256, 64).to(dtype))
ray

# %%
beside = ["10_fa2_mma_fp16", "11_swizzled", "13_tuned"]  # rungs that take the same dtypes as yours
scoreboard.xrays({"yours": mine} | {stem: stem for stem in beside})

# %% [markdown]
# `times_least` is the bytes that threads ask of global memory over the least an attention can do with; `wavefronts` and `conflicts` are shared memory's, `products` counts the instruction `mma.sync`. The padding removes all of rung 10's conflicts, as the swizzle of 11 does. Whether it is as *fast* as 11, these counts cannot say: its tiles need an eighth more shared memory at $d = 64$, which may leave fewer CTAs per SM.

# %% [markdown]
# **Placed.** On a GPU your kernel is now timed beside SDPA FLASH at the headline workload, and appears on the board. Without one, the recorded ladder stands as it is, and the X-ray above is what there is to compare.

# %%
if mine.device == "cuda" and report.ok:
    board = pd.concat([board, scoreboard.place(mine)])
else:
    print("no GPU here, or a wrong kernel: nothing is timed")
scoreboard.draw(board[board["kind"] != "ceiling"])

# %% [markdown]
# ## Exercises
#
# ### Exercise 99.1 · A ratio worth printing
#
# A card's clock wanders while it is measured: two kernels timed one after the other can differ by several percent for that reason alone. The samples of this series have a column `round`: within one round all kernels ran within a few milliseconds of each other. Write the function that makes a headline out of them:
# for each $N$, the ratio peer's ms / our ms *within each round*, the median over the rounds; then the geometric mean over the $N$.


# %%
# Exercise 99.1
def speedup(samples, ours, peer):
    """One number from columns name, Nk, round, ms."""
    ms = samples.groupby("name")["ms"].mean()
    return ms[peer] / ms[ours]


# %%
wander = np.array([1.0, 1.6, 1.0, 1.3, 1.0])  # the clock of five rounds
rows = []
for N, ratio in [(1024, 0.5), (4096, 2.0), (16384, 8.0)]:
    for r in range(5):
        rows += [("ours", N, r, N * wander[r]), ("peer", N, r, N * wander[r] * ratio)]
rows += [("ours", N, 5, 9e9) for N in (1024, 4096, 16384)]  # a round that was cut off: its peer is missing
made_up = pd.DataFrame(rows, columns=["name", "Nk", "round", "ms"])


# %%
def agrees():
    got = speedup(made_up, "ours", "peer")
    assert abs(got - 2.0) < 1e-9, f"the made-up samples have ratios 0.5, 2 and 8, so 2; yours gives {got:.4g}"
    real = record.headline(record.load("04_fa2_fp32", device="nvidia-h200")).query("D == 64 and Nk >= 1024")
    wanted = record.overall(real, "04_fa2_fp32", "SDPA EFFICIENT")[0]
    got = speedup(real, "04_fa2_fp32", "SDPA EFFICIENT")
    assert abs(got / wanted - 1) < 1e-9, f"on the records of 04 it is {wanted:.6f}, yours gives {got:.6f}"
    return True


exercise.verify("99.1", agrees)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `samples.pivot_table(index=["Nk", "round"], columns="name", values="ms")` puts each round's times side by side. Average ratios as factors: through their logarithms.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# def speedup(samples, ours, peer):
#     wide = samples.pivot_table(index=["Nk", "round"], columns="name", values="ms")
#     ratios = (wide[peer] / wide[ours]).dropna()
#     return np.exp(np.log(ratios.groupby("Nk").median()).mean())
# ```
#
# A mean of times would let the longest $N$ decide alone, and an arithmetic mean of ratios depends on which kernel is below the line: 0.5, 2 and 8 average to 3.5, their inverses to 0.875, which is not $1 / 3.5$. The geometric means are 2 and $1/2$.
#
# </details>

# %% [markdown]
# ### Exercise 99.2 · Half the bytes
#
# Every CTA of rung 04 reads all of K and V. Bring in a kernel in fp32, right by `check` and without findings, that at $B = 1$, $H = 2$, $D = 128$ asks for at most **half** of rung 04's bytes, Q's not counted; $N$ is drawn, 256 or 512. `entry` is its source. Before you run the check: do you expect it to be faster?

# %%
# Exercise 99.2
entry = rung("04_fa2_fp32").source


# %%
exercise.verify("99.2", lambda: checks.half_the_bytes(entry))

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# $B_r$ is the number of warps times the rows of a warp. At $D = 32$ a slab is too small to be shared out among eight warps; leave that one alone.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# entry = rung("04_fa2_fp32").source.replace("warps = 4,", "warps = d == 32 ? 4 : 8,")
# ```
#
# Eight warps double $B_r$ for $D = 64$ and 128, so there are half as many passes over K and V. The price: 256 threads share the SM's registers, and with the two CTAs per SM that the launch bounds still ask for, each thread has 128 at most, where rung 04 uses more than 220. `helpers.sass.resources(load(source=entry).rung)`
# shows the spills. Fewer bytes asked for, and very likely a slower kernel: the board, not the X-ray, has the last word.
#
# </details>

# %% [markdown]
# ### Exercise 99.3 · Fair or not?
#
# Four sentences that compare. Say of each whether its author may write it.
#
# a. "flash_attention_from_scratch's last kernel reaches 100 % of FlashAttention-2 on an A100; my kernel reaches 60 % of SDPA FLASH on an H200. Each is measured beside FlashAttention-2 on its own card: mine is further from it."
# b. "LeetCUDA takes 1.1 ms at $B = H = 16$, $N = 1024$, $D = 64$, mine takes 0.5 ms on an H200: mine is the better kernel."
# c. "My kernel is 1.3 times as fast as SDPA MATH, so it beats PyTorch's attention."
# d. "At $N = 512$ it reaches 0.8 of FLASH, at 16384 it reaches 1.2; geometric mean over $N \ge 1024$: 1.15, worst shape of all 0.8."

# %%
# Exercise 99.3
fair = {"a": None, "b": None, "c": None, "d": None}  # True or False


# %%
def judged():
    verdicts = [None if fair[x] is None else bool(fair[x]) for x in "abcd"]
    digest = hashlib.sha256(repr(verdicts).encode()).hexdigest()[:8]
    assert digest == "11df2ebf", "at least one of the four is judged otherwise"
    return True


exercise.verify("99.3", judged)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# A ratio travels between cards if both sides name the reference and how it was measured. A time doesn't.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# fair = {"a": True, "b": False, "c": False, "d": True}
# ```
#
# (a) compares two ratios to the same reference and says what was measured where; it does not claim that the one kernel would beat the other on one card. (b) sets times of two cards side by side. (c) chose the weakest of PyTorch's back ends: for 16-bit inputs `scaled_dot_product_attention` takes FLASH or CUDNN. (d) gives the mean,
# what it is a mean of, and the worst shape.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why is a ratio measured within one process more trustworthy than the quotient of two recorded TFLOP/s?</summary>
#
# Clock, temperature and power limit change from minute to minute. Kernels that take turns see the same card; two sessions don't.
#
# </details>
# <details><summary>2. Why the geometric mean?</summary>
#
# It treats a factor of two up and a factor of two down alike, and the mean of the inverse ratios is the inverse of the mean.
#
# </details>
# <details><summary>3. A kernel asks for half the bytes and is no faster. Name two reasons.</summary>
#
# The bytes came from the L2 cache and were not what it waited for; or what it paid for them (registers, CTAs per SM) cost more.
#
# </details>
# <details><summary>4. Which figures of this notebook would change on a machine without a GPU?</summary>
#
# None of the recorded ones, and no count of the X-ray. Only your kernel's step would be missing.
#
# </details>
