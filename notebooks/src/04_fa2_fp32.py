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
# [← 03 · FlashAttention-1 in fp32](03_fa1_fp32.ipynb) | [04_fa2_fp32.cu](../kernels/04_fa2_fp32.cu) | [glossary](glossary.md) | [10 · Tensor cores →](10_fa2_mma_fp16.ipynb)
#
# **After this notebook you can**
# - explain what FlashAttention-2 changed, point by point, and what each change is worth in bytes, CTAs and instructions;
# - do the arithmetic of a register tile: bytes of shared memory per FLOP, as threads ask for them and as wavefronts deliver them;
# - judge what the order of the two loops is worth by itself, and what it makes possible.
#
# **Time** 60 minutes.
#
# **Needs** [03 · FlashAttention-1](03_fa1_fp32.ipynb). No GPU: without one the kernels run on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: give every query tile its own CTA that keeps O, m and l in registers while K and V stream past, and divide once, at the end.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import math
import random

import numpy as np
import pandas as pd
import torch

from helpers import check, compile_ahead, load, loop_order, rung, traffic, xray
from helpers import banks, bench, blank, draw, exercise, hint, plot, predict, progress, record, reference, show

torch.manual_seed(0)
kernel = load("04_fa2_fp32")
device = kernel.device
compile_ahead(["03_fa1_fp32", "04_fa2_fp32"], "xray")  # in the background, for later cells

# %% [markdown]
# ## The problem
#
# Notebook 03 ended with three complaints about its kernel:
#
# - it starts one CTA per head, so a long sequence with few heads leaves most of the GPU idle;
# - it brings $O$, $m$ and $l$ in from HBM and writes them back for every tile of keys;
# - it uses each value from shared memory a few times only.
#
# FlashAttention-2 (Dao 2023, [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)) answers the first two by exchanging the two loops ([loop order](glossary.md#loop-order)), and saves operations that are not part of a matrix product. The answer to the third is not in the paper, whose authors could take it for granted: the two products are written as a fast matrix-multiplication kernel writes them. Sections 1 to 4 take the paper's changes one by one, section 5 the products.

# %% [markdown]
# ## 1 · Loop order
#
# The forward pass of FlashAttention-2 (Algorithm 1 of the paper; its line numbers) in numpy. Compare the two `for` lines with those of notebook 03.


# %%
def fa2_row(Qi, K, V, Bc):
    """One query tile (Br, d) against all keys, K and V (N, d): O (Br, d) and LSE (Br, 1)."""
    n, d = Qi.shape
    Oi, l, m = np.zeros((n, d)), np.zeros((n, 1)), np.full((n, 1), -np.inf)  # line 5
    for j in range(0, len(K), Bc):  # line 6: key tiles inside
        S = Qi @ K[j : j + Bc].T / np.sqrt(d)  # line 8
        m_new = np.maximum(m, S.max(1, keepdims=True))  # line 9
        alpha, P = np.exp(m - m_new), np.exp(S - m_new)
        l, m = alpha * l + P.sum(1, keepdims=True), m_new
        Oi = alpha * Oi + P @ V[j : j + Bc]  # line 10: no division
    return Oi / l, m + np.log(l)  # lines 12 to 15


# %%
def fa2(Q, K, V, Br, Bc):
    """FlashAttention-2 for one head, Q, K, V (N, d)."""
    tiles = [fa2_row(Q[i : i + Br], K, V, Bc) for i in range(0, len(Q), Br)]  # line 3: query tiles outside
    return [np.concatenate(parts) for parts in zip(*tiles)]


Q, K, V = np.random.default_rng(0).standard_normal((3, 256, 64))
exact = [x.numpy() for x in reference.attention(*(torch.tensor(x)[None, None] for x in (Q, K, V)))]
for Br, Bc in [(128, 64), (32, 128), (50, 7)]:
    O, LSE = fa2(Q, K, V, Br, Bc)
    off = abs(O - exact[0][0, 0]).max(), abs(LSE[:, 0] - exact[1][0, 0]).max()
    print(f"Br={Br:3d} Bc={Bc:3d}: max error of O {off[0]:.0e}, of LSE {off[1]:.0e}")

