"""Unmodified models over pipeline stages: batches of several lengths, weights, buffers that forwards change, autocast.

The stages of a test are threads, as in `test_captured`; what they are compared with is autograd on one process.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import helixrt
from helixrt.compile.kept_graphs import WITHIN, KeptGraphs
from helixrt.compile.microbatches import Batch
from helixrt.compile.whole_model import WholeModel
from helixrt.engines.captured import CapturedModel
from helixrt.engines.captured_engine import CapturedEngine
from helixrt.engines.registered import Registered
from helixrt.engines.staged import StagePlace
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from helixrt.passes.errors import CaptureError
from helixrt.passes.guards_private import Guards
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.record import FlightRecord
from tests.job.session_world import session_with
from tests.job.test_captured import (
    BATCH,
    CASES,
    LENGTH,
    MICROBATCHES,
    STEPS,
    VOCABULARY,
    WIDTH,
    Batches,
    Perceptron,
    StageHost,
    check_equal,
    cut_once,  # noqa: F401 a fixture for all tests here
    gpt2,
    llama,
    over_stages,
    perceptron,
    trained,
    vectors,
)

# ---------------------------------------------------------------- lengths


def sequences(lengths: Sequence[int]) -> Batches:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(BATCH, length, WIDTH, generator=generator, dtype=torch.float64) for length in lengths]
    return [((x,), {"scale": x.exp()}, x[..., :2]) for x in drawn]


def texts(lengths: Sequence[int]) -> Batches:
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randint(VOCABULARY, (BATCH, length), generator=generator) for length in lengths]
    return [((), {"input_ids": tokens, "labels": tokens}, None) for tokens in drawn]


def test_batches_of_several_lengths_train_as_a_plain_loop_does(run_stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CASES, "lengths", (perceptron, lambda: mse_loss, lambda: sequences((3, 2, 3))))
    check_equal("lengths", *over_stages(run_stages, 2, "lengths"))


def test_what_a_model_notes_when_it_is_captured_again_is_no_change(run_stages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of transformers note in a call that they have hooks now."""
    again = WholeModel.again

    def noting(whole: WholeModel, *given: Any) -> Any:
        whole.model.noted = given  # type: ignore[assignment]
        return again(whole, *given)

    monkeypatch.setattr(WholeModel, "again", noting)
    monkeypatch.setitem(CASES, "lengths", (perceptron, lambda: mse_loss, lambda: sequences((3, 2, 3))))
    check_equal("lengths", *over_stages(run_stages, 2, "lengths"))


@pytest.mark.slow
@pytest.mark.parametrize(("build", "stages", "schedule"), [(gpt2, 2, "zb"), (llama, 4, "1f1b"), (llama, 2, "dualpipev")])
def test_language_models_train_with_several_lengths(
    build: Any, stages: int, schedule: str, run_stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CASES, "lengths", (build, lambda: None, lambda: texts((LENGTH, 3, LENGTH))))
    check_equal("lengths", *over_stages(run_stages, stages, "lengths", schedule=schedule))


def batch_of(length: int) -> Batch:
    (args, named, target) = sequences((length,))[0]
    return Batch(args, named, target, MICROBATCHES)


def test_the_graphs_used_last_are_kept() -> None:
    kept: KeptGraphs[str] = KeptGraphs(2)
    made = []
    for length in (3, 2, 3, 2, 2, 4, 2, 5, 2, 4):  # 3 and then 4 were used longest ago
        key = tuple(batch_of(length).kinds().items())
        if kept.find(key) is None:
            kept.make_room("FILE:1")
            assert len(kept) < 2
            kept.keep(key, f"for {length}", None)
            made.append(length)
        assert kept.find(key) == f"for {length}"
    assert made == [3, 2, 4, 5, 4] and kept.dropped == 3


class Value:
    """Stands for guards: of one value."""

    in_model = False

    def __init__(self, now: list[int]) -> None:
        self.now, self.then = now, now[0]

    def changed(self) -> str:
        return "" if self.now[0] == self.then else "the value"


def test_a_value_has_graphs_of_its_own_and_is_refused_when_it_changes_too_often() -> None:
    kept: KeptGraphs[int] = KeptGraphs(8)
    now = [0]

    def graphs() -> int:
        found = kept.find("key")
        if found is None:
            kept.make_room("FILE:1")
            kept.keep("key", found := now[0], cast(Guards, Value(now)))
        return found

    for value in (0, 1, 0, 1, 2, 1, 0, 2):
        now[0] = value
        assert graphs() == value, "those of the value of now"
    assert len(kept) == 3
    now[0] = 3
    with pytest.raises(CaptureError, match="FILE:1.*the value is no tensor, and it has changed for the third time"):
        graphs()
    for _ in range(WITHIN):
        now[0] = 1
        graphs()
    now[0] = 3
    assert graphs() == 3, "a value that changes now and then is followed"


