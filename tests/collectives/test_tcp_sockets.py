"""To find and change the sockets of a library changes no other socket of the program."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from helixrt.collectives.gloo_private import GlooConnections, GlooDevice
from helixrt.collectives.lost_hosts import SILENT_S, ends_when_lost
from helixrt.collectives.tcp_sockets import TcpSocket, held, tcp_sockets

DEADLINE_S = 60.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def silent_ms(connection: socket.socket) -> int:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_connections_to_the_same_server_that_were_there_before_keep_their_options(server: socket.socket) -> None:
    at = server.getsockname()
    with socket.create_connection(at) as own:
        with ends_when_lost(at, lambda: socket.create_connection(at)) as ours:
            assert silent_ms(own) == 0 and own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
            assert silent_ms(ours) == SILENT_S * 1000 and ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


def test_a_look_changes_no_socket_where_the_program_has_a_default_timeout(server: socket.socket) -> None:
    with socket.create_connection(server.getsockname()) as own, ExitStack() as after:
        after.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(DEADLINE_S)
        device = GlooDevice("127.0.0.1")
        GlooConnections(device.address, [server.getsockname()]).connected()
        ends_when_lost(server.getsockname(), lambda: None)
        assert device.known and os.get_blocking(own.fileno()) and os.get_blocking(server.fileno())


def test_what_has_the_descriptor_of_a_socket_that_was_found_is_not_taken_for_it(server: socket.socket) -> None:
    with socket.create_connection(server.getsockname()) as own:
        (found,) = [each for each in tcp_sockets() if each.descriptor == own.fileno()]
        assert (found.local, found.remote, found.listens) == (own.getsockname(), server.getsockname(), False)
        with held(found) as descriptor:
            assert os.fstat(descriptor).st_ino == found.inode
        other = TcpSocket(found.inode + 1, found.descriptor, found.local, found.remote)
        with pytest.raises(OSError, match="something else by now"), held(other):
            pass
