"""Frames between a command's client, the VM's keeper and the agent in the guest: the same on a socket and a serial port.

A frame is a kind, the number of the session (one command) it belongs to, and a payload. Pure: bytes in, frames out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any

HEADER = struct.Struct(">BII")  # kind, session, payload bytes
MOST_BYTES = 1 << 24
PORT = "helixrt.lab"  # the serial port's name in the guest


class Kind(IntEnum):
    RUN = 1  # client: `Command`
    INPUT = 2  # client: bytes for standard input; none: it has ended
    WINDOW = 3  # client: rows and columns of its terminal
    SIGNAL = 4  # client: a signal's number
    LEAVE = 5  # keeper: the client is gone, end its command
    OUTPUT = 6  # guest: bytes of standard output
    ERRORS = 7  # guest: bytes of standard error
    EXIT = 8  # guest: the exit code; the session's last frame
    NOTICE = 9  # keeper or guest: a line about the lab itself
    READY = 10  # guest: it waits for commands
    STATUS = 11  # keeper to every client that comes: `Status`
    STOP = 12  # client: end the VM


@dataclass(frozen=True)
class Frame:
    kind: Kind
    session: int
    payload: bytes = b""

    def encode(self) -> bytes:
        return HEADER.pack(self.kind, self.session, len(self.payload)) + self.payload


@dataclass(frozen=True)
class Command:
    """What to run in the guest. `nics`: NIC pairs to make anew before it; None leaves them as they are.

    `share`: folders of the host that it may change. `rows`, `columns`: of a terminal; 0 for pipes.
    """

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str] = field(default_factory=dict)
    nics: int | None = None
    share: tuple[str, ...] = ()
    rows: int = 0
    columns: int = 0

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(payload: bytes) -> Command:
        said: dict[str, Any] = json.loads(payload)
        return Command(**said | {"argv": tuple(said["argv"]), "share": tuple(said["share"])})


@dataclass(frozen=True)
class Status:
    """A running VM: how large it is, whether it has booted, and the commands in it, the first of them running."""

    memory_mb: int
    cpus: int
    booted: bool
    commands: tuple[str, ...] = ()

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def decode(payload: bytes) -> Status:
        said: dict[str, Any] = json.loads(payload)
        return Status(**said | {"commands": tuple(said["commands"])})


class Frames:
    """Takes bytes as they come, gives whole frames."""

    def __init__(self) -> None:
        self._left = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """ValueError when what comes is not of this protocol."""
        self._left += data
        while len(self._left) >= HEADER.size:
            kind, session, size = HEADER.unpack_from(self._left)
            if size > MOST_BYTES:
                raise ValueError(f"a frame of {size} bytes: at most {MOST_BYTES}")
            if len(self._left) < (end := HEADER.size + size):
                return
            payload = bytes(self._left[HEADER.size : end])
            del self._left[:end]
            yield Frame(Kind(kind), session, payload)
