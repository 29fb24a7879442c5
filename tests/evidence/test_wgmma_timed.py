"""The kernels that time wgmma: each variant is one kernel with that instruction, under way side by side, and its record is sound."""

import re

import pandas as pd
import pytest
import torch
from conditions import CARD

from helpers import load, record
from helpers.evidence import wgmma_timed
from helpers.record.schema import faults
from helpers.toolchain import sass


def test_each_variant_is_its_instruction_and_nothing_is_serialised():
    """A serialised wgmma has an ARRIVE and a wait of its own; here 16 share one."""
    text = sass.disassembly(wgmma_timed.kernel())
    bodies = text.split("Function : ")[1:]
    assert len(bodies) == len(wgmma_timed.variants()) // 2  # one or two warpgroups: the same code
    kinds = set()
    for body in bodies:
        products = re.findall(r"HGMMA\.64x(\d+)x16\.F32(\.BF16)? R\d+, (R\d+|gdesc\S+?), (.*?);", body)
        assert len(products) == 2 * 16 and body.count("WARPGROUP.ARRIVE") == 2  # warming up, and timed
        transposed = "tnspB" in body
        kinds |= {(int(N), bool(bf16), a.startswith("R"), transposed) for N, bf16, a, _ in products}
    assert len(kinds) == 24 and {N for N, *_ in kinds} == set(wgmma_timed.COLUMNS)


def test_the_place_in_the_list_is_what_the_launcher_decodes():
    for i, (dtype, N, warpgroups, B, A) in enumerate(wgmma_timed.variants()):
        place = wgmma_timed.DTYPES.index(dtype) * 24 + wgmma_timed.COLUMNS.index(N) * 8
        assert i == place + (warpgroups - 1) * 4 + (B == "MN") * 2 + (A == "registers")


def test_the_record_is_sound(tmp_path):
    frame = pd.DataFrame(wgmma_timed.variants(), columns=["dtype", "N", "warpgroups", "B_major", "A_in"])
    path = record.save("device", "wgmma", frame.assign(cycles=frame["N"] / 2), known=CARD, root=tmp_path)
    assert not faults(path)


@pytest.mark.gpu
def test_no_wgmma_is_faster_than_the_tensor_cores():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    kernel, x = load(wgmma_timed.kernel(), device="cuda", quiet=True), torch.zeros(1, 1, 16, 16, device="cuda")
    for i, (_, N, *_) in enumerate(wgmma_timed.variants()):
        assert float(kernel(x, x, x, scale=float(i))[0].view(-1)[0]) > 0.98 * 64 * N * 16 / 2048
