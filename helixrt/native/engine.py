"""An engine of the data plane: carries out plans over the links of one group of ranks, one generation after another.

In: connected sockets, plans, tensors. Out: results in the tensors, and events. A thin layer over the functions of
include/helixrt_native.h, which says when each may be called and what it means; here times are in seconds, errors are those of
helixrt, and memory that the library uses stays alive:

- What an operation or a message reads or writes is held from its call until its end is known, whatever the caller does
  meanwhile. If the end never becomes known, it is held until the generation after the next begins, or the engine is closed.
- An engine that is closed or collected, or that exists when the interpreter ends, first ends its library's part, then lets go
  of the memory.
- After a fork the child has no engine: its copies of the sockets are closed, and calls raise Fatal.

Any thread may call any method.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import socket
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from helixrt.errors import Fatal, Retryable
from helixrt.native.flat import flatten
from helixrt.native.library import (
    CCall,
    CEvent,
    CLoopCounters,
    COptions,
    CRailCounters,
    Dtype,
    EventKind,
    Failure,
    Operator,
    Status,
    library,
)
from helixrt.protocol.collective.plan import Plan

NS = 1_000_000_000
_EVENTS = 16  # read at once
_SWEPT = 64  # operations that are held before those are looked for that nobody waited for
_LEAVE_S = 5.0  # for other threads to leave the library when an engine is closed: an abort wakes them
_WHY_BYTES = 1024
_PRINT_BYTES = 1 << 18
_FORKED = "this engine belongs to the process that forked this one; make another one here"
_CLOSED = "the engine of the data plane is closed"
_OVER = (errno.ECANCELED, errno.ECONNABORTED, errno.ECONNRESET, errno.ENOTCONN, errno.EPIPE, errno.ESHUTDOWN, errno.ETIMEDOUT)
_SENTENCES = {
    **dict.fromkeys(_OVER, "the generation is over"),
    errno.ETIMEDOUT: "time ran out",
    errno.EBUSY: "it is in use",
    errno.EINVAL: "a rank, rail, number or length does not fit the generation",
    errno.ENOENT: "there is no such thing in this generation",
}
_DTYPES = {
    **{"torch.uint8": Dtype.U8, "torch.int8": Dtype.I8, "torch.int16": Dtype.I16, "torch.int32": Dtype.I32},
    **{"torch.int64": Dtype.I64, "torch.uint16": Dtype.U16, "torch.uint32": Dtype.U32, "torch.uint64": Dtype.U64},
    **{"torch.bool": Dtype.BOOL, "torch.float16": Dtype.F16, "torch.bfloat16": Dtype.BF16, "torch.float32": Dtype.F32},
    **{"torch.float64": Dtype.F64, "torch.complex64": Dtype.C64, "torch.complex128": Dtype.C128},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of an engine; both ends of a link need the same. 0 keeps the default of io.hpp, which explains each.

    `period_s` below 0: silent peers are not lost.
    """

    period_s: float = 0
    connect_s: float = 0
    answer_s: float = 0
    attempt_s: float = 0
    retry_s: float = 0
    rest_s: float = 0
    longest_rest_s: float = 0
    steady_s: float = 0
    acknowledge_s: float = 0
    eager_bytes: int = 0
    keep_bytes: int = 0
    eager_memory: int = 0
    rail_bytes: int = 0
    window_bytes: int = 0
    turn_bytes: int = 0
    concurrent: int = 0

    def _native(self) -> COptions:
        found = {key.removesuffix("_s"): _ns(value) if key.endswith("_s") else value for key, value in asdict(self).items()}
        return COptions(**{**found, "period": -1 if self.period_s < 0 else found["period"]})


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """io.hpp, Event, says what the fields of each kind mean. `at_ns`: when it came about, monotonic."""

    kind: EventKind
    peer: int
    op: int
    a: int
    b: int
    at_ns: int
    text: str


@dataclass(frozen=True, slots=True)
class RailCounters:
    """Of one rail, since the engine was made."""

    bytes_sent: int
    bytes_received: int
    frames_sent: int
    frames_received: int
    fragments_again: int
    duplicates: int
    failures: int
    returns: int


@dataclass(frozen=True, slots=True)
class LoopCounters:
    """Of the loop, since the engine was made."""

    turns: int
    caller_turns: int
    sleeps: int
    kicks: int
    system_calls: int
    spins_ns: int
    driven_ns: int


