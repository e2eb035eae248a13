"""Own values: which values of a graph are this rank's alone, since each rank has another part of the model or of the batch.

In: a joint part, and the axes over which ranks share the model or the batch (`Axis`). Out: for each node the axes along which
its value differs between ranks. A value that is made of a rank's own values is its own; a sum or a gather over an axis makes
equal values of them again. A part that a rank takes of a whole without communication (a slice by its rank) is not found: it
counts as equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from helixrt.passes.communication import Pattern, communication
from helixrt.passes.groups import group_name
from helixrt.passes.parts import Part, Port

_EQUAL = (Pattern.ALL_REDUCE, Pattern.ALL_GATHER)  # every rank gets the same


@dataclass(frozen=True)
class Axis:
    """Ranks with different parts of the same model or batch. `group` is the name of their process group, `rank` this rank's
    place in it; `has_part`: whether a port is this rank's part of something."""

    group: str
    rank: int
    size: int
    has_part: Callable[[Port], bool]


def own_values(joint: Part, axes: Sequence[Axis]) -> dict[fx.Node, frozenset[int]]:
    """By node, the numbers of the axes along which its value differs between ranks."""
    found: dict[fx.Node, frozenset[int]] = {}
    ports = iter(joint.inputs)
    by_group = {axis.group: number for number, axis in enumerate(axes)}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            port = next(ports)
            found[node] = frozenset(number for number, axis in enumerate(axes) if axis.has_part(port))
            continue
        own = frozenset[int]().union(*(found[value] for value in node.all_input_nodes))
        if (how := communication(node)) is not None and (axis := by_group.get(group_name(node))) is not None:
            own = own - {axis} if how.pattern in _EQUAL else own | {axis}
        found[node] = own
    return found


def number_of(axes: Sequence[Axis], own: Iterable[int]) -> int:
    """A number that this rank and those with equal values have, and no others: 0 where no axis is in `own`."""
    mine, number = set(own), 0
    for at, axis in enumerate(axes):
        number = number * (axis.size + 1) + (axis.rank + 1 if at in mine else 0)
    return number
