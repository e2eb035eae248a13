"""A checkpoint has the names of the whole model: plain PyTorch reads it, and so do ranks of any other mesh."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.checkpoint import Checkpoint, newest_complete
from helixrt.job.checkpoint_layout import RankPart
from helixrt.job.checkpoint_writer import Checkpointer
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.replica.contracts import State
from helixrt.replica.portions import Portion, cut, every, parts_of
from helixrt.replica.store import MemoryRunStore

RECORD = CommitRecord(2, 1, "parent", ((0, 0),), {0: 2}, "run")


def write(folder: Path, mesh: Mapping[str, int], parts: Sequence[RankPart], said: list[str] | None = None) -> Checkpoint:
    """A checkpoint of these parts, by the ranks of one replica."""
    store, told = MemoryRunStore(), [] if said is None else said
    savers = [
        Checkpointer(folder, rank, mesh, store, FlightRecord("r0"), 1, 3, 9, 300.0, "0/0", told.append)
        for rank in range(len(parts))
    ]
    for saver, part in zip(savers, parts, strict=True):
        assert saver.maybe_save(RECORD, lambda part=part: part, True, lambda: None)
    for saver in savers:
        saver.wait(300)
        saver.close()
    assert said is not None or not told, told
    return newest_complete(folder)  # type: ignore[return-value]


# ---------------------------------------------------------------- plain PyTorch


class Average:
    """Registered as an extra object: tensors and a number."""

    def __init__(self, model: nn.Module) -> None:
        self.state: dict[str, Any] = {name: p.detach().clone() for name, p in model.named_parameters()} | {"count": 3}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def trained(seed: int, steps: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Average, ModuleEngine]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)).double()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(steps):
        torch.manual_seed(step)
        step_of(model, optimizer, scheduler)
    average = Average(model)
    registered = Registered.of(model, [optimizer], [scheduler], extra={"average": average})
    return model, optimizer, scheduler, average, ModuleEngine(registered)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 3, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    scheduler.step()


def test_plain_pytorch_goes_on_from_a_checkpoint_and_so_does_an_engine_that_has_no_state_yet(tmp_path: Path) -> None:
    model, optimizer, scheduler, average, engine = trained(1, 3)
    found = write(tmp_path / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    engine.close()  # from here on plain loops step
    torch.manual_seed(100)
    step_of(model, optimizer, scheduler)
    expected = [p.detach().clone() for p in model.parameters()]

    other, other_optimizer, other_scheduler, _, other_engine = trained(2, 0)
    other_engine.close()
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=found.folder, no_dist=True)
    other.load_state_dict(state)
    dcp_to_torch_save(found.folder, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["extra"]["average"]["count"] == 3 and len(whole["optimizer"]["0"]["param_groups"]) == 2
    set_optimizer_state_dict(other, other_optimizer, whole["optimizer"]["0"])
    other_scheduler.load_state_dict(whole["scheduler"]["0"])
    torch.manual_seed(100)
    step_of(other, other_optimizer, other_scheduler)
    assert all(torch.equal(p, e) for p, e in zip(other.parameters(), expected, strict=True))

    third, third_optimizer, third_scheduler, third_average, third_engine = trained(3, 0)
    loaded = checkpoints.load(found, 0, {"pp": 1}, third_engine.state(), third_engine.portions())
    assert loaded.left == ()
    third_engine.load(loaded.state)
    third_engine.close()
    assert third_average.state["count"] == 3 and torch.equal(third_average.state["0.weight"], average.state["0.weight"])
    torch.manual_seed(100)
    step_of(third, third_optimizer, third_scheduler)
    assert all(torch.equal(p, e) for p, e in zip(third.parameters(), expected, strict=True))


def test_plain_pytorch_reads_tied_parameters_under_all_their_names(tmp_path: Path) -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
        model["head"].weight = model["embedding"].weight
        return model

    model, other = tied(), tied()
    engine = ModuleEngine(Registered.of({"a": model, "b": nn.Linear(1, 1)}))
    found = write(tmp_path / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    engine.close()
    state = other.state_dict(prefix="a.")
    dcp.load({"model": state}, checkpoint_id=found.folder, no_dist=True)
    other.load_state_dict({name.removeprefix("a."): tensor for name, tensor in state.items()})
    assert torch.equal(other["head"].weight, model["head"].weight) and state.keys() == {"a.embedding.weight", "a.head.weight"}


class Counted(torch.optim.SGD):
    """Has a number and a tensor beside its state, which its own `state_dict` holds."""

    own: tuple[int, torch.Tensor] = (0, torch.zeros(3))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.own[0], "norms": [self.own[1]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state.pop("count"), state.pop("norms")[0]
        super().load_state_dict(state)


def test_what_an_optimizer_s_own_state_dict_holds_is_in_a_checkpoint_also_for_another_mesh(tmp_path: Path) -> None:
    def registered() -> tuple[Counted, ModuleEngine]:
        model = nn.Linear(3, 2)
        optimizer = Counted(model.parameters(), lr=0.1)
        return optimizer, ModuleEngine(Registered.of(model, [optimizer]))

    optimizer, engine = registered()
    optimizer.own = 7, torch.ones(3)
    found = write(tmp_path / "checkpoints", {"pp": 1}, [RankPart.of(engine.state(), engine.portions())])
    for mesh in ({"pp": 1}, {"pp": 2}):
        other, other_engine = registered()
        other_engine.load(checkpoints.load(found, 0, mesh, other_engine.state(), other_engine.portions()).state)
        assert other.own[0] == 7 and torch.equal(other.own[1], torch.ones(3))
        other_engine.close()
    whole = tmp_path / "whole.pt"
    dcp_to_torch_save(found.folder, whole)
    stored = torch.load(whole, weights_only=True)["optimizer"]["0"]["more"]
    assert stored["count"] == 7 and torch.equal(stored["norms"]["[0]"], torch.ones(3))
    engine.close()


# ---------------------------------------------------------------- other meshes

WHOLE = {
    "embedding.weight": (13, 6),
    "layers.0.qkv": (12, 6),  # three matrices of 4 rows, each cut on its own over tp
    "layers.0.out": (6, 12),
    "layers.1.qkv": (12, 6),
    "norm": (6,),
}


def tensor_of(name: str, seed: int) -> torch.Tensor:
    return torch.randn(WHOLE[name], dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 31 * len(name)))


def held_by(name: str, place: Mapping[str, int], mesh: Mapping[str, int]) -> list[tuple[tuple[int, int], ...]]:
    """Cut over tp by the model, then along dimension 0 over dp_shard as FSDP2 does."""
    held = [every(size) for size in WHOLE[name]]
    if name.endswith("qkv"):
        held[0] = cut(held[0], place["tp"], mesh["tp"], (4, 4, 4))
    if name.endswith("out"):
        held[1] = cut(held[1], place["tp"], mesh["tp"])
    held[0] = cut(held[0], place["dp_shard"], mesh["dp_shard"])
    return held


def part_of(whole: torch.Tensor, name: str, place: Mapping[str, int], mesh: Mapping[str, int]) -> torch.Tensor:
    """The oracle: what the rank holds, by torch's own functions."""
    if name.endswith("qkv"):
        whole = torch.cat([matrix.chunk(mesh["tp"])[place["tp"]] for matrix in whole.split(4)])
    if name.endswith("out"):
        whole = whole.chunk(mesh["tp"], 1)[place["tp"]]
    pieces = whole.chunk(mesh["dp_shard"])
    return pieces[place["dp_shard"]] if place["dp_shard"] < len(pieces) else whole[:0]


