"""What one rank measured in its newest steps, reduced to a few numbers: the summaries that reach the replica's leader.

In: the events of the rank's flight record, as they are written (`StampCollector` is a sink) or read from a file. Out: a
`RankTimes` for each step boundary. Memory is bounded; the sink only appends, the reduction is done in `take`.

Durations are those of the operations between the begin and the end of a step's work: evaluation is left out. A message counts
from `sent_s` (sender's clock, in its header) to `arrived_s`. Channels that do not carry a sender's stamp leave the two apart:
then the sender's rank reports when its messages were queued, the receiver's when they came, and the leader matches them.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helixrt.observe.samples import FlowSample, Sample, Stamped, flow_sample, summary
from helixrt.record import Event, Kind

CAPACITY = 20_000  # events between two step boundaries; more are dropped, the oldest first
AT_ONCE_S = 1e-4  # a shorter wait was none: the message was there already, since when is not known
_MESSAGES = 256  # of a flow and step that are reported one by one, at most
_KINDS = frozenset({Kind.OPERATION, Kind.SEND, Kind.RECV, Kind.WORK_BEGIN, Kind.WORK_END})


@dataclass(frozen=True)
class Pass:
    """Messages of one flow in one pass through the pipeline, by micro-batch; stamps in s."""

    number: int
    stamps: dict[int, float]
    exact: frozenset[int] = frozenset()  # micro-batches whose stamp is the arrival itself; of arrivals only
    nbytes: int = 0


@dataclass(frozen=True)
class RankTimes:
    """`operations` by name: "F0" is F of chunk 0, "F0+B3" the two woven. `flows` by what comes in: "F2" is the activations into
    chunk 2, "B2" the gradients into chunk 2. `sent` and `arrived` are of flows whose messages carry no sender's stamp.
    `clock` names the clock of the stamps: equal for ranks of one machine, "" if that is not known. `microbatches`: of a step.
    """

    rank: str
    step: int
    microbatches: int
    clock: str = ""
    operations: dict[str, Sample] = field(default_factory=dict)
    flows: dict[str, FlowSample] = field(default_factory=dict)
    sent: dict[str, list[Pass]] = field(default_factory=dict)
    arrived: dict[str, list[Pass]] = field(default_factory=dict)

    def to_json(self) -> str:
        plain = {
            "rank": self.rank,
            "step": self.step,
            "microbatches": self.microbatches,
            "clock": self.clock,
            "operations": self.operations,
            "flows": self.flows,
            "sent": {name: [_plain(each) for each in passes] for name, passes in self.sent.items()},
            "arrived": {name: [_plain(each) for each in passes] for name, passes in self.arrived.items()},
        }
        return json.dumps(plain, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> RankTimes:
        raw = json.loads(text)
        return RankTimes(
            raw["rank"],
            raw["step"],
            raw["microbatches"],
            raw["clock"],
            {name: Sample(*values) for name, values in raw["operations"].items()},
            {name: _flow(*values) for name, values in raw["flows"].items()},
            {name: [_pass(*values) for values in passes] for name, passes in raw["sent"].items()},
            {name: [_pass(*values) for values in passes] for name, passes in raw["arrived"].items()},
        )


def _plain(messages: Pass) -> list[Any]:
    return [messages.number, list(messages.stamps), list(messages.stamps.values()), sorted(messages.exact), messages.nbytes]


def _pass(number: int, microbatches: Sequence[int], stamps: Sequence[float], exact: Sequence[int], nbytes: int) -> Pass:
    return Pass(number, dict(zip(microbatches, stamps, strict=True)), frozenset(exact), nbytes)


def _flow(at_s: float, least_ms: float, delay: Sequence[Any], wire: Sequence[Any], nbytes: int, bound: bool) -> FlowSample:
    return FlowSample(at_s, least_ms, Sample(*delay), Sample(*wire), nbytes, bound)


class StampCollector:
    """Of one rank. Call it with every event, from any thread; `mark` from one thread, `take` from one that may be another."""

    def __init__(self, rank: str, clock: str = "") -> None:
        self._rank, self._clock = rank, clock
        self._events: deque[Event | int] = deque(maxlen=CAPACITY)  # a number: that step ended here
        self._working = True  # not behind the end of a step's work
        self._senders_stamps = False  # messages that came in carried them, so those that went out do

    def __call__(self, event: Event) -> None:
        if event.kind in _KINDS:
            self._events.append(event)

    def mark(self, step: int) -> None:
        """The step ends here."""
        self._events.append(step)

    def take(self, step: int) -> RankTimes | None:
        """The measurements up to the mark of `step`, those of earlier steps that were not taken included; None if there was no
        operation."""
        reduction = _Reduction()
        while self._events:
            event = self._events.popleft()
            if not isinstance(event, Event):
                if event == step:
                    break
                continue
            match event.kind:
                case Kind.WORK_BEGIN:
                    self._working = True
                case Kind.WORK_END:
                    self._working = False
                case Kind.OPERATION:
                    if self._working:
                        reduction.operation(event)
                case Kind.RECV:
                    self._senders_stamps |= reduction.received(event)
                case _:
                    if not self._senders_stamps:
                        reduction.sent(event)
        return reduction.times(self._rank, step, self._clock)


class _Reduction:
    """Of the events between two step boundaries."""

    def __init__(self) -> None:
        self._durations_ms: defaultdict[str, list[float]] = defaultdict(list)
        self._woven: Event | None = None  # the forward of a pair whose backward comes next
        self._microbatches = 0
        self._stamped: defaultdict[str, list[Stamped]] = defaultdict(list)
        self._sent: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._arrived: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._exact: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._nbytes: dict[str, int] = {}

    def operation(self, event: Event) -> None:
        detail = event.detail
        self._microbatches = max(self._microbatches, detail["microbatch"] + 1)
        name = f"{detail['op']}{detail['chunk']}"
        if detail.get("woven"):
            first, self._woven = self._woven, event
            if first is None or first.begin_s != event.begin_s:
                return
            self._woven = None
            forward, backward = (first, event) if first.detail["op"] == "F" else (event, first)
            name = "+".join(f"{each.detail['op']}{each.detail['chunk']}" for each in (forward, backward))
        self._durations_ms[name].append((event.end_s - event.begin_s) * 1e3)

    def received(self, event: Event) -> bool:
        """Whether it carried the sender's stamp."""
        detail = event.detail
        if (tag := _of_flow(detail["tag"])) is None:
            return False
        name, number, microbatch = tag
        self._nbytes[name] = detail["bytes"]
        arrived_s = detail.get("arrived_s")
        exact = arrived_s is not None or event.end_s - detail.get("needed_s", event.begin_s) > AT_ONCE_S
        at_s = event.end_s if arrived_s is None else arrived_s
        sent_s = detail.get("sent_s")
        if sent_s is not None:
            self._stamped[name].append(Stamped(sent_s, at_s, exact))
            return True
        self._arrived[name, number][microbatch] = at_s
        if exact:
            self._exact[name, number].add(microbatch)
        return False

    def sent(self, event: Event) -> None:
        if (tag := _of_flow(event.detail["tag"])) is not None:
            self._sent[tag[0], tag[1]][tag[2]] = event.begin_s

    def times(self, rank: str, step: int, clock: str) -> RankTimes | None:
        if not self._durations_ms:
            return None
        return RankTimes(
            rank,
            step,
            self._microbatches,
            clock,
            {name: summary(values) for name, values in self._durations_ms.items()},
            {name: flow_sample(messages, self._nbytes[name]) for name, messages in self._stamped.items()},
            self._passes(self._sent),
            self._passes(self._arrived),
        )

    def _passes(self, messages: dict[tuple[str, int], dict[int, float]]) -> dict[str, list[Pass]]:
        found: defaultdict[str, list[Pass]] = defaultdict(list)
        for (name, number), stamps in messages.items():
            kept = dict(list(stamps.items())[:_MESSAGES])
            exact = frozenset(self._exact[name, number]) if messages is self._arrived else frozenset()
            found[name].append(Pass(number, kept, exact & kept.keys(), self._nbytes.get(name, 0)))
        return dict(found)


def _of_flow(tag: str) -> tuple[str, int, int] | None:
    """Flow, pass and micro-batch of a message's tag, such as g1.s2.c3.m4.F; None for messages of a step as a whole."""
    _, number, chunk, microbatch, lane = tag.split(".")
    if lane not in ("F", "B"):
        return None
    return lane + chunk[1:], int(number[1:]), int(microbatch[1:])


def rank_times(events: Iterable[Event], clock: str = "") -> list[RankTimes]:
    """Of one life of a rank, from its events in the order they were written: one for each step that it worked on."""
    found: list[RankTimes] = []
    collector: StampCollector | None = None
    step = 0
    for event in events:
        if event.kind is Kind.WORK_BEGIN and collector is not None:
            collector.mark(step)
            if (times := collector.take(step)) is not None:
                found.append(times)
        if event.kind in _KINDS:
            collector = collector or StampCollector(event.rank, clock)
            collector(event)
        if event.kind is Kind.WORK_BEGIN:
            step = event.step
    if collector is not None and (times := collector.take(step)) is not None:
        found.append(times)
    return found
