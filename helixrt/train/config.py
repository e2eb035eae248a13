"""The settings of the main job: frozen dataclasses, one small one per component.

`schema()` registers them with hydra's ConfigStore; YAML under `conf/` holds experiments and model
sizes only. `helixrt.train.validate` checks values and raises `ConfigError` before a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from helixrt.job.config import JobConfig, job_parts
from helixrt.schedule.adaptation.policy import Adaptation

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model over `vocab` symbols (256: bytes)."""

    family: str = "gpt"  # gpt | llama
    layers: int = 4
    dim: int = 128
    heads: int = 4
    kv_heads: int = 4  # llama only: grouped-query attention
    ffn: int = 512
    vocab: int = 256
    tied: bool = False  # output head shares the embedding's weight
    experts: int = 0  # of each mixture of experts; 0: feed-forward networks throughout
    moe_every: int = 1  # every how many layers there is a mixture: 2 is layers 1, 3, ... counted from 0
    capacity: float = 1.25  # choices an expert takes, as a multiple of its even share; 0: all of them, by autograd only
    auxiliary: float = 0.01  # coefficient of the experts' load-balance loss
    context: str = "gathered"  # how context-parallel ranks get each other's keys and values: gathered | ring

    def has_experts(self, layer: int) -> bool:
        """Whether `layer`, counted from 0, has a mixture of experts in place of its feed-forward network."""
        return self.experts > 0 and (layer + 1) % self.moe_every == 0


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks of `mesh` share the model. Experts are spread over dp_shard x cp."""

    sequence: bool = True  # where tp > 1: between matrices each tp rank holds a slice of the sequence, not all of it


@dataclass(frozen=True)
class DataConfig:
    path: str = "stdlib"  # "stdlib": source of the running Python's standard library; else a file or folder
    batch: int = 16  # sequences per step of a stream: of each replica, or each dp_shard rank of one
    seq_len: int = 128  # bytes predicted per sequence
    validation: float = 0.05  # fraction of files held out


@dataclass(frozen=True)
class ScheduleConfig:
    name: str = "1f1b"  # one of helixrt.schedule.generators.policies; those with two chunks per stage need layers >= 2 pp
    microbatches: int = 4
    graphs: str = "auto"  # captured graphs instead of autograd: auto (where the schedule moves W or has pairs) | always | never
    profile: str = "auto"  # operator times, for weaving graphs that communicate: auto (kept or measured) | measure | estimate
    costs: str = ""  # profile.json of an earlier run, to plan the first order of zb, adaptra or helix from; "": equal costs
    adapt: str = "off"  # on: the order changes during the run, by measured costs | off
    adaptation: Adaptation = field(default_factory=Adaptation)  # how readily


@dataclass(frozen=True)
class OptimConfig:
    lr: float = 3e-3
    min_lr_ratio: float = 0.1
    warmup_steps: int = 20
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0  # norm over all ranks of a replica; 0 turns clipping off
    bucket_bytes: int = 1 << 22  # gradient bucket size in bytes; smaller ones overlap more with backward, and cost more


@dataclass(frozen=True)
class EvalConfig:
    every: int = 50  # steps; 0: only at the end
    batches: int = 4  # validation batches


@dataclass(frozen=True)
class TrainConfig(JobConfig):
    """The whole job. `steps` counts optimizer updates."""

    steps: int = 200
    dtype: str = "float32"  # what forward and loss compute in: float32 | bfloat16; weights and optimizer states stay float32
    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @staticmethod
    def from_plain(raw: dict[str, Any]) -> TrainConfig:
        """Inverse of `to_plain`; lists (from JSON) become tuples again."""
        own = {
            "model": ModelConfig(**raw["model"]),
            "parallel": ParallelConfig(**raw.get("parallel", {})),  # runs of before had none
            "data": DataConfig(**raw["data"]),
            "schedule": ScheduleConfig(
                **{**raw["schedule"], "adaptation": Adaptation(**raw["schedule"].get("adaptation", {}))}
            ),
            "optim": OptimConfig(**{**raw["optim"], "betas": tuple(raw["optim"]["betas"])}),
            "eval": EvalConfig(**raw["eval"]),
        }
        return TrainConfig(**{**raw, **job_parts(raw), **own})
