"""What a training script may do wrong with a module engine: each ends in one error that names what and says what to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import Fatal, MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State


class Script:
    """Two layers, momentum, a schedule, an EMA; `step` is one right step."""

    def __init__(self, **registered: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.ema = torch.optim.swa_utils.AveragedModel(self.model)
        options = {"extra": {"ema": self.ema}, **registered}
        self.engine = ModuleEngine(Registered.of(self.model, self.optimizer, [self.scheduler], **options))
        self.steps = 0

    def begin(self) -> None:
        self.engine.begin(lambda bucket: None)

    def loss(self) -> torch.Tensor:
        return self.model(torch.randn(4, 3)).square().sum()

    def work(self, during: Callable[[], Any] = lambda: None) -> None:
        self.begin()
        self.engine.backward(self.loss())
        during()
        self.engine.backward(self.loss(), last=True)
        self.engine.end()

    def commit(self) -> None:
        self.steps += 1
        record = CommitRecord(self.steps, self.steps, "", ((0, 0),))
        self.engine.apply(record, [bucket.clone() for bucket in self.engine.buckets])

    def step(self) -> None:
        self.work()
        self.commit()


def clip_grads(s: Script) -> None:
    nn.utils.clip_grad_norm_(s.model.parameters(), 1e-3)


def add_to_parameter(s: Script) -> None:
    with torch.no_grad():
        s.model[0].weight.add_(1)


def replace_parameter(s: Script) -> None:
    s.model[2].bias = nn.Parameter(torch.zeros(2))


def change_state(s: Script) -> None:
    s.optimizer.state[s.model[0].weight]["momentum_buffer"].zero_()


def new_tensor_in_place(s: Script) -> None:
    s.model[0].weight.data = s.model[0].weight.data.clone()


def halve_data(s: Script) -> None:
    for parameter in s.model.parameters():
        parameter.data.mul_(0.5)


def set_rate(s: Script) -> None:
    s.optimizer.param_groups[0]["lr"] = 0.5


def unregistered_step(s: Script) -> None:
    torch.optim.AdamW(s.model[2:].parameters()).step()


def own_backward(s: Script) -> None:
    s.loss().backward()


WITHIN = {
    "clipping": (clip_grads, r"the gradient of 0\.weight was changed within the step.*clip_norm"),
    "zero_grad": (lambda s: s.optimizer.zero_grad(), r"the gradient of 0\.weight was changed within the step.*zero_grad"),
    "zeroing": (lambda s: s.model.zero_grad(set_to_none=False), r"the gradient of 0\.weight was changed within the step"),
    "one gradient": (lambda s: s.model[2].bias.grad.mul_(2), r"the gradient of 2\.bias was changed within the step"),
    "own backward": (own_backward, r"a backward outside step\.backward\(loss\) reached 2\.bias"),
    "step": (lambda s: s.optimizer.step(), r"SGD\.step\(\) was called in the loop; step\.commit\(\) runs the same update"),
    "scheduler": (lambda s: s.scheduler.step(), r"'lr' of group 0 of optimizer 0 was changed \(scheduler\.step"),
    "unregistered": (unregistered_step, r"AdamW\.step\(\) was called, and this optimizer is not registered"),
    "parameter": (add_to_parameter, r"parameter 0\.weight was changed in place"),
    "replaced": (replace_parameter, r"parameter 2\.bias was replaced"),
    "data": (new_tensor_in_place, r"parameter 0\.weight was replaced"),
    "through data": (halve_data, r"parameter \d\.\w+ was changed in place, through its `data`"),
    "frozen": (lambda s: s.model[2].bias.requires_grad_(False), r"parameter 2\.bias was frozen after it was registered"),
    "momentum": (change_state, r"state 'momentum_buffer' of 0\.weight in optimizer 0 was changed"),
    "rate": (set_rate, r"'lr' of group 0 of optimizer 0 was changed"),
    "group": (lambda s: s.optimizer.param_groups[0]["params"].pop(), r"a parameter group was added or changed"),
    "ema": (lambda s: s.ema.update_parameters(s.model), r"ema/n_averaged was changed|ema/module\.0\.weight was changed"),
    "buffer": (
        lambda s: setattr(s.model[1], "num_batches_tracked", torch.zeros(3).long()),
        r"buffer 1\.num_batches_tracked was replaced by something of another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(WITHIN))
def test_wrong_calls_between_micro_batches_are_found_before_anything_is_committed(name: str) -> None:
    wrong, message = WITHIN[name]
    script = Script()
    script.step()
    with pytest.raises(MisuseError, match=message):
        script.work(lambda: wrong(script))


def test_a_change_through_data_of_one_parameter_is_found_when_its_turn_comes() -> None:
    """Six parameters, four of them in each step."""
    for index in range(6):
        script = Script()
        parameters = list(script.model.parameters())
        with pytest.raises(MisuseError, match="was changed in place, through its `data`"):
            for _ in range(3):
                parameters[index].data.add_(1.0)
                script.step()


class Counter:
    """Counts in a plain number."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_a_number_of_an_extra_object_may_change_in_the_update_alone() -> None:
    """Counted in the loop it would differ in a replica that repeats updates, which is found at the end of the run."""
    counter = Counter()
    script = Script(extra={"counter": counter})

    def update(record: CommitRecord) -> None:
        counter.count += 1
        script.optimizer.step()
        script.scheduler.step()

    script.engine.set_update(update)
    for _ in range(3):
        script.step()
    assert counter.count == 3

    def count() -> None:
        counter.count += 1

    with pytest.raises(MisuseError, match="counter/count was changed.*per_replica="):
        script.work(count)


