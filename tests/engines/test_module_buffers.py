"""Buffers that a forward changes: united at commit by their modes, kept apart, or refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.buffers import Buffers
from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import Fatal, MisuseError


def test_lowest_contributor_gives_buffers_when_told_so(loops: Any) -> None:
    case = loops.CASES["batch-norm"]
    replicas = [loops.Replica(case, replica, 3, buffers="first") for replica in range(3)]
    alone = loops.Replica(case, 1, 3, buffers="first")
    for replica in (*replicas[1:], alone):
        replica.work(1)
    live = {n: b.clone() for n, b in alone.parts.model.named_buffers()}
    sums = loops.summed([replica.engine for replica in replicas[1:]])
    for replica in replicas:
        replica.engine.apply(loops.record(1, (1, 2)), sums)
        assert all(loops.equal_bits(b, live[n]) for n, b in replica.parts.model.named_buffers())


class Counting(nn.Module):
    """A module with every kind of buffer: replaced by assignment, integer, boolean, large, not persistent, constant."""

    def __init__(self, large: int = 1 << 17) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(4, dtype=torch.bool))
        self.register_buffer("large", torch.ones(large))
        self.register_buffer("constant", torch.full((3,), 0.1))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_buffer("index", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.change: str = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.calls += len(x)
        self.seen[len(x) % 4] = True
        if self.change:
            getattr(self, self.change).add_(1)
        return self.linear(x)


def counting(large: int = 1 << 17, replica: int = 0, **registered: Any) -> tuple[Counting, ModuleEngine]:
    torch.manual_seed(0)
    model = Counting(large)
    modes = {"buffers": {"mean": "mean"}, **registered}
    options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], **modes)
    return model, ModuleEngine(options, replica=replica, replicas=3)


def test_buffers_of_every_kind_are_united(loops: Any) -> None:
    made = [counting(replica=replica) for replica in range(3)]
    for (model, engine), rows in zip(made, (1, 2, 7), strict=True):
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.full((rows, 3), float(rows))).sum(), last=True)
        engine.end()
    sums = loops.summed([engine for _, engine in made])
    for model, engine in made:
        engine.apply(loops.record(1, (0, 1, 2)), sums)
        assert torch.equal(model.mean, torch.full((3,), (0.5 + 1 + 3.5) / 3))
        assert model.calls.item() == 7 and model.seen.tolist() == [False, True, True, True]
        assert torch.equal(model.constant, torch.full((3,), 0.1)), "a mean of equal numbers may be another number"


@pytest.mark.parametrize("mode", ["mean", "first"])
def test_a_buffer_with_nan_that_no_forward_changes_keeps_its_bits(loops: Any, mode: Any) -> None:
    """NaN is unequal to itself, and a mean of equal numbers may be another number."""
    engines, models = [], []
    for replica in range(3):
        model = nn.Linear(3, 2)
        model.register_buffer("table", torch.tensor([torch.nan, -torch.inf, 0.1], dtype=torch.float64))
        models.append(model)
        options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
        engines.append(ModuleEngine(options, replica=replica, replicas=3, buffers=mode))
    before = models[0].table.clone()
    for model, engine in zip(models, engines, strict=True):
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.ones(1, 3)).sum(), last=True)
        engine.end()
    sums = loops.summed(engines)
    for model, engine in zip(models, engines, strict=True):
        engine.apply(loops.record(1, (0, 1, 2)), sums)
        assert loops.equal_bits(model.table, before)


class Averaged(nn.Module):
    """A model with an average of its weights beside it, as `torch.optim.swa_utils.AveragedModel` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.average.requires_grad_(False)
        self.register_buffer("large", torch.zeros(1 << 17))
        self.register_buffer("updates", torch.zeros(()))


