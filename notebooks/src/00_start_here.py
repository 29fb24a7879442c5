# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 00 · Start here
#
# **After this notebook you can**
# - explain how the series is built: one kernel file per idea, two back ends, one check;
# - do: load a kernel, break one line of it, see what the check says, and type a kernel of your own into a cell;
# - judge what your machine can run, what it cannot, and which figures on the screen were measured where.
#
# **Time** 40 minutes, one of them waiting for a compiler.
#
# **Needs** nothing but this repository; no GPU. You know Python and a little PyTorch, and have met attention once. CUDA is explained as it comes.
#
# **The idea in one line**: a kernel is a text file that you can change, and seconds later you know whether it is still right.
#
# *Run a cell with Shift+Enter, from the top. Cells are meant to be changed. Without a GPU the second cell also compiles the emulator: up to half a minute, once.*

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import ctypes
import importlib.util

import pandas as pd
import torch

from helpers import bench, check, doctor, draw, exercise, load, plot, record, rung, rungs, show, xray
from helpers.toolchain import build, matching_toolkit

device = load("01_naive").device  # "cuda", or "cpu" where the emulator runs the kernels

# %% [markdown]
# ## This machine
#
# `doctor` looks at what is here, says how to mend what is missing, and on which back end each notebook will run.

# %%
doctor()

# %% [markdown]
# ### Three lanes
#
# Every notebook runs on every machine. What differs is who runs the kernels, and where timings come from.
#
# | you have | kernels | timings |
# |---|---|---|
# | **an NVIDIA GPU** new enough for the kernel | `nvcc` compiles the `.cu` for your GPU | live, beside recorded ones |
# | **an older one** | the kernels it can run, as above; the others on the emulator | live where the kernel runs |
# | **no GPU** | the emulator: the same `.cu`, compiled by the C++ compiler and run thread by thread on the CPU | recorded on an NVIDIA H200, named in every title |
#
# How new is new enough? Each kernel file says so by a **compute capability**, the version number of a GPU's abilities: `sm_75` is 7.5 (Turing, 2018) or newer, `sm_80` 8.0 (Ampere, 2020) or newer, `sm_90a` 9.0 (Hopper, 2022) and no other. `doctor` above has looked.
#
# The **emulator** gives the right results, exact counts of the bytes that threads ask for, and a sentence with file and line for an access out of bounds, a deadlock, a barrier that only some threads reach, a read of shared memory that nobody wrote. (A barrier that is missing altogether stops no kernel; `check` may see it by its wrong result, and `xray`, below, names the two lines that race.) It does not model caches and it has no notion of time: it never says how fast a kernel is, and a time measured on a CPU is never shown beside one from a GPU.

# %% [markdown]
# ## Where data lives
#
# A GPU is a few dozen to 150 processors, called **SMs** (streaming multiprocessors), around one large memory. The nearer a memory is to the arithmetic, the faster and the smaller it is.

# %%
if device == "cuda":
    gpu = torch.cuda.get_device_properties(0)
    name, smem, L2 = gpu.name, gpu.shared_memory_per_multiprocessor >> 10, gpu.L2_cache_size >> 20
    sizes = ["256 KiB per SM", f"{smem} KiB per SM", f"{L2} MiB", f"{gpu.total_memory / 2**30:.0f} GiB"]
else:
    name, sizes = "NVIDIA H200", ["256 KiB per SM", "228 KiB per SM", "60 MiB", "140 GiB"]
notes = ["a thread's own variables", "shared by the threads of a block", "shared by all SMs", "where tensors live"]
levels = ["registers", "shared memory", "L2 cache", "HBM"]
draw.memory_hierarchy(list(zip(levels, sizes, notes)), f"The memories of one GPU · {name}")

# %% [markdown]
# *Top to bottom:* each step down is larger, slower and shared by more threads. (The sizes are what the driver reports, of your GPU or else of an H200, in units of $2^{10}$, $2^{20}$ and $2^{30}$ bytes; registers, which it does not report, are 64 K of 4 bytes per SM by the [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities).) **HBM** (high-bandwidth memory) is the device memory of a data-centre GPU; on other cards it is GDDR, and everything said about it holds. FlashAttention is one idea about this picture: do not send to HBM what could have stayed above.
#
# ### The roofline
#
# A kernel does arithmetic (FLOPs: floating-point operations) on bytes it moves. The device has a limit for each: so many bytes per second to and from HBM, so many FLOPs per second. FLOPs per byte, the **arithmetic intensity**, says which limit a kernel meets first. Measured here if there is a GPU, and recorded otherwise:


