"""Every rule about the settings that can be checked before anything is launched; those of the runtime are its own.

In: a `TrainConfig`. Out: nothing, or `ConfigError` with the key, the value and the rule. May read the
corpus and a checkpoint, probe a port and create the output root; starts no process.
"""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import helixrt
from helixrt.errors import ConfigError, MissingExtra
from helixrt.parallel import CONTEXTS
from helixrt.train.config import DTYPES, TrainConfig

FAMILIES = ("gpt", "llama")
LAUNCHERS = ("auto", "local", "ray")


def validate(config: TrainConfig) -> None:
    """Check every rule, cheap ones first. Raises the first ConfigError."""
    check_settings(config)
    if importlib.util.find_spec("torchdata") is None:
        raise MissingExtra("torchdata", "ft", "reading the training data")
    config.check_runtime(config.steps)
    _data(config)
    _output_root(config.output.root)
    if config.resume:
        _resume(config)


def check_settings(config: TrainConfig) -> None:
    """Check the rules that hold on every machine; those of files, packages and addresses are for where the job will run."""
    for error in (*_numbers(config), *_relations(config)):
        raise error
    config.check_settings(config.steps)
    _mesh(config)
    _schedule(config)


def _numbers(config: TrainConfig) -> Iterator[ConfigError]:
    """Rules about one number at a time."""
    at_least_one = {
        "steps": config.steps,
        "schedule.microbatches": config.schedule.microbatches,
        "data.batch": config.data.batch,
        "data.seq_len": config.data.seq_len,
        "model.layers": config.model.layers,
        "model.dim": config.model.dim,
        "model.heads": config.model.heads,
        "model.kv_heads": config.model.kv_heads,
        "model.ffn": config.model.ffn,
        "model.moe_every": config.model.moe_every,
        "optim.bucket_bytes": config.optim.bucket_bytes,
        "eval.batches": config.eval.batches,
    }
    not_negative: dict[str, float] = {
        "eval.every": config.eval.every,
        "model.capacity": config.model.capacity,
        "model.auxiliary": config.model.auxiliary,
        "optim.warmup_steps": config.optim.warmup_steps,
        "optim.weight_decay": config.optim.weight_decay,
        "optim.clip": config.optim.clip,
    }
    positive = {
        "optim.lr": config.optim.lr,
        "optim.eps": config.optim.eps,
    }
    yield from (ConfigError(k, v, "must be at least 1") for k, v in at_least_one.items() if v < 1)
    yield from (ConfigError(k, v, "must not be negative") for k, v in not_negative.items() if not 0 <= v < math.inf)
    yield from (ConfigError(k, v, "must be above 0") for k, v in positive.items() if not 0 < v < math.inf)
    if not 0 <= config.optim.min_lr_ratio <= 1:
        yield ConfigError("optim.min_lr_ratio", config.optim.min_lr_ratio, "must be from 0 to 1")
    if len(config.optim.betas) != 2 or not all(0 <= b < 1 for b in config.optim.betas):
        yield ConfigError("optim.betas", list(config.optim.betas), "must be two numbers, each from 0 to below 1")
    if not 0 < config.data.validation < 1:
        yield ConfigError("data.validation", config.data.validation, "must be between 0 and 1")
    if config.model.experts < 0 or config.model.experts == 1:
        yield ConfigError("model.experts", config.model.experts, "must be at least 2, or 0 for none: each token goes to two")
    if config.model.vocab < 256:
        yield ConfigError("model.vocab", config.model.vocab, "must be at least 256: the symbols are bytes")


def _relations(config: TrainConfig) -> Iterator[ConfigError]:
    """Rules about names and about settings that must fit each other."""
    model = config.model
    for key, value, known in (
        ("model.family", model.family, FAMILIES),
        ("model.context", model.context, CONTEXTS),
        ("dtype", config.dtype, DTYPES),
    ):
        if value not in known:
            yield ConfigError(key, value, f"must be one of {', '.join(known)}")
    if config.launcher not in LAUNCHERS and ":" not in config.launcher:  # MODULE:NAME is looked at when it is imported
        yield ConfigError("launcher", config.launcher, f"must be one of {', '.join(LAUNCHERS)}, or MODULE:NAME")
    if model.dim % model.heads:
        yield ConfigError("model.heads", model.heads, f"must divide model.dim={model.dim}")
    if model.family == "llama":
        if model.heads % model.kv_heads:
            yield ConfigError("model.kv_heads", model.kv_heads, f"must divide model.heads={model.heads}")
        if (model.dim // model.heads) % 2:
            yield ConfigError("model.heads", model.heads, f"must leave an even size per head of model.dim={model.dim}")


def _mesh(config: TrainConfig) -> None:
    from helixrt.train.mesh import check_sharing, mesh_of

    mesh_of(config).check_supported()
    check_sharing(config)


def _schedule(config: TrainConfig) -> None:
    from helixrt.train.schedules import check_graphs, job_schedule

    check_graphs(config.model, config.schedule)
    schedule = job_schedule(config.schedule, stages=config.mesh.pp, layers=config.model.layers, batch=config.data.batch)
    helixrt.Stages.check_shards(schedule, config.schedule.graphs, config.mesh.dp_shard)


def _output_root(root: str) -> None:
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise ConfigError("output.root", root, f"cannot write there: {error.strerror or error}") from error


def _data(config: TrainConfig) -> None:
    from helixrt.train.data import check_size, load_corpus

    streams = config.mesh.replicas * config.mesh.dp_shard
    check_size(load_corpus(config.data), streams, config.data.batch, config.data.seq_len)


def _resume(config: TrainConfig) -> None:
    run = helixrt.saved_run(config.output.root, config.name)
    if "config" not in run.arguments:
        raise ConfigError("resume", "true", f"the newest run, {run.folder}, is of {run.train}")
    for error in resume_conflicts(TrainConfig.from_plain(run.arguments["config"]), config):
        raise error


def resume_conflicts(before: TrainConfig, now: TrainConfig) -> Iterator[ConfigError]:
    """Settings that decide what a batch or a parameter is, and so may not change between a run and its resumption."""
    must_stay = {
        "seed": (before.seed, now.seed),
        **{f"model.{k}": (v, now.to_plain()["model"][k]) for k, v in before.to_plain()["model"].items()},
        **{f"data.{k}": (v, now.to_plain()["data"][k]) for k, v in before.to_plain()["data"].items()},
    }
    for key, (was, is_) in must_stay.items():
        if was != is_:
            yield ConfigError(key, is_, f"was {was} in the run to resume, and must stay so")
