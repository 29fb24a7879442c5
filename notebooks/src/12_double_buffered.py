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
# **After this notebook you can**
# - write a software pipeline with `cp.async`, its groups and its waits, and say what each wait promises and to whom;
# - count barriers, and argue that one per tile is enough;
# - read from a timeline where a kernel waits;
# - find a missing wait even when the output happens to be right.
#
# **Time** 60 minutes.
#
# **Needs** [11 · Swizzled](11_swizzled.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: order the next tile before you start on this one, and let it arrive meanwhile in a second buffer.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import pandas as pd
import torch

from helpers import check, draw_mma, exercise, load, plot, record, rung, sass, scoreboard, show, timeline, xray

torch.manual_seed(0)
kernel = load("12_double_buffered")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Here is the day of a warp of notebook 11's kernel. A copy of its text, with one more line at each stage of the tile loop, notes the SM's clock (`helpers/measure/timeline.py`). On a GPU the bars are clocks. The emulator has no clock worth the name: there they are places in the *order* of events, those of the other warps counted, and a bar's length says nothing about time.

# %%
B, H, N = (8, 16, 2048) if device == "cuda" else (1, 1, 384)
q, k, v = (torch.randn(B, H, N, 64, device=device).half() for _ in range(3))
unit = "clocks of the SM" if device == "cuda" else "place in the order of events"


def lanes(name, tiles=(1, 2, 3)):
    """One warp's phases during these tiles, as swim lanes."""
    times = timeline.times(name, q, k, v)
    times = times[(times.warp == 0) & times.tile.isin(tiles)]
    times = times.assign(lane=["copy" if kind == "load" else "warp 0" for kind in times.kind])
    times[["begin", "end"]] -= times.begin.min()
    return times.sort_values("lane", kind="stable")


draw_mma.timeline(lanes("11_swizzled"), "11_swizzled, three tiles", unit)

# %% [markdown]
# **What to see.** A tile begins with a wait. In it lie the loads of K and V into registers, the time until they are there, their way into shared memory and the barrier at which the slowest thread is awaited. Only then the two products and the softmax between them can run. The gap before the next tile is the second barrier: nobody may load before all have read. (On a GPU the compiler may move instructions across our notes, so take the borders with a grain of salt.)
#
# The waits are not all lost. Several CTAs share an SM, and while one waits another may multiply. But whether it does is a matter of luck.

# %% [markdown]
# ## 1 · cp.async
#
# In notebook 11 a value travels from HBM into a *register* and from there to shared memory. The register is what one waits for: an instruction that uses it stalls until it is filled. Since Ampere there is a way around it:
#
# `cp.async.cg.shared.global [to], [from], 16, n;`
#
# copies 16 bytes from global to shared memory behind the thread's back. It needs no register for the data, and the thread goes on at once. If $n$ is 0, nothing is read and 16 zeros are written: that is how the tail of the last tile is filled.
#
# What goes on behind one's back has to be asked for one day. A thread's copies are counted in **groups**:
#
# | instruction | what it does |
# |---|---|
# | `cp.async` | starts one copy |
# | `cp.async.commit_group` | closes a group: all copies this thread started since the last commit |
# | `cp.async.wait_group n` | waits until at most the $n$ youngest groups of this thread are still under way |
#
# Two things are easy to get wrong. `wait_group` speaks of *this thread's* copies only: to read what other threads have copied, one needs a barrier after it. And until the wait, the destination is nobody's: whoever reads it gets old bytes, new bytes, or some of each.

# %% [markdown]
# ## 2 · Two buffers, one barrier
#
# With two buffers for K and V, called **stages**, the loop becomes
#
# ```
# fetch tile 0 into stage 0
# for each tile j:
#     wait for tile j            # this thread's part
#     barrier                    # everybody's part; and all are done with tile j - 1
#     fetch tile j + 1 into the stage of tile j - 1
#     S = Q K^T, softmax, O += P V   from the stage of tile j
# ```
#
# There is one barrier per tile, where notebook 11 has two. It does two jobs at once. *After* it, every thread's part of tile $j$ has landed, because each waited for its own part before. And *before* it, every warp has finished with tile $j - 1$, because its products stand above the barrier in program order. So the stage of tile $j-1$ may be overwritten, and the next fetch does just that.
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
# A thread's copies for a pair of tiles K, V make one group. Past the last tile `fetch` commits an empty group: then the $n$ of `wait_group` means the same in every turn of the loop. Q needs shared memory only until its fragments are in registers, so it borrows the last stage.

