# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---


# %% [markdown]
# # 29 · Log: what else was tried for 20 to 23
#
# [← 24 · In a model](24_in_a_model.ipynb) | [glossary](glossary.md) | [30 · TMA and wgmma →](30_tma_wgmma.ipynb)
#
# An appendix to notebooks [20](20_causal_gqa.ipynb) to [23](23_backward_mma.ipynb): drafts with what was expected of each before it ran, how much measurements differ from one run to the next, and figures that the notebooks leave out. All of it is read from the records in `data/`. There is nothing to solve here.
# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
from functools import partial

import pandas as pd

from helpers import draw_backward, plot, record


def drafts(steps):
    """Of a `steps` record: every draft with its numbers."""
    display(record.step_table(steps, "spill_bytes").style.format(precision=2, na_rep=""))


def every(steps, peer):
    return draw_backward.steps_taken(steps, f"Every draft of {steps.rung.iloc[0]}", peer)


# %% [markdown]
# ## 20 · What the loop lost to 13's
#
# Without a mask rung 20 does rung 13's work, and was 3 % slower. Its machine code had two things that 13's has not. Times of rung 13 over rung 20's on an H200, geometric means over $N$ = 1024, 4096, 16384 and four families of inputs (tried side by side, without a record):
#
# | | $d = 64$ | $d = 128$ |
# |---|--:|--:|
# | as it was | 0.97 | 0.97 |
# | the scale is an argument, and takes no register | 0.98 | 0.97 |
# | the compiler is told that all lanes of a warp have the same `warp` | 0.99 | 0.96 |
# | both | 1.00 | 0.95 |
#
# The number of a warp is `threadIdx.x / 32`, of which the compiler knows nothing, and wherever a branch depends on it, the loop was prepared for lanes that part. At $d = 128$ the code without all that is shorter, spills less, and is slower nevertheless; why, we don't know. So at first the rung told it at $d = 64$ alone. (Told at $d = 128$ for the branches, but not for the addresses, nothing spills any more, and it is 1 % slower. That draft asked `__reduce_max_sync` only where there is a mask, and was wrong there: ptxas 13.0.88 executes the instruction under the predicate of another branch. The emulator gets it right. So ask outside of any condition.) Rung 13 gains nothing by an argument: 0.99 and 1.00.
#
# What was left at $d = 128$ we put down to the place of the copies. In rung 13 they left after $P$ was rounded, in rung 20 before, while $P$ was still fp32. With a mask, 13's order of that time spilled 190 to 380 bytes and was 9 to 26 % slower. (Rung 13 has since taken 20's order, and is faster: [log](19_log.ipynb).)
#
# So a draft is compiled twice for each $d$ and dtype, once without anything that only a mask needs, in rung 13's order of that time. Times of rung 13 and of the rung over the draft's without a mask, geometric means over $N$ = 1024, 4096, 16384, the lowest and the highest of six families of inputs (an H100, without a record):
#
# | | $d = 64$ | $d = 96$ | $d = 128$ |
# |---|--:|--:|--:|
# | rung 13 over the draft | 1.00 to 1.03 | | 0.98 to 1.01 |
# | the rung over the draft | 1.00 to 1.03 | 1.02 to 1.04 | 1.01 to 1.04 |
#
# Most of that at $d = 64$ comes from another place. There are three stages, and the loop keeps which of them is free; the draft finds it anew for every tile. With a mask that brings nothing, and at $d = 128$ 132 bytes are spilled for it. The draft did not stay: the rung is there for the mask, under which nothing changes, and it would take 1.6 times as long to compile (medians of five on two cores: 5.0 and 7.8 s with `nvcc`, 2.7 and 4.3 s for the emulator).
#
# **Then the branch for unseen tiles came first.** The loop asked twice whether the warp sees a tile, before the copies and after them. Now it asks once, first, and the copies stand in both branches. Time of the rung of that day over the draft's, fp16, on an H200, geometric means over $N$ = 1024, 4096, 16384 (the first row without 16384), without a record:
#
# | | $d = 64$ | causal | $d = 128$ | causal |
# |---|--:|--:|--:|--:|
# | the branch first | 1.01 | 1.01 | 0.99 | 0.99 |
# | and the compiler is told `warp` at $d = 128$, too | 1.01 | 1.01 | 1.01 | 1.01 |
# | **and the half stage from $K$ to $V$ is added after the XOR, as a constant: the rung** | 1.02 | 1.02 | 1.02 | 1.01 |
#
# Telling the compiler, which had cost speed at $d = 128$, now gains 2 %. Under a mask at $d = 128$ all three together are 1 % slower at $N = 1024$ and 3 % faster at 16384. To write $K$'s address before the wait, as rung 13 does, brought nothing here. Nor did 97 more drafts with one to three such changes each (fp16, $d = 128$, eight inputs of 1024 and 4096 keys with and without a mask, the same bits): the best is 1.002 times as fast as the rung, the worst 0.975. Some spill nothing, as the mask forms fewer indices: they are 2 to 5 % slower on random numbers from $N = 4096$ on, and 2 % faster on *Q × 2* under a mask. Rung 13 has since gained about 2 %, too, so 20 is still behind it: on random numbers 0.97<!--= family("20", "13_tuned", "randn", 64):.2f --> and 0.98<!--= family("20", "13_tuned", "randn", 128):.2f --> times as fast.
#
# **Two more tries and a control**, fp16, on an H200, without a record. Time of the first over that of the second, lowest and highest of $N$ = 1024 to 16384 on random numbers and *Q × 2* (below 1 the second is slower):
#
# | | $d = 64$ | causal | $d = 128$ | causal |
# |---|--:|--:|--:|--:|
# | 20 / a draft with a loop of its own for whole tiles, and fewer indices in the mask | 1.01 to 1.03 | 1.00 to 1.03 | 0.97 to 1.01 | 0.97 to 0.98 |
# | 13 / 20 without a mask | 0.99 to 1.01 | | 0.94 to 0.98 | |
# | 13 / 13 with 20's arguments and grouped heads | 0.98 to 1.00 | | 0.99 to 1.01 | |
#
# The first draft did not stay, as it loses at $d = 128$ what it gains at 64. The second row shows that the mask's work is not what keeps rung 20 behind 13 at $d = 128$; the third, that the arguments and grouped heads are not, either. (The draft without a mask above was held against an older and slower 13.) These two drafts execute nearly the same number of instructions per tile, 680 and 682, in a different order. We then made the source of the draft without a mask more like 13's, until the two differed only before and after the loop. 13's time was still 0.95 to 0.98 of the draft's. Samples of the program counter show where the time goes: into the exponentials, and into the last products of $S$ beside them. Why, we don't know. One more try: in rung 20, all sums after all exponentials. That is 1.00 to 1.01 times as fast at $d = 128$, and 0.97 to 0.99 at 64, the other way round than in 13 ([19](19_log.ipynb)).
#
# **155 more forms of the loop** ($d = 128$, fp16, the same bits, on another H200, without a record) combine ten such changes at random: what the compiler is told, where copies, sums and rounding stand, how addresses and indices are formed. Of the eight that were best on random numbers and *Q × 4* at $N = 4096$, none beats the rung over three lengths and three families. The 55 that spill nothing are all slower on random numbers (2 to 6 % at $N = 4096$). To tell the compiler that all lanes have the same `tile` and `Nk` is enough to spill nothing: it costs 4 % at $N = 16384$, under a mask 5 %, and on *Q × 4* nothing. Nsight Compute counts, for 13, 20 and that draft, 2.6, 2.9 and 2.7 cycles per instruction of waiting for a fixed latency, and 0.7, 0.6 and 0.9 for the tensor cores: the draft's warps wait less for themselves and more for each other.
#
# Among the 155, the longer a form's copies take to issue, the faster it is on random numbers. So copies spread over the products of $O$, a part after each sixteen keys or before them, should be faster still. They are slower: 13 at 0.88 to 0.93 of its speed ($d = 64$: 0.92 to 0.95), 20 at 0.91 to 0.98 (0.96 to 1.00), under a mask the same.
#
# **What else was tried**, fp16, on an H200, without a record; speed over the rung's own, $N$ = 1024 to 16384:
#
# - *A tile's keys in two halves*: exponentials of the first beside $S$ of the second, those of the second beside $O$ of the first, and nothing spilled in 20. The stall counts that ptxas writes into the code add up to as much as a tenth less per tile, so a gain of up to 10 % was predicted. At $d = 128$, 13 has 0.88 to 0.95 of its speed and 20 0.91 to 0.99, at 64 both have 0.91 to 1.00.
# - *Copies among the exponentials*: 13 spills nothing then. At $d = 128$, it has 0.97 on random numbers and 0.99 to 1.01 on *Q × 2*; 20 0.97 to 1.00 and 1.01 to 1.02. At $d = 64$ both have 0.98 to 1.01.
# - *The second CTA of an SM begins 700, 1400 or 2100 clocks later*, so that one is at its exponentials while the other multiplies: no difference.
# - *Smaller limits on a row's sum*, for smaller errors: 16 in place of 32 costs random numbers 1 to 6 %; 2 in place of 4 costs *Q × 2* 1 to 5 %.
#
# And one answer to the question above. 13 with 20's arguments and grouped heads is as fast as 13. With 20's order of the CTAs as well it has 0.95 to 0.97 on random numbers, though its loop has the same source: ptxas arranges it in another way. So we wrote a model of two warps on a scheduler that share a pipe for products, one for exponentials and a queue to shared memory, and ran 61 such forms of the loop through it. With fitted constants its times correlate with the measured ones ($r = 0.85$); in it that queue is busy for five sixths of the time. Of 276 more forms 28 were timed, among them the 20 that the model liked best. Its favourite was the fastest on random numbers: $S$ from the tile's last keys on, lower strips first in $O$, sums before copies, 1.00 to 1.02 times as fast as 20 at $d = 128$, and 0.98 to 1.00 of 13. A search that followed the model further found its errors only. So 20 stays as it is.
#
# The order of the CTAs costs nothing if a grid of three dimensions gives it (heads of a group, tiles of queries, groups): no division is left in front of the loop. 13 with 20's arguments, grouped heads and such a grid has 0.98 to 1.00 of its speed at $d = 128$; with the scale as an argument and a uniform number of the warp as well 1.00 (and 0.99 to 1.01 at $d = 64$, both with two stages). But sequences packed into that draft bring it down to 0.93 to 0.97 again, and 20 is as fast with the grid as without. An instance of 20 for inputs without a mask and without packing, on such a grid and written in 96 ways: 0.89 to 1.01, none of them at 1.00 throughout. Without packing 20 spills nothing at $d = 128$, and has 0.95 to 0.98 of 13's speed; under a mask it is 0.93 to 1.02 times as fast as with packing.
#
# ## 22 · Drafts of the fp32 backward pass
#
# Each row is a draft at one head dimension. `ratio` is how many times as long SDPA MATH took, the geometric mean over the lengths that were timed, `ratio_causal` the same under a causal mask; `spill_bytes` is what a thread has in memory because registers ran out. All ran side by side. The rung itself is in no row: nearest is draft 10, from which it differs in letting $V_j$ go and in a `fetch` for each product.
# %%
plot.recorded("22_backward_fp32", "steps", drafts)

