"""A small VM with Soft-RoCE NICs, run from the host's files: real RDMA verbs on any Linux machine.

In: a `Command`, how large the VM is to be, and whether a running one may be used. Out: a `Connection` that gives the
command's output frame by frame and then its exit code. A VM's keeper (`vm_keeper`) is a process of its own, so the VM stays
for the next command; `boot_alone` is a VM for one block. Needs no root after the set-up
(`vm_setup.lacking` returns what is missing).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.lab import vm_setup
from helixrt.lab.vm_channel import Command, Frame, Frames, Kind, Status
from helixrt.lab.vm_keeper import CONSOLE, LOG, SOCKET, Shape, locked
from helixrt.lab.vm_setup import LabError

NAMED = "HELIXRT_LAB_VM"  # which kept VM to use
MOST_NICS = 32  # pairs
IDLE_S = 1800.0  # a VM ends if it is not used for so long
START_S = 30.0  # for a keeper to open its socket
END_S = 30.0
LONGEST_PATH = 100  # of a socket, a limit of the kernel
TAIL_LINES = 12


def folder_of(name: str) -> Path:
    """Where the kept VM of this name has its socket."""
    if not name.replace("-", "").replace("_", "").isalnum():
        raise ConfigError("name", name, "is letters, digits, - and _")
    return vm_setup.cache_folder() / "vm" / name


class Connection:
    """To a VM's keeper; runs one command. Used by one thread, but `send` may come from another."""

    def __init__(self, folder: Path, to: socket.socket) -> None:
        self._folder, self._to = folder, to
        self._frames = self._receive()
        self._notice = ""
        first = next(self._frames, None)
        if first is None or first.kind is not Kind.STATUS:
            raise ConnectionResetError("the VM is ending")
        self.status = Status.decode(first.payload)

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send to the command. Does nothing if the VM has ended: `run` reports that."""
        try:
            self._to.sendall(Frame(kind, 0, payload).encode())
        except OSError:
            pass

    def run(self, command: Command) -> Iterator[Frame]:
        """Run it: OUTPUT, ERRORS and NOTICE frames as they come, at last EXIT. LabError when the VM ends first."""
        self.send(Kind.RUN, command.encode())
        return self._until_exit()

    def _until_exit(self) -> Iterator[Frame]:
        for frame in self._frames:
            if frame.kind is Kind.NOTICE:
                self._notice = frame.payload.decode()
            yield frame
            if frame.kind is Kind.EXIT:
                return
        raise LabError(f"{self._notice or 'the connection to the VM broke'}{self._last_words()}")

    def _receive(self) -> Iterator[Frame]:
        frames = Frames()
        while True:
            try:
                data = self._to.recv(1 << 16)
            except ConnectionError:
                return
            if not data:
                return
            yield from frames.feed(data)

    def _last_words(self) -> str:
        return last_words(self._folder)

    def close(self) -> None:
        """Leave: what still runs in the session is ended."""
        self._to.close()


def last_words(folder: Path) -> str:
    """The end of what the keeper and the guest's console said, to be put behind a message; empty when they were silent."""
    lines = []
    for name in (LOG, CONSOLE):
        try:
            said = (folder / name).read_text(errors="replace").strip().splitlines()
        except OSError:
            continue
        lines += [f"  {name}: {line}" for line in said[-TAIL_LINES:]]
    return "\n" + "\n".join(lines) if lines else ""


def environment() -> dict[str, str]:
    """This process's environment for a command in the guest: this environment's Python is the first on its PATH."""
    path = os.environ.get("PATH", os.defpath)
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.prefix, "bin")), path, *vm_setup.SYSTEM_FOLDERS])}


def exit_code(frame: Frame) -> int:
    return int.from_bytes(frame.payload, "big")


# ---- starting and finding ----------------------------------------------------------------------


def _connect(folder: Path) -> Connection | None:
    """To the VM of a folder, or None when there is none (any more)."""
    if len(str(folder / SOCKET)) > LONGEST_PATH:
        return None  # none can have been booted there
    to = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        to.connect(str(folder / SOCKET))
        return Connection(folder, to)
    except (FileNotFoundError, ConnectionError):
        to.close()
        return None


def _boot(folder: Path, shape: Shape, idle_s: float) -> Connection:
    """Start a keeper and connect; the guest is still booting then."""
    if (lack := vm_setup.lacking()) is not None:
        raise LabError(str(lack))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if len(str(folder / SOCKET)) > LONGEST_PATH:
        raise LabError(f"{folder} is too long a path for a socket: set XDG_CACHE_HOME or TMPDIR to a shorter one")
    (folder / LOG).unlink(missing_ok=True)
    settings = [str(folder), str(shape.memory_mb), str(shape.cpus), shape.accel, str(idle_s)]
    until = time.monotonic() + START_S
    keeper: subprocess.Popen[bytes] | None = None
    while time.monotonic() < until:
        if (connection := _connect(folder)) is not None:
            return connection
        if keeper is None or keeper.poll() == 0:  # 0: another keeper holds the folder, perhaps one that is ending
            keeper = _start_keeper(folder, settings)
        elif keeper.poll():
            break
        time.sleep(0.1)
    raise LabError(f"the VM's keeper did not start{last_words(folder)}")


def _start_keeper(folder: Path, settings: list[str]) -> subprocess.Popen[bytes]:
    with open(folder / LOG, "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "helixrt.lab.vm_keeper", *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )


def open_kept(name: str, shape: Shape, say: Callable[[str], None], idle_s: float = IDLE_S) -> Connection:
    """To the running VM of this name, booted when there is none, or when the running one is idle and of another size.

    idle_s: how long one that is booted waits for the next command before it ends. LabError when the running one is of
    another size and busy.
    """
    folder = folder_of(name)
    connection = _connect(folder)
    if connection is not None:
        status = connection.status
        if (status.memory_mb, status.cpus) == (shape.memory_mb, shape.cpus):
            return connection
        connection.close()
        size = f"{status.memory_mb} MB and {status.cpus} cores"
        if status.commands:
            raise LabError(f"the running VM has {size} and is busy with {status.commands[0]!r}: wait, or use --fresh")
        say(f"the running VM has {size}: starting a new one")
        stop(name)
    return _boot(folder, shape, idle_s)


@contextmanager
def boot_alone(shape: Shape) -> Iterator[Callable[[], Connection]]:
    """A VM of one's own: the block gets a function that opens a connection to it; it is ended with the block."""
    folder = Path(tempfile.mkdtemp(prefix="helixrt-lab-"))
    try:
        first = _boot(folder, shape, START_S)
        waiting = [first]

        def connect() -> Connection:
            connection = waiting.pop() if waiting else _connect(folder)
            if connection is None:
                raise LabError(f"the VM has ended{last_words(folder)}")
            return connection

        try:
            yield connect
        finally:
            for one in waiting:
                one.close()
            _stop(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def stop(name: str) -> bool:
    """End the kept VM of this name and what runs in it. Returns whether there was one."""
    return _stop(folder_of(name))


def _stop(folder: Path) -> bool:
    connection = _connect(folder)
    if connection is None:
        return False
    connection.send(Kind.STOP)
    until = time.monotonic() + END_S
    while time.monotonic() < until:
        if (held := locked(folder)) is not None:  # the keeper, and QEMU before it, have ended
            os.close(held)
            break
        time.sleep(0.05)
    connection.close()
    return True
