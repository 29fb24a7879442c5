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
# [glossary](glossary.md) | [01 · Naive attention, three kernels →](01_naive.ipynb)
#
# **After this notebook you can**
# - explain how the series is built: one kernel file per idea, two back ends, one check;
# - do: load a kernel, break one line of it, see what the check says, and type a kernel of your own into a cell;
# - judge what your machine can run, what it cannot, and which figures on the screen were measured where.
#
# **Time** 60 minutes, one of them waiting for a compiler.
#
# **Needs** nothing but this repository; no GPU. You know Python and a little PyTorch, and have met attention once. CUDA, the C++ dialect that GPUs are programmed in, is explained as it comes.
#
# **The idea in one line**: a kernel is a text file that you can change, and seconds later you know whether it is still right.
#
# *Run a cell with Shift+Enter, from the top. Cells are meant to be changed. Without a GPU the second cell also compiles the emulator: up to half a minute, once.*

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import torch

from helpers import bench, check, doctor, draw, exercise, load, plot, predict, record, rung, show, xray
from helpers import blank, hint, progress

device = load("01_naive").device  # "cuda", or "cpu" where the emulator runs the kernels

# %% [markdown]
# ## This machine
#
# `doctor` looks at what is here, says how to fix what is missing, and on which back end each notebook will run.

# %%
doctor()

# %% [markdown]
# ### Three situations
#
# Every notebook runs on every machine. What differs is who runs the kernels, and where timings come from.
#
# | you have | kernels | timings |
# |---|---|---|
# | **an NVIDIA GPU** new enough for the kernel | `nvcc` compiles the `.cu` for your GPU | live, beside recorded ones |
# | **an older one** | the kernels it can run, as above; the others on the emulator | live where the kernel runs |
# | **no GPU** | the emulator: the same `.cu`, compiled by the C++ compiler and run thread by thread on the CPU | recorded on an NVIDIA H200 or H100; every title names it |
#
# How new is new enough? Each kernel file says so by a **compute capability**, the version number of a GPU's abilities: `sm_75` is 7.5 (Turing, 2018) or newer, `sm_80` 8.0 (Ampere, 2020) or newer, `sm_90a` 9.0 (Hopper, 2022) and no other. `doctor` above has looked.
#
# The **[emulator](glossary.md#emulator)** gives the right results, exact counts of the bytes that threads ask for, and a sentence with file and line for an access out of bounds, a deadlock, a barrier that only some threads reach, a read of shared memory that nobody wrote. (A **barrier** is a line at which threads wait for each other. Where one is missing altogether, `xray`, below, names the two lines that [race](glossary.md#race).) It does not model caches and has no notion of time; a time measured on a CPU is never shown beside one from a GPU.

# %% [markdown]
# ## FlashAttention in one picture
#
# Attention compares $N$ queries with $N$ keys. Written down literally, that makes two matrices of $N \times N$ numbers, the scores $S$ and the probabilities $P$. FlashAttention never has more of them than a tile.

# %%
draw.flash_attention()

# %% [markdown]
# *Left,* the GPU's large memory with the tensors that the caller knows, each cut into tiles of some rows. *Right,* one of the GPU's processors. It takes one tile of queries and keeps it. The tiles of keys and values come by one after the other (the pale ones are done, tile 3 is here now). At each step a tile of scores is made, used and forgotten; what stays is the output $O_i$ of these queries so far, and two numbers per query, $m_i$ and $l_i$, by which it is rescaled when larger scores turn up. After the last tile $O_i$ is written, once. Other processors do the same for the other tiles of queries.
#
# Why the rescaling is exact is the subject of [02](02_online_softmax.ipynb); [03](03_fa1_fp32.ipynb) and [04](04_fa2_fp32.ipynb) turn the picture into kernels; everything after makes them fast.
#
# ## Where data lives
#
# A GPU has a few dozen to almost 200 processors, called **[SMs](glossary.md#sm)** (streaming multiprocessors), around one large memory. Each SM has memories of its own.

