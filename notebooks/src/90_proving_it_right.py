# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 90 · Proving it right
#
# [← 51 · Attention across GPUs in one kernel](51_one_sided.ipynb) | [glossary](glossary.md) | [91 · The bug museum →](91_bug_museum.ipynb)
#
# **After this notebook you can**
# - explain why a fixed tolerance passes wrong attention kernels, and what an error budget does instead;
# - write tests that catch a given wrong kernel: by an input made to break it, or by a property that needs no reference;
# - judge a test suite by the bugs it lets through, not by the kernels it passes.
#
# **Time** 50 minutes.
#
# **Needs** [03 · FlashAttention-1](03_fa1_fp32.ipynb) and [04 · FlashAttention-2](04_fa2_fp32.ipynb). No GPU: every kernel here runs on the emulator in about a second. Terms stand in the [glossary](glossary.md).
#
# **The idea in one line**: a test is worth what it fails.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
import math

import pandas as pd
import torch

from helpers import Case, check, checks, compare, draw_proof, exercise, for_d64, load, predict, progress, reference

torch.manual_seed(0)
FA2 = for_d64("04_fa2_fp32")  # only what is needed for d = 64: compiles in half the time
right = load(source=FA2.source)
device = right.device

# %% [markdown]
# ## A wrong kernel that passes
#
# The last tile of keys is rarely full. A loop written for full tiles only, `j0 + Bc <= a.Nk` instead of `j0 < a.Nk`, leaves the partial one out. At $N = 16392 = 256 \cdot 64 + 8$ the kernel then never looks at the last 8 keys: one token in two thousand, and a model whose answer stands there gets nonsense.
#
# A common test is a single line, `torch.allclose(o, expected, atol=1e-2)` ([for example](https://github.com/66RING/tiny-flash-attention/issues/12)): every element may be off by 0.01. Does it notice?

# %%
notices = ...  # your prediction: does allclose(atol=1e-2) notice the missing keys, "yes" or "no"?

# %%
only_full = ("for (int j0 = 0; j0 < a.Nk;", "for (int j0 = 0; j0 + Bc <= a.Nk;")
full_tiles = load(source=FA2.replace(*only_full), device=device, quiet=True)


def randn(*shape):
    return torch.randn(*shape).to(device)  # the same numbers on every machine


# %% tags=["reveal"]
q, k, v = randn(1, 1, 64, 64), randn(1, 1, 16392, 64), randn(1, 1, 16392, 64)
exact, _ = reference.attention(q, k, v)  # in float64
o, _ = full_tiles(q, k, v)
print(f"largest error {(o - exact).abs().max():.4f}; largest element of O {exact.abs().max():.3f}")
for name, kernel in {"right": right, "full tiles only": full_tiles}.items():
    print(f"relative error, {name}: {(kernel(q, k, v)[0] - exact).norm() / exact.norm():.1e}")
predict(notices, "no" if torch.allclose(o, exact.float(), atol=1e-2) else "yes", "(does allclose notice?)")

# %% [markdown]
# $O$ is a mean of $N$ random rows of $V$, so its elements shrink like $1/\sqrt N$. At this length the largest is 0.05 and a typical one 0.013, so a kernel that is "off by at most 0.01" may leave out hundreds of keys. The relative error is what one expects of 8 keys in 16392, $\sqrt{8/16392} = 2.2\,\%$, thousands of times what rounding explains. The test never asks how large rounding is.

# %% [markdown]
# ## A budget instead of a tolerance
#
# An error may be as large as rounding makes it, and no larger. Rounding depends on $N$, on the dtype and on the inputs, so the limit is computed for each case:
#
# 1. Compute the answer in **float64**, where rounding is half a billion times smaller than in float32. That is "exact".
# 2. Compute it with **plain PyTorch in the kernel's own precision**. Its error against "exact" is what rounding costs an ordinary implementation.
# 3. The **budget** is twice that, plus four *ulps* of fp32 (units in the last place: the distance from one number to the next) of the largest intermediate sum, which no order of summing avoids, and one of the output's own type at its largest element.
#
# The idea is that of [flash-attention's tests](https://github.com/Dao-AILab/flash-attention/blob/main/tests/test_flash_attn.py). They differ in the details. Their exact answer is computed in fp32. FlashAttention-2's main tests allow $O$ twice PyTorch's error and the gradients three times, and add nothing; FlashAttention-3's and 4's allow twice for all (three times with a softcap), and add twice the error that adding and subtracting 0.3 makes. So neither rule is stricter everywhere.
#
# `compare` holds one pair of outputs against the budget; `check` does so for a list of cases.

