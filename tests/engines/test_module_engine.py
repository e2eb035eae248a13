"""The module engine against a plain PyTorch loop: one replica, several, replay, and the state of one in another."""

from __future__ import annotations

import json
import math
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.engines.update import ModuleUpdate, Policy
from helixrt.protocol.step.lineage import Exclusion
from helixrt.replica.contracts import State, layout_of
from helixrt.replica.manifest import Manifest

STEPS = 6


def test_one_replica_is_bitwise_the_plain_loop(case: Any, loops: Any) -> None:
    plain, mine = loops.parts(case), loops.Replica(case)
    for step in range(1, STEPS + 1):
        loss = loops.plain_step(plain, step)
        result = mine.work(step)
        update = mine.engine.apply(loops.record(step), loops.summed([mine.engine]))
        assert float(update.loss) == pytest.approx(loss, rel=1e-12) and float(result.loss) == float(update.loss)
        check_equal(loops, mine.parts, plain, step)


def check_equal(loops: Any, mine: Any, plain: Any, step: int) -> None:
    ours, theirs = mine.model.state_dict(), plain.model.state_dict()
    assert all(loops.equal_bits(ours[name], theirs[name]) for name in theirs), f"parameters or buffers differ after step {step}"
    for one, other in zip(mine.optimizers, plain.optimizers, strict=True):
        a, b = one.state_dict(), other.state_dict()
        assert repr(a["param_groups"]) == repr(b["param_groups"]) and a["state"].keys() == b["state"].keys()
        for number, entries in b["state"].items():
            assert all(same_entry(loops, value, a["state"][number][key]) for key, value in entries.items()), (step, number)
    for one, other in zip(mine.schedulers, plain.schedulers, strict=True):
        assert repr(one.state_dict()) == repr(other.state_dict())
    ours, theirs = mine.ema.state_dict(), plain.ema.state_dict()
    assert all(loops.equal_bits(ours[name], theirs[name]) for name in theirs), f"the EMA differs after step {step}"


