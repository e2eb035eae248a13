"""The report of `explain()`: whether a model is captured and woven, its operators, and which compute hides which messages.

In: the graphs of a stage and how they were planned. Out: an `Explanation`; printed, it is a report (`explanation_text`);
`to_dict` is the same as plain data (`explanation_json`), `picture` draws both strands (`picture`), and `save` writes any
of these to a file. Predicted times are for one backward woven with one forward.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from helixrt.compile.options import Options
from helixrt.compile.shapes import Picture, png, svg
from helixrt.errors import ConfigError
from helixrt.passes import nodes
from helixrt.passes.baselines import sequential
from helixrt.passes.classify import classify, strand
from helixrt.passes.estimate import Supposed
from helixrt.passes.flat import lying_in, usage
from helixrt.passes.groups import Group
from helixrt.passes.parts import Part, Stamp
from helixrt.passes.profile import Mode, device_of, profile
from helixrt.passes.timing import BACKWARD, FORWARD, Timing, simulate
from helixrt.pipeline.strands import Plan, Strands

FORMS = ("txt", "json", "svg", "png")


@dataclass(frozen=True)
class Explanation:
    """`state` is "woven", "single strand", "fallback" (see `reason`), or a text if nothing was captured yet.

    `counts` has the operators of each graph by kind. `plan` has the operators with their times, the order, the pairs and
    the predicted times; its pairing is None for a model that does not communicate. `measured_ms` are medians of each
    graph's latest runs (on processors; a GPU's graphs are not timed). Memory is what the model's tensors
    need besides parameters, gradients and inputs, at most, of one strand and of two. `code` is each graph as Python;
    `modules` has, for each graph's operators, the module that they come from. `supposed` are groups that were planned for
    without being there, by name (`plan_ahead`); times of communication in them are estimates.
    """

    state: str
    reason: str = ""
    seconds: float = 0.0
    stamps: tuple[Stamp, ...] = ()
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    plan: Plan | None = None
    measured_ms: dict[str, float] = field(default_factory=dict)
    single_peak_bytes: int = 0
    woven_peak_bytes: int = 0
    code: dict[str, str] = field(default_factory=dict)
    modules: dict[str, dict[str, str]] = field(default_factory=dict)
    supposed: dict[str, Supposed] = field(default_factory=dict)

    def __str__(self) -> str:
        from helixrt.compile.explanation_text import lines

        return "\n".join(lines(self))

    def timings(self) -> tuple[Timing, Timing] | None:
        """Predicted: the strands one after the other, and as planned; None where operators have no times."""
        plan = self.plan
        if plan is None or plan.profile is None:
            return None
        strands, overlap = (plan.forward, plan.backward), plan.profile.overlap
        before = simulate(strands, sequential(*strands), overlap)
        return before, plan.pairing.timing if plan.pairing is not None else simulate(strands, plan.order, overlap)

    def to_dict(self) -> dict[str, Any]:
        """As plain data; the keys are those of `explanation_json`."""
        from helixrt.compile.explanation_json import plain

        return plain(self)

    def picture(self, title: str = "two strands", wide: float | None = None) -> Picture:
        """Both strands in time, `wide` pixels wide if that is given. Raises ConfigError where there is nothing to draw."""
        from helixrt.compile.picture import drawn

        return drawn(self, title, wide)

    def save(self, path: Path | str, title: str = "two strands") -> None:
        """Write a text, JSON or a picture, as the name ends: `FORMS`. Raises ConfigError for other endings."""
        file = Path(path)
        form = file.suffix[1:]
        if form not in FORMS:
            raise ConfigError("path", path, f"must end in one of {', '.join('.' + each for each in FORMS)}")
        file.write_bytes(self.written(form, title))

    def written(self, form: str, title: str = "two strands") -> bytes:
        """The bytes of a file of one of `FORMS`."""
        if form == "png":
            return png(self.picture(title))
        if form == "svg":
            return svg(self.picture(title)).encode()
        return ((json.dumps(self.to_dict(), indent=1) if form == "json" else str(self)) + "\n").encode()


def explained(
    strands: Strands, seconds: float, options: Options, supposed: Mapping[str, Supposed] | None = None
) -> Explanation:
    """The explanation of graphs that are in use, or planned for groups that are `supposed`."""
    forward, backward = strands.forward.part, strands.backward.part
    parts = {"forward": forward, "backward": backward}
    if strands.woven is not None:
        parts["woven"] = strands.woven.part
    single, woven = peaks(forward, backward, strands.plan)
    reason = ""
    if strands.woven is None:
        reason = "strands=1" if options.strands == 1 else "microbatches=1: nothing to weave with"
    return Explanation(
        state="single strand" if strands.woven is None else "woven",
        reason=reason,
        seconds=seconds,
        stamps=parts["woven"].stamps if strands.woven else backward.stamps,
        counts=counted(parts, strands.plan),
        plan=strands.plan,
        measured_ms=measured(strands),
        single_peak_bytes=single,
        woven_peak_bytes=woven,
        code={name: part.code() for name, part in parts.items()},
        modules={name: {node.name: nodes.origin(node).module for node in strand(part)} for name, part in parts.items()},
        supposed=dict(supposed or {}),
    )


def with_times(strands: Strands, mode: Mode | str = Mode.AUTO) -> Strands:
    """Strands that are woven without a profile, since nothing communicates, with times of their operators."""
    plan = strands.plan
    if plan is None or plan.profile is not None:
        return strands
    parts = strands.forward.part, strands.backward.part
    measured = profile(parts, mode=mode, supposed={})
    forward, backward = (tuple(measured.operators(part)) for part in parts)
    return replace(strands, plan=replace(plan, profile=measured, forward=forward, backward=backward))


def counted(parts: Mapping[str, Part], plan: Plan | None) -> dict[str, dict[str, int]]:
    """How many operators there are of each kind in each graph; as the plan sees them, where it does."""
    listed = {name: [str(kind) for kind in classify(part, _AnyGroup()).values()] for name, part in parts.items()}
    if plan is not None and plan.profile is not None:
        for name, operators in (("forward", plan.forward), ("backward", plan.backward)):
            listed[name] = [str(operator.kind) for operator in operators]
        listed["woven"] = listed["forward"] + listed["backward"]
    return {name: dict(Counter(kinds)) for name, kinds in listed.items()}


def measured(strands: Strands) -> dict[str, float]:
    """Median time of each graph's latest runs."""
    graphs = {"forward": strands.forward, "backward": strands.backward, "woven": strands.woven}
    if device_of([strands.forward.part]).type != "cpu":
        return {}
    return {name: 1e3 * statistics.median(graph.took_s) for name, graph in graphs.items() if graph and graph.took_s}


def peaks(forward: Part, backward: Part, plan: Plan | None) -> tuple[int, int]:
    """The most alive at a time, one strand after the other and in the planned order, in bytes."""
    memory = lying_in(forward)
    apart = [usage(forward, range(len(strand(forward)))), usage(backward, range(len(strand(backward))), memory)]
    single = max(each.peak for each in apart)
    if plan is None:
        return single, single
    orders = [[index for which, index in plan.order if which == wanted] for wanted in (FORWARD, BACKWARD)]
    both = usage(forward, orders[FORWARD]), usage(backward, orders[BACKWARD], memory)
    at, most = [0, 0], both[FORWARD].before[0] + both[BACKWARD].before[0]
    for which, _ in plan.order:
        most = max(most, both[which].during[at[which]] + both[1 - which].before[at[1 - which]])
        at[which] += 1
    return single, most


class _AnyGroup(dict[str, Group]):
    """Takes every group to be on one host: counting needs no exchange among ranks."""

    def __contains__(self, key: object) -> bool:
        return True

    def __missing__(self, key: str) -> Group:
        return Group((1,))