# %%
plot.recorded("22_backward_fp32", "steps", partial(every, peer="SDPA MATH"))

# %% [markdown]
# - *Keeping $K$ and $V$* (3) brought half of what was expected at $d = 64$ and less at $d = 128$. *Going down the rows* (6) brought twice what was expected. After that, *loading B's next row early* (2) makes no difference any more: draft 7 does without it and is within 1 % of draft 6.
# - *Half the keys* per CTA (12) would fit on an A100 at $d = 128$, and on the H200 two such CTAs share an SM; but $Q$ and $dO$ come twice as often, and it is slower. Cards whose blocks have 99 KB take half the keys and half the queries: a row of their own in the table of tiles.
# - *Unrolling a whole slab* (8) is among the best at $d = 128$ and by far the worst at $d = 64$, where it spills and two CTAs share an SM.
# - *One of two warps later* (15) was meant to let one warp of a scheduler multiply while the other one fetches. It was expected to gain 3 % and loses.
# - *Turns* were expected to cost 10 % under a causal mask, if all CTAs of a head begin at once. Draft 17 shows no more than without a mask: most CTAs of a full grid begin when another one ends, and so come one after the other anyway.
#
# ## 23 · Drafts of the backward pass on tensor cores
#
# The peer is SDPA FLASH, in bf16. Drafts 1 to 14 ran together, 15 and 16 in another run on another machine, 17 to 19 in a third.
# %%
plot.recorded("23_backward_mma", "steps", drafts)

