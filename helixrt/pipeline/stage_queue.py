"""One queue between stages: an endpoint, and the thread that drives it.

In: orders from any thread, which the queue's thread carries out: messages to send and to expect, things to do later. Out: calls
of what was given with them, in that thread. Compute never waits for it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import torch

from helixrt.errors import Cause
from helixrt.transport.contract import Buffer, Endpoint, Outcome, Received, Sent
from helixrt.transport.poller import Poller

LINGER_S = 5.0  # `close` waits so long for what is being sent, at most
_JOIN_S = 5.0  # for the thread to end after that
_LONGEST_S = 1.0  # one wait

Name = tuple[int, int]  # (op, index) of a message, as the endpoint's contract has it
Call = Callable[[], None]
Came = Callable[[float], None]  # with the monotonic time of an arrival
Order = Callable[["StageQueue"], None]

_log = logging.getLogger("helixrt.pipeline")


class StageQueue:
    """`endpoint` is connected, and belongs to the queue. `lost(peer, cause)` is called in the queue's thread when a
    peer cannot be reached any more; with None for all of them. Only orders may call `send`, `receive` and `later`."""

    def __init__(self, endpoint: Endpoint, name: str, lost: Callable[[int | None, Cause], None]) -> None:
        self._endpoint, self._lost = endpoint, lost
        self._poller = Poller()
        self._orders: deque[Order] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        self._numbers = count()
        self._sending: dict[tuple[int, Name], tuple[Buffer, Call]] = {}
        self._receiving: dict[tuple[int, Name], tuple[Buffer, Came]] = {}
        self._gone: set[int] = set()
        self._closing = threading.Event()
        self._until_s = math.inf
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, order: Order) -> None:
        """Have the thread carry it out soon, after those given before; nothing once it is closed. Never blocks; any thread."""
        if self._closing.is_set():
            return
        self._orders.append(order)
        if threading.current_thread() is not self._thread:
            self._poller.wake()

    def close(self, linger_s: float = LINGER_S) -> None:
        """Send what was begun, for at most `linger_s`, and end the thread and the endpoint; idempotent."""
        if self._closing.is_set():
            return
        self._until_s = time.monotonic() + linger_s
        self._closing.set()
        self._poller.wake()
        self._thread.join(linger_s + _JOIN_S)
        if self._thread.is_alive():
            _log.error("%s did not end within %g s", self._thread.name, linger_s + _JOIN_S)
        else:
            self._poller.close()

    # ---- orders

    def send(self, peer: int, name: Name, data: Buffer, done: Call) -> None:
        """`done` is called when `data` may be written again; never, if the peer is lost before."""
        if peer not in self._gone:
            self._sending[peer, name] = (data, done)
            self._endpoint.send(peer, *name, data)

    def receive(self, peer: int, name: Name, into: Buffer, done: Came) -> None:
        """`done` is called when the message is there, with the time at which it came: before now, if it came before it was
        asked for and the endpoint knows that. Never, if the peer is lost before."""
        if peer not in self._gone:
            self._receiving[peer, name] = (into, done)
            self._endpoint.receive(peer, *name, into)

    def later(self, due_s: float, call: Call) -> None:
        """Call it at a monotonic time."""
        heappush(self._timers, (due_s, next(self._numbers), call))

    # ---- the thread

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while not self._closing.is_set() or (self._sending or self._orders) and time.monotonic() < self._until_s:
                self._turn()
        except Exception as error:  # raised in the thread that waits, and not reported elsewhere
            _log.exception("%s", self._thread.name)
            self._lost(None, Cause(f"{self._thread.name} failed: {error!r}"))
        finally:
            self._endpoint.close()

    def _turn(self) -> None:
        self._poller.take_wake()
        idle = True
        while self._orders:
            self._orders.popleft()(self)
            idle = False
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            heappop(self._timers)[2]()
            idle = False
        for outcome in self._endpoint.progress(now):
            self._take(outcome)
            idle = False
        if idle:
            self._endpoint.flush()
            self._poller.watch(self._endpoint.descriptors())
            self._wait()

    def _take(self, outcome: Outcome) -> None:
        if isinstance(outcome, Sent):
            _, done = self._sending.pop((outcome.peer, (outcome.op, outcome.index)))
            done()
        elif isinstance(outcome, Received):
            _, came = self._receiving.pop((outcome.peer, (outcome.op, outcome.index)))
            came(outcome.came_s or time.monotonic())
        else:
            self._gone.add(outcome.peer)
            self._sending = {key: value for key, value in self._sending.items() if key[0] != outcome.peer}
            self._receiving = {key: value for key, value in self._receiving.items() if key[0] != outcome.peer}
            self._lost(outcome.peer, outcome.cause)

    def _wait(self) -> None:
        """Until a descriptor is ready, an order comes or something is due. epoll counts in whole ms: the rest before a timer is
        slept."""
        deadline = self._endpoint.next_deadline()
        now = time.monotonic()
        rest_s = min(_LONGEST_S, self._until_s - now, math.inf if deadline is None else deadline - now)
        if not self._timers or self._timers[0][0] - now > rest_s:
            self._poller.wait(rest_s)
        elif (rest_ms := (self._timers[0][0] - now) * 1e3) >= 1.0:
            self._poller.wait((math.floor(rest_ms) - 0.5) / 1e3)
        else:
            time.sleep(max(0.0, rest_ms / 1e3))
