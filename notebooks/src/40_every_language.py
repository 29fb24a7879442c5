# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 40 · One algorithm, every language
#
# [← 33 · Backward on Hopper](33_backward_wgmma.ipynb) | [glossary](glossary.md) | [50 · Attention across GPUs →](50_ring.ipynb)
#
# **After this notebook you can**
# - read FlashAttention's forward pass in thirteen implementations, from NumPy to CuTe, and find the same five steps in most;
# - say for a language which decisions it leaves to you, which it takes itself, and what you can't say in it at all;
# - tell from machine code which instructions a compiler chose, and from their number which tile it multiplied;
# - choose a language for a kernel of your own by what the kernel has to say.
#
# **Time** 50 minutes.
#
# **Needs** [04 · FlashAttention-2](04_fa2_fp32.ipynb) and [12 · Double-buffered](12_double_buffered.ipynb); for the machine code [30 · TMA and wgmma](30_tma_wgmma.ipynb). No GPU: NumPy, PyTorch and C run everywhere. The other languages are an extra, `python -m pip install '.[languages]'`; without it their sources and their machine code are shown, and their speed where it has been recorded.
#
# **The idea in one line**: a language for kernels is a choice of who decides: the tile, the copies, the waits, the registers, the overlap.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import re, time

import pandas as pd
import torch

from helpers import check, exercise, languages, languages_timed, machine_code, plot, predict, progress

torch.manual_seed(0)
languages.table().style.set_properties(**{"text-align": "left"})

# %% [markdown]
# ## The problem
#
# Up to here every kernel was CUDA C++. Most kernels today are written in something else, and each of these languages promises the same: less text, and nearly the speed. What is given up for it? To find out, `kernels/languages/` has attention thirteen times, mostly in FlashAttention-2's order, one tile of queries against all tiles of keys, with an optional causal mask. Each file can be read alone, and each is held to the rule that our kernels are held to.
#
# Here is the algorithm with nothing else around it, in NumPy.

# %%
languages.region("numpy_tiles", "kernel")

# %% [markdown]
# Five steps stand in the inner loop, and you will find them in every file but `torch_compile` and `flex_attention`, where a compiler or a library has the loop: **(1)** a product $S = QK^\top$ of two tiles, **(2)** the mask, **(3)** the new maximum and $\alpha$, which rescales what was summed before, **(4)** the exponentials $P$ and their sum, **(5)** a product $PV$ added to $O$.
#
# NumPy says nothing about where any of this happens. A GPU needs answers to five questions:
#
# | decision | the question | where this series took it |
# |---|---|---|
# | tile | how many queries and keys are worked on at a time? | [04](04_fa2_fp32.ipynb) |
# | copy | how do bytes get from HBM to the SM, by which instruction, into which layout? | [11](11_swizzled.ipynb), [12](12_double_buffered.ipynb), [30](30_tma_wgmma.ipynb) |
# | wait | who waits for whom, and where? | [12](12_double_buffered.ipynb), [31](31_warp_specialized.ipynb) |
# | registers | which thread holds which element? | [10](10_fa2_mma_fp16.ipynb) |
# | overlap | what runs while something else is waited for? | [12](12_double_buffered.ipynb), [32](32_ping_pong.ipynb) |
#
# Read the following sources with these five questions at hand. For each file ask a sixth: what can you *not* say here?

# %% [markdown]
# ## Whole arrays: nothing is said
#
# **PyTorch under `torch.compile`.** You write the formula. The compiler fuses what lies between the products into one kernel, but the two products stay calls of a library, so $S$ and $P$ go through HBM, as in [01](01_naive.ipynb).

# %%
languages.region("torch_compile", "kernel")

# %% [markdown]
# **FlexAttention.** PyTorch keeps a FlashAttention kernel with holes in it, written in Triton, and compiles your Python function into the hole: one that changes a score or decides whether a query sees a key. It skips tiles that the mask hides. You can say any mask and any change of a single score (a bias, say), and nothing else. It is compiled for each shape. By default PyTorch stops after eight and from then on forms the whole of $S$, uncompiled, with no more than a warning; where a model sees more shapes, raise `recompile_limit`, as the file does.

