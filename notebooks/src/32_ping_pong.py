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
# [← 31 · Warp-specialised](31_warp_specialized.ipynb) | [32_ping_pong.cu](../kernels/32_ping_pong.cu) | [glossary](glossary.md) | [33 · Backward on Hopper →](33_backward_wgmma.ipynb)
#
# **After this notebook you can**
# - draw up, in clocks, what a tile costs the units of an SM, and say what can hide under what;
# - follow a warpgroup that has two products under way, and several warpgroups that take turns;
# - read off the disassembly which instructions stand between two waits, and notice when the compiler has moved a wait;
# - tell which of a kernel's steps paid, and which only looked as if they would.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [31 · Warp-specialised](31_warp_specialized.ipynb) for producer and consumers, and [13 · Tuned](13_tuned.ipynb) for the softmax without a maximum. No GPU: without one the kernel runs on the emulator, and the timings shown are recorded ones.
#
# **The idea in one line**: while one product runs, take the exponentials of another.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import dataclasses

import pandas as pd
import torch

from helpers import Case, blank, budget, check, compile_ahead, draw_backward, draw_mma, draw_pingpong, exercise, hint
from helpers import load, overlap, plot, predict, progress, record, roles, rung, sass, scoreboard, show, single, stages
from helpers import wgmma_units, xray

# %load_ext helpers

