# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 03 · FlashAttention-1 in fp32
#
# **After this notebook you can**
# - explain how attention is computed one tile of keys at a time, and what each row has to remember between tiles;
# - do the IO count of a tiled kernel by hand, tensor by tensor, and have it confirmed to the byte by a run;
# - judge when tiling saves traffic, when it does not, and what keeps this kernel from filling a GPU.
#
# **Time** 60 minutes.
#
# **Needs** [01 · Naive attention](01_naive.ipynb) and [02 · Online softmax](02_online_softmax.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: hold a tile of K and V on the chip, lead every tile of Q past it, and let only O, m and l travel.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import math
import re
from collections import Counter

import numpy as np
import pandas as pd
import torch

from helpers import check, draw, exercise, load, plot, record, reference, rung, show, traffic, xray

torch.manual_seed(0)
kernel = load("03_fa1_fp32")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 01 computed $S = QK^\top$, $P = \mathrm{softmax}(S)$ and $O = PV$ as three kernels. $S$ and $P$ have $N \times N$
# elements per head, and all of them went out to memory and came back. Notebook 02 cut the softmax down to one pass over $S$, but
# $S$ still had to exist. The cell below says what that costs in space.

# %%
N = np.array([1024, 4096, 16384, 65536])
pd.DataFrame({"N": N, "Q, K, V, O (MiB)": 4 * 4 * N * 64 / 2**20, "S and P (MiB)": 2 * 4 * N**2 / 2**20}).set_index("N")

# %% [markdown]
# One head, $d = 64$, fp32. The tensors we were given grow with $N$, the ones we invented grow with $N^2$.
#
# Two memories matter from here on: **HBM**, where tensors live, and the small memory inside each SM, which the paper calls **SRAM**. CUDA calls the part of it that
# a programmer controls **shared memory** and lends it to one **CTA** (cooperative thread array, CUDA's other name for a block). On compute
# capability 9.0 a CTA can have up to 227 KB of it (CUDA C++ Programming Guide, compute capabilities). The paper's letter $M$ is the number of *elements* SRAM holds.
#
# A tile of $S$, say 64 × 32, fits into SRAM with room to spare. If a tile could be made, used and thrown away on the chip, $S$
# would never be seen in HBM. What stands in the way is the softmax: the first tile of a row cannot be normalised before the last
# one is known. Notebook 02 has the tool that removes this obstacle.

# %% [markdown]
# ## The state of a row can carry its output
#
# Take one query row with scores $s_1, \dots, s_N$. For a set $A$ of keys, define
#
# $$ m_A = \max_{j \in A} s_j, \qquad l_A = \sum_{j \in A} e^{s_j - m_A}, \qquad o_A = \frac{1}{l_A} \sum_{j \in A} e^{s_j - m_A}\, v_j . $$
#
# $(m_A, l_A)$ is the state of notebook 02. The new member $o_A$ is attention restricted to the keys in $A$. For $A$ = all keys it
# is the row of $O$ we want.
#
# **Claim.** For disjoint $A$ and $B$, the state of $A \cup B$ follows from the two states alone:
#
# $$ m = \max(m_A, m_B), \qquad l = e^{m_A - m}\, l_A + e^{m_B - m}\, l_B, \qquad
#    o = \frac{e^{m_A - m}\, l_A\, o_A + e^{m_B - m}\, l_B\, o_B}{l} . $$
#
# **Proof.** By definition $l_A\, o_A = \sum_{j \in A} e^{s_j - m_A} v_j$. Multiply by $e^{m_A - m}$: the old maximum cancels, and
# what is left is $\sum_{j \in A} e^{s_j - m} v_j$. The same for $B$. The sum of the two runs over $A \cup B$ and uses the maximum
# of $A \cup B$; so does $l$, by the same step without $v_j$. Their quotient is the definition of $o_{A \cup B}$. ∎
#
# Three consequences, all used later:
#
# 1. The result does not depend on how the keys are cut into tiles, nor on the order in which the tiles are merged.
# 2. After some tiles, $o$ is not a half-finished sum: it is the *exact* attention over the keys seen so far.
# 3. The empty set has $m = -\infty$, $l = 0$, $o = 0$, and merging with it changes nothing. That is the starting value.

# %% [markdown]
# ## Algorithm 1, line by line
#
# This is Algorithm 1 of FlashAttention (Dao et al. 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135)), in our words
# and the paper's line numbers. $B_r$ is the number of query rows in a tile, $B_c$ the number of keys; $T_r = \lceil N / B_r \rceil$ and
# $T_c = \lceil N / B_c \rceil$ are the numbers of tiles.
#
# | line | |
# |---|---|
# | 1 | choose $B_c = \lceil M / 4d \rceil$ and $B_r = \min(\lceil M / 4d \rceil, d)$ |
# | 2 | in HBM: $O = 0$, $l = 0$, $m = -\infty$ |
# | 3–4 | cut $Q$, $O$, $l$, $m$ into $T_r$ tiles, $K$ and $V$ into $T_c$ tiles |
# | 5 | **for** each tile $j$ of keys |
# | 6 | load $K_j$, $V_j$ |
# | 7 | **for** each tile $i$ of queries |
# | 8 | load $Q_i$, $O_i$, $l_i$, $m_i$ |
# | 9 | $S_{ij} = Q_i K_j^\top$ |
# | 10 | of this tile alone: $\tilde m = \mathrm{rowmax}(S_{ij})$, $\tilde P = \exp(S_{ij} - \tilde m)$, $\tilde l = \mathrm{rowsum}(\tilde P)$ |
# | 11 | $m^{new} = \max(m_i, \tilde m)$, $\; l^{new} = e^{m_i - m^{new}} l_i + e^{\tilde m - m^{new}} \tilde l$ |
# | 12 | write $O_i \leftarrow \big( l_i\, e^{m_i - m^{new}} O_i + e^{\tilde m - m^{new}} \tilde P V_j \big) / l^{new}$ |
# | 13 | write $l_i \leftarrow l^{new}$, $m_i \leftarrow m^{new}$ |
#
# Lines 11 and 12 are the claim above, with $A$ = the keys of tiles $1 \dots j-1$ and $B$ = the keys of tile $j$. The paper leaves the factor
# $1/\sqrt d$ out of Algorithm 1; we put it into line 9.
#
# To keep the account of what moves, HBM becomes an object: arrays that count the elements read and written.


