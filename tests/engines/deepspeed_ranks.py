"""What the ranks run in tests/engines/test_deepspeed.py: each process is one dp_shard rank of two replicas' DeepSpeed engines.

As in `sharded_ranks` both replicas' engines live in one process and share the inner group, the test sums their buckets itself,
and a plain loop over the whole model says what must come out.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from helixrt.engines.deepspeed import DeepSpeedEngine
from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.stream_marks import StreamMarks
from helixrt.errors import ConfigError, Fatal, MisuseError, Retryable
from helixrt.job.checkpoint_layout import Index, PartIndex, RankPart
from helixrt.job.checkpoint_restore import restored
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State
from tests import ranks_context
from tests.engines.scenarios import answer, lost, raises, record, same_state, summed

REPLICAS, ACCUMULATE, INPUTS, CLIP = 2, 2, 6, 0.05
KINDS = [(1, "float32", ""), (2, "float32", ""), (3, "float32", ""), (1, "bf16", "fp32"), (2, "bf16", "fp32"), (3, "bf16", "")]


class Model(nn.Module):
    """A width that two ranks cannot divide, a parameter that nothing uses, one that is frozen, and a norm with buffers (or, for
    bfloat16, which batch normalization on the CPU does not take, one without)."""

    def __init__(self, buffers: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(INPUTS, 7)
        self.norm = nn.BatchNorm1d(7) if buffers else nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7)
        self.never = nn.Linear(7, 1)
        self.last = nn.Linear(7, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.frozen(self.norm(self.first(x)))))


def made(buffers: bool = True) -> Model:
    torch.manual_seed(1)
    return Model(buffers)


def config(stage: int, dtype: str = "float32", accumulated: str = "", **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": CLIP,
        "steps_per_print": 10_000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 8,
            "reduce_bucket_size": 4096,  # elements, which each engine allocates
            **more.pop("zero", {}),
        },
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 1e-2}},
        **more,
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if accumulated:
        found["data_types"] = {"grad_accum_dtype": accumulated}
    return found


def initialized(settings: dict[str, Any], model: nn.Module | None = None) -> Any:
    import deepspeed

    model = made("bf16" not in settings) if model is None else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=settings)[0]


def rows(replica: int, rank: int, position: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10_000 * replica + 100 * rank + position)
    return torch.randn(3 + (replica + rank + position) % 3, INPUTS, generator=generator)


class Replica:
    def __init__(self, replica: int, group: InnerGroup, settings: dict[str, Any]) -> None:
        self.replica, self.rank = replica, group.rank
        self.deepspeed = initialized(settings)
        self.dtype = next(self.deepspeed.module.parameters()).dtype
        self.engine = DeepSpeedEngine(self.deepspeed, group, replica=replica, replicas=REPLICAS, bucket_bytes=64)

    def work(self, step: int, *, micro_batches: int = ACCUMULATE) -> Any:
        handed_out: list[int] = []
        self.engine.begin(handed_out.append)
        for number in range(micro_batches):
            position = (step - 1) * ACCUMULATE + number
            self.engine.seed(position)
            x = rows(self.replica, self.rank, position).to(self.engine.device, self.dtype)
            loss = F.mse_loss(self.deepspeed(x).float(), x[:, :1].float(), reduction="sum")
            self.engine.backward(loss, len(x), last=number == ACCUMULATE - 1)
        if micro_batches < ACCUMULATE:
            return None
        result = self.engine.end()
        assert sorted(handed_out) == list(range(len(self.engine.buckets))) and handed_out == sorted(handed_out, reverse=True)
        return result


class Plain:
    """One process over the union of all ranks' micro-batches, in float32."""

    def __init__(self, buffers: bool) -> None:
        self.model = made(buffers)
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-2, weight_decay=0.1)

    def step(self, step: int, contributors: tuple[int, ...], ranks: int, rate: float) -> float:
        before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        after = []
        self.model.zero_grad()
        items, losses = 0, 0.0
        for replica in contributors:
            for rank in range(ranks):
                for name, buffer in self.model.named_buffers():
                    buffer.copy_(before[name])
                for position in range((step - 1) * ACCUMULATE, step * ACCUMULATE):
                    x = rows(replica, rank, position)
                    loss = F.mse_loss(self.model(x), x[:, :1], reduction="sum")
                    loss.backward()
                    items, losses = items + len(x), losses + float(loss)
                after.append({name: buffer.clone() for name, buffer in self.model.named_buffers()})
        for name, buffer in self.model.named_buffers():
            values = torch.stack([each[name] for each in after])
            buffer.copy_(values.double().mean(0) if buffer.is_floating_point() else values.amax(0))
        for parameter in self.trained:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.div_(float(items))
        nn.utils.clip_grad_norm_(self.trained, CLIP)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return losses / items