DRAWS: dict[str, Callable[[int], Any]] = {
    "torch": lambda step: torch.randn(2),
    "python": lambda step: random.random(),
    "numpy": lambda step: numpy.random.rand(),
}


@pytest.mark.parametrize("kind", DRAWS)
def test_an_update_that_draws_random_numbers_is_found_in_its_first_step(kind: str) -> None:
    """Each replica draws others, so their states would differ, which is found at the end of the run."""
    script = Script()
    script.engine.set_update(lambda record: DRAWS[kind](record.step))
    with pytest.raises(MisuseError, match="the update drew random numbers"):
        script.step()


def test_an_update_may_draw_from_a_generator_that_follows_from_the_record() -> None:
    script = Script()
    script.engine.set_update(lambda record: torch.randn(2, generator=torch.Generator().manual_seed(record.step)))
    script.step()
    script.step()


def test_values_that_are_no_numbers_are_not_taken_for_a_change() -> None:
    script = Script()
    with torch.no_grad():
        script.model[2].bias.fill_(float("nan"))
    script.engine.load(script.engine.state())
    script.step()
    script.step()


GRADIENTS_ALONE = ("own backward", "clipping", "zero_grad", "zeroing", "one gradient")


@pytest.mark.parametrize("name", [name for name in WITHIN if name not in GRADIENTS_ALONE])
@pytest.mark.parametrize("replay", [False, True])
def test_wrong_calls_between_steps_are_found_before_anything_is_committed(name: str, replay: bool) -> None:
    wrong, message = WITHIN[name]
    script = Script()
    script.step()
    with pytest.raises(MisuseError, match=message):
        wrong(script)
        if replay:  # of a record that others committed meanwhile
            script.commit()
        else:
            script.work()


@pytest.mark.parametrize("name", ["clipping", "zeroing", "one gradient"])
def test_gradients_changed_after_the_hand_out_are_found(name: str) -> None:
    wrong, message = WITHIN[name]
    script = Script()
    script.begin()
    script.engine.backward(script.loss(), last=True)
    wrong(script)
    with pytest.raises(MisuseError, match=message.replace("within the step", "after its bucket was handed out")):
        script.engine.end()


def test_a_backward_in_the_wrong_place_is_refused() -> None:
    script = Script()
    with pytest.raises(MisuseError, match="outside a step"):
        script.engine.backward(script.loss())
    script.begin()
    script.engine.backward(script.loss())
    with pytest.raises(MisuseError, match="without a backward of its last micro-batch"):
        script.engine.end()
    script.begin()
    script.engine.backward(script.loss(), last=True)
    with pytest.raises(MisuseError, match="after the step's last micro-batch"):
        script.engine.backward(script.loss(), last=True)
    script.work()
    script.commit()
    with pytest.raises(MisuseError, match="outside a step"):
        script.engine.backward(script.loss(), last=True)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda s: 1.5, "the loss is a float, not a tensor"),
        (lambda s: s.model(torch.randn(4, 3)), r"the loss has shape \[4, 2\]"),
        (lambda s: s.loss().detach(), "depends on no parameter that requires a gradient"),
        (lambda s: torch.tensor(1.0), "depends on no parameter that requires a gradient"),
    ],
)
def test_losses_that_are_none(loss: Callable[[Script], Any], message: str) -> None:
    script = Script()
    script.begin()
    with pytest.raises(MisuseError, match=message):
        script.engine.backward(loss(script), last=True)


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "3", torch.ones(2)])
def test_weights_that_are_none(weight: Any) -> None:
    script = Script()
    script.begin()
    with pytest.raises(MisuseError, match="the weight of a micro-batch is"):
        script.engine.backward(script.loss(), weight, last=True)


