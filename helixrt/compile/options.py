"""What a user may choose for `helixrt.compile`, checked when it is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

import torch

from helixrt.errors import ConfigError
from helixrt.parallel import CONTEXTS
from helixrt.passes.profile import Mode
from helixrt.schedule.adaptation.policy import Adaptation
from helixrt.schedule.generators.policies import POLICIES
from helixrt.schedule.ir import Schedule

CODEGENS = ("eager", "inductor")


class Keywords(TypedDict, total=False):
    """The keywords of `helixrt.compile` for type checkers: the fields of `Options`, which describes them."""

    loss: Callable[[Any, Any], torch.Tensor] | None
    microbatches: int
    strands: int | None
    schedule: str | Schedule
    cuts: Sequence[str] | None
    costs: str | Path
    adapt: Adaptation | None
    codegen: str
    profile: str
    strict: bool
    autocast: torch.dtype | None
    shapes: int
    chunk_dims: Mapping[int | str, int | None] | None
    memory_gb: float
    context: str


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `helixrt.compile`.

    - `loss(output, target)` gives each micro-batch's mean loss; without it the model returns its loss, alone or as the
      `.loss` of its output. `microbatches`: into how many the batch is split.
    - `strands`: 2 runs the backward of one micro-batch woven with the forward of the next, 1 one after the other. None is 2
      wherever the order pairs them.
    - `schedule`: of a pipeline (`session.parallelize(model, example=...)`): a name that `helixrt schedule --help` lists, or a
      `Schedule`; "auto" is 1f1b. `cuts`: the modules that its later chunks begin with, such as `["model.layers.4"]`; None
      balances chunks.
    - `costs`: the `profile.json` in the folder of an earlier run, which all ranks read: the first order of "zb", "adaptra" or
      "helix" is planned from its costs, which are those of the stages as that run cut them. Without it, the order is planned
      from the times of the layers, where chunks are balanced by measured ones (`profile`), else from equal costs.
    - `memory_gb`: the most GiB that a stage may take for its parameters, their gradients and the optimizer's state (taken as
      four times the parameters) and for what its micro-batches save, by estimate; chunks are balanced within it. 0: no limit.
      `train_step` runs one stage, and takes none of these four.
    - `adapt`: the job may change the order of the schedule while it runs, by measured costs, under the rules of this
      `helixrt.Adaptation`; None: the order is fixed.
    - `codegen`: what runs the graphs' operators, "eager" or "inductor".
    - `profile`: where operators' times come from: "auto" (the disk, and what is not there is measured), "measure",
      "estimate". Models that do not communicate need none. Also the times of the layers by which the chunks of a pipeline are
      balanced: with "auto" they are measured at the start where a step takes long enough and measuring does not take too long,
      with "measure" in any case. "estimate" cuts a model alike on all machines.
    - `strict`: raise for a model that cannot be captured; False warns once and trains it by a plain loop.
    - `autocast`: `torch.bfloat16` runs forward and loss under `torch.autocast` of this type, with gradients in the types of the
      parameters; each weight is cast once per step. None: the autocast that is active around `train_step`; for a pipeline the
      session's dtype, else what is active around `session.parallelize`.
    - `shapes`: for how many shapes of batches (such as sequence lengths) graphs are kept, those of the latest; one that comes
      again after it was dropped is captured again.
    - `chunk_dims`: along which dimension an argument's tensors are split, by position, keyword or "target"; None for
      arguments that every micro-batch gets whole. Others are split along dim 0.
    - `context`: how the ranks of mesh.cp get each other's keys and values: "gathered", in one collective before attention, or
      "ring", by send and receive while they attend to those that are there; no rank holds all of them.
    """

    loss: Callable[[Any, Any], torch.Tensor] | None = None
    microbatches: int = 1
    strands: int | None = None
    schedule: str | Schedule = "auto"
    cuts: Sequence[str] | None = None
    costs: str | Path = ""
    adapt: Adaptation | None = None
    codegen: str = "eager"
    profile: str = "auto"
    strict: bool = True
    autocast: torch.dtype | None = None
    shapes: int = 8
    chunk_dims: Mapping[int | str, int | None] | None = None
    memory_gb: float = 0.0
    context: str = CONTEXTS[0]

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """From keywords. Raises ConfigError."""
        known = [field.name for field in fields(Options)]
        for key, value in given.items():
            if key not in known:
                raise ConfigError(key, value, f"is no option of helixrt.compile; these are {', '.join(known)}")
        return Options(**given)

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise ConfigError("loss", self.loss, "must be callable as loss(output, target)")
        for key, count in (("microbatches", self.microbatches), ("shapes", self.shapes)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ConfigError(key, count, "must be a whole number, at least 1")
        if self.autocast not in (None, torch.bfloat16):
            raise ConfigError("autocast", self.autocast, "must be torch.bfloat16, or None: others need a gradient scaler")
        for key, value, allowed in (
            ("strands", 2 if self.strands is None else self.strands, (1, 2)),
            ("codegen", self.codegen, CODEGENS),
            ("profile", self.profile, tuple(mode.value for mode in Mode)),
            ("strict", self.strict, (True, False)),
            ("context", self.context, CONTEXTS),
        ):
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise ConfigError(key, value, f"must be one of {', '.join(map(str, allowed))}")
        memory = self.memory_gb
        if isinstance(memory, bool) or not isinstance(memory, int | float) or not 0 <= memory < math.inf:
            raise ConfigError("memory_gb", memory, "must be a number of GiB, at least 0")
        if memory and self.cuts is not None:
            raise ConfigError("memory_gb", memory, "is for chunks that are balanced; with cuts= nothing is")
        if self.adapt is not None and not isinstance(self.adapt, Adaptation):
            raise ConfigError("adapt", self.adapt, "must be a helixrt.Adaptation, or None")
        if memory and self.adapt is not None and not self.adapt.memory:
            rule = "would hold for the first order alone; give adapt=helixrt.Adaptation(memory=...) a cap for the others"
            raise ConfigError("memory_gb", memory, rule)
        if not isinstance(self.schedule, Schedule) and self.schedule not in ("auto", *POLICIES):
            raise ConfigError("schedule", self.schedule, f"must be auto, a Schedule, or one of {', '.join(POLICIES)}")
        if not isinstance(self.costs, str | Path):
            raise ConfigError("costs", self.costs, "must be the path of a profile.json")
        if self.cuts is not None and not (isinstance(self.cuts, list | tuple) and all(type(each) is str for each in self.cuts)):
            raise ConfigError("cuts", self.cuts, "must be a list of modules' names, or None")
        dims = {} if self.chunk_dims is None else self.chunk_dims
        for name, dim in dims.items() if isinstance(dims, Mapping) else [(None, None)]:
            if type(name) not in (int, str) or type(dim) not in (int, type(None)):
                raise ConfigError("chunk_dims", self.chunk_dims, "must map positions and keywords to dimensions or None")
