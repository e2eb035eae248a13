"""Cases of the module engine's tests: what to train, and the plain PyTorch loop that says what must come out.

A case builds its model, optimizers and so on anew each time, from the same seed, so that an engine and the plain loop begin
with equal parameters. Replicas are simulated: each has an engine of its own, and the test sums their buckets in order.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, MultiStepLR, SequentialLR

from helixrt.engines.module import ModuleEngine
from helixrt.engines.random_state import set_random_state
from helixrt.engines.registered import Registered
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import State

SEED, ROWS, INPUTS, CLASSES = 5, 6, 8, 4


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, INPUTS)
        self.body = nn.Linear(INPUTS, INPUTS)
        self.head = nn.Linear(INPUTS, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = x[:, :1].abs().mul(10).long().squeeze(1) % CLASSES
        return self.head(torch.tanh(self.body(self.embedding(ids) + x)))


class WithUnused(nn.Module):
    """One branch of two is taken, by the sign of the input's sum; a third is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = (nn.Linear(INPUTS, CLASSES) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 16), *between, nn.Tanh(), nn.Linear(16, CLASSES))


def frozen() -> nn.Module:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    return model


@dataclass(frozen=True)
class Case:
    model: Callable[[], nn.Module] = mlp
    optimizers: Callable[[nn.Module], Sequence[torch.optim.Optimizer]] = lambda m: [torch.optim.AdamW(trainable(m), lr=1e-2)]
    schedulers: Callable[[Sequence[torch.optim.Optimizer]], Sequence[Any]] = lambda optimizers: []
    accumulate: int = 1
    clip_norm: float | None = None
    ema: bool = False
    autocast: bool = False
    options: dict[str, Any] = field(default_factory=dict)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *rest = trainable(model)
    return [torch.optim.SGD([first], lr=0.1, momentum=0.9, dampening=0.1), torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)]


def sequence(optimizers: Sequence[torch.optim.Optimizer]) -> list[Any]:
    return [
        SequentialLR(o, [LinearLR(o, 0.1, total_iters=2), CosineAnnealingLR(o, 10), ExponentialLR(o, 0.9)], [2, 4])
        for o in optimizers
    ]


CASES = {
    "adamw": Case(),
    "adamw-foreach": Case(optimizers=lambda m: [torch.optim.AdamW(trainable(m), lr=1e-2, foreach=True, amsgrad=True)]),
    "adamw-fused": Case(optimizers=lambda m: [torch.optim.AdamW(trainable(m), lr=1e-2, fused=True)]),
    "adamw-tensor-rate": Case(optimizers=lambda m: [torch.optim.AdamW(trainable(m), lr=torch.tensor(1e-2))]),
    "momentum": Case(optimizers=lambda m: [torch.optim.SGD(trainable(m), lr=0.1, momentum=0.9, dampening=0.3)]),
    "adafactor": Case(optimizers=lambda m: [torch.optim.Adafactor(trainable(m), lr=1e-2)]),
    "nadam": Case(optimizers=lambda m: [torch.optim.NAdam(trainable(m), lr=1e-2)]),
    "two-optimizers": Case(
        optimizers=two_optimizers, schedulers=lambda both: [MultiStepLR(both[0], [1, 3]), ExponentialLR(both[1], 0.8)]
    ),
    "schedulers": Case(schedulers=sequence),
    "accumulate": Case(accumulate=4, clip_norm=0.5),
    "clip": Case(clip_norm=0.05),
    "batch-norm": Case(model=lambda: mlp(nn.BatchNorm1d(16)), accumulate=2),
    "dropout": Case(model=lambda: mlp(nn.Dropout(0.5)), accumulate=2),
    "ema": Case(ema=True),
    "tied": Case(model=Tied, accumulate=2),
    "unused": Case(model=WithUnused),
    "frozen": Case(model=frozen),
    "channels-last": Case(
        model=lambda: nn.Sequential(
            nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 2, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, CLASSES)
        ).to(memory_format=torch.channels_last),
        clip_norm=0.1,
    ),
    "bfloat16": Case(autocast=True, accumulate=2, options={"compute_dtype": torch.bfloat16}),
}  # fmt: skip


