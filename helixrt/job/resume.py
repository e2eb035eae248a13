"""Resuming a run of a user's script: which run it is, whether the script still fits it, and what its data streams agreed on.

In: `helixrt.run(resume=)` or `helixrt serve --resume`, the settings, the folders of earlier runs. Out: a new life of the run
(`driver.Run`) that goes on from its newest checkpoint on the lineage: the record has the positions of all streams, the
checkpoint parameters, optimizers, schedulers and what else is registered, the folder `streams` states of loaders and of what is
registered per replica. The ranks of a replica may be others: checkpoints have the names of the whole model. With another
number of streams (replicas, dp_shard) the data that was not read is dealt anew (`dealing`), and each change is in the records
from then on.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helixrt.engines.deepspeed_state import ENGINE
from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.config import JobConfig, MeshConfig
from helixrt.job.lineage_files import write_durably
from helixrt.job.session_config import SessionConfig
from helixrt.job.stored_path import place_in
from helixrt.job.stream import ACCUMULATE_KEY, LENGTH_KEY, RESUMED
from helixrt.protocol.step.deal import Deal
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import RunStore

_ACCUMULATE = "accumulate.json"  # in the run's folder
LATEST = "latest"  # the newest run with the same name


@dataclass(frozen=True)
class SavedRun:
    """A run that `helixrt.run(resume=folder)` continues. `step`: of its newest complete checkpoint; `ranks`: of a replica;
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
    return SavedRun(folder, checkpoint.record.step, checkpoint.ranks, called, settings, before.arguments)


