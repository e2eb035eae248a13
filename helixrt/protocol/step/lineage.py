"""The lineage: the chain of commit records, and the audit that follows it.

In: the run's log, an append-only sequence of records in the order the store accepted them.
Out: which records count (the chain of the newest entry), and what entered the parameters.

A record names its parent by hash. The newest log entry is the head; the chain is the head and
its ancestors. An entry whose parent is not the entry before it *supersedes* what lay between.
Follows FT-HSDP sections 4.1 and 4.4 (`loader_state`), made one agreed account (DESIGN, step 4).
Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from helixrt.errors import Fatal
from helixrt.protocol.step.deal import Deal

GENESIS_PARENT = ""

_ENCODE = json.JSONEncoder(separators=(",", ":")).encode

Incarnation = tuple[int, int]  # (replica, incarnation): one life of a replica within a life of the run


@dataclass(frozen=True)
class Exclusion:
    """Why a replica that held the base is not among the contributors.

    `rank` is the group rank that found a non-finite gradient; -1: the batch is skipped by order (`on_poison`).
    """

    incarnation: int
    rank: int


@dataclass(frozen=True)
class CommitRecord:
    """The one agreed account of a step.

    The record of step n is the state after n commits; step 0 is the genesis, the initial parameters.
    `contributors` are the replicas whose gradients are in the update, with their incarnations in the
    life `life` of the run (0; one more with each resume). `excluded` took part without their gradient.
    With `applied` False nothing was updated: all were excluded, or the sum of finite gradients was not
    finite. `last`: why the run ends with this record, in this life of it ("": it does not, or at its configured last step).
    `positions[r]` is how many batches of replica r's stream the state has consumed, those of
    excluded replicas and of records that were not applied included. `deal` has an entry for each resume with another number of
    streams; positions count from the newest one. `batches[r]` is a digest of the batches of replica r's streams that end at
    `positions[r]`, where it is known; from position `unsure[r]` on its streams were seen to give other batches when they were
    read again, so whether each item counts once is not known. `orders[r]` names the order of the schedule that replica r works
    by, by the hash under which the run's store has it; without an entry it is the one that the replica began with.
    """

    step: int
    generation: int
    parent: str
    contributors: tuple[Incarnation, ...]
    positions: Mapping[int, int] = field(default_factory=dict)
    run: str = ""
    life: int = 0
    excluded: Mapping[int, Exclusion] = field(default_factory=dict)
    applied: bool = True
    last: str = ""
    deal: tuple[Deal, ...] = ()
    orders: Mapping[int, str] = field(default_factory=dict)
    batches: Mapping[int, int] = field(default_factory=dict)
    unsure: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """Canonical text: equal records have equal text on all replicas. Of a record that was read, the text that was read."""
        return self._text

    @cached_property
    def _text(self) -> str:
        return _ENCODE(
            {
                "step": self.step,
                "generation": self.generation,
                "parent": self.parent,
                "contributors": self.contributors,
                "positions": {r: self.positions[r] for r in sorted(self.positions)},
                "run": self.run,
                "life": self.life,
                "excluded": {r: [e.incarnation, e.rank] for r, e in sorted(self.excluded.items())},
                "applied": self.applied,
                **({"last": self.last} if self.last else {}),  # a record without it has the text that it had before
                **({"deal": [deal.to_plain() for deal in self.deal]} if self.deal else {}),
                **({"orders": dict(sorted(self.orders.items()))} if self.orders else {}),
                **({"batches": dict(sorted(self.batches.items()))} if self.batches else {}),
                **({"unsure": dict(sorted(self.unsure.items()))} if self.unsure else {}),
            }
        )

    @staticmethod
    def from_json(text: str) -> CommitRecord:
        raw = json.loads(text)
        record = CommitRecord(
            step=raw["step"],
            generation=raw["generation"],
            parent=raw["parent"],
            contributors=tuple([(replica, incarnation) for replica, incarnation in raw["contributors"]]),
            positions=dict(zip(map(int, raw["positions"]), raw["positions"].values(), strict=True)),
            run=raw["run"],
            life=raw["life"],
            excluded={int(r): Exclusion(*e) for r, e in raw["excluded"].items()},
            applied=raw["applied"],
            last=raw.get("last", ""),
            deal=tuple(Deal.from_plain(deal) for deal in raw.get("deal", ())),
            orders={int(r): order for r, order in raw.get("orders", {}).items()},
            batches={int(r): digest for r, digest in raw.get("batches", {}).items()},
            unsure={int(r): position for r, position in raw.get("unsure", {}).items()},
        )
        record.__dict__["_text"] = text  # its hash is that of what stands, and costs no second writing
        return record

    @cached_property
    def hash(self) -> str:
        """The lineage hash: names this record and, through `parent`, everything before it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:32]

    @property
    def replicas(self) -> tuple[int, ...]:
        """The contributing replicas, without their incarnations."""
        return tuple([replica for replica, _ in self.contributors])

    def position(self, replica: int, deal: tuple[Deal, ...]) -> int:
        """Where the replica's stream goes on after this record, in a life of the run with this `deal`. Raises Fatal if the deal
        was made of another record."""
        if deal == self.deal:
            return self.positions.get(replica, 0)
        if deal[:-1] != self.deal or not deal[-1].ends(self.positions):
            raise Fatal(f"the run goes back to step {self.step}, and its data was dealt as of another step; resume it again")
        return 0

    @property
    def committers(self) -> tuple[Incarnation, ...]:
        """Everyone that held the base and commits this record: contributors and excluded replicas."""
        if not self.excluded:
            return tuple(sorted(self.contributors))
        return tuple(sorted({*self.contributors, *((r, e.incarnation) for r, e in self.excluded.items())}))

    @property
    def summed(self) -> tuple[int, ...]:
        """The replicas whose batches entered the parameters."""
        return self.replicas if self.applied else ()