def test_what_the_update_does_to_buffers_stays_done_and_is_state(loops: Any) -> None:
    def made(replica: int) -> tuple[Averaged, ModuleEngine]:
        torch.manual_seed(0)
        model = Averaged()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        engine = ModuleEngine(Registered.of(model, [optimizer]), replica=replica, replicas=2)

        def update(record: Any) -> None:
            if record.applied:
                optimizer.step()
            model.average.update_parameters(model.net)
            model.large.add_(1.0)
            model.updates = model.updates + 1.0  # replaced, not changed in place

        engine.set_update(update)
        return model, engine

    model, engine = made(0)
    weights = [model.net.weight.detach().clone()]
    for step in range(1, 4):
        engine.begin(lambda bucket: None)
        engine.backward(model.net(torch.full((4, 3), float(step))).square().sum(), last=True)
        engine.end()
        engine.apply(loops.record(step), [bucket.clone() for bucket in engine.buckets])
        weights.append(model.net.weight.detach().clone())
    assert int(model.average.n_averaged) == 3 and float(model.large[7]) == 3.0 and float(model.updates) == 3.0
    torch.testing.assert_close(model.average.module.weight, torch.stack(weights[1:]).mean(0))
    other, joiner = made(1)
    joiner.load(engine.state())
    joiner.begin(lambda bucket: None)
    assert all(torch.equal(a, b) for a, b in zip(other.buffers(), model.buffers(), strict=True))


REFUSED = 'buffer {0} is changed outside the update.*buffers={{\'{0}\': MODE}}.*"mean".*"first".*"per_replica"'
UNNAMED = ["large", "scratch", "index", "constant", "mean"]  # large, not persistent twice, small twice: in place, and replaced


@pytest.mark.parametrize("name", UNNAMED)
def test_a_buffer_that_forward_changes_is_refused_in_its_first_step_unless_its_mode_is_named(loops: Any, name: str) -> None:
    model, engine = counting(buffers={} if name == "mean" else {"mean": "mean"})
    model.change = "" if name == "mean" else name
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(1, 3)).sum(), last=True)
    with pytest.raises(MisuseError, match=REFUSED.format(name)) as refused:
        engine.end()
    assert "\n" not in str(refused.value)
    model, engine = counting(buffers={"mean": "mean", name: "mean"})
    model.change = name
    before = getattr(model, name).clone()
    one_step(loops, model, engine)
    assert torch.equal(getattr(model, name), before + (1.5 if name == "mean" else 1))


@pytest.mark.parametrize("name", ["large", "scratch", "constant", "index"])
@pytest.mark.parametrize("first", [0, -1])
def test_a_buffer_without_a_mode_is_found_in_its_first_step_when_it_changes_through_its_data(
    loops: Any, name: str, first: int
) -> None:
    """As code that keeps a codebook does (`self.embed.data.mul_(decay)`): it counts no version."""
    made = [counting(replica=replica) for replica in (0, 1)]
    with pytest.raises(MisuseError, match=REFUSED.format(name)):
        for model, engine in made:
            computed(model, engine, lambda model=model: getattr(model, name).data[first:].add_(1))
        made[0][1].apply(loops.record(1, (0, 1)), loops.summed([engine for _, engine in made]))


@pytest.mark.parametrize("name", ["large", "scratch", "constant"])
def test_one_element_that_changes_on_one_rank_alone_is_left_to_digests(loops: Any, name: str) -> None:
    made = [counting(replica=replica) for replica in (0, 1)]
    for model, engine in made:
        computed(model, engine, lambda model=model: getattr(model, name).data[-1:].add_(model is made[1][0]))
    for _, engine in made:
        engine.apply(loops.record(1, (0, 1)), loops.summed([engine for _, engine in made]))


class OwnNorm(nn.Module):
    """Batch normalization that is no module of torch's: its statistics are changed without counting a version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(self.linear(x), self.running_mean, self.running_var, training=True)


class DerivedNorm(nn.BatchNorm1d):
    """Of a user, with a buffer more."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.register_buffer("calls", torch.zeros(()))


def test_statistics_of_a_module_that_is_not_torchs_are_refused(loops: Any) -> None:
    model = OwnNorm()
    engine = ModuleEngine(Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)]))
    with pytest.raises(MisuseError, match=REFUSED.format("running_mean")):
        one_step(loops, model, engine)


