"""The rungs of the ladder: found by glob in kernels/, described by the header block of each `.cu`."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from .paths import INCLUDE, KERNELS, STAGES

KEYS = (
    "idea",
    "changed",
    "op",
    "features",
    "inputs",
    "outputs",
    "dtypes",
    "D",
    "workspace",
    "tiles",
    "arch",
    "paper",
    "speed",
)
REQUIRED = ("idea", "op", "dtypes", "arch")
OPS = ("attention", "softmax", "attention_backward", "merge", "one_sided")
PARTS = ("merge", "one_sided")  # what is no attention of one GPU: loaded by name, and no rungs
FEATURES = (
    "causal",
    "window",
    "gqa",
    "varlen",
    "lengths",
    "pages",
    "splits",
    "deterministic",
    "peers",
)  # what a call may ask for beyond q, k, v and a scale
DTYPES = ("fp32", "fp16", "bf16")
# Hshared: H where query heads share K and V, 0 where each has its own
DIMENSIONS = ("B", "H", "Hkv", "Hshared", "Nq", "Nk", "D", "splits", "rows", "N")
ROWS = ("rows", "N")  # of those, words of a softmax alone
IN_TILES = re.compile(r"Nq([1-9]\d*)")  # Nq128: Nq in whole tiles of 128

MAX_WORKSPACE = 4  # as many as fa_args has room for

_TITLE = re.compile(r"// (?P<stem>\w+): (?P<title>\S.*)")
_KEY = re.compile(r"// (?P<key>\w+):\s*(?P<value>.*)")
_NUMBERS = re.compile(r"[1-9]\d*([,\s]+[1-9]\d*)*")
_TENSOR = re.compile(r"(?P<name>\w+)\s*\((?P<dims>[^()]*)\)[^()]*")
_ARCH = re.compile(r"sm_\d{2,3}a?")
_COMMENT_OR_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](fa/[\w./]+)[>"]', re.MULTILINE)


@dataclass(frozen=True)
class Rung:
    """One kernel's text and what its header block says of it. `rung` makes one.

        rung("04").tiles

    `workspace` lists (name, dimension words or numbers), for example ("m", ("B", "H", "Nq")); every workspace tensor is
    fp32. `features` are those of FEATURES that its launcher takes.
    """

    stem: str
    path: Path
    source: str = field(repr=False)
    title: str = ""
    idea: str = ""
    changed: str = ""
    op: str = "attention"
    features: tuple[str, ...] = ()
    inputs: str = ""
    outputs: str = ""
    dtypes: tuple[str, ...] = ("fp32",)
    D: tuple[int, ...] = ()  # empty: any
    workspace: tuple[tuple[str, tuple[str, ...]], ...] = ()
    tiles: str = ""
    arch: str = "sm_75"
    paper: str = ""
    speed: str = ""

    @property
    def number(self) -> str:
        """The two digits the stem opens with; empty for a reader's own kernel."""
        return self.stem[:2] if self.stem[:2].isdigit() else ""

    def ctas(self, D: int, shared_memory: int = 228 << 10) -> int:
        """CTAs that an SM has place for at once with this head dimension, by the header block's table of tiles; else 1. shared_memory:
        the SM's bytes of it, of which a CTA takes a KB more than it asks for; the table is that of a Hopper GPU."""
        found = re.search(rf"D={D}:.*\bsmem=(\d+) KB.*\bCTAs/SM=(\d+)", self.tiles)
        return max(1, min(int(found[2]), shared_memory // (int(found[1]) + 1 << 10))) if found else 1

    @property
    def usual_D(self) -> int:
        """A head dimension that it takes: 64 where it does."""
        return 64 if not self.D or 64 in self.D else self.D[0]

    @property
    def file(self) -> Path | None:
        """The file whose text this is, as it stands now; None for a text of one's own and for an edited one."""
        return self.path if self.path.is_file() and self.path.read_text("utf-8-sig") == self.source else None

    @cached_property
    def includes(self) -> list[Path]:
        """The fa/ headers this file reaches, directly or through another, in order of first sight."""
        return includes(self.source)

    @cached_property
    def digest(self) -> str:
        """sha256 of the code, without comments and blank lines, of the source and of every fa/ header it reaches: what
        a recorded figure belongs to. A comment may say what was measured without making the measurement stale."""
        return digest_of([self.source, *(header.read_text() for header in self.includes)])

    def replace(self, old: str, new: str) -> str:
        """The source with the one occurrence of `old` replaced; ValueError if there is none, or more than one."""
        count = self.source.count(old)
        if count != 1:
            raise ValueError(f"{self.stem}: {old!r} occurs {count} times in the source; it has to occur once")
        return self.source.replace(old, new)


def code(text: str) -> str:
    """CUDA text without comments, blank lines and trailing blanks; strings keep what looks like a comment in them."""
    bare = _COMMENT_OR_STRING.sub(lambda found: found[0] if found[0][0] == '"' else " ", text)
    return "\n".join(line.rstrip() for line in bare.splitlines() if line.strip())


def digest_of(texts: Iterable[str]) -> str:
    """sha256 of the code of several texts, one after the other."""
    sha = hashlib.sha256()
    for text in texts:
        sha.update(code(text).encode())
    return sha.hexdigest()


def includes(source: str) -> list[Path]:
    """The fa/ headers reached from `source`, each once."""
    found: list[Path] = []
    waiting = [source]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop(0)):
            header = INCLUDE / name
            if header not in found and header.exists():
                found.append(header)
                waiting.append(header.read_text())
    return found


def rungs() -> list[Rung]:
    """Every rung of the ladder, in order.

        [r.stem for r in rungs()]

    The files kernels/NN_*.cu are the only list there is. One whose operation is among PARTS is no rung.
    """
    return [found for path in _files() if (found := _read(path)).op not in PARTS]


def stages(which: Which) -> list[Rung]:
    """The kernels on the way from the rung before to this one, kernels/stages/NN_i_name.cu, in order; of most rungs none.

        [r.stem for r in stages("13")]

    Each is complete, and one idea further than the one before. They aren't rungs: `rungs` leaves them out. which: what `rung` takes.
    """
    number = rung(which).number
    return [_read(path) for path in _stage_files() if number and path.stem.startswith(f"{number}_")]


Which = Any  # what `rung` takes, and with it everything that takes a kernel


def rung(which: Which) -> Rung:
    """The kernel's text and what its header block says: `rung("04")`, `rung("ping_pong")`, `rung("mine.cu")`.

        rung("04").idea
        rung("04").replace("Bc = 32", "Bc = 64")

    which: a rung's stem ("04_fa2_fp32") or a part of one that fits no other, that of a stage ("13_1"), the path of a `.cu`, a
    text of more than one line, a Rung, or a loaded Kernel, which is brought up to date first (`Kernel.current`). Whatever takes a kernel takes these.
    ValueError names the rungs that come nearest, or what is wrong with the file's header block.
    """
    if isinstance(which, Rung):
        return which
    if hasattr(which, "current"):  # a Kernel, of which this room knows nothing
        return which.current().rung
    if isinstance(which, str) and "\n" in which:
        return parse(which, Path("cell"))
    if isinstance(which, Path) or (isinstance(which, str) and ("/" in which or which.endswith(".cu"))):
        return _read(Path(which))
    if isinstance(which, str):
        return _read(_named(which))
    raise ValueError(
        f"a kernel is a stem, the path or the text of a .cu, a Rung or a Kernel; got {type(which).__name__}"
    )


def _files() -> list[Path]:
    return sorted(KERNELS.glob("[0-9][0-9]_*.cu"))


def _stage_files() -> list[Path]:
    return sorted(STAGES.glob("[0-9][0-9]_[0-9]_*.cu"))


def _read(path: Path) -> Rung:
    if path.is_dir():
        raise ValueError(f"{str(path)!r} is a folder, and a kernel is a .cu file")
    if not path.is_file():
        beside = [p.name for p in sorted(path.parent.glob("*.cu"))] or [p.stem for p in _files()]
        raise ValueError(f"there is no file {str(path)!r}{_nearest(path.name, beside)}")
    path = path.resolve()
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{str(path)!r} is no text in UTF-8: byte {error.start} is {error.object[error.start]:#x}"
        ) from None
    return parse(text, path, strict=path.parent in (KERNELS, STAGES))


def _named(name: str) -> Path:
    """The file of the one rung whose stem is `name`, begins with it, or else has it in it; where no rung does, of the one stage."""
    part, files, fits = name.strip().lower(), {}, []
    for group in (_files(), _stage_files()):
        if fits:
            break
        files |= {path.stem: path for path in group}
        stems = [path.stem for path in group]
        fits = [stem for stem in stems if stem == part] or [stem for stem in stems if part and stem.startswith(part)]
        fits = fits or [stem for stem in stems if part and part in stem]
    if not fits:
        raise ValueError(f"no kernel {name!r}{_nearest(part, list(files))}")
    if len(fits) > 1:
        raise ValueError(f"{name!r} fits {', '.join(fits[:-1])} and {fits[-1]}: name one of them")
    return files[fits[0]]


def _nearest(name: str, there: list[str]) -> str:
    """The end of a sentence about a name that is not there: what was probably meant."""
    keys = {key: full for full in there for key in (full, full.partition("_")[2] or full)}  # with its number or without
    near = list(dict.fromkeys(keys[key] for key in difflib.get_close_matches(name, keys, n=3, cutoff=0.51)))
    return f"; did you mean {' or '.join(near)}?" if near else f"; there are {', '.join(p.stem for p in _files())}"


def parse(source: str, path: Path, strict: bool = False) -> Rung:
    """The Rung that the header block of `source` describes. A reader's own file may leave keys out, a rung may not.

    Raises ValueError with file and line for an unknown key or a value outside what is allowed, and for a source that is no str.
    """
    if not isinstance(source, str):
        raise ValueError(f"a source is the text of a .cu; got {type(source).__name__}")
    source = source.removeprefix("\ufeff")  # some editors write a mark before it
    values: dict[str, str] = {}
    stem, title, key = path.stem, "", ""
    for number, line in enumerate(source.splitlines(), 1):
        if not line.strip() and not title:
            continue  # a string in a cell often opens with an empty line
        if not title:
            match = _TITLE.fullmatch(line)
            if match is None:
                break  # no header block
            stem, title = match["stem"], match["title"]
        elif not line.startswith("//"):
            break
        elif match := _KEY.fullmatch(line):
            key = match["key"]
            if key not in KEYS:
                raise ValueError(f"{path.name}:{number}: unknown key {key!r}; the header block has {', '.join(KEYS)}")
            values[key] = match["value"].strip()
        elif key and line[2:].strip():
            values[key] += "\n" + line[2:].strip()
    missing = [k for k in REQUIRED if not values.get(k)] if title else ["its title line"]
    if strict and missing:
        raise ValueError(f"{path.name}: the header block lacks {', '.join(missing)}")
    if strict and stem != path.stem:
        raise ValueError(f"{path.name}: the header block's title names {stem!r}, the file {path.stem!r}")
    fields: dict[str, object] = dict(values)
    if "idea" in values:
        fields["idea"] = " ".join(values["idea"].split())  # one sentence; the other keys' lines may be a list
    if "dtypes" in values:
        fields["dtypes"] = tuple(re.split(r"[,\s]+", values["dtypes"]))
    if "features" in values:
        fields["features"] = tuple(re.split(r"[,\s]+", values["features"]))
    if "D" in values:
        if not _NUMBERS.fullmatch(values["D"]):
            raise ValueError(
                f"{path.name}: D {values['D']!r} in the header block; it reads like 64, 128, and a kernel for any D has no such line"
            )
        fields["D"] = tuple(int(d) for d in re.findall(r"\d+", values["D"]))
    if "workspace" in values:
        fields["workspace"] = tuple(_tensor(path, part.strip()) for part in _parts(values["workspace"]))
    _require(path, "op", [values.get("op", OPS[0])], OPS)
    _require(path, "feature", fields.get("features", ()), FEATURES)
    _require(path, "dtype", fields.get("dtypes", ()), DTYPES)
    if not _ARCH.fullmatch(values.get("arch", "sm_75")):
        raise ValueError(f"{path.name}: arch {values['arch']!r} in the header block; it reads like sm_80 or sm_90a")
    if len(fields.get("workspace", ())) > MAX_WORKSPACE:
        raise ValueError(f"{path.name}: the header block has more than {MAX_WORKSPACE} workspace tensors")
    allowed = tuple(d for d in DIMENSIONS if values.get("op") == "softmax" or d not in ROWS)
    for name, dims in fields.get("workspace", ()):
        words = [d for d in dims if not d.isdigit() and not IN_TILES.fullmatch(d)]
        _require(path, f"workspace {name}: dimension", words, allowed)
    return Rung(stem=stem, path=path, source=source, title=title, **fields)  # type: ignore[arg-type]


def _parts(workspace: str) -> list[str]:
    """The tensors of a `workspace:` value, each still a text: `;` stands between two, or the end of a line."""
    return [part for part in re.split(r";|\n(?=\w+\s*\()", workspace) if part.strip()]


def _tensor(path: Path, text: str) -> tuple[str, tuple[str, ...]]:
    found = _TENSOR.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{path.name}: workspace {text!r} in the header block; it reads like m (B, H, Nq), and `;` stands between two"
        )
    return found["name"], tuple(re.split(r"[,\s]+", found["dims"].strip()))


def _require(path: Path, what: str, values: Iterable[str], allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise ValueError(f"{path.name}: {what} {value!r} in the header block; allowed are {', '.join(allowed)}")
