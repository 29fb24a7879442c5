"""The reader's lines behind addresses in a library of host code, by its debug information."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

from ..ladder.errors import ToolkitError
from ..ladder.paths import HELPERS, ROOT, from_root
from ..ladder.paths import INCLUDE as KERNEL_INCLUDE
from .compiler import programs

CHECKOUT = f"{ROOT}/"
# As places name them: the checkout's files from its root.
EMULATOR = from_root(HELPERS / "emulator" / "include") + "/"
SHARED = from_root(KERNEL_INCLUDE / "fa") + "/"
STANDARD = re.compile(r"/include/([^/]+/)?c\+\+/|/libcxx/include/")  # the standard library's headers, wherever they are
# The name of a struct's own copying: `State::State(State const&)`, `State::operator=(State&&)`.
COPYING = re.compile(
    r"(?:.*::)?(?P<name>[^:<]+)(?:<.*>)?::(?:operator=|(?P=name))\((?:.*::)?(?P=name)(?:<.*>)?(?: const)?&&?\)"
)

# What clang puts in itself, such as the call where a local array has been overrun, has no line: it is given that of the code
# before it, if that is less than so many bytes away.
LINELESS = 24


def places(library: Path, offsets: Iterable[int]) -> dict[int, tuple[str, int]]:
    """For each offset of a return address in ``library`` the reader's file and line: of the calls that were inlined
    there the innermost that is neither in the emulator's or C++'s headers, nor in ``fa/``, nor a struct's own copying, which
    stands where the struct is declared. ("", 0) if nothing is known. Warns once where no symbolizer is installed."""
    offsets = sorted(offsets)
    found = dict.fromkeys(offsets, ("", 0))
    if not offsets:
        return found
    try:
        tool = find_symbolizer()
    except ToolkitError as error:
        warnings.warn(str(error), stacklevel=2)
        return found
    read = _atos if Path(tool).name == "atos" else _addr2line
    chains = dict(zip(offsets, read(tool, library, offsets)))
    if lineless := [offset for offset, calls in chains.items() if not calls]:
        before = sorted({offset - n for offset in lineless for n in range(1, LINELESS)})
        known = dict(zip(before, read(tool, library, before)))
        for offset in lineless:
            chains[offset] = next((known[offset - n] for n in range(1, LINELESS) if known[offset - n]), [])
    for offset, calls in chains.items():
        chain = [
            (name, place) for name, place in calls if not place.startswith(EMULATOR) and not STANDARD.search(place)
        ]
        chain = [(name, place) for name, place in chain if not COPYING.fullmatch(name)] or chain
        readers = [place for _, place in chain if not place.startswith(SHARED)]
        if chain:
            file, _, line = [*readers, chain[0][1]][0].rpartition(":")
            found[offset] = (file, int(line))
    return found


def find_symbolizer() -> str:
    """The path of addr2line (binutils), llvm-symbolizer or, on macOS, atos. Raises ToolkitError if there is none."""
    names = ["atos"] if sys.platform == "darwin" else []
    names += ["addr2line", "*-conda-*-addr2line", "llvm-symbolizer", "llvm-symbolizer-[0-9]*"]
    if tool := next(programs(*names), None):
        return tool
    raise ToolkitError(
        "no addr2line and no llvm-symbolizer found, so findings and the X-ray have no line numbers: install one (Debian, "
        "Ubuntu: `apt install binutils`; Fedora, Red Hat: `dnf install binutils`; macOS: `xcode-select --install`; "
        "conda: `conda install -c conda-forge binutils`)"
    )


def _addr2line(tool: str, library: Path, offsets: list[int]) -> list[list[tuple[str, str]]]:
    """For each offset the calls that are inlined there, innermost first: function and place. llvm-symbolizer prints the same
    if it is asked to."""
    command = [tool, "-a", "-i", "-f", "-C", "-e", str(library)]
    if Path(tool).name.startswith("llvm-symbolizer"):
        command.append("--output-style=GNU")
    asked = "".join(f"{offset - 1:#x}\n" for offset in offsets)
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=False).stdout
    chains = []
    for lines in re.split(r"^0x[0-9a-f]+\n", said, flags=re.MULTILINE)[1:]:
        names, at = lines.splitlines()[::2], lines.splitlines()[1::2]
        chains.append([(n, _place(line)) for n, line in zip(names, at) if re.search(r":[1-9]\d*( \(|$)", line)])
    return chains


def _atos(tool: str, library: Path, offsets: list[int]) -> list[list[tuple[str, str]]]:
    """The same from macOS's atos: a line for each call, `function (in library) (file:line)`, an empty one after each address."""
    symbols = library.with_name(f"{library.name}.dSYM") / "Contents" / "Resources" / "DWARF" / library.name
    command = [tool, "-o", str(symbols), "-i", "-fullPath", *(f"{offset - 1:#x}" for offset in offsets)]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    call = re.compile(r"(?P<name>.*) \(in .*?\) \((?P<place>.*:[1-9]\d*)\)")
    return [
        [(found["name"], _place(found["place"])) for found in map(call.fullmatch, lines.splitlines()) if found]
        for lines in said.split("\n\n")
    ]


def _place(line: str) -> str:
    """``file:line`` as addr2line says it, the checkout's files from its root. A name that is no absolute path (a notebook's cell)
    comes with the folder of the build before it."""
    return re.sub(r".*/\.building-[^/]*/| \(.*", "", line).removeprefix(CHECKOUT)
