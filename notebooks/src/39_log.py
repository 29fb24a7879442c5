# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 39 · Log of rungs 32 and 33
#
# [← 33 · Backward on Hopper](33_backward_wgmma.ipynb) | [glossary](glossary.md) | [40 · One algorithm, every language →](40_every_language.ipynb)
#
# What was tried on the way to [32 · Ping-pong](32_ping_pong.ipynb) and [33 · Backward on Hopper](33_backward_wgmma.ipynb), what was expected of it before it ran, and what it reached. The notebooks keep the steps that teach; this is for whoever wants to try the next one. `ratio` is the time of SDPA CUDNN over the variant's own, `ratio_causal` the same under a causal mask, in bf16.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import textwrap

import pandas as pd

from helpers import plot, record, sass, schedule
from helpers.toolchain import loops

pd.set_option("display.max_colwidth", None, "display.max_rows", None)

# %% [markdown]
# ## Forward: 32 variants
#
# How they were measured:

# %%
print(textwrap.fill(record.about("32_ping_pong", "steps")["method"], 110))

# %% [markdown]
# `between_waits` are the exponentials in each piece of the code between its waits for products.


# %%
def table(*measured):
    """Draws the steps of a record as a table, with the columns `measured`."""
    return lambda steps: record.step_table(steps, *measured).style.format(precision=2, na_rep="")


plot.recorded("32_ping_pong", "steps", table("between_waits"))

