"""What the ranks of sharded replicas run in tests/engines/test_sharded.py: each process is one dp_shard rank of two replicas.

Both replicas' engines live in the same process and share the inner group, so the test sums their buckets itself, and a plain
loop over the whole model says what must come out.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from helixrt.collectives.gloo_groups_private import one_gloo_worker
from helixrt.engines.inner_group import InnerGroup, lost_rank
from helixrt.engines.module import ModuleEngine
from helixrt.engines.random_state import set_random_state
from helixrt.engines.registered import Registered
from helixrt.engines.sharded import blocks, is_sharded, shard_model
from helixrt.errors import Fatal, MisuseError, Retryable
from helixrt.replica.contracts import State
from tests.engines.scenarios import answer, lost, raises, record, same_state, summed
from tests.engines.schedule_free import ScheduleFree
from tests.engines.sharded_model import INPUTS, Block, Model, Reused

SEED, REPLICAS = 5, 2


class Trained:
    """A model with its optimizer, and the loss of a micro-batch; `kind_of(replica, rank, position)` picks the branch."""

    MODEL: type[Model] = Model
    MAKE: Callable[[Any], torch.optim.Optimizer] = staticmethod(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))

    def __init__(
        self, width: int, kinds: int, kind_of: Callable[[int, int, int], int], group: InnerGroup | None = None
    ) -> None:
        torch.manual_seed(1)
        self.model, self.kind_of = self.MODEL(width, kinds), kind_of
        if group is not None:
            shard_model(self.model, group, torch.float32)
        self.optimizer: torch.optim.Optimizer = self.MAKE(self.model.parameters())
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def loss(self, replica: int, rank: int, position: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(10_000 * replica + 100 * rank + position)
        rows = 3 + (replica + rank + position) % 3
        x = torch.randn(rows, INPUTS, generator=generator)
        return F.mse_loss(self.model(x, self.kind_of(replica, rank, position)), x[:, :1], reduction="sum"), rows


class Replica(Trained):
    def __init__(self, replica: int, group: InnerGroup, *args: Any, **options: Any) -> None:
        super().__init__(*args, group)
        self.replica, self.group = replica, group
        registered = Registered.of(self.model, [self.optimizer], [self.scheduler], clip_norm=0.5)
        settings = {"replica": replica, "replicas": REPLICAS, "seed": SEED, "bucket_bytes": 128, "group": group, **options}
        self.engine = ModuleEngine(registered, **settings)
        self.handed_out: list[int] = []

    def work(self, step: int, accumulate: int) -> Any:
        self.handed_out = []
        self.engine.begin(self.handed_out.append)
        for number in range(accumulate):
            position = (step - 1) * accumulate + number
            self.engine.seed(position)
            loss, weight = self.loss(self.replica, self.group.rank, position)
            assert not self.handed_out, "a bucket was handed out before the last micro-batch"
            self.engine.backward(loss, weight, last=number == accumulate - 1)
        if self.MODEL is Model:
            assert len(self.handed_out) == len(self.engine.buckets) - len(self.engine._book.tensors), "not within backward"
        return self.engine.end()


def plain_step(p: Trained, step: int, contributors: tuple[int, ...], ranks: int, accumulate: int, mode: str) -> float:
    """One step of one process over the union of all ranks' micro-batches; the mean loss."""
    before = {name: buffer.clone() for name, buffer in p.model.named_buffers()}
    after: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    total: dict[nn.Parameter, torch.Tensor] = {}
    items, losses = 0, 0.0
    for replica in contributors:
        for rank in range(ranks):
            p.model.zero_grad()
            for name, buffer in p.model.named_buffers():
                buffer.copy_(before[name])
            for position in range((step - 1) * accumulate, step * accumulate):
                set_random_state(SEED, replica, rank, position)
                loss, weight = p.loss(replica, rank, position)
                loss.backward()
                items, losses = items + weight, losses + float(loss)
            after[replica, rank] = {name: buffer.clone() for name, buffer in p.model.named_buffers()}
            for parameter in p.model.parameters():
                if parameter.grad is not None:
                    total[parameter] = total.get(parameter, 0) + parameter.grad  # type: ignore[operator]
    for name, buffer in p.model.named_buffers():
        values = torch.stack([each[name] for each in after.values()])
        if buffer.is_floating_point():
            buffer.copy_(values.double().mean(0) if mode == "mean" else after[min(contributors), 0][name])
        else:
            buffer.copy_(values.amax(0))
    for parameter in p.model.parameters():
        parameter.grad = total[parameter].div_(float(items)) if parameter in total else None
    nn.utils.clip_grad_norm_(p.model.parameters(), 0.5)
    p.optimizer.step()
    p.scheduler.step()
    return losses / items


# ---------------------------------------------------------------- scenarios: each raises if something is wrong