class Ranks:
    """The ranks of a replica of this mesh; the model's tensors are dealt over the stages, and are called otherwise on each."""

    def __init__(self, pp: int, dp_shard: int, tp: int) -> None:
        self.mesh = {"pp": pp, "dp_shard": dp_shard, "cp": 1, "tp": tp}
        self.places = [dict(zip(self.mesh, at, strict=True)) for at in product(*(range(n) for n in self.mesh.values()))]

    def names(self, rank: int) -> list[str]:
        return [name for number, name in enumerate(WHOLE) if number % self.mesh["pp"] == self.places[rank]["pp"]]

    def state(self, rank: int, seed: int, optimizer: bool = True) -> tuple[State, dict[str, Portion]]:
        place = self.places[rank]
        tensors: dict[str, torch.Tensor] = {}
        portions: dict[str, Portion] = {}
        scalars: dict[str, Any] = {"scheduler/0/last_epoch": 5, "optimizer/0/group/0/lr": 0.25}
        for at, name in enumerate(self.names(rank)):
            mine = f"chunk{place['pp']}.{name}"
            writes = place["tp"] == 0 or name.endswith(("qkv", "out"))
            held = held_by(name, place, self.mesh)
            paths = {f"parameter/{mine}": f"model/{name}"}
            if optimizer:
                paths[f"optimizer/0/state/{mine}/exp_avg"] = f"optimizer/0/state/{name}/exp_avg"
                tensors[step := f"optimizer/0/state/{mine}/step"] = torch.tensor(7.0 + len(name))
                first = place["dp_shard"] == place["tp"] == 0
                portions[step] = Portion.whole(f"optimizer/0/state/{name}/step", (), first)
            for number, (path, stored) in enumerate(paths.items()):
                tensors[path] = part_of(tensor_of(name, seed + number), name, place, self.mesh)
                portions[path] = Portion.of(stored, WHOLE[name], held, writes)
            scalars[f"optimizer/0/group/0/params/{mine}"] = at
        return State(tensors, scalars), portions

    def part(self, rank: int, seed: int) -> RankPart:
        return RankPart.of(*self.state(rank, seed))


