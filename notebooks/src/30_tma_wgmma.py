# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 30 · TMA and wgmma: tiles move and multiply by themselves
#
# [← 24 · In a model](24_in_a_model.ipynb) | [30_tma_wgmma.cu](../kernels/30_tma_wgmma.cu) | [glossary](glossary.md) | [31 · Warp-specialised →](31_warp_specialized.ipynb)
#
# **After this notebook you can**
# - describe a tile to Hopper's copy engine, and say where each of its 16-byte chunks lands;
# - follow an mbarrier through its phases, and say what a thread that waits there is waiting for: arrivals, or bytes;
# - take a wgmma descriptor apart bit by bit, and write one by hand;
# - name the six places at which asynchronous hardware has to be told what comes after what;
# - read in the machine code what TMA and wgmma take off the threads, and what they don't.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [13 · Tuned](13_tuned.ipynb) for the kernel that this one follows, [11 · Swizzled](11_swizzled.ipynb) for the swizzle, [20 · Causal masks](20_causal_gqa.ipynb) for the order of the tiles. No GPU: without one the kernel runs on the emulator, and the timings shown are recorded ones. It runs on Hopper GPUs only: later ones have TMA and mbarriers, too, but not `wgmma`.
#
# **The idea in one line**: one thread asks the copy engine for a whole tile, and one instruction of four warps multiplies 64 rows by a tile where it lies.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
from dataclasses import replace

import numpy as np
import pandas as pd
import torch
from torch.nn.functional import scaled_dot_product_attention

from helpers import KernelError, blank, check, compile_ahead, hint, load, progress, single, xray
from helpers import budget, draw_hopper, exercise, fragments, plot, predict, sass, show, wgmma_units

# %load_ext helpers

torch.manual_seed(0)
kernel = load("30_tma_wgmma")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Rung 13 reaches 0.6 of a large matrix product's speed on the same card, 420<!--= tflops("13", 128):.0f --> of 745<!--= record.load("device", "ceilings").query("name == 'fp16 matmul'").value.median():.0f --> TFLOP/s at $d = 128$, $N = 4096$.
#
# Where does the work of a warp go? Here is the tile loop of rung 13 as machine code, at $d = 128$: what a warp executes for 32 queries and 64 keys. (Without the branches that hardly ever run. `single` is a rung with one of its instances alone, which compiles faster.)

# %% tags=["raises-exception"]
tuned = single("13_tuned", 128)
tuned = replace(tuned, source=tuned.replace("probabilities() || raise_maximum_by_P()", "probabilities()"))
tuned = replace(tuned, source=tuned.replace("if (!fits) { // the maximum first", "if (false) { // the maximum first"))
loop = sass.opcodes(tuned, D=128, loop=True)
pd.DataFrame(loop[loop > 0]).T

# %% [markdown]
# 256 products (`HMMA`), and 80 [`LDSM`](glossary.md#ldmatrix) that fetch operands for them: shared memory → registers → tensor core. 16 `LDGSTS` ([`cp.async`](glossary.md#cpasync)), each with an address per thread, copy the next tile. All of these are issued by the warps that also have a softmax to compute, and every operand takes a register. (Three words are [spilled](glossary.md#spill): `STL`, `LDL`.)
#
# Hopper moves both jobs out of the threads:
#
# | | Ampere's way (rungs 10 to 13) | Hopper's way (this rung) |
# |---|---|---|
# | HBM → shared memory | every thread, 16 bytes at a time, with its own address: `cp.async` | one thread, a whole tile in one instruction: **TMA** (*tensor memory accelerator*) |
# | has it arrived? | each thread waits for its own copies, then all meet at a barrier | an **mbarrier** in shared memory counts bytes |
# | operands | `ldmatrix` into registers, for every product | the tensor cores read shared memory by themselves, by a **descriptor** |
# | a product | a warp, 16 × 8 × 16; its operands and its result are registers | four warps, 64 × N × 16; started, and waited for in groups: **wgmma** |

# %% [markdown]
# ## 1 · A tile is one instruction
#
# To copy a tile one has to know where the tensor begins, how long it is in each dimension, how far apart neighbours lie, how large the tile is, and in which order it is to lie in shared memory. All of that is the same for every tile of a tensor. The host writes it down once, in a **tensor map** of 128 bytes (`cuTensorMapEncodeTiled`, CUDA Driver API). It is a `__grid_constant__` parameter of the kernel: TMA reads it in parameter memory. (Without it each thread would pass its local copy's address, which TMA can't read.) The launch copies it, so the host's need not outlive the call. The kernel needs one instruction, with the coordinates of the tile's first element.
#
# `fa::encode_tile` (in `fa/sm90.cuh`) writes ours. A tensor (B, H, N, d) of 16-bit elements becomes one of five dimensions, the innermost first:
#
# | dimension | size | step in bytes | the box |
# |---|---|---|---|
# | column in a panel | 64 | 2 | 64 |
# | row | N | 2·`stride[2]` | rows of the tile |
# | panel | d / 64 | 128 | all of them |
# | head | H | 2·`stride[1]` | 1 |
# | batch | B | 2·`stride[0]` | 1 |
#
# Why **panels** of 64 columns? TMA's widest swizzle is for rows of 128 bytes, 64 elements; with $d = 128$ a tile is two panels, one behind the other, (2, rows, 64). The steps need not increase down the table: `cuda.h` describes them so, but requires only multiples of 16 below $2^{40}$.
#
# A kernel that fetches 64 rows of `Q` and writes them out (`mbarrier_…`: section 2):

