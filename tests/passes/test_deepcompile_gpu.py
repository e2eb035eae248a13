"""The DeepCompile pass inside DeepSpeed's DeepCompile on one GPU: it runs on the forward and the backward graph, gathers of
ZeRO 3 are launched earlier, and training is that of DeepCompile without it and of DeepSpeed without DeepCompile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("deepcompile_program.py")
BUILD = "from deepspeed.ops.op_builder.dc import DeepCompileBuilder; DeepCompileBuilder().load()"
RUNS = ("plain", "deepcompile", "hidden")
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of a loss: kernels that Inductor fuses round otherwise
PRODUCTS = ("aten.mm", "aten.addmm")


def environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"DS_ACCELERATOR": "cuda", "PYTHONPATH": os.pathsep.join(paths)}


def build() -> None:
    """DeepSpeed compiles its operators at the first use: here once, before runs that have a limit of time."""
    from torch.utils.cpp_extension import CUDA_HOME

    if CUDA_HOME is None:
        pytest.skip("DeepCompile's operators are compiled with the CUDA toolkit, which is not installed")
    built = subprocess.run([sys.executable, "-c", BUILD], env=environment(), capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-6000:]


def trained(tmp_path: Path, stage: int, backend: str, dtype: str) -> dict[str, dict[str, Any]]:
    """What the program found in each kind of run; they run beside each other."""
    started = {}
    for run in RUNS:
        command = [sys.executable, str(PROGRAM), run, str(stage), backend, dtype, str(tmp_path / f"{run}.json")]
        with (tmp_path / f"{run}.log").open("w") as log:
            own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / run), "TORCHINDUCTOR_COMPILE_THREADS": "4"}  # none is cached
            started[run] = subprocess.Popen(command, env=environment() | own, stdout=log, stderr=subprocess.STDOUT)
    try:
        for run, process in started.items():
            code = process.wait(timeout=300)
            text = (tmp_path / f"{run}.log").read_text()
            assert code == 0, f"{run}: {text[-6000:]}"
            assert "profiling failed" not in text and "MemoryProfiling error" not in text, text[-6000:]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return {run: json.loads((tmp_path / f"{run}.json").read_text()) for run in RUNS}


def products_before(order: list[tuple[str, str]]) -> dict[str, int]:
    """For each gather, how many matrix products are ahead of it in the graph."""
    found, products = {}, 0
    for name, target in order:
        products += target.startswith(PRODUCTS)
        if target.startswith("dc.allgather_param"):
            found[name] = products
    return found


def gathers_first(program: str) -> int:
    """How many gathers a program that Inductor generated launches before it waits for one."""
    calls = re.findall(r"^\s.*torch\.ops\.dc\.(allgather_param|wait_allgather)\.default\(", program, re.M)
    return calls.index("wait_allgather")


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize(("stage", "dtype"), [(3, "float32"), (3, "bfloat16"), (1, "float32"), (2, "float32")])
def test_training_is_that_without_the_pass(tmp_path: Path, stage: int, dtype: str, backend: str) -> None:
    build()
    found = trained(tmp_path, stage, backend, dtype)
    plain, compiled, hidden = (found[run] for run in RUNS)
    assert [each["active"] for each in found.values()] == [False, True, True]
    assert plain["losses"][-1] < 0.9 * plain["losses"][0]
    assert hidden["losses"] == pytest.approx(compiled["losses"], rel=0 if backend == "eager" else TOLERANCE[dtype])
    for each in (compiled, hidden):
        assert each["losses"] == pytest.approx(plain["losses"], rel=TOLERANCE[dtype])
    if backend == "eager":
        assert hidden["weights"] == compiled["weights"]

    assert [graph["backward"] for graph in hidden["after"]] == [False, True]
    for before, after in zip(hidden["before"], hidden["after"], strict=True):
        moved = sum(mine != other for mine, other in zip(before["order"], after["order"], strict=True))
        print(f"ZeRO {stage} {dtype} {backend} backward={before['backward']}: {moved} of {len(after['order'])} places changed")
        assert sorted(map(tuple, before["order"])) == sorted(map(tuple, after["order"]))
    if stage < 3:
        return
    for number in range(2):
        earlier, later = (products_before(hidden[when][number]["order"]) for when in ("after", "before"))
        assert all(earlier[name] <= later[name] for name in later)
        assert sum(earlier[name] < later[name] for name in later) > len(later) // 2
        if backend == "inductor":
            without, within = (gathers_first(each["programs"][number]) for each in (compiled, hidden))
            assert within > without, "Inductor keeps the order"
