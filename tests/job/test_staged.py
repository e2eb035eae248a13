"""A model in pipeline stages on the session: trained as a plain loop trains it, on one rank and on two; wrong calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import helixrt
from helixrt.engines.staged import StagePlace, Stages
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.agreements import agree_on_plan
from helixrt.job.mesh import Mesh
from helixrt.job.session import Session
from helixrt.job.session_host import SessionSettings
from helixrt.protocol.step.lineage import audit
from helixrt.record import FlightRecord
from helixrt.replica.store import MemoryRunStore
from helixrt.schedule.ir import Op, Operation, Schedule, linear
from tests import programs
from tests.job.lineage_oracle import chain, reported
from tests.job.session_world import LocalHost, session_with

WIDTH, BATCH, MICROBATCHES = 5, 8, 4


class StageHost(LocalHost):
    """Of one stage; the stages of a test are threads of this process."""

    def __init__(self, stage: int = 0, stages: int = 1, group: Any = None, **others: Any) -> None:
        super().__init__(**others)
        self.place = StagePlace(stage, stages, group if stages > 1 else None, FlightRecord(f"pp{stage}"))

    def connect_stages(self, device: torch.device) -> StagePlace:
        return replace(self.place, device=device)


def parts(count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.4, generator=generator)
    return list(layers) if count == 2 else [nn.Sequential(*layers)]


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(x, x.flip(1)) for x in (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(6))]


def staged(modules: Any, **others: Any) -> Stages:
    example = torch.zeros(BATCH // MICROBATCHES, WIDTH)
    settings = {"loss": mse_loss, "example": (example, example), "boundary": example, "microbatches": MICROBATCHES}
    return Stages(modules, **{**settings, **others})


def trained(host: StageHost, steps: int = 8, dropped: bool = False) -> tuple[list[torch.Tensor], list[Any]]:
    """This stage's parameters, and (loss, norm, rate) of each step."""
    session = session_with(host, seed=5, mesh=Mesh(pp=host.place.stages))
    model = session.parallelize(staged(parts(host.place.stages)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], clip_norm=0.5)
    x, y = data()[0]
    session.evaluate(lambda: model.evaluate(x, target=y), every=4)
    found = []
    for step in session.steps(data(), until=steps):
        for inputs, target in step:
            rate = optimizer.param_groups[0]["lr"]
            loss = step.train(model, inputs, target=target)
        done = step.commit()
        if done.committed:
            assert done.loss == loss
            found.append((loss, float(done.grad_norm), rate))
            session.log({"loss": loss})
    return [p.detach().clone() for p in model.parameters()], found


