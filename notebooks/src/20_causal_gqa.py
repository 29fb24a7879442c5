# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---


# %% [markdown]
# # 20 · Causal masks and grouped heads
#
# [← 13 · Tuned](13_tuned.ipynb) | [20_causal_gqa.cu](../kernels/20_causal_gqa.cu) | [glossary](glossary.md) | [21 · Split the keys, merge the states →](21_split_kv.ipynb)
#
# **After this notebook you can**
# - say which keys a query sees under a causal mask and a window, with as many keys as queries, more, or fewer;
# - derive from that which tiles a kernel may skip, and prove from its reads that it does skip them;
# - predict what the order of the tiles costs at the end of a grid, with a model whose assumptions you can name;
# - run attention with grouped heads, packed batches and strided inputs, and say what each of them saves and what it doesn't.
#
# **Time** 60 minutes.
#
# **Needs** [13 · Tuned](13_tuned.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: skip the tiles that no query may see, pay for the mask only on the diagonal, and start the long tiles first.
# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import numpy as np
import pandas as pd
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from helpers import check, draw_masks, exercise, for_d64, load, plot, predict, record, reference, schedule, show, xray

torch.manual_seed(0)
kernel = load("20_causal_gqa")
device = kernel.device

# %% [markdown]
# ## The problem
#
# A language model predicts the next token, so a token must not look at those that come after it. In the formulas that is one line: before the softmax, set $S_{ij} = -\infty$ for every key $j$ that query $i$ must not see. Then $P_{ij} = e^{-\infty} = 0$. Six tokens:
# %%
q, k = torch.randn(6, 64), torch.randn(6, 64)
S = (q @ k.T / 8).masked_fill(~reference.visible(6, 6, causal=True), -torch.inf)
pd.DataFrame(S.softmax(-1).numpy()).round(2)

# %% [markdown]
# Every 0 above the diagonal has cost $d$ multiply-adds for its score, an exponential, and $d$ more for its product with a row of $V$: for long sequences half of all the work, for a result known beforehand. With that one line added, rung 13 would be right, and no faster than without a mask.
#
# A model asks for more. Its heads share keys and values, its sequences differ in length, its tensors lie in memory as some projection has left them. This notebook gives rung 13 all of that: *which* tiles are worked on, *when*, and *where they lie*; what happens inside a tile stays as it is.
#
# ## 1 · Which keys a query sees
#
# With as many queries as keys, query $i$ sees the keys $j \le i$. With other numbers there are two ways to place the triangle. $N_q < N_k$ happens when the keys of earlier tokens wait in a cache and the queries are the newest tokens. The *last* query is the newest token of all, and sees every key. So the triangle sits at the **bottom right**:
#
# $$ \text{query } i \text{ sees key } j \iff j \le i + (N_k - N_q) . $$
#
# A **sliding window** of $w$ keeps only the last $w$ of those keys: $\; i + (N_k - N_q) - w < j \le i + (N_k - N_q)$. Three queries, five keys:
# %%
draw_masks.masks(
    {
        "bottom right": reference.visible(3, 5, causal=True).numpy(),
        "bottom right, window of 2": reference.visible(3, 5, causal=True, window=2).numpy(),
        "top left": torch.ones(3, 5).tril().bool().numpy(),
    }
)

# %% [markdown]
# Blue: the query sees the key. The third picture is what [PyTorch's `is_causal=True`](https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.scaled_dot_product_attention.html) means. Both are the same when $N_q = N_k$, so code that mixes them up works in training and fails with a cache. PyTorch has the first, too, under the name `causal_lower_right`; FlashAttention's `causal=True` is the first, and its `window_size=(left, right)` counts the keys before and after a query's own, so that our window of $w$ is its `(w - 1, 0)`. Three implementations, asked:
# %%
q, k, v = (torch.randn(1, 1, n, 64, device=device).half() for n in (3, 5, 5))
last, _ = kernel(q[:, :, 2:], k, v)  # the last query alone, without a mask
ways = {
    "this rung": kernel(q, k, v, causal=True)[0],
    "is_causal=True": scaled_dot_product_attention(q, k, v, is_causal=True),
    "causal_lower_right": scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(3, 5)),
}
for name, o in ways.items():
    print(f"{name}: the last query sees all five keys: {torch.allclose(o[:, :, 2:], last, atol=2e-3)}")

# %% [markdown]
# With *more* queries than keys the first queries see nothing. A softmax over nothing is undefined; the convention of this series is $O = 0$ and $\mathrm{LSE} = -\infty$, the [empty state](glossary.md#state) of notebook 02.
# %%
o, lse = kernel(k, q, q, causal=True)  # five queries, three keys
print("LSE:", lse.flatten().cpu().numpy().round(2), " rows of O that are 0:", (o == 0).all(-1).flatten().tolist())


