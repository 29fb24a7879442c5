# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 10 · Tensor cores: who holds what
#
# [← 04 · FlashAttention-2 in fp32](04_fa2_fp32.ipynb) | [10_fa2_mma_fp16.cu](../kernels/10_fa2_mma_fp16.cu) | [glossary](glossary.md) | [11 · Swizzled →](11_swizzled.ipynb)
#
# **After this notebook you can**
# - say which lane of a warp holds which element of the three matrices of `mma.sync`, and why it matters;
# - explain how a tile gets from shared memory into that arrangement with `ldmatrix`, and when it has to be transposed on the way;
# - show that the scores never have to leave the registers between the two products;
# - predict a bank conflict from an address, and have the X-ray confirm it.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb). No GPU: without one the kernel runs on the emulator, tensor-core instructions included, and the timings shown are recorded ones.
#
# **The idea in one line**: one instruction multiplies whole small matrices, if each lane of the warp brings exactly the elements it expects; attention can be arranged so that the result of the first product already *is* an operand of the second.

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

from helpers import blank, check, draw_mma, exercise, fragments, hint, load, plot, predict, progress, record
from helpers import reference, rung, sass, show, units, xray

torch.manual_seed(0)
kernel = load("10_fa2_mma_fp16")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 04 brought the CUDA cores near what they can do in fp32. The same SM has other arithmetic units that are far faster. How far? Measured on the recorded device, as the rate of a library's large matrix products, and of a kernel that does nothing but the instruction of this notebook, its operands in registers:

# %%
ceilings = record.load("device", "ceilings")
top = ceilings[ceilings["unit"] == "TFLOP/s"].groupby("name").value.median().rename("TFLOP/s")
top["mma.sync alone, fp16"] = units.MMA_SYNC  # the conditions of the record 13_tuned.steps
print(record.about("device", "ceilings")["device"])
top.round(0).to_frame()

# %% [markdown]
# Those units are the [**tensor cores**](glossary.md#tensor-core), four to an SM. (The library is faster than `mma.sync` because it uses Hopper's own instruction, `wgmma`: notebook 30.) In exchange for the speed they ask for three things.
#
# 1. **Sixteen bits.** Their operands are small numbers: fp16 or bf16. (They take others as well; this series uses these two.) The sums are kept in fp32.
# 2. **A fixed shape.** One instruction multiplies a 16 × 16 matrix by a 16 × 8 matrix and adds the result to another 16 × 8 matrix.
# 3. **Cooperation.** No thread has a whole matrix. The 32 lanes of a warp execute the instruction together, and each brings a prescribed handful of elements in its registers.
#
# The third is where the work lies. This notebook takes the points in turn, then builds the kernel from them. The algorithm is that of notebook 04, line by line.

# %% [markdown]
# ## 1 · Sixteen bits
#
# A floating-point number spends its bits on sign, exponent (how large it can be) and fraction (how exactly). The distance from 1 to the next larger number, the **epsilon** of a format, says how exactly:

# %%
formats = [torch.float32, torch.float16, torch.bfloat16]
table = pd.DataFrame(index=[str(f).removeprefix("torch.") for f in formats])
table["epsilon"] = [torch.finfo(f).eps for f in formats]
table["largest"] = [torch.finfo(f).max for f in formats]
table["smallest normal"] = [torch.finfo(f).smallest_normal for f in formats]
table

# %% [markdown]
# fp16 has three decimal digits and ends at 65504. bf16 has the range of fp32 and two digits. Which of the numbers of attention can afford that?
#
# - $Q$, $K$, $V$ and $O$ arrive and leave in 16 bits: the model has decided.
# - $P$ lies between 0 and 1 after the running maximum is subtracted, so it fits either format, with a relative error of at most half an epsilon. (Numbers below the table's last column lose digits: in fp16 such a $P$ is off by up to $3 \cdot 10^{-8}$. Beside a largest $P$ of 1 that does not matter.)
# - The **sums** are another matter. $O$ adds up thousands of products, $l$ thousands of exponentials. Watch a sum of ones in fp16:

# %%
ones = torch.ones(4096)
sum16 = torch.zeros((), dtype=torch.float16)
for x in ones.half():
    sum16 = sum16 + x
print(f"4096 ones, added one by one in fp16: {sum16.item():.0f}; in fp32: {ones.cumsum(0)[-1].item():.0f}")

# %% [markdown]
# At 2048 the distance between neighbouring fp16 numbers is 2, and adding 1 changes nothing any more. So the [accumulators](glossary.md#accumulator), the registers that hold the sums, stay in fp32: $S$, $O$, $m$ and $l$. Only $P$ is rounded to 16 bits, because it is an operand of the second product.

# %% [markdown]
# ## 2 · One instruction
#
# CUDA C++ has no operator for it. One writes the instruction in **PTX**, NVIDIA's portable assembly language, inside an `asm` statement; `fa/sm80.cuh` has one function for each:
#
# ```cpp
# asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#     : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
#     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
# ```
#
# `%0` is the first operand listed; `"+f"`: a float, read and written; `"r"`: a 32-bit register, read. `.sync`, `.aligned`: the whole warp executes it together. `.row.col`: two elements that share a register are neighbours along a row of $A$, along a column of $B$. Then the formats of result, $A$, $B$ and what is added. In the GPU's own machine code, [**SASS**](glossary.md#sass), it is called `HMMA`.
#
# It computes $C \mathrel{+}= A B$ with $A$ of $m \times k = 16 \times 16$, $B$ of $16 \times 8$ and $C$ of $16 \times 8$. That is 2048 multiply-adds, where a warp's fp32 multiply-add (`FFMA`) does 32. (Turing has `mma.m16n8k8`, half as deep and for fp16 alone: there `fa::mma_m16n8k16` is two of them.)
# The part of a matrix that one lane holds is its [**fragment**](glossary.md#fragment): 8 elements of $A$, 4 of $B$, 4 of $C$. Which ones is laid down in the PTX ISA ("Matrix Fragments for mma.m16n8k16"), and in this project in `helpers/emulator/fragments.py`, which the emulator uses as well:

# %%
A, B, C = fragments.a_fragment, fragments.b_fragment, fragments.c_fragment  # (lane, element) -> (row, column)
print("lane 5 holds of A:", [A(5, i) for i in range(8)])
print("          of B:", [B(5, i) for i in range(4)])
print("          of C:", [C(5, i) for i in range(4)])

# %%
draw_mma.fragments({"A (16 × 16)": (A, 8, 16, 16), "B (16 × 8)": (B, 4, 16, 8), "C (16 × 8)": (C, 4, 16, 8)}, lane=5)

# %% [markdown]
# **What to see.** Each cell carries the number of the lane that holds it; green is lane 5. The tint tells its registers apart. A register has 32 bits, so it takes two 16-bit elements, always neighbours along $k$: side by side in $A$, one above the other in $B$. $C$ is fp32, an element per register.
#
# Look at the rows of $A$ and $C$. Rows $r$ and $r + 8$, $r < 8$, belong to the four lanes $4r$ to $4r + 3$, a **quad**. So each lane has two rows, 8 apart. That is good news for the softmax: the maximum of a row is spread over four lanes only, and two shuffles collect it.
#
# Is that the arrangement that the instruction expects? Put it to the test with a kernel of one `mma`: each lane reads the elements that Python has dealt to it, and writes its four results.


# %%
def deal(matrix, layout, elements):
    """What each lane holds of `matrix`: (32, elements)."""
    return np.array([[matrix[layout(lane, i)] for i in range(elements)] for lane in range(32)])