# %% [markdown]
# What they say:
#
# - **The wait that moves** (4, 5). At $d = 64$ the border that was to hold exponentials in front of the wait didn't, `between_waits` says so, and yet the times differ by several percent: a warning how far steps 1 to 10 can be trusted, each of which ran beside cuDNN in a process of its own.
# - **The mask's instructions** (16, a kernel that is wrong where the mask is needed): where they are only stepped over they cost five percent. A loop without them (17) gave a part of it back.
# - **The vote at the next turn** (25) in place of a barrier of its own: one percent.
# - **One piece of code** for the first tile, those on the diagonal and those done again (28): half the instructions of 25, for a percent of its speed at $d = 128$ and four or five under the mask, measured in different runs. It stayed, as it is easier to read.
# - **What didn't help**: $S$ in two halves, so that exponentials can begin under its second half (21, 26); a part of the exponentials by a polynomial, as FlashAttention-4 does (18, 27), which without a mask gains one to three percent at $d = 64$ and, where it was tried, loses three at 128; $Q_i$ in registers (10, 23); smaller tiles (9, 19); rescaling $O$ only where it is needed (6), or beyond a threshold, as FlashAttention-4 does (7).
# - **Idle tensor cores at a query tile's end** (30). Nsight Compute's counters, below, pointed there. To start the next query tile's $S$ before $O$ is written saves clocks, and hardly any time. To start it before the last $O$ is *computed*, tried on the finished kernel, lost up to 14 %, most where sequences are short. At $d = 64$, $N = 16384$ it was 5 %, and 1 % where the exponentials' `FFMA` did not fetch two registers from one bank (below). A third stage of $K_j$ alone (31), and keys asked for into the L2 ahead of time (32), cost a little.
# - **Peaked inputs**, tried on the finished kernel, without a record of their own (FlashAttention-3's time over ours, in one run). Where one key takes all of a row, tiles were voted down one after the other, and the rung had 0.85 to 0.95 at $d = 128$. In the records (geometric mean over lengths and dtypes) it is 1.01<!--= family("32", "FA3", "one key", 128):.2f --> now, under a mask 1.01<!--= family("32", "FA3", "one key", 128, causal=1):.2f -->. Three changes were kept:
#     - peaked rows are recognised after the first whole tiles ($l < 1.1$ in some row, now 1.3; up to 16 tiles: $l < 2$; by now only where another row of the warp is not peaked, below), and the maximum is tracked from there on, as FlashAttention-3 does on any input;
#     - so were rows whose second tile outweighs the first: 2 % for falling scores at $d = 128$, 3 to 5 % at 64 (no longer: the order of tiles, below, sets it off);
#     - where the maximum is tracked, the first of a row's exponentials are taken beside the maxima: 20 of 32 at $d = 128$, 10 at 64. (All of them there was 3 to 5 % slower.) From $N = 4096$ on peaked rows gain 1 to 3 %; $N = 512$ loses 1 % at $d = 128$ without a mask. It is a matter of what ptxas makes of it: with 24 that loss is twice as large, with 8 at $d = 128$ nothing is gained.
#
#   These did not pay:
#     - $O$ rescaled only where a warp's maximum has risen: the branch behind the wait costs 2 to 4 % under one key, and gains nothing elsewhere;
#     - FlashAttention-4's threshold in the tracked loop, $m$ kept while it would rise by less than 5 in log2: normal random numbers under a mask lose 20 %, as the loop that follows starts from too low a maximum and is voted down;
#     - tile 0 always tracked, because of attention sinks, in a third copy of the loop: 2 to 3 % for a sink at $N = 1024$, and everything else 4 to 6 % slower;
#     - all tiles of rows up to $N = 1024$ tracked: 4 % for a sink, 3 % for falling scores, and 2 to 4 % slower on random numbers;
#     - peaked rows recognised by each lane's own columns, without shuffles: half a percent slower than with them;
#     - a $P$ that is voted down brought to 1 in place, with its sum, $l$ and $O$, instead of forming $S$ again: 2 to 4 % slower for falling scores, 1 to 3 % for RXNMapper's heads, nothing elsewhere;
#     - a warpgroup whose $P$ was voted down passes its turn on while it does the tile again, and does not keep it: 1 % for falling scores, and nothing once rising maxima are foreseen;
#     - each warp's vote in front of the shuffles, which it then takes only where a maximum has risen, and $O$ rescaled only there, exactly or with a slack of 2 or 5 in log2: up to 6 % slower on nearly every family;
#     - where the maximum is tracked, $K_j$ given back as soon as $S$ is there, as FlashAttention-3 does, and not at the next turn: less than 1 %. With its order of copies as well, the next $K$ before this $V$: 2 to 3 % slower at $d = 128$.
# - **What a tracked tile takes** at $d = 128$, by clocks read at eight places of the loop (a draft on an H200, without a record: falling scores, $N = 4096$). Of 2,430 clocks per tile, the two warpgroups wait 80 and 150 for their turn. So a tile takes what a warpgroup does one after the other: it starts its products for 780 and 1,190 clocks, as `wgmma` holds a warp up while those before it are waiting, and its softmax takes 1,390 and 990. By its stall counts and MUFU's rate, a warp alone would need 770 for that; but meanwhile the other warpgroup's products read and write registers, too. (On random numbers a tile takes 2,270, with 150 and 370 for the turn.) Tried against it:
#     - a part of the softmax while $O$ is being started, whose last 2 to 6 steps stand behind the wait for $S$ for that: ptxas spreads them over the whole softmax, and the turn comes late. At $d = 128$ random numbers are 9 to 13 % slower, falling scores 2 to 6 %;
#     - the turn passed before $O$'s last two steps, which are started beside exponentials: at $d = 64$ random numbers gain 1 to 2 % from $N = 4096$ on, and nothing else does; at $d = 128$ nothing gains, and tracked tiles lose 4 to 7 %. So it did not stay;
#     - a look for the next $K_j$ before $P$ is rounded, so that the next turn needn't wait for it: 6 to 10 % slower at $d = 128$, with $K_j$ given back early, too;
#     - under the mask heads with 16 MB of keys at a time instead of 32: 1 to 2 % slower, with 4, 8 or 24 MB 3 to 5 %, as the last group's long tiles begin late; with 64 MB up to 9 %, with 128 MB up to 21 %, as they don't fit the L2.
# - **Maxima of three**, tried on the finished kernel on an H200, without a record. Hopper finds the largest of three *integers* at once (`VIMNMX3`, in CUDA `__vimax3_s32`), in the 2.2 clocks that an `FMNMX` takes for two floats. Read as integers, floats keep their order if the largest is not negative. So a warp whose maxima are not negative, which is known from the tiles before, could take half the instructions: that gains 0.5 to 1.4 % at $d = 128$ where one key takes all of a row or $Q$ is doubled, 0.4 to 0.9 % at 64; random numbers lose up to 0.6 %. Scores that fall along the keys are nearly all negative here, and lose 2 to 4 %, as the branch parts the maxima from the exponentials beside them. Negative rows by the least of three unsigned integers: 1 to 2 % lost there, and half of the gain elsewhere; floats once more where no score was positive: 6 to 9 % lost for falling scores; a third copy of the loop: 1 to 14 % for peaked and falling ones. $S$ scaled and $m$ subtracted first, so that 0 is the maximum before: ptxas serialises the products.
# - **$S$ two tiles ahead**, tried on the finished kernel, without a record of its own: $S_{j+1}$ and $O_{j-1}$ started together and running under the whole softmax of tile $j$, the maximum always tracked, no votes. Predicted: a warpgroup's cycle is its softmax alone, instead of the softmax and $S$, which brings up to 10 % at $d = 128$ and 15 to 25 % at 64, and peaked inputs as fast as random ones. Measured on an H100: random numbers 14 to 21 % slower, falling scores 6 to 12 %. Of 25 variants (with turns and without, 2 or 3 consumers at $d = 64$, 64 to 112 keys per tile, a second producer, two $S$ in turn or one moved out by the `FMA` that scales it) the best was 9 to 15 % slower on random numbers. FlashAttention-3's authors found such a third stage slower, too ([appendix B.3](https://arxiv.org/abs/2407.08608)).
# - **Larger tiles of keys** at $d = 128$, tried on the finished kernel on an H100, without a record: FlashAttention-3 takes 176 keys at a time where there is no mask. For 160 there is room if $O$ leaves by way of $Q_i$'s place (as it does now), and nothing spills. Predicted: a fifth fewer turns and votes, up to 2 %. Over six families of inputs it is 0.98 to 1.03 times as fast without a mask, and 0.96 to 1.00 with one; with 144 keys 0.95 to 0.99. The way that $O$ takes accounts for 0.98 to 1.03 of that.
# - **Told at compilation whether there is a mask**, tried on the finished kernel on an H100, without a record, an instance for each: over six families 0.99 to 1.02 at $d = 128$, 0.96 to 1.03 at 64. The loop has none of the mask's instructions anyway (17).
# - **A vote, and not all tracked from there on**, tried on the finished kernel on an H200, without a record. Where one row of a query tile voted, the draft tracks as many tiles as came before (or half or a quarter as many, or four) and then decides again; where all rows of a warp are about to vote, to the end, as now. A model in PyTorch said 3 to 5 % for *Q × 2* at $N = 16384$, 1 to 2 % at 4096, and nothing elsewhere. At $d = 128$, with a quarter as many, *Q × 2* is 1.05 times as fast at 16384 and 1.01 at 4096, under a mask 1.02 and 1.00; four other families 0.99 to 1.03 from 4096 on. Up to 2048 random, falling and *Q × 2* numbers are 0.99 to 1.005; a first run with fewer calls had 0.975 to 1.00 there.
# - **At $d = 128$ once more**, on an H200, without a record. $Q_i$ in registers, which now spills nothing: a fifth less shared memory read, 1.00 times as fast. Three consumers with 192 queries, and 80 keys at a time for which there is room: a third less of K and V read from the L2, and 0.98 times as fast, under a mask 0.94.
# - **Between two query tiles**, tried on the finished kernel on an H100, without a record, for short sequences, where these take most. $O$ to shared memory by `stmatrix`, a quarter of the store instructions: 0.7 % at $N = 512$ and $d = 128$ without a mask, at most 0.6 % elsewhere. The counter set to 0 by the kernel before (which two streams at once would break) and not by a `memset`, predicted 1 to 2 % at $N = 512$: 0.6 to 0.9 %, and 5 % at $d = 64$ under a mask, where the same code was up to 3 % apart; from $N = 1024$ on 0.99 to 1.02. Query tiles dealt out beforehand where there is no mask, so that no counter is needed: nothing at $d = 128$, 2 to 5 % slower at 64.
# - **Three changes that pay together**, without a record of their own. With all of them, over rung 32 without them in one process on an H200, normal random numbers: at $d = 64$ 1.03 at $N = 512$, 1.05 at 1024 and 2048, and 1.08 at 4096 and 16384, under a mask 1.04 to 1.08; at $d = 128$ 1.04 at 512 and 1024, and 1.00 to 1.02 beyond, under a mask 1.04, 1.04, 1.03 (2048), 1.02 (4096) and 1.01 (16384). Peaked inputs (*Q × 4*, *one key*, *falling*) are 1.00 to 1.01 times as fast.
#     - *One wait for both products* at $d = 64$ where the maximum isn't tracked, `fa::wgmma_wait_group<d == 64 && !track ? 0 : 1>()`. By clocks read in the loop at $N = 16384$, of a tile's 2,350 a warpgroup waits 560 for its turn and needs 390 to start its products; exponentials take 1,160 and rounding 190, as the wait for $O$ stands between them. Behind one wait ptxas rounds $P$ among the exponentials: alone, on an H100, 1.02 times as fast at $N = 1024$, 1.06 at 4096 and 1.08 at 16384, under a mask 1.02, 1.04 and 1.07. At $d = 128$, where $O$ takes twice as long, a quarter or half of the exponentials behind the wait cost 1 to 2 %, and all of them, in a draft that also left out half a tile, 5 %.
#     - *The producer looks ahead*, in rung 31 and the stages up to 32, too. It asked the counter when a query tile began, worked out where the next one lies, with several divisions, when the last tile had been asked for, and again when that one began; and the consumers divided once more. Now it does all of it once, while the first tiles are on their way, and tells the consumers. (51's producer has no registers for that: it only tells them.) That makes rung 31 1.02 times as fast at $N = 512$, under a mask 1.04 ($d = 128$) and 1.06 (64), and changes nothing at 16384.
#     - *The rows' $m$ through one* `double` in front of the loop that votes (below, two banks of registers).
# - **On top of one wait** at $d = 64$, on an H100: the loop that tracks with one wait, too, up to 3 % slower on peaked inputs and at $N = 512$, where it runs throughout; no turns 1 to 6 % slower; the turn passed on before $O$ is started 1 to 4 %; $O$ started before $S$, the same; an eighth or a quarter of the exponentials by a polynomial, 3 and 8 % slower.
# - **What a query tile's end takes**, by clocks read around it (H100, $d = 128$, $N = 512$): of 14,400 per query tile, 8,100 to 8,600 are in the loop, the last $O$ takes 850, its way through shared memory 1,200, the next $Q_i$ and first $S$ 2,700, and the first softmax 1,250. A third of the way of $O$ is the fence in front of TMA (`MEMBAR`), which waits for the `LSE` that the same thread has just written to global memory. Written behind the fence, that takes 400 clocks less there, and saves no time.
# - **Half a tile on the diagonal.** Of the tile of 128 keys on the diagonal every other warpgroup's rows see only the first half. To multiply only that half (H100, under a mask): 1.03 at $d = 64$, at $N = 512$ 1.06, and 1.01 at $d = 128$. But then $S$ comes in two shapes, and whether ptxas keeps products under way hangs on trifles: after 4 of 10 harmless edits it serialised them at one of the two $d$, which takes up to half of the speed. A kernel that readers change should not do that. With a branch in one piece of code instead of two, sequences without a mask were up to 3 % slower, and 6 % at $N = 512$ and $d = 64$.
# - **A common pace for long sequences**, tried on the finished kernel on an H200, medians of three calls. CTAs that sweep the same keys drift apart, and past what the L2 holds each reads them from HBM (notebook 50). In the draft a CTA that is more than 2,048 to 16,384 keys ahead of the mean of all waits; one 64-bit counter has how many CTAs there are, and how far they are together. One head of a million tokens at $d = 128$: 684 TFLOP/s instead of 565 without a mask, 674 instead of 643 with one. From 32k to 256k tokens it was between 4 % faster and 8 % slower, in the mean 2 to 3 % slower. Not kept: the ring's blocks of keys keep CTAs together without a wait.
# - **FlashAttention-3 with clusters.** The build beside which we measure is one without (`FLASHATTENTION_DISABLE_CLUSTER`). Upstream's forward pass takes clusters of two CTAs at $d = 128$ without a mask, where a sequence has an even number of query tiles. Built with them it is slower: its time over ours is 1.01 to 1.07, without them 0.99 to 1.06 ($N = 512$ to 16384, an H200, two processes each, without a record). Its backward pass has none.
# - **Why $K$ came late** at $d = 128$. Sequences of 1024 without a mask were 3 % slower with as many heads of keys as of queries than with a quarter; the difference is about 700 clocks per query tile at every length. FlashAttention-3 is as fast either way. Clocks read around the waits (an H200, without a record, as all here): of 22,000 clocks per query tile the first warpgroup waited 1,560 for $K$ and the last 600; with one head of keys for 16 of queries 550 and 440, about what eight waits take when nothing is late. Since it may have to do its tile again, the last warpgroup gives $K_j$ back with its next turn, and half a turn later the first one wants $K_{j+2}$. Keys from the L2 are there by then, those from HBM are not. What changed, in fp16 on normal random numbers, as speed relative to the rung before in one process:
#     - *A third stage of $K$, fetched a tile ahead of $V$*: 1.01 to 1.02 at $d = 128$ without a mask up to $N = 4096$; the first warpgroup then waits 405. Either alone is no use: in the old order the producer first waits for $V$'s place, and with two stages $K$ ahead of $V$ was 2 to 3 % slower (above, among what did not help where the maximum is tracked).
#     - *$O$ leaves through the place of $Q_i$*, which makes the room, *sent by a second thread of the producer's warpgroup*. With a thread of each consumer that sends it, and waits until it has gone, 0.98 to 1.00. With the second thread the consumers meet at two barriers less: 1.00 to 1.01 at $d = 64$ and under a mask.
#     - *$O$ by* `stmatrix`, LSE behind the fence: up to 1.005 at $d = 128$ without a mask, nothing elsewhere.
#     - *The next query tile is read while the last $O$ is under way*: up to 1.01 under a mask up to $N = 2048$; where the maximum is tracked 1.00 to 1.02 at $d = 128$.
#     - *Groups of heads of one size* under a mask: 48 heads of $N = 4097$ went in groups of 15, 15, 15 and 3, and the longest tiles of the last three began last. In four groups of 12: 1.04 at $d = 128$, 1.07 at 64. At the other lengths the groups are what they were.
#     - *Together*, by FlashAttention-3's time over ours in the records ($d = 128$, a head of keys for each of queries; before, after): at $N = 1000$ 1.00 and 1.01, 1024 1.01 and 1.03, 4096 1.05 and 1.06, 4097 1.04 and 1.03, 16384 1.04 and 1.06; under a mask 1.02 and 1.03, 1.02 and 1.03, 1.02 and 1.02, 0.98 and 1.03, 1.04 and 1.04.
#
#   And what did not pay:
#     - a *division* that the producer made between two copies, a hundred clocks or so: 0.95 to 0.98 from $N = 4096$ on, as a late $V$ delays the products, too;
#     - a thread of its own for $V$: the same without a mask, a percent slower under one at $N = 1000$;
#     - the next query tile's keys asked for into the L2, without a mask up to $N = 4097$: 0.98 to 0.99 for its first tile, 0.95 to 0.99 for two, 0.86 to 0.93 for all of them;
#     - hints to the L2 which lines to keep: 1.00; $K$ and $V$ to be dropped first 0.97 to 0.98 under a mask;
#     - a wait for the next query tile's $K$ under the last $O$: 0.99;
#     - no rescaling of $O$ before its first product: 0.99 to 1.00 (done now, for another reason, below);
#     - whether a maximum is likely to be missed, told by the next turn's barrier instead of one of its own: 1.00;
#     - after a vote, as many tiles tracked as a quarter of those before, of sequences from 17 tiles on: *Q × 2* gains 1 to 4 %, *sawtooth* up to 3 %, but *falling* scores lose 2 to 5 %, as they are voted down again and again. If all tiles are tracked after two votes, *Q × 2* gains 1 to 6 %, and *falling* loses up to 3 % beside the draft without.
# - **Where maxima lie**, on an H200, fp16; speed relative to the kernel as it was, in one process. Twenty families of inputs that no record names were tried on the finished kernel, beside FlashAttention-3 at $d = 128$: its time over ours was 0.95 to 1.06 (means over $N = 1024$, 4096 and 16384). Lowest were keys and queries turned by rotary positions, without a mask (0.95; 0.92 at $N = 1024$), and heads that look at the token before (0.96); a sink in the middle had 0.90 at $N = 1024$. There a maximum is missed half way, a tile is done again, and the rest is tracked. (The error of $O$ was up to 1.04 times that of SDPA FLASH in 19 of them. Where every 61st key leads by 10 nats it was 1.13, in rung 20 1.11: several keys share a row's weight, and near the true maximum $P$ is rounded least.) What was kept:
#     - *The last tile, the first and the one on the diagonal come first*, in which the maximum is tracked. Rotary positions without a mask 1.07 at $N = 1024$, 1.08 at 4096 and 1.04 at 16384; the token before 1.03, 1.05 and 0.99 to 1.01, under a mask 1.01 and 1.05 (1024, 4096); a sink 1.07, 1.02 and 1.00, under a mask 1.05, 1.05 and 0.98; falling scores 1.05, 1.11 and 1.08, under a mask 1.03 and 1.08. Scores that depend on the distance to a point that moves along a circle 1.03 to 1.06. Without a mask, where $N$ is a multiple of 128, one tile more than before is tracked, and that costs random numbers 0.7 to 1.0 % at $N = 1024$, 0.1 to 0.5 % at 4096. A sawtooth under a mask loses up to 2 %, as its peak lies in the tile that is no longer tracked, now that the first one is. Everything else is 0.99 to 1.01. Rung 51 has 32's consumers, but takes its tiles from the last on: where scores fall slowly, it may miss a maximum once.
#     - *Peaked rows are a warning only where others of the warp are not*: under a sink all rows are. Without this condition, sinks were tracked to the end: 0.96 at $N = 4096$, and 0.90 at $d = 64$.
#     - *Rows of more than 16 tiles warn at* $l < 1.3$, not 1.1. At $d = 128$ *Q × 2* without a mask gains 3 % at $N = 4096$, and 0 to 1 % at eight other lengths and masks; a sink in the middle up to 2 %; random numbers, one key, a sawtooth and four more 0.99 to 1.01. In the records, scores that grow or fall along the keys lose 1 %, as rows of the steepest of eight heads are tracked now. Where every 61st key leads, rows are tracked now: that costs 2 to 5 % from $N = 4096$ on, and the error falls from 1.13 to 1.09. Rotary positions without a mask lose 4 % at 8192. Both are still at 0.96 to 1.01 of FlashAttention-3's speed. At $d = 64$ and $N = 4096$ these three are at 1.01, 0.98 and 0.97. With a bound of 1.6 the two lose up to 2 % more, and a sawtooth 1 %. With 2 the sawtooth loses 3 %; the error where every 61st key leads is a true maximum's, that of *Q × 2* 1.03 times as large. With 4 random numbers lose up to 1 %.
#     - *Rows whose last tracked tile outweighs those before* are no warning any more: with that check, too, the tile on the diagonal sets it off (rotary positions 0.99 to 1.02, falling scores 1.02 to 1.09).
#
#   What did not pay:
#     - only the first and the last tile early: nothing lost on random numbers, and rotary positions at 0.97 to 0.99 of the kernel as it was. The first and the diagonal's: scores that grow along the keys 0.90;
#     - after a miss, only two tiles tracked, then the old maximum trusted again, up to three times: *Q × 2* 1.02 to 1.04 from $N = 4096$ on, sawtooth 1.01 to 1.03, but the error of *Q × 2* grows from 1.02 times that of a true maximum to 1.11 (emulator, $d = 64$, fp16). With 4 or 8 as the bound after the first miss the digits are kept, and both are slower than before (0.94 to 0.98, and 0.96 to 1.02);
#     - the diagonal's keys of the next query tile asked for into the L2: 0.98 to 1.00.
#     - the same with a `bool` that says whether one was missed: at $d = 128$ ptxas put both rows' $m$ into odd registers, in spite of the `double` (below), and random numbers were 2 to 8 % slower.
# - **When the next query tile is chosen**, under a mask on an H200, bf16, FlashAttention-3's time over ours (not among the recorded figures). The producer used to take a number from the counter at the start of the query tile before ("looks ahead", above). With 256 query tiles (at $d = 64$ 176) for 132 CTAs, a CTA that had one of the longest took a second one, while others found none: 0.85 at $d = 128$ for 16 heads of 2048, 0.79 for 8 of 4096, and at $d = 64$ 0.94 and 0.94.
#     - *Two tiles of keys before the end, by a thread of its own*: 1.01 and 1.03 at $d = 128$, 1.18 and 1.14 at 64. With 16,384 tokens a batch at $d = 128$ 1.02 at $N = 1024$ (1.02 before), 1.13 at 512 (1.12) and 1.03 at 4096 (1.03).
#     - By the producer itself, one, two or three tiles before the end, is as good for few query tiles, but 1.01 at $N = 1024$; in the last tile it is 0.98. Clocks at the end of each query tile, with the number taken one tile before the end, show why: CTAs are done within 4 % of each other instead of 8 %, but each query tile takes 2 % longer, as $V$ comes late.
#     - Without a mask, where all query tiles are equally long, 1.00 to 1.01.
# - **Few query tiles**, tried on an H200, bf16, without a record; the same bits, speed relative to the kernel of that time ([notebook 99](99_the_ladder.ipynb) has one sequence of few heads on record).
#     - *The last tiles in pieces*, each the 64 queries of one warpgroup, in a CTA of its own, where the others only pass their turns. Where all tiles are cut, 44 at $d = 64$ and 64 at $d = 128$ (4 heads of 2048): 1.37 and 1.20, under a mask 1.29 and 1.22. Of 176 tiles at $d = 64$ the 44 that are left for a second round (16 heads of 2048, 8 of 4096): 1.16 and 1.20. Of 2,048 tiles at $d = 128$ the last 68: 0.96 to 0.98. A piece takes 0.7 to 0.8 of a whole tile's time, so it pays in the first rounds alone. Not taken: small inputs, on which a reader follows the kernel step by step, would always be in pieces.
#     - *No counter where no CTA has a second tile*, and so no `memset` in front of the kernel: 1.3 to 1.5 microseconds less per call. 1.13 to 1.18 at 10 microseconds (64 heads of 256), 1.09 at 17 (8 of 1024), 1.06 at 27 (8 of 2048). The kernel has it now.
#     - *A kernel that clears the counter* in place of the `memset`, and rung 32 launched as dependent on it, so that it begins meanwhile (programmatic dependent launch): for one to two rounds of query tiles 1.01 to 1.05 (19 to 51 microseconds), from 88 microseconds on no gain. Not taken, for a kernel, an attribute and an instruction more.
#     - *An earlier start*: tensor maps fetched in advance (`prefetch.tensormap`), all four or $O$'s alone, 0.99 to 1.01 beside the same without; besides, the thread that fetches $K$ finds the first query tile itself, 0.98 to 1.00 (one sequence). With 256 queries a call took up to 1.2 microseconds longer than FlashAttention-4's; why, we don't know.
#     - *Tiles dealt out beforehand* without a mask, so that no input needs the counter: at $d = 128$ 1.02 at $N = 512$, 1.01 at 1000 and 1024, 0.99 to 1.00 from 2048 on; at $d = 64$ 0.93 to 0.94 up to 1024, 0.97 to 1.00 beyond. At $d = 128$ the kernel now does so up to 1024 keys: over the rung before (bf16, one process, the same bits) 1.02 at $N = 512$, 1.004 at 1000, 1.00 at 1024. For longer ones it is 0.99 to 1.00 (two batches of 8 heads of 4096: 0.99).
# - **A query tile's time beside its tiles of keys**, at $d = 128$ without a mask. Calls on zeros, which power doesn't slow down, of 1024, 2048 and 4096 keys: a tile of keys takes 1.19 to 1.24 microseconds (FlashAttention-3: 1.27 to 1.33), and a query tile 1.9 to 2.4 more (1.6 to 2.2). With one head of keys for all query tiles, which stays in the L2, it is the same from 512 keys on. A part of these 2 is what is done for peaked rows: without the check for them random numbers gain 1.1 % at $N = 1024$, and if all tiles but the first were taken with the maximum there is, 3.1 %. (Under a mask they lose 4 to 9 % from $N = 1000$ on, presumably because maxima are missed.) What was tried, on an H200 in bf16, without a record, as speed relative to the rung of that time:
#     - *S of the next query tile started behind the last $O$, before $O$ is written* (30 again): beside the same code without it 0.99 to 1.01 at $d = 128$, and 0.92 to 0.96 at $d = 64$ and $N = 512$. It is easy to get wrong: a warpgroup that skips tiles must give back its last $V$ before it waits for a turn, or all wait for ever. And ptxas runs the products one after the other unless this one is always started, after the last query tile, too.
#     - *The check for peaked rows a tile earlier*, while $S$ is waited for, by a vote that the next turn shows: random numbers 1.00 to 1.006 at $d = 128$, but growing scores under a mask 0.96 there (fp16, $N = 4096$), and peaked rows 0.98 to 1.00, at $d = 64$ 0.96 to 1.01. By the same vote at the old place: 0.99 to 1.00.
#     - *Two CTAs of a cluster share a head's keys*, each fetches half of every tile for both (multicast): 0.64 to 0.71 at $d = 128$ without a mask, 0.54 to 0.77 at 64. A stage is free only when the warpgroups of both CTAs have read it; whether that is why, we did not look into.
#     - *Several heads at a time without a mask*: with 2 to 17 heads 0.98 to 1.01, with 33 0.97 to 1.00, with 132, a head for each CTA, 0.73 to 0.94 at $d = 128$ up to $N = 4097$.
#
#   What was kept, in one process on an H200, speed relative to the rung before, for $N = 512$, 1000, 1024, 4096 and 4097:
#     - *The first $S$ of a query tile waits for its turn*, and *$1/\ell$ and LSE are formed while the last $O$ is under way*: at $d = 128$ 1.03, 1.02, 1.02, 1.01 and 1.01, under a mask 1.02, 1.02, 1.02, 1.01 and 1.01; at $d = 64$ 1.00 to 1.01 in either case. One query tile per CTA (8 heads of 2048): 1.01, under a mask 1.02 and at $d = 64$ 0.99. The families of inputs at $N = 1024$ and 4096 in fp16: 1.00 to 1.02 at $d = 128$, 0.98 to 1.01 at 64. The bits are the same. FlashAttention-3's time over ours in the records at $d = 128$, the mean over layouts, groups and lengths from 1000 on, was 1.035 with and without a mask; with this it was 1.048, and 1.050 under one. Predicted was a gain from an *earlier* $S$, of 700 clocks per query tile. To start it earlier made short sequences slower: presumably because it then runs between the products of another warpgroup and holds those up, as it did where it stood, out of turn.
#     - $1/\ell$ and LSE alone, with a loop that starts that $S$ at its end: 1.02 at $N = 512$ and 1.01 elsewhere, under a mask 1.01.
#     - Beside all that, on another H200 at $d = 128$, also at $N = 16384$: the loop turned round so that $S$ of the next query tile is started at its end 0.99 to 1.01; $O$ rescaled in the first tile, too, 1.00 to 1.01 (left out all the same: with it ptxas puts both rows' $m$ of rung 51 into one bank at $d = 128$, in spite of the `double`, see below); under a mask, the next query tile chosen four tiles before the end of one, and not two, 1.01 at $N = 1000$ and 1024, 0.99 at 512 and 16384.
#     - *At $d = 128$ what no product waits for comes after what one waits for*: the sums are added to $\ell$, and $K$'s place is given back, behind the start of $S$; $V$'s place is given back behind the rounding of $P$. At $N = 512$, 1000, 1024, 4096, 4097 and 16384: 1.01, 1.01, 1.00, 1.01, 1.01 and 1.01, under a mask 1.01, 1.01, 1.01, 1.00, 1.01 and 1.01; by family (six, fp16, $N = 1024$ and 4096) 1.00 to 1.04, most where one key takes all of a row. The bits are the same, and so is the code for $d = 64$: there the first is up to 1 % slower, the second up to 2 %. Where keys have two stages only (32_5), part of this costs more than it brings, presumably because $K$'s place is free later. In the records, from a card on which the unchanged code for $d = 64$ is up to 2 % slower, FlashAttention-3's time over ours at $d = 128$ was 1.050, under a mask 1.054.
#     - Also tried at $d = 128$, relative to the rung before: $\ell$ and $K$'s place behind the end of the turn 0.98 to 1.00, and with $V$'s place behind $P$ 1.00 to 1.01; the wait for $K$ inside the turn 1.00, the wait for $V$ in front of it 0.99; the votes behind the rounding, too, 1.00 to 1.01 up to $N = 1024$ and 0.98 to 1.00 from 4096 on. (The same source loaded twice: 0.99 to 1.00, mostly within 0.1 %.)
#     - Later, on another H200, over the rung ($d = 128$, bf16, random numbers, $N$ = 1000 to 4097): the next query tile asked for one tile before the end 1.00 to 1.01 in one run and 1.00 in the next; rows $g$ and $g + 8$ of the exponentials in turns of 1, 2, 4 or 8 fragments 1.00; $V$ fetched before the next $K$ 0.99 to 1.01; the vote behind the wait for $O$ 0.98 to 1.00; where the maximum is tracked, 8 or 16 fragments (not 10) before that wait: 0.94 to 0.99; the loop unrolled twice 0.96 to 0.99.
# - **The counter** (3 is without): at $d = 128$ under a causal mask query tiles dealt out beforehand cost a sixth; without a mask, nothing, as notebook 31's model says.

