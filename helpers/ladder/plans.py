"""Repeated calls: one that differs from an earlier call in addresses alone needs no new checks."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any

from .contract import Call, FaArgs, prepare, workspace_of
from .rung import Rung

if TYPE_CHECKING:
    import torch

MOST = 64  # plans of a kernel: enough for a model, and a bound for lengths that change at every call


@dataclass(frozen=True)
class Plan:
    """A call without its tensors. inputs: name -> place among the tensors that the caller gives; outputs: name -> shape, strides
    and dtype; workspace: name -> shape."""

    args: FaArgs
    inputs: dict[str, int]
    outputs: dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]
    workspace: dict[str, list[int]]

    @classmethod
    def of(cls, call: Call, tensors: list[torch.Tensor]) -> Plan:
        """That of a call of these tensors. One of them may stand for several inputs: each has a place of its own."""
        free = dict(enumerate(tensors))
        inputs = {}
        for name, t in call.inputs.items():
            inputs[name] = next(place for place, given in free.items() if given is t)
            del free[inputs[name]]
        outputs = {name: (t.shape, t.stride(), t.dtype) for name, t in call.outputs.items()}
        return cls(call.args, inputs, outputs, {name: [*t.shape] for name, t in call.workspace.items()})

    def call(self, tensors: list[torch.Tensor]) -> Call:
        """The same call of these tensors, with outputs and workspace of its own."""
        import torch

        device = tensors[0].device
        args = type(self.args).from_buffer_copy(self.args)
        inputs = {name: tensors[place] for name, place in self.inputs.items()}
        outputs = {
            name: torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for name, (shape, strides, dtype) in self.outputs.items()
        }
        for tensors_by_name in (inputs, outputs):
            for name, t in tensors_by_name.items():
                setattr(args, name, t.data_ptr())
        return Call(args, inputs, outputs, workspace_of(args, self.workspace, device))


class Plans:
    """contract.prepare for many calls of one rung on one device. Its checks take several times as long as a launch, so they are made
    once for tensors of the same dtypes, shapes, strides, alignment and devices, and the same options."""

    def __init__(self, rung: Rung, device: str) -> None:
        self._rung, self._device = rung, device
        self._plans: dict[Hashable, Plan] = {}

    def prepare(self, inputs: tuple[Any, ...], *, scale: Any = None, out: Any = None, **features: Any) -> Call:
        """Takes, gives and raises what contract.prepare does."""
        tensors, key = self._look_up(inputs, scale, out, features)
        if plan := self._plans.get(key):
            return plan.call(tensors)
        call = prepare(self._rung, self._device, inputs, scale=scale, out=out, **features)
        if key is not None:
            if len(self._plans) >= MOST:
                self._plans.clear()
            self._plans[key] = Plan.of(call, tensors)
        return call

    def _look_up(self, inputs: tuple, scale: Any, out: Any, features: dict[str, Any]) -> tuple[list, Hashable]:
        """The tensors of a call, and the key of its plan. That is None where a call has to be checked each time: something is neither a
        tensor nor a number, outputs are given, a gradient is asked for, or row numbers or lengths are on the CPU, where their values
        are checked."""
        import torch

        tensors, options = list(inputs), [scale, *features]
        for name, value in features.items():
            pair = type(value) is tuple
            options.append(pair)
            for one in value if pair else (value,):
                if type(one) in (NoneType, bool, int):
                    options += type(one), one  # 0 is no False
                elif isinstance(one, torch.Tensor) and self._device != "cpu":
                    options.append(name)
                    tensors.append(one)
                else:
                    return tensors, None
        if out is not None or type(scale) not in (NoneType, int, float):
            return tensors, None
        grad, like = torch.is_grad_enabled(), []
        for t in tensors:
            if not isinstance(t, torch.Tensor) or (grad and t.requires_grad):
                return tensors, None
            like.append((t.dtype, t.device, t.shape, t.stride(), t.data_ptr() % 16))
        return tensors, (*options, *like)
