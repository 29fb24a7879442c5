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
# [← 91 · The bug museum](91_bug_museum.ipynb) | [glossary](glossary.md) | [93 · Detective →](93_detective.ipynb)
#
# **After this notebook you can**
# - explain how the X-ray knows what a kernel does to memory without a GPU, from the access of one lane to a race;
# - do its central computation yourself: from 32 addresses to wavefronts and sectors;
# - judge where its counts are those of the hardware, where they can't be, and why.
#
# **Time** 45 minutes.
#
# **Needs** [00 · Start here](00_start_here.ipynb) for the emulator and [04 · FlashAttention-2](04_fa2_fp32.ipynb) for a kernel; [91 · The bug museum](91_bug_museum.ipynb) for what it finds; [11](11_swizzled.ipynb) and [12](12_double_buffered.ipynb) for swizzles and `cp.async`, and [30](30_tma_wgmma.ipynb) to [33](33_backward_wgmma.ipynb) for what is said of Hopper. No GPU: the counters were recorded on one.
#
# **The idea in one line**: trust an instrument as far as it has been compared with another.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
from pathlib import Path

import pandas as pd
import torch

import helpers
from helpers import agreement, banks, checks, draw_proof, exercise, load, museum, patterns, predict, progress
from helpers import record, rung, sanitize, show, xray
from helpers.emulator import launcher

DEVICE = "nvidia-h200"  # whose records this notebook reads

# %% [markdown]
# ## How it works, in one page
#
# The emulator (notebook 00) compiles the `.cu` with the host's C++ compiler and runs it thread by thread. To see every access it uses a compiler option made for another purpose: with `-fsanitize=thread` compilers put a call before each load and store, meant for a library that looks for races among CPU threads. The emulator defines functions of these names itself.


# %%
def own(file, start, lines):
    """`lines` lines of one of the emulator's files, from the first one that begins with `start`."""
    text = (Path(helpers.__file__).parent / "emulator" / "runtime" / file).read_text().splitlines()
    first = next(n for n, line in enumerate(text) if line.startswith(start))
    return show.Listing(f"emulator/runtime/{file}", tuple((n + 1, " ", text[n]) for n in range(first, first + lines)))


print([flag for flag in launcher.KERNEL_FLAGS if "sanitize" in flag])
own("memory.cpp", "  void __tsan_read##n", 2)

# %% [markdown]
# So each lane leaves a stream of accesses: which instruction, which address, how many bytes. Every access is first compared with the tensors and the shared memory it may touch, so one that is out of bounds is *stopped* before it happens.
#
# **From lanes to requests.** A GPU executes one instruction for 32 lanes at once, and memory sees one *request* of a warp. Here the lanes run one after the other, so their streams are merged afterwards:

# %%
own("trace.cpp", "// Merges", 6)

# %% [markdown]
# **From requests to cost.** Global memory is moved in *sectors* of 32 bytes: a request costs as many as it touches. Shared memory has 32 *banks* of 4 bytes, and one *wavefront* serves one word of each:

# %%
own("trace_cost.cpp", "// Shared memory has", 4)

# %% [markdown]
# One request as an example: the lanes read a column of a matrix whose rows are 128 bytes long, 4 bytes per lane, and then the same with rows of 132 bytes.

# %%
at_128 = ...  # your prediction: wavefronts of the request with rows of 128 bytes
at_132 = ...  # and with rows of 132 bytes

