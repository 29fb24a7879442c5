# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 50 · Attention across GPUs
#
# [← 40 · One algorithm, every language](40_every_language.ipynb) | [50_ring.cu](../kernels/50_ring.cu) | [glossary](glossary.md) | [51 · Attention across GPUs in one kernel →](51_one_sided.ipynb)
#
# **After this notebook you can**
# - split the attention of one long sequence over several GPUs, forward and backward, with exact results;
# - say how many bytes a ring moves, and from which length on the kernel hides them;
# - give every GPU the same share of a causal mask, and say what it costs to forget that;
# - choose between a ring, an all-gather and an exchange of heads.
#
# **Time** 55 minutes.
#
# **Needs** [02 · Online softmax](02_online_softmax.ipynb) for the merge, [20 · Causal masks](20_causal_gqa.ipynb) for the masks, [23](23_backward_mma.ipynb) for the backward pass. No GPU: without one, the ranks are processes on this machine's CPU and every rank runs the kernels on the emulator.
#
# **The idea in one line**: states of the online softmax merge wherever they were computed, so let the keys travel from GPU to GPU and merge what each has seen.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import inspect

import pandas as pd
import torch

from helpers import blank, check, compare, hint, load, op, progress, reference, xray
from helpers import draw_ring, exercise, merging, plot, predict, ring, ring_time, show

# %load_ext helpers

torch.manual_seed(0)
kernel = load("50_ring")
device = kernel.device
# Of the ranks: a GPU for each, or the emulator
where = "cuda" if device == "cuda" and torch.cuda.device_count() > 1 else "cpu"

# %% [markdown]
# ## The problem
#
# FlashAttention's memory grows with $N$, not with $N^2$. For long sequences that is still too much for one GPU, and its time does grow with $N^2$. For 16 heads of $d = 128$ in 16 bits, forward, under a causal mask, at 700 TFLOP/s ([rung 32](32_ping_pong.ipynb) reaches 779<!--= tflops("32", 128, 16384, 1, "bf16", kind="causal"):.0f --> on an H200 at N = 16384):

# %%
rows = []
for N in (1 << 14, 1 << 17, 1 << 20, 1 << 23):
    problem = ring_time.Problem(N=N)
    seconds = ring_time.seconds(problem, ring_time.Machine(), ranks=1)
    rows.append((f"{N:,}", f"{ring_time.memory(problem, 1) / 2**30:.1f}", f"{seconds:.3g}"))
pd.DataFrame(rows, columns=["N", "GiB of Q, K, V, O and LSE", "seconds per layer"])

# %% [markdown]
# A model has dozens of layers, and its backward pass keeps these tensors of all of them. So we split the *sequence*: each GPU gets some of the tokens. Only in attention do tokens meet. There the *queries* divide as easily: rows of $O$ do not depend on each other. But each query needs **all keys**, and they now lie on different GPUs.
#
# In the language of `torch.distributed`, each process that takes part is a **rank**, numbered from 0. Here every rank has one GPU.
#
# ## 1 · The merge is the whole idea
#
# Notebook 02 showed that softmax can be computed in pieces: what is known of some keys is a [state](glossary.md#state), and two states merge. Finished outputs are states as well: $(O_a, \mathrm{LSE}_a)$ of some keys and $(O_b, \mathrm{LSE}_b)$ of others give
#
# $$ \mathrm{LSE} = \ln\bigl(e^{\mathrm{LSE}_a} + e^{\mathrm{LSE}_b}\bigr), \qquad O = e^{\mathrm{LSE}_a - \mathrm{LSE}}\, O_a + e^{\mathrm{LSE}_b - \mathrm{LSE}}\, O_b . $$
#
# It makes no difference whether the two were computed by two CTAs, as in [notebook 21](21_split_kv.ipynb), or by two GPUs. Half of the keys, the other half, and the merge:

# %%
q, k, v = (torch.randn(1, 2, 96, 64, device=device).half() for _ in range(3))
attend = op.operator("20_causal_gqa")
part_a = attend(q, k[:, :, :48], v[:, :, :48])
part_b = attend(q, k[:, :, 48:], v[:, :, 48:])
o, lse = kernel(*part_a, *part_b)
exact, _ = reference.attention(q, k, v)
print(f"merged halves: off by at most {(o - exact).abs().max():.1e}, outputs up to {exact.abs().max():.2f}")