def test_strides_have_graphs_of_their_own() -> None:
    """Some operators take in a tensor as it lies."""
    x = torch.zeros(4, 6)
    kinds = [Batch((each,), {}, None, 2).kinds()["argument 0"] for each in (x, x.clone(), torch.zeros(6, 4).T)]
    assert kinds == ["torch.float32[2, 6]"] * 2 + ["torch.float32[2, 6] with strides [1, 4]"]


def test_with_one_kept_shape_graphs_are_made_again_and_the_result_is_the_same() -> None:
    def run(shapes: int) -> Any:
        return trained(StageHost(), perceptron(), mse_loss, sequences((3, 2, 3)), shapes=shapes)

    with pytest.warns(UserWarning, match="more than shapes=1 shapes"):
        few, figures = run(1)
    many, expected = run(8)
    assert figures == expected and all(torch.equal(few[name], many[name]) for name in many)


def test_stages_that_are_given_different_lengths_say_so(run_stages: Any) -> None:
    models = [perceptron(), perceptron()]

    def stage(number: int, group: Any) -> Any:
        batches = sequences((3, 2, 3) if number == 0 else (3, 3, 3))
        with pytest.raises(MisuseError, match=r"stage \d was given another batch than stage \d, with which .*weight is None"):
            trained(StageHost(number, 2, group), models[number], mse_loss, batches)
        return True

    assert run_stages(2, stage) == [True, True]


def test_a_model_that_uses_other_parameters_with_other_lengths_is_refused() -> None:
    class ByLength(Perceptron):
        def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x, scale) if x.shape[1] > 2 else self.head(x)

    with pytest.raises(MisuseError, match=r"other shapes than the example's \(.*\), layers\.0\.bias is not trained or changed"):
        trained(StageHost(), ByLength().double(), mse_loss, sequences((3, 2, 3)))


# ---------------------------------------------------------------- weights


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return mse_loss(output, target, reduction="sum")


WEIGHTS = (16.0, 7.0, 2.5)


def test_with_weights_the_sum_of_gradients_is_divided_by_the_sum_of_weights(run_stages: Any) -> None:
    models = [perceptron(), perceptron()]

    def stage(number: int, group: Any) -> Any:
        host = StageHost(number, 2, group)
        session = session_with(host, seed=5, mesh=Mesh(pp=2))
        (x,), named, target = vectors()[0]
        compiled = helixrt.compile(models[number], loss=summed, microbatches=MICROBATCHES)
        part = session.parallelize(compiled, example=helixrt.ExampleBatch(x, target=target, **named))
        session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1)])
        found = []
        for step in session.steps(vectors(), until=STEPS):
            for inputs, keywords, goal in step:
                weight = torch.tensor(WEIGHTS[step.number - 1]) if step.number == 2 else WEIGHTS[step.number - 1]
                loss = step.train(part, *inputs, target=goal, weight=weight, **keywords)
            done = step.commit()
            found.append((loss, float(done.loss), float(done.grad_norm)))
        validated = part.evaluate(x, target=target, weight=4.0, **named)
        return {name: value.clone() for name, value in part.state_dict().items()}, found, validated

    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for weight, ((x,), named, target) in zip(WEIGHTS, vectors(), strict=True):
        optimizer.zero_grad()
        loss = summed(model(x, **named), target) / weight
        loss.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        expected.append(
            (pytest.approx(loss.item(), rel=1e-12), pytest.approx(loss.item(), rel=1e-12), pytest.approx(float(norm)))
        )
        optimizer.step()
    (x,), named, target = vectors()[0]
    validated = summed(model(x, **named), target).item() / 4.0
    for state, found, told in run_stages(2, stage, timeout_s=240.0):
        assert found == expected and told == pytest.approx(validated, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=1e-12)


# ---------------------------------------------------------------- replicas, and buffers that a forward changes


