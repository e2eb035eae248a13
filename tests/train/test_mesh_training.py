"""A stage of the built-in models that data-, tensor-, context- and expert-parallel ranks share trains as the whole model does.

Four processes are the ranks of one replica. The oracle is the whole model over the whole batch in one process, in float64, with
torch's own clipping and optimizer; each rank compares its part of every gradient and parameter with it.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from helixrt.bench._job_engine import pipeline_engine
from helixrt.collectives.gloo_groups_private import gloo_backend
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.sharded import is_sharded, local
from helixrt.errors import Fatal
from helixrt.parallel.group import Group
from helixrt.pipeline.graph_stage import GraphStage
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.schedule.generators.policies import POLICIES
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.train.engine import inputs_and_targets, token_loss
from helixrt.train.models.build import build_chunk
from helixrt.train.models.parallel import Layout, ParallelGroups, layouts, own_part
from helixrt.train.optimizer import adamw, cosine_with_warmup
from tests.ranks_context import names_drawn
from tests.train.whole_tensors import reduce_gradients

RANKS, BATCH, SEQ, STEPS, LIMIT_S = 4, 8, 16, 3, 60.0
OPTIM = OptimConfig(lr=1e-2, warmup_steps=2, clip=0.05, bucket_bytes=4096)
MODEL = ModelConfig(layers=4, dim=16, heads=4, kv_heads=2, ffn=24, vocab=32)
MODELS = [replace(MODEL, family=family, tied=tied) for family in ("gpt", "llama") for tied in (False, True)]
MOE = {"experts": 4, "moe_every": 2, "capacity": 4.0, "auxiliary": 0.0}  # every token is served, however the batch is cut
LOSSY = {"experts": 4, "moe_every": 2, "capacity": 1.0, "auxiliary": 0.5}


@dataclass(frozen=True)
class Case:
    sizes: dict[str, int]
    model: ModelConfig
    policy: str = "1f1b"
    microbatches: int = 4
    sequence: bool = True
    graphs: str = "never"
    others: dict[str, Any] = field(default_factory=dict)


PP_TP, PP_CP, CP_TP = ({"pp": 2, "tp": 2}, {"pp": 2, "cp": 2}, {"cp": 2, "tp": 2})
PP_DP, DP_TP, DP_CP = ({"pp": 2, "dp_shard": 2}, {"dp_shard": 2, "tp": 2}, {"dp_shard": 2, "cp": 2})
CASES = {
    **{
        f"pp 2 x tp 2, {policy}": Case(PP_TP, MODELS[at % 4], policy, 4 if at % 2 else 8, sequence=at % 3 != 2)
        for at, policy in enumerate(POLICIES)
    },
    "pp 2 x cp 2, gpt": Case(PP_CP, MODELS[0]),
    "pp 2 x cp 2, llama, tied, dualpipev": Case(PP_CP, MODELS[3], "dualpipev"),
    "pp 2 x cp 2, gpt, tied": Case(PP_CP, MODELS[1]),
    "pp 2 x ep 2, gpt": Case(PP_CP, replace(MODELS[0], **MOE)),
    "pp 2 x ep 2, llama, tied": Case(PP_CP, replace(MODELS[3], **MOE)),
    "cp 2 x tp 2, ep 2, llama": Case(CP_TP, replace(MODELS[2], **MOE)),
    "cp 2 x tp 2, gpt, no sequence parallelism": Case(CP_TP, MODELS[1], sequence=False),
    "tp 4, llama": Case({"tp": 4}, replace(MODELS[2], kv_heads=4)),
    "cp 4, gpt": Case({"cp": 4}, MODELS[0]),
    "cp 4, gpt, ring": Case({"cp": 4}, replace(MODELS[0], context="ring")),
    "pp 2 x cp 2, llama, ring": Case(PP_CP, replace(MODELS[2], context="ring")),
    "cp 2 x tp 2, llama, tied, ring": Case(CP_TP, replace(MODELS[3], context="ring")),
    "pp 2 x dp_shard 2, gpt, tied": Case(PP_DP, MODELS[1]),
    "pp 2 x dp_shard 2, llama, interleaved": Case(PP_DP, MODELS[2], "interleaved"),
    "pp 2 x dp_shard 2, llama, both copies of a tied weight on one stage": Case(PP_DP, MODELS[3], "dualpipev"),
    "pp 2 x dp_shard 2, experts": Case(PP_DP, replace(MODELS[0], **MOE), "gpipe"),
    "dp_shard 2 x tp 2, gpt": Case(DP_TP, MODELS[0], microbatches=1),
    "dp_shard 2 x tp 2, llama, tied, no sequence parallelism": Case(DP_TP, MODELS[3], sequence=False),
    "dp_shard 2 x cp 2, experts": Case(DP_CP, replace(MODELS[2], **MOE)),
    "dp_shard 4, more shards than rows": Case({"dp_shard": 4}, replace(MODELS[0], dim=6, heads=1, ffn=3)),
}
EIGHT = {  # of eight ranks
    "pp 2 x dp_shard 2 x tp 2, llama, tied": Case(PP_TP | {"dp_shard": 2}, MODELS[3]),
    "pp 2 x cp 2 x tp 2, gpt": Case(PP_CP | {"tp": 2}, MODELS[0]),
    "dp_shard 2 x cp 2 x tp 2, experts": Case(DP_CP | {"tp": 2}, replace(MODELS[2], **MOE)),
}
SMALL = {"layers": 2}
WOVEN = {
    "tp 2, gpt": Case(PP_TP, replace(MODELS[1], layers=4), "dualpipev", 4, graphs="always"),
    "tp 2, llama": Case(PP_TP, replace(MODELS[2], layers=4), "w", 4, graphs="always"),
    "tp 2, w": Case(PP_TP, replace(MODELS[0], **SMALL), "zb-h1", 4, graphs="always"),
    "cp 2": Case(PP_CP, replace(MODELS[3], layers=4), "w", 4, graphs="always"),
    "cp 2, ring": Case(PP_CP, replace(MODELS[3], layers=4, context="ring"), "w", 4, graphs="always"),
    "ep 2": Case(PP_CP, replace(MODELS[0], layers=4, **MOE), "dualpipev", 4, graphs="always"),
}
UNPAIRED = {"zb-h1": "1f1b", "w": "zbv", "dualpipev": "zbv"}  # of the same placement, without pairs


def batch_at(position: int, stream: int = 0) -> torch.Tensor:
    seed = position + 10_000 * stream
    return torch.randint(0, MODEL.vocab, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))


def record_of(step: int, replicas: int = 1) -> CommitRecord:
    contributors = tuple((replica, 0) for replica in range(replicas))
    return CommitRecord(step, step, "", contributors, dict.fromkeys(range(replicas), step), "run")


def mesh_of(case: Case) -> tuple[ReplicaMesh, ParallelGroups]:
    mesh = ReplicaMesh(case.sizes, dist.get_rank())
    tp, cp = Group.of(mesh.group("tp")), Group.of(mesh.group("cp"))
    sequence = tp is not None and case.sequence
    ep = Group.of(mesh.group("dp_shard", "cp")) if case.model.experts else None
    return mesh, ParallelGroups(tp=tp, sequence=sequence, cp=cp, ep=ep)


def engine_of(case: Case, mesh: ReplicaMesh, groups: ParallelGroups, graphs: str = "", replica: int = 0) -> PipelineEngine:
    stream = replica * mesh.size("dp_shard") + mesh.rank("dp_shard")
    return pipeline_engine(
        case.model,
        OPTIM,
        ScheduleConfig(case.policy, case.microbatches, graphs or case.graphs, "estimate"),
        batch=BATCH,
        seq_len=SEQ,
        steps=10,
        seed=5,
        stage=mesh.rank("pp"),
        stages=mesh.size("pp"),
        group=mesh.group("pp"),
        batch_at=lambda position: batch_at(position, stream),
        validation=lambda index: batch_at(1000 + index, stream),
        record=FlightRecord(f"rank {mesh.rank()}"),
        dtype=torch.float64,
        mesh=mesh,
        groups=groups,
    )


def whole_losses(whole: nn.Module, position: int, case: Case, replicas: int = 1) -> torch.Tensor:
    """Of the batch of each replica, the mean; by micro-batches, since experts see the tokens of one at a time."""
    streams = range(replicas * case.sizes.get("dp_shard", 1))
    cut = [inputs_and_targets(m) for stream in streams for m in batch_at(position, stream).chunk(case.microbatches)]
    return torch.stack([token_loss(whole(x), y) for x, y in cut]).view(replicas, -1).mean(1)


def own_shard(full: torch.Tensor, name: str, engine: PipelineEngine, mesh: ReplicaMesh) -> torch.Tensor:
    """What FSDP2 leaves on this rank of a tensor like the parameter of this name; all of it where that is not sharded."""
    shards, number = mesh.size("dp_shard"), mesh.rank("dp_shard")
    if not is_sharded(dict(engine._buckets.named)[name]):
        return full
    parts = full.chunk(shards)
    return parts[number] if number < len(parts) else full[:0]


def declared(engine: PipelineEngine) -> dict[str, Layout]:
    return {name: layout for module in engine.modules.values() for name, layout in layouts(module).items()}


def close(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert got.shape == expected.shape
    if not got.numel():
        return
    difference = (got - expected).abs().max().item()
    assert difference <= 1e-10 * expected.abs().max().item() + 1e-15, f"{what} differs by {difference}"


Exchange = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]  # buckets, to their sums over replicas


def alone(buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [bucket.clone() for bucket in buckets]


def check_case(name: str, exchange: Exchange = alone, replica: int = 0, replicas: int = 1) -> None:
    case = (CASES | EIGHT)[name]
    mesh, groups = mesh_of(case)
    engine = engine_of(case, mesh, groups, replica=replica)
    whole = build_chunk(case.model, SEQ, 0, 1, seed=5, dtype=torch.float64)
    optimizer = adamw(whole.parameters(), OPTIM)
    scheduler = cosine_with_warmup(optimizer, 10, OPTIM)
    lies, reference = declared(engine), dict(whole.named_parameters())
    for step in range(1, STEPS + 1):
        order: list[int] = []
        result = engine.run(step, order.append)
        assert order == list(reversed(range(len(engine.buckets))))
        optimizer.zero_grad()
        losses = whole_losses(whole, step, case, replicas)
        losses.mean().backward()
        assert result.loss == pytest.approx(losses[replica].item(), rel=1e-11)
        sums, summands = exchange(engine.buckets), mesh.size("dp_shard", "cp") * replicas
        for slot, (key, _) in zip(engine._buckets.slots, engine._buckets.named, strict=True):
            expected = reference[key].grad
            assert expected is not None and expected.abs().max() > 0, f"{key} has no gradient, so nothing is compared"
            mine = own_shard(own_part(expected, lies[key], groups), key, engine, mesh)
            close(slot.view(sums) / summands, mine, f"{name}: gradient of {key}")
        norm = torch.nn.utils.clip_grad_norm_(whole.parameters(), OPTIM.clip).item()
        update = engine.apply(record_of(step, replicas), sums)
        assert update is not None and float(update.grad_norm) == pytest.approx(norm, rel=1e-10)
        optimizer.step()
        scheduler.step()
    for key, parameter in engine._buckets.named:
        mine = own_shard(own_part(reference[key].detach(), lies[key], groups), key, engine, mesh)
        torch.testing.assert_close(local(parameter.detach()), mine, rtol=1e-8, atol=1e-11)
    validation = whole_losses(whole, 1000, case, replicas)[replica].item()
    assert engine.evaluate(1) == (pytest.approx(validation, rel=1e-10), BATCH * SEQ)
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, (result.loss, update.grad_norm, validation))
    assert all(found == figures[0] for found in figures), "loss and norm are the same bits on every rank"
    engine.close()


def check_woven(name: str) -> None:
    """What captured graphs give, with W apart and pairs woven, are the bits that the same graphs give one after the other."""
    case = WOVEN[name]
    mesh, groups = mesh_of(case)
    woven = engine_of(case, mesh, groups)
    plain = engine_of(replace(case, policy=UNPAIRED[case.policy]), mesh, groups)
    eager = engine_of(case, mesh, groups, "never")
    assert isinstance(woven._executor.stage, GraphStage) and (case.policy == "zb-h1" or woven._executor.stage.woven)
    for step in (1, 2):
        losses = [engine.run(step, lambda bucket: None).loss for engine in (woven, plain, eager)]
        assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-11)
        for one, other, third in zip(woven.buckets, plain.buckets, eager.buckets, strict=True):
            assert torch.equal(one, other)
            close(one, third, name)
        for engine in (woven, plain, eager):
            engine.apply(record_of(step), [bucket.clone() for bucket in engine.buckets])
    for engine in (woven, plain, eager):
        engine.close()


def check_dropped_tokens(name: str) -> None:
    """Ranks that route their own tokens, drop some and have an auxiliary loss: as `reduce_gradients` after all backwards."""
    case = Case(CP_TP, replace(MODELS[2], **LOSSY), microbatches=2)
    mesh, groups = mesh_of(case)
    engine = engine_of(case, mesh, groups)
    engine.run(1, lambda bucket: None)
    module = build_chunk(case.model, SEQ, 0, 1, seed=5, dtype=torch.float64, groups=groups, auxiliary_scale=1 / 2)
    for x, y in zip(*(part.chunk(2) for part in inputs_and_targets(batch_at(1), groups.cp)), strict=True):
        (token_loss(module(x), y) / 2).backward()
    reduce_gradients(module, groups)
    expected = {key: parameter.grad for key, parameter in module.named_parameters()}
    for slot in engine._buckets.slots:
        found = expected[slot.name]
        assert found is not None
        close(slot.view(engine.buckets) / mesh.size("cp"), found, slot.name)
    engine.close()


def check_overlap(name: str) -> None:
    """The last backward of the first layer waits until a bucket of later layers is summed over the ranks."""
    case = Case({"cp": 2, "tp": 2}, MODELS[0])
    mesh, groups = mesh_of(case)
    engine = engine_of(case, mesh, groups)
    summed, backwards, waited = threading.Event(), itertools.count(1), list[bool]()

    def before_backward(module: nn.Module, gradients: Any) -> None:
        if next(backwards) == case.microbatches:
            waited.append(summed.wait(LIMIT_S))

    engine.modules[0].get_submodule("layers.0").register_full_backward_pre_hook(before_backward)
    engine.run(1, lambda bucket: summed.set())
    assert waited == [True], "no bucket is summed before the last backward ends"
    engine.close()


def check_flipped(name: str) -> None:
    """A bit that differs on one of the ranks that hold a parameter is found, and the parameter named."""
    mesh, groups = mesh_of(case := Case({"cp": 2, "tp": 2}, MODELS[0]))
    engine = engine_of(case, mesh, groups)
    engine.run(1, lambda bucket: None)
    engine.apply(record_of(1), [bucket.clone() for bucket in engine.buckets])
    state = engine.state()
    if mesh.rank() == 3:
        state.tensors["parameter/chunk0.layers.2.ffn_norm.weight"].view(torch.int64)[3] ^= 1
    engine.load(state)
    with pytest.raises(
        Fatal, match=r"parameter/chunk0\.layers\.2\.ffn_norm\.weight differs between rank cp 0, tp 0 and rank cp 1, tp 1"
    ):
        engine.run(2, lambda bucket: None)
    engine.close()


def check_undeclared(name: str) -> None:
    """A gradient that should have been summed and was not is found at the update."""
    mesh, groups = mesh_of(case := Case({"cp": 2, "tp": 2}, MODELS[0]))
    engine = engine_of(case, mesh, groups)
    engine.run(1, lambda bucket: None)
    mine = [bucket.clone() for bucket in engine.buckets]
    slot = next(slot for slot in engine._buckets.slots if slot.name == "layers.1.qkv.weight")
    if mesh.rank("cp") == 1:
        slot.view(mine)[0, 0] += 1e-9
    with pytest.raises(Fatal, match=r"the gradient of layers\.1\.qkv\.weight differs between rank cp 0, tp \d and rank cp 1"):
        engine.apply(record_of(1), mine)
    engine.close()


@functools.cache
def one_of_two_replicas() -> tuple[int, Exchange]:
    """Eight processes become two replicas, each with a default process group of its own: this one's number, and the exchange
    with its equal rank of the other."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    replica, rank = divmod(dist.get_rank(), RANKS)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder[0]}/{replica}", RANKS), rank=rank, world_size=RANKS)
    exchanging = gloo_backend(dist.FileStore(f"{folder[0]}/rank{rank}", 2), replica, 2, timedelta(seconds=60))

    def exchange(buckets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sums = alone(buckets)
        for total in sums:
            exchanging.allreduce([total]).wait()
        return sums

    return replica, exchange


def check_replicas(name: str) -> None:
    replica, exchange = one_of_two_replicas()
    check_case(name, exchange, replica, 2)


CHECKS: dict[str, Callable[[str], None]] = {
    **dict.fromkeys(CASES, check_case),
    "tokens are dropped": check_dropped_tokens,
    "sums over ranks beside backward": check_overlap,
    "a flipped bit": check_flipped,
    "a gradient that differs": check_undeclared,
}


def check_any(name: str) -> None:
    CHECKS[name](name)


@pytest.fixture(scope="module")
def answers(ask_ranks: Callable[..., Any]) -> Any:
    return ask_ranks(check_any, CHECKS, ranks=RANKS)


@pytest.mark.grid
@pytest.mark.system
@pytest.mark.parametrize("name", CHECKS)
def test_ranks_that_share_stages_train_the_whole_model(answers: Any, name: str) -> None:
    answers.check(name)


@pytest.fixture(scope="module")
def woven_answers(ask_ranks: Callable[..., Any], request: pytest.FixtureRequest) -> Any:
    return ask_ranks(check_woven, names_drawn(request, test_woven_graphs_give_the_same_bits), ranks=RANKS)


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", WOVEN)
def test_woven_graphs_give_the_same_bits(woven_answers: Any, name: str) -> None:
    woven_answers.check(name)


@pytest.fixture(scope="module")
def answers_of_eight(ask_ranks: Callable[..., Any]) -> Any:
    return ask_ranks(check_case, EIGHT, ranks=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_that_share_stages_train_the_whole_model(answers_of_eight: Any, name: str) -> None:
    answers_of_eight.check(name)


_SEQUENCE = [name for name, case in CASES.items() if name.startswith("pp 2 x tp 2") and case.sequence]
REPLICATED = [name for name in CASES if name.startswith("pp 2 x dp_shard 2")] + ["dp_shard 2 x tp 2, gpt"]
REPLICATED += [next(n for n in _SEQUENCE if CASES[n].model == model) for model in (MODELS[0], MODELS[3])]


@pytest.fixture(scope="module")
def replicated_answers(ask_ranks: Callable[..., Any]) -> Any:
    return ask_ranks(check_replicas, REPLICATED, ranks=2 * RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICATED)
def test_two_replicas_of_four_ranks_train_the_whole_model(replicated_answers: Any, name: str) -> None:
    replicated_answers.check(name)
