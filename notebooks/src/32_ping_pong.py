# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 32 · Ping-pong: exponentials under products
#
# **After this notebook you can**
# - draw up, in clocks, what a tile costs the tensor cores, the exponential units and the instruction schedulers, and say what can hide under what;
# - follow a warpgroup that has two products under way, and several warpgroups that take turns;
# - read off the disassembly which instructions stand between two waits, and notice when the compiler has moved a wait;
# - predict with a model when handing out tiles from a counter pays, and when it can't.
#
# **Time** 90 minutes.
#
# **Needs** [31 · Warp-specialised](31_warp_specialized.ipynb) for producer and consumers, [13 · Tuned](13_tuned.ipynb) for the softmax without a maximum, and section 3 of [20 · Causal masks](20_causal_gqa.ipynb) for the order of tiles. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: nobody waits for a product of their own: while one product runs, take the exponentials of another.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import dataclasses
import heapq

import numpy as np
import pandas as pd
import torch

from helpers import Case, check, compile_ahead, load, rung, single, xray
from helpers import draw_masks, draw_pingpong, exercise, overlap, plot, record, roles, sass, schedule, scoreboard, show

torch.manual_seed(0)
compile_ahead(["31_warp_specialized", "32_ping_pong"], "sass")  # in the background, for later
kernel = load("32_ping_pong")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Rung 31 gave the fetching to a warp of its own. Its other warps, the consumers, do three things for each tile, one after the other: they wait for $S = QK^\top$, they make $P$ of it, they wait for $O \mathrel{+}= PV$. While a warpgroup computes exponentials it has nothing for the tensor cores, and while it waits for a product it computes nothing.
#
# How long does each take? On Hopper, an SM does in one clock
# - 4096 floating-point operations of 16-bit products, on four tensor cores ([NVIDIA](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/));
# - 16 exponentials ([CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions), special functions);
# - four instructions, one for each of its four schedulers. A warpgroup's four warps sit on one scheduler each. So a loop of $n$ instructions takes at least $n$ clocks, and $n$ can be counted in the compiled code.
#
# For a warpgroup's 64 rows and a tile of 128 keys:


# %%
def clocks(d):
    """What a tile takes of an SM that does nothing else: 64 rows, 128 keys."""
    count = sass.between_waits("31_warp_specialized", d)
    return {
        "products": 2 * (2 * 64 * 128 * d) / 4096,
        "exponentials": 64 * 128 / 16,
        "instructions between S and O": count["all"].max(),
    }


budget = pd.DataFrame({d: clocks(d) for d in (64, 128)}).T.rename_axis("d").astype(int)
budget

# %% [markdown]
# The instructions between $S$ and $O$ are the softmax: scale, maximum, exponential, sum, rescaling of $O$, rounding of $P$. At $d = 64$, exponentials alone take as long as both products. Had a warpgroup the SM to itself, the tensor cores would be busy for this share of the time:

# %%
(budget["products"] / (budget["products"] + budget.iloc[:, 1:].max(axis=1))).map("{:.0%}".format).rename("multiplying")

# %% [markdown]
# It isn't alone: rung 31 has two or three consumers. If one is at its softmax while another multiplies, both units work. *If*: nothing in rung 31 arranges for it.
#
# ## 1 · Taking turns
#
# Let us play it through. A **model**, so that its assumptions can be named: warpgroups share the tensor cores and whatever does the softmax. A product takes half of the clocks in the first column, a softmax the larger of the two other numbers. If several ask for the tensor cores at once they get equal shares, as their instructions arrive in turn. Nothing else takes time.
#
# The model's first case is rung 31 at its worst: all consumers start at the same moment. In the second one there is a rule: **your products start when the other warpgroup's have all been started**. Then its products come first, whole, and yours behind. Predict what becomes of the two lanes.

# %%
product, softmax = budget.loc[128, "products"] / 2, budget.loc[128].iloc[1:].max()
cases = {}
for name, under, turns in [
    ("start together, no turns", "none", False),
    ("in turns", "none", True),
    ("in turns, and the next S is started before O", "next", True),
]:
    cases[name] = overlap.run(overlap.jobs(2, 5, product, softmax, under), turns)
draw_pingpong.lanes(cases, "clocks, d = 128, five tiles")

# %% [markdown]
# **What to see.** Above: the two get half of the tensor cores each, finish at the same time, then do their softmax at the same time, and so on for ever: at any moment either the tensor cores idle or everything else. In the middle, one rule has set them apart by half a beat: one is at its softmax while the other multiplies, like the two sides of a ping-pong table. (That is the name FlashAttention-3 gives it, [section 3.1](https://arxiv.org/abs/2407.08608).)
#
# The rule is all it takes. On the GPU it is two instructions. A *named barrier* opens when as many threads as it is told have come by, and of those some may go on without waiting:

# %%
show.region("32_ping_pong", "turns")