# %%
case = Case("N = 16392", q, k, v)
for name, kernel in {"right": right, "full tiles only": full_tiles}.items():
    for found in compare(case, kernel(q, k, v)):
        print(
            f"{name}: {found.output.upper():3} error {found.error:.1e}, budget {found.budget:.1e}, used {found.used:,.2f}"
        )

# %% [markdown]
# *used* is error / budget; above 1 is wrong. The right kernel stays below 1, the wrong one exceeds it by factors of hundreds and thousands. A good limit leaves nothing in between.

# %% [markdown]
# ### Against N and dtype
#
# The same for other lengths and for the 16-bit types. fp16 has 11 significant bits (ulps of $2^{-10}$, a thousandth), bf16 has 8 ($2^{-7}$, nearly a hundredth), fp32 has 24. The function below computes in PyTorch what a 16-bit kernel does, tile by tile: it sums products of 16-bit numbers in fp32, rounds $P$ to 16 bits before the product with $V$, and rounds $O$ at the end.


# %%
def kernel_model(q, k, v, Bc=64):
    """What a FlashAttention kernel of q's dtype computes, in its order: O in that dtype, LSE in fp32."""
    f = torch.float32
    m, l, O = -torch.inf, 0.0, 0.0
    for j in range(0, k.shape[2], Bc):
        S = q.to(f) @ k[:, :, j : j + Bc].to(f).mT / math.sqrt(q.shape[3])
        m_new = S.amax(-1, keepdim=True).clamp(min=m)
        P, alpha = torch.exp(S - m_new), torch.exp(m - m_new)
        l = alpha * l + P.sum(-1, keepdim=True)
        O = alpha * O + P.to(q.dtype).to(f) @ v[:, :, j : j + Bc].to(f)
        m = m_new
    return (O / l).to(q.dtype), (m + l.log()).squeeze(-1)


# %%
margin = ...  # your prediction: bf16, N = 16384, 8 keys dropped: how many times its budget is the error of O?

# %% tags=["reveal"]
rows = []
for name, dtype in reference.DTYPES.items():
    for N in (256, 512, 1024, 2048, 4096, 8192, 16384):
        case = Case("", *(torch.randn(1, 1, n, 64).to(dtype) for n in (16, N, N)))
        good, _ = compare(case, kernel_model(case.q, case.k, case.v))
        bad, _ = compare(case, kernel_model(case.q, case.k[:, :, :-8], case.v[:, :, :-8]))
        rows.append((name, N, good.budget, good.error, bad.error))
limits = pd.DataFrame(rows, columns=["dtype", "N", "budget", "right kernel", "wrong kernel"])
predict(margin, bad.error / good.budget, "budgets", within=0.3)  # of the last row: bf16, N = 16384
draw_proof.tolerances(limits, fixed=1e-2, title="One head, random inputs, d = 64: what is allowed, and what happens")

# %% [markdown]
# **What to see.** The orange line (squares) is a plainly wrong kernel. It falls with $N$ and passes below the dotted line, the fixed tolerance: on inputs like these, the test then passes whatever happens to 8 keys. The budget (dashed) falls too, because $O$ does, and stays between right and wrong: with three orders of magnitude to spare in fp32. In bf16 the wrong kernel's error is only 1 to 3 budgets at $N = 16384$, depending on the numbers drawn. How small an error can a budget see? (Other random numbers than above.)


# %%
def used(dtype, dropped, N=16384):
    """error / budget of a kernel that drops so many of the last keys, for O and for LSE."""
    torch.manual_seed(1)
    case = Case("", *(torch.randn(1, 1, n, 64).to(dtype) for n in (16, N, N)))
    kept = N - dropped
    return [x.used for x in compare(case, kernel_model(case.q, case.k[:, :, :kept], case.v[:, :, :kept]))]


