"""Training of a small GPT on the manual of Python, once for each way to attend; `python -m helpers record training` records it.

The text is that of `pydoc_data.topics`, which every Python carries for `help("for")`: the reference manual, by the Python
Software Foundation, under the PSF licence. Its length and SHA-256 are part of a record: it differs from version to version.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import cross_entropy

from .. import record
from ..ladder.rung import rung
from ..run.kernel import cuda_refusal
from . import gpt
from .gpt import GPT, Attention, Size

STEM = "24_in_a_model"
# whose code a record of this model depends on
RUNGS = ("20_causal_gqa", "21_split_kv", "23_backward_mma", "32_ping_pong", "33_backward_wgmma")
HELD_OUT = 0.1  # of the text, its end: never trained on
AHEAD = 3  # steps before one is captured: then kernels are compiled, libraries have their workspaces, the optimizer its state
WARM_UP = 20  # steps that no speed is taken from
PROFILED = 20  # steps whose kernels are timed one by one
RUN = ["name", "seed", "round", "graph"]  # what tells a run of a record from the others
# What a GPU's kernels are for, by a pattern of their names: ours, FlashAttention's and cuDNN's
PARTS = {
    "attention, forward": r"flash_fwd|fprop|causal_gqa|ping_pong",
    "attention, backward": r"flash_bwd|bprop|dot_do_o|convert_dq|fmha_reduce|backward_w?g?mma"
    r"|\b(?:prepare|finish|add_heads)<",
}


@dataclass(frozen=True)
class Plan:
    """What is trained, for how long, and the text that is asked of it then. One step sees batch * length bytes."""

    size: Size
    length: int  # of a training sequence
    batch: int
    steps: int
    rate: float  # of AdamW at its highest
    prompts: tuple[bytes, ...] = (b'The "for" statement', b"Changed in version 3.", b"A class definition is ")
    bytes: int = 256  # to write after each prompt
    dtype: torch.dtype = torch.bfloat16  # of the products in training


TOY = Plan(Size(layers=2, heads=2, kv_heads=1, context=512), length=128, batch=2, steps=30, rate=1e-3, bytes=40)
SMALL = Plan(Size(layers=6, heads=8, kv_heads=2, context=4096), length=4096, batch=4, steps=300, rate=1e-3)


def plan(device: str) -> Plan:
    """SMALL on a GPU, TOY on the emulator."""
    return SMALL if device == "cuda" else TOY


def manual() -> bytes:
    """The reference manual of the Python that runs, topic by topic in alphabetical order: about half a megabyte."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def split(text: bytes) -> tuple[Tensor, Tensor]:
    """The text as two tensors of byte values: what is trained on, and its end, which is held out."""
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = int(len(values) * (1 - HELD_OUT))
    return values[:cut], values[cut:]


def batches(values: Tensor, plan: Plan, seed: int) -> Tensor:
    """(steps, batch, length + 1): random pieces of the text; the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(values) - plan.length, (plan.steps, plan.batch, 1), generator=generator)
    return values[starts + torch.arange(plan.length + 1)]


def loss(model: GPT, pieces: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean cross-entropy, in nats per byte, of each byte of pieces (batch, length + 1) given those before it; products in dtype."""
    with torch.autocast(pieces.device.type, dtype, enabled=dtype != torch.float32):
        logits = model(pieces[:, :-1])
    return cross_entropy(logits.flatten(0, 1), pieces[:, 1:].flatten())


@dataclass
class Run:
    """A trained model; steps: step, loss, ms (on a GPU, else empty); bytes: the peak allocated (on a GPU); held_out: the loss on
    text it has never seen."""

    model: GPT
    steps: pd.DataFrame
    bytes: int | None
    held_out: float