# %% [markdown]
# `bar_sync` arrives and waits, `bar_arrive` only arrives. Barrier `turns + w` is warpgroup $w$'s: it opens when $w$'s own 128 threads wait there *and* the 128 threads of its predecessor have come by. So there is one turn, and it is handed around. At the start nobody has it; that is why the last warpgroup passes one on before its first tile.
#
# ## 2 · Two products under way
#
# The lowest picture above has a second idea in it. A warpgroup that has finished $P_j$ can start *two* products: $O \mathrel{+}= P_j V_j$, and the next tile's $S_{j+1} = Q K_{j+1}^\top$, which does not depend on $P_j$ at all. Start $S_{j+1}$ first. Then, when it is complete, its softmax can begin while the tensor cores are still at $O$: in the figure a softmax stands *under* a product of its own warpgroup ([section 3.2](https://arxiv.org/abs/2407.08608) of FlashAttention-3).
#
# `wgmma` is made for that. Products are handed in as groups, and a warpgroup waits *until at most n of its groups are left*, the youngest ones. In the loop:
#
# | in the loop over tiles | under way behind it |
# |---|---|
# | start $S_{j+1}$, then $O \mathrel{+}= P_j V_j$ | both |
# | wait until 1 is left | $O$ |
# | exponentials: $S_{j+1}$ becomes $P_{j+1}$ | $O$ |
# | wait until none is left; round $P_{j+1}$ to 16 bits | nothing of its own, but the other warpgroups' products |
#
# Why is $P_{j+1}$ rounded only at the end? Rounded $P_j$ is an operand of the product that is under way, and it comes from registers. They may not be written before the product is complete. A second set of registers for $P_{j+1}$ would do. Is there one?

# %%
sizes = {"S": 128 * 64, "O": 64, "P, rounded": 128 * 64 / 2, "another P": 128 * 64 / 2}  # registers; O: times d
rows = {d: {name: int(n * (d if name == "O" else 1) / 128) for name, n in sizes.items()} for d in (64, 128)}
arrays = pd.DataFrame(rows).T.rename_axis("d")
arrays["in all"] = arrays.sum(axis=1)
arrays["a consumer's thread has"] = [160, 240]
arrays

# %% [markdown]
# At $d = 64$ the arrays alone would take every register, and a thread needs some for addresses. (At $d = 128$ there would be room; the rung is the same for both.)
#
# What does the model say of either idea alone, and of both? The share of the time in which the tensor cores have work, over 64 tiles:

# %%
rows = {}
for d, groups in ((64, 3), (128, 2)):
    times = budget.loc[d, "products"] / 2, budget.loc[d].iloc[1:].max()
    rows[d] = {}
    for under in ("none", "next"):
        for turns in (False, True):
            work = overlap.jobs(groups, 64, *times, under)
            name = {"none": "S, softmax, O", "next": "next S before O"}[under] + (", in turns" if turns else "")
            rows[d][name] = overlap.multiplying(overlap.run(work, turns), work)
pd.DataFrame(rows).T.rename_axis("d").map("{:.0%}".format)

# %% [markdown]
# **What to see.** At $d = 128$ either idea is enough. At $d = 64$ there are as many clocks of exponentials as of products: whenever all three warpgroups are at their softmax together, nothing makes up for it any more, and only turns keep them apart.
#
# The model is kind in one respect and unkind in another. It has no latencies: in reality a product that is asked for a little too late leaves a gap, and a queue with two products in it has fewer gaps than a queue with one. And real warpgroups do not stay in step for ever, even without a rule. So expect less from turns than the model does, and more from the second product. How much, is measured below.

# %% [markdown]
# ## 3 · Less softmax, and a vote
#
# Better than to hide an instruction is not to have it. Rung 13 found that the row maximum can go: take $P$ with the maximum of *earlier* tiles and add up the row. As long as that sum stays below 32 the result is as accurate. Where it doesn't, the tile is done again, and from there on the maximum is tracked, tile by tile. (Section 2 there has the reasons, and the limits.) For a warpgroup, three things are different.
#
# **128 threads decide together.** A `wgmma` is one instruction of four warps: all of them do $S$ again, or none. So a warp whose $P$ may not stand has to tell the other three, and all have to hear it before anybody goes on. That asks for a barrier. But there is one on the way already: the turn! A warp that isn't content leaves a 1 in shared memory; the warpgroup's next turn begins at a barrier for all of its warps, and behind it everybody reads.
#
# **$S$ is gone, $K_j$ is not.** $P$ has taken the place of $S$, so doing a tile again takes the product again. Until the votes are read, $K_j$ has to stay; only then is its place given back to the producer, and the tile's sums are added to $l$.
#
# **Two loops.** With `if (track)` inside one loop, random inputs lost 5 %. So the loop is a function that is compiled twice: one copy forms the maximum before the exponentials and rescales $O$ behind its product, the other one does neither, and its sums decide on a vote. As in rung 13, a row's bits depend on those it goes with, here the 64 of its warpgroup.

# %%
draw_pingpong.states()

# %%
show.region("32_ping_pong", "votes")

# %%
show.region("32_ping_pong", "overlap")

# %% [markdown]
# (The loop runs to tile `end`. It is left early where a tile was voted down, which is then done alone.) What it saves, per tile, in the loops of both rungs, of this one the copy that votes:

# %%
loops = {stem: sass.between_waits(stem, 128) for stem in ("31_warp_specialized", "32_ping_pong")}
saved = pd.DataFrame({stem: pieces.sum() for stem, pieces in loops.items()})
saved.assign(change=saved["32_ping_pong"] - saved["31_warp_specialized"])

# %% [markdown]
# The maximum and the rescaling are gone, which is as many instructions as there are exponentials, twice. And something that no count shows: in rung 31 not one exponential can begin before the maximum of its whole row is known, over 32 registers and then over four lanes. Here the first begins as soon as $S$ is there.

# %% [markdown]
# ## 4 · What the compiler makes of it
#
# So much for the source. ptxas, which writes the machine code, may move instructions past each other as long as the result stays the same, and it may move a *wait* as well: to wait earlier than asked is never wrong. The order in the source is a wish. So look. Here are both loops, instruction by instruction in the order of the code, and above each piece between two waits its number of exponentials:

# %%
draw_pingpong.loop({stem: sass.loop_lines(stem, 128, "bf16") for stem in loops})

# %% [markdown]
# **What to see.** At a solid line a warpgroup waits until none of its products is under way, at the dashed one until one is left. A thread has 64 elements of $S$, so 64 exponentials per tile. In rung 31 they stand behind a solid line: nothing of the warpgroup's own runs under them. In rung 32 they stand behind the dashed line and before the solid one, and $O \mathrel{+}= PV$ runs under all of them.
#
# That is as it was written. Does it follow from how it was written? Take the vote out, and nothing else. (The results are then wrong for some inputs, as in exercise 13.1. The instructions that are left are the same.) **Predict**: 64 exponentials between the two waits, or fewer?


# %%
def edited(*changes, d=128):
    """The rung with these changes, for one d and bf16 alone, which takes less time to compile."""
    text = single("32_ping_pong", d, "bf16")
    for old, new in changes:
        text = dataclasses.replace(text, source=text.replace(old, new))
    return text


# %%
VOTE = "if (!track && fmaxf(sum_reg[0], sum_reg[1]) > 32.f) *vote() = 1;"
WAIT = "fa::wgmma_wait_group<0>(); // O is there too"
BOTH = "j0 <= track_to ? overlap(std::false_type(), 0) : overlap(std::true_type(), track_to)"
LOOK = "fa::mbarrier_wait(K_full + 8 * V_ring.stage, V_ring.parity);"
made = {
    "with the vote": rung("32_ping_pong"),
    "without": edited((VOTE, "")),
    "a __syncwarp": edited((VOTE, "__syncwarp();")),
    "a second look": edited((VOTE, ""), (WAIT, LOOK + WAIT)),
    "tracking": edited((BOTH, "overlap(std::true_type(), 0)")),
}
compile_ahead(made.values(), "sass")
draw_pingpong.loop({name: sass.loop_lines(one, 128, "bf16") for name, one in made.items()})

# %% [markdown]
# **What to see.** Without the vote, ptxas moves the wait *up*, over most of the exponentials: they stand behind the solid line, and no product of their own runs under them any more. Nothing in the result gives a hint of it, nor in the source; the disassembly does.
#
# Why? Nothing between the two waits needs to be done by the second one, and within a stretch of code without branches ptxas arranges instructions as it sees fit. (Behind the wait, exponentials and the rounding of $P$ are mixed: two kinds of units side by side. For that the order isn't bad.) A `__syncwarp` is no border to it. A branch is, for most of them: the fourth strip has a second look at a barrier that is known to be open, which is a test and a jump back in case it weren't. And the vote is one: whether to store a 1 depends on the sums, the sums on all exponentials, and what comes behind the store in the source, the wait, stays behind it.
#
# So the vote does two things, and the second was found by looking. Is it *faster* that way? More exponentials run under a product; but rounding now stands alone behind the wait. Make a guess; steps 4 and 5 of the table below are such kernels. The copy of the loop that tracks has nothing to vote on, so there the wait stands before all of the exponentials (the last strip). Held back by a question that is never true, it was slower.
#
# The order isn't all that ptxas decides. An `FFMA` before each exponential takes three operands: an element of $S$, the scale and $-m$. Registers lie in two banks, the even numbers in one and the odd ones in the other ([Jia et al., 2018](https://arxiv.org/abs/1804.06826)). What an instruction marks `.reuse` is at hand for those behind it; the rest has to be fetched. Let the kernel form its scale by itself instead of the launcher. **Predict**: at $d = 64$, how many of the 64 `FFMA` have to fetch two registers from one bank?

# %%
FORMED = "float) {\n  const float scale_log2 = fmaxf(fabsf(a.scale), 1e-30f) * fa::log2_e;"
scales = {"an argument": rung("32_ping_pong"), "formed by the kernel": edited(("float scale_log2) {", FORMED), d=64)}
pd.DataFrame({f"the scale is {name}": sass.same_bank(one, 64) for name, one in scales.items()})