@dataclass(slots=True)
class _Held:
    """What the library may use of one generation: by number of the operation, and by (sent, peer, op, index) of the message.

    An operation has a negative number until the library's is known.
    """

    over: bool = False
    operations: dict[int, object] = field(default_factory=dict)
    messages: dict[tuple[bool, int, int, int], object] = field(default_factory=dict)

    def end(self) -> None:
        self.over = True
        self.operations.clear()
        self.messages.clear()


class _Handle:
    """The library's engine, and what keeps it from being freed while a thread is in it.

    Apart from `Engine`, so that it can be closed when that is collected.
    """

    def __init__(self, options: COptions) -> None:
        self.library = library()
        self.closed = ""  # why it cannot be used, once it cannot
        self.held: deque[_Held] = deque()  # one for each generation whose memory may be in use, the newest last
        self._inside: list[int] = []  # the threads in the library; append and remove are atomic
        self._engine: int | None = self.library.hx_new(ctypes.byref(options))
        if not self._engine:
            raise Fatal("the data plane cannot start: no file descriptors or threads are left (ulimit -n, ulimit -u)")
        _handles().add(self)

    def call(self, function: Any, *arguments: object) -> Any:
        """What the function of the library returns. Raises Fatal once the engine is closed."""
        thread = threading.get_ident()
        self._inside.append(thread)  # before `closed` is read: `close` sets that first, and then looks who is inside
        try:
            if self.closed:
                raise Fatal(self.closed)
            return function(self._engine, *arguments)
        finally:
            self._inside.remove(thread)

    def close(self) -> None:
        """End everything, then let go of the memory. A second call does nothing."""
        if self.closed:
            return
        self.closed = _CLOSED
        self.library.hx_abort(self._engine, b"the engine is closed")
        deadline, me = time.monotonic() + _LEAVE_S, threading.get_ident()  # a signal handler may close what its thread waits for
        while (others := any(thread != me for thread in self._inside)) and time.monotonic() < deadline:
            time.sleep(0.0005)
        if not others:  # else that thread keeps this object, and with it the memory
            self.library.hx_free(self._engine)
            self.held.clear()

    def forget(self) -> None:
        """In the child of a fork: close its copies of the sockets."""
        if not self.closed:
            self.closed = _FORKED
            self.library.hx_free(self._engine)
            self.held.clear()


@functools.cache
def _handles() -> weakref.WeakSet[_Handle]:
    """All of this process, which a child of it forgets."""
    found: weakref.WeakSet[_Handle] = weakref.WeakSet()

    def forget_all() -> None:
        for handle in list(found):
            handle.forget()
        found.clear()

    os.register_at_fork(after_in_child=forget_all)
    return found


