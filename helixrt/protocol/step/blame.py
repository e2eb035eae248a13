"""Who sits out after broken exchanges: a replica that reaches the membership service and not its peers.

In: the members' accounts, each with the incarnations that were silent to it in its last exchange if that
broke. Out: who takes no part in the next exchange, the same on every member, the blamed ones too.

- A member that more than half of the others blame, and at least two, sits out at once.
- Without a majority nothing happens for `breaks` broken exchanges in a row; then one of those involved sits
  out: one that is behind, else the one with the highest id. One that sat out before and breaks the exchange again
  sits out at once.
- A pause is `pause_s`, and doubles with each up to `pause_max_s`, until an exchange with the replica succeeds; it
  ends by generation.
- The replicas that hold the base are never all left out: then those that blame them sit out instead.

FT-HSDP leaves a broken peer to its scheduler. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from helixrt.protocol.step.lineage import Incarnation
from helixrt.protocol.step.supersede import GENERATIONS_PER_S


@dataclass(frozen=True)
class BlameRules:
    breaks: int = 3
    pause_s: float = 2.0
    pause_max_s: float = 60.0


class Account(Protocol):
    """The part of a `Member` that blame needs."""

    @property
    def replica(self) -> int: ...
    @property
    def incarnation(self) -> int: ...
    @property
    def blames(self) -> tuple[Incarnation, ...]: ...
    @property
    def breaks(self) -> int: ...
    @property
    def sits_until(self) -> int: ...
    @property
    def pauses(self) -> int: ...


def pause_generations(times: int, rules: BlameRules) -> int:
    """How many generations the `times`-th pause in a row lasts, counted from 1."""
    seconds = min(rules.pause_max_s, rules.pause_s * 2.0 ** min(times - 1, 30))
    return round(seconds * GENERATIONS_PER_S)


@dataclass
class Standing:
    """What one replica says of its own exchanges: an `Account` without its name. `breaks` and `pauses` are counted in a row."""

    blames: tuple[Incarnation, ...] = ()
    breaks: int = 0
    pauses: int = 0
    sits_until: int = 0  # a generation

    def broke(self, blamed: tuple[Incarnation, ...]) -> None:
        """An exchange broke, in which these were silent."""
        self.blames, self.breaks = blamed, self.breaks + 1

    def succeeded(self) -> None:
        """An exchange did not break."""
        self.blames, self.breaks, self.pauses = (), 0, 0

    def sit_out(self, generation: int, rules: BlameRules) -> None:
        """Begin a pause with this generation, if none is under way."""
        if self.sits_until <= generation:
            self.pauses += 1
            self.sits_until = generation + pause_generations(self.pauses, rules)
            self.blames, self.breaks = (), 0


def accusers(members: Sequence[Account]) -> dict[int, set[int]]:
    """For each blamed member, the members that blame it."""
    present = {(m.replica, m.incarnation) for m in members}
    found: dict[int, set[int]] = {}
    for member in members:
        for blamed in member.blames:
            if blamed in present and blamed[0] != member.replica:
                found.setdefault(blamed[0], set()).add(member.replica)
    return found


def sitting_out(members: Sequence[Account], holders: Sequence[int], generation: int, rules: BlameRules) -> frozenset[int]:
    """The replicas that take no part in the exchange of this generation. `holders` hold the base."""
    still = {m.replica for m in members if m.sits_until > generation}
    active = [m for m in members if m.replica not in still]
    blamed = accusers(active)
    others = len(active) - 1
    out = {x for x, by in blamed.items() if len(by) >= 2 and 2 * len(by) > others}
    if blamed and not out:
        involved = set(blamed).union(*blamed.values())
        returned = {m.replica for m in active if m.pauses and m.replica in involved}
        if returned or max(m.breaks for m in active) >= rules.breaks:
            out = {_least_needed(returned or involved, holders)}
    out |= still
    if out >= set(holders):  # a member must hold the base: those that blame the holders sit out instead
        out = ({r for holder in holders for r in blamed.get(holder, ())} | out) - set(holders)
    if len(out) == len(members):
        return frozenset()
    return frozenset(out)


def _least_needed(involved: set[int], holders: Sequence[int]) -> int:
    behind = involved - set(holders)
    return max(behind or involved)
