"""An existing loop on a session: it trains what it trained before, and each wrong loop ends in one clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import ExponentialLR

from helixrt.engines.random_state import set_random_state
from helixrt.errors import ConfigError, MisuseError
from helixrt.job.mesh import Mesh
from helixrt.job.session import Session
from tests.job.session_world import LocalHost, batches, session_with, tiny

Parameters = list[torch.Tensor]
SEED = 5


def values(model: nn.Module) -> Parameters:
    return [parameter.detach().clone() for parameter in model.parameters()]


def equal(one: Parameters, other: Parameters) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def existing_loop(
    host: LocalHost, until: int, accumulate: int, always: bool = True, skips: Collection[int] = ()
) -> Parameters:
    """`always`: optimizer and scheduler are stepped in each micro-batch, else where the gradients are complete."""
    session = session_with(host, seed=SEED)
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = ExponentialLR(optimizer, 0.9)
    before = list(model.parameters())
    model, optimizer, scheduler, loader = session.prepare(
        model, optimizer, scheduler, batches(), accumulate=accumulate, clip_norm=0.5, until=until
    )
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    for number, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        if number - 1 in skips:
            loader.skip()
            continue
        loss.backward()
        if always or number % accumulate == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if session.step is not None and session.step.done is not None:
                session.log({"rate": scheduler.get_last_lr()[0]})
    assert not session.left_early
    return values(model)


def plain_loop(until: int, accumulate: int, skips: Collection[int] = ()) -> Parameters:
    model, data = tiny(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = ExponentialLR(optimizer, 0.9)
    usable = len(data) // accumulate * accumulate
    for step in range(until):
        optimizer.zero_grad()
        counted = [p for p in range(step * accumulate, (step + 1) * accumulate) if p not in skips]
        for position in counted:
            set_random_state(SEED, 0, 0, position)
            x, y = data[position % usable]
            mse_loss(model(x), y).backward()
        if not counted:
            continue
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(len(counted))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
    return values(model)


@pytest.mark.parametrize("accumulate", [1, 4, 5])
@pytest.mark.parametrize("always", [True, False])
def test_an_existing_loop_trains_as_it_did(accumulate: int, always: bool) -> None:
    host = LocalHost()
    assert equal(existing_loop(host, 8, accumulate, always), plain_loop(8, accumulate))
    assert [step for step, _ in host.logged] == list(range(1, 9))
    assert host.logged[-1][1]["rate"] == pytest.approx(0.05 * 0.9**8)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_batch_that_is_skipped_counts_nothing(accumulate: int) -> None:
    skips = {1, 4, 5, 6}
    assert equal(existing_loop(LocalHost(), 8, accumulate, skips=skips), plain_loop(8, accumulate, skips))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_same_batches_come_again_after_a_step_that_was_not_committed(accumulate: int) -> None:
    disturbed, calm = LocalHost(dropped={1, 4, 5, 6}), LocalHost()
    assert equal(existing_loop(disturbed, 6, accumulate), existing_loop(calm, 6, accumulate))
    assert disturbed.worker is not None
    assert disturbed.worker.positions == [accumulate * p for p in [0, 0, 1, 2, 2, 2, 2, 3, 4, 5]]


def test_the_loop_sees_whether_its_step_was_committed() -> None:
    session = session_with(LocalHost(dropped={2}))
    model = tiny()
    model, optimizer, loader = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), until=3, accumulate=2
    )
    seen, inputs = [], []
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
        inputs.append(x)
        if session.step is not None and session.step.done is not None:
            seen.append(session.committed)
    assert seen == [True, False, True, True]
    assert torch.equal(inputs[2], inputs[4]) and torch.equal(inputs[3], inputs[5])
    assert session.committed and list(loader) == []  # a loop over epochs around it just ends


def test_several_of_each_kind_are_given_back_in_their_order() -> None:
    session = session_with(LocalHost(), seed=SEED)
    first, second = tiny(), tiny()
    rates = (0.05, 0.01)
    optimizers = [torch.optim.SGD(m.parameters(), lr=r) for m, r in zip((first, second), rates, strict=True)]
    schedulers = [ExponentialLR(optimizers[1], 0.5), ExponentialLR(optimizers[0], 0.9)]
    s1, loader, m1, o1, o2, m2, s2 = session.prepare(
        schedulers[0], batches(), first, *optimizers, second, schedulers[1], until=4, clip_norm=10.0
    )
    assert m1 is first and m2 is second and isinstance(o2, torch.optim.Optimizer)
    assert [o.param_groups for o in (o1, o2)] == [o.param_groups for o in optimizers]
    for x, y in loader:
        (mse_loss(m1(x), y) + mse_loss(m2(x), y)).backward()
        before = values(m1)
        o1.step()
        assert equal(values(m1), before)  # the last one's step is the update of all
        o2.step()
        assert not equal(values(m1), before)
        s1.step()
        s2.step()
    assert s1.get_last_lr() == [pytest.approx(0.01 * 0.5**4)] and s2.get_last_lr() == [pytest.approx(0.05 * 0.9**4)]


def test_an_update_of_the_users_own_may_step_what_was_given_back() -> None:
    session = session_with(LocalHost())
    model = tiny()
    model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), until=2)
    steps = []

    @session.update
    def update(record: Any) -> None:
        steps.append(record.step)
        optimizer.step()

    before = values(model)
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
    assert steps == [1, 2] and not equal(before, values(model))


def test_autocast_covers_the_loop() -> None:
    session = session_with(LocalHost(), dtype="bfloat16")
    model = tiny()
    model, optimizer, loader = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), until=3)
    for x, y in loader:
        out = model(x)
        assert out.dtype is torch.bfloat16
        mse_loss(out.float(), y).backward()
        optimizer.step()
    assert all(p.dtype is torch.float32 for p in model.parameters()) and not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- wrong loops


def ready(accumulate: int = 1, until: int = 3, host: LocalHost | None = None) -> tuple[Session, Any, Any, Any, Any]:
    session = session_with(host or LocalHost())
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session, *session.prepare(
        model, optimizer, ExponentialLR(optimizer, 0.9), batches(), accumulate=accumulate, until=until
    )


def run(body: Callable[[Any, Any, Any, Callable[[], torch.Tensor]], None], accumulate: int = 1) -> None:
    session, model, optimizer, scheduler, loader = ready(accumulate)
    model.loader = loader
    for x, y in loader:
        body(model, optimizer, scheduler, lambda x=x, y=y: mse_loss(model(x), y))


def step_twice(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    optimizer.step()


def step_missing(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()


def scheduler_missing(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()


def scheduler_twice(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    scheduler.step()
    scheduler.step()


def scheduler_first(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    scheduler.step()


def backward_missing(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    optimizer.step()


def backward_twice(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    loss().backward()
    optimizer.step()
    scheduler.step()


def backward_after_step(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    scheduler.step()
    loss().backward()


def own_clipping(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    scheduler.step()


def closure(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step(loss)


def parameter_changed(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    scheduler.step()
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)


def skipped_after_step(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    optimizer.step()
    scheduler.step()
    model.loader.skip()


def skipped_after_backward(model: Any, optimizer: Any, scheduler: Any, loss: Callable[[], torch.Tensor]) -> None:
    loss().backward()
    model.loader.skip()


WRONG: dict[Callable[..., None], str] = {
    step_twice: r"optimizer\.step\(\) was called twice in one micro-batch of step 1",
    step_missing: r"optimizer\.step\(\) was not called after the .*backwards? of step 1; call it, or loader\.skip\(\)",
    skipped_after_step: r"loader\.skip\(\) was called .* after optimizer\.step\(\)",
    skipped_after_backward: r"a micro-batch was skipped after its backward",
    scheduler_missing: r"scheduler\.step\(\) was not called after optimizer\.step\(\) in step 1",
    scheduler_twice: r"scheduler\.step\(\) was called twice after one optimizer\.step\(\)",
    scheduler_first: r"scheduler\.step\(\) was called before optimizer\.step\(\) in step 1",
    backward_missing: r"micro-batch 1 of step 1 had no backward that reached a parameter",
    backward_twice: r"a second backward in one micro-batch reached .*; add the losses",
    backward_after_step: r"a backward after optimizer\.step\(\) reached",
    own_clipping: r"the gradient of .* was changed .*Clip with register\(clip_norm=\.\.\.\) or prepare\(clip_norm",
    closure: r"was given a closure",
    parameter_changed: r"parameter 0\.weight was changed in place",
}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("body", WRONG, ids=lambda body: body.__name__)
def test_a_wrong_loop_ends_in_one_clear_error(body: Callable[..., None], accumulate: int) -> None:
    with pytest.raises(MisuseError, match=WRONG[body]):
        run(body, accumulate)


def test_a_loop_that_is_left_early_is_seen_at_the_next_call() -> None:
    session, model, optimizer, scheduler, loader = ready()
    for x, y in loader:
        mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        break
    assert session.left_early
    for call in (optimizer.step, scheduler.step, lambda: next(iter(loader))):
        with pytest.raises(MisuseError, match=r"was left \(break, return\) before its last update"):
            call()


def test_a_part_that_was_not_prepared_and_gets_a_gradient_is_told_once() -> None:
    """The loop calls the backward itself, so whether the loss depends on it is not known: it may be a probe on its own."""
    host, head = LocalHost(), torch.nn.Linear(1, 1)
    _, model, optimizer, scheduler, loader = ready(host=host)
    for x, y in loader:
        mse_loss(head(model(x)), y).backward()
        optimizer.step()
        scheduler.step()
    said = [line for line in host.said if "is not registered and has a gradient" in line]
    assert len(said) == 1 and said[0].startswith(("parameter weight of a module Linear", "parameter bias of a module Linear"))


def test_a_copy_of_the_prepared_model_is_refused_in_the_first_micro_batch() -> None:
    _, model, optimizer, _, loader = ready()
    used = copy.deepcopy(model)
    with pytest.raises(MisuseError, match="had no backward that reached a parameter.*of the models of session.prepare"):
        for x, y in loader:
            mse_loss(used(x), y).backward()
            optimizer.step()


def test_calls_outside_the_loop_are_refused() -> None:
    _, _, optimizer, scheduler, _ = ready()
    optimizer.zero_grad()
    with pytest.raises(MisuseError, match=r"optimizer\.step\(\) was called outside the loop over the prepared loader"):
        optimizer.step()
    with pytest.raises(MisuseError, match=r"scheduler\.step\(\) was called outside the loop"):
        scheduler.step()


def test_the_loader_is_iterated_over_once_at_a_time() -> None:
    _, _, _, _, loader = ready()
    running = iter(loader)
    next(running)
    with pytest.raises(MisuseError, match="iterated over a second time within its loop"):
        iter(loader)


def all_items() -> Any:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4))
    return torch.utils.data.DataLoader(data, batch_size=2)


@pytest.mark.parametrize(
    ("things", "rule"),
    [
        (lambda m, o: (m, o), "was given 0 loaders; give it one"),
        (lambda m, o: (m, o, [1], [2]), "was given 2 loaders; give it one"),
        (lambda m, o: (m, [1]), "needs the model and its optimizer"),
        (lambda m, o: (o, [1]), "needs the model and its optimizer"),
        (lambda m, o: (m, o, [1], 7), "models, optimizers, schedulers and a loader, not a int"),
        (lambda m, o: (m, o, [1], torch.amp.GradScaler("cpu")), "takes no GradScaler"),
        (lambda m, o: (m, o, all_items()), r"reads the same items on every replica; .*session\.sampler\(dataset"),
    ],
)
def test_what_cannot_be_prepared_is_refused(things: Callable[..., Any], rule: str) -> None:
    model = tiny()
    with pytest.raises(MisuseError, match=rule):
        session_with(LocalHost(), replicas=2).prepare(*things(model, torch.optim.SGD(model.parameters(), lr=0.1)), until=2)


@pytest.mark.parametrize("axis", ["pp", "dp_shard", "cp", "tp"])
def test_a_mesh_inside_a_replica_needs_parallelize(axis: str) -> None:
    session = session_with(LocalHost(), mesh=Mesh(**{axis: 2}))
    model = tiny()
    with pytest.raises(
        ConfigError, match=rf"mesh\.{axis}=2: .*call session\.parallelize\(model\) before the optimizer is made"
    ):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(), until=2)


def test_what_was_given_back_is_not_prepared_again() -> None:
    session, model, optimizer, scheduler, loader = ready()
    with pytest.raises(MisuseError, match="call it once, with the objects of the loop"):
        session.prepare(model, optimizer, loader, until=2)


def test_a_loader_of_this_replicas_own_part_is_taken() -> None:
    session = session_with(LocalHost(), replicas=2)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=session.sampler(data, shuffle=True))
    model = tiny()
    _, _, prepared = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, until=2)
    assert len(prepared) == 2 and prepared.dataset is data
