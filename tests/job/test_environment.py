"""Joining a run that others serve: what is refused, and the launcher that answers the processes of a replica."""

from __future__ import annotations

import argparse
import json
import re
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import helixrt
from helixrt.commands import serve
from helixrt.errors import ConfigError, Fatal, MisuseError, Retryable
from helixrt.job import environment, init
from helixrt.job.claims import Claim, claim
from helixrt.job.config import (
    ChaosConfig,
    CheckpointConfig,
    JobConfig,
    MeshConfig,
    OutputConfig,
    RayConfig,
    SlowConfig,
    TransportConfig,
)
from helixrt.job.driver import new_run
from helixrt.job.environment import SessionChoices
from helixrt.job.external_launcher import ExternalLauncher, Patience
from helixrt.job.launch import RunOptions
from helixrt.job.mesh import Mesh
from helixrt.job.placement import device_of
from helixrt.job.places import coordinates
from helixrt.job.policies import RELOAD_EXIT
from helixrt.job.served import ServedDriver, fingerprint
from helixrt.job.served_options import check_as_served
from helixrt.job.session import Session
from helixrt.job.session_host import SessionSettings
from helixrt.job.starters import Place
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.contracts import Coordinate, RankExit, RankSpec
from helixrt.replica.progress import ProgressReport, ThreadReport
from helixrt.replica.run_keys import (
    CLOSED_KEY,
    SERVED_KEY,
    claim_key,
    ended_key,
    exit_key,
    given_up_key,
    progress_key,
    seat_key,
    spec_key,
)
from helixrt.replica.store import MemoryRunStore
from helixrt.replica.versions import versions
from tests.job.session_world import LocalHost

SECRET = "a secret of the run"
TWO = MeshConfig(replicas=2, pp=1, dp_shard=2)

# ---------------------------------------------------------------- what is refused


def test_init_is_refused_in_a_rank_and_with_an_unknown_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="launcher=ray: must be auto, environment or local"):
        init.init(launcher="ray")
    monkeypatch.setenv(RANK_VARIABLE, "r0")
    with pytest.raises(MisuseError, match="its session is the argument of train"):
        init.init()


def test_init_refuses_wrong_settings_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype=float16"):
        init.init(launcher="local", dtype="float16", storage=tmp_path / "out")
    assert not (tmp_path / "out").exists() and init._session is None


def test_one_process_is_no_replica_of_several_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mesh=Mesh\(dp_shard=2\): this is one process; start 2 for each replica with"):
        init.init(launcher="local", mesh=Mesh(dp_shard=2), storage=tmp_path / "out")
    with pytest.raises(ConfigError, match="mesh.tp=0: must be at least 1"):
        init.init(launcher="local", mesh=Mesh(tp=0), storage=tmp_path / "out")
    with pytest.raises(ConfigError, match=r"mesh=Mesh\(tp=2\): this is one process; start 2"):
        init.init(launcher="local", mesh=Mesh(tp=2), storage=tmp_path / "out")
    assert not (tmp_path / "out").exists() and init._session is None


def test_threads_stay_as_they_are() -> None:
    assert SessionChoices(seed=3).config(JobConfig(threads=77)).threads == torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (RunOptions(checkpoint_every=20), "checkpoint.every=20: `helixrt serve` has 50; start it with --checkpoint-every, or"),
        (RunOptions(base=JobConfig(transport=TransportConfig(rails=("eth1",)))), "`helixrt serve` has .*start it with --rails"),
        (RunOptions(fatal_restarts=5), "`helixrt serve` has 2; start it with --fatal-restarts"),
        (RunOptions(base=JobConfig(on_poison="skip")), "on_poison=skip: cannot be set .* which has stop; leave it out"),
    ],
)
def test_an_option_that_the_server_does_not_have_is_refused(options: RunOptions, said: str) -> None:
    served = JobConfig(launcher="environment", mesh=MeshConfig(replicas=4), restarts=100)
    with pytest.raises(ConfigError, match=said):
        check_as_served(options.job("a name", 5, "a folder", MeshConfig(), "environment"), served.to_plain())


