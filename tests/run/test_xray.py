"""The X-ray as a reader meets it: tables, sentences, pictures and refusals, on traces made by hand and on real ones."""

import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from emulated import processor_seconds
from matplotlib.colors import to_rgb

from helpers import Kernel, banks, check, load, plot, traffic
from helpers.emulator import Launcher
from helpers.emulator.launcher import OPS, _quoting
from helpers.emulator.trace import Access, Finding, Request, Trace
from helpers.figures import access_maps, style
from helpers.figures.words import words
from helpers.ladder import rung as ladder
from helpers.ladder.contract import TORCH_NAMES
from helpers.run.reference import random_inputs
from helpers.run.xray import Xray, xray

SOURCE = """// mine: a kernel
// workspace: m (B,H,Nq) fp32
#include <fa/args.cuh>
// [region: outer]
float x = Q[threadIdx.x * 64];
// [region: inner]
K_smem[threadIdx.x * 8] = x; // half & <half>
float y = K_smem[threadIdx.x];
// [end: inner]
O[threadIdx.x] = y;
// [end: outer]
"""
COLUMN, ROW = tuple(256 * i for i in range(32)), tuple(4 * i for i in range(32))


def access(line, op, space, target, addresses, cost, ideal, requests=10, width=4, kernel="mine"):
    request = Request(kernel, 0, 0, tuple(addresses), width, cost, ideal)
    lanes = sum(a is not None for a in addresses)
    sums = (requests, requests * lanes * width, requests * cost, requests * ideal)
    return Access(kernel, "mine.cu", line, op, space, target, width, *sums, cost, request)


READ = access(5, "load", "global", "Q", COLUMN, 32, 4)
STORED = access(7, "store", "shared", "K_smem", [32 * i for i in range(32)], 8, 1)
LOADED = access(8, "load", "shared", "K_smem", ROW, 1, 1, requests=20)
WRITTEN = access(10, "store", "global", "O", ROW, 4, 4)
RACE = Finding("race", "thread 3 reads K_smem[12] that thread 40 writes", "mine.cu", 8, "a barrier", 64, 7, False)
STOP = Finding("out of bounds", "thread 9 reads Q[4096]", "mine.cu", 5, "check the index", 1, None, True)
TENSORS = {"Q": (2048, 0, 1024), "O": (0, 1024, 1024), "m": (512, 512, 256)}


def made(*accesses, findings=(), source=SOURCE, tensors=TENSORS, workload="B=1 H=1 N=8 D=32 fp32"):
    rung = ladder.parse(source, ladder.Path("mine.cu"))
    trace = Trace(tuple(accesses or (LOADED, WRITTEN, READ, STORED)), tuple(findings), tensors, {"bar.sync": 3}, 0.01)
    return Xray(rung, workload, trace)


# One request over the banks


def lanes_of(served):
    return [sorted({lane for lanes in wavefront.values() for lane in lanes}) for wavefront in served]


