"""A timeline as a self-contained SVG picture.

Out: one row per stage with its operations and micro-batch numbers (further chunks of a stage in lighter shades,
overlapped pairs as two halves), idle time tinted by cause, messages over slow links as thin lines, optionally a strip of
memory over time, and a time axis in ms. Every box shows its figures under the mouse pointer. Colours are distinguished by the
colour-blind (after Okabe and Ito, "Color Universal Design") and by lightness; text is dark on light.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape

from helixrt.schedule.exchange.as_json import gap
from helixrt.schedule.ir import Op, operations_of
from helixrt.schedule.timeline import Cause, Message, Timeline

FILLS = {Op.F: (124, 189, 236), Op.B: (245, 178, 78), Op.W: (140, 212, 168), Op.BW: (228, 160, 196)}
NAMES = {Op.F: "forward", Op.B: "backward, inputs", Op.W: "backward, weights", Op.BW: "whole backward"}
INK, FAINT, _EDGE = "#1b2430", "#5b6673", "#ffffff"
_CAUSES = {
    Cause.WARM_UP: "#eef1f5",
    Cause.DEPENDENCY: "url(#dependency)",
    Cause.BLOCKING: "url(#blocking)",
    Cause.COOL_DOWN: "#eef1f5",
}
_CAUSE_NAMES = {
    Cause.WARM_UP: "warm-up and cool-down",
    Cause.DEPENDENCY: "waits for input",
    Cause.BLOCKING: str(Cause.BLOCKING),
}
MESSAGE = {Op.F: "#1f5f99", Op.B: "#a3480a", Op.BW: "#a3480a"}
_ROW, _GAP, _STRIP = 30.0, 18.0, 14.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 82.0, 16.0, 78.0, 40.0
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
_CHARACTER = 0.56  # width of a digit, in font sizes

PATTERNS = """<defs>
<pattern id="dependency" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="7" height="7" fill="#fbeceb"/><rect width="2" height="7" fill="#e9b3ad"/></pattern>
<pattern id="blocking" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<rect width="7" height="7" fill="#ece6f5"/><rect width="3" height="7" fill="#8a6fb8"/></pattern>
</defs>"""


def write(
    timeline: Timeline,
    lower_bound_ms: float | None = None,
    title: str | None = None,
    memory: bool = True,
    width: float | None = None,
) -> str:
    """The picture as SVG text, `width` pixels wide (by default as wide as its labels need, 1100 to 2400).

    `lower_bound_ms`, if given, is printed and marked; `memory` adds the strips below the stages.
    """
    drawing = _Drawing(timeline, memory, _fitting_width(timeline) if width is None else width)
    return "\n".join(drawing.lines(lower_bound_ms, title)) + "\n"


def _fitting_width(timeline: Timeline) -> float:
    durations = sorted(span.end_ms - span.start_ms for spans in timeline.spans for span in spans)
    typical = durations[len(durations) // 4] if durations else 0.0
    wanted = timeline.makespan_ms / typical * 20.0 if typical > 0 else 0.0
    return min(max(wanted + _LEFT + _RIGHT, 1100.0), 2400.0)


def number(value: float) -> str:
    """A figure for people: at most four significant digits, or whole when larger."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def tick_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 5 times a power of ten that needs at most `most` steps to cover `span`."""
    if span <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(power * factor for factor in (1, 2, 5, 10, 20) if span / (power * factor) <= most)