# %% tags=["reveal"]
for row, guess in {128: at_128, 132: at_132}.items():
    addresses = [lane * row for lane in range(32)]
    used = sorted({address // 4 % 32 for address in addresses})
    print(f"rows of {row} bytes: banks {banks.runs(used)}")
    predict(guess, len(banks.wavefronts(addresses, width=4)), "wavefronts")

# %% [markdown]
# **Races.** A race is two accesses to one place by different threads, one of them a write, that nothing orders. Each thread has a clock that ticks when it synchronises, and stores up to which time it *knows* each other thread; threads that meet at a barrier share what they know. For every two bytes of shared memory, and for every element of an output, the emulator keeps the last writer and the readers since (of two warps at most), with their clocks. Two accesses are in order if the later thread knows the earlier one's time (`all`: of a warp whose lanes met):

# %%
own("race.cpp", "// Does what `other`", 5)

# %% [markdown]
# Threads learn of each other where the CUDA C++ Programming Guide and the PTX ISA say so: at `__syncthreads()`, `__syncwarp()` for the lanes it names, named barriers, and mbarriers, where waiting threads learn of those that arrived. A shuffle orders no memory.

# %% [markdown]
# **Copies in flight.** A `cp.async` is issued now and lands later; between the two its target belongs to nobody:

# %%
own("async_copy.cpp", "// A copy lands", 2)

# %% [markdown]
# None of this is a measurement, and nothing depends on the machine or on the order in which lanes ran: the counts are the same everywhere. The rest of the notebook asks whether they are also *right*.

# %% [markdown]
# ## Against the counters
#
# NVIDIA's profiler `ncu` reads counters in the hardware: sectors, requests, wavefronts, bank conflicts. Three comparisons. **Single accesses**: one warp, one instruction, and hundreds of patterns of addresses, chosen to bring out every rule (strides, broadcasts, pairs, permutations, half-empty warps, swizzles, random ones). **Micro-kernels**: a few lines each, with loops, divergence and function calls, whose counts were also worked out by hand (`helpers/evidence/microkernels.py`). And **whole kernels**: every rung at $B = 1$, $H = 2$, $N = 256$, $d = 64$, and those for 16-bit inputs at $d = 128$ too.

# %%
equal = ...  # your prediction: what percentage of the whole kernels' counts is exactly the hardware's?

# %%
panels = {}
for title, kind in {"single accesses": "patterns", "micro-kernels": "microkernels"}.items():
    panels[title] = agreement.singles(kind, DEVICE)
panels["whole kernels"] = kernels = agreement.rungs(DEVICE)

# %% tags=["reveal"]
counted = kernels[(kernels["xray"] > 0) | (kernels["hardware"] > 0)]
predict(equal, 100 * (counted["difference"] == 0).mean(), "percent of the counts are equal")
device = record.about("04_fa2_fp32", "counters", device=DEVICE)["device"]
draw_proof.predicted_and_counted(panels, f"The X-ray's counts and ncu's · {device}")

# %% [markdown]
# **What to see.** One point per kernel and counter (counters that are zero on both sides are left out). Filled points lie on the line: the X-ray's count *is* the hardware's, digit for digit, up to millions. Hollow points don't; each has its reason in a table below.
#
# - At the lower edge: conflicts of `cp.async` that this counter doesn't see (`cp.async.cg` copies past the L1, `cp.async.ca` goes through it) or names otherwise; in the middle panel also atomics that `nvcc` has merged into one.
# - At the left edge: instructions that no lane executes; in the right panel also conflicts that don't come from addresses.
# - The group at the upper right of the left panel: most are sectors that `cp.async.cg` asks for (below, "Where a destination begins").
#
# Per rung, in percent of all that the hardware counted: all differences (`percent`), what remains after what the machine code explains to the digit (`rest_percent`), and what is unexplained:

# %%
agreement.totals(kernels).round(2)

# %% [markdown]
# Every difference, hardware − X-ray, at both head dimensions (–: not recorded), by its reason. A test holds each reason to its exact number, except where timing varies it.


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
# For the small kernels, the reasons and the number of counts that each explains:

# %%
small = [frame for title, frame in panels.items() if title != "whole kernels"]
differ = pd.concat(small).query("difference != 0")
differ = differ.groupby("why").agg(counts=("difference", "size"), example=("name", "first"))
reasons(differ.sort_values("counts"))

# %% [markdown]
# ### A difference, explained
#
# `04_fa2_fp32` stores $O$ by `store4`: 16 bytes per lane, two stores for each of a thread's 8 rows. The hardware counts more store requests than the X-ray, and more sectors. What did `nvcc` make of the 16 stores? Its machine code can be read without a GPU (opcodes of the kernel for $d = 64$; `.128` is a store of 16 bytes, without a number 4 bytes):


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
# Eight of 16 bytes, and 40 of 4 bytes: 8 of these are LSE's, so 32 stand for the other eight stores of $O$, each cut into four. A store cut into four makes 4 requests instead of 1, and each touches the same 16 sectors again. Exercise 92.2 asks whether the two counters agree with this. The X-ray counts what the source says.
#
# ### The others
#
# - **Read once.** In `21_split_kv` a `State` is two numbers, which the functions that merge states read one by one, and again each time. 15 loads of 4 bytes in the source are 4 of 8 bytes in the machine code: the largest difference in number, although the loads stand behind the loop.
# - **Instructions without a lane.** Before a batch of `cp.async`, `nvcc` puts three loads that no lane executes (`@!PT LDS`). And a store by one thread of the CTA is an instruction in all its warps, if the condition became a predicate and not a branch. `ncu` counts such instructions; they make no request, so the X-ray doesn't.
# - **Where a destination begins.** Copies past the L1 ask the L2 for each 32 bytes of their *destination*; the X-ray counts the source's sectors. In `22_backward_fp32` the two agree, because the slabs that `cp.async` fills begin at a multiple of 128 bytes.
# - **Time.** Where many warps want shared memory at once, there are more wavefronts than the addresses need: none at one $N$, one in a hundred at another, with the same addresses. The small kernels never show this.
#
# ### What can be compared on Hopper
#
# The counters belong to the pipe of loads, stores, `ldmatrix` and `cp.async`. TMA, `wgmma` and the barriers in shared memory bypass it. `30_tma_wgmma` has only the stores of $O$ and LSE to compare; from `31` on $O$ leaves by TMA too, which leaves instructions, global requests and sectors, and conflicts.
#
# *Wavefronts* are not compared there: beside TMA and `wgmma` the counter depends on more than addresses. In `31` and `32` every load is of one word, by one lane or by all 32, which can only be one wavefront; in `33` most are of 8 bytes per lane, two wavefronts. The counters say:

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
# There are mostly more wavefronts than the addresses need, and few of the loads' are called conflicts. The stores' share differs from size to size with the same instructions and places, so timing has a part in it. At $N = 256$ the counters confirm the X-ray's statement on bank conflicts (none by loads and stores) up to a few percent; their wavefronts don't measure the traffic of shared memory.

# %% [markdown]
# ## Where it can't know
#
# **Caches.** A request of 32 sectors may find all of them in the L1 or L2 cache. What reaches HBM is another number, and it depends on what else runs. The bytes requested by all threads, and those that moved between HBM and the chip, of the recorded runs:

# %%
rows = []
for stem in ("01_naive", "03_fa1_fp32", "04_fa2_fp32"):
    seen = record.load(stem, "counters", device=DEVICE).groupby(["N", "H"]).sum(numeric_only=True)
    asked = 32 * (seen["global_load_sectors"] + seen["global_store_sectors"])
    moved = seen["dram_read_bytes"] + seen["dram_write_bytes"]
    frame = pd.DataFrame({"requested MiB": asked / 2**20, "HBM MiB": moved / 2**20, "share": moved / asked})
    rows.append(pd.concat({stem: frame}, names=["kernel"]))
pd.concat(rows).round(3)

# %% [markdown]
# Between one part in a hundred and nearly half: that can't be read off the source. So the X-ray says *requested*, and leaves HBM to the profiler.
#
# **Registers.** A variable without a register is spilled to memory, and every access to it is a load or a store that no line of the source contains. `sass.resources` shows spills; it needs nvcc, but no GPU.
#
# A thread's own arrays are not traced. But an *index* in brackets behind an array's name is compared with its length (by the compiler's `-fsanitize=bounds`). One step too many in `04_fa2_fp32`, where O is rescaled:

# %%
too_far = rung("04_fa2_fp32").replace("c < 8; ++c) O_reg[r][c] *= alpha", "c <= 8; ++c) O_reg[r][c] *= alpha")
kernel = load(source=too_far, device="cpu", quiet=True)
print(xray(kernel, *(torch.randn(1, 1, 64, 64) for _ in range(3))).findings[0])

# %% [markdown]
# Through a pointer into the array such an access is not seen: it goes to the thread's other variables, as it may on a GPU. Behind the arrays of a kernel the compiler keeps a mark (`-fstack-protector`): a store that changes it is reported when the kernel ends, as a `local array overrun` with the line of the closing brace. A broken variant of `22_backward_fp32` loads 64 numbers too many into a row of registers, by `fa::load4(b_reg + c, …)`:

# %%
[too_wide] = sanitize.chosen(["22.bound-too-wide.4"])
kernel = load(source=too_wide.source, device="cpu", quiet=True)
[inputs] = too_wide.inputs()
print(xray(kernel, *inputs, **too_wide.options).findings[0])

# %% [markdown]
# **TMA and wgmma.** How they divide their accesses to shared memory is not documented, and no counter shows it, so no wavefronts and no bank conflicts are counted there. Nor is it noticed if a register of $A$ changes while a `wgmma` may still be reading it.
#
# **Time, occupancy.** How many blocks share an SM, and which instruction waits for which, doesn't follow from addresses.
#
# **The last digits.** The emulator adds the products of an `mma.sync` in fp32, one after the other. In which order and with how many bits tensor cores add is not documented. Results agree up to rounding, for which the error budget (notebook 90) allows.
#
# **What didn't run.** The X-ray follows one execution on one input. It doesn't see a race in a branch that no lane took, a conflict at another $d$, an overrun at another $N$ (exercise 92.3).

# %% [markdown]
# ## The rule for cp.async
#
# A `cp.async` (`LDGSTS` in machine code) reads global memory and writes shared memory, and needs banks at both ends: of a line in the L1 and of a row of shared memory. How it is divided into wavefronts is not documented. The X-ray's rule was found by measuring (the code is `queue` in `emulator/runtime/trace_cost.cpp`):

# %%
own("trace_cost.cpp", "// What a cp.async", 7)

# %% [markdown]
# Two sets of counters see copies. Those of the data pipe, in the figure above, see what goes through the L1: `cp.async.ca`. They agree with the X-ray in all wavefronts of all patterns. Those of the instruction (`smsp__sass_…`) see `cp.async.cg` too. For `cp.async.ca` the two sets contradict each other in some patterns made for the purpose, with lanes that meet at both ends. Let $a$ and $b$ read one bank, and $b$ and $c$ write one. If $b$ goes first, $a$ and $c$ can go together: two wavefronts, and so the data pipe counts. The instruction's counter says three, because $b$ has two neighbours. The X-ray follows the data pipe for `cp.async.ca`, and for `cp.async.cg` the only counter there is. So in the table of the instruction's counters, about half of the patterns of `cp.async.ca` differ:

# %%
copies = agreement.copies(DEVICE)
equal = copies.assign(equal=copies["difference"] == 0, different_counts=copies["hardware"])
table = equal.groupby(["kernel", "metric"]).agg({"equal": "sum", "name": "size", "different_counts": "nunique"})
table.rename(columns={"equal": "patterns equal", "name": "of", "different_counts": "different counts"})

# %% [markdown]
# The one pattern of `cp.async.cg` that is missed copies only zeros. What a `cp.async.cg` asked for comes from the L2 later, and is written in *further* wavefronts, which are not conflicts; `agreement.py` has the rule for them. It makes an XOR swizzle, which is what the rungs' copies have, free. For a warp that copies four lines: conflicts, all wavefronts, and the cycles of one instruction when eight warps of an SM issue nothing else (`helpers/evidence/patterns_timed.cu`):

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

# %%
of = copies[copies["kernel"] == "cp.async.cg"].pivot(index="name", columns="metric", values=["hardware", "xray"])
told = {"conflicts": of["hardware", "conflicts"], "wavefronts": of["hardware", "wavefronts"]}
told["wavefronts by the rules"] = of["xray", "wavefronts"]
told["cycles"] = record.load("device", "copies", DEVICE).set_index("name")["cycles"]
told = pd.DataFrame(told).loc[[f"copy16g: {name}" for name in TRIED]].set_axis(TRIED.values())
told.style.format(precision=0).format("{:.1f}", subset="cycles")

# %% [markdown]
# **What to see.** In the first five, each quarter of the warp writes one row of 128 bytes and takes the same few cycles, whatever the counters say. In the last two it writes several rows and takes many times as long. A count can be exact and still not be time.

# %% [markdown]
# ## Beside compute-sanitizer
#
# NVIDIA's `compute-sanitizer` looks for the same kinds of faults on the GPU: *racecheck*, *memcheck*, *initcheck*, *synccheck*. For the comparison the rungs were broken in one place at a time (`helpers/evidence/catalogue.py`), mostly by rule and some by hand: barriers removed or put into a branch, bounds widened, waits for copies loosened, strides, masks, sizes. Both sides ran these programs (*mutants*), and the rungs as they are.
#
# One rule of the X-ray is **stricter than the hardware**: it wants every thread of a block at a `__syncthreads()`. Since Volta a barrier waits only for threads that have not exited, so a thread may legally leave early. Mutants that only this rule flags are counted apart.

# %%
alone = ...  # your prediction: what percentage of the mutants does the X-ray alone flag?

# %% tags=["reveal"]
both = sanitize.by_rule(sanitize.compared().dropna(subset=["xray"]))  # what the two sides have looked at
as_they_are = both["mutant"].str.endswith(".original")
mutants = both[~as_they_are]
counts = pd.crosstab(mutants["stem"], mutants["who"])
print(f"{len(mutants)} broken programs:", ", ".join(f"{n} {who}" for who, n in mutants["who"].value_counts().items()))
print(f"{as_they_are.sum()} rungs as they are:", both[as_they_are]["who"].value_counts().to_dict())
predict(alone, 100 * (mutants["who"] == "X-ray alone").mean(), "percent are flagged by the X-ray alone", within=0.2)
draw_proof.who_flags(counts, "Who flags a mutant · compute-sanitizer on a GPU, the X-ray anywhere")

# %% [markdown]
# **What to see.** Most mutants are flagged by both sides or by neither. *Neither* is agreement, too: at the record's few shapes those mutants do no harm. (Mutants of a kernel that has changed since the record was made are left out.) A tool that runs out of time has said nothing, unless all four do: then the program hangs. What one side says alone:

# %%
one_sided = both[~both["who"].isin(["both", "neither"])]
reasons(one_sided.groupby(["why", "who"]).agg(programs=("mutant", "size"), first=("mutant", "first")))

# %% [markdown]
# The mutant of `02_online_softmax` that only the GPU's tools flag can be tested: write the FMA (fused multiply-add) that `nvcc` makes into the source, and the X-ray flags the same line.

# %%
lanes_write = next(m for m in sanitize.chosen(["02.every-lane-writes"]))
products = "a.l * expf(a.m - m_finite) + b.l * expf(b.m - m_finite)"
fused = lanes_write.source.replace(products, "fmaf(a.l, expf(a.m - m_finite), b.l * expf(b.m - m_finite))")
for text in (lanes_write.source, fused):
    found = xray(load(source=text, device="cpu", quiet=True), torch.randn(3, 1023)).findings
    print("fused:" if text == fused else "as written:", found[0] if found else "no finding")

# %% [markdown]
# The sanitizer watches real threads in the order in which they ran, in nvcc's machine code. The X-ray watches the source's accesses in an order of its own and asks what *could* have happened. Neither is complete: use both, and look where only one of them speaks.

# %% [markdown]
# ## Exercises
#
# ### Exercise 92.1 · Count wavefronts
#
# Write the rule for loads of 4 bytes per lane: how many wavefronts does a request take? `addresses` has 32 byte offsets, `None` where a lane takes no part. Your function is compared with what an H200 counted for every pattern of loads of 4 bytes. Then come 200 random requests. The function has to stand alone: while it is checked it knows Python's builtins and nothing of this notebook.


# %%
# Exercise 92.1
def wavefronts(addresses):
    """Wavefronts of one request of 4 bytes per lane."""
    return 1


# %%
by_H200 = panels["single accesses"].query("metric == 'shared_load_wavefronts'").set_index("name")["hardware"]
loads = {pattern.name: pattern.to for pattern in patterns.patterns() if pattern.op == "load4"}
counted = {name: (addresses, by_H200[name]) for name, addresses in loads.items()}

# %%
exercise.verify("92.1", lambda: checks.counts_wavefronts(wavefronts, counted))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Lanes that want the same word share it: count different words, bank by bank; the fullest bank decides.
# </details>
#
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
# Of the requests by which `04_fa2_fp32` stores 16 bytes per lane (16 sectors each), some are cut in four. The recorded differences are in `more_requests` and `more_sectors`. Compute their number from each; the story holds if they agree.

# %%
of_04 = kernels[kernels["name"] == "04_fa2_fp32"].set_index("metric")["difference"]
more_requests, more_sectors = int(of_04["global_store_requests"]), int(of_04["global_store_sectors"])
more_requests, more_sectors

# %%
# Exercise 92.2
cut_by_requests = 0
cut_by_sectors = 0


# %%
def agree():
    assert cut_by_requests == more_requests / 3 > 0, f"by the requests, {cut_by_requests} is wrong"
    assert cut_by_sectors == cut_by_requests, f"by the sectors, {cut_by_sectors} is wrong"
    return True


exercise.verify("92.2", agree)

# %% [markdown]
# <details><summary>Hint</summary>
#
# One request becomes four: how many more? And how many sectors more, if each of the four touches all 16?
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# cut_by_requests = more_requests / 3
# cut_by_sectors = more_sectors / (3 * 16)
# ```
#
# Both give 128, of 256 such requests (2 heads, 2 query tiles, 4 warps, 16 stores): half of them, as the machine code says.
# </details>

# %% [markdown]
# ### Exercise 92.3 · A race that isn't seen
#
# The barrier at the end of the loop is missing in this exhibit of notebook 91, and at $N = 256$ the X-ray says so. Find an $N$ at which the same wrong kernel has no findings.

# %%
exhibit = museum.EXHIBITS["no_last_barrier"]


def findings(N):
    return xray(exhibit.kernel, *(torch.randn(1, 1, N, 64).half() for _ in range(3))).findings


print("; ".join(f"{f.kind}, lines {f.line} and {f.other_line}" for f in findings(256)))

# %%
# Exercise 92.3
N = 256


# %%
def unseen():
    assert N > 0, "N is at least 1"
    assert not (found := findings(N)), f"N = {N}: {found[0].kind}, lines {found[0].line} and {found[0].other_line}"
    return True


exercise.verify("92.3", unseen)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The barrier keeps a tile from being overwritten by the next one.
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# N = 64
# ```
#
# With one tile of keys there is no next load. The X-ray reports on *this run*, so use several tiles, a partial one, and more than one block.
# </details>

# %%
progress()

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
