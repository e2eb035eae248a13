"""One generation of a communicator: its machine, its operations and its endpoint, brought on in turns.

In: operations, and time as a number. Out: handles whose operations ended, with how. Outcomes of the endpoint
become events of the machine (`protocol/collective/machine.py`), its actions become calls of the endpoint and
reductions. Everything here is called by one thread at a time: the communicator holds its lock.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from helixrt.collectives.handle import CollectiveError, End, Handle
from helixrt.collectives.huge_pages import HugePages
from helixrt.collectives.memory import OperationMemory, ScratchPool
from helixrt.collectives.reduction import Reduction
from helixrt.collectives.staged_operation import StagedOperation
from helixrt.errors import Cause
from helixrt.protocol.calls import NUMBER
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.machine import CollectiveMachine
from helixrt.protocol.collective.messages import (
    Aborted,
    Action,
    Await,
    Break,
    Compute,
    Computed,
    Done,
    Event,
    Expired,
    PeerLost,
    Received,
    Sent,
    Skipped,
    Submitted,
    Transmit,
)
from helixrt.protocol.collective.plan import Plan
from helixrt.transport import contract
from helixrt.transport.device_lanes import Mark

_log = logging.getLogger("helixrt.collectives")

# Whether bytes have come from a GPU must be asked, for it has no descriptor to wait for: again after this share of the time
# in which none came, within these limits.
_LOOK_SHARE, _LOOK_S, _LOOK_MOST_S = 0.2, 20e-6, 0.5e-3


@dataclass(frozen=True, slots=True)
class Wire:
    """How both ends of a point-to-point operation call its messages; they count those of a tag between them."""

    op: int  # below 0: collectives have the others
    first: int  # index of the first message


@dataclass(slots=True)
class _Running:
    handle: Handle
    memory: OperationMemory
    reduction: Reduction
    wire: Wire | None
    staged: StagedOperation | None
    call: int  # fingerprint of a collective, which is a part of its messages' names (`protocol.calls`)


class Execution:
    """`failure` is the first error; it ended the generation, and stays."""

    def __init__(
        self,
        endpoint: contract.Endpoint,
        rank: int,
        size: int,
        tuning: Tuning,
        scratch: ScratchPool,
        pages: HugePages,
    ) -> None:
        self._pages = pages
        self._endpoint, self._rank, self._size, self._scratch = endpoint, rank, size, scratch
        self._machine = CollectiveMachine(rank, size, tuning.chunk_bytes * tuning.chunks)
        self.failure: CollectiveError | None = None
        self.running: dict[int, _Running] = {}
        self.ended: deque[tuple[_Running, CollectiveError | None]] = deque()
        self.submitted, self._points_submitted = 0, 0
        self._points: dict[tuple[bool, int, int, int], tuple[int, int]] = {}  # (sent, peer, wire's name) -> (op, index)
        self._deadlines: list[tuple[float, int]] = []
        # Of staged operations: what waits for bytes of the source, and sums that the GPU has not ended.
        self._held: list[Compute | Transmit] = []
        self._summing: list[tuple[Compute, Mark]] = []
        self._stages = False  # there was one
        self._asks_gpu, self._gpu_s = False, 0.0  # in the last turn; since when nothing has come
        self._now = 0.0

    @property
    def connected(self) -> bool:
        """The endpoint needs to be driven."""
        return self._size > 1 and self.failure is None

    def begin(
        self,
        plan: Plan,
        source: torch.Tensor,
        out: torch.Tensor,
        reduction: Reduction,
        handle: Handle,
        deadline: float,
        wire: Wire | None = None,
        staged: StagedOperation | None = None,
        call: int = 0,
    ) -> None:
        """Begin an operation that fails at monotonic time `deadline`. What is raised here ends the generation: the peers wait
        for this rank's part, and later operations of this rank would be matched with other ones of theirs."""
        try:
            scratch = None
            if staged is None and self._size > 1:
                self._pages.used(source)
                if out is not source:
                    self._pages.used(out)
            if staged is not None:
                scratch = staged.scratch
            elif plan.scratch_bytes:
                scratch = self._scratch.take(plan.scratch_bytes)
                self._pages.used(scratch, own=True)
            if wire is None:
                op, self.submitted = self.submitted, self.submitted + 1
            else:
                self._points_submitted += 1
                op = -self._points_submitted
            self.running[op] = _Running(handle, OperationMemory(source, out, scratch), reduction, wire, staged, call)
            self._stages = self._stages or staged is not None
            self._feed(Submitted(op, plan))
            if op in self.running:
                heapq.heappush(self._deadlines, (deadline, op))
        except Exception as error:
            self.abort(Cause(f"a collective could not begin: {error!r}", f"rank {self._rank}"))
            raise

    def abort(self, cause: Cause) -> None:
        """End everything, unless it has ended."""
        if self.failure is None:
            self.failure = CollectiveError(cause, End.ABORTED)
            self._feed(Aborted(cause))

    def take_ended(self) -> Iterator[tuple[Handle, CollectiveError | None]]:
        """Operations that ended, and how; any thread may call this, each operation is returned once."""
        while self.ended:
            try:
                running, failure = self.ended.popleft()
            except IndexError:
                return
            yield running.handle, failure

    def next_deadline(self) -> float:
        """When `turn` is wanted though no descriptor is ready (monotonic time)."""
        due = self._deadlines[0][0] if self._deadlines else math.inf
        if self._held or self._summing:
            waited_s = self._now - self._gpu_s if self._asks_gpu else 0.0
            due = min(due, self._now + min(max(_LOOK_S, _LOOK_SHARE * waited_s), _LOOK_MOST_S))
        wanted = self._endpoint.next_deadline()
        return due if wanted is None else min(due, wanted)

    def turn(self, now: float) -> bool:
        """Make all progress that is possible without blocking. Returns whether there was any."""
        if self._size == 1 or self.failure is not None:
            return False
        try:
            return self._advance(now)
        except Exception as error:  # a program error: no caller may wait for an operation without progress
            self.abort(Cause(f"the communicator failed: {error!r}", f"rank {self._rank}"))
            raise

    def _advance(self, now: float) -> bool:
        self._now, moved = now, False
        outcomes = self._endpoint.progress(now)
        if outcomes and (ends := self._deliver(outcomes)):
            # An operation that all others ended well ends well here, too: what they sent for it has come by now, and only
            # the word of an end, on another link, was faster.
            ends += self._deliver(self._endpoint.progress(now))
            for end in ends:
                lost = isinstance(end, contract.Lost)
                cause = replace(end.cause, peers=(end.peer,)) if lost else end.cause  # seen from here, not by hearsay
                self.failure = self.failure or CollectiveError(cause, End.PEER)
                self._feed(PeerLost(end.peer, cause) if lost else Aborted(cause))
        if outcomes:
            self._endpoint.flush()
        if self._held or self._summing:
            moved = self._look_at_the_gpu()
            if moved or not self._asks_gpu:
                self._gpu_s = now
        self._asks_gpu = bool(self._held or self._summing)
        deadlines = self._deadlines
        while deadlines and (deadlines[0][0] <= now or deadlines[0][1] not in self.running):
            op = heapq.heappop(deadlines)[1]
            if op in self.running:
                self._feed(Expired(op))
        return bool(outcomes) or moved

    def _deliver(self, outcomes: Sequence[contract.Outcome]) -> list[contract.Lost | contract.PeerAborted]:
        """Hand on what arrived and what left; the ends of links remain."""
        ends: list[contract.Lost | contract.PeerAborted] = []
        for outcome in outcomes:
            if isinstance(outcome, (contract.Received, contract.Sent)):  # noqa: UP038, a union costs five times more
                self._delivered(outcome)
            else:
                ends.append(outcome)
        return ends

    def _look_at_the_gpu(self) -> bool:
        """Go on with what waited for it; whether there was anything."""
        moved = False
        for summed in list(self._summing):
            action, mark = summed
            if mark.passed():
                moved = True
                self._summing.remove(summed)
                staged = self.running[action.op].staged
                assert staged is not None
                staged.done(action.node)
                self._feed(Computed(action.op, action.node))
        held, self._held = self._held, []
        self._carry_out(deque(held))
        return moved or self._held != held

    def _let_sums_be(self) -> None:
        """They end by themselves; their memory stays until then."""
        ops = {action.op for action, _ in self._summing}
        self._summing.clear()
        for op in ops:
            staged = self.running[op].staged
            assert staged is not None
            try:
                staged.give_up()
            except Exception:  # the device itself failed; the peers are to be told all the same
                _log.exception("rank %d: the device of an operation failed", self._rank)

    def _delivered(self, outcome: contract.Sent | contract.Received) -> None:
        op, index, sent = outcome.op, outcome.index, isinstance(outcome, contract.Sent)
        if op < 0:
            op, index = self._points.pop((sent, outcome.peer, op, index))
        else:
            op = self.submitted - ((self.submitted - (op & NUMBER)) & NUMBER)  # the newest that is called so on the wire
        if self._stages and not sent:
            running = self.running.get(op)
            if running is not None and running.staged is not None:
                running.staged.received(outcome.peer, index)
        self._feed(Sent(op, outcome.peer, index) if sent else Received(op, outcome.peer, index))

    def _feed(self, event: Event) -> None:
        """Give the machine an event and carry out what it answers."""
        self._carry_out(deque(self._machine.on(event)))

    def _carry_out(self, pending: deque[Action]) -> None:
        machine = self._machine
        while pending:
            action = pending.popleft()
            if isinstance(action, Compute):  # one class after the other: it runs for every chunk
                running = self.running[action.op]
                if running.staged is None:
                    running.reduction.carry_out(action.work, running.memory)
                elif not running.staged.may(action):
                    self._held.append(action)
                    continue
                elif (mark := running.staged.carry_out(action, running.reduction, running.memory)) is not None:
                    self._summing.append((action, mark))
                    continue
                else:
                    running.staged.done(action.node)
                pending.extend(machine.on(Computed(action.op, action.node)))
            elif isinstance(action, (Transmit, Await)):  # noqa: UP038
                self._exchange(action)
            elif isinstance(action, Done):
                self._finish(action.op, None)
            elif isinstance(action, Break):  # no cause yet but a deadline's, which the machine words
                self.failure = self.failure or CollectiveError(action.cause, End.DEADLINE)
                self._held.clear()
                self._let_sums_be()
                if self._size > 1:
                    self._abort_endpoint(action.cause)
            else:
                assert self.failure is not None
                skipped = isinstance(action, Skipped)
                self._finish(action.op, CollectiveError(action.cause, self.failure.end, skipped))

    def _abort_endpoint(self, cause: Cause) -> None:
        """An endpoint that cannot even do that is broken; the operations end all the same."""
        try:
            self._endpoint.abort(cause)
        except Exception:
            _log.exception("rank %d: the endpoint could not abort its generation (%s)", self._rank, cause)

    def _exchange(self, action: Transmit | Await) -> None:
        running, op, index = self.running[action.op], action.op, action.index
        sends = isinstance(action, Transmit)
        if running.staged is not None and isinstance(action, Transmit) and not running.staged.may(action):
            self._held.append(action)
            return
        if running.wire is not None:
            op, index = running.wire.op, running.wire.first + action.index
            self._points[sends, action.peer, op, index] = action.op, action.index
        else:
            op = op & NUMBER | running.call
        memory = running.memory
        if isinstance(action, Transmit):
            self._endpoint.send(action.peer, op, index, memory.view(action.region))
        elif action.left is None:
            self._endpoint.receive(action.peer, op, index, memory.view(action.region))
        else:
            left, into = memory.tensor(action.left), memory.tensor(action.region)
            self._endpoint.receive(action.peer, op, index, running.reduction.on_arrival(left, into, action.last))

    def _finish(self, op: int, failure: CollectiveError | None) -> None:
        running = self.running.pop(op)
        if running.memory.scratch is not None and running.staged is None:
            self._scratch.give(running.memory.scratch)
        self.ended.append((running, failure))
