# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 02 · Online softmax
#
# [← 01 · Naive attention, three kernels](01_naive.ipynb) | [02_online_softmax.cu](../kernels/02_online_softmax.cu) | [glossary](glossary.md) | [03 · FlashAttention-1 in fp32 →](03_fa1_fp32.ipynb)
#
# **After this notebook you can**
# - explain how a softmax is computed without knowing the whole row, and prove that the order of the parts does not matter;
# - do: write the merge of two partial results, in numpy and in a kernel, with the empty part handled;
# - judge a memory-bound kernel: say what time its bytes must take, and how close to that it comes.
#
# **Time** 60 minutes.
#
# **Needs** [01 · Naive attention](01_naive.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: the pair $(m, l)$ of a running maximum and a rescaled sum describes any part of a row, and two such pairs merge into one.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
from itertools import permutations

import numpy as np
import pandas as pd
import torch
from IPython.display import display

from helpers import check, load, record, reference, rung, sass, traffic, xray
from helpers import bench, blank, draw, exercise, hint, plot, predict, progress, show

kernel = load("02_online_softmax")
device = kernel.device

# %% [markdown]
# ## The problem
#
# [01](01_naive.ipynb) turned a row of scores $s_1 \dots s_N$ into probabilities with three passes: one for the maximum, one for the sum, one to write the result. Each pass reads the whole row. Worse for what comes later: nothing can be written before the last score has been seen, so a kernel that wants to use a *part* of the row has to wait for all of it.
#
# Why is there a maximum at all? The definition $p_j = e^{s_j} / \sum_{j'} e^{s_{j'}}$ has none. Try it.

# %%
s = torch.tensor([12.0, 11.0, 10.0])
for x in (s.half(), s, s + 100):
    print(f"{str(x.dtype):<14} s = {x.tolist()}: exp(s) / sum(exp(s)) = {(x.exp() / x.exp().sum()).numpy().round(4)}")
print(f"expected in each case: {torch.softmax(s.double(), 0).numpy().round(4)}")

# %% [markdown]
# The exponential leaves the range of its number format: `inf / inf` is NaN (not a number). Adding 100 to every score changes no probability, and still destroys the result. The range in which $e^x$ is neither 0 nor infinity:

# %%
formats = {}
for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}.items():
    f = torch.finfo(dtype)
    formats[name] = (np.log(f.tiny) + np.log(f.eps / 2), np.log(f.max))  # half the smallest number, the largest
draw.exp_ranges(formats)

# %% [markdown]
# *Each bar:* the $x$ for which the format can hold $e^x$. Scores of attention are dot products of $d$ terms; they pass 11 easily, and nothing keeps them below 88.
#
# ### The safe softmax
#
# Multiply numerator and denominator by $e^{-m}$ with $m = \max_j s_j$:
#
# $$ p_j = \frac{e^{s_j}}{\sum_{j'} e^{s_{j'}}} = \frac{e^{s_j - m}}{\sum_{j'} e^{s_{j'} - m}} = \frac{e^{s_j - m}}{l}, \qquad l = \sum_j e^{s_j - m}. $$
#
# Every exponent is at most 0, so no term exceeds 1; the largest *is* 1, so $1 \le l \le N$. Overflow is gone, and what underflows to 0 was too small to matter. The price is the pass for $m$: $l$ needs $m$, and $m$ needs the whole row.
#
# ### The online softmax
#
# Let $m_k$ and $l_k$ be maximum and sum over the first $k$ scores, $l_k = \sum_{j \le k} e^{s_j - m_k}$. Score $k+1$ arrives. The new maximum is $m_{k+1} = \max(m_k, s_{k+1})$, and
#
# $$ \begin{aligned}
#    l_{k+1} &= \sum_{j \le k+1} e^{s_j - m_{k+1}}
#             = \sum_{j \le k} e^{s_j - m_{k+1}} + e^{s_{k+1} - m_{k+1}} \\
#            &= \sum_{j \le k} e^{s_j - m_k}\, e^{m_k - m_{k+1}} + e^{s_{k+1} - m_{k+1}}
#             = \boxed{\,l_k\, e^{m_k - m_{k+1}} + e^{s_{k+1} - m_{k+1}}\,}
#    \end{aligned} $$
#
# because $e^{m_k - m_{k+1}}$ is the same for every $j$ and comes out of the sum. So the old sum needs no second look at the old scores: one factor corrects it. Start from $m_0 = -\infty$, $l_0 = 0$: the first factor is $e^{-\infty} = 0$. This is Algorithm 3 of [Milakov and Gimelshein, 2018](https://arxiv.org/abs/1805.02867). In numpy:


# %%
def online_softmax(s):
    m, l = -np.inf, 0.0
    for x in s:
        m_new = max(m, x)
        l = l * np.exp(m - m_new) + np.exp(x - m_new)
        m = m_new
    return np.exp(s - m) / l, m + np.log(l)  # P, LSE


row = np.random.default_rng(0).normal(size=1000) * 3 + 500
P, lse = reference.softmax(torch.tensor(row))
p, own_lse = online_softmax(row)
print(f"largest |P - reference| = {abs(p - P.numpy()).max():.1e}, |LSE - reference| = {abs(own_lse - lse.item()):.1e}")

# %%
draw.running_state([1.0, 0.2, 2.1, 1.4, 0.5, 3.0, 2.6, 1.8])

# %% [markdown]
# *Above:* the scores as they arrive, and the running maximum. *Below:* $l_k$ after each step as a stack, one layer per score, the newest hatched. At steps 3 and 6 a new maximum arrives: every layer that was there shrinks by the same factor $e^{m_{k-1} - m_k}$, and the new score enters with height 1. At the other steps the stack only grows.
#
# The last line of the function still goes over the row once more, to write $P$. Counting accesses to memory per score:
#
# | | reads | writes |
# |---|---|---|
# | by definition (overflows) | 2 | 1 |
# | safe, three passes: rung 01 | 3 | 1 |
# | online, one score at a time | 2 | 1 |
# | this rung, while the row fits on the chip | 1 | 1 |

# %% [markdown]
# ### States merge
#
# The update above takes one score. Nothing in its derivation needs that. Call $(m, l)$ the **[state](glossary.md#state)** of a set of scores. Two sets with states $(m_1, l_1)$ and $(m_2, l_2)$ together have the state
#
# $$ (m_1, l_1) \oplus (m_2, l_2) = \bigl(m,\; l_1 e^{m_1 - m} + l_2 e^{m_2 - m}\bigr), \qquad m = \max(m_1, m_2), $$
#
# by the same two lines of algebra. A single score $x$ has the state $(x, 1)$, and the online update is $\oplus\,(s_{k+1}, 1)$. The empty set has the state $(-\infty, 0)$.
#
# **Claim.** $\oplus$ is associative and commutative, and $(-\infty, 0)$ is its neutral element.
#
# **Proof.** Look at the pair $(m, L)$ with $L = l\,e^m$ instead of $(m, l)$. For finite $m$ each determines the other, and $(-\infty, 0)$ corresponds to $(-\infty, 0)$. For the merged state,
#
# $$ L = \bigl(l_1 e^{m_1 - m} + l_2 e^{m_2 - m}\bigr) e^m = l_1 e^{m_1} + l_2 e^{m_2} = L_1 + L_2 . $$
#
# So in these coordinates the merge is $(\max(m_1, m_2),\; L_1 + L_2)$: a maximum and a sum, side by side. Both are associative and commutative, so their pair is. And $\max(-\infty, m) = m$, $0 + L = L$: the empty state changes nothing. (For two empty states the formula in $m$ and $l$ has $-\infty - (-\infty)$: a program needs a guard.) $\square$
#
# ($L$ is the sum that overflows. The proof may use it, the program must not.)
#
# Consequence: **any order, any tree of merges gives the same result.** Threads may each summarise a few scores and merge pairwise; a row may be cut in pieces for several blocks; a later kernel may take keys tile by tile.

# %%
trees = {"left to right": (((0, 1), 2), 3), "in pairs": ((0, 1), (2, 3)), "another order": ((3, 1), (0, 2))}
draw.bracketings([1.0, 3.0, 2.0, 4.0], trees)

