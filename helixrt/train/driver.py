"""The built-in job from its settings to its exit code: checks them, and calls `helixrt.run` as any program does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import helixrt
from helixrt.errors import Fatal, Retryable
from helixrt.train.config import TrainConfig
from helixrt.train.data import load_corpus
from helixrt.train.flops import flops_per_token
from helixrt.train.loop import run_rank
from helixrt.train.mesh import mesh_of

EXIT_GRACE_S = 20.0  # nothing is done behind the loop


def describe(config: TrainConfig) -> helixrt.Description:
    """Model, schedule, corpus and figures, for console and report. Raises ConfigError for a corpus that cannot be read."""
    model, data, corpus = config.model, config.data, load_corpus(config.data)
    microbatches, shards = config.schedule.microbatches, config.mesh.dp_shard
    whose = "replica" if shards == 1 else "shard"
    return helixrt.Description(
        model=f"{model.family}, {model.layers} layers x {model.dim}" + (", in bfloat16" if config.dtype == "bfloat16" else ""),
        work=(
            f"schedule {config.schedule.name} with {microbatches} micro-batch{'es' if microbatches != 1 else ''},"
            f" {data.batch} x {data.seq_len} bytes per {whose} and step"
        ),
        tokens_per_batch=data.batch * data.seq_len * shards,
        flops_per_step=data.batch * data.seq_len * shards * flops_per_token(model, data.seq_len),
        corpus=helixrt.Corpus(
            path=corpus.path,
            bytes=corpus.nbytes,
            files=corpus.files,
            sha256=corpus.sha256,
            validation_bytes=int(corpus.validation.size),
            order0_bits_per_byte=corpus.order0_bits_per_byte,
        ),
        figures=helixrt.TextFigures(loss="loss_nats"),
    )


def options_of(config: TrainConfig) -> helixrt.RunOptions:
    """The runtime's settings."""
    return helixrt.RunOptions.of(config, exit_grace_s=EXIT_GRACE_S)


def train(config: TrainConfig, function: Callable[..., Any] = run_rank) -> int:
    """Check the settings, run the job, return its exit code; `function` is what ranks call in place of `run_rank`. Raises
    ConfigError before anything is started."""
    from helixrt.train.validate import validate

    validate(config)
    try:
        helixrt.run(
            function,
            replicas=config.mesh.replicas,
            mesh=mesh_of(config),
            storage=config.output.root,
            seed=config.seed,
            device="cpu",
            dtype=config.dtype,
            launcher=config.launcher,
            name=config.name,
            resume=helixrt.saved_run(config.output.root, config.name).folder if config.resume else None,
            arguments={"config": config.to_plain()},
            description=describe(config),
            options=options_of(config),
        )
    except (Fatal, Retryable) as error:
        print(error, *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return 1
    return 0