# %% [markdown]
# **Why the loops may be exchanged.** The state of a query tile is touched only when that tile meets a tile of keys, and in both orders it meets them in the sequence $j = 1, 2, \dots, T_c$. What happens to other rows in between does not concern it.
#
# **Why the division can wait.** FA1 keeps $o_i$ normalised: at each tile it multiplies by $l_i$, undoing the last division, and divides by $l^{new}$. FA2 keeps the sum of notebook 02, $\sum_j e^{s_j - m} v_j$, which merges without $l$ and is divided once, at the end. Line 9 takes $\tilde P$ relative to $m^{new}$ at once.
#
# (A slip in the arXiv text: its line 10 has $\mathrm{diag}(e^{m^{(j-1)} - m^{(j)}})^{-1}$, an inverse too many. The code above and the kernel multiply by $e^{m^{(j-1)} - m^{(j)}}$.)

# %%
draw.tile_walk("fa2")

# %% [markdown]
# **What to see.** The walk goes along rows now. Orange, the query tile, stays for a whole row, and with it $O_i$, $m_i$ and $l_i$. $O_i$ and $\mathrm{LSE}_i$ leave the chip once, when the row is finished (step 4). Blue, K and V, changes at every step: it is K and V that are read again and again.

# %% [markdown]
# ## 2 · HBM reads and writes
#
# Count as in notebook 03, one head, in elements. $Q$ is read once, $Nd$; $K$ and $V$ once per query tile, $2Nd \cdot N / B_r$; $O$ and LSE are written once, $Nd + N$.
#
# $$ \text{FA1: } 3Nd + 2N + \tfrac{N}{B_c} (3Nd + 4N), \qquad \text{FA2: } 2Nd + N + \tfrac{N}{B_r}\, 2Nd . $$
#
# Leading terms: $3N^2 d / B_c$ against $2N^2 d / B_r$. The tile that decides is now $B_r$, the *query* tile. FA1 could not make $B_c$ large because $K_j$ and $V_j$ both have to stay in SRAM; FA2 streams them, so $B_r$ is bounded by the one tile $Q_i$ in SRAM and $O_i$ in registers.

# %% [markdown]
# ## 3 · Parallelism over the sequence
#
# In FA2 no two turns of the outer loop touch the same row. So the outer loop can go: each of its turns becomes a CTA, which does exactly the work it did before. The grid grows from $B H$ to $B H \lceil N / B_r \rceil$ CTAs.
#
# Could FA1 do that? Its outer loop runs over keys, and every turn updates *all* rows: CTAs that split the keys of a head would have to take turns at $O_i$, $m_i$ and $l_i$. Its inner loop, over queries, can be split among CTAs, but then each of them loads all of K and V for its own rows, and what is left is FA2 with $O$ still in HBM.
#
# On this series' workload ($B N = 16384$, $H d = 2048$) $B \cdot N$ is fixed, so the number of FA2's CTAs does not depend on $N$: at $d = 64$, with $B_r = 128$, it is 4096, 31 for each of an H200's 132 SMs. FA1 has $B H = 32$ CTAs left at $N = 16384$. The recorded throughput of the two:

# %%
recorded = record.headline(pd.concat([record.load("03_fa1_fp32"), record.load("04_fa2_fp32")]))
plot.throughput(recorded[recorded["name"] == recorded["rung"]])

# %% [markdown]
# **What to see.** FlashAttention-1 holds its level on the H200 as long as there are about two CTAs per SM, all that fit at a time: up to $N = 2048$ at $D = 64$, up to 1024 at $D = 128$, where there are half as many heads. Below one CTA per SM it halves with each doubling of $N$. FlashAttention-2 loses nothing with length. How high the two levels are has more to do with section 5 than with this one.