# %%
name, sms, smem, L2, total, speed = "NVIDIA H200", 132, 228, 60, 140, "16"
if device == "cuda":
    gpu = torch.cuda.get_device_properties(0)
    name, sms, speed = gpu.name, gpu.multi_processor_count, ""
    smem, L2 = gpu.shared_memory_per_multiprocessor >> 10, gpu.L2_cache_size >> 20
    total = round(gpu.total_memory / 2**30)

# %%
near = f"{smem} KiB", f"{sms * smem >> 10} MiB", "128, with the L1 cache"
levels = [
    ("registers", "256 KiB", f"{sms * 256 >> 10} MiB", "1,536", "a thread's own variables"),
    ("shared memory", *near, "shared by the threads of a block"),
    ("L2 cache", "", f"{L2} MiB", "", "shared by all SMs"),
    ("HBM", "", f"{total} GiB", speed, "where tensors live"),
]
draw.memory_hierarchy(levels, f"The memories of one GPU · {name}")

# %% [markdown]
# *Top to bottom:* farther from the arithmetic, shared by more threads, and slower. An SM can fetch three operands of 4 bytes for each of 128 multiply-adds per clock from its registers, 128 bytes per clock from shared memory or from the **L1 cache** (which shares one piece of hardware with it), and, if all SMs ask at once, about 16 bytes per clock from HBM: a measured 4.21<!--= record.load("device", "ceilings", device="nvidia-h200").query("name == 'copy'").value.median():.2f --> TB/s, divided by 132 SMs and 1.98 GHz. (Sizes as the driver reports them, of your GPU or else of an H200, in units of $2^{10}$, $2^{20}$ and $2^{30}$ bytes; registers and rates per clock by the [CUDA programming guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities) for compute capability 9.0.)
#
# **HBM** (high-bandwidth memory) is the memory of large data-centre GPUs (A100, H100, H200); on other cards it is GDDR. FlashAttention is one idea about this picture: do not send to HBM what could have stayed above.
#
# ### The roofline
#
# A kernel does arithmetic (FLOPs: floating-point operations) on bytes it moves. The device has a limit for each: so many bytes per second to and from HBM, so many FLOPs per second. FLOPs per byte, the **[arithmetic intensity](glossary.md#arithmetic-intensity)**, says which limit a kernel meets first.
#
# An attention kernel has to read $Q$, $K$, $V$ and write $O$. One that forms $S$ and $P$ also has to write both to HBM and read both back. At $N = 2048$ queries and keys of $d = 64$ numbers each, how many times as many bytes does the second kind move?
#
# (A cell with three dots asks for your prediction: put a number in their place. The cell after it measures and compares. Left alone, the dots do no harm.)

# %%
times = ...  # your prediction

# %% tags=["reveal"]
shape = {"B": 8, "H": 32, "Nq": 2048, "Nk": 2048, "D": 64}
least = {name: record.least_bytes(name, **shape) for name in ("01_naive", "SDPA MATH", "04_fa2_fp32")}
predict(times, least["01_naive"] / least["04_fa2_fp32"], "times the bytes")
samples = record.load(device="nvidia-h200").query("op == 'attention' and dtype == 'fp32'")
samples = samples[(samples[list(shape)] == list(shape.values())).all(axis=1) & samples.name.isin(list(least))]
points = samples.groupby("name", as_index=False)["ms"].median()
points = points.assign(bytes=points.name.map(least), flops=bench.forward_flops(**shape), dtype="fp32", **shape)
plot.roofline(points, record.load("device", "ceilings", device="nvidia-h200"), ["fp32 matmul", "fp16 matmul"])

