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
# **After this notebook you can**
# - say for each of ten operands whether it comes by `ldmatrix`, by `ldmatrix.trans` or not at all, and why;
# - decide which way round to form a product by asking who needs its result next;
# - draw up the budget of registers and shared memory of a kernel before it is compiled, and let two warps share what one can't hold;
# - judge what atomics do to a result: what differs from run to run, by how much, and when that matters;
# - explain why training in fp16 scales its loss and training in bf16 does not.
#
# **Time** 75 minutes.
#
# **Needs** [22 · Backward: gradients without P](22_backward_fp32.ipynb) for the maths and [10 · Tensor cores](10_fa2_mma_fp16.ipynb) for fragments. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: form $S$ transposed, keys by queries; then a warp's results $P^\top$ and $dS^\top$ already *are* the operands of $dV$ and $dK$, and only $dS$ has to cross between all of them.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import heapq

import numpy as np
import pandas as pd
import torch

from helpers import Case, check, for_d64, load, xray
from helpers import banks, draw_backward, draw_proof, exercise, fragments, plot, record, sass, show

torch.manual_seed(0)
kernel = load("23_backward_mma")
device = kernel.device

# %% [markdown]
# ## The problem
#
# Notebook 22's kernel does five matrix products per tile on CUDA cores. What those units can do, beside the ones next to them, as measured on the recorded device:

# %%
top = record.load("device", "ceilings").groupby(["name", "unit"]).value.median().rename("measured").reset_index()
top[top.name.str.contains("matmul")].set_index("name").round(0)

# %% [markdown]
# Notebook 10 moved two products to tensor cores, and one fact made it work: the accumulators of $S$ have the layout of an operand $A$, so $P$ went from one product to the next without leaving the registers. Now there are five, and results of two of them ($P$ from $S$, $dS$ from $dP$) are operands of the other three. Each wants them its own way round. Who can be served from registers?

# %% [markdown]
# ## 1 · Ten operands
#
# In $C \mathrel{+}= A B$ an `mma` sums over $k$. A register holds a *pair* of 16-bit numbers that are neighbours along $k$, in $A$ as in $B$. `ldmatrix` makes pairs of what is neighbours *in memory*, that is, along the rows of a tile; `ldmatrix.trans` makes pairs of what stands one above the other. So there is one question to ask of an operand: **does $k$ run along the rows of its tile, or across them?** Try all four cases on one 8 × 8 matrix:


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
# Every tile lies as it came from HBM: $Q_i$, $dO_i$ with a row per query, $K_j$, $V_j$ with a row per key, and columns along $d$. The first two products sum over $d$: along the rows. The others sum over queries or keys: across them.
#
# And the two operands that are *results*, $P$ and $dS$? A result is in fragments $C$, and two fragments $C$ side by side are a fragment $A$ (notebook 10, section 4), with $C$'s columns in the place of $k$. Therefore:
#
# - $S = Q K^\top$, with a row per query and a column per key, is the operand $A$ of a product that sums over *keys*: $O = P V$ on the way there, $dQ = dS\, K$ on the way back.
# - $S^\top = K Q^\top$, with a row per key and a column per query, is the operand $A$ of a product that sums over *queries*: $dV = P^\top dO$ and $dK = dS^\top Q$.
#
# One of three, or two of three. This kernel forms $S^\top$ and $dP^\top$, and nothing about them is transposed later: they are computed the other way round to begin with, $A$ and $B$ having changed places.

# %%
along, across, born = True, False, None
products = {
    "1  Sᵀ = K Qᵀ": (("K", "keys", "d", along), ("Qᵀ", "queries", "d", along)),
    "2  dV += Pᵀ dO": (("Pᵀ", "keys", "queries", born), ("dO", "d", "queries", across)),
    "3  dPᵀ = V dOᵀ": (("V", "keys", "d", along), ("dOᵀ", "queries", "d", along)),
    "4  dK += dSᵀ Q": (("dSᵀ", "keys", "queries", born), ("Q", "d", "queries", across)),
    "5  dQ += dS K": (("dS", "queries", "keys", across), ("K", "d", "keys", across)),
}
draw_backward.operands(products)

# %% [markdown]
# **What to see.** The stripes are rows in memory. Blue: they run the way $k$ runs, plain `ldmatrix`. Orange: they run across, `.trans`. Pale: nothing to load. The one operand that is a result and still has to be loaded is $dS$ of the fifth product; it lies in shared memory as $dS^\top$, a row per key, so it comes back with `.trans`.
#
# ## 2 · Who crosses
#
# There is a second reason to have keys along the rows. The CTA owns a tile of 128 keys; take $d = 64$ first, where its four warps have 32 keys each. So a warp owns the rows of $dK$ and $dV$ that belong to its keys, and everything that they need, its own rows of $P^\top$ and $dS^\top$, it computes itself. Between warps nothing needs to pass for them.
#
# $dQ$ is different: it sums over *all* keys, those of other warps included. So all warps put their $dS^\top$ into shared memory, and after a barrier each computes a piece of $dQ_i$, 32 rows by 32 columns, over all 128 keys.

# %%
ways = dict.fromkeys(draw_backward.EDGES, "registers") | {("dS", "dQ"): "shared memory"}
ends = {"dV": "registers, to the end", "dK": "registers, to the end", "dQ": "HBM, by atomics"}
draw_backward.dataflow(ways, ends, "One step of 23_backward_mma at d = 64 (S, P, dP and dS transposed)")

