"""The step protocol's rules and messages of a job.

In: the settings, the run's store and folder. Out: `StepRules`, the batches that are left out, and the line that says who
is waited for.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from helixrt.job.config import FETCH, JobConfig, MeshConfig
from helixrt.protocol.catchup_memory import GB, CatchupMemory, catchup_memory
from helixrt.protocol.step import messages as p
from helixrt.protocol.step.batches import BatchRules
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.protocol.step.quorum import StepRules
from helixrt.replica.contracts import Engine, RunStore
from helixrt.replica.run_keys import OfRank, poison_key
from helixrt.replica.state_shards import shards_of

SHOWN_EXCLUSIONS = 20  # in the console's summary and on the report's page; report.json has all


def publish_memory(config: JobConfig, engine: Engine, store: RunStore, life: str, rank: int) -> None:
    """Say how many reduced sets and snapshots fit into this rank's memory for catch-up. Raises ConfigError if too few do."""
    reduced_bytes = sum(bucket.nbytes for bucket in engine.buckets)
    state_bytes = sum(shard.nbytes for shard in shards_of(engine.state()).values()) + engine.state_growth()
    limit_bytes = int(config.catchup.memory_gb * GB)
    replay = config.catchup.replay if engine.can_replay else 0
    fits = catchup_memory(limit_bytes, reduced_bytes, state_bytes, config.mesh.replicas, replay)
    store.put_if_absent(OfRank.MEMORY.key(life, rank), json.dumps([fits.replay, fits.snapshots]))


def agreed_memory(store: RunStore, life: str, ranks: int, timeout_s: float) -> CatchupMemory:
    """What fits on every rank of the replica. Equal ranks of all replicas say the same, so all replicas agree."""
    said = [json.loads(store.wait(OfRank.MEMORY.key(life, rank), timeout_s)) for rank in range(ranks)]
    return CatchupMemory(min(replay for replay, _ in said), min(snapshots for _, snapshots in said))


def step_rules(config: JobConfig, memory: CatchupMemory, advance: int = 1, expects_overflow: bool = False) -> StepRules:
    """The rules of a step, the same on every replica. It takes `advance` batches of each stream. `expects_overflow`: see
    `Engine`; else a replica that overflows at a scale at which others do not would be left out in step after step, and one that
    does so while the scale falls at the start would be started again."""
    return StepRules(
        replay=memory.replay,
        snapshots=memory.snapshots,
        hold_s=config.catchup.hold_s,
        supersede_after_s=config.supersede_after_s,
        exclusion=not expects_overflow,
        nonfinite_limit=config.nonfinite_limit,
        advance=advance,
        deal=config.deal,
        check_every=config.checks.every,
        fetch_differing=config.checks.on_divergence == FETCH,
        batches=BatchRules(streams_of(config.mesh), config.checks.same_streams, config.checks.strict_data),
    )


def streams_of(mesh: MeshConfig) -> tuple[int, ...]:
    """Which stream of its replica each group rank reads: that of its dp_shard rank."""
    return tuple(shard for _ in range(mesh.pp) for shard in range(mesh.dp_shard) for _ in range(mesh.cp * mesh.tp))


def skipped_positions(store: RunStore, replica: int) -> frozenset[int]:
    """The positions of the replica's stream whose batches are left out in this life of the run (`on_poison=skip`)."""
    found = set[int]()
    while (position := store.get(poison_key(replica, len(found)))) is not None:
        found.add(int(position))
    return frozenset(found)


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
        parts.append("the sum of the gradients is not finite")
    if not parts:
        return None
    nothing = "" if record.applied else "; nothing is updated"
    return f"step {record.step}: {'; '.join(parts)}{nothing}"


def audit_text(audit: dict[str, Any]) -> str:
    """What is known of the data that was trained on."""
    if audit["gaps"] or audit["repeats"]:
        return "NOT every batch once"
    if unsure := audit["unsure"]:
        replica, position = next(iter(unsure.items()))
        return f"not known from position {position} of replica {replica} on, whose data changed with a restart"
    return "every batch exactly once" if audit["dealt"] else "every batch exactly once, as its loader deals them"