def same_entry(loops: Any, a: Any, b: Any) -> bool:
    return loops.equal_bits(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.grid
@pytest.mark.parametrize("contributors", [(0, 1), (0, 1, 2), (0, 2)])
def test_several_replicas_train_as_one_loop_over_the_union_of_their_batches(
    case: Any, loops: Any, contributors: tuple[int, ...]
) -> None:
    """The sum of a replica's micro-batches is rounded before it is added to another's, which the plain loop does as well."""
    plain = loops.parts(case)
    replicas = [loops.Replica(case, replica, 3) for replica in range(3)]
    for step in range(1, 5):
        loss = loops.plain_step(plain, step, contributors)
        for replica in contributors:
            replicas[replica].work(step)
        sums = loops.summed([replicas[r].engine for r in contributors])
        kept = [each.clone() for each in sums]
        for replica in replicas:  # the one that did not contribute replays
            update = replica.engine.apply(loops.record(step, contributors), sums)
            assert float(update.loss) == pytest.approx(loss, rel=1e-12)
        assert all(loops.equal_bits(a, b) for a, b in zip(sums, kept, strict=True)), "the sums serve for repair, unchanged"
        for replica in replicas:
            check_equal(loops, replica.parts, plain, step)
            assert loops.same(replica.engine.state(), replicas[0].engine.state())


def test_a_state_in_an_engine_that_has_none_trains_on_bit_for_bit(case: Any, loops: Any) -> None:
    """Optimizers have no state before their first step; the one that loads never steps to make some."""
    first, second = loops.Replica(case), loops.Replica(case, seed=2)
    for step in range(1, 4):
        first.work(step)
        first.engine.apply(loops.record(step), loops.summed([first.engine]))
    state = loops.copy_of(first.engine.state())
    scalars = json.loads(json.dumps(state.scalars, sort_keys=True))  # as they travel
    second.engine.load(State(state.tensors, scalars))
    assert loops.same(second.engine.state(), state)
    for step in range(4, 8):
        results = []
        for replica in (first, second):
            replica.work(step)
            sums = loops.summed([replica.engine])
            results.append((sums, replica.engine.apply(loops.record(step), sums)))
        assert all(loops.equal_bits(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
        assert loops.same(first.engine.state(), second.engine.state()), step


def test_loading_goes_back_to_a_state_before_the_first_step(case: Any, loops: Any) -> None:
    one, other = loops.Replica(case), loops.Replica(case)
    initial = loops.copy_of(one.engine.state())
    one.work(1)
    one.engine.apply(loops.record(1), loops.summed([one.engine]))
    one.engine.load(initial)
    assert loops.same(one.engine.state(), initial)
    for step in (1, 2):
        for replica in (one, other):
            replica.work(step)
            replica.engine.apply(loops.record(step), loops.summed([replica.engine]))
        assert loops.same(one.engine.state(), other.engine.state())


def test_records_and_sums_alone_give_the_same_state_in_an_engine_that_never_computes(case: Any, loops: Any) -> None:
    worker, follower = loops.Replica(case), loops.Replica(case, seed=9)
    follower.engine.load(loops.copy_of(worker.engine.state()))
    log = []
    for step in range(1, 5):
        worker.work(step)
        sums = loops.summed([worker.engine])
        log.append((loops.record(step, applied=step != 2), sums if step != 2 else None))
        worker.engine.apply(*log[-1])
    for entry in log:
        follower.engine.apply(*entry)
    assert loops.same(worker.engine.state(), follower.engine.state())


def test_a_batch_that_is_begun_again_gives_the_same_bits(case: Any, loops: Any) -> None:
    """Whatever was done meanwhile: half a batch, evaluation in training mode, random numbers."""
    replica, other = loops.Replica(case), loops.Replica(case)
    for each in (replica, other):
        each.work(1)
        each.engine.apply(loops.record(1), loops.summed([each.engine]))
    other.work(2)
    replica.engine.begin(lambda bucket: None)  # dropped in the middle
    replica.engine.seed(7)
    loss, weight = replica.parts.loss(0, 7)
    replica.engine.backward(loss, weight)
    torch.rand(3)
    replica.work(2)  # done, and dropped
    replica.work(2)
    assert sorted(replica.handed_out) == list(range(len(replica.engine.buckets)))
    assert all(loops.equal_bits(a, b) for a, b in zip(replica.engine.buckets, other.engine.buckets, strict=True))
    assert loops.same(replica.engine.state(), other.engine.state()), "nothing of a batch is in the state before its commit"


def test_buckets_are_handed_out_once_final_and_within_the_last_backward(case: Any, loops: Any) -> None:
    replica = loops.Replica(case)
    engine, count = replica.engine, case.accumulate
    flat = len(engine.buckets) - len(engine._book.tensors)
    seen: dict[int, torch.Tensor] = {}
    within: list[int] = []

    def on_bucket(index: int) -> None:
        assert index not in seen and number == count - 1, "gradients of earlier micro-batches are not final"
        seen[index] = engine.buckets[index].clone()

    engine.begin(on_bucket)
    for number in range(count):
        engine.seed(number)
        loss, weight = replica.parts.loss(0, number)
        engine.backward(loss, weight, last=number == count - 1)
        within.append(len(seen))
    engine.end()
    assert list(seen) == list(reversed(range(len(engine.buckets))))
    assert all(loops.equal_bits(seen[i], engine.buckets[i]) for i in seen)
    if case is not loops.CASES["unused"]:
        assert flat >= 2 and within[-1] == flat


def test_layouts_follow_registration_alone(case: Any, loops: Any) -> None:
    one, other = loops.Replica(case), loops.Replica(case, seed=3)
    shapes = [(b.shape, b.dtype) for b in one.engine.buckets]
    manifests = []
    for each in (one, other):
        each.work(1)
        each.engine.apply(loops.record(1), loops.summed([each.engine]))
        state = each.engine.state()
        manifests.append(Manifest.of(layout_of(state.tensors), state.scalars))
        assert [(b.shape, b.dtype) for b in each.engine.buckets] == shapes
    assert manifests[0].hash == manifests[1].hash and not manifests[0].difference(manifests[1])
    assert Manifest.from_json(manifests[0].to_json()) == manifests[0]


# What a case alone shows.


def linear_engine(loops: Any, **options: Any) -> tuple[nn.Linear, torch.optim.SGD, ModuleEngine]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return model, optimizer, ModuleEngine(Registered.of(model, [optimizer], **options.pop("registered", {})), **options)


def test_losses_without_weight_are_averaged_and_weights_may_be_tensors(loops: Any) -> None:
    for weights in ((None, None), (3, 1), (torch.tensor(3), torch.tensor(1.0)), (3, torch.tensor(1))):
        model, _, engine = linear_engine(loops)
        plain = nn.Linear(3, 2)
        plain.load_state_dict(model.state_dict())
        xs = [torch.randn(4, 3), torch.randn(2, 3)]
        engine.begin(lambda bucket: None)
        for number, (x, weight) in enumerate(zip(xs, weights, strict=True)):
            engine.backward(model(x).square().sum(), weight, last=number == 1)
        result = engine.end()
        total = sum(1.0 if w is None else float(w) for w in weights)
        update = engine.apply(loops.record(1), loops.summed([engine]))
        loss = sum(plain(x).square().sum() for x in xs) / total
        loss.backward()
        torch.testing.assert_close(model.weight.grad, plain.weight.grad)
        assert update.loss == pytest.approx(float(loss.detach()), rel=1e-6)
        assert float(result.tokens) == total and update.weight == total


def test_a_total_weight_of_zero_changes_nothing(loops: Any) -> None:
    model, optimizer, engine = linear_engine(loops)
    scheduler_free = loops.copy_of(engine.state())
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.randn(4, 3)).sum() * 0, 0, last=True)
    engine.end()
    assert engine.apply(loops.record(1), loops.summed([engine])) is None
    assert loops.same(engine.state(), scheduler_free) and model.weight.grad is None


def test_a_parameter_without_gradient_at_any_contributor_has_none_at_the_update(loops: Any) -> None:
    seen: list[set[str]] = []
    replicas = [loops.Replica(loops.CASES["unused"], replica, 2) for replica in range(2)]
    for each in replicas:
        each.engine.set_update(
            lambda record, model=each.parts.model: seen.append({n for n, p in model.named_parameters() if p.grad is not None})
        )
    used = set()
    for replica in replicas:
        replica.work(1)
        used |= {"a" if float(loops.batch(replica.replica, 0)[0].sum()) > 0 else "b"}
    for replica in replicas:
        replica.engine.apply(loops.record(1, (0, 1)), loops.summed([r.engine for r in replicas]))
    assert seen == [{f"{branch}.{kind}" for branch in used for kind in ("weight", "bias")}] * 2


@pytest.mark.parametrize("held_out", [False, True])
def test_a_scheduler_follows_the_agreed_loss_or_a_validation_in_the_update(loops: Any, held_out: bool) -> None:
    """On two replicas, and on one that repeats the updates and begins with other weights."""
    torch.manual_seed(0)  # numbers with which the training does not diverge
    seen: list[list[float]] = [[], [], []]
    x = torch.randn(6, 3)

    def made(number: int) -> tuple[nn.Module, ModuleEngine]:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        engine = ModuleEngine(Registered.of(model, [optimizer], [scheduler]), replica=number, replicas=2)

        def update(record: Any) -> None:
            optimizer.step()
            if held_out:
                model.eval()
                with torch.no_grad():
                    figure = float(model(x).square().mean())
                model.train()
            else:
                figure = record.loss
            seen[number].append(figure)
            if record.applied:
                scheduler.step(figure)

        engine.set_update(update)
        return model, engine

    parts = [made(number) for number in range(3)]
    for _, engine in parts[1:]:
        engine.load(loops.copy_of(parts[0][1].state()))
    for step in range(1, 7):
        for number, (model, engine) in enumerate(parts[:2]):
            engine.begin(lambda bucket: None)
            engine.seed(step)
            engine.backward(model(x * (step + number)).square().sum(), 2, last=True)
            engine.end()
        applied = step != 3
        sums = loops.summed([engine for _, engine in parts[:2]]) if applied else None
        updates = [engine.apply(loops.record(step, (0, 1), applied=applied), sums) for _, engine in parts]
        assert all(loops.same(engine.state(), parts[0][1].state()) for _, engine in parts[1:])
        if not held_out:
            assert all(math.isnan(seen[n][-1]) if u is None else u.loss == seen[n][-1] for n, u in enumerate(updates))
    assert [str(figures) for figures in seen] == [str(seen[0])] * 3
    assert parts[0][1].registered.optimizers["0"].param_groups[0]["lr"] < 0.5


@pytest.mark.parametrize("rule", ["none", "linear", "sqrt"])
@pytest.mark.parametrize("tensor", [False, True])
def test_rates_follow_the_contributors_for_one_step_only(loops: Any, rule: Any, tensor: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5) if tensor else 0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine = ModuleEngine(Registered.of(model, [optimizer], [scheduler]), replicas=4, policy=Policy(rule))
    factor = {"none": 1.0, "linear": 0.25, "sqrt": 0.5}[rule]
    for step in (1, 2):
        before = model.weight.detach().clone()
        engine.begin(lambda bucket: None)
        engine.backward(model(torch.ones(1, 2)).sum(), last=True)
        engine.end()
        rate = 0.5**step
        update = engine.apply(loops.record(step), loops.summed([engine]))
        assert float(update.learning_rate) == factor * rate
        assert torch.equal(model.weight.detach(), before - factor * rate)
        assert float(optimizer.param_groups[0]["lr"]) == rate / 2, "the scheduler went on from the rate as it was"


@pytest.mark.parametrize("tensor", [False, True])
def test_a_registered_update_steps_at_the_policys_rate_and_may_change_rates_itself(loops: Any, tensor: bool) -> None:
    """Two groups; the update steps twice, and sets a rate between: what it sets stays, unscaled."""
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    rates = [torch.tensor(0.5), torch.tensor(0.25)] if tensor else [0.5, 0.25]
    groups = [{"params": [layer.weight], "lr": rate} for layer, rate in zip(model, rates, strict=True)]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    engine = ModuleEngine(Registered.of(model, [optimizer]), replicas=4, policy=Policy("sqrt"))

    def update(record: Any) -> None:
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.25]
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[1]["lr"] * 2
        optimizer.step()

    engine.set_update(update)
    before = [weight.detach().clone() for weight in model.parameters()]
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(1, 2)).sum(), last=True)
    engine.end()
    engine.apply(loops.record(1), loops.summed([engine]))
    moved = [b - weight.detach() for b, weight in zip(before, model.parameters(), strict=True)]
    assert torch.allclose(moved[0], torch.full((1, 2), 0.5)), "twice half of 0.5: one of four contributed"
    assert torch.allclose(moved[1], torch.full((1, 1), 0.125 + 0.25))
    assert [float(group["lr"]) for group in optimizer.param_groups] == [0.5, 0.5]