# %%
languages.region("flex_attention", "kernel")

# %% [markdown]
# ## Tiles: the algorithm is said, the machine is not
#
# **Triton** works on tiles of a block: a variable holds a whole tile, spread over the block's threads in a way that only the compiler knows. `tl.dot` becomes `mma.sync` or `wgmma`; a load becomes `cp.async` or TMA; `num_stages` says for how many tiles there is room, and so how far ahead they are copied, not how.

# %%
languages.region("triton_tiles", "step")

# %% [markdown]
# There is no barrier, no shared memory and no thread in this text. What shows that it is a kernel is the outer loop, which is cut in two so that only tiles on the edge pay for the mask:

# %%
languages.region("triton_tiles", "kernel")

# %% [markdown]
# **cuTile**, NVIDIA's own tile language, goes a step further. A load names a tile by its number in the array, so there are no pointers and no offsets, and there is no number of stages: the compiler decides how far ahead to copy, and which warps do it, unless a hint tells it (`latency`, `allow_tma`).

# %%
languages.region("cutile_tiles", "step")

# %% [markdown]
# **Helion** writes Triton. Its loops are over tiles whose sizes don't stand in the algorithm at all: they come from a configuration, which its tuner can search. **Pallas** is the same idea within JAX: the whole kernel is a function of references to tiles, and a `BlockSpec` says which tile each block of the grid gets.

# %%
languages.region("helion_tiles", "kernel")

# %%
languages.region("pallas_tiles", "kernel")

# %% [markdown]
# ## Layouts and threads: the machine is said
#
# **Gluon** is Triton's lower floor. Tiles remain, but each has a *layout* that you choose, shared memory is allocated by name, copies are TMA with an mbarrier each, and `wgmma` is asynchronous if you say so. Below, the product for the *next* tile is started before the softmax of this one, and waited for after it: the overlap of [32](32_ping_pong.ipynb) without a second group that takes turns. Two lines need a key. `NVMMADistributedLayout([3, 0], [8, 1], [16, Bc, 16])` is the layout of the results of `wgmma` (version 3 of the instruction, Hopper's) for eight warps, one below the other, each with 16 rows. `(n // STAGES) & 1` is the phase of an mbarrier, which flips each time its buffer is filled again ([30](30_tma_wgmma.ipynb)).

# %%
languages.region("gluon_tiles", "kernel")

# %% [markdown]
# **CuTe**, the layer under CUTLASS, describes every tile by a layout, a function from coordinates to addresses, and every instruction by an *atom*, which says which thread holds which element. A swizzle ([11](11_swizzled.ipynb)) is one more function in front of the layout. Here are our choices in C++; the kernel itself is CUDA, with `__syncthreads()` and `cp_async_wait`.

# %%
languages.region("cute_mma", "shapes")

# %% [markdown]
# The same vocabulary exists in Python, the **CuTe DSL**. It has its own compiler instead of `nvcc`. This is where it takes the decisions that stand above in C++, and starts the kernel.

# %%
languages.region("cute_dsl", "launch")

# %% [markdown]
# **Numba** is CUDA with Python's syntax: threads, shared arrays, `syncthreads`. It names neither tensor cores nor asynchronous copies, so it stands where [03](03_fa1_fp32.ipynb) and [04](04_fa2_fp32.ipynb) stood. **C** takes the same decisions on a CPU: the tile of $S$ lies in vector registers, and each number that is loaded from cache is used several times.

# %%
languages.region("c_openmp", "product")

# %% [markdown]
# ## Who decides?
#
# The table has the words of each file in which its author takes a decision. A test checks that each of them stands in its file. "compiler" is a compiler or a library; "–" means that there is nothing to decide.

# %%
languages.decisions()