# %%
show.diff("11_swizzled", "12_double_buffered")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %%
plot.error(record.load("12_double_buffered", "error"))

# %% [markdown]
# ## Predict, then measure
#
# Before you run the next cell: what becomes of the waits in the timeline?

# %%
draw_mma.timeline(lanes("12_double_buffered"), "12_double_buffered, three tiles", unit)

# %% [markdown]
# **What to see.** Compare the blue lane. In 11, a tile is on its way only while the warp waits for it. Here it has been ordered before the products of the tile before, and has all of their time to arrive. What is left of the wait is the barrier, and whatever part of the copy took longer than a tile's work. (When exactly a copy lands, no thread can see: the lane shows the time it has. It begins beside the tile before these three, which is not drawn. On the emulator the wait is not shorter, only in another place: it is the order that counts there.)

# %%
if device == "cuda":
    for name in ("11_swizzled", "12_double_buffered"):
        times = timeline.times(name, q, k, v)
        times = times[times.kind != "load"]  # the copies run beside the warp's own time
        spans = (times.end - times.begin).groupby(times.kind).sum()
        print(f"{name}: {spans['wait'] / spans.sum():.0%} of the time is waiting")
else:
    print("On a GPU this cell says what share of its time each kernel waits.")

# %% [markdown]
# ### What it does to the machine code
#
# The copies no longer pass through registers. Then the instructions that carried them should be gone: `LDG`, the load from global memory into a register, and `STS`, the store into shared memory. In their place comes `LDGSTS`, which is both. Predict the registers, too: more or fewer?

# %%
names = ["11_swizzled", "12_double_buffered"]
sass.compare(*names, D=64, loop=True)

# %% [markdown]
# **What to see.** The tile loop at $d = 64$, instructions as they stand in the code. Eight `LDG` and eight `STS` became eight `LDGSTS`, one of two barriers (`BAR`) is gone, and with them instructions that cleared and moved the registers in between (`CS2R`, `MOV`). The products (`HMMA`), the reads of fragments (`LDSM`) and the exponentials (`MUFU`) are the same. (The three `LDS` are the compiler's own, not ours: they read nothing into no register, between the barrier and the copies.) The registers:

# %%
sass.table(*names).set_index(["rung", "kernel"])

# %% [markdown]
# More, not fewer. The registers that carried a tile were needed only while $S$ and $P$ did not exist yet, so they came for free. The addresses cost more than before: in 11 a tile lies at a place that the compiler knows, here at one that depends on the stage. At $d = 128$ the compiler was also allowed more: two CTAs per SM instead of three leave a thread 255 registers instead of 168.

# %% [markdown]
# ### What it brings

# %%
ladder = ["10_fa2_mma_fp16", *names]
headline = pd.concat([record.headline(record.medians(record.load(name))) for name in ladder])
ours = headline[(headline.name == headline.rung) & (headline.Nq >= 1024)]
table = ours.groupby(["dtype", "D", "name"]).tflops.mean().unstack()
table["12 / 11"] = table["12_double_buffered"] / table["11_swizzled"]
table.round(2)

# %% [markdown]
# 25 to 29 % at $d = 64$ and 38 to 40 % at $d = 128$, for a barrier less and a copy that travels early.
#
# The staircase so far, beside three public kernels on the same card (FLASH and CUDNN timed in the same run, Triton's tutorial kernel from its recorded row):

# %%
board = scoreboard.speeds("fp16")
plot.staircase(board.query("dtype == 'fp16' or kind != 'rung'"))

