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
# **After this notebook you can**
# - explain what attention computes, and why two of its intermediates grow with the square of the sequence length;
# - do: predict, to the byte, what a kernel's threads ask of memory, and check the prediction;
# - judge whether arithmetic, HBM or the caches hold a kernel back, with a roofline and a profile.
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
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import os

import pandas as pd
import torch
from IPython.display import display

from helpers import bench, check, draw, exercise, load, plot, record, reference, rung, show, traffic, xray

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
# The kernels of this series return one more number per row, the **log-sum-exp** $\mathrm{LSE}_i = \ln \sum_j e^{S_{ij}}$: with it, $P_{ij} = e^{S_{ij} - \mathrm{LSE}_i}$ can be had again from $S_{ij}$ alone.
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
# `kernels/01_naive.cu` does what the three lines above do: one CUDA kernel per operation. The first computes $S$, **one thread per element**.

# %%
show.region("01_naive", "scores")

# %% [markdown]
# CUDA runs threads in **blocks** (also called CTAs); all blocks of a launch form the **grid**. Here a block is 16 × 16 threads and covers a 16 × 16 patch of $S$. A thread finds its query `i` and key `j` from `blockIdx` and `threadIdx`, leaves if it lies beyond the edge (this is how any $N$ works), multiplies a row of $Q$ with a row of $K$, and writes one number. Each step of its loop is one **FMA** (fused multiply-add: a product and a sum in one instruction, 2 FLOPs). The offsets of batch and head come from strides, so the inputs need not be contiguous.

# %%
draw.threads(N=48)

# %% [markdown]
# *Left:* the blocks of one head; `blockIdx.x` runs along the queries (and over the heads), `blockIdx.y` along the keys. *Right:* inside a block the hardware groups threads into **warps** of 32 that execute together: two rows of 16. While a warp computes, its 32 threads read 2 different rows of $Q$ and 16 different rows of $K$.
#
# The second kernel turns each row of $S$ into a row of $P$. One warp takes a row. Its threads are called **lanes**, numbered 0 to 31: lane 0 takes elements 0, 32, 64, …, lane 1 elements 1, 33, 65, …

# %%
show.region("01_naive", "softmax")

# %% [markdown]
# It reads its row three times: for the maximum `m`, for the sum `l`, and to write $P$. After the first and the second pass the 32 lanes hold 32 partial results; five `__shfl_xor_sync` steps, in which lanes read each other's registers, leave the total in every lane. Why the maximum is subtracted, and how to read the row less often, is what [02](02_online_softmax.ipynb) is about.
#
# The third kernel multiplies $P$ by $V$, again one thread per element of the result.

# %%
show.region("01_naive", "output")

# %% [markdown]
# The **launcher** is the function Python calls. It refuses what the kernels can't do, and launches the three on one stream: each starts when the one before has finished. Between them, $S$ and $P$ wait in **HBM**, the GPU's large memory outside the chip.

# %%
show.region("01_naive", "launcher")

# %% [markdown]
# ## Run and check
#
# Two outputs: $O$ and the log-sum-exp. `check` runs the kernel on inputs chosen to break kernels (lengths one off every tile edge, huge scores, strided tensors, …) and holds both outputs against a float64 reference.

# %%
o, lse = kernel(q, k, v)
exact, _ = reference.attention(q, k, v)
print(f"O {tuple(o.shape)}, LSE {tuple(lse.shape)}; largest |O - exact| = {(o - exact).abs().max():.1e}")
check(kernel)

# %% [markdown]
# How exact is exact enough? A fixed tolerance would be too lax for some inputs and impossible for others. The rule here: **the error may be twice that of plain PyTorch at the same precision on the same inputs**, plus a floor of a few rounding steps. That is the *budget*, and the line above says how much of it the worst case uses.

