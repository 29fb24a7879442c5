# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 93 · Detective
#
# [← 92 · The X-ray against hardware](92_xray_against_hardware.ipynb) | [glossary](glossary.md) | [99 · The ladder →](99_the_ladder.ipynb)
#
# **After this notebook you can**
# - conclude from the inputs that are wrong, and from how they are wrong, where a bug can't be;
# - name what went wrong before you touch the code;
# - fix a kernel that somebody else has written, and show that it is fixed.
#
# **Time** 60 minutes for the four cases below. All twelve take about three hours.
#
# **Needs** [91 · The bug museum](91_bug_museum.ipynb). The cases follow the ladder: each needs the notebook of its rung. No GPU.
#
# **The idea in one line**: rule out first, read the code afterwards.

# %%
import importlib.util, os, sys  # on Colab, Kaggle or a hub: takes the series from the folder above, or fetches it

if not importlib.util.find_spec("helpers"):
    get_ipython().system("[ -d ../helpers -o -d series ] || git clone --depth 1 ${FA_REPOSITORY:?no address} series")
    sys.path += [os.path.abspath(p) for p in ("..", "series") if os.path.isdir(f"{p}/helpers")] or sys.exit("no series")
    importlib.import_module("helpers").prepare()

# %%
from helpers import detective, exercise, predict, progress
from helpers.lessons.detective import mechanisms, opened

# %% [markdown]
# ## How a case goes
#
# In [91](91_bug_museum.ipynb) each bug had a label. Here a kernel of the ladder has one bug, and you see what a user would report: which inputs are right, where the others are wrong, whether the answer changes from run to run, and how much memory was moved. What the X-ray *finds* is withheld, as it would name the line.
#
# 1. **Symptoms.** `case.symptoms()` runs the kernel on inputs that get harder one by one. Each adds one thing that can go wrong, so the first wrong input says a lot, and the right ones say more.
# 2. **Diagnosis.** `case.code()` shows the parts of the file among which the bug is. You name the line and the mechanism. Only a right diagnosis is followed by the fix.
# 3. **Fix.** The lines that you change, by number. The fixed kernel has to be right on all inputs, in several orders of threads, with nothing found by the X-ray.
#
# The rungs are public: a diff with `kernels/` names the line in a second. It cheats nobody but you, it doesn't name the mechanism, and your own kernels have no original to compare with.
#
# These are the mechanisms. Most belong to one case; some belong to none.

# %%
print(mechanisms())

# %% [markdown]
# ### A first case, together
#
# The naive kernel of [01](01_naive.ipynb), broken. It is not among those that are drawn.

# %%
first = opened(1)
first.symptoms()

# %% [markdown]
# **Rule out.** LSE is right everywhere, so the scores and the softmax are, and with them everything that is done with $Q$ and $K$. The inputs with one head are right (the shapes are in `first.outputs("several tiles")`: batch, heads, queries, columns); of two heads the second is wrong, in all rows and columns. The kernel moves as many bytes as the rung does, so nothing is left out and nothing is read twice. One input stops with an access that is not allowed: the only one with two batches. (Of a single batch the stride is passed as 0.)

# %%
mechanism = ...  # your prediction: the mechanism, a name from the list above

# %%
first.code("output")

# %% tags=["reveal"]
broken = first.rung.source.splitlines()
line = 1 + next(n for n, text in enumerate(broken) if "b * a.V_stride[1]" in text)
strides = ("V_stride[1] + h * a.V_stride[0]", "V_stride[0] + h * a.V_stride[1]")  # of batch and head, exchanged
fix = {line: broken[line - 1].replace(*strides)}
predict(mechanism, "stride", f"is the mechanism, in line {line}")
print("the diagnosis:", first.diagnose(line, "stride") or "right")
print("the fixed kernel:", first.fault(first.fixed(fix)) or "right on all inputs, nothing found")

# %% [markdown]
# **What to see.** Three questions were enough: *which output* (O and not LSE: the second half of the kernel), *which inputs* (several heads: an index of the head), *which elements* (all of a head: an address, not arithmetic). Then one line was left to read. The wrong numbers themselves, 0.81 for −0.86, said nothing.
#
# ## What a symptom rules out
#
# | symptom | it is not | look at |
# |---|---|---|
# | LSE right, O wrong | scores, mask, softmax | V, the second product, the rescaling or the address of O |
# | O right, LSE wrong on every input | in fp32, anything that the weights depend on (in 16 bits a small error of the scores hides in O's rounding) | the line that writes LSE |
# | all columns of some rows | an address within a row | one number per row: $m$, $l$, $\alpha$; the mask |
# | every 8th or 16th row, or all but those | arithmetic | layout, fragment |
# | right with one tile, wrong with several | what happens within a tile | what is carried from tile to tile: sums, stages |
# | right where tiles are whole | the main path | the last tile: mask, fill, bounds |
# | the answer changes from run to run | arithmetic | barriers, waits, what nobody has written |
# | all right, and the X-ray reports something | an output that these inputs show | the order of threads, copies and products |
# | one kind of input only | what all inputs share | the lines for that feature: causal, heads, window |
#
# On the emulator, memory that nobody has written, and a copy that has not landed, hold NaN: on a GPU there may be old numbers, which look better and are no less wrong.
#
# For more than `symptoms()` shows, `case.outputs("a ragged tile")` gives each output of an input with what it should be, as two arrays: subtract, divide, look at single rows. `case.code("epilogue")` shows any other region of the file.
#
# ## Your cases
#
# A seed draws twelve of fifteen. Take a seed that your neighbour doesn't have.

