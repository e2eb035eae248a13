"""Periodic reports to the driver on what a rank's threads do, by which a rank that hangs is found.

In: threads that say what they do (`doing`), and the rank's flight record, each event of which is something completed.
Out: a `ProgressReport` under one key of the run's store, replaced by a thread of its own every `period_s`; and the position of
the batch that the rank is working on, in a page of memory (`work_page`) or under another key, set by the working thread itself,
so that it is right when the process ends at once. Whether a rank is stuck is decided by the reader of the reports
(`helixrt.job.stuck`). A process that is stopped, or whose interpreter lock is held, does not report.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from types import FrameType

from helixrt.errors import Retryable
from helixrt.record import Event
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import progress_key, working_key
from helixrt.replica.work_page import NOT_WORKING, WorkWord

MAIN, EXCHANGE, LEADER, COORDINATION, FETCH = "main", "exchange", "leader", "coordination", "fetch"
LOOP = "the loop, between two steps"  # what the main thread does in the user's code, where it has nothing to complete
COMPILES = "compiles, for torch.compile"
COMPILE_S = 3600.0  # limit of a compile; until then a rank that compiles does not count as stuck
_DEPTH = 200  # frames of a thread that are looked at
# Modules of torch and Triton that are on the stack while one compiles, and not when what was compiled runs.
_COMPILERS = ("torch._dynamo.convert_frame", "torch._inductor.graph", "torch._inductor.async_compile", "triton.compiler.")
_OWN = ("threading", "queue", "contextlib")


@dataclass(frozen=True)
class ThreadReport:
    """A thread that is doing something. `completed` changes whenever it begins, completes or ends anything.

    `limit_s`: it may take so long without completing anything (0: the usual limit applies); never shortens the
    usual limit. `where` it is, if that was looked up. `waits_for_peer`: it waits for another rank of its replica.
    """

    thread: str
    doing: str
    completed: int
    limit_s: float = 0.0
    where: str = ""
    waits_for_peer: bool = False


@dataclass(frozen=True)
class ProgressReport:
    """One report of a rank. A thread that waits for orders is not listed.

    `committed`: the rank has been through a step, from work to update.
    """

    sequence: int
    committed: bool = False
    threads: tuple[ThreadReport, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> ProgressReport:
        raw = json.loads(text)
        return ProgressReport(**{**raw, "threads": tuple(ThreadReport(**thread) for thread in raw["threads"])})


class _Doing(AbstractContextManager[None]):
    """While a thread does something. A step makes a dozen."""

    __slots__ = ("_me", "_position", "_progress", "begun_s", "doing", "limit_s", "thread")

    def __init__(self, progress: Progress, thread: str, doing: str, limit_s: float, position: int | None) -> None:
        self._progress, self._position = progress, position
        self.thread, self.doing, self.limit_s = thread, doing, limit_s
        self.begun_s = time.monotonic() if limit_s else 0.0

    def __enter__(self) -> None:
        self._me = me = threading.get_ident()
        progress = self._progress
        if self._position is not None:
            progress.work_on(self._position)
        slots = progress.slots.get(me)
        if slots is None:
            slots = progress.slots[me] = []
            progress.completed.setdefault(me, 0)
        slots.append(self)
        progress.completed[me] += 1

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        progress, me = self._progress, self._me
        progress.completed[me] += 1
        progress.slots[me].remove(self)  # a `busy` of the user may span the end of a step
        if self._position is not None and kind is None:
            progress.work_on(None)


class Progress:
    """Of the rank with this coordinate. Attach it to its flight record. Without a store it reports nothing.

    `waits_in` names modules: a thread with a frame in one of them waits for another rank of the replica. `work`: where the
    position is said, in place of the store.
    """

    def __init__(
        self,
        store: RunStore | None = None,
        rank: str = "",
        incarnation: int = 0,
        period_s: float = 1.0,
        waits_in: tuple[str, ...] = (),
        work: WorkWord | None = None,
    ) -> None:
        self._store, self._period_s, self._waits_in, self._work = store, period_s, waits_in, work
        self._key, self._working_key = progress_key(rank, incarnation), working_key(rank, incarnation)
        self._sending = threading.Lock()  # reports reach the store in their order
        self.slots: dict[int, list[_Doing]] = {}  # thread's id -> what it is doing, innermost last; that thread alone writes it
        self.completed: dict[int, int] = {}  # likewise
        self._changed = threading.Condition()  # guards everything below
        self._sequence = 0
        self._committed = False
        self._compiles: dict[int, int] = {}  # of each thread: odd while it compiles, and grows when that changes
        self._closed = False
        self._thread: threading.Thread | None = None
        if store is not None:
            self._send()  # at once: a rank that stops before its first report is not noticed
            self._thread = threading.Thread(target=self._run, name="helixrt-progress", daemon=True)
            self._thread.start()

    def doing(
        self, doing: str, thread: str = MAIN, limit_s: float = 0.0, position: int | None = None
    ) -> AbstractContextManager[None]:
        """While the calling thread does this. `position`: of the batch that it works on, if it does; after an error it
        stays as it is, since the rank ended while it worked there."""
        return _Doing(self, thread, doing, limit_s, position)

    def busy(self, doing: str, limit_s: float) -> AbstractContextManager[None]:
        """While the calling thread does something that may take `limit_s` without completing a part of it."""
        return self.doing(doing, limit_s=limit_s)

    def time_left_s(self) -> float:
        """How much of the time that the main thread has asked for is left; 0 if it has asked for none."""
        now = time.monotonic()
        asked = [slot for _, slots in self._busy() for slot in slots if slot.thread == MAIN and slot.limit_s > 0]
        return max((slot.begun_s + slot.limit_s - now for slot in asked), default=0.0)

    def committed(self) -> None:
        """The rank has been through a step: it has worked, and done the update of it.

        Reported at once the first time, by the calling thread: a rank that hangs right after has the usual limit.
        """
        if not self._committed:  # one thread comes here
            with self._changed:
                self._committed = True
            self._send()

    def __call__(self, event: Event) -> None:
        """A sink of the flight record: the calling thread has completed something."""
        me = threading.get_ident()
        if me in self.completed:
            self.completed[me] += 1  # no other thread writes this entry

    def report(self) -> ProgressReport:
        """What there is to report now."""
        busy = self._busy()
        frames = sys._current_frames() if busy else {}
        with self._changed:
            self._sequence += 1
            threads = []
            for me, slots in busy:
                where, waits, compiles = self._place(frames[me]) if me in frames else ("", False, False)
                times = self._compiles.get(me, 0)
                times = self._compiles[me] = times + (compiles != times % 2)
                limit_s = max(COMPILE_S if compiles else 0.0, *(slot.limit_s for slot in slots))
                doing = "/".join([slot.doing for slot in slots] + [COMPILES] * compiles)
                threads.append(ThreadReport(slots[0].thread, doing, self.completed[me] + times, limit_s, where, waits))
            return ProgressReport(self._sequence, self._committed, tuple(threads))

    def _busy(self) -> list[tuple[int, list[_Doing]]]:
        """The threads that do something, and what; copies, which are made in one go while the threads go on."""
        return [(me, slots) for me, its in list(self.slots.items()) if (slots := its.copy())]

    def close(self) -> None:
        """End the thread; idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def work_on(self, position: int | None) -> None:
        """Say which batch the rank works on, if it does."""
        if self._work is not None:
            self._work.say(position)
        elif self._store is not None:
            with suppress(Retryable):  # a store that stays away ends the run
                self._store.set(self._working_key, NOT_WORKING if position is None else str(position))

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: self._closed, self._period_s):
                    return
            self._send()

    def _send(self) -> None:
        if self._store is not None:
            with self._sending, suppress(Retryable):  # the next report has the same content
                self._store.set(self._key, self.report().to_json())

    def _place(self, frame: FrameType | None) -> tuple[str, bool, bool]:
        """The innermost frame outside the interpreter's own waiting, whether it waits for a peer, and whether it compiles."""
        where, waits, compiles, depth = "", False, False, 0
        while frame is not None and depth < _DEPTH:
            module = frame.f_globals.get("__name__", "")
            if not where and module not in _OWN:
                where = f"{module}:{frame.f_code.co_name}, line {frame.f_lineno}"
            waits, compiles = waits or module.startswith(self._waits_in), compiles or module.startswith(_COMPILERS)
            frame, depth = frame.f_back, depth + 1
        return where, waits, compiles
