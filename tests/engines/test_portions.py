"""Portions of DTensors are what DTensor itself gives a rank; those of a stage follow its layouts and the model's names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from helixrt.engines.buffers import Buffers
from helixrt.engines.dtensor_private import strided_shard
from helixrt.engines.module import ModuleEngine
from helixrt.engines.portions import Cut, Places, portions_of
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.stage_places import stage_places
from helixrt.engines.stage_ranks import ParameterLayout
from helixrt.errors import ConfigError
from helixrt.job.checkpoint_layout import box_of
from helixrt.replica.portions import Portion

SIZES = {"dp_shard": 2, "tp": 2}


@pytest.fixture
def rank() -> Iterator[int]:
    """A process group of four ranks in which nothing is sent; this process is one of them, and no other later: DTensor keeps
    meshes."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield 3
    dist.destroy_process_group()


def assembled(portion: Portion, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The rank's part, put together from the portion's boxes of the whole tensor."""
    made = torch.full_like(like, float("nan"))
    for block in portion.blocks:
        box_of(made, block.local, block.size).copy_(box_of(whole, block.offset, block.size))
    return made


PLACEMENTS: list[tuple[Placement, ...]] = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(0), Shard(0)),
    (strided_shard(0, 2), Shard(0)),
]


def test_portions_of_dtensors_are_their_local_parts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    dp, tp = divmod(rank, 2)
    for rows in (8, 5):
        whole = torch.randn(rows, 6)
        model = nn.Module()
        for number, placements in enumerate(PLACEMENTS):
            if isinstance(placements[1], Shard) and type(placements[0]) is not Shard and placements[1].dim == 0:
                if rows % 2:
                    continue  # FSDP2 cuts evenly what tp has cut
                local = whole.chunk(2)[tp].chunk(2)[dp]  # tp first, then FSDP2
                part = DTensor.from_local(local, mesh, placements, run_check=False)
            else:
                part = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            model.register_parameter(f"p{number}", nn.Parameter(part))
        registered = Registered.of(model)
        state = ReplicatedState(registered, Buffers(registered, "mean", 0, 1))
        portions = portions_of(state, ReplicaMesh(SIZES, rank))
        for name, parameter in model.named_parameters():
            portion, part = portions[f"parameter/{name}"], parameter.to_local().detach()
            assert portion.name == f"model/{name}" and portion.shape == (rows, 6)
            assert torch.equal(assembled(portion, whole, part), part), (name, rank)
        assert [portions[f"parameter/p{number}"].writes for number in range(3)] == [False, False, True]


def test_optimizer_state_of_another_shape_than_its_sharded_parameter_is_not_that_of_one_rank(rank: int) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model, whole = nn.Module(), torch.arange(8.0)
    weight = nn.Parameter(distribute_tensor(torch.randn(8, 6), mesh, [Shard(0)], src_data_rank=None))
    model.register_parameter("weight", weight)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    factor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
    optimizer.state[weight] = {"own": torch.zeros(2, 6), "factor": factor, "step": torch.tensor(3.0)}
    registered = Registered.of(model, [optimizer])
    state = ReplicatedState(registered, Buffers(registered, "mean", 0, 1))
    portions = portions_of(state, ReplicaMesh({"dp_shard": 4}, rank))
    at = "optimizer/0/state/weight"
    assert f"{at}/own" not in portions, "each rank has another one, and keeps it"
    assert portions[f"{at}/factor"].shape == (8,) and portions[f"{at}/factor"].writes
    assert torch.equal(assembled(portions[f"{at}/factor"], whole, factor.to_local()), factor.to_local())
    assert portions[f"{at}/step"].shape == () and not portions[f"{at}/step"].writes, "rank 0 has the same"


def test_an_engine_says_where_all_that_belongs_to_parameters_lies() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    model.register_buffer("table", torch.zeros(5), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(6, 3)).square().sum().backward()
    optimizer.step()
    engine = ModuleEngine(Registered.of(model, [optimizer]))
    portions, state = engine.portions(), engine.state()
    names = {portion.name for portion in portions.values()}
    assert {f"model/{name}" for name in model.state_dict()} | {"not_persistent/table"} == {n for n in names if "optim" not in n}
    assert portions.keys() == state.tensors.keys() and all(portion.writes for portion in portions.values())
    assert portions["optimizer/0/state/0.weight/exp_avg"].shape == (4, 3)
    engine.close()


class Packed(nn.Module):
    """What tp rank 1 of two holds of three matrices of 2 rows each, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(3, 5))
        self.norm = nn.Parameter(torch.zeros(5))


def places(cuts: tuple[Cut, ...], same: bool = False) -> tuple[ReplicatedState, ReplicaMesh, Places]:
    chunks, root, mesh = {1: Packed(), 3: Packed()}, nn.Module(), ReplicaMesh({"pp": 2, "tp": 2}, 3)
    for number, chunk in chunks.items():
        root.add_module(f"chunk{number}", chunk)
    registered = Registered.of(root, [torch.optim.SGD(root.parameters(), 0.1)])
    layouts = {"packed": ParameterLayout(("tp",), (), cuts)}
    state = ReplicatedState(registered, Buffers(registered, "mean", 0, 1))

    def names(part: int, name: str) -> str:
        return name if same else f"layers.{part}.{name}"

    return state, mesh, stage_places(registered, chunks, names, lambda chunk: layouts, mesh, copies=())


def test_a_stage_follows_its_layouts_and_the_names_of_the_model() -> None:
    portions = portions_of(*places((Cut(0, ("tp",), (2, 2, 2)),)))
    packed, norm = portions["parameter/chunk3.packed"], portions["parameter/chunk1.norm"]
    assert (packed.name, packed.shape, packed.writes) == ("model/layers.3.packed", (6, 5), True)
    assert [block.offset for block in packed.blocks] == [(1, 0), (3, 0), (5, 0)]
    assert (norm.name, norm.shape, norm.writes) == ("model/layers.1.norm", (5,), False), "tp rank 0 writes it"
    unknown = portions_of(*places(()))
    assert "parameter/chunk3.packed" not in unknown and "parameter/chunk3.norm" in unknown
    with pytest.raises(ConfigError, match=r"stages\.names=packed: is the name of chunk1\.packed and of chunk3\.packed, which"):
        places((), same=True)
    with pytest.raises(ConfigError, match=r"ParameterLayout\.cuts=cp: must be axes of `sharded`"):
        ParameterLayout(("tp",), (), (Cut(0, ("cp",)),))