torch.manual_seed(0)
compile_ahead(["31_warp_specialized", "32_ping_pong"], "sass")  # in the background, for later
kernel = load("32_ping_pong")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Rung 31 gave the fetching to a warp of its own. Its other warps, the [consumers](glossary.md#producer-consumer), do three things for each tile, one after the other: they wait for $S = QK^\top$, they make $P$ of it, they wait for $O \mathrel{+}= PV$. While a warpgroup computes exponentials it has nothing for the tensor cores, and while it waits for a product it computes nothing.
#
# How long does each take? In one clock an SM does 2048 multiply-adds of 16-bit numbers ([NVIDIA](https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/)), 16 exponentials on its special function units ([MUFU](glossary.md#mufu); [CUDA C++ Programming Guide](https://docs.nvidia.com/cuda/cuda-c-programming-guide/#arithmetic-instructions)) and one instruction on each of four schedulers. A warpgroup has one warp on each scheduler, so a loop of $n$ instructions takes at least $n$ clocks. Shared memory delivers 128 bytes, and `wgmma` is counted as reading an operand there once per instruction: notebook 30 measured that it isn't read twice. For a warpgroup's 64 rows and a tile of 128 keys:

# %% tags=["raises-exception"]
models = {f"31, d = {d}": wgmma_units.forward("31_warp_specialized", d) for d in (64, 128)}
text = "At d = 64 tensor cores and MUFU need 512 clocks each, at d = 128 the tensor cores 1024 and MUFU 512."
budget.units(wgmma_units.table(models), "Rung 31: 64 rows and 128 keys (a model, not a measurement)", text)

# %% [markdown]
# The instructions are nearly all softmax: scale, maximum, exponential, sum, rescaling of $O$, rounding of $P$. At $d = 64$ exponentials alone take as long as both products. If a warpgroup had the SM to itself, and its products and its softmax came one after the other, which share of the time would the tensor cores be busy at $d = 64$?

# %%
share = ...  # your prediction: between 0 and 1

# %% tags=["reveal", "raises-exception"]
clocks = pd.DataFrame({d: wgmma_units.forward("31_warp_specialized", d) for d in (64, 128)})
serial = clocks.loc["tensor cores"] / (clocks.loc["tensor cores"] + clocks.loc[["MUFU", "issue slots"]].max())
predict(share, serial[64], "of the time at d = 64")
print(f"{serial[128]:.2f} at d = 128")

# %% [markdown]
# A warpgroup isn't alone: rung 31 has two or three consumers. If one is at its softmax while another multiplies, both units work. *If*: nothing in rung 31 arranges for it.
#
# Why not more consumers, or longer tiles? Two things on an SM can't be shared out any further: 227 KB of shared memory, and 65536 registers. What would other shapes need?

# %%
rows = {}
for d, consumers, Bc in ((64, 3, 128), (64, 3, 192), (64, 4, 128), (128, 2, 128), (128, 2, 192), (128, 3, 128)):
    tile = draw_backward.constants(kernel.rung.source, d, consumers=consumers, Bc=Bc)
    threads = 128 * (1 + consumers)  # a CTA is launched with as many registers for each, in steps of 8
    left = threads * (65536 // threads // 8 * 8) - 128 * tile["producer_registers"]
    rows[d, 64 * consumers, Bc] = {"shared memory, KB": -(-tile["smem_bytes"] // 1024), "of": 227}
    most = min(left // (128 * consumers) // 8 * 8, 255)  # setmaxnreg takes multiples of 8
    rows[d, 64 * consumers, Bc] |= {"registers for S, P, O": 3 * Bc // 4 + d // 2, "of a thread's": most}
pd.DataFrame(rows).T.rename_axis(["d", "rows", "keys"])

# %% [markdown]
# At $d = 128$ a third consumer or longer tiles don't fit in shared memory: $Q$ has two places, $K$ three stages, $V$ two. At $d = 64$ longer tiles or a fourth consumer would need more registers than there are.
#
# ## 1 · Taking turns
#
# Let a **model** play it through. Warpgroups share the tensor cores and whatever does the softmax. A product takes half of the tensor cores' clocks above, a softmax the larger of MUFU's and the instructions'. If several ask for the tensor cores at once they get equal shares. Nothing else takes time.
#
# In the first case below all consumers start at the same moment. The other two have a rule: **the tensor cores finish what one warpgroup has asked for before they begin with another's**. Which of the three cases has gaps between the products of the tensor cores?

# %% tags=["reveal", "raises-exception"]
product, softmax = clocks.loc["tensor cores", 128] / 2, clocks.loc[["MUFU", "issue slots"], 128].max()
cases = {}
for name, under, turns in [
    ("start together, no turns", "none", False),
    ("in turns", "none", True),
    ("in turns, and the next S is started before O", "next", True),
]:
    cases[name] = overlap.run(overlap.jobs(2, 5, product, softmax, under), turns)
draw_pingpong.lanes(cases, "clocks of the model, d = 128, five tiles")

# %% [markdown]
# **What to see.** Above: the two warpgroups get half of the tensor cores each, finish together, then do their softmax together, and so on for ever: at any moment either the tensor cores idle or everything else. In the middle, one rule has set them apart by half a beat: one is at its softmax while the other multiplies, like the two sides of a ping-pong table. ([FlashAttention-3](https://arxiv.org/abs/2407.08608), section 3.1.)
#
# On the GPU you start your products once your predecessor has started theirs. That takes two instructions. A [named barrier](glossary.md#named-barrier) opens when as many threads as it is told have come by, and of those some may go on without waiting:

# %%
show.region("32_ping_pong", "turns")

# %% [markdown]
# `bar_sync` arrives and waits, `bar_arrive` only arrives. Barrier `turns + w` is warpgroup $w$'s: it opens when $w$'s own 128 threads wait there *and* the 128 threads of its predecessor have come by. So there is one turn, and it is handed around. At the start nobody has it; that is why the last warpgroup passes one on before its first tile.
#
# ## 2 · Two products under way
#
# The lowest picture above has a second idea in it. A warpgroup that has finished $P_j$ can start *two* products: $O \mathrel{+}= P_j V_j$, and the next tile's $S_{j+1} = Q K_{j+1}^\top$, which does not depend on $P_j$ at all. Start $S_{j+1}$ first. When it is complete, its softmax can begin while the tensor cores are still at $O$: a softmax *under* a product of its own warpgroup ([section 3.2](https://arxiv.org/abs/2407.08608) of FlashAttention-3).
#
# `wgmma` is made for that. Products are handed in as [groups](glossary.md#commit-group), and a warpgroup waits *until at most n of its groups are left*, the youngest ones. In the loop:
#
# | in the loop over tiles | under way behind it |
# |---|---|
# | start $S_{j+1}$, then $O \mathrel{+}= P_j V_j$ | both |
# | wait until 1 is left | $O$ |
# | exponentials: $S_{j+1}$ becomes $P_{j+1}$ | $O$ |
# | wait until none is left; round $P_{j+1}$ to 16 bits | nothing of its own, but the other warpgroups' products |
#
# Why is $P_{j+1}$ rounded only at the end? Rounded $P_j$ is an operand of the product that is under way, and it comes from registers, which may not be written before the product is complete.
#
# Unless it tracks the maximum, the kernel at $d = 64$, where $O$ takes half as long, waits for *both* products: $P$ is rounded among the exponentials, and long sequences are up to 8 % faster ([39 · Log](39_log.ipynb)).
#
# What does the model say of either idea alone, and of both? The share of the time in which the tensor cores have work, over 64 tiles:

# %% tags=["raises-exception"]
rows = {}
for d, groups in ((64, 3), (128, 2)):
    times = clocks.loc["tensor cores", d] / 2, clocks.loc[["MUFU", "issue slots"], d].max()
    rows[d] = {}
    for under in ("none", "next"):
        for turns in (False, True):
            work = overlap.jobs(groups, 64, *times, under)
            name = {"none": "S, softmax, O", "next": "next S before O"}[under] + (", in turns" if turns else "")
            rows[d][name] = overlap.multiplying(overlap.run(work, turns), work)
pd.DataFrame(rows).T.rename_axis("d").map("{:.0%}".format)

# %% [markdown]
# **What to see.** At $d = 128$ either idea is enough. At $d = 64$, with as many clocks of exponentials as of products, only turns keep the warpgroups apart. The model has no latencies: a product that is asked for a little too late leaves a gap, and a queue of two has fewer. So turns will gain less than in the model, and the second product more.
#
# ## 3 · Less softmax, and a vote
#
# Leaving an instruction out is better than hiding it. As in rung 13, $P$ is taken with the maximum of *earlier* tiles. As long as a lane's sum over its columns of a row stays below 32, the result is as accurate; where it doesn't, the tile is done again, and the maximum is tracked from there on. (FlashAttention-4 forms the maximum, and rescales $O$ only where it has risen beyond a threshold, [`rescale_threshold`](https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/cute/softmax.py).)
#
# A maximum is better met early than missed. Scores are often largest at the first keys ([attention sinks](https://arxiv.org/abs/2309.17453)), at the last ones, or near the diagonal. So the producer fetches **those tiles first**, but moves only tiles that all rows see whole: consumers need not know of it.

# %%
show.region("32_ping_pong", "walk")

# %% [markdown]
# The maximum is tracked in the last tile and in two more. Then `some_peaked` decides whether to go on: if few keys take most of some rows of a warp (a small $l$), other rows may meet such keys later. To do a tile again costs far more than to track one; up to four whole tiles are always tracked.
#
# Two things are new here. **128 threads decide together**: `wgmma` is an instruction of four warps, so all of them do $S$ again, or none. A warp whose $P$ may not stand leaves a 1 in shared memory, a **vote**. Everybody hears of it at a barrier that is on the way already: the next turn. **$S$ is gone, $K_j$ is not**: $P$ has taken the place of $S$, so doing a tile again takes the product again, and $K_j$ stays until the votes are read.
#
# A warpgroup's way through the tiles, numbered as in the kernel:

# %%
draw_pingpong.states()

# %% [markdown]
# **What to see.** Most of the time goes round between (2) and (3). The first tile, tiles on the diagonal and those voted down are exact (1). A warpgroup that finds a vote at (2) *keeps* its turn (orange) while it does the tile again, and the others wait: `has_turn` remembers it.

# %%
show.region("32_ping_pong", "votes")

# %%
show.region("32_ping_pong", "overlap")

# %%
show.region("32_ping_pong", "settle")

# %% [markdown]
# `overlap` is compiled twice: one copy tracks the maximum, the other one votes; a branch inside one loop would cost both. What the voting copy saves per tile, compared with rung 31's loop:

# %% tags=["raises-exception"]
loops = {stem: sass.between_waits(stem, 128) for stem in ("31_warp_specialized", "32_ping_pong")}
saved = pd.DataFrame({stem: pieces.sum() for stem, pieces in loops.items()})
saved.assign(change=saved["32_ping_pong"] - saved["31_warp_specialized"]).T

# %% [markdown]
# The maximum and the rescaling are gone. And in rung 31 no exponential can begin before the maximum of its whole row is known, over 32 registers and then over four lanes. Here the first begins as soon as $S$ is there.
#
# ## 4 · What the compiler makes of it
#
# ptxas, which writes the machine code, may move instructions past each other as long as the result stays the same, and it may move a *wait* as well: to wait earlier than asked is never wrong. Here are both loops at $d = 128$, instruction by instruction, and above each piece between two waits its number of exponentials:

# %% tags=["raises-exception"]
draw_pingpong.loop({stem: sass.loop_lines(stem, 128, "bf16") for stem in loops})

# %% [markdown]
# **What to see.** At a solid line a warpgroup waits until none of its products is under way, at the dashed one until one is left. A thread has 64 exponentials per tile (in rung 31 also two for `alpha`). In rung 31 they stand behind a solid line: nothing of the warpgroup's own runs under them. In rung 32 they stand behind the dashed line and before the solid one, and $O \mathrel{+}= PV$ runs under all of them.
#
# Does that follow from how it was written? Take out the vote alone. (Some results are then wrong.) How many of the 64 exponentials still stand between the two waits?


# %%
def edited(*changes, d=128):
    """The rung with these changes, for one d and bf16 alone, which takes less time to compile."""
    text = single("32_ping_pong", d, "bf16")
    for old, new in changes:
        text = dataclasses.replace(text, source=text.replace(old, new))
    return text


under_O = ...  # your prediction: exponentials between the two waits, without the vote

# %% tags=["reveal", "raises-exception"]
VOTE = "if (!track && fmaxf(sum_reg[0], sum_reg[1]) > 32.f) *vote() = 1;"
WAIT = "fa::wgmma_wait_group<0>(); // O is there too"
LOOK = "fa::mbarrier_wait(K_full + 8 * K_ring.stage, K_ring.parity);"
made = {
    "with the vote": rung("32_ping_pong"),
    "without": edited((VOTE, "")),
    "a __syncwarp": edited((VOTE, "__syncwarp();")),
    "a second look": edited((VOTE, ""), (WAIT, LOOK + WAIT)),
}
compile_ahead(made.values(), "sass")
display(draw_pingpong.loop({name: sass.loop_lines(one, 128, "bf16") for name, one in made.items()}))
predict(under_O, int(sass.between_waits(made["without"])["MUFU.EX2"].iloc[1]), "exponentials under O without the vote")

# %% [markdown]
# **What to see.** Without the vote, ptxas moves the wait *up*, over most of the exponentials. Within a stretch of code without branches ptxas arranges instructions as it sees fit, and nothing between the two waits needs the second one. A `__syncwarp` is no border to it. A branch is, for most of them: the fourth strip has a second look at a barrier that is known to be open. And the vote is one: whether to store a 1 depends on the sums, the sums on all exponentials, and the wait stays behind the store. (The copy that tracks has such a look before its wait for $O$.)

# %% [markdown]
# ## 5 · From rung 31 in six steps
#
# Between rungs 31 and 32 lie five complete kernels with one idea each: `load("32_1")`, `check`, `xray` take them (`kernels/stages/`). The second waits for $S$ alone before its 66 exponentials (two are `alpha`). How many of them does ptxas leave under the product $O$ at $d = 128$?

# %%
under_O_2 = ...  # your prediction: exponentials under its own O, stage 32_2

# %% tags=["reveal", "raises-exception"]
chain, rows = ["31_warp_specialized", *(stage.stem for stage in stages("32")), "32_ping_pong"], {}
for before, stem in zip(["31_warp_specialized", *chain], chain):
    pieces = sass.between_waits(stem, 128)
    under = pieces.loc[pieces.index.str.startswith("all but"), "MUFU.EX2"].sum()
    rows[stem] = {"idea": rung(stem).title, "lines of code that are new": show.changed(before, stem)}
    rows[stem] |= {"exponentials under its own O": under, "instructions of the loop": pieces["all"].sum()}
predict(under_O_2, int(rows["32_2_two_products"]["exponentials under its own O"]), "exponentials under O in stage 32_2")
pd.DataFrame(rows).T.style


# %%
def staged(samples):
    """Each stage's ratio to SDPA FLASH in fp16, as dots."""
    rows = [(stem, row.D, row.mean, True) for stem in chain for row in
            record.summary(samples[samples["dtype"] == "fp16"], stem, "SDPA FLASH").itertuples()]  # fmt: skip
    frame = pd.DataFrame(rows, columns=["label", "D", "ratio", "kept"])
    said = "; ".join(f"{r.label} at D = {r.D}: {r.ratio:.2f}" for r in frame.itertuples())
    title = f"Stages from 31 to 32, fp16, geometric mean of N = 1024 to 16384 · {samples['device'].iloc[0]}"
    return draw_mma.dots(frame, title, "times as fast as SDPA FLASH", said)


plot.recorded("32_ping_pong", "stages", staged)

# %% [markdown]
# **What to see.** Percent gained over the stage before, at $d = 64$ and $d = 128$:
#
# | stage | 64 | 128 | |
# |---|---|---|---|
# | 32_1 | 6<!--= 100 * (stage("32", "32_1", "31", 64) - 1):.0f --> | 10<!--= 100 * (stage("32", "32_1", "31", 128) - 1):.0f --> | the next $S$ is queued with $O$: tensor cores needn't wait; all tiles in one loop |
# | 32_2 | -1<!--= round(100 * (stage("32", "32_2", "32_1", 64) - 1)) --> | 4<!--= 100 * (stage("32", "32_2", "32_1", 128) - 1):.0f --> | written as section 2's table says; but ptxas moves the wait for $O$ above all exponentials |
# | 32_3 | 4<!--= 100 * (stage("32", "32_3", "32_2", 64) - 1):.0f --> | 5<!--= 100 * (stage("32", "32_3", "32_2", 128) - 1):.0f --> | no masking in whole tiles; the scale is an argument and takes no register |
# | 32_4 | 9<!--= 100 * (stage("32", "32_4", "32_3", 64) - 1):.0f --> | 8<!--= 100 * (stage("32", "32_4", "32_3", 128) - 1):.0f --> | no maximum, and the vote holds the wait back; at $d = 64$ one wait for both products |
# | 32_5 | 1<!--= round(100 * (stage("32", "32_5", "32_4", 64) - 1)) --> | -1<!--= round(100 * (stage("32", "32_5", "32_4", 128) - 1)) --> | $O$ leaves from $Q_i$'s place; the first $S$ in turn; at $d = 128$ $K_j$ is freed later |
# | 32 | -1<!--= round(100 * (stage("32", "32", "32_5", 64) - 1)) --> | 4<!--= 100 * (stage("32", "32", "32_5", 128) - 1):.0f --> | one more stage of $K$ offsets that; tiles where maxima often lie come first; query tiles chosen late |
#
# Single ideas, from [39 · Log](39_log.ipynb). (The same code varies by up to 3 % between runs, in steps 1 to 10 by 6 %.)
#
# - **Turns** alone: at $d = 64$ 0<!--= 100 * (step("32", 1, 64) / step("32", 2, 64) - 1):.0f --> % with a maximum (steps 1, 2) and 2<!--= 100 * (step("32", 13, 64) / step("32", 15, 64) - 1):.0f --> % without (13, 15), under a mask 5<!--= 100 * (step("32", 1, 64, "ratio_causal") / step("32", 2, 64, "ratio_causal") - 1):.0f --> and 0<!--= 100 * (step("32", 13, 64, "ratio_causal") / step("32", 15, 64, "ratio_causal") - 1):.0f --> %; at $d = 128$ nothing, and under a mask they cost 4<!--= -100 * (step("32", 1, 128, "ratio_causal") / step("32", 2, 128, "ratio_causal") - 1):.0f --> and 1<!--= -100 * (step("32", 13, 128, "ratio_causal") / step("32", 15, 128, "ratio_causal") - 1):.0f --> %. Section 1's model promised more: by themselves warpgroups lose step.
# - **Each query tile finished before the next begins** (1, 11): the tensor cores idle in between, yet it gained 9<!--= 100 * (step("32", 11, 128) / step("32", 1, 128) - 1):.0f --> % at $d = 128$, as the loop is half as long. $Q_i$ asked for early (17, 20) brought 7<!--= 100 * (step("32", 20, 128) / step("32", 17, 128) - 1):.0f --> % more.

# %% [markdown]
# ## The kernel
#
# [Ring](glossary.md#ring) and the counter that hands out query tiles are rung 31's. $K$ has a stage more than $V$, and is fetched a tile ahead of it: for the vote, the last warpgroup keeps $K_j$ until its next turn, and in the turn after that the first one needs $K_{j+2}$. To make room, $O$ takes $Q_i$'s place; a second thread of the producer's warpgroup sends it. A third one chooses the next query tile, when the current one is nearly done. Rung 31 chooses at that tile's start: a CTA with a long tile then holds another, while others have none. One tile per CTA needs no counter, nor do short unmasked sequences at $d = 128$.

# %%
show.region("32_ping_pong", "producer")

# %% [markdown]
# A consumer's products are functions, as they start from more than one place:

# %%
show.region("32_ping_pong", "products")

# %% [markdown]
# The softmax is four functions, yours to write in the tasks below: `exponentials` and `round_P`, and, for the copy that tracks, `raise_maximum` and `rescale`.
#
# A warpgroup skips a tile of which it sees nothing, but not its turn. Its first $S$ has one, too: otherwise it holds up another's products:

# %%
show.region("32_ping_pong", "skip")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# Which CTA works on which tile differs from run to run on a GPU, but not how a tile is computed. So two runs give the same bits:

# %%
q, k, v = (torch.randn(1, 4, 700, 64, device=device).bfloat16() for _ in range(3))
first, again = (kernel(q, k, v, causal=True) for _ in range(2))
print("the same bits:", all(torch.equal(a, b) for a, b in zip(first, again, strict=True)))

# %% [markdown]
# ## Predict, then measure
#
# ### The two of them, alternating
#
# `helpers.roles` makes the kernel note at every region and around every wait what time it is. On the emulator there is no clock, only an order of events. Draw the lanes that you expect from the loop above, and compare:

# %%
x = [torch.randn(1, 1, 640, 128, device=device).bfloat16() for _ in range(3)]
events = roles.times(single("32_ping_pong", 128, "bf16"), *x)
unit = "SM clocks" if device == "cuda" else "order of events"
draw_pingpong.lanes({"32_ping_pong, d = 128, five tiles of keys": events}, unit)

# %% [markdown]
# **What to see.** Between the first $S$ and the last $O$ the two consumers are never at their products together: one starts $S$ and $O$ and passes the turn; during its softmax the other does the same. Dotted are waits for products, hatched those for a barrier. The lanes show what a warpgroup's *threads* do. A product runs on behind them.
#
# On an H100 or H200 a tile's products take the tensor cores 1024 clocks at $d = 128$, and there are two consumers. How many clocks does a consumer take per tile, in a whole run *without* notes?

# %%
clocks_per_tile = ...  # your prediction, d = 128


# %% tags=["reveal"]
def per_tile(samples):
    found = wgmma_units.per_tile(samples, "32_ping_pong")
    predict(clocks_per_tile, found[128], "clocks per tile of a consumer, D = 128")
    return found.round(0).to_frame().T


plot.recorded("32_ping_pong", "power", per_tile)


# %%
def swim_lanes(notes, length=12000):
    """`length` clocks from the middle of a CTA's work."""
    cases = {}
    for D, frame in notes.groupby("D"):
        middle = frame.groupby("lane")["end"].max().min() // 2
        frame = frame.assign(begin=(frame["begin"] - middle).clip(lower=0), end=frame["end"] - middle)
        cases[f"32_ping_pong, D = {D}"] = frame[frame["end"] > 0]
    return draw_pingpong.lanes(cases, f"SM clocks, {record.about('32_ping_pong', 'roles')['device']}", (0, length))


plot.recorded("32_ping_pong", "roles", swim_lanes)

# %% [markdown]
# **What to see.** At $d = 128$ two consumers' products take 2048 clocks per tile, so the tensor cores are busy for 0.88<!--= 2048 / clocks("32", 128):.2f --> of the time. At $d = 64$ three consumers' products take 1536, as do their exponentials, and a tile takes 2306<!--= clocks("32", 64):.0f -->: both units idle for a third of it.
#
# Five waits belong to a tile: for $K_j$, the turn and $V_j$ (hatched), for $S$ and for $O$ (dotted). Notes make a tile nearly twice as long: read the lanes for their order.

# %% [markdown]
# ### Votes
#
# How often is a tile voted down? It costs its product of $S$ once more: four `wgmma` at $d = 64$ for each of four warps. There are three warpgroups with eight tiles of keys each. How many of these 24 tiles are done again where scores are low at both ends of the keys and rise to a *peak* half way?

# %%
q, k, v = (torch.randn(1, 1, n, 64) for n in (192, 1024, 1024))


def along_keys(scores):
    """Queries and keys with these scores, and noise."""
    ours = [(torch.full_like(scores[:192], 8), q), (scores, k)]
    return tuple(torch.cat([column.view(1, 1, -1, 1), x[..., 1:]], -1) for column, x in ours)


inputs = {"usual": (q, k), "large queries": (8 * q, k), "falling": along_keys(torch.linspace(60, 0, 1024))}
inputs["peak half way"] = along_keys((60 - torch.linspace(-120, 120, 1024).abs()).clamp(min=0))

# %%
again = ...  # your prediction: 0 to 24

# %% tags=["reveal"]
small = single("32_ping_pong", 64, "bf16")
usual, counts = 12 * 8 * (4 + 8), {}  # warps, tiles, products of S and O
for name, (q_in, k_in) in inputs.items():
    seen = xray(small, q_in.bfloat16(), k_in.bfloat16(), v.bfloat16()).trace.instructions["wgmma.mma_async"]
    counts[name] = {"wgmma": seen, "tiles done again, of 24": (seen - usual) // 16}
predict(again, counts["peak half way"]["tiles done again, of 24"], "of 24 tiles where scores rise to a peak half way")
pd.DataFrame(counts).T

# %% [markdown]
# One for each warpgroup: from there on it tracks. Falling scores have their maximum in tile 0, which comes second; large queries are foreseen by `some_peaked`.

# %% [markdown]
# ## Beside its peers
#
# FA3 and FA4, FlashAttention-3 and -4, ran in the same process as the rung, SDPA FLASH (FlashAttention-2) and SDPA CUDNN.


# %%
def fast(samples):
    """The peers that a ratio is formed to: those that ran beside this rung in one process."""
    return [peer for peer in ("SDPA FLASH", "SDPA CUDNN", "FA3", "FA4") if peer in set(samples["name"])]


plot.recorded("32_ping_pong", "forward", lambda s: plot.ratio(s, "32_ping_pong", fast(s)))


# %%
def summaries(samples):
    tables = {peer: record.summary(samples, "32_ping_pong", peer) for peer in fast(samples)[1:]}
    return pd.concat(tables, names=["peer"]).droplevel(1).drop(columns="causal", errors="ignore").round(3)


forward, causal = (record.load("32_ping_pong", kind) for kind in ("forward", "causal"))
pd.concat({"no mask": summaries(forward), "causal": summaries(causal)})

# %% [markdown]
# **What to see.** Figure: medians of seven rounds, with the lowest and highest. Table: geometric mean over $N \ge 1024$, lowest and highest, and the worst of all shapes. The lead over cuDNN is 1.26<!--= ratio("32", "CUDNN", 64):.2f --> at $d = 64$ and 1.15<!--= ratio("32", "CUDNN", 128):.2f --> at $d = 128$ (fp16), and smallest at short lengths, where a query tile's ends weigh most. Beside FlashAttention-3 it is 1.17<!--= ratio("32", "FA3", 64):.2f --> and 1.06<!--= ratio("32", "FA3", 128):.2f -->, under a mask 1.15<!--= ratio("32", "FA3", 64, causal=1, kind="causal"):.2f --> and 1.04<!--= ratio("32", "FA3", 128, causal=1, kind="causal"):.2f -->.
#
# [Other families of inputs](../data/README.md#families-of-inputs) cost votes and tracking:

# %%
five = ["32_ping_pong", "31_warp_specialized", "SDPA CUDNN", "FA3", "FA4"]
plot.recorded("32_ping_pong", "families", lambda samples: plot.families(samples, five))

# %% [markdown]
# **What to see.** The other kernels form every maximum on any input, so their points move less. Ours is furthest ahead where little is missed. Elsewhere it tracks, as rung 31 does. Under *one key*, tracked throughout, it is still (means over lengths, formats) 1.09<!--= family("32", "31_warp_specialized", "one key", 64):.2f --> and 1.25<!--= family("32", "31_warp_specialized", "one key", 128):.2f --> times as fast as rung 31 ($d = 64$ and 128), and 1.09<!--= family("32", "FA3", "one key", 64):.2f --> and 1.01<!--= family("32", "FA3", "one key", 128):.2f --> times as fast as FA3. Where a sink leads or scores fall along the keys, the maximum is met early: beside FA3 at $d = 128$ it is 1.07<!--= family("32", "FA3", "sink", 128):.2f --> and 1.07<!--= family("32", "FA3", "falling", 128):.2f --> times as fast, under a mask 1.05<!--= family("32", "FA3", "sink", 128, causal=1):.2f --> and 1.06<!--= family("32", "FA3", "falling", 128, causal=1):.2f -->. There *Q × 2* costs most: 0.99<!--= family("32", "FA3", "Q × 2", 128):.2f -->, under a mask 0.99<!--= family("32", "FA3", "Q × 2", 128, causal=1):.2f -->. (Tried against these prices: [39 · Log](39_log.ipynb).)
#
# ### The staircase
#
# The fp16 rungs at $N = 4096$, on a linear scale. (01 to 04, in fp32, end at 46<!--= tflops("04", 128, dtype="fp32"):.0f --> TFLOP/s.) The lines are peers; cuBLAS's product of two large fp16 matrices; and what the [datasheet](https://www.nvidia.com/en-us/data-center/h200/) promises for dense products of 16 bits.

# %%
speeds = scoreboard.speeds(summit=True)
plot.staircase(speeds[(speeds["dtype"] != "fp32") & (speeds["D"] == 128)])

# %% [markdown]
# ## What still hurts
#
# 1. **Ends.** A query tile begins with a tile of keys done alone and ends with a product without exponentials under it.
# 2. **Exponentials at $d = 64$.** There are as many clocks of them as of products, so both units would have to be busy always, and each is 0.65<!--= 1536 / clocks("32", 64) * 4096 / (22 * 192):.2f --> of the time. Exercise 32.3 looks ahead.
# 3. **Power.** At its limit of 700 W the card lowers its clock. A call's time is then its energy divided by 700 W, however few clocks it needs. Beside cuBLAS, at $d = 128$ without a mask, NVML (the driver's monitoring library; mostly a tenth above counted clocks) reported as little as 1590<!--= record.load("32_ping_pong", "matmul").query("causal == 0").sm_mhz.min():.0f --> of 1980 MHz, and the rung reached 0.96<!--= record.ratio_to_cublas(record.load("32_ping_pong", "matmul").query("causal == 0"), "32_ping_pong").ratio.min():.2f --> to 0.99<!--= record.ratio_to_cublas(record.load("32_ping_pong", "matmul").query("causal == 0"), "32_ping_pong").ratio.max():.2f --> of its TFLOP/s.
#
# Does power hold the rung back? On **zeros** the kernel executes the same instructions, but hardly a wire changes from one value to the next, and that is what takes power ([He, 2024](https://www.thonking.ai/p/strangely-matrix-multiplications)). If so, zeros are faster, at a higher clock, and take as many clocks. Bursts of a second, the clock counted on the SMs themselves:

# %%
faster_on_zeros = ...  # your prediction: how many times as fast is rung 32 on zeros as on random numbers, d = 128?


# %% tags=["reveal"]
def on_zeros(samples):
    keys = ["D", "name", "inputs"]
    mean = samples.groupby(keys)[["ms", "joules", "mhz", "watts"]].median()
    ours = mean["ms"].loc[128, "32_ping_pong"]
    predict(faster_on_zeros, ours["random"] / ours["zeros"], "times as fast on zeros, d = 128")
    mean["million clocks"] = mean["ms"] * mean["mhz"] / 1000
    return mean.round({"ms": 3, "joules": 3, "mhz": 0, "watts": 0, "million clocks": 3})


plot.recorded("32_ping_pong", "power", on_zeros)

# %% [markdown]
# **What to see.** On zeros the clock is 1.20<!--= power("32", "mhz", 64, "zeros") / power("32", "mhz", 64):.2f --> and 1.20<!--= power("32", "mhz", 128, "zeros") / power("32", "mhz", 128):.2f --> times as high ($d = 64$ and 128), the kernel 1.20<!--= power("32", "ms", 64) / power("32", "ms", 64, "zeros"):.2f --> and 1.20<!--= power("32", "ms", 128) / power("32", "ms", 128, "zeros"):.2f --> times as fast, and its number of clocks the same to 0.1<!--= 100 * max(abs(power("32", "Mclk", D, "zeros") / power("32", "Mclk", D) - 1) for D in (64, 128)):.1f --> %. So power does hold it back. At one power limit a call's energy follows its time: 0.82<!--= power("32", "ms", 64) / power("32", "ms", 64, of="CUDNN"):.2f --> and 0.88<!--= power("32", "ms", 128) / power("32", "ms", 128, of="CUDNN"):.2f --> of cuDNN's, at a lower clock. (NVML's joules scatter by a tenth.)
#
# 4. **The backward pass.** Training needs gradients, and there five products want operands that other products have just made: [33 · Backward on Hopper](33_backward_wgmma.ipynb).

# %% [markdown]
# ## Exercises
#
# In a **task** you write CUDA: the cell takes the place of one region of the rung. `blank` shows what is given and what has to hold afterwards. It is solved if all cases of `check` are right and the X-ray finds nothing. (In an editor: `python -m helpers exercise new 32 kernel`, here for the whole rung, task 32.9.)
#
# ### Task 32.1 · The maximum, in two parts
#
# Write `raise_maximum` and `rescale`. They are apart because $O$ may not be rescaled while a product writes it: the first runs under the product $O$, the second behind the wait.

# %%
blank("32", "maximum")

# %%
# %%region 32 maximum -> my_maximum
# // yours

# %%
hint("32.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `maximum` of [32_ping_pong.cu](../kernels/32_ping_pong.cu): `show.region("32", "maximum")`.
#
# </details>

# %% [markdown]
# ### Task 32.2 · Exponentials and rounding
#
# Write `exponentials`, which makes $P$ of some fragments of one row of $S$ and adds up its sum, and `round_P`, which makes fragments of $P$. When both are right, look at what became of them: `sass.between_waits(my_exponentials.rung, 128)` says how many exponentials stand under $O$.

# %%
blank("32", "exponentials")

# %%
# %%region 32 exponentials -> my_exponentials
# // yours

# %%
hint("32.2")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `exponentials` of [32_ping_pong.cu](../kernels/32_ping_pong.cu): `show.region("32", "exponentials")`.
#
# </details>

# %% [markdown]
# ### Exercise 32.3 · A GPU with faster products
#
# On this GPU exponentials take as long as products at $d = 64$. Suppose that the next one has tensor cores $f$ times as fast, and the same 16 exponentials per clock. Write `balanced`: at which $d$ are both equal?

# %%
# Exercise 32.3


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


exercise.verify("32.3", equal_times)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The clocks of products grow with $d$, those of exponentials don't.
#
# </details>
#
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
# ### Exercise 32.4 · Whose turn is it?
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
# Exercise 32.4
predicted = {"a": "right", "b": "hangs", "c": "hangs"}  # "right" or "hangs"


# %%
def what_happens():
    assert all(predicted[name] in ("right", "hangs") for name in edits), 'each is "right" or "hangs"'
    x = [torch.randn(1, 1, 300, 64).half() for _ in range(3)]
    three = {name: single("32_ping_pong", 64).replace(old, new) for name, (old, new) in edits.items()}
    compile_ahead(three.values(), "run")
    seen = []
    for text in three.values():
        edited = load(source=text, device="cpu", quiet=True)
        report = check(edited, [Case("three tiles of keys", *x)])
        seen.append("right" if report.ok else "hangs" if "deadlock" in str(report) else "wrong")
    assert seen == [predicted[name] for name in three], "at least one of them behaves in another way"
    return True


exercise.verify("32.4", what_happens)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Draw the three barriers in a ring, and follow the one turn around it.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# predicted = {"a": "hangs", "b": "right", "c": "right"}
# ```
#
# There is one turn, and it must be somewhere at the beginning: without the first pass everybody waits. Who gets it first, and which way round it goes, makes no difference, as long as no two have the same successor and the ring takes in everybody. On the emulator the hang is an error that names the barriers and who waits there; on a GPU it is a kernel that never ends.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Two warpgroups, no turns: what goes wrong if they start together?</summary>
#
# In the model they share the tensor cores, finish and do softmax together: one unit always idles. Measured, they drift apart.
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