def train(attention: Attention, plan: Plan, device: str, seed: int = 0, graph: bool = False) -> Run:
    """Trains a new model. Parameters and batches depend on the seed alone, so that runs differ by their attention only.

    AdamW (Loshchilov and Hutter 2019) in float32, products in plan.dtype; the rate rises for a tenth of the steps, then falls to 0.
    `graph`, on a GPU only: the steps after the first AHEAD are replays of one that was captured.
    """
    on_gpu = device == "cuda"
    seen, unseen = split(manual())
    pieces = batches(seen, plan, seed).to(device)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    model, optimizer = _new(attention, plan, device, seed)
    rates = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.rate, plan.steps, pct_start=0.1, anneal_strategy="linear", cycle_momentum=False
    )
    step = partial(_step, model, optimizer, plan.dtype)
    with _own_stream(on_gpu):
        losses, marks = [], [_mark(on_gpu)]
        for n, piece in enumerate(pieces):
            if graph and n == AHEAD:
                step = captured(step, piece)
            losses.append(step(piece))
            rates.step()
            marks.append(_mark(on_gpu))
    steps = pd.DataFrame({"step": range(plan.steps), "loss": torch.stack(losses).cpu().numpy()})
    steps["ms"] = [a.elapsed_time(b) for a, b in zip(marks, marks[1:])] if on_gpu else None
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else None
    test = replace(plan, steps=4)
    with torch.no_grad():
        held_out = torch.stack([loss(model, p, plan.dtype) for p in batches(unseen, test, 0).to(device)]).mean()
    return Run(model, steps, peak, held_out.item())


def _new(attention: Attention, plan: Plan, device: str, seed: int) -> tuple[GPT, torch.optim.Optimizer]:
    """The model and its optimizer. The rate is a tensor: a number would be captured with the step, as it was then."""
    torch.manual_seed(seed)
    model = GPT(plan.size, attention).to(device)
    rate = torch.tensor(plan.rate, device=device)
    return model, torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.95), fused=True, capturable=True)


def _step(model: GPT, optimizer: torch.optim.Optimizer, dtype: torch.dtype, piece: Tensor) -> Tensor:
    """Learns from one batch; its loss before that. Nothing in it asks the GPU for a value, or a graph couldn't hold it.

    The backward pass stays in this thread. In autograd's own, Python takes twice as long, and our operators are Python."""
    now = loss(model, piece, dtype)
    with torch.autograd.set_multithreading_enabled(False):
        now.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return now.detach()


def captured(step: Callable[[Tensor], Tensor], piece: Tensor) -> Callable[[Tensor], Tensor]:
    """`step` as a CUDA graph. It is called once more, and its kernels are not run but noted, arguments and all; from then on one
    call of the host launches every one of them. Addresses are among the arguments: each batch is copied to where the first one lay,
    and its loss from where the first one's was to go."""
    place, graph = piece.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        found = step(place)

    def replay(piece: Tensor) -> Tensor:
        place.copy_(piece)
        graph.replay()
        return found.clone()

    return replay


@contextmanager
def _own_stream(on_gpu: bool) -> Iterator[None]:
    """A stream beside the default one, from which nothing can be captured."""
    if not on_gpu:
        yield
        return
    before, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(before)
    with torch.cuda.stream(own):
        yield
    before.wait_stream(own)


def _mark(on_gpu: bool) -> torch.cuda.Event | None:
    """This place in the GPU's queue; nothing waits for it."""
    if not on_gpu:
        return None
    mark = torch.cuda.Event(enable_timing=True)
    mark.record()
    return mark


def compare(model: GPT, plan: Plan, kernels: Attention) -> pd.DataFrame:
    """What one model writes with SDPA and with our kernels: prompt, place, the byte by `sdpa` and by `kernels`; margin, by how much
    SDPA's likeliest byte leads the next, and apart, the largest difference between logits. Where two texts have parted,
    their logits answer different questions: margin and apart are empty from the place after on."""
    found = {}
    for name, attention in (("sdpa", gpt.sdpa()), ("kernels", kernels)):
        model.attention = attention
        found[name] = gpt.generate(model, plan.prompts, plan.bytes)
    (sdpa, logits), (ours, others) = found["sdpa"], found["kernels"]
    best = logits.topk(2).values
    parted = (sdpa != ours).long().cumsum(1) - (sdpa != ours).long() > 0
    margin = (best[..., 0] - best[..., 1]).masked_fill(parted, torch.nan)
    apart = (logits - others).abs().amax(-1).masked_fill(parted, torch.nan)
    B, count = sdpa.shape
    places = torch.cartesian_prod(torch.arange(B), torch.arange(count))
    frame = pd.DataFrame(places.numpy(), columns=["prompt", "place"])
    columns = {"sdpa": sdpa, "kernels": ours, "margin": margin, "apart": apart}
    return frame.assign(**{name: x.flatten().cpu().numpy() for name, x in columns.items()})


# Speed of writing