def test_a_rate_is_put_back_when_the_step_raises(loops: Any) -> None:
    model = nn.Linear(2, 1)

    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ArithmeticError("no")

    optimizer = Failing(model.parameters(), lr=0.5)
    engine = ModuleEngine(Registered.of(model, [optimizer]), replicas=4, policy=Policy("sqrt"))
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(1, 2)).sum(), last=True)
    engine.end()
    with pytest.raises(ArithmeticError):
        engine.apply(loops.record(1), loops.summed([engine]))
    assert optimizer.param_groups[0]["lr"] == 0.5


def scaled(loops: Any) -> tuple[nn.Linear, torch.amp.GradScaler, ModuleEngine]:
    torch.manual_seed(0)
    model, scaler = nn.Linear(3, 2), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, scaler, ModuleEngine(Registered.of(model, [optimizer], scaler=scaler, clip_norm=1.0))


def test_a_scaler_scales_gradients_and_lowers_its_scale_when_a_step_is_not_applied(loops: Any) -> None:
    model, scaler, engine = scaled(loops)
    follower_model, _, follower = scaled(loops)
    plain = nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    scales = []
    for step in range(1, 6):
        x = torch.randn(4, 3)
        engine.begin(lambda bucket: None)
        engine.backward(model(x).square().sum(), last=True)
        engine.end()
        sums = loops.summed([engine]) if step != 3 else None
        record = loops.record(step, applied=step != 3)
        update = engine.apply(record, sums)
        follower.apply(record, sums)
        if update is not None:
            assert isinstance(update, ModuleUpdate)
            plain.zero_grad()
            plain(x).square().sum().backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plain_optimizer.step()
            torch.testing.assert_close(torch.as_tensor(update.grad_norm), norm)
            torch.testing.assert_close(model.weight, plain.weight)
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert loops.same(engine.state(), follower.state())
    other_model, other_scaler, other = scaled(loops)
    other.load(loops.copy_of(engine.state()))
    assert other_scaler.get_scale() == 2048.0


