"""A planning problem as plain arrays, in either direction of time, for list scheduling and local search.

In: costs and a number of micro-batches. Out: `Lanes`. A *lane* is all operations of one kind in one chunk. Micro-batches
go in order in every lane, so an order of a stage is a sequence of lanes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from helixrt.schedule.costs import Costs
from helixrt.schedule.ir import Entry, Op, Operation, Pair

Order = list[list[int]]  # per stage: lanes, and codes of overlaps
TOLERANCE = 1e-9


class Form(Enum):
    """How backwards may be run."""

    SPLIT = auto()  # B and W apart; pairs are of F and B
    MIXED = auto()  # B and W apart, but in pairs with F also whole
    WHOLE = auto()  # B and W as one; pairs are of F and BW


@dataclass(frozen=True, slots=True)
class Overlap:
    """An overlapped pair: `lanes` is F and B, or F, B and W where the backward is whole; `code` stands for it in orders.

    It takes `together_ms`, which is `gain_ms` less than its operations one after the other.
    """

    code: int
    lanes: tuple[int, ...]
    together_ms: float
    gain_ms: float


@dataclass(frozen=True)
class Lanes:
    """A planning problem in arrays over lanes: F of chunk c is c, B is C + c, W is 2 C + c (absent when `fused`).

    An operation needs its lane's `source` (-1: none), after `latency` ms and `wire` ms on the link `link`, and its
    lane's `local` on the same stage. It takes `take` memory when it starts and gives `give` back when it ends. With
    `fused`, B is the whole backward. `pairs[stage]` are the overlapped pairs that gain time there.
    """

    microbatches: int
    stages: int
    lanes: int
    stage: tuple[int, ...]
    duration: tuple[float, ...]
    source: tuple[int, ...]
    latency: tuple[float, ...]
    wire: tuple[float, ...]
    link: tuple[int, ...]
    local: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    take: tuple[float, ...]
    give: tuple[float, ...]
    cap: tuple[float, ...]
    held: tuple[tuple[int, ...], ...]
    pairs: tuple[tuple[Overlap, ...], ...]
    fused: bool
    mirrored: bool

    @property
    def chunks(self) -> int:
        return self.lanes // (2 if self.fused else 3)

    @property
    def operations(self) -> int:
        return self.lanes * self.microbatches

    @classmethod
    def of(cls, costs: Costs, microbatches: int, *, mirrored: bool = False, form: Form = Form.SPLIT) -> Lanes:
        """The problem of these costs. Mirrored, time on the wire counts as delay, since a link's order is not known."""
        chunks, place, fused = costs.chunks, costs.placement, form is Form.WHOLE
        lanes = (2 if fused else 3) * chunks
        backward = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)] if fused else list(costs.backward)
        after: list[tuple[int, int, tuple[int, int] | None]] = [(chunks - 1, 2 * chunks - 1, None)]
        for c in range(chunks - 1):
            after.append((c, c + 1, (place[c], place[c + 1])))
            after.append((chunks + c + 1, chunks + c, (place[c + 1], place[c])))
        if not fused:
            after += [(chunks + c, 2 * chunks + c, None) for c in range(chunks)]
        source, local, link = [-1] * lanes, [-1] * lanes, [-1] * lanes
        latency, wire = [0.0] * lanes, [0.0] * lanes
        readers: list[list[int]] = [[] for _ in range(lanes)]
        for early, late, way in after:
            a, b = (late, early) if mirrored else (early, late)
            readers[a].append(b)
            if way is None:
                local[b] = a
                continue
            source[b] = a
            if way[0] != way[1]:
                there = costs.link(*way)
                latency[b] = there.delay_ms + (there.wire_ms if mirrored else 0.0)
                wire[b] = 0.0 if mirrored else there.wire_ms
                link[b] = way[0] * costs.stages + way[1]
        take, give = [0.0] * lanes, [0.0] * lanes
        for c in range(chunks):
            last = chunks + c if fused else 2 * chunks + c
            kept = 0.0 if fused else costs.kept[c]
            whole = max(costs.activation[c], kept)
            if mirrored:
                # Taking all at W where a part would do only makes the mirrored lists more careful than need be.
                take[last if kept else chunks + c], give[c] = whole, whole
            else:
                take[c] = whole
                give[chunks + c] += whole - kept
                give[last] += kept
        stage = [place[lane % chunks] for lane in range(lanes)]
        held: list[list[int]] = [[] for _ in range(costs.stages)]
        for lane, home in enumerate(stage):
            held[home].append(lane)
        return cls(
            microbatches=microbatches,
            stages=costs.stages,
            lanes=lanes,
            stage=tuple(stage),
            duration=tuple([*costs.forward, *backward, *([] if fused else costs.weight)]),
            source=tuple(source),
            latency=tuple(latency),
            wire=tuple(wire),
            link=tuple(link),
            local=tuple(local),
            readers=tuple(map(tuple, readers)),
            take=tuple(take),
            give=tuple(give),
            cap=tuple(cap * (1 + TOLERANCE) + TOLERANCE for cap in costs.memory),
            held=tuple(map(tuple, held)),
            pairs=_overlaps(costs, form),
            fused=fused,
            mirrored=mirrored,
        )

    def entries(self, order: Order) -> tuple[tuple[Entry, ...], ...]:
        """An order of this problem (not mirrored) as the IR's lists."""
        chunks = self.chunks
        kinds = (Op.F, Op.BW if self.fused else Op.B, Op.W)
        made = [0] * self.lanes

        def operation(lane: int) -> Operation:
            made[lane] += 1
            return Operation(kinds[lane // chunks], lane % chunks, made[lane] - 1)

        def entry(code: int) -> Entry:
            if code < self.lanes:
                return operation(code)
            whole, pair = divmod(code - self.lanes, self.lanes * self.lanes)
            forward, backward = map(operation, divmod(pair, self.lanes))
            if whole:
                weights = operation(backward.chunk + 2 * chunks)
                backward = Operation(Op.BW, weights.chunk, weights.microbatch)
            return Pair(forward, backward)

        return tuple(tuple(map(entry, codes)) for codes in order)


def _overlaps(costs: Costs, form: Form) -> tuple[tuple[Overlap, ...], ...]:
    """Per stage, the pairs that take less time than what they are made of."""
    chunks = costs.chunks
    lanes = (2 if form is Form.WHOLE else 3) * chunks
    kinds = {Form.SPLIT: (Op.B,), Form.MIXED: (Op.B, Op.BW), Form.WHOLE: (Op.BW,)}[form]
    found: list[list[Overlap]] = [[] for _ in range(costs.stages)]
    for f, home in enumerate(costs.placement):
        for b, other in enumerate(costs.placement):
            for op in kinds if home == other else ():
                apart_ms = costs.forward[f] + costs.backward[b] + (costs.weight[b] if op is Op.BW else 0.0)
                together_ms = costs.duration_ms(Pair(Operation(Op.F, f, 0), Operation(op, b, 0)))
                whole = op is Op.BW and form is Form.MIXED
                if together_ms < apart_ms - TOLERANCE:
                    code = lanes + f * lanes + chunks + b + (lanes * lanes if whole else 0)
                    parts = (f, chunks + b, 2 * chunks + b) if whole else (f, chunks + b)
                    found[home].append(Overlap(code, parts, together_ms, apart_ms - together_ms))
    return tuple(map(tuple, found))