def test_statistics_of_classes_derived_from_torchs_are_known_and_their_other_buffers_are_not(loops: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), DerivedNorm(2))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    one_step(loops, model, ModuleEngine(Registered.of(model, optimizers)))
    assert model[1].num_batches_tracked == 1
    with pytest.raises(MisuseError, match=REFUSED.format("1.calls")):
        one_step(loops, model, ModuleEngine(Registered.of(model, optimizers)), lambda: model[1].calls.add_(1))


def computed(model: nn.Module, engine: ModuleEngine, change: Callable[[], Any]) -> None:
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(4, 3)).sum(), last=True)
    change()
    engine.end()


def one_step(loops: Any, model: nn.Module, engine: ModuleEngine, change: Callable[[], Any] = lambda: None) -> None:
    computed(model, engine, change)
    engine.apply(loops.record(1), loops.summed([engine]))


@pytest.mark.parametrize("draw", range(30))
def test_each_mode_gives_what_it_says_over_replicas_and_their_ranks(draw: int) -> None:
    """Against an oracle: buffers of all kinds in random order and sizes, random contributors."""
    chance = random.Random(draw)
    replicas, ranks = chance.choice((1, 2, 3)), chance.choice((1, 2))
    kinds = [(chance.choice(("mean", "first")), chance.choice((torch.float32, torch.int64))) for _ in range(6)]
    models = [[nn.Module() for _ in range(ranks)] for _ in range(replicas)]
    for number, (_, dtype) in enumerate(kinds):
        size = [chance.randrange(4) for _ in range(chance.randrange(3))]
        for model in itertools.chain(*models):
            model.register_buffer(f"b{number}", torch.zeros(size, dtype=dtype))
    modes = {f"b{number}": mode for number, (mode, _) in enumerate(kinds)}
    every = [[Buffers(Registered.of(m, buffers=modes), "mean", r, replicas, ranks) for m in models[r]] for r in range(replicas)]
    generator = torch.Generator().manual_seed(draw)
    for model, name in itertools.product(itertools.chain(*models), modes):
        buffer = model.get_buffer(name)
        buffer.copy_(torch.randint(-9, 9, buffer.shape, generator=generator))
    values = [[{name: m.get_buffer(name).clone() for name in modes} for m in of] for of in models]
    summed = sorted(chance.sample(range(replicas), chance.randrange(1, replicas + 1)))
    rooms = [united(of) for of in every]
    changed, floats, integers = (torch.stack([rooms[r][part] for r in summed]).sum(0) for part in range(3))
    for buffers in itertools.chain(*every):
        buffers.commit(changed.tolist(), floats, integers if buffers.integer_room else None, summed)
    for name, (mode, dtype) in zip(modes, kinds, strict=True):
        given = torch.stack([values[r][rank][name] for r in summed for rank in range(ranks)])
        expected = given[0] if mode == "first" else given.amax(0) if dtype is torch.int64 else given.double().mean(0)
        for model in itertools.chain(*models):
            torch.testing.assert_close(model.get_buffer(name), expected.to(dtype), msg=f"{name}: {mode}, {dtype}")


