"""Detects which ports in use fail and which are active again, from the first of the two reports of the kernel.

In: opened ports (`devices.Nic`), each with the place it has in the endpoint. Out: calls. Verbs' asynchronous events tell of
everything; the failure of a RoCE port's network interface is reported sooner (`interfaces`), if it is reported at all: the
interface may be in another network namespace, and InfiniBand has none. A port is active again when verbs say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from helixrt.transport.tcp.watch import READ, Watch
from helixrt.transport.verbs.devices import Descriptor, Nic
from helixrt.transport.verbs.failure import port_failed
from helixrt.transport.verbs.interfaces import Interfaces

Place = tuple[str, int, int | None]  # a device, its port, and the GID the port is used by

_log = logging.getLogger("helixrt.transport")


class PortWatch:
    """`failed(place, reason)` once for each failure, and `mended(place)`."""

    def __init__(self, watch: Watch, failed: Callable[[Place, str], None], mended: Callable[[Place], None]) -> None:
        self._watch, self._failed, self._mended = watch, failed, mended
        self._ports: dict[Place, tuple[Nic, Descriptor]] = {}
        self._interfaces: Interfaces | None = None
        self._told: set[Place] = set()  # their interfaces failed, and verbs have not said so yet: there is no hurry

    def add(self, place: Place, nic: Nic) -> None:
        """Whenever it goes into service: its interface may be another one by now."""
        if place not in self._ports:
            self._ports[place] = nic, Descriptor(nic.events)
            self._watch.add(self._ports[place][1], READ, lambda mask: self._event(place, nic), urgent=True)
        if nic.port.ethernet and nic.gid.interface:
            try:
                self._follow(nic.gid.interface, nic)
            except OSError as error:
                _log.debug("%s: only verbs tell of its failures, not its network interface: %s", nic.port, error)

    def _follow(self, name: str, nic: Nic) -> None:
        if self._interfaces is None:
            self._interfaces = Interfaces()
            self._watch.add(self._interfaces, READ, lambda mask: self._interface_event(), urgent=True)
        self._interfaces.follow(name, nic.gid.address)

    def _interface_event(self) -> None:
        assert self._interfaces is not None
        try:
            names = self._interfaces.failed()
        except OSError as error:
            _log.debug("only verbs tell of the failures of ports from now on: %s", error)
            self._watch.remove(self._interfaces)
            self._interfaces.close()
            self._interfaces = None
            return
        for name in names:
            for place, (nic, descriptor) in list(self._ports.items()):
                if nic.gid.interface == name:
                    self._told.add(place)
                    self._watch.calm(descriptor)
                    self._failed(place, f"its network interface {name} is down")

    def _event(self, place: Place, nic: Nic) -> None:
        library = nic.library
        kind = nic.event()
        was_told = place in self._told
        if kind in (library.enums.EVENT_PORT_ACTIVE, library.enums.EVENT_PORT_ERR):
            self._told.discard(place)
            self._watch.hurry(self._ports[place][1], READ)
        if kind == library.enums.EVENT_PORT_ACTIVE:
            self._mended(place)
            return
        reason = port_failed(kind, library.enums)
        if reason is None or (was_told and kind == library.enums.EVENT_PORT_ERR and self._is_back(nic)):
            return  # reported already; the port may be in service again
        self._failed(place, reason)

    def _is_back(self, nic: Nic) -> bool:
        """The kernel is asked last: while an interface goes down, a query of its port blocks."""
        return self._interfaces is not None and self._interfaces.works(nic.gid.interface) and nic.is_active()

    def close(self) -> None:
        """Before the ports."""
        for _, descriptor in self._ports.values():
            self._watch.remove(descriptor)
        self._ports.clear()
        if self._interfaces is not None:
            self._watch.remove(self._interfaces)
            self._interfaces.close()