class Normed(Perceptron):
    """Batch normalization in each layer, and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return super().forward(x, scale)


def normed() -> nn.Module:
    torch.manual_seed(3)
    return Normed().double()


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb", marks=pytest.mark.slow)])
def test_running_statistics_are_those_of_a_plain_loop(run_stages: Any, monkeypatch: pytest.MonkeyPatch, schedule: str) -> None:
    monkeypatch.setitem(CASES, "normed", (normed, lambda: mse_loss, vectors))
    found, hosts = over_stages(run_stages, 2, "normed", schedule=schedule, buffers={"seen": "mean"})
    check_equal("normed", found, hosts)
    assert sum("layers.0.1.running_mean" in state for state, _ in found) == 1


def test_running_statistics_of_dropped_work_do_not_count() -> None:
    calm, disturbed = (
        trained(StageHost(dropped=dropped), normed(), mse_loss, vectors(), buffers={"seen": "per_replica"})
        for dropped in (set(), {2, 3})
    )
    assert calm[1] == disturbed[1] and all(torch.equal(calm[0][name], disturbed[0][name]) for name in calm[0])


def replica_of(
    model: nn.Module, number: int, modes: Mapping[str, str] | None = None, **options: Any
) -> tuple[CapturedModel, CapturedEngine]:
    """One of two replicas, of one stage."""
    (x,), named, target = vectors()[0]
    step = helixrt.compile(model, loss=summed, microbatches=MICROBATCHES).train_step
    place = StagePlace(0, 1, None, FlightRecord(f"r{number}"))
    part = CapturedModel(step, helixrt.ExampleBatch(x, target=target, **named), place, seed=5)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    return part, part.engine(Registered.of(part, [optimizer], [], buffers=modes), replica=number, replicas=2, **options)


def exchanged(engines: Sequence[CapturedEngine], weights: Sequence[float], step: int) -> list[Any]:
    """One step of all replicas, of the first batches."""
    parts = []
    for engine, weight, ((x,), named, target) in zip(engines, weights, vectors(), strict=False):
        handed: list[int] = []
        engine.begin(handed.append)
        engine.seed(0)
        engine.train_batch(Batch((x,), named, target, MICROBATCHES), weight)
        engine.end()
        assert sorted(handed) == list(range(len(engine.buckets)))
        parts.append([bucket.clone() for bucket in engine.buckets])
    sums = [torch.stack(each).sum(0) for each in zip(*parts, strict=True)]
    contributors = tuple((number, 0) for number in range(len(engines)))
    record = CommitRecord(step, step, genesis("run", 2).hash, contributors, dict.fromkeys(range(len(engines)), step), "run")
    return [engine.apply(record, [each.clone() for each in sums]) for engine in engines]


@pytest.mark.parametrize("mode", ["mean", "first"])
def test_replicas_divide_by_all_weights_and_unite_their_buffers(mode: str) -> None:
    (first, one), (second, two) = (replica_of(normed(), number, {"seen": mode}, buffers=mode) for number in range(2))
    weights = (5.0, 11.0)
    updates = exchanged([one, two], weights, 1)

    plains = [normed(), normed()]
    sums = []
    for model, ((x,), named, target) in zip(plains, vectors(), strict=False):
        sums.append(0.0)
        for at in range(MICROBATCHES):
            rows = slice(at * BATCH // MICROBATCHES, (at + 1) * BATCH // MICROBATCHES)
            loss = summed(model(x[rows], named["scale"][rows]), target[rows])
            loss.backward()
            sums[-1] += loss.item()
    assert all(update.weight == 16.0 and float(update.loss) == pytest.approx(sum(sums) / 16.0) for update in updates)
    expected = copy.deepcopy(plains[0])
    for mine, a, b in zip(expected.parameters(), *(model.parameters() for model in plains), strict=True):
        with torch.no_grad():
            mine.sub_(0.1 * (a.grad + b.grad) / 16.0)
    buffers = [dict(model.named_buffers()) for model in plains]
    for name, value in expected.named_buffers():
        mean = (buffers[0][name] + buffers[1][name]) / 2
        value.copy_(buffers[0][name] if mode == "first" or not value.is_floating_point() else mean)
    for part in (first, second):
        for name, value in part.state_dict().items():
            torch.testing.assert_close(value, expected.state_dict()[name], rtol=0, atol=1e-12, msg=name)
    assert all(torch.equal(first.state_dict()[name], second.state_dict()[name]) for name in first.state_dict())


def test_a_captured_buffer_without_a_mode_is_refused_at_registration_and_an_unknown_name_is() -> None:
    with pytest.raises(MisuseError, match="buffer seen is changed outside the update.*buffers={'seen': MODE}"):
        replica_of(normed(), 0)
    with pytest.raises(MisuseError, match="buffers={'sen': 'mean'} names no buffer"):
        replica_of(normed(), 0, {"sen": "mean"})


def test_a_captured_buffer_per_replica_stays_apart() -> None:
    (first, one), (second, two) = (replica_of(normed(), number, {"seen": "per_replica"}) for number in range(2))
    second.seen.fill_(100.0)
    exchanged([one, two], (5.0, 11.0), 1)
    assert (first.seen.item(), second.seen.item()) == (MICROBATCHES, 100 + MICROBATCHES)
    assert "running_buffer/seen" not in one.state().tensors and "buffer/seen" not in one.state().tensors
    assert list(one.per_replica) == ["buffers['seen']"]


def test_a_buffer_per_replica_needs_ranks_with_streams_of_their_own() -> None:
    session = session_with(StageHost(), mesh=Mesh(pp=2))
    with pytest.raises(MisuseError, match='cannot be "per_replica" with pp, cp or tp above 1'):
        session.register(model=nn.BatchNorm1d(2), buffers={"running_mean": "per_replica"})


def test_a_total_weight_of_zero_changes_nothing() -> None:
    parts, engines = zip(*(replica_of(normed(), number, {"seen": "first"}) for number in range(2)), strict=True)
    assert exchanged(engines, (0.0, 0.0), 1) == [None, None]
    for part in parts:
        assert all(torch.equal(value, normed().state_dict()[name]) for name, value in part.state_dict().items())
    updates = exchanged(engines, (0.0, 3.0), 2)  # the first one's gradients are of the sum all the same
    assert [update.weight for update in updates] == [3.0, 3.0]


def test_a_weight_that_is_none_is_refused() -> None:
    part, engine = replica_of(perceptron(), 0)
    (x,), named, target = vectors()[0]
    engine.begin(lambda bucket: None)
    for weight, said in ((-1.0, "at least 0, not -1.0"), (torch.ones(2), r"not a tensor of shape \[2\]"), ("4", "not '4'")):
        with pytest.raises(MisuseError, match=said):
            part.train_batch((x,), named, target, weight)


# ---------------------------------------------------------------- autocast


def single() -> nn.Module:
    torch.manual_seed(3)
    return Perceptron()


def singles() -> Batches:
    return [((x.float(),), {"scale": named["scale"].float()}, target.float()) for (x,), named, target in vectors()]


def autocast_loop(model: nn.Module, loss: Any, batches: Batches, dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """The state after a plain loop with forward and loss under autocast to `dtype`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for args, named, target in batches:
        optimizer.zero_grad()
        for at in range(MICROBATCHES):
            rows = slice(at * BATCH // MICROBATCHES, (at + 1) * BATCH // MICROBATCHES)
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                output = model(*(x[rows] for x in args), **{name: x[rows] for name, x in named.items()})
                value = output.loss if loss is None else loss(output, target[rows])
            (value / MICROBATCHES).backward()
        optimizer.step()
    return model.state_dict()


def check_as_exact(found: dict[str, torch.Tensor], eager: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> None:
    """What was found is no further from float64 than eager autocast is."""

    def error(state: dict[str, torch.Tensor]) -> float:
        return sum(((state[name].double() - exact[name]) ** 2).sum().item() for name in found) ** 0.5

    assert found.keys() <= eager.keys()
    assert 0 < error(found) <= 1.05 * error(eager)


def test_under_the_sessions_bfloat16_stages_train_as_eager_autocast_does(run_stages: Any) -> None:
    models = [single(), single()]
    engines: dict[int, CapturedEngine] = {}

    def stage(number: int, group: Any) -> Any:
        host = StageHost(number, 2, group)
        session = session_with(host, seed=5, mesh=Mesh(pp=2), dtype="bfloat16")
        (x,), named, target = singles()[0]
        compiled = helixrt.compile(models[number], loss=mse_loss, microbatches=MICROBATCHES)
        part = session.parallelize(compiled, example=helixrt.ExampleBatch(x, target=target, **named))
        session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1)])
        for step in session.steps(singles(), until=STEPS):
            for inputs, keywords, goal in step:
                step.train(part, *inputs, target=goal, **keywords)
            step.commit()
        engines[number] = part.engine_in_use
        return {name: value.clone() for name, value in part.state_dict().items()}

    states = run_stages(2, stage, timeout_s=240.0)
    found = {name: value for state in states for name, value in state.items()}
    eager = autocast_loop(single(), mse_loss, singles(), torch.bfloat16)
    check_as_exact(found, eager, autocast_loop(single().double(), mse_loss, vectors(), None))
    begun = single().state_dict()
    for name, value in found.items():
        assert value.dtype is torch.float32
        changed = (eager[name] - begun[name]).abs().max()
        torch.testing.assert_close(value, eager[name], rtol=0, atol=float(changed) / 256, msg=name)
    weights = len(list(single().parameters()))
    assert sum(engine._casts.made for engine in engines.values()) == STEPS * weights  # not in each F, B and micro-batch
    assert sum(engine._casts.size_bytes for engine in engines.values()) == 2 * sum(p.numel() for p in single().parameters())


