"""What this host's kernel reports about a TCP connection: when the peer's kernel last answered, and what has not left.

In: a connected socket. Out: `Acknowledgements`. Linux (TCP_INFO, see tcp(7) and <linux/tcp.h>). The peer's kernel acknowledges
whether or not the peer's process runs, so this shows hosts and paths, not processes.
"""

from __future__ import annotations

import fcntl
import socket
import struct

from helixrt.protocol.liveness import Acknowledgements

# Of struct tcp_info: probes of a closed window without an answer; segments in flight; milliseconds since the last
# acknowledgement; bytes that have not been sent (Linux 4.6 and later).
_INFO = struct.Struct("=3xB20xI28xI84xI")
_SIOCOUTQ = 0x5411  # bytes that the other end has not acknowledged


def acknowledgements(sock: socket.socket, now: float) -> Acknowledgements | None:
    """At monotonic time `now`, which must be the present; None if the kernel does not tell."""
    try:
        raw = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        probes, in_flight, since_ms, unsent = _INFO.unpack(raw)
    except (OSError, struct.error):
        return None
    return Acknowledgements(now - since_ms * 1e-3, unsent > 0 and in_flight == 0, probes)


def bytes_in_kernel(sock: socket.socket) -> int:
    """Written and not acknowledged yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))
    return int(count)
