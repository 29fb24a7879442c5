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
# **After this notebook you can**
# - derive the gradients of attention line by line, and hold every line against autograd;
# - say what has to be kept from the way there for the way back, in bytes, and why it is one number per query;
# - compare the orders in which a backward kernel can walk the tiles: who owns which sum, what has to be added up across CTAs, what that costs in bytes and in reproducibility;
# - tell from the gradient that is wrong which line of a backward kernel to look at.
#
# **Time** 90 minutes.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb) for the register tiles, [02 · Online softmax](02_online_softmax.ipynb) for LSE, and section 1 of [12 · Double-buffered](12_double_buffered.ipynb) for `cp.async`. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: $P$ is not kept for the way back. LSE, one number per query, is enough to form it again, tile by tile; the rest is five matrix products.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import numpy as np
import pandas as pd
import torch

from helpers import check, for_d64, load, xray
from helpers import draw_backward, draw_pingpong, exercise, op, plot, record, reference, sass, show

torch.manual_seed(0)
kernel = load("22_backward_fp32")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Training follows the gradient of a loss $L$, a single number at the end of the model. The way back through attention begins with the gradient of its output and has to end with those of its inputs. In the papers' notation, and in this notebook's, $dX$ stands for $\partial L / \partial X$, an array of the shape of $X$. Given $dO$, what are $dQ$, $dK$ and $dV$?
#
# PyTorch can work them out by itself for anything made of its operations. On the way there it *keeps* what it will need on the way back. How much is that for plain attention?


# %%
def kept(f, *inputs):
    """Bytes that autograd keeps of f(*inputs) for the way back; tensors that share memory count once."""
    sizes = {}

    def keep(t):
        memory = t.untyped_storage()
        sizes[memory.data_ptr()] = memory.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        f(*inputs)
    return sum(sizes.values())


# %%
def plain(q, k, v):
    return torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1) @ v


fused = op.operator("04_fa2_fp32")  # a rung as a PyTorch operation; its gradient is this notebook's kernel
rows, d = [], 64
for N in (128, 256, 512):
    q, k, v = (torch.randn(1, 1, N, d, device=device, requires_grad=True) for _ in range(3))
    rows.append((N, kept(plain, q, k, v), 4 * (3 * N * d + N * N), kept(fused, q, k, v), 4 * (4 * N * d + N)))
names = ["N", "plain", "4 (3Nd + N²)", "fused", "4 (4Nd + N)"]
pd.DataFrame(rows, columns=names).set_index("N")

# %% [markdown]
# Plain attention keeps $Q$, $K$, $V$ and all of $P$. The fused operation keeps $Q$, $K$, $V$, $O$ and LSE. The two columns beside them are formulas, and they fit to the byte. So the question is $N^2$ numbers of $P$ against $N$ numbers of LSE (and the $N d$ of $O$, which the linear layer after attention keeps anyway). For a single layer of this series' workload, 16384 tokens and a width of 2048, with heads of $d = 64$:

# %%
lengths = [1024 << i for i in range(5)]
heads = 2048 // 64
kept_bytes = pd.DataFrame({"P": [4 * 16384 * heads * N for N in lengths], "LSE": 4 * 16384 * heads}, index=lengths)
draw_backward.stored_bytes(kept_bytes, "Kept for the way back: one layer, 16384 tokens, 32 heads, fp32")

# %% [markdown]
# **What to see.** The axis is logarithmic. With 16384 tokens in all, LSE takes the same 2 MiB however they are cut into sequences. $P$ doubles with the length of a sequence, and at 16384 one layer's takes 32 GiB. And a model has many layers.

# %% [markdown]
# ## 1 · The gradients, line by line
#
# One head. The way there is three lines:
#
# $$ S = \text{scale} \cdot Q K^\top, \qquad P = \mathrm{softmax}(S) \text{ by rows}, \qquad O = P V . $$
#
# We go back through them from the last to the first, and check each step in float64 against what autograd gets.

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
# What stands in brackets is by definition $dA_{ik}$. In matrices, and for $B$ likewise:
#
# $$ dA = dC\, B^\top, \qquad dB = A^\top dC . $$
#
# A rule to remember: the gradient of a factor is the gradient of the product times the *other* factor, transposed, on the other's side. The shapes leave no other choice. For $O = P V$:
#
# $$ dP = dO\, V^\top, \qquad dV = P^\top dO . $$

# %%
dP = dO @ V.T
dV = P.T @ dO
compare(dP=dP, dV=dV)

