"""The one file that uses torch's fake tensors: shape, dtype and device without memory."""

from __future__ import annotations

import sys

import torch

from helixrt.passes.parts import Layout, local
from helixrt.private_api import FAKE_TENSORS, require


class FakeWorld:
    """Makes fake tensors that may be used together."""

    def __init__(self, device: torch.device) -> None:
        """Raises ConfigError where this torch has no fake tensors."""
        require(FAKE_TENSORS)
        from torch._subclasses.fake_tensor import FakeTensorMode

        self.device = device
        self.mode = FakeTensorMode()

    def fake(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor like `tensor`, on the device of this world; parameters become parameters, DTensors DTensors."""
        own = local(tensor)
        with self.mode:
            made = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=self.device)
        if own is not tensor:
            layout = Layout(tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), tensor.stride())  # type: ignore[attr-defined]
            made = layout.wrap(made)
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


def is_fake(tensor: torch.Tensor) -> bool:
    return _is_of("torch._subclasses.fake_tensor", "FakeTensor", local(tensor))


def is_traced(value: object) -> bool:
    """Replaces another tensor while AOTAutograd traces; has no memory of its own."""
    return _is_of("torch._subclasses.functional_tensor", "FunctionalTensor", value)


def _is_of(module: str, name: str, value: object) -> bool:
    """Whether it is of a class of torch's; no value is where torch has not made the class yet, or has none."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