def test_a_scaler_leaves_out_an_optimizer_whose_parameters_have_no_gradient(loops: Any) -> None:
    """As loops that train one part of a model at a time need it; without a scaler such an optimizer's step does nothing."""
    found = []
    for scaler in (torch.amp.GradScaler("cpu", init_scale=8.0), None):
        torch.manual_seed(0)
        model = nn.ModuleList(nn.Linear(3, 1) for _ in range(2))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
        engine = ModuleEngine(Registered.of(model, optimizers, scaler=scaler))
        for step in range(1, 5):
            engine.begin(lambda bucket: None)
            engine.backward(model[step % 2](torch.full((2, 3), float(step))).sum(), last=True)
            engine.end()
            engine.apply(loops.record(step), loops.summed([engine]))
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_scaler_keeps_its_scale_where_nothing_overflowed(loops: Any) -> None:
    """All batches are left out by order, or the total weight is 0."""
    model, scaler, engine = scaled(loops)
    assert engine.expects_overflow
    record = replace(loops.record(1, (), applied=False), excluded={0: Exclusion(0, -1)})
    engine.apply(record, None)
    engine.begin(lambda bucket: None)
    engine.backward(model(torch.ones(4, 3)).square().sum(), 0, last=True)
    engine.end()
    engine.apply(loops.record(1), loops.summed([engine]))
    assert scaler.get_scale() == 1024.0
    engine.apply(loops.record(2, applied=False), None)
    assert scaler.get_scale() == 512.0