# %%
class HBM(dict):
    """Arrays in HBM. Every tile that is read or written is counted, in elements."""

    def __init__(self, **arrays):
        super().__init__(arrays)
        self.reads, self.writes = Counter(), Counter()

    def read(self, name, rows):
        self.reads[name] += self[name][rows].size
        return self[name][rows].copy()

    def write(self, name, rows, tile):
        self.writes[name] += tile.size
        self[name][rows] = tile


# %% [markdown]
# What happens on the chip to one tile, lines 9 to 12:


# %%
def fa1_tile(Qi, Kj, Vj, Oi, li, mi):
    """The tile's scores, and its merge into O_i, l_i, m_i."""
    S = Qi @ Kj.T / np.sqrt(Qi.shape[1])  # line 9
    m_tile = S.max(1, keepdims=True)  # line 10
    P = np.exp(S - m_tile)
    l_tile = P.sum(1, keepdims=True)
    m_new = np.maximum(mi, m_tile)  # line 11
    kept, weight = np.exp(mi - m_new) * li, np.exp(m_tile - m_new)
    l_new = kept + weight * l_tile
    return (kept * Oi + weight * (P @ Vj)) / l_new, l_new, m_new  # line 12


# %% [markdown]
# The loops around it then read like the table. They are a generator: it stops after every tile, so that we can look at what HBM holds.


# %%
def fa1(hbm, Br, Bc):
    """Algorithm 1 on hbm's Q, K, V (N, d) and O, l, m; yields (i, j) after each tile."""
    N, d = hbm["Q"].shape
    for j in range(math.ceil(N / Bc)):  # line 5
        keys = slice(j * Bc, (j + 1) * Bc)
        Kj, Vj = hbm.read("K", keys), hbm.read("V", keys)  # line 6
        for i in range(math.ceil(N / Br)):  # line 7
            rows = slice(i * Br, (i + 1) * Br)
            Qi, Oi, li, mi = (hbm.read(name, rows) for name in ("Q", "O", "l", "m"))  # line 8
            O_new, l_new, m_new = fa1_tile(Qi, Kj, Vj, Oi, li, mi)  # lines 9 to 12
            hbm.write("O", rows, O_new)  # line 12
            hbm.write("l", rows, l_new)  # line 13
            hbm.write("m", rows, m_new)
            yield i, j


# %%
def fresh(N, d, seed=0):
    """Random Q, K, V (N, d) in HBM, and line 2: O = 0, l = 0, m = -inf."""
    Q, K, V = np.random.default_rng(seed).standard_normal((3, N, d))
    return HBM(Q=Q, K=K, V=V, O=np.zeros((N, d)), l=np.zeros((N, 1)), m=np.full((N, 1), -np.inf))


def dense(Q, K, V):
    """Attention with the whole of S at once, in float64."""
    S = Q @ K.T / np.sqrt(Q.shape[1])
    P = np.exp(S - S.max(1, keepdims=True))
    return P / P.sum(1, keepdims=True) @ V


# %%
for Br, Bc in [(64, 32), (32, 64), (16, 128), (128, 128), (7, 50)]:
    hbm = fresh(128, 64)
    steps = len(list(fa1(hbm, Br, Bc)))
    error = abs(hbm["O"] - dense(hbm["Q"], hbm["K"], hbm["V"])).max()
    print(f"Br={Br:3d} Bc={Bc:3d}: {steps:3d} tiles, largest difference to dense attention {error:.1e}")

# %% [markdown]
# Consequence 1 in numbers: any cut gives the same answer, up to rounding in float64. In the last line neither tile divides $N$; the last tile of a row or column is cut short there.
#
# Consequence 2 is the induction in the paper's proof of correctness: after outer step $j$, HBM holds the attention over
# the first $j$ tiles of keys. Check it at every step, not only at the end:

# %%
hbm = fresh(128, 64)
worst = 0.0
for i, j in fa1(hbm, Br=64, Bc=32):
    seen, rows = (j + 1) * 32, slice(i * 64, (i + 1) * 64)
    exact = dense(hbm["Q"][rows], hbm["K"][:seen], hbm["V"][:seen])
    worst = max(worst, abs(hbm["O"][rows] - exact).max())
print(f"largest difference to attention over the keys seen so far, over all steps: {worst:.1e}")

# %% [markdown]
# ## The walk
#
# The square is $S$, cut into 4 × 4 tiles; nothing of it is stored. Each panel is one step of the inner loop.

# %%
draw.tile_walk("fa1")

# %% [markdown]
# **What to see.** Green is the tile of $S$ that exists at this step; numbered and pale are the tiles that have been computed and forgotten. Blue is the
# tile of K and V in SRAM: it stays for a whole column (steps 1 to 4), then the next one replaces it (step 5). Orange is the tile of Q and O, which changes at
# every step. Under each panel: what is read from HBM, what is kept from the step before, what is written back. $O_i$ comes
# and goes once per column, so four times altogether. That is the price of this loop order.
#
# The counters of the numpy version tell the same story. Per step of the walk, in elements:

# %%
hbm, rows, before = fresh(256, 64), [], Counter()
for step, (i, j) in enumerate(fa1(hbm, Br=64, Bc=64), start=1):
    now = Counter({f"{n} read": c for n, c in hbm.reads.items()} | {f"{n} written": c for n, c in hbm.writes.items()})
    rows.append({"step": step, "i": i + 1, "j": j + 1} | (now - before))
    before = now