# %% [markdown]
# ## 4 · Fewer operations outside the products
#
# Multiply-adds are a GPU's cheapest operations. On an H200's CUDA cores (the ordinary arithmetic units) an SM completes 128 fp32 multiply-adds per clock, but only 16 special functions, such as the exponential or the reciprocal ([CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions), compute capability 9.0). A division is a reciprocal and several more instructions. On tensor cores, units that multiply whole small matrices and come with notebook 10, products get cheaper still and everything else does not. The paper's changes side by side:
#
# | | FlashAttention-1 | FlashAttention-2 |
# |---|---|---|
# | loops | keys outside, queries inside | queries outside (spread over CTAs), keys inside |
# | stays on the chip in the inner loop | $K_j$, $V_j$ | $Q_i$, $O_i$, $m_i$, $l_i$ |
# | read again in every outer step | $Q$, $O$, $m$, $l$ | $K$, $V$ |
# | elements moved, leading term | $3 N^2 d / B_c$ | $2 N^2 d / B_r$ |
# | CTAs | $B H$ | $B H \lceil N / B_r \rceil$ |
# | exponentials per tile | $B_r B_c + 2 B_r$ | $B_r B_c + B_r$ |
# | multiplications of elements of $O$ per tile | $2 B_r d$ | $B_r d$ |
# | divisions of elements of $O$ | $B_r d$ per tile | $B_r d$, once |
#
# In fp32 the last three lines are worth little beside the $2 B_r B_c d$ multiply-adds of the products. Our kernel goes a little further: it folds $\text{scale} \cdot \log_2 e$ into $Q$ before the loop, so the multiplications of $S$ by the scale disappear and $\exp$ becomes $\mathrm{exp2}$, the instruction the hardware has.

# %% [markdown]
# ## 5 · The products: register tiling
#
# Look at $S = Q K^\top$ with both tiles in shared memory. The obvious way gives each thread one element of $S$: for each $k$ it loads $Q_{ik}$ and $K_{jk}$ and does one multiply-add. Two loads, 8 bytes, for 2 FLOPs: 4 bytes per FLOP.
#
# Give a thread a block of $T_M \times T_N$ elements instead. For each $k$ it loads $T_M$ numbers of $Q$ and $T_N$ of $K$, and does all $T_M T_N$ products of the two, an **outer product** ([register tiling](glossary.md#register-tiling)). Bytes asked for per FLOP:
#
# $$ \frac{4\,(T_M + T_N)}{2\,T_M T_N} = 2 \left( \frac{1}{T_M} + \frac{1}{T_N} \right) . $$
#
# Shared memory delivers one [wavefront](glossary.md#wavefront) of 128 bytes per clock; the CUDA cores of an SM do 128 multiply-adds, 256 FLOPs, per clock: $128 / 256 = 0.5$ bytes per FLOP.

# %%
draw.register_tiling([(1, 1), (2, 2), (4, 4), (8, 4), (8, 8), (16, 8)])

# %% [markdown]
# **What to see.** The larger the tile, the fewer bytes per FLOP; 8 × 8 is the first square on the line. 16 × 8 would be better still, but a thread has at most 255 registers, and its tiles of $S$ and $O$ alone would take 256.
#
# This is what threads *ask for*. What is *delivered* can be less, because a word that several lanes want is handed out once for all lanes that are served together. So the arrangement of a warp's lanes counts too, and the bytes that matter are those of the wavefronts. We count them below.

# %% [markdown]
# ## The kernel
#
# `kernels/04_fa2_fp32.cu`, one CTA per query tile. Its skeleton, with the names of the regions:
#
# ```cpp
# Q_smem = Q_i^T * scale * log2(e);  O_reg = 0, m_reg = -inf, l_reg = 0
# fetch and commit the first slabs of K and V;  __syncthreads();
# for (j0 = 0; j0 < Nk; j0 += Bc) {              // the only loop over tiles
#   for (s = 0; s < slabs; ++s)                  // scores
#     fetch_K(s + 1), S_reg += Q_smem K_smem, commit_K(s + 1), __syncthreads();
#   mask columns past Nk;
#   m_reg, l_reg, O_reg, P = rescaled            // online_update
#   for (half = 0; half < 2; ++half)             // output
#     P_smem = half of P;
#     for (s …) fetch_V(), O_reg += P_smem V_smem, commit_V(), __syncthreads();
# }
# O = O_reg / l_reg, LSE                         // epilogue
# ```
#
# A **slab** is a part of a tile of K or V, cut along the inner dimension of the product: `Ks` columns of $K_j$ or `Ks` rows of $V_j$. While one slab is multiplied, the next (after a tile's last slab, the next tile's first) is on its way from HBM into registers (`fetch`); afterwards it goes to shared memory (`commit`), into the buffer that nobody reads at that moment. One barrier per slab is enough, because there are two buffers.

# %%
show.region("04_fa2_fp32", "tile")