def is_last(record: CommitRecord, steps: int, life: int) -> bool:
    """Whether nothing follows `record` in the life `life` of a run of `steps` updates (0: without end)."""
    return 0 < steps <= record.step or (record.last != "" and record.life == life)


def genesis(run: str, replicas: int) -> CommitRecord:
    """The record of the initial parameters: step 0, nothing consumed."""
    return CommitRecord(0, 0, GENESIS_PARENT, (), {r: 0 for r in range(replicas)}, run)


@dataclass(frozen=True)
class Audit:
    """What entered the parameters: batches counted, those that were excluded, and where a stream has gaps or repeats."""

    batches: int
    gaps: int
    repeats: int
    per_replica: Mapping[int, int]
    excluded: int = 0

    @property
    def clean(self) -> bool:
        return self.gaps == 0 and self.repeats == 0


@dataclass(frozen=True)
class Behind:
    """What precedes the first entry of a compacted log: `begin` entries, of a run whose entry 0 has the hash
    `genesis`; `superseded` of them are not on the chain, and `audit` is that of the chain up to the first entry, where it was
    made."""

    begin: int = 0
    genesis: str = ""
    superseded: int = 0
    audit: Audit | None = None

    def to_json(self) -> str:
        found = self.audit
        counts = [] if found is None else [found.batches, found.gaps, found.repeats, found.excluded]
        positions = {} if found is None else {str(r): n for r, n in sorted(found.per_replica.items())}
        return json.dumps([self.begin, self.genesis, self.superseded, counts, positions])

    @staticmethod
    def from_json(text: str) -> Behind:
        begin, genesis, superseded, counts, positions = json.loads(text)
        if not counts:
            return Behind(begin, genesis, superseded)
        batches, gaps, repeats, excluded = counts
        found = Audit(batches, gaps, repeats, {int(r): n for r, n in positions.items()}, excluded)
        return Behind(begin, genesis, superseded, found)


