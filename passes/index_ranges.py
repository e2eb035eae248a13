"""Index ranges: what the integers that an operator is given stand for, so that made-up ones act as real ones do.

In: a node. Out: a `Range` for each of its tensor arguments that holds indices. An index is anywhere among the rows that
there are to index: made of a few rows only, a gather or a scatter stays in the cache and is measured as several times
as fast as it is. Offsets (where each of several sequences or groups begins or ends) rise evenly to the number of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from helixrt.passes import nodes
from helixrt.passes.communication import arguments
from helixrt.passes.fused import Fused


@dataclass(frozen=True, slots=True)
class Range:
    """Integers from 0, below `bound`; with `rising` from `first` up to `bound`, evenly."""

    bound: int
    rising: bool = False
    first: int = 0


Given = Mapping[str, Any]  # of an operator, by the schema's names
Rule = Callable[[Given], dict[Any, Range]]


def along(index: str = "index", of: str = "self", dim: str | int = "dim") -> Rule:
    """`index` chooses among the rows of `of` along an argument's dimension, or a fixed one."""

    def rule(given: Given) -> dict[Any, Range]:
        shape = _shape(given[of])
        at = given[dim] if isinstance(dim, str) else dim
        return {given[index]: Range(max(1, shape[at] if shape else 1))}

    return rule


def counted_by(index: str, number: str) -> Rule:
    """`index` chooses among a number of entries that another argument gives."""
    return lambda given: {given[index]: Range(max(1, int(given[number])))}


def anywhere(index: str, of: str = "self", last: int | None = None) -> Rule:
    """`index` chooses among all elements of `of`, or of its last dimensions."""
    return lambda given: {given[index]: Range(max(1, math.prod(_shape(given[of])[-last if last else None :])))}


def by_dimension(given: Given) -> dict[Any, Range]:
    """Each of `indices` chooses along its dimension; a mask takes as many as it has."""
    found: dict[Any, Range] = {}
    shape, at = _shape(given["self"]), 0
    for index in given["indices"]:
        value = index.meta.get("val") if isinstance(index, fx.Node) else None
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8):
            at += value.dim()
            continue
        if isinstance(index, fx.Node) and at < len(shape):
            found[index] = Range(max(1, shape[at]))
        at += 1
    return found


def classes(given: Given) -> dict[Any, Range]:
    """Targets choose among the classes, the second dimension, or the only one of a single example."""
    shape = _shape(given["self"])
    return {given["target"]: Range(max(1, shape[min(1, len(shape) - 1)]))}


def packed_sequences(given: Given) -> dict[Any, Range]:
    """Where each of the sequences begins that lie behind one another in queries, and in keys."""
    found = {}
    for name, of in (("cum_seq_q", "query"), ("cum_seq_k", "key"), ("cu_seqlens_q", "query"), ("cu_seqlens_k", "key")):
        if isinstance(given.get(name), fx.Node):
            shape = _shape(given[of])
            found[given[name]] = Range(shape[1] if len(shape) == 4 else shape[0], rising=True)
    return found


def bags(given: Given) -> dict[Any, Range]:
    """Rows of a table, and where each bag begins among them."""
    count = _shape(given["indices"])[0]
    rows = Range(max(1, _shape(given["weight"])[0]))
    return {given["indices"]: rows, given["offsets"]: Range(max(1, count - 1), rising=True)}


def groups_of_rows(given: Given) -> dict[Any, Range]:
    """Where each group of a grouped matrix product ends, along what the two matrices share or the first one's rows."""
    first = _shape(given["self"])
    rows = first[-2] if len(_shape(given["mat2"])) == 3 else first[-1]
    count = max(1, _shape(given["offs"])[0])
    return {given["offs"]: Range(rows, rising=True, first=rows // count)} if isinstance(given.get("offs"), fx.Node) else {}


ROWS = along()
RULES: dict[str, Rule] = {
    **dict.fromkeys(("gather", "index_select", "index_add", "index_copy", "index_fill", "index_reduce"), ROWS),
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), ROWS),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_unsafe_masked_index"), by_dimension),
    "_unsafe_masked_index_put_accumulate": by_dimension,
    "gather_backward": ROWS,
    "index_select_backward": lambda given: {given["index"]: Range(max(1, given["self_sizes"][given["dim"]]))},
    "embedding": along("indices", "weight", 0),
    "embedding_dense_backward": counted_by("indices", "num_weights"),
    "_embedding_bag": bags,
    "_embedding_bag_forward_only": bags,
    "nll_loss_forward": classes,
    "nll_loss_backward": classes,
    "nll_loss2d_forward": classes,
    "nll_loss2d_backward": classes,
    "multi_margin_loss": classes,
    "take": anywhere("index"),
    "put": anywhere("index"),
    "max_pool2d_with_indices_backward": anywhere("indices", last=2),
    "max_pool3d_with_indices_backward": anywhere("indices", last=3),
    "_flash_attention_forward": packed_sequences,
    "_flash_attention_backward": packed_sequences,
    "_efficient_attention_forward": packed_sequences,
    "_efficient_attention_backward": packed_sequences,
    "_grouped_mm": groups_of_rows,
    "_scaled_grouped_mm": groups_of_rows,
}


def index_ranges(node: fx.Node) -> dict[fx.Node, Range]:
    """Of the arguments that the rules know, also inside of compiled operators; empty for other operators."""
    target = node.target
    if isinstance(target, Fused):
        return _of_fused(node, target)
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return {}
    rule = RULES.get(target._schema.name.removeprefix("aten::"))
    if rule is None:
        return {}
    found = rule(arguments(node))
    return {index: among for index, among in found.items() if isinstance(index, fx.Node)}


def _of_fused(node: fx.Node, target: Fused) -> dict[fx.Node, Range]:
    """What the operators inside say of what they are given from outside, as it is, viewed or cast."""
    outside = dict(zip(target.module.graph.find_nodes(op="placeholder"), node.args, strict=True))
    found = {}
    for inner in target.module.graph.nodes:
        for index, among in index_ranges(inner).items():
            while nodes.is_derived(index):
                index = nodes.tensor_arguments(index)[0]
            given = outside.get(index)
            if isinstance(given, fx.Node):
                found[given] = among
    return found


def _shape(node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{node} has no example value")
    return tuple(value.shape)
