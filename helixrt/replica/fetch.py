"""Drives a fetch: one thread per donor, decisions by `protocol.catchup`, bytes into fresh tensors.

In: the agreed layout, the donors' addresses and a way to open one (`DonorLink`). Out: the tensors.
HTTP and Ray differ in their `DonorLink` alone.

An answer goes into a buffer of its donor's thread and from there into the state only once its
checksum is right and it is the first copy according to the plan: a piece may be on its way from two donors.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from helixrt.errors import Cause, Retryable
from helixrt.protocol.catchup import (
    Action,
    Arrived,
    Ask,
    Begin,
    DonorLost,
    Drop,
    Event,
    Failed,
    Fetch,
    FetchRules,
    Finished,
    Heard,
    Keep,
    Piece,
    Tick,
)
from helixrt.replica.contracts import FetchReport, Shard
from helixrt.replica.state_bytes import StateBytes, allocate

_TICK_S = 0.05
OnShard = Callable[[Shard, str, bool], None]


class DonorGone(Exception):
    """A donor cannot be reached, has not what is asked for, or does not keep to the agreement."""


class DonorLink(ABC):
    """The way to one donor. All but `cut` is called on the donor's thread."""

    @abstractmethod
    def read(self, piece: Piece, into: memoryview, heard: Callable[[], None]) -> bool:
        """Put the piece's bytes into `into` (of its length), and call `heard` as some come; False if their checksum
        is wrong. Raises DonorGone."""

    @abstractmethod
    def cut(self) -> None:
        """Make a running and every later `read` end soon, with DonorGone; from any thread, idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Give up the connection; the last call."""


def fetch_state(
    layout: Sequence[Shard],
    donors: Sequence[str],
    connect: Callable[[str], DonorLink],
    stall_s: float,
    on_shard: OnShard,
    rules: FetchRules,
) -> tuple[dict[str, torch.Tensor], FetchReport]:
    """Fetch all of `layout`. `on_shard(shard, donor, True)` when a shard is whole, with the donor of its
    last piece, and `(…, False)` for every shard that a spoilt piece touches. Calls come one at a time,
    on the fetch's threads. Raises Retryable when no donor is left, or when no byte has come for `stall_s`.
    """
    if not donors:
        raise Retryable("no donor to fetch state from")
    running = _Running(layout, donors, connect, on_shard, rules)
    began_s = time.monotonic()
    outcome = running.wait(stall_s)
    if isinstance(outcome, Failed):
        raise Retryable(Cause(f"state could not be fetched: {outcome.reason}"))
    if outcome is None:
        raise Retryable(Cause(f"state could not be fetched: no bytes came within {stall_s:g} s"))
    plan = running.plan
    report = FetchReport(running.state.nbytes, plan.per_donor, dict(plan.retried), time.monotonic() - began_s)
    return running.tensors, report


class _Running:
    """One fetch on its way. `lock` guards the plan, the state and the callbacks."""

    def __init__(
        self,
        layout: Sequence[Shard],
        donors: Sequence[str],
        connect: Callable[[str], DonorLink],
        on_shard: OnShard,
        rules: FetchRules,
    ) -> None:
        self.tensors = allocate(layout)
        self.state = StateBytes(self.tensors)
        self.plan = Fetch(self.state.nbytes, list(dict.fromkeys(donors)), rules)
        self._connect, self._on_shard = connect, on_shard
        self._missing = [shard.nbytes for shard in layout]
        self._changed = threading.Condition()
        self._outcome: Finished | Failed | None = None
        self._over = False
        self._heard_at = 0.0  # when bytes came last, from any donor
        self._error: BaseException | None = None  # raised by a callback
        self._links: dict[str, DonorLink] = {}
        self._asked: dict[str, queue.SimpleQueue[Piece | None]] = {d: queue.SimpleQueue() for d in self.plan.per_donor}
        self._threads = [
            threading.Thread(target=self._serve, args=(d,), name=f"helixrt-fetch-{d}", daemon=True) for d in self._asked
        ]

    def wait(self, stall_s: float) -> Finished | Failed | None:
        """Run until finished, failed or without bytes for `stall_s` (None); no thread writes into the state afterwards."""
        self._heard_at = time.monotonic()
        for shard in self.state.layout:
            if not shard.nbytes:
                self._on_shard(shard, "", True)
        for thread in self._threads:
            thread.start()
        try:
            self._take(Begin())
            with self._changed:
                while self._outcome is None and self._error is None and time.monotonic() < self._heard_at + stall_s:
                    self._changed.wait(min(_TICK_S, max(0.0, self._heard_at + stall_s - time.monotonic())))
                    self._take(Tick())
        finally:
            self._end()
        if self._error is not None:
            raise self._error
        return self._outcome

    def _end(self) -> None:
        with self._changed:
            self._over = True
            links = list(self._links.values())
        for pieces in self._asked.values():
            pieces.put(None)
        for link in links:
            link.cut()
        for thread in self._threads:
            thread.join(5)  # one still connecting to a dead host is left to find that out by itself

    def _serve(self, donor: str) -> None:
        """A donor's thread."""
        buffer = bytearray(0)
        link: DonorLink | None = None
        told_at = 0.0

        def heard() -> None:
            nonlocal told_at
            if (now := time.monotonic()) - told_at >= _TICK_S:
                told_at = now
                self._take(Heard(donor))

        try:
            while (piece := self._asked[donor].get()) is not None:
                if link is None:
                    link = self._connect(donor)
                    with self._changed:
                        self._links[donor] = link
                        if self._over:
                            link.cut()
                            return
                if len(buffer) < piece.nbytes:
                    buffer = bytearray(piece.nbytes)
                data = memoryview(buffer)[: piece.nbytes]
                intact = link.read(piece, data, heard)
                self._take(Arrived(donor, piece, intact), data)
        except DonorGone as gone:
            self._take(DonorLost(donor, str(gone)))
        except BaseException as error:
            with self._changed:
                if not self._over:
                    self._error = error
                self._changed.notify_all()
        finally:
            if link is not None:
                link.close()

    def _take(self, event: Event, data: memoryview | None = None) -> None:
        with self._changed:
            if self._over or self._outcome is not None:
                return
            if isinstance(event, Arrived | Heard):
                self._heard_at = time.monotonic()
            if isinstance(event, Arrived) and not event.intact:
                for i in self.state.shards_of(event.piece):
                    self._on_shard(self.state.layout[i], event.donor, False)
            for action in self.plan.on(event, time.monotonic()):
                self._do(action, data)

    def _do(self, action: Action, data: memoryview | None) -> None:
        match action:
            case Ask(donor, piece):
                self._asked[donor].put(piece)
            case Keep(donor, piece):
                assert data is not None
                self.state.write(piece, data)
                self._count(donor, piece)
            case Drop(donor, _):
                self._asked[donor].put(None)
                if donor in self._links:
                    self._links[donor].cut()
            case Finished() | Failed():
                self._outcome = action
                self._changed.notify_all()

    def _count(self, donor: str, piece: Piece) -> None:
        for i in self.state.shards_of(piece):
            shard, start = self.state.layout[i], self.state.starts[i]
            inside = min(piece.end, start + shard.nbytes) - max(piece.begin, start)
            if inside > 0:
                self._missing[i] -= inside
                if not self._missing[i]:
                    self._on_shard(shard, donor, True)
