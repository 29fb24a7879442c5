"""Why a hardware counter isn't what the X-ray counts: what nvcc makes of the source, what timing adds, what a counter leaves out."""

from __future__ import annotations

import re
from typing import NamedTuple


class Reason(NamedTuple):
    """Why the hardware's count isn't the X-ray's. name, kernel and metric: regular expressions, matched in full."""

    name: str
    kernel: str
    metric: str
    why: str
    by: dict[int, int] | None = None  # by head dimension (0: none): how much more the hardware counts, to the digit
    timing: tuple[float, float] = (0.0, 0.0)  # what varies besides: from, to, as shares of the hardware's count
    between: tuple[int, int] | None = None  # the same where addresses decide, as counts

    def explains(self, D: int, difference: int, of: int) -> bool:
        """Whether the difference is one that this is the reason of."""
        least, most = self.between or (share * of for share in self.timing)
        return least <= difference - (self.by or {}).get(D, 0) <= most


def explain(name: str, kernel: str, metric: str, D: int, difference: int, of: int) -> Reason | None:
    """Why the hardware's figure isn't the X-ray's, if somebody has said why by so much. of: what `timing` is a share of."""
    for reason in REASONS:
        if all(re.fullmatch(pattern, text) for pattern, text in zip(reason, (name, kernel, metric), strict=False)):
            return reason if reason.explains(D, difference, of) else None
    return None


NO_LANE = (
    "nvcc puts three loads that no lane executes (@!PT LDS) before a batch of cp.async: instructions, but no requests"
)
TIMING = (
    "more wavefronts than the addresses ask for, and not the same share at every N, though the addresses are the same: "
    "several warps want the data pipe at once. Kernels of one warp never show it"
)
BESIDE_TMA = (
    "TMA and wgmma want the same shared memory at the same time: another number at every N, with the same addresses"
)
SMALL_STATE = (
    "a State is two loads of 4 bytes in the source (.m, .l), and merge, weight and the division each read it again; nvcc "
    "loads it once"
)
ONE_OF_TWO = "nvcc makes one load, and one store, of those of the two branches"
WHOLE_WORK = (
    "what each thread 0 leaves for its CTA, fields of 4 and 8 bytes, nvcc writes and reads in pieces of up to 16"
)


