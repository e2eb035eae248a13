"""One rank's work: carries out the leader's commands, and reports.

In: commands in order (`dispatch`, from one thread). Out: reports through a callable. Compute runs in
the thread that calls `run` (the main thread), the exchange in a second, snapshots in a third, each
fetch in one of its own; so gradients are summed while backward still runs, and state is served and
fetched while all of that goes on. What may overlap and what may not is decided here:

- a bucket is exchanged when the work that the exchange belongs to has finished it;
- an update of the state waits for snapshots ordered before it, a snapshot for updates before it;
- gradients stay as they are until the next `Work`; reduced buckets until they are two updates old.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

import torch

from helixrt.collectives.exchange import Exchange
from helixrt.errors import Fatal, Retryable, StartAgain
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord, Kind
from helixrt.replica.commands import (
    Digest,
    Digested,
    Evaluate,
    Exit,
    LoadDurable,
    LoadedDurable,
    RankCommand,
    RankReport,
    Save,
)
from helixrt.replica.contracts import Engine, FetchReport, Shard, StateTransport, Update, WorkResult, layout_of
from helixrt.replica.fetch import OnShard
from helixrt.replica.finite import all_finite
from helixrt.replica.progress import EXCHANGE, FETCH, Progress
from helixrt.timeouts import Timeouts

Buckets = list[torch.Tensor]


@dataclass(frozen=True)
class Done:
    """One update as a rank saw it: what was worked on, and how long the rank waited for others."""

    record: CommitRecord
    update: Update | None  # None: the record was not applied
    work: WorkResult | None  # None: the replica was behind and contributed nothing
    stall_s: float  # from the end of its work (or of the update before) to the update


@dataclass
class Hooks:
    """What the job adds to a rank's life; called in the main thread, but for `stuck`. All optional.

    `stuck(why)`: compute has not given a gradient for longer than any step may take. Called from another
    thread, since nothing reaches a main thread that hangs; it should end the process. `load(lineage, initial)`: load
    this durable state (`initial`: the parameters that the engine began with, which it holds still) into the engine;
    False if it is not there any more.
    """

    updated: Callable[[Done], None] = lambda done: None
    evaluated: Callable[[int, float, int], None] = lambda step, loss, tokens: None
    save: Callable[[Save], None] = lambda command: None
    stuck: Callable[[str], None] = lambda why: None
    load: Callable[[str, bool], bool] = lambda lineage, initial: True


@dataclass(frozen=True)
class Numbered:
    """A `Work` with its number: only the newest one's buckets count as ready."""

    serial: int
    work: p.Work


@dataclass
class Snapshot:
    lineage: str
    after: int  # number of state updates that must be done before it
    done: threading.Event = field(default_factory=threading.Event)


class _Replaced(Exception):
    """A newer fetch was begun: this one's result counts for nothing."""


