"""Records in data/ what this machine measures: for maintainers.

data/README.md describes every kind of record. All but verdicts, xray-of-mutants, languages --code, ring --dry, sanitizer --build and heads rxnmapper need a GPU.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..evidence.counters import KINDS
from ..ladder.rung import Rung
from .arguments import add_kernels, command, for_this_gpu, found, positive

EXAMPLES = ("record rungs", "record rungs 04", "record counters 04", "record tiles 13")


def options(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="records", metavar="WHAT", required=True)

    def add(name: str, do: Callable, *examples: str) -> argparse.ArgumentParser:
        return command(kinds, name, do.__doc__, do, tuple(f"record {name} {example}".rstrip() for example in examples))

    add_kernels(add("rungs", rungs, "", "04"), "all rungs that this GPU can run, and its ceilings, by default")
    add_kernels(add("builds", builds, "", "32"), "all rungs that this GPU can run, by default")
    add_kernels(add("families", families, "", "13 32"), "all rungs for 16-bit inputs but the decode step by default")
    add_kernels(add("stages", stages, "13"), "rungs with stages", count="+")
    add_kernels(add("layouts", layouts, "", "32 33"), "all rungs for Hopper by default")
    add_kernels(add("one_sequence", one_sequence, "13 20 23 32 33"), "rungs for 16-bit inputs", count="+")
    counted = add("counters", counters, "", "04", "--singles patterns async --new")
    add_kernels(counted, "all rungs by default")
    counted.add_argument(
        "--singles",
        nargs="*",
        choices=KINDS,
        metavar="KIND",
        help=f"kernels of one access instead: {', '.join(KINDS)}",
    )
    counted.add_argument("--new", action="store_true", help="of patterns and async, those that the record lacks")
    add_kernels(add("stalls", stalls, "10 11 12 13"), "rungs of the forward pass on 16-bit inputs", count="+")
    add("wgmma", wgmma, "")
    powered = add("power", power, "", "31")
    powered.add_argument("kernel", nargs="?", default="32_ping_pong", metavar="KERNEL", help="default: 32_ping_pong")
    add("at_once", at_once, "")
    _mutants(add("sanitizer", sanitizer, "", '"04.*" --seconds 600', "--build --programs build/mutants"), gpu=True)
    _mutants(add("xray-of-mutants", xray_of_mutants, "", '--missing "04.*"'), gpu=False)
    judged = add("verdicts", verdicts, "", "--workers 2")
    judged.add_argument("--workers", type=positive, help="how many at a time (default: as many as there are cores)")
    judged.add_argument(
        "--every", action="store_true", help="run every seeded bug, not only those whose verdict is stale"
    )
    add_kernels(add("roles", roles, "ping_pong"), "rungs of the Hopper kind", count="+")
    add_kernels(add("timeline", timeline, "11 12"), "rungs with cp.async or plain loads, 10 to 12", count="+")
    tiled = add("tiles", tiles, "", "13 --rounds 9")
    tiled.add_argument("kernel", nargs="?", default="13_tuned", metavar="KERNEL", help="default: 13_tuned")
    tiled.add_argument("--rounds", type=positive, default=7, help="rounds per shape (default: 7)")
    add("training", training, "")
    add("writing", writing, "")
    ringed = add("ring", ring, "", "--dry", "--largest")
    ringed.add_argument("--dry", action="store_true", help="two ranks on the emulator, tiny tensors; records nothing")
    ringed.add_argument("--ranks", type=positive, help="how many (default: as many as there are GPUs; with --dry two)")
    ringed.add_argument(
        "--lengths",
        type=positive,
        nargs="+",
        default=[],
        metavar="N",
        help="these N alone: renews their rows of the record",
    )
    ringed.add_argument(
        "--largest", action="store_true", help="one forward pass at the largest N that fits, and nothing else"
    )
    spoken = add("languages", in_languages, "", "triton_tiles --tune", "--code")
    spoken.add_argument("names", nargs="*", metavar="NAME", help="of kernels/languages, or `peers`; all by default")
    how = spoken.add_mutually_exclusive_group()
    how.add_argument(
        "--tune", action="store_true", help="print the time of each tile that is worth trying, and record nothing"
    )
    how.add_argument("--code", action="store_true", help="record registers and instructions instead; needs no GPU")
    headed = add("heads", heads, "", "rxnmapper")
    models = "gpt (needs a GPU), rxnmapper (needs that package); both by default"
    headed.add_argument("models", nargs="*", metavar="MODEL", help=models)


def _mutants(parser: argparse.ArgumentParser, gpu: bool) -> None:
    parser.add_argument("ids", nargs="*", metavar="ID", help='mutants, like "04.*"; all by default')
    parser.add_argument("--workers", type=positive, help="how many at a time")
    if not gpu:
        parser.add_argument("--missing", action="store_true", help="only mutants that have no entry yet")
        return
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after so many seconds")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="build here, and use what is built here already")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the tools' whole output here")
    parser.add_argument("--build", action="store_true", help="build the programs and run none; needs no GPU")
    parser.add_argument("--gpus", type=positive, default=1, help="how many GPUs, all alike, to run on (default: 1)")


def rungs(arguments: argparse.Namespace) -> int:
    """Records timings, errors, memory and build times of rungs, and without KERNEL this GPU's ceilings."""
    from .. import record
    from ..measure import bench, recording

    bench.require_gpu()
    chosen, begun = for_this_gpu(arguments.kernels), time.perf_counter()
    with bench.watch() as seen:
        frame = bench.ceilings()
    print(frame.groupby(["name", "unit"])["value"].median().to_string(), flush=True)
    if not arguments.kernels:
        record.save("device", "ceilings", frame, extra=seen)
    for rung in chosen:
        before = time.perf_counter()
        print(rung.stem, flush=True)
        recording.record_rung(rung.stem)
        print(f"  {time.perf_counter() - before:.0f} s", flush=True)
    print(f"done in {time.perf_counter() - begun:.0f} s")
    return 0


