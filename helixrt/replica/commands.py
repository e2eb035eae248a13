"""Commands of a replica's leader to its ranks, their events, and how both are sent.

Commands are the machine's actions (`helixrt.protocol.step.machine`) plus the few of the job; reports are
its events, with the rank that sent them. The leader's own rank gets them in the process; other ranks
through keys of the run's store, numbered, so that each rank sees every command once and in order.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helixrt.errors import Retryable
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import Member
from helixrt.replica.contracts import RunStore

# ---------------------------------------------------------------- vocabulary


@dataclass(frozen=True)
class Evaluate:
    """Run the user's validation of the state of the record `lineage`, of step `step`. It is dealt over the replicas `among`:
    one, or all that share it. Evaluate the part of replica `of`."""

    step: int
    lineage: str = ""
    of: int = 0
    among: tuple[int, ...] = ()


@dataclass(frozen=True)
class Save:
    """Write a checkpoint of the state, which is that of `record`, as the job does it; `after_failover`: because a link
    has lost a rail; `departs`: the replica leaves, and nobody else holds this state."""

    record: CommitRecord
    after_failover: bool = False
    departs: bool = False


@dataclass(frozen=True)
class Digest:
    """Report digests of this rank's parameters and of its whole state; `entries`: also of each entry."""

    entries: bool = False


@dataclass(frozen=True)
class LoadDurable:
    """Load the durable state of this lineage hash; `initial`: it is that of the initial parameters. Answers
    `LoadedDurable`, with `found` False if it was deleted meanwhile."""

    lineage: str
    initial: bool


@dataclass(frozen=True)
class LoadedDurable:
    """The answer to `LoadDurable`."""

    lineage: str
    found: bool


@dataclass(frozen=True)
class Exit:
    """Leave. `early`: why the replica leaves before the run's end ("": it does not)."""

    early: str = ""


@dataclass(frozen=True)
class PrepareOrder:
    """Make the order of the schedule with this hash, which the run's store has, ready to work by. Answers `OrderPrepared`.
    `rehearsal`: the order is in use already, and only the time that this takes is wanted."""

    order: str
    rehearsal: bool = False


@dataclass(frozen=True)
class OrderPrepared:
    """The answer to `PrepareOrder`: how long it took, and why this rank cannot work by the order ("": it can)."""

    order: str
    seconds: float
    failed: str = ""


@dataclass(frozen=True)
class Digested:
    """The answer to `Digest`, hexadecimal; `entries`: (name, digest) in the order of the state."""

    parameters: str
    state: str
    entries: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Broken:
    """This rank cannot go on: its error, for the leader's log."""

    reason: str


@dataclass(frozen=True)
class StopAsked:
    """The program on this rank requests an early end of the run, for this reason."""

    reason: str


@dataclass(frozen=True)
class Measured:
    """What this rank measured in its newest steps, as text (`helixrt.observe.stamps.RankTimes`)."""

    times: str


RankCommand = (
    p.Work
    | p.Exchange
    | p.Examine
    | p.Abort
    | p.Apply
    | p.Keep
    | p.Forget
    | p.Replay
    | p.Load
    | p.Offer
    | p.Withdraw
    | p.FetchState
    | p.FetchReduced
    | Evaluate
    | Save
    | Digest
    | LoadDurable
    | PrepareOrder
    | Exit
)
RankReport = (
    p.RankDone
    | p.RankFailed
    | p.Examined
    | p.Fetched
    | p.FetchFailed
    | Digested
    | LoadedDurable
    | OrderPrepared
    | Broken
    | StopAsked
    | Measured
)

_TYPES: dict[str, Any] = {t.__name__: t for t in (*RankCommand.__args__, *RankReport.__args__)}


def encode(message: RankCommand | RankReport) -> str:
    """As JSON text; `decode` gives an equal message."""
    fields = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    return json.dumps({"type": type(message).__name__, **fields}, default=_plain)


