# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 33 · Backward on Hopper: five products, in turns
#
# [← 32 · Ping-pong](32_ping_pong.ipynb) | [33_backward_wgmma.cu](../kernels/33_backward_wgmma.cu) | [glossary](glossary.md) | [40 · One algorithm, every language →](40_every_language.ipynb)
#
# **After this notebook you can**
# - say of each of ten operands whether `wgmma` finds it in registers or through a descriptor, K-major or MN-major;
# - hand a tile from ordinary stores to `wgmma` and to the copy engine: what has to be fenced, by whom, before which barrier;
# - follow a gradient that is added up in the L2, a tile at a time;
# - read what runs under what off the loop of a kernel and off the clocks of its warpgroups;
# - tell from a report or from a map of errors what is wrong in an asynchronous kernel.
#
# **Time** 60 minutes, without the tasks.
#
# **Needs** [23 · Backward on tensor cores](23_backward_mma.ipynb) for the five products, [30 · TMA and wgmma](30_tma_wgmma.ipynb) for descriptors and mbarriers, and [31 · Warp-specialised](31_warp_specialized.ipynb) for roles. No GPU: without one the kernel runs on the emulator, and the timings shown are recorded ones.
#
# **The idea in one line**: two warpgroups own 64 keys each and keep $P^\top$ and $dS^\top$ in registers as operands; whatever else the five products need, `wgmma` reads from shared memory; and the two take turns at starting products.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import re

import numpy as np
import pandas as pd
import torch

from helpers import Case, blank, check, compile_ahead, hint, load, progress, single, xray
from helpers import budget, draw_backward, draw_hopper, exercise, fragments, plot, predict
from helpers import record, sass, show, wgmma_units

# %load_ext helpers
torch.set_num_threads(1)  # matrices this small are multiplied before a second thread has woken up
compile_ahead(["23_backward_mma", "33_backward_wgmma"], "sass")  # in the background, for later
kernel = load("33_backward_wgmma")
device = kernel.device

# %% [markdown]
# ## The problem
#
# In the backward pass, at $d = 128$ and $N = 4096$ without a mask, FlashAttention-2 reaches 276<!--= tflops("33", 128, of="FLASH"):.0f --> TFLOP/s on an H200 and cuDNN 551<!--= tflops("33", 128, of="CUDNN"):.0f --> (fp16). The first is written for `mma.sync`, as notebook 23's kernel is, the second for Hopper. Products of `mma.sync` have to load their operands. In notebook 23's loop, at $d = 128$:

# %% tags=["raises-exception"]
mma = sass.opcodes("23_backward_mma", D=128, loop=True, kernel="backward_mma")
mma[mma > 0].sort_values(ascending=False).head(8).to_frame("instructions").T

# %% [markdown]
# `HMMA` are the products, `LDSM` (`ldmatrix`) fetches their operands. `wgmma` fetches by itself. Again: *for each of ten operands, where does it lie, and which way round?*

# %% [markdown]
# ## 1 · Ten operands, again
#
# A step, with queries as columns throughout ($B_r$ queries, $B_c = 128$ keys; $\circ$ is the product element by element, $c = \text{scale} \cdot \log_2 e$):
#
# $$ S^\top = K_j Q_i^\top, \quad P^\top = 2^{\,c\,(S^\top - \mathrm{LSE} / \text{scale})}, \quad dP^\top = V_j\, dO_i^\top, \quad dS^\top = P^\top \circ (dP^\top - \mathrm{delta}), $$
#
# $$ dV_j \mathrel{+}= P^\top dO_i, \qquad dK_j \mathrel{+}= dS^\top Q_i, \qquad dQ_i^\top \mathrel{+}= K_j^\top dS^\top . $$
#
# As in rung 23, the sums of $S$ begin with $-\mathrm{LSE} / \text{scale}$, and those of $dP$ with $-\mathrm{delta}$ ([delta](glossary.md#delta)).
#
# A warpgroup multiplies $A$ (64 × 16) by $B$ (16 × $N$) and adds to $C$ (64 × $N$). The rules (PTX ISA):
#
# - $B$ comes from shared memory, always. $A$ comes from shared memory or from registers, where it lies as the operand of an `mma` does.
# - An operand in shared memory is found through a [descriptor](glossary.md#descriptor). In 16 bits it may be **K-major**, $k$ running along the rows of the tile, or **MN-major**, $k$ running across them.
# - $M$ is 64. $N$ is any multiple of 8 up to 256.
#
# Here is a tile as TMA leaves it in shared memory, 64 rows of 64 numbers, swizzled. Read it through a descriptor, either way:

# %%
tile = np.arange(64 * 64).reshape(64, 64)
memory = np.empty(64 * 64, int)
for row, column in np.ndindex(64, 64):
    memory[fragments.swizzled(128 * row + 2 * column, 128) // 2] = tile[row, column]

bits = fragments.Descriptor(start=0, leading=16, stride=1024, swizzle=128)
wanted = {"along": tile[:, :16], "across": tile[:16].T}  # (mn, k): 64 rows or columns, their first 16 k
for name, operand in wanted.items():
    for way, mn_major in (("K-major", False), ("MN-major", True)):
        read = [[memory[bits.address(mn_major, mn, k) // 2] for k in range(16)] for mn in range(64)]
        print(f"k {name} the rows, read {way}:", "right" if (read == operand).all() else "wrong")

# %% [markdown]
# **What to see.** The same tile, *the same 64 bits* of descriptor. Which way it is read is a bit of the instruction, the last template arguments of `wgmma_mma_async` (1: MN-major). What differs is how one gets from 16 $k$ to the next, 32 bytes further along the rows, or 16 rows of 128 bytes down; and if the operand is wider than 64 columns, the *leading offset* says where the next panel begins.
#
# ### Which way round to form them
#
# $S$ and $dP$ are formed transposed, for notebook 23's reason: $C$'s columns take the place of $k$, so $P^\top$ and $dS^\top$, a row per key and a column per query, are operands $A$ of the two products that sum over queries. Here it weighs more: the other way round they would go through shared memory, with a store, a fence and a barrier each. In registers the layouts agree, element by element:

# %%
N = 128  # columns of an accumulator; step k of the next product takes columns 16 k to 16 k + 15
for thread in range(128):
    for k in range(N // 16):
        held = [fragments.wgmma_d(thread, 8 * k + i) for i in range(8)]
        wanted = [fragments.wgmma_a(thread, i) for i in range(8)]
        assert held == [(row, column + 16 * k) for row, column in wanted]
print("of every thread, 8 accumulators in a row are an operand A, in order")

# %% [markdown]
# That leaves $dQ = dS\, K$, which sums over keys. $dS^\top$ in registers is of no use for it, so $dS$ goes through shared memory, as in notebook 23. And it is formed transposed, too, $dQ^\top = K^\top dS^\top$: $M$ is 64, so what stands in the rows of $C$ has to come in sixty-fours. In $S^\top$, $dP^\top$, $dV$ and $dK$ these are keys; in $dQ$ it would be queries, and in $dQ^\top$ it is $d$. So the number of queries in a step is free (a multiple of 16), and can be set by what fits.

# %%
along, across, born = True, False, None
products = {
    "Sᵀ = K Qᵀ": (("K", "keys", "d", along), ("Qᵀ", "queries", "d", along)),
    "dPᵀ = V dOᵀ": (("V", "keys", "d", along), ("dOᵀ", "queries", "d", along)),
    "dV += Pᵀ dO": (("Pᵀ", "keys", "queries", born), ("dO", "d", "queries", across)),
    "dK += dSᵀ Q": (("dSᵀ", "keys", "queries", born), ("Q", "d", "queries", across)),
    "dQᵀ = Kᵀ dSᵀ": (("Kᵀ", "d", "keys", across), ("dSᵀ", "queries", "keys", along)),
}
draw_backward.operands(products, draw_backward.WGMMA)

# %% [markdown]
# **What to see.** Each of $K$, $Q$ and $dO$ is read both ways, from one copy in shared memory. $dS$ is the only one that threads write, so they may choose how: with a row per query, $k$ (keys) along the rows.
#
# The machine code says the same. `HGMMA` is the instruction; an operand $A$ is a register or a descriptor (`gdesc`), `.tnspA` and `.tnspB` mark what is read transposed, MN-major:

# %% tags=["raises-exception"]
loops = {d: draw_backward.main_loop("33_backward_wgmma", d) for d in (64, 128)}
found = {}
for d, lines in loops.items():  # the products of the loop, in the order of the file
    found[d] = draw_backward.products(lines, draw_backward.accumulators(kernel.rung.source, d))
facts = {"shape": "first", "instructions": "sum", "A": "first", "B": "first"}  # dV may come in pieces (section 4)
pd.concat({f"d = {d}": f.groupby("name", sort=False).agg(facts) for d, f in found.items()}, axis=1)

# %% [markdown]
# ## 2 · What dS still needs
#
# $P^\top$ and $dS^\top$ stay in registers, and so do the sums of $dV$ and $dK$, to the end. $dQ$ sums over the keys of both warpgroups. So each writes its $dS^\top$, 64 keys, into a panel of its own, with [`stmatrix`](glossary.md#stmatrix)`.trans`, which stores fragments the other way round: a row per query. Then each computes half of $dQ^\top$, over all 128 keys.
#
# Threads write, `wgmma` reads: notebook 30's third order. A barrier orders threads, but not the generic and the async proxy. For that there is [`fence.proxy.async`](glossary.md#proxy-fence):
#
# | who | does what |
# |---|---|
# | every thread | writes its part of $dS$ |
# | every thread | `fence.proxy.async`: what I wrote is visible to the async proxy |
# | every thread | `bar.arrive` at the other warpgroup's barrier: my half is written; it doesn't wait |
# | each warpgroup | `bar.sync` at its own barrier, then `wgmma`, which reads both halves |

# %%
show.region("33_backward_wgmma", "dS")

# %%
show.region("33_backward_wgmma", "dQ")

# %% [markdown]
# $dQ$ in each step and $dK$, $dV$ at the end leave shared memory in the same way: write, fence, barrier, and then one thread starts the copy. At $d = 128$ a later place for $dQ$'s fence cost 1 to 4 % ([log](39_log.ipynb)).
#
# The emulator keeps account of both proxies. Suppose the fence is left out, and nothing else changed. Is the result `"right"` or `"wrong"`?

# %%
without_fence = ...  # your prediction: "right" or "wrong"

# %% tags=["reveal"]
source = single("33_backward_wgmma", 64)  # for fp16 alone, which takes a quarter of the time to compile
first_fence = r"(stmatrix_x4_trans\(dS_row.*?)fa::fence_proxy_async\(\);"  # behind the stores of dS
no_fence, times = re.subn(first_fence, r"\1", source.source, count=1, flags=re.DOTALL)
assert times == 1
torch.manual_seed(0)
q, do = (torch.randn(1, 1, 192, 64).half() for _ in range(2))
k, v = (torch.randn(1, 1, 256, 64).half() for _ in range(2))
case = Case("192 x 256", q, k, v, do=do)
unfenced = load(source=no_fence, device="cpu", quiet=True)
print(report := check(unfenced, [case]), "\n")
predict(without_fence, "right" if report.ok else "wrong", "without the fence")
for finding in (ray := xray(unfenced, *case.inputs)).findings:
    print(ray.report(finding))

# %% [markdown]
# **What to see.** The numbers are right, and may be on a GPU, too; the report names both lines. A test of results can't be trusted to find this.

# %% [markdown]
# ## 3 · dQ, a tile at once
#
# In notebook 23 each warp added to $dQ$ with [atomic](glossary.md#atomic) additions, 32 numbers at a time. Here a warpgroup writes its half of the tile of $dQ^\top$ to shared memory, and *one thread*, of a warp of its own, asks the copy engine to add it to HBM: `cp.reduce.async.bulk`, a copy that adds. It adds to `dQ_sum`, in fp32, which nobody sets to 0: the first CTA at a tile stores its share (an `atomicCAS` says who), the others wait until it is there. Before the buffer is written again, the thread that asked has to know that it has been *read* (`cp.async.bulk.wait_group.read`), and tells the warpgroup so.

# %%
show.region("33_backward_wgmma", "send_dQ")

# %% [markdown]
# One head, $N = 256$, $d = 64$: 23's main kernel sends `dQ_sum` 1,024 requests. How many does 33's?

# %%
bulk_requests = ...  # your prediction

# %% tags=["reveal"]
torch.manual_seed(0)
one_head = Case("", *(torch.randn(1, 1, 256, 64).half() for _ in range(3)), do=torch.randn(1, 1, 256, 64).half())
rays = {stem: xray(single(stem, 64), *one_head.inputs) for stem in ("23_backward_mma", "33_backward_wgmma")}
frames = {stem: ray.to_frame() for stem, ray in rays.items()}
adds = {s: f[(f.target == "dQ_sum") & f.kernel.str.startswith("backward")] for s, f in frames.items()}
table = pd.concat(adds)[["op", "requests", "bytes", "cost", "ideal"]].rename(
    columns={"cost": "sectors", "ideal": "least"}
)
predict(bulk_requests, int(table.loc["33_backward_wgmma", "requests"].sum()), "requests of 33")
table

# %% [markdown]
# **What to see.** Far fewer requests, but not fewer bytes: each tile of keys sends every row of $dQ$ once, in fp32. A third kernel sorts it, multiplies by the scale and rounds (region `finish`).
#
# ### Different from run to run
#
# Who adds first is not decided. On the emulator CTAs always come in the same order; to see another one, deal out the keys in tiles from the last to the first, with their values. $dQ$ is then the same sum of the same shares. The share of elements that differ:

# %%
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, 1, 768, 64, device=device).half() for _ in range(4))
_, _, _, o, lse, _ = Case("", q, k, v, do=do).inputs


def other_way(x):
    return x.unflatten(2, (-1, 128)).flip(2).flatten(2, 3)  # tiles of 128 keys, the last one first


# %%
one, again = (kernel.tensors(q, k, v, o, lse, do) for _ in range(2))
other = kernel.tensors(q, other_way(k), other_way(v), o, lse, do)
rows = {}
for name in ("dQ_sum", "dQ", "dK", "dV"):
    turned = other_way(other[name]) if name in ("dK", "dV") else other[name]
    rows[name] = [(one[name] != x).double().mean().item() for x in (again[name], turned)]
pd.DataFrame(rows, index=["run again", "keys from the last tile on"]).T.map("{:.2%}".format)

# %% [markdown]
# **What to see.** On a GPU `dQ_sum` differs in its last bits from run to run as it does here from order to order. $dK$ and $dV$ are the same bit by bit in every run: one CTA sums up those of 128 keys, alone and in a fixed order. (A few differ on the right: a CTA's first queries depend on where its keys are.)
#
# `deterministic=True` gives $dQ$ one order, notebook 22's reversed: a CTA adds its share when all with later keys have done so. Under a mask, where sequences are long, fewer heads are then under way: as many as the L2 holds. What it costs (time with one order over time without):

# %%
asked = [kernel(q, k, v, o, lse, do, deterministic=True)[0] for _ in range(2)]
assert torch.equal(*asked)


def price(samples):
    ratios = record.price_of_order(samples).rename(columns={"Nq": "N", "name": "time with one order / without"})
    return ratios.pivot_table(
        index=["D", "causal", "N"], columns="time with one order / without", values="ratio"
    ).round(2)


plot.recorded("33_backward_wgmma", "deterministic", price)

# %% [markdown]
# **What to see.** Up to a third more time, on average about as in FlashAttention-3: the L2 has to have added a share before the next CTA may add its own.
#
# ## 4 · Roles, and what they cost
#
# One warp of a warpgroup of its own, the **producer**, asks TMA for tiles, and two more warps of it send $dQ$; two warpgroups, the **consumers**, compute. As in rung 31 the producer gives registers back ([`setmaxnreg`](glossary.md#setmaxnreg)) so that the consumers may have more. Registers per lane, for the arrays that are alive together when $dS$ is begun, which then takes $dP$'s place:

# %% tags=["raises-exception"]
per_lane = pd.DataFrame(index=["dK, dV", "dP", "P in fp32", "P, rounded for dV"])
for d in (64, 128):
    Br = draw_backward.constants(kernel.rung.source, d)["Br"]  # queries per step
    fragments = found[d].query("name == 'dV'")["instructions"].iloc[0]  # of P, that dV takes together with dP
    elements = [2 * 64 * d, 64 * Br, 64 * Br]  # of a warpgroup
    per_lane[f"d = {d}, {Br} queries"] = [*(n // 128 for n in elements), 4 * fragments]
per_lane.loc["all"] = per_lane.sum()
given, taken = (int(re.search(rf"setmaxnreg_{way}<(\d+)>", source.source)[1]) for way in ("dec", "inc"))
print(
    f"producer {given}, consumers {taken} each: {128 * (given + 2 * taken):,} of an SM's {draw_hopper.REGISTER_FILE:,}"
)
per_lane

# %% [markdown]
# $dK$ and $dV$ grow with $d$, so a step has fewer queries at $d = 128$. $dS$ is formed from $P$ in fp32, as in FlashAttention-2; from the rounded $P$, the errors of $dQ$ and $dK$ would be a fifth larger.
#
# At $d = 64$ that takes two things. Scale and exponential are one `asm` statement that changes a register in place, so that ptxas keeps $P$ where $S$ was. And the last three of $P$'s eight fragments are rounded when $dS$ has been formed, *their part of $dV$ started with $dK$*.
#
# The launch gives each of 384 threads 168 registers, and with 24 and 240 nothing of $384 \cdot 168 = 64\,512$ is left over. 1024 registers of the SM belong to nobody: just enough, it seems, to leave each of the producer's threads 8 more. What does the kernel do with 32 in place of 24: is it `"right"`, `"wrong"`, or does it `"hang"`?

# %%
with_32 = ...  # your prediction: "right", "wrong" or "hang"

# %% tags=["reveal"]
generous = source.replace("setmaxnreg_dec<24>", "setmaxnreg_dec<32>")
try:
    load(source=generous, device="cpu", quiet=True)(*one_head.inputs)
    predict(with_32, "right", "with 32 registers")
except Exception as error:
    print(error)
    predict(with_32, "hang" if "deadlock" in str(error) or "wait" in str(error) else "wrong", "with 32 registers")

# %% [markdown]
# **What to see.** A CTA has what it was launched with, and no claim to the rest: the last warp asks for registers that nobody will give back, and the others wait for it at the first product.
#
# Shared memory, from the constants of the kernel:

# %%
bars = {f"d = {d}": draw_backward.parts(draw_backward.constants(kernel.rung.source, d)) for d in (64, 128)}
draw_backward.shared_memory(bars, "Where shared memory goes, KB per CTA")

# %% [markdown]
# **What to see.** $K_j$ and $V_j$ stay for a whole loop; the others have one to three buffers, and at $d = 64$ there is room for the next loop's $K$. There is one CTA per SM: all overlap has to come from inside.
#
# ### One loop after another
#
# A loop is an *item* of work: 128 keys of a query head, at $N = 512$ and $d = 64$ four steps. Before it tiles have to come, after it $dK$ and $dV$ have to leave; meanwhile the tensor cores rest. Short sequences suffer most.
#
# So at $d = 64$ a CTA per SM takes one item after another, by a counter, as in rung 31. The next $K$ and $Q$ come under an item's last steps, and *the last step starts the next item's $S$*. $V$ has one place: it is given back when the last $dP$ has read it. $dK$ and $dV$ leave under the next item's first step, by way of a buffer of $dS$. After the last, an unused $S$ is started. At $d = 128$, without a second $K$, a CTA has one item:

# %%
show.region("33_backward_wgmma", "items")

# %% [markdown]
# ## 5 · Under whose products?
#
# A warpgroup could start several products and compute under them, all by itself. But whoever starts a product is held until the tensor cores take it. So a token goes round: only the warpgroup that has it starts products. The plan: one forms $dS$ while the other's $dP$ and $dV$ run, and $P$ while the other's $S$, $dK$ and $dQ$ run (at $d = 64$ with what is left of $dV$).

# %%
show.region("33_backward_wgmma", "turns")

# %% [markdown]
# The loop in machine code: each product from its first `HGMMA` to the wait that covers it (`WARPGROUP.DEPBAR`), and what the threads do meanwhile. The numbers are those in the kernel's comments:

# %% tags=["raises-exception"]
early, late = found[64].query("name == 'dV'")["instructions"]
pieces = [f"(1) dV, {early} of {early + late}", f"(4) dV, {late} of {early + late}"]
marked = found[64].assign(name=["(1) dP", pieces[0], "(3) S, next step", pieces[1], "(4) dK", "(5) dQ"])
done = draw_backward.work(loops[64], found[64])
draw_backward.program(marked, done, len(loops[64]), "One step of the loop in the order of its machine code, d = 64")

# %% [markdown]
# **What to see.** (Instructions, not time.) A step has two halves. In the first, $dP$ and most of $dV$ are started, and $dS$ is computed as soon as $dP$ is there, under $dV$. In the second, $S$ of the next step, the rest of $dV$, $dK$ and $dQ$ are started, and the exponentials wait for $S$ alone. Orange is work that lies under no product *of this warpgroup*: there the other one's would have to keep the tensor cores busy. (The long empty stretch is the mask.)
#
# Do they? The kernel notes what begins when. Three steps in the middle of a loop, as recorded, $d = 128$ (notes take time). Which share of its $dS$ does consumer 1 compute while consumer 0 starts products?

# %%
dS_covered = ...  # your prediction: between 0 and 1, d = 128


# %% tags=["reveal"]
def in_the_middle(events):
    events = events[events["D"] == 128]
    predict(dS_covered, draw_hopper.covered(events)["consumer 1", "dS"], "of consumer 1's dS")
    where = record.about("33_backward_wgmma", "roles")["device"]
    return draw_hopper.steps(events, f"{where}, d = 128, N = 4096: three steps of a CTA", "clocks of the SM")


plot.recorded("33_backward_wgmma", "roles", in_the_middle)

# %% [markdown]
# **What to see.** The kernel's numbers: 2 is $dS$ (dark orange), 6 the next step's $P$, 7 $dQ$ on its way to shared memory. (The producer's copies aren't noted: its box is one wait.) On the right: how much of that lies under products that the other one starts. Here the plan mostly holds for both consumers' $dS$ and for consumer 0's $P$. Consumer 1's $dQ$ is covered, too, the rest is not: the two are less than half a step apart, so only products started earlier can still be running. Starting products takes each consumer more time than anything else: there it is held up.
#
# ### The budget
#
# What a step costs shared memory and the tensor cores, for both warpgroups. The model of notebooks 30 and 32: `wgmma` reads an operand in shared memory once per instruction, at 128 bytes per clock. Notebook 30's measurement rules out more. LSE and delta are counted as wavefronts of ordinary loads, by the X-ray. Which is busier?

# %% tags=["raises-exception"]
shared = frames["33_backward_wgmma"].query("space == 'shared' and op == 'load' and width == 8")
loads = shared[shared.kernel.str.startswith("backward")].cost.sum()  # LSE and delta of 4 steps, and LSE for nothing
per_step = loads * 2 / 9
parts = {}
for d in (64, 128):
    tile = draw_backward.constants(kernel.rung.source, d)
    parts[f"d = {d}"] = wgmma_units.backward(found[d], tile, d, wavefronts=per_step / 128)  # per query
table = wgmma_units.table({name: part.sum() for name, part in parts.items()})
sums = {name: ", ".join(f"{unit} {n:.0f}" for unit, n in part.sum().items()) for name, part in parts.items()}
totals = "; ".join(f"{name}, clocks: {said}" for name, said in sums.items())
display(budget.units(table, "Rung 33, one step (a model, not a measurement)", totals))
parts["d = 64"].astype(int).rename_axis("part of a step, d = 64")

# %% [markdown]
# **What to see.** If each product reads for itself, shared memory has more to do than the tensor cores, and their quotient bounds the share of the tensor cores' rate that any order could reach. Products with $A$ from registers ask for half as many clocks of shared memory as of the tensor cores, those with both operands in shared memory for 3/4 or as many. So it pays to keep $P$ and $dS$ in registers.

# %% [markdown]
# ## The kernel
#
# The products and the softmax:

# %%
show.region("33_backward_wgmma", "products")

# %%
show.region("33_backward_wgmma", "scores")

# %% [markdown]
# A step is a function; at $d = 128$ the last one is compiled apart. Read it by its numbers, beside the two figures of section 5:

# %%
show.region("33_backward_wgmma", "tile_loop")

# %% [markdown]
# Unless `deterministic`, the longest items come first: under a causal mask the first keys of up to 8 heads (16 of long sequences); without one a head's last, perhaps ragged, tile. Where several query heads share $K$ and $V$, each has items of its own, whose $dK$ and $dV$ go to the workspace; a last kernel adds them up in the order of the heads (region `add_heads`).

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# ### Where it is wrong
#
# Two wrong descriptors. Before you look: which gradients break, in which rows, if
#
# 1. the second warpgroup's rows of $K$ and $V$ are looked for 4096 bytes into the tile, not 8192 (a start address that is wrong by half);
# 2. $dS$ as operand $B$ of $dQ^\top$ is read MN-major?

# %%
from helpers import draw_proof

bugs = {
    "start address": ("half * 64 * 128)", "half * 64 * 64)"),
    "major": ("fa::wgmma_mma_async<T, 1, 0>(dQ_reg", "fa::wgmma_mma_async<T, 1, 1>(dQ_reg"),
}
maps, texts = {}, {bug: source.replace(old, new) for bug, (old, new) in bugs.items()}
compile_ahead(texts.values(), "run")
for bug, text in texts.items():
    report = check(load(source=text, device="cpu", quiet=True), [case])
    maps |= {f"{bug}: d{c.output[1].upper()}": c for c in report.comparisons}
draw_proof.gallery(maps, columns=3, ticks=True)

# %% [markdown]
# **What to see.** Rows of $dQ$ are queries, rows of $dK$ and $dV$ are keys.
#
# 1. The second warpgroup's $P$ and $dS$ belong to keys 32 to 95 of the tile, and it adds them to $dK$ and $dV$ of keys 64 to 127. Those rows are wrong, of both tiles, and the first warpgroup's are right. $dQ$ sums over all keys, so all of it is wrong.
# 2. $dQ$ alone: a descriptor finds numbers wherever it points.
#
# ### A wait that never ends
#
# The mbarrier `Q_full` is told how many bytes will come: $Q_i$, LSE, and with the first ones $K_j$. Suppose we expect $K_j$'s bytes every time:

# %%
expected = "expect_tx(Q_full, C::q_bytes + C::stats_bytes + (step == 0 ? C::kv_bytes : 0))"
forgetful = source.replace(expected, "expect_tx(Q_full, C::q_bytes + C::stats_bytes + C::kv_bytes)")
try:
    load(source=forgetful, device="cpu", quiet=True)(*case.inputs)
except Exception as error:
    print(error)

# %% [markdown]
# **What to see.** Who waits, where, for which mbarrier, and how many bytes are missing: as many as $K_j$ has. On a GPU the kernel would hang without a word.

# %% [markdown]
# ## Predict, then measure
#
# One head, $N = 256$, $d = 64$ again: two items of two steps, both of which the emulator's first CTA takes. How many `wgmma` instructions are there, counted by warps? In each step and for each of two warpgroups: $d / 16$ for $S$ and for $dP$, $B_r / 16$ for $dV$ and for $dK$, and 8 for its half of $dQ$; at the end of a CTA, $S$ once more.

# %%
products_executed = ...  # your prediction

# %% tags=["reveal"]
counted = pd.DataFrame({stem: pd.Series(ray.trace.instructions) for stem, ray in rays.items()}).fillna(0).astype(int)
predict(products_executed, int(counted.loc["wgmma.mma_async", "33_backward_wgmma"]), "wgmma instructions, by warps")
counted.loc[counted.max(axis=1) > 60].sort_values("23_backward_mma", ascending=False)

# %% [markdown]
# **What to see.** $S$ is started a step ahead, the first one before the loop, and after the last item comes that of nothing: a branch around it would keep ptxas from letting any two products overlap (its message C7515). Gone are `mma.sync`, `ldmatrix` and copies of 16 bytes per thread (`cp.async`); the few atomics left are for turns and the counter. `ld.shared` has grown: a warp holds 16 keys here, 32 in rung 23, and each warp reads LSE and delta of all queries.

# %% [markdown]
# ## Beside its peers
#
# FLOPs: $10 B H N^2 d$, half of it under a causal mask. SDPA FLASH is FlashAttention-2's own backward pass; FA3 and FA4 (FlashAttention-3, -4) ran in the same process.


# %%
def beside(samples):
    names = set(samples["name"])
    peers = [peer for peer in ("SDPA FLASH", "SDPA CUDNN", "FA3", "FA4") if peer in names]
    return plot.ratio(samples[samples.causal == 0], "33_backward_wgmma", peers)


plot.recorded("33_backward_wgmma", "backward", beside)


# %%
def summaries(samples):
    peers = [peer for peer in ("SDPA CUDNN", "FA3", "FA4") if peer in set(samples["name"])]
    tables = {peer: record.summary(samples, "33_backward_wgmma", peer) for peer in peers}
    return pd.concat(tables, names=["peer"]).droplevel(1).round(3)


plot.recorded("33_backward_wgmma", "backward", summaries)

# %% [markdown]
# **What to see.** How many times as long as ours each peer takes: in the figure medians of seven rounds; in the table geometric means over $N \ge 1024$, their range, and the worst of *all* shapes. We are ahead of cuDNN everywhere. Beside FlashAttention-3 we are at 1.08<!--= ratio("33", "FA3", 64, causal=0, kind="backward"):.2f --> at $d = 64$ and 1.05<!--= ratio("33", "FA3", 128, causal=0, kind="backward"):.2f --> at $d = 128$, under a mask at 1.09<!--= ratio("33", "FA3", 64, causal=1, kind="backward"):.2f --> and 1.05<!--= ratio("33", "FA3", 128, causal=1, kind="backward"):.2f --> (fp16; in bf16 1.05<!--= ratio("33", "FA3", 128, causal=1, dtype="bf16", kind="backward"):.2f -->). FlashAttention-4 is much the same, and closest in the longest sequences, at 1.01<!--= record.summary(record.load("33_backward_wgmma", "backward"), "33_backward_wgmma", "FA4")["worst"].min():.2f -->. At $N = 4096$ a call takes 0.81<!--= power("33", "joules", 64) / power("33", "joules", 64, of="CUDNN"):.2f --> ($d = 64$) and 0.87<!--= power("33", "joules", 128) / power("33", "joules", 128, of="CUDNN"):.2f --> of cuDNN's energy, and 0.93<!--= power("33", "joules", 64) / power("33", "joules", 64, of="FA3"):.2f --> and 0.92<!--= power("33", "joules", 128) / power("33", "joules", 128, of="FA3"):.2f --> of FlashAttention-3's.
#
# ### The steps that taught something
#
# Seven of 15 drafts; the others are in the [log](39_log.ipynb).

# %%
TAUGHT = {
    1: "where it began: 96 queries a step at D = 64",
    2: "a third buffer for Q",
    3: "always a product under way, by the order of the code",
    8: "turns at the tensor cores",
    10: "128 queries at D = 64, warps of their own send dQ",
    12: "causal: the longest tiles of 16 heads first",
    14: "heads that share K and V have CTAs of their own",
}


# %%
def taught(steps):
    rows = steps[steps["step"].isin(TAUGHT)]
    rows = rows.assign(what=rows["step"].map(TAUGHT))
    return draw_backward.drafts(rows, "Backward, bf16, N = 1024 to 16384 · NVIDIA H200", "SDPA CUDNN")


plot.recorded("33_backward_wgmma", "steps", taught)

# %% [markdown]
# **What to see.** (Filled marks stayed; runs of one draft differ by up to 4 %.) At $d = 128$ a third buffer (2) gained most: $Q_i$ was given back at the end of a step and wanted half a step later, less than a copy takes. At $d = 64$ steps 3 (surpassed later) and 10 brought most. In the finished kernel turns matter little (see the log).
#
# ## What still hurts
#
# 1. **One CTA per SM, and two warpgroups that wait for each other** several times in a step. No third one fills in; at $d = 128$ nothing covers a loop's ends.
# 2. **$dQ$ in fp32**: each tile of keys sends $4 d$ bytes per query to the L2.
# 3. **Small kernels**: one before, one after, and one where heads share $K$ and $V$. They weigh most in short sequences.
#
# ## Reading other people's kernels
#
# <details>
# <summary>Dictionary: our words, CUTLASS's and FlashAttention-3's</summary>
#
# | here | CUTLASS | FlashAttention-3 |
# |---|---|---|
# | wait for `empty`, announce bytes | `pipeline.producer_acquire` | the same |
# | wait for `full`; `release` | `consumer_wait`; `consumer_release` | the same |
# | `Ring`: stage, parity | `PipelineState`: index, phase | the same |
# | one thread asks | `elect_one_sync` | the same |
# | K-major, MN-major; leading, stride offset | `GMMA::Major::K`, `MN`; LBO, SBO | the same |
# | `wgmma_fence`, `commit_group`, `wait_group` | `warpgroup_arrive`, `warpgroup_commit_batch`, `warpgroup_wait` | the same |
# | `setmaxnreg_inc`, `_dec` | `warpgroup_reg_alloc`, `_dealloc` | the same |
# | turns | Pingpong schedules, `OrderedSequenceBarrier` | `warp_scheduler_barrier_sync`, `_arrive` |
# | no turns | Cooperative schedules | – |
# | two products under way | – | intra-warpgroup overlap |
# | the counter of rungs 31 to 33 | a dynamic persistent tile scheduler | `DynamicPersistentTileScheduler` |
#
# </details>
#
# What this series leaves out, and why:
#
# - **Clusters and multicast**: one TMA copy into several CTAs. In a draft of 32 (step 26) warps waited for $K_j$ and $V_j$ in 5 % of samples; multicast [lost](39_log.ipynb).
# - **FP8.** `wgmma` transposes 16-bit operands only, so $V$ would have to be transposed on the way, and $P$'s accumulators don't lie as an 8-bit operand does (FlashAttention-3, section 3.3).
# - **Blackwell and FlashAttention-4.** There `tcgen05` replaces `wgmma`: one thread starts a product, and sums lie in *tensor memory*. From H100 to B200 products became 2.25 times as fast, exponentials and shared memory no faster ([FlashAttention-4](https://www.together.ai/blog/flashattention-4)). So FA4 computes part of the exponentials by a polynomial, rescales $O$ more rarely, and lets two CTAs share operands in the backward pass.

# %% [markdown]
# ## Exercises
#
# In a **task** you write CUDA: the cell takes the place of one region of the rung. `blank` shows what is given and what has to hold afterwards. It is solved if all cases of `check` are right and the X-ray finds nothing. (In an editor: `python -m helpers exercise new 33 kernel`, here for the whole rung, task 33.9.)
#
# ### Task 33.1 · Where the sums begin
#
# Write the kernel that runs first: delta, and what the sums of $S$ and $dP$ begin with (section 1). Mind the rows past the end and those that see no key: they begin with an infinity, so that their $P$ is 0.

# %%
blank("33", "delta")

# %%
# %%region 33 delta -> my_delta
# // yours

# %%
hint("33.1")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `delta` of [33_backward_wgmma.cu](../kernels/33_backward_wgmma.cu): `show.region("33", "delta")`.
#
# </details>

# %% [markdown]
# ### Task 33.2 · From accumulators to rows
#
# Write the kernel behind the loop: $dQ$ from `dQ_sum`, which lies in the order in which lanes hold $dQ^\top$. Rows leave whole, by way of shared memory.

# %%
blank("33", "finish")

# %%
# %%region 33 finish -> my_finish
# // yours

# %%
hint("33.2")

# %% [markdown]
# <details>
# <summary>Solution</summary>
#
# Region `finish` of [33_backward_wgmma.cu](../kernels/33_backward_wgmma.cu): `show.region("33", "finish")`.
#
# </details>

# %% [markdown]
# ### Exercise 33.3 · Three ways to break it
#
# Each is one line. What does the emulator make of it: are the results `"wrong"`, is something `"reported"` although the results are right, or does the kernel `"stop"` with an error?

# %%
breaks = {
    "dS stored as it is in registers": ("fa::stmatrix_x4_trans(dS_row", "fa::stmatrix_x4(dS_row"),
    "LSE's bytes not expected": (expected, expected.replace(" + C::stats_bytes", "")),
    "dK and dV sent without a fence": ("fa::fence_proxy_async();\n    fa::bar_sync(own", "fa::bar_sync(own"),
}

# %%
# Exercise 33.3
outcome = dict.fromkeys(breaks, "wrong")


# %%
def happens(old, new):
    """What the emulator makes of the kernel with this change."""
    run = load(source=source.replace(old, new), device="cpu", quiet=True)
    report = check(run, [case]).comparisons
    seen = "stop" if len(report) < 3 else "wrong" if not all(c.ok for c in report) else "right"
    return "reported" if seen == "right" and xray(run, *case.inputs).findings else seen


# %%
def found_out():
    compile_ahead([source.replace(old, new) for old, new in breaks.values()], "run")
    found = [happens(old, new) for old, new in breaks.values()]
    assert found == [outcome[name] for name in breaks], "at least one of them turns out in another way"
    return True


exercise.verify("33.3", found_out)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The emulator's copies are as late as their waits allow. Reads of bytes that a copy may still be writing stop the kernel; the order of threads and of proxies is checked by the X-ray.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# outcome = {
#     "dS stored as it is in registers": "wrong",
#     "LSE's bytes not expected": "stop",
#     "dK and dV sent without a fence": "reported",
# }
# ```
#
# The last one has right results here, and may have on a GPU.
#
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# <details><summary>1. Which operands of wgmma may lie in registers?</summary>
#
# A, in the layout of an accumulator that was rounded. B never.
#
# </details>
# <details><summary>2. What does it cost to read a tile transposed?</summary>
#
# In 16 bits a bit of the instruction, and another step from 16 k to the next.
#
# </details>
# <details><summary>3. Why is dQ formed transposed?</summary>
#
# M is 64, and then it is d, not queries, that comes in sixty-fours: the number of queries in a step is free.
#
# </details>
# <details><summary>4. A thread writes shared memory, wgmma reads it. What has to stand between?</summary>
#
# A fence.proxy.async of the writer, then a barrier that the reader waits at.
#
# </details>
# <details><summary>5. Two runs give different dQ, and the same dK and dV. Why?</summary>
#
# Shares of dQ are added up in the L2 in the order in which CTAs come. Asked for `deterministic`, they wait for each other. dK and dV of a tile of keys of a query head are summed up by one CTA, and those of heads that share K and V in the order of the heads.
#
# </details>
# <details><summary>6. How would you find out whether exponentials run under a product?</summary>
#
# Look where they stand in the machine code, between which product's start and its wait; then at the clocks.
#
# </details>
#
# **References**: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Async proxy" and "Data Movement and Conversion Instructions" (cp.reduce.async.bulk); [FlashAttention-2](https://arxiv.org/abs/2307.08691), Algorithm 2; [FlashAttention-3](https://arxiv.org/abs/2407.08608); NVIDIA H100 Tensor Core GPU Architecture (white paper).
