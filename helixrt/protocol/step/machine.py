"""The life of a step of one replica, as a state machine without I/O.

In: events (`Formed`, `RingDone`, `Appended` …). Out: actions for whoever drives it: the
job's leader rank, or a simulated world. One replica has one machine and one ring per rank.

    actions = machine.on(event)

The five points of DESIGN.md ("The life of a step"), after FT-HSDP sections 4.1 to 4.4:
quorum, work, exchange, commit, record. What the paper leaves open is decided so that there is one
lineage whatever dies when:

- All members of a generation propose the *same* record; the run's log takes it once, at the next
  free index (put-if-absent). An entry of an older generation found there belongs to stragglers that
  are not in this quorum; the proposal goes behind it and thereby supersedes it. An entry of a newer
  generation means that we are the stragglers.
- Gradients are preserved until commit: a broken exchange is retried by the next generation, and
  they are dropped only when the base of the step is no longer the state they were computed on.
- A replica that is behind takes part with zeros and keeps the reduced buckets of every step since
  the state it is fetching; when the state is there it replays them. So nobody waits for it.

The machine never reads a clock; deadlines reach it as events (`RingFailed`, `JoinFailed`, …).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.protocol.step.messages import (
    Abort,
    Action,
    Append,
    Appended,
    Apply,
    Begin,
    Event,
    Exchange,
    Fetched,
    FetchFailed,
    FetchReduced,
    FetchState,
    Forget,
    Formed,
    Join,
    JoinFailed,
    Keep,
    Load,
    LogRead,
    Offer,
    Persist,
    ReadLog,
    Reload,
    Reloaded,
    Replay,
    Rest,
    Rested,
    RingDone,
    RingFailed,
    StoreLost,
    Withdraw,
    Work,
)
from helixrt.protocol.step.quorum import Assessment, Member, assess, reusable_epoch, successor


class Phase(Enum):
    """Where the replica stands in the step; each names what it waits for."""

    NEW = "new"  # Begin
    JOINING = "joining"  # Formed or JoinFailed
    EXCHANGING = "exchanging"  # RingDone of all ranks, or RingFailed
    BREAKING = "breaking"  # the last answers of rings that were told to abort
    COMMITTING = "committing"  # Appended
    SETTLING = "settling"  # LogRead after a broken exchange: was it decided by others?
    REPAIRING = "repairing"  # reduced buckets of the step that others finished and we did not
    FETCHING = "fetching"  # state, with nothing to exchange meanwhile (after the last step)
    RELOADING = "reloading"  # Reloaded
    RESTING = "resting"  # Rested


@dataclass
class Attempt:
    """One generation's exchange as this replica sees it."""

    generation: int
    members: tuple[Member, ...]
    assessment: Assessment
    candidate: CommitRecord
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)