# The first matching reason wins. Those of rungs were found in the machine code (helpers/toolchain/sass.py) and counted there.
REASONS = [
    Reason(
        "03_fa1_fp32",
        "fa1_fp32",
        "global_store_requests",
        "nvcc cuts each 16-byte store of zeros before the loop into two of 8 (STG.E.64)",
        {64: 256},
    ),
    Reason(
        "03_fa1_fp32",
        "fa1_fp32",
        "global_store_sectors",
        "nvcc cuts each 16-byte store of zeros before the loop into two of 8 (STG.E.64): both touch all of its 16 sectors",
        {64: 256 * 16},
    ),
    Reason(
        "04_fa2_fp32",
        "fa2_fp32",
        "global_store_requests",
        "nvcc cuts half of the 16-byte stores of O (128 requests) into four of 4 (STG.E)",
        {64: 128 * 3},
    ),
    Reason(
        "04_fa2_fp32",
        "fa2_fp32",
        "global_store_sectors",
        "nvcc cuts half of the 16-byte stores of O (128 requests) into four of 4 (STG.E): each touches all 16 sectors",
        {64: 128 * 3 * 16},
    ),
    Reason("12_double_buffered", "fa2_mma", "shared_load_instructions", NO_LANE, {64: 480, 128: 480}),
    Reason("13_tuned", "fa2_mma", "shared_load_instructions", NO_LANE, {64: 240, 128: 240}),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_load_instructions",
        f"{NO_LANE}, 5 times in each of 16 warps. And the 24 bytes of Work are read in two pieces (LDS.128, LDS), not in three",
        {D: 16 * (5 * 3 + 2 - 3) for D in (64, 128)},
    ),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_store_instructions",
        "thread 0's 24 bytes of Work leave in two pieces (STS.128, STS.64), not in three; all 16 warps come past them, 12 of "
        "them with no lane that takes part",
        {D: 16 * 2 - 4 * 3 for D in (64, 128)},
    ),
    Reason(
        "20_causal_gqa",
        "causal_gqa",
        "shared_store_wavefronts",
        "thread 0's 24 bytes of Work leave in two pieces (STS.128, STS.64), not in three; and up to 2 of these few wavefronts are "
        "seen twice, as several warps want the data pipe at once",
        {D: 4 * (2 - 3) for D in (64, 128)},
        between=(0, 2),
    ),
    Reason("20_causal_gqa", "causal_gqa", "shared_store_conflicts", TIMING, between=(0, 2)),
    Reason(
        "21_split_kv",
        "split_kv",
        "shared_load_instructions",
        f"{SMALL_STATE} (4 LDS.64 for 15 loads). {NO_LANE}, 1 (D = 64) or 3 (D = 128) times in each of 512 warps",
        {64: 1024 * (4 - 15) + 512 * 3, 128: 2048 * (4 - 15) + 512 * 9},
    ),
    Reason(
        "21_split_kv",
        "split_kv",
        "shared_load_wavefronts",
        f"{SMALL_STATE} (4 LDS.64 for 15 loads)",
        {64: 1024 * (4 - 15), 128: 2048 * (4 - 15)},
        (0.0, 0.005),
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "shared_load_instructions",
        f"{SMALL_STATE}, two of them at a time (LDS.128): 1 + 3 loads for 14 (D = 64), 1 + 1 for 6 (D = 128), in 512 warps",
        {64: 512 * (4 - 14), 128: 512 * (2 - 6)},
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "shared_load_wavefronts",
        f"{SMALL_STATE}, two of them at a time (LDS.128), which for all 32 lanes (D = 128) takes two wavefronts",
        {64: 512 * (4 - 14), 128: 512 * (3 - 6)},
        (0.0, 0.01),
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "global_store_requests",
        "nvcc cuts the 8-byte store of O into two of 4 (STG.E)",
        {64: 512, 128: 512},
    ),
    Reason(
        "21_split_kv",
        "merge_splits",
        "global_store_sectors",
        "nvcc cuts the 8-byte store of O into two of 4 (STG.E): both touch all of its sectors, 4 or 8",
        {64: 512 * 4, 128: 512 * 8},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_load_instructions",
        f"{NO_LANE}: 5888, with those that stand for fences. {WHOLE_WORK}: 320 fewer; and the 8 LSE of a thread come in two "
        "loads (LDS.128): 384 fewer",
        {64: 5888 - 320 - 384},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_load_wavefronts",
        f"{WHOLE_WORK}: 320 fewer, and 48 that are loaded for the last step only. The 8 LSE of a thread come in two loads "
        "(LDS.128) of two wavefronts: 256 fewer",
        {64: -320 - 48 - 256},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "shared_store_(instructions|wavefronts)",
        f"{WHOLE_WORK}: 4 stores instead of 6 in 4 CTAs",
        {64: 4 * (4 - 6)},
    ),
    Reason(
        "22_backward_fp32",
        "backward_fp32",
        "async_copy_conflicts",
        "the counter depends on when the lines arrive: it is off by -10 %, 0 and 1 % at N = 256, 1024 and 4096, where every step "
        "has the same addresses",
        timing=(-0.12, 0.02),
    ),
    Reason(
        "23_backward_mma",
        "backward_mma",
        "shared_load_instructions",
        f"{NO_LANE}: once in each warp, in each step of it, and in each step of the warp that fetches LSE and delta",
        {64: 3 * (16 + 64 + 16), 128: 3 * (32 + 128 + 16)},
    ),
    Reason(
        "32_ping_pong",
        "ping_pong",
        "shared_store_instructions",
        "at the beginning a store that no lane executes (@!P0 STS), in each warp but the first of a CTA",
        {64: 60, 128: 44},
    ),
    Reason("33_backward_wgmma", "backward_wgmma", "shared_(load|store)_conflicts", BESIDE_TMA, timing=(0.0, 0.06)),
    Reason(
        "33_backward_wgmma",
        "backward_wgmma",
        "global_load_(requests|sectors)",
        "who finds at a tile of dQ that another CTA is storing its share looks again: how often is a matter of time",
        timing=(-0.2, 0.2),
    ),
    Reason(
        "33_backward_wgmma",
        "backward_wgmma",
        "shared_load_instructions",
        "of four items the X-ray's first CTA takes all, on the card each CTA one: the S of nothing that follows a CTA's last item is "
        "begun four times, not once: 3 x 128 more loads of LSE. And nvcc loads three or four of an item's numbers at once: 222 fewer. "
        "At d = 128 an item is read only if the order of dQ is asked for: two loads in each of 48 warps that no lane executes",
        {64: 3 * 128 - 222, 128: 2 * 48},
    ),
    Reason(
        "33_backward_wgmma",
        "backward_wgmma",
        "shared_store_instructions",
        "an item's seven numbers go in three stores, not in two: eight items are written, four of them nothing",
        {64: 8},
    ),
    Reason("3[0-9]_.*", ".*", "shared_(load|store)_conflicts", BESIDE_TMA, timing=(0.0, 0.05)),
    Reason(r"[012]\d_.*", ".*", "shared_(load|store)_(wavefronts|conflicts)", TIMING, timing=(0.0, 0.015)),
    Reason("copy.*", "copy", "shared_load_instructions", NO_LANE, {0: 3}),
    Reason(
        "copy.*",
        "micro_copy.*",
        "shared_load_instructions",
        f"{NO_LANE}, and one more whose condition is false for all lanes",
        {0: 3 + 1},
    ),
    Reason(
        "copy16: both ends .*",
        "cp.async.ca",
        "conflicts|wavefronts",
        "the instruction's counter doesn't count how long lanes queue, as the data pipe's does, but how many share a bank with one of them",
        between=(-4, 4),
    ),
    Reason(
        "copy16g: all zeros from stride 128",
        "cp.async.cg",
        "wavefronts",
        "zeros take turns by the places that they would come from, though nobody reads there; the counter of conflicts leaves "
        "that out, as the X-ray does",
        {0: 28},
    ),
    Reason(
        "copy16g.*",
        "copy",
        "global_load_sectors",
        "cp.async.cg asks the L2 for each 32 bytes of its destination, once for every line of 128 bytes that they come from; "
        "for what another lane overwrites it doesn't ask. And nvcc reads two numbers of a lane's row only for lanes that take part",
        between=(-32, 31),
    ),
    Reason(
        "copy.*",
        "copy",
        "global_load_sectors",
        "nvcc reads the second and third number of a lane's row, 32 sectors in all, only for lanes that take part",
        between=(-32, -1),
    ),
    Reason(
        "copy16g.*",
        "copy",
        "async_copy_conflicts",
        "this counter doesn't see cp.async.cg, except zeros; the one of instructions does (device.async.csv)",
        between=(-28, -1),
    ),
    Reason(
        "copy.*",
        "copy|micro_copy.*",
        "async_copy_conflicts",
        "the counter allows a wavefront for every four lines of the source, and one for zeros, before it calls it a conflict",
        between=(-8, -1),
    ),
    Reason(
        "(store|atomic).*",
        "micro_.*",
        "shared_load_instructions",
        "a load that no lane executes (its condition is false for all) is an instruction, but no request",
        {0: 1},
    ),
    Reason(
        "atomic_one_word",
        ".*",
        "atomic_(wavefronts|conflicts)",
        "nvcc adds up the lanes' numbers first and lets one lane do the atomic",
        {0: -31},
    ),
    Reason("two_branches", ".*", "shared_load_instructions|global_store_requests", ONE_OF_TWO, {0: -1}),
    Reason("two_branches", ".*", "shared_load_conflicts", f"{ONE_OF_TWO}: as many wavefronts, of fewer loads", {0: 1}),
    Reason(
        "half_warps_that_sync",
        ".*",
        "global_store_requests",
        "nvcc makes one store of those of the two branches",
        {0: -1},
    ),
    Reason(
        "trips_by_lane",
        ".*",
        "shared_load_(instructions|wavefronts)",
        "nvcc unrolls the loop, and lanes with different numbers of trips no longer meet in each load",
        {0: 3},
    ),
    Reason(
        "loop_in_a_loop",
        ".*",
        "shared_load_instructions",
        "nvcc peels a load off the loop that no lane executes: an instruction, but no request",
        {0: 1},
    ),
]