def gathered(replica: Replica) -> Any:
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(replica.deepspeed.module.parameters()))


def whole(replica: Replica) -> dict[str, torch.Tensor]:
    with gathered(replica):
        return {name: parameter.detach().clone() for name, parameter in replica.deepspeed.module.named_parameters()}


def compare(plain: Plain, replica: Replica, tolerance: float, when: str) -> None:
    expected = dict(plain.model.named_parameters())
    for name, parameter in whole(replica).items():
        torch.testing.assert_close(
            parameter.float().cpu(), expected[name].data, rtol=tolerance, atol=tolerance, msg=f"{when}: {name}"
        )
    for name, buffer in replica.deepspeed.module.named_buffers():
        torch.testing.assert_close(buffer.cpu(), dict(plain.model.named_buffers())[name], rtol=1e-5, atol=1e-6, msg=name)


# ---------------------------------------------------------------- scenarios: each raises if something is wrong


def trains_as_one_process(group: InnerGroup) -> None:
    """Every kind of partition; one replica is missing, and one has begun a batch that was dropped."""
    for stage, dtype, accumulated in KINDS:
        plain = Plain(dtype == "float32")
        replicas = [Replica(r, group, config(stage, dtype, accumulated)) for r in range(REPLICAS)]
        tolerance = 2e-5 if dtype == "float32" else 2e-2
        for step, contributors in enumerate([(0, 1), (1,), (0, 1)], 1):
            rate = replicas[0].deepspeed.get_lr()[0]
            chosen = [replicas[r] for r in contributors]
            if step > 1:  # work that is dropped, complete or not
                chosen[0].work(step + 7)
                chosen[-1].work(step + 8, micro_batches=1)
            for replica in chosen:
                replica.work(step)
            sums = summed([each.engine for each in chosen])
            loss = plain.step(step, contributors, group.size, rate)
            updates = [replica.engine.apply(record(step, contributors), [s.clone() for s in sums]) for replica in replicas]
            assert abs(float(updates[0].loss) - loss) <= (1e-5 if dtype == "float32" else 2e-2) * abs(loss)
            same_state(replicas[0].engine.state(), replicas[1].engine.state())
            compare(plain, replicas[0], tolerance, f"stage {stage} {dtype} {accumulated}, step {step}")
            assert replicas[1].deepspeed.micro_steps == step * ACCUMULATE
        assert replicas[0].deepspeed.lr_scheduler.last_batch_iteration == 2
        assert replicas[0].engine.apply(CommitRecord(4, 4, "parent", ((0, 0),), applied=False), None) is None
        same_state(replicas[0].engine.state(), replicas[1].engine.state())


