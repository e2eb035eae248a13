"""Parameters that stages have copies of: found in their chunks, equal at the start, trained as one; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from helixrt.engines.staged import Stages
from helixrt.engines.ties import StageTies, Tied, check_equal, ties_of
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from tests.job.session_world import session_with
from tests.job.test_staged import StageHost

WIDTH, BATCH, MICROBATCHES = 4, 8, 4
LINEAR = (0, 1, 2, 3)  # the stage of each chunk


def test_a_name_is_that_of_the_first_and_the_last_chunk() -> None:
    assert ties_of("", LINEAR) == [] and ties_of("weight", (0,)) == []
    assert ties_of("weight", LINEAR) == [Tied("weight", 0, (0, 3), (0, 3))]
    assert ties_of("weight", (0, 1, 1, 0)) == [], "both are on stage 0"
    assert ties_of({"b": (2, 0), "a": (1, 3, 2)}, (0, 1, 0, 1)) == [Tied("a", 0, (1, 2, 3), (1, 0))]


def test_the_parameter_is_that_of_the_chunk_that_is_tied() -> None:
    """Other chunks of the stage may have one of the same name. By whatever name a chunk has it; a frozen one is left alone."""
    (tie,) = ties_of("weight", (0, 1, 0, 1))
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    (found,) = StageTies([tie], {1: first, 3: last}).trained
    assert found[0] == tie and found[1] is last.weight
    aliased = nn.Linear(4, 4)
    aliased.alias = aliased.weight
    (alias,) = ties_of("alias", (0, 1, 0, 1))
    assert StageTies([alias], {1: first, 3: aliased}).trained[0][1] is aliased.weight
    with pytest.raises(ConfigError, match="stages.tied=wte: is no parameter of part 3; it has weight, bias"):
        StageTies(ties_of("wte", (0, 1, 0, 1)), {1: first, 3: last})
    last.weight.requires_grad_(False)
    ties = StageTies([tie], {1: first, 3: last})
    assert ties.trained == [] and ties.copies(1) == {id(last.weight)} and ties.copies(0) == set()


def test_copies_that_differ_in_anything_are_told_apart() -> None:
    (tie,) = ties_of("weight", (0, 1))
    torch.manual_seed(1)
    linear = nn.Linear(4, 4)

    def number(change: Any) -> float:
        copy = nn.Linear(4, 4)
        copy.load_state_dict(linear.state_dict())
        return StageTies([tie], {0: change(copy) or copy}).number(tie)

    def changed(copy: nn.Linear) -> None:
        with torch.no_grad():
            copy.weight[3, 3] += 1e-6

    same = number(lambda copy: None)
    assert same == number(lambda copy: None) == StageTies([tie], {1: linear}).number(tie) and same == int(same)
    changes = (changed, lambda copy: copy.requires_grad_(False) and None, lambda copy: copy.double())
    assert len({same, *(number(change) for change in changes)}) == 4
    check_equal(tie, [same, same])
    with pytest.raises(MisuseError, match="the copies of weight, which is tied, differ between stage 0 and stage 1"):
        check_equal(tie, [same, same + 1])


# ---------------------------------------------------------------- trained


class Chain(nn.Module):
    """Four layers, of which the first and the last have one weight; all weights are called alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for parameter in self.layers.parameters():
            nn.init.normal_(parameter, std=0.5, generator=generator)
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Part(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight, self.bias))


