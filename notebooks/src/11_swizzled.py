# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 11 · Swizzled: no bank conflicts
#
# [← 10 · Tensor cores](10_fa2_mma_fp16.ipynb) | [11_swizzled.cu](../kernels/11_swizzled.cu) | [glossary](glossary.md) | [12 · Double-buffered →](12_double_buffered.ipynb)
#
# **After this notebook you can**
# - derive an XOR swizzle for a tile of any row length, and prove that it has no conflicts;
# - see the conflicts of a kernel, line by line and bank by bank, and make them come and go by editing one line;
# - say what speaks for swizzling a tile rather than padding it.
#
# **Time** 45 minutes, without the tasks.
#
# **Needs** [10 · Tensor cores](10_fa2_mma_fp16.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: let the 16-byte chunks of a row trade places, by XOR with the row's number, so that chunks below each other lie in different banks.

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

from helpers import blank, check, draw_mma, exercise, hint, load, plot, predict, progress, record, reference
from helpers import rung, show, units, xray

torch.manual_seed(0)
kernel = load("11_swizzled")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 10's kernel spends its time on shared memory: `ldmatrix` reads eight rows of 16 bytes at a time, all eight begin in the same [bank](glossary.md#bank), and one [wavefront](glossary.md#wavefront) becomes eight. The X-ray's count, once more (`cost`: wavefronts; `ideal`: without conflicts):

# %%
q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
before = xray("10_fa2_mma_fp16", q, k, v)
pd.DataFrame([before.total(space="shared", op=op) for op in ("ldmatrix", "store")], index=["ldmatrix", "store"])

# %% [markdown]
# The *stores*, which write the tile row by row, need no more wavefronts than the ideal. So the layout suits accesses along a row, but not accesses down a column. We need one that suits both; it is called a [swizzle](glossary.md#swizzle).

# %% [markdown]
# ## 1 · In units of chunks
#
# Every access to the tile moves 16 bytes at a time, aligned to 16 bytes: a [**chunk**](glossary.md#chunk), 8 elements. So forget bytes and banks, and count in chunks. A wavefront moves 128 bytes, 8 chunks, and each must come from a different one of 8 **columns of four banks**. Chunk number $n$ of the tile, counted from its start, lies in column $n \bmod 8$.
#
# With $d = 64$, a row of the tile is 8 chunks: row $r$, chunk $c$ is number $8r + c$, and lies in column $c$, whatever $r$ is. There is the conflict. What we want is a function $\text{place}(r, c)$ such that
#
# 1. in a row, the eight chunks still lie in eight different columns (the stores stay free of conflicts, and no two chunks get the same place);
# 2. for a given $c$, eight rows below each other lie in eight different columns.
#
# A Latin square, in other words: each number once per row and once per column. Adding the row number does it, $(c + r) \bmod 8$. The usual choice does it with less arithmetic:
#
# $$ \text{place}(r, c) = c \oplus (r \bmod 8) , $$
#
# where $\oplus$ is the bitwise exclusive or (XOR). For a fixed $r$, $c \mapsto c \oplus r$ is one to one (do it twice and you are back). For a fixed $c$, so is $r \mapsto c \oplus r$. That is the whole proof.

# %%
draw_mma.swizzled_tile(lambda row, chunk: chunk ^ row % 8, chunks=8, column=0)

# %% [markdown]
# **What to see.** The number in a box is the chunk that is stored there. Orange is chunk 0 of each of eight rows, one matrix of an `ldmatrix`. On the left it stands in the same four banks in every row. On the right it stands in each group of banks once.
#
# What about other head dimensions? At $d = 128$ a row is 16 chunks, twice around the banks; XOR with three bits permutes the chunks within each half, which is all that is needed. At $d = 32$ a row is 4 chunks, and *two* rows make one round. Then rows 0 and 1 already lie in different halves, and the number to XOR with has to change with every second row only:
# $\text{place}(r, c) = c \oplus (\lfloor r/2 \rfloor \bmod 4)$.