def builds(arguments: argparse.Namespace) -> int:
    """Records the seconds that a load of a rung takes: first, after an edit, unchanged."""
    from ..measure import bench, recording

    bench.require_gpu()
    for rung in for_this_gpu(arguments.kernels):
        recording.record_builds(rung.stem)
    return 0


def families(arguments: argparse.Namespace) -> int:
    """Records speed and error of rungs by family of inputs, from random numbers to heads of trained models."""
    from .. import record

    return _each(arguments.kernels, "record_families", record.timed_by_family)


def stages(arguments: argparse.Namespace) -> int:
    """Records the stages of a rung (kernels/stages/) beside it, the rung before it and SDPA FLASH."""
    return _each(arguments.kernels, "record_stages")


def layouts(arguments: argparse.Namespace) -> int:
    """Records rungs beside FlashAttention-3 and -4 in both layouts of memory, with grouped heads and at odd lengths."""
    return _each(arguments.kernels, "record_layouts", lambda rung: rung.arch == "sm_90a")


def one_sequence(arguments: argparse.Namespace) -> int:
    """Records rungs beside the fast peers on one sequence of few heads, where SMs may have no query tile."""
    return _each(arguments.kernels, "record_one_sequence")


def _each(kernels: list[str], recorder: str, by_default: Callable[[Rung], bool] = lambda rung: True) -> int:
    """Has measure.recording's function of this name record each of these kernels, or, where none is named, the rungs meant by default."""
    from ..measure import bench, recording

    bench.require_gpu()
    for rung in for_this_gpu(kernels):
        if kernels or by_default(rung):
            before = time.perf_counter()
            print(rung.stem, flush=True)
            getattr(recording, recorder)(rung.stem)
            print(f"  {time.perf_counter() - before:.0f} s", flush=True)
    return 0


def counters(arguments: argparse.Namespace) -> int:
    """Records hardware counters of rungs, or of kernels of one access, with Nsight Compute (ncu)."""
    from ..evidence import counters

    if arguments.singles is not None:
        for kind in arguments.singles or KINDS:
            counters.record_singles(kind, arguments.new)
        return 0
    for rung in found(arguments.kernels):
        counters.record_counters(rung.stem)
    return 0


def stalls(arguments: argparse.Namespace) -> int:
    """Records why the warps of rungs wait, with Nsight Compute (ncu): cycles per instruction, by reason."""
    from ..evidence.stalls import record_stalls
    from ..measure import bench

    bench.require_gpu()
    record_stalls([rung.stem for rung in for_this_gpu(arguments.kernels)])
    return 0


def wgmma(arguments: argparse.Namespace) -> int:
    """Records how many clocks of an SM a wgmma takes, by N and by where its operands lie. Needs compute capability 9.0."""
    from ..evidence import wgmma_timed
    from ..measure import bench

    bench.require_gpu()
    wgmma_timed.record_wgmma()
    return 0


def power(arguments: argparse.Namespace) -> int:
    """Records clock, energy and time of a rung and of its peers in long bursts, on random numbers and on zeros."""
    from ..measure import bench
    from ..measure.power import record_power

    bench.require_gpu()
    (chosen,) = for_this_gpu([arguments.kernel])
    record_power(chosen.stem)
    return 0


