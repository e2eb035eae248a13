"""The first program of the lab's VM: makes the guest ready, then runs the commands its keeper sends.

In: frames from the keeper through a serial port. Out: each command's output and exit code as frames. A command runs in a
control group of its own, so that when it ends, or its client goes, nothing it started is left. When the port closes, or
this program ends, the guest powers off. Standard library only: it starts within the first second.
"""

from __future__ import annotations

import fcntl
import os
import pty
import queue
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from helixrt.lab import nics
from helixrt.lab.nics import GUEST, NicError
from helixrt.lab.vm_channel import PORT, Command, Frame, Frames, Kind
from helixrt.lab.vm_image import WRITABLE

KERNEL_MODULES = ("crc32_generic", "veth", "rdma_rxe", "ib_uverbs", "sch_netem", "sch_tbf", "sch_prio", "cls_u32")
GROUPS = Path("/sys/fs/cgroup")
READ_BYTES = 1 << 16
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# A shell puts itself into the control group, then becomes the command: no code between fork and exec in this threaded one.
IN_GROUP = 'echo $$ > "$0"; exec "$@"'
ON_TERMINAL = 'echo $$ > "$0"; terminal=$1; shift; exec <"$terminal" >"$terminal" 2>&1; exec "$@"'


class Port:
    """The serial port to the keeper; frames of several threads do not mix."""

    def __init__(self) -> None:
        for entry in Path("/sys/class/virtio-ports").iterdir():
            if (entry / "name").read_text().strip() == PORT:
                self.descriptor = os.open(f"/dev/{entry.name}", os.O_RDWR)
                break
        else:
            raise OSError(f"no serial port {PORT}")
        self._lock = threading.Lock()

    def send(self, kind: Kind, session: int, payload: bytes = b"") -> None:
        data = memoryview(Frame(kind, session, payload).encode())
        with self._lock:
            while data:
                data = data[os.write(self.descriptor, data) :]

    def wait(self) -> bytes:
        """What the keeper sends next; empty when it is gone."""
        events = select.poll()
        events.register(self.descriptor, select.POLLIN)
        ((_, event),) = events.poll()
        return os.read(self.descriptor, READ_BYTES) if event & select.POLLIN else b""