# %%
def points(samples, B, H, N, d):
    """Where kernels of this shape sit: FLOPs by formula, bytes that have to cross to HBM, measured time."""
    fused, unfused = bench.forward_bytes(B, H, N, N, d), 16 * B * H * N * (N + d)
    moved = {"01_naive": unfused, "SDPA MATH": unfused, "04_fa2_fp32": fused}
    table = samples[samples.name.isin(list(moved))].groupby("name", as_index=False)["ms"].median()
    return table.assign(bytes=table.name.map(moved), flops=bench.forward_flops(B, H, N, N, d))


# %%
if device == "cuda":
    ceilings = bench.ceilings(rounds=3).assign(device=torch.cuda.get_device_name())
    x = torch.randn(3, 1, 8, 2048, 64, device=device)
    loaded = {stem: load(stem, quiet=True) for stem in ("01_naive", "04_fa2_fp32")}
    ours = {stem: kernel for stem, kernel in loaded.items() if kernel.device == "cuda"}
    found = points(bench.measure(ours | bench.peers(*x), list(x)), 1, 8, 2048, 64)
else:
    ceilings = record.load("device", "ceilings")
    recorded = record.load().query("op == 'attention' and dtype == 'fp32'")
    found = points(recorded.query("H == 32 and Nk == 2048 and D == 64"), 8, 32, 2048, 64)
plot.roofline(found, ceilings)

# %% [markdown]
# *The slope* is what HBM can feed, *the flat part* what the arithmetic units can do; nothing gets above them. Both are measured: by a copy within HBM, and by a large matrix product. Each point is an attention kernel in fp32 at $N = 2048$, $d = 64$ (8 heads where it is measured here, 256 where recorded; few heads make few blocks, which do not fill a large GPU), placed at the intensity of the least traffic its kind can do with. SDPA MATH is PyTorch's own unfused attention (`scaled_dot_product_attention`). Left to right is the way from writing every intermediate to HBM to writing none; bottom to top is the way from a naive kernel to a good one. The series goes both ways.

# %% [markdown]
# ## Notation
#
# The letters are those of the FlashAttention papers, in text, formulas and code alike.
#
# | | |
# |---|---|
# | $B$, $H$ | batch size, number of heads: attention happens $B \cdot H$ times, independently |
# | $N$; $N_q$, $N_k$ | sequence length; number of queries and of keys where they differ |
# | $d$ (`D` in code) | head dimension, 32, 64 or 128 |
# | $Q, K, V, O$ | queries, keys, values, output: tensors of shape $(B, H, N, d)$ |
# | $S = \mathrm{scale}\,QK^\top$ | scores, $N_q \times N_k$ per head; scale is $1/\sqrt d$ |
# | $P = \mathrm{softmax}(S)$ | probabilities, by rows; $O = PV$ |
# | $m$, $l$ | of a row of $S$: its maximum, and $\sum_j e^{S_{ij} - m}$ |
# | $\mathrm{LSE} = m + \ln l$ | log-sum-exp of a row, one number per query |
# | $B_r$, $B_c$ | rows of $Q$ and rows of $K$, $V$ in a tile |
# | FLOPs | $4\,B\,H\,N_q\,N_k\,d$ for the forward pass, always; the softmax is not counted |
#
# In code a suffix tells where a thing lives: `K_smem` in shared memory, `S_reg` in registers, no suffix in HBM. The words of CUDA:
#
# | | |
# |---|---|
# | **kernel** | a function that the GPU runs with many threads; `f<<<grid, block>>>(…)` launches it |
# | **thread** | one execution of it, with its own registers |
# | **warp** | 32 threads that execute together |
# | **block** (CTA) | up to 1024 threads on one SM, which share its shared memory and can wait for each other |
# | **grid** | all blocks of a launch; in no particular order, and without waiting for each other |
# | `blockIdx`, `threadIdx` | which block of the grid, which thread of the block this is; each has `.x`, `.y`, `.z` |
# | `blockDim` | how many threads a block has in each of the three directions |
# | **stream** | a queue of launches, which run one after the other |

