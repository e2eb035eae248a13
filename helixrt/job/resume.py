"""Resuming a run of a user's script: which run it is, whether the script still fits it, and what its data streams agreed on.

In: `helixrt.run(resume=)`, the settings, the folders of earlier runs. Out: a new life of the run (`driver.Run`) that goes on
from its newest checkpoint on the lineage: the record has the positions of all streams, the checkpoint parameters, optimizers,
schedulers and what else is registered, the folder `streams` states of loaders and of what is registered per replica.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.lineage_files import write_durably
from helixrt.job.session_config import SessionConfig
from helixrt.job.stream import LENGTH_KEY
from helixrt.replica.contracts import RunStore

LATEST = "latest"  # the newest run with the same name
_STREAM = "stream.json"  # in the run's folder: what all streams agreed on


@dataclass(frozen=True)
class SavedRun:
    """A run that `helixrt.run(resume=folder)` goes on from. `step`: of its newest complete checkpoint; `ranks`: of a replica;
    `settings`: of the runtime, as plain data; `arguments`: of its train function, whose module (or script) and name `train`
    is."""

    folder: Path
    step: int
    ranks: int
    train: str
    settings: dict[str, Any]
    arguments: dict[str, Any]


def saved_run(storage: str | Path, name: str = "") -> SavedRun:
    """The newest run under `storage` that has a complete checkpoint (`name`: of the runs with this name). Raises ConfigError
    (resume) if there is none, or if its settings cannot be read."""
    folder, checkpoint = checkpoints.find_resume(Path(storage), name)
    before = _settings_of(folder)
    train, settings = before.train, before.to_plain()
    for own in ("train", "arguments"):
        del settings[own]
    called = f"{train.script or train.module}:{train.qualname}"
    return SavedRun(folder, checkpoint.record.step, checkpoint.stages, called, settings, before.arguments)


def _settings_of(folder: Path) -> SessionConfig:
    """Raises ConfigError (resume) for a run that `helixrt.run` has not begun."""
    try:
        return SessionConfig.from_plain(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "was not begun by helixrt.run of this version: its config.json cannot be read"
        raise ConfigError("resume", folder, rule) from error


def run_to_resume(config: SessionConfig, which: str | Path) -> tuple[Path, checkpoints.Checkpoint]:
    """The folder of the run that `which` names (a run's folder, or "latest") and the checkpoint to go on from.

    Raises ConfigError (resume) if there is none, or if data would not be dealt as before: another number of replicas, or
    another seed.
    """
    if str(which) == LATEST:
        folder, found = checkpoints.find_resume(Path(config.output.root), config.name)
    else:
        folder = Path(which).resolve()
        if not (folder / "run.json").is_file():
            raise ConfigError("resume", which, "is not the folder of a run: it has no run.json")
        checkpoint = checkpoints.checkpoint_of(folder)
        if checkpoint is None:
            raise ConfigError("resume", which, "has no complete checkpoint")
        found = checkpoint
    before = _settings_of(folder)
    if before.mesh != config.mesh:
        rule = f"{folder} was begun with {before.mesh}; a run is resumed with the same mesh, since its data was dealt for that"
        raise ConfigError("resume", str(config.mesh), rule)
    if before.seed != config.seed:
        rule = f"{folder} was begun with seed={before.seed}, which the order of its data follows"
        raise ConfigError("seed", config.seed, rule)
    return folder, found


def keep_stream(store: RunStore, folder: Path) -> bool:
    """Write what the streams agreed on into the run's folder; whether that is done."""
    text = store.get(LENGTH_KEY)
    if text is None:
        return False
    write_durably(folder / _STREAM, text)
    return True


def restore_stream(store: RunStore, folder: Path) -> bool:
    """Put it into the new store, so that another length of an epoch, or another accumulation, is refused."""
    try:
        agreed = json.loads((folder / _STREAM).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    store.put_if_absent(LENGTH_KEY, json.dumps(agreed | {"stream": "of the run that is resumed"}))
    return True