# %%
plot.recorded("23_backward_mma", "steps", partial(every, peer="SDPA FLASH"))

# %% [markdown]
# - Drafts 3 and 4 are the same algorithm; one has switches, the other is written out. What lies between them is what the order of the code is worth, and differences below that prove nothing.
# - At $d = 64$, where nobody shares keys, nothing was expected of draft 2, and yet there is a gain: the loop was written anew, and comes out of the compiler in another order.
# - *Half as many barriers* (9) were expected to help and did not, at least not at the price of registers that spill.
# - *The longest tiles first* (15) and *CTAs for each query head* (16): what they gained was measured beside the version without, and stands in their `reason`.
# - *Where the sums begin* (18, the rung) is worth 5<!--= 100 * (step("23", 18, 64) / step("23", 17, 64) - 1):.0f --> % at $d = 64$ and 3<!--= 100 * (step("23", 18, 128) / step("23", 17, 128) - 1):.0f --> % at $d = 128$ beside 17. If the sums of $S$ alone begin there, $d = 64$ gains nothing and $d = 128$ loses 3 %; if those of $dP$ alone do, $d = 64$ gains 6 % and $d = 128$ 1 % (tried side by side, without a record). So delta alone would do at $d = 64$; LSE is there for $d = 128$ and for large scores (below).
# - *$P = 0$ for keys out of sight* (19) is simpler, and 1 to 2 % slower than 18. (Rung 33 does it so.)
#
# ### Large scores: exact LSE or rung 20's
#
# With sums that began with 0, draft 17 was less accurate than SDPA FLASH in one family: scores that grow along the keys, under a causal mask at $d = 128$ in fp16. There scores are near $-2000$, and `mma.sync` loses low bits at every step of such a sum. In draft 18 the sums that matter end near 0. Errors over SDPA FLASH's in that family at $N$ = 4096, and the largest of all other families, masks, dtypes and head dimensions (an H200; draft 18 with exact $O$ and LSE is the record, the rest has none):
#
# | $O$ and LSE | draft | $dQ$ | $dK$ | $dV$ | largest elsewhere |
# |---|--:|--:|--:|--:|--:|
# | rounded from float64 | 17 | 0.98 | 1.11 | 1.15 | 1.04 |
# | | 18 | 0.92 | 0.96 | 0.96 | 1.04 |
# | rung 20's | 17 | 1.00 | 0.99 | 0.99 | 1.03 |
# | | 18 | 1.08 | 1.11 | 1.13 | 1.03 |
#
# So with exact LSE draft 18 is the more accurate one in this family, and behind rung 20 the less accurate one. The likely reason: the forward pass's sums of $S$ lose low bits, too. Draft 17 lost the same ones, so that rung 20's LSE fitted. Draft 18's $S$ is more exact, and the error of LSE remains. (Rung 33 with rung 32's $O$ and LSE: 1.08, 1.11, 1.13 as well.)
#
# ### How much runs differ
#
# Without a mask drafts 4, 15, 16 and 17 compute the same in the same way. Their ratios to SDPA FLASH from three occasions:
# %%
steps = record.load("23_backward_mma", "steps", device="nvidia-h200").pivot(index="step", columns="D", values="ratio")
occasions = {4: "the first run", 15: "the second", 16: "the second", 17: "the third"}
same = pd.DataFrame({f"draft {n}, {run}": steps.loc[n] for n, run in occasions.items()}).T
same.loc["the highest over the lowest"] = same.max() / same.min()
same.round(3).rename(columns="d = {}".format)