# %% [markdown]
# ## How to read a rung
#
# Each kernel file is a **rung** of a ladder: a whole kernel that reads from top to bottom by itself and adds one idea to an earlier rung. The ladder:

# %%
pd.set_option("display.max_colwidth", None)
pd.DataFrame({r.stem: {"idea": r.idea, "dtypes": ", ".join(r.dtypes), "needs": r.arch} for r in rungs()}).T

# %% [markdown]
# A file opens with a **header block**, the manual of the kernel. Read it first: what goes in and out, which sizes it takes, which threads do what, and one honest sentence on speed.

# %%
print(rung("01_naive").source.split("#include")[0])

# %% [markdown]
# Below the header come the constants, the kernel or kernels, and the **launcher** `fa_launch`, the one function Python calls. Marked **regions** let a notebook show a part of the very file that is compiled, with its line numbers, so that prose and code cannot drift apart:

# %%
print(", ".join(show.regions("01_naive")))
show.region("01_naive", "output")

# %% [markdown]
# This is the last of the three kernels of `01_naive`: $O = PV$, one thread per element of $O$. `__global__` makes a function a kernel; `a` holds the arguments: addresses, sizes, and strides, the distances in elements from one batch, head or row to the next. The thread works out which element is its own (`i`, `c`, and `head`), leaves if there is none, adds up $N_k$ products and writes one number. [01](01_naive.ipynb) explains it line by line. Here it is material for breaking.

# %% [markdown]
# ## The edit loop
#
# `load` compiles a rung and prints one line: the compiler used, the seconds it took, and from `nvcc` how many registers a thread takes, whether variables were **spilled** (found no register and went to memory), and the shared memory of a block. Text that was compiled before is not compiled again, be it minutes or days later; the line then says `unchanged`.

# %%
kernel = load("01_naive")
q, k, v = torch.randn(3, 1, 2, 128, 64, device=kernel.device)
o, lse = kernel(q, k, v)
check(kernel)

# %% [markdown]
# `check` ran it on inputs made to break kernels, and held $O$ and LSE against a float64 reference. The **error budget** of a case is about twice the error that PyTorch makes on the same inputs in the same precision. Now break one line. You would open `kernels/01_naive.cu` in JupyterLab's file browser, change it, save, and run the cell above again; to keep the file whole, this cell replaces text in a copy of the source. The launcher computes how many tiles of 16 columns $O$ has; forget the last one:

# %%
edited = rung("01_naive").replace(
    "column_tiles = fa::ceil_div(a.D, tile)", "column_tiles = fa::ceil_div(a.D, tile) - 1"
)
broken = load(source=edited)
print(check(broken))

# %% [markdown]
# It says how many cases are wrong, where the worst element is and **which** elements are wrong: here columns 16 to 31 of $D = 32$, 48 to 63 of $D = 64$, in all rows. "Never written" is exact: outputs are filled with a special NaN before the kernel runs. The map at the end draws one head. A pattern like this one, whole columns from a multiple of 16 on, is half of the diagnosis.
#
# Revert. The compiled original is still in the cache:

# %%
kernel = load("01_naive")
print("right again" if check(kernel).ok else "still wrong")

# %% [markdown]
# Two more kinds of mistake. What the **compiler** refuses comes back as its own words, with the line where it noticed. `cell` stands for a text that is in no file; this compiler sees that a semicolon is missing when it reads the next line:

# %%
try:
    load(source=rung("01_naive").replace("float o = 0.f;", "float o = 0.f"))
except RuntimeError as error:  # a CompileError
    print(error)

# %% [markdown]
# And what the compiler lets pass but no thread should do, the **emulator** reports, on any machine (`device="cpu"` asks for it even where there is a GPU). Without the line that sends threads beyond the edge home:

# %%
unguarded = load(source=rung("01_naive").replace("if (i >= a.Nq || c >= a.D) return;", ""), device="cpu")
try:
    unguarded(*torch.randn(3, 1, 1, 100, 64))
except RuntimeError as error:  # a KernelError
    print(error)

# %% [markdown]
# A loop that never ends shows itself by a line that counts blocks and stands still; the ■ button stops it and the notebook goes on. (On a GPU nothing short of restarting the notebook's kernel stops it. Try what may hang with `device="cpu"` first.)
#
# A kernel can also be right and wasteful. `xray` runs it on the emulator and lists its lines by what they cost. HBM is moved in **sectors**, aligned pieces of 32 bytes; what the 32 threads of a warp ask for together is a **request**. Beside the sectors of all requests stands the ideal, the fewest sectors that hold as many bytes.

