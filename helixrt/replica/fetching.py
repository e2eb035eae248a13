"""Fetches of states and of reduced gradient sets from other replicas, each in a thread of its own.

In: orders to fetch. Out: reports, and what came: states, which the main thread takes, and reduced sets. A newer fetch replaces
an older one, whose result counts for nothing; it ends with the next shard that comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from helixrt.errors import Retryable
from helixrt.protocol.step import messages as p
from helixrt.record import Kind
from helixrt.replica.contracts import FetchReport, Shard, State, layout_of
from helixrt.replica.fetch import OnShard
from helixrt.replica.progress import FETCH
from helixrt.replica.rank_parts import RankParts, bucket_names, reduced_name, state_name
from helixrt.replica.reduced_sets import ReducedSets
from helixrt.replica.state_shards import state_of

_JOIN_S = 1.0
_PAUSE_S = 0.05  # before a donor that does not offer it yet is asked again
_REDUCED_STALL_S = 2.0  # reduced sets are offered at once or not at all


class _Replaced(Exception):
    """A newer fetch was begun: this one's result counts for nothing."""


class Fetching:
    """`begin` and `forget` are called by the thread that dispatches, `take` from the main thread, `wait` from the exchange
    thread. `fail(error)` ends the rank."""

    def __init__(self, parts: RankParts, reduced: ReducedSets, fail: Callable[[BaseException], None]) -> None:
        self._parts, self._reduced, self._fail = parts, reduced, fail
        self._lock = threading.Lock()  # guards everything below; `reduced` may be called with it held
        self._serial = 0  # of the newest fetch
        self._lineage = ""  # what the newest fetch is after
        self._states: dict[str, State] = {}
        self._threads: dict[str, threading.Thread] = {}  # lineage -> of the newest fetch of it

    # ---------------------------------------------------------------- orders

    def begin(self, command: p.FetchState | p.FetchReduced) -> None:
        """Begin a fetch, instead of the one that is under way; returns at once."""
        with self._lock:
            self._serial += 1
            self._lineage = command.lineage
            serial = self._serial
            thread = threading.Thread(target=self._run, args=(command, serial), name="helixrt-fetch", daemon=True)
            self._threads = {lineage: t for lineage, t in self._threads.items() if t.is_alive()}
            self._threads[command.lineage] = thread
            thread.start()

    def forget(self, lineage: str) -> None:
        """The state or the reduced set of this record is not needed: give up its fetch, too."""
        with self._lock:
            if self._lineage == lineage:
                self._serial += 1  # its result would not be used
            self._states.pop(lineage, None)
        self._reduced.forget(lineage)

    def take(self, lineage: str) -> State:
        """The state that was fetched; it is the caller's now."""
        with self._lock:
            return self._states.pop(lineage)

    def wait(self, limit_s: float) -> None:
        """For the fetches that are under way, at most so long."""
        deadline = time.monotonic() + limit_s
        for thread in self.threads().values():
            thread.join(max(0.0, deadline - time.monotonic()))

    def threads(self) -> dict[str, threading.Thread]:
        """Of the newest fetch of each lineage."""
        with self._lock:
            return dict(self._threads)

    def close(self) -> None:
        """Give up what is under way; idempotent."""
        with self._lock:
            self._serial += 1
        self.wait(_JOIN_S)

    # ---------------------------------------------------------------- a fetch's own thread

    def _run(self, command: p.FetchState | p.FetchReduced, serial: int) -> None:
        try:
            with self._parts.progress.doing("fetch", FETCH, 2 * self._parts.timeouts.stall_s):
                outcome = self._fetch(command, serial)
            if outcome is not None:
                self._parts.report(outcome)
        except BaseException as error:
            self._fail(error)

    def _fetch(self, command: p.FetchState | p.FetchReduced, serial: int) -> p.Fetched | p.FetchFailed | None:
        """Fetch, and keep what came; None if a newer fetch replaced this one."""
        parts, state = self._parts, isinstance(command, p.FetchState)
        donors = [m.addresses[parts.group_rank] for m in command.donors if m.replica != parts.replica]
        stall_s = parts.timeouts.stall_s if state else min(_REDUCED_STALL_S, parts.timeouts.stall_s)
        name = state_name(command.lineage) if state else reduced_name(command.lineage)
        parts.record.write(Kind.FETCH_BEGIN, lineage=command.lineage, donors=donors, what="state" if state else "buckets")
        begin_s = parts.record.clock()
        try:
            layout = partial(self._state_layout, command.lineage, name, donors, stall_s) if state else self._reduced_layout
            shards, done = self._fetch_from(name, layout, donors, stall_s, partial(self._on_shard, serial))
        except _Replaced:
            return None
        except Retryable as error:
            with self._lock:
                return p.FetchFailed(command.lineage, str(error)) if serial == self._serial else None
        parts.record.write(
            Kind.FETCH_END, begin_s=begin_s, lineage=command.lineage, bytes=done.nbytes, per_donor=dict(done.per_donor)
        )
        with self._lock:
            if serial != self._serial:
                return None
            if state:
                self._states = {command.lineage: state_of(shards)}
            else:
                self._reduced.put(command.lineage, [shards[name] for name in bucket_names(parts.engine.buckets)])
        return p.Fetched(command.lineage)

    def _state_layout(self, lineage: str, name: str, donors: Sequence[str], stall_s: float) -> Sequence[Shard]:
        """That of the donors' offer: this rank's optimizers may have no state yet, and scalars differ in length."""
        layout = self._parts.transport.layout(name, donors, stall_s)
        self._parts.layouts.check(lineage, layout)
        return layout

    def _reduced_layout(self) -> Sequence[Shard]:
        buckets = self._parts.engine.buckets
        return layout_of(dict(zip(bucket_names(buckets), buckets, strict=True)))

    def _fetch_from(
        self, name: str, layout: Callable[[], Sequence[Shard]], donors: Sequence[str], stall_s: float, on_shard: OnShard
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        """A donor may not offer it yet: attempts begin for `stall_s`, and last as long as bytes come."""
        deadline = time.monotonic() + stall_s
        while True:
            try:
                return self._parts.transport.fetch(name, layout(), donors, stall_s, on_shard=on_shard)
            except Retryable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_PAUSE_S)

    def _on_shard(self, serial: int, shard: Shard, donor: str, ok: bool) -> None:
        self._parts.record.write(Kind.FETCH_SHARD, shard=shard.name, donor=donor, bytes=shard.nbytes, ok=ok)
        with self._lock:
            if serial != self._serial:
                raise _Replaced
