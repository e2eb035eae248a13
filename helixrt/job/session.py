"""The session: how a user's own loop trains fault-tolerantly (DESIGN.md, "The public API").

    def train(session):
        model = session.parallelize(build())
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        session.register(model=model, optimizers=[optimizer], clip_norm=1.0)
        loader = DataLoader(data, batch_size=8, sampler=session.sampler(data, shuffle=True))
        for step in session.steps(loader, until=1000, accumulate=4):
            for x, y in step:
                step.backward(loss_sum(model(x), y), weight=y.numel())
            done = step.commit()
            session.log({"loss": done.loss})

In: what the rank's process was told, and a `Host` that opens the rank's parts (`session_host`). Out: the loop. `steps`
is the command loop of the rank's worker as a generator: state is fetched, loaded, replayed, saved and evaluated inside it,
in the user's thread, and it yields only what this replica has to compute.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from helixrt.engines.deepspeed import DeepSpeedEngine
from helixrt.engines.module import ModuleEngine
from helixrt.engines.pipeline import PipelineEngine
from helixrt.engines.registered import Registered, Stateful
from helixrt.engines.staged import StagedModel, Stages
from helixrt.engines.tensor_plan import TensorPlan
from helixrt.engines.update import UpdateFunction
from helixrt.errors import ConfigError, Departed, MisuseError
from helixrt.job.checkpoint import is_due
from helixrt.job.deepspeed import deepspeed_engine, wrap_calls
from helixrt.job.evaluation import Evaluation, Part, PartSums
from helixrt.job.idle_steps import IdleSteps
from helixrt.job.loader_checks import check_last_batches, reads_all_items
from helixrt.job.per_replica import PerReplicaState, published
from helixrt.job.placement import Placement
from helixrt.job.prepared import prepare
from helixrt.job.rank_place import RankPlace
from helixrt.job.sampler import StreamSampler, stream_sampler
from helixrt.job.scalars import scalars
from helixrt.job.session_host import Host, Plan, SessionSettings
from helixrt.job.setting_types import check_types
from helixrt.job.shared_data import Data, ShardSplitter, over_streams
from helixrt.job.step import Batch, Committed, SessionEngine, Step
from helixrt.job.stream import Stream, StreamSettings
from helixrt.replica.commands import Evaluate
from helixrt.replica.contracts import Number

if TYPE_CHECKING:
    from helixrt.engines.captured import CapturedModel
    from helixrt.engines.example_batch import ExampleBatch

log = logging.getLogger(__name__)
Module = TypeVar("Module", bound=nn.Module)
Frozen = TypeVar("Frozen", bound=Callable[[int], Iterable[nn.Module | nn.Parameter]])


class Session(RankPlace):
    """A user's access to the job, one per rank; given to the train function. Used from one thread."""

    def __init__(self, settings: SessionSettings, host: Host) -> None:
        self._placement = Placement(settings, host)
        super().__init__(settings, host, self._placement.device)
        self._engine: SessionEngine | None = None
        self._per_replica: Mapping[str, Stateful] = {}
        self._evaluation: Evaluation | None = None
        self._frozen: Callable[[int], Iterable[nn.Module | nn.Parameter]] | None = None
        self._step: Step[Any] | None = None  # the newest
        self._last: Committed | None = None  # of the step before it
        self._began = self._ended = False
        self.departed: Departed | None = None  # with what the loop was ended because the replica leaves the run

    @property
    def step(self) -> Step[Any] | None:
        """The step that the loop is in, or was in last."""
        return self._step

    @property
    def began(self) -> bool:
        """The loop was begun."""
        return self._began

    @property
    def left_early(self) -> bool:
        """The loop was left before its last step."""
        return self._began and not self._ended

    # ---------------------------------------------------------------- before the loop

    @overload
    def parallelize(self, model: Module, *, tp_plan: TensorPlan | None = None) -> Module: ...

    @overload
    def parallelize(self, model: Stages) -> StagedModel: ...

    @overload
    def parallelize(
        self,
        model: nn.Module,
        *,
        tp_plan: TensorPlan | None = None,
        example: ExampleBatch,
        weights: str | Path | None = None,
    ) -> CapturedModel: ...

    def parallelize(
        self,
        model: nn.Module | Stages,
        *,
        tp_plan: TensorPlan | None = None,
        example: ExampleBatch | None = None,
        weights: str | Path | None = None,
    ) -> nn.Module:
        """Place the model for training, before its optimizer is made: on this rank's device. Parameters keep their type; with
        dtype="bfloat16" forward and loss of each micro-batch run under autocast.

        With `Mesh(dp_shard=n)` its parameters are sharded over the replica's n ranks by FSDP2 (`fully_shard`): for each block
        of the model, then for the rest. A block is a module of a class that `_no_split_modules` names, else an element of a
        `ModuleList` (or numbered `ModuleDict`) of modules of one class. Modules to which you have applied
        `fully_shard(..., mesh=session.device_mesh)` stay as they are. dtype="bfloat16" is FSDP2's mixed precision then. Every
        rank builds the whole model with the same values, and calls this; it initializes torch.distributed in this process.

        With `Mesh(tp=n)` its parameters are cut by a tensor-parallel plan first: `tp_plan`, else the model's own
        (`model.tp_plan`, as Hugging Face models have it), else that of helixrt for GPT-2. A plan maps names of modules, in
        which `*` stands for any one part between dots, to styles: "colwise", "rowwise" and others of
        `helixrt.engines.tensor_styles`, or a `torch.distributed.tensor.parallel.ParallelStyle`. tp ranks of a replica read the
        same stream and begin each batch with the same random state; what draws random numbers for a cut tensor without DTensor
        (dropout of a rank's own attention heads) draws the same for each rank's part. With tp of 1 the plan is not used.

        A model in stages (`Stages`) gives the parts of this rank, for Mesh(pp=...) of any size, also with cp and tp where its
        parts are built for them (`group`, `Stages.layouts`), and with dp_shard, over which FSDP2 shards the parts of each
        stage, by schedules that need no captured graphs; it trains by `step.train`. With dtype="bfloat16" forward and loss of
        the parts run under autocast, and each weight is cast once per step.

        A compiled model (`helixrt.compile(model, loss=..., microbatches=...)`) and `example`, a batch as `step.train` takes it,
        give the same for a model that was not written in parts: it is captured whole without memory, cut between its layers,
        and what this rank needs of it is made. Of a model on the meta device it is initialized by the model's own rule, with
        the run's seed, or read from `weights`, a safetensors file or a folder of them; what a real model has is taken over, and
        the rest of it is freed. With dtype="bfloat16" it is captured under autocast, and each weight is cast once per step.
        With tp a plan cuts it as above; a rank's parameters are plain tensors then, its parts. With cp, for models
        of transformers, a batch is cut along the sequence. dp_shard must be 1.

        Raises ConfigError for a mesh that a session cannot train yet, and a model without stages in a mesh with pp above 1;
        CaptureError for a model that cannot be captured or cut; MisuseError for a
        model on the meta device that is not cut, a plan that is missing or does not fit the model, and if torch.distributed is
        initialized already.
        """
        return self._placement.place(model, tp_plan, example, weights)

    def register(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | Mapping[str, torch.optim.Optimizer] = (),
        schedulers: LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler] = (),
        *,
        clip_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        extra: Mapping[str, Stateful] | None = None,
        buffers: Mapping[str, str] | None = None,
        per_replica: Mapping[str, Stateful] | None = None,
        hyperparameters: Literal["checkpoint", "script"] = "checkpoint",
    ) -> None:
        """Register what is trained: all objects that the update changes. They are equal on all replicas, bit for bit.

        `model`: one module, or several by name. `optimizers`, `schedulers`: one, or several in the order of their steps.
        `clip_norm`: gradients are scaled down to this norm, taken over all parameters. `scaler`: a `torch.amp.GradScaler`;
        losses are scaled with it. `extra`: other objects with `state_dict` and `load_state_dict` that the update changes, such
        as an average of the weights. `buffers`: what becomes of a buffer that a forward changes, over the replicas: "mean" (of
        integers the maximum), "first" (the value of the lowest contributor) or "per_replica" (each rank has its own, as objects
        in `per_replica`). In a name `*` stands for any one part between dots. Without it running statistics of torch's own
        modules are united as `RunOptions(buffers=)` says, small persistent integers by their maximum; others may not change.
        `per_replica`: objects with the same two methods that the loop changes, and not the update: each replica has its own. A
        step whose work was dropped begins again with the state that it had; a replica that starts again takes the newest
        published state at or before its position. `hyperparameters`: whose learning rates and other settings of optimizers and
        schedulers a resumed run takes where they differ, which is told: those of its checkpoint, or of the script (a rate that
        a scheduler has changed is scaled). A replica that joins a running run takes the run's. Call it once, after the
        models are on their device. Raises MisuseError for what cannot be trained, by name.
        """
        if self._engine is not None:
            raise MisuseError("session.register was called twice; register everything in one call")
        self.settings.mesh.check_supported()
        check_types(Session.register, {"clip_norm": clip_norm, "extra": extra, "buffers": buffers, "per_replica": per_replica})
        registered = Registered.of(
            model,
            optimizers,
            schedulers,
            clip_norm=clip_norm,
            scaler=scaler,
            extra=extra,
            buffers=buffers,
            hyperparameters=hyperparameters,
        )
        self._engine = self._placement.engine(registered, model)
        self._per_replica = {**(per_replica or {}), **self._engine.per_replica}

    def deepspeed(
        self,
        engine: Any,
        *,
        buffers: Mapping[str, str] | None = None,
        per_replica: Mapping[str, Stateful] | None = None,
    ) -> Any:
        """Train with a DeepSpeed engine in each replica, in place of `parallelize` and `register`; gives the engine back.

        `engine`: a function that calls `deepspeed.initialize` and gives its engine, run once the ranks of this replica are
        connected; or an engine that was made after `session.device_mesh`. ZeRO 1, 2 or 3 divides it over the replica's ranks
        (`Mesh(dp_shard=n)`), in float32 or bfloat16 as its own configuration says, which also has clipping, accumulation and
        the schedule of learning rates. In the loop, with `accumulate` as it is configured there, `engine.backward(loss)` and
        `engine.step()` stand for `step.backward` and, after the last micro-batch, `step.commit`; either may be called. The
        others are as in `register`.

        Raises ConfigError for a mesh or a setting that cannot be trained (deepspeed.KEY), MisuseError for a second call and for
        what is no engine over this replica's ranks.
        """
        if self._engine is not None:
            raise MisuseError("session.deepspeed comes once, in place of session.register")
        made, self._engine = deepspeed_engine(self.settings, self.device, self._placement.shard_group, engine, buffers)
        self._per_replica = {**(per_replica or {}), **self._engine.per_replica}
        wrap_calls(made, lambda: self._step)
        return made

    def update(self, function: UpdateFunction) -> UpdateFunction:
        """Decorator: run `function(record)` as the update, in place of clipping and stepping.

        Gradients are in `p.grad`, divided by the total weight; where no contributor had one, or `record.applied` is False, it
        is None. The function changes registered state alone, as a function of that state, the gradients and the record
        (`record.step`, `record.summed`, and `record.loss`, the mean loss of the step over all contributors): it also runs when
        a replica that was behind repeats an update. It may not draw random numbers or read anything else that changes. Autocast
        of the loop is off in it.
        """
        self._registered().set_update(function)
        return function

    def freeze(self, function: Frozen) -> Frozen:
        """Decorator: `function(step)` returns a list of the modules and parameters that update number `step` does not train; it
        runs before the batches of each step. They have no gradient then, so optimizers leave them and their state as they are.
        It is a function of the number alone, so a replica that starts again, and a resumed run, freeze the same ones. All
        parameters that any step trains are registered as trained, with their optimizers and groups. Call it before the loop.
        Raises MisuseError for a model in stages and DeepSpeed, and in a step for what is not registered, and for a replica of
        several ranks."""
        if not isinstance(self._registered(), ModuleEngine):
            raise MisuseError("session.freeze is not for a model in stages or a DeepSpeed engine")
        self._frozen = function
        return function

    def sampler(self, data: Sized, shuffle: bool = False) -> StreamSampler:
        """The ids of this rank's stream over a data set with a length: each epoch an order of its own (with `shuffle`), dealt
        over all streams. Raises ConfigError for a data set without a length, or with fewer items than streams."""
        given = self.settings
        return stream_sampler(data, self.streams, self.stream, shuffle=shuffle, seed=given.seed, deals=given.deals)

    def split_shards(self, shuffle: bool = True) -> ShardSplitter:
        """Gives this rank's stream its part of a list of files, another one in each epoch (with `shuffle`): the `nodesplitter`
        of `wds.WebDataset(urls, nodesplitter=split, shardshuffle=False)`; for its items `.shuffle(1000, rng=split.random)`."""
        return ShardSplitter(self.streams, self.stream, shuffle=shuffle, seed=self.settings.seed)

    def over_streams(self, dataset: Data) -> Data:
        """The same `StreamingDataset` of litdata or mosaicml-streaming, which from now on shares its items out over all streams
        of the run, and not over the ranks of this replica. Raises ConfigError for another object."""
        return over_streams(dataset, self.streams, self.stream)

    def evaluate(self, function: Callable[[], Number | Mapping[str, Number]], *, every: int, at_start: bool = False) -> None:
        """Run `function()` after every `every` updates and after the last one, and with `at_start` before the first one, on all
        ranks of one replica, between two steps, without gradients. What it returns, a number or a mapping of names to numbers,
        is averaged over these ranks and logged as validation, once for each agreed state. It must leave registered state as it
        is; running buffers and the modules' training mode are put back behind it. With an optimizer that has `eval` and `train`
        (schedule-free ones) the parameters are the averaged weights in it. Call this before the loop."""
        self._set_evaluation(Evaluation(function, every, at_start=at_start))

    def evaluate_shared(self, function: Callable[[Part], PartSums], *, every: int, at_start: bool = False) -> None:
        """As `evaluate`, with the work shared: every replica that has the agreed state runs `function(part)` over its part of
        the data, and the sums of all parts give one mean, logged once for each agreed state. `part.of(n)` are the numbers of
        the part's items, of n.

        A replica that is behind has no part. If one is lost before it has told its sums, the figure is over the other parts
        and says so; after the last step the other replicas evaluate them. All ranks of a replica get the same part, and run
        the same forwards; sums and weights are averaged over its dp_shard ranks, which may divide the part by `shard`."""
        self._set_evaluation(Evaluation(function, every, shared=True, at_start=at_start))

    def _set_evaluation(self, evaluation: Evaluation) -> None:
        if self._began:
            raise MisuseError("session.evaluate was called after session.steps had begun")
        if self._evaluation is not None:
            raise MisuseError("a session has one evaluation: session.evaluate or session.evaluate_shared was called before")
        self._evaluation = evaluation

    # ---------------------------------------------------------------- the loop

    def steps(self, loader: Iterable[Batch], *, until: int, accumulate: int = 1) -> Iterator[Step[Batch]]:
        """The steps that this replica has to compute, up to update number `until` of the run; `accumulate` micro-batches each.

        `loader`: any iterable of micro-batches that begins anew each time, in a reproducible order; it is begun again at its
        end, with `set_epoch`. A text `content_digest` of it, or of its data set, names what is read, and must be the same in
        all streams and when the run is resumed. While this replica is behind, state is fetched in here. After the last step all
        replicas compare their states, and the loop ends.

        Raises MisuseError for a wrong order of calls, ConfigError for a loader that cannot be used, Retryable or Fatal if this
        replica cannot go on.
        """
        engine = self._registered()
        if self._began:
            raise MisuseError("session.steps was called twice; a run has one loop")
        check_types(Session.steps, {"until": until, "accumulate": accumulate})
        if until < 1:
            raise ConfigError("until", until, "must be at least 1")
        if isinstance(engine, PipelineEngine):
            if accumulate != 1:
                rule = "must be 1 for a model in stages, which cuts each batch itself (microbatches=)"
                raise ConfigError("accumulate", accumulate, rule)
            check_last_batches(loader, engine.schedule.microbatches, engine.fixed_shape)
        if isinstance(engine, DeepSpeedEngine) and accumulate != engine.accumulate:
            rule = f"must be {engine.accumulate}, the gradient_accumulation_steps of the DeepSpeed engine"
            raise ConfigError("accumulate", accumulate, rule)
        self._began = True
        if self.streams > 1 and reads_all_items(loader):
            self._say("each replica reads all items of this DataLoader; sampler=session.sampler(dataset) deals them out")
        if self.stream == 0 and self.settings.mesh.ranks * self.replicas > 1 and _accelerate_is_alone():
            way = "losses are united by step.backward and step.commit, figures by session.evaluate_shared"
            self._say(f"accelerate knows one process here, so its prepare, gather and reduce act in each rank alone; {way}")
        stream = Stream(loader, self.settings.stream(accumulate), self._host.store, self._say, self._host.folder)
        own = self._own_state(self.settings.stream(accumulate), until)
        given = self._evaluation
        evaluated = (0, self._evaluate) if given is None else (given.every, self._evaluate, given.shared, given.at_start)
        worker = self._host.open(engine, Plan(until, accumulate, *evaluated))
        idle = IdleSteps((p for _, p in engine.registered.parameters()) if isinstance(engine, ModuleEngine) else (), self._say)
        try:
            while (order := worker.next_work()) is not None:
                own.begin(order.position, order.step)
                engine.begin(order.on_bucket)
                if self._frozen is not None and isinstance(engine, ModuleEngine):
                    engine.freeze(self._frozen(order.step))
                batches = stream.take(order.position)
                self._step = Step(engine, worker, order, batches, accumulate, partial(stream.note, order.position))
                yield self._step
                self._step.check_committed()
                idle.after(self._step)
                self._last = self._step.done
            own.end(self._after(accumulate))
            self._ended = True
        except Departed as left:
            behind = self._after(accumulate)
            if behind is None and self._step is not None:
                own.left(self._step.position)
            own.end(behind)
            self.departed = left
            raise
        finally:
            stream.close()

    def prepare(
        self,
        *things: Any,
        until: int,
        accumulate: int = 1,
        clip_norm: float | None = None,
        buffers: Mapping[str, str] | None = None,
        hyperparameters: Literal["checkpoint", "script"] = "checkpoint",
    ) -> tuple[Any, ...]:
        """For an existing loop: registers the models, optimizers and schedulers among `things`, and gives them back
        in the same order, with stand-ins for the optimizers, the schedulers and the one loader:

            for x, y in loader:                        # over all epochs, up to update number `until`
                loss_fn(model(x), y).backward()
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

        The loader waits while this replica is behind, and gives the same batches again after a step that was not committed
        (`committed` is False then). `optimizer.step()` after every `accumulate`-th backward is the exchange, the agreement and
        the update of all optimizers, which clips to `clip_norm` and steps the schedulers; before it, `step()` and `zero_grad()`
        do nothing. `scheduler.step()` only checks that it is called once for each `optimizer.step()`. Each backward counts 1:
        mean losses are averaged over micro-batches and replicas, so do not divide them by `accumulate`. `buffers` and
        `hyperparameters` as in `register`.

        Models are moved to this rank's device and keep their parameters. Raises ConfigError for a mesh with more than one rank
        in a replica; MisuseError for what is none of the four kinds, or has no or several loaders, and in the loop for each
        wrong order of calls.
        """
        settings = {"clip_norm": clip_norm, "buffers": buffers, "hyperparameters": hyperparameters}
        return prepare(self, things, until=until, accumulate=accumulate, settings=settings, say=self._say)

    def log(self, values: Mapping[str, Number]) -> None:
        """Record figures of the step that was committed last: numbers, or tensors with one element, which are read here. Of a
        step that was not committed nothing is recorded."""
        done = self._committed("session.log")
        if done.committed:
            assert self._step is not None and self._step.timing is not None
            self._host.log(done.step, scalars(values), self._step.timing)

    def stop(self, reason: str) -> None:
        """End the run early: after one of the next steps, the same on all replicas. The state is saved and
        evaluated as after the last step, code behind the loop runs, and `helixrt.run` returns; the report has the reason. Call
        it within the loop, on one replica or on several. The loop continues until the agreed step.

        Raises MisuseError outside the loop, and for a reason that is no text of 1 to 200 characters.
        """
        if not self._began or self._ended:
            raise MisuseError("session.stop was called outside the loop over session.steps")
        if not isinstance(reason, str) or not 1 <= len(reason) <= 200:
            raise MisuseError(f"session.stop takes a reason of 1 to 200 characters, not {reason!r}")
        self._host.stop(reason)

    @property
    def committed(self) -> bool:
        """Whether the step that was committed last is in the run."""
        done = (self._step.done if self._step is not None else None) or self._last
        return (done or self._committed("session.committed")).committed

    def busy(self, doing: str, limit_s: float) -> AbstractContextManager[None]:
        """A context for work of the user that takes longer than a step may (compiling, writing files): within it this rank is
        not treated as stuck until `limit_s` seconds have passed. The other replicas continue without this one."""
        if not limit_s > 0:
            raise ConfigError("limit_s", limit_s, "must be above 0")
        return self._host.busy(doing, limit_s)

    # ---------------------------------------------------------------- inside

    def _evaluate(self, order: Evaluate) -> None:
        if self._evaluation is not None:
            with self._registered().evaluating():
                measured = self._evaluation.run(order, self._placement.connected)
            torch.clear_autocast_cache()  # of an autocast around the loop: casts that were made without gradients
            self._host.validation(order, measured)

    def _own_state(self, stream: StreamSettings, until: int) -> PerReplicaState:
        every, between = self.settings.loader_every, self.settings.checkpoint_every
        states, saved = published(stream.name, self._host.store, self._host.folder, self._say)
        return PerReplicaState(self._per_replica, states, saved, every, lambda step: is_due(step, between, until), self._say)

    def _after(self, accumulate: int) -> int | None:
        """The position behind the newest step, if it was committed."""
        done = None if self._step is None else self._step.done
        return self._step.position + accumulate if self._step is not None and done is not None and done.committed else None

    def _registered(self) -> SessionEngine:
        if self._engine is None:
            raise MisuseError("session.register(model=..., optimizers=[...]) must come first")
        return self._engine

    def _committed(self, what: str) -> Committed:
        if self._step is None or self._step.done is None:
            raise MisuseError(f"{what} comes after step.commit(), or the optimizer.step() that ends a prepared step")
        return self._step.done

    def _say(self, text: str) -> None:
        log.info(text)
        self._host.say(text)


def _accelerate_is_alone() -> bool:
    """Whether the program uses an `Accelerator` that was made before torch.distributed was initialized, or without it."""
    state: Any = sys.modules.get("accelerate.state")
    return state is not None and state.is_initialized() and state.PartialState().num_processes == 1