columns = pd.MultiIndex.from_product([reference.DTYPES, ["O", "LSE"]])
blind = pd.DataFrame({f"{d} dropped": sum((used(t, d) for t in reference.DTYPES.values()), []) for d in (0, 1, 2, 8)})
blind.set_index(columns).T.rename_axis("error / budget").round(2)

# %% [markdown]
# In fp32 a single key in 16384 is seen. In bf16 one or two missing keys disappear in the rounding of $O$, however exact the reference. Two things help. **Look at every output**: LSE is an fp32 number whatever the dtype of the inputs, and it is off by many budgets. And **make the input louder**: let every query attend to the last key.

# %%
case = Case("", *(torch.randn(1, 1, n, 64).bfloat16() for n in (16, 16384, 16384)))
case.q[..., 0] = 8.0
case.k[..., -1, 0] = 16.0  # adds 8 · 16 / √64 = 16 to every query's score with the last key
found, _ = compare(case, kernel_model(case.q, case.k[:, :, :-1], case.v[:, :, :-1]))
print(f"bf16, N = 16384, one key dropped: error {found.error:.2f}, {found.used:.0f} × the budget")

# %% [markdown]
# Now even `allclose(atol=1e-2)` sees it. The input matters more than the limit.

# %% [markdown]
# ## Inputs made to break kernels
#
# Random numbers from a normal distribution are gentle: scores between −4 and 4, maxima that settle after a few keys, every row like every other. Each input below removes one of these comforts.


# %%
def qkv(Nq=128, Nk=None, H=1):
    Nk = Nk or Nq
    return randn(1, H, Nq, 64), randn(1, H, Nk, 64), randn(1, H, Nk, 64)


def shifted(by):
    """Random scores, all of them larger by `by`: softmax doesn't mind."""
    q, k, v = qkv()
    q[..., 0], k[..., 0] = 1.0, 8 * by
    return q, k, v


# %%
def one_hot(factor):
    """Each row attends to one key of its own: its score is 8 × factor, the others lie around 0."""
    q, k, v = qkv()
    k = torch.sign(k)
    return factor * k[:, :, torch.randperm(128)], k, v


# %%
def rising():
    """Scores grow along the keys: a new maximum in every tile."""
    q, k, v = qkv()
    q[..., 0], k[..., 0] = 8.0, torch.linspace(0, 60, 128, device=device)
    return q, k, v


def falling():
    q, k, v = rising()
    return q, k.flip(2), v.flip(2)


# %%
torch.manual_seed(2)
inputs = {
    "random, N = 64": qkv(64),
    "random, N = 128": qkv(128),
    "N = 100": qkv(100),
    "4 heads": qkv(64, H=4),
    "shifted by 100": shifted(100),
    "shifted by −1e4": shifted(-1e4),
    "one-hot": one_hot(6),
    "one-hot, far apart": one_hot(30),
    "rising": rising(),
    "falling": falling(),
    "equal scores": (torch.zeros(1, 1, 128, 64, device=device), *qkv()[1:]),
}
cases = [Case(name, *x) for name, x in inputs.items()] + [Case("scale 0.3", *qkv(64), scale=0.3)]

# %% [markdown]
# And ten bugs to try them on: the kernel of [04](04_fa2_fp32.ipynb) with one line changed.

# %%
bugs = {
    "running max starts at 0": ("m_reg[r] = -FA_INFINITY,", "m_reg[r] = 0.f,"),
    "l not rescaled": ("l_reg[r] = l_reg[r] * alpha + row_sum", "l_reg[r] = l_reg[r] + row_sum"),
    "O not rescaled": ("O_reg[r][c] *= alpha;", ";"),
    "tail not masked": ("if (j0 + Bc > a.Nk)", "if (false)"),
    "partial tile skipped": ("for (int j0 = 0; j0 < a.Nk;", "for (int j0 = 0; j0 + Bc <= a.Nk;"),
    "scale without log2 e": ("a.scale * fa::log2_e", "a.scale"),
    "scale fixed at 1/8": ("a.scale * fa::log2_e", "0.125f * fa::log2_e"),
    "V of head 0 for all": ("a.V) + b * a.V_stride[0] + h * a.V_stride[1]", "a.V) + b * a.V_stride[0]"),
    "max of half the columns": ("for (int c = 0; c < 8; ++c) m_new =", "for (int c = 0; c < 4; ++c) m_new ="),
    "LSE in units of log2": ("(m_reg[r] + log2f(l)) * fa::ln_2", "m_reg[r] + log2f(l)"),
}
wrong = {name: load(source=FA2.replace(*edit), device=device, quiet=True) for name, edit in bugs.items()}

