# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 51 · Attention across GPUs in one kernel
#
# [← 50 · Attention across GPUs](50_ring.ipynb) | [51_one_sided.cu](../kernels/51_one_sided.cu) | [glossary](glossary.md) | [90 · Proving it right →](90_proving_it_right.ipynb)
#
# **After this notebook you can**
# - read another GPU's memory from a kernel, and predict from bytes when that is slow;
# - pass data between CTAs and between GPUs by flags, with the release, the acquire and the fence that each needs;
# - say why a kernel whose CTAs wait for each other cannot hang;
# - find a missing wait with the X-ray.
#
# **Time** 45 minutes.
#
# **Needs** [50 · Attention across GPUs](50_ring.ipynb) for the problem and zigzag, [32 · Ping-pong](32_ping_pong.ipynb) for the kernel that is extended. No GPU: in every cell all ranks run on the emulator, in one process, one after the other; what GPUs did is recorded.
#
# **The idea in one line**: some CTAs fetch the other GPUs' keys into this GPU's memory, each byte once, and set a flag for every tile; the rest attend to their own keys first and then to each tile as its flag is set.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import torch

from helpers import compare, load, reference, show, xray
from helpers import checks, draw_ring, exercise, one_sided, predict, progress, ring

torch.manual_seed(0)
kernel = load("51_one_sided", device="cpu")
q, k, v = (torch.randn(1, heads, 512, 64).half() for heads in (2, 1, 1))  # of the whole sequence

# %% [markdown]
# ## The problem
#
# The ring of notebook 50 is several kernels per step: attention, a transfer by NCCL, a merge. Each has to be launched, a message takes tens of microseconds to begin, and NCCL's copies go through buffers of their own. For short sequences this is what counts.
#
# On one host there is another way. The GPUs are connected by NVLink, and a kernel can *read the other GPU's memory* by an ordinary pointer, as if it were its own. So hand [rung 32](32_ping_pong.ipynb) K and V of the other GPU. No line of it changes: TMA takes any address. But it is many times slower.
#
# Every CTA has one tile of queries and reads *all* keys. On one GPU the L2 cache serves these reads. But lines of another GPU's memory are not kept in this GPU's L2, so every read crosses the link again. How often is each byte read? The X-ray counts it, on the emulator: 512 queries, two heads that share one head of keys, tiles of 192 queries.

# %%
times_read = ...  # your prediction: how often rung 32 reads each byte of K

# %% tags=["reveal"]
seen = xray("32_ping_pong", q, k, v)
predict(times_read, seen.tensors.loc["K", "bytes_read"] / (k.numel() * 2), "times each byte of K is read")

# %% [markdown]
# Three tiles of queries in each of two heads read it. Now predict the speed. For a tile of $B_r$ queries, each key of $d$ elements costs $4 d$ bytes (K and V, 16 bits) and brings $4 B_r d$ FLOPs: **$B_r$ FLOPs per byte**, whatever $d$ is. Rung 32 has $B_r = 128$ at $D = 128$, and 192 at $D = 64$. A plain copy, timed once on two H200s, moved 394 GB/s over the link, each way.

# %%
tflops = ...  # your prediction: TFLOP/s at D = 128 if every key comes over a link of 394 GB/s

# %% tags=["reveal"]
predict(tflops, 128 * 394e9 / 1e12, "TFLOP/s by the bytes")
print(f"D = 64, Br = 192: {192 * 394e9 / 1e12:.0f} TFLOP/s by the bytes. As recorded on two H200s:")
draw_ring.direct_reads()