# %%
def place(d):
    """The swizzle for a tile of d columns: (row, chunk) -> the chunk's place in its row."""
    chunks = d // 8
    per_line = max(1, 8 // chunks)  # rows that together fill the 32 banks
    return lambda row, chunk: chunk ^ row // per_line % min(chunks, 8)


def wavefronts(d, where, chunk):
    """Wavefronts of one 8 x 8 matrix: chunk `chunk` of rows 0 to 7."""
    columns = [(row * d // 8 + where(row, chunk)) % 8 for row in range(8)]
    return np.bincount(columns).max()


# %%
table = pd.DataFrame(index=pd.Index([32, 64, 128], name="d"))
for name, swizzle in (("plain", lambda d: lambda row, chunk: chunk), ("swizzled", place)):
    table[name] = [max(wavefronts(d, swizzle(d), c) for c in range(d // 8)) for d in table.index]
table

# %%
draw_mma.swizzled_tile(place(32), chunks=4, column=0, title="d = 32: two rows share a round of the banks")

# %% [markdown]
# **What to see.** A line is one round of the banks and holds two rows, the second one darker. On the left the eight orange chunks stand in two groups of banks, four in each; on the right in all eight.

# %% [markdown]
# ## 2 · Why not pad?
#
# Exercise 10.6 cured the same conflicts by making rows 16 bytes longer. Padding costs memory, here an eighth of the tile, and with it perhaps a CTA per SM. That alone would be bearable. The stronger reason comes later: the copy engine of Hopper (notebook 30) writes whole tiles into shared memory by itself. It can swizzle, for rows of 64
# and of 128 bytes in exactly this pattern. It cannot pad rows like that, and Hopper's tensor cores, which read tiles without `ldmatrix`, do not accept padded rows either.

# %% [markdown]
# ## The kernel
#
# All addresses of the tiles go through one function.

# %%
show.region("11_swizzled", "swizzle")

# %%
show.diff("10_fa2_mma_fp16", "11_swizzled")

# %% [markdown]
# That is the whole difference: one function. Stores and reads both ask `at`, so they agree. If one of them did not, the kernel would be wrong (exercise 11.4).

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# The arithmetic is that of rung 10, and so is the error, to the bit.
#
# ## Predict, then measure
#
# From the table at the top of the notebook: how many wavefronts of `ldmatrix` are left?

# %%
left = ...  # your prediction: wavefronts of ldmatrix of rung 11

# %% tags=["reveal"]
after = xray(kernel, q, k, v)
predict(left, after.total(space="shared", op="ldmatrix").cost, "wavefronts of ldmatrix")
pd.DataFrame([after.total(space="shared", op=op) for op in ("ldmatrix", "store")], index=["ldmatrix", "store"])

# %% [markdown]
# One read of K, before and after: the same request, its addresses changed by the XOR alone.


# %%
def heaviest(rays):
    """The line with the most wavefronts of ldmatrix."""
    return max((a for a in rays.accesses if a.op == "ldmatrix"), key=lambda a: a.cost).line


before.bank_map(heaviest(before))

# %%
after.bank_map(heaviest(after))

# %% [markdown]
# Now toggle it yourself. The next cell takes the kernel's text and replaces the swizzle. Try other patterns: `chunk ^ row % 4`, `(chunk + row) % (d / 8)`, `chunk ^ row % 2`. The output stays right with every one of them as long as a row's chunks have different places; only the count changes.

# %%
old = "(chunk ^ row / (d < 64 ? 64 / d : 1) % (d < 64 ? d / 8 : 8))"
mine = load(source=rung("11_swizzled").replace(old, "(chunk ^ row % 4)"), device="cpu")
x = xray(mine, q, k, v)
print(x.total(space="shared", op="ldmatrix"))
x.bank_map(heaviest(x))

# %% [markdown]
# ### Against the hardware
#
# Does a real GPU count the same? Nsight Compute, NVIDIA's profiler, counted the wavefronts and conflicts of both rungs on an H200, at the same shape:

# %%
pair = ["10_fa2_mma_fp16", "11_swizzled"]
counters = pd.concat([record.load(name, "counters", device="nvidia-h200") for name in pair])
counters = counters.query("N == 256 and D == 64").set_index("rung")
hardware = counters[["shared_load_wavefronts", "shared_load_conflicts", "shared_store_conflicts"]].T
hardware.loc["shared_load_wavefronts, X-ray"] = [x.total(space="shared", op="ldmatrix").cost for x in (before, after)]
hardware

# %% [markdown]
# They agree to the last wavefront, and rung 11 has no conflict. Notebook 92 puts all of the X-ray's counts to this test.

# %% [markdown]
# ### What it brings
#
# In rung 10 shared memory was busy ten times as long as the tensor cores. If it alone set the pace, the swizzle would make the kernel $1056 / 160$, or 6.6 times as fast at $d = 64$. But the waits for K and V stay, and other units are nearly as busy now. So how many times as fast is rung 11?

# %%
faster = ...  # your prediction: times as fast as rung 10, d = 64, fp16, N >= 1024

# %% tags=["reveal"]
samples = pd.concat([record.load(name) for name in pair])
ours = record.headline(record.medians(samples))
ms = ours[ours.name == ours.rung].query("Nq >= 1024").groupby(["dtype", "D", "name"]).tflops.mean().unstack()
ms["times as fast"] = ms["11_swizzled"] / ms["10_fa2_mma_fp16"]
predict(faster, ms["times as fast"]["fp16", 64], "times as fast")
ms.round(2)

# %% tags=["reveal", "raises-exception"]
budget = units.table(pair, D=64, rows=16)
units.draw(budget, "16 query rows × 64 keys, d = 64 · counted; took: NVIDIA H200")

# %% [markdown]
# **What to see.** One XOR removed 896 of 1056 wavefronts. What is left of shared memory's bar is 128 wavefronts to read fragments and 32 for the stores of K and V. The four units are now much closer to each other, and the kernel takes twice as long as the longest of them: a warp copies, multiplies and takes exponentials one after the other, and the waits for K and V now show.

# %% [markdown]
# ## Beside its peers

# %%
samples = record.load("11_swizzled")
plot.ratio(samples, "11_swizzled", ["SDPA FLASH", "SDPA CUDNN"])

# %% [markdown]
# **What to see.** Rung 11 reaches 0.73<!--= ratio("11", "FLASH", 64):.2f --> of FLASH's speed at $d = 64$ and 0.63<!--= ratio("11", "FLASH", 128):.2f --> at $d = 128$; rung 10 reached 0.18<!--= ratio("10", "FLASH", 64):.2f --> and 0.15<!--= ratio("10", "FLASH", 128):.2f -->.

# %% [markdown]
# ## What still hurts
#
# The reads of shared memory are as cheap as they can be at 16 rows per warp. But before each tile the whole CTA stops: every thread loads its chunks of K and V into registers, waits for HBM or the L2, stores them, and waits for all others at a barrier. The tensor cores have nothing to do in the meantime, unless another CTA of the same SM happens to be at its products. Notebook 12 lets the copy
# of the next tile run while this one is multiplied.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a part of the kernel. Type it into the `%%region` cell, below the form: the cell compiles the rung with your text in place of its own, checks all cases, X-rays it and, on a GPU, times it beside the rung. `from helpers import tasks; tasks("11")` lists all tasks; `python -m helpers exercise new 11 swizzle` writes a file for your editor.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 11.1 · The swizzle
#
# Write `at`, which says where a chunk lies, for $d$ = 32, 64 and 128. It teaches how to turn the two conditions of section 1 into one line of arithmetic. Judged: right in all cases, no finding, and no more bank conflicts than the rung has: a layout that is right but slow does not pass.

# %%
blank("11", "swizzle")

# %% tags=["active-ipynb"]
# %%region 11 swizzle -> my_swizzle
# // type here

# %%
hint("11.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `swizzle` of [11_swizzled.cu](../kernels/11_swizzled.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Task 11.3 · The addresses of ldmatrix
#
# Write `row_A`, `chunk_A`, `row_B` and `chunk_B`, and load $Q$'s fragments. It teaches who names which row of a matrix (notebook 10, section 3). Judged case by case, the easy ones first, then by the X-ray.

# %%
blank("11", "fragments")

# %% tags=["active-ipynb"]
# %%region 11 fragments -> my_fragments
# // type here

# %%
hint("11.3")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `fragments` of [11_swizzled.cu](../kernels/11_swizzled.cu), the same text as in notebook 10.
#
# </details>

# %% [markdown]
# ### Exercise 11.4 · One side only
#
# In this kernel the *stores* are swizzled and the reads of Q are not. Is there an input for which its output is right all the same? Give `q` of shape (1, 1, 64, 64) whose numbers spread as normal random ones do (standard deviation at least 0.5, in each row 0.1; no column constant).

# %%
one_sided = load(
    source=rung("11_swizzled").replace(
        "Q_smem + at<d>(16 * warp + row_A, 2 * k + chunk_A)",
        "Q_smem + (16 * warp + row_A) * d + (2 * k + chunk_A) * 8",
    ),
    quiet=True,
)

# %%
# Exercise 11.4
q_mine = torch.randn(1, 1, 64, 64)


# %%
def unharmed():
    assert q_mine.shape == (1, 1, 64, 64), f"q is {tuple(q_mine.shape)}, not (1, 1, 64, 64)"
    q, (k, v) = q_mine.to(device).half(), (torch.randn(1, 1, 64, 64, device=device).half() for _ in range(2))
    assert q.float().std() >= 0.5, f"the numbers of q spread by {q.float().std():.2g} only"
    assert q.float().std(dim=3).amin() >= 0.1, "the numbers of some row of q spread by less than 0.1"
    assert q.std(dim=2).amin() > 0, "some column of q is constant"
    report = check(one_sided, [reference.Case("yours", q=q, k=k, v=v)])
    assert report.ok, f"the output is wrong: {report.worst:.0f} × the budget"
    return True


exercise.verify("11.4", unharmed)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Row $r$ arrives with its chunks in another order. For which rows does that make no difference?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# q_mine = torch.randn(1, 1, 64, 8).repeat(1, 1, 1, 8)
# ```
#
# Rows that consist of eight equal chunks. A row of $Q$ is permuted by its own number modulo 8. Had K been read without the swizzle too, each of its rows would be permuted by its own number, and only scores of rows with equal numbers would be right: one in eight.
#
# </details>

# %% [markdown]
# ### Exercise 11.5 · A row of 12 chunks
#
# Some models have heads of $d = 96$, rows of 12 chunks. Write the swizzle: it permutes each row, and neither reads nor stores conflict. Eight chunks are read at once: the same one of eight neighbouring rows, from a multiple of 8 on; and eight are stored at once: consecutive ones of the tile, row after row, from a multiple of 8 on.


# %%
# Exercise 11.5
def place96(row, chunk):
    """The place (0 to 11) of chunk (0 to 11) of row `row` in a tile of 96 columns."""
    return chunk


# %%
def swizzled96():
    for row in range(64):
        assert {place96(row, c) for c in range(12)} == {*range(12)}, f"row {row}: not a permutation of 0..11"
    for top in range(0, 64, 8):
        where = f"rows {top} to {top + 7}"
        rows = [[(12 * row + place96(row, c)) % 8 for c in range(12)] for row in range(top, top + 8)]
        for c, columns in enumerate(zip(*rows)):
            assert len(set(columns)) == 8, f"chunk {c} of {where} lies in only {len(set(columns))} columns of banks"
        stored = sum(rows, [])
        assert all(len(set(stored[i : i + 8])) == 8 for i in range(0, 96, 8)), f"eight chunks of {where} share columns"
    return True


exercise.verify("11.5", swizzled96)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# A row of 12 chunks begins 4 columns further than the one above, so two neighbouring rows already differ, in bit 2 of the column. The four pairs have to be told apart by the lower two bits: XOR with `row // 2 % 4` stays within groups of four chunks, and 12 is three of those.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# def place96(row, chunk):
#     return chunk ^ row // 2 % 4
# ```
#
# XOR with three bits would send chunk 8 to places up to 15, which are not there.
#
# </details>

# %% [markdown]
# ### Task 11.9 · The whole kernel
#
# Write kernel and launcher from the [header block](../kernels/11_swizzled.cu). If you have solved 10.9, start from your own and change where chunks lie. Judged: right, no finding; its counts stand beside the rung's.

# %%
blank("11", "kernel")

# %% tags=["active-ipynb"]
# %%region 11 kernel -> my_kernel
# // type here

# %%
hint("11.9")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: [11_swizzled.cu](../kernels/11_swizzled.cu) behind its header block. Another design that is right and free of findings solves the task just as well.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
#
# <details><summary>1. Which two accesses does the layout of a tile have to suit?</summary>
#
# The store that writes it, along rows, and `ldmatrix`, which reads one chunk of eight rows below each other.
#
# </details>
# <details><summary>2. Why is c xor (r mod 8) free of conflicts in both?</summary>
#
# For a fixed row, eight chunks go to eight different places; for a fixed chunk, eight rows below each other do.
#
# </details>
# <details><summary>3. What does the swizzle cost?</summary>
#
# No memory; an XOR in the address, much of which can be computed before the loop.
#
# </details>
# <details><summary>4. A kernel gets the right result. Can its swizzle be wrong?</summary>
#
# It can be useless: any permutation that writer and reader agree on gives the right result. Only counting conflicts tells.
#
# </details>
# <details><summary>5. What is the rule for rows of 64 bytes?</summary>
#
# Two rows fill the banks once, so pairs of rows share a number: XOR with (r / 2) mod 4.
#
# </details>
