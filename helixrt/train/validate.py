"""Every rule about the settings that can be checked before anything is launched.

In: a `TrainConfig`. Out: nothing, or `ConfigError` with the key, the value and the rule. May read the
corpus and a checkpoint, probe a port and create the output root; starts no process.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import math
import shlex
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from helixrt.collectives.endpoints import find_rails
from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.chaos import DRIVER, FAULTS, LEADER_MOMENTS, MOMENTS, fault_moments
from helixrt.job.config import MEMBERSHIPS, TransportConfig
from helixrt.job.policies import ON_POISON
from helixrt.job.reach import NO_HOPPING, POLICIES, reach
from helixrt.schedule.generators.policies import policy
from helixrt.timeouts import derive
from helixrt.train.config import TrainConfig
from helixrt.transport.auto import TRANSPORTS, check_transport

FAMILIES = ("gpt", "llama")
LAUNCHERS = ("auto", "local", "ray")
EXCHANGES = ("ftar", "gloo")


def validate(config: TrainConfig) -> None:
    """Check every rule, cheap ones first. Raises the first ConfigError."""
    for error in (*_numbers(config), *_relations(config), *_chaos(config)):
        raise error
    derive(config.step_timeout_s, config.heartbeat_s)
    require_extras(config)
    _schedule(config)
    _address(config.host, config.port)
    _transport(config)
    _data(config)
    _output_root(config.output.root)
    if config.resume:
        _resume(config)


def _numbers(config: TrainConfig) -> Iterator[ConfigError]:
    """Rules about one number at a time."""
    at_least_one = {
        "steps": config.steps,
        "threads": config.threads,
        "output.detail_mb": config.output.detail_mb,
        "mesh.replicas": config.mesh.replicas,
        "mesh.pp": config.mesh.pp,
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
        "checkpoint.keep": config.checkpoint.keep,
        "eval.batches": config.eval.batches,
        "transport.paths": config.transport.paths,
    }
    not_negative: dict[str, float] = {
        "seed": config.seed,
        "restarts": config.restarts,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.retry_s": config.checkpoint.retry_s,
        "eval.every": config.eval.every,
        "catchup.max_wait_s": config.catchup.max_wait_s,
        "catchup.replay": config.catchup.replay,
        "catchup.serve_cpu": config.catchup.serve_cpu,
        "model.auxiliary": config.model.auxiliary,
        "optim.warmup_steps": config.optim.warmup_steps,
        "optim.weight_decay": config.optim.weight_decay,
        "optim.clip": config.optim.clip,
        "transport.rate_mbit": config.transport.rate_mbit,
        "transport.latency_ms": config.transport.latency_ms,
        "transport.heartbeat_s": config.transport.heartbeat_s,
    }
    positive = {
        "optim.lr": config.optim.lr,
        "optim.eps": config.optim.eps,
        "model.capacity": config.model.capacity,
        "checkpoint.write_s": config.checkpoint.write_s,
        "restart_window_s": config.restart_window_s,
        "supersede_after_s": config.supersede_after_s,
        "catchup.hold_s": config.catchup.hold_s,
        "catchup.memory_gb": config.catchup.memory_gb,
    }
    yield from (ConfigError(k, v, "must be at least 1") for k, v in at_least_one.items() if v < 1)
    yield from (ConfigError(k, v, "must not be negative") for k, v in not_negative.items() if not 0 <= v < math.inf)
    yield from (ConfigError(k, v, "must be above 0") for k, v in positive.items() if not 0 < v < math.inf)
    if config.catchup.serve_mb_s != 0 and not 1 <= config.catchup.serve_mb_s < math.inf:
        rule = "must be at least 1, or 0 for no limit: a donor that is slower looks as if it were gone"
        yield ConfigError("catchup.serve_mb_s", config.catchup.serve_mb_s, rule)
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
    if not 0 <= config.port <= 65535:
        yield ConfigError("port", config.port, "must be from 1 to 65535, or 0 for any free one")


def _relations(config: TrainConfig) -> Iterator[ConfigError]:
    """Rules about names and about settings that must fit each other."""
    model, mesh, transport = config.model, config.mesh, config.transport
    for key, value, known in (
        ("model.family", model.family, FAMILIES),
        ("launcher", config.launcher, LAUNCHERS),
        ("membership", config.membership, MEMBERSHIPS),
        ("exchange", config.exchange, EXCHANGES),
        ("on_poison", config.on_poison, ON_POISON),
        ("transport.kind", transport.kind, TRANSPORTS),
        ("transport.hopping", transport.hopping, POLICIES),
    ):
        if value not in known:
            yield ConfigError(key, value, f"must be one of {', '.join(known)}")
    for key, size in (("mesh.dp_shard", mesh.dp_shard), ("mesh.cp", mesh.cp), ("mesh.tp", mesh.tp)):
        if size != 1:
            yield ConfigError(key, size, "must be 1 for now: only replicas and pp can be larger")
    if model.dim % model.heads:
        yield ConfigError("model.heads", model.heads, f"must divide model.dim={model.dim}")
    if model.family == "llama":
        if model.heads % model.kv_heads:
            yield ConfigError("model.kv_heads", model.kv_heads, f"must divide model.heads={model.heads}")
        if (model.dim // model.heads) % 2:
            yield ConfigError("model.heads", model.heads, f"must leave an even size per head of model.dim={model.dim}")
    if config.exchange != "ftar" and transport != TransportConfig():
        yield ConfigError("exchange", config.exchange, "knows no settings of transport; ftar does")
    if transport.hopping == NO_HOPPING and transport.paths > 1:
        choosers = ", ".join(POLICIES[1:])
        yield ConfigError("transport.paths", transport.paths, f"needs transport.hopping, one of {choosers}")
    if transport.hopping != NO_HOPPING and not transport.rate_mbit:
        yield ConfigError("transport.rate_mbit", transport.rate_mbit, "must be the rated speed of a path, to hop between paths")


def _chaos(config: TrainConfig) -> Iterator[ConfigError]:
    for i, command in enumerate(config.chaos.run):
        key = f"chaos.run[{i}]"
        try:
            words = shlex.split(command.command)
        except ValueError as error:
            yield ConfigError(f"{key}.command", command.command, str(error).lower())
            continue
        if not words:
            yield ConfigError(f"{key}.command", "''", "must be a program and its arguments")
        elif command.moment not in MOMENTS or command.moment == "driver":
            yield ConfigError(f"{key}.moment", command.moment, f"must be one of {', '.join(MOMENTS[:-1])}")
        elif not 0 <= command.replica < config.mesh.replicas:
            yield ConfigError(f"{key}.replica", command.replica, f"must be below mesh.replicas={config.mesh.replicas}")
        elif not 1 <= command.step <= config.steps:
            yield ConfigError(f"{key}.step", command.step, f"must be from 1 to steps={config.steps}")
    yield from _faults(config)
    for i, kill in enumerate(config.chaos.kill):
        key = f"chaos.kill[{i}]"
        if kill.moment not in MOMENTS:
            yield ConfigError(f"{key}.moment", kill.moment, f"must be one of {', '.join(MOMENTS)}")
        elif (kill.moment == "driver") != (kill.replica == DRIVER):
            yield ConfigError(f"{key}.replica", kill.replica, f"must be {DRIVER} for the moment driver, and only for it")
        elif not DRIVER <= kill.replica < config.mesh.replicas:
            yield ConfigError(f"{key}.replica", kill.replica, f"must be below mesh.replicas={config.mesh.replicas}")
        if not 1 <= kill.step <= config.steps:
            yield ConfigError(f"{key}.step", kill.step, f"must be from 1 to steps={config.steps}")


def _faults(config: TrainConfig) -> Iterator[ConfigError]:
    for i, fault in enumerate(config.chaos.fault):
        key = f"chaos.fault[{i}]"
        moments = fault_moments(fault.kind)
        if fault.kind not in FAULTS:
            yield ConfigError(f"{key}.kind", fault.kind, f"must be one of {', '.join(FAULTS)}")
        elif fault.moment not in moments:
            yield ConfigError(f"{key}.moment", fault.moment, f"must be one of {', '.join(moments)} for {fault.kind}")
        elif not 0 <= fault.replica < config.mesh.replicas:
            yield ConfigError(f"{key}.replica", fault.replica, f"must be below mesh.replicas={config.mesh.replicas}")
        elif not 0 <= fault.rank < config.mesh.pp:
            yield ConfigError(f"{key}.rank", fault.rank, f"must be below mesh.pp={config.mesh.pp}")
        elif fault.rank and fault.moment in LEADER_MOMENTS:
            yield ConfigError(f"{key}.rank", fault.rank, f"must be 0 for {fault.moment}, a moment of the replica's first rank")
        elif not 1 <= fault.step <= config.steps:
            yield ConfigError(f"{key}.step", fault.step, f"must be from 1 to steps={config.steps}")
        elif not 0 < fault.seconds < math.inf:
            yield ConfigError(f"{key}.seconds", fault.seconds, "must be above 0")


def require_extras(config: TrainConfig) -> None:
    """Raise MissingExtra for an optional package that this configuration needs."""
    needed = [("torchdata", "ft", "reading the training data")]
    if config.mesh.replicas > 1 and config.membership == "torchft":
        needed.append(("torchft", "ft", "membership=torchft"))
    if config.launcher == "ray":
        needed.append(("ray", "ray", "launcher=ray"))
    for package, extra, what_for in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, extra, what_for)


def _address(host: str, port: int) -> None:
    """The run's servers must be able to listen at `host`, and its store at `port` there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("host", host, f"is no address of this machine: {error.strerror}") from error
            reason = "is in use; choose another, or 0 for any free one" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError("port", port, str(reason)) from error


