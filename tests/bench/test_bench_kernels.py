"""`helixrt bench kernels`: refused without a card; what it runs is what it says; the arithmetic of its figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helixrt.bench import kernels
from helixrt.errors import ConfigError
from tests.bench.running import run_bench


def test_without_a_card_there_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "measure", lambda settings: pytest.fail("started"))
    with pytest.raises(ConfigError, match="^bench=kernels: needs a CUDA card, and PyTorch sees none here$"):
        run_bench(kernels)


def test_both_sides_do_the_same_work() -> None:
    """Ours and torch's calls of a name leave the same results, in as many destinations."""
    left, right = torch.randn(2, 1000).unbind()
    results = {}
    for variant in kernels.variants((2,)):
        out, also = torch.zeros(1000), torch.zeros(1000)
        kernels._call(variant, left, right, out, also)()
        results[variant.what] = torch.stack([out, also])
    assert set(results) == {prefix + what for what in kernels.KERNELS for prefix in ("", "torch_")}
    for what in kernels.KERNELS:
        assert torch.equal(results[what], results[f"torch_{what}"]), what
        assert (results[what][1] != 0).any() == what.endswith("two")


def test_rates_count_one_result_as_payload_and_every_tensor_as_traffic() -> None:
    settings = kernels.Settings(1000, "float32", (2,), 2, 1, 0)
    milliseconds = {variant.name: [1.0, 1.0] for variant in kernels.variants((2,))}
    payload, traffic = kernels.rates(settings, milliseconds)
    assert payload["reduce_copy_two_2"].p50 == pytest.approx(1048.576)
    moved = {"copy": (2, 2), "reduce_copy": (3, 3), "reduce_copy_two": (4, 5), "mean_two": (4, 7)}
    for what, (ours, torchs) in moved.items():
        assert traffic[f"{what}_2"].p50 == pytest.approx(ours * 1048.576)
        assert traffic[f"torch_{what}"].p50 == pytest.approx(torchs * 1048.576)


@pytest.mark.gpu
def test_figures_of_a_card(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert run_bench(kernels, "--rounds", "2", "--programs", "2", "8", "--json", str(path)) == 0
    figures = json.loads(path.read_text())
    assert figures["machine"]["device"] == torch.cuda.get_device_name() and figures["versions"]["triton"]
    assert {"payload_gb_per_s_copy_2", "payload_gb_per_s_mean_two_8", "traffic_gb_per_s_torch_copy"} <= set(figures["figures"])
