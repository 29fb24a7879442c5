# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Naive attention, three kernels
#
# [← 00 · Start here](00_start_here.ipynb) | [01_naive.cu](../kernels/01_naive.cu) | [glossary](glossary.md) | [02 · Online softmax →](02_online_softmax.ipynb)
#
# **After this notebook you can**
# - explain what attention computes, and why two of its intermediates grow with the square of the sequence length;
# - do: predict, to the byte, what a kernel's threads ask of memory, and check the prediction;
# - judge whether arithmetic, HBM or the caches hold a kernel back, with a roofline and counters.
#
# **Time** 60 minutes.
#
# **Needs** [00 · Start here](00_start_here.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: compute $O = \mathrm{softmax}(\mathrm{scale}\, QK^\top)V$ literally, one kernel per operation, and look at what the matrices in between cost.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd
import torch
from IPython.display import display

from helpers import bench, check, draw, exercise, load, plot, predict, record, reference, show, traffic, xray
from helpers import blank, hint, progress

torch.manual_seed(0)
kernel = load("01_naive")
device = kernel.device

# %% [markdown]
# ## The problem
#
# A transformer layer turns each token into three vectors: a **query** $q$, a **key** $k$ and a **value** $v$, of $d$ numbers each. Attention gives every query $i$ a weighted mean of all values. The weight of value $j$ says how well key $j$ fits query $i$:
#
# $$ S_{ij} = \mathrm{scale}\; q_i \cdot k_j, \qquad
#    P_{ij} = \frac{e^{S_{ij}}}{\sum_{j'} e^{S_{ij'}}}, \qquad
#    O_i = \sum_j P_{ij}\, v_j . $$
#
# With the vectors as rows of matrices this is $S = \mathrm{scale}\,QK^\top$, $P = \mathrm{softmax}(S)$ by rows and $O = PV$, with $\mathrm{scale} = 1/\sqrt d$ unless told otherwise. $Q$, $K$, $V$ and $O$ have $N$ rows and $d$ columns; $S$, the **scores**, and $P$, the **probabilities**, have $N$ rows and $N$ columns. A layer has $H$ **heads**, each with its own $Q$, $K$, $V$, and a batch of $B$ sequences: everything happens $B \cdot H$ times, independently.
#
# The kernels of this series return one more number per row, the **[log-sum-exp](glossary.md#lse)** $\mathrm{LSE}_i = \ln \sum_j e^{S_{ij}}$: with it, $P_{ij} = e^{S_{ij} - \mathrm{LSE}_i}$ can be recomputed from $S_{ij}$ alone.
#
# In PyTorch, literally:


# %%
def unfused(q, k, v):
    """Attention as three PyTorch operations; q, k, v (B, H, N, d)."""
    S = q @ k.mT * q.shape[-1] ** -0.5  # (B, H, N, N)
    P = torch.softmax(S, dim=-1)  # (B, H, N, N)
    return P @ v  # (B, H, N, d)


B, H, N, d = 1, 2, 256, 64
q, k, v = torch.randn(3, B, H, N, d, device=device)
print(f"Q, K, V, O: {q.numel()} numbers each · S, P: {B * H * N * N} each")

# %% [markdown]
# At $N = 256$ each of $S$ and $P$ is already $N/d = 4$ times as large as $Q$. Nobody asked for $S$ or $P$: the caller wants $O$. This notebook measures what it costs to have them.

# %% [markdown]
# ## The kernel
#
# `kernels/01_naive.cu` does what the three lines above do: one CUDA kernel per operation. As plain loops, for one head:
#
# ```cpp
# for (i …) for (j …)                            // scores: one thread for each (i, j)
#   S[i][j] = scale * dot(Q[i], K[j]);
#
# for (i …) {                                    // softmax: one warp for each i
#   m = max(S[i]);
#   l = sum(exp(S[i] - m));
#   P[i] = exp(S[i] - m) / l;  LSE[i] = m + log(l);
# }
#
# for (i …) for (c …)                            // output: one thread for each (i, c)
#   O[i][c] = sum over j of P[i][j] * V[j][c];
# ```
#
# The first computes $S$, **one thread per element**.

