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
# [← 12 · Double-buffered](12_double_buffered.ipynb) | [13_tuned.cu](../kernels/13_tuned.cu) | [glossary](glossary.md) | [20 · Causal masks and grouped heads →](20_causal_gqa.ipynb)
#
# **After this notebook you can**
# - draw up a kernel's budget: how long each unit of an SM is busy with a tile, and which one is the longest;
# - take a fast kernel further in steps of one idea each, and predict from the budget which step pays;
# - do without the row maximum, and say when the result is as accurate as with it;
# - choose tile shapes by measurement, and know what such a choice is worth on another card.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [12 · Double-buffered](12_double_buffered.ipynb). No GPU: without one the kernels run on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: the tensor cores wait for shared memory, for the softmax and for addresses; give each of these less to do.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd
import torch

from helpers import blank, check, draw_mma, exercise, hint, load, plot, predict, progress, record, reference
from helpers import rung, sass, show, stages, tune, units, xray

torch.manual_seed(0)
kernel = load("13_tuned")
device = kernel.device

# %% [markdown]
# ## The problem
#
# `12_double_buffered` reaches 0.93<!--= ratio("12", "FLASH", 64):.2f --> of FlashAttention-2's speed at $d = 64$ and 0.88<!--= ratio("12", "FLASH", 128):.2f --> at $d = 128$, and no single waste stands out any more. So draw up a **budget**. Four units of an SM work side by side, each at a rate of its own:
#
# | unit | does | PTX | machine code (SASS) | rate of an SM |
# |---|---|---|---|---|
# | shared memory | reads fragments, takes in copies | `ldmatrix`, `cp.async` | `LDSM`, `LDGSTS` | 1 wavefront per clock |
# | tensor cores | products | `mma.sync` | `HMMA` | 1 per 1.67 clocks, measured |
# | issue slots | start every instruction | all | all | 4 per clock |
# | [MUFU](glossary.md#mufu), the special function units | exponentials | `ex2.approx` | `MUFU.EX2` | 1 per 2 clocks |
#
# A rate is per instruction of a whole warp. The tensor cores' rate is that of a kernel that does nothing but `mma.sync`, its operands in registers: 641 TFLOP/s on the recorded H200 (`13_tuned.steps`).
#
# The budget of rung 12, for 32 query rows and 64 keys at $d = 128$. Which unit is busy longest, and for how many clocks? Count for one warp of 16 rows and double it: two products of $16 \times 64 \times 128$ in instructions of $16 \times 8 \times 16$; an `ldmatrix.x4` (four wavefronts) for every two of them; and a quarter of the copies of K and V.

# %%
longest = ...  # your prediction: "shared memory", "tensor cores", "issue slots" or "MUFU"
clocks = ...  # your prediction: for how many clocks

# %% tags=["reveal", "raises-exception"]
before = units.table(["12_double_buffered"], D=128, beside="13")
predict(longest, before.drop(columns="took").iloc[0].idxmax(), "is the longest")
predict(clocks, before.drop(columns="took").iloc[0].max(), "clocks")
title = "32 query rows × 64 keys, d = 128 · counted; took: NVIDIA H200"
units.draw(before, title)

# %% [markdown]
# **What to see.** Shared memory is busy half as long again as the tensor cores. The kernel took longer than its longest unit, and less than the sum of all four: the warps of an SM overlap these units, but not perfectly. A step can pay in two ways: it shortens the longest bar, or it shortens what a warp does one thing after the other.
#
# The wavefronts are counted by the X-ray, the instructions in nvcc's code for `sm_90a`: those of the tile loop that a whole tile runs through (`helpers/lessons/units.py`).

# %% [markdown]
# ## The way in six files
#
# From 12 to 13 there are five kernels in `kernels/stages/`, each one idea further than the one before.

# %%
chain = ["12_double_buffered", *(stage.stem for stage in stages("13")), "13_tuned"]
ideas = [*(stage.title for stage in stages("13")), "K and V backwards, copies before rounding, tile shapes"]
new = [show.changed(before, after) for before, after in zip(chain, chain[1:])]
pd.DataFrame({"idea": ideas, "new lines": new}, index=chain[1:]).style.set_properties(**{"text-align": "left"})

