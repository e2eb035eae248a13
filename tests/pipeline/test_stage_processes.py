"""Two stages as two processes: a replica that loses a stage says so, with the step not counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.system

STAGE = """
import os, signal, sys
from datetime import timedelta
import torch, torch.distributed as dist
from helixrt.errors import Retryable
from helixrt.protocol.step.lineage import CommitRecord
from helixrt.record import FlightRecord
from helixrt.train.config import ModelConfig, OptimConfig, ScheduleConfig
from helixrt.engines.pipeline import PipelineEngine
from helixrt.bench._job_engine import pipeline_engine

stage, rendezvous = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
group = dist.ProcessGroupGloo(dist.FileStore(rendezvous, 2), stage, 2, timedelta(seconds=100))
model = ModelConfig(layers=2, dim=8, heads=2, kv_heads=2, ffn=16, vocab=16)

def batch_at(position):
    return torch.randint(0, 16, (8, 7), generator=torch.Generator().manual_seed(position))

record = FlightRecord(f"r0.pp{stage}")
engine = pipeline_engine(model, OptimConfig(), ScheduleConfig("1f1b", 4), batch=8, seq_len=6, steps=5, seed=0, stage=stage,
                        stages=2, group=group, batch_at=batch_at, validation=batch_at, record=record)
if stage == 1:
    record.attach(lambda event: os.kill(os.getpid(), signal.SIGKILL) if record.step == 3 else None)
for step in range(1, 6):
    record.step = step
    try:
        result = engine.run(step, lambda bucket: None)
        update = engine.apply(CommitRecord(step, step, "", ((0, 0),), {}, "run"), engine.buckets)
    except Retryable as error:
        print("lost", step, error)
        engine.close()
        break
    print("step", step, result.loss, update.grad_norm, flush=True)
engine.close()
"""


def test_the_survivor_of_a_killed_stage_gets_a_retryable_error(tmp_path: Path) -> None:
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", STAGE]
    stages = [
        programs.Popen([*command, str(s), str(tmp_path / "rendezvous")], env=env, stdout=subprocess.PIPE, text=True)
        for s in range(2)
    ]
    try:
        (survived, survivor), (died, victim) = [(s.wait(200), s.stdout.read().splitlines()) for s in stages if s.stdout]
    finally:
        for stage in stages:
            stage.kill()
            stage.wait(60)
    assert (survived, died) == (0, -signal.SIGKILL)
    assert len(victim) == 2 and survivor[:2] == victim  # both stages saw the same losses and norms
    assert survivor[2].startswith("lost 3 stage 1 of this replica cannot be reached") and len(survivor) == 3
    assert survivor[2].endswith("at r0.pp0")