pd.DataFrame(rows).set_index("step").fillna(0).astype(int).head(6)

# %% [markdown]
# ## How many elements cross between HBM and SRAM
#
# Count what the algorithm does, line by line, for one head.
#
# - Line 6: each $K_j$ and $V_j$ is read once in the whole run. Together that is all of $K$ and $V$: $2Nd$ elements.
# - Line 8: for one $j$, the inner loop reads all tiles of $Q$ and $O$: $2Nd$, and all of $l$ and $m$: $2N$.
# - Lines 12–13: for one $j$, it writes all of $O$: $Nd$, and of $l$ and $m$: $2N$.
# - There are $T_c = N / B_c$ values of $j$. Line 2 writes $O$, $l$ and $m$ once more: $Nd + 2N$.
#
# $$ \text{elements} = \underbrace{2Nd}_{K, V} + \underbrace{\tfrac{N}{B_c}\,(3Nd + 4N)}_{Q,\ O,\ l,\ m} + \underbrace{Nd + 2N}_{\text{line 2}} $$
#
# The middle term wins: $3N^2 d / B_c$. $B_r$ does not appear: how the queries are cut is of no concern to this count. Only the number of passes over $Q$
# and $O$ is, and each pass serves $B_c$ keys. So $B_c$ should be as large as SRAM allows.
#
# **How large is that?** Three things have to fit at once:
#
# $$ K_j, V_j:\ B_c\, d = O(M), \qquad Q_i, O_i:\ B_r\, d = O(M), \qquad S_{ij}:\ B_r B_c = O(M) . $$
#
# The first gives $B_c = \Theta(M/d)$, the second $B_r = O(M/d)$. With $B_c = \Theta(M/d)$ the third asks for $B_r = O(M / B_c) = O(d)$. Hence
# $B_r = \Theta(\min(M/d,\, d))$, which is line 1 of the algorithm: a quarter of $M$ for each of $K_j$, $V_j$, $Q_i$, $O_i$, and
# $B_r B_c \le d \cdot M/4d = M/4$ for $S_{ij}$ (five quarters in all: the paper counts up to constants, and so do we). Put $B_c = M / 4d$ into the middle term:
#
# $$ \text{elements} \;\approx\; \frac{3N^2 d}{M / 4d} \;=\; \frac{12\, N^2 d^2}{M} \;=\; \Theta\!\left( \frac{N^2 d^2}{M} \right) . $$
#
# This is Theorem 2 of the paper. It holds for $d \le M \le Nd$: at $M = Nd$ all of $K$ and $V$ fit, and the formula says $\Theta(Nd)$.
#
# **Nothing can do better for every $M$** (the paper's Proposition 3). Suppose an algorithm needed asymptotically fewer than $N^2 d^2 / M$ accesses
# for every $M$ between $d$ and $Nd$. Take $M = Nd$: it would need fewer than $N^2 d^2 / (Nd) = Nd$ accesses. But the inputs have $3Nd$ elements, and
# each must be read at least once. Contradiction.
#
# **Against the three-pass kernel.** Writing $S$, reading it, writing $P$ and reading it moves $4N^2$ elements, plus $4Nd$ for $Q, K, V, O$: $\Theta(Nd + N^2)$.
# The ratio of the two leading terms is
#
# $$ \frac{12 N^2 d^2 / M}{4 N^2} = \frac{3 d^2}{M}, \qquad \text{or with the tile instead of } M: \qquad \frac{3 N^2 d / B_c}{4 N^2} = \frac{3d}{4 B_c} . $$
#
# So tiling saves traffic only if $B_c > \tfrac34 d$. It is not the tiling as such that helps, but a tile that is large for its $d$.
# Keep this in mind when you see the tile of our kernel.
#
# Does the numpy version agree with the formula?


# %%
def fa1_elements(N, d, Bc):
    """Algorithm 1, elements between HBM and SRAM for one head, line 2 included."""
    return 2 * N * d + math.ceil(N / Bc) * (3 * N * d + 4 * N) + N * d + 2 * N


for N, d, Bc in [(128, 64, 32), (256, 64, 32), (256, 32, 64), (512, 64, 128)]:
    hbm = fresh(N, d)
    list(fa1(hbm, 64, Bc))
    counted = hbm.reads.total() + hbm.writes.total() + hbm["O"].size + hbm["l"].size + hbm["m"].size
    print(f"N={N} d={d} Bc={Bc:3d}: formula {fa1_elements(N, d, Bc):8d}, counted {counted:8d}")

# %% [markdown]
# ## The kernel
#
# `kernels/03_fa1_fp32.cu` is Algorithm 1, one CTA per head. The constants first:

# %%
show.region("03_fa1_fp32", "tile")

# %% [markdown]
# 256 threads form a grid of `TY` × `TX`, for $d = 64$ that is 32 × 8. A tile of $S$ is divided evenly: each thread computes `rows` × `keys` of its elements in registers, and
# `rows` × `cols` elements of $\tilde P V_j$. `ld` is the length of a row in shared memory. It is a little longer than $d$. Shared memory
# has 32 **banks**, each 4 bytes wide: word $w$ lies in bank $w \bmod 32$, and a bank serves one address at a time. With rows exactly 64 floats apart, the same column of every row would lie in
# the same bank, and lanes that read different rows would have to wait for each other.
#
# `smem_bytes` gives the 43 KB that a CTA takes at $d = 64$. It asks for them when it is launched (*dynamic* shared memory; beyond 48 KB there is no other way). What nvcc reports in the line at the top,
# 0 KB, is *static* shared memory: arrays of a size that is fixed in the code.
#
# $B_c$ is 32 for every $d$, so for $d = 64$ it is *below* $\tfrac34 d$. This rung is written to be read, with small tiles; what larger ones bring is
# one edit away, below.
#
# Lines 8 to 13 are the body of two nested loops. Line 9:

# %%
show.region("03_fa1_fp32", "scores")

