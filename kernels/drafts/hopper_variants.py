"""Builds, checks and times the variants of the Hopper forward kernels on this machine's GPU, in one call of under four minutes.

`python kernels/drafts/hopper_variants.py` writes hopper_variants.csv into $OUT (a folder of its own under the system's temporary
one if unset) and prints a table. Options:
`--build-only` (no GPU needed: registers, spills, warnings, exponentials between waits), `--only PATTERN`, `--seconds 225`.

Every variant runs in a process of its own, which is killed when it hangs; nothing that a variant does stops the others.
A row of the csv is a variant at one length: its own time and those of SDPA CUDNN (and FLASH), interleaved in one process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT))

POINTS = [
    (4096, False),
    (4096, True),
    (1024, False),
    (1024, True),
    (16384, False),
    (16384, True),
    (512, False),
    (512, True),
]
HEADLINE = "bf16"
CHECK_SECONDS, TIME_SECONDS = 25, 25  # how long a worker may take for its checks, and for its timings
AHEAD = 4  # workers that import torch while another one has the GPU


@dataclass
class Variant:
    """A kernel file for one D, macros to define and lines to replace in it, and what is expected of it."""

    name: str
    D: int
    expected: str
    define: dict[str, int] = field(default_factory=dict)
    file: str = "hopper_forward"
    replace: tuple[tuple[str, str], ...] = ()
    flash: bool = False  # timed beside SDPA FLASH too

    @property
    def label(self) -> str:
        return f"{self.name} D{self.D}"


def variants() -> list[Variant]:
    """All of them, the most important first: what does not fit into the time is left out at the end."""

    def of(D: int, name: str, expected: str, **define: int) -> Variant:
        return Variant(name, D, expected, define)

    both = [
        lambda D: Variant("base", D, "FA3 order without draining: 1.08 at D128, 1.12 at D64; 1.05 at N=1024", flash=True),
        lambda D: of(D, "drain", "-2 % at N=4096, -7 % at 1024: tensor cores idle between query tiles", DRAIN=1),
        lambda D: of(D, "free", "no maximum, no rescaling, all exponentials between the waits: +2 % D128, +6 % D64", FREE=1),
        lambda D: of(D, "no_turns", "-1 % to 0", PING_PONG=0),
        lambda D: of(D, "window_8", "34 exponentials between the waits, the rest mixed with conversions: 0 to +2 %", WINDOW=8),
        lambda D: of(D, "free_no_turns", "0 to -1 % of free", FREE=1, PING_PONG=0),
        lambda D: of(D, "free_drain", "as drain is to base", FREE=1, DRAIN=1),
        lambda D: of(D, "rescale_later", "O is rescaled behind the next Q K^T: 0 to +2 %", RESCALE=3),
        lambda D: of(D, "static", "0 without mask; -3 to -8 % causal", DYNAMIC=0),
        lambda D: of(D, "rescale_if", "0; +1 % at D64", RESCALE=1),
        lambda D: of(D, "rescale_lazy", "0 to +1 %", RESCALE=2),
        lambda D: of(D, "window_4", "between base and window_8", WINDOW=4),
        lambda D: of(D, "window_12", "-1 %", WINDOW=12),
        lambda D: of(D, "window_16", "-3 to -8 %, as the study found", WINDOW=16),
        lambda D: of(D, "window_8_later", "window_8 and rescale_later together: +1 to +3 %", WINDOW=8, RESCALE=3),
        lambda D: of(D, "bc_96", "-3 %: more steps, fewer registers", BC=96),
        lambda D: of(D, "heads_64MB", "0", L2_MB=64),
        lambda D: of(D, "heads_16MB", "0", L2_MB=16),
    ]  # fmt: skip
    D128 = [
        of(
            128,
            "q_reg",
            "Q_i in registers, a third less shared memory read: 0 to +1 % by power; D64 has no room",
            Q_REG=1,
        ),
        of(128, "free_q_reg", "free +1 % by power", FREE=1, Q_REG=1),
        of(128, "3_consumers_bc_80", "-3 %", CONSUMERS=3, BC=80),
        of(128, "free_poly_1", "-1 % of free", FREE=1, POLY=1),
        of(128, "free_bc_112", "-2 % of free", FREE=1, BC=112),
    ]
    D64 = [
        of(64, "free_poly_1", "an eighth of the exponentials on the FMA pipe: +2 % of free", FREE=1, POLY=1),
        of(64, "free_poly_2", "+2 % of free, or less", FREE=1, POLY=2),
        of(64, "free_2_consumers", "-5 % of free at N >= 4096, better at 1024", FREE=1, CONSUMERS=2),
        of(64, "free_2_consumers_bc_192", "-3 % of free", FREE=1, CONSUMERS=2, BC=192),
        of(64, "2_consumers", "-10 % at N >= 4096, better at 1024", CONSUMERS=2),
        of(64, "free_bc_96", "-2 % of free", FREE=1, BC=96),
        of(64, "poly_1", "0", POLY=1),
    ]
    rungs = [
        Variant("rung_32", 128, "as base, which it is without the macros", file="32_ping_pong", flash=True),
        Variant("rung_32", 64, "as base", file="32_ping_pong", flash=True),
        Variant("rung_30", 128, "0.80 x CUDNN, 1.5 x FLASH", file="30_tma_wgmma", flash=True),
        Variant("rung_30", 64, "0.80 x CUDNN, 1.4 x FLASH", file="30_tma_wgmma", flash=True),
        Variant("rung_31", 128, "0.95 x CUDNN", file="31_warp_specialized", flash=True),
        Variant("rung_31", 64, "0.95 x CUDNN", file="31_warp_specialized", flash=True),
        Variant(
            "rung_30_bc_64", 64, "-5 % of rung_30: issue slots", file="30_tma_wgmma", replace=(("d == 64 ? 96", "d == 64 ? 64"),)
        ),
        Variant(
            "rung_30_3_warpgroups",
            64,
            "as rung_30",
            file="30_tma_wgmma",
            replace=(("warpgroups = 2", "warpgroups = 3"), ("d == 64 ? 96", "d == 64 ? 128"), ("ctas = d == 64 ? 2", "ctas = d == 64 ? 1")),
        ),
        Variant("rung_30_2_stages", 128, "-3 % of rung_30", file="30_tma_wgmma", replace=(("stages = 3", "stages = 2"),)),
        Variant("rung_31_2_consumers", 64, "-10 % of rung_31", file="31_warp_specialized",
                replace=(("d == 64 ? 3 : 2", "2"), ("d == 64 ? 160 : 240", "240"), ("d == 64 ? 32 : 24", "24"))),
    ]  # fmt: skip
    first, last = both[:5], both[5:]
    ordered = [make(D) for make in first for D in (128, 64)] + rungs[:6] + D64[:2] + D128[:2]
    return ordered + [make(D) for make in last for D in (128, 64)] + D64[2:] + D128[2:] + rungs[6:]


# --- building


@dataclass
class Built:
    """What nvcc made of a variant; `library` is None if it refused, and `words` says why."""

    library: str | None = None
    seconds: float = 0.0
    registers: int = 0
    spilled: int = 0
    warnings: str = ""
    exponentials: str = ""  # MUFU.EX2 between the waits of the main loop
    words: str = ""


def source_of(variant: Variant) -> str:
    folder = HERE if (HERE / f"{variant.file}.cu").exists() else HERE.parent
    text = (folder / f"{variant.file}.cu").read_text()
    for old, new in variant.replace:
        if text.count(old) != 1:
            raise ValueError(f"{variant.label}: {old!r} stands {text.count(old)} times in {variant.file}.cu")
        text = text.replace(old, new)
    return text


def header_for(variant: Variant, folder: Path) -> None:
    """fa/wgmma.cuh with the N this variant needs, found before the checked-in one."""
    import importlib.util

    generator = ROOT / "kernels" / "include" / "fa" / "wgmma.py"
    spec = importlib.util.spec_from_file_location("wgmma", generator)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (folder / "fa").mkdir()
    (folder / "fa" / "wgmma.cuh").write_text(
        module.header((*module.COLUMNS, *{variant.define.get("BC", 128)} - {*module.COLUMNS}))
    )


def build(variant: Variant, folder: Path, link: bool) -> Built:
    from helpers import sass
    from helpers.build import _cudart_folder
    from helpers.toolkit import NVCC_FLAGS, find_compiler, find_toolkit, gencode

    start = time.perf_counter()
    toolkit = find_toolkit()
    work = folder / re.sub(r"\W", "_", variant.label)
    work.mkdir()
    header_for(variant, work)
    source, library = work / "kernel.cu", work / ("kernel.so" if link else "kernel.cubin")
    source.write_text(source_of(variant))
    flags = [flag for flag in NVCC_FLAGS if not flag.startswith("--split")] + [gencode("sm_90a")]
    flags += [f"-I{work}", f"-I{ROOT / 'kernels' / 'include'}", f"-DONLY_D={variant.D}", "-ccbin", find_compiler()]
    flags += [f"-D{name}={value}" for name, value in variant.define.items()]
    flags += (
        ["-shared", "-Xcompiler", "-fPIC", "-cudart", "shared", "-cudadevrt", "none", f"-L{_cudart_folder(toolkit)}"]
        if link
        else ["-cubin"]
    )
    done = subprocess.run(
        [toolkit.nvcc, *flags, source, "-o", library], capture_output=True, text=True, timeout=170, check=False
    )
    log = done.stderr + done.stdout
    if done.returncode:
        first = re.search(r".*\berror\b.*", log)
        return Built(words=first[0] if first else log[-200:], seconds=time.perf_counter() - start)
    used = sass.parse_ptxas(log)
    mine = used[[bool(re.search(rf"<{variant.D}[,>]", name)) and "bfloat16" in name for name in used.index]].max()
    codes = sorted(set(re.findall(r"\((C75\d\d)\)", log)))
    tool = next(
        (p for p in (toolkit.home / "bin" / "cuobjdump", Path("/usr/local/cuda/bin/cuobjdump")) if p.exists()),
        "cuobjdump",
    )
    try:
        listing = subprocess.run([tool, "-sass", library], capture_output=True, text=True, timeout=60).stdout
        exponentials = between_waits(sass._code(listing), variant.D)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        exponentials = f"? ({error})"
    return Built(
        str(library),
        time.perf_counter() - start,
        int(mine.registers),
        int(mine.spill_store_bytes + mine.spill_load_bytes),
        " ".join(codes),
        exponentials,
    )


def between_waits(code: dict[str, list[tuple[int, str, str]]], D: int) -> str:
    """MUFU.EX2 of the bf16 kernel's main loop, cut at every wait for wgmma: "0|66" is none before the second wait."""
    lines = next(lines for name, lines in code.items() if re.search(rf"<{D}[,>]", name) and "bfloat16" in name)
    loops = []
    for address, opcode, operands in lines:
        target = re.search(r"\b0x([0-9a-f]+)\s*$", operands) if opcode.startswith("BRA") else None
        if target and (start := int(target[1], 16)) < address:
            loop = [line for line in lines if start <= line[0] <= address]
            products = sum(line[1].startswith("HGMMA") for line in loop)
            if products:
                loops.append((-products, len(loop), loop))
    if not loops:
        return "no loop"
    most = max(-loop[0] for loop in loops)
    loop = min((x for x in loops if -x[0] >= most / 2), key=lambda x: x[1])[
        2
    ]  # the inner one, not that of the query tiles
    counts = [0]
    for _, opcode, _ in loop:
        if opcode.startswith("WARPGROUP.DEPBAR"):
            counts.append(0)
        counts[-1] += opcode.startswith("MUFU.EX2")
    return "|".join(map(str, counts))


