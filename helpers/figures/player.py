"""A player for the walk of one block over its tiles: a scrubber in a notebook, a strip of frames in print and on GitHub.

The widget is one HTML text that makes no request. Where a page runs no scripts (a notebook that isn't trusted yet, GitHub, print)
the strip stands in its place. Everything is drawn here; the script moves rectangles. What the script shows is in its data, because a page that drops scripts would keep other markup. Nothing moves by itself: `play` is the reader's, and goes a step at a time.
"""

from __future__ import annotations

import html
import json
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..emulator.steps import Rows, Step, Walk
from .style import BROWN, CARD, EXCESS, HEAT, INK, MUTED, SAND
from .svg import SANS
from .words import size

HIGH, WIDE, GAP = 200, 26, 12  # of a tensor's column, in SVG units
TOP, LEFT = 46, 14
HBM, SHARED = ("Q", "K", "V", "O"), ("Q", "K", "V")
SHARED_LEFT = LEFT + len(HBM) * (WIDE + GAP) + 26
SCORES_LEFT = SHARED_LEFT + len(SHARED) * (WIDE + GAP) + 48
WIDTH, HEIGHT = SCORES_LEFT + HIGH + 14, TOP + HIGH + 58
STRIP = 6  # frames in print
Box = tuple[float, float, float, float]  # x, y, width, height


