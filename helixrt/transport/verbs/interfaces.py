"""Which network interfaces of this host stop working, as the kernel's messages about links tell it (rtnetlink(7)).

In: names and addresses of interfaces to follow. Out: the names of those that went down or lost their carrier since one last
asked; a descriptor to wait on. When an interface is taken down, the kernel reports it here before it runs the notifiers the
last of which fails the RoCE port on it; and the port's asynchronous event, which is all that SHIFT section 4.3 listens to, then
still has to pass a work queue. So this report comes first. Needs no privileges.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_GROUP = 1  # RTMGRP_LINK
_MESSAGE = struct.Struct("=IHHIIBxHiII")  # length, type, three more; family, type of hardware, index, flags, which changed
_INDEX_AT = 20
_NEW, _GONE = 16, 17  # RTM_NEWLINK, which also reports changes, and RTM_DELLINK
_UP, _RUNNING = 0x1, 0x40  # IFF_UP: wanted; IFF_RUNNING: it has a carrier, and may be used
_GET_FLAGS = 0x8913  # SIOCGIFFLAGS
_REQUEST = struct.Struct("16sh22x")  # name, flags
_ATTACH_FILTER = 26  # SO_ATTACH_FILTER
_INSTRUCTION = struct.Struct("=HBBI")  # of a classic BPF program
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_WHOLE = 0xFFFFFFFF  # of a datagram


class Change(NamedTuple):
    number: int  # of the interface
    works: bool


def change(datagram: bytes) -> Change | None:
    """The interface and state in a kernel message; None if it is about something else."""
    if len(datagram) < _MESSAGE.size:
        return None
    _, kind, _, _, _, family, _, number, flags, _ = _MESSAGE.unpack_from(datagram)
    if kind not in (_NEW, _GONE) or family != socket.AF_UNSPEC:  # a bridge's are about its ports
        return None
    return Change(number, kind == _NEW and _works(flags))


def _works(flags: int) -> bool:
    return flags & (_UP | _RUNNING) == _UP | _RUNNING


class Followed:
    """What is known of the interfaces that are followed."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._works: dict[int, bool] = {}

    def add(self, name: str, index: int, works: bool) -> None:
        """Replaces an interface of the same name that was removed and created again."""
        for other in [other for other, known in self._names.items() if known == name]:
            del self._names[other], self._works[other]
        self._names[index], self._works[index] = name, works

    def heard(self, said: Change) -> str | None:
        """The interface's name, if it worked until now."""
        worked = self._works.get(said.number)
        if worked is None:
            return None
        self._works[said.number] = said.works
        return self._names[said.number] if worked and not said.works else None

    def works(self, name: str) -> bool:
        return any(self._works[number] for number, known in self._names.items() if known == name)

    def __contains__(self, one: tuple[int, str]) -> bool:
        return self._names.get(one[0]) == one[1]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        return iter(list(self._names.items()))


class Interfaces:
    """Raises OSError where the kernel does not allow this socket."""

    def __init__(self) -> None:
        self._followed = Followed()
        self._kernel = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE
        )
        try:
            self._listen_to([])
            self._kernel.bind((0, _GROUP))
        except BaseException:
            self._kernel.close()
            raise

    def fileno(self) -> int:
        return self._kernel.fileno()

    def follow(self, name: str, address: ipaddress.IPv6Address) -> None:
        """Raises OSError when no interface of that name and address is in this process's network namespace."""
        index = socket.if_nametoindex(name)
        check_ours(address, index)
        if (index, name) not in self._followed:
            self._listen_to({index, *(other for other, known in self._followed if known != name)})
            self._followed.add(name, index, _looks(name))

    def failed(self) -> list[str]:
        """Some of those that worked and have stopped to since one last asked, if only for a moment. To be called when the
        descriptor is readable, which it is until all messages were read."""
        try:
            datagram, (sender, _) = self._kernel.recvfrom(_MESSAGE.size)  # and not its attributes
        except BlockingIOError:
            return []
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            said = [Change(index, _looks(name)) for index, name in self._followed]  # as what is lost must have said
        else:
            found = change(datagram) if sender == 0 else None  # 0: the kernel
            said = [] if found is None else [found]
        return [name for each in said if (name := self._followed.heard(each)) is not None]

    def works(self, name: str) -> bool:
        """The last reported state; False if the interface is not followed."""
        return self._followed.works(name)

    def _listen_to(self, indices: Iterable[int]) -> None:
        """Nothing else wakes this process, of what goes on in a host with many interfaces."""
        wanted = [struct.unpack(">I", struct.pack("=i", index))[0] for index in indices]  # words are loaded so
        steps = [(_LOAD_WORD, 0, 0, _INDEX_AT)]
        steps += [(_JUMP_IF_EQUAL, len(wanted) - at, 0, value) for at, value in enumerate(wanted)]
        steps += [(_RETURN, 0, 0, 0), (_RETURN, 0, 0, _WHOLE)]
        program = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*step) for step in steps))
        self._kernel.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", len(steps), ctypes.addressof(program)))

    def close(self) -> None:
        self._kernel.close()


def _looks(name: str) -> bool:
    """Whether it works now; False if it is gone."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            (flags,) = struct.unpack_from("=H", fcntl.ioctl(asked, _GET_FLAGS, _REQUEST.pack(name.encode(), 0)), 16)
        except OSError:
            return False
    return _works(flags)


def check_ours(address: ipaddress.IPv6Address, index: int) -> None:
    """RDMA devices may be seen from namespaces that their interfaces are not in, where another may have the same name."""
    old = address.ipv4_mapped
    with socket.socket(socket.AF_INET6 if old is None else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind((str(address), 0, 0, index if address.is_link_local else 0) if old is None else (str(old), 0))
