# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 31 · Warp-specialised: one fetches, the others multiply
#
# [← 30 · TMA and wgmma](30_tma_wgmma.ipynb) | [31_warp_specialized.cu](../kernels/31_warp_specialized.cu) | [glossary](glossary.md) | [32 · Ping-pong →](32_ping_pong.ipynb)
#
# **After this notebook you can**
# - divide a kernel into roles, and say of each what it waits for, what it gives away and how many registers it needs;
# - do the sums of `setmaxnreg`: what a launch deals out, what one warpgroup gives back and others may take;
# - follow a ring of stages with one bit per lap, say how far the producer may run ahead, and read the report of a deadlock;
# - choose how a persistent grid deals out its tiles, with a model that tells good from bad before anything is built;
# - read swim lanes, and say what of them means something on an emulator and what only on a GPU.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [30 · TMA and wgmma](30_tma_wgmma.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: fetching takes hardly any registers or time, multiplying takes all; give them to different warps, and let a CTA stay for the whole kernel.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import random
import re
from dataclasses import replace

import pandas as pd
import torch

from helpers import blank, budget, check, compile_ahead, draw_hopper, draw_masks, exercise, hint, load, plot, predict
from helpers import progress, record, roles, sass, schedule, show, single, wgmma_units, xray

# %load_ext helpers

torch.manual_seed(0)
kernel = load("31_warp_specialized")
device = kernel.device

# %% [markdown]
# ## The problem
#
# In rung 30 one thread has two jobs: it multiplies, and it asks for tiles. Look at the moment when it does:

# %%
show.region("30_tma_wgmma", "refill")

# %% [markdown]
# Before thread 0 may ask for a tile, *all* warps must have read what lies in that place. If the other warpgroup is late, thread 0 waits, with it its warp, and with the warp its warpgroup, since `wgmma` takes all four. So two warpgroups that could work independently are tied to each other. Besides, registers are the same for all, though the needs are not, and at the beginning and the end of every CTA the tensor cores have nothing to do.
#
# All of this has one cure: **roles**, or *warp specialisation*. One warpgroup, the *producer*, asks for tiles and does nothing else. The others, the *consumers*, multiply. They meet only at [mbarriers](glossary.md#mbarrier). [FlashAttention-3](https://arxiv.org/abs/2407.08608) measured what it is worth by taking it out again (section 4.2 there): 570 TFLOP/s instead of 661, on an H100 at $N = 8448$, $d = 128$.

# %% [markdown]
# ## 1 · Registers for those who need them
#
# A consumer's thread holds its share of $S$ (64 × Bc over 128 threads), of $P$, packed in pairs, and of $O$. The producer holds a few addresses. What does an even distribution give, and what do the roles want?


# %%
def constant(name):
    """What the rung's Tile says for d = 64 and for d = 128."""
    return [int(x) for x in re.search(rf"int {name} = d == 64 \? (\d+) : (\d+);", kernel.source).groups()]


