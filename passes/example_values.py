"""Example values: real tensors for the parameters, buffers and inputs that a part takes in, to run it for its times.

In: a part. Out: a tensor for each of its ports, with the shape, strides, dtype and device that its graph knows. Parameters are
small around zero, as models initialize them, so that nothing overflows or becomes denormal. Integers are spread over what the
operators that take them can index (`index_ranges`), also through views, casts and the arithmetic of integers before them;
integers that index nothing are ones, as a mask that leaves all in is.

A `Pool` gives different graphs the same memory, so that many of them can be timed by turns in the memory of the largest one.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.index_ranges import Range, index_ranges
from helixrt.passes.parts import Part, Port, Role

SEED = 20240229
DEVIATION = 0.02
MADE = frozenset({Role.PARAMETER, Role.BUFFER, Role.INPUT, Role.TARGET})


class Pool:
    """Tensors of random numbers by shape, each made once; a graph's n-th of a shape is every graph's n-th."""

    def __init__(self) -> None:
        self._made: dict[tuple[object, ...], torch.Tensor] = {}
        self._generators: dict[torch.device, torch.Generator] = {}

    def values(self, part: Part) -> dict[Port, torch.Tensor]:
        """For all ports of parameters, buffers, inputs and targets. Raises ValueError for one whose shape is not known."""
        counts: Counter[tuple[object, ...]] = Counter()
        found = {}
        for port, node in zip(part.inputs, part.graph.find_nodes(op="placeholder"), strict=True):
            if port.role in MADE:
                value = node.meta.get("val")
                if not isinstance(value, torch.Tensor):
                    raise ValueError(f"{port.role} {port.name!r} has no example value")
                among = None if value.dtype.is_floating_point or value.dtype.is_complex else indexed(node)
                key = (tuple(value.shape), value.stride(), value.dtype, value.device, among)
                counts[key] += 1
                if (*key, counts[key]) not in self._made:
                    self._made[*key, counts[key]] = self._new(value, among)
                found[port] = self._made[*key, counts[key]]
        return found

    def _new(self, value: torch.Tensor, among: Range | None) -> torch.Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        flat = torch.empty(extent if value.numel() else 0, dtype=value.dtype, device=value.device)
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(SEED)
        generator = self._generators[value.device]
        if value.dtype.is_complex:
            torch.view_as_real(flat).normal_(0.0, DEVIATION, generator=generator)
        elif value.dtype.is_floating_point:
            flat.normal_(0.0, DEVIATION, generator=generator)
        elif among is None or value.dtype is torch.bool:
            flat.fill_(1)
        elif among.rising:
            flat.copy_(torch.linspace(among.first, among.bound, flat.numel(), dtype=torch.float64).round())
        else:
            flat.copy_(torch.randint(0, among.bound, flat.shape, generator=generator, device=value.device))
        return flat.as_strided(value.shape, value.stride())


def indexed(node: fx.Node) -> Range | None:
    """What the integers of `node` may be for all operators that index with them, itself or what is made of them; None where
    nothing does."""
    seen: set[fx.Node] = set()
    coming, found = [node], None
    while coming:
        one = coming.pop()
        for user in one.users:
            among = index_ranges(user).get(one)
            if among is not None and (found is None or among.bound < found.bound):
                found = among
            if user not in seen and nodes.tensor_arguments(user) and _integers(user):
                seen.add(user)
                coming.append(user)
    return found


def _integers(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dtype is not torch.bool