# %% [markdown]
# **What to see.** Below the first two rows, loops over tiles in NumPy and in PyTorch (`torch_eager`), there are three groups. In the first (`torch_compile`, `flex_attention`), even the tile is somebody else's. In the second you choose the tile, perhaps the warps and a number of stages, and in Triton a descriptor for each array; waits and registers can't be said, so they can't be wrong: the races in shared memory of [91](91_bug_museum.ipynb) can't be written in these languages. In the third group everything is yours, and so are its bugs.
#
# ## Run and check
#
# The check's cases against float64, for those that run on every machine: rows that see no key, one query, lengths one off a tile, scores of $10^4$, a scale of zero or less.

# %%
anywhere = {stem: languages.implementation(stem) for stem in ("numpy_tiles", "torch_eager", "c_openmp")}
for implementation in anywhere.values():
    print(check(implementation))

# %% [markdown]
# Four kinds of limits showed up while the others were written, and each is a line in a file:
#
# | limit | where | what was done |
# |---|---|---|
# | a block has to lie inside its array | Pallas | Q, K and V are padded to whole tiles; the mask hides the rest |
# | a product is rounded to its inputs' type | Helion, `@` in PyTorch | a result in float32 is asked for |
# | a length of 1 is taken as fixed | Helion | the kernel is compiled for an example without one |
# | a row that sees no key has $m = -\infty$ | all but FlexAttention | 0 is subtracted instead, as in [91](91_bug_museum.ipynb) (Numba: the tile is skipped) |
#
# ## Predict, then measure
#
# ### C beside PyTorch
#
# PyTorch's own attention for CPUs is C++ that calls a library for the products, tuned for this processor. Ours is a hundred lines of C that the compiler vectorises. Predict: what share of PyTorch's speed does the whole reach?

# %%
c_share = ...  # your prediction: PyTorch's time over that of the C file, 1 if they are equally fast

# %% tags=["reveal"]
q, k, v = torch.randn(3, 1, 8, 1024, 64)
C, library = anywhere["c_openmp"], torch.nn.functional.scaled_dot_product_attention


def least(call):
    begun = [(time.perf_counter(), call(), time.perf_counter()) for _ in range(7)]
    return min(end - start for start, _, end in begun)


share = least(lambda: library(q, k, v)) / least(lambda: C(q, k, v))
predict(c_share, share, "of PyTorch's speed", within=0.2)

# %% [markdown]
# Where could the rest go? Besides the two products there is the softmax: maximum, exponentials and sums of a row. To see its share, take it out of a copy of the file and time that. (The number varies from machine to machine, and while others work on it.)
#
# ### What the compilers chose
#
# Five of the files can be compiled for Hopper without a GPU: Triton, cuTile, Gluon and the two of CuTe. `registers` and `stack_bytes` are those of a thread; what doesn't fit into registers lies on the stack. The other columns count instructions in the code: `HGMMA` is `wgmma` (a product of 64 rows by a whole warpgroup), `HMMA` is `mma.sync` (16 rows, one warp), `UTMALDG` a TMA copy, `LDGSTS` is `cp.async`, `LDSM` is `ldmatrix`, `MUFU` an exponential.
#
# Before you look: how many of the five have no `HGMMA`? Go back to the sources: some name their instruction, the others leave it to the compiler.

# %%
without_wgmma = ...  # your prediction: how many of the five multiply by mma.sync

# %% tags=["reveal"]
code = machine_code.load()
predict(without_wgmma, code.query("HGMMA == 0")["name"].nunique(), "of the five use mma.sync")
code.query("causal == 0").drop(columns=["causal", "version"]).set_index(["name", "D"])

# %% [markdown]
# **What to see.** cuTile got `wgmma` and TMA although its source names neither. Triton's source names a descriptor, which invites TMA, and says `dot`. For another card their compilers choose other instructions. Gluon names both, and is Hopper's alone. The two CuTe files name Ampere's atoms, so that is what they get, on every card. They are the same kernel: the file in Python has its loop twice, like Triton's, so that whole tiles need no mask, and therefore twice as many products in its code; the one in C++ asks in each tile. At $d = 128$ both spill, 56 and 38 registers. A warp has 32 queries there, so that each fragment of $K$ and $V$ that it loads is used twice as often; $O$ and $S$ of a thread alone are then 192 of its 255 registers. On the H200 that was faster than eight warps with 16 queries each, which don't spill.
#
# ## Beside its peers
#
# Which of the five is the fastest on an H200 at $d = 128$, without a mask? Write down a name from the table.

