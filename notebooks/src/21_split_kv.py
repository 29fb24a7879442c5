# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---


# %% [markdown]
# # 21 · Split the keys, merge the states
#
# [← 20 · Causal masks and grouped heads](20_causal_gqa.ipynb) | [21_split_kv.cu](../kernels/21_split_kv.cu) | [glossary](glossary.md) | [22 · Backward →](22_backward_fp32.ipynb)
#
# **After this notebook you can**
# - say why one query at a time leaves a GPU idle, and what time its bytes must take all the same;
# - merge finished outputs with nothing but their LSE, and prove that the order makes no difference;
# - predict from the number of heads, SMs and pieces how much of the bandwidth is reached, and choose the number of pieces;
# - run attention on a cache in pages, with sequences of different lengths.
#
# **Time** 60 minutes.
#
# **Needs** [02 · Online softmax](02_online_softmax.ipynb) and [20 · Causal masks and grouped heads](20_causal_gqa.ipynb). No GPU: without one the kernel runs on the emulator and the timings shown are recorded ones.
#
# **The idea in one line**: cut the keys into pieces, give each piece to CTAs of its own, and merge the partial results with the operator of notebook 02.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import inspect

import numpy as np
import pandas as pd
import torch

from helpers import check, fewest_pieces, load, predict, xray
from helpers import draw, draw_decode, exercise, plot, record, reference, schedule, show, workloads

torch.manual_seed(0)
kernel = load("21_split_kv")
device = kernel.device

# %% [markdown]
# ## The problem
#
# A language model answers in two phases. **Prefill** reads the prompt, all its tokens at once: many queries, rung 20's work. **Decode** writes one token at a time: each new token is one query per head, $N_q = 1$, and attends to the keys and values of all tokens before it, which wait in a cache. (In *speculative decoding* a small model drafts a few tokens and the large one verifies them in one step: $N_q$ is then the number of drafts plus one, [Leviathan et al., 2023](https://arxiv.org/abs/2211.17192).) How would rung 20 fare in decode? It has a CTA for every query head and 128 queries. An H200 has 132 [SMs](glossary.md#sm) with room for two such CTAs each:
# %%
rows = []
for B, H, Hkv, Nk, D in workloads.CACHES[:6]:
    rows.append((B, H, Hkv, Nk, D, record.kv_bytes(B, Hkv, Nk, D) / 1e9, B * H, B * H / (132 * 2), 1 / 128))
columns = ["B", "H", "Hkv", "Nk", "D", "cache, GB", "CTAs", "of 264 places", "of their rows in use"]
pd.DataFrame(rows, columns=columns).style.format({c: "{:.1%}" for c in columns[-2:]} | {"cache, GB": "{:.2f}"})

# %% [markdown]
# For one long text there are 32 CTAs: seven of eight places stay empty. Large batches have enough CTAs, but with [grouped heads](glossary.md#grouped-heads) several of them read the same keys. And in each CTA one row of 128 is real.
#
# Idle rows are no loss, if they are few. Count FLOPs and bytes: $4 N_q H N_k d$ FLOPs, $2 \cdot 2 \cdot H_{kv} N_k d$ bytes of $K$ and $V$ in 16 bits, so
#
# $$ \frac{\text{FLOPs}}{\text{bytes}} = N_q \cdot \frac{H}{H_{kv}} . $$
#
# With one query and no sharing that is 1. A copy reaches 4.2<!--= record.load("device", "ceilings").query("name == 'copy'").value.median():.1f --> TB/s on an H200, a matrix product 745<!--= record.load("device", "ceilings").query("name == 'fp16 matmul'").value.median():.0f --> TFLOP/s (notebook 00). What does the memory allow then?
# %%
used = ...  # your prediction: the share of the tensor cores' TFLOP/s that memory allows with one query and H = 8 Hkv

# %% tags=["reveal"]
ceilings = record.load("device", "ceilings").groupby("name").value.median()
copy, matmul = ceilings["copy"], ceilings["fp16 matmul"]
intensities = {"Nq = 1, H = Hkv": 1, "Nq = 1, H = 8 Hkv": 8, "Nq = 16, H = 8 Hkv": 128}
predict(used, 8 * copy / matmul, "of the tensor cores' speed")
draw_decode.roofline(intensities, copy, matmul, record.about("device", "ceilings")["device"])