# %% [markdown]
# ## Predict, then measure
#
# How many bytes do the threads ask of each tensor? Count loads in the source, multiply by the threads that run them; a float has 4 bytes. Write $n = B\,H\,N^2$ for the number of scores.
#
# - **Q, K.** In `scores`, $n$ threads each read $d$ floats of $Q$ and $d$ of $K$: $4nd$ bytes of each.
# - **S.** Written once by `scores`, $4n$. Read three times by `softmax`, $3 \cdot 4n$.
# - **P.** Written once by `softmax`, $4n$. In `output`, $BHNd$ threads each read a row of $N$: $4 \cdot BHNd \cdot N = 4nd$.
# - **V.** The same threads each read a column of $V$: $4nd$.
# - **O, LSE.** Written once: $4BHNd$ and $4BHN$.
#
# The cell below holds these formulas. Change one if you don't believe it.

# %%
n = B * H * N * N
predicted = {
    "Q": 4 * n * d,
    "K": 4 * n * d,
    "V": 4 * n * d,
    "O": 4 * B * H * N * d,
    "LSE": 4 * B * H * N,
    "S": 4 * n + 3 * 4 * n,
    "P": 4 * n + 4 * n * d,
}

# %% [markdown]
# `traffic` runs the kernel on the emulator, where every load and store of every thread is seen, and adds up bytes by tensor. It counts; nothing is sampled or estimated, and the counts are the same on every machine.

# %%
counted = traffic(kernel, q, k, v)
total = counted.bytes_read + counted.bytes_written
both = counted.assign(total=total, predicted=pd.Series(predicted))
print("every prediction exact" if (both.total == both.predicted).all() else "a prediction is off")
both

# %% [markdown]
# The **X-ray** runs the kernel in the same way and looks at every request of a warp. One of its pictures sets the bytes beside the least that any attention has to move: inputs read once, outputs written once, $S$ and $P$ not at all.

# %%
ray = xray(kernel, q, k, v)
ray.traffic()

# %% [markdown]
# Four tensors dominate, each with $4nd$ bytes: every byte of $Q$, $K$ and $V$ is asked for $N = 256$ times (`reads_per_byte`), every byte of $P$ $d = 64$ times. The three passes over $S$ hardly show.
#
# ### What reaches HBM
#
# A request goes to the **L1 cache** of its SM (streaming multiprocessor, one of the GPU's processors), then to the **L2 cache** that all SMs share, and only what neither holds comes from HBM. $Q$, $K$ and $V$ of a head are small and asked for again and again; the caches answer nearly all of it. $S$ and $P$ are large. Predict, for $N = 4096$ and 16 heads, where $S$ has 1.07 GB and fits in no cache, how often each kernel moves a matrix of that size:
#
# - `scores` writes $S$ once.
# - `softmax` goes over each row three times. Can a row wait in a cache from one pass to the next? A row has 16 KB; an SM works on up to 64 warps, so on 64 rows or 1 MB, at a time, and all SMs together on more than 100 MB. Neither L1 nor L2 holds that: three reads from HBM. And it writes $P$ once.
# - `output` works on 16 columns of $O$ per block. For $d = 64$ there are four blocks that need the same rows of $P$, and they run far apart in time: four reads.
#
# Nsight Compute reads the counters of the memory itself. Recorded, in units of the size of $S$:

# %%
recorded = record.load("01_naive", "counters", device="nvidia-h200")
at_4096 = recorded[recorded.N == 4096].set_index("kernel")
n_4096 = 1 * 16 * 4096**2  # elements of S
dram = pd.DataFrame({"predicted reads": {"scores": 0, "softmax": 3, "output": 4}})
dram["read"], dram["written"] = at_4096.dram_read_bytes / (4 * n_4096), at_4096.dram_write_bytes / (4 * n_4096)
dram["TB/s"] = (at_4096.dram_read_bytes + at_4096.dram_write_bytes) / at_4096.duration_ns / 1e3
dram["ms"], dram["share of time"] = at_4096.duration_ns / 1e6, at_4096.duration_ns / at_4096.duration_ns.sum()
print(f"{recorded.device.iloc[0]}, B = 1, H = 16, N = 4096, d = 64, read and written in units of S")
dram.round(2)