# --- a worker: one variant, in a process of its own


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


class Library:
    """A built variant as helpers.kernel takes a launcher."""

    backend, cached, resources = "nvcc", True, None

    def __init__(self, path: str) -> None:
        self._launch = ctypes.CDLL(path).fa_launch
        self._launch.restype = ctypes.c_int

    def launch(self, args: ctypes.Structure, tensors: dict, stream: int = 0) -> None:
        if code := self._launch(ctypes.byref(args), ctypes.c_void_p(stream)):
            from helpers.errors import KernelError
            from helpers.jit import cuda_error

            raise KernelError(cuda_error(code))


def check_cases(D: int):
    """A few that every part of the kernel has to be right for."""
    import torch

    from helpers.reference import DTYPES, Case

    generator = torch.Generator("cuda").manual_seed(0)

    def qkv(B: int, H: int, Hkv: int, Nq: int, Nk: int, dtype: str) -> list:
        shapes = ((B, H, Nq, D), (B, Hkv, Nk, D), (B, Hkv, Nk, D))
        return [torch.randn(shape, generator=generator, device="cuda").to(DTYPES[dtype]) for shape in shapes]

    for dtype in ("bf16", "fp16"):
        yield Case(f"N=1024, {dtype}", *qkv(2, 20, 20, 1024, 1024, dtype))  # several query tiles for a CTA
        yield Case(f"causal, N=1024, {dtype}", *qkv(2, 20, 20, 1024, 1024, dtype), causal=True)
        yield Case(f"777 x 1300, {dtype}", *qkv(1, 3, 3, 777, 1300, dtype))
        yield Case(f"causal, 1300 x 777, {dtype}", *qkv(1, 3, 3, 1300, 777, dtype), causal=True)
        yield Case(f"6 heads on 2, causal, {dtype}", *qkv(2, 6, 2, 500, 700, dtype), causal=True)
        yield Case(f"scale -0.3, {dtype}", *qkv(1, 2, 2, 300, 300, dtype), causal=True, scale=-0.3)
        yield Case(f"one row, {dtype}", *qkv(1, 2, 2, 1, 1, dtype))
        for slope in (40.0, -40.0):  # the maximum moves with every tile
            q, k, v = qkv(1, 2, 2, 900, 900, dtype)
            q[..., 0], k[..., 0] = D**0.5, torch.linspace(0, slope, 900, device="cuda").to(k.dtype)
            yield Case(f"slope {slope}, {dtype}", q, k, v)


