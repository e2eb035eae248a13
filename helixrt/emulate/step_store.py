"""The simulated run's store and disks of the step world, with the invariant of lost progress.

In: records proposed, holder entries, ends, waits, durable states. Out: answers, and a complaint when a record that
supersedes others loses a step that it must not lose: only at depth 1, or when no holder lives, or after
`supersede_after_s` (DESIGN, "The life of a step", 4). The check knows everything, unlike the machines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from helixrt.protocol.step.lineage import CommitRecord, Incarnation, Log
from helixrt.protocol.step.supersede import GENERATIONS_PER_S, STEP_S, Evidence, Waited, counted

Batch = tuple[int, int]  # (replica, position)
State = tuple[str, tuple[frozenset[Batch], ...]]  # lineage hash ("": none), what each update summed


def digest_before(replica: int, position: int) -> int:
    """Of the batch of this replica's stream that ends at `position`."""
    return (replica + 1) * 10**6 + position


@dataclass
class SimulatedStore:
    """One run over all of its lives. `holding()` gives the lineage hashes that living, unfenced replicas hold."""

    root: CommitRecord
    supersede_after_s: float
    holding: Callable[[], Iterable[str]]
    life: int = 0
    entries: list[CommitRecord] = field(default_factory=list)
    durable: dict[str, State] = field(default_factory=dict)
    ended: set[Incarnation] = field(default_factory=set)
    holders: list[tuple[Incarnation, str]] = field(default_factory=list)  # which incarnation wrote an entry for which lineage
    waited: dict[str, Waited] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)  # head -> when it was appended, by the world's true time
    jumps: int = 0  # of the membership service's clock
    lost: int = 0  # steps that were superseded at a depth above 1
    down_until: float = 0.0
    begin: int = 0  # machines need no entry before this index any more

    def __post_init__(self) -> None:
        self.entries.append(self.root)
        self.durable[self.root.hash] = (self.root.hash, ())
        self.since_s[self.root.hash] = 0.0

    @property
    def head(self) -> CommitRecord:
        return self.entries[-1]

    def put(self, index: int, record: CommitRecord, now: float) -> tuple[CommitRecord, str]:
        """The entry that stands at `index` now, and what is wrong with it ("": nothing)."""
        complaint = ""
        if index == len(self.entries):
            complaint = self._loss(record, now)
            told, at = record.batches, record.positions
            unknown = [r for r in record.replicas if record.applied and told.get(r) != digest_before(r, at[r])]
            complaint = complaint or (f"record {record.step} does not tell the batches of {unknown}" if unknown else "")
            self.entries.append(record)
            self.since_s[record.hash] = now
        return self.entries[index], complaint

    def _loss(self, record: CommitRecord, now: float) -> str:
        log = Log(self.entries)
        lost = [r.hash for r in log.lost_behind(record.parent)]
        if len(lost) <= 1:
            return ""
        self.lost += len(lost)
        what = f"{len(lost)} steps up to step {self.head.step} are lost"
        if saved := [h for h in lost if h in self.durable]:
            return f"{what}, and a checkpoint holds {saved[-1][:6]}"
        observed_s = now - self.since_s[self.head.hash] + STEP_S * self.jumps
        if observed_s < self.supersede_after_s and (held := set(lost) & set(self.holding())):
            return f"{what} after {observed_s:.1f} s, and {sorted(held)[0][:6]} is held"
        return ""

    def compact(self, kept: int) -> None:
        """Machines may forget what lies behind the newest durable record, but for `kept` entries at least."""
        log = Log(self.entries)
        saved = [index for index, e in enumerate(self.entries) if e.hash in self.durable and log.on_chain(e.hash)]
        self.begin = max(self.begin, log.may_begin(min(saved[-1], len(log) - kept)))

    def log(self) -> Log:
        """As a machine reads it that starts."""
        log = Log(self.entries)
        log.drop(self.begin)
        return log

    def evidence(self, head: CommitRecord, generation: int) -> Evidence:
        """What a member that waits finds about `head`, its own wait counted."""
        log = Log(self.entries)
        counter = self.waited[head.hash] = counted(self.waited.get(head.hash), generation)
        chain = {r.hash for r in log.chain(head.hash)}
        holders = tuple(sorted({who for who, lineage in self.holders if lineage in chain}))
        return Evidence(head.hash, holders, tuple(sorted(self.ended)), counter.seconds)

    def wait_over(self, head: CommitRecord, generation: int) -> None:
        self.waited[head.hash] = Waited(generation, 0.0)

    def newest_durable(self, log: Log) -> State:
        return next(self.durable[r.hash] for r in reversed(log.chain()) if r.hash in self.durable)

    def resume(self, keep: int, now: float) -> None:
        """A new life of the run: the lineage as far as it was on disk, and nothing else of the old store."""
        self.life += 1
        self.entries, self.begin = self.entries[:keep], 0
        self.ended, self.holders, self.waited = set(), [], {}
        self.down_until = now

    def generation(self, now: float, offset_s: float) -> int:
        return round((now + offset_s) * GENERATIONS_PER_S)