def test_a_parameter_that_backward_reaches_twice_is_named() -> None:
    """Reentrant checkpoints run a backward within the backward."""
    from torch.utils.checkpoint import checkpoint

    layer = nn.Linear(3, 3)
    engine = ModuleEngine(Registered.of(layer, [torch.optim.SGD(layer.parameters(), lr=0.1)]), bucket_bytes=4)
    engine.begin(lambda bucket: None)
    x = torch.randn(2, 3, requires_grad=True)
    engine.backward(checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True).sum(), last=True)
    with pytest.raises(MisuseError, match=r"(weight|bias) was added to after its bucket.*use_reentrant=False"):
        engine.end()


def registered(model: nn.Module, **options: Any) -> ModuleEngine:
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return ModuleEngine(Registered.of(model, [optimizer], **options))


def complex_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("x", torch.zeros(2, dtype=torch.complex64))
    return model


class Odd:
    """State that cannot be stored."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"outer": [0, self.value]}

    def load_state_dict(self, state: Any) -> None:
        pass


def plateau() -> ModuleEngine:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ModuleEngine(Registered.of(model, [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]))


def foreign_scheduler() -> ModuleEngine:
    model = nn.Linear(2, 2)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return registered(model, schedulers=[torch.optim.lr_scheduler.ExponentialLR(other, 0.9)])


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: registered(nn.Sequential(nn.Embedding(4, 2, sparse=True))), r"^0 is an embedding with sparse=True"),
    "max_norm": (
        lambda: registered(nn.Sequential(nn.EmbeddingBag(4, 2, max_norm=1.5))),
        r"^0 is an embedding with max_norm=1.5: its forward changes its weight; leave max_norm out",
    ),
    "lazy": (lambda: registered(nn.LazyLinear(2)), r"^weight has no shape yet"),
    "frozen": (lambda: registered(nn.Linear(2, 2).requires_grad_(False)), "no parameter that requires a gradient"),
    "complex": (lambda: registered(nn.Linear(2, 2, dtype=torch.complex64)), "^weight is of torch.complex64"),
    "twice": (
        lambda: (lambda m: ModuleEngine(Registered.of(m, [torch.optim.SGD(m.parameters()), torch.optim.SGD(m.parameters())])))(
            nn.Linear(2, 2)
        ),
        "weight is in optimizers 0 and 1",
    ),
    "foreign": (
        lambda: registered(nn.Linear(2, 2), optimizer=torch.optim.SGD(nn.Linear(3, 2).parameters())),
        r"holds a parameter that no registered model has \(parameter 0 of group 0, of shape \[2, 3\]\)",
    ),
    "lbfgs": (lambda: (lambda m: registered(m, optimizer=torch.optim.LBFGS(m.parameters())))(nn.Linear(2, 2)), "LBFGS"),
    "scheduler": (foreign_scheduler, "scheduler 0 drives an optimizer that is not registered"),
    "no scheduler": (lambda: registered(nn.Linear(2, 2), schedulers=[object()]), "scheduler 0 is a object"),
    "no module": (lambda: Registered.of({"a": 3}).check(), "model 'a' is a int"),  # type: ignore[dict-item]
    "clip": (lambda: registered(nn.Linear(2, 2), clip_norm=0.0), "clip_norm=0.0"),
    "no state": (lambda: registered(nn.Linear(2, 2), extra={"ema": object()}), "^ema is a object without state_dict"),
    "function": (lambda: registered(nn.Linear(2, 2), extra={"x": Odd(len)}), r"^extra/x/outer/\[1\] is of type builtin_fu"),
    "bytes": (lambda: registered(nn.Linear(2, 2), extra={"x": Odd({"y": b"1"})}), r"^extra/x/outer/\[1\]/y is of type bytes"),
    "key": (lambda: registered(nn.Linear(2, 2), extra={"x": Odd({(1, 2): 1})}), r"^extra/x/outer/\[1\] has the key \(1, 2\)"),
    "metric": (lambda: plateau().begin(lambda bucket: None), r"ReduceLROnPlateau\) needs a metric: .*step\(record\.loss\)"),
    "left out": (
        lambda: (lambda m: registered(m, optimizer=torch.optim.SGD([m.weight])))(nn.Linear(2, 2)).begin(lambda bucket: None),
        "^bias requires a gradient and is in no registered optimizer",
    ),
    "named buffer": (
        lambda: registered(nn.BatchNorm1d(2), buffers={"*.running_mean": "mean"}),
        r"^buffers=\{'\*.running_mean': 'mean'\} names no buffer of the registered models",
    ),
    "mode": (lambda: registered(nn.BatchNorm1d(2), buffers={"running_mean": "max"}), "the mode must be one of mean, fir"),
    "complex buffer": (lambda: registered(complex_buffer(), buffers={"x": "mean"}), "x is complex: its mode can be 'per_rep"),
    "policy": (lambda: __import__("helixrt.engines.update", fromlist=["Policy"]).Policy("cubic"), "'none', 'linear' or 'sqrt'"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_trained_is_refused_by_name(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(MisuseError, match=message):
        make()


def test_a_wrapped_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))
        with pytest.raises(MisuseError, match="^0 is a DistributedDataParallel; register the module that it wraps"):
            registered(wrapped)
    finally:
        dist.destroy_process_group()


def test_sparse_gradients_of_functions_are_named() -> None:
    weight = nn.Parameter(torch.randn(5, 2))
    model = nn.Module()
    model.table = weight
    engine = registered(model)
    engine.begin(lambda bucket: None)
    engine.backward(nn.functional.embedding(torch.tensor([1, 2]), weight, sparse=True).sum(), last=True)
    with pytest.raises(MisuseError, match="^table has a sparse gradient"):
        engine.end()


def test_after_an_update_that_failed_only_a_loaded_state_goes_on() -> None:
    script = Script()
    script.step()
    state = script.engine.state()
    saved = State({n: t.clone() for n, t in state.tensors.items()}, dict(state.scalars))

    def fail(record: CommitRecord) -> None:
        script.optimizer.step()
        raise ArithmeticError

    script.engine.set_update(fail)
    script.work()
    with pytest.raises(ArithmeticError):
        script.commit()
    with pytest.raises(MisuseError, match="an update has failed"):
        script.begin()
    script.engine.load(saved)
    script.engine.set_update(lambda record: script.optimizer.step())
    script.step()


STATES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = {
    "parameter": (lambda t, s: t.pop("parameter/0.weight"), r"lacks parameter/0\.weight"),
    "shape": (lambda t, s: t.update({"parameter/2.bias": torch.zeros(3)}), r"parameter/2\.bias as torch\.float32\[3\], not"),
    "dtype": (lambda t, s: t.update({"parameter/2.bias": torch.zeros(2).double()}), r"as torch\.float64\[2\]"),
    "buffer": (lambda t, s: t.pop("running_buffer/1.running_var"), r"lacks running_buffer/1\.running_var"),
    "unknown": (lambda t, s: t.update({"other": torch.zeros(1)}), "unknown entry other"),
    "extra buffer": (lambda t, s: t.update({"buffer/x": torch.zeros(1)}), "buffer/x, which the registered models do not have"),
    "scheduler": (lambda t, s: [s.pop(n) for n in list(s) if n.startswith("scheduler/0/")], "lacks scheduler/0"),
    "groups": (lambda t, s: s.update({"optimizer/0/group/1/lr": 0.1}), "has 2 parameter groups of optimizer/0, not 1"),
    "membership": (lambda t, s: s.pop("optimizer/0/group/0/params/2.bias"), "other parameters in group 0 of optimizer/0"),
    "stranger": (
        lambda t, s: t.update({"optimizer/0/state/9.weight/momentum_buffer": torch.zeros(1)}),
        r"state of 9\.weight for optimizer/0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(STATES))
def test_a_state_of_something_else_is_refused_before_anything_is_changed(name: str) -> None:
    spoil, message = STATES[name]
    script = Script()
    script.step()
    before = script.engine.state()
    kept = {n: t.clone() for n, t in before.tensors.items()}
    tensors, scalars = {n: t + 1 for n, t in before.tensors.items()}, dict(before.scalars)
    spoil(tensors, scalars)
    with pytest.raises(Fatal, match=message):
        script.engine.load(State(tensors, scalars))
    assert all(torch.equal(t, kept[n]) for n, t in script.engine.state().tensors.items())