# %%
fastest = ...  # your prediction: the name of one of the five

# %% tags=["reveal"]
measured = languages_timed.fastest(128, among=list(code["name"].unique()))
predict(fastest, measured, "is the fastest of the five")

# %%
summary = plot.recorded(languages_timed.STEM, "timings", lambda _: languages_timed.summary())
if summary is not None:
    display(languages_timed.scatter(summary))
# %%
if summary is not None:
    ratios = summary.pivot_table(index="name", columns=["D", "causal"], values="ratio")
    display(ratios.map("{:.2f}".format).where(ratios.notna(), "–"))

# %% [markdown]
# These are speeds over SDPA FLASH, PyTorch's FlashAttention-2, which ran beside each language in the same process: geometric means over $N \ge 1024$ at the workload of every table in this series (Numba's without the longest, which were not timed). Rungs 04 (which has no causal mask), 13 (with a mask 20) and 32 and cuDNN are there for comparison. NumPy and C run on a CPU and have no point.
#
# **What to see.** More lines don't buy more speed; the instruction does.
#
# - **cuTile** is 1.55<!--= language("cutile_tiles", 128, 0):.2f --> times as fast as FlashAttention-2, and **Triton** 1.43<!--= language("triton_tiles", 128, 0):.2f --> times, each in a file that a page holds: their compilers chose `wgmma` and TMA. At $d = 64$ Triton is a little ahead, 1.38<!--= language("triton_tiles", 64, 0):.2f --> to 1.35<!--= language("cutile_tiles", 64, 0):.2f -->.
# - **FlexAttention** has 1.29<!--= language("flex_attention", 128, 0):.2f --> with 17 lines: the kernel is PyTorch's, in Triton. With the mask it has 1.15<!--= language("flex_attention", 128, 1):.2f -->.
# - **Gluon** names what Triton's compiler chose, and reaches 1.21<!--= language("gluon_tiles", 128, 0):.2f -->. To say more is a chance to be faster, not a promise: its tile and its overlap are ours.
# - **CuTe**, with Ampere's instructions, has 0.96<!--= language("cute_mma", 128, 0):.2f --> in C++ and 0.94<!--= language("cute_dsl", 128, 0):.2f --> in Python: FlashAttention-2 is written in CuTe with the same atoms. Rung 13 uses these instructions, too, and is at 1.22<!--= language("13_tuned", 128, 0):.2f -->; what made the difference there, such as the maximum out of the loop, can be said in CuTe as well.
# - **Pallas** (0.99<!--= language("pallas_tiles", 128, 0):.2f -->) and **Helion** (1.00<!--= language("helion_tiles", 128, 0):.2f -->) are compiled by Triton, but the Triton that they generate loads by pointers, not by TMA.
# - **`torch.compile`** (0.30<!--= language("torch_compile", 128, 0):.2f -->) pays for $S$ in HBM, **Numba** (0.02<!--= language("numba_kernel", 128, 0):.2f -->) for fp32 without tensor cores, which in CUDA is rung 04 (0.13<!--= language("04_fa2_fp32", 128, 0):.2f -->).
# - **Rung 32** is at 2.12<!--= language("32_ping_pong", 128, 0):.2f -->. One part of what lies between it and the tile languages, two warpgroups that take turns, none of them lets you say.
#
# Each language got the same effort: `python -m helpers record languages --tune` tries the tiles that its documentation advises, and the best stands in its file, as `TILES`. Helion's own tuner, which searches for minutes, was not asked.
#
# Speed of the kernel isn't all. What does an edit cost until you see its result?

# %%
plot.recorded(languages_timed.STEM, "facts", languages_timed.waits)

