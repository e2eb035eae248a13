"""The checkpoints of a run as the durable state that the step protocol asks for.

In: the run's folder and its log. Out: which state a replica may go back to, and its tensors in the engine. A replica that
fetches from a living peer never comes here, and reads no checkpoint. The ranks of a replica tell each other through the store
which parameters they took, so that none is left behind: a model that has lost a layer is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod

from helixrt.errors import ConfigError, HelixError, Retryable
from helixrt.job import checkpoint as checkpoints
from helixrt.job.stored_path import Place
from helixrt.protocol.step.lineage import CommitRecord, Log
from helixrt.replica.contracts import Engine, RunStore
from helixrt.replica.run_keys import OfRank

_HYPERPARAMETERS = "checkpoint/hyperparameters"  # in the store: which replica has told whose are used


class DurableState:
    """Of rank `rank` of a replica of this mesh, in the incarnation `life`. `read_log()` gives the run's log as it is now.
    `resumes`: the life of the run, 0 for the first; `say` tells the user."""

    def __init__(
        self,
        folder: Place,
        rank: int,
        mesh: Mapping[str, int],
        engine: Engine,
        read_log: Callable[[], Log],
        store: RunStore,
        life: str,
        resumes: int = 0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._folder, self._rank, self._mesh, self._engine, self._read_log = folder, rank, mesh, engine, read_log
        self._store, self._life = store, life
        self._resumes, self._say = resumes, say

    def newest(self, newer_than: int, chosen: Callable[[checkpoints.Checkpoint], None] = lambda checkpoint: None) -> str | None:
        """The lineage hash of the newest complete checkpoint of the chain with a higher step; with `newer_than` -1 that of
        the initial parameters if there is none, while the log begins with them. The tensors' bytes are checked by `load`.
        Raises ConfigError if checkpoints are there and all are damaged, Retryable without an answer of the storage that they
        are in."""
        log = self._read_log()

        def wanted(record: CommitRecord) -> bool:
            return record.step > newer_than and log.on_chain(record.hash)

        try:
            found = checkpoints.newest_complete(self._folder, wanted, self._check)
        except OSError as error:
            raise self._silent(error) from error
        if found is not None:
            chosen(found)
            return found.record.hash
        return log.genesis if newer_than < 0 and not log.behind.begin else None

    def load(self, lineage: str, initial: bool) -> bool:
        """Load this rank's part into the engine; False if the checkpoint has been deleted, or is damaged, which `newest` knows
        from then on in every replica.

        Raises ConfigError for one that does not fit, Retryable without an answer of the storage.
        """
        if initial:
            return True
        record = self._read_log().get(lineage)
        assert record is not None, f"the leader chose {lineage}, which the log does not know"
        try:
            folder = checkpoints.complete_of(self._folder, record, lambda found: self._damage(found) is None)
            loaded = None if folder is None else self._read(folder)
        except OSError as error:
            raise self._silent(error) from error
        if folder is None or loaded is None:
            return False
        self._check_all_taken(lineage, loaded.left, folder)
        self._engine.load(loaded.state)
        if record.life != self._resumes and (text := self._engine.resumed()):
            if self._rank == 0 and self._store.put_if_absent(_HYPERPARAMETERS, self._life) == self._life:
                self._say(text)
        return True

    def _read(self, folder: Place) -> checkpoints.Loaded | None:
        """None for a checkpoint that was deleted or is damaged. Raises Retryable if reading failed and its files are whole."""
        try:
            checkpoint = checkpoints.read_manifest(folder)
            return checkpoints.load(checkpoint, self._rank, self._mesh, self._engine.state(), self._engine.portions())
        except checkpoints.Unread as error:
            try:
                checkpoints.verify(folder)
            except ConfigError as damage:
                if checkpoints.is_complete(folder):
                    self._store.put_if_absent(_damaged_key(folder), damage.rule)
                return None
            raise Retryable(f"{error.rule}; its files are whole") from error
        except ConfigError:
            if checkpoints.is_complete(folder):
                raise
            return None

    def _check(self, folder: Place) -> checkpoints.Checkpoint:
        if (damage := self._damage(folder)) is not None:
            raise ConfigError("resume", "true", damage)
        return checkpoints.verify(folder, data=False)

    def _damage(self, folder: Place) -> str | None:
        """What a rank of any replica has found wrong when it read this checkpoint."""
        return self._store.get(_damaged_key(folder))

    def _silent(self, error: OSError) -> HelixError:
        text = " ".join(str(error).split())
        if isinstance(error, PermissionError):
            return ConfigError("checkpoint.path", self._folder, f"cannot be read: {text}")
        return Retryable(f"{self._folder} does not answer: {text}")

    def _check_all_taken(self, lineage: str, left: Sequence[str], folder: Place) -> None:
        """The last rank of the replica that comes here raises ConfigError for a parameter or buffer that all have left."""
        self._store.set(OfRank.LEFT.key(self._life, self._rank), json.dumps({"of": lineage, "left": left}))
        texts = [self._store.get(OfRank.LEFT.key(self._life, rank)) for rank in range(prod(self._mesh.values()))]
        said = [json.loads(text) for text in texts if text is not None]
        said = [each["left"] for each in said if each["of"] == lineage]
        if len(said) == len(texts):
            everywhere = set(left).intersection(*said)
            if everywhere:
                rule = f"cannot load {folder}: it holds {min(everywhere)!r}, which this model does not have"
                raise ConfigError("resume", "true", rule)


def _damaged_key(folder: Place) -> str:
    return f"checkpoint/damaged/{folder.name}"
