"""The training loop of the built-in job: a user of the session like any other.

In: a session, the job's settings. Out: a trained model, and figures of each step and validation. Everything here could stand in
a user's script; an import contract keeps it so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from helixrt import Part, PartSums, Session
from helixrt.train.config import TrainConfig
from helixrt.train.data import load_corpus, text_loader, training_windows, validation_batch
from helixrt.train.engine import inputs_and_targets, model_stages
from helixrt.train.mesh import session_groups
from helixrt.train.optimizer import adamw, cosine_with_warmup


@dataclass(frozen=True)
class LoopHooks:
    """What a benchmark or a test puts into the loop. `batch(position, tokens)`: a batch was read, and is trained on next.
    `ready(model)`: the model is registered. `updated(step, loss)`: after each update that this replica contributed to."""

    batch: Callable[[int, torch.Tensor], None] = lambda position, tokens: None
    ready: Callable[[torch.nn.Module], None] = lambda model: None
    updated: Callable[[int, float], None] = lambda step, loss: None


def run_rank(session: Session, config: dict[str, Any]) -> None:
    """What `helixrt.run` calls on every rank; `config` is a `TrainConfig` as plain data."""
    train(session, TrainConfig.from_plain(config))


def train(session: Session, config: TrainConfig, hooks: LoopHooks = LoopHooks()) -> None:  # noqa: B008 frozen
    """Train to the last step. Raises ConfigError for data or a model that cannot be used, and what a session raises."""
    data, optim = config.data, config.optim
    corpus = load_corpus(data)
    windows = training_windows(corpus, data, session.streams)
    groups = session_groups(session, config)
    shards = config.mesh.dp_shard
    stages = model_stages(
        config.model,
        config.schedule,
        batch=data.batch,
        seq_len=data.seq_len,
        stages=config.mesh.pp,
        seed=config.seed,
        bucket_bytes=optim.bucket_bytes,
        groups=groups,
    )
    model = session.parallelize(stages)
    optimizer = adamw(model.parameters(), optim)
    scheduler = cosine_with_warmup(optimizer, config.steps, optim)
    session.register(model=model, optimizers=[optimizer], schedulers=[scheduler], clip_norm=optim.clip or None)
    hooks.ready(model)

    def validate(part: Part) -> PartSums:
        losses = []
        for index in part.of(config.eval.batches):
            inputs, targets = inputs_and_targets(validation_batch(corpus, data, index), groups.cp)
            losses.append(model.evaluate(inputs, target=targets))
        tokens = data.batch * data.seq_len
        return PartSums({"loss_nats": tokens * math.fsum(losses)}, tokens * len(losses))

    session.evaluate_shared(validate, every=config.eval.every or config.steps)
    loader = text_loader(windows, session.sampler(windows, shuffle=True), data.batch)
    for step in session.steps(loader, until=config.steps):
        for tokens in step:
            hooks.batch(step.position, tokens)
            inputs, targets = inputs_and_targets(tokens, groups.cp)
            loss = step.train(model, inputs, target=targets)
        rate = optimizer.param_groups[0]["lr"]
        done = step.commit()
        if done.applied:
            figures = {
                "loss_nats": loss,
                "tokens": data.batch * data.seq_len * shards,
                "grad_norm": done.grad_norm,
                "learning_rate": rate,
            }
            session.log(figures)
            hooks.updated(done.step, loss)
