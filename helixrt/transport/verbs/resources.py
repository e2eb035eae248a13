"""Giving up what pyverbs made, and never giving it up where that would end the process.

In: queue pairs, NICs, an endpoint. Out: closed resources, or ones that live until the process ends.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Protocol

_log = logging.getLogger("helixrt.transport")


class Resource(Protocol):
    def close(self) -> None: ...


def give_up(resource: Resource) -> None:
    """What a broken device does not give back is the kernel's when the process ends."""
    try:
        resource.close()
    except Exception as error:  # pyverbs raises several kinds
        _log.warning("giving up an RDMA resource: %s", error)


def keep_for_ever(owner: object) -> None:
    """Neither it nor what it holds is collected: pyverbs would close that."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
