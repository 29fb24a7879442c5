"""Does the suite bite? One-line bugs seeded into every rung: each has to be caught by the check or by the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from helpers import Kernel, check, load, reference, rung


@dataclass(frozen=True)
class Mutant:
    """`rung` with its one occurrence of `old` replaced by `new`; `bug` names what that breaks."""

    rung: str
    bug: str
    old: str
    new: str


NAIVE, SOFTMAX, FA1, FA2 = "01_naive", "02_online_softmax", "03_fa1_fp32", "04_fa2_fp32"
MUTANTS = [
    Mutant(NAIVE, "the scale is left out", "a.scale * s;", "s;"),
    Mutant(NAIVE, "batch and head strides of V swapped", "b * a.V_stride[0] + h * a.V_stride[1]", "b * a.V_stride[1] + h * a.V_stride[0]"),
    Mutant(NAIVE, "running max from 0", "float m = -FA_INFINITY;", "float m = 0.f;"),
    Mutant(NAIVE, "scores beyond the last key", "if (i >= a.Nq || j >= a.Nk) return;", "if (i >= a.Nq) return;"),
    Mutant(NAIVE, "LSE unwritten", "if (threadIdx.x == 0) a.LSE[row] = m + logf(l);", ""),
    Mutant(NAIVE, "the last key left out of O", "for (int j = 0; j < a.Nk; ++j) o +=", "for (int j = 0; j < a.Nk - 1; ++j) o +="),
    Mutant(SOFTMAX, "merge without rescaling l", "a.l * expf(a.m - m_finite) + b.l *", "a.l + b.l *"),
    Mutant(SOFTMAX, "-inf minus -inf in the merge", "m == -FA_INFINITY ? 0.f : m; // both", "m; // both"),
    Mutant(SOFTMAX, "no barrier between the warps' states and their merge", "    __syncthreads(); // every warp's state", "    // every warp's state"),
    Mutant(SOFTMAX, "a vector one element past the row", "e + 4 <= slice.last && aligned16(S)", "e + 3 <= slice.last && aligned16(S)"),
    Mutant(SOFTMAX, "a thread's elements keep its own maximum", "s.l > 0.f ? expf(s.m - all.m) / all.l : 0.f", "s.l > 0.f ? 1.f / all.l : 0.f"),
    Mutant(FA1, "no rescale of l", "l_kept = expf(m_old[r] - m_finite) * l_old[r]", "l_kept = l_old[r]"),
    Mutant(FA1, "the new tile at its own maximum", "tile_weight = expf(m_tile[r] - m_finite)", "tile_weight = 1.f"),
    Mutant(FA1, "no mask of the tail", "const bool is_key = j0 + tx + c * T::TX < a.Nk;", "const bool is_key = true;"),
    Mutant(FA1, "running max from 0", "m[i] = -FA_INFINITY, l[i] = 0.f;", "m[i] = 0.f, l[i] = 0.f;"),
    Mutant(FA1, "no barrier between load and scores", "      __syncthreads(); // Q_smem, K_smem", "      // Q_smem, K_smem"),
    Mutant(FA1, "no barrier between P V and the next load", "      __syncthreads(); // all warps have read", "      // all warps have read"),
    Mutant(FA1, "LSE unwritten when the keys fill their tiles", "j0 + Bc >= a.Nk", "j0 + Bc > a.Nk"),
    Mutant(FA1, "an early return before the barrier", "      load_tile<d>(Q_smem", "      if (i0 + row0 >= a.Nq) return;\n      load_tile<d>(Q_smem"),
    Mutant(FA2, "no rescale of O", "O_reg[r][c] *= alpha;", ";"),
    Mutant(FA2, "no rescale of l", "l_reg[r] = l_reg[r] * alpha + row_sum;", "l_reg[r] = l_reg[r] + row_sum;"),
    Mutant(FA2, "exp2 of scores not in units of log2", "a.scale * fa::log2_e", "a.scale"),
    Mutant(FA2, "one key too many in the tail", "+ c / 4 * (d / 2) >= a.Nk", "+ c / 4 * (d / 2) > a.Nk"),
    Mutant(FA2, "LSE in units of log2", "(m_reg[r] + log2f(l)) * fa::ln_2", "m_reg[r] + log2f(l)"),
    Mutant(FA2, "loads past the last key", "if (row + n < rows_left)", "if (true)"),
    Mutant(FA2, "stores past the last query", "if (i < a.Nq) {", "if (true) {"),
    Mutant(FA2, "the next tile's K from the wrong column", "Bc * a.K_stride[2] - (d - Ks)", "Bc * a.K_stride[2] - d"),
    Mutant(FA2, "one buffer for two slabs of K", "K_smem + (s % 2 * Ks + k_col + e)", "K_smem + (k_col + e)"),
    Mutant(FA2, "no barrier between slabs of K", "      __syncthreads(); // slab s + 1", "      // slab s + 1"),
    Mutant(FA2, "no barrier before the loop", "  __syncthreads(); // Q_smem", "  // Q_smem"),
    Mutant(FA2, "half of the row sum", "for (int mask = T::TY; mask < 32; mask *= 2) l +=", "for (int mask = 2 * T::TY; mask < 32; mask *= 2) l +="),
]  # fmt: skip


def first_failure(kernel: Kernel) -> str:
    """What the check says of the first case that is not right; empty if all are."""
    for case in reference.cases(kernel.rung, "cpu", "small"):
        report = check(kernel, [case])
        if not report.ok:
            return str(report)
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.rung[:2]} {m.bug}")
def test_a_seeded_bug_is_caught(mutant):
    kernel = load(source=rung(mutant.rung).replace(mutant.old, mutant.new), device="cpu", quiet=True)
    kernel.launcher.timeout = 60
    assert first_failure(kernel), f"{mutant.rung} with this bug passes every case: {mutant.bug}"


@pytest.mark.parametrize("stem", sorted({m.rung for m in MUTANTS}))
def test_the_unmodified_rung_is_not(stem):
    """The same path with nothing seeded passes: a check that fails everything would catch every mutant too."""
    assert first_failure(load(source=rung(stem).source, device="cpu", quiet=True)) == ""
