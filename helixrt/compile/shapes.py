"""Shapes: a picture as data, and what writes it, as SVG text or as PNG.

In: boxes, lines and texts with positions in pixels, later ones above earlier ones. Out: a self-contained SVG whose boxes
tell their figures when pointed at, or a PNG (matplotlib).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from helixrt.errors import MissingExtra
from helixrt.schedule.exchange.svg import FAINT, FONT, INK, words

HATCH = ("#fbeceb", "#dfa19a")  # ground and strokes
SHARPNESS = 2  # pixels of a PNG for each of the picture


@dataclass(frozen=True, slots=True)
class Box:
    """`hatched` boxes have no `fill` of their own."""

    x: float
    y: float
    wide: float
    high: float
    fill: str = ""
    hint: str = ""
    hatched: bool = False
    edge: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    x: float
    y: float
    to_x: float
    to_y: float
    colour: str = FAINT
    dashed: bool = False
    wide: float = 1.0


@dataclass(frozen=True, slots=True)
class Words:
    """`y` is the base line; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 11.5
    anchor: str = "start"
    bold: bool = False
    colour: str = INK


Shape = Box | Line | Words


@dataclass(frozen=True)
class Picture:
    """What is drawn; `title` is for those who cannot see it."""

    wide: float
    high: float
    title: str
    shapes: tuple[Shape, ...]


def svg(picture: Picture) -> str:
    """The picture as SVG text."""
    return "\n".join(_svg(picture)) + "\n"


def png(picture: Picture, sharpness: float = SHARPNESS) -> bytes:
    """The picture as PNG. Raises MissingExtra without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise MissingExtra("matplotlib", "train", "a PNG picture") from error

    points = 72 / 100  # points of a pixel at 100 pixels an inch
    figure = Figure(figsize=(picture.wide / 100, picture.high / 100), dpi=100 * sharpness, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, picture.wide), ylim=(picture.high, 0))
    axes.axis("off")
    anchors = {"start": "left", "middle": "center", "end": "right"}
    for order, shape in enumerate(picture.shapes):
        if isinstance(shape, Box):
            fill, strokes = HATCH if shape.hatched else (shape.fill, shape.edge or "none")
            axes.add_patch(
                Rectangle(
                    (shape.x, shape.y),
                    shape.wide,
                    shape.high,
                    facecolor=fill,
                    edgecolor=strokes,
                    hatch="/////" if shape.hatched else None,
                    linewidth=0.6 if shape.edge else 0.0,
                    zorder=order,
                )
            )
        elif isinstance(shape, Line):
            dashes = (0, (4, 3)) if shape.dashed else "-"
            ends = ([shape.x, shape.to_x], [shape.y, shape.to_y])
            axes.plot(*ends, color=shape.colour, linestyle=dashes, linewidth=shape.wide * points, zorder=order)
        else:
            axes.text(
                shape.x,
                shape.y,
                shape.text,
                fontsize=shape.size * points * 0.92,  # this font is wider than those of SVG
                fontweight="bold" if shape.bold else "normal",
                color=shape.colour,
                ha=anchors[shape.anchor],
                va="baseline",
                zorder=order,
                parse_math=False,
            )
    written = io.BytesIO()
    figure.savefig(written, format="png", metadata={"Software": None, "Title": picture.title})
    return written.getvalue()


def _svg(picture: Picture) -> Iterator[str]:
    size = f'width="{picture.wide:.0f}" height="{picture.high:.0f}" viewBox="0 0 {picture.wide:.0f} {picture.high:.0f}"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" fill="{INK}" role="img">'
    yield f"<title>{escape(picture.title)}</title>"
    ground, strokes = HATCH
    yield (
        '<defs><pattern id="stands" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="6" height="6" fill="{ground}"/><rect width="2" height="6" fill="{strokes}"/></pattern></defs>'
    )
    yield f'<rect width="{picture.wide:.0f}" height="{picture.high:.0f}" fill="#ffffff"/>'
    for shape in picture.shapes:
        if isinstance(shape, Words):
            weight = 600 if shape.bold else 400
            yield words(shape.x, shape.y, shape.text, shape.size, shape.anchor, weight, shape.colour)
        elif isinstance(shape, Line):
            dashes = ' stroke-dasharray="4 3"' if shape.dashed else ""
            path = f"M{shape.x:.1f} {shape.y:.1f}L{shape.to_x:.1f} {shape.to_y:.1f}"
            yield f'<path d="{path}" stroke="{shape.colour}" stroke-width="{shape.wide:g}"{dashes}/>'
        else:
            yield _svg_box(shape)
    yield "</svg>"


def _svg_box(box: Box) -> str:
    fill = "url(#stands)" if box.hatched else box.fill
    edge = f' stroke="{box.edge}" stroke-width=".6"' if box.edge else ""
    begin = f'<rect x="{box.x:.2f}" y="{box.y:.1f}" width="{box.wide:.2f}" height="{box.high:.1f}" fill="{fill}"{edge}'
    return f"{begin}><title>{escape(box.hint)}</title></rect>" if box.hint else f"{begin}/>"