# %% [markdown]
# The bytes explain all but a sixth of it: these reads move 332<!--= 4 * 16 * 8192**2 / 1e6 / record.load("51_one_sided", "link", "nvidia-h200-x2").query("name == 'read directly' and D == 128 and N == 16384").ms.median():.0f --> GB/s, not 394. At $D = 128$ that is 19<!--= tflops("32", 128, 8192, 0, "bf16") * 1e9 / (4 * 16 * 8192**2 * 128) * record.load("51_one_sided", "link", "nvidia-h200-x2").query("name == 'read directly' and D == 128 and N == 16384").ms.median():.0f --> times slower than with its own keys. At 788<!--= tflops("32", 128, 8192, 0, "bf16"):.0f --> TFLOP/s, each byte that crosses the link has to serve 2,000<!--= round(tflops("32", 128, 8192, 0, "bf16") * 1000 / 394, -2):,.0f --> queries, not 128: it has to cross *once* and then be read from this GPU's own memory.
#
# ## 1 · A copy, and flags
#
# A copy made by a kernel before the attention kernel would do, but then the tensor cores wait for the link. Instead one kernel does both. Its grid is persistent, one CTA per SM, as in 32:
#
# - The first few CTAs are **copiers**. One thread of each fetches tiles of the other GPUs' K and V by TMA (`cp.async.bulk`: a run of bytes, without tensor map or swizzle) into shared memory, and stores them the same way into a buffer in this GPU's memory (`near_K` and `near_V`). When a tile is complete, it sets the tile's [flag](glossary.md#flag), a word in global memory. When it has copied its share, a copier becomes an ordinary CTA.
# - **All other CTAs** start at once, with the keys that this GPU has. The producer warp asks for tiles of other GPUs after those, and waits for each one's flag first. The consumers do not know where a tile comes from. Tiles are taken from the last key to the first (32 takes some of them earlier). The kernel numbers other ranks' keys below the rank's own, wherever they stand in the sequence, so they come last. Every query that takes them sees them all: no mask is needed there. The consumers need only new bounds.
#
# Which keys, in which order? Those of the ring: its own, then those of the rank before, and so on. Under a causal mask in zigzag, a rank has two pieces of the sequence, and they see different keys. All heads' late pieces come first, as they see most; the short tiles of the early pieces then fill the gaps at the end.

# %%
draw_ring.wanted(rank=1, ranks=4)

# %% [markdown]
# **What to see.** Queries of the late piece (6, of 0 to 7) come first, and take all that the rank copies. What the early piece (1) needs is copied first. Of rank 0 only the first half is fetched at all: nobody here sees the rest.
#
# Instead of a merge, one kernel goes through all keys: $O$ stays in registers until the last of them, and is rounded once.
#
# ## 2 · What a flag has to say
#
# A flag is a word that one thread writes and another reads in a loop. That is not enough. Compilers and GPUs may reorder memory accesses: the flag may become visible *before* the data that it speaks of. Three things prevent that:
#
# | | where | what it does |
# |---|---|---|
# | `st.release` (`publish_…`) | the writer | what this thread wrote or has waited for is visible before the flag is |
# | `ld.acquire` (`await_…`, `is_set_…`) | the reader | what it reads afterwards is at least as new as the flag |
# | `fence.proxy.async` (`…_global`) | the reader, before TMA | ordinary accesses and TMA reach memory on different paths, *proxies*; the fence orders the one after the other |
#
# Each has a **scope**: `.gpu` for CTAs of one GPU, `.sys` for all GPUs. And before it sets the flag, the writer must know that its copy is complete: TMA only *starts* a store. `cp.async.bulk.wait_group` waits until it has arrived in memory. (`wait_group.read` waits only until shared memory has been read, which is too early here.)
#
# The kernel has two kinds of flags:
#
# - **arrived**, one per tile, `.gpu`: this tile is in this GPU's memory.
# - **signals** between GPUs, `.sys`. *Ready*: a rank's K and V have been written, the others may read them. *Done*: a copier has read all that it needs, so the owner may overwrite them. Each rank writes its signals into the *other* rank's memory, because polling your own memory is cheap.
#
# No flag is ever reset. Its value is the **epoch**, the number of the call, and a reader waits until the flag is at least that.
#
# Each look at a flag is a trip to the L2, and the producer makes one for every tile of keys. So after each tile of queries the producer asks once whether *all* copies are there: a copier sets its flags one after the other, hence the last flag of each copier speaks for all before it. From then on it needs no flag.

# %% [markdown]
# ## The kernel
#
# The copier's loop. `slots` tiles are on their way at a time: while one is stored, the next ones cross the link.

