# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---


# %% [markdown]
# # 24 · In a model
#
# [← 23 · Backward on tensor cores](23_backward_mma.ipynb) | [glossary](glossary.md) | [30 · TMA and wgmma →](30_tma_wgmma.ipynb)
#
# **After this notebook you can**
# - put a kernel of your own under a PyTorch model, with gradients, `torch.compile` and checkpointing;
# - say whether two loss curves are *the same*, with a yardstick instead of an eye;
# - tell a slow kernel from a host that is too slow for it, and take the host out with a CUDA graph;
# - write text from a KV cache, for prompts of different lengths at once, and judge whether two kernels write the same.
#
# **Time** 60 minutes.
#
# **Needs** [20](20_causal_gqa.ipynb), [21](21_split_kv.ipynb) and [23](23_backward_mma.ipynb) for what the kernels do; Hopper's come later ([32](32_ping_pong.ipynb), [33](33_backward_wgmma.ipynb)). Here they are only called. No GPU: without one a toy model trains on the emulator for a few steps, through the same code.
#
# **The idea in one line**: a model doesn't know who computes its attention; so exchange that alone, and compare.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import inspect
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from IPython.display import Code, display
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from helpers import draw_training, exercise, gpt, load, plot, predict, progress, rung, train

# %%
torch.manual_seed(0)
device = load("20_causal_gqa").device
plan = train.plan(device)
if device == "cpu":
    torch.set_num_threads(1)  # a toy's matrices are multiplied before a second thread has woken up
plan

# %% [markdown]
# `plan` says how large the model is and how long it trains: on a GPU a small one, without a GPU a toy.
#
# ## The text
#
# Every Python carries the text that `help("for")` prints: its reference manual, as `pydoc_data.topics`. It was written by the Python Software Foundation and its contributors, and comes under the PSF licence. Half a megabyte is little for a language model, but it is real, and it is already on your disk. (It differs from one Python to the next: that of the recorded runs has 499,608 bytes.) The model reads bytes; there is no tokenizer.

# %%
text = train.manual()
print(f"{len(text):,} bytes, {len(set(text))} different ones\n")
print(text[text.index(b'The "for" statement') :][:400].decode())

# %% [markdown]
# ## The model
#
# A GPT of about a hundred lines ([helpers/lessons/gpt.py](../helpers/lessons/gpt.py)) in plain PyTorch. All that it knows of attention is a pair of functions: `whole`, for a whole sequence under a causal mask (training, prefill), and `step`, for the newest token of each sequence against a cache ([decode](glossary.md#decode)). PyTorch's own and ours:
# %%
Code(inspect.getsource(gpt.sdpa) + "\n\n" + inspect.getsource(gpt.kernels), language="python")

# %% [markdown]
# `operator("20_causal_gqa")` is rung 20 as a PyTorch operator. For a gradient it calls rung 23 with the O and [LSE](glossary.md#lse) that it kept. `kernels("32_ping_pong")` is the faster pair, rung 32 and for the backward pass rung 33, where there is a Hopper GPU (or, slowly, the emulator) to run it. (Libraries have such a pair of functions, too: Hugging Face's Transformers takes a function for `whole` by [`AttentionInterface.register`](https://huggingface.co/docs/transformers/main/en/attention_interface).) The block of the model that calls `whole` and `step`:
# %%
Code(inspect.getsource(gpt.Block), language="python")

# %% [markdown]
# One matrix makes Q, K and V of all heads at once: $H$ query heads, and $H_{kv}$ heads of K and V. `unflatten` and `transpose` give (B, H, N, D) *views*: in memory the heads of a token lie side by side. The kernels take strides, so nothing is copied for their sake.
#
# ### Where a byte stands
#
# Attention is a sum over keys, and a sum doesn't know where its terms stood. So Q and K are *turned* before it sees them ([rotary positions](https://arxiv.org/abs/2104.09864)): the numbers of a row are read as $D/2$ complex ones, and number $j$ of the row at position $n$ is multiplied by $e^{i n \theta_j}$.
# %%
Code(inspect.getsource(gpt.turns) + "\n\n" + inspect.getsource(gpt.rotate), language="python")

# %% [markdown]
# Of the two positions $n$ and $m$, a score then knows how far apart they are, and nothing else:
#
# $$ \mathrm{Re} \sum_j \big(q_j e^{i n \theta_j}\big) \overline{\big(k_j e^{i m \theta_j}\big)} = \mathrm{Re} \sum_j q_j \overline{k_j} \, e^{i (n - m) \theta_j} . $$
#
# What the model has learned at one place of a text holds at every other. The kernels get Q and K turned, and a cache keeps turned keys. The rest of the model is an embedding in front, and a norm and a matrix behind:
# %%
Code(inspect.getsource(gpt.GPT.forward), language="python")

