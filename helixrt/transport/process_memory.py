"""Reading another process's memory: one copy, from the sender's copy of a message to the receiver's memory.

In: a process that lent an address in its memory, and memory of ours. Out: its bytes, by one system call
(`process_vm_readv`, Linux) that runs outside the interpreter's lock. The kernel allows it between processes
of one user unless a policy forbids it (Yama's ptrace_scope, seccomp): so it is tried first, on a
proof that the peer sends by another way (`Probe`), and an end that cannot read uses another way.

Nothing is ever written into another process. What was read counts only if the process is still the one that
lent it: a process id may be used again once its owner is gone, so `alive` is asked after each read.
"""

from __future__ import annotations

import ctypes
import functools
import os
import secrets
import select
from dataclasses import dataclass
from typing import Any

import numpy as np

HOLD_BYTES = 64 << 10  # a shorter read is done before another thread would have got the interpreter's lock


class _Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


@functools.cache  # to load a library again builds a class
def _reader(library: type[ctypes.CDLL]) -> Any:
    """The C function, or None where there is none."""
    try:
        function = library(None, use_errno=True).process_vm_readv
    except (AttributeError, OSError):
        return None
    function.restype = ctypes.c_ssize_t
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
    return function


def address_of(data: memoryview) -> int:
    """Where the bytes of a contiguous view lie."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0]) if len(data) else 0


@dataclass(frozen=True, slots=True)
class Proof:
    """What a peer must be able to read: `nonce` at `address` of process `pid`."""

    pid: int
    address: int
    nonce: bytes


class Probe:
    """Memory of ours that a peer may try to read; keep it until the peer has answered."""

    def __init__(self) -> None:
        self._memory = np.frombuffer(bytearray(secrets.token_bytes(32)), np.uint8)
        self.proof = Proof(os.getpid(), int(self._memory.ctypes.data), self._memory.tobytes())


class ProcessMemory:
    """The memory of process `pid`: of the living process behind `process` (a pidfd), as long as it keeps the
    connection on `socket` open. The descriptors stay the caller's.
    """

    def __init__(self, pid: int, process: int, socket: int) -> None:
        self._pid = pid
        self._free, self._hold = _reader(ctypes.CDLL), _reader(ctypes.PyDLL)
        self._ours, self._theirs = _Span(), _Span()
        self._arguments = (ctypes.addressof(self._ours), 1, ctypes.addressof(self._theirs), 1, 0)
        self._poll = select.poll()
        self._poll.register(process, select.POLLIN)
        self._poll.register(socket, 0)  # hang-ups only

    def read(self, address: int, into: int, size: int) -> int:
        """Copy at most `size` bytes from `address` there to `into` here; how many. Raises OSError if none can be read."""
        self._ours.base, self._theirs.base = into, address
        self._ours.length = self._theirs.length = size
        function = self._hold if size <= HOLD_BYTES else self._free
        done = function(self._pid, *self._arguments)
        if done < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        return int(done)

    def alive(self) -> bool:
        """Whether it was this process, still connected, that everything until now was read from."""
        return not self._poll.poll(0)

    def proves(self, proof: Proof) -> bool:
        """Whether this process may read the other's memory, and it is the one that sent the proof."""
        if self._free is None or self._hold is None or proof.pid != self._pid:
            return False
        memory = bytearray(len(proof.nonce))
        try:
            self.read(proof.address, address_of(memoryview(memory)), len(memory))
        except OSError:
            return False
        return memory == proof.nonce and self.alive()
