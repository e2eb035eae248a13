"""The addresses that a process listens on over TCP, as the kernel says it."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path


def listening(process: int | str = "self") -> list[str]:
    """`address:port` of each socket of the process, in its network namespace."""
    inodes = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and words[3] == "0A":  # TCP_LISTEN
                raw, _, port = words[1].partition(":")
                parts = [struct.pack("=I", int(raw[at : at + 8], 16)) for at in range(0, len(raw), 8)]
                found.append(f"{socket.inet_ntop(family, b''.join(parts))}:{int(port, 16)}")
    return sorted(found)
