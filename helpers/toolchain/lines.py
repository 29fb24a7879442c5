"""The reader's lines behind addresses in a library of host code, by its debug information."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from ..ladder.paths import HELPERS, ROOT, from_root
from ..ladder.paths import INCLUDE as KERNEL_INCLUDE

CHECKOUT = f"{ROOT}/"
# As places name them: the checkout's files from its root.
EMULATOR = from_root(HELPERS / "emulator" / "include") + "/"
SHARED = from_root(KERNEL_INCLUDE / "fa") + "/"
STANDARD = re.compile(r"/include/([^/]+/)?c\+\+/")  # the standard library's headers, wherever they are
# The name of a struct's own copying: `State::State(State const&)`, `State::operator=(State&&)`.
COPYING = re.compile(
    r"(?:.*::)?(?P<name>[^:<]+)(?:<.*>)?::(?:operator=|(?P=name))\((?:.*::)?(?P=name)(?:<.*>)?(?: const)?&&?\)"
)


def places(library: Path, offsets: Iterable[int]) -> dict[int, tuple[str, int]]:
    """For each offset of a return address in ``library`` the reader's file and line: of the calls that were inlined
    there the innermost that is neither in the emulator's or C++'s headers, nor in ``fa/``, nor a struct's own copying, which
    stands where the struct is declared. ("", 0) if nothing is known."""
    offsets = sorted(offsets)
    found = dict.fromkeys(offsets, ("", 0))
    tool = shutil.which("addr2line")
    if tool is None or not offsets:
        return found
    asked = "".join(f"{offset - 1:#x}\n" for offset in offsets)
    command = [tool, "-a", "-i", "-f", "-C", "-e", str(library)]
    said = subprocess.run(command, input=asked, capture_output=True, text=True, check=False).stdout
    for offset, lines in zip(offsets, re.split(r"^0x[0-9a-f]+\n", said, flags=re.MULTILINE)[1:]):
        names, at = lines.splitlines()[::2], lines.splitlines()[1::2]
        chain = [(n, _place(line)) for n, line in zip(names, at) if re.search(r":[1-9]\d*( \(|$)", line)]
        chain = [
            (name, place) for name, place in chain if not place.startswith(EMULATOR) and not STANDARD.search(place)
        ]
        chain = [(name, place) for name, place in chain if not COPYING.fullmatch(name)] or chain
        readers = [place for _, place in chain if not place.startswith(SHARED)]
        if chain:
            file, _, line = [*readers, chain[0][1]][0].rpartition(":")
            found[offset] = (file, int(line))
    return found


def _place(line: str) -> str:
    """``file:line`` as addr2line says it, the checkout's files from its root. A name that is no absolute path (a notebook's cell)
    comes with the folder of the build before it."""
    return re.sub(r".*/\.building-[^/]*/| \(.*", "", line).removeprefix(CHECKOUT)