@pytest.mark.slow
@pytest.mark.parametrize("build", [gpt2, llama])
def test_language_models_under_autocast_are_no_further_from_float64_than_eager(build: Any, run_stages: Any) -> None:
    models = [build().float() for _ in range(2)]

    def stage(number: int, group: Any) -> Any:
        session = session_with(StageHost(number, 2, group), seed=5, mesh=Mesh(pp=2))
        _, named, _ = texts((LENGTH,))[0]
        compiled = helixrt.compile(models[number], microbatches=MICROBATCHES, autocast=torch.bfloat16)
        part = session.parallelize(compiled, example=helixrt.ExampleBatch(**named))
        session.register(model=part, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1)])
        for step in session.steps(texts((LENGTH,) * STEPS), until=STEPS):
            for _, keywords, _ in step:
                step.train(part, **keywords)
            step.commit()
        return {name: value.clone() for name, value in part.state_dict().items()}

    found = {name: value for state in run_stages(2, stage, timeout_s=240.0) for name, value in state.items()}
    batches = texts((LENGTH,) * STEPS)
    eager = autocast_loop(build().float(), None, batches, torch.bfloat16)
    check_as_exact(found, eager, autocast_loop(build().double(), None, batches, None))


def captured_single(autocast: torch.dtype | None = None) -> CapturedModel:
    (x,), named, target = singles()[0]
    model = helixrt.compile(single(), loss=mse_loss, microbatches=MICROBATCHES)
    place = StagePlace(0, 1, None, FlightRecord("pp"))
    part = CapturedModel(model.train_step, helixrt.ExampleBatch(x, target=target, **named), place, autocast=autocast)
    part.engine(Registered.of(part, [torch.optim.SGD(part.parameters(), lr=0.1)], []))
    return part


