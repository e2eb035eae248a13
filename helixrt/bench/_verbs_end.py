"""One end of a verbs link in a process of its own, streaming messages, as a job's ranks do: nothing at one end waits for the
other's interpreter.

In: its devices; commands by a pipe. Out: what verbs said (`Seen`: completions as they are polled and ports that fail,
whatever the driver makes of them), when the default rail was left and was back.
"""

from __future__ import annotations

import math
import multiprocessing
import select
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from helixrt.bench._verbs_pair import CONNECT_S, LIMIT_S, PERIOD_S
from helixrt.errors import Cause
from helixrt.transport.contract import Received, Sent
from helixrt.transport.verbs.devices import Nic, VerbsRail
from helixrt.transport.verbs.endpoint import VerbsEndpoint, VerbsOptions
from helixrt.transport.verbs.failure import port_failed
from helixrt.transport.verbs.interfaces import Interfaces
from helixrt.transport.verbs.queue_pair import RECEIVE_BIT, Patience, QueuePair, Sizes

OP = 1
SENDER, RECEIVER = 0, 1
REPORT_S = 0.1  # so often an end looks whether its default rail is in service


@dataclass(frozen=True, kw_only=True)
class Stream:
    """The stream of messages from the first end to the second, until the request to stop."""

    message_bytes: int = 1 << 20
    under_way: int = 6


@dataclass
class Seen:
    """What was polled of any queue pair, and which port failed. Monotonic seconds, each with its device (or interface)."""

    failed: list[tuple[float, str]] = field(default_factory=list)  # completions with an error, events of a port, interfaces
    sent: list[tuple[float, str]] = field(default_factory=list)  # work requests that were completed
    chunks: list[tuple[float, str, int]] = field(default_factory=list)  # that have landed, with their bytes


@contextmanager
def watching(seen: Seen) -> Iterator[None]:
    """Within the block `seen` gets all events."""
    poll, event, stopped = QueuePair.poll, Nic.event, Interfaces.failed

    def polled(pair: QueuePair) -> list[Any]:
        found = poll(pair)
        if found:
            now, enums, device = time.monotonic(), pair.nic.library.enums, pair.nic.rail.device
            for each in found:
                if each.status != enums.WC_SUCCESS:
                    seen.failed.append((now, device))
                elif not each.wr_id & RECEIVE_BIT:
                    seen.sent.append((now, device))
                elif each.opcode != enums.WC_RECV:
                    seen.chunks.append((now, device, int(each.byte_len)))
        return found

    def happened(nic: Nic) -> int:
        kind = event(nic)
        if port_failed(kind, nic.library.enums):
            seen.failed.append((time.monotonic(), nic.rail.device))
        return kind

    def read(interfaces: Interfaces) -> list[str]:
        names = stopped(interfaces)
        seen.failed += [(time.monotonic(), name) for name in names]
        return names

    QueuePair.poll, Nic.event, Interfaces.failed = polled, happened, read  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        QueuePair.poll, Nic.event, Interfaces.failed = poll, event, stopped  # type: ignore[method-assign]


@dataclass
class Report:
    """Of one end since it was opened. Monotonic seconds."""

    seen: Seen = field(default_factory=Seen)
    usable: bool = False  # the default rail is in service
    turns: list[tuple[float, bool]] = field(default_factory=list)  # when it left service, and was back


