"""The main job from its settings to its exit code: checks them, and gives the job's driver what its ranks run."""

from __future__ import annotations

import sys

from helixrt.errors import Fatal
from helixrt.job.driver import Driver, JobProgram, new_run, resumed_run
from helixrt.job.metrics import Logged, StepMetrics, ValidationMetrics
from helixrt.job.report import Corpus, Description
from helixrt.train.config import TrainConfig
from helixrt.train.data import load_corpus


def program_of(config: TrainConfig) -> JobProgram:
    """What the ranks of the main job run."""
    return JobProgram("helixrt.train.rank", config.steps, lambda: describe(config), figures_of)


def figures_of(line: Logged) -> StepMetrics | ValidationMetrics:
    """The job's figures of what its loop logged, for the console and the report."""
    values = line.values
    if line.what == Logged.VALIDATION:
        return ValidationMetrics(line.replica, line.step, values["loss_nats"], int(values["tokens"]))
    return StepMetrics(
        replica=line.replica,
        rank=line.rank,
        step=line.step,
        loss_nats=values["loss_nats"],
        tokens=int(values["tokens"]),
        seconds=line.seconds,
        participants=line.participants,
        stall_s=line.stall_s,
        grad_norm=values["grad_norm"],
        learning_rate=values["learning_rate"],
        generation=line.generation,
    )


def describe(config: TrainConfig) -> Description:
    """Model, schedule and corpus, for the report."""
    model, data, corpus = config.model, config.data, load_corpus(config.data)
    microbatches = config.schedule.microbatches
    return Description(
        model=f"{model.family}, {model.layers} layers x {model.dim}",
        work=(
            f"schedule {config.schedule.name} with {microbatches} micro-batch{'es' if microbatches != 1 else ''},"
            f" {data.batch} x {data.seq_len} bytes per replica and step"
        ),
        tokens_per_batch=data.batch * data.seq_len,
        corpus=Corpus(
            path=corpus.path,
            bytes=corpus.nbytes,
            files=corpus.files,
            sha256=corpus.sha256,
            validation_bytes=int(corpus.validation.size),
            order0_bits_per_byte=corpus.order0_bits_per_byte,
        ),
    )


def train(config: TrainConfig) -> int:
    """Check the settings, run the job, return its exit code. Raises ConfigError before anything is started."""
    from helixrt.train.validate import validate

    validate(config)
    run = resumed_run(config) if config.resume else new_run(config)
    try:
        return Driver(config, run, program_of(config)).run()
    except Fatal as error:
        print(error, file=sys.stderr)
        return 1