# %%
show.region("51_one_sided", "copy")

# %% [markdown]
# The producer. `fetch` is that of rung 32, but $K$ comes with its $V$, not a tile ahead; thread 0 also chooses the query tiles and fetches $Q$; new are the copiers' part at the top and the second loop.

# %%
show.region("51_one_sided", "producer")

# %% [markdown]
# Telling the other GPUs, and waiting for them:

# %%
show.region("51_one_sided", "signals")

# %% [markdown]
# **Can it hang?** A CTA that waits for another one is safe only if the other is sure to run. Here every CTA of the grid fits on the GPU at once: there are no more CTAs than SMs. Besides, copiers have the lowest indices, and in practice blocks are placed in that order (CUDA does not promise it). Copying waits only for *ready*, which every rank's kernel says as its very first act. So all copiers finish, then all flags are set, then all others finish. Only then does CTA 0 wait for *done*.
#
# ## Run and check
#
# A `Room` is what a rank keeps from call to call: K and V where others can read them, the buffer, the flags. On GPUs `one_sided.share` takes [symmetric memory](https://docs.pytorch.org/docs/stable/symmetric_memory.html) of PyTorch for them. Here all ranks live in one process and take turns: all say that they are ready, then each attends, then each waits for done.

# %%
ranks = 2
queries, keys, values = ([ring.local(x, r, ranks, "zigzag") for r in range(ranks)] for x in (q, k, v))
rooms = one_sided.rooms(keys, values, causal=True)
results = one_sided.together(queries, rooms)
o = ring.whole([o for o, _ in results], "zigzag")
lse = ring.whole([lse[..., None] for _, lse in results], "zigzag")[..., 0]
for found in compare(reference.Case("two ranks", q, k, v, causal=True), (o, lse.contiguous())):
    print(f"{found.output.upper():3} error {found.error:.1e}, {found.used:.0%} of the budget")

# %% [markdown]
# On two GPUs it is this, in each rank's process (`room.k` can also be where a model writes its keys in the first place, which saves the copy):
#
# ```python
# plan = ring.agree(q, k, v, group, causal=True, layout="zigzag")
# room = one_sided.share(k, plan)
# o = one_sided.attention(q, k, v, room)   # with a gradient: the backward pass is the ring's
# ```
#
# ## Predict, then measure
#
# Rank 0 of 2 in zigzag sees all 256 keys of rank 1, with its late piece of 128 queries in two heads. Each byte of them crosses the link once, into `near_K`. How often is it read there? (Tiles of queries have 192 rows.)

# %%
times_read_near = ...  # your prediction: times each byte of near_K is read

# %% tags=["reveal"]
seen = one_sided.xrayed(queries, rooms)
moved = seen.tensors[["bytes_read", "bytes_written"]]
predict(
    times_read_near, moved.loc["near_K", "bytes_read"] / moved.loc["near_K", "bytes_written"], "times near_K is read"
)
moved.loc[["peer_K[1]", "near_K", "K", "arrived", "signals[0]", "signals[1]"]]

# %% [markdown]
# `peer_K[1]` is rank 1's tensor, `near_K` the copy, read by every tile of queries that sees it: this is what the L2 is for. `signals[1]` lies in rank 1's memory: rank 0 has written *done* there.
#
# How many CTAs should copy? Each has about 192 KB of shared memory for tiles on their way. By Little's law, bytes on their way = bandwidth × latency. If a tile takes 3 µs from the request to its flag, an assumption, how many copiers fill a link of 390 GB/s, at least?

# %%
copiers = ...  # your prediction: copiers that fill the link

# %% tags=["reveal"]
predict(copiers, 390e9 * 3e-6 / 196608, "copiers, at least")

# %% [markdown]
# That is a lower limit: a CTA's TMA unit has a limit of its own, and a slot is not refilled before its store has ended. [ParallelKittens](https://arxiv.org/abs/2511.13940) reports 15 SMs to saturate NVLink with TMA. As recorded:

# %%
draw_ring.recorded_link()