# %% [markdown]
# A tile has $B_c = d$ keys, so $S$ ($B_r \times B_c$) and $O$ ($B_r \times d$) have the same shape and the same division among threads: 8 × 8 each. Four warps lie below each other; a warp owns its rows over all columns. Which lane has which elements follows from `ty`, its place along the rows, and `tx`, along the columns:

# %%
d = 64
TY = 32 // (d // 8)  # the kernel's line: ty = threadIdx.x % TY, tx = threadIdx.x % 32 / TY
lane = np.arange(32)
draw.warp_tile(ty=lane % TY, tx=lane // TY, d=d, lane=5)

# %% [markdown]
# **What to see.** One warp's part of $S$, 32 × 64, in pieces of 4 × 4; the number is the lane that computes the piece. Lane 5 has four of them, in green. For one $k$ it reads two groups of four from a column of $Q$ (orange) and two from a column of $K$ (blue): four loads of 16 bytes for 64 multiply-adds. The two groups are half a tile apart rather than side by side, so that neighbouring lanes read neighbouring groups and different banks serve them.

# %%
show.region("04_fa2_fp32", "multiply")

# %% [markdown]
# This one function does both products. It wants both operands with $k$ as the slow index, so that a thread's values are neighbours in memory: $Q$, $K$ and $\tilde P$ are stored transposed, $V$ is already the right way round. (The order of the 64 multiply-adds does not change the result. Down one column and up the next, each shares an operand with the one before it, which spares a read of the registers where the hardware keeps the last operand at hand.)
#
# ### How many bytes are delivered?
#
# Take one step of $k$ for one warp, with the rule of notebook 03: quarters of 8 lanes, one after the other, and a half's two quarters together where lanes share addresses in pairs. A load of $Q$: lane $i$ reads group `ty` $= i \bmod 4$. A load of $K$: lane $i$ reads group `tx` $= \lfloor i / 4 \rfloor$. There are two loads of each.

# %%
per_k = ...  # your prediction: wavefronts of one warp for one k, all four loads together

# %% tags=["reveal"]
one_Q = len(banks.wavefronts([16 * (i % 4) for i in range(32)], width=16))  # bytes, from the start of the row
one_K = len(banks.wavefronts([16 * (i // 4) for i in range(32)], width=16))
predict(per_k, 2 * one_Q + 2 * one_K, "wavefronts per k")
print(f"a load of Q {one_Q}, of K {one_K}")
print(f"{128 * (2 * one_Q + 2 * one_K) / (32 * 64 * 2)} bytes per FLOP: 32 lanes do 64 multiply-adds each")

# %% [markdown]
# In a load of $Q$ no two neighbours ask for the same group: four quarters, four wavefronts. In a load of $K$ lanes 0 to 3 ask for one group, lanes 4 to 7 for the next: in pairs, so two quarters go together, and there are two wavefronts. $2 \cdot 4 + 2 \cdot 2 = 12$ wavefronts of 128 bytes for 4096 FLOPs: **0.375 bytes per FLOP**, below the 0.5 that an SM delivers, where the threads ask for exactly 0.5. Exercise 4.2 arranges the lanes better still.

# %%
show.region("04_fa2_fp32", "scores")

# %% [markdown]
# Slab by slab along $d$; then columns past the last key are set to $-\infty$.

# %%
show.region("04_fa2_fp32", "online_update")

# %% [markdown]
# Lines 9 and 10 of the algorithm. `alpha` [rescales](glossary.md#rescaling) $l$ and $O$, both in registers. `l_reg` holds the sum over this thread's columns only; since all threads of a row use the same `alpha`, their partial sums can be added at the very end. The maximum cannot wait: every thread needs it now, so it is exchanged with [shuffles](glossary.md#shuffle).
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
# How much less does FA2 request from HBM, with the tiles of the two kernels? $N = 512$, $d = 64$: FA1 has $B_c = 32$, FA2 $B_r = 128$.

# %%
less = ...  # your prediction: bytes of FA1 over bytes of FA2


# %%
def fa2_bytes(N, d, heads=1):
    """Bytes that 04_fa2_fp32 requests, by tensor: (read, written)."""
    T = math.ceil(N / (8192 // d))  # passes over K and V
    table = {"Q": (N * d, 0), "K": (T * N * d, 0), "V": (T * N * d, 0), "O": (0, N * d), "LSE": (0, N)}
    return pd.DataFrame(table, index=["bytes_read", "bytes_written"]).T * 4 * heads


# %% tags=["reveal"]
q, k, v = (torch.randn(1, 2, 512, 64, device=device) for _ in range(3))
runs = {"03_fa1_fp32": load("03_fa1_fp32", quiet=True), "04_fa2_fp32": kernel}
counted = {name: traffic(run, q, k, v)[["bytes_read", "bytes_written"]] for name, run in runs.items()}
total = {name: table.to_numpy().sum() for name, table in counted.items()}
predict(less, total["03_fa1_fp32"] / total["04_fa2_fp32"], "times fewer bytes")
agrees = (counted["04_fa2_fp32"].loc[fa2_bytes(512, 64, 2).index] == fa2_bytes(512, 64, 2)).all(axis=None)
print("FA2, tensor by tensor:", "as the formula says, to the byte" if agrees else "NOT as the formula says")
by_tensor = {name: table.sum(axis=1) for name, table in counted.items()}
draw.bytes_by_tensor(by_tensor, "Bytes requested, B H = 2, N = 512, d = 64")

# %% [markdown]
# **What to see.** FA1 reads and writes $O$ at every tile and reads $Q$ each time. In FA2 both shrink to one pass, and K and V grow instead, to four passes. $m$ and $l$ are gone: they never leave the registers. (In FA1 the eight threads of a row all ask for them, so their reads count eightfold; section 2's formula gives 5.2.) FA2 needs $B_r > \frac12 d$ to move less than three kernels do; it has 128.
#
# ### The X-ray
#
# Do the wavefronts come out as derived? $S$ and $O$ take $4 N^2 d$ FLOPs per head, 0.375 bytes each:

# %%
small = [x[:, :, :256] for x in (q, k, v)]
ray = xray(kernel, *small)
derived = 0.375 * record.forward_flops(1, 2, 256, 256, 64) / 128
gpu = record.load("04_fa2_fp32", "counters", device="nvidia-h200").query("N == 256 and H == 2").iloc[0]
print(f"loads: {derived:.0f} wavefronts derived, {ray.total(space='shared', op='load').cost} in the X-ray, ", end="")
print(f"{gpu.shared_load_wavefronts} on the {gpu.device}")
print(f"conflicts of stores: {ray.total(space='shared', op='store').excess} in the X-ray, {gpu.shared_store_conflicts}")
ray

# %% [markdown]
# **What to see.** The loads are free of conflicts. (On the card a count of loads can be off by a few.) Two lines have all the conflicts: those that store $K$ and $Q$ *transposed*. One store to `K_smem`:

# %%
ray.bank_map("fa::store<T::stage>(K_smem")

# %% [markdown]
# **What to see.** A lane holds four keys of one column and stores them side by side; the next lane's column lies four rows further down, and a row is `ld_k` = 68 floats long. $4 \cdot 68 = 272$, which is 16 modulo 32: the eight lanes of a quarter meet in two groups of four banks and take four turns instead of one.
#
# No padding ends this. A store of 16 bytes needs a row length that is a multiple of 4, and four such rows are a multiple of 16 floats, so columns begin in bank 0 or 16. The cure is to permute the banks instead, a **[swizzle](glossary.md#swizzle)**, the subject of notebook 11. Here the stores are a sixth of all wavefronts, so there is little to gain.

# %% [markdown]
# ### Error

# %%
plot.error(record.load("04_fa2_fp32", "error"))

# %% [markdown]
# **What to see.** Both errors stay well inside the budget. At long $N$ the error of $O$ is two to three times that of `03_fa1_fp32`, probably because 04 adds all $N$ products of an element into one register, where 03 adds up 32 at a time and then merges.

# %% [markdown]
# ## What the order of the loops is worth by itself
#
# Exchange the two loops of a naive kernel and change nothing else. `helpers/lessons/loop_order.cu` gives each thread a row of $Q$: one warp and one CTA per head, one element at a time from tiles of 32 rows in shared memory, $O$, $m$ and $l$ in HBM. (It is modelled on a [public pair of kernels](https://github.com/raymond1123/Flash-Attention) "in naive manner", whose author found version 2 the slower one; see `data/published/naive_v1_v2_forward_backward.csv`.)

# %%
keys_outside, queries_outside = loop_order.naive("keys"), loop_order.naive("queries")
for run in (keys_outside, queries_outside):
    check(run, reference.cases(run.rung, device)).require()  # the small cases: these kernels are slow
print("both right")

# %% [markdown]
# In each inner step the order of FA1 loads one new tile ($Q_i$), the order of FA2 two ($K_j$ and $V_j$); both read and write $O_i$.

# %%
times_bytes = ...  # your prediction: bytes with the queries outside over bytes with the keys outside
times_time = ...  # and the same of the time, on a GPU

# %% tags=["reveal"]
four = {"naive, keys outside": keys_outside, "naive, queries outside": queries_outside} | runs
moved = {}
for label, run in four.items():
    counted = traffic(run, *(torch.randn(1, 2, 256, 64) for _ in range(3)))
    moved[label] = (counted["bytes_read"] + counted["bytes_written"]).sum() / 2**20
if device == "cuda":
    inputs = [torch.randn(2, 12, 1024, 64, device=device) for _ in range(3)]
    samples = bench.measure(four, inputs).assign(device=torch.cuda.get_device_name())
else:
    samples = record.load("04_fa2_fp32", "loop_order")
ms = samples.groupby("name").ms.median().reindex(list(four))

# %% tags=["reveal"]
keys, queries = list(four)[:2]
predict(times_bytes, moved[queries] / moved[keys], "times the bytes")
predict(times_time, ms[queries] / ms[keys], "times the time")
print(f"time: {samples.device.iloc[0]}, B = 2, H = 12, N = 1024, d = 64; bytes at B H = 2, N = 256")
table = pd.DataFrame({"MiB requested": pd.Series(moved).round(2), "ms": ms.round(3)})
table.assign(**{"times faster than the first": (ms.iloc[0] / ms).round(1)})

# %% [markdown]
# The exchange alone costs bytes: 4 tiles per step instead of 3 (the loads outside the inner loop bring 1.33 down a little). On the H200 the time hardly changes; with the queries outside, the same rows of $O$ are updated in every step and probably stay in the L1 cache, which we have not measured. (Before two lines took care of rows of $-\infty$, the same pair took 82 and 68 ms: what the compiler makes of the loop weighs more than its order.) This kernel does not wait for HBM. It asks for 4 bytes of shared memory per FLOP, its lanes read rows 64 floats apart, all in one bank, and it runs one warp per CTA and one CTA per head. None of the three depends on the order.
#
# The last two rows put that in proportion. `03_fa1_fp32` has the *same* order as the first row. What the order of FA2 is good for is what it makes possible: $O$, $m$ and $l$ in registers, and a CTA per query tile.

# %% [markdown]
# ## Beside its peers
#
# The recorded runs of this rung beside PyTorch's own attention in fp32, TF32 off.

# %%
plot.throughput(record.load("04_fa2_fp32"))

# %% [markdown]
# **What to see.** As the geometric mean over $N \ge 1024$, it has 1.20<!--= ratio("04", "EFFICIENT", 64, dtype="fp32"):.2f --> times the speed of EFFICIENT at $d = 64$ and 1.02<!--= ratio("04", "EFFICIENT", 128, dtype="fp32"):.2f --> at $d = 128$, and 2.3<!--= ratio("04", "MATH", 64, dtype="fp32"):.1f --> and 1.7<!--= ratio("04", "MATH", 128, dtype="fp32"):.1f --> times that of MATH.
#
# ### Against the machine
#
# The roofline of notebooks 00 and 01, and by the same method: heights are measured, intensities are FLOPs over the least bytes that a kernel of this kind has to move to and from HBM ($S$ and $P$ written and read, or only $Q$, $K$, $V$, $O$, LSE). $B = 4$, $H = 32$, $N = 4096$, $d = 64$.

# %%
shape = {"B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}
stems = ["01_naive", "03_fa1_fp32", "04_fa2_fp32"]
table = record.medians(pd.concat([record.load(stem, device="nvidia-h200") for stem in stems]))
table = table[(table[list(shape)] == pd.Series(shape)).all(axis=1)]
points = table[(table["name"] == table["rung"]) | (table["name"] == "SDPA MATH") & (table["rung"] == stems[-1])]
points = points.assign(flops=record.forward_flops(**shape))
points["bytes"] = [record.least_bytes(name, **shape) for name in points["name"]]
plot.roofline(points, record.load("device", "ceilings", device="nvidia-h200"))

# %% [markdown]
# **What to see.** The two on the right form no $S$, and HBM is far from being their limit. What lifts 04 above 03 at the same intensity is the rest of this notebook: CTAs for every SM and register tiles. (EFFICIENT, not drawn, would lie just below 04.)

# %% [markdown]
# ## What still hurts
#
# How far away is the flat roof of fp32, and is there a higher one?

# %%
ceilings = record.load("device", "ceilings")
top = ceilings.groupby("name").value.median()
best = record.medians(record.headline(record.load("04_fa2_fp32"))).query("name == '04_fa2_fp32'")
print(f"{record.about('device', 'ceilings')['device']}:")
for D, tflops in best.groupby("D").tflops.max().items():
    share = tflops / top["fp32 matmul"]
    print(f"  04_fa2_fp32, D = {D}: {tflops:.1f} TFLOP/s, {share:.0%} of a large fp32 matrix product")
times_faster = top["fp16 matmul"] / top["fp32 matmul"]
print(f"  a large fp16 matrix product runs at {times_faster:.0f} times the rate of an fp32 one")

# %% [markdown]
# The last line is the point. In fp32 the products run on the **CUDA cores**, one multiply-add per lane and instruction, and no loop order changes their number. The same SM has **[tensor cores](glossary.md#tensor-core)**. Notebook 10 gives them the two products, and everything around them (the layout of the tiles, who holds which element, what has to pass through shared memory) has to be thought through again.

# %% [markdown]
# ## Exercises
#
# ### Exercise 4.1 · Three faults, three fingerprints
#
# Each kernel below has one fault: its `scale` lacks the factor $\log_2 e$, or it forgets to `rescale` $l$, or it does not mask the `tail` of the last tile of keys. The table says which inputs each gets right.
# Which is which? There are 16 queries and $N$ keys; $B_c = 64$ at $d = 64$; "equal scores" means $K = 0$.
#
# <details><summary>Hint</summary>
#
# With one tile there is nothing to rescale. With equal scores every $P$ is 1, whatever the scale.
# </details>

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
def matched():
    right = sum(str(answer.get(name)).strip().lower() == fault for name, fault in lineup.items())
    assert right == 3, f"{right} of the three are right"
    return True


exercise.verify("4.1", matched)

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
# ### Exercise 4.2 · Twelve wavefronts are not the least
#
# The 32 lanes of a warp form a grid of 4 × 8: `ty` from 0 to 3, `tx` from 0 to 7. The kernel numbers them column by column and needs 12 wavefronts per $k$. Find a numbering, each pair (`ty`, `tx`) once, that needs 8. Each operand's two loads differ only by an offset that changes nothing.
#
# <details><summary>Hint</summary>
#
# Let lane `i` share its `tx` with one of the lanes `i ^ 1` and `i ^ 2`, and its `ty` with the other (`^`: exclusive or, of Python, too).
# </details>


# %%
# Exercise 4.2: from the number of a lane to its place
def place(lane):
    ty, tx = lane % 4, lane // 4
    return ty, tx


# %%
def eight():
    places = [tuple(np.ravel(place(lane)).tolist()) for lane in range(32)]
    assert {len(each) for each in places} == {2}, "give (ty, tx)"
    assert sorted(places) == [(ty, tx) for ty in range(4) for tx in range(8)], "not every place has one lane"
    Q, K = (len(banks.wavefronts([16 * at for at in axis], width=16)) for axis in zip(*places))
    assert 2 * Q + 2 * K == 8, f"{2 * Q + 2 * K} wavefronts: {Q} for a load of Q, {K} for a load of K"
    return True


exercise.verify("4.2", eight)

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# ```python
# def place(lane):
#     ty = lane >> 1 & 1 | lane >> 3 & 2  # bits 1 and 4
#     tx = lane & 1 | lane >> 1 & 6  # bits 0, 2 and 3
#     return ty, tx
# ```
#
# Lanes `i` and `i ^ 1` have the same `ty`: in loads of $Q$ two quarters are served together. Lanes `i` and `i ^ 2` have the same `tx`: in loads of $K$ too. Two wavefronts per load, 0.25 bytes per FLOP. Whether the kernel gets faster is another question: at 0.375 shared memory is not its limit any more. (The shuffles' masks would have to follow the bits of `tx`.)
#
# </details>

# %% [markdown]
# In the **tasks** you write parts of the rung yourself, from one loop to the whole kernel, each without a look at the rung's own. The form says what is given and what has to hold afterwards; the rest of the kernel stays as it is. The `%%region` cell judges what you type: solved means right in every case of `check` and no finding in the X-ray, whose counts stand beside the rung's own. Hints unfold one by one.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 04.2 · The epilogue
#
# One loop over the rows of a thread. You learn where the partial sums of $l$ come together, and in which layout a thread holds its 8 × 8 elements.

# %%
blank("04", "epilogue")

# %% tags=["active-ipynb"]
# %%region 04 epilogue -> my_epilogue
# // type here

# %%
hint("04.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `epilogue` of [04_fa2_fp32.cu](../kernels/04_fa2_fp32.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 04.1 · The online update
#
# The heart of the algorithm: maximum, rescale, exponentials, sums. You learn which of these all lanes of a row need now and which can wait for the epilogue.

# %%
blank("04", "online_update")

# %% tags=["active-ipynb"]
# %%region 04 online_update -> my_online_update
# // type here

# %%
hint("04.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `online_update` of [04_fa2_fp32.cu](../kernels/04_fa2_fp32.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 04.3 · The second product
#
# $O \mathrel{+}= \tilde P V_j$ with slabs on the way. You learn to order stores, barriers and reads of two buffers. The inputs come one by one; a barrier too few is reported with its two lines.

# %%
blank("04", "output")

# %% tags=["active-ipynb"]
# %%region 04 output -> my_output
# // type here

# %%
hint("04.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `output` of [04_fa2_fp32.cu](../kernels/04_fa2_fp32.cu), which the notebook does not show (`show.region("04_fa2_fp32", "output")` does).
# </details>

# %% [markdown]
# ### Task 04.9 · The whole rung
#
# FlashAttention-2 from the header block. Begin without slabs: whole tiles, one barrier before and one after each product. Then compare your wavefronts and bytes with the rung's.

# %%
print(kernel.rung.source.split("#include")[0])  # the header block

# %%
blank("04")

# %% tags=["active-ipynb"]
# %%region 04 kernel -> my_kernel
# // type here

# %%
hint("04.9")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: all of it that follows the header block of [04_fa2_fp32.cu](../kernels/04_fa2_fp32.cu), parts of which stand above.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
#
# <details><summary>1. Why can FA2's outer loop be spread over CTAs as it is, and FA1's not?</summary>
#
# FA2's outer loop runs over query tiles, and no two of them share a row of $O$, $m$ or $l$. FA1's runs over key tiles, each of which updates every row. (FA1's inner loop could be split, at the price of loading K and V in every CTA.)
#
# </details>
# <details><summary>2. Which tile decides FA2's traffic, and what limits it?</summary>
#
# $B_r$: K and V are read once per query tile. It is limited by the registers for $O$ and $S$ and by the shared memory for $Q_i$ and $\tilde P$.
#
# </details>
# <details><summary>3. What does "divide once" save, per tile?</summary>
#
# $B_r d$ divisions. (That $\tilde P$ is taken relative to $m^{new}$ at once, line 9, saves one of two multiplications per element of $O$, and $B_r$ exponentials.)
#
# </details>
# <details><summary>4. A kernel gives each thread a 4 × 4 tile and asks for 1 byte per FLOP. Is shared memory sure to halve its speed?</summary>
#
# No. Lanes that are served together share words, so the wavefronts may deliver less than is asked for. Count them: bytes delivered per FLOP against 0.5.
#
# </details>
# <details><summary>5. Someone exchanges the loops of a one-row-per-thread kernel and finds it no faster. What would you look at first?</summary>
#
# Whether $O$ is still in HBM, whether the grid grew, and how many wavefronts each FLOP costs.
#
# </details>
# <details><summary>6. What would make this kernel several times faster without changing the algorithm?</summary>
#
# Units that do more multiply-adds per byte from shared memory: tensor cores. Notebook 10.
#
# </details>
