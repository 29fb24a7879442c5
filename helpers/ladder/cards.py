"""Which rungs run on which GPU, by compute capability: what the header block's `arch` and `dtypes` mean there."""

from __future__ import annotations

from dataclasses import replace

from .rung import Rung

OLDEST = (7, 5)  # nvcc 13 compiles for nothing older
BF16_FROM = (8, 0)  # Turing's tensor cores take fp16 alone

Capability = tuple[int, int]  # (8, 6): major, minor


def capability(arch: str) -> Capability:
    """The compute capability of an architecture: (9, 0) of sm_90a."""
    return divmod(int(arch.removeprefix("sm_").rstrip("a")), 10)


def refusal(rung: Rung, has: Capability) -> str:
    """Why a GPU of this compute capability can't run the rung, in one sentence; empty if it can.

    refusal(rung("32"), (12, 0))
    """
    its, exactly = max(capability(rung.arch), OLDEST), rung.arch.endswith("a")
    if has >= its and not (exactly and has != its):
        return ""
    needs = f"{its[0]}.{its[1]}{' exactly' if exactly else ''}"
    return f"{rung.stem} needs compute capability {needs}, this GPU has {has[0]}.{has[1]}: it runs on the emulator, device='cpu'"


def on(rung: Rung, has: Capability) -> Rung:
    """The rung with the dtypes that a GPU of this compute capability takes."""
    return rung if has >= BF16_FROM else replace(rung, dtypes=tuple(d for d in rung.dtypes if d != "bf16"))