class Engine:
    """One group's data plane. `close` it; it is also closed when it is collected and before the interpreter ends."""

    def __init__(self, options: Options | None = None) -> None:
        """Raises ConfigError where the library cannot be had, Fatal where the process has no descriptors or threads left."""
        self._handle = _Handle((options or Options())._native())
        self._library = self._handle.library
        self._call = self._handle.call
        self._size = 0
        self._marks = itertools.count(-1, -1)
        self._sweep_at = _SWEPT
        self._plans: dict[tuple[int, int], tuple[int, weakref.ref[Plan]]] = {}  # (id, ranks) -> number
        self._plans_lock = threading.Lock()
        self._unused: list[int] = []  # plans that were collected, and may still be used by an operation
        # Also called at the end of the interpreter, before modules and their tensors are freed.
        self._finalizer = weakref.finalize(self, self._handle.close)

    # ---- generations

    def begin(self, generation: int, me: int, rails: Sequence[int]) -> None:
        """Begin `generation` as rank `me` of `len(rails)`; `rails[r]`: how many lead to rank r, 0 where there is no link.

        Ends what the generation before left. The library stops using that one's memory while it does so; it is let go of when
        the end is known (an event), or at the beginning after this one.
        """
        held = self._handle.held
        held.append(_Held())  # before the call: another thread may submit as soon as the generation has begun
        self._size = len(rails)
        numbers = (ctypes.c_int32 * len(rails))(*rails)
        _check(self._call(self._library.hx_begin, generation, me, len(rails), numbers), f"begin generation {generation}")
        while len(held) > 2 or held[0].over:
            held.popleft()

    def rail_up(self, peer: int, rail: int, number: int, connection: socket.socket) -> None:
        """A connected and authenticated stream socket is rail `rail` to `peer`, in its connection number `number` from 1.

        The library owns the socket from now on, also when this raises.
        """
        fd = connection.detach()
        _check(self._owning(fd, self._library.hx_rail_up, peer, rail, number, fd), f"use rail {rail} to rank {peer}")

    def rail_up_memory(self, peer: int, rail: int, number: int, connection: socket.socket, memory: int, first: bool) -> None:
        """The same over shared memory: `memory` is a descriptor of `ring_bytes()` zeroed bytes that both ends map, and remains
        the caller's; `connection` a socket pair that wakes the other end; `first` at one of the two ends."""
        fd = connection.detach()
        function = self._library.hx_rail_up_memory
        _check(self._owning(fd, function, peer, rail, number, fd, memory, int(first)), f"use rail {rail} to rank {peer}")

    def _owning(self, fd: int, function: Any, *arguments: object) -> int:
        """A call that takes over `fd`, unless the library is not reached."""
        try:
            return int(self._call(function, *arguments))
        except Fatal:
            os.close(fd)
            raise

    def rail_down(self, peer: int, rail: int, failure: Failure, reason: str) -> None:
        """The rail could not be connected, or is known to be broken."""
        result = self._call(self._library.hx_rail_down, peer, rail, failure, reason.encode())
        _check(result, f"give up rail {rail} to rank {peer}")

    def rail_slow(self, peer: int, rail: int) -> None:
        """The rail works but is slow: leave it."""
        _check(self._call(self._library.hx_rail_slow, peer, rail), f"leave rail {rail} to rank {peer}")

    def lose(self, peer: int, reason: str) -> None:
        """It is known from elsewhere that `peer` is gone."""
        _check(self._call(self._library.hx_lose, peer, reason.encode()), f"lose rank {peer}")

    def abort(self, cause: str) -> None:
        """End the generation now. The first cause counts."""
        _check(self._call(self._library.hx_abort, cause.encode()), "abort")

    def finish(self, linger_s: float) -> None:
        """End the generation in order, and wait at most `linger_s` until the last bytes are written."""
        _check(self._call(self._library.hx_finish, _ns(linger_s)), f"end the generation in order within {linger_s} s")

    # ---- operations

    def plan(self, plan: Plan) -> int:
        """Make the plan known for the ranks of this generation, once; `submit` does so itself. Returns the library's number.

        It is forgotten when the plan is collected. Raises Fatal with the reason if that is no plan.
        """
        key = (id(plan), self._size)
        known = self._plans.get(key)
        if known is not None:
            return known[0]
        flat, why = flatten(plan), ctypes.create_string_buffer(_WHY_BYTES)
        with self._plans_lock:
            if (known := self._plans.get(key)) is not None:
                return known[0]
            lists = (_numbers(flat.nodes), flat.count, _numbers(flat.after), _numbers(flat.after_begin))
            number = self._call(self._library.hx_plan, self._size, *lists, flat.scratch_bytes, why, _WHY_BYTES)
            if number < 0 and why.value:
                raise Fatal(f"a plan for {self._size} ranks is refused: {why.value.decode(errors='replace')}")
            _check(number, "take a plan")
            self._plans[key] = (number, weakref.ref(plan, functools.partial(_collected, weakref.ref(self), key)))
            unused = [self._unused.pop() for _ in range(len(self._unused))]
            self._unused += [each for each in unused if self._call(self._library.hx_plan_free, each) == -errno.EBUSY]
        return int(number)

    def submit(
        self,
        plan: Plan,
        source: Any,
        out: Any,
        *,
        dtype: Any = Dtype.U8,
        op: Operator = Operator.SUM,
        divisor: int = 1,
        timeout_s: float | None = None,
        fingerprint: int = 0,
        name: int = 0,
        first: int = 0,
        waits: bool = False,
    ) -> int:
        """Begin an operation and return its number, for `wait` and `status`.

        `source`, `out`: contiguous tensors on the CPU, or objects with a writable buffer; None for no bytes. They are held until
        the operation's end is known. `dtype`: a `Dtype` or one of torch. `timeout_s`: an operation that has not ended by then
        ends the generation. `fingerprint`: what all ranks must agree on. `name` below 0: a point-to-point operation, whose
        messages are called (name, first + index). `waits`: this thread calls `wait` at once.
        """
        (source_at, source_bytes, source_kept), (out_at, out_bytes, out_kept) = _memory(source), _memory(out)
        call = CCall(
            self.plan(plan),
            source_at,
            out_at,
            source_bytes,
            out_bytes,
            dtype if isinstance(dtype, Dtype) else dtype_of(dtype),
            op,
            divisor,
            0 if timeout_s is None else max(1, _ns(timeout_s)),
            fingerprint,
            name,
            first,
            waits,
        )
        kept, mark = (plan, source_kept, out_kept), next(self._marks)
        held = self._generation()
        held.operations[mark] = kept  # stays if an exception comes from a signal handler before the number is known
        number = int(self._call(self._library.hx_submit, ctypes.byref(call)))
        if number >= 0:
            self._generation().operations[number] = kept
        del held.operations[mark]
        _check(number, f"begin an operation with {source_bytes} and {out_bytes} bytes")
        if len(held.operations) >= self._sweep_at:
            self._sweep(held)
        return number

    def wait(self, operation: int, timeout_s: float | None = None) -> Status:
        """Until the operation has ended; RUNNING after `timeout_s`. Drives the engine meanwhile.

        An exception of a signal handler, such as KeyboardInterrupt, comes out of it; the operation goes on, and its memory is held.
        """
        deadline = None if timeout_s is None else time.monotonic_ns() + _ns(timeout_s)
        while True:
            left = -1 if deadline is None else max(0, deadline - time.monotonic_ns())
            status = self._call(self._library.hx_wait, operation, left)
            if status:
                return self._ended(operation, status, "wait for")
            if deadline is not None and time.monotonic_ns() >= deadline:
                return Status.RUNNING

    def status(self, operation: int) -> Status:
        """How the operation has ended, or RUNNING."""
        status = self._call(self._library.hx_status, operation)
        return self._ended(operation, status, "ask for") if status else Status.RUNNING

    def _ended(self, operation: int, status: int, what: str) -> Status:
        _check(status, f"{what} operation {operation}")
        self._release(operation)
        return Status(status)

    def _release(self, operation: int) -> None:
        for held in self._handle.held:
            held.operations.pop(operation, None)

    def _sweep(self, held: _Held) -> None:
        """Let go of operations that have ended and that nobody waited for."""
        for operation in list(held.operations):
            if operation >= 0 and self._call(self._library.hx_status, operation):
                held.operations.pop(operation, None)
        self._sweep_at = max(_SWEPT, 2 * len(held.operations))

    def _generation(self) -> _Held:
        """What is held of the newest generation."""
        try:
            return self._handle.held[-1]
        except IndexError:
            raise Fatal(self._handle.closed or "no generation of the data plane has begun") from None

    # ---- single messages

    def send(self, peer: int, op: int, index: int, data: Any) -> None:
        """Send `data` (as in `submit`) to `peer` as message (op, index). It is held until the event SENT, or that of the end."""
        self._message(self._library.hx_send, True, peer, op, index, data)

    def receive(self, peer: int, op: int, index: int, into: Any) -> None:
        """Receive message (op, index) of `peer`, of as many bytes as `into` has; held until the event RECEIVED, or the end's."""
        self._message(self._library.hx_receive, False, peer, op, index, into)

    def _message(self, function: Any, sent: bool, peer: int, op: int, index: int, memory: Any) -> None:
        at, length, kept = _memory(memory)
        name, held = (sent, peer, op, index), self._generation()
        if name in held.messages:
            raise Fatal(f"message ({op}, {index}) {'to' if sent else 'from'} rank {peer} is under way; each name is used once")
        held.messages[name] = kept
        result = self._call(function, peer, op, index, at, length)
        if result < 0:
            held.messages.pop(name, None)
            _check(result, f"{'send' if sent else 'receive'} message ({op}, {index}) {'to' if sent else 'from'} rank {peer}")

    # ---- what has happened

    def events(self) -> list[EngineEvent]:
        """What has happened since the last call, oldest first. Call it when `event_fd` is readable: memory of messages is let go
        of here."""
        found: list[EngineEvent] = []
        batch = (CEvent * _EVENTS)()
        while True:
            count = _check(self._call(self._library.hx_events, batch, _EVENTS), "read events")
            for each in batch[:count]:
                text = each.text.decode(errors="replace")
                event = EngineEvent(EventKind(each.event), each.peer, each.op, each.a, each.b, each.at, text)
                self._release_after(event)
                found.append(event)
            if count < _EVENTS:
                return found

    def _release_after(self, event: EngineEvent) -> None:
        match event.kind:
            case EventKind.DONE:
                self._release(event.op)
            case EventKind.SENT | EventKind.RECEIVED:
                name = (event.kind is EventKind.SENT, event.peer, event.op, event.a)
                for held in self._handle.held:  # the oldest first: events come in order
                    if held.messages.pop(name, None) is not None:
                        break
            case EventKind.ENDED:
                for held in list(self._handle.held):
                    if not held.over:  # the oldest one: at most that, as each generation ends once
                        held.end()
                        break

    def event_fd(self) -> int:
        """A descriptor that is readable while there are events. It is the library's."""
        return _check(self._call(self._library.hx_event_fd), "make events readable")

    def announce(self, yes: bool) -> None:
        """Whether the end of an operation comes as an event, too."""
        _check(self._call(self._library.hx_announce, int(yes)), "announce the ends of operations")

    # ---- figures

    def counters(self, peer: int, rail: int) -> RailCounters:
        found = CRailCounters()
        _check(self._call(self._library.hx_counters, peer, rail, ctypes.byref(found)), f"read rail {rail} to rank {peer}")
        return RailCounters(*(getattr(found, name) for name, *_ in CRailCounters._fields_))

    def loop(self) -> LoopCounters:
        found = CLoopCounters()
        _check(self._call(self._library.hx_loop, ctypes.byref(found)), "read the loop's figures")
        return LoopCounters(*(getattr(found, name) for name, *_ in CLoopCounters._fields_))

    def print(self) -> str:
        """The state as text, for a run that hangs."""
        text = ctypes.create_string_buffer(_PRINT_BYTES)
        _check(self._call(self._library.hx_print, text, _PRINT_BYTES), "print the state")
        return text.value.decode(errors="replace")

    # ---- its end

    def close(self) -> None:
        """Abort what runs, end the library's thread, close all connections. A second call does nothing."""
        self._finalizer()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ring_bytes() -> int:
    """The length of the memory of a rail over shared memory."""
    return int(library().hx_ring_bytes())


