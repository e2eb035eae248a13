"""The flight record: what happened on a rank, in order, cheap enough to leave on.

Anything may write to a `FlightRecord`; analysis is in `observe/`, drawing in `train/report`.
Events are frozen, carry wall-clock times in seconds (`time.time()` of the writer, passed in or
taken by the record's own clock), and are kept in a ring buffer. A `sink` may be attached that
gets every event at once (JSON Lines files, a chaos monkey).
Only the standard library is used here.
"""

from __future__ import annotations

import errno
import json
import json.encoder
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple


class Kind(StrEnum):
    """Event types. The comment lists the `detail` keys of each."""

    STEP_BEGIN = "step_begin"  # position
    STEP_END = "step_end"  # loss, tokens, stall_s
    # op (F/B/W/BW), chunk, microbatch; woven, if it ran as one with its pair; has a duration: on a CUDA device that of the
    # device's work, and then written once that is over, with the step it was for
    OPERATION = "operation"
    SEND = "send"  # tag, bytes; duration from queued to done; over endpoints begun_s, copy_s (to host memory)
    # tag, bytes, needed_s; duration from posted to taken; over endpoints arrived_s, and by the sender's clock queued_s, sent_s
    RECV = "recv"
    QUORUM_JOIN = "quorum_join"  # lineage
    QUORUM = "quorum"  # generation, members, contributors, behind
    WORK_BEGIN = "work_begin"  # position
    WORK_END = "work_end"  # position
    EXCHANGE_BEGIN = "exchange_begin"  # generation, contribute
    EXCHANGE_BUCKET = "exchange_bucket"  # generation, bucket, buckets, bytes; has a duration
    EXCHANGE_END = "exchange_end"  # generation
    EXCHANGE_FAILED = "exchange_failed"  # generation, reason
    VOTE = "vote"  # generation
    COMMIT = "commit"  # generation, record (hash), contributors
    SUPERSEDE = "supersede"  # old, new
    APPLY = "apply"  # record (hash)
    FETCH_BEGIN = "fetch_begin"  # lineage, donors, what (state | buckets)
    FETCH_SHARD = "fetch_shard"  # shard, donor, bytes, ok; has a duration
    FETCH_END = "fetch_end"  # lineage, bytes, per_donor
    SNAPSHOT = "snapshot"  # lineage, bytes
    CHECKPOINT_BEGIN = "checkpoint_begin"  # lineage
    CHECKPOINT_END = "checkpoint_end"  # lineage, path, after_failover (else its step was due)
    REACHED = "reached"  # peers, transport, why
    RAIL_LEFT = "rail_left"  # peer, rail, failure (null: it works, and is slow), reason, usable: rails that are left; 0: none
    RAIL_BACK = "rail_back"  # peer, rail, usable
    HOP = "hop"  # peer, old, path, reason, old_rtt_s (null: no answer), rtt_s: new messages to the peer take another path
    PATH_PROBED = "path_probed"  # peer, path, rtt_s
    FAILURE = "failure"  # replica, reason
    COSTS_CHANGED = "costs_changed"  # what (such as link 1>2), since, before_ms, after_ms: as the leader found out in a step
    STORAGE_FAILED = "storage_failed"  # what (checkpoint | lineage | metrics), reason, failures: attempts in a row that failed
    STORAGE_BACK = "storage_back"  # what, failures: that came before
    REPLAN = "replan"  # why: what the planner of orders is asked for
    ORDER = "order"  # of the schedule, that all ranks are to make ready: order, before (hashes), why, present_ms, predicted_ms
    ORDER_REHEARSED = "order_rehearsed"  # seconds that making the order in use ready again took, failed: why it could not be
    ORDER_READY = "order_ready"  # order, seconds, failed: why a rank cannot work by it, "" if all can
    ORDER_GAIN = "order_gain"  # order, before_ms, after_ms: medians of measured steps, predicted_ms: the gain that was expected
    CHAOS = "chaos"  # command; has a duration
    RANK_START = "rank_start"  # pid, incarnation, clock: equal for ranks of one machine
    RANK_END = "rank_end"  # code

    __hash__ = str.__hash__  # that of an enum is a call in Python