class Session:
    """One command, from its frame to its exit code. Its threads end by themselves after the exit code is sent."""

    def __init__(self, number: int, command: Command, port: Port) -> None:
        self._number, self._command, self._port = number, command, port
        self._group = GROUPS / f"session{number}"
        self._input: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._terminal = self._other = -1
        self._shared: list[str] = []
        self._begin = threading.Lock()
        self._left = False
        self._group.mkdir()
        threading.Thread(target=self._live, name=f"session{number}", daemon=True).start()

    # ---- called by the port's thread ---------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """For the command's standard input; empty: it ends."""
        self._input.put(data)

    def signal(self, number: int) -> None:
        for pid in (self._group / "cgroup.procs").read_text().split():
            try:
                os.kill(int(pid), number)
            except ProcessLookupError:
                pass

    def resize(self, payload: bytes) -> None:
        if self._terminal >= 0:
            rows, columns = struct.unpack(">HH", payload)
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def leave(self) -> None:
        """End the command and all it started."""
        self._left = True
        with self._begin:  # not between its start and its entry into the group
            self._kill()

    # ---- its own thread ----------------------------------------------------------------------------

    def _live(self) -> None:
        code = 125
        try:
            self._prepare()
            code = self._run()
        except (OSError, NicError, subprocess.SubprocessError) as error:
            self._port.send(Kind.ERRORS, self._number, f"helixrt: {error}\n".encode())
        finally:
            for folder in self._shared:
                subprocess.run(["umount", "--lazy", folder], check=False)
            self._port.send(Kind.EXIT, self._number, code.to_bytes(4, "big"))

    def _prepare(self) -> None:
        """The host's files as they are now, the NICs whole, and the shared folders writable."""
        if self._number > 1:
            Path("/proc/sys/vm/drop_caches").write_text("3")
        if self._command.nics is not None:
            nics.make(self._command.nics)
        for folder in self._command.share:
            subprocess.run(["mount", "--bind", WRITABLE + folder, folder], check=True)
            self._shared.append(folder)

    def _run(self) -> int:
        count = len(nics.existing())
        env = {"PATH": PATH, "HOME": "/root"} | self._command.env | {GUEST: "1", "HELIXRT_LAB_NICS": str(count)}
        terminal = self._command.rows > 0
        with self._begin:
            if self._left:
                return 129
            process = self._start(env) if not terminal else self._start_on_terminal(env)
            while process.poll() is None and str(process.pid) not in (self._group / "cgroup.procs").read_text().split():
                time.sleep(0.001)
        readers = []
        if terminal:
            readers.append(self._thread(self._pump, self._terminal, Kind.OUTPUT))
            self._thread(self._feed, open(self._terminal, "wb", buffering=0, closefd=False))
        else:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            readers.append(self._thread(self._pump, process.stdout.fileno(), Kind.OUTPUT))
            readers.append(self._thread(self._pump, process.stderr.fileno(), Kind.ERRORS))
            self._thread(self._feed, process.stdin)
        code = process.wait()
        self._kill()  # what it left behind, which may hold its pipes
        if terminal:
            os.close(self._other)  # the last one: reading ends
        for reader in readers:
            reader.join()
        self._input.put(b"")  # the feeding thread ends
        return code if code >= 0 else 128 - code

    def _start(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        argv = ["/bin/sh", "-c", IN_GROUP, str(self._group / "cgroup.procs"), *self._command.argv]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            argv, env=env, cwd=self._command.cwd, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def _start_on_terminal(self, env: dict[str, str]) -> subprocess.Popen[bytes]:
        self._terminal, self._other = pty.openpty()
        self.resize(struct.pack(">HH", self._command.rows, self._command.columns))
        argv = ["/bin/sh", "-c", ON_TERMINAL, str(self._group / "cgroup.procs"), os.ttyname(self._other), *self._command.argv]
        process = subprocess.Popen(argv, env=env, cwd=self._command.cwd, stdin=subprocess.DEVNULL, start_new_session=True)
        return process

    def _thread(self, target: Callable[..., None], *arguments: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=arguments, name=f"session{self._number}", daemon=True)
        thread.start()
        return thread

    def _pump(self, descriptor: int, kind: Kind) -> None:
        while True:
            try:
                data = os.read(descriptor, READ_BYTES)
            except OSError:  # of a terminal: no process has it open any more
                return
            if not data:
                return
            self._port.send(kind, self._number, data)

    def _feed(self, sink: IO[bytes]) -> None:
        try:
            while data := self._input.get():
                sink.write(data)
                sink.flush()
            sink.close()
        except OSError:  # the command has closed its input, or ended
            return

    def _kill(self) -> None:
        (self._group / "cgroup.kill").write_text("1")


def prepare(modules: str) -> None:
    """What a system's own start would do: devices, control groups, loopback."""
    os.environ["PATH"], os.environ[GUEST] = PATH, "1"  # of the programs this one starts
    subprocess.run(["mount", "-t", "cgroup2", "cgroup2", str(GROUPS)], check=True)
    subprocess.run(["modprobe", "-d", modules, "-a", *KERNEL_MODULES], check=True)
    nics.ip(["link set lo up"])
    Path("/proc/sys/kernel/hostname").write_text("helixrt-lab")


def serve(port: Port) -> None:
    """Until the keeper is gone."""
    frames = Frames()
    sessions: dict[int, Session] = {}
    port.send(Kind.READY, 0)
    while data := port.wait():
        for frame in frames.feed(data):
            if frame.kind is Kind.RUN:
                sessions[frame.session] = Session(frame.session, Command.decode(frame.payload), port)
            elif (session := sessions.get(frame.session)) is None:
                continue
            elif frame.kind is Kind.INPUT:
                session.feed(frame.payload)
            elif frame.kind is Kind.SIGNAL:
                session.signal(int.from_bytes(frame.payload, "big"))
            elif frame.kind is Kind.WINDOW:
                session.resize(frame.payload)
            elif frame.kind is Kind.LEAVE:
                session.leave()


def main(modules: str) -> None:
    try:
        prepare(modules)
        serve(Port())
    except Exception as error:
        print(f"helixrt: the guest's agent: {error!r}", file=sys.stderr)  # on the console, which the host keeps
