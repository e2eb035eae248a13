"""Quorums over a key-value store alone: who takes part in a step where no membership service runs.

In: one member's identity, and the answers to its store operations, each with the time. Out: the operations (`Get`, `Set`,
`PutIfAbsent`, `Delete`, `Pause`, `Stamp`), and in the end the quorum that formed. Pure: `announce` and `join` are generators
that yield an operation and are sent a `Reply`; the same code runs on a real store and in a simulated one.

    known/I     list of the incarnations that have announced themselves: entry I is put once
    count       about how many entries the list has, never more
    beat/ID     a counter that the member ID raises; each reader measures for how long it did not change
    ask/ID      the round that the member asks for, and its account of itself
    formed/N    the quorum of round N: put once, so there is one quorum for each round, whichever member proposes it
    newest      about which round is the newest

A formed round that is `KEPT` rounds old is emptied, so that a member that was stopped meanwhile cannot form it again, and
deleted when it is `REMEMBERED` rounds old.

The quorum of round N is complete (all living members that ask) as soon as every living member of the last quorum asks (in the
first round, or when none of them lives, every living member that announced itself); or after `join_s` with those who ask. A
member that has ended by the driver's report, whose counter has not changed for `silent_s` of observed time, or that has a
successor is not living. A joiner asks, and is in the next quorum that forms.

The first living member of the last quorum proposes it, and reads what all others ask for; the second looks at all others as
well, to take its place. The rest look at these two alone, so that the requests of a quorum grow with the number of members, not
with its square. A member that has waited for `join_s` proposes by itself. When the first two end together without a report of
the driver, the next two begin to look after `silent_s`.

Generations are microseconds and grow with the rounds: the proposer's time stamp, or that of the last quorum and the time since
this member learned of it (at least one, at most `MOST_S`), or one more than the highest that any member has seen. So time also
passes while a proposer's clock is behind the last stamp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KEPT, REMEMBERED = 64, 1 << 15  # rounds
PREFIX = "quorum/"
MOST_S = 10.0  # that a round adds to the generation where the proposer's clock is behind
_EMPTY = "-"
_NO_ROUND = -1
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.002, 0.02  # between two looks at the others
_LOOK_S = 0.05  # between two looks at their signs of life
_LOOKING = 2  # members that look at all others

Id = tuple[int, int]  # replica, incarnation


@dataclass(frozen=True)
class Get:
    key: str


@dataclass(frozen=True)
class Set:
    key: str
    value: str


@dataclass(frozen=True)
class PutIfAbsent:
    """Answered with what the key has now."""

    key: str
    value: str


@dataclass(frozen=True)
class Delete:
    key: str


@dataclass(frozen=True)
class Pause:
    seconds: float


@dataclass(frozen=True)
class Stamp:
    """Answered with the time as whole microseconds of the run, as text."""


Operation = Get | Set | PutIfAbsent | Delete | Pause | Stamp


@dataclass(frozen=True)
class Reply:
    """`value` of the operation, None where there is none; `now_s` by a clock that only goes forward."""

    value: str | None
    now_s: float


@dataclass(frozen=True)
class Quorum:
    """`accounts` of the members, by replica."""

    generation: int
    accounts: tuple[Mapping[str, Any], ...]


class Over(Exception):
    """This incarnation takes no longer part; the text is the reason."""


@dataclass(frozen=True)
class QuorumRules:
    """In seconds. `silent_s`: a member whose counter does not change for longer is not living; `join_s`: wait for living
    members that do not ask."""

    silent_s: float
    join_s: float


@dataclass
class _Peer:
    beat: str | None = None
    looked_s: float | None = None  # when the counter was read last
    still_s: float = 0.0  # observed
    ended: bool = False
    round: int = _NO_ROUND  # that it asks for
    account: Mapping[str, Any] = field(default_factory=dict)


def may_form(
    me: Id, last: Iterable[Id] | None, living: Iterable[Id], asking: Iterable[Id], waited_s: float, join_s: float
) -> bool:
    """Whether the members that ask are a quorum now. `last`: members of the last one, None before the first."""
    alive = {*living, me}
    expected = set(last or ()) & alive or alive
    return waited_s >= join_s or expected <= {*asking, me}


class StoreQuorum:
    """One member's view. `ended_key` returns the key under which the driver reports that an incarnation has ended."""

    def __init__(self, me: Id, rules: QuorumRules, ended_key: Callable[[int, int], str], prefix: str = PREFIX) -> None:
        self._me, self._rules, self._ended_key, self._prefix = me, rules, ended_key, prefix
        self._beats = 0
        self._peers: dict[Id, _Peer] = {}
        self._over = ""  # why this incarnation takes part no more
        self._known: list[Id] = []  # the list of known incarnations, as far as it was read
        self._newest: dict[int, int] = {me[0]: me[1]}  # by replica, the incarnation
        self._round = 0  # the next one, as far as is known
        self._last: tuple[Id, ...] | None = None  # members of the quorum before it
        self._generation, self._taken_s = 0, 0.0  # of that one, and when this member learned of it

    def beat(self) -> Set:
        """A sign of life, to be sent again and again."""
        self._beats += 1
        return Set(self._key("beat", self._me), str(self._beats))

    def withdraw(self) -> Set:
        """This member asks for no round any more."""
        return Set(self._key("ask", self._me), json.dumps({"round": _NO_ROUND}))

    def announce(self) -> Generator[Operation, Reply, None]:
        """Say that this member is there; from then on the others wait for it in the first round."""
        yield self.beat()
        mine = _text(self._me)
        index = int((yield Get(f"{self._prefix}count")).value or 0)
        while (yield PutIfAbsent(f"{self._prefix}known/{index}", mine)).value != mine:
            index += 1
        yield Set(f"{self._prefix}count", str(index + 1))

    def join(self, account: Mapping[str, Any]) -> Generator[Operation, Reply, Quorum]:
        """Take part in the next round. `account`: the member's report on itself, JSON; `seen` in it is the highest generation
        that it has seen. Raises Over for an incarnation that has ended, or has a successor."""
        account = json.loads(json.dumps(account))
        now = yield from self._catch_up()
        asked_s, pause_s, looked_s = now, _FIRST_PAUSE_S, None
        yield self._asking(account)
        while True:
            reply = yield Get(self._formed_key(self._round))
            if reply.value is None:
                late = reply.now_s - asked_s >= self._rules.join_s
                first = yield from self._first()
                looks = late or self._me in first
                if looks:
                    yield from self._read_known()
                    yield from self._read_asks()
                if (looked_s is None and looks) or reply.now_s - (looked_s or asked_s) >= _LOOK_S:
                    yield from self._look(list(self._peers) if looks else first)
                    newest = yield Get(f"{self._prefix}newest")
                    looked_s = newest.now_s
                    if newest.value is not None and int(newest.value) >= self._round:
                        if (yield Get(self._formed_key(self._round))).value is None:  # it was deleted
                            yield from self._catch_up()
                            yield self._asking(account)
                        continue
                if not (late or self._me == first[0]) or not self._complete(reply.now_s - asked_s):
                    yield Pause(pause_s)
                    pause_s = min(_LAST_PAUSE_S, 1.5 * pause_s)
                    continue
                yield from self._look(list(self._peers))  # members that are known to have ended are not counted
                reply = yield from self._propose(account)
            assert reply.value is not None
            accounts: dict[Id, Mapping[str, Any]] = {}
            formed = self._round
            if reply.value != _EMPTY:
                accounts = self._take(reply.value, reply.now_s)
            now = yield from self._catch_up()
            if self._round == formed + 1 and accounts.get(self._me) == account:
                return Quorum(self._generation, tuple(accounts[member] for member in sorted(accounts)))
            if self._me not in accounts:  # perhaps this incarnation is over
                yield from self._read_known()
                yield from self._look(())
            asked_s, pause_s, looked_s = now, _FIRST_PAUSE_S, None
            yield self._asking(account)

    # ---------------------------------------------------------------- rounds

    def _catch_up(self) -> Generator[Operation, Reply, float]:
        """Go on to the newest round that is known to have formed; returns the time."""
        reply = yield Get(f"{self._prefix}newest")
        newest = _NO_ROUND if reply.value is None else int(reply.value)
        if newest >= self._round:
            reply = yield Get(self._formed_key(newest))
            if reply.value is not None and reply.value != _EMPTY:
                self._round = newest
                self._take(reply.value, reply.now_s)
        while (reply := (yield Get(self._formed_key(self._round)))).value is not None:
            if reply.value == _EMPTY:
                self._round += 1
            else:
                self._take(reply.value, reply.now_s)
        return reply.now_s

    def _take(self, text: str, now_s: float) -> dict[Id, Mapping[str, Any]]:
        """Note the quorum of the present round, and go to the next; its members' accounts."""
        raw = json.loads(text)
        accounts = {_id(member): told for member, told in raw["members"].items()}
        self._last, self._generation, self._taken_s = tuple(sorted(accounts)), raw["generation"], now_s
        self._round += 1
        return accounts

    def _propose(self, account: Mapping[str, Any]) -> Generator[Operation, Reply, Reply]:
        members = {self._me: account} | {m: self._peers[m].account for m in self._askers()}
        stamped = yield Stamp()
        since_us = int(1e6 * min(MOST_S, stamped.now_s - self._taken_s)) if self._last is not None else 0
        seen = max(int(told.get("seen", 0)) for told in members.values())
        generation = max(int(stamped.value or 0), self._generation + max(1, since_us), 1 + seen)
        mine = json.dumps({"generation": generation, "members": {_text(m): members[m] for m in sorted(members)}})
        stands = yield PutIfAbsent(self._formed_key(self._round), mine)
        if stands.value == mine:
            newest = (yield Get(f"{self._prefix}newest")).value
            if newest is None or int(newest) < self._round:
                yield Set(f"{self._prefix}newest", str(self._round))
            if self._round >= KEPT:
                yield Set(self._formed_key(self._round - KEPT), _EMPTY)
            if self._round >= REMEMBERED:
                yield Delete(self._formed_key(self._round - REMEMBERED))
            return Reply(mine, stamped.now_s)  # of when the generation is
        return stands

    def _complete(self, waited_s: float) -> bool:
        living = [member for member in self._peers if self._lives(member)]
        return may_form(self._me, self._last, living, self._askers(), waited_s, self._rules.join_s)

    def _askers(self) -> list[Id]:
        return [m for m, peer in self._peers.items() if peer.round == self._round and self._lives(m)]

    def _lives(self, member: Id) -> bool:
        """As far as this member has looked."""
        if member == self._me:
            return True
        if self._newest.get(member[0], member[1]) > member[1]:
            return False
        peer = self._peers.get(member)
        return peer is None or (not peer.ended and peer.still_s <= self._rules.silent_s)

    # ---------------------------------------------------------------- the others

    def _first(self) -> Generator[Operation, Reply, list[Id]]:
        """The members that look at all others, the one that proposes first. At least one."""
        first = [member for member in self._last or () if self._lives(member)][:_LOOKING]
        if not first:  # this member has announced itself, so the list has a living member
            while len(first := self._living_known()[:_LOOKING]) < _LOOKING:
                if not (yield from self._read_entry()):
                    break
        return first or [self._me]

    def _living_known(self) -> list[Id]:
        return [member for member in dict.fromkeys(self._known) if self._lives(member)]

    def _read_known(self) -> Generator[Operation, Reply, None]:
        while (yield from self._read_entry()):
            pass
        if self._over:
            raise Over(self._over)

    def _read_entry(self) -> Generator[Operation, Reply, bool]:
        """The next entry of the list, if there is one."""
        text = (yield Get(f"{self._prefix}known/{len(self._known)}")).value
        if text is None:
            return False
        replica, incarnation = member = _id(text)
        self._known.append(member)
        if replica == self._me[0] and incarnation > self._me[1]:
            self._over = f"replica {replica} was started again; incarnation {self._me[1]} is over"
        newest = self._newest.get(replica, -1)
        if incarnation >= newest:
            self._newest[replica] = incarnation
            if replica != self._me[0]:
                if incarnation > newest:
                    self._peers.pop((replica, newest), None)
                self._peers.setdefault(member, _Peer())
        return True

    def _read_asks(self) -> Generator[Operation, Reply, None]:
        for member, peer in self._peers.items():
            if peer.round != self._round and self._lives(member):
                yield from self._read_ask(member)

    def _read_ask(self, member: Id) -> Generator[Operation, Reply, None]:
        text = (yield Get(self._key("ask", member))).value
        if text is not None:
            told = json.loads(text)
            self._peers[member].round, self._peers[member].account = told["round"], told.get("account", {})

    def _look(self, members: Iterable[Id]) -> Generator[Operation, Reply, None]:
        """Read whether this member is over, and the counters of these. Time without observation counts little, because the
        store may have been unreachable."""
        if (yield Get(self._ended_key(*self._me))).value is not None:
            raise Over(f"the driver saw incarnation {self._me[1]} of replica {self._me[0]} end; it is over")
        for member in members:
            if member == self._me or (peer := self._peers.setdefault(member, _Peer())).ended:
                continue
            peer.ended = (yield Get(self._ended_key(*member))).value is not None
            reply = yield Get(self._key("beat", member))
            if reply.value != peer.beat or peer.looked_s is None:
                peer.still_s = 0.0
            else:
                peer.still_s += min(reply.now_s - peer.looked_s, self._rules.silent_s / 4)
            peer.beat, peer.looked_s = reply.value, reply.now_s
            yield from self._read_ask(member)  # it may have asked again

    # ---------------------------------------------------------------- keys

    @staticmethod
    def traces_of(member: Id, prefix: str = PREFIX) -> list[str]:
        """The keys of a member whose successor takes part: no member reads them any more. Its entry in the list of known
        incarnations stays, since a new member reads that list from its begin."""
        return [f"{prefix}{what}/{_text(member)}" for what in ("beat", "ask")]

    def _asking(self, account: Mapping[str, Any]) -> Set:
        return Set(self._key("ask", self._me), json.dumps({"round": self._round, "account": account}))

    def _key(self, what: str, member: Id) -> str:
        return f"{self._prefix}{what}/{_text(member)}"

    def _formed_key(self, number: int) -> str:
        return f"{self._prefix}formed/{number}"


def _text(member: Id) -> str:
    return f"{member[0]}:{member[1]}"


def _id(text: str) -> Id:
    replica, _, incarnation = text.partition(":")
    return int(replica), int(incarnation)
