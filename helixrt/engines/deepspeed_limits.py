"""Which DeepSpeed engines can train as replicas: ZeRO 1, 2 and 3, in bfloat16 or float32, without what keeps state elsewhere.

In: the engine, and how many ranks a replica has. Out: a ConfigError for the first setting that cannot be trained, with its key
in DeepSpeed's own configuration, its value and what to change.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from helixrt.engines.deepspeed_private import settings_of
from helixrt.errors import ConfigError, MisuseError

_OFFLOAD = "keeps state outside the accelerator, which is not exchanged; leave it out, and use ZeRO 3 over more ranks"
_MESH = "divides the model along another axis than ZeRO; leave it out"
_LOSSY = "changes values that must be equal on all replicas; leave it out"


@dataclass(frozen=True)
class _Rule:
    key: str
    value: Callable[[Any], Any]  # of DeepSpeed's parsed configuration
    works: Callable[[Any], bool]
    rule: str


def _off(value: Any) -> bool:
    return not value


def _one(value: Any) -> bool:
    return value is None or value <= 1


def _device(offload: Any) -> str:
    return "" if offload is None or str(offload.device) == "none" else str(getattr(offload.device, "value", offload.device))


_ZERO = "zero_optimization"
_RULES = (
    _Rule(
        "fp16.enabled",
        lambda c: c.float16_config.enabled,
        _off,
        "is not supported; use bf16, which needs no loss scaling",
    ),
    _Rule(
        "torch_autocast.enabled",
        lambda c: c.torch_autocast_enabled,
        _off,
        'is not supported; use {"bf16": {"enabled": true}}',
    ),
    _Rule(
        f"{_ZERO}.stage",
        lambda c: int(c.zero_optimization_stage),
        lambda stage: stage in (1, 2, 3),
        "must be 1, 2 or 3; without ZeRO use session.parallelize",
    ),
    _Rule(f"{_ZERO}.offload_optimizer.device", lambda c: _device(c.zero_config.offload_optimizer), _off, _OFFLOAD),
    _Rule(f"{_ZERO}.offload_param.device", lambda c: _device(c.zero_config.offload_param), _off, _OFFLOAD),
    _Rule(
        f"{_ZERO}.zenflow",
        lambda c: c.zero_config.zenflow is not None,
        _off,
        "updates parameters outside step; leave it out",
    ),
    _Rule(f"{_ZERO}.zero_hpz_partition_size", lambda c: c.zero_config.zero_hpz_partition_size, _one, _MESH),
    _Rule(f"{_ZERO}.zero_quantized_weights", lambda c: c.zero_config.zero_quantized_weights, _off, _LOSSY),
    _Rule(
        f"{_ZERO}.zero_quantized_nontrainable_weights",
        lambda c: c.zero_config.zero_quantized_nontrainable_weights,
        _off,
        _LOSSY,
    ),
    _Rule(f"{_ZERO}.zero_quantized_gradients", lambda c: c.zero_config.zero_quantized_gradients, _off, _LOSSY),
    _Rule("tensor_parallel.autotp_size", lambda c: c.tensor_parallel_config.autotp_size, _one, _MESH),
    _Rule(
        "compile.deepcompile",
        lambda c: c.compile_config.deepcompile,
        _off,
        "reduces gradients inside compiled graphs, where they cannot be exchanged; leave it out",
    ),
    _Rule("hybrid_engine.enabled", lambda c: c.hybrid_engine.enabled, _off, "is not supported; train without it"),
    _Rule(
        "data_efficiency.enabled",
        lambda c: c.data_efficiency_enabled,
        _off,
        "changes batches by a state of its own; leave it out",
    ),
    _Rule(
        "managed_gradient_accumulation",
        lambda c: c.managed_gradient_accumulation,
        bool,
        "must be true: the step decides when gradients are exchanged",
    ),
    _Rule(
        "gradient_allreduce_op",
        lambda c: c.gradient_allreduce_op,
        lambda op: op == "mean",
        "must be mean: sums are divided by the weights of the losses",
    ),
)


def check_engine(engine: Any, ranks: int) -> None:
    """`ranks`: of a replica. Raises MisuseError for what is no engine that trains, or another number of ranks; ConfigError
    (deepspeed.KEY) for a setting."""
    from deepspeed import DeepSpeedEngine, PipelineEngine

    if not isinstance(engine, DeepSpeedEngine):
        name = type(engine).__name__
        raise MisuseError(
            f"session.deepspeed takes the engine of deepspeed.initialize, or a function that gives it, not a {name}"
        )
    if isinstance(engine, PipelineEngine):
        rule = "is not supported; use mesh=Mesh(pp=...) with session.parallelize, or ZeRO without a PipelineModule"
        raise ConfigError("deepspeed.pipeline", type(engine.module).__name__, rule)
    config = settings_of(engine)
    for each in _RULES:
        value = each.value(config)
        if not each.works(value):
            raise ConfigError(f"deepspeed.{each.key}", value, each.rule)
    if engine.has_moe_layers:
        raise ConfigError(
            "deepspeed.moe", True, "experts have gradients of other ranks each, which are not exchanged; use dense layers"
        )
    if not isinstance(getattr(engine.optimizer, "optimizer", None), Optimizer):
        name = type(engine.optimizer).__name__
        raise ConfigError("deepspeed.optimizer", name, "the engine has no optimizer to step; give deepspeed.initialize one")
    if "muon" in type(engine.optimizer.optimizer).__name__.lower():
        rule = "changes gradients before they can be exchanged; use AdamW"
        raise ConfigError("deepspeed.optimizer.type", type(engine.optimizer.optimizer).__name__, rule)
    if engine.dp_world_size != ranks:
        raise MisuseError(
            f"the engine partitions over {engine.dp_world_size} ranks, and a replica has {ranks} (Mesh(dp_shard=...)); make it "
            "inside session.deepspeed(lambda: deepspeed.initialize(...)[0])"
        )
