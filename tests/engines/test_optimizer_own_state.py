"""What an optimizer keeps beyond `state` and `param_groups`: it travels with the state, or is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.engines.update import Policy
from helixrt.errors import Fatal, MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State
from tests.engines.scenarios import same_state


class Counting(torch.optim.SGD):
    """Its steps shrink with a number that it counts in an attribute."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.1 / self.count)


class Kept(Counting):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state.pop("count")
        super().load_state_dict(state)


class KeptInGroups(Counting):
    """Writes the number into its groups, and reads it from there."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["count"] = self.count

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.count = self.param_groups[0].get("count", 0)


class Slow(torch.optim.SGD):
    """Lookahead: slow weights in a list of tensors, and a number inside a dictionary."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slow = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]
        self.numbers = {"steps": 0}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.numbers["steps"] += 1
        with torch.no_grad():
            for slow, parameter in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(parameter.float(), 1 / (1 + self.numbers["steps"]))
                parameter.copy_(slow)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "numbers": self.numbers}

    def load_state_dict(self, state: Any) -> None:
        self.slow, self.numbers = state["slow"], state["numbers"]
        super().load_state_dict(state)


class Precise(Kept):
    """State in float32 of parameters in bfloat16, which torch's own `load_state_dict` would convert."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = self.state[parameter].get("sum", 0.0) + parameter.detach().float() / 3


class Script:
    def __init__(self, kind: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2, dtype=torch.bfloat16 if kind is Precise else torch.float32)
        self.optimizer = kind(self.model.parameters())
        self.engine = ModuleEngine(Registered.of(self.model, [self.optimizer]))

    def step(self, number: int) -> None:
        self.engine.begin(lambda bucket: None)
        self.engine.backward(self.model(torch.full((4, 3), float(number)).to(self.model.weight)).sum(), last=True)
        self.engine.end()
        record = CommitRecord(number, number, "", ((0, 0),))
        self.engine.apply(record, [bucket.clone() for bucket in self.engine.buckets])


def copied(state: State) -> State:
    return State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars))


@pytest.mark.parametrize("kind", [Kept, KeptInGroups, Slow, Precise])
def test_a_replica_that_loads_the_state_goes_on_as_the_other_one(kind: Callable[[Any], torch.optim.Optimizer]) -> None:
    one, other = Script(kind), Script(kind)
    for number in range(1, 5):
        one.step(number)
    other.engine.load(copied(one.engine.state()))
    same_state(one.engine.state(), other.engine.state())
    for number in range(5, 8):
        one.step(number)
        other.step(number)
    same_state(one.engine.state(), other.engine.state())


def test_entries_of_an_own_state_dict_have_names_in_the_state() -> None:
    script = Script(Slow)
    script.step(1)
    state = script.engine.state()
    assert state.scalars["optimizer/0/more/numbers/steps"] == 1
    assert torch.equal(state.tensors["optimizer/0/more/slow/[1]"], script.model.bias.float())


class InADictionary(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.progress = {"seen": getattr(self, "progress", {"seen": 0})["seen"] + 2}


class Saved(Counting):
    """An own `state_dict`, without the number."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "version": 1}


@pytest.mark.parametrize(
    ("kind", "name"), [(Counting, "Counting.count"), (InADictionary, "InADictionary.progress"), (Saved, "Saved.count")]
)
def test_a_number_that_step_changes_and_state_dict_does_not_hold_is_named(kind: Any, name: str) -> None:
    script = Script(lambda parameters: kind(parameters))
    with pytest.raises(MisuseError, match=rf"optimizer 0: its step\(\) changed {name}.* from \d to \d.*add it to state_dict"):
        for number in range(1, 4):
            script.step(number)


class Without(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


class ByName(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "param_groups": {"all": super().state_dict()["param_groups"][0]}}


class OtherKeys(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {"count": 3}}


def hooked(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters)
    optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "count": 3})
    return optimizer


def with_a_set(parameters: Any) -> torch.optim.Optimizer:
    optimizer = Kept(parameters)
    optimizer.count = {1, 2}
    return optimizer