def loads_its_partition(group: InnerGroup) -> None:
    """A fresh engine takes the state of an equal rank and goes on alike: by its own work, and by repeating a sum."""
    for stage, dtype, accumulated in KINDS:
        donor, fresh = (Replica(r, group, config(stage, dtype, accumulated)) for r in range(REPLICAS))
        for tensor in fresh.engine.state().tensors.values():
            tensor.add_(1)  # whatever it began with
        for step in (1, 2):
            donor.work(step)
            donor.engine.apply(record(step, (0,)), [s.clone() for s in summed([donor.engine])])
        state = donor.engine.state()
        copy = State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars))
        fresh.engine.load(copy)
        same_state(state, fresh.engine.state())
        for name, parameter in whole(fresh).items():
            assert torch.equal(parameter, whole(donor)[name]), name
        donor.work(3)
        sums = [s.clone() for s in summed([donor.engine])]
        for replica in (donor, fresh):  # one of them has done no work
            replica.engine.apply(record(3, (0,)), [s.clone() for s in sums])
        same_state(donor.engine.state(), fresh.engine.state())
        for replica in (donor, fresh):
            replica.replica = 0  # they get the same batches
            replica.work(4)
        for mine, theirs in zip(donor.engine.buckets, fresh.engine.buckets, strict=True):
            assert torch.equal(mine, theirs) or not mine.is_floating_point()  # integer buffers have a slot for each replica
        lacking = State({n: t for n, t in copy.tensors.items() if n != "parameter/last.bias"}, copy.scalars)
        raises(Fatal, "lacks parameter/last.bias", lambda f=fresh, s=lacking: f.engine.load(s))
        counted = State(copy.tensors, {n: v for n, v in copy.scalars.items() if n != "engine/global_steps"})
        raises(Fatal, "lacks engine/global_steps", lambda f=fresh, s=counted: f.engine.load(s))


def is_checkpointed(group: InnerGroup) -> None:
    """What all ranks write is read by the same mesh, and holds the model's own names where ranks have whole parameters."""
    for stage in (2, 3):
        donor, fresh = (Replica(r, group, config(stage)) for r in range(REPLICAS))
        donor.work(1)
        donor.engine.apply(record(1, (0,)), [s.clone() for s in summed([donor.engine])])
        state, parts = donor.engine.state(), [None] * group.size
        mine = RankPart.of(state, donor.engine.portions())
        dist.all_gather_object(parts, mine.index().to_plain())
        index = Index([PartIndex.from_plain(part) for part in parts])
        names = {name.removeprefix("model/") for name in index.placed if name.startswith("model/")}
        assert names == (set(donor.deepspeed.module.state_dict()) if stage < 3 else set())
        found = restored(index, group.rank, True, fresh.engine.state(), fresh.engine.portions())
        assert found.tensors.keys() == state.tensors.keys() and found.scalars == state.scalars
        for path, wanted in found.tensors.items():
            assert wanted.shape == tuple(state.tensors[path].shape)
        raises(ValueError, "resume with the same mesh", lambda f=fresh, i=index: restored(
            i, group.rank, False, f.engine.state(), f.engine.portions()))  # fmt: skip


class Snapshots(StreamMarks):
    """What is marked, in order, and the bucket as it was then."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int, torch.Tensor]] = []
        self.buckets: Any = ()

    def note(self, what: str, bucket: int) -> None:
        self.log.append((what, bucket, self.buckets[bucket].clone()))

    def wrote(self, bucket: int, device: torch.device) -> None:
        self.note("wrote", bucket)

    def handed_out(self, bucket: int) -> None:
        self.note("handed out", bucket)

    def wait(self, bucket: int) -> None:
        self.note("wait", bucket)


def updates_without_the_loops_autocast(group: InnerGroup) -> None:
    """As a replica does that repeats the update."""
    replica, seen, device = Replica(0, group, config(2)), list[bool](), group.mesh.device_type
    replica.deepspeed.optimizer.optimizer.register_step_pre_hook(lambda *_: seen.append(torch.is_autocast_enabled(device)))
    replica.work(1)
    with torch.autocast(device, torch.bfloat16):
        replica.engine.apply(record(1, (0,)), [s.clone() for s in summed([replica.engine])])
        assert torch.is_autocast_enabled(device)
    assert seen == [False]


def every_bucket_is_marked_after_it_was_written(group: InnerGroup) -> None:
    """Gradients and the book alike: on a device the exchange has a stream of its own."""
    marks = Snapshots()
    engine = DeepSpeedEngine(initialized(config(2)), group, bucket_bytes=64, marks=marks)
    marks.buckets = engine.buckets
    engine.begin(engine.ready)
    for number in range(ACCUMULATE):
        engine.backward(engine.engine(rows(0, group.rank, number).to(engine.device)).sum(), last=number == ACCUMULATE - 1)
    engine.end()
    assert {bucket.dtype for bucket in engine.buckets} == {torch.float32, torch.float64, torch.int64}
    for index, final in enumerate(engine.buckets):
        marked = [(what, each) for what, bucket, each in marks.log if bucket == index]
        assert [what for what, _ in marked] == ["wrote", "handed out", "wait"], index
        assert all(torch.equal(each, final) for _, each in marked), index


def what_cannot_be_trained_is_refused(group: InnerGroup) -> None:
    """By the key of DeepSpeed's configuration, with its value and what to do."""
    offload = {"offload_optimizer": {"device": "cpu"}}
    for key, settings in {
        "deepspeed.zero_optimization.stage=0": config(0),
        "deepspeed.zero_optimization.offload_optimizer.device=cpu": config(2, zero=offload, zero_force_ds_cpu_optimizer=False),
        "deepspeed.zero_optimization.zero_quantized_gradients=True": config(3, zero={"zero_quantized_gradients": True}),
        "deepspeed.gradient_allreduce_op=sum": config(2, gradient_allreduce_op="sum"),
        "deepspeed.managed_gradient_accumulation=False": config(2, managed_gradient_accumulation=False),
    }.items():
        raises(ConfigError, f"{key}: ", lambda s=settings: DeepSpeedEngine(initialized(s), group))
    raises(MisuseError, "takes the engine of deepspeed.initialize, .* not a Model", lambda: DeepSpeedEngine(made(), group))
    replica = Replica(0, group, config(2))
    raises(MisuseError, "without a backward of its last micro-batch", replica.engine.end)
    raises(MisuseError, "outside a step", lambda: replica.engine.backward(torch.ones((), requires_grad=True)))
    raises(MisuseError, "update function cannot be registered", lambda: replica.engine.set_update(lambda record: None))
    raises(MisuseError, r"step\(\) was called in the loop", replica.deepspeed.optimizer.optimizer.step)