# %%
show.region("01_naive", "scores")

# %% [markdown]
# CUDA runs threads in **blocks** (also called [CTAs](glossary.md#cta)); all blocks of a launch form the **grid**. Here a block is 16 × 16 threads and covers a 16 × 16 patch of $S$. A thread finds its query `i` and key `j` from `blockIdx` and `threadIdx`, leaves if it lies beyond the edge (this is how any $N$ works), multiplies a row of $Q$ with a row of $K$, and writes one number. Each step of its loop is one **FMA** (fused multiply-add: a product and a sum in one instruction, 2 FLOPs). The offsets of batch and head come from strides, so the inputs need not be contiguous.

# %%
draw.threads(N=48)

# %% [markdown]
# *Left:* the blocks of one head; `blockIdx.x` runs along the queries (and over the heads), `blockIdx.y` along the keys. *Right:* inside a block the hardware groups threads into **[warps](glossary.md#warp)** of 32 that execute together: two rows of 16. While a warp computes, its 32 threads read 2 different rows of $Q$ and 16 different rows of $K$.
#
# The second kernel turns each row of $S$ into a row of $P$. One warp takes a row. Its threads are called **[lanes](glossary.md#lane)**, numbered 0 to 31: lane 0 takes elements 0, 32, 64, …, lane 1 elements 1, 33, 65, …

# %%
show.region("01_naive", "softmax")

# %% [markdown]
# It reads its row three times: for the maximum `m`, for the sum `l`, and to write $P$. After the first and the second pass the 32 lanes hold 32 partial results; in five steps `__shfl_xor_sync(0xffffffff, x, mask)`, called by all 32 lanes, gives each the `x` of the lane whose number differs in the bit `mask`, and every lane ends with the total. Why the maximum is subtracted, and how to read the row less often, is what [02](02_online_softmax.ipynb) is about.
#
# The third kernel multiplies $P$ by $V$, again one thread per element of the result.

# %%
show.region("01_naive", "output")

# %% [markdown]
# The **launcher** is the function Python calls. It refuses what the kernels can't do, and launches the three on one stream: each starts when the one before has finished. Between them, $S$ and $P$ wait in **[HBM](glossary.md#hbm)**, the GPU's large memory outside the chip.

# %%
show.region("01_naive", "launcher")

# %% [markdown]
# ## Run and check
#
# Two outputs: $O$ and the log-sum-exp. `check` runs the kernel on inputs chosen to break kernels (lengths one off 32, 64 and 128, huge scores, strided tensors, …) and holds both outputs against a float64 reference.

# %%
o, lse = kernel(q, k, v)
exact, _ = reference.attention(q, k, v)
print(f"O {tuple(o.shape)}, LSE {tuple(lse.shape)}; largest |O - exact| = {(o - exact).abs().max():.1e}")
check(kernel)

# %% [markdown]
# How exact is exact enough? A fixed tolerance would be too lax for some inputs and impossible for others. The rule here: **the error may be twice that of plain PyTorch at the same precision on the same inputs**, plus a floor of a few rounding steps. That is the *[budget](glossary.md#budget)*, and the line above says how much of it the worst case uses.

# %% [markdown]
# ## Predict, then measure
#
# How often do the threads ask for each byte of $Q$, and how often for each byte of $P$? Here $N = 256$, $d = 64$.

# %%
Q_reads = ...  # your prediction: reads of each byte of Q
P_reads = ...  # and of P

# %% tags=["reveal"]
counted = traffic(kernel, q, k, v)
predict(Q_reads, counted.reads_per_byte["Q"], "reads of each byte of Q")
predict(P_reads, counted.reads_per_byte["P"], "reads of each byte of P")