# %%
box = """// box: 64 rows of Q, from row `scale` on, as TMA puts them into shared memory
// dtypes: fp16
#include <fa/launch.cuh>
#include <fa/sm90.cuh>
__global__ void box(const fa_args a, const __grid_constant__ CUtensorMap map, int row) {
  extern __shared__ __align__(1024) uint4 tile[]; // 64 lines of 128 bytes, then an mbarrier
  const uint32_t tile_at = fa::smem_address(tile), landed = tile_at + 8192;
  if (threadIdx.x == 0) {
    fa::mbarrier_init(landed, 1);
    fa::fence_mbarrier_init();
    fa::mbarrier_arrive_expect_tx(landed, 8192);
    fa::cp_async_bulk_tensor_5d(tile_at, &map, landed, 0, row, 0, 0, 0);
  }
  __syncthreads();"""

# %%
box += """
  fa::mbarrier_wait(landed, 0);
  for (int i = threadIdx.x; i < 512; i += 32) static_cast<uint4 *>(a.O)[i] = tile[i];
}
extern "C" cudaError_t fa_launch(const fa_args *args, cudaStream_t stream) {
  const fa_args &a = *args;
  CUtensorMap map;
  if (cudaError_t error = fa::encode_tile(&map, a.dtype, a.Q, a.Q_stride, a.B, a.H, a.Nq, 64, 64)) return error;
  box<<<1, 32, 8200, stream>>>(a, map, int(a.scale));
  return cudaGetLastError();
}
"""
fetch_box = load(source=box, device=device)

# %% [markdown]
# Each chunk of 8 elements is numbered: 8 · row + chunk. The tensor has 64 rows, and the tile begins at row 59. Which chunk lies first in the third line of shared memory?

# %%
first_chunk = ...  # your prediction: the number of the chunk (0 to 7) that lies first in the third line

# %%
numbers = 8 * torch.arange(64)[:, None] + torch.arange(64)[None] // 8  # (64, 64): the chunk that an element is in
x = (numbers + 1).half().to(device)[None, None]


def landed(row):
    """What lies in each 16 bytes of shared memory: (64, 8), -1 for zeros."""
    return fetch_box(x, x, x, scale=float(row))[0].reshape(64, 8, 8)[:, :, 0].cpu().int().numpy() - 1


plain = np.arange(8 * 59, 8 * 64).reshape(5, 8)

# %% tags=["reveal"]
display(draw_hopper.chunks({"rows 59 to 63, were they copied row by row": plain, "as TMA puts them": landed(59)[:10]}))
predict(first_chunk, landed(59)[2, 0] % 8, "is the chunk that lies first in the third line")

# %% [markdown]
# **What to see.** In each box, row · chunk. The chunks of a line have traded places by notebook 11's [swizzle](glossary.md#swizzle), `chunk ^ line % 8`. The *line* counts, not the row: row 59 is line 0 and stays as it is. From the sixth line on there are zeros (hatched): rows outside of the tensor are not read, but filled in. That replaces the copies' bounds checks, not the mask: a key of zeros has the score 0, not $-\infty$.
#
# For the swizzle to begin with line 0, a tile has to begin at a multiple of 1024 bytes; the kernel's `static_assert`s hold that.

# %% [markdown]
# ## 2 · A barrier that counts bytes
#
# A thread waits for its own `cp.async`. A TMA copy belongs to no thread. It reports to an **mbarrier**, 8 bytes in shared memory that count two things: arrivals of threads, and bytes (the *transaction count*). It goes through **phases**. A phase is complete when as many threads have arrived as it was initialised for *and* the bytes that were announced (`expect_tx`) and those that came are equal. Then the next phase begins, with the same number of arrivals.
#
# A thread that waits names a phase by its **parity**. It passes while the current phase has the other parity: then the phase it names is complete. In Python:


# %%
class Mbarrier:
    def __init__(self, count):
        self.count, self.phase, self.arrivals, self.bytes = count, 0, count, 0  # arrivals and bytes missing

    def hears(self, arrivals=0, expect_tx=0, copied=0):
        self.arrivals -= arrivals
        self.bytes += expect_tx - copied
        if self.arrivals == 0 and self.bytes == 0:
            self.phase, self.arrivals = self.phase + 1, self.count

    def passes(self, parity):
        return self.phase % 2 != parity


# %% [markdown]
# The barrier `full` of one [stage](glossary.md#stage), at $d = 64$: one thread arrives and announces $K_j$ and $V_j$, 12288 bytes each. After each of the steps below, does a thread pass that waits with parity 0? With parity 1? (The last two columns.)

