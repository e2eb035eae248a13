"""The settings of a run that `helixrt.run` starts: the job's runtime, the train function, and how its session trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig, job_parts
from helixrt.job.mesh import Mesh
from helixrt.job.session_host import SessionSettings
from helixrt.job.train_function import TrainFunction

NO_FUNCTION = TrainFunction("", "", "", "")  # of a rank that the user's program starts: the program calls its function itself
DEVICES, DTYPES = ("auto", "cpu", "cuda"), ("float32", "bfloat16")


@dataclass(frozen=True)
class SessionConfig(JobConfig):
    """`train` is the function that every rank calls, with its session and `arguments`; the rest as in `SessionSettings`."""

    train: TrainFunction = NO_FUNCTION
    arguments: dict[str, Any] = field(default_factory=dict)
    device: str = "auto"
    dtype: str = "float32"
    lr_policy: str = "none"
    buffers: str = "mean"
    loader_every: int = 100

    @staticmethod
    def of(
        job: JobConfig,
        *,
        train: TrainFunction = NO_FUNCTION,
        arguments: Mapping[str, Any] | None = None,
        device: str = device,
        dtype: str = dtype,
        lr_policy: str = lr_policy,
        buffers: str = buffers,
        loader_every: int = loader_every,
    ) -> SessionConfig:
        """The runtime's settings, and a session's own."""
        return SessionConfig(
            **{key: getattr(job, key) for key in JobConfig.__dataclass_fields__},
            train=train,
            arguments=dict(arguments or {}),
            device=device,
            dtype=dtype,
            lr_policy=lr_policy,
            buffers=buffers,
            loader_every=loader_every,
        )

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> SessionConfig:
        """Inverse of `to_plain`."""
        return SessionConfig(**{**raw, **job_parts(raw), "train": TrainFunction.from_plain(raw["train"])})

    def session(
        self, replica: int, shard: int = 0, local_rank: int = -1, tp_rank: int = 0, stage: int = 0, cp_rank: int = 0
    ) -> SessionSettings:
        """Of one rank."""
        mesh = Mesh(self.mesh.pp, self.mesh.dp_shard, self.mesh.cp, self.mesh.tp)
        return SessionSettings(
            replica,
            mesh,
            self.mesh.replicas,
            self.seed,
            self.device,
            self.dtype,
            self.lr_policy,
            self.buffers,
            self.loader_every,
            self.checkpoint.every,
            shard,
            self.deal,
            tp_rank,
            local_rank,
            stage,
            cp_rank,
        )

    def check(self) -> None:
        """Raise ConfigError for what cannot work in a session; `check_runtime` has the runtime's rules."""
        choices: dict[str, tuple[str, tuple[str, ...]]] = {
            "device": (self.device, DEVICES),
            "dtype": (self.dtype, DTYPES),
            "lr": (self.lr_policy, ("none", "linear", "sqrt")),
            "buffers": (self.buffers, ("mean", "first")),
        }
        for key, (value, allowed) in choices.items():
            if value not in allowed:
                raise ConfigError(key, value, f"must be one of {', '.join(allowed)}")
        lowest = {
            "replicas": (self.mesh.replicas, 1),
            "loader_every": (self.loader_every, 1),
        }
        for key, (number, least) in lowest.items():
            if number < least:
                raise ConfigError(key, number, f"must be at least {least}")
        if self.name == "" or "/" in self.name:
            raise ConfigError("name", repr(self.name), "must be a name without slashes")
