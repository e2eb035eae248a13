"""Endpoints of several ranks in one process, driven by one loop; and ranks that are processes of their own.

The loop keeps to the contract and nothing else: it waits for `descriptors` and `next_deadline` alone, so an
endpoint that forgets to ask to be called hangs here.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import random
import select
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from helixrt.bench.fault_matrix.injection import hold_interpreter_lock
from helixrt.transport.contract import Endpoint, Lost, Outcome, PeerAborted, Received, Sent
from tests.ranks_context import ranks_context

SECRET = b"the secret of a run of tests"
LIMIT_S = 120.0  # of every wait; only what hangs comes near it, also in an emulated machine on a busy host

Make = Callable[[bytes, float | None], Endpoint]  # (secret, heartbeat period in seconds or None for none)


@dataclass(frozen=True)
class Message:
    sender: int
    receiver: int
    op: int
    index: int
    size: int

    def content(self) -> bytes:
        """Of this message and no other: bytes lost, doubled or swapped with another's show."""
        return random.Random(repr(self)).randbytes(self.size)


class Inbox:
    """Memory for one message, with guards around it that nobody may write."""

    GUARD = b"\xa5" * 64

    def __init__(self, size: int) -> None:
        self._memory = bytearray(self.GUARD + bytes(size) + self.GUARD)
        self.view = memoryview(self._memory)[64 : 64 + size]

    def check(self, expected: bytes) -> None:
        self.check_guards()
        assert bytes(self.view) == expected, "the message's bytes are wrong"

    def check_guards(self) -> None:
        assert self._memory[:64] == self.GUARD and self._memory[-64:] == self.GUARD, "memory beyond the message was written"


