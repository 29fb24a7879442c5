"""What the commands share: a kernel's name, random inputs that suit it, and progress."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..ladder.contract import MOST
from ..ladder.errors import ToolkitError
from ..ladder.rung import DTYPES, OPS, rung, rungs

if TYPE_CHECKING:
    from torch import Tensor

    from ..ladder.rung import Rung
    from ..run.kernel import Kernel


SEEDS = (-(2**63), 2**64 - 1)  # that torch takes
MOST_ELEMENTS = 2**40  # of a tensor: no machine has the memory


def command(commands: Any, name: str, about: str, do: Callable, examples: tuple[str, ...]) -> argparse.ArgumentParser:
    """A subcommand with its help: `about`, whose first line stands in the list of commands, and the examples."""
    about = about.strip()
    lines = "".join(f"\n  python -m helpers {example}" for example in examples)
    parser = commands.add_parser(
        name,
        help=about.splitlines()[0],
        description=about,
        epilog=f"examples:{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(do=do)
    return parser


def add_kernel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kernel", metavar="KERNEL", help="a rung, like 04 or ping_pong, or the path of a .cu")


def add_kernels(parser: argparse.ArgumentParser, default: str, count: str = "*") -> None:
    parser.add_argument(
        "kernels", nargs=count, metavar="KERNEL", help=f"a rung, like 04, or the path of a .cu; {default}"
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    words = "default: cuda if this machine's GPU can run the kernel, else cpu, the emulator"
    parser.add_argument("--device", choices=("cuda", "cpu"), help=words)


def add_header(parser: argparse.ArgumentParser) -> None:
    """What a header block says; of a file without one, the command line may say it."""
    group = parser.add_argument_group("of a file without a header block")
    group.add_argument("--op", choices=OPS, help="default: attention")
    group.add_argument("--dtype", choices=DTYPES, help="default: fp32")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """Shape, dtype, masks and seed of one call."""
    group = parser.add_argument_group(
        "inputs", "Q is (B, H, Nq, D), K and V (B, Hkv, Nk, D); a softmax has Nq rows of Nk"
    )
    for name, words in (
        ("B", "batch"),
        ("H", "query heads"),
        ("Hkv", "heads of K and V"),
        ("N", "queries and keys"),
        ("Nq", "queries"),
        ("Nk", "keys"),
        ("D", "head dimension"),
    ):
        group.add_argument(f"--{name}", type=_dimension, metavar="n", help=words)
    group.add_argument("--dtype", choices=DTYPES, help="default: the first that the kernel takes")
    group.add_argument("--causal", action="store_true", help="under a causal mask")
    group.add_argument("--window", type=positive, metavar="n", help="each query sees the last n keys (with --causal)")
    group.add_argument("--splits", type=positive, metavar="n", help="cut the keys into n pieces")
    group.add_argument("--scale", type=float, help="default: 1/sqrt(D)")
    group.add_argument("--seed", type=_seed, default=0, help="of the random numbers (default: 0)")
    group.add_argument("--op", choices=OPS, help="of a file without a header block (default: attention)")


def positive(text: str) -> int:
    """An option's whole number, at least 1; argparse refuses any other text."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return int(text)


def _dimension(text: str) -> int:
    if (size := positive(text)) > MOST:
        raise argparse.ArgumentTypeError(f"{size} is too large; every dimension has to be at most 2^30")
    return size


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no whole number") from None
    if not SEEDS[0] <= seed <= SEEDS[1]:
        raise argparse.ArgumentTypeError(f"{seed} has more than 64 bits; a seed is -2^63 to 2^64 - 1")
    return seed


@contextlib.contextmanager
def known_names() -> Iterator[None]:
    """Looks up what the command line names: a KeyError becomes a ValueError of the same words, which says whose fault it is."""
    try:
        yield
    except KeyError as error:
        raise ValueError(error.args[0]) from error


def found(kernels: list[str]) -> list[Rung]:
    """These kernels; all rungs if none is named. ValueError for an unknown one, before anything runs."""
    return [rung(name) for name in kernels] or rungs()


def for_this_gpu(kernels: list[str]) -> list[Rung]:
    """These kernels; all rungs that this GPU can run if none is named, with a sentence about each that is left out. ToolkitError
    for a named one that it can't run."""
    from ..run.kernel import cuda_refusal

    chosen = []
    for one in found(kernels):
        if not (reason := cuda_refusal(one)):
            chosen.append(one)
        elif kernels:
            raise ToolkitError(reason)
        else:
            print(f"left out: {reason}", flush=True)
    return chosen


