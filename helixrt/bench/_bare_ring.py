"""What the machine itself allows: a ring all-reduce over bare sockets, without anything that a library adds.

In: a store for the ports, rank, number of ranks. Out: `all_reduce`. One connection to each neighbour, no frames, no flow
control but TCP's, no failure detection; sums are made a piece at a time as bytes come. What is left is the kernel's copies,
the sums and the system calls.
"""

from __future__ import annotations

import select
import socket

import torch
import torch.distributed as dist

from helixrt.collectives.memory import byte_view

_PIECE_BYTES = 256 << 10
_CALL_BYTES = 1 << 20
_BUFFER_BYTES = 4 << 20
_ELEMENT_BYTES = 4


class BareRing:
    """Sums float32 tensors in place."""

    def __init__(self, store: dist.Store, rank: int, size: int, host: str, timeout_s: float) -> None:
        """`timeout_s`: of a neighbour that neither sends nor takes anything. Raises TimeoutError then."""
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        with self._new() as listener:
            listener.bind((host, 0))
            listener.listen()
            store.set(f"port/{rank}", str(listener.getsockname()[1]))
            self._to = self._new()
            self._to.connect((host, int(store.get(f"port/{(rank + 1) % size}"))))
            self._of, _ = listener.accept()
        self._to.setblocking(False)
        self._of.setblocking(False)
        self._scratch = torch.empty(0)

    def _new(self) -> socket.socket:
        sock = socket.socket()
        sock.settimeout(self._timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # as helix does on loopback
        except OSError:
            pass
        return sock

    def all_reduce(self, tensor: torch.Tensor) -> None:
        size = self._size
        borders = [tensor.numel() * part // size for part in range(size + 1)]
        longest = max(b - a for a, b in zip(borders, borders[1:], strict=False))
        if self._scratch.numel() < longest:
            self._scratch = torch.empty(longest)
        parts = [tensor[a:b] for a, b in zip(borders, borders[1:], strict=False)]
        for step in range(2 * size - 2):
            sent, came = parts[(self._rank - step) % size], parts[(self._rank - step - 1) % size]
            self._step(byte_view(sent), came, sums=step < size - 1)

    def _step(self, sent: memoryview, came: torch.Tensor, sums: bool) -> None:
        waiting = self._scratch[: came.numel()] if sums else came
        into, out, summed = byte_view(waiting), 0, 0
        at, end = 0, came.numel() * _ELEMENT_BYTES
        while out < len(sent) or at < end:
            readable, writable, _ = select.select(
                [self._of] if at < end else [], [self._to] if out < len(sent) else [], [], self._timeout_s
            )
            if not readable and not writable:
                raise TimeoutError(f"the ring over bare sockets makes no progress: rank {self._rank}")
            if writable:
                out += self._to.send(sent[out : out + _CALL_BYTES])
            if readable:
                at += self._of.recv_into(into[at : at + _CALL_BYTES])
                whole = at // _ELEMENT_BYTES
                if sums and (at == end or whole - summed >= _PIECE_BYTES // _ELEMENT_BYTES):
                    came[summed:whole].add_(waiting[summed:whole])
                    summed = whole

    def close(self) -> None:
        self._to.close()
        self._of.close()
