"""Strands of transformers that exist only as operators with times, to try pairings where no model runs.

In: a layer's make (tensor parallel, sequence parallel, mixture of experts), the number of layers, and how long
communication takes compared with compute. Out: the forward of one micro-batch and the backward of another, as the
pairing search takes them. Times are relative: matrix products by their size in a transformer with a fourfold MLP
(DHelix, Table 2 and section 4.2), with backward twice as long as forward, half of it weight gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from helixrt.errors import ConfigError
from helixrt.passes.operators import COMMUNICATION, Kind, Operator, Overlap


class Make(StrEnum):
    TENSOR = "tensor"  # Megatron's tensor parallelism: 2 all-reduces a layer each way
    SEQUENCE = "sequence"  # with sequence parallelism: all-gathers and reduce-scatters, gathered again for weights
    EXPERTS = "experts"  # tensor-parallel attention, experts behind 2 all-to-alls each way between nodes


@dataclass(frozen=True)
class StrandPair:
    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]


def even(factor: float) -> Overlap:
    """The same factor for any two of compute, intra-node and inter-node communication."""
    kinds = (Kind.COMPUTE, Kind.INTRA, Kind.INTER)
    return Overlap({frozenset({first, second}): factor for first in kinds for second in kinds if first is not second})


class _Builder:
    """Operators of one strand, one after the other."""

    def __init__(self) -> None:
        self.operators: list[Operator] = []
        self.layer = 0
        self.last: tuple[int, ...] = ()  # what the next operator on the chain needs

    def compute(self, name: str, time: float, *, needs: tuple[int, ...] | None = None) -> int:
        self.last = (self._add(name, Kind.COMPUTE, time, self.last if needs is None else needs),)
        return self.last[0]

    def aside(self, name: str, time: float, needs: tuple[int, ...]) -> int:
        """A movable operator."""
        return self._add(name, Kind.COMPUTE, time, needs, movable=True)

    def launch(self, name: str, time: float, kind: Kind, needs: tuple[int, ...]) -> int:
        return self._add(name, kind, time, needs)

    def wait(self, collective: int) -> int:
        return self._add(f"wait_{self.operators[collective].signature}", Kind.WAIT, 0.0, (collective,))

    def collective(self, name: str, time: float, kind: Kind = Kind.INTRA) -> int:
        """Launch and wait, on the chain."""
        self.last = (self.wait(self.launch(name, time, kind, self.last)),)
        return self.last[0]

    def _add(self, name: str, kind: Kind, time: float, needs: tuple[int, ...], *, movable: bool = False) -> int:
        node = f"l{self.layer}_{name}_{len(self.operators)}"
        self.operators.append(Operator(node, kind, time, needs, signature=name, movable=movable, layer=self.layer))
        return len(self.operators) - 1


def transformer(
    layers: int, make: Make = Make.TENSOR, communication: float = 0.5, host: float = 0.0, layer_us: float = 1000.0
) -> StrandPair:
    """A forward and a backward of `layers` layers each, a forward layer computing for `layer_us`.

    Communication of both strands together takes `communication` times their compute; a share `host` of it keeps the
    processor. Raises ConfigError.
    """
    if layers < 1:
        raise ConfigError("layers", layers, "at least 1")
    if communication < 0.0 or not 0.0 <= host <= 1.0:
        raise ConfigError("communication", communication, "not negative, with a host share between 0 and 1")
    forward, backward = _Builder(), _Builder()
    for layer in range(layers):
        forward.layer = layer
        _FORWARD[make](forward)
    for layer in reversed(range(layers)):
        backward.layer = layer
        _BACKWARD[make](backward)
    compute = sum(o.time_us for o in (*forward.operators, *backward.operators) if o.kind is Kind.COMPUTE)
    talk = sum(o.time_us for o in (*forward.operators, *backward.operators) if o.kind in COMMUNICATION)
    unit = layer_us / (sum(o.time_us for o in forward.operators if o.kind is Kind.COMPUTE) / layers)
    stretch = communication * compute / talk * unit

    def scaled(operator: Operator) -> Operator:
        if operator.kind in COMMUNICATION:
            time_us = operator.time_us * stretch
            return replace(operator, time_us=time_us, host_us=time_us * host)
        return replace(operator, time_us=operator.time_us * unit)

    return StrandPair(tuple(map(scaled, forward.operators)), tuple(map(scaled, backward.operators)))


def _attention_forward(b: _Builder, gather: str | None, reduce: str) -> None:
    before = b.last
    b.compute("norm", 0.2)
    if gather:
        b.collective(gather, 1.0)
    b.compute("qkv", 3.0)
    b.compute("attention", 2.0)
    b.compute("projection", 1.0)
    b.collective(reduce, 1.0)
    b.compute("add", 0.1, needs=(*b.last, *before))


def _attention_backward(b: _Builder, gather: str | None, reduce: str) -> None:
    before = b.last
    if gather:
        b.collective(gather, 1.0)
    arriving = b.last
    b.compute("projection_input", 1.0)
    b.aside("projection_weight", 1.0, arriving)
    b.compute("attention_gradient", 4.0)
    gradient = b.last
    saved = b.wait(b.launch(f"{gather}_again", 1.0, Kind.INTRA, gradient)) if gather else None
    b.compute("qkv_input", 3.0)
    reduced = b.launch(reduce, 1.0, Kind.INTRA, b.last)
    b.aside("qkv_weight", 3.0, gradient if saved is None else (*gradient, saved))
    b.last = (b.wait(reduced),)
    b.compute("norm_gradient", 0.4)
    b.compute("add_gradient", 0.1, needs=(*b.last, *before))


def _dense_forward(b: _Builder, gather: str | None, reduce: str) -> None:
    _attention_forward(b, gather, reduce)
    before = b.last
    b.compute("norm", 0.2)
    if gather:
        b.collective(gather, 1.0)
    b.compute("up", 4.0)
    b.compute("gelu", 0.3)
    b.compute("down", 4.0)
    b.collective(reduce, 1.0)
    b.compute("add", 0.1, needs=(*b.last, *before))


def _dense_backward(b: _Builder, gather: str | None, reduce: str) -> None:
    before = b.last
    if gather:
        b.collective(gather, 1.0)
    arriving = b.last
    b.compute("down_input", 4.0)
    b.aside("down_weight", 4.0, arriving)
    b.compute("gelu_gradient", 0.4)
    gradient = b.last
    saved = b.wait(b.launch(f"{gather}_again", 1.0, Kind.INTRA, gradient)) if gather else None
    b.compute("up_input", 4.0)
    reduced = b.launch(reduce, 1.0, Kind.INTRA, b.last)
    b.aside("up_weight", 4.0, gradient if saved is None else (*gradient, saved))
    b.last = (b.wait(reduced),)
    b.compute("norm_gradient", 0.4)
    b.compute("add_gradient", 0.1, needs=(*b.last, *before))
    _attention_backward(b, gather, reduce)


def _experts_forward(b: _Builder) -> None:
    _attention_forward(b, None, "all_reduce")
    before = b.last
    norm = b.compute("norm", 0.2)
    scores = b.aside("router", 0.2, (norm,))
    b.compute("permute", 0.2, needs=(norm, scores))
    b.collective("all_to_all", 2.0, Kind.INTER)
    b.compute("experts", 8.0)
    b.collective("all_to_all", 2.0, Kind.INTER)
    b.compute("unpermute", 0.2, needs=(*b.last, *before))


def _experts_backward(b: _Builder) -> None:
    before = b.last
    b.compute("unpermute_gradient", 0.2)
    b.collective("all_to_all", 2.0, Kind.INTER)
    arriving = b.last
    b.compute("experts_input", 8.0)
    b.aside("experts_weight", 8.0, arriving)
    b.collective("all_to_all", 2.0, Kind.INTER)
    b.compute("permute_gradient", 0.2)
    b.aside("router_weight", 0.2, b.last)
    b.compute("norm_gradient", 0.4)
    b.compute("add_gradient", 0.1, needs=(*b.last, *before))
    _attention_backward(b, None, "all_reduce")


_FORWARD = {
    Make.TENSOR: lambda b: _dense_forward(b, None, "all_reduce"),
    Make.SEQUENCE: lambda b: _dense_forward(b, "all_gather", "reduce_scatter"),
    Make.EXPERTS: _experts_forward,
}
_BACKWARD = {
    Make.TENSOR: lambda b: _dense_backward(b, None, "all_reduce"),
    Make.SEQUENCE: lambda b: _dense_backward(b, "all_gather", "reduce_scatter"),
    Make.EXPERTS: _experts_backward,
}
