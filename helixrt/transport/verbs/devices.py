"""The RDMA ports of this host, and one of them opened.

In: what the kernel shows under /sys/class/infiniband; the name of a port. Out: `Port`s to choose rails from (nothing
is opened for that, and pyverbs is not needed), and `Nic`: a port's context, protection domain and event descriptor.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from helixrt.errors import ConfigError
from helixrt.transport.verbs.library import Library

SYSFS = Path("/sys/class/infiniband")
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_EVENTS = "infinibandevent"  # in the name of every descriptor that verbs make for events
_T = TypeVar("_T")


@dataclass(frozen=True)
class Gid:
    index: int
    address: ipaddress.IPv6Address
    kind: str  # "RoCE v2", "IB/RoCE v1"
    interface: str  # of the network, or ""


@dataclass(frozen=True)
class Port:
    """One port of a device as the kernel describes it."""

    device: str
    number: int
    active: bool
    ethernet: bool
    lid: int
    gids: tuple[Gid, ...]

    def __str__(self) -> str:
        gid = best_gid(self)
        where = f", {gid.interface or 'gid'} {readable(gid.address)}" if gid else ""
        return f"{self.device}/{self.number} ({'active' if self.active else 'down'}{where})"


@dataclass(frozen=True, kw_only=True)
class VerbsRail:
    """One way out of this host by RDMA: rail k of one rank is connected to rail k of the other. Several rails on one port
    with flow labels of their own are paths through the network (`LinkOptions.hopping`)."""

    device: str
    port: int = 1
    gid_index: int | None = None  # None: the best there is (RoCE v2 over IPv4 first)
    traffic_class: int = 0
    flow_label: int = 0  # decides the route of RoCE traffic through the network; 0: the device's choice

    def __post_init__(self) -> None:
        if not 0 <= self.flow_label < 1 << 20:
            raise ConfigError("flow_label", self.flow_label, "must be 0 to 1048575: it has 20 bits")

    @property
    def udp_port(self) -> int | None:
        """The source port of its RoCE v2 packets, by which switches choose among equal ways; None: the device's choice.

        As InfiniBand's annex 17 has drivers derive it from the flow label of a queue pair's address.
        """
        return 0xC000 | (self.flow_label & 0x3FFF) ^ (self.flow_label >> 14) if self.flow_label else None


def readable(gid: ipaddress.IPv6Address) -> str:
    return str(gid.ipv4_mapped or gid)


def survey(root: Path = SYSFS) -> list[Port]:
    """All ports, in the order of their names; empty where the kernel has no RDMA."""
    names = [(device, number) for device in _list(root) for number in _numbers(f"{root}/{device}/ports")]
    return [_port(root, device, number) for device, number in names]


def _port(root: Path, device: str, number: int) -> Port:
    folder = f"{root}/{device}/ports/{number}"
    return Port(
        device,
        number,
        _is_active(folder),
        _read(f"{folder}/link_layer") == "Ethernet",
        int(_read(f"{folder}/lid") or "0", 16),
        tuple(gid for index in _numbers(f"{folder}/gids") if (gid := _gid(folder, index)) is not None),
    )


def _is_active(folder: str) -> bool:
    return _read(f"{folder}/state").startswith("4")


def port_exists(device: str, number: int, root: Path = SYSFS) -> bool:
    return number in _numbers(f"{root}/{device}/ports")


def is_switched_off(device: str, number: int, root: Path = SYSFS) -> bool:
    """Whether its physical state is "Disabled"; one that looks for the other end of its cable is not."""
    return _read(f"{root}/{device}/ports/{number}/phys_state").startswith("3")


def _gid(folder: str, index: int) -> Gid | None:
    text = _read(f"{folder}/gids/{index}")
    if text in ("", _NO_GID):
        return None
    attributes = f"{folder}/gid_attrs"
    kind, interface = _read(f"{attributes}/types/{index}"), _read(f"{attributes}/ndevs/{index}")
    return Gid(index, ipaddress.IPv6Address(text), kind, interface)


def _list(folder: Path | str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _numbers(folder: str) -> list[int]:
    return sorted(int(name) for name in _list(folder) if name.isdecimal())


def _read(path: str) -> str:
    """A table of GIDs has a thousand entries, most of them unused: some say zeros, some EINVAL."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 256).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)


