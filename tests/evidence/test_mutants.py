"""Does the suite bite? One-line bugs seeded into every rung: each has to be caught by the check, by the emulator that
runs it, or, where the answer is right by luck, by the X-ray."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from helpers import Kernel, Rung, check, load, reference, rung, xray
from helpers.lessons.museum import for_d64
from helpers.run.ahead import single


@dataclass(frozen=True)
class Mutant:
    """`rung` with its one occurrence of `old` replaced by `new`; `bug` names what that breaks."""

    rung: str
    bug: str
    old: str
    new: str


NAIVE, SOFTMAX, FA1, FA2 = "01_naive", "02_online_softmax", "03_fa1_fp32", "04_fa2_fp32"
MMA, SWIZZLED, BUFFERED = "10_fa2_mma_fp16", "11_swizzled", "12_double_buffered"
TUNED = "13_tuned"
CAUSAL, SPLIT = "20_causal_gqa", "21_split_kv"
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
    Mutant(MMA, "the scale is left out", "a.scale * fa::log2_e", "fa::log2_e"),
    Mutant(MMA, "V's fragments not transposed", "fa::ldmatrix_x4_trans(V_reg", "fa::ldmatrix_x4(V_reg"),
    Mutant(MMA, "K's matrices in the order of an operand A", "(16 * n + row_B, 2 * k + chunk_B)", "(16 * n + row_A, 2 * k + chunk_A)"),
    Mutant(MMA, "P's fragment column by column", "S_reg[2 * k + e / 2][e % 2 * 2], S_reg[2 * k + e / 2]", "S_reg[2 * k + e % 2][e / 2 * 2], S_reg[2 * k + e % 2]"),
    Mutant(MMA, "P always in fp16", "P_reg[e] = fa::pack2<T>", "P_reg[e] = fa::pack2<fa::fp16>"),
    Mutant(MMA, "one product always of fp16", "fa::mma_m16n8k16<T>(O_reg[2 * n + 1]", "fa::mma_m16n8k16<fa::fp16>(O_reg[2 * n + 1]"),
    Mutant(MMA, "row maximum of half a quad", "mask < 4; mask *= 2) // over the four", "mask < 2; mask *= 2) // over the four"),
    Mutant(MMA, "row sum of half a quad", "mask < 4; mask *= 2) l +=", "mask < 2; mask *= 2) l +="),
    Mutant(MMA, "no rescale of one column in two", "O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;", "O_reg[n][2 * r] *= alpha;"),
    Mutant(MMA, "the tail masked by register, not by column", "2 * t + e % 2 >= a.Nk", "2 * t + e >= a.Nk"),
    Mutant(MMA, "no mask of the tail", "if (j0 + Bc > a.Nk) {", "if (false) {"),
    Mutant(MMA, "loads past the last key", "if (row + r < rows_left) x =", "x ="),
    Mutant(MMA, "no barrier between load and scores", "    __syncthreads(); // K_smem and V_smem are", "    // K_smem and V_smem are"),
    Mutant(MMA, "no barrier between P V and the next load", "    __syncthreads(); // all warps have read", "    // all warps have read"),
    Mutant(MMA, "no barrier before Q's fragments", "  __syncthreads(); // Q_smem", "  // Q_smem"),
    Mutant(MMA, "stores past the last query", "if (i < a.Nq) {", "if (true) {"),
    Mutant(SWIZZLED, "tiles written without the swizzle", "X_smem + at<d>(row + r, chunk)", "X_smem + (row + r) * d + chunk * 8"),
    Mutant(SWIZZLED, "Q read without the swizzle", "Q_smem + at<d>(16 * warp + row_A, 2 * k + chunk_A)", "Q_smem + (16 * warp + row_A) * d + (2 * k + chunk_A) * 8"),
    Mutant(SWIZZLED, "V's chunk swizzled by the step's number", "at<d>(16 * k + row_A, 2 * n + chunk_A)", "at<d>(16 * k + row_A, (2 * n + chunk_A) ^ k)"),
    Mutant(SWIZZLED, "OR for XOR", "(chunk ^ row", "(chunk | row"),
    Mutant(SWIZZLED, "chunks pushed along into the next row", "(chunk ^ row / (d < 64 ? 64 / d : 1)", "(chunk + row / (d < 64 ? 64 / d : 1)"),
    Mutant(SWIZZLED, "short rows swizzled like long ones", "(d < 64 ? d / 8 : 8)) * 8", "8) * 8"),
    Mutant(SWIZZLED, "the last key in V's place", "V_smem = K_smem + Bc * d;", "V_smem = K_smem + (Bc - 1) * d;"),
    Mutant(SWIZZLED, "shared memory for one tile too few", "2 * (Br + 2 * Bc) * d;", "2 * (Br + Bc) * d;"),
    Mutant(SWIZZLED, "every thread copies its first row", "X + r * stride", "X"),
    Mutant(BUFFERED, "a wait that leaves the tile's own copies under way", "fa::cp_async_wait<stages - 2>();", "fa::cp_async_wait<stages - 1>();"),
    Mutant(BUFFERED, "no wait for a tile", "    fa::cp_async_wait<stages - 2>();", "   "),
    Mutant(BUFFERED, "no wait for Q", "  fa::cp_async_wait<stages - 1>();", " "),
    Mutant(BUFFERED, "no barrier between the wait and the scores", "    __syncthreads(); // as above", "    // as above"),
    Mutant(BUFFERED, "no barrier before Q's fragments", "  __syncthreads();                 // every thread's", "  // every thread's"),
    Mutant(BUFFERED, "copies into the stage that is being read", "(stage + stages - 1) % stages);", "stage);"),
    Mutant(BUFFERED, "the first stage read over and over", "stage = (stage + 1) % stages)", "stage = 0)"),
    Mutant(BUFFERED, "the tile after the next one fetched", "fetch(j0 + (stages - 1) * Bc,", "fetch(j0 + stages * Bc,"),
    Mutant(BUFFERED, "groups never closed", "    fa::cp_async_commit();\n  };", "  };"),
    Mutant(BUFFERED, "copies past the last key", "row + r < rows_left ? 16 : 0", "16"),
    Mutant(BUFFERED, "Q where the first tile goes", "KV_smem + (stages - 1) * 2 * Bc * d;", "KV_smem;"),
    Mutant(BUFFERED, "K and V of a stage overlap", "*V_smem = K_smem + Bc * d;\n    if", "*V_smem = K_smem + Bc * d / 2;\n    if"),
    Mutant(TUNED, "P trusted whatever its sums", "fits &= row_sum[r] <= 32768.f;", ""),
    Mutant(TUNED, "S not formed again", "      scores(stage_at);\n      raise_maximum(", "      raise_maximum("),
    Mutant(TUNED, "O not rescaled when the maximum rises", "O_reg[n][2 * r] *= alpha, O_reg[n][2 * r + 1] *= alpha;", ";"),
    Mutant(TUNED, "l not rescaled when the maximum rises", "l_reg[r] *= alpha;", ""),
    Mutant(TUNED, "the maximum without the scale", "fmaxf(S_reg[n][2 * r] * scale_log2, S_reg[n][2 * r + 1] * scale_log2)", "fmaxf(S_reg[n][2 * r], S_reg[n][2 * r + 1])"),
    Mutant(TUNED, "no mask of the ragged tile", ">= keys_left) S_reg", ">= Bc) S_reg"),
    Mutant(TUNED, "the second strip's rows in the first one's place", "r = e / 4 * 2 + e % 2;", "r = e % 2;"),
    Mutant(TUNED, "further right by addition, not by XOR", "(place ^ k % 4 * 32)", "(place + k % 4 * 32)"),
    Mutant(TUNED, "the row sums of half the strips", "for (int r = 0; r < 4; ++r) l_reg[r] += row_sum[r];", "for (int r = 0; r < 2; ++r) l_reg[r] += row_sum[r];"),
    Mutant(TUNED, "copies into the stage that is being read", "fetch(j0 >= (stages - 1) * Bc, free_at, Bc);", "fetch(j0 >= (stages - 1) * Bc, stage_at, Bc);"),
    Mutant(TUNED, "no barrier between the wait and the scores", "    __syncthreads(); // as above", "    // as above"),
    Mutant(TUNED, "each lane for itself", "return __all_sync(0xffffffff, fits);", "return fits;"),
    Mutant(TUNED, "the ragged tile's length for every tile", "s == 0 ? a.Nk - j_last - row : Bc", "Bc"),
    Mutant(CAUSAL, "a query sees one key of the future", "last = sees + (a.causal ? g + 8 * r : 0)", "last = sees + (a.causal ? g + 8 * r + 1 : 0)"),
    Mutant(CAUSAL, "the first query sees the first key only", "shift = Nk - Nq,", "shift = 0,"),
    Mutant(CAUSAL, "no mask on the diagonal", "if (!whole) mask(j0);", ""),
    Mutant(CAUSAL, "a tile that a warp's first row doesn't see to its end counts as whole", "j0 + Bc <= whole_to &&", "j0 + Bc <= whole_to + 8 &&"),
    Mutant(CAUSAL, "a tile with the last row's window's edge counts as whole", "j0 > sees + 31 - window;", "j0 > sees - window;"),
    Mutant(CAUSAL, "a warp skips what only its last rows see", "if (j0 > sees + 31 ||", "if (j0 > sees ||"),
    Mutant(CAUSAL, "a warp skips the tile with the window's first key", "j0 + Bc <= sees - window + 1)", "j0 + Bc <= sees - window + 2)"),
    Mutant(CAUSAL, "the tiles end with the window of the last row", "max(i0 + shift - window + 1, 0)", "max(i0 + Br + shift - window, 0)"),
    Mutant(CAUSAL, "one key too many in a window", "a.causal ? last - window : -1", "a.causal ? last - window - 1 : -1"),
    Mutant(CAUSAL, "a negative scale makes inf of a masked score", "scale_log2 < 0.f ? FA_INFINITY : -FA_INFINITY", "-FA_INFINITY"),
    Mutant(CAUSAL, "a scale of 0 makes a NaN of a masked score", "a.scale == 0.f ? 1e-30f : a.scale * fa::log2_e", "a.scale * fa::log2_e"),
    Mutant(CAUSAL, "the heads of a group are not neighbours", "hk = h / (a.H / a.Hkv)", "hk = h % a.Hkv"),
    Mutant(CAUSAL, "a sequence's keys are looked for in its queries' rows", "hk * a.V_stride[1] + work.k0 *", "hk * a.V_stride[1] + work.q0 *"),
    Mutant(CAUSAL, "sequences past the 32nd are forgotten", "rank -= __shfl_sync(0xffffffff, sum, 31);", "return {head, -1, 0, 0, 0, 0};"),
    Mutant(CAUSAL, "tiles of 32 sequences not summed up", "for (int n = 1; n < 32; n *= 2) {", "for (int n = 1; n < 16; n *= 2) {"),
    Mutant(CAUSAL, "a tile of the sequence before", "found) - 1 - rank", "found) - rank"),
    Mutant(CAUSAL, "rows of the next sequence overwritten", "if (i < done.Nq) {", "if (done.q0 + i < a.Nq) {"),
    Mutant(CAUSAL, "LSE without the sequence's place", "int64_t(done.head) * a.Nq + done.q0 + i]", "int64_t(done.head) * a.Nq + i]"),
    Mutant(CAUSAL, "rows of 12 chunks swizzled like rows of 16", "swapped = d % 64 == 0 ? 8 : 4;", "swapped = 8;"),
    Mutant(CAUSAL, "no barrier before Q's fragments", "  __syncthreads();                 // every thread's", "  // every thread's"),
    Mutant(CAUSAL, "a skipped tile's stage is not turned", "      fetch_next();\n      turn();\n", "      fetch_next();\n"),
    Mutant(CAUSAL, "a warp that skips a tile fetches no next one", "      fetch_next();\n      turn();\n", "      turn();\n"),
    Mutant(SPLIT, "pieces merged without rescaling", "const float kept = weight(whole, both.m)", "const float kept = 1.f"),
    Mutant(SPLIT, "an empty piece has a weight", "part.l > 0.f ? exp2f(part.m - m) : 0.f", "exp2f(part.m - m)"),
    Mutant(SPLIT, "warps merged at their own maxima", "weight(state_smem[w * Br + r], whole.m) / whole.l", "1.f / whole.l"),
    Mutant(SPLIT, "the last keys are in no piece", "per_split = int(fa::ceil_div(steps, a.splits))", "per_split = max(1, steps / a.splits)"),
    Mutant(SPLIT, "pages in order", "block = a.pages[b * a.max_pages + line / a.page]", "block = b * a.max_pages + line / a.page"),
    Mutant(SPLIT, "rows of a page counted from the sequence's start", ", line %= a.page;", ";"),
    Mutant(SPLIT, "lengths not looked at", "a.lengths ? a.lengths[b] : a.Nk", "a.Nk"),
    Mutant(SPLIT, "a query sees one key of the future", "/ group + Nk - a.Nq)", "/ group + Nk - a.Nq + 1)"),
    Mutant(SPLIT, "every head a query of its own", "(r0 + g + 8 * r) / group + Nk", "r0 + g + 8 * r + Nk"),
    Mutant(SPLIT, "the heads of a group are not neighbours", "return hk * group + r % group;", "return r % group * a.Hkv + hk;"),
    Mutant(SPLIT, "copies past the last key", "bytes = j < Nk ? 16 : 0", "bytes = 16"),
    Mutant(SPLIT, "no wait for a step", "fa::cp_async_wait<stages - 2>();", ""),
    Mutant(SPLIT, "lanes don't wait for one another", "    __syncwarp(); // every lane's part", "    // every lane's part"),
    Mutant(SPLIT, "copies into the stage that is being read", "(stage + stages - 1) % stages);", "stage);"),
    Mutant(SPLIT, "warps merged before all are done", "  __syncthreads(); // no warp reads its stages", "  // no warp reads its stages"),
    Mutant(SPLIT, "warps merged before all have written", "  __syncthreads(); // every warp's state", "  // every warp's state"),
    Mutant(SPLIT, "pieces merged before all have written", "  __syncthreads(); // every lane's state", "  // every lane's state"),
    Mutant(SPLIT, "LSE in units of log2", "(whole.m + log2f(whole.l)) * fa::ln_2", "whole.m + log2f(whole.l)"),
]  # fmt: skip


def instances(stem: str, bug: str = "") -> Rung:
    """As few of a rung's instances as show the bug: compiling them is most of what these tests take."""
    if stem < FA1 or "swizzled" in bug:
        return rung(stem)
    return for_d64(stem) if stem < MMA or "always" in bug else single(stem, 64)