# %% [markdown]
# **What to see.** Compare with the figure of notebook 22: four orange arrows have become one. What crosses per step is $B_r B_c$ numbers of 16 bits, written once. The other way round (queries along the rows) both $P$ and $dS$ would cross, for $dV$ and $dK$.

# %% [markdown]
# ## 3 · The budget
#
# What does a CTA need? In shared memory $K_j$ and $V_j$, which stay; two stages of $Q_i$ and $dO_i$ with LSE and delta of their rows; and $dS$. In registers, per lane: $dK$ and $dV$ of the warp's keys, which stay; $S$ and $dP$ for `Bq` queries at a time.
#
# At $d = 64$ a warp holds $dK$ and $dV$ of 32 keys in 128 registers per lane. At $d = 128$ that would be 256, which no lane has. Two ways out: 16 keys for each of eight warps; or 32 keys for each *two* warps, and of $dK$ and $dV$ 64 columns for either. The kernel takes the second. Why, the next section counts; here is who has what, from the constants of the kernel's text:


# %%
def who(d):
    """The number of the warp of each block of 32 x 32."""
    tile = draw_backward.constants(kernel.rung.source, d)
    made, sums, dq = np.zeros((4, 2), int), np.zeros((4, d // 32), int), np.zeros((2, d // 32), int)
    for warp in range(tile["warps"]):
        part, row = warp % tile["share"], warp // tile["share"]  # as in the kernel
        made[row, part :: tile["share"]] = sums[row, 2 * part : 2 * part + 2] = warp
        dq[warp % 2, warp // 2] = warp
    return {
        ("Sᵀ, dPᵀ", "keys", "queries of the step"): made,
        ("dV, dK", "keys", "d"): sums,
        ("dQ", "queries", "d"): dq,
    }


draw_backward.owners({f"d = {d}": who(d) for d in (64, 128)}, share={"d = 64": 1, "d = 128": 2})

# %% [markdown]
# **What to see.** Blocks of 32 × 32. Above, a warp has a row of the first two pictures, and what it makes it needs itself. Below, two warps share a row (two shades of one colour). Warp 0 forms $S^\top$ and $dP^\top$ for the first 32 queries, and its columns of $dV$ and $dK$ sum over all 64: for the other 32 it needs what warp 1 has formed. So half of $P$ crosses, too, and is read like any operand whose rows run along $k$: by plain `ldmatrix`. No barrier is added, for $dQ$ needs one anyway.


# %%
def budget(d, **given):
    """Registers per lane for the big arrays, and KB of shared memory, from the constants in the kernel's text."""
    tile = draw_backward.constants(kernel.rung.source, d, **given)
    keys, Br, Bc = tile["keys"], tile["Br"], tile["Bc"]
    registers = {"dK, dV": 2 * keys * tile["columns"] // 32, "S, dP": 2 * keys * tile["Bq"] // 32}
    smem = {
        "K, V": 2 * Bc * d * 2,
        "Q, dO": tile["stages"] * 2 * Br * d * 2,
        "dS, P": tile["share"] * Bc * tile["ld"] * 2,
    }
    smem |= {"LSE, delta": tile["stages"] * 2 * Br * 4}
    assert sum(smem.values()) == tile["smem_bytes"]
    kb = {name: size / 1024 for name, size in smem.items()}
    return registers | {"registers": sum(registers.values())} | kb | {"KB in all": sum(kb.values())}


pd.DataFrame([budget(64), budget(128)], index=["d = 64", "d = 128"])

# %% [markdown]
# 192 of at most 255 registers are spoken for in both cases. What is left has to do for fragments on their way, addresses and the 32 accumulators of $dQ$, which take the place of $S$ and $dP$ when those are done. So the shapes are no accident: 32 keys by 64 columns per warp, not more. `Bq`, 32 queries at a time, is set so that $S$ and $dP$ take 32 registers each.
#
# By shared memory, two CTAs fit on an SM of 228 KB at $d = 64$, and one at $d = 128$. By registers, too: $2 \cdot 128$ or $1 \cdot 256$ threads of 255 registers are all that 65536 give. (A block of a gaming card has 99 KB. There, at $d = 128$, the kernel is compiled with the last row of its table of tiles: half the keys, half the queries, half the warps.) Did the compiler manage without spilling?

# %%
table = sass.table("23_backward_mma").set_index("kernel")
table[table.index.str.startswith("backward")].drop(columns="rung")

# %% [markdown]
# ### Sixteen keys alone, or thirty-two for two?
#
# Why share at all? With 16 keys for each warp nothing but $dS$ would cross, and $P$ would need no shared memory. The registers are the same. Count what the tensor cores are fed with, the `ldmatrix` of one warp in one step of 64 queries at $d = 128$. Every operand $B$ (of $Q$, $dO$, and their transposes) that is read serves the 16-row fragments of the warp's keys: one or two of them. Predict which of the five products gains from two, and whether the exchange eats it up.


# %%
def loads(keys, columns, queries, d=128, Br=64):
    """ldmatrix.x4 of one warp in one step: it forms S and dP for `queries` of Br, the others' come from its partner."""
    product = d // 16 * (keys // 16 + queries // 16)  # fragments A of its keys, and B
    own = queries // 16 * (columns // 16)  # P or dS are in registers
    partner = (Br - queries) // 16 * (keys // 16 + columns // 16)  # they are not
    return {"S": product, "dP": product, "dV": own + partner, "dK": own + partner, "dQ": 128 // 16 * (2 + 2)}


ways_out = {"16 keys, 128 columns": loads(16, 128, 64), "32 keys for two": loads(32, 64, 32)}
counts = pd.DataFrame(ways_out).T.assign(all=lambda t: t.sum(axis=1))
counts

# %% [markdown]
# And in clocks of shared memory, which moves 128 bytes per clock? An `ldmatrix.x4` is 512 bytes. Besides, copies write $Q_i$ and $dO_i$, and warps write $dS$ (and $P$), and the 32 KB of additions to $dQ$ leave through the same unit:

# %%
clocks = pd.DataFrame({"ldmatrix": 8 * counts["all"] * 512, "copies": 2 * 64 * 128 * 2, "dS, P": [128 * 64 * 2, 2 * 128 * 64 * 2]})  # fmt: skip
clocks = (clocks.assign(dQ=64 * 128 * 4) // 128).assign(all=lambda t: t.sum(axis=1))
clocks.assign(share=lambda t: (t["all"] / t["all"].iloc[0]).map("{:.0%}".format))

# %% [markdown]
# A fifth less, where all products are the same. Were shared memory all that a step waits for, the kernel would be 22 % faster (6272 / 5120). [Below](#What-was-tried) stand what was expected of it, 15 %, and what was measured. First, does the kernel do what the formula says? The X-ray counts:

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
# As in notebook 10, operands have 16 bits and all sums are fp32. Rounded are $P$ and $dS$, as operands, and the three results at the very end. $dQ$ is added up across CTAs in an fp32 tensor of its own and rounded only when it is complete; to add shares of 16 bits would round once per tile of keys. delta comes from the 16-bit $O$ and $dO$, in fp32.
#
# The error rule allows for just that: the yardstick, plain PyTorch at the same precision, rounds at the same places.
#
# $P$ lies between 0 and 1, where fp16 is at home. $dS$ has no such range. It is as small as the gradient that comes in, and that of a loss which is a *mean* over 16384 tokens carries a factor of $1/16384 = 6 \cdot 10^{-5}$. This happens to be the smallest normal number of fp16. Predict: same inputs, but $dO$ multiplied by $2^{-6}$, $2^{-12}$, …: what becomes of the *relative* error of the gradients, in fp16 and in bf16?

# %%
torch.manual_seed(0)
x = [torch.randn(1, 1, 128, 64).to(device) for _ in range(4)]
rows = []
for dtype in (torch.float16, torch.bfloat16):
    q, k, v = (t.to(dtype) for t in x[:3])
    for power in (0, -6, -12, -18, -24):
        case = Case("", q, k, v, do=(x[3].to(dtype).double() * 2.0**power).to(dtype))
        exact = case.exact()
        errors = [((g - e).abs().max() / e.abs().max()).item() for g, e in zip(kernel(*case.inputs), exact)]
        rows.append((str(dtype)[6:], f"2^{power}", *errors))
table = pd.DataFrame(rows, columns=["dtype", "dO times", "dQ", "dK", "dV"]).set_index(["dtype", "dO times"])
table.map("{:.1e}".format)

# %% [markdown]
# **What to see.** bf16 has the exponents of fp32, and its columns do not move: everything is scaled by a power of two and nothing else. In fp16 the errors begin to grow at $2^{-12}$: $dS$ and the results reach the subnormal numbers of fp16. (It is not $dO$: errors are held against the gradients of the $dO$ that was handed over, so its own rounding does not count.) At $2^{-18}$ it shows which matters more: $dQ$ and $dK$, made of $dS$, are five times as far off as $dV$, which suffers from its own rounding alone. At $2^{-24}$ next to nothing is left. This is why training in fp16 multiplies the loss by a large number before going back and divides the gradients by it afterwards (*loss scaling*), and why training in bf16 can do without. It is no fault of the kernel: PyTorch's own has the same numbers to round.

# %% [markdown]
# ## 5 · Added up in any order
#
# Notebook 22 let CTAs add to $dQ$ in turn. Here they use atomic additions and nobody waits. What does that do to the result? On a GPU, run twice and look. The emulator's CTAs always run in the same order, but the kernel lets us choose another one: deal out the tiles of keys to the CTAs the other way round. For a GPU, which promises no order at all, the two are the same program. (`for_d64` gives the rung's text with $d = 64$ only, which builds faster.)

# %%
source = for_d64("23_backward_mma")
as_it_is = load(source=source.source, device=device, quiet=True)
text = source.replace("j0 = in_set / of * Bc", "j0 = (key_tiles - 1 - in_set / of) * Bc")
backwards = load(source=text, device=device, quiet=True)
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, 1, 512, 64, device=device).half() for _ in range(4))
case = Case("N = 512", q, k, v, do=do)
one, other = as_it_is.tensors(*case.inputs), backwards.tensors(*case.inputs)
rows = {name: (one[name] != other[name]).double().mean().item() for name in ("dQ_sum", "dQ", "dK", "dV")}
pd.DataFrame({"share of elements that differ": rows}).map("{:.2%}".format)

# %%
largest = (one["dQ_sum"] - other["dQ_sum"]).abs().max().item()
print(f"dQ_sum, fp32: differ by up to {largest:.1e}")
print(f"dQ, fp16:     differ by up to {(one['dQ'].float() - other['dQ'].float()).abs().max().item():.1e}")
for name, run in (("one order", as_it_is), ("the other", backwards)):
    frame = check(run, [case]).frame.set_index("output")
    print(f"{name}: {frame.used['dq']:.1%} of dQ's error budget")

# %% [markdown]
# **What to see.** $dK$ and $dV$, which no two CTAs share, are the same bit by bit. Of the fp32 sums of $dQ$ many differ, in their last bits. Rounding to fp16 hides nearly all of it: an element comes out different only where its sum lies next to the border between two fp16 numbers, and then it differs by a whole step of fp16. Against float64 one order is as good as the other.
#
# So neither result is better. But a long training run amplifies any difference, and two runs from the same seed drift apart. Whether that matters is for the user to say, and PyTorch has a switch for users to whom it does, `torch.use_deterministic_algorithms`. This rung says in its header block what it promises: `dK and dV are the same bit by bit every time, dQ is not`.
#
# ### Additions to neighbours
#
# An atomic addition of a warp goes to 32 addresses. Were $dQ$'s sum laid out as $dQ$ is, row by row, the accumulators of one register would lie in eight different rows. But nobody else needs to read the sum before it is complete! So it may lie in any order, and the kernel takes the order of the fragments: element $e$ of all 128 (256) threads side by side. A third CUDA kernel, `finish`, sorts it, multiplies by the scale and rounds.

# %%
show.region("23_backward_mma", "finish")

# %% [markdown]
# ## 6 · Masks and groups
#
# **Causal.** Query $i$ sees keys up to $i + N_k - N_q$. Seen from a tile of keys: the tiles of queries from the diagonal to the end. So the *first* keys have most work (on the way there it was the last queries). The kernel's lines, below, know a `window` as well: notebook 20.


# %%
def steps(tile, Nq, Nk, causal=False, Br=64, Bc=128):
    """The steps of the CTA of one tile of keys: tiles of queries, in order."""
    first = max(0, tile * Bc - (Nk - Nq)) // Br if causal else 0
    return range(first, -(-Nq // Br))


for causal in (False, True):
    print(f"causal={causal}:", [len(steps(tile, 1024, 1024, causal)) for tile in range(8)])

# %%
show.region("23_backward_mma", "steps")

# %% [markdown]
# ### Who starts when
#
# CTAs start roughly in the order of `blockIdx`, the next one where one has ended. In which order should they come? Who packs boxes puts the large things in first and fills the gaps with the small ones. So: the first tiles of all heads, then all second ones, and so on. But the CTAs of one head read the same $Q$ and $dO$, which one of them fetches from HBM and the others find in the L2, if they run at the same time. The kernel takes 16 heads at a time.
#
# **Predict**: of 128 heads with 4096 keys each (the workload of the measurements, $B N = 16384$ and $H d = 2048$, at $d = 64$), on 132 SMs with two places for CTAs each, what share of the time do CTAs take, if they come head by head, 16 heads at a time, or all at once? (Without a mask all tiles are equal, and the heads come one after the other.) A few lines simulate it:


# %%
def occupied(tiles, heads, at_a_time, places, work=1):
    """The share of the places' time that CTAs take under a causal mask; tile 0 takes `tiles` times `work`, the last one `work`."""
    sets = [min(at_a_time, heads - first) for first in range(0, heads, at_a_time)]
    ends = [0] * places
    for of in sets:
        for tile in range(tiles):
            for _ in range(of):  # the next CTA begins wherever one ends first
                heapq.heapreplace(ends, ends[0] + (tiles - tile) * work)
    return heads * work * tiles * (tiles + 1) / 2 / (places * max(ends))


rows = {}
for N in (1024, 4096, 16384):
    heads = 16384 // N * 2048 // 64
    rows[f"N = {N}, {heads} heads"] = [occupied(N // 128, heads, n, 264) for n in (1, 16, heads)]
pd.DataFrame(rows, index=["head by head", "16 at a time", "all"]).T.map("{:.0%}".format)

# %% [markdown]
# **What to see.** Head by head, every head ends with its shortest tiles, and the last heads leave places empty while others have a long tile to finish. With 16 heads at a time that costs next to nothing but where sequences are short. Measured: in two runs of one day (draft 15's `reason`, [below](#What-was-tried), has the ratios of the earlier one) the new order came out between 1 % behind and 3 % ahead at $N = 1024$, and 2 to 5 % ahead at 4096 and 16384. No more than that lies between two runs. Interleaved with the old order in one run, with as many heads at a time as have $Q$ and $dO$ in 32 MB, it was 0 to 5 % ahead; with about 8 heads at a time it gained a little less (both noted, not recorded). That agrees with the simulation and doesn't prove it.
#
# ### Groups
#
# With grouped heads, $H / H_{kv}$ query heads share a $K$ and a $V$, and $dK$, $dV$ are sums over all of them. A CTA could walk its tiles of queries for one query head of the group after the other: the sums would stay where they are, in registers, $K_j$ and $V_j$ would be loaded once for the whole group, and nothing would have to be added up across CTAs. Notebook 22's kernel does so, and this one did. What can be wrong with that?
#
# **Predict** with the same simulation. Three shapes, causal; the first is that of the model of notebook 24.

# %%
rows = {}
for B, H, Hkv, N, places in ((4, 8, 2, 4096, 264), (2, 16, 2, 2048, 264), (2, 64, 8, 2048, 132)):
    for heads, work in ((B * Hkv, H // Hkv), (B * H, 1)):
        shape = f"{B} sequences, {H} heads on {Hkv}, N = {N}, d = {64 if places == 264 else 128}"
        share = occupied(N // 128, heads, min(16, heads), places, work)
        rows[shape, "for a group" if work > 1 else "for a query head"] = (heads * N // 128, places, f"{share:.0%}")
pd.DataFrame(rows, index=["CTAs", "places", "occupied"]).T.rename_axis(["", "a CTA"])

# %% [markdown]
# **What to see.** Groups make CTAs fewer and each of them longer. In the first shape all 256 have a place, and nothing is left to come after: the first tile takes twice the average, and half of the places' time is empty. In the second there aren't CTAs enough to begin with. Only the third is large enough.
#
# So every query head has CTAs of its own here, as in FlashAttention-2. Each writes its $dK$ and $dV$, rounded to 16 bits, into a workspace, and a last CUDA kernel adds them up, in the order of the heads, so that the result is the same bit by bit every time. With as many heads of $K$ and $V$ as of $Q$ there is no such workspace and no such kernel.

# %%
show.region("23_backward_mma", "add_heads")

# %% [markdown]
# Measured beside SDPA FLASH (H200, bf16; noted in the `reason` of draft 16 [below](#What-was-tried)), the first shape went from 0.93 to 1.32 of its speed, the second from 0.37 to 1.47, and the third from 1.18 to 1.11: where CTAs were enough, what has to be added up costs its time. The simulation promises more than that, a factor of 2 and of 7.5. In it a CTA that shares its SM is as fast as one that has it alone, and the additions cost nothing.

# %% [markdown]
# ## The kernel

# %%
show.region("23_backward_mma", "tile")

# %%
show.region("23_backward_mma", "products")

# %% [markdown]
# `product` makes $S^\top$ and $dP^\top$: plain `ldmatrix` for both operands. `accumulate` adds to $dV$ and $dK$: operand $A$ comes from registers, $B$ with `.trans`. Then the softmax, which is but one exponential:

# %%
show.region("23_backward_mma", "scores")

# %% [markdown]
# In notebook 10 a lane had two rows, so two values of $m$. Here a *column* is a query: a lane has two columns of each fragment, and LSE comes in pairs, from shared memory, for each eight queries.

# %%
show.region("23_backward_mma", "dV")

# %%
show.region("23_backward_mma", "dK")

# %% [markdown]
# Packing $dS^\top$ once serves twice: as a fragment $A$ of $dK$, and as the 32-bit word that goes to shared memory. Behind the barrier, and only where two warps share their keys, comes the partner's half:

# %%
show.region("23_backward_mma", "share")

# %% [markdown]
# The fifth product:

# %%
show.region("23_backward_mma", "dQ")

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %%
plot.recorded("23_backward_mma", "error", plot.error)

# %% [markdown]
# **What to see.** Our largest error and plain PyTorch's coincide here, at every $N$ and in all three gradients.
#
# ### Where it is wrong
#
# When a gradient is wrong, the *place* says a lot. Three bugs, and for each the error of the three gradients in units of what is allowed; causal, 192 queries and 256 keys. Before you look: which gradients break, and where, if
#
# 1. every query sees one key of the future;
# 2. the 8 × 8 matrices of $dS^\top$ are read from shared memory in the order that would suit $dS$;
# 3. LSE is taken by the rows of a fragment, not by its columns?

# %%
bugs = {
    "one key of the future": ("(a.causal && key - query > ahead)", "(a.causal && key - query > ahead + 1)"),
    "dSᵀ read as if it were dS": ("16 * k + row_B, (row_q + 16 * m) / 8 + chunk_B", "16 * k + row_A, (row_q + 16 * m) / 8 + chunk_A"),
    "LSE by rows": ("(e % 2 ? LSE.y : LSE.x)", "(e / 2 ? LSE.y : LSE.x)"),
}  # fmt: skip
torch.manual_seed(0)
q, do = (torch.randn(1, 1, 192, 64, device=device).half() for _ in range(2))
k, v = (torch.randn(1, 1, 256, 64, device=device).half() for _ in range(2))
case = Case("causal", q, k, v, do=do, causal=True)
maps = {}
for bug, (old, new) in bugs.items():
    report = check(load(source=source.replace(old, new), device=device, quiet=True), [case])
    maps |= {f"{bug}: d{c.output[1].upper()}": c for c in report.comparisons}
draw_proof.gallery(maps, columns=3)

# %% [markdown]
# **What to see.** Rows of $dQ$ are queries, rows of $dK$ and $dV$ are keys.
#
# 1. The maps of $dQ$ and $dK$ are mostly pale, also where the gradients are wrong. Query $i$ may see the keys up to $i + 64$. The first 65 keys are seen by every query anyway, and their $dK$ and $dV$ are right; from then on each key has one query too many. Every row of $dQ$ but the last, which has no future, gets a share too much. Pale is where that share is small beside the budget: more than two thirds of $dQ$, and of $dK$ from there on.
# 2. Only $dQ$: the other two had $dS$ from registers.
# 3. $P$ itself is wrong: half of its elements are formed with the LSE of the query next door. All three gradients are made of $P$, and all three break. Pale are rows of $dQ$ whose neighbour has nearly the same LSE, and at the end of $dK$ and $dV$ the keys that few queries see.

# %% [markdown]
# ## Predict, then measure
#
# ### Products and loads
#
# One head, $N = 256$, $d = 64$: two tiles of keys, four of queries, eight steps. Per step there are five products of $64 \times 128 \times 64$ multiply-adds, and an `mma` does $16 \cdot 8 \cdot 16 = 2048$. And the `ldmatrix`? Per warp and step, with 32 keys and 32 queries at a time: a product needs 2 for $A$ and 2 for $B$ for each 16 of $d$; an accumulation needs one for each 16 columns of $d$ and 16 queries; $dQ$ needs 2 and 2 for each 16 keys.

# %%
products = 5 * 64 * 128 * 64 // 2048
loads = 4 * (2 * 2 * (64 // 16) * (2 + 2) + 2 * 2 * (64 // 16) * (32 // 16) + (128 // 16) * (2 + 2))  # warps; halves
torch.manual_seed(0)
small = Case("small", *(torch.randn(1, 1, 256, 64).half() for _ in range(3)), do=torch.randn(1, 1, 256, 64).half())
rays = xray(source, *small.inputs)
counted = pd.Series(rays.trace.instructions)[["mma.sync", "ldmatrix"]]
pd.DataFrame({"predicted": [8 * products, 8 * loads], "counted": counted})

# %% [markdown]
# 0.4 `ldmatrix` per `mma`, and at $d = 128$, by the table of section 3, hardly more. Notebook 13 at $d = 64$ has 0.25: there a warp keeps its rows of $Q$ in registers for the whole loop, and only operands $B$ are loaded. Here $K$ and $V$ are operands $A$ of the warp's own rows, too, but there are no registers to keep them in, so they are read again in every step; and for $dQ$ nobody has anything, both operands are loaded.
#
# ### Bank conflicts
#
# All tiles are swizzled as in notebook 11, $dS$ too. Eight kinds of loads, four of them transposed, and a store in pieces of 4 bytes: does one XOR serve them all? And what would it cost without?

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
# **What to see.** The columns count wavefronts beyond the least possible: bank conflicts. Left, there is none.
#
# ### The additions
#
# And the atomics: 32 lanes, 128 bytes, four sectors.

# %%
rays.address_map("atomicAdd(dQ_sum")

# %% [markdown]
# ### Masks and groups, counted
#
# Predict with `steps`: how do the bytes that CTAs read of $Q$ and $K$ change with a causal mask, and with four query heads on one head of $K$ and $V$? How many bytes of $dK$ and $dV$ go through the workspace?

# %%
N, size = 256, 256 * 64 * 2  # bytes of one head of Q
rows = {}
for causal in (False, True):
    for H, Hkv in ((4, 4), (4, 1)):
        q, do = (torch.randn(1, H, N, 64).half() for _ in range(2))
        k, v = (torch.randn(1, Hkv, N, 64).half() for _ in range(2))
        case = Case("", q, k, v, do=do, causal=causal)
        ray = xray(source, *case.inputs, **case.options)
        taken = H * sum(len(steps(tile, N, N, causal)) for tile in range(N // 128))
        predicted = {"steps": taken, "Q, predicted": taken * 64 * 64 * 2, "K's size": Hkv * size}
        read = ray.tensors.bytes_read[["Q", "K", "dK_dV"]].astype(int).add_suffix(", read")
        rows[causal, H, Hkv] = predicted | read.to_dict()
pd.DataFrame(rows).T.rename_axis(["causal", "H", "Hkv"])

# %% [markdown]
# **What to see.** Steps, and with them all work and all additions to $dQ$, depend on the query heads and the mask alone. So does what CTAs read of $K$ and $V$, since each query head's read them; but a group's read the same, and for those that run at the same time the L2 has it. What grouping saves is the tensors themselves: $K$, $V$, $dK$ and $dV$ are a quarter of what they were. What it costs is a way through the workspace and back, for $dK$ and $dV$ of every query head. At $N = 256$ the mask skips two steps of eight; the longer the sequence, the nearer to half.

# %% [markdown]
# ## Beside its peers
#
# FLOPs are counted as $10 B H N^2 d$, half of it under a causal mask.

# %%
plot.recorded("23_backward_mma", "backward", lambda x: plot.throughput(x[x.causal == 0]))


# %%
def beside(causal):
    def draw(samples):
        peers = ["SDPA FLASH", "SDPA CUDNN"]
        return plot.ratio(samples[samples.causal == causal], "23_backward_mma", peers)

    return plot.recorded("23_backward_mma", "backward", draw)


beside(causal=0)

# %%
beside(causal=1)


# %%
def beside_both(samples):
    """How many times as long as ours each peer takes: the mean for N >= 1024, and the least and the most of all shapes."""
    found = {}
    for peer in ("SDPA FLASH", "SDPA CUDNN"):
        by_shape = record.ratio(samples, "23_backward_mma", peer).groupby(["dtype", "causal", "D"])["ratio"]
        mean = record.summary(samples, "23_backward_mma", peer).set_index(["dtype", "causal", "D"])["mean"]
        found[peer] = pd.DataFrame({"mean": mean, "least": by_shape.min(), "most": by_shape.max()})
    return pd.concat(found, axis=1).round(2)


plot.recorded("23_backward_mma", "backward", beside_both)

# %% [markdown]
# The table has bf16 as well: how many times as long as ours a peer takes, as the geometric mean over the lengths from 1024 on, and the least and the most of all lengths.
#
# What public kernels reach on an H200, from the project's earlier study of them (`data/README.md`, `h200_peers.csv`), TFLOP/s of the way back in fp16 at 16384 tokens and a width of 2048:

# %%
study = pd.concat([record.public_kernels("bwd", causal).assign(causal=causal) for causal in (False, True)])
study = study[(study.dtype == "fp16") & study.tflops.notna()]
study.pivot_table(index=["causal", "D", "name"], columns="Nk", values="tflops").round(0)

# %% [markdown]
# **How to read it.** SDPA FLASH is FlashAttention-2, written for the same instructions as this kernel, `mma.sync` and `ldmatrix`. At $d = 64$ the kernel is ahead of it at every length, by 11 % at the least. At $d = 128$ it is ahead by a few percent on average, from 1 % behind at one length to 11 % ahead at another; under a mask least at the longest sequences. cuDNN takes half to four fifths of the time of ours. FlashAttention-3 is written for Hopper's `wgmma`, which reads operands from shared memory by itself: for it the 0.4 `ldmatrix` per product do not exist.

# %% [markdown]
# ## What was tried
#
# Each row is a draft of this kernel, with what was expected of it before it ran, and what it reached as a ratio to SDPA FLASH in bf16 (`ratio`; `ratio_causal` under a causal mask). `spill_bytes` is what a thread has in memory because registers ran out. Cover the columns of numbers and guess.
#
# Compare those of one run only: 1 to 14 ran together, 15 and 16 in another run on another machine. Draft 16 is the rung, as 4 was before it. Without a mask 4, 15 and 16 do the same; and the backward record (its bf16 rows, and the same three lengths) is of a third occasion. All four:

# %%
steps_taken = record.load("23_backward_mma", "steps", device="nvidia-h200")
steps_taken = steps_taken.pivot(index="step", columns="D", values="ratio")
same = {"draft 4": steps_taken.loc[4]} | {f"draft {n}, the other run": steps_taken.loc[n] for n in (15, 16)}
found = record.load("23_backward_mma", "backward", device="nvidia-h200")
found = record.headline(record.ratio(found, "23_backward_mma", "SDPA FLASH"))
found = found.query("dtype == 'bf16' and not causal and Nk in (1024, 4096, 16384)")
same["the rung, as recorded"] = np.exp(np.log(found["ratio"]).groupby(found["D"]).mean())
same = pd.DataFrame(same).T
more = {
    "the highest over the lowest": same.max() / same.min(),
    "draft 4 over draft 1": steps_taken.loc[4] / steps_taken.loc[1],
}
pd.concat([same.round(2), (pd.DataFrame(more).T - 1).map("{:+.1%}".format)]).rename(columns="d = {}".format)

# %% [markdown]
# **What to see.** Two occasions lie nearly as far apart as all the steps from 1 to 4 have gained. Those gains hold because the drafts ran side by side; a comparison across runs would prove none of them. The record of drafts has ratios only, so it can't say which of the two kernels ran faster or slower in it. But FLASH by itself can differ that much: one and the same code, in ms, in the records of two rungs:


# %%
def flash_beside(stem):
    found = record.load(stem, "backward", device="nvidia-h200")
    found = found.query("name == 'SDPA FLASH' and dtype == 'bf16' and not causal and Nk in (1024, 4096, 16384)")
    return found.groupby(["D", "Nk"]).ms.median()


alone = pd.DataFrame({f"beside {stem[:2]}": flash_beside(stem) for stem in ("23_backward_mma", "33_backward_wgmma")})
alone.assign(difference=(alone.iloc[:, 1] / alone.iloc[:, 0] - 1).map("{:+.1%}".format)).round(2)


# %%
from helpers import draw_pingpong


def drafts(steps):
    display(record.step_table(steps, "spill_bytes").style.format(precision=2, na_rep=""))
    return draw_pingpong.steps(steps, "Each draft of the kernel", "SDPA FLASH")


plot.recorded("23_backward_mma", "steps", drafts)

# %%
changes = {"sharing 32 keys (1 → 2)": (1, 2), "16 bytes per lane (2 → 3)": (2, 3), "all of these (1 → 4)": (1, 4)}
changes |= {"other order of the code alone (3 → 4)": (3, 4), "no additions to dQ (3 → 14)": (3, 14)}
gains = {name: steps_taken.loc[b] / steps_taken.loc[a] - 1 for name, (a, b) in changes.items()}
pd.DataFrame(gains).T.map("{:+.1%}".format).rename(columns="d = {}".format)

# %% [markdown]
# **What to see.**
#
# - *Sharing keys* (2) paid at $d = 128$, but far less than the count of section 3 promised. So shared memory was one thing that a step waits for, and not the only one. At $d = 64$, where nobody shares and products and loads are the same as before, nothing was expected, and yet there is a gain: the loop was written anew, and comes out of the compiler in another order. We know no better reason.
# - Drafts 3 and 4 are the same algorithm; one has switches, the other is written out. What lies between them at $d = 128$ is what the order of the code is worth, and differences below that, 2 %, prove nothing in this list. Draft 5 lies that far above 3, and next to 4.
# - *Half as many barriers* (9) were expected to help and did not: barriers are not what a step waits for, at least not at the price of registers that spill. *Two smaller CTAs per SM* (11) hide each other's waits and pay with twice the additions: slower without a mask, level with one.
# - *Leaving out masked blocks* (7) saves products on the diagonal and costs branches and registers everywhere else: at $d = 64$ more than it saves, even under a mask.
# - *The longest tiles first* (15) and *CTAs for each query head* (16) have no row beside them that is the same without. What they gained is said with them, from runs of one day; section 6 says why they should. In this table's shapes, without groups, 16 differs from 15 by no more than noise.
# - *No additions* (14) is no kernel, since $dQ$ is missing. It says how much is left to gain there at the most, and that is more than from anything else in this list.

# %% [markdown]
# ## What still hurts
#
# 1. **$dQ$ goes to HBM once per tile of keys**, in fp32, by way of single words: what draft 14 leaves out. Hopper's copy engine can add a whole tile: notebook 33.
# 2. **Operands through registers.** Eight of ten come by `ldmatrix` (at $d = 128$ half of the other two, as well), and $K$ and $V$ again in every step. `wgmma` takes both operands from shared memory, transposed if need be.
# 3. **255 registers.** Nothing more fits into a lane, and at $d = 128$ one CTA per SM: most drafts that do something in advance spill.
# 4. **Results leave in pieces of 4 bytes** (the stores of $dK$, $dV$, $dQ$ touch twice the sectors that they fill). Once per CTA, so it should weigh most in short sequences, and the two small kernels before and after likewise; neither has been timed by itself.

# %% [markdown]
# ## Exercises
#
# ### Exercise 23.1 · The other way round
#
# Suppose the kernel formed $S = Q K^\top$ and $dP = dO\, V^\top$, queries along the rows, as notebook 10 does. A warp that needs $P$ or $dS$ in another way than it has it finds it in shared memory, with a row per query. For the ten operands: `"plain"`, `"trans"`, or `"registers"`?

# %%
# Exercise 23.1
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
        names = [x.removesuffix("^T") for x in product.split(" = ")[1].split()]
        for which, name, said in zip("AB", names, comes[product]):
            fits = name in ("P", "dS") and k == "key" and which == "A"  # C's columns, the keys, in the place of k
            right = "registers" if fits else "trans" if rows[name] == k else "plain"
            assert said == right, f"{product}, operand {which} ({name}): not {said}"
    return True


exercise.verify("23.1", other_way, hint="does k run along the rows of the tile in memory, or across them?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# $P$ with a row per query is the operand $A$ of a product that sums over keys. Which of the three is that? The others read it with queries as $k$, across its rows.
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
# ### Exercise 23.2 · Smaller tiles
#
# At $d = 128$ one CTA of eight warps fills an SM. A colleague proposes tiles of 64 keys and four warps, 32 keys for each two as before. How many KB of shared memory does a CTA need, how many CTAs fit on an SM (228 KB, of which each CTA takes 1 KB on top), and by what factor do the additions to $dQ$ in HBM grow?

# %%
# Exercise 23.2
smem_kb, ctas, additions = 161, 1, 1


# %%
def smaller():
    kb = budget(128, Bc=64)["KB in all"]
    assert smem_kb == kb, f"not {smem_kb} KB: which of the four parts depend on Bc?"
    assert ctas == 228 // (kb + 1), f"not {ctas} CTAs"
    return additions == 128 / 64


exercise.verify(
    "23.2", smaller, hint="K, V, dS and P halve, Q and dO do not; every tile of keys adds to every row of dQ"
)

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
# Two CTAs of four warps: as many warps as before, and while one CTA waits at a barrier the other can work. In exchange $Q$ and $dO$ are read twice as often and $dQ$ is added to twice as often. Which weighs more has to be measured, and was: draft 11 of the list above.
#
# </details>

# %% [markdown]
# ### Exercise 23.3 · Atomics in rows
#
# If $dQ$'s sum were laid out as $dQ$ is, row by row, $d = 64$ fp32 numbers each: how many 32-byte sectors would a warp's addition touch? (It adds element 0 of a fragment $C$, for all 32 lanes.)

# %%
# Exercise 23.3
sectors = 4


# %%
def in_rows():
    places = [fragments.c_fragment(lane, 0) for lane in range(32)]  # (row, column)
    touched = banks.sectors([4 * (64 * row + column) for row, column in places], 4)
    return sectors == len(touched)


exercise.verify("23.3", in_rows, hint="in how many rows do the 32 elements lie, and how far apart within a row?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Lane $l$ has row $l / 4$ and column $2\,(l \bmod 4)$ of the fragment.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# sectors = 8
# ```
#
# Eight rows, and in each four numbers, every other one of a sector of eight. Twice as many sectors, each half used; and element 1 would come back to the same eight.
#
# </details>

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
# Then P and dS, keys along the rows, are fragments A of dV and dK, which sum over queries; and a warp that owns keys needs nothing of other warps for them.
#
# </details>
# <details><summary>3. Why does dS cross shared memory all the same?</summary>
#
# dQ sums over all keys, and the keys are spread over the warps. (At d = 128 half of dS and of P also crosses between the two warps that share their keys.)
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
