# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 92 · The X-ray against hardware
#
# **After this notebook you can**
# - explain how the X-ray knows what a kernel does to memory without a GPU, from the access of one lane to a race;
# - do its central computation yourself: from 32 addresses to wavefronts and sectors;
# - judge where its figures are those of the hardware, where they can't be, and why.
#
# **Time** 45 minutes.
#
# **Needs** [00 · Start here](00_start_here.ipynb) for the emulator and [04 · FlashAttention-2](04_fa2_fp32.ipynb) for a kernel; [91 · The bug museum](91_bug_museum.ipynb) for what it finds; [11](11_swizzled.ipynb) and [12](12_double_buffered.ipynb) for swizzles and `cp.async`, and [30](30_tma_wgmma.ipynb) to [33](33_backward_wgmma.ipynb) for what is said of Hopper. No GPU: the counters were recorded on one.
#
# **The idea in one line**: an instrument is worth as much as its calibration.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
from pathlib import Path

import pandas as pd
import torch

import helpers
from helpers import agreement, banks, draw_proof, exercise, load, museum, patterns, record, rung, sanitize, show, xray
from helpers.emulator import launcher

DEVICE = "nvidia-h200"  # whose records this notebook reads

# %% [markdown]
# ## How it works, in one page
#
# The emulator (notebook 00) compiles the `.cu` with the host's C++ compiler and runs it thread by thread. To see every access it borrows a mechanism that compilers have for another purpose: with `-fsanitize=thread` they put a call before each load and store, meant for a library that looks for races among CPU threads. The emulator brings its own functions of these names.


# %%
def own(file, start, lines):
    """`lines` lines of one of the emulator's files, from the first one that begins with `start`."""
    text = (Path(helpers.__file__).parent / "emulator" / "runtime" / file).read_text().splitlines()
    first = next(n for n, line in enumerate(text) if line.startswith(start))
    return show.Listing(f"emulator/runtime/{file}", tuple((n + 1, " ", text[n]) for n in range(first, first + lines)))


print([flag for flag in launcher.KERNEL_FLAGS if "sanitize" in flag])
own("memory.cpp", "  void __tsan_read##n", 2)

# %% [markdown]
# So each lane leaves a stream of accesses: which instruction, which address, how many bytes. Before it happens an access is held against the tensors and the shared memory it may touch; that is how an access out of bounds is *stopped*.
#
# **From lanes to requests.** A GPU executes one instruction for 32 lanes at once, and what memory sees is one *request* of a warp. Here the lanes ran one after the other, so their streams have to be put together again:

# %%
own("trace.cpp", "// Merges", 6)

# %% [markdown]
# **From requests to cost.** Global memory is moved in *sectors* of 32 bytes: a request costs as many as it touches. Shared memory has 32 *banks* of 4 bytes, and one *wavefront* serves one word of each:

# %%
own("trace_cost.cpp", "// Shared memory has", 4)

# %% [markdown]
# One request in slow motion. A column of a matrix whose rows are 128 bytes long, 4 bytes per lane, and the same with rows of 132:

# %%
for row in (128, 132):
    addresses = [lane * row for lane in range(32)]
    used = sorted({address // 4 % 32 for address in addresses})
    turns = banks.wavefronts(addresses, width=4)
    print(f"rows of {row} bytes: banks {banks.runs(used)}, {len(turns)} wavefront{'s' if len(turns) > 1 else ''}")

# %% [markdown]
# **Races.** Two accesses to one place by different threads, one of them a write, and nothing that orders them. Each thread has a clock that ticks whenever it synchronises, and keeps up to which time it *knows* each other thread: a barrier makes those that meet there know what the others know. Every two bytes of shared memory remember who wrote them last and who read them since, with a stamp of that thread's clock. Two accesses are in order if the later thread knows the earlier one's stamp (`all`: of a warp whose lanes met):

# %%
own("race.cpp", "// Does what `other`", 5)

# %% [markdown]
# What makes threads know each other is what the CUDA C++ Programming Guide and the PTX ISA say does: `__syncthreads()`, `__syncwarp()` for the lanes it names, named barriers, mbarriers for those who wait after those who arrived. A shuffle orders no memory.

# %% [markdown]
# **Copies in flight.** A `cp.async` is issued now and lands later; between the two its target belongs to nobody:

# %%
own("async_copy.cpp", "// A copy lands", 2)

# %% [markdown]
# That is all. Nothing in it is a measurement, and nothing depends on the machine or on the order in which lanes happened to run: the same counts everywhere. What has to be shown is that they are also *right*.

# %% [markdown]
# ## Against the counters
#
# NVIDIA's profiler `ncu` reads counters in the hardware: sectors, requests, wavefronts, bank conflicts. Three comparisons. **Single accesses**: one warp, one instruction, and hundreds of patterns of addresses, chosen to bring out every rule (strides, broadcasts, pairs, permutations, half-empty warps, swizzles, random ones). **Micro-kernels**: a few lines each, with loops, divergence and function calls, whose counts were also worked out by hand (`helpers/evidence/microkernels.py`). And **whole kernels**: every rung at $B = 1$, $H = 2$, $N = 256$, $d = 64$, and those for 16-bit inputs at $d = 128$ too.
#
# **Predict**: what share of the points will lie exactly on the diagonal? Which kind of count do you trust least?

# %%
panels = {}
for title, kind in {"single accesses": "patterns", "micro-kernels": "microkernels"}.items():
    try:
        panels[title] = agreement.singles(kind, DEVICE)
    except LookupError:
        print(f"The counters of {title} have not been recorded on this device yet.")
panels["whole kernels"] = kernels = agreement.rungs(DEVICE)

# %%
device = record.about("04_fa2_fp32", "counters", device=DEVICE)["device"]
draw_proof.predicted_and_counted(panels, f"The X-ray's counts and ncu's · {device}")

# %% [markdown]
# **What to see.** One point per kernel and counter (a larger one where several coincide; counters that are zero on both sides are left out). On the line the X-ray's count *is* the hardware's, digit for digit, up to millions. Ringed are those that are not; each has its reason in a table below. At the lower edge stand conflicts of `cp.async` that this counter doesn't see (those of `cp.async.cg`, which copies past the L1; `cp.async.ca` goes through it) or doesn't call so, and in the middle panel those of atomics that `nvcc` has merged into one. At the left edge stand instructions that no lane executes, and in the right panel also conflicts that are no matter of addresses.
#
# Per rung, in percent of all that the hardware counted: all differences (`percent`), what is left of them beside what the machine code accounts for to the digit (`rest_percent`), and what nobody has explained. `nvcc`'s part can be several percent; the rest is at most 1.5:

# %%
agreement.totals(kernels).round(2)

# %% [markdown]
# Every difference, hardware − X-ray, at both head dimensions (–: not recorded), by its reason. A reason is good for its number only: were the X-ray's count one more or one less, the tests of this table would fail.


# %%
def reasons(frame):
    """A table whose first column is text to read."""
    look = "text-align: left; vertical-align: top; max-width: 32em; white-space: normal"
    return frame.style.format(precision=0, na_rep="–").set_table_styles([{"selector": "th.row_heading", "props": look}])


keys = ["name", "kernel", "metric"]
both = kernels.assign(d="d = " + kernels["D"].astype(str)).pivot(index=keys, columns="d", values="difference")
why = kernels[kernels["why"] != ""].groupby(keys)["why"].first()
table = both.loc[why.index].assign(why=why).set_index("why", append=True).reorder_levels(["why", *keys]).sort_index()
reasons(table[["d = 64", "d = 128"]].rename_axis(columns=None))

# %% [markdown]
# And of the small kernels, every reason why a count is not the hardware's, with the number of counts it explains:

# %%
small = [frame for title, frame in panels.items() if title != "whole kernels"]
if small:
    differ = pd.concat(small).query("difference != 0")
    differ = differ.groupby("why").agg(counts=("difference", "size"), example=("name", "first"))
    display(reasons(differ.sort_values("counts")))

# %% [markdown]
# ### A difference, explained
#
# `04_fa2_fp32` sends $O$ out by `store4`: 16 bytes per lane, two stores for each of a thread's 8 rows. The hardware counts more store requests than the X-ray, and more sectors. What did `nvcc` make of the 16 stores? Its machine code, read without a GPU (opcodes of the kernel for $d = 64$; `.128` is a store of 16 bytes, without a number 4 bytes):


# %%
def stores(stem, kernel):
    """How many instructions that store to global memory the machine code of a kernel has, by width."""
    from helpers import sass

    found = sass.histogram(stem, modifiers=True)[kernel]
    return found[found.index.str.startswith("STG")].to_dict()


try:
    print(stores("04_fa2_fp32", "fa2_fp32<64>"))
except Exception as problem:  # no nvcc on this machine
    print(f"nvcc is not here ({type(problem).__name__}); on another machine: STG.E 40, STG.E.128 8")

# %% [markdown]
# Eight of 16 bytes, and 40 of 4 bytes: 8 of these are LSE's, so 32 stand for the other eight stores of $O$, each cut into four. (Why `nvcc` did that only it knows. In `03_fa1_fp32` it cuts the zeros that $O$ starts with into two of 8 bytes.) A store that is cut in four makes 4 requests instead of 1, and each of them touches the same 16 sectors again. Exercise 92.2 asks whether the two counters agree with this story.
#
# The X-ray's notes say that `nvcc` may *fuse* a thread's neighbouring accesses into wider ones; here it did the reverse. The X-ray counts what the source says.
#
# ### The others
#
# - **Read once.** In `21_split_kv` a `State` is two numbers, which the functions that merge states read one by one, and again each time. 15 loads of 4 bytes in the source are 4 of 8 bytes in the machine code. In numbers that is the largest difference of all rungs; the loads stand behind the loop, once per CTA.
# - **Instructions for nobody.** Before a batch of `cp.async`, `nvcc` puts three loads that no lane executes (`@!PT LDS`). And a store by one thread of the CTA is an instruction in all its warps, if the condition became a predicate and not a branch. `ncu` counts such instructions. They make no request, so the X-ray has none of them.
# - **Where a destination begins.** The copies past the L1 ask the L2 for each 32 bytes of their *destination*; the X-ray counts the source's sectors. In `22_backward_fp32` the two are the same, because the slabs that `cp.async` fills begin at a multiple of 128 bytes: with 48 bytes of something else in front of them, a line of four sectors would be asked for as five.
# - **Time.** Some wavefronts more than the addresses ask for appear where many warps want shared memory at once: none at one $N$, one in a hundred at another, although the addresses are the same. The small kernels, in the two panels on the left, never show them. And the conflicts of `22_backward_fp32`'s 4-byte copies depend on when the lines arrive.
#
# ### What can be compared on Hopper
#
# The counters are those of the pipe that loads, stores, `ldmatrix` and `cp.async` go through. What TMA moves and what `wgmma` reads goes past it, and so do the barriers in shared memory. `30_tma_wgmma` has no counter left but the stores of $O$ and LSE. From `31` on $O$ leaves by TMA, too: what is left to compare are instructions, global requests and sectors, and conflicts. (`stmatrix`, in `33`, is not among the instructions, but its wavefronts are among those of stores: of 56 patterns of it all are equal.)
#
# *Wavefronts* are not compared there. The counter has them, but beside TMA and `wgmma` it isn't one of addresses. In `31` and `32` every load is of one word, by one lane or by all 32, which can only be one wavefront; in `33` it is of 8 bytes per lane, two wavefronts by the X-ray. The counters:

# %%
rows = []
for stem in ("31_warp_specialized", "32_ping_pong", "33_backward_wgmma"):
    for seen in record.load(stem, "counters", device=DEVICE).to_dict("records"):
        if stem[3:] in seen["kernel"]:  # the kernel with wgmma in it
            per_load = seen["shared_load_wavefronts"] / seen["shared_load_instructions"]
            of = {way: seen[f"shared_{way}_conflicts"] / seen[f"shared_{way}_wavefronts"] for way in ("load", "store")}
            rows.append((stem, seen["D"], seen["N"], per_load, of["load"], of["store"]))
columns = ["rung", "d", "N", "wavefronts per load", "conflicts / wavefronts, loads", "conflicts / wavefronts, stores"]
beside_TMA = pd.DataFrame(rows, columns=columns).set_index(["rung", "d", "N"])
beside_TMA.style.format({columns[3]: "{:.2f}", columns[4]: "{:.1%}", columns[5]: "{:.1%}"})

# %% [markdown]
# More wavefronts than the addresses need, and hardly one of the loads' is called a conflict. The stores' share differs from size to size, though the instructions and their places in shared memory are the same: when they come has a part in it. So for these rungs the X-ray's word on bank conflicts (none by loads and stores) is confirmed at $N = 256$ but for a few percent, and its wavefronts are no measure of what passes through shared memory. (`stmatrix`, in `33`, is among the stores.)

# %% [markdown]
# ## Where it can't know
#
# **Caches.** A request of 32 sectors may find all of them in the L1 or L2 cache. What reaches HBM is another number, and it depends on what else runs. The bytes requested by all threads, and those that moved between HBM and the chip, of the recorded runs:

# %%
rows = []
for stem in ("01_naive", "03_fa1_fp32", "04_fa2_fp32"):
    seen = record.load(stem, "counters", device=DEVICE).groupby(["H", "N"], as_index=False).sum(numeric_only=True)
    asked = 32 * (seen["global_load_sectors"] + seen["global_store_sectors"])
    moved = seen["dram_read_bytes"] + seen["dram_write_bytes"]
    rows.append(
        pd.DataFrame(
            {"kernel": stem, "N": seen["N"], "H": seen["H"], "requested MiB": asked / 2**20, "HBM MiB": moved / 2**20}
        )
    )
caches = pd.concat(rows).assign(share=lambda t: t["HBM MiB"] / t["requested MiB"])
caches.set_index(["kernel", "N", "H"]).round(3)

# %% [markdown]
# Between one part in a hundred and nearly half: nobody reads that off the source. So the X-ray says *requested*, and leaves HBM to the profiler.
#
# **Registers.** A variable that finds no register is spilled to memory, and every access to it is a load or a store that no line of the source contains. The compiler tells: `sass.resources` needs nvcc, no GPU.
#
# The same goes for a thread's own arrays: loads and stores of registers are held against nothing. What is held against the array's length is an *index* in brackets behind its name (the compiler puts that check in, by `-fsanitize=bounds`). One step too many in `04_fa2_fp32`, where O is rescaled:

# %%
too_far = rung("04_fa2_fp32").replace("c < 8; ++c) O_reg[r][c] *= alpha", "c <= 8; ++c) O_reg[r][c] *= alpha")
kernel = load(source=too_far, device="cpu", quiet=True)
print(xray(kernel, *(torch.randn(1, 1, 64, 64) for _ in range(3))).findings[0])

# %% [markdown]
# Through a pointer into the array, or by a reference to the element just behind its end (`f(O_reg[8])`), such an access is not seen: it goes to the thread's other variables, as it may on a GPU. Behind the arrays of a kernel the compiler keeps a mark (`-fstack-protector`): a store that goes far enough to change it is reported when the kernel ends, as a `local array overrun` with the line of the closing brace. One of the broken variants of `22_backward_fp32` (below) loads 64 numbers too many into a row of registers, by `fa::load4(b_reg + c, …)`:

# %%
[too_wide] = sanitize.chosen(["22.bound-too-wide.4"])
kernel = load(source=too_wide.source, device="cpu", quiet=True)
[inputs] = too_wide.inputs()
print(xray(kernel, *inputs, **too_wide.options).findings[0])

# %% [markdown]
# **TMA and wgmma.** In what portions they go to shared memory is not known, and no counter tells: no wavefronts and no bank conflicts are counted there. And that a register of $A$ changes while a `wgmma` may still be reading it is not noticed.
#
# **Time, occupancy.** How many blocks share an SM, which instruction waits for which: none of it is a property of the addresses. A wavefront is work; whether anybody waits for it is another question.
#
# **The last digits.** The emulator adds the products of an `mma.sync` in fp32, one after the other. How tensor cores add, in which order and with how many bits, is not documented. Results agree up to rounding, not bit for bit; the error budget (notebook 90) is made for that.
#
# **What didn't run.** The X-ray follows one execution on one input. A race in a branch that no lane took, a conflict at another $d$, an overrun at another $N$: not seen. Exercise 92.3 makes use of that.

# %% [markdown]
# ## The rule for cp.async
#
# A `cp.async` (`LDGSTS` in machine code) reads global memory and writes shared memory, and banks are wanted at both ends: of a line in the L1 as of a row of shared memory. How it is parted into wavefronts is not documented. The rule that the X-ray uses was found by measuring:

# %%
own("trace_cost.cpp", "// What a cp.async", 7)

# %%
own("trace_cost.cpp", "// Wavefronts of one group of lanes that queue", 24)

# %% [markdown]
# There are two sets of counters. Those of the data pipe, in the figure above, see what goes through the L1: of `cp.async.ca`, 4, 8 and 16 bytes wide (`copy4`, `copy8`, `copy16`), all wavefronts of all patterns are the X-ray's. Fewer of them are called *conflicts* there, because that counter allows a wavefront for every four lines of the source first. Those of the instruction (`smsp__sass_…`) see both kinds. How many patterns have the hardware's count exactly (of `cp.async.cg`, by this rule and the one below together):

# %%
try:
    copies = agreement.copies(DEVICE)
    equal = copies.assign(equal=copies["difference"] == 0, different_counts=copies["hardware"])
    table = equal.groupby(["kernel", "metric"]).agg({"equal": "sum", "name": "size", "different_counts": "nunique"})
    display(table.rename(columns={"equal": "patterns equal", "name": "of", "different_counts": "different counts"}))
except LookupError:
    copies = None
    print("Its measurement has not been recorded on this device yet.")

# %% [markdown]
# For `cp.async.ca` the two sets contradict each other where lanes meet at both ends, in patterns made for the purpose. Three lanes, $a$ and $b$ read one bank, $b$ and $c$ write one: $c$ waits for $b$ and $b$ for $a$. But if $b$ is the first of them, $a$ and $c$ can go together, two wavefronts instead of three. The data pipe counts so; the instruction's counter says three both times, because $b$ has two neighbours. For `cp.async.cg` it is the only one there is, and the X-ray gives its figure. The one pattern that it misses copies nothing but zeros.
#
# What a `cp.async.cg` asked for comes from the L2 later, and is written in *further* wavefronts, which are no conflicts. Number the eight times 16 bytes of a line of the source from 0 to 7, and so those of a row of the banks: a lane moves number $s$ to number $d$. One further wavefront writes
#
# - what comes from one line and goes to one row,
# - if it fills the same halves of its sectors of 32 bytes: both, the lower ones or the upper ones,
# - and if $s \oplus d$ is the same: in its two lower bits for all of it, in the third for the line's even sectors and for its odd ones.
#
# So an XOR swizzle, which is what the rungs' copies have, is free. Of a warp that copies four lines: conflicts, all wavefronts, and the cycles that one instruction takes when eight warps of an SM issue nothing else (`helpers/evidence/patterns_timed.cu`):

# %%
TRIED = {
    "contiguous": "as the lines lie",
    "tile, swizzled": "swizzled by XOR",
    "columns 01452367": "the two inner sectors exchanged",
    "columns 012-4567": "one lane in eight left out",
    "contiguous from the same place": "16 bytes of one line, to all of the four rows",
    "shifted by 16 bytes, from 0": "16 bytes on, into the next row",
    "stride 144": "each lane to a row of its own",
}
if copies is not None:
    of = copies[copies["kernel"] == "cp.async.cg"].pivot(index="name", columns="metric", values=["hardware", "xray"])
    told = {"conflicts": of["hardware", "conflicts"], "wavefronts": of["hardware", "wavefronts"]}
    told["wavefronts by the rules"] = of["xray", "wavefronts"]
    told["cycles"] = record.load("device", "copies", DEVICE).set_index("name")["cycles"]
    told = pd.DataFrame(told).loc[[f"copy16g: {name}" for name in TRIED]].set_axis(TRIED.values())
    display(told.style.format(precision=0).format("{:.1f}", subset="cycles"))

# %% [markdown]
# **What to see.** In the first five, each quarter of the warp writes one row of 128 bytes: seven cycles, in whatever order, whatever the counters say. In the last two it writes several: forty and more. (One row is not enough: with the two halves of the warp 4 KB apart it takes 45.) A count is exact, and still not time.

# %% [markdown]
# ## Beside compute-sanitizer
#
# NVIDIA's `compute-sanitizer` looks for the same kinds of faults on the GPU: *racecheck*, *memcheck*, *initcheck*, *synccheck*. For the comparison the rungs were broken, one place at a time (`helpers/evidence/catalogue.py`), mostly by rule and some by hand: barriers removed or put into a branch, bounds widened, waits for copies loosened, strides, masks, sizes. The same programs went to both, and so did the rungs as they are.

# %%
try:
    both = sanitize.compared(DEVICE).dropna(subset=["xray"])  # what the two sides have looked at
    as_they_are = both["mutant"].str.endswith(".original")
    mutants = both[~as_they_are]
    counts = pd.crosstab(mutants["stem"], mutants["who"])
    display(draw_proof.who_flags(counts, f"Who flags a mutant · compute-sanitizer on {device}, the X-ray anywhere"))
    print(
        f"{len(mutants)} broken programs:", ", ".join(f"{n} {who}" for who, n in mutants["who"].value_counts().items())
    )
    print(f"{as_they_are.sum()} rungs as they are:", both[as_they_are]["who"].value_counts().to_dict())
except LookupError:
    both = None
    print("The two sides have not been recorded on this device yet.")

# %% [markdown]
# *Neither* is agreement, too: at the record's few shapes those mutants do no harm. (For ten of them a test shows that they do at others, and that the X-ray says so.) A tool that runs out of time has said nothing, unless all four do: then the program hangs. What one side says alone is worth reading one by one:

# %%
if both is not None:
    one_sided = both[both["who"].isin(["X-ray alone", "GPU alone"])]
    with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
        display(one_sided.groupby(["who", "why"]).agg(programs=("mutant", "size"), first=("mutant", "first")))

# %% [markdown]
# One of the two that *GPU alone* flags is the rung `33_backward_wgmma`, which isn't wrong; what a tool says of a rung counts for none of its mutants. The other, of `02_online_softmax`, can be put to the test. Write the FMA that `nvcc` makes into the source, and the X-ray flags the same line:

# %%
lanes_write = next(m for m in sanitize.chosen(["02.every-lane-writes"]))
products = "a.l * expf(a.m - m_finite) + b.l * expf(b.m - m_finite)"
fused = lanes_write.source.replace(products, "fmaf(a.l, expf(a.m - m_finite), b.l * expf(b.m - m_finite))")
for text in (lanes_write.source, fused):
    found = xray(load(source=text, device="cpu", quiet=True), torch.randn(3, 1023)).findings
    print("fused:" if text == fused else "as written:", found[0] if found else "no finding")

# %% [markdown]
# Neither of the two is the truth. The sanitizer watches real threads in the order in which they ran, through the machine code that nvcc made; the X-ray watches the source's accesses in an order of its own and asks what *could* have happened. What only one of them says is where to look.

# %% [markdown]
# ## Exercises
#
# ### Exercise 92.1 · Count wavefronts
#
# Write the rule for loads of 4 bytes per lane: how many wavefronts does a request take? `addresses` has 32 byte offsets, `None` where a lane takes no part. Your function is held against all patterns of loads of 4 bytes, by the X-ray's rule.


# %%
# Exercise 92.1
def wavefronts(addresses):
    """Wavefronts of one request of 4 bytes per lane."""
    return 1


# %%
def counted():
    for pattern in patterns.patterns():
        if pattern.op == "load4":
            right = len(banks.wavefronts(pattern.to, 4))
            mine = wavefronts(pattern.to)
            assert mine == right, f"{pattern.name.partition(': ')[2]}: {mine}, and {right} it is"
    return True


exercise.verify(
    "92.1",
    counted,
    hint="lanes that want the same word share it: count different words, bank by bank; the fullest bank decides",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def wavefronts(addresses):
#     words = {address // 4 for address in addresses if address is not None}
#     in_bank = [sum(word % 32 == bank for word in words) for bank in range(32)]
#     return max(in_bank)
# ```
#
# A broadcast is one word, so one wavefront, however many lanes. A stride of 8 bytes is two words in every other bank: two wavefronts.
# </details>

# %% [markdown]
# ### Exercise 92.2 · Does the story hold?
#
# Of the requests by which `04_fa2_fp32` stores 16 bytes per lane (16 sectors each), some number `cut` is cut in four. The recorded differences are in `more_requests` and `more_sectors`. Compute `cut` from each; the story holds if they agree.

# %%
of_04 = kernels[kernels["name"] == "04_fa2_fp32"].set_index("metric")["difference"]
more_requests, more_sectors = int(of_04["global_store_requests"]), int(of_04["global_store_sectors"])
more_requests, more_sectors

# %%
# Exercise 92.2
cut_by_requests = 0
cut_by_sectors = 0

# %%
exercise.verify(
    "92.2",
    lambda: cut_by_requests == cut_by_sectors == more_requests / 3 and cut_by_requests > 0,
    hint="one request becomes four: how many more? And how many sectors more, if each of the four touches all 16?",
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# cut_by_requests = more_requests / 3
# cut_by_sectors = more_sectors / (3 * 16)
# ```
#
# 128 both times, and there are 256 such requests (2 heads, 2 query tiles, 4 warps, 16 stores): half of them, as the machine code says.
# </details>

# %% [markdown]
# ### Exercise 92.3 · A race that isn't seen
#
# The barrier at the end of the loop is missing in this exhibit of notebook 91, and at $N = 256$ the X-ray says so. Find an $N$ at which the same wrong kernel gets a clean X-ray.

# %%
exhibit = museum.EXHIBITS["no_last_barrier"]


def findings(N):
    return xray(exhibit.kernel, *(torch.randn(1, 1, N, 64).half() for _ in range(3))).findings


print("; ".join(f"{f.kind}, lines {f.line} and {f.other_line}" for f in findings(256)))

# %%
# Exercise 92.3
N = 256

# %%
exercise.verify(
    "92.3", lambda: N > 0 and not findings(N), hint="the barrier keeps a tile from being overwritten by the next one"
)

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# N = 64
# ```
#
# With one tile of keys there is no next load. The X-ray says what *this run* did; so look with several tiles, with a partial one, and with more than one block.
# </details>

# %% [markdown]
# ## Self-check
#
# You can now say how the X-ray counts, check a count by hand, and tell which of its figures are the hardware's. Answer before you unfold:
#
# <details><summary>Why do the counts not depend on the order in which lanes ran?</summary>
# Requests are put together from the lanes' streams by a rule that looks only at the streams: deepest call first, then lowest program counter.
# </details>
#
# <details><summary>The profiler counts four times the store requests. Which two suspects does the X-ray exclude?</summary>
# Addresses and lanes taking part: those it has counted itself. What is left is the compiler, which may cut or merge accesses, and spills; both are in the machine code.
# </details>
#
# <details><summary>A kernel's X-ray shows no bank conflicts. Will it be faster than one with some?</summary>
# Not necessarily: it says what work there is, not who waits for it.
# </details>
#
# <details><summary>Why is an access out of bounds reported by line, where a GPU may report it much later or never?</summary>
# The check runs before the access, in the lane that makes it. A GPU only notices addresses that nobody owns, and tells the host after the launch.
# </details>
#
# <details><summary>An X-ray without findings: what has been shown?</summary>
# That in this execution every two conflicting accesses were ordered, and every read found something written. Not that other inputs would do as well.
# </details>
