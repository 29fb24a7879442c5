# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 19 · Log: every draft of 13
#
# [← 13 · Tuned](13_tuned.ipynb) | [glossary](glossary.md) | [20 · Causal masks and grouped heads →](20_causal_gqa.ipynb)
#
# What was tried and measured on the way from [12](12_double_buffered.ipynb) to [13](13_tuned.ipynb), what came of it and why, as recorded. No lesson and no exercises; [13](13_tuned.ipynb) has the steps that teach.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd

from helpers import draw_mma, record, tune, units

steps = record.load("13_tuned", "steps")
notes = record.about("13_tuned", "steps")
print(f"{notes['device']}, {notes['date']}\n{notes['method']}\n{notes['counts']}")

# %% [markdown]
# ## The drafts
#
# Times as fast as SDPA FLASH, fp16. Drafts 1 to 8 build on one another; each of the others changes one of these. Where the counts of its code show that a draft differs in more than its name says, brackets name it.

# %%
drafts = units.drafts()
text = "; ".join(f"{row.label}, D = {row.D}: {row.ratio:.2f}" for row in drafts.itertuples())
draw_mma.dots(
    drafts,
    f"Drafts of 13, geometric mean of N = 1024, 4096, 16384 · {notes['device']}",
    "times as fast as SDPA FLASH",
    text,
)

# %%
with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
    display(record.step_table(steps).round(2).astype(object).where(lambda t: t.notna(), "–"))

# %% [markdown]
# Ratios at each length, registers per thread, and instructions in the code of the loop (not executed ones; the code that computes a tile again is included):

# %%
shown = ["step", "D", "ratio_1024", "ratio_4096", "ratio_16384", "registers", "spill_bytes", "instructions", "HMMA", "LDSM", "FMNMX"]  # fmt: skip
with pd.option_context("display.max_rows", None):
    display(steps[shown].sort_values(["step", "D"]).set_index(["step", "D"]).round(2))