# %%
one_mma = load(source="""
// one_mma: one mma.sync; lane l has its elements of A in row l of Q, of B in row l of K, of C in row l of O
// op: attention
// dtypes: fp16
#include <fa/sm80.cuh>
__global__ void multiply(const fa_args args) {
  const uint32_t *a = (const uint32_t *)args.Q + 4 * threadIdx.x, *b = (const uint32_t *)args.K + 4 * threadIdx.x;
  const uint32_t A[4] = {a[0], a[1], a[2], a[3]};
  float C[4] = {};
  fa::mma_m16n8k16<fa::fp16>(C, A, b[0], b[1]);
  for (int i = 0; i < 4; ++i) ((fa::fp16 *)args.O)[8 * threadIdx.x + i] = fa::fp16(C[i]);
}
extern "C" cudaError_t fa_launch(const fa_args *a, cudaStream_t s) { return multiply<<<1, 32, 0, s>>>(*a), cudaGetLastError(); }
""", quiet=True)  # fmt: skip


# %%
def through_mma(X, Y, A):
    """X (16, 16) times Y (16, 8) by the kernel, the elements of X dealt by the layout A. Whole numbers, so that fp16 is exact."""
    q, k = (torch.zeros(1, 1, 32, 8, dtype=torch.float16, device=one_mma.device) for _ in range(2))
    q[0, 0], k[0, 0, :, :4] = (torch.tensor(deal(m, *how)) for m, how in ((X, (A, 8)), (Y, (B, 4))))
    registers = one_mma(q, k, k)[0][0, 0].cpu().numpy()
    product = np.full((16, 8), np.nan)
    for lane in range(32):
        for i in range(4):
            product[C(lane, i)] = registers[lane, i]
    return product


# %%
def another(lane, i):
    """A with its registers 1 and 2 exchanged: every element still has one owner."""
    return A(lane, {2: 4, 3: 5, 4: 2, 5: 3}.get(i, i))


# %%
rng = np.random.default_rng(0)
X, Y = rng.integers(-3, 4, (16, 16)), rng.integers(-3, 4, (16, 8))
for layout in (A, another):
    wrong = (through_mma(X, Y, layout) != X @ Y).sum()
    print(f"{layout.__name__}: {wrong} of 128 elements are wrong")

# %% [markdown]
# Any map that gives each element one owner looks plausible on paper; the instruction takes only this one.

# %% [markdown]
# ## 3 · ldmatrix
#
# The tiles come through shared memory, as in notebook 04. How do their elements get into fragments? A lane could load its pairs one by one: four 4-byte loads for an $A$ fragment. A special instruction does it in one.
#
# [`ldmatrix.sync.aligned.m8n8.x4`](glossary.md#ldmatrix) reads four matrices of 8 × 8 elements. A row of such a matrix is 8 elements of 16 bits: 16 bytes in one piece. Every lane names the *address of one row*; 32 lanes, 32 rows. What a lane gets in return is not the row whose address it gave, but its share of the four matrices:

# %%
draw_mma.operands(lane=5)

# %% [markdown]
# **What to see.** Three tiles of 16 × 16 as they lie in shared memory. A tint is one 8 × 8 matrix: the eight lanes that name its rows, and the register in which every lane gets its share. Green is what lane 5 gets.
#
# - **Q** is the operand $A$ of $S = Q K^\top$. Matrices 0 and 1 lie one below the other, 2 and 3 right of them: lane $l$ names row $l \bmod 16$, chunk $\lfloor l / 16 \rfloor$ (a [chunk](glossary.md#chunk) is 16 bytes, 8 elements). These are `row_A` and `chunk_A`.
# - **K**. The operand $B$ is $K^\top$: $k$ runs along $d$, a column is a key. A lane's pair are neighbours along $k$, and in $K$'s own rows those are neighbours in memory. So `ldmatrix` on $K$ as it lies gives $K^\top$: the transposition costs nothing. Registers 0 and 1 have to be the two halves of $k$, 16 columns of the tile, for the *same* eight keys, so here matrices 0 and 1 lie side by side: `row_B`, `chunk_B`.
# - **V** is the operand $B$ of $O \mathrel{+}= P V$: $k$ runs over the *keys*. The pair are two keys of the same column, in memory a whole row apart. `.trans` hands out every 8 × 8 matrix transposed: lane 5's pair lies one below the other.


