"""Snapshots of a rank's state for replicas that are behind, each taken by a thread of its own.

In: orders to offer the state of a lineage, and word of every update of the state that was ordered or done. Out: offers of the
transport. A snapshot waits for the updates ordered before it; an update waits for the snapshots ordered before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from helixrt.errors import Fatal, Retryable
from helixrt.record import Kind
from helixrt.replica.contracts import Shard, layout_of
from helixrt.replica.device_streams import DeviceStreams
from helixrt.replica.live_bytes import host_copy
from helixrt.replica.rank_parts import RankParts, state_name
from helixrt.replica.state_shards import shards_of

_JOIN_S = 1.0
_PAUSE_S = 0.2  # before an unanswered store is asked again


@dataclass
class _Snapshot:
    lineage: str
    after: int  # number of state updates that must be done before it
    done: threading.Event = field(default_factory=threading.Event)


class Serving:
    """`offer`, `withdraw` and `update_ordered` come from the thread that dispatches, `settle` and `update_done` from the main
    thread. `fail(error)` ends the rank."""

    def __init__(self, parts: RankParts, streams: DeviceStreams, fail: Callable[[BaseException], None]) -> None:
        self._engine, self._transport, self._record = parts.engine, parts.transport, parts.record
        self._layouts = parts.layouts
        self._step_s, self._fail = parts.timeouts.step_s, fail
        self._updates_ordered = 0  # the dispatching thread's own
        self._lock = threading.Lock()  # guards everything below
        self._changed = threading.Condition(self._lock)
        self._updates_done = 0
        self._streams, self._written = streams, streams.point()  # behind what has written the state
        self._held = False  # the state may be another one for a while: no snapshot begins
        self._taking = 0  # snapshots that are just being copied
        self._snapshots: list[_Snapshot] = []
        self._wanted: set[str] = set()  # lineages of the states that are offered, or will be after their snapshot
        self._copies: dict[str, list[torch.Tensor]] = {}  # of the states that are offered
        self._threads: list[threading.Thread] = []
        self._closed = False

    # ---------------------------------------------------------------- the thread that dispatches

    def update_ordered(self) -> None:
        """An update or a load of the state was ordered; snapshots ordered from now on wait for it."""
        self._updates_ordered += 1

    def offer(self, lineage: str) -> None:
        """Take a snapshot of the state as it is after the updates ordered so far, and offer it; returns at once."""
        snapshot = _Snapshot(lineage, self._updates_ordered)
        with self._changed:
            if lineage in self._wanted:
                return  # offered, or about to be
            self._wanted.add(lineage)
            self._snapshots = [s for s in self._snapshots if not s.done.is_set()] + [snapshot]
            thread = threading.Thread(target=self._take, args=(snapshot,), name="helixrt-snapshot", daemon=True)
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            thread.start()

    def withdraw(self, lineage: str) -> None:
        """Offer it no longer, nor when its snapshot is taken; idempotent."""
        with self._changed:
            self._wanted.discard(lineage)
            self._copies.pop(lineage, None)
        self._transport.withdraw(state_name(lineage))

    # ---------------------------------------------------------------- the main thread

    def settle(self) -> None:
        """Wait for the snapshots that were ordered before the update that comes next. Raises Fatal if one does not end. On a
        device the update comes after the copies for checkpoints as well."""
        self._streams.settle()
        with self._lock:
            if not self._snapshots:
                return
            before = [s for s in self._snapshots if s.after <= self._updates_done]
        for snapshot in before:
            if not snapshot.done.wait(self._step_s):
                raise Fatal(f"the snapshot of {snapshot.lineage[:8]} did not end in {self._step_s} s")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around user code that may change the state and put it back, as an evaluation of averaged weights does. Snapshots that
        were ordered before are taken first, later ones after it. Raises Fatal as `settle`."""
        self.settle()
        with self._changed:
            self._held = True
            if not self._changed.wait_for(lambda: self._taking == 0, self._step_s):  # ordered meanwhile, and begun
                raise Fatal(f"a snapshot did not end in {self._step_s} s")
        try:
            yield
        finally:
            with self._changed:
                self._held, self._written = False, self._streams.point()
                self._changed.notify_all()

    def update_done(self) -> None:
        """The state is that of the next record."""
        with self._lock:
            self._updates_done, self._written = self._updates_done + 1, self._streams.point()
            if self._snapshots:
                self._changed.notify_all()

    @property
    def updates_done(self) -> int:
        """How many updates and loads of the state were carried out."""
        return self._updates_done

    def live(self) -> list[torch.Tensor]:
        """The copies that are offered."""
        with self._changed:
            return [tensor for copy in self._copies.values() for tensor in copy]

    @property
    def idle(self) -> bool:
        """No snapshot is under way."""
        with self._changed:
            return all(s.done.is_set() for s in self._snapshots)

    def close(self) -> None:
        """End the threads; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---------------------------------------------------------------- a snapshot's own thread

    def _take(self, snapshot: _Snapshot) -> None:
        try:
            with self._changed:
                # Without a limit: the main thread may evaluate or save before, and who watches its progress knows for how long.
                self._changed.wait_for(lambda: self._closed or (self._updates_done >= snapshot.after and not self._held))
                if self._closed:
                    return
                self._taking, written = self._taking + 1, self._written
            begin_s = self._record.clock()
            try:
                with self._streams.own():
                    written.follow()
                    copy = {name: host_copy(shard) for name, shard in shards_of(self._engine.state()).items()}
            finally:
                with self._changed:
                    self._taking -= 1
                    self._changed.notify_all()
            self._write_layout(snapshot.lineage, layout_of(copy))
            with self._changed:
                if snapshot.lineage not in self._wanted or self._transport.offers(state_name(snapshot.lineage)):
                    return  # withdrawn meanwhile; perhaps ordered again, and that one was quicker
                self._transport.offer(state_name(snapshot.lineage), copy)
                self._copies[snapshot.lineage] = list(copy.values())
            nbytes = sum(s.numel() * s.element_size() for s in copy.values())
            self._record.write(Kind.SNAPSHOT, begin_s=begin_s, lineage=snapshot.lineage, bytes=nbytes)
        except BaseException as error:
            self._fail(error)
        finally:
            snapshot.done.set()

    def _write_layout(self, lineage: str, layout: Sequence[Shard]) -> None:
        deadline = time.monotonic() + self._step_s
        while not self._closed:
            try:
                return self._layouts.write(lineage, layout)
            except Retryable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)
