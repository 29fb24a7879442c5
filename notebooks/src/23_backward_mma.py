# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 23 · Backward on tensor cores: P and dS are born as operands
#
# [← 22 · Backward](22_backward_fp32.ipynb) | [23_backward_mma.cu](../kernels/23_backward_mma.cu) | [glossary](glossary.md) | [24 · In a model →](24_in_a_model.ipynb)
#
# **After this notebook you can**
# - say for each of ten operands whether it comes by `ldmatrix`, by `ldmatrix.trans` or not at all, and why;
# - decide which way round to form a product by asking who needs its result next;
# - draw up the budget of registers and shared memory of a kernel before it is compiled, and let two warps share what one can't hold;
# - judge what atomics do to a result: what differs from run to run, by how much, and when that matters;
# - explain why training in fp16 scales its loss and training in bf16 does not.
#
# **Time** 60 minutes.
#
# **Needs** [22 · Backward: gradients without P](22_backward_fp32.ipynb) for the maths and [10 · Tensor cores](10_fa2_mma_fp16.ipynb) for fragments. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: form $S$ transposed, keys by queries; then a warp's results $P^\top$ and $dS^\top$ already *are* the operands of $dV$ and $dK$, and only $dS$ has to cross between all of them.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import heapq

import numpy as np
import pandas as pd
import torch

from helpers import Case, check, for_d64, load, predict, xray
from helpers import draw_backward, draw_proof, exercise, fragments, plot, record, sass, show

torch.manual_seed(0)
kernel = load("23_backward_mma")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 22's kernel does five matrix products per tile on CUDA cores. What those units can do, beside the tensor cores, as measured on the recorded device:

# %%
top = record.load("device", "ceilings").groupby(["name", "unit"]).value.median().rename("measured").reset_index()
top[top.name.str.contains("matmul")].set_index("name").round(0)

# %% [markdown]
# Notebook 10 moved two products to tensor cores. One fact made it work: the [accumulators](glossary.md#accumulator) of $S$ have the layout of an operand $A$, so $P$ went from one product to the next in registers. Now there are five products, and the results of two ($P$ from $S$, $dS$ from $dP$) are operands of the other three, each of which wants them in its own arrangement. Which of the three can take them from registers?
#
# ## 1 · Ten operands
#
# In $C \mathrel{+}= A B$ an `mma` sums over $k$. A register holds a *pair* of 16-bit numbers that are neighbours along $k$, in $A$ as in $B$. `ldmatrix` makes pairs of neighbours *in memory*, along the rows of a tile; `ldmatrix.trans` makes pairs of what stands one above the other. So of each operand ask: **does $k$ run along the rows of its tile, or across them?** All four cases on one 8 × 8 matrix:


# %%
def ldmatrix(tile, trans):
    """The pair that each lane gets of one 8 x 8 matrix: (32, 2) (PTX ISA, "ldmatrix")."""
    source = tile.T if trans else tile
    return np.array([[source[lane // 4, lane % 4 * 2 + i] for i in range(2)] for lane in range(32)])


# %%
tile = np.arange(64).reshape(8, 8)  # as it lies in memory
A, B = fragments.a_fragment, fragments.b_fragment  # (lane, element) -> (row, column) of the operand
for name, operand, layout in [
    ("A, k along the rows ", tile, A),
    ("A, k across the rows", tile.T, A),
    ("B, k along the rows ", tile.T, B),
    ("B, k across the rows", tile, B),
]:
    wanted = [[operand[layout(lane, i)] for i in range(2)] for lane in range(32)]
    print(name, "->", [f"trans={trans}" for trans in (False, True) if (ldmatrix(tile, trans) == wanted).all()][0])

# %% [markdown]
# Every tile lies as it came from HBM: $Q_i$, $dO_i$ with a row per query, $K_j$, $V_j$ with a row per key, columns along $d$. $S$ and $dP$ sum over $d$: along the rows. The other three products sum over queries or keys: across them.
#
# And the two operands that are *results*, $P$ and $dS$? Two [fragments](glossary.md#fragment) $C$ side by side are a fragment $A$ (notebook 10, section 4), with $C$'s columns in the place of $k$. Therefore:
#
# - $S = Q K^\top$, a row per query and a column per key, is the operand $A$ of a product that sums over *keys*: $O = P V$ in the forward pass, $dQ = dS\, K$ in the backward pass.
# - $S^\top = K Q^\top$, a row per key and a column per query, is the operand $A$ of a product that sums over *queries*: $dV = P^\top dO$ and $dK = dS^\top Q$.
#
# This kernel forms $S^\top$ and $dP^\top$. Nothing is transposed for that: $A$ and $B$ change places.

# %%
transposed = ...  # your prediction: how many of the ten come by ldmatrix.trans, if dSᵀ is stored with a row per key?

# %% tags=["reveal"]
along, across, born = True, False, None
products = {
    "1  Sᵀ = K Qᵀ": (("K", "keys", "d", along), ("Qᵀ", "queries", "d", along)),
    "2  dV += Pᵀ dO": (("Pᵀ", "keys", "queries", born), ("dO", "d", "queries", across)),
    "3  dPᵀ = V dOᵀ": (("V", "keys", "d", along), ("dOᵀ", "queries", "d", along)),
    "4  dK += dSᵀ Q": (("dSᵀ", "keys", "queries", born), ("Q", "d", "queries", across)),
    "5  dQ += dS K": (("dS", "queries", "keys", across), ("K", "d", "keys", across)),
}
ways = [operand[3] for both in products.values() for operand in both]
predict(transposed, ways.count(across), "of ten operands by ldmatrix.trans")
draw_backward.operands(products)

# %% [markdown]
# **What to see.** The stripes are rows in memory. Blue: they run the way $k$ runs, plain `ldmatrix`. Orange: they run across, `.trans`. Pale: nothing to load. $dS$ of the fifth product is a result that has to be loaded all the same; it lies in shared memory as $dS^\top$, a row per key, and comes back with `.trans`.
#
# ## 2 · Who crosses
#
# There is a second reason for a row per key. The CTA owns a tile of 128 keys; at $d = 64$ its four warps have 32 keys each. So a warp owns the rows of $dK$ and $dV$ of its keys, and computes all that they need, its rows of $P^\top$ and $dS^\top$, itself.
#
# $dQ$ is different: it sums over *all* keys. So all warps put their $dS^\top$ into shared memory, and after a barrier each computes a piece of $dQ_i$, 32 rows by 32 columns, over all 128 keys.

# %%
ways = dict.fromkeys(draw_backward.EDGES, "registers") | {("dS", "dQ"): "shared memory"}
ends = {"dV": "registers, to the end", "dK": "registers, to the end", "dQ": "HBM, by atomics"}
draw_backward.dataflow(ways, ends, "One step of 23_backward_mma at d = 64 (S, P, dP and dS transposed)")

# %% [markdown]
# **What to see.** Compare with the figure of notebook 22: four orange arrows have become one. $B_r B_c$ numbers of 16 bits cross per step. With a row per query both $P$ and $dS$ would cross.
#
# ## 3 · The budget
#
# What does a CTA need? In shared memory $K_j$ and $V_j$, which stay; two stages of $Q_i$ and $dO_i$ with LSE and delta of their rows; and $dS$. In registers, per lane: $dK$ and $dV$ of the warp's keys, which stay; $S$ and $dP$ for `Bq` = 32 queries at a time.
#
# At $d = 64$ a warp holds $dK$ and $dV$ of 32 keys in 128 registers per lane. At $d = 128$ that would be 256, more than a lane has. Two ways out: 16 keys for each of eight warps; or 32 keys for each *two* warps, with 64 columns of $dK$ and $dV$ for either. The kernel takes the second. Who has what, from the constants of the kernel's text:


# %%
def who(d):
    """The number of the warp of each block of 32 x 32, as in the kernel."""
    tile = draw_backward.constants(kernel.rung.source, d)
    made, sums, dq = np.zeros((4, 2), int), np.zeros((4, d // 32), int), np.zeros((2, d // 32), int)
    for warp in range(tile["warps"]):
        part, row = warp % tile["share"], warp // tile["share"]
        made[row, part :: tile["share"]] = sums[row, 2 * part : 2 * part + 2] = warp
        dq[warp % 2, warp // 2] = warp
    made_by = {("Sᵀ, dPᵀ", "keys", "queries of the step"): made}
    return made_by | {("dV, dK", "keys", "d"): sums, ("dQ", "queries", "d"): dq}


draw_backward.owners({f"d = {d}": who(d) for d in (64, 128)}, share={"d = 64": 1, "d = 128": 2})

# %% [markdown]
# **What to see.** Blocks of 32 × 32. At $d = 64$ a warp has a row of the first two pictures: what it makes it needs itself. At $d = 128$ two warps share a row (two shades of one colour). Warp 0 forms $S^\top$ and $dP^\top$ for the first 32 queries, and its columns of $dV$ and $dK$ sum over all 64: for the other 32 it needs what warp 1 has formed. So all of $P$ crosses, too: each warp reads its partner's half by plain `ldmatrix`. No barrier is added, since $dQ$ needs one anyway.


# %%
def budget(d, **given):
    """Registers per lane for the big arrays, and KB of shared memory, from the constants in the kernel's text."""
    tile = draw_backward.constants(kernel.rung.source, d, **given)
    keys, Br, Bc = tile["keys"], tile["Br"], tile["Bc"]
    registers = {"dK, dV": 2 * keys * tile["columns"] // 32, "S, dP": 2 * keys * tile["Bq"] // 32}
    smem = {"K, V": 2 * Bc * d * 2, "Q, dO": tile["stages"] * 2 * Br * d * 2}
    smem |= {"dS, P": tile["share"] * Bc * tile["ld"] * 2, "LSE, delta": tile["stages"] * 2 * Br * 4}
    assert sum(smem.values()) == tile["smem_bytes"]
    kb = {name: size / 1024 for name, size in smem.items()}
    return registers | {"registers": sum(registers.values())} | kb | {"KB in all": sum(kb.values())}


pd.DataFrame([budget(64), budget(128)], index=["d = 64", "d = 128"])

# %% [markdown]
# 192 of at most 255 registers are taken in both cases. The rest has to do for fragments and addresses; the 32 accumulators of $dQ$ take the place of $S$ and $dP$. By shared memory, two CTAs fit on an SM of 228 KB at $d = 64$ and one at $d = 128$; by registers, too: $2 \cdot 128$ or $1 \cdot 256$ threads of 255 registers are all that 65536 give. Did the compiler manage without [spilling](glossary.md#spill)?

# %% tags=["raises-exception"]
table = sass.table("23_backward_mma").set_index("kernel")
table[table.index.str.startswith("backward")].drop(columns="rung")

# %% [markdown]
# ### Sixteen keys alone, or thirty-two for two?
#
# Why share at all? With 16 keys for each warp nothing but $dS$ would cross, and it takes as many registers. Count the `ldmatrix` of one warp in one step of 64 queries at $d = 128$. Each fragment $B$ that is read serves the 16-row fragments $A$ of the warp's keys, one of them or two. Which of the five products gains from two, and does the exchange cost more than that?

# %%
fewer = ...  # your prediction: a warp that shares 32 keys needs how many ldmatrix, as a share of one with 16 alone?


# %% tags=["reveal"]
def loads(keys, columns, queries, d=128, Br=64):
    """ldmatrix.x4 of one warp in one step: it forms S and dP for `queries` of Br, the others' come from its partner."""
    product = d // 16 * (keys // 16 + queries // 16)  # fragments A of its keys, and B
    own = queries // 16 * (columns // 16)  # P or dS are in registers
    partner = (Br - queries) // 16 * (keys // 16 + columns // 16)  # they are not
    return {"S": product, "dP": product, "dV": own + partner, "dK": own + partner, "dQ": 128 // 16 * (2 + 2)}


ways_out = {"16 keys, 128 columns": loads(16, 128, 64), "32 keys for two": loads(32, 64, 32)}
counts = pd.DataFrame(ways_out).T.assign(all=lambda t: t.sum(axis=1))
predict(fewer, counts["all"].iloc[1] / counts["all"].iloc[0], "of the ldmatrix")
counts

# %% [markdown]
# Nearly a quarter less. With copies, the stores of $dS$ and $P$, and the additions to $dQ$, which take the same path out of the SM, a step takes 5120 clocks of shared memory instead of 6272, at 128 bytes per clock. Were shared memory all that a step waits for, the kernel would be 22 % faster; what was measured is [below](#What-made-it-fast). Is the formula right?

# %%
torch.manual_seed(0)
x = [torch.randn(1, 1, n, 128).half() for n in (64, 128, 128, 64)]
ray = xray("23_backward_mma", *Case("one step", *x[:3], do=x[3]).inputs)
print(f"one step at d = 128: predicted {8 * counts['all'].iloc[1]}, counted {ray.trace.instructions['ldmatrix']}")
frame = ray.to_frame().query("space == 'shared'")
print(f"bank conflicts: {frame.excess.sum():.0f} wavefronts too many, of {len(frame)} accesses")

# %% [markdown]
# ## 4 · Sixteen bits, and how small a gradient can be
#
# Operands have 16 bits, all sums are fp32. Rounded are $P$ and $dS$, as operands, and the results at the end. $dQ$ is added up across CTAs in an fp32 tensor of its own and rounded when it is complete. delta comes from the 16-bit $O$ and $dO$, in fp32. The error rule's yardstick, plain PyTorch at the same precision, rounds at the same places. One exception: where query heads share $K$ and $V$ (section 6), each head's $dK$ and $dV$ are rounded before they are added up, as in FlashAttention-2; the yardstick adds in fp32.
#
# fp16's smallest normal number is $6 \cdot 10^{-5} = 2^{-14}$. In the forward pass, rows of $P$ could be scaled to a largest element of 1. Here $P$ is normalized: an element is about $1/N$: $2^{-14}$ at $N = 16384$. And $dS = P \circ (dP - \mathrm{delta})$ has the size of $dO$ *times* that of $P$. The $dO$ of a loss that is a *mean* over 16384 tokens brings another $1/16384$. So multiply $dO$ by a power of two, everything else as before:

# %%
growth = ...  # your prediction: with dO multiplied by 2^-18, how many times as large is dQ's relative error in fp16?


# %% tags=["reveal"]
def errors(N, dtype, power, run=kernel):
    """Largest error of dQ, dK, dV beside the largest gradient; run: a kernel, or None for plain PyTorch at that precision."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 1, N, 64, generator=generator).to(device, dtype) for _ in range(4))
    case = Case("", q, k, v, do=(do.double() * 2.0**power).to(dtype))
    got = run(*case.inputs) if run else case.baseline()
    return [((g - e).abs().max() / e.abs().max()).item() for g, e in zip(got, case.exact())]


kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
rows = {(name, f"2^{p}"): errors(128, dtype, p) for name, dtype in kinds.items() for p in (0, -6, -12, -18, -24)}
predict(growth, rows["fp16", "2^-18"][0] / rows["fp16", "2^0"][0], "times the error of dQ", within=0.5)
pd.DataFrame(rows, ["dQ", "dK", "dV"]).T.rename_axis(["dtype", "dO times"]).map("{:.1e}".format)

# %% [markdown]
# **What to see.** bf16 has the exponents of fp32: its errors do not move. In fp16 they grow from $2^{-12}$ on. ($dO$'s own rounding does not count: errors are held against the gradients of the $dO$ that was handed over.) At $2^{-18}$ $dQ$ and $dK$, made of $dS$, are several times as far off as $dV$. And with $N$, for plain PyTorch at fp16, at $dO$ as it is and times $2^{-12}$:

# %%
rows = {N: [errors(N, torch.float16, power, run=None)[0] for power in (0, -12)] for N in (128, 512, 1024)}
pd.DataFrame(rows, ["error of dQ", "with dO times 2^-12"]).T.rename_axis("N").map("{:.1e}".format)

# %% [markdown]
# The longer the sequence, the smaller $P$ and with it $dS$. This is why training in fp16 multiplies the loss by a large number before the backward pass and divides the gradients by it afterwards (*loss scaling*, [Micikevicius et al., 2018](https://arxiv.org/abs/1710.03740)), and why training in bf16 can do without.
#
# ## 5 · Added up in any order
#
# Notebook 22 let CTAs add to $dQ$ in turn. Here they use [atomic additions](glossary.md#atomic), and nobody waits. The emulator's CTAs always run in the same order, but the kernel lets us choose another one: deal out the tiles of keys the other way round. For a GPU, which promises no order, the two are the same program.

# %%
different = ...  # your prediction: which share of dQ's elements (fp16) comes out different?

# %% tags=["reveal"]
source = for_d64("23_backward_mma")
as_it_is = load(source=source.source, device=device, quiet=True)
text = source.replace("j0 = in_set / of * Bc", "j0 = (key_tiles - 1 - in_set / of) * Bc")
backwards = load(source=text, device=device, quiet=True)
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, 1, 512, 64, device=device).half() for _ in range(4))
case = Case("N = 512", q, k, v, do=do)
one, other = as_it_is.tensors(*case.inputs), backwards.tensors(*case.inputs)
rows = {name: (one[name] != other[name]).double().mean().item() for name in ("dQ_sum", "dQ", "dK", "dV")}
predict(different, rows["dQ"], "of dQ's elements", within=0.5)
used = [check(run, [case]).frame.set_index("output").used["dq"] for run in (as_it_is, backwards)]
print(f"of dQ's error budget, one order uses {used[0]:.1%}, the other {used[1]:.1%}")
pd.DataFrame({"share of elements that differ": rows}).map("{:.2%}".format)

# %% [markdown]
# **What to see.** $dK$ and $dV$, which no two CTAs share, are the same bit by bit. Of the fp32 sums of $dQ$ many differ, in their last bits. Rounding to fp16 hides nearly all of it: an element differs only where its sum lies next to the border between two fp16 numbers, and then by a whole step.
#
# But a long training run amplifies any difference. If that matters to you, set `torch.use_deterministic_algorithms`: the operators then take a backward kernel that gives the same bits every time, or say that there is none.
#
# ### Additions to neighbours
#
# An atomic addition of a warp goes to 32 addresses, and the L2 serves [sectors](glossary.md#sector) of 32 bytes. Were $dQ$'s sum laid out as $dQ$ is, row by row, where would the accumulators of one register lie? (Lane $l$ has row $l / 4$ and columns $2\,(l \bmod 4)$ and the next.) But nobody reads the sum before it is complete. So it may lie in the order of the fragments instead: element $e$ of all threads side by side.

# %%
sectors = ...  # your prediction: how many sectors does one addition touch, row by row? (64 numbers of 4 bytes in a row)

# %% tags=["reveal"]
places = [fragments.c_fragment(lane, 0) for lane in range(32)]  # (row, column) of each lane's element 0
layouts = {"row by row": [64 * row + column for row, column in places], "by fragments": list(range(32))}
predict(sectors, len({place // 8 for place in layouts["row by row"]}), "sectors row by row")
draw_backward.additions(layouts, "One addition of a warp to dQ's sum")

# %% [markdown]
# **What to see.** Half the sectors, each used whole. The CUDA kernel `prepare` ran before; a third, `finish`, sorts the sum, multiplies by the scale and rounds:

# %%
show.region("23_backward_mma", "finish")

# %% [markdown]
# ## 6 · Masks and groups
#
# **Causal.** Query $i$ sees keys up to $i + N_k - N_q$. Seen from a tile of keys: the tiles of queries from the diagonal to the end. So the *first* keys have most work (in the forward pass the last queries had).

# %%
show.region("23_backward_mma", "steps")

# %% [markdown]
# ### Who starts when
#
# CTAs start roughly in the order of `blockIdx`, the next one where one has ended. As in notebook 20, the large ones should come first: the first tiles of all heads, then all second ones. But the CTAs of one head read the same $Q$ and $dO$, which the L2 answers only if they run at the same time. So the kernel takes 16 heads at a time.
#
# **Groups.** With [grouped heads](glossary.md#grouped-heads), $H / H_{kv}$ query heads share a $K$ and a $V$, and $dK$, $dV$ are sums over all of them. A CTA could walk its tiles of queries for one query head of the group after the other: the sums would stay in registers and nothing would be added up across CTAs. Notebook 22's kernel does so. What can be wrong with that? A few lines simulate both, on 132 SMs with one or two places for CTAs each:


# %%
def occupied(tiles, heads, at_a_time, places, work=1):
    """The share of the places' time that CTAs take under a causal mask, tile 0 being `tiles` times as long as the last."""
    ends = [0] * places
    for first in range(0, heads, at_a_time):
        of = min(at_a_time, heads - first)
        for tile in range(tiles):
            for _ in range(of):  # the next CTA begins wherever one ends first
                heapq.heapreplace(ends, ends[0] + (tiles - tile) * work)
    return heads * work * tiles * (tiles + 1) / 2 / (places * max(ends))


# %%
busy = ...  # your prediction: the share of the places' time in use at N = 1024 if the heads come one after the other

# %% tags=["reveal"]
rows = {}
for N in (1024, 4096, 16384):
    heads = 16384 // N * 2048 // 64
    rows[f"N = {N}, {heads} heads"] = [occupied(N // 128, heads, n, 264) for n in (1, 16, heads)]
predict(busy, [*rows.values()][0][0], "of the places' time, head by head")
pd.DataFrame(rows, index=["head by head", "16 at a time", "all"]).T.map("{:.0%}".format)

# %%
rows = {}
for B, H, Hkv, N, places in ((4, 8, 2, 4096, 264), (2, 16, 2, 2048, 264), (2, 64, 8, 2048, 132)):
    for heads, work in ((B * Hkv, H // Hkv), (B * H, 1)):
        shape = f"{B} sequences, {H} heads on {Hkv}, N = {N}, d = {64 if places == 264 else 128}"
        share = occupied(N // 128, heads, min(16, heads), places, work)
        rows[shape, "for a group" if work > 1 else "for a query head"] = (heads * N // 128, places, f"{share:.0%}")
pd.DataFrame(rows, index=["CTAs", "places", "occupied"]).T.rename_axis(["", "a CTA"])

# %% [markdown]
# **What to see.** Head by head, the last heads' longest tiles begin late, and leave places empty at the end; 16 heads at a time lose next to nothing but where sequences are short. And groups make CTAs fewer and each of them longer. In the first shape, that of notebook 24's model, all 256 have a place, the first tile takes twice the average, and half of the places' time is empty. In the second there aren't enough CTAs to begin with.
#
# So every query head has CTAs of its own here, as in FlashAttention-2. Each writes its $dK$ and $dV$, rounded to 16 bits, into a workspace, and a last CUDA kernel, `add_heads`, adds them up in the order of the heads. Measured beside SDPA FLASH (H200, bf16; draft 16 in [29 · Log](29_log.ipynb)), the first shape went from 0.93 to 1.32 of its speed, the second from 0.37 to 1.47, and the third from 1.18 to 1.11: where there were enough CTAs, the addition costs time and gains nothing.
#
# ## The kernel

# %%
show.region("23_backward_mma", "tile")

# %%
show.region("23_backward_mma", "products")

# %% [markdown]
# `product` makes $S^\top$ and $dP^\top$: plain `ldmatrix` for both operands. An `mma` adds to what is there, so the sums needn't begin with 0: those of $S$ begin with $-\mathrm{LSE} / \text{scale}$, those of $dP$ with $-\mathrm{delta}$, and nothing is left to subtract. `accumulate` adds to $dV$ and $dK$: operand $A$ comes from registers, $B$ with `.trans`. The softmax:

# %%
show.region("23_backward_mma", "scores")

# %% [markdown]
# In notebook 10 a lane had two rows. Here a *column* is a query: a lane has two columns of each fragment, so `product` reads from shared memory, for each eight queries, the two numbers from `prepare` that their sums begin with. `unseen(a)` is the score whose $P$ is 0: $-\infty$, or $\infty$ where the scale is negative.

# %%
display(show.region("23_backward_mma", "dV"), show.region("23_backward_mma", "dK"))

# %% [markdown]
# Packing $dS^\top$ once serves twice: as a fragment $A$ of $dK$, and as a word of shared memory. After the barrier, where two warps share their keys, comes the partner's half; then the fifth product:

# %%
display(show.region("23_backward_mma", "share"), show.region("23_backward_mma", "dQ"))

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# At 16 bits the yardstick's rounding is what counts: our largest error and plain PyTorch's nearly coincide ([29 · Log](29_log.ipynb) has the figure).
#
# ### Where it is wrong
#
# When a gradient is wrong, the *place* says a lot. Three bugs; causal, 192 queries and 256 keys. Before you look: which gradients break, and where, if
#
# 1. every query sees one key of the future;
# 2. the 8 × 8 matrices of $dS^\top$ are read from shared memory in the order that would suit $dS$;
# 3. LSE and delta are taken by the rows of a fragment, not by its columns?

# %%
bugs = {
    "one key of the future": ("(a.causal && key - query > ahead)", "(a.causal && key - query > ahead + 1)"),
    "dSᵀ read as if it were dS": ("16 * k + row_B, (row_q + 16 * m) / 8 + chunk_B", "16 * k + row_A, (row_q + 16 * m) / 8 + chunk_A"),
    "LSE and delta by rows": ("[2] = x.x, acc[m][n][1] = acc", "[1] = x.x, acc[m][n][2] = acc"),
}  # fmt: skip
torch.manual_seed(0)
q, do = (torch.randn(1, 1, 192, 64, device=device).half() for _ in range(2))
k, v = (torch.randn(1, 1, 256, 64, device=device).half() for _ in range(2))
case = Case("causal", q, k, v, do=do, causal=True)
maps = {}
for bug, (old, new) in bugs.items():
    report = check(load(source=source.replace(old, new), device=device, quiet=True), [case])
    maps |= {f"{bug}: d{c.output[1].upper()}": c for c in report.comparisons}

# %% tags=["reveal"]
draw_proof.gallery(maps, columns=3, ticks=True)

# %% [markdown]
# **What to see.** Rows of $dQ$ are queries, rows of $dK$ and $dV$ are keys; colours are errors in units of what is allowed.
#
# 1. The first 65 keys are seen by every query anyway, and their $dK$ and $dV$ are right; from then on each key but 128 has one query too many. (Key 128's would be query 63, in a tile that the loop skips.) Every row of $dQ$ but 63 and the last gets a share too much. Pale is where that share is small beside the budget.
# 2. Only $dQ$: $dK$ had $dS$ from registers, and $dV$ needs none.
# 3. $P$ itself is wrong, so all three break. Pale are rows of $dQ$ whose neighbour has nearly the same LSE and delta, and the last keys, which few queries see.
#
# ## Predict, then measure
#
# ### Products and loads
#
# One head, $N = 256$, $d = 64$: two tiles of keys, four of queries, eight steps. Per step there are five products of $64 \times 128 \times 64$ multiply-adds, and an `mma` does $16 \cdot 8 \cdot 16 = 2048$. The `ldmatrix` follow from section 3's formula, with 32 keys, 64 columns and 32 queries at a time twice.

# %%
mmas = ...  # your prediction: how many mma.sync in all?

# %% tags=["reveal"]
torch.manual_seed(0)
small = Case("small", *(torch.randn(1, 1, 256, 64).half() for _ in range(3)), do=torch.randn(1, 1, 256, 64).half())
rays = xray(source, *small.inputs)
done = rays.trace.instructions
predict(mmas, int(done["mma.sync"]), "mma.sync")
warp = 2 * 2 * (64 // 16) * (2 + 2) + 2 * 2 * (64 // 16) * (32 // 16) + (128 // 16) * (2 + 2)  # S, dP; dV, dK; dQ
rows = {"mma.sync": 8 * 5 * 64 * 128 * 64 // 2048, "ldmatrix": 8 * 4 * warp}
pd.DataFrame({"by formula": rows, "counted": {name: done[name] for name in rows}})

# %% [markdown]
# 0.4 `ldmatrix` per `mma`; notebook 13 at $d = 64$ has 0.25. There a warp keeps its rows of $Q$ in registers for the whole loop. Here $K$ and $V$ are operands $A$ of the warp's own rows, too, but there are no registers to keep them in; and for $dQ$ both operands are loaded.
#
# ### Bank conflicts
#
# All tiles are [swizzled](glossary.md#swizzle) as in notebook 11, $dS$ too. Eight kinds of loads, four of them transposed, and a store in pieces of 4 bytes: does one XOR serve them all? And what would it cost without?

# %%
text = source.replace("(chunk ^ row % 8) * 8", "chunk * 8")
place = "(row * ld + g * 8 + 2 * t) ^ (q0 + 8 * n)"  # the same XOR, as the writer of dS has it
assert place in text
plain = load(source=text.replace(place, "at<ld>(row, q0 / 8 + n) + 2 * t"), device="cpu", quiet=True)
both = {"swizzled": rays, "not swizzled": xray(plain, *small.inputs)}
frames = []
for name, ray in both.items():
    frame = ray.to_frame().query("space == 'shared'")
    frames.append(frame.groupby(["op", "target"])[["excess"]].sum().rename(columns={"excess": name}))
pd.concat(frames, axis=1).query("`not swizzled` > 0")

# %% [markdown]
# **What to see.** The columns count wavefronts beyond the least possible: bank conflicts. With the swizzle there is none.
#
# ### Groups, counted
#
# How do the bytes that CTAs read of $Q$ and $K$ change with a causal mask, and with four query heads on one head of $K$ and $V$? How many bytes of $dK$ and $dV$ go through the workspace?

# %%
N, rows = 256, {}
for causal in (False, True):
    for H, Hkv in ((4, 4), (4, 1)):
        q, do = (torch.randn(1, H, N, 64).half() for _ in range(2))
        k, v = (torch.randn(1, Hkv, N, 64).half() for _ in range(2))
        case = Case("", q, k, v, do=do, causal=causal)
        ray = xray(source, *case.inputs, **case.options)
        read = ray.tensors.bytes_read[["Q", "K", "dK_dV"]].astype(int).add_suffix(", read")
        rows[causal, H, Hkv] = {"K's size": Hkv * N * 64 * 2} | read.to_dict()
pd.DataFrame(rows).T.rename_axis(["causal", "H", "Hkv"])

# %% [markdown]
# **What to see.** The mask skips two steps of eight here; the longer the sequence, the nearer to half. What CTAs read depends on the query heads and the mask alone. Grouping makes the tensors $K$, $V$, $dK$ and $dV$ four times smaller, and costs a way through the workspace and back.
#
# ## Beside its peers
#
# FLOPs are counted as $10 B H N^2 d$. MATH and EFFICIENT ran up to $N = 2048$.

# %%
plot.recorded("23_backward_mma", "backward", lambda x: plot.throughput(x[x.causal == 0]))


# %%
def beside(causal):
    def draw(samples):
        peers = ["SDPA FLASH", "SDPA CUDNN"]
        return plot.ratio(samples[samples.causal == causal], "23_backward_mma", peers)

    return plot.recorded("23_backward_mma", "backward", draw)


beside(causal=1)

# %% [markdown]
# **How to read it.** A mark is the median over the rounds, its whiskers the lowest and highest round: a long one upwards is a round in which the peer was slow, downwards one in which our kernel was. SDPA FLASH is FlashAttention-2, written for the same instructions as this kernel. The kernel is 1.20<!--= ratio("23", "FLASH", 64):.2f --> times as fast at $d = 64$ and 1.06<!--= ratio("23", "FLASH", 128):.2f --> times at $d = 128$ (causal: 1.27<!--= ratio("23", "FLASH", 64, causal=1):.2f --> and 1.10<!--= ratio("23", "FLASH", 128, causal=1):.2f -->; geometric means for $N \ge 1024$, fp16). Beside cuDNN it reaches 0.70<!--= ratio("23", "CUDNN", 64):.2f --> and 0.55<!--= ratio("23", "CUDNN", 128):.2f --> of the speed. cuDNN, FlashAttention-3 and -4 (FA3, FA4) use Hopper's `wgmma`, which reads shared memory by itself, without `ldmatrix`.
#
# ## What made it fast
#
# Six of the drafts, timed side by side in bf16; [29 · Log](29_log.ipynb) has the others, what was expected of each, and by how much the ratio of the same algorithm differs from run to run: 5 %.


# %%
def drafts(steps):
    names = {1: "d = 128: 16 keys per warp; d = 64: 32", 2: "like 1, d = 128: two warps share 32 keys"}
    names |= {3: "like 2, preparation by 16 bytes per lane", 7: "like 3, masked 32 × 32 blocks left out"}
    names |= {11: "like 3, d = 128: 64 keys per CTA, two CTAs per SM", 14: "like 3, nothing added to dQ (wrong)"}
    return draw_backward.steps_taken(steps, "Drafts of 23_backward_mma", "SDPA FLASH", names)


plot.recorded("23_backward_mma", "steps", drafts)

# %% [markdown]
# **What to see.** *Sharing keys* (2) gained 5<!--= 100 * (step("23", 2, 128) / step("23", 1, 128) - 1):.0f --> % at $d = 128$ (and 3<!--= 100 * (step("23", 2, 64) / step("23", 1, 64) - 1):.0f --> % at $d = 64$, where nothing is shared: the loop was written anew). Section 3 promised up to 22: a step waits for more than shared memory. *Two smaller CTAs per SM* (11) hide each other's waits and pay with twice the additions. *Leaving out masked blocks* (7) saves products on the diagonal and costs branches and registers everywhere else. *No additions* (14) is no kernel; it says how much is left there at the most, 13<!--= 100 * (step("23", 14, 128) / step("23", 3, 128) - 1):.0f --> % at $d = 128$, more than from anything else. *Sums that begin with $-\mathrm{LSE} / \text{scale}$ and $-\mathrm{delta}$* (18, timed beside 17 in another run) gained 5<!--= 100 * (step("23", 18, 64) / step("23", 17, 64) - 1):.0f --> % at $d = 64$ and 3<!--= 100 * (step("23", 18, 128) / step("23", 17, 128) - 1):.0f --> % at $d = 128$.
#
# ## What still hurts
#
# 1. **$dQ$ goes to HBM once per tile of keys**, in fp32, by way of single words. Hopper's copy engine adds whole tiles: notebook 33.
# 2. **Operands through registers.** Eight of ten come by `ldmatrix`, and $K$ and $V$ again in every step. `wgmma` takes both operands from shared memory, transposed if need be.
# 3. **255 registers.** Nothing more fits into a lane: most drafts that do something in advance spill.
# 4. **Results leave in pieces of 4 bytes**: the stores of $dK$, $dV$, $dQ$ touch twice the sectors that they fill, once per CTA.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a region of the rung. `blank` shows what is given and what has to hold; your cell is compiled, checked in all cases of `check`, and X-rayed beside the rung's own. Task 23.9 is the whole rung: `python -m helpers exercise new 23 kernel`.

# %%
from helpers import blank, hint, progress

# %load_ext helpers

# %% [markdown]
# ### Task 23.1 · Back to rows
#
# $dQ$'s sum lies in the order of the fragments. Sort it, scale it, round it. It teaches how to go from an element's number to its row and column.

# %%
blank("23", "finish")

# %%
# %%region 23 finish -> my_finish
# // your code

# %%
hint("23.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `finish` of [23_backward_mma.cu](../kernels/23_backward_mma.cu), shown in [section 5](#Additions-to-neighbours).
#
# </details>

# %% [markdown]
# ### Task 23.2 · What comes first
#
# Write what the sums begin with, $-\mathrm{LSE} / \text{scale}$ and $-\mathrm{delta}$, and zeros for $dQ$'s sum, for whole tiles: rows past the end must be harmless unread. Read 16 bytes per lane.

# %%
blank("23", "delta")

# %%
# %%region 23 delta -> my_delta
# // your code

# %%
hint("23.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `delta` of [23_backward_mma.cu](../kernels/23_backward_mma.cu): `show.region("23_backward_mma", "delta")`.
#
# </details>

# %% [markdown]
# ### Exercise 23.3 · The other way round
#
# Suppose the kernel formed $S = Q K^\top$ and $dP = dO\, V^\top$, a row per query, as notebook 10 does. A warp that needs $P$ or $dS$ arranged otherwise than in its registers reads it from shared memory, with a row per query. For the ten operands: `"plain"`, `"trans"`, or `"registers"`?

# %%
# Exercise 23.3
comes = {
    "S = Q K^T": ("plain", "plain"),
    "dP = dO V^T": ("plain", "plain"),
    "dV = P^T dO": ("registers", "trans"),
    "dK = dS^T Q": ("registers", "trans"),
    "dQ = dS K": ("trans", "trans"),
}


# %%
def other_way():
    rows = dict.fromkeys(("Q", "dO", "P", "dS"), "query") | {"K": "key", "V": "key"}  # a row of each tile
    sums = {"S = Q K^T": "d", "dP = dO V^T": "d", "dV = P^T dO": "query", "dK = dS^T Q": "query", "dQ = dS K": "key"}
    for product, k in sums.items():
        names, said = [x.removesuffix("^T") for x in product.split(" = ")[1].split()], comes[product]
        assert isinstance(said, tuple | list) and len(said) == 2, f"{product}: two words, for A and for B"
        for which, name, word in zip("AB", names, said):
            fits = name in ("P", "dS") and k == "key" and which == "A"  # C's columns, the keys, in the place of k
            right = "registers" if fits else "trans" if rows[name] == k else "plain"
            assert word == right, f"{product}, operand {which} ({name}): {word} is wrong"
    return True


exercise.verify("23.3", other_way)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Does $k$ run along the rows of the tile in memory, or across them? $P$ with a row per query is the operand $A$ of a product that sums over keys. Which of the three is that? The others read it with queries as $k$, across its rows.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# comes = {
#     "S = Q K^T": ("plain", "plain"),
#     "dP = dO V^T": ("plain", "plain"),
#     "dV = P^T dO": ("trans", "trans"),
#     "dK = dS^T Q": ("trans", "trans"),
#     "dQ = dS K": ("registers", "trans"),
# }
# ```
#
# One operand from registers instead of two, and both $P$ and $dS$ cross shared memory.
#
# </details>

# %% [markdown]
# ### Exercise 23.4 · Smaller tiles
#
# At $d = 128$ one CTA of eight warps fills an SM. A colleague proposes tiles of 64 keys and four warps, 32 keys for each two as before. How many KB of shared memory does a CTA need, how many CTAs fit on an SM (228 KB, of which each CTA takes 1 KB on top), and by what factor do the additions to $dQ$ in HBM grow?

# %%
# Exercise 23.4
smem_kb, ctas, additions = 161, 1, 1


# %%
def smaller():
    kb = budget(128, Bc=64)["KB in all"]
    assert smem_kb == kb, f"{smem_kb!r} is wrong, in KB: which of the four parts depend on Bc?"
    assert ctas == 228 // (kb + 1), f"{ctas!r} CTAs is wrong: how many times do {kb} KB and 1 KB on top fit into 228?"
    assert additions == 128 / 64, f"{additions!r} times is wrong: how many tiles of keys add to a row of dQ?"
    return True


exercise.verify("23.4", smaller)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `budget(128, Bc=64)` does the sum. Each tile of keys adds once to every row of $dQ$ that sees it.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# smem_kb, ctas, additions = 113, 2, 2
# ```
#
# Two CTAs of four warps: as many warps as before, and while one CTA waits at a barrier the other can work. In exchange $Q$ and $dO$ are read twice as often and $dQ$ is added to twice as often. Which weighs more has to be measured, and was: draft 11 of the figure above.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. When does an operand need ldmatrix.trans?</summary>
#
# When k runs across the rows of its tile in shared memory. Whether it is operand A or B makes no difference.
#
# </details>
# <details><summary>2. Why is S formed transposed?</summary>
#
# Then Pᵀ and dSᵀ, a row per key, are fragments A of dV and dK, which sum over queries; and a warp that owns keys needs nothing of other warps for them.
#
# </details>
# <details><summary>3. Why does dS cross shared memory all the same?</summary>
#
# dQ sums over all keys, and the keys are spread over the warps. (At d = 128 P and dS also cross between the two warps that share their keys.)
#
# </details>
# <details><summary>4. Two runs differ in dQ and not in dK. What kind of kernel is that?</summary>
#
# One in which CTAs own keys and add their shares of dQ by atomics, in whatever order they come.
#
# </details>
# <details><summary>5. A model trains in bf16 and not in fp16. Which number would you look at first?</summary>
#
# The size of dS (or of dO): below about 6e-5 fp16 loses digits, and below 3e-8, half its smallest number, everything. Scale the loss.
#
# </details>
