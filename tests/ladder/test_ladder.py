"""The rungs: found by glob, described by their header blocks."""

from dataclasses import replace
from pathlib import Path

import pytest

from helpers import rung, rungs
from helpers.ladder import rung as ladder
from helpers.ladder.paths import KERNELS

BLOCK = "// mine: a title\n//\n// idea:      one\n//            two\n// op:        softmax\n// dtypes:    fp16, bf16\n"
BLOCK += "// D:         64, 128\n// workspace: m (B,H,Nq) fp32; S (rows,N) fp32\n// arch:      sm_80\n"
STEMS = sorted(path.stem for path in KERNELS.glob("[0-9][0-9]_*.cu"))


def test_the_glob_is_the_list():
    files = sorted(Path(__file__).parents[2].glob("kernels/[0-9][0-9]_*.cu"))
    parts = [path for path in files if rung(path).op in ladder.PARTS]
    assert [path.stem for path in parts] == ["50_ring", "51_one_sided"]
    assert [r.path for r in rungs()] == [path for path in files if path not in parts]
    assert [r.stem for r in rungs()][:4] == ["01_naive", "02_online_softmax", "03_fa1_fp32", "04_fa2_fp32"]


def test_every_key_is_parsed():
    made = ladder.parse(BLOCK, Path("mine.cu"), strict=True)
    assert (made.stem, made.title, made.idea, made.op) == ("mine", "a title", "one two", "softmax")
    assert (made.dtypes, made.D, made.arch) == (("fp16", "bf16"), (64, 128), "sm_80")
    assert made.workspace == (("m", ("B", "H", "Nq")), ("S", ("rows", "N")))


def test_a_byte_order_mark_is_no_part_of_a_source():
    made = ladder.parse("\ufeff" + BLOCK, Path("cell"))
    assert made.source == BLOCK and made.title == "a title"


def test_a_cell_may_leave_the_block_out():
    made = ladder.parse("#include <fa/args.cuh>\n", Path("cell"))
    assert (made.stem, made.op, made.dtypes, made.D, made.arch) == ("cell", "attention", ("fp32",), (), "sm_75")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("// op: ", "// opp:", "mine.cu:5: unknown key 'opp'"),
        ("softmax", "convolution", "'convolution'.*allowed are attention, softmax"),
        ("// arch:      sm_80\n", "", "lacks arch"),
        ("// mine: a title", "// a title", "lacks its title"),
        ("// mine:", "// other:", "names 'other', the file 'mine'"),
        ("fp16, bf16", "fp8", "dtype 'fp8'.*allowed are fp32, fp16, bf16"),
        ("sm_80", "hopper", "arch 'hopper'.*reads like sm_80 or sm_90a"),
        ("(rows,N) fp32", "(N) fp32; a (N) fp32; b (N) fp32; c (N) fp32", "more than 4 workspace tensors"),
        ("(rows,N)", "(rows,M)", "workspace S.*'M'.*allowed are"),
        ("(rows,N)", "rows,N", "mine.cu: workspace 'S rows,N fp32'.*reads like m"),
        ("(rows,N)", "(rows,Nq0)", "workspace S.*'Nq0'.*allowed are"),
        ("softmax", "attention", "workspace S.*'rows'.*allowed are B, H, Hkv, Hshared, Nq, Nk, D, splits$"),
        ("64, 128", "many", "mine.cu: D 'many'.*reads like 64, 128"),
        ("64, 128", "0, 64", "mine.cu: D '0, 64'.*reads like 64, 128"),
    ],
)
def test_a_wrong_block_is_refused_by_name(old, new, words):
    with pytest.raises(ValueError, match=words):
        ladder.parse(BLOCK.replace(old, new), Path("mine.cu"), strict=True)


@pytest.mark.parametrize(
    ("which", "stem"),
    [
        ("04_fa2_fp32", "04_fa2_fp32"),
        ("04", "04_fa2_fp32"),
        ("fa2_fp32", "04_fa2_fp32"),
        ("ping_pong", "32_ping_pong"),
        ("swizzled", "11_swizzled"),
        ("32", "32_ping_pong"),  # and not 03_fa1_fp32: what it begins with comes first
        ("Swizzled", "11_swizzled"),
    ],
)
def test_a_part_that_fits_one_rung_names_it(which, stem):
    assert rung(which) == rung(rung(which)) == rung(KERNELS / f"{stem}.cu")


def test_a_whole_stem_is_no_part_of_another(tmp_path, monkeypatch):
    for stem in ("40_mine", "40_mine_too"):
        (tmp_path / f"{stem}.cu").write_text(BLOCK.replace("mine", stem))
    monkeypatch.setattr(ladder, "KERNELS", tmp_path)
    assert rung("40_mine").stem == "40_mine"


