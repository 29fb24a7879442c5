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
# [← 02 · Online softmax](02_online_softmax.ipynb) | [03_fa1_fp32.cu](../kernels/03_fa1_fp32.cu) | [glossary](glossary.md) | [04 · FlashAttention-2 in fp32 →](04_fa2_fp32.ipynb)
#
# **After this notebook you can**
# - explain how attention is computed one tile of keys at a time, and what each row has to remember between tiles;
# - do the byte count of a tiled kernel by hand, tensor by tensor, and have it confirmed to the byte by a run;
# - judge when tiling saves traffic, when it does not, and what keeps this kernel from filling a GPU.
#
# **Time** 60 minutes.
#
# **Needs** [01 · Naive attention](01_naive.ipynb) and [02 · Online softmax](02_online_softmax.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: hold a tile of K and V on the chip, let every tile of Q pass by it, and carry only O, m and l from one tile of keys to the next.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import math
import re

import numpy as np
import pandas as pd
import torch

from helpers import check, draw, exercise, load, plot, predict, record, reference, rung, show, traffic, xray
from helpers import blank, hint, progress

torch.manual_seed(0)
kernel = load("03_fa1_fp32")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 01 computed $S = QK^\top$, $P = \mathrm{softmax}(S)$ and $O = PV$ as three kernels. $S$ and $P$ have $N \times N$ elements per head: at $N = 65536$ they take 32 GiB for one head, where $Q$, $K$, $V$ and $O$ take 64 MiB at $d = 64$. All of it went out to memory and came back. Notebook 02 cut the softmax down to one pass over $S$, but $S$ still had to exist.
#
# Two memories matter from here on: **HBM**, where tensors live, and the small memory inside each SM, which the papers call **SRAM**. CUDA calls the part of it that a program controls **shared memory** and lends it to one **CTA** (cooperative thread array, the other name of a block): up to 227 KB per CTA, 1 less than the SM has, on compute capability 9.0 ([CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities)). $M$ is the number of *elements* that SRAM holds.
#
# A tile of $S$ fits into SRAM easily. If a [tile](glossary.md#tile) is made, used and thrown away there, $S$ never reaches HBM. What stands in the way is the softmax: the first tile of a row cannot be normalised before the last one is known. Notebook 02 has removed this obstacle.
#
# ### What a row remembers
#
# Of a set $A$ of keys, a query row keeps the **[state](glossary.md#state)** $(m_A, l_A, o_A)$: the maximum, the sum and the output *so far*. In FlashAttention-1 the output is divided by $l$ at every step, so that $o_A = \frac{1}{l_A} \sum_{j \in A} e^{s_j - m_A} v_j$ is attention restricted to the keys in $A$. Two states merge as in notebook 02 (its $o$ is $l_A o_A$ here):
#
# $$ m = \max(m_A, m_B), \qquad l = e^{m_A - m}\, l_A + e^{m_B - m}\, l_B, \qquad
#    o = \frac{e^{m_A - m}\, l_A\, o_A + e^{m_B - m}\, l_B\, o_B}{l} . $$
#
# Two consequences: the result does not depend on how the keys are cut into tiles or in which order they come; and after some tiles $o$ is the *exact* attention over the keys seen so far.

# %% [markdown]
# ## The algorithm
#
# Algorithm 1 of FlashAttention (Dao et al. 2022, [arXiv 2205.14135](https://arxiv.org/abs/2205.14135)) is two loops around this merge. $B_r$ is the number of query rows in a tile, $B_c$ the number of keys; there are $T_r = \lceil N / B_r \rceil$ and $T_c = \lceil N / B_c \rceil$ tiles. The comments are the paper's line numbers. What happens on the chip to one tile:


# %%
def fa1_tile(Qi, Kj, Vj, Oi, li, mi):
    """The tile's scores, and its merge into O_i, l_i, m_i."""
    S = Qi @ Kj.T / np.sqrt(Qi.shape[1])  # line 9; the scale is ours
    m_tile = S.max(1, keepdims=True)  # line 10: the state of this tile alone
    P = np.exp(S - m_tile)
    l_tile = P.sum(1, keepdims=True)
    m_new = np.maximum(mi, m_tile)  # line 11: the merge
    kept, weight = np.exp(mi - m_new) * li, np.exp(m_tile - m_new)
    l_new = kept + weight * l_tile
    return (kept * Oi + weight * (P @ Vj)) / l_new, l_new, m_new  # line 12


# %% [markdown]
# To keep account of what moves, HBM is an object: arrays that count the elements read and written.


# %%
class HBM(dict):
    """Arrays in HBM. Every tile that is read or written is counted, in elements."""

    moved = 0

    def read(self, name, rows):
        self.moved += self[name][rows].size
        return self[name][rows].copy()

    def write(self, name, rows, tile):
        self.moved += tile.size
        self[name][rows] = tile