# %% [markdown]
# **What to see.** At $D = 128$, 16 copiers reach 306<!--= copied(16, 128, 16384):.0f --> GB/s, and more of them hardly more (24: 308<!--= copied(24, 128, 16384):.0f -->). At $D = 64$ it takes 24: a pair of tiles costs a copier 1.9 to 2.8 µs there, and with twice the bytes, at $D = 128$ with up to 12 copiers, only 2.3 to 3.1. With six pairs on their way (three at $D = 128$), a tile takes 7 to 17 µs from the request to its flag, not 3. The default is 16 of 132 SMs.
#
# For the whole call the number hardly matters, within 3 % on two GPUs: while they copy they do not attend, but copying takes a short time. For $n$ tokens per rank without a mask, attention takes $4 n \cdot 2n \cdot HD$ FLOPs and copying $4 n HD$ bytes, so with two GPUs at 700 TFLOP/s and 300 GB/s the ratio is $1170 / n$. At $n = 8192$ that is 14 % of the time, of 12 % of the SMs: less than 2 %. Under a mask it is twice as much, as there is half the work.
#
# ## Beside its peers
#
# Against the ring of notebook 50, this kernel saves launches, merges and the start of each message, and is bound to one host: at most 8 ranks that can read each other's memory, all with the same number of tokens, a multiple of 128 (causal: 256). It also takes room for copies of what it sees of the other ranks' keys. To bound that, call it for some of the heads at a time. Two GPUs, 16k tokens:

# %%
samples = draw_ring.recorded("ring", (2,))
if samples is not None:
    display(draw_ring.beside_peers(samples, ranks=2, N=16384))

# %% [markdown]
# **What to see.** (K and V were in the room already. Whiskers go from the slowest round to the fastest; a round that took more than three times the median is left out, and counted. The right panel has no 51: its backward pass is the ring's.) This is the kernel for short sequences: at 16k tokens two GPUs are 1.91<!--= over_one_gpu("51_one_sided", 16384):.2f --> times as fast as one, with the ring 1.80<!--= over_one_gpu("50_ring", 16384):.2f -->; with eight query heads to one of K and V 1.99<!--= over_one_gpu("51_one_sided", 16384, Hkv=2):.2f --> and 1.88<!--= over_one_gpu("50_ring", 16384, Hkv=2):.2f -->. (One round of 64k at $D = 64$ reached 2.15. At one clock two GPUs cannot do more than twice the work; but power sets the clock anew for every burst, and so moves a median by a few percent, and a round by 11 %.) At 64k they are 1.93<!--= over_one_gpu("51_one_sided", 65536):.2f --> and 1.90<!--= over_one_gpu("50_ring", 65536):.2f -->. For longer ones the L2 does not hold a head's keys any more (notebook 50 says what that costs), and in one kernel 256k tokens were 1.85 times as fast, measured once. So there `one_sided.attend` has this kernel only copy, on a stream of its own, while rung 32 attends to this rank's keys, and then to the copies, in the ring's blocks: 2.00<!--= over_one_gpu("51_one_sided", 262144):.2f -->, with the ring 1.95<!--= over_one_gpu("50_ring", 262144):.2f -->.

# %% [markdown]
# <details><summary>Why do both rows' maxima pass through a <code>double</code>?</summary>
#
# At $D = 64$ this kernel first was 5 to 8 % slower than 32 at the same work on one GPU, although its loop had 332 instructions instead of 329. Each score is one FMA, $s \cdot \mathrm{scale} - m$, with two operands in registers. The register file has two banks, the even and the odd registers, and two operands of one bank take a cycle more. A warp works on two rows in turn; if their $m$ lie in different banks, the hardware's small cache of operands keeps both, and few FMAs wait. Here the compiler had put both into even registers, 32 of 64 FMAs waited, and nothing in the source says where a register goes. Most changes that we tried left it so. A `double` is an even register and the odd one behind it: both $m$ put into one, and taken out again in front of the loop, lie in two banks. `loops.from_one_bank` counts such FMAs, and a test holds it at no more than 8 of 64.
#
# </details>