class RankWorker:
    """Owns the engine, the exchange and the transport of one rank, and the threads around them.

    `ring` is this rank's number in its replica, `rendezvous` the run's store with a prefix that is
    unique to the run and the ring: `host:port/prefix`.
    """

    def __init__(
        self,
        replica: int,
        ring: int,
        engine: Engine,
        exchange: Exchange,
        transport: StateTransport,
        record: FlightRecord,
        timeouts: Timeouts,
        rendezvous: str,
        report: Callable[[RankReport], None],
        hooks: Hooks | None = None,
        max_wait_s: float = 0.0,
        progress: Progress | None = None,
    ) -> None:
        self.replica, self.ring, self.engine, self.exchange, self.transport = replica, ring, engine, exchange, transport
        self.record, self.timeouts, self.rendezvous, self.report = record, timeouts, rendezvous, report
        self.hooks, self.max_wait_s, self.progress = hooks or Hooks(), max_wait_s, progress or Progress()
        self._main: queue.Queue[RankCommand | Numbered | BaseException] = queue.Queue()
        self._exchanges: queue.Queue[p.Exchange | p.Examine | None] = queue.Queue()
        self._changed = threading.Condition()  # guards everything below
        self._work_serial = 0  # of the newest dispatched Work
        self._ready: set[int] = set()  # buckets that its work has finished
        self._aborted = -1  # newest generation that was told to abort
        self._reduced: tuple[int, Buckets] | None = None  # (generation, sums) of the last exchange
        self._pool: list[Buckets] = []
        self._served: list[tuple[str, Buckets]] = []  # offered reduced buckets, oldest first
        self._kept: dict[str, Buckets] = {}
        self._fetched: dict[str, dict[str, torch.Tensor]] = {}
        self._fetches: dict[str, threading.Thread] = {}
        self._fetch_serial = 0  # of the newest fetch; an older one's result counts for nothing
        self._fetching_reduced = ""  # what the newest fetch is after, if it is reduced buckets
        self._snapshots: list[Snapshot] = []
        self._wanted: set[str] = set()  # lineages of the states that are offered, or will be after their snapshot
        self._updates_ordered = self._updates_done = 0
        self._pristine = True  # the engine has the parameters that it began with
        self._result: tuple[int, WorkResult] | None = None
        self._idle_since = time.monotonic()
        self._threads = [
            threading.Thread(target=self._exchange_loop, name="helixrt-exchange", daemon=True),
        ]

    # ---------------------------------------------------------------- commands, in order, never blocking

    def dispatch(self, command: RankCommand) -> None:
        """Take the next command; returns at once. Called from one thread."""
        match command:
            case p.Work():
                with self._changed:
                    self._work_serial += 1
                    self._ready.clear()
                    serial = self._work_serial
                self._main.put(Numbered(serial, command))
            case p.Exchange() | p.Examine():
                self._exchanges.put(command)
            case p.Abort():
                with self._changed:
                    self._aborted = max(self._aborted, command.generation)
                    self._changed.notify_all()
                self.exchange.abort()
            case p.Apply():
                if command.record.applied:  # taken now: the next exchange may begin before the main thread gets here
                    self._keep(command.record)
                self._order_update(command)
            case p.Replay() | p.Load() | LoadDurable():
                self._order_update(command)
            case p.Keep():
                self._keep(command.record)
            case p.Forget():
                with self._changed:
                    self._kept.pop(command.lineage, None)
                    if self._fetching_reduced == command.lineage:
                        self._fetch_serial += 1  # nobody would take them out of `_kept` again
            case p.Offer():
                self._offer(command.lineage)
            case p.Withdraw():
                with self._changed:
                    self._wanted.discard(command.lineage)
                self.transport.withdraw(_state_name(command.lineage))
            case p.FetchState() | p.FetchReduced():
                self._start_fetch(command)
            case Evaluate() | Save() | Digest() | Exit():
                self._main.put(command)

    def _order_update(self, command: RankCommand) -> None:
        self._updates_ordered += 1
        self._main.put(command)

    def fail(self, error: BaseException) -> None:
        """Make `run` raise this, from any thread."""
        self._main.put(error)

    # ---------------------------------------------------------------- main thread: compute

    def run(self) -> None:
        """Carry out commands until `Exit`. Raises what makes this rank unable to go on."""
        for thread in self._threads:
            thread.start()
        try:
            while True:
                command = self._main.get()
                if isinstance(command, BaseException):
                    raise command
                if isinstance(command, Exit):
                    return
                with self._doing(command):
                    self._carry_out(command)
        finally:
            self.close()

    def _doing(self, command: RankCommand | Numbered) -> AbstractContextManager[None]:
        """What the main thread reports while it carries out the command."""
        match command:
            case Numbered():
                return self.progress.doing("work", position=command.work.position)
            case Evaluate() | Save() | Digest() | LoadDurable():
                return self.progress.busy(type(command).__name__.lower(), self.timeouts.evaluate_s)
            case _:
                return self.progress.doing(type(command).__name__.lower())

    def _carry_out(self, command: RankCommand | Numbered) -> None:
        match command:
            case Numbered():
                self._work(command.serial, command.work)
            case p.Apply() | p.Replay():
                with self._changed:
                    reduced = self._kept.pop(command.record.hash) if command.record.applied else None
                self._update(command.record, reduced)
            case p.Load():
                with self._changed:
                    shards = self._fetched.pop(command.lineage)
                self._settle_snapshots()
                self.engine.load(shards)
                self._pristine = False
                self._update_done()
            case LoadDurable():
                self._load_durable(command)
            case Evaluate():
                loss, tokens = self.engine.evaluate(command.batches)
                self.hooks.evaluated(command.step, loss, tokens)
                self._idle_since = time.monotonic()
            case Save():
                self.hooks.save(command)
                self._idle_since = time.monotonic()
            case Digest():
                self.report(digest(self.engine.state()))

    def _work(self, serial: int, command: p.Work) -> None:
        """Also when it was replaced meanwhile: all stages must run the same passes, and they learn of it at
        different moments."""

        def on_bucket(index: int) -> None:
            with self._changed:
                if serial == self._work_serial:
                    self._ready.add(index)
                    self._changed.notify_all()

        self.record.step = command.step
        self.record.write(Kind.WORK_BEGIN, position=command.position)
        begin_s = self.record.clock()
        result = self.engine.run(command.position, on_bucket)
        self._result = (command.position, result)
        self._idle_since = time.monotonic()
        # the leader may have gone on to the next step by now: it needs the buckets, not the end of the work
        self.record.write(Kind.WORK_END, begin_s=begin_s, step=command.step, position=command.position)

    def _load_durable(self, command: LoadDurable) -> None:
        if command.initial and not self._pristine:
            raise StartAgain("nothing but the initial parameters is durable, and this process has changed its own")
        self._settle_snapshots()
        found = self.hooks.load(command.lineage, command.initial)
        self._pristine = self._pristine and (command.initial or not found)
        self._update_done()
        self.report(LoadedDurable(command.lineage, found))

    def _update(self, record: CommitRecord, reduced: Buckets | None) -> None:
        stall_s = time.monotonic() - self._idle_since
        self._settle_snapshots()
        update = None
        if reduced is not None:
            begin_s = self.record.clock()
            update = self.engine.apply(record.step, reduced)
            self._pristine = False
            self.record.write(Kind.APPLY, begin_s=begin_s, step=record.step, record=record.hash)
            self._serve_reduced(record, reduced)
        self._update_done()
        work = self._result[1] if self._result is not None and self.replica in record.replicas else None
        self._result = None
        if work is not None:
            self.progress.committed()
        self.hooks.updated(Done(record, update, work, stall_s))
        self._idle_since = time.monotonic()

    def _settle_snapshots(self) -> None:
        number = self._updates_done + 1
        with self._changed:
            before = [s for s in self._snapshots if s.after < number]
        for snapshot in before:
            if not snapshot.done.wait(self.timeouts.step_s):
                raise Fatal(f"the snapshot of {snapshot.lineage[:8]} did not end in {self.timeouts.step_s} s")

    def _update_done(self) -> None:
        with self._changed:
            self._updates_done += 1
            self._changed.notify_all()

    # ---------------------------------------------------------------- exchange thread

    def _exchange_loop(self) -> None:
        torch.set_grad_enabled(False)  # thread-local
        while (command := self._exchanges.get()) is not None:
            try:
                outcome: RankReport
                try:
                    with self.progress.doing("exchange", EXCHANGE, self.max_wait_s + self.timeouts.exchange_s):
                        if isinstance(command, p.Examine):
                            finite = all(all_finite(bucket) for bucket in self.engine.buckets)
                            outcome = p.Examined(command.generation, self.ring, finite)
                        else:
                            outcome = p.RingDone(command.generation, self.ring, finite=self._exchange(command))
                except Retryable as error:
                    suspects = error.cause.peers
                    self.record.write(
                        Kind.EXCHANGE_FAILED, generation=command.generation, reason=str(error), suspects=list(suspects)
                    )
                    outcome = p.RingFailed(command.generation, self.ring, str(error), suspects)
                self.report(outcome)  # one answer each, also when the report itself fails
            except BaseException as error:
                self.fail(error)
                return

    def _exchange(self, command: p.Exchange) -> bool:
        """Sum all buckets; whether every sum is finite."""
        deadline = time.monotonic() + self.timeouts.exchange_s + self.timeouts.step_s
        self._check_abort(command.generation)
        if not command.contribute and self.max_wait_s > 0:
            self._await_fetches(self.max_wait_s)
            self._check_abort(command.generation)  # connecting anew would forget it
        begin_s = self.record.clock()
        if command.fresh:
            prefix = f"{self.rendezvous}/{command.generation}"
            self.exchange.configure(command.generation, command.members, self.replica, prefix)
        self.record.write(Kind.EXCHANGE_BEGIN, begin_s=begin_s, generation=command.generation, contribute=command.contribute)
        buckets = self.engine.buckets
        sums, finite = self._borrow(buckets), True
        for count, index in enumerate(reversed(range(len(buckets)))):
            if command.contribute:
                self._await_bucket(index, command.generation, deadline)
                source = buckets[index]
            else:
                source = torch.zeros_like(buckets[index])
            begin_s = self.record.clock()
            self.exchange.all_reduce(source, sums[index], len(command.contributors))
            self.record.write(
                Kind.EXCHANGE_BUCKET,
                begin_s=begin_s,
                generation=command.generation,
                bucket=count,
                buckets=len(buckets),
                bytes=source.numel() * source.element_size(),
            )
            self._check_abort(command.generation)
            finite = finite and all_finite(sums[index])
        with self._changed:
            self._reduced = (command.generation, sums)
        self.record.write(Kind.EXCHANGE_END, generation=command.generation, finite=finite)
        return finite

    def _await_bucket(self, index: int, generation: int, deadline: float) -> None:
        with self._changed:
            while index not in self._ready:
                if self._aborted >= generation:
                    raise Retryable("aborted")
                if not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    why = f"gradient bucket {index} was not ready in time"
                    self.hooks.stuck(why)
                    raise Retryable(why)

    def _check_abort(self, generation: int) -> None:
        with self._changed:
            if self._aborted >= generation:
                raise Retryable("aborted")

    def _await_fetches(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for thread in list(self._fetches.values()):
            thread.join(max(0.0, deadline - time.monotonic()))

    # ---------------------------------------------------------------- reduced buckets

    def _borrow(self, like: Sequence[torch.Tensor]) -> Buckets:
        with self._changed:
            if self._reduced is not None:  # of an exchange that was not committed
                spare, self._reduced = self._reduced[1], None
                return spare
            if self._pool:
                return self._pool.pop()
        return [torch.empty_like(b) for b in like]

    def _keep(self, record: CommitRecord) -> None:
        with self._changed:
            assert self._reduced is not None and self._reduced[0] == record.generation
            self._kept[record.hash] = self._reduced[1]
            self._reduced = None

    def _serve_reduced(self, record: CommitRecord, reduced: Buckets) -> None:
        """Offer the newest two; a set goes back to the pool when it is two updates old."""
        name = _reduced_name(record.hash)
        self.transport.offer(name, dict(zip(_bucket_names(reduced), reduced, strict=True)))
        self._served.append((name, reduced))
        if len(self._served) > 2:
            old_name, old = self._served.pop(0)
            self.transport.withdraw(old_name)
            with self._changed:
                if len(self._pool) < 2:
                    self._pool.append(old)

    # ---------------------------------------------------------------- state for others, and from others

    def _offer(self, lineage: str) -> None:
        snapshot = Snapshot(lineage, self._updates_ordered)
        with self._changed:
            if lineage in self._wanted:
                return  # offered, or about to be
            self._wanted.add(lineage)
            self._snapshots = [s for s in self._snapshots if not s.done.is_set()] + [snapshot]
        threading.Thread(target=self._take_snapshot, args=(snapshot,), name="helixrt-snapshot", daemon=True).start()

    def _take_snapshot(self, snapshot: Snapshot) -> None:
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: self._updates_done >= snapshot.after, self.timeouts.step_s):
                    raise Fatal(f"the update to {snapshot.lineage[:8]} was not done in {self.timeouts.step_s} s")
            begin_s = self.record.clock()
            copy = {name: shard.detach().clone() for name, shard in self.engine.state().items()}
            with self._changed:
                if snapshot.lineage not in self._wanted or self.transport.offers(_state_name(snapshot.lineage)):
                    return  # withdrawn meanwhile; perhaps ordered again, and that one was quicker
                self.transport.offer(_state_name(snapshot.lineage), copy)
            nbytes = sum(s.numel() * s.element_size() for s in copy.values())
            self.record.write(Kind.SNAPSHOT, begin_s=begin_s, lineage=snapshot.lineage, bytes=nbytes)
        except BaseException as error:
            self.fail(error)
        finally:
            snapshot.done.set()

    def _start_fetch(self, command: p.FetchState | p.FetchReduced) -> None:
        self._fetches = {k: t for k, t in self._fetches.items() if t.is_alive()}
        with self._changed:
            self._fetch_serial += 1
            serial = self._fetch_serial
            self._fetching_reduced = command.lineage if isinstance(command, p.FetchReduced) else ""
        name = f"helixrt-fetch-{command.lineage[:6]}"
        thread = threading.Thread(target=self._fetch_and_report, args=(command, serial), name=name, daemon=True)
        self._fetches[command.lineage] = thread
        thread.start()

    def _fetch_and_report(self, command: p.FetchState | p.FetchReduced, serial: int) -> None:
        try:
            with self.progress.doing("fetch", FETCH, 2 * self.timeouts.stall_s):
                outcome = self._fetch(command, serial)
            if outcome is not None:
                self.report(outcome)
        except BaseException as error:
            self.fail(error)

    def _fetch(self, command: p.FetchState | p.FetchReduced, serial: int) -> p.Fetched | p.FetchFailed | None:
        """Fetch, and keep what came; None if a newer fetch replaced this one."""
        state = isinstance(command, p.FetchState)
        stall_s = self.timeouts.stall_s if state else min(2.0, self.timeouts.stall_s)
        if state:
            name, layout = _state_name(command.lineage), layout_of(self.engine.state())
        else:
            buckets = self.engine.buckets
            name = _reduced_name(command.lineage)
            layout = layout_of(dict(zip(_bucket_names(buckets), buckets, strict=True)))
        donors = [m.addresses[self.ring] for m in command.donors if m.replica != self.replica]
        self.record.write(Kind.FETCH_BEGIN, lineage=command.lineage, donors=donors, what="state" if state else "buckets")
        begin_s = self.record.clock()
        try:
            shards, done = self._fetch_from(name, layout, donors, stall_s, partial(self._on_shard, serial))
        except _Replaced:
            return None
        except Retryable as error:
            with self._changed:
                return p.FetchFailed(command.lineage, str(error)) if serial == self._fetch_serial else None
        self.record.write(
            Kind.FETCH_END, begin_s=begin_s, lineage=command.lineage, bytes=done.nbytes, per_donor=dict(done.per_donor)
        )
        with self._changed:
            if serial != self._fetch_serial:
                return None
            if state:
                self._fetched = {command.lineage: shards}
            else:
                self._kept[command.lineage] = [shards[name] for name in _bucket_names(self.engine.buckets)]
        return p.Fetched(command.lineage)

    def _fetch_from(
        self, name: str, layout: Sequence[Shard], donors: Sequence[str], stall_s: float, on_shard: OnShard
    ) -> tuple[dict[str, torch.Tensor], FetchReport]:
        """A donor may not offer it yet: attempts begin for `stall_s`, and last as long as bytes come."""
        deadline = time.monotonic() + stall_s
        while True:
            try:
                return self.transport.fetch(name, layout, donors, stall_s, on_shard=on_shard)
            except Retryable:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)

    def _on_shard(self, serial: int, shard: Shard, donor: str, ok: bool) -> None:
        self.record.write(Kind.FETCH_SHARD, shard=shard.name, donor=donor, bytes=shard.nbytes, ok=ok)
        with self._changed:
            if serial != self._fetch_serial:
                raise _Replaced

    # ---------------------------------------------------------------- end

    def close(self) -> None:
        """End the threads, the exchange, the transport and the engine; idempotent."""
        self._exchanges.put(None)
        self.exchange.abort()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=5.0)
        self.exchange.close()
        self.transport.close()
        self.engine.close()


def digest(state: Mapping[str, torch.Tensor]) -> Digested:
    """SHA-256 over names and raw bytes: of what `Engine.state` calls `parameter/…`, and of everything."""
    parameters, everything = hashlib.sha256(), hashlib.sha256()
    for name in sorted(state):
        raw = name.encode() + state[name].detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        everything.update(raw)
        if name.startswith("parameter/"):
            parameters.update(raw)
    return Digested(parameters.hexdigest(), everything.hexdigest())


def _state_name(lineage: str) -> str:
    return f"state-{lineage}"


def _reduced_name(lineage: str) -> str:
    return f"reduced-{lineage}"


def _bucket_names(buckets: Sequence[torch.Tensor]) -> list[str]:
    return [f"bucket{i}" for i in range(len(buckets))]