# %% [markdown]
# ## 2 · A ring
#
# Every rank starts with its own queries, keys and values. In each step it attends to the keys that it holds, merges, hands K and V to the next rank, and takes those of the rank before. After as many steps as there are ranks, every query has seen every key, and no rank has held more than its own and two travelling pairs of K and V ([Ring Attention, Liu, Zaharia and Abbeel, 2023](https://arxiv.org/abs/2310.01889)).

# %%
draw_ring.steps(ranks=4, causal=False)

# %% [markdown]
# **What to see.** Read a row: rank 0 attends to its own keys, then to those of rank 3, 2, 1. Read a column: no two ranks hold the same keys. A square is a block of scores.
#
# Here it is in Python. `launch` runs a function in several processes, each one rank, and gives back what each returns. It sees nothing of this notebook but its arguments; `torch`, `os`, `dist` (`torch.distributed`), `load`, `reference` and `ring` are imported for it. The messages go through NCCL between GPUs, and through gloo between CPU processes.


# %%
def simple_ring(me, q, k, v):
    n = q.shape[2] // me.ranks
    q, k, v = (x[:, :, me.rank * n :][:, :, :n].contiguous().to(me.device) for x in (q, k, v))
    attend, merge = load("20", quiet=True), load("50", quiet=True)
    o, lse = attend(q, k, v)
    for _ in range(1, me.ranks):
        come = [torch.empty_like(k), torch.empty_like(v)]
        sends = [dist.P2POp(dist.isend, x, (me.rank + 1) % me.ranks) for x in (k, v)]
        receives = [dist.P2POp(dist.irecv, x, (me.rank - 1) % me.ranks) for x in come]
        [work.wait() for work in dist.batch_isend_irecv(sends + receives)]
        k, v = come
        o, lse = merge(o, lse, *attend(q, k, v))
    me.say(f"{me.ranks} steps, {n} of {n * me.ranks} queries")
    return o.cpu()


# %%
parts = ring.launch(simple_ring, 2, q.cpu(), k.cpu(), v.cpu(), device=where)
o = torch.cat(parts, 2)
print(f"two ranks: off by at most {(o - exact.cpu()).abs().max():.1e}")

# %% [markdown]
# `ring.ring_attention` does the same, and one thing better: it starts the messages *before* the kernel, on a stream of their own, so that the next keys arrive while the present ones are in use.
#
# On a GPU, a second stream is not enough for that. NCCL moves bytes by a kernel of its own. Rungs 31, 32 and (at $d = 64$) 33 hold *every* SM to the end: if one begins first, the message waits until it is done. Both become ready at the same moment, so the ring gives the message a head start:

# %%
print(inspect.getsource(ring.let_messages_begin))

# %% [markdown]
# Besides, NCCL's stream has a high priority: its CTAs get the SMs that become free.
#
# How many bytes is that? Take $N = 65536$ tokens on 4 ranks, 16 heads of K and V, $d = 128$, 16 bits. How many MB does one rank send in a whole forward pass?

# %%
megabytes = ...  # your prediction: MB that one rank sends in a forward pass