class _Drawing:
    """Positions of one picture: x from time, y from stage."""

    def __init__(self, timeline: Timeline, memory: bool, width: float) -> None:
        self.timeline, self.schedule = timeline, timeline.schedule
        self.peaks = timeline.peak_memory
        self.memory = memory and any(held for steps in timeline.memory for _, held in steps)
        self.right = _RIGHT + (max(len(self.peak(s)) for s in range(self.schedule.stages)) * 6.2 if self.memory else 0.0)
        self.width = width
        self.scale = (width - _LEFT - self.right) / (timeline.makespan_ms or 1.0)
        self.pitch = _ROW + _GAP + (_STRIP + 2.0 if self.memory else 0.0)
        self.foot = _TOP + self.schedule.stages * self.pitch
        self.height = self.foot + _BOTTOM

    def x(self, at_ms: float) -> float:
        return _LEFT + at_ms * self.scale

    def y(self, stage: int) -> float:
        return _TOP + stage * self.pitch

    def lines(self, lower_bound_ms: float | None, title: str | None) -> Iterator[str]:
        width, height = f"{self.width:.0f}", f"{self.height:.0f}"
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="{FONT}" fill="{INK}" role="img">'
        )
        yield PATTERNS
        yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        yield from self.heading(lower_bound_ms, title)
        yield from self.axis(lower_bound_ms)
        for stage in range(self.schedule.stages):
            yield from self.idle(stage)
            if self.memory:
                yield from self.strip(stage)
        for message in self.timeline.messages:
            yield from self.message(message)
        for stage in range(self.schedule.stages):
            yield from self.stage(stage)
        yield "</svg>"

    def heading(self, lower_bound_ms: float | None, title: str | None) -> Iterator[str]:
        timeline, schedule = self.timeline, self.schedule
        title = title or f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} micro-batches"
        facts = [f"makespan {number(timeline.makespan_ms)} ms", f"idle {timeline.bubble_rate:.1%}"]
        if lower_bound_ms is not None:
            over = gap(timeline.makespan_ms, lower_bound_ms)
            facts.insert(1, f"proven bound {number(lower_bound_ms)} ms (gap {over:.2%})")
        yield f"<title>{escape(title)}, {escape(', '.join(facts))}</title>"
        yield words(_LEFT, 24, title, 16, weight=600)
        yield words(_LEFT, 43, " · ".join(facts), 12.5, fill=FAINT)
        x = _LEFT
        used = {o.op for stage in range(schedule.stages) for o in schedule.operations(stage)}
        causes = {bubble.cause for bubbles in timeline.bubbles for bubble in bubbles}
        causes = {Cause.WARM_UP if cause is Cause.COOL_DOWN else cause for cause in causes}
        legend = [(_fill(op, 0, 1), NAMES[op]) for op in Op if op in used]
        legend += [(_CAUSES[cause], _CAUSE_NAMES[cause]) for cause in Cause if cause in causes]
        for fill, name in legend:
            yield f'<rect x="{x:.1f}" y="53" width="14" height="11" rx="2" fill="{fill}" stroke="#b8c0ca" stroke-width=".6"/>'
            yield words(x + 19, 62.5, name, 11.5)
            x += 19 + len(name) * 6.4 + 18

    def axis(self, lower_bound_ms: float | None) -> Iterator[str]:
        makespan = self.timeline.makespan_ms
        step = tick_step(makespan, max(2, int((self.width - _LEFT - self.right) / 70)))
        top, foot = _TOP - 6, self.foot - _GAP + 6
        count = int(makespan / step + 1e-9) if makespan else 0
        for tick in range(count + 1):
            x = self.x(tick * step)
            yield f'<path d="M{x:.1f} {top:.1f}V{foot:.1f}" stroke="#e3e7ec" stroke-width="1"/>'
            yield words(x, foot + 15, number(tick * step), 11, fill=FAINT, anchor="middle")
        yield words(_LEFT - 10, foot + 15, "ms", 11, fill=FAINT, anchor="end")
        ends = [(makespan, INK, "makespan")]
        if lower_bound_ms is not None and lower_bound_ms < makespan * (1 - 1e-9):
            ends.append((lower_bound_ms, "#0b6e4f", "proven bound"))
        for at_ms, colour, what in ends:
            x = self.x(at_ms)
            yield (
                f'<path d="M{x:.1f} {top:.1f}V{foot:.1f}" stroke="{colour}" stroke-width="1.2" stroke-dasharray="4 3">'
                f"<title>{what} {at_ms:g} ms</title></path>"
            )

    def idle(self, stage: int) -> Iterator[str]:
        y = self.y(stage)
        yield words(_LEFT - 10, y + _ROW / 2 + 4.5, f"stage {stage}", 12.5, anchor="end", weight=600)
        for bubble in self.timeline.bubbles[stage]:
            waits = f", {self.schedule.label(bubble.waiting)} waits" if bubble.waiting is not None else ""
            hint = f"{bubble.cause.value}{waits}: {bubble.start_ms:g} to {bubble.end_ms:g} ms"
            yield self.box(bubble.start_ms, bubble.end_ms, y, _ROW, _CAUSES[bubble.cause], hint, "none")
        yield from self.delays(stage)

    def delays(self, stage: int) -> Iterator[str]:
        """What the links to the next stage cost, written between the two rows."""
        if stage + 1 == self.schedule.stages:
            return
        down, up = self.timeline.costs.link(stage, stage + 1), self.timeline.costs.link(stage + 1, stage)
        # Few digits: more than that does not fit beside the rows.
        both_ms = (down.delay_ms + down.wire_ms, up.delay_ms + up.wire_ms)
        shown = [f"{ms:.0f}" if ms >= 10 else f"{ms:.{2 if ms >= 1 else 1}g}" for ms in both_ms]
        times = [(shown[0], "↕")] if shown[0] == shown[1] else list(zip(shown, "↓↑", strict=True))
        text = " ".join(arrow + ms for ms, arrow in times if ms != "0")
        if text:
            y = self.y(stage + 1) - _GAP / 2 + 4
            yield words(_LEFT - 10, y, f"{text} ms", 10.5, anchor="end", fill=MESSAGE[Op.B])

    def message(self, message: Message) -> Iterator[str]:
        if message.arrive_ms <= message.ready_ms:
            return  # over a free link: the boxes say it all
        down = message.target > message.source
        edge = self.y(message.source) + (_ROW if down else 0.0)
        end = self.y(message.target) + (0.0 if down else _ROW)
        start = edge + (2.5 if down else -2.5)  # waits in a queue beside its row before it goes
        path = f"M{self.x(message.ready_ms):.1f} {edge:.1f}V{start:.1f}H{self.x(message.begin_ms):.1f}"
        path += f"L{self.x(message.arrive_ms):.1f} {end:.1f}"
        faint = "" if abs(message.target - message.source) == 1 else ' stroke-dasharray="1 4"'
        colour = MESSAGE[message.operation.op]
        hint = f"{self.schedule.label(message.operation)} from stage {message.source} to {message.target}: "
        hint += f"ready {message.ready_ms:g}, sent {message.begin_ms:g}, there {message.arrive_ms:g} ms"
        yield (
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1" opacity=".6"{faint}>'
            f"<title>{escape(hint)}</title></path>"
        )

    def stage(self, stage: int) -> Iterator[str]:
        y = self.y(stage)
        for span in self.timeline.spans[stage]:
            hint = f"{self.schedule.label(span.entry)}, stage {stage}: {span.start_ms:g} to {span.end_ms:g} ms"
            parts = operations_of(span.entry)
            height = _ROW / len(parts)
            for at, operation in enumerate(parts):
                chunks = self.schedule.held[stage]
                fill = _fill(operation.op, chunks.index(operation.chunk), len(chunks))
                yield self.box(span.start_ms, span.end_ms, y + at * height, height, fill, hint)
                text = str(operation.microbatch)
                room = (span.end_ms - span.start_ms) * self.scale - 1.5
                size = min(12.0 if len(parts) == 1 else 10.5, room / (len(text) * _CHARACTER))
                if size >= 5.5:
                    middle = self.x((span.start_ms + span.end_ms) / 2)
                    yield words(middle, y + (at + 0.5) * height + size * 0.36, text, size, anchor="middle")

    def strip(self, stage: int) -> Iterator[str]:
        """Memory over time under the row, against the stage's cap, or the greatest peak where there is none."""
        y = self.y(stage) + _ROW + 2.0
        cap = self.timeline.costs.memory[stage]
        top = cap if math.isfinite(cap) else max(self.peaks)
        floor = y + _STRIP
        path = f"M{self.x(0):.1f} {floor:.1f}"
        for at_ms, held in dict(self.timeline.memory[stage]).items():  # the last of several steps at one time
            path += f"H{self.x(at_ms):.1f}V{floor - _STRIP * min(held / (top or 1.0), 1.0):.1f}"
        path += f"H{self.x(self.timeline.makespan_ms):.1f}V{floor:.1f}Z"
        yield f'<path d="{path}" fill="#d5dbe4" stroke="#8391a3" stroke-width=".7"/>'
        yield words(self.x(self.timeline.makespan_ms) + 8, floor - 2.5, self.peak(stage), 11, fill=FAINT)

    def peak(self, stage: int) -> str:
        """What the stage holds at most, in words."""
        cap = self.timeline.costs.memory[stage]
        of = f" of {number(cap)}" if math.isfinite(cap) else ""
        return f"peak {number(self.peaks[stage])}{of}"

    def box(self, start_ms: float, end_ms: float, y: float, height: float, fill: str, hint: str, edge: str = _EDGE) -> str:
        x = self.x(start_ms)
        wide = max((end_ms - start_ms) * self.scale, 0.2)
        stroke = min(1.0, wide / 6)
        line = f' stroke="{edge}" stroke-width="{stroke:.2f}"' if edge != "none" else ""
        return (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{height:.1f}" fill="{fill}"{line}>'
            f"<title>{escape(hint)}</title></rect>"
        )


def _fill(op: Op, nth: int, chunks: int) -> str:
    """The operation's colour, the lighter the later the chunk is among the stage's."""
    paler = 0.0 if chunks < 2 else 0.62 * nth / (chunks - 1)
    return "#" + "".join(f"{round(value + (255 - value) * paler):02x}" for value in FILLS[op])


def words(x: float, y: float, text: str, size: float, anchor: str = "start", weight: int = 400, fill: str = INK) -> str:
    """Text as SVG, `y` its base line; `anchor` is start, middle or end."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.1f}" text-anchor="{anchor}" font-weight="{weight}" '
        f'fill="{fill}" pointer-events="none">{escape(text)}</text>'
    )
