"""The events of a link, as text: recorded while it runs, and replayed later by a new machine, which takes the same actions.

In: a link's settings and its events with their times; or the lines of such a recording. Out: lines of JSON; or the actions,
one call after the other. A link has no clock, no I/O and no randomness of its own, so a recording of its events is all
that is needed to reproduce its actions. What messages contain is not in it: links never see that.

The first line is the `Opening` with whatever else is to be kept beside it; every other line is one event:
[time, kind, fields...], a frame as the list of its fields, its body in hexadecimal.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, get_args

from helixrt.errors import Cause
from helixrt.protocol.hopping.messages import HoppingOptions, PolicyName, Unloaded
from helixrt.protocol.link import messages as m
from helixrt.protocol.link.frames import Frame, Kind
from helixrt.protocol.link.machine import Link
from helixrt.protocol.link.messages import Action, Event, Failure
from helixrt.protocol.link.options import LinkOptions

_EVENTS: dict[str, type] = {kind.__name__: kind for kind in get_args(Event)}


@dataclass(frozen=True)
class Opening:
    """What a link is made from; `seed` that of the generator it is given."""

    generation: int
    peer: int
    rails: int
    options: LinkOptions = field(default_factory=LinkOptions)
    seed: int = 0

    def link(self) -> Link:
        return Link(self.generation, self.peer, self.rails, self.options, random.Random(self.seed))


@dataclass(frozen=True)
class Recording:
    opening: Opening
    events: tuple[tuple[float, Event], ...]  # with monotonic times, oldest first
    about: dict[str, Any] = field(default_factory=dict)  # what else is to be kept: anything JSON has

    def lines(self) -> Iterator[str]:
        """Each without its end."""
        yield _json({"link": asdict(self.opening), **self.about})
        for now, event in self.events:
            yield _json([now, type(event).__name__, *(_plain(getattr(event, one.name)) for one in fields(event))])

    @staticmethod
    def of(lines: Iterable[str]) -> Recording:
        """Read back. Raises ValueError when it is no recording."""
        head, *rest = (line for line in lines if line.strip())
        about = json.loads(head)
        try:
            return Recording(_opening(about.pop("link")), tuple(_event(json.loads(line)) for line in rest), about)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no recording of a link: {error!r}") from error

    def replay(self, link: Link) -> Iterator[tuple[float, Event, list[Action]]]:
        """Pass all events to `link`, which `opening` made; yields them with the actions for each."""
        for now, event in self.events:
            yield now, event, link.on(event, now)


def said(actions: Iterable[Action]) -> list[list[Any]]:
    """Of `actions` those for the record (a rail left, a hop, ...), as JSON has them: [kind, fields...]."""
    for_the_record = [action for action in actions if isinstance(action, get_args(m.ForTheRecord))]
    return [[type(one).__name__, *(_plain(getattr(one, each.name)) for each in fields(one))] for one in for_the_record]


def _json(what: Any) -> str:
    return json.dumps(what, separators=(",", ":"), default=_plain)


def _plain(value: Any) -> Any:
    match value:
        case Frame():
            return [value.kind.name, *value[1:-1], value.body.hex()]
        case Cause():
            return [value.what, value.rank, value.log]
        case Enum():
            return value.value
    return value


def _event(said: list[Any]) -> tuple[float, Event]:
    now, name, *values = said
    if name not in _EVENTS:
        raise ValueError(f"no event of a link: {name}")
    kind = _EVENTS[name]
    if len(values) > len(fields(kind)):
        raise ValueError(f"{name} with {len(values)} fields: it has {len(fields(kind))}")
    found = zip(fields(kind), values, strict=False)  # fewer: it was recorded before the last ones, which have defaults, came
    return now, kind(**{one.name: _READ.get(one.name, _as_it_is)(value) for one, value in found})


def _as_it_is(value: Any) -> Any:
    return value


def _frame(said: list[Any]) -> Frame:
    kind, *numbers, body = said
    return Frame._make([Kind[kind], *numbers, bytes.fromhex(body)])


_READ: dict[str, Any] = {"frame": _frame, "failure": Failure, "cause": lambda said: Cause(*said)}  # by name of a field


def _opening(said: dict[str, Any]) -> Opening:
    options = dict(said["options"])
    if (hopping := options["hopping"]) is not None:
        policy, unloaded = PolicyName(hopping["policy"]), Unloaded(**hopping["unloaded"])
        options["hopping"] = HoppingOptions(**(hopping | {"policy": policy, "unloaded": unloaded}))
    return Opening(**(said | {"options": LinkOptions(**options)}))