class _End:
    """Runs in the process."""

    def __init__(self, pipe: Any, rank: int, devices: Sequence[str], sizes: Sizes, patience: Patience) -> None:
        self._pipe, self._rank, self._other = pipe, rank, 1 - rank
        options = VerbsOptions(period_s=PERIOD_S, sizes=sizes, patience=patience, restore_s=10.0)
        self._endpoint = VerbsEndpoint(b"bench", [VerbsRail(device=device) for device in devices], options=options)
        self._report = Report()
        self._stream: Stream | None = None
        self._memory = memoryview(b"")
        self._next = self._done = 0

    def serve(self) -> None:
        with watching(self._report.seen):
            self._pipe.send(self._endpoint.address())
            theirs = self._pipe.recv()
            self._endpoint.connect(1, self._rank, {self._other: theirs}, CONNECT_S)
            poll = select.poll()
            poll.register(self._pipe.fileno(), select.POLLIN)
            for descriptor, mask in self._endpoint.descriptors().items():
                poll.register(descriptor, mask)
            self._loop(poll)
        self._pipe.recv()  # both are here
        self._endpoint.abort(Cause("all is measured"))
        self._endpoint.close()
        self._pipe.send(None)

    def _loop(self, poll: select.poll) -> None:
        link = self._endpoint._peers[self._other].link
        last, commands = -1, self._pipe.fileno()
        while True:
            for outcome in self._endpoint.progress(time.monotonic()):
                match outcome:
                    case Received() | Sent():
                        self._done += 1
                    case _:
                        raise RuntimeError(f"the link ended: {outcome.cause}")
            self._go_on()
            now = time.monotonic()
            usable = link.rails[0].usable
            if usable != self._report.usable:
                self._report.usable = usable
                self._report.turns.append((now, usable))
            wake = now  # more was begun: it is to be written
            if self._next == last:
                wake = min(now + REPORT_S, self._endpoint.next_deadline() or math.inf)
            last = self._next
            ready = poll.poll(max(0.0, wake - now) * 1000)
            if any(descriptor == commands for descriptor, _ in ready) and not self._obey(self._pipe.recv(), link):
                return

    def _go_on(self) -> None:
        stream = self._stream
        while stream is not None and self._next < self._done + stream.under_way:
            at = self._next % stream.under_way * stream.message_bytes
            memory = self._memory[at : at + stream.message_bytes]
            begin = self._endpoint.send if self._rank == SENDER else self._endpoint.receive
            begin(self._other, OP, self._next, memory)
            self._next += 1

    def _obey(self, command: Any, link: Any) -> bool:
        match command:
            case Stream():
                self._stream = command
                if not self._memory:
                    self._memory = memoryview(bytearray(command.message_bytes * command.under_way))
                self._pipe.send(None)
            case "ready":
                self._pipe.send(all(rail.usable for rail in link.rails))
            case "report":
                self._pipe.send(self._report)
            case "clear":
                for each in (self._report.seen.failed, self._report.seen.sent, self._report.seen.chunks, self._report.turns):
                    each.clear()
                self._pipe.send(None)
            case "close":
                self._pipe.send(None)
                return False
        return True


def _main(pipe: Any) -> None:
    """One link after the other, until the pipe is closed."""
    while True:
        try:
            rank, devices, sizes, patience = pipe.recv()
        except EOFError:
            return
        try:
            _End(pipe, rank, devices, sizes, patience).serve()
        except BaseException:
            pipe.send(RuntimeError(traceback.format_exc()))
            raise


class Ends:
    """Two processes; a link between them can be opened and closed any number of times."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Any] = []
        self._processes: list[Any] = []
        for rank in (SENDER, RECEIVER):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs,), name=f"bench-end-{rank}", daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def open(self, devices: Sequence[Sequence[str]], sizes: Sizes, patience: Patience) -> None:
        """All rails are in service when it returns."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((rank, devices[rank], sizes, patience))
        addresses = [self._answer(rank) for rank in (SENDER, RECEIVER)]
        for pipe, theirs in zip(self._pipes, reversed(addresses), strict=True):
            pipe.send(theirs)
        if not self.wait_until(lambda: all(self.ask("ready"))):
            raise TimeoutError("not all rails came up")

    def ask(self, command: object) -> list[Any]:
        """Both ends' answers."""
        for pipe in self._pipes:
            pipe.send(command)
        return [self._answer(rank) for rank in (SENDER, RECEIVER)]

    def _answer(self, rank: int) -> Any:
        if not self._pipes[rank].poll(LIMIT_S):
            raise TimeoutError(f"end {rank} does not answer")
        answer = self._pipes[rank].recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def wait_until(self, done: Callable[[], bool], limit_s: float = LIMIT_S) -> bool:
        """Whether it came so far in time."""
        until = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def reports(self) -> list[Report]:
        return self.ask("report")

    def shut(self) -> None:
        """The link; not the processes."""
        self.ask("close")
        self.ask("go")

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join(10.0)