# %% [markdown]
# And the loops, keys outside, queries inside. It is a generator: it stops after every tile, so that we can look at what HBM holds.


# %%
def fa1(hbm, Br, Bc):
    """Algorithm 1 on hbm's Q, K, V (N, d) and O, l, m; yields the rows and the number of keys seen after each tile."""
    N = len(hbm["Q"])
    for j in range(0, N, Bc):  # line 5
        Kj, Vj = (hbm.read(name, slice(j, j + Bc)) for name in "KV")  # line 6
        for i in range(0, N, Br):  # line 7
            rows = slice(i, i + Br)
            Qi, Oi, li, mi = (hbm.read(name, rows) for name in ("Q", "O", "l", "m"))  # line 8
            Oi, li, mi = fa1_tile(Qi, Kj, Vj, Oi, li, mi)  # lines 9 to 12
            for name, tile in {"O": Oi, "l": li, "m": mi}.items():  # lines 12 and 13
                hbm.write(name, rows, tile)
            yield rows, min(N, j + Bc)


# %%
def fresh(N, d):
    """Random Q, K, V (N, d) in HBM, and line 2: O = 0, l = 0, m = -inf."""
    Q, K, V = np.random.default_rng(0).standard_normal((3, N, d))
    return HBM(Q=Q, K=K, V=V, O=np.zeros((N, d)), l=np.zeros((N, 1)), m=np.full((N, 1), -np.inf))


def dense(Q, K, V):
    """Attention with the whole of S at once, in float64."""
    S = Q @ K.T / np.sqrt(Q.shape[1])
    P = np.exp(S - S.max(1, keepdims=True))
    return P / P.sum(1, keepdims=True) @ V


# %%
for Br, Bc in [(64, 32), (32, 64), (128, 128), (7, 50)]:
    hbm, worst = fresh(128, 64), 0
    for rows, seen in fa1(hbm, Br, Bc):  # after every tile: the attention over the keys seen so far
        worst = max(worst, abs(hbm["O"][rows] - dense(hbm["Q"][rows], hbm["K"][:seen], hbm["V"][:seen])).max())
    print(f"Br={Br:3d} Bc={Bc:3d}: largest difference to attention over the keys seen so far, at any step {worst:.0e}")

# %% [markdown]
# Both consequences in numbers: any cut gives the same answer up to rounding, and it is exact at every step. (In the last line neither tile divides $N$.)
#
# ### The walk
#
# The square is $S$, cut into 4 × 4 tiles. Each panel is one step of the inner loop.

# %%
draw.tile_walk("fa1")

# %% [markdown]
# **What to see.** Green is the tile of $S$ that exists at this step; the pale, numbered ones have been computed and forgotten. Blue is the tile of K and V in SRAM: it stays for a whole column (steps 1 to 4), then the next one replaces it (step 5). Orange, the tile of Q and O, changes at every step. $O_i$ comes and goes once per column, four times altogether. That is the price of this loop order.

# %% [markdown]
# ## How many elements cross between HBM and SRAM
#
# Count the lines of the algorithm, for one head:
#
# - line 6: every $K_j$ and $V_j$ once in the whole run, $2Nd$;
# - line 8: for every $j$ all of $Q$ and $O$, $2Nd$, and all of $l$ and $m$, $2N$;
# - lines 12 and 13: for every $j$ all of $O$, $Nd$, and of $l$ and $m$, $2N$; and line 2 writes as much once more.
#
# $$ \text{elements} = \underbrace{2Nd}_{K, V} + \underbrace{\tfrac{N}{B_c}\,(3Nd + 4N)}_{Q,\ O,\ l,\ m} + \underbrace{Nd + 2N}_{\text{line 2}} $$
#
# The middle term is the largest, about $3N^2 d / B_c$. $B_r$ does not appear: each pass over $Q$ and $O$ serves $B_c$ keys, however the queries are cut. So $B_c$ should be as large as SRAM allows. The three-kernel form writes and reads $S$ and $P$ and moves $Q, K, V, O$ once: $4N^2 + 4Nd$. The quotient of the leading terms,
#
# $$ \frac{3 N^2 d / B_c}{4 N^2} = \frac{3d}{4 B_c}, $$
#
# says when tiling wins: for $B_c > \tfrac34 d$. The paper takes $B_c = M / 4d$, a quarter of SRAM for each of $K_j$ and $V_j$, and at most as much for $Q_i$ and for $O_i$. With 227 KB, of 1024 bytes each, that is $M = 58\,112$ elements. Predict how the traffic of FlashAttention-1 with such a tile compares with that of the three kernels at $d = 64$:

# %%
times_less = ...  # your prediction: how many times fewer elements than three kernels move