WRITING = ((1, 2048), (16, 2048))  # sequences written at once, and how many bytes of each are in the cache already


def _write(model: GPT, cache: gpt.Cache, dtype: torch.dtype, token: Tensor) -> Tensor:
    """The likeliest next byte of each sequence (B,1), after `token` (B,1). Nothing in it asks the GPU for a value."""
    with torch.autocast(token.device.type, dtype):
        logits = model(token, cache)[:, 0]
    cache.keep(1)
    return logits.argmax(-1, keepdim=True)


@torch.no_grad()
def writing(plan: Plan, device: str, rounds: int = 7, steps: int = 64, shapes: Sequence = WRITING) -> pd.DataFrame:
    """How long a new byte of every sequence takes by SDPA and by our kernels, launched one by one and as a CUDA graph: name, graph,
    B, filled (bytes in each cache at the start), round, ms (of one step, the mean of a burst of `steps`; empty on the emulator).

    The model is new: what it writes makes no difference to the time. The ways take turns in random order."""
    on_gpu, ready = device == "cuda", []
    with _own_stream(on_gpu):
        for (B, filled), (name, attention) in product(shapes, {"SDPA": gpt.sdpa(), "rung 21": gpt.kernels()}.items()):
            torch.manual_seed(0)
            model = GPT(plan.size, attention).to(device)
            cache, token = gpt.Cache(plan.size, B, torch.float16, device), torch.full((B, 1), 32, device=device)
            cache.k.normal_(), cache.v.normal_(), cache.keep(filled)
            step = partial(_write, model, cache, torch.float16)
            for _ in range(AHEAD):
                token = step(token)
            ready.append((name, 0, B, filled, cache, step, token))
            if on_gpu:
                ready.append((name, 1, B, filled, cache, captured(step, token), token))
        rows, order = [], random.Random(0)
        for round in range(rounds):
            for name, graph, B, filled, cache, step, token in order.sample(ready, len(ready)):
                cache.lengths.fill_(filled)
                begin = _mark(on_gpu)
                for _ in range(steps):
                    token = step(token)
                rows.append((name, graph, B, filled, round, begin, _mark(on_gpu)))
    if on_gpu:
        torch.cuda.synchronize()
    frame = pd.DataFrame(rows, columns=["name", "graph", "B", "filled", "round", "begin", "end"])
    frame["ms"] = [a.elapsed_time(b) / steps for a, b in zip(frame["begin"], frame["end"])] if on_gpu else None
    return frame.drop(columns=["begin", "end"])


def writing_speeds(found: pd.DataFrame) -> pd.DataFrame:
    """Of `writing`: bytes per second, the median of the rounds with the slowest and the fastest; a row per way, B and filled."""
    frame = found.assign(way=found["name"] + found["graph"].map({0: "", 1: ", as a graph"}))
    ms = frame.astype({"ms": "float64"}).groupby(["B", "filled", "way"])["ms"]
    B = ms.median().index.get_level_values("B")
    return pd.DataFrame(
        {"bytes_per_s": 1000 * B / ms.median(), "low": 1000 * B / ms.max(), "high": 1000 * B / ms.min()}
    )


def texts(written: pd.DataFrame, prompts: Sequence[bytes]) -> list[str]:
    """What `compare` found written by our kernels, each text behind its prompt; what is no UTF-8 becomes U+FFFD."""
    found = written.groupby("prompt")["kernels"].apply(bytes)
    return [(prompt + found[p]).decode(errors="replace") for p, prompt in enumerate(prompts)]


# Recording


def ours(device: str) -> dict[str, Attention]:
    """Our kernels by the numbers of their rungs, forward and backward: those for any GPU and the emulator; last, where `device` is a
    Hopper GPU, those for Hopper."""
    found = {"rungs 20 and 23": gpt.kernels()}
    if device == "cuda" and not cuda_refusal(rung("32_ping_pong")):
        found["rungs 32 and 33"] = gpt.kernels("32_ping_pong")
    return found


