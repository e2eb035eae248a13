"""`helixrt lab setup | run | shell | stop`: commands in a small VM with RDMA NICs and this machine's files.

In: the command's arguments. Out: its output and its exit code. The VM is kept for the next command, until it is unused for
half an hour; `--fresh` boots one for this command alone. What the command writes stays in the VM, but for `--share`d folders.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from helixrt.errors import ConfigError
from helixrt.lab import vm, vm_setup
from helixrt.lab.vm import Connection
from helixrt.lab.vm_channel import Command, Kind
from helixrt.lab.vm_keeper import Shape
from helixrt.lab.vm_setup import LabError

LEAST_MEMORY_GB, MOST_CPUS = 0.5, 64
READ_BYTES = 1 << 16


def add_commands(kinds: Any) -> None:
    kinds.add_parser("setup", help="install what the VM needs: programs with apt (root), a kernel in the cache folder")

    named = argparse.ArgumentParser(add_help=False)
    default = os.environ.get(vm.NAMED) or "default"
    named.add_argument("--name", default=default, help=f'name of the VM (default: ${vm.NAMED}, else "default")')
    size = argparse.ArgumentParser(add_help=False, parents=[named])
    size.add_argument("--memory", type=float, default=2.0, metavar="GB", help="memory of the VM (default 2)")
    size.add_argument("--cpus", type=int, default=min(2, os.cpu_count() or 1), help="processors of the VM (default 2)")
    size.add_argument(
        "--accel", choices=("tcg", "kvm"), default="tcg", help="tcg (default) works on any machine; kvm is faster"
    )
    size.add_argument(
        "--share", action="append", default=[], metavar="DIR", help="folder of this machine in which the command may write"
    )

    run_ = kinds.add_parser(
        "run",
        parents=[size],
        help="run a command in the VM, with RDMA NICs",
        description="Runs COMMAND in the VM, in this folder, with this environment's Python first on its PATH, and gives its "
        "output and exit code. The NIC pairs are rxe_a1-rxe_b1, rxe_a2-rxe_b2, ... (helixrt.lab.nics cuts and mends them). "
        "What it writes stays in the VM, except below --share.",
    )
    run_.add_argument("--nics", type=int, default=1, help="NIC pairs, made new for this command (default 1)")
    run_.add_argument("--fresh", action="store_true", help="boot a VM for this command only, and end it afterwards")
    run_.add_argument("argv", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the command and its arguments")

    shell = kinds.add_parser("shell", parents=[size], help="open a shell in the VM")
    shell.add_argument("--nics", type=int, help="make this many new NIC pairs (default: keep the present ones)")

    kinds.add_parser("stop", parents=[named], help="end the VM")


def run(args: argparse.Namespace) -> int:
    """Run one of the commands; returns its exit code. ConfigError for a wrong setting."""
    try:
        if args.lab == "setup":
            vm_setup.set_up(_say)
            return 0
        if args.lab == "stop":
            print("stopped" if vm.stop(args.name) else "no VM was running")
            return 0
        if args.lab == "shell":
            return _shell(args)
        return _run(args)
    except LabError as error:
        _say(str(error))
        return 1


def _say(line: str) -> None:
    print(f"helixrt: {line}", file=sys.stderr, flush=True)


def _shape(args: argparse.Namespace) -> Shape:
    if not LEAST_MEMORY_GB <= args.memory:
        raise ConfigError("memory", args.memory, f"is at least {LEAST_MEMORY_GB} (GB)")
    if not 1 <= args.cpus <= MOST_CPUS:
        raise ConfigError("cpus", args.cpus, f"is between 1 and {MOST_CPUS}")
    if args.nics is not None and not 0 <= args.nics <= vm.MOST_NICS:
        raise ConfigError("nics", args.nics, f"is between 0 and {vm.MOST_NICS}")
    return Shape(round(args.memory * 1024), args.cpus, args.accel)


def _shared(args: argparse.Namespace) -> tuple[str, ...]:
    for folder in args.share:
        if not Path(folder).is_dir():
            raise ConfigError("share", folder, "is a folder that exists")
    return tuple(str(Path(folder).resolve()) for folder in args.share)


def _run(args: argparse.Namespace) -> int:
    argv = args.argv[1:] if args.argv[:1] == ["--"] else args.argv
    if not argv:
        raise ConfigError("command", "''", "is missing: helixrt lab run [OPTIONS] -- COMMAND")
    shape = _shape(args)
    command = Command(tuple(argv), os.getcwd(), vm.environment(), args.nics, _shared(args))
    if args.fresh:
        with vm.boot_alone(shape) as connect:
            return _execute(connect(), command)
    return _execute(vm.open_kept(args.name, shape, _say), command)


def _shell(args: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("shell", "''", "needs a terminal; without one: helixrt lab run -- bash -c '...'")
    shape = _shape(args)
    rows, columns = os.get_terminal_size()[::-1]
    argv = (os.environ.get("SHELL") or "/bin/bash",)
    command = Command(argv, os.getcwd(), vm.environment(), args.nics, _shared(args), rows, columns)
    connection = vm.open_kept(args.name, shape, _say)
    with _raw_terminal(lambda payload: connection.send(Kind.WINDOW, payload)):
        return _execute(connection, command)


def _execute(connection: Connection, command: Command) -> int:
    """Run the command with this process's standard streams. Ctrl-C goes to the command; the second one leaves it."""
    frames = connection.run(command)
    threading.Thread(target=_feed, args=(connection,), name="input-of-the-lab", daemon=True).start()
    asked = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        connection.send(Kind.SIGNAL, number.to_bytes(4, "big"))

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        for frame in frames:
            if frame.kind is Kind.EXIT:
                return vm.exit_code(frame)
            if frame.kind is Kind.NOTICE:
                _say(frame.payload.decode())
                continue
            sink = sys.stdout.buffer if frame.kind is Kind.OUTPUT else sys.stderr.buffer
            sink.write(frame.payload)
            sink.flush()
        raise AssertionError("frames end with EXIT or an error")
    finally:
        signal.signal(signal.SIGINT, before)
        connection.close()


def _feed(connection: Connection) -> None:
    """Standard input to the command, until it ends."""
    while True:
        try:
            data = os.read(0, READ_BYTES) if sys.stdin is not None else b""  # None: closed, and 0 may be another file
        except OSError:
            data = b""
        connection.send(Kind.INPUT, data)
        if not data:
            return


@contextmanager
def _raw_terminal(resized: Callable[[bytes], None]) -> Iterator[None]:
    """Key presses are sent to the guest unchanged, and so are changes of the window size."""

    def changed(number: int, frame: FrameType | None) -> None:
        rows, columns, _, _ = struct.unpack("HHHH", fcntl.ioctl(1, termios.TIOCGWINSZ, bytes(8)))
        resized(struct.pack(">HH", rows, columns))

    saved, handler = termios.tcgetattr(0), signal.signal(signal.SIGWINCH, changed)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, saved)
        signal.signal(signal.SIGWINCH, handler)
