"""The one file that uses torch's fake tensors: shape, dtype and device without memory."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor

from helixrt.passes.parts import Layout, local


class FakeWorld:
    """Makes fake tensors that may be used together."""

    def __init__(self, device: torch.device) -> None:
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
    return isinstance(local(tensor), FakeTensor)


def is_traced(value: object) -> bool:
    """Replaces another tensor while AOTAutograd traces; has no memory of its own."""
    return isinstance(value, FunctionalTensor)