# %% tags=["reveal"]
ranks, N, Hkv, D = 4, 65536, 16, 128
once = 2 * (N // ranks) * Hkv * D * 2  # K and V of one rank
sent = (ranks - 1) * once / 1e6
predict(megabytes, sent, "MB sent by each rank, in 3 messages")

# %% [markdown]
# ### When does the kernel hide the transfer?
#
# A block of $n$ queries and $n$ keys takes $4 n^2 H d$ FLOPs, its keys and values $4 n H_{kv} d$ bytes. The work grows with $n^2$, the bytes with $n$: from some $n$ on, the kernel takes longer. With a kernel rate $R$ and a link of $W$ bytes per second,
#
# $$ \frac{4 n^2 H d}{R} \ge \frac{4 n H_{kv} d}{W} \quad\Longleftrightarrow\quad n \ge \frac{H_{kv}}{H} \cdot \frac{R}{W} . $$
#
# The head dimension has gone, and so has the number of ranks. Take $R = 700$ TFLOP/s and $W = 290$ GB/s of the 450 that the [data sheet](https://www.nvidia.com/en-us/data-center/h200/) gives for an H200's NVLink each way: assumptions, to be held against the record, as are 60 µs until the first byte of a message arrives. How many tokens does each rank need, with as many heads of K and V as of Q, if messages take no time to begin?

# %%
tokens = ...  # your prediction: tokens per rank from which on the transfer is hidden

# %% tags=["reveal"]
machine = ring_time.Machine()
full = ring_time.Problem(N=1, causal=False)
predict(tokens, ring_time.break_even(full, ring_time.without_latency(machine)), "tokens per rank")
for Hkv in (16, 2):
    problem = ring_time.Problem(N=1, causal=False, Hkv=Hkv)
    bare = ring_time.break_even(problem, ring_time.without_latency(machine))
    print(f"H = 16, Hkv = {Hkv}: {bare:,.0f}; with 60 µs per message {ring_time.break_even(problem, machine):,.0f}")

# %% [markdown]
# With [grouped heads](glossary.md#grouped-heads), eight query heads to one of K and V, by bytes alone a rank would need an eighth of the tokens. But then a message's beginning counts for more than its bytes, and most of the gain is lost. Under a mask a block is half the work for the same bytes, and by the bytes alone it takes twice as many tokens; with 60 µs per message 6,400, and 3,500 with grouped heads.
#
# ## 3 · Who waits under a causal mask
#
# Now with a mask. The obvious split gives each rank a contiguous run of tokens. Then the first rank's queries see almost nothing, and the last one's almost all:

# %%
draw_ring.steps(ranks=4, layout="contiguous")

# %% [markdown]
# **What to see.** A white square is a block that the mask removes. But the ring hardly gets faster: the last row has no white square, and everybody waits for the last rank.
#
# One GPU alone has to compute half of all scores. With two ranks, what is the speedup? Count the blocks of the busiest rank.

# %%
speedup_of_two = ...  # your prediction: times as fast as one GPU, two ranks, contiguous, transfers hidden

# %% tags=["reveal"]
ideal = ring_time.without_latency(machine)
long = ring_time.Problem(N=1 << 22)
predict(speedup_of_two, ring_time.speedup(long, ideal, 2, "contiguous"), "times as fast as one GPU, two ranks")
for ranks in (2, 4, 8, 64):
    print(f"{ranks} ranks: {ring_time.speedup(long, ideal, ranks, 'contiguous'):.2f} times")

# %% [markdown]
# $p$ ranks have $p^2/2$ blocks of work in all, the last rank $p - 1/2$ of them: nearly half of the machine is idle. The cure is to deal out the tokens differently. Two ways are in use:
#
# - **zigzag**: cut the sequence into $2p$ pieces; rank $r$ gets piece $r$ from the beginning and piece $r$ from the end.
# - **striped**: deal the tokens out one by one; rank $r$ gets tokens $r, r + p, r + 2p, \dots$ ([Striped Attention, Brandon et al., 2023](https://arxiv.org/abs/2311.09431)).

# %%
draw_ring.masks(N=16, ranks=4)

# %% [markdown]
# **What to see.** A number in a cell is the step of the ring, those at the bottom count a rank's scores: contiguous 10 to 58, zigzag 34, striped 28 to 40. In a model, the tokens are rearranged once, at the input: nothing but attention and the positional encoding asks where a token stands.
#
# But can our kernels compute such blocks? They know two kinds: all of a block, or causal, where the last query sees the last key. Look at the blocks of a zigzag:

# %%
draw_ring.steps(ranks=4, layout="zigzag")

# %% [markdown]
# **What to see.** Every block is one of three: the rank's own, which is causal (its two pieces stand in order); *all* queries with the *first half* of an earlier rank's keys; or the *second half* of the queries with *all* keys of a later rank. The last two are unmasked rectangles, each half of a block. So one kernel call does each, and every rank has the same work in every step. This is all the code it takes:

# %%
print(inspect.getsource(ring.block))

# %% [markdown]
# Now the model of section 2 for a whole pass: a block begins when the one before is done and its keys are there. First 65,536 tokens on four GPUs, then 16,384, where the messages show:

# %%
runs = {}
for layout, N in (("contiguous", 65536), ("zigzag", 65536)):
    runs[f"{layout}, N = {N:,}"] = ring_time.timeline(ring_time.Problem(N=N), machine, 4, layout)
draw_ring.timelines(runs, title="Four GPUs by the model")

# %%
small = {}
for Hkv in (16, 2):
    problem = ring_time.Problem(N=16384, Hkv=Hkv)
    small[f"zigzag, N = 16,384, Hkv = {Hkv}"] = ring_time.timeline(problem, machine, 4)
draw_ring.timelines(small, title="Four GPUs by the model: short blocks wait for messages")

# %% [markdown]
# **What to see.** In the long run every transfer ends well before its block begins. In the short one, with as many heads of K and V as of Q, a transfer takes longer than a block, and the GPUs wait. With $H_{kv} = 2$, an eighth of the bytes, the transfer is hidden again.
#
# The same on two and four GPUs, and then on eight, as it was recorded (a profiler notes when each kernel begins and ends):

# %%
for some in ((2, 4), (8,)):
    runs = {}
    for ranks in some:
        if (events := draw_ring.recorded("ring_timeline", (ranks,))) is not None:
            runs[f"{ranks} GPUs, zigzag, N = 65,536"] = events
    if runs:
        title = f"recorded on {plot.device(pd.concat(runs.values()))}"
        display(draw_ring.timelines(runs, unit=1, title=title))

# %% [markdown]
# **What to see.** On two and four GPUs every message ends before the next block. While a message runs, the kernel has fewer SMs: on four GPUs the last block of every rank, beside which nothing is sent, is the shortest. On eight GPUs a block takes 0.4 ms and a message 0.9 or more: the GPUs wait. **Eight GPUs were recorded with four of NCCL's channels to a message**, two and four with sixteen, as `ring.launch` sets it now.
#
# <details><summary>How many SMs should a message have?</summary>
#
# By the data sheet 67 MB, K and V of 8,192 tokens, cross a link in 0.15 ms. But NCCL copies by CTAs, which it calls channels. It has 32, and on $p$ GPUs a message gets $32/p$, so that messages to all ranks may go at once; more, where a channel would carry over 16 MiB. In a ring there is one message at a time. So `ring.launch` asks for more channels (`NCCL_MIN_P2P_NCHANNELS`): sixteen to a message on two and four GPUs, and eight on eight, since there are no more than 64. Measured on four, 67 MB then take 266 µs instead of 442, and a causal forward pass over 16k tokens 0.69 ms instead of 0.94. From 256k tokens on, eight GPUs have eight channels even without that.
#
# The bars: at first the GPUs wait for the host. "Other" is head starts, 6 µs each (the first of a rank up to 48), and on four and eight GPUs O turned into float32 and back. Bars of more than 0.9 ms on eight contain waiting for a late neighbour, and under the profiler the pass took 9.8 ms, without it 6.9.
#
# </details>

# %% [markdown]
# ## 4 · The backward pass
#
# The backward pass recomputes $P_{ij} = e^{s_{ij} - \mathrm{LSE}_i}$. If $\mathrm{LSE}_i$ is that of **all** keys, which the forward pass has merged, then the $P$ of a block are final, and so is [delta](glossary.md#delta), $\delta_i = \mathrm{rowsum}(dO \circ O)$. Nothing has to be merged any more: each block's $dQ$, $dK$, $dV$ are what the kernel of one GPU computes from those rows, and the blocks' parts *add up*.
#
# $dQ$ stays with its queries. $dK$ and $dV$ belong to keys that travel, so they travel behind them: each rank adds its part and passes them on. After a whole round they are back at their owner. The order of the sum is the same every time: if the kernel is [deterministic](glossary.md#deterministic) (22 and 33 can be), the gradients have the same bits in every run.
#
# The last message, $dK$ and $dV$ on their way home, has no block left to hide under. But a rank's *own* block needs nobody's keys. Half of its heads are computed first, while the first keys arrive, the others last, while the gradients come home.

# %% [markdown]
# ## The kernel
#
# The attention kernels are those of earlier notebooks, unchanged. Only the merge is new. In PyTorch it would be half a dozen operations, each of which reads and writes all of $O$. Fused, it is one pass:

# %%
show.region("50_ring", "merge")

# %% [markdown]
# A lane has four columns of a row, 16 bytes of fp32, or eight where all is in 16 bits. Where there are more than two parts, the accumulated $O$ is in fp32 from the first merge to the last but one; it is overwritten in place wherever its type stays. For that, $\mathrm{LSE}_a$ is read by *one* lane, which hands it to the others by a shuffle.

# %% [markdown]
# ## Run and check
#
# First the merge alone: parts without any key (LSE = −∞), LSE that lie far apart, rows of a larger tensor, every mixture of dtypes.

# %%
check(kernel, merging.cases(device=kernel.device))

# %% [markdown]
# Then everything: two ranks, causal, zigzag, grouped heads, with gradients, against float64 by the same rule as every kernel of the series.


# %%
def train_step(me, q, k, v, do, layout):
    q, k, v, do = (ring.local(x, me.rank, me.ranks, layout).to(me.device) for x in (q, k, v, do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = ring.ring_attention(q, k, v, causal=True, layout=layout)
    o.backward(do)
    return [x.detach().cpu() for x in (o, q.grad, k.grad, v.grad)]


# %%
q, do = (torch.randn(1, 4, 64, 64).half() for _ in range(2))
k, v = (torch.randn(1, 2, 64, 64).half() for _ in range(2))
results = ring.launch(train_step, 2, q, k, v, do, "zigzag", device=where)
o, *gradients = (ring.whole(parts, "zigzag") for parts in zip(*results))
forward = reference.Case("O", q, k, v, causal=True)
backward = reference.Case("gradients", q, k, v, do=do, causal=True)
for found in compare(forward, (o, forward.baseline()[1]))[:1] + compare(backward, tuple(gradients)):
    print(f"{found.output.upper():3} error {found.error:.1e}, {found.used:.0%} of the budget")

# %% [markdown]
# ## Predict, then measure
#
# The merge of an fp32 $O_a$ with a 16-bit $O_b$, in place: how many bytes does it move for each row of $d = 64$, the LSE included?

# %%
bytes_per_row = ...  # your prediction: bytes read and written per row

# %% tags=["reveal"]
rows = 256
seen = xray(
    kernel, torch.randn(1, 1, rows, 64), torch.randn(1, 1, rows), q[:, :1].repeat(1, 1, 4, 1), torch.randn(1, 1, rows)
)
moved = seen.tensors[["bytes_read", "bytes_written"]].sum(axis=1)
predict(bytes_per_row, moved.sum() / rows, "bytes per row")

# %%
seen

# %% [markdown]
# $64 \cdot (4 + 2 + 4)$ bytes of $O$ and $3 \cdot 4$ of LSE, each read or written once, every request coalesced, no race. A thread finds its row by 32-bit divisions: 64-bit ones took longer than all else.
#
# Now the speedup of two GPUs against length, by the model, with what was measured laid over it:

# %%
lengths = [2**i for i in range(12, 21)]
model = {
    layout: [ring_time.speedup(ring_time.Problem(N=n), machine, 2, layout) for n in lengths]
    for layout in ("contiguous", "zigzag")
}
samples = draw_ring.recorded("ring")
points = draw_ring.measured(samples, ranks=2, D=128, causal=1, passes="forward")
title = "Two GPUs, causal, D = 128, H·D = 2048"
if samples is not None:
    title += f" · measured: {plot.device(samples[samples['ranks'] == 2])}"
draw_ring.speedups(pd.DataFrame(model, lengths), 2, title, points)

# %% [markdown]
# **What to see.** Contiguous stops at 4/3, however long the sequence. Zigzag approaches 2: 1.80<!--= over_one_gpu("50_ring", 16384):.2f --> at 16k tokens, 1.90<!--= over_one_gpu("50_ring", 65536):.2f --> at 64k, 1.95<!--= over_one_gpu("50_ring", 262144):.2f --> at 256k. The model's line falls where blocks become shorter than messages, down to less than one GPU's speed at 4k; nothing below 16k was measured.
#
# All cases with $H_{kv} = H$ (`both`: forward and backward, the gradients added up in any order, as one GPU does by default):

# %%
if samples is not None:
    display(draw_ring.held(samples))

# %% [markdown]
# **What to see.** On two GPUs the model's speedups are right within 5 % up to 64k tokens, except both passes together at 16k under the mask (8 % too high); on four it is up to 8 % too high. On eight it expects twice what was recorded at 64k under the mask: to the model a link is as fast with any number of channels. Some long sequences are *more* than twice, four or eight times as fast: 2.17<!--= over_one_gpu("50_ring", 262144, causal=0):.2f --> on two GPUs at 256k without a mask.
#
# <details><summary>How can two GPUs be more than twice as fast as one?</summary>
#
# One GPU gets slower. Without a mask, the record on four GPUs has it at 771<!--= one_gpu(65536):.0f --> TFLOP/s for 64k tokens, 592<!--= one_gpu(262144):.0f --> for 256k and 526<!--= one_gpu(1048576):.0f --> for 1M. K and V of one head take 512 bytes per token, 134 MB at 256k, and an H200's L2 has 60 MiB. All CTAs sweep the same keys, but they drift apart in time, and most have to read from HBM again. Measured once on one H200, two heads of 262,144 tokens: 214 GB came from HBM, while K and V of both are 0.27 GB. That costs time, and power that the tensor cores then lack: the clock fell to 1,260 MHz. A ring's blocks are shorter, and `ring_attention` cuts those that are still too long, so that K and V of a head take at most 32 MB. Cut so, one GPU alone reached 670 TFLOP/s instead of 556. (That was an older rung 32; how far CTAs drift differs from run to run: a later one had 717 for four heads.) A causal forward pass, whose query tiles see half as many keys, falls from 797<!--= one_gpu(65536, causal=1):.0f --> to 698<!--= one_gpu(262144, causal=1):.0f --> and 630<!--= one_gpu(1048576, causal=1):.0f -->. The backward pass falls by up to 3 %, also under a mask, where rung 33 takes fewer heads of long sequences at a time: its CTAs find in the L2 what they share ([39 · Log](39_log.ipynb)). Forward and backward together, two and four GPUs are 1.96<!--= over_one_gpu("50_ring in any order", 262144, passes="both"):.2f --> and 3.79<!--= over_one_gpu("50_ring in any order", 262144, passes="both", ranks=4):.2f --> times as fast as one for 256k tokens. Eight were recorded with an earlier rung 33, which did fall: 10.3<!--= over_one_gpu("50_ring in any order", 262144, passes="both", ranks=8):.1f --> times.
#
# </details>
#
# What does the model say of machines that we do not have? It takes all links to be those of one host's NVLink: between hosts they are several times slower, and the lines bend earlier.

# %%
gpus = [2**i for i in range(1, 11)]
problems = {
    "N = 256k, Hkv = H": ring_time.Problem(N=1 << 18),
    "N = 1M, Hkv = H": ring_time.Problem(N=1 << 20),
    "N = 1M, Hkv = H / 8": ring_time.Problem(N=1 << 20, Hkv=2),
    "N = 8M, Hkv = H / 8": ring_time.Problem(N=1 << 23, Hkv=2),
}
table = {name: [ring_time.speedup(p, machine, n) / n for n in gpus] for name, p in problems.items()}
draw_ring.efficiency(pd.DataFrame(table, gpus), "By the model: zigzag, causal, H = 16, D = 128")

# %% [markdown]
# **What to see.** All lines but the longest fall steeply, where a rank comes to have fewer than some 8,000 tokens. Four times the tokens carry four times the GPUs.

# %% [markdown]
# ## Beside its peers
#
# Two other ways lead to the same result:
#
# - **all-gather**: every rank gets all K and V at once, then attends with its own queries. One collective, no merge; but each rank holds the keys of the *whole* sequence, and the kernel waits for them.
# - **Ulysses** ([Jacobs et al., 2023](https://arxiv.org/abs/2309.14509)): exchange heads for tokens. After an all-to-all each rank has *all* tokens of *some* heads, calls the kernel once, and exchanges back. No imbalance and few bytes; but there cannot be more ranks than heads of K and V.
#
# For $N = 2^{20}$, $H = 16$, $d = 128$ on 8 ranks, of one forward pass:

# %%
P, N, H, D = 8, 1 << 20, 16, 128
rows = []
for Hkv in (16, 8):
    q_bytes, kv_bytes = (2 * N // P * heads * D for heads in (H, 2 * Hkv))
    ways = {
        "ring": ((P - 1) * kv_bytes, 3 * kv_bytes, P - 1),
        "all-gather": ((P - 1) * kv_bytes, P * kv_bytes, 1),
        "Ulysses": ((2 * q_bytes + kv_bytes) * (P - 1) // P, kv_bytes, 4),
    }
    rows += [(Hkv, way, sent / 1e9, held / 2**30, steps) for way, (sent, held, steps) in ways.items()]
columns = ["Hkv", "way", "GB sent per rank", "GiB of K and V held", "messages, one after the other"]
pd.DataFrame(rows, columns=columns).round(2)

# %% [markdown]
# Here Ulysses sends least: it does with more than $1 + H / H_{kv}$ ranks, as long as there are enough heads. Only the ring combines small memory with any number of ranks. Large systems use Ulysses inside a host, a ring between hosts.

# %%
if samples is not None:
    for ranks in (2, 4, 8):
        display(draw_ring.beside_peers(samples, ranks))

# %% [markdown]
# (STALE: kernels have changed since eight GPUs were recorded; in the table above, too. Whiskers: slowest and fastest round; a round of more than three times the median is left out, and counted.)
#
# **What to see.** PyTorch's `context_parallel` runs the same ring, or all-gather, with cuDNN's attention; "all-gather + SDPA" is cuDNN after one collective; `51_one_sided` is the next notebook's. On two and four GPUs the ring keeps rung 32's lead over cuDNN; forward and backward together, Ulysses is on four as fast as the ring that adds up in any order, and faster than the plain one. On eight, with four channels, the ring waits for messages: forward 51 and all-gather lead, with the backward pass Ulysses; with 256k tokens the ring is 7.92<!--= over_one_gpu("50_ring", 262144, ranks=8):.2f --> times as fast as one GPU. "In any order" adds up $dQ$ as parts come, as cuDNN does, and one GPU by default; the plain ring has the same bits every time, and so has the one GPU it is held against.
#
# Memory: how long can a sequence be?

# %%
held = draw_ring.recorded_memory()
if held is not None:
    print(f"measured: {plot.device(held)}")
draw_ring.memory(held, [2**i for i in range(14, 24)])

# %% [markdown]
# **What to see.** From 256k tokens on, each of two GPUs holds as much as one alone (by the model an eighth more): half of the tokens, but travelling keys and a float32 sum. From four on, memory halves with every doubling. The rightmost square is the longest sequence, run once: 7,092,736<!--= largest("N"):,.0f --> tokens on two H200s, one layer of 16 heads, in 152<!--= largest("seconds"):.0f --> seconds, 108<!--= largest("bytes") / 2**30:.0f --> GiB on rank 0.

# %% [markdown]
# The same idea under other names:
#
# | here | PyTorch | Megatron Core, TransformerEngine | vLLM |
# |---|---|---|---|
# | splitting the sequence | `context_parallel(mesh, buffers=…)` | `--context-parallel-size`, `cp_group` | `--prefill-context-parallel-size` |
# | ring | `set_rotate_method("alltoall")` | `--cp-comm-type p2p` | |
# | all-gather | `set_rotate_method("allgather")`, the default | `--cp-comm-type all_gather` | |
# | Ulysses | | `--cp-comm-type a2a`; with a ring between groups `a2a+p2p` | |
# | zigzag | its head-tail load balancer | the sequence is cut into 2 × ranks pieces | |
# | merge by LSE | `_SDPAMerger` | `flash_attn_fwd_out_correction` | when decoding: `--decode-context-parallel-size` splits the cache, partial outputs are merged |
#
# Ours, `ring.ring_attention(q, k, v, group, causal, layout)`, runs under `torchrun`, too.

# %% [markdown]
# ## What still hurts
#
# 1. **A rank that fails.** A ring stops when one rank stops, and the others wait for a message that will never come. Here rank 1 dies after the first all-reduce. `launch` names it and ends the others; under plain `torchrun` you would read timeouts of the ranks that are *not* to blame.


# %%
def dies(me):
    x = torch.ones(4)
    dist.all_reduce(x)
    if me.rank == 1:
        os.kill(os.getpid(), 9)  # what the system does to a process that takes too much memory
    dist.all_reduce(x)


try:
    ring.launch(dies, 2, device="cpu")
except ring.RanksError as error:
    print(error)

# %% [markdown]
# 2. **Short sequences.** Each step costs a launch, a message that takes tens of microseconds to begin, and a merge. Below some 6,000 tokens per rank, causal, they are not hidden.
# 3. **SMs that copy.** At 16k tokens on two GPUs a message takes 16 SMs for two thirds of a block.
# 4. **Packed batches.** Sequences of different lengths in one batch (notebook 20's `cu_seqlens`) would need a layout per sequence. `ring_attention` refuses them.
#
# Much of the second goes away if the kernel itself reads its neighbour's memory: one launch, no message, no merge.

# %% [markdown]
# ## Exercises
#
# In a *task* you write a region of the kernel. `blank` shows what is given and what has to hold; your cell is compiled, checked in all of `merging.cases()`, also in place, and X-rayed beside the kernel's own.
#
# ### Task 50.1 · The merge
#
# Write the kernel: which row and columns a thread has, the weights, $O$ and the LSE. Two parts that both have no key (LSE = −∞) are one place to go wrong. The other is a merge in place, as the ring does it: the new LSE is written where other lanes may still read the old one.

# %%
blank("50", "merge")

# %%
# %%region 50 merge -> my_merge
# // your code

# %%
hint("50.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `merge` of [50_ring.cu](../kernels/50_ring.cu), shown in [The kernel](#The-kernel). The larger LSE is taken out first, so that no exponential overflows; where both are −∞, there is nothing to take out.
#
# </details>

# %% [markdown]
# ### Exercise 50.2 · Zigzag
#
# Write `pieces`: of a sequence cut into `2 * ranks` equal pieces, numbered from 0, the two that a rank gets in zigzag, in order.

# %%
# Exercise 50.2


def pieces(rank, ranks):
    return 2 * rank, 2 * rank + 1


# %%
def as_much_for_everybody():
    for ranks in (2, 3, 8):
        given = [pieces(r, ranks) for r in range(ranks)]
        assert sorted(i for two in given for i in two) == list(range(2 * ranks)), f"{ranks} ranks: {given}"
        work = [sum(i + 0.5 for i in two) for two in given]  # piece i sees i pieces, and half of itself
        assert len(set(work)) == 1, f"{ranks} ranks: pieces of scores by rank {work}"
        assert all(a < b for a, b in given), "the earlier piece first"
        assert all(a == r for r, (a, _) in enumerate(given)), "rank r gets piece r from the beginning"
    return True


exercise.verify("50.2", as_much_for_everybody)

# %% [markdown]
# <details><summary>Hint</summary>
#
# The sum of the two numbers has to be the same for every rank.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def pieces(rank, ranks):
#     return rank, 2 * ranks - 1 - rank
# ```
#
# Their sum is $2p - 1$ for every rank.
# </details>

# %% [markdown]
# ### Exercise 50.3 · Striped blocks
#
# In the striped layout rank $r$ has tokens $r, r + p, r + 2p, \dots$ Query $i$ of rank $r$ sees key $j$ of rank $s$ if $j \le i + c$. Write `offset`: $c$ for $s \le r$ and for $s > r$.

# %%
# Exercise 50.3


def offset(r, s):
    return 0


# %%
def sees_what_it_should():
    ranks, n = 4, 6
    for r in range(ranks):
        for s in range(ranks):
            for i in range(n):
                seen = [j for j in range(n) if j * ranks + s <= i * ranks + r]
                mine = [j for j in range(n) if j <= i + offset(r, s)]
                assert seen == mine, f"rank {r}, keys of {s}, query {i}: sees {seen}, not {mine}"
    return True


exercise.verify("50.3", sees_what_it_should)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Compare the tokens' places in the sequence, $ip + r$ and $jp + s$.
#
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def offset(r, s):
#     return 0 if s <= r else -1
# ```
#
# From a later rank, query $i$ sees one key less. Queries $1, 2, \dots$ with keys $0, 1, \dots$ are an ordinary causal block again, and query 0, which sees none, is left out. That is what the last line of `ring.block` says.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. What has to be sent besides K and V in the forward pass?</summary>
#
# Nothing. O and LSE stay with their queries.
#
# </details>
# <details><summary>2. Why does the number of ranks not appear in the break-even length?</summary>
#
# Each step has one block of n by n scores and one message of n keys, whatever the number of steps.
#
# </details>
# <details><summary>3. Why does a contiguous causal split lose half of many GPUs, although masked blocks are skipped?</summary>
#
# The last rank has no masked block, and takes p - 1/2 blocks' time, where p / 2 would be its share.
#
# </details>
# <details><summary>4. Which LSE does the backward pass of a block need?</summary>
#
# That of all keys. Then P is final and the blocks' gradients add up.
#
# </details>
# <details><summary>5. When would you take Ulysses?</summary>
#
# With enough heads of K and V for the ranks, and more than $1 + H / H_{kv}$ ranks: then it sends fewer bytes. Its mask needs no layout.
#
# </details>
# <details><summary>6. One rank dies. What do the others do, and who names it?</summary>
#
# They wait for a message that never comes. `ring.launch` names the rank and ends the others; plain `torchrun` shows timeouts of those that are not to blame.
#
# </details>