# %%
ours = train.ours(device)
model = gpt.GPT(plan.size, gpt.kernels()).to(device)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %% [markdown]
# ## One step, two ways
#
# Before many steps, one. Same model, same bytes; the gradient of every parameter by our kernels and by SDPA, as the relative difference of the two,
#
# $$ \frac{\lVert g_{\text{ours}} - g_{\text{SDPA}} \rVert}{\lVert g_{\text{SDPA}} \rVert} . $$
#
# bf16 keeps 8 significant bits, so that one rounding changes a number by up to $2^{-8} = 0.004$ of itself. But how large may a right gradient's difference be? The yardstick is another right answer: another of SDPA's own kernels.
# %%
seen, _ = train.split(text)
piece = train.batches(seen, plan, seed=0)[0, :, :513].to(device)  # as much as SDPA MATH, which keeps P, can bear


def gradient(attention):
    model.attention = attention
    model.zero_grad()
    train.loss(model, piece, plan.dtype).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# %%
difference = ...  # your prediction: the relative difference between our gradient and SDPA FLASH's

# %% tags=["reveal"]
flash = gradient(gpt.sdpa(SDPBackend.FLASH_ATTENTION))
ways = ours | {"SDPA MATH": gpt.sdpa(SDPBackend.MATH)}
if device == "cpu":  # the emulator runs Hopper's, too
    ways |= {"rungs 32 and 33": gpt.kernels("32_ping_pong")}
apart = {name: ((gradient(way) - flash).norm() / flash.norm()).item() for name, way in ways.items()}
predict(difference, apart["rungs 20 and 23"], "relative difference", within=0.5)
pd.Series(apart, name="relative difference from SDPA FLASH")

# %% [markdown]
# **What to see.** Our gradients lie as far from SDPA FLASH's as that of PyTorch's other kernel does. Two right kernels in bf16 are as far apart as that; a stricter test would fail PyTorch's own.
#
# ## Training
#
# Runs of one seed start from the same parameters and see the same bytes in the same order; only `attention` differs. Rounding differs, so the curves will part, a little; and training feeds a difference back into the next step. How much is too much? Again other right answers say: another kernel of PyTorch's with the same seed, and, as the other end of the scale, the same kernel with another seed. (On a GPU every way trains once more *as a graph*, of which [below](#A-step-as-a-graph).)
# %%
distance = ...  # your prediction: does our curve differ from SDPA FLASH's like another "kernel", or another "seed"?

# %% tags=["reveal"]
losses, runs, trained = train.train_all(plan, device, rounds=1)

