"""The fault-tolerant all-reduce between replicas (FT-HSDP section 4.2), as an `Exchange`.

In: flat tensors of equal length on all members, and a rendezvous in the run's store, through which members
exchange the addresses of their endpoints. Out: the sum in another tensor, the same bits on every member.
Out of place: the source is never written, so a broken exchange is tried again with the survivors.

One lost member, or one that calls `abort`, ends the generation for all within milliseconds: each
survivor sends the cause to its peers, and the first cause stays readable.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.endpoints import communicator_over
from helixrt.collectives.exchange import Exchange, rank_among
from helixrt.collectives.handle import End
from helixrt.collectives.memory import flat
from helixrt.collectives.operations import Collectives, How
from helixrt.collectives.reduction import Op, Reduction
from helixrt.collectives.rendezvous import STORE_CONNECT_S, StoreClients, StoreSilent, meet
from helixrt.errors import Cause, Fatal, Retryable
from helixrt.protocol.collective.algorithms.layout import Tuning
from helixrt.transport.contract import Endpoint


class FtarExchange(Exchange):
    """An `Exchange` for one rank, over `endpoint`, which it owns.

    `timeout_s` bounds each `configure`, in all, and each all-reduce; see `Timeouts.exchange_s`. `huge_pages`: the owner of
    the tensors consents to huge pages for them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        timeout_s: float,
        tuning: Tuning | None = None,
        name: str = "exchange",
        huge_pages: bool = False,
    ) -> None:
        self._communicator = communicator_over(endpoint, tuning, name)
        if huge_pages:
            self._communicator.use_huge_pages()
        self._collectives = Collectives(self._communicator)
        self._timeout_s = timeout_s
        self._stores = StoreClients()
        self._label = "exchange"
        self._configured = False
        self._aborted = -1  # the highest generation that was aborted
        self._members: tuple[int, ...] = ()

    def configure(self, generation: int, members: Sequence[int], me: int, rendezvous: str) -> None:
        deadline = Deadline(self._timeout_s)  # of everything below
        rank, size = rank_among(members, me), len(members)
        communicator = self._communicator
        communicator.begin()
        if generation <= self._aborted:  # `abort` came before
            communicator.abort(Cause("aborted"))
        self._configured, self._members = True, tuple(members)
        self._label = f"exchange of generation {generation}"
        try:
            peers: dict[int, bytes] = {}
            if size > 1:
                aborted = lambda: communicator.failure is not None  # noqa: E731
                store = self._stores.at(rendezvous, min(STORE_CONNECT_S, deadline.left_s), aborted)
                self._stores.begins(rendezvous, rank, size)
                peers = meet(store, rank, size, communicator.address, generation, deadline, aborted).peers
            communicator.configure(generation, rank, peers, deadline.left_s)
            if size > 1:
                self._stores.connected(store, rank)
        except (StoreSilent, RuntimeError) as error:  # RuntimeError: torch's errors of a store
            self._stores.forget()
            self._fail(error)
        except Retryable as error:
            self._fail(error)

    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        self._sum([(source, out)], divisor)

    def all_reduce_together(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        self._sum(list(zip(sources, outs, strict=True)))

    def _sum(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], divisor: int = 1) -> None:
        if not self._configured:
            raise Retryable("the exchange is not configured")
        how, reduction = How(self._timeout_s, waits=True), Reduction(Op.SUM, divisor)
        try:
            for handle in [self._collectives.all_reduce(flat(source), flat(out), reduction, how) for source, out in pairs]:
                handle.wait()
        except Retryable as error:
            self._fail(error)
        # Success and abort may cross; to the caller an aborted generation never succeeds. A member that is lost once all has
        # arrived is another matter: the others may have this sum, and a step committed with it.
        if (failure := self._communicator.failure) is not None and failure.end is End.ABORTED:
            self._fail(failure)

    def abort(self, generation: int = -1) -> None:
        self._aborted = max(self._aborted, generation)
        self._communicator.abort(Cause("aborted"))

    def close(self) -> None:
        self._communicator.close()
        self._stores.forget()

    def _fail(self, error: BaseException) -> None:
        """Raise it with the generation, which is over: as Fatal if this rank's own device failed, else as Retryable."""
        first = self._communicator.failure or error
        cause = first.cause if isinstance(first, Retryable) else Cause(str(first).splitlines()[0] or repr(first))
        self._communicator.abort(cause)
        what = "was aborted" if cause.what == "aborted" else f"failed: {cause.what}"
        if cause.own_device:
            raise Fatal(Cause(f"{self._label} {what}; this rank's own network device failed", cause.rank, cause.log)) from error
        peers = tuple(self._members[rank] for rank in cause.peers)
        raise Retryable(Cause(f"{self._label} {what}", cause.rank, cause.log, peers)) from error
