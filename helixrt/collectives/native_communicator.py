"""A rank's communicator over the native data plane: collectives on flat tensors, one generation after another.

In: plans, tensors, and peers' addresses. Out: handles of operations, and the cause that ended a generation. The library carries
out plans; this module does what is done once for each call and once for each failure. The interface is that of
`communicator.Communicator`.

An operation's end is known in one of three ways: its caller waits for it; the links' thread reads the event that announces
it; or the generation is over. The thread that takes its handle out of `_handles` completes it, so it is completed once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from helixrt.collectives.execution import Wire
from helixrt.collectives.handle import CollectiveError, End, Handle, Latch, finished
from helixrt.collectives.huge_pages import HugePages
from helixrt.collectives.reduction import Op, Reduction
from helixrt.errors import Cause, ConfigError, Retryable
from helixrt.native.engine import EngineEvent
from helixrt.native.library import Dtype, EventKind, Operator, Status
from helixrt.native.library import End as NativeEnd
from helixrt.protocol import calls
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.protocol.collective.plan import Plan
from helixrt.transport.choice import AUTO, NATIVE
from helixrt.transport.native.causes import pack_cause, parse_cause
from helixrt.transport.native.endpoint import NativeEndpoint

if TYPE_CHECKING:
    from helixrt.collectives.staged_operation import StagedOperation

_DTYPES = {  # of those that can be reduced; others are only moved
    **{torch.uint8: Dtype.U8, torch.int8: Dtype.I8, torch.int16: Dtype.I16, torch.int32: Dtype.I32, torch.int64: Dtype.I64},
    **{torch.bool: Dtype.BOOL, torch.float16: Dtype.F16, torch.bfloat16: Dtype.BF16},
    **{torch.float32: Dtype.F32, torch.float64: Dtype.F64},
}
_OPERATORS = {op: Operator[op.name] for op in Op}
_ENDS = {NativeEnd.ABORTED: End.ABORTED, NativeEnd.DEADLINE: End.DEADLINE}  # else a peer did it


class NativeCommunicator:
    """Owns `endpoint`, of which it uses the links and their engine.

    Any thread may call; collectives must be submitted in the same order on all ranks.
    """

    def __init__(self, endpoint: NativeEndpoint, tuning: Tuning | None = None, name: str = "collectives") -> None:
        self.name, self.rank, self.size, self.generation = name, 0, 0, -1
        self.tuning = tuning or Tuning()
        self.submitted = 0  # collectives of this generation
        self._endpoint, self._links = endpoint, endpoint.links
        self._engine = self._links.engine
        self._engine.announce(True)
        endpoint.hand_over(self._heard)
        self._pages = HugePages()
        self._lock = threading.Lock()  # of what follows
        self._configured, self._closed = False, False
        self._failure: CollectiveError | None = None
        self._handles: dict[int, Handle] = {}  # of operations that may run

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
        return self._failure

    @property
    def busy(self) -> bool:
        """Something is running or queued."""
        self._sweep()
        return bool(self._handles)

    # ---------------------------------------------------------------- generations

    def begin(self) -> None:
        """End what is left of the last generation, before a rendezvous for the next: from now on `abort` is for that."""
        cause = Cause("the group is being configured again")
        self._end(cause)
        if not self._closed:
            self._links.leave(cause)  # from here on no event of the last generation comes
        with self._lock:
            self._configured, self._failure, self.submitted = False, None, 0

    def configure(self, generation: int, rank: int, peers: Mapping[int, bytes], deadline_s: float) -> None:
        """Connect to `peers` (rank -> address, without this one). Raises Retryable if that fails or `abort` comes.

        To be called after `begin`, in one thread.
        """
        self._raise_if_aborted()
        try:
            self._links.connect(generation, rank, peers, deadline_s, lambda: self._failure is not None)
        except Retryable:
            self._raise_if_aborted()  # the first cause, if it was that
            raise
        with self._lock:
            self.rank, self.size, self.generation = rank, len(peers) + 1, generation
            self._configured = True
        if self._failure is not None:
            self._links.leave(self._failure.cause)
        self._raise_if_aborted()

    def _raise_if_aborted(self) -> None:
        if (failure := self._failure) is not None:
            raise CollectiveError(failure.cause, failure.end)

    def abort(self, cause: Cause) -> None:
        """End this generation, also one that is being configured: from any thread, at once. The first cause counts."""
        self._end(cause)

    def _end(self, cause: Cause) -> None:
        if not self._closed:
            self._engine.abort(pack_cause(cause))
        self._fail(CollectiveError(cause, End.ABORTED))

    def _fail(self, failure: CollectiveError) -> None:
        """The generation is over, and nothing of it is read or written any more: complete its operations."""
        with self._lock:
            if (ended := self._engine_ended()) is not None and self._failure is None:
                failure = ended  # the engine saw another cause first
            self._failure = failure = self._failure or failure
        self._sweep()

    def _engine_ended(self) -> CollectiveError | None:
        """Why the engine's generation is over; None if it is not."""
        event = None if self._closed else self._engine.ended()
        return None if event is None or not self._configured else self._error_of(event)

    def _error_of(self, event: EngineEvent) -> CollectiveError:
        end, peer, text = NativeEnd(event.a), event.peer, event.text
        if end is NativeEnd.MISMATCH:
            _, theirs, ours = text.split()
            what = calls.difference(int(theirs), int(ours))
            cause = Cause(f"lost rank {peer}: {what}" if peer >= 0 else what, f"rank {peer}" if peer >= 0 else "")
        elif (said := parse_cause(text)) is not None:
            cause = said
        elif peer >= 0:
            cause = Cause(text, f"rank {peer}", peers=(peer,) if text.startswith(f"lost rank {peer}") else ())
        else:
            cause = Cause(text, f"rank {self.rank}")
        return CollectiveError(cause, _ENDS.get(end, End.PEER))

    def close(self) -> None:
        """Inform the peers, end the thread; idempotent."""
        cause = Cause("the communicator was closed")
        if self._closed:
            return
        if self.busy:  # an orderly end needs that no operation is unfinished
            self._end(cause)
        self._closed = True
        self._endpoint.close()
        self._failure = self._failure or CollectiveError(cause, End.ABORTED)

    # ---------------------------------------------------------------- operations

    def refusal(self) -> CollectiveError | None:
        """Why nothing can be submitted now."""
        if (failure := self._failure) is not None:
            return CollectiveError(failure.cause, failure.end, skipped=True)
        return None if self._configured else CollectiveError(Cause("the communicator is not configured"), skipped=True)

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

        `timeout_s` is its software deadline. `finish` runs after success, before the result is reported. `call`: a collective's
        fingerprint (`protocol.calls`), the same on all ranks. With `waits` the caller promises to call `wait` at once.
        """
        if staged is not None:
            raise ConfigError("transport", NATIVE, f"carries tensors on the CPU only, not on {out.device}; use {AUTO}")
        if (refused := self.refusal()) is not None:
            return finished(refused)
        if self.size > 1 and self._pages.consent:
            self._pages.used(source)
            if out is not source:
                self._pages.used(out)
        handle = Handle(self, finish)
        with self._lock:  # the numbers of operations and the order of handles are the same
            self.submitted += wire is None
            number = self._engine.submit(
                plan,
                source,
                out,
                dtype=_DTYPES.get(out.dtype, Dtype.U8),
                op=_OPERATORS[reduction.op],
                divisor=reduction.divisor,
                timeout_s=timeout_s,
                fingerprint=call,
                name=0 if wire is None else wire.op,
                first=0 if wire is None else wire.first,
                waits=waits,
            )
            handle.number = number
            self._handles[number] = handle
        return handle

    def drive(self, handle: Handle, timeout_s: float | None) -> None:
        """For `Handle.wait`: wait until `handle` is done."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while not handle.done:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s < 0:
                return
            status = self._engine.wait(handle.number, left_s)
            if status is Status.RUNNING:
                continue
            if not self._complete(handle.number, status):  # another thread does
                handle.sleep(Latch(), 60.0 if left_s is None else left_s)

    def _complete(self, number: int, status: Status) -> bool:
        """Whether this call was the one that completed it."""
        with self._lock:  # else its end may be known before `submit` has put it there
            handle = self._handles.pop(number, None)
        if handle is None:
            return False
        handle.complete(None if status is Status.OK else self._error(status is Status.SKIPPED))
        return True

    def _error(self, skipped: bool) -> CollectiveError:
        if self._failure is None:
            failed = self._engine_ended() or CollectiveError(Cause("the generation is over"), End.ABORTED)
            with self._lock:
                self._failure = self._failure or failed
        return CollectiveError(self._failure.cause, self._failure.end, skipped)

    def _sweep(self) -> None:
        """Complete what has ended and nobody waits for."""
        for number in list(self._handles):
            status = self._engine.status(number)
            if status is not Status.RUNNING:
                self._complete(number, status)

    def _heard(self, event: EngineEvent) -> None:
        """In the thread of the links."""
        if event.kind is EventKind.DONE:
            self._complete(event.op, Status(event.a))
        elif event.kind is EventKind.ENDED and self._configured:
            self._fail(self._error_of(event))
