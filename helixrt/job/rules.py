"""The rules of the runtime's settings that can be checked before anything is launched.

In: a `JobConfig`. Out: nothing, or ConfigError with the key, the value and the rule. May look for packages and network
interfaces, and try a port; starts no process, writes no file.
"""

from __future__ import annotations

import errno
import importlib.util
import math
import shlex
import socket
from collections.abc import Iterator

from helixrt.collectives.endpoints import find_rails
from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.chaos import DRIVER, FAULTS, LEADER_MOMENTS, MOMENTS, fault_moments
from helixrt.job.config import FETCH, MEMBERSHIPS, RESUME, STOP, JobConfig, TransportConfig
from helixrt.job.hosts import addresses_of
from helixrt.job.launchers import chosen_launcher, is_named
from helixrt.job.link_delays import link_delays
from helixrt.job.places import group_world_size
from helixrt.job.policies import ON_POISON
from helixrt.job.reach import NO_HOPPING, POLICIES, reach
from helixrt.job.slow_stages import check_slow
from helixrt.job.stored_path import check_storage
from helixrt.job.warm_up import chosen_start
from helixrt.private_api import check_version
from helixrt.timeouts import derive
from helixrt.transport.auto import TRANSPORTS, check_transport
from helixrt.transport.choice import NATIVE, TCP

EXCHANGES = ("ftar", "gloo")
CHANNELS = ("endpoint", "gloo")


def check(config: JobConfig, steps: int = 0) -> None:
    """Check every rule, cheap ones first. `steps`: of the run, 0 if they are not known. Raises the first ConfigError."""
    check_settings(config, steps)
    chosen_start(config.start)
    _extras(config)
    check_address(config.host, config.port)
    _transport(config)


def check_settings(config: JobConfig, steps: int = 0) -> None:
    """Check the rules that hold on every machine: of numbers and names, and of settings that must fit each other."""
    for error in (*_numbers(config), *_relations(config), *_chaos(config, steps), *check_slow(config, steps)):
        raise error
    derive(config.step_timeout_s, config.heartbeat_s)


