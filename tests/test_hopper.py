"""Rungs 30 to 32 and the headers they are written with: generated code in step with its generator, and what nvcc makes of them."""

from __future__ import annotations

import importlib.util

from helpers.ladder import INCLUDE


def generator():
    """kernels/include/fa/wgmma.py as a module."""
    spec = importlib.util.spec_from_file_location("wgmma", INCLUDE / "fa" / "wgmma.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_wgmma_cuh_is_what_its_generator_writes():
    wgmma = generator()
    assert wgmma.HEADER.read_text() == wgmma.header(), "run: python kernels/include/fa/wgmma.py"