def work(variant: Variant, library: str) -> None:
    """Checks and times; every finding is a line of JSON. Waits for a line on stdin before it uses the GPU."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from helpers import check
    from helpers.bench import measure
    from helpers.kernel import Kernel
    from helpers.ladder import parse
    from helpers.reference import DTYPES

    torch.ones(1, device="cuda")
    say(ready=True)
    sys.stdin.readline()

    rung = parse(source_of(variant), Path(f"{variant.file}.cu"))
    kernel = Kernel(rung, "cuda", Library(library), 0.0)
    report = check(kernel, check_cases(variant.D))
    wrong = [c for c in report.comparisons if not c.ok]
    say(
        checked=len(report.comparisons),
        wrong=[c.explain().split("\n")[0] for c in wrong][:3],
        used=max(c.used for c in report.comparisons),
    )

    def sdpa(backend, causal, q, k, v):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    for N, causal in POINTS:
        torch.manual_seed(N)
        shape = (16384 // N, 2048 // variant.D, N, variant.D)
        inputs = [torch.randn(shape, device="cuda", dtype=DTYPES[HEADLINE]) for _ in range(3)]
        calls = {"kernel": lambda q, k, v, c=causal: kernel(q, k, v, causal=c)}
        calls["CUDNN"] = lambda q, k, v, c=causal: sdpa(SDPBackend.CUDNN_ATTENTION, c, q, k, v)
        if variant.flash:
            calls["FLASH"] = lambda q, k, v, c=causal: sdpa(SDPBackend.FLASH_ATTENTION, c, q, k, v)
        samples = measure(calls, inputs, rounds=7, burst_ms=3.0, seed=N)
        ms = samples.groupby("name").ms.median()
        ratios = samples.pivot(index="round", columns="name", values="ms")
        ratios = ratios["CUDNN"] / ratios["kernel"]
        flops = 4 * shape[0] * shape[1] * N * N * variant.D * (0.5 if causal else 1)
        say(
            N=N, causal=causal, us=round(ms["kernel"] * 1e3, 2), tflops=round(flops / ms["kernel"] / 1e9, 1),
            x_cudnn=round(ms["CUDNN"] / ms["kernel"], 4), x_cudnn_low=round(ratios.min(), 4), x_cudnn_high=round(ratios.max(), 4),
            x_flash=round(ms["FLASH"] / ms["kernel"], 4) if variant.flash else None,
        )  # fmt: skip
    say(done=True)


# --- the parent


def lines_of(process: subprocess.Popen, seconds: float):
    """The worker's lines of JSON until it ends; TimeoutError if it is silent for longer than its share."""
    buffer, deadline = b"", time.monotonic() + seconds
    while True:
        if b"\n" in buffer:
            line, _, buffer = buffer.partition(b"\n")
            try:
                yield json.loads(line)
            except ValueError:
                continue  # a library's chatter
            deadline = time.monotonic() + seconds
            continue
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        piece = os.read(process.stdout.fileno(), 1 << 16)
        if not piece:
            return
        buffer += piece


