"""Capture of a whole model that no rank can hold.

In: a module with parameters and buffers on any device, the meta device included, example arguments of a micro-batch, and
the device that the graph is for. Out: the joint `Part` of the module and its loss. Nothing of the model's size is
allocated: parameters and buffers are replaced by fake tensors, each object by one, so that ties stay, for the time of the
capture. The module is the same afterwards.

Build large models under `torch.device("meta")`; change their dtype by `.to(dtype)` then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from helixrt.compile.fake_tensors_private import FakeWorld, is_fake
from helixrt.compile.transformers_private import for_training
from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.aot_private import location_of
from helixrt.passes.capture import Loss, capture
from helixrt.passes.errors import CaptureError
from helixrt.passes.parts import Part


def capture_whole(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Loss | None = None,
    target: Any = None,
    device: torch.device | str = "cpu",
) -> Part:
    """The joint graph of `model` on `device`, as `capture` makes it; examples may lie on any device, contents do not count.

    Caches of transformers models are off. Raises CaptureError as `capture` does, and for tensors that the model holds
    outside of its parameters and buffers on the meta device; ConfigError for a device that this torch has not.
    """
    with fake_model(model, loss=loss, device=device) as world, for_training(model):
        if (kwargs or {}).get("use_cache"):
            raise ConfigError("use_cache", True, "must be False: caches are of no use in training")
        call = pytree.tree_map_only(torch.Tensor, world.fake, (args, dict(kwargs or {}), target))
        part = capture(model, call[0], call[1], loss=loss, target=call[2])
    for node in part.graph.find_nodes(op="get_attr"):
        value = nodes.attribute(part.module, str(node.target))
        if isinstance(value, torch.Tensor) and (value.device.type == "meta" or is_fake(value)):
            reason = f"forward reads a tensor of shape {list(value.shape)} that is no buffer and has no contents"
            raise CaptureError(location_of(model), reason, "make it a buffer: register_buffer")
    return part


@contextmanager
def fake_model(model: nn.Module, *, loss: Any = None, device: torch.device | str = "cpu") -> Iterator[FakeWorld]:
    """`model` (and a `loss` that is a module) with fake parameters and buffers on `device` inside of the block.

    Yields what makes fake tensors for its arguments. Raises ConfigError for a device that this torch has not.
    """
    device = torch.device(device)
    if device.type == "meta":
        raise ConfigError("device", "meta", "must be the device that the graph runs on: operators differ by device")
    if device.type != "cpu" and not torch.get_device_module(device).is_available():
        raise ConfigError("device", str(device), f"is not here; torch {torch.__version__} sees no such device")
    world = FakeWorld(device)
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    owners = [owner for owner in (model, loss) if isinstance(owner, nn.Module)]
    try:
        for module in (module for owner in owners for module in owner.modules()):
            holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for held in holders:
                for name, tensor in held.items():
                    if tensor is not None:
                        before.append((held, name, tensor))
                        if id(tensor) not in made:
                            made[id(tensor)] = world.fake(tensor)
                        held[name] = made[id(tensor)]
        yield world
    finally:
        for held, name, tensor in before:
            held[name] = tensor
