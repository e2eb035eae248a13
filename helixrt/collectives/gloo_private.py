"""The private parts of torch and torchft that the Gloo exchange needs, all in this file.

- a Gloo device bound to a known address, so that its listening port, and by it every connection of
  a group, can be told apart from the process's other sockets;
- shutting these connections down: `abort` and `shutdown` of torch's Gloo group (2.13) do not end an
  all-reduce that is running, a closed connection does, within a millisecond and at both ends.
"""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Collection, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.errors import MissingExtra

_DESCRIPTORS = next((d for d in ("/proc/self/fd", "/dev/fd") if os.path.isdir(d)), "")


_creating = threading.Lock()  # so that a new listening port is the new device's


class GlooDevice:
    """A listening Gloo device on `host`; lives across groups.

    `port` is 0 where it cannot be found out (no descriptor folder); an abort then takes effect only
    at the operation's timeout.
    """

    def __init__(self, host: str) -> None:
        self.port = 0
        for _ in range(3):  # another thread of the program may begin to listen in the same moment
            with _creating:
                before = _listening_ports()
                self.native: Any = dist.ProcessGroupGloo.create_device(hostname=host)
                new = [port for port, name in _listening_ports().items() if port not in before and name == host]
            if len(new) == 1:
                self.port = new[0]
                break


def make_group(device: GlooDevice, store: dist.Store, rank: int, size: int, timeout_s: float, name: str) -> Any:
    """torchft's reconfigurable Gloo group, on `device`, connected; blocks until all members have come.

    Raises RuntimeError (torch's DistError is one) when they do not within `timeout_s`.
    """
    try:
        from torchft.process_group import ProcessGroupGloo as TorchftGloo
    except ImportError as error:
        raise MissingExtra("torchft", "ft", "an exchange between replicas") from error

    class DeviceGloo(TorchftGloo):
        """torchft's group picks its interface from the environment; this one is given its device."""

        def _create_pg(self, store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [device.native]
            options._threads = 1
            options._timeout = self._timeout
            backend = gloo(store, rank, world_size, options)
            group = dist.ProcessGroup(store, rank, world_size)
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
            group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
            return group

    group = DeviceGloo(timedelta(seconds=timeout_s))
    # What torchft's `configure` does, on a store that is connected already.
    group._replica_id, group._rank = name, rank
    group._pg = group._create_pg(store, rank, size)
    return group


def shut_down_connections(own_port: int, peer_ports: Collection[int]) -> int:
    """End every connection of this process that goes to `own_port` or comes from a peer's; returns how many.

    They are shut down, not closed: their descriptors still belong to Gloo, which then sees the end of
    the stream, fails what is running and closes them itself.
    """
    ended = 0
    for duplicate in _sockets():
        try:
            local, remote = duplicate.getsockname()[1], duplicate.getpeername()[1]
            if local == own_port or remote in peer_ports:
                duplicate.shutdown(socket.SHUT_RDWR)
                ended += 1
        except OSError:
            continue  # listening, or gone meanwhile
    return ended


def _listening_ports() -> dict[int, str]:
    ports: dict[int, str] = {}
    for duplicate in _sockets():
        try:
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                name = duplicate.getsockname()
                ports[name[1]] = name[0]
        except OSError:
            continue
    return ports


def _sockets() -> Iterator[socket.socket]:
    """A duplicate of every TCP socket of this process, one after another, each closed again."""
    for entry in os.listdir(_DESCRIPTORS) if _DESCRIPTORS else []:
        try:
            if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                continue
            descriptor = os.dup(int(entry))
        except OSError:
            continue  # gone meanwhile
        try:
            duplicate = socket.socket(fileno=descriptor)
        except OSError:  # given another meaning meanwhile
            os.close(descriptor)
            continue
        with duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.type == socket.SOCK_STREAM:
                yield duplicate
