"""Runs collectives: one rank's end of a group, over an endpoint, in one generation after another.

In: plans with the tensors they work on, submitted in the same order on every rank. Out: `Handle`s. Between the pure
machine that decides (`protocol/collective/machine.py`) and the endpoint that carries bytes this is the driver:
it hands outcomes of the endpoint to the machine as events and carries out its actions
(FT-HSDP section 4.2: the CPU drives the whole process).

Who drives: a caller that waits does it itself, so a small operation costs no change of threads; a thread
of the communicator does while nobody waits, so asynchronous operations go on and heartbeats never stop. Both do
the same `_turn` under one lock. While callers come and go the thread stays out of their way, for at most
`park_s` at a time.

The first error ends the generation: it stays readable (`failure`), everything that was submitted ends
with it, everything submitted later at once. `configure` begins the next generation.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping

import torch

from helixrt.collectives.execution import Execution, Wire
from helixrt.collectives.handle import CollectiveError, End, Handle, finished
from helixrt.collectives.huge_pages import HugePages
from helixrt.collectives.memory import ScratchPool
from helixrt.collectives.patience import Patience, Spin
from helixrt.collectives.poller import Poller
from helixrt.collectives.reduction import Reduction
from helixrt.collectives.staged_operation import StagedOperation
from helixrt.errors import Cause, Retryable
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan
from helixrt.transport import contract

_log = logging.getLogger("helixrt.collectives")

_IDLE_S = 60.0  # the thread's longest sleep; everything that matters wakes it
_LOOK_S = 0.05  # a caller that waits while another one drives looks that often whether it still does
_PARKED = 4  # times its patience the thread stays away while a caller drives: each look costs that caller Python's lock
_JOIN_S = 10.0  # for the thread to end: turns are short, callbacks of users may not be


class Communicator:
    """A rank's communicator. Owns its endpoint and one thread; `close` gives up both.

    Any thread may call; collectives must be submitted in the same order on all ranks.
    """

    def __init__(
        self,
        endpoint: contract.Endpoint,
        tuning: Tuning | None = None,
        name: str = "collectives",
        patience: Patience | None = None,
    ) -> None:
        self.name, self.rank, self.size, self.generation = name, 0, 0, -1
        self.tuning = tuning or Tuning()
        self._endpoint, self._patience = endpoint, patience or Patience()
        self._spin = Spin(self._patience.spin_s)
        self._lock = threading.Lock()  # of everything below and of the endpoint
        self._execution: Execution | None = None  # of the generation that is configured
        self._failure: CollectiveError | None = None  # of one that is not, or not yet
        self._scratch, self._pages = ScratchPool(), HugePages()
        self._role = threading.Lock()  # held by the caller that drives
        self._driver = 0  # its thread's identity
        self._asleep = False  # it waits, and must be nudged when something was done for it
        self._left_s = 0.0  # when the last such caller left
        self._wanted = False  # someone woke the thread to drive
        self._sleeps_until = 0.0  # of the thread, while it watches the descriptors; else 0
        self._poller = Poller()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._abandoned: weakref.finalize | None = None

    @property
    def address(self) -> bytes:
        """For the peers, see `Endpoint.address`."""
        return self._endpoint.address()

    @property
    def failure(self) -> CollectiveError | None:
        """The first thing that went wrong in this generation; it ended it."""
        execution = self._execution
        return self._failure if execution is None else execution.failure

    @property
    def busy(self) -> bool:
        """Something is running or queued."""
        return self._execution is not None and bool(self._execution.running)

    @property
    def submitted(self) -> int:
        """Collectives so far in this generation."""
        return 0 if self._execution is None else self._execution.submitted

    # ---------------------------------------------------------------- generations

    def begin(self) -> None:
        """End what is left of the last generation, before a rendezvous for the next: from now on `abort` is for that."""
        self._end(Cause("the group is being configured anew"))
        with self._lock:
            self._execution, self._failure = None, None
            self._poller.watch({})  # until it has connected: what comes meanwhile is not for the thread

    def configure(self, generation: int, rank: int, peers: Mapping[int, bytes], deadline_s: float) -> None:
        """Connect to `peers` (rank -> address, without this one). Raises Retryable if that fails or `abort` comes.

        To be called after `begin`, in one thread.
        """
        self._raise_if_aborted()
        if peers:
            try:
                self._endpoint.connect(generation, rank, peers, deadline_s, lambda: self.failure is not None)
            except Retryable:
                self._raise_if_aborted()  # the first cause, if it was that
                raise
        with self._lock:
            self.rank, self.size, self.generation = rank, len(peers) + 1, generation
            if self._failure is None:
                self._execution = Execution(self._endpoint, rank, self.size, self.tuning, self._scratch, self._pages)
                if peers:
                    self._poller.watch(self._endpoint.descriptors())
            elif peers:
                self._endpoint.abort(self._failure.cause)
        self._raise_if_aborted()
        if peers:
            self._start_thread()
            self._wake()

    def _raise_if_aborted(self) -> None:
        if (failure := self.failure) is not None:
            raise CollectiveError(failure.cause, failure.end)

    def abort(self, cause: Cause) -> None:
        """End this generation, also one that is being configured: from any thread, at once. The first cause counts."""
        self._end(cause)
        self._wake()

    def _end(self, cause: Cause) -> None:
        with self._lock:
            if self._execution is not None:
                self._execution.abort(cause)
            elif self._failure is None:
                self._failure = CollectiveError(cause, End.ABORTED)
        self._settle()

    def close(self) -> None:
        """Say farewell to the peers, end the thread; idempotent."""
        if self._stop.is_set():
            return
        cause = Cause("the communicator was closed")
        with self._lock:
            idle = self._execution is not None and not self.busy and self.failure is None
        if not idle:  # a farewell is for peers that were left with nothing undone
            self._end(cause)
        if self._abandoned is not None:
            self._abandoned.detach()
        ended = _end_thread(self._stop, self._poller, self._thread)
        with self._lock:
            self._failure, self._execution = self.failure or CollectiveError(cause, End.ABORTED), None
            self._endpoint.close()
        if ended:
            with self._role:
                self._poller.close()

    # ---------------------------------------------------------------- operations

    def refusal(self) -> CollectiveError | None:
        """Why nothing can be submitted now."""
        if (failure := self.failure) is not None:
            return CollectiveError(failure.cause, failure.end, skipped=True)
        return CollectiveError(Cause("the communicator is not configured"), skipped=True) if self._execution is None else None

    def submit(
        self,
        plan: Plan,
        source: torch.Tensor,
        out: torch.Tensor,
        reduction: Reduction,
        timeout_s: float,
        *,
        wire: Wire | None = None,
        finish: Callable[[], None] | None = None,
        staged: StagedOperation | None = None,
        waits: bool = False,
        call: int = 0,
    ) -> Handle:
        """Begin an operation on flat tensors (the same one twice for a call in place).

        `timeout_s` is its software deadline. `finish` runs when all went well, before anyone is told. `staged`: where the
        tensors stand for some on a card. `call`: a collective's fingerprint (`protocol.calls`), the same on all ranks.
        With `waits` the caller promises to call `wait` at once, and drives by that.
        """
        handle = Handle(self, finish, staged.join if staged is not None else None)
        try:
            with self._lock:
                execution = self._execution
                if execution is None or execution.failure is not None:
                    return finished(self.refusal())
                now = time.monotonic()
                execution.begin(plan, source, out, reduction, handle, now + timeout_s, wire, staged, call)
                if not waits and self.size > 1:
                    execution.turn(now)
                    self._poller.watch(self._endpoint.descriptors())
        finally:
            self._settle()
        if self._asleep:  # another caller drives: there is more to do than it knew when it lay down
            self._poller.nudge()
        elif not waits and not handle.done and self._must_wake():
            self._wake()
        return handle

    def drive(self, handle: Handle, timeout_s: float | None) -> None:
        """For `Handle.wait`: bring everything on until `handle` is done."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        while not handle.done:
            if self._driver == me:  # a callback that this very driver runs waits for another operation
                self._drive(handle, until)
            elif self._role.acquire(blocking=False):
                self._driver = me
                try:
                    self._drive(handle, until)
                finally:
                    self._left_s, self._driver = time.monotonic(), 0
                    self._role.release()
                    if self.busy:
                        self._wake()
            else:  # another caller drives, and after it the thread
                handle.sleep(_LOOK_S if until is None else min(_LOOK_S, max(0.0, until - time.monotonic())))
            if until is not None and time.monotonic() >= until:
                return

    def _drive(self, handle: Handle, until: float | None) -> None:
        """In the driver's role."""
        looks_until: float | None = None  # a look for news is under way
        while not handle.done:
            try:
                with self._lock:
                    now = time.monotonic()
                    moved = self._turn(now)
            finally:  # what fails here ends operations of others too
                self._settle()
            if looks_until is not None and (moved or handle.done):
                self._spin.paid()
                looks_until = None
            if handle.done or (until is not None and now >= until):
                return
            if moved:
                continue
            if looks_until is None:
                looks_until = now + self._spin.allowance()
            elif now >= looks_until:
                self._spin.in_vain()
            if now < looks_until:
                continue
            looks_until = None
            self._asleep = True  # before it asks peers to ring: from then on, who turns in its place tells it
            rest = self._prepare_to_sleep(now)
            if not handle.done:  # else whoever finished it may have looked before we lay down
                self._poller.wait(rest if until is None else min(rest, until - now))
            self._asleep = False
            self._poller.take_nudge()

    # ---------------------------------------------------------------- turns

    def _turn(self, now: float) -> bool:
        """Whether anything happened. The lock is held."""
        return self._execution is not None and self._execution.turn(now)

    def _settle(self) -> None:
        """Tell the callers whose operations ended; the lock is not held, so they may submit more."""
        execution = self._execution
        if execution is None or not execution.ended:
            return
        for handle, failure in execution.take_ended():
            handle.complete(failure)
        if self._asleep:
            self._poller.nudge()

    # ---------------------------------------------------------------- the thread

    def _prepare_to_sleep(self, now: float) -> float:
        """Watch what the endpoint waits for; how long at most."""
        with self._lock:
            execution = self._execution
            if execution is None or not execution.connected:
                self._poller.watch({})  # a peer that calls for the next generation would wake it for nothing, again and again
                return _IDLE_S
            self._poller.watch(self._endpoint.descriptors())
            return max(0.0, min(_IDLE_S, execution.next_deadline() - now))

    def _wake(self) -> None:
        self._wanted = True
        self._poller.wake()

    def _must_wake(self) -> bool:
        """Whether the thread would not notice in time by itself that there is more to do."""
        with self._lock:
            until, execution = self._sleeps_until, self._execution
            if execution is None or not execution.connected:
                return False
            return until == 0 or execution.next_deadline() < until

    def _start_thread(self) -> None:
        if self._thread is not None:
            return
        reference = weakref.ref(self)  # so that a forgotten communicator is collected, and its thread ends
        self._thread = threading.Thread(
            target=_run, args=(reference, self._poller, self._stop), name=f"helixrt-{self.name}", daemon=True
        )
        self._thread.start()
        self._abandoned = weakref.finalize(self, _abandon, self._stop, self._poller, self._thread, self._endpoint)

    def _background(self) -> tuple[bool, float]:
        """The thread's turn: how to sleep (apart from the descriptors?) and for how long."""
        now = time.monotonic()
        self._sleeps_until = 0.0
        wanted, self._wanted = self._wanted, False
        if self._role.locked():
            return True, _PARKED * self._patience.park_s
        if now < self._left_s + self._patience.park_s and not wanted:
            return True, self._patience.park_s
        with self._lock:
            moved = self._turn(now)
        self._settle()
        if self._asleep:  # a caller has come to drive since we looked, and this turn took back what it asked of the peers
            self._poller.nudge()
        if moved:
            return False, 0.0
        rest = self._prepare_to_sleep(now)
        self._sleeps_until = now + rest
        return False, rest