MESHES = [(1, 1, 1), (2, 1, 2), (4, 1, 1), (1, 4, 1), (1, 2, 2), (2, 2, 1)]


@pytest.mark.parametrize("written_by", MESHES)
def test_ranks_of_any_mesh_read_what_ranks_of_another_have_written(written_by: tuple[int, int, int], tmp_path: Path) -> None:
    before = Ranks(*written_by)
    seed = random.randrange(1000)
    found = write(tmp_path, before.mesh, [before.part(rank, seed) for rank in range(len(before.places))])
    for shape in MESHES:
        now = Ranks(*shape)
        left = []
        for rank in range(len(now.places)):
            live, portions = now.state(rank, seed + 500, optimizer=False)
            expected, _ = now.state(rank, seed)
            loaded = checkpoints.load(found, rank, now.mesh, live, portions)
            assert loaded.state.tensors.keys() == expected.tensors.keys() and loaded.state.scalars == expected.scalars
            assert all(torch.equal(tensor, expected.tensors[path]) for path, tensor in loaded.state.tensors.items())
            left.append(set(loaded.left))
        assert not set.intersection(*left) and (shape[0] == 1 or any(left)), "no parameter is left by all"


def test_every_rank_of_any_mesh_that_reads_a_damaged_box_finds_it(tmp_path: Path) -> None:
    """The checksum is of a whole box, and a rank may need some of it."""
    before = Ranks(1, 2, 2)
    found = write(tmp_path, before.mesh, [before.part(rank, 7) for rank in range(len(before.places))])
    file = tmp_path / found.folder.name / "rank_1" / "__0_0.distcp"
    index = checkpoints.read_index(found)
    mine = [name for name, entry in index.parts[1].entries.items() if entry.placed and name.startswith("model/")]
    whole, raw = file.read_bytes(), before.state(1, 7)[0].tensors
    first = next(path for path in raw if path.endswith(mine[0].removeprefix("model/")) and path.startswith("parameter/"))
    at = whole.index(raw[first].contiguous().view(torch.uint8).numpy().tobytes()[:64])
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert checkpoints.verify(found.folder, data=False) == found, "sizes alone"
    with pytest.raises(ConfigError, match="rank_1/__0_0.distcp is not the file that was written"):
        checkpoints.verify(found.folder)
    for shape in MESHES:
        now, wrong = Ranks(*shape), 0
        for rank in range(len(now.places)):
            live, portions = now.state(rank, 500, optimizer=False)
            try:
                checkpoints.load(found, rank, now.mesh, live, portions)
            except checkpoints.Unread as error:
                wrong += 1
                assert error.rule.endswith(f"model.{mine[0].removeprefix('model/')} is not what was written")
        assert wrong >= 1, shape


def test_what_a_parameter_has_not_is_refused_by_name(tmp_path: Path) -> None:
    before, now = Ranks(2, 1, 1), Ranks(1, 1, 1)
    found = write(tmp_path, before.mesh, [before.part(rank, 3) for rank in range(2)])
    live, portions = now.state(0, 4)
    tensors = dict(live.tensors)

    def load(tensors: Mapping[str, torch.Tensor], portions: Mapping[str, Portion], **scalars: Any) -> checkpoints.Loaded:
        state = State(tensors, {**live.scalars, **{name.replace("_", "/"): value for name, value in scalars.items()}})
        return checkpoints.load(found, 0, now.mesh, state, portions)

    wider = {**portions, "parameter/chunk0.norm": Portion.whole("model/norm", (7,))}
    with pytest.raises(ConfigError, match=r"'norm' is \[6\] float64 there and \[7\] float64 in this model"):
        load({**tensors, "parameter/chunk0.norm": torch.zeros(7, dtype=torch.float64)}, wider)
    more = {**portions, "parameter/bias": Portion.whole("model/bias", (2,))}
    with pytest.raises(ConfigError, match=r"'bias' is absent there and \[2\] float32 in this model"):
        load({**tensors, "parameter/bias": torch.zeros(2)}, more)
    with pytest.raises(ConfigError, match=r"optimizer 0 does not hold bias there; .* session\.freeze"):
        load(tensors, portions, **{"optimizer_0_group_0_params_bias": 9})
    smaller = State(*({path: v for path, v in each.items() if "norm" not in path} for each in (tensors, live.scalars)))
    assert checkpoints.load(found, 0, now.mesh, smaller, portions).left == ("norm",), "all ranks agree, and refuse it"