# %% [markdown]
# Others do this, too, for attention or for the matrix products around it:
#
# | | who moves the bytes | how the consumer is told |
# |---|---|---|
# | here | TMA of a few CTAs, pulling | a flag per tile |
# | [ParallelKittens](https://arxiv.org/abs/2511.13940) | TMA of dedicated SMs | flags in global memory |
# | [Flux](https://arxiv.org/abs/2406.06858), [TileLink](https://arxiv.org/abs/2503.20313), Triton-distributed | CTAs or copy engines | a signal per tile |
# | NVSHMEM | `nvshmemx_getmem_nbi_block` | `nvshmem_signal_wait_until` |
# | PyTorch, `torch.ops.symm_mem` | copy engines, stream by stream | `stream_write_value32`, `wait_signal` |

# %% [markdown]
# ## What still hurts
#
# 1. **One host.** Between hosts there is no pointer to read through. There the ring takes over.
# 2. **A rank that fails** leaves the others in a loop on the GPU, where no exception can reach them. The process has to be ended, as `ring.launch` does. For the same reason, nothing that the others need first may be queued on another stream of a GPU that already waits: the waiting kernel holds all its SMs.
# 3. **Memory.** The buffer holds what the rank sees of all other keys. A ring of buffers would need flags in the other direction, from the readers to the copiers.
# 4. **The backward pass** is that of the ring: $dK$ and $dV$ would have to be *added* in another GPU's memory, in a fixed order if the bits are to be the same every time.

# %% [markdown]
# ## Exercises
#
# ### Exercise 51.1 · Find the missing waits
#
# From the kernel above three waits have been taken: `/* A */` in `ask`, before a rank's first tile is read; `/* B */` in the copier's loop, between the store and the flag; `/* C */` in the producer's loop over other ranks' tiles, before the fence. It still gives the right result here, where one CTA after the other runs. The X-ray does not rely on luck (its findings of near_K and near_V stand for B and C together; lines are counted as above):

# %%
broken = checks.without_waits()
found = one_sided.xrayed(queries, rooms, kernel=load(source=broken, device="cpu", quiet=True)).findings
for finding in found:
    print(f"{finding.kind}, line {finding.line}: {finding.text}\n")

# %% [markdown]
# Each finding says who reads, who writes, and what is missing between the two. (The last asks for a fence. The fence is there: the finding goes away with the wait.) Write what belongs there.

# %%
# Exercise 51.1
fixes = {
    "/* A */": "",
    "/* B */": "",
    "/* C */": "",
}


# %%
def nothing_is_found():
    source = broken
    for place, statement in fixes.items():
        source = source.replace(place, statement)
    fixed = load(source=source, device="cpu", quiet=True)
    left = one_sided.xrayed(queries, rooms, kernel=fixed).findings
    assert not left, f"{left[0].kind}: {left[0].text}"
    return checks.waits_for_this_call(source)


exercise.verify("51.1", nothing_is_found)

# %% [markdown]
# <details><summary>Hint</summary>
#
# B: the newest group may still be on its way. C: only where the producer has not seen the flag yet (`there`). The functions are in `fa/flags.cuh` and `fa/bulk.cuh`.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# fixes = {
#     "/* A */": "fa::await_sys(a.signals[a.rank] + tile.rank, a.epoch);",
#     "/* B */": "fa::cp_async_bulk_wait_group<1>();",
#     "/* C */": "if (!there) fa::await_gpu(arrived, a.epoch);",
# }
# ```
#
# A waits for another GPU: scope `sys`. `await_gpu` there would be found as well. B leaves one group on its way, that of the tile just stored, and the flag set next is that of the tile before.
# </details>

# %% [markdown]
# ### Exercise 51.2 · What has to be fetched
#
# Write `pieces_fetched`: how many of the sequence's $2p$ equal pieces rank $r$ of $p$ fetches from rank $s \ne r$, in zigzag under a causal mask.

# %%
# Exercise 51.2


def pieces_fetched(r, s):
    return 2


