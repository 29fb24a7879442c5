"""The naive kernel of notebook 04, with its loops in either order."""

from itertools import islice

import pytest
import torch

from helpers import check, loop_order, reference, traffic


def test_both_orders_are_right_and_the_second_loads_two_tiles_where_the_first_loads_one():
    inputs, moved = [torch.randn(1, 1, 256, 64) for _ in range(3)], {}
    for outside in ("keys", "queries"):
        kernel = loop_order.naive(outside)
        check(kernel, list(islice(reference.cases(kernel.rung, kernel.device), 6))).require()
        moved[outside] = traffic(kernel, *inputs).reads_per_byte[["Q", "K", "V"]].tolist()
    assert moved == {"keys": [8, 1, 1], "queries": [1, 8, 8]}


def test_another_order_is_refused():
    with pytest.raises(ValueError, match="'rows'"):
        loop_order.naive("rows")