def _run(reference: weakref.ref[Communicator], poller: Poller, stop: threading.Event) -> None:
    """A communicator's thread."""
    torch.set_grad_enabled(False)
    while not stop.is_set():
        communicator = reference()
        if communicator is None:
            return
        try:
            apart, rest_s = communicator._background()
        except Exception:  # it ended the generation; callers have its cause
            _log.exception("%s", communicator.name)
            communicator._settle()
            apart, rest_s = True, _IDLE_S
        del communicator
        if apart:
            poller.sleep(rest_s)
        else:
            poller.wait(rest_s)
        poller.take_wake()


def _end_thread(stop: threading.Event, poller: Poller, thread: threading.Thread | None) -> bool:
    """Whether it has ended, so that nobody sleeps on the poller; it cannot where it is itself the one that asks."""
    stop.set()
    poller.wake()
    if thread is threading.current_thread():
        return False
    if thread is None:
        return True
    thread.join(_JOIN_S)
    if thread.is_alive():  # it ends with what it runs, and needs what it sleeps on until then
        _log.error("%s: a callback takes more than %g s; what it belongs to is closed without it", thread.name, _JOIN_S)
    return not thread.is_alive()


def _abandon(stop: threading.Event, poller: Poller, thread: threading.Thread, endpoint: contract.Endpoint) -> None:
    """A communicator that was never closed is gone, or the program ends."""
    ended = _end_thread(stop, poller, thread)
    endpoint.close()
    if ended:
        poller.close()
