"""The engine of a DeepSpeed engine: ZeRO 1, 2 or 3 inside a replica, whose partitions are exchanged with equal ranks of others.

In: what `deepspeed.initialize` gave, over the ranks of one replica; from the loop, a loss per micro-batch. Out: the `Engine`
contract of `helixrt.replica.contracts`.

    begin(on_bucket)                       DeepSpeed has no gradients
      backward(loss, weight, last)         DeepSpeed's own: it reduces and partitions gradients inside the replica
    end()                                  this rank's partition is copied into flat float32 buckets, which are handed out
    apply(record, sums)                    sums / total weight are installed in DeepSpeed, and its own step runs

A partition is complete after the last backward alone, so its exchange does not overlap backward. DeepSpeed's `step` has
collectives and is not atomic: a replica that loses a rank in it leaves whole, and loads its state when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch

from helixrt.engines.autocast import outside_autocast
from helixrt.engines.buffers import Buffers, Mode
from helixrt.engines.deepspeed_limits import check_engine
from helixrt.engines.deepspeed_private import partitions_of
from helixrt.engines.deepspeed_state import DeepSpeedState
from helixrt.engines.evaluating import evaluating
from helixrt.engines.exchange_book import ExchangeBook, check_weight
from helixrt.engines.first_step import growth_of
from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.losses import check_loss
from helixrt.engines.random_state import set_random_state
from helixrt.engines.registered import Registered
from helixrt.engines.stream_marks import StreamMarks, marks_for
from helixrt.engines.update import ModuleUpdate, Policy, StepGuard, UpdateFunction, first_rate
from helixrt.errors import MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import Engine, State, Update, WorkResult
from helixrt.replica.portions import Portion

BUCKET_BYTES = 25 << 20


class DeepSpeedEngine(Engine):
    """Trains with a DeepSpeed engine. All calls come from one thread, but for `state`'s tensors, `buckets` and `ready`.

    `group`: the ranks of this replica, over which the engine partitions; all of them make the same calls in the same order.
    `modes` are those of buffers (`Registered`), the settings those of `ModuleEngine`. Its gradients are means over the ranks
    and micro-batches of a replica, times `accumulate`, how many micro-batches it was configured for. `marks` stands in for the
    device's events in tests.

    Raises MisuseError for what cannot be trained, ConfigError for a setting of DeepSpeed's; `backward`, `end`, `apply` and
    `load` raise what DeepSpeed's collectives raise when another rank of the replica is lost.
    """

    def __init__(
        self,
        engine: Any,
        group: InnerGroup,
        *,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        policy: Policy | None = None,
        buffers: Mode = "mean",
        modes: Mapping[str, str] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        marks: StreamMarks | None = None,
    ) -> None:
        check_engine(engine, group.size)
        registered = Registered.of(engine.module, buffers=modes)
        registered.check()
        self.engine, self.policy, self.accumulate = engine, policy or Policy(), engine.gradient_accumulation_steps()
        self._group, self._replica, self._replicas, self._seed = group, replica, replicas, seed
        self._partitions = partitions_of(engine, group)
        self.registered = replace(registered, optimizers={"0": self._partitions.optimizer})
        self._backward, self._step = engine.backward, engine.step  # DeepSpeed's own, whatever the user's loop calls
        self.device = device = self._partitions.masters[0].device
        self._flats = [torch.zeros(size, dtype=torch.float32, device=device) for size in self._partitions.sizes]
        self._gradients = [part for flat in self._flats for part in flat.split(max(1, bucket_bytes // 4))]
        self._buffers = Buffers(registered, buffers, replica, replicas, group.size)
        self.per_replica = self._buffers.per_replica
        self._book = ExchangeBook(0, self._buffers, device, group)
        self._buckets = [*self._book.tensors, *self._gradients]
        self._marks = marks or marks_for({device})
        self._state = DeepSpeedState(registered, self._buffers, self._partitions, engine.lr_scheduler)
        self._state.read()  # what cannot be stored is found before the first step
        parameters = [parameter for _, parameter in registered.parameters()]
        self._guard = StepGuard({"0": self._partitions.optimizer}, [*parameters, *self._partitions.masters])
        self._on_bucket: Callable[[int], None] = lambda bucket: None
        self._working = self._last = False  # between `begin` and `end`; the last backward has come
        self._failed = False  # an update has failed in its middle

    # ---------------------------------------------------------------- the loop

    def set_update(self, update: UpdateFunction) -> None:
        """Raises MisuseError: the update is DeepSpeed's own step."""
        raise MisuseError("an update function cannot be registered for a DeepSpeed engine, whose step is the update")

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        """The book, then parts of the flat gradients in the order of DeepSpeed's groups."""
        return self._buckets

    def finite_part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return self._book.finite_part(index, values)

    def ready(self, index: int) -> None:
        self._marks.wait(index)

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        if self._failed:
            raise MisuseError("an update has failed; the state is undefined until one is loaded")
        self._partitions.forget()
        self._buffers.begin()
        self._book.begin()
        self._on_bucket, self._working, self._last = on_bucket, True, False

    def seed(self, position: int) -> None:
        """Set the random state for the micro-batch at this position of this rank's stream."""
        set_random_state(self._seed, self._replica, self._group.rank, position)

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, *, last: bool = False) -> None:
        """As `ModuleEngine.backward`: `loss` is a sum over `weight` items (None: it counts 1, so that means are averaged)."""
        check_loss(loss)
        if not self._working or self._last:
            raise MisuseError("backward was called outside a step, or after its last micro-batch; call it once in each")
        check_weight(weight)
        self.adding = True
        self.engine.set_gradient_accumulation_boundary(last)
        self._book.add(loss, weight)
        self._last = last
        self._backward(loss)

    def end(self) -> WorkResult:
        if not self._last:
            raise MisuseError("the step ends without a backward of its last micro-batch; call step.backward(loss) for each")
        self._working = False
        self._partitions.read(self._flats)
        first = len(self._book.tensors)
        for index in reversed(range(first, len(self._buckets))):
            self._hand_out(index)
        self._buffers.check()
        self._book.fill(())
        for index in reversed(range(first)):
            self._hand_out(index)
        return WorkResult(self._book.mean_loss, self._book.weight)

    def _hand_out(self, index: int) -> None:
        self._marks.wrote(index, self._buckets[index].device)
        self._marks.handed_out(index)
        self._on_bucket(index)

    # ---------------------------------------------------------------- updates

    @outside_autocast()
    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        self._working = False
        totals = None if reduced is None else self._book.read(reduced)
        self._failed = True
        if reduced is None or totals is None or not totals.weight > 0:  # nothing was summed, or nothing counts
            self._buffers.discard()
            self._failed = False
            return None
        scale = self.accumulate * self._group.size / totals.weight
        for mine, total in zip(self._gradients, reduced[len(self._book.tensors) :], strict=True):
            if total is not mine:
                mine.copy_(total)
            if scale != 1.0:
                mine.mul_(scale)
        norm = self._norm()
        self._buffers.commit(totals.changed, totals.floats, totals.integers, record.summed)
        self._partitions.install(self._flats)
        factor = self.policy.factor(len(record.summed), self._replicas)
        rate = first_rate({"0": self._partitions.optimizer}, factor)
        self.engine.set_gradient_accumulation_boundary(True)
        with self._guard.update(factor):
            self._step()
        self.engine.micro_steps += self.accumulate - 1  # one call stands for those of all micro-batches
        self._failed = False
        return ModuleUpdate(norm, rate, totals.loss, totals.weight)

    def _norm(self) -> torch.Tensor:
        """Of the whole gradient before clipping, with the same bits on all ranks."""
        squares = torch.stack([flat.double().square().sum() for flat in self._flats]).sum()
        return self._group.sum(squares.reshape(1)).sqrt()[0]

    def evaluating(self) -> AbstractContextManager[None]:
        """Around an evaluation of the user's, between two steps."""
        return evaluating(self.registered, self._buffers)

    # ---------------------------------------------------------------- state

    def state(self) -> State:
        return self._state.read()

    def state_growth(self) -> int:
        with self._partitions.groups() as optimizer:
            return growth_of([optimizer])

    def portions(self) -> Mapping[str, Portion]:
        return self._state.portions(self._group.rank)

    def load(self, state: State) -> None:
        self._working = False
        self._partitions.forget()
        self._state.load(state)
        self._failed = False

    def close(self) -> None:
        self._guard.close()
