"""The way back of a run whose replicas held different states: a new life, from the newest state that was found equal.

In: a driver whose run has ended so. Out: the new life (`driver.Run`), as a resume of the run makes it; none where the same
difference has come again, and would come for ever.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from helixrt.job import checkpoint as checkpoints
from helixrt.job.config import RESUME
from helixrt.job.divergence import Divergence
from helixrt.job.driver import Driver, Run, reopened_run
from helixrt.job.lineage_files import write_durably
from helixrt.protocol.step.deal import Deal

_FILE = "divergences.json"  # in the run's folder: those of all its lives


@dataclass(frozen=True)
class WayBack:
    """A new life, the `deal` of its data (of `JobConfig`), and what is to be said."""

    run: Run
    deal: tuple[Deal, ...]
    text: str


def way_back(driver: Driver) -> WayBack | None:
    """Of a run that has ended; None if it has not ended so, or is to stop.

    It goes on from the newest checkpoint up to the last step after which all of the state was equal, else from the beginning.
    Later checkpoints are withdrawn. Raises ConfigError for a folder that cannot be resumed.
    """
    found, folder, config = driver.diverged, driver.run_.folder, driver.config
    if found is None or config.checks.on_divergence != RESUME:
        return None
    before = [Divergence.from_plain(each) for each in _read(folder)]
    write_durably(folder / _FILE, json.dumps([asdict(each) for each in (*before, found)]))
    if came_again(found, before, config.checks.every):
        why = f"replicas differed before step {before[-1].step}, too, and went back: this cause comes again"
        driver.output.complain(f"the run failed: {why}")
        return None
    checkpoints.withdraw_after(checkpoints.checkpoints_of(folder), found.safe)
    checkpoint = checkpoints.checkpoint_of(folder)
    where = "its beginning" if checkpoint is None else f"the checkpoint of step {checkpoint.record.step}"
    driver.end_store()
    run = reopened_run(folder, checkpoint, config.mesh.replicas)
    deal = () if checkpoint is None else checkpoint.record.deal
    return WayBack(run, deal, f"the run goes on from {where}, where its state was found equal")


def came_again(found: Divergence, before: list[Divergence], every: int) -> bool:
    """Whether a way back would lead here again: the run has made no headway since an earlier difference, or the same entry of
    the same replica differs for the second time."""
    return any(
        found.step <= each.step + every or (found.odd != () and (found.entry, found.odd) == (each.entry, each.odd))
        for each in before
    )


def _read(folder: Path) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        found: list[dict[str, Any]] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return found
    return []
