"""A user's loop on the session: what it trains, what it may do, and the error of each wrong script."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helixrt.engines.random_state import set_random_state
from helixrt.errors import ConfigError
from helixrt.job.idle_steps import IdleSteps
from helixrt.job.mesh import Mesh
from helixrt.job.session import Session
from tests.engines.schedule_free import ScheduleFree
from tests.job.session_world import DrawingLoader, LocalHost, batches, ready, session_with, summed, tiny, worked

Parameters = list[torch.Tensor]


def trained(
    host: LocalHost,
    until: int,
    accumulate: int,
    update: bool = False,
    loader: Any = None,
    skips: Collection[int] = (),
) -> Parameters:
    session = session_with(host, seed=5)
    model = session.parallelize(tiny())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], clip_norm=None if update else 0.5)
    if update:

        @session.update
        def sign(record: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.01 * parameter.grad.sign())

    for step in session.steps(loader or batches(), until=until, accumulate=accumulate):
        for x, y in step:
            loss = summed(model, x, y)
            if step.batch in skips:
                step.skip()
                continue
            step.backward(loss, weight=y.numel())
        done = step.commit()
        session.log({"loss": done.loss, "norm": done.grad_norm, "replicas": len(done.contributors)})
    return [p.detach().clone() for p in model.parameters()]


def plain_loop(until: int, accumulate: int, skips: Collection[int] = ()) -> tuple[Parameters, list[float]]:
    """The same in plain PyTorch."""
    model, losses, position = tiny(), [], 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = batches()
    usable = len(data) // accumulate * accumulate
    for _ in range(until):
        optimizer.zero_grad()
        total, weight = 0.0, 0
        for _ in range(accumulate):
            set_random_state(5, 0, 0, position)
            x, y = data[position % usable]
            position += 1
            if position - 1 in skips:
                continue
            loss = summed(model, x, y)
            loss.backward()
            total, weight = total + loss.detach().double(), weight + y.numel()
        if not weight:
            continue
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(weight)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(total / weight))
    return [p.detach().clone() for p in model.parameters()], losses


def test_what_reading_draws_does_not_reach_training() -> None:
    found, expected = trained(LocalHost(), 8, 2, loader=DrawingLoader()), trained(LocalHost(), 8, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # with dropout


@pytest.mark.parametrize("accumulate", [1, 4, 5])
def test_the_loop_trains_as_a_plain_one_does(accumulate: int) -> None:
    host = LocalHost()
    found, (expected, losses) = trained(host, 8, accumulate), plain_loop(8, accumulate)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [step for step, _ in host.logged] == list(range(1, 9))
    assert [v["loss"] for _, v in host.logged] == losses and host.logged[0][1]["replicas"] == 1
    assert all(v["norm"] > 0 for _, v in host.logged)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_micro_batch_that_is_skipped_counts_nothing(accumulate: int) -> None:
    skips = {1, 4, 5, 6}
    found, (expected, _) = trained(LocalHost(), 8, accumulate, skips=skips), plain_loop(8, accumulate, skips)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_dropped_work_is_done_again_with_the_same_batches_and_numbers() -> None:
    disturbed, calm = LocalHost(dropped={1, 4, 5, 6}), LocalHost()
    found, expected = trained(disturbed, 6, 2), trained(calm, 6, 2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert disturbed.worker is not None and disturbed.worker.positions == [0, 0, 2, 4, 4, 4, 4, 6, 8, 10]
    assert disturbed.logged == calm.logged  # nothing of a dropped step


def test_a_record_that_is_not_applied_changes_nothing_and_has_no_figures() -> None:
    host = LocalHost(applied=lambda step: step != 2)
    session, model = ready(host)
    seen = []
    for step in session.steps(batches(), until=3):
        before = [p.detach().clone() for p in model.parameters()]
        for x, y in step:
            step.backward(summed(model, x, y))
        done = step.commit()
        seen.append((done.committed, done.applied, done.contributors, math.isnan(float(done.loss))))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)) == (done.step == 2)
    assert seen == [(True, True, (0,), False), (True, False, (), True), (True, True, (0,), False)]


def test_a_registered_update_runs_in_place_of_the_default() -> None:
    model = tiny()
    after = trained(LocalHost(), 1, 1, update=True)
    moved = [(a - b.detach()).abs() for a, b in zip(after, model.parameters(), strict=True)]
    assert all(torch.allclose(m[m > 0], torch.full_like(m[m > 0], 0.01), atol=1e-6) for m in moved)


@pytest.mark.parametrize("case", ["no weight", "no change", "a change through data", "a rate of 0"])
def test_steps_that_train_nothing_are_told_once(case: str) -> None:
    host = LocalHost()
    session = session_with(host)
    model = session.parallelize(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if case == "a rate of 0" else 0.1)
    session.register(model=model, optimizers=optimizer)
    if "change" in case:

        @session.update
        def update(record: Any) -> None:
            for parameter in model.parameters() if "data" in case else ():
                parameter.data.mul_(0.5)

    for step in session.steps(batches(), until=5):
        for x, y in step:
            step.backward(summed(model, x, y), weight=0 if case == "no weight" else 1)
        step.commit()
    said = {
        "no weight": ["step 1: every micro-batch has weight 0 or was skipped, so nothing is updated"],
        "no change": ["the first 3 updates changed no parameter; does the update function step the optimizer?"],
    }
    assert host.said == said.get(case, [])


def test_of_an_engine_that_updates_its_own_parameters_nothing_is_told() -> None:
    said: list[str] = []
    idle = IdleSteps((), said.append)
    record = SimpleNamespace(step=1, applied=True, contributors=((0, 0),))
    for applied in (True, True, True, True, False):
        step: Any = SimpleNamespace(done=SimpleNamespace(applied=applied), timing=SimpleNamespace(record=record))
        idle.after(step)
    assert said == []


def test_evaluation_runs_at_its_steps_without_gradients_and_leaves_random_numbers() -> None:
    host = LocalHost()
    session, model = ready(host)

    def measure() -> dict[str, Any]:
        assert not torch.is_grad_enabled()
        torch.rand(3)
        return {"loss": summed(model, *batches()[0])}

    session.evaluate(measure, every=2)
    for step in worked(session, model, until=5):
        step.commit()
    assert [step for step, _ in host.validated] == [2, 4] and host.validated[0][1]["loss"] > 0


@pytest.mark.parametrize(("processes", "replicas", "said"), [(1, 2, 1), (2, 2, 0), (1, 1, 0)])
def test_an_accelerator_that_knows_one_process_is_named(
    processes: int, replicas: int, said: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = SimpleNamespace(is_initialized=lambda: True, PartialState=lambda: SimpleNamespace(num_processes=processes))
    monkeypatch.setitem(sys.modules, "accelerate.state", state)  # type: ignore[arg-type]
    host = LocalHost()
    session, model = ready(host, replicas=replicas)
    for step in worked(session, model, until=1):
        step.commit()
    assert sum("accelerate knows one process here" in line for line in host.said) == said


def test_an_evaluation_leaves_neither_mode_nor_running_statistics_behind() -> None:
    """It runs on one replica alone: whatever it leaves, that replica would train, or end, otherwise than the others."""

    def run(evaluation: bool) -> tuple[dict[str, torch.Tensor], list[bool]]:
        session = session_with(LocalHost())
        torch.manual_seed(3)
        linear, norm, drop = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.5)
        model = torch.nn.Sequential(linear, norm, drop, torch.nn.Linear(6, 1))
        model[0].eval()  # a part that the user keeps in this mode
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])

        def measure() -> float:
            for x, _ in batches():
                model(10 * x)  # in training mode: statistics change
            model.eval()
            return 0.0

        if evaluation:
            session.evaluate(measure, every=2)
        for step in worked(session, model, until=4):  # the last update is evaluated, too
            step.commit()
        return {name: value.clone() for name, value in model.state_dict().items()}, [m.training for m in model.modules()]

    (found, modes), (expected, wanted) = run(True), run(False)
    assert modes == wanted == [True, False, True, True, True]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_a_step_freezes_has_neither_gradient_nor_state_in_it() -> None:
    def built() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = tiny()
        return model, torch.optim.AdamW([{"params": part.parameters()} for part in (model[0], model[2])], lr=0.05)

    def frozen(model: torch.nn.Module, step: int) -> list[Any]:
        return [model[0]] if step < 3 else [model[2].bias] if step == 4 else []

    session, (model, optimizer) = session_with(LocalHost(dropped={2, 5}), seed=5), built()
    session.register(model=model, optimizers=[optimizer])
    session.freeze(lambda step: frozen(model, step))
    for step in worked(session, model, until=6):
        assert (model[0].weight.grad is None) == (step.number < 3) and (model[2].bias.grad is None) == (step.number == 4)
        step.commit()
        assert (model[0].weight in optimizer.state) == (session.committed and step.number > 2 or step.number > 3)
    plain, updates = built()
    for position, (x, y) in enumerate(batches()[:6]):
        plain.requires_grad_(True)
        for thing in frozen(plain, position + 1):
            thing.requires_grad_(False)
        set_random_state(5, 0, 0, position)
        updates.zero_grad()
        summed(plain, x, y).backward()
        updates.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_averaged_weights_are_evaluated_and_the_trained_ones_put_back_bit_for_bit() -> None:
    def run(every: int) -> tuple[LocalHost, Parameters, Parameters]:
        session, model = session_with(host := LocalHost(), seed=5), tiny()
        optimizer = ScheduleFree(model.parameters())
        session.register(model=model, optimizers=[optimizer])

        def measure() -> float:
            optimizer.eval()  # allowed, and done
            assert not model.eval()[1].training
            value = summed(model, *batches()[0])
            optimizer.train()
            return value

        session.evaluate(measure, every=every)
        for step in worked(session, model, until=4):
            step.commit()
        trained = [p.detach().clone() for p in model.parameters()]
        optimizer.eval()
        return host, trained, [p.detach().clone() for p in model.parameters()]

    (host, found, averaged), (_, expected, _) = run(1), run(9)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(found, averaged, strict=True))
    model = tiny().eval()
    model.load_state_dict(dict(zip(model.state_dict(), averaged, strict=True)))
    assert [step for step, _ in host.validated] == [1, 2, 3, 4]
    assert host.validated[-1][1]["value"] == summed(model, *batches()[0]).item()


def test_epochs_follow_each_other_and_are_told_to_the_sampler() -> None:
    host = LocalHost()
    session, model = ready(host)
    data = torch.utils.data.TensorDataset(torch.arange(8.0).repeat(4, 1).T.contiguous())
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=session.sampler(data, shuffle=True))
    seen = []
    for step in session.steps(loader, until=8):
        for (x,) in step:
            seen += x[:, 0].tolist()
            step.backward(model(x).sum())
        step.commit()
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8)) and seen[:8] != seen[8:]


def test_busy_is_a_context() -> None:
    with session_with(LocalHost()).busy("writing", 10.0):
        pass
    with pytest.raises(ConfigError, match="limit_s=0: must be above 0"):
        session_with(LocalHost()).busy("writing", 0)


# ---------------------------------------------------------------- what is refused


def test_a_mesh_inside_a_replica_is_refused_by_name() -> None:
    session = session_with(LocalHost(), mesh=Mesh(cp=2))
    with pytest.raises(ConfigError, match=r"mesh.cp=2: needs helixrt.Stages or, for transformers models"):
        session.parallelize(tiny())
    with pytest.raises(ConfigError, match="mesh.cp=2"):
        session.register(model=tiny())


def test_each_rank_of_each_replica_has_a_stream_of_its_own() -> None:
    data, replicas, ranks = range(50), 3, 2
    mesh, host = Mesh(dp_shard=ranks), LocalHost()
    dealt: list[int] = []
    for number in range(replicas * ranks):
        session = session_with(host, mesh=mesh, replicas=replicas, replica=number // ranks, shard=number % ranks)
        assert (session.stream, session.streams, session.shard) == (number, replicas * ranks, number % ranks)
        dealt += session.sampler(data, shuffle=True).order().tolist()
    assert len(dealt) == len(set(dealt)) == 48


@pytest.mark.parametrize(
    ("settings", "rule"),
    [({"device": "tpu"}, "device=tpu"), ({"dtype": "float16"}, "dtype=float16"), ({"device": "cuda"}, "cuda")],
)
def test_wrong_settings_are_refused(settings: dict[str, str], rule: str) -> None:
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    from helixrt.job.session_host import SessionSettings

    with pytest.raises(ConfigError, match=rule):
        Session(SessionSettings(**settings), LocalHost())


def test_leaving_the_loop_early_is_seen() -> None:
    session, model = ready()
    for step in worked(session, model, until=5):
        step.commit()
        break
    assert session.left_early