# %% [markdown]
# ## 2 · Which tiles that leaves
#
# A [CTA](glossary.md#cta) has $B_r = 128$ queries, from $i_0$ on, 32 for each of its four warps, and goes through the keys in tiles of $B_c = 64$. With $s = N_k - N_q$, the queries of the CTA together see the keys
#
# $$ \max(i_0 + s - w + 1,\; 0) \;\ldots\; \min(i_0 + B_r + s,\; N_k) - 1 . $$
#
# Tiles outside are **skipped**: not read, not multiplied. Inside, a warp looks at its own 32 queries. Let the first of them be $i$; it sees keys up to $i + s$, and the last one up to $i + s + 31$. For a tile of keys from $j_0$ on:
#
# - $j_0 > i + s + 31$: too late for all 32. The warp skips it, though the CTA has read it for other warps. Likewise if $j_0 + B_c \le i + s - w + 1$, too early for all.
# - $j_0 + B_c \le i + s + 1$, and $j_0 > i + s + 31 - w$: all 32 see all 64 keys. The tile is **whole**: no mask, the same instructions as in rung 13.
# - otherwise the tile is **masked**: each score is compared with its row's last key, and with its first.
#
# The same in Python:
# %%
def tiles(i0, Nq, Nk, window=None, Br=128, Bc=64):
    """First key of the first and of the last tile that the CTA with queries i0 .. i0 + Br works on."""
    shift, w = Nk - Nq, window or Nk + Nq
    last_key = min(i0 + Br + shift, Nk) - 1
    return max(i0 + shift - w + 1, 0) // Bc * Bc, last_key // Bc * Bc


