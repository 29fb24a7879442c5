"""When each warpgroup of a Hopper kernel fetches, multiplies and waits, noted by the kernel itself (clocks.py).

`python -m helpers record roles 32_ping_pong` records it on this machine's GPU, as data/<device>/32_ping_pong.roles.csv.

`instrument` puts a note at every marker of a rung's text and around every wait, for a barrier or for a product: the first
thread of each warpgroup of one CTA writes down the SM's clock and what begins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..ladder.rung import Which, rung
from ..record.workload import TOKENS, WIDTH, N
from ..run.kernel import load
from .clocks import declare, since_first, workspace_index

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

# What begins at a line of a rung's text: kinds of draw_hopper.KINDS; "" is what isn't drawn.
REGIONS = {
    r"// \[region: (producer|fetch|refill)\]": "copy",
    r"// \[end: (producer|fetch|refill)\]": "",
    r"// \[region: scores\]": "scores",
    r"// \[region: mask\]": "softmax",
    r"// \[region: online_update\]": "softmax",
    r"// \[region: output\]": "output",
    r"// \[end: output\]": "",
}
# The same where products and softmax are functions of the kernel, called from its loop.
CALLS = {
    r"// \[region: producer\]": "copy",
    r"// \[end: producer\]": "",
    r"// \[region: (turns|tile_loop)\]": "",
    r"^[^/]*\bstart_scores\(": "scores",
    r"^[^/]*\bstart_output\(": "output",
    r"^ *(if constexpr \(track\) )?(softmax|raise_maximum|exponentials)\(": "softmax",
    r"^[^/]*\bround_P\(": "softmax",
    r"// \[region: epilogue\]": "",
}
# A backward pass: regions of its loop that start products, and what the threads do between them.
BACKWARD = {
    r"// \[region: producer\]": "copy",
    r"// \[end: producer\]": "",
    r"// \[region: (tile_loop|dP|next_S|S_and_dV|dP_and_dV|dQ)\]": "products",
    r"// \[region: dS\]": "dS",
    r"// \[region: next_scores\]": "softmax",
    r"// \[region: reduce\]": "send dQ",
    r"// \[end: (reduce|tile_loop)\]": "",
}
WAIT = re.compile(
    r"^( *)((?:if \(!?\w+\) )?(?:(?:fa::mbarrier_wait|fa::bar_sync|take_turn)\(.*|fa::wgmma_wait_group<[^;]+>\()\);)(.*)$"
)
FIRST = re.compile(r" *fa::wgmma_wait_group<")
# Of these waits of 33's producer the end is not noted, or ptxas would spill at D = 128, too: they last until it has copied.
OPEN = re.compile(r"C::(K|V|dO)_empty")
KINDS = ["", "wait", "copy", "scores", "softmax", "output", "products", "dS", "send dQ", "product"]
WARPGROUPS, NOTES = 4, 1024  # of which notes are kept, each
SIGN = 0x5A170000  # what a note's first word has besides its kind; what lies in memory anyway has not
# Every thread counts notes, and the warpgroup's number comes from a shuffle: where a note is written is then one value for a
# warp, in uniform registers. 33 has no others to spare, and at D = 64 not even these: ptxas would serialise its products.
NO_ROOM = {"33_backward_wgmma": (64,)}  # not recorded
NOTE = """
  int noted = 0, doing = 0;
  const int noting = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  [[maybe_unused]] const auto note = [&](int kind) {
    doing = kind;
    if (noted == %(notes)d - 1) return;
    int *at = static_cast<int *>(a.workspace[%(index)d]) + 2 * (noting * %(notes)d + noted++);
    if (blockIdx.x != gridDim.x / 2 || threadIdx.x %% 128 != 0) return;
    at[0] = %(sign)d | kind, at[1] = int(clock64()), at[2] = 0;
  };
