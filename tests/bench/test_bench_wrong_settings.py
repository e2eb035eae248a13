"""Settings with which a benchmark cannot work are refused before anything is measured."""

from __future__ import annotations

from types import ModuleType

import pytest

from helixrt.bench import (
    adaptation,
    adapting,
    adapting_job,
    balance,
    capture,
    fetch,
    kernels,
    pipeline,
    schedule,
    session,
    strands,
    uneven,
)
from helixrt.errors import ConfigError
from tests.bench.running import run_bench

MEASURING = {  # the function of each benchmark that starts to measure
    balance: "captured",
    capture: "measured",
    kernels: "measure",
    pipeline: "measure",
    schedule: "known_optima",
    session: "measure",
    strands: "measure",
}
REFUSED = [
    (adaptation, "--sizes 4x12", "--sizes=4x12: must be STAGESxMICROBATCHES@MS"),
    (adaptation, "--sizes 3x12@10", "--sizes=3x12@10: must be STAGESxMICROBATCHES@MS"),
    (adaptation, "--sizes 4x0@10", "--sizes=4x0@10: must be STAGESxMICROBATCHES@MS"),
    (adaptation, "--sizes 4x12@0", "--sizes=4x12@0: must be STAGESxMICROBATCHES@MS"),
    (adaptation, "--sizes four", "--sizes=four: must be STAGESxMICROBATCHES@MS"),
    (adapting_job, "--steps 20", "--steps=20: must go beyond"),
    (adapting, "--scenario table3", "--size=4x12@10: must have the trace's 8 stages"),
    (balance, "--stages 13", "--stages=13: must be at most --layers=12"),
    (balance, "--microbatches 8 3", "--microbatches=3: 1f1b needs one per stage, --stages=4"),
    (balance, "--dim 100", "--dim=100: must be a multiple of 128"),
    (balance, "--rounds 0", "--rounds=0: must be at least 1"),
    (balance, "--real 1", "--real=1: must be 0, or at least 2 steps"),
    (capture, "--stages 33", "--stages=33: must be from 1 to --layers=32"),
    (capture, "--repeats 1", "--repeats=1: must be at least 2"),
    (capture, "--layers 1", "--layers=1: must be at least 2"),
    (fetch, "--donors 0", "^--donors=0"),
    (fetch, "--rounds 1", "^--rounds=1"),
    (fetch, "--window 0.1", "^--window=0.1"),
    (fetch, "--serve-cpu -1", "^--serve-cpu=-1"),
    (kernels, "--megabytes 0", "--megabytes=0: must be at least 1"),
    (kernels, "--programs 2 0", "--programs=0: must be at least 1"),
    (kernels, "--rounds 1", "--rounds=1: must be at least 2"),
    (kernels, "--launches 0", "--launches=0: must be at least 1"),
    (pipeline, "--batch 6 --microbatches 4", "--microbatches=4: must divide --batch=6"),
    (pipeline, "--microbatches 1", "schedule.microbatches=1: 1f1b needs"),
    (pipeline, "--layers 1", "mesh.pp=2: more stages than layers: model.layers=1"),
    (pipeline, "--rounds 1", "--rounds=1: must be at least 2"),
    (schedule, "--instances 0", "--instances=0: must be at least 1"),
    (schedule, "--exact-limit -1", "--exact-limit=-1.0: must be at least 0"),
    (schedule, "--sizes 32x128,64", "--sizes=64: must be STAGESxMICROBATCHES"),
    (session, "--rounds 1", "--rounds=1: must be at least 2"),
    (session, "--block 2", "--block=2: must be at least 3"),
    (session, "--tiny-block 2", "--tiny-block=2: must be at least 3"),
    (strands, "--microbatches 1", "--microbatches=1: must be at least 2"),
    (strands, "--rounds 1", "--rounds=1: must be at least 2"),
    (strands, "--dim 100", "--dim=100: must be a multiple of 64"),
    (strands, "--shares 0.5 0", "--shares=0.0: must be above 0"),
    (strands, "--layers 4 8", "takes several values with --memory only"),
    (strands, "--device cuda --model moe-ep", "--model=moe-ep: must be gpt-tp with --device cuda"),
    (uneven, "--layers 4", "--layers=4: must be at least one per chunk, 8"),
    (uneven, "--dim 100", "--dim=100: must be a multiple of 64"),
    (uneven, "--microbatches 6", "--microbatches=6: must be a multiple of 4"),
    (uneven, "--scale 0", "--scale=0.0: must be above 0"),
    (uneven, "--steps 0", "--steps=0: must be at least 1"),
    (uneven, "--vocab 0", "model.vocab=0: must be at least 1"),
]


@pytest.mark.parametrize(("bench", "given", "message"), REFUSED)
def test_wrong_settings_start_nothing(bench: ModuleType, given: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if bench in MEASURING:
        monkeypatch.setattr(bench, MEASURING[bench], lambda *settings: pytest.fail("started"))
    with pytest.raises(ConfigError, match=message):
        run_bench(bench, *given.split())