def first_failure(kernel: Kernel) -> str:
    """What the check says of the first case that is not right; empty if all are. Cases with masks, groups and packed batches first,
    where a rung has them: its bugs are there."""
    for case in sorted(reference.cases(kernel.rung, "cpu", "small"), key=lambda c: not c.options):
        report = check(kernel, [case])
        if not report.ok:
            return str(report)
    return ""


def first_finding(kernel: Kernel) -> str:
    """What the X-ray finds wrong with a call that has tails and more than two tiles; empty if nothing."""
    q, k, v = (torch.randn(1, 2, n, 64).to(reference.DTYPES[kernel.rung.dtypes[0]]) for n in (70, 150, 150))
    inputs = (q, k, v) if kernel.rung.op == "attention" else (torch.randn(3, 1023),)
    return "".join(finding.text for finding in xray(kernel, *inputs).findings[:1])


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.rung[:2]} {m.bug}")
def test_a_seeded_bug_is_caught(mutant):
    whole = instances(mutant.rung, mutant.bug)
    kernel = load(source=whole.replace(mutant.old, mutant.new), device="cpu", quiet=True)
    kernel.launcher.timeout = 60
    looks = [first_failure, first_finding]
    if (
        "__sync" in mutant.old or "cp_async_wait" in mutant.old
    ):  # which the X-ray sees at once, and cases may miss by luck
        looks.reverse()
    caught = looks[0](kernel) or looks[1](kernel)
    assert caught, f"{mutant.rung} with this bug passes every case, and the X-ray finds nothing: {mutant.bug}"


@pytest.mark.parametrize("stem", sorted({m.rung for m in MUTANTS}))
def test_the_unmodified_rung_is_not(stem):
    """The same path with nothing seeded passes: a check that fails everything would catch every mutant too."""
    kernel = load(source=instances(stem).source, device="cpu", quiet=True)
    assert first_failure(kernel) == "" and first_finding(kernel) == ""
