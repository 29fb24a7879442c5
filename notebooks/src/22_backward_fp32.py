# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---


# %% [markdown]
# # 22 · Backward: gradients without P
#
# [← 21 · Split the keys, merge the states](21_split_kv.ipynb) | [22_backward_fp32.cu](../kernels/22_backward_fp32.cu) | [glossary](glossary.md) | [23 · Backward on tensor cores →](23_backward_mma.ipynb)
#
# **After this notebook you can**
# - derive the gradients of attention line by line, and hold every line against autograd;
# - say what the forward pass has to keep for the backward pass, in bytes, and why it is one number per query;
# - compare the orders in which a backward kernel can walk the tiles: who owns which sum, what is added up across CTAs, and what that costs in bytes and in reproducibility;
# - tell from the gradient that is wrong which line of a backward kernel to look at.
#
# **Time** 60 minutes.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb) for the register tiles, [02 · Online softmax](02_online_softmax.ipynb) for LSE, and section 1 of [12 · Double-buffered](12_double_buffered.ipynb) for `cp.async`. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: $P$ is not kept for the backward pass. LSE, one number per query, is enough to form it again, tile by tile: five matrix products in all.
# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import numpy as np
import pandas as pd
import torch

from helpers import check, for_d64, load, predict, xray
from helpers import compare as compare_outputs
from helpers import draw_backward, exercise, op, plot, record, reference, show

torch.manual_seed(0)
kernel = load("22_backward_fp32")
device = kernel.device


# %% [markdown]
# ## The problem
#
# Training follows the gradient of a loss $L$, a single number at the end of the model. The backward pass through attention begins with the gradient of its output and ends with those of its inputs. As in the papers, $dX$ stands for $\partial L / \partial X$, an array of the shape of $X$. Given $dO$, what are $dQ$, $dK$ and $dV$?
#
# PyTorch can differentiate anything made of its operations. During the forward pass it *keeps* what the backward pass will need. How much is that for plain attention, and how much for a fused operation that keeps LSE instead of $P$?
# %%
def kept(f, *inputs):
    """Bytes that autograd keeps of f(*inputs) for the backward pass; tensors that share memory count once."""
    sizes = {}

    def keep(t):
        memory = t.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        f(*inputs)
    return sum(sizes.values())


# %%
more_bytes = ...  # your prediction: at N = 512, d = 64, how many times as many bytes does plain attention keep?