# %% tags=["reveal"]
full, rows = Mbarrier(1), []
asks, lands = {"arrivals": 1, "expect_tx": 24576}, {"copied": 12288}
story = [("initialised", {}), ("thread 0 asks for tile 0", asks), ("K lands", lands), ("V lands", lands)]
story += [("thread 0 asks for tile 3", asks), ("V lands", lands), ("K lands", lands)]
for what, heard in story:
    full.hears(**heard)
    passes = full.passes(0), full.passes(1)
    rows.append((what, full.phase, full.phase % 2, full.arrivals, full.bytes, *passes))
columns = ["then", "phase", "its parity", "arrivals missing", "bytes missing", "wait(0) passes", "wait(1) passes"]
pd.DataFrame(rows, columns=columns).set_index("then")

# %% [markdown]
# **What to see.** The stage's first tile is waited for with parity 0, its second with 1, and so on: whoever goes round the stages keeps one bit and flips it at each lap. Of a fresh barrier, `wait(1)` passes at once: the phase before the first counts as complete. A thread that comes two phases late would take the wrong one for its own.
#
# The kernel has three stages with two barriers each. `full` is the one above. At `empty` each of the eight warps arrives when it has read the stage, and thread 0 waits there before it asks for the next tile into that place.
#
# ### When the bytes don't add up
#
# Three mistakes: $V_j$ is not announced; twice the bytes are announced; nothing is announced. Bytes that came unannounced don't vanish: they are taken off what the next phase announces. In which lap (a round of the three stages) does the kernel hang if $V_j$ is not announced?

# %%
lap = ...  # your prediction: the lap that hangs if V is not announced


# %% tags=["reveal"]
def hangs_in(announced, laps=9):
    """The first lap whose wait never passes, if all copies of a lap land before the next one begins."""
    full = Mbarrier(1)
    for lap in range(laps):
        for heard in ({"arrivals": 1, "expect_tx": announced}, {"copied": 12288}, {"copied": 12288}):
            full.hears(**heard)
        if not full.passes(lap % 2):
            return lap + 1


announced = {"V is not announced": 12288, "twice as much is announced": 49152, "nothing is announced": 0}
print({what: f"hangs in lap {hangs_in(many)}" for what, many in announced.items()})
predict(lap, hangs_in(12288), "is the lap that hangs if V is not announced")

# %% [markdown]
# Now the kernel itself, on the emulator, with sequences of one lap (256 keys are three tiles of 96) and of more than two. Its reports call the first stage's barrier `full[0]`.

# %%
small = single("30_tma_wgmma", 64)


def finding(old, new, N=256, **options):
    """What the X-ray finds in the kernel with `old` replaced by `new`; of several findings one about the moment it goes wrong."""
    q, k, v = (torch.randn(1, 1, N, 64).half() for _ in range(3))
    found = xray(replace(small, source=small.replace(old, new)), q, k, v, **options).trace.findings
    first = min(found, key=lambda f: f.kind == "bulk copy")  # what is still under way when the block ends
    return f"{first.kind}, line {first.line}: {first.text}"


# %%
expects = "fa::mbarrier_arrive_expect_tx(full + 8 * stage, 2 * tile_bytes)"
instead = ["arrive_expect_tx(full + 8 * stage, tile_bytes)", "arrive_expect_tx(full + 8 * stage, 4 * tile_bytes)"]
instead += ["arrive(full + 8 * stage)"]
wrongly = {what: (expects, f"fa::mbarrier_{call}") for what, call in zip(announced, instead)}
compile_ahead([replace(small, source=small.replace(*change)) for change in wrongly.values()], "xray")
for what, change in wrongly.items():
    print(what, *(f"{N} keys: {finding(*change, N=N)}" for N in (256, 640)), sep="\n  ", end="\n\n")

# %% [markdown]
# **What to see.** Too much is a deadlock at once, and the report says how many bytes are missing. Too little is worse at first: the phase completes too early, and a product may read a tile that is still on its way. On a card, where copies are usually fast, a lap or two may come out right; then more bytes have come than are announced, and it hangs. The emulator's copies come as late as the program permits, so it reports the early access.
#
# Zeros count: a tile at the end of the tensor brings all of its bytes.

# %% [markdown]
# ## 3 · A descriptor is 64 bits
#
# `wgmma` computes $D \mathrel{+}= A B$ with $D$ of 64 × N (N up to 256), $A$ of 64 × 16 and $B$ of 16 × N. $D$ lies in registers, spread over the 128 threads of four warps, a **warpgroup**. $B$ always lies in shared memory, $A$ there or in registers.
#
# How does it find an operand? The unit is the **core matrix**, 8 rows of 16 bytes, notebook 10's 8 × 8 matrix. A **descriptor**, 64 bits in a register, says where the first one begins, and how far it is to the others. In units of 16 bytes, so that 14 bits reach 256 KB:
#
# | bits | field | |
# |---|---|---|
# | 0–13 | start address | of the first row of the first core matrix |
# | 16–29 | leading offset | to the next group of columns, where a row is wider than the swizzle |
# | 32–45 | stride offset | to the next eight rows |
# | 49–51 | base offset | where the swizzle's pattern begins, if not at a multiple of 1024 bytes |
# | 62–63 | swizzle | 1: rows of 128 bytes, the chunks of which have traded places |
#
# With the 128-byte swizzle, eight rows are 8 · 128 bytes: the stride offset is 1024. The operand $K_j$ of the first step of $S = Q K_j^\top$, if the tile begins at 0x4000 (`fragments.Descriptor` knows the layout, and the emulator is made from it):