def united(ranks: list[Buffers]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a replica puts into the exchange: which buffers have changed, their floats and integers."""
    floats = [torch.zeros(b.float_room, dtype=torch.float64) for b in ranks]
    integers = [torch.zeros(b.integer_room, dtype=torch.int64) for b in ranks]
    for buffers, *rooms in zip(ranks, floats, integers, strict=True):
        buffers.write(*rooms)
    changed = torch.stack([b.changed(torch.device("cpu")) for b in ranks]).sum(0)
    return changed, ranks[0].united(floats), ranks[0].united_integers(integers)


class Codebook(nn.Module):
    """Of a VQ-VAE: moving averages of what is assigned to each code, by `data`, as common implementations keep them."""

    def __init__(self, codes: int = 4, size: int = 3) -> None:
        super().__init__()
        self.encode = nn.Linear(3, size)
        self.register_buffer("embed", torch.randn(size, codes))
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", self.embed.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z.detach(), self.embed.T).argmin(1)
        onehot = nn.functional.one_hot(nearest, self.embed.shape[1]).to(z.dtype)
        self.cluster_size.data.mul_(0.9).add_(onehot.sum(0), alpha=0.1)
        self.embed_avg.data.mul_(0.9).add_(z.detach().T @ onehot, alpha=0.1)
        self.embed.data.copy_(self.embed_avg / (self.cluster_size + 1e-5))
        return (z - self.embed.T[nearest]).square().sum()


class Centre(nn.Module):
    """Of DINO: a moving average of the teacher's outputs, of one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(3, 5)
        self.register_buffer("center", torch.zeros(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.student(x)
        loss = (out - self.center).square().sum()
        self.center = self.center * 0.9 + out.detach().mean(0, keepdim=True) * 0.1
        return loss


@pytest.mark.parametrize(
    ("build", "mode", "first"), [(Codebook, "mean", "embed|cluster_size|embed_avg"), (Centre, "first", "center")]
)
def test_buffers_of_known_methods_are_refused_and_follow_their_mode(loops: Any, build: Any, mode: str, first: str) -> None:
    def made(replica: int, **buffers: str) -> tuple[nn.Module, ModuleEngine]:
        torch.manual_seed(2)
        model = build()
        options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], buffers=buffers)
        return model, ModuleEngine(options, replica=replica, replicas=2)

    model, engine = made(0)
    with pytest.raises(MisuseError, match=f"buffer ({first}) is changed outside the update.*buffers="):
        one_step(loops, model, engine)

    names = dict.fromkeys([name for name, _ in build().named_buffers()], mode)
    trained = [made(replica, **names) for replica in range(2)]
    alone = []
    for replica, (model, engine) in enumerate(trained):
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.eye(3) * (replica + 1.0)), last=True)
        alone.append({name: value.clone() for name, value in model.named_buffers()})
        engine.end()
    sums = loops.summed([engine for _, engine in trained])
    for model, engine in trained:
        engine.apply(loops.record(1, (0, 1)), sums)
        for name, value in model.named_buffers():
            mean = ((alone[0][name].double() + alone[1][name].double()) / 2).float()
            assert torch.equal(value, mean if mode == "mean" else alone[0][name]), name


# ---------------------------------------------------------------- per replica


def test_a_buffer_per_replica_is_in_no_replicated_state_and_is_neither_exchanged_nor_loaded(loops: Any) -> None:
    made = [counting(replica=replica, buffers={"*": "per_replica"}) for replica in range(3)]
    assert not [name for name in made[0][1].state().tensors if "buffer" in name]
    for (model, engine), rows in zip(made, (1, 2, 7), strict=True):
        model.change = "large"
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.full((rows, 3), float(rows))).sum(), last=True)
        engine.end()
    sums = loops.summed([engine for _, engine in made])
    for (model, engine), rows in zip(made, (1, 2, 7), strict=True):
        engine.apply(loops.record(1, (0, 1, 2)), sums)
        engine.load(made[0][1].state())
        engine.begin(lambda bucket: None)
        assert model.calls == rows and torch.equal(model.mean, torch.full((3,), rows / 2)) and model.large[0] == 2


def test_statistics_can_be_kept_apart(loops: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    options = Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], buffers={"1.*": "per_replica"})
    engine = ModuleEngine(options)
    one_step(loops, model, engine)
    assert model[1].num_batches_tracked == 1 and list(engine.per_replica) == [
        f"buffers['1.{name}']" for name in ("running_mean", "running_var", "num_batches_tracked")
    ]


def test_what_an_evaluation_does_to_a_buffer_per_replica_is_put_back() -> None:
    model, engine = counting(buffers={"*": "per_replica"})
    before = {name: value.clone() for name, value in model.named_buffers()}
    with engine.evaluating():
        model.change = "scratch"
        model(torch.ones(2, 3))
        assert model.calls == 2
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    _, small = counting(large=4, buffers={"*": "per_replica"})
    _, engine = counting(buffers={"*": "per_replica"})
    with pytest.raises(Fatal, match=r"the per-replica state has buffer large of shape \[4\], not \[131072\]"):
        engine.per_replica["buffers['large']"].load_state_dict(small.per_replica["buffers['large']"].state_dict())