# %% [markdown]
# **What to see.** In Triton, cuTile, Gluon, Pallas, Numba and CuTe's Python an edit costs half a second to two, beside at most 1.7 s of importing. CuTe in C++ goes through templates by the thousand, in eight instances of the kernel: its 31<!--= record.load("40_every_language", "facts", record.SHOWN).set_index("language").import_seconds["cute_mma"]:.0f --> s, drawn as import, are nvcc's, and come with every edit. What `torch.compile`, FlexAttention and Helion need goes mostly into importing the compiler, once a session.
#
# How many cases of the check each was held to on the GPU, within its time, and which of them it failed; `ended` says why something wasn't measured. FlexAttention's three are few because each shape is compiled anew; on a CPU, where nothing is compiled, the tests hold it to all:


# %%
def checked(facts):
    with pd.option_context("display.max_colwidth", None):
        display(languages_timed.checked(facts))


plot.recorded(languages_timed.STEM, "facts", checked)

# %% [markdown]
# ## What still hurts
#
# 1. **What can't be said can't be tuned.** In a tile language the step from [12](12_double_buffered.ipynb) to [13](13_tuned.ipynb), which took the maximum out of the loop, can be written. The step to [32](32_ping_pong.ipynb), two warpgroups that take turns, can't: there are no warpgroups to name.
# 2. **What can be said has to be.** The CuTe files stay Ampere's kernel until somebody writes them anew for `wgmma`. The Triton file says `dot`, and gets the instruction that the card has.
# 3. **The edges are yours in every language but FlexAttention.** Lengths that are no multiple of the tile and rows that see no key have lines of their own, and bugs of their own.
#
# How to choose: for a mask or a bias, FlexAttention. For a new algorithm, a tile language. For the last factor on one card, layouts and threads, in C++ or in Gluon. For learning what all of them do underneath: CUDA.
#
# ## Exercises
#
# ### Exercise 40.1 · A mask in two languages
#
# A *sliding window* lets a query see only the last 40 keys up to its own. Put it into two files, NumPy's and PyTorch's `torch_eager` (`languages.region("torch_eager", "kernel")` shows it): each entry names a piece of the causal mask and what to write in its place. The check compares with float64, causal. (Both already have `last`, the last key that each query sees.)

# %%
# Exercise 40.1
in_numpy = {"s[np.arange(j, j + s.shape[1]) > last] = -np.inf": "s[np.arange(j, j + s.shape[1]) > last] = -np.inf"}
in_torch = {"s.masked_fill_(torch.arange(j, j + s.shape[-1], device=q.device) > last, -torch.inf)": "pass"}


# %%
def windowed():
    q, k, v = torch.randn(3, 1, 2, 600, 64)
    at, seen = torch.arange(600)[:, None], torch.arange(600)
    mask = (seen <= at) & (seen > at - 40)
    s = (q.double() @ k.double().mT / 8).masked_fill(~mask, -torch.inf)
    for stem, changes in (("numpy_tiles", in_numpy), ("torch_eager", in_torch)):
        o, _ = languages.variant(stem, changes)(q, k, v, None, True)
        error = (o - s.softmax(-1) @ v.double()).abs().max()
        assert error < 1e-5, f"{stem} is off by {error:.2g}"
    return True


exercise.verify("40.1", windowed)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# In both files the condition becomes an *or* of two: the key is behind `last`, or it is 40 or more before it. A tile may then be hidden wholly; `base` takes care of that. Skipping such tiles is what [20](20_causal_gqa.ipynb) does.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# keys = "np.arange(j, j + s.shape[1])"
# in_numpy = {f"s[{keys} > last] = -np.inf": f"s[({keys} > last) | ({keys} <= last - 40)] = -np.inf"}
# keys = "torch.arange(j, j + s.shape[-1], device=q.device)"
# in_torch = {
#     f"s.masked_fill_({keys} > last, -torch.inf)": f"s.masked_fill_(({keys} > last) | ({keys} <= last - 40), -torch.inf)"
# }
# ```
#
# In Triton it is the same change in the line `sees = sees & …`, and the first loop, which asks for no mask, has to go. In FlexAttention it is `(j <= i) & (j > i - 40)`, and the tiles outside the window are skipped without a further word.
#
# </details>

