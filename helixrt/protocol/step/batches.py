"""What the votes of a step say of the data: whether ranks of one stream read the same batches, and no two streams do.

In: from each rank of this replica, a digest of the step's batches for every replica (the exchange sums them, so each rank has
those of the equal ranks of all replicas; 0: not known). Out: one digest per replica for the commit record, and what is wrong.
All leaders of a step see the same digests. Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from helixrt.protocol.step.lineage import CommitRecord

Votes = Mapping[int, Sequence[int]]  # group rank -> digest of each replica
Stream = tuple[int, int]  # (replica, number of the stream in it)

PARTIAL = 1 << 62  # bit of a digest: not all of the batches is known, so equal digests do not say that they are the same
LOOK_BACK = 8  # positions in which two streams must be equal before they count as the same


@dataclass(frozen=True)
class BatchRules:
    """`streams[rank]`: which stream of the replica each group rank reads; empty: digests are not looked at. `same`: several
    streams may give the same batches. `strict`: an order that has changed after a restart ends the run."""

    streams: tuple[int, ...] = ()
    same: bool = False
    strict: bool = False


def combined(digests: Sequence[int]) -> int:
    """One digest of those of a replica's streams, in their order; 0 if one of them is not known."""
    if len(digests) == 1 or 0 in digests:
        return digests[0] if len(digests) == 1 else 0
    text = " ".join(map(str, digests)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1 or 1


def by_stream(votes: Votes, replica: int, rules: BatchRules) -> tuple[list[int], str]:
    """The digests of a replica's streams (0: one of its ranks does not know), and which of its ranks differ though they read
    one stream ("": none)."""
    known: dict[int, tuple[int, int]] = {}  # stream -> (digest, rank)
    unknown = set[int]()  # streams
    for rank, stream in enumerate(rules.streams):
        digest = votes[rank][replica] if replica < len(votes[rank]) else 0
        if not digest:
            unknown.add(stream)
            continue
        usual, first = known.setdefault(stream, (digest, rank))
        if digest != usual:
            return [], f"ranks {first} and {rank} of replica {replica}"
    return [0 if stream in unknown else known[stream][0] for stream in sorted(set(rules.streams))], ""


def of_record(votes: Votes, contributors: Sequence[int], rules: BatchRules) -> dict[int, int]:
    """What the record has of its contributors, as far as it is known."""
    found = {replica: combined(by_stream(votes, replica, rules)[0] or [0]) for replica in contributors}
    return {replica: digest for replica, digest in found.items() if digest}


class BatchWatch:
    """The newest steps of all streams, as one leader sees them."""

    def __init__(self, rules: BatchRules, advance: int) -> None:
        self._rules = rules
        self._newest: deque[dict[Stream, tuple[int, int]]] = deque(maxlen=max(2, -(-LOOK_BACK // advance)))
        self._constant: list[Stream] = []  # streams that have given the same batch in all these steps
        self._said = False

    def problem(self, candidate: CommitRecord, votes: Votes) -> str:
        """Take the votes for a record. Why the run must not go on, in one line; "" if it may."""
        now: dict[Stream, tuple[int, int]] = {}
        for replica in candidate.replicas:
            digests, differ = by_stream(votes, replica, self._rules)
            position = candidate.positions.get(replica, 0)
            if differ:
                return (
                    f"{differ} have read different batches for step {candidate.step} (before position {position}), and they "
                    "share one stream: give all ranks of a replica the same data in the same order"
                )
            now |= {(replica, number): (digest, position) for number, digest in enumerate(digests) if 0 < digest < PARTIAL}
        self._newest.append(now)
        if len(set(now.values())) == len(now) and len(now) != 1 or len(self._newest) < (self._newest.maxlen or 0):
            return ""
        return self._same()

    def _same(self) -> str:
        past: dict[tuple[tuple[int, int] | None, ...], Stream] = {}
        constant = []
        for stream in self._newest[-1]:
            history = tuple(step.get(stream) for step in self._newest)
            if None in history:
                continue
            if len({each[0] for each in history if each is not None}) == 1:
                constant.append(stream)
                continue
            first = past.setdefault(history, stream)
            if first != stream and not self._rules.same:
                return (
                    f"{_named(first)} and {_named(stream)} have given the same batches in the last {len(history)} steps, so "
                    "each item is trained on twice: deal the data with sampler=session.sampler(dataset); "
                    "nodesplitter=session.split_shards() for webdataset; session.over_streams(dataset) for litdata and "
                    "mosaicml-streaming; or by session.stream and session.streams; the option checks.same_streams allows it"
                )
        self._constant = constant
        return ""

    def said(self) -> str:
        """Once: that a stream is constant."""
        if self._said or not self._constant:
            return ""
        self._said = True
        return f"{_named(self._constant[0])} has given the same batch in all steps so far: nothing is known of its order"


def _named(stream: Stream) -> str:
    return f"stream {stream[0]}/{stream[1]}"