def test_it_is_refused_before_the_process_takes_a_place_in_the_run() -> None:
    store = MemoryRunStore()
    known = {"run": "run", "replicas": 2, "mesh": asdict(Mesh()), "secret": fingerprint("run", SECRET), "versions": versions()}
    store.put_if_absent(SERVED_KEY, json.dumps(known | {"config": JobConfig(mesh=ONE).to_plain()}))
    choices = SessionChoices(runtime=RunOptions(checkpoint_every=7).job("x", 0, "y", MeshConfig(2, 1)))
    with pytest.raises(ConfigError, match="checkpoint.every=7: `helixrt serve` has 50"):
        environment._check_run(store, Place("host:1", 1, SECRET), choices)


@dataclass(frozen=True)
class Own(JobConfig):
    """A program's configuration with settings of its own."""

    layers: int = 12


def test_options_that_the_server_has_alike_or_decides_are_none_of_the_programs_concern() -> None:
    slow = SlowConfig(1, 2.0, steps=(20, 60))
    chaos = ChaosConfig(slow=(slow,), link=({"from": 0, "to": 1, "delay_ms": 60, "steps": (20, 60)},))
    base = Own(ray=RayConfig(cpus=2.0), driver_away_s=600.0, chaos=chaos, layers=3)
    options = RunOptions(checkpoint_every=20, start="cold", exit_grace_s=5.0, threads=torch.get_num_threads() + 2, base=base)
    served = JobConfig(launcher="environment", checkpoint=CheckpointConfig(every=20), heartbeat_s=2.0, chaos=chaos)
    asked = options.job("a name", 5, "a folder", MeshConfig(), "environment")
    check_as_served(asked, json.loads(json.dumps(served.to_plain())))
    check_as_served(asked, served.to_plain())


# ---------------------------------------------------------------- the server's side


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


ONE = MeshConfig(replicas=2, pp=1)


def specs(replica: int, incarnation: int, mesh: MeshConfig = ONE, output: str = "") -> list[RankSpec]:
    plain = JobConfig(mesh=mesh).to_plain()
    places = coordinates(mesh, replica)
    return [RankSpec("run", at, incarnation, "host:1", "", output, SECRET, 0.0, plain) for at in places]


def launcher(store: MemoryRunStore, clock: Clock, mesh: MeshConfig = ONE) -> ExternalLauncher:
    return ExternalLauncher(store, mesh, Patience(silent_s=90.0, wait_s=600.0, close_s=0.0), clock)


def start(served: ExternalLauncher, all_: list[RankSpec]) -> None:
    for each in all_:
        served.start(each)


def process(store: MemoryRunStore, replica: int, rank: int = 0, ranks: int = 1, who: str = "host:77:1") -> Claim:
    return Claim(store, Place("host:1", replica, SECRET, rank, ranks), who)


def told_exit(store: MemoryRunStore, rank: int, code: int, why: str = "") -> None:
    store.put_if_absent(exit_key(1, 0, rank), json.dumps({"code": code, "why": why}))


def test_an_incarnation_is_answered_without_the_secret() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock)
    start(served, specs(1, 0))
    assert served.poll() == [] and served.waiting(1) and not served.waiting(0)
    assert process(store, 1).look() == 0
    assert served.poll() == [] and not served.waiting(1)
    told = store.get(spec_key(1, 0, 0))
    assert told is not None and SECRET not in told
    assert RankSpec.from_plain(json.loads(told)).coordinate == Coordinate(1)


def test_a_replica_of_two_ranks_is_answered_when_both_have_come() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock, TWO)
    start(served, specs(1, 0, TWO))
    second, first = process(store, 1, 1, 2, "b"), process(store, 1, 0, 2, "a")
    assert second.look() is None and first.look() is None and second.look() is None
    assert served.poll() == [] and served.waiting(1) and store.get(spec_key(1, 0, 0)) is None
    assert first.look() == 0 and second.look() == 0
    assert served.poll() == [] and not served.waiting(1)
    for rank in range(2):
        told = store.get(spec_key(1, 0, rank))
        assert told is not None and RankSpec.from_plain(json.loads(told)).coordinate == Coordinate(1, dp_shard=rank)


