"""Quorum rules: who is healthy, who is behind, and from what state a step starts.

In: the members' own accounts (step, lineage hash …), the run's log and the rules. Out: an `Assessment`, or a
`Stranded` when the quorum may not go on yet; the same on every member that sees the same log. Follows
FT-HSDP section 4.3 (Figure 6), with the lineage hash in place of the bare step number: a replica whose
chain differs is behind, whatever its step.
Pure: no clock, no I/O.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from helixrt.protocol.step.batches import BatchRules
from helixrt.protocol.step.blame import BlameRules, sitting_out
from helixrt.protocol.step.deal import Deal
from helixrt.protocol.step.lineage import CommitRecord, Exclusion, Incarnation, Log, is_last
from helixrt.protocol.step.supersede import GENERATIONS_PER_S, Evidence, Ruling, rule


@dataclass(frozen=True)
class StepRules:
    """What the rules of a step depend on; the same for all replicas of a run.

    A replica that is behind keeps at most `replay` sets of reduced buckets while it fetches; donors keep at
    most `snapshots` snapshots at a time. A replica whose fetches were overtaken `overtaken` times has the
    others wait for it, once, for at most `hold_s`. With `exclusion` off a sum that is not finite commits
    `applied=False` without a search for the culprit (an optimizer with a gradient scaler). A replica
    that was excluded more than `nonfinite_limit` times in `nonfinite_window` steps is restarted. A replica's stream moves
    on by `advance` batches in each step that it commits (micro-batches, where the stream counts these). `deal` is that of the
    records of this life. `batches`: what is looked for in the digests of batches.
    In `check_every` steps the whole state is compared, part by part; with `fetch_differing` replicas that differ from the
    others fetch their state.
    """

    replay: int = 16
    snapshots: int = 1
    overtaken: int = 2
    hold_s: float = 600.0
    supersede_after_s: float = 600.0
    exclusion: bool = True
    nonfinite_limit: int = 10
    nonfinite_window: int = 100
    blame: BlameRules = field(default_factory=BlameRules)
    advance: int = 1
    deal: tuple[Deal, ...] = ()
    batches: BatchRules = field(default_factory=BatchRules)
    check_every: int = 50
    fetch_differing: bool = False


@dataclass(frozen=True)
class Unusable:
    """A declaration: my gradient on `base` must not be summed, by the finding of group rank `rank` (-1: skipped by order)."""

    base: str
    rank: int


@dataclass(frozen=True)
class Overflow:
    """A declaration: the sum of the gradients of `of` on `base` is not finite, and my own gradient is finite."""

    base: str
    of: tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One replica's account of itself when it joins a quorum.

    `lineage` is the hash of the record whose state it holds ("" if it holds none yet), `fetching`
    the hash of the state it is fetching ("" if none), `epoch` the generation at which its exchange
    was last configured and is still sound (-1 if it must be configured again), `addresses` where its
    ranks serve state, in rank order. `incarnation` distinguishes a restarted replica from its predecessor.
    `entries` is how many entries of the log it knew: members read the log each at its own moment, and
    assess it as far as the one who knew most (0: not said, all that was read counts).

    `seen` is the highest generation it has seen. `evidence` and `looked` (the head for which it has looked for a newer
    checkpoint) serve the rule of superseding; `unusable` and `overflow` a sum that was not finite; `overtaken` (fetches thrown
    away because the others were faster) and `held_since` (the generation at which the others began to wait for its fetch, 0:
    never) catch-up; `blames`, `breaks` (exchanges broken in a row), `sits_until` (a generation) and `pauses` (in which it sat
    out, in a row) broken exchanges. `stop`: the reason if its program asks for the end of the run with the next record.
    `initial`: the digest of the state that it began with, which the quorums before the first commit compare. `order`: the hash
    of the order of the schedule that it works by, "" for the one that it began with. `unsure`: from which position on its
    streams gave other batches when they were read again (-1: none).
    """

    replica: int
    incarnation: int
    step: int
    lineage: str
    fetching: str = ""
    epoch: int = -1
    addresses: tuple[str, ...] = ()
    entries: int = 0
    seen: int = 0
    evidence: Evidence | None = None
    looked: str = ""
    unusable: Unusable | None = None
    overflow: Overflow | None = None
    overtaken: int = 0
    held_since: int = 0
    blames: tuple[Incarnation, ...] = ()
    breaks: int = 0
    sits_until: int = 0
    pauses: int = 0
    stop: str = ""
    initial: str = ""
    order: str = ""
    unsure: int = -1

    def to_plain(self) -> dict[str, Any]:
        """As plain containers, for JSON. A step makes one; `asdict` would copy every field."""
        nested = ((name, getattr(self, name)) for name in ("evidence", "unusable", "overflow"))
        return vars(self) | {name: asdict(value) for name, value in nested if value is not None}

    @staticmethod
    def from_plain(raw: Mapping[str, Any]) -> Member:
        """Inverse of `to_plain`, also after a way through JSON."""
        changed: dict[str, Any] = {"addresses": tuple(raw["addresses"]), "blames": _pairs(raw["blames"])}
        if (evidence := raw["evidence"]) is not None:
            pairs = {name: _pairs(evidence[name]) for name in ("holders", "ended")}
            changed["evidence"] = Evidence(**{**evidence, **pairs})
        if (unusable := raw["unusable"]) is not None:
            changed["unusable"] = Unusable(**unusable)
        if (overflow := raw["overflow"]) is not None:
            changed["overflow"] = Overflow(overflow["base"], tuple(overflow["of"]))
        return Member(**{**raw, **changed})


