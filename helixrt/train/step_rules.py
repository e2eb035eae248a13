"""The step protocol's rules and messages of the main job.

In: the settings, the run's store and folder. Out: `StepRules`, the batches that are left out, the line that says who
is waited for, and the user's acceptance of a loss (`helixrt accept-loss RUN_FOLDER`).
"""

from __future__ import annotations

import datetime
import json
import time
from contextlib import suppress
from pathlib import Path

import torch

from helixrt.errors import ConfigError
from helixrt.protocol.catchup_memory import GB, CatchupMemory, catchup_memory
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import StepRules
from helixrt.replica.contracts import Engine, RunStore
from helixrt.replica.run_keys import poison_key
from helixrt.train.config import TrainConfig

SHOWN_EXCLUSIONS = 20  # in the console's summary and on the report's page; report.json has all
WAITING_LINE_S = 10.0  # between two lines that say who is waited for
_NEAR = 8  # positions around that of the head for which a batch may be left out
_WAITING = "waiting"  # a file in the run's folder: who is waited for; written again with each line
_ACCEPTED = "accept_loss"  # a file in the run's folder, from the command to the driver


def publish_memory(config: TrainConfig, engine: Engine, store: RunStore, life: str, rank: int) -> None:
    """Say how many reduced sets and snapshots fit into this rank's memory for catch-up. Raises ConfigError if too few do."""
    reduced_bytes = sum(_nbytes(bucket) for bucket in engine.buckets)
    state_bytes = sum(_nbytes(shard) for shard in engine.state().values())
    limit_bytes = int(config.catchup.memory_gb * GB)
    fits = catchup_memory(limit_bytes, reduced_bytes, state_bytes, config.mesh.replicas, config.catchup.replay)
    store.put_if_absent(_memory_key(life, rank), json.dumps([fits.replay, fits.snapshots]))


def agreed_memory(store: RunStore, life: str, ranks: int, timeout_s: float) -> CatchupMemory:
    """What fits on every rank of the replica. Equal ranks of all replicas say the same, so all replicas agree."""
    said = [json.loads(store.wait(_memory_key(life, rank), timeout_s)) for rank in range(ranks)]
    return CatchupMemory(min(replay for replay, _ in said), min(snapshots for _, snapshots in said))


def _memory_key(life: str, rank: int) -> str:
    return f"memory/{life}/{rank}"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def step_rules(config: TrainConfig, memory: CatchupMemory) -> StepRules:
    """The rules of a step, the same on every replica."""
    return StepRules(
        replay=memory.replay,
        snapshots=memory.snapshots,
        hold_s=config.catchup.hold_s,
        supersede_after_s=config.supersede_after_s,
        nonfinite_limit=config.nonfinite_limit,
    )


def skipped_positions(store: RunStore, replica: int, head: CommitRecord) -> frozenset[int]:
    """The positions of the replica's stream, near that of the head, whose batches are left out (`on_poison=skip`)."""
    position = head.positions.get(replica, 0)
    near = range(max(0, position - _NEAR), position + _NEAR)
    return frozenset(at for at in near if store.get(poison_key(replica, at)) is not None)


def waiting_text(action: p.Wait, limit_s: float, folder: Path) -> str | None:
    """For whom a quorum waits and until when, in one line; None if it has not found out yet."""
    if not action.missing:
        return None
    missing = ", ".join(f"replica {replica} (incarnation {incarnation})" for replica, incarnation in action.missing)
    left_s = max(0.0, limit_s - action.waited_s)
    until = datetime.datetime.now() + datetime.timedelta(seconds=left_s)
    return (
        f"waits for {missing}, which may hold step {action.head.step} and has not ended, until about {until:%H:%M:%S}; "
        f"`helixrt accept-loss {folder}` goes on without"
    )


def exclusion_text(record: CommitRecord) -> str | None:
    """What is not in the update of this record and why, in one line; None if everything is."""
    parts = []
    for replica, e in sorted(record.excluded.items()):
        why = "its batch is left out by order" if e.rank < 0 else f"the gradient of its rank {e.rank} is not finite"
        parts.append(f"replica {replica} is excluded: {why}")
    if not record.applied and record.contributors:
        parts.append("the sum of finite gradients is not finite")
    if not parts:
        return None
    nothing = "" if record.applied else "; nothing is updated"
    return f"step {record.step}: {'; '.join(parts)}{nothing}"


def accept_loss(folder: Path) -> None:
    """Tell the driver of the run in `folder` that its newest records may be lost. Raises ConfigError if there is no run, or
    none of its replicas has waited for newer state lately."""
    if not (folder / "run.json").is_file():
        raise ConfigError("RUN_FOLDER", folder, "is not the folder of a run: it has no run.json")
    waiting = folder / _WAITING
    if not waiting.is_file() or time.time() - waiting.stat().st_mtime > 6 * WAITING_LINE_S:
        raise ConfigError("RUN_FOLDER", folder, "is of a run in which no replica waits for newer state")
    (folder / _ACCEPTED).touch()


def note_waiting(folder: Path, text: str) -> None:
    """Leave a note that a replica waits, for `accept_loss`."""
    with suppress(OSError):  # the console says it as well
        (folder / _WAITING).write_text(text, encoding="utf-8")


def take_acceptance(folder: Path) -> bool:
    """Whether the user has accepted a loss since the last call."""
    try:
        (folder / _ACCEPTED).unlink()
    except FileNotFoundError:
        return False
    return True