def begun(store: MemoryRunStore, clock: Clock, mesh: MeshConfig = ONE) -> ExternalLauncher:
    served = launcher(store, clock, mesh)
    start(served, specs(1, 0, mesh))
    ranks = mesh.dp_shard
    claims = [process(store, 1, rank, ranks, f"host:77:{rank}") for rank in range(ranks)]
    for one in claims * 2:
        one.look()
    served.poll()
    assert not served.waiting(1)
    return served


def only(exits: list[RankExit]) -> RankExit:
    (one,) = exits
    assert one.coordinate == Coordinate(1) and one.incarnation == 0
    return one


def test_an_incarnation_that_says_how_it_ended_has_ended_so() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    told_exit(store, 0, 64, "MisuseError: no")
    ended = only(served.poll())
    assert ended.code == 64 and "MisuseError: no" in ended.reason and "host:77:0" in ended.reason
    assert served.poll() == []


def test_ranks_of_a_replica_end_one_by_one_and_all_are_fenced_at_once() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock, TWO)
    told_exit(store, 1, 70, "ValueError: bad")
    (ended,) = served.poll()
    assert (ended.coordinate, ended.code) == (Coordinate(1, dp_shard=1), 70) and "ValueError: bad" in ended.reason
    served.kill(1)  # as the controller does: the replica is the unit of failure
    assert store.get(ended_key(1, 0)) == "yes" and served.poll() == []
    told_exit(store, 0, RELOAD_EXIT, "rank 1 of this replica has ended")
    assert only(served.poll()).code == RELOAD_EXIT and served.poll() == []


def test_a_successor_ends_its_predecessor() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock, TWO)
    assert process(store, 1, 0, 2, "host:88:2").look() is None
    exits = served.poll()
    assert [(e.coordinate.dp_shard, e.code) for e in exits] == [(0, -9), (1, -9)]
    assert all("ended without a word; host:88:2 has begun in its place" in e.reason for e in exits)
    assert store.get(spec_key(1, 1, 0)) is None  # until the controller starts it
    start(served, specs(1, 1, TWO))
    assert process(store, 1, 1, 2, "host:88:3").look() is None and process(store, 1, 0, 2, "other").look() is None
    served.poll()
    assert store.get(spec_key(1, 1, 0)) is None, "another process has claimed, and has no rank 1 yet"


def test_an_incarnation_that_never_had_all_its_ranks_is_over_when_the_next_is_claimed() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock, TWO)
    start(served, specs(1, 0, TWO))
    assert process(store, 1, 0, 2, "gone").look() is None
    assert served.poll() == []
    assert process(store, 1, 0, 2, "new").look() is None
    assert ["did not begin with all ranks" in e.reason for e in served.poll()] == [True, True]


def test_one_that_is_silent_for_too_long_has_ended_and_is_fenced() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    for report in range(5):
        assert silent(served, clock, 76) == []
        told(store, ProgressReport(report))
        assert silent(served, clock, 4) == []
    assert silent(served, clock, 80) == [] and store.get(ended_key(1, 0)) is None
    assert "has not reported for 90 s" in only(silent(served, clock, 20)).reason and store.get(ended_key(1, 0)) == "yes"


def told(store: MemoryRunStore, report: ProgressReport) -> None:
    store.set(progress_key(str(Coordinate(1)), 0), report.to_json())


def silent(served: ExternalLauncher, clock: Clock, seconds: int) -> list[RankExit]:
    """What the server finds in so many seconds of looks."""
    found: list[RankExit] = []
    for _ in range(seconds):
        clock.now_s += 1.0
        found += served.poll()
    return found


def test_a_rank_is_silent_for_as_long_as_it_has_asked_for_and_time_that_nobody_observed_does_not_count() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    told(store, ProgressReport(1, True, (ThreadReport("main", "load", 7, 600.0),)))
    assert silent(served, clock, 590) == []
    clock.now_s += 3600.0  # the server's machine was suspended
    assert served.poll() == []
    told(store, ProgressReport(2, True))
    served.poll()
    clock.now_s += 3600.0
    assert silent(served, clock, 80) == []
    assert "has not reported for 90 s" in only(silent(served, clock, 20)).reason


