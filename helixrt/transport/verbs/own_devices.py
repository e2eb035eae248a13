"""Whether this host's own RDMA ports carry its rails, as `tcp.interfaces` says of addresses.

In: a rail's port and the network interface behind it. Out: what is wrong on this host, in words; empty if nothing is, or if it
is not known. A link that is lost tells only that the peer fell silent: its own dead NIC looks like a dead peer.

Only a device that is gone, a port that is switched off, or a network interface that is down or gone counts. A port without a
carrier does not: a cable or a switch may be the cause, and no restart of a process, here or on another host, is known to help.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from helixrt.transport.tcp.interfaces import interface_trouble
from helixrt.transport.verbs.devices import SYSFS, Gid, Port, is_switched_off, port_exists
from helixrt.transport.verbs.interfaces import check_ours


@dataclass(frozen=True)
class State:
    """Of a port, now. `interface`: what is wrong with its network interface, "" for nothing or where there is none."""

    exists: bool
    ethernet: bool
    switched_off: bool
    interface: str = ""


def trouble(device: str, number: int, state: State) -> str:
    """What of this host keeps the port from working; empty: nothing, or it is not known.

    An Ethernet port says that it is switched off also where its cable has no signal (mlx5), so its interface alone counts.
    """
    if not state.exists:
        return f"RDMA port {device}/{number} does not exist any more"
    if state.ethernet:
        return f"RDMA port {device}/{number}: {state.interface}" if state.interface else ""
    return f"RDMA port {device}/{number} is switched off" if state.switched_off else ""


@dataclass(frozen=True)
class OwnPort:
    """A port of this host. `interface`: the name of its network interface; "" if it has none, or one that is not in this
    process's network namespace, of which nothing can be told."""

    device: str
    number: int
    ethernet: bool
    interface: str
    root: Path = SYSFS

    @staticmethod
    def of(port: Port, gid: Gid) -> OwnPort:
        """As it is now: asked later, an interface that is gone looks like one of another namespace."""
        try:
            check_ours(gid.address, socket.if_nametoindex(gid.interface))
            interface = gid.interface
        except OSError:
            interface = ""
        return OwnPort(port.device, port.number, port.ethernet, interface)

    def trouble(self) -> str:
        """See `trouble`."""
        wrong = interface_trouble(self.interface) if self.interface else ""
        where = self.device, self.number
        state = State(port_exists(*where, self.root), self.ethernet, is_switched_off(*where, self.root), wrong)
        return trouble(*where, state)
