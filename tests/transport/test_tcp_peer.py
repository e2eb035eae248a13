"""A peer carries out what its machine says: in the machine's order, also when an action makes the machine hear more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from helixrt.errors import Cause
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.messages import Failure
from helixrt.transport.contract import Lost, Outcome
from helixrt.transport.tcp.peer import Peer


class Says:
    """A machine that answers each event with the actions it was given for it."""

    def __init__(self, answers: dict[type, list[m.Action]]) -> None:
        self.answers, self.closed, self.generation = answers, False, 1
        self.rails = [object()]

    def on(self, event: m.Event, now: float) -> list[m.Action]:
        return self.answers.get(type(event), [])


class Hears:
    """A `Host` that notes what a peer tells it, and does something when a rail is to be restored."""

    now = 1.0

    def __init__(self, restore: Callable[[Peer, int], None]) -> None:
        self.heard: list[Any] = []
        self.restore = restore

    def note(self, peer: Peer, event: m.ForTheRecord) -> None:
        self.heard.append(event)

    def add(self, outcome: Outcome) -> None:
        self.heard.append(outcome)

    def touched(self, peer: Peer) -> None:
        pass


def left(rail: int) -> m.RailLeft:
    return m.RailLeft(rail, Failure.PATH, "", 0)


def peer_of(link: Any, restore: Callable[[Peer, int], None]) -> tuple[Peer, Hears]:
    host = Hears(restore)
    return Peer(host, 1, link, [("", 0)], ()), host  # type: ignore[arg-type]


def test_what_an_action_makes_the_machine_say_comes_after_what_it_had_said() -> None:
    """A rail that is to be restored and cannot be reached is down at once, while more of the first answer is to be done."""
    link = Says({m.Tick: [left(1), m.RestoreRail(0), left(2), left(3)], m.RailDown: [left(4), m.RestoreRail(1), left(5)]})

    def restore(peer: Peer, rail: int) -> None:
        if rail == 0:
            peer.tell(m.RailDown(0, Failure.PATH, "nobody answers"))

    peer, host = peer_of(link, restore)
    peer.tell(m.Tick())
    assert [event.rail for event in host.heard] == [1, 2, 3, 4, 5]


def test_after_the_end_of_a_link_nothing_of_it_is_carried_out() -> None:
    lost = m.Lost(Cause("enough"), Failure.PATH)
    link = Says({m.Tick: [m.RestoreRail(0), left(1), lost, left(2)], m.RailDown: [left(3)]})
    peer, host = peer_of(link, lambda peer, rail: peer.tell(m.RailDown(0, Failure.PATH, "nobody answers")))
    peer.tell(m.Tick())
    assert host.heard == [left(1), Lost(1, Cause("enough"))]
    peer.tell(m.Tick())
    assert len(host.heard) == 2


def test_what_fails_leaves_nothing_for_the_next_event() -> None:
    link = Says({m.Tick: [m.RestoreRail(0), left(1)], m.Heard: [left(2)]})

    def restore(peer: Peer, rail: int) -> None:
        raise OSError("no such device")

    peer, host = peer_of(link, restore)
    with pytest.raises(OSError, match="no such device"):
        peer.tell(m.Tick())
    peer.tell(m.Heard(0))
    assert host.heard == [left(2)]