# %% [markdown]
# *Three trees over the same four scores:* the states on the way differ, the roots agree. In floating point they agree up to rounding. How much is that? A thousand random trees over 64 scores in fp32:


# %%
def merge(a, b):
    """States (m, l) of two parts -> the state of both. Works for empty parts, (-inf, 0)."""
    m = max(a[0], b[0])
    if m == -np.inf:
        return a  # both are empty; -inf - (-inf) would be NaN
    return m, a[1] * np.exp(a[0] - m) + b[1] * np.exp(b[0] - m)


def merge_in_random_order(states, rng):
    states = list(states)
    while len(states) > 1:
        a = states.pop(rng.integers(len(states)))
        b = states.pop(rng.integers(len(states)))
        states.append(merge(a, b))
    return states[0]


# %%
rng = np.random.default_rng(1)
scores = rng.normal(size=64).astype(np.float32) * 5
singles = [(x, np.float32(1)) for x in scores] + [(np.float32(-np.inf), np.float32(0))]  # and an empty one
roots = [merge_in_random_order(singles, rng) for _ in range(1000)]
m_seen, l_seen = {m for m, _ in roots}, np.array([l for _, l in roots])
exact = np.exp(scores.astype(np.float64) - scores.max()).sum()
off = abs(l_seen - exact).max() / exact / np.finfo(np.float32).eps
print(f"1000 random trees: {len(m_seen)} maximum, l off by at most {off:.1f} rounding steps (eps of fp32)")

# %% [markdown]
# ### The output merges too
#
# Attention does not want $P$; it wants $O = \sum_j p_j v_j$. Give the state a third member, the weighted sum of values so far, not yet divided: $o = \sum_j e^{s_j - m} v_j$. The same factor that corrects $l$ corrects $o$:
#
# $$ (m_1, l_1, o_1) \oplus (m_2, l_2, o_2) = \bigl(m,\; l_1 e^{m_1-m} + l_2 e^{m_2-m},\; o_1 e^{m_1-m} + o_2 e^{m_2-m}\bigr), \qquad O = o / l . $$
#
# The proof is the one above with a vector in place of $L$. That is all of FlashAttention's mathematics: go through keys and values block by block, keep $(m, l, o)$, and never hold more of $S$ than one block. The later notebooks only refer to it.

# %%
scores = [[1.0, 0.2], [2.4, 1.4], [0.5, 2.0]]  # of three blocks of two keys
values = [[[0.9, 0.2, 0.5], [0.1, 0.8, 0.3]], [[0.2, 0.9, 0.6], [0.5, 0.5, 0.9]], [[0.8, 0.1, 0.2], [0.3, 0.6, 0.7]]]
draw.rescaling(scores, values)  # d = 3

# %% [markdown]
# *From left to right,* three blocks of keys. In block 2 the maximum rises from 1 to 2.4: all three components of $o$, and $l$ with them, shrink from the dashed outline to a quarter, $e^{1 - 2.4}$, and the block's own part (hatched) comes on top. In block 3 the maximum stays: nothing shrinks. At the end $o$ is divided by $l$. In numpy, with 300 keys in blocks of 100:


# %%
def part(q, K, V):
    """(m, l, o) of some of the keys, for one query."""
    s = K @ q
    m = s.max()
    return m, np.exp(s - m).sum(), np.exp(s - m) @ V


q, K, V = rng.normal(size=64), rng.normal(size=(300, 64)), rng.normal(size=(300, 64))
m, l, o = part(q, K[:100], V[:100])
for first in (100, 200):
    m2, l2, o2 = part(q, K[first : first + 100], V[first : first + 100])
    m_new = max(m, m2)
    l, o = (x * np.exp(m - m_new) + y * np.exp(m2 - m_new) for x, y in ((l, l2), (o, o2)))
    m = m_new

# %%
P = reference.softmax(torch.tensor(K @ q))[0].numpy()
print(f"three blocks merged against one softmax: largest difference {abs(o / l - P @ V).max():.1e}")

