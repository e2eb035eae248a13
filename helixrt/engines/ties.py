"""Parameters of which several stages have a copy each: a tied embedding on the first and on the last stage.

In: the names that are tied and the chunks that have them. Out: `StageTies`: the copies of one stage, whose gradients are to be
summed over the stages, and the check that all copies are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from helixrt.engines.sharded import local
from helixrt.errors import ConfigError, MisuseError


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter with a copy in each of several `chunks`, on several `stages`, in this order; `number` among the model's."""

    name: str
    number: int
    chunks: tuple[int, ...]
    stages: tuple[int, ...]


def ties_of(tied: str | Mapping[str, Sequence[int]], placement: Sequence[int]) -> list[Tied]:
    """The model's, the same on all stages. `tied`: the name of a parameter of the first and the last chunk, "" for none; or, by
    its name, the chunks that have a copy. Copies of chunks on one stage are one parameter, and need no exchange."""
    if isinstance(tied, str):
        tied = {tied: (0, len(placement) - 1)} if tied else {}
    found = []
    for number, name in enumerate(sorted(tied)):
        chunks = tuple(sorted(tied[name]))
        stages = tuple(dict.fromkeys(placement[chunk] for chunk in chunks))
        if len(stages) > 1:
            found.append(Tied(name, number, chunks, stages))
    return found


class StageTies:
    """The ties of a model, and this stage's copies. `modules`: the chunks of the stage, by number. Raises ConfigError
    (stages.tied) for a name that a chunk does not have."""

    def __init__(self, ties: Sequence[Tied], modules: Mapping[int, nn.Module]) -> None:
        self.all = tuple(ties)
        self._own = {tie: parameter for tie in ties if (parameter := _copy_of(tie, modules)) is not None}

    @property
    def trained(self) -> list[tuple[Tied, nn.Parameter]]:
        """This stage's copies whose gradients are summed; the others are frozen."""
        return [(tie, parameter) for tie, parameter in self._own.items() if parameter.requires_grad]

    def copies(self, stage: int) -> set[int]:
        """The `id` of each parameter here that an earlier stage has, too."""
        return {id(parameter) for tie, parameter in self._own.items() if tie.stages[0] != stage}

    def number(self, tie: Tied) -> float:
        """A whole number below 2^48 for this stage's copy: whether it is trained, type, shape and values. 0 without one."""
        parameter = self._own.get(tie)
        if parameter is None:
            return 0.0
        values = local(parameter.detach()).cpu().contiguous()
        said = hashlib.blake2b(f"{parameter.requires_grad} {values.dtype} {list(values.shape)}".encode(), digest_size=6)
        said.update(values.reshape(-1).view(torch.uint8).numpy().data)
        return float(int.from_bytes(said.digest(), "big"))


def check_equal(tie: Tied, numbers: Sequence[float]) -> None:
    """Raise MisuseError, on all stages, unless the copies of the tie are equal; `numbers` are of all stages, in order."""
    first = tie.stages[0]
    for stage in tie.stages[1:]:
        if numbers[stage] != numbers[first]:
            raise MisuseError(
                f"the copies of {tie.name}, which is tied, differ between stage {first} and stage {stage}: they must begin "
                "with the same values (torch.manual_seed before each is made, or copy one), all be trained or all be frozen, "
                "and be updated alike, by the same optimizer with the same options"
            )


def check_shared(parts: Sequence[nn.Module] | nn.ModuleList, placement: Sequence[int], tied: str) -> None:
    """Raise ConfigError (stages.tied) for a parameter that parts on different stages share and that is not the tied one: each
    stage would train a copy of its own."""
    last = len(parts) - 1
    allowed = {id(dict(parts[at].named_parameters(remove_duplicate=False)).get(tied)) for at in (0, last)} if tied else set()
    seen: dict[int, tuple[int, str]] = {}
    for number, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            before, called = seen.setdefault(id(parameter), (number, name))
            ends = {before, number} == {0, last} and len(allowed) == 1 and id(parameter) in allowed
            if placement[before] != placement[number] and not ends:
                what = f"{name} of part {number} is {called} of part {before}, which is on another stage"
                rule = "a parameter of the first and the last part can be tied by its name, which must be the same in both"
                raise ConfigError("stages.tied", tied or "not given", f"{what}; {rule}")


def _copy_of(tie: Tied, modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
    """Of the first chunk on this stage that has one; None on another stage."""
    for chunk in tie.chunks:
        if chunk in modules:
            named = dict(modules[chunk].named_parameters(remove_duplicate=False))
            if tie.name not in named:
                rule = f"is no parameter of part {chunk}; it has {', '.join(named)}"
                raise ConfigError("stages.tied", tie.name, rule)
            return named[tie.name]
    return None
