# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 12 · Double-buffered: copy while you multiply
#
# [← 11 · Swizzled](11_swizzled.ipynb) | [12_double_buffered.cu](../kernels/12_double_buffered.cu) | [glossary](glossary.md) | [13 · Tuned →](13_tuned.ipynb)
#
# **After this notebook you can**
# - write a software pipeline with `cp.async`, its groups and its waits, and say what each wait promises and to whom;
# - count barriers, and argue that one per tile is enough;
# - read from a timeline where a kernel waits;
# - find a missing wait even when the output happens to be right.
#
# **Time** 50 minutes, without the tasks.
#
# **Needs** [11 · Swizzled](11_swizzled.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: order the next tile before you start on this one, and let it arrive meanwhile in a second buffer.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd
import torch

from helpers import blank, check, draw_mma, exercise, hint, load, plot, predict, progress, record, rung, sass
from helpers import show, units, xray

torch.manual_seed(0)
kernel = load("12_double_buffered")
device = kernel.device

# %% [markdown]
# ## The problem
#
# In notebook 11's kernel a warp does one thing after the other:

# %%
text = (
    "In each tile the warp first waits while the tile is copied, then does product, softmax, product. Nothing overlaps."
)
draw_mma.timeline(draw_mma.prescribed(copied_ahead=False), "11: what one warp does, three tiles", "", text)

# %% [markdown]
# **What to see.** A tile begins with a wait. It holds the loads of K and V into registers, the time until they arrive, the stores to shared memory and the barrier, which waits for the slowest thread. Only then the two products and the softmax between them can run. (The picture shows the order that the program prescribes; the lengths are made up. Measured ones follow below.)
#
# The waits are not all lost: several CTAs share an SM, and while one waits another may multiply. But nothing makes sure that it does.

# %% [markdown]
# ## 1 · cp.async
#
# In notebook 11 a value travels from HBM into a *register* and from there to shared memory. The register is what one waits for: an instruction that uses it stalls until it is filled. Since Ampere there is a way around it:
#
# [`cp.async.cg.shared.global [to], [from], 16, bytes;`](glossary.md#cpasync)
#
# copies 16 bytes from global to shared memory in the background. (`.cg`: cached in the L2 only, past the L1.) It needs no register for the data, and the thread goes on at once. If `bytes` is 0, nothing is read and 16 zeros are written: that is how the tail of the last tile is filled.
#
# Before the data is used, the thread has to wait for it after all. Its copies are counted in [**groups**](glossary.md#commit-group):
#
# | instruction | what it does |
# |---|---|
# | `cp.async` | starts one copy |
# | `cp.async.commit_group` | closes a group: all copies this thread started since the last commit |
# | `cp.async.wait_group n` | waits until at most the $n$ youngest groups of this thread are still under way |
#
# Two things are easy to get wrong. `wait_group` is about *this thread's* copies only: to read what other threads have copied, one needs a barrier after it. And until the wait, the copy is [in flight](glossary.md#in-flight): whoever reads its destination gets old bytes, new bytes, or some of each.

# %% [markdown]
# ## 2 · Two buffers, one barrier
#
# With two buffers for K and V, called [**stages**](glossary.md#stage), the loop becomes
#
# ```
# fetch tile 0 into stage 0
# for each tile j:
#     wait for tile j            # this thread's copies have landed
#     barrier                    # all threads' copies have; and all are done with tile j - 1
#     fetch tile j + 1 into the stage of tile j - 1
#     S = Q K^T, softmax, O += P V   from the stage of tile j
# ```
#
# There is one barrier per tile, where notebook 11 has two. It does two jobs at once. *After* it, every thread's part of tile $j$ has landed, because each waited for its own part before. And *before* it, every warp has finished with tile $j - 1$, because the products with that tile precede this barrier in program order. So the stage of tile $j-1$ may be overwritten, and the next fetch does just that.
#
# Put the fetch *before* the barrier, and a fast warp overwrites the tile that a slow one is still reading. No compiler warns of it. We will try it below.