# %%
print(textwrap.fill(record.about("32_ping_pong", "steps")["counters"], 110))

# %% [markdown]
# ### Two banks of registers
#
# An `FFMA` before each exponential takes three operands: an element of $S$, the scale and $-m$. Registers lie in two banks, the even numbers in one and the odd ones in the other ([Jia et al., 2018](https://arxiv.org/abs/1804.06826), for Volta). What an instruction marks `.reuse` is at hand for those behind it; the rest has to be fetched, and here two fetches from one bank seem to take a cycle more ([51](51_one_sided.ipynb) says what that cost). How many of the `FFMA` fetch two registers from one bank, in the loop at $d = 64$ and at 128:

# %% tags=["raises-exception"]
{D: loops.from_one_bank(sass.loop_lines("32_ping_pong", D, kernel="ping_pong")) for D in (64, 128)}

# %% [markdown]
# It was 32 of 64 in drafts that took an element of one row and one of the other in turn, wherever ptxas had put both rows' $m$ into even registers: no `.reuse` helps then. One flag more in the loop was enough for that, and random numbers were 2 % slower at $N = 1024$ and 7 % at 16384. Which banks the rows' $m$ lie in is up to ptxas, and a test holds that they differ in the loop that votes. In drafts it mostly went wrong: of seven, five had both in one at $d = 128$, which takes 3 to 5 % of the speed. A `double` is an even register and the odd one behind it. The kernel puts both rows' $m$ into one, and takes it apart in front of the loop that votes; of ten harmless edits one still had both in one bank. Taken apart anew in every tile, they were right in all ten, but at $d = 128$ and $N = 16384$ that was 1 % slower than no `double`. A 64-bit integer isn't enough, ptxas takes it apart before. And a `double` in every loop costs 1 % where the maximum is tracked, as the first exponentials then wait for both rows' maxima. The scale is an argument, as that lies in a *uniform* register, which belongs to no bank; formed by the kernel itself, it took a register of every thread, and 5 % at $d = 64$ (noted, not recorded).
#
# ## Backward: 15 drafts

