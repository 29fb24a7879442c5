# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 04 · FlashAttention-2 in fp32
#
# **After this notebook you can**
# - explain what FlashAttention-2 changed, point by point, and what each change is worth in bytes, CTAs and instructions;
# - do the arithmetic of a register tile: bytes of shared memory per FLOP, before a kernel is written;
# - judge why a kernel with the better algorithm can come out slower than one with the worse.
#
# **Time** 75 minutes.
#
# **Needs** [03 · FlashAttention-1](03_fa1_fp32.ipynb). No GPU: without one the kernels run on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: give every query tile its own CTA that keeps O, m and l in registers while K and V stream past, and divide once, at the end.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import math
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from helpers import check, compile_ahead, load, rung, traffic, xray
from helpers import bench, draw, exercise, plot, record, reference, sass, show

torch.manual_seed(0)
kernel = load("04_fa2_fp32")
device = kernel.device
compile_ahead(["03_fa1_fp32", "04_fa2_fp32"], "sass", "xray")  # in the background, for later cells

# %% [markdown]
# ## The problem
#
# Notebook 03 ended with three complaints about its kernel:
#
# - it starts one CTA per head, so a long sequence with few heads leaves most of the GPU idle;
# - it brings $O$, $m$ and $l$ in from HBM and writes them back for every tile of keys;
# - it uses each value from shared memory a few times only.
#
# FlashAttention-2 (Dao 2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)) answers the first two with one move, the order of the loops, and adds an improvement of its own: fewer
# operations that are not part of a matrix product. The answer to the third is not in the paper, because its authors could take it for granted:
# the two matrix products are written as a fast matrix-multiplication kernel writes them. Sections 1 to 4 take the changes of the paper one by one, section 5 the products.

# %% [markdown]
# ## 1 · Loop order
#
# Here is the forward pass of FlashAttention-2 (Algorithm 1 of the paper) in numpy. Compare the two `for` lines with those of notebook 03.


# %%
def fa2(Q, K, V, Br, Bc):
    """Algorithm 1 of FlashAttention-2 for one head, Q, K, V (N, d): O (N, d) and LSE (N, 1)."""
    N, d = Q.shape
    O, LSE = np.empty((N, d)), np.empty((N, 1))
    for i in range(0, N, Br):  # line 3: query tiles outside
        Qi, n = Q[i : i + Br], len(Q[i : i + Br])
        Oi, l, m = np.zeros((n, d)), np.zeros((n, 1)), np.full((n, 1), -np.inf)  # line 5
        for j in range(0, N, Bc):  # line 6: key tiles inside
            S = Qi @ K[j : j + Bc].T / np.sqrt(d)  # line 8
            m_new = np.maximum(m, S.max(1, keepdims=True))  # line 9
            alpha, P = np.exp(m - m_new), np.exp(S - m_new)
            l = alpha * l + P.sum(1, keepdims=True)
            Oi = alpha * Oi + P @ V[j : j + Bc]  # line 10: no division
            m = m_new
        O[i : i + Br], LSE[i : i + Br] = Oi / l, m + np.log(l)  # lines 12 to 15
    return O, LSE


# %% [markdown]
# **Why the swap is allowed.** Algorithm 1 of FlashAttention-1 visits the pairs $(i, j)$ with $j$ outside. The state of row tile $i$ is touched only at its own visits, and in both
# orders these come in the sequence $j = 1, 2, \dots, T_c$. So every row sees the same merges in the same sequence; what happens to other rows in between is of no concern to it.
# (By the merge's associativity and commutativity, notebook 02, even the sequence of $j$ could differ.)
#
# **Why the division can wait.** FA1 keeps $o_i$ normalised: after each tile it multiplies by $l_i$ (undoing the last division) and divides by $l^{new}$. FA2 keeps the *unnormalised*
# $\hat o_i = l_i\, o_i$. The merge of notebook 03, multiplied by $l$ on both sides, is
#
# $$ \hat o = e^{m_A - m}\, \hat o_A + e^{m_B - m}\, \hat o_B , $$
#
# with no division and no $l$ in it. At the end $o = \hat o / l$. Line 9 goes one step further: it takes $\tilde P$ relative to $m^{new}$ at once, $e^{S - m^{new}}$, so that $e^{m_B - m}$
# is already inside $\tilde P$.
#
# (A slip in the arXiv text: its line 10 has $\mathrm{diag}(e^{m^{(j-1)} - m^{(j)}})^{-1}$, an inverse too many. The code above and the kernel multiply by $e^{m^{(j-1)} - m^{(j)}}$.)


# %%
def dense(Q, K, V):
    """Attention and LSE with the whole of S at once, in float64."""
    S = Q @ K.T / np.sqrt(Q.shape[1])
    P, m = np.exp(S - S.max(1, keepdims=True)), S.max(1, keepdims=True)
    return P / P.sum(1, keepdims=True) @ V, m + np.log(P.sum(1, keepdims=True))


Q, K, V = np.random.default_rng(0).standard_normal((3, 256, 64))
for Br, Bc in [(128, 64), (64, 64), (32, 128), (50, 7)]:
    errors = [abs(ours - exact).max() for ours, exact in zip(fa2(Q, K, V, Br, Bc), dense(Q, K, V))]
    print(f"Br={Br:3d} Bc={Bc:3d}: max error of O {errors[0]:.1e}, of LSE {errors[1]:.1e}")

# %%
draw.tile_walk("fa2")

# %% [markdown]
# **What to see.** The walk goes along rows now. Orange, the query tile, stays for a whole row, and with it $O_i$, $m_i$ and $l_i$; they never leave the chip before the row is finished (step 4).
# The blue tile, K and V, changes at every step: it is now K and V that are read again and again. Compare with the walk in notebook 03: there the same cells are numbered by columns.

# %% [markdown]
# ## 2 · HBM reads and writes
#
# Count as in notebook 03, one head, in elements. $Q$ is read once: $Nd$. $K$ and $V$ are read once per query tile: $2Nd \cdot N / B_r$. $O$ is written once: $Nd$; LSE once: $N$.
# No $m$, no $l$, no reading of $O$.
#
# $$ \text{FA1: } 3Nd + 2N + \tfrac{N}{B_c} (3Nd + 4N), \qquad \text{FA2: } 2Nd + N + \tfrac{N}{B_r}\, 2Nd . $$
#
# Leading terms: $3N^2 d / B_c$ against $2N^2 d / B_r$. Three things travelled once per tile of keys ($O$ in, $O$ out, $Q$); now two travel once per tile of queries ($K$, $V$), and neither is a write. The tile that
# decides is now $B_r$, the *query* tile. FA1 could not make $B_c$ large because $K_j$ and $V_j$ both have to sit in SRAM; FA2 streams them, so $B_r$ is bounded by the one tile $Q_i$ in SRAM and $O_i$ in registers.
# Both formulas are put to the count below.