# %% [markdown]
# *The slope* is what HBM can feed, *the flat parts* what the arithmetic units can do in fp32 and, on **[tensor cores](glossary.md#tensor-core)** (units that multiply whole small matrices of 16-bit numbers), in fp16; nothing gets above them. All three are measured, by a copy within HBM and by large matrix products. Where slope and flat part meet is the **ridge**: left of it HBM is the limit, right of it the arithmetic.
#
# Each point is an attention kernel in fp32. Its height is measured. Its place from left to right is FLOPs over the least bytes that a kernel of its kind has to move. SDPA MATH is PyTorch's own attention that forms $S$ and $P$ (`scaled_dot_product_attention`). The ridge of fp32 arithmetic lies at 12 FLOPs per byte, and even the two kernels that form $S$ stand right of it: HBM is not yet their limit. On tensor cores the ridge lies at 177, and a kernel that forms $S$ in fp16 has 31 FLOPs per byte. That is the wall that FlashAttention removes. Rungs 01 to 04 show how, in fp32.

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
# | FLOPs | $4\,B\,H\,N_q\,N_k\,d$ for the forward pass, half of it under a causal mask; the softmax is not counted |
#
# In code a suffix tells where a thing lives: `K_smem`, `S_reg`, in HBM none. The words of CUDA:
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
# Each kernel file is a **[rung](glossary.md#rung)** of a ladder: a whole kernel that reads from top to bottom by itself and adds one idea to an earlier rung. A file opens with a **header block**, the manual of the kernel. Read it first: what goes in and out, which sizes it takes, which threads do what, how many CTAs fit on an SM of a Hopper GPU, and one honest sentence on speed.

# %%
print(rung("01_naive").source.split("#include")[0])

# %% [markdown]
# Below the header come the constants, the kernel or kernels, and the **launcher** `fa_launch`, the one function Python calls. Marked **regions** let a notebook show a part of the very file that is compiled, with its line numbers, so that prose and code cannot drift apart:

# %%
print(", ".join(show.regions("01_naive")))
show.region("01_naive", "output")

# %% [markdown]
# This is the last of the three kernels of `01_naive`: $O = PV$, one thread per element of $O$. `__global__` makes a function a kernel; `a` holds addresses, sizes, and strides (elements from one batch, head or row to the next). `static_cast<const float *>(a.V) + n` is the address of V's float `n`; `V[n]` is the float `n` places behind address `V`. The thread works out which element is its own (`i`, `c`, and `head`), leaves if there is none, adds up $N_k$ products and writes one number.

# %% [markdown]
# ## The edit loop
#
# `load` compiles a rung and prints one line: the compiler used, the seconds it took, and from `nvcc` how many registers a thread takes, whether variables were **[spilled](glossary.md#spill)** (found no register and went to memory), and the shared memory of a block. Text that was compiled before is not compiled again, be it minutes or days later; the line then says `unchanged`.

# %%
kernel = load("01_naive")
q, k, v = torch.randn(3, 1, 2, 128, 64, device=kernel.device)
o, lse = kernel(q, k, v)
check(kernel)

# %% [markdown]
# `check` ran it on inputs made to break kernels, and held $O$ and LSE against a float64 reference. The **[error budget](glossary.md#budget)** of a case is about twice the error that PyTorch makes on the same inputs in the same precision. An O or LSE outside the budget counts as wrong.
#
# Now break one line. You would open `kernels/01_naive.cu` in JupyterLab's file browser, change it, save, and run the cell above again; to keep the file whole, this cell replaces text in a copy of the source. The launcher computes how many tiles of 16 columns $O$ has; forget the last one. $D$ is 64: how many columns of $O$ will be wrong?

# %%
columns = ...  # your prediction

# %% tags=["reveal"]
edited = rung("01_naive").replace(
    "column_tiles = fa::ceil_div(a.D, tile)", "column_tiles = fa::ceil_div(a.D, tile) - 1"
)
broken = load(source=edited)
wrong = broken(q, k, v)[0] != o  # NaN, never written, equals nothing
predict(columns, int(wrong.any(dim=2)[0, 0].sum()), "wrong columns")
print(check(broken))