def test_several_models_and_types_have_buckets_of_their_own(loops: Any) -> None:
    torch.manual_seed(0)
    models = {"generator": nn.Linear(3, 3), "critic": nn.Sequential(nn.Linear(3, 3).double(), nn.Linear(3, 1).double())}
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=0.1) for name, model in models.items()}
    engine = ModuleEngine(Registered.of(models, optimizers), bucket_bytes=1 << 20)
    assert [b.dtype for b in engine.buckets] == [torch.float64, torch.float32, torch.float64]
    assert [name for name in engine.state().tensors] == [
        "parameter/generator.weight", "parameter/generator.bias", "parameter/critic.0.weight",
        "parameter/critic.0.bias", "parameter/critic.1.weight", "parameter/critic.1.bias",
    ]  # fmt: skip
    engine.begin(lambda bucket: None)
    loss = F.softplus(models["critic"](models["generator"](torch.ones(2, 3)).double())).sum()
    engine.backward(loss, last=True)
    engine.end()
    engine.apply(loops.record(1), loops.summed([engine]))
    assert "optimizer/critic/state/critic.1.bias/exp_avg" in engine.state().tensors


def test_backward_on_another_thread_hands_buckets_out_all_the_same(loops: Any) -> None:
    """On an accelerator hooks run on threads of autograd's own."""
    replica = loops.Replica(loops.CASES["adamw"])
    expected = loops.Replica(loops.CASES["adamw"])
    expected.work(1)
    replica.handed_out = []
    replica.engine.begin(replica.handed_out.append)
    replica.engine.seed(0)
    loss, weight = replica.parts.loss(0, 0)
    errors: list[BaseException] = []

    def body() -> None:
        try:
            replica.engine.backward(loss, weight, last=True)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(60)
    replica.engine.end()
    assert not errors and replica.handed_out == expected.handed_out
    assert all(loops.equal_bits(a, b) for a, b in zip(replica.engine.buckets, expected.engine.buckets, strict=True))