# %% [markdown]
# `traffic` runs the kernel on the emulator, where every load and store of every thread is seen, and adds up bytes by tensor. Nothing is sampled or estimated; the counts are the same on every machine.
#
# To derive them, count loads in the source and multiply by the threads that run them; a float has 4 bytes. Write $n = B\,H\,N^2$ for the number of scores.
#
# - **Q, K.** In `scores`, $n$ threads each read $d$ floats of $Q$ and $d$ of $K$: $4nd$ bytes of each.
# - **S.** Written once by `scores`, $4n$. Read three times by `softmax`, $3 \cdot 4n$.
# - **P.** Written once by `softmax`, $4n$. In `output`, $BHNd$ threads each read a row of $N$: $4 \cdot BHNd \cdot N = 4nd$.
# - **V.** The same threads each read a column of $V$: $4nd$.
# - **O, LSE.** Written once: $4BHNd$ and $4BHN$.

# %%
n = B * H * N * N
formulas = {
    "Q": 4 * n * d,
    "K": 4 * n * d,
    "V": 4 * n * d,
    "O": 4 * B * H * N * d,
    "LSE": 4 * B * H * N,
    "S": 4 * n + 3 * 4 * n,
    "P": 4 * n + 4 * n * d,
}
both = counted.assign(total=counted.bytes_read + counted.bytes_written, derived=pd.Series(formulas))
print("every formula exact" if (both.total == both.derived).all() else "a formula is off")
both

# %% [markdown]
# The **[X-ray](glossary.md#x-ray)** runs the kernel in the same way and looks at every request of a warp. One of its pictures sets the bytes beside the least that any attention has to move: inputs read once, outputs written once, $S$ and $P$ not at all.

# %%
ray = xray(kernel, q, k, v)
ray.traffic()

# %% [markdown]
# Four tensors dominate, each with $4nd$ bytes: every byte of $Q$, $K$ and $V$ is asked for $N = 256$ times (`reads_per_byte`), every byte of $P$ $d = 64$ times. The three passes over $S$ hardly show.
#
# ### What reaches HBM
#
# A request goes to the **L1 cache** of its SM (streaming multiprocessor, one of the GPU's processors), then to the **L2 cache** that all SMs share, and only what neither holds comes from HBM. $Q$, $K$ and $V$ of a head are small and asked for again and again; the caches answer nearly all of it. $S$ and $P$ are large. For $N = 4096$ and 16 heads $S$ has 1.07 GB and fits in no cache. How often does each kernel read a matrix of that size from HBM?

# %%
softmax_reads = ...  # your prediction: how often `softmax` reads S from HBM
output_reads = ...  # and `output` P

# %% [markdown]
# **Nsight Compute**, NVIDIA's profiler for single kernels, reads the counters of the memory itself. Recorded, in units of the size of $S$:

# %% tags=["reveal"]
recorded = record.load("01_naive", "counters", device="nvidia-h200")
at_4096 = recorded[recorded.N == 4096].set_index("kernel")
n_4096 = 1 * 16 * 4096**2  # elements of S
dram = pd.DataFrame(
    {"read": at_4096.dram_read_bytes / (4 * n_4096), "written": at_4096.dram_write_bytes / (4 * n_4096)}
)
predict(softmax_reads, dram.read["softmax"], "reads of S by softmax")
predict(output_reads, dram.read["output"], "reads of P by output")
dram["TB/s"] = (at_4096.dram_read_bytes + at_4096.dram_write_bytes) / at_4096.duration_ns / 1e3
dram["ms"], dram["share of time"] = at_4096.duration_ns / 1e6, at_4096.duration_ns / at_4096.duration_ns.sum()
print(f"{recorded.device.iloc[0]}, B = 1, H = 16, N = 4096, d = 64, read and written in units of S")
dram.round(2)