# %% [markdown]
# ### Through the softmax
#
# Rows do not mix, so take one row, $p_k = e^{s_k} / \sum_l e^{s_l}$. How does $p_k$ change with $s_j$? From the numerator, only if $k = j$, comes $p_k$; from the denominator always $-p_k p_j$:
#
# $$ \frac{\partial p_k}{\partial s_j} = p_k \big([k = j] - p_j\big), \qquad [k = j] \text{ being 1 if } k = j \text{ and 0 otherwise.} $$
#
# Sum over all $p_k$ through which $s_j$ acts on the loss:
#
# $$ ds_j = \sum_k dp_k\, p_k \big([k = j] - p_j\big) = p_j \Big( dp_j - \sum_k p_k\, dp_k \Big) . $$
#
# The sum does not depend on $j$: it is one number per row. Call it $\mathrm{delta}_i = \sum_k P_{ik}\, dP_{ik}$. Then, with $\circ$ for the product element by element,
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
# As it stands, delta needs a whole row of $P$ and of $dP$. A kernel that sees one tile of keys at a time would have to walk the row twice: once for delta, then again for $dS$. But put $dP_{ik} = \sum_c dO_{ic} V_{kc}$ in and change the order of the sums:
#
# $$ \mathrm{delta}_i = \sum_k P_{ik} \sum_c dO_{ic} V_{kc} = \sum_c dO_{ic} \sum_k P_{ik} V_{kc} = \sum_c dO_{ic}\, O_{ic} . $$
#
# So delta is the row sum of $dO \circ O$. It needs the output that is there already, $d$ multiply-adds per row, and *no* key. It can be had for all rows before the first tile is touched.

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
# That is all of it. Four products, and a fifth to get $P$ back.

# %% [markdown]
# ## 2 · P again
#
# On the way there, a tile of $P$ was not final until the last key had been seen: $m$ and $l$ could still change, and $O$ had to be rescaled. On the way back nothing changes any more. $\mathrm{LSE}_i = \ln \sum_j e^{S_{ij}}$ is known, so
#
# $$ P_{ij} = \frac{e^{S_{ij}}}{\sum_k e^{S_{ik}}} = e^{S_{ij} - \mathrm{LSE}_i} . $$
#
# No maximum, no sum, no rescaling. And there can be no overflow: for every key that LSE has counted, $P \le 1$. Any tile can be formed alone, in any order, by anyone who has its rows of $Q$, its rows of $K$ and a number per query:

# %%
LSE = torch.logsumexp(S, 1, keepdim=True)
tile = torch.exp(scale * Q[2:4] @ K[3:6].T - LSE[2:4])  # queries 2, 3 and keys 3 to 5, nothing else
print("largest difference to the same tile of P:", (tile - P[2:4, 3:6]).abs().max().item())

# %% [markdown]
# ### Is it a bargain?
#
# Forming $P$ again costs a product, $2d$ FLOPs for each element. Keeping it costs writing it once and reading it once. With what the recorded card was measured to do, in picoseconds of the whole GPU per element of $P$:

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
# **What to see.** On tensor cores (fp16) forming it again is by far the cheaper way. In fp32 on CUDA cores it is not: there the memory is the reason, not the time. And where $P$ does not fit at all, there is no choice. (FlashAttention's paper, section 3.1, reports that with fewer bytes from HBM the way back came out faster in spite of the additional FLOPs.)
#
# One of five products is the price: FLOPs of the way back are 2.5 times those of the way there, which has two.

# %% [markdown]
# ## 3 · Who owns which sum
#
# $dV_j = \sum_i P_{ij}^\top dO_i$ and $dK_j$ are sums over all *queries* that see tile $j$ of the keys. $dQ_i = \text{scale} \sum_j dS_{ij} K_j$ is a sum over all *keys*. On the way there one sum was needed, $O_i$, over keys, and FlashAttention-2 let each CTA own a tile of queries so that the sum stayed at home. Now there are sums in both directions. Somebody has to give.

# %%
draw_backward.loop_orders()

