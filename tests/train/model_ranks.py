"""What tests of models shared by ranks have in common: small models, groups, the oracle, and putting ranks together.

Ranks are threads over real Gloo groups; a functional collective finds its group by a name, so each rank has its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helixrt.bench._job_engine import pipeline_engine
from helixrt.engines.pipeline import PipelineEngine
from helixrt.parallel.attention import context_part
from helixrt.parallel.group import Group
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.engine import token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import layouts
from tests.train.whole_tensors import join

BATCH, SEQ = 4, 16
SMALL = ModelConfig(layers=2, dim=16, heads=4, kv_heads=2, ffn=24, vocab=32)
GPT, LLAMA = replace(SMALL, family="gpt"), replace(SMALL, family="llama")
MOE = {"experts": 4, "moe_every": 2, "capacity": 1.0, "auxiliary": 0.5}
_NAMES = itertools.count()


def batch(seed: int = 3) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))


@contextmanager
def registered(backend: Any, rank: int, size: int) -> Iterator[Group]:
    """The Gloo backend as a group that functional collectives find, under a name of this thread's own."""
    group = dist.ProcessGroup(dist.HashStore(), rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    name = f"parallel-models-{next(_NAMES)}"
    group._set_group_name(name)
    torch._C._distributed_c10d._register_process_group(name, group)
    try:
        known = Group.of(group)
        assert known is not None and known == Group(name, rank, size)
        yield known
    finally:
        torch._C._distributed_c10d._unregister_process_group(name)


def gradients(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def backward(module: nn.Module, tokens: torch.Tensor, cp: Group | None = None) -> float:
    loss = token_loss(module(context_part(tokens[:, :-1], 1, cp)), context_part(tokens[:, 1:], 1, cp))
    loss.backward()
    return loss.item()


def alone(model: ModelConfig, batches: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss over `batches` and its gradients, on one rank."""
    module = build_chunk(model, SEQ, 0, 1, seed=5, dtype=torch.float64, auxiliary_scale=1 / len(batches))
    total = 0.0
    for tokens in batches:
        loss = token_loss(module(tokens[:, :-1]), tokens[:, 1:]) / len(batches)
        loss.backward()
        total += loss.item()
    return total, gradients(module)


def put_together(shares: list[dict[str, torch.Tensor]], module: nn.Module, axis: str) -> dict[str, torch.Tensor]:
    """Full tensors from those of the ranks of one axis; what the axis does not cut must be the same on all."""
    whole = {}
    for name, layout in layouts(module).items():
        parts = [share[name] for share in shares]
        cuts = [shard for shard in layout.shards if shard.axis == axis]
        if not cuts:
            assert all(torch.allclose(part, parts[0], rtol=1e-12, atol=1e-15) for part in parts), f"{name} differs"
        whole[name] = join(parts, cuts[0]) if cuts else parts[0]
    return whole


def close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-11) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, f"{name} has no gradient, so nothing is compared"
        difference = (got[name] - value).abs().max().item()
        assert difference <= tolerance * value.abs().max().item() + 1e-16, f"{name} differs by {difference}"


Shared = Callable[[Group], tuple[nn.Module, float]]


def on_ranks(run_stages: Any, ranks: int, work: Callable[[Group], Any]) -> list[Any]:
    """What `work` gives on each of `ranks` ranks of one group."""

    def body(rank: int, backend: Any) -> Any:
        with registered(backend, rank, ranks) as group:
            return work(group)

    return run_stages(ranks, body)


def on_two_ranks(run_stages: Any, work: Shared) -> tuple[list[nn.Module], list[float]]:
    modules, losses = zip(*on_ranks(run_stages, 2, work), strict=True)
    return list(modules), list(losses)


def engine_of(
    model: ModelConfig, schedule: ScheduleConfig, tokens: torch.Tensor, stage: int = 0, stages: int = 1, group: Any = None
) -> PipelineEngine:
    """A stage that is given these tokens at every position."""
    return pipeline_engine(
        model,
        OptimConfig(bucket_bytes=4096),
        schedule,
        batch=len(tokens),
        seq_len=tokens.shape[1] - 1,
        steps=10,
        seed=5,
        stage=stage,
        stages=stages,
        group=group,
        batch_at=lambda position: tokens,
        validation=lambda index: tokens,
        record=FlightRecord(f"pp{stage}"),
        dtype=torch.float64,
    )


def check_engine(engine: PipelineEngine, loss: float, gradients: dict[str, torch.Tensor | None]) -> None:
    """A step has this loss and these gradients."""
    assert engine.run(1, lambda bucket: None).loss == pytest.approx(loss, rel=1e-13)
    for slot, (name, _) in zip(engine._buckets.slots, engine._buckets.named, strict=True):
        got, want = slot.view(engine.buckets), gradients[name]
        assert want is not None and (got - want).abs().max() <= 1e-11 * want.abs().max(), name
    engine.close()
