"""Named network namespaces: who owns one, which processes run in it, how it is removed, and what crashed owners left.

A name contains its owner: `helix-PID-START-N-PART`, where START is when that process began (in clock ticks since boot), so
that a process that was later given the same id is not taken for the owner. Processes are found by the namespace they
are in, and each is signalled through a handle (pidfd) that was checked after it was opened: never one that took the id.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from helixrt.errors import HelixError

FOLDER = Path("/run/netns")
NAME = re.compile(r"helix-(?P<pid>\d+)-(?P<started>\d+)-\d+-[a-z]+\d*")
ENDING = (signal.SIGTERM, signal.SIGHUP)
CALL_TIMEOUT_S = 60
END_S = 2.0  # from SIGTERM to SIGKILL
KILL_S = 10.0  # from SIGKILL until a process must be gone


class NetworkError(HelixError):
    """The kernel refused a change of the network, or a process in it would not end. One line."""


@dataclass(frozen=True)
class Owner:
    """A process, distinguished from others that have or had its id."""

    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return _started(self.pid) == self.started


@contextmanager
def signals_later() -> Iterator[None]:
    """Signals that would break off the block wait until its end: what it does is done whole, and known to be done.

    Handlers run in the main thread alone; in another there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    holding = True

    def later(number: int, frame: FrameType | None) -> None:
        if holding:
            came.append(number)
        else:  # a signal broke off the restoring below
            signal.signal(number, before[number])
            signal.raise_signal(number)

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    held = [number for number, handler in before.items() if handler not in (None, signal.SIG_IGN)]
    try:
        for number in held:
            signal.signal(number, later)
        yield
    finally:
        holding = False
        for number in held:
            signal.signal(number, before[number])
        for one in came:
            signal.raise_signal(one)


def call(argv: Sequence[str]) -> str:
    """Run `ip` or `tc`; gives its output. NetworkError with the command and what it said when it fails."""
    # In a session of its own and with signals held back: Ctrl-C does not break off a removal, nor leave a program
    # that makes a namespace when everything was already removed.
    try:
        with signals_later():
            done = subprocess.run(argv, capture_output=True, text=True, timeout=CALL_TIMEOUT_S, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise NetworkError(f"{' '.join(argv)}: {said[0]}")
    return done.stdout


def _started(pid: int) -> int | None:
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state == "Z" else int(fields[18])  # field 22 of proc(5); the third is the state


def this_process() -> Owner:
    started = _started(os.getpid())
    assert started is not None
    return Owner(os.getpid(), started)


def name_of(owner: Owner, number: int, part: str) -> str:
    """The name of `part` (letters, then digits) of an owner's network `number`."""
    name = f"helix-{owner.pid}-{owner.started}-{number}-{part}"
    assert NAME.fullmatch(name), name
    return name


def owner_of(name: str) -> Owner | None:
    """Who made a namespace of this name; None for names that are not ours."""
    found = NAME.fullmatch(name)
    return Owner(int(found["pid"]), int(found["started"])) if found else None


def existing() -> list[str]:
    """Names of all helixrt namespaces on this machine, of any owner."""
    return sorted(one.name for one in FOLDER.iterdir() if owner_of(one.name)) if FOLDER.is_dir() else []


def leftovers() -> list[str]:
    """Names of namespaces whose owner is gone."""
    return [name for name in existing() if (owner := owner_of(name)) and not owner.alive]


def _identity(file: str | Path) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _handles(names: Iterable[str]) -> dict[int, int]:
    """Process id -> pidfd of every process in the namespaces, this one excepted."""
    wanted = {_identity(FOLDER / name) for name in names} - {None}
    found: dict[int, int] = {}
    for pid in (int(entry) for entry in os.listdir("/proc") if entry.isdigit()):
        if pid == os.getpid() or _identity(f"/proc/{pid}/ns/net") not in wanted:
            continue
        try:
            handle = os.pidfd_open(pid)
        except OSError:  # it has ended
            continue
        if _identity(f"/proc/{pid}/ns/net") in wanted:
            found[pid] = handle
        else:
            os.close(handle)
    return found


def processes(names: Iterable[str]) -> list[int]:
    """Ids of the processes that run in the namespaces."""
    handles = _handles(names)
    for handle in handles.values():
        os.close(handle)
    return sorted(handles)


def _signal_and_wait(handles: dict[int, int], number: signal.Signals, wait_s: float) -> None:
    """Signal all, then wait up to `wait_s` until all have ended. Closes the handles."""
    try:
        waiting = select.poll()
        for handle in handles.values():
            waiting.register(handle, select.POLLIN)
            try:
                signal.pidfd_send_signal(handle, number)
            except ProcessLookupError:
                pass
        left, until = set(handles.values()), time.monotonic() + wait_s
        while left and (rest := until - time.monotonic()) > 0:
            for handle, _ in waiting.poll(rest * 1000):
                waiting.unregister(handle)
                left.discard(handle)
    finally:
        for handle in handles.values():
            os.close(handle)


def end_processes(names: Sequence[str], at_once: bool = False) -> None:
    """End every process in the namespaces, and those they start meanwhile, by SIGTERM and then SIGKILL; `at_once`: by SIGKILL
    alone. Raises NetworkError when one stays."""
    if not at_once:
        _signal_and_wait(_handles(names), signal.SIGTERM, END_S)
    until = time.monotonic() + KILL_S
    while handles := _handles(names):
        if time.monotonic() > until:
            for handle in handles.values():
                os.close(handle)
            raise NetworkError(f"processes {sorted(handles)} do not end: look at /proc/PID/stack for what holds them")
        _signal_and_wait(handles, signal.SIGKILL, KILL_S)


def remove(names: Sequence[str]) -> None:
    """End what runs in the namespaces and remove them, with their devices. Raises the first error after trying all."""
    errors = []
    present = [name for name in names if (FOLDER / name).exists()]
    try:
        end_processes(present)
    except NetworkError as error:
        errors.append(error)
    for name in present:
        try:
            call(["ip", "netns", "delete", name])
        except NetworkError as error:
            if (FOLDER / name).exists():  # else another process has removed it at the same time
                errors.append(error)
    if errors:
        raise errors[0]


def clean() -> list[str]:
    """Remove what owners that are gone have left; gives the names."""
    names = leftovers()
    remove(names)
    return names