# %% [markdown]
# ## The kernel

# %%
show.region("12_double_buffered", "tile")

# %%
show.region("12_double_buffered", "load_tile")

# %%
show.region("12_double_buffered", "pipeline")

# %% [markdown]
# A thread's copies for a pair of tiles K, V make one group. In the loop at most `stages - 1` tiles are under way, so the wait's $n$ is `stages - 2`: here 0. From three stages on (exercise 12.4) the count needs an empty group per tile past the last, which `fetch` commits. Q needs shared memory only until its fragments are in registers, so it borrows the last stage.

# %%
show.diff("11_swizzled", "12_double_buffered")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# ## Predict, then measure
#
# What becomes of the waits? In the order that the program prescribes:

# %%
text = "The first tile is waited for. From then on each tile is on its way while the one before is multiplied, and the warp does not wait."
draw_mma.timeline(draw_mma.prescribed(copied_ahead=True), "12: the same three tiles", "", text, until=27)

# %% [markdown]
# **What to see.** The same scale as above. Compare the blue lane. In 11, a tile is on its way only while the warp waits for it. Here it has been ordered before the products of the tile before, and has all of their time to arrive. What is left is the wait for the first tile, the barriers, and whatever part of a copy takes longer than a tile's work.
#
# The real lengths, in clocks: a copy of each kernel, with one more line at each phase of the tile loop, notes the SM's clock (`helpers/measure/timeline.py`). The compiler may move instructions across these notes, and a note takes time itself (the gaps in the pictures), so the borders are approximate. Recorded at $d = 64$, where three CTAs share an SM: while a phase of one warp lasts, eleven others take turns. The warp drawn here waits for 31<!--= 100 * tile("11", "wait") / tile("11", "all"):.0f --> % of its time in 11. And in 12?


# %%
def lanes(samples, tiles=(16, 17, 18)):
    """The phases of warp 0 during these tiles, as swim lanes, in clocks from the first of them on."""
    own = samples[samples.warp == 0]
    shown = own[own.tile.isin(tiles) & (own.kind != "load")]
    start, stop = shown.begin.min(), shown.end.max()
    times = own[(own.begin < stop) & (own.end > start)]
    times = times.assign(begin=times.begin.clip(start) - start, end=times.end.clip(upper=stop) - start)
    return times.assign(lane=times.kind.map({"load": "copy"}).fillna("warp")).sort_values("lane", kind="stable")


# %%
waits = ...  # your prediction: for what percentage of its time the same warp of rung 12 waits

# %% tags=["reveal"]
for stem in ("11_swizzled", "12_double_buffered"):
    samples = record.load(stem, "timeline")
    clocks = record.per_tile(samples)
    share = clocks["wait"] / clocks["all"]
    title = f"{stem}, three tiles, d = 64, fp16 · {samples['device'].iloc[0]}"
    text = f"the warp waits for {share:.0%} of the time of all its tiles"
    display(draw_mma.timeline(lanes(samples), title, "clocks of the SM", text, until=11000))
predict(waits, 100 * share, "percent of the time of all its tiles")

# %% [markdown]
# **What to see.** The same scale in both. The waits have shrunk to less than half, and each tile takes fewer clocks: 3400<!--= round(tile("11", "all"), -2):.0f --> on average in 11, 2600<!--= round(tile("12", "all"), -2):.0f --> in 12. They haven't gone: what is called a wait in 12 includes the barrier, at which the slowest warp is awaited, and the instructions that order the next copies. The copy lane shows the time that a tile's copy *has*, from its order to its use: in 12 a whole tile's work. (When it lands can't be seen.)

# %% [markdown]
# ### What it does to the machine code
#
# The copies no longer pass through registers. Then the instructions that carried them should be gone: `LDG`, the load from global memory into a register, and `STS`, the store into shared memory. In their place comes `LDGSTS`, which is `cp.async`. How many of them stand in the loop at $d = 64$, where 128 threads copy K and V of 64 keys, 16 bytes at a time? And does a thread need more registers than in 11, or fewer?

