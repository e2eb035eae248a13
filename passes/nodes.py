"""What a node of a captured graph does, from its operator's schema alone: views, casts, collectives, random.

In: nodes of functional ATen graphs. Out: yes or no, or the node a value is derived from.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from helixrt.passes.communication import (
    AMONG_COMPUTE,
    DEFERRED,
    FUNCTIONAL,
    UNTOLD,
    WAITS,
    How,
    arguments,
    communication,
    described,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from; `origin(node)` reads it, every pass keeps it on the nodes it copies.

    `module` is the qualified name of the module that ran it ("" for the top and the loss; for backward nodes the
    module of the forward node it is the gradient of), `order` its place in the captured joint graph, `source` its
    name there.
    """

    module: str = ""
    backward: bool = False
    order: int = -1
    source: str = ""


def origin(node: fx.Node) -> Origin:
    """Where `node` comes from; nodes that a pass made itself have an empty module and order -1."""
    found = node.meta.get("origin")
    return found if isinstance(found, Origin) else Origin(source=node.name)


def set_origin(node: fx.Node, where: Origin) -> None:
    node.meta["origin"] = where


def schema(node: fx.Node) -> torch.FunctionSchema | None:
    return node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None


def is_view(node: fx.Node) -> bool:
    """Its result shares memory with its first argument and moves no data; items of such results included."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(tensor_arguments(node)[0])
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    signature = schema(node)
    if signature is None or not signature.returns or not tensor_arguments(node):
        return False
    aliases = [result.alias_info for result in signature.returns]
    return all(alias is not None and not alias.is_write for alias in aliases) and not mutates(node)


def is_cast(node: fx.Node) -> bool:
    """Copies its argument to another dtype, on the same device."""
    if node.target is not torch.ops.aten._to_copy.default or set(node.kwargs) - {"dtype", "layout", "device"}:
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    return isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and before.device == after.device


def is_derived(node: fx.Node) -> bool:
    """So cheap that a part may compute it again from its argument instead of keeping the result."""
    return is_view(node) or is_cast(node)


def is_collective(node: fx.Node) -> bool:
    """Launches communication; its result may be used only through a wait."""
    found = described(node)
    return found is not None and found.how is How.LAUNCHES


def communicates(node: fx.Node) -> bool:
    """Sends something to other ranks: a collective, or an operator that is done with it when it returns.

    Raises VerifyError for an operator that takes a process group and has no description.
    """
    return communication(node) is not None


def inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes of the graphs that a higher-order operator is given, and of those that these run."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        for given in node.all_input_nodes:
            inner = attribute(given.graph.owning_module, str(given.target)) if given.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                for each in inner.graph.nodes:
                    yield each
                    yield from inner_nodes(each)


def _functionalized(node: fx.Node) -> list[fx.Node]:
    """The operators that a higher-order operator is given to run on copies, each as a node without arguments."""
    given = [argument for argument in node.args if isinstance(argument, torch._ops.OpOverload)]
    return [fx.Graph().call_function(target) for target in given]


def attribute(root: torch.nn.Module | None, path: str) -> Any:
    """What a `get_attr` node of a graph of `root` stands for; None where it is not there."""
    found: Any = root
    for piece in path.split("."):
        found = getattr(found, piece, None)
    return found


def is_wait(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return (target.namespace in FUNCTIONAL and target._opname == "wait_tensor") or target._schema.name in WAITS


def is_deferred(node: fx.Node) -> bool:
    """Hands over what is sent later: communication behind it may be launched before it, on all ranks alike."""
    found = schema(node)
    return found is not None and found.name in DEFERRED


def is_among_compute(node: fx.Node) -> bool:
    """A view by its schema that must keep its place among compute."""
    found = schema(node)
    return found is not None and found.name in AMONG_COMPUTE


def has_untold_effects(node: fx.Node) -> bool:
    """Its operator does more than its schema and `passes.communication` say."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace not in UNTOLD:
        return False
    return described(node) is None and not is_wait(node) and not is_among_compute(node)


def is_random(node: fx.Node) -> bool:
    """Draws from a generator: it may be neither dropped nor put before or after another one.

    Attention carries torch's tag whatever it does: without dropout it draws nothing, and its backward takes in what the
    forward drew. Higher-order operators draw where what they run does, and where they save or set a generator's state.
    """
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return "rng_state" in target.name() or any(map(is_random, (*inner_nodes(node), *_functionalized(node))))
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments(node)
    if "philox_seed" in given:
        return False
    dropout = next((a.default_value for a in target._schema.arguments if a.name == "dropout_p"), None)
    return bool(given.get("dropout_p", dropout) != 0.0)


def is_pinned(node: fx.Node) -> bool:
    """Has an effect beyond its result, so that it stays even if nothing uses it."""
    return is_random(node) or communicates(node) or is_wait(node) or mutates(node)


def mutates(node: fx.Node) -> bool:
    """Writes into one of its arguments."""
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return node.target.name() == "triton_kernel_wrapper_mutation"
    signature = schema(node)
    return signature is not None and any(
        argument.alias_info is not None and argument.alias_info.is_write for argument in signature.arguments
    )


def tensor_arguments(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes


def launched_by(result: fx.Node) -> fx.Node | None:
    """The collective that `result` is a result of, or None."""
    producer = tensor_arguments(result)[0] if result.target is operator.getitem else result
    return producer if is_collective(producer) else None


def storage_owner(node: fx.Node) -> fx.Node:
    """The node whose result contains the memory of `node`'s result."""
    while is_view(node):
        node = tensor_arguments(node)[0]
    return node


def has_own_memory(node: fx.Node, results: Collection[fx.Node]) -> bool:
    """Its memory is its alone and whole; for one of the `results` of a graph that has no output yet."""
    chain = [node]
    while is_view(chain[-1]):
        chain.append(tensor_arguments(chain[-1])[0])
    shared = any(len(link.users) > 1 for link in chain[1:]) or bool(node.users)
    stretched = any(link.target is torch.ops.aten.expand.default for link in chain)
    twice = sum(1 for other in results if other in chain) > 1
    return not (shared or stretched or twice or chain[-1].op != "call_function")


def size_bytes(node: fx.Node) -> int:
    """Size of the node's result by its fake value; several results are summed; 0 for what is no tensor."""
    values = pytree.tree_leaves(node.meta.get("val"))
    return sum(v.numel() * v.element_size() for v in values if isinstance(v, torch.Tensor))