# %%
def kinds(Nq, Nk, window=None, Br=128, Bc=64, strip=32):
    """What becomes of each strip of 32 queries and tile of keys: an index into draw_masks.KINDS."""
    found, shift, w = np.zeros((Nq // strip, Nk // Bc), int), Nk - Nq, window or Nk + Nq
    for row, column in np.ndindex(found.shape):
        j0, sees = column * Bc, row * strip + shift
        first, last = tiles(row * strip // Br * Br, Nq, Nk, window)
        skipped = j0 > sees + strip - 1 or j0 + Bc <= sees - w + 1
        whole = j0 + Bc <= min(sees + 1, Nk) and j0 > sees + strip - 1 - w
        found[row, column] = 0 if not first <= j0 <= last else 1 if skipped else 3 if whole else 2
    return found


# %%
masked = ...  # your prediction: how many tiles does a warp's strip of 32 queries mask on the diagonal, if Nq = Nk?

# %% tags=["reveal"]
maps = {
    "causal": kinds(512, 512),
    "causal, window of 150": kinds(512, 512, 150),
    "causal, 256 queries, 512 keys": kinds(256, 512),
}
predict(masked, int((maps["causal"] == 2).sum(1).max()), "masked tiles in a strip, causal")
draw_masks.tile_map(maps)

# %% [markdown]
# **What to see.** Black lines separate the CTAs. A row of boxes is a warp's strip of 32 queries. The mask is needed along the edges only: one box of each strip on the diagonal (for some $N_k - N_q$ two), and a few at the far edge of the window, however long the sequence. Everything else is whole or not there. The hatched boxes are the price of reading for four warps together.
#
# Is the arithmetic right? Hold it against the definition of the mask: a strip may only be skipped where no query sees a key, and only be called whole where all see all.
# %%
for name, (Nq, Nk, w) in zip(maps, ((512, 512, None), (512, 512, 150), (256, 512, None)), strict=True):
    seen = reference.visible(Nq, Nk, True, w).numpy().reshape(Nq // 32, 32, Nk // 64, 64)
    some, every = seen.any((1, 3)), seen.all((1, 3))
    kind = maps[name]
    print(
        f"{name}: multiplied where seen: {((kind >= 2) == some).all()}; whole where all is seen: {every[kind == 3].all()}"
    )

# %% [markdown]
# How much is multiplied that nobody sees? The corners of the masked boxes, a share that falls with $N$:
# %%
rows = {}
for N in (512, 1024, 2048, 4096, 8192, 16384):
    kind, pairs = kinds(N, N), N * (N + 1) / 2
    rows[N] = {
        "of all tiles, read": (kind > 0).mean(),
        "of all scores, multiplied": (kind >= 2).mean(),
        "of those, seen": pairs / ((kind >= 2).sum() * 32 * 64),
    }
pd.DataFrame(rows).T.rename_axis("N").map("{:.1%}".format)


# %% [markdown]
# The last column is a bound. TFLOP/s are counted with the FLOPs of the *seen* half, so if all else were equal, a causal kernel would reach that share of its TFLOP/s without a mask.
#
# <details><summary>Other masks and scores: FlexAttention, ALiBi, softcap, sinks, dropout</summary>
#
# Such a map is what PyTorch's [FlexAttention](https://docs.pytorch.org/docs/stable/nn.attention.flex_attention.html) builds from a function of $(i, j)$: its `BlockMask` lists for each block of queries the *full* blocks of keys and the *partial* ones, to which the function is applied. A second function may change scores: ALiBi adds a slope times $j - i$ ([arXiv 2108.12409](https://arxiv.org/abs/2108.12409)), a softcap takes $c \tanh(S / c)$ ([arXiv 2408.00118](https://arxiv.org/abs/2408.00118)). A learned *sink* is one more score $s$ in each row's softmax, with a value of 0: the state $(m, l, o) = (s, 1, 0)$, merged at the end by notebook 02's operator. Dropout sets elements of the rounded $P$ to zero after $l$ has been summed, chosen by a hash of a seed and their position, so that the backward pass can choose the same again. This rung has none of these.
#
# </details>
#
# ## 3 · Long tiles first
#
# Without a mask all CTAs have the same work. Now the first queries see one or two tiles of keys, the last ones all of them. That matters at the **end**. A GPU takes up blocks in the order of their numbers, each as soon as a place is free (CUDA does not promise that, but it is what one observes). If one of the last to be taken up is a long one, it runs on when all others are done. So the long ones should come first, and the short ones fill the gaps at the end. (For a list of jobs on equal machines this is the LPT rule: [Graham, 1969](https://doi.org/10.1137/0117039) proved that it ends at most a third later than the best order of all.)
#
# **A model**, so that we can predict. An H200 has 132 [SMs](glossary.md#sm), and the kernel has two CTAs on each: 264 places. A CTA takes as long as it has tiles of keys; nothing else takes time; all run equally fast; blocks start in the order of their numbers.
# %%
def kernel_order(N, D, heads, keys_at_once=32 << 20):
    """(head, tile of queries) of each CTA by blockIdx.x, as in the rung. Why only some heads at a time: see below."""
    count, at_once = N // 128, max(1, keys_at_once // (4 * N * D))
    order = []
    for first in range(0, heads, at_once):
        group = range(first, min(first + at_once, heads))
        order += [(head, tile) for tile in reversed(range(count)) for head in group]
    return order


def work(order, N):
    """Tiles of keys of each CTA."""
    length = [(last - first) // 64 + 1 for first, last in (tiles(128 * t, N, N) for t in range(N // 128))]
    return [length[tile] for _, tile in order]


# %%
N, D = 4096, 128
heads = 16384 // N * 2048 // D  # B·H of the headline workload
longest = kernel_order(N, D, heads)
orders = {
    "longest first (this rung)": longest,
    "head after head, first queries first (as rung 13)": sorted(longest),
    "shortest first": sorted(longest, key=lambda cta: cta[1]),
}
runs = {name: schedule.run(work(order, N), 132 * 2) for name, order in orders.items()}
draw_masks.occupancy(runs, 132 * 2)

# %% [markdown]
# **What to see.** All three keep the machine full for most of the time; they differ in how it empties. With the longest first, all places finish together.
#
# The same for the whole headline workload (16384 tokens, $H \cdot D = 2048$), as the time beyond that of a machine with no idle place:
# %%
gain = ...  # your prediction: at N = 1024, D = 128, how many times as fast is longest first as head after head?

# %% tags=["reveal"]
rows = {}
for D in (64, 128):
    for N in (512, 1024, 2048, 4096, 8192, 16384):
        longest = kernel_order(N, D, 16384 // N * 2048 // D)
        ideal = sum(work(longest, N)) / 264
        spans = [schedule.makespan(work(order, N), 264) for order in (longest, sorted(longest))]
        rows[D, N] = [*(f"{span / ideal - 1:.1%}" for span in spans), f"{spans[1] / spans[0]:.2f}"]
predict(gain, float(rows[128, 1024][2]), "times as fast at N = 1024, D = 128", within=0.02)
columns = ["longest first", "head after head", "predicted gain"]
predicted = pd.DataFrame(rows, columns).T.rename_axis(["D", "N"])
predicted


# %% [markdown]
# Take the gain for an upper bound: a CTA that has its SM to itself runs faster than the model says, and every CTA has a beginning and an end.
#
# ### But not all heads at once
#
# "Longest first" taken literally starts with the last tile of *every* head. The places then hold CTAs of all heads side by side, and each reads all keys of its head. The L2 cache, which all SMs share, has 60 MiB on an H200 ([notebook 00](00_start_here.ipynb)). How many heads are at work at a time, and how large are their $K$ and $V$ together?
# %%
def at_a_time(order, N):
    """The most heads at work at once, over forty points in time."""
    run, heads = schedule.run(work(order, N), 264), np.array([head for head, _ in order])
    times = np.linspace(0, run.end.max() * 0.999, 40)
    return max(len(set(heads[(run.begin <= t) & (t < run.end)])) for t in times)


rows, N, D = {}, 16384, 128
choices = {"head after head": sorted(kernel_order(N, D, 16)), "this rung": kernel_order(N, D, 16)}
choices["all heads at once"] = kernel_order(N, D, 16, keys_at_once=1 << 40)
for name, order in choices.items():
    span, most = schedule.makespan(work(order, N), 264) * 264 / sum(work(order, N)) - 1, at_a_time(order, N)
    rows[name] = {"heads at a time": most, "their K and V, MB": most * 4 * N * D / 1e6, "idle": f"{span:.1%}"}
pd.DataFrame(rows).T

# %% [markdown]
# All heads at once leave no gap at the end, but need far more cache than there is. One head after the other ends badly, and keeps more keys in use than one might think: the long tiles of a head come last, and still run when the next heads have begun. The kernel takes as many heads at a time as have 32 MiB of keys and values, longest tiles first: as good an end, with keys that fit in the L2. What would a miss cost? A CTA does $4 \cdot 128 \cdot d$ FLOPs for each key, whose $K$ and $V$ rows have $4d$ bytes: 128 FLOPs per byte. If every tile came from [HBM](glossary.md#hbm):
# %%
copy = record.load("device", "ceilings").query("name == 'copy'").value.median()
print(f"{copy:.2f} TB/s, a copy's bandwidth on an H200, would allow no more than {128 * copy:.0f} TFLOP/s")

# %% [markdown]
# That is the worst case, and still above the kernel's speed. Measured, by how many MiB of $K$ and $V$ are in use together (all heads: 128):

# %%
one_head = ...  # your prediction: one head at a time, its longest tiles first: times as long; D = 128, N = 16384
all_heads = ...  # your prediction: and all heads at once?

# %% tags=["reveal"]
samples = record.load("20_causal_gqa", "at_once")
ms = samples.groupby(["D", "Nk", "mib"])["ms"].median().unstack("mib").rename_axis(["D", "N"])
ms = ms.rename(columns={0: "one head", 32: "32 (this rung)", 1 << 20: "all heads"}).rename_axis(columns="MiB")
longer = ms.div(ms["32 (this rung)"], axis=0)
predict(one_head, longer.loc[(128, 16384), "one head"], "times as long, one head at a time")
predict(all_heads, longer.loc[(128, 16384), "all heads"], "times as long, all heads", within=0.05)
print(f"milliseconds over those of this rung, causal, fp16, {samples['device'].iloc[0]}")
longer.round(3)

# %% [markdown]
# **What to see.** One head at a time takes 6<!--= 100 * (min(at_once(0)) - 1):.0f --> to 12<!--= 100 * (max(at_once(0)) - 1):.0f --> % longer (by the model 6 to 16). 16 or 64 MiB take 1<!--= 100 * (max(at_once(16) + at_once(64)) - 1):.0f --> % longer at most. All heads at once cost 2<!--= 100 * (max(at_once(1 << 20)) - 1):.0f --> % at worst, and gain 1<!--= 100 * (1 - min(at_once(1 << 20))):.0f --> % at best.

# %% [markdown]
# ## 4 · Heads that share keys
#
# While a text is generated, $K$ and $V$ of all earlier tokens are kept in a cache. Its size often decides how many requests fit on a GPU, and the time to read it decides how fast a token comes (notebook 21). So models let several query heads share a head of $K$ and $V$: all of them in *multi-query attention* ([Shazeer, 2019](https://arxiv.org/abs/1911.02150)), some in *grouped-query attention* ([Ainslie et al., 2023](https://arxiv.org/abs/2305.13245)). With $H$ query heads and $H_{kv}$ heads of $K$ and $V$, query head $h$ reads head $\lfloor h / (H / H_{kv}) \rfloor$.
# %%
draw_masks.heads(8, (8, 2, 1))

# %%
layers, H, D, tokens = 32, 32, 128, 32768
rows = {Hkv: record.kv_bytes(1, Hkv, 1, D) * layers for Hkv in (32, 8, 1)}  # of one token: K and V, 2 bytes each
cache = {Hkv: {"KB per token": n / 1e3, f"GB for {tokens} tokens": n * tokens / 1e9} for Hkv, n in rows.items()}
pd.DataFrame(cache).T.rename_axis("Hkv").round(2)

# %% [markdown]
# (32 layers, 32 query heads of 128, 16 bits.) The sharing does *not* change the number of FLOPs: each query head still multiplies with all keys. For the kernel it is one integer division. Copying the shared heads out beforehand, as `repeat_interleave` does, would give the same numbers and lose what was saved.
#
# ## 5 · Sequences that share a batch
#
# A batch of texts has texts of different lengths. In a rectangular tensor the short ones are padded. Or they are **packed**: all tokens one behind the other in one long row of tokens, and beside it the row numbers where each sequence begins, `cu_seqlens`. A query sees keys of its own sequence only.
# %%
lengths = [300, 40, 512, 120, 77, 231]
draw_masks.packed(lengths)

# %% [markdown]
# Packing saves more work than rows, as tiles of keys grow with the *square* of a length. Sixteen sequences of random lengths:
# %%
n = np.random.default_rng(0).integers(128, 4097, 16)


def tiles_of_work(length):
    return sum((last - first) // 64 + 1 for first, last in (tiles(i0, length, length) for i0 in range(0, length, 128)))


padded, packed = 16 * tiles_of_work(int(n.max())), sum(tiles_of_work(int(x)) for x in n)
print(
    f"rows: packed has {n.sum() / (16 * n.max()):.0%} of padded; tiles of keys under a causal mask: {packed / padded:.0%}"
)

# %% [markdown]
# A CTA has to find its sequence by itself: the lengths are on the GPU, and asking for them on the host would stall it. Each warp adds up the tiles of 32 sequences at a time with five shuffles (a prefix sum), and a vote finds the sequence in which this CTA's tile lies. The grid gets an upper bound, since each sequence has at most one tile that isn't full: $\lceil \text{rows} / 128 \rceil$ + (number of sequences). CTAs beyond the last tile leave at once.
#
# ## The kernel
# %%
show.region("20_causal_gqa", "schedule")

# %% [markdown]
# `find_work` is the order of section 3 (the branch that ends in line 103) and the search of section 5.
# %%
show.region("20_causal_gqa", "visible")

# %% [markdown]
# Section 2 in the kernel's words. (A CTA whose queries see nothing gets `j_last` = −64: its loop has no turn, and the result is the empty state.)
# %%
show.region("20_causal_gqa", "mask")

# %% [markdown]
# A masked score has to be $-\infty$ *after* it is scaled, and the mask comes before the scale: with a negative scale it writes $+\infty$. A scale of 0 would make NaN of either; the kernel sees to it that `scale_log2` is never 0.
# %%
show.region("20_causal_gqa", "tile_loop")

# %% [markdown]
# Keys are walked backwards, as in rung 13: the first tile is the one on the diagonal. Down to the first tile that all of its rows see whole, a warp forms the maximum before $P$, as rung 13 does in its first tiles: the mask costs no second version of the loop. A warp that doesn't see a tile skips neither barrier nor copies, for which the others wait.
#
# New is $d = 96$. A row then has 192 bytes, one and a half times around the 32 banks, and [chunks](glossary.md#chunk) of 16 bytes trade places in fours instead of eights (region `swizzle`). Neither `ldmatrix`, which reads, nor `cp.async`, which writes, has a [bank conflict](glossary.md#bank-conflict):
# %%
rows = {}
for D in (64, 96, 128):
    ray = xray(kernel, *(torch.randn(1, 1, 256, D).half() for _ in range(3)), causal=True)
    rows[D] = {op: ray.total(space="shared", op=op).excess for op in ("ldmatrix", "cp.async")}
pd.DataFrame(rows).T.rename_axis("bank conflicts, D")

# %% [markdown]
# ## Run and check
# %%
check(kernel)

# %% [markdown]
# Two promises can be checked bit by bit. A packed sequence gives what it gives alone:
# %%
starts = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
q, k, v = (torch.randn(1, 2, sum(lengths), 64, device=device).half() for _ in range(3))
together, _ = kernel(q, k, v, causal=True, cu_seqlens=(starts, starts))
for s, (begin, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:])):
    alone, _ = kernel(*(x[:, :, begin:end] for x in (q, k, v)), causal=True)
    print(f"sequence {s}, {lengths[s]} tokens: the same bits: {torch.equal(together[:, :, begin:end], alone)}")

# %% [markdown]
# And a view of a projection's output (B, N, 3, H, D), with strides, gives what contiguous copies give:
# %%
qkv = torch.randn(2, 200, 3, 4, 64, device=device).half()
q, k, v = qkv.permute(2, 0, 3, 1, 4)  # three views (B, H, N, D), nothing is moved
o, _ = kernel(q, k, v, causal=True)
copied, _ = kernel(*(x.contiguous() for x in (q, k, v)), causal=True)
print("strides of q:", q.stride(), " the same bits as from contiguous copies:", torch.equal(o, copied))

# %% [markdown]
# One promise can *not* be made: that a row of $O$ depends, bit by bit, on its own query and keys alone. As in rung 13, a warp votes: if one of its 32 rows meets a score far above its maximum, all with $P > 1$ take a new maximum, against which $P$ is rounded. Let query 255 look for key 5, which no earlier row of its warp, rows 224 to 254, is interested in:
# %%
moved = ...  # your prediction: how many of the other 31 rows of the warp change?

# %% tags=["reveal"]
q, k, v = (torch.randn(1, 1, 256, 64, device=device).half() for _ in range(3))
other = q.clone()
other[:, :, 255] = 3 * k[:, :, 5]
apart = (kernel(q, k, v, causal=True)[0] - kernel(other, k, v, causal=True)[0]).abs().amax(-1).flatten()[:255]
predict(moved, int((apart > 0).sum()), "rows but the last change", within=0.3)
print(f"rows {apart.nonzero().min()} to {apart.nonzero().max()}, by up to {apart.max():.1e}")

# %% [markdown]
# By a rounding of fp16, no more. A test that nothing leaks from the future needs a tolerance (exercise 24.1).
#
# ## Predict, then measure
#
# ### Skipped tiles are never read
#
# From the tile maps of section 2 two things follow exactly. Bytes of $K$ that are read: 64 rows of 128 bytes for each tile of a CTA that isn't white. And `mma.sync` instructions: a strip of 32 queries with a tile of 64 keys is 2·8·4 for $QK^\top$ at $d = 64$, and as many for $PV$. The X-ray counts both while the kernel runs.
# %%
share = ...  # your prediction: with a window of 150 instead of no mask, which share of the mma.sync is left at N = 512?

# %% tags=["reveal"]
q, k, v = (torch.randn(1, 2, 512, 64).half() for _ in range(3))
rows = {}
for name, options in {"no mask": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 150}}.items():
    kind = kinds(512, 512, options.get("window")) if options else np.full((16, 8), 3)
    ray = xray(kernel, q, k, v, **options)
    read = 2 * (kind.reshape(4, 4, 8) > 0).any(1).sum() * 64 * 128
    mma = 2 * (kind >= 2).sum() * 2 * (2 * 8 * 4)
    counts = ray.tensors.bytes_read.K, read, ray.trace.instructions["mma.sync"], mma
    assert counts[::2] == counts[1::2], f"{name}: the prediction is off"
    rows[name] = dict(zip(("K bytes", "by the maps", "mma.sync", "by the maps "), counts))
predict(share, rows["window"]["mma.sync"] / rows["no mask"]["mma.sync"], "of the mma.sync")
pd.DataFrame(rows).T

# %% [markdown]
# Equal to the byte and to the instruction.
#
# ### The order of the tiles
#
# Does the kernel really begin with the last queries? A copy of it in which all but the first quarter of the CTAs leave at once, and an output that is full of NaN beforehand, show what is done first:
# %%
FIRST = "  const Work work = find_work<Br>(a, order);\n"
small = for_d64("20_causal_gqa")  # only what is needed for d = 64: compiles in less time


def rows_done_first(source):
    """Rows of O that the first quarter of the CTAs write, of 2 heads of 512 queries."""
    quarter = source.replace(FIRST, "  if (blockIdx.x >= gridDim.x / 4) return;\n" + FIRST)
    x = torch.randn(1, 2, 512, 64).half()
    out = torch.full_like(x, torch.nan), torch.full((1, 2, 512), torch.nan)
    _, lse = load(source=quarter, device="cpu", quiet=True)(x, x, x, causal=True, out=out)
    return [lse[0, h].isnan().logical_not().nonzero().flatten().tolist() for h in range(2)]


for h, done in enumerate(rows_done_first(small.source)):
    print(f"head {h}: {len(done)} rows, {done[0]} to {done[-1]}")

# %% [markdown]
# ### What grouped heads save, and what not
#
# Eight query heads on eight, two and one heads of $K$ and $V$: the bytes of $K$ that threads ask for, and how often each byte is asked for.
# %%
rows = {}
for Hkv in (8, 2, 1):
    q, k, v = torch.randn(1, 8, 256, 64).half(), *(torch.randn(1, Hkv, 256, 64).half() for _ in range(2))
    rows[Hkv] = xray(kernel, q, k, v, causal=True).tensors.loc["K"]
counted = pd.DataFrame(rows).T.rename_axis("Hkv")[["size_bytes", "bytes_read", "reads_per_byte"]]
counted.astype({"size_bytes": int, "bytes_read": int})

# %% [markdown]
# The cache shrinks, the requests stay: each query head has CTAs of its own. They find their keys in the L2 more often. Here, where a tile of 128 queries does a lot of work with each key, that makes little difference to the time; in the next notebook there is one query, and it makes all the difference.
#
# ## Beside its peers
#
# We expect a speed that grows with $N$, and a larger lead over FLASH than without a mask: FlashAttention-2 launches its CTAs head after head, first queries first ([`grid(num_m_block, b, h)`](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/flash_fwd_launch_template.h)), the second of section 3's orders.
# %%
plot.recorded("20_causal_gqa", "causal", plot.throughput)

# %%
plot.recorded("20_causal_gqa", "causal", lambda s: plot.ratio(s, "20_causal_gqa", ["SDPA FLASH", "SDPA CUDNN"]))


# %% [markdown]
# **What to see.** Ahead of FLASH at every length, and behind cuDNN and FA3 (FlashAttention-3), which use Hopper's instructions (notebook 30); FA4 (FlashAttention-4) is behind at $d = 64$ up to $N = 1024$. By how much is the lead over FLASH larger under the mask than without it?
# %%
def lead(samples):
    """The lead over FLASH, mean of both formats, by D and N."""
    return (
        record.ratio(samples, "20_causal_gqa", "SDPA FLASH").groupby(["D", "Nk"]).ratio.mean().rename_axis(["D", "N"])
    )


def leads(samples):
    table = pd.DataFrame({"no mask": lead(record.load("20_causal_gqa", "forward")), "causal": lead(samples)})
    more = (table.causal / table["no mask"]).rename("causal over no mask")
    return table.join(more).round(2).join(predicted["predicted gain"])


plot.recorded("20_causal_gqa", "causal", leads)


# %% [markdown]
# From $N = 1024$ on the measured gain doesn't pass the predicted one, to the digits of the table: about half of it or less at $d = 64$, half to three quarters at $d = 128$. (FLASH's tiles differ otherwise, too: at $N = 512$ the gain passes the bound.)
#
# 64 query heads on 8 heads of $K$ and $V$, and 64 on 64: the same FLOPs, an eighth of the keys. `ratio` is the speed with few heads over that with many, from the same rounds; the lowest and the highest of both formats:
# %%
def grouped(samples):
    return record.grouped(samples, "20_causal_gqa").groupby(["Nk", "D"])[["ratio"]].agg(["min", "max"]).round(2)


plot.recorded("20_causal_gqa", "groups", grouped)


# %% [markdown]
# Packed batches of random lengths. `ratio` compares with every sequence running at the speed that the kernel reaches on a full batch of its length; `to_padded` is the time of the padded batch over that of the packed one. Three batches of 16 sequences, both formats:
# %%
def packed_speeds(samples):
    found = record.ratio_to_ideal(samples)
    return found.groupby(["causal", "D"])[["ratio", "to_padded"]].agg(["min", "max"]).round(2)


plot.recorded("20_causal_gqa", "packed", packed_speeds)

# %% [markdown]
# ## What still hurts
#
# 1. **The end of the grid** is better, not gone, and at short lengths the prologue of every CTA weighs more. A *persistent* kernel, whose CTAs stay and fetch their next tile of queries, overlaps the one with the other; notebook 31 builds one.
# 2. **Four warps, one diagonal.** The hatched boxes: warps that have nothing to do with a tile wait at its barrier for those that have.
# 3. **One query.** When a text is generated token by token, $N_q = 1$. A CTA of this kernel then multiplies 128 rows of which one is real. That case needs another division of the work: [21 · Split the keys](21_split_kv.ipynb).
# %% [markdown]
# ## Exercises
#
# In a *task* you write a region of the rung. `blank` shows what is given and what has to hold; your cell is compiled, checked in all cases of `check`, and X-rayed beside the rung's own. Task 20.9 is the whole rung: `python -m helpers exercise new 20 kernel`.

# %%
from helpers import blank, hint, progress

# %load_ext helpers

# %% [markdown]
# ### Task 20.1 · Which tiles does a CTA visit?
#
# Section 2's `tiles` in C: the first key of the first and of the last tile that any row of the CTA sees. It is a few lines; what is hard are the edges: queries without keys, ragged lengths, and a `/` that rounds towards zero.

# %%
blank("20", "visible")

# %%
# %%region 20 visible -> my_visible
# // your code

# %%
hint("20.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `visible` of [20_causal_gqa.cu](../kernels/20_causal_gqa.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Task 20.2 · The mask of a warp
#
# Which of a lane's scores does the mask remove, and below which key does a warp need none? It teaches how to turn an accumulator's index into a query and a key.

# %%
blank("20", "mask")

# %%
# %%region 20 mask -> my_mask
# // your code

# %%
hint("20.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `mask` of [20_causal_gqa.cu](../kernels/20_causal_gqa.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Exercise 20.3 · Off by one, most of the time right
#
# Somebody writes the last key that a CTA sees as `min(i0 + Br + shift, Nk) - 2`, one too few. The kernel passes tests at $N_q = N_k = 64$, 128, 256 and 1024. Why? And for which shapes is it wrong? Give an $N_q$ and an $N_k$, both at most 200.

# %%
late = load(source=small.replace("min(i0 + Br + shift, Nk) - 1 : Nk", "min(i0 + Br + shift, Nk) - 2 : Nk"), quiet=True)

# %%
# Exercise 20.3
Nq_mine, Nk_mine = 128, 128


# %%
def wrong_there():
    Nq, Nk = int(Nq_mine), int(Nk_mine)
    assert (Nq, Nk) == (Nq_mine, Nk_mine) and 1 <= Nq <= 200 and 1 <= Nk <= 200, "two whole numbers from 1 to 200"
    q, k, v = (torch.randn(1, 1, n, 64, device=device).half() for n in (Nq, Nk, Nk))
    case = [reference.Case(f"Nq = {Nq}, Nk = {Nk}", q, k, v, causal=True)]
    assert check(kernel, case).ok, "the kernel itself is wrong there"
    assert not check(late, case).ok, "there its result is right"
    return True


exercise.verify("20.3", wrong_there)

# %% [markdown]
# <details><summary>Hint</summary>
#
# `last_key` only decides which tile is the last. When is it the first key of its tile?
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# Nq_mine, Nk_mine = 128, 129
# ```
#
# `last_key` is rounded down to a whole tile, so it matters only if the true last key is the first of its tile, a multiple of 64. With $N_q = N_k$ a full CTA ends at key $i_0 + 127$, never a multiple; a ragged one is cut at $N_k - 1$, and $N = 65$ or $129$ would find the bug, too. Powers of two from 2 on never do. ($N = 1$ does: its last key is key 0.) Hence the lengths one off 64 and 128 among the cases of `check`.
# </details>

# %% [markdown]
# ### Exercise 20.4 · How many tiles does a window need?
#
# Write `most_tiles`: the most tiles of 64 keys that a CTA of 128 queries reads with a window of $w$ keys. ($N_q$ and $N_k$ are much larger; the check tries every alignment.)

# %%
# Exercise 20.4


def most_tiles(w):
    return w // 64


# %%
def for_every_alignment():
    for w in (1, 2, 64, 65, 66, 128, 150, 1000):
        reads = (tiles(1024, 4096, 4096 + s, w) for s in range(64))
        seen = max((last - first) // 64 + 1 for first, last in reads)
        assert most_tiles(w) == seen, f"w = {w}: {most_tiles(w)}, but an alignment needs {seen}"
    return True


exercise.verify("20.4", for_every_alignment)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Together the 128 queries see $w + 127$ keys. And $n$ neighbouring keys touch the most tiles when the first of them is the last of its tile: 1 key there, and $n - 1$ more from the beginning of the next tile on.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def most_tiles(w):
#     return 1 + -(-(w + 126) // 64)
# ```
#
# It does not depend on $N$: attention with a window is linear in the length. For $w = 1$ the 128 keys lie on three tiles, of which each warp needs at most two.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Three new tokens, 500 in the cache. Which keys does the first of them see?</summary>
#
# Keys 0 to 500: all of the cache, and itself. It is query 0, and 0 + 503 − 3 = 500.
#
# </details>
# <details><summary>2. What does a mask cost, in tiles per strip of queries, as N grows?</summary>
#
# The same always: the tiles on the diagonal, and at the window's far edge if there is one. All others are whole, or skipped.
#
# </details>
# <details><summary>3. Why start the long tiles first?</summary>
#
# So that what runs last is short. A long block that starts last runs alone on an empty machine.
#
# </details>
# <details><summary>4. Why not the longest tiles of all heads at once?</summary>
#
# Their keys and values would not fit in the L2 together, and as many heads at a time as fit end nearly as well. Measured, it makes little difference: 2<!--= 100 * (max(at_once(1 << 20)) - 1):.0f --> % more time at worst, 1<!--= 100 * (1 - min(at_once(1 << 20))):.0f --> % less at best.
#
# </details>
# <details><summary>5. Grouped heads make K and V eight times smaller. Is the forward pass of training eight times faster?</summary>
#
# No: the FLOPs are the same, and so is the number of bytes that threads ask for. The cache is smaller, and more of the requests are answered by the L2.
#
# </details>
# <details><summary>6. Your batch has one text of 4096 tokens and fifteen of 128. Padded or packed, and why?</summary>
#
# Packed. Padded, all sixteen cost as much as the long one; the work under a mask grows with the square of the length.
#
# </details>