# %% [markdown]
# `load4` moves four floats at once. For every four columns of $Q$ and $K$, a thread loads `rows + keys` such groups from shared memory and
# does `rows × keys × 4` multiply-adds with them. With the loops written out (`#pragma unroll`) every `S_reg[r][c]` has fixed indices and can be a register.
# Line 10:

# %%
show.region("03_fa1_fp32", "softmax")

# %% [markdown]
# `TX` neighbouring lanes of a warp share a row. `row_max` and `row_sum` exchange registers between them
# with **shuffles** (`__shfl_xor_sync`, the butterfly of notebook 02), so no shared memory is needed. Columns past the last key are set to $-\infty$ before the maximum: they weigh $e^{-\infty} = 0$. A row whose
# scores are all $-\infty$ would give $-\infty - (-\infty)$, which is NaN; `m_finite` stands in for the maximum there.
# $\tilde P$ goes to shared memory, because the product $\tilde P V_j$ needs whole rows of it and each thread has only a few of its columns. That product (region `output`) is built like the
# scores. Then lines 11 to 13:

# %%
show.region("03_fa1_fp32", "merge")

# %% [markdown]
# This is the claim from the top of this notebook, once per row. `l_kept` is $e^{m_i - m^{new}} l_i$, `tile_weight` is $e^{\tilde m - m^{new}}$. $O_i$ is loaded from HBM,
# merged, normalised and stored, at every tile. All `TX` threads of a row load $m_i$ and $l_i$, one of them stores. After the last tile of keys the
# row's log-sum-exp goes out: $\mathrm{LSE} = m + \ln l$.

# %% [markdown]
# ## Run and check
#
# `check` runs the kernel on a list of hostile inputs and compares with float64. The budget for each case is twice the error that plain PyTorch makes
# in the same precision on the same input, plus a few units in the last place.

# %%
check(kernel)

# %%
q, k, v = (torch.randn(1, 2, 256, 64, device=device) for _ in range(3))
o, lse = kernel(q, k, v)
exact_o, exact_lse = reference.attention(q, k, v)
print(f"max error of O {(o - exact_o).abs().max():.1e}, of LSE {(lse - exact_lse).abs().max():.1e}")

# %% [markdown]
# ## Predict, then measure
#
# The kernel is Algorithm 1, so the formula should give its traffic, tensor by tensor. One thing differs from the paper's count: all `TX` threads of
# a row ask for $m_i$ and $l_i$. The emulator counts what threads *request*, so for $d = 64$ they count eightfold. Caches are not part of this count; what they make of it
# on a GPU comes right after.
#
# Here is the prediction. Change it if you disagree, then run the cells after it.


# %%
def predicted_bytes(N, d, Bc, heads=1):
    """Bytes that the threads of 03_fa1_fp32 request, by tensor: (read, written)."""
    Tc, TX = math.ceil(N / Bc), 16 if d == 128 else 8
    elements = {
        "Q": (Tc * N * d, 0),
        "K": (N * d, 0),
        "V": (N * d, 0),
        "O": (Tc * N * d, (Tc + 1) * N * d),
        "m": (Tc * N * TX, (Tc + 1) * N),
        "l": (Tc * N * TX, (Tc + 1) * N),
        "LSE": (0, N),
    }
    return pd.DataFrame(elements, index=["read", "written"]).T * 4 * heads


# %%
counted = traffic(kernel, q, k, v)
counted = counted[["bytes_read", "bytes_written"]].set_axis(["read", "written"], axis=1)
table = pd.concat({"predicted": predicted_bytes(256, 64, Bc=32, heads=2), "counted": counted}, axis=1)
table

# %%
agree = (table["predicted"] == table["counted"]).all(axis=1)
print(f"{agree.sum()} of {len(table)} tensors agree to the byte; S and P are not among them")

# %% [markdown]
# How much of that reaches HBM? The paper's model has two levels, SRAM and HBM. A real GPU has the L2 cache between them. Nsight Compute's counters, recorded on an H200 for 16 heads:

# %%
seen = record.load("03_fa1_fp32", "counters", device="nvidia-h200").query("N == 4096 and H == 16").iloc[0]
foreseen, large = predicted_bytes(4096, 64, Bc=32, heads=16), ["Q", "K", "V", "O"]
levels = pd.DataFrame({"predicted, Q K V O": foreseen.loc[large].sum()})
levels["predicted, m l LSE"] = foreseen.drop(large).sum()
levels["requested, counted by the GPU"] = [32 * seen.global_load_sectors, 32 * seen.global_store_sectors]
levels["through HBM"] = [seen.dram_read_bytes, seen.dram_write_bytes]
print(f"{seen.device}, B = 1, H = 16, N = 4096, d = 64, in MiB")
(levels / 2**20).round(1)

# %% [markdown]
# The GPU counts sectors of 32 bytes, and lanes that ask for the same word share one: so the eightfold reads of $m_i$ and $l_i$ shrink, while a sector that is written in part counts whole. $Q$, $K$, $V$ and $O$ come out as predicted.
# Of all this only a few percent reach HBM. $Q$ and $O$ of these 16 heads are 32 MiB together; they fit into the L2, and the many passes over them stay there. With more heads at work at a time, or a smaller L2, they would not.
# Read "HBM" in the counts of this notebook as "whatever lies beyond the SM".

# %% [markdown]
# ### The X-ray
#
# `xray` says what every *line* costs. Global memory answers a warp's request in sectors (notebook 01), shared memory in **wavefronts**: in one wavefront each of the 32 banks hands out one word of 4 bytes, to all lanes that want that word. Lanes that want
# different words of one bank take turns, a wavefront each: a **bank conflict**. Beside each count stands the ideal, which the same bytes would need without conflicts, and in as few sectors as hold them.

# %%
ray = xray(kernel, q, k, v)
ray