def _pairs(raw: Sequence[Sequence[int]]) -> tuple[Incarnation, ...]:
    return tuple((replica, incarnation) for replica, incarnation in raw)


@dataclass(frozen=True)
class Assessment:
    """What a quorum means: the state the step starts from, and what each of its members does.

    `contributors` are the healthy replicas whose gradients count, `excluded` the healthy ones whose do not,
    `behind` those that catch up, `sitting` those that take no part. With `applied` False the step is
    committed without an exchange. `hold`: nothing is exchanged while this replica's fetch comes in.
    """

    base: CommitRecord
    contributors: tuple[int, ...]
    behind: tuple[int, ...]
    supersedes: bool  # no member holds the head: committing will supersede it
    excluded: Mapping[int, Exclusion] = field(default_factory=dict)
    sitting: tuple[int, ...] = ()
    applied: bool = True
    hold: int | None = None

    @property
    def healthy(self) -> tuple[int, ...]:
        """Those that hold the base and take part."""
        return tuple(sorted((*self.contributors, *self.excluded))) if self.excluded else self.contributors

    @property
    def members(self) -> tuple[int, ...]:
        """Those that exchange."""
        return tuple(sorted((*self.healthy, *self.behind))) if self.behind else self.healthy


@dataclass(frozen=True)
class Stranded:
    """The quorum may not continue: records above `base` (None: no member holds a state of the chain) may be held elsewhere."""

    head: CommitRecord
    base: CommitRecord | None
    ruling: Ruling


def generation_of(formed: int, members: Sequence[Member]) -> int:
    """The generation of a quorum that the membership service numbers `formed`: it grows also when a clock steps back.

    Then it is above all that a member has seen, by a number (at most a second) that depends on who the members are:
    an earlier quorum whose members are all gone was of other incarnations, and must not have the same generation.
    """
    seen = max(m.seen for m in members)
    if formed > seen:
        return formed
    who = repr(sorted((m.replica, m.incarnation) for m in members))
    return seen + 1 + int.from_bytes(hashlib.sha256(who.encode()).digest()[:4]) % GENERATIONS_PER_S


def assess(
    members: Sequence[Member], log: Log, generation: int = 0, rules: StepRules | None = None, life: int = 0, steps: int = 0
) -> Assessment | Stranded:
    """The newest state on the head's chain that a member holds is the base; its holders are healthy.

    `steps` is the run's last step (0: none): from there on no member sits out, since nothing is exchanged.
    """
    return usual(members, log, generation) or by_the_rules(members, log, generation, rules or StepRules(), life, steps)


def usual(members: Sequence[Member], log: Log, generation: int) -> Assessment | None:
    """The quorum if all members hold the head and none declares, blames or sits out. Most steps have such a quorum."""
    head = log.head
    for m in members:
        if m.lineage != head.hash or m.blames or m.sits_until > generation or m.unusable or m.overflow:
            return None
    return Assessment(head, tuple(sorted([m.replica for m in members])), (), supersedes=False)