def plain(steps: int = 8) -> tuple[list[torch.Tensor], list[Any], list[float]]:
    model = parts(1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches, found, validated = data(), [], []
    for number in range(steps):
        optimizer.zero_grad()
        losses = [mse_loss(model(x), y) for x, y in zip(*(t.chunk(MICROBATCHES) for t in batches[number % 6]), strict=True)]
        for loss in losses:
            (loss / MICROBATCHES).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        found.append((sum(loss.item() for loss in losses) / MICROBATCHES, float(norm), optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
        if (number + 1) % 4 == 0:
            validated.append(mse_loss(model(batches[0][0]), batches[0][1]).item())
    return [p.detach() for p in model.parameters()], found, validated


def alike(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for one, other in zip(a, b, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def check(parameters: list[torch.Tensor], figures: list[Any], host: StageHost) -> None:
    expected, told, validated = plain()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(parameters, expected, strict=True))
    alike(figures, told)
    alike([values["value"] for _, values in host.validated], validated)


def test_one_stage_trains_as_a_plain_loop_does() -> None:
    host = StageHost()
    check(*trained(host), host)
    assert [step for step, _ in host.logged] == list(range(1, 9))


def test_two_stages_train_as_a_plain_loop_does(run_stages: Any) -> None:
    hosts: dict[int, StageHost] = {}

    def stage(number: int, group: Any) -> Any:
        hosts[number] = StageHost(number, 2, group)
        return trained(hosts[number])

    (first, figures), (second, others) = run_stages(2, stage)
    assert figures == others  # loss and norm are over all stages, and known to each
    check([*first, *second], figures, hosts[0])
    assert hosts[0].validated == hosts[1].validated


def test_dropped_work_is_done_again_with_the_same_result() -> None:
    calm, disturbed = trained(StageHost()), trained(StageHost(dropped={2, 3, 7}))
    assert all(torch.equal(a, b) for a, b in zip(calm[0], disturbed[0], strict=True)) and calm[1] == disturbed[1]


# ---------------------------------------------------------------- wrong calls


def registered(modules: Sequence[nn.Module] = (), **others: Any) -> tuple[Session, Any]:
    """A session with a model of these parts, or of one part, and SGD."""
    session = session_with(StageHost())
    model = session.parallelize(staged(modules or parts(1), **others))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    return session, model


def trained_steps(session: Session, model: Any, until: int) -> Iterator[Any]:
    """Steps over `data()`, each after its work and before its commit."""
    for step in session.steps(data(), until=until):
        for x, y in step:
            step.train(model, x, target=y)
        yield step


def in_step(call: Callable[[Any, Any, torch.Tensor, torch.Tensor], object]) -> Callable[[], None]:
    def script() -> None:
        session, model = registered()
        for step in session.steps(data(), until=2):
            for x, y in step:
                call(step, model, x, y)
            step.commit()

    return script


def twice(step: Any, model: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    step.train(model, x, target=y)
    step.train(model, x, target=y)


def not_in_stages() -> None:
    session = session_with(LocalHost())
    model = session.parallelize(nn.Linear(WIDTH, WIDTH))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    next(trained_steps(session, model, 1))


def own_update() -> None:
    session, _ = registered()
    session.update(lambda record: None)


def hand_changed() -> None:
    session, model = registered()
    for step in session.steps(data(), until=2):
        for x, y in step:
            step.train(model, x, target=y)
            with torch.no_grad():
                next(model.parameters()).zero_()
        step.commit()


def with_statistics() -> None:
    registered([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))])


class Counting(nn.Linear):
    """Counts its calls in a floating-point buffer; `hidden`: so that no version is counted."""

    def __init__(self, hidden: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.hidden = hidden
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (self.seen.data if self.hidden else self.seen).add_(1)
        return super().forward(x)


def counting(hidden: bool = False, **options: Any) -> Any:
    session = session_with(StageHost(dropped={2}))
    model = session.parallelize(staged([nn.Sequential(Counting(hidden))]))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)], **options)
    for step in trained_steps(session, model, 3):
        step.commit()
    return model


def with_counter() -> None:
    counting()


def with_hidden_counter() -> None:
    counting(hidden=True)


def with_mode() -> None:
    counting(buffers={"chunk0.*.seen": "first"})


def test_a_buffer_per_replica_of_one_stage_is_its_own_and_dropped_steps_leave_no_trace() -> None:
    model = counting(buffers={"chunk0.*.seen": "per_replica"})
    assert model.get_buffer("chunk0.0.seen").item() == 3 * MICROBATCHES


def evaluated_too_early() -> None:
    model = session_with(StageHost()).parallelize(staged(parts(1)))
    model.evaluate(*data()[0][:1], target=data()[0][1])


class Noting(nn.Linear):
    """Sets attributes in an evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if not self.training:
            self.seen = y.detach()
        return y


def test_graphs_go_on_after_an_evaluation_whose_forward_sets_attributes() -> None:
    session, model = registered([Noting(WIDTH, WIDTH)], graphs="always")
    session.evaluate(lambda: model.evaluate(*data()[0][:1], target=data()[0][1]), every=1)
    committed = 0
    for step in trained_steps(session, model, 3):
        step.commit()
        committed += 1
    assert committed == 3


def changing(change: Callable[[nn.Module], object]) -> Callable[[], None]:
    """A model run by graphs, whose part is changed after the first step."""

    def script() -> None:
        session = session_with(StageHost())
        part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
        model = session.parallelize(staged([part], graphs="always"))
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        for step in trained_steps(session, model, 2):
            step.commit()
            change(part)

    return script


def unlike_the_example() -> None:
    """As many elements, in another shape."""
    session, model = registered([nn.Sequential(nn.Linear(WIDTH, WIDTH))], graphs="always")
    for step in session.steps(data(), until=2):
        for x, y in step:
            step.train(model, x.reshape(4, 2, WIDTH), target=y.reshape(4, 2, WIDTH))


WRONG: dict[Callable[[], None], str] = {
    in_step(lambda step, model, x, y: model(x)): r"is not called: in a step use step\.train\(model, x, target=y\)",
    in_step(lambda step, model, x, y: step.backward(x.sum())): r"step\.backward was called for a model in stages",
    in_step(twice): r"step\.train was called twice in micro-batch 1 of step 1; call it once for each batch",
    in_step(lambda step, model, x, y: step.train(nn.Linear(2, 2), x, target=y)): "with another model than the registered one",
    in_step(lambda step, model, x, y: step.train(model, x[:7], target=y[:7])): r"shape \[7, 5\] cannot be cut into 4 equal",
    not_in_stages: r"step\.train is for a model in stages; use step\.backward\(loss\)",
    own_update: "an update function cannot be registered for stages",
    hand_changed: r"parameter chunk0\.0\.weight was changed in place",
    with_statistics: "Stages cannot have running statistics",
    with_counter: "buffer chunk0.0.seen is changed outside the update",
    with_hidden_counter: "buffer chunk0.0.seen is changed outside the update",
    with_mode: "buffers with the mode mean or first",
    unlike_the_example: r"the input of a micro-batch is torch.float32 \[1, 2, 5\], and the graphs .* torch.float32 \[2, 5\]",
    changing(nn.Module.eval): r"the training mode of a module was changed \(train\(\) or eval\(\)\) after the graphs",
    changing(lambda part: setattr(part[1], "p", 0.0)): r"1\.p of chunk0 was changed after the graphs of its part were captured",
    changing(lambda part: part[0].weight.requires_grad_(False)): r"chunk0\.0\.weight\.requires_grad was changed",
    evaluated_too_early: "register the model before it is evaluated",
}


@pytest.mark.parametrize("script", WRONG, ids=[str(number) for number in range(len(WRONG))])
def test_a_wrong_call_ends_in_one_clear_error(script: Callable[[], None]) -> None:
    with pytest.raises(MisuseError, match=WRONG[script]):
        script()


def backwards_last_first() -> Schedule:
    def stage(chunk: int) -> tuple[Operation, ...]:
        forwards = [Operation(Op.F, chunk, m) for m in range(MICROBATCHES)]
        return (*forwards, *(replace(forward, op=Op.BW) for forward in reversed(forwards)))

    return Schedule("lifo", 2, MICROBATCHES, linear(2), (stage(0), stage(1)))


def test_ranks_with_other_loops_or_first_orders_are_told() -> None:
    store = MemoryRunStore()
    for _ in range(2):
        agree_on_plan(store, 10, 1, "ab12")
    with pytest.raises(MisuseError, match="first order is cd34 here, and ab12 on another rank; .* the same file"):
        agree_on_plan(store, 10, 1, "cd34")
    with pytest.raises(MisuseError, match=r"session.steps\(until=11\) here, and until=10 on another replica"):
        agree_on_plan(store, 11, 1, "ab12")


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a model without stages": ({"mesh": Mesh(pp=2)}, nn.Linear(2, 2), r"mesh\.pp=2: needs session\.parallelize\(helixrt"),
    "too few parts": ({}, staged(parts(2)), "stages.modules=2: must be 1: 1f1b over mesh.pp=1 stages has so many parts"),
    "a part is missing": ({}, staged({1: parts(1)[0]}), r"stages.modules=\[1\]: lacks part 0, which 1f1b has on stage 0"),
    "too few micro-batches": ({"mesh": Mesh(pp=8)}, staged(parts(1)), "stages.microbatches=4: 1f1b needs one per stage"),
    "graphs": ({}, staged(parts(1), graphs="never ever"), "stages.graphs=never ever: must be one of"),
    "an order that cannot be adapted": (
        {"mesh": Mesh(pp=2)},
        staged(parts(2), schedule=backwards_last_first(), adapt=helixrt.Adaptation()),
        r"stages\.schedule=lifo: cannot be with stages\.adapt: .*stage 0 runs BW\(chunk 0, micro-batch 3\) before BW",
    ),
    "costs that are not there": (
        {},
        staged(parts(1), schedule="helix", costs="nowhere"),
        "stages.costs=nowhere: cannot be read: No such file",
    ),
    "costs of an order that needs none": (
        {},
        staged(parts(1), costs="nowhere"),
        "stages.costs=nowhere: is for zb, adaptra, helix: the order of 1f1b does not depend on costs",
    ),
    "costs of an order that is given": (
        {"mesh": Mesh(pp=2)},
        staged(parts(2), schedule=backwards_last_first(), costs="nowhere"),
        "stages.costs=nowhere: cannot be with schedule lifo, whose order is given",
    ),
    "times": ({}, staged(parts(1), profile="guessed"), "stages.profile=guessed: must be one of auto, measure, estimate"),
    "a tensor-parallel mesh": ({"mesh": Mesh(tp=2)}, staged(parts(1)), r"mesh\.tp=2: needs Stages\(layouts=\.\.\.\)"),
    "a context-parallel mesh": ({"mesh": Mesh(pp=2, cp=2)}, staged(parts(2)), r"mesh\.cp=2: needs Stages\(layouts=\.\.\.\)"),
    "shards and captured graphs": (
        {"mesh": Mesh(dp_shard=2)},
        staged(parts(1), graphs="always"),
        r"mesh\.dp_shard=2: cannot be with schedule 1f1b run by captured graphs, .* or graphs=never",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_do_not_fit_are_refused(case: str) -> None:
    settings, model, rule = REFUSED[case]
    with pytest.raises(ConfigError, match=rule):
        session_with(StageHost(), **settings).parallelize(model)


def test_a_layout_of_no_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"stages\.layouts=1\.weights: part 0 has no such parameter"):
        registered(layouts=lambda module: {"1.weights": helixrt.ParameterLayout(sharded=("tp",))})


def test_a_rank_alone_has_no_groups() -> None:
    assert session_with(StageHost()).group("tp") is None


def test_accumulation_is_the_micro_batches() -> None:
    session, _ = registered()
    with pytest.raises(ConfigError, match="accumulate=2: must be 1 for a model in stages"):
        next(session.steps(data(), until=1, accumulate=2))


def dropping(seen: list[torch.Tensor]) -> nn.Module:
    """A part that drops; what it kept of each micro-batch is added to `seen`."""
    drop = nn.Dropout(0.5)
    drop.register_forward_hook(lambda module, given, made: seen.append((made != 0).detach().clone()))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), drop)


def masks(schedule: str, device: str) -> list[list[torch.Tensor]]:
    """What the two parts of a model kept in a step, by part and micro-batch."""
    seen: list[list[torch.Tensor]] = [[], []]
    session = Session(SessionSettings(device=device, seed=5), StageHost())
    model = session.parallelize(staged([dropping(part) for part in seen], schedule=schedule, graphs="never"))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.0)])
    for step in trained_steps(session, model, 1):
        step.commit()
    return seen


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_parts_and_micro_batches_draw_numbers_of_their_own_whatever_the_order(device: str) -> None:
    found, other = masks("interleaved", device), masks("zbv", device)
    flat = [mask for part in found for mask in part]
    assert len(flat) == 2 * MICROBATCHES
    assert not any(torch.equal(a, b) for a, b in combinations(flat, 2))
    assert all(torch.equal(a, b) for one, two in zip(found, other, strict=True) for a, b in zip(one, two, strict=True))


def test_an_evaluation_is_in_evaluation_mode() -> None:
    seen: list[torch.Tensor] = []
    session, model = registered([dropping(seen)])
    x, y = data()[0]
    found = [model.evaluate(x, target=y) for _ in range(2)]
    assert found[0] == found[1] == pytest.approx(mse_loss(model.chunks[0][0](x), y).item()) and torch.stack(seen).all()
    assert all(module.training for module in model.modules())


def test_a_frozen_first_part_has_no_backward(run_stages: Any) -> None:
    def stage(number: int, group: Any) -> torch.Tensor:
        session = session_with(StageHost(number, 2, group), seed=5, mesh=Mesh(pp=2))
        modules = parts(2)
        modules[0].requires_grad_(False)
        model = session.parallelize(staged(modules))
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        for step in trained_steps(session, model, 2):
            assert step.commit().committed
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    found, modules = run_stages(2, stage), parts(2)
    optimizer = torch.optim.SGD(modules[1].parameters(), lr=0.1)
    for x, y in data()[:2]:
        optimizer.zero_grad()
        mse_loss(modules[1](modules[0](x)), y).backward()
        optimizer.step()
    for got, module in zip(found, modules, strict=True):
        torch.testing.assert_close(got, torch.cat([p.detach().flatten() for p in module.parameters()]))


def test_the_first_part_may_change_its_input_in_place() -> None:
    session, model = registered([nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))])
    for step in trained_steps(session, model, 1):
        assert step.commit().committed


class Calling(nn.Module):
    """Uses what is none of its parts."""

    def __init__(self, used: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.used = used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class Pair(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return x, super().forward(x)


UNTRAINABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a part that gives a tuple": (
        {"modules": [Pair(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], "schedule": "interleaved", "graphs": "never"},
        r"a part \(Pair\) gives a tuple; it must give one tensor",
    ),
    "a loss for each row": (
        {"loss": lambda y, t: ((y - t) ** 2).mean(1)},
        r"the loss of the stages gives a tensor of shape \[2\]; it must give a scalar",
    ),
}


@pytest.mark.parametrize("case", UNTRAINABLE)
def test_what_parts_and_losses_give_is_checked(case: str) -> None:
    others, rule = UNTRAINABLE[case]
    session, model = registered(**{"modules": parts(1), **others})
    with pytest.raises(MisuseError, match=rule):
        next(trained_steps(session, model, 1))


def test_an_empty_batch_is_refused() -> None:
    session, model = registered()
    with pytest.raises(MisuseError, match=r"a batch of shape \[0, 5\] cannot be cut into 4 equal micro-batches"):
        for step in session.steps(data(), until=1):
            for x, y in step:
                step.train(model, x[:0], target=y[:0])


def test_a_loss_with_parameters_to_train_is_refused() -> None:
    loss = nn.ModuleDict({"head": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="stages.loss=ModuleDict: has parameters to train, which no part has"):
        session_with(StageHost()).parallelize(staged(parts(1), loss=loss))


@pytest.mark.parametrize("hidden", ["", "behind a checkpoint"])
@pytest.mark.parametrize("where", ["part", "loss"])
def test_what_parts_and_losses_train_without_having_it_is_named(where: str, hidden: str) -> None:
    other = nn.Linear(WIDTH, WIDTH, bias=False)

    def used(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(other, y, use_reentrant=True) if hidden else other(y)

    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Calling(used))] if where == "part" else parts(1)
    session, model = registered(modules=modules, **({"loss": lambda y, t: mse_loss(used(y), t)} if where == "loss" else {}))
    with pytest.raises(MisuseError, match="the loss depends on parameter weight of a module Linear, .* not registered"):
        next(trained_steps(session, model, 1))


def test_parameters_of_two_types_are_refused() -> None:
    session = session_with(StageHost())
    model = session.parallelize(staged([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).double())]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisuseError, match=r"of a stage are of torch.float32 and torch.float64; they must be of one type"):
        session.register(model=model, optimizers=[optimizer])
        next(session.steps(data(), until=1))


@pytest.mark.parametrize(
    ("items", "graphs", "rule"),
    [
        (3 * BATCH + 6, "auto", "ends an epoch with a batch of 6 items, which cannot be cut into 4 equal micro-batches"),
        (3 * BATCH + 4, "always", "ends an epoch with a batch of 4 items, which has another shape; use drop_last=True"),
        (3 * BATCH + 4, "auto", ""),
        (3 * BATCH, "always", ""),
    ],
)
def test_a_loader_whose_last_batch_cannot_be_trained_is_refused_at_the_start(items: int, graphs: str, rule: str) -> None:
    rows = torch.utils.data.TensorDataset(*(torch.zeros(items, WIDTH),) * 2)
    for drop_last in (False, True):
        session, _ = registered(graphs=graphs)
        loader = torch.utils.data.DataLoader(rows, BATCH, drop_last=drop_last)
        with pytest.raises(ConfigError, match=rule) if rule and not drop_last else nullcontext():
            next(session.steps(loader, until=1))


def test_between_stages_all_batches_have_one_shape(run_stages: Any) -> None:
    def stage(number: int, group: Any) -> None:
        session = session_with(StageHost(number, 2, group), mesh=Mesh(pp=2))
        model = session.parallelize(staged(parts(2)))
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        rows = torch.utils.data.TensorDataset(*(torch.zeros(3 * BATCH + MICROBATCHES, WIDTH),) * 2)
        with pytest.raises(ConfigError, match="ends an epoch with a batch of 4 items, which has another shape"):
            next(session.steps(torch.utils.data.DataLoader(rows, BATCH), until=1))

    run_stages(2, stage)


# ---------------------------------------------------------------- a whole run


def launch(folder: Path, stages: int, shards: int, device: str = "cpu") -> Path:
    """The run's folder."""
    script = Path(__file__).parent / "staged_script.py"
    programs.succeeded(script, folder, stages, shards, device, timeout=220)
    return (folder / "latest").resolve()


@pytest.mark.system
@pytest.mark.parametrize(
    ("shards", "device"),
    [
        pytest.param(1, "cpu", marks=pytest.mark.slow),
        pytest.param(2, "cpu", marks=pytest.mark.slow),
        pytest.param(1, "cuda", marks=pytest.mark.gpu),
    ],
)
def test_a_replica_of_two_stages_leaves_whole_and_returns(shards: int, device: str, tmp_path: Path) -> None:
    run = launch(tmp_path, 2, shards, device)
    records = chain(run)
    assert records[-1].step == 60 and audit(records).clean and len(set(reported(run))) == 1
    assert any((1, 1) in record.contributors for record in records)  # the restarted replica contributes again
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line["what"] == "step"} == set(range(1, 61))
    assert {5, 10, 60} <= {line["step"] for line in lines if line["what"] == "validation"}