# %% [markdown]
# ## The kernel
#
# `kernels/02_online_softmax.cu` is a softmax over the rows of $S$. Up to $N = 1024$ one warp takes a row, up to 32768 one block does, and longer rows are cut into **slices**, one block each (all limits are 3 lower where $N$ is no multiple of 4). The skeleton of one thread's work:
#
# ```cpp
# load(x, S, slice);                         // its share of the row, into registers
# s = {max of x, sum of exp(x - max)};       // its state; x keeps exp(x - max)
# all = merge_threads(s);                    // merged over the threads of the row
# if (slices > 1) { leave `all` in P; return; }        // long rows: merge_slices and normalise do the rest
# x *= exp(s.m - all.m) / all.l;             // now x is P
# store(P, x, slice);
# LSE = all.m + log(all.l);                  // one thread per row
# ```
#
# The merge is the formula above, with the guard for two empty parts. `__device__` marks a function that GPU code calls:

# %%
show.region("02_online_softmax", "merge")

# %% [markdown]
# Each thread summarises the scores it holds. Then the threads of a row merge. Inside a warp that is a **[butterfly](glossary.md#butterfly)**: at each step a lane exchanges states with the lane whose number differs in one bit, and merges.

# %%
show.region("02_online_softmax", "merge_threads")

# %%
draw.butterfly([1.0, 3.0, 2.0, 4.0, 0.0, 2.0, 5.0, 1.0])

# %% [markdown]
# *Drawn with 8 lanes; a warp has 32 and takes 5 steps.* Dashed lines are values read from another lane's registers. Associativity and commutativity are what make this right: every lane merges the same states in another order, and all end with the same result. If several warps share a row, one lane of each writes the warp's state to **shared memory** (on-chip memory that the threads of a block share), the [barrier](glossary.md#barrier) `__syncthreads()` makes all of them visible, and a second butterfly merges them.
#
# The kernel proper. It is a template: the compiler makes a kernel for each pair of `threads` (per row) and `V` that the launcher uses. `V` is not the values here: it counts the **vectors** of four scores that a thread holds. `__launch_bounds__` tells the compiler how many threads a block will have, so that it can share out the registers. `slice_of` says which part of the row is this block's, all of it unless the row is long; `load` and `store` move a thread's scores, 16 bytes at a time where they can. `#pragma unroll` writes a loop out, so that every `x[e]` can be a register.

# %%
show.region("02_online_softmax", "softmax")

# %% [markdown]
# A thread loads its scores into the register array `x` once, and they stay there: the row is read from HBM a single time. Within the thread the maximum is found first and the exponentials second (both over registers, which is free of traffic), so each score costs one exponential rather than two. After the merge, one factor per thread, `weight` $= e^{m_{thread} - m}/l$, turns $e^{s - m_{thread}}$ into $p$.
#
# While a row fits in the registers of one block, a *safe* softmax could also read it only once, with two reductions over the threads (a maximum, then a sum). The state needs one. The merge becomes indispensable when the row does **not** fit: then several blocks share it, each leaves its state, a second kernel merges, and a third writes $P$.

# %%
show.region("02_online_softmax", "long_rows")

# %% [markdown]
# What the compiler made of it, for an H200 (no GPU needed for this): one line per kernel, `softmax<threads, V>` for rows of up to 4 · `threads` · `V` scores. *[Spilled](glossary.md#spill)* registers would live in memory; there should be none.

# %% tags=["raises-exception"]
made = sass.resources("02_online_softmax", arch="sm_90a")
made[["registers", "spill_store_bytes", "spill_load_bytes", "smem_bytes"]]

# %% [markdown]
# ## Run and check

# %%
torch.manual_seed(0)
S = torch.randn(64, 4096, device=device)
p, lse = kernel(S)
print(
    f"P {tuple(p.shape)}, LSE {tuple(lse.shape)}; rows of P sum to 1 within {(p.double().sum(-1) - 1).abs().max():.1e}"
)
check(kernel)

# %% [markdown]
# The cases include rows of −∞ (masked attention makes them; the answer is $P = 0$, $\mathrm{LSE} = -\infty$), rows whose only finite scores are the last three, scores about $-10^4$, very large scores of both signs, and lengths one off 32, 64, 128 and 1024.

