"""A run with a gradient scaler steps, and leaves steps out, as one loop over all batches does."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from tests import programs

SCRIPT = Path(__file__).with_name("scaled_script.py")


@pytest.mark.slow  # a driver and two processes that import torch
@pytest.mark.timeout(300)
def test_a_replica_that_overflows_has_all_leave_the_step_out_and_lower_the_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.succeeded(SCRIPT, tmp_path, timeout=280)
    found = torch.load(tmp_path / "scaled.pt", weights_only=True)

    monkeypatch.setattr(sys, "argv", [str(SCRIPT), str(tmp_path)])
    script = runpy.run_path(str(SCRIPT))
    model, scaler = script["build"](), script["scaler"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler.scale(torch.zeros(()))
    data, expected = [script["batches"](replica) for replica in range(2)], []
    for step in range(script["STEPS"]):
        optimizer.zero_grad()
        for stream in data:
            x, y = stream[step]
            scaler.scale(script["loss_of"](model, x, y)).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(16.0)
        applied = all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters() if parameter.grad is not None)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        expected.append((step + 1, applied, (0, 1) if applied else (), scaler.get_scale()))
    assert found["told"] == expected
    left_out = [step for step, applied, _, _ in expected if not applied]
    assert len(left_out) > 10 and left_out[-1] > left_out[0] + len(left_out), "at the start, and each time that it has grown"
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-6)
