"""The wrong scripts that a user may write: each ends in one clear error.

Where a wrong script needs several processes to show, the rule that finds it is tested here in one process, and
`test_launch.py` runs the script itself (`no guard`, `other layout`, `longer loader`, `exception`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import helixrt
from helixrt.errors import ConfigError, HelixError, MisuseError
from helixrt.job.agreements import LayoutAgreement
from helixrt.job.config import CheckpointConfig, JobConfig
from helixrt.job.session import Session
from helixrt.job.starters import REPLICA, STORE, place_of
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.protocol.step.lineage import CommitRecord, genesis
from helixrt.replica.store import MemoryRunStore
from tests.job.session_world import LocalHost, batches, ready, session_with, summed, tiny, worked


def no_commit() -> None:
    session, model = ready()
    for _ in worked(session, model, until=2):
        pass


def commit_twice() -> None:
    session, model = ready()
    for step in worked(session, model, until=2):
        step.commit()
        step.commit()


def backward_after_commit() -> None:
    session, model = ready()
    for step in worked(session, model, until=2):
        step.commit()
        step.backward(summed(model, *batches()[0]))


def backward_twice() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2):
        for x, y in step:
            step.backward(summed(model, x, y))
            step.backward(summed(model, x, y))


def backward_before_a_batch() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2):
        step.backward(summed(model, *batches()[0]))


def skipped_after_backward() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2):
        for x, y in step:
            step.backward(summed(model, x, y))
            step.skip()


def no_loss() -> None:
    session, _ = ready()
    for step in session.steps(batches(), until=2):
        for _ in step:
            step.backward(None)  # type: ignore[arg-type]


def own_backward() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2):
        for x, y in step:
            summed(model, x, y).backward()
        step.commit()


def micro_batches_left() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2, accumulate=3):
        for x, y in step:
            step.backward(summed(model, x, y))
            break
        step.commit()


def micro_batches_twice() -> None:
    session, model = ready()
    for step in worked(session, model, until=2):
        for _ in step:
            pass


def loss_without_gradient() -> None:
    session, model = ready()
    for step in session.steps(batches(), until=2):
        for x, y in step:
            step.backward(summed(model, x, y).detach())


def unregistered_optimizer() -> None:
    session, model = ready()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in worked(session, model, until=2):
        optimizer.step()
        step.commit()


def own_clipping() -> None:
    session, model = ready()
    for step in worked(session, model, until=2):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        step.commit()


def registered_optimizer_step_by_hand() -> None:
    session = session_with(LocalHost())
    model = tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizers=[optimizer])
    for step in worked(session, model, until=2):
        optimizer.step()
        step.commit()


def parameter_changed() -> None:
    session, model = ready()
    for step in worked(session, model, until=3):
        step.commit()
        with torch.no_grad():
            next(model.parameters()).mul_(0.5)


def parameter_changed_through_data() -> None:
    session, model = ready()
    for step in worked(session, model, until=3):
        step.commit()
        for parameter in model.parameters():
            parameter.data.clamp_(-0.01, 0.01)


def frozen_later() -> None:
    session, model = ready()
    for step in worked(session, model, until=3):
        step.commit()
        next(model.parameters()).requires_grad_(False)


def group_added_later() -> None:
    session, model = session_with(LocalHost()), tiny()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    session.register(model=model, optimizers=[optimizer])
    session.update(lambda record: optimizer.step())
    for step in worked(session, model, until=3):
        step.commit()
        optimizer.add_param_group({"params": model[0].parameters()})


def something_else_frozen() -> None:
    session, model = ready()
    session.freeze(lambda step: [tiny()[0]])
    next(worked(session, model, until=3))


def nothing_registered() -> None:
    next(iter(session_with(LocalHost()).steps(batches(), until=1)))


def registered_twice() -> None:
    session, model = ready()
    session.register(model=model)


def steps_twice() -> None:
    session, model = ready()
    for _ in range(2):
        for step in worked(session, model, until=1):
            step.commit()


def log_before_commit() -> None:
    session, model = ready()
    for _ in session.steps(batches(), until=1):
        session.log({"loss": 1.0})


def log_of_a_vector() -> None:
    session, model = ready()
    for step in worked(session, model, until=1):
        step.commit()
        session.log({"x": batches()[0][0]})


def data_parallel_inside() -> None:
    session = session_with(LocalHost())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(tiny())
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    finally:
        torch.distributed.destroy_process_group()


def sparse_embedding() -> None:
    session_with(LocalHost()).register(model=nn.Sequential(nn.Embedding(4, 4, sparse=True)))


def odd_state_entry() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"callback": [print]}

        def load_state_dict(self, state: Any) -> None: ...

    model = tiny()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    session_with(LocalHost()).register(model=model, optimizers=optimizers, extra={"odd": Odd()})


def mesh_that_does_not_divide_the_world() -> None:
    place_of({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "3", STORE: "127.0.0.1:1", REPLICA: "0"})


def unseeded_order() -> None:
    session, _ = ready()
    data = TensorDataset(torch.randn(8, 4))
    next(iter(session.steps(DataLoader(data, 2, shuffle=True), until=1)))


def longer_loader_on_one_rank() -> None:
    store = MemoryRunStore()
    for replica in range(2):
        session, _ = ready(LocalHost(store=store), replica=replica, replicas=2)
        next(iter(session.steps(batches(12 + replica), until=1)))


def other_layout_on_one_replica() -> None:
    store = MemoryRunStore()
    for width in (6, 7):
        session = session_with(LocalHost(store=store))
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
        next(iter(session.steps(batches(), until=1)))


def top_level(session: Session) -> None: ...


def log_without_a_name() -> None:
    session, model = ready()
    for step in worked(session, model, until=2):
        session.log(step.commit().loss)  # type: ignore[arg-type]


def scheduler_made_later() -> None:
    session = session_with(LocalHost())
    model = session.parallelize(tiny())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.register(model=model, optimizers=optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for step in worked(session, model, until=2):
        step.commit()


def clip_norm_as_text() -> None:
    session = session_with(LocalHost())
    model = session.parallelize(tiny())
    session.register(model=model, optimizers=torch.optim.SGD(model.parameters()), clip_norm="1")  # type: ignore[arg-type]


def until_as_text() -> None:
    session, _ = ready()
    next(iter(session.steps(batches(), until="10")))  # type: ignore[arg-type]


def lambda_as_train() -> None:
    helixrt.run(lambda session: None)


def no_main_guard() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANK_VARIABLE, "r1")  # as in the process of a rank, which imports the script
        helixrt.run(top_level)


WRONG: dict[str, tuple[Callable[[], None], type[HelixError], str]] = {
    "no commit": (no_commit, MisuseError, r"step 1 was not committed; call step\.commit\(\)"),
    "commit twice": (commit_twice, MisuseError, r"step\.commit was called a second time after the commit of step 1"),
    "backward after commit": (backward_after_commit, MisuseError, r"step\.backward was called after the commit of step 1"),
    "own clipping of local gradients": (
        own_clipping,
        MisuseError,
        r"the gradient of .* was changed after its bucket was handed out.*register\(clip_norm",
    ),
    "optimizer.step by hand": (registered_optimizer_step_by_hand, MisuseError, r"SGD\.step\(\) was called in the loop"),
    "parameter changed in place": (parameter_changed, MisuseError, r"parameter 0\.weight was changed in place"),
    "unregistered optimizer": (
        unregistered_optimizer,
        MisuseError,
        r"SGD\.step\(\) was called, and this optimizer is not registered",
    ),
    "parameters frozen later": (
        frozen_later,
        MisuseError,
        r"parameter 0\.weight was frozen after it was registered.* in a function registered by session\.freeze",
    ),
    "group added later": (group_added_later, MisuseError, r"a parameter group was added.* registered by session\.freeze"),
    "something else frozen": (something_else_frozen, MisuseError, r"session\.freeze returned something that no"),
    "layout differs between replicas": (
        other_layout_on_one_replica,
        MisuseError,
        r"differs from the replica that began first: parameter/0\.weight is float32\[7, 4\]",
    ),
    "loader longer on one rank": (
        longer_loader_on_one_rank,
        MisuseError,
        r"batches per epoch=13 in stream 1/0, and \d+ in stream 0/0",
    ),
    "unseeded order": (unseeded_order, ConfigError, r"has an unseeded order; use sampler=session\.sampler"),
    "lambda as train": (lambda_as_train, ConfigError, r"is a lambda; ranks import it by its name"),
    "no __main__ guard": (no_main_guard, MisuseError, r"put the call under `if __name__ == "),
    "loss without grad": (loss_without_gradient, MisuseError, r"loss depends on no parameter that requires a gradient"),
    "sparse embedding": (sparse_embedding, MisuseError, r"embedding with sparse=True"),
    "DDP inside": (data_parallel_inside, MisuseError, r"is a DistributedDataParallel"),
    "mesh that does not divide the world": (
        mesh_that_does_not_divide_the_world,
        ConfigError,
        r"WORLD_SIZE=3: Mesh\(\) has 1 rank in each replica: start torchrun once for each replica, with 1 process",
    ),
    "state entry that cannot be stored": (
        odd_state_entry,
        MisuseError,
        r"extra/odd/callback/\[0\] is of type builtin_function",
    ),
    "parameter changed through data": (
        parameter_changed_through_data,
        MisuseError,
        r"parameter .* was changed in place, through its `data`",
    ),
    "backward twice": (backward_twice, MisuseError, r"called twice in micro-batch 1 of step 1; add the losses"),
    "backward before a batch": (
        backward_before_a_batch,
        MisuseError,
        r"before a micro-batch was taken: `for batch in step:` comes first",
    ),
    "skip after backward": (skipped_after_backward, MisuseError, r"step\.skip was called twice in micro-batch 1 of step 1"),
    "no loss": (no_loss, MisuseError, r"the loss is a NoneType, not a tensor; .*call step\.skip\(\)"),
    "loss.backward": (own_backward, MisuseError, r"do not call loss\.backward\(\)|had 0 calls of step\.backward"),
    "micro-batches left": (micro_batches_left, MisuseError, r"step 1 was committed after 1 of 3 backwards"),
    "micro-batches twice": (micro_batches_twice, MisuseError, r"micro-batches of step 1 were iterated over before"),
    "nothing registered": (nothing_registered, MisuseError, r"session\.register\(model=.*must come first"),
    "registered twice": (registered_twice, MisuseError, r"session\.register was called twice"),
    "steps twice": (steps_twice, MisuseError, r"session\.steps was called twice"),
    "log before commit": (log_before_commit, MisuseError, r"session\.log comes after step\.commit\(\)"),
    "clip_norm as text": (clip_norm_as_text, ConfigError, r"clip_norm=1: must be a number or None, and is a str"),
    "until as text": (until_as_text, ConfigError, r"until=10: must be an integer, and is a str"),
    "log without a name": (log_without_a_name, MisuseError, r"session\.log takes \{name: number\}, not a float"),
    "scheduler made later": (scheduler_made_later, MisuseError, r"by a scheduler that was made after session\.register"),
    "log of a vector": (log_of_a_vector, MisuseError, r"'x' is a Tensor; what is logged are numbers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_script_ends_in_one_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    script, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        script()


def test_layouts_are_compared_again_when_optimizers_have_made_their_state() -> None:
    """Equal before the first step, and not after it: one replica's AdamW keeps one more tensor per parameter."""
    store = MemoryRunStore()
    record = CommitRecord(1, 1, genesis("run", 2).hash, ((0, 0), (1, 0)), {0: 1, 1: 1}, "run")
    agreements = []
    for amsgrad in (False, True):
        session = session_with(LocalHost(store=store))
        model = tiny()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=amsgrad)
        session.register(model=model, optimizers=[optimizer])
        engine = session._registered()
        agreements.append(LayoutAgreement(store, 0, engine))
        agreements[-1].initial()
        engine.begin(lambda bucket: None)
        engine.backward(summed(model, *batches()[0]), last=True)
        engine.end()
        engine.apply(record, [bucket.clone() for bucket in engine.buckets])
    agreements[0].updated(record)
    expected = r"after the update .*: optimizer/0/state/0\.weight/max_exp_avg_sq is one too many"
    with pytest.raises(MisuseError, match=expected):
        agreements[1].updated(record)