# %%
SEED = 1
mine = detective(SEED)
mine

# %% [markdown]
# Four of them, spread over the ladder, are the exercises below. The other eight go the same way: `case = mine[0]`, `case.symptoms()`, `case.code()`, `case.hint()`, and `case.solve(line, mechanism, fix)`, which raises an error that says what is not right yet. In an editor: `python -m helpers exercise new case 5` writes `work/case_05.cu` and prints its symptoms; `exercise check` judges that file.

# %% [markdown]
# ## Exercises
#
# `fix` maps the number of a line to its new text. Several lines of text take the place of one, and `""` removes a line: `{112: "      __syncthreads();\n      first(line, that, was, there);"}` puts a barrier in front of line 112. Where a line is missing, `line` is the one before or behind the gap.
#
# ### Exercise 93.1 · The first of four

# %%
mine[1].symptoms()

# %%
mine[1].code()

# %%
mine[1].hint()

# %%
# Exercise 93.1
line, mechanism = None, ""
fix = {}

# %%
exercise.verify("93.1", lambda: mine[1].solve(line, mechanism, fix))

# %% [markdown]
# <details><summary>Solution</summary>
#
# The cell fills in the answer of your case, whichever your seed drew, and prints the reason.
#
# ```python
# line, mechanism, fix = mine[1].solution()
# ```
# </details>

# %% [markdown]
# ### Exercise 93.2 · The second

# %%
mine[4].symptoms()

# %%
mine[4].code()

# %%
mine[4].hint()

# %%
# Exercise 93.2
line, mechanism = None, ""
fix = {}

# %%
exercise.verify("93.2", lambda: mine[4].solve(line, mechanism, fix))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# line, mechanism, fix = mine[4].solution()
# ```
# </details>

# %% [markdown]
# ### Exercise 93.3 · The third

# %%
mine[7].symptoms()

# %%
mine[7].code()

# %%
mine[7].hint()

# %%
# Exercise 93.3
line, mechanism = None, ""
fix = {}

# %%
exercise.verify("93.3", lambda: mine[7].solve(line, mechanism, fix))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# line, mechanism, fix = mine[7].solution()
# ```
# </details>

# %% [markdown]
# ### Exercise 93.4 · The fourth

# %%
mine[10].symptoms()

# %%
mine[10].code()

# %%
mine[10].hint()

# %%
# Exercise 93.4
line, mechanism = None, ""
fix = {}

# %%
exercise.verify("93.4", lambda: mine[10].solve(line, mechanism, fix))

# %% [markdown]
# <details><summary>Solution</summary>
#
# ```python
# line, mechanism, fix = mine[10].solution()
# ```
# </details>

# %%
progress()

# %% [markdown]
# ## Self-check
#
# You can now narrow a bug down before you read the code. Answer before you unfold:
#
# <details><summary>O and LSE are wrong in the same rows, and right in the others. Name three suspects, and one input that tells them apart.</summary>
# The maximum, the rescaling, the mask. Equal scores: every $\alpha$ is 1, so a forgotten rescaling doesn't show, and a key that is wrongly counted does. (A wrong start of the maximum shows where all scores are far below 0.)
# </details>
#
# <details><summary>A kernel is right on every input, and the X-ray reports a race. Is it broken?</summary>
# Yes. The order in which the threads ran here was kind; no line of the program demands it. Another GPU, another compiler or a slower neighbour may choose another order.
# </details>
#
# <details><summary>The kernel moves exactly as many bytes as the right one, tensor by tensor. What does that rule out?</summary>
# Loads that are left out, repeated or taken from another tensor. It doesn't rule out a wrong place within the right tensor: the number of bytes is the same.
# </details>
#
# <details><summary>Why is a diagnosis worth more than a diff that makes the test pass?</summary>
# A fix that isn't understood may hide the bug: a barrier at every line makes a race disappear along with the speed, and a guard against NaN hides unwritten memory. A mechanism predicts something else that can be checked.
# </details>
