"""Description of a program for the console and the report: model, work of a step, data, and the figures that it logs.

In: the program's own words and names. Out: `Description`, which `helixrt.run(description=)` takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics


@dataclass(frozen=True)
class TextFigures:
    """Names of the values that a model over bytes of text logs. A step that logs all four gets a line with bits per byte and
    bytes per second, and its place in the report's charts; a validation needs the first two, one that is shared the loss
    alone: its weight is the bytes. `loss`: the mean loss in nats per byte; `tokens`: over how many bytes."""

    loss: str = "loss"
    tokens: str = "tokens"
    grad_norm: str = "grad_norm"
    learning_rate: str = "learning_rate"

    def of(self, line: Logged) -> Logged | StepMetrics | ValidationMetrics:
        """The figures of a line; the line itself if it lacks one of the values."""
        values = line.values
        if line.what == Logged.VALIDATION:
            tokens = values.get(self.tokens, line.weight)
            if self.loss not in values or not tokens:
                return line
            loss, shared = values[self.loss], (line.parts, line.partial)
            return ValidationMetrics(line.replica, line.step, loss, int(tokens), line.rank, *shared)
        if not {self.loss, self.tokens, self.grad_norm, self.learning_rate} <= values.keys():
            return line
        return StepMetrics(
            replica=line.replica,
            rank=line.rank,
            step=line.step,
            loss_nats=values[self.loss],
            tokens=int(values[self.tokens]),
            seconds=line.seconds,
            participants=line.participants,
            stall_s=line.stall_s,
            grad_norm=values[self.grad_norm],
            learning_rate=values[self.learning_rate],
            generation=line.generation,
        )


@dataclass(frozen=True)
class Corpus:
    """The text that a job trained on; `order0_bits_per_byte` is the entropy of its bytes, each taken alone."""

    path: str
    bytes: int
    files: int
    sha256: str
    validation_bytes: int
    order0_bits_per_byte: float


@dataclass(frozen=True)
class Description:
    """A program's model, the work of a step and its data, for the report; every field is optional."""

    model: str = ""
    work: str = ""
    tokens_per_batch: int = 0  # of one replica; for the report's tokens per second
    corpus: Corpus | None = None
    figures: TextFigures | None = None
    flops_per_step: float = 0.0  # of the model's forward and backward in one replica's step; for model FLOPs utilisation
