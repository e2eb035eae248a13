"""Draining and leaving: the pure policy, the files between command and driver, and what the controller does."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from helixrt.cli import main
from helixrt.errors import ConfigError
from helixrt.job.config import JobConfig, MeshConfig, OutputConfig
from helixrt.job.draining import AskToLeave, DrainAsked, DrainRequests, Refuse, asked, request, take_requests
from helixrt.job.driver import new_run, reopened_run
from helixrt.job.policies import (
    ACTIVE,
    LEFT_EXIT,
    Began,
    KillReplica,
    Options,
    Phase,
    RankEnded,
    ReplicaDone,
    ReplicaRunning,
    RunState,
    StartReplica,
    StopRun,
    Tick,
    decide,
)
from tests.job.test_run_lock import past_run

OPTIONS = Options(replicas=2, ranks_per_replica=2, max_restarts=0, gone_s=3.0, leave_s=30.0)


def running() -> RunState:
    state, _ = decide(RunState.initial(OPTIONS), Began(), 0.0, OPTIONS)
    for replica in range(OPTIONS.replicas):
        state, _ = decide(state, ReplicaRunning(replica, 0), 0.1, OPTIONS)
    return state


def left(replica: int, rank: int, incarnation: int = 0) -> RankEnded:
    return RankEnded(replica, incarnation, f"r{replica}.pp{rank}", LEFT_EXIT, "SIGTERM")


def test_a_replica_that_leaves_is_not_killed_costs_no_budget_and_is_started_again_when_its_ranks_have_ended() -> None:
    state, made = decide(running(), left(1, 0), 1.0, OPTIONS)
    assert made == () and state.replicas[1].phase is Phase.LOST
    state, made = decide(state, Tick(), 10.0, OPTIONS)  # far more than gone_s: its other rank completes a checkpoint
    assert made == ()
    state, made = decide(state, left(1, 1), 11.0, OPTIONS)
    assert made == (StartReplica(1, 1),) and state.replicas[1].failures == 0


def test_a_rank_that_does_not_end_is_killed_after_leave_s() -> None:
    state, _ = decide(running(), left(1, 0), 1.0, OPTIONS)
    state, made = decide(state, Tick(), 31.0, OPTIONS)
    assert made == (KillReplica(1), StartReplica(1, 1))


def test_the_ranks_of_a_replica_that_saves_its_state_have_the_time_that_a_checkpoint_may_take() -> None:
    options = replace(OPTIONS, save_s=900.0)
    state, _ = decide(running(), replace(left(1, 0), saves=True), 1.0, options)
    for now in (31.5, 890.0):
        state, made = decide(state, Tick(), now, options)
        assert made == (), "they write their parts"
    state, made = decide(state, Tick(), 901.5, options)
    assert made == (KillReplica(1), StartReplica(1, 1))


def test_a_rank_that_dies_meanwhile_leaves_no_checkpoint_to_wait_for() -> None:
    options = replace(OPTIONS, ranks_per_replica=3, save_s=900.0)
    state, _ = decide(running(), replace(left(1, 0), saves=True), 1.0, options)
    state, _ = decide(state, RankEnded(1, 0, "r1.pp1", -9, "killed"), 5.0, options)
    state, made = decide(state, Tick(), 31.0, options)
    assert made == (KillReplica(1), StartReplica(1, 1)), "after leave_s"


def test_a_drained_replica_stays_away_until_it_is_asked_back() -> None:
    state, decision = asked(running(), DrainAsked(1), 1.0)
    assert decision == AskToLeave(1, 0, "drained by the user")
    state, _ = decide(state, left(1, 0), 2.0, OPTIONS)
    state, made = decide(state, left(1, 1), 2.1, OPTIONS)
    assert made == () and state.replicas[1].phase is Phase.DRAINED
    state, made = decide(state, Tick(), 5000.0, OPTIONS)
    assert made == () and state.replicas[1].phase is Phase.DRAINED
    state, decision = asked(state, DrainAsked(1, back=True), 5001.0)
    assert decision is None
    state, made = decide(state, Tick(), 5001.1, OPTIONS)
    assert made == (StartReplica(1, 1),) and not state.replicas[1].drained


def test_a_drained_replica_that_is_killed_instead_stays_away_too() -> None:
    options = Options(replicas=2, ranks_per_replica=1, gone_s=3.0)
    state, _ = asked(running(), DrainAsked(1), 1.0)
    state, made = decide(state, RankEnded(1, 0, "r1.pp0", -9, "killed"), 2.0, options)
    assert made == (KillReplica(1),) and state.replicas[1].phase is Phase.DRAINED


def test_the_run_ends_well_without_the_drained_one() -> None:
    state, _ = asked(running(), DrainAsked(1), 1.0)
    for rank in range(2):
        state, _ = decide(state, left(1, rank), 2.0, OPTIONS)
    state, made = decide(state, ReplicaDone(0), 3.0, OPTIONS)
    assert made == (StopRun(True, ""),)


def test_what_cannot_be_drained_is_refused() -> None:
    state, _ = asked(running(), DrainAsked(1), 1.0)
    assert asked(state, DrainAsked(1), 1.1)[1] == Refuse(1, "replica 1 is drained already")
    assert asked(state, DrainAsked(0), 1.1)[1] == Refuse(0, "no other replica than replica 0 runs; stop the run instead")
    assert asked(running(), DrainAsked(1, back=True), 1.1)[1] == Refuse(1, "replica 1 is not drained")
    done, _ = decide(running(), ReplicaDone(1), 1.0, OPTIONS)
    refused = asked(done, DrainAsked(1), 1.1)[1]
    assert refused == Refuse(1, "replica 1 takes no part any more: it is finished")


def test_a_request_taken_back_before_the_replica_has_left_starts_it_again() -> None:
    state, _ = asked(running(), DrainAsked(1), 1.0)
    state, decision = asked(state, DrainAsked(1, back=True), 1.5)
    assert decision is None
    state, _ = decide(state, left(1, 0), 2.0, OPTIONS)
    state, made = decide(state, left(1, 1), 2.0, OPTIONS)
    assert made == (StartReplica(1, 1),)


@pytest.mark.parametrize("seed", range(200))
def test_random_lives_never_start_a_drained_replica_nor_drain_the_last_one_that_runs(seed: int) -> None:
    chance = random.Random(seed)
    options = Options(replicas=3, ranks_per_replica=1, max_restarts=1000, fatal_restarts=1000)
    state, now = running_of(options), 1.0
    for _ in range(60):
        now += chance.random() * 3
        replica = chance.randrange(3)
        one = state.replicas[replica]
        event = chance.choice((Tick(), ReplicaRunning(replica, one.incarnation), "end", "drain", "back"))
        before = state
        if event in ("drain", "back"):
            state, decision = asked(state, DrainAsked(replica, back=event == "back"), now)
            if isinstance(decision, AskToLeave):
                others = [r for i, r in enumerate(before.replicas) if i != replica]
                assert any(r.phase is Phase.RUNNING and not r.drained for r in others)
            continue
        if event == "end":
            event = RankEnded(replica, one.incarnation, f"r{replica}.pp0", chance.choice((-9, LEFT_EXIT)), "end")
        state, made = decide(state, event, now, options)  # type: ignore[arg-type]
        for decision in made:
            if isinstance(decision, StartReplica):
                assert not before.replicas[decision.replica].drained
        assert all(not r.drained or r.phase in (*ACTIVE, Phase.LOST, Phase.DRAINED) for r in state.replicas)


def running_of(options: Options) -> RunState:
    state, _ = decide(RunState.initial(options), Began(), 0.0, options)
    for replica in range(options.replicas):
        state, _ = decide(state, ReplicaRunning(replica, 0), 0.1, options)
    return state


# ---------------------------------------------------------------- files and command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"mesh": {"replicas": 2}}))
    return tmp_path


def test_requests_reach_the_driver_once(folder: Path) -> None:
    assert take_requests(folder, 2) == []
    request(folder, 1, back=False)
    request(folder, 0, back=True)
    assert take_requests(folder, 2) == [DrainAsked(0, back=True), DrainAsked(1)]
    assert take_requests(folder, 2) == []


def test_wrong_requests_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="REPLICA=2: the run has replicas 0 to 1"):
        request(folder, 2, back=False)
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        request(tmp_path / "nowhere", 0, back=False)


def test_the_replicas_are_those_of_the_life_that_runs(tmp_path: Path) -> None:
    """config.json is that of the first life; a resumption may have other replicas."""
    checkpoint = past_run(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"mesh": {"replicas": 2}}))
    for replicas in (4, 1):
        run = reopened_run(tmp_path, checkpoint, replicas)
        assert run.lock is not None
        run.lock.close()
        request(tmp_path, replicas - 1, back=False)
        with pytest.raises(ConfigError, match=f"REPLICA={replicas}: the run has replicas 0 to {replicas - 1}"):
            request(tmp_path, replicas, back=False)
    new = new_run(JobConfig(mesh=MeshConfig(3, 1), output=OutputConfig(str(tmp_path / "new"))))
    assert new.lock is not None
    new.lock.close()
    (new.folder / "config.json").unlink()
    request(new.folder, 2, back=False)


def test_two_commands_at_once_have_files_of_their_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    rename = Path.rename

    def noted(part: Path, file: Path) -> Path:
        written.append(part.name)
        return rename(part, file)

    monkeypatch.setattr(Path, "rename", noted)
    request(folder, 0, back=False)
    request(folder, 1, back=True)
    assert len(set(written)) == 2


def test_the_driver_lists_the_folder_once_a_second_whatever_the_number_of_replicas(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, listed, opened = [0.0], list[Path](), list[Path]()
    names, read = os.listdir, Path.read_text

    def listing(at: Path) -> list[str]:
        listed.append(at)
        return names(at)

    def reading(at: Path, encoding: str) -> str:
        opened.append(at)
        return read(at, encoding)

    monkeypatch.setattr(os, "listdir", listing)
    monkeypatch.setattr(Path, "read_text", reading)
    requests = DrainRequests(folder, 256, clock=lambda: now[0])
    for _ in range(20):
        assert requests.take() == []
        now[0] += 0.05
    assert len(listed) == 1 and opened == []
    request(folder, 1, back=False)
    (folder / "drain.part").write_text("of another program")
    now[0] = 1.5
    assert requests.take() == [DrainAsked(1)]
    assert requests.take() == []


def test_the_command_says_when_no_driver_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("helixrt.commands.drain._TAKEN_WITHIN_S", 0.1)
    assert main(["drain", "1", "--run", str(folder)]) == 2
    assert "its driver did not answer within 0.1 s" in capsys.readouterr().err
    assert take_requests(folder, 2) == [], "the request is taken back"
