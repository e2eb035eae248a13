"""The forerunner: a process of the driver that has imported what ranks need, and forks a rank for each that is asked for.

In: the module that ranks run, and their environment. Out: ranks as children of this process, as if it had started each itself:

- The forerunner forks twice, and the process between ends at once. The kernel then gives the rank to this process
  (`replica.adoption`), so its parent, its exit status and what becomes of it when the driver dies are those of a rank that was
  started the plain way, whatever becomes of the forerunner. The rank runs its program when this process adopts nobody any more:
  what it leaves behind when it ends is not given to this process.
- It is a session of its own, ends with the driver (`replica.orphan`), and runs one thread when it forks (`forerunner_process`).
- A rank has the forerunner's environment as far as the imports read it. One that would inherit anything else from the driver
  than the forerunner has (`inherited`) is refused: it must be started the plain way.

There is one in a process (`shared`), also for several runs one after another. Linux.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from helixrt.job.inherited import Inherited, difference, inherited
from helixrt.replica.adoption import GO, AdoptedProcess, CannotAdopt, adopting
from helixrt.replica.orphan import PARENT_VARIABLE, command
from helixrt.replica.process_group import reaped

READY_S = 300.0  # a machine that takes longer for the imports starts its ranks the plain way
_ANSWER_S = 60.0  # a fork takes milliseconds; a process that does not run takes for ever
_REFUSED = "refused "  # the answer of a forerunner that cannot fork now; else it is "pid N" or "errno N"
_END_S = 5.0
_PROGRAM = "helixrt.job.forerunner_process"
log = logging.getLogger(__name__)


class ForerunnerLost(Exception):
    """It cannot start this rank; the message says why."""


class Forerunner:
    """Owned by the process that makes it, and ends with the thread that does (`orphan`). Any thread may call.

    `replaces`: why there is none from before, for messages. The constructor raises OSError if the system has no process for it.
    """

    def __init__(self, module: str, environment: Mapping[str, str], replaces: str = "") -> None:
        self.module, self._replaces = module, replaces
        self._inherited: Inherited = inherited(environment)
        self._made: Mapping[str, str] | None = None  # variables that its imports have set; None: it is not ready
        self._lost = ""
        self._owner, self._lock = os.getpid(), threading.Lock()
        with ExitStack() as failing:
            self._output = failing.enter_context(tempfile.TemporaryFile())
            self._control, theirs = socket.socketpair()
            failing.enter_context(self._control)
            with theirs:
                self._process = subprocess.Popen(
                    command(_PROGRAM, str(theirs.fileno()), module),
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**environment, PARENT_VARIABLE: str(os.getpid())},
                    start_new_session=True,
                    pass_fds=(theirs.fileno(),),
                )
            failing.pop_all()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_ready(self, wait_s: float = 0.0) -> bool:
        """Whether it has imported everything; waits so long for that. Raises ForerunnerLost if it has ended."""
        deadline = time.monotonic() + wait_s
        with self._lock:
            while True:
                self._look()
                if self._lost:
                    raise ForerunnerLost(self._lost)
                if self._made is not None:
                    return True
                if not _readable(self._control.fileno(), deadline):
                    return False
                self._hear()

    def misfit(self, module: str, environment: Mapping[str, str]) -> str:
        """Why it cannot start ranks that run `module` with this environment, or ""."""
        if os.getpid() != self._owner:
            return "the forerunner belongs to the process that forked this one"
        if module != self.module:
            return f"the forerunner has imported {self.module}, not {module}"
        made = self._made
        if made is None:  # its imports may still set what is new here
            made = {name: value for name, value in environment.items() if name not in self._inherited.environment}
        what = difference(self._inherited, inherited(environment), made)
        return f"{what} is not what it was when the forerunner was started" if what else ""

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], given: bytes, log_fd: int) -> AdoptedProcess:
        """Fork a rank that runs `arguments`, a module and what it is given, with `given` on its standard input and its output
        appended to `log_fd`. Raises ForerunnerLost, and OSError if the system has no process for it."""
        if why := self.misfit(arguments[0], environment):
            raise ForerunnerLost(why)
        if not self.is_ready():
            before = f"; the one before: {self._replaces}" if self._replaces else ""
            raise ForerunnerLost(f"the forerunner is not ready yet{before}")
        order = {"arguments": list(arguments), "environment": dict(environment), "driver": os.getpid()}
        try:
            return self._fork(order, given, log_fd)
        except CannotAdopt as error:
            raise ForerunnerLost(f"this process cannot adopt what the forerunner forks: {error}") from error

    def _fork(self, order: Mapping[str, object], given: bytes, log_fd: int) -> AdoptedProcess:
        answer, theirs = socket.socketpair()
        with answer, theirs:
            with self._lock, _holding(json.dumps(order).encode()) as ordered, _holding(given) as stdin, adopting():
                with suppress(OSError):  # it has ended: there will be no answer
                    socket.send_fds(self._control, [b"r"], [ordered, stdin, log_fd, theirs.fileno()])
                theirs.close()  # what answers has its own
                rank = AdoptedProcess(self._pid_of(self._answer(answer)))
            with suppress(OSError):  # it has ended already
                answer.sendall(GO)
            return rank

    def _answer(self, answer: socket.socket) -> str:
        """The line that the rank or the forerunner says; "" if all that could have ended."""
        said = b""
        for limit_s in (_ANSWER_S, _END_S):
            deadline = time.monotonic() + limit_s
            while not said.endswith(b"\n") and _readable(answer.fileno(), deadline):
                part = b""
                with suppress(ConnectionError):
                    part = answer.recv(4096)
                if not part:
                    return ""
                said += part
            if said.endswith(b"\n"):
                return said.decode().strip()
            self._kill()  # a rank that has not answered by now ends when it is told nothing
        return ""

    def _pid_of(self, answer: str) -> int:
        what, _, number = answer.partition(" ")
        if what == "pid":
            return int(number)
        if what == "errno":
            raise OSError(int(number), f"the forerunner cannot fork: {os.strerror(int(number))}")
        if answer.startswith(_REFUSED):
            raise ForerunnerLost(answer.removeprefix(_REFUSED))
        self._look()
        if not self._lost:
            self._kill()
            self._lost = "a fork of the forerunner did not become a rank, so it was ended" + self._last_words()
        raise ForerunnerLost(self._lost)

    def _hear(self) -> None:
        """Take what it says of itself, a line: the variables that its imports have made, or why it cannot fork."""
        said = b""
        while not said.endswith(b"\n"):
            part = b""
            with suppress(ConnectionError):
                part = self._control.recv(1 << 16)
            if not part:  # it closes the connection with its end
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
                self._kill()
                return
            said += part
        told = json.loads(said)
        if told["refused"]:
            self._lost = told["refused"]
        else:
            self._made = told["made"]

    def _look(self) -> None:
        """Note that it has ended, and how."""
        if self._process.poll() is None or self._lost:
            return
        from helixrt.replica.rank_log import describe_code  # imports torch

        when = "before it was ready" if self._made is None else "and a new one is made for the next rank"
        self._lost = f"the forerunner has ended, {describe_code(self._process.returncode)}, {when}{self._last_words()}"
        self._reap_group()

    def _last_words(self) -> str:
        from helixrt.replica.rank_log import last_error  # imports torch

        said = last_error(Path(f"/proc/self/fd/{self._output.fileno()}"))
        return f": {said}" if said else ""

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reap_group()

    def _reap_group(self) -> None:
        """A process between it and a rank becomes this process's child, as an orphan, if the forerunner dies before it."""
        deadline = time.monotonic() + _END_S
        while not reaped(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.005)

    @property
    def is_over(self) -> bool:
        """It has ended after it was ready, so another try is worth it."""
        with self._lock:
            self._look()
            return bool(self._lost) and self._made is not None

    def close(self) -> None:
        """End it; ranks that it has forked are no longer its. Does nothing in a process that was forked off the owner."""
        if os.getpid() == self._owner:
            self._lost = self._lost or "the forerunner was ended"
            self._control.close()
            self._kill()
            self._output.close()