# %% [markdown]
# Which input catches which bug?

# %%
caught = ...  # your prediction: how many of the ten bugs does the input `random, N = 64` catch?


# %%
def worst(report):
    """The largest error / budget of each case, over O and LSE; infinite for a misplaced NaN."""
    return {
        case.name: max(math.inf if c.problem else c.used for c in report.comparisons if c.case == case.name)
        for case in cases
    }


# %% tags=["reveal"]
kernels = {"none (the kernel as it is)": right, **wrong}
table = pd.DataFrame({name: worst(check(kernel, cases)) for name, kernel in kernels.items()}).T
predict(caught, int((table["random, N = 64"] > 1).sum()), "of ten bugs are caught by random, N = 64")
draw_proof.catches(table, "error / budget, where above 1; NaN: a NaN or infinity where none belongs")

# %% [markdown]
# **What to see.** Columns first: one full tile of random numbers, the usual first test of a new kernel, catches few bugs. Then the rows:
#
# - *running max starts at 0* changes nothing in a row with a positive score; it takes a row in which all scores are very negative.
# - *max of half the columns* is exact until a score that was not looked at exceeds the others by so much that the exponential overflows (*one-hot, far apart*).
# - *l not rescaled* hides where the first tile holds the maximum (*falling*).
# - *scale fixed at 1/8* is right for the author's one $d$.
# - The top row, the kernel without a bug, is caught by nothing. That is as important as the rest.
#
# No single column is enough; a suite is the union of its columns. `check` runs a list like this one (`reference.cases`), with strided tensors, other $d$ and lengths one off 32, 64 and 128.

# %% [markdown]
# ### A right kernel that fails
#
# A test can also be wrong in the other direction. One obvious hard input is missing above: $Q$ and $K$ both 30 times as large. Three kernels without a bug, twenty draws of it:

# %%
sound = {stem: load(source=for_d64(stem).source, device=device, quiet=True) for stem in ("01_naive", "03_fa1_fp32")}
sound["04_fa2_fp32"] = right
draws = []
for seed in range(20):
    torch.manual_seed(seed)
    q, k, v = qkv()
    case = Case("", 30 * q, 30 * k, v)
    draws.append({stem: compare(case, kernel(*case.inputs))[0].used for stem, kernel in sound.items()})
of_budget = pd.DataFrame(draws)
summary = {"median": of_budget.median(), "largest": of_budget.max(), "draws above 1": (of_budget > 1).sum()}
pd.DataFrame(summary).rename_axis("error / budget").round(2)

# %% [markdown]
# Each of them would be called wrong now and then, the naive one included. Scores here are in the hundreds and thousands, and their rounding alone (an ulp of 2000 is $10^{-4}$) changes any row in which two keys are nearly tied. A draw has a handful of such rows. They make up the whole error of the kernel, and of PyTorch too, so the budget depends on the luck of one draw. The *input* is ill-conditioned: fp32 cannot answer the question.
#
# To test overflow, use *one-hot, far apart*, which has no ties. If a budget is exceeded by a small factor on one input and on no other, suspect the input before the kernel: every bug of the table exceeds it by far more on some input.

# %% [markdown]
# ## Properties instead of examples
#
# Everything so far needs the right answer. But softmax attention has properties that hold whatever the answer is, so a kernel can be compared with *itself*. That works at sizes where a reference is too slow, and on a model's own data; and a property cannot share a mistake with the reference.
#
# The first one: **the result does not depend on the tile size**. Kernel 03 has its $B_c$ in one constant.

# %%
FA1 = for_d64("03_fa1_fp32")
forgets = ("l_kept = expf(m_old[r] - m_finite) * l_old[r]", "l_kept = l_old[r]")
q, k, v = qkv(100)
for name, text in {"as it is": FA1.source, "l not rescaled": FA1.replace(*forgets)}.items():
    tiled = [load(source=text.replace("Bc = 32;", f"Bc = {Bc};"), device=device, quiet=True) for Bc in (16, 32, 64)]
    results = [kernel(q, k, v)[0] for kernel in tiled]
    apart = max((a - b).abs().max().item() for a in results for b in results)
    print(f"{name}: results with Bc = 16, 32, 64 differ by up to {apart:.1e}")