# %%
xray("01_naive", *torch.randn(3, 1, 1, 128, 64))

# %% [markdown]
# *The first row* is the product $QK^\top$. At each step a warp asks for one column of 16 rows of $K$, which lie 256 bytes apart: 16 sectors are moved, and of each only 4 bytes are used. Two sectors would hold the 64 bytes. The X-ray needs no GPU and gives the same counts on every machine; from [03](03_fa1_fp32.ipynb) on it looks into shared memory, too.

# %% [markdown]
# ## A kernel typed into a cell
#
# `%%kernel` makes a cell a kernel: it is compiled, checked, and on a GPU timed. A whole softmax over rows, one thread per row, in fifteen lines. (For `op: softmax` the scores arrive as `Q`, rows of `Nk` numbers, and the result goes to `O`.)

# %%
# %load_ext helpers

# %% tags=["active-ipynb"]
# %%kernel row_softmax
# // row_softmax: one thread per row
# // op: softmax
# #include <fa/args.cuh>
# #include <fa/math.cuh>
# __global__ void softmax(const fa_args a) {
#   const int64_t row = int64_t(blockIdx.x) * 32 + threadIdx.x;
#   if (row >= a.Nq) return;
#   const float *S = static_cast<const float *>(a.Q) + row * a.Nk;
#   float *P = static_cast<float *>(a.O) + row * a.Nk, m = -FA_INFINITY; double l = 0;
#   for (int j = 0; j < a.Nk; ++j) m = fmaxf(m, S[j]);
#   for (int j = 0; j < a.Nk; ++j) l += P[j] = expf(S[j] - m);
#   for (int j = 0; j < a.Nk; ++j) P[j] /= l;
#   a.LSE[row] = m + logf(l);
# }
# extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
#   return softmax<<<(a->Nq + 31) / 32, 32, 0, stream>>>(*a), cudaGetLastError();
# }

# %% [markdown]
# (`l` is a `double` because one thread adds up the whole row. A `float` that has reached $2^{24}$ no longer grows when 1 is added: on a row of 16 million scores the LSE would be off by 0.04.)
#
# Right for every row of ordinary numbers, and wrong for one case: a row that is −∞ throughout, as a mask makes it. There `m` is −∞ and $-\infty - (-\infty)$ is NaN. Ordinary tests never see such a row. Exercise 0.1 repairs it.
#
# The cell's kernel is bound to the name after `%%kernel` and is called like any other:

# %%
p, lse = row_softmax(torch.randn(4, 10, device=row_softmax.device))
print("rows sum to", p.sum(-1).tolist())

# %% [markdown]
# ## The classic binding, and what it costs
#
# Most tutorials bind a kernel to PyTorch differently: a function `torch::Tensor forward(torch::Tensor …)` in C++, and `torch.utils.cpp_extension.load_inline(…, functions=["forward"])`, which puts PyTorch's headers before it and wraps it with pybind11, a library that makes C++ functions callable from Python. It is convenient: tensors go in and come out. A kernel that doubles its input, that way (the first is for a GPU, the second for a machine without one):

# %%
classic_cuda = """
__global__ void twice(const float *x, float *y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
torch::Tensor forward(torch::Tensor x) {
  auto y = torch::empty_like(x);
  twice<<<(x.numel() + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  return y;
}"""
classic_cpp = """
torch::Tensor forward(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i];
  return y;
}"""

# %% [markdown]
# And the way of this series: no PyTorch header, a plain `extern "C"` function that takes addresses, called through Python's `ctypes`.

# %%
free_cuda = """
#include <cstdint>
__global__ void twice(const float *x, float *y, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = 2 * x[i];
}
extern "C" int forward(const float *x, float *y, int64_t n) {
  twice<<<(n + 255) / 256, 256>>>(x, y, n);
  return cudaGetLastError();
}"""
free_cpp = """
#include <cstdint>
extern "C" int forward(const float *x, float *y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
  return 0;
}"""

# %% [markdown]
# Both go through `load_inline`. `build` is the series' wrapper around it: it builds in a folder of its own and keeps the result under a hash of everything that went in. **The first of these builds takes 15 to 60 seconds**, once; later it is found in the cache.

