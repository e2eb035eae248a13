"""`helixrt.run`: what is refused before a start, and whole runs of small scripts on this host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import helixrt
from helixrt.errors import ConfigError, MissingExtra
from helixrt.job.checkpoint import checkpoints_of, folder_name, step_folders
from helixrt.job.config import ChaosConfig, CheckpointConfig, JobConfig, KillConfig, MeshConfig, OutputConfig
from helixrt.job.launch import checked
from helixrt.job.launchers import chosen_launcher
from helixrt.job.logs import configure_logging
from helixrt.job.stored_path import StoredPath
from helixrt.protocol.step.lineage import audit
from helixrt.record import Kind, read_events
from tests import programs
from tests.job.lineage_oracle import chain, reported
from tests.job.object_store import PROTOCOL

SCRIPT = Path(__file__).parent / "launched.py"


def top_level(session: helixrt.Session) -> None: ...


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"replicas": 0}, "replicas=0: must be at least 1"),
        ({"mesh": helixrt.Mesh(tp=-1)}, "mesh.tp=-1: must be at least 1"),
        ({"mesh": helixrt.Mesh(dp_shard=0)}, "mesh.dp_shard=0: must be at least 1"),
        ({"launcher": "environment"}, "HELIXRT_STORE=: is not set; for one run start `helixrt serve --replicas N`"),
        ({"launcher": "environment", "resume": "latest"}, "resume=latest: "),
        ({"launcher": "ssh"}, "launcher=ssh: must be one of auto, local, ray, environment, or MODULE:NAME"),
        ({"launcher": ":ranks"}, "launcher=:ranks: must be MODULE:NAME"),
        ({"launcher": "no.such:ranks"}, "launcher=no.such:ranks: there is no module no; name a function"),
        ({"launcher": "tests.job.noting_launcher:no"}, "no is no function at the top level of the module"),
        ({"options": helixrt.RunOptions(start="hot")}, "start=hot: must be one of auto, warm, cold"),
        ({"options": helixrt.RunOptions(membership="votes")}, "membership=votes: must be one of auto, torchft, store"),
        ({"device": "tpu"}, "device=tpu: must be one of auto, cpu, cuda"),
        ({"dtype": "float16"}, "dtype=float16: must be one of float32, bfloat16"),
        ({"name": "a/b"}, "must be a name without slashes"),
        ({"options": helixrt.RunOptions(buffers="last")}, "buffers=last: must be one of mean, first"),
        ({"options": helixrt.RunOptions(threads=0)}, "threads=0: must be at least 1"),
        ({"options": helixrt.RunOptions(checkpoint_path="memory://x")}, "checkpoint.path=memory://x: must be a storage"),
        ({"options": helixrt.RunOptions(loader_every=0)}, "loader_every=0: must be at least 1"),
        ({"options": helixrt.RunOptions(base=JobConfig(on_poison="eat"))}, "on_poison=eat: must be one of stop, skip"),
        (
            {"options": helixrt.RunOptions(base=JobConfig(chaos=ChaosConfig(kill=(KillConfig(replica=3),))))},
            r"chaos.kill\[0\].replica=3: must be below mesh.replicas=1",
        ),
        ({"replicas": 2.0}, "replicas=2.0: must be an integer, and is a float"),
        ({"mesh": {"pp": 2}}, "mesh=.*: must be a Mesh, and is a dict"),
        ({"mesh": helixrt.Mesh(pp="2")}, "mesh.pp=2: must be an integer, and is a str"),  # type: ignore[arg-type]
        ({"resume": True}, "resume=True: must be text or a path or None, and is a bool"),
        ({"loggers": print}, "loggers=.*: must be a Sequence, and is a builtin"),
        ({"options": {"checkpoint_every": 5}}, "options=.*: must be a RunOptions, and is a dict"),
        ({"options": helixrt.RunOptions(step_timeout_s="60")}, "options.step_timeout_s=60: must be a number, and is a str"),  # type: ignore[arg-type]
        ({"options": helixrt.RunOptions(base=JobConfig(checks={}))}, "options.base.checks=.*: must be a ChecksConfig"),  # type: ignore[arg-type]
        (
            {"options": helixrt.RunOptions(base=JobConfig(chaos=ChaosConfig(kill=(KillConfig(step="3"),))))},  # type: ignore[arg-type]
            r"options.base.chaos.kill\[0\].step=3: must be an integer",
        ),
        ({"arguments": {"rate": 0.1, "data": object()}}, "arguments=.*must be JSON values, which travel to the ranks: "),
        ({"arguments": {"rate": 0.1}}, r"arguments=\['rate'\]: do not fit train\(session, ...\): .*'rate'"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_made(settings: dict[str, Any], rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        helixrt.run(top_level, storage=tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def with_arguments(session: helixrt.Session, layers: int, *, rate: float = 0.1) -> None: ...


def test_arguments_are_what_the_function_takes_and_json() -> None:
    assert checked(with_arguments, {"layers": 2, "rate": 1.5}) == {"layers": 2, "rate": 1.5}
    assert checked(with_arguments, {"layers": (2, 3)}) == {"layers": [2, 3]}, "as the ranks get them"
    assert checked(top_level, None) == {}
    with pytest.raises(ConfigError, match="takes no argument; the first one is the session"):
        checked(lambda: None, None)
    with pytest.raises(ConfigError, match="missing a required argument: 'layers'"):
        checked(with_arguments, {"rate": 1.5})


def test_options_of_one_object_with_all_settings_of_the_runtime() -> None:
    settings = JobConfig(
        start="cold", threads=3, step_timeout_s=20.0, restarts=7, membership="store", nonfinite_limit=4,
        checkpoint=CheckpointConfig(9, 2),
    )  # fmt: skip
    options = helixrt.RunOptions.of(settings, loader_every=6, exit_grace_s=1.0)
    assert (options.loader_every, options.exit_grace_s) == (6, 1.0)
    made = options.job("name", 5, "folder", MeshConfig(2, 1), "ray")
    same = replace(settings, name="name", seed=5, launcher="ray", mesh=MeshConfig(2, 1), output=OutputConfig("folder"))
    assert made == same


@pytest.mark.parametrize(
    ("base", "rule"),
    [
        (JobConfig(seed=7), "base.seed=7: would be overwritten by the argument seed=0: give seed=7 instead"),
        (JobConfig(name="mine"), "base.name=mine: would be overwritten by the argument name='run': give name='mine' instead"),
        (JobConfig(launcher="ray"), "base.launcher=ray: would be .* argument launcher='local': give launcher='ray' instead"),
        (JobConfig(output=OutputConfig("mine")), "base.output.root=mine: .* argument storage=.*: give storage='mine' instead"),
        (JobConfig(resume=True), "base.resume=True: would be overwritten: give resume='latest' or a run's folder instead"),
    ],
)
def test_a_setting_that_an_argument_would_overwrite_is_refused(base: JobConfig, rule: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rule):
        helixrt.run(top_level, storage=tmp_path / "out", launcher="local", options=helixrt.RunOptions(base=base))
    assert not (tmp_path / "out").exists()
    given = helixrt.RunOptions.of(replace(base, resume=False))
    given.job(base.name, base.seed, base.output.root, base.mesh, base.launcher)


def test_where_others_start_the_ranks_it_says_that_the_server_has_its_own_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HELIXRT_STORE", raising=False)
    for options, said in ((helixrt.RunOptions(), False), (helixrt.RunOptions(exit_grace_s=20.0), True)):
        with pytest.raises(ConfigError, match="HELIXRT_STORE=: is not set"):
            helixrt.run(top_level, storage=tmp_path, launcher="environment", options=options)
        assert ("exit_grace_s= is not used here: the process that serves the run waits 600 s" in caplog.text) == said


def test_a_lambda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a lambda; ranks import it by its name"):
        helixrt.run(lambda session: None, storage=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"launcher=ray needs the package 'ray'; .*pip install 'helixrt\[ray\]'"):
        helixrt.run(top_level, storage=tmp_path / "out", launcher="ray")
    assert not (tmp_path / "out").exists()


def test_without_a_ray_cluster_it_says_how_to_start_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed")

    def unreachable(**options: Any) -> None:
        raise ConnectionError("could not find any running Ray instance")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", unreachable)
    with pytest.raises(ConfigError, match="launcher=ray: no Ray cluster is running here; start one with `ray start --head`"):
        helixrt.run(top_level, storage=tmp_path / "out", launcher="ray")
    assert not (tmp_path / "out").exists()


RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({"HELIXRT_STORE": "127.0.0.1:1"}, "environment"),
        ({"HELIXRT_STORE": "127.0.0.1:1", RAY_JOB: "{}"}, "environment"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "environment"),
        ({"TORCHELASTIC_RUN_ID": "1", RAY_JOB: "{}"}, "environment"),
        ({"SLURM_STEP_ID": "1"}, "environment"),
        ({"SLURM_STEP_ID": "1", RAY_JOB: "{}"}, "ray"),
        ({RAY_JOB: "{}"}, "ray"),
        ({"RAY_ADDRESS": "10.0.0.7:6379"}, "ray"),
        ({"RAY_ADDRESS": "http://10.0.0.7:8265"}, "local"),
        ({}, "local"),
    ],
)
def test_auto_is_chosen_by_the_environment(
    variables: dict[str, str], launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in ("HELIXRT_STORE", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "RAY_ADDRESS", RAY_JOB):
        monkeypatch.delenv(other, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert chosen_launcher("auto") == launcher and chosen_launcher("local") == "local"


SERVE = "for one run start `helixrt serve --replicas N`, and set the variables that it prints; "


@pytest.mark.parametrize(
    ("variables", "rule", "launcher"),
    [
        ({"TORCHELASTIC_RUN_ID": "1"}, "HELIXRT_STORE=: is not set", "local"),
        ({"SLURM_STEP_ID": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "HELIXRT_STORE=: is not set", "local"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2: this process is one of 2, and each would train a run", "local"),
        ({"RANK": "0", "WORLD_SIZE": "2", "RAY_ADDRESS": "10.0.0.7:6379"}, "WORLD_SIZE=2: this process is one of 2", "ray"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4: this process is one of 4", "local"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "8"}, "OMPI_COMM_WORLD_SIZE=8: this process is one of", "local"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE=2: this process is one of 2", "local"),
    ],
)
def test_a_process_that_others_have_started_without_a_server_trains_no_run_of_its_own(
    variables: dict[str, str], rule: str, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HELIXRT_STORE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    line = f'^{re.escape(rule)}.*{re.escape(SERVE)}for a run that this process starts give launcher="{launcher}"$'
    with pytest.raises(ConfigError, match=line):
        helixrt.run(top_level)
    with pytest.raises(ConfigError, match=f"^{re.escape(rule)}"):
        helixrt.init()
    assert chosen_launcher("local") == "local"


def test_one_of_one_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELIXRT_STORE", raising=False)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "PET_NNODES": "1", "PET_NPROC_PER_NODE": "8", "PMI_RANK": "0", "PMI_SIZE": "x"}
    for name, value in {**alone, "OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    assert chosen_launcher("auto") == "local"


def test_logging_is_set_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    for name in ("helixrt", "helixrt.job", "helixrt.replica"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    configure_logging("r0", "warning,helixrt.job=debug")
    assert logging.getLogger("helixrt.job.session").getEffectiveLevel() == logging.DEBUG
    assert logging.getLogger("helixrt.replica").getEffectiveLevel() == logging.WARNING
    monkeypatch.setenv("HELIXRT_LOG", "helixrt.replica=ERROR")
    configure_logging("r0")
    assert logging.getLogger("helixrt.replica").getEffectiveLevel() == logging.ERROR
    for wrong in ("loud", "torch=INFO"):
        with pytest.raises(ConfigError, match=f"HELIXRT_LOG={wrong}: must be a level"):
            configure_logging("r0", wrong)


# ---------------------------------------------------------------- whole runs


def launch(
    case: str, folder: Path, replicas: int = 2, *resume: str, checkpoints: str = ""
) -> subprocess.CompletedProcess[str]:
    return programs.output_of(SCRIPT, case, folder, replicas, *resume, timeout=200, CHECKPOINTS=checkpoints)


def newest(folder: Path) -> Path:
    return (folder / "latest").resolve()


@pytest.mark.slow
def test_a_sound_run_of_three_replicas(tmp_path: Path) -> None:
    done = launch("sound", tmp_path, replicas=3)
    assert done.returncode == 0, done.stdout + done.stderr
    records = chain(newest(tmp_path))
    found = audit(records, advance=2)
    assert found.clean and found.batches == 2 * sum(len(record.summed) for record in records)
    assert {path.name for path in tmp_path.glob("saved*")} == {"saved0", "saved1", "saved2"}
    assert records[-1].step == 12 and len(set(reported(newest(tmp_path)))) == 1 and len(reported(newest(tmp_path))) == 3
    assert f"ended at step 12 of {records[-1].hash}" in done.stdout
    lines = [json.loads(line) for line in (newest(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    assert {line["step"] for line in lines if line["what"] == "step"} == set(range(1, 13))
    validated = [line["step"] for line in lines if line["what"] == "validation"]
    assert validated == [0, 5, 10, 12], "each state once"
    assert json.loads((newest(tmp_path) / "report.json").read_text())["data_audit"]["gaps"] == 0


@pytest.mark.slow
def test_an_exception_in_one_replica_restarts_that_one(tmp_path: Path) -> None:
    done = launch("exception", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    log = (newest(tmp_path) / "logs" / "r1.pp0.inc0.log").read_text()
    first = log[log.index("Traceback") :].splitlines()
    assert "launched.py" in first[1] and first[3] == "ValueError: the disk is full", log
    assert "ValueError in r1 (incarnation 0), step 3, batch 5 of its stream: the disk is full" in log
    assert "ValueError: the disk is full" in done.stdout
    assert "is started as a new process" not in done.stderr, "the replica starts again as a fork"
    report = json.loads((newest(tmp_path) / "report.json").read_text())
    (traceback,) = report["tracebacks"]
    assert (traceback["replica"], traceback["incarnation"]) == (1, 0)
    assert "launched.py" in traceback["text"] and "ValueError: the disk is full" in traceback["text"]
    assert "ValueError: the disk is full" in (newest(tmp_path) / "report.html").read_text()
    contributions = [record for record in chain(newest(tmp_path)) if (0, 0) in record.contributors]
    assert len(contributions) == 12, "the other replica goes on, and contributes to every step"
    assert audit(chain(newest(tmp_path)), advance=2).clean and len(set(reported(newest(tmp_path)))) == 1


@pytest.mark.slow
def test_the_report_shows_where_a_rank_ended_in_native_code(tmp_path: Path) -> None:
    done = launch("native", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "killed by SIGSEGV" in done.stdout
    (traceback,) = json.loads((newest(tmp_path) / "report.json").read_text())["tracebacks"]
    assert (traceback["replica"], traceback["incarnation"]) == (1, 0)
    assert traceback["text"].startswith("Fatal Python error: Segmentation fault\nCurrent thread"), traceback
    assert "in string_at" in traceback["text"] and "launched.py" in traceback["text"]
    assert audit(chain(newest(tmp_path)), advance=2).clean and len(set(reported(newest(tmp_path)))) == 1


@pytest.mark.slow
@pytest.mark.grid
@pytest.mark.parametrize(("replicas", "checkpoints"), [(1, ""), (2, ""), (2, "storage")])
def test_a_run_that_is_resumed_ends_as_one_that_was_not_interrupted(replicas: int, checkpoints: str, tmp_path: Path) -> None:
    """Parameters, optimizer, scheduler, an average, state per replica, loader and positions: all go on from the checkpoint."""
    first = launch("interrupted", tmp_path / "one", replicas, checkpoints=checkpoints)
    assert first.returncode != 0, first.stdout + first.stderr
    folder = newest(tmp_path / "one")
    again = launch("interrupted", tmp_path / "one", replicas, "latest")  # it knows where the checkpoints are
    calm = launch("calm", tmp_path / "two", replicas)
    assert again.returncode == calm.returncode == 0, again.stdout + again.stderr + calm.stdout
    assert newest(tmp_path / "one") == folder, "it goes on in the same folder"
    records, undisturbed = chain(folder), chain(newest(tmp_path / "two"))
    assert audit(records, advance=2).clean and [record.step for record in records] == list(range(13))
    assert {record.life for record in records[1:6]} == {0} and records[-1].life == 1
    assert [record.replicas for record in records] == [record.replicas for record in undisturbed]
    assert reported(folder) == reported(newest(tmp_path / "two"))
    if checkpoints:
        assert not (folder / "checkpoints").exists()
        saved = checkpoints_of(folder)
        names = [each.name.split(".")[0] for each in step_folders(saved)]
        assert names in [[folder_name(records[n]) for n in (12, 10, left)] for left in (8, 9)], "the driver's SIGTERM saves"
        assert saved == StoredPath(f"{PROTOCOL}://{tmp_path}/one/bucket/{json.loads((folder / 'run.json').read_text())['run']}")
    for replica in range(replicas):
        names = [tmp_path / run / f"carry{replica}" for run in ("one", "two")]
        assert names[0].read_text() == names[1].read_text()


@pytest.mark.slow
def test_a_run_that_its_program_stops_ends_at_one_step_on_all_replicas(tmp_path: Path) -> None:
    done = launch("stop", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    records = chain(newest(tmp_path))
    assert 5 <= records[-1].step <= 7 and records[-1].last == "the loss is low enough"
    assert f"stopped after step {records[-1].step}: the loss is low enough" in done.stdout
    assert f"ended at step {records[-1].step} of {records[-1].hash} the loss is low enough" in done.stdout
    report = json.loads((newest(tmp_path) / "report.json").read_text())
    assert report["stopped"] == "the loss is low enough" and len(set(reported(newest(tmp_path)))) == 1
    (saved,) = newest(tmp_path).glob(f"checkpoints/step_{records[-1].step:08d}_*/complete.json")
    assert records[-1].hash[:8] in str(saved)


def exchanges_broken(folder: Path) -> list[str]:
    """What broke exchanges of replica 0, by its flight record."""
    events = read_events(folder / "flight" / "r0.pp0.inc0.story.jsonl")
    return [str(event.detail["reason"]) for event in events if event.kind is Kind.EXCHANGE_FAILED]


@pytest.mark.slow
def test_a_replica_that_gets_sigterm_leaves_at_a_step_boundary_and_comes_back(tmp_path: Path) -> None:
    done = launch("sigterm", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = newest(tmp_path)
    records = chain(folder)
    assert audit(records, advance=2).clean and len(set(reported(folder))) == 1
    assert exchanges_broken(folder) == [], "no exchange breaks"
    assert "r1      left (incarnation 0): " in done.stdout and "SIGTERM to r1.pp0; the replica left after step" in done.stdout
    assert "r1      restarted (incarnation 1)" in done.stdout and "lost (incarnation" not in done.stdout
    assert json.loads((folder / "report.json").read_text())["failures"] == []
    last = max(record.step for record in records if (1, 0) in record.contributors)
    assert 3 <= last <= 5, "it leaves at the next boundary, or the one after"


@pytest.mark.slow
def test_a_drained_replica_stays_away_until_it_is_asked_back(tmp_path: Path) -> None:
    done = launch("drain", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = newest(tmp_path)
    records = chain(folder)
    assert audit(records, advance=2).clean and len(set(reported(folder))) == 1
    assert exchanges_broken(folder) == [], "no exchange breaks"
    assert [record.step for record in records] == list(range(13))
    without = [record.step for record in records[1:] if 1 not in record.replicas]
    assert set(range(6, 9)) <= set(without), "it has left within two steps, and stays away"
    assert "r1      drained (incarnation 0)" in done.stdout and "r1      restarted (incarnation 1)" in done.stdout
    assert any((1, 1) in record.contributors for record in records[9:])


@pytest.mark.slow
def test_a_run_whose_replicas_all_die_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """And ends as one that was not disturbed."""
    done, calm = launch("all die", tmp_path / "one", 1), launch("calm", tmp_path / "two", 1)
    assert done.returncode == calm.returncode == 0, done.stdout + done.stderr
    records = chain(newest(tmp_path / "one"))
    assert audit(records, advance=2).clean
    assert [r.contributors for r in records[1:6]] == [((0, 0),)] * 5 and records[6].contributors == ((0, 1),)
    assert [r.step for r in records] == list(range(13))
    assert reported(newest(tmp_path / "one")) == reported(newest(tmp_path / "two"))


@pytest.mark.slow
def test_other_initial_weights_are_fetched(tmp_path: Path) -> None:
    done = launch("other weights", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "begins with other initial values than the run, and fetches those" in done.stdout
    assert len(set(reported(newest(tmp_path)))) == 1 and chain(newest(tmp_path))[-1].step == 12


WRONG = {
    "no guard": (1, "which imports the script; put the call under `if __name__ == "),
    "other layout": (2, "what is registered here differs from the replica that began first: parameter/0.weight is float32["),
    "longer loader": (2, "all streams must read equally many batches"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_script_fails_the_run_with_its_reason(case: str, tmp_path: Path) -> None:
    replicas, reason = WRONG[case]
    done = launch(case, tmp_path, replicas)
    assert done.returncode == 1
    failed = [line for line in done.stderr.splitlines() if line.startswith("the run failed: ")]
    assert len(failed) == 1 and reason in failed[0], done.stdout + done.stderr
    assert "restarted" not in done.stdout
