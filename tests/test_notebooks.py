"""Every notebook runs from top to bottom and asserts what it claims. As committed it holds its outputs, and no paths.

A notebook may run here with smaller settings (`SMALLER`): fewer samples of the same kind; all its cells and assertions run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SMALLER = {"01_schedules": {"PROFILES, TIGHT_PROFILES = 10, 4": "PROFILES, TIGHT_PROFILES = 3, 1"}}


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    from nbmake.nb_run import NotebookRun

    text = path.read_text(encoding="utf-8")
    for settings, smaller in SMALLER.get(path.stem, {}).items():
        assert text.count(settings) == 1, f"{settings} is to be set once in {path.name}"
        text = text.replace(settings, smaller)
    copy = tmp_path / path.name
    copy.write_text(text, encoding="utf-8")
    (tmp_path / "data").symlink_to(FOLDER / "data")  # beside the notebook, which is run in its own folder
    done = NotebookRun(copy, default_timeout=200).execute()
    assert done.error is None, done.error.trace


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_it_ran(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 1_000_000
    assert not re.search(r"/(?:home|root|Users|work|tmp)/", text), "a path of the machine it ran on"
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run all cells once, in order"
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
