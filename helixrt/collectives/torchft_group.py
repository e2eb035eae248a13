"""`ProcessGroupHelix`: a torchft `ProcessGroup`, for any torchft job in one line.

    manager = Manager(pg=ProcessGroupHelix(timeout=timedelta(seconds=30)), …)

In: torchft's `configure` for every quorum. Out: collectives in place, on CPU tensors (CUDA tensors through host
memory). A generation ends with its first error, which `errored` returns until the next `configure`.
"""

from __future__ import annotations

from datetime import timedelta

from helixrt.collectives.deadline import Deadline
from helixrt.collectives.group_lifecycle import GroupLifecycle
from helixrt.collectives.rendezvous import StoreClients, StoreSilent
from helixrt.collectives.work import GroupError
from helixrt.errors import MissingExtra, Retryable
from helixrt.private_api import check_version

try:
    from torchft.process_group import ProcessGroup
except ImportError as error:
    raise MissingExtra("torchft", "ft", "ProcessGroupHelix") from error


class ProcessGroupHelix(GroupLifecycle, ProcessGroup):
    """`timeout` bounds `configure` and every operation that does not bring its own."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:  # noqa: B008, immutable
        check_version("torchft")
        ProcessGroup.__init__(self, 0, 1)
        self._unconfigured(timeout)
        self._stores = StoreClients()

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
    ) -> None:
        """Connect with the other ranks through the store at `store_addr` (host:port/prefix, a new prefix each time). Raises
        GroupError."""
        deadline = Deadline(self._timeout_s)
        try:
            store = self._stores.at(store_addr, deadline.left_s)
        except (Retryable, RuntimeError) as error:
            self.shutdown()
            raise GroupError(f"process group not initialized: {str(error).splitlines()[0]}") from error
        try:
            self._join(store, rank, world_size, f"replica-{replica_id}-{rank}", deadline)
        except GroupError as error:
            if isinstance(error.__cause__, StoreSilent):
                self._stores.forget()
            raise

    def shutdown(self) -> None:
        """As the base's; the connection to the store is released too."""
        super().shutdown()
        self._stores.forget()

    def size(self) -> int:
        return 1 if self._collectives is None else self._collectives.communicator.size

    def rank(self) -> int:
        return 0 if self._collectives is None else self._collectives.communicator.rank

    def getBackendName(self) -> str:  # noqa: N802, torchft's name
        return "torchft-helix"