def test_autocast_around_parallelize_is_taken_over_and_another_one_later_is_refused() -> None:
    (x,), named, target = singles()[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        part = captured_single()
        within = part.evaluate(x, target=target, **named)
    plainly = captured_single()
    assert part.evaluate(x, target=target, **named) == within != plainly.evaluate(x, target=target, **named)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.raises(
            MisuseError, match=r"autocast to torch\.bfloat16 is active around a model that runs without autocast"
        ):
            plainly.evaluate(x, target=target, **named)
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.raises(ConfigError, match="autocast=.*others need a gradient scaler"),
    ):
        captured_single()


def test_a_state_that_is_loaded_is_cast_anew() -> None:
    (x,), named, target = singles()[0]
    part = captured_single(torch.bfloat16)
    before = part.evaluate(x, target=target, **named)
    engine = part.engine_in_use
    state = engine.state()
    for name, tensor in state.tensors.items():
        state.tensors[name] = tensor.clone() * (0.5 if name.startswith("parameter/") else 1)
    engine.load(state)
    halved = single()
    with torch.no_grad():
        for parameter in halved.parameters():
            parameter.mul_(0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        rows = [slice(at, at + BATCH // MICROBATCHES) for at in range(0, BATCH, BATCH // MICROBATCHES)]
        losses = [mse_loss(halved(x[each], named["scale"][each]), target[each]).item() for each in rows]
    assert part.evaluate(x, target=target, **named) == pytest.approx(sum(losses) / MICROBATCHES, rel=1e-5) != before


def test_weights_that_an_evaluation_swaps_in_and_out_again_are_gone_afterwards() -> None:
    """Through `.data`, as averages of weights are evaluated: no version counts that, so no cast may outlive a pass."""
    (x,), named, target = singles()[0]
    part, untouched = captured_single(torch.bfloat16), captured_single(torch.bfloat16)
    trained = []
    for each in (part, untouched):
        before = each.evaluate(x, target=target, **named)
        if each is part:
            kept = [parameter.detach().clone() for parameter in part.parameters()]
            for parameter in part.parameters():
                parameter.data.mul_(0.5)
            assert part.evaluate(x, target=target, **named) != before
            for parameter, was in zip(part.parameters(), kept, strict=True):
                parameter.data.copy_(was)
            assert part.evaluate(x, target=target, **named) == before
        engine = each.engine_in_use
        engine.begin(lambda bucket: None)
        loss = each.train_batch((x,), named, target)
        engine.end()
        trained.append((before, loss, [bucket.clone() for bucket in engine.buckets]))
    assert trained[0][:2] == trained[1][:2]
    assert all(torch.equal(a, b) for a, b in zip(trained[0][2], trained[1][2], strict=True))
