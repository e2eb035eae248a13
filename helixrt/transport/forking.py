"""Endpoints in a forked child: sockets, epolls and shared memory are the parent's, and the child lets go without a trace.

In: every endpoint when it is made. Out: its `disown`, called in each child that is forked while the endpoint exists.
"""

from __future__ import annotations

import functools
import os
import weakref
from typing import Protocol


class Disownable(Protocol):
    def disown(self) -> None:
        """In a forked child: close its copies of descriptors and be closed; nothing is said to a peer, nothing is taken
        out of an epoll or written into memory that the parent still uses. Idempotent."""


_living: weakref.WeakSet[Disownable] = weakref.WeakSet()


def disown_in_children(endpoint: Disownable) -> None:
    """For the lifetime of `endpoint`; holds no reference to it."""
    _call_in_forked_children()
    _living.add(endpoint)


@functools.cache
def _call_in_forked_children() -> None:
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    for endpoint in list(_living):
        endpoint.disown()