# %% tags=["reveal"]
table = train.yardstick(losses)
mine, seed = table["mean"]["rungs 20 and 23"], table["mean"]["SDPA FLASH, seed 1"]
predict(distance, "kernel" if mine < seed / 3 else "seed", "is what our curve differs like")
here = "on this GPU" if device == "cuda" else "on the emulator"
display(draw_training.losses(losses, f"{plan.steps} steps {here}", 1 + plan.steps // 40))
table

# %% [markdown]
# **What to see.** On the left, the curves of one seed can't be told apart. On the right, why: by how much each differs from SDPA FLASH, in nats, on a logarithmic scale. (*Nats* are the unit of the cross entropy by the natural logarithm.) Ours stays in the same range as the other kernel of PyTorch's, and both lie far below the other seed. That is what "the curves agree" has to mean: *our kernels change no more than another right kernel does*.
#
# ### The recorded run
#
# The same at the size of `train.SMALL` (6 layers, batches of 4 × 4096 bytes), and SDPA FLASH and ours a second time, with nothing changed at all: FlashAttention-2 adds up dQ with [atomics](glossary.md#atomic) ([Dao 2023](https://arxiv.org/abs/2307.08691), section 3.2), and so do rungs 23 and 33, so that on a GPU none repeats itself to the last digit.
# %%
record = train.recorded()
if record:
    on = record["training"]["device"][0]
    display(draw_training.losses(record["training"], f"Recorded on an {on}, a running mean over 10 steps", 10))
    display(train.yardstick(record["training"]))

# %% [markdown]
# **What to see.** The same code run again differs, too: SDPA FLASH from itself by 0.0036<!--= trained("yardstick", "SDPA FLASH, again", "mean"):.4f --> nats on average. Rungs 20 and 23 differ from it by 0.0042<!--= trained("yardstick", "rungs 20 and 23", "mean"):.4f --> and 0.0037<!--= trained("yardstick", "rungs 20 and 23, again", "mean"):.4f -->, rungs 32 and 33 by 0.0039<!--= trained("yardstick", "rungs 32 and 33", "mean"):.4f --> and 0.0040<!--= trained("yardstick", "rungs 32 and 33, again", "mean"):.4f -->, cuDNN by 0.0047<!--= trained("yardstick", "SDPA CUDNN", "mean"):.4f -->, another seed by 0.14<!--= trained("yardstick", "SDPA FLASH, seed 1", "mean"):.2f -->.
#
# ### How fast
#
# Speed and memory of the whole training, parameters and optimizer included: thousands of tokens (bytes of text) per second, by the median step and its quartiles; the peak allocated; and the loss on the last tenth of the manual, which no run has seen (*held out*). At $d = 64$ and $N = 4096$ under a causal mask, with as many heads of K and V as of Q, rung 20 is 1.3<!--= ratio("20", "FLASH", 64, 4096, causal=1, dtype="bf16", kind="causal"):.1f --> times as fast as SDPA FLASH in the forward pass and rung 23 1.3<!--= ratio("23", "FLASH", 64, 4096, causal=1, dtype="bf16"):.1f --> times in the backward pass, rungs 32 and 33 2.0<!--= ratio("32", "FLASH", 64, 4096, causal=1, dtype="bf16", kind="causal"):.1f --> and 2.4<!--= ratio("33", "FLASH", 64, 4096, causal=1, dtype="bf16"):.1f --> times. The model has 8 heads of Q on 2 of K and V. Attention is a part of a step.
# %%
faster = ...  # your prediction: how many times as fast as with SDPA FLASH does the model train with rungs 32 and 33?

# %% tags=["reveal"]
if record:
    launched, as_graphs = ([record[k][record[k]["graph"] == way] for k in ("training", "runs")] for way in (0, 1))
    display(train.speeds(*launched).round(3))
    ms = launched[0].query("seed == 0").groupby("name")["ms"].median()  # of both runs together
    predict(faster, ms["SDPA FLASH"] / ms["rungs 32 and 33"], "times as fast")
elif device == "cuda":
    display(train.speeds(losses, runs).round(3))
else:
    print("no speed: the emulator counts, it does not time")

# %% [markdown]
# On the H200, SDPA FLASH trains on 1.01<!--= trained("speeds", "SDPA FLASH", "kilotokens_per_s") / 1000:.2f --> and 1.00<!--= trained("speeds", "SDPA FLASH, again", "kilotokens_per_s") / 1000:.2f --> million tokens per second, cuDNN's kernels on 1.17<!--= trained("speeds", "SDPA CUDNN", "kilotokens_per_s") / 1000:.2f --> million. Rungs 20 and 23 reach 1.11<!--= trained("speeds", "rungs 20 and 23", "kilotokens_per_s") / 1000:.2f --> and 1.10<!--= trained("speeds", "rungs 20 and 23, again", "kilotokens_per_s") / 1000:.2f --> million, rungs 32 and 33 1.18<!--= trained("speeds", "rungs 32 and 33", "kilotokens_per_s") / 1000:.2f --> and 1.18<!--= trained("speeds", "rungs 32 and 33, again", "kilotokens_per_s") / 1000:.2f --> million. (Memory is the same; held-out losses of one seed differ by up to 0.011 nats, with the graphs below by 0.018.) Why so little, with attention twice as fast? A profiler says what the GPU's kernels take, one by one (milliseconds of a step, mean of 20):
# %%
if record:
    parts = train.parts(record["profile"])
    display(parts.round(2))

# %% [markdown]
# **What to see.** Ours beat SDPA FLASH here, too. In the forward pass rung 20 takes 0.69<!--= trained("parts", "rungs 20 and 23", "attention, forward") / trained("parts", "SDPA FLASH", "attention, forward"):.2f --> of SDPA FLASH's time and rung 32 0.46<!--= trained("parts", "rungs 32 and 33", "attention, forward") / trained("parts", "SDPA FLASH", "attention, forward"):.2f -->; in the backward pass rung 23 takes 0.83<!--= trained("parts", "rungs 20 and 23", "attention, backward") / trained("parts", "SDPA FLASH", "attention, backward"):.2f --> of it and rung 33 0.44<!--= trained("parts", "rungs 32 and 33", "attention, backward") / trained("parts", "SDPA FLASH", "attention, backward"):.2f -->. But most of a step is not attention: its kernels take 14.2<!--= trained("parts", "rungs 20 and 23", "all"):.1f --> and 12.0<!--= trained("parts", "rungs 32 and 33", "all"):.1f --> ms with ours, 15.7<!--= trained("parts", "SDPA FLASH", "all"):.1f --> with SDPA FLASH, 13.3<!--= trained("parts", "SDPA CUDNN", "all"):.1f --> with cuDNN. And the step itself? Every one from the 21st on, of every run with the first seed, beside what its kernels take (within a row the first step is on top; `+ 2`: 2 lie further right):
# %%
if record:
    display(draw_training.waits(launched[0], parts["all"], f"Steps of the recorded runs, {on}"))

# %% [markdown]
# **What to see.** Where steps stand in a column, they exceed their five hundred kernels by 0.5 to 0.7 ms: between two lies a microsecond or more. Others (most in both runs of 32 and 33) scatter up to 24 ms; one of 20 and 23: 166<!--= record.load("24_in_a_model", "training").query("graph == 0 and step > 20").ms.max():.0f -->. Kernels don't vary like that; the **host** does.
#
# PyTorch puts kernels into a queue and goes on without waiting; while the host is ahead, the GPU stands still for that microsecond only. SDPA's kernels are launched from C++, ours from more Python: six operators in each pass, each of which checks shapes and strides, makes tensors and calls the launcher. Where the queue runs empty the GPU waits, and the less the kernels take, the sooner it does. Hosts differ, and change by the minute: in twenty records on H200s, the fastest kernels of all trained 0.65 to 1.3 times as fast as SDPA FLASH.
#
# *A kernel's own time says nothing of what happens between two kernels.* Less Python per kernel would help, larger batches, or an operator registered in C++. Or the host is taken out.
#
# ### A step as a graph
#
# Every step launches the same kernels, of the same shapes, in the same order. So let the host say it once. While a stream (any but the default one) is *captured*, a launch doesn't run: kernel, grid and arguments are noted in a [CUDA graph](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). One call then launches the whole graph, more than five hundred kernels:
# %%
Code(inspect.getsource(train.captured), language="python")

# %% [markdown]
# What is noted has to hold for every step:
#
# - *Arguments are addresses and numbers.* The batch is copied to where the captured one lay. The learning rate changes from step to step, so it is a tensor, which the schedule writes between two replays.
# - *The host sees no value.* `loss.item()`, or a launch that depends on a number on the GPU, is an error under capture. Our operators ask for nothing but addresses, shapes and strides.
# - *What happens only once has to have happened*: kernels are compiled, libraries take their workspaces, the optimizer makes its state. So the first three steps are ordinary ones.
# - *Memory stays.* What the captured step allocates lies at the same place in every replay.
# %%
faster_as_graph = ...  # your prediction: and with both as graphs? You know what the kernels of a step take

# %% tags=["reveal"]
if record:
    speeds = train.speeds(*as_graphs)["kilotokens_per_s"]
    predict(faster_as_graph, speeds["rungs 32 and 33, as a graph"] / speeds["SDPA FLASH, as a graph"], "times as fast")
    display(train.speeds(*as_graphs).round(3))
    display(draw_training.waits(as_graphs[0], parts["all"], f"The same as graphs (mind the axis), {on}"))


# %% [markdown]
# **What to see.** No step can wait for the host any more, and *the order of the kernels is the order of the steps*, with any host. Rungs 20 and 23 train 1.10<!--= trained("speeds", "rungs 20 and 23, as a graph", "kilotokens_per_s") / trained("speeds", "SDPA FLASH, as a graph", "kilotokens_per_s"):.2f --> times as fast as SDPA FLASH; rungs 32 and 33 1.30<!--= trained("speeds", "rungs 32 and 33, as a graph", "kilotokens_per_s") / trained("speeds", "SDPA FLASH, as a graph", "kilotokens_per_s"):.2f --> times, and 1.11<!--= trained("speeds", "rungs 32 and 33, as a graph", "kilotokens_per_s") / trained("speeds", "SDPA CUDNN, as a graph", "kilotokens_per_s"):.2f --> times as fast as cuDNN. The rest of the step doesn't allow more: attention is 1.7<!--= trained("parts", "SDPA FLASH", "attention, forward"):.1f --> + 4.6<!--= trained("parts", "SDPA FLASH", "attention, backward"):.1f --> of the 15.7<!--= trained("parts", "SDPA FLASH", "all"):.1f --> ms of SDPA FLASH's kernels, and rungs 32 and 33 halve it. What still varies, by 0.2<!--= record.load("24_in_a_model", "training").query("name == 'rungs 32 and 33' and graph == 1 and step > 20").ms.max() - record.load("24_in_a_model", "training").query("name == 'rungs 32 and 33' and graph == 1 and step > 20").ms.min():.1f --> ms with these two, is the GPU's own.
#
# Where the host is ahead, a graph gains what lies between kernels (SDPA FLASH's second run: 1.04<!--= trained("speeds", "SDPA FLASH, as a graph", "kilotokens_per_s") / trained("speeds", "SDPA FLASH, again", "kilotokens_per_s"):.2f --> times); where it is not, all that the GPU waited for (rungs 32 and 33: 1.14<!--= trained("speeds", "rungs 32 and 33, as a graph", "kilotokens_per_s") / trained("speeds", "rungs 32 and 33", "kilotokens_per_s"):.2f --> and 1.14<!--= trained("speeds", "rungs 32 and 33, as a graph", "kilotokens_per_s") / trained("speeds", "rungs 32 and 33, again", "kilotokens_per_s"):.2f -->, with the slowest host 2.3). It gains most with fast kernels, small models, short sequences, one token at a time. Its price: every shape needs a graph of its own, and none of the step's Python runs: no `print`, no branch.
#
# ### What only a model shows
#
# **Grouped queries.** $dK$ and $dV$ are sums over all query heads of a group. FlashAttention-2 gives every query head CTAs, a dK and a dV of its own, and adds up the gradients afterwards ([`mha_bwd`](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/flash_api.cpp); the sums are kernels of PyTorch's, 0.15 ms that the profile has under "everything else"). Rungs 23 and 33 do the same, for the reason that notebook 23, section 6, simulates for this very shape.
#
# **Where O lies.** The next matrix wants the heads of a token side by side. SDPA's O lies in memory as Q does, and so does ours: `transpose` and `flatten` are views. With its heads one after the other, as the shape (B, H, N, D) suggests, `flatten` would have to copy it, and autograd to keep the copy.
#
# ## What is kept for the backward pass
#
# A hook sees every tensor that autograd keeps; we add up their bytes (each storage once) for one step, with three attentions: SDPA's plain one, which keeps P; ours, which keeps O and LSE; and ours under `torch.utils.checkpoint`, which keeps the input of each block only and forms everything inside it once more in the backward pass.
# %%
def kept_bytes(attention, N, wrap=lambda block: block.forward):
    """Bytes that one training step on a sequence of N bytes keeps for the backward pass, parameters not counted."""
    fresh = gpt.GPT(plan.size, attention).to(device)
    for block in fresh.blocks:
        block.forward = wrap(block)
    own, kept = {p.untyped_storage().data_ptr() for p in fresh.parameters()}, {}

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t  # alive, so that no address is used twice
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        train.loss(fresh, seen[None, : N + 1].to(device), plan.dtype)
    return sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)


# %%
def checkpointed(block):
    return partial(checkpoint, block.forward, use_reentrant=False)


# %%
table = {}
for N in (128, 256, 512):
    table[N] = {"SDPA MATH": kept_bytes(gpt.sdpa(SDPBackend.MATH), N), "ours": kept_bytes(gpt.kernels(), N)}
    table[N]["ours, checkpoint"] = kept_bytes(gpt.kernels(), N, checkpointed)
    table[N]["SDPA MATH over ours"] = table[N]["SDPA MATH"] - table[N]["ours"]
pd.DataFrame(table).rename_axis(columns="N").map(lambda b: f"{b / 2**20:.2f} MiB")

# %% [markdown]
# **What to see.** From one column to the next N doubles. What SDPA MATH keeps over our kernels, its P above all, grows three- to fourfold; everything else doubles at most. (What doesn't grow are the parameters' copies, rounded to 16 bits for the products.) Checkpointing keeps the least and pays with a second forward pass. The gradient is the same (on a GPU up to the order in which dQ is added up):
# %%
plain = gradient(gpt.kernels())
for block in model.blocks:
    block.forward = checkpointed(block)
again = gradient(gpt.kernels())
for block in model.blocks:
    del block.forward  # the class's own is back
print(f"relative difference: {((again - plain).norm() / plain.norm()).item():.1e}")

# %% [markdown]
# ## In a compiled model
#
# `torch.compile` traces a model into a graph. A Python function it can't look into breaks the graph in two; `fullgraph=True` makes an error of that. To the compiler our kernels are operators with a known shape and a known gradient, so the trace goes through in both passes. (`aot_eager` traces and then runs the graphs as they are. The default, `inductor`, would also fuse what stands *between* the attentions, except the complex numbers that turn Q and K; leave the argument out to try it; it takes minutes.)
# %%
model.attention = gpt.kernels()
model.zero_grad()
eager = train.loss(model, piece, plan.dtype)
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
traced = train.loss(compiled, piece, plan.dtype)
traced.backward()
print(f"loss {eager.item():.6f}, compiled {traced.item():.6f}")

# %% [markdown]
# ## Writing
#
# A trained model writes by predicting a byte, appending it, and predicting again. K and V of old bytes are kept in the *KV cache*. The prompt is read once, by `whole`; from then on every new byte is one `step`: one query per sequence against all of its keys, which is rung 21's work. Several texts are written at once. Each sequence fills its own rows of the cache and has its own entry in `lengths`; the kernel reads that many of its keys and no more. (In notebook 21's pages they could lie anywhere.)
# %%
Code(inspect.getsource(gpt.Cache), language="python")

# %%
Code(inspect.getsource(gpt.generate), language="python")

# %% [markdown]
# After thirty steps a toy only knows that a blank is the commonest byte. So without a GPU we let another one learn a little longer, with SDPA and in float32: few CPUs multiply bf16 as fast.
# %%
short = replace(train.TOY, length=64, batch=4, steps=200, dtype=torch.float32)
learned = train.train(gpt.sdpa(), short, device)
written = train.compare(trained if device == "cuda" else learned.model, plan, [*ours.values()][-1])
print(*map(repr, train.texts(written, plan.prompts)), sep="\n\n")

# %% [markdown]
# A toy writes no English. The question is another one: does a model write *the same* with SDPA and with ours? At each byte the likeliest one is taken ("temperature 0"), so a single flip would change all the rest of a text. A flip is possible where the likeliest byte leads the next by less than twice the difference of the two ways' logits.
# %%
same = (written["sdpa"] == written["kernels"]).groupby(written["prompt"]).all()
ties = (written["margin"] < 2 * written["apart"]).sum()
print(f"texts that are the same byte for byte: {same.sum()} of {len(same)}")
print(f"bytes that could have flipped: {ties} of {written['margin'].notna().sum()}")
draw_training.margins(written, "Every byte written: how sure, and how different the two ways")

# %% [markdown]
# **What to see.** Every dot above the line is a byte that the difference between the two ways could not have changed. To keep the difference small, the model writes in fp16, not bf16: with three more bits of fraction each rounding is eight times smaller. And the last matrix, from which the logits come, is in fp32: 16-bit logits would often tie exactly. The texts of the recorded model, and the same count for it:
# %%
if record := train.recorded():
    texts = record["text"]
    print(*train.texts(texts, train.SMALL.prompts), sep="\n" + "─" * 60 + "\n")
    equal = (texts["sdpa"] == texts["kernels"]).groupby(texts["prompt"]).all()
    sure = texts["margin"] / texts["apart"]
    print(f"\nthe same byte for byte: {equal.sum()} of {len(equal)}")
    print(f"the lead of the likeliest byte over the difference: at least {sure.min():.1f}, median {sure.median():.0f}")

# %% [markdown]
# The model has the manual's words and the length of its lines, little of its sense; and whoever always takes the likeliest byte goes in circles. Below a ratio of 2 a byte can flip; here no ratio is as low.
#
# ### How fast it writes
#
# A step of decode has a few hundred small kernels, so here the host counts even more than in training: launched one by one, they wait for Python. Bytes per second of one sequence and of sixteen, each with 2048 bytes in its cache (`train.writing` measures the same on a GPU of your own):
# %%
graph_pays = ...  # your prediction: how many times as fast as one by one is a graph, for one sequence with rung 21?

# %% tags=["reveal"]
found = plot.recorded("24_in_a_model", "writing", train.writing_speeds)
alone = found["bytes_per_s"].loc[1, 2048]
predict(graph_pays, alone["rung 21, as a graph"] / alone["rung 21"], "times as fast")
found.round(0).astype(int)

# %% [markdown]
# **What to see.** (On the H200, as recorded, with the model of `train.SMALL`.) Launched one by one, sixteen sequences take hardly longer than one: the host sets the pace. As graphs both write 8<!--= min(trained("writing", (B, 2048, way + ", as a graph"), "bytes_per_s") / trained("writing", (B, 2048, way), "bytes_per_s") for B in (1, 16) for way in ("SDPA", "rung 21")):.0f --> to 10<!--= max(trained("writing", (B, 2048, way + ", as a graph"), "bytes_per_s") / trained("writing", (B, 2048, way), "bytes_per_s") for B in (1, 16) for way in ("SDPA", "rung 21")):.0f --> times as fast, and rung 21 leads: 1.12<!--= trained("writing", (1, 2048, "rung 21, as a graph"), "bytes_per_s") / trained("writing", (1, 2048, "SDPA, as a graph"), "bytes_per_s"):.2f --> times SDPA's speed with one sequence, 1.15<!--= trained("writing", (16, 2048, "rung 21, as a graph"), "bytes_per_s") / trained("writing", (16, 2048, "SDPA, as a graph"), "bytes_per_s"):.2f --> with sixteen. (SDPA goes through all 4096 rows of the cache with a mask, rung 21 through the 2048 in use.) With it, sixteen sequences take only 1.20<!--= 16 * trained("writing", (1, 2048, "rung 21, as a graph"), "bytes_per_s") / trained("writing", (16, 2048, "rung 21, as a graph"), "bytes_per_s"):.2f --> times as long as one: they need just as many kernels. Reading the parameters is not what takes the time, either. 17 million parameters in fp32 are 67 MB, 0.02 ms at the bandwidth of the HBM, and the step takes 0.38<!--= 1000 / trained("writing", (1, 2048, "rung 21, as a graph"), "bytes_per_s"):.2f --> ms. Hundreds of kernels, each of a microsecond or two, come one after the other: for a model this small, decode is bound by their number.


# %% [markdown]
# ## Exercises
#
# ### Exercise 24.1 · The curve that cheats
#
# A bug in attention's mask is one of those that make a loss curve look *better* (held-out text that leaks into the training data is another). Let every row see one key too many, the very byte that is to be predicted (here in SDPA, where a mask is a tensor, and on the toy, which a CPU trains in seconds):
# %%
def leaky(q, k, v):
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril(1)
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


# %%
cheat = train.train(replace(gpt.sdpa(), whole=leaky), short, device)
print(f"held out: {learned.held_out:.2f} nats per byte, {cheat.held_out:.2f} with one key too many")
cheat.model.attention = gpt.sdpa()
with torch.no_grad():
    asked = train.loss(cheat.model, piece[:, :65], short.dtype).item()
print(f"{asked:.2f} where that key is taken away")

# %%
both = pd.DataFrame({"causal": learned.steps["loss"], "one key too many": cheat.steps["loss"]})
draw_training.curves(both.rolling(10, min_periods=1).mean(), "A mask that leaks (running mean over 10 steps)")

# %% [markdown]
# No error message, a wonderful curve, and the held-out loss is wonderful, too: the bug is in the way the model is *asked*. Once it has to write, with no byte ahead to look at, it is lost, as the second line says.
#
# So don't look at the curve; test. Here is rung 20 with that bug. Write `leaks`, which gives `model` an attention (`model.attention = attention`) and says whether any prediction for `piece` depends on a later byte.
# %%
source = rung("20_causal_gqa").replace("if (j > last ||", "if (j > last + 1 ||")
broken = load(source=source, device=device, quiet=True)
cheating = replace(gpt.kernels(), whole=lambda q, k, v: broken(q, k, v, causal=True)[0])
doubled = replace(gpt.kernels(), whole=lambda q, k, v: 2 * gpt.kernels().whole(q, k, v))  # wrong, but no leak


# %%
# Exercise 24.1
@torch.no_grad()
def leaks(attention):
    """True if a prediction of the model with this attention depends on a later byte."""
    return False


# %%
def tells_them_apart():
    assert leaks(cheating), "the broken mask passes"
    assert not leaks(gpt.kernels()) and not leaks(gpt.sdpa()), "a right attention fails"
    assert not leaks(doubled), "that one is wrong, but it doesn't look ahead"
    return True


exercise.verify("24.1", tells_them_apart)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Change the last bytes of a text. Which predictions may move? Call `model(text)` inside `with torch.autocast(device, plan.dtype)`: the kernels take 16 bits only.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# @torch.no_grad()
# def leaks(attention):
#     model.attention = attention
#     text = piece[:1, :96].clone()
#     other = text.clone()
#     other[:, 50:] = (other[:, 50:] + 1) % 256
#     with torch.autocast(device, plan.dtype):
#         moved = (model(text) - model(other)).abs().amax((0, 2))
#     return (moved[:50].max() > 0.01 * moved[50:].max()).item()
# ```
#
# Predictions 0 to 49 have seen bytes 0 to 49 and nothing else, so they must not move, but for rounding. Rounding they may: in rung 20 a warp's 32 rows decide together when to take a new maximum (notebook 20), so that with longer texts a later row changes the last bits of earlier ones. So the test has a tolerance, a hundredth of what the later predictions move by. Where you look matters: this leak is one key wide in each layer, so only the last few predictions before the cut, as many as there are layers, can see across it.
# </details>
# %% [markdown]
# ### Exercise 24.2 · A model that looks back 32 bytes
#
# Exchange the attention for one with a sliding window: every byte sees itself and the 31 before it. `gpt.operator("20_causal_gqa")` takes `window`, and gives O and LSE. Several layers widen the view again: how far back does a prediction of a model with two such layers depend on the text? Fill in both.

# %%
# Exercise 24.2
windowed = gpt.kernels()
reach = 0  # bytes: the prediction at i depends on byte i - reach, and on none before


# %%
@torch.no_grad()
def looks_back():
    assert reach == 2 * 31, "each of the two layers looks back 31 bytes"
    small = gpt.GPT(replace(plan.size, layers=2), windowed).to(device)
    bytes, first = piece[:1, :100].clone(), 99 - reach  # the first byte that the last prediction sees
    other = bytes.clone()
    other[:, :first] = 0
    with torch.autocast(device, plan.dtype):  # so short that no tile is whole: equal bits may be asked for
        assert torch.equal(small(bytes)[:, -1], small(other)[:, -1]), "it sees further back than that"
        other[:, first] = (bytes[:, first] + 1) % 256
        assert not torch.equal(small(bytes)[:, -1], small(other)[:, -1]), "it doesn't see as far as that"
    return True


exercise.verify("24.2", looks_back)

# %% [markdown]
# <details><summary>Hint</summary>
#
# A layer looks back 31 bytes; what it finds there has looked back itself.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
#
# windowed = gpt.Attention(lambda q, k, v: gpt.operator("20_causal_gqa")(q, k, v, causal=True, window=32)[0], None)
# reach = 2 * 31
# ```
#
# (The check's model has two layers. The work per byte is that of 32 keys in each of them, however long the text.)
# </details>


# %% [markdown]
# ### Exercise 24.3 · What a cache costs
#
# A cache keeps K and V of every layer and every token. Write its bytes for one sequence. Then: of the plan `train.SMALL` (6 layers, 8 heads of Q on 2 of K and V, $d = 64$), with fp16, how many sequences of 4096 bytes fit in 1 GiB, and how many if every query head had its own K and V?
# %%
# Exercise 24.3
def cache_bytes(layers, kv_heads, D, N, itemsize=2):
    return 0


grouped, ungrouped = 0, 0  # sequences that fit


# %%
def counts():
    s = train.SMALL.size
    for kind in (torch.float16, torch.float32):
        real = gpt.Cache(replace(s, context=96), 1, kind, "cpu")
        told = cache_bytes(s.layers, s.kv_heads, gpt.D, 96, itemsize=kind.itemsize)
        assert told == real.k.nbytes + real.v.nbytes, f"gpt.Cache takes another amount in {kind}"
    assert grouped == 2**30 // cache_bytes(s.layers, s.kv_heads, gpt.D, 4096), (
        "the number with grouped heads is another"
    )
    assert ungrouped == 2**30 // cache_bytes(s.layers, s.heads, gpt.D, 4096), "the number without groups is another"
    return True


