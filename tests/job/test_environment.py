"""Joining a run that others serve: the variables, the claims, and the launcher that answers them."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from helixrt.errors import ConfigError, Fatal, MisuseError, Retryable, StartAgain
from helixrt.job import environment, init
from helixrt.job.config import JobConfig
from helixrt.job.environment import Place, SessionChoices, place_of
from helixrt.job.external_launcher import ExternalLauncher
from helixrt.job.policies import FATAL_EXIT, MISUSE_EXIT, RELOAD_EXIT
from helixrt.job.rank import RETRY_CODE
from helixrt.job.served import fingerprint
from helixrt.job.train_function import RANK_VARIABLE
from helixrt.replica.contracts import Coordinate, RankExit, RankSpec
from helixrt.replica.run_keys import CLOSED_KEY, SERVED_KEY, claim_key, ended_key, exit_key, progress_key, spec_key
from helixrt.replica.store import MemoryRunStore

SECRET = "a secret of the run"
SOUND = {"HELIXRT_STORE": "host:1", "HELIXRT_REPLICA": "2", "HELIXRT_SECRET": SECRET}

# ---------------------------------------------------------------- variables


def test_a_place_is_read_from_variables(tmp_path: Path) -> None:
    assert place_of(SOUND) == Place("host:1", 2, SECRET)
    (tmp_path / "secret").write_text(SECRET + "\n")
    by_file = {k: v for k, v in SOUND.items() if k != "HELIXRT_SECRET"} | {"HELIXRT_SECRET_FILE": str(tmp_path / "secret")}
    assert place_of(by_file) == Place("host:1", 2, SECRET)
    assert place_of({**SOUND, "TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1"}) == Place("host:1", 2, SECRET)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"HELIXRT_STORE": ""}, "HELIXRT_STORE=: is not set; start `helixrt serve"),
        ({"HELIXRT_REPLICA": ""}, "HELIXRT_REPLICA=: must be the number of the replica"),
        ({"HELIXRT_REPLICA": "-1"}, "HELIXRT_REPLICA=-1: must be the number"),
        ({"HELIXRT_REPLICA": "", "SLURM_STEP_ID": "0"}, r"HELIXRT_REPLICA=\$SLURM_ARRAY_TASK_ID"),
        ({"HELIXRT_SECRET": ""}, "HELIXRT_SECRET=: is not set; set it, or HELIXRT_SECRET_FILE"),
        ({"HELIXRT_SECRET": "", "HELIXRT_SECRET_FILE": "/nowhere"}, "HELIXRT_SECRET_FILE=/nowhere: cannot be read"),
        (
            {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2"},
            "WORLD_SIZE=2: a replica has one process so far: start torchrun once",
        ),
    ],
)
def test_a_missing_or_wrong_variable_is_named(change: dict[str, str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        place_of({**SOUND, **change})


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


def test_threads_stay_as_they_are() -> None:
    import torch

    assert SessionChoices(seed=3).config(JobConfig(threads=77)).threads == torch.get_num_threads()


# ---------------------------------------------------------------- the server's side


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def spec(replica: int, incarnation: int, output: str = "") -> RankSpec:
    return RankSpec("run", Coordinate(replica), incarnation, "host:1", "", output, SECRET, 0.0, JobConfig().to_plain())


def launcher(store: MemoryRunStore, clock: Clock) -> ExternalLauncher:
    return ExternalLauncher(store, silent_s=90.0, wait_s=600.0, close_s=0.0, clock=clock)


def test_a_claim_is_answered_without_the_secret() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock)
    served.start(spec(1, 0))
    assert served.poll() == [] and served.waiting(1) and not served.waiting(0)
    store.put_if_absent(claim_key(1, 0), "host:77:1")
    assert served.poll() == [] and not served.waiting(1)
    told = store.get(spec_key(1, 0))
    assert told is not None and SECRET not in told
    assert RankSpec.from_plain(json.loads(told)).coordinate == Coordinate(1)


def begun(store: MemoryRunStore, clock: Clock) -> ExternalLauncher:
    served = launcher(store, clock)
    served.start(spec(1, 0))
    store.put_if_absent(claim_key(1, 0), "host:77:1")
    served.poll()
    return served


def only(exits: list[RankExit]) -> RankExit:
    (one,) = exits
    assert one.coordinate == Coordinate(1) and one.incarnation == 0
    return one


def test_an_incarnation_that_says_how_it_ended_has_ended_so() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    store.put_if_absent(exit_key(1, 0), json.dumps({"code": 64, "why": "MisuseError: no"}))
    ended = only(served.poll())
    assert ended.code == 64 and "MisuseError: no" in ended.reason and "host:77:1" in ended.reason
    assert served.poll() == []


def test_a_successor_ends_its_predecessor() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    store.put_if_absent(claim_key(1, 1), "host:88:2")
    ended = only(served.poll())
    assert ended.code == -9 and "host:88:2 has begun in its place" in ended.reason
    assert store.get(spec_key(1, 1)) is None  # until the controller starts it
    served.start(spec(1, 1))
    served.poll()
    assert store.get(spec_key(1, 1)) is not None


def test_one_that_is_silent_for_too_long_has_ended_and_is_fenced() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    for report in range(5):
        clock.now_s += 80.0
        store.set(progress_key(str(Coordinate(1)), 0), f"report {report}")
        assert served.poll() == []
    clock.now_s += 80.0
    assert served.poll() == [] and store.get(ended_key(1, 0)) is None
    clock.now_s += 20.0
    assert "has not reported for 90 s" in only(served.poll()).reason and store.get(ended_key(1, 0)) == "yes"


def test_a_replica_that_nobody_starts_is_not_waited_for_without_limit() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = launcher(store, clock)
    served.start(spec(1, 0))
    clock.now_s = 599.0
    assert served.waiting(1)
    clock.now_s = 601.0
    assert not served.waiting(1)
    served.kill(1)
    assert "was not started" in only(served.poll()).reason and store.get(ended_key(1, 0)) == "yes"


def test_closing_fences_who_still_runs() -> None:
    store, clock = MemoryRunStore(), Clock()
    served = begun(store, clock)
    served.start(spec(0, 0))
    served.close()
    served.close()
    assert store.get(CLOSED_KEY) == "yes" and store.get(ended_key(1, 0)) == "yes" and store.get(ended_key(0, 0)) is None


# ---------------------------------------------------------------- the replica's side


def served_store(replicas: int = 2) -> MemoryRunStore:
    store = MemoryRunStore()
    known = {"run": "run", "replicas": replicas, "secret": fingerprint("run", SECRET)}
    store.put_if_absent(SERVED_KEY, json.dumps(known))
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
        environment._check_run(MemoryRunStore(), place, choices)


def admitted(store: MemoryRunStore, place: Place) -> RankSpec:
    return environment._admitted(store, place, environment._claim(store, place))


def test_incarnations_are_claimed_in_their_order(tmp_path: Path) -> None:
    store, clock = served_store(), Clock()
    served = launcher(store, clock)
    place, found = Place("host:1", 1, SECRET), []
    for incarnation in range(3):
        served.start(spec(1, incarnation, str(tmp_path)))
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
    store.put_if_absent(spec_key(0, 1), json.dumps(spec(0, 1, str(tmp_path / "elsewhere")).to_plain()))
    with pytest.raises(ConfigError, match="the run's folder is not on this machine"):
        admitted(store, place)
    store.put_if_absent(CLOSED_KEY, "yes")
    with pytest.raises(Fatal, match="the run at host:1 is over"):
        admitted(store, place)
    assert store.get(claim_key(0, 2)) is None


def test_settings_of_the_session_are_equal_on_all_replicas() -> None:
    store = served_store()
    environment._agree_on_settings(store, SessionChoices(seed=1))
    environment._agree_on_settings(store, SessionChoices(seed=1, device="cpu"))
    with pytest.raises(ConfigError, match="seed=2: the replica that began first has 1; must be equal on all replicas"):
        environment._agree_on_settings(store, SessionChoices(seed=2))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MisuseError("no"), MISUSE_EXIT),
        (ConfigError("key", 1, "no"), MISUSE_EXIT),
        (StartAgain("behind"), RELOAD_EXIT),
        (Retryable("lost"), RETRY_CODE),
        (ValueError("bad"), FATAL_EXIT),
    ],
)
def test_an_end_is_told_as_a_rank_of_the_job_tells_it(error: Exception, code: int) -> None:
    assert environment._code_of(error) == code