# %% tags=["reveal"]
N, d = 4096, 64
hbms = {"paper, M / 4d": 58112 // (4 * d), "Bc = 128": 128, "Bc = 64": 64, "Bc = 32": 32}
three, rows = 4 * N * N + 4 * N * d, []
for name, Bc in hbms.items():
    elements = 2 * N * d + math.ceil(N / Bc) * (3 * N * d + 4 * N) + N * d + 2 * N
    rows.append((name, Bc, elements / 1e6, three / elements))
predict(times_less, rows[0][-1], "times fewer")
pd.DataFrame(rows, columns=["tile", "keys", "million elements", "times fewer than three kernels"]).set_index(
    "tile"
).round(2)

# %% [markdown]
# With a tile that fills SRAM the traffic falls to about a quarter. The memory falls further: there is no $S$ and no $P$. With $B_c = 32$, below $\tfrac34 d = 48$, there is *more* traffic than before. It is not tiling as such that helps, but a tile that is large for its $d$.
#
# Put $B_c = M/4d$ into the middle term: $12 N^2 d^2 / M = \Theta(N^2 d^2 / M)$ elements, the paper's Theorem 2. The paper also shows (Proposition 3) that no algorithm beats this asymptotically at *all* $M$ from $d$ to $Nd$: at $M = Nd$ this is $\Theta(Nd)$, and reading the inputs alone takes $3Nd$.
#
# Does numpy agree with the formula?


# %%
def fa1_elements(N, d, Bc):
    """Algorithm 1, elements between HBM and SRAM for one head, line 2 included."""
    return 2 * N * d + math.ceil(N / Bc) * (3 * N * d + 4 * N) + N * d + 2 * N


for N, d, Bc in [(128, 64, 32), (256, 32, 64), (500, 64, 128)]:
    hbm = fresh(N, d)
    list(fa1(hbm, 64, Bc))
    counted = hbm.moved + N * d + 2 * N  # and line 2
    print(f"N={N} d={d} Bc={Bc:3d}: formula {fa1_elements(N, d, Bc):8d}, counted {counted:8d}")

# %% [markdown]
# ## The kernel
#
# `kernels/03_fa1_fp32.cu` is Algorithm 1, one CTA per head. Its skeleton, with the names of the regions that follow:
#
# ```cpp
# O = 0, l = 0, m = -inf                                   // initialise
# for (j0 = 0; j0 < Nk; j0 += Bc) {                        // outer loop: keys
#   load_tile(K_smem, …), load_tile(V_smem, …);
#   for (i0 = 0; i0 < Nq; i0 += Br) {                      // inner loop: queries
#     load_tile(Q_smem, …);
#     __syncthreads();                                     // the tiles are there
#     S_reg  = Q_smem K_smem^T                             // scores
#     m_tile, l_tile, P_smem = exp(scale S_reg - m_tile)   // softmax
#     PV_reg = P_smem V_smem                               // output
#     m, l, O in HBM = merged with m_tile, l_tile, PV_reg  // merge
#     __syncthreads();                                     // the tiles may be overwritten
#   } }
# ```
#
# `__syncthreads()` is a **[barrier](glossary.md#barrier)**: no thread of the CTA goes on before all have arrived. The constants:

# %%
show.region("03_fa1_fp32", "tile")

# %% [markdown]
# 256 threads form `TY` rows of `TX`: 32 of 8 at $d = 64$. (Below, `T` is `Tile<d>`.) A tile of $S$ is divided evenly: each thread computes `rows` × `keys` of its elements in registers, and `rows` × `cols` elements of $\tilde P V_j$ (the tilde: relative to the tile's own maximum $\tilde m$). `ld` is the length of a row in shared memory, a little more than $d$; the X-ray below shows why. `smem_bytes`, 43 KB at $d = 64$, is the third argument of `<<<…>>>`: *dynamic* shared memory, in the kernel `extern __shared__ float smem[];`. Above 48 KB `fa::allow_smem(kernel, bytes)` has to come first. (On a GPU `load` reports *static* arrays only: 0 KB.)
#
# $B_c$ is 32 for every $d$, less than $\tfrac34 d$ for $d = 64$: this rung is written to be read. Larger tiles are one edit away, below.

# %%
draw.fa1_threads()

# %% [markdown]
# **What to see.** The first warp's eight rows, above of $S$, below of $O$. Eight neighbouring lanes share a row. Lane 13 has rows 2 and 3 (from `row0 = ty * rows` on), and of $S$ the keys 5, 13, 21 and 29; of $O$ two groups of four columns. So a row's maximum, its sum and its $\tilde P$ concern eight lanes of one warp.
#
# Line 9 of the algorithm:

# %%
show.region("03_fa1_fp32", "scores")

# %% [markdown]
# `load4` loads four floats at once. For every four columns of $Q$ and $K$, a thread loads `rows + keys` such groups from shared memory and does `rows × keys × 4` multiply-adds with them. `#pragma unroll` writes the loops out, so that every `S_reg[r][c]` has fixed indices and can be a register. Line 10:

# %%
show.region("03_fa1_fp32", "softmax")

# %% [markdown]
# `row_max` and `row_sum` exchange registers between the `TX` lanes of a row with **[shuffles](glossary.md#shuffle)** (`__shfl_xor_sync`, the butterfly of notebook 02). Columns past the last key are set to $-\infty$: they weigh $e^{-\infty} = 0$. A row whose scores are all $-\infty$ would give $-\infty - (-\infty)$, NaN; `m_finite` stands in for the maximum there. $\tilde P$ goes to shared memory, because $\tilde P V_j$ needs whole rows of it and each thread has only a few columns. `__syncwarp()` is a barrier for the 32 lanes of a warp; it is enough, as no other warp reads these rows. The product $\tilde P V_j$ (region `output`) is built like the scores. Then lines 11 to 13:

# %%
show.region("03_fa1_fp32", "merge")

# %% [markdown]
# The merge, once per row: `l_kept` is $e^{m_i - m^{new}} l_i$, `tile_weight` is $e^{\tilde m - m^{new}}$. $O_i$ is loaded from HBM, merged, normalised and stored at every tile. All `TX` threads of a row load $m_i$ and $l_i$; one of them stores. After the last tile of keys the row's log-sum-exp, $m + \ln l$, goes out.

# %% [markdown]
# ## Run and check

# %%
q, k, v = (torch.randn(1, 2, 256, 64, device=device) for _ in range(3))
o, lse = kernel(q, k, v)
exact_o, exact_lse = reference.attention(q, k, v)
print(f"max error of O {(o - exact_o).abs().max():.1e}, of LSE {(lse - exact_lse).abs().max():.1e}")
check(kernel)

# %% [markdown]
# ## Predict, then measure
#
# The kernel is Algorithm 1, so the formula should give its traffic, tensor by tensor. The emulator counts what threads *request*; all `TX` = 8 threads of a row ask for $m_i$ and $l_i$, so these reads count eightfold. With $N = 256$ and $B_c = 32$:

# %%
O_read = ...  # your prediction: how often each byte of O is read
O_written = ...  # and how often it is written


# %%
def predicted_bytes(N, d, Bc, heads=1):
    """Bytes that the threads of 03_fa1_fp32 request, by tensor: (read, written)."""
    Tc, TX = math.ceil(N / Bc), 16 if d == 128 else 8
    elements = {"Q": (Tc * N * d, 0), "K": (N * d, 0), "V": (N * d, 0), "O": (Tc * N * d, (Tc + 1) * N * d)}
    elements |= {name: (Tc * N * TX, (Tc + 1) * N) for name in "ml"} | {"LSE": (0, N)}
    return pd.DataFrame(elements, index=["read", "written"]).T * 4 * heads


# %% tags=["reveal"]
counted = traffic(kernel, q, k, v)
predict(O_read, counted.reads_per_byte["O"], "reads of each byte of O")
predict(O_written, counted.bytes_written["O"] / (4 * o.numel()), "writes")
counted = counted[["bytes_read", "bytes_written"]].set_axis(["read", "written"], axis=1)
table = pd.concat({"by the formula": predicted_bytes(256, 64, Bc=32, heads=2), "counted": counted}, axis=1)
agree = (table["by the formula"] == table["counted"]).all(axis=1)
print(f"{agree.sum()} of {len(table)} tensors agree to the byte; S and P are not among them")
table

# %% [markdown]
# How much of that reaches HBM? The paper's model has two levels, SRAM and HBM. A real GPU has the L2 cache between them. Take 16 heads with $N = 4096$ and $d = 64$: $Q$, $K$, $V$ and $O$ are 16 MiB each, an H200's L2 has 60 MiB.

# %%
percent = ...  # your prediction: how much of the requested bytes of Q, K, V and O goes through HBM, in percent

# %% tags=["reveal"]
seen = record.load("03_fa1_fp32", "counters", device="nvidia-h200").query("N == 4096 and H == 16").iloc[0]
foreseen, large = predicted_bytes(4096, 64, Bc=32, heads=16), ["Q", "K", "V", "O"]
levels = pd.DataFrame({"requested of Q K V O, by the formula": foreseen.loc[large].sum()})
levels["requested in all, counted by the GPU"] = [32 * seen.global_load_sectors, 32 * seen.global_store_sectors]
levels["through HBM"] = [seen.dram_read_bytes, seen.dram_write_bytes]
through = levels["through HBM"].sum() / levels.iloc[:, 0].sum()
predict(percent, 100 * through, "percent", within=0.5)
print(f"{seen.device}, B = 1, H = 16, N = 4096, d = 64, in MiB")
(levels / 2**20).round(1)

# %% [markdown]
# (The counters are those of Nsight Compute, NVIDIA's profiler for kernels.) $Q$ and $O$ of these 16 heads fit into the L2 together, and the many passes over them stay there. With more heads at work at a time, or a smaller L2, they would not. Read "HBM" in the counts of this notebook as "whatever lies beyond the SM".

# %% [markdown]
# ### The X-ray: how shared memory serves a warp
#
# Shared memory has 32 **[banks](glossary.md#bank)**, each 4 bytes wide: word $w$ lies in bank $w \bmod 32$. It answers a warp's request in **[wavefronts](glossary.md#wavefront)**. In one wavefront each bank hands out one word, to every lane that wants it. Lanes that want *different* words of one bank take turns, a wavefront each: a **[bank conflict](glossary.md#bank-conflict)**.
#
# For wider accesses a warp is served in parts. With 8 bytes per lane the two halves of the warp go one after the other, with 16 bytes, as in `load4`, the four **quarters** (lanes 0 to 7, 8 to 15, …). A word that lanes of different quarters want is handed out once for each. One exception, for loads: where lanes share addresses in pairs (lanes 0 and 1, 2 and 3, …; or lanes 0 and 2, 1 and 3, …), the two quarters of a half are served together. (This is the rule by which the emulator counts, `helpers/emulator/banks.py`; notebook [92](92_xray_against_hardware.ipynb) holds it against an H200.)
#
# In the scores, lane `tx` + 8 `ty` loads 16 bytes of row `tx` of $K_j$: eight rows in all, 128 bytes, the same for the four values of `ty` in a warp. And it loads 16 bytes of row $2\,$`ty` of $Q_i$: four different addresses, each asked for by eight neighbours. How many wavefronts does each of these two loads need?

# %%
K_wavefronts = ...  # your prediction: wavefronts of one load of K_smem
Q_wavefronts = ...  # and of one load of Q_smem

# %% tags=["reveal"]
ray = xray(kernel, q, k, v)
loads = ray.to_frame().query("space == 'shared' and op == 'load'").set_index("target")["mean"]
predict(K_wavefronts, loads["K_smem"], "wavefronts per load of K_smem")
predict(Q_wavefronts, loads["Q_smem"], "wavefronts per load of Q_smem")
ray

# %% [markdown]
# **What to see.** A load of $K_j$ takes four wavefronts, one per quarter, although all four quarters want the same 128 bytes. In a load of $Q_i$ neighbours ask for the same address, so two quarters go together: two. No line has a bank conflict, and each request is as cheap as it can be *for the addresses that its lanes name*. Another assignment of lanes to elements could still need fewer wavefronts for the same work; exercise 4.2 finds one for the next kernel.
#
# The H200 agrees to the last wavefront:

# %%
gpu = record.load("03_fa1_fp32", "counters", device="nvidia-h200").query("N == 256 and H == 2").iloc[0]
for op in ("load", "store"):
    here, there = ray.total(space="shared", op=op), gpu[f"shared_{op}_wavefronts"]
    print(f"{op}s of shared memory: {here.cost} wavefronts in the X-ray, {there} on the {gpu.device}")

# %% [markdown]
# How many bytes per FLOP is that? For four columns $k$, a warp loads $K_j$ four times and $Q_i$ twice: $4 \cdot 4 + 2 \cdot 2 = 20$ wavefronts of 128 bytes, for $32 \cdot 2 \cdot 4 \cdot 4$ multiply-adds or 2048 FLOPs: 1.25 bytes per FLOP. The second product needs 1.125, the two together 1.19. An SM of compute capability 9.0 delivers one wavefront per clock and can do 128 multiply-adds, 256 FLOPs: 0.5 bytes per FLOP. So the loads alone hold this kernel below $0.5 / 1.19 = 42\,\%$ of the arithmetic. Notebook 04 takes this up.
#
# That the loads of $K_j$ have no conflicts is the work of four floats, those in `ld = d + 4` (`ld_p` does the same for $\tilde P$). Without them rows are 64 floats apart. What becomes of the load of $K_j$, where each quarter reads eight rows?

# %%
bare_wavefronts = ...  # your prediction: wavefronts of one load of K_smem with ld = d

# %% tags=["reveal"]
bare = xray(load(source=rung("03_fa1_fp32").replace("ld = d + 4,", "ld = d,"), device="cpu", quiet=True), q, k, v)
loads = bare.to_frame().query("space == 'shared' and op == 'load'").set_index("target")["mean"]
predict(bare_wavefronts, loads["K_smem"], "wavefronts per load of K_smem")
bare.bank_map("fa::load4(k_reg[c]")  # the worst request of the line with this text

# %%
ray.bank_map("fa::load4(k_reg[c]")  # with the four floats

# %% [markdown]
# **What to see.** In the first map, without padding: 64 is a multiple of 32, so all eight rows begin in the same bank. The eight lanes of a quarter want different words of the same four banks and take a wavefront each. In the second: a row begins four banks further on than the row before, and eight rows fill all 32 banks. The results are the same; only a count like this one, or a stopwatch, shows the difference. (Padding by a single float is impossible here: rows would begin at addresses that are no multiple of 16, which a 16-byte access requires. The X-ray stops there and says `misaligned`.)

# %% [markdown]
# ### Tile and traffic
#
# Edit the constant in the kernel, and count. `rung(...).replace(old, new)` returns the source with `old` exchanged, which has to occur exactly once.


# %%
def count(N, Bc):
    """Bytes requested by one head, all tensors together, with the tile size edited into the kernel; d = 64."""
    source = rung("03_fa1_fp32").replace("Bc = 32;", f"Bc = {Bc};")
    counted = traffic(load(source=source, device="cpu", quiet=True), *(torch.randn(1, 1, N, 64) for _ in range(3)))
    return int((counted.bytes_read + counted.bytes_written).sum())


sizes = [64, 128, 256, 512]
grid = pd.DataFrame([(N, f"Bc = {Bc}", Bc) for Bc in (32, 64, 128) for N in sizes], columns=["N", "tile", "Bc"])
grid["counted"] = [count(N, Bc) for N, Bc in zip(grid.N, grid.Bc)]
grid["predicted"] = [int(predicted_bytes(N, 64, Bc).to_numpy().sum()) for N, Bc in zip(grid.N, grid.Bc)]
three = pd.DataFrame({"N": sizes, "predicted": [4 * (4 * N * N + 4 * N * 64) for N in sizes], "tile": "three kernels"})
draw.bytes_against(pd.concat([grid, three]), "N", "tile", "Bytes requested by the kernel's threads, one head, d = 64")

# %% [markdown]
# **What to see.** Markers are counts from running the kernels, lines are the formula; they coincide. The dashed line is the least that three kernels move. Every line ends up with slope 2 on these logarithmic axes: tiling does not remove the square, it divides it by the tile. Twice the tile, half the bytes; with 64 and 128 keys the kernel lies below the dashed line, with 32 above it, as $B_c > \tfrac34 d$ said.

# %% [markdown]
# ## Memory: O(N)
#
# What a call allocates: $O$ with $Nd$ elements, LSE, $m$ and $l$ with $N$ each, per head. The peak that PyTorch's allocator recorded for one call, up to $N = 65536$:

# %%
plot.memory(record.load(kind="memory").query("dtype == 'fp32'"))

# %% [markdown]
# **What to see.** On these axes a line of slope 1 is $O(N)$, of slope 2 $O(N^2)$. The kernels that tile lie on top of each other; the two that keep $S$ need over 30 GiB at the right end, for a single head.
#
# ### Error, against the budget
#
# FlashAttention-1 multiplies and divides $O$ by $l$ at every tile, which rounds each time. Does the error stay within the budget as $N$ grows?

# %%
plot.error(record.load("03_fa1_fp32", "error"))

# %% [markdown]
# **What to see.** It does. The error of $O$ stays below that of plain PyTorch at every length, presumably because $\tilde P V_j$ adds up 32 terms only, and $O_i$ is a mean, which does not grow while tiles are merged in. The error of LSE grows slowly: $l$ takes one more rounding with each tile.

# %% [markdown]
# ## Beside its peers
#
# The recorded runs: this rung beside PyTorch's own attention in fp32, with **TF32** (a 19-bit format that tensor cores can use for fp32 inputs) off. `SDPA MATH` is two matrix products and a softmax; `SDPA EFFICIENT` is a fused kernel in the spirit of FlashAttention. The workload keeps $B \cdot N = 16384$ tokens and $H \cdot D = 2048$.

# %%
samples = record.load("03_fa1_fp32")
plot.throughput(samples)

# %% [markdown]
# **What to see.** TFLOP/s, counting only the two products. With many heads ($N = 1024$, $d = 64$) this kernel has 0.95<!--= ratio("03", "MATH", 64, 1024, dtype="fp32"):.2f --> of the speed of MATH and 0.50<!--= ratio("03", "EFFICIENT", 64, 1024, dtype="fp32"):.2f --> of that of EFFICIENT. As $N$ grows and heads get fewer it falls behind: to 0.17<!--= ratio("03", "MATH", 64, 16384, dtype="fp32"):.2f --> of MATH at $N = 16384$.

# %% [markdown]
# ## What still hurts
#
# **One CTA per head.** The launcher starts $B \cdot H$ CTAs, whatever $N$ is. On this workload $B \cdot H = 16384/N \cdot 2048/D$: it halves when $N$ doubles. The H200 has 132 SMs. Predict how much of it has work at $N = 16384$, $D = 64$:

# %%
busy = ...  # your prediction: percent of the SMs that have a CTA

# %% tags=["reveal"]
SMS, D = 132, 64  # the H200 has 132 SMs; change it if the records shown are of another GPU
fill = pd.DataFrame({"N": 2 ** np.arange(9, 15)})
fill["share of SMs with work"] = np.minimum(1, 16384 // fill.N * (2048 // D) / SMS)
recorded = record.headline(record.medians(samples))
recorded = recorded[(recorded["name"] == "03_fa1_fp32") & (recorded["D"] == D)].set_index("Nq")["tflops"]
fill["recorded TFLOP/s"] = fill.N.map(recorded)
predict(busy, 100 * fill["share of SMs with work"].iloc[-1], "percent of the SMs")
draw.machine_fill(fill, f"03_fa1_fp32 on {samples.device.iloc[0]}, D = {D}")

# %% [markdown]
# **What to see.** The dashed line is the share of SMs that have a CTA; the markers are the recorded throughput, scaled to its own maximum. On the H200 that is at $N = 2048$, with two CTAs on nearly every SM; more do not fit, since 256 threads with 122 registers each, allocated as 128, take half of an SM's 65,536. From $N = 4096$ on an SM has one CTA or none, and the markers run below the dashed line: a single CTA of eight waiting warps does not fill an SM either.
#
# **$O$, $m$ and $l$ travel for every tile of keys**, and $Q$ is read again each time. With $B_c = 32$ nearly all requested bytes are of these.
#
# **Each value from shared memory is used a few times only**: 1.19 bytes per FLOP, where 0.5 can be had. And at the end of every step all warps wait at a barrier with nothing to do meanwhile.
#
# Notebook 04 exchanges the two loops, which ends the first two complaints at once, and then works on the third.

# %% [markdown]
# ## Exercises
#
# ### Exercise 3.1 · Forget to undo the division
#
# In HBM, $O_i$ is already divided by $l_i$; the merge multiplies it by $l_i$ again. In the kernel below it does not: `l` is right, but old tiles enter $O$ with the weight $e^{m_i - m^{new}}$ alone. Take $K = 0$ (all scores are equal) and $V = 1$ everywhere, so that the right output is 1. With $B_c = 32$, what does the kernel return for $N = 32$, and for $N = 64$, to three digits?
#
# <details><summary>Hint</summary>
#
# After the first tile $l = 32$ and $O = 1$. Write down the merge of the second, without $l$.
# </details>

# %%
# Exercise 3.1
o_32, o_64 = 0.0, 0.0  # every element of O for N = 32 and for N = 64

# %%
forgetful = rung("03_fa1_fp32").replace("(l_kept * O_reg[e]", "(expf(m_old[r] - m_finite) * O_reg[e]")
forgetful = load(source=forgetful, quiet=True)


def foreseen():
    for N, guess in {32: o_32, 64: o_64}.items():
        q, one = torch.randn(1, 1, N, 64, device=device), torch.ones(1, 1, N, 64, device=device)
        o = forgetful(q, 0 * one, one)[0]
        assert guess is not None and (o - float(guess)).abs().max() < 6e-4, f"N = {N}: not {guess}"
    return True


exercise.verify("3.1", foreseen)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# o_32, o_64 = 1.0, (1 + 32) / 64
# ```
#
# The second tile is weighted right, with 32 of 64; the first counts as one key instead of 32. With one tile nothing is to be seen: a test with $N \le B_c$ passes. The output has no NaN and no wild values, only too small ones, the smaller the more tiles there are.
#
# </details>

# %% [markdown]
# ### Exercise 3.2 · Size a tile
#
# Write two functions of the tile: the shared memory of a CTA in bytes, as the kernel lays it out, and the bytes that threads request of one head's $Q$, $K$, $V$ and $O$ (leave out $m$, $l$ and LSE). The check compares the first with the three tiles of the header block and one of $B_c = 64$. For the second it edits the kernel to $B_r = 32$, with $B_c = 32$ and 64, and counts.
#
# <details><summary>Hint</summary>
#
# Four arrays lie in shared memory: tiles of $K$, $V$, $Q$ and $P$. How long is a row of each? The line of `smem_bytes` in the region `tile` has them all, $K$ and $V$ in one term. For the bytes, count the passes over each tensor: who is read once, and what is read or written again for every tile of keys?
# </details>


# %%
# Exercise 3.2
def smem_bytes(d, Br, Bc):
    """Shared memory of a CTA, in bytes."""


def hbm_bytes(N, d, Br, Bc):
    """Bytes that one head requests for Q, K, V and O together, line 2 included."""


# %%
def requested(N, d, Bc):
    """Bytes that the kernel requests for one head's Q, K, V and O, edited to Br = 32 and this Bc."""
    edited = rung("03_fa1_fp32").replace("Bc = 32;", f"Bc = {Bc};").replace("d == 128 ? 32 : 64", "32")
    moved = traffic(load(source=edited, device="cpu", quiet=True), *torch.randn(3, 1, 1, N, d))
    return int((moved.bytes_read + moved.bytes_written)[["Q", "K", "V", "O"]].sum())


# %%
def sized():
    tiles = re.findall(r"D=(\d+): +Br=(\d+) Bc=(\d+) .*smem=(\d+) KB", rung("03_fa1_fp32").tiles)  # the header block
    for d, Br, Bc, kb in (map(int, tile) for tile in [*tiles, (64, 32, 64, 51)]):
        told = (smem_bytes(d, Br, Bc) or 0) / 1024
        words = f"smem_bytes({d}, {Br}, {Bc}) gives {told:.4g} KB, and the kernel takes {kb} KB"
        assert told == kb, f"{words}: go through the arrays one by one, rows with their padding"
    for N, d, Bc in ((200, 64, 32), (70, 32, 64)):
        one = 4 * N * d  # bytes of a pass over one tensor
        told, seen = (hbm_bytes(N, d, 32, Bc) or 0) / one, requested(N, d, Bc) / one
        words = f"hbm_bytes({N}, {d}, 32, {Bc}) is {told:.4g} times a tensor's {one:,} bytes, counted were {seen:.4g}"
        assert told == seen, f"{words}: which tensor is read or written how often?"
    return len(tiles) == 3


exercise.verify("3.2", sized)

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
# $B_r$ appears in the first only.
#
# </details>

# %% [markdown]
# In the **tasks** you write parts of the rung yourself, from one loop to the whole kernel, each without a look at the rung's own. The form says what is given and what has to hold afterwards; the rest of the kernel stays as it is. The `%%region` cell judges what you type: solved means right in every case of `check` and no finding in the X-ray, whose counts stand beside the rung's own. Hints unfold one by one.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 03.1 · The scores of a tile
#
# The inside of a matrix product: load a few numbers of each operand, use each of them several times. Loads of one float at a time are right, too: what do they cost in wavefronts, beside the rung's?

# %%
blank("03", "scores")

# %% tags=["active-ipynb"]
# %%region 03 scores -> my_scores
# // type here

# %%
hint("03.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `scores` of [03_fa1_fp32.cu](../kernels/03_fa1_fp32.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 03.2 · The softmax of a tile
#
# A softmax that knows one tile only. You learn what the columns past the end have to be, and which lanes may read what others have written.

# %%
blank("03", "softmax")

# %% tags=["active-ipynb"]
# %%region 03 softmax -> my_softmax
# // type here

# %%
hint("03.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `softmax` of [03_fa1_fp32.cu](../kernels/03_fa1_fp32.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 03.3 · The merge of a tile
#
# Lines 11 to 13 of the algorithm, with $O$ in HBM. The one place where tiles meet: everything that a test with a single tile cannot see.

# %%
blank("03", "merge")

# %% tags=["active-ipynb"]
# %%region 03 merge -> my_merge
# // type here

# %%
hint("03.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `merge` of [03_fa1_fp32.cu](../kernels/03_fa1_fp32.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 03.9 · The whole rung
#
# FlashAttention-1 from the header block. Begin with a simple tile: one thread per row of $Q$ is a right answer. Judged step by step, a single tile first.

# %%
print(kernel.rung.source.split("#include")[0])  # the header block

# %%
blank("03")

# %% tags=["active-ipynb"]
# %%region 03 kernel -> my_kernel
# // type here

# %%
hint("03.9")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: all of it that follows the header block of [03_fa1_fp32.cu](../kernels/03_fa1_fp32.cu), parts of which stand above.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
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
# <details><summary>3. Does FlashAttention-1 always move fewer bytes than three kernels?</summary>
#
# No. It needs $B_c > \tfrac34 d$, or $M > 3d^2$ in elements. It always needs less memory.
#
# </details>
# <details><summary>4. Why does <i>B<sub>r</sub></i> not appear in the count?</summary>
#
# Each $j$ passes over all of $Q$ and $O$ once, however they are cut. $B_r$ decides how much SRAM a pass needs and how much work there is per tile.
#
# </details>
# <details><summary>5. The X-ray shows no bank conflicts. Is shared memory used as well as it can be?</summary>
#
# Not necessarily. Quarters of a warp that load the same words are served one after the other, and small register tiles ask for every value again and again. Compare bytes per FLOP.
#
# </details>
# <details><summary>6. A kernel passes a test with N = 32. What has not been tested?</summary>
#
# Everything that happens between tiles: the rescale, the second load of K and V, the barriers between them, and the tail of a tile of keys that is not full.
#
# </details>
