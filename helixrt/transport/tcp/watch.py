"""What one endpoint waits for: sockets through an epoll of its own, and times. Other code does not use them.

The epoll is itself a descriptor to wait for, so the driver of an endpoint watches one descriptor that never changes.
"""

from __future__ import annotations

import heapq
import itertools
import math
import select
from collections.abc import Callable

from helixrt.transport.rail_connection import Waitable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
ENDED = select.EPOLLHUP | select.EPOLLERR


class Timer:
    """A call that is due at a time, unless it is cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Watch:
    """Level-triggered; each handler is called with the events of its descriptor."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, tuple[int, Callable[[int], None], Waitable]] = {}
        self._urgent: set[int] = set()
        self._first: select.epoll | None = None  # for the urgent alone
        self._turn = 0
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()

    @property
    def descriptor(self) -> int:
        return self._epoll.fileno()

    def add(self, sock: Waitable, mask: int, handler: Callable[[int], None], urgent: bool = False) -> None:
        """`urgent`: of what is ready at the same time, it comes first; and `look_first` looks for it."""
        self._handlers[sock.fileno()] = (self._turn, handler, sock)
        self._epoll.register(sock, mask)
        if urgent:
            self.hurry(sock, mask)

    def hurry(self, sock: Waitable, mask: int) -> None:
        """It is urgent from now on."""
        if sock.fileno() not in self._urgent:
            self._first = self._first or select.epoll()
            self._first.register(sock, mask)
            self._urgent.add(sock.fileno())

    def calm(self, sock: Waitable) -> None:
        """It is not urgent any more."""
        if self._first is not None and sock.fileno() in self._urgent:
            self._first.unregister(sock)
            self._urgent.discard(sock.fileno())

    def change(self, sock: Waitable, mask: int) -> None:
        self._epoll.modify(sock, mask)

    def remove(self, sock: Waitable) -> None:
        """Before it is closed."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            self._epoll.unregister(sock)
            self.calm(sock)

    def at(self, when: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    @property
    def due(self) -> float:
        """When the next timer is; inf: there is none."""
        timers = self._timers
        while timers and timers[0][2].call is None:
            heapq.heappop(timers)
        return timers[0][0] if timers else math.inf

    def dispatch(self, timeout_s: float = 0.0) -> bool:
        """Call the handlers of what is ready; whether there were any."""
        events = self._epoll.poll(timeout_s, len(self._handlers) + 1)  # room for all: a look sees everything
        if not events:
            return False
        self._turn += 1
        if self._urgent and len(events) > 1:
            events = self._handle_urgent(events)
        self._handle(events)
        return True

    def look_first(self) -> None:
        """Before something that takes long: call the handlers of what is urgent and ready."""
        if self._first is not None and (events := self._first.poll(0.0, len(self._urgent) + 1)):
            self._turn += 1
            self._handle_urgent(events)

    def _handle_urgent(self, events: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Gives the others, with what was urgent until one of these handlers was called."""
        others = [event for event in events if event[0] not in self._urgent]
        for event in [event for event in events if event[0] in self._urgent]:
            if event[0] in self._urgent:
                self._handle([event])
            else:
                others.append(event)
        return others

    def _handle(self, events: list[tuple[int, int]]) -> None:
        turn, handlers = self._turn, self._handlers
        for descriptor, mask in events:
            entry = handlers.get(descriptor)
            if entry is not None and entry[0] < turn:  # else the number was given away meanwhile
                entry[1](mask)

    def run_timers(self, now: float) -> None:
        while self.due <= now:
            call = heapq.heappop(self._timers)[2].call
            assert call is not None
            call()

    def disown(self) -> None:
        """In a forked child: close the copies of all sockets. The epoll is the parent's too, so nothing is taken out of it."""
        for _, _, sock in self._handlers.values():
            sock.close()
        self._close_all()

    def close(self) -> None:
        self._handlers.clear()
        self._urgent.clear()
        self._timers.clear()
        self._close_all()

    def _close_all(self) -> None:
        self._epoll.close()
        if self._first is not None:
            self._first.close()