_shared: Forerunner | None = None  # of this process
_shared_lock = threading.Lock()


def shared(module: str, environment: Mapping[str, str]) -> Forerunner:
    """This process's forerunner for ranks that run `module` with this environment; made if there is none, or if the one there
    is does not fit or has ended. One that could not even import its module is not made again. It ends with the process. Raises
    ForerunnerLost if the system has no process for it."""
    global _shared
    with _shared_lock:
        replaces = ""
        if _shared is not None:
            replaces = _shared.misfit(module, environment)
            if not replaces and _shared.is_over:
                replaces = _shared._lost
            if not replaces:
                return _shared
            log.info("a new forerunner is started: %s", replaces)
            _shared.close()
            _shared = None
        try:
            _shared = Forerunner(module, environment, replaces)
        except OSError as error:
            raise ForerunnerLost(f"the forerunner cannot be started: {error}") from error
        atexit.unregister(_close)
        atexit.register(_close)
        return _shared


def _close() -> None:
    if _shared is not None:
        _shared.close()


def _readable(fd: int, deadline: float) -> bool:
    """Whether there is something to read, or the other end is closed, at the latest at `deadline`."""
    waiting = select.poll()
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, deadline - time.monotonic()) * 1000))


@contextmanager
def _holding(content: bytes) -> Iterator[int]:
    """A file without a name that holds these bytes, to be read from its beginning."""
    fd = os.memfd_create("helixrt-rank")
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
