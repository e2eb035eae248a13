"""How the ranks of a group find each other: addresses, exchanged through a c10d store.

In: a store prefix that is unique to the generation, and this rank's address. Out: everyone's address, and the
generation they agree on. The store is trusted as part of the cluster (DESIGN.md, "Security"): a group that was given
no secret agrees on one there, which who reads the store does not learn (`group_secret`). A client of it waits without
limit for a server that is stopped or cut off, so everything that asks the store goes through `in_time`.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.group_secret import GroupSecret
from helixrt.collectives.lost_hosts import ends_when_lost
from helixrt.errors import Cause, Retryable

# For a connection to the store. torch first asks for the host name of the store's address, until that has failed once in the
# process. A name server that does not answer takes 10 s of it (the default of resolv.conf); this is for two of them.
STORE_CONNECT_S = 25.0
_LISTENS_S = 4.0  # of it, within which a server must listen there: one that is gone may come back
_LOOK_S = 0.1

_Answer = TypeVar("_Answer")

_POLL_S = 0.001
_SLOWEST_POLL_S = 0.02
_POLL_PART = 0.1  # of the time waited so far: how much longer it may take to notice the end
_LEAST_S = 0.01  # of a store's own limits
_GRACE_S = 0.25  # for a wait in the store that ends by itself at the deadline, with a better message than a time-out
_MOST_LOOKS_PER_S = 5000.0  # of all ranks that wait, at the store
_ADDRESSES, _SECRETS = "addresses", "secrets"
_FORGET_S = 1.0
_GENERATION, _LENGTH = struct.Struct("<q"), struct.Struct("<I")


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
    deadline: Deadline,
    aborted: Callable[[], bool],
) -> Meeting:
    """Publish `address`, wait for all others.

    `generation` is this rank's proposal; the greatest one counts for all, so it grows for everyone.
    Raises Retryable, naming who is missing, at the deadline or when `aborted()`; StoreSilent as `in_time`; a RuntimeError of
    the store passes through.
    """
    if size == 1:
        return Meeting(generation, {})

    def publish_and_wait() -> Meeting:
        if aborted():
            raise Retryable(Cause("aborted"))
        keys = [f"address/{r}" for r in range(size)]
        put: Any = store  # typed for text, takes bytes
        put.set(keys[rank], _GENERATION.pack(generation) + address)
        published = _gathered(store, rank, keys, _ADDRESSES, deadline, aborted)
        generations = [_GENERATION.unpack_from(value)[0] for value in published]
        peers = {r: value[_GENERATION.size :] for r, value in enumerate(published) if r != rank}
        return Meeting(max(generations), peers)

    return in_time(publish_and_wait, deadline, aborted)


def all_connected(store: dist.Store, rank: int, size: int, deadline: Deadline, aborted: Callable[[], bool]) -> None:
    """Wait until all ranks have come so far: one that leaves at once must not be missed by who still connects.

    Raises as `meet`.
    """

    def publish_and_wait() -> None:
        keys = [f"connected/{r}" for r in range(size)]
        store.set(keys[rank], "1")
        _gathered(store, rank, keys, "all-connected", deadline, aborted)
        forget_addresses(store, rank)

    if size > 1:
        in_time(publish_and_wait, deadline, aborted)


def forget_addresses(store: dist.Store, rank: int) -> bool:
    """After `meet`, once this rank knows that all others are connected, and so have read them: else the store of a long run
    would grow with each group. A store that does not answer soon keeps them; False then: ask it by another connection."""
    try:
        if rank == 0:
            in_time(lambda: [store.delete_key(key) for key in (_ADDRESSES, _SECRETS)], Deadline(_FORGET_S))
    except (StoreSilent, RuntimeError):  # RuntimeError: torch's errors of a store
        return False
    return True


def _gathered(
    store: dist.Store,
    rank: int,
    keys: list[str],
    together: str,
    deadline: Deadline,
    aborted: Callable[[], bool],
    joined: Callable[[list[bytes]], list[bytes]] = lambda found: found,
) -> list[bytes]:
    """What `joined` makes of what stands under `keys`, one of each rank, once all have set theirs. Rank 0 looks at all of them,
    and puts it under the key `together`, the only one that the others look at: so a look costs the store as much as there are
    ranks, and not the square. The keys of the ranks are deleted then, since a run forms many groups in one store."""
    if rank > 0:
        _await(store, [together], keys, deadline, aborted)
        return _parts(bytes(store.get(together)))
    _await(store, keys, keys, deadline, aborted)
    found = joined([bytes(value) for value in store.multi_get(keys)])
    put: Any = store
    put.set(together, b"".join(_LENGTH.pack(len(part)) + part for part in found))
    for key in keys:
        store.delete_key(key)
    return found


def _parts(packed: bytes) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        found.append(packed[at : at + length])
        at += length
    return found


class StoreSilent(Retryable):
    """The store does not answer. A thread may wait for it until its connection breaks: ask by another connection."""


def in_time(ask: Callable[[], _Answer], deadline: Deadline, aborted: Callable[[], bool] = lambda: False) -> _Answer:
    """What `ask` returns or raises; StoreSilent if that takes until the deadline, or until soon after `aborted()`.

    `ask` runs in a thread of its own, which cannot be ended while it waits for the store.
    """
    came: list[_Answer] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            came.append(ask())
        except BaseException as error:  # handed to the caller
            failed.append(error)
        done.set()

    thread = threading.Thread(target=run, name="helixrt-rendezvous", daemon=True)
    thread.start()
    while not done.wait(_SLOWEST_POLL_S):
        if done.wait(_GRACE_S if aborted() or deadline.over else 0.0):
            break
        if aborted():
            raise StoreSilent(Cause("aborted"))
        if deadline.over:
            raise StoreSilent(f"the store did not answer within {deadline.limit_s:g} s")
    thread.join()
    if failed:
        raise failed.pop()  # no variable holds it: that would be a reference cycle with its frame
    return came[0]


def _await(store: dist.Store, keys: list[str], ranks: list[str], deadline: Deadline, aborted: Callable[[], bool]) -> None:
    """Until all of `keys` are set. `ranks`: the key that each rank sets, for the message about missing ranks."""
    begin = time.monotonic()
    slowest_s = max(_SLOWEST_POLL_S, len(ranks) / _MOST_LOOKS_PER_S)
    while not store.check(keys):
        if aborted():
            raise Retryable(Cause("aborted"))
        if deadline.over:
            missing = _missing(store, ranks, range(len(ranks)))
            if store.check(keys):  # it was set just now, and the keys of the ranks were deleted
                return
            what = f"members number {missing} of {len(ranks)} did not come within {deadline.limit_s:g} s"
            raise Retryable(Cause(what, peers=tuple(missing)))
        time.sleep(min(max(_POLL_S, _POLL_PART * (time.monotonic() - begin)), slowest_s))


def _missing(store: dist.Store, ranks: list[str], among: range) -> list[int]:
    """Which ranks among these have not set their key. Few missing ones are found in few looks."""
    if not among or store.check([ranks[rank] for rank in among]):
        return []
    if len(among) == 1:
        return [among[0]]
    half = len(among) // 2
    return _missing(store, ranks, among[:half]) + _missing(store, ranks, among[half:])


def agreed_secret(store: dist.Store, rank: int, size: int, deadline: Deadline, aborted: Callable[[], bool]) -> str:
    """A secret of the ranks of this generation, before `meet`. Raises as that does."""
    own = GroupSecret()

    def publish_and_wait() -> str:
        keys = [f"public/{r}" for r in range(size)]
        put: Any = store
        put.set(keys[rank], own.public)
        return own.opened(rank, _gathered(store, rank, keys, _SECRETS, deadline, aborted, own.sealed))

    return own.opened(0, ()) if size == 1 else in_time(publish_and_wait, deadline, aborted)


def store_client(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """A client of the c10d store there, which need not listen yet; calls end as `lost_hosts` says. Raises dist.DistError
    without an answer.

    torch alone would try for twice `timeout_s`, with pauses as long, where nobody listens.
    """
    deadline = Deadline(min(timeout_s, _LISTENS_S))
    while True:
        try:
            with socket.create_connection((host, port), max(deadline.left_s, _LEAST_S)) as probe:
                server = probe.getpeername()
            break
        except (OSError, OverflowError) as error:
            if deadline.left_s <= _LOOK_S:
                raise dist.DistNetworkError(f"no connection to {host}:{port}: {error}") from error
            time.sleep(_LOOK_S)
    timeout = timedelta(seconds=max(timeout_s, _LEAST_S))
    return ends_when_lost(server, lambda: dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout))


class StoreClients:
    """Clients of c10d stores by `host:port/prefix`, the last connection kept: the same store serves many generations.

    A generation that does not connect leaves its addresses in the store. They are deleted once a later one has connected: a
    member that comes late to the earlier one fails at once as long as it finds them. To be used by one thread.
    """

    def __init__(self) -> None:
        self._last: tuple[str, dist.TCPStore] | None = None
        self._begun: list[tuple[str, int, int]] = []  # rendezvous, rank, size: may have left addresses

    def at(self, rendezvous: str, timeout_s: float, aborted: Callable[[], bool] = lambda: False) -> dist.Store:
        """The store at `rendezvous`, below its prefix. Raises RuntimeError or Retryable without an answer."""
        address, _, prefix = rendezvous.partition("/")
        if self._last is None or self._last[0] != address:
            host, _, port = address.rpartition(":")

            def connect() -> dist.TCPStore:
                return store_client(host.strip("[]"), int(port), timeout_s)

            self._last = (address, in_time(connect, Deadline(timeout_s), aborted))
        return dist.PrefixStore(prefix, self._last[1])

    def forget(self) -> None:
        """Drop the connection: it may be broken."""
        self._last = None

    def begins(self, rendezvous: str, rank: int, size: int) -> None:
        """This rank is about to `meet` the others there."""
        self._begun.append((rendezvous, rank, size))

    def connected(self, store: dist.Store, rank: int) -> None:
        """All ranks of the generation that began last, at `store`, are connected: delete its addresses, and soon those that
        earlier ones have left. Each rank deletes its own, rank 0 those of all: members may have ended."""
        if self._last is None or not forget_addresses(store, rank):
            self.forget()
            return  # this generation's are deleted later
        address, client = self._last
        begun, self._begun = self._begun[:-1], []
        left: list[tuple[dist.Store, list[str]]] = []
        for rendezvous, number, size in begun:
            host, _, prefix = rendezvous.partition("/")
            if host == address:
                numbers = range(size) if rank == 0 else [number]
                keys = [f"address/{r}" for r in numbers] + ([_ADDRESSES] if 0 in numbers else [])
                left.append((dist.PrefixStore(prefix, client), keys))
        if left:
            threading.Thread(target=_delete_all, args=(left,), name="helixrt-rendezvous", daemon=True).start()


def _delete_all(left: list[tuple[dist.Store, list[str]]]) -> None:
    """In a thread of its own, so that no call waits for the store."""
    with suppress(RuntimeError):  # torch's errors of a store
        for store, keys in left:
            for key in keys:
                store.delete_key(key)