def test_a_replica_that_nobody_starts_is_not_waited_for_without_limit() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock)
    start(served, specs(1, 0))
    clock.now_s = 599.0
    assert served.waiting(1)
    clock.now_s = 601.0
    assert not served.waiting(1)
    served.kill(1)
    assert "was not started" in only(served.poll()).reason and store.get(ended_key(1, 0)) == "yes"


def test_closing_fences_who_still_runs() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    start(served, specs(0, 0))
    served.close()
    served.close()
    assert store.get(CLOSED_KEY) == "yes" and store.get(ended_key(1, 0)) == "yes" and store.get(ended_key(0, 0)) is None


# ---------------------------------------------------------------- the replica's side


def served_store(replicas: int = 2, dp_shard: int = 1, **told: Any) -> MemoryRunStore:
    store = MemoryRunStore()
    mesh = {"pp": 1, "dp_shard": dp_shard, "cp": 1, "tp": 1}
    known = {"run": "run", "replicas": replicas, "mesh": mesh, "secret": fingerprint("run", SECRET), "versions": versions()}
    store.put_if_absent(SERVED_KEY, json.dumps(known | told))
    return store


@pytest.mark.parametrize(
    ("place", "choices", "rule"),
    [
        (Place("host:1", 0, "another"), SessionChoices(), r"HELIXRT_SECRET=\.\.\.: is not the secret of the run at host:1"),
        (Place("host:1", 2, SECRET), SessionChoices(), "HELIXRT_REPLICA=2: the run has replicas 0 to 1"),
        (Place("host:1", 1, SECRET), SessionChoices(replicas=3), "replicas=3: `helixrt serve` serves a run of 2"),
    ],
)
def test_a_place_that_does_not_fit_the_run_is_refused(place: Place, choices: SessionChoices, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        environment._check_run(served_store(), place, choices)
    with pytest.raises(ConfigError, match="HELIXRT_STORE=host:1: is not the store of a run"):
        environment._check_run(MemoryRunStore(), place, choices, limit_s=0.0)


def test_a_server_of_another_version_is_refused_before_its_settings_are_read() -> None:
    place, here = Place("host:1", 0, SECRET), versions()
    public, _, build = here["torch"].partition("+")
    newer = {"config": {"a setting": "of later"}}
    other_build = here | {"torch": public + ("" if build else "+cu128")}
    environment._check_run(served_store(versions=other_build), place, SessionChoices())
    for told, said in (
        (here | {"helixrt": "99.1"}, f"helixrt={helixrt.__version__}: the server at host:1 has 99.1; install the same version"),
        (here | {"torch": "99.2+cpu"}, rf"torch={re.escape(here['torch'])}: the server at host:1 has 99.2\+cpu"),
        ({}, "the server at host:1 has a version that it does not tell"),
    ):
        with pytest.raises(ConfigError, match=said):
            environment._check_run(served_store(versions=told, **newer), place, SessionChoices(runtime=JobConfig()))


def test_a_server_tells_its_versions(tmp_path: Path) -> None:
    config = JobConfig(launcher="environment", output=OutputConfig(str(tmp_path)), mesh=ONE, membership="store")
    driver = ServedDriver(config, new_run(config), SECRET, 1.0)
    place = Place(driver.address, 0, SECRET)
    try:
        environment._check_run(driver.store, place, SessionChoices())
        assert json.loads(driver.store.get(SERVED_KEY) or "")["versions"] == versions()
    finally:
        driver.output.close()
        driver.run_.lock.close()


def test_a_server_that_has_just_opened_its_store_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    """As in one Slurm job, which starts the server and the replicas together."""
    store, waited = MemoryRunStore(), []

    def serve_later(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:
            store.put_if_absent(SERVED_KEY, "the run")

    assert environment._served(store, Place("host:1", 0, SECRET), 60.0, serve_later) == "the run" and len(waited) == 3
    assert [m for m in caplog.messages if "serves no run yet" in m] == caplog.messages and len(caplog.messages) == 1


def test_a_mesh_that_is_not_the_servers_is_refused() -> None:
    place = Place("host:1", 0, SECRET)
    environment._check_run(served_store(dp_shard=2), place, SessionChoices(mesh=Mesh(dp_shard=2)))
    with pytest.raises(ConfigError, match=r"mesh=Mesh\(dp_shard=2\): .* replicas of Mesh\(\); start it with --dp-shard 2"):
        environment._check_run(served_store(), place, SessionChoices(mesh=Mesh(dp_shard=2)))
    with pytest.raises(ConfigError, match=r"mesh=Mesh\(\): .* replicas of Mesh\(dp_shard=2\); start it without --pp,"):
        environment._check_run(served_store(dp_shard=2), place, SessionChoices())


def admitted(store: MemoryRunStore, place: Place) -> RankSpec:
    return environment.admitted(store, place, claim(Claim(store, place), place, 60.0))


def test_incarnations_are_claimed_in_their_order(tmp_path: Path) -> None:
    store, clock = served_store(), Clock()
    served = launcher(store, clock)
    place, found = Place("host:1", 1, SECRET), []
    for incarnation in range(3):
        start(served, specs(1, incarnation, output=str(tmp_path)))
        claimant = threading.Thread(target=lambda: found.append(admitted(store, place)))
        claimant.start()
        while claimant.is_alive():
            served.poll()
            claimant.join(0.01)
    assert [one.incarnation for one in found] == [0, 1, 2] and all(one.secret == SECRET for one in found)


def test_a_run_that_is_over_or_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environment, "ADMISSION_S", 0.1)
    store, place = served_store(), Place("host:1", 0, SECRET)
    with pytest.raises(Retryable, match="did not let replica 0 begin within 0.1 s"):
        admitted(store, place)
    store.put_if_absent(spec_key(0, 1, 0), json.dumps(specs(0, 1, output=str(tmp_path / "elsewhere"))[0].to_plain()))
    with pytest.raises(ConfigError, match="the run's folder is not on this machine"):
        admitted(store, place)
    store.put_if_absent(given_up_key(0), "this would come again: no module")
    with pytest.raises(Fatal, match="replica 0 of the run at host:1 was given up: this would come again: no module"):
        admitted(store, place)
    store.put_if_absent(CLOSED_KEY, "yes")
    with pytest.raises(Fatal, match="the run at host:1 is over"):
        admitted(store, place)
    assert store.get(claim_key(0, 2)) is None


def test_a_rank_that_does_not_come_is_named() -> None:
    store = served_store(dp_shard=3)
    first, third = Place("host:1", 0, SECRET, 0, 3, "a"), Place("host:1", 0, SECRET, 2, 3, "a")
    with pytest.raises(Retryable, match="rank 0 of this start of replica 0 did not come within 0 s; 3 processes are started"):
        claim(Claim(store, third), third, 0.0)
    waiting = Claim(store, first)
    with pytest.raises(Retryable, match="rank 1, 2 of replica 0 did not come within 0 s"):
        claim(waiting, first, 0.0)
    store.put_if_absent(seat_key(0, 0, 2), "c")
    with pytest.raises(Retryable, match="rank 1 of replica 0 did not come"):
        claim(waiting, first, 0.0)


def test_settings_of_the_session_are_equal_on_all_replicas() -> None:
    store = served_store()
    environment.agree_on_settings(store, SessionChoices(seed=1))
    environment.agree_on_settings(store, SessionChoices(seed=1, device="cpu"))
    with pytest.raises(ConfigError, match="seed=2: the replica that began first has 1; must be equal on all replicas"):
        environment.agree_on_settings(store, SessionChoices(seed=2))


def test_a_rank_that_leaves_waits_for_the_others_of_its_replica() -> None:
    """torchrun, and srun with --kill-on-bad-exit, would kill them with the first: they may still write their parts."""
    store, place, waited = MemoryRunStore(), Place("host:1", 1, SECRET, 1, 3), []

    def others_end(seconds: float) -> None:
        waited.append(seconds)
        store.put_if_absent(exit_key(1, 4, 0 if len(waited) == 2 else 2), "told")

    environment._leave_together(store, place, 4, 60.0, others_end)
    assert len(waited) == 2 and all(store.get(exit_key(1, 4, rank)) for rank in (0, 2))
    environment._leave_together(store, place, 5, 0.01)  # they were killed, and say nothing any more
    environment._leave_together(store, Place("host:1", 1, SECRET), 4, 60.0, others_end)
    assert len(waited) == 2, "a replica of one rank waits for nobody"


# ---------------------------------------------------------------- places and devices


def test_the_server_is_told_the_ranks_of_a_replica_and_how_replicas_reach_each_other() -> None:
    def config(*arguments: str) -> JobConfig:
        parser = argparse.ArgumentParser()
        serve.add_arguments(parser)
        return serve._config(parser.parse_args(["--replicas", "3", "--membership", "store", *arguments]))

    assert config().mesh == MeshConfig(3, 1) and config("--dp-shard", "2").mesh == MeshConfig(3, 1, 2)
    assert config("--pp", "4").mesh == MeshConfig(3, 4)
    assert config("--pp", "2", "--cp", "4", "--tp", "8").mesh == MeshConfig(3, 2, 1, 4, 8)
    with pytest.raises(ConfigError, match="mesh.dp_shard=0: must be at least 1"):
        config("--dp-shard", "0")
    rails = config("--transport", "tcp", "--rails", "eth0|eth1", "eth2").transport
    assert rails == TransportConfig("tcp", rails=("eth0|eth1", "eth2")) and config().transport == TransportConfig()
    with pytest.raises(ConfigError, match="transport=pigeon: "):
        config("--transport", "pigeon")


def test_the_server_has_a_limit_for_restarts_that_follow_an_exception() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    given = [parser.parse_args(["--replicas", "2", "--membership", "store", *more]) for more in ([], ["--fatal-restarts", "9"])]
    usual, served = (serve._config(arguments) for arguments in given)
    assert usual.fatal_restarts == JobConfig().fatal_restarts and served.fatal_restarts == 9
    with pytest.raises(ConfigError, match="fatal_restarts=-1: must be at least 0"):
        serve._config(parser.parse_args(["--replicas", "2", "--fatal-restarts", "-1"]))
    with pytest.raises(ConfigError, match="fatal_restarts=-1: must not be negative"):
        JobConfig(fatal_restarts=-1).check_settings()


def test_a_rank_has_the_cuda_device_of_its_number_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)

    def device(ranks: int, local_rank: int) -> torch.device:
        given = SessionSettings(replica=1, mesh=Mesh(dp_shard=ranks), shard=min(1, ranks - 1), local_rank=local_rank)
        return Session(given, LocalHost()).device

    assert device(2, 0) == torch.device("cuda", 0) and device(2, -1) == torch.device("cuda", 3)
    assert device(8, 1) == torch.device("cuda", 1), "a replica over two machines"
    assert device(1, 2) == torch.device("cuda", 2)
    assert device(1, -1) == torch.device("cuda", 1) == taken[-1], "replicas of one rank take the devices in turn"
    both = SessionSettings(mesh=Mesh(dp_shard=2, tp=2), shard=1, tp_rank=0)
    assert Session(both, LocalHost()).device == torch.device("cuda", 2), "each tp rank has a device of its own"
    with pytest.raises(ConfigError, match="a stage of 8 ranks needs a CUDA device for each, and this host has 4"):
        device(8, 5)

    def of_mesh(replica: int, stage: int, cp_rank: int) -> int | None:
        given = SessionSettings(replica=replica, mesh=Mesh(pp=4, cp=2), stage=stage, cp_rank=cp_rank)
        return device_of(given).index

    found = [of_mesh(1, stage, cp_rank) for stage in range(4) for cp_rank in range(2)]
    assert found == [0, 1, 2, 3] * 2, "stages share devices, and the ranks of one stage do not"