exercise.verify("24.3", counts)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Two tensors (layers, Hkv, N, D), for one sequence.
#
# </details>
# <details><summary>Solution</summary>
#
# ```python
# def cache_bytes(layers, kv_heads, D, N, itemsize=2):
#     return 2 * layers * kv_heads * N * D * itemsize
#
#
# s = train.SMALL.size
# grouped, ungrouped = (2**30 // cache_bytes(s.layers, h, gpt.D, 4096) for h in (s.kv_heads, s.heads))
# ```
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# Answer before you unfold:
#
# <details><summary>Two loss curves look the same. Why is that no proof that the kernels agree, and what is a better one?</summary>
# On the scale of a whole training nearly everything looks the same, a wrong gradient of a few percent included. Compare the gradients of one step, and the difference of the curves with that between two implementations known to be right.
# </details>
#
# <details><summary>Why do two runs of the same code with the same seed differ on a GPU?</summary>
# Sums whose order isn't fixed: dQ is added up by atomics from CTAs that finish in any order, and an fp32 sum depends on its order.
# </details>
#
# <details><summary>Prompts of different lengths are padded on the right. Why don't the padding bytes spoil anything?</summary>
# A causal mask: no byte of the prompt sees what follows it. Their K and V do land in the cache, but past the sequence's length, where no step looks, and the next bytes overwrite them.
# </details>
#
# <details><summary>A model's temperature-0 text differs from byte 212 on between two kernels. Is one of them wrong?</summary>
# Look at byte 212: if the two likeliest bytes were closer than twice the difference of the logits, it was a tie, and both texts are right. After it they are different texts, and comparing them says nothing.
# </details>
#
# <details><summary>A kernel becomes a quarter faster, and tokens per second hardly change. Why?</summary>
# Attention is one part of a step; the matrices, the norms, the optimizer and the loss take the rest. The share of attention grows with the length of the sequences. And if the host is what a step waits for, no kernel makes it faster: then capture the step as a CUDA graph.
# </details>