class Taker(Inbox):
    """A `Sink`: holds the transport to what it promises of pieces."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._taken = 0

    def __len__(self) -> int:
        return len(self.view)

    def take(self, at: int, piece: memoryview) -> None:
        end = at + len(piece)
        assert at == self._taken and end <= len(self), f"bytes {at} to {end}, after {self._taken} of {len(self)}"
        assert at % 64 == 0 and (end % 64 == 0 or end == len(self)), f"bytes {at} to {end}: no whole elements"
        self.view[at:end] = piece
        self._taken = end

    def check(self, expected: bytes) -> None:
        assert self._taken == len(self), f"only {self._taken} bytes of {len(self)} were given"
        super().check(expected)


class Attempt:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.error: BaseException | None = None

        def body() -> None:
            try:
                call()
            except BaseException as error:  # handed to the test's thread
                self.error = error

        self._thread = threading.Thread(target=body, name="attempt")
        self._thread.start()

    def running(self) -> bool:
        return self._thread.is_alive()

    def finish(self) -> BaseException | None:
        self._thread.join()
        return self.error


class World:
    """`endpoints[rank]`, what came of each in `outcomes[rank]`, and the loop that drives them all."""

    def __init__(self, make: Make, ranks: int, heartbeat_s: float | None = None) -> None:
        self.endpoints = [make(SECRET, heartbeat_s) for _ in range(ranks)]
        self.addresses = [endpoint.address() for endpoint in self.endpoints]
        self.outcomes: list[list[Outcome]] = [[] for _ in range(ranks)]
        self.turns = 0
        self.driven = set(range(ranks))  # ranks that `run` drives: the others stand still

    def connect(self, generation: int = 1, names: Mapping[int, int] | None = None) -> None:
        """All driven endpoints connect at the same time; endpoint e calls itself rank names[e], by default e."""
        names = names or {e: e for e in self.driven}
        attempts = [
            self.attempt(e, generation, me, {names[other]: self.addresses[other] for other in names if other != e})
            for e, me in names.items()
        ]
        errors = [attempt.finish() for attempt in attempts]
        for error in filter(None, errors):
            raise error

    def attempt(self, e: int, generation: int, me: int, peers: Mapping[int, bytes], deadline_s: float = LIMIT_S) -> Attempt:
        """Endpoint e begins to connect, while this thread goes on."""
        return Attempt(lambda: self.endpoints[e].connect(generation, me, peers, deadline_s))

    def turn(self) -> bool:
        """`progress` of each driven endpoint once; whether anything came of it."""
        came = False
        for rank in sorted(self.driven):
            new = self.endpoints[rank].progress(time.monotonic())
            self.outcomes[rank] += new
            came = came or bool(new)
        self.turns += 1
        return came

    def wait(self, limit: float) -> None:
        """Until an endpoint wants to be called, or until the monotonic time `limit`."""
        poll, until = select.poll(), limit
        for rank in self.driven:
            for descriptor, mask in self.endpoints[rank].descriptors().items():
                poll.register(descriptor, mask)
            deadline = self.endpoints[rank].next_deadline()
            until = until if deadline is None else min(until, deadline)
        poll.poll(max(0.0, (until - time.monotonic()) * 1000))

    def run(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
        """Drive until `done()`; fails when that takes `limit_s`."""
        limit = time.monotonic() + limit_s
        while True:
            self.turn()
            if done():
                return
            assert time.monotonic() < limit, f"did not come to an end; outcomes: {[o[-5:] for o in self.outcomes]}"
            self.wait(limit)

    def until(self, attempt: Attempt) -> BaseException | None:
        """Drive while `attempt` runs; how it ended."""
        while attempt.running():
            self.settle(0.02)
        return attempt.finish()

    def settle(self, quiet_s: float = 0.1) -> None:
        """Drive for so long: what is on its way arrives, what must not arrive had its chance."""
        limit = time.monotonic() + quiet_s
        while time.monotonic() < limit:
            self.turn()
            self.wait(limit)

    # ---- messages

    def send(self, message: Message, content: bytes | bytearray | None = None) -> None:
        data = memoryview(message.content() if content is None else content)
        self.endpoints[message.sender].send(message.receiver, message.op, message.index, data)

    def receive(self, message: Message, takes: bool = False) -> Inbox:
        """`takes`: what comes is used at once, and not put into memory."""
        inbox = Taker(message.size) if takes else Inbox(message.size)
        into = inbox if isinstance(inbox, Taker) else inbox.view
        self.endpoints[message.receiver].receive(message.sender, message.op, message.index, into)
        return inbox

    def sent(self, messages: Iterable[Message]) -> bool:
        return all(Sent(m.receiver, m.op, m.index) in self.outcomes[m.sender] for m in messages)

    def received(self, messages: Iterable[Message]) -> bool:
        return all(Received(m.sender, m.op, m.index) in self.outcomes[m.receiver] for m in messages)

    def exchange(self, messages: Sequence[Message], rng: random.Random) -> None:
        """All messages, posted in a random order and partly while others travel, arrive whole and once."""
        before = [len(outcomes) for outcomes in self.outcomes]
        posts: list[tuple[Message, bool]] = [(m, sending) for m in messages for sending in (True, False)]
        rng.shuffle(posts)
        contents = {m: m.content() for m in messages}
        inboxes: dict[Message, Inbox] = {}
        for message, sending in posts:
            if sending:
                self.send(message, contents[message])
            else:
                inboxes[message] = self.receive(message, takes=rng.random() < 0.4)
            if rng.random() < 0.3:
                self.turn()
        ops = {m.op for m in messages}
        wanted: list[list[Outcome]] = [[] for _ in self.outcomes]
        for m in messages:
            wanted[m.sender].append(Sent(m.receiver, m.op, m.index))
            wanted[m.receiver].append(Received(m.sender, m.op, m.index))

        def came(rank: int) -> list[Outcome]:
            """What is not of another exchange."""
            return [o for o in self.outcomes[rank][before[rank] :] if isinstance(o, Lost | PeerAborted) or o.op in ops]

        self.run(lambda: all(len(came(rank)) >= len(wanted[rank]) for rank in self.driven))
        self.settle(0.01)
        for rank in range(len(self.outcomes)):
            assert sorted(map(repr, came(rank))) == sorted(map(repr, wanted[rank]))
        for message, inbox in inboxes.items():
            inbox.check(contents[message])

    def ended(self, rank: int) -> list[Lost | PeerAborted]:
        """What endpoint `rank` heard of links that ended."""
        return [o for o in self.outcomes[rank] if isinstance(o, Lost | PeerAborted)]

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()


# ---------------------------------------------------------------- processes


class Process:
    """A rank in a process of its own: connects to rank 0, then sends back what it receives from it, for ever.

    The messages of rank 0 have index 0 and ops 0, 1, 2, ..., each of `size` bytes; the echo of one has index 1.
    """

    def __init__(self, make: Make, rank: int, size: int, heartbeat_s: float | None) -> None:
        context = ranks_context()
        self.rank, self.size = rank, size
        self.pipe, theirs = context.Pipe()
        arguments = (make, rank, size, heartbeat_s, theirs)
        self._process = context.Process(target=echo, args=arguments, name=f"echo-{rank}", daemon=True)
        self._process.start()
        theirs.close()

    def hear(self) -> Any:
        """Its next word (bytes: its address; str: what it came to)."""
        assert self.pipe.poll(LIMIT_S), f"process {self.rank} says nothing"
        return self.pipe.recv()

    def tell(self, word: Any) -> None:
        self.pipe.send(word)

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()


def echo(make: Make, rank: int, size: int, heartbeat_s: float | None, pipe: multiprocessing.connection.Connection) -> None:
    """The body of a `Process`. Says its address, hears rank 0's, says "connected"; hears "close", "exit", or for how long
    to hold its interpreter lock."""
    endpoint = make(SECRET, heartbeat_s)
    pipe.send(endpoint.address())
    endpoint.connect(1, rank, {0: pipe.recv()}, LIMIT_S)
    pipe.send("connected")
    memory, op = memoryview(bytearray(size)), 0
    endpoint.receive(0, op, 0, memory)
    while True:
        for outcome in endpoint.progress(time.monotonic()):
            if isinstance(outcome, Received):
                endpoint.send(0, op, 1, memory)
            elif isinstance(outcome, Sent):
                op += 1
                endpoint.receive(0, op, 0, memory)
            else:
                pipe.send(f"{type(outcome).__name__}: {outcome.cause.what}")
                endpoint.close()
                return
        if pipe.poll():
            match pipe.recv():
                case "close":
                    endpoint.close()
                    return
                case "exit":
                    os._exit(3)
                case float(held_s):
                    hold_interpreter_lock(held_s)
        poll = select.poll()
        poll.register(pipe.fileno(), select.POLLIN)
        for descriptor, mask in endpoint.descriptors().items():
            poll.register(descriptor, mask)
        deadline = endpoint.next_deadline()
        poll.poll(1000.0 if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000))