# %% [markdown]
# ### A wait too few
#
# `wait_group 1` instead of `wait_group 0` lets the youngest group stay under way, and that is the tile about to be read. On a GPU the copy has often landed all the same, and the output is often right: the worst kind of bug. The emulator lets a copy land as late as the program permits, and the X-ray reports whoever reads it in flight.

# %%
source = rung("12_double_buffered")
late = load(
    source=source.replace("cp_async_wait<stages - 2>();", "cp_async_wait<stages - 1>();"), device="cpu", quiet=True
)
small = [torch.randn(1, 1, 256, 64).half() for _ in range(3)]
rays = xray(late, *small)
print(rays.report(rays.findings[0]))

# %% [markdown]
# And the fetch before the barrier, the race of section 2:

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
plot.throughput(samples)

# %%
plot.ratio(samples, "12_double_buffered", ["SDPA FLASH", "SDPA CUDNN"])

# %% [markdown]
# **What to see.** At $d = 64$ the line runs 5 to 9 % below FLASH's, at $d = 128$ an eighth below it. cuDNN, which has other instructions at its disposal (notebook 30), stays far away.

# %% [markdown]
# ## What still hurts
#
# 1. **Bytes per product.** A warp with 16 query rows reads all of K and V for 16 rows. With 32 rows it would read them once for two products each: half the wavefronts per `mma`.
# 2. **Instructions around the products.** Addresses, conversions, the rescaling of $O$, the multiplication by the scale: none of them is a product, and they take issue slots.
# 3. **A barrier** for the whole CTA in every tile.
#
# With these instructions there is no single idea left that doubles the speed. From here on it is many small steps, each measured. That is notebook 13.

# %% [markdown]
# ## Exercises
#
# ### Exercise 12.1 · Three stages
#
# The stage count is a constant. Predict for `stages = 3` at $d = 128$: how many bytes of shared memory does a CTA need, and how many such CTAs fit on an SM of an H200, which has 228 KB, when each CTA takes 1 KB on top? (Registers may allow fewer.)

# %%
# Exercise 12.1
smem_bytes = 65536
ctas = 3


# %%
def three():
    assert smem_bytes == 3 * 2 * 64 * 128 * 2, f"{smem_bytes} bytes: K and V of each stage are 64 rows of 128 numbers"
    assert ctas == 228 // (smem_bytes // 1024 + 1), f"not {ctas} CTAs"
    run = load(source=source.replace("int stages = 2;", "int stages = 3;"), quiet=True)
    return check(run).ok


exercise.verify("12.1", three, hint="stages x (K, V) x rows x columns x 2 bytes")

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
# ### Exercise 12.2 · Which job?
#
# The barrier in the loop has two jobs. When it is missing, the X-ray finds two *kinds* of fault: a "race" is a write and a read that nothing orders; "in flight" is a read of bytes that another thread's `cp.async` may still be writing. Which kind goes with which job? Fill in the table; the check removes the barrier and looks.

# %%
# Exercise 12.2
kind_of = {
    "everybody's part of tile j has landed before anybody reads it": None,
    "everybody is done with tile j - 1 before its stage is overwritten": None,
}


# %%
def both_kinds():
    without = load(source=source.replace("    __syncthreads(); // as above\n", "\n"), device="cpu", quiet=True)
    assert {"race", "in flight"} <= {f.kind for f in xray(without, *small).findings}
    return list(kind_of.values()) == ["in flight", "race"]


exercise.verify("12.2", both_kinds, hint="in which of the two is the copy the first to come, in which the read?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The first job is broken when a read comes too early after a copy. The second is broken when a copy comes too early after a read.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# kind_of = dict(zip(kind_of, ["in flight", "race"]))
# ```
#
# One barrier is missing and both kinds are found, in K, in V and in Q, which shares the last stage.
#
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
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
# So that the number of groups under way is the same in every turn, and the constant in wait_group keeps its meaning.
#
# </details>
# <details><summary>4. Your kernel forgets a wait and gives the right output on the GPU, a thousand times. Is it right?</summary>
#
# No. The copies happened to land in time. Another card, another clock or another neighbour changes that; the X-ray reports it every time.
#
# </details>