# %% [markdown]
# **What to see.** One query per head, without sharing, can use less than a hundredth of what the tensor cores offer. A decode step is a **read of the cache**, and its unavoidable time is bytes divided by bandwidth. The yardstick is a copy on the same card (which writes as much as it reads; a kernel that only reads may come out a little above it). At a copy's speed 128 rows per key need 539 TFLOP/s, more than rung 20 reaches; 16 need 67.
# %%
for B, _, Hkv, Nk, D in workloads.CACHES[:3]:
    size = record.kv_bytes(B, Hkv, Nk, D)
    print(f"B = {B}, Hkv = {Hkv}, Nk = {Nk}: {size / 1e6:.0f} MB take at least {size / copy / 1e9:.3f} ms per layer")

# %% [markdown]
# To reach that, enough of the machine has to read at the same time. So the *keys* have to be divided among CTAs. Then each CTA has seen a piece of the keys only.

# %% [markdown]
# ## 1 · Pieces are states
#
# Notebook 02: any part of a row of scores is described by a state $(m, l, o)$, its maximum, the sum of $e^{s_j - m}$, and the same sum weighted with the values. Two states merge:
#
# $$ (m_1, l_1, o_1) \oplus (m_2, l_2, o_2) = \bigl(m,\; l_1 e^{m_1-m} + l_2 e^{m_2-m},\; o_1 e^{m_1-m} + o_2 e^{m_2-m}\bigr), \quad m = \max(m_1, m_2), $$
#
# in any order. A CTA that is done with its piece has $O = o / l$ and $\mathrm{LSE} = m + \ln l$. That is a [state](glossary.md#state) again: $(\mathrm{LSE}, 1, O)$ describes the same part, since $e^{\mathrm{LSE}} = l\,e^m$ and $1 \cdot O \cdot e^{\mathrm{LSE}} = o\,e^m$. So two tensors per piece are enough, and *the operator is the very same*. At the end, divide once more. (For decoding the idea is known as [Flash-Decoding](https://pytorch.org/blog/flash-decoding/): Dao, Haziza, Massa and Sizov, 2023.)


# %%
def merge(a, b):
    """Notebook 02's operator, with the output: states (m, l, o) of two parts; an empty part is (-inf, 0, 0)."""
    m = max(a[0], b[0])
    if m == -np.inf:
        return a  # both are empty; -inf - (-inf) would be NaN
    wa, wb = np.exp(a[0] - m), np.exp(b[0] - m)
    return m, wa * a[1] + wb * b[1], wa * a[2] + wb * b[2]


def piece(q, K, V):
    """What a CTA leaves: (LSE, 1, O) of some of the keys."""
    o, lse = reference.attention(*(x[None, None] for x in (q, K, V)))
    return lse.item(), 1.0, o[0, 0, 0].numpy()


# %%
q, K, V = torch.randn(1, 64), torch.randn(1000, 64), torch.randn(1000, 64)
cuts = [0, 100, 101, 480, 777, 1000]  # five pieces, one of them a single key
states = [piece(q, K[a:b], V[a:b]) for a, b in zip(cuts, cuts[1:])]
_, _, whole = piece(q, K, V)
rng, off = np.random.default_rng(0), []
for _ in range(1000):  # merge any two, until one is left
    left = [states[i] for i in rng.permutation(5)] + [(-np.inf, 0.0, np.zeros(64))]
    while len(left) > 1:
        left.append(merge(left.pop(rng.integers(len(left))), left.pop(rng.integers(len(left)))))
    m, l, o = left[0]
    off.append(abs(o / l - whole).max())
print(
    f"1000 random orders, with an empty piece among them: off by at most {max(off):.1e}, of outputs up to {abs(whole).max():.2f}"
)

# %% [markdown]
# Rounding of float64, whatever the order and the tree. Two such trees over the first four pieces, drawn as in notebook 02, with the LSE of a piece in the place of a score:

# %%
trees = {"left to right": (((0, 1), 2), 3), "in pairs": ((0, 1), (2, 3))}
draw.bracketings([round(m, 2) for m, _, _ in states[:4]], trees, leaf="one piece each, m = its LSE, l = 1")