# %% [markdown]
# - `scores` writes $S$ once.
# - `softmax` goes over each row three times. Can a row wait in a cache from one pass to the next? A row has 16 KB; an SM works on up to 64 warps, so on 64 rows or 1 MB, at a time, and all SMs together on more than 100 MB. Neither L1 nor L2 holds that: three reads from HBM. And it writes $P$ once.
# - `output` works on 16 columns of $O$ per block. For $d = 64$ four blocks need the same rows of $P$. They differ in `blockIdx.y`, and in practice blocks start along `x` first, so they run far apart in time: four reads.
#
# The one surprise is that `scores` reads 0.27: $Q$ and $K$ together measure only 0.03, so parts of them come from HBM several times, presumably because the stream of $S$ pushes them out of the L2. The times are not what one might expect: the `softmax`, with four of the nine passes over a gigabyte, takes 2 % of the time. The two products have little traffic per second, and `scores` takes nearly four times as long as `output`, for the same number of FLOPs and of requests. HBM does not explain that.
#
# ### The X-ray: what a request costs
#
# When a warp executes a load, its 32 threads name 32 addresses. The L1 cache serves them in **[sectors](glossary.md#sector)** of 32 bytes, which lie in **lines** of 128 bytes. Neighbouring threads that ask for neighbouring addresses share sectors; such an access is called **[coalesced](glossary.md#coalesced)**. Look at the two loops again, for one warp (two rows of 16 threads):
#
# - `scores` reads `q[c]` of 2 queries and `k[c]` of 16 keys; rows are $4d = 256$ bytes apart.
# - `output` reads `P[j]` of 2 rows and `V[j * stride + c]` of 16 neighbouring columns.
#
# How many lines does one step of each loop touch, both loads together?

# %%
scores_lines, output_lines = ..., ...  # your predictions

# %% tags=["reveal"]
ray.address_map("s += q[c] * k[c]", target="K")

# %% tags=["reveal"]
ray.address_map("o += P[j] * V[j", target="V")

# %% [markdown]
# *Above,* $K$: a row is a line of 128 bytes, a box a sector, and a cell of 4 bytes carries the lane that asks for it (+: the lane 16 further on asks for it, too). Sixteen lines have to be looked up for 64 different bytes. What else is moved is not lost: the next seven steps of the loop want the rest of each sector and find it in L1. They cost sixteen lookups each, too. *Below,* $V$: one line. With $Q$ and $P$, two lines each, a step of `scores` touches 18 lines in as many sectors, and a step of `output` three.
#
# Suppose L1 looks up one line per clock. Then the lines alone give a least time: $nd/32$ iterations of warps, 18 or 3 lines each, divided by the SMs and the clock.

# %% tags=["reveal"]
sms, clock = 132, record.about("01_naive", device="nvidia-h200")["sm_clock_mhz"]["median"] * 1e6
lines = pd.Series({"scores": 2 + 16, "output": 2 + 1})
predict(scores_lines, lines["scores"], "lines per step of scores")
predict(output_lines, lines["output"], "lines per step of output")
cost = pd.DataFrame({"sectors per request, derived": {"scores": (2 + 16) / 2, "output": (2 + 2) / 2}})
loads = {name: ray.total(kernel=name, op="load") for name in cost.index}
cost["X-ray"] = {name: load.cost / load.requests for name, load in loads.items()}
cost["H200"] = at_4096.global_load_sectors / at_4096.global_load_requests
cost["least ms"] = n_4096 * 64 / 32 * lines / (sms * clock) * 1e3
cost["measured ms"] = at_4096.duration_ns / 1e6
cost.round(2)

# %% [markdown]
# The sectors are exact, and for `scores` the supposition explains the time to within a few percent: this kernel waits for lookups in the L1 cache, because its threads read $K$ along the wrong direction. `output` has three lines per iteration instead of 18 and something else to wait for.

# %% [markdown]
# ### The N² wedge
#
# The four matrices that have to exist take $4 \cdot 4Nd = 16Nd$ bytes per head. The two that don't, $S$ and $P$, take $2 \cdot 4N^2 = 8N^2$. They are equal at $N = 2d$, and from there on the second is larger; with logarithmic axes its line is twice as steep.

# %%
draw.wedge(d=64, N=512)

# %% [markdown]
# *Left:* one head at $N = 512$, areas to scale: the hatched squares are what the naive kernel adds. *Right:* bytes against $N$. The shaded wedge is memory, and traffic, that a cleverer kernel could do without. At $N = 64\mathrm{k}$ one head's $S$ and $P$ take 32 GiB.
#
# `unfused`, the PyTorch form at the top, has the same wedge and two more passes: multiplying $S$ by the scale is a kernel of its own, which reads and writes all of $S$ for one multiplication per element.