# %% [markdown]
# It says how many cases are wrong, where the worst element is and **which** elements are wrong: here columns 16 to 31 of $D = 32$, 48 to 63 of $D = 64$, in all rows. "Never written" is exact: outputs are filled with a special NaN before the kernel runs. The map at the end draws one head. Such a pattern, whole columns from a multiple of 16 on, is half of the diagnosis.
#
# Revert:

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
# And what the compiler lets pass but no thread should do, the **emulator** reports, on any machine (`device="cpu"` asks for it even where there is a GPU). Without the line that makes threads past the edge return:

# %%
unguarded = load(source=rung("01_naive").replace("if (i >= a.Nq || c >= a.D) return;", ""), device="cpu")
try:
    unguarded(*torch.randn(3, 1, 1, 100, 64))
except RuntimeError as error:  # a KernelError
    print(error)

# %% [markdown]
# A loop that never ends shows itself by a line that counts blocks and stands still; the ■ button stops it and the notebook goes on. (On a GPU nothing short of restarting the notebook's kernel stops it. Try what may hang with `device="cpu"` first.)
#
# A kernel can also be right and wasteful. `xray` runs it on the emulator and lists its lines by what they cost. HBM is moved in **[sectors](glossary.md#sector)**, aligned pieces of 32 bytes; what the 32 threads of a warp ask for together is a **[request](glossary.md#request)**. In the product $QK^\top$, at each step of its loop, a warp asks for one number from each of 16 rows of $K$, which lie 256 bytes apart. How many sectors is that?

# %%
sectors = ...  # your prediction: sectors of one request

# %% tags=["reveal"]
ray = xray("01_naive", *torch.randn(3, 1, 1, 128, 64))
lines = ray.to_frame().query("target == 'K'")
predict(sectors, lines["mean"].iloc[0], "sectors per request for K")
ray

# %% [markdown]
# *The row of $K$:* 16 sectors, one for each row, where two would hold the 64 bytes asked for. The rest of each sector is not lost: the next seven steps of the loop want it, and by then the L1 cache has it. What costs time is that 16 places have to be looked up for one request; [01](01_naive.ipynb) measures it. (A lane is a thread of a warp; *16 for 2*: 16 sectors where 2 would do. Beside the sectors of all requests stands `ideal`, the fewest that hold as many bytes. Shared memory, its bank conflicts and the instructions `shfl` and `ld` come in 01 and 03.) The X-ray needs no GPU and gives the same counts on every machine.

# %% [markdown]
# ## A kernel typed into a cell
#
# `%%kernel` makes a cell a kernel: it is compiled, checked, and on a GPU timed. A whole softmax over rows, one thread per row. (For `op: softmax` the scores arrive as `Q`, rows of `Nk` numbers, and the result goes to `O`.)

# %%
# %load_ext helpers

# %% tags=["active-ipynb"]
# %%kernel row_softmax
# // row_softmax: one thread per row
# // op: softmax
# #include <fa/launch.cuh>
# __global__ void softmax(const fa_args a) {
#   const int64_t row = int64_t(blockIdx.x) * 32 + threadIdx.x;
#   if (row >= a.Nq) return;
#   const float *S = (const float *)a.Q + row * a.Nk;
#   float *P = (float *)a.O + row * a.Nk, m = S[0], l = 0;
#   for (int j = 1; j < a.Nk; ++j) m = fmaxf(m, S[j]);
#   for (int j = 0; j < a.Nk; ++j) l += expf(S[j] - m);
#   for (int j = 0; j < a.Nk; ++j) P[j] = expf(S[j] - m) / l;
#   a.LSE[row] = m + logf(l); }
# extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t stream) {
#   softmax<<<fa::ceil_div(a->Nq, 32), 32, 0, stream>>>(*a); return cudaGetLastError(); }

# %% [markdown]
# The first line names the kernel, `fa_launch` starts it with blocks of 32 threads.
#
# Right for every row of ordinary numbers, and wrong for one case: a row that is −∞ throughout, as a mask makes it. There `m` is −∞ and $-\infty - (-\infty)$ is NaN. Ordinary tests never see such a row. Exercise 0.1 repairs it.
#
# The cell's kernel is bound to the name after `%%kernel` and is called like any other:

# %%
p, lse = row_softmax(torch.randn(4, 10, device=row_softmax.device))
print("rows sum to", p.sum(-1).tolist())

# %% [markdown]
# ### A part of a rung, typed into a cell
#
# Most **tasks** at the end of a rung's notebook ask for one region, in a rung that is otherwise as it was. `blank` shows the form, what is given and what has to hold afterwards:

# %%
blank("01", "output")

# %% [markdown]
# What you type below the first line stands for the region. The cell compiles the rung with it, checks it, and puts the counts of its X-ray beside the rung's own. Compiler errors and findings carry the cell's lines. The text here has two faults. Run the cell, fix one, run it again.

# %% tags=["active-ipynb"]
# %%region 01 output -> my_output
# __global__ void output(const fa_args a) {
#   const int tiles = int(fa::ceil_div(a.Nq, tile)), head = blockIdx.x / tiles;
#   const int i = blockIdx.x % tiles * tile + threadIdx.y, c = blockIdx.y * tile + threadIdx.x;
#   if (c >= a.D) return;
#   const float *P = (const float *)a.workspace[1] + (int64_t(head) * a.Nq + i) * a.Nk;
#   const float *V = (const float *)a.V + head / a.H * a.V_stride[0] + head % a.H * a.V_stride[1];
#   float *O = (float *)a.O + head / a.H * a.O_stride[0] + head % a.H * a.O_stride[1];
#   float o = 0.f;
#   for (int j = 0; j < a.Nk; ++j) o += P[j] * V[j * a.V_stride[2] + c];
#   O[i * a.O_stride[2] + c] = sum;
# }

# %% [markdown]
# Hints unfold one at a time. (With an editor: `python -m helpers exercise new 01 output` writes the form to a file, `exercise check` judges it.) What is solved is noted in `work/`, on your machine alone; `progress()` shows it.

# %%
hint("01.3")

# %% [markdown]
# ### Why not PyTorch's own binding?
#
# Most tutorials bind a kernel to PyTorch with `torch.utils.cpp_extension.load_inline`, a C++ function that takes and returns `torch::Tensor`. Every build then reads PyTorch's headers, hundreds of thousands of lines, after **every** edit. Here `fa_launch` is a plain `extern "C"` function that takes addresses, sizes and strides, called through Python's `ctypes`; dtype, shape, strides and device are checked in Python before the call. The edit loop as recorded: `import` is what the first load of a process imports, `cold` the build of a new kernel, `edit` the build after a change, `unchanged` a load without one, `reverted` a load after the change was taken back.

# %%
built = record.load("01_naive", "build")
phases = built.groupby("phase", sort=False)["seconds"].median().to_dict()
draw.seconds(phases, f"Loading 01_naive · {built.device.iloc[0]}")

# %% [markdown]
# ## Three paths through the series
#
# **Understand the algorithm.** [01](01_naive.ipynb) what attention computes and what it costs → [02](02_online_softmax.ipynb) the mathematics that makes FlashAttention possible → [03](03_fa1_fp32.ipynb) the algorithm of the first paper → sections 1 to 3 and "What still hurts" of [04](04_fa2_fp32.ipynb). Skim the CUDA.
#
# **Implement it.** Read a rung's header block first and write down what each thread should do; then its notebook; then write its regions yourself, up to the whole kernel: those are the tasks. `show.diff("03_fa1_fp32", "04_fa2_fp32")` shows what an idea changes in the code.
#
# **Optimise it.** Start at [04](04_fa2_fp32.ipynb), go back where something is new. Predict every number before you measure it; keep what did not help. Then try to beat a rung, in its last task.
#
# Where each part lies:
#
# | notebooks | about |
# |---|---|
# | [01](01_naive.ipynb), [02](02_online_softmax.ipynb), [03](03_fa1_fp32.ipynb), [04](04_fa2_fp32.ipynb) | the algorithm in fp32: naive, online softmax, FlashAttention 1 and 2 |
# | [10](10_fa2_mma_fp16.ipynb), [11](11_swizzled.ipynb), [12](12_double_buffered.ipynb), [13](13_tuned.ipynb) | tensor cores with 16-bit numbers, up to and past PyTorch's FlashAttention-2 |
# | [20](20_causal_gqa.ipynb), [21](21_split_kv.ipynb) | what models ask for: causal masks, shared heads, packed sequences; decoding against a long cache |
# | [22](22_backward_fp32.ipynb), [23](23_backward_mma.ipynb), [24](24_in_a_model.ipynb) | gradients, and a small GPT trained with them |
# | [30](30_tma_wgmma.ipynb), [31](31_warp_specialized.ipynb), [32](32_ping_pong.ipynb), [33](33_backward_wgmma.ipynb) | Hopper: tiles that are copied and multiplied asynchronously, warps with roles, turns; forward and backward |
# | [40](40_every_language.ipynb), [50](50_ring.ipynb), [51](51_one_sided.ipynb) | other languages; several GPUs |
# | [90](90_proving_it_right.ipynb), [91](91_bug_museum.ipynb), [92](92_xray_against_hardware.ipynb), [93](93_detective.ipynb) | testing, bugs, how far the X-ray can be trusted, and broken kernels to fix |
# | [99](99_the_ladder.ipynb) | all rungs on one board, and a place for your own |

