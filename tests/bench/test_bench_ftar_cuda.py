"""`helixrt bench ftar_cuda` end to end on a GPU, and its settings everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helixrt.bench.ftar_cuda import Settings
from helixrt.cli import main


@pytest.mark.gpu
def test_figures_of_every_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ftar_cuda.json"
    few = ["--ranks", "2", "--mib", "1", "3", "--rounds", "2", "--products", "8"]
    assert main(["bench", "ftar_cuda", *few, "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    for side in ("copies", "gloo", "shared_memory", "tcp"):
        for at in ("1_mib", "3_mib", "1_mib_beside_compute", "3_mib_beside_compute"):
            assert figures[f"2_ranks_{side}_{at}_ms"]["p50"] > 0
    assert figures["2_ranks_gloo_3_mib_ratio_to_gloo"]["p50"] == 1
    assert "of the copies'" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--ranks", "1"], ["--rounds", "1"], ["--mib", "0"], ["--products", "-1"]])
def test_settings_that_cannot_work(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ftar_cuda", *wrong]) == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "ftar_cuda"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_products_grow_with_the_tensor() -> None:
    settings = Settings(2, (1,), ("tcp",), "float32", 2, 40)
    assert [settings.products_beside(mib) for mib in (1, 64, 256)] == [1, 40, 160]