"""


def instrument(source: str, marks: Mapping[str, str] | None = None) -> str:
    """A rung's text whose warpgroups note times in a workspace tensor `notes` (4, 2048), with the rung's lines where they were.

    marks: pattern of a line -> kind that begins there; by default REGIONS, CALLS for a kernel with start_scores(), and BACKWARD for
    a backward pass.
    ValueError if a pattern is nowhere to be found, or a kernel has no dynamic shared memory to begin behind.
    """
    backward = re.search(r"^// op: +attention_backward$", source, re.MULTILINE)
    marks = marks or (BACKWARD if backward else CALLS if "start_scores(" in source else REGIONS)
    found = dict.fromkeys(marks, 0)
    lines, started, text = [], False, source.splitlines()
    for at, line in enumerate(text):
        for pattern, begins in marks.items():
            if re.search(pattern, line):
                found[pattern] += 1
                # What begins by waiting for a product begins behind that wait.
                code = next((x for x in text[at + 1 :] if not x.lstrip().startswith("//")), "")
                later = line.lstrip().startswith("//") and FIRST.match(code)
                say = f"doing = {KINDS.index(begins)}" if later else f"note({KINDS.index(begins)})"
                line = f"{{ {say}; }} {line}" if started else line
        if (wait := WAIT.match(line)) and started:
            blanks, statement, rest = wait.groups()
            kind = KINDS.index("product" if "wgmma_wait_group" in statement else "wait")
            before, behind = ("", "") if OPEN.search(statement) else ("const int was = doing; ", " note(was);")
            line = f"{blanks}{{ {before}note({kind}); {statement}{behind} }}{rest}"
        if "extern __shared__" in line and not started:
            note = NOTE % {"notes": NOTES, "sign": SIGN, "index": workspace_index(source)}
            line, started = line + note.replace("\n", ""), True
        lines.append(line)
    if not started:
        raise ValueError("the kernel has no line with extern __shared__, behind which its notes begin")
    if missing := [pattern for pattern, times in found.items() if times == 0]:
        raise ValueError(f"the marker {missing[0]!r} is nowhere to be found")
    declare(lines, f"notes ({WARPGROUPS},{2 * NOTES}) fp32")
    return "\n".join(lines) + "\n"


def times(kernel: Which, *inputs: Tensor, marks: Mapping[str, str] | None = None, **options: object) -> pd.DataFrame:
    """A row per warpgroup and phase of one CTA in the middle of the grid: lane ("producer", "consumer 0", ...), kind (of KINDS), begin and end, counted from the CTA's first note: SM clocks on a GPU, places in the order of
    events on the emulator. options go to the kernel's call. The first 1023 notes of a warpgroup are kept.
    """
    import torch

    run = load(source=instrument(rung(kernel).source, marks), device=inputs[0].device.type, quiet=True)
    if run.device == "cuda":
        run(*inputs, **options)  # the first call of a module is slow
    notes = run.tensors(*inputs, **options)["notes"].view(torch.int32).cpu().reshape(WARPGROUPS, NOTES, 2)
    return intervals(notes, ordered=inputs[0].device.type != "cuda")


def intervals(notes: Tensor, ordered: bool) -> pd.DataFrame:
    """The phases of `times` between the notes. notes: int32 (warpgroups, notes, 2) of kind and clock, the last is
    followed by a word without SIGN; ordered: places in the order of all notes instead of clocks."""
    import pandas as pd

    said = []
    for group, rows in enumerate(notes.tolist()):
        for kind, clock in rows:
            if kind & ~0xFF != SIGN:
                break
            said.append((group, KINDS[kind & 0xFF], clock & 0xFFFFFFFF))
    frame = pd.DataFrame(said, columns=["group", "kind", "begin"])
    if frame.empty:
        return pd.DataFrame(columns=["lane", "kind", "begin", "end"])
    frame["begin"] = since_first(frame["begin"], frame["begin"].iloc[0])
    if ordered:
        frame["begin"] = frame["begin"].rank(method="first").astype(int) - 1
    frame = frame[(frame["kind"] != frame["kind"].shift()) | (frame["group"] != frame["group"].shift())].copy()
    frame["end"] = frame.groupby("group")["begin"].shift(-1)
    kinds = frame.groupby("group")["kind"].agg(set)
    fetching = [g for g, does in kinds.items() if "copy" in does and not does & {"scores", "output", "products"}]
    others = [g for g in sorted(frame["group"].unique()) if g not in fetching]
    names = {g: "producer" for g in fetching} | {g: f"consumer {i}" for i, g in enumerate(others)}
    frame["lane"] = frame["group"].map(names)
    frame = frame[(frame["kind"] != "") & frame["end"].notna() & (frame["end"] > frame["begin"])]
    return frame[["lane", "kind", "begin", "end"]].astype({"end": int}).reset_index(drop=True)


def recording(stem: str, N: int = N, tokens: int = TOKENS, width: int = WIDTH, device: str = "cuda") -> pd.DataFrame:
    """`times` of a rung at the headline workload (B·N tokens, H·D wide), not causal, in bf16, for every D but those of NO_ROOM: a
    column D besides."""
    import pandas as pd

    from ..run.reference import random_inputs

    found = rung(stem)
    frames = []
    for D in (D for D in found.D if D not in NO_ROOM.get(stem, ())):
        inputs = random_inputs(found, (tokens // N, width // D, N, N, D), "bf16", device)
        frames.append(times(stem, *inputs).assign(D=D))
    return pd.concat(frames, ignore_index=True)[["D", "lane", "kind", "begin", "end"]]


def record_roles(which: str) -> None:
    """Records `recording` of a rung on this machine's GPU. RuntimeError without one."""
    from .. import record
    from .bench import require_gpu

    require_gpu()
    stem = rung(which).stem
    method = (
        "clock64 of the first thread of each warpgroup of the CTA in the middle of the grid, at every phase's beginning"
    )
    path = record.save(stem, "roles", recording(stem), extra={"method": method, "dtype": "bf16", "N": N})
    print(f"wrote {path.name}", flush=True)