def ways(device: str) -> list[tuple[str, Attention, int, int, int]]:
    """The runs of a record, in the order in which they take turns: name, attention, seed, round, graph. What our kernels change in a
    curve is judged by what else changes it: nothing at all (a second round), another kernel of PyTorch's, another seed. On a
    GPU every way trains once more with its step as a graph."""
    both = {"SDPA FLASH": gpt.sdpa(SDPBackend.FLASH_ATTENTION)} | ours(device)
    other = ("SDPA CUDNN", SDPBackend.CUDNN_ATTENTION) if device == "cuda" else ("SDPA MATH", SDPBackend.MATH)
    every = both | {other[0]: gpt.sdpa(other[1])}
    return [
        *[(name, attention, 0, round, 0) for round in (0, 1) for name, attention in both.items()],
        (other[0], every[other[0]], 0, 0, 0),
        ("SDPA FLASH", both["SDPA FLASH"], 1, 0, 0),
        *[(name, attention, 0, 0, 1) for name, attention in every.items() if device == "cuda"],
    ]


def train_all(plan: Plan, device: str, rounds: int = 2) -> tuple[pd.DataFrame, pd.DataFrame, GPT]:
    """Trains in all these ways; prints a line on each.

    The losses of all runs (name, seed, round, graph, step, loss, ms), a row on each run (name, seed, round, graph, tokens per
    step, bytes, held_out), and the model trained with the last of `ours`. What PyTorch refuses is left out; attrs["skipped"] of
    the second says why.
    """
    mine, model = [*ours(device)], None
    losses, rows, skipped = [], [], []
    for name, attention, *variant in ways(device):
        of_run = dict(zip(RUN, (name, *variant), strict=True))
        if of_run["round"] >= rounds:
            continue
        try:
            run = train(attention, plan, device, of_run["seed"], bool(of_run["graph"]))
        except RuntimeError as error:
            if name in ("SDPA FLASH", *mine):
                raise
            skipped.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        losses.append(run.steps.assign(**of_run)[[*of_run, "step", "loss", "ms"]])
        rows.append(of_run | {"tokens": plan.batch * plan.length, "bytes": run.bytes, "held_out": run.held_out})
        model = run.model if name == mine[-1] else model
        last = run.steps["loss"].iloc[-1]
        print(f"{label(**of_run)}: {last:.4f} nats per byte after {plan.steps} steps", flush=True)
    runs = pd.DataFrame(rows)
    runs.attrs["skipped"] = skipped
    return pd.concat(losses, ignore_index=True), runs, model


def profile(plan: Plan, steps: int = PROFILED) -> pd.DataFrame:
    """The GPU's kernels in a training step of each way to attend, by torch.profiler: name, kernel, calls and ms, both per step. The
    profiler slows the host down, and a kernel hardly."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    rows = []
    for name, attention, *variant in ways("cuda"):
        if any(variant):
            continue
        model, optimizer = _new(attention, plan, "cuda", seed=0)
        pieces = batches(split(manual())[0], plan, seed=0)[: 2 + steps].to("cuda")
        for piece in pieces[:2]:  # the first call of everything
            _step(model, optimizer, plan.dtype, piece)
        with profiler(activities=[ProfilerActivity.CUDA]) as seen:
            for piece in pieces[2:]:
                _step(model, optimizer, plan.dtype, piece)
            torch.cuda.synchronize()
        rows += [
            (name, event.key, event.count / steps, event.self_device_time_total / steps / 1e3)
            for event in seen.key_averages()
            if event.self_device_time_total
        ]
    return pd.DataFrame(rows, columns=["name", "kernel", "calls", "ms"])


def tables(plan: Plan, device: str) -> tuple[dict[str, pd.DataFrame], dict]:
    """The samples of every kind of a record (data/README.md), and what to keep beside its conditions."""
    training, runs, model = train_all(plan, device)
    source = manual()
    extra = {
        "plan": asdict(plan) | {"dtype": str(plan.dtype), "prompts": [p.decode() for p in plan.prompts]},
        "source": {
            "name": "pydoc_data.topics, Python Software Foundation, PSF licence",
            "bytes": len(source),
            "sha256": hashlib.sha256(source).hexdigest(),
        },
        "method": "one run after the other; CUDA events around every step; graph 1: steps are replays of one that was captured",
        "skipped": runs.attrs.pop("skipped"),
    }
    found = {"training": training, "runs": runs, "text": compare(model, plan, [*ours(device).values()][-1])}
    if device == "cuda":
        found |= {"profile": profile(plan), "writing": writing(plan, device)}
    return found, extra


def save(found: dict[str, pd.DataFrame], extra: dict, **options: object) -> list[Path]:
    """Records what `tables` gave; options are those of record.save."""
    return [record.save(STEM, kind, frame, extra=extra, rungs=RUNGS, **options) for kind, frame in found.items()]


def record_training() -> None:
    """Trains in every way on this machine's GPU, records it and prints what it says. RuntimeError without a GPU."""
    from ..measure.bench import require_gpu, watch

    require_gpu()
    begun = time.perf_counter()
    with watch() as seen:
        found, extra = tables(SMALL, "cuda")
    for path in save(found, extra | seen):
        print("wrote", path.name)
    print(speeds(found["training"], found["runs"]).round(3).to_string())
    print(yardstick(found["training"]).round(4).to_string())
    print(parts(found["profile"]).round(3).to_string())
    print(f"done in {time.perf_counter() - begun:.0f} s")