class Breaks(torch.autograd.Function):
    """Its backward raises the first time, when layers behind it have their gradients already."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        Breaks.calls += 1
        if Breaks.calls == 1:
            raise RuntimeError("out of memory")
        return grads[0]


@pytest.mark.parametrize("then", ["backward", "commit", "next"])
def test_a_backward_that_has_failed_is_not_counted_twice(then: str) -> None:
    """The loop catches an out-of-memory error and tries again."""
    Breaks.calls = 0
    session = session_with(LocalHost())
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(MisuseError, match="step.backward in micro-batch 1 of step 1 has raised an exception, so gradients"):
        for step in session.steps([torch.ones(2, 3)] * 4, until=2, accumulate=2):
            for x in step:
                with pytest.raises(RuntimeError, match="out of memory"):
                    step.backward(model[1](Breaks.apply(model[0](x))).sum())
                if then == "backward":
                    step.backward(model(x).sum())
                elif then == "commit":
                    step.commit()


def test_a_second_evaluation_and_a_norm_that_nobody_clips_to_are_refused() -> None:
    session, _ = ready()
    session.evaluate(lambda: 1.0, every=2)
    with pytest.raises(MisuseError, match="a session has one evaluation"):
        session.evaluate_shared(lambda part: helixrt.PartSums({}, 0.0), every=5)
    session, model = ready(LocalHost(), {"clip_norm": 1.0})
    with pytest.raises(MisuseError, match="clip_norm= is used by the default update alone"):
        session.update(lambda record: None)


@pytest.mark.parametrize(
    ("base", "option"),
    [
        ({"step_timeout_s": 600.0}, "step_timeout_s=600.0"),
        ({"checkpoint": CheckpointConfig(every=500)}, "checkpoint_every=500"),
        ({"restarts": 9}, "restarts=9"),
    ],
)
def test_a_setting_that_an_option_would_overwrite_is_refused(base: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=f"would be overwritten: give {option} in RunOptions instead"):
        helixrt.RunOptions(base=JobConfig(**base))
    name, _, value = option.partition("=")
    kept = helixrt.RunOptions(base=JobConfig(**base), **{name: type(getattr(helixrt.RunOptions(), name))(float(value))})
    assert str(getattr(kept, name)) == value
    assert helixrt.RunOptions(base=JobConfig(on_poison="skip")).base.on_poison == "skip"
