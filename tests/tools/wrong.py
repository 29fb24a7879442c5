"""Plausible wrong answers to region tasks: the catalogue's seeded bugs that lie in the task's regions, and some written out here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from helpers.evidence.catalogue import INSTANCE
from helpers.evidence.mutants import catalogue
from helpers.evidence.verdicts import CLEAN, read
from helpers.ladder.rung import parse
from helpers.ladder.rung import rung as find
from helpers.lessons.regions import WHOLE, Filled, Typed, body, fill
from helpers.lessons.tasks.catalogue import tasks
from helpers.lessons.tasks.task import Task

FEWEST, MOST = 3, 4

MERGED = """    __shared__ State warp_state_smem[warps];
    if (threadIdx.x % 32 == 0) warp_state_smem[threadIdx.x / 32] = s;
    __syncthreads(); // every warp's state is written before any thread reads it
    s = merge_lanes<warps>(warp_state_smem[threadIdx.x % warps]);"""
IN_TURN = """    __shared__ State total;
    if (threadIdx.x == 0) total = s;
    for (int warp = 1; warp < warps; ++warp)
      if (threadIdx.x == 32 * warp) total = merge(total, s);
    __syncthreads();
    s = total;"""

# task -> name -> (what stands once in the rung's own text, what a reader wrote)
WRITTEN = {
    "02.1": {"the smaller maximum": ("const float m = fmaxf(", "const float m = fminf(")},
    "02.2": {"warps in turn without a barrier": (MERGED, IN_TURN)},
    "02.3": {"P not divided": ("expf(s.m - all.m) / all.l", "expf(s.m - all.m)")},
    "03.1": {
        "one column too few": ("k < d; k += 4", "k < d - 4; k += 4"),
        "keys next to each other": ("(tx + c * T::TX) * T::ld", "(tx * T::keys + c) * T::ld"),
    },
    "04.1": {"O not rescaled": ("O_reg[r][c] *= alpha", "O_reg[r][c] *= 1.f")},
    "10.3": {
        "the same columns twice": (
            "O_reg[2 * n + 1], P_reg, V_reg[2], V_reg[3]",
            "O_reg[2 * n + 1], P_reg, V_reg[0], V_reg[1]",
        )
    },
    "11.1": {"no swizzle": ("(chunk ^ row / (d < 64 ? 64 / d : 1) % (d < 64 ? d / 8 : 8))", "chunk")},
    "11.2": {"row-major": ("at<d>(row + r, chunk)", "(row + r) * d + chunk * 8")},
    "12.3": {
        "l of one lane": (
            "l += __shfl_xor_sync(0xffffffff, l, mask)",
            "l += 0.f * __shfl_xor_sync(0xffffffff, l, mask)",
        ),
        "log2 taken for ln": ("* fa::ln_2", ""),
    },
    "13.2": {"P above 1e30": ("finite &= row_sum[r] < 1e30f;", "finite = true;")},
    "13.3": {
        "no swizzle": ("(chunk ^ row % 8)", "chunk"),
        "added, not flipped": ("(place ^ k % 4 * 32)", "(place + k % 4 * 32)"),
    },
    "20.1": {
        "a window one key short": ("shift - window + 1, 0", "shift - window + Bc + 1, 0"),
        "the diagonal from the front": ("min(i0 + Br + shift, Nk) - 1 : Nk - 1", "min(i0 + Br, Nk) - 1 : Nk - 1"),
    },
    "21.1": {
        "an empty part weighs": ("part.l > 0.f ? exp2f(part.m - m) : 0.f", "exp2f(part.m - m)"),
        "l not rescaled": ("weight(a, m) * a.l +", "a.l +"),
    },
    "22.2": {
        "delta left out": ("dP_reg[r][c + e] - delta", "dP_reg[r][c + e]"),
        "P overwritten": ("P_reg[e] *=", "P_reg[e] ="),
        "the next slab not sent": (
            "n + 1 < slabs ? fetch_dP(n + 1) : fetch_dK(0);",
            "if (n + 1 < slabs) fetch_dP(n + 1);",
        ),
    },
    "30.2": {
        "one key too many": ("8 * n + e >= seen", "8 * n + e > seen"),
        "row g alone": ("row + 8 * r + shift", "row + shift"),
        "the diagonal of equal lengths": ("row + 8 * r + shift + 1", "row + 8 * r + 1"),
    },
    "30.3": {
        "not waited for": ("fa::mbarrier_wait(empty + 8 * before, stage == 0 ? parity ^ 1 : parity);", ""),
        "one tile too far": ("j0 - (stages - 1) * Bc", "j0 - stages * Bc"),
        "the ring never turns": ("stage == 0 ? parity ^ 1 : parity", "parity"),
    },
    "31.1": {
        "one key too many": ("8 * n + e >= mine", "8 * n + e > mine"),
        "row g alone": ("row + 8 * r + shift", "row + shift"),
        "the lane's columns forgotten": ("- j0 - 2 * t", "- j0"),
    },
    "31.2": {
        "K in the place of V": ("&maps.V", "&maps.K"),
        "every consumer's rows the same": ("work.i0 + 64 * w", "work.i0"),
        "Q_empty not waited for": ("fa::mbarrier_wait(Q_empty + barrier, Q_ring.parity ^ 1);", ""),
    },
    "32.1": {"l not rescaled": ("l_reg[r] *= alpha[r];", "")},
    "32.2": {
        "sums of both rows together": ("sum_reg[r] +=", "sum_reg[0] +="),
        "the maximum left out": ("scale_log2, -m_reg[r]", "scale_log2, 0.f"),
        "halves exchanged": (
            "[e % 2 * 2], S_reg[2 * k + e / 2][e % 2 * 2 + 1]",
            "[e % 2 * 2 + 1], S_reg[2 * k + e / 2][e % 2 * 2]",
        ),
    },
    "50.1": {
        "the average": ("(w_a * x_a[e] + w_b * x_b[e]) * l_inv", "(x_a[e] + x_b[e]) / 2"),
        "two empty parts": ("m == -FA_INFINITY ? 0.f : m", "m"),
        "0 / 0": ("l > 0.f ? 1.f / l : 0.f", "1.f / l"),
        "the maximum left out": ("fmaxf(lse_a, lse_b)", "0.f"),
        "log2 taken for ln": ("m_finite + log2f(l) * fa::ln_2", "m_finite * fa::log2_e + log2f(l)"),
        "every lane reads LSE": (
            """    if (column == 0) lse_a = a.LSE_a[lse_at(a.LSE_a_stride)], lse_b = a.LSE_b[lse_at(a.LSE_b_stride)];
  }
  lse_a = __shfl_sync(0xffffffff, lse_a, 0, lanes), lse_b = __shfl_sync(0xffffffff, lse_b, 0, lanes);""",
            "    lse_a = a.LSE_a[lse_at(a.LSE_a_stride)], lse_b = a.LSE_b[lse_at(a.LSE_b_stride)];\n  }",
        ),
        "every lane writes LSE": ("if (column == 0) a.LSE[", "a.LSE["),
        "lanes past the end at work": ("inside = row < rows;", "inside = true;"),
        "the other part's strides": ("at(a.O_a_stride)", "at(a.O_b_stride)"),
        "rows of LSE_a taken for contiguous": ("lse_at(a.LSE_a_stride)", "row"),
        "O_a taken for fp32": ("load_row<A>", "load_row<float>"),
    },
}


@cache
def _bodies() -> dict[str, dict[str, dict[str, str]]]:
    """task -> bug -> region -> text, of the seeded bugs that something notices."""
    recorded = read()
    found: dict[str, dict[str, dict[str, str]]] = {}
    noticed = [bug for bug in catalogue().values() if recorded[bug.id].noticed != CLEAN]
    # Of one instance alone: whoever draws another one doesn't see it.
    bugs = [bug for bug in noticed if bug.rule != "original" and bug.id not in INSTANCE and not bug.place]
    for bug in bugs:
        changed = parse(bug.source, Path("bug.cu"))
        for task in tasks().values():
            if task.number != bug.stem[:2] or WHOLE in task.regions:
                continue
            texts = {region: body(changed, region) for region in task.regions}
            if any(text != body(bug.stem, region) for region, text in texts.items()):
                found.setdefault(task.id, {})[bug.id] = texts
    return found


def answers(task: Task) -> dict[str, Filled]:
    """Wrong answers to a task: what is written out, then seeded bugs, one of each rule first."""
    rung = find(task.number)
    if WHOLE in task.regions:
        return {name: fill(rung, {WHOLE: Typed(WHOLE, text)}) for name, text in _whole(task.number)}
    made = {}
    for name, (old, new) in WRITTEN.get(task.id, {}).items():
        (region,) = [r for r in task.regions if body(rung, r).count(old) == 1]
        made[name] = fill(
            rung, {r: Typed(r, body(rung, r).replace(old, new) if r == region else body(rung, r)) for r in task.regions}
        )
    seeded = _bodies().get(task.id, {})
    order = sorted(seeded, key=lambda id: hashlib.sha256(id.encode()).digest())
    first = list({id.split(".")[1]: id for id in reversed(order)}.values())
    for id in [*first, *(id for id in order if id not in first)]:
        if len(made) < MOST:
            made[id] = fill(rung, {r: Typed(r, text) for r, text in seeded[id].items()})
    return made


def _whole(number: str) -> Iterator[tuple[str, str]]:
    """Wrong answers to the rung's other tasks, as texts of the whole rung."""
    for task in tasks().values():
        if task.number == number and WHOLE not in task.regions:
            for name, filled in list(answers(task).items())[: 1 if number < "20" else 2]:
                yield f"{task.id}: {name}", body(filled.rung, WHOLE)