# %% [markdown]
# **What to see.** Nothing is wasted: every wavefront and every sector is needed. The two lines at the top of the upper table read $K_j$ for the scores and $V_j$ for the output, 16 bytes for each lane. 32 lanes × 16 bytes are 512, four wavefronts of 128.
# The H200 agrees to the last wavefront:

# %%
gpu = record.load("03_fa1_fp32", "counters", device="nvidia-h200").query("N == 256 and H == 2").iloc[0]
for op in ("load", "store"):
    here, there = ray.total(space="shared", op=op), gpu[f"shared_{op}_wavefronts"]
    print(f"{op}s of shared memory: {here.cost} wavefronts in the X-ray, {there} on the {gpu.device}")

# %% [markdown]
# No request is wasteful; that there are so many is another matter. The same run, bytes by tensor beside the least that any attention has to move:

# %%
ray.traffic()

# %% [markdown]
# **What to see.** With eight tiles of keys, $Q$ is read eight times, $O$ read eight times and written nine. (The table above is there as text, `print(ray)`, and with all lines for pandas, `ray.to_frame()`. `ray.step()` is a widget that steps through the worst request of every line; it needs `ipywidgets`.)
#
# That no request is wasteful is the work of four floats, those in `ld = d + 4`. Take them away and predict: what becomes of the scores, where lane `tx` reads row `tx` of $K_j$? The rows are now 64 floats apart.

# %%
source = rung("03_fa1_fp32").replace("ld = d + 4,", "ld = d,")
bare = xray(load(source=source, device="cpu", quiet=True), q, k, v)
bare.diff(ray).query("cost_before != cost_after")

# %% [markdown]
# `diff` has the totals, before (without padding) and after (with it). Beside the source, the kernel without padding:

# %%
bare.source("scores")

# %%
bare.bank_map("fa::load4(k_reg[c]")  # the worst request of the line with this text

# %%
ray.bank_map("fa::load4(k_reg[c]")

# %% [markdown]
# **What to see.** In the strip, blue is what the bytes need and orange the conflicts. In the first map, without padding: 64 is a multiple of 32, so eight different rows begin in the same bank, eight lanes want different words of the same four banks, and each takes a wavefront of its own, 32 in place of 4. In the second, with it: a row begins four banks further on than the row before, and eight rows fill all 32.
# The results are the same; only a count like this one, or a stopwatch, shows the difference. (Padding by a single float, as for accesses of 4 bytes, is not to be had: rows would begin at addresses that are no multiple of 16, which a 16-byte access must not. The X-ray stops there and says `misaligned`.)

# %% [markdown]
# ### Three exponents
#
# $\Theta(N^2 d^2 / M)$ makes three promises: four times the bytes for twice the $N$; half the bytes for twice the tile; and, when the tile's
# *size in bytes* is fixed so that a larger $d$ means a smaller $B_c$, four times the bytes for twice the $d$. Each can be put to the test by
# editing the constant in the kernel. `rung(...).replace(old, new)` returns the source with one occurrence exchanged.


# %%
def count(N, d, Bc):
    """Bytes requested by one head, all tensors together, with the tile size edited into the kernel."""
    source = rung("03_fa1_fp32").replace("Bc = 32;", f"Bc = {Bc};")
    counted = traffic(load(source=source, device="cpu", quiet=True), *(torch.randn(1, 1, N, d) for _ in range(3)))
    return int((counted.bytes_read + counted.bytes_written).sum())


sizes = [64, 128, 256, 512]
runs = [(N, 64, Bc) for Bc in (32, 64, 128) for N in sizes]
grid = pd.DataFrame(runs, columns=["N", "d", "Bc"])
grid["counted"] = [count(*run) for run in runs]
grid["predicted"] = [int(predicted_bytes(*run).to_numpy().sum()) for run in runs]
grid.pivot(index="N", columns="Bc", values="counted")

# %%
naive = load("01_naive", device="cpu", quiet=True)
asked = [traffic(naive, *(torch.randn(1, 1, N, 64) for _ in range(3))) for N in sizes]
passes = pd.DataFrame({"N": sizes, "predicted": [4 * (4 * N * N + 4 * N * 64) for N in sizes], "Bc": "three passes"})
threads = pd.DataFrame({"N": sizes, "predicted": [4 * (4 * N * N * 64 + 5 * N * N + 65 * N) for N in sizes]})
threads["counted"] = [int((a.bytes_read + a.bytes_written).sum()) for a in asked]
lines = pd.concat([grid, passes, threads.assign(Bc="01_naive")])
draw.bytes_against(lines, x="N", by="Bc", title="Bytes requested from HBM, one head, d = 64")

# %% [markdown]
# **What to see.** Markers are counts from running the kernels, lines are formulas; they coincide. The dashed line is $4N^2 + 4Nd$ elements, the least that three passes move if caches serve
# every repeated request. Without caches each thread of `01_naive` asks for its own rows and columns: $4N^2d$ and more, the line on top (notebook 01).
#
# Every line ends up with slope 2, FlashAttention's included: IO-awareness does not remove the square, it divides it by the tile. With $B_c = 32$ the kernel lies *above* the dashed line, as
# $B_c < \tfrac34 d$ predicted, with 64 and 128 below it. So with this tile FlashAttention-1 saves no traffic against an ideal three-pass kernel; what it always removes is the *space* for $S$ and $P$.
#
# The formula also says that $B_r$ does not matter:

# %%
counts = {}
for Br in (32, 64, 128):
    other = load(source=rung("03_fa1_fp32").replace("d == 128 ? 32 : 64", str(Br)), device="cpu", quiet=True)
    counted = traffic(other, *(torch.randn(1, 1, 256, 64) for _ in range(3)))
    counts[f"Br = {Br}"] = int((counted.bytes_read + counted.bytes_written).sum())
counts

# %% [markdown]
# Now the tile's exponent and the dimension's. In the second sweep $B_c\, d$ is held at 2048 elements, the stand-in for a fixed $M$.

