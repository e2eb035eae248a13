"""`resume=true` of the built-in job goes on with the newest run of the same name, whatever other runs are in the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import helixrt
from helixrt.errors import ConfigError
from helixrt.job import checkpoint as checkpoints
from helixrt.job.session_config import SessionConfig
from helixrt.protocol.step.lineage import genesis
from helixrt.train.driver import train
from helixrt.train.schema import load_config
from helixrt.train.validate import validate
from tests.job.test_resume import past_run


def test_the_run_of_the_same_name_is_resumed_though_another_is_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("some text to train on. " * 2000)
    root = tmp_path / "out"
    settings = [f"data.path={tmp_path / 'text'}", f"output.root={root}"]
    folders = {}
    for time, name, layers in (("10-00-00", "a", 2), ("11-00-00", "b", 4)):
        config = load_config([*settings, f"name={name}", f"model.layers={layers}"])
        begun = SessionConfig.of(config, arguments={"config": config.to_plain()})
        folders[name] = past_run(root, time, begun)
    whole = lambda run: checkpoints.Checkpoint(run, genesis("run", 2), {"pp": 1})  # noqa: E731
    monkeypatch.setattr(checkpoints, "checkpoint_of", whole)
    asked: list[Any] = []
    monkeypatch.setattr(helixrt, "run", lambda function, **settings: asked.append(settings))

    for name, layers in (("a", 2), ("b", 4)):
        again = load_config([*settings, "resume=true", f"name={name}", f"model.layers={layers}"])
        assert train(again) == 0
        assert (asked[-1]["name"], asked[-1]["resume"]) == (name, folders[name])
    with pytest.raises(ConfigError, match="^resume=true: no complete checkpoint in any run named c under"):
        validate(load_config([*settings, "resume=true", "name=c"]))