# %% [markdown]
# The bug shows without a reference. More properties follow, each a function that returns what the kernel computes and what it should:
#
# - **Keys have no order.** Permuting keys and values together changes nothing.
# - **States merge** (notebook 02): two parts of the keys give $(O_1, \mathrm{LSE}_1)$ and $(O_2, \mathrm{LSE}_2)$; then $\mathrm{LSE} = \ln(e^{\mathrm{LSE}_1} + e^{\mathrm{LSE}_2})$ and $O = e^{\mathrm{LSE}_1 - \mathrm{LSE}} O_1 + e^{\mathrm{LSE}_2 - \mathrm{LSE}} O_2$, wherever the keys are cut.
# - **Every key twice**: the weights halve, $O$ stays, LSE grows by $\ln 2$.


# %%
def keys_have_no_order(f, q, k, v):
    order = torch.randperm(k.shape[2])
    return f(q, k[:, :, order], v[:, :, order]), f(q, k, v)


# %%
def states_merge(f, q, k, v):
    cut = k.shape[2] // 3
    (o1, lse1), (o2, lse2) = f(q, k[:, :, :cut], v[:, :, :cut]), f(q, k[:, :, cut:], v[:, :, cut:])
    lse = torch.logaddexp(lse1, lse2)
    o = (lse1 - lse).exp()[..., None] * o1 + (lse2 - lse).exp()[..., None] * o2
    return f(q, k, v), (o, lse)


def every_key_twice(f, q, k, v):
    o, lse = f(q, k, v)
    return f(q, torch.cat([k, k], 2), torch.cat([v, v], 2)), (o, lse + math.log(2))


# %% [markdown]
# - **A row's scores may be shifted.** Adding one vector $w$ to all keys adds $\mathrm{scale}\; q_i \cdot w$ to every score of row $i$: $O$ stays, LSE moves by exactly that.
# - **Keys that nobody attends to** change nothing, so any $N$ can be padded to a multiple of the tile.
# - **Rows of P sum to 1**: with $V = 1$, $O = 1$.
# - **Heads are independent**: a head computed alone is the same as one computed with the others.


# %%
def scores_may_be_shifted(f, q, k, v):
    w = randn(k.shape[3])
    o, lse = f(q, k, v)
    return f(q, k + w, v), (o, lse + q @ w / math.sqrt(q.shape[3]))


def padding_changes_nothing(f, q, k, v):
    q, k = q.clone(), k.clone()
    q[..., 0] = 1.0
    nobody = torch.zeros(1, k.shape[1], 28, k.shape[3], device=device)
    nobody[..., 0] = -1e4
    return f(q, torch.cat([k, nobody], 2), torch.cat([v, nobody], 2)), f(q, k, v)


# %%
def rows_of_P_sum_to_1(f, q, k, v):
    o, lse = f(q, k, torch.ones_like(v))
    return (o, lse), (torch.ones_like(o), lse)


def heads_are_independent(f, q, k, v):
    alone = [f(*(x[:, h : h + 1] for x in (q, k, v))) for h in range(q.shape[1])]
    return f(q, k, v), tuple(torch.cat(x, 1) for x in zip(*alone))


# %% [markdown]
# Both sides come from the kernel, so both carry its rounding. For inputs of ordinary size, 64 ulps of the largest element are enough. There are $N = 100$ keys, so that one tile is partial, and two heads.

# %%
properties = [keys_have_no_order, states_merge, every_key_twice, scores_may_be_shifted]
properties += [padding_changes_nothing, rows_of_P_sum_to_1, heads_are_independent]


def violated(f, holds):
    """The larger of O's and LSE's deviations, in units of what is allowed; infinite for a NaN."""
    torch.manual_seed(3)
    q, k, v = randn(1, 2, 40, 64), randn(1, 2, 100, 64), randn(1, 2, 100, 64)
    deviations = []
    for said, wanted in zip(*holds(f, q, k, v)):
        apart = ((said - wanted).abs().max() / (64 * torch.finfo(said.dtype).eps * wanted.abs().max())).item()
        deviations.append(apart if math.isfinite(apart) else math.inf)
    return max(deviations)


