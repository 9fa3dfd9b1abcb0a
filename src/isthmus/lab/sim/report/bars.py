"""Totals as horizontal bars: how busy each node was, how full each link, and how many bytes went for what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from isthmus.core.types import Role
from isthmus.facts import UNLIMITED
from isthmus.lab.sim.records import NodeRecord, Result
from isthmus.lab.sim.report.charts import Picture, Plot, draw_x_grid, draw_x_labels, shorten, text_width
from isthmus.lab.sim.report.scales import Scale, nice_high, percent, size, ticks
from isthmus.lab.sim.summary import link_utilisation

_WIDTH, _LEFT, _RIGHT = 490, 164, 340
_HEIGHT, _TOP = 18, 6
_MOST = 24
_QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)


class Bar(NamedTuple):
    """`hatched`: the last part of `value`, drawn apart."""

    label: str
    value: float
    text: str
    kind: str
    hatched: float = 0.0


def nodes_figure(result: Result) -> str:
    """The share of time each node computed, the part in which it only waited for KV hatched."""
    span_ns = max(1, result.end_ns - result.start_ns)
    bars = [_node(node, span_ns) for node in result.nodes]
    return _draw(
        "nodes", "Busy share of each node", _busiest(bars), _QUARTERS, lambda share: f"{100 * share:.0f} %"
    )


def links_figure(result: Result) -> str:
    """Utilisation of each link, fullest first."""
    span_ns = result.end_ns - result.start_ns
    bars = []
    for link in result.links:
        limited = 0 < link.bytes_per_s < UNLIMITED
        used = link_utilisation(link, span_ns)
        text = (
            f"{percent(used)}, {size(link.bytes_moved)}" if limited else f"no limit, {size(link.bytes_moved)}"
        )
        bars.append(Bar(link.name, used, f"{text}, {link.kind}", "link"))
    shown = sorted(_busiest(bars), key=lambda bar: -bar.value)
    return _draw("links", "Utilisation of each link", shown, _QUARTERS, lambda share: f"{100 * share:.0f} %")


def bytes_figure(result: Result) -> str:
    """Bytes moved by purpose."""
    bars = [
        Bar(purpose.replace("_", " "), moved, size(moved), "link")
        for purpose, moved in result.bytes_moved.items()
    ]
    high = nice_high(max((bar.value for bar in bars), default=0), 4)
    return _draw("bytes", "Bytes moved by purpose", bars, ticks(0, high, 4), size)


def left_out(count: int, noun: str) -> str:
    """A sentence for the caption if the figure does not show all of `count`."""
    return f" The {_MOST} busiest of {count} {noun} are shown." if count > _MOST else ""


def _busiest(bars: Sequence[Bar]) -> list[Bar]:
    """At most `_MOST` bars, the largest of them, in the order they came."""
    chosen = sorted(range(len(bars)), key=lambda index: (-bars[index].value, index))[:_MOST]
    return [bars[index] for index in sorted(chosen)]


def _node(node: NodeRecord, span_ns: int) -> Bar:
    busy = min(1.0, node.busy_ns / span_ns)
    stalled = min(busy, node.stalled_ns / span_ns)
    kind = "decode" if node.role is Role.DECODE else "prefill"
    return Bar(node.node, busy, percent(busy), kind, stalled)


def _draw(
    name: str, title: str, bars: Sequence[Bar], marks: Sequence[float], write: Callable[[float], str]
) -> str:
    height = _HEIGHT * len(bars)
    description = "; ".join(f"{bar.label}: {bar.text}" for bar in bars) or "nothing to show"
    picture = Picture(name, _WIDTH, _TOP + height + 30, title=title, description=description)
    plot = Plot(Scale(0, marks[-1], _LEFT, _RIGHT), Scale(0, 1, _TOP + height, _TOP))
    draw_x_grid(picture, plot, marks)
    draw_x_labels(picture, plot, marks, write)
    for index, bar in enumerate(bars):
        _draw_bar(picture, plot, bar, y=_TOP + _HEIGHT * index)
    return picture.markup()


def _draw_bar(picture: Picture, plot: Plot, bar: Bar, *, y: float) -> None:
    solid_end, end = plot.x(bar.value - bar.hatched), plot.x(bar.value)
    title = f"{bar.label}: {bar.text}"
    picture.text(plot.left - 8, y + 13, shorten(bar.label, 25), kind="label", anchor="end")
    if solid_end > plot.left:
        picture.box((plot.left, y + 3, solid_end - plot.left, 12), f"fill {bar.kind}", title=title)
    if end > solid_end:
        picture.box((solid_end, y + 3, end - solid_end, 12), f"faint {bar.kind}", title=title)
    picture.text(min(end + 6, _WIDTH - text_width(bar.text)), y + 13, bar.text, kind="tick")