def a_lost_rank_is_told(group: InnerGroup) -> None:
    """The last scenario: rank 0 ends inside DeepSpeed's own step; the others' collectives fail at once, and say why."""
    replicas = {stage: Replica(0, group, config(stage)) for stage in (2, 3)}
    for replica in replicas.values():
        replica.work(1)
    if group.rank == 0:
        replicas[2].deepspeed.optimizer.optimizer.step = lambda: os._exit(9)
    sums = summed([replicas[2].engine])
    with lost():
        replicas[2].engine.apply(record(1, (0,)), sums)
    raises(MisuseError, "the state is undefined", lambda: replicas[2].engine.begin(lambda bucket: None))
    with lost():
        replicas[3].work(1)
    raises(Retryable, "a rank of this replica is lost", lambda: group.gather(torch.ones(2)))


ON_A_DEVICE: list[Callable[[InnerGroup], None]] = [
    trains_as_one_process,
    loads_its_partition,
    updates_without_the_loops_autocast,
    every_bucket_is_marked_after_it_was_written,
]
SCENARIOS = [*ON_A_DEVICE, is_checkpointed, what_cannot_be_trained_is_refused, a_lost_rank_is_told]


def run(rank: int, size: int, device: str, names: list[str], rendezvous: str, results: Any) -> None:
    """These scenarios in turn; for each (rank, name, what went wrong or "")."""
    torch.set_num_threads(1)
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "DS_ACCELERATOR": device, "LOCAL_RANK": str(rank)}
    from helixrt.engines.deepspeed_private import keep_host_collectives_unbuilt

    if device == "cpu":
        keep_host_collectives_unbuilt()
    backend = "gloo" if device == "cpu" else f"cpu:gloo,{device}:nccl"
    store = dist.FileStore(rendezvous, size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    group = InnerGroup(init_device_mesh(device, (size,), mesh_dim_names=("dp_shard",)))
    answer(rank, [each for each in SCENARIOS if each.__name__ in names], lambda: group, results)


def wrong_by_scenario(size: int, device: str, names: list[str], rendezvous: str) -> dict[str, list[str]]:
    """By scenario, what each of `size` ranks found wrong; rank 0 ends in the last one of all."""
    given = [(size, device, names, rendezvous)] * size
    return ranks_context.wrong_by_scenario(run, given, names, ends_one=a_lost_rank_is_told.__name__)