# %% [markdown]
# **What to see.** The same instructions, and half of the `FFMA` with two registers of one bank. Formed by the kernel, the scale takes a register of every thread, and the `.reuse` that $-m$ would need. An argument lies in a *uniform* register, which belongs to the whole warp and to no bank. It made the kernel 5 % faster at $d = 64$. At $d = 128$ ptxas takes a uniform register either way.

# %% [markdown]
# ## 5 · Who is done takes the next one
#
# The grid is persistent: a CTA per SM, each works on one tile of queries after the other, and under a causal mask these are of very different length. Notebook 31 has compared ways to hand them out, with a model in which all SMs are equally fast: dealing out in rows loses up to 30 %, a *counter*, from which everybody takes the next number when done, next to nothing. Its exercise 31.3 asked a fair question, though: with all lengths known beforehand, can't the host make lists that are just as good?
#
# In that model, yes. But SMs aren't equally fast. One finds its keys in the L2 and another has to wait for HBM; they share a power budget and a clock with all others. Let us add that to the model: each SM has a speed of its own, and the spread of the speeds is ours to choose.


# %%
def query_tiles(N, D, heads):
    """Tiles of keys of each tile of queries in the order of their numbers: the longest first, of as many heads as fit in the L2."""
    Br, at_once, work = sass.tile(rung("32_ping_pong"), D)["Br"], max(1, (32 << 20) // (4 * N * D)), []
    for first in range(0, heads, at_once):
        group = min(at_once, heads - first)
        work += [-(-min(i0 + Br, N) // 128) for i0 in reversed(range(0, N, Br)) for _ in range(group)]
    return work


# %%
def from_lists(work, speed):
    """Lists made for SMs of equal speed, and run on these."""
    place = schedule.run(work, len(speed))["place"]
    took = pd.Series(work) / place.map(dict(enumerate(speed)))
    end = took.groupby(place).cumsum()
    return pd.DataFrame({"place": place, "begin": end - took, "end": end}).round(9)


def from_a_counter(work, speed):
    free, rows = [(0.0, place) for place in range(len(speed))], []
    for length in work:  # in the order of the numbers, each to whoever is free first
        begin, place = heapq.heappop(free)
        rows.append((place, begin, begin + length / speed[place]))
        heapq.heappush(free, (rows[-1][2], place))
    return pd.DataFrame(rows, columns=["place", "begin", "end"])


# %%
work = query_tiles(4096, 128, heads=64)
speed = 1 + 0.03 * np.random.default_rng(0).standard_normal(132)
runs = {"from a counter": from_a_counter(work, speed), "from lists": from_lists(work, speed)}
draw_masks.occupancy(runs, 132)

# %%
rows = {}
for spread in (0, 0.01, 0.03, 0.05):
    speed = 1 + spread * np.random.default_rng(0).standard_normal(132)
    ideal = sum(work) / speed.sum()
    for name, way in (("from lists", from_lists), ("from a counter", from_a_counter)):
        rows.setdefault(f"{spread:.0%}", {})[name] = f"{way(work, speed)['end'].max() / ideal - 1:.1%}"
pd.DataFrame(rows).T.rename_axis("spread of the SMs' speeds")

# %% [markdown]
# **What to see.** Time beyond that of 132 SMs which are all busy to the end. A list waits for its slowest SM, so it loses about as much as the slowest lags behind. The counter doesn't ask why somebody is late, and the last tiles are short, so little is left over at the end. Without a mask all tiles are equally long, and both lose the part of the last row that is empty: exercise 32.3.
#
# What does it cost? An atomic addition goes to the L2 and back. The producer asks for the next number when it begins with a tile of queries and needs it when it has sent for the last of its keys. The number reaches the consumers through shared memory, under the barrier that tells them that $Q_i$ has landed.

# %%
show.region("32_ping_pong", "schedule")

# %% [markdown]
# ## The kernel

# %%
show.region("32_ping_pong", "tile")

# %% [markdown]
# The producer, with the counter. The number of the tile travels to the consumers through shared memory, under the barrier that says that $Q_i$ has landed; −1 is the end.

# %%
show.region("32_ping_pong", "producer")

# %% [markdown]
# The next $Q_i$ is sent for when the last of this one's keys has been, to a place of its own: the consumers are still some tiles behind.
#
# The products of a consumer. They are functions because they are started from more than one place; the compiler puts each where it is called.

# %%
show.region("32_ping_pong", "products")

# %%
show.region("32_ping_pong", "exponentials")

# %% [markdown]
# The maximum, in two parts: $O$ may not be rescaled while a product writes it.

# %%
show.region("32_ping_pong", "maximum")

# %% [markdown]
# The first tile of each tile of queries, those on the diagonal and those voted down are done alone, as in rung 31: product, wait, mask, maximum, exponentials.

# %%
show.region("32_ping_pong", "online_update")

# %% [markdown]
# Then the loops of section 3, as long as whole tiles follow and $P$ stands. What is left is to find out why they ended:

# %%
show.region("32_ping_pong", "settle")

# %% [markdown]
# And a warpgroup that sees nothing of a tile, because all of its rows come before it, may skip the tile but not its turn:

# %%
show.region("32_ping_pong", "skip")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# Order must not matter. Which CTA works on which tile differs from run to run on a GPU, but a tile is computed by one warpgroup from beginning to end, always in the same order. So two runs give the same bits:

# %%
q, k, v = (torch.randn(1, 4, 700, 64, device=device).bfloat16() for _ in range(3))
first, again = (kernel(q, k, v, causal=True) for _ in range(2))
print("the same bits:", all(torch.equal(a, b) for a, b in zip(first, again, strict=True)))

# %%
plot.recorded("32_ping_pong", "error", plot.error)

# %% [markdown]
# ## Predict, then measure
#
# ### The two of them, alternating
#
# The kernel can be made to note, at every region and around every wait, what time it is: `helpers.roles` puts the notes in. On the emulator there is no clock, only an order of events; draw the lanes that you expect from the loop above, and compare:

# %%
x = [torch.randn(1, 1, 640, 128, device=device).bfloat16() for _ in range(3)]
events = roles.times(single("32_ping_pong", 128, "bf16"), *x)
unit = "SM clocks" if device == "cuda" else "order of events"
draw_pingpong.lanes({"32_ping_pong, d = 128, five tiles of keys": events}, unit)

# %% [markdown]
# **What to see.** Between the first $S$ and the last $O$, the two consumers are never at their products together: one starts $S$ and $O$ and passes the turn, and while it is at its softmax the other one does the same. (The first tile goes the long way and has no turn, and none follows the last one.) What the lanes show is what a warpgroup's *threads* are doing. To start a product takes a moment; the product itself runs on behind them, under the softmax that follows.
#
# The same with clocks, from the middle of a long sequence on the recorded device:


# %%
def swim_lanes(notes, length=12000):
    """Two stretches of `length` clocks, with d = 128 and d = 64, from the middle of a CTA's work."""
    cases = {}
    for D, frame in notes.groupby("D"):
        middle = (
            frame.groupby("lane")["end"].max().min() // 2
        )  # a lane that notes more often has notes left for less time
        frame = frame.assign(begin=frame["begin"] - middle, end=frame["end"] - middle)
        cases[f"32_ping_pong, D = {D}"] = frame[frame["end"] > 0].assign(begin=lambda f: f["begin"].clip(lower=0))
    return draw_pingpong.lanes(cases, f"SM clocks, {record.about('32_ping_pong', 'roles')['device']}", (0, length))


plot.recorded("32_ping_pong", "roles", swim_lanes, by="python -m helpers record roles 32_ping_pong")


# %%
def clocks_per_tile(notes):
    """From one S to the next of each consumer in the middle of its notes, beside what the tensor cores need for all consumers' tiles."""
    rows = []
    for (D, lane), frame in notes[notes["lane"] != "producer"].groupby(["D", "lane"]):
        starts = frame.query("kind == 'scores' and end.max() * 0.3 < begin < end.max() * 0.7")["begin"]
        rows.append((D, lane, int(starts.diff().median())))
    found = pd.DataFrame(rows, columns=["D", "lane", "clocks per tile"]).pivot(
        index="D", columns="lane", values="clocks per tile"
    )
    return found.assign(products=[found.loc[D].count() * budget.loc[D, "products"] for D in found.index]).astype(
        "Int64"
    )


plot.recorded("32_ping_pong", "roles", clocks_per_tile, by="python -m helpers record roles 32_ping_pong")

# %% [markdown]
# **What to see.** One after the other the consumers start $S$ and $O$ (green), and under each green box the others are at their softmax, or wait. Three waits belong to a tile: for $K_j$, for the turn, and between $S$ and $O$ for $V_j$. At $d = 128$ each takes some 160 to 270 clocks; at $d = 64$ the one for the turn takes about 1,100: two others have to come by first. Waits for products have no box of their own: the one for $S$ is the end of $O$'s box, the one for $O$ is in the softmax's. Every note takes time itself, so the kernel without them is faster, above all at $d = 64$, where a tile is short.

# %% [markdown]
# ### Every step
#
# How this kernel was found: each row is a variant of an earlier one, with what was expected of it before it was run, whether it stayed, and what was measured. `ratio` is the time of SDPA CUDNN over its own, side by side, in bf16, and `ratio_causal` the same under a causal mask. `between_waits` are the exponentials in each piece of the code between its waits. Cover the columns with ratios and guess before you look.


# %%
def table(steps):
    return record.step_table(steps, "between_waits").style.format(precision=2, na_rep="")


plot.recorded("32_ping_pong", "steps", table)

# %%
plot.recorded("32_ping_pong", "steps", lambda s: draw_pingpong.steps(s, "Each variant, N ≥ 1024, bf16", "SDPA CUDNN"))

# %% [markdown]
# **What to see.** The predictions, first of all: they were written down before, and many are wrong.
#
# - **Turns** (2 and 15): without them nothing was lost at $d = 128$, and at $d = 64$ two percent (15) or, under a mask, five (2). Section 1's model has the direction right, and is far off in size: left to themselves, warpgroups don't stay in step.
# - **The wait that moves** (1, 4, 5; all with a row maximum, at $d = 128$). In 1, ptxas had put all exponentials behind both waits. To hold half of them in front brought a few percent, to hold all of them no more than that. At $d = 64$ the border didn't hold, `between_waits` says so, and yet the times differ by several percent: a warning how far these first ten rows can be trusted, each of which ran beside cuDNN in a process of its own.
# - **Finishing a tile of queries before the next one begins** (11) should have *cost* something, as the tensor cores idle in between. It gained a tenth. A loop that can go on into another tile of queries has to be ready for it in every turn; without that it is half as long. What the tensor cores did wait for at that point was something else: $Q_i$. To send for it early (20) brought another seven percent at $d = 128$.
# - **No maximum** (13): a few percent, less than expected at $d = 64$, more at 128. Step 16 is a kernel that is wrong, to learn what the mask's instructions cost where they are only stepped over: five percent. A loop without them (17) gave a part of it back.
# - **The vote at the next turn** (25) in place of a barrier of its own: one percent, for nothing but another place.
# - **One piece of code** for the first tile, those on the diagonal and those done again (28): half the instructions of 25, for a percent of its speed at $d = 128$ and four or five under the mask, measured in different runs. It stayed: this kernel is to be read.
# - **What didn't help**: $S$ in two halves, so that exponentials can begin under its second half (21, 26); a part of the exponentials by a polynomial (18, 27), which without a mask gains one to three percent at $d = 64$ and, where it was tried, loses three at 128; $Q_i$ in registers (10, 23); smaller tiles (9, 19); rescaling $O$ only where it is needed (6, 7).
# - **Tensor cores that idle at a tile's end** (30). Behind the last product of a query tile nothing is started until $O$ has been written. To start the next tile's $S$ before that saves clocks: with the notes of clocks above in it, a CTA is done in 8 % fewer at $N = 1024$ and $d = 128$. Without them it saves hardly any *time*: one percent at $d = 64$, nothing at 128. A third stage of $K_j$ (31), and keys asked for into the L2 ahead of time (32), cost a little. What waits for nothing draws more power, and this card's clock comes down to what its power allows: see "What still hurts".
# - **The counter** (3 is without): at $d = 128$ under a causal mask the tiles dealt out beforehand cost a sixth; without a mask, nothing. Notebook 31's model says the same of that deal.
#
# ### The X-ray
#
# Two things can be predicted and counted. The first: under a causal mask, tiles of keys that no row of a CTA sees must not be fetched. The bytes of $K$ for two heads of $N = 768$ at $d = 64$, as the copy engine is asked for them:

# %%
small = single("32_ping_pong", 64, "bf16")
q, k, v = (torch.randn(1, 2, 768, 64).bfloat16() for _ in range(3))
rows = {}
for causal in (False, True):
    ray = xray(small, q, k, v, causal=causal)
    tiles = [-(-min(i0 + 192, 768) // 128) if causal else 6 for i0 in range(0, 768, 192)]
    rows[f"causal={causal}"] = {"K bytes": ray.tensors.bytes_read.K, "predicted": 2 * sum(tiles) * 128 * 64 * 2}
    rows[f"causal={causal}"]["findings"] = len(ray.findings)
pd.DataFrame(rows).T

# %% [markdown]
# The second: how often is a tile voted down? It costs its product of $S$ once more, four `wgmma` at $d = 64$ for each of four warps. **Predict** how many of three warpgroups' eight tiles of keys it is, for inputs of the usual size, for queries eight times as large, and for scores that rise all the way along the keys as the kernel meets them:

# %%
q, k, v = (torch.randn(1, 1, n, 64) for n in (192, 1024, 1024))
steep = q.clone(), torch.cat([torch.linspace(60, 0, 1024).reshape(1, 1, -1, 1), k[..., 1:]], -1)
steep[0][..., 0] = 8
usual, counts = 12 * 8 * (4 + 8), {}  # warps, tiles, products of S and O
for name, (q_in, k_in) in {"usual": (q, k), "large queries": (8 * q, k), "rising": steep}.items():
    seen = xray(small, q_in.bfloat16(), k_in.bfloat16(), v.bfloat16()).trace.instructions["wgmma.mma_async"]
    counts[name] = {"wgmma": seen, "tiles done again, of 24": (seen - usual) // 16}
pd.DataFrame(counts).T

# %% [markdown]
# None, and one for each warpgroup: from there on it tracks.

# %% [markdown]
# ## Beside its peers

# %%
plot.recorded("32_ping_pong", "forward", plot.throughput)


# %%
def fast(samples):
    """The peers that a ratio is formed to: those that ran beside this rung in one process."""
    return [peer for peer in ("SDPA FLASH", "SDPA CUDNN", "FA3", "FA4") if peer in set(samples["name"])]


plot.recorded("32_ping_pong", "forward", lambda s: plot.ratio(s, "32_ping_pong", fast(s)))

# %% [markdown]
# Under a causal mask:

# %%
plot.recorded("32_ping_pong", "causal", plot.throughput)


# %%
def summaries(samples):
    tables = {peer: record.summary(samples, "32_ping_pong", peer) for peer in fast(samples)[1:]}
    return pd.concat(tables, names=["peer"]).droplevel(1).round(3)


plot.recorded("32_ping_pong", "forward", summaries)

# %%
plot.recorded("32_ping_pong", "causal", summaries)

# %% [markdown]
# The columns as in notebook 13: geometric mean over the headline shapes with $N \ge 1024$, the lowest and highest of them, and the worst of all recorded shapes. FA3 and FA4, FlashAttention-3 and -4, are in these tables and figures where they could be imported and ran in the same process. A ratio by way of a third kernel, on another day, would be none.
#
# **What to see.** The lead over cuDNN is smallest at short lengths and by and large grows with them. Where a tile of queries has few tiles of keys, its ends weigh most: at $N = 512$ one of four is done alone. At $d = 128$ it is 3 % ahead there, and 2 % behind under the mask. FlashAttention-3 is passed at every length but for $d = 128$ under the mask, where the two are level.
#
# (The table of steps has this kernel, and step 29, at ratios of other runs, over three of these five lengths, and without slower peers in between, during which the card cools.)
#
# ### The price, by family
#
# These were random inputs. The other families are described in [data/README.md](../data/README.md#families-of-inputs).

# %%
five = ["32_ping_pong", "31_warp_specialized", "SDPA CUDNN", "FA3", "FA4"]
FAMILIES = {"kind": "families", "by": "python -m helpers record families 32"}
plot.recorded("32_ping_pong", draw=lambda samples: plot.families(samples, five), **FAMILIES)

# %%
plot.recorded("32_ping_pong", draw=lambda samples: plot.families(samples, five, causal=True), **FAMILIES)

# %% [markdown]
# **What to see.** The other kernels form every maximum on any input, so their points move less. Ours is ahead where little is missed. Elsewhere the copy that tracks runs, with the instructions of rung 31's softmax; the early start of $S$ and the turns keep it ahead of rung 31 on long sequences at $d = 128$; at 64 they are about level. $Q \times 2$ and the sawtooth pay for accuracy alone, as in rung 13.
#
# How far is the kernel, on random inputs, from a product without any softmax? cuBLAS multiplied two square bf16 matrices (8192) in turn with the kernel; `ratio` is our TFLOP/s over its:

# %%
plot.recorded("32_ping_pong", "matmul", lambda samples: record.ratio_to_cublas(samples, "32_ping_pong").round(3))

# %% [markdown]
# ### The staircase, from 01 to 32
#
# At $N = 4096$, in fp16 where a rung takes it, on a logarithmic scale. The lines: SDPA FLASH, which is FlashAttention-2; cuDNN; FlashAttention-3 and -4, where they ran beside a rung; Triton's tutorial kernel, from an [earlier study](../data/README.md) on a card of the same kind; cuBLAS's product of two large fp16 matrices; and what the card's [datasheet](https://www.nvidia.com/en-us/data-center/h200/) promises for dense products of 16 bits.

# %%
plot.staircase(scoreboard.speeds(summit=True))

# %% [markdown]
# ## What still hurts
#
# 1. **Short lengths at $d = 128$.** There the lead over cuDNN is least. Nsight Compute, on step 26 of the table at $N = 4096$, found the tensor cores at work for 85 % of the time, at a clock of 1.64 GHz of the 1.98 that the card can do, and warps that waited for their turn for 7 % of it, for $K_j$ for 3 % and for $V_j$ for 2 % (the conditions of that record have it). Steps 30 to 32 went after these waits, and gained nothing: the clock is what is short.
# 2. **Ends.** A tile of queries begins with a tile of keys that is done alone and ends with a product under which nothing happens. While one warpgroup is at that, only the others keep the tensor cores busy. The shorter the sequence, the larger that part; under a causal mask the tiles on the diagonal are done alone, too.
# 3. **Exponentials at $d = 64$.** There are as many clocks of them as of products, so both units would have to be busy all the time. Exercise 32.1 looks ahead.
# 4. **What no kernel gets.** cuBLAS, with nothing but products to do, stays far below the datasheet. 4096 operations per clock on 132 SMs come to the datasheet's 990 TFLOP/s at 1830 MHz. While the samples above were taken, in short bursts with pauses, the card was seen at these clocks and drew this power (of at most 700 W), the slower peers included; what the clock does within a burst they don't show:


# %%
def conditions(samples):
    about = record.about("32_ping_pong")
    return pd.DataFrame({name: about[name] for name in ("sm_clock_mhz", "power_w")}).T


plot.recorded("32_ping_pong", "forward", conditions)

# %% [markdown]
# 5. **The other direction.** Training needs gradients, and in the backward pass five products want operands that other products have just made: [33 · Backward on Hopper](33_backward_wgmma.ipynb).

# %% [markdown]
# ## Exercises
#
# ### Exercise 32.1 · A GPU with faster products
#
# On this GPU exponentials take as long as products at $d = 64$. Suppose that the next one has tensor cores that are $f$ times as fast, and the same 16 exponentials per clock. At which $d$ are they equal?

# %%
# Exercise 32.1


def balanced(f):
    return 64


# %%
def equal_times():
    for f in (1, 2, 4):
        products, exponentials = 2 * (2 * 64 * 128 * balanced(f)) / (4096 * f), 64 * 128 / 16
        assert products == exponentials, (
            f"f = {f}: {products:.0f} clocks of products, {exponentials:.0f} of exponentials"
        )
    return True


exercise.verify("32.1", equal_times, hint="the clocks of products grow with d, those of exponentials do not")

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def balanced(f):
#     return 64 * f
# ```
#
# With $f = 2$ the usual $d = 128$ is where $d = 64$ is on this GPU: nothing may be left that isn't hidden.
# </details>

# %% [markdown]
# ### Exercise 32.2 · Whose turn is it?
#
# Three edits of the turns, with three consumers. Predict for each, before you run anything: is the result still right, or does the kernel hang?
#
# a. nobody passes a turn on before the first tile; b. warpgroup 1 does, not the last one; c. everybody passes the turn to the warpgroup after the next.

# %%
edits = {
    "a": ("if (warpgroup == consumers) pass_turn();", "if (false) pass_turn();"),
    "b": ("if (warpgroup == consumers) pass_turn();", "if (warpgroup == 1) pass_turn();"),
    "c": ("turns + 1 + warpgroup % consumers", "turns + 1 + (warpgroup + 1) % consumers"),
}

# %%
# Exercise 32.2
predicted = {"a": "right", "b": "hangs", "c": "hangs"}  # "right" or "hangs"


# %%
def what_happens():
    x = [torch.randn(1, 1, 300, 64).half() for _ in range(3)]
    three = {name: single("32_ping_pong", 64).replace(old, new) for name, (old, new) in edits.items()}
    compile_ahead(three.values(), "run")
    for name, text in three.items():
        edited = load(source=text, device="cpu", quiet=True)
        report = check(edited, [Case("three tiles of keys", *x)])
        happens = "right" if report.ok else "hangs" if "deadlock" in str(report) else "wrong"
        assert predicted[name] == happens, f"{name}: not {predicted[name]}"
    return True


exercise.verify("32.2", what_happens, hint="draw the three barriers in a ring, and follow the one turn around it")

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# predicted = {"a": "hangs", "b": "right", "c": "right"}
# ```
#
# There is one turn, and it must be somewhere at the beginning: without the first pass everybody waits. Who gets it first, and which way round it goes, makes no difference, as long as no two have the same successor and the ring takes in everybody. On the emulator the hang is an error that names the barriers and who waits there; on a GPU it is a kernel that never ends.
# </details>

# %% [markdown]
# ### Exercise 32.3 · What a counter can't do
#
# Without a mask all tiles of queries take equally long, and no way of handing them out can make 132 SMs end together when there are 133 tiles. Write the share of its time that an average SM idles, for any number of tiles and SMs. Which headline lengths does it hurt most?

# %%
# Exercise 32.3


def idle(tiles, sms=132):
    return 0.0


# %%
def as_the_model():
    for tiles in (1, 131, 132, 133, 264, 300, 1398, 2048):
        span = schedule.makespan([1] * tiles, 132)
        expected = 1 - tiles / (span * 132)
        assert abs(idle(tiles) - expected) < 1e-9, f"{tiles} tiles: {idle(tiles):.1%}, the model says {expected:.1%}"
    return True


exercise.verify("32.3", as_the_model, hint="how many rows of 132 are begun, and how full is the last one?")

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# def idle(tiles, sms=132):
#     rows = -(-tiles // sms)
#     return 1 - tiles / (rows * sms)
# ```
#
# The headline workload has as many tiles at every length, 2048 with 128 rows each: the last of 16 rows is half full, 3 %. With one sequence of a short text it is another matter: 32 heads of $N = 640$ are 160 tiles, and 39 % of the machine idles. That is where keys have to be split, as in notebook 21.
# </details>

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Two warpgroups, no turns: what goes wrong if they start together?</summary>
#
# They share the tensor cores, finish together, do their softmax together, and go on like that: one kind of unit always idles.
#
# </details>
# <details><summary>2. Why is the next S started before O, and not the other way round?</summary>
#
# Its softmax can begin as soon as it is complete, while the tensor cores are at O. The other way round nothing would be under way by then.
#
# </details>
# <details><summary>3. Why may P not be rounded as soon as it is there?</summary>
#
# The rounded P of the tile before is an operand of the product that is under way, and lies in the registers that it would go to.
#
# </details>
# <details><summary>4. The source waits after the exponentials, the machine code before them. Is that a bug of the compiler?</summary>
#
# No: to wait earlier is never wrong. It only takes away what the source was written for, and the result gives no hint of it.
#
# </details>
# <details><summary>5. Why does a counter beat any order that is laid down beforehand?</summary>
#
# It doesn't have to know how long tiles take, nor how long an SM was held up. It gives the next one to whoever is first.
#
# </details>
