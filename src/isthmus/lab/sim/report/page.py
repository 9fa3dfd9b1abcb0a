"""Numbers as people write them: durations, bytes and shares, each with about three digits."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isthmus.sheet import Sheet, escaped


def seconds(value_s: float) -> str:
    """A duration in the unit that suits it: `350 ms`, `2.5 s`, `12 min`, `3 h`."""
    units = (
        (1e-6, "µs", 1e-3),
        (1e-3, "ms", 1.0),
        (1.0, "s", 120.0),
        (60.0, "min", 7200.0),
        (3600.0, "h", math.inf),
    )
    unit_s, unit = next(
        (each_s, each) for each_s, each, limit_s in units if abs(value_s) < limit_s * (1 - 5e-4)
    )
    return f"{_three(value_s / unit_s)} {unit}" if value_s else "0 s"


def clock(span_s: float) -> tuple[float, str]:
    """The unit of a time axis over `span_s`: its length in seconds, and its name."""
    units = ((86_400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"))
    return next((unit for unit in units if span_s > 2 * unit[0]), (1.0, "s"))


def size(num_bytes: float) -> str:
    """Bytes with a decimal unit."""
    for unit, word in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= unit * (1 - 5e-4):
            return f"{_three(num_bytes / unit)} {word}"
    return f"{num_bytes:.0f} B"


def percent(share: float) -> str:
    """A share as a percentage; a little more than nothing is not shown as nothing."""
    if 0 < share < 0.0005:
        return "< 0.1 %"
    if 0.9995 <= share < 1:
        return "> 99.9 %"
    if share == 1:
        return "100 %"
    return f"{_three(100 * share)} %" if share < 0.1 else f"{100 * share:.1f} %"


def shorten(text: str, length: int = 24) -> str:
    """At most `length` characters, the middle left out."""
    if len(text) <= length:
        return text
    head = (length - 1) // 2
    return f"{text[:head]}…{text[len(text) - (length - 1 - head) :]}"


def _three(value: float) -> str:
    """Three significant digits, without an exponent and without trailing zeros."""
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value)) + 1e-9))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


# A page of tables and charts that opens anywhere: all of it is in one file, and nothing is fetched.
#
# Charts are drawn by plotly in the browser, from plain data. A colour in them is the name of one in `page.html`.


_TEMPLATE = Path(__file__).with_name("page.html")


class Chart(NamedTuple):
    """`traces` and `layout` as plotly.js takes them, on top of what `page.html` says of all; `height` (300) is kept in
    every width. A chart without traces is its caption alone. `time`: its x axis is the time of the run; `half`: two of
    them stand side by side."""

    title: str
    caption: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = {}
    time: bool = False
    half: bool = False


class Html(str):
    """Mark-up that is used as it is."""


def page(title: str, blocks: Iterable[Sheet | Chart | Html]) -> str:
    """The page's text, the same for the same blocks. What users wrote is escaped in all of them."""
    from plotly.offline import get_plotlyjs

    template = _TEMPLATE.read_text(encoding="utf8")
    charts: list[dict[str, Any]] = []
    body = "".join(_block(block, charts) for block in blocks)
    data = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    values = {"title": escaped(title), "body": body, "charts": data, "plotly": get_plotlyjs()}
    own = re.findall(r"<script>(.*?)</script>", template, re.S)[-1]
    values["hashes"] = " ".join(map(_hash, (values["plotly"], own)))
    return re.sub(r"{{(\w+)}}", lambda found: values[found[1]], template)


def heading(text: str) -> Html:
    return Html(f"<h2>{escaped(text)}</h2>")


def headline(title: str, subtitle: str, tiles: Iterable[tuple[str, str]]) -> Html:
    """`tiles`: the figures that matter most, each with what it is."""
    boxes = "".join(
        f'<div class="tile"><b>{escaped(value)}</b><span>{escaped(name)}</span></div>' for value, name in tiles
    )
    return Html(
        f'<h1>{escaped(title)}</h1><p class="soft">{escaped(subtitle)}</p><div class="tiles">{boxes}</div>'
    )


def configuration(text: str) -> Html:
    return Html(f"<h2>Configuration</h2><pre>{escaped(text)}</pre>")


def _block(block: Sheet | Chart | Html, charts: list[dict[str, Any]]) -> str:
    """Mark-up of a block; the data of a chart is added to `charts`."""
    if isinstance(block, Html):
        return block
    title = f"<h3>{escaped(block.title)}</h3>" if block.title else ""
    if isinstance(block, Sheet):
        notes = "".join(f"<figcaption>{escaped(note)}</figcaption>" for note in block.notes)
        return f'<figure>{title}<div class="scroll">{block.html()}</div>{notes}</figure>'
    caption = f"<figcaption>{escaped(block.caption)}</figcaption>" if block.caption else ""
    drawing = ""
    if block.traces:
        label = escaped(f"Chart: {block.title}. {block.caption}")
        layout = dict(block.layout)
        place = f'id="chart-{len(charts)}" style="height: {layout.pop("height", 300)}px"'
        drawing = f'<div {place} role="img" aria-label="{label}"></div>'
        charts.append({"data": _safe(block.traces), "layout": _safe(layout), "time": block.time})
    kind = ' class="half"' if block.half else ""
    return f"<figure{kind}>{title}{caption}{drawing}</figure>"


def _safe(value: Any) -> Any:
    """The value with all texts escaped: plotly takes tags in them for its own, and a browser `</script>` for the end of
    the data. Quotes stay, for plotly shows their entities as they are."""
    if isinstance(value, str):
        return escaped(value, quote=False)
    if isinstance(value, Mapping):
        return {key: each if key == "hovertemplate" else _safe(each) for key, each in value.items()}
    return list(map(_safe, value)) if isinstance(value, list | tuple) else value


def _hash(script: str) -> str:
    """What the page's policy calls a script: no other one runs, whatever got into the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
