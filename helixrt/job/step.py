"""One step of a user's loop: its micro-batches, their backwards or skips, and the commit.

In: an order of the rank's worker, the engine, and the batches of the stream. Out: micro-batches; then `Committed`. The
order of calls is checked, and each wrong one raises a `MisuseError` that says what to call instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

from helixrt.engines.deepspeed import DeepSpeedEngine
from helixrt.engines.module import ModuleEngine
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.pipelined import PipelinedModel
from helixrt.engines.update import ModuleUpdate
from helixrt.errors import MisuseError
from helixrt.replica.contracts import Number, WorkResult
from helixrt.replica.rank import Done, WorkOrder
from helixrt.replica.rank_parts import BatchNote

SessionEngine = ModuleEngine | PipelineEngine | DeepSpeedEngine


class Worker(Protocol):
    """The three calls of `helixrt.replica.rank.RankWorker` that the loop makes."""

    def next_work(self) -> WorkOrder | None: ...

    def finish(self, order: WorkOrder, result: WorkResult) -> None: ...

    def outcome(self, order: WorkOrder) -> Done | None: ...


@dataclass(frozen=True)
class Committed:
    """What became of a step.

    `committed`: this replica's gradient is in the commit record of update number `step`. If it is False the work was dropped
    because the replicas agreed on another base; the same batches come again, and the fields below are empty.
    `applied`: parameters were changed; False if no gradient was finite, or the total weight was 0.
    `contributors`: the replicas whose gradients were summed. `loss`: the mean over all items of all contributors (sum of
    losses / sum of weights), `grad_norm`: before clipping, a number or a tensor with one element, which is not read unless it
    is logged. They are NaN if nothing was applied. With `helixrt.Stages` `loss` is that of this replica's own batch.
    """

    committed: bool
    step: int
    applied: bool = False
    grad_norm: Number = math.nan
    contributors: tuple[int, ...] = ()
    loss: Number = math.nan


Batch = TypeVar("Batch")


class Step(Generic[Batch]):
    """Iterate over it for the micro-batches, call `backward` or `skip` once in each, then `commit`. Made by `Session.steps`."""

    def __init__(
        self,
        engine: SessionEngine,
        worker: Worker,
        order: WorkOrder,
        batches: Iterator[Batch],
        accumulate: int,
        note: Callable[[BatchNote], None] = lambda note: None,
    ) -> None:
        self._note = note  # writes down what the batches were, when they have been given
        self._engine, self._worker, self._order = engine, worker, order
        self._batches, self._accumulate = batches, accumulate
        self._yielded = self._backwards = 0
        self._failed = ""  # what was left by an exception, so that its gradients are in part there
        self._committed: Committed | None = None

    @property
    def number(self) -> int:
        """Of the update that this step is for; the first is 1."""
        return self._order.step

    @property
    def position(self) -> int:
        """Of its first micro-batch in this replica's stream."""
        return self._order.position

    @property
    def batch(self) -> int:
        """The position of the micro-batch that was given last."""
        return self.position + max(0, self._yielded - 1)

    @property
    def done(self) -> Committed | None:
        """What `commit` returned, if it was called."""
        return self._committed

    def __iter__(self) -> Iterator[Batch]:
        if self._yielded:
            raise MisuseError(f"the micro-batches of step {self.number} were iterated over before; do it once in each step")
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[Batch]:
        for offset in range(self._accumulate):
            self._not_after_commit("its micro-batches were iterated over")
            batch = next(self._batches)
            self._yielded += 1
            if self._yielded == self._accumulate:  # before the work on it: the exchange may end with that
                self._note(self._order.note)
            self._engine.seed(self.position + offset)
            yield batch
            self._check_whole()
            if self._backwards != self._yielded:
                raise MisuseError(
                    f"micro-batch {self._yielded} of step {self.number} had {self._backwards - self._yielded + 1} calls of "
                    "step.backward(loss); it must have one, or step.skip() if it is to be left out"
                )

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None) -> None:
        """Gradients of this micro-batch. `loss` is a scalar tensor: a sum over `weight` items; without `weight` it counts 1, so
        mean losses are averaged. The update uses (sum of gradients) / (sum of weights) over all micro-batches and
        contributors. Neither is read on the host. In the last micro-batch of the step the exchange runs meanwhile.

        Raises MisuseError for a loss without gradient or with more than one element, a second call in a micro-batch, or one
        outside the step.
        """
        if isinstance(self._engine, PipelineEngine):
            raise MisuseError("step.backward was called for a model in stages; use step.train(model, x, target=y)")
        self._check_turn("step.backward", "add the losses, and call it once")
        with self._whole("step.backward"):
            self._engine.backward(loss, weight, last=self._yielded == self._accumulate)
        self._backwards += 1

    def skip(self) -> None:
        """Leave the micro-batch that was given last out, in place of `backward`: it counts 0 items, and the others of this step
        and of the other replicas count as before. If all are skipped, nothing is updated. All ranks of the replica skip the
        same ones; where only one of them is to, it calls `backward` with a loss that is 0 and the weight 0.

        Raises MisuseError for a model in stages, or with DeepSpeed, and as `backward`.
        """
        if not isinstance(self._engine, ModuleEngine):
            what = "a model in stages" if isinstance(self._engine, PipelineEngine) else "a DeepSpeed engine"
            raise MisuseError(f"step.skip was called for {what}, which trains every batch: leave it out in the loader")
        self._check_turn("step.skip", "it is in place of step.backward")
        self._engine.skip(last=self._yielded == self._accumulate)
        self._backwards += 1

    def expect_backward(self) -> None:
        """The loop calls `loss.backward()` itself in the micro-batch that was given last, and `own_backward_done` after it."""
        self._module_engine().expect_backward(last=self._yielded == self._accumulate)

    def own_backward_done(self) -> None:
        """Raises MisuseError if no parameter has had a gradient since `expect_backward`."""
        if not self._module_engine().own_backward_done():
            raise MisuseError(
                f"micro-batch {self._yielded} of step {self.number} had no backward that reached a parameter; "
                "call loss.backward() once in each, before optimizer.step(), on a loss of the models of session.prepare; if "
                "it is to be left out, call loader.skip()"
            )
        self._backwards += 1

    def trained_outside(self) -> str:
        """See `ModuleEngine.trained_outside`."""
        return self._module_engine().trained_outside()

    def train(
        self,
        model: torch.nn.Module,
        *inputs: Any,
        target: Any = None,
        weight: float | torch.Tensor | None = None,
        **named: Any,
    ) -> float:
        """Forward and backward of this batch through all stages of the model, which `session.parallelize` gave for `Stages` or
        for a compiled model with an example, and `session.register` got; the exchange of its gradients runs meanwhile. All
        stages of the replica call it with the same batch. `Stages` take one input, read on the first stage, and a target, read
        on the last one; a compiled model takes its own arguments, and a target for its loss if it was given one. A batch of
        other shapes than those before (another sequence length) has graphs of its own, which are captured now. Returns the mean
        loss of the batch's micro-batches, on every stage.

        The loss of each micro-batch is its mean, and a batch counts 1. With `weight` the loss of each micro-batch is a *sum*,
        and the whole batch has `weight` items: the update uses (sum of gradients) / (sum of weights) over all contributors, as
        with `backward`. All stages give the same one. It is for compiled models; an argument of the model of this name is
        passed by position.

        Raises MisuseError for a model without stages, a batch that cannot be cut into micro-batches or is unlike the example, a
        weight that is none, a second call for a batch, or one outside the step, and where stages were given different batches;
        Retryable when a stage of this replica is lost.
        """
        if not isinstance(self._engine, PipelineEngine):
            raise MisuseError(
                "step.train is for a model in stages; use step.backward(loss) with the loss of model(x), or give a compiled "
                "model with an example: session.parallelize(model, example=helixrt.ExampleBatch(...))"
            )
        if not isinstance(model, PipelinedModel) or model.engine_in_use is not self._engine:
            raise MisuseError("step.train was called with another model than the registered one")
        self._check_turn("step.train", "call it once for each batch")
        with self._whole("step.train"):
            loss = model.train_batch(inputs, named, target, weight)
        self._backwards += 1
        return loss

    @contextmanager
    def _whole(self, what: str) -> Iterator[None]:
        """Around what adds gradients: if an exception leaves it after it has begun to, nothing of this step counts any more."""
        self._engine.adding = False
        try:
            yield
        except BaseException:
            if self._engine.adding:
                self._failed = what
            raise

    def _check_whole(self) -> None:
        if self._failed:
            raise MisuseError(
                f"{self._failed} in micro-batch {self._yielded} of step {self.number} has raised an exception, so gradients of "
                "this step are incomplete and cannot be taken back. Do not catch it within the step: let it end this rank, and "
                "the replica is started again"
            )

    def _module_engine(self) -> ModuleEngine:
        assert isinstance(self._engine, ModuleEngine)  # `prepare` takes no model in stages
        return self._engine

    def _check_turn(self, what: str, instead: str) -> None:
        self._not_after_commit(f"{what} was called")
        self._check_whole()
        if self._backwards >= self._yielded:
            if self._yielded == 0:
                raise MisuseError(f"{what} was called before a micro-batch was taken: `for batch in step:` comes first")
            raise MisuseError(f"{what} was called twice in micro-batch {self._yielded} of step {self.number}; {instead}")

    def commit(self) -> Committed:
        """End the step: exchange, agreement, update. Blocks until the update is done, or the work was dropped.

        Raises MisuseError if micro-batches are left or the step was committed before; Retryable or Fatal if this replica
        cannot go on (the job starts it again).
        """
        self._not_after_commit("step.commit was called a second time")
        self._check_whole()
        if self._backwards != self._accumulate:
            raise MisuseError(
                f"step {self.number} was committed after {self._backwards} of {self._accumulate} backwards; iterate over all "
                "its micro-batches and call step.backward(loss) in each"
            )
        result = self._engine.end()
        self._worker.finish(self._order, result)
        done = self._worker.outcome(self._order)
        if done is None:
            self._committed = Committed(False, self.number)
        elif done.update is not None:
            update, record = done.update, done.record
            loss = update.loss if isinstance(update, ModuleUpdate) else result.loss
            self._committed = Committed(True, record.step, True, update.grad_norm, record.summed, loss)
        else:
            self._committed = Committed(True, done.record.step)
        self.timing = done
        return self._committed

    def micro_batch_done(self) -> None:
        """DeepSpeed's own call after each backward: commits after the last one. Raises MisuseError if there was no backward."""
        if self._backwards != self._yielded:
            raise MisuseError(
                f"engine.step() came before engine.backward(loss) in micro-batch {self._yielded} of step {self.number}"
            )
        if self._backwards == self._accumulate:
            self.commit()

    timing: Done | None = None

    def check_no_backward(self) -> None:
        """Raises MisuseError if a backward of the loop's own came after the commit."""
        self._module_engine().check_no_backward()

    def check_committed(self) -> None:
        """Raises MisuseError if the loop went on without a commit."""
        if self._committed is None:
            raise MisuseError(f"step {self.number} was not committed; call step.commit() at the end of each step")

    def _not_after_commit(self, what: str) -> None:
        if self._committed is not None:
            raise MisuseError(f"{what} after the commit of step {self.number}; the next step comes from session.steps")
