"""Which initial state a run begins with: the digest that belongs to its genesis record.

In: the digest of what each rank of this replica has built. Out: the agreed digest in the run's store, and for a quorum before
the first commit whether it may go on. The digest is that of the lowest replica of the first quorum, written by compare-and-set
(every member of that quorum writes the same value, so that the loss of the lowest one delays nobody). A replica with another
digest does not hold the genesis: the quorum is formed again, in which it is behind and fetches (DESIGN.md, "Layout of state is
a manifest").
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property

from helixrt.protocol.step import messages as p
from helixrt.protocol.step.quorum import Member
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import OfRank

KEY = "genesis/digest"


def differing(members: Sequence[Member], genesis: str, agreed: str) -> tuple[int, ...]:
    """The replicas that say they hold the genesis record `genesis`, and began with another state than the agreed one."""
    return tuple(m.replica for m in members if m.lineage == genesis and m.initial not in ("", agreed))


class GenesisDigest:
    """Of one rank. `initial`: the digest of its own state at the start, "" for a job whose replicas begin alike by
    construction: then nothing is compared. `life` names the replica's incarnation; `ranks` are those of a replica."""

    def __init__(self, store: RunStore, life: str, rank: int, ranks: int, initial: str, timeout_s: float) -> None:
        self._store, self._life, self._ranks, self._initial, self._timeout_s = store, life, ranks, initial, timeout_s
        if initial:
            store.put_if_absent(OfRank.GENESIS.key(life, rank), initial)

    @cached_property
    def mine(self) -> str:
        """Of all ranks of this replica; waits for them. "" if nothing is compared."""
        if not self._initial:
            return ""
        digests = [self._store.wait(OfRank.GENESIS.key(self._life, rank), self._timeout_s) for rank in range(self._ranks)]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def holds(self) -> bool:
        """Whether what this replica has built is the initial state of the run, as far as that is agreed."""
        return self.mine == "" or self._store.get(KEY) in (None, self.mine)

    def agree(self, members: Sequence[Member], me: Member, genesis: str, say: Callable[[str], None]) -> p.Event | None:
        """Before the first commit, in each quorum: None if it may go on. Else what the machine is told instead: to join again,
        and for a replica with another digest that it holds nothing. Raises Retryable without the store."""
        lowest = min((m for m in members if m.initial), key=lambda m: m.replica, default=None)
        if lowest is None:
            return None
        agreed = self._store.put_if_absent(KEY, lowest.initial)
        others = differing(members, genesis, agreed)
        if not others:
            return None
        if me.replica in others:
            say("this replica begins with other initial values than the run, and fetches those")
            return p.Reloaded("")
        return p.JoinFailed(f"replicas {list(others)} begin with other initial values than the run")
