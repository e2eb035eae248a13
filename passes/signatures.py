"""Signatures: what the time of an operator depends on, as text; measured times are kept under it.

In: a node, and the groups it may communicate in. Out: operator, every argument (shapes, layouts and dtypes of tensors;
numbers, booleans, dtypes and texts as they are; for a graph or a kernel that the operator runs, a digest of its code),
the result, and the group. The device, its settings and the versions of libraries are in `profile_cache.Setting`.

Ranks of a group may have other numbers (where a slice begins): `profile` maps each rank's signatures to agreed ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.communication import arguments, communication
from helixrt.passes.groups import Group, group_name
from helixrt.passes.triton_private import kernel_text

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b1",
}  # fmt: skip
PLAIN = (bool, int, float, complex, str, type(None), torch.device, torch.layout, torch.memory_format)
KERNEL = frozenset({"kernel_idx", "constant_args_idx", "grid", "tma_descriptor_metadata"})


def signature(node: fx.Node, groups: Mapping[str, Group]) -> str:
    """See the module. Raises VerifyError for an operator that takes a process group and is not known."""
    target = str(node.target).removeprefix("_c10d_functional.").removesuffix(".default")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        said = _of_higher_order(node)
    elif (how := communication(node)) is not None:
        said = [_spelled(value) for name, value in arguments(node).items() if name != how.group]
    else:
        said = [_spelled(argument) for argument in node.args]
        said += [f"{name}={_spelled(value)}" for name, value in sorted(node.kwargs.items())]
    group = f" over {groups[group_name(node)]}" if nodes.communicates(node) else ""
    return f"{target}({', '.join(said)}) -> {_spelled_value(node.meta.get('val'))}{group}"


def _of_higher_order(node: fx.Node) -> list[str]:
    said = [_spelled(argument) for argument in node.args]
    if "kernel_idx" in node.kwargs:
        said.append(kernel_text(node.kwargs))
    kept = sorted((name, value) for name, value in node.kwargs.items() if name not in KERNEL)
    return said + [f"{name}={_spelled(value)}" for name, value in kept]


def _spelled(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        inner = nodes.attribute(argument.graph.owning_module, str(argument.target)) if argument.op == "get_attr" else None
        return f"graph {_digest(inner)}" if isinstance(inner, fx.GraphModule) else _spelled_value(argument.meta.get("val"))
    if isinstance(argument, list | tuple):
        return f"[{', '.join(map(_spelled, argument))}]"
    if isinstance(argument, Mapping):
        return f"{{{', '.join(f'{key}: {_spelled(value)}' for key, value in sorted(argument.items()))}}}"
    if isinstance(argument, torch.dtype):
        return SHORT.get(argument, str(argument))
    if isinstance(argument, slice):
        return f"slice({', '.join(map(_spelled, (argument.start, argument.stop, argument.step)))})"
    if isinstance(argument, PLAIN) or isinstance(argument, torch._ops.OpOverload):
        return str(argument)
    return type(argument).__name__


def _digest(inner: fx.GraphModule) -> str:
    """Of the code of a graph and of those that it runs; equal graphs have equal ones, in every process."""
    deeper = [_digest(module) for _, module in sorted(inner.named_children()) if isinstance(module, fx.GraphModule)]
    return hashlib.sha256("\n".join([inner.code, *deeper]).encode()).hexdigest()[:10]


def _spelled_value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"({', '.join(_spelled_value(each) for each in value)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_spelled_value(each)}' for key, each in sorted(value.items()))}}}"
    if not isinstance(value, torch.Tensor):
        return "" if value is None else type(value).__name__
    strided = "" if value.is_contiguous() else f"/{'.'.join(map(str, value.stride()))}"
    return f"{SHORT.get(value.dtype, str(value.dtype))}[{'.'.join(map(str, value.shape))}]{strided}"