class StepMachine:
    """One replica's side of the step protocol.

    `held` is the lineage hash of the state it starts with, `steps` the number of updates after which
    it rests, `replay` how many reduced steps it keeps while it fetches.
    """

    def __init__(self, replica: int, incarnation: int, rings: int, log: Log, held: str, steps: int, replay: int = 16) -> None:
        self.replica, self.incarnation, self.rings = replica, incarnation, rings
        self.log, self.held, self.steps, self.replay = log, held, steps, replay
        self.phase = Phase.NEW
        self.attempt: Attempt | None = None
        self.work: tuple[str, int] | None = None  # (base, position) of running or preserved gradients
        self.fetching = ""  # lineage hash of the state or the reduced buckets under way
        self.refused = ""  # record whose reduced buckets nobody had: fetch the state instead
        self.kept: dict[str, CommitRecord] = {}  # reduced buckets kept for replay, by record hash
        self.offers: set[str] = set()
        self.settled = False  # after the last step: the newest quorum had nobody behind
        self.epoch = -1
        self.group: tuple[tuple[int, int], ...] = ()  # (replica, incarnation) of the sound exchange

    # ---- what a driver may ask

    @property
    def held_step(self) -> int:
        record = self.log.get(self.held)
        return record.step if record is not None else -1

    # ---- events

    def on(self, event: Event) -> list[Action]:
        """The actions that follow from an event, in the order in which they must be begun."""
        match event:
            case Begin():
                return self._next_step()
            case Formed():
                return self._formed(event) if self.phase is Phase.JOINING else []
            case JoinFailed():
                return [self._join()] if self.phase is Phase.JOINING else []
            case RingDone() | RingFailed():
                return self._ring(event)
            case Appended():
                return self._appended(event) if self.phase is Phase.COMMITTING else []
            case LogRead():
                return self._settled(event) if self.phase is Phase.SETTLING else []
            case StoreLost():
                return self._ask_store_again()
            case Fetched() | FetchFailed():
                return self._fetch_ended(event)
            case Reloaded():
                self.held = event.lineage
                return self._next_step()
            case Rested():
                return self._next_step() if self.phase is Phase.RESTING else []
        raise AssertionError(f"unknown event {event!r}")

    # ---- quorum

    def _me(self) -> Member:
        return Member(
            self.replica, self.incarnation, self.held_step, self.held, self.fetching, self.epoch, entries=len(self.log)
        )

    def _join(self) -> Join:
        self.phase, self.attempt = Phase.JOINING, None
        return Join(self._me())

    def _next_step(self) -> list[Action]:
        """Join, and begin the work at once if we believe that we are healthy: the quorum overlaps it."""
        actions: list[Action] = [self._join()]
        if self.held == self.log.head.hash and self.log.head.step < self.steps:
            actions += self._begin_work(self.log.head)
        return actions

    def _begin_work(self, base: CommitRecord) -> list[Action]:
        position = base.positions.get(self.replica, 0)
        if self.work == (base.hash, position):
            return []  # running, or preserved from a broken exchange
        self.work = (base.hash, position)
        return [Work(base.hash, position, base.step + 1)]

    def _formed(self, event: Formed) -> list[Action]:
        actions = self._learn(event.entries)
        if not self.fetching:
            actions += self._replay_kept()
        if self.log.head.generation > event.generation or all(
            (m.replica, m.incarnation) != (self.replica, self.incarnation) for m in event.members
        ):
            return [*actions, self._join()]  # this quorum is older than the newest commit, or not ours
        # A straggler's entry may stand in the log by now for some of us and not for others: a common view of it.
        common = max(m.entries for m in event.members)
        assessment = assess(event.members, self.log.first(common) if common else self.log)
        if assessment is None:
            self.phase = Phase.RELOADING
            return [*actions, Reload()]
        behind = self.replica in assessment.behind
        if not behind and self.held != assessment.base.hash:
            return [*actions, self._join()]  # fetched state arrived since we joined, and is better than all here
        actions += self._serve(event.members, assessment)
        if behind:
            actions += self._begin_fetch(event.members, assessment)
        else:
            actions += self._end_fetch()  # we work on what we hold; what is under way would replace it
        if assessment.base.step >= self.steps:
            self.settled = not assessment.behind
            self.phase = Phase.FETCHING if self.fetching else Phase.RESTING
            return actions if self.fetching else [*actions, Rest()]
        if not behind:
            actions += self._begin_work(assessment.base)
        group = tuple((m.replica, m.incarnation) for m in event.members)
        fresh = self.epoch < 0 or reusable_epoch(event.members) != self.epoch or group != self.group
        self.group = group
        if fresh:
            self.epoch = event.generation
        self.attempt = Attempt(event.generation, event.members, assessment, successor(assessment, event.generation))
        self.phase = Phase.EXCHANGING
        actions.append(Exchange(event.generation, assessment.members, assessment.contributors, not behind, fresh))
        return actions

    def _learn(self, entries: Sequence[CommitRecord]) -> list[Action]:
        """Take new log entries; what we kept for replay and is not on the chain is forgotten."""
        actions: list[Action] = []
        for entry in entries:
            actions.append(Persist(len(self.log), entry))
            self.log.append(entry)
        for stale in [h for h in self.kept if not self.log.on_chain(h)]:
            del self.kept[stale]
            actions.append(Forget(stale))
            if self.fetching == stale:
                self.fetching = ""  # its reduced buckets; when they come they are no state to load
        return actions

    # ---- catch-up

    def _serve(self, members: Sequence[Member], assessment: Assessment) -> list[Action]:
        """Healthy replicas offer the base when somebody behind has no fetch under way."""
        behind = [m for m in members if m.replica in assessment.behind]
        needed = {m.fetching for m in behind if m.fetching}
        if self.replica in assessment.contributors and any(not m.fetching for m in behind):
            needed.add(assessment.base.hash)
        mine = {assessment.base.hash} if self.held == assessment.base.hash else set()
        actions: list[Action] = [Withdraw(h) for h in sorted(self.offers - needed)]
        new = (needed & mine) - self.offers
        self.offers = (self.offers & needed) | new
        return actions + [Offer(h) for h in sorted(new)]

    def _begin_fetch(self, members: Sequence[Member], assessment: Assessment) -> list[Action]:
        base = assessment.base
        if self.held == base.hash or (self.fetching and self._replayable(self.fetching, base)):
            return []
        actions = self._end_fetch()
        if any(m.fetching for m in members if m.replica == self.replica):
            return actions  # our account named another fetch, so nobody offers the base for us: next quorum
        donors = tuple(m for m in members if m.replica in assessment.contributors)
        self.fetching = base.hash
        if self.held and self.held == base.parent and self.refused != base.hash:
            self.kept[base.hash] = base
            return [*actions, FetchReduced(base.hash, donors)]
        return [*actions, FetchState(base.hash, donors)]

    def _end_fetch(self) -> list[Action]:
        actions: list[Action] = [Forget(h) for h in sorted(self.kept)]
        self.kept.clear()
        self.fetching = ""
        return actions

    def _replayable(self, start: str, base: CommitRecord) -> bool:
        """Whether kept buckets lead from `start` (or from our state) to `base` along the chain."""
        if not self.log.on_chain(start) or len(self.kept) > self.replay:
            return False
        node: CommitRecord | None = base
        while node is not None and node.hash != start:
            if node.hash not in self.kept:
                return False
            node = self.log.get(node.parent)
        return node is not None

    def _replay_kept(self) -> list[Action]:
        """Follow the chain from the state we hold through the buckets that we kept."""
        actions: list[Action] = []
        while following := next(
            (r for r in self.kept.values() if r.parent == self.held and self.log.on_chain(r.hash)), None
        ):
            del self.kept[following.hash]
            actions.append(Replay(following))
            self.held = following.hash
        return actions

    def _fetch_ended(self, event: Fetched | FetchFailed) -> list[Action]:
        if event.lineage != self.fetching:
            return []
        if isinstance(event, FetchFailed):
            self.refused = event.lineage
            actions = self._end_fetch()
        else:
            actions, self.fetching = [], ""
            if event.lineage not in self.kept:
                actions.append(Load(event.lineage))
                self.held = event.lineage
            actions += self._replay_kept()
        if self.phase in (Phase.REPAIRING, Phase.FETCHING):
            actions += self._next_step()
        return actions

    # ---- exchange

    def _ring(self, event: RingDone | RingFailed) -> list[Action]:
        attempt = self.attempt
        if attempt is None or event.generation != attempt.generation or self.phase not in (Phase.EXCHANGING, Phase.BREAKING):
            return []
        (attempt.done if isinstance(event, RingDone) else attempt.failed).add(event.rank)
        actions: list[Action] = []
        if isinstance(event, RingFailed) and self.phase is Phase.EXCHANGING:
            self.phase, self.epoch = Phase.BREAKING, -1
            actions.append(Abort(attempt.generation, event.reason))
        if len(attempt.done) + len(attempt.failed) < self.rings:
            return actions
        if attempt.failed:
            self.phase = Phase.SETTLING
            return [*actions, ReadLog(len(self.log))]
        if self.held != attempt.assessment.base.hash:
            # behind still: whoever holds the base decides; we keep what we will need to follow
            self.kept[attempt.candidate.hash] = attempt.candidate
            return [*actions, Keep(attempt.candidate), self._join()]
        self.phase = Phase.COMMITTING
        return [*actions, Append(len(self.log), attempt.candidate)]

    # ---- commit

    def _appended(self, event: Appended) -> list[Action]:
        assert self.attempt is not None
        candidate = self.attempt.candidate
        actions = self._learn([event.standing]) if event.index == len(self.log) else []
        if event.standing.hash == candidate.hash:
            self.held = candidate.hash
            return [*actions, Apply(candidate), *self._next_step()]
        if event.standing.generation < candidate.generation:
            return [*actions, Append(len(self.log), candidate)]
        return [*actions, self._join()]  # we are the stragglers; the next quorum tells what we hold is worth

    def _settled(self, event: LogRead) -> list[Action]:
        """After a broken exchange: if others finished it and committed, take their reduced buckets."""
        assert self.attempt is not None
        attempt, candidate = self.attempt, self.attempt.candidate
        actions = self._learn(event.entries)
        decided = self.log.on_chain(candidate.hash)
        if not decided or self.held != attempt.assessment.base.hash or self.fetching:
            return [*actions, self._join()]
        donors = tuple(m for m in attempt.members if m.replica != self.replica)
        self.phase, self.fetching = Phase.REPAIRING, candidate.hash
        self.kept[candidate.hash] = candidate
        return [*actions, FetchReduced(candidate.hash, donors)]

    def _ask_store_again(self) -> list[Action]:
        if self.phase is Phase.COMMITTING and self.attempt is not None:
            return [Append(len(self.log), self.attempt.candidate)]
        if self.phase is Phase.SETTLING:
            return [ReadLog(len(self.log))]
        return []