rows, Bc = {}, 128
for i, d in enumerate((64, 128)):
    consumers, producer, consumer = (constant(x)[i] for x in ("consumers", "producer_registers", "registers"))
    even = 65536 // (128 * (1 + consumers)) // 8 * 8  # of the SM's registers, in steps of 8
    rows[d] = {"consumers": consumers, "S": Bc // 2, "P": Bc // 4, "O": d // 2, "evenly": even}
    rows[d] |= {"producer": producer, "consumer": consumer}
    rows[d] |= {"given back": 128 * (even - producer), "taken": 128 * consumers * (consumer - even)}
pd.DataFrame(rows).T.rename_axis("d")

# %% [markdown]
# `setmaxnreg` moves registers while the kernel runs: the producer's warps go down, the consumers' up, in steps of 8. What is taken may be as much as was given back or less, never more: who asks for more waits for ever (a `static_assert` in `Tile` holds that). Here it is as much at $d = 64$ and at $d = 128$. (The launch bounds must give the number of threads: without it ptxas doesn't know the registers at entry, ignores `setmaxnreg`, and says so in an info, C7508.)
#
# Without the two `setmaxnreg`, which kernels [spill](glossary.md#spill) registers into memory? Take this rung and the next one, 32, which has a product of $S$ and one of $O$ under way at once, each at $d = 64$ and at $d = 128$. How many of the four?

# %%
spilling = ...  # your prediction: how many of the four spill without setmaxnreg


# %%
def spilled(which, d):
    used = sass.resources(which)
    return int(used.loc[sass.instance(used.index, d, "fp16"), ["spill_store_bytes", "spill_load_bytes"]].sum())


# %% tags=["reveal", "raises-exception"]
cases = [(stem, d) for stem in ("31_warp_specialized", "32_ping_pong") for d in (64, 128)]
given = {case: single(*case) for case in cases}  # for fp16 alone
even = {
    case: replace(one, source=re.sub(r"fa::setmaxnreg_\w+<.*>\(\);", "", one.source)) for case, one in given.items()
}
compile_ahead([*given.values(), *even.values()], "cubin")
rows = {
    (stem, d): {"with setmaxnreg": spilled(given[stem, d], d), "without": spilled(even[stem, d], d)}
    for stem, d in cases
}
predict(spilling, sum(row["without"] > 0 for row in rows.values()), "of four spill without setmaxnreg")
pd.DataFrame(rows).T.rename_axis(["bytes spilled (stores, loads)", "d"])

# %% [markdown]
# **What to see.** This rung spills nothing either way: $S$, $P$ and $O$ are never all alive, as $S$ dies while $P$ comes into being. The next rung could not do without the extra registers.

# %% [markdown]
# ## 2 · A ring of stages
#
# Producer and consumers share a [ring](glossary.md#ring) of stages in shared memory. Each stage has two pairs of barriers, **full** and **empty**, one for $K$ and one for $V$, so that $S$ can start before $V_j$ has come:
#
# | | waits for | then | and then tells |
# |---|---|---|---|
# | producer | `empty`: the place has been read | asks for the tile | `full` (the copy itself does, by its bytes) |
# | each consumer | `full`: the tile is there | multiplies | `empty` (one lane of each warp) |
#
# Each role goes round the ring at its own pace and keeps its own count: the stage, and the [parity](glossary.md#parity) of the lap.

# %%
show.region("31_warp_specialized", "ring")

# %% [markdown]
# When the producer comes to a stage for the first time, nobody has read it: its first wait has to pass at once. Of a fresh barrier the phase *before* the first counts as complete (notebook 30), so the producer waits with the opposite parity, 1 in the first lap, 0 in the second. For two stages and five tiles:

# %%
stages, rows = 2, []
for tile in range(5):
    lap, stage = divmod(tile, stages)
    before = f"consumers: tile {tile - stages} read" if lap else "nothing (passes at once)"
    rows.append((tile, stage, lap % 2, f"empty[{stage}], {lap % 2 ^ 1}", before, f"full[{stage}], {lap % 2}"))
columns = ["tile", "stage", "parity of the lap", "producer waits for", "which means", "consumers wait for"]
pd.DataFrame(rows, columns=columns).set_index("tile")

# %% [markdown]
# Nobody can be mistaken about the lap. With a full ring the producer is one lap ahead. To be *more* than one lap ahead it would have to pass an `empty` that isn't complete; so there are never two phases between them, and one bit is enough.
#
# ### A deadlock, and how to read it
#
# Let the consumers forget to say that $V_j$ has been read. The ring has four stages at $d = 64$. How many of the six tiles of 768 keys get through before everything stops?

# %%
tiles_through = ...  # your prediction, d = 64

# %%
small = single("31_warp_specialized", 64)


# %%
def finding(*changes, N=768, **options):
    """What the X-ray finds first in the kernel with these changes."""
    text = small
    for old, new in changes:
        text = replace(text, source=text.replace(old, new))
    found = xray(text, *(torch.randn(1, 1, N, 64).half() for _ in "qkv"), **options).trace.findings
    return f"{found[0].kind}, line {found[0].line}: {found[0].text}" if found else "no finding"


# %% tags=["reveal"]
V_read = "release(V_empty + barrier);\n      // [end: output]"
print(finding((V_read, V_read.replace("release(V_empty + barrier);", ";"))))
predict(tiles_through, constant("stages")[0], "tiles get through, one for each stage")

# %% [markdown]
# **What to see.** For the tile after that the producer waits for a place, `V_empty[0]`, where all twelve warps are missing; the consumers wait for a tile, `V_full[0]`, in its second phase (parity 1), where the one arrival that announces it is missing. Each waits for the other. With no more tiles than stages, and one query tile per CTA, the bug would never be seen.

# %% [markdown]
# ## 3 · A CTA that stays
#
# In rung 30 every query tile has a CTA of its own, which begins with an empty ring. Now there are as many CTAs as SMs (a **persistent grid**), and each works on one query tile after the other. The ring doesn't notice: the first $K$ of the next query tile is asked for as soon as there is a place, while the consumers are still at the last tiles of this one.
#
# Now the kernel has to deal out the query tiles. Under a causal mask they differ in length, and three ways come to mind:
#
# - **in turns**: CTA $c$ of $n$ takes number $c$, then $n + c$, $2n + c$, …
# - **turning round**: every second turn from the other end, so that whoever had the longest tile gets the shortest next;
# - **a counter**: whoever is done takes the next number, by an [atomic](glossary.md#atomic) addition.
#
# All go through the same list: under a mask the longest tiles first, of as many heads at a time as have their keys in 32 MiB of the L2 (notebook 20). A model, as there: a tile takes as long as it has tiles of keys, nothing else takes time.


# %%
def lengths(N, D, causal=True, Bc=128):
    """Tiles of keys of each query tile of the headline workload, in the order of the list."""
    Br, heads = {64: 192, 128: 128}[D], 16384 // N * 2048 // D
    tiles, at_once, found = -(-N // Br), max(1, (32 << 20) // (4 * N * D)), []
    for first in range(0, heads, at_once):
        group = len(range(first, min(first + at_once, heads)))
        seen = [min((t + 1) * Br, N) if causal else N for t in reversed(range(tiles))]
        found += [-(-keys // Bc) for keys in seen for _ in range(group)]
    return found


# %%
def dealt(work, ctas, turning):
    """As schedule.run, for numbers that are dealt out beforehand."""
    free, rows = [0] * ctas, []
    for number, length in enumerate(work):
        turn, c = divmod(number, ctas)
        c = ctas - 1 - c if turning and turn % 2 else c
        rows.append((c, free[c], free[c] + length))
        free[c] += length
    return pd.DataFrame(rows, columns=["place", "begin", "end"])


# %% [markdown]
# Which way is the worst for $d = 128$ and $N = 4096$, under the mask: `"in turns"`, `"turning round"` or `"a counter"`?

# %%
worst = ...  # your prediction


# %% tags=["reveal"]
def ways(work, ctas=132):
    return {
        "in turns": dealt(work, ctas, turning=False),
        "turning round": dealt(work, ctas, turning=True),
        "a counter": schedule.run(work, ctas),
    }


found = ways(lengths(4096, 128))
display(draw_masks.occupancy(found, 132))
predict(worst, max(found, key=lambda way: found[way].end.max()), "is the worst")


# %%
def beyond(D, N, causal=True):
    """Time beyond that of 132 SMs that are never idle."""
    work = lengths(N, D, causal)
    return {way: run.end.max() / (sum(work) / 132) - 1 for way, run in ways(work).items()}


shapes = [(D, N) for D in (64, 128) for N in (512, 1024, 2048, 4096, 8192, 16384)]
rows = {shape: beyond(*shape) | {"no mask, any way": max(beyond(*shape, False).values())} for shape in shapes}
pd.DataFrame(rows).T.rename_axis(["D", "N"]).map("{:.1%}".format)

# %% [markdown]
# **What to see.** Time beyond that of a machine that is never idle. Without a mask all tiles are equally long, and nothing can be done about the last, partly filled turn. Under the mask the counter is within a percent or two. The two that deal beforehand lose up to 16 % and up to 30 %, and turning round, which sounds fairer, is at $d = 128$ the worst of all. Why? The list doesn't descend once from long to short: it is a saw, with one descent per group of heads. A turn that reaches over the end of a group has the *next* group's longest tiles in its last places, where the short ones should be, and the same CTAs get them every time.
#
# So the rung counts. That costs an atomic addition per query tile, a counter set to zero before the launch, and a message to all warps. The producer works out what a number stands for, and hands the warps a `Work`:

# %%
show.region("31_warp_specialized", "schedule")

# %% [markdown]
# ## 4 · O leaves by the tile
#
# Rung 30 writes $O$ from registers: four lanes make 16 bytes of a row, so that an instruction touches eight rows, half a [sector](glossary.md#sector) each. TMA goes the other way, too: from shared memory to a box of a tensor, and what is outside of the tensor stays behind. So the warpgroup puts its 64 rows of $O$ into shared memory, swizzled as the map says, and one thread sends them off. No mbarrier hears of a store: its thread commits a group and waits until $O$ has been read (`.read`). This way costs room ($O$ needs a place of its own, as $Q$'s is already being filled for the next query tile), and three things have to be kept in order:
#
# | first | then | said by |
# |---|---|---|
# | TMA has read the last $O$ | threads write this one | `cp.async.bulk.wait_group.read`, then a barrier of the warpgroup |
# | threads have written all of $O$ | TMA reads it | `fence.proxy.async`, then the same barrier |
# | TMA has read $O$ | the CTA ends, and its shared memory goes to another | `cp.async.bulk.wait_group.read` |
#
# The barrier is a [named](glossary.md#named-barrier) one, `bar.sync` with a number and 128 threads: `__syncthreads` would wait for the other warpgroups, too, and for the producer, most of whose threads have left long ago.

# %% [markdown]
# ## The kernel

# %%
show.region("31_warp_specialized", "tile")

# %%
show.region("31_warp_specialized", "barriers")

# %% [markdown]
# A barrier that is waited for by a producer counts the warps that have to report (`readers`), one that is waited for by consumers counts the one thread that announces bytes.

# %%
show.region("31_warp_specialized", "producer")

# %% [markdown]
# `fetch` is the producer's line of section 2's table: wait until the place is empty, announce, copy. `fetch_Q` does the same for $Q$, whose ring has two places. A CTA's first number is its own, `blockIdx.x`; the counter gives those after it. The next is asked for behind the first $K$ and $V$ of a query tile: the wait for the counter and the divisions then pass while tiles are on their way. `Work` travels with $Q$: it is written when $Q$'s place is empty, and whoever has waited for `Q_full` may read it. $i_0 = -1$: nothing is left. On the consumers' side:

# %%
show.region("31_warp_specialized", "next_work")

# %%
show.region("31_warp_specialized", "scores")

# %%
show.region("31_warp_specialized", "output")

# %% [markdown]
# The products are those of rung 30, and each is followed by a wait and a `release`. Between the two, mask and softmax are unchanged; but tiles that all rows see have a loop to themselves, in which the mask is not compiled at all.

# %%
show.region("31_warp_specialized", "epilogue")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %%
plot.recorded("31_warp_specialized", "error", plot.error)

# %% [markdown]
# ## Predict, then measure
#
# ### Swim lanes
#
# Who does what when? `roles.times` puts a note at every region and every wait of the kernel: the first thread of each warpgroup of one CTA writes down what begins, and the SM's clock. On a GPU the axis below is time. **On the emulator only the order means something**: it runs one thread until that has to wait, then another, and knows no durations. So there the axis counts events, and how long a box is says how much else happened meanwhile, not how long it took.
#
# One head, 384 queries and 768 keys, $d = 64$, on one CTA: two query tiles of six tiles of keys. Find where the producer asks for the first tiles of the second query tile.

# %%
alone = replace(small, source=small.replace("int64_t(sms)", "int64_t(1)"))
events = roles.times(alone, *(torch.randn(1, 1, n, 64).half() for n in (384, 768, 768)))
registers = {"producer": constant("producer_registers")[0]}
registers |= {f"consumer {i}": constant("registers")[0] for i in range(constant("consumers")[0])}
draw_hopper.roles(
    events, registers, "The four warpgroups of a CTA, two query tiles", "events on the emulator, in their order"
)

# %% [markdown]
# **What to see, in the order of events.**
#
# - The producer fills the ring before anyone multiplies, and from then on asks for a tile whenever a place has been read.
# - It knows no end of a query tile: the next $Q$, $K$ and $V$ are asked for while the consumers are still at the last tiles of this one. The gap in the consumers' lanes is their [epilogue](glossary.md#epilogue).
# - The three consumers do the same things and depend on each other only through the ring; nothing else keeps them in step.
# - To the right: how the SM's registers are shared out.
#
# That the producer passes over the end without a pause is not automatic. It asks *in order*, and where one place isn't free, everything behind it waits. The next $Q$ is asked for behind the last $K$ and $V$ of a query tile. What if it were asked for behind the *first*, to have it early? Look at the longest wait of the producer, in events:

# %%
last, first = "if (j0 == 0) fetch_Q(next);", "if (j0 == work.j_last) fetch_Q(next);"
for where, one in {
    "behind the last": alone,
    "behind the first": replace(alone, source=alone.replace(last, first)),
}.items():
    seen = roles.times(one, *(torch.randn(1, 1, n, 64).half() for n in (384, 768, 768)))
    waits = seen[(seen.lane == "producer") & (seen.kind == "wait")]
    print(f"the next Q {where} K and V: the longest wait {(waits.end - waits.begin).max()} events")

# %% [markdown]
# That $Q$ goes where the $Q$ of the tile before this one lies, which is read until that tile's last $S$. Until then the producer waits there, and the ring runs empty. No result is wrong; the swim lanes show it.
#
# The same on a GPU, where the axis is time: some tiles around the end of a query tile, of a CTA in the middle of a full grid. (Notes take time, too: shares mean more than durations.)


# %%
def between(events, D, first, last):
    """The phases at this d from consumer 0's tile of keys `first` to its tile `last`. (A wait parts the box of S in two.)"""
    events = events[events.D == D]
    consumer = events[events.lane == "consumer 0"]
    starts = consumer[(consumer.kind == "scores") & (consumer.kind.shift() != "product")].begin.to_numpy()
    first, last = starts[first], starts[last]
    seen = events[(events.end > first) & (events.begin < last)]
    return seen.assign(begin=seen.begin.clip(first) - first, end=seen.end.clip(upper=last) - first)


# %%
def around_the_end(events, D=64, N=4096, before=4, after=5):
    """Some tiles of keys before the end of the second query tile, and some behind it."""
    seen, end = between(events, D, 2 * N // 128 - before, 2 * N // 128 + after), "the end of a query tile"
    where = record.about("31_warp_specialized", "roles")["device"]
    return draw_hopper.roles(seen, registers, f"{where}, d = {D}, N = {N}: {end}", "clocks of the SM")


plot.recorded("31_warp_specialized", "roles", around_the_end)


# %%
def shares(events, N=4096):
    """What each lane does with its time in the second query tile."""
    seen = pd.concat(between(events, D, N // 128, 2 * N // 128) for D in (64, 128))
    spent = (seen.end - seen.begin).groupby([seen.D, seen.lane, seen.kind]).sum().unstack(fill_value=0)
    spent = spent.div(seen.groupby("D").end.max(), axis=0, level="D")
    spent = spent.rename(columns={kind: words for kind, (_, _, words) in draw_hopper.KINDS.items()})
    return spent.assign(other=1 - spent.sum(axis=1)).map("{:.0%}".format)


plot.recorded("31_warp_specialized", "roles", shares)

# %% [markdown]
# **What to see.**
#
# - The producer has nothing to do for most of the time. Its two long boxes are the beginning of a query tile: it sends for $Q$, and behind the first $K$ and $V$ finds out what comes next.
# - The consumers are not in step. Consumer 0 comes to the end of its query tile about three tiles of keys after the other two, and four stages wouldn't let it be much later; the longest wait of the producer is for the places that consumer 0 has yet to read.
# - In an epilogue, two thirds as long as a tile of keys, a consumer multiplies nothing; the others go on. (`other` in the table isn't drawn: one fifth is epilogue, the rest short gaps around waits.)
# - A consumer's softmax takes more than a third of its time at $d = 64$, and about a third at 128. All that time it has no product under way.
#
# ### How far ahead
#
# How many copies of $K$ and $V$ has the producer asked for when the first product begins, with three stages?

# %%
asked_for = ...  # your prediction

# %% tags=["reveal"]
marks = {r"cp_async_bulk_tensor_5d\(to,": "copy", r"^    \};$": "", r"// \[region: scores\]": "scores"}  # what to note


def asked_before_the_first_product(stages):
    text = re.sub(r"int stages = [^;]+;", f"int stages = {stages};", small.source, count=1)
    inputs = [torch.randn(1, 1, 768, 64).half() for _ in "qkv"]
    events = roles.times(replace(small, source=text), *inputs, marks=marks)
    return int((events[events.kind == "copy"].begin < events[events.kind == "scores"].begin.min()).sum())


asked = {n: asked_before_the_first_product(n) for n in (1, 2, 3)}
predict(asked_for, asked[3], "copies with three stages")
pd.Series(asked, name="copies").rename_axis("stages").to_frame().T

# %% [markdown]
# Two per stage. One stage is enough for a right result, too: then every tile is waited for.
#
# ### Instructions
#
# Rung 30 spent 54 `R2UR` per tile to carry descriptors into uniform registers. Here the warpgroup's number comes from a maximum over the warp (`__reduce_max_sync`), so that the compiler knows it to be the same in all lanes. Rung 30's loop without its mask, and the loop that rung 31 has for whole tiles, at $d = 128$: one tile of 128 keys. By how many instructions is the loop shorter?

# %%
fewer = ...  # your prediction: instructions in rung 30's loop less those in rung 31's

# %% tags=["reveal", "raises-exception"]
masked = "if (j0 + Bc > (a.causal ? min(row0 + shift + 1, a.Nk) : a.Nk)) {"
before, after = single("30_tma_wgmma", 128), single("31_warp_specialized", 128)
before = replace(before, source=before.replace(masked, "if (false) {"))
pair = sass.compare(before, after, D=128, loop=True)
predict(fewer, int(pair.loc["all"].iloc[0] - pair.loc["all"].iloc[1]), "instructions fewer")
pair[(pair.iloc[:, :2] >= 5).any(axis=1)].T

# %% [markdown]
# **What to see.** What is left are the softmax, 16 products, and little else. The `UTMALDG` have gone to the producer; there are more `SYNCS`, as $K$ and $V$ have barriers of their own. In the budget of the SM's units (notebook 30):

# %% tags=["raises-exception"]
budgets = {
    "30, d = 128": wgmma_units.forward(before, 128, "fp16"),
    "31, d = 128": wgmma_units.forward(after, 128, "fp16"),
}
text = "Issue slots go down from 597 clocks in rung 30 to 467 in rung 31; the tensor cores' 1024 stay the longest."
budget.units(wgmma_units.table(budgets), "64 rows and 128 keys (a model, not a measurement)", text)

# %% [markdown]
# ### Sectors
#
# And the stores: sectors of 32 bytes that writing $O$ touches, against what its bytes need.

# %%
q, k, v = (torch.randn(1, 2, 384, 64).half() for _ in range(3))
frames = {}
for which in (single("30_tma_wgmma", 64), small):
    frame = xray(which, q, k, v).to_frame().query("space == 'global' and target == 'O'")
    frames[which.stem] = frame[["op", "requests", "cost", "ideal"]].rename(columns={"cost": "sectors"})
pd.concat(frames).droplevel(1)

# %% [markdown]
# ## Beside its peers

# %%
plot.recorded(
    "31_warp_specialized", "forward", lambda s: plot.ratio(s, "31_warp_specialized", ["SDPA FLASH", "SDPA CUDNN"])
)

# %% [markdown]
# What did the roles bring? The speed beside SDPA CUDNN, length by length, of rung 30 and of this one (bf16), each from its own session:


# %%
def by_length(kind):
    """A peer's time over ours, by D and N, for both rungs; each is held against the peer in its own session."""
    rows = {}
    for stem in ("30_tma_wgmma", "31_warp_specialized"):
        ratios = record.ratio(record.headline(record.load(stem, kind)), stem, "SDPA CUDNN").query("dtype == 'bf16'")
        rows |= {(f"D = {D}", stem): part.set_index("Nk")["ratio"] for D, part in ratios.groupby("D")}
    return pd.DataFrame(rows).T.sort_index().round(2)


pd.concat({"no mask": by_length("forward"), "causal": by_length("causal")})

# %% [markdown]
# **What to see.** Notebook 30's prediction holds. Most is gained at $d = 128$, where rung 30 had a single CTA per SM, and there at short lengths, where its CTAs were short-lived. At $d = 64$, where two CTAs had covered for each other, there was less to gain. Part of that may be arithmetic: query tiles have 192 rows there, so at $N = 1024$ the last tile has only 64 rows, and two of three consumers idle.

# %% [markdown]
# ## What still hurts
#
# 1. **A consumer does one thing at a time.** It starts $S = QK^\top$ and waits; softmax; it starts $O \mathrel{+}= PV$ and waits. That the other consumers are elsewhere is chance: they start together and wait at the same barriers.
# 2. **Room.** Two places for $Q$ and one for $O$ take shared memory that stages could have: at $d = 128$ two stages are left.
# 3. **The end of a query tile.** The producer runs over it, but the consumers stop there: last product, division, $O$ to shared memory, and only then the first product of the next.
# 4. **Short sequences.** With few query tiles per CTA there is nothing to overlap the first tile's copy from HBM with.
#
# The first is the subject of notebook 32: to start the next $S$ *before* this tile's $O$, and to let the warpgroups take turns at the tensor cores on purpose.

# %% [markdown]
# ## Exercises
#
# In a **task** you write CUDA: the cell takes the place of one region of the rung. `blank` shows what is given and what has to hold afterwards. It is solved if all cases of `check` are right and the X-ray finds nothing. (In an editor: `python -m helpers exercise new 31 kernel`, here for the whole rung, task 31.9.)
#
# ### Task 31.1 · The mask
#
# Hide the keys that a row doesn't see. It is the mask of notebook 20 on a `wgmma` accumulator: count the keys that a row sees from this lane's first key on, and the mask is a comparison with a constant per element.

# %%
blank("31", "mask")

# %%
# %%region 31 mask -> my_mask
# // yours

# %%
hint("31.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `mask` of [31_warp_specialized.cu](../kernels/31_warp_specialized.cu): `show.region("31", "mask")`.
#
# </details>

# %% [markdown]
# ### Task 31.2 · The producer
#
# One thread that fetches $Q$, $K$ and $V$ for all query tiles of its CTA. You have read it above; write it from its contract alone: which barrier has to be waited for, in which phase, before each copy, and how do the consumers learn that there is nothing left?

# %%
blank("31", "producer")

# %%
# %%region 31 producer -> my_producer
# // yours

# %%
hint("31.2")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `producer` of [31_warp_specialized.cu](../kernels/31_warp_specialized.cu): `show.region("31", "producer")`.
#
# </details>

# %% [markdown]
# ### Exercise 31.3 · A more generous producer
#
# The producer gets 24, 32 or 40 registers. How many can each of two consumers have, how many each of three? (65536 registers; all numbers are multiples of 8, at the launch, too; at most 256.)

# %%
# Exercise 31.3
two_consumers = {24: 240, 32: None, 40: None}
three_consumers = {24: None, 32: 160, 40: None}


# %%
def most():
    for consumers, said in ((2, two_consumers), (3, three_consumers)):
        launch = 65536 // (128 * (1 + consumers)) // 8 * 8
        for producer, mine in said.items():
            right = (launch + (launch - producer) // consumers) // 8 * 8
            assert mine == right, f"{consumers} consumers, a producer of {producer}: not {mine}"
    return True


exercise.verify("31.3", most)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Three warpgroups get 168 each at the launch, four get 128.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# two_consumers = {24: 240, 32: 232, 40: 232}
# three_consumers = {24: 160, 32: 160, 40: 152}
# ```
#
# With three consumers a producer of 24 leaves the consumers no more than one of 32 does: a third of the difference is less than 8. With two, 40 costs no more than 32.
#
# </details>

# %% [markdown]
# ### Exercise 31.4 · Three reports
#
# Three kernels, each with one bug, and what the X-ray says of them, in some order. Which report belongs to which bug?
#
# 1. the producer waits with the consumers' parity;
# 2. nobody says that $Q$ has been read;
# 3. $O$ is sent off without a fence.

# %%
O_sent = "fa::fence_proxy_async();\n    fa::bar_sync(warpgroup, 128); // all of O"
bugs = {
    1: [("fa::mbarrier_wait(empty, parity ^ 1);", "fa::mbarrier_wait(empty, parity);")],
    2: [("if (j0 == 0) release(Q_empty + 8 * Q_ring.stage);", ";"), ("int64_t(sms)", "int64_t(1)")],
    3: [(O_sent, O_sent.replace("fa::fence_proxy_async();", ";"))],
}
in_some_order = random.Random(6).sample(list(bugs), 3)
reports = {letter: finding(*bugs[bug], N=384) for letter, bug in zip("XYZ", in_some_order)}
for letter, report in reports.items():
    print(f"{letter}: {report}\n")

# %%
# Exercise 31.4
bug_of = {"X": None, "Y": None, "Z": None}


# %%
def matched():
    assert sorted(map(str, bug_of.values())) == ["1", "2", "3"], "each of the bugs 1, 2 and 3 has one report"
    assert [bug_of[letter] for letter in "XYZ"] == in_some_order, "at least two reports belong to other bugs"
    return True


exercise.verify("31.4", matched)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Thread 0 is the producer. For which barrier does it wait, and in which phase? Phase 0 of an `empty` barrier is complete when the place has been read for the first time.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# bug_of = {"X": 3, "Y": 1, "Z": 2}
# ```
#
# In both deadlocks everybody waits for somebody. With bug 1 the producer waits for the first place of all, `K_empty[0]`, and no tile of $K$ or $V$ was ever sent. With bug 2 whole query tiles went through, until $Q$ came to a place for the second time. Had every CTA a single query tile (the cell sees to it that there is one CTA), bug 2 would not be seen.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. What do the two roles have in common?</summary>
#
# Two barriers per place, the order of the tiles, and the count of laps. No data in registers, and no `__syncthreads` after the first.
#
# </details>
# <details><summary>2. Why does the producer wait with the opposite parity?</summary>
#
# Its first wait has to pass although nobody has read anything. Of a fresh barrier the phase before the first, of parity 1, counts as complete.
#
# </details>
# <details><summary>3. What does a stage more buy, and what does it cost?</summary>
#
# The producer may be one tile further ahead, which hides a longer way from HBM or a longer hiccup. It costs a tile of K and one of V in shared memory.
#
# </details>
# <details><summary>4. Why is a counter better than any fixed rule under a causal mask?</summary>
#
# Tiles differ in length and SMs in speed. Who is done first takes the next; no rule has to foresee who that will be.
#
# </details>
# <details><summary>5. What must you not read off the swim lanes of the emulator?</summary>
#
# Any duration, and so any share of waiting. The order of events that depend on each other is real.
#
# </details>
#
# **References**: [FlashAttention-3](https://arxiv.org/abs/2407.08608), section 3.1 and Algorithm 1; [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "setmaxnreg", "mbarrier", "cp.async.bulk.tensor", "bar"; [CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/), "Asynchronous Barrier".
