"""The process that owns a running VM: starts QEMU, hands clients' commands to the guest one at a time, ends it when idle.

In: a folder (its lock, its socket, the guest's console) and a `Shape`. Out: a VM that any number of clients share one after
another, so that it boots once for many commands. It ends with the last command (`--fresh`), when it was idle for a while, when
told to, or with the guest; QEMU never outlives it, because the guest powers off when the keeper's end of its port closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from helixrt.lab.vm_channel import PORT, Command, Frame, Frames, Kind, Status
from helixrt.lab.vm_image import ROOT_TAG, WRITABLE_TAG, image
from helixrt.lab.vm_setup import LabError, Parts, find_parts, program

LOCK, SOCKET, CONSOLE, LOG, DISK = "lock", "socket", "console.log", "keeper.log", "initrd"
BOOT_S = 180.0
END_S = 10.0  # for QEMU, or a command, to end after the request
READ_BYTES = 1 << 16
BEHIND_BYTES = 64 << 20  # kept for a client that does not read
KERNEL_ARGUMENTS = (  # panic: QEMU ends with the guest; the rest is about speed under emulation
    "console=ttyS0 quiet panic=-1 nokaslr mitigations=off tsc=reliable random.trust_cpu=on rcupdate.rcu_expedited=1"
)

PRIORITY = -10  # of the VM: an emulated kernel that gets no time breaks connections that a real one would keep


@dataclass(frozen=True)
class Shape:
    """How large a VM is. accel: QEMU's: tcg works everywhere, kvm where /dev/kvm serves a stock kernel."""

    memory_mb: int = 2048
    cpus: int = 2
    accel: str = "tcg"


def agent_command() -> list[str]:
    """What the guest runs first: this environment's Python with the agent, from the host's files."""
    package = Path(__file__).resolve().parents[2]
    code = f"import sys; sys.path.insert(0, {str(package)!r}); from helixrt.lab.guest_agent import main; main(sys.argv[1])"
    return [sys.executable, "-I", "-S", "-c", code]


