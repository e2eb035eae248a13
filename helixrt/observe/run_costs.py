"""What the operations and links of a run cost, from its flight records, and the profile that planners read.

In: the events of all ranks of a run, of all its starts, by time. Out: one `Observed` per replica; `profile` is the JSON that
`helixrt schedule --profile` takes. The estimates are those that the replica's leader had at the run's end.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from helixrt.observe.estimates import Estimate, MeasuredCosts
from helixrt.observe.estimator import Estimator, Key, Shift
from helixrt.observe.failures import replica_of
from helixrt.observe.stamps import RankTimes, rank_times
from helixrt.observe.stragglers import Straggler, stragglers
from helixrt.record import Event, Kind
from helixrt.schedule.ir import Op, linear


@dataclass(frozen=True)
class Observed:
    """Of a replica, at the end; `shifts` are of the whole run."""

    replica: int
    measured: MeasuredCosts
    shifts: tuple[Shift, ...]
    stragglers: tuple[Straggler, ...]


def observed(events: Iterable[Event], until: int | None = None) -> list[Observed]:
    """Of the replicas that were measured, by number. `until`: the last step that counts."""
    lives: defaultdict[str, list[list[Event]]] = defaultdict(list)
    for event in events:
        of_rank = lives[event.rank]
        if event.kind is Kind.RANK_START or not of_rank:
            of_rank.append([])
        of_rank[-1].append(event)
    estimators: defaultdict[int, Estimator] = defaultdict(Estimator)
    reports: list[tuple[int, int, RankTimes]] = []
    for of_rank in lives.values():
        for life, written in enumerate(of_rank):
            clock = str(written[0].detail.get("clock", "")) if written[0].kind is Kind.RANK_START else ""
            reports += [(each.step, life, each) for each in rank_times(written, clock)]
    lived: dict[str, int] = {}
    for step, life, report in sorted(reports, key=lambda each: (each[0], each[1], each[2].rank)):
        if until is not None and step > until:
            break
        estimator = estimators[replica_of(report.rank)]
        if lived.get(report.rank, life) != life:
            estimator.renewed(report.rank)
        lived[report.rank] = life
        estimator.add(report)
    found = []
    for replica, estimator in sorted(estimators.items()):
        if (measured := estimator.estimates()) is not None:
            shifts = tuple(estimator.shifts)
            found.append(Observed(replica, measured, shifts, tuple(stragglers(measured, shifts))))
    return found


def profile(measured: MeasuredCosts) -> dict[str, Any]:
    """Costs per stage, those of a stage's chunks added up, and the mean factor of pairs, if there were any. Raises ConfigError
    for times that were not measured."""
    costs = measured.costs(linear(measured.stages))
    neighbours = [((stage, stage + 1), (stage + 1, stage)) for stage in range(costs.stages - 1)]
    pairs = {} if costs.pair_factor == 1.0 else {"pair_factor": costs.pair_factor}
    return {
        "stages": costs.stages,
        "microbatches": measured.microbatches,
        "f": list(costs.forward),
        "b": list(costs.backward),
        "w": list(costs.weight),
        "delay": [[costs.link(*way).delay_ms for way in ways] for ways in neighbours],
        "wire": [[costs.link(*way).wire_ms for way in ways] for ways in neighbours],
        **pairs,
    }


def cost_key(key: Key) -> str:
    """What a value is of, in words: "F of chunk 2", "link 1>2", "F of chunk 0 with BW of chunk 3"."""
    if len(key) == 3:
        forward, op, backward = key
        return f"F of chunk {forward} with {op.value} of chunk {backward}"
    first, second = key
    return f"{first.value} of chunk {second}" if isinstance(first, Op) else f"link {first}>{second}"


def to_plain(found: Observed) -> dict[str, Any]:
    """As plain containers, for JSON."""
    measured = found.measured

    def estimate(of: Estimate) -> dict[str, Any]:
        return {"ms": of.value_ms, "uncertainty_ms": of.uncertainty_ms, "spread_ms": of.spread_ms, "samples": of.samples}

    return {
        "replica": found.replica,
        "step": measured.step,
        "microbatches": measured.microbatches,
        "placement": list(measured.placement),
        "operations": [
            {"op": op.value, "chunk": chunk, "stage": measured.placement[chunk], **estimate(each)}
            for (op, chunk), each in sorted(measured.operations.items())
        ],
        "pairs": [
            {"forward": forward, "op": op.value, "backward": backward, **estimate(each)}
            for (forward, op, backward), each in sorted(measured.pairs.items())
        ],
        "links": [
            {
                "from": way[0],
                "to": way[1],
                "delay": estimate(link.delay),
                "wire": estimate(link.wire),
                "upper_bound": link.upper_bound,
                "clock_offset_ms": link.offset_ms,
                "bytes": link.nbytes,
                "rate_mbit": link.rate_mbit,
            }
            for way, link in sorted(measured.links.items())
        ],
        "stragglers": [
            {
                "place": each.place,
                "cause": each.cause.value,
                "ms": each.value_ms,
                "usual_ms": each.usual_ms,
                "since": each.since,
                "why": each.why,
            }
            for each in found.stragglers
        ],
        "changes": [
            {
                "step": shift.change.step,
                "what": cost_key(shift.key),
                "before_ms": shift.change.before_ms,
                "after_ms": shift.change.after_ms,
            }
            for shift in found.shifts
        ],
    }
