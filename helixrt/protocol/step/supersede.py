"""When a quorum may supersede commit records that none of its members holds (DESIGN, "The life of a step", 4).

In: the members' accounts of what they know about the log's head, and the log. Out: a `Ruling`, the same on
every member of the quorum.

With depth = the head's step less the base's, records may be superseded

- at once if depth is at most 1: one step is computed again, and no replica waits for a hung holder;
- at any depth if every holder has ended;
- at any depth after `after_s` seconds of *observed* waiting, or when the user accepts the loss.

Holders are the committers of the records above the base, and every incarnation with a holder entry on the
chain: it wrote the entry before it fetched or read a state, and may have replayed from there. A complete
checkpoint holds its record without end, so before more than one step is lost every member must have looked
for one. An incarnation that is in the quorum is judged by what it reports that it holds.

Waiting is counted in generations, by a counter per head in the run's store: each quorum without a holder
adds the difference of generations, at most `STEP_S`. So an outage, a suspended job or a clock that
jumps adds little. Pure: no clock, no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from helixrt.protocol.step.lineage import CommitRecord, Incarnation, Log

STEP_S = 10.0  # the most that one quorum adds to the seconds waited
GENERATIONS_PER_S = 1_000_000  # generations are microseconds of the run


@dataclass(frozen=True)
class Evidence:
    """What a member found in the run's store about a head that its quorum does not hold.

    `holders` are the incarnations with a holder entry on the head's chain, `ended` those holders and
    committers that have ended, all of the present life of the run. To be read in this order, again until
    nothing is new: ended, then holders; so that a replica that fetched from an ended holder is among the holders.
    """

    head: str
    holders: tuple[Incarnation, ...] = ()
    ended: tuple[Incarnation, ...] = ()
    waited_s: float = 0.0
    accepted: bool = False  # the user accepts the loss of the records that no member holds


@dataclass(frozen=True)
class Ruling:
    """Whether the quorum may build on its base; if not, who is waited for and how long that has been observed."""

    permitted: bool
    missing: tuple[Incarnation, ...] = ()
    waited_s: float = 0.0
    look: bool = False  # permitted once every member has looked for a newer checkpoint


@dataclass(frozen=True)
class Waited:
    """The counter of a head: the newest generation that was counted, and the seconds observed by then."""

    generation: int
    seconds: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Waited:
        return Waited(**json.loads(text))


def counted(last: Waited | None, generation: int) -> Waited:
    """The counter after a quorum without a holder; `last` itself if this generation was counted already."""
    if last is None:
        return Waited(generation, 0.0)
    if generation <= last.generation:
        return last
    return Waited(generation, last.seconds + min(STEP_S, (generation - last.generation) / GENERATIONS_PER_S))


def depth(log: Log, base: CommitRecord | None) -> int:
    """How many steps of the chain are lost if the next record follows `base`."""
    return log.head.step - (base.step if base is not None else -1)


def holders(log: Log, base: CommitRecord | None, life: int, entries: Iterable[Incarnation]) -> set[Incarnation]:
    """The incarnations of this life that may hold a record above the base; those of earlier lives have ended."""
    above = log.above(base.step if base is not None else -1)
    committers = {c for record in above if record.life == life for c in record.committers}
    return committers | set(entries)


def rule(
    log: Log,
    base: CommitRecord | None,
    life: int,
    present: Iterable[Incarnation],
    evidence: Iterable[Evidence],
    all_looked: bool,
    after_s: float,
) -> Ruling:
    """May a quorum of `present`, whose newest state on the chain is `base`, supersede what is above it?"""
    if base is not None and depth(log, base) <= 1:
        return Ruling(True)
    known = [e for e in evidence if e.head == log.head.hash]
    ended = {i for e in known for i in e.ended}
    entries = {i for e in known for i in e.holders}
    missing = tuple(sorted(holders(log, base, life, entries) - set(present) - ended))
    waited_s = max((e.waited_s for e in known), default=0.0)
    if not known or (missing and waited_s < after_s and not any(e.accepted for e in known)):
        return Ruling(False, missing, waited_s)
    if not all_looked or base is None:
        return Ruling(False, missing, waited_s, look=True)
    return Ruling(True, missing, waited_s)
