"""The life of a step of one replica, as a state machine without I/O and without a clock.

In: events (`Formed`, `RankDone`, `Appended` …; deadlines too). Out: actions for its driver: the job's leader rank, or
a simulated world. One replica has one machine and one exchange per rank.

    actions = machine.on(event)

The five points of DESIGN.md ("The life of a step"), after FT-HSDP sections 4.1 to 4.4:
quorum, work, exchange, commit, record. What the paper leaves open is decided so that there is one
lineage whatever fails when:

- All members of a generation propose the *same* record; the run's log takes it once, at the next
  free index (put-if-absent). An entry of an older generation found there belongs to stragglers that
  are not in this quorum; the proposal goes behind it and thereby supersedes it, if the rule of
  `supersede` permits. An entry of a newer generation means that this replica is the straggler.
- Gradients are preserved until commit: a broken exchange is retried by the next generation. They are
  dropped when the replica no longer holds the state that they were computed on: an update overwrites them.
- A replica that is behind takes part with zeros and keeps the reduced buckets of every step since
  the state it is fetching; when the state is there it replays them (`following`).
- A sum that is not finite is never applied: each replica examines its own gradient, and the next
  generation sums without those that declare one (`quorum.Unusable`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from helixrt.protocol.step.attempt import Attempt, Phase
from helixrt.protocol.step.batches import BatchWatch, by_stream, combined
from helixrt.protocol.step.blame import Standing
from helixrt.protocol.step.following import Following
from helixrt.protocol.step.lineage import CommitRecord, Incarnation, Log, is_last
from helixrt.protocol.step.messages import (
    Abort,
    Action,
    Append,
    Appended,
    Apply,
    Begin,
    Differ,
    Event,
    Examine,
    Examined,
    Exchange,
    Fetched,
    FetchFailed,
    FetchReduced,
    Formed,
    Hold,
    HoldEnded,
    Join,
    JoinFailed,
    Keep,
    LogRead,
    OrderReady,
    Persist,
    RankDone,
    RankFailed,
    ReadLog,
    Refuse,
    Reload,
    Reloaded,
    Rest,
    Restart,
    Rested,
    StoreLost,
    Tell,
    Wait,
    WaitEnded,
    WaitOver,
    Work,
)
from helixrt.protocol.step.offers import Offers
from helixrt.protocol.step.quorum import (
    Member,
    Overflow,
    StepRules,
    Stranded,
    Unusable,
    assess,
    exclusions,
    generation_of,
    reusable_epoch,
    successor,
)
from helixrt.protocol.step.supersede import Evidence


class StepMachine:
    """One replica's side of the step protocol.

    `held` is the lineage hash of the state it starts with ("": none), `steps` the number of updates after which it
    rests, `life` the run's life, `skips` the positions of its stream whose batches are not computed, `order` the
    hash of the schedule's order that it starts with; None: the one that the log names for it, also in entries to come.
    """

    def __init__(
        self,
        replica: int,
        incarnation: int,
        group_world_size: int,
        log: Log,
        held: str,
        steps: int,
        rules: StepRules | None = None,
        life: int = 0,
        skips: Collection[int] = (),
        order: str | None = "",
    ) -> None:
        self.replica, self.incarnation, self.group_world_size = replica, incarnation, group_world_size
        self.log, self.held, self.steps = log, held, steps
        self.rules, self.life, self.skips = rules or StepRules(), life, frozenset(skips)
        self.follows = order is None  # until its own program reports which order is ready
        self.ready = log.head.orders.get(replica, "") if order is None else order
        self.order = self.ready  # of the schedule: by which work is begun; `ready` from the next quorum on
        self.phase = Phase.NEW
        self.attempt: Attempt | None = None
        self.work: tuple[str, int] | None = None  # (base, position) of running or preserved gradients
        self.following, self.offers = Following(log, self.rules), Offers(replica, self.rules)
        self.settled = False  # after the last step: no member of the newest quorum was behind
        self.epoch, self.seen = -1, 0  # of the sound exchange; the highest generation seen
        self.group: tuple[Incarnation, ...] = ()  # of the sound exchange
        self.evidence: Evidence | None = None
        self.looked = ""  # the head for which a newer durable state was looked for
        self.unusable: Unusable | None = None
        self.overflow: Overflow | None = None
        self.stop = ""  # reason of `session.stop`; the next record that can carry it ends the run
        self.standing = Standing()
        self.watch, self.unsure = BatchWatch(self.rules.batches, self.rules.advance), -1
        self.fetched = set[tuple[tuple[int, ...], str]]()  # replicas that differed, and in which part of the state

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
            case RankDone() | RankFailed():
                return self._rank_answered(event)
            case Examined():
                return self._examined(event)
            case Appended():
                return self._appended(event) if self.phase is Phase.COMMITTING else []
            case LogRead():
                return self._settled(event) if self.phase is Phase.SETTLING else []
            case StoreLost():
                return self._ask_store_again()
            case Fetched() | FetchFailed():
                return self._fetch_ended(event)
            case Reloaded():
                self.work = self.work if event.lineage == self.held else None  # gradients of a state that is given up
                self.held, self.looked = event.lineage, self.log.head.hash
                return self._next_step()
            case WaitEnded():
                self.evidence = event.evidence
                return [self._join()] if self.phase is Phase.WAITING else []
            case HoldEnded():
                return [self._join()] if self.phase is Phase.HOLDING else []
            case OrderReady():
                self.ready, self.follows = event.order, False
                return []
            case Rested():
                return self._next_step() if self.phase is Phase.RESTING else []
        raise AssertionError(f"unknown event {event!r}")

    # ---- quorum

    def _me(self) -> Member:
        record = self.log.get(self.held)
        if record is not None and record.position(self.replica, self.rules.deal) in self.skips:
            self.unusable = Unusable(self.held, -1)
        return Member(
            self.replica,
            self.incarnation,
            self.held_step,
            self.held,
            self.following.fetching,
            self.epoch,
            entries=len(self.log),
            seen=max(self.seen, self.log.head.generation),
            evidence=self.evidence if self.evidence is not None and self.evidence.head == self.log.head.hash else None,
            looked=self.looked,
            unusable=self.unusable,
            overflow=self.overflow,
            overtaken=self.following.overtaken,
            held_since=self.following.held_since,
            blames=self.standing.blames,
            breaks=self.standing.breaks,
            sits_until=self.standing.sits_until,
            pauses=self.standing.pauses,
            stop=self.stop,
            order=self.order,
            unsure=self.unsure,
        )

    def _join(self) -> Join:
        self.phase, self.attempt, self.order = Phase.JOINING, None, self.ready
        return Join(self._me())

    def _next_step(self) -> list[Action]:
        """Join, and begin the work at once if this replica is probably healthy: the work overlaps the quorum."""
        actions: list[Action] = [self._join()]
        if self.held == self.log.head.hash and not is_last(self.log.head, self.steps, self.life):
            actions += self._begin_work(self.log.head)
        return actions

    def _begin_work(self, base: CommitRecord) -> list[Action]:
        position = base.position(self.replica, self.rules.deal)
        if self.work == (base.hash, position) or position in self.skips:
            return []  # running, or preserved from a broken exchange; or not to be computed
        self.work = (base.hash, position)
        return [Work(base.hash, position, base.step + 1, self.order)]

    def _formed(self, event: Formed) -> list[Action]:
        actions = self._learn(event.entries)
        self.log.drop(event.begin)
        if not self.following.fetching:
            self.held, replays = self.following.replay(self.held)
            self.work = None if replays else self.work
            actions += replays
        generation = generation_of(event.generation, event.members)
        me = next((m for m in event.members if (m.replica, m.incarnation) == (self.replica, self.incarnation)), None)
        if me is None or self.log.head.generation > generation:
            return [*actions, self._join()]  # this quorum is older than the newest commit, or not ours
        self.seen = max(self.seen, generation)
        # A straggler's entry may stand in the log by now for some of us and not for others: a common view of it.
        common = max(m.entries for m in event.members)
        if 0 < common <= self.log.behind.begin or len(self.log) < common:
            return [*actions, self._join()]  # what they said is older than what the log begins with, or could not be read here
        view = self.log.first(common) if common else self.log
        assessment = assess(event.members, view, generation, self.rules, self.life, self.steps)
        if isinstance(assessment, Stranded):
            return actions + self._stranded(assessment, generation)
        behind, sitting = self.replica in assessment.behind, self.replica in assessment.sitting
        if not behind and not sitting and self.held != assessment.base.hash:
            return [*actions, self._join()]  # fetched state arrived since we joined, and is better than all here
        if not assessment.supersedes and any(m.evidence is not None for m in event.members):
            actions.append(WaitOver(generation, view.head))
            self.evidence = None
        if sitting:
            self.standing.sit_out(generation, self.rules.blame)
            return [*actions, self._join()]
        actions += self.offers.serve(self.held, event.members, assessment)
        if behind:
            actions += self.following.begin(self.held, me, event.members, assessment, generation)
        else:
            actions += self.following.healthy()  # what is under way would replace what we work on
        if is_last(assessment.base, self.steps, self.life):
            self.settled = not assessment.behind
            self.phase = Phase.RESTING
            return [*actions, Rest()]
        if not behind:
            actions += self._begin_work(assessment.base)
        if assessment.hold is not None:
            self.phase = Phase.HOLDING
            return [*actions, Hold(assessment.hold)]
        candidate = successor(assessment, generation, event.members, self.life, self.rules.advance, self.rules.deal)
        self.attempt = Attempt(generation, event.members, assessment, candidate, view.head.hash)
        if not candidate.applied:
            return actions + ([self._join()] if behind else self._commit())
        return [*actions, self._exchange(self.attempt, contribute=self.replica in assessment.contributors)]

    def _exchange(self, attempt: Attempt, contribute: bool) -> Exchange:
        assessment = attempt.assessment
        fresh = self.epoch < 0 or reusable_epoch(attempt.taking_part) != self.epoch or attempt.group != self.group
        self.group = attempt.group
        if fresh:
            self.epoch = attempt.generation
        self.phase = Phase.EXCHANGING
        return Exchange(attempt.generation, assessment.members, assessment.contributors, contribute, fresh)

    def _stranded(self, stranded: Stranded, generation: int) -> list[Action]:
        """No member holds what others may hold: look for durable state if that is all that is missing, else wait."""
        ruling, head = stranded.ruling, stranded.head
        if ruling.look and self.looked != head.hash:
            self.phase = Phase.RELOADING
            return [*self.following.abandon(), Reload(stranded.base.step if stranded.base is not None else -1)]
        self.phase = Phase.WAITING
        return [Wait(generation, head, ruling.missing, ruling.waited_s)]

    def _learn(self, entries: Sequence[CommitRecord]) -> list[Action]:
        """Take new log entries; drop kept records that are not on the chain."""
        actions: list[Action] = []
        for entry in entries:
            actions.append(Persist(len(self.log), entry))
            self.log.append(entry)
        if self.follows:  # a predecessor's last record may come after this incarnation's start
            self.ready = self.log.head.orders.get(self.replica, "")
        return actions + self.following.learned()

    # ---- catch-up

    def _fetch_ended(self, event: Fetched | FetchFailed) -> list[Action]:
        if event.lineage != self.following.fetching:
            return []
        held, actions = self.following.ended(event, self.held)
        self.held, self.work = held, self.work if held == self.held else None
        if self.phase is Phase.REPAIRING:
            actions += self._next_step()
        return actions

    # ---- exchange

    def _rank_answered(self, event: RankDone | RankFailed) -> list[Action]:
        attempt = self.attempt
        if attempt is None or event.generation != attempt.generation or self.phase not in (Phase.EXCHANGING, Phase.BREAKING):
            return []
        actions: list[Action] = []
        answers = attempt.answered(event)
        if isinstance(event, RankFailed) and self.phase is Phase.EXCHANGING:
            self.phase, self.epoch = Phase.BREAKING, -1
            actions.append(Abort(attempt.generation, event.reason))
        if answers < self.group_world_size:
            return actions
        if attempt.failed:
            self.phase = Phase.SETTLING
            self.standing.broke(attempt.blamed)
            return [*actions, ReadLog(len(self.log))]
        self.standing.succeeded()
        attempt.note_batches(self.rules.batches)
        refused, changed = self.watch.problem(attempt.candidate, attempt.batches), self._read_again(attempt)
        if refused or (changed and self.rules.batches.strict):
            return [*actions, Refuse(refused or changed)]
        if (found := attempt.differing_states(self.rules.check_every)) is not None:
            actions += (differ := self._differ(attempt, found))
            if differ and isinstance(differ[0], Differ | Restart):
                return actions
        constant = self.watch.said() if self.replica == min(attempt.candidate.replicas) else ""
        actions += [Tell(text) for text in (changed, constant) if text]
        if not all(attempt.done.values()):
            return actions + self._not_finite(attempt)
        if self.held != attempt.assessment.base.hash:
            # still behind: a holder of the base decides; keep what is needed to follow
            self.following.keep(attempt.candidate)
            return [*actions, Keep(attempt.candidate), self._join()]
        return actions + self._commit()

    def _differ(self, attempt: Attempt, found: Differ) -> list[Action]:
        """The run ends; with `fetch_differing` some replicas start again, once for the same ones in the same part."""
        odd = found.odd or found.replicas[1:]
        if not self.rules.fetch_differing or (odd, found.part) in self.fetched:
            return [found]
        self.fetched.add((odd, found.part))
        text = f"the state of replica {', '.join(map(str, odd))} differs from that of the others before step {found.step}"
        if self.replica in odd:
            return [Restart(f"{text} ({found.part}): it is fetched")]
        lowest = min(replica for replica in attempt.candidate.replicas if replica not in odd)
        return [Tell(f"{text} ({found.part}); it fetches theirs")] if self.replica == lowest else []

    def _read_again(self, attempt: Attempt) -> str:
        """What is wrong with the batches that this replica's ranks read again after a restart; "" if nothing is known."""
        base, mine = attempt.assessment.base, attempt.read_again
        if len(mine) < self.group_world_size or not (known := base.batches.get(self.replica, 0)):
            return ""
        position = base.positions[self.replica]
        votes = {rank: (digest if at == position else 0,) for rank, (at, digest) in mine.items()}
        found = combined(by_stream(votes, 0, self.rules.batches)[0] or [0])
        if not found or found == known:
            return ""
        self.unsure = position
        return (
            f"the data of replica {self.replica} is another than before its restart: the batches before position {position} "
            "are others when they are read again. From there on it is not known whether each item counts once; give the data "
            "an order that depends on seeds and session.stream alone, or use session.sampler(dataset)"
        )

    def _not_finite(self, attempt: Attempt) -> list[Action]:
        if self.replica not in attempt.assessment.contributors or self.held != attempt.assessment.base.hash:
            return [self._join()]
        if self.rules.exclusion:
            self.phase = Phase.EXAMINING
            return [Examine(attempt.generation)]
        self.overflow = Overflow(self.held, attempt.assessment.contributors)
        return [self._join()]

    def _examined(self, event: Examined) -> list[Action]:
        attempt = self.attempt
        if attempt is None or event.generation != attempt.generation or self.phase is not Phase.EXAMINING:
            return []
        attempt.examined[event.rank] = event.finite
        if len(attempt.examined) < self.group_world_size:
            return []
        found = [rank for rank, finite in sorted(attempt.examined.items()) if not finite]
        if found:
            self.unusable = Unusable(self.held, found[0])
        else:
            self.overflow = Overflow(self.held, attempt.assessment.contributors)
        return [self._join()]

    # ---- commit

    def _commit(self) -> list[Action]:
        """Propose the record, unless entries that were not assessed stand in the log and must not be superseded."""
        attempt = self.attempt
        assert attempt is not None
        assessed = self.log.head.hash == attempt.head
        if not assessed and len(self.log.lost_behind(attempt.candidate.parent)) > 1:
            return [self._join()]
        self.phase = Phase.COMMITTING
        return [Append(len(self.log), attempt.candidate)]

    def _appended(self, event: Appended) -> list[Action]:
        assert self.attempt is not None
        candidate = self.attempt.candidate
        actions = self._learn([event.standing]) if event.index == len(self.log) else []
        if event.standing.hash == candidate.hash:
            self.held, self.work = candidate.hash, None
            return [*actions, Apply(candidate), *self._too_often_excluded(candidate), *self._next_step()]
        if event.standing.generation < candidate.generation:
            return actions + self._commit()
        return [*actions, self._join()]  # this replica is late; the next quorum decides whether its state is valid

    def _too_often_excluded(self, newest: CommitRecord) -> list[Action]:
        count = exclusions(self.log, newest, (self.replica, self.incarnation), self.life, self.rules)
        if count <= self.rules.nonfinite_limit:
            return []
        return [Restart(f"its gradient was not finite in {count} of the last {self.rules.nonfinite_window} steps")]

    def _settled(self, event: LogRead) -> list[Action]:
        """After a broken exchange: if others finished it and committed, take their reduced buckets."""
        assert self.attempt is not None
        attempt, candidate = self.attempt, self.attempt.candidate
        actions = self._learn(event.entries)
        decided, waits = self.log.after(candidate.parent), self.held != candidate.parent or bool(self.following.fetching)
        if waits or decided is None or decided.generation != candidate.generation:
            return [*actions, self._join()]
        candidate = decided  # with the digests of batches, which a broken exchange has not
        donors = tuple(m for m in attempt.members if m.replica != self.replica)
        self.phase = Phase.REPAIRING
        self.following.repair(candidate)
        return [*actions, FetchReduced(candidate.hash, donors)]

    def _ask_store_again(self) -> list[Action]:
        if self.phase is Phase.COMMITTING and self.attempt is not None:
            return [Append(len(self.log), self.attempt.candidate)]
        if self.phase is Phase.SETTLING:
            return [ReadLog(len(self.log))]
        return []