# %% [markdown]
# **What to see.** Each square is a tile of $S$; arrows run over the tiles that contribute to one tile of a gradient.
#
# - **FlashAttention-1** (Algorithm 4 of [arXiv 2205.14135](https://arxiv.org/abs/2205.14135)), left: keys outside, queries inside. $K_j$, $V_j$ and the sums $dK_j$, $dV_j$ stay on the chip for a whole column; $dQ_i$ is fetched from HBM, added to and put back, once per tile. One CTA walks all of a head, so nothing crosses CTAs, and the sums have one order. But with long sequences such a grid has fewer CTAs than a GPU has SMs: notebook 04's complaint.
# - **FlashAttention-2** (Algorithm 2 of [arXiv 2307.08691](https://arxiv.org/abs/2307.08691)), middle: the *same* loop order, unlike on the way there. Each turn of the outer loop becomes a CTA. Now several CTAs add to the same $dQ_i$, which the paper has them do by atomic additions (section 3.2).
# - **Queries outside**, right, as on the way there: $dQ_i$ stays at home, and *two* tensors, $dK$ and $dV$, have to be added up across CTAs.
#
# A fourth way is two kernels, one per direction: each keeps its own sums at home and nothing crosses. But both need $S$ and $dP$, so there are seven products instead of five.
#
# The price of the sums that cross, as bytes read and written by the CTAs of one head, in fp32, and the CTAs to share the work among 132 SMs (both for the workload above):

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
# With the tiles of this notebook's kernel, 64 queries and 128 keys, keys outside costs a quarter of the bytes of queries outside: half the tensors, and half as many CTAs that add to each. So the kernel has FlashAttention-2's order.
#
# ### In which order?
#
# A sum of floats depends on the order of its terms. Take a row of $dQ$ with 64 numbers and shares from 16 tiles of keys, and add them in every order a lottery gives:

# %%
rng = np.random.default_rng(0)
shares = rng.standard_normal((16, 64)).astype(np.float32)
exact = shares.astype(np.float64).sum(0)
results = []
for _ in range(1000):
    total = np.zeros(64, np.float32)
    for j in rng.permutation(16):  # CTAs that come as they come
        total += shares[j]
    results.append(total)
print("different results:", len({x.tobytes() for x in results}), "of 1000")
print(f"largest error: {max(abs(x - exact).max() for x in results):.1e}")

# %% [markdown]
# Every one is as good as any other: the error is that of fp32. But they are not the *same*. A training run whose gradients differ in the last bit from one day to the next can't be repeated, and a bug that shows once in a while can't be told from noise. What can be done?
#
# | way | price |
# |---|---|
# | one CTA per head (FlashAttention-1) | most of the GPU is idle when there are few heads |
# | atomic additions, in whatever order | results differ from run to run |
# | every CTA its own copy of $dQ$, added up in order afterwards | $N / B_c$ copies |
# | two kernels | seven products instead of five |
# | atomic additions *in turn*: tile 0 of the keys, then 1, 2, … | whoever comes too early waits |
#
# This kernel takes the last one. (Notebook 23 takes the second, and looks at what that does.) For every tile of queries there is a counter, the **turn**: how many tiles of keys have added their share. A CTA waits until the counter says its own number, adds, and counts on.
#
# Isn't that a queue in which all wait for all? Here is a model: a step takes four products' time, then one for $dQ$, and $dQ_i$ may begin when the CTA before has finished its own $dQ_i$.


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


# %%
steps = hand_over(6, lambda j: range(5, -1, -1))  # from the last tile to the first, as the kernel walks them
draw_backward.hand_over(steps, "Six tiles of keys hand on dQ, six tiles of queries")

# %% [markdown]
# **What to see.** All begin with the same tile of queries, so all but the first wait, but only *once*: from then on each is just late enough to find its turn come. The wait is one product's time per CTA ahead. In the steady state of the model nobody waits. (Why from the last tile to the first? Without a mask it makes no difference. Exercise 22.3 is about the case in which it does.)
#
# A GPU's CTAs don't keep step as those of a model do. What do turns cost there? A draft of this kernel in which nobody waits was timed beside one that is the same otherwise. Its $dQ$ is wrong where two CTAs add to a row at the same time, but it takes the time of a kernel without turns. How much faster is it, by sequence length?


# %%
def turns(steps):
    """How much faster draft 17, without turns, is than draft 6, with turns and the same otherwise."""
    ratios = steps.set_index(["step", "D"]).filter(regex=r"ratio.*\d").dropna(axis="columns")
    gain = ratios.loc[17] / ratios.loc[6] - 1
    return gain.map("{:+.1%}".format).rename(columns=lambda name: name.removeprefix("ratio_").replace("_", ", N = "))


plot.recorded("22_backward_fp32", "steps", turns)

# %% [markdown]
# A few percent, and least where sequences are longest. And in the model, if all CTAs of a head begin at once?