def dtype_of(dtype: Any) -> Dtype:
    """The library's number for an element type of torch. Raises Fatal for one that it cannot reduce."""
    found = _DTYPES.get(str(dtype))
    if found is None:
        raise Fatal(f"elements of {dtype} cannot be reduced; convert them")
    return found


def _memory(of: Any) -> tuple[int | None, int, object]:
    """Address and length of the bytes of a tensor or a buffer, and what keeps them in place."""
    if of is None:
        return None, 0, None
    if hasattr(of, "data_ptr"):
        if not (of.is_cpu and of.is_contiguous()):
            raise Fatal(f"the data plane needs a contiguous tensor on the CPU, not {tuple(of.shape)}, {of.stride()} on {of.device}")
        return of.data_ptr(), of.nbytes, of
    view = memoryview(of).cast("B")
    if isinstance(of, bytes):
        return ctypes.cast(of, ctypes.c_void_p).value, len(of), of
    kept = (ctypes.c_char * len(view)).from_buffer(view)
    return ctypes.addressof(kept), len(view), kept


def _numbers(of: array[int]) -> Any:
    return ctypes.cast(of.buffer_info()[0], ctypes.POINTER(ctypes.c_int64))


def _ns(seconds: float) -> int:
    return round(seconds * NS)


def _collected(engine: weakref.ref[Engine], key: tuple[int, int], _: object) -> None:
    """A plan was collected: the library's may be freed when no operation uses it any more."""
    if (found := engine()) is not None and (known := found._plans.pop(key, None)) is not None:
        found._unused.append(known[0])


def _check(result: int, what: str) -> int:
    """The result of a function of the library, unless it is an error."""
    if result >= 0:
        return result
    number = -result
    if number == errno.ECHILD:
        raise Fatal(f"cannot {what}: {_FORKED}")
    text = _SENTENCES.get(number) or os.strerror(number)
    error = Retryable if number in _OVER else Fatal
    raise error(f"cannot {what}: {text} ({errno.errorcode.get(number, number)})")
