"""Drawing primitives: one picture is one inline SVG. Colours and dashes come from the page's style sheet.

The mark-up is well-formed XML, uses absolute coordinates only, and every text in it is escaped.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from isthmus.lab.sim.report.scales import Scale

_CONTROL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LABEL_HEIGHT = 14

Point = tuple[float, float]
Box = tuple[float, float, float, float]
"""x, y, width, height."""


def escape(text: object) -> str:
    """Text that is safe between tags and in attributes, without characters that no document may hold."""
    return html.escape(_CONTROL.sub("\ufffd", str(text)))


class Picture:
    """An SVG under construction. `name` is unique on the page; `description` says what the picture shows."""

    def __init__(self, name: str, width: int, height: int, *, title: str, description: str) -> None:
        self.width = width
        self._head = (
            f'<svg viewBox="0 0 {width} {height}"{_class("wide" if width > 600 else "")} role="img"'
            f' aria-labelledby="{name}-t {name}-d"><title id="{name}-t">{escape(title)}</title>'
            f'<desc id="{name}-d">{escape(description)}</desc>'
        )
        self._parts: list[str] = []

    def markup(self) -> str:
        return f"{self._head}{''.join(self._parts)}</svg>"

    def text(self, x: float, y: float, content: str, *, kind: str = "", anchor: str = "start") -> None:
        """`kind`: class of the style sheet; `anchor`: `start`, `middle` or `end` of the text is at x."""
        place = f'x="{_number(x)}" y="{_number(y)}" text-anchor="{anchor}"'
        self._parts.append(f"<text {place}{_class(kind)}>{escape(content)}</text>")

    def line(self, first: Point, last: Point, kind: str) -> None:
        self._path(f"M{_point(first)}L{_point(last)}", kind)

    def lines(self, runs: Iterable[Sequence[Point]], kind: str) -> None:
        """Connected points; a gap between one run and the next."""
        self._path("".join("M" + "L".join(map(_point, run)) for run in runs if run), kind)

    def steps(self, edges: Sequence[float], heights: Sequence[float], kind: str) -> None:
        """A staircase: `heights[i]` from `edges[i]` to `edges[i + 1]`."""
        self._path(f"M{_point((edges[0], heights[0]))}{_staircase(edges, heights)}", kind)

    def area(self, edges: Sequence[float], heights: Sequence[float], base: float, kind: str) -> None:
        """The same, filled down to `base`."""
        start = f"M{_point((edges[0], base))}V{_number(heights[0])}"
        self._path(f"{start}{_staircase(edges, heights)}V{_number(base)}Z", kind)

    def boxes(self, boxes: Iterable[Box], kind: str) -> None:
        """Rectangles that look the same, as one shape."""
        path = "".join(
            f"M{_point((x, y))}H{_number(x + width)}V{_number(y + height)}H{_number(x)}Z"
            for x, y, width, height in boxes
            if width > 0 and height > 0
        )
        self._path(path, kind)

    def box(self, box: Box, kind: str, *, title: str) -> None:
        """One rectangle that says what it is when pointed at."""
        x, y, width, height = map(_number, box)
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{_class(kind)}>'
            f"<title>{escape(title)}</title></rect>"
        )

    def dot(self, x: float, y: float, kind: str) -> None:
        self._parts.append(f'<circle cx="{_number(x)}" cy="{_number(y)}" r="3"{_class(kind)}/>')

    def _path(self, path: str, kind: str) -> None:
        if path:
            self._parts.append(f'<path d="{path}"{_class(kind)}/>')


class Plot(NamedTuple):
    """The rectangle values are drawn in."""

    x: Scale
    y: Scale

    @property
    def left(self) -> float:
        return self.x.start

    @property
    def right(self) -> float:
        return self.x.stop

    @property
    def bottom(self) -> float:
        return self.y.start

    @property
    def top(self) -> float:
        return self.y.stop

    def point(self, x: float, y: float) -> Point:
        return self.x(x), self.y(y)


def draw_y_axis(picture: Picture, plot: Plot, ticks: Sequence[float], write: Callable[[float], str]) -> None:
    """Grid lines across the plot, each with its value at the left."""
    for tick in ticks:
        y = plot.y(tick)
        picture.line((plot.left, y), (plot.right, y), "axis" if tick == plot.y.low else "grid")
        picture.text(plot.left - 6, y + 4, write(tick), kind="tick", anchor="end")


def draw_x_grid(picture: Picture, plot: Plot, ticks: Sequence[float]) -> None:
    for tick in ticks:
        x = plot.x(tick)
        picture.line((x, plot.top), (x, plot.bottom), "grid")


def draw_x_labels(picture: Picture, plot: Plot, ticks: Sequence[float], write: Callable[[float], str]) -> None:
    for tick in ticks:
        x, label = plot.x(tick), write(tick)
        picture.line((x, plot.bottom), (x, plot.bottom + 4), "axis")
        inside = min(x, picture.width - text_width(label) / 2)
        picture.text(inside, plot.bottom + 17, label, kind="tick", anchor="middle")


def draw_limit(picture: Picture, plot: Plot, value: float, label: str, *, label_y: float) -> None:
    """A dashed line across the plot at a limit on its x axis; the label is on the side with more room."""
    x = plot.x(value)
    picture.line((x, plot.top), (x, plot.bottom), "limit")
    at_left = x > (plot.left + plot.right) / 2
    picture.text(
        x - 5 if at_left else x + 5, label_y, label, kind="limit-label", anchor="end" if at_left else "start"
    )


def draw_end_labels(picture: Picture, plot: Plot, labels: Sequence[tuple[float, str, str]]) -> None:
    """Labels `(y value, text, kind)` at the right ends of lines, moved apart where they would touch."""
    lowest = plot.bottom + _LABEL_HEIGHT * 0.3
    placed = sorted(((plot.y(value) + 4, text, kind) for value, text, kind in labels), reverse=True)
    for y, text, kind in placed:
        y = min(y, lowest)
        picture.text(plot.right + 8, y, text, kind=f"label {kind}")
        lowest = y - _LABEL_HEIGHT


def draw_legend(picture: Picture, x: float, y: float, entries: Sequence[tuple[str, str]]) -> None:
    """Swatch and text of each entry `(kind, text)`, in one row."""
    for kind, text in entries:
        picture.boxes([(x, y - 10, 14, 11)], kind)
        picture.text(x + 20, y, text, kind="label")
        x += 20 + text_width(text) + 18


def text_width(text: str) -> float:
    """About how wide a label is; nothing here can measure a font."""
    return 6.4 * len(text)


def shorten(text: str, length: int) -> str:
    """At most `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def _staircase(edges: Sequence[float], heights: Sequence[float]) -> str:
    parts = []
    before = None
    for index, height in enumerate(heights):
        y = _number(height)
        if y != before:
            parts.append(f"V{y}" if index == 0 else f"H{_number(edges[index])}V{y}")
        before = y
    return f"{''.join(parts)}H{_number(edges[len(heights)])}"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _point(point: Point) -> str:
    return f"{_number(point[0])} {_number(point[1])}"


def _number(value: float) -> str:
    text = f"{value:.1f}"
    return text[:-2] if text.endswith(".0") else text