# %% [markdown]
# (Nothing says that the pieces lie on one GPU. Where a cache is divided among several, each computes $(O, \mathrm{LSE})$ of its own keys, and $d + 1$ numbers per row are exchanged and merged. Ring attention, [Liu et al., 2023](https://arxiv.org/abs/2310.01889), sends $K$ and $V$ around instead and merges as they pass, for long prompts and training: [notebook 50](50_ring.ipynb).)
#
# ## 2 · How many pieces?
#
# Too few, and places stay empty. So as many as possible? Each piece leaves $O$ and the LSE in fp32, $4(d + 1)$ bytes for each row, which are written, and read again by the merge. And each CTA has a beginning and an end, in which it waits for its first keys, or merges. A small machine shows what else there is: 8 SMs with two places each, 6 heads of 960 keys, cut into 1, 2, 3 or 5 pieces.
# %%
slower = ...  # your prediction: which number of pieces is slower than the one before it: 2, 3 or 5?

# %% tags=["reveal"]
runs = {}
for splits in (1, 2, 3, 5):
    run = schedule.run([960 / splits] * 6 * splits, places=16)
    runs[f"{splits} piece{'s' * (splits > 1)}"] = run.assign(split=np.arange(6 * splits) // 6)
ends = {int(name.split()[0]): run.end.max() for name, run in runs.items()}
predict(slower, next(n for m, n in zip(ends, [*ends][1:]) if ends[n] > ends[m]), "pieces are slower than fewer")
draw_decode.pieces(runs, 16, per_sm=2)

# %% [markdown]
# **What to see.** Three pieces are *worse* than two: 18 CTAs on 16 places need a second wave, in which two are at work. Five pieces nearly fill two waves, and take three fifths of the time that three need. What counts is how full the **last [wave](glossary.md#wave)** is. The rung's own rule, for calls that give no number:

# %%
print(inspect.getsource(fewest_pieces))

# %% [markdown]
# `ctas` is what there is without splitting, `places` the number of SMs times CTAs per SM, `most` one piece for each 256 keys. The *fewest* pieces that fill nine tenths are taken, as more of them only add bytes. For the caches above:

# %%
rows = []
for B, H, Hkv, Nk, D in workloads.CACHES[:8]:
    alone, places = B * Hkv, 132 * kernel.rung.ctas(D)
    n = fewest_pieces(alone, places, max(1, min(Nk // 256, 1024)))
    waves = -(-n * alone // places)
    extra = 2 * n * B * H * 4 * (D + 1) / record.kv_bytes(B, Hkv, Nk, D)  # written, and read again
    rows.append((B, Hkv, Nk, D, alone, places, n, waves, n * alone / waves / places, extra))
columns = ["B", "Hkv", "Nk", "D", "CTAs alone", "places", "splits", "waves", "filled", "more bytes"]
pd.DataFrame(rows, columns=columns).style.format({"filled": "{:.0%}", "more bytes": "{:.2%}"})

# %% [markdown]
# ### A model of the bandwidth
#
# Must all places be filled? A CTA at work has only so many bytes [in flight](glossary.md#in-flight), and gets them one latency later (**Little's law**: bytes in flight = bandwidth × latency). In this rung each of 4 warps has 2 steps of 16 keys ahead at $d = 128$, 8 KB each: 64 KB per CTA. The whole bandwidth needs

# %%
in_flight = 4 * 2 * (2 * 16 * 128 * 2)  # warps, steps ahead, bytes of K and V in a step
for microseconds in (0.5, 1, 2, 4):
    ctas = copy * 1e12 * microseconds * 1e-6 / in_flight
    print(f"latency {microseconds} µs: {ctas:.0f} CTAs have {copy * microseconds:.1f} MB in flight")


# %% [markdown]
# So the model has one unknown, how many CTAs are *enough*. All that are at work get equal shares; if fewer than enough are at work, the bandwidth falls in proportion. The bytes of the partial results are added. Three guesses, for a cache that has 15 CTAs before it is split. Where does each curve reach the top, and what happens after 17 pieces?
# %%
def of_copy(splits, shape, enough):
    """Predicted bandwidth of K and V, as a share of a copy's."""
    B, H, Hkv, Nk, D = shape
    steps = -(-Nk // 64)  # of 64 keys, 16 for each warp
    per_split = -(-steps // splits)
    lengths = [max(0, min(per_split, steps - s * per_split)) for s in range(splits)]
    time = schedule.shared([n for n in lengths for _ in range(B * Hkv)], 132 * kernel.rung.ctas(D), enough)
    partial = 2 * splits * B * H * 4 * (D + 1) / record.kv_bytes(1, 1, 64, D)  # in steps' worth of bytes
    return steps * B * Hkv / (time + partial)


# %%
shape = workloads.CACHES[4]
B, H, Hkv, Nk, D = shape
tried = [1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 17, 18, 19, 20, 24, 32, 48, 64, 96, 128]
guesses = {f"{enough} CTAs are enough": enough for enough in (66, 132, 264)}
predicted = pd.DataFrame({name: [of_copy(n, shape, e) for n in tried] for name, e in guesses.items()}, tried)
own = fewest_pieces(B * Hkv, 132 * kernel.rung.ctas(D), Nk // 256)
title = f"B = {B}, H = {H}, Hkv = {Hkv}, Nk = {Nk}, D = {D}: predicted"
draw_decode.bandwidth(predicted, own, title)

# %% [markdown]
# **What to see.** With few pieces all three rise in proportion, as fast as each guess says. Once full, the curves are not flat: 18 pieces are 270 CTAs on 264 places, a second wave with six at work, and all three dip, most if every place counts. To the right the partial results begin to cost. The number the rung takes is near the best for all three guesses: it works without knowing the latency. "Beside its peers" lays the measured points over this figure.
# %% [markdown]
# ## 3 · Heads of a group are rows of a tile
#
# In rung 20 each query head has CTAs of its own. With grouped heads several of them read the same keys, which cost little there. Here reading is all there is. So the query heads of a group are put into *one* tile of 16 rows: row $r$ is query $\lfloor r / g \rfloor$ of head $r \bmod g$ of the group, with $g = H / H_{kv}$. Each `mma.sync` multiplies keys with all of them, and each key is read once.
#
# The four warps share these rows, but no keys: each has keys, buffers and a state of its own. The loop has no barrier, so no warp's copies wait for a slower warp. Their four states are merged at the end, by $\oplus$.

# %% [markdown]
# ## 4 · A cache in pages
#
# Texts grow, and nobody knows how long they will be. Room for the longest possible one for each would be mostly empty. So the cache is cut into **pages** of a fixed number of keys, which any sequence may take as it grows, and a **block table** says for each sequence which pages are its own, in order ([PagedAttention, Kwon et al., 2023](https://arxiv.org/abs/2309.06180)). Key $j$ of sequence $b$ lies on page `table[b][j // page]`, in row `j % page`. Three sequences, pages of 16:

# %%
page, lengths = 16, [70, 9, 41]
order = np.random.default_rng(3).permutation(18)
table = np.zeros((3, 6), np.int32)  # entries past the end of a sequence mean nothing
table[0, :5], table[1, :1], table[2, :3] = order[:5], order[5:6], order[6:9]
draw_decode.block_table(table, lengths, page, 18)

# %% [markdown]
# For the kernel it is one more load, from a table that stays in the caches, before the address of a row is known. A sequence's `length` says where its keys end, and also which key its last query sees under a causal mask.
#
# A table can do more than avoid waste. Two requests that begin with the same system prompt may name the *same* pages for it, stored once (prefix sharing, [vLLM](https://docs.vllm.ai/en/latest/features/automatic_prefix_caching.html)). Here a page has the layout (Hkv, page, D); vLLM's FlashAttention back end keeps (page, Hkv, D), tokens first. The kernel takes strides, so that is a transposed view.
#
# ## The kernel
# %%
show.region("21_split_kv", "rows")

# %% [markdown]
# Pieces are whole steps of all four warps, 64 keys, counted by each sequence's own length. A piece that begins past the end has no step at all and leaves the empty state.

# %%
show.region("21_split_kv", "load_tile")

# %%
show.region("21_split_kv", "tile_loop")

# %% [markdown]
# The loop is notebook 12's pipeline for one warp: `__syncwarp` stands where the barrier stood. The softmax is notebook 10's, with the maximum taken every time: the kernel waits for memory in any case.
# %%
show.region("21_split_kv", "state")

# %%
show.region("21_split_kv", "merge_splits")

# %% [markdown]
# The second kernel: a CTA per row of $O$. Groups of threads (here `lane` is a group's number, not a thread's in its warp) take the pieces in turns and merge as they go; then the groups' states are merged. `merge` is the function of notebook 02, on $(m, l)$; `weight` carries $o$ along. (The region `merge_warps` does the same for the four warps of a CTA, through shared memory.)

# %% [markdown]
# ## Run and check

# %%
check(kernel)

# %% [markdown]
# Where a key lies, in a page or not, makes no difference to the numbers. How the keys are *cut* does, in the last bits, as we will see. First the pieces themselves: the kernel's workspace, merged in Python with the function of section 1. (The kernel keeps its LSE in units of $\log_2$.)
# %%
q, k, v = (torch.randn(1, h, n, 64, device=device).half() for h, n in ((8, 1), (2, 700), (2, 700)))
seen = kernel.tensors(q, k, v, splits=5)
parts, lses = seen["O_part"].cpu().numpy(), seen["LSE_part"].cpu().numpy() * np.log(2)
print("LSE of each piece, head 3:", lses[:, 0, 3, 0].round(3))
state = (-np.inf, 0.0, np.zeros(64))
for s in range(5):
    lse = lses[s, 0, 3, 0]
    state = merge(state, (lse, float(lse > -np.inf), parts[s, 0, 3, 0]))
m, l, o = state
print(f"LSE: merged {m + np.log(l):.5f}, kernel {seen['LSE'][0, 3, 0]:.5f}")
print(f"O: largest difference {abs(o / l - seen['O'][0, 3, 0].float().cpu().numpy()).max():.1e}")

# %% [markdown]
# 700 keys are eleven steps of 64; five pieces of three steps would be fifteen. So the fourth piece is short, and the fifth is empty. The difference in $O$ is its rounding to fp16.
#
# And the paged cache: the same sequences in pages, in pages with vLLM's layout, and in a rectangular tensor.
# %%
K_pages, V_pages = (torch.randn(18, 2, page, 64, device=device).half() for _ in range(2))
q = torch.randn(3, 8, 1, 64, device=device).half()
tables = torch.from_numpy(table).to(device)
used = torch.tensor(lengths, dtype=torch.int32, device=device)
paged, _ = kernel(q, K_pages, V_pages, lengths=used, pages=tables)
tokens_first = [x.transpose(1, 2).contiguous() for x in (K_pages, V_pages)]  # (18, page, 2, 64)
views = kernel(q, *(x.transpose(1, 2) for x in tokens_first), lengths=used, pages=tables)[0]
straight = [x[tables.long()].transpose(1, 2).flatten(2, 3) for x in (K_pages, V_pages)]  # (3, 2, 96, 64)
whole = kernel(q, *straight, lengths=used)[0]
print("the same bits as without pages:", torch.equal(paged, whole), torch.equal(views, whole))

# %% [markdown]
# ### The same request, alone and in a batch
#
# The number of pieces depends on how many CTAs there are without splitting, and so on the size of the batch. On an H200, a request of 4096 keys with two heads of $K$ and $V$, alone and as one of 64:
# %%
same = ...  # your prediction: is its O, bit by bit, "the same" or "different"?

# %% tags=["reveal"]
pieces = {B: fewest_pieces(B * 2, 132 * kernel.rung.ctas(64), 4096 // 256) for B in (1, 64)}
q, k, v = (torch.randn(1, h, n, 64, device=device).half() for h, n in ((8, 1), (2, 4096), (2, 4096)))
alone, batched = (kernel(q, k, v, splits=n)[0] for n in pieces.values())
predict(same, "the same" if torch.equal(alone, batched) else "different", f"with {pieces[1]} and {pieces[64]} pieces")
print(f"by up to {(alone - batched).abs().max():.1e}, where O is up to {alone.abs().max():.2f}")

# %% [markdown]
# Each piece rounds $P$ against its own maximum and sums in its own order. Both results are right. But the text that a model writes for you may depend on who else asks at the same time. Kernels that cut the keys into pieces of a fixed *size*, whatever the batch, don't have that dependence; they are called *batch-invariant* ([He et al., 2025](https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/)). Here a fixed `splits=` does it: the cut depends on a sequence's own length alone.
#
# ## Predict, then measure
#
# ### Bytes
#
# Eight query heads on two heads of $K$ and $V$, 1024 keys, $d = 64$. For each number of splits: how often is each byte of $K$ read? How many bytes of $O$ and LSE pass through the workspace?
# %%
partial = ...  # your prediction: kB of O and LSE written into the workspace with 16 splits

# %% tags=["reveal"]
q, k, v = torch.randn(1, 8, 1, 64).half(), *(torch.randn(1, 2, 1024, 64).half() for _ in range(2))
rows = {}
for splits in (1, 2, 4, 8, 16):
    counted = xray(kernel, q, k, v, splits=splits).tensors
    written = int(counted.bytes_written[["O_part", "LSE_part"]].sum())
    rows[splits] = counted.reads_per_byte.K, counted.reads_per_byte.V, written, splits * 8 * 4 * (64 + 1)
    assert rows[splits][2] == rows[splits][3], "the formula is off"
predict(partial, written / 1000, "kB with 16 splits")
pd.DataFrame(rows, ["K read", "V read", "partial bytes written", "splits · H · 4 (d + 1)"]).T.rename_axis("splits")

# %% [markdown]
# Each key is read once, by one CTA, for all four query heads of its group. Rung 20 with the same queries:

# %%
counted = xray("20_causal_gqa", q, k[:, :, :256], v[:, :, :256]).tensors  # 256 keys will do
print(f"20_causal_gqa reads each byte of K {counted.reads_per_byte.K:.0f} times")

# %% [markdown]
# ### Keys that are not there
#
# A cache has room for 1024 keys in each of three sequences, of which 1000, 130 and 1 are in use. The rows of a step past the end are filled with zeros, not read:
# %%
k, v = (torch.randn(3, 2, 1024, 64).half() for _ in range(2))
used = torch.tensor([1000, 130, 1], dtype=torch.int32)
counted = xray(kernel, q.expand(3, -1, -1, -1).contiguous(), k, v, lengths=used, splits=4).tensors
print(
    f"K: {counted.bytes_read.K:,} bytes read of {counted.size_bytes.K:,}; predicted {(1000 + 130 + 1) * 2 * 64 * 2:,}"
)

# %% [markdown]
# ### No waiting for others
# %%
ray = xray(kernel, q, k[:1], v[:1], splits=4)
steps = 2 * 1024 // 16  # of a warp, over both heads
print(f"{steps} steps of a warp; {ray.trace.instructions['bar.sync']} times a warp arrives at a barrier of its CTA")
print("bank conflicts of the reads in the loop:", ray.total(region="tile_loop", space="shared").excess)

# %% [markdown]
# The barriers are those of the two merges: two for each warp of the 8 CTAs of the first kernel, one for each warp of the 8 of the second. With more keys there are no more of them. The loop has no [bank conflicts](glossary.md#bank-conflict); what the X-ray finds elsewhere happens once per CTA.


# %% [markdown]
# ## Beside its peers
#
# What we expect: for large caches a bandwidth near that of a copy wherever the number of splits fills the machine, and with one split the share that the model says. First the figure of section 2, with what was measured:
# %%
def of_shape(samples, shape, dtype="fp16"):
    """The measured points of one shape, from a record."""
    found = record.bandwidths(samples)
    B, H, Hkv, Nk, D = shape
    return found.query("B == @B and H == @H and Hkv == @Hkv and Nk == @Nk and D == @D and dtype == @dtype")


def measured(samples):
    return draw_decode.bandwidth(predicted, own, f"{title} and measured", of_shape(samples, shape))


plot.recorded("21_split_kv", "decode", measured)


# %% [markdown]
# **What to see** (of the record from the H200). Up to 6 pieces the points lie between the curves of 66 and 132: about 110 CTAs would be enough, which by Little's law is a latency of 1.7 µs. The model explains the dip at 24 in part, the one at 12 not: it doesn't know that some SMs have two CTAs and others one. From 32 pieces on the points lie below all three curves: the model has no start of a grid, no second kernel, and no end of a CTA.
#
# All recorded caches, at the number of splits that the rung takes by itself and at the best of those tried. `of_copy` is the bandwidth over a copy's, `to_flash` the speed beside SDPA FLASH on the same tensors. FlashAttention-2 has a rule of its own ([`num_splits_heuristic`](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp)): one piece where there are CTAs for 0.8 of twice the SMs, else the fewest pieces with 85 % of the best efficiency. Where will it be slowest beside ours?
# %%
def at_its_own_and_at_best(samples):
    found = record.bandwidths(samples)
    keys = ["dtype", "B", "H", "Hkv", "Nk", "D"]
    own = found[found.chosen == 1].set_index(keys)[["splits", "of_copy", "to_flash"]]
    own["FLASH of_copy"] = own.of_copy / own.to_flash
    B, Hkv = (own.index.get_level_values(name) for name in ("B", "Hkv"))
    own["FLASH splits"] = np.where(B * Hkv < 0.8 * 2 * 132, "yes", "no")
    best = found.loc[found.groupby(keys).of_copy.idxmax()].set_index(keys)[["splits", "of_copy"]]
    return own.join(best.add_suffix(", best")).round(2)


plot.recorded("21_split_kv", "decode", at_its_own_and_at_best)

# %% [markdown]
# **What to see.** 0.86 to 1.01 of a copy at its own number of splits, and at most 0.04 more at the best. Where FLASH divides the keys, too, ours is 1.0 to 1.1 times as fast, once 1.2. The lead is large, 1.6 to 1.8, exactly where it does not: there FLASH reads at 0.5 to 0.6 of a copy. (Its CTAs differ in other ways, too: 64 rows, and barriers for all warps.)
#
# ## What still hurts
#
# 1. **Two launches.** The second kernel can begin only when the last piece is done. A cache of a few megabytes is read in a microsecond or two; there that must weigh. (The recorded caches have 0.27 GB and more, and don't show it.)
# 2. **One number of splits for all.** With one long text among short ones, the short ones are soon done, and the few pieces of the long one are alone on the machine. A schedule made from the lengths would cut into pieces of as many keys each instead.
# 3. **16 rows.** With more queries times heads of a group than 16 there are more tiles, each of which reads the keys again. From some number of queries on, rung 20 should be the better kernel; from which, has not been measured.
# 4. **The bytes themselves.** At full bandwidth nothing is left to gain but fewer bytes: fewer heads of $K$ and $V$, shorter windows, a cache in 8 bits (fp8), which is half the bytes and is turned into 16 bits on the way to the `mma`.
#
# The next two notebooks, 22 and 23, compute gradients.
# %% [markdown]
# ## Exercises
#
# In a *task* you write a region of the rung. `blank` shows what is given and what has to hold; your cell is compiled, checked in all cases of `check`, and X-rayed beside the rung's own. Task 21.9 is the whole rung: `python -m helpers exercise new 21 kernel`.

# %%
from helpers import blank, hint, progress

# %load_ext helpers

# %% [markdown]
# ### Task 21.1 · States in C
#
# Notebook 02's operator on $(m, l)$, and the share that a part has in a whole. Three lines of code; an empty part next to another empty one is where they go wrong.

# %%
blank("21", "state")

# %%
# %%region 21 state -> my_state
# // your code

# %%
hint("21.1")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `state` of [21_split_kv.cu](../kernels/21_split_kv.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Task 21.2 · The second kernel
#
# From the pieces' $O$ and LSE in the workspace to $O$ and LSE of a row: who takes which columns and which pieces is yours to choose. Work in two levels, first each thread, then across threads.

# %%
blank("21", "merge_splits")

# %%
# %%region 21 merge_splits -> my_merge_splits
# // your code

# %%
hint("21.2")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `merge_splits` of [21_split_kv.cu](../kernels/21_split_kv.cu), shown in [The kernel](#The-kernel).
#
# </details>

# %% [markdown]
# ### Task 21.3 · Four warps, one result
#
# The hard one: four warps have states and $O$ of the same rows in [fragments](glossary.md#fragment), and the only place to meet is the memory of the stages. It teaches what a barrier has to order before and after a place is used anew.

# %%
blank("21", "merge_warps")

# %%
# %%region 21 merge_warps -> my_merge_warps
# // your code

# %%
hint("21.3")

# %% [markdown]
# <details><summary>Solution</summary>
#
# The region `merge_warps` of [21_split_kv.cu](../kernels/21_split_kv.cu):
# `show.region("21_split_kv", "merge_warps")`.
#
# </details>

# %% [markdown]
# ### Exercise 21.4 · How many pieces, by hand?
#
# Predict the number of splits that the rung takes on an H200 (132 SMs) for these decode steps, all with 32768 keys: (a) $B = 2$, $H = 32$, $H_{kv} = 8$, $d = 128$, one query; (b) the same with 8 queries, as when drafted tokens are verified; (c) as (a) with $d = 64$.

# %%
# Exercise 21.4
by_hand = {"a": None, "b": None, "c": None}


# %%
def as_the_rung_does():
    for name, Nq, D in (("a", 1, 128), ("b", 8, 128), ("c", 1, 64)):
        tiles = -(-Nq * (32 // 8) // 16)
        n = fewest_pieces(2 * 8 * tiles, 132 * kernel.rung.ctas(D), 32768 // 256)
        assert by_hand[name] in range(1, 129), f"({name}): a whole number from 1 to 128, not {by_hand[name]!r}"
        assert by_hand[name] == n, f"({name}): {by_hand[name]} is not what the rung takes"
    return True


exercise.verify("21.4", as_the_rung_does)

# %% [markdown]
# <details><summary>Hint</summary>
#
# How many tiles of 16 rows are there, how many places, and which multiple fills 90 %? The rows of a head of K and V are queries times heads of a group: 4 in (a) and (c), 32 in (b); a tile takes 16 of them. The tile table in the kernel's header has the CTAs per SM.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# by_hand = {"a": 15, "b": 8, "c": 23}
# ```
#
# (a) 16 CTAs alone, 264 places, of which 90 % are 238: 15 times 16 are 240. (b) Two tiles, so 32 CTAs alone: 8 times 32 are 256. (c) Three CTAs fit on an SM: 396 places, 23 times 16 are 368.
# </details>

# %% [markdown]
# ### Exercise 21.5 · Hand out pages
#
# Write `allocate`: it returns the block table of sequences of these lengths, an int32 tensor (sequences, most pages of any). Take pages from the list `free`, each at most once; entries past a sequence's last page may be any page, such as 0. The check runs the kernel on it.

# %%
# Exercise 21.5


def allocate(lengths, page, free):
    most = max(-(-n // page) for n in lengths)
    return torch.zeros(len(lengths), most, dtype=torch.int32)


# %%
def pages_of_their_own(lengths, page, free):
    try:
        table = allocate(list(lengths), page, list(free))
    except StopIteration:
        raise AssertionError(f"it takes more than the {len(free)} free pages; the sequences need no more") from None
    counts = [-(-n // page) for n in lengths]
    assert isinstance(table, torch.Tensor) and table.dtype == torch.int32, "give an int32 tensor"
    assert table.shape == (3, max(counts)), f"page = {page}: {tuple(table.shape)}, not (3, {max(counts)})"
    taken = [p for row, count in zip(table.tolist(), counts) for p in row[:count]]
    assert set(taken) <= set(free) and len(set(taken)) == len(taken), f"pages {taken}: not free, or taken twice"
    return table


# %%
def same_as_without_pages():
    for page, lengths in ((16, [33, 5, 64]), (48, [33, 49, 1])):
        table = pages_of_their_own(lengths, page, [7, 2, 9, 0, 4, 11, 3, 8])
        K, V = torch.full((2, 12, 2, page, 64), torch.nan).half()
        keys, values = torch.randn(2, 3, 2, 64, 64).half()
        for b, j in ((b, j) for b, n in enumerate(lengths) for j in range(n)):
            K[table[b, j // page], :, j % page], V[table[b, j // page], :, j % page] = keys[b, :, j], values[b, :, j]
        q, used = torch.randn(3, 2, 1, 64).half(), torch.tensor(lengths).int()
        q, K, V, keys, values, used, table = (x.to(device) for x in (q, K, V, keys, values, used, table))
        paged, _ = kernel(q, K, V, lengths=used, pages=table)
        assert torch.equal(paged, kernel(q, keys, values, lengths=used)[0]), f"page = {page}: O is another"
    return True


exercise.verify("21.5", same_as_without_pages)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A sequence of $n$ keys needs the next $\lceil n / \text{page} \rceil$ pages of the list.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def allocate(lengths, page, free):
#     counts = [-(-n // page) for n in lengths]
#     table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
#     for row, count in zip(table, counts):
#         row[:count] = torch.tensor([free.pop(0) for _ in range(count)])
#     return table
# ```
#
# Everything that is no key of a sequence was NaN in the check: a kernel that read a row too many would have shown it.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain, do and judge:
#
# <details><summary>1. Why may most rows of a tile be wasted in a decode step?</summary>
#
# It is bound by reading the cache: about one FLOP per byte and query head of a group, where the tensor cores could do more than a hundred.
#
# </details>
# <details><summary>2. Which two results of a piece are enough to merge it with others?</summary>
#
# Its output, divided already, and its LSE: the state (LSE, 1, O).
#
# </details>
# <details><summary>3. Why can three pieces be slower than two?</summary>
#
# If they need another wave of CTAs that is nearly empty.
#
# </details>
# <details><summary>4. Why not a thousand pieces?</summary>
#
# Each leaves a partial output that is written and read again, and each CTA has a beginning and an end in which it reads little.
#
# </details>
# <details><summary>5. Grouped heads leave the FLOPs as they are. Why do they make a decode step faster, and the kernel of notebook 20 hardly?</summary>
#
# There the products take the time, here the bytes. Fewer heads of K and V are fewer bytes, if all query heads of a group use them in one go.
#
# </details>
# <details><summary>6. What does a block table cost, and what does it save?</summary>
#
# One small load per row's address, answered by the caches. It saves the room between a sequence's length and the longest possible one.
#
# </details>