# %%
def no_more_than_is_seen():
    for p in (2, 3, 8):
        mine = {r: (r, 2 * p - 1 - r) for r in range(p)}
        for r in range(p):
            for s in set(range(p)) - {r}:
                seen = [piece for piece in mine[s] if any(piece < query for query in mine[r])]
                got = pieces_fetched(r, s)
                assert got == len(seen), f"rank {r} of {p}, from rank {s}: {got}, not {len(seen)}"
    return True


exercise.verify("51.2", no_more_than_is_seen)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Rank $s$ has pieces $s$ and $2p - 1 - s$. Which of rank $r$'s queries come after them?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def pieces_fetched(r, s):
#     return 1 if s < r else 2
# ```
#
# Of an earlier rank the late piece comes after all of rank r's queries. So rank 0 fetches most and the last rank least, although all compute the same.
# </details>

# %% [markdown]
# ### Exercise 51.3 · Scopes
#
# For each pair of accesses, the smallest scope that is enough: `"cta"`, `"gpu"` or `"sys"`.

# %%
# Exercise 51.3
scopes = {
    "a copier tells the CTAs of its GPU that a tile is there": "",
    "a rank tells another that its K and V are there": "",
    "a producer thread tells the consumers of its CTA that no tile is left": "",
    "a copier tells the owner of K that it has read it": "",
}


# %%
def small_enough():
    right = {"the CTAs of its GPU": "gpu", "another": "sys", "the consumers of its CTA": "cta", "the owner of K": "sys"}
    for told, answer in right.items():
        said = [scopes[words] for words in scopes if told in words]
        assert said == [answer], f"not yet: to tell {told}"
    return True


exercise.verify("51.3", small_enough)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Who has to see it: threads of one CTA, of one GPU, or of another GPU?
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# scopes = {
#     "a copier tells the CTAs of its GPU that a tile is there": "gpu",
#     "a rank tells another that its K and V are there": "sys",
#     "a producer thread tells the consumers of its CTA that no tile is left": "cta",
#     "a copier tells the owner of K that it has read it": "sys",
# }
# ```
#
# The third goes by an mbarrier, whose arrival releases and whose wait acquires at scope cta by default.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why is rung 32, at D = 128, 19<!--= tflops("32", 128, 8192, 0, "bf16") * 1e9 / (4 * 16 * 8192**2 * 128) * record.load("51_one_sided", "link", "nvidia-h200-x2").query("name == 'read directly' and D == 128 and N == 16384").ms.median():.0f --> times slower on another GPU's keys?</summary>
#
# Every tile of queries reads all keys over the link, because the local L2 does not keep them: B_r FLOPs per byte, 128 × 394 GB/s = 50 TFLOP/s, and by the 332<!--= 4 * 16 * 8192**2 / 1e6 / record.load("51_one_sided", "link", "nvidia-h200-x2").query("name == 'read directly' and D == 128 and N == 16384").ms.median():.0f --> GB/s that such reads reach, 43<!--= 4 * 16 * 8192**2 * 128 / 1e9 / record.load("51_one_sided", "link", "nvidia-h200-x2").query("name == 'read directly' and D == 128 and N == 16384").ms.median():.0f -->, against 788<!--= tflops("32", 128, 8192, 0, "bf16"):.0f -->.
#
# </details>
# <details><summary>2. What goes wrong if the copier waits with wait_group.read?</summary>
#
# The flag may be set while the tile is still on its way to memory. Shared memory has been read, no more.
#
# </details>
# <details><summary>3. Why do flags hold an epoch and not 1?</summary>
#
# They would have to be reset between two calls, and the reset be ordered before the next call's flags on all GPUs.
#
# </details>
# <details><summary>4. Who may overwrite K after the kernel, and why?</summary>
#
# Whatever follows it on the owner's stream: CTA 0 has waited until all copiers of all ranks have said that they have read it.
#
# </details>
# <details><summary>5. Why do copiers have the lowest block indices?</summary>
#
# In practice blocks are placed in that order, though CUDA does not promise it. As long as all copiers are among those that run, the others wait only for them.
#
# </details>
# <details><summary>6. What does the fence before TMA's load order?</summary>
#
# The acquire, an ordinary access, before TMA's read through the async proxy.
#
# </details>