# %% [markdown]
# ## 1 · Cheap addresses
#
# Shared memory is addressed with 32 bits. A C++ pointer has 64, and the compiler carries both halves. `13_1_addresses` forms a 32-bit address once per lane and moves it in two ways only:
#
# - **A step along $d$ is one XOR.** In a swizzled tile, the chunk $2k$ places further right lies at byte `place ^ 32 k` (a chunk has 16). A lane begins at chunk 0 or 1, so adding $2k$ to its chunk's number only sets other bits. So does an XOR, and XORs may be done in any order. (From $k = 4$ on 128 is added: the row's other half.)
# - **A step of 16 rows down is a constant**, and stands inside the instruction that reads.

# %%
show.region("13_1", "swizzle")

# %%
show.region("13_1", "fragments")

# %% [markdown]
# The machine code shows it. Here are the loops of 12 and of 13_1 around their first reads of K:

# %% tags=["raises-exception"]
for stem in ("12_double_buffered", "13_1_addresses"):
    lines = sass.loop_lines(stem, 64)
    first = next(i for i, (_, opcode, _) in enumerate(lines) if opcode.startswith("LDSM"))
    print(
        stem, *(f"    {opcode:16}{operands.strip()}" for _, opcode, operands in lines[first + 1 : first + 12]), sep="\n"
    )

# %% [markdown]
# **What to see.** In 12 an `LDSM` is surrounded by `LOP3` (the XOR), `IMAD` and `LEA` (multiply and add): most addresses are formed anew. In 13_1 one register serves several reads, with constants: `+0x800`, `+0x1000`, `+0x1800`.
#
# Which unit of the budget gets less to do, and is it the busiest? (The table in section 2 answers.)

# %% [markdown]
# ## 2 · Two strips of rows for each fragment
#
# Give a warp 32 query rows instead of 16, two strips, and so a CTA 128. Every fragment of K or V that `ldmatrix` brings then serves *two* `mma`. `mma_m32n8k16` (`fa/rows32.cuh`) is two `mma.sync` that share the operand B:

# %%
show.region("13_2", "scores")

# %% [markdown]
# The price is registers. A thread has 255:

