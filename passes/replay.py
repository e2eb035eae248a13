"""Replay: random operators that draw the same numbers again.

In: a random operator of a captured graph. Out: two operators. `random_state` gives the state of a device's generator; it
runs right before the random operator, and like it draws in the order of the graph. `replayed(operator)` runs the
operator from such a state and puts the generator back, so it draws nothing from the sequence and may run at any place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

LIBRARY = torch.library.Library("helixrt", "FRAGMENT")
STATE = "random_state"  # the name of the argument that carries one

LIBRARY.define("random_state(Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))


def state_of(device: torch.device) -> torch.Tensor:
    """The state of the default generator of `device`, bytes on the processor."""
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def set_state(device: torch.device, state: torch.Tensor) -> None:
    """Put the default generator of `device` into `state`."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


LIBRARY.impl("random_state", state_of, "CompositeExplicitAutograd")

_MADE_OF: dict[Any, torch._ops.OpOverload] = {}  # operators of `replayed`, by what it returned

random_state = torch.ops.helixrt.random_state.default


def replayed_operator(target: Any) -> torch._ops.OpOverload | None:
    """The operator that `replayed` made `target` of; None for all others."""
    return _MADE_OF.get(target)


@functools.cache
def replayed(operator: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator with two arguments more in front: a state, and the device whose generator it is of."""
    schema = operator._schema
    name = "_".join(("replayed", *schema.name.split("::"), *filter(None, (schema.overload_name,))))
    _, _, signature = str(schema).partition("(")
    comma = "" if signature.startswith(")") else ", "
    LIBRARY.define(f"{name}(Tensor {STATE}, Device random_device{comma}{signature}")

    def run(state: torch.Tensor, device: torch.device, /, *arguments: Any, **keywords: Any) -> Any:
        before = state_of(device)
        set_state(device, state)
        try:
            return operator(*arguments, **keywords)
        finally:
            set_state(device, before)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    made = getattr(torch.ops.helixrt, name).default
    _MADE_OF[made] = operator
    return made