# %%
if device == "cuda":
    toolkit = matching_toolkit(torch.version.cuda)
    declared = "torch::Tensor forward(torch::Tensor x);"
    classic = build("classic", cpp=declared, cuda=classic_cuda, functions=["forward"], toolkit=toolkit)
    free = build("torch_free", cuda=free_cuda, toolkit=toolkit)
else:
    classic = build("classic", cpp=classic_cpp, functions=["forward"])
    free = build("torch_free", cpp=free_cpp)

# %%
spec = importlib.util.spec_from_file_location(classic.path.stem, classic.path)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

x = torch.randn(1000, device=device)
y = torch.empty_like(x)
address = [ctypes.c_void_p(t.data_ptr()) for t in (x, y)]
ctypes.CDLL(str(free.path)).forward(*address, ctypes.c_int64(x.numel()))
print("both double:", torch.equal(module.forward(x), 2 * x) and torch.equal(y, 2 * x))

# %% [markdown]
# `ninja`, which runs the compilers, keeps a log of when each step ended; so the time of the first build is known even when this cell finds it in the cache.


# %%
def seconds_to_build(built):
    """From the start of a build to the end of its last step, by ninja's log (milliseconds, second column)."""
    steps = (built.path.parent / ".ninja_log").read_text().splitlines()[1:]
    return max(int(step.split("\t")[1]) for step in steps) / 1000


where = f"nvcc, {torch.cuda.get_device_name()}" if device == "cuda" else "C++ compiler, this machine"
times = {"with PyTorch's headers": seconds_to_build(classic), "without": seconds_to_build(free)}
draw.seconds(times, f"Building a kernel that doubles its input · {where}")

# %% [markdown]
# *The same kernel twice.* The time is spent reading PyTorch's headers (with torch 2.13 and without a GPU, the preprocessor hands the compiler some 290 thousand lines, blank ones not counted) and working out pybind11's templates; the kernel itself is nothing. After **every** edit it is spent again. This is why no `.cu` of the series includes a PyTorch header, and why the edit loop is one you can think in. The contract that `torch::Tensor` would have checked (dtype, shape, strides, device) is checked in Python before the call, with better error messages.
#
# The edit loop of a real kernel as recorded. `import` is what the first load of a process imports, `cold` the build of a new kernel, `edit` the build after a change, `unchanged` a load without one, `reverted` a load after the change was taken back.

# %%
built = record.load("01_naive", "build")
phases = built.groupby("phase", sort=False)["seconds"].median().to_dict()
draw.seconds(phases, f"Loading 01_naive · {built.device.iloc[0]}")

# %% [markdown]
# ## Three paths through the series
#
# **Understand the algorithm.** [01](01_naive.ipynb) what attention computes and what it costs → [02](02_online_softmax.ipynb) the mathematics that makes FlashAttention possible → [03](03_fa1_fp32.ipynb) the algorithm of the first paper → the sections "The problem" and "What still hurts" of [04](04_fa2_fp32.ipynb). Do the numpy cells and the predictions; skim the CUDA.
#
# **Implement it.** Read a rung's `.cu` first and write down what each thread does; then its notebook, and all exercises. Before opening 03, try to write it from its header block. `show.diff("03_fa1_fp32", "04_fa2_fp32")` shows what an idea changes in the code.
#
# **Optimise it.** Start at [04](04_fa2_fp32.ipynb), go back where something is new. Predict every number before you measure it; keep what did not help. Then try to beat a rung: the check, the byte counts and, with a GPU, `bench.measure` beside the peers tell you where you are.
#
# Where each part lies:
#
# | notebooks | about |
# |---|---|
# | [01](01_naive.ipynb), [02](02_online_softmax.ipynb), [03](03_fa1_fp32.ipynb), [04](04_fa2_fp32.ipynb) | the algorithm in fp32: naive, online softmax, FlashAttention 1 and 2 |
# | [10](10_fa2_mma_fp16.ipynb), [11](11_swizzled.ipynb), [12](12_double_buffered.ipynb), [13](13_tuned.ipynb) | tensor cores with 16-bit numbers, up to and past PyTorch's FlashAttention-2 |
# | [20](20_causal_gqa.ipynb), [21](21_split_kv.ipynb) | what models ask for: causal masks, shared heads, packed sequences; decoding against a long cache |
# | [22](22_backward_fp32.ipynb), [23](23_backward_mma.ipynb), [24](24_in_a_model.ipynb) | gradients, in fp32 and on tensor cores, and a small GPT trained with them |
# | [30](30_tma_wgmma.ipynb), [31](31_warp_specialized.ipynb), [32](32_ping_pong.ipynb), [33](33_backward_wgmma.ipynb) | Hopper: tiles that are copied and multiplied asynchronously, warps with roles, turns; forward and backward |
# | [90](90_proving_it_right.ipynb), [91](91_bug_museum.ipynb), [92](92_xray_against_hardware.ipynb) | how to test a kernel, bugs that kernels have had or could have, and how far the X-ray can be trusted |
# | [99](99_the_ladder.ipynb) | all rungs on one board, and a place for your own |

