"""The picture of two strands, one after the other and woven (DHelix, Figures 10 and 16).

In: an `Explanation` whose operators have times. Out: a `Picture`. Above, the backward of one micro-batch and then the
forward of the next; below, both woven, on the same scale. Both strands run on the one processor, each has a row of its
own there; communication inside the node and between nodes has a lane each. What stands above a message at the same
time hides it; where the processor waits for one, it is hatched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from helixrt.compile.shapes import Box, Line, Picture, Shape, Words
from helixrt.errors import ConfigError
from helixrt.passes.operators import COMMUNICATION, Kind, Operator
from helixrt.passes.timing import BACKWARD, FORWARD, LANES, Place, Span, Timing
from helixrt.pipeline.strands import Plan
from helixrt.schedule.exchange.svg import FAINT, FILLS, MESSAGE, number, tick_step
from helixrt.schedule.ir import Op

if TYPE_CHECKING:
    from helixrt.compile.explanation import Explanation

LEFT, RIGHT, TOP, FOOT = 186.0, 24.0, 80.0, 30.0
EDGE, LINE = 20.0, 18.0  # where headings begin; their pitch
ROW, TOUCHING, APART, BETWEEN = 26.0, 3.0, 8.0, 74.0  # rows; gaps of strands, of lanes, of the two halves
NARROWEST, WIDEST = 1100.0, 1800.0
ROOM = 20.0  # pixels for an operator that is longer than three quarters of them
LETTER = 0.56  # width of a character, in font sizes
LARGEST, SMALLEST = 11.5, 7.0
LIGHT = "#ffffff"
STRANDS = {FORWARD: "forward", BACKWARD: "backward"}
LANE_NAMES = {Kind.INTRA: "inside the node", Kind.INTER: "between nodes"}
TALK = {FORWARD: MESSAGE[Op.F], BACKWARD: MESSAGE[Op.B]}
SHORT = {
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "all_reduce": "all-reduce",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "all-to-all",
}


@dataclass(frozen=True)
class Half:
    """One of the two timelines and where it is."""

    name: str
    timing: Timing
    top: float


def drawn(explanation: Explanation, title: str, wide: float | None = None) -> Picture:
    """The picture, `wide` pixels wide (by default as its operators need). ConfigError where operators have no times."""
    timings, plan = explanation.timings(), explanation.plan
    if timings is None or plan is None:
        raise ConfigError("picture", explanation.state, "needs two strands whose operators were profiled")
    return Drawing(plan, explanation, timings, wide).picture(title)


class Drawing:
    """Positions: x from time, y from strand and lane."""

    def __init__(self, plan: Plan, explanation: Explanation, timings: tuple[Timing, Timing], wide: float | None = None) -> None:
        self.plan, self.explanation = plan, explanation
        self.strands = {FORWARD: plan.forward, BACKWARD: plan.backward}
        used = {operator.kind for listed in self.strands.values() for operator in listed}
        self.lanes = [lane for lane in LANES if lane in used]
        self.total_us = max(timing.total_us for timing in timings) or 1.0
        spans = [span for span in timings[0].processor if span.kind is Kind.COMPUTE]
        lengths = sorted((span.length_us for span in spans), reverse=True)
        typical = lengths[len(lengths) // 4] if lengths else 0.0
        wanted = self.total_us / typical * ROOM if typical else 0.0
        self.wide = wide or min(max(wanted + LEFT + RIGHT, NARROWEST), WIDEST)
        self.scale = (self.wide - LEFT - RIGHT) / self.total_us
        self.tall = 2 * ROW + TOUCHING + len(self.lanes) * (ROW + APART)
        self.timings = timings
        self.told = self.lines(self.facts(), 12.5)
        self.top = TOP + (len(self.told) - 1) * LINE
        names = ("one after the other", "woven")
        self.halves = [
            Half(name, timing, self.top + 40.0 + at * (self.tall + BETWEEN))
            for at, (name, timing) in enumerate(zip(names, timings, strict=True))
        ]
        self.high = self.halves[-1].top + self.tall + FOOT

    def picture(self, title: str) -> Picture:
        shapes = [*self.heading(title), *self.legend()]
        for half in self.halves:
            shapes += [*self.rows(half), *self.axis(half), *self.spans(half)]
        return Picture(self.wide, self.high, f"{title}: {'; '.join(self.facts())}", tuple(shapes))

    def x(self, at_us: float) -> float:
        return LEFT + at_us * self.scale

    def row(self, half: Half, strand: int) -> float:
        """Where a strand's row of the processor begins, backward above forward."""
        return half.top + (0.0 if strand == BACKWARD else ROW + TOUCHING)

    def lane(self, half: Half, kind: Kind) -> float:
        return half.top + 2 * ROW + TOUCHING + APART + self.lanes.index(kind) * (ROW + APART)

    def heading(self, title: str) -> Iterator[Shape]:
        yield Words(EDGE, 26, title, 16, bold=True)
        for at, line in enumerate(self.told):
            yield Words(EDGE, 46 + at * LINE, line, 12.5, colour=FAINT)

    def lines(self, parts: list[str], size: float) -> list[str]:
        """Parts put together on as few lines as they need."""
        found = [parts[0]]
        for part in parts[1:]:
            longer = f"{found[-1]} · {part}"
            fits = len(longer) * size * LETTER <= self.wide - 2 * EDGE
            found[-1:] = [longer] if fits else [found[-1], part]
        return found

    def facts(self) -> list[str]:
        pairing = self.plan.pairing
        if pairing is None:
            return [f"{millis(self.timings[1].total_us)} of compute", "no communication, nothing to hide"]
        hidden = pairing.hidden_us / pairing.communication_us if pairing.communication_us else 1.0
        found = [
            f"predicted {millis(pairing.predicted_us)} woven, {millis(pairing.sequential_us)} one after the other, "
            f"{millis(pairing.bound_us)} at least",
            f"{hidden:.0%} of {millis(pairing.communication_us)} of communication hidden",
        ]
        took = self.explanation.measured_ms
        if took.keys() >= {"forward", "backward", "woven"}:
            apart = took["forward"] + took["backward"]
            found.append(f"measured {number(took['woven'])} ms woven, {number(apart)} ms one after the other")
        if self.explanation.supposed:
            found.append("communication is an estimate")
        return found

    def legend(self) -> Iterator[Shape]:
        listed = [(colour(Op.F), "forward"), (colour(Op.B), "backward, inputs"), (colour(Op.W), "backward, weights")]
        if self.lanes:
            listed += [(TALK[BACKWARD], "messages of the backward"), (TALK[FORWARD], "messages of the forward")]
            listed += [("", "processor stands still")]
        x, y = EDGE, self.top - 8.0
        for fill, name in listed:
            yield Box(x, y - 10.0, 14, 11, fill, hatched=not fill, edge="#b8c0ca")
            yield Words(x + 19, y, name)
            x += 19 + len(name) * 6.3 + 16

    def axis(self, half: Half) -> Iterator[Shape]:
        """The half's name, its ticks in ms, and the end."""
        foot = half.top + self.tall
        step = tick_step(self.total_us / 1e3, max(2, int((self.wide - LEFT - RIGHT) / 80)))
        yield Words(LEFT, half.top - 11, f"{half.name}: {millis(half.timing.total_us)}", 12.5, bold=True)
        for tick in range(int(self.total_us / 1e3 / step + 1e-9) + 1):
            x = self.x(tick * step * 1e3)
            yield Line(x, half.top - 4, x, foot + 5, "#e3e7ec")
            yield Words(x, foot + 19, number(tick * step), 11, "middle", colour=FAINT)
        yield Words(LEFT - 12, foot + 19, "ms", 11, "end", colour=FAINT)
        end = self.x(half.timing.total_us)
        yield Line(end, half.top - 4, end, foot + 5, "#1b2430", dashed=True, wide=1.2)

    def rows(self, half: Half) -> Iterator[Shape]:
        for strand, name in STRANDS.items():
            yield Words(LEFT - 12, self.row(half, strand) + ROW / 2 + 4, f"{name} strand", 12, "end", bold=True)
        for lane in self.lanes:
            y = self.lane(half, lane)
            yield Box(LEFT, y, self.wide - LEFT - RIGHT, ROW, "#f5f7f9")
            yield Words(LEFT - 12, y + ROW / 2 + 4, f"network {LANE_NAMES[lane]}", 12, "end", bold=True)

    def spans(self, half: Half) -> Iterator[Shape]:
        for span in half.timing.processor:
            y = self.row(half, span.place[0])
            if span.kind is Kind.WAIT:
                yield self.box(span, half.top, 2 * ROW + TOUCHING, "", f"the processor stands still, {self.said(span)}", True)
            elif span.kind in COMMUNICATION:
                yield self.box(span, y, ROW, TALK[span.place[0]], f"work for {self.said(span)}")
            else:
                yield self.box(span, y, ROW, self.fill(span.place), self.said(span))
                yield from self.label(span, y, self.name(span.place), "#1b2430")
        for span in half.timing.network:
            y = self.lane(half, span.kind)
            yield self.box(span, y, ROW, TALK[span.place[0]], self.said(span))
            yield from self.label(span, y, self.name(span.place), LIGHT)

    def box(self, span: Span, y: float, high: float, fill: str, hint: str, hatched: bool = False) -> Box:
        wide = max(span.length_us * self.scale, 0.3)
        return Box(self.x(span.start_us), y, wide, high, fill, hint, hatched, edge=LIGHT if wide > 4.0 and fill else "")

    def label(self, span: Span, y: float, text: str, ink: str) -> Iterator[Shape]:
        room = span.length_us * self.scale - 4.0
        size = min(LARGEST, room / (len(text) * LETTER))
        if size >= SMALLEST:
            yield Words(self.x((span.start_us + span.end_us) / 2), y + ROW / 2 + size * 0.36, text, size, "middle", colour=ink)

    def fill(self, place: Place) -> str:
        if place[0] == FORWARD:
            return colour(Op.F)
        return colour(Op.W if self.operator(place).movable else Op.B)

    def operator(self, place: Place) -> Operator:
        return self.strands[place[0]][place[1]]

    def name(self, place: Place) -> str:
        """The module's last name where it has one, else the operator's."""
        operator = self.operator(place)
        module = self.module(place).rpartition(".")[2]
        if operator.kind is Kind.COMPUTE and module and not module.isdigit():
            return module.replace("_", " ")
        return operator_name(operator)

    def module(self, place: Place) -> str:
        return self.explanation.modules.get(STRANDS[place[0]], {}).get(self.operator(place).node, "")

    def said(self, span: Span) -> str:
        """The text that a box shows under the mouse pointer."""
        operator = self.operator(span.place)
        where = f" of {self.module(span.place)}" if self.module(span.place) else ""
        took = f"{span.start_us / 1e3:.3f} to {span.end_us / 1e3:.3f} ms"
        alone = f", alone {operator.time_us / 1e3:.3f} ms" if operator.kind is not Kind.WAIT else ""
        return f"{operator.node}{where}, {STRANDS[span.place[0]]} ({operator.kind}): {took}{alone}"


def operator_name(operator: Operator) -> str:
    """`aten._softmax(...) -> ...` as softmax."""
    name = operator.signature.partition("(")[0].removeprefix("aten.").partition(".")[0]
    if "attention" in name:
        return "attention"
    return SHORT.get(name) or name.strip("_").replace("_", " ")


def colour(op: Op) -> str:
    return "#" + "".join(f"{value:02x}" for value in FILLS[op])


def millis(time_us: float) -> str:
    return f"{number(time_us / 1e3)} ms"
