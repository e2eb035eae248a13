"""Two stages as two processes, on one device: each message has its values, under busy streams and with little host memory.

One case runs on the CPU, so that the script is tried everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline import channels_stage

CASES = [("cuda", transport, mode) for transport in ("tcp", "shared_memory") for mode in ("delegated", "direct")]


@pytest.mark.system
@pytest.mark.parametrize(
    ("device", "transport", "mode"),
    [("cpu", "shared_memory", "direct"), *(pytest.param(*case, marks=pytest.mark.gpu) for case in CASES)],
)
def test_values_of_messages(device: str, transport: str, mode: str, tmp_path: Path) -> None:
    script, root = Path(channels_stage.__file__), Path(__file__).parents[2]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
    command = [sys.executable, str(script)]
    arguments = [str(tmp_path / "rendezvous"), device, mode, transport]
    stages = [
        subprocess.Popen(
            [*command, str(stage), *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for stage in range(2)
    ]
    try:
        said = [stage.communicate(timeout=200)[0] for stage in stages]
    finally:
        for stage in stages:
            stage.kill()
            stage.wait(60)
    count = channels_stage.STEPS * channels_stage.MESSAGES
    assert [text.splitlines()[-1:] for text in said] == [[f"ok {count}"]] * 2, said
