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
# **After this notebook you can**
# - say of each of ten operands whether `wgmma` finds it in registers or through a descriptor, K-major or MN-major, and read the answer off the machine code;
# - choose which way round to form a product when one of its dimensions has to be 64;
# - hand a tile from ordinary stores to `wgmma` and to the copy engine: what has to be fenced, by whom, before which barrier;
# - follow a gradient that is added up in the L2, a tile at a time, and say what of it differs from run to run;
# - read what runs under what off the loop of a kernel and off the clocks of its warpgroups, and say why two of them take turns;
# - tell from a report or from a map of errors what is wrong in an asynchronous kernel.
#
# **Time** 90 minutes.
#
# **Needs** [23 · Backward on tensor cores](23_backward_mma.ipynb) for the five products, [30 · TMA and wgmma](30_tma_wgmma.ipynb) for descriptors and mbarriers, and [31 · Warp-specialised](31_warp_specialized.ipynb) for roles. No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: two warpgroups own 64 keys each and keep $P^\top$ and $dS^\top$ in registers as operands; whatever else the five products need, `wgmma` reads from shared memory by itself; and the two take turns, so that by plan one computes while the other's products run (section 4 shows how far that holds).

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += map(os.path.realpath, ["..", "series"])
    importlib.import_module("helpers").prepare()

# %%
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from helpers import Case, check, compile_ahead, load, single, xray
from helpers import draw_backward, draw_hopper, exercise, fragments, plot, record, roles, sass, show

torch.set_num_threads(1)  # matrices this small are multiplied before a second thread has woken up
compile_ahead(["23_backward_mma", "33_backward_wgmma"], "sass")  # in the background, for later
kernel = load("33_backward_wgmma")
device = kernel.device

# %% [markdown]
# ## The problem
#
# What public kernels reach on the way back on an H200, from the project's earlier study of them (`data/README.md`, `h200_peers.csv`), TFLOP/s in fp16 at 16384 tokens and a width of 2048:

# %%
study = record.public_kernels("bwd")
study = study[(study.dtype == "fp16") & study.tflops.notna()]
study.pivot_table(index=["D", "name"], columns="Nk", values="tflops").round(0)

# %% [markdown]
# SDPA FLASH is written for `mma.sync`, as notebook 23's kernel is. The other two are written for Hopper, and reach nearly twice as much at $d = 128$. Notebook 23 said why it would stay behind: for its products it loads operands. What stands in its loop, at $d = 128$:

# %%
mma = sass.opcodes("23_backward_mma", D=128, loop=True, kernel="backward_mma")
mma[mma > 0].sort_values(ascending=False).head(8)

# %% [markdown]
# `HMMA` are the products, `LDSM` (`ldmatrix`) fetches their operands. Every fetched operand takes registers, an instruction, and a trip through shared memory's port, and the warp that asks for it waits for it. `wgmma` fetches by itself. The question of notebook 23 comes again, with other answers: *for each of ten operands, where does it lie, and which way round?*

# %% [markdown]
# ## 1 · Ten operands, again
#
# A step, with queries as columns throughout ($B_r$ queries, $B_c = 128$ keys; $\circ$ is the product element by element, $c = \text{scale} \cdot \log_2 e$):
#
# $$ S^\top = K_j Q_i^\top, \quad P^\top = 2^{\,c\,(S^\top - \mathrm{LSE} / \text{scale})}, \quad dP^\top = V_j\, dO_i^\top, \quad dS^\top = P^\top \circ (dP^\top - \mathrm{delta}), $$
#
# $$ dV_j \mathrel{+}= P^\top dO_i, \qquad dK_j \mathrel{+}= dS^\top Q_i, \qquad dQ_i^\top \mathrel{+}= K_j^\top dS^\top . $$
#
# The sums of $S$ begin with $-\mathrm{LSE} / \text{scale}$, not with 0, and those of $dP$ with $-\mathrm{delta}$. So both are read before a product is started, and nobody waits for them behind it.
#
# A warpgroup multiplies $A$ (64 × 16) by $B$ (16 × $N$) and adds to $C$ (64 × $N$). The rules (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions"):
#
# - $B$ comes from shared memory, always. $A$ comes from shared memory or from registers, where it lies as the operand of an `mma` does.
# - An operand in shared memory is found through a descriptor. In 16 bits it may be **K-major**, $k$ running along the rows of the tile, or **MN-major**, $k$ running across them.
# - $M$ is 64. $N$ is any multiple of 8 up to 256.
#
# In notebook 23 the question "does $k$ run along the rows?" decided between `ldmatrix` and `ldmatrix.trans`. Here is a tile as TMA leaves it in shared memory, 64 rows of 64 numbers, chunks of 16 bytes swapped within each eight rows. Read it through a descriptor, either way:

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
# **What to see.** The same tile, and *the same 64 bits* of descriptor. Which way it is read is a bit of the instruction, the last template arguments of `wgmma_mma_async` (1: MN-major). Transposing costs no instruction at all. What differs is how one gets from 16 $k$ to the next, 32 bytes further along the rows, or 16 rows of 128 bytes down; and if the operand is wider than 64 columns, the *leading offset* says where the next panel begins. `fa/sm90.cuh` has a function for each:

# %%
dO = fragments.Descriptor(start=0x8000, leading=128 * 128, stride=1024, swizzle=128)
draw_hopper.descriptor(
    dO, mn_major=True, extent=64, what="d", title="dO as operand B of dV: 16 queries, 64 columns of d"
)

# %% [markdown]
# **What to see.** Lines are queries, and $k$ is queries: the operand's rows are lines of memory, its core matrices lie side by side in a line, and the next eight $k$ are one `stride` further down.
#
# ### Which way round to form them
#
# $S$ and $dP$ are formed transposed, for notebook 23's reason: $C$'s columns take the place of $k$, so $P^\top$ and $dS^\top$, a row per key and a column per query, are operands $A$ of the two products that sum over queries. Here the reason weighs more. The other way round they would have to become operands in shared memory, and each such step costs a store, a fence, a barrier. In registers the layouts agree, element by element:

# %%
N = 128  # columns of an accumulator; step k of the next product takes columns 16 k to 16 k + 15
for thread in range(128):
    for k in range(N // 16):
        held = [fragments.wgmma_d(thread, 8 * k + i) for i in range(8)]
        wanted = [fragments.wgmma_a(thread, i) for i in range(8)]
        assert held == [(row, column + 16 * k) for row, column in wanted]
print("of every thread, 8 accumulators in a row are an operand A, in order")

# %% [markdown]
# That leaves $dQ = dS\, K$, which sums over keys. $dS^\top$ in registers is of no use for it, so $dS$ goes through shared memory, as in notebook 23. And it is formed transposed, too, $dQ^\top = K^\top dS^\top$. Look at the shapes: $M$ is 64, so what stands in the rows of $C$ has to come in sixty-fours. In $S^\top$, $dP^\top$, $dV$ and $dK$ these are keys, 64 for each warpgroup. In $dQ$ it would be queries, and in $dQ^\top$ it is $d$. So *no* product asks for queries in sixty-fours. How many there are in a step is free (a multiple of 16), and can be set by what fits.

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

# %%
names = draw_backward.accumulators(kernel.rung.source)  # the products of the loop, in the order of the file
loops = {d: draw_backward.main_loop("33_backward_wgmma", d) for d in (64, 128)}
found = {d: draw_backward.products(lines, names) for d, lines in loops.items()}
pd.concat({f"d = {d}": f.set_index("name")[["shape", "instructions", "A", "B"]] for d, f in found.items()}, axis=1)

# %% [markdown]
# ## 2 · What dS still needs
#
# How each result gets to where it is needed:

# %%
ways = dict.fromkeys(draw_backward.EDGES, "registers") | {("dS", "dQ"): "shared memory"}
ends = {"dV": "registers, to the end", "dK": "registers, to the end", "dQ": "the L2, a tile at once"}
draw_backward.dataflow(ways, ends, "One step of 33_backward_wgmma (S, P, dP, dS and dQ transposed)")

# %% [markdown]
# $dQ$ sums over the keys of both warpgroups. So each writes its $dS^\top$, 64 keys, into a panel of its own, with `stmatrix.trans`, which stores fragments the other way round: a row per query. Then each computes half of $dQ^\top$, over all 128 keys.
#
# Threads write, `wgmma` reads. In notebook 23 a barrier was all it took. Here the two go to shared memory by different ways: ordinary stores through the *generic proxy*, `wgmma` (and the copy engine) through the *async proxy* (PTX ISA, "Async proxy"). A barrier orders threads. It doesn't order the two ways. For that there is `fence.proxy.async`:
#
# | who | does what |
# |---|---|
# | every thread | writes its part of $dS$ |
# | every thread | `fence.proxy.async`: what I wrote can be seen on the other way |
# | every thread | `bar.arrive` at the other warpgroup's barrier: my half is written; it doesn't wait |
# | each warpgroup | `bar.sync` at its own barrier, then `wgmma`, which reads both halves |

# %%
show.region("33_backward_wgmma", "dS")

# %%
show.region("33_backward_wgmma", "dQ")

# %% [markdown]
# The other results that leave shared memory by the async proxy, $dQ$ in each step and $dK$, $dV$ at the end, follow the same pattern: write, fence, barrier, and then one thread starts the copy.
#
# The emulator keeps account of both ways. Predict: the fence left out, nothing else changed. Are the results wrong? Is anything reported?

# %%
source = single("33_backward_wgmma", 64)  # for fp16 alone, which takes a quarter of the time to compile
first_fence = r"(stmatrix_x4_trans\(dS_row.*?)fa::fence_proxy_async\(\);"  # behind the stores of dS
no_fence, times = re.subn(first_fence, r"\1", source.source, count=1, flags=re.DOTALL)
assert times == 1
torch.manual_seed(0)
q, do = (torch.randn(1, 1, 192, 64).half() for _ in range(2))
k, v = (torch.randn(1, 1, 256, 64).half() for _ in range(2))
case = Case("192 x 256", q, k, v, do=do)
unfenced = load(source=no_fence, device="cpu", quiet=True)
print(check(unfenced, [case]), "\n")
for finding in (ray := xray(unfenced, *case.inputs)).findings:
    print(ray.report(finding))

# %% [markdown]
# **What to see.** The numbers are right, and the report names both lines. This is the worst kind of bug: on a GPU, too, such a kernel may be right a thousand times. A test of results can't be trusted to find it; a rule that is checked at every access can.

# %% [markdown]
# ## 3 · dQ, a tile at once
#
# In notebook 23 each warp added to $dQ$ with atomic additions, 32 numbers at a time. Here a warpgroup writes its half of the tile of $dQ^\top$ to shared memory, and *one thread*, of a warp that has nothing else to do, asks the copy engine to add it to HBM: `cp.reduce.async.bulk`, a copy that adds. It adds to `dQ_sum`, a tensor of fp32 of which the L2 has the lines at hand, and there the additions take place. No thread waits for them; before the buffer is written again, the thread that asked has to know that it has been *read* (`cp.async.bulk.wait_group.read`), and tells the warpgroup so.

# %%
show.region("33_backward_wgmma", "send_dQ")

# %% [markdown]
#
# One head, $N = 256$, $d = 64$: the requests that add to `dQ_sum`, in both kernels.

# %%
torch.manual_seed(0)
one_head = Case("", *(torch.randn(1, 1, 256, 64).half() for _ in range(3)), do=torch.randn(1, 1, 256, 64).half())
rays = {stem: xray(single(stem, 64), *one_head.inputs) for stem in ("23_backward_mma", "33_backward_wgmma")}
frames = {stem: ray.to_frame() for stem, ray in rays.items()}
adds = {s: f[(f.target == "dQ_sum") & f.op.isin(["atomic", "cp.reduce.async.bulk"])] for s, f in frames.items()}
pd.concat(adds)[["op", "requests", "bytes", "cost", "ideal"]].rename(columns={"cost": "sectors", "ideal": "least"})

# %% [markdown]
# **What to see.** The same kind of traffic in far fewer requests. The bytes are not fewer: each tile of keys adds to every row of $dQ$ once, in fp32 ($N_q$ is rounded up to whole tiles of queries; with more queries in a tile there is more of that here). The tile lies in HBM as the accumulators lie in the threads, each thread's four numbers side by side, for no one needs to read it before it is complete. When it is, a third kernel sorts it, multiplies by the scale and rounds:

# %%
show.region("33_backward_wgmma", "finish")

# %% [markdown]
# ### Different from run to run
#
# Who adds first is not decided. As in notebook 23, let us have another order: here without a change to the kernel. Attention does not know the order of its keys. So deal out the keys in tiles from the last to the first, with their values: $dQ$ is the same sum of the same shares, and rows of $dK$ and $dV$ are the same sums, in other places.

# %%
torch.manual_seed(0)
q, k, v, do = (torch.randn(1, 1, 768, 64, device=device).half() for _ in range(4))
_, _, _, o, lse, _ = Case("", q, k, v, do=do).inputs


def other_way(x):
    return x.unflatten(2, (-1, 128)).flip(2).flatten(2, 3)  # tiles of 128 keys, the last one first


one, again = (kernel.tensors(q, k, v, o, lse, do) for _ in range(2))
other = kernel.tensors(q, other_way(k), other_way(v), o, lse, do)
rows = {}
for name in ("dQ_sum", "dQ", "dK", "dV"):
    turned = other_way(other[name]) if name in ("dK", "dV") else other[name]
    rows[name] = [(one[name] != x).double().mean().item() for x in (again[name], turned)]
pd.DataFrame(rows, index=["run again", "keys from the last tile on"]).T.map("{:.2%}".format)

# %% [markdown]
# **What to see.** Share of elements that differ. On the emulator, whose CTAs always come in the same order, a second run is the same throughout; on a GPU, `dQ_sum` differs in its last bits from run to run as it does here from order to order. $dK$ and $dV$ are the same bit by bit in every run, whatever the rest of the GPU does: one CTA sums up those of a query head, alone and in a fixed order. The line `outputs` of the header block says so. (Where query heads share $K$ and $V$, what belongs to one head of $K$ and $V$ is added up afterwards, in the order of the query heads: see "Who gets which tile" below.) (Why do a few of them differ in the right column? Without a mask a CTA begins with a tile of queries that depends on its place among the CTAs of its head, so that they don't all add to the same rows of $dQ$ at once. Another place, another order.)
#
# ### The same bits, if you ask for them
#
# `deterministic=True` gives $dQ$ one order, as notebook 22 does: a CTA adds its share to a tile of queries when all CTAs with later keys have added theirs, and then counts itself in (region `send_dQ`). Those are started first, so nobody waits for a CTA that has no SM yet. PyTorch's `torch.use_deterministic_algorithms(True)` asks for it, too.

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
# **What to see.** At $d = 64$ without a mask one order costs as much as in FlashAttention-3, elsewhere more. Ours waits until the L2 has added a share before the next CTA may begin, and the warp that sends $dQ$ can't take the next share while it waits for its turn: at $d = 128$ a step is short, and the wait shows.
#
# ### A reminder
#
# $dS$ is rounded to 16 bits on its way into the last two products, and it is as small as the gradient that comes in. [Notebook 23](23_backward_mma.ipynb), section 4, has the whole story. The same test here, $dO$ as it is and a quarter of a million times smaller; relative errors:

# %%
rows = []
for dtype in (torch.float16, torch.bfloat16):
    for power in (0, -18):
        small = (x.to(dtype) for x in one_head.inputs[:3])
        case = Case("", *small, do=(one_head.do.double() * 2.0**power).to(dtype))
        got = kernel(*(x.to(device) for x in case.inputs))
        errors = [((g.cpu() - e).abs().max() / e.abs().max()).item() for g, e in zip(got, case.exact())]
        rows.append((str(dtype)[6:], f"2^{power}", *errors))
table = pd.DataFrame(rows, columns=["dtype", "dO times", "dQ", "dK", "dV"]).set_index(["dtype", "dO times"])
table.map("{:.1e}".format)

# %% [markdown]
# fp16 needs its loss scaled, bf16 does not.

# %% [markdown]
# ## 4 · Roles, and what they cost
#
# One warp of a warpgroup of its own, the **producer**, asks TMA for tiles, and two more warps of it send $dQ$; two warpgroups, the **consumers**, compute. As in rung 31 the producer gives registers back (`setmaxnreg`) so that the consumers may have more. What do they need? Per lane, for the arrays that are alive together when $dS$ is formed:

# %%
per_lane = pd.DataFrame(index=["dK, dV", "dP", "P, rounded", "dS, rounded", "P in fp32"])
for d in (64, 128):
    Br = draw_backward.constants(kernel.rung.source, d)["Br"]  # queries per step
    pairs = 64 * Br // 2  # two rounded numbers share a register
    elements = [2 * 64 * d, 64 * Br, pairs, pairs, 64 * Br * (d == 128)]  # of a warpgroup, in registers
    per_lane[f"d = {d}, {Br} queries"] = [n // 128 for n in elements]
per_lane.loc["all"] = per_lane.sum()
given, taken = (int(re.search(rf"setmaxnreg_{way}<(\d+)>", source.source)[1]) for way in ("dec", "inc"))
print(
    f"producer {given}, consumers {taken} each: {128 * (given + 2 * taken):,} of an SM's {draw_hopper.REGISTER_FILE:,}"
)
per_lane

# %% [markdown]
# $dK$ and $dV$ grow with $d$, so a step has fewer queries at $d = 128$. There $P$ stays in fp32, where $S$ was, until $dS$ is formed from it. At $d = 64$ that would take 64 registers more, 256 of 240 (with it, nvcc 13.0 spills 1 KB per thread): there $dS$ is formed from the $P$ that was rounded for $dV$. One rounding more shows: compared with rung 23, the errors of $dQ$ and $dK$ are the same at $d = 128$, and at $d = 64$ 1.2 times as large in fp16, 1.3 times in bf16 (random inputs, on the emulator). What is left has to do for addresses. Did the compiler manage?

# %%
table = sass.table("33_backward_wgmma").set_index("kernel")
table[table.index.str.startswith("backward")].drop(columns="rung")

# %% [markdown]
# `registers` is what all threads start with: a whole SM's registers, divided by the threads of a CTA, in steps of 8. `setmaxnreg` redistributes these, $384 \cdot 168 = 64\,512$, and with 24 and 240 nothing is left over. 1024 registers of the SM belong to nobody. Just enough, it seems, to leave each of the producer's threads 8 more. **Predict** what the kernel does with 32 in place of 24:

# %%
generous = source.replace("setmaxnreg_dec<24>", "setmaxnreg_dec<32>")
try:
    load(source=generous, device="cpu", quiet=True)(*one_head.inputs)
except Exception as error:
    print(error)

# %% [markdown]
# **What to see.** It never ends. A CTA has what it was launched with, and no claim to the rest: the last warps ask for registers that nobody will give back, and the others of their warpgroup wait for them at the first product. On the H200 it hung, without a word, until it was stopped.
#
# Shared memory, from the constants of the kernel:

# %%
bars = {f"d = {d}": draw_backward.parts(draw_backward.constants(kernel.rung.source, d)) for d in (64, 128)}
draw_backward.shared_memory(bars, "Where shared memory goes, KB per CTA")

# %% [markdown]
# **What to see.** $K_j$ and $V_j$ stay for the whole loop. $Q_i$ and $dO_i$ have several buffers each, so that the producer can be ahead. $dS$ has two, so that nobody has to wait until the last one has been read. $dQ$ has one. Either way there is one CTA per SM: all overlap has to come from inside.
#
# Now the roles at work. The kernel notes what begins when: on a GPU by the SM's clock; on the emulator, which has none, only the order of events means something. A thread that has started a product goes on. Where it is held up, because the tensor cores have not yet taken what it wants to start, or because it needs a result, that time is part of the phase it is in. One tile of keys, 480 queries, $d = 64$:

# %%
q, do = (torch.randn(1, 1, 480, 64).half() for _ in range(2))
k, v = (torch.randn(1, 1, 128, 64).half() for _ in range(2))
events = roles.times(source, *Case("", q, k, v, do=do).inputs)
registers = {"producer": given, "consumer 0": taken, "consumer 1": taken}
draw_hopper.roles(events, registers, "The three warpgroups of a CTA", "events on the emulator, in their order")

# %% [markdown]
# **What to see.** The producer fills all buffers, then waits until one is free. Both consumers do the same in each step, but not at the same time: a token goes round, and only who has it starts products. The same on a GPU, where the axis is time: three steps in the middle of the loop, for a CTA in the middle of a full grid. (Writing the notes takes time, too. Shares mean more than durations.)


# %%
def in_the_middle(events, steps=3):
    """The phases of three steps at half time, d = 128."""
    events = events[events.D == 128]
    starts = events[(events.lane == "consumer 0") & (events.kind == "dS")].begin.to_numpy()
    first, last = (starts[len(starts) // 2 + n] for n in (0, steps))
    seen = events[(events.end > first) & (events.begin < last)]
    seen = seen.assign(begin=seen.begin.clip(first) - first, end=seen.end.clip(upper=last) - first)
    where = record.about("33_backward_wgmma", "roles")["device"]
    return draw_hopper.roles(seen, registers, f"{where}, d = 128, N = 4096", "clocks of the SM")


by = "python -m helpers record roles 33_backward_wgmma"
plot.recorded("33_backward_wgmma", "roles", in_the_middle, by=by)


# %%
def shares(events):
    """What each lane does with its time."""
    spent = (events.end - events.begin).groupby([events.D, events.lane, events.kind]).sum().unstack(fill_value=0)
    return spent.div(spent.sum(axis=1), axis=0).map("{:.0%}".format)


plot.recorded("33_backward_wgmma", "roles", shares, by=by)

# %% [markdown]
# And what does the other consumer do during a consumer's own work? Shares of that work's clocks:


# %%
def meanwhile(events):
    """For each consumer's dS, softmax and sending of dQ: the share of its clocks that each kind of the other's takes."""
    rows = {}
    own = events[events.lane.str.startswith("consumer") & events.kind.isin(["dS", "softmax", "send dQ"])]
    for (D, lane, kind), mine in own.groupby(["D", "lane", "kind"]):
        other = events[(events.D == D) & (events.lane == {"consumer 0": "consumer 1"}.get(lane, "consumer 0"))]
        until = np.minimum.outer(mine.end.to_numpy(), other.end.to_numpy())
        both = (until - np.maximum.outer(mine.begin.to_numpy(), other.begin.to_numpy())).clip(0).sum(axis=0)
        rows[D, lane, kind] = pd.Series(both).groupby(other.kind.to_numpy()).sum() / (mine.end - mine.begin).sum()
    shares = pd.DataFrame(rows).T.fillna(0)
    return shares.assign(other=1 - shares.sum(axis=1)).map("{:.0%}".format)


plot.recorded("33_backward_wgmma", "roles", meanwhile, by=by)


# %%
def lag(events):
    """By how much of a step consumer 1 begins its dS behind consumer 0, the median."""
    found = {}
    for D, of_D in events[events.kind == "dS"].groupby("D"):
        first, second = (of_D[of_D.lane == f"consumer {n}"].begin.to_numpy() for n in (0, 1))
        behind = [now - first[first <= now].max() for now in second if first[0] <= now]
        found[D] = np.median(behind) / np.median(np.diff(first))
    return pd.Series(found, name="behind, of a step").rename_axis("D").map("{:.0%}".format).to_frame()


plot.recorded("33_backward_wgmma", "roles", lag, by=by)

# %% [markdown]
# **What to see.** To start products takes each consumer about two fifths of its time: that is where it is held up. Consumer 1 forms its $dS$ about a quarter of a step behind consumer 0, not half of one; so what one does is covered by the other unevenly. While consumer 1 forms its $dS$, consumer 0 is starting products for nine tenths of the time. The other way round it is a quarter at $d = 64$ and less at $d = 128$: consumer 1 is still at the $dQ$ of the step before, which it waits for and writes, or on its way into the next step (`other`, which has no name in the notes). Consumer 0's exponentials lie for the most part under what consumer 1 starts. More than half of consumer 1's don't: there consumer 0 has come to its $dQ$, or waits, and only what consumer 1 has started itself can still be running.
#
# ## 5 · Under whose products?
#
# `wgmma` only starts a product, and in principle a warpgroup can start several and compute under them, all by itself. The header block says what became of that on the card, and what the kernel does instead (the table of drafts further down has the numbers):

# %%
print(kernel.rung.idea)

# %%
show.region("33_backward_wgmma", "turns")

# %% [markdown]
# So the order of the loop is everything, and the compiler may move things. What came out stands in the machine code: each product from its first `HGMMA` to the wait that covers it (`WARPGROUP.DEPBAR`), and between them what the threads do.

# %%
done = {d: draw_backward.work(lines, found[d]) for d, lines in loops.items()}
draw_backward.program(
    found[64], done[64], len(loops[64]), "One step of the loop in the order of its machine code, d = 64"
)

# %%
draw_backward.program(found[128], done[128], len(loops[128]), "The same, d = 128")

# %%
under = pd.concat(
    {f"d = {d}": w.groupby("kind").under_way.value_counts().unstack(fill_value=0) for d, w in done.items()}, axis=1
)
under.fillna(0).astype(int).rename_axis(columns=["", "products under way"])

# %% [markdown]
# **What to see.** Time is not to scale: an instruction is an instruction. A step has two halves. In the first, $dP$ and $dV$ are started, and $dS$ is computed as soon as $dP$ is there, under $dV$. In the second, $S$ of the next step, $dK$ and $dQ$ are started, and the exponentials wait for $S$ alone. Orange is work under which no product *of this warpgroup* runs; column 0 of the table counts it. There the other one's products would have to keep the tensor cores busy: it follows one turn of the token later, or is one ahead. The clocks of section 4 show how far that goes. While consumer 1 writes its $dQ$, consumer 0 starts $dP$ and $dV$ of its next step, or forms $dS$ under $dV$. While consumer 0 writes its own, consumer 1 is at its exponentials and starts nothing: nearly all of that time at $d = 64$, a third of it at $d = 128$.
#
# The long empty stretch is the mask, which runs only in tiles that need it. What the picture can't say is *how long* anything takes. If a product is done long before its wait, the tensor cores are idle in spite of it; and if they are still at an earlier one, a warpgroup that starts the next is held up. That is what the clocks of section 4 are for: long boxes of "starts products" or of a wait mean that the tensor cores (or the other one's turn) are the narrow place, boxes of the threads' own work that they are not.

# %% [markdown]
# ## The kernel
#
# The region `tile` has the tile's shape and the map of shared memory drawn above:

# %%
show.region("33_backward_wgmma", "tile")

# %% [markdown]
# The producer. $K_j$ and the first $Q_i$ report to the same mbarrier, $V_j$ and the first $dO_i$ to another: $S$ can begin while $V$ and $dO$ are still on their way. LSE and delta of the tile's rows come with them, as plain bulk copies.

# %%
show.region("33_backward_wgmma", "producer")

# %%
show.region("33_backward_wgmma", "products")

# %%
show.region("33_backward_wgmma", "scores")

# %% [markdown]
# And the loop, from one product to the next: a function of a step, compiled once for steps that have a next one and once for the last. Read it beside the figure of section 5:

# %%
show.region("33_backward_wgmma", "tile_loop")

# %% [markdown]
# The warpgroup's number comes from a vote, `__any_sync`, which looks odd. Descriptors live in *uniform* registers, one value for a whole warp. Of a number computed from `threadIdx` the compiler doesn't know that it is the same in all lanes; of the result of a vote it does. Predict, with `threadIdx.x / 256` instead: how many more instructions of a step move a value to a uniform register (`R2UR`)?

# %%
vote, rows, rungs = "__any_sync(0xffffffff, threadIdx.x >= 256)", {}, {}
for d in (64, 128):
    one = single("33_backward_wgmma", d)
    rungs |= {(d, "by vote"): one, (d, "from threadIdx"): replace(one, source=one.replace(vote, "threadIdx.x / 256"))}
compile_ahead(rungs.values(), "sass")
for (d, way), one in rungs.items():
    counts = sass.opcodes(one, D=d, loop=True, kernel="backward_wgmma")
    rows[d, way] = {"R2UR": counts["R2UR"], "all": counts.sum()}
pd.DataFrame(rows).T.rename_axis(["d", "instructions of a step"])

# %% [markdown]
# By vote not one of them is for a descriptor: the one that is left at $d = 64$ moves the place of an mbarrier.
#
# ### Who gets which tile
#
# A CTA has 128 keys of one *query* head. Under a causal mask the first keys are seen by all queries and the last by few, so that tiles are of very different length. As in notebook 20 the longest come first, of 16 heads at a time. With as many heads as have $Q$ and $dO$ in 32 MB (step 15 of the table below) it was slower at $N = 1024$, by a tenth at $d = 64$, and not at longer ones; more bytes than the L2 holds would explain it.
#
# Several query heads may share $K$ and $V$. Then one CTA could go through the queries of all of them, and sum up their $dK$ and $dV$ in registers; an earlier version did. What is wrong with that? A model, as in notebook 31: an SM takes one tile after the other, and a tile takes as long as it has queries. The share of the time for which an average SM has work, under a causal mask:


# %%
from helpers import schedule


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
    rows[f"B = {B}, {H} heads on {Hkv}, N = {N}"] = pd.concat(
        {"a CTA for all": pd.Series(shared), "own CTAs": pd.Series(own)}
    )
pd.DataFrame(rows).T

# %% [markdown]
# **What to see.** The order alone mends most of it where there are CTAs enough. In the first row there are 64, for 132 SMs, and no order helps. So each query head has CTAs of its own. They write $dK$ and $dV$ into the workspace, in 16 bits, and a last kernel adds them up, always in the order of the heads:

# %%
show.region("33_backward_wgmma", "add_heads")

# %% [markdown]
# On the H200, as a ratio to SDPA CUDNN under a causal mask: the first row went from 0.55 to 1.42 at $d = 64$. The second, $d = 64$ too, went from 1.01 to 1.5 by the order alone, 1.59 in another run, and *back* to 1.42: its SMs had been busy already, and four times as many CTAs load $K$ and $V$ and write $dK$ and $dV$, which a last kernel reads again. The third went from 1.11, by the order, to 1.23 at $d = 128$. (Noted in the reasons of steps 12 and 14 of the table below.)

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %%
plot.recorded("33_backward_wgmma", "error", plot.error)

# %% [markdown]
# ### Where it is wrong
#
# Two wrong descriptors. Before you look: which gradients break, and in which rows, if
#
# 1. the second warpgroup's rows of $K$ and $V$ are looked for 4096 bytes into the tile, not 8192 (a start address that is wrong by half);
# 2. $K$ as operand $A$ of $dQ^\top$ is read K-major?

# %%
from helpers import draw_proof

bugs = {
    "start address": ("half * 64 * 128)", "half * 64 * 64)"),
    "major": ("fa::wgmma_mma_async<T, 1, 0>(dQ_reg", "fa::wgmma_mma_async<T, 0, 0>(dQ_reg"),
}
torch.manual_seed(0)
q, do = (torch.randn(1, 1, 192, 64).half() for _ in range(2))
k, v = (torch.randn(1, 1, 256, 64).half() for _ in range(2))
case = Case("192 x 256", q, k, v, do=do)
maps, texts = {}, {bug: source.replace(old, new) for bug, (old, new) in bugs.items()}
compile_ahead(texts.values(), "run")
for bug, text in texts.items():
    report = check(load(source=text, device="cpu", quiet=True), [case])
    maps |= {f"{bug}: d{c.output[1].upper()}": c for c in report.comparisons}
draw_proof.gallery(maps, columns=3)

# %% [markdown]
# **What to see.** Rows of $dQ$ are queries, rows of $dK$ and $dV$ are keys.
#
# 1. The second warpgroup's $P$ and $dS$ belong to keys 32 to 95 of the tile, and it adds them to $dK$ and $dV$ of keys 64 to 127. Those rows are wrong, of both tiles, and the first warpgroup's are right. $dQ$ sums over all keys, so all of it is wrong.
# 2. $dQ$ alone. A descriptor has no type and no bounds: it finds numbers wherever it points. As long as they have arrived there, only the result can tell.
#
# ### A wait that never ends
#
# And a bug in the bookkeeping. The mbarrier `Q_full` is told how many bytes will come: $Q_i$, LSE, and with the first ones $K_j$. Suppose we forget "with the first ones", and expect $K_j$'s bytes every time. What does the kernel do?

# %%
expected = "expect_tx(Q_full, C::q_bytes + C::stats_bytes + (step == 0 ? C::kv_bytes : 0))"
forgetful = source.replace(expected, "expect_tx(Q_full, C::q_bytes + C::stats_bytes + C::kv_bytes)")
try:
    load(source=forgetful, device="cpu", quiet=True)(*case.inputs)
except Exception as error:
    print(error)

# %% [markdown]
# **What to see.** Who waits, on which line, for which phase of which mbarrier, and how many bytes are missing: as many as $K_j$ has. On a GPU the kernel would hang, and say nothing.

# %% [markdown]
# ## Predict, then measure
#
# ### Products
#
# One head, $N = 256$, $d = 64$ again. How many `wgmma` instructions, counted by warps? Two tiles of keys; in each step and for each of two warpgroups $d / 16$ for $S$ and for $dP$, $B_r / 16$ for $dV$ and for $dK$, and 8 for its half of $dQ$.

# %%
Br = draw_backward.constants(source.source, 64)["Br"]
steps = 2 * -(-256 // Br)
predicted = steps * 2 * 4 * (2 * 64 // 16 + 2 * Br // 16 + 128 // 16)
counted = {stem: pd.Series(ray.trace.instructions) for stem, ray in rays.items()}
wgmma = counted["33_backward_wgmma"]["wgmma.mma_async"]
print(f"{steps} steps; wgmma: predicted {predicted:,}, counted {wgmma:,}")

# %% [markdown]
# $S$ is started a step ahead: the first one before the loop, and the last step starts none. A branch around it in the loop would cost more than one $S$ too many: `ptxas` then lets no two products overlap (its warning C7515). So the body is in the code twice. (Steps 13 to 15 of the table below have one loop, whose last step starts an $S$ that nobody reads: a quarter less to compile, and one product of $5 \cdot \text{steps} + 1$ for nothing.)
#
# ### What is left to do for the threads
#
# Both kernels on the same head. What do warps do? Four numbers become 0. Which, and does any grow?

# %%
both = pd.DataFrame(counted).fillna(0).astype(int)
both.loc[both.max(axis=1) > 60].sort_values("23_backward_mma", ascending=False)

# %% [markdown]
# Gone are `mma.sync` and `ldmatrix`, gone are copies of 16 bytes per thread (`cp.async`: here one thread asks for whole tiles), gone are atomic additions. What is left is what *has* to be done by threads: LSE and delta read, $dS$ written, $dQ$ on its way out. `ld.shared` has grown: a warp holds 16 keys here, 32 in rung 23, and each warp reads LSE and delta of all queries.
#
# ### Shared memory

# %%
shared = frames["33_backward_wgmma"].query("space == 'shared'").sort_values("cost", ascending=False)
shared[["region", "op", "width", "requests", "cost", "ideal", "excess"]].head(8)

# %% [markdown]
# `cost` are wavefronts, `ideal` those of the same requests without bank conflicts: there are none. That is not all, for `wgmma` and TMA use the same memory, and the X-ray doesn't know in which portions. But *how much* an instruction reads is known: $16 N$ numbers of $B$ and, if $A$ lies in shared memory, $64 \cdot 16$ more. An SM's shared memory delivers 128 bytes per clock, and its tensor cores do 2048 multiply-adds of 16-bit numbers per clock (NVIDIA H100 Tensor Core GPU Architecture: four of them, 512 each). A model of one step, both warpgroups, in clocks. Predict which of the two is busier:

# %%
loads = shared[(shared.op == "load") & shared.kernel.str.startswith("backward")].cost.sum()  # of LSE and delta
per_query, tables = loads / steps / Br, {}
for d, frame in found.items():
    columns = frame["shape"].str.split("x").str[1].astype(int)
    twice = 2 * frame["instructions"]  # of both warpgroups
    read = twice * 2 * 16 * (columns + 64 * (frame["A"] != "registers"))  # bytes
    table = pd.DataFrame({"tensor cores": twice * 64 * columns * 16 / 2048, "shared memory": read / 128})
    table.index = frame["name"]
    Br = draw_backward.constants(source.source, d)["Br"]
    table.loc["Q, dO arrive"] = 0, 2 * 2 * Br * d / 128
    table.loc["LSE, delta are read"] = 0, per_query * Br
    table.loc["dS is written"] = 0, 2 * Br * 128 / 128
    table.loc["dQ is written and fetched"] = 0, 2 * 4 * Br * d / 128 if bars[f"d = {d}"].get("dQ") else 0
    table.loc["all"] = table.sum()
    tables[f"d = {d}"] = table
pd.concat(tables, axis=1).astype(int)

# %% [markdown]
# **What to see.** Products with $A$ from registers ask for half as many clocks of shared memory as of the tensor cores. Those with both operands in shared memory ask for more, the more the fewer columns they have: each number of $A$ is used once per column. Add what threads and copies do (LSE and delta as the X-ray has counted them at $d = 64$: transposed, a query is a column, and every warp reads all of them), and compare the last line: it is shared memory, not the tensor cores, that has more to do, and their quotient is the share of the tensor cores' rate that even a perfect order could not exceed. A kernel that keeps $P$ and $dS$ in registers saves two operands of five products; more queries per step would save more. (It is a model: it takes for granted that every byte moves at full width, once.)

# %% [markdown]
# ### Bytes by tensor
#
# How often is each byte of the inputs asked for in HBM or L2? Predict: $N / 128 = 2$ tiles of keys, each of which walks over all queries; and the kernel that forms delta.

# %%
reads = pd.DataFrame({stem: ray.tensors.bytes_read / ray.tensors.size_bytes for stem, ray in rays.items()})
reads.loc[["Q", "K", "V", "O", "dO"]].round(2)

# %% [markdown]
# $K$ and $V$ once, $Q$ and $dO$ once per tile of keys, $O$ and $dO$ once for delta: as in rung 23. Nothing of what Hopper brings here saves bytes of HBM.

# %% [markdown]
# ## Beside its peers
#
# FLOPs are counted as $10 B H N^2 d$, half of it under a causal mask. SDPA FLASH is FlashAttention-2's own backward pass, SDPA CUDNN is cuDNN's, written for Hopper. FA3 and FA4, FlashAttention-3 and -4, ran in the same process.

# %%
plot.recorded("33_backward_wgmma", "backward", lambda x: plot.throughput(x[x.causal == 0]))


# %%
def beside(causal):
    def draw(samples):
        names = set(samples["name"])
        peers = [peer for peer in ("SDPA FLASH", "SDPA CUDNN", "FA3", "FA4") if peer in names]
        return plot.ratio(samples[samples.causal == causal], "33_backward_wgmma", peers)

    return plot.recorded("33_backward_wgmma", "backward", draw)


beside(causal=0)

# %%
beside(causal=1)


# %%
def summaries(samples):
    peers = [peer for peer in ("SDPA CUDNN", "FA3", "FA4") if peer in set(samples["name"])]
    return pd.concat({peer: record.summary(samples, "33_backward_wgmma", peer) for peer in peers})


plot.recorded("33_backward_wgmma", "backward", summaries)

# %% [markdown]
# The columns: how many times as long as ours each peer takes, as the geometric mean over the shapes with $N \ge 1024$, the lowest and the highest of those, and the worst of *all* recorded shapes with its place. We are ahead of cuDNN at every one of them. With FlashAttention-3 and -4 it is a draw where sequences are long: the means are a few percent ahead or behind. At $N = 512$ FlashAttention-4 is ahead, most at $d = 64$ under the mask; at $d = 128$ under the mask it is level.
#
# ### What helped, and what did not
#
# Drafts, what is different in each, why it was tried or what came of it, and what it reached as a ratio to SDPA CUDNN; the ones that brought nothing stay in the list. Cover the columns of numbers and guess.


# %%
def drafts(steps):
    display(record.step_table(steps).style.format(precision=2, na_rep=""))
    return draw_backward.drafts(steps, "Times as fast as SDPA CUDNN, backward, geometric mean over N ≥ 1024")


plot.recorded("33_backward_wgmma", "steps", drafts)

# %% [markdown]
# **What to see.** The largest steps at $d = 128$ are the first ones; at $d = 64$ they are another order (3) and step 10, a tenth each, and then the turns (8), 7 %. What the steps that stayed change is when a tile comes and when a product starts. Step 10 goes on from step 8: with 128 queries per step at $d = 64$, and with warps of their own that send $dQ$ (10); how much of the difference each of these two brought was not measured apart. That every thread gives a place back (11), and not one for its warpgroup behind a barrier, costs a percent at $d = 128$ and buys that NVIDIA's own tool can follow: racecheck takes an arrival at an mbarrier to speak for the thread that arrives, and nobody else. (Its sister initcheck still reports what `add_heads` reads: the version we ran doesn't see what TMA writes, notebook 92.) Step 12 is for a causal mask: the longest tiles first. With one it has 4 % more than step 11, and without one, where it changes nothing, 3 %: so far apart are two runs, and what the order is worth is seen better with grouped queries ("Who gets which tile"). Step 13 is a simpler loop, not a faster one. What step 14 is for, grouped queries, the table's shapes don't have. Step 15 starts from 12 again.
#
# The rung is step 14 with three changes, measured beside FlashAttention-3 in one process (bf16, geometric means over $N \ge 1024$ of its time over ours; $d = 64$, causal, $d = 128$, causal). The sums of $S$ begin with $-\mathrm{LSE} / \text{scale}$, the last step starts no $S$, and at $d = 128$ $dS$ is formed from $P$ in fp32. Together: from 0.955, 0.935, 0.97, 0.96 to 0.975, 0.954, 1.01, 0.99. Reading LSE has moved from behind the wait for $S$ to in front of a turn, where a warpgroup waits anyway.
#
# What brought nothing: one arrival per warp at the mbarriers, heads from the last to the first, sets of 4 to 64 heads instead of 16, $P$ rounded before the wait for $dQ$. FlashAttention-3's order ($S$, $dP$, then $dV$, $dQ$ and $dK$ of the same step, no next $S$, no turns) was slower: 0.93, 0.91, 0.91, 0.90. And **no turns at all**: 0.98, 0.95, 1.02, 1.00. That is as fast as the rung, or faster by a percent. They gained 7 % at $d = 64$ when they came (step 8); by now they gain nothing, and the rung keeps them only because this notebook's figures show them. **One CTA per SM that goes from tile to tile of keys**, as in notebook 32: 2 to 4 % up to $N = 1024$ at $d = 64$, nothing elsewhere. **$dQ$ rounded by an idle warp of the same kernel**, once all shares are added: it saves the 47 µs of `finish` (and at $d = 64$, $N \le 2048$ gains 4 %), but somebody has to count the shares, which costs the warps that send them more than a step's time at $d = 128$: up to 11 % slower. All of these ran at the power limit of 700 W, FlashAttention-3 at 1755 MHz and the rung at 1815.
#
# ## What still hurts
#
# 1. **One CTA per SM, and two warpgroups that wait for each other** several times in a step. Whoever is late makes the other late, and no third one fills in: consumer 1's exponentials lie mostly under nothing that consumer 0 starts (section 4).
# 2. **Registers.** $dK$ and $dV$ take their share for the whole loop. More queries per step would mean fewer barriers and fewer bytes per product; there is no room for them, in shared memory either (exercise 33.2).
# 3. **Shared memory has more to do than the tensor cores** (the model above).
# 4. **$dQ$ in fp32**: each tile of keys sends $4 d$ bytes per query to the L2, the same share of the work at any length.
# 5. **Small kernels**: one before and one after, and a third where heads share $K$ and $V$. They weigh most where sequences are short.

# %% [markdown]
# ## Exercises
#
# ### Exercise 33.1 · A descriptor by hand
#
# $d = 128$: a tile of $K$ (128 keys) lies in shared memory from address 0, as TMA leaves it: two panels of 64 columns, one behind the other, 128 bytes to a row. Warpgroup 1 computes columns 64 to 127 of $d$ of $dQ^\top = K^\top dS^\top$. Give the descriptor of its operand $A$, (64, 16), for keys 48 to 63.

# %%
# Exercise 33.1
mine = fragments.Descriptor(start=0, leading=16, stride=1024, swizzle=128)
mine_is_mn_major = False


# %%
def lies_there():
    for column in range(64):
        for key in range(16):
            panel, line = 16384, 48 + key  # bytes to the second panel; the key's row in it
            place = fragments.swizzled(panel + 128 * line + 2 * column, 128)
            said = mine.address(mine_is_mn_major, column, key)
            assert said == place, f"key {48 + key}, column {64 + column} of d lies at {place}, not at {said}"
    return True


exercise.verify(
    "33.1", lies_there, hint="k is keys: do they run along the rows of the tile? How many bytes are 48 rows?"
)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The first 16 keys of the second panel begin at $128 \cdot 128$ bytes. Each further 16 keys are 16 rows of 128 bytes.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# mine = fragments.Descriptor(start=128 * 128 + 3 * 2048, leading=16, stride=1024, swizzle=128)
# mine_is_mn_major = True
# ```
#
# `leading` would only be used by an operand of more than 64 columns; any number does.
#
# </details>

# %% [markdown]
# ### Exercise 33.2 · How many queries
#
# A step of more queries needs fewer barriers, and uses each number of $K$ and $V$ more often. Suppose registers were no limit: how many queries per step (a multiple of 16) fit into shared memory at $d = 64$, and how many at $d = 128$? And how many registers per lane would $S$, $dP$ and the fragments of $P$ and $dS$ then take?

# %%
# Exercise 33.2
most_queries = {64: 112, 128: 112}
registers_for_them = {64: 168, 128: 168}


# %%
def fits():
    for d in (64, 128):
        limit, Br = draw_backward.SMEM_LIMIT, most_queries[d]
        need = [draw_backward.constants(kernel.rung.source, d, Br=n)["smem_bytes"] for n in (Br, Br + 16)]
        assert Br % 16 == 0 and need[0] <= limit, f"d = {d}: {Br} queries need {need[0] / 1024:.0f} KB"
        assert need[1] > limit, f"d = {d}: {Br + 16} queries would fit, too"
        assert registers_for_them[d] == 2 * (64 * Br // 128) + 2 * (64 * Br // 2 // 128), f"d = {d}: registers"
    return True


exercise.verify("33.2", fits, hint="which parts of shared memory grow with Br, and by how many bytes per query?")

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# `draw_backward.constants(kernel.rung.source, 64, Br=160)["smem_bytes"]` does the sum for 160. An accumulator of 64 × `Br` takes `Br` / 2 registers per lane, its fragments half of that.
#
# </details>
# <details>
# <summary>Solution</summary>
#
# ```python
# def need(d, Br):
#     return draw_backward.constants(kernel.rung.source, d, Br=Br)["smem_bytes"]
#
#
# most_queries = {d: max(n for n in range(16, 257, 16) if need(d, n) <= 227 * 1024) for d in (64, 128)}
# registers_for_them = {d: Br + Br // 2 for d, Br in most_queries.items()}
# ```
#
# They are the kernel's own: shared memory is full with them. With $d$ more registers for $dK$ and $dV$ it is 224 at $d = 128$ and 256 at $d = 64$; a lane of a consumer has 240. At $d = 64$ they are enough because $P$ isn't kept in fp32 while $dP$ is there (section 4).
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
    "dK and dV sent without a fence": ("  fa::fence_proxy_async();\n  fa::bar_sync(own", "  fa::bar_sync(own"),
}

# %%
# Exercise 33.3
outcome = dict.fromkeys(breaks, "wrong")


# %%
def found_out():
    compile_ahead([source.replace(old, new) for old, new in breaks.values()], "run")
    for bug, (old, new) in breaks.items():
        run = load(source=source.replace(old, new), device="cpu", quiet=True)
        report = check(run, [case]).comparisons
        seen = "stop" if len(report) < 3 else "wrong" if not all(c.ok for c in report) else "right"
        seen = "reported" if seen == "right" and xray(run, *case.inputs).findings else seen
        assert outcome[bug] == seen, f"{bug}: not {outcome[bug]!r}"
    return True


exercise.verify(
    "33.3",
    found_out,
    hint="late bytes and early reads are told at once; what happens to be right may still be unordered",
)

# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# The emulator's copies are as late as their waits allow. Reads of bytes that a copy may still be writing stop the kernel; the order of threads and ways is checked by the X-ray.
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

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
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
# Shares of dQ are added up in the L2 in the order in which CTAs come. Asked for `deterministic`, they wait for each other. dK and dV of a query head are summed up by one CTA, and those of heads that share K and V in the order of the heads.
#
# </details>
# <details><summary>6. How would you find out whether exponentials run under a product?</summary>
#
# Look where they stand in the machine code, between which product's start and its wait; then at the clocks.
#
# </details>
#
# **References**: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/), "Asynchronous Warpgroup Level Matrix Instructions", "Async proxy" and "Data Movement and Conversion Instructions" (cp.reduce.async.bulk); [FlashAttention-2](https://arxiv.org/abs/2307.08691), Algorithm 2; [FlashAttention-3](https://arxiv.org/abs/2407.08608); NVIDIA H100 Tensor Core GPU Architecture (white paper).