# %%
K_tile = 0x4000
K_desc = fragments.Descriptor(start=K_tile, leading=16, stride=1024, swizzle=128)
print(f"{K_desc.encode():#018x}")
draw_hopper.descriptor(K_desc, what="key", title="K, columns 0 to 15 of d: step 0")

# %% [markdown]
# **What to see.** Top: the 64 bits, the highest to the left. Left: the operand in core matrices. Right: shared memory; of each line one step needs 32 bytes, two chunks that belong to different core matrices, and the swizzle has moved them.
#
# The next 16 columns lie 32 bytes further right. Is it enough to add 32 to the start address, though chunks have traded places? How many of the 64 · 64 elements does the descriptor then find, in four steps, where TMA has put them?

# %%
elements = ...  # your prediction: how many of 4096

# %% tags=["reveal"]
found, lies = 0, landed(0)  # (64, 8): which chunk lies in each 16 bytes
for step in range(4):
    desc = replace(K_desc, start=K_tile + 32 * step)
    for row in range(64):
        for k in range(16):
            line, byte = divmod(desc.address(False, row, k) - K_tile, 128)
            found += int(lies[line, byte // 16] == 8 * row + (16 * step + k) // 8 and byte % 16 == 2 * (k % 8))
predict(elements, found, f"of {64 * 64} elements are where the descriptor says")

# %% [markdown]
# The hardware forms the plain address first, start + offsets, and then XORs bits 4 to 6 with bits 7 to 9. So any start inside of a row comes out right, and a step costs one addition.
#
# ### The same tile, the other way round
#
# $O \mathrel{+}= P V_j$ sums over keys, which run *down* the rows of $V_j$ in memory. Where notebook 10 took `ldmatrix.trans`, here it is a bit of the instruction (`transB`). One step is now 16 whole rows:

# %%
V_desc = fragments.Descriptor(start=0x7000, leading=96 * 128, stride=1024, swizzle=128)
draw_hopper.descriptor(V_desc, mn_major=True, what="column", title="V, keys 0 to 15, all 64 columns: step 0")

# %% [markdown]
# **What to see.** Here each line holds rows of eight core matrices, and all of 2048 bytes is used. The next step lies 2048 bytes on. The leading offset, from one panel of 64 columns to the next, is only needed at $d = 128$.
#
# ### Wrong descriptors
#
# In the kernel `fa::k_major` makes the first kind ($k$ is what is summed over, not $K$), `fa::mn_major` the second. No hardware checks descriptors. How many of the five mistakes below does the emulator *report*, instead of computing wrong or right numbers ($N = 128$, $d = 64$)?

# %%
reported = ...  # your prediction: 0 to 5


# %%
def outcome(source, d=64, N=128, scale=None):
    """How far O is off, or what the emulator says."""
    q, k, v = (torch.randn(1, 1, N, d).half() for _ in range(3))
    try:
        o, _ = load(source=source, device="cpu", quiet=True)(q, k, v, scale=scale)
    except KernelError as error:
        return f"reported: {str(error).splitlines()[0].partition(': ')[2]}"
    off = (o - scaled_dot_product_attention(*(x.float() for x in (q, k, v)), scale=scale)).abs().max()
    return f"O off by {off:.2g}" if off > 0.01 else "right"


# %%
K_is, V_is = "K_desc = fa::k_major(K_smem)", "V_desc = fa::mn_major(V_smem, Bc)"
step_is = "K_desc + fa::k_major_step(k, Bc)"
wrong = {
    "K: eight rows are 512 bytes": (K_is, "K_desc = fa::matrix_descriptor(K_smem, 16, 512)"),
    "K: no swizzle": (K_is, "K_desc = fa::k_major(K_smem) ^ 1ull << 62"),
    "K: 16 bytes per step": (step_is, "K_desc + k"),
    "V: without the transposition": ("wgmma_mma_async<T, 1>(O_reg", "wgmma_mma_async<T, 0>(O_reg"),
    "V: a leading offset of 16": (V_is, "V_desc = fa::k_major(V_smem)"),
}
wrong = {what: small.replace(*change) for what, change in wrong.items()}
at_128 = single("30_tma_wgmma", 128).replace(V_is, "V_desc = fa::k_major(V_smem)")

# %% tags=["reveal"]
compile_ahead([*wrong.values(), at_128], "run")
outcomes = {what: outcome(source) for what, source in wrong.items()}
print(
    *(f"{what}\n  {seen}" for what, seen in outcomes.items()), f"  and with d = 128: {outcome(at_128, 128)}", sep="\n"
)
predict(reported, sum("reported" in seen for seen in outcomes.values()), "of five are reported")

# %% [markdown]
# **What to see.** Most give plausible numbers: attention over the wrong keys is still an average of rows of $V$. One leads to a place where a copy is still writing, and is reported. The last one is right in every test at $d = 64$, where the field is not used.

# %% [markdown]
# ## 4 · The accumulator is the next operand
#
# $P$ is made from $S$, which is in registers: 64 rows over 128 threads. In notebook 10 two accumulators side by side *were* an operand $A$. Is that so here, too?

# %%
draw_hopper.accumulator(thread=37, columns=96, step=1)

# %% [markdown]
# **What to see.** Left: the rows of each warp, what thread 37 holds (green), and the part shown on the right (framed). Right: which lane holds each element, a tint for each register. The two grids have the same lane in the same cell. So columns 16 to 31 of $S$, rounded and packed in pairs, are the operand $A$ of step 1 of $P V$: no shuffle, no shared memory. For all threads and steps:

# %%
same = all(
    fragments.wgmma_d(thread, 8 * step + i) == (row, 16 * step + column)
    for thread in range(128)
    for step in range(6)
    for i, (row, column) in enumerate(fragments.wgmma_a(thread, i) for i in range(8))
)
print("a thread's elements 8k to 8k + 7 of S are its elements of A in step k:", same)

# %% [markdown]
# ## 5 · What comes after what
#
# TMA and `wgmma` are *asynchronous*: an instruction starts something, and the thread goes on. They reach shared memory through the **async proxy**, a path of their own ([proxy fence](glossary.md#proxy-fence)); a store that a barrier has made visible to other *threads* is not yet visible there. So every order that matters has to be said, in six places of the kernel:
#
# | first | then | said by |
# |---|---|---|
# | an mbarrier is initialised | TMA reports to it | `fence.mbarrier_init`, then `__syncthreads` |
# | TMA has written a tile | wgmma reads it | `mbarrier.try_wait` on `full` |
# | threads store to shared memory | wgmma reads it | `fence.proxy.async`, then a barrier |
# | threads write registers ($P$, $O$) | wgmma uses them | `wgmma.fence` |
# | wgmma has written $S$ or $O$ | threads read it | `wgmma.commit_group`, `wgmma.wait_group` |
# | wgmma has read a tile | TMA overwrites it | the same wait, then an arrival at `empty` |
#
# The fifth is less obvious than it looks. The wait is an `asm volatile` that names no [accumulator](glossary.md#accumulator): its `"memory"` orders accesses to memory, not arithmetic on registers. It is ptxas, which knows the registers of each product under way, that keeps reads of them behind the wait: it moves the wait up, or runs the products one after the other and says so (C7514 and others). That costs the overlap, not the result.
#
# Take each of the six away. How many of the six kernels still compute the right result in a plain run, without the X-ray?

# %%
survive = ...  # your prediction: 0 to 6

# %%
S_fence = "fa::wgmma_fence();\n#pragma unroll\n      for (int k = 0; k < d / 16"
S_wait, O_wait = "fa::wgmma_wait_group<0>();\n      // [end: scores]", "fa::wgmma_wait_group<0>();\n    "
arrives = "if (lane == 0) fa::mbarrier_arrive(empty + 8 * stage);"
ways = {
    "initialised → TMA reports": ("fa::fence_mbarrier_init();", ";"),
    "TMA writes → wgmma reads": ("fa::mbarrier_wait(full + 8 * stage, parity);", ";"),
    "threads store → wgmma reads": ("fa::fence_proxy_async();", ";", {"scale": -0.3}),
    "registers written → wgmma": (S_fence, S_fence.replace("fa::wgmma_fence();", ";")),
    "wgmma writes S → threads read": (S_wait, S_wait.replace("fa::wgmma_wait_group<0>();", ";")),
    "wgmma reads → TMA overwrites": (O_wait + arrives, f"{arrives}\n    fa::wgmma_wait_group<0>();", {"N": 512}),
}

# %% tags=["reveal"]
broken = [small.replace(old, new) for old, new, *_ in ways.values()]
compile_ahead(broken, "run")
compile_ahead([replace(small, source=source) for source in broken], "xray")
runs = []
for what, (old, new, *options) in ways.items():
    runs.append(outcome(small.replace(old, new), **dict(*options)).partition(":")[0])
    print(f"{what}\n  {finding(old, new, **dict(*options))}\n  a plain run: {runs[-1]}\n")
predict(survive, runs.count("right"), "of six compute the right result")

# %% [markdown]
# **What to see.** Six findings, each with the line that came too early. (The third needs a negative scale: only then do threads store to shared memory at all.) An access that comes too early usually finds the right data all the same, also on a card. The X-ray doesn't look at the data: it follows which access is ordered after which.

# %% [markdown]
# ## The kernel

# %%
show.region("30_tma_wgmma", "tile")

# %% [markdown]
# A CTA is two warpgroups with 64 queries each, which share the tiles of K and V. At $d = 64$ two CTAs share an SM; at $d = 128$ three stages of 128 keys leave no room for a second.

# %%
show.region("30_tma_wgmma", "barriers")

# %%
show.region("30_tma_wgmma", "fetch")

# %%
show.region("30_tma_wgmma", "scores")

# %% [markdown]
# $S$ is 64 × Bc in one chain of d / 16 products, each on top of the last; `k > 0` tells the first to overwrite what is in the registers.

# %%
show.region("30_tma_wgmma", "output")

# %% [markdown]
# The second product is started and *not* waited for at once: meanwhile thread 0 asks for a later tile (`refill`, task 30.3). It goes into the stage of the tile *before* this one, which the other warpgroup may still be reading, so thread 0 waits for `empty`. Mask, softmax and [epilogue](glossary.md#epilogue) are those of rungs 13 and 20, with the true maximum in every tile. (In the region `sign` threads flip $Q$'s signs if the scale is negative: section 5's third row.)

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %%
plot.recorded("30_tma_wgmma", "error", plot.error)

# %% [markdown]
# ### A factor that has to be 1
#
# In most tiles the maximum stays, and $\alpha = 2^{c\,m - c\,m^{new}}$, with $c = \text{scale} \cdot \log_2 e$, should be 1. The kernel has $c\,m^{new}$ as `m_log2`, rounded to fp32. One is tempted to write $\alpha$'s exponent as a fused multiply-add: `fma(m, c, -m_log2)`. By what factor does LSE's error then grow from 1024 keys to 16384?

# %%
growth = ...  # your prediction: error of LSE at 16384 keys over that at 1024

# %% tags=["reveal"]
rounded, fused = "__fmul_rn(m_reg[r], scale_log2) - m_log2", "__fmaf_rn(m_reg[r], scale_log2, -m_log2)"
q, k, v = (torch.randn(1, 1, n, 64).half() for n in (128, 16384, 16384))
rows, texts = {}, {"as it is": small.source, "fused": small.replace(rounded, fused)}
compile_ahead(texts.values(), "run")
for what, text in texts.items():
    for keys in (1024, 4096, 16384):
        o, lse = load(source=text, device="cpu", quiet=True)(q, k[:, :, :keys], v[:, :, :keys])
        S = q.double() @ k[:, :, :keys].double().mT / 8
        right = (S.softmax(-1) @ v[:, :, :keys].double()), S.logsumexp(-1)
        rows[what, keys] = {name: float((x - y).abs().max()) for name, x, y in zip(("O", "LSE"), (o, lse), right)}
predict(
    growth, rows["fused", 16384]["LSE"] / rows["fused", 1024]["LSE"], "times the error at 16 times the keys", within=0.3
)
pd.DataFrame(rows).T.rename_axis(["alpha", "keys"]).map("{:.1e}".format)

# %% [markdown]
# **What to see.** A fused multiply-add doesn't round the product. So it subtracts the rounded $c\,m$ from the exact one, and what is left is the rounding error, some $10^{-7}$: $\alpha$ is not 1 but next to it, and the same in every tile. $l$ is multiplied by it once per tile, and LSE drifts away: ten times the error at 16 times the keys. $O$ notices nothing: it is multiplied by the same factors and divided by $l$ in the end. A test of $O$ alone, or of short sequences, misses this.

# %% [markdown]
# ## Predict, then measure
#
# ### Instructions in the loop
#
# The machine code at $d = 128$. A warp of rung 13 has 32 queries by 64 keys at a time, one of this rung 16 by 128: 64 scores per thread in both, so the loops can be compared. (Rung 13's without the branch for tiles done again, this one's without the mask, which whole tiles don't need.)

# %% tags=["raises-exception"]
masked = "if (j0 + Bc > (a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk)) {"
whole = single("30_tma_wgmma", 128)
whole = replace(whole, source=whole.replace(masked, "if (false) {"))
pair = sass.compare(tuned, whole, D=128, loop=True)

# %% tags=["raises-exception"]
address = ["MOV", "IADD3", "IMAD", "LOP3", "SHF", "LEA"]
classes = {"products": ["HMMA", "HGMMA"], "fetching operands": ["LDSM"], "copying": ["LDGSTS", "UTMALDG"]}
classes |= {
    "softmax": ["FFMA", "FMUL", "FADD", "FMNMX", "MUFU", "F2FP", "SHFL"],
    "addresses": address,
    "R2UR": ["R2UR"],
}
table = pd.DataFrame({name: pair.reindex(rows).sum() for name, rows in classes.items()}).T.astype(int)
table.loc["all"] = pair.loc["all"]
table

# %% [markdown]
# **What to see.** 336 instructions of products and their operands have become 16. `LDGSTS` is gone; the two `UTMALDG` (TMA) stand in a branch that one warp takes.
#
# The addresses have *not* shrunk. Every `HGMMA` takes its descriptors from **uniform registers**, which hold one value for a whole warp. The compiler computes them from `threadIdx.x / 128` in ordinary registers and moves each half over with an `R2UR`, since it can't know that all 32 lanes have the same value. (Rung 31 tells it.) The softmax has grown, too: without rung 13's trick each tile pays for maximum and rescaling.
#
# ### The budget
#
# What a tile costs each unit of an SM, for 64 rows and 128 keys. How often `wgmma` reads an operand in shared memory, PTX doesn't say; the model assumes once, at 128 bytes per clock. Does `wgmma`, timed alone, take the longer of the first two columns?

# %% tags=["reveal"]
plot.recorded("device", "wgmma", wgmma_units.beside_the_model)

# %% [markdown]
# **What to see.** It does, in every row. At $N = 64$ with $A$ in shared memory both columns are equal, so a second reading would show: there is none. Fewer can't be ruled out.

# %% tags=["raises-exception"]
text = "Rung 30 at d = 64: issue slots lead. At d = 128 the tensor cores do, closely followed by shared memory."
whole_64 = replace(small, source=small.replace(masked, "if (false) {"))
budgets = {"d = 64": wgmma_units.forward(whole_64, 64, "fp16"), "d = 128": wgmma_units.forward(whole, 128, "fp16")}
budget.units(wgmma_units.table(budgets), "Rung 30: 64 rows and 128 keys (a model, not a measurement)", text)

# %% [markdown]
# **What to see.** At $d = 128$ the tensor cores take longest. At $d = 64$ products take half as long, but the softmax doesn't: issuing instructions takes longest. In this kernel a warpgroup waits for each product before it goes on, so the units work at the same time only where the other warpgroup happens to be elsewhere.

# %% [markdown]
# ## Beside its peers
#
# SDPA FLASH is FlashAttention-2, written for `mma.sync`; SDPA CUDNN is NVIDIA's own, written for Hopper.

# %%
plot.recorded("30_tma_wgmma", "forward", lambda s: plot.ratio(s, "30_tma_wgmma", ["SDPA FLASH", "SDPA CUDNN"]))

# %% [markdown]
# **What to see.** Where rung 13 was 1.30<!--= ratio("13", "FLASH", 64):.2f --> and 1.22<!--= ratio("13", "FLASH", 128):.2f --> times as fast as FlashAttention-2 ($d = 64$ and 128, fp16, geometric mean over $N \ge 1024$), this one is 1.55<!--= ratio("30", "FLASH", 64):.2f --> and 1.51<!--= ratio("30", "FLASH", 128):.2f --> times as fast. Beside cuDNN it is 1.00<!--= ratio("30", "CUDNN", 64):.2f --> and 0.80<!--= ratio("30", "CUDNN", 128):.2f -->; under a causal mask 1.04<!--= ratio("30", "CUDNN", 64, causal=1, kind="causal"):.2f --> and 0.84<!--= ratio("30", "CUDNN", 128, causal=1, kind="causal"):.2f -->. At $d = 128$ it is slowest at short lengths. What fits with that: at $d = 64$ two CTAs share an SM, and one multiplies while the other waits for its first tiles or writes its $O$. At $d = 128$ there is one CTA. If that is the reason, notebook 31's roles must help most at $d = 128$ and short lengths.

# %% [markdown]
# ## What still hurts
#
# 1. **The thread that fetches also multiplies.** In `refill`, thread 0 waits until *both* warpgroups have read a stage, and its own warpgroup with it.
# 2. **All threads have the same registers.** Asking for tiles takes a few dozen; those who hold $S$, $P$ and $O$ could use more than the 128 that two CTAs at $d = 64$ leave them.
# 3. **A CTA begins and ends alone.** Until the first tiles have come nobody multiplies, nor while $O$ is written, in pieces of 4 bytes.
# 4. **S, then softmax, then O.** A warpgroup waits for each product. Tensor cores and exponentials take turns.
#
# The first three are notebook 31, the fourth is 32.

# %% [markdown]
# ## Exercises
#
# In a **task** you write CUDA: the cell takes the place of one region of the rung. `blank` shows what is given and what has to hold afterwards. It is solved if all cases of `check` are right and the X-ray finds nothing. (In an editor, `python -m helpers exercise new 30 mask` begins task 30.2, `kernel` the rung, 30.9.)
#
# ### Task 30.1 · The epilogue
#
# Divide $O$ by $l$, and write $O$ and LSE. Section 4 has the rows and columns that a lane holds.

# %%
blank("30", "epilogue")

# %%
# %%region 30 epilogue -> my_epilogue
# // yours

# %%
hint("30.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `epilogue` of [30_tma_wgmma.cu](../kernels/30_tma_wgmma.cu): `show.region("30", "epilogue")`.
#
# </details>

# %% [markdown]
# ### Task 30.3 · Refill the ring
#
# Who asks for which tile, into which stage, and after which phase of `empty`? The X-ray names a tile that is overwritten too early, and a wait that nobody ends.

# %%
blank("30", "refill")

# %%
# %%region 30 refill -> my_refill
# // yours

# %%
hint("30.3")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `refill` of [30_tma_wgmma.cu](../kernels/30_tma_wgmma.cu): `show.region("30", "refill")`. With the other parity thread 0 waits for a phase that can't complete without it: the other warps of its warpgroup stand at the next `wgmma`.
#
# </details>

# %% [markdown]
# ### Exercise 30.4 · Step 6
#
# With $d = 128$ and $B_c = 128$ a tile of $K$ is two panels, (2, 128, 64). It begins at 0x8000. Write the descriptor of step 6 of $Q K_j^\top$: columns 96 to 111 of all 128 keys.

# %%
# Exercise 30.4
step6 = fragments.Descriptor(start=0x8000, leading=16, stride=1024, swizzle=128)


# %%
def finds_all():
    step6.encode()  # ValueError if 64 bits can't say it
    for key in range(128):
        for k in range(16):
            panel, column = divmod(96 + k, 64)
            right = fragments.swizzled(0x8000 + panel * 128 * 128 + key * 128 + column * 2, 128)
            at = step6.address(False, key, k)
            assert at == right, f"key {key}, column {96 + k} lies at {right:#x}; your descriptor finds {at:#x}"
    return True


exercise.verify("30.4", finds_all)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Four steps of 32 bytes fill a row of a panel. The second panel begins 128 rows of 128 bytes after the first.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# step6 = fragments.Descriptor(start=0x8000 + 128 * 128 + 2 * 32, leading=16, stride=1024, swizzle=128)
# ```
#
# `fa::k_major_step(6, 128)` in bytes. The leading offset may be any multiple of 16 below $2^{18}$: with a swizzle as wide as the row it is not looked at.
#
# </details>

# %% [markdown]
# ### Exercise 30.5 · Green up to a point
#
# Somebody forgets to flip the parity at the end of a lap. What is the smallest $N_k$ at which the kernel below is caught?

# %%
laps = small.replace("if (++stage == stages) stage = 0, parity ^= 1;", "if (++stage == stages) stage = 0;")
one_lap = load(source=laps, device="cpu", quiet=True)

# %%
# Exercise 30.5
smallest = 97


# %%
def caught(Nk):
    """Does the emulator stop it?"""
    try:
        one_lap(torch.randn(1, 1, 128, 64).half(), *(torch.randn(1, 1, Nk, 64).half() for _ in "kv"))
    except KernelError:
        return True
    return False


# %%
def smallest_is_right():
    assert smallest in range(1, 1000), f"a whole number of keys below 1000, not {smallest!r}"
    assert caught(int(smallest)), f"at Nk = {smallest} it isn't caught yet"
    assert not caught(int(smallest) - 1), "it is caught at a smaller Nk already"
    return True


exercise.verify("30.5", smallest_is_right)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The first lap is waited for with parity 0, rightly. Which tile is the first of the second lap?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# smallest = 3 * 96 + 1
# ```
#
# Three tiles of 96 keys fit in the three stages; the 289th key needs a fourth tile, into stage 0 again. Its wait for parity 0 passes at once, as phase 0 has long been complete, and the product reads a tile that is still on its way. A test suite for a pipeline needs more tiles than stages, and better more than twice as many.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# <details><summary>1. What is in a tensor map, and what is left for the kernel to say?</summary>
#
# Address, sizes, strides, box, swizzle and what to fill in outside. The kernel gives the coordinates of the box, the place in shared memory and the mbarrier.
#
# </details>
# <details><summary>2. A thread waits for ever at an mbarrier with parity 1. What may be wrong?</summary>
#
# An arrival or bytes of that phase are missing: fewer arrivals than it was initialised for, more bytes announced than copied; or it waits for a phase that nobody will ever begin.
#
# </details>
# <details><summary>3. Why does adding 32 bytes to a descriptor move it by a step, in spite of the swizzle?</summary>
#
# The swizzle is applied to the finished address: bits 4 to 6 are XORed with bits 7 to 9.
#
# </details>
# <details><summary>4. Why is a stride offset of 1024 right for Q, K and V alike?</summary>
#
# It is the way from one group of eight rows to the next, and a row of a panel has 128 bytes in all three.
#
# </details>
# <details><summary>5. Which of the six orders can be broken without a wrong number for a long time?</summary>
#
# The three whose plain run is right: the mbarrier's initialisation, the proxy fence, and the wait before TMA overwrites a stage. On a card a tile that nobody waits for has usually come, too. That is why such orders are looked for by rule, not by result.
#
# </details>
#
# **References**: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" (descriptors, layouts, fences), "Data Movement and Conversion Instructions" (cp.async.bulk.tensor), "Parallel Synchronization and Communication Instructions" (mbarrier); [CUDA Driver API](https://docs.nvidia.com/cuda/cuda-driver-api/), "Tensor Map Object Management"; [FlashAttention-3](https://arxiv.org/abs/2407.08608), section 3.
