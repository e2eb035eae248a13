"""`helixrt serve --resume`: what is refused, and a whole run whose server was stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job import environment
from helixrt.job.config import JobConfig, MeshConfig, OutputConfig
from helixrt.job.driver import Run
from helixrt.job.environment import SessionChoices
from helixrt.job.served import SETTINGS_FILE, SETTINGS_KEY, _restore_settings, resumed
from helixrt.protocol.step.lineage import audit
from helixrt.replica.store import MemoryRunStore
from tests.examples.test_existing_loop import EXAMPLE, variables
from tests.examples.test_existing_loop import environment as variables_of
from tests.job.lineage_oracle import chain, reported
from tests.job.test_resume import config_of
from tests.job.test_run_lock import past_run


def served(root: Path) -> JobConfig:
    return JobConfig(name="run", launcher="environment", mesh=MeshConfig(1, 1), output=OutputConfig(str(root)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a served run of one replica with a checkpoint of step 2, whose server has gone."""
    at = tmp_path / "2026-01-02" / "10-00-00"
    at.mkdir(parents=True)
    found = past_run(at)
    monkeypatch.setattr(checkpoints, "checkpoint_of", lambda run: found if run == at.resolve() else None)
    (at / "config.json").write_text(json.dumps(served(tmp_path).to_plain()))
    return at


def test_a_served_run_is_resumed_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    config, run = resumed(served(tmp_path), str(folder))
    assert (run.folder, run.life, run.entries[-1].step, config.resume) == (folder, 3, 2, True)
    with pytest.raises(ConfigError, match="one process drives a run"):
        resumed(served(tmp_path), "latest")
    assert run.lock is not None
    run.lock.close()


def test_what_does_not_fit_is_refused_before_anything_is_changed(folder: Path, tmp_path: Path) -> None:
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    more, wider = MeshConfig(2, 1), MeshConfig(1, 1, 2)
    with pytest.raises(ConfigError, match=r"replicas=2: the run in .* has 1, and a served run is resumed with as many"):
        resumed(replace(served(tmp_path), mesh=more), str(folder))
    with pytest.raises(ConfigError, match=r"dp_shard=2: the run in .* has 1"):
        resumed(replace(served(tmp_path), mesh=wider), str(folder))
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        resumed(served(tmp_path), str(tmp_path))
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == before
    (folder / "config.json").write_text(json.dumps(config_of(tmp_path).to_plain()))
    with pytest.raises(ConfigError, match=r"was begun by helixrt.run; resume it by helixrt.run\(resume=...\)"):
        resumed(served(tmp_path), str(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="its config.json cannot be read"):
        resumed(served(tmp_path), str(folder))


def test_replicas_of_a_resumed_run_have_the_settings_of_before(tmp_path: Path) -> None:
    def run(life: int) -> Run:
        return Run(tmp_path, "run-1", 0.0, (), life)

    store = MemoryRunStore()
    assert not _restore_settings(store, run(1)) and not _restore_settings(store, run(0))
    environment.agree_on_settings(store, SessionChoices(seed=4))
    kept = store.get(SETTINGS_KEY)
    assert kept is not None
    (tmp_path / SETTINGS_FILE).write_text(kept)
    again = MemoryRunStore()
    assert _restore_settings(again, run(1))
    environment.agree_on_settings(again, SessionChoices(seed=4))
    with pytest.raises(ConfigError, match="seed=5: .* has 4"):
        environment.agree_on_settings(again, SessionChoices(seed=5))


@pytest.mark.slow  # two servers, and three or four processes that import torch
@pytest.mark.timeout(480)
def test_a_served_run_whose_server_was_stopped_goes_on_and_loses_nothing(tmp_path: Path) -> None:
    steps, accumulate = 60, 2

    def serve(*more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", "2", "--storage", str(tmp_path), *more]
        command += ["--checkpoint-every", "5"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables_of())

    def replicas(told: dict[str, str]) -> list[subprocess.Popen[bytes]]:
        return [
            subprocess.Popen(
                [sys.executable, str(EXAMPLE), str(steps)],
                env=variables_of(**{**told, "HELIXRT_REPLICA": str(replica)}),
                stdout=subprocess.DEVNULL,
                stderr=open(tmp_path / f"replica{replica}.log", "a"),  # noqa: SIM115 the process has it
            )
            for replica in range(2)
        ]

    def end(processes: list[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            process.kill()
            process.wait(60)

    first, joined = serve(), list[subprocess.Popen[bytes]]()
    try:
        joined = replicas(variables(first))
        deadline = time.monotonic() + 200
        while not list(tmp_path.glob("latest/checkpoints/*/complete.json")) and time.monotonic() < deadline:
            time.sleep(0.02)
        end(joined)
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=120)
        folder = (tmp_path / "latest").resolve()
        reached = chain(folder)[-1].step
        second = serve("--resume", "latest")
        try:
            joined = replicas(variables(second))
            said, _ = second.communicate(timeout=200)
            assert second.returncode == 0, said + "".join((tmp_path / f"replica{r}.log").read_text() for r in range(2))
        finally:
            second.kill()
    finally:
        end(joined)
        first.kill()
    records = chain(folder)
    assert (tmp_path / "latest").resolve() == folder and [record.step for record in records] == list(range(steps + 1))
    assert audit(records, accumulate).clean and len(set(reported(folder))) == 1 and len(reported(folder)) == 2
    assert {record.life for record in records[1:]} == ({0, 1} if reached < steps else {0})
    assert (folder / "secret").stat().st_mode & 0o077 == 0
