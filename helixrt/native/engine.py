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
from collections.abc import Sequence
from typing import Any

from helixrt.errors import Fatal
from helixrt.native.flat import flatten
from helixrt.native.handle import Handle, Held, check, memory_of
from helixrt.native.library import (
    CCall,
    CEvent,
    CLoopCounters,
    CRailCounters,
    Dtype,
    EventKind,
    Failure,
    Operator,
    Status,
    library,
)
from helixrt.native.values import EngineEvent, LoopCounters, Options, RailCounters, dtype_of, nanoseconds
from helixrt.protocol.collective.plan import Plan

__all__ = ["Engine", "EngineEvent", "LoopCounters", "Options", "RailCounters", "dtype_of", "ring_bytes"]

_EVENTS = 16  # read at once
_SWEPT = 64  # operations that are held before those are looked for that nobody waited for
_WHY_BYTES = 1024
_PRINT_BYTES = 1 << 18


class Engine:
    """One group's data plane. `close` it; it is also closed when it is collected and before the interpreter ends."""

    def __init__(self, options: Options | None = None) -> None:
        """Raises ConfigError where the library cannot be had, Fatal where the process has no descriptors or threads left."""
        self._handle = Handle((options or Options()).native())
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
        held.append(Held())  # before the call: another thread may submit as soon as the generation has begun
        numbers = (ctypes.c_int32 * len(rails))(*rails)
        result = self._call(self._library.hx_begin, generation, me, len(rails), numbers)
        if result < 0:
            held.pop()
            check(result, f"begin generation {generation}")
        self._size = len(rails)
        while len(held) > 1 and (len(held) > 2 or held[0].over):
            held.popleft()

    def rail_up(self, peer: int, rail: int, number: int, connection: socket.socket) -> None:
        """A connected and authenticated stream socket is rail `rail` to `peer`, in its connection number `number` from 1.

        The library owns the socket from now on, also when this raises.
        """
        fd = connection.detach()
        check(self._owning(fd, self._library.hx_rail_up, peer, rail, number, fd), f"use rail {rail} to rank {peer}")

    def rail_up_memory(self, peer: int, rail: int, number: int, connection: socket.socket, memory: int, first: bool) -> None:
        """The same over shared memory: `memory` is a descriptor of `ring_bytes()` zeroed bytes that both ends map, and remains
        the caller's; `connection` a socket pair that wakes the other end; `first` at one of the two ends."""
        fd = connection.detach()
        function = self._library.hx_rail_up_memory
        check(self._owning(fd, function, peer, rail, number, fd, memory, int(first)), f"use rail {rail} to rank {peer}")

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
        check(result, f"give up rail {rail} to rank {peer}")

    def rail_slow(self, peer: int, rail: int) -> None:
        """The rail works but is slow: leave it."""
        check(self._call(self._library.hx_rail_slow, peer, rail), f"leave rail {rail} to rank {peer}")

    def lose(self, peer: int, reason: str) -> None:
        """It is known from elsewhere that `peer` is gone."""
        check(self._call(self._library.hx_lose, peer, reason.encode()), f"lose rank {peer}")

    def abort(self, cause: str) -> None:
        """End the generation now. The first cause counts."""
        check(self._call(self._library.hx_abort, cause.encode()), "abort")

    def finish(self, linger_s: float) -> None:
        """End the generation in order, and wait at most `linger_s` until the last bytes are written."""
        check(self._call(self._library.hx_finish, nanoseconds(linger_s)), f"end the generation in order within {linger_s} s")

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
            check(number, "take a plan")
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
        external: bool = False,
    ) -> int:
        """Begin an operation and return its number, for `wait` and `status`.

        `source`, `out`: contiguous tensors on the CPU, or objects with a writable buffer; None for no bytes. They are held
        until the operation's end is known. `dtype`: a `Dtype` or one of torch. `timeout_s`: an operation that has not ended by
        then ends the generation. `fingerprint`: what all ranks must agree on. `name` below 0: a point-to-point operation, whose
        messages are called (name, first + index). `waits`: this thread calls `wait` at once, and the end is not announced.
        `external`: reductions, copies and the leave to send SOURCE are the caller's (events NODE and ARRIVED, `node_done`).
        """
        held = self._generation()
        (source_at, source_bytes, source_kept), (out_at, out_bytes, out_kept) = memory_of(source), memory_of(out)
        call = CCall(
            self.plan(plan),
            source_at,
            out_at,
            source_bytes,
            out_bytes,
            dtype if isinstance(dtype, Dtype) else dtype_of(dtype),
            op,
            divisor,
            0 if timeout_s is None else max(1, nanoseconds(timeout_s)),
            fingerprint,
            name,
            first,
            waits,
            external,
        )
        kept, mark = (plan, source_kept, out_kept), next(self._marks)
        held.operations[mark] = kept  # stays if an exception comes from a signal handler before the number is known
        number = int(self._call(self._library.hx_submit, ctypes.byref(call)))
        if number >= 0:
            self._generation().operations[number] = kept
        held.operations.pop(mark, None)  # the generation may have ended meanwhile
        check(number, f"begin an operation with {source_bytes} and {out_bytes} bytes")
        if len(held.operations) >= self._sweep_at:
            self._sweep(held)
        return number

    def wait(self, operation: int, timeout_s: float | None = None) -> Status:
        """Until the operation has ended; RUNNING after `timeout_s`. Drives the engine meanwhile.

        An exception of a signal handler, such as KeyboardInterrupt, comes out of it; the operation goes on, its memory is held.
        """
        deadline = None if timeout_s is None else time.monotonic_ns() + nanoseconds(timeout_s)
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

    def node_done(self, operation: int, node: int) -> None:
        """The caller has carried out this node of an operation with `external` work. Nothing if the operation is over."""
        check(self._call(self._library.hx_node_done, operation, node), f"end node {node} of operation {operation}")

    def _ended(self, operation: int, status: int, what: str) -> Status:
        check(status, f"{what} operation {operation}")
        self._release(operation)
        return Status(status)

    def _release(self, operation: int) -> None:
        for held in list(self._handle.held):
            held.operations.pop(operation, None)

    def _sweep(self, held: Held) -> None:
        """Let go of operations that have ended and that nobody waited for."""
        for operation in list(held.operations):
            if operation >= 0 and self._call(self._library.hx_status, operation):
                held.operations.pop(operation, None)
        self._sweep_at = max(_SWEPT, 2 * len(held.operations))

    def _generation(self) -> Held:
        """What is held of the newest generation."""
        try:
            return self._handle.held[-1]
        except IndexError:
            raise Fatal(self._handle.closed or "no generation of the data plane has begun") from None

    # ---- single messages

    def send(self, peer: int, op: int, index: int, data: Any) -> None:
        """Send `data` (as in `submit`) to `peer` as message (op, index). Held until the event SENT, or that of the end."""
        self._message(self._library.hx_send, True, peer, op, index, data)

    def receive(self, peer: int, op: int, index: int, into: Any) -> None:
        """Receive message (op, index) of `peer`, of the length of `into`. Held until the event RECEIVED, or that of the end."""
        self._message(self._library.hx_receive, False, peer, op, index, into)

    def _message(self, function: Any, sent: bool, peer: int, op: int, index: int, memory: Any) -> None:
        at, length, kept = memory_of(memory)
        name, held = (sent, peer, op, index), self._generation()
        if name in held.messages:
            raise Fatal(f"message ({op}, {index}) {'to' if sent else 'from'} rank {peer} is under way; each name is used once")
        held.messages[name] = kept
        result = self._call(function, peer, op, index, at, length)
        if result < 0:
            held.messages.pop(name, None)
            check(result, f"{'send' if sent else 'receive'} message ({op}, {index}) {'to' if sent else 'from'} rank {peer}")

    # ---- what has happened

    def events(self) -> list[EngineEvent]:
        """What has happened since the last call, oldest first. To be called when `event_fd` is readable: this also lets go of
        the memory of messages."""
        found: list[EngineEvent] = []
        batch = (CEvent * _EVENTS)()
        while True:
            count = check(self._call(self._library.hx_events, batch, _EVENTS), "read events")
            for each in batch[:count]:
                event = _event(each)
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
                for held in list(self._handle.held):  # the oldest first: events come in order
                    if held.messages.pop(name, None) is not None:
                        break
            case EventKind.ENDED:
                for held in list(self._handle.held):
                    if not held.over:  # the oldest one: at most that, as each generation ends once
                        held.end()
                        break

    def ended(self) -> EngineEvent | None:
        """The event ENDED of this generation, also after `events` has returned it; None if it is not over."""
        found = CEvent()
        over = check(self._call(self._library.hx_ended, ctypes.byref(found)), "ask for the end of the generation")
        return _event(found) if over else None

    def event_fd(self) -> int:
        """A descriptor that is readable while there are events. It is the library's."""
        return check(self._call(self._library.hx_event_fd), "make events readable")

    def announce(self, yes: bool) -> None:
        """Whether the end of an operation comes as an event, too, unless it was submitted with `waits`."""
        check(self._call(self._library.hx_announce, int(yes)), "announce the ends of operations")

    # ---- figures

    def counters(self, peer: int, rail: int) -> RailCounters:
        found = CRailCounters()
        check(self._call(self._library.hx_counters, peer, rail, ctypes.byref(found)), f"read rail {rail} to rank {peer}")
        return RailCounters(*(getattr(found, name) for name, *_ in CRailCounters._fields_))

    def loop(self) -> LoopCounters:
        found = CLoopCounters()
        check(self._call(self._library.hx_loop, ctypes.byref(found)), "read the loop's figures")
        return LoopCounters(*(getattr(found, name) for name, *_ in CLoopCounters._fields_))

    def print(self) -> str:
        """The state as text, for a run that hangs."""
        text = ctypes.create_string_buffer(_PRINT_BYTES)
        check(self._call(self._library.hx_print, text, _PRINT_BYTES), "print the state")
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


def _event(of: CEvent) -> EngineEvent:
    text = of.text.decode(errors="replace")
    return EngineEvent(EventKind(of.event), of.peer, of.op, of.a, of.b, of.at, text)


def _numbers(of: array[int]) -> Any:
    return ctypes.cast(of.buffer_info()[0], ctypes.POINTER(ctypes.c_int64))


def _collected(engine: weakref.ref[Engine], key: tuple[int, int], _: object) -> None:
    """A plan was collected: the library's may be freed when no operation uses it any more."""
    if (found := engine()) is not None and (known := found._plans.pop(key, None)) is not None:
        found._unused.append(known[0])