# %% [markdown]
# And one and the same code of SDPA FLASH, in ms, in the records of two rungs:
# %%
def flash_beside(stem):
    found = record.load(stem, "backward", device="nvidia-h200")
    found = found.query("name == 'SDPA FLASH' and dtype == 'bf16' and not causal and Nk in (1024, 4096, 16384)")
    return found.groupby(["D", "Nk"]).ms.median()


alone = pd.DataFrame({f"beside {stem[:2]}": flash_beside(stem) for stem in ("23_backward_mma", "33_backward_wgmma")})
alone.assign(difference=(alone.iloc[:, 1] / alone.iloc[:, 0] - 1).map("{:+.1%}".format)).round(2)

# %% [markdown]
# Ratios are formed within a round, side by side, because of this. Across runs, differences of 5 % prove nothing.
#
# ### Public kernels
#
# TFLOP/s of the backward pass in fp16 at 16384 tokens and a width of 2048, from the project's earlier study of public kernels on an H200 ([data/README.md](../data/README.md), `h200_peers.csv`):
# %%
study = pd.concat([record.public_kernels("bwd", causal).assign(causal=causal) for causal in (False, True)])
study = study[(study.dtype == "fp16") & study.tflops.notna()]
study.pivot_table(index=["causal", "D", "name"], columns="Nk", values="tflops").round(0)

# %% [markdown]
# ## Errors
#
# The largest error of each output as a share of its budget, over all recorded lengths and head dimensions ($dQ$, $dK$ and $dV$ have a dot each); then those of 22 and 23 by length, at $d = 64$, beside plain PyTorch's. The budget of 22 lies far above both, as notebook 22 explains.
# %%
errors = record.load(kind="error")
plot.budget(errors[errors.rung.str.startswith("2")])

# %%
plot.recorded("22_backward_fp32", "error", plot.error)

# %%
plot.recorded("23_backward_mma", "error", plot.error)