# %% [markdown]
# ## Exercises
#
# ### Exercise 0.1 · Repair the softmax
#
# Make `row_softmax` right for rows that are −∞ throughout: $P = 0$ and $\mathrm{LSE} = -\infty$. Two places need a guard. Work on the text, as below, or copy the kernel's cell and check it there first.
#
# <details><summary>Hint</summary>
#
# Where `m` is `-INFINITY`, each term of `l` has to be 0. And then `l` is 0: what is 0 / 0? (C++'s `c ? x : y` is Python's `x if c else y`.)
# </details>

# %%
# Exercise 0.1: put something better in place of the second text; chain .replace(…).replace(…)
repaired = row_softmax.source.replace("expf(S[j] - m) / l", "expf(S[j] - m) / l")

# %%
exercise.verify("0.1", lambda: check(load(source=repaired, quiet=True)).require().ok)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# repaired = row_softmax.source.replace("expf(S[j] - m) / l", "(l > 0 ? expf(S[j] - m) / l : 0)")
# repaired = repaired.replace("l += expf(S[j] - m)", "l += m == -INFINITY ? 0 : expf(S[j] - m)")
# ```
#
# The LSE needs no guard: $-\infty + \ln 0 = -\infty$.
# </details>

# %% [markdown]
# ### Exercise 0.2 · A mistake that only LSE shows
#
# Change one line of `01_naive` so that $O$ stays right in every case and only LSE is wrong. (If a test looks at $O$ alone, such a mistake stays hidden until the backward pass uses the LSE.)
#
# <details><summary>Hint</summary>
#
# Which line writes LSE, and what happens if it forgets one of its terms?
# </details>

# %%
# Exercise 0.2
only_lse = rung("01_naive").source  # .replace("old text", "new text")


# %%
def wrong_in_lse_alone():
    failures = check(load(source=only_lse, quiet=True)).failures
    uncompared = next((c.explain().splitlines()[0] for c in failures if c.wrong is None), "")
    assert not uncompared, uncompared
    wrong = {c.output for c in failures}
    assert wrong == {"lse"}, f"wrong outputs: {', '.join(wrong).upper() or 'none'}"
    return True


exercise.verify("0.2", wrong_in_lse_alone)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# only_lse = rung("01_naive").replace("a.LSE[row] = m + logf(l);", "a.LSE[row] = logf(l);")
# ```
#
# Look at `print(check(load(source=only_lse)))`: where all scores are 0, forgetting `m` changes nothing. Tests with easy inputs pass.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain the parts of a rung, do the edit loop, and judge what a figure on the screen stands for. Answer before you unfold:
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
# Compiling them takes far longer than compiling the kernel, after every edit, and a kernel needs nothing of them: addresses, sizes and strides suffice.
# </details>