# %% [markdown]
# ## Predict, then measure
#
# How often is each score read from memory? Rung 01 reads it three times. The source above says once, and twice if several blocks share the row:

# %%
counted = traffic(kernel, S)
print(f"reads of each score, N = 4096: {counted.reads_per_byte['Q']:g}")
print(f"reads of each score, N = 65536: {traffic(kernel, torch.randn(1, 65536)).reads_per_byte['Q']:g}")
R, N = S.shape
expected = {"Q": 4 * R * N, "O": 4 * R * N, "LSE": 4 * R}
exact = (counted.bytes_read + counted.bytes_written).to_dict() == expected
print(f"{R} rows of {N}: 4 R N bytes read, 4 R N + 4 R written:", "exact" if exact else "not so")

# %% [markdown]
# (In this kernel the scores arrive as the argument `Q` and the probabilities leave as `O`, so these are the names in such tables.) A row too long for one block is read twice, once for the states and once for $P$: that is the online softmax of the table above, with a whole slice of the row in place of each score.
#
# What does the merge cost? A row of 4096 has four warps, and a step of a butterfly exchanges $m$ and $l$, with one shuffle each. How many shuffle instructions do the four warps execute for such a row?

# %%
shuffles = ...  # your prediction: shuffle instructions for a row of 4096