# %%
def ldmatrix(matrix, trans=False):
    """One 8 x 8 matrix through ldmatrix: the pair of elements each lane gets, (32, 2) (PTX ISA, "ldmatrix")."""
    source = matrix.T if trans else matrix
    return np.array([[source[lane // 4, lane % 4 * 2 + i] for i in range(2)] for lane in range(32)])


tile = np.arange(64).reshape(8, 8)  # 8 keys x 8 columns of V: element = 8 * key + column
wanted = deal(np.vstack([tile, tile]), B, 4)[:, :2]  # the first register of a B fragment
for trans in (False, True):
    print(f"trans={trans}: the fragment of B is {'right' if (ldmatrix(tile, trans) == wanted).all() else 'WRONG'}")

# %% [markdown]
# ## 4 · P stays where it is
#
# In notebook 04, $\tilde P$ went through shared memory between the two products, because a thread had its columns and needed whole rows. Here the first product leaves $S$ in $C$ fragments, and the second wants $\tilde P$ as an $A$ fragment: 16 rows of queries and 16 keys. Put two results of the first product, 8 keys each, side by side:


# %%
def S(lane, i):
    """Where lane's element i of two neighbouring C fragments lies in the 16 x 16 tile of S: 0..3 left, 4..7 right."""
    row, column = C(lane, i % 4)
    return row, column + 8 * (i // 4)


draw_mma.fragments({"S: two results side by side": (S, 8, 16, 16)})

# %%
print("same cells, same lane, same order:", all(S(lane, i) == A(lane, i) for lane in range(32) for i in range(8)))

# %% [markdown]
# **What to see.** It is the picture of $A$ in section 2. Lane 5's $s_0, s_1$ are its $a_0, a_1$, and so for all eight, in all lanes. So $\tilde P$ needs no shared memory, no shuffle and no barrier: each lane takes the exponential of its own elements,
# rounds them to 16 bits, packs neighbours into a register, and has the operand of the next product.
#
# FlashAttention-2 rests on this, and so do all kernels from here on that use tensor cores.

# %% [markdown]
# ## 5 · Split Q, not K
#
# A CTA has four warps. FlashAttention-1's tensor-core kernel gave each of them a quarter of the *keys*; their results then had to be added up through shared memory. FlashAttention-2 gives each a quarter of the *queries* (its paper, section 3.3; the first way is "split-K", the second is often called "split-Q"). A warp owns its rows of $S$, of $O$, of $m$ and $l$;
# it never waits for another warp except when the tiles of K and V change.

# %%
draw_mma.split_over_warps()

# %% [markdown]
# Count what a warp does per tile, at $d = 64$ and $B_c = 64$ keys, with 16 rows. The `mma` of each of the two products:

# %%
d, Bc, rows = 64, 64, 16
per_product = (rows // 16) * (Bc // 8) * (d // 16)
print(f"{per_product} mma for S, {per_product} for O: each {16 * 8 * 16} multiply-adds")
kv_bytes = 2 * Bc * d * 2
print(
    f"bytes of K and V from shared memory per mma: {kv_bytes / (2 * per_product):.0f}, per FLOP: {kv_bytes / (2 * per_product) / 4096:.3f}"
)

# %% [markdown]
# Notebook 04's threads asked for 0.5 bytes per FLOP, eight times as much. Yet 0.062 is too much: at 641 TFLOP/s an SM does 2450 FLOPs per clock, and shared memory 128 bytes: 0.052 per FLOP.

# %% [markdown]
# ## The kernel

# %%
show.region("10_fa2_mma_fp16", "tile")

# %% [markdown]
# A CTA has 64 query rows, 16 per warp, and tiles of 64 keys. One function, `at`, says where a chunk of 16 bytes lies in a tile: here row after row, as in HBM. Notebook 11 changes nothing else. (`FA_SMEM_KB`: the shared memory that a block may have; `ctas`: notebook 12.)

# %%
show.region("10_fa2_mma_fp16", "load_tile")

# %% [markdown]
# Each thread copies 16 bytes at a time, through its registers, and neighbouring threads copy neighbouring chunks. Rows past the end become zeros. The loop calls it for K and V between two barriers: one before, so that no warp still reads the previous tile, and one after, so that all of the new tile is there. Now the fragments of $Q$, once for the whole loop:

# %%
show.region("10_fa2_mma_fp16", "fragments")

# %% [markdown]
# `row_A` to `chunk_B` are the addresses of the picture in section 3. The first product:

# %%
show.region("10_fa2_mma_fp16", "scores")

# %% [markdown]
# One `ldmatrix` brings the operands $B$ of two `mma`. `S_reg` is the warp's 16 × 64 tile of $S$: eight accumulators side by side, four numbers of each in this lane. The scale, times $\log_2 e$, multiplies them here: in $Q$, as in 04, it would be rounded to 16 bits. The softmax works on them in place:

# %%
show.region("10_fa2_mma_fp16", "online_update")

# %% [markdown]
# The lines of notebook 04, for this lane's two rows, `g = lane / 4` and `g + 8` (`t`: lane mod 4). A row is spread over the four lanes of a quad, so two shuffles give its maximum. `ex2_approx_ftz` is the instruction `ex2.approx.ftz.f32`: $2^x$ by the special function unit, off by two units in the last place at most.

# %%
show.region("10_fa2_mma_fp16", "output")

# %% [markdown]
# Section 4 in three lines: `pack2` rounds two neighbouring elements of $\tilde P$ to 16 bits and puts them into one register of the operand. $V$ comes through `ldmatrix` with `.trans`. After the loop, $O$ is divided by $l$ and written, each lane its two rows:

# %%
show.region("10_fa2_mma_fp16", "epilogue")

# %% [markdown]
# ## Run and check
#
# Both formats, against float64. The rule is the one of notebook 01: the kernel may err twice as much as PyTorch errs *in the same format* on the same inputs, plus a few rounding steps.

# %%
check(kernel)

# %%
plot.error(record.load("10_fa2_mma_fp16", "error"))

# %% [markdown]
# **What to see.** The error of $O$ is about that of PyTorch in the same format, which rounds to 16 bits as well. LSE is fp32 all the way, and its error is far smaller, most of all at short lengths. It is larger than PyTorch's, and far inside the budget.

# %% [markdown]
# ## Predict, then measure
#
# ### The instructions
#
# How many `mma` (`HMMA`) and `ldmatrix` (`LDSM`) stand in the machine code of this kernel at $d = 64$? The loop over tiles is there once, and all loops inside it are unrolled. A warp has 16 rows, a tile 64 keys, and an `ldmatrix` of K or V serves two `mma`; the fragments of $Q$ are read once, before the loop.

# %%
hmma = ...  # your prediction: HMMA in the code
ldsm = ...  # your prediction: LDSM in the code, those for Q included

# %% tags=["reveal", "raises-exception"]
counts = sass.opcodes("10_fa2_mma_fp16", D=64)
predict(hmma, int(counts["HMMA"]), "HMMA in the code")
predict(ldsm, int(counts["LDSM"]), "LDSM in the code")

# %% [markdown]
# ### Bank conflicts
#
# Shared memory has 32 **banks**, each 4 bytes wide: byte address $x$ lies in bank $(x / 4) \bmod 32$. In one pass, a **wavefront**, every bank serves one word (or one word to several lanes). Lanes that want *different* words of the *same* bank have to be served one after the other: a **bank conflict**.
#
# `ldmatrix` reads a matrix of eight rows of 16 bytes: 128 bytes, so at best one wavefront per matrix and four for `.x4`. In our tile, rows follow each other at a distance of $2d$ bytes. In which banks do the eight rows of one matrix begin at $d = 64$, and how many wavefronts do they take? The X-ray will count the wavefronts of all 4224 `ldmatrix` requests of a run.

# %%
per_matrix = ...  # your prediction: wavefronts of one 8 x 8 matrix at d = 64
in_all = ...  # your prediction: wavefronts of the 4224 requests, .x4 each


# %% tags=["reveal"]
def wavefronts(row_addresses):
    """Passes to read these rows of 16 bytes: the most distinct words that any bank has to serve."""
    words = {address // 4 + i for address in row_addresses for i in range(4)}
    return max(np.bincount([word % 32 for word in words]))


for d in (32, 64, 128):
    matrix = [row * 2 * d for row in range(8)]
    print(f"d = {d:3d}: rows begin in banks {[a // 4 % 32 for a in matrix]}, {wavefronts(matrix)} wavefronts")
predict(per_matrix, wavefronts([row * 2 * 64 for row in range(8)]), "wavefronts per matrix at d = 64")

# %% [markdown]
# At $d = 64$ a row is 128 bytes, once around all the banks. So all eight rows begin in bank 0, and each needs a wavefront of its own. The **X-ray** runs the kernel on the emulator and counts, request by request, what each line asks of memory:

# %% tags=["reveal"]
q, k, v = (torch.randn(1, 2, 256, 64, device=device).half() for _ in range(3))
rays = xray(kernel, q, k, v)
reads = rays.total(space="shared", op="ldmatrix")
predict(in_all, reads.cost, f"wavefronts of ldmatrix; without conflicts {reads.ideal:,}")
rays

# %% [markdown]
# Here is one of those requests, drawn as the banks see it:

# %%
line = max((a for a in rays.accesses if a.op == "ldmatrix"), key=lambda a: a.cost).line
rays.bank_map(line)

# %% [markdown]
# **What to see.** One request, 32 wavefronts, each serving one lane: four banks work and 28 are idle. The stores of `load_tile` do not suffer: there eight neighbouring threads write one row of 128 bytes, every bank once.
#
# What will that cost? An SM serves one wavefront per clock. Shared memory, tensor cores, issue slots (which start instructions), special function units: for how many clocks is each busy with one warp's 16 query rows and a tile of 64 keys? The one with most to do sets the pace:

# %% tags=["reveal", "raises-exception"]
budget = units.table(["10_fa2_mma_fp16"], D=64, rows=16)
units.draw(budget.assign(took=float("nan")), "16 query rows × 64 keys, d = 64 · counted")

# %% [markdown]
# **What to see.** The bars are clocks of an SM. *Shared memory*: the X-ray's wavefronts, 1024 for `ldmatrix` and 32 for this warp's share of the stores. *Tensor cores*: 64 `mma` at the rate of `mma.sync` alone. *Issue slots*: the instructions of the loop that a whole tile runs through, four of which can start per clock. [*MUFU*](glossary.md#mufu): the special function units, two clocks for an exponential in all 32 lanes.
#
# Shared memory is busy ten times as long as the tensor cores, and even without conflicts half as long again ($128 + 32$ clocks). `mma.sync` alone reaches 641 TFLOP/s. Predict from that and from the bars: what does this kernel reach?

# %%
tflops = ...  # your prediction: TFLOP/s at d = 64, fp16

# %% tags=["reveal"]
samples = record.load("10_fa2_mma_fp16")
headline = record.headline(record.medians(samples)).query("name == '10_fa2_mma_fp16' and Nq >= 1024")
measured = headline.groupby(["dtype", "D"]).tflops.mean()
predict(tflops, measured["fp16", 64], "TFLOP/s at d = 64")
pd.DataFrame({"TFLOP/s": measured.round(0), "share of mma.sync alone": (measured / units.MMA_SYNC).round(3)})

# %% [markdown]
# From the clocks: $107 / 1056$, or 10 %, if shared memory never paused. The kernel reaches four fifths of the rate that its bank conflicts allow, so nothing else that it does matters much yet. At $d = 128$ shared memory and tensor cores have twice as many clocks each, in the same proportion.

# %% [markdown]
# ## Beside its peers

# %%
plot.ratio(samples, "10_fa2_mma_fp16", ["SDPA FLASH", "SDPA CUDNN"])

# %% [markdown]
# **What to see.** Less than a fifth of FLASH, which uses the same instructions, and about a tenth of cuDNN. Beside `04_fa2_fp32` in fp32, the tensor cores make it 1.25<!--= tflops("10", 64) / tflops("04", 64, dtype="fp32"):.2f --> times as fast at $d = 64$ and 1.10<!--= tflops("10", 128) / tflops("04", 128, dtype="fp32"):.2f --> at $d = 128$. Nearly all of the gain that the top of this notebook promises is still ahead.

# %% [markdown]
# ## What still hurts
#
# 1. **Bank conflicts.** Of the wavefronts that read fragments, seven of eight are waste. Notebook 11 gets rid of all of them with one line.
# 2. **Waiting.** The loads of K and V go through registers, and the whole CTA waits for them before each tile: nothing is multiplied meanwhile. Notebook 12.
# 3. **Shared-memory bytes per product.** Even without conflicts, 16 query rows per warp read K and V too often. Notebook 13.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a part of the kernel. Type it into the `%%region` cell, below the form: the cell compiles the rung with your text in place of its own, checks all cases, X-rays it and, on a GPU, times it beside the rung. `from helpers import tasks; tasks("10")` lists all tasks; `python -m helpers exercise new 10 output` writes a file for your editor.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 10.1 · Copy a tile
#
# Write `load_tile`, with which a CTA's threads copy a tile to shared memory. It teaches how to share it out so that loads are coalesced, and what a ragged last tile needs. Judged: right, no finding of the X-ray; sectors, which `xray(my_load_tile, q, k, v)` shows, don't count.

# %%
blank("10", "load_tile")

# %% tags=["active-ipynb"]
# %%region 10 load_tile -> my_load_tile
# // type here

# %%
hint("10.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `load_tile` of [10_fa2_mma_fp16.cu](../kernels/10_fa2_mma_fp16.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Task 10.3 · The second product
#
# Write $O \mathrel{+}= P V$ of one warp. It teaches sections 3 and 4: which registers of $S$ form a fragment of $P$, and how $V$ has to be read. Judged case by case, the easy ones first, then by the X-ray.

# %%
blank("10", "output")

# %% tags=["active-ipynb"]
# %%region 10 output -> my_output
# // type here

# %%
hint("10.3")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `output` of [10_fa2_mma_fp16.cu](../kernels/10_fa2_mma_fp16.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Exercise 10.5 · A forgotten word
#
# A colleague's kernel has `ldmatrix_x4` where this one has `ldmatrix_x4_trans`. It compiles, it runs, and nothing complains. Find a $V$ (64, 64) for which its output is *right* all the same, and whose standard deviation is above 0.1 and a tenth of its mean.

# %%
forgotten = load(source=rung("10_fa2_mma_fp16").replace("fa::ldmatrix_x4_trans(", "fa::ldmatrix_x4("), quiet=True)

# %%
# Exercise 10.5
V = torch.randn(64, 64)


# %%
def hidden():
    q, k = (torch.randn(1, 1, 64, 64, device=device).half() for _ in range(2))
    v = torch.as_tensor(V).to(device).half().reshape(1, 1, 64, 64)
    spread, mean = v.float().std(), v.float().mean().abs()
    assert spread > 0.1 * max(1, mean), f"the numbers of V spread by {spread:.2g} only, about {mean:.2g}"
    report = check(forgotten, [reference.Case("yours", q=q, k=k, v=v)])
    assert report.ok, f"the output is wrong: {report.worst:.0f} x the budget"
    return True


exercise.verify("10.5", hidden)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Each 8 × 8 block of $V$ arrives transposed. Which blocks do not mind?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# block = torch.randn(8, 8)
# V = (block + block.T).repeat(8, 8)
# ```
#
# Symmetric blocks hide it. So would a test on constant inputs, on zeros, or on the identity: tests need inputs that tell elements apart.
#
# </details>

# %% [markdown]
# ### Exercise 10.6 · Pad it
#
# The oldest cure for bank conflicts is padding: let rows lie a little further apart than $2d$ bytes. Rows must begin at multiples of 16 bytes. Find the smallest row length in bytes for $d = 64$ for which the eight rows of a matrix take one wavefront, and put it into the kernel: `stride` is the row's length in *elements*. How many bytes of shared memory does the CTA need then?

# %%
# Exercise 10.6
stride = 64
smem_bytes = 24576


# %%
def with_rows_of(row):
    """The kernel's text with rows of `row` elements in shared memory."""
    source = rung("10_fa2_mma_fp16").source.replace("return row * d + chunk * 8", f"return row * {row} + chunk * 8")
    for name in ("Br", "Bc"):
        source = source.replace(f"_smem + {name} * d;", f"_smem + {name} * {row};")
    return source.replace("2 * (Br + 2 * Bc) * d;", f"2 * (Br + 2 * Bc) * {row};")


# %%
def padded():
    assert stride in range(1, 10000), f"a row has a whole number of elements, not {stride!r}"
    rays = xray(load(source=with_rows_of(int(stride)), device="cpu", quiet=True), *torch.randn(3, 1, 1, 64, 64).half())
    assert not rays.findings, f"{rays.findings[0]}"
    ours = rays.total(space="shared", op="ldmatrix")
    assert ours.cost == ours.ideal, f"{ours.cost} wavefronts for ldmatrix; {ours.ideal} without conflicts"
    assert stride < 80, "there is a smaller one"
    assert smem_bytes == 2 * (64 + 2 * 64) * stride, f"the stride is right; not {smem_bytes} bytes"
    return True


exercise.verify("10.6", padded)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# A row's length in units of 16 bytes has to be odd: then eight rows begin in eight different units modulo 8.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# stride = 72
# smem_bytes = 2 * (64 + 2 * 64) * stride
# ```
#
# 16 bytes more per row, 12.5 % more shared memory. It works; notebook 11 shows a way that costs no memory, and Hopper's copy engine (notebook 30), which writes whole tiles, insists on it.
#
# </details>

# %% [markdown]
# ### Task 10.9 · The whole kernel
#
# Write kernel and launcher from the [header block](../kernels/10_fa2_mma_fp16.cu). It teaches how the parts fit together. Judged like the others, its counts beside the rung's: can you do with fewer wavefronts?

# %%
blank("10", "kernel")

# %% tags=["active-ipynb"]
# %%region 10 kernel -> my_kernel
# // type here

# %%
hint("10.9")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: [10_fa2_mma_fp16.cu](../kernels/10_fa2_mma_fp16.cu) behind its header block. Another design that is right and free of findings solves the task just as well.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
#
# <details><summary>1. What does one mma.sync.m16n8k16 compute, and who has the operands?</summary>
#
# A 16 × 16 by 16 × 8 product added to 16 × 8. The 32 lanes of the warp have 8, 4 and 4 elements each, in places that the PTX ISA fixes.
#
# </details>
# <details><summary>2. Why does the row maximum need only two shuffles?</summary>
#
# A row of the accumulator belongs to a quad of four lanes: exchange with lane xor 1, then with lane xor 2.
#
# </details>
# <details><summary>3. Which of Q, K, V needs .trans, and why?</summary>
#
# $V$. As operand $B$, a lane's pairs have to be neighbours along $k$. For $K^\top$ that is along a row of $K$ in memory; for $V$ it is down a column.
#
# </details>
# <details><summary>4. What would have to change if S and P had different layouts?</summary>
#
# $\tilde P$ would have to be exchanged between lanes, through shuffles or through shared memory with barriers, in every tile.
#
# </details>
# <details><summary>5. Why is P rounded to 16 bits, but not l?</summary>
#
# $\tilde P$ is an operand of a product and lies in [0, 1], where rounding is a small relative error. $l$ adds up thousands of terms: in 16 bits it would stop growing.
#
# </details>
# <details><summary>6. How many wavefronts does ldmatrix.x4 take on rows 256 bytes apart?</summary>
#
# 32: all eight rows of each matrix begin in the same bank.
#
# </details>
