"""Crossing: which values go from chunk to chunk, forwards and backwards.

In: the units of a joint graph and the unit that each chunk begins with. Out: a `Crossing`: the chunk of each operator and,
for each boundary, the nodes whose values cross it. Derived and free values never cross as such: a chunk makes them again
from what it has. Of a value and the views and casts of it that others need, the smallest crosses.

One value crosses from layers to layers, the hidden state. Values of layers that only the end of the model needs (router
logits for an auxiliary loss) cross beside it. All else is a CaptureError.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from helixrt.passes import nodes
from helixrt.passes.aot_private import place_of
from helixrt.passes.errors import CaptureError
from helixrt.passes.parts import Part, Port, Role
from helixrt.passes.units import Units, ports
from helixrt.passes.verify import describe, returned


@dataclass(frozen=True)
class Crossing:
    """`home[node]` is the chunk of each operator that has a unit; `forward[i]` and `backward[i]` cross between chunks i and
    i + 1; `results[c]` are the outputs that chunk c gives, a term of a tied gradient by several nodes to be added."""

    home: dict[fx.Node, int]
    forward: tuple[tuple[fx.Node, ...], ...]
    backward: tuple[tuple[fx.Node, ...], ...]
    results: tuple[tuple[tuple[Port, tuple[fx.Node, ...]], ...], ...]


def crossing(joint: Part, found: Units, starts: Sequence[int]) -> Crossing:
    """`starts` are the first units of the later chunks. Raises CaptureError where more crosses than can."""
    return _Crossing(joint, found, starts).crossing()


class _Crossing:
    def __init__(self, joint: Part, found: Units, starts: Sequence[int]) -> None:
        self.joint, self.units, self.starts = joint, found, tuple(starts)
        self.chunks = len(self.starts) + 1
        self.home = {node: self.chunk_of(unit) for node, unit in found.of.items()}
        self.inputs = {node: port for port, node in ports(joint)}
        self.needed: dict[fx.Node, dict[int, bool]] = {}  # value -> chunk that needs it -> whether a layer does

    def chunk_of(self, unit: int) -> int:
        return bisect_right(self.starts, unit)

    def crossing(self) -> Crossing:
        results = self.results()
        wanted: dict[tuple[fx.Node, int], bool] = {}
        for node, chunk in self.home.items():
            layer = self.units.is_layer(self.units.of[node])
            for value in self.outside(node.all_input_nodes, chunk):
                wanted[value, chunk] = wanted.get((value, chunk), False) or layer
        for chunk, given in enumerate(results):
            for _, terms in given:
                for value in self.outside(terms, chunk):
                    wanted.setdefault((value, chunk), False)
        direct = {value for value, _ in wanted if value in self.home}
        for (value, chunk), layer in wanted.items():
            value = self.sent(value, direct)
            by = self.needed.setdefault(value, {})
            by[chunk] = by.get(chunk, False) or layer
        forward, backward = self.at_boundaries()
        return Crossing(self.home, forward, backward, results)

    # outputs

    def results(self) -> tuple[tuple[tuple[Port, tuple[fx.Node, ...]], ...], ...]:
        given: list[list[tuple[Port, tuple[fx.Node, ...]]]] = [[] for _ in range(self.chunks)]
        for port, node in zip(self.joint.outputs, returned(self.joint), strict=True):
            terms = self.units.terms.get(port, (node,))
            shares: dict[int, list[fx.Node]] = {}
            for term in terms:
                shares.setdefault(self.chunk_giving(port, term), []).append(term)
            for chunk, share in shares.items():
                given[chunk].append((port, (node,) if len(share) == len(terms) else tuple(share)))
        return tuple(map(tuple, given))

    def chunk_giving(self, port: Port, node: fx.Node) -> int:
        """Raises CaptureError for outputs that a chunk cannot give."""
        owner = self.units.owner(node)
        if port.role is Role.BUFFER:
            return self.chunk_changing(port, node if owner is None else owner)
        if owner is None:
            reason = f"{describe(port)} stands on no parameter"
            raise CaptureError(place_of(node) or "the model", reason, "let it depend on the model, or train with pp=1")
        if port.role is Role.OUTPUT and self.home[owner] != self.chunks - 1:
            first = self.units.names[self.starts[-1]]
            reason = f"the loss is computed before {first}, which the last chunk begins with"
            raise CaptureError(place_of(node) or "the model", reason, "cut before the last layer that the loss stands on")
        return self.home[owner]

    def chunk_changing(self, port: Port, node: fx.Node) -> int:
        """The one chunk that uses a buffer that forward changes."""
        using = set(self.using.get(port, ()))
        if node in self.home:
            using.add(self.home[node])
        if len(using) > 1:
            reason = f"the buffer {port.name!r}, which forward changes, is used in chunks {sorted(using)}"
            raise CaptureError(place_of(node) or "the model", reason, "use one buffer for each layer")
        return min(using, default=self.chunk_of(self.units.layer_of(port.name) or 0))

    @functools.cached_property
    def using(self) -> dict[Port, set[int]]:
        """The chunks that use each buffer, by derived and free values, too."""
        found: dict[Port, set[int]] = {}
        for buffer, port in self.inputs.items():
            if port.role is Role.BUFFER:
                stack, seen = list(buffer.users), set()
                while stack:
                    node = stack.pop()
                    if node in self.home:
                        found.setdefault(port, set()).add(self.home[node])
                    elif node not in seen:
                        seen.add(node)
                        stack.extend(node.users)
        return found

    # values

    def outside(self, given: Sequence[fx.Node], chunk: int) -> Iterator[fx.Node]:
        """The values of other chunks that `given` are made of; the last link of chains of views and casts."""
        for node in given:
            if node in self.units.sums:
                yield from self.outside(node.all_input_nodes, chunk)
            else:
                owner = self.units.owner(node)
                if owner is not None and self.home[owner] != chunk:
                    yield node

    def sent(self, node: fx.Node, direct: set[fx.Node]) -> fx.Node:
        """The link of a chain of views and casts that crosses: one that others need anyway, else the smallest."""
        chain = [node]
        while chain[-1] not in self.home:
            chain.append(nodes.tensor_arguments(chain[-1])[0])
        if chain[-1] in direct:
            return chain[-1]
        chain = [link for link in chain if not isinstance(link.meta["val"], list | tuple)]
        least = min(map(nodes.size_bytes, chain))
        return next(link for link in reversed(chain) if nodes.size_bytes(link) == least)

    # boundaries

    def at_boundaries(self) -> tuple[tuple[tuple[fx.Node, ...], ...], tuple[tuple[fx.Node, ...], ...]]:
        forward: list[list[fx.Node]] = [[] for _ in self.starts]
        backward: list[list[fx.Node]] = [[] for _ in self.starts]
        for value in self.joint.graph.nodes:
            for chunk in self.needed.get(value, ()):
                home, back = self.home_of(value), nodes.origin(value).backward
                if back == (chunk > home):
                    what = f"{value} of chunk {home} is needed in chunk {chunk}, {'before' if back else 'after'} it runs"
                    raise CaptureError(place_of(value) or "the model", what, "cut elsewhere")
                for at in range(min(home, chunk), max(home, chunk)):
                    into = (backward if back else forward)[at]
                    if value not in into:
                        into.append(value)
        for at, values in enumerate(forward):
            hidden = [v for v in values if any(layer for chunk, layer in self.needed[v].items() if chunk > at)]
            if len(hidden) > 1:
                self.refuse(at, hidden)
            if not values or not backward[at]:
                reason, remedy = "no hidden state crosses it", "cut where one goes on to layers"
                if values:
                    reason = "all parameters before it are frozen, so no gradient crosses it"
                    remedy = "train one of them, cut after one that is trained, or train with pp=1"
                raise CaptureError(f"the cut before {self.units.names[self.starts[at]]}", reason, remedy)
            values.sort(key=lambda value: value not in hidden)
        return tuple(map(tuple, forward)), tuple(map(tuple, backward))

    def home_of(self, value: fx.Node) -> int:
        owner = self.units.owner(value)
        assert owner is not None, "free values do not cross"
        return self.home[owner]

    def refuse(self, at: int, hidden: list[fx.Node]) -> None:
        """Raises CaptureError that names all but the last made, which is taken for the hidden state."""
        *others, last = hidden
        said = ", ".join(f"{value} of {nodes.origin(value).module or 'the model'}" for value in others)
        where = place_of(others[0]) or f"the cut before {self.units.names[self.starts[at]]}"
        reason = f"besides the hidden state {last}, layers of later chunks need {said}; between chunks one may cross"
        raise CaptureError(where, reason, "compute it in the layers that need it, from their input, or cut elsewhere")
