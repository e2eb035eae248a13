"""Stages that FSDP2 has sharded over two ranks: what is gathered when, buckets of uneven shards, and what is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import helixrt
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipeline_parts import Batches
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded import is_sharded
from helixrt.engines.staged import StagedModel, StagePlace, Stages
from helixrt.errors import ConfigError, MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord

WIDTH, BATCH, MICROBATCHES, BLOCKS = 5, 8, 4, 3
RECORD = CommitRecord(1, 1, "", ((0, 0),), {0: 1}, "run")


class Part(nn.Module):
    """Blocks whose rows two ranks cannot share evenly, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(position: int, stream: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * position + stream))
    return x, x.sum(1, keepdim=True)


def staged(part: nn.Module, mesh: ReplicaMesh, **others: Any) -> StagedModel:
    example = torch.zeros(BATCH // MICROBATCHES, WIDTH, dtype=torch.float64)
    stages = Stages([part.double()], nn.functional.mse_loss, (example, example[:, :1]), example, MICROBATCHES, **others)
    return StagedModel(stages, StagePlace(0, 1, None, FlightRecord("rank"), mesh))


def engine_of(model: StagedModel, mesh: ReplicaMesh, optimizer: torch.optim.Optimizer | None = None) -> PipelineEngine:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1)

    def of_rank(position: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(position, mesh.rank("dp_shard"))

    return model.engine(Registered.of(model, [optimizer], clip_norm=0.1), batches=Batches(of_rank, of_rank, BATCH))


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """The collectives that FSDP2 begins within."""
    counts: Counter[str] = Counter()
    gathering, reducing = dist.all_gather_single, dist.reduce_scatter_single

    def gather(*args: Any, **named: Any) -> Any:
        counts["gathered"] += 1
        return gathering(*args, **named)

    def reduce(*args: Any, **named: Any) -> Any:
        counts["reduced"] += 1
        return reducing(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather_single", gather)
        patch.setattr(dist, "reduce_scatter_single", reduce)
        yield counts


def gathered_once(mesh: ReplicaMesh) -> None:
    """A pass gathers each block once and reduces it once for each micro-batch. Then each rank has its shards alone."""
    model = staged(Part(), mesh)
    engine = engine_of(model, mesh)
    units = BLOCKS + 1
    for step in (1, 2):
        with counted() as counts:
            engine.run(step, lambda bucket: None)
        assert counts == {"gathered": units, "reduced": units * MICROBATCHES}
        assert all(is_sharded(parameter) for parameter in model.parameters())
        engine.apply(RECORD, [bucket.clone() for bucket in engine.buckets])
    with counted() as counts:
        engine.evaluate(2)
    assert counts == {"gathered": 2 * units} and all(is_sharded(parameter) for parameter in model.parameters())
    engine.close()


def users_own(mesh: ReplicaMesh) -> None:
    """Blocks that the user has sharded are gathered as the user has set it, with the same gradients."""
    from torch.distributed.fsdp import fully_shard

    ours, part = engine_of(staged(Part(), mesh), mesh), Part().double()
    for block in part.blocks:
        fully_shard(block, mesh=mesh.inner("dp_shard").mesh)
    theirs = engine_of(staged(part, mesh), mesh)
    ours.run(1, lambda bucket: None)
    with counted() as counts:
        theirs.run(1, lambda bucket: None)
    assert counts["gathered"] == 2 * BLOCKS * MICROBATCHES + 1  # freed after each forward and backward
    for one, other in zip(ours.buckets, theirs.buckets, strict=True):
        assert torch.equal(one, other) and one.abs().max() > 0
    for module in part.modules():
        if hasattr(module, "set_requires_gradient_sync"):
            module.set_requires_gradient_sync(False)
    with pytest.raises(MisuseError, match=r"set_requires_gradient_sync\(False\) was called on chunk0"):
        theirs.run(2, lambda bucket: None)
    for engine in (ours, theirs):
        engine.close()


def uneven_buckets(mesh: ReplicaMesh) -> None:
    """Ranks with 3 and 2 of 5 rows hand out the same parameters in buckets of the same numbers."""
    model = staged(Part(), mesh, bucket_bytes=8 * 2 * WIDTH)  # full with two rows, and not with two of one rank and three
    engine = engine_of(model, mesh)
    order: list[int] = []
    engine.run(1, order.append)
    assert order == list(reversed(range(len(engine.buckets)))) and len(order) > BLOCKS
    slots = [(slot.name, slot.bucket) for slot in engine._buckets.slots]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (slots, [slot.shape.numel() for slot in engine._buckets.slots]))
    assert found[0][0] == found[1][0] and found[0][1] != found[1][1]
    engine.close()


def streams_draw(mesh: ReplicaMesh) -> None:
    """Each dp_shard rank draws the numbers of its own stream, the same ones each time that it is at a position."""
    engine = engine_of(staged(Part(), mesh), mesh)
    drawn = []
    for position in (4, 5, 4):
        engine.seed(position)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[2] != drawn[1]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, drawn)
    assert found[0][0] != found[1][0]
    engine.close()


class Gated(Part):
    """With a parameter of which each rank has its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.full((WIDTH,), 1.0 + dist.get_rank()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gate)


def refused(mesh: ReplicaMesh) -> None:
    layout = helixrt.ParameterLayout
    with pytest.raises(ConfigError, match=r"stages\.layouts=gate: must name dp_shard in `summed` or in `sharded`"):
        staged(Gated(), mesh, layouts=lambda part: {"gate": layout(summed=())})
    with pytest.raises(MisuseError, match=r"blocks\.0\.0\.weight is on the meta device"):
        staged(Part().to("meta"), mesh)
    model = staged(Gated(), mesh, layouts=lambda part: {"gate": layout(sharded=("dp_shard",), summed=())})
    assert [name for name, parameter in model.named_parameters() if not is_sharded(parameter)] == ["chunk0.gate"]
    with pytest.raises(MisuseError, match=r"optimizer 0 updates the parameters of group 0 in one call"):
        engine_of(model, mesh, torch.optim.AdamW(model.parameters(), fused=True))
    with pytest.raises(MisuseError, match="Adafactor does not work on sharded parameters"):
        engine_of(model, mesh, torch.optim.Adafactor(model.parameters()))
    engine = engine_of(model, mesh)
    engine.run(1, lambda bucket: None)
    with pytest.raises(ConfigError, match=r"mesh\.dp_shard=2: cannot be with schedule 1f1b run by captured graphs"):
        engine._graphs_when = "always"
        engine.use_schedule(model.schedule)
    engine.close()


CASES: dict[str, Callable[[ReplicaMesh], None]] = {
    "gathered once in a pass": gathered_once,
    "sharded by the user": users_own,
    "buckets of uneven shards": uneven_buckets,
    "random numbers": streams_draw,
    "refused": refused,
}


def check(name: str) -> None:
    CASES[name](ReplicaMesh({"dp_shard": 2}, dist.get_rank()))


@pytest.fixture(scope="module")
def answers(ask_ranks: Callable[..., Any]) -> Any:
    return ask_ranks(check, CASES)


@pytest.mark.system
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_share_a_stage(answers: Any, name: str) -> None:
    answers.check(name)