def batch(replica: int, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The micro-batch at a position of a replica's stream; its number of rows differs from one to the next."""
    generator = torch.Generator().manual_seed(1000 * replica + position)
    rows = ROWS + position % 3
    return torch.randn(rows, INPUTS, generator=generator), torch.randint(0, CLASSES, (rows,), generator=generator)


@dataclass
class Parts:
    """One set of objects, as a user's script makes them."""

    case: Case
    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    schedulers: Sequence[Any]
    ema: Any

    def loss(self, replica: int, position: int) -> tuple[torch.Tensor, int]:
        x, y = batch(replica, position)
        return F.cross_entropy(self.model(x), y, reduction="sum"), len(y)


def parts(case: Case, seed: int = 1) -> Parts:
    torch.manual_seed(seed)
    model = case.model()
    optimizers = case.optimizers(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR sets its parts up in an order that it warns of itself
        schedulers = case.schedulers(optimizers)
    ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    return Parts(case, model, optimizers, schedulers, ema)


class Replica:
    """One engine and what it trains."""

    def __init__(self, case: Case, replica: int = 0, replicas: int = 1, seed: int = 1, **options: Any) -> None:
        self.parts, self.replica = parts(case, seed), replica
        p = self.parts
        extra = {"ema": p.ema} if case.ema else {}
        registered = Registered.of(p.model, p.optimizers, p.schedulers, clip_norm=case.clip_norm, extra=extra)
        settings = {"replica": replica, "replicas": replicas, "seed": SEED, "bucket_bytes": 256, **case.options, **options}
        self.engine = ModuleEngine(registered, **settings)
        self.handed_out: list[int] = []
        if case.ema:
            self.engine.set_update(self.update)

    def update(self, record: CommitRecord) -> None:
        if record.applied:
            for optimizer in self.parts.optimizers:
                optimizer.step()
            self.parts.ema.update_parameters(self.parts.model)

    def work(self, step: int, on_bucket: Callable[[int], None] | None = None) -> Any:
        """The work of step number `step` (first is 1)."""
        count = self.parts.case.accumulate
        self.handed_out = []
        self.engine.begin(on_bucket or self.handed_out.append)
        for number in range(count):
            position = (step - 1) * count + number
            self.engine.seed(position)
            loss, weight = self.parts.loss(self.replica, position)
            self.engine.backward(loss, weight, last=number == count - 1)
        return self.engine.end()


def record(step: int, contributors: Sequence[int] = (0,), *, applied: bool = True) -> CommitRecord:
    return CommitRecord(step, step, "parent", tuple((replica, 0) for replica in contributors), applied=applied)


def summed(engines: Sequence[ModuleEngine]) -> list[torch.Tensor]:
    """What the exchange gives: sums in the order of replicas, in tensors of their own."""
    total = [bucket.clone() for bucket in engines[0].buckets]
    for engine in engines[1:]:
        for into, bucket in zip(total, engine.buckets, strict=True):
            into.add_(bucket)
    return total


def plain_step(p: Parts, step: int, contributors: Sequence[int] = (0,)) -> float:
    """One step of a plain PyTorch loop over the union of the contributors' micro-batches; the mean loss."""
    case = p.case
    before = {name: buffer.clone() for name, buffer in p.model.named_buffers()}
    after: list[dict[str, torch.Tensor]] = []
    total: dict[nn.Parameter, torch.Tensor] = {}
    items, losses = 0, torch.zeros((), dtype=torch.float64)
    for replica in contributors:
        p.model.zero_grad()
        for name, buffer in p.model.named_buffers():
            buffer.copy_(before[name])
        for number in range(case.accumulate):
            position = (step - 1) * case.accumulate + number
            set_random_state(SEED, replica, 0, position)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss, weight = p.loss(replica, position)
            loss.backward()
            items, losses = items + weight, losses + loss.detach()
        after.append({name: buffer.clone() for name, buffer in p.model.named_buffers()})
        for parameter in p.model.parameters():
            if parameter.grad is not None:
                total[parameter] = total[parameter] + parameter.grad if parameter in total else parameter.grad.clone()
    for name, buffer in p.model.named_buffers():
        values = torch.stack([each[name] for each in after])
        buffer.copy_(values.double().mean(0) if buffer.is_floating_point() else values.amax(0))
    for parameter in p.model.parameters():
        parameter.grad = total[parameter].div_(float(items)) if parameter in total else None
    if case.clip_norm is not None:
        nn.utils.clip_grad_norm_(p.model.parameters(), case.clip_norm)
    for optimizer in p.optimizers:
        optimizer.step()
    for scheduler in p.schedulers:
        scheduler.step()
    if case.ema:
        p.ema.update_parameters(p.model)
    return float(losses / items)


def copy_of(state: State) -> State:
    return State({name: tensor.clone() for name, tensor in state.tensors.items()}, dict(state.scalars))


def same(one: State, other: State) -> bool:
    """Equal bit for bit, in names, order, values and scalars."""
    if list(one.tensors) != list(other.tensors) or dict(one.scalars) != dict(other.scalars):
        return False
    return all(equal_bits(tensor, other.tensors[name]) for name, tensor in one.tensors.items())


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return a.dtype == b.dtype and a.shape == b.shape and (a.numel() == 0 or torch.equal(raw(a), raw(b)))
