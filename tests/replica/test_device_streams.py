"""On which streams the threads of a rank work beside the one that trains, and what they wait for: over a recorded device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica import device_streams, rank
from helixrt.replica.contracts import State
from helixrt.replica.device_streams import DeviceStreams, Point
from helixrt.replica.live_bytes import queued_copy
from tests.replica.stand_ins import Alone
from tests.replica.test_rank_worker import ROOT, OneRank, until

META = torch.device("meta")


class Device:
    """As torch's module of an accelerator: a thread's current stream is the default one unless it says otherwise. `log` has
    what happens on streams, which are called by number; 0 is the default stream."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.streams = 0
        self._current = threading.local()

    @property
    def current(self) -> int:
        return getattr(self._current, "number", 0)

    def Stream(self, device: torch.device) -> int:  # noqa: N802
        self.streams += 1
        return self.streams

    @contextmanager
    def stream(self, number: int) -> Iterator[None]:
        before, self._current.number = self.current, number
        yield
        self._current.number = before

    def current_stream(self, device: torch.device) -> _Stream:
        return _Stream(self, self.current)

    def note(self, what: str, *more: object) -> None:
        self.log.append((what, self.current, *more))


class _Event(int):
    """By its place in the log."""

    device: Device

    def synchronize(self) -> None:
        self.device.note("event done", int(self))


class _Stream:
    def __init__(self, device: Device, number: int) -> None:
        self._device, self._number = device, number

    def record_event(self) -> _Event:
        self._device.note("event", number := len(self._device.log))
        event = _Event(number)
        event.device = self._device
        return event

    def wait_event(self, event: int) -> None:
        self._device.note("wait", event)

    def synchronize(self) -> None:
        self._device.note("synchronize")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The worker's buckets are taken to be on it."""
    found = Device()
    monkeypatch.setattr(device_streams, "module_of", lambda device: found)
    monkeypatch.setattr(rank, "DeviceStreams", lambda tensors: DeviceStreams([torch.empty(1, device=META)]))
    return found


@pytest.fixture
def one(plain_engine: Callable[..., object], device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[OneRank]:
    def summed(self: Alone, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        device.note("sum")
        torch.div(source, divisor, out=out)

    monkeypatch.setattr(Alone, "all_reduce", summed)
    found = OneRank(plain_engine)
    apply, state, ready = found.engine.apply, found.engine.state, found.engine.ready

    def applied(*args: Any) -> Any:
        device.note("apply")
        return apply(*args)

    def read() -> State:
        device.note("read")
        return state()

    def is_ready(bucket: int) -> None:
        device.note("ready", bucket)
        ready(bucket)

    found.engine.apply, found.engine.state, found.engine.ready = applied, read, is_ready  # type: ignore[method-assign]
    found.say = lambda report: (device.note("report"), found.reports.append(report))  # type: ignore[func-returns-value]
    yield found
    found.end()


def places(log: list[tuple[Any, ...]], what: str) -> list[int]:
    return [place for place, entry in enumerate(log) if entry[0] == what]


def test_gradients_are_exchanged_on_a_stream_of_their_own_and_done_when_it_is_said(one: OneRank, device: Device) -> None:
    """The default stream has all of backward queued."""
    buckets = len(one.engine.buckets)
    one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
    one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: one.reports)
    sums = places(device.log, "sum")
    assert len(sums) == buckets and {device.log[place][1] for place in sums} == {1}
    ready = [(place, device.log[place][2]) for place in places(device.log, "ready")]
    assert [bucket for _, bucket in ready] == list(reversed(range(buckets)))
    assert all(before < place and device.log[before][1] == 1 for (before, _), place in zip(ready, sums, strict=True))
    (said,) = places(device.log, "report")
    assert any(sums[-1] < place < said and device.log[place][1] == 1 for place in places(device.log, "synchronize"))


def test_gradients_that_are_examined_are_awaited_there(one: OneRank, device: Device) -> None:
    one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
    until(lambda: one.worked)
    one.worker.dispatch(p.Examine(1))
    until(lambda: one.reports)
    assert [device.log[place][1:] for place in places(device.log, "ready")] == [(1, i) for i in range(len(one.engine.buckets))]


def test_a_snapshot_is_copied_on_a_stream_of_its_own_behind_the_update(one: OneRank, device: Device) -> None:
    """It waits for what has written the state, and not for the forward and backward that were queued since."""
    one.worker.dispatch(p.Work(ROOT.hash, 0, 1))
    one.worker.dispatch(p.Exchange(1, (0,), (0,), contribute=True, fresh=True))
    until(lambda: one.reports)
    record = CommitRecord(1, 1, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    one.worker.dispatch(p.Apply(record))
    one.worker.dispatch(p.Offer(record.hash))
    until(lambda: one.transport.offers(f"state-{record.hash}"))
    (applied,) = places(device.log, "apply")
    (read,) = places(device.log, "read")
    behind = [device.log[place][2] for place in places(device.log, "event") if place > applied and device.log[place][1] == 0]
    stream = device.log[read][1]
    assert stream not in (0, 1)
    assert device.log[read - 1] == ("wait", stream, behind[0])
    assert ("synchronize", stream) in device.log[read:]


def test_a_checkpoint_is_copied_beside_the_next_work_and_before_the_next_update(one: OneRank, device: Device) -> None:
    """The stream of the training thread waits for the copy before the update that would change the state; the thread never."""
    copies: list[Point] = []

    def updated(done: object) -> None:
        with one.worker.streams.copying() as copied:
            device.note("copy")
        copies.append(copied)

    one.worker.parts.hooks.updated = updated
    first = CommitRecord(1, 1, ROOT.hash, ((0, 0),), {0: 1, 1: 0}, "run")
    second = CommitRecord(2, 2, first.hash, ((0, 0),), {0: 2, 1: 0}, "run")
    for position, (base, record) in enumerate([(ROOT, first), (first, second)]):
        one.worker.dispatch(p.Work(base.hash, position, position + 1))
        one.worker.dispatch(p.Exchange(position + 1, (0,), (0,), contribute=True, fresh=not position))
        until(lambda position=position: len(one.reports) > position)
        one.worker.dispatch(p.Apply(record))
        until(lambda position=position: len(copies) > position)
    applied, (copy, _) = places(device.log, "apply"), places(device.log, "copy")
    stream = device.log[copy][1]
    assert stream not in (0, 1)
    what, on, behind = device.log[copy - 1]
    assert (what, on) == ("wait", stream) and applied[0] < behind < copy and device.log[behind][1] == 0
    assert device.log[copy + 1] == ("event", stream, copy + 1)
    between = device.log[copy + 2 : applied[1]]
    assert ("wait", 0, copy + 1) in between
    assert not [entry for entry in between if entry[0] in ("synchronize", "event done") and entry[1] in (0, stream)]
    copies[0].wait()
    assert device.log[-1] == ("event done", 0, copy + 1)


@pytest.mark.gpu
def test_a_copy_has_the_values_of_its_moment_whatever_is_queued_behind_it() -> None:
    state = torch.zeros(1 << 13, 1 << 13, device="cuda")
    streams = DeviceStreams([state])
    for value in range(4):
        with streams.copying() as copied:
            copies = queued_copy(state), queued_copy(state.t()[5:])
        streams.settle()
        state += 1
        copied.wait()
        assert all(copy.is_pinned() and copy.is_contiguous() and bool((copy == value).all()) for copy in copies)