# %%
def in_the_model(N, Br, causal, Bc=128):
    """How much faster the CTAs of a head would be if none of them waited."""
    steps = hand_over(N // Bc, lambda j: range(N // Br - 1, causal * j * Bc // Br - 1, -1))
    busy = (steps.end - steps.begin).sum()
    return f"{busy / (busy - (steps.turn - steps.ready).sum()) - 1:+.1%}"


shapes = [(N, causal) for causal in (False, True) for N in (512, 1024, 4096)]
model = {
    f"causal, N = {N}" if causal else f"{N}": [in_the_model(N, Br, causal) for Br in (64, 128)] for N, causal in shapes
}
pd.DataFrame(model, index=pd.Index([64, 128], name="D"))  # a tile has 64 queries at D = 64, 128 at D = 128

# %% [markdown]
# At $N = 512$ without a mask the model has about the size, but it goes the other way: with it, longer sequences and a causal mask would wait more. What it leaves out is that most CTAs of a full grid begin when another one ends, not all at once, and come late by themselves; and that asking and a barrier cost something in every step, waiting or not. How the measured percent divide between the two is not known.
#
# ### A trap
#
# There is one more thing that can go wrong. A GPU runs as many CTAs as fit, and the others start when one ends. If those that run wait for one that has not started, they wait for ever. CUDA promises nothing about the order in which CTAs start (CUDA C++ Programming Guide, "Thread Hierarchy": in any order, in parallel or in series). So a CTA does not take its work from `blockIdx`: it draws a number, a **ticket**, when it starts, and the number says what to do. Then whoever it has to wait for drew before it, and so is running or done. We will break this rule below.

# %% [markdown]
# ## 4 · Five products
#
# In the order in which the kernel does them, for one tile of queries and one of keys:

# %%
ways = dict.fromkeys(draw_backward.EDGES, "shared memory") | {("S", "P"): "registers", ("dP", "dS"): "registers"}
ends = {"dV": "registers, to the end", "dK": "registers, to the end", "dQ": "HBM, when it is our turn"}
draw_backward.dataflow(ways, ends, "One step of 22_backward_fp32")

# %% [markdown]
# **What to see.** $P$ is formed in registers, in the arrangement that suits $S$. $dV$ needs it transposed and by other threads, so it goes through shared memory; so does $dS$, for $dK$ and for $dQ$. One place serves both: $dS$ overwrites $P$.
#
# The five are register-tiled as in notebook 04, 64 elements of the result per thread (or half of that, where $d$ is small). They differ in what the summation runs over:
#
# | product | sums over | operands, as they lie row-major |
# |---|---|---|
# | $S = Q_i K_j^\top$, $dP = dO_i V_j^\top$ | $d$ | along the rows of both |
# | $dV_j \mathrel{+}= P^\top dO_i$, $dK_j \mathrel{+}= dS^\top Q_i$ | queries | down the rows of both |
# | $dQ_i \mathrel{+}= dS\, K_j$ | keys | along the rows of $dS$, down those of $K$ |
#
# One way to multiply is better than the others: *down* the rows of both. One load of 16 bytes then brings four elements that meet in one step of the sum, and loads can run far ahead. *Along* the rows, four elements belong to four steps, and a row has to be loaded before the first FMA with it can start. So what is multiplied for $S$ and $dP$ is transposed on its way into shared memory, as notebook 04 did with $K$: `cp.async` copies 16, 8 or 4 bytes as they are, and with 4 at a time each element can go to a place of its own. With $K_j$ transposed, $dQ$ has its operands along the rows of both. That leaves two functions for five products.

# %% [markdown]
# ## The kernel

# %%
show.region("22_backward_fp32", "tile")

# %% [markdown]
# A CTA of 128 threads (of 256 at $d = 128$) holds a tile of $dK$ and of $dV$: 64 elements of each per thread, 128 registers. That leaves room for one more 8 × 8 tile at a time, which $S$, $dP$ and $dQ$ use one after the other.

# %%
show.region("22_backward_fp32", "delta")

# %% [markdown]
# The first of two CUDA kernels: delta, zeros for $dQ$, and turns and ticket set to 0. Then the main one draws its ticket:

# %%
show.region("22_backward_fp32", "work")

# %% [markdown]
# $K_j$ stays in shared memory as long as the CTA lives: $S$ and $dQ$ need it in every step, and both want it transposed. At $d = 128$ there is room for all of $V_j$ beside it on Hopper only. So $V_j$ passes through in **slabs**, as $Q_i$ and $dO_i$ do, one on its way while the one before is multiplied: notebook 12's pipeline with two stages. Every product has a `fetch` of its own, and the last slab of a product orders the first of the next one:

# %%
show.region("22_backward_fp32", "load_slab")

# %%
show.region("22_backward_fp32", "pipeline")

# %% [markdown]
# The two ways to multiply:

# %%
show.region("22_backward_fp32", "multiply")

# %% [markdown]
# And the step, product by product:

# %%
show.region("22_backward_fp32", "scores")

# %% [markdown]
# `exp2f` of scores in units of $\log_2$, as in all rungs since 04; so LSE has been multiplied by $\log_2 e$. A row that saw no key has LSE $= -\infty$, and $e^{S - \mathrm{LSE}}$ would be infinite; it gets $+\infty$ instead, and $P = 0$.

# %%
show.region("22_backward_fp32", "dV")

# %%
show.region("22_backward_fp32", "dS")

# %% [markdown]
# Each thread multiplies the elements of $P$ that it wrote itself. $dK$ is $dV$ with $dS$ and $Q$ in place of $P$ and $dO$. The last product and the turn:

# %%
show.region("22_backward_fp32", "dQ")

# %% [markdown]
# Thread 0 asks for the turn until it comes (an atomic addition of 0 is a way to read that no cache answers from memory of its own). The two `__threadfence` belong together: what this CTA has added to $dQ$ is visible to the whole GPU *before* the counter says so, and nothing is added before it did. The additions themselves are atomic, too, though nobody else is at these rows: the L2 does them where $dQ$ lies, and no thread has to wait for a value to add to. What makes the result the same every time is not how they add but that they add in turn.
#
# The two `__syncthreads` here keep that promise and nothing else. Without the second, thread 0 passes the turn on while others still add; without the first, they add before it has come. The result stays right, only its last bits depend on who came first, and the X-ray has no finding: it looks for races, and additions that are atomic don't race. compute-sanitizer said nothing of either on an H200, of this kernel before its slabs were aligned. What could see it is a comparison of two runs on a GPU, bit by bit, as below, and that only with luck.
#
# The kernel also takes a causal mask, a sliding window and grouped heads, which notebooks [20](20_causal_gqa.ipynb) and [23](23_backward_mma.ipynb) are about.

# %% [markdown]
# ## Run and check
#
# The rule of notebook 01, for three outputs: against float64, the kernel may err twice as much as the five products in plain fp32 PyTorch, plus a few rounding steps.

# %%
check(kernel)

# %%
plot.recorded("22_backward_fp32", "error", plot.error)

# %% [markdown]
# ### Against no formula at all
#
# The reference knows the formulas of section 1. Suppose we had derived them wrong, there and in the kernel? A gradient is the limit of a difference quotient, and that can be formed with the forward pass alone: move one element of an input by $\pm\epsilon$, look at what it does to the output. `torch.autograd.gradcheck` does so for every element. It wants float64; our kernels compute in fp32, so the step has to be large ($10^{-3}$) and the tolerance wide. What it can't see is a small error; what it sees is a wrong formula.

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
# On a GPU this is a test: CTAs come in another order every time. The emulator's CTAs come always in the same one, so there it could hardly fail. But the emulator can show the trap. Let the tickets be drawn the wrong way round, so that the *last* tile of keys is the first to start. On a GPU all is well as long as all CTAs fit at the same time. Predict what happens where they don't:

# %%
source = for_d64("22_backward_fp32")  # the file with nothing but d = 64, which compiles in a third of the time
text = source.replace("tile = ticket % key_tiles,", "tile = key_tiles - 1 - ticket % key_tiles,")
backwards = load(source=text, device="cpu", quiet=True)
backwards.launcher.timeout = 1  # seconds
try:
    backwards(*(x.cpu()[:1, :1] for x in inputs))
except Exception as error:
    print(error)

# %% [markdown]
# The first CTA waits for a turn that nobody can give it.

# %% [markdown]
# ## Predict, then measure
#
# ### Bytes by tensor
#
# How often is each tensor asked for? Predict from the loop. There are $N_k / B_c$ tiles of keys, each with $N_q / B_r$ steps. In a step, $Q_i$ is needed twice (for $S$ and for $dK$), $dO_i$ twice ($dV$, $dP$), $V_j$ once, and none of them is kept for the next step. $K_j$ comes once and stays. $dQ_i$ is added to in each step, a read and a write; and the first kernel reads $O$ and $dO$ and writes zeros to $dQ$.

# %%
torch.manual_seed(0)
N, d, Br, Bc = 256, 64, 64, 128
q, k, v, do = (torch.randn(1, 1, N, d) for _ in range(4))
one_head = reference.Case("one head", q, k, v, do=do)
rays = xray(source, *one_head.inputs)
size, column, line = 4 * N * d, N // Bc, N // Br  # of a tensor; how often a row of queries, of keys is needed
predicted = {"Q": 2 * column, "K": 1, "V": line, "O": 1, "dO": 2 * column + 1}
predicted |= {"dQ": 2 * column + 1, "dK": 1, "dV": 1}
predicted = {name: times * size for name, times in predicted.items()}
counted = rays.tensors.loc[[*predicted, "LSE", "delta"]]
plot.traffic(counted, predicted, f"One head, N = {N}")

# %% [markdown]
# **What to see.** Every bar meets its prediction. $K$, which stays in shared memory, comes once. $V$ belongs to the CTA as much and comes again with every step. On a GPU the L2 cache answers most of that, since the CTA asks for the same rows of $V$ again and again, and neighbours for the same rows of $Q$.

# %% [markdown]
# ### Shared memory
#
# A warp copies four rows of eight columns at a time and puts them down transposed, so that its 32 elements go to eight rows of shared memory. Rows are padded by four elements, to begin in different banks: `ld_r` (rows of queries) and `ld_c` (of keys) in region `tile`. Predict: what is it worth? The same head, with either padding left out; and in the last row with the paddings, but with the *tensors* padded in HBM:

# %%
seen = {"as it is": rays}
for name, padded in {"queries not padded": "ld_r = Br + 4", "keys not padded": "ld_c = Bc + 4"}.items():
    text = source.replace(padded, padded[: padded.rindex(" + ")])
    seen[name] = xray(load(source=text, device="cpu", quiet=True), *one_head.inputs)
# the same numbers; in HBM a row begins 72 numbers behind the one before, not 64, and so eight banks further
apart = [torch.nn.functional.pad(x, (0, 8))[..., :d] if x.ndim == 4 else x for x in one_head.inputs]
seen["sources 72 apart"] = xray(source, *apart)
ops = ["load", "store", "cp.async"]
beyond = {name: [ray.total(space="shared", op=op).excess for op in ops] for name, ray in seen.items()}
pd.DataFrame.from_dict(beyond, orient="index", columns=ops).rename_axis("wavefronts beyond the least")

# %% [markdown]
# **What to see.** With both paddings, no load and no store has a conflict. Without the one for keys, all three have: $P$ and $dS$ lie with keys along their rows, too. What stays, whatever the padding, is the price of transposing: four wavefronts where the bytes would fit into one. A copy meets banks at both ends. A line of the source has 128 bytes, as a row of the 32 banks has, and lanes that read from the same bank wait for each other as lanes do that write to one ([notebook 92](92_xray_against_hardware.ipynb) has the measurements). The rows of these tensors begin at multiples of 128 bytes, so that the four rows that a warp copies, eight columns of each, have their bytes in the same eight banks. The last row of the table shows it: there each row begins eight banks further than the one before, four lines are read as before, and nobody waits.

# %%
rays.bank_map("fa::cp_async_4(X_smem + (col + c)")

# %% [markdown]
# ### Registers
#
# Predict: two 8 × 8 tiles for $dK$ and $dV$, and one for $S$, $dP$ or $dQ$. What does the compiler make of it, when two CTAs of 128 threads, or one of 256, are to share an SM's 65536 registers?

# %%
table = sass.table("22_backward_fp32").set_index("kernel")
table[table.index.str.startswith("backward")].drop(columns="rung")

# %% [markdown]
# $65536 / 256 = 256$ for a thread, of which it may use 255. 192 are taken by the three tiles (fewer at $d = 32$, where those of $dK$ and $dV$ are half as wide), and the loop that would need more is kept from unrolling (`#pragma unroll 1` in `multiply_rows`). That is also why what a CTA has to do, and where its inputs begin, lies in shared memory.

# %% [markdown]
# ## Beside its peers
#
# The work is counted as 2.5 times that of the way there, $10 B H N^2 d$ FLOPs, whatever a kernel really does. Peers are PyTorch's own backward passes in fp32, MATH (plain products with $P$ kept) and EFFICIENT (a fused kernel).

# %%
plot.recorded("22_backward_fp32", "backward", lambda x: plot.throughput(x[x.causal == 0]))


# %%
def beside(causal):
    def draw(samples):
        peers = ["SDPA MATH", "SDPA EFFICIENT"]
        return plot.ratio(samples[samples.causal == causal], "22_backward_fp32", peers)

    return plot.recorded("22_backward_fp32", "backward", draw)


beside(causal=0)

# %%
beside(causal=1)

# %% [markdown]
# **How to read it.** MATH has $P$ in memory and cuBLAS for its products; MATH does four of them where our kernel does five, and section 2 showed that in fp32 the fifth costs more than keeping $P$. So by this measure MATH has the easier task; what it needs in memory is not in the figure. As recorded on the H200 our kernel is 4 to 10 % ahead of it at $d = 64$ all the same, and reaches 0.81 to 0.87 of its speed at $d = 128$. Under a causal mask MATH multiplies the half that nobody sees as well, and takes 1.3 to 2.2 times as long as ours. EFFICIENT, which forms $P$ again as we do, takes 1.02 to 1.12 times as long at every shape.

# %% [markdown]
# ## What was tried
#
# Each row is a draft on the way to this kernel, with what was expected of it before it ran, and how many times as long SDPA MATH took (`ratio`; `ratio_causal` under a causal mask). `spill_bytes` is what a thread has in memory because registers ran out. All ran side by side. The rung itself is in no row. Nearest is draft 10; the rung does not keep $V_j$ and has a `fetch` for each product, as is told below. Cover the columns of numbers and guess.


# %%
def drafts(steps):
    display(record.step_table(steps, "spill_bytes").style.format(precision=2, na_rep=""))
    return draw_pingpong.steps(steps, "Each draft of the kernel", "SDPA MATH")


plot.recorded("22_backward_fp32", "steps", drafts)


# %%
def gains(steps):
    at = steps.pivot(index="step", columns="D", values="ratio")
    changes = {"B's next row early (1 → 2)": (1, 2), "K and V stay (1 → 3)": (1, 3), "down the rows (4 → 6)": (4, 6)}
    changes |= {
        "unrolled by 16 (6 → 8)": (6, 8),
        "half the keys (6 → 12)": (6, 12),
        "one of two later (6 → 15)": (6, 15),
    }
    changes |= {"no turns (6 → 17)": (6, 17), "no fetching (6 → 18)": (6, 18)}
    found = {name: at.loc[b] / at.loc[a] - 1 for name, (a, b) in changes.items()}
    return pd.DataFrame(found).T.map("{:+.1%}".format, na_action="ignore").rename(columns="d = {}".format).fillna("")


plot.recorded("22_backward_fp32", "steps", gains)

# %% [markdown]
# **What to see.**
#
# - *Keeping $K$ and $V$* (3) brought half of what was expected at $d = 64$ and less at $d = 128$: fewer instructions for fetching were not all that was missing. *Going down the rows* in four of five products (6) brought twice what was expected; a warp seems to wait for the load just before it multiplies. After that, *loading B's next row early* (2), worth 5 % at the beginning, makes no difference any more: draft 7 does without it and is within 1 % of draft 6.
# - At $d = 128$, $K_j$, $V_j$ and $P$ in shared memory need a GPU with more than an A100 has. *Half the keys* per CTA (12) would fit there, and on the H200 two such CTAs share an SM and could hide each other's waits; but $Q$ and $dO$ come twice as often, and it is slower. So the kernel lets $V_j$ go and keeps all of its keys. That costs copies of $V$ in every step; a `fetch` for each product, which knows what it is for when it is compiled, saves instructions for addresses in return. This last form, the rung, is in no row of the table: what it reaches is in the figures above. (Where a block has 99 KB, on gaming cards, half the keys and half the queries it is: a row of its own in the table of tiles.)
# - *Unrolling a whole slab* (8) is among the best at $d = 128$ and by far the worst at $d = 64$, where two CTAs share an SM. One explanation is the instruction cache: two CTAs are at different places of a loop that has become longer, the warps of one CTA are not. We did not count misses. And edits take longer to compile.
# - *One of two warps later* (15) was meant to let one warp of a scheduler multiply while the other one fetches. It was expected to gain 3 % and loses 1 at $d = 128$ and 6 at $d = 64$, where it also spills (56 bytes).
# - *No turns* (17) and *no fetching* (18) are no kernels. They say how much is left to gain there at the most. Of turns 10 % were expected under a causal mask, as section 3's model has it; it is no more than without one.

# %% [markdown]
# ## What still hurts
#
# 1. **fp32 on CUDA cores.** The five products are all that counts, and the units that do them fastest are not used. Notebook 23.
# 2. **Shared memory.** $P$ and $dS$ cross it because the next product wants other threads to have them. Notebook 23 arranges for most of that not to be necessary.
# 3. **Fetching.** Draft 18, which multiplies the same slabs again and again instead of fetching new ones, gains more than draft 17 without turns: addresses, predicates and copies are instructions, too, and the units wait meanwhile.
# 4. **The turn.** It costs a barrier or two per step and, at the start, a wait. Section 3 says how much, exercise 22.3 how much it could be under a causal mask.

# %% [markdown]
# ## Exercises
#
# ### Exercise 22.1 · Which gradient breaks?
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
# Exercise 22.1
wrong = {
    "delta left out": {"dq"},
    "dK without the scale": {"dq"},
    "LSE taken for units of log2": {"dq"},
    "keys past the end not masked": {"dq"},
}


# %%
def predicted_right():
    for bug in bugs:
        assert wrong[bug] == broken(bug), f"{bug}: not {sorted(wrong[bug]) or 'none'}"
    return True


exercise.verify(
    "22.1", predicted_right, hint="which lines use delta? the scale? P? And what are the keys past the end?"
)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# delta stands in $dS$ alone, and $dV$ does not use $dS$. LSE stands in $P$, from which everything follows. A key past the end has $K = V = 0$: what does it add to $dQ$, and who would see its row of $dK$?
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
# ### Exercise 22.2 · A loss that looks at LSE
#
# Merging partial results (notebook 02) uses $O$ *and* LSE, and so does a penalty on large scores. Then the way back begins with two gradients, $dO$ and $d\mathrm{LSE}_i = \partial L / \partial \mathrm{LSE}_i$. The kernel need not change at all: it is enough to hand it another delta. Which?


# %%
# Exercise 22.2
def delta_of(dO, O, dLSE):
    """delta (Nq, 1) for a loss with gradients dO (Nq, d) and dLSE (Nq, 1)."""
    return (dO * O).sum(1, keepdim=True)


# %%
def with_dlse():
    random = torch.Generator().manual_seed(1)
    Q, K, V, dO = (torch.randn(n, 4, dtype=torch.float64, generator=random) for n in (5, 7, 7, 5))
    dLSE = torch.randn(5, 1, dtype=torch.float64, generator=random)
    S = (Q @ K.T).requires_grad_()
    P, LSE = torch.softmax(S, 1), torch.logsumexp(S, 1, keepdim=True)
    (expected,) = torch.autograd.grad([P @ V, LSE], S, [dO, dLSE])
    ours = P * (dO @ V.T - delta_of(dO, P @ V, dLSE))
    return torch.allclose(ours, expected)


exercise.verify("22.2", with_dlse, hint="what is the derivative of LSE with respect to one score of its row?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# $\partial\, \mathrm{LSE}_i / \partial S_{ij} = e^{S_{ij}} / \sum_k e^{S_{ik}} = P_{ij}$. So $dS_{ij}$ gets $P_{ij}\, d\mathrm{LSE}_i$ on top.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# def delta_of(dO, O, dLSE):
#     return (dO * O).sum(1, keepdim=True) - dLSE
# ```
#
# $dS = P \circ (dP - \mathrm{delta}) + P\, d\mathrm{LSE} = P \circ (dP - (\mathrm{delta} - d\mathrm{LSE}))$.
#
# </details>

# %% [markdown]
# ### Exercise 22.3 · Turns under a causal mask
#
# Under a causal mask tile $j$ of the keys is seen by the tiles of queries from $j$ on (for $B_r = B_c$). In which order should a CTA walk them, so that little time is lost waiting for turns? `upwards` is from the diagonal on. Give a better `queries(j)` for 16 tiles, and use the model of section 3 to see what the wait was.


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
# Exercise 22.3
def queries(j):
    return range(j, 16)


# %%
def waits_less():
    assert all(sorted(queries(j)) == list(range(j, 16)) for j in range(16)), "every tile from j on, once"
    share = waiting(hand_over(16, queries))
    assert share < waiting(steps) / 3, f"{share:.0%} of the time is still waiting"
    return True


exercise.verify("22.3", waits_less, hint="when does CTA 0 come to the first tile that CTA 10 needs?")

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
# <details><summary>3. Why are keys outside on the way back, when queries were outside on the way there?</summary>
#
# On the way back there are two sums over queries (dK, dV) and one over keys (dQ). Keys outside keep the two at home, and only one tensor is added up across CTAs.
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