def trains_as_one_process(group: InnerGroup) -> None:
    """Random widths, branches, contributors and modes; a branch that one rank took and another did not counts."""
    for seed in range(4):
        rng = random.Random(seed)
        width, kinds, accumulate, mode = rng.randint(1, 9), rng.randint(1, 3), rng.randint(1, 3), rng.choice(["mean", "first"])
        choice = [rng.randrange(kinds) for _ in range(97)]
        kind_of = lambda replica, rank, position, c=choice: c[(31 * replica + 7 * rank + position) % 97]  # noqa: E731
        plain = Trained(width, kinds, kind_of)
        replicas = [Replica(r, group, width, kinds, kind_of, buffers=mode) for r in range(REPLICAS)]
        for step in range(1, 4):
            contributors = rng.choice([(0, 1), (0, 1), (0,), (1,)])
            chosen = [replicas[r] for r in contributors]
            for replica in chosen:
                replica.work(step, accumulate)
                assert sorted(replica.handed_out) == list(range(len(replica.engine.buckets)))
                grads = replica.handed_out[: -len(replica.engine._book.tensors)]
                assert grads == sorted(grads, reverse=True), "the order of buckets must be the same on every replica"
            sums = summed([replica.engine for replica in chosen])
            expected = plain_step(plain, step, contributors, group.size, accumulate, mode)
            updates = [replica.engine.apply(record(step, contributors), sums) for replica in replicas]
            assert abs(float(updates[0].loss) - expected) <= 1e-5 * abs(expected), (seed, step)
            assert len({float(update.grad_norm).hex() for update in updates}) == 1
            same_state(replicas[0].engine.state(), replicas[1].engine.state())
            compare(plain, replicas[0], f"seed {seed}, step {step}")
            for name, parameter in replicas[0].model.named_parameters():
                assert (parameter.grad is None) == (dict(plain.model.named_parameters())[name].grad is None), name
        norms = group.gather(torch.tensor([float(updates[0].grad_norm)], dtype=torch.float64))
        assert all(torch.equal(norm, norms[0]) for norm in norms), "the norm must be equal on all ranks"


def reused_blocks_and_scalars_train_as_one_process(group: InnerGroup) -> None:
    Trained.MODEL = Reused
    try:
        trains_as_one_process(group)
        loads_its_shard(group)
    finally:
        Trained.MODEL = Model


def compare(plain: Trained, replica: Replica, when: str) -> None:
    whole = dict(plain.model.named_parameters())
    for name, parameter in replica.model.named_parameters():
        found = parameter.full_tensor() if is_sharded(parameter) else parameter.data
        torch.testing.assert_close(found, whole[name].data, rtol=2e-5, atol=2e-6, msg=f"{when}: {name}")
    buffers = dict(plain.model.named_buffers())
    for name, buffer in replica.model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-5, atol=1e-6, msg=f"{when}: {name}")


def loads_its_shard(group: InnerGroup) -> None:
    """A fresh engine takes the state of an equal rank, also where its optimizer has none yet, and goes on alike."""
    kind_of = lambda replica, rank, position: position  # noqa: E731
    donor, fresh = (Replica(r, group, 5, 2, kind_of) for r in range(REPLICAS))
    for step in (1, 2):
        donor.work(step, 1)
        donor.engine.apply(record(step, (0,)), summed([donor.engine]))
    state = donor.engine.state()
    parameters = sum(p.numel() for p in donor.model.parameters())
    mine = sum(tensor.numel() for name, tensor in state.tensors.items() if name.startswith("parameter/"))
    held = parameters + (group.size - 1) * (Trained.MODEL is Reused)  # each rank holds the scalar
    assert mine < parameters and sum(int(n) for n in group.gather(torch.tensor([mine]))) == held
    copy = State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars))
    fresh.engine.load(copy)
    same_state(state, fresh.engine.state())
    moments = fresh.optimizer.state[fresh.model.first.weight]["exp_avg"]
    assert moments.placements == fresh.model.first.weight.placements and moments.shape == fresh.model.first.weight.shape
    donor.work(3, 1)
    sums = summed([donor.engine])
    for replica in (donor, fresh):
        replica.engine.apply(record(3, (0,)), sums)
    same_state(donor.engine.state(), fresh.engine.state())
    wrong = State(copy.tensors, {**copy.scalars, "dtensor/parameter/first.weight": "[[5, 6], [6, 1], [null], 2]"})
    raises(Fatal, "placement|cut for", lambda: fresh.engine.load(wrong))