# %%
copies = ...  # your prediction: LDGSTS in the tile loop at d = 64
registers = ...  # your prediction: "more" or "fewer"

# %% tags=["reveal", "raises-exception"]
names = ["11_swizzled", "12_double_buffered"]
predict(copies, int(sass.opcodes(names[1], D=64, loop=True)["LDGSTS"]), "LDGSTS in the loop")
sass.compare(*names, D=64, loop=True)

# %% [markdown]
# **What to see.** The tile loop at $d = 64$, instructions as they stand in the code. Eight `LDG` and eight `STS` became eight `LDGSTS`, one of two barriers (`BAR`) is gone, and with them instructions that cleared and moved the registers in between (`CS2R`, `MOV`). The products (`HMMA`), the reads of fragments (`LDSM`) and the exponentials (`MUFU`) are the same. (The compiler put in the three `LDS`; their target is the zero register `RZ`, so what they read is discarded.) The registers:

# %% tags=["reveal", "raises-exception"]
table = sass.table(*names).set_index(["rung", "kernel"])
at64 = table.xs("fa2_mma<64, fa::fp16>", level="kernel")["registers"]
predict(registers, "more" if at64[names[1]] > at64[names[0]] else "fewer", "registers at d = 64")
table

# %% [markdown]
# In 11, the registers that carried a tile were needed only while $S$ and $P$ did not exist yet, so dropping them saves none. The addresses cost more than before: in 11 a tile lies at a place that the compiler knows, here at one that depends on the stage. At $d = 128$ the compiler was also allowed more: `__launch_bounds__(threads, CTAs per SM)` at the head of the kernel tells it how many CTAs have to fit at once, and two instead of three leave a thread 255 registers instead of 168.

# %% [markdown]
# ### What it brings
#
# How many times as fast as 11 is it at $d = 128$? The budget of notebook 11 bounds the gain: at $d = 64$ rung 11 took twice as long as its longest unit.

# %%
faster = ...  # your prediction: times as fast as rung 11, d = 128, fp16, N >= 1024

# %% tags=["reveal"]
headline = pd.concat([record.headline(record.medians(record.load(name))) for name in names])
ours = headline[(headline.name == headline.rung) & (headline.Nq >= 1024)]
table = ours.groupby(["dtype", "D", "name"]).tflops.mean().unstack()
table["12 / 11"] = table["12_double_buffered"] / table["11_swizzled"]
predict(faster, table["12 / 11"]["fp16", 128], "times as fast")
table.round(2)

# %% tags=["reveal", "raises-exception"]
budget = units.table(names, D=128, rows=16)
units.draw(budget, "16 query rows × 64 keys, d = 128 · counted; took: NVIDIA H200")

# %% [markdown]
# **What to see.** The budget of notebook 10: clocks of one SM that each of its units is busy with a warp's 16 rows and 64 keys. Only the issue slots have a shorter bar. The gain is in the orange line: the warp no longer waits while a tile is copied. The kernel now takes less than one and a half times as long as its longest unit, shared memory.

# %% [markdown]
# ### A wait too few
#
# `wait_group 1` instead of `wait_group 0` lets the youngest group stay under way, and that is the tile about to be read. On a GPU the copy has often landed by then, and the output is right: a bug that no test of the output finds for certain. The emulator lets a copy land as late as the program permits, and the X-ray reports every read of a copy in flight.

# %%
source = rung("12_double_buffered")
late = load(
    source=source.replace("cp_async_wait<stages - 2>();", "cp_async_wait<stages - 1>();"), device="cpu", quiet=True
)
small = [torch.randn(1, 1, 256, 64).half() for _ in range(3)]
rays = xray(late, *small)
print(rays.report(rays.findings[0]))