def test_what_each_rank_has_of_its_own_is_read_by_the_same_mesh_alone(tmp_path: Path) -> None:
    ranks = Ranks(1, 1, 2)

    def state(rank: int) -> State:
        """An object of the user's that has other values on each rank."""
        live, _ = ranks.state(rank, 3)
        return State({**live.tensors, "extra/mine": torch.full((2,), float(rank))}, {**live.scalars, "extra/number": rank})

    portions = [ranks.state(rank, 3)[1] for rank in range(2)]
    found = write(tmp_path, ranks.mesh, [RankPart.of(state(rank), portions[rank]) for rank in range(2)])
    for rank in range(2):
        loaded = checkpoints.load(found, rank, ranks.mesh, state(1 - rank), portions[rank]).state
        assert loaded.tensors["extra/mine"].tolist() == [rank, rank] and loaded.scalars["extra/number"] == rank
    live, whole = Ranks(1, 1, 1).state(0, 3)
    with pytest.raises(ConfigError, match="extra/mine differs between the ranks that wrote it.*resume with the same mesh"):
        checkpoints.load(found, 0, Ranks(1, 1, 1).mesh, live, whole)


def test_parts_that_are_no_whole_state_are_not_a_checkpoint(tmp_path: Path) -> None:
    ranks, said = Ranks(1, 2, 1), list[str]()
    state, portions = ranks.state(1, 3)
    holes = {path: Portion(p.name, p.shape, (), p.writes) for path, p in portions.items()}
    assert write(tmp_path / "holes", ranks.mesh, [ranks.part(0, 3), RankPart.of(state, holes)], said) is None
    assert "is not whole" in said[0]
    other = {**state.tensors, "parameter/chunk0.norm": torch.zeros(3, dtype=torch.float32)}
    said.clear()
    parts = [ranks.part(0, 3), RankPart.of(State(other, state.scalars), portions)]
    assert write(tmp_path / "types", ranks.mesh, parts, said) is None
    assert "model/norm is float64[6] on one rank and float32[6] on rank 1" in said[0]


@pytest.mark.parametrize("same", [True, False])
def test_two_tensors_of_one_name_are_copies_or_refused(same: bool, tmp_path: Path) -> None:
    portions, said = {"parameter/w": Portion.whole("model/w", (2,))}, list[str]()
    states = [State({"parameter/w": torch.full((2,), 1.0 if same else float(rank))}) for rank in range(2)]
    found = write(tmp_path, {"pp": 2}, [RankPart.of(state, portions) for state in states], said)
    if same:
        assert checkpoints.load(found, 1, {"pp": 2}, states[1], portions).state.tensors["parameter/w"].tolist() == [1.0, 1.0]
        return
    assert found is None and "model/w has other values on rank 1 than on another rank that has written it" in said[0]


def test_an_older_layout_is_refused_with_its_number(tmp_path: Path) -> None:
    ranks = Ranks(1, 1, 1)
    found = write(tmp_path, ranks.mesh, [ranks.part(0, 3)])
    manifest = json.loads((found.folder / checkpoints.MANIFEST).read_text())
    old = {"record": manifest["record"], "stages": 1, "files": {"stage_0": {".metadata": [1, 1]}}}
    (found.folder / checkpoints.MANIFEST).write_text(json.dumps(old))
    with pytest.raises(ConfigError, match="it has layout 1, of another version of helixrt, and this version reads layout 2"):
        newest_complete(tmp_path)


@pytest.mark.parametrize("size", range(9))
def test_pieces_are_those_of_torch_chunk(size: int) -> None:
    indices = torch.arange(size)
    for parts in range(1, 5):
        pieces = [piece.tolist() for piece in indices.chunk(parts)]
        assert [n for n in parts_of(size, parts) if n] == [len(piece) for piece in pieces if piece]
        for rank in range(parts):
            mine = [i for first, count in cut(every(size), rank, parts) for i in range(first, first + count)]
            assert mine == (pieces[rank] if rank < len(pieces) else [])