# %% tags=["reveal"]
def plain(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


fused = op.operator("04_fa2_fp32")  # a rung as a PyTorch operation; its gradient is this notebook's kernel
rows, d = [], 64
for N in (128, 256, 512):
    q, k, v = (torch.randn(1, 1, N, d, device=device, requires_grad=True) for _ in range(3))
    rows.append((N, kept(plain, q, k, v), 4 * (3 * N * d + N * N), kept(fused, q, k, v), 4 * (4 * N * d + N)))
predict(more_bytes, rows[-1][1] / rows[-1][3], "times as many bytes at N = 512")
names = ["N", "plain", "4 (3Nd + N²)", "fused", "4 (4Nd + N)"]
pd.DataFrame(rows, columns=names).set_index("N")

# %% [markdown]
# Plain attention keeps $Q$, $K$, $V$ and all of $P$; the fused operation keeps $Q$, $K$, $V$, $O$ and LSE. The formulas fit to the byte. So it is $N^2$ numbers of $P$ against $N$ numbers of LSE (and the $N d$ of $O$, which the linear layer after attention keeps anyway). For one layer of this series' workload, 16384 tokens and a width of 2048, with heads of $d = 64$:
# %%
lengths, heads = [1024 << i for i in range(5)], 2048 // 64
kept_bytes = pd.DataFrame({"P": [4 * 16384 * heads * N for N in lengths], "LSE": 4 * 16384 * heads}, index=lengths)
draw_backward.stored_bytes(kept_bytes, "Kept for the backward pass: one layer, 16384 tokens, 32 heads, fp32")

# %% [markdown]
# **What to see.** Both axes are logarithmic. LSE takes 2 MiB however the 16384 tokens are cut into sequences. $P$ doubles with the length of a sequence: 32 GiB at 16384, for one layer of many.
#
# ## 1 · The gradients, line by line
#
# One head. The forward pass has three lines:
#
# $$ S = \text{scale} \cdot Q K^\top, \qquad P = \mathrm{softmax}(S) \text{ by rows}, \qquad O = P V . $$
#
# We go through them from the last to the first, and check each step in float64 against autograd.
# %%
torch.manual_seed(0)
Nq, Nk, d, scale = 5, 7, 4, 0.5
Q, K, V, dO = (torch.randn(n, d, dtype=torch.float64, requires_grad=True) for n in (Nq, Nk, Nk, Nq))
S = scale * Q @ K.T
P = torch.softmax(S, dim=1)
O = P @ V
grads = torch.autograd.grad(O, [V, P, S, Q, K], dO)
autograd = dict(zip(["dV", "dP", "dS", "dQ", "dK"], grads))


def compare(**ours):
    for name, value in ours.items():
        print(f"{name} {tuple(value.shape)}: differs from autograd's by {(value - autograd[name]).abs().max():.0e}")


# %% [markdown]
# ### Through a product
#
# Let $C = A B$. A small change $\Delta A$ of $A$ changes $C_{ij}$ by $\sum_k \Delta A_{ik} B_{kj}$, and so the loss by
#
# $$ \sum_{ij} dC_{ij} \sum_k \Delta A_{ik} B_{kj} = \sum_{ik} \Delta A_{ik} \Big( \sum_j dC_{ij} B_{kj} \Big) . $$
#
# The bracket is by definition $dA_{ik}$. In matrices, and for $B$ likewise:
#
# $$ dA = dC\, B^\top, \qquad dB = A^\top dC . $$
#
# The gradient of a factor is the gradient of the product times the *other* factor, transposed, on the other's side. For $O = P V$:
#
# $$ dP = dO\, V^\top, \qquad dV = P^\top dO . $$
# %%
dP = dO @ V.T
dV = P.T @ dO
compare(dP=dP, dV=dV)

# %% [markdown]
# ### Through the softmax
#
# Rows do not mix, so take one row, $p_k = e^{s_k} / \sum_l e^{s_l}$. How does $p_k$ change with $s_j$? The numerator contributes $p_k$ if $k = j$; the denominator always contributes $-p_k p_j$:
#
# $$ \frac{\partial p_k}{\partial s_j} = p_k \big([k = j] - p_j\big), \qquad [k = j] \text{ being 1 if } k = j \text{ and 0 otherwise.} $$
#
# Sum over all $p_k$ through which $s_j$ acts on the loss:
#
# $$ ds_j = \sum_k dp_k\, p_k \big([k = j] - p_j\big) = p_j \Big( dp_j - \sum_k p_k\, dp_k \Big) . $$
#
# The sum is one number per row, $\mathrm{delta}_i = \sum_k P_{ik}\, dP_{ik}$. (The papers call it $D_i$; here, $D$ and $d$ are the head dimension.) With $\circ$ for the product element by element,
#
# $$ dS = P \circ (dP - \mathrm{delta}) . $$
# %%
row = S[0].detach()
jacobian = torch.autograd.functional.jacobian(lambda s: torch.softmax(s, 0), row)  # [k, j]
p = torch.softmax(row, 0)
print("the matrix of derivatives is right:", torch.allclose(jacobian, torch.diag(p) - torch.outer(p, p)))
delta = (P * dP).sum(1, keepdim=True)
dS = P * (dP - delta)
compare(dS=dS)

# %% [markdown]
# ### delta, without P
#
# As defined, delta needs a whole row of $P$ and of $dP$, so a kernel that sees one tile of keys at a time would walk the row twice. But insert $dP_{ik} = \sum_c dO_{ic} V_{kc}$ and change the order of the sums:
#
# $$ \mathrm{delta}_i = \sum_k P_{ik} \sum_c dO_{ic} V_{kc} = \sum_c dO_{ic} \sum_k P_{ik} V_{kc} = \sum_c dO_{ic}\, O_{ic} . $$
#
# So delta is the row sum of $dO \circ O$: $d$ multiply-adds per row and *no* key. It is computed for all rows before the first tile is touched.
# %%
print("largest difference:", (delta - (dO * O).sum(1, keepdim=True)).abs().max().item())

# %% [markdown]
# ### Through the first product
#
# $S = \text{scale} \cdot Q K^\top$ is a product again, with a factor:
#
# $$ dQ = \text{scale} \cdot dS\, K, \qquad dK = \text{scale} \cdot dS^\top Q . $$
# %%
dQ = scale * dS @ K
dK = scale * dS.T @ Q
compare(dQ=dQ, dK=dK)

# %% [markdown]
# That is all of it: four products, and a fifth to form $P$ again.
#
# ## 2 · P again
#
# In the forward pass a tile of $P$ was not final until the last key had been seen: $m$ and $l$ could still change, and $O$ had to be rescaled. In the backward pass $\mathrm{LSE}_i = \ln \sum_j e^{S_{ij}}$ is known, so
#
# $$ P_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} = e^{S_{ij} - \mathrm{LSE}_i} . $$
#
# No maximum, no sum, no rescaling, and no overflow: for every key that LSE has counted, $P \le 1$. Any tile can be formed alone, in any order, from its rows of $Q$, its rows of $K$ and a number per query:
# %%
LSE = torch.logsumexp(S, 1, keepdim=True)
tile = torch.exp(scale * Q[2:4] @ K[3:6].T - LSE[2:4])  # queries 2, 3 and keys 3 to 5, nothing else
print("largest difference to the same tile of P:", (tile - P[2:4, 3:6]).abs().max().item())

# %% [markdown]
# ### What does forming P again cost?
#
# A product, $2d$ FLOPs for each element; keeping $P$ costs a write and a read. In picoseconds of the whole GPU per element of $P$, from the ceilings measured on the recorded card:
# %%
top = record.load("device", "ceilings", device="nvidia-h200").groupby("name").value.median()
rows = []
for dtype, size in (("fp32", 4), ("fp16", 2)):
    for d in (64, 128):
        rows.append((dtype, d, 2 * size / top["copy"], 2 * d / top[f"{dtype} matmul"]))  # bytes / (TB/s) is ps
pd.DataFrame(rows, columns=["dtype", "d", "write and read P, ps", "form it again, ps"]).round(2).set_index(
    ["dtype", "d"]
)

# %% [markdown]
# **What to see.** On tensor cores (fp16) forming it again is by far cheaper. In fp32 on CUDA cores it is not: there the size of memory is the reason. Five products instead of the forward pass's two: the backward pass is counted as 2.5 times the FLOPs of the forward pass.
#
# ## 3 · Who owns which sum
#
# With $i$ and $j$ for tiles, $dV_j = \sum_i P_{ij}^\top dO_i$ and $dK_j$ are sums over all *queries* that see tile $j$ of the keys. $dQ_i = \text{scale} \sum_j dS_{ij} K_j$ is a sum over all *keys*. The forward pass had one sum, over keys, so FlashAttention-2 gave each CTA a tile of queries and kept the sum inside it. Now there are sums in both directions, and one of them has to cross CTAs.
# %%
draw_backward.loop_orders()

# %% [markdown]
# **What to see.** Each square is a tile of $S$; arrows run over the tiles that contribute to one tile of a gradient.
#
# - **FlashAttention-1** (Algorithm 4 of [arXiv 2205.14135](https://arxiv.org/abs/2205.14135)), left: keys outside, queries inside. $K_j$, $V_j$ and the sums $dK_j$, $dV_j$ stay on the chip for a whole column; $dQ_i$ is fetched from HBM, added to and written back, once per tile. One CTA walks all of a head, so nothing crosses CTAs. Few long sequences then make too few CTAs.
# - **FlashAttention-2** (Algorithm 2 of [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)), middle: the *same* loop order, unlike in the forward pass. Each turn of the outer loop becomes a CTA. Now several [CTAs](glossary.md#cta) add to the same $dQ_i$.
# - **Queries outside**, right: $dQ_i$ stays inside a CTA, and *two* tensors, $dK$ and $dV$, have to be added up across CTAs.
#
# What crosses, as bytes read and written by the CTAs of one head in fp32, and the number of CTAs that share 132 SMs (workload as above):
# %%
Br, Bc, d = 64, 128, 64
orders = pd.DataFrame(index=pd.Index(lengths, name="N"))
tensor = 4 * orders.index * d / 2**20  # dQ, dK or dV of one head, MiB
orders["dQ across CTAs, MiB"] = 2 * tensor * (orders.index // Bc)
orders["dK, dV across CTAs, MiB"] = 2 * 2 * tensor * (orders.index // Br)
orders["CTAs, one per head"] = 16384 // orders.index * heads
orders["CTAs, one per tile of keys"] = orders["CTAs, one per head"] * (orders.index // Bc)
orders

# %% [markdown]
# With tiles of 64 queries and 128 keys, keys outside moves a quarter of the bytes: half the tensors, and half as many CTAs that add to each. So the kernel has FlashAttention-2's order.
#
# ### In which order?
#
# A sum of floats depends on the order of its terms. Take a row of $dQ$ with 64 numbers and shares from 16 tiles of keys, and add them in 1000 random orders.
# %%
different = ...  # your prediction: how many different results, bit by bit, come out of 1000 orders?

# %% tags=["reveal"]
rng = np.random.default_rng(0)
shares = rng.standard_normal((16, 64)).astype(np.float32)
exact = shares.astype(np.float64).sum(0)
results = []
for _ in range(1000):
    total = np.zeros(64, np.float32)
    for j in rng.permutation(16):  # CTAs in the order in which they finish
        total += shares[j]
    results.append(total)
print(f"largest error: {max(abs(x - exact).max() for x in results):.1e}")
predict(different, len({x.tobytes() for x in results}), "different results of 1000")


# %% [markdown]
# Each is as good as any other: the error is that of fp32. But a training run whose gradients differ in the last bit each time can't be repeated, and a rare bug can't be told from noise. The ways out, and who takes them:
#
# | way | price | taken by |
# |---|---|---|
# | one CTA per head | most of the GPU is idle when there are few heads | FlashAttention-1 |
# | [atomic](glossary.md#atomic) additions in any order | results differ from run to run | FlashAttention-2 and -3 by default, notebook 23 |
# | a copy of $dQ$ for each CTA of a head, added up in order afterwards | memory for the copies; only as many CTAs per head as fill the SMs | FlashAttention-2, [`deterministic=True`](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/flash_bwd_kernel.h) (`dq_accum_split_stride`) |
# | two kernels, one per direction | seven products instead of five: both need $S$ and $dP$ | |
# | atomic additions *in turn*: tile 0 of the keys, then 1, 2, … | whoever comes too early waits | this kernel; FlashAttention-3, [`deterministic=True`](https://github.com/Dao-AILab/flash-attention/blob/main/hopper/flash_api.cpp) (`dq_semaphore`) |
#
# For every tile of queries there is a counter, the **turn**: how many tiles of keys have added their share. A CTA waits until the counter shows its own number, adds, and increments it.
#
# Do they all wait for each other? In this model a step takes four products' time, then one for $dQ$, and $dQ_i$ may begin when the CTA before has finished its own $dQ_i$.
# %%
def hand_over(ctas, queries):
    """A row per step of each CTA; queries(j): the tiles of queries that CTA j walks, in order."""
    free, rows = {}, []  # tile of queries -> when the CTA before is done with its dQ
    for j in range(ctas):
        end = 0
        for i in queries(j):
            begin, ready = end, end + 4
            turn = max(ready, free.get(i, 0))
            end = free[i] = turn + 1
            rows.append((j, i, begin, ready, turn, end))
    return pd.DataFrame(rows, columns=["cta", "tile", "begin", "ready", "turn", "end"])


steps = hand_over(6, lambda j: range(5, -1, -1))  # from the last tile to the first, as the kernel walks them
draw_backward.hand_over(steps, "Six tiles of keys hand on dQ, six tiles of queries")


# %% [markdown]
# **What to see.** All begin with the same tile of queries, so all but the first wait, but only *once*: from then on each arrives just when its turn comes. (Why from the last tile to the first? Without a mask it makes no difference; see exercise 22.5.)
#
# On a GPU, CTAs don't keep step. What do turns cost there? A draft that adds without atomics and without turns (so its $dQ$ is wrong) is a few percent faster than the same draft with turns, least where sequences are longest:
# %%
def turns(steps):
    """How much faster draft 17, without turns, is than draft 6, with turns and the same otherwise."""
    ratios = steps.set_index(["step", "D"]).filter(regex=r"ratio.*\d").dropna(axis="columns")
    gain = ratios.loc[17] / ratios.loc[6] - 1
    names = gain.columns.str.removeprefix("ratio_").str.replace("_", ", ")
    gain.columns = names.str.replace(r"(\d+)", r"N = \1", regex=True)
    return gain.map("{:+.1%}".format)


plot.recorded("22_backward_fp32", "steps", turns)

# %% [markdown]
# ### A trap
#
# A GPU runs as many CTAs as fit; the others start when one ends. If those that run wait for one that has not started, they wait for ever, and CUDA promises no order in which CTAs start (CUDA C++ Programming Guide, "Thread Hierarchy"). So a CTA does not take its work from `blockIdx`: when it starts it draws a number, a **ticket**, which says what to do. Then every CTA that it has to wait for drew its ticket earlier, and so is running or done.
# %% [markdown]
# ## 4 · Five products
#
# In the order in which the kernel computes them, for one tile of queries and one of keys:
# %%
ways = dict.fromkeys(draw_backward.EDGES, "shared memory") | {("S", "P"): "registers", ("dP", "dS"): "registers"}
ends = {"dV": "registers, to the end", "dK": "registers, to the end", "dQ": "HBM, when it is our turn"}
draw_backward.dataflow(ways, ends, "One step of 22_backward_fp32")

# %% [markdown]
# **What to see.** $P$ is formed in registers, in the arrangement that suits $S$. $dV$ needs it transposed and in other threads, so it goes through shared memory; so does $dS$, for $dK$ and for $dQ$. They share one place: $dS$ overwrites $P$.
#
# The five are [register-tiled](glossary.md#register-tiling) as in notebook 04, 64 elements of the result per thread, or half or a quarter as many. They differ in what the summation runs over:
#
# | product | sums over | operands, row-major |
# |---|---|---|
# | $S = Q_i K_j^\top$, $dP = dO_i V_j^\top$ | $d$ | along the rows of both |
# | $dV_j \mathrel{+}= P^\top dO_i$, $dK_j \mathrel{+}= dS^\top Q_i$ | queries | down the rows of both |
# | $dQ_i \mathrel{+}= dS\, K_j$ | keys | along the rows of $dS$, down those of $K$ |
#
# *Down* the rows is better: one load of 16 bytes brings four elements for the same step of the sum. *Along* the rows, four elements belong to four steps, and a row has to arrive before its first FMA can start. So the operands of $S$ and $dP$ are transposed on their way into shared memory: `cp.async` copies 16, 8 or 4 bytes, and with 4 each element can go to its own place. With $K_j$ transposed, $dQ$ has its operands along the rows of both. That leaves two functions for five products. Rows of transposed tiles are padded by four elements (`ld_r`, `ld_c` below), so that no load and no store has a [bank conflict](glossary.md#bank-conflict).
# %% [markdown]
# ## The kernel
# %%
show.region("22_backward_fp32", "tile")

# %% [markdown]
# A CTA of 128 threads (256 at $d = 128$) holds a tile of $dK$ and of $dV$: 64 elements of each per thread (half as many at $d = 32$), 128 registers. That leaves room for one more 8 × 8 tile, which $S$, $dP$ and $dQ$ use one after the other. A CTA draws its ticket (a small CUDA kernel before this one computed delta and set $dQ$, turns and ticket to 0):
# %%
show.region("22_backward_fp32", "work")

# %% [markdown]
# $K_j$ stays in shared memory: $S$ and $dQ$ need it in every step, both transposed. At $d = 128$ there would be room for all of $V_j$ beside it on Hopper only, so $V_j$ passes through in **slabs**, as $Q_i$ and $dO_i$ do, one on its way while the one before is multiplied (notebook 12's pipeline). The last step of $S$, $dV$ and $dP$ already fetches the next product's first slab. Below, the two ways to multiply:
# %%
display(show.region("22_backward_fp32", "pipeline"), show.region("22_backward_fp32", "multiply"))

# %% [markdown]
# The step, product by product:
# %%
show.region("22_backward_fp32", "scores")

# %% [markdown]
# `exp2f` of scores in units of $\log_2$, as in all rungs since 04, so LSE has been multiplied by $\log_2 e$. A row that saw no key has LSE $= -\infty$, and $e^{S - \mathrm{LSE}}$ would be infinite; it gets $+\infty$ instead, and $P = 0$.
# %%
display(show.region("22_backward_fp32", "dV"), show.region("22_backward_fp32", "dS"))

# %% [markdown]
# $dK$ is $dV$ with $dS$ and $Q$ in place of $P$ and $dO$. The last product and the turn:
# %%
show.region("22_backward_fp32", "dQ")

# %% [markdown]
# Thread 0 asks for the turn until it comes (an atomic addition of 0 reads the value in the L2, where no stale copy can answer). The two `__threadfence` keep accesses in order: what this CTA adds to $dQ$ is visible to the whole GPU *before* the counter says so, and nothing is added before the counter was read. The additions are atomic although nobody else is at these rows: the L2 performs them, and no thread waits for a value to add to. What makes the result repeatable is the turn.
#
# The two `__syncthreads` keep that promise. Without the second, thread 0 passes the turn on while others still add; without the first, others add before the turn has come. Either way only the last bits vary, and no tool reports it, since atomic additions don't race: only comparing two runs on a GPU, bit by bit, can show it.
# %% [markdown]
# ## Run and check
# %%
check(kernel)


# %% [markdown]
# The rule is that of notebook 01: twice the error of the same five products in plain fp32 PyTorch, plus the rounding of the longest sums. Here the second part dominates: it assumes that every score is rounded at its worst and that all terms of a sum have one sign. How sharp is the rule then? Round all operands to TF32, 11 bits instead of fp32's 24, and hold the errors against the budget:
# %%
def tf32(x):
    """x with 11 significant bits, as a tensor core takes fp32 operands."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def with_tf32(q, k, v, do, scale):
    P = torch.softmax(scale * (tf32(q) @ tf32(k).mT), -1)
    delta = (do * (tf32(P) @ tf32(v))).sum(-1, keepdim=True)
    dS = P * (tf32(do) @ tf32(v).mT - delta)
    return scale * tf32(dS) @ tf32(k), scale * tf32(dS).mT @ tf32(q), tf32(P).mT @ tf32(do)


# %%
rows = {}
for N in (256, 1024):
    x = [torch.randn(1, 1, N, 64) for _ in range(4)]
    case = reference.Case("TF32", *x[:3], do=x[3])
    for c in compare_outputs(case, with_tf32(*x, 64**-0.5)):
        rows[N, f"d{c.output[1].upper()}"] = c.budget / c.pytorch_error, c.used
names = ["budget / PyTorch's error", "TF32's error / budget"]
pd.DataFrame(rows, names).T.rename_axis(["N", ""]).round(1)

# %% [markdown]
# **What to see.** The budgets of $dQ$ and $dK$ count $dP$ and delta as if they never cancelled: they are 140 to 370 times PyTorch's error on the emulator, and TF32 exceeds them by a factor of a few only, $dV$'s by far more. So `check` tells TF32 from fp32 by all three gradients, but an error of a few bits in $dQ$ or $dK$ alone would pass.
#
# ### Against no formula at all
#
# The reference knows the formulas of section 1. Suppose they were wrong, there and in the kernel? A difference quotient needs the forward pass alone: move one element of an input by $\pm\epsilon$ and look at the output. `torch.autograd.gradcheck` does so for every element. In fp32 the step has to be large ($10^{-3}$) and the tolerance wide: it can't see a small error, but it sees a wrong formula.
# %%
torch.manual_seed(0)
small = [torch.randn(1, 1, n, 32, dtype=torch.float64, device=device, requires_grad=True) for n in (2, 3, 3)]


def attention(q, k, v):
    return fused(q.float(), k.float(), v.float(), 0.5)[0].double()


torch.autograd.gradcheck(attention, small, eps=1e-3, atol=2e-3, rtol=1e-3, nondet_tol=0.0)

# %% [markdown]
# ### The same twice
#
# `nondet_tol=0.0` has asked for one thing more: that two runs agree bit by bit. At that size there is one tile of keys and nobody to take turns with. With several:
# %%
B, H, N = (4, 16, 2048) if device == "cuda" else (1, 2, 384)
q, k, v, do = (torch.randn(B, H, N, 64, device=device) for _ in range(4))
inputs = reference.Case("several tiles", q, k, v, do=do).inputs  # q, k, v, o, lse, do
first = kernel(*inputs)
again = [kernel(*inputs) for _ in range(3)]
print("the same, bit by bit:", [all(torch.equal(x, y) for x, y in zip(first, other)) for other in again])

# %% [markdown]
# On a GPU this is a test: CTAs come in another order every time. On the emulator they come in one order, so there it could hardly fail. But the emulator can show the trap. Let the first ticket stand for the *last* tile of keys. On a GPU all is well while all CTAs fit at the same time. And where they don't?
# %%
outcome = ...  # your prediction: "right", "wrong" or "hangs"

# %% tags=["reveal"]
source = for_d64("22_backward_fp32")  # the file with nothing but d = 64, which compiles in a third of the time
text = source.replace("tile = ticket % key_tiles,", "tile = key_tiles - 1 - ticket % key_tiles,")
backwards = load(source=text, device="cpu", quiet=True)
backwards.launcher.timeout = 1  # seconds
try:
    backwards(*(x.cpu()[:1, :1] for x in inputs))
except Exception as error:
    print(error)
    predict(outcome, "hangs", "is what it does")

# %% [markdown]
# The first CTA waits for a turn that nobody can give it.
#
# ## Predict, then measure
#
# ### Bytes by tensor
#
# How often is each tensor asked for? There are $N_k / B_c$ tiles of keys, each with $N_q / B_r$ steps. Look at the figure of section 4: which tensors does a step need, and how often? What stays in shared memory? And which does the first kernel, the one that computes delta, read?
# %%
dO_reads = ...  # your prediction: how often is each byte of dO read at N = 256 (Br = 64, Bc = 128)?
V_reads = ...  # and each byte of V?

# %% tags=["reveal"]
torch.manual_seed(0)
N, d, Br, Bc = 256, 64, 64, 128
q, k, v, do = (torch.randn(1, 1, N, d) for _ in range(4))
one_head = reference.Case("one head", q, k, v, do=do)
rays = xray(source, *one_head.inputs)
column, line = N // Bc, N // Br  # how often a row of queries, of keys is needed
times = {"Q": 2 * column, "K": 1, "V": line, "O": 1, "dO": 2 * column + 1, "dQ": 2 * column + 1, "dK": 1, "dV": 1}
counted = rays.tensors.loc[[*times, "LSE", "delta"]]
predict(dO_reads, counted.reads_per_byte.dO, "reads of each byte of dO")
predict(V_reads, counted.reads_per_byte.V, "reads of each byte of V")
plot.traffic(counted, {name: n * 4 * N * d for name, n in times.items()}, f"One head, N = {N}")

# %% [markdown]
# **What to see.** Every bar with a formula ends there. $dO$ is needed twice per step ($dV$, $dP$) and once for delta; $Q$ twice per step; $dQ$ is added to in each step, a read and a write, and set to zero once. $K$ stays in shared memory and comes once; $V$'s one tile comes again with every step. On a GPU the L2 answers most of that.
# %% [markdown]
# ## Beside its peers
#
# The work is counted as 2.5 times that of the forward pass, $10 B H N^2 d$ FLOPs, whatever a kernel really does. Peers are PyTorch's own backward passes in fp32, MATH (plain products with $P$ kept) and EFFICIENT (a fused kernel that forms $P$ again).
# %%
plot.recorded("22_backward_fp32", "backward", lambda x: plot.throughput(x[x.causal == 0]))


# %%
def beside(causal):
    def draw(samples):
        peers = ["SDPA MATH", "SDPA EFFICIENT"]
        return plot.ratio(samples[samples.causal == causal], "22_backward_fp32", peers)

    return plot.recorded("22_backward_fp32", "backward", draw)


beside(causal=1)


# %% [markdown]
# **How to read it.** Above, without a mask; below, with a causal one, as ratios: a mark is the median over the rounds, its whiskers the lowest and the highest round. MATH has $P$ in memory and cuBLAS for its products, four of them where our kernel computes five, so by this measure it has the easier task; the memory it needs is not in the figure. Our kernel is 1.07<!--= ratio("22", "MATH", 64, dtype="fp32"):.2f --> times as fast at $d = 64$ and 0.83<!--= ratio("22", "MATH", 128, dtype="fp32"):.2f --> times at $d = 128$. Beside EFFICIENT it is 1.09<!--= ratio("22", "EFFICIENT", 64, dtype="fp32"):.2f --> and 1.07<!--= ratio("22", "EFFICIENT", 128, dtype="fp32"):.2f --> times as fast. Under a causal mask MATH multiplies the masked half as well: 2.00<!--= ratio("22", "MATH", 64, causal=1, dtype="fp32"):.2f --> and 1.53<!--= ratio("22", "MATH", 128, causal=1, dtype="fp32"):.2f -->. (Geometric means for $N \ge 1024$.)
# %% [markdown]
# ## What made it fast
#
# Seven of the drafts on the way, timed side by side; each differs from one above it by what its name says. [29 · Log](29_log.ipynb) has all 18, with what was expected of each.
# %%
def drafts(steps):
    names = {1: "only dK and dV stay", 2: "like 1, B's next row loaded early", 3: "like 1, K and V stay"}
    names |= {4: "2 and 3 together", 6: "like 4, sums run down the rows"}
    names |= {17: "like 6, nobody waits for a turn (wrong)", 18: "like 6, no slab is fetched (wrong)"}
    return draw_backward.steps_taken(steps, "Drafts of 22_backward_fp32", "SDPA MATH", names)


plot.recorded("22_backward_fp32", "steps", drafts)

# %% [markdown]
# **What to see.** *Keeping $K$ and $V$* (3; the rung keeps $K$ alone) saves fetching: 13<!--= 100 * (step("22", 3, 64) / step("22", 1, 64) - 1):.0f --> % over draft 1 at $d = 64$. *Going down the rows* in four of five products (6) brings 11<!--= 100 * (step("22", 6, 64) / step("22", 4, 64) - 1):.0f --> % over draft 4. The last two are no kernels but bounds on what is left: without turns 3<!--= 100 * (step("22", 17, 64) / step("22", 6, 64) - 1):.0f --> %, without fetching 6<!--= 100 * (step("22", 18, 64) / step("22", 6, 64) - 1):.0f --> % at $d = 64$. The rung is nearest to draft 10.
# %% [markdown]
# ## What still hurts
#
# 1. **fp32 on CUDA cores.** The units that multiply fastest are idle. Notebook 23.
# 2. **Shared memory.** $P$ and $dS$ cross it because the next product wants them in other threads. Notebook 23 avoids most of that.
# 3. **Fetching and turns.** Addresses and copies are instructions, too; a turn costs barriers and a wait.
# %% [markdown]
# ## Exercises
#
# In a *task* you write a region of the rung. `blank` shows what is given and what has to hold; your cell is compiled, checked in all cases of `check`, and X-rayed beside the rung's own. Task 22.9 is the whole rung: `python -m helpers exercise new 22 kernel`.

# %%
from helpers import blank, hint, progress

# %load_ext helpers

# %% [markdown]
# ### Task 22.1 · What is ready before the first tile
#
# The kernel that runs first: delta, and zeros where sums and counters begin. It is a row sum by a warp, as in notebook 02.

# %%
blank("22", "delta")

# %%
# %%region 22 delta -> my_delta
# // your code

# %%
hint("22.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `delta` of [22_backward_fp32.cu](../kernels/22_backward_fp32.cu): `show.region("22_backward_fp32", "delta")`.
#
# </details>

# %% [markdown]
# ### Task 22.2 · The line between two products
#
# $dP$ slab by slab, then $dS$ in place of $P$. It teaches a pipeline with a rule of its own: the last step of $dP$ fetches $dK$'s first slab.

# %%
blank("22", "dS")

# %%
# %%region 22 dS -> my_dS
# // your code

# %%
hint("22.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `dS` of [22_backward_fp32.cu](../kernels/22_backward_fp32.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Task 22.3 · In turn
#
# The last product, and a sum that is the same bit by bit in every run. Write down first what each barrier and each fence has to order.

# %%
blank("22", "dQ")

# %%
# %%region 22 dQ -> my_dQ
# // your code

# %%
hint("22.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `dQ` of [22_backward_fp32.cu](../kernels/22_backward_fp32.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Exercise 22.4 · Which gradient breaks?
#
# Four bugs, each in one line. For each, which of `dq`, `dk`, `dv` come out wrong for random inputs with $N = 100$? Predict from the five lines of section 1. (The tile has 128 keys; rows past the end of $K$, $V$, $Q$ and $dO$ are zeros.)
# %%
bugs = {
    "delta left out": ("P_reg[e] *= dP_reg[r][c + e] - delta;", "P_reg[e] *= dP_reg[r][c + e];"),
    "dK without the scale": ("dK_reg[r][c + e] *= a.scale;", ";"),
    "LSE taken for units of log2": ("LSE * fa::log2_e", "LSE"),
    "keys past the end not masked": ("col >= end ||", ""),
}

# %%
torch.manual_seed(0)
hundred = [torch.randn(1, 1, 100, 64, device=device) for _ in range(4)]


def broken(bug, inputs=hundred):
    """Which gradients are wrong with this bug."""
    run = load(source=source.replace(*bugs[bug]), device=device, quiet=True)
    case = reference.Case(bug, *inputs[:3], do=inputs[3])
    return {c.output for c in check(run, [case]).failures}


# %%
# Exercise 22.4
wrong = {  # set() if none
    "delta left out": {"dq"},
    "dK without the scale": {"dq"},
    "LSE taken for units of log2": {"dq"},
    "keys past the end not masked": {"dq"},
}


# %%
def predicted_right():
    for bug in bugs:
        said = {wrong[bug]} if isinstance(wrong[bug], str) else set(wrong[bug] or ())
        fits = {name.lower() for name in said} == broken(bug)
        assert fits, f"{bug}: {', '.join(sorted(said)) or 'none'} is not what breaks"
    return True


exercise.verify("22.4", predicted_right)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Which lines of section 1 use delta, the scale, $P$? delta stands in $dS$ alone, and $dV$ does not use $dS$. LSE stands in $P$, from which everything follows. A key past the end has $K = V = 0$: what does it add to $dQ$, and who would see its row of $dK$?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# wrong = {
#     "delta left out": {"dq", "dk"},
#     "dK without the scale": {"dk"},
#     "LSE taken for units of log2": {"dq", "dk", "dv"},
#     "keys past the end not masked": set(),
# }
# ```
#
# The last one is right here: $dS \cdot K$ adds $dS \cdot 0$ to $dQ$, and rows of $dK$ and $dV$ past the end are never written. Until an input comes along in which all scores are very negative: then LSE is, too, $P = e^{0 - \mathrm{LSE}}$ of a key that isn't there is infinite, and $\infty \cdot 0$ is NaN in all of $dQ$. Try it: `q, k, v, do = (x.clone() for x in hundred); q[..., 0] = 8; k[..., 0] = -1e4; broken("keys past the end not masked", [q, k, v, do])`.
#
# </details>

# %% [markdown]
# ### Exercise 22.5 · Turns under a causal mask
#
# Under a causal mask tile $j$ of the keys is seen by the tiles of queries from $j$ on (for $B_r = B_c$). In which order should a CTA walk them, so that little time is lost waiting for turns? `upwards` is from the diagonal on. Give a better `queries(j)` for 16 tiles; the model of section 3 shows the waits.


# %%
def waiting(steps):
    """The share of all CTAs' time that goes into waiting for a turn."""
    return (steps.turn - steps.ready).sum() / (steps.end - steps.begin).sum()


def upwards(j):
    return range(j, 16)


steps = hand_over(16, upwards)
print(f"upwards: {waiting(steps):.0%} of the time")
draw_backward.hand_over(hand_over(6, lambda j: range(j, 6)), "Six tiles, causal, upwards from the diagonal")


# %%
# Exercise 22.5
def queries(j):
    return range(j, 16)


# %%
def waits_less():
    assert all(sorted(queries(j)) == list(range(j, 16)) for j in range(16)), "every tile from j on, once"
    share = waiting(hand_over(16, queries))
    assert share < waiting(hand_over(16, upwards)) / 3, f"{share:.0%} of the time is still waiting"
    return True


exercise.verify("22.5", waits_less)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Upwards, CTA 10 wants tile 10 first; CTA 0 comes there after ten steps, and until then CTA 10 stands still. Which tile could *all* begin with?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# def queries(j):
#     return range(15, j - 1, -1)
# ```
#
# All see the last tile of queries. From there down, all begin together, as without a mask, and nobody is ever further than one hand-over behind the CTA before. It is what the kernel does: look for `tile_q` in its region `tile_loop`.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why is LSE enough to form P again, and why does nothing have to be rescaled?</summary>
#
# $P = e^{S - \mathrm{LSE}}$: LSE holds the final maximum and the final sum of the row. They cannot change any more.
#
# </details>
# <details><summary>2. What is delta, and why is it not computed as it is defined?</summary>
#
# The row sum of $P \circ dP$, the part of the softmax's derivative that comes from its denominator. As the row sum of $dO \circ O$, which is the same, it needs no key and is ready before the first tile.
#
# </details>
# <details><summary>3. Why are keys outside in the backward pass, when queries were outside in the forward pass?</summary>
#
# In the backward pass there are two sums over queries (dK, dV) and one over keys (dQ). With keys outside the two stay in a CTA, and only one tensor is added up across CTAs.
#
# </details>
# <details><summary>4. Two runs give gradients that differ in the last digit. Is the kernel wrong?</summary>
#
# Not by the error rule: both may be within it. But something is added up in an order that is not fixed.
#
# </details>
# <details><summary>5. Why may a CTA wait for another one here, and not in general?</summary>
#
# Because it waits only for CTAs that drew their tickets earlier, and those are running or done. With work taken from blockIdx, it could wait for one that will not start before it ends.
#
# </details>
# <details><summary>6. A loss looks at LSE, too: a penalty on large scores, or a merge. What changes in the backward pass?</summary>
#
# Only delta. $\partial\, \mathrm{LSE}_i / \partial S_{ij} = P_{ij}$, so $dS = P \circ (dP - (\mathrm{delta} - d\mathrm{LSE}))$. The operators of `helpers.op` give LSE this gradient with the kernels as they are.
#
# </details>