def at_once(arguments: argparse.Namespace) -> int:
    """Records notebook 20's question: one head at a time, as many as the L2 holds the keys of, or all at once."""
    from ..measure import bench
    from ..measure.heads_at_once import record_at_once

    bench.require_gpu()
    record_at_once()
    return 0


def sanitizer(arguments: argparse.Namespace) -> int:
    """Records what compute-sanitizer's tools say of every seeded bug, one that is recorded already left out."""
    from ..evidence import sanitize

    with tempfile.TemporaryDirectory() as folder:
        programs = arguments.programs or Path(folder)
        programs.mkdir(parents=True, exist_ok=True)
        if arguments.build:
            sanitize.build_all(arguments.ids, arguments.workers, programs)
        else:
            workers = arguments.workers or sanitize.WORKERS
            sanitize.record_on_gpu(arguments.ids, workers, arguments.seconds, programs, arguments.keep, arguments.gpus)
    return 0


def xray_of_mutants(arguments: argparse.Namespace) -> int:
    """Records what the X-ray says of the same seeded bugs, on any machine, in the sanitizer's record."""
    from ..evidence import sanitize

    sanitize.record_xray(arguments.ids, arguments.workers, arguments.missing)
    return 0


def verdicts(arguments: argparse.Namespace) -> int:
    """Records who notices which seeded bug on the emulator, where the record is stale; stopped, it goes on from there."""
    from ..evidence import verdicts

    return 1 if verdicts.record(arguments.workers, arguments.every) else 0


def roles(arguments: argparse.Namespace) -> int:
    """Records when each warpgroup of a Hopper kernel copies, multiplies and waits."""
    from ..measure.roles import record_roles

    for rung in found(arguments.kernels):
        record_roles(rung.stem)
    return 0


def timeline(arguments: argparse.Namespace) -> int:
    """Records when the warps of a rung's CTA copy, wait and compute."""
    from ..measure import bench, recording

    bench.require_gpu()
    for rung in for_this_gpu(arguments.kernels):
        recording.record_timeline(rung.stem)
    return 0


def tiles(arguments: argparse.Namespace) -> int:
    """Times a rung's grid of tile shapes; from then on it is compiled with the fastest on this GPU."""
    from ..measure.tune import record_tiles

    record_tiles(arguments.kernel, arguments.rounds)
    return 0


def training(arguments: argparse.Namespace) -> int:
    """Records notebook 24's training runs, with our kernels and with PyTorch's."""
    from ..lessons.train import record_training

    record_training()
    return 0


def writing(arguments: argparse.Namespace) -> int:
    """Records how fast the model of notebook 24 writes, with SDPA and with ours, step by step and as a CUDA graph."""
    from ..lessons import train

    train.record_writing()
    return 0


def ring(arguments: argparse.Namespace) -> int:
    """Records attention over all GPUs of this machine: time beside PyTorch's, memory and a timeline. Takes 8 minutes on two H200s or more."""
    from ..measure.ring import record_ring

    record_ring(arguments.dry, arguments.ranks, arguments.largest, tuple(arguments.lengths))
    return 0


def in_languages(arguments: argparse.Namespace) -> int:
    """Records notebook 40: the forward pass in other languages, its speed beside SDPA, and how long the first result takes."""
    from ..lessons import languages, languages_timed, machine_code

    known = machine_code.COMPILERS if arguments.code else {*languages.implementations(), languages_timed.PEERS}
    if unknown := set(arguments.names) - set(known):
        raise ValueError(f"no implementation {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if arguments.code:
        print(machine_code.record(arguments.names).to_string(index=False))
    elif arguments.tune:
        languages_timed.tune(arguments.names)
    else:
        languages_timed.record_languages(arguments.names)
    return 0


def heads(arguments: argparse.Namespace) -> int:
    """Records Q, K and V of a few heads of trained models, and how peaked every head is."""
    import torch

    from ..lessons.heads import LENGTH, record_heads

    if unknown := set(arguments.models) - set(LENGTH):
        raise ValueError(f"no model {', '.join(sorted(unknown))}; there are {', '.join(LENGTH)}")
    models = arguments.models or list(LENGTH)
    if "gpt" in models and not torch.cuda.is_available():
        raise RuntimeError(
            "gpt is trained on a GPU only, and there is none; `python -m helpers record heads rxnmapper` needs none"
        )
    record_heads(models)
    return 0