# %% [markdown]
# - Drafts 20 to 22 run the softmax of one tile beside another's products. At $d = 128$ that takes more registers than there are, so their tiles have 32 keys; with 64 keys they were not timed at that $d$.
# - Draft 8 became the rung. That copies leave before $P$ is rounded came later (below). The stages in `kernels/stages/` were cut from it afterwards; notebook 13 has their times, side by side. The drafts are of another session, and their 12_double_buffered of a third: between sessions a kernel's ratio to SDPA FLASH moves by a few percent (12 at D = 64: 0.93<!--= ratio("12", "FLASH", 64):.2f --> in its own record, 0.97<!--= stage("13", "12", "FLASH", 64):.2f --> beside the stages).
# - In draft 7 the loop's code is there once, at no cost. Draft 8 loses 2 % at $d = 64$; in return sums are formed in the order of rung 12.
# - In the drafts with a bound, a tile whose sums exceed it is formed again, and the maximum is tracked from there on. The next section has what took the place of that.
#
# ## Peaked inputs: what was tried
#
# Rungs 13 and 20 used to form $S$ again where a row sum of $P$ exceeded 32, and to track the maximum to the end. On peaked inputs that cost a fifth of the speed. Variants were compared on an H200, each beside what the rung was then, in one process: normal random numbers at N = 512 to 16384, and [families](glossary.md#family) at N = 512, 1024 and 4096, fp16. Larger is faster. The error is that of $O$ over SDPA FLASH's, the worst family. These comparisons are not among the records.
#
# | variant | random, D = 64 | D = 128 | families, D = 64 | D = 128 | error |
# |---|---|---|---|---|---|
# | 13, before | 1 | 1 | 1 | 1 | 1.03 |
# | a bound of 32768, nothing else | 1.01 | 1.00 | 1.09 | 1.05 | 1.28 |
# | $P$ divided by its largest, 2 as the bound from then on | 0.99 | 1.00 | 1.04 | 1.01 | 1.03 |
# | **the same with 4: the rung** | 1.00 | 1.00 | 1.06 | 1.02 | 1.06 |
# | with 2, $P$ rounded before the vote | 0.99 | 0.96 | 1.02 | 0.98 | 1.03 |
#
# - *Divide by the sum of the rounded $P$*, formed by one more `mma` with a matrix of ones: the rounding of a key that takes most of its row cancels. Of a key with half the weight, half of it stays. On the emulator the errors were 1.05 to 1.12 times FLASH's with a bound of 32768.
# - *$P$ divided, 32 as the bound throughout*: 1.12 times FLASH's error at $Q \times 2$ on the emulator.
# - *20, at D = 64*: a third stage brought 3 %, and 2 % beside a $P$ that is divided; a loop that does not `continue` at a tile the warp doesn't see, nothing (0.99 to 1.00; at D = 128 1.01 to 1.03). Both stayed at first; since then the branch for unseen tiles comes first again ([29](29_log.ipynb)). One head at a time without a mask, as in 13, brought nothing (0.99 to 1.00).
# - 20 with these changes, beside what it was, with and without a mask: 1.01 and 1.00 on random numbers at D = 64 and 128, 1.07 and 1.04 on families. Its error is at most 1.08 times FLASH's ($Q \times 2$, causal, where it was 1.06).
#
# ## The order of the loop
#
# Until then $P$ was rounded first, and the copies left after that. Time of the rung of that day over the draft's, fp16, $N = 1024$, on an H200, side by side and without a record. *Falling* is the family whose scores fall along the keys: in the order in which the tiles come, they rise.
#
# | draft | $d = 64$ | $d = 128$ | falling, $d = 64$ |
# |---|--:|--:|--:|
# | a: the copies leave before $P$ is rounded | 1.01 | 1.00 | 1.04 |
# | b: the half stage from $K$ to $V$ is added after the XOR, as a constant | 1.00 | 1.00 | 1.00 |
# | c: $K$'s address is written before the wait | 1.00 | 1.00 | 1.00 |
# | a and b | 1.01 | 1.02 | 1.04 |
# | **a, b and c: the rung** | 1.03 | 1.01 | 1.05 |
# | the compiler is told that a warp's lanes share `warp` | 0.99 | 0.98 | 1.00 |
# | at $d = 128$ the scores of a tile's halves one after the other | – | 0.99 | – |
# | row sums in two chains | 0.99 | 1.00 | 1.00 |
# | indices formed again for the epilogue, so that no register keeps them | 0.98 | 0.95 | 0.99 |
#
# A gain was expected of *a*: the copies leave earlier, and rounding overlaps with products. At $d = 128$ it came only together with *b*. *c* adds 2 % at $d = 64$ and costs 1 % at 128, though `nvcc` forms the address behind the barrier all the same. Most of these differences come from the order that the compiler finds: of 34 drafts with two changes each, two were at least 1 % faster at $d = 128$. There *a, b and c* gain nothing at $N = 4096$ and 2 % at 16384.
#
# **Another order of the exponentials.** The rung writes one row's exponentials and their sum before it begins the next row. Tried later: column by column. The first columns of $S$ are ready before the last ones, and the sums of a lane's four rows run side by side, so that no addition waits for the one before it. Predicted: up to 3 % faster, as such waits take 3 % of the time. Time of the rung over the draft's, lowest and highest of $N$ = 1024 and 8192 on random numbers and *Q × 2* (fp16, an H200, without a record):
#
# | draft | $d = 64$ | $d = 128$ |
# |---|--:|--:|
# | column by column, both of a row's numbers together | 0.95 to 0.99 | 1.00 |
# | column by column, one number of each row in turn | 0.96 to 0.98 | 0.97 to 0.99 |
# | row by row, all exponentials first, then all sums | 1.00 | 0.98 to 1.00 |
#
# None is faster, and none stayed.
#
# **Turns.** The tensor cores rest for a third of the time, in part because both warps of a scheduler may form exponentials at once. Tried later: one CTA of eight warps, $B_r = 256$, three stages (four at $d = 64$). Two groups of four warps multiply in turn, at named barriers: a group waits for its turn before the products of $O$ and passes it on within those of the next $S$. The barriers take the place of `__syncthreads()`. Predicted: 10 % faster. Time of the rung over the draft's, on random numbers and *Q × 4* (fp16, an H200, two runs, without a record):
#
# | turn passed on | $N$ | $d = 64$ | $d = 128$ |
# |---|--:|--:|--:|
# | half-way through $S$ | 512 | 0.95 to 0.96 | 0.96 to 0.97 |
# | | 1024 | 0.99 to 1.00 | 0.99 to 1.00 |
# | | 4096, 16384 | 0.98 to 1.05 | 1.00 to 1.05 |
# | after $S$ | 1024 to 16384 | 0.88 to 1.00 | 0.94 to 1.01 |
#
# One warp alone can't keep the tensor cores busy, as it waits for `ldmatrix`; so the turns must overlap. And no second CTA computes while the first one starts or writes $O$, which short inputs feel. It did not stay. [32](32_ping_pong.ipynb) takes turns where the operands need no `ldmatrix`, and one CTA goes on to the next tile.
#
# ## What the card can do
#
# From the conditions of the same record:

# %%
for name in ("ceilings", "counters"):
    print(f"{name}: {notes[name]}")

# %% [markdown]
# ## Every tile shape
#
# Milliseconds in fp16 at three lengths, of all shapes that were timed.

# %%
tiles = record.load("13_tuned", "tiles").query("dtype == 'fp16'")
ms = tiles.groupby(["D", *tune.COLUMNS, "Nk"])["ms"].median().unstack("Nk")
with pd.option_context("display.max_rows", None):
    display(ms.sort_values(["D", 4096]).round(3))