def _settings_of(folder: Path) -> SessionConfig:
    """Raises ConfigError (resume) for a run that `helixrt.run` has not begun."""
    try:
        return SessionConfig.from_plain(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "was not begun by helixrt.run of this version: its config.json cannot be read"
        raise ConfigError("resume", folder, rule) from error


def folder_to_resume(config: SessionConfig, which: str | Path) -> Path | None:
    """The folder of the run that `which` names, whether it has a checkpoint or not; None if "latest" names none."""
    if str(which) != LATEST:
        return Path(which).resolve()
    runs = checkpoints.run_folders(Path(config.output.root))
    return next((run.resolve() for run in runs if checkpoints.name_of_run(run) == config.name), None)


def checkpoint_to_resume(config: JobConfig, which: str | Path) -> tuple[Path, checkpoints.Checkpoint]:
    """The folder of the run that `which` names (a run's folder, or "latest") and the checkpoint to go on from.

    Raises ConfigError (resume) if there is none, or if its checkpoints are in another place than these settings say;
    (mesh.dp_shard) if these ranks cannot read its state.
    """
    if str(which) == LATEST:
        folder, found = checkpoints.find_resume(Path(config.output.root).resolve(), config.name, LATEST)
    else:
        folder = Path(which).resolve()
        if not (folder / "run.json").is_file():
            raise ConfigError("resume", which, "is not the folder of a run: it has no run.json")
        checkpoint = checkpoints.checkpoint_of(folder)
        if checkpoint is None:
            raise ConfigError("resume", which, "has no complete checkpoint")
        found = checkpoint
    place, path = checkpoints.checkpoints_of(folder), config.checkpoint.path
    if path and str(place) != str(place_in(path, place.name)):
        raise ConfigError("checkpoint.path", path, f"the checkpoints of {folder} are in {place}; leave this out to go on there")
    _check_partitions(found, config.mesh.dp_shard)
    return folder, found


def _check_partitions(found: checkpoints.Checkpoint, shards: int) -> None:
    """Raises ConfigError (mesh.dp_shard) for the state of a DeepSpeed engine over another number of ranks."""
    before = found.mesh.get("dp_shard", 1)
    if before == shards or not any(name.startswith(f"{ENGINE}/") for name in checkpoints.read_index(found).parts[0].scalars):
        return
    rule = f"the state of the DeepSpeed engine in {found.folder} is divided over {before} ranks"
    rule = f"{rule}; resume with as many, or begin a new run from its weights (`helixrt export`, of ZeRO 1 and 2)"
    raise ConfigError("mesh.dp_shard", shards, rule)


def run_to_resume(config: SessionConfig, which: str | Path) -> tuple[Path, checkpoints.Checkpoint]:
    """As `checkpoint_to_resume`, of a run that `helixrt.run` has begun. Raises ConfigError (seed) for another seed."""
    folder, found = checkpoint_to_resume(config, which)
    before = _settings_of(folder)
    if before.seed != config.seed:
        rule = f"{folder} was begun with seed={before.seed}, which the order of its data follows"
        raise ConfigError("seed", config.seed, rule)
    return folder, found


def deals_of(mesh: MeshConfig, folder: Path, record: CommitRecord) -> tuple[Deal, ...]:
    """The changes of the number of streams up to a life of the run that goes on from `record` with this mesh: one more than the
    record has, if the number of replicas, or of dp_shard ranks in each, is another than in the record's life.

    Raises ConfigError (replicas, or mesh.dp_shard) if the rest of the data cannot be dealt over other streams, with the name of
    the loader.
    """
    agreed = _agreed(folder, record.life)
    begun = MeshConfig(**json.loads((folder / "config.json").read_text(encoding="utf-8"))["mesh"])
    replicas = begun.replicas if agreed is None else int(agreed.get("replicas", begun.replicas))
    shards = begun.dp_shard if agreed is None else int(agreed.get("shards", begun.dp_shard))
    if (replicas, shards) == (mesh.replicas, mesh.dp_shard):
        return record.deal
    key, value, before = ("replicas", mesh.replicas, replicas)
    if replicas == mesh.replicas:
        key, value, before = ("mesh.dp_shard", mesh.dp_shard, shards)
    instead = f"resume {folder} with {before}"
    if agreed is None or "items" not in agreed:
        loader = "its loader" if agreed is None else agreed.get("loader", "its loader")
        raise ConfigError(key, value, f"{loader} has no session.sampler, whose ids can be dealt over other streams; {instead}")
    if any((folder / "streams").glob("*.per_replica")):
        raise ConfigError(key, value, f"per_replica= state and buffers belong to the streams of before; {instead}")
    deal = Deal(
        tuple(record.positions.get(replica, 0) for replica in range(replicas)),
        shards,
        agreed["items"],
        agreed["shuffle"],
        agreed["batch"],
        agreed["batches"] - agreed["batches"] % agreed["accumulate"],
        agreed["first"],
        agreed["accumulate"],
    )
    return (*record.deal, deal)


def keep_stream(store: RunStore, folder: Path, replicas: int = 0, life: int = 0, shards: int = 1) -> bool:
    """Write what the streams of this life agreed on into the run's folder, and how many there are; whether that is done. A disk
    that cannot be written is no error: it is tried again."""
    text = store.get(LENGTH_KEY)
    if text is None:
        return False
    try:
        write_durably(_file(folder, life), json.dumps(json.loads(text) | {"replicas": replicas, "shards": shards}))
    except OSError:
        return False
    return True


def restore_stream(store: RunStore, folder: Path, before: int = 0, life: int = 0) -> bool:
    """Put what the streams of the life `before` agreed on into the new store, so that another length of an epoch, or another
    accumulation, is refused in this life."""
    agreed = _agreed(folder, before)
    if agreed is None:
        return False
    write_durably(_file(folder, life), json.dumps(agreed))
    store.put_if_absent(LENGTH_KEY, json.dumps(agreed | {"stream": RESUMED}))
    return True


def streams_dealt(folder: Path, life: int) -> bool:
    """Whether the session deals the items in this life of the run; False also where it is not known."""
    return "items" in (_agreed(folder, life) or {})


def keep_accumulation(folder: Path, accumulate: int) -> bool:
    """Write into the run's folder how many batches a step takes; whether that is done, as `keep_stream`."""
    try:
        write_durably(folder / _ACCUMULATE, json.dumps(accumulate))
    except OSError:
        return False
    return True


def restore_accumulation(store: RunStore, folder: Path) -> None:
    """Put it into the new store, so that another one is refused also where the length of an epoch was never known."""
    with suppress(FileNotFoundError):
        store.put_if_absent(ACCUMULATE_KEY, str(json.loads((folder / _ACCUMULATE).read_text(encoding="utf-8"))))


def _agreed(folder: Path, life: int) -> dict[str, Any] | None:
    """What the streams agreed on in this life; in that of before if they have not in this one."""
    for number in range(life, -1, -1):
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads(_file(folder, number).read_text(encoding="utf-8"))
            return found
    return None


def _file(folder: Path, life: int) -> Path:
    """In the run's folder: what all streams of a life agreed on."""
    return folder / ("stream.json" if life == 0 else f"stream.{life}.json")