# %%
registers = pd.DataFrame(index=["16 rows", "32 rows"])
for d in (64, 128):
    registers[f"S and O, d = {d}"] = [rows * (64 + d) // 32 for rows in (16, 32)]
    registers[f"Q, d = {d}"] = [rows * d // 64 for rows in (16, 32)]
registers

# %% [markdown]
# At $d = 128$, $S$ and $O$ take 192 registers, and the fragments of $Q$ do not fit beside them. So $Q$ stays in shared memory (`Q_steps` is 0) and its fragments are read again for every tile: 16 `ldmatrix` more, beside 64 for K and V. The cheap addresses of section 1 help here as well: they need fewer registers. To save registers, the next copies start only after the softmax.
#
# How many wavefronts does `13_2_rows` need for 32 rows and 64 keys, where 12 needs 640?

# %%
wavefronts = ...  # your prediction: wavefronts of 13_2 for 32 query rows and 64 keys at d = 128

# %% tags=["reveal", "raises-exception"]
three = units.table(chain[:3], D=128, beside="13")
predict(wavefronts, three.loc["13_2_rows", "shared memory"], "wavefronts")
three.drop(columns="took").round(0).astype(int)

# %% [markdown]
# From here on the tensor cores are the unit that is busy longest. The steps that follow shorten what the warps do besides.

# %% [markdown]
# ## 3 · The scale goes into the exponent
#
# Each element of $S$ is multiplied by the scale, takes part in the maximum, has $m$ subtracted, becomes an exponential, and is added to the row sum. Two of the five can be merged: with $c = \text{scale} \cdot \log_2 e$,
#
# $$ P = 2^{\,c\,s - m} , $$
#
# and $c\,s - m$ is one instruction, a fused multiply-add (FMA). The maximum is sought among the raw scores and multiplied by $c$ once per row. That needs $c > 0$; for a negative scale `13_3_fma` changes the sign of Q before the loop. (From `13_4` on a maximum is sought so rarely that its scores are multiplied by $c$ again, and $c$ may have either sign.)

# %%
show.diff("13_2", "13_3")

# %% [markdown]
# ## 4 · A softmax without a maximum
#
# What is the maximum for? Notebook 02: for *any* number $m$,
#
# $$ o = \frac{\sum_j 2^{\,c s_j - m} v_j}{\sum_j 2^{\,c s_j - m}} , $$
#
# because $2^{-m}$ cancels. The maximum keeps the terms from overflowing, and the largest from vanishing. Any $m$ near enough to it will do. FlashAttention-4 [rescales](glossary.md#rescaling) $O$ only where the maximum has risen by more than a threshold. Here it isn't even looked for.
#
# **Form $P$ with the $m$ of earlier tiles and see how the row sums come out.** If they stay below a bound in all rows of the warp, all is well: no maximum, no shuffle, no rescaling.
# If not, the maximum has to rise, and $P$ tells by how much: the largest $P$ of a row is $2^{\,\max(c s) - m}$. Add its $\log_2$ to $m$, and divide by it what was formed with the old $m$: $P$, which is still fp32 and loses nothing, its sum, $l$ and $O$.
#
# **Which bound?** fp16 ends at 65504, so up to 32768 no $P$ overflows. Yet digits are lost earlier. Rounding $P$ to 16 bits costs the same share of it at any size, except that *$P = 1$ is exact*. With the true maximum, the key with the largest score of a row has $P = 1$; if it takes most of the row's weight, most of the sum is exact. With a stale maximum its $P$ is rounded like any other.
# The next cells, in bf16, bound the sum that a lane forms over its 16 of the tile's 64 columns: by one number until it is first exceeded, and by another from *then* on, since a warp that met one large key is likely to meet more.


# %%
def attend(rows, v, bound, then):
    """O of the 32 rows of a warp, from scores (32, keys) in log2 units, P in bf16; the share of tiles whose maximum was sought."""
    m, l, o, sought = torch.full((32, 1), -torch.inf), 0.0, 0.0, 0
    for j0 in range(0, len(v), 64):
        s, v_j, alpha = rows[:, j0 : j0 + 64], v[j0 : j0 + 64], 1.0
        sums = torch.exp2(s - m).unflatten(1, (-1, 4, 2)).sum((1, 3))
        if (sums > bound).any():
            bound = then if j0 else bound
            m_old, m = m, torch.maximum(m, s.amax(1, keepdim=True))
            alpha, sought = torch.exp2(m_old - m), sought + 1
        P = torch.exp2(s - m)
        l, o = alpha * l + P.sum(1, keepdim=True), alpha * o + P.bfloat16().float() @ v_j
    return (o / l).bfloat16(), 64 * sought / len(v)


# %%
def tried(factor):
    """Error beside that of the true maximum, and how often it was sought, for inputs whose Q is `factor` times as large."""
    q, k, v = factor * torch.randn(256, 64), torch.randn(4096, 64), torch.randn(4096, 64)
    exact = torch.softmax(q.double() @ k.double().T / 8, 1) @ v.double()
    found = []
    for pair in [(0, 0), *bounds]:
        warps = [attend(rows, v, *pair) for rows in (q @ k.T / 8 * 1.4427).split(32)]
        error = (torch.cat([o for o, _ in warps]) - exact).norm().item()
        found.append((error, sum(sought for _, sought in warps) / len(warps)))
    return [(error / found[0][0], sought) for error, sought in found[1:]]


# %%
bounds = [(8, 8), (32, 32), (32, 4), (32768, 32768)]
columns = {(f"Q × {factor}", x): [row[i] for row in tried(factor)] for factor in (1, 2, 4) for i, x in enumerate(("error", "maximum sought"))}  # fmt: skip
pd.DataFrame(columns, index=pd.MultiIndex.from_tuples(bounds, names=["bound", "then"])).round(2)

# %% [markdown]
# **What to see.** With normal random scores, the sums hardly ever exceed 32, and exceed 8 in 5 % of the tiles (0.07, less 0.02 for the first of 64, whose maximum is always sought). Where scores lie further apart, a large bound costs digits: 32768 makes the error up to a third larger, 32 a seventh. So the kernel begins with 32, and goes on with 4 once a sum was larger: the error grows by about 5 %, and most tiles still need no maximum.
#
# Only where a lane's sum reaches $10^{30}$, about $2^{100}$, does $P$ tell nothing: it is infinite, or nearly. Then the warp multiplies $Q K^\top$ again and *tracks*: it forms the maximum first, as rung 12 does, from then on.
#
# Stage `13_4` has one bound, 32, past which it forms $S$ again and tracks. `13_5` reads the maximum from $P$.

# %%
show.region("13_4", "tile_loop")

# %% [markdown]
# `probabilities` (shown below) ends in a vote of the warp, `__all_sync`: all lanes take one branch. If one of the 32 rows exceeds the bound, the maximum is sought for all, so a row's last bits depend on the other rows of its warp. Either way the error is within its budget.

# %% [markdown]
# ## The kernel
#
# Rung 13 adds three things to `13_5`. K and V are walked **backwards**: the last tile, which may be cut short, comes first, and all later ones are whole, so that the copies in the loop need no bounds checks. The **tile shapes** are constants, chosen by measurement (below). And the **order**: the copies leave before $P$ is rounded, so that rounding may overlap with products.

# %%
show.region("13_tuned", "tile")

# %%
show.region("13_tuned", "online_update")

# %%
show.region("13_tuned", "tile_loop")

# %% [markdown]
# ## Run and check
#
# Among the cases are those made to defeat a stale maximum: scores that rise along the keys, that fall, that lie around $\pm 10^4$, one-hot rows.

# %%
for stem in chain[1:]:
    print(str(check(kernel if stem == "13_tuned" else load(stem, quiet=True))).splitlines()[0])

# %% [markdown]
# ## Predict, then measure
#
# ### The budget, step by step
#
# With random inputs, nearly every tile runs only the part of 13's loop that has no maximum. Rung 12 issues 5.0 instructions per `HMMA`. How many does 13 issue?

# %%
per_product = ...  # your prediction: instructions per HMMA that a whole tile issues in rung 13, at d = 128

# %% tags=["reveal", "raises-exception"]
products = {stem: sum(opcode.startswith("HMMA") for _, opcode, _ in units.usual_path(stem)) for stem in chain}
issued = {stem: len(units.usual_path(stem)) / products[stem] for stem in chain}
predict(per_product, issued["13_tuned"], "instructions per HMMA in 13")
budget = units.table(chain, D=128, beside="13")
budget.drop(columns="took").round(0).astype(int).assign(**{"instructions per HMMA": pd.Series(issued).round(2)})

# %% tags=["raises-exception"]
units.draw(budget.loc[["12_double_buffered", "13_2_rows", "13_tuned"]], title)

# %% [markdown]
# **What to see.** One step, the rows, moved the longest bar from shared memory to the tensor cores. All together cut the issue slots from 320 clocks to 170. Even so 13 takes 1.5<!--= 4 * 32 * 64 * 128 * 132 * 1.98e-3 / tflops("13", 128, kind="stages") / 427.5:.1f --> times as long as its longest unit. (Counted at 1.98 GHz; at full load the clock is lower, notebook 32.) A warp does its products and its softmax one after the other, and each of the SM's four schedulers has only two warps to choose from: often neither is ready.
#
# What do they wait for? At every clock a warp issues an instruction or has a reason why not, and Nsight Compute counts [the reasons](https://docs.nvidia.com/nsight-compute/ProfilingGuide/index.html). Divided by the number of instructions, they add up to the time between two instructions of a warp. In rung 10 it is 81<!--= 100 * stalled("10", 128, "short_scoreboard", "mio_throttle"):.0f --> % waits for shared memory or MUFU (short scoreboard, MIO throttle). If the budget is right, how much is it in 13?

# %%
percent = (
    ...
)  # your prediction: for what percentage of the time between two instructions a warp of 13 waits for these two

# %% tags=["reveal"]
shared = ["short_scoreboard", "mio_throttle"]
waits = 100 * record.stalled(record.load("13_tuned", "stalls"), 128, *shared)
predict(percent, waits, "percent for shared memory or MUFU")
units.stalls(["10_fa2_mma_fp16", "11_swizzled", "12_double_buffered", "13_tuned"], D=128)

# %% [markdown]
# **What to see.** These waits shrink: 81<!--= 100 * stalled("10", 128, "short_scoreboard", "mio_throttle"):.0f -->, 29<!--= 100 * stalled("11", 128, "short_scoreboard", "mio_throttle"):.0f -->, 14<!--= 100 * stalled("12", 128, "short_scoreboard", "mio_throttle"):.0f -->, 10<!--= 100 * stalled("13", 128, "short_scoreboard", "mio_throttle"):.0f --> %. Those for tensor cores (math pipe throttle) grow from 0 to 12<!--= 100 * stalled("13", 128, "math_pipe_throttle"):.0f --> %. But the largest part of 13's time, 43<!--= 100 * stalled("13", 128, "wait"):.0f --> %, is not in the budget: a *fixed latency*, a few clocks until the warp's next instruction may follow. Other warps could fill them; a scheduler has one other. (A bar is time per instruction; 12 issues twice as many.)

# %% [markdown]
# ### The X-ray
#
# The X-ray counts what was executed. At $d = 64$, Q stays in registers. `ldmatrix` takes 16896 wavefronts in rung 12, of which 512 read Q. And in 13?

# %%
reads = ...  # your prediction: wavefronts of ldmatrix in rung 13

# %% tags=["reveal"]
q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
rays = {name: xray(name, q, k, v).total(space="shared", op="ldmatrix") for name in chain}
predict(reads, rays["13_tuned"].cost, "wavefronts")
pd.DataFrame(rays.values(), index=rays.keys())

# %% [markdown]
# ### The time of each stage
#
# All stages, side by side in one process (12 is faster here than in its record). At $d = 128$ rows shortened the longest bar by a factor of 1.5, 640 clocks to 428; dropping the maximum doesn't shorten it. What does that step bring at $d = 64$?

# %%
no_maximum = ...  # your prediction: times as fast as 13_3_fma is 13_4_no_maximum at d = 64

# %% tags=["reveal"]
samples = record.load("13_tuned", "stages").query("dtype == 'fp16'")
found = [record.summary(samples, stem, "SDPA FLASH").assign(label=stem) for stem in chain]
staged = pd.concat(found).rename(columns={"mean": "ratio"}).assign(kept=True)
at64 = staged[staged["D"] == 64].set_index("label")["ratio"]
predict(no_maximum, at64["13_4_no_maximum"] / at64["13_3_fma"], "times as fast, d = 64", within=0.03)
text = "; ".join(f"{r.label} at D = {r.D}: {r.ratio:.2f}" for r in staged.itertuples())
title = f"From 12 to 13, fp16, geometric mean over N ≥ 1024 · {samples['device'].iloc[0]}"
draw_mma.dots(staged, title, "times as fast as SDPA FLASH", text)

# %% [markdown]
# **What to see.** Each row over the one above ($d = 64$, then 128):
#
# - *Addresses* pay 1.03<!--= stage("13", "13_1", "12", 64):.2f --> and 1.05<!--= stage("13", "13_1", "12", 128):.2f --> times: fewer issue slots, same longest bar.
# - *Rows* pay 1.13<!--= stage("13", "13_2", "13_1", 128):.2f --> times at $d = 128$, less than 1.5: the time beyond its longest bar grew. At $d = 64$ it is 1.01<!--= stage("13", "13_2", "13_1", 64):.2f -->; there the registers cost a CTA: eight warps per SM, not twelve.
# - *The FMA* pays 1.08<!--= stage("13", "13_3", "13_2", 64):.2f --> times at $d = 64$, where each product has twice as much softmax beside it, and 1.01<!--= stage("13", "13_3", "13_2", 128):.2f --> at 128. *No maximum* pays 1.11<!--= stage("13", "13_4", "13_3", 64):.2f --> at both. Both shorten what a warp does one after the other.
# - *The maximum from $P$* is for inputs whose keys stand out. With random ones it is 1.00<!--= stage("13", "13_5", "13_4", 64):.2f --> and 0.97<!--= stage("13", "13_5", "13_4", 128):.2f --> times as fast.
# - *The last step* (backwards, order, tile shapes) brings 1.07<!--= stage("13", "13", "13_5", 64):.2f --> and 1.05<!--= stage("13", "13", "13_5", 128):.2f -->.
#
# ### What was tried on the way
#
# The kernel was not found in this order. Of the 27 drafts in [19_log](19_log.ipynb), timed in another session (rung 12 in a third), here are those that it was made of and some that teach something, marked "did not stay".

# %%
tried_on_the_way = units.drafts([1, 2, 3, 4, 5, 6, 8, 20, 25])
text = "; ".join(f"{r.label}, D = {r.D}: {r.ratio:.2f}" for r in tried_on_the_way.itertuples())
device_name = record.about("13_tuned", "steps")["device"]
title = f"Drafts of 13, fp16, geometric mean of N = 1024, 4096, 16384 · {device_name}"
draw_mma.dots(tried_on_the_way, title, "times as fast as SDPA FLASH", text)

# %% [markdown]
# **What to see.**
#
# - Three ways to save the maximum's work. To rescale only where some row of the warp has a new maximum (2) *loses* at $d = 64$: of 32 maxima one often rises. To tolerate a stale maximum (3) pays, and not to look for one (4) pays again.
# - Draft 8 became the rung, though others were faster: it can be read, and compiles fast. (Rounding after the check, and its last gains, came later.) Draft 20 runs the softmax of one tile beside another's products: faster at $d = 64$, but at $d = 128$ registers allow only 32 keys.

# %% [markdown]
# ## Tile shapes by measurement
#
# Warps per CTA, keys per tile, stages, CTAs per SM, and how much of Q stays in registers: no formula predicts the best of these five numbers, so they are measured: `python -m helpers record tiles 13_tuned` times a grid of shapes at three lengths and records the result. The loader then compiles the rung with the winners for the GPU at hand.

# %%
tiles = record.load("13_tuned", "tiles").query("dtype == 'fp16'")
ms = tiles.groupby(["D", *tune.COLUMNS, "Nk"])["ms"].median().unstack("Nk").dropna()  # a row per shape
ms["geometric mean"] = ms.prod(axis=1) ** (1 / 3)
ms["slower than the best"] = ms["geometric mean"] / ms.groupby("D")["geometric mean"].transform("min") - 1
ms.sort_values(["D", "geometric mean"]).groupby("D").head(3).round(3)

# %% [markdown]
# The three best shapes for each $d$, in milliseconds at three lengths; at $d = 64$ within 4 % of each other. At $d = 128$ with 64 keys, shared memory has no room for a third stage at two CTAs per SM.

# %% [markdown]
# ## Beside its peers
#
# Is it faster than FlashAttention-2 at every length?

# %%
samples = record.load("13_tuned")
plot.ratio(samples, "13_tuned", ["SDPA FLASH", "SDPA CUDNN"])

# %% [markdown]
# **What to see.** Past SDPA FLASH at every length (medians of the rounds; whiskers: lowest and highest), on average 1.30<!--= ratio("13", "FLASH", 64):.2f --> times as fast at $d = 64$ and 1.22<!--= ratio("13", "FLASH", 128):.2f --> at $d = 128$; cuDNN is ahead of both.
#
# ### The price, by family
#
# Random inputs suit this kernel. The other [families](glossary.md#family) of inputs, from $Q$ two to eight times as large to heads of trained models, are described in [data/README.md](../data/README.md#families-of-inputs).

# %%
three = ["13_tuned", "12_double_buffered", "SDPA FLASH"]
draw = lambda samples: plot.families(samples, three)  # noqa: E731
plot.recorded("13_tuned", "families", draw)

# %% [markdown]
# **What to see.** With a sink (key 0 leads every row) the bound holds until the last tile; when scores grow along the keys, the first tile visited, the last in memory, has the maximum. For nearly all other families some tiles exceed the bound, and $P$ is divided. With "one key" (each row has a leading key of its own) the kernel is (mean over lengths and dtypes) 1.14<!--= family("13", "12_double_buffered", "one key", 64):.2f --> times as fast as rung 12 at $d = 64$ and 1.24<!--= family("13", "12_double_buffered", "one key", 128):.2f --> at $d = 128$. Over SDPA FLASH it is 1.10<!--= family("13", "FLASH", "one key", 64):.2f --> and 1.10<!--= family("13", "FLASH", "one key", 128):.2f -->. On the heads of rxnmapper (512 keys, 8 tiles) it is 1.13<!--= family("13", "12_double_buffered", "heads of rxnmapper", 64):.2f --> and 1.20<!--= family("13", "12_double_buffered", "heads of rxnmapper", 128):.2f --> times as fast as rung 12, and 1.10<!--= family("13", "FLASH", "heads of rxnmapper", 64):.2f --> and 1.07<!--= family("13", "FLASH", "heads of rxnmapper", 128):.2f --> times as fast as SDPA FLASH.

# %% [markdown]
# ## What still hurts

# %%
best = record.headline(record.medians(samples)).query("name == '13_tuned'").groupby(["dtype", "D"]).tflops.max()
pd.DataFrame({"TFLOP/s": best.round(0), "share of mma.sync alone": (best / units.MMA_SYNC).round(2)})

# %% [markdown]
# Two limits are left that tuning does not remove.
#
# 1. **`mma.sync` itself.** It was made for Ampere. Alone, with no softmax beside it, it reaches 641 TFLOP/s; cuDNN's attention does 646<!--= tflops("13", 128, of="CUDNN"):.0f --> at $d = 128$, $N = 4096$. Only [`wgmma`](glossary.md#wgmma), which reads its operands from shared memory by itself, uses Hopper's tensor cores at their full rate: notebook 30.
# 2. **One thing at a time.** A warp multiplies, or it computes exponentials. Other warps of the SM fill the gaps, if they happen to be at another point of the loop. Notebooks 31 and 32 arrange for that instead of hoping for it.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a part of the kernel. Type it into the `%%region` cell, below the form: the cell compiles the rung with your text in place of its own, checks all cases, X-rays it and, on a GPU, times it beside the rung. `from helpers import tasks; tasks("13")` lists all tasks; `python -m helpers exercise new 13 online_update` writes a file for your editor.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 13.3 · Addresses by XOR
#
# Write `at` in bytes, and `right`, the step along a row. Judged: right in all cases, no finding, no more bank conflicts than the rung has.

# %%
blank("13", "swizzle")

# %% tags=["active-ipynb"]
# %%region 13 swizzle -> my_swizzle
# // type here

# %%
hint("13.3")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `swizzle` of [13_tuned.cu](../kernels/13_tuned.cu), as in `13_1_addresses`, section 1.
#
# </details>

# %% [markdown]
# ### Task 13.2 · The softmax without a maximum
#
# Write `probabilities`, which forms $P$ with the maximum there is and says whether its sums are within the bound; `raise_maximum`, from $S$; `raise_maximum_by_P`; and `round_P`. It teaches sections 3 and 4. Judged case by case, the easy ones first, rising scores late.

# %%
blank("13", "online_update")

# %% tags=["active-ipynb"]
# %%region 13 online_update -> my_online_update
# // type here

# %%
hint("13.2")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `online_update` of [13_tuned.cu](../kernels/13_tuned.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Exercise 13.4 · How stale may it be?
#
# A colleague wants a bound of $2^{20}$, to seek the maximum less often: fp32 holds such sums easily. Give a (1, 1, 64, 64) `q` and (1, 1, 128, 64) `k` for which that kernel is *wrong* in fp16, with finite inputs. And which largest power of two, `safe`, bounds the sums so that no $P$ overflows?

# %%
stale = {
    n: load(source=rung("13_tuned").replace("row_sum[r] <= largest_sum", f"row_sum[r] <= {2**n}.f"), quiet=True)
    for n in (15, 20)
}

# %%
# Exercise 13.4
q_mine, k_mine = torch.randn(1, 1, 64, 64), torch.randn(1, 1, 128, 64)
safe = 2**20


# %%
def overflows():
    case = reference.Case("yours", *(t.to(device).half() for t in (q_mine, k_mine, torch.randn(1, 1, 128, 64))))
    assert case.q.isfinite().all() and case.k.isfinite().all(), "inputs have to be finite in fp16"
    assert check(kernel, [case]).ok and check(stale[15], [case]).ok, "with a bound of 32 or 32768 it is wrong, too"
    assert not check(stale[20], [case]).ok, "with a bound of 2**20 it is right"
    assert safe == 2**15, f"q and k are right; {safe!r} isn't the largest bound (a number, not an exponent or text)"
    return True


exercise.verify("13.4", overflows)

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
# The score of key 0 is $8 \cdot 12.5 / 8 \cdot \log_2 e = 18$ above the others: $P = 2^{18}$ is infinite in fp16, and below $2^{20}$. With $2^{15}$ such a $P$ is divided by its largest before it is rounded; digits are lost with that bound, too (section 4).
#
# </details>

# %% [markdown]
# ### Exercise 13.5 · Registers before building
#
# Predict for $d = 128$: how many registers per thread do the *arrays* take that the tile loop works on, if `Q_steps` is 0, for $B_c = 64$ and for $B_c = 32$? Count `S_reg`, `P_reg`, `O_reg`, `m_reg`, `l_reg`, `row_sum` and one step of `Q_reg`. Then, `P_reg` is formed while `S_reg` dies: what is the least the compiler needs for the two together?

# %%
# Exercise 13.5
arrays = {64: None, 32: None}  # registers for all of them at once
S_and_P_at_least = {64: None, 32: None}


# %%
def counted():
    assert isinstance(arrays, dict) and isinstance(S_and_P_at_least, dict), "give two dicts: Bc -> registers"
    for Bc in (64, 32):
        S, P, O, rest = Bc // 8 * 8, Bc // 16 * 8, 128 // 8 * 8, 3 * 4 + 8
        assert arrays[Bc] == S + P + O + rest, f"arrays: not {arrays[Bc]} at Bc = {Bc}"
        assert S_and_P_at_least[Bc] == S, f"S_and_P_at_least: not {S_and_P_at_least[Bc]} at Bc = {Bc}"
    return True


exercise.verify("13.5", counted)

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
# ### Task 13.9 · The whole kernel
#
# Write kernel and launcher from the [header block](../kernels/13_tuned.cu); a stage such as [13_2_rows.cu](../kernels/stages/13_2_rows.cu) is a good start. Judged: right, no finding. On a GPU its time stands beside the rung's: beat it.

# %%
blank("13", "kernel")

# %% tags=["active-ipynb"]
# %%region 13 kernel -> my_kernel
# // type here

# %%
hint("13.9")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: [13_tuned.cu](../kernels/13_tuned.cu) behind its header block. Another design that is right and free of findings solves the task just as well.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
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
# Row sums pass the bound. The largest $P$ of each row says how far the maximum has risen: it is added to m as a $\log_2$, and P, l and O are divided by it. The bound is smaller from then on: nearly as accurate as with the true maximum, but slower.
#
# </details>
# <details><summary>4. What does it mean that tile shapes were measured on an H200?</summary>
#
# That they are best there, among those tried. On another GPU they are a starting point; `python -m helpers record tiles` measures again.
#
# </details>
# <details><summary>5. Which step of this notebook would lose its gain on a card whose shared memory were twice as fast?</summary>
#
# The 32 rows per warp: they shorten the shared memory's bar, which would no longer be the longest. Addresses and softmax would pay as before.
#
# </details>
