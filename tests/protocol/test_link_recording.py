"""What a link heard, written down, read back and told to a new machine: it does the same, to the last action."""

from __future__ import annotations

import math
import random
from typing import get_args

import pytest

from helixrt.emulate.link_end import End
from helixrt.emulate.link_world import LinkWorld
from helixrt.emulate.path_world import HoppingEnd, PathWorld
from helixrt.errors import Cause
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Counters, Frame, Kind, counters_body
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.options import LinkOptions
from helixrt.protocol.link.recording import Opening, Recording, said

BODY = counters_body(Counters(3, 70, ((5, 6),)))
EVENTS: tuple[m.Event, ...] = (
    m.Submit(1, 0, 100_000),
    m.Submit(1, 1, 0, repeatable=False, deadline=12.5),
    m.Post(2, 0, 7),
    m.RailUp(0, 1),
    m.RailDown(0, m.Failure.DEVICE, "its cable\n"),
    m.RailSlow(1),
    m.RailMended(0),
    m.FrameArrived(0, Frame(Kind.ACK, 1, length=len(BODY), acknowledged=3, body=BODY)),
    m.FrameArrived(0, Frame(Kind.DATA, 1, sequence=4, op=-2, index=1, length=1 << 30, flags=1)),
    m.PayloadArrived(0, 4),
    m.Heard(1),
    m.Acknowledged(1, 2.5),
    m.FrameSent(0, 4),
    m.Settle(),
    m.Tick(),
    m.Forget(1),
    m.Abort(Cause("a reason", "rank 1", "log")),
    m.Close(),
)


def test_every_event_reads_back_as_it_was() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(m.Event)), "an event that is not tried here"
    hopping = HoppingOptions(unloaded=Unloaded(1e6, 1e-4), policy=PolicyName.FLOWBENDER, alpha=0.5)
    opening = Opening(3, 1, 2, LinkOptions(hopping=hopping, period_s=math.inf), seed=7)
    timed = tuple((0.1 + 0.3 * number, event) for number, event in enumerate(EVENTS))
    recording = Recording(opening, timed, {"marks": [[1.5, "cut"]]})
    lines = list(recording.lines())
    assert len(lines) == 1 + len(EVENTS) and not any("\n" in line for line in lines)
    assert Recording.of([*lines, ""]) == recording


WRONG = ('[1.0,"Nothing"]', '[1.0,"Heard"]', '[1.0,"Tick",1]', '[1.0,"RailDown",0,"bad luck",""]', "{}", "not JSON")


@pytest.mark.parametrize("line", WRONG)
def test_what_is_no_recording(line: str) -> None:
    first = next(Recording(Opening(1, 1, 1), ()).lines())
    with pytest.raises(ValueError):
        Recording.of([first, line])


def test_fields_that_came_later_have_their_defaults() -> None:
    first = next(Recording(Opening(1, 1, 1), ()).lines())
    assert Recording.of([first, '[1.0,"Submit",1,0,7]']).events == ((1.0, m.Submit(1, 0, 7)),)


class Recorded:
    """A link that is recorded."""

    def __init__(self, opening: Opening) -> None:
        self.link, self.opening = opening.link(), opening
        self.events: list[tuple[float, m.Event]] = []
        self.actions: list[list[m.Action]] = []
        on = self.link.on

        def recorded(event: m.Event, now: float) -> list[m.Action]:
            self.events.append((now, event))
            actions = on(event, now)
            self.actions.append(actions)
            return actions

        self.link.on = recorded  # type: ignore[method-assign]

    def replayed(self) -> tuple[Link, list[list[m.Action]]]:
        recording = Recording.of(Recording(self.opening, tuple(self.events)).lines())
        link = recording.opening.link()
        return link, [actions for _, _, actions in recording.replay(link)]


class RecordedLinks(LinkWorld):
    def make_end(self, me: int) -> End:
        self.recorded = Recorded(Opening(1, 1 - me, self.rails, self.options))
        return End(self, me, self.recorded.link)


class RecordedPaths(PathWorld):
    def make_end(self, me: int) -> HoppingEnd:
        self.recorded = Recorded(Opening(1, 1 - me, self.rails, self.options, seed=self.random.randrange(1000)))
        return HoppingEnd(self, me, self.recorded.link)


@pytest.mark.parametrize("world", [RecordedLinks, RecordedPaths])
def test_a_replay_does_the_same(world: type[RecordedLinks] | type[RecordedPaths]) -> None:
    kinds: set[type] = set()
    for seed in random.Random(4).sample(range(10_000), 12):
        run = world(seed)
        run.run()
        link, actions = run.recorded.replayed()
        assert actions == run.recorded.actions, f"seed {seed}"
        assert (link.failovers, link.resent) == (run.recorded.link.failovers, run.recorded.link.resent)
        kinds |= {type(action) for each in actions for action in each}
    assert m.SendData in kinds and m.RailLeft in kinds, "worlds in which nothing happens"


def test_what_is_said_for_the_record() -> None:
    told = said([m.Sent(1, 0), m.RailLeft(0, m.Failure.PATH, "silent", 1), m.ResetRail(0), m.RailBack(0, 2)])
    assert told == [["RailLeft", 0, "path", "silent", 1], ["RailBack", 0, 2]]