REFUSED: dict[Any, str] = {
    Without: r"^optimizer 0: state_dict\(\) of Without has no 'state' and 'param_groups'",
    ByName: r"^optimizer 0: state_dict\(\) of ByName has no 'state' and 'param_groups'",
    OtherKeys: r"^optimizer 0: state_dict\(\) of OtherKeys has no 'state' and 'param_groups'",
    hooked: r"^optimizer 0: a hook adds 'count' to state_dict\(\) of SGD",
    with_a_set: r"^optimizer/0/more/count is of type set",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_state_dict_that_cannot_be_replicated_is_refused_when_it_is_registered(kind: Any) -> None:
    with pytest.raises(MisuseError, match=REFUSED[kind]):
        Script(kind)


def test_a_state_without_the_entries_is_refused_before_anything_is_changed() -> None:
    script = Script(Kept)
    script.step(1)
    state, weight = copied(script.engine.state()), script.model.weight.detach().clone()
    del state.scalars["optimizer/0/more/count"]  # type: ignore[attr-defined]
    for tensor in state.tensors.values():
        tensor.zero_()
    with pytest.raises(Fatal, match="lacks 'count' of optimizer/0"):
        script.engine.load(state)
    assert torch.equal(script.model.weight, weight)
    plain = Script(lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    with pytest.raises(Fatal, match="has 'count' of optimizer/0, which SGD does not take"):
        plain.engine.load(copied(script.engine.state()))


class Best(torch.optim.SGD):
    """What it knows stays unknown."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.best = float("nan")

    def step(self, closure: Any = None) -> Any:
        self.best = float("nan")
        return super().step(closure)


def test_a_number_that_is_not_known_and_stays_so_has_not_changed() -> None:
    script = Script(Best)
    for number in range(1, 4):
        script.step(number)


class Averaging(torch.optim.SGD):
    """Steps by an average that it keeps in an attribute; `kept`: in its state."""

    def __init__(self, parameters: Any, kept: bool = False) -> None:
        super().__init__(parameters, lr=0.1)
        self.average: dict[str, torch.Tensor] = {}
        self.first, self.kept = [*self.param_groups[0]["params"]], kept

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter, *_) = self.first
        held = self.state[parameter] if self.kept else self.average
        held["mean"] = 0.9 * held.get("mean", torch.zeros_like(parameter)) + parameter.grad
        super().step()


@pytest.mark.parametrize("kept", [False, True])
def test_a_tensor_outside_the_state_is_told_once(kept: bool, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(lambda parameters: Averaging(parameters, kept))
    for number in range(1, 5):
        script.step(number)
    told = [record.getMessage() for record in caplog.records if "keep it in state" in record.getMessage()]
    assert len(told) == (not kept)
    assert kept or told[0].startswith("optimizer 0: its step() changes the tensor Averaging.average, which state_dict()")


class Derived(torch.optim.AdamW):
    """As AdamW was when its groups lacked a key."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.step()

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["decoupled_weight_decay"] = True
        super().step(closure)
        del self.param_groups[0]["decoupled_weight_decay"]


def test_a_key_that_the_groups_of_an_older_class_lack_keeps_its_present_value() -> None:
    old, new = Script(Derived), Script(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    old.step(1)
    new.engine.load(copied(old.engine.state()))
    assert new.optimizer.param_groups[0]["decoupled_weight_decay"] is True
    for script in (old, new):
        script.step(2)
    assert torch.equal(old.model.weight, new.model.weight)


def test_the_state_of_another_class_is_refused() -> None:
    old, new = Script(torch.optim.AdamW), Script(lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    old.step(1)
    with pytest.raises(Fatal, match="has AdamW as optimizer/0, and the script SGD; resume with AdamW"):
        new.engine.load(copied(old.engine.state()))


class OwnRate(torch.optim.SGD):
    """Its learning rate comes from a function in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0] |= {"lr": None, "of": lambda step: 0.1 / step, "number": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        group["number"] += 1
        for parameter in group["params"]:
            parameter.sub_(parameter.grad, alpha=group["of"](group["number"]))


def test_a_group_may_have_functions_and_no_rate() -> None:
    one, other = Script(OwnRate), Script(OwnRate)
    one.step(1)
    other.engine.load(copied(one.engine.state()))
    for script in (one, other):
        script.step(2)
    same_state(one.engine.state(), other.engine.state())
    with pytest.raises(MisuseError, match=r"optimizer 0 \(OwnRate\) has a group without lr, which lr_policy='sqrt'"):
        ModuleEngine(Registered.of(one.model, [one.optimizer]), policy=Policy("sqrt"))


class Wrapping(torch.Tensor):
    """A tensor whose numbers are in another one, as those of quantized optimizers."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


class Quantized(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["moment"] = Wrapping(parameter.detach())


def test_state_in_tensors_that_stand_for_others_is_refused() -> None:
    script = Script(Quantized)
    script.step(1)
    with pytest.raises(MisuseError, match="optimizer/0/state/weight/moment is a Wrapping, a tensor that stands for others"):
        script.engine.state()