def _numbers(config: JobConfig) -> Iterator[ConfigError]:
    """Rules about one number at a time."""
    at_least_one = {
        "threads": config.threads,
        "output.detail_mb": config.output.detail_mb,
        "mesh.replicas": config.mesh.replicas,
        "mesh.pp": config.mesh.pp,
        "checkpoint.keep": config.checkpoint.keep,
        "transport.paths": config.transport.paths,
        "pipeline.queues": config.pipeline.queues,
        "pipeline.host_mb": config.pipeline.host_mb,
    }
    not_negative: dict[str, float] = {
        "seed": config.seed,
        "restarts": config.restarts,
        "fatal_restarts": config.fatal_restarts,
        "signal_grace_s": config.signal_grace_s,
        "checkpoint.every": config.checkpoint.every,
        "checkpoint.retry_s": config.checkpoint.retry_s,
        "checks.every": config.checks.every,
        "catchup.max_wait_s": config.catchup.max_wait_s,
        "catchup.replay": config.catchup.replay,
        "catchup.serve_cpu": config.catchup.serve_cpu,
        "transport.rate_mbit": config.transport.rate_mbit,
        "transport.latency_ms": config.transport.latency_ms,
        "transport.heartbeat_s": config.transport.heartbeat_s,
        "pipeline.direct": config.pipeline.direct,
        "ray.cpus": config.ray.cpus,
    }
    positive = {
        "checkpoint.write_s": config.checkpoint.write_s,
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
    if config.driver_away_s not in (-1, 0) and not 10 <= config.driver_away_s < math.inf:
        rule = "must be at least 10, 0 for ranks that end with the driver, or -1 for the default of the launcher"
        yield ConfigError("driver_away_s", config.driver_away_s, rule)
    yield from _port(config.port)


def _port(port: int) -> Iterator[ConfigError]:
    if not 0 <= port <= 65535:
        yield ConfigError("port", port, "must be from 1 to 65535, or 0 for any free one")


def _relations(config: JobConfig) -> Iterator[ConfigError]:
    """Rules about names and about settings that must fit each other."""
    check_storage("checkpoint.path", config.checkpoint.path)
    transport = config.transport
    for key, value, known in (
        ("membership", config.membership, MEMBERSHIPS),
        ("exchange", config.exchange, EXCHANGES),
        ("on_poison", config.on_poison, ON_POISON),
        ("checks.on_divergence", config.checks.on_divergence, (RESUME, FETCH, STOP)),
        ("transport.kind", transport.kind, TRANSPORTS),
        ("transport.hopping", transport.hopping, POLICIES),
        ("pipeline.channels", config.pipeline.channels, CHANNELS),
    ):
        if value not in known:
            yield ConfigError(key, value, f"must be one of {', '.join(known)}")
    if config.pipeline.channels == "gloo" and config.pipeline.direct:
        rule = "needs pipeline.channels=endpoint: sends over Gloo never hold a stage up"
        yield ConfigError("pipeline.direct", config.pipeline.direct, rule)
    if config.pipeline.channels == "gloo" and config.chaos.link:
        yield ConfigError("pipeline.channels", config.pipeline.channels, "cannot slow links down (chaos.link); endpoint can")
    if config.exchange != "ftar" and transport != TransportConfig():
        yield ConfigError("exchange", config.exchange, "knows no settings of transport; ftar does")
    if transport.hopping == NO_HOPPING and transport.paths > 1:
        choosers = ", ".join(POLICIES[1:])
        yield ConfigError("transport.paths", transport.paths, f"needs transport.hopping, one of {choosers}")
    if transport.hopping != NO_HOPPING and transport.kind == NATIVE:
        yield ConfigError("transport.hopping", transport.hopping, f"is not among the settings of {NATIVE} yet; use {TCP}")
    if transport.hopping != NO_HOPPING and not transport.rate_mbit:
        yield ConfigError("transport.rate_mbit", transport.rate_mbit, "must be the rated speed of a path, to hop between paths")


def _chaos(config: JobConfig, steps: int) -> Iterator[ConfigError]:
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
        yield from _step(f"{key}.step", command.step, steps)
    yield from _faults(config, steps)
    try:
        delays = link_delays(config.chaos.link, config.mesh.pp)
    except ConfigError as error:
        yield error
    else:
        for i, delay in enumerate(delays):
            yield from _step(f"chaos.link[{i}].steps", delay.first, steps)
    for i, kill in enumerate(config.chaos.kill):
        key = f"chaos.kill[{i}]"
        if kill.moment not in MOMENTS:
            yield ConfigError(f"{key}.moment", kill.moment, f"must be one of {', '.join(MOMENTS)}")
        elif (kill.moment == "driver") != (kill.replica == DRIVER):
            yield ConfigError(f"{key}.replica", kill.replica, f"must be {DRIVER} for the moment driver, and only for it")
        elif not DRIVER <= kill.replica < config.mesh.replicas:
            yield ConfigError(f"{key}.replica", kill.replica, f"must be below mesh.replicas={config.mesh.replicas}")
        yield from _step(f"{key}.step", kill.step, steps)


def _faults(config: JobConfig, steps: int) -> Iterator[ConfigError]:
    ranks = group_world_size(config.mesh)
    size = f"mesh.pp={ranks}" if ranks == config.mesh.pp else f"the {ranks} ranks of a replica"
    for i, fault in enumerate(config.chaos.fault):
        key = f"chaos.fault[{i}]"
        moments = fault_moments(fault.kind)
        if fault.kind not in FAULTS:
            yield ConfigError(f"{key}.kind", fault.kind, f"must be one of {', '.join(FAULTS)}")
        elif fault.moment not in moments:
            yield ConfigError(f"{key}.moment", fault.moment, f"must be one of {', '.join(moments)} for {fault.kind}")
        elif not 0 <= fault.replica < config.mesh.replicas:
            yield ConfigError(f"{key}.replica", fault.replica, f"must be below mesh.replicas={config.mesh.replicas}")
        elif not 0 <= fault.rank < ranks:
            yield ConfigError(f"{key}.rank", fault.rank, f"must be below {size}")
        elif fault.rank and fault.moment in LEADER_MOMENTS:
            yield ConfigError(f"{key}.rank", fault.rank, f"must be 0 for {fault.moment}, a moment of the replica's first rank")
        elif not 0 < fault.seconds < math.inf:
            yield ConfigError(f"{key}.seconds", fault.seconds, "must be above 0")
        yield from _step(f"{key}.step", fault.step, steps)


def _step(key: str, step: int, steps: int) -> Iterator[ConfigError]:
    if steps and not 1 <= step <= steps:
        yield ConfigError(key, step, f"must be from 1 to steps={steps}")
    elif step < 1:
        yield ConfigError(key, step, "must be at least 1")


def _extras(config: JobConfig) -> None:
    """Raise MissingExtra for an optional package that this configuration needs, ConfigError for one that is too old."""
    check_version("torch")
    needed = []
    if config.mesh.replicas > 1 and config.membership == "torchft":
        needed.append(("torchft", "ft", "membership=torchft"))
    if config.launcher == "ray":
        needed.append(("ray", "ray", "launcher=ray"))
    for package, extra, what_for in needed:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, extra, what_for)
        check_version(package)


def check_address(host: str, port: int) -> None:
    """The run's servers must be able to listen at `host`, and its store at `port` there."""
    for error in _port(port):
        raise error
    try:
        every = not host or any(address.is_unspecified for address in addresses_of(host))
    except OSError as unknown:
        raise ConfigError("host", host, f"is no address of this machine: {unknown.strerror or unknown}") from unknown
    if every:
        raise ConfigError("host", host, "is every address of this machine; name the one that ranks connect to")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError("host", host, f"is no address of this machine: {error.strerror}") from error
            reason = "is in use; choose another, or 0 for any free one" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError("port", port, str(reason)) from error


def _transport(config: JobConfig) -> None:
    """What is meant must be there, where the ranks run on this machine."""
    if is_named(config.launcher) or chosen_launcher(config.launcher) == "ray":
        return
    if config.exchange != "ftar" or config.mesh.replicas == 1:
        return
    check_transport(config.transport.kind, "transport.kind")
    for replica in range(config.mesh.replicas):
        try:
            find_rails(reach(config.transport, replica, derive(config.step_timeout_s, config.heartbeat_s)))
        except ConfigError as error:
            raise ConfigError("transport.rails", error.value, error.rule) from error
