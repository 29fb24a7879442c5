"""Plausible wrong fixes of the detective cases, three of each: the text that takes the place of the first line that the right fix
changes or, where one line isn't enough, of the first and of the last; None keeps a line."""

from __future__ import annotations

from collections.abc import Mapping

FIXES: dict[int, list[str | tuple[str | None, str]]] = {
    1: [f"const float *V = static_cast<const float *>(a.V) + {at};" for at in (
        "b * a.V_stride[1] + h * a.V_stride[1]", "b * a.V_stride[0] + h * a.V_stride[2]", "(b + h) * a.V_stride[0]")],
    2: [f"const float m_finite = {m};" for m in ("m == FA_INFINITY ? 0.f : m", "m == 0.f ? 1.f : m", "m + 1e-30f")],
    3: [f"const float l_kept = expf(m_old[r] - m_finite) * l_old[r], tile_weight = {w};" for w in (
        "expf(m_old[r] - m_finite)", "expf(m_finite - m_tile[r])", "expf(m_tile[r])")],
    4: ["__syncwarp();\n}", "if (threadIdx.x < 64) __syncthreads();\n}", "if (slab % 2) __syncthreads();\n}"],
    5: [f"if (j0 + 8 * n + {column} a.Nk) S_reg[n][e] = -FA_INFINITY;" for column in (
        "2 * t + e % 2 >", "2 * t + e / 2 >=", "t + e % 2 >=")],
    6: [f"*reinterpret_cast<uint4 *>(X_smem + {at}) = x;" for at in (
        "at<d>(row, chunk)", "at<d>(row + r, chunk + 1)", "(row + r) * (d + 8) + chunk * 8")],
    7: [f"fa::cp_async_16(X_smem + at<d>(row + r, chunk), X + r * stride, {size});" for size in (
        "16", "row + r <= rows_left ? 16 : 0", "row < rows_left ? 16 : 0")],
    8: [f"if (t == 0) a.LSE[int64_t(head) * a.Nq + i] = {lse};" for lse in (
        "(m_reg[r] + log2f(l)) * fa::log2_e", "m_reg[r] + log2f(l) * fa::ln_2", "m_reg[r] + logf(l)")],
    9: [f"const int b = work.head / a.H, h = work.head % a.H, hk = {hk};" for hk in (
        "h / a.Hkv", "h % (a.H / a.Hkv)", "min(h, a.Hkv - 1)")],
    10: ["float S_reg[2][4] = {{0.f}, {0.f}};", (None, "S_reg[0][0] = S_reg[1][0] = 0.f;\n#pragma unroll"),
         ("", "float S_reg[2][4] = {{1.f}};\n#pragma unroll")],
    11: ["fa::cp_async_wait<2>();", "fa::cp_async_wait<1>();\n__syncthreads();", ""],
    12: [f"if (key >= left || (a.causal && {edge}) || (a.window && key - query <= ahead - a.window))" for edge in (
        "key - query > ahead - 1", "key > ahead", "key - query >= ahead")],
    13: [f"fa::cp_async_bulk_tensor_5d({copy}, full + 8 * stage, 0, j0, 0, hk, b);" for copy in (
        "K_smem + tile_bytes, &maps.Q", "K_smem, &maps.V", "K_smem + tile_bytes / 2, &maps.V")],
    14: [f"fa::mbarrier_wait({wait});\nfa::mbarrier_arrive_expect_tx(full, tile_bytes);" for wait in (
        "full, parity ^ 1", "empty, parity", "empty, 1")],
    15: ["fa::wgmma_wait_group<1>();\nif constexpr (track) rescale();", "",
         "fa::wgmma_fence();\nif constexpr (track) rescale();"],
    16: [f"if constexpr (next) begin(S_reg, C::LSE + {stage} * C::stats_bytes);" for stage in (
        "Q_next.parity", "0", "(Q_next.stage + 1)")],
}  # fmt: skip


def fixes(n: int, solution: Mapping[int, str]) -> list[dict[int, str]]:
    """The wrong fixes of case n, as `Opened.fixed` takes them; solution: the right one."""
    ends = min(solution), max(solution)
    texts = [(fix,) if isinstance(fix, str) else fix for fix in FIXES[n]]
    return [{line: text for line, text in zip(ends, each) if text is not None} for each in texts]
