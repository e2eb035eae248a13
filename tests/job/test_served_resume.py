"""`helixrt serve --resume`: what is refused, and a whole run whose server was stopped and which goes on with more replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job import environment
from helixrt.job.checkpoint_layout import Index, PartIndex
from helixrt.job.config import JobConfig, MeshConfig, OutputConfig
from helixrt.job.driver import Run
from helixrt.job.environment import SessionChoices
from helixrt.job.resume import keep_stream
from helixrt.job.sampler import StreamSampler
from helixrt.job.served import SETTINGS_FILE, SETTINGS_KEY, _restore_settings, resumed
from helixrt.job.stream import Stream, StreamSettings
from helixrt.protocol.step.lineage import CommitRecord, Log, audit
from helixrt.replica.store import MemoryRunStore
from tests import programs
from tests.examples.test_existing_loop import environment as variables_of
from tests.examples.test_existing_loop import variables
from tests.job.lineage_oracle import chain, reported
from tests.job.test_resume import config_of
from tests.job.test_run_lock import past_run

SCRIPT = Path(__file__).with_name("dealt_script.py")
ACCUMULATE, BATCH = 2, 4


def served(root: Path) -> JobConfig:
    return JobConfig(name="run", launcher="environment", mesh=MeshConfig(1, 1), output=OutputConfig(str(root)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a served run of one replica with a checkpoint of step 2, whose server has gone."""
    at = tmp_path / "2026-01-02" / "10-00-00"
    at.mkdir(parents=True)
    found = past_run(at)
    monkeypatch.setattr(checkpoints, "checkpoint_of", lambda run: found if run == at.resolve() else None)
    monkeypatch.setattr(checkpoints, "read_index", lambda found: Index([PartIndex({}, {})]))
    (at / "config.json").write_text(json.dumps(served(tmp_path).to_plain()))
    return at


def test_a_served_run_is_resumed_from_its_checkpoint(folder: Path, tmp_path: Path) -> None:
    config, run = resumed(served(tmp_path), str(folder))
    assert (run.folder, run.life, run.log.head.step, config.resume) == (folder, 3, 2, True)
    with pytest.raises(ConfigError, match="one process drives a run"):
        resumed(served(tmp_path), "latest")
    assert run.lock is not None
    run.lock.close()


def test_what_does_not_fit_is_refused_before_anything_is_changed(folder: Path, tmp_path: Path) -> None:
    before = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    more, wider = MeshConfig(2, 1), MeshConfig(1, 1, 2)
    with pytest.raises(ConfigError, match=r"^replicas=2: its loader has no session.sampler, .*; resume .* with 1$"):
        resumed(replace(served(tmp_path), mesh=more), str(folder))
    with pytest.raises(ConfigError, match=r"^mesh.dp_shard=2: its loader has no session.sampler, .*; resume .* with 1$"):
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


def test_the_rest_of_the_data_is_dealt_over_other_streams_if_the_seed_of_its_order_is_known(
    folder: Path, tmp_path: Path
) -> None:
    loader = StatefulDataLoader(range(60), 4, sampler=StreamSampler(60, 1, 0, shuffle=True, seed=3))  # type: ignore[arg-type]
    store = MemoryRunStore()
    Stream(loader, StreamSettings(0, 1, 3), store)
    assert keep_stream(store, folder, 1)
    more = replace(served(tmp_path), mesh=MeshConfig(2, 1))
    files = {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()}
    with pytest.raises(ConfigError, match=f"has no {SETTINGS_FILE}, whose seed the order of its data follows"):
        resumed(more, str(folder))
    assert {f: f.read_bytes() for f in tmp_path.rglob("*") if f.is_file()} == files, "nothing is changed"
    (folder / SETTINGS_FILE).write_text(json.dumps({"seed": 3}))
    config, run = resumed(more, str(folder))
    assert run.lock is not None
    run.lock.close()
    assert [(deal.positions, deal.items) for deal in config.deal] == [((2,), 60)]
    assert run.agreed == -1, "the streams agree anew"
    assert SessionChoices(seed=3).config(config).session(1).deals == config.deal, "which the ranks are told"


def test_replicas_of_a_resumed_run_have_the_settings_of_before(tmp_path: Path) -> None:
    def run(life: int) -> Run:
        return Run(tmp_path, "run-1", 0.0, Log(), life)

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


def items_entered(folder: Path, records: Sequence[CommitRecord], replicas: int) -> list[int]:
    """The items behind the sums of these records, as the ranks of the script noted them."""
    read = {}  # (deals, replica, position) -> items; a batch that is worked on again has the same
    for replica in range(replicas):
        for line in (folder / f"items.{replica}.jsonl").read_text().splitlines():
            lives, position, items = json.loads(line)
            assert read.setdefault((lives, replica, position), items) == items
    entered = list[int]()
    for before, record in zip(records, records[1:], strict=False):
        for replica in record.summed:
            first = before.positions.get(replica, 0) if before.deal == record.deal else 0
            for position in range(first, first + ACCUMULATE):
                entered += read[(len(record.deal), replica, position)]
    assert len(entered) == BATCH * ACCUMULATE * sum(len(record.summed) for record in records)
    return entered


@pytest.mark.slow  # two servers, and five processes that import torch
@pytest.mark.timeout(500)
def test_a_served_run_goes_on_with_more_replicas_and_reads_every_item_once(tmp_path: Path) -> None:
    processes = list[subprocess.Popen[str]]()

    def serve(replicas: int, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "helixrt.cli", "serve", "--replicas", str(replicas), "--storage", str(tmp_path), *more]
        command += ["--checkpoint-every", "5", "--step-timeout-s", "120"]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        server = programs.Popen(command, text=True, env=variables_of(), **output)  # type: ignore[call-overload]
        processes.append(server)
        told = variables(server) | {"HELIXRT_TEST_DRIVER": str(server.pid), "OMP_NUM_THREADS": "1"}
        for replica in range(replicas):
            mine = variables_of(**{**told, "HELIXRT_REPLICA": str(replica)})
            command = [sys.executable, str(SCRIPT), str(tmp_path), str(replicas), "12"]
            with open(tmp_path / f"replica{replica}.log", "a") as log:
                processes.append(programs.Popen(command, text=True, env=mine, stdout=subprocess.DEVNULL, stderr=log))
        return server

    try:
        first = serve(2)
        first.communicate(timeout=220)
        assert (tmp_path / "interrupted").exists() and first.returncode != 0
        for process in processes:
            process.kill()
            process.wait(60)
        second = serve(3, "--resume", "latest")
        said, _ = second.communicate(timeout=220)
        assert second.returncode == 0, said + "".join((tmp_path / f"replica{r}.log").read_text() for r in range(3))
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    folder = (tmp_path / "latest").resolve()
    records = chain(folder)
    assert [record.step for record in records] == list(range(13)) and audit(records, 2).clean
    assert {record.life for record in records[1:]} == {0, 1} and (folder / "secret").stat().st_mode & 0o077 == 0
    assert len(reported(folder)) == 3 and len(set(reported(folder))) == 1
    assert {replica for record in records if record.deal for replica in record.replicas} == {0, 1, 2}
    entered = items_entered(tmp_path, records, 3)
    assert len(entered) == len(set(entered)), "no item of the epoch comes twice"
