"""What a schedule's operations, messages and activations cost.

In: measured or assumed times in milliseconds, per chunk and per link, and memory in any one unit. Out: `Costs`,
checked when it is made, which the simulator, the bounds and the planners share. Everything is per chunk of a
placement, so one `Costs` fits schedules of that placement only; `split` turns costs of a linear placement
into those of smaller chunks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from helixrt.errors import ConfigError
from helixrt.schedule.ir import Op, Operation, Pair, linear


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two stages. A message occupies the link for `wire_ms`, then takes `delay_ms` to arrive."""

    delay_ms: float = 0.0
    wire_ms: float = 0.0


FREE = Link()
LARGEST = 1e15  # of any time in ms and any amount: sums and ratios of such numbers stay exact enough, and finite


@dataclass(frozen=True)
class Costs:
    """Times in ms and memory in one unit, per chunk; `placement[chunk]` is the chunk's stage.

    `links[a, b]` is the way from stage a to stage b (absent: free). A forward adds `activation[chunk]`
    when it starts. B turns that into `kept[chunk]` when it ends, and W frees that when it ends (BW frees all when it
    ends), so `kept` equal to `activation` means held from F to W, zero means freed by B. `memory[stage]` is the
    cap, infinite for none. An overlapped pair takes `pair_ms[forward chunk, B or BW, backward chunk]` where given
    (from the strand profile), else `pair_factor` times the sum of its two operations.

    Raises ConfigError for lists of the wrong length, values that are negative, no number or above `LARGEST`, and stages
    without a chunk.
    """

    placement: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    activation: tuple[float, ...] = ()
    kept: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    pair_factor: float = 1.0
    pair_ms: Mapping[tuple[int, Op, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.placement or set(self.placement) != set(range(max(self.placement) + 1)):
            raise ConfigError("costs.placement", self.placement, "must give every stage from 0 on at least one chunk")
        chunks = len(self.placement)
        settled = {"activation": self.activation or (1.0,) * chunks, "memory": self.memory or (math.inf,) * self.stages}
        settled["kept"] = self.kept or settled["activation"]
        for name in ("forward", "backward", "weight", "activation", "kept", "memory"):
            values = tuple(float(v) for v in settled.get(name, getattr(self, name)))
            expected, what = (self.stages, "stage") if name == "memory" else (chunks, "chunk")
            if len(values) != expected:
                raise ConfigError(f"costs.{name}", list(values), f"must have one value per {what}, {expected} in all")
            for value in values:
                if not value >= 0 or (math.isinf(value) and name != "memory"):
                    raise ConfigError(f"costs.{name}", value, "must be a number, at least 0")
                if LARGEST < value < math.inf:
                    raise ConfigError(f"costs.{name}", value, f"must be at most {LARGEST:g}")
            object.__setattr__(self, name, values)
        for (a, b), link in self.links.items():
            if not (0 <= a < self.stages and 0 <= b < self.stages) or a == b:
                raise ConfigError("costs.links", f"{a}>{b}", f"must join two different stages below {self.stages}")
            for key, value in (("delay_ms", link.delay_ms), ("wire_ms", link.wire_ms)):
                if not 0 <= value <= LARGEST:
                    raise ConfigError(f"costs.links.{a}>{b}.{key}", value, f"must be a number, 0 to {LARGEST:g}")
        for value in (self.pair_factor, *self.pair_ms.values()):
            if not 0 < value <= LARGEST:
                raise ConfigError("costs.pair", value, f"must be a number above 0, at most {LARGEST:g}")
        object.__setattr__(self, "links", dict(self.links))
        object.__setattr__(self, "pair_ms", dict(self.pair_ms))

    @property
    def stages(self) -> int:
        return max(self.placement) + 1

    @property
    def chunks(self) -> int:
        return len(self.placement)

    @property
    def turn_ms(self) -> float:
        """The longest forward and backward of a stage, all of its chunks together."""
        times = [0.0] * self.stages
        for chunk, stage in enumerate(self.placement):
            times[stage] += self.forward[chunk] + self.backward[chunk]
        return max(times)

    def link(self, source: int, target: int) -> Link:
        """The way from one stage to another."""
        return self.links.get((source, target), FREE)

    def duration_ms(self, entry: Operation | Pair) -> float:
        """How long a stage is busy with an operation or an overlapped pair."""
        if isinstance(entry, Pair):
            key = (entry.forward.chunk, entry.backward.op, entry.backward.chunk)
            measured = self.pair_ms.get(key)
            if measured is not None:
                return measured
            return self.pair_factor * (self.duration_ms(entry.forward) + self.duration_ms(entry.backward))
        chunk = entry.chunk
        if entry.op is Op.F:
            return self.forward[chunk]
        if entry.op is Op.B:
            return self.backward[chunk]
        return self.weight[chunk] if entry.op is Op.W else self.backward[chunk] + self.weight[chunk]

    @property
    def mean_pair_factor(self) -> float:
        """The time of all measured pairs, as a factor of their operations one after the other; `pair_factor` without any."""
        apart = [
            self.duration_ms(Operation(Op.F, forward, 0)) + self.duration_ms(Operation(op, backward, 0))
            for forward, op, backward in self.pair_ms
        ]
        return sum(self.pair_ms.values()) / sum(apart) if sum(apart) > 0 else self.pair_factor

    def split(self, placement: Sequence[int]) -> Costs:
        """The same model in more chunks: each stage's time and activations shared evenly by its chunks.

        Only for linear costs (one chunk per stage). Links and caps stay; of measured pairs, which were of whole stages, their
        `mean_pair_factor` does.
        """
        if self.placement != linear(self.stages):
            raise ConfigError("costs.placement", self.placement, "only costs of one chunk per stage can be split")
        if set(placement) != set(range(self.stages)):
            raise ConfigError("costs.placement", tuple(placement), f"must use every stage below {self.stages}")
        share = [1.0 / tuple(placement).count(stage) for stage in placement]

        def cut(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(values[stage] * part for stage, part in zip(placement, share, strict=True))

        return replace(
            self,
            placement=tuple(placement),
            forward=cut(self.forward),
            backward=cut(self.backward),
            weight=cut(self.weight),
            activation=cut(self.activation),
            kept=cut(self.kept),
            pair_factor=self.mean_pair_factor,
            pair_ms={},
        )


def uniform(
    stages: int, forward_ms: float = 1.0, backward_ms: float = 1.0, weight_ms: float = 1.0, memory: float = math.inf
) -> Costs:
    """Costs of a linear placement with equal stages, free links and an activation of 1 held from F to W."""
    return Costs(
        placement=linear(stages),
        forward=(forward_ms,) * stages,
        backward=(backward_ms,) * stages,
        weight=(weight_ms,) * stages,
        memory=(memory,) * stages,
    )


def with_delays(costs: Costs, delays_ms: Mapping[tuple[int, int], float]) -> Costs:
    """The same costs with these directed delays {(from, to): ms} instead of the links' own; wire times stay."""
    links = dict(costs.links)
    for way, delay_ms in delays_ms.items():
        links[way] = Link(delay_ms, costs.link(*way).wire_ms)
    return replace(costs, links=links)
