"""Ranks as child processes of the driver, on this machine.

Each rank runs in a session of its own, so Ctrl-C in a terminal reaches the driver alone and a
rank's own children are killed with it; it dies with the driver (`orphan`). Its spec comes as JSON
on standard input, its output goes to the log that `replica.rank_log` names.

A rank is a new process that imports what it needs (cold), or the fork of one that has (warm, see `forerunner`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from helixrt.errors import Cause
from helixrt.job.forerunner import READY_S, Forerunner, ForerunnerLost, shared
from helixrt.replica.adoption import AdoptedProcess
from helixrt.replica.contracts import Coordinate, Launcher, RankExit, RankSpec
from helixrt.replica.orphan import PARENT_VARIABLE, command
from helixrt.replica.process_group import kill_group, reaped
from helixrt.replica.rank_log import RankEnd, describe_code, log_name, rank_end, rank_label
from helixrt.replica.work_page import WorkPage, page_if_possible

_NO_RESOURCES = (errno.EAGAIN, errno.ENOMEM)  # of a fork: too many processes, or too little memory
_LASTING_S = 600.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Child:
    coordinate: Coordinate
    incarnation: int
    process: subprocess.Popen[bytes] | AdoptedProcess
    log: Path


class LocalLauncher(Launcher):
    """Starts `argv` for each rank, with `environment` added to this process's own.

    With `warm`, ranks are forks of this process's forerunner; `argv` is `orphan.command(MODULE)` then. The constructor waits
    until the forerunner is ready, READY_S at most. A rank that it cannot start is started the plain way, and the log says why.
    With `pages` ranks say in shared memory what they work on, and `working_on` tells.

    Call `start` from a thread that lives as long as the ranks shall (see `orphan`); all calls from
    one thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        log_folder: Path = Path("logs"),
        environment: Mapping[str, str] | None = None,
        warm: bool = False,
        pages: bool = False,
    ) -> None:
        self._with_pages = pages
        self._pages: dict[str, tuple[int, WorkPage]] = {}  # of the newest incarnation of each rank that was started
        self._argv, self._log_folder = list(argv), log_folder
        self._environment = {**os.environ, **(environment or {}), PARENT_VARIABLE: str(os.getpid())}
        self._arguments = self._argv[-1:] if warm else []  # of the module that a fork runs
        assert not warm or self._argv == command(*self._arguments), "the forerunner runs what `orphan` would"
        self._children: dict[tuple[Coordinate, int], _Child] = {}  # those not reported as ended
        self._started: set[tuple[Coordinate, int]] = set()
        self._waiting: dict[tuple[Coordinate, int], RankSpec] = {}  # the system gave no process yet
        self._cancelled: list[RankExit] = []  # ranks that were killed before they had a process, not reported yet
        self._groups: set[int] = set()  # of ranks that have ended, with children of theirs that this process has adopted
        self._has_started = False  # any rank
        self._refused_s: float | None = None  # since when the system refuses to start one
        self._closed = False
        log_folder.mkdir(parents=True, exist_ok=True)
        if warm:
            with suppress(ForerunnerLost):  # the first rank tells
                self._forerunner().is_ready(READY_S)

    def start(self, spec: RankSpec) -> None:
        key = (spec.coordinate, spec.incarnation)
        if key in self._started or self._closed:
            return
        self._started.add(key)
        self._waiting[key] = spec
        self._start_waiting()

    def _start_waiting(self) -> None:
        """Start what waits, as far as the system has processes and memory for it, and the log's file system takes a file. Once
        a rank was started, another error of the system is raised only when it has lasted for `_LASTING_S`: until then the ranks
        that live go on."""
        if not self._waiting:
            self._refused_s = None
        for key, spec in list(self._waiting.items()):
            try:
                self._launch(key, spec)
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    if not self._has_started:
                        raise
                    if self._refused_s is None:
                        log.warning("%s (incarnation %d) cannot be started yet: %s", rank_label(key[0]), key[1], error)
                        self._refused_s = time.monotonic()
                    if time.monotonic() - self._refused_s >= _LASTING_S:
                        raise
                return
            self._has_started, self._refused_s = True, None
            del self._waiting[key]

    def _launch(self, key: tuple[Coordinate, int], spec: RankSpec) -> None:
        path = self._log_folder / log_name(*key)
        with open(path, "ab") as output:
            given = json.dumps(replace(spec, work_page=self._page(key)).to_plain()).encode()
            forked = self._fork(key, given, output.fileno()) if self._arguments else None
            process = forked or subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        self._children[key] = _Child(*key, process, path)
        if isinstance(process, AdoptedProcess):
            return
        assert process.stdin is not None
        try:
            process.stdin.write(given)
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already; poll says how

    def _page(self, key: tuple[Coordinate, int]) -> str:
        """Where this rank is to say what it works on; "": in the run's store."""
        rank, incarnation = str(key[0]), key[1]
        if rank in self._pages:
            self._pages.pop(rank)[1].close()
        page = page_if_possible() if self._with_pages else None
        if page is None:
            return ""
        self._pages[rank] = (incarnation, page)
        return page.path

    def working_on(self, rank: str, incarnation: int) -> str | None:
        number, page = self._pages.get(rank, (-1, None))
        return page.said() if page is not None and number == incarnation else None

    def _fork(self, key: tuple[Coordinate, int], given: bytes, output: int) -> AdoptedProcess | None:
        """None if the forerunner cannot start this rank."""
        try:
            return self._forerunner().start(self._arguments, self._environment, given, output)
        except ForerunnerLost as why:
            rank = f"{rank_label(key[0])} (incarnation {key[1]})"
            log.warning("%s is started as a new process, which takes longer: %s", rank, why)
            return None

    def _forerunner(self) -> Forerunner:
        return shared(self._arguments[0], self._environment)

    def waiting(self, replica: int) -> bool:
        return any(coordinate.replica == replica for coordinate, _ in self._waiting)

    def poll(self) -> list[RankExit]:
        self._start_waiting()
        ended = [(key, child) for key, child in self._children.items() if _has_ended(child.process)]
        for key, child in ended:
            del self._children[key]
            self._groups.add(child.process.pid)
        self._reap()
        cancelled, self._cancelled = self._cancelled, []
        return cancelled + [_exit_of(child) for _, child in ended]

    def pids(self, replica: int) -> list[int]:
        """The process ids of a replica's ranks that have not been reported as ended."""
        return [c.process.pid for c in self._children.values() if c.coordinate.replica == replica]

    def kill(self, replica: int) -> None:
        for coordinate, incarnation in [key for key in self._waiting if key[0].replica == replica]:
            del self._waiting[coordinate, incarnation]
            cause = Cause("was not started", f"{coordinate} incarnation {incarnation}")
            self._cancelled.append(RankExit(coordinate, incarnation, -int(signal.SIGKILL), str(cause)))
        for child in self._children.values():
            if child.coordinate.replica == replica:
                _kill(child.process)

    def close(self) -> None:
        self._closed = True
        self._waiting.clear()
        for child in self._children.values():
            _kill(child.process)
        deadline = time.monotonic() + 30
        for child in self._children.values():
            # SIGKILL cannot be refused; only a process stuck inside the kernel takes longer.
            child.process.wait(max(0.0, deadline - time.monotonic()))
            self._groups.add(child.process.pid)
        self._children.clear()
        while self._pages:
            self._pages.popitem()[1][1].close()
        while self._groups and time.monotonic() < deadline:
            self._reap()
            time.sleep(0.005)

    def _reap(self) -> None:
        """What was killed with a rank is this process's child if the rank ended while another one was being forked."""
        self._groups = {group for group in self._groups if not reaped(group)}


def _kill(process: subprocess.Popen[bytes] | AdoptedProcess) -> None:
    """End the rank's whole group: its loader's workers as well.

    Not after it has been waited for: the number may be that of another process by then.
    """
    if process.returncode is None:
        kill_group(process.pid)


def _has_ended(process: subprocess.Popen[bytes] | AdoptedProcess) -> bool:
    """Whether the rank has ended; if so, its remaining children are killed before its number is free."""
    if process.returncode is None and hasattr(os, "waitid"):
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        _kill(process)
    return process.poll() is not None


def _exit_of(child: _Child) -> RankExit:
    code = child.process.returncode
    assert code is not None, "it has ended"
    what, end = describe_code(code), rank_end(child.log) if code > 0 else RankEnd("")
    what = f"{end.why} ({what})" if end.why else what
    cause = Cause(what, f"{child.coordinate} incarnation {child.incarnation}", str(child.log))
    return RankExit(child.coordinate, child.incarnation, code, str(cause), end.error)