# %% [markdown]
# ### Exercise 40.2 · Rung 12's wait
#
# [Rung 12](12_double_buffered.ipynb) waits until *all but the n youngest copies* have landed. In which of these languages can that sentence, or one for a single copy, not be said? Put their names into the set. The check looks for a wait for copies in each file; `syncthreads` is none.

# %%
candidates = ["triton_tiles", "cutile_tiles", "gluon_tiles", "pallas_tiles", "cute_dsl", "cute_mma", "numba_kernel"]

# %%
# Exercise 40.2
cannot_wait = set()


# %%
def said():
    texts = {stem: languages.implementation(stem).path.read_text() for stem in candidates}
    waits = {stem for stem, text in texts.items() if re.search(r"cp_async_wait|mbarrier\.wait", text)}
    named = set(cannot_wait)
    assert not (unknown := named - set(candidates)), f"{sorted(unknown)[0]} is none of the candidates"
    assert not (wrong := named & waits), f"look for a wait in {sorted(wrong)[0]}"
    assert named | waits == set(candidates), f"{len(set(candidates) - waits - named)} more"
    return True


exercise.verify("40.2", said)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# A language that has no copy to name has no wait for it. Numba names its copies, but they are ordinary loads and stores, complete when the thread goes on.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# cannot_wait = {"triton_tiles", "cutile_tiles", "pallas_tiles", "numba_kernel"}
# ```
#
# CuTe has `cp_async_wait<n>` in both languages, Gluon an mbarrier for each copy. In Triton and Pallas the compiler places the waits, and you choose only how many stages there are; in cuTile you can only hint how long a load takes. (This file takes Pallas's Triton back end, deprecated since JAX 0.11; the main one is Mosaic GPU, for Hopper and newer, with copies and barriers by name.)
#
# </details>

# %% [markdown]
# ### Exercise 40.3 · The tile in the machine code
#
# A warpgroup's `HGMMA` multiplies 64 rows, 16 deep, by the whole width of the other operand: all $B_c$ keys for $S$, all $d$ columns for $PV$. So for one tile of $B_c$ keys a warpgroup issues $d/16$ for $S$ and $B_c/16$ for $PV$. From the count in the code at $d = 128$, work out how often the body of the loop stands there for Triton ($B_c = 64$) and cuTile ($B_c = 128$). Why that often?

# %%
# Exercise 40.3
bodies = {"triton_tiles": None, "cutile_tiles": None}


# %%
def counted():
    found = code.query("D == 128 and causal == 1").set_index("name")["HGMMA"]
    for name, Bc in (("triton_tiles", 64), ("cutile_tiles", 128)):
        assert bodies[name] == found[name] / (128 / 16 + Bc / 16), f"{name}: not {bodies[name]}"
    return True


exercise.verify("40.3", counted)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# One tile takes $128/16 + 64/16 = 12$ in Triton. What is in the source twice?
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# bodies = {"triton_tiles": 24 / 12, "cutile_tiles": 32 / 16}
# ```
#
# Twice each: once for whole tiles, once with the mask. Gluon's 32 at $B_c = 128$ are also two bodies of 16, though its source has one loop: the first $S$ stands before the loop and the last $PV$ behind it.
#
# </details>

# %% [markdown]
# Where you stand:

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Which five decisions does a GPU kernel need, and which does Triton leave to you?</summary>
#
# Tile, copy, wait, registers, overlap. Triton leaves you the tile, of the copy whether to name a descriptor, and of the overlap a number of stages.
#
# </details>
# <details><summary>2. Why do the tile languages get wgmma on Hopper while the CuTe files don't?</summary>
#
# A tile language says "product", and its compiler chooses the card's instruction. A CuTe atom is an instruction by name.
#
# </details>
# <details><summary>3. Which kinds of bugs can't be written in a tile language, and which can?</summary>
#
# Races, missing barriers and wrong lanes can't. A maximum that starts at zero, a sum that isn't rescaled, a tail that isn't masked can.
#
# </details>
# <details><summary>4. Your kernel needs a bias that depends on the distance of query and key. In which language do you begin?</summary>
#
# FlexAttention: the bias is a function of a score and its indices, and nothing else of the kernel changes.
#
# </details>
