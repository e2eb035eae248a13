"""Steps that train nothing, told in one line each.

In: the parameters, and after each step what became of it. Out: a line where no micro-batch counts, and one where the first
updates change no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from helixrt.engines.sharded import local, versions
from helixrt.job.step import Step

_UPDATES = 3  # without an effect, until it is said
_SAMPLE = 64  # elements of each parameter


class IdleSteps:
    """From the main thread. It costs nothing after the first step that trains. An update that writes `parameter.data` counts no
    version, so values are looked at, too. Without parameters there is no line."""

    def __init__(self, parameters: Iterable[torch.Tensor], say: Callable[[str], None]) -> None:
        self._parameters, self._say = list(parameters), say
        self._versions = versions(self._parameters)
        self._values = [value.clone() for value in self._sample()]
        self._idle = 0
        self._weightless = False

    def after(self, step: Step) -> None:
        """A step has ended; before anything else can change a parameter."""
        if not self._parameters or step.done is None or step.timing is None:
            return
        record = step.timing.record
        if not (step.done.applied or self._weightless) and record.applied and record.contributors:
            self._weightless = True
            self._say(f"step {record.step}: every micro-batch has weight 0 or was skipped, so nothing is updated")
        if step.done.applied and self._idle < _UPDATES:
            self._idle = _UPDATES + 1 if self._changed() else self._idle + 1
            if self._idle == _UPDATES:
                self._say(f"the first {_UPDATES} updates changed no parameter; does the update function step the optimizer?")

    def _changed(self) -> bool:
        if versions(self._parameters) != self._versions:
            return True
        return not all(map(torch.equal, self._values, self._sample()))

    def _sample(self) -> list[torch.Tensor]:
        return [local(parameter).detach().reshape(-1)[:_SAMPLE] for parameter in self._parameters]
