"""Starts the processes of the fault matrix, sends them orders, receives their answers, and ends them.

`RankProcesses` owns all of them, and the network of namespaces that half-open cells need. Every wait has a deadline; a
process that answers too late counts as hung.
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

from helixrt.bench.fault_matrix import messages
from helixrt.bench.fault_matrix.cells import RANKS, Answer, Outcome
from helixrt.bench.fault_matrix.fork_server import Ended, Fork, Forked, fork_ranks
from helixrt.errors import Fatal
from helixrt.lab.net import Network

HEARTBEAT_S = 1.0  # the default of all transports
TIMEOUT_S = 10.0  # of an exchange's calls
_START_S = 60.0
_LIMIT_S = 3 * TIMEOUT_S  # for one answer: a call waits at most for the store and for its peers
SECRET, WRONG_SECRET = b"the secret of a fault matrix", b"the secret of another run"
ALL = tuple(range(RANKS))


class NoAnswer(Exception):
    """A process did not answer as it should, and the cell cannot go on."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(str(answer))
        self.answer = answer


class RankProcess:
    """One process: a rank, or an intruder."""

    def __init__(self, rank: int, pid: int, pipe: Connection) -> None:
        self.rank, self.pid, self._pipe = rank, pid, pipe
        ready = self.receive()
        assert isinstance(ready, messages.Ready), ready
        self.ready = ready

    def send(self, order: messages.ORDERS) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # it ended: `receive` reports that
            self._pipe.send(order)

    def receive(self, limit_s: float = _LIMIT_S) -> Any:
        """Its next message. Raises NoAnswer if none comes within `limit_s`."""
        try:
            if self._pipe.poll(limit_s):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise NoAnswer(Answer(self.rank, Outcome.ENDED, time.monotonic())) from None
        raise NoAnswer(Answer(self.rank, Outcome.HUNG, time.monotonic(), f"no answer within {limit_s:g} s"))

    def ask(self, order: messages.ORDERS) -> Any:
        self.send(order)
        return self.receive()

    def close(self) -> None:
        self._pipe.close()


class RankProcesses:
    """`with RankProcesses() as owner: ...` owns the processes and the network of cells, and ends them with the block."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._network: Network | None = None
        self._codes: dict[int, int] = {}  # of processes that ended
        self._started = 0

    def __enter__(self) -> RankProcesses:
        with ExitStack() as stack:
            self._folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="helixrt-faults-"))
            self._path = os.path.join(self._folder, "listener")
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.settimeout(_START_S)
            self._listener.bind(self._path)
            self._listener.listen(16)
            ours, theirs = multiprocessing.get_context("spawn").Pipe()
            self._pipe = stack.enter_context(ours)
            self._fork_server = multiprocessing.get_context("spawn").Process(
                target=fork_ranks, args=(theirs,), name="helixrt-faults", daemon=True
            )
            with _one_thread_each():
                self._fork_server.start()
            stack.callback(self._end_fork_server)
            theirs.close()
            self._next(_START_S)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def _end_fork_server(self) -> None:
        self._pipe.close()
        self._fork_server.join(10)
        if self._fork_server.is_alive():
            self._fork_server.kill()
            self._fork_server.join()

    def network(self) -> Network:
        """Three hosts with one rail each. Raises ConfigError where namespaces are not available."""
        if self._network is None:
            self._network = self._stack.enter_context(Network(hosts=RANKS))
        return self._network

    def start(self, ranks: Iterable[int], transport: str, network: Network | None, secret: bytes = SECRET) -> list[RankProcess]:
        self._started += 1
        processes = []
        for rank in ranks:
            folder = os.path.join(self._folder, f"{self._started}-{rank}")
            os.mkdir(folder)
            settings = messages.ProcessSettings(rank, transport, folder, HEARTBEAT_S, TIMEOUT_S, secret)
            if network is not None:
                file = f"/run/netns/{network.namespace(rank)}"
                settings = messages.ProcessSettings(
                    rank, transport, folder, HEARTBEAT_S, TIMEOUT_S, secret, network.address(rank), file
                )
            self._pipe.send(Fork(settings, self._path))
            forked = self._next(_START_S)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise Fatal(f"rank {rank} did not start: {self.log(folder)}") from None
            connection.setblocking(True)
            try:
                processes.append(RankProcess(rank, forked.pid, Connection(connection.detach())))
            except NoAnswer:
                raise Fatal(f"rank {rank} did not start: {self.log(folder)}") from None
        return processes

    @staticmethod
    def log(folder: str) -> str:
        """The end of a rank's log."""
        with suppress(OSError):
            return " / ".join(Path(folder, "log").read_text().splitlines()[-5:])
        return "its log is empty"

    def _next(self, limit_s: float) -> Forked:
        """The next process of the fork server. Raises Fatal."""
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

    def exit_code(self, process: RankProcess, limit_s: float = _LIMIT_S) -> int | None:
        """The exit code of the process; None: it still runs."""
        until = time.monotonic() + limit_s
        with suppress(EOFError):
            while process.pid not in self._codes and self._pipe.poll(max(0.0, until - time.monotonic())):
                word = self._pipe.recv()
                assert isinstance(word, Ended)
                self._codes[word.pid] = word.code
        return self._codes.get(process.pid)

    def end(self, processes: Iterable[RankProcess]) -> None:
        """Kill those that still run."""
        for process in processes:
            if process.pid not in self._codes:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                self.exit_code(process)
            process.close()


def _one_thread_each() -> ExitStack:
    """Processes that are started within the block compute with one thread."""
    before, stack = os.environ.get("OMP_NUM_THREADS"), ExitStack()
    os.environ["OMP_NUM_THREADS"] = "1"
    if before is None:
        stack.callback(os.environ.pop, "OMP_NUM_THREADS")
    else:
        stack.callback(os.environ.__setitem__, "OMP_NUM_THREADS", before)
    return stack