def by_the_rules(
    members: Sequence[Member], log: Log, generation: int, rules: StepRules, life: int, steps: int
) -> Assessment | Stranded:
    """See `assess`."""
    known = [record for m in members if m.lineage and log.on_chain(m.lineage) and (record := log.get(m.lineage)) is not None]
    base = max(known, key=lambda record: record.step, default=None)
    ruling = rule(
        log,
        base,
        life,
        present=[(m.replica, m.incarnation) for m in members],
        evidence=[m.evidence for m in members if m.evidence is not None],
        all_looked=all(m.looked == log.head.hash for m in members),
        after_s=rules.supersede_after_s,
    )
    if base is None or not ruling.permitted:
        return Stranded(log.head, base, ruling)
    holding = [m for m in members if m.lineage == base.hash]
    ended = is_last(base, steps, life)
    sitting = frozenset() if ended else sitting_out(members, [m.replica for m in holding], generation, rules.blame)
    healthy = [m for m in holding if m.replica not in sitting]
    excluded = {
        m.replica: Exclusion(m.incarnation, m.unusable.rank)
        for m in healthy
        if m.unusable is not None and m.unusable.base == base.hash
    }
    contributors = tuple(sorted(m.replica for m in healthy if m.replica not in excluded))
    behind = [m for m in members if m.lineage != base.hash and m.replica not in sitting]
    return Assessment(
        base,
        contributors,
        tuple(sorted(m.replica for m in behind)),
        supersedes=base.hash != log.head.hash,
        excluded=excluded,
        sitting=tuple(sorted(sitting)),
        applied=bool(contributors) and not any(m.overflow == Overflow(base.hash, contributors) for m in healthy),
        hold=_held_for(behind, generation, rules),
    )


def _held_for(behind: Sequence[Member], generation: int, rules: StepRules) -> int | None:
    """The replica that all wait for at this step boundary, if any: once per catch-up, and bounded."""
    for member in sorted(behind, key=lambda m: m.replica):
        since = member.held_since or generation
        if member.overtaken >= rules.overtaken and generation - since < rules.hold_s * GENERATIONS_PER_S:
            return member.replica
    return None


def successor(
    assessment: Assessment,
    generation: int,
    members: Sequence[Member],
    life: int = 0,
    advance: int = 1,
    deal: tuple[Deal, ...] = (),
) -> CommitRecord:
    """The record that this quorum will propose; equal on every member. `advance` and `deal` are those of the rules."""
    base = assessment.base
    incarnations = {m.replica: m.incarnation for m in members}
    positions = dict(base.positions) if base.deal == deal else {}
    for replica in assessment.healthy:
        positions[replica] = base.position(replica, deal) + advance
    orders = {r: order for r, order in base.orders.items() if r not in assessment.healthy}
    orders |= {m.replica: m.order for m in members if m.order and m.replica in assessment.healthy}
    same = base.deal == deal
    unsure = dict(base.unsure) if same else {}
    for member in members:
        if member.unsure >= 0 and member.replica in assessment.healthy:
            unsure.setdefault(member.replica, member.unsure)
    return CommitRecord(
        base.step + 1,
        generation,
        base.hash,
        tuple((replica, incarnations[replica]) for replica in assessment.contributors),
        positions,
        base.run,
        life,
        assessment.excluded,
        assessment.applied,
        next((m.stop for m in sorted(members, key=lambda m: m.replica) if m.stop), ""),
        deal,
        orders,
        {r: digest for r, digest in base.batches.items() if r not in assessment.healthy} if same else {},
        unsure,
    )


def reusable_epoch(members: Sequence[Member]) -> int:
    """The epoch all members share, if their exchange is still sound and whole; else -1."""
    epochs = {m.epoch for m in members}
    return epochs.pop() if len(epochs) == 1 else -1


def exclusions(log: Log, newest: CommitRecord, who: Incarnation, life: int, rules: StepRules) -> int:
    """For how many of the newest steps this incarnation's gradient was not finite; 0 if that of `newest` was."""
    replica, incarnation = who
    if replica not in newest.excluded:
        return 0
    window = [r for r in log.above(newest.step - rules.nonfinite_window) if r.life == life and replica in r.excluded]
    return sum(r.excluded[replica].incarnation == incarnation and r.excluded[replica].rank >= 0 for r in window)
