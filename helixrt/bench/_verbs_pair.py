"""Two verbs endpoints in this process, driven by one loop, and what is seen of them at the level of verbs.

In: the devices of either end. Out: messages moved from the first end to the second, and what that costs.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from helixrt.transport.contract import Received, Sent
from helixrt.transport.verbs.devices import VerbsRail
from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs.peer import VerbsPeer
from helixrt.transport.verbs.queue_pair import Patience, Sizes

LIMIT_S = 120.0
CONNECT_S = 30.0
PERIOD_S = 4.0  # of heartbeats: an emulated machine, busy with other things, answers late


@dataclass
class Cost:
    calls: int = 0
    seconds: float = 0.0


class Pair:
    """The first end sends, the second receives."""

    def __init__(self, here: Sequence[str], there: Sequence[str], sizes: Sizes, patience: Patience) -> None:
        settings = VerbsOptions(period_s=PERIOD_S, sizes=sizes, patience=patience, restore_s=10.0)
        self.ends = [VerbsEndpoint(b"bench", [VerbsRail(device=d) for d in names], options=settings) for names in (here, there)]
        self._connect()
        self._poll = select.poll()
        for end in self.ends:
            for descriptor, mask in end.descriptors().items():
                self._poll.register(descriptor, mask)
        self._op = 0
        self.source = self.target = memoryview(b"")
        self.arrived: dict[tuple[int, int], float] = {}
        self.sent: set[tuple[int, int]] = set()
        self.drive(lambda: all(rail.usable for end in (0, 1) for rail in self.link(end).rails))

    def _connect(self) -> None:
        addresses = [end.address() for end in self.ends]
        failed: list[BaseException] = []

        def connect_first() -> None:
            try:
                self.ends[0].connect(1, 0, {1: addresses[1]}, CONNECT_S)
            except BaseException as error:
                failed.append(error)

        first = threading.Thread(target=connect_first, name="bench-connect", daemon=True)
        first.start()
        self.ends[1].connect(1, 1, {0: addresses[0]}, CONNECT_S)
        first.join(CONNECT_S)
        if failed:
            raise failed[0]
        if first.is_alive():
            raise TimeoutError(f"the first end did not connect in {CONNECT_S:g} s")

    def link(self, end: int) -> Any:
        peer = self.ends[end]._peers[1 - end]
        assert isinstance(peer, VerbsPeer)
        return peer.link

    def turn(self) -> None:
        """Drive both ends once."""
        for end in self.ends:
            for outcome in end.progress(time.monotonic()):
                match outcome:
                    case Received(_, op, index):
                        self.arrived[op, index] = time.monotonic()
                    case Sent(_, op, index):
                        self.sent.add((op, index))
                    case _:
                        raise RuntimeError(f"the link ended: {outcome.cause}")

    def drive(self, done: Callable[[], bool], wait_s: float = 0.1) -> None:
        """Until `done()`, which is asked at least every `wait_s`."""
        until = time.monotonic() + LIMIT_S
        while True:
            self.turn()
            if done():
                return
            now = time.monotonic()
            if now > until:
                raise TimeoutError("the link did not come to an end")
            wake = now + wait_s
            for end in self.ends:
                due = end.next_deadline()
                if due is not None and due < wake:
                    wake = due
            if wake > now:
                self._poll.poll((wake - now) * 1000)

    def begin(self, total: int, message: int) -> list[tuple[int, int]]:
        """Receive and send `total` bytes in messages; their names."""
        self._op += 1
        if len(self.source) < total:
            self.source, self.target = memoryview(bytearray(total)), memoryview(bytearray(total))
        names = []
        for index, at in enumerate(range(0, total, message)):
            self.ends[1].receive(0, self._op, index, self.target[at : min(at + message, total)])
            self.ends[0].send(1, self._op, index, self.source[at : min(at + message, total)])
            names.append((self._op, index))
        return names

    def move(self, total: int, message: int) -> float:
        """Bytes a second."""
        begin = time.perf_counter()
        names = self.begin(total, message)
        self.drive(lambda: names[-1] in self.arrived and names[-1] in self.sent and self.all_done(names))
        return total / (time.perf_counter() - begin)

    def all_done(self, names: Sequence[tuple[int, int]]) -> bool:
        return all(name in self.arrived and name in self.sent for name in names)

    def cost(self, total: int, message: int) -> tuple[Cost, Cost]:
        """Of the pure machines of both ends, for one round."""
        costs = (Cost(), Cost())
        for end, cost in enumerate(costs):
            link = self.link(end)

            def counted(event: Any, now: float, on: Any = link.on, cost: Cost = cost) -> Any:
                begin = time.perf_counter()
                actions = on(event, now)
                cost.seconds += time.perf_counter() - begin
                cost.calls += 1
                return actions

            link.on = counted
        self.move(total, message)
        for end in (0, 1):
            del self.link(end).on
        return costs

    def close(self) -> None:
        for end in self.ends:
            end.close()
