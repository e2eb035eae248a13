"""The engine of any module: `torch.nn.Module`s, `torch.optim` optimizers and the user's own loop.

A replica is one process, or several over which FSDP2 has sharded the parameters (`group`), a tensor-parallel plan has cut them
(`tensor`), or both. Then each holds, exchanges and updates its part; FSDP2 sums gradients inside the replica in every
micro-batch, those of parameters that tp ranks hold whole are summed in the last backward, and equal ranks of replicas exchange
meanwhile.

In: what the user registered; from the loop, a loss per micro-batch. Out: the `Engine` contract of `helixrt.replica.contracts`.

    begin(on_bucket)                       parameters, optimizers and buffers are as the last update left them
      backward(loss, weight, last)         gradients add up in the local set; in the last one buckets are handed out
    end()                                  gradients that were not computed are zero; the book (weight, presence, buffers) goes
    last apply(record, sums)                    sums / total weight are copied over the local set; the update runs

On the device there are at most two gradient-sized sets: the local one, of which `p.grad` is a view, and the sums.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from helixrt.engines.autocast import ForwardAutocast, outside_autocast
from helixrt.engines.buffers import Buffers, Mode
from helixrt.engines.evaluating import averaged_weights, averaging, evaluating
from helixrt.engines.exchange_book import ExchangeBook, check_weight
from helixrt.engines.first_step import growth_of
from helixrt.engines.flat_gradients import FlatGradients
from helixrt.engines.graph_leaves import LeafCheck, described, with_gradient
from helixrt.engines.hyperparameters import Hyperparameters
from helixrt.engines.inner_group import InnerGroup
from helixrt.engines.losses import check_loss
from helixrt.engines.portions import portions_of
from helixrt.engines.random_state import random_states, set_random_state
from helixrt.engines.registered import Registered
from helixrt.engines.replica_mesh import ReplicaMesh
from helixrt.engines.replicated_state import ReplicatedState
from helixrt.engines.sharded import ShardedModels, check_updates, is_scalar, is_sharded
from helixrt.engines.stream_marks import StreamMarks, marks_for
from helixrt.engines.tensor_copies import check_copies, check_tensor
from helixrt.engines.tensor_gradients import TensorGradients, TensorRanks
from helixrt.engines.unchanged import Unchanged
from helixrt.engines.update import (
    ModuleUpdate,
    Policy,
    StepGuard,
    UpdateFunction,
    UpdateRecord,
    default_update,
    first_rate,
    gradient_norm,
)
from helixrt.errors import MisuseError
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.replica.contracts import Engine, State, Update, WorkResult
from helixrt.replica.portions import Portion

BUCKET_BYTES = 25 << 20  # as DistributedDataParallel has it
_WATCHED = 3  # updates in which random numbers are looked for: who draws some does so in each


class ModuleEngine(Engine):
    """Trains what is registered. All calls come from one thread, but for `state`'s tensors, `buckets` and `ready`.

    `replica` of `replicas` configured ones, `seed` of the run; `buffers`: how running statistics of contributors are united
    ("mean" or "first"); `compute_dtype`: float32, or bfloat16 for forward and loss under autocast, with parameters, gradients
    and optimizer state as they were registered (of sharded models FSDP2's mixed precision decides instead). `group`: the ranks
    of this replica over which the models are sharded, and `tensor`: those over which a plan has cut them; all of them make the
    same calls in the same order, and tp ranks with the same batches. `marks` stands in for the device's events in tests.

    Raises MisuseError, here and in every call of the loop, for what cannot be trained or was done in the wrong place;
    `backward`, `end` and `apply` raise Retryable, or what FSDP2 raises, when another rank of the replica is lost.
    """

    def __init__(
        self,
        registered: Registered,
        *,
        replica: int = 0,
        replicas: int = 1,
        seed: int = 0,
        policy: Policy | None = None,
        buffers: Mode = "mean",
        bucket_bytes: int = BUCKET_BYTES,
        compute_dtype: torch.dtype = torch.float32,
        group: InnerGroup | None = None,
        tensor: TensorRanks | None = None,
        marks: StreamMarks | None = None,
    ) -> None:
        registered.check()
        self.registered, self.policy = registered, policy or Policy()
        self.policy.check(registered.optimizers)
        self._averaging = averaging(registered)
        for optimizer in self._averaging:
            optimizer.train()
        self.replica, self.replicas, self._seed = replica, replicas, seed
        trained = [(name, parameter) for name, parameter in registered.parameters() if parameter.requires_grad]
        if not trained:
            raise MisuseError("the registered models have no parameter that requires a gradient")
        if compute_dtype not in (torch.float32, torch.bfloat16):
            raise MisuseError(f"compute type {compute_dtype}: must be float32 or bfloat16")
        dtensors = [name for name, parameter in registered.parameters() if is_sharded(parameter)]
        if group is None and tensor is None and dtensors:
            raise MisuseError(f"{dtensors[0]} is a DTensor, and a replica is one rank; run with mesh=Mesh(dp_shard=...)")
        self._group, self._sharded = group, None if group is None else ShardedModels(registered, group)
        self._tensor = tensor
        if tensor is not None:
            check_tensor(registered, tensor, group is not None)
        elif group is not None:
            check_updates(registered)
        self._parameters = [parameter for _, parameter in trained]
        self._known = [parameter for _, parameter in registered.parameters()]
        self._device = self._parameters[0].device
        self._compute_dtype = torch.float32 if group is not None else compute_dtype  # FSDP2 has its own mixed precision
        self._marks = marks or marks_for({parameter.device for parameter in self._parameters})
        sums = None if tensor is None else TensorGradients(trained, tensor)
        self._gradients = FlatGradients(trained, bucket_bytes, self._marks, sums, group)
        self._buffers = Buffers(registered, buffers, replica, replicas, 1 if group is None else group.size)
        self.per_replica = self._buffers.per_replica
        self._book = ExchangeBook(len(trained), self._buffers, self._device, group)
        self._buckets = [*self._book.tensors, *self._gradients.flat]
        self._state = ReplicatedState(registered, self._buffers)
        self._state.read()  # what cannot be stored is found before the first step
        self._unchanged = Unchanged(registered, self._buffers.constant, alone=replicas == 1)
        self._hyperparameters = Hyperparameters(registered)
        self._guard = StepGuard(registered.optimizers, self._known)
        self._update: UpdateFunction | None = None
        self._update_checked = False
        self._watched = 0  # updates
        self._leaves = LeafCheck(self._known, self._unchanged.check, None if self._sharded is None else self._sharded.whole)
        self._outside: dict[int, torch.nn.Parameter] | None = None  # had a gradient before the user's own first backward
        self._used = False  # a batch has given a registered parameter a gradient
        self._autocast = ForwardAutocast(self._device, self._compute_dtype)
        self._on_bucket: Callable[[int], None] = lambda bucket: None
        self._failed = False  # an update has failed in its middle
        self._checked = False  # registered state was checked at the end of a batch, and nothing has run since
        self.expects_overflow = registered.scaler is not None and registered.scaler.is_enabled()
        if registered.scaler is not None:  # its scale is made with the first loss, which a replay has not
            registered.scaler.scale(torch.zeros((), device=self._device))

    # ---------------------------------------------------------------- the loop

    def set_update(self, update: UpdateFunction) -> None:
        """Run `update(record)` instead of the default. Gradients are in `p.grad`, divided by the total weight; where no
        contributor had one, or `record.applied` is False, `p.grad` is None. It is a function of registered state, gradients and
        record. It runs without the loop's autocast. Raises MisuseError beside a registered `clip_norm`, which it would not
        use."""
        if self.registered.clip_norm is not None:
            raise MisuseError(
                "clip_norm= is used by the default update alone: leave it out, and clip in the update function, before the "
                "optimizer's step"
            )
        self._update, self._update_checked = update, False

    @property
    def buckets(self) -> Sequence[torch.Tensor]:
        """The book, then the flat gradient sets in parameter order. Left alone from `end` to the next `begin` or `apply`."""
        return self._buckets

    def finite_part(self, index: int, values: torch.Tensor) -> torch.Tensor:
        return self._book.finite_part(index, values)

    def ready(self, index: int) -> None:
        self._marks.wait(self._mark(index))

    def _mark(self, index: int) -> int:
        """The number of a bucket's marks: flat gradient sets count from 0, as in `FlatGradients`, the book before them."""
        return index - len(self._book.tensors)

    def leave_batch(self) -> None:
        self._autocast.end()
        self._reshard()
        if self._failed:
            raise MisuseError("an update has failed; the state is undefined until one is loaded")
        self._unchanged.check_versions()
        self._buffers.check()

    def begin(self, on_bucket: Callable[[int], None]) -> None:
        self.leave_batch()
        if not self._update_checked:
            if self._update is None:
                self.registered.check_update_is_complete()
            self._update_checked = True
        self._checked = False
        self._buffers.begin()
        if self._sharded is not None:
            self._sharded.begin()
        self._on_bucket = on_bucket
        offset = len(self._book.tensors)
        self._gradients.begin(lambda bucket: on_bucket(bucket + offset))
        self._book.begin()
        self._autocast.begin()

    def freeze(self, things: Iterable[nn.Module | nn.Parameter]) -> None:
        """Do not train these in the batch that has begun: it gives them no gradients. Raises MisuseError for what is not
        registered, and in a replica of several ranks."""
        if self._group is not None or self._tensor is not None:
            rule = "in a function registered as the session's update set gradients to None instead"
            raise MisuseError(f"session.freeze is for replicas of one rank; {rule}")
        found = {id(p) for thing in things for p in (thing.parameters() if isinstance(thing, nn.Module) else [thing])}
        if not found <= {id(parameter) for parameter in self._known}:
            raise MisuseError("the function of session.freeze returned something that no registered model has as a parameter")
        self._unchanged.freeze(found)

    def seed(self, position: int) -> None:
        """Set the random state for the micro-batch at this position of this rank's stream."""
        set_random_state(self._seed, self.replica, 0 if self._group is None else self._group.rank, position)

    def backward(self, loss: torch.Tensor, weight: float | torch.Tensor | None = None, *, last: bool = False) -> None:
        """Gradients of `loss`, a sum over `weight` items (None: it counts 1, so that means are averaged); a scalar tensor.

        `last`: no other micro-batch of the batch follows. The values of loss and weight are not read on the host.
        """
        check_loss(loss)
        check_weight(weight)
        with self._leaves.backward(get_gradient_edge(loss).node):
            several = () if self._sharded is None else self._sharded.before_backward()
            self._gradients.before_backward(last, several=several)
            self.adding = True
            self._book.add(loss, weight)
            scaler = self.registered.scaler
            if self._compute_dtype is torch.float32:
                (loss if scaler is None else scaler.scale(loss)).backward()
            else:
                with torch.autocast(self._device.type, enabled=False):
                    (loss if scaler is None else scaler.scale(loss)).backward()
        self._gradients.after_backward()
        if self._compute_dtype is not torch.float32:
            torch.clear_autocast_cache()  # the next micro-batch casts parameters again, as a loop with one context each does

    def expect_backward(self, *, last: bool = False) -> None:
        """One call of `loss.backward()` by the user follows; its gradients count 1 and its loss is not known. `last` as for
        `backward`."""
        self._gradients.before_backward(last, own=True)
        if self._outside is None:
            self._outside = with_gradient(self._known)

    def own_backward_done(self) -> bool:
        """The call that was expected is over. False: it has reached no parameter, and is expected still."""
        self._gradients.check()
        if not self._gradients.reached:
            return False
        self._gradients.after_backward()
        self._book.add(None, None)
        if self._compute_dtype is not torch.float32:
            torch.clear_autocast_cache()
        return True

    def skip(self, *, last: bool = False) -> None:
        """The next micro-batch, or the one whose backward is expected, counts nothing. All ranks of the replica skip it."""
        if not self._gradients.expects:
            self._gradients.before_backward(last)
        elif self._gradients.reached:
            raise MisuseError("a micro-batch was skipped after its backward; skip it before")
        if self._sharded is not None:
            self._sharded.before_backward()  # what its forward computed has none
        self._gradients.after_backward()
        self._book.add(torch.zeros((), device=self._device), 0.0)

    def trained_outside(self) -> str:
        """A parameter that is not registered and has got a gradient since the first `expect_backward`, or ""."""
        before, self._outside = self._outside or {}, {}
        found = [parameter for key, parameter in with_gradient(self._known).items() if key not in before]
        return described(found[0]) if found else ""

    def check_no_backward(self) -> None:
        """Raises MisuseError for a backward that came after `end`, by name."""
        self._gradients.check_fault()

    def end(self) -> WorkResult:
        self._autocast.check()
        self._autocast.end()
        self._gradients.end()
        self._reshard()
        self._unchanged.check()  # before the book goes: without it nothing of this batch can be committed
        self._checked = True
        self._buffers.check()
        present = self._present()
        self._check_used(present)
        self._book.fill(present)
        for index in reversed(range(len(self._book.tensors))):
            self._marks.wrote(self._mark(index), self._book.tensors[index].device)
            self._marks.handed_out(self._mark(index))
            self._on_bucket(index)
        return WorkResult(self._book.mean_loss, self._book.weight)

    def _check_used(self, present: Sequence[bool]) -> None:
        """Raises MisuseError if the first batch with a weight has used no registered parameter."""
        self._used = self._used or any(present)
        if not self._used and float(self._book.weight) > 0:
            raise MisuseError(
                "no registered parameter has a gradient after the first step: its loss was computed without the registered "
                "modules (by a copy, or by one that was wrapped or rebuilt after session.register); train the registered ones"
            )

    def _present(self) -> Sequence[bool]:
        """Which parameters this rank's backwards used. FSDP2 reduces zeros of the others, so all have a gradient then."""
        if self._sharded is None:
            return self._gradients.present
        reached = zip(self._parameters, self._gradients.present, strict=True)
        return [there if is_scalar(parameter) else self._sharded.used(parameter) for parameter, there in reached]

    def _reshard(self) -> None:
        if self._sharded is not None:
            self._sharded.reshard()

    # ---------------------------------------------------------------- updates

    def apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        self._autocast.end()
        self._reshard()
        with outside_autocast():
            return self._apply(record, reduced)

    def _apply(self, record: CommitRecord, reduced: Sequence[torch.Tensor] | None) -> Update | None:
        if not self._checked:
            self._unchanged.check()
            self._buffers.check()
        self._unchanged.check_device()
        totals = None if reduced is None else self._book.read(reduced)
        self._failed = True
        if reduced is None or totals is None or not totals.weight > 0:  # nothing was summed, or nothing counts
            record = dataclasses.replace(record, applied=False)
            self._gradients.drop()
            self._buffers.discard()
        else:
            self._gradients.install(reduced[len(self._book.tensors) :], totals.weight, totals.present)
            self._buffers.commit(totals.changed, totals.floats, totals.integers, record.summed)
        update = self._run_update(record, totals)
        self._buffers.adopt()
        self._unchanged.record()
        self._failed = self._checked = False
        return update

    def _run_update(self, record: CommitRecord, totals: Any) -> Update | None:
        factor = self.policy.factor(len(record.summed), self.replicas) if record.applied else 1.0
        rate = first_rate(self.registered.optimizers, factor)
        states = random_states() if self._watched < _WATCHED else None
        with self._guard.update(factor):
            if self._update is None:
                overflowed = totals is None and bool(record.contributors)  # none where all batches are left out by order
                norm = default_update(self.registered, self._parameters, record, self._group, self._tensor, overflowed)
            else:
                norm = gradient_norm(self._parameters, self.registered.scaler, self._group, self._tensor)
                self._update(UpdateRecord.of(record, totals.loss if record.applied else math.nan))
        if states is not None:
            self._watched += 1
            if random_states()[: len(states)] != states:
                raise MisuseError(
                    "the update drew random numbers, which are others on each replica; draw them from a generator that follows "
                    "from the record, such as torch.Generator().manual_seed(record.step)"
                )
        if not record.applied:
            return None
        return ModuleUpdate(norm, rate, totals.loss, totals.weight)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Around an evaluation of the user's, between two steps. Optimizers that average the weights have put these into the
        parameters."""
        self._reshard()
        averaged = averaged_weights(self._averaging)
        with self._unchanged.apart(self._averaging), averaged, evaluating(self.registered, self._buffers):
            yield

    # ---------------------------------------------------------------- state

    def state(self) -> State:
        return self._state.read()

    def state_growth(self) -> int:
        return growth_of(self.registered.optimizers.values())

    def portions(self) -> Mapping[str, Portion]:
        dp, tp = self._group, None if self._tensor is None else self._tensor.group
        sizes = {"dp_shard": 1 if dp is None else dp.size, "tp": 1 if tp is None else tp.size}
        group_rank = (0 if dp is None else dp.rank) * sizes["tp"] + (0 if tp is None else tp.rank)
        return portions_of(self._state, ReplicaMesh(sizes, group_rank))

    def check_copies(self) -> None:
        if self._tensor is not None:
            check_copies(self._state, self._tensor)

    def load(self, state: State) -> None:
        self._autocast.end()
        self._reshard()
        self._state.load(state)
        self._gradients.drop()
        self._unchanged.record()
        self._failed = self._checked = False

    def resumed(self) -> str:
        text = self._hyperparameters.resumed()
        self._unchanged.record()
        return text

    def close(self) -> None:
        self._autocast.end()
        self._gradients.close()
        if self._sharded is not None:
            self._sharded.close()
        self._guard.close()
