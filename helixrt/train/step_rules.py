"""The step protocol's rules and messages of the main job.

In: the settings, the run's store and folder. Out: `StepRules`, the batches that are left out, the line that says who
is waited for, and the user's acceptance of a loss (`helixrt accept-loss RUN_FOLDER`).
"""

from __future__ import annotations

import datetime
from pathlib import Path

from helixrt.errors import ConfigError
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import StepRules
from helixrt.replica.contracts import RunStore
from helixrt.replica.run_keys import poison_key
from helixrt.train.config import TrainConfig

WAITING_LINE_S = 10.0  # between two lines that say who is waited for
_NEAR = 8  # positions around that of the head for which a batch may be left out
_ACCEPTED = "accept_loss"  # a file in the run's folder, from the command to the driver


def step_rules(config: TrainConfig) -> StepRules:
    """The rules of a step, the same on every replica."""
    return StepRules(
        replay=config.catchup.replay,
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


def accept_loss(folder: Path) -> None:
    """Tell the driver of the run in `folder` that its newest records may be lost. Raises ConfigError if there is no run."""
    if not (folder / "run.json").is_file():
        raise ConfigError("RUN_FOLDER", folder, "is not the folder of a run: it has no run.json")
    (folder / _ACCEPTED).touch()


def take_acceptance(folder: Path) -> bool:
    """Whether the user has accepted a loss since the last call."""
    try:
        (folder / _ACCEPTED).unlink()
    except FileNotFoundError:
        return False
    return True