def record_writing() -> None:
    """Times on this machine's GPU how fast the model writes, records it and prints what it says. RuntimeError without a GPU."""
    from ..measure.bench import require_gpu, watch

    require_gpu()
    with watch() as seen:
        found = writing(SMALL, "cuda")
    extra = {"plan": asdict(SMALL) | {"dtype": str(SMALL.dtype), "prompts": [p.decode() for p in SMALL.prompts]}}
    for path in save({"writing": found}, extra | seen):
        print("wrote", path.name)
    print(writing_speeds(found).round(0).to_string())


# Reading


def recorded() -> dict[str, pd.DataFrame] | None:
    """The record's samples by kind; None, and a sentence, where this model has not been recorded yet. A sentence, too, where the
    kernels have changed since."""
    try:
        found = {kind: record.load(STEM, kind) for kind in ("training", "runs", "text", "profile")}
    except LookupError:
        print("not recorded on a GPU yet: `python -m helpers record training` on a machine with one does it")
        return None
    if any(frame["stale"].any() for frame in found.values()):
        print("stale: a kernel has changed since this was recorded")
    return found


def label(name: str, seed: int, round: int, graph: int) -> str:
    """A run in words: "SDPA FLASH, again"."""
    return name + (f", seed {seed}" if seed else "") + (", again" if round else "") + (", as a graph" if graph else "")


def by_run(training: pd.DataFrame) -> pd.DataFrame:
    """The losses side by side: index step, a column per run."""
    names = [label(*of_run) for of_run in training[RUN].itertuples(index=False)]
    return training.assign(run=names).pivot(index="step", columns="run", values="loss")[list(dict.fromkeys(names))]


def differences(training: pd.DataFrame) -> pd.DataFrame:
    """By how much each run's loss differs from that of the first SDPA FLASH, absolutely: index step, a column per other run."""
    wide = by_run(training)
    return wide.drop(columns="SDPA FLASH").sub(wide["SDPA FLASH"], axis=0).abs()


def yardstick(training: pd.DataFrame) -> pd.DataFrame:
    """Of `differences`, the mean over all steps, over the last half of them, and the largest; a row per run."""
    found = differences(training)
    late = found[found.index >= len(found) // 2]
    return pd.DataFrame({"mean": found.mean(), "mean of the last half": late.mean(), "largest": found.max()})


def speeds(training: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """A row per run: thousand tokens per second (median step after WARM_UP, and its quartiles), peak memory in GiB, held-out loss.

    Empty are the speed and the memory of a run on the emulator.
    """
    timed = training[training["step"] >= WARM_UP].astype({"ms": "float64"})
    ms = timed.groupby(RUN, sort=False)["ms"]
    frame = runs.set_index(RUN)
    columns = {"kilotokens_per_s": 0.5, "low": 0.75, "high": 0.25}
    found = pd.DataFrame({name: frame["tokens"] / ms.quantile(at) for name, at in columns.items()})
    found = found.assign(peak_gib=frame["bytes"].astype("float64") / 2**30, held_out=frame["held_out"])
    return found.set_axis([label(*of_run) for of_run in found.index])


def parts(profile: pd.DataFrame) -> pd.DataFrame:
    """Of `profile`, the milliseconds of a step that the GPU spends in each of PARTS and in everything else; a row per way."""
    part = pd.Series("everything else", index=profile.index)
    for name, pattern in PARTS.items():
        part[profile["kernel"].str.contains(pattern)] = name
    found = profile.assign(part=part).pivot_table("ms", "name", "part", "sum", sort=False)[[*PARTS, "everything else"]]
    return found.assign(all=found.sum(axis=1)).rename_axis(index=None, columns=None)