def decode(text: str) -> Any:
    raw = json.loads(text)
    kind = _TYPES[raw.pop("type")]
    return kind(**{name: _rich(name, value) for name, value in raw.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, CommitRecord):
        return value.to_json()
    if isinstance(value, Member):
        return value.to_plain()
    raise TypeError(f"cannot send {value!r}")


def _rich(name: str, value: Any) -> Any:
    if name == "record":
        return CommitRecord.from_json(value)
    if name == "donors":
        return tuple(Member.from_plain(m) for m in value)
    if name == "entries":
        return value if isinstance(value, bool) else tuple((entry, digest) for entry, digest in value)
    return tuple(value) if isinstance(value, list) else value


# ---------------------------------------------------------------- travel

_PAUSE_S = 0.2  # before an unanswered store is asked again
_KEPT = 256  # commands left in the store behind the newest: far more than any rank lags


def orders_channel(life: str) -> str:
    """The prefix of what the leader of this life orders."""
    return f"orders/{life}"


def reports_channel(life: str, rank: int) -> str:
    """The prefix of what this rank of the life reports."""
    return f"reports/{life}/{rank}"


def traces_of(store: RunStore, prefix: str) -> list[str]:
    """The keys that a channel whose writer is gone may have left in the store. Raises Retryable."""
    newest = int(store.get(prefix) or 0)  # rounded down
    return [f"{prefix}/{number}" for number in range(max(0, newest - _KEPT), newest + _KEPT)] + [prefix]


class Channel:
    """Numbered messages of one writer through the run's store; many readers may follow.

    `put` tries an unreachable store again for `patience_s`, then raises Retryable.
    `follow` calls `take(message)` in a thread of its own, from message 0 on, until `close`; a store that is
    unreachable for longer than `patience_s`, or a `take` that raises, ends it with `broken(reason)`.
    """

    def __init__(self, store: RunStore, prefix: str, patience_s: float) -> None:
        self._store, self._prefix, self._patience_s = store, prefix, patience_s
        self._next = 0
        self._putting = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, message: RankCommand | RankReport) -> None:
        with self._putting:
            self._put(message)

    def _put(self, message: RankCommand | RankReport) -> None:
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                # Again after an unknown outcome: the key is ours alone, so that changes nothing.
                self._store.put_if_absent(f"{self._prefix}/{self._next}", encode(message))
                if self._next >= _KEPT:
                    self._store.delete(f"{self._prefix}/{self._next - _KEPT}")
                if self._next and self._next % _KEPT == 0:
                    self._store.set(self._prefix, str(self._next))  # see `traces_of`
                break
            except Retryable:
                if time.monotonic() >= deadline or self._closed.wait(_PAUSE_S):
                    raise
        self._next += 1

    def follow(self, take: Callable[[Any], None], broken: Callable[[str], None]) -> None:
        self._thread = threading.Thread(
            target=self._follow, args=(take, broken), name=f"helixrt-{self._prefix.replace('/', '-')}", daemon=True
        )
        self._thread.start()

    def _follow(self, take: Callable[[Any], None], broken: Callable[[str], None]) -> None:
        there_s, slice_s = time.monotonic(), 1.0
        while not self._closed.is_set():
            key = f"{self._prefix}/{self._next}"
            try:
                text = self._store.wait(key, slice_s)
            except Retryable as error:
                if self._reachable():
                    there_s = time.monotonic()  # nothing to say yet
                    continue
                if time.monotonic() - there_s > self._patience_s:
                    broken(f"the run's store is gone: {error}")
                    return
                self._closed.wait(slice_s)
                continue
            there_s = time.monotonic()
            self._next += 1
            try:
                take(decode(text))
            except Exception as error:  # it would not be reported otherwise, and no later message may be taken
                broken(f"message {self._next - 1} of {self._prefix} could not be carried out: {error!r}")
                return

    def _reachable(self) -> bool:
        try:
            self._store.get(self._prefix)
        except Retryable:
            return False
        return True

    def close(self) -> None:
        """Stop following; idempotent. Waits for the thread unless called from it."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