class Aliased(Part):
    """The tied weight has another name before the one that it is tied by."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.head, self.bias = layer.weight, layer.bias
        self.weight = self.head


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [(x, x.flip(1)) for x in (torch.randn(BATCH, WIDTH, generator=generator) for _ in range(3))]


def staged(modules: Any, **others: Any) -> Stages:
    example = torch.zeros(BATCH // MICROBATCHES, WIDTH)
    settings = {"schedule": "interleaved", "graphs": "never", "tied": "weight", **others}
    return Stages(modules, mse_loss, (example, example), example, MICROBATCHES, **settings)


def trained(number: int, group: Any, modules: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Of one of two stages: the norm of each step, and its parameters by their names in the session's state."""
    session = session_with(StageHost(number, 2, group), seed=5, mesh=Mesh(pp=2))
    model = session.parallelize(staged(modules))
    session.register(model=model, optimizers=[torch.optim.AdamW(model.parameters(), lr=0.05)], clip_norm=0.3)
    norms = []
    for step in session.steps(batches(), until=3):
        for x, y in step:
            step.train(model, x, target=y)
        norms.append(float(step.commit().grad_norm))
    return norms, {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("last", [Part, Aliased])
def test_chunks_with_equal_names_train_as_the_whole_model_does(last: Any, run_stages: Any) -> None:
    """Two chunks on each of two stages: what is tied is the weight of the first and the last one, and no other."""

    def stage(number: int, group: Any) -> Any:
        layers = Chain().layers
        return trained(number, group, {n: (last if n == 3 else Part)(layers[n]) for n in (number, number + 2)})

    (norms, first), (others, second) = run_stages(2, stage)
    model, expected = Chain(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        expected.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
    assert norms == others == pytest.approx(expected, rel=1e-5)
    found = first | second
    for number, layer in enumerate(model.layers):
        for name in ("weight", "bias"):
            torch.testing.assert_close(found[f"chunk{number}.{name}"], getattr(layer, name).detach())
    assert torch.equal(found["chunk0.weight"], found["chunk3.weight"])


def test_every_parameter_is_in_a_checkpoint_once(run_stages: Any) -> None:
    def stage(number: int, group: Any) -> set[str]:
        layers = Chain().layers
        session = session_with(StageHost(number, 2, group), mesh=Mesh(pp=2))
        model = session.parallelize(staged({n: Part(layers[n]) for n in (number, number + 2)}))
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        steps = session.steps(batches(), until=1)
        next(steps)
        return {each.name for each in session._registered().portions().values() if each.writes}

    first, second = run_stages(2, stage)
    names = {f"model/chunk{number}.{name}" for number in range(4) for name in ("weight", "bias")} - {"model/chunk3.weight"}
    assert first | second == names and not first & second


# ---------------------------------------------------------------- refused


def test_copies_that_begin_otherwise_are_refused(run_stages: Any) -> None:
    def stage(number: int, group: Any) -> str:
        torch.manual_seed(number)
        with pytest.raises(MisuseError) as caught:
            trained(number, group, {n: nn.Linear(WIDTH, WIDTH) for n in (number, number + 2)})
        return str(caught.value)

    rule = "the copies of weight, which is tied, differ between stage 0 and stage 1"
    assert all(rule in text for text in run_stages(2, stage))


def test_a_copy_that_one_stage_freezes_is_refused(run_stages: Any) -> None:
    def stage(number: int, group: Any) -> None:
        layers = Chain().layers
        parts = {n: Part(layers[n]) for n in (number, number + 2)}
        if number:
            parts[3].weight.requires_grad_(False)
        with pytest.raises(MisuseError, match="be trained or all be frozen"):
            trained(number, group, parts)

    run_stages(2, stage)


def test_a_shared_parameter_that_is_not_tied_is_refused() -> None:
    layers = Chain().layers
    parts = [Part(layer) for layer in layers]
    with pytest.raises(ConfigError, match="stages.tied=not given: weight of part 3 is weight of part 0, which is on another"):
        session_with(StageHost(0, 2), mesh=Mesh(pp=2)).parallelize(staged(parts, tied=""))
    session_with(StageHost(0, 2), mesh=Mesh(pp=2)).parallelize(staged(parts))
    parts[1].weight = parts[0].weight
    with pytest.raises(ConfigError, match="stages.tied=weight: weight of part 1 is weight of part 0"):
        session_with(StageHost(0, 2), mesh=Mesh(pp=2)).parallelize(staged(parts))