# %% [markdown]
# The passes over $S$ and $P$ are as predicted, to within 2 %. The one surprise is that `scores` reads 0.27: $Q$ and $K$ together measure only 0.03, so parts of them come from HBM several times, presumably because the stream of $S$ pushes them out of the L2. The times are not what one might expect: the `softmax`, with four of the nine passes over a gigabyte, takes 2 % of the time. It moves 3.55 TB/s, not far from the 4.21 of a plain copy. The two products have little traffic per second, and `scores` takes nearly four times as long as `output`, for the same number of FLOPs and of requests. HBM does not explain that.
#
# ### The X-ray: what a request costs
#
# When a warp executes a load, its 32 threads name 32 addresses. The L1 cache serves them in **sectors** of 32 bytes, which lie in **lines** of 128 bytes. Neighbouring threads that ask for neighbouring addresses share sectors; such an access is called **coalesced**. Look at the two loops again, for one warp (two rows of 16 threads):
#
# - `scores`, `q[c]`: 2 queries, so 2 addresses, 2 sectors in 2 lines. `k[c]`: 16 keys, and rows of $K$ are $4d = 256$ bytes apart: **16 sectors in 16 lines**. On average 9 sectors per request.
# - `output`, `P[j]`: 2 rows, 2 sectors in 2 lines. `V[j * stride + c]`: 16 neighbouring columns, 64 bytes: 2 sectors in 1 line. On average 2.
#
# The X-ray can draw one request:

# %%
ray.address_map("s += q[c] * k[c]", target="K")

# %%
ray.address_map("o += P[j] * V[j", target="V")

# %% [markdown]
# *Above,* $K$: a row is a line of 128 bytes, a box a sector, and a cell of 4 bytes carries the lane that asks for it (+: the lane 16 further on asks for it, too). Sixteen lines have to be looked up, and seven eighths of what is moved is not used. *Below,* $V$: one line, and all that is moved is used.
#
# Suppose L1 looks up one line per clock. Then the lines alone give a least time: $nd/32$ iterations of warps, 18 or 3 lines each, divided by the SMs and the clock.

# %%
sms, clock = 132, record.about("01_naive", device="nvidia-h200")["sm_clock_mhz"]["median"] * 1e6
lines = pd.Series({"scores": 2 + 16, "output": 2 + 1})
cost = pd.DataFrame({"sectors per request, predicted": {"scores": (2 + 16) / 2, "output": (2 + 2) / 2}})
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
# The memory that one call takes, as PyTorch's allocator saw it on the GPU:

# %%
plot.memory(record.load("01_naive", kind="memory"))

# %% [markdown]
# *One head:* the two that form $S$ and $P$ grow with $N^2$, PyTorch's fused kernel (EFFICIENT) with $N$.

# %% [markdown]
# ### Where the time goes
#
# A profiler attributes time to kernels. First plain PyTorch, `unfused`; then, on a GPU, our three kernels. (The emulator's seconds say nothing about a GPU, so without one only PyTorch is profiled, on the CPU: read which operations there are, and leave the times alone.)


# %%
def profiled(call):
    """What ran in `call`, how often, and its share of the time in percent; on the GPU if there is one."""
    os.environ["KINETO_LOG_LEVEL"] = "99"  # the profiler's own messages
    kind = "CUDA" if device == "cuda" else "CPU"
    call()  # warm-up
    with torch.profiler.profile(acc_events=True) as seen:
        call()
        if device == "cuda":
            torch.cuda.synchronize()
    field = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    events = [e for e in seen.key_averages() if e.device_type.name == kind and getattr(e, field) > 0]
    table = pd.DataFrame({"calls": [e.count for e in events]}, index=[e.key[:60] for e in events])
    times = pd.Series([getattr(e, field) for e in events], index=table.index)
    return table.assign(percent=(100 * times / times.sum()).round(1)).sort_values("percent", ascending=False).head(6)


