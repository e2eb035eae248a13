"""Samples: arguments an operator of a graph can be run on, made from the shapes the graph knows.

In: a node. Out: its positional and keyword arguments with real tensors of the same shape, strides, dtype and device.
Floats lie between 0.25 and 0.75, so that logarithms, roots and quotients stay finite and nothing is denormal. Indices
are spread over all that there is to index (`index_ranges`); other integers may be indices, too, so they are below every
size they could index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.communication import arguments
from helixrt.passes.fused import Fused
from helixrt.passes.index_ranges import Range, index_ranges
from helixrt.passes.replay import STATE, state_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

SEED = 20240229
MOST_SETS = 16
ON_HOST = ("philox_seed", "philox_offset")  # arguments of these operators, which their forward makes on the processor
READ_ON_HOST = frozenset({"aten::_scaled_dot_product_efficient_attention_backward", "aten::_efficient_attention_backward"})


def samples(node: fx.Node, cold_bytes: int = 0) -> list[Arguments]:
    """Sets of arguments for `node.target`, to be used in turn.

    What the part takes in (parameters, saved activations) was last touched long ago, what another operator made lies
    in the cache. So sets have their own copies of the former, until all together are `cold_bytes`, and share the
    latter. Raises ValueError when the graph does not say what an argument looks like.
    """
    makers = _Makers(default_range(node), index_ranges(node), on_host(node), {}, {})
    far = sum(nodes.size_bytes(n) for n in node.all_input_nodes if nodes.storage_owner(n).op == "placeholder")
    sets = min(MOST_SETS, max(1, cold_bytes // far)) if far else 1
    made = []
    for _ in range(sets):
        positional, keywords = fx.node.map_arg((node.args, node.kwargs), makers.real)
        made.append((with_state(node, tuple(positional)), dict(keywords)))
    return made


def with_state(node: fx.Node, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with a real state of a generator for an operator that draws from one: other bytes are refused."""
    signature = nodes.schema(node)
    if signature is None or not signature.arguments or signature.arguments[0].name != STATE:
        return given
    return (state_of(given[1]), *given[1:])


def on_host(node: fx.Node) -> Set[fx.Node]:
    """Arguments that the operator reads on the processor, though fake tensors are on the GPU: what memory-efficient attention
    drew its dropout from. A GPU's address there ends the process."""
    if isinstance(node.target, Fused):
        inner = node.target.module.graph
        outside = dict(zip(inner.find_nodes(op="placeholder"), node.args, strict=True))
        found = {outside.get(each) for one in inner.nodes for each in on_host(one)}
    elif (signature := nodes.schema(node)) is not None and signature.name in READ_ON_HOST:
        found = {arguments(node).get(name) for name in ON_HOST}
    else:
        return frozenset()
    return {each for each in found if isinstance(each, fx.Node)}


def default_range(node: fx.Node) -> Range:
    """Of integers that no rule knows: below every size that they could index, at least 1."""
    floats = [value for value in _tensors(node) if value.is_floating_point()]
    return Range(max(1, min((size for value in floats for size in value.shape), default=1)))


def argument_bytes(node: fx.Node) -> int:
    """Size of all tensors an operator takes in."""
    return sum(value.numel() * value.element_size() for value in _tensors(node))


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    for before in node.all_input_nodes:
        value = before.meta.get("val")
        yield from (v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, torch.Tensor))


@dataclass
class _Makers:
    """Makes tensors: integers in `ranges`, else in `usual`, those `on_host` on the processor; one generator for each device,
    one tensor for each kept node."""

    usual: Range
    ranges: Mapping[fx.Node, Range]
    on_host: Set[fx.Node]
    generators: dict[torch.device, torch.Generator]
    kept: dict[fx.Node, Any]

    def real(self, node: fx.Node) -> Any:
        if node.op == "get_attr" and "val" not in node.meta:  # a graph that the operator runs
            return nodes.attribute(node.graph.owning_module, str(node.target))
        if "val" not in node.meta:
            raise ValueError(f"{node} has no example value")
        value, among = node.meta["val"], self.ranges.get(node, self.usual)
        if node in self.on_host:
            return self.made(torch.empty_like(value, device="cpu"), among)
        if nodes.storage_owner(node).op == "placeholder":
            return self.made(value, among)
        if node not in self.kept:
            self.kept[node] = self.made(value, among)
        return self.kept[node]

    def made(self, value: Any, among: Range) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self.made(each, among) for each in value)
        if not isinstance(value, torch.Tensor):
            return value
        extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
        flat = torch.empty(extent if value.numel() else 0, dtype=value.dtype, device=value.device)
        generator = self.generators.get(value.device)
        if generator is None:
            generator = self.generators[value.device] = torch.Generator(value.device).manual_seed(SEED)
        if value.dtype.is_complex:
            torch.view_as_real(flat).uniform_(0.25, 0.75, generator=generator)
        elif value.dtype.is_floating_point and value.element_size() > 1:
            flat.uniform_(0.25, 0.75, generator=generator)
        elif value.dtype.is_floating_point:
            flat.copy_(torch.rand(flat.shape, generator=generator, device=value.device) / 2 + 0.25)
        elif value.dtype is torch.bool:
            flat.random_(0, 2, generator=generator)
        else:
            most = min(among.bound, torch.iinfo(value.dtype).max)
            if among.rising:
                steps = torch.linspace(among.first, most, flat.numel(), device=value.device, dtype=torch.float64)
                flat.copy_(steps.round())
            else:
                flat.copy_(torch.randint(0, most, flat.shape, generator=generator, device=value.device))
        return flat.as_strided(value.shape, value.stride())
