"""What console and report make of the values that a program logs."""

from __future__ import annotations

import dataclasses

import pytest

from helixrt.job.description import TextFigures
from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics

VALUES = {"loss_nats": 2.0, "tokens": 48.0, "grad_norm": 0.5, "learning_rate": 1e-3, "more": 7.0}
STEP = Logged(Logged.STEP, 1, "r1.pp0", 7, VALUES, 0.25, 2, 0.1, generation=99)
FIGURES = TextFigures(loss="loss_nats")


def test_figures_of_a_step_and_of_a_validation() -> None:
    step = FIGURES.of(STEP)
    assert isinstance(step, StepMetrics)
    assert (step.replica, step.rank, step.step, step.loss_nats, step.tokens, step.seconds) == (1, "r1.pp0", 7, 2.0, 48, 0.25)
    assert (step.participants, step.stall_s, step.grad_norm, step.learning_rate) == (2, 0.1, 0.5, 1e-3)
    assert step.generation == 99 and step.tokens_per_s == 192
    validation = FIGURES.of(Logged(Logged.VALIDATION, 0, "r0.pp0", 8, {"loss_nats": 1.5, "tokens": 96.0}, 0.0, 0, 0.0))
    assert isinstance(validation, ValidationMetrics)
    assert (validation.replica, validation.step, validation.loss_nats, validation.tokens) == (0, 8, 1.5, 96)


@pytest.mark.parametrize("missing", ["loss_nats", "tokens", "grad_norm", "learning_rate"])
def test_a_line_without_one_of_the_values_stays_as_it_is(missing: str) -> None:
    line = dataclasses.replace(STEP, values={name: value for name, value in VALUES.items() if name != missing})
    assert FIGURES.of(line) is line
    validation = dataclasses.replace(line, what=Logged.VALIDATION)
    assert (FIGURES.of(validation) is validation) == (missing in ("loss_nats", "tokens"))