# %%
n_profiled = 4096 if device == "cuda" else 512
inputs = torch.randn(3, 1, 8, n_profiled, 64, device=device)
print(f"unfused PyTorch on {'this GPU' if device == 'cuda' else 'this CPU'}, H = 8, N = {n_profiled}")
display(profiled(lambda: unfused(*inputs)))
if device == "cuda":
    print("01_naive on the same inputs")
    display(profiled(lambda: kernel(*inputs)))

# %% [markdown]
# PyTorch's table has the matrix products (`bmm`, batched matrix multiplication, or names with `gemm`, general matrix multiplication), the softmax (`cunn_SoftMax…` on a GPU), and the multiplication by the scale (`mul`, or `vectorized_elementwise_kernel`): a pass over $S$ of its own, which reads and writes all of it for one multiplication per element. Fusing such passes is worth doing, and it is only a beginning.
#
# Compare with our three kernels (the last column of the table of counters above, where there is no GPU): in PyTorch's form, with products tuned by experts, the passes over $S$ between the products are a large part of the time (more than two fifths on an H200). In ours the products are so slow that the softmax does not matter. Which part to improve first is a question to ask a profile.

# %% [markdown]
# ## Beside its peers
#
# PyTorch has several attention kernels behind `scaled_dot_product_attention` (SDPA). **MATH** is the unfused three-step form with tuned matrix products; **EFFICIENT** never writes $S$ or $P$ to HBM. Both also run in fp32, which FLASH and CUDNN, the others, do not. On a GPU, a short measurement, in milliseconds per call ($B = 4$, $H = 8$, $N = 1024$, $d = 64$):

# %%
if device == "cuda":
    inputs = torch.randn(3, 4, 8, 1024, 64, device=device)
    samples = bench.measure({"01_naive": kernel} | bench.peers(*inputs), list(inputs))
    display(samples.groupby("name").ms.describe()[["min", "50%", "max"]].sort_values("50%"))
else:
    print("no GPU here: the emulator counts, it does not time")

# %% [markdown]
# The recorded runs, over the whole range of $N$ (the number of tokens $B \cdot N$ is held, so the work grows with $N$):

# %%
samples = record.load("01_naive")
display(plot.throughput(samples), plot.latency(samples))
ratios = {p: record.overall(samples, "01_naive", p) for p in ("SDPA MATH", "SDPA EFFICIENT")}
pd.DataFrame(ratios, index=["geometric mean, N ≥ 1024", "worst", "best"]).T.round(3)

# %% [markdown]
# *Above:* TFLOP/s, higher is better; *below:* milliseconds on a logarithmic scale. The table gives the speed of 01 as a fraction of each peer's.
#
# ### On the roofline
#
# **Arithmetic intensity** is FLOPs per byte moved. A device that can move $\beta$ bytes and do $\pi$ FLOPs per second needs at least $\pi/\beta$ FLOPs per byte to be busy computing; that is the *ridge*. Attention's forward pass counts as $4BHN^2d$ FLOPs (two products of $2N^2d$ each). Divided by three different byte counts:
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
# Two lessons. In **fp32**, three kernels at their best do about $d/4 = 16$ FLOPs per byte at $d = 64$; ours, with its nine passes, has $d/9 \approx 7$. Both are not far from the ridge: HBM traffic of $S$ and $P$ alone would cost an fp32 kernel less than a factor of two. What holds *this* kernel back is the first number: each FMA asks L1 for 8 bytes, and an SM of compute capability 9.0 can start 128 FMAs per clock ([CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions), arithmetic throughput), which would be 1024 bytes per clock. One line per clock, as supposed above, is at most 128. In **fp16 on tensor cores** the ridge is more than ten times further right, and there the $N^2$ traffic is the wall. That is the case FlashAttention was made for, and the fp32 rungs are where to learn it.

