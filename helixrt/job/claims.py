"""How the processes of a replica that others start become its next incarnation, all of them together.

In: the run's store, and what each process knows of itself (`Place`). Out: the incarnation that this process is a rank of.

- Group rank 0 claims the next incarnation of its replica. Incarnations are claimed in their order.
- Each other rank takes its seat in the newest claim, if that is of the same attempt, the start of all processes by torchrun
  or srun. A newer claim of the attempt takes the place of an older one: its seat is taken instead.
- When all seats are taken, rank 0 says that the incarnation is formed. It lives then, so a claim whose process has gone is
  never formed; and nobody begins before.

So ranks of different attempts are never mixed, and ranks that come in any order, or again and again, find each other. Every
key is put once.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable

from helixrt.errors import Fatal, Retryable
from helixrt.job.starters import Place
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import CLOSED_KEY, claim_key, ended_key, formed_key, given_up_key, seat_key

LOOK_S = 0.05


class Claim:
    """Of one process. `look` is called again and again, from one thread; `who` names the process, and no other."""

    def __init__(self, store: RunStore, place: Place, who: str = "") -> None:
        self._store, self._place = store, place
        self._who = who or f"{socket.gethostname()}:{os.getpid()}:{time.time_ns()}"
        self._claims = 0  # how many incarnations are known to be claimed
        self.incarnation: int | None = None
        """In which this process has its place now. It may change until `look` has returned it."""

    def look(self) -> int | None:
        """The incarnation of this replica that this process is a rank of; None while it is not formed. Raises Retryable without
        the store or if another process has begun in its place, Fatal when the run is over."""
        check_open(self._store, self._place)
        return self._lead() if self._place.rank == 0 else self._follow()

    def missing(self) -> str:
        """Who has not come yet, for messages."""
        if self._place.rank > 0 and self.incarnation is None:
            return "rank 0 of this start"
        ranks = range(1, self._place.ranks) if self._place.rank == 0 else ()
        absent = [str(rank) for rank in ranks if self._seat(rank) is None]
        return f"rank {', '.join(absent)}" if absent else "another rank"

    def _lead(self) -> int | None:
        replica = self._place.replica
        # Read before the successor's claim: the server ends an incarnation also because another has begun in its place.
        ended = self.incarnation is not None and self._store.get(ended_key(replica, self.incarnation)) is not None
        if self.incarnation is not None:
            if (successor := self._store.get(claim_key(replica, self.incarnation + 1))) is not None:
                raise Retryable(f"{claimant(successor)} has begun in place of this process")
        if self.incarnation is None or ended:
            self.incarnation = self._claim()
        members = [self._who, *(self._seat(rank) for rank in range(1, self._place.ranks))]
        if None in members:
            return None
        self._store.put_if_absent(formed_key(replica, self.incarnation), json.dumps(members))
        return self.incarnation

    def _claim(self) -> int:
        """The next incarnation that is not claimed and that the server has not ended. An incarnation that the server ended
        because its process did not start in time is claimed here too, so that the claims have no gaps."""
        mine, replica = json.dumps({"who": self._who, "attempt": self._place.attempt}), self._place.replica
        while (
            self._store.put_if_absent(claim_key(replica, self._claims), mine) != mine
            or self._store.get(ended_key(replica, self._claims)) is not None
        ):
            self._claims += 1
        return self._claims

    def _follow(self) -> int | None:
        replica, newest = self._place.replica, None
        while (text := self._store.get(claim_key(replica, self._claims))) is not None:
            self._claims, newest = self._claims + 1, text
        if newest is not None and json.loads(newest)["attempt"] == self._place.attempt:
            seat = seat_key(replica, self._claims - 1, self._place.rank)
            # Taken by another one, it may be that of a process that has gone: then its rank 0 claims anew.
            taken = self._store.put_if_absent(seat, self._who) == self._who
            self.incarnation = self._claims - 1 if taken else None
        if self.incarnation is None or self._store.get(formed_key(replica, self.incarnation)) is None:
            return None
        return self.incarnation

    def _seat(self, rank: int) -> str | None:
        assert self.incarnation is not None
        return self._store.get(seat_key(self._place.replica, self.incarnation, rank))


def claim(found: Claim, place: Place, limit_s: float, sleep: Callable[[float], None] = time.sleep) -> int:
    """Wait until all ranks of the replica have come; the incarnation that they are. Raises Retryable after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (incarnation := found.look()) is None:
        if time.monotonic() > deadline:
            what = f"{found.missing()} of replica {place.replica} did not come within {limit_s:g} s"
            raise Retryable(f"{what}; {place.ranks} processes are started for each replica")
        sleep(LOOK_S)
    return incarnation


def check_open(store: RunStore, place: Place) -> None:
    """Raises Fatal if the run has ended, or this replica is not started again in it."""
    if store.get(CLOSED_KEY) is not None:
        raise Fatal(f"the run at {place.store} is over")
    if (why := store.get(given_up_key(place.replica))) is not None:
        raise Fatal(f"replica {place.replica} of the run at {place.store} was given up: {why}")


def claimant(text: str) -> str:
    """The process that wrote a claim: its host, number and time."""
    return str(json.loads(text)["who"])
