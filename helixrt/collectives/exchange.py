"""The seam between a replica and its gradient exchange, whatever runs it.

In: flat tensors of equal length on every member. Out: their sum, in another tensor; the input is
preserved, so that a broken exchange can be retried among the survivors (DESIGN, step 3).
FTAR implements it (`ftar.py`), and torchft's Gloo group (`gloo.py`), for comparison.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Exchange(ABC):
    """Sums tensors of equal ranks across the replicas of one generation.

    Calls come from one thread, except `abort`, which may come from any thread at any time.
    All members call `all_reduce` with the same sequence of lengths.
    """

    @abstractmethod
    def configure(self, generation: int, members: Sequence[int], me: int, rendezvous: str) -> None:
        """Connect to the members (sorted replica ids, `me` among them); drops what was there before.

        `rendezvous` is a `host:port/prefix` address of the run's store, unique to (generation, group rank).
        Raises Retryable when a member does not come in time; `cause.peers` are the replica ids of such members.
        """

    @abstractmethod
    def all_reduce(self, source: torch.Tensor, out: torch.Tensor, divisor: int = 1) -> None:
        """Put the sum over members of `source / divisor` (any shape, contiguous) into `out`; blocks.

        Every member gets the same bits. `source` is left as it was.
        Raises Retryable as soon as `abort` was called, or a member is lost that has not sent all of its part; `out` is then
        undefined, and `cause.peers` are the replica ids of members that this one found silent or gone itself, if it can tell.
        Raises Fatal when this rank's own network device failed and no other way is left: the process should end.
        """

    def all_reduce_together(self, sources: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """`all_reduce` of each, in this order; a member may do the same by single calls. An exchange that can have several
        under way waits for all of them at once: that saves waits for the other members."""
        for source, out in zip(sources, outs, strict=True):
            self.all_reduce(source, out)

    @abstractmethod
    def abort(self, generation: int = -1) -> None:
        """Make the running and every later call of this generation raise Retryable, at once; also a `configure` of
        `generation`, or of one before it, that begins later."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads; idempotent."""


def rank_among(members: Sequence[int], me: int) -> int:
    """Which of the members this one is, from 0. Raises ValueError for members that no generation has."""
    if sorted(set(members)) != list(members) or me not in members:
        raise ValueError(f"members {list(members)} must be sorted, distinct and contain {me}")
    return list(members).index(me)