# %%
shape = {"B": 4, "H": 32, "Nq": 4096, "Nk": 4096, "D": 64}  # eight times the heads of the counters
table = record.medians(record.load("01_naive", device="nvidia-h200"))
points = table[(table[list(shape)] == pd.Series(shape)).all(axis=1)].assign(flops=bench.forward_flops(**shape))
moved = {"01_naive": 8 * (at_4096.dram_read_bytes + at_4096.dram_write_bytes).sum()}
moved |= {"SDPA MATH": 4 * 32 * 16 * (4096**2 + 4096 * 64), "SDPA EFFICIENT": bench.forward_bytes(**shape)}
points["bytes"] = points.name.map(moved)
plot.roofline(points, record.load("device", "ceilings", device="nvidia-h200"))

# %% [markdown]
# Heights are measured. The intensity of 01 comes from the counters; those of PyTorch's kernels from the least bytes their kind can do with (MATH: three kernels at their best; EFFICIENT: $Q$, $K$, $V$, $O$ and LSE). A point far below the roof over it is held back by something other than HBM and the arithmetic units; 01 is, by the lookups counted above.

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
q1, k1, v1 = (torch.randn(1, 3, rows, 32, device=device) for rows in (40, 72, 72))
seen = traffic(kernel, q1, k1, v1)[["bytes_read", "bytes_written"]].sum(axis=1).to_dict()


def every_tensor():
    told = bytes_by_tensor(1, 3, 40, 72, 32)
    off = [f"{name} {told.get(name)} ({seen[name]} counted)" for name in seen if told.get(name) != seen[name]]
    assert not off, f"not yet right: {', '.join(off)}"
    return True


exercise.verify("1.1", every_tensor, hint="how many elements has S now?")

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
#
# ### Exercise 1.2 · One pass less over S
#
# Change the `softmax` kernel so that it reads $S$ only twice: in the second pass it has $e^{S_{ij} - m}$ in hand; let it leave that in $P$, and scale $P$ in the third. Edit by replacing text, as below, or in the file. The check wants right results and two reads per byte of $S$. Then look at the total: is it a gain?

# %%
# Exercise 1.2: replace the right lines
edited = rung("01_naive").replace("l += expf(S[j] - m_finite);", "l += expf(S[j] - m_finite);")


# %%
def two_reads_and_right():
    two_passes = load(source=edited, quiet=True)
    reads = traffic(two_passes, q, k, v).reads_per_byte["S"]
    assert reads == 2, f"S is read {reads:g} times"
    return check(two_passes).require().ok


exercise.verify("1.2", two_reads_and_right, hint="an assignment in C++ has a value: l += (P[j] = …)")

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# edited = rung("01_naive").replace("l += expf(S[j] - m_finite);", "l += (P[j] = expf(S[j] - m_finite));")
# edited = edited.replace("P[j] = expf(S[j] - m_finite) * l_inv;", "P[j] *= l_inv;")
# ```
#
# One exponential per element instead of two, and $S$ is read twice. But $P$ is now written twice and read once by `softmax`: one pass fewer over $S$, two more over $P$. Unless a cache holds the row of $P$ between the passes, that is more traffic, not less. To gain, the row has to stay on the chip.
# </details>
#
# ### Exercise 1.3 · The wall
#
# An H200 has 140 GiB of memory ($1\,\mathrm{GiB} = 2^{30}$ bytes). From which $N$ on do $S$ and $P$ of a single fp32 head no longer fit, whatever else is in it? Give the smallest such $N$.

# %%
# Exercise 1.3
N_wall = 1000

# %%
exercise.verify(
    "1.3",
    lambda: 8 * N_wall**2 > 140 * 2**30 >= 8 * (N_wall - 1) ** 2,
    hint="S and P together: 2 matrices of N² floats",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# $8N^2 > 140 \cdot 2^{30}$ gives $N > \sqrt{140 \cdot 2^{30} / 8} \approx 137\,078.4$.
#
# ```python
# N_wall = 137_079
# ```
#
# One head. A model with 32 of them, one sequence, reaches it at $N \approx 24\,200$.
# </details>

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
