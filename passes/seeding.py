"""Seeding: random operators draw from a seed and their number, wherever and whenever they run.

In: a captured joint graph. Out: the same with each random operator replaced by one that has a generator of its own for the
call, from the INPUT `SEED` and from the operator's number among those of the whole graph. Nothing is drawn from the
process's generators, so operators may run in any order, on any rank, and beside threads that draw: dropout is the same for
every number of chunks, every schedule, and pairs of strands need not keep an order. Operators that take no generator (dropout
and attention on a GPU) find it in the place of the process's one for the time of the call. What regions of activation
checkpointing compute again has the number of the operator that it repeats. Where ranks share a model or a batch, operators on
equal values draw equal numbers, and those on a rank's own values (`own_values`: its heads, its positions) draw numbers of their
own.

The numbers are those of the operator after `torch.manual_seed(mixed(seed, number))`.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.aot_private import place_of
from helixrt.passes.errors import CaptureError
from helixrt.passes.nodes import Origin, set_origin
from helixrt.passes.own_values import Axis, number_of, own_values
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.replay import LIBRARY, random_state, replayed_operator, set_state, state_of
from helixrt.passes.rewriter import GraphRewriter
from helixrt.passes.verify import verify

SEED = Port(Role.INPUT, "<seed>")  # an int64 scalar on the processor
ORDER = "random_order"  # the name of the argument that has an operator's number
OWN = 1 << 24  # between the numbers of an operator on ranks that draw their own; above that of operators in a graph


def seed_of(*numbers: int) -> torch.Tensor:
    """A seed for `SEED` from values that distinguish draws, such as (seed, replica, step, micro-batch)."""
    digest = hashlib.sha256(",".join(map(str, numbers)).encode()).digest()
    return torch.tensor(int.from_bytes(digest[:8], "big") >> 1, dtype=torch.int64, device="cpu")


def mixed(seed: int, order: int) -> int:
    """What `torch.manual_seed` gets for the random operator of this number."""
    digest = hashlib.sha256(f"{seed}:{order}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seeded(joint: Part, axes: Sequence[Axis] = ()) -> Part:
    """The part with random operators that draw from `SEED`; the same part where there are none. `axes`: over which ranks share
    the model or the batch.

    Raises CaptureError for a random operator that runs a graph of its own.
    """
    if not any(map(nodes.is_random, joint.graph.nodes)):
        return joint
    own = own_values(joint, axes) if axes else {}
    began = time.perf_counter()
    rewriter = GraphRewriter(whose="seeding")
    numbers: dict[fx.Node, int] = {}  # by the node of a state: the number of the operator that draws from it first
    seed, count, before = None, 0, list[fx.Node]()
    for node in joint.graph.nodes:
        if seed is None and node.op != "placeholder":
            seed = rewriter.graph.placeholder("random_seed")
            seed.meta["val"] = example_seed(joint)
            set_origin(seed, Origin(source=seed.name))
        again = replayed_operator(node.target)
        if node.target is random_state:
            before.append(node)  # it stands right before the operator that it is the state for
        elif again is not None:
            _draw(rewriter, node, again, seed, numbers[node.args[0]], node.args[2:])
        elif nodes.is_random(node):
            if not isinstance(node.target, torch._ops.OpOverload):
                reason = f"random numbers are drawn inside {node.target}, which runs a graph of its own"
                raise CaptureError(place_of(node) or str(node), reason, "draw them outside of it, or train with pp=1")
            number = count + OWN * number_of(axes, own.get(node, ()))
            numbers |= dict.fromkeys(before, number)
            before.clear()
            _draw(rewriter, node, node.target, seed, number, node.args)
            count += 1
        else:
            rewriter.copy(node)
    inputs = (*joint.inputs, SEED)
    module = rewriter.module(joint.module, joint.module)
    result = replace(joint, module=module, inputs=inputs).stamped("seeded", time.perf_counter() - began)
    verify(result)
    return result


def _draw(rewriter: GraphRewriter, node: fx.Node, drawn: Any, seed: Any, order: int, arguments: Any) -> None:
    value = node.meta["val"]
    device = (value[0] if isinstance(value, list | tuple) else value).device
    rewriter.copy(node, target=seeded_operator(drawn), ahead=(seed, order, device), arguments=arguments)


def order_of(node: fx.Node) -> int | None:
    """The number of an operator that draws from the seed; None for all others."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and len(target._schema.arguments) > 1:
        return int(node.args[1]) if target._schema.arguments[1].name == ORDER else None  # type: ignore[arg-type]
    return None


def example_seed(joint: Part) -> torch.Tensor:
    """A seed as the graph's other examples are."""
    first = next(node.meta["val"] for node in joint.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor))
    return first.new_zeros((), dtype=torch.int64, device="cpu")


@functools.cache
def seeded_operator(drawn: torch._ops.OpOverload) -> torch._ops.OpOverload:
    """The operator with three arguments more in front: the seed, its number, and the device whose generator it draws from."""
    schema = drawn._schema
    name = "_".join(("seeded", *schema.name.split("::"), *filter(None, (schema.overload_name,))))
    _, _, signature = str(schema).partition("(")
    comma = "" if signature.startswith(")") else ", "
    LIBRARY.define(f"{name}(Tensor random_seed, int {ORDER}, Device random_device{comma}{signature}")

    given = _taking_a_generator(drawn)

    def run(seed: torch.Tensor, order: int, device: torch.device, /, *arguments: Any, **keywords: Any) -> Any:
        generator = torch.Generator(device).manual_seed(mixed(int(seed), order))
        if given is not None:
            return given(*arguments, **keywords, generator=generator)
        if drawn is torch.ops.aten.native_dropout.default and device.type == "cpu":
            return _dropout(*arguments, **keywords, generator=generator)
        before = state_of(device)
        set_state(device, generator.get_state())
        try:
            return drawn(*arguments, **keywords)
        finally:
            set_state(device, before)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    return getattr(torch.ops.helixrt, name).default


def _taking_a_generator(drawn: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The operator, or its twin that differs by an argument `generator` alone; None without one."""
    wanted = [argument.name for argument in drawn._schema.arguments if argument.name != "generator"]
    for overload in (drawn._overloadname, *drawn.overloadpacket.overloads()):
        twin = getattr(drawn.overloadpacket, overload)
        names = [argument.name for argument in twin._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return twin
    return None


def _dropout(
    x: torch.Tensor, p: float, train: bool | None = None, *, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """`native_dropout` of torch on the processor: the same numbers in the same order."""
    kept = torch.ones_like(x, dtype=torch.bool)
    if train is False:
        return x.clone(), kept
    kept.bernoulli_(1.0 - p, generator=generator)
    return x.mul(kept).mul_(0.0 if p == 1.0 else 1.0 / (1.0 - p)), kept