# %%
by_tile = grid[grid.N == 512].set_index("Bc")["counted"]
fixed_m = pd.DataFrame([(512, d, 2048 // d) for d in (32, 64, 128)], columns=["N", "d", "Bc"])
fixed_m["counted"] = [count(*run) for run in fixed_m.itertuples(index=False)]


def slope(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


print(f"N:  exponent {slope(sizes, grid[grid.Bc == 32]['counted']):.2f} (2 for large N)")
print(f"Bc: exponent {slope(by_tile.index, by_tile):.2f} (-1 for large N)")
print(f"d:  exponent {slope(fixed_m.d, fixed_m['counted']):.2f} with Bc d = 2048 (2 for large N)")

# %% [markdown]
# The fitted exponents fall a little short of 2, −1 and 2, for two reasons that the formula names: $3Nd + 2N$ elements do not depend on the tiles at all, and at these small $N$ they still show; and $m$ and $l$ have no factor $d$.
# Take the formula, which the counts have confirmed, for $Q$, $K$, $V$ and $O$ at lengths that no emulator would finish:


# %%
def total(N, d, Bc):
    return predicted_bytes(N, d, Bc).loc[["Q", "K", "V", "O"]].to_numpy().sum()


print(f"N:  exponent {slope(sizes, [total(256 * n, 64, 32) for n in sizes]):.3f}")
print(f"Bc: exponent {slope([32, 64, 128], [total(2**16, 64, Bc) for Bc in (32, 64, 128)]):.3f}")
print(f"d:  exponent {slope([32, 64, 128], [total(2**16, d, 2048 // d) for d in (32, 64, 128)]):.3f}")

# %% [markdown]
# ## Memory: O(N)
#
# What the kernel allocates for its outputs and its workspace: $O$ with $Nd$ elements, LSE, $m$ and $l$ with $N$ each, per head. The three-pass kernel of notebook 01 needs $S$ and $P$ instead
# of $m$ and $l$. Below, these two formulas beside the peak that PyTorch's allocator recorded for one call, up to $N = 65536$.


# %%
def predicted_memory(rung_name, B, H, N, D):
    """Bytes allocated by one call: O, LSE and the workspace."""
    workspace = 2 * N * N if rung_name == "01_naive" else 2 * N
    return 4 * B * H * (N * D + N + workspace)


memory = record.load(kind="memory").query("dtype == 'fp32'")
ours = memory[memory["name"].isin(["01_naive", "03_fa1_fp32"]) & (memory["name"] == memory["rung"])].copy()
ours["predicted"] = [predicted_memory(*row) for row in ours[["name", "B", "H", "Nq", "D"]].itertuples(index=False)]
mib = ours.set_index(["Nq", "name"])[["bytes", "predicted"]].unstack() / 2**20
mib.rename(columns={"bytes": "recorded MiB", "predicted": "predicted MiB"}).round(1)

# %%
plot.memory(memory)

# %% [markdown]
# **What to see.** On these logarithmic axes a line of slope 1 is $O(N)$, of slope 2 is $O(N^2)$. The kernels that tile (ours, that of the next notebook and PyTorch's EFFICIENT) lie on top of each other, at 16 to 17 MiB for $N = 65536$;
# the two that keep $S$ need over 30 GiB there, for a single head, where a model has dozens.

# %% [markdown]
# ## Error, against the budget
#
# A long row adds up more terms, and FlashAttention-1 also multiplies and divides $O$ by $l$ at every tile, which rounds each time. Does the error stay within the budget as $N$ grows?

# %%
plot.error(record.load("03_fa1_fp32", "error"))

# %% [markdown]
# **What to see.** It does. The error of $O$ stays below that of plain PyTorch at every length, presumably because $\tilde P V_j$ adds up 32 terms only, starting from zero, and $O_i$ is a mean, which does not grow while tiles are merged in. The error of LSE does grow: $l$ takes one rounding
# more with each tile and there are 2048 tiles at $N = 65536$. It ends near $2.6 \cdot 10^{-6}$, a little over a quarter of the budget. For scale: LSE is about 12 there, and neighbouring fp32 numbers around 12 are $10^{-6}$ apart.

# %% [markdown]
# ## Beside its peers
#
# The recorded runs: this rung beside PyTorch's own attention in fp32 with TF32 off. `SDPA MATH` is the unfused composition of two matrix products and a softmax;
# `SDPA EFFICIENT` is a fused kernel in the spirit of FlashAttention. The workload keeps $B \cdot N = 16384$ tokens and $H \cdot D = 2048$.

# %%
samples = record.load("03_fa1_fp32")
plot.throughput(samples)

# %%
plot.ratio(samples, "03_fa1_fp32", ["SDPA MATH", "SDPA EFFICIENT"])

# %% [markdown]
# **What to see.** Above: TFLOP/s, counting only the two products. Below: the same runs as a ratio; at 1 both take the same time, below 1 the peer is faster. As long as there are many heads ($N \le 2048$ at $d = 64$) this kernel comes within a few percent of MATH
# and takes twice the time of EFFICIENT. As $N$ grows it falls to a sixth of MATH's speed, at $d = 128$ to a twentieth. Why it falls is told under "What still hurts".

# %%
medians = record.medians(samples)
minimal = record.published("h200_peers").query("peer == 'flash-attention-minimal'").rename(columns={"N": "Nq"})
shape = ["B", "H", "Nq", "D"]
both = medians[medians["name"] == "03_fa1_fp32"].merge(minimal, on=shape, suffixes=(" here", " minimal"))
both["times faster"] = both["ms minimal"] / both["ms here"]
both[[*shape, "ms here", "ms minimal", "times faster"]].round(2)

# %% [markdown]
# [flash-attention-minimal](https://github.com/tspeterkim/flash-attention-minimal) is the best known short FlashAttention-1: one thread per query row, one warp per CTA. Both columns are times on an H200, the
# second from an earlier study (`data/README.md`). Both kernels run the same algorithm with the same IO complexity; what differs is how many threads work on a tile and how often each value that
# was fetched from shared memory is used. Notebook 04 turns that difference into arithmetic.

# %% [markdown]
# ### Against the machine
#
# The roofline of notebooks 00 and 01, for $B = 4$, $H = 32$, $N = 4096$, $d = 64$. Heights are measured. To the right goes FLOPs per byte: for our kernel the bytes it requests, as predicted above; for PyTorch's two the least that their kind can do with.

# %%
points = medians.query("B == 4 and H == 32 and Nq == 4096 and D == 64").copy()
points["flops"] = record.forward_flops(4, 32, 4096, 4096, 64)
moved = {"03_fa1_fp32": predicted_bytes(4096, 64, Bc=32, heads=4 * 32).to_numpy().sum()}
moved |= {"SDPA MATH": 4 * 4 * 32 * (4 * 4096**2 + 4 * 4096 * 64)}
moved |= {"SDPA EFFICIENT": record.forward_bytes(4, 32, 4096, 4096, 64)}
points["bytes"] = points.name.map(moved)
plot.roofline(points, record.load("device", "ceilings"))

# %% [markdown]
# **What to see.** With this small tile, FlashAttention-1 does fewer FLOPs per byte than three ideal passes, as the dashed line among the byte counts said. Yet even at that intensity HBM would allow more than three times its speed. Something else holds this kernel back first.

# %% [markdown]
# ## What still hurts
#
# **One CTA per head.** The launcher starts $B \cdot H$ CTAs, whatever $N$ is. On this workload $B \cdot H = 16384/N \cdot 2048/D$: it halves when $N$ doubles. The H200 has 132 SMs. Predict how much of the machine
# has work, and hold it against the recorded curve:

# %%
SMS, D = 132, 64  # the H200 has 132 SMs; change it if the records shown are of another GPU
fill = pd.DataFrame({"N": 2 ** np.arange(9, 15)})
fill["CTAs"] = 16384 // fill.N * (2048 // D)
fill["share of SMs with work"] = np.minimum(1, fill.CTAs / SMS)
recorded = record.headline(medians)
recorded = recorded[(recorded["name"] == "03_fa1_fp32") & (recorded["D"] == D)].set_index("Nq")["tflops"]
fill["recorded TFLOP/s"] = fill.N.map(recorded)
fill

# %%
draw.machine_fill(fill, f"03_fa1_fp32 on {samples.device.iloc[0]}, D = {D}")

# %% [markdown]
# **What to see.** The dashed line is the share of SMs that have a CTA; the markers are the recorded throughput, scaled to their own maximum. On the H200 that is at $N = 2048$, with two CTAs on nearly every SM. (More do not fit at a time:
# 256 threads with 122 registers each take almost half of an SM's 65 536.) From $N = 4096$ on an SM has one CTA or none, and the markers run along at about 0.7 of the dashed line. So two things are lost: the SMs without a CTA, which the dashed line predicts, and about 30 % on
# those with a single one, most likely because there are too few other warps to switch to while some of its eight wait.
#
# **$O$, $m$ and $l$ travel for every tile of keys.** And $Q$ is read again each time as well. By the formula, the shares at $N = 16384$ are:

# %%
bytes_ = predicted_bytes(16384, 64, Bc=32).sum(axis=1)
(bytes_ / bytes_.sum()).map("{:.1%}".format).to_frame("share of all bytes")

# %% [markdown]
# **Each value from shared memory is used a few times only**: a thread's share of $S$ is 2 × 4 elements at $d = 64$, so a value of $Q$ serves four multiply-adds and one of $K$ two. And every step ends at a **barrier** (`__syncthreads()`: no thread of the CTA goes on before all have arrived) with nothing to do meanwhile. Notebook 04 turns the two loops inside out, which ends the first two complaints at once, and
# then works on the third.

# %% [markdown]
# ## Exercises
#
# ### Exercise 3.1 · Forget to rescale
#
# A classic fault: when a new tile raises the maximum, the old $l$ must be multiplied by $e^{m_i - m^{new}}$. In the kernel below it is not.
# Before running it, predict for three inputs whether the result will be `"right"` or `"wrong"`: (a) one tile of keys, $N = 32$; (b) eight tiles; (c) eight tiles, where $K$ is zero, so that all scores are equal.

# %%
# Exercise 3.1
prediction = {"one tile": None, "eight tiles": None, "eight tiles, equal scores": None}  # "right" or "wrong"

# %%
forgetful = load(source=rung("03_fa1_fp32").replace("expf(m_old[r] - m_finite) * l_old[r]", "l_old[r]"), quiet=True)
inputs = {"one tile": (32, 1.0), "eight tiles": (256, 1.0), "eight tiles, equal scores": (256, 0.0)}


def holds(name):
    N, spread = inputs[name]
    q, k, v = (torch.randn(1, 1, N, 64, device=device) for _ in range(3))
    right = check(forgetful, [reference.Case(name, q=q, k=spread * k, v=v)]).ok
    return prediction[name] == ("right" if right else "wrong")


def all_hold():
    missed = sum(not holds(name) for name in inputs)
    assert not missed, f"{missed} of 3 predictions do not hold"
    return True


exercise.verify("3.1", all_hold, hint="for which inputs is the forgotten factor 1, or multiplied by 0?")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# prediction = {"one tile": "right", "eight tiles": "wrong", "eight tiles, equal scores": "right"}
# ```
#
# With one tile, $l_i = 0$ before it: whatever it is multiplied by does not matter. With equal scores the maximum never changes after the first tile, so the forgotten factor is 1. In the
# general case old tiles keep the weight they had under the old maximum, and the output is a wrongly weighted mean: no NaN, no wild values, every element plausible. A test with a single tile, or with constant inputs, passes.
#
# </details>

# %% [markdown]
# ### Exercise 3.2 · Size a tile
#
# Write two functions of the tile: the shared memory of a CTA in bytes, and the bytes that one head requests from HBM for $Q$, $K$, $V$ and $O$ (leave out $m$, $l$ and LSE). Then the cell edits the kernel
# to $B_c = 64$ and counts.


# %%
# Exercise 3.2
def smem_bytes(d, Br, Bc):
    """Shared memory of a CTA, in bytes."""


def hbm_bytes(N, d, Br, Bc):
    """Bytes that one head requests for Q, K, V and O together, line 2 included."""


# %%
def sized():
    tiles = re.findall(r"D=(\d+): +Br=(\d+) Bc=(\d+) .*smem=(\d+) KB", rung("03_fa1_fp32").tiles)  # the header block
    for d, Br, Bc, kb in (map(int, tile) for tile in tiles):
        assert smem_bytes(d, Br, Bc) == 1024 * kb, f"smem_bytes({d}, {Br}, {Bc}) should be {1024 * kb}"
    wide = load(source=rung("03_fa1_fp32").replace("Bc = 32;", "Bc = 64;"), device="cpu", quiet=True)
    counted = traffic(wide, *(torch.randn(1, 1, 200, 64) for _ in range(3))).loc[["Q", "K", "V", "O"]]
    counted = counted.bytes_read.sum() + counted.bytes_written.sum()
    assert hbm_bytes(200, 64, 64, 64) == counted, f"hbm_bytes(200, 64, 64, 64) is not the {counted} counted"
    return len(tiles) == 3


exercise.verify(
    "3.2",
    sized,
    hint="the last line of the region `tile` has a term for each array; predicted_bytes has a row for each tensor",
)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# def smem_bytes(d, Br, Bc):
#     return 4 * (2 * Bc * (d + 4) + Br * (d + 4) + Br * (Bc + 4))
#
#
# def hbm_bytes(N, d, Br, Bc):
#     Tc = math.ceil(N / Bc)
#     return 4 * (2 * N * d + Tc * N * d + Tc * N * d + (Tc + 1) * N * d)
# ```
#
# </details>

# %% [markdown]
# ### Exercise 3.3 · Merge two halves
#
# Consequence 1 says that two kernels can each work on half of the keys, and their results can be merged. The kernel returns LSE $= m + \ln l$ for that purpose. Write the merge in terms of $o$ and LSE alone. It must also work when one part has seen no key at all (LSE $= -\infty$, $o = 0$).


# %%
# Exercise 3.3
def merge(o_a, lse_a, o_b, lse_b):
    """O and LSE over both parts. o (B,H,N,D), lse (B,H,N)."""
    return o_a, lse_a


# %%
def merged():
    q, k, v = (torch.randn(1, 2, 96, 64, device=device) for _ in range(3))
    case = reference.Case("merged", q=q, k=k, v=v)
    parts = [slice(0, 40), slice(40, 96)]
    first, second = (kernel(q, k[:, :, part].contiguous(), v[:, :, part].contiguous()) for part in parts)
    report = check(lambda q, k, v, scale=None: merge(*first, *second), [case])
    assert report.ok, str(report).splitlines()[1]
    nothing = torch.zeros_like(first[0]), torch.full_like(first[1], -torch.inf)
    for o, lse in (merge(*first, *nothing), merge(*nothing, *first)):
        unchanged = torch.allclose(o, first[0], rtol=1e-6) and torch.allclose(lse, first[1], rtol=1e-6)
        assert unchanged, "merging with no keys has to change nothing"
    assert not merge(*nothing, *nothing)[0].isnan().any(), "two empty parts give NaN"
    return True


exercise.verify(
    "3.3", merged, hint="the weight of part A is exp(lse_a); torch.logaddexp(a, b) is ln(e^a + e^b) without overflow"
)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# def merge(o_a, lse_a, o_b, lse_b):
#     lse = torch.logaddexp(lse_a, lse_b)
#     finite = torch.where(lse == -torch.inf, 0.0, lse)
#     w_a, w_b = torch.exp(lse_a - finite), torch.exp(lse_b - finite)
#     return w_a[..., None] * o_a + w_b[..., None] * o_b, lse
# ```
#
# With $\mathrm{LSE} = \ln(e^{\mathrm{LSE}_A} + e^{\mathrm{LSE}_B})$ the weights $e^{\mathrm{LSE}_A - \mathrm{LSE}}$ and $e^{\mathrm{LSE}_B - \mathrm{LSE}}$ add up to 1. This merge returns in notebook 21, where a long sequence is split over many CTAs.
#
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why may the output be normalised after each tile and still be corrected later?</summary>
#
# Because $l$ is kept: $l_i o_i$ undoes the division, and the merge then weighs both parts by $e^{m - m^{new}}$.
#
# </details>
# <details><summary>2. Twice the head dimension, same SRAM: what happens to FlashAttention-1's traffic?</summary>
#
# It grows about fourfold: $O$ and $Q$ have twice the columns, and $B_c$ is halved, so there are twice as many passes.
#
# </details>
# <details><summary>3. Does FlashAttention-1 always move fewer bytes than three passes?</summary>
#
# No. It needs $B_c > \tfrac34 d$, or $M > 3d^2$ in elements. It always needs less memory.
#
# </details>
# <details><summary>4. Why does $B_r$ not appear in the IO count?</summary>
#
# Each $j$ passes over all of $Q$ and $O$ once, however they are cut. $B_r$ decides how much SRAM a pass needs and how much work there is per tile.
#
# </details>
# <details><summary>5. Which workload suits one CTA per head, and which does not?</summary>
#
# Many heads and batches: at least as many as SMs, better several times as many. One long sequence with few heads leaves most SMs idle.
#
# </details>
# <details><summary>6. A kernel passes a test with N = 32. What has not been tested?</summary>
#
# Everything that happens between tiles: the rescale, the second load of K and V, the barriers between them, and the tail of a tile that is not full.
#
# </details>