@pytest.mark.parametrize(
    ("addresses", "width", "op", "expected"),
    [
        (ROW, 4, "load", 1),
        ([0] * 32, 4, "load", 1),  # broadcast
        (COLUMN, 4, "load", 32),
        ([8 * i for i in range(32)], 4, "load", 2),
        ([4 * 33 * i for i in range(32)], 4, "load", 1),  # padded rows
        ([2 * i for i in range(32)], 2, "store", 1),
        ([8 * i for i in range(32)], 8, "load", 2),
        ([8 * (i // 2) for i in range(32)], 8, "load", 1),  # pairs share
        ([8 * (i // 2) for i in range(32)], 8, "store", 2),
        ([16 * i for i in range(32)], 16, "load", 4),
        ([16 * (i // 4 * 2 + i % 2) for i in range(32)], 16, "load", 2),  # pairs at distance 2 share
        ([16 * (i // 2 if i < 16 else i) for i in range(32)], 16, "load", 3),  # one half of the warp does
        ([16 * (i // 2) if i < 8 else None for i in range(32)], 16, "load", 1),
        ([0] * 32, 4, "atomic", 32),
        ([4 * (i // 2) for i in range(32)], 4, "atomic", 2),
        ([16 * i for i in range(32)], 16, "ldmatrix", 4),
        ([128 * i for i in range(32)], 16, "ldmatrix", 32),
        ([128 * i if i < 8 else None for i in range(32)], 16, "ldmatrix", 8),
        ([128 * i + 16 * (i % 8) for i in range(32)], 16, "ldmatrix", 4),  # a swizzle's diagonal
        ([None] * 31 + [4], 4, "load", 1),
        ([None] * 32, 4, "load", 0),
    ],
)
def test_wavefronts_of_one_request(addresses, width, op, expected):
    served = banks.wavefronts(addresses, width, op)
    assert len(served) == expected
    asked = [i for i, a in enumerate(addresses) if a is not None]
    assert (
        sorted(lane for lanes in lanes_of(served) for lane in lanes) == asked
    )  # each lane is served, in one wavefront
    for wavefront in served:
        for bank, lanes in wavefront.items():
            assert len({addresses[lane] // 4 - addresses[lane] // 4 % max(1, width // 4) for lane in lanes}) == 1
            assert all((bank - addresses[lane] // 4) % 32 < max(1, width // 4) for lane in lanes)


@pytest.mark.parametrize(
    ("lanes", "text"), [([3], "3"), ([0, 1, 2, 3], "0–3"), ([0, 8, 16], "0, 8, 16"), ([1, 0, 4, 5, 6], "0, 1, 4–6")]
)
def test_lanes_in_words(lanes, text):
    assert banks.runs(lanes) == text


# Numbers


def test_the_frame_has_a_row_per_access_the_most_wasteful_first():
    frame = made().to_frame()
    assert list(frame.line) == [5, 7, 10, 8]
    assert list(frame.excess) == [280, 70, 0, 0]
    first = frame.iloc[0]
    assert (first.cost, first.ideal, first.worst, first.ways, first["mean"]) == (320, 40, 32, 8, 32)
    assert (first.region, first.code, first.unit) == ("outer", "float x = Q[threadIdx.x * 64];", "sectors")
    assert frame.iloc[1].region == "inner"  # the innermost one


def test_an_empty_trace_has_an_empty_frame_and_words():
    ray = Xray(made().rung, "nothing", Trace((), (), {}, {}, 0.0))
    assert ray.to_frame().empty and ray.conflicts == 0 and ray.tensors.empty
    assert "nothing" in str(ray) and ray._repr_html_()
    assert "x = Q" in str(ray.source())
    with pytest.raises(ValueError, match="there is no request of shared memory; lines with one: none"):
        ray.bank_map()
    assert ray.diff(ray).empty


def test_totals_choose_by_every_name():
    ray = made()
    assert ray.conflicts == ray.total(space="shared").excess == 70
    assert ray.total(space="shared", op="load").cost == 20
    assert ray.total(target="O").bytes == ray.total(line=10).bytes == ray.total(line="O[threadIdx.x]").bytes == 1280
    assert ray.total(space="shared", region="outer").requests == 30 and ray.total(region="inner").requests == 30
    assert ray.total(op="ldmatrix") == ray.total(target="V")
    assert ray.total(op="ldmatrix").cost == 0


@pytest.mark.parametrize(
    ("wanted", "complaint"),
    [
        ({"space": "local"}, "space 'local': there are shared, global"),
        ({"op": "ldsm"}, "op 'ldsm': there are load, store, ldmatrix, stmatrix, cp.async, atomic"),
        ({"region": "softmax"}, "region 'softmax': there are outer, inner"),
        ({"line": 99}, "mine.cu has 11 lines; there is no line 99"),
        ({"line": "K_smem"}, "'K_smem' stands on lines 7, 8 of mine.cu; it has to stand on one"),
        ({"line": "V_smem"}, "'V_smem' stands on no line of mine.cu"),
        ({"line": 1.5}, "a line is a number or a piece of its text; this is a float"),
    ],
)
def test_a_name_that_is_none_is_refused(wanted, complaint):
    with pytest.raises(ValueError, match=complaint):
        made().total(**wanted)


def test_totals_take_every_operation_of_the_emulator():
    assert all(made().total(op=op).requests == 0 for op in OPS if op not in ("load", "store"))
    copied = access(7, "cp.async.bulk.tensor", "shared", "K_smem", [0] + [None] * 31, 0, 0)
    assert made(copied).total(op="cp.async.bulk.tensor").requests == 10


def test_lines_are_numbered_as_compilers_number_them():
    source = SOURCE.replace("// [region: outer]", "// a form feed \f, others \v \x85 \u2028 and a return\r")
    ray = made(source=source)
    assert (
        len(ray.file.text) == 11 and ray.code(5) == "float x = Q[threadIdx.x * 64];" and not ray.code(4).endswith("\r")
    )
    said = "mine.cu:5:1: error: no"
    assert _quoting(said, ladder.Path("mine.cu"), source) == f"{said}\n    5 | float x = Q[threadIdx.x * 64];"


class OnAGpu(SimpleNamespace):
    """Stands for a tensor of a GPU; `here` is its copy."""

    def detach(self):
        return self

    def cpu(self):
        return self.here.clone()


def test_tensors_among_the_options_are_copied_to_the_cpu_as_the_inputs_are(monkeypatch):
    class Seen(Exception):
        """Carries what `prepare` was given."""

    def prepare(rung, device, inputs, **options):
        raise Seen(inputs, options)

    monkeypatch.setattr("helpers.run.xray.prepare", prepare)
    q, rows = OnAGpu(here=torch.zeros(1, 2, 4, 64)), OnAGpu(here=torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(Seen) as seen:
        xray("20", q, q, q, cu_seqlens=(rows, rows), lengths=rows, out=(q, None), causal=True)
    inputs, options = seen.value.args
    assert all(t is inputs[0] for t in (*inputs, options["out"][0])) and inputs[0].shape == (1, 2, 4, 64)
    assert type(options["cu_seqlens"]) is tuple and options["cu_seqlens"][1] is options["lengths"]
    assert options["lengths"].tolist() == [0, 4] and options["out"][1] is None and options["causal"] is True


def test_tensors_beside_the_least_possible():
    table = made().tensors
    assert dict(table.reads_per_byte) == {"Q": 2, "O": 0, "m": 2}  # what is written is not read
    assert dict(table.minimum_bytes) == {"Q": 1024, "O": 1024, "m": 0}  # a workspace need not be


def test_two_kernels_are_told_apart():
    ray = made(replace(WRITTEN, kernel="second"), READ)
    assert ray.kernels == ("mine", "second") and "2 kernels" in str(ray)
    assert ray.total(kernel="second").cost == 40


def test_a_difference_is_by_region_and_target():
    before = made()
    fixed = replace(STORED, cost=10, worst=1, worst_request=replace(STORED.worst_request, cost=1))
    after = made(LOADED, WRITTEN, READ, replace(fixed, line=8))
    table = before.diff(after)
    assert table.index.names == ["region", "target", "op", "space"]
    first = table.loc[("inner", "K_smem", "store", "shared")]
    assert dict(first) == {"cost_before": 80, "cost_after": 10, "excess_before": 70, "excess_after": 0}
    assert (table.excess_before - table.excess_after).astype(bool).sum() == 1
    gone = before.diff(made(READ))
    assert gone.loc[("outer", "O", "store", "global"), "cost_after"] == 0


@pytest.mark.parametrize(("cost", "order"), [(2000, ["Q", "K_smem"]), (321, ["K_smem", "Q"])])
def test_the_largest_difference_comes_first_for_the_better_or_the_worse(cost, order):
    fixed, worse = replace(STORED, cost=10), replace(READ, cost=cost)
    table = made(STORED, READ).diff(made(fixed, worse))
    assert list(table.index.get_level_values("target")) == order


def test_a_difference_is_shown_whole_in_a_narrow_terminal():
    with pd.option_context("display.width", 80, "display.max_columns", 0, "display.max_rows", 2):
        table = made().diff(made(READ))
        for text in (repr(table), str(table.query("cost_before != cost_after"))):
            assert "..." not in text and all(name in text for name in [*table.columns, "K_smem", "global"])


def test_a_difference_wants_the_same_inputs():
    with pytest.raises(ValueError, match="take the same inputs"):
        made().diff(made(workload="B=1 H=1 N=16 D=32 fp32"))
    with pytest.raises(ValueError, match="another Xray; this is a dict"):
        made().diff({})


# Words


def test_text_has_summary_findings_and_the_costliest_lines():
    lines = str(made(findings=[RACE, STOP])).splitlines()
    assert lines[0].startswith("X-ray of mine · B=1 H=1 N=8 D=32 fp32")
    text = "\n".join(lines)
    assert "100 wavefronts for 30 requests: 70 bank conflicts (70%)" in text
    assert "360 sectors for 20 requests: 280 more than the bytes need (78%)" in text
    assert "Q 2 KiB  O 1 KiB" in text and "Q 2 KiB (×2)  O 1 KiB (×1)  m 1 KiB " in str(made())
    assert text.index("✗ out of bounds, line 5: thread 9 reads Q[4096]") < text.index("✗ race, line 8 (64 times)")
    assert "    8 | float y = K_smem[threadIdx.x];\n      7 | K_smem[" in text and "hint: a barrier" in text
    assert "was stopped" in text and "no findings" not in text
    assert text.index("costliest lines, shared memory") < text.index("costliest lines, global memory")
    assert max(len(line) for line in lines) <= 120


def test_a_finding_is_a_sentence():
    assert str(RACE) == "race at mine.cu:8: thread 3 reads K_smem[12] that thread 40 writes\n  hint: a barrier"
    assert str(replace(STOP, line=0, hint="")) == "out of bounds: thread 9 reads Q[4096]"


def test_a_finding_in_a_header_is_shown_without_a_line_of_the_kernel():
    text = str(made(findings=[replace(RACE, file="fa/tile.cuh")]))
    assert "race, fa/tile.cuh:8 (64 times)" in text and "    8 | float y" not in text


def test_what_stands_in_another_file_is_not_on_a_line_of_the_kernels():
    elsewhere = replace(STORED, file="/home/me/mine.cuh", line=5)
    here = replace(RACE, text="thread 3 reads K_smem[12], which thread 40 writes on /home/me/mine.cuh:7, and", line=8)
    there = replace(
        RACE, file="/home/me/mine.cuh", text="thread 3 reads, which thread 40 writes on mine.cu:10, and", other_line=10
    )
    ray = made(elsewhere, LOADED, findings=[here, there])
    assert str(ray.line(5)).endswith("touches no memory") and ray.total(line=5) == ray.total(region="outer", op="store")
    assert ray.total(line=5).requests == 0 and ray.total(op="store").requests == 10
    (row,) = ray.to_frame().query("line == 5").itertuples()
    assert (row.region, row.code) == ("", "mine.cuh:5") and row.excess == 70
    assert ("", "K_smem", "store", "shared") in ray.diff(ray).index
    for text in (str(ray), ray._repr_html_()):
        assert "mine.cuh:5" in text and "float x = Q" not in text
    assert "mine.cuh:5, 8: counted as written" in str(ray)
    listing = ray.source()
    assert set(listing.costs) == {8} and listing.most["shared"] == 20 and set(listing.marked) == {8, 10}
    assert [[n for n in (7, 8, 10) if f"{n:>7} | " in ray.report(f)] for f in (here, there)] == [[8], [10]]
    assert ray.bank_map().get_suptitle().startswith("line mine.cuh:5: store")
    with pytest.raises(ValueError, match="no request of shared memory on line 5; lines with one: 8"):
        ray.bank_map(5)


def test_the_most_frequent_instructions_are_named():
    ray = made()
    counted = Xray(ray.rung, "", replace(ray.trace, instructions={f"op{n}": n for n in range(1, 9)}))
    assert "warp instructions  op8 8  op7 7  op6 6  op5 5  op4 4  op3 3\n" in str(counted)


def test_a_kernel_without_fault_says_so():
    assert made().ok and "no findings" in str(made())
    assert not made(findings=[RACE]).ok and not made(findings=[RACE]).stopped and made(findings=[STOP]).stopped


def test_only_the_first_findings_are_written_out():
    text = str(made(findings=[replace(RACE, line=n) for n in (5, 7, 8, 10) * 2] + [STOP]))
    assert text.count("✗") == 6 and "… and 3 more in `findings`" in text and "✗ out of bounds" in text


def test_one_line_in_words():
    ray = made()
    assert str(ray.line(7)) == (
        "mine.cu:7 | K_smem[threadIdx.x * 8] = x; // half & <half>\n"
        "  store of 4 bytes per lane to K_smem: 10 requests, 80 wavefronts where 10 would do; the worst takes 8 instead of "
        "1: lanes 0, 4, 8, 12, 16, 20, 24, 28 want different words of bank 0"
    )
    assert "32 lanes ask for 128 bytes in 32 lines of 128" in str(ray.line("float x"))
    assert str(ray.line(8)).endswith("20 requests, 20 wavefronts, as few as can be")
    assert str(ray.line(1)).endswith("touches no memory")


def test_a_wide_conflict_names_its_quarter_of_the_warp():
    rows = access(8, "ldmatrix", "shared", "K_smem", [128 * i for i in range(32)], 32, 4, width=16)
    assert words(rows).endswith("the worst takes 32 instead of 4: lanes 0–7 want different words of banks 0–3")


def test_html_is_escaped_whole_and_without_style_sheets():
    page = made(findings=[RACE])._repr_html_()
    assert "half &amp; &lt;half&gt;" in page and "<half>" not in page
    assert "✗ race" in page and "class=" not in page and "<style" not in page
    assert page.count("<tr>") == 4 + 2  # each access, two heads
    many = made(*(replace(LOADED, line=n % 10 + 1, width=w) for n in range(5) for w in (4, 8)))
    assert "2 more lines</summary>" in many._repr_html_()


def cells(page, tag="td"):
    """The rows of a page's tables: style and text of each cell."""
    rows = re.findall(r"<tr>(.*?)</tr>", page)
    return [found for row in rows if (found := re.findall(rf'<{tag} style="([^"]*)"[^>]*>(.*?)</{tag}>', row))]


def test_a_narrow_page_takes_from_the_code_and_not_from_the_counts():
    page = made()._repr_html_()
    for head in cells(page, "th"):
        assert [text for _, text in head][1:4] in (
            ["wavefronts", "ideal", "beyond ideal"],
            ["sectors", "ideal", "beyond ideal"],
        )
        assert head[-1][1] == "code"
    for row in cells(page):
        assert all("white-space:nowrap" in style and "max-width" not in style for style, _ in row[:-1])
        assert "max-width:0" in row[-1][0] and "text-overflow:ellipsis" in row[-1][0]
    stored = next(row for row in cells(page) if row[0][1] == "7")
    assert [text for _, text in stored[:6]] == ["7", "80", "10", "70", "10", "8 for 1"]
    assert stored[6][1] == "store K_smem" and stored[8][1].startswith("K_smem[threadIdx.x * 8] = x;")


class Page(HTMLParser):
    """What a page is made of: tags, addresses that it names, and whether every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.addresses, self.pictures = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.open += [tag] if tag not in ("meta", "img") else []
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        self.pictures += [dict(attrs)] if tag == "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_of_its_own_needs_nothing_else(tmp_path):
    path = made(findings=[RACE]).to_html(tmp_path / "ray.html")
    assert path == tmp_path / "ray.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open and text.startswith("<!DOCTYPE html>") and '<meta charset="utf-8">' in text
    assert page.addresses and all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert not {"script", "link", "iframe", "base"} & set(page.tags) and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and "color-scheme: light dark" in text
    assert page.tags.count("table") == 2 and "✗ race" in text and "mine.cu · lines 1–11" in text
    said = [picture["alt"] for picture in page.pictures]
    assert [words.split(",")[0].split(":")[0] for words in said] == [
        "mine",
        "line 7",
        "line 5",
    ]  # bytes, banks, sectors


def test_a_page_of_a_kernel_that_does_nothing(tmp_path):
    ray = Xray(made().rung, "nothing", Trace((), (), {}, {}, 0.0))
    page = Page(ray.to_html(str(tmp_path / "none.html")).read_text(encoding="utf-8"))
    assert not page.pictures and "table" not in page.tags


def test_a_page_reads_in_either_theme():
    assert contrast(style.INK, style.CARD) > 7 and contrast(style.DARK_INK, style.DARK_PAGE) > 7
    assert contrast(style.MUTED, style.CARD) > 4.5


def test_what_cannot_be_known_is_said_where_it_matters():
    notes = "\n".join(made().notes)
    assert "note: lines 7, 8: counted" in str(made()) and "note: lines 7, 8" in made()._repr_html_()
    assert "lines 7, 8: counted as written, 4 bytes per lane; nvcc may fuse a thread's neighbouring" in notes
    assert "never reaches HBM" in notes  # Q is read twice
    wide = access(8, "ldmatrix", "shared", "K_smem", [16 * i for i in range(32)], 4, 4, width=16)
    assert made(wide, tensors={"Q": (1024, 0, 1024)}).notes == ()
    (note,) = made(replace(WRITTEN, target="cudaMalloc"), tensors={"Q": (1024, 0, 1024)}).notes
    assert "cudaMalloc is held against its bounds only" in note
    ray = made(wide, tensors={})
    (note,) = Xray(ray.rung, "", replace(ray.trace, instructions={"wgmma.mma_async": 1})).notes
    assert "in what portions wgmma goes there is not known" in note


# Pictures


def test_the_source_has_its_costs_beside_it():
    listing = made(findings=[RACE]).source()
    text = str(listing).splitlines()
    by_number = {int(row.split()[0]): row for row in text if row[:5].strip().isdigit()}
    assert set(by_number) == {1, 2, 3, 5, 7, 8, 10}  # markers left out
    assert by_number[7].split()[1:3] == ["80", "█░░░░░░░"]
    assert by_number[5].split()[1:3] == ["320", "█░░░░░░░"]
    assert by_number[8].split()[1:4] == ["20", "██", "✗"] and "✗" not in by_number[10]
    page = listing._repr_html_()
    assert "half &amp; &lt;half&gt;" in page and "<style" not in page and "class=" not in page
    assert [n for n, _ in made().source("inner").lines] == [7, 8]
    with pytest.raises(ValueError, match="region 'tile': there are outer, inner"):
        made().source("tile")


def test_half_edited_markers_take_no_table_away():
    ray = made(source=SOURCE.replace("// [end: inner]\n", ""))
    assert ray.to_frame().region.eq("").all() and ray.source().lines


def shown(figure):
    figure.draw_without_rendering()
    return [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")) if t.get_text()]


def test_the_bank_map_puts_each_lane_into_its_bank():
    figure = made().bank_map(7)
    assert figure.get_suptitle().startswith("line 7: store of 4 bytes per lane, K_smem: 8 wavefronts where 1 would do")
    assert {str(n) for n in range(32)} <= set(shown(figure)) and sum("conflict" in t for t in shown(figure)) == 7
    rows = str(figure).splitlines()
    assert rows[2].split() == ["1", "0", *"·" * 7, "1", *"·" * 7, "2", *"·" * 7, "3", *"·" * 7]
    assert sum(row.endswith("conflict") for row in rows) == 7
    assert figure._repr_png_()[0][:4] == b"\x89PNG"
    assert made().bank_map().get_suptitle() == figure.get_suptitle()  # the worst of all
    assert "as few as can be" in made().bank_map(8).get_suptitle()


def test_the_worst_of_a_kernel_is_by_all_requests_and_of_a_line_by_one():
    rare = access(8, "load", "shared", "K_smem", COLUMN, 32, 1, requests=1)
    assert made(STORED, rare).worst("shared").line == 7  # 70 conflicts in ten requests; 31 in the other's one
    often = access(8, "load", "shared", "K_smem", ROW, 40, 20, width=16)
    assert made(rare, often).worst("shared", 8).width == 4


def test_what_a_copys_sources_cost_is_no_bank_conflict():
    copied = access(7, "cp.async", "shared", "K_smem", ROW, 4, 1)  # 32 banks, from eight
    figure = made(copied).bank_map()
    said = "2 to 4: not for these banks; lanes take turns whose sources lie in the same banks"
    assert any(said in text for text in shown(figure)) and said in str(figure)
    assert not any(text.endswith(" conflict") for text in [*shown(figure), *str(figure).splitlines()])
    both = made(access(7, "cp.async", "shared", "K_smem", [8 * i for i in range(32)], 3, 1)).bank_map()
    assert sum(text == "2 conflict" for text in shown(both)) == 1 and "3: not for these banks" in str(both)


def test_the_bank_map_of_a_line_that_has_none_names_those_that_have():
    with pytest.raises(ValueError, match="no request of shared memory on line 5; lines with one: 7, 8"):
        made().bank_map(5)
    with pytest.raises(ValueError, match="there is no ldmatrix of shared memory; lines with one: none"):
        made().bank_map(op="ldmatrix")
    with pytest.raises(ValueError, match="there is no request of V on line 5; lines with one: none"):
        made().address_map(5, target="V")


def test_no_map_is_drawn_of_what_tma_moves(tmp_path):
    box = [0] + [None] * 31
    copied = access(7, "cp.async.bulk.tensor", "shared", "K_smem", box, 0, 0, requests=2, width=2)
    read = access(5, "cp.async.bulk.tensor", "global", "Q", box, 512, 512, requests=2, width=2)
    ray = made(copied, read, LOADED, WRITTEN)
    assert ray.bank_map().get_suptitle().startswith("line 8") and ray.address_map().get_suptitle().startswith("line 10")
    with pytest.raises(ValueError, match="no request of K_smem on line 7 by a warp, only by TMA; lines with one: 8"):
        ray.bank_map(7, target="K_smem")
    alone = made(copied, read)
    with pytest.raises(ValueError, match="no request of global memory by a warp, only by TMA; lines with one: none"):
        alone.address_map()
    pictures = Page(alone.to_html(tmp_path / "alone.html").read_text(encoding="utf-8")).pictures
    assert [picture["alt"].split(",")[0] for picture in pictures] == ["mine"]  # the bytes by tensor


def test_the_address_map_counts_what_was_moved_for_nothing():
    figure = made().address_map(5)
    assert "128 bytes asked for, in 32 sectors (1024 bytes); 4 would do" in figure.get_suptitle()
    assert str(made(READ, replace(READ, target="K", cost=10, worst=1)).address_map(5, target="K")).startswith(
        "line 5: load of 4 bytes per lane, K"
    )
    assert "… and 16 more lines" in shown(figure) and str(figure).count("~") == 16 * 7 + 1
    coalesced = made().address_map(10)
    assert "128 bytes asked for, in 4 sectors (128 bytes), as few as can be" in coalesced.get_suptitle()
    assert str(coalesced).splitlines()[2].split()[:4] == ["0", "|", "0", "1"]


def test_traffic_stands_beside_the_minimum():
    figure = made().traffic()
    assert {"× 2", "× 1", "none needed", "2 KiB"} <= set(shown(figure))
    assert "Q            2 KiB       0 B     1 KiB   × 2" in str(figure)


# Real kernels


def qkv(N=64, D=32, dtype="fp32", H=1):
    torch.manual_seed(0)
    return [torch.randn(1, H, N, D, dtype=getattr(torch, TORCH_NAMES[dtype])) for _ in range(3)]


def inputs_of(rung):
    return random_inputs(rung, (1, 1, 3, 100, 1) if rung.op == "softmax" else (1, 1, 64, 64, min(rung.D or (32,))))


@pytest.mark.sampled
@pytest.mark.parametrize("rung", ladder.rungs(), ids=lambda rung: rung.stem)
def test_every_rung_shows_itself(rung):
    ray = xray(rung.stem, *inputs_of(rung))
    assert ray.ok, str(ray)
    assert ray.total(space="global").cost > 0 and ray.workload in str(ray)
    for a in ray.accesses:
        assert ray.code(a.line).strip(), "each cost has a line of the file"
        r = a.worst_request
        if "async.bulk" in a.op:  # the copy engine: one address for a box, and its banks are not modelled
            assert r.cost >= r.ideal and (r.cost > 0) == (a.space == "global")
        elif a.space == "shared":  # the rule in banks.py is the emulator's
            by_banks = len(banks.wavefronts(r.addresses, r.width, a.op))
            # cp.async takes more where sources share banks (test_trace_counts works that rule out)
            assert by_banks <= r.cost == a.worst if a.op == "cp.async" else by_banks == r.cost == a.worst
            assert len(banks.parts(r.addresses, r.width, a.op)) >= r.ideal
        else:
            assert len(banks.sectors(r.addresses, r.width)) in (r.cost, r.cost - 1)  # a tensor may start off a sector
        assert words(a) and len(words(a)) < 400
    assert str(ray.source()) and ray._repr_html_() and shown(ray.traffic())
    if ray.of_warps("shared"):
        assert shown(ray.bank_map())
    assert shown(ray.address_map())


def test_bytes_are_those_that_traffic_counts():
    kernel = load("03_fa1_fp32", device="cpu", quiet=True)
    inputs = qkv()
    counted = traffic(kernel, *inputs)
    assert counted.equals(xray(kernel, *inputs).tensors[counted.columns])


def test_the_workload_names_queries_and_keys_where_they_differ():
    (q, *_), (_, k, v) = qkv(N=3), qkv(N=5)
    assert xray("03_fa1_fp32", q, k, v).workload == "B=1 H=1 Nq=3 Nk=5 D=32 fp32"
    assert xray("03_fa1_fp32", q, k[:, :, :3], v[:, :, :3]).workload == "B=1 H=1 N=3 D=32 fp32"


def test_traffic_takes_the_options_of_a_call():
    inputs = random_inputs(ladder.rung("20"), (1, 1, 256, 256, 64))
    whole, masked = (traffic("20", *inputs, **options).loc["K", "bytes_read"] for options in ({}, {"causal": True}))
    assert 0 < masked < whole


def test_a_tensor_without_elements_is_read_zero_times_per_byte():
    kernel = load("23_backward_mma", device="cpu", quiet=True)
    inputs = random_inputs(kernel.rung, (1, 1, 16, 16, 64))
    frame = traffic(kernel, *inputs)
    assert (frame["size_bytes"] == 0).any() and not frame.loc[frame["size_bytes"] == 0, "reads_per_byte"].any()


def test_a_stem_a_path_a_rung_and_a_kernel_of_either_back_end_are_the_same():
    rung = ladder.rung("03_fa1_fp32")
    on_gpu = Kernel(rung, "cuda")
    rays = [xray(which, *qkv()) for which in (rung.stem, str(rung.path), rung.path, rung, on_gpu)]
    assert len({tuple(map(tuple, ray.to_frame().itertuples(index=False))) for ray in rays}) == 1


def test_spills_that_nvcc_has_told_of_are_noted():
    resources = pd.DataFrame({"registers": [255, 40], "spill_store_bytes": [16, 4], "spill_load_bytes": [8, 24]})
    kernel = Kernel(ladder.rung("03_fa1_fp32"), "cuda")
    kernel.launcher = SimpleNamespace(backend="nvcc", resources=resources)
    ray = xray(kernel, *qkv())
    assert "nvcc spills registers, 40 bytes per thread" in str(ray)
    assert "spills" not in str(xray("03_fa1_fp32", *qkv()))


@pytest.mark.parametrize(
    ("which", "inputs", "complaint"),
    [
        ("03_fa1_fp32", [], "03_fa1_fp32 takes q, k, v; got 0"),
        ("03_fa1_fp32", [[1.0]] * 3, "q is a list; 03_fa1_fp32 takes torch tensors"),
        ("03_fa1_fp32", qkv(D=48), "head dimension 48: 03_fa1_fp32 takes D in 32, 64, 128"),
        ("03_fa1_fp32", qkv(dtype="fp16"), "q is torch.float16; 03_fa1_fp32 takes float32"),
        ("03_fa9", qkv(), "no kernel '03_fa9'; did you mean .*03_fa1_fp32"),
        (check, qkv(), "a kernel is a stem, the path or the text of a .cu, a Rung or a Kernel; got function"),
    ],
)
def test_what_a_kernel_refuses_the_x_ray_refuses(which, inputs, complaint):
    with pytest.raises(ValueError, match=complaint):
        xray(which, *inputs)


def test_inputs_that_ask_for_a_gradient_are_taken():
    q, k, v = qkv()
    assert xray("03_fa1_fp32", q.requires_grad_(), k, v).ok


def test_a_large_input_is_warned_of_and_run(monkeypatch):
    runs = []
    empty = Trace((), (), {}, {}, 0.0)
    monkeypatch.setattr(Launcher, "trace", lambda *_: runs.append(1) or empty, raising=False)
    with pytest.warns(UserWarning, match=r"N=4096.* 256 times the work of B=1 H=2 N=256.*order of 77 s; Ctrl-C"):
        xray("03_fa1_fp32", *qkv(N=4096, D=64, H=2))
    with pytest.warns(UserWarning, match=r"N=16384.* 4,096 times .*order of 20 minutes; Ctrl-C"):
        xray("03_fa1_fp32", *qkv(N=16384, D=64, H=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        xray("03_fa1_fp32", *qkv(N=256, D=64, H=2))
        xray("02_online_softmax", torch.randn(4, 4096))
    assert len(runs) == 4


@pytest.mark.parametrize("rung", ladder.rungs(), ids=lambda rung: rung.stem)
def test_every_rung_is_clean_and_traced_in_seconds(rung):
    """Without the time to compile; a hundred loops of Python's are about five seconds."""
    kernel = Kernel(rung, "cpu")
    xray(kernel, *random_inputs(rung, (1, 1, 64, 64, 64)))
    inputs, rays = random_inputs(rung, (1, 2, 256, 256, 64)), []
    assert processor_seconds(lambda: rays.append(xray(kernel, *inputs))) < 100
    assert rays[0].ok


def test_the_x_ray_of_a_rung_compiles_nothing_but_what_it_runs(monkeypatch):
    monkeypatch.setattr(Launcher, "compile", lambda _: pytest.fail("compiled what is not run"))
    assert xray("03_fa1_fp32", *qkv()).ok


def test_a_kernel_that_is_stopped_still_has_its_table():
    rung = ladder.rung("03_fa1_fp32")
    source = rung.replace("if (r0 + r < N) fa::load4(x", "fa::load4(x")
    ray = xray(source, *qkv(N=100, D=64))
    assert ray.stopped and not ray.ok and ray.findings[0].error
    assert ray.findings[0].kind == "out of bounds" and "| fa::load4(x, X +" in str(ray)  # not the line in fa/
    assert str(ray).index("✗ out of bounds") < str(ray).index("costliest lines")
    assert not ray.to_frame().empty


def test_a_missing_barrier_is_shown_with_both_lines():
    rung = ladder.rung("03_fa1_fp32")
    source = rung.replace("__syncthreads(); // Q_smem, K_smem", "// Q_smem, K_smem")
    ray = xray(source, *qkv(D=64))
    races = [f for f in ray.findings if f.kind == "race"]
    assert races and not ray.ok and not ray.stopped
    store = next(n for n, text in enumerate(source.splitlines(), 1) if "fa::store4(X_smem" in text)
    assert any(store in (f.line, f.other_line) for f in races)  # and the initial m and l in global memory
    for f in races:
        assert ray.code(f.other_line).strip() in ray.report(f)
    assert "✗" in str(ray.source("load_tile")) and "no findings" not in str(ray)


@pytest.mark.parametrize(
    ("stem", "line"),
    [
        ("31_warp_specialized", "    fa::mbarrier_wait(Q_empty + barrier, Q_ring.parity ^ 1);"),
        (
            "31_warp_specialized",
            "    fa::bar_sync(warpgroup, 128); // the last O has been read before any warp writes this one",
        ),
        ("32_ping_pong", "    fa::mbarrier_wait(Q_empty + barrier, Q_ring.parity ^ 1);"),
    ],
)
def test_what_is_wrong_from_a_ctas_second_tile_on_is_found(stem, line):
    q, k, v = (torch.randn(1, 2, 256, 64).half() for _ in range(3))
    kernel = load(source=ladder.rung(stem).replace(line, ""), device="cpu", quiet=True)
    ray = xray(kernel, q, k, v)
    assert ray.findings and all("on 2 SMs" in finding.text for finding in ray.findings)
    assert kernel.launcher.sms == 132


def test_without_padding_there_are_conflicts_and_the_difference_says_where():
    rung = ladder.rung("03_fa1_fp32")
    bare = xray(rung.replace("ld = d + 4,", "ld = d,"), *qkv(D=64))
    padded = xray(rung, *qkv(D=64))
    assert bare.total(space="shared", region="scores").excess > padded.total(space="shared", region="scores").excess
    table = bare.diff(padded)
    assert table.index[0][0] == "scores" and table.excess_before.iloc[0] > 10 * table.excess_after.iloc[0]
    assert "conflict" in str(bare.bank_map()) and len(bare.to_frame().loc[lambda f: f.excess > 0]) > 0


# Colours


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a, b):
    darker, lighter = sorted((luminance(a), luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


def test_lanes_numbers_read_on_their_colours_and_quarters_differ():
    for lane in range(32):
        assert contrast(plot.INK, access_maps.colour(lane)) >= 7, lane
    firsts = [access_maps.colour(lane) for lane in (0, 8, 16, 24)]
    assert all(abs(np.subtract(a, b)).max() > 0.1 for i, a in enumerate(firsts) for b in firsts[:i])