def other_optimizers_train_as_one_process(group: InnerGroup) -> None:
    """Fused and foreach updates, momentum, and tensors that are no shards in an optimizer's state; each state is loaded."""
    makes: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
        lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.3, nesterov=False),
        lambda p: torch.optim.NAdam(p, lr=1e-2),
    ]
    try:
        for number, make in enumerate(makes):
            Trained.MAKE = staticmethod(make)
            plain = Trained(6, 1, lambda *_: 0)
            donor, fresh = (Replica(r, group, 6, 1, lambda *_: 0) for r in range(REPLICAS))
            for step in (1, 2, 3):
                donor.work(step, 1)
                donor.engine.apply(record(step, (0,)), summed([donor.engine]))
                plain_step(plain, step, (0,), group.size, 1, "mean")
                compare(plain, donor, f"optimizer {number}, step {step}")
            state = donor.engine.state()
            fresh.engine.load(State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars)))
            same_state(state, fresh.engine.state())
            donor.work(4, 1)
            sums = summed([donor.engine])
            for replica in (donor, fresh):
                replica.engine.apply(record(4, (0,)), sums)
            same_state(donor.engine.state(), fresh.engine.state())
    finally:
        Trained.MAKE = staticmethod(lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1))


def an_evaluation_changes_nothing(group: InnerGroup) -> None:
    """A forward without backward leaves gathered parameters; the update and the next forward use the sharded ones."""
    kind_of = lambda replica, rank, position: 0  # noqa: E731
    evaluated, other = (Replica(0, group, 5, 1, kind_of) for _ in range(2))
    for step in (1, 2, 3):
        for replica in (evaluated, other):
            replica.work(step, 1)
            if replica is evaluated:
                replica.model.eval()
                with torch.no_grad():
                    replica.loss(0, group.rank, 77)
                replica.model.train()
            replica.engine.apply(record(step, (0,)), summed([replica.engine]))
    same_state(evaluated.engine.state(), other.engine.state())


def averaged_weights_are_evaluated_and_put_back(group: InnerGroup) -> None:
    made, Trained.MAKE = Trained.MAKE, staticmethod(ScheduleFree)
    try:
        evaluated, other = (Replica(0, group, 5, 1, lambda *_: 0) for _ in range(2))
        for step in (1, 2, 3):
            losses = []
            for replica in (evaluated, other):
                replica.work(step, 1)
                replica.engine.apply(record(step, (0,)), summed([replica.engine]))
                for _ in range(2 if replica is evaluated else 0):
                    with replica.engine.evaluating(), torch.no_grad():
                        replica.model.eval()
                        losses.append(float(replica.loss(0, group.rank, 77)[0]))
            same_state(evaluated.engine.state(), other.engine.state())
            other.model.eval()
            with torch.no_grad():
                trained = float(other.loss(0, group.rank, 77)[0])
            other.model.train()
            assert losses[0] == losses[1] != trained, (losses, trained)
    finally:
        Trained.MAKE = staticmethod(made)


def what_cannot_be_trained_is_refused(group: InnerGroup) -> None:
    def engine(model: nn.Module, group: InnerGroup | None, **more: Any) -> ModuleEngine:
        return ModuleEngine(Registered.of(model, [torch.optim.SGD(model.parameters(), lr=0.1)], **more), group=group)

    raises(
        MisuseError, "is a DTensor, and a replica is one rank", lambda: engine(shard_model(Model(), group, torch.float32), None)
    )
    raises(
        MisuseError,
        "scale is not sharded over the 2|scale is not sharded over the 3",
        lambda: engine_of_half_sharded(engine, group),
    )
    factors = Registered.of(
        sharded := shard_model(Model(), group, torch.float32), [torch.optim.Adafactor(sharded.parameters())]
    )
    raises(MisuseError, "Adafactor does not work on sharded", lambda: ModuleEngine(factors, group=group))
    scaler = torch.amp.GradScaler("cpu")
    raises(MisuseError, "scaler", lambda: engine(shard_model(Model(), group, torch.float32), group, scaler=scaler))
    with torch.device("meta"):
        empty = Model()
    raises(MisuseError, "meta device", lambda: shard_model(empty, group, torch.float32))
    unsynced = Replica(0, group, 5, 1, lambda *_: 0)
    unsynced.model.blocks[1].set_requires_gradient_sync(False)
    raises(MisuseError, r"set_requires_gradient_sync\(False\) was called on blocks.1", lambda: unsynced.work(1, 1))
    changed = Replica(0, group, 5, 1, lambda *_: 0)
    with torch.no_grad():
        changed.model.blocks[0].never.weight.mul_(2.0)
    raises(MisuseError, "blocks.0.never.weight was changed in place", lambda: changed.work(1, 1))
    twice = Replica(0, group, 5, 1, lambda *_: 0)
    x = torch.ones(3, INPUTS, requires_grad=True)
    twice.engine.begin(lambda bucket: None)
    (slope,) = torch.autograd.grad(twice.model(x, 0).sum(), x, create_graph=True)
    more = lambda: twice.engine.backward(slope.square().sum(), 1, last=True)  # noqa: E731
    raises(MisuseError, "nor torch.autograd.grad through the model: with dp_shard", more)
    clipped = Replica(0, group, 5, 1, lambda *_: 0)
    clipped.engine.begin(lambda bucket: None)
    clipped.engine.backward(*clipped.loss(0, group.rank, 0), last=False)
    clipped.model.first.weight.grad.mul_(0.5)
    more = lambda: clipped.engine.backward(*clipped.loss(0, group.rank, 1), last=True)  # noqa: E731
    raises(MisuseError, "the gradient of first.weight was changed within the step", more)
    for head in (nn.Linear(1, 1), shard_model(nn.Sequential(nn.Linear(1, 1)), group, torch.float32)):
        body = shard_model(Model(), group, torch.float32)
        partly = engine(body, group)
        partly.begin(lambda bucket: None)
        loss = head(body(torch.ones(2, INPUTS), 0)).sum()
        raises(MisuseError, "the loss depends on .* is not registered", partial(partly.backward, loss, last=True))
        partly.close()