# %% [markdown]
# And the fetch before the wait and the barrier, the race of section 2 (with one group more under way, the wait allows one more):

# %%
fetch = "    fetch(j0 + (stages - 1) * Bc, (stage + stages - 1) % stages);\n"
wait = "    fa::cp_async_wait<stages - 2>();"
early = source.source.replace(fetch, "").replace(wait, fetch + wait.replace("stages - 2", "stages - 1"))
rays = xray(load(source=early, device="cpu", quiet=True), *small)
print(rays.report(next(finding for finding in rays.findings if finding.kind == "race")))

# %% [markdown]
# The first victim is Q. It has borrowed the last stage, and the fetch of the first turn overwrites it while a slow warp still loads its fragments. (The report calls the place `K_smem`, its name in the loop.) In later turns it happens to K and V in the same way.

# %% [markdown]
# ## Beside its peers

# %%
samples = record.load("12_double_buffered")
plot.ratio(samples, "12_double_buffered", ["SDPA FLASH", "SDPA CUDNN"])

# %% [markdown]
# **What to see.** 0.93<!--= ratio("12", "FLASH", 64):.2f --> of FLASH's speed at $d = 64$, 0.88<!--= ratio("12", "FLASH", 128):.2f --> at $d = 128$. cuDNN, which uses Hopper's own instructions (notebook 30), is still far ahead.

# %% [markdown]
# ## What still hurts
#
# 1. **Bytes per product.** A warp reads all of K and V for its 16 query rows. With 32 rows, each fragment would serve two products: half the wavefronts per `mma`.
# 2. **Instructions around the products.** Addresses, conversions, the rescaling of $O$, the multiplication by the scale: none of them is a product, and they take issue slots.
# 3. **A barrier** for the whole CTA in every tile.
#
# With these instructions there is no single idea left that doubles the speed. Notebook 13 takes five small ones, each a file of its own.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a part of the kernel. Type it into the `%%region` cell, below the form: the cell compiles the rung with your text in place of its own, checks all cases, X-rays it and, on a GPU, times it beside the rung. `from helpers import tasks; tasks("12")` lists all tasks; `python -m helpers exercise new 12 pipeline` writes a file for your editor.

# %%
# %load_ext helpers

# %% [markdown]
# ### Task 12.1 · An asynchronous copy
#
# Write `load_tile` with `cp.async`. It teaches what an asynchronous copy needs from each thread, and how the rows past the end become zeros without being read. Judged: right in all cases, no finding of the X-ray.

# %%
blank("12", "load_tile")

# %% tags=["active-ipynb"]
# %%region 12 load_tile -> my_load_tile
# // type here

