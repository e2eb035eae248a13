"""When the operations of a stage began and ended, for its flight record.

In: word that an operation begins and has ended, in the thread that computes. Out: an OPERATION event for each. On the CPU an
operation is over when its call returns. On a CUDA device the call has queued the work by then, so events are recorded around
it; they are read once they have passed, by `write_passed`, and nothing waits for the device.

How long an operation took is the time between its two events. When it was follows from that, and from the rule that nothing
happens on the device before the host has queued it: the earliest time that the rule allows for its two events and for those
before it in the pass. An event that an idle device meets at once makes this exact, and all after it. Each pass begins anew, so
the two clocks do not drift apart.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from helixrt.pipeline.program import Action
from helixrt.record import FlightRecord, Kind


class OperationTimes(ABC):
    """Of one stage. Calls come from the thread that computes."""

    def begin_pass(self) -> None:  # noqa: B027 on the CPU there is nothing to begin
        """A pass over a batch begins."""

    @abstractmethod
    def begin(self) -> Any:
        """An entry of the program begins; what `end` is to be given."""

    @abstractmethod
    def end(self, begun: Any, entry: Sequence[Action]) -> None:
        """The entry has ended."""

    def write_passed(self) -> None:  # noqa: B027 on the CPU all is written
        """Write the events of operations that are over; never blocks."""

    def wait(self) -> None:  # noqa: B027 on the CPU all is over
        """Block until all that was queued is over: for an injected slowdown, and for estimated costs."""


class HostTimes(OperationTimes):
    def __init__(self, record: FlightRecord) -> None:
        self._record = record

    def begin(self) -> float:
        return self._record.clock()

    def end(self, begun: float, entry: Sequence[Action]) -> None:
        _write(self._record, entry, begun, None, None)


class TimingEvent(Protocol):
    """As `torch.cuda.Event(enable_timing=True)`; `elapsed_time` is in ms."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


@dataclass(frozen=True, slots=True)
class _Moment:
    queued_s: float  # by the host's clock
    event: TimingEvent
    first: bool = False  # of its pass


class DeviceTimes(OperationTimes):
    """`make_event` is for tests."""

    def __init__(self, record: FlightRecord, make_event: Callable[[], TimingEvent] | None = None) -> None:
        self._record = record
        self._make: Callable[[], TimingEvent] = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._open: deque[tuple[_Moment, _Moment, Sequence[Action], int]] = deque()
        self._known: tuple[TimingEvent, float] | None = None  # an event that has passed, and when
        self._first = False  # no operation of the pass has begun

    def begin_pass(self) -> None:
        self.write_passed()
        self._first = True

    def begin(self) -> _Moment:
        first, self._first = self._first, False
        return self._moment(first)

    def end(self, begun: _Moment, entry: Sequence[Action]) -> None:
        self._open.append((begun, self._moment(), entry, self._record.step))

    def write_passed(self) -> None:
        while self._open and self._open[0][1].event.query():
            begun, ended, entry, step = self._open.popleft()
            took_s = begun.event.elapsed_time(ended.event) / 1e3
            begin_s = max(begun.queued_s, ended.queued_s - took_s)
            if self._known is not None and not begun.first:
                event, at_s = self._known
                begin_s = max(begin_s, at_s + event.elapsed_time(begun.event) / 1e3)
            self._known = ended.event, begin_s + took_s
            _write(self._record, entry, begin_s, begin_s + took_s, step)

    def wait(self) -> None:
        self._moment().event.synchronize()

    def _moment(self, first: bool = False) -> _Moment:
        moment = _Moment(self._record.clock(), self._make(), first)
        moment.event.record()
        return moment


def times_on(device: torch.device, record: FlightRecord) -> OperationTimes:
    """Of operations that a stage computes on this device."""
    return DeviceTimes(record) if device.type == "cuda" else HostTimes(record)


def _write(record: FlightRecord, entry: Sequence[Action], begin_s: float, end_s: float | None, step: int | None) -> None:
    woven = {"woven": True} if len(entry) > 1 else {}
    for action in entry:
        op, chunk, microbatch = action.op.value, action.chunk, action.microbatch
        record.write(
            Kind.OPERATION, begin_s=begin_s, end_s=end_s, step=step, op=op, chunk=chunk, microbatch=microbatch, **woven
        )