# %%
missed = ...  # your prediction: how many of the ten bugs do these seven properties miss, on gentle inputs?

# %% tags=["reveal"]
held = {name: {p.__name__.replace("_", " "): violated(f, p) for p in properties} for name, f in kernels.items()}
held = pd.DataFrame(held).T
predict(missed, int((held.loc[list(bugs)] <= 1).all(axis=1).sum()), "of ten bugs are missed")
draw_proof.catches(held, "deviation / allowed deviation, where above 1")

# %% [markdown]
# **What to see.** On gentle inputs and without any reference, the seven properties catch all bugs but three. A softmax at a wrong temperature is still a softmax, so *scale without log2 e* is seen only by the shift, the one property that contains the scale. *Scale fixed at 1/8* is no error at $d = 64$ with the usual scale. *Running max starts at 0* and *max of half the columns* need inputs that are not gentle. A property says *what* to compare, an adversarial input *on what*; a suite needs both.

# %% [markdown]
# ## Poisoned outputs
#
# A kernel that doesn't write its output can pass every test above. Suppose it forgets the last row of queries. PyTorch's allocator hands out used memory as it is, and that may hold the right answer of an earlier run:

# %%
lazy = load(source=FA2.replace("if (i < a.Nq) {", "if (i < a.Nq - 1) {"), device=device, quiet=True)
q, k, v = qkv(100)
expected, _ = reference.attention(q, k, v)
memory = right(q, k, v)  # an earlier, right run, and its outputs
o, _ = lazy(q, k, v, out=memory)  # the wrong kernel is handed the same memory
print("in used memory:", torch.allclose(o, expected.float(), atol=1e-5))
poisoned = (torch.full_like(o, torch.nan), torch.full((1, 1, 100), torch.nan, device=device))
o, _ = lazy(q, k, v, out=poisoned)
print("in poisoned memory:", torch.allclose(o, expected.float(), atol=1e-5))

# %% [markdown]
# So fill outputs with NaN before the kernel runs. `check` uses a NaN with a bit pattern that arithmetic never produces, which tells "never written" from "computed a NaN":

# %%
print(check(lazy, [Case("N = 100", q, k, v)]))

# %% [markdown]
# ## What none of this sees
#
# A barrier can be missing while every output is right, because the threads happened to run in a lucky order. Inputs, budgets and properties look at *results*; a race is a fault of *order*. The X-ray looks at the order: [91 · The bug museum](91_bug_museum.ipynb) has exhibits that only it catches, and [92 · The X-ray against hardware](92_xray_against_hardware.ipynb) shows how far it can be trusted.
#
# No test proves the absence of bugs. What can be measured is whether the tests bite: seed bugs, one at a time, and count those that pass. The table of ten bugs was such a count; the project keeps a longer list (`helpers/evidence/catalogue.py`), and a bug that passes is a reason for a new input.

# %% [markdown]
# ## Exercises
#
# ### Exercise 90.1 · Make it fail
#
# This kernel computes $e^{S - m}$ with its own idea of $m$: the maximum of each thread's *first four* columns. It is right for the inputs below. Find `q, k, v` for which it is wrong, and the right kernel is right.

# %%
suspect = wrong["max of half the columns"]
print(check(suspect, [Case("random", *qkv(128)), Case("N = 100", *qkv(100)), Case("rising", *rising())]))

# %%
# Exercise 90.1
q, k, v = qkv(128)


# %%
def exposed():
    assert all(x.isfinite().all() for x in (q, k, v)), "finite inputs"
    mine = Case("mine", q, k, v)
    assert check(right, [mine]).ok, "the right kernel fails on it too"
    assert not check(suspect, [mine]).ok, "the suspect passes it"
    return True


exercise.verify("90.1", exposed)

# %% [markdown]
# <details><summary>Hint</summary>
#
# $m$ may be too small by what an fp32 exponential can bear. How much is that, and which columns can exceed it?
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# q, k, v = qkv(128)
# q[..., 0] = 8.0
# k[..., 40, 0] = 120.0
# ```
#
# $2^{x}$ overflows fp32 at $x = 128$, which in scores is $128 \ln 2 = 89$. Some score among the columns that were not looked at (32 to 63 of each tile of 64 keys) has to exceed all that were by 89: key 40 now does, by about $8 \cdot 120 / \sqrt{64} = 120$. (Shifting all scores doesn't: the difference stays.)
# </details>

