"""What replicas must have in common, compared through the run's store: how far the loop goes, the first order of a pipeline's
schedule, and the layout of their states.

In: what this replica has. Out: a MisuseError that names the first difference from the replica that said it first. The layout
(names, shapes and dtypes of tensors, names of scalars) is compared before the first step, after the first update, when
optimizers have made their state, and whenever it changes later (DESIGN.md, "Layout of state is a manifest").
"""

from __future__ import annotations

import json

from helixrt.engines.replicated_state import PLACEMENTS
from helixrt.errors import MisuseError, Retryable
from helixrt.job.step import SessionEngine
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import RunStore, layout_of
from helixrt.replica.manifest import Manifest
from helixrt.replica.run_keys import PLAN_KEY
from helixrt.replica.state_shards import SCALARS, shards_of


def agree_on_plan(store: RunStore, until: int, accumulate: int, order: str = "") -> None:
    """Raises MisuseError if ranks differ in how far their loops go, in how many batches a step takes, or in the first order of
    a pipeline's schedule (`order`: its key, "" without one)."""
    mine = {"until": until, "accumulate": accumulate, "order": order}
    first = json.loads(store.put_if_absent(PLAN_KEY, json.dumps(mine)))
    if first["order"] != order:
        raise MisuseError(
            f"the schedule's first order is {order or 'none'} here, and {first['order'] or 'none'} on another rank; give all "
            "ranks the same schedule, and those that read costs= the same file"
        )
    for name in ("until", "accumulate"):
        if first[name] != mine[name]:
            raise MisuseError(f"session.steps({name}={mine[name]}) here, and {name}={first[name]} on another replica")


class LayoutAgreement:
    """Of one rank, with equal group ranks of the other replicas. Used in the rank's main thread."""

    def __init__(self, store: RunStore, group_rank: int, engine: SessionEngine) -> None:
        self._store, self._group_rank, self._engine = store, group_rank, engine
        self._compared: tuple[tuple[int, int], ...] | None = None  # of what was compared last

    def initial(self) -> None:
        """Before the first step. Raises MisuseError for a difference, Retryable without the store."""
        self._compare("initial")

    def updated(self, record: CommitRecord) -> None:
        """After the update of `record`. A store that is away is asked again after the next change."""
        if (now := self._sizes()) == self._compared:
            return
        try:
            self._compare(record.hash)
        except Retryable:
            return
        self._compared = now

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """How many parameters have state, and how many entries it has, by optimizer: cheap, and grows with each new entry."""
        optimizers = self._engine.registered.optimizers.values()
        return tuple((len(o.state), sum(map(len, o.state.values()))) for o in optimizers)

    def _compare(self, moment: str) -> None:
        state = self._engine.state()
        shards = (shard for shard in layout_of(shards_of(state)) if shard.name != SCALARS)
        names = (f"{name} = {value}" if name.startswith(PLACEMENTS) else name for name, value in state.scalars.items())
        mine = Manifest.of(shards, names)
        self._store.put_if_absent(self._key(mine.hash), mine.to_json())  # before anyone can find its hash
        first = self._store.put_if_absent(self._key(moment), mine.hash)
        if first != mine.hash:
            text = self._store.get(self._key(first))
            difference = "" if text is None else Manifest.from_json(text).difference(mine)
            when = "" if moment == "initial" else f" after the update {moment[:8]}"
            raise MisuseError(f"what is registered here differs from the replica that began first{when}: {difference}")

    def _key(self, name: str) -> str:
        return f"manifest/{self._group_rank}/{name}"
