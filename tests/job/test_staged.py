"""A model in pipeline stages on the session: trained as a plain loop trains it, on one rank and on two; wrong calls."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.engines.pipeline_parts import Tied, trained_of
from helixrt.engines.staged import StagePlace, Stages
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from helixrt.job.session import Session
from helixrt.protocol.step.lineage import audit
from helixrt.record import FlightRecord
from helixrt.schedule.ir import Op, Operation, Schedule, linear
from tests.job.lineage_oracle import chain, reported
from tests.job.session_world import LocalHost, session_with

WIDTH, BATCH, MICROBATCHES = 5, 8, 4


class StageHost(LocalHost):
    """Of one stage; the stages of a test are threads of this process."""

    def __init__(self, stage: int = 0, stages: int = 1, group: Any = None, **others: Any) -> None:
        super().__init__(**others)
        self.place = StagePlace(stage, stages, group if stages > 1 else None, FlightRecord(f"pp{stage}"))

    def connect_stages(self) -> StagePlace:
        return self.place


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


def registered(**others: Any) -> tuple[Session, Any]:
    session = session_with(StageHost())
    model = session.parallelize(staged(parts(1), **others))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    return session, model


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
    for step in session.steps(data(), until=1):
        for x, y in step:
            step.train(model, x, target=y)


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
    session = session_with(StageHost())
    model = session.parallelize(staged([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))]))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])


def evaluated_too_early() -> None:
    model = session_with(StageHost()).parallelize(staged(parts(1)))
    model.evaluate(*data()[0][:1], target=data()[0][1])


def mode_changed() -> None:
    session = session_with(StageHost())
    model = session.parallelize(staged([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))], graphs="always"))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    for step in session.steps(data(), until=2):
        for x, y in step:
            step.train(model, x, target=y)
        step.commit()
        model.eval()


def unlike_the_example() -> None:
    """As many elements, in another shape."""
    session = session_with(StageHost())
    model = session.parallelize(staged([nn.Sequential(nn.Linear(WIDTH, WIDTH))], graphs="always"))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
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
    with_statistics: "cannot have persistent buffers yet",
    unlike_the_example: r"the input of a micro-batch is torch.float32 \[1, 2, 5\], and the graphs .* torch.float32 \[2, 5\]",
    mode_changed: r"the training mode of a module was changed \(train\(\) or eval\(\)\) after the graphs",
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


# ---------------------------------------------------------------- a whole run


def launch(folder: Path, stages: int, shards: int) -> Path:
    """The run's folder."""
    root, script = Path(__file__).parents[2], Path(__file__).parent / "staged_script.py"
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), str(folder), str(stages), str(shards)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=220)
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "latest").resolve()


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_a_replica_of_two_stages_leaves_whole_and_returns(shards: int, tmp_path: Path) -> None:
    run = launch(tmp_path, 2, shards)
    records = chain(run)
    assert records[-1].step == 60 and audit(records).clean and len(set(reported(run))) == 1
    assert any((1, 1) in record.contributors for record in records)  # the restarted replica contributes again
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line["what"] == "step"} == set(range(1, 61))
    assert {5, 10, 60} <= {line["step"] for line in lines if line["what"] == "validation"}


def test_a_tied_parameter_is_one_of_the_parts_and_is_summed_where_it_is_trained() -> None:
    """By whatever name a part has it; a frozen one is left alone."""
    first, last = nn.Linear(4, 4), nn.ModuleDict({"head": nn.Linear(4, 4)})
    first.alias = first.weight
    tie = Tied("weight", 0, (0, 1))
    other = replace(tie, name="alias")
    assert trained_of([tie, other], {0: first}) == [(tie, "weight"), (other, "weight")]
    with pytest.raises(ConfigError, match="stages.tied=wte: is no parameter of this stage's parts; they have head.weight,"):
        trained_of([replace(tie, name="wte")], {1: last})
    first.weight.requires_grad_(False)
    assert trained_of([tie], {0: first}) == []
