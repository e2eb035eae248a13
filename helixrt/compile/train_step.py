"""A train step: a batch in, the mean loss out, gradients in `p.grad`.

In: a module and `Options`. The first call with arguments of new shapes (or under another autocast, dtype or device, with other
parameters frozen or tied, other attention kernels allowed: `state_key`), or after a change of any Python value that the
capture read (an attribute, a global, a variable of a closure, a function, a hook: `guards_private`), captures the module, plans
and weaves; such graphs are kept, the last used `Options.shapes` of them. What forward does besides tensors happens once, at
capture.

Out: exactly what a plain loop leaves behind (`plain_loop`): the sum of gradients in the same order, buffers, the state of
random generators, calls of gradient hooks once per micro-batch. DistributedDataParallel modules may be compiled, before
or after they are wrapped: ranks exchange gradients during the last micro-batch's backward, and not at all under `no_sync()`.
For BatchNorm in a region of `torch.utils.checkpoint` eager changes the running statistics twice, the graph once.
"""

from __future__ import annotations

import pickle
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from helixrt.compile.explanation import Explanation, explained, with_times
from helixrt.compile.kept_graphs import KeptGraphs
from helixrt.compile.microbatches import Batch
from helixrt.compile.options import Options
from helixrt.compile.recapture import Together
from helixrt.compile.state_key import ambient_key, tensors_key
from helixrt.errors import ConfigError
from helixrt.parallel import CONTEXTS
from helixrt.passes import nodes
from helixrt.passes.aot_private import location_of
from helixrt.passes.autocast import autocast_to, without_autocast
from helixrt.passes.capture import capture, watched
from helixrt.passes.errors import CaptureError
from helixrt.passes.groups import group_name
from helixrt.passes.guards_private import Guards
from helixrt.passes.lift import Cast, lift
from helixrt.passes.parts import Part, Port, Role
from helixrt.pipeline.data_parallel import DataParallel, Wrapper, data_parallel
from helixrt.pipeline.gradients import ParameterGradients, hooked
from helixrt.pipeline.single_stage import SingleStage
from helixrt.pipeline.strands import Strands, build


@dataclass(frozen=True)
class Captured:
    """Graphs for one kind of call, or why there are none."""

    joint: Part | None
    strands: Strands | None
    failure: CaptureError | None
    seconds: float
    reason: str = ""  # why there is a single strand, if two were asked for
    number: int = 0  # the same on all ranks that captured together
    casts: tuple[Cast, ...] = ()  # of parameters, that the graphs take in


