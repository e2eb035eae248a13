"""The checkpoints of a run as the durable state that the step protocol asks for.

In: the run's folder and its log. Out: which state a replica may go back to, and its tensors in the engine. A replica that
fetches from a living peer never comes here, and reads no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.replica.contracts import Engine
from helixrt.replica.state_shards import state_of


class DurableState:
    """Of one rank: stage `stage` of `stages`. `read_log()` gives the run's log as it is now."""

    def __init__(self, folder: Path, stage: int, stages: int, engine: Engine, read_log: Callable[[], Log]) -> None:
        self._folder, self._stage, self._stages, self._engine, self._read_log = folder, stage, stages, engine, read_log

    def newest(self, newer_than: int) -> str | None:
        """The lineage hash of the newest complete checkpoint of the chain with a higher step; with `newer_than` -1 that of
        the initial parameters if there is none, while the log begins with them. Raises ConfigError if checkpoints are there and
        all are damaged."""
        log = self._read_log()

        def wanted(record: CommitRecord) -> bool:
            return record.step > newer_than and log.on_chain(record.hash)

        found = checkpoints.newest_complete(self._folder, wanted)
        if found is not None:
            return found.record.hash
        return log.genesis if newer_than < 0 and not log.behind.begin else None

    def load(self, lineage: str, initial: bool) -> bool:
        """Load this rank's part into the engine; False if the checkpoint was deleted meanwhile."""
        if initial:
            return True
        record = self._read_log().get(lineage)
        assert record is not None, f"the leader chose {lineage}, which the log does not know"
        folder = self._folder / checkpoints.folder_name(record)
        checkpoint = checkpoints.Checkpoint(folder, record, self._stages)
        try:
            # The engine compares: an optimizer has no state before its first step, so its layout is that of the checkpoint.
            shards = checkpoints.load(checkpoint, self._stage, None)
        except ConfigError:
            if checkpoints.is_complete(folder):
                raise
            return False
        self._engine.load(state_of(shards))
        return True