def best_gid(port: Port) -> Gid | None:
    """RoCE v2 over IPv4, over IPv6, over a link-local address, then whatever there is."""

    def rank(gid: Gid) -> tuple[int, int]:
        if gid.kind != "RoCE v2":
            return 3, gid.index
        if gid.address.ipv4_mapped is not None:
            return 0, gid.index
        return (2 if gid.address.is_link_local else 1), gid.index

    return min(port.gids, key=rank, default=None)


def rails_here(root: Path = SYSFS) -> list[VerbsRail]:
    """Every active port that can be reached, one rail each."""
    return [VerbsRail(device=p.device, port=p.number) for p in survey(root) if p.active and best_gid(p) is not None]


def find_port(rail: VerbsRail, root: Path = SYSFS) -> tuple[Port, Gid]:
    """The port of a rail and the GID it is known by. Raises ConfigError."""
    if not port_exists(rail.device, rail.port, root):
        here = ", ".join(f"{device}/{n}" for device in _list(root) for n in _numbers(f"{root}/{device}/ports")) or "none"
        raise ConfigError("rail", f"{rail.device}/{rail.port}", f"must be an RDMA port of this host, which has {here}")
    port = _port(root, rail.device, rail.port)
    if rail.gid_index is None:
        gid = best_gid(port)
    else:
        gid = next((each for each in port.gids if each.index == rail.gid_index), None)
    if gid is None:
        raise ConfigError("rail", f"{rail.device}/{rail.port}", "must have a GID: give its network interface an address")
    return port, gid


# ---------------------------------------------------------------- opened


class Descriptor:
    """A file descriptor that other code owns, wrapped for waiting."""

    def __init__(self, number: int) -> None:
        self._number = number

    def fileno(self) -> int:
        return self._number

    def close(self) -> None:
        """Its owner does."""


_opening = threading.Lock()


def with_event_descriptor(make: Callable[[], _T]) -> tuple[_T, int]:
    """What `make` makes, and the event descriptor that came with it: not every pyverbs version has it."""
    with _opening:
        before = _event_descriptors()
        made = make()
        new = _event_descriptors() - before
    if len(new) != 1:
        raise OSError(f"expected one new descriptor for verbs events, found {sorted(new)}")
    return made, new.pop()


def _event_descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if _EVENTS in os.readlink(f"/proc/self/fd/{name}"):
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


class Nic:
    """A port, opened. Raises ConfigError if there is none of that name; what pyverbs raises when it cannot be opened."""

    def __init__(self, library: Library, rail: VerbsRail) -> None:
        """Of the rails on one port, any."""
        self.library, self.rail = library, rail
        self.port, self.gid = find_port(rail)
        self.context, self.events = with_event_descriptor(lambda: library.Context(name=rail.device))
        self.domain: Any = None
        try:
            self.domain = library.PD(self.context)
            self.mtu = int(self.context.query_port(rail.port).active_mtu)
            limits = self.context.query_device()
            self.reads = max(1, min(16, int(limits.max_qp_rd_atom), int(limits.max_qp_init_rd_atom)))
        except BaseException:
            self.close()
            raise

    @property
    def lid(self) -> int:
        return self.port.lid

    def look_again(self) -> None:
        """A port that was down has its GID at another place of its table. Raises OSError while it has none."""
        folder = f"{SYSFS}/{self.rail.device}/ports/{self.rail.port}"
        if _gid(folder, self.gid.index) == self.gid:
            return
        port, _ = find_port(self.rail)
        gid = next((g for g in port.gids if (g.address, g.kind) == (self.gid.address, self.gid.kind)), None)
        if gid is None:
            raise OSError(errno.EADDRNOTAVAIL, f"{port} has lost its address {readable(self.gid.address)}")
        self.port, self.gid = port, gid

    def is_active(self) -> bool:
        """Now, as far as the kernel knows."""
        return _is_active(f"{SYSFS}/{self.rail.device}/ports/{self.rail.port}")

    def event(self) -> int:
        """The type of the next asynchronous event; the descriptor must be readable."""
        event = self.context.get_async_event()
        kind = int(event.event_type)
        event.ack()
        return kind

    def close(self) -> None:
        """After everything that was made on it."""
        if self.domain is not None:
            self.domain.close()
        self.context.close()
