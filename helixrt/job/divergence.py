"""Replicas that hold different states: what differs first, and in which of them.

In: at each leader the same `Differ` of the step protocol. Out: the run ends with `Diverged`, which names the first differing
entry and the odd replica, if there is a majority; the driver finds it in the store (`said`, then `way_back`).
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from helixrt.errors import Diverged, Retryable
from helixrt.protocol.step.messages import Differ
from helixrt.replica.commands import Digest, Digested, RankCommand
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import DIVERGED_KEY

_OTHERS_S = 20.0  # for the entries of the other replicas; a few, on a sound link


@dataclass(frozen=True)
class Divergence:
    """Found before `step`; `entry` of rank `rank` of a replica differs first, in the replicas `odd` (empty without a majority).
    After step `safe` all of the state was equal."""

    step: int
    safe: int
    rank: int
    entry: str
    odd: tuple[int, ...]
    text: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> Divergence:
        return Divergence(**{**plain, "odd": tuple(plain["odd"])})


def differing(action: Differ, entries: Mapping[int, Mapping[str, int]]) -> Divergence:
    """`entries`: by replica, the digests of the entries of its rank `action.rank`, in the order of the state."""
    entry, odd = action.part, action.odd
    names = next(iter(entries.values()), {})
    for name in names:
        found = {replica: digests.get(name, 0) for replica, digests in entries.items()}
        if len(set(found.values())) > 1:
            usual, count = Counter(found.values()).most_common(1)[0]
            most = 2 * count > len(action.replicas)
            entry, odd = name, tuple(replica for replica, digest in found.items() if digest != usual) if most else odd
            break
    who = f"replicas {', '.join(map(str, action.replicas))} hold different states"
    if odd:
        who = f"the state of replica {', '.join(map(str, odd))} differs from that of the others"
    text = (
        f"{who} before step {action.step}: {entry} differs first (rank {action.rank}). It must be equal bit for bit: an update "
        "depends on more than state, gradients and record, or memory is faulty"
    )
    return Divergence(action.step, action.safe, action.rank, entry, odd, text)


class Naming:
    """Of the leader of one replica. `digests` is filled, rank by rank, as the answers to `Digest` come, within `limit_s`."""

    def __init__(
        self,
        store: RunStore,
        replica: int,
        digests: Mapping[int, Digested],
        tell: Callable[[RankCommand], None],
        limit_s: float,
    ) -> None:
        self._store, self._replica, self._digests, self._tell, self._limit_s = store, replica, digests, tell, limit_s

    def __call__(self, action: Differ) -> NoReturn:
        """Raises Diverged. What a leader does not say in time is not compared."""
        mine, entries = self._own(action.rank), dict[int, dict[str, int]]()
        with suppress(Retryable):
            self._store.put_if_absent(self._key(action, self._replica), json.dumps(mine))
            for replica in action.replicas:
                entries[replica] = json.loads(self._store.wait(self._key(action, replica), _OTHERS_S))
        found = differing(action, entries)
        self._store.put_if_absent(DIVERGED_KEY, found.to_json())
        raise Diverged(found.text)

    @staticmethod
    def _key(action: Differ, replica: int) -> str:
        return f"differing/{action.generation}/{replica}"

    def _own(self, rank: int) -> dict[str, int]:
        """The digests of the entries of this rank of the replica."""
        self._tell(Digest(entries=True))
        deadline = time.monotonic() + self._limit_s
        while rank not in self._digests and time.monotonic() < deadline:
            time.sleep(0.01)
        return dict(self._digests[rank].entries) if rank in self._digests else {}


def said(store: RunStore) -> Divergence | None:
    """What ended the run of this store, if it was that."""
    with suppress(Retryable):
        text = store.get(DIVERGED_KEY)
        return None if text is None else Divergence.from_plain(json.loads(text))
    return None
