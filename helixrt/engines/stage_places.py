"""The parameters and buffers of a model in stages in terms of the whole model: names, and where they are cut.

In: the chunks of one stage, what is registered (the same modules), the model's own names and layouts by chunk. Out: `Places`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import nn

from helixrt.engines.portions import Cut, Places
from helixrt.engines.registered import Registered, qualified
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.stage_ranks import LayoutsOf
from helixrt.errors import ConfigError

NamesOf = Callable[[int, str], str]  # (number of a part, name in it) -> name in the whole model


def stage_places(
    registered: Registered,
    chunks: Mapping[int, nn.Module],
    names: NamesOf | None,
    layouts: LayoutsOf | None,
    mesh: ReplicaMesh,
    copies: Collection[int],
) -> Places:
    """`copies`: the `id` of parameters of which an earlier stage has a copy. Raises ConfigError (stages.names) for two
    parameters of this stage with one name."""
    called = {
        id(tensor): qualified(model, name)
        for model, module in reversed([*registered.models.items()])
        for name, tensor in reversed([*_tensors(module)])
    }  # by tensor, its first name
    own: dict[str, str] = {}
    cuts: dict[str, tuple[Cut, ...]] = {}
    unknown: set[str] = set()
    copied: set[str] = set()
    for number, chunk in sorted(chunks.items()):
        declared = {} if layouts is None else layouts(chunk)
        for name, tensor in _tensors(chunk):
            registered_name = called[id(tensor)]
            if names is not None:
                own.setdefault(registered_name, names(number, name))
            layout = declared.get(name)
            if id(tensor) in copies:
                copied.add(registered_name)
            if layout is None or mesh.size(*layout.sharded) == 1 or not layout.sharded:
                continue
            if layout.cuts:
                cuts[registered_name] = layout.cuts
            else:
                unknown.add(registered_name)
    if mesh.size("dp_shard", "cp", "tp") > 1:  # parameters in no chunk have no declared placement
        inside = {id(tensor) for chunk in chunks.values() for _, tensor in _tensors(chunk)}
        unknown |= {name for identity, name in called.items() if identity not in inside}
    _check_names(own, registered)
    return Places(own, cuts, unknown, copied)


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _check_names(own: Mapping[str, str], registered: Registered) -> None:
    """Parameters have names of their own; buffers of several parts may be copies of one."""
    seen: dict[str, tuple[str, torch.Tensor]] = {}
    buffers = ((qualified(model, name), b) for model, module in registered.models.items() for name, b in module.named_buffers())
    for name, tensor in (*registered.parameters(), *buffers):
        whole = own.get(name, name)
        other, value = seen.setdefault(whole, (name, tensor))
        copies = not isinstance(tensor, nn.Parameter) and value.shape == tensor.shape and torch.equal(value, tensor)
        if other != name and not copies:
            raise ConfigError("stages.names", whole, f"is the name of {other} and of {name}, which are two tensors")