def run(variant: Variant, built: Built, gpu: threading.Lock, end: float) -> list[dict]:
    """The rows of one variant; one row that says why if there are none."""
    row = {"variant": variant.name, "D": variant.D, "dtype": HEADLINE, **asdict(built), "expected": variant.expected}
    row = {k: v for k, v in row.items() if k not in ("library", "words")} | {"build_s": round(row.pop("seconds"), 1)}
    row.pop("seconds", None)
    if built.library is None:
        return [row | {"status": f"not built: {built.words}"}]
    if time.monotonic() > end:
        return [row | {"status": "no time left"}]
    command = [sys.executable, __file__, "--worker", json.dumps(asdict(variant)), built.library]
    rows, status, errors = [], "ok", tempfile.TemporaryFile()
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors)
    try:
        for said in lines_of(process, 120):  # importing
            if said.get("ready"):
                break
        with gpu:
            if time.monotonic() > end:
                return [row | {"status": "no time left"}]
            try:
                process.stdin.write(b"go\n")
                process.stdin.flush()
                for said in lines_of(process, max(CHECK_SECONDS, TIME_SECONDS)):
                    if "checked" in said:
                        row["error_used"] = round(said["used"], 3)
                        if said["wrong"]:
                            status = "wrong: " + "; ".join(said["wrong"])
                    elif "N" in said:
                        rows.append(row | said)
                    elif said.get("done"):
                        break
                else:
                    errors.seek(0)
                    last = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                    status = f"died: {last[0] if last else process.wait()}"
            finally:
                process.kill()  # and with it, what hangs on the GPU
                process.wait()
    except TimeoutError:
        status = "hung"
    except OSError as error:
        status = f"died: {error}"
    finally:
        process.kill()
        process.wait()
        errors.close()
    return [r | {"status": status} for r in rows] or [row | {"status": status}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument(
        "--only", default="", help="a regular expression that the variant's name and D match, as 'free.* D64'"
    )
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        fields = json.loads(options.worker[0])
        fields["replace"] = tuple(map(tuple, fields["replace"]))
        return work(Variant(**fields), options.worker[1])

    import pandas as pd

    start = time.monotonic()
    end = start + options.seconds
    chosen = [v for v in variants() if re.search(options.only, v.label)]
    gpu = threading.Lock()
    folder = Path(tempfile.mkdtemp(prefix="hopper-variants-"))
    rows: dict[str, list[dict]] = {}
    out = Path(os.environ.get("OUT", folder)) / "hopper_variants.csv"

    def one(variant: Variant, built) -> None:
        try:
            made = built.result()
            if options.build_only:
                state = "built" if made.library else f"not built: {made.words}"
                rows[variant.label] = [{"variant": variant.name, "D": variant.D, **asdict(made), "status": state}]
            else:
                rows[variant.label] = run(variant, made, gpu, end)
        except Exception as error:  # of one variant: the others go on
            rows[variant.label] = [
                {"variant": variant.name, "D": variant.D, "status": f"{type(error).__name__}: {error}"}
            ]
        ordered = [row for v in chosen for row in rows.get(v.label, [])]
        pd.DataFrame(ordered).to_csv(out, index=False)  # after every variant: whatever comes, these are kept

    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) - 2)) as builders, ThreadPoolExecutor(AHEAD) as runners:
        builds = [(v, builders.submit(build, v, folder, not options.build_only)) for v in chosen]
        for future in [runners.submit(one, v, built) for v, built in builds]:
            future.result()

    frame = pd.DataFrame([row for v in chosen for row in rows.get(v.label, [])])
    pd.set_option(
        "display.width", 250, "display.max_rows", None, "display.max_columns", None, "display.max_colwidth", 70
    )
    if options.build_only or "x_cudnn" not in frame:
        keep = ["variant", "D", "registers", "spilled", "warnings", "exponentials", "seconds", "status"]
        print(frame[[c for c in keep if c in frame]].to_string(index=False))
    else:
        frame["point"] = [f"{int(N)}{'c' * bool(c)}" if N == N else "" for N, c in zip(frame.N, frame.causal)]
        table = frame.pivot_table(index=["D", "variant"], columns="point", values="x_cudnn")
        table = table[[f"{N}{'c' * c}" for c in (0, 1) for N in (512, 1024, 4096, 16384) if f"{N}{'c' * c}" in table]]
        long = [c for c in table if not c.startswith("512")]
        table["geomean"] = table[long].prod(axis=1) ** (1 / len(long))
        facts = frame.groupby(["D", "variant"])[["exponentials", "spilled", "error_used", "status"]].first()
        print("x SDPA CUDNN, bf16; c: causal")
        print(
            table.join(facts, how="right").sort_values(["D", "geomean"], ascending=[True, False]).round(3).to_string()
        )
        if "x_flash" in frame:
            print("x SDPA FLASH")
            print(
                frame.dropna(subset="x_flash")
                .pivot_table(index=["D", "variant"], columns="point", values="x_flash")
                .round(3)
                .to_string()
            )
    print(f"{time.monotonic() - start:.0f} s; {out}")


if __name__ == "__main__":
    main()
