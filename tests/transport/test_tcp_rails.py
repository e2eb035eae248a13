"""The sockets of rails: what is asked of the kernel, and that it may refuse."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from helixrt.transport.tcp.rails import SocketTuning, TcpRail, dial, listen

OFFERED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


def congestion(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def both_ends(tuning: SocketTuning) -> tuple[str, str]:
    """The congestion control of who dialled and of who listened."""
    with listen(TcpRail(), tuning) as listener:
        listener.setblocking(True)
        sock, code = dial(TcpRail(), tuning, "127.0.0.1", listener.getsockname()[1])
        assert sock is not None and code == 0
        accepted, _ = listener.accept()
        with sock, accepted:
            return congestion(sock), congestion(accepted)


def test_no_clock_paces_what_stays_on_loopback() -> None:
    if not OFFERED.exists() or "reno" not in OFFERED.read_text().split():
        pytest.skip("this kernel does not let programs choose reno")
    assert both_ends(SocketTuning()) == ("reno", "reno")


def test_the_system_s_congestion_control_stays_where_it_is_wanted_or_no_other_is_offered() -> None:
    with socket.socket() as plain:
        usual = congestion(plain)
    assert both_ends(SocketTuning(local_congestion="")) == (usual, usual)
    assert both_ends(SocketTuning(local_congestion="none of that name")) == (usual, usual)
