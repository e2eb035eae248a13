"""The private parts of torch and torchft that the Gloo exchange needs, all in this file.

- a Gloo device bound to a known address, so that its listening port, and by it every connection of
  a group, can be distinguished from the process's other sockets, by both addresses;
- which connections are a group's, and shutting them down: `abort` and `shutdown` of torch's Gloo group (2.13) do not end an
  all-reduce that is running, a closed connection does, within a millisecond and at both ends.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.tcp_sockets import Address, held, plain, shut_down, tcp_sockets
from helixrt.errors import MissingExtra
from helixrt.private_api import GLOO_EXCHANGE, usable

_creating = threading.Lock()  # so that a new listening port is the new device's


class GlooDevice:
    """A listening Gloo device on `host`; used by several groups in turn.

    All connections of a group are made when it is. `address` is where it listens; its port is 0 where that cannot be found
    out (no descriptor folder, or a torch of another shape), and an abort then takes effect only at the operation's timeout.
    """

    def __init__(self, host: str) -> None:
        own, _ = self.address = plain(host, 0)
        self.native: Any = None
        if not _own_device():
            return
        for _ in range(3):  # another thread of the program may begin to listen in the same moment
            with _creating:
                before = _listening()
                self.native = dist.ProcessGroupGloo.create_device(hostname=host, lazy_init=False)
                new = [at for inode, at in _listening().items() if inode not in before and at[0] == own]
            if len(new) == 1:
                self.address = new[0]
                break

    @property
    def known(self) -> bool:
        """Its connections can be distinguished from others."""
        return self.address[1] != 0


def _own_device() -> bool:
    """Whether a group can be given its device. Without torchft this says nothing: `make_group` names the extra."""
    return importlib.util.find_spec("torchft") is None or usable(GLOO_EXCHANGE)


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

    group = (TorchftGloo if device.native is None else DeviceGloo)(timedelta(seconds=timeout_s))
    # What torchft's `configure` does, on a store that is connected already.
    group._replica_id, group._rank = name, rank
    group._pg = group._create_pg(store, rank, size)
    return group


class GlooConnections:
    """The connections of one Gloo group, among all sockets of this process. To be made before the group connects.

    Its own are those that its device accepted, whose local address is the device's, and those that Gloo dialled while the
    group connected, whose remote address is a peer's device. Other sockets may have one of these addresses or ports too:
    what was there before, what comes later, and what has the same port at another address.
    """

    def __init__(self, own: Address, peers: Collection[Address]) -> None:
        self._own, self._peers = own, frozenset(peers)
        self._others = self._dialled()
        self._dialled_by_gloo: frozenset[int] | None = None  # not known yet

    def connected(self) -> None:
        """The group has connected, so what is dialled from now on is not Gloo's."""
        self._dialled_by_gloo = self._dialled() - self._others

    def shut_down(self) -> int:
        """End them all; returns how many.

        They are shut down, not closed: their descriptors still belong to Gloo, which then sees the end of
        the stream, fails what is running and closes them itself.
        """
        ended = 0
        for found in tcp_sockets():
            if found.remote is not None and self._has(found.inode, found.local, found.remote):
                with suppress(OSError), held(found) as descriptor:
                    ended += shut_down(descriptor)
        return ended

    def _has(self, inode: int, local: Address, remote: Address) -> bool:
        if local == self._own:
            return True
        if self._dialled_by_gloo is not None:
            return inode in self._dialled_by_gloo
        return inode not in self._others and remote in self._peers

    def _dialled(self) -> frozenset[int]:
        """The sockets that are connected to a peer's device, dialled by either end."""
        return frozenset(found.inode for found in tcp_sockets() if found.remote in self._peers)


def pack_address(address: Address) -> bytes:
    """For the peers, to whom the zone of this host's interface means nothing."""
    return f"{address[0]} {address[1]}".encode()


def unpack_address(raw: bytes) -> Address:
    """Raises ValueError."""
    host, _, port = raw.decode("ascii").partition(" ")
    return plain(host, int(port))


def _listening() -> dict[int, Address]:
    """Inode of a socket that listens -> where."""
    return {found.inode: found.local for found in tcp_sockets() if found.listens}
