"""One rank of the built-in job: its training loop on a session, in the runtime of `helixrt.job`.

In: a `RankSpec`. Out: an exit code; everything else goes through the run's store and folder.
`python -m helixrt.train.rank` reads the spec as JSON from standard input; a Ray actor calls `run_rank` itself.
"""

from __future__ import annotations

import torch

from helixrt.errors import ConfigError, Departed
from helixrt.job.mesh import Mesh
from helixrt.job.rank import RankRuntime, exit_code, run_as_process
from helixrt.job.session import Session
from helixrt.job.session_host import SessionSettings
from helixrt.job.session_rank import RankHost
from helixrt.replica.contracts import RankSpec
from helixrt.train.config import TrainConfig
from helixrt.train.data import BatchAt, ReplicaStream
from helixrt.train.loop import LoopHooks, train


class Rank:
    """One rank, from its parts to its end. Built and run in the process's main thread."""

    def __init__(self, spec: RankSpec) -> None:
        self.spec, self.config = spec, TrainConfig.from_plain(spec.config)
        self.runtime = RankRuntime(spec, self.config)
        self.context = self.runtime.context

    def run(self) -> None:
        """Train to the end. Raises ConfigError, or what makes this rank unable to go on."""
        mesh = self.config.mesh
        settings = SessionSettings(
            self.context.replica, Mesh(mesh.pp), mesh.replicas, self.config.seed, device="cpu", dtype="float32"
        )
        with self.runtime as runtime, RankHost(runtime) as host:
            train(Session(settings, host), self.config, LoopHooks(self._batches, self._ready, self._updated))

    def _batches(self, stream: ReplicaStream) -> BatchAt:
        """Where batches come from; a benchmark may stand in between."""
        return stream.batch_at

    def _ready(self, model: torch.nn.Module) -> None:
        """The model is registered; for a test."""

    def _updated(self, step: int, loss: float) -> None:
        """After each update; for a benchmark."""


def run_rank(spec: RankSpec) -> int:
    """Run one rank to its end; returns the process's exit code and prints the error, if any."""
    rank: Rank | None = None
    try:
        rank = Rank(spec)
        rank.run()
        return 0
    except BaseException as error:
        code = exit_code(spec, error)
        if rank is not None and not isinstance(error, ConfigError | Departed):
            rank.runtime.broken(error)
        return code


if __name__ == "__main__":
    run_as_process(run_rank)
