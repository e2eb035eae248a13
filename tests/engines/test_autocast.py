"""Autocast of the user's loop and of the engine: an update has none around it, and neither outlasts its end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagedModel, StagePlace, Stages
from helixrt.errors import MisuseError
from helixrt.record import FlightRecord
from helixrt.replica.contracts import Engine

Update = Callable[[nn.Module, torch.optim.Optimizer], Callable[[Any], None] | None]


def bfloat16() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def default(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    return None


def orthogonal(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    """An update with products of matrices, of the kind that Muon has."""

    def update(record: Any) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.dim() == 2:
                parameter.grad.sub_(0.1 * parameter.grad @ parameter.grad.T @ parameter.grad)
        optimizer.step()

    return update


def module_engine(loops: Any, update: Update, **options: Any) -> tuple[nn.Module, ModuleEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    function = update(model, optimizer)
    engine = ModuleEngine(Registered.of(model, [optimizer], clip_norm=0.5 if function is None else None), **options)
    if function is not None:
        engine.set_update(function)
    return model, engine


def worked(model: nn.Module, engine: ModuleEngine, step: int) -> None:
    engine.begin(lambda bucket: None)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
    engine.backward((model(x).float() - x).square().sum(), len(x), last=True)
    engine.end()


@pytest.mark.parametrize("update", [default, orthogonal])
def test_a_replica_that_replays_has_the_bits_of_one_that_commits_under_autocast(loops: Any, update: Update) -> None:
    (model, worker), (_, follower) = (module_engine(loops, update) for _ in range(2))
    for step in (1, 2, 3):
        with bfloat16():
            worked(model, worker, step)
            sums = loops.summed([worker])
            worker.apply(loops.record(step), sums)
            assert torch.is_autocast_enabled("cpu"), "the user's is on again"
        follower.apply(loops.record(step), sums)
        assert loops.same(worker.state(), follower.state()), step


def test_a_stage_updates_without_autocast(loops: Any) -> None:
    engines: list[Engine] = []
    for under in (bfloat16, nullcontext):
        torch.manual_seed(0)
        x = torch.randn(4, 8)
        part, boundary = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.zeros(2, 8)
        stages = Stages([part], nn.functional.mse_loss, (boundary, boundary), boundary, microbatches=2, graphs="never")
        model = StagedModel(stages, StagePlace(0, 1, None, FlightRecord("pp0")))
        engine = model.engine(Registered.of(model, [torch.optim.Adafactor(model.parameters(), lr=1e-2)], clip_norm=0.5))
        for step in (1, 2, 3):
            engine.begin(lambda bucket: None)
            model.train_batch((x,), {}, x.flip(1))
            engine.end()
            with under():
                engine.apply(loops.record(step), [bucket.clone() for bucket in engine.buckets])
        engines.append(engine)
    assert loops.same(engines[0].state(), engines[1].state())


def test_a_forward_after_an_update_uses_no_weights_that_were_cast_before_it(loops: Any) -> None:
    """Autocast keeps casts of weights to its end, which here comes after all steps."""
    model, engine = module_engine(loops, default)
    x = torch.ones(2, 8)
    with bfloat16():
        for step in (1, 2):
            worked(model, engine, step)
            engine.apply(loops.record(step), loops.summed([engine]))
            found = model(x)
            torch.clear_autocast_cache()
            assert torch.equal(found, model(x)), step


@pytest.mark.parametrize("around", [bfloat16, nullcontext])
def test_autocast_of_the_loop_within_a_forward_or_around_the_steps_agrees_with_that_of_the_engine(
    loops: Any, around: Callable[[], AbstractContextManager[Any]]
) -> None:
    model, engine = module_engine(loops, default, compute_dtype=torch.bfloat16)
    plain_model, plain = module_engine(loops, default, compute_dtype=torch.bfloat16)
    for step in (1, 2):
        with around():
            before = torch.is_autocast_enabled("cpu")
            engine.begin(lambda bucket: None)
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(step))
            with bfloat16():
                loss = (model(x).float() - x).square().sum()
                engine.backward(loss, len(x), last=True)
            engine.end()
            assert torch.is_autocast_enabled("cpu") == before
            engine.apply(loops.record(step), loops.summed([engine]))
            assert torch.is_autocast_enabled("cpu") == before
        assert not torch.is_autocast_enabled("cpu")
        worked(plain_model, plain, step)
        plain.apply(loops.record(step), loops.summed([plain]))
        assert loops.same(engine.state(), plain.state())


def test_a_commit_within_autocast_that_began_in_the_step_is_refused_where_the_engine_has_its_own(loops: Any) -> None:
    """Else autocast would stay on: each context brings back what was there when it began."""
    model, engine = module_engine(loops, default, compute_dtype=torch.bfloat16)
    engine.begin(lambda bucket: None)
    with pytest.raises(MisuseError, match=r"that of the session \(dtype='bfloat16'\) overlap"), bfloat16():
        engine.backward(model(torch.ones(2, 8)).sum(), last=True)
        engine.end()
    engine.close()
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_that_began_before_the_step_and_ended_in_it_is_refused_where_the_engine_has_its_own(loops: Any) -> None:
    model, engine = module_engine(loops, default, compute_dtype=torch.bfloat16)
    with bfloat16():
        engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(2, 8)).sum(), last=True)
    with pytest.raises(MisuseError, match="overlap"):
        engine.end()
    engine.close()
    assert not torch.is_autocast_enabled("cpu")


def test_an_update_after_a_dropped_batch_leaves_no_autocast_behind(loops: Any) -> None:
    model, engine = module_engine(loops, default, compute_dtype=torch.bfloat16)
    worked(model, engine, 1)
    sums = loops.summed([engine])
    engine.begin(lambda bucket: None)  # and another base is agreed
    engine.apply(loops.record(1), sums)
    assert not torch.is_autocast_enabled("cpu")
