"""The simulated run's store, lost and made again from its journal: the real lines (`protocol.store_journal`), cut at any byte.

In: the simulated store, after each of its operations. Out: the bytes of its journal; and the store as a new process has it that
reads as many of them as the old one had written. What is not in the journal is gone: the new store has no other source.
"""

from __future__ import annotations

import json
from itertools import count

from helixrt.emulate.step_store import SimulatedStore
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.supersede import Waited
from helixrt.protocol.store_journal import Asked, Identity, apply, decide, line_of, replay, written_anew
from helixrt.protocol.store_quorum import PutIfAbsent

_LOG, _ENDED, _HOLDERS, _WAITED = "log/", "ended/", "holders/", "waited/"


class StepJournal:
    """Of one store. `note` after each operation on it."""

    def __init__(self, store: SimulatedStore) -> None:
        self._store = store
        self._begin()
        self.note()

    def _begin(self) -> None:
        self._identity = Identity("sim", self._store.life, "boot")
        self._values: dict[str, str] = {}
        self.data = written_anew(self._identity, self._values)

    def note(self) -> None:
        """Write what the store has and the journal has not."""
        if self._store.life != self._identity.life:
            self._begin()  # a new life of the run: its store begins with the log alone
        for asked in self._new():
            _, change = decide(self._values, asked)
            assert change is not None, f"{asked} stands already"
            apply(self._values, change)
            self.data += line_of(change)

    def _new(self) -> list[Asked]:
        store, values = self._store, self._values
        new: list[Asked] = []
        for index in range(_number(values, _LOG), len(store.entries)):
            new.append(PutIfAbsent(f"{_LOG}{index}", store.entries[index].to_json()))
        for index in range(_number(values, _HOLDERS), len(store.holders)):
            new.append(PutIfAbsent(f"{_HOLDERS}{index}", json.dumps(store.holders[index])))
        for replica, incarnation in sorted(store.ended):
            if (key := f"{_ENDED}{replica}/{incarnation}") not in values:
                new.append(PutIfAbsent(key, "yes"))
        for head, waited in store.waited.items():
            number = _number(values, f"{_WAITED}{head}/")
            if number == 0 or values[f"{_WAITED}{head}/{number - 1}"] != waited.to_json():
                new.append(PutIfAbsent(f"{_WAITED}{head}/{number}", waited.to_json()))
        return new

    def make_again(self, written: int) -> None:
        """The store's process was killed when so many bytes were written; another one reads them."""
        values, whole = replay(self.data[:written], self._identity)
        store, self._values, self.data = self._store, values, self.data[:whole]
        store.entries = [CommitRecord.from_json(values[f"{_LOG}{i}"]) for i in range(_number(values, _LOG))]
        held = [json.loads(values[f"{_HOLDERS}{i}"]) for i in range(_number(values, _HOLDERS))]
        store.holders = [((who[0], who[1]), lineage) for who, lineage in held]
        ended = [key.removeprefix(_ENDED).split("/") for key in values if key.startswith(_ENDED)]
        store.ended = {(int(replica), int(incarnation)) for replica, incarnation in ended}
        heads = {key.split("/")[1] for key in values if key.startswith(_WAITED)}
        newest = {head: _number(values, f"{_WAITED}{head}/") - 1 for head in heads}
        store.waited = {head: Waited.from_json(values[f"{_WAITED}{head}/{number}"]) for head, number in newest.items()}


def _number(values: dict[str, str], prefix: str) -> int:
    """How many numbered keys with this prefix there are."""
    return next(number for number in count() if f"{prefix}{number}" not in values)