def qemu_command(qemu: str, parts: Parts, shape: Shape, disk: Path, console: Path, channel: int) -> list[str]:
    """QEMU's arguments; `channel` is an open socket that becomes the guest's port."""
    accel = "tcg,thread=multi,tb-size=512" if shape.accel == "tcg" else shape.accel
    cpu = "max,la57=off" if shape.accel == "tcg" else "host"
    argv = [qemu, "-name", "helixrt-lab", "-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]
    argv += ["-machine", "q35", "-accel", accel, "-cpu", cpu, "-smp", str(shape.cpus), "-m", f"{shape.memory_mb}M"]
    argv += ["-kernel", str(parts.kernel), "-initrd", str(disk), "-append", KERNEL_ARGUMENTS]
    argv += ["-serial", f"file:{console}", "-device", "virtio-rng-pci"]
    for tag, access in ((ROOT_TAG, ",readonly=on"), (WRITABLE_TAG, "")):
        argv += ["-fsdev", f"local,id={tag},path=/,security_model=none,multidevs=remap{access}"]
        argv += ["-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]
    argv += ["-device", "virtio-serial-pci", "-chardev", f"socket,id=channel,fd={channel}"]
    return [*argv, "-device", f"virtserialport,chardev=channel,name={PORT}"]


class Keeper:
    """One VM and its clients."""

    def __init__(self, folder: Path, shape: Shape, idle_s: float) -> None:
        self._folder, self._shape, self._idle_s = folder, shape, idle_s
        self._clients: dict[int, asyncio.StreamWriter] = {}
        self._commands: dict[int, str] = {}
        self._ended: dict[int, asyncio.Event] = {}
        self._sessions = 0
        self._ready, self._stop, self._turn = asyncio.Event(), asyncio.Event(), asyncio.Lock()
        self._last_left = time.monotonic()
        self._guest: asyncio.StreamWriter

    async def keep(self) -> int:
        """Until the VM ends. Returns an exit code."""
        parts, qemu = find_parts(), program("qemu-system-x86_64")
        if parts is None or qemu is None:
            raise LabError("the lab is not set up: helixrt lab setup")
        disk, console = self._folder / DISK, self._folder / CONSOLE
        disk.write_bytes(image(parts, [*agent_command(), str(parts.modules)]))
        console.write_bytes(b"")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            argv = qemu_command(qemu, parts, self._shape, disk, console, theirs.fileno())
            machine = await asyncio.create_subprocess_exec(
                *argv, pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL, cwd="/", start_new_session=True
            )
            with contextlib.suppress(PermissionError):  # no root: it shares the machine as all do
                os.setpriority(os.PRIO_PROCESS, machine.pid, PRIORITY)  # before it makes its threads
            theirs.close()
            path = self._folder / SOCKET
            path.unlink(missing_ok=True)
            try:
                reader, self._guest = await asyncio.open_connection(sock=ours)
                server = await asyncio.start_unix_server(self._serve, path)
                why = await self._until_the_end(machine, reader)
                server.close()
                for writer in self._clients.values():
                    writer.write(Frame(Kind.NOTICE, 0, why.encode()).encode())
                    with contextlib.suppress(ConnectionError, TimeoutError):
                        await asyncio.wait_for(writer.drain(), 1.0)
                    writer.close()
            finally:
                if machine.returncode is None:
                    machine.terminate()
                    try:
                        await asyncio.wait_for(machine.wait(), END_S)
                    except TimeoutError:
                        machine.kill()
                        await machine.wait()
                path.unlink(missing_ok=True)
        return 0

    async def _until_the_end(self, machine: asyncio.subprocess.Process, reader: asyncio.StreamReader) -> str:
        """Why the VM ends, in words."""
        ends = {
            asyncio.create_task(machine.wait()): "the VM ended by itself",
            asyncio.create_task(self._from_guest(reader)): "the VM's agent ended",
            asyncio.create_task(self._no_boot()): f"the VM did not boot in {BOOT_S:g} s",
            asyncio.create_task(self._idle()): "the VM was idle",
            asyncio.create_task(self._stop.wait()): "the VM was stopped by a request",
        }
        done, pending = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        (first, *_) = done
        first.result()  # an error of the keeper itself goes to its log
        return ends[first]

    async def _no_boot(self) -> None:
        try:
            await asyncio.wait_for(self._ready.wait(), BOOT_S)
        except TimeoutError:
            return
        await asyncio.Event().wait()  # booted: this never ends

    async def _idle(self) -> None:
        while self._clients or time.monotonic() < self._last_left + self._idle_s:
            await asyncio.sleep(0.5)

    async def _from_guest(self, reader: asyncio.StreamReader) -> None:
        frames = Frames()
        while data := await reader.read(READ_BYTES):
            for frame in frames.feed(data):
                if frame.kind is Kind.READY:
                    self._ready.set()
                    continue
                if (writer := self._clients.get(frame.session)) is not None:
                    writer.write(frame.encode())  # waits only for a client that is far behind
                    with contextlib.suppress(ConnectionError):
                        await writer.drain()
                if frame.kind is Kind.EXIT and (ended := self._ended.get(frame.session)) is not None:
                    ended.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._sessions += 1
        session = self._sessions
        self._clients[session] = writer
        writer.transport.set_write_buffer_limits(high=BEHIND_BYTES)
        try:
            status = Status(self._shape.memory_mb, self._shape.cpus, self._ready.is_set(), tuple(self._commands.values()))
            writer.write(Frame(Kind.STATUS, session, status.encode()).encode())
            await self._session(session, reader, writer)
        except (ConnectionError, ValueError):
            pass  # the client went, or is none of ours
        finally:
            del self._clients[session]
            self._commands.pop(session, None)
            self._last_left = time.monotonic()
            writer.close()

    async def _session(self, session: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        first: list[Frame] = []
        while not first:
            if not (data := await reader.read(READ_BYTES)):
                return
            first = list(frames.feed(data))
        if first[0].kind is Kind.STOP:
            self._stop.set()
            return
        if first[0].kind is not Kind.RUN:
            raise ValueError("a session begins with what to run")
        command = Command.decode(first[0].payload)
        self._commands[session] = shlex.join(command.argv)[:200]
        async with contextlib.AsyncExitStack() as stack:
            if command.nics is not None or not command.rows:  # a shell that takes the NICs as they are may look on
                if self._turn.locked():
                    others = [line for number, line in self._commands.items() if number != session]
                    writer.write(Frame(Kind.NOTICE, session, f"waiting for: {others[0]}".encode()).encode())
                await stack.enter_async_context(self._turn)
            await self._ready.wait()
            if reader.at_eof():
                return
            ended = self._ended[session] = asyncio.Event()
            try:
                for frame in first:
                    self._guest.write(Frame(frame.kind, session, frame.payload).encode())
                forward = asyncio.create_task(self._to_guest(session, reader, frames))
                finish = asyncio.create_task(ended.wait())
                await asyncio.wait({forward, finish}, return_when=asyncio.FIRST_COMPLETED)
                if not ended.is_set():  # the client is gone: its command must end before the next begins
                    self._guest.write(Frame(Kind.LEAVE, session).encode())
                    await asyncio.wait({finish}, timeout=END_S)
                    if not ended.is_set():
                        self._stop.set()
                forward.cancel()
                finish.cancel()
            finally:
                del self._ended[session]

    async def _to_guest(self, session: int, reader: asyncio.StreamReader, frames: Frames) -> None:
        with contextlib.suppress(ConnectionError, ValueError):
            while data := await reader.read(READ_BYTES):
                for frame in frames.feed(data):
                    self._guest.write(Frame(frame.kind, session, frame.payload).encode())
                await self._guest.drain()


def locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock until it is closed; None when another keeper has it."""
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


async def _main(folder: Path, shape: Shape, idle_s: float) -> int:
    keeper = asyncio.ensure_future(Keeper(folder, shape, idle_s).keep())
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, keeper.cancel)
    try:
        return await keeper
    except asyncio.CancelledError:
        return 0


def main(argv: Sequence[str]) -> int:
    """FOLDER MEMORY_MB CPUS ACCEL IDLE_S: how `vm.boot` starts this module."""
    folder, memory_mb, cpus, accel, idle_s = argv
    if locked(Path(folder)) is None:
        return 0  # another client was quicker
    try:
        return asyncio.run(_main(Path(folder), Shape(int(memory_mb), int(cpus), accel), float(idle_s)))
    except (LabError, OSError) as error:
        print(f"helixrt: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