class Player:
    """The walk of a block as a widget; `str` of it is a line for each step."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.boxes = scenes(walk)

    def __str__(self) -> str:
        return "\n".join([self.title, *(f"{said}" for said in map(self.words, self.walk.steps))])

    __repr__ = __str__

    @property
    def title(self) -> str:
        """What is shown: kernel, block, shape."""
        w = self.walk
        length = f"N = {w.Nq}" if w.Nq == w.Nk else f"Nq = {w.Nq}, Nk = {w.Nk}"
        return f"{w.kernel}, block {w.block}: {length}, D = {w.D}, {w.dtype}; counted by the emulator"

    def words(self, step: Step) -> str:
        """A step in words."""
        parts = [f"{does} {_rows(rows)}" for does, rows in _told(step) if rows]
        return f"Step {step.number + 1} of {len(self.walk.steps)}: {'; '.join(parts) or 'nothing is moved'}. HBM so far: {size(step.hbm)}."

    @property
    def in_words(self) -> str:
        """The strip's alternative text."""
        steps = self.walk.steps
        shown = "; ".join(self.words(steps[i]) for i in _chosen(len(steps))[:3])
        return f"{self.title}. {len(steps)} steps, {size(steps[-1].hbm)} moved by this block. {shown} And so on."

    def strip(self) -> str:
        """Some of the steps side by side, as SVG on a light card."""
        chosen = _chosen(len(self.walk.steps))
        columns = min(2, len(chosen))
        rows = -(-len(chosen) // columns)
        parts = [
            _rect((0, 0, columns * WIDTH, 78 + rows * HEIGHT), fill=CARD),
            _text(LEFT, 19, self.title, 15, weight=600),
        ]
        for place, number in enumerate(chosen):
            at = f"translate({place % columns * WIDTH} {28 + place // columns * HEIGHT})"
            parts.append(f'<g transform="{at}">{self._frame(number)}</g>')
        foot, wide = 28 + rows * HEIGHT, columns * WIDTH
        for n, (kind, said) in enumerate(KEYS.items()):
            x, y = LEFT + n % 3 * 180, foot + n // 3 * 22
            parts.append(_key(kind, x, y) + _text(x + 20, y + 12, said, 13))
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {foot + 50}" width="{wide}" height="{foot + 50}"'
        return f'{head} fill="{INK}" font-family="{SANS}">{PATTERNS}{"".join(parts)}</svg>'

    def _frame(self, number: int) -> str:
        step = self.walk.steps[number]
        foot = f"step {number + 1} of {len(self.walk.steps)} · HBM so far {size(step.hbm)}"
        past = [box for scene in self.boxes[:number] for box in [scene.get("pv")] if box]
        done = "".join(_rect(box, **DONE) for box in dict.fromkeys(past))
        moving = "".join(_rect(box, **LOOKS[name.split("-")[0]]) for name, box in self.boxes[number].items())
        return _ground(self.walk) + done + moving + _text(LEFT, TOP + HIGH + 22, foot, 14)

    def _repr_html_(self) -> str:
        name = f"tile-player-{uuid.uuid5(uuid.NAMESPACE_OID, str(self)).hex[:12]}"
        steps = self.walk.steps
        data = {
            "boxes": [{k: [round(v, 1) for v in box] for k, box in scene.items()} for scene in self.boxes],
            "done": DONE,
            "words": [self.words(step) for step in steps],
            "hbm": [round(step.hbm / max(1, steps[-1].hbm), 4) for step in steps],
        }
        names = dict.fromkeys(key for scene in self.boxes for key in scene)
        moving = "".join(_rect((0, 0, 0, 0), id=f"{name}-{key}", **LOOKS[key.split("-")[0]]) for key in names)
        past = f'<g id="{name}-past"></g>'
        bar = (LEFT, TOP + HIGH + 34, WIDTH - 2 * LEFT, 9)
        meter = _rect(bar, fill="none", stroke=MUTED) + _rect(
            (*bar[:2], 0, bar[3]), fill=HEAT["global"], id=f"{name}-meter"
        )
        meter += _text(LEFT, TOP + HIGH + 26, "HBM traffic of this block so far", 12)
        drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" style="max-width:100%;height:auto" fill="currentColor" '
        drawing += f'font-family="{SANS}" role="img" aria-labelledby="{name}-said">{PATTERNS}{_ground(self.walk)}{past}{moving}{meter}</svg>'
        image = f"data:image/svg+xml,{urllib.parse.quote(self.strip())}"
        strip = f'<img alt="{html.escape(self.in_words)}" src="{image}" style="max-width:100%">'
        keys = "".join(
            f'<span><svg width="14" height="14">{_key(kind, 0, 0)}</svg> {said}</span>' for kind, said in KEYS.items()
        )
        values = {"NAME": name, "LAST": str(len(steps) - 1), "TITLE": html.escape(self.title), "WIDTH": str(bar[2])}
        values |= {"DRAWING": drawing, "STRIP": strip, "KEYS": keys, "EXCESS": EXCESS}
        data["live"] = _filled(LIVE, values)
        text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("</", "<\\/")
        return _filled(TEMPLATE, values | {"DATA": text})


def _filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with every %NAME% replaced."""
    for key, value in values.items():
        text = text.replace(f"%{key}%", value)
    return text


def scenes(walk: Walk) -> list[dict[str, Box]]:
    """For each step the rectangles to show, by name: read-K, written-O, resident-K, used-K, scores (of S: being computed) and
    pv (being multiplied by V)."""
    lengths = {"Q": walk.Nq, "O": walk.Nq, "K": walk.Nk, "V": walk.Nk}
    found, queries = [], None
    for step in walk.steps:
        scene: dict[str, Box] = {}
        for kind, names, left in (
            ("read", HBM, LEFT),
            ("written", HBM, LEFT),
            ("resident", SHARED, SHARED_LEFT),
            ("used", SHARED, SHARED_LEFT),
        ):
            for n, tensor in enumerate(names):
                if rows := getattr(step, kind).get(tensor):
                    y, height = _span(rows, lengths[tensor], TOP)
                    x, width = left + n * (WIDE + GAP), WIDE
                    if tensor == "O":  # which may be read and written in one step: left and right halves
                        x, width = x + WIDE / 2 * (kind == "written"), WIDE / 2
                    scene[f"{kind}-{tensor}"] = (x, y, width, height)
        queries = step.used.get("Q", queries)  # rows that have been used go on to be, from registers
        for kind, tensor in (("scores", "K"), ("pv", "V")):
            if queries and (keys := step.used.get(tensor)):
                x, width = _span(keys, walk.Nk, SCORES_LEFT)
                y, height = _span(queries, walk.Nq, TOP)
                scene[kind] = (x, y, width, height)
        found.append(scene)
    return found


def _span(rows: Rows, N: int, start: float) -> tuple[float, float]:
    """Where rows begin in HIGH units from `start` on, and how long they are."""
    return start + HIGH * rows.first / N, HIGH * (rows.last - rows.first + 1) / N


def _told(step: Step) -> list[tuple[str, Mapping[str, Rows]]]:
    return [
        ("reads", step.read),
        ("writes", step.written),
        ("in shared memory", step.resident),
        ("uses there", step.used),
    ]


def _rows(found: Mapping[str, Rows]) -> str:
    return ", ".join(f"{name} {rows.first}–{rows.last}" for name, rows in found.items())


def _chosen(steps: int) -> list[int]:
    """The steps that the strip shows: the first, the last, and as many between them as fit."""
    if steps <= STRIP:
        return list(range(steps))
    return sorted({round(i * (steps - 1) / (STRIP - 1)) for i in range(STRIP)})


# SVG

LOOKS: dict[str, dict[str, Any]] = {
    "read": {"fill": HEAT["global"]},
    "written": {"fill": "url(#tile-player-written)", "stroke": BROWN},
    "resident": {"fill": HEAT["shared"], "opacity": 0.75},
    "used": {"fill": "none", "stroke": EXCESS, "stroke_width": 3},
    "scores": {"fill": "none", "stroke": EXCESS, "stroke_width": 3},
    "pv": {"fill": "url(#tile-player-pv)", "stroke": HEAT["shared"], "stroke_width": 1.5},
}
DONE = {"fill": HEAT["shared"], "opacity": 0.5}  # tiles of S that have met V
PATTERNS = (
    '<defs><pattern id="tile-player-written" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<rect width="6" height="6" fill="{SAND}"/><rect width="2" height="6" fill="{BROWN}"/></pattern>'
    '<pattern id="tile-player-pv" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">'
    f'<rect width="6" height="6" fill="{HEAT["shared"]}" opacity="0.25"/><rect width="2" height="6" fill="{HEAT["shared"]}"/></pattern></defs>'
)


def _rect(box: Sequence[float], **look: Any) -> str:
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    x, y, width, height = (f"{v:g}" for v in (round(v, 1) for v in box))
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{more}/>'


def _text(x: float, y: float, words: str, points: float, anchor: str = "start", weight: int = 400, **look: Any) -> str:
    more = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in look.items())
    return f'<text x="{x:g}" y="{y:g}" font-size="{points:g}" text-anchor="{anchor}" font-weight="{weight}"{more}>{html.escape(words)}</text>'


def _ground(walk: Walk) -> str:
    """What stays: the tensors' outlines with their names, and S."""
    parts = []
    for title, names, left in (("HBM", HBM, LEFT), ("shared memory", SHARED, SHARED_LEFT)):
        parts.append(_text(left, 16, title, 13, weight=600))
        for n, name in enumerate(names):
            x = left + n * (WIDE + GAP)
            parts.append(_text(x + WIDE / 2, TOP - 8, name, 13, "middle"))
            parts.append(_rect((x, TOP, WIDE, HIGH), fill="none", stroke=MUTED))
    parts.append(_text(SCORES_LEFT, 16, "scores S, never stored", 13, weight=600))
    parts.append(_text(SCORES_LEFT + HIGH / 2, TOP - 8, f"keys 0 … {walk.Nk - 1}", 12, "middle"))
    middle = (SCORES_LEFT - 10, TOP + HIGH / 2)
    turned = f"rotate(-90 {middle[0]:g} {middle[1]:g})"
    parts.append(_text(*middle, f"queries 0 … {walk.Nq - 1}", 12, "middle", transform=turned))
    parts.append(_rect((SCORES_LEFT, TOP, HIGH, HIGH), fill="none", stroke=MUTED))
    return "".join(parts)


KEYS = {
    "read": "read from HBM",
    "written": "written to HBM",
    "resident": "in shared memory",
    "used": "used in this step",
    "pv": "P times V",
    "done": "done",
}


def _key(kind: str, x: float, y: float) -> str:
    look = LOOKS.get(kind, DONE)
    inset = 1.5 if look.get("stroke_width") else 0
    return _rect((x + inset, y + inset, 14 - 2 * inset, 14 - 2 * inset), **look)


LIVE = """<style>
.tile-player [hidden] { display: none }
.tile-player button { font: inherit; padding: 2px 10px; margin-right: 4px; color: inherit; background: transparent;
  border: 1px solid currentColor; border-radius: 4px; cursor: pointer }
.tile-player button:focus-visible, .tile-player input:focus-visible { outline: 3px solid %EXCESS%; outline-offset: 2px }
.tile-player .keys span { white-space: nowrap; margin-right: 14px }
.tile-player .said { min-height: 3em; max-width: 720px }
@media print { .tile-player-live { display: none } .tile-player-strip[hidden] { display: block !important } }
</style>
<div class="tile-player-live">
<div><b>%TITLE%</b></div>
%DRAWING%
<div class="keys" style="font-size:13px">%KEYS%</div>
<div style="margin:6px 0">
<button type="button" data-go="-1" aria-label="one step back">◀</button><button type="button" data-go="play">play</button><button
 type="button" data-go="1" aria-label="one step on">▶</button>
<input type="range" min="0" max="%LAST%" value="0" step="1" aria-label="step" style="width:min(420px,60%);vertical-align:middle">
</div>
<div class="said" id="%NAME%-said" aria-live="polite"></div>
</div>"""
TEMPLATE = """<div id="%NAME%" class="tile-player">
<div class="tile-player-strip">%STRIP%</div>
<script type="application/json" class="tile-player-data">%DATA%</script>
<script>
(() => {
  // The walk may be shown twice; some pages run a script where it is not.
  const root = document.currentScript?.closest(".tile-player") ?? document.getElementById("%NAME%");
  if (!root || root.querySelector(".tile-player-live")) return;
  const data = JSON.parse(root.querySelector(".tile-player-data").textContent);
  root.insertAdjacentHTML("beforeend", data.live);
  root.querySelector(".tile-player-strip").hidden = true;
  const find = (part) => root.querySelector("#%NAME%-" + part);
  const range = root.querySelector("input"), past = find("past"), play = root.querySelector("[data-go=play]");
  const names = [...new Set(data.boxes.flatMap((scene) => Object.keys(scene)))];
  const place = (rect, [x, y, width, height]) => Object.entries({ x, y, width, height }).forEach(([k, v]) => rect.setAttribute(k, v));
  const show = (step) => {
    range.value = step;
    for (const name of names) {
      const box = data.boxes[step][name];
      if (box) place(find(name), box);
      find(name).style.visibility = box ? "visible" : "hidden";
    }
    past.replaceChildren();
    const seen = new Set();
    for (const { pv } of data.boxes.slice(0, step)) {
      if (!pv || seen.has(String(pv))) continue;
      seen.add(String(pv));
      const rect = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      place(rect, pv);
      Object.entries(data.done).forEach(([k, v]) => rect.setAttribute(k, v));
      past.append(rect);
    }
    find("meter").setAttribute("width", data.hbm[step] * %WIDTH%);
    find("said").textContent = data.words[step];
    range.setAttribute("aria-valuetext", data.words[step]);
  };
  let timer = null;
  const stop = () => { clearInterval(timer); timer = null; play.textContent = "play"; };
  const go = (by) => show(Math.max(0, Math.min(%LAST%, Number(range.value) + by)));
  root.addEventListener("keydown", (event) => event.stopPropagation()); // JupyterLab would take arrows for its own
  range.addEventListener("input", () => { stop(); show(Number(range.value)); });
  root.addEventListener("click", (event) => {
    const what = event.target.dataset && event.target.dataset.go;
    if (!what) return;
    if (what !== "play") return stop(), go(Number(what));
    if (timer) return stop();
    if (Number(range.value) === %LAST%) show(0);
    play.textContent = "stop";
    timer = setInterval(() => (root.isConnected && Number(range.value) < %LAST% ? go(1) : stop()), 900);
  });
  show(0);
})();
</script>
</div>"""