# %% [markdown]
# ## Exercises
#
# ### Exercise 0.1 · Repair the softmax
#
# Make `row_softmax` right for rows that are −∞ throughout: $P = 0$ and $\mathrm{LSE} = -\infty$. Two places need a guard. Work on the text, as below, or copy the kernel's cell and check it there first.

# %%
# Exercise 0.1: put something better in place of the second text; chain .replace(…).replace(…)
repaired = row_softmax.source.replace("expf(S[j] - m)", "expf(S[j] - m)")

# %%
exercise.verify(
    "0.1",
    lambda: check(load(source=repaired, quiet=True)).require().ok,
    hint="subtract 0 instead of m where m is −∞: exp(−∞) is 0. And then l is 0: what is 0 / 0?",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# repaired = row_softmax.source.replace("expf(S[j] - m)", "expf(S[j] - (m == -FA_INFINITY ? 0.f : m))")
# repaired = repaired.replace("P[j] /= l", "P[j] /= l > 0.f ? l : 1.f")
# ```
#
# The LSE needs no guard: $-\infty + \ln 0 = -\infty$.
# </details>

# %% [markdown]
# ### Exercise 0.2 · A mistake that only LSE shows
#
# Change one line of `01_naive` so that $O$ stays right in every case and only LSE is wrong. (If a test looks at $O$ alone, such a mistake stays hidden until the backward pass uses the LSE.)

# %%
# Exercise 0.2: replace one line of the softmax kernel
only_lse = rung("01_naive").replace("a.LSE[row] = m + logf(l);", "a.LSE[row] = m + logf(l);")


# %%
def wrong_in_lse_alone():
    wrong = {c.output for c in check(load(source=only_lse, quiet=True)).failures}
    assert wrong == {"lse"}, f"wrong outputs: {', '.join(wrong).upper() or 'none'}"
    return True


exercise.verify(
    "0.2", wrong_in_lse_alone, hint="which line writes LSE, and what happens if it forgets one of its terms?"
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# only_lse = rung("01_naive").replace("a.LSE[row] = m + logf(l);", "a.LSE[row] = logf(l);")
# ```
#
# Look at `print(check(load(source=only_lse)))`: where all scores are 0, forgetting `m` changes nothing. Tests with easy inputs pass.
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain the lanes and the parts of a rung, do the edit loop, and judge what a figure on the screen stands for. Answer before you unfold:
#
# <details><summary>A figure here is titled "NVIDIA H200" and your machine has no GPU. What do you know about your machine's speed?</summary>
# Nothing: the figure was recorded on the device it names.
# </details>
#
# <details><summary>What does the emulator tell you about a kernel, and what not?</summary>
# Right or wrong, exact bytes asked for by tensor, faults with their line. Not how long it takes, nor what a cache would have saved.
# </details>
#
# <details><summary>A warp, a block, an SM: which are software's words, which hardware's?</summary>
# A block is what the program asks for; an SM is the processor it runs on; a warp is the 32 threads the hardware executes together.
# </details>
#
# <details><summary>Why does the check fill the outputs with NaN first?</summary>
# So that an element the kernel never writes can't be right by accident, for example because the memory still held an older right result.
# </details>
#
# <details><summary>The error map shows columns 48 to 63 wrong in all rows, D = 64. Where do you look?</summary>
# At what is decided per tile of 16 columns: the grid's dimension over columns, or the guard on the column index.
# </details>
#
# <details><summary>Why are PyTorch's headers kept out of the kernels?</summary>
# Compiling them takes 15 seconds and more after every edit, and a kernel needs nothing of them: addresses, sizes and strides suffice.
# </details>