# %% [markdown]
# ## Beside its peers
#
# PyTorch has several attention kernels behind `scaled_dot_product_attention` (SDPA). **MATH** is the unfused three-step form with tuned matrix products; **EFFICIENT** never writes $S$ or $P$ to HBM. Both also run in fp32, which FLASH and CUDNN, the others, do not. (**TF32**, a shorter format that tensor cores can use for fp32 inputs, is off throughout.) On a GPU, a short measurement, in milliseconds per call ($B = 4$, $H = 8$, $N = 1024$, $d = 64$):

# %%
if device == "cuda":
    inputs = torch.randn(3, 4, 8, 1024, 64, device=device)
    samples = bench.measure({"01_naive": kernel} | bench.peers(*inputs), list(inputs))
    print(torch.cuda.get_device_name())
    display(samples.groupby("name").ms.describe()[["min", "50%", "max"]].sort_values("50%"))
else:
    print("no GPU here: the emulator counts, it does not time")

# %% [markdown]
# The recorded runs, over the whole range of $N$ (the number of tokens $B \cdot N$ is held, so the work grows with $N$):

# %%
samples = record.load("01_naive")
plot.throughput(samples)

# %% [markdown]
# TFLOP/s, higher is better. At $d = 64$ and $N = 4096$ the naive kernel has 0.08<!--= ratio("01", "MATH", 64, 4096, dtype="fp32"):.2f --> of the speed of MATH and 0.04<!--= ratio("01", "EFFICIENT", 64, 4096, dtype="fp32"):.2f --> of that of EFFICIENT.
#
# ### On the roofline
#
# **[Arithmetic intensity](glossary.md#arithmetic-intensity)** is FLOPs per byte moved. A device that can move $\beta$ bytes and do $\pi$ FLOPs per second needs at least $\pi/\beta$ FLOPs per byte to be busy computing; that is the *ridge*. Attention's forward pass counts as $4BHN^2d$ FLOPs (two products of $2N^2d$ each). Divided by three different byte counts:
#
# $$ \underbrace{\frac{4N^2d}{16N^2d}}_{\text{bytes threads ask for}} = \frac14, \qquad
#    \underbrace{\frac{4N^2d}{16N^2 + 16Nd}}_{\text{HBM, S and P written and read}} \approx \frac d4, \qquad
#    \underbrace{\frac{4N^2d}{16Nd}}_{\text{HBM, only Q, K, V, O}} = \frac N4 . $$

# %%
flops = bench.forward_flops(1, 1, 4096, 4096, 64)
bytes_moved = {
    "asked for by threads": 16 * 4096**2 * 64,
    "HBM, three kernels at best": 16 * 4096**2 + 16 * 4096 * 64,
    "HBM, ours as counted": (at_4096.dram_read_bytes + at_4096.dram_write_bytes).sum() / 16,  # per head
    "HBM, nothing but Q K V O": bench.forward_bytes(1, 1, 4096, 4096, 64),
}
for words, b in bytes_moved.items():
    print(f"{words:<28}{flops / b:9.2f} FLOP per byte")
ceilings = record.load("device", "ceilings")
top = ceilings.groupby("name")["value"].median()
for roof in ("fp32 matmul", "fp16 matmul"):
    print(f"{'ridge, ' + roof:<28}{top[roof] / top['copy']:9.2f} FLOP per byte ({ceilings.device.iloc[0]})")

# %% [markdown]
# Two lessons. In **fp32**, three kernels at their best do about $d/4 = 16$ FLOPs per byte at $d = 64$; ours, with its nine passes, has $d/9 \approx 7$. Neither is far from the ridge: HBM traffic of $S$ and $P$ alone would cost an fp32 kernel less than a factor of two. What holds *this* kernel back is L1: each FMA asks it for 8 bytes, and an SM of compute capability 9.0 can start 128 FMAs per clock ([CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions), arithmetic throughput), which would be 1024 bytes per clock. One line per clock, as supposed above, is at most 128. In **fp16 on tensor cores** (units that multiply whole small matrices of 16-bit numbers) the ridge is more than ten times further right, and there the $N^2$ traffic is the wall. That is the case FlashAttention was made for, and the fp32 rungs are where to learn it.