# %% [markdown]
# ### Exercise 90.2 · A property for LSE
#
# Some kernels compute $O$ right and LSE wrong: in units of log2, say, or without the maximum $m$. The forward pass of a model never shows it; the backward pass recomputes $P$ from the LSE and would be wrong everywhere.
#
# Write a test that passes a right kernel and fails a wrong one, **without** a reference: no `reference`, no softmax of your own. It is tried on right kernels of two rungs and on four wrong ones, in an order of its own, through functions that hide which is which.


# %%
# Exercise 90.2
def lse_holds(f):
    """True if the LSE of kernel f, f(q, k, v) -> (o, lse), behaves as an LSE has to."""
    q, k, v = qkv(100)
    return True


# %%
exercise.verify("90.2", lambda: checks.lse_property(lse_holds))

# %% [markdown]
# <details><summary>Hint</summary>
#
# Duplicating keys moves the right LSE by ln 2; by how much do the wrong ones move? And shifting?
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# def lse_holds(f):
#     (_, lse), (_, wanted) = scores_may_be_shifted(f, *qkv(100))
#     return (lse - wanted).abs().max().item() < 1e-4
# ```
#
# A shift of the scores moves the log2 kernel's LSE by $\log_2 e$ times too much, and the other's not at all, since $l$ doesn't depend on it. A kernel whose LSE is always 0 doesn't move either, and one whose LSE is 1 % too large moves 1 % too far. *Every key twice* misses one: without $m$, $\ln l$ grows by $\ln 2$ as it should.
# </details>

# %% [markdown]
# ### Exercise 90.3 · The smallest suite
#
# Tests cost time on every change. Choose as few columns of the first table as you can, so that each of the ten bugs is caught by at least one of them.

# %%
# Exercise 90.3
suite = ["random, N = 64"]


# %%
def covers():
    typed = {name.replace("−", "-"): name for name in table.columns}  # a minus sign is hard to type
    chosen = {typed[name.replace("−", "-")] for name in suite}
    caught = (table.loc[list(bugs), list(chosen)] > 1).any(axis=1)
    assert caught.all(), "not caught: " + ", ".join(caught.index[~caught])
    assert len(chosen) <= 5, "it can be done with fewer"
    return True


exercise.verify("90.3", covers)

# %% [markdown]
# <details><summary>Hint</summary>
#
# Start with the bugs that only one column sees.
# </details>
#
# <details><summary>Solution</summary>
#
# ```python
# suite = ["shifted by −1e4", "one-hot, far apart", "N = 100", "4 heads", "scale 0.3"]
# ```
#
# Each of the five is the only one to see some bug. By construction such a suite may miss every bug that is not on the list, which is why `reference.cases` has more than forty inputs.
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now explain what an error budget is, do without a reference, and judge a test by what it fails. Answer before you unfold:
#
# <details><summary>Why does the largest element of O shrink when N grows?</summary>
# With random scores O is a mean of about N independent rows of V, and such a mean has a standard deviation of the order of 1/√N.
# </details>
#
# <details><summary>Why twice plain PyTorch's error, and not a number such as 1e-5?</summary>
# Because rounding depends on the dtype, on N and on the inputs, and plain PyTorch's error depends on them in the same way. Twice, because another order of summing is as good as PyTorch's and may be slightly less lucky.
# </details>
#
# <details><summary>A kernel starts its running maximum at 0 instead of −∞. For which rows is its output right?</summary>
# For those whose true maximum is above 0, and below it as long as exp(S − 0) is a normal number in fp32: down to maxima of about −87.
# </details>
#
# <details><summary>Which property would find keys that are read from the wrong head?</summary>
# "Heads are independent". All the others hold: the kernel computes a correct attention of the wrong keys.
# </details>
#
# <details><summary>All tests pass on the kernel. What do you do to learn whether the tests are any good?</summary>
# Break the kernel on purpose, one line at a time, and see whether they fail.
# </details>
