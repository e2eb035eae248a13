"""How far the data streams of a run had come when it was resumed with another number of streams.

In: the commit record that the run went on from. Out: `Deal`, an entry of every record after it. The streams of the life before
end with it, and those of the new life begin at position 0 with what was not read (`helixrt.job.dealing`): so who reads the
records knows what entered the parameters, holes included. Pure plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Deal:
    """One change of the number of streams: what the lives before it had.

    A replica had `shards` streams, which share its position; `positions[r]` is how many batches each stream of replica r had
    given. A batch had `batch` of the `items` ids, in an order that was `shuffle`d or not. Of what an earlier change had left,
    each stream gave `first` batches; of each epoch after that, `usable`. A step took `accumulate` of them.
    """

    positions: tuple[int, ...]
    shards: int
    items: int
    shuffle: bool
    batch: int
    usable: int
    first: int = 0
    accumulate: int = 1

    @property
    def streams(self) -> int:
        """How many there were."""
        return len(self.positions) * self.shards

    def ends(self, positions: Mapping[int, int]) -> bool:
        """Whether it was made of a record with these positions."""
        return all(self.positions[r] == positions.get(r, 0) for r in range(len(self.positions)))

    def to_plain(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> Deal:
        """Inverse of `to_plain`; lists (from JSON) become tuples again."""
        return Deal(**{**raw, "positions": tuple(raw["positions"])})
