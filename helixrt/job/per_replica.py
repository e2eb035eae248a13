"""State of one replica alone: what the user registers with `per_replica=`, such as a state that carries over from batch to
batch, and buffers with the mode "per_replica".

In: named objects with `state_dict` and `load_state_dict`; before each step, the position of its first batch. Out: the objects
with the state that belongs to that position. It is never fetched from another replica (DESIGN.md, "State has three kinds"):

- a step whose work was dropped begins again with the state that it began with;
- states are published with the loader's states (`loader_states`), and with each checkpoint. Those of checkpoints are kept
  apart, `SAVED` of them, since many others may follow before the run goes on from a checkpoint;
- a replica that starts again takes the newest one at or before its position, and says which. Batches between are not repeated
  for it: what must be exact is a function of the data, and belongs into the data set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from helixrt.engines.registered import Stateful
from helixrt.errors import MisuseError
from helixrt.job.loader_states import KEPT, LoaderStates, packed
from helixrt.replica.contracts import RunStore

SAVED = 16  # states of the newest checkpoints; more than a run keeps complete ones, since an attempt at one may fail
_KEPT = 4  # states in memory, of the newest steps: a record is superseded by few


def published(
    stream: str, store: RunStore, folder: Path | None, say: Callable[[str], None]
) -> tuple[LoaderStates, LoaderStates]:
    """Where the states of a stream are, and those of checkpoints."""
    what, effect = "what is registered per replica", "a replica that starts again begins it anew"
    names = {f"{stream}/per_replica": KEPT, f"{stream}/per_replica/saved": SAVED}
    newest, saved = (LoaderStates(store, name, say, folder, what, effect, keep) for name, keep in names.items())
    return newest, saved


class PerReplicaState:
    """Used from the loop's thread. `every`: batches between two published states; `due(step)`: whether the state after update
    `step` is in a checkpoint; those are in `saved` as well."""

    def __init__(
        self,
        things: Mapping[str, Stateful],
        states: LoaderStates,
        saved: LoaderStates,
        every: int,
        due: Callable[[int], bool],
        say: Callable[[str], None],
    ) -> None:
        self._things, self._states, self._saved = dict(things), states, saved
        self._every, self._due, self._say = every, due, say
        self._kept: dict[int, dict[str, Any]] = {}  # by position
        self._published = -1  # position of the newest published state
        for name, thing in self._things.items():
            if not isinstance(thing, Stateful):
                raise MisuseError(f"per_replica {name!r} is a {type(thing).__name__} without state_dict and load_state_dict")
            if packed({name: thing.state_dict()}) is None:
                raise MisuseError(
                    f"per_replica {name!r} has a state that torch.load(weights_only=True) refuses; its state_dict may hold "
                    "tensors, numbers, text, and lists and dictionaries of them"
                )

    def begin(self, position: int, step: int) -> None:
        """The step that makes update `step` begins, at this position of the stream. Raises Retryable without the store, where a
        published state must be read."""
        if not self._things:
            return
        if position in self._kept:
            self._restore(self._kept[position])
        elif position > 0 and not any(p < position for p in self._kept):
            self._find(position)
        self._kept = {p: state for p, state in self._kept.items() if p < position}  # later ones are of batches given up
        self._kept[position] = self._read()
        for old in sorted(self._kept)[:-_KEPT]:
            del self._kept[old]
        if self._due(step - 1):
            self._saved.put((0, position), self._kept[position])
        elif self._published >= 0 and position // self._every == self._published // self._every:
            return
        self._publish(position)

    def end(self, position: int | None) -> None:
        """The loop has ended before the batch at this position, or this replica leaves there (None: not behind a committed
        step)."""
        if self._things and position is not None and position not in self._kept:
            self._kept = {position: self._read()}
            self._publish_last(position)

    def left(self, position: int) -> None:
        """This replica leaves, and the work that was begun at this position was dropped: what it began with is published."""
        if self._things and position in self._kept:
            self._publish_last(position)

    def _find(self, position: int) -> None:
        each = [states.newest((0, position)) for states in (self._states, self._saved)]
        found = max((one for one in each if one is not None), key=lambda one: one[0], default=None)
        if found is None:
            self._say(f"per-replica state: there is none at or before batch {position}, so it begins anew")
            return
        self._restore(found[1])
        self._say(f"per-replica state: that of batch {found[0]} is taken, for batch {position}")

    def _publish_last(self, position: int) -> None:
        """Before this process ends: it is in the folder, too."""
        self._saved.put((0, position), self._kept[position])
        self._publish(position)
        self.flush()

    def flush(self) -> None:
        """Wait until the run's folder has what was published, or for `FLUSH_S` each."""
        self._saved.flush()
        self._states.flush()

    def _publish(self, position: int) -> None:
        self._states.put((0, position), self._kept[position])
        self._published = position

    def _read(self) -> dict[str, Any]:
        return {name: copy.deepcopy(thing.state_dict()) for name, thing in self._things.items()}

    def _restore(self, states: Mapping[str, Any]) -> None:
        for name, thing in self._things.items():
            if name in states:
                thing.load_state_dict(copy.deepcopy(states[name]))
