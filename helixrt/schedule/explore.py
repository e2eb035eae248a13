"""A schedule to play with in a notebook: sliders that plan, simulate and redraw the timeline.

In: the explorer's controls (or a `Setting` from code). Out: a widget for Jupyter (ipywidgets, extra `notebooks`), and
`draw`, the picture of a setting as SVG, which needs no widget. On pages that run no widgets, such as a code host, the
picture alone is shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from helixrt.errors import ConfigError, MissingExtra
from helixrt.schedule.costs import Costs, uniform, with_delays
from helixrt.schedule.exchange import svg
from helixrt.schedule.generators.policies import POLICIES, build, costs_for
from helixrt.schedule.ir import Schedule, folded
from helixrt.schedule.planner.bounds import lower_bound
from helixrt.schedule.planner.plan import plan
from helixrt.schedule.simulate import DELEGATED, Direct, simulate
from helixrt.schedule.timeline import Timeline

TWO_CHUNKS = "helix, two chunks"
CHOICES = (*POLICIES, TWO_CHUNKS)
LARGEST_CAP = 32  # the memory slider's last step before "no cap"


@dataclass(frozen=True)
class Setting:
    """What the explorer shows: a policy's schedule for equal stages, and the one link that is slow.

    `delay_ms` holds both ways on link `link`, between stages `link` and `link + 1`. A schedule that is not
    `planned_for_delay` is planned without the delay and simulated with it, as when a link slows down during training.
    `memory` caps every stage, in micro-batches' activations held from F to W; policies that do not plan ignore it.
    """

    policy: str = "helix"
    stages: int = 4
    microbatches: int = 12
    forward_ms: float = 10.0
    backward_ms: float = 10.0
    weight_ms: float = 10.0
    link: int = 0
    delay_ms: float = 0.0
    memory: float = math.inf
    planned_for_delay: bool = True
    direct: bool = False


def timeline(setting: Setting) -> Timeline:
    """What the setting's schedule does under its delay. Raises ConfigError for a setting that cannot be."""
    if setting.policy not in CHOICES:
        raise ConfigError("policy", setting.policy, f"must be one of {', '.join(CHOICES)}")
    if setting.stages < 1:
        raise ConfigError("stages", setting.stages, "must be at least 1")
    planned = uniform(setting.stages, setting.forward_ms, setting.backward_ms, setting.weight_ms, setting.memory)
    met = planned
    if setting.delay_ms:
        here, there = setting.link, setting.link + 1
        met = with_delays(planned, {(here, there): setting.delay_ms, (there, here): setting.delay_ms})
    schedule, costs = _scheduled(setting, met if setting.planned_for_delay else planned, met)
    return simulate(schedule, costs, Direct() if setting.direct else DELEGATED)


def draw(setting: Setting, width: float | None = None) -> str:
    """The setting's timeline as SVG text, `width` pixels wide. Raises ConfigError for a setting that cannot be."""
    return _picture(setting, timeline(setting), width)


def _picture(setting: Setting, timed: Timeline, width: float | None) -> str:
    title = f"{setting.policy}: {setting.stages} stages, {setting.microbatches} micro-batches"
    return svg.write(timed, lower_bound(timed.costs, setting.microbatches), title, width=width)


def _scheduled(setting: Setting, planned: Costs, met: Costs) -> tuple[Schedule, Costs]:
    """The schedule made under `planned`, and the costs `met` in its placement."""
    if setting.policy == TWO_CHUNKS:
        placement = folded(setting.stages)
        return plan(planned.split(placement), setting.microbatches).schedule, met.split(placement)
    return build(setting.policy, planned, setting.microbatches), costs_for(setting.policy, met)


class Explorer:
    """Controls above a timeline; shown by a notebook when it is the value of a cell.

    `setting` is what is shown; setting it moves the controls. `timeline` and `picture`, the SVG, are of that
    setting; a setting that cannot be is answered with its one line in place of the picture (they are None and empty).
    Raises MissingExtra without ipywidgets.
    """

    def __init__(self, setting: Setting | None = None, width: float | None = 1000.0) -> None:
        try:
            import ipywidgets
        except ImportError:
            raise MissingExtra("ipywidgets", "notebooks", "the schedule explorer") from None
        label = {"style": {"description_width": "104px"}, "layout": {"width": "340px"}}
        late: Any = {"continuous_update": False, **label}
        caps = [*((str(n), float(n)) for n in range(1, LARGEST_CAP + 1)), ("no cap", math.inf)]
        self._controls: dict[str, Any] = {
            "policy": ipywidgets.Dropdown(options=CHOICES, description="policy", **label),
            "stages": ipywidgets.IntSlider(min=2, max=12, description="stages", **late),
            "microbatches": ipywidgets.IntSlider(min=1, max=48, description="micro-batches", **late),
            "link": ipywidgets.IntSlider(min=0, max=10, description="slow link", **late),
            "delay_ms": ipywidgets.FloatSlider(min=0, max=60, step=1, readout_format=".0f", description="delay, ms", **late),
            "memory": ipywidgets.SelectionSlider(options=caps, description="memory cap", **late),
            "planned_for_delay": ipywidgets.ToggleButtons(
                options=[("planned for the delay", True), ("hit by the delay", False)], style={"button_width": "166px"}
            ),
            "direct": ipywidgets.ToggleButtons(
                options=[("delegated sends", False), ("direct sends", True)], style={"button_width": "166px"}
            ),
        }
        self.timeline: Timeline | None = None
        self.picture = ""
        self._width = width
        self._shown = ipywidgets.HTML()
        self._moving = False
        self.setting = setting or Setting()
        for control in self._controls.values():
            control.observe(self._changed, names="value")
        names = (("policy", "link"), ("stages", "delay_ms"), ("microbatches", "memory"), ("planned_for_delay", "direct"))
        rows = [ipywidgets.HBox([self._controls[name] for name in row]) for row in names]
        self.widget = ipywidgets.VBox([*rows, self._shown])

    @property
    def setting(self) -> Setting:
        return self._setting

    @setting.setter
    def setting(self, setting: Setting) -> None:
        self._setting = setting
        self._moving = True
        try:
            self._controls["link"].max = max(setting.stages - 2, 0)
            for name, control in self._controls.items():
                control.value = getattr(setting, name)
        finally:
            self._moving = False
        self._draw()

    def _changed(self, change: Any) -> None:
        """A control was moved by hand. The slow link stays inside the pipeline."""
        if self._moving:
            return
        moved = replace(self._setting, **{name: control.value for name, control in self._controls.items()})
        self.setting = replace(moved, link=min(moved.link, moved.stages - 2))

    def _draw(self) -> None:
        try:
            self.timeline = timeline(self._setting)
            self.picture = _picture(self._setting, self.timeline, self._width)
            self._shown.value = self.picture.replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)
        except ConfigError as error:
            self.timeline, self.picture = None, ""
            self._shown.value = f"<pre>{escape(str(error))}</pre>"

    def _repr_mimebundle_(
        self, include: Collection[str] | None = None, exclude: Collection[str] | None = None
    ) -> dict[str, Any]:
        """The widget where widgets run, else the picture, else a line of text."""
        shown = self.widget._repr_mimebundle_(include=include, exclude=exclude)
        picture = {"image/svg+xml": self.picture} if self.picture else {}
        return {**shown, **picture, "text/plain": f"Explorer({self._setting})"}