# %%
hint("12.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `load_tile` of [12_double_buffered.cu](../kernels/12_double_buffered.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Task 12.2 · The pipeline's start
#
# Write `fetch`, the copies of $Q$ and those of the first tiles. It teaches how groups are counted: from three stages on, the waits in the loop are right only if every call of `fetch` commits one. Judged case by case, the easy ones first; the X-ray finds reads in flight.

# %%
blank("12", "pipeline")

# %% tags=["active-ipynb"]
# %%region 12 pipeline -> my_pipeline
# // type here

# %%
hint("12.2")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: region `pipeline` of [12_double_buffered.cu](../kernels/12_double_buffered.cu), shown under "The kernel".
#
# </details>

# %% [markdown]
# ### Exercise 12.4 · Three stages
#
# The stage count is a constant. Predict for `stages = 3` at $d = 128$: how many bytes of shared memory does a CTA need, and how many such CTAs fit on an SM of an H200, which has 228 KB, when each CTA takes 1 KB on top? (Registers may allow fewer.)

# %%
# Exercise 12.4
smem_bytes = 65536
ctas = 3


# %%
def three():
    assert smem_bytes == 3 * 2 * 64 * 128 * 2, f"{smem_bytes} bytes: K and V of each stage are 64 rows of 128 numbers"
    assert ctas == 228 // (smem_bytes // 1024 + 1), f"not {ctas} CTAs"
    run = load(source=source.replace("int stages = 2;", "int stages = 3;"), quiet=True)
    return check(run).ok


exercise.verify("12.4", three)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Three stages, each a tile of K and one of V: 64 rows of 128 elements of 2 bytes.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# smem_bytes = 3 * 2 * 64 * 128 * 2
# ctas = 228 // (96 + 1)
# ```
#
# 96 KB, and two CTAs. With two stages it would be three CTAs by shared memory; but at $d = 128$ the registers, 214 for each of 128 threads, allow only two in any case. So here a third stage costs no CTA. Whether it brings anything has to be measured.
#
# </details>

# %% [markdown]
# ### Exercise 12.5 · One job of two
#
# The barrier in the loop has two jobs, and `wait`, `barrier`, `fetch` stand in the one order that does both. Put the three lines into an order in which the *first* job is still done, so that nobody reads a tile that has not landed, and the *second* is not: a stage is overwritten while others read it. The X-ray calls that a "race"; it says "in flight" as well where a copy is still landing on what a slow warp reads. Find the order with races alone: no copy may be under way at the barrier.

# %%
# Exercise 12.5
order = ["wait", "barrier", "fetch"]


# %%
def races_alone():
    lines = {"wait": wait, "barrier": "    __syncthreads();", "fetch": fetch.rstrip()}
    assert sorted(order) == sorted(lines), "the three lines, each once"
    text = source.source
    loop = text[text.index(wait) : text.index(fetch) + len(fetch)]
    new = "\n".join(lines[name] for name in order) + "\n"
    kinds = {f.kind for f in xray(load(source=text.replace(loop, new), device="cpu", quiet=True), *small).findings}
    assert kinds, "this order is right: nothing is found"
    assert "in flight" not in kinds, "a copy is still under way where somebody reads"
    return kinds == {"race"}


exercise.verify("12.5", races_alone)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# If the wait comes after the fetch, it waits for the tile that was just ordered as well.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# order = ["fetch", "wait", "barrier"]
# ```
#
# All copies have landed before the barrier, so nothing is read in flight. But the fetch comes before the barrier, and overwrites the stage that slower warps still read. (It would be slow as well: no copy runs beside the products any more.) With wait, fetch, barrier nobody reads a tile that has not landed either, but the next copy lands on $Q$ while slow warps still read it.
#
# </details>

# %% [markdown]
# ### Task 12.9 · The whole kernel
#
# Write kernel and launcher from the [header block](../kernels/12_double_buffered.cu). It teaches where waits and barriers have to stand. Judged: right, no race and no read in flight; its counts stand beside the rung's.

# %%
blank("12", "kernel")

# %% tags=["active-ipynb"]
# %%region 12 kernel -> my_kernel
# // type here

# %%
hint("12.9")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# The rung's own: [12_double_buffered.cu](../kernels/12_double_buffered.cu) behind its header block. Another design that is right and free of findings solves the task just as well.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
#
# <details><summary>1. What does wait_group promise, and to whom?</summary>
#
# That all but the n youngest groups of the calling thread have landed, visible to that thread. Others need a barrier.
#
# </details>
# <details><summary>2. Which two jobs does the one barrier per tile do?</summary>
#
# It makes everybody's part of the tile visible to all, and it makes sure that nobody is still reading the stage that the next fetch overwrites.
#
# </details>
# <details><summary>3. Why commit an empty group past the last tile?</summary>
#
# With two stages nothing depends on it: the wait is for all groups. From three on, the number of groups under way is then the same in every turn, and the constant in wait_group keeps its meaning.
#
# </details>
# <details><summary>4. Your kernel forgets a wait and gives the right output on the GPU, a thousand times. Is it right?</summary>
#
# No. The copies happened to land in time. Another card, another clock or another neighbour changes that; the X-ray reports it every time.
#
# </details>
