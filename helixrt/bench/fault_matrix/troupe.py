"""The processes of the fault matrix: who starts them, speaks with them and ends them.

A `Troupe` owns all of them, and the network of namespaces that half-open cells need. Every wait has a deadline; whoever
answers too late has hung.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from helixrt.bench.fault_matrix import cues
from helixrt.bench.fault_matrix.cells import RANKS, Answer, Outcome
from helixrt.bench.fault_matrix.zygote import Ended, Fork, Forked, fork_ranks
from helixrt.errors import Fatal
from helixrt.lab.net import Network

HEARTBEAT_S = 1.0  # the default of all transports
TIMEOUT_S = 10.0  # of an exchange's calls
_START_S = 60.0
_LIMIT_S = 3 * TIMEOUT_S  # for one answer: a call waits at most for the store and for its peers
SECRET, WRONG_SECRET = b"the secret of a fault matrix", b"the secret of another run"
ALL = tuple(range(RANKS))


class Stuck(Exception):
    """A process did not answer as it should, and the cell cannot go on."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


class Actor:
    """One process: a rank, or an intruder."""

    def __init__(self, rank: int, pid: int, pipe: Connection) -> None:
        self.rank, self.pid, self._pipe = rank, pid, pipe
        ready = self.hear()
        assert isinstance(ready, cues.Ready), ready
        self.ready = ready

    def tell(self, order: cues.ORDERS) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended: to be found when it should answer
            self._pipe.send(order)

    def hear(self, limit_s: float = _LIMIT_S) -> Any:
        """Its next word. Raises Stuck when there is none."""
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Stuck(Answer(self.rank, Outcome.ENDED, time.monotonic())) from None
        raise Stuck(Answer(self.rank, Outcome.HUNG, time.monotonic(), f"no answer within {limit_s:g} s"))

    def ask(self, order: cues.ORDERS) -> Any:
        self.tell(order)
        return self.hear()

    def close(self) -> None:
        self._pipe.close()


class Troupe:
    """`with Troupe() as troupe: ...` owns what cells need; when the block is left everything is gone."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._network: Network | None = None
        self._codes: dict[int, int] = {}  # of processes that ended
        self._casts = 0

    def __enter__(self) -> Troupe:
        with ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="helixrt-faults-"))
            self._path = os.path.join(self._folder, "door")
            self._door = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._door.settimeout(_START_S)
            self._door.bind(self._path)
            self._door.listen(16)
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            self._pipe = stack.enter_context(ours)
            self._zygote = multiprocessing.get_context("spawn").Process(
                target=fork_ranks, args=(theirs,), name="helixrt-faults", daemon=True
            )
            with _one_thread_each():
                self._zygote.start()
            stack.callback(self._end_zygote)
            theirs.close()
            self._next(_START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _end_zygote(self) -> None:
        self._pipe.close()
        self._zygote.join(10)
        if self._zygote.is_alive():
            self._zygote.kill()
            self._zygote.join()

    def network(self) -> Network:
        """Three hosts with one rail each. Raises ConfigError where namespaces cannot be had."""
        if self._network is None:
            self._network = self._stack.enter_context(Network(hosts=RANKS))
        return self._network

    def cast(self, ranks: Iterable[int], transport: str, network: Network | None, secret: bytes = SECRET) -> list[Actor]:
        self._casts += 1
        actors = []
        for rank in ranks:
            folder = os.path.join(self._folder, f"{self._casts}-{rank}")
            os.mkdir(folder)
            part = cues.Part(rank, transport, folder, HEARTBEAT_S, TIMEOUT_S, secret)
            if network is not None:
                file = f"/run/netns/{network.namespace(rank)}"
                part = cues.Part(rank, transport, folder, HEARTBEAT_S, TIMEOUT_S, secret, network.address(rank), file)
            self._pipe.send(Fork(part, self._path))
            forked = self._next(_START_S)
            try:
                connection, _ = self._door.accept()
            except TimeoutError:
                raise Fatal(f"rank {rank} did not start: {self.log(folder)}") from None
            connection.setblocking(True)
            try:
                actors.append(Actor(rank, forked.pid, Connection(connection.detach())))
            except Stuck:
                raise Fatal(f"rank {rank} did not start: {self.log(folder)}") from None
        return actors

    @staticmethod
    def log(folder: str) -> str:
        """The end of a rank's log."""
        with suppress(OSError):
            return " / ".join(Path(folder, "log").read_text().splitlines()[-5:])
        return "it said nothing"

    def _next(self, limit_s: float) -> Forked:
        """The zygote's next process. Raises Fatal."""
        until = time.monotonic() + limit_s
        try:
            while self._pipe.poll(max(0.0, until - time.monotonic())):
                word = self._pipe.recv()
                if isinstance(word, Forked):
                    return word
                self._codes[word.pid] = word.code
        except EOFError:
            pass
        raise Fatal("the process that ranks are forked from ended, or does not answer")

    def exit_code(self, actor: Actor, limit_s: float = _LIMIT_S) -> int | None:
        """How its process ended; None: it has not."""
        until = time.monotonic() + limit_s
        with suppress(EOFError):
            while actor.pid not in self._codes and self._pipe.poll(max(0.0, until - time.monotonic())):
                word = self._pipe.recv()
                assert isinstance(word, Ended)
                self._codes[word.pid] = word.code
        return self._codes.get(actor.pid)

    def dismiss(self, actors: Iterable[Actor]) -> None:
        """Whoever is still there ends now."""
        for actor in actors:
            if actor.pid not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(actor.pid, signal.SIGKILL)
                self.exit_code(actor)
            actor.close()


def _one_thread_each() -> ExitStack:
    """Processes that are started meanwhile reckon with one thread."""
    before, stack = os.environ.get("OMP_NUM_THREADS"), ExitStack()
    os.environ["OMP_NUM_THREADS"] = "1"
    if before is None:
        stack.callback(os.environ.pop, "OMP_NUM_THREADS")
    else:
        stack.callback(os.environ.__setitem__, "OMP_NUM_THREADS", before)
    return stack
