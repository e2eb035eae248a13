"""The gradient exchange over torchft's Gloo process group.

In: flat CPU tensors, equal lengths on all members, and a rendezvous in the run's TCPStore.
Out: their sum in another tensor, the same bits on every member.

`configure` has two phases. In the first, members put the address of their Gloo device into the
store and poll for the others', which an abort ends at once; in the second, everyone being there,
Gloo connects, on a thread of its own so that an abort need not wait for it either.
`abort` ends the connections of the group: the running all-reduce then fails at once, here and at
the neighbours, and nothing is left that could still write into `out`. A member that fails ends its
connections too, so that one loss runs through the whole ring.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.endpoints import interface_towards
from helixrt.collectives.exchange import Exchange, rank_among
from helixrt.collectives.gloo_private import GlooConnections, GlooDevice, make_group, pack_address, unpack_address
from helixrt.collectives.rendezvous import STORE_CONNECT_S, StoreClients, StoreSilent, meet
from helixrt.errors import Cause, Retryable

_CONNECT_S = 4.0  # once all members are there, connecting takes milliseconds
_LEAST_S = 0.01  # of Gloo's own limits


class GlooExchange(Exchange):
    """An `Exchange` for one rank. `timeout_s` bounds each `configure`, in all, and each all-reduce; see `Timeouts.exchange_s`.

    Binds to the interface that leads to the store's host: loopback in local runs.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._device: GlooDevice | None = None
        self._stores = StoreClients()
        self._group: Any = None
        self._size = 0
        self._label = "exchange"
        self._options = dist.AllreduceOptions()
        self._options.timeout = timedelta(seconds=timeout_s)
        self._connections: GlooConnections | None = None
        self._aborted = threading.Event()
        self._highest = -1  # generation that was aborted
        self._lock = threading.Lock()  # of the connections and of the decision to end them
        self._connecting: list[threading.Thread] = []

    def configure(self, generation: int, members: Sequence[int], me: int, rendezvous: str) -> None:
        deadline = Deadline(self._timeout_s)  # of everything below
        rank, size = rank_among(members, me), len(members)
        self._drop()
        with self._lock:
            self._aborted.clear()
            if generation <= self._highest:  # `abort` came before
                self._aborted.set()
            self._connections = None
        self._label = f"exchange of generation {generation}"
        if size > 1:
            try:
                self._group = self._connect(generation, rank, size, rendezvous, deadline)
            except (Retryable, RuntimeError) as error:  # torch's DistError is one
                self._fail(error)
        self._size = size

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        if self._aborted.is_set() or self._size == 0:
            raise Retryable(f"{self._label} was aborted" if self._size else "the exchange is not configured")
        with torch.no_grad():
            if divisor == 1:
                out.copy_(source)
            else:  # on the way, so that it costs no pass of its own
                torch.div(source, divisor, out=out)
        if self._size == 1:
            return
        try:
            self._group.allreduce([out.detach()], self._options).wait()
        except RuntimeError as error:
            self._fail(error)
        # Success and abort may cross; to the caller an aborted generation never succeeds.
        if self._aborted.is_set():
            raise Retryable(f"{self._label} was aborted")

    def abort(self, generation: int = -1) -> None:
        with self._lock:
            self._highest = max(self._highest, generation)
            self._aborted.set()
            self._end_connections()

    def close(self) -> None:
        self.abort()
        self._drop()
        deadline = time.monotonic() + _CONNECT_S
        for thread in self._connecting:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._connecting.clear()
        self._device = None
        self._stores.forget()

    def _fail(self, error: BaseException) -> None:
        """Raise the failure as Retryable, and pass it on to the neighbours."""
        aborted = self._aborted.is_set()
        with self._lock:
            self._aborted.set()
            self._end_connections()
        reason = "was aborted" if aborted else f"failed: {str(error).splitlines()[0] if str(error) else error!r}"
        raise Retryable(Cause(f"{self._label} {reason}")) from error

    def _end_connections(self) -> None:
        if self._connections is not None:
            self._connections.shut_down()

    def _drop(self) -> None:
        """Release the last generation. Nothing runs on its group, so this does not block."""
        with self._lock:
            if self._group is not None:
                self._end_connections()
        self._group, self._size = None, 0

    def _connect(self, generation: int, rank: int, size: int, rendezvous: str, deadline: Deadline) -> Any:
        try:
            return self._meet_and_connect(generation, rank, size, rendezvous, deadline)
        except StoreSilent:
            self._stores.forget()
            raise

    def _meet_and_connect(self, generation: int, rank: int, size: int, rendezvous: str, deadline: Deadline) -> Any:
        aborted = self._aborted.is_set
        store = self._stores.at(rendezvous, min(STORE_CONNECT_S, deadline.left_s), aborted)
        if self._device is None:
            self._device = GlooDevice(interface_towards(rendezvous.partition("/")[0]))
        self._stores.begins(rendezvous, rank, size)
        mine = pack_address(self._device.address)  # phase one: everyone's is in the store
        peers = meet(store, rank, size, mine, generation, deadline, aborted).peers
        if self._device.known:
            try:
                known = [address for address in map(unpack_address, peers.values()) if address[1]]
            except ValueError as error:
                raise Retryable(f"a member's address is none: {error}") from error
            with self._lock:
                self._connections = GlooConnections(self._device.address, known)
        group = self._join_group(store, rank, size, max(_LEAST_S, min(_CONNECT_S, deadline.left_s)))
        self._stores.connected(store, rank)
        with self._lock:
            if self._connections is not None:
                self._connections.connected()
        return group

    def _join_group(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> Any:
        """Phase two: Gloo connects, while this thread watches for an abort."""
        made: list[Any] = []
        failed: list[BaseException] = []
        done = threading.Event()
        device = self._device
        assert device is not None

        def connect() -> None:
            try:
                made.append(make_group(device, store, rank, size, timeout_s, self._label))
            except BaseException as error:
                # Its frames hold the store's connection, and they would hold it in a cycle with this list.
                failed.append(error.with_traceback(None))
            done.set()

        thread = threading.Thread(target=connect, name="helixrt-gloo-connect", daemon=True)
        self._connecting = [t for t in self._connecting if t.is_alive()] + [thread]
        thread.start()
        while not done.wait(0.02):
            if self._aborted.is_set():
                self._stores.forget()  # the thread may hold its connection until it gives up
                raise RuntimeError("aborted")
        thread.join(_CONNECT_S)
        if failed:
            if isinstance(failed[0], RuntimeError):
                self._stores.forget()
            raise failed.pop()  # no variable holds it: that would be a reference cycle with its frame
        if self._aborted.is_set():  # its connections may have come after those that abort ended
            with self._lock:
                self._end_connections()
            raise RuntimeError("aborted")
        return made[0]