def engine_of_half_sharded(engine: Any, group: InnerGroup) -> ModuleEngine:
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=group.mesh)
    return engine(model, group)


def own_fully_shard_and_bfloat16(group: InnerGroup) -> None:
    """The user's own `fully_shard` is kept; with bfloat16, gradients and state stay float32 and the loss is close."""
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(2)
        model = Model(8, 1)
        model.norm = nn.LayerNorm(8)  # batch normalization takes no bfloat16 weights with float32 statistics on the CPU
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        fully_shard(model.blocks[0], mesh=group.mesh, mp_policy=policy, reshard_after_forward=False)
        shard_model(model, group, dtype)
        engine = ModuleEngine(
            Registered.of(model, [torch.optim.AdamW(model.parameters(), lr=1e-2)]), group=group, bucket_bytes=64
        )
        x = torch.randn(6, INPUTS, generator=torch.Generator().manual_seed(group.rank))
        for step in range(1, 9):
            engine.begin(lambda bucket: None)
            engine.seed(step)
            out = model(x, 0)
            assert out.dtype is torch.float32
            engine.backward(F.mse_loss(out, x[:, :1], reduction="sum"), len(x), last=True)
            engine.end()
            update = engine.apply(record(step, (0,)), [bucket.clone() for bucket in engine.buckets])
        assert {b.dtype for b in engine.buckets} <= {torch.float32, torch.float64, torch.int64}
        assert all(t.dtype is not torch.bfloat16 for t in engine.state().tensors.values())
        losses.append(float(update.loss))
    assert losses[0] != losses[1] and abs(losses[0] - losses[1]) < 0.2 * abs(losses[0]), losses


def blocks_are_found(group: InnerGroup) -> None:
    assert blocks(Model(depth=3)) and [type(b) for b in blocks(Model(depth=3))] == [Block] * 3
    mixed = nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Tanh()]), nn.ModuleList([nn.Linear(2, 2)] * 2))
    assert blocks(mixed) == [mixed[1][0]]
    layers = nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})
    branches = nn.ModuleDict({"left": nn.Linear(2, 2), "right": nn.Linear(2, 2)})
    assert blocks(nn.Sequential(branches, layers)) == [layers["0"], layers["1"]]
    named = nn.Sequential(Model(depth=2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]))
    named._no_split_modules = ["Model"]
    assert blocks(named) == [named[0]]


def a_lost_rank_is_told(group: InnerGroup) -> None:
    """The last scenario: rank 0 ends in the middle of a step, and the others' collectives fail at once."""
    replica = Replica(0, group, 5, 1, lambda *_: 0)
    replica.work(1, 1)
    if group.rank == 0:
        os._exit(9)
    with lost():
        replica.loss(0, group.rank, 1)
        replica.work(2, 1)
    raises(Retryable, "a rank of this replica is lost", lambda: group.gather(torch.ones(2)))
    assert not lost_rank(RuntimeError("of the user's own code"))


SCENARIOS = [
    blocks_are_found,
    trains_as_one_process,
    reused_blocks_and_scalars_train_as_one_process,
    loads_its_shard,
    other_optimizers_train_as_one_process,
    an_evaluation_changes_nothing,
    averaged_weights_are_evaluated_and_put_back,
    what_cannot_be_trained_is_refused,
    own_fully_shard_and_bfloat16,
    a_lost_rank_is_told,
]


def run(rank: int, size: int, rendezvous: str, results: Any) -> None:
    """All scenarios in turn; for each (rank, name, what went wrong or "")."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(rendezvous, size)
    one_gloo_worker()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    group = InnerGroup(init_device_mesh("cpu", (size,), mesh_dim_names=("dp_shard",)))
    answer(rank, SCENARIOS, lambda: group, results)
