"""A rung with some of its instances only: compiling one head dimension and one dtype takes a fraction of the time.

At most the last lines, where the launcher chooses an instance, are fewer: a finding in a kernel names the same line as in the
whole rung.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace

from .contract import TORCH_NAMES, FaArgs
from .rung import Rung, Which, rung

_CASE = re.compile(r"^  case (?P<D>\d+):\n    return launch<\d+>\(a, stream\);\n", re.MULTILINE)
# All of the ladder's way to choose by head dimension: the arguments can't be changed before, and no case runs into the next.
_CHOICE = re.compile(
    r"^  const fa_\w+ &a = .*\n(?:.*\n)*?"
    r"(?P<cases>  switch \(a\.D\) \{\n(?:  case (\d+):\n    return launch<\2>\(a, stream\);\n)+"
    r"  default:\n    return cudaErrorInvalidValue;\n  \}\n)",
    re.MULTILINE,
)
_BOTH_DTYPES = re.compile(r"a\.dtype == FA_FP16 \? launch<d, fa::fp16>\(a, stream\) : launch<d, fa::bf16>\(a, stream\)")


def of_head_dimension(which: Which, D: int) -> Rung:
    """A rung (or the one with this stem) without its instances for other head dimensions than `D`. One that takes any head
    dimension is given back as it is. ValueError if it has no such instance."""
    whole = rung(which)
    if not whole.D:
        return whole
    if D not in whole.D:
        raise ValueError(f"{whole.stem} has no instance for D = {D}; it has {', '.join(map(str, whole.D))}")
    text = _CASE.sub(lambda found: found[0] if int(found["D"]) == D else "", whole.source)
    return replace(whole, source=_header(text, "D", D), D=(D,))


def for_d64(which: Which) -> Rung:
    """A rung without its instances for other head dimensions than 64."""
    return of_head_dimension(which, 64)


def single(which: Which, D: int, dtype: str | None = None) -> Rung:
    """A rung with one of its instances only, for one head dimension and one 16-bit dtype, by default fp16. Where it takes float32
    too, those stay; one without fp16 keeps its dtypes by default.

        load(single("10", D=64, dtype="bf16"), device="cpu")

    ValueError if its launcher doesn't choose among instances as those of the ladder do."""
    whole = rung(which)
    if dtype is None and "fp16" not in whole.dtypes:
        return of_head_dimension(whole, D)
    dtype = dtype or "fp16"
    chosen = f"launch<d, fa::{dtype}>(a, stream)"
    text, times = _BOTH_DTYPES.subn(chosen, whole.source)
    kept = tuple(name for name in whole.dtypes if name in ("fp32", dtype))
    if times != 1 or D not in whole.D or dtype == "fp32" or dtype not in kept:
        raise ValueError(f"{whole.stem} has no instance for D = {D}, {dtype} to be taken alone")
    one = replace(whole, source=_header(text, "dtypes", ", ".join(kept)), dtypes=kept)
    return of_head_dimension(one, D)


Instance = tuple[int, int] | None  # by the D and dtype of fa_args; None: of a source that has them all


def apart(whole: Rung, most: int) -> dict[Instance, Rung]:
    """The source that has an instance of a rung, by instance: compilers side by side are done sooner than one that makes them all.
    Each has its own, or if that would be more than `most`, one with all of its dtype. Every line keeps its number. All have the
    whole if only that is left, or if the launcher chooses among instances in another way than those of the ladder do: then only
    the whole does what its author wrote."""
    together = {None: whole}
    choice = _CHOICE.search(whole.source)
    if choice is None or len(_BOTH_DTYPES.findall(whole.source)) != 1 or not {"fp16", "bf16"}.issuperset(whole.dtypes):
        return together
    if [int(found["D"]) for found in _CASE.finditer(choice["cases"])] != list(whole.D):
        return together

    begin, end = choice.span("cases")

    def part(dtype: str, *dimensions: int) -> Rung:
        cases = _CASE.sub(lambda found: found[0] if int(found["D"]) in dimensions else "\n\n", choice["cases"])
        text = whole.source[:begin] + cases + whole.source[end:]
        return replace(whole, source=_BOTH_DTYPES.sub(f"launch<d, fa::{dtype}>(a, stream)", text))

    codes = list(TORCH_NAMES)
    instances = [(D, dtype) for D in whole.D for dtype in whole.dtypes]
    if 1 < len(instances) <= most:
        return {(D, codes.index(dtype)): part(dtype, D) for D, dtype in instances}
    if 1 < len(whole.dtypes) <= most:
        return {(D, codes.index(dtype)): part(dtype, *whole.D) for D, dtype in instances}
    return together


def asked_for(args: FaArgs, parts: Collection[Instance]) -> Instance:
    """The one of these that a call is for. Of an instance that none has any: its launcher refuses the call, as the whole's does."""
    instance = args.D, args.dtype
    return instance if instance in parts else next(iter(parts))


def _header(text: str, key: str, value: object) -> str:
    return re.sub(rf"^(// {key}: +).*", rf"\g<1>{value}", text, count=1, flags=re.MULTILINE)
