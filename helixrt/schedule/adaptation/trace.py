"""What happens to a training run's links, iteration by iteration: slow spells and NIC failures.

In: JSON, `{"stages": S, "iterations": N, "events": [..]}`, an event being
`{"first": i, "last": j, "links": [[a, b], ..], "delay_ms": d}` (both ways of every link between stages a and b take d ms
longer in iterations i to j, the last included) or `{"iteration": i, "nic_failure": stage}`. Out: a `Trace`. The
trace of ADAPTRA's large-scale experiment (its Table 3) comes with the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from helixrt.errors import ConfigError
from helixrt.schedule.costs import LARGEST

MOST_ITERATIONS = 1_000_000  # a replay walks through all of them


@dataclass(frozen=True, slots=True)
class Straggler:
    """Links that are slower by `delay_ms` per message, both ways, in iterations `first` to `last` inclusive."""

    first: int
    last: int
    links: tuple[tuple[int, int], ...]
    delay_ms: float


@dataclass(frozen=True, slots=True)
class NicFailure:
    """The NIC of a stage dies in an iteration."""

    iteration: int
    stage: int


@dataclass(frozen=True)
class Trace:
    """Events over so many iterations. Raises ConfigError for events outside the iterations or stages."""

    stages: int
    iterations: int
    stragglers: tuple[Straggler, ...] = ()
    failures: tuple[NicFailure, ...] = ()

    def __post_init__(self) -> None:
        for key, value in (("stages", self.stages), ("iterations", self.iterations)):
            if value < 1:
                raise ConfigError(f"trace.{key}", value, "must be at least 1")
        if self.iterations > MOST_ITERATIONS:
            raise ConfigError("trace.iterations", self.iterations, f"must be at most {MOST_ITERATIONS}")
        for event in self.stragglers:
            if not 0 <= event.first <= event.last < self.iterations:
                rule = f"must be a range of iterations below {self.iterations}"
                raise ConfigError("trace.first-last", f"{event.first}-{event.last}", rule)
            if not 0 <= event.delay_ms <= LARGEST:
                raise ConfigError("trace.delay_ms", event.delay_ms, f"must be a number, at least 0 and at most {LARGEST:g}")
            for a, b in event.links:
                if a == b or not (0 <= a < self.stages and 0 <= b < self.stages):
                    raise ConfigError("trace.links", [a, b], f"must join two different stages below {self.stages}")
        for failure in self.failures:
            if not (0 <= failure.iteration < self.iterations and 0 <= failure.stage < self.stages):
                where = f"{failure.stage} in iteration {failure.iteration}"
                rule = f"must be a stage below {self.stages} in an iteration below {self.iterations}"
                raise ConfigError("trace.nic_failure", where, rule)

    def delays_ms(self, iteration: int) -> Mapping[tuple[int, int], float]:
        """What messages take longer on each directed link in an iteration; spells on the same link add up."""
        delays: dict[tuple[int, int], float] = {}
        for event in self.stragglers:
            if event.first <= iteration <= event.last:
                for a, b in event.links:
                    for way in ((a, b), (b, a)):
                        delays[way] = delays.get(way, 0.0) + event.delay_ms
        return delays


def read(text: str) -> Trace:
    """The trace in a JSON text. Raises ConfigError, with line and column where it is not JSON at all."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError("trace", f"line {error.lineno}, column {error.colno}", f"is not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # numbers or brackets without end
        raise ConfigError("trace", "''", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("trace", type(found).__name__, 'must be an object with "stages", "iterations" and "events"')
    events = found.get("events")
    if not isinstance(events, list):
        raise ConfigError("trace.events", events, "must be a list")
    stragglers, failures = [], []
    for index, event in enumerate(events):
        key = f"trace.events[{index}]"
        if isinstance(event, dict) and set(event) == {"iteration", "nic_failure"}:
            failures.append(NicFailure(_whole(key, event, "iteration"), _whole(key, event, "nic_failure")))
        elif isinstance(event, dict) and set(event) == {"first", "last", "links", "delay_ms"}:
            first, last, delay_ms = _whole(key, event, "first"), _whole(key, event, "last"), event["delay_ms"]
            if isinstance(delay_ms, bool) or not isinstance(delay_ms, int | float):
                raise ConfigError(f"{key}.delay_ms", delay_ms, "must be a number")
            stragglers.append(Straggler(first, last, _links(key, event["links"]), delay_ms))
        else:
            raise ConfigError(key, event, "must have first, last, links and delay_ms, or iteration and nic_failure")
    return Trace(_whole("trace", found, "stages"), _whole("trace", found, "iterations"), tuple(stragglers), tuple(failures))


def table3() -> Trace:
    """ADAPTRA's Table 3: 9 spells of one to three slow links, and a NIC failure, in 1,200 iterations of 8 stages."""
    return read(resources.files("helixrt.schedule.adaptation").joinpath("data/table3.json").read_text(encoding="utf-8"))


def _whole(key: str, found: Mapping[str, Any], name: str) -> int:
    value = found.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}.{name}", value, "must be a whole number")
    return value


def _links(key: str, found: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(found, list):
        raise ConfigError(f"{key}.links", found, "must be a list of pairs of stages")
    links = []
    for link in found:
        if not isinstance(link, list) or len(link) != 2 or any(isinstance(s, bool) or not isinstance(s, int) for s in link):
            raise ConfigError(f"{key}.links", link, "must be a pair of stages")
        links.append((link[0], link[1]))
    return tuple(links)
