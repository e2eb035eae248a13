"""What stands behind a session: the settings of its rank, and the calls that a session makes.

In: nothing. Out: `SessionSettings`, `Plan`, and the contract `Host`, which `session_rank` implements for the ranks of a job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.staged import StagePlace
from helixrt.job.evaluation import Measured
from helixrt.job.mesh import Mesh
from helixrt.job.permutation import seed_of
from helixrt.job.step import SessionEngine, Worker
from helixrt.job.stream import StreamSettings
from helixrt.protocol.step.deal import Deal
from helixrt.replica.commands import Evaluate
from helixrt.replica.contracts import RunStore
from helixrt.replica.rank import Done


@dataclass(frozen=True)
class SessionSettings:
    """What `helixrt.run` was given, and which rank this is. `loader_every`: batches between two published loader states."""

    replica: int = 0
    mesh: Mesh = field(default_factory=Mesh)
    replicas: int = 1
    seed: int = 0
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "float32"  # the compute type: float32 | bfloat16
    lr_policy: str = "none"  # none | linear | sqrt: learning rates by the share of replicas that contribute
    buffers: str = "mean"  # mean | first
    loader_every: int = 100
    checkpoint_every: int = 0
    shard: int = 0  # this rank's number among the dp_shard ranks of its replica
    deals: tuple[Deal, ...] = ()  # changes of the number of streams before this life of the run
    tp_rank: int = 0  # this rank's number among the tp ranks with its dp_shard number
    local_rank: int = -1  # its number on this machine, where somebody else starts the ranks; -1: not known
    stage: int = 0
    cp_rank: int = 0

    @property
    def drawn_seed(self) -> int:
        """Of the random numbers that are drawn at a position: other ones after each change of the number of streams, where
        positions count anew."""
        return seed_of(self.seed, len(self.deals)) if self.deals else self.seed

    def stream(self, accumulate: int) -> StreamSettings:
        """Of this rank's data stream; `accumulate` batches are a step."""
        return StreamSettings(self.replica, accumulate, self.drawn_seed, self.loader_every, self.shard, self.deals)


@dataclass(frozen=True)
class Plan:
    """What is known when the loop begins. `evaluate_every`: steps, 0 for never; `evaluate` runs the user's
    function as it is told; `evaluate_shared`: by all replicas, each over a part; `evaluate_at_start`: also before the first
    step."""

    until: int
    accumulate: int
    evaluate_every: int
    evaluate: Callable[[Evaluate], None]
    evaluate_shared: bool = False
    evaluate_at_start: bool = False


class Host(Protocol):
    """What stands behind a session: the rank of a job, or a stand-in in tests."""

    @property
    def store(self) -> RunStore: ...

    @property
    def folder(self) -> Path | None:
        """The run's, on this machine; None if there is none."""

    def connect(self, device: torch.device) -> ReplicaMesh:
        """Connect the ranks of this replica, the first time; later calls give the same."""

    def connect_stages(self, device: torch.device) -> StagePlace:
        """The same for a model in stages, which computes on this device."""

    def open(self, engine: SessionEngine, plan: Plan) -> Worker:
        """Build and start the rank's parts. Once."""

    def say(self, text: str) -> None:
        """A line for the user, in the rank's log and on the console of the job."""

    def log(self, step: int, values: Mapping[str, float], done: Done) -> None:
        """The user's figures of a committed step."""

    def validation(self, order: Evaluate, found: Measured) -> None:
        """What the user's evaluation gave for the state that was to be evaluated."""

    def busy(self, doing: str, limit_s: float) -> AbstractContextManager[None]:
        """While the thread does something that may take so long."""

    def stop(self, reason: str) -> None:
        """Have the run end early, after one step that all replicas agree on."""