# %%
shape = {"B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}
table = record.medians(record.load("01_naive", device="nvidia-h200"))
points = table[(table[list(shape)] == pd.Series(shape)).all(axis=1)].assign(flops=bench.forward_flops(**shape))
points["bytes"] = [record.least_bytes(name, **shape) for name in points["name"]]
plot.roofline(points, record.load("device", "ceilings", device="nvidia-h200"))

# %% [markdown]
# As in every roofline of this series, heights are measured, and intensities are FLOPs over the least bytes that the kind of kernel has to move ($S$ and $P$ written and read, or only $Q$, $K$, $V$, $O$ and LSE). By its own counters 01 would stand at 7. A point far below the roof over it is held back by something other than HBM and the arithmetic units; 01 is, by the lookups counted above.

# %% [markdown]
# ## What still hurts
#
# 1. **Memory.** $S$ and $P$ take $8N^2$ bytes per head, and no tuning of three separate kernels changes that.
# 2. **Traffic.** Every operation between the products is a pass over an $N \times N$ matrix in HBM. The softmax alone makes four: three reads and a write.
# 3. **No reuse.** A thread loads two floats for each FMA. Neighbouring threads load the same ones, and nothing but the caches knows.
# 4. **Access against the grain.** `scores` reads $K$ with 16 lines per request.
#
# The last two are cured by tiling ([03](03_fa1_fp32.ipynb), [04](04_fa2_fp32.ipynb)). The first two need the softmax to work on a part of a row without having seen the rest. That this is possible is the idea of [02 · Online softmax](02_online_softmax.ipynb).

# %% [markdown]
# ## Exercises
#
# ### Exercise 1.1 · Bytes for any shape
#
# Cross-attention has $N_q$ queries and $N_k \ne N_q$ keys. Write the prediction for that case: a function that gives the total bytes (read and written) of each tensor. The one below is right only for $N_q = N_k$.
#
# <details><summary>Hint</summary>
#
# Which of these terms count scores, and how many scores are there?
# </details>

# %%
# Exercise 1.1: bytes that threads ask of each tensor, read and written together


def bytes_by_tensor(B, H, Nq, Nk, d):
    n = B * H * Nq * Nq
    few = 4 * B * H * Nq
    return {
        "Q": 4 * n * d,
        "K": 4 * n * d,
        "V": 4 * n * d,
        "O": few * d,
        "LSE": few,
        "S": 16 * n,
        "P": 4 * n + 4 * n * d,
    }


# %%
q1, k1, v1 = (torch.randn(2, 3, rows, 32, device=device) for rows in (40, 72, 72))
seen = traffic(kernel, q1, k1, v1)[["bytes_read", "bytes_written"]].sum(axis=1).to_dict()


def every_tensor():
    told = bytes_by_tensor(2, 3, 40, 72, 32)
    assert isinstance(told, dict), "give a dict: tensor -> bytes"
    off = [f"{name} {told.get(name)} ({seen[name]} counted)" for name in seen if told.get(name) != seen[name]]
    assert not off, f"not yet right: {', '.join(off)}"
    return True


exercise.verify("1.1", every_tensor)

# %% [markdown]
# <details><summary>Solution</summary>
#
# Only the number of scores changes: $n = B\,H\,N_q N_k$. Each of the $BHN_qd$ threads of `output` reads $N_k$ elements of $P$ and of $V$, which is $nd$ again.
#
# ```python
# def bytes_by_tensor(B, H, Nq, Nk, d):
#     n = B * H * Nq * Nk
#     few = 4 * B * H * Nq
#     return {"Q": 4 * n * d, "K": 4 * n * d, "V": 4 * n * d, "O": few * d, "LSE": few, "S": 16 * n, "P": 4 * n + 4 * n * d}
# ```
# </details>

# %% [markdown]
# In the **tasks** you write parts of the rung yourself, from one loop to the whole kernel, each without a look at the rung's own. The form says what is given and what has to hold afterwards; the rest of the kernel stays as it is. The `%%region` cell judges what you type: solved means right in every case of `check` and no finding in the X-ray, whose counts stand beside the rung's own. Hints unfold one by one. [00](00_start_here.ipynb) shows how it works.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 01.1 · The scores
#
# You practise what every kernel begins with: which element is this thread's, where does its row begin, and who has nothing to do.

# %%
blank("01", "scores")

# %% tags=["active-ipynb"]
# %%region 01 scores -> my_scores
# // type here

# %%
hint("01.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `scores` of [01_naive.cu](../kernels/01_naive.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 01.3 · The output
#
# The same skeleton as in 01.1, now with a row of $P$ and a column of $V$. Look at the two address maps above again: why is this one cheaper?

# %%
blank("01", "output")

# %% tags=["active-ipynb"]
# %%region 01 output -> my_output
# // type here

# %%
hint("01.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `output` of [01_naive.cu](../kernels/01_naive.cu), shown under "The kernel" above.
# </details>

# %% [markdown]
# ### Task 01.2 · The softmax of a warp
#
# A few steps: three passes over a row, and two results that 32 lanes have to agree on. When it is solved, try with two reads of $S$: leave $e^{S - m}$ in $P$ and scale it later. Count the bytes of $S$ and $P$ together (`xray(…).tensors`). Is it a gain?

# %%
blank("01", "softmax")

# %% tags=["active-ipynb"]
# %%region 01 softmax -> my_softmax
# // type here

# %%
hint("01.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: region `softmax` of [01_naive.cu](../kernels/01_naive.cu), shown under "The kernel" above. (One read of $S$ less, a write and a read of $P$ more: five passes instead of four. It saves one `expf` per score, no bytes.)
# </details>

# %% [markdown]
# ### Task 01.9 · The whole rung
#
# From the header block: your own kernels and launcher. One kernel per step is the easy way, and the one that the hints take. The inputs come one by one, the easy ones first, up to the first that is wrong.

# %%
print(kernel.rung.source.split("#include")[0])  # the header block

# %%
blank("01")

# %% tags=["active-ipynb"]
# %%region 01 kernel -> my_kernel
# // type here

# %%
hint("01.9")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The rung's own: all of it that follows the header block of [01_naive.cu](../kernels/01_naive.cu), as above with its `#include` lines.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain the three steps of attention and where their results live, do the byte count of a simple kernel, and judge a kernel by its arithmetic intensity. Answer before you unfold:
#
# <details><summary>Why does <code>reads_per_byte</code> of Q equal N?</summary>
# Each element of S needs a whole row of Q, a row of S has N elements, and each is another thread that loads the row for itself.
# </details>
#
# <details><summary>The threads ask for 4nd bytes of K. Why does HBM carry far fewer?</summary>
# K of one head is 4Nd bytes, small enough for the caches, and all queries ask for the same rows: after the first request, L1 or L2 answers.
# </details>
#
# <details><summary>Why don't caches help S in the same way?</summary>
# S is written by one kernel and read by the next; at long N it is larger than the L2 cache, so the start of it is gone from the cache when its end has been written.
# </details>
#
# <details><summary>At which N do S and P outgrow Q, K, V and O together?</summary>
# 8N² > 16Nd from N > 2d on: 128 for d = 64.
# </details>
#
# <details><summary>Twice the head dimension: what happens to the intensity of the three-kernel form?</summary>
# It doubles, d/4: the N² bytes stay and the FLOPs double.
# </details>
#
# <details><summary>Two kernels ask L1 for the same bytes with the same number of requests; one takes four times as long. Why may that be?</summary>
# Its warps' addresses lie in more sectors and lines: a request for 16 lines costs 16 lookups.
# </details>
#
# <details><summary>A kernel passes <code>allclose(atol=1e-2)</code>. Is it right?</summary>
# That can't be told. At long N every output of attention is a mean of many values and close to 0; a kernel that forgets some keys stays within 0.01. Hence the budget by PyTorch's own error.
# </details>