@pytest.mark.parametrize(
    ("which", "words"),
    [
        ("fa2", "'fa2' fits 04_fa2_fp32 and 10_fa2_mma_fp16: name one of them"),
        ("3", "'3' fits 30_tma_wgmma, 31_warp_specialized, 32_ping_pong and 33_backward_wgmma: name one of them"),
        ("04_fa2_f32", "no kernel '04_fa2_f32'; did you mean 04_fa2_fp32 or 03_fa1_fp32?"),
        ("pingpong", "no kernel 'pingpong'; did you mean 32_ping_pong?"),
        ("warp_specialised", "no kernel 'warp_specialised'; did you mean 31_warp_specialized?"),
        ("99_none", f"no kernel '99_none'; there are {', '.join(STEMS)}"),
        ("", f"no kernel ''; there are {', '.join(STEMS)}"),
        ("minr.cu", "there is no file 'minr.cu'; did you mean mine.cu?"),
        (Path("other/03_fa1_fp32"), "there is no file 'other/03_fa1_fp32'; did you mean 03_fa1_fp32 or 04_fa2_fp32?"),
        (4, "a kernel is a stem, the path or the text of a .cu, a Rung or a Kernel; got int"),
    ],
)
def test_a_name_that_fits_none_or_several_is_one_short_sentence(which, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.cu").write_text(BLOCK)
    with pytest.raises(ValueError) as caught:
        rung(which)
    assert str(caught.value) == words


def test_a_text_is_one_of_more_than_one_line():
    assert (rung(BLOCK).title, rung(BLOCK).path, rung(BLOCK).file) == ("a title", Path("cell"), None)


def test_a_rung_knows_whether_it_is_its_files_text(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text(BLOCK)
    made = rung(path)
    assert made.file == path
    assert replace(made, source=BLOCK + "int x;\n").file is None
    path.write_text(BLOCK + "int x;\n")
    assert made.file is None and rung(path).file == path


def test_a_mark_that_an_editor_writes_before_the_text_is_no_part_of_it(tmp_path):
    path = tmp_path / "mine.cu"
    path.write_text(BLOCK, encoding="utf-8-sig")
    made = rung(path)
    assert (made.title, made.source, made.file) == ("a title", BLOCK, path)


def test_a_cta_takes_a_kb_of_shared_memory_more_than_it_asks_for():
    made = ladder.parse("// mine: a title\n//\n// tiles: D=64: smem=57 KB CTAs/SM=4\n", Path("mine.cu"))
    assert 4 * 57 == 228 and made.ctas(64) == 3


def test_a_path_is_as_good_as_a_stem(tmp_path):
    copy = tmp_path / "mine.cu"
    copy.write_text(BLOCK)
    assert rung(copy).title == rung(str(copy)).title == "a title"


def test_replace_wants_exactly_one_place():
    naive = rung("01_naive")
    assert naive.replace("extern", "/**/extern").count("/**/extern") == 1
    with pytest.raises(ValueError, match="occurs 0 times"):
        naive.replace("no such text", "")
    with pytest.raises(ValueError, match="occurs [0-9]+ times"):
        naive.replace("float", "double")


def test_the_digest_covers_the_headers(tmp_path, monkeypatch):
    (tmp_path / "fa").mkdir()
    (tmp_path / "fa" / "a.cuh").write_text("#include <fa/b.cuh>\n")
    (tmp_path / "fa" / "b.cuh").write_text("int one;\n")
    monkeypatch.setattr(ladder, "INCLUDE", tmp_path)
    source = "#include <fa/a.cuh>\n"
    before = ladder.parse(source, Path("cell"))
    assert [h.name for h in before.includes] == ["a.cuh", "b.cuh"]
    digest = before.digest
    (tmp_path / "fa" / "b.cuh").write_text("int two;\n")
    assert ladder.parse(source, Path("cell")).digest != digest


def test_a_comment_is_not_part_of_the_digest_and_everything_else_is():
    def digest(source: str) -> str:
        return ladder.parse(source, Path("cell")).digest

    source = 'int x = 1; // one\n\n/* two\n lines */\nconst char *s = "// no comment";\n'
    assert digest(source) == digest('int x = 1;\nconst char *s = "// no comment"; // three\n')
    assert digest(source) != digest(source.replace("x = 1", "x = 2"))
    assert digest(source) != digest(source.replace("// no comment", "// another"))
    assert digest("// title: speed 1\n" + source) == digest("// title: speed 2\n" + source)