DETAIL = frozenset({Kind.OPERATION, Kind.SEND, Kind.RECV, Kind.EXCHANGE_BUCKET, Kind.PATH_PROBED})
"""Events that every step writes in large numbers: the bars of a timeline, which are not needed long afterwards."""

ROUTINE = frozenset(
    {Kind.STEP_BEGIN, Kind.STEP_END, Kind.QUORUM_JOIN, Kind.QUORUM, Kind.WORK_BEGIN, Kind.WORK_END, Kind.EXCHANGE_BEGIN}
    | {Kind.EXCHANGE_END, Kind.VOTE, Kind.COMMIT, Kind.APPLY, Kind.SNAPSHOT}
)
"""What every step writes once: whole for tens of thousands of steps, then the newest."""


_GATHERED = (ROUTINE | DETAIL) - {Kind.WORK_BEGIN}
GATHER_S = 0.05  # how long one of these waits for others to share a call of the system
_MOST_GATHERED = 256  # that wait


def compact_encoder() -> Callable[[Any], str]:
    """As `JSONEncoder.encode` without spaces, which makes an encoder for each value."""
    plain = json.JSONEncoder(separators=(",", ":"))
    make = getattr(json.encoder, "c_make_encoder", None)  # None in an interpreter without it
    if make is None:
        return plain.encode
    parts = make(None, plain.default, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, True)
    return lambda value: "".join(parts(value, 0))


_ENCODE = compact_encoder()
_TEXTS = lru_cache(maxsize=64)(_ENCODE)  # of the names of ranks
_LINE_END = ord("\n")
_BLOCK_BYTES = 1 << 16  # of a file that is read from its end on


class Event(NamedTuple):
    """One thing that happened. `begin_s` and `end_s` are Unix times; equal for an instant. A step makes a dozen."""

    kind: Kind
    rank: str
    step: int
    begin_s: float
    end_s: float
    detail: dict[str, Any]

    def to_json(self) -> str:
        kind, rank, step, begin_s, end_s, detail = self
        return (
            f'{{"kind":"{kind}","rank":{_TEXTS(rank)},"step":{step},"begin_s":{begin_s!r},"end_s":{end_s!r},'
            f'"detail":{_ENCODE(detail)}}}'
        )

    @staticmethod
    def from_json(line: str) -> Event:
        raw = json.loads(line)
        return Event(**{**raw, "kind": Kind(raw["kind"])})  # TypeError for other keys


class FlightRecord:
    """A bounded, thread-safe sequence of events of one rank.

    `capacity` is in events; the oldest go first. Sinks are called in the writer's thread, in order.
    """

    def __init__(self, rank: str, capacity: int = 100_000, clock: Callable[[], float] = time.time) -> None:
        self.rank = rank
        self.step = 0  # the step that events belong to unless they name another
        self.clock = clock
        self._events: deque[Event] = deque(maxlen=capacity)
        self._sinks: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def attach(self, sink: Callable[[Event], None]) -> None:
        """Call `sink(event)` for every later event, in the writer's thread."""
        self._sinks.append(sink)

    def write(
        self, kind: Kind, *, begin_s: float | None = None, end_s: float | None = None, step: int | None = None, **detail: Any
    ) -> Event:
        """Record an event that ends now, or ended at `end_s` (and began at `begin_s`, if given)."""
        end = self.clock() if end_s is None else end_s
        event = Event(kind, self.rank, self.step if step is None else step, end if begin_s is None else begin_s, end, detail)
        with self._lock:
            self._events.append(event)
        for sink in self._sinks:
            sink(event)
        return event

    def events(self) -> list[Event]:
        """A copy of what is in the buffer, oldest first."""
        with self._lock:
            return list(self._events)