class TrainStep:
    """`model.train_step`. Holds the model weakly; copies and pickles go with the model, graphs do not."""

    def __init__(self, model: nn.Module, options: Options) -> None:
        self._model = weakref.ref(model)
        self.options = options
        self.wrapper = Wrapper()
        self.together = Together()
        self.forget()

    def forget(self) -> None:
        """Drop all graphs; the next call captures again."""
        self.captured: KeptGraphs[Captured] = KeptGraphs(self.options.shapes)
        self.latest: Captured | None = None
        self.warned: set[str] = set()

    @property
    def model(self) -> nn.Module:
        model = self._model()
        if model is None:
            raise ReferenceError("the model of this train_step is gone: train_step does not keep it alive, a variable must")
        return model

    def __call__(self, *inputs: Any, target: Any = None, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of all micro-batches; returns the mean loss, without autograd.

        Raises ConfigError for a batch that cannot be split, CaptureError (if strict) saying where and what to change,
        DisagreementError when ranks would launch different collectives.
        """
        options = self.options
        if torch.is_inference_mode_enabled():
            raise ConfigError("inference_mode", True, "there are no gradients in it; call train_step outside")
        if options.loss is lost_loss:
            lost_loss(None, None)
        chosen = {
            "schedule": options.schedule != "auto",
            "cuts": options.cuts is not None,
            "costs": bool(options.costs),
            "memory_gb": options.memory_gb > 0,
            "adapt": options.adapt is not None,
            "context": options.context != CONTEXTS[0],
        }
        for name in (name for name, given in chosen.items() if given):
            rule = "is for a pipeline: session.parallelize(model, example=...), then step.train"
            raise ConfigError(name, getattr(options, name), rule)
        if target is not None and options.loss is None:
            raise ConfigError("target", type(target).__name__, "needs a loss: helixrt.compile(..., loss=...)")
        batch = Batch(inputs, kwargs, target, options.microbatches, options.chunk_dims)
        with autocast_to(options.autocast, device_of(self.model)):
            return self.run(batch)

    def run(self, batch: Batch) -> torch.Tensor:
        """One step of a batch that can be split, under the autocast that its forward is to have."""
        options = self.options
        parallel = data_parallel(self.wrapper.of(self.model))
        module = parallel.module
        loss = options.loss if isinstance(options.loss, nn.Module) else None
        kept, tensors = self.captured, [tensors_key(each) for each in (module, loss) if each is not None]
        key = (batch.key(), *tensors, ambient_key())
        found = kept.find(key)
        if not self.together.same(0 if found is None else found.number) or found is None:
            found, guards = self.capture(module, batch)
            kept.keep(key, found, guards)
            if kept.dropped:
                self.warn(
                    f"captured more than shapes={options.shapes} kinds of calls, and each takes time; pass what changes from "
                    "step to step as a tensor, not as a number or an attribute of a module, and keep the number of shapes small"
                )
        self.latest = found
        if found.strands is None or found.joint is None:
            self.warn(f"trained by a plain loop, without strands: {found.failure}")
            return self.plain_loop(batch, parallel)
        stage = SingleStage(found.strands, module, loss, found.casts)
        gradients = ParameterGradients(stage.parameters(), found.joint.layouts)
        last = parallel.begin(gradients)
        with parameters_stay(gradients):
            return stage.run(batch.inputs, gradients, last=last, input_gradient=batch.add_gradient).mean()

    def capture(self, module: nn.Module, batch: Batch) -> tuple[Captured, Guards | None]:
        """Graphs for calls like this one, and what they were captured with. Raises CaptureError if strict."""
        began = time.perf_counter()
        args, kwargs, target = batch.calls[0]
        options = self.options
        try:
            self.captured.make_room(location_of(module))
            joint = capture(module, args, kwargs, loss=options.loss, target=target)
        except CaptureError as error:
            if options.strict:
                raise
            # Not the error itself: its traceback and causes hold the frames of the capture, and in them the batch.
            failure = CaptureError(error.where, error.reason, error.remedy)
            return Captured(None, None, failure, time.perf_counter() - began, number=self.together.captured(())), None
        guards = watched(joint, module, options.loss)
        check_loss(joint, options)
        woven, reason = (options.strands or 2) if options.microbatches > 1 else 1, ""
        if woven == 2 and any(nodes.is_random(node) and nodes.origin(node).backward for node in joint.graph.nodes):
            woven, reason = 1, "the backward draws random numbers, which must come before those of the next forward"
        lifted = lift(joint)
        strands = build(lifted.part, strands=woven, mode=options.profile, codegen=options.codegen)
        number = self.together.captured(group_name(node) for node in joint.graph.nodes if nodes.communicates(node))
        return Captured(joint, strands, None, time.perf_counter() - began, reason, number, lifted.casts), guards

    def warn(self, message: str) -> None:
        """Once for each beginning of a message."""
        if message[:20] not in self.warned:
            self.warned.add(message[:20])
            warnings.warn(message, stacklevel=4)

    def plain_loop(self, batch: Batch, parallel: DataParallel) -> torch.Tensor:
        """What the graphs stand for."""
        losses = []
        for index, (args, kwargs, target) in enumerate(batch.calls):
            with parallel.eager(last=index == batch.count - 1), torch.enable_grad():
                output = parallel.model(*args, **kwargs)
                if self.options.loss is not None:
                    output = self.options.loss(output, target)
                loss = scalar(output if isinstance(output, torch.Tensor) else getattr(output, "loss", None))
                if not loss.requires_grad:
                    raise ConfigError("loss", "without a gradient", "must depend on a parameter that requires grad")
                with without_autocast():  # as the graphs have it
                    (loss / batch.count).backward()
            losses.append(loss.detach())
            for port, value in batch.inputs[index].items():
                if value.grad is not None:
                    batch.add_gradient(index, port.name, value.grad)
        return torch.stack(losses).mean()

    def explain(self, *, times: bool = False) -> Explanation:
        """What the latest call ran: captured, woven or not, operators, pairs, predicted and measured times, memory.

        A model that does not communicate is woven without a profile. With `times` its operators are measured now, so that
        there are times to tell and a picture to draw.
        """
        latest = self.latest
        if latest is None:
            return Explanation(state="not captured yet: call train_step first")
        if latest.strands is None:
            return Explanation(state="fallback", reason=str(latest.failure), seconds=latest.seconds)
        strands = with_times(latest.strands, self.options.profile) if times else latest.strands
        explanation = explained(strands, latest.seconds, self.options)
        return replace(explanation, reason=latest.reason) if latest.reason else explanation

    def __getstate__(self) -> dict[str, Any]:
        options = self.options
        try:
            pickle.dumps(options.loss)
        except Exception:  # a lambda, say; the model must stay picklable
            options = replace(options, loss=lost_loss)
        return {"model": self.model, "options": options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["model"], state["options"])  # type: ignore[misc]

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        copied = memo.get(id(self.model))
        if copied is None:  # only this object is copied, not the model
            return TrainStep(self.model, self.options)
        return TrainStep(copied, self.options)


def lost_loss(output: Any, target: Any) -> torch.Tensor:
    """Stands for a loss that could not be pickled with its model."""
    raise ConfigError("loss", "not pickled", "was a lambda or local function; call helixrt.compile(model, loss=...) again")


def device_of(module: nn.Module) -> torch.device:
    """That of its parameters; the processor for a module without."""
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def check_loss(joint: Part, options: Options) -> None:
    """Raises ConfigError unless the graph's one output is a loss that backward can start from."""
    outputs = [port for port in joint.outputs if port.role is Role.OUTPUT]
    values = joint.graph.output_node().args[0]
    found = outputs == [Port(Role.OUTPUT, "loss")]
    scalar(values[joint.outputs.index(outputs[0])].meta["val"] if found else None)  # type: ignore[index, union-attr]


def scalar(loss: Any) -> torch.Tensor:
    """Raises ConfigError unless it is a tensor of no dimensions."""
    if not isinstance(loss, torch.Tensor):
        raise ConfigError("loss", None, "must be given, or the model must return a scalar or an output with .loss")
    if loss.dim():
        raise ConfigError("loss", f"of shape {list(loss.shape)}", "must be a scalar")
    return loss


@contextmanager
def parameters_stay(gradients: ParameterGradients) -> Iterator[None]:
    """Raises ConfigError when hooks changed a parameter inside: later micro-batches may have begun before."""
    parameters = gradients.parameters
    watched = any(hooked(p) or (p.requires_grad and gradients.held(name)) for name, p in parameters.items())
    versions = [(name, p, p._version) for name, p in parameters.items()] if watched else []
    yield
    for name, parameter, version in versions:
        if parameter._version != version:
            raise ConfigError(name, "changed by a gradient hook", "must stay until train_step is done; update it then")
