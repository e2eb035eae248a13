"""How the ranks of a group find each other: addresses, exchanged through a c10d store.

In: a store prefix that is unique to the generation, and this rank's address. Out: everyone's address, and the
generation they agree on. The store is trusted as part of the cluster (DESIGN.md, "Security"): a group that was given
no secret takes one from there.
"""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from helixrt.errors import Cause, Retryable

_POLL_S = 0.001
_SLOWEST_POLL_S = 0.02
_POLL_PART = 0.1  # of the time waited so far: how much longer it may take to notice the end
_GENERATION = struct.Struct("<q")


@dataclass(frozen=True)
class Meeting:
    """Who came: `peers` has no entry for this rank."""

    generation: int
    peers: dict[int, bytes]


def meet(
    store: dist.Store,
    rank: int,
    size: int,
    address: bytes,
    generation: int,
    timeout_s: float,
    aborted: Callable[[], bool],
) -> Meeting:
    """Publish `address`, wait for all others.

    `generation` is this rank's proposal; the greatest one counts for all, so it grows for everyone.
    Raises Retryable, naming who is missing, after `timeout_s` seconds or when `aborted()`; a RuntimeError of
    the store passes through.
    """
    if size == 1:
        return Meeting(generation, {})
    keys = [f"address/{r}" for r in range(size)]
    put: Any = store  # typed for text, takes bytes
    put.set(keys[rank], _GENERATION.pack(generation) + address)
    _await(store, keys, timeout_s, aborted)
    published = [bytes(value) for value in store.multi_get(keys)]
    generations = [_GENERATION.unpack_from(value)[0] for value in published]
    peers = {r: value[_GENERATION.size :] for r, value in enumerate(published) if r != rank}
    return Meeting(max(generations), peers)


def all_connected(store: dist.Store, rank: int, size: int, timeout_s: float, aborted: Callable[[], bool]) -> None:
    """Wait until all ranks have come so far: one that leaves at once must not be missed by who still connects.

    Raises as `meet`.
    """
    if size > 1:
        keys = [f"connected/{r}" for r in range(size)]
        store.set(keys[rank], "1")
        _await(store, keys, timeout_s, aborted)


def _await(store: dist.Store, keys: list[str], timeout_s: float, aborted: Callable[[], bool]) -> None:
    """Until every rank has set its key."""
    begin = time.monotonic()
    deadline = begin + timeout_s
    while not store.check(keys):
        if aborted():
            raise Retryable(Cause("aborted"))
        if time.monotonic() > deadline:
            missing = [r for r in range(len(keys)) if not store.check([keys[r]])]
            what = f"members number {missing} of {len(keys)} did not come within {timeout_s:g} s"
            raise Retryable(Cause(what, peers=tuple(missing)))
        time.sleep(min(max(_POLL_S, _POLL_PART * (time.monotonic() - begin)), _SLOWEST_POLL_S))


def shared_secret(store: dist.Store) -> str:
    """A secret that all ranks of `store` have: the first one to ask makes it."""
    return bytes(store.compare_set("helix/secret", "", secrets.token_hex(32))).decode()


class StoreClients:
    """Clients of c10d stores by `host:port/prefix`, the last connection kept: the same store serves many generations."""

    def __init__(self) -> None:
        self._last: tuple[str, dist.TCPStore] | None = None

    def at(self, rendezvous: str, timeout_s: float) -> dist.Store:
        """The store at `rendezvous`, below its prefix. Raises RuntimeError when nobody answers."""
        address, _, prefix = rendezvous.partition("/")
        if self._last is None or self._last[0] != address:
            host, _, port = address.rpartition(":")
            timeout = timedelta(seconds=timeout_s)
            client = dist.TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
            self._last = (address, client)
        return dist.PrefixStore(prefix, self._last[1])

    def forget(self) -> None:
        """Drop the connection: it may be broken."""
        self._last = None
