"""The notebooks' explorer: controls and setting follow each other, and the picture follows both."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from helixrt.errors import ConfigError
from helixrt.schedule.explore import CHOICES, Explorer, Setting, draw


def makespan_ms(picture: str) -> float:
    found = re.search(r"makespan ([\d.]+) ms", picture)
    assert found
    return float(found[1])


def control(explorer: Explorer, description: str) -> Any:
    (found,) = (c for row in explorer.widget.children[:-1] for c in row.children if c.description == description)
    return found


def test_the_picture_is_of_the_setting() -> None:
    hit = Setting(policy="zb", planned_for_delay=False)
    assert [makespan_ms(draw(replace(hit, delay_ms=delay))) for delay in (0, 10, 20)] == [390, 400, 440]
    assert makespan_ms(draw(Setting(delay_ms=20))) == 410
    hit = replace(hit, delay_ms=20)
    assert makespan_ms(draw(replace(hit, direct=True))) > makespan_ms(draw(hit))


@pytest.mark.parametrize("policy", CHOICES)
def test_every_policy_is_drawn_at_the_ends_of_the_sliders(policy: str) -> None:
    for stages, microbatches in ((2, 1), (4, 3)):
        setting = Setting(policy=policy, stages=stages, microbatches=microbatches, link=stages - 2, delay_ms=60, memory=1)
        assert f"{stages} stages, {microbatches} micro-batches" in draw(setting)


def test_moved_controls_redraw() -> None:
    pytest.importorskip("ipywidgets", reason="ipywidgets is missing: pip install 'helixrt[notebooks]'")
    explorer = Explorer(Setting(policy="zb", planned_for_delay=False))
    assert makespan_ms(explorer.picture) == 390
    control(explorer, "delay, ms").value = 20
    assert explorer.setting.delay_ms == 20 and makespan_ms(explorer.picture) == 440
    control(explorer, "stages").value = 8
    control(explorer, "slow link").value = 6
    control(explorer, "stages").value = 3
    assert explorer.setting == Setting(policy="zb", planned_for_delay=False, delay_ms=20, stages=3, link=1)
    assert control(explorer, "slow link").value == 1
    assert explorer.timeline is not None and explorer.timeline.makespan_ms == makespan_ms(explorer.picture)
    assert explorer.picture.partition("<svg ")[2] in explorer.widget.children[-1].value
    explorer.setting = Setting(stages=6, memory=4.0)
    assert control(explorer, "stages").value == 6 and control(explorer, "memory cap").value == 4.0
    assert explorer._repr_mimebundle_()["image/svg+xml"] == explorer.picture
    explorer.setting = Setting(stages=0)
    assert "stages=0: must be at least 1" in explorer.widget.children[-1].value
    assert explorer.timeline is None and "image/svg+xml" not in explorer._repr_mimebundle_()


def test_a_setting_that_cannot_be_is_one_line() -> None:
    with pytest.raises(ConfigError, match="policy=2f2b: must be one of gpipe"):
        draw(Setting(policy="2f2b"))
    with pytest.raises(ConfigError):
        draw(Setting(stages=0))