# %% tags=["reveal"]
rays = {n: xray(kernel, torch.randn(64, n)) for n in (1023, 1024, 4096, 4097)}
predict(shuffles, rays[4096].trace.instructions["shfl.sync"] // 64, "shuffles per row")

# %% [markdown]
# In each warp five steps over the lanes and two over the four warps' states, two shuffles a step: $4 \cdot 7 \cdot 2$.
#
# ### The X-ray
#
# Are these bytes asked for well? A warp's lanes load 16 bytes each, side by side: 512 bytes, which are 16 [sectors](glossary.md#sector) of 32 bytes if they begin where a sector does. Rows of 4096 numbers do, at every row. Rows of 4097 begin anywhere. The kernel's groups of four begin at multiples of 16 bytes, so at worst: how many sectors may such a request need?

# %%
sectors_at_most = ...  # your prediction

# %% tags=["reveal"]
loads = rays[4097].to_frame().query("op == 'load' and width == 16")
predict(sectors_at_most, int(loads["worst"].max()), "sectors for one request, at most")
rays[4097].address_map("fa::load4(x + 4 * v, p)")

# %% [markdown]
# *One more.* The 512 bytes begin in the middle of a sector and end in one. What that comes to over all requests, beside the recorded times:

# %%
ms = record.medians(record.load("02_online_softmax")).pivot(index="Nk", columns="name", values="ms")
sectors = {n: ray.total(space="global") for n, ray in rays.items()}
table = pd.DataFrame({"sectors": {n: s.cost for n, s in sectors.items()}}).rename_axis("N")
table["beyond the ideal"] = [f"{s.excess / s.ideal:.1%}" for s in sectors.values()]
table["shuffles per row"] = [ray.trace.instructions["shfl.sync"] // 64 for ray in rays.values()]
table["time / a copy's"] = (ms["02_online_softmax"] / ms["copy"]).round(2)
table

# %% [markdown]
# Rows of 1023 and 4097 take a few percent more sectors but clearly more time, measured in copies on the H200. A row of 1023 may begin up to three numbers late, and one of 4097 is a number longer: both miss the size that 1024 and 4096 just fit, so the launcher gives them twice the threads. Half of their slots are empty, and there are twice as many states to merge.
#
# ### The time its bytes must take
#
# Before the last measurement, a bound. A kernel that moves $b$ bytes cannot be faster than $b/\beta$ on a device that copies at $\beta$ bytes per second. A softmax has few FLOPs per byte, so this bound is the one that counts. For 16384 rows of 4096 on an H200, what share of the copy bandwidth do this kernel (by the table) and `torch.softmax` reach?

# %%
ours, theirs = ..., ...  # your predictions, in percent

# %% tags=["reveal"]
rows, length = 16384, 4096
unavoidable = bench.softmax_bytes(rows, length)
copy = record.load("device", "ceilings").query("name == 'copy'")["value"].median()
predicted_ms = unavoidable / (copy * 1e12) * 1e3
timed = record.medians(record.load("02_online_softmax")).query("Nk == @length").set_index("name")
print(f"{timed.device.iloc[0]}: {unavoidable / 1e6:.0f} MB at {copy:.2f} TB/s take at least {predicted_ms:.3f} ms")
share = (100 * predicted_ms / timed.ms).round(1)
predict(ours, share["02_online_softmax"], "percent, this kernel")
predict(theirs, share["torch.softmax"], "percent, torch.softmax")
timed[["ms", "ms_low", "ms_high"]].round(3).assign(percent_of_bound=share)

# %% [markdown]
# A plain copy is the yardstick: nothing that reads and writes as much can outrun it by more than noise.

# %% [markdown]
# ## Beside its peers
#
# The peer is `torch.softmax`. On a GPU, live, in milliseconds for 16384 rows of 4096:

# %%
if device == "cuda":
    S = torch.randn(rows, length, device=device)
    samples = bench.measure({"02_online_softmax": kernel} | bench.softmax_peers(S), [S])
    print(torch.cuda.get_device_name())
    display(samples.groupby("name").ms.describe()[["min", "50%", "max"]].sort_values("50%"))
else:
    print("no GPU here: the emulator counts, it does not time")

# %% [markdown]
# Recorded, from short rows to very long ones, with the number of scores held:

# %%
samples = record.load("02_online_softmax")
display(plot.throughput(samples))
ratio = record.ratio(samples, "02_online_softmax", "torch.softmax").set_index("Nk").ratio.round(3)
print("torch.softmax is faster at N =", ratio[ratio < 1].index.tolist())
print("the ratio where N is no multiple of 4:", ratio[ratio.index % 4 > 0].to_dict())

# %% [markdown]
# *The figure:* bytes that any softmax must move, divided by the time; the copy is the ceiling. The step down right of 32k is the second read of $S$: 3 bytes where 2 would do. The last line printed has lengths that are no multiple of 4 (the X-ray above). At 256 and 1023 `torch.softmax` is ahead.

# %% [markdown]
# ### Traps, live
#
# Easy mistakes, made here on purpose in a copy of the file. Before you run each cell, say which inputs it will get wrong.


# %%
def trap(old, new):
    """Checks 02 with one piece of text replaced; says which cases fail."""
    report = check(load(source=rung("02_online_softmax").replace(old, new), quiet=True))
    cases = dict.fromkeys(c.case for c in report.comparisons)
    wrong = list(dict.fromkeys(c.case for c in report.failures))
    few = ", ".join(wrong[:9]) + (" …" if len(wrong) > 9 else "")
    print(f"wrong in {len(wrong)} of {len(cases)} cases: {few or 'none'}")


trap("State s = {-FA_INFINITY, 0.f};", "State s = {1e-30f, 0.f};")

# %% [markdown]
# **The running maximum starts at a small number instead of −∞** (0, say, or 1e-30). All is well while some score of the row is positive, which random tests always have. With every score about $-10^4$ the "maximum" stays at the start, every exponential underflows, and the row's sum is 0.

# %%
trap("const float m_finite = m == -FA_INFINITY ? 0.f : m; // both", "const float m_finite = m; // both")

# %% [markdown]
# **No guard for two empty parts**: $-\infty - (-\infty)$ is NaN, and a NaN spreads through every later merge. Masking is not even needed for it: in a short row most threads hold no score at all, and theirs are the empty states.

# %%
trap("a.l * expf(a.m - m_finite) + b.l * expf(b.m - m_finite)", "a.l + b.l")

# %% [markdown]
# **No rescaling of l.** The result is right only where all parts have the same maximum: rows of equal scores (the case "zeros"), or a row within one vector ($N$ = 1 and 2; rows of 3 may straddle two). This is the one to remember for FlashAttention: without the rescale a test in which all keys fit in one tile still passes.

# %% [markdown]
# The fourth is one that a test need not see. **No barrier** between the stores of the warps' states and the loads of all of them: whether a warp reads a state before it is there depends on who runs first. The X-ray does not wait for it to happen; it looks whether anything orders the two.

# %%
source = rung("02_online_softmax").replace("__syncthreads(); // every warp's", "// every warp's")
found = xray(load(source=source, device="cpu", quiet=True), torch.randn(4, 4096))
for finding in found.findings:
    print(found.report(finding))

# %% [markdown]
# "Nobody has written" is what this order of the warps made of it; the [race](glossary.md#race) is there in every order.

# %% [markdown]
# ## What still hurts
#
# At full copy bandwidth a softmax kernel is finished. For attention that is the wrong problem. $S$ was written to HBM only to be read here, and $P$ is written only to be read by the next kernel: of the nine passes over $S$ and $P$ that 01 counted in HBM, this kernel in place of rung 01's softmax would save two.
#
# The way out is in "The output merges too": compute a block of $S$ on the chip, merge it into $(m, l, o)$, and forget it. [03 · FlashAttention-1](03_fa1_fp32.ipynb) does that.

# %% [markdown]
# ## Exercises
#
# ### Exercise 2.1 · Merge finished outputs
#
# Two kernels have each worked on a part of the keys and **divided already**: they give $m$, $l$ and $O = o/l$ of their part. Merge them. (Generating text token by token from a very long context does this: many blocks share one query.) An empty part arrives as $(-\infty, 0, \mathbf 0)$. The version below adds both $l$ and averages the outputs: both wrong.
#
# <details><summary>Hint</summary>
#
# $O_1 = o_1 / l_1$, so $o_1 = l_1 O_1$. Merge $o$, then divide by the merged $l$.
# </details>

# %%
# Exercise 2.1


def merge_outputs(a, b):
    (m1, l1, O1), (m2, l2, O2) = a, b
    return max(m1, m2), l1 + l2, (O1 + O2) / 2


# %%
def finished(first, last):
    m, l, o = part(q, K[first:last], V[first:last])
    return m, l, o / l


# %%
def right_for_every_cut():
    empty, whole = (-np.inf, 0.0, np.zeros(64)), finished(0, 300)
    cuts = {f"cut after {c} of 300 keys": (finished(0, c), finished(c, 300), whole) for c in (1, 100, 299)}
    cuts |= {"empty part first": (empty, whole, whole), "empty part last": (whole, empty, whole)}
    cuts["every m larger by 1000"] = tuple((m + 1000, l, o) for m, l, o in cuts["cut after 100 of 300 keys"])
    for cut, (a, b, both) in (cuts | {"two empty parts": (empty, empty, empty)}).items():
        told = merge_outputs(a, b)
        assert isinstance(told, tuple | list) and len(told) == 3, "give three: m, l and O"
        wrong = [name for name, x, y in zip("mlO", told, both) if not np.allclose(x, y)]
        assert not wrong, f"{cut}: {', '.join(wrong)} wrong"
    return True


exercise.verify("2.1", right_for_every_cut)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def merge_outputs(a, b):
#     (m1, l1, O1), (m2, l2, O2) = a, b
#     m = max(m1, m2)
#     if m == -np.inf:
#         return a  # both are empty
#     w1, w2 = l1 * np.exp(m1 - m), l2 * np.exp(m2 - m)
#     return m, w1 + w2, (w1 * O1 + w2 * O2) / (w1 + w2)
# ```
#
# Each part's output is weighted by its share of the sum. Two empty parts would give 0/0; a kernel has to guard that too.
# </details>

# %% [markdown]
# ### Exercise 2.2 · How often does the maximum change?
#
# Rescaling costs a multiplication of everything accumulated. How often does a row of $N$ independent random scores, in random order, see a new maximum? Write the expected number; the first score counts. The check goes through all orders of a few scores.
#
# <details><summary>Hint</summary>
#
# With which probability is the $k$-th score the largest of the first $k$?
# </details>

# %%
# Exercise 2.2


def expected_maxima(N):
    return N / 2


# %%
def agrees_with_all_orders():
    for n in (1, 2, 3, 4, 6):
        orders = np.array(list(permutations(range(n))))
        running = np.maximum.accumulate(orders, axis=1)
        seen = 1 + (np.diff(running, axis=1) > 0).sum(axis=1).mean()
        told = float(expected_maxima(n))
        assert np.isclose(told, seen, rtol=1e-5, atol=0), f"N = {n}: {told:.6f}, on average it is {seen:.6f}"
    return True


exercise.verify("2.2", agrees_with_all_orders)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Each of the first $k$ scores is equally likely to be the largest of them, so step $k$ brings a new maximum with probability $1/k$. The sum of these is the harmonic number $H_N \approx \ln N + 0.577$: fewer than 9 for $N = 4096$. Almost every rescale multiplies by 1, and a kernel may skip it when a vote among its threads finds no new maximum.
#
# ```python
# def expected_maxima(N):
#     return sum(1 / k for k in range(1, N + 1))
# ```
# </details>

# %% [markdown]
# In the **tasks** you write parts of the rung yourself, without a look at it. Solved means right in every case of `check` and no finding in the X-ray, whose counts stand beside the rung's own.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 02.1 · The merge
#
# Two lines of algebra and one guard, in CUDA. You learn what the empty part costs, and why it has to be right: most threads of a short row hold one.

# %%
blank("02", "merge")

# %% tags=["active-ipynb"]
# %%region 02 merge -> my_merge
# // type here

# %%
hint("02.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `merge` of [02_online_softmax.cu](../kernels/02_online_softmax.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 02.2 · A merge of many threads
#
# The butterfly within a warp, then through shared memory. You learn which exchanges need a barrier and which must not have one. With one too few the result may still be right; the X-ray calls it a race. Judged step by step, short rows first.

# %%
blank("02", "merge_threads")

# %% tags=["active-ipynb"]
# %%region 02 merge_threads -> my_merge_threads
# // type here

# %%
hint("02.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `merge_threads` of [02_online_softmax.cu](../kernels/02_online_softmax.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 02.3 · The softmax in registers
#
# Put the parts together: load once, summarise, merge, write. Judged like 02.2.

# %%
blank("02", "softmax")

# %% tags=["active-ipynb"]
# %%region 02 softmax -> my_softmax
# // type here

# %%
hint("02.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `softmax` of [02_online_softmax.cu](../kernels/02_online_softmax.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 02.9 · The whole rung
#
# From the header block. A warp per row that reads the row twice is a right answer; then see how close you come to one read.

# %%
print(kernel.rung.source.split("#include")[0])  # the header block

# %%
blank("02")

# %% tags=["active-ipynb"]
# %%region 02 kernel -> my_kernel
# // type here

# %%
hint("02.9")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: all of it that follows the header block of [02_online_softmax.cu](../kernels/02_online_softmax.cu), as above, with the regions `load` and `launcher`, which the notebook does not show.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain the online update and derive it, write the merge with its neutral element, and judge a memory-bound kernel against the copy bandwidth. Answer before you unfold:
#
# <details><summary>Why does subtracting the maximum not change the result?</summary>
# Numerator and denominator are multiplied by the same number, exp(−m).
# </details>
#
# <details><summary>Why is the start (−∞, 0) and not (0, 0)?</summary>
# With (0, 0) a row of negative scores keeps m = 0; once all scores are below about −104 every exponential is 0 in fp32 and so is l. −∞ is neutral for the maximum, 0 is not.
# </details>
#
# <details><summary>Which property lets 32 lanes merge in a butterfly, each in another order?</summary>
# The merge is associative and commutative; in other coordinates it is a maximum and a sum.
# </details>
#
# <details><summary>What may differ between two orders, and by how much?</summary>
# The rounding of l: a few steps of the number format. m is the same always.
# </details>
#
# <details><summary>A softmax kernel reaches 60 % of the copy bandwidth. Where would you look?</summary>
# Does it read S more than once (count the bytes), are its loads 16 bytes wide and neighbouring, are enough of them in flight.
# </details>
#
# <details><summary>How much faster would attention get with a perfect softmax kernel?</summary>
# Only by the share that the softmax has in 01's time; the products and the N² memory stay. Fusion, not a faster softmax, is the way.
# </details>