class Log:
    """A local copy of the run's log, entry by entry, and the chain that it implies.

    `append` takes the store's entries in order. Entry 0 is the genesis. `drop` forgets the oldest ones; `behind` says what they
    were. Indices and lengths count those that were dropped.
    """

    def __init__(self, entries: Sequence[CommitRecord] = (), behind: Behind = Behind()) -> None:  # noqa: B008 frozen
        self.entries: list[CommitRecord] = []
        self.behind = behind
        self.head: CommitRecord  # the newest entry; there is none before the genesis
        self._by_hash: dict[str, CommitRecord] = {}
        self._chain: dict[int, str] = {}  # step -> hash, of the head's chain
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return self.behind.begin + len(self.entries)

    @property
    def genesis(self) -> str:
        """The hash of entry 0."""
        return self.behind.genesis or self.entries[0].hash

    def entry(self, index: int) -> CommitRecord | None:
        """Entry `index` of the run's log; None if it was dropped."""
        return self.entries[index - self.behind.begin] if index >= self.behind.begin else None

    def append(self, entry: CommitRecord) -> None:
        """Take the next entry of the store; its parent must be in the log already."""
        if self.entries and entry.parent not in self._by_hash:
            raise ValueError(f"record of step {entry.step} has the unknown parent {entry.parent[:8]}")
        newest = self.entries[-1].step if self.entries else -1
        self.entries.append(entry)
        self.head = entry
        self._by_hash[entry.hash] = entry
        for step in range(entry.step, newest + 1):
            self._chain.pop(step, None)
        node: CommitRecord | None = entry
        while node is not None and self._chain.get(node.step) != node.hash:
            self._chain[node.step] = node.hash
            node = self._by_hash.get(node.parent)

    def may_begin(self, index: int) -> int:
        """The highest index up to `index` at which the log may begin: of an entry on the chain on which later ones build."""
        places = {entry.hash: at for at, entry in enumerate(self.entries)}
        lowest = len(self.entries)  # place of the lowest parent of the entries behind the one that is looked at
        for at in range(len(self.entries) - 1, 0, -1):
            entry = self.entries[at]
            if at <= index - self.behind.begin and lowest >= at and self.on_chain(entry.hash):
                return self.behind.begin + at
            lowest = min(lowest, places.get(entry.parent, -1))
        return self.behind.begin

    def drop(self, index: int, advance: int = 0) -> None:
        """Forget the entries before `index`, which must be one that `may_begin` gives. With `advance` (see `audit`) their audit
        is kept in `behind`. Does nothing for an index that is behind already, or that the log does not reach."""
        count = index - self.behind.begin
        if not 0 < count < len(self.entries):
            return
        dropped, kept = self.entries[:count], self.entries[count:]
        lost = sum(not self.on_chain(entry.hash) for entry in dropped)
        found = None
        if advance:
            found = audit(self.chain(kept[0].hash), advance, self.behind.audit)
        self.behind = Behind(index, self.genesis, self.behind.superseded + lost, found)
        self.entries = kept
        for entry in dropped:
            del self._by_hash[entry.hash]
            if self._chain.get(entry.step) == entry.hash:
                del self._chain[entry.step]

    def first(self, length: int) -> Log:
        """The log as it was when it had `length` entries; itself if it has no more."""
        return self if length >= len(self) else Log(self.entries[: max(0, length - self.behind.begin)], self.behind)

    def get(self, hash_: str) -> CommitRecord | None:
        """The record with this hash, on the chain or superseded; None if the log has none."""
        return self._by_hash.get(hash_)

    def may_be_on_chain(self, hash_: str) -> bool:
        """As `on_chain`, or it may have been dropped from there."""
        return self.on_chain(hash_) or (self.behind.begin > 0 and hash_ not in self._by_hash)

    def on_chain(self, hash_: str) -> bool:
        """Whether the state with this hash is the head or an ancestor of it."""
        record = self._by_hash.get(hash_)
        return record is not None and self._chain.get(record.step) == hash_

    def after(self, hash_: str) -> CommitRecord | None:
        """The record of the chain whose parent is `hash_`; None for the head and for what is not on the chain."""
        record = self._by_hash.get(hash_)
        if record is None or not self.on_chain(hash_):
            return None
        following = self._chain.get(record.step + 1)
        return None if following is None else self._by_hash[following]

    def above(self, step: int) -> list[CommitRecord]:
        """The records of the chain with a higher step, oldest first; of those that were not dropped."""
        first = self.entries[0].step if self.behind.begin else 0
        return [self._by_hash[self._chain[s]] for s in range(max(first, step + 1), self.head.step + 1)]

    def lost_behind(self, parent: str) -> list[CommitRecord]:
        """The records of the chain that a next entry after `parent`, on the chain or not, would supersede."""
        node: CommitRecord | None = self._by_hash[parent]
        while node is not None and not self.on_chain(node.hash):
            node = self._by_hash.get(node.parent)
        return self.above(node.step if node is not None else -1)

    def chain(self, until: str | None = None) -> list[CommitRecord]:
        """From the genesis (or the first entry that is kept) to the record `until` (the head if None), following parents."""
        node: CommitRecord | None = self.head if until is None else self._by_hash[until]
        steps: list[CommitRecord] = []
        while node is not None:
            steps.append(node)
            node = self._by_hash.get(node.parent)
        return steps[::-1]

    def superseded(self) -> list[CommitRecord]:
        """Entries that are not on the head's chain."""
        return [e for e in self.entries if not self.on_chain(e.hash)]


def audit(chain: Sequence[CommitRecord], advance: int = 1, past: Audit | None = None) -> Audit:
    """Follow a chain from its genesis, or go on from the audit `past` of what precedes its first record: the stream of
    each replica that commits must move on by exactly `advance` batches per step, and no other stream may move. Where streams
    are dealt again, the positions before must be those of the deal, and count from 0 after it. Batches of excluded
    replicas, and of records that were not applied, count as `excluded`."""
    counted = past or Audit(0, 0, 0, {})
    batches, gaps, repeats, excluded = counted.batches, counted.gaps, counted.repeats, counted.excluded
    position: dict[int, int] = dict(chain[0].positions) if chain else {}
    for before, record in zip(chain, chain[1:], strict=False):
        if record.parent != before.hash or record.step != before.step + 1:
            gaps += 1
        if record.deal != before.deal:
            dealt = record.deal[:-1] == before.deal and record.deal[-1].ends(position)
            gaps, position = gaps + (not dealt), {}
        moved = {replica for replica, _ in record.committers}
        for replica, after in record.positions.items():
            expected = position.get(replica, 0) + (advance if replica in moved else 0)
            gaps += max(0, after - expected)
            repeats += max(0, expected - after)
            position[replica] = after
        batches += advance * len(record.summed)
        excluded += advance * (len(moved) - len(record.summed))
    return Audit(batches, gaps, repeats, position, excluded)