def described(arguments: argparse.Namespace) -> Rung:
    """The kernel that was named. What a header block says, the command line says of a file that has none."""
    own = rung(arguments.kernel)
    if own.title:
        _require("operation", arguments.op, own.stem, (own.op,))
        _require("dtype", arguments.dtype, own.stem, own.dtypes)
        return own
    asked = {
        "causal": getattr(arguments, "causal", False),
        "window": getattr(arguments, "window", None),
        "gqa": getattr(arguments, "Hkv", None),
        "splits": getattr(arguments, "splits", None),
    }
    features = tuple(name for name, value in asked.items() if value)
    return replace(own, op=arguments.op or own.op, dtypes=(arguments.dtype or own.dtypes[0],), features=features)


def _require(what: str, asked: str | None, stem: str, allowed: tuple[str, ...]) -> None:
    if asked not in (None, *allowed):
        raise ValueError(f"{what} {asked}: the header block of {stem} allows {', '.join(allowed)}")


def loaded(which: Rung, device: str | None) -> Kernel:
    """The kernel, compiled; how long that took goes to stderr."""
    from ..run.kernel import load, summary

    kernel = load(which, device=device, quiet=True)
    print(summary(kernel), file=sys.stderr)
    return kernel


def inputs(rung: Rung, arguments: argparse.Namespace, device: str) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Random inputs of the shape that was asked for, else a small one that suits the kernel, and the call's options. ValueError for a
    kernel that takes other ranks' keys."""
    from ..run import merging
    from ..run.reference import random_inputs

    require_one_rank(rung)
    asked = {name: getattr(arguments, name) for name in ("causal", "window", "splits", "scale")}
    asked = {name: value for name, value in asked.items() if value is not None and value is not False}
    masks = {name: value for name, value in asked.items() if name != "splits"}  # O and LSE of a backward pass need them
    shape = _shape(rung, arguments)
    if rung.op == "merge":
        return merging.workload((*shape[:3], shape[4]), arguments.dtype or rung.dtypes[0], device), asked
    Hkv = arguments.Hkv or (1 if "gqa" in rung.features and rung.title else shape[1])
    if shape[1] % Hkv:
        raise ValueError(
            f"--H {shape[1]} is no multiple of --Hkv {Hkv}: as many query heads share each head of K and V"
        )
    made = random_inputs(rung, shape, arguments.dtype, device, seed=arguments.seed, Hkv=Hkv, **masks)
    return made, asked


def require_one_rank(rung: Rung) -> None:
    """ValueError for a kernel that attends across ranks: a command has only one."""
    if rung.op == "one_sided":
        raise ValueError(
            f"{rung.stem} takes the keys of other ranks: helpers.one_sided calls it, and notebooks/51_one_sided.ipynb checks it"
        )


def _shape(rung: Rung, arguments: argparse.Namespace) -> tuple[int, int, int, int, int]:
    """(B, H, Nq, Nk, D). By default 64 rows of 1024 for a softmax, 1 query on 1024 keys for a kernel that splits them, else
    N = 256."""
    if rung.op == "softmax":
        B, H, Nq, Nk, D = 1, 1, 64, 1024, 1
    else:
        decode = "splits" in rung.features and rung.title
        B, H, Nq, Nk = (1, 2, 1, 1024) if decode else (1, 2, 256, 256)
        D = rung.usual_D
    n = arguments.N
    chosen = (arguments.B, arguments.H, arguments.Nq or n, arguments.Nk or n, arguments.D)
    B, H, Nq, Nk, D = shape = tuple(own or default for own, default in zip(chosen, (B, H, Nq, Nk, D), strict=True))
    for size in ((Nq, Nk),) if rung.op == "softmax" else ((B, H, Nq, D), (B, H, Nk, D)):
        if math.prod(size) > MOST_ELEMENTS:
            raise ValueError(f"a tensor of shape {size} has {math.prod(size):.1g} elements; 2^40 are the most")
    return shape


def progress(line: str) -> None:
    """Shows a line on stderr in place of the one before; an empty one clears it. Nothing where stderr is no terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}{' …' if line else ''}", end="", file=sys.stderr, flush=True)
