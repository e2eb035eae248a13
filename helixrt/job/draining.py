"""`helixrt drain REPLICA`: a replica leaves at a step boundary and stays away until `helixrt drain REPLICA --back`.

In: the user's request, as files in the run's folder that the driver takes; the state of the restart policy (`policies`). Out:
the new state, and what the controller is to do. `asked` is pure. The files need no torch: the command must work on a busy
machine.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.job.background import Background
from helixrt.job.policies import ACTIVE, Phase, RunState

_FILE = "drain.{}"  # in the run's folder, by replica; from the command to the driver
_DRAIN, _BACK = "drain", "back"
_LOOK_S = 1.0  # between two looks of the driver into the folder, which many machines may share
DRAINED_WHY = "drained by the user"  # what a replica is told that is to leave and to stay away


@dataclass(frozen=True)
class DrainAsked:
    """The user wants the replica to leave at a step boundary and to stay away; `back`: wants it to be started again."""

    replica: int
    back: bool = False


@dataclass(frozen=True)
class AskToLeave:
    """This incarnation is to leave at its next step boundary."""

    replica: int
    incarnation: int
    reason: str


@dataclass(frozen=True)
class Refuse:
    """The request cannot be carried out."""

    replica: int
    reason: str


def asked(state: RunState, event: DrainAsked, now: float) -> tuple[RunState, AskToLeave | Refuse | None]:
    """The new state and what to do. The last replica that runs is not drained: the run would stand still."""
    index, replica = event.replica, state.replicas[event.replica]
    if event.back:
        if not replica.drained:
            return state, Refuse(index, f"replica {index} is not drained")
        if replica.phase is Phase.DRAINED:
            replica = replace(replica, phase=Phase.LOST, since_s=now)  # from where it is started again
        return _with(state, index, replace(replica, drained=False)), None
    if replica.drained:
        return state, Refuse(index, f"replica {index} is drained already")
    if replica.phase in (Phase.FINISHED, Phase.GIVEN_UP):
        return state, Refuse(index, f"replica {index} takes no part any more: it is {replica.phase.value.replace('_', ' ')}")
    others = [r for i, r in enumerate(state.replicas) if i != index and r.phase is Phase.RUNNING and not r.drained]
    if not others:
        return state, Refuse(index, f"no other replica than replica {index} runs; stop the run instead")
    leave = AskToLeave(index, replica.incarnation, DRAINED_WHY) if replica.phase in ACTIVE else None
    return _with(state, index, replace(replica, drained=True)), leave


def _with(state: RunState, index: int, replica: object) -> RunState:
    return replace(state, replicas=tuple(replica if i == index else r for i, r in enumerate(state.replicas)))  # type: ignore[misc]


# ---------------------------------------------------------------- from the command to the driver


def request(folder: Path, replica: int, back: bool) -> Path:
    """Leave the user's request in the run's folder; returns the file, which the driver takes away. Raises ConfigError if there
    is no run, or no such replica."""
    if not (folder / "run.json").is_file():
        raise ConfigError("run", folder, "is not the folder of a run: it has no run.json")
    try:
        replicas = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("replicas")
        if replicas is None:  # a run of before, whose run.json does not say
            replicas = json.loads((folder / "config.json").read_text(encoding="utf-8"))["mesh"]["replicas"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError("run", folder, f"its run.json or config.json cannot be read: {error}") from error
    if not 0 <= replica < replicas:
        raise ConfigError("REPLICA", replica, f"the run has replicas 0 to {replicas - 1}")
    file = folder / _FILE.format(replica)
    part = file.with_name(f"{file.name}.part")
    part.write_text(_BACK if back else _DRAIN, encoding="utf-8")
    part.rename(file)
    return file


def take_requests(folder: Path, replicas: int) -> list[DrainAsked]:
    """What the user has asked for since the last call; a request that cannot be read, or not be taken away, waits."""
    try:
        present = set(os.listdir(folder))
    except OSError:
        return []
    found = []
    for replica in range(replicas):
        file = folder / _FILE.format(replica)
        if file.name not in present:
            continue
        try:
            text = file.read_text(encoding="utf-8")
            file.unlink()
        except OSError:
            continue
        found.append(DrainAsked(replica, back=text == _BACK))
    return found


class DrainRequests:
    """The requests in a run's folder, for the driver: it looks for them at most once a second, and waits for no storage."""

    def __init__(self, folder: Path, replicas: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._replicas, self._clock = folder, replicas, clock
        self._next_s = clock()
        self._look = Background[list[DrainAsked]]()

    def take(self) -> list[DrainAsked]:
        """As `take_requests`, perhaps later; nothing within a second of the last look."""
        if self._clock() < self._next_s:
            return []
        self._next_s = self._clock() + _LOOK_S
        return self._look.ask("", lambda: take_requests(self._folder, self._replicas)) or []
