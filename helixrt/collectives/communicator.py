"""Runs collectives: one rank's end of a group, over an endpoint, in one generation after another.

In: plans with the tensors they work on, submitted in the same order on every rank. Out: `Handle`s. Between the pure
machine that decides (`protocol/collective/machine.py`) and the endpoint that carries bytes this is the driver:
it hands outcomes of the endpoint to the machine as events and carries out its actions
(FT-HSDP section 4.2: the CPU drives the whole process).

Who drives is decided by `protocol/handoff.py`: a caller that waits does it itself, so a small operation costs no change
of threads; the communicator's thread (`background.py`) does while no caller waits, so asynchronous operations go on and
heartbeats never stop. This module carries the decisions out. One hold of the lock is one turn with its decision, and a
sleep's preparation; only completing operations and sleeping happen outside.

The first error ends the generation: it stays readable (`failure`), everything that was submitted ends
with it, everything submitted later at once. `configure` begins the next generation.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Mapping

import torch

from helixrt.collectives import background
from helixrt.collectives.execution import Execution, Wire
from helixrt.collectives.handle import CollectiveError, End, Handle, finished
from helixrt.collectives.huge_pages import HugePages
from helixrt.collectives.memory import ScratchPool
from helixrt.collectives.reduction import Reduction
from helixrt.collectives.staged_operation import StagedOperation
from helixrt.collectives.system import REAL, System
from helixrt.errors import Cause, Retryable
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan
from helixrt.protocol.handoff import HandOff, Rest, Signal, Sleep, Step
from helixrt.protocol.patience import Patience
from helixrt.transport import contract


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
        system: System = REAL,
    ) -> None:
        self.name, self.rank, self.size, self.generation = name, 0, 0, -1
        self.tuning = tuning or Tuning()
        self._endpoint, self._system = endpoint, system
        self._now, self._me = system.now, system.me
        self._lock = system.lock()  # of everything below and of the endpoint
        self._execution: Execution | None = None  # of the generation that is configured
        self._failure: CollectiveError | None = None  # of one that is not, or not yet
        self._scratch, self._pages = ScratchPool(), HugePages()
        self._handoff = HandOff(patience or Patience())
        self._poller = system.poller()
        self._stop = system.stop()
        self._thread: threading.Thread | None = None
        self._abandoned: weakref.finalize | None = None

    @property
    def address(self) -> bytes:
        """For the peers, see `Endpoint.address`."""
        return self._endpoint.address()

    def use_huge_pages(self) -> None:
        """The tensors of all operations may get huge pages (`huge_pages`): their owner consents."""
        self._pages.consent = True

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
        self._end(Cause("the group is being configured again"))
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
                    self._carry_out(self._handoff.call(), 0.0)
            elif peers:
                self._endpoint.abort(self._failure.cause)
        self._raise_if_aborted()
        if peers and self._thread is None:
            self._start_thread()

    def _raise_if_aborted(self) -> None:
        if (failure := self.failure) is not None:
            raise CollectiveError(failure.cause, failure.end)

    def abort(self, cause: Cause) -> None:
        """End this generation, also one that is being configured: from any thread, at once. The first cause counts."""
        self._end(cause)

    def _end(self, cause: Cause) -> None:
        with self._lock:
            execution = self._execution
            if execution is not None:
                execution.abort(cause)
            elif self._failure is None:
                self._failure = CollectiveError(cause, End.ABORTED)
            self._carry_out(self._handoff.nudge(), 0.0)
            self._carry_out(self._handoff.call(), 0.0)
        self._settle(execution)

    def close(self) -> None:
        """Inform the peers, end the thread; idempotent."""
        cause = Cause("the communicator was closed")
        with self._lock:
            if self._handoff.closing:
                return
            self._handoff.close()
            execution = self._execution
            idle = execution is not None and not execution.running and execution.failure is None
            if execution is not None and not idle:  # an orderly end needs that no operation is unfinished
                execution.abort(cause)
            self._failure, self._execution = self.failure or CollectiveError(cause, End.ABORTED), None
            self._carry_out(self._handoff.nudge(), 0.0)
        self._settle(execution)
        if self._abandoned is not None:
            self._abandoned.atexit = False
        background.end(self._stop, self._poller, self._thread, self._system.is_current(self._thread))
        with self._lock:
            self._endpoint.close()
            self._handoff.told()
            self._close_poller()

    def _close_poller(self) -> None:
        """When no thread sleeps on it any more. The lock is held."""
        if self._handoff.retires():
            self._poller.close()
            if self._abandoned is not None:
                self._abandoned.detach()

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

        `timeout_s` is its software deadline. `finish` runs after success, before the result is reported. `staged`: where the
        tensors stand for some on a card. `call`: a collective's fingerprint (`protocol.calls`), the same on all ranks.
        With `waits` the caller promises to call `wait` at once, and drives by that.
        """
        handle = Handle(self, finish, staged.join if staged is not None else None)
        execution: Execution | None = None
        try:
            with self._lock:
                execution = self._execution
                if execution is None or execution.failure is not None:
                    return finished(self.refusal())
                now = self._now()
                execution.begin(plan, source, out, reduction, handle, now + timeout_s, wire, staged, call)
                signal = self._handoff.submitted(waits or self.size == 1)
                if signal is Signal.TURN:
                    execution.turn(now)
                    signal = self._handoff.turned_for_others(bool(execution.running))
                if signal is not Signal.NONE:
                    self._carry_out(signal, now)
        finally:
            if execution is not None and execution.ended:
                self._settle(execution)
        return handle

    def drive(self, handle: Handle, timeout_s: float | None) -> None:
        """For `Handle.wait`: bring everything on until `handle` is done, here or in another caller's `drive`."""
        handoff, me, waited = self._handoff, self._me(), False
        until = math.inf if timeout_s is None else self._now() + timeout_s
        execution: Execution | None = None
        try:
            while not handle.done:
                with self._lock:
                    now, execution = self._now(), self._execution
                    drives = handoff.come(me)
                    if drives:
                        if handoff.nudged:
                            self._take_nudge()
                        moved = execution is not None and execution.turn(now)
                        step = handoff.turned(now, moved, execution is not None and bool(execution.ended), until)
                        if step is Step.REST:
                            rest_s = handoff.rest_s(now, self._arm(), until)
                    elif now >= until:
                        return
                    else:
                        latch = self._system.latch()
                        handoff.wait(me, latch)
                if not drives:
                    waited = True
                    handle.sleep(latch, until - now)
                elif step is Step.SETTLE:
                    self._settle(execution)
                elif step is Step.REST:
                    if not handle.done:  # else it may have been completed before this caller began to sleep
                        self._poller.wait(rest_s)
                elif step is Step.LEAVE:
                    return
        finally:
            busy = False
            if execution is not None:
                if execution.ended:
                    self._settle(execution)
                busy = bool(execution.running)
            if busy or waited or handoff.driver == me or handoff.sleep is Sleep.WATCHING:
                self._leave(me)

    def _leave(self, me: int) -> None:
        with self._lock:
            now, execution = self._now(), self._execution
            busy = execution is not None and bool(execution.running or execution.ended)
            if self._handoff.nudged and self._handoff.driver == me:
                self._take_nudge()
            self._carry_out(self._handoff.leave(me, now, busy), now)
            self._close_poller()

    # ---------------------------------------------------------------- what the hand-off asks for

    def _carry_out(self, signal: Signal, now: float) -> None:
        """The lock is held."""
        if signal is Signal.TEND:
            signal = self._handoff.tended(self._arm())
        if signal is Signal.NUDGE:
            self._poller.nudge()
        elif signal is Signal.WAKE:
            self._poller.wake()
        elif signal is Signal.PASS:
            self._handoff.heir.open()

    def _take_nudge(self) -> None:
        """For the driver, which does not sleep. The lock is held."""
        self._poller.take_nudge()
        self._handoff.takes_nudge()

    def _arm(self) -> float:
        """Watch what the endpoint waits for, and let peers wake the sleeping thread. Returns until when. The lock is held."""
        execution = self._execution
        if execution is None or not execution.connected:
            self._poller.watch({})  # a peer that calls for the next generation would wake it for nothing, again and again
            return math.inf
        try:
            self._poller.watch(self._endpoint.descriptors())
            return execution.next_deadline()
        except Exception as error:  # no thread would bring the operations on
            execution.abort(Cause(f"the communicator failed: {error!r}", f"rank {self.rank}"))
            raise

    def _settle(self, execution: Execution | None) -> None:
        """Complete the operations that ended. The lock is not held, so what follows may submit more."""
        if execution is None or not execution.ended:
            return
        for handle, failure in execution.take_ended():
            handle.complete(failure)
        if self._handoff.resting:
            with self._lock:
                self._carry_out(self._handoff.nudge(), 0.0)

    # ---------------------------------------------------------------- the thread

    def _start_thread(self) -> None:
        reference = weakref.ref(self)  # so that a forgotten communicator is collected, and its thread ends
        arguments = (reference, self._poller, self._stop)
        self._thread = self._system.thread(background.run, arguments, f"helixrt-{self.name}")
        with self._lock:
            self._handoff.starts()
        self._thread.start()
        self._abandoned = weakref.finalize(
            self, background.abandon, self._stop, self._poller, self._thread, self._endpoint, self._system
        )

    def background(self) -> Rest | None:
        """For the thread: take a turn if no caller drives; how to sleep then. None: end."""
        handoff = self._handoff
        with self._lock:
            if handoff.woke():
                self._poller.take_wake()
            if handoff.thread_must_end():  # it may just have consumed the wake-up for it
                return None
            now, execution = self._now(), self._execution
            if execution is None:
                return handoff.idles(now)
            rest = handoff.parks(now, execution.connected, bool(execution.running or execution.ended))
            if rest is not None:
                return rest
            moved = execution.turn(now) or bool(execution.ended)
            rest = handoff.goes_on(now, moved, math.inf if moved else self._arm())
        if moved:  # else it counts as sleeping: a wake-up during a callback that waits would not be cleared
            self._settle(execution)
        return rest

    def background_ends(self) -> None:
        """For the thread, as its last."""
        with self._lock:
            self._handoff.ends()
            self._close_poller()