def _transport(config: TrainConfig) -> None:
    """What is meant must be there, where the ranks run on this machine."""
    from helixrt.job.driver import uses_ray

    if uses_ray(config) or config.exchange != "ftar":
        return
    check_transport(config.transport.kind, "transport.kind")
    for replica in range(config.mesh.replicas):
        try:
            find_rails(reach(config.transport, replica, derive(config.step_timeout_s, config.heartbeat_s)))
        except ConfigError as error:
            raise ConfigError("transport.rails", error.value, error.rule) from error


def _schedule(config: TrainConfig) -> None:
    from helixrt.train.schedules import job_schedule

    job_schedule(config.schedule, stages=config.mesh.pp, layers=config.model.layers, batch=config.data.batch)


def _output_root(root: str) -> None:
    try:
        Path(root).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        raise ConfigError("output.root", root, f"cannot write there: {error.strerror or error}") from error


def _data(config: TrainConfig) -> None:
    from helixrt.train.data import check_size, load_corpus

    check_size(load_corpus(config.data), config.mesh.replicas, config.data.batch, config.data.seq_len)


def _resume(config: TrainConfig) -> None:
    from helixrt.job.checkpoint import find_resume

    run, checkpoint = find_resume(Path(config.output.root))
    if checkpoint.stages != config.mesh.pp:
        rule = f"the checkpoint {checkpoint.folder} has {checkpoint.stages} stages; resuming with others is not supported yet"
        raise ConfigError("mesh.pp", config.mesh.pp, rule)
    settings = run / "config.json"
    if settings.exists():
        before = TrainConfig.from_plain(json.loads(settings.read_text(encoding="utf-8")))
        for error in resume_conflicts(before, config):
            raise error


def resume_conflicts(before: TrainConfig, now: TrainConfig) -> Iterator[ConfigError]:
    """Settings that decide what a batch or a parameter is, and so may not change between a run and its resumption."""
    must_stay = {
        "seed": (before.seed, now.seed),
        "mesh.replicas": (before.mesh.replicas, now.mesh.replicas),
        **{f"model.{k}": (v, now.to_plain()["model"][k]) for k, v in before.to_plain()["model"].items()},
        **{f"data.{k}": (v, now.to_plain()["data"][k]) for k, v in before.to_plain()["data"].items()},
    }
    for key, (was, is_) in must_stay.items():
        if was != is_:
            yield ConfigError(key, is_, f"was {was} in the run to resume, and must stay so")
    placements = [policy(c.schedule.name).placement(c.mesh.pp) for c in (before, now)]
    if placements[0] != placements[1]:
        rule = f"was {before.schedule.name} in the run to resume, which has other layers on each stage; not supported yet"
        yield ConfigError("schedule.name", now.schedule.name, rule)