# %% [markdown]
# ## 3 · Parallelism over the sequence
#
# In FA1 the outer loop runs over keys, and every turn of it updates *all* rows. Two CTAs that shared a head would have to take turns at $O_i$, $m_i$ and $l_i$. In FA2 the outer loop runs over query tiles, and
# no two of its turns touch the same row. So the outer loop can go: each of its turns becomes a CTA. The grid grows from $B H$ to $B H \lceil N / B_r \rceil$ CTAs.
#
# On this series' workload ($B N = 16384$, $H d = 2048$) the product $B \cdot N$ is fixed, so the number of FA2's CTAs does not depend on $N$ at all. (In our kernel $B_r$ is 128 for $d = 64$ and 64 for $d = 128$, that is $8192 / d$.)

# %%
D = 64
ctas = pd.DataFrame({"N": 2 ** np.arange(9, 15)})
ctas["FA1"] = 16384 // ctas.N * (2048 // D)
ctas["FA2"] = ctas.FA1 * np.ceil(ctas.N / (8192 // D)).astype(int)
ctas["FA1 per SM"], ctas["FA2 per SM"] = ctas.FA1 / 132, ctas.FA2 / 132
ctas.round(2)

# %% [markdown]
# The columns "per SM" are for the 132 SMs of an H200. Below 1, some SMs have no work. The recorded throughput of the two kernels:

# %%
recorded = record.headline(pd.concat([record.load("03_fa1_fp32"), record.load("04_fa2_fp32")]))
recorded = recorded[recorded["name"] == recorded["rung"]]
plot.throughput(recorded)

# %% [markdown]
# **What to see.** FlashAttention-1 holds its level on the H200 as long as there are about two CTAs per SM, all that fit at a time: up to $N = 2048$ at $D = 64$, up to 1024 at $D = 128$, where there are half as many heads. From there on it falls, and below one CTA per SM it halves with each doubling of $N$.
# FlashAttention-2 loses nothing with length; it even gains a little. How high the two levels are is another matter, and has more to do with section 5 than with this one.

# %% [markdown]
# ## 4 · Fewer operations outside the products
#
# A GPU's multiply-adds are its cheapest operations. On an H200's CUDA cores an SM completes 128 fp32 multiply-adds per clock, but only 16 special functions, such as the exponential or the reciprocal
# (CUDA C++ Programming Guide, throughput of native arithmetic instructions, compute capability 9.0). A division is a reciprocal and several more instructions. With tensor cores, where this
# series goes next, the products get cheaper still and everything else does not.
#
# Per tile of $B_r \times B_c$, both algorithms do $4 B_r B_c d$ FLOPs in the two products. The rest, from the lines of the two algorithms:
#
# | per tile | FA1 | FA2 |
# |---|---|---|
# | exp | $B_r B_c$ for $\tilde P$, $2 B_r$ for the two factors | $B_r B_c + B_r$ |
# | multiply | $B_r B_c$ (scale), $2B_r$ for $l$, $B_r d$ for $O_i$, $B_r d$ for $\tilde P V_j$ | $B_r B_c$ (scale), $B_r$ for $l$, $B_r d$ for $O_i$ |
# | divide | $B_r d$ | none; $B_r d$ once per *row* of tiles |
#
# (In FA1, $e^{m_i - m^{new}} l_i$ is computed once and used for both $l$ and $O_i$.) Let numpy count: an array that adds up the elements of every operation it takes part in.


# %%
class Counted(np.ndarray):
    """An array that counts the elements of each operation. Reductions count what they read."""

    ops = Counter()

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        plain = [np.asarray(x) for x in inputs]
        out = getattr(ufunc, method)(*plain, **kwargs)
        Counted.ops[ufunc.__name__] += plain[0].size if method == "reduce" else out.size
        return out.view(Counted)


def count_ops(step, *arrays):
    Counted.ops.clear()
    step(*(np.asarray(x).view(Counted) for x in arrays))
    return {name: Counted.ops[name] for name in ("exp", "multiply", "divide")}


# %%
def fa1_tile(scale, Qi, Kj, Vj, Oi, l, m):
    """Lines 9 to 13 of FlashAttention-1."""
    S = (Qi @ Kj.T) * scale
    m_tile = S.max(1, keepdims=True)
    P = np.exp(S - m_tile)
    m_new = np.maximum(m, m_tile)
    kept, weight = np.exp(m - m_new) * l, np.exp(m_tile - m_new)
    l_new = kept + weight * P.sum(1, keepdims=True)
    return (kept * Oi + weight * (P @ Vj)) / l_new, l_new, m_new


def fa2_tile(scale, Qi, Kj, Vj, Oi, l, m):
    """Lines 8 to 10 of FlashAttention-2."""
    S = (Qi @ Kj.T) * scale
    m_new = np.maximum(m, S.max(1, keepdims=True))
    alpha, P = np.exp(m - m_new), np.exp(S - m_new)
    return alpha * Oi + P @ Vj, alpha * l + P.sum(1, keepdims=True), m_new


# %%
Br, Bc, d = 128, 64, 64
rng = np.random.default_rng(0)
tile = [rng.standard_normal(shape) for shape in [(Br, d), (Bc, d), (Bc, d), (Br, d), (Br, 1), (Br, 1)]]
counts = pd.DataFrame(
    {
        "FA1 derived": [Br * Bc + 2 * Br, Br * Bc + 2 * Br + 2 * Br * d, Br * d],
        "FA1 counted": count_ops(fa1_tile, 0.125, *tile),
        "FA2 derived": [Br * Bc + Br, Br * Bc + Br + Br * d, 0],
        "FA2 counted": count_ops(fa2_tile, 0.125, *tile),
    },
    index=["exp", "multiply", "divide"],
)
counts

# %% [markdown]
# The exponentials are the same to within $B_r$: FA2 does not save those. It saves one multiplication per element of $O$ and all but one of its $T_c$ divisions. In fp32 that is little: 8192 of each for this tile, beside $2 B_r B_c d = 1\,048\,576$ multiply-adds in the products.
# Our kernel goes a little further: it folds $\text{scale} \cdot \log_2 e$ into $Q$
# before the loop, so the $B_r B_c$ scale multiplications disappear and $\exp$ becomes $\mathrm{exp2}$, the instruction the hardware has.
#
# The paper's changes side by side:
#
# | | FlashAttention-1 | FlashAttention-2 |
# |---|---|---|
# | loops | keys outside, queries inside | queries outside (spread over CTAs), keys inside |
# | stays on the chip during the inner loop | $K_j$, $V_j$ | $Q_i$, $O_i$, $m_i$, $l_i$ |
# | read again in every outer step | all of $Q$, $O$, $m$, $l$ | all of $K$, $V$ |
# | written to HBM | $O$, $m$, $l$, once per tile of keys | $O$ and LSE, once |
# | bytes, leading term | $4 \cdot 3 N^2 d / B_c$ | $4 \cdot 2 N^2 d / B_r$ |
# | CTAs | $B H$ | $B H \lceil N / B_r \rceil$ |
# | divisions of a row of $O$ | $d$ per tile of keys | $d$, once |

# %% [markdown]
# ## 5 · The products: register tiling
#
# The two products are where the FLOPs are: $4 B_r B_c d$ per tile, where everything else is a handful of operations for each element of $S$ and of $O$. Look at one of them, $S = Q K^\top$, with both tiles in shared memory. The obvious way gives each thread an element of $S$:
# for each $k$ it loads $Q_{ik}$ and $K_{jk}$ and does one multiply-add. Two loads, 8 bytes, for 2 FLOPs: **4 bytes per FLOP**.
#
# Give a thread a block of $T_M \times T_N$ elements instead. For each $k$ it loads $T_M$ numbers of column $k$ of $Q$ and $T_N$ of column $k$ of $K$, and does all $T_M T_N$ products of the two: an **outer product**. Bytes per FLOP:
#
# $$ \frac{4\,(T_M + T_N)}{2\,T_M T_N} = 2 \left( \frac{1}{T_M} + \frac{1}{T_N} \right) . $$
#
# What can the SM feed? Its shared memory delivers at most 128 bytes per clock. Its CUDA cores do 128 multiply-adds, 256 FLOPs, per clock. To keep them busy, a kernel may ask for no more than $128 / 256 = 0.5$ bytes per FLOP.

# %%
tiles = [(1, 1), (2, 2), (4, 4), (8, 4), (8, 8), (16, 8)]
table = pd.DataFrame(tiles, columns=["TM", "TN"])
table["bytes per FLOP"] = 2 * (1 / table.TM + 1 / table.TN)
table["FMA units busy, at most"] = np.minimum(1, 0.5 / table["bytes per FLOP"]).map("{:.0%}".format)
table["registers for S and O"] = 2 * table.TM * table.TN
table

# %%
draw.register_tiling(tiles)

# %% [markdown]
# **What to see.** A thread that computes one element keeps at most an eighth of the arithmetic busy, however the rest of the kernel is written. 8 × 8 is the first square that meets the line. 16 × 8 would be better still, but a thread has at most
# 255 registers, and the tiles of $S$ and $O$ alone would take 256.
#
# The bound is a little pessimistic, as it counts each thread's bytes by itself: when lanes of a warp ask for the same address in the same access, the hardware reads it once. So the layout of the warp matters too.

# %% [markdown]
# ## The kernel

# %%
show.region("04_fa2_fp32", "tile")

# %% [markdown]
# A tile has $B_c = d$ keys, so $S$ ($B_r \times B_c$) and $O$ ($B_r \times d$) have the same shape and the same division among threads: 8 × 8 each. Four warps lie below each other; a warp owns its rows over all columns, so a row's maximum and sum
# need only shuffles within the warp. Which lane has which elements follows from `ty`, its place along the rows, and `tx`, along the columns:

# %%
d = 64
TY = 32 // (d // 8)  # the kernel's line: ty = threadIdx.x % TY, tx = threadIdx.x % 32 / TY
lane = np.arange(32)
draw.warp_tile(ty=lane % TY, tx=lane // TY, d=d, lane=5)

# %% [markdown]
# **What to see.** One warp's part of $S$, 32 × 64, in pieces of 4 × 4; the number is the lane that computes the piece. Lane 5 has four of them, in green. For one $k$ it reads two groups of four from a column of $Q$ (orange) and two from a column of $K$ (blue):
# four loads of 16 bytes for 64 multiply-adds. The two groups are half a tile apart rather than side by side, so that neighbouring lanes read neighbouring groups and different banks serve them.
# Lanes in the same row of the picture want the same orange group, lanes in the same column the same blue one; the hardware reads such a word once for all of them.

# %%
show.region("04_fa2_fp32", "multiply")

# %% [markdown]
# This one function does both products. It wants both operands with $k$ as the slow index, so that a thread's values are neighbours in memory: $Q$, $K$ and $\tilde P$ are stored transposed, $V$ is already the right way round. The order of the 64
# multiply-adds does not change the result. Down one column and up the next, each of them shares an operand with the one before it, which is meant to spare the register file a read. The loop over $k$ is unrolled 16 steps at a time: all 32 of a slab were 4 % faster at $d = 64$, but took
# the compiler longer than the two seconds that an edit may cost here.
#
# K and V come in **slabs** along the inner dimension rather than as whole tiles:

# %%
show.region("04_fa2_fp32", "scores")

# %% [markdown]
# While one slab is multiplied, the next is on its way from HBM into registers (`fetch_K`). After the multiplication it goes to shared memory (`commit_K`), into the buffer that nobody reads at that moment. One barrier per slab is enough, because there are two buffers.

# %%
show.region("04_fa2_fp32", "online_update")

# %% [markdown]
# Lines 9 and 10 of the algorithm. `alpha` rescales $l$ and $O$, both in registers. `l_reg` holds the sum over this thread's columns only; since all of a row's threads use the same `alpha`, their partial sums can be added at the very end. The maximum cannot wait: every
# thread needs it now, so it is exchanged with shuffles.
#
# Then $O \mathrel{+}= \tilde P V_j$ (region `output`) is the same `multiply`, with $\tilde P$ in the place of $Q$ and $V$ in that of $K$. A thread has 8 columns of $\tilde P$ and needs whole rows, so $\tilde P$ passes through shared memory, half of the keys at a time to save room. After the last tile:

# %%
show.region("04_fa2_fp32", "epilogue")

# %% [markdown]
# The only division, and the only writes to HBM. $m$ is in units of $\log_2$, so LSE is $(m + \log_2 l) \ln 2$.

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# ## Predict, then measure
#
# Predict the traffic of both kernels, then count it. The prediction uses the tiles of the two `.cu` files at $d = 64$: FA1 has $B_c = 32$ and eight lanes that each ask for $m_i$ and $l_i$; FA2 has $B_r = 128$.


# %%
def predicted(name, N, d, heads=1):
    """Bytes requested from HBM, by tensor."""
    if name == "03_fa1_fp32":
        T, TX = math.ceil(N / 32), 16 if d == 128 else 8  # passes over Q and O; threads that share a row
        read = [T * N * d, N * d, N * d, T * N * d, TX * T * N, TX * T * N, 0]
        written = [0, 0, 0, (T + 1) * N * d, (T + 1) * N, (T + 1) * N, N]
    else:
        T = math.ceil(N / (8192 // d))  # passes over K and V
        read = [N * d, T * N * d, T * N * d, 0, 0, 0, 0]
        written = [0, 0, 0, N * d, 0, 0, N]
    return 4 * heads * pd.DataFrame({"read": read, "written": written}, index=["Q", "K", "V", "O", "m", "l", "LSE"])


# %%
q, k, v = (torch.randn(1, 2, 512, 64, device=device) for _ in range(3))
fa1 = load("03_fa1_fp32", quiet=True)
tables = {}
for name, run in [("03_fa1_fp32", fa1), ("04_fa2_fp32", kernel)]:
    counted = traffic(run, q, k, v)[["bytes_read", "bytes_written"]].set_axis(["read", "written"], axis=1)
    guess = predicted(name, 512, 64, heads=2)
    counted = counted.reindex(guess.index).fillna(0).astype(int)  # 04 has neither m nor l
    tables[name] = pd.concat({"predicted": guess, "counted": counted}, axis=1)
pd.concat(tables, axis=1)

# %%
for name, table in tables.items():
    verdict = "as predicted" if (table["predicted"] == table["counted"]).all(axis=None) else "NOT as predicted"
    read, written = table["counted"].sum() / 2**20
    print(f"{name}: {read:5.2f} MiB read, {written:5.2f} MiB written, {verdict}")

# %%
draw.bytes_by_tensor(
    {name: table["counted"].sum(axis=1) for name, table in tables.items()}, "Bytes requested, B H = 2, N = 512, d = 64"
)

# %% [markdown]
# **What to see.** The tall bars of FA1 are $O$, which it reads and writes at every tile, and $Q$. In FA2 they shrink to one pass each, and K and V grow instead. $m$ and $l$ are gone: they never leave the registers.
#
# Does the formula hold for other lengths and other tiles? A CTA's rows are 32 for each of its `warps`. Lengths that are no multiple of any tile put the rounding up in $\lceil N / B_r \rceil$ to the test, too.


# %%
def alone(source):
    """A source with its kernel for d = 64 only, which has less to compile."""
    return re.sub(r"  case (?!64)\d+:\n.*\n", "", source)


def of_tile(Br):
    """04_fa2_fp32 with query tiles of Br rows; slabs of 16 give each of 64 to 256 threads its groups of four."""
    source = rung("04_fa2_fp32").replace("warps = 4", f"warps = {Br // 32}")
    return alone(source.replace("d == 64 ? 32 : 16", "16"))


def fa2_bytes(N, d, Br):
    return 4 * (2 * N * d + N + math.ceil(N / Br) * 2 * N * d)


# %%
runs = {f"FA2, Br = {Br}": (Br, load(source=of_tile(Br), device="cpu", quiet=True)) for Br in (64, 128, 256)}
rows = []
for N in (100, 200, 400, 800):
    inputs = [torch.randn(1, 1, N, 64) for _ in range(3)]
    rows.append((N, "FA1, Bc = 32", traffic(fa1, *inputs), predicted("03_fa1_fp32", N, 64).to_numpy().sum()))
    rows += [(N, name, traffic(run, *inputs), fa2_bytes(N, 64, Br)) for name, (Br, run) in runs.items()]
    rows.append((N, "three passes", None, 4 * (4 * N * N + 4 * N * 64)))
lines = pd.DataFrame(rows, columns=["N", "by", "counted", "predicted"])
lines["counted"] = [None if c is None else (c.bytes_read + c.bytes_written).sum() for c in lines.counted]
counts = lines.dropna()
print(f"{(counts.counted == counts.predicted).sum()} of {len(counts)} counts agree with the formula to the byte")

# %%
draw.bytes_against(lines, x="N", by="by", title="Bytes requested from HBM, one head, d = 64")

# %% [markdown]
# **What to see.** Markers are counts, lines are the formulas of section 2. All have slope 2 in the end; twice the $B_r$ is half the bytes. (At $N = 100$ one tile of 128 rows holds everything, and 256 changes nothing.) With $B_r = 64$ FA2 is below the dashed line, the $4N^2 + 4Nd$ elements of three ideal passes: here tiling saves traffic, too.
# FA1 needed $B_c > \frac34 d$ for that, FA2 needs $B_r > \frac12 d$ and has it to spare.

# %% [markdown]
# Does the machine code do what the derivation says? `sass.histogram` compiles the kernel with nvcc (no GPU needed) and counts the instructions in the result. `FFMA` is the fp32 multiply-add, `LDS.128` a 16-byte load from shared memory;
# the rest is softmax, addresses and loops. These are instructions in the code, not executed ones. In `multiply` the loop over $k$ is unrolled 16 at a time, so the code of 04 should hold 16 steps of each product: $2 \cdot 16 \cdot 64 = 2048$ multiply-adds and $2 \cdot 16 \cdot 4 = 128$ loads of 16 bytes.

# %%
names = ["03_fa1_fp32", "04_fa2_fp32"]
code = {name: sass.histogram(name, modifiers=True)[f"{name[3:]}<64>"] for name in names}
opcodes = pd.DataFrame(code).fillna(0).astype(int)
print((opcodes.loc["FFMA"] / opcodes.sum()).map("{:.0%} of the instructions are multiply-adds".format).to_string())
loaded, done = 16 * opcodes.loc["LDS.128", "04_fa2_fp32"], 2 * opcodes.loc["FFMA", "04_fa2_fp32"]
print(f"04_fa2_fp32: {loaded / done:.2f} bytes of shared memory per FLOP")
opcodes.sort_values("04_fa2_fp32", ascending=False).head(8)

# %% [markdown]
# The derivation said 0.5 bytes per FLOP; the code has a little less, because the multiply-adds beyond 2048 belong to the softmax and the epilogue and load nothing.
#
# That is what the threads ask for. What the hardware delivers is less, as lanes that want the same word share it. Shared memory answers in **wavefronts**, passes of up to 128 bytes, and Nsight Compute counts them; where banks collide, it needs more wavefronts for the same request:

# %%
counters = pd.concat([record.load(name, "counters", device="nvidia-h200") for name in names])
counters = counters.query("N == 4096").set_index("rung")
flops = record.forward_flops(1, 16, 4096, 4096, 64)
shared = pd.DataFrame({"bytes per FLOP, loads": 128 * counters.shared_load_wavefronts / flops})
for way in ("load", "store"):
    shared[f"conflicts / wavefronts, {way}s"] = (
        counters[f"shared_{way}_conflicts"] / counters[f"shared_{way}_wavefronts"]
    )
print(f"{counters.device.iloc[0]}, B = 1, H = 16, N = 4096, d = 64")
shared.round(2)

# %% [markdown]
# An SM delivers 0.5 bytes per FLOP. So the reads of `03_fa1_fp32` hold it below half of the arithmetic, with no bank conflict to blame: its tiles of 2 × 4 elements per thread are too small. `04_fa2_fp32` stays under the line, and its reads are free of conflicts, too. (Its transposed stores are not: nearly half of their wavefronts are conflicts.
# But there is one wavefront of stores to about seven of loads.)

# %% [markdown]
# ### The X-ray
#
# Which stores are they? The counters have one sum for a whole kernel, the X-ray (notebook 03) a count for every line. At a size that both have seen:

# %%
small = [x[:, :, :256] for x in (q, k, v)]
ray = xray(kernel, *small)
gpu = record.load("04_fa2_fp32", "counters", device="nvidia-h200").query("N == 256 and H == 2").iloc[0]
for op in ("load", "store"):
    here, there = ray.total(space="shared", op=op), gpu[f"shared_{op}_conflicts"]
    print(f"bank conflicts of {op}s: {here.excess} in the X-ray, {there} on the {gpu.device}")
ray

# %%
ray.bank_map("fa::store<T::stage>(K_smem")

# %% [markdown]
# **What to see.** Two lines have all the conflicts: those that store $K$ and $Q$ *transposed*. (On the card a count of loads can be off by a few.) The picture is of one store to `K_smem`. A lane holds four keys of one column and stores them side by side; the next lane's column lies four rows further down, and a row is `ld_k` = 68 floats long. $4 \cdot 68 = 272$, which is 16 modulo 32: so
# the eight lanes that are served together meet in two groups of four banks, and take four turns instead of one.
#
# Would another padding do, and what does it do to the untransposed rows of `03_fa1_fp32`?

# %%
pads = {"03_fa1_fp32": "ld = d + {0}, ld_p = Bc + {0}", "04_fa2_fp32": "ld_q = Br + {0}, ld_k = d + {0}"}
padded = {
    (name, pad): replace(rung(name), source=alone(rung(name).replace(text.format(4), text.format(pad))))
    for name, text in pads.items()
    for pad in (0, 4, 8)
}
compile_ahead(padded.values(), "xray")  # side by side

# %%
rays = {at: xray(padded_rung, *small) for at, padded_rung in padded.items()}
table = {}
for op in ("load", "store"):
    totals = {at: x.total(space="shared", op=op) for at, x in rays.items()}
    table[f"{op}s: wavefronts"] = {at: total.cost for at, total in totals.items()}
    table[f"{op}s: conflicts"] = {at: total.excess for at, total in totals.items()}
pd.DataFrame(table).rename_axis(["kernel", "floats of padding"])

# %% [markdown]
# **What to see.** Rows as they come (03): conflicts, of loads above all, unless each row begins an odd multiple of four banks further on; padding by 4 cures all of it. Transposed (04): no load conflicts, whatever the padding. (That its loads are fewer is the register tiles' doing.) The stores pay for that; padding by 4 more than halves their conflicts, and no padding ends them:
# a store of 16 bytes needs a row length that is a multiple of 4, and four such rows are a multiple of 16 floats, so that their columns begin in bank 0 or 16. The cure is to permute the banks instead, a **swizzle**, and has a notebook of its own, 11.
# For the stores of $K$ it would save 6,912 of 118,016 wavefronts here.

# %% [markdown]
# ### Memory and error
#
# $O$ and LSE are all that a call allocates, $4 (Nd + N)$ bytes per head: `04_fa2_fp32` has no workspace.

# %%
plot.memory(record.load("04_fa2_fp32", "memory"))

# %%
plot.error(record.load("04_fa2_fp32", "error"))

# %% [markdown]
# **What to see.** Above: $O(N)$ up to $N = 65536$, next to PyTorch's EFFICIENT and three orders of magnitude below MATH at the right end. Below: both errors stay well inside the budget. The error of $O$ is about that of plain PyTorch and, at long $N$, two to three times that of
# `03_fa1_fp32` (notebook 03). A likely reason: 04 adds all $N$ products of an element into one register, where 03 adds up 32 at a time and then merges. Waiting with the division costs a little accuracy; the budget has room for it.

# %% [markdown]
# ## Why a naive FlashAttention-2 can be slower than FlashAttention-1
#
# A public pair of kernels, [Flash-Attention by raymond1123](https://github.com/raymond1123/Flash-Attention), implements version 1 and version 2 "in naive manner". Its README gives these times, in microseconds, and its author remarks that version 2 is slower both in fp32 and fp16,
# and that something must be wrong in the code:

# %%
published = record.published("naive_v1_v2_forward_backward")
published = published.pivot_table(index=["dtype", "pass"], columns="version", values="kernel_us")
published["FA2 / FA1"] = (published.FA2 / published.FA1).round(2)
published

# %% [markdown]
# GPU and shape are not stated, so these times cannot be repeated. (A later version of its benchmark script has $B = 2$, $H = 12$, $N = 128$, $d = 32$.) But its forward kernels can be read (`fp32/fa_1` and `fp32/fa_2`, commit c598160). Both start one CTA of 32 threads per head; each thread computes one row of $S$ and of $O$, element by element, from tiles in shared memory.
# From version 1 to version 2 the two loops change places, $m$ and $l$ stay in registers and the division moves to the end. Two things stay as they were: $O$ is read from and written to HBM in the inner loop, and there is still one CTA per head.
#
# So of the points above, this version 2 has the loop order and the single division, but not what they are good for. We write such a kernel ourselves and count. It keeps $m$ and $l$ in HBM as well, so that its two loops can be swapped by exchanging two lines of text, with nothing else changed.
#
# It is typed in pieces, each a string. First the header block, and the loading of a tile, to which each thread contributes a row:

# %%
load_source = r"""// naive: one thread per query row, one CTA per head
// D:         64
// workspace: m (B,H,Nq) fp32; l (B,H,Nq) fp32
#include <fa/args.cuh>
#include <fa/math.cuh>
constexpr int d = 64, Br = 32, Bc = 32;

__device__ const float *head(const void *X, const int64_t (&stride)[3], int H) { // this CTA's head of X, (N, d)
  return (const float *)X + blockIdx.x / H * stride[0] + blockIdx.x % H * stride[1];
}
__device__ void load_tile(float *X_smem, const float *X, int64_t stride, int r0, int N) { // rows r0 .. r0 + 32
  const int r = r0 + threadIdx.x;
  for (int x = 0; x < d; ++x) X_smem[threadIdx.x * d + x] = r < N ? X[r * stride + x] : 0.f;
}
"""

# %% [markdown]
# Then the scores of one row, and its share of lines 10 to 13. One thread does all of this for its row, element by element.

# %%
scores_source = r"""
// p (Bc) = scale q K_j^T for one row; returns the maximum of m and p
__device__ float scores(float *p, const float *q, const float *K_smem, int keys, float scale, float m) {
  for (int c = 0; c < keys; ++c) {
    float s = 0.f;
    for (int x = 0; x < d; ++x) s += q[x] * K_smem[c * d + x]; // two values from shared memory, one multiply-add
    p[c] = scale * s;
    m = fmaxf(m, p[c]);
  }
  return m;
}
"""

# %%
merge_source = r"""
// p (Bc) becomes P~, and the row's o (d), m and l in HBM take the tile in; returns the new l
__device__ float merge(float *o, float *m, float *l, float *p, float m_new, const float *V_smem, int keys, bool first) {
  const float kept = first ? 0.f : expf(*m - m_new) * *l;
  float l_new = kept;
  for (int c = 0; c < keys; ++c) p[c] = expf(p[c] - m_new), l_new += p[c];
  for (int x = 0; x < d; ++x) {
    float pv = 0.f;
    for (int c = 0; c < keys; ++c) pv += p[c] * V_smem[c * d + x];
    o[x] = ((first ? 0.f : kept * o[x]) + pv) / l_new;
  }
  *m = m_new, *l = l_new;
  return l_new;
}
"""

# %%
step_source = r"""
// Row i meets the tile of keys that starts at j0
__device__ void step(const fa_args &a, int i, int j0, const float *Q_smem, const float *K_smem, const float *V_smem,
                     float *P_smem) {
  const int64_t row = int64_t(blockIdx.x) * a.Nq + i;
  float *m = (float *)a.workspace[0] + row, *l = (float *)a.workspace[1] + row;
  float *o = (float *)head(a.O, a.O_stride, a.H) + i * a.O_stride[2], *p = P_smem + threadIdx.x * Bc;
  const int keys = min(Bc, a.Nk - j0);
  const float m_old = j0 == 0 ? -FA_INFINITY : *m;
  const float m_new = scores(p, Q_smem + threadIdx.x * d, K_smem, keys, a.scale, m_old);
  a.LSE[row] = m_new + logf(merge(o, m, l, p, m_new, V_smem, keys, j0 == 0));
}
"""

# %% [markdown]
# And the two loops, with the keys outside as in FlashAttention-1. A tile is loaded when its index has changed since the last step.

# %%
loops_source = r"""
__global__ void naive(const fa_args a) {
  __shared__ float Q_smem[Br * d], K_smem[Bc * d], V_smem[Bc * d], P_smem[Br * Bc];
  const float *Q = head(a.Q, a.Q_stride, a.H), *K = head(a.K, a.K_stride, a.H), *V = head(a.V, a.V_stride, a.H);
  int i_was = -1, j_was = -1;
  for (int j0 = 0; j0 < a.Nk; j0 += Bc) {
    for (int i0 = 0; i0 < a.Nq; i0 += Br) {
      __syncthreads(); // the tiles have been read before they are overwritten
      if (j0 != j_was) load_tile(K_smem, K, a.K_stride[2], j0, a.Nk), load_tile(V_smem, V, a.V_stride[2], j0, a.Nk);
      if (i0 != i_was) load_tile(Q_smem, Q, a.Q_stride[2], i0, a.Nq);
      __syncthreads(); // and are written before they are read
      if (i0 + threadIdx.x < a.Nq) step(a, i0 + threadIdx.x, j0, Q_smem, K_smem, V_smem, P_smem);
      i_was = i0, j_was = j0;
    }
  }
}
"""

# %%
launch_source = r"""
extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
  naive<<<a->B * a->H, Br, 0, stream>>>(*a);
  return cudaGetLastError();
}
"""
naive = load(source=load_source + scores_source + merge_source + step_source + loops_source + launch_source)
check(naive, reference.cases(naive.rung, device)).require()  # the small cases: this kernel is slow

# %% [markdown]
# Exchange the two `for` lines, and nothing else:

# %%
keys, queries = "for (int j0 = 0; j0 < a.Nk; j0 += Bc)", "for (int i0 = 0; i0 < a.Nq; i0 += Br)"
swapped = load(source=naive.source.replace(keys, "<keys>").replace(queries, keys).replace("<keys>", queries))
check(swapped, reference.cases(swapped.rung, device))

# %% [markdown]
# Right in either order: the proof of section 1, run. Before counting, predict. Per inner step, the order of FA1 reads one new tile of 32 × $d$ ($Q_i$), the order of FA2 two ($K_j$ and $V_j$). Both read and write $O_i$. So FA2's order should request $2 + 2 = 4$ tiles where FA1's requests $1 + 2 = 3$:
# a third *more*.

# %%
four = {"naive, keys outside": naive, "naive, queries outside": swapped, "03_fa1_fp32": fa1, "04_fa2_fp32": kernel}
inputs, rows = [torch.randn(1, 2, 256, 64) for _ in range(3)], {}
for label, run in four.items():
    counted = traffic(run, *inputs)
    rows[label] = (counted["bytes_read"] + counted["bytes_written"]).reindex(guess.index).fillna(0) / 2**20
bytes_mib = pd.DataFrame(rows).T
bytes_mib["all"] = bytes_mib.sum(axis=1)
bytes_mib.round(2)

# %%
ratio = bytes_mib.loc["naive, queries outside", "all"] / bytes_mib.loc["naive, keys outside", "all"]
print(f"naive, queries outside / keys outside: {ratio:.2f} times the bytes")

# %% [markdown]
# The prediction, 4/3, has only what moves at every step. The count also has the tiles that are loaded once ($K$ and $V$ in one order, $Q$ in the other) and $m$, $l$ and LSE, and it lacks the reading of $O$ at a row's first tile. With only eight tiles of keys that is enough to bring 1.33 down to 1.27. So the swap *alone* costs bytes: $O$ still travels, and two tiles are loaded where it was one.
#
# Does it cost time? Only as far as the kernel waits for HBM. At the measured copy bandwidth the bytes would allow the first two rates below; the last line is what a published kernel of this kind reaches.

# %%
copy = record.load("device", "ceilings").query("name == 'copy'").value.median()
flops = record.forward_flops(1, 2, 256, 256, 64)
for label in ("naive, keys outside", "naive, queries outside"):
    print(f"{label}: HBM would allow {copy * flops / (bytes_mib.loc[label, 'all'] * 2**20):.0f} TFLOP/s")
minimal = record.published("h200_peers").query("peer == 'flash-attention-minimal'")
low, high = minimal.tflops.min(), minimal.tflops.max()
print(f"flash-attention-minimal, one thread per row too: {low:.1f} to {high:.1f} TFLOP/s on an H200")

# %% [markdown]
# Two orders of magnitude lie between them, so HBM is not what a kernel of this kind waits for. Three counts point to what is:

# %%
lanes, d = np.arange(32), 64
banks = (lanes * d + 0) % 32  # Q_smem[t * d + x] at x = 0: the bank of each lane's word
conflicts = np.bincount(banks).max()
B, H, N = 2, 12, 1024  # for the number of CTAs
naive_column = ["1 × 1", 2 * (1 / 1 + 1 / 1), conflicts, 1, B * H]
fa2_column = ["8 × 8", 2 * (1 / 8 + 1 / 8), 1, 4, B * H * math.ceil(N / 128)]
labels = ["thread tile", "shared bytes per FLOP", "lanes in the fullest bank, reading Q", "warps per CTA", "CTAs"]
pd.DataFrame({"naive, either order": naive_column, "04_fa2_fp32": fa2_column}, index=labels)

# %% [markdown]
# 1. **No register tile.** Each multiply-add needs two values from shared memory: 4 bytes per FLOP, eight times what the SM can feed. (Half of that, the element of $K$ or $V$, is the same for all lanes and read once. The other half is worse than counted:)
# 2. **Bank conflicts.** Lane $t$ reads row $t$ of $Q$, and rows are $d = 64$ floats apart: all 32 lanes want a word of the same bank, which hands them out one after the other. (Where the compiler fetches four neighbouring words at once, eight accesses instead of 32 for each of them.)
# 3. **One warp per CTA and one CTA per head.** One warp cannot hide its own waiting, and 24 CTAs occupy 24 of 132 SMs.
#
# None of the three depends on the order of the loops. So predict: against what these three cost, the order should hardly matter, in one direction or the other. On a GPU the next cell times the four kernels ($B = 2$, $H = 12$, $N = 1024$, $d = 64$); elsewhere it shows the times recorded on an H200.

# %%
if device == "cuda":
    inputs = [torch.randn(2, 12, 1024, 64, device=device) for _ in range(3)]
    samples = bench.measure(four, inputs)  # record.save("04_fa2_fp32", "loop_order", samples) keeps them in data/
else:
    samples = record.load("04_fa2_fp32", "loop_order")
ms = samples.groupby("name").ms.median().reindex(list(four))
pd.DataFrame({"ms": ms.round(3), "times faster than naive, keys outside": (ms.iloc[0] / ms).round(2)})

# %% [markdown]
# On the H200 the order of FA2 is 1.2 times *faster* here, against the direction of the bytes: it requests more. (Requests are not HBM traffic. With the queries outside, the same 32 rows of $O$ are updated in every step, so they
# probably stay in the SM's L1 cache; we have not measured it.) In the published pair version 2, with its further changes, came out 6 % (fp32) to 11 % (fp16) slower in the forward pass. The two agree in this: on a kernel of this kind, the order of the loops alone moves the time a little, one way or the other.
#
# Hold that against the last two rows. `03_fa1_fp32` has the *same* loop order as the first row, and with eight warps per CTA, padded rows in shared memory and small register tiles it is some 37 times faster. `04_fa2_fp32` is nearly 400 times faster.
#
# What cures it, in the order of the sections above: $O$, $m$, $l$ in registers (that is what the loop order is *for*), a CTA per query tile (likewise), and then register tiles, so that the arithmetic units rather than shared memory set the pace.

# %% [markdown]
# ## Beside its peers
#
# The recorded runs of this rung beside PyTorch's own attention in fp32, TF32 off; first as TFLOP/s, then as ratios.

# %%
samples = record.load("04_fa2_fp32")
plot.throughput(samples)

# %%
plot.ratio(samples, "04_fa2_fp32", ["SDPA MATH", "SDPA EFFICIENT"])


# %%
def mean(ratios):
    """The geometric mean over N >= 1024 for each D, of a Series of ratios indexed by D and N."""
    long = ratios[ratios.index.get_level_values("Nq") >= 1024].dropna()
    return np.exp(np.log(long).groupby("D").mean()).round(2)


headline, shape = record.headline(samples), ["D", "Nq"]
faster = {}
for peer in ("SDPA MATH", "SDPA EFFICIENT"):
    faster[peer] = mean(record.ratio(headline, "04_fa2_fp32", peer).set_index(shape)["ratio"])
ms = record.medians(recorded).set_index(["name", *shape])["ms"]
faster["03_fa1_fp32"] = mean(ms["03_fa1_fp32"] / ms["04_fa2_fp32"])
pd.DataFrame(faster)

# %% [markdown]
# How many times faster than each, as the geometric mean over $N \ge 1024$. The two kernels of PyTorch ran interleaved with ours; `03_fa1_fp32` was recorded in a run of its own.
#
# **What to see.** In the ratios, above 1 means that ours is the faster one; the bars span the lowest and the highest round. On the H200 it is faster than MATH everywhere. Against EFFICIENT it is a fifth faster at $d = 64$ and about level at $d = 128$: a percent behind at $N = 512$, five percent ahead at $N = 16384$.

# %% [markdown]
# ### Against the machine
#
# The roofline of the notebooks before. The bytes are those that
# threads request (section 2); what the L2 cache catches does not reach HBM, so the true points lie further to the right. The shape is $B = 4$, $H = 32$, $N = 4096$, $d = 64$.

# %%
B, H, N, D = 4, 32, 4096, 64
medians = record.medians(recorded).query("D == @D and Nq == @N")
points = medians[["name", "ms"]].assign(flops=record.forward_flops(B, H, N, N, D))
points["bytes"] = [predicted(name, N, D, heads=B * H).to_numpy().sum() for name in points.name]
ceilings = record.load("device", "ceilings")
plot.roofline(points, ceilings)

# %% [markdown]
# **What to see.** FlashAttention-1's requests put it left of the ridge, the corner where the two roofs meet: were they all served by HBM, it could not reach the flat roof even with perfect arithmetic. FlashAttention-2 stands well to the right of it, so bandwidth is no longer what it has to worry about. Its distance to the flat part is what is
# left to gain on these arithmetic units.

# %% [markdown]
# ## What still hurts
#
# How far is the flat roof, and is it the last one?

# %%
top = ceilings.groupby("name").value.median()
best = record.medians(record.headline(samples)).query("name == '04_fa2_fp32'").groupby("D").tflops.max()
print(f"{record.about('device', 'ceilings')['device']}:")
for D, tflops in best.items():
    share = tflops / top["fp32 matmul"]
    print(f"  04_fa2_fp32, D = {D}: {tflops:.1f} TFLOP/s, {share:.0%} of a large fp32 matrix product")
times_faster = top["fp16 matmul"] / top["fp32 matmul"]
print(f"  a large fp16 matrix product runs at {times_faster:.0f} times the rate of an fp32 one")

# %% [markdown]
# The last line is the point. In fp32 the products run on the **CUDA cores**, one multiply-add per lane and instruction, and no loop order changes their number. The same SM has **tensor cores**, which multiply small matrices of 16-bit numbers in one instruction. Notebook 10 gives them the two products, and everything
# around them (the layout of the tiles, who holds which element, what has to pass through shared memory) has to be thought through again.

# %% [markdown]
# ## Exercises
#
# ### Exercise 4.1 · Three faults, three fingerprints
#
# Each kernel below has one fault: its `scale` lacks the factor $\log_2 e$, or it forgets to `rescale` $l$, or it does not mask the `tail` of the last tile of keys. The table says which inputs each gets right.
# Which is which? There are 16 queries and $N$ keys; $B_c = 64$ at $d = 64$; "equal scores" means $K = 0$.

# %%
faults = {
    "scale": ("a.scale * fa::log2_e", "a.scale"),
    "rescale": ("l_reg[r] = l_reg[r] * alpha + row_sum", "l_reg[r] = l_reg[r] + row_sum"),
    "tail": ("if (j0 + Bc > a.Nk)", "if (false)"),
}
lineup = dict(zip(("kernel 1", "kernel 2", "kernel 3"), random.Random(8).sample(sorted(faults), 3)))
original = rung("04_fa2_fp32")
suspects = {name: load(source=original.replace(*faults[fault]), quiet=True) for name, fault in lineup.items()}

# %%
cases = []
for N, spread in [(64, 1), (128, 1), (100, 1), (128, 0), (100, 0)]:
    inputs = [torch.randn(1, 1, n, 64, device=device) for n in (16, N, N)]
    name = f"N = {N}" + ("" if spread else ", equal scores")
    cases.append(reference.Case(name, q=inputs[0], k=spread * inputs[1], v=inputs[2]))

evidence = {
    name: check(suspect, cases).frame.groupby("case", sort=False)["ok"].all() for name, suspect in suspects.items()
}
pd.DataFrame(evidence).replace({True: "right", False: "WRONG"})

# %% [markdown]
# `check` also draws where the output is wrong. Kernel 1 on two tiles of keys:

# %%
print(check(suspects["kernel 1"], [cases[1]]))

# %%
# Exercise 4.1
answer = {"kernel 1": None, "kernel 2": None, "kernel 3": None}  # "scale", "rescale" or "tail"

# %%
exercise.verify(
    "4.1",
    answer == lineup,
    hint="with one tile there is nothing to rescale; with equal scores every P is 1, whatever the scale",
)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# answer = {"kernel 1": "rescale", "kernel 2": "scale", "kernel 3": "tail"}
# ```
#
# A wrong scale shows wherever scores differ, at any $N$. A missing rescale needs at least two tiles *and* a maximum that rises. A missing tail mask needs an $N$ that is no multiple of $B_c$, and shows even with equal scores, since the zero-filled keys
# get the same weight as the others.
#
# </details>

# %% [markdown]
# ### Exercise 4.2 · Twice the head dimension
#
# The constants of the region `tile` depend on $d$. Predict, for $d = 128$ and $N = 512$, one head: the bytes that are requested for $K$ and $V$ together, and the shared memory of a CTA in bytes.

# %%
# Exercise 4.2
kv_bytes = 0
smem_bytes = 0


# %%
def doubled():
    counted = traffic(kernel, *(torch.randn(1, 1, 512, 128) for _ in range(3))).bytes_read[["K", "V"]].sum()
    assert kv_bytes == counted, f"the bytes for K and V are not {kv_bytes}"
    kb = int(re.search(r"D=128: .*smem=(\d+) KB", rung("04_fa2_fp32").tiles)[1])  # the header block
    assert round(smem_bytes / 1024) == kb, f"the shared memory is not {smem_bytes} bytes"
    return True


exercise.verify(
    "4.2",
    doubled,
    hint="the region `tile`, from top to bottom: TX = 16, TY = 2, 16 rows per warp, so Br = 64 and 8 query tiles",
)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# Br, Bc, d, Ks = 64, 128, 128, 16
# kv_bytes = 4 * (512 // Br) * 2 * 512 * d
# smem_bytes = 4 * (d * (Br + 4) + Bc // 2 * (Br + 4) + 4 * Ks * (d + 4))
# ```
#
# Compared with $d = 64$, the traffic of K and V is fourfold: twice the columns, and twice the passes, because $B_r$ was halved to keep the 8 × 8 register tiles. This is the $d^2$ of $\Theta(N^2 d^2 / M)$ again, now with the registers in the part of $M$.
#
# </details>

# %% [markdown]
# ### Exercise 4.3 · Long and thin
#
# A colleague proposes 16 × 4 elements per thread instead of 8 × 8: the same 64 accumulators. Write the cost function and give the verdict.


# %%
# Exercise 4.3
def bytes_per_flop(TM, TN):
    """Bytes of shared memory that a thread loads for each FLOP of a TM x TN outer product, fp32."""


better = None  # (16, 4) or (8, 8)


# %%
def costed():
    for TM, TN, expected in [(1, 1, 4.0), (8, 8, 0.5), (16, 4, 0.625), (4, 16, 0.625), (2, 32, 1.0625)]:
        assert bytes_per_flop(TM, TN) == expected, f"bytes_per_flop({TM}, {TN}) should be {expected}"
    return better == (8, 8)


exercise.verify("4.3", costed, hint="per k: TM + TN values of 4 bytes, TM TN multiply-adds of 2 FLOPs")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# def bytes_per_flop(TM, TN):
#     return 4 * (TM + TN) / (2 * TM * TN)
#
#
# better = (8, 8)
# ```
#
# For a given area, a square has the shortest perimeter.
#
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why can FA2's outer loop be spread over CTAs, and FA1's not?</summary>
#
# FA2's outer loop runs over query tiles, and no two of them share a row of $O$, $m$ or $l$. FA1's runs over key tiles, each of which updates every row.
#
# </details>
# <details><summary>2. Which tile decides FA2's traffic, and what limits it?</summary>
#
# $B_r$: K and V are read once per query tile. It is limited by the registers for $O$ and $S$ and by the shared memory for $Q_i$ and $\tilde P$.
#
# </details>
# <details><summary>3. What does "divide once" save, per tile?</summary>
#
# $B_r d$ divisions, and one of two multiplications per element of $O$. It saves no exponentials but $B_r$ of them.
#
# </details>
# <details><summary>4. A kernel gives each thread a 4 × 4 tile. What share of the FMA units can it keep busy at most, by shared memory alone?</summary>
#
# It asks for $2(1/4 + 1/4) = 1$ byte per FLOP, twice what 128 bytes per clock feed: half.
#
# </details>
# <details><summary>5. Someone swaps the loops of a one-row-per-thread kernel and finds it no faster. What would you look at first?</summary>
#
# Whether $O$ is still in HBM, whether the grid grew, and how many bytes of shared memory each FLOP costs.
#
# </details>
# <details><summary>6. What would make this kernel several times faster without changing the algorithm?</summary>
#
# Units that do more multiply-adds per byte from shared memory: tensor cores. Notebook 10.
#
# </details>