class JsonLinesSink:
    """Appends every event to a file, one JSON object a line, written through at once.

    Unbuffered `os.write` of whole lines: what a process wrote before SIGKILL is in the file. An event that the device does
    not take is counted in `lost`, and everything goes on.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.bytes = os.fstat(self._fd).st_size
        self._cut = False  # the last line is not whole
        self.lost = 0  # events that the device did not take

    def __call__(self, event: Event) -> None:
        self.write([event.to_json() + "\n"])

    def write(self, lines: Sequence[str]) -> None:
        """Append whole lines, in one call of the system."""
        data = ("\n" * self._cut + "".join(lines)).encode()
        try:
            written = os.write(self._fd, data)
        except OSError as error:
            if error.errno == errno.EBADF:
                raise
            written = 0  # the disk is full, or broken: no reason to stop what is recorded
        self.bytes += written
        if written < len(data):
            ended = data.count(b"\n", 0, written)
            self.lost += len(lines) - ended + (self._cut and ended > 0)
        if written:
            self._cut = data[written - 1] != _LINE_END

    def close(self) -> None:
        os.close(self._fd)


class _Pages:
    """Lines in a file `new`, which becomes the file `old` (in place of what that was) when it holds half of `most_bytes`. One
    thread at a time."""

    def __init__(self, new: Path, old: Path, most_bytes: int) -> None:
        self._new, self._old, self._half = new, old, most_bytes // 2
        self._page = JsonLinesSink(new)

    def write(self, lines: Sequence[str]) -> None:
        """Append lines, each to the page that has room."""
        begin, size = 0, self._page.bytes
        for number, line in enumerate(lines, 1):
            size += len(line)  # names of ranks, keys and numbers: hardly a character takes more than a byte
            if size >= self._half:
                self._page.write(lines[begin:number])
                if self._page.bytes >= self._half:
                    self._turn()
                begin, size = number, self._page.bytes
        if begin < len(lines):
            self._page.write(lines[begin:])

    def _turn(self) -> None:
        try:
            with suppress(FileNotFoundError):  # it was turned before, and the device had no room for a fresh one
                os.replace(self._new, self._old)
            fresh = JsonLinesSink(self._new)
        except OSError:
            return  # as for a full disk: goes on in the file there is, until it can
        fresh.lost = self._page.lost
        self._page.close()
        self._page = fresh

    @property
    def lost(self) -> int:
        return self._page.lost

    def close(self) -> None:
        self._page.close()


class BoundedSink:
    """The files of a run that goes on for months: what is rare is kept whole, what each step writes only while it is new.

    `path` takes the events of `ROUTINE`, a file beside it (`.detail.jsonl`) those of `DETAIL`. Each becomes the older one
    (`.old.jsonl`, `.detail.old.jsonl`) when it holds half of `most_bytes`: at least half, at most all of that many bytes of
    each are there (and one event), the newest. All else goes to `.story.jsonl`, and stays.

    An event that begins work, in which a process may die, and all that is rare are written through at once, with all before
    them. Others are written within twice `GATHER_S`, so that short steps do not make a call of the system for each: what came
    that short before SIGKILL is lost.
    """

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._pending: deque[Event] = deque()  # not written yet; any thread appends
        self._gathering = False  # the thread writes what is pending, soon
        self._wake, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # guards everything below, and the making of the thread
        self._flushed = 0  # how often
        self._story = JsonLinesSink(path.with_suffix(".story.jsonl"))
        self._steps = _Pages(path, path.with_suffix(".old.jsonl"), most_bytes)
        self._detail = _Pages(path.with_suffix(".detail.jsonl"), path.with_suffix(".detail.old.jsonl"), most_bytes)

    def __call__(self, event: Event) -> None:
        self._pending.append(event)
        if event.kind not in _GATHERED or len(self._pending) >= _MOST_GATHERED:
            self.flush()
        elif not self._gathering:
            self._gather()

    def flush(self) -> None:
        """Write what is pending; from any thread."""
        story, steps, detail = list[str](), list[str](), list[str]()
        with self._lock:
            self._flushed += 1
            while self._pending:
                event = self._pending.popleft()
                kind = event.kind
                (detail if kind in DETAIL else steps if kind in ROUTINE else story).append(event.to_json() + "\n")
            for lines, write in ((detail, self._detail.write), (steps, self._steps.write), (story, self._story.write)):
                if lines:
                    write(lines)

    def _gather(self) -> None:
        with self._lock:
            if self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._run, name="helixrt-flight", daemon=True)
                self._thread.start()
        self._gathering = True
        self._wake.set()

    def _run(self) -> None:
        flushed = -1
        while not self._closed.is_set():
            self._wake.wait()
            self._closed.wait(GATHER_S)
            if not self._pending:
                self._wake.clear()
                self._gathering = False  # who appends from now on wakes this thread
                if self._pending:  # and who appended just before has not
                    self._wake.set()
            if self._pending and self._flushed == flushed:  # else what is pending is newer
                self.flush()
            flushed = self._flushed

    @property
    def lost(self) -> int:
        return self._story.lost + self._steps.lost + self._detail.lost

    def close(self) -> None:
        self._closed.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.flush()
        self._story.close()
        self._steps.close()
        self._detail.close()


_TELLING = tuple(b'{"kind":"%s",' % kind.encode() for kind in (Kind.QUORUM, Kind.WORK_BEGIN, Kind.COMMIT))
_NEAR_LOSS = 8  # such lines before and after a quorum that lacks a contributor: some two steps


def shrink_life(path: Path, most_bytes: int = 16 << 10) -> None:
    """Of a life that has ended, whose `BoundedSink` had this `path`: delete the details, and of its steps all but five times
    `most_bytes`: the newest, which tell when and where it ended, and four times as much of what tells what the loss of another
    replica cost, of the newest losses: when steps around it began and were committed, and the quorums without and with it
    again. What is rare stays, and the first quorum to which this life contributed. A crash in between costs nothing. Raises
    OSError."""
    old = path.with_suffix(".old.jsonl")
    for detail in (path.with_suffix(".detail.jsonl"), path.with_suffix(".detail.old.jsonl")):
        detail.unlink(missing_ok=True)
    if old.exists() or (path.exists() and path.stat().st_size > 5 * most_bytes):
        pages = [page.read_bytes().splitlines(keepends=True) for page in (old, path) if page.exists()]
        lines = list(dict.fromkeys(line for page in pages for line in page))  # a crash behind the rename has left some twice
        newest = _newest(range(len(lines)), lines, most_bytes)
        joined, near = _near_losses(lines)
        kept = {*joined, *newest, *_newest([at for at in near if at not in newest], lines, 4 * most_bytes)}
        part = path.with_suffix(".part")
        part.write_bytes(b"".join(lines[at] for at in sorted(kept)))
        os.replace(part, path)
        old.unlink(missing_ok=True)


def _newest(places: Sequence[int], lines: Sequence[bytes], most_bytes: int) -> set[int]:
    """The last of these lines, as many as have so many bytes."""
    kept, left = set[int](), most_bytes
    for at in reversed(places):
        if (left := left - len(lines[at])) < 0:
            break
        kept.add(at)
    return kept


def _near_losses(lines: Sequence[bytes]) -> tuple[list[int], list[int]]:
    """Places of the first quorum to which this life contributed, and of what tells about losses of others."""
    joined: list[int] = []
    near, before = set[int](), set[int]()
    telling = [at for at, line in enumerate(lines) if line.startswith(_TELLING)]
    for place, at in enumerate(telling):
        if not lines[at].startswith(_TELLING[0]):
            continue
        try:
            told = json.loads(lines[at])
            now = set(told["detail"].get("contributors", ()))
        except (ValueError, KeyError):  # cut short by a kill
            continue
        if not joined and told["rank"].split(".")[0] in {f"r{replica}" for replica in now}:
            joined.append(at)
        if before - now:
            near.update(telling[max(0, place - _NEAR_LOSS) : place + _NEAR_LOSS])
        elif before != now:
            near.add(at)
        before = now
    return joined, sorted(near)


def read_events(path: Path) -> Iterator[Event]:
    """The events of a JSON Lines file; a line that a kill cut short is left out, wherever a later life wrote on."""
    with open(path, encoding="utf-8", errors="replace") as lines:
        yield from _events(lines)


def newest_events(path: Path, most: int) -> list[Event]:
    """The last `most` events of a JSON Lines file, as `read_events` gives them. The file is read from its end on, and no
    further."""
    blocks, lines = list[bytes](), 0
    with open(path, "rb") as file:
        at = file.seek(0, os.SEEK_END)
        while at > 0 and lines <= most:
            size = min(_BLOCK_BYTES, at)
            at -= size
            file.seek(at)
            blocks.append(file.read(size))
            lines += blocks[-1].count(b"\n")
    text = b"".join(reversed(blocks)).decode("utf-8", errors="replace").split("\n")
    return list(_events(text[1:] if at > 0 else text))[-most:]


def _events(lines: Iterable[str]) -> Iterator[Event]:
    for line in lines:
        try:
            yield Event.from_json(line)
        except (ValueError, KeyError, TypeError):
            continue
