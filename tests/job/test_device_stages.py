"""A replica of two stages as two processes on one device: losses, norms and parameters are those of a plain loop on the CPU.

The first case runs on the CPU as well, so that the comparison itself is tried everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import helixrt
from helixrt.engines import pipeline
from helixrt.engines.stream_marks import HostMarks
from tests import programs
from tests.job import device_stages_script as script
from tests.job.lineage_oracle import chain, reported
from tests.job.session_world import session_with
from tests.job.test_captured import StageHost

GPU = pytest.mark.gpu


def stages_of(folder: Path, case: str, device: str, dtype: str = "float32") -> list[dict[str, Any]]:
    """What the two stages have left of a run."""
    programs.succeeded(Path(script.__file__), folder, case, device, dtype, timeout=230)
    return [torch.load(folder / f"stage{stage}.pt") for stage in range(2)]


def whole_name(case: str, name: str) -> str:
    """In the plain model."""
    if case == "gpt2":
        return "transformer.wte.weight" if name == "lm_head.weight" else name
    chunk, layer, rest = name.removeprefix("chunk").split(".", 2)
    return f"{2 * int(chunk) + int(layer)}.{rest}"


@pytest.mark.system
@pytest.mark.parametrize(
    ("case", "device"),
    [
        pytest.param("parts", "cpu", marks=pytest.mark.slow),
        pytest.param("parts", "cuda", marks=GPU),
        pytest.param("graphs", "cuda", marks=GPU),
        pytest.param("gpt2", "cuda", marks=GPU),
    ],
)
def test_two_stages_train_as_a_plain_loop_does(case: str, device: str, tmp_path: Path) -> None:
    stages = stages_of(tmp_path, case, device)
    parameters, losses, norms = script.plain(case)
    seen: set[str] = set()
    for stage in stages:
        assert stage["losses"] == stages[0]["losses"] and stage["norms"] == stages[0]["norms"], "all stages have the same"
        assert stage["losses"] == pytest.approx(losses, rel=1e-4)
        assert stage["norms"] == pytest.approx(norms, rel=1e-3)
        for name, value in stage["parameters"].items():
            torch.testing.assert_close(value, parameters[whole_name(case, name)], rtol=1e-3, atol=1e-4)
            seen.add(whole_name(case, name))
        spans = stage["spans"]  # of the last step not all are read by then
        assert len(spans) >= 2 * script.MICROBATCHES * (script.STEPS - 1)
        assert all(0.0 < end_s - begin_s < 60.0 for begin_s, end_s in spans)
    assert seen == parameters.keys()
    run = (tmp_path / "latest").resolve()
    assert chain(run)[-1].step == script.STEPS and len(set(reported(run))) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["parts", "gpt2"])
def test_in_bfloat16_the_losses_are_near(case: str, tmp_path: Path) -> None:
    first, last = stages_of(tmp_path, case, "cuda", "bfloat16")
    _, losses, _ = script.plain(case)
    assert first["losses"] == last["losses"] == pytest.approx(losses, rel=3e-2)
    assert first["losses"] != pytest.approx(losses, rel=1e-6), "autocast was active"
    assert {value.dtype for value in first["parameters"].values()} == {torch.float32}


class NotedMarks(HostMarks):
    def __init__(self) -> None:
        self.said: list[tuple[str, int]] = []

    def wrote(self, bucket: int, device: torch.device) -> None:
        self.said.append(("wrote", bucket))

    def handed_out(self, bucket: int) -> None:
        self.said.append(("handed out", bucket))

    def wait(self, bucket: int) -> None:
        self.said.append(("wait", bucket))


@pytest.mark.parametrize("captured", [False, True])
def test_the_exchange_waits_for_what_computes_a_bucket(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the book of a captured model before its gradients, which is in host memory."""
    marks = NotedMarks()
    monkeypatch.setattr(pipeline, "marks_for", lambda devices: marks)
    session, x = session_with(StageHost(), seed=5), torch.zeros(8, 4)
    if captured:
        compiled = helixrt.compile(torch.nn.Linear(4, 4), loss=torch.nn.functional.mse_loss, microbatches=2)
        model = session.parallelize(compiled, example=helixrt.ExampleBatch(x, target=x))
    else:
        stages = helixrt.Stages([torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss, (x[:4], x[:4]), x[:4], microbatches=2)
        model = session.parallelize(stages)
    session.register(model=model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    engine = model.engine_in_use  # type: ignore[union-attr]
    given: list[int] = []

    def on_bucket(bucket: int) -> None:
        given.append(bucket)
        if bucket >= book:
            assert marks.said[-2:] == [("wrote", bucket - book), ("handed out", bucket - book)], "before it is handed out"

    book = 1 if captured else 0
    engine.begin(on_bucket)
    model.train_batch((x,), {}, x)  # type: ignore[operator]
    engine.end()
    assert sorted(given) == list(range(book + 1))
    marks.said.clear()
    for bucket in given:
        engine.ready(bucket)
    assert marks.said == [("wait", 0)]
    engine.close()
