"""The memory that two ranks of one host share: an unnamed file that neither end can shrink under the other.

In: a size. Out: a descriptor to hand over a Unix socket, and a check of the one that came. It disappears with its last mapping.
"""

from __future__ import annotations

import fcntl
import os
import stat

# Values of <linux/fcntl.h>; Python names some of them only from 3.12 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4
_SEALS = _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW


def make_memory(size: int) -> int:
    """A descriptor of so many zeroed bytes. Raises OSError."""
    descriptor = os.memfd_create("helixrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_memory(descriptor: int, size: int) -> None:
    """Raises ValueError unless it is such memory: else an access could end this process."""
    try:
        found = os.fstat(descriptor)
        seals = fcntl.fcntl(descriptor, _F_GET_SEALS)
    except OSError as error:
        raise ValueError("a descriptor that is no memory") from error
    if not stat.S_ISREG(found.st_mode) or found.st_size != size or seals & _SEALS != _SEALS:
        raise ValueError(f"memory of {found.st_size} bytes with seals {seals}: {size} and {_SEALS} were expected")