# %%
print(textwrap.fill(record.about("33_backward_wgmma", "steps")["method"], 110))

# %%
plot.recorded("33_backward_wgmma", "steps", table())

# %% [markdown]
# - **Every thread gives a place back** (11), and not one for its warpgroup behind a barrier: a percent at $d = 128$. It buys that NVIDIA's own tool can follow: racecheck takes an arrival at an mbarrier to speak for the thread that arrives, and nobody else. (Its sister initcheck still reports what `add_heads` reads: the version we ran doesn't see what TMA writes, notebook 92.)
# - **The longest tiles first** (12) is for a causal mask. With one it has 4 % more than step 11, and without one, where it changes nothing, 3 %: so far apart are two runs.
# - **One loop** (13), whose last step starts an $S$ that nobody reads, was as fast and a quarter less to compile. At $d = 128$ the rung went back to two; at $d = 64$ it has one, whose last $S$ is the next tile's.
#
# The rung is step 14 with these changes: the sums of $S$ begin with $-\mathrm{LSE} / \text{scale}$; at $d = 128$ the last step starts no $S$; $dS$ is formed from $P$ in fp32; the first CTA at a tile of $dQ$ stores its share; and at $d = 64$ a CTA per SM takes one tile of keys after another, with $K$ in two stages, so that a tile's last step starts the next one's $S$. The last of these made it (both dtypes, without and with a causal mask) 1.17 and 1.33 times as fast at $N = 512$, 1.13 and 1.19 at 1024, 1.03 and 1.07 at 4096; at 16384 it is the same. Tried on the finished kernel, without a record:
#
# - no turns: 1 % slower at $d = 64$, 1 % faster at 128;
# - FlashAttention-3's order ($S$, $dP$, then $dV$, $dQ$ and $dK$ of the same step, no next $S$, no turns): slower;
# - the CTA that takes one tile of keys after another, without a second stage for $K$: 2 to 4 % faster than a CTA for each up to $N = 1024$ at $d = 64$, no faster elsewhere; with two stages for $Q$ instead of three: 5 to 10 % slower from $N = 4096$ on;
# - to set `dQ_sum` to 0 for sequences longer than 1,024 keys, or to publish the first share by `st.release`: 2 to 5 % slower;
# - $dQ$ rounded by an idle warp of the same kernel once all shares are added: up to 11 % slower at $d = 128$, as somebody has to count the shares;
# - one arrival per warp at the mbarriers, heads from the last to the first, sets of 4 to 64 heads instead of 16, $P$ rounded before the wait for $dQ$: nothing. (On an H100, whose HBM has 70 % of the bandwidth, as many heads as the L2 holds were 1 to 5 % faster under a mask. That stayed.)
#
# Tried later, on an H200, medians of 16 to 24 interleaved calls of about 3 ms in one process, without a record:
#
# - a CTA that takes one tile of keys after another at $d = 128$, too, with $K$ in two stages and $dS$ in one: ptxas has no registers for it. Of 80 drafts those that spilled nothing in the loop had their products serialised; the two that were timed were 0.76 to 0.97 times as fast without a mask;
# - $dQ$ added from registers, by `red.global.add.v4.f32`: beside a draft that sets `dQ_sum` to 0, too, 1 % faster at $d = 128$ and 1 to 3 % under a mask, up to 2 % slower at 64. To set it to 0 takes 7 to 8 % at $N = 512$ and 1 % at 4096;
# - $dQ$ before $dK$, with $dK$ under way while $dQ$ leaves: 1 to 2 % slower;
# - `fence.proxy.async` right behind $dQ$'s stores, and the warp that sends it told in front of the next products, not behind their start (medians of 7 to 9 bursts of 5 ms, with pauses for the highest clock and without): 1.02 to 1.04 times as fast at $d = 128$ from $N = 2048$ on, 1.01 to 1.02 below. That is the kernel now. The fence's place does it: both in front of the next products, 1.00 to 1.01; both right behind the stores, 1.01 to 1.03. At $d = 64$ it was 1.01 to 1.03 without a mask (0.99 and 1.07 in one run at $N = 16384$), and 1.00 to 1.03 under one, but 0.99 to 1.00 at $N = 8192$ and 0.94 to 1.00 at 16384. With as many heads in a set as have $2^{14}$ queries together it was 0.98 to 1.02 under a mask, but `deterministic` 0.93 to 0.97. Why is not known, so $d = 64$ keeps the old order. Without turns on top of it: 0 to 1 % faster at $d = 128$, 3 to 5 % slower at 64.
#
# **The small kernels, and the last tile first**, as the kernel has them now, on an H200, without a record: 16,384 tokens of 2,048 numbers, bf16; what a kernel takes is the mean of 20 calls, by PyTorch's profiler.
#
# - `add_heads` reads 16 bytes per lane, with four loads under way, where it read 4 bytes, with a CTA for each row: 63 µs become 43 at $d = 128$, 81 become 43 at 64. With four query heads for each head of $K$ and $V$ that saves 3 and 5 % of a call at $N = 1024$.
# - `prepare` divides 32-bit integers and not 64-bit ones, asks for LSE together with $O$ and $dO$ and not after the sum, and has two pieces of 16 bytes of each per lane: 43 µs become 39, 44 become 40 at $d = 64$. A CTA per tile with four rows per lane took 65: ptxas waits for each row before it asks for the next. FlashAttention-3's takes 66.
# - `finish` goes from the last tile to the first, as the L2 still holds the last ones: 49 µs become 47. With loads and stores marked as used once (`.cs`) it is 50.
# - Without a mask a head's *last* tile of keys comes first. At $N = 4097$ that tile holds one key and is masked in every step, and the last head's used to begin last of all. The items go round exactly: 1,584 are 12 for each of 132 SMs (at $d = 64$ 3,168, 24 for each). 1.027 times as fast at $d = 128$ and 1.024 at 64; at 1000, 2048, 4096 and 16384 (measured at $d = 128$) it is 1.00.
# - *Programmatic dependent launch*, by which a kernel starts while the one before ends: 0.1 to 0.7 % faster at $N = 1024$, no faster at 4096. For one sequence 1.03 to 1.04 with 8 heads of 1024, 0.96 to 0.98 with 8 of 2048 and 0.90 to 0.96 with 64 of 256. Not kept.
#
# **Sets of heads past 32k tokens.** A set of 16 heads under a mask was right up to there. CTAs that begin with the same queries at the same time go on reading the same rows of $Q$ and $dO$, and add to the same rows of $dQ$; the longer they run, the further they drift apart, and the L2 has to hold what lies between them, for every head of the set. So a set now has as many heads as have $2^{19}$ queries together. The rung's own kernel at $d = 128$, 16 heads of 262,144 tokens, under a causal mask (Nsight Compute, once, on an H200):
#
# | heads in a set | 16 | 8 | 4 | 2 |
# |---|--:|--:|--:|--:|
# | read from HBM, TB | 4.29 | 0.31 | 0.14 | 0.07 |
# | written to it, TB | 2.13 | 0.16 | 0.07 | 0.04 |
# | hits in the L2 | 30 % | 92 % | 96 % | 98 % |
# | seconds | 1.83 | 1.19 | 1.16 | 1.16 |
#
# At 32,768 tokens it is the other way round: two heads read an eighth of what 16 read, 1.1 GB instead of 8.7, and take 17.1 ms instead of 16.1, as CTAs that add to one $dQ$ wait for each other. Events, medians of three calls, in TFLOP/s, with 16 heads and with the new number: 580 and 595 for 65,536 tokens, 568 and 602 for 131,072, 387 and 604 for 262,144; at $d = 64$ 530 and 538, 528 and 544, 525 and 550.
#
# ### Who gets which tile
#
# A CTA has 128 keys of one *query* head. Several query heads may share $K$ and $V$. Then one CTA could go through the queries of all of them, and sum up their $dK$ and $dV$ in registers. A model, as in notebook 31: an SM takes one tile after the other, and a tile takes as long as it has queries. The share of the time for which an average SM has work, under a causal mask:


# %%
def at_work(heads, in_a_tile, N, at_once, sms=132):
    """`in_a_tile`: query heads that a CTA goes through; `at_once`: heads of which the longest tiles come first."""
    tiles, work = N // 128, []
    for first in range(0, heads, at_once):
        work += [in_a_tile * (tiles - t) for t in range(tiles) for _ in range(min(at_once, heads - first))]
    return f"{sum(work) / (sms * schedule.makespan(work, sms)):.0%}"


# %%
rows = {}
for B, H, Hkv, N in ((2, 16, 2, 2048), (4, 8, 2, 4096), (1, 32, 4, 8192)):
    shared = {"CTAs": B * Hkv * N // 128, "head by head": at_work(B * Hkv, H // Hkv, N, 1)}
    shared["longest first"] = at_work(B * Hkv, H // Hkv, N, 16)
    own = {"CTAs": B * H * N // 128, "longest first": at_work(B * H, 1, N, 16)}
    both = {"a CTA for all": pd.Series(shared), "own CTAs": pd.Series(own)}
    rows[f"B = {B}, {H} heads on {Hkv}, N = {N}"] = pd.concat(both)
pd.DataFrame(rows).T

# %% [markdown]
# The order alone fixes most of it where there are CTAs enough. In the first row there are 64, for 132 SMs, and no order helps: so each query head has CTAs of its own (step 14, whose reason has the times).
#
# ## Across GPUs
#
# What did not pay in the finished ring of [notebook 50](50_ring.ipynb), forward on two H100s, without a record:
#
# - **Blocks on two streams in turn**, so that a block begins on SMs for which the one before has no more work: 1 to 4 % faster at 16k tokens, between 2 % faster and 2 % slower at 64k, up to 3 % slower at 256k. Not worth a second way for parts to be merged.
# - **Fewer of NCCL's channels** for a message, so that it takes fewer SMs from the kernel: with 8 instead of 16, a rank's K and V of 8k tokens take 448 µs instead of 265, and causal attention to 16k tokens falls from 1.67 to 1.45 times one GPU's speed. At 64k, where both are hidden, it makes no difference.
# - **Buffers registered with NCCL**, which may then write to the receiver's memory without a copy in between: the same times.
