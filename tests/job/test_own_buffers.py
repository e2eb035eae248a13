"""Buffers with the mode "per_replica" in a session and in whole runs: each replica's queue is its own, through dropped steps, a
restart and a resumed run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

from helixrt.engines.module import ModuleEngine
from helixrt.engines.registered import Registered
from helixrt.errors import MisuseError
from helixrt.job.per_replica import PerReplicaState, published
from helixrt.protocol.step.lineage import audit
from tests import programs
from tests.job.lineage_oracle import chain, reported
from tests.job.session_world import LocalHost, session_with

SCRIPT = Path(__file__).with_name("own_buffers_script.py")
KEYS, ROWS = 32, 4
OWN = {"queue": "per_replica", "queue_ptr": "per_replica"}


class MoCo(nn.Module):
    """A queue of features in a float buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enc = nn.Linear(8, 16)
        self.register_buffer("queue", torch.randn(16, KEYS))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = normalize(self.enc(x), dim=1)
        loss = (q @ self.queue.clone().detach()).logsumexp(1).mean()
        with torch.no_grad():
            p = int(self.queue_ptr)
            self.queue[:, p : p + ROWS] = q.T.detach()
            self.queue_ptr[0] = (p + ROWS) % KEYS
        return loss


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, 8, generator=generator) for _ in range(40)]


def trained(host: LocalHost, until: int, buffers: Any = None, **settings: Any) -> MoCo:
    session = session_with(host, **settings)
    model = MoCo()
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=1e-2)], buffers=buffers)
    session.evaluate(lambda: float(model(data()[0])), every=2)  # which changes the queue, too
    for step in session.steps(data(), until=until):
        for x in step:
            step.backward(model(x))
        step.commit()
    return model


def plain(steps: int) -> MoCo:
    model = MoCo()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in data()[:steps]:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
    return model


def test_a_queue_without_a_mode_is_refused_in_the_first_step() -> None:
    host = LocalHost()
    with pytest.raises(MisuseError, match="buffer queue is changed outside the update.*register\\(buffers={'queue': MODE}\\)"):
        trained(host, 6)
    assert host.worker is not None and host.worker.head.step == 0


def test_a_queue_of_a_replica_trains_as_in_a_plain_loop_and_dropped_steps_leave_no_trace() -> None:
    for dropped in (set(), {2, 3, 5}):
        model = trained(LocalHost(dropped=dropped), 6, OWN)
        for name, value in plain(6).state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name


def test_a_replica_that_starts_again_takes_its_newest_queue() -> None:
    host = LocalHost()
    trained(host, 7, OWN, loader_every=5)
    model, said = MoCo(), list[str]()
    things = ModuleEngine(Registered.of(model, buffers=OWN)).per_replica
    states, saved = published("0/0", host.store, None, said.append)
    PerReplicaState(things, states, saved, 5, lambda step: False, said.append).begin(6, 7)
    assert said == ["per-replica state: that of batch 5 is taken, for batch 6"]
    assert torch.equal(model.queue, plain(5).queue) and int(model.queue_ptr) == 5 * ROWS


def test_an_existing_loop_names_modes_in_prepare() -> None:
    for buffers, dropped in ((None, set()), (OWN, {3})):
        session, model = session_with(LocalHost(dropped=dropped)), MoCo()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

        def loop(session: Any = session, model: Any = model, optimizer: Any = optimizer, buffers: Any = buffers) -> None:
            model, optimizer, loader = session.prepare(model, optimizer, data(), until=6, buffers=buffers)
            for x in loader:
                model(x).backward()
                optimizer.step()
                optimizer.zero_grad()

        if buffers is None:
            with pytest.raises(MisuseError, match="buffer queue is changed"):
                loop()
        else:
            loop()
            assert torch.equal(model.queue, plain(6).queue)


# ---------------------------------------------------------------- whole runs


def launch(case: str, folder: Path, until: int) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), case, str(folder), str(until)]
    done = programs.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.system
@pytest.mark.timeout(480)
def test_queues_stay_apart_through_a_kill_and_a_resumed_run(tmp_path: Path) -> None:
    told = launch("killed", tmp_path, 24)
    folder = (tmp_path / "latest").resolve()
    assert "per-replica state: that of batch 2 is taken, for batch 3" in told + said(folder, "r1.pp0.inc1")
    records = chain(folder)
    assert audit(records).clean and [record.step for record in records] == list(range(25))
    launch("resumed", tmp_path, 30)
    records = chain(folder)
    assert audit(records).clean and len(set(reported(folder))) == 1 and records[-1].step == 30 and records[-1].life == 1
    for replica in range(2):
        assert (tmp_path / f"killed{replica}").exists() and (tmp_path / f"resumed{replica}").exists()
        position = records[24].positions[replica]
        assert f"that of batch {position} is taken, for batch {position}" in said(folder, f"r{replica}")


def said(folder: Path, rank: str) -> str:
    return "".join(log.read_text() for log in (folder / "logs").glob(f"{rank}*.log"))
