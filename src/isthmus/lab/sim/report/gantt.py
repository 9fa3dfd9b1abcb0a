"""One request's way through the cluster, phase by phase."""

from __future__ import annotations

from typing import NamedTuple

from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_S
from isthmus.lab.sim.records import RequestRecord, Result, Status
from isthmus.lab.sim.report.charts import Picture, Plot, draw_limit, draw_x_grid, draw_x_labels, text_width
from isthmus.lab.sim.report.scales import Scale, clock, percent, seconds, time_ticks
from isthmus.lab.sim.spread import nearest_rank

_WIDTH, _LEFT, _RIGHT = 1000, 214, 984
_ROW, _TOP = 26, 20


class Phase(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    kind: str


def chosen(result: Result, index: int | None) -> list[tuple[str, RequestRecord]]:
    """Requests worth a look and why: the one asked for, else median and worst TTFT of those completed.

    Raises ConfigError if there is no request `index`.
    """
    if index is not None:
        found = next((each for each in result.records if each.index == index), None)
        if found is None:
            count = len(result.records)
            raise ConfigError(f"report: there is no request {index}; the workload has {count}, counted from 0")
        return [("As asked for", found)]
    completed = [each for each in result.records if each.status is Status.COMPLETED]
    if not completed:
        return []
    completed.sort(key=lambda each: (each.first_token_ns - each.arrival_ns, each.index))
    ranked = range(len(completed))
    return [
        ("Median time to first token", completed[nearest_rank(ranked, 50)]),
        ("Worst time to first token", completed[-1]),
    ]


def phases(record: RequestRecord, end_ns: int) -> list[Phase]:
    """What a request went through, one phase where the one before ended. `end_ns`: of the simulation.

    From the start of its prefill to its first token, what was not node time of this prefill went into loading
    and fetching KV and into other requests' chunks. How the two alternate is not recorded: it is drawn first.
    """
    stations = [
        ("wait for a prefill node", record.prefill_start_ns, "wait"),
        ("load, fetch, others' chunks", _computing_from(record), "link faint"),
        ("prefill", record.first_token_ns, "prefill fill"),
        ("hand-over of the rest of the KV", record.landed_ns, "link fill"),
        ("wait for the batch", record.joined_ns, "wait"),
        ("decode", record.end_ns, "decode fill"),
    ]
    found: list[Phase] = []
    start_ns = record.arrival_ns
    for name, reached_ns, kind in stations:
        if reached_ns < 0 and name.startswith("hand-over") and record.joined_ns >= 0:
            continue  # prefilled where it decodes: nothing was handed over
        if reached_ns < 0:
            stop_ns = record.end_ns if record.end_ns >= 0 else end_ns
            return [*found, Phase(name, start_ns, max(start_ns, stop_ns), kind)]
        found.append(Phase(name, start_ns, max(start_ns, reached_ns), kind))
        start_ns = max(start_ns, reached_ns)
    return found


def _computing_from(record: RequestRecord) -> int:
    if record.first_token_ns < 0:
        return record.prefill_start_ns
    return max(record.prefill_start_ns, record.first_token_ns - record.prefill_ns)


def describe(record: RequestRecord, result: Result) -> str:
    """What the request was and how it went, in a sentence or two."""
    request = record.request
    words = [f"Request {record.index}: {request.num_tokens:,} tokens in, {request.output_tokens:,} out"]
    if record.prefill_start_ns >= 0:
        words.append(f"{percent(record.cached_tokens / request.num_tokens)} of the prompt cached")
        words.append(f"prefilled on {_node(result, record.prefill)}")
    if record.joined_ns >= 0:
        words.append(f"decoded on {_node(result, record.decode)}")
    if record.first_token_ns >= 0:
        words.append(f"first token after {seconds((record.first_token_ns - record.arrival_ns) / NS_PER_S)}")
    if record.status is Status.COMPLETED and record.tbt_ns:
        words.append(f"TBT {seconds(record.tbt_ns / NS_PER_S)}")
    ending = f"refused at {record.stage}" if record.status is Status.REFUSED else record.status.value
    return f"{', '.join(words)}; {ending}."


def gantt_figure(record: RequestRecord, result: Result, name: str) -> str:
    """A bar for each phase, its length beside it."""
    steps = phases(record, result.end_ns)
    span_s = max((steps[-1].end_ns - record.arrival_ns) / NS_PER_S, 1e-6)
    bottom = _TOP + _ROW * len(steps)
    picture = Picture(
        name,
        _WIDTH,
        bottom + 26,
        title=f"Request {record.index}, phase by phase",
        description="; ".join(f"{step.name} {_length(step)}" for step in steps),
    )
    plot = Plot(Scale(0, span_s, _LEFT, _RIGHT), Scale(0, 1, bottom, _TOP))
    marks = time_ticks(span_s)
    draw_x_grid(picture, plot, marks)
    draw_x_labels(picture, plot, marks, lambda time_s: clock(time_s, span_s))
    for index, step in enumerate(steps):
        _draw_phase(picture, plot, step, record.arrival_ns, y=_TOP + _ROW * index)
    if 0 < record.ttft_limit_ns <= span_s * NS_PER_S:
        limit_s = record.ttft_limit_ns / NS_PER_S
        draw_limit(picture, plot, limit_s, f"TTFT limit {seconds(limit_s)}", label_y=_TOP - 6)
    return picture.markup()


def _draw_phase(picture: Picture, plot: Plot, step: Phase, arrival_ns: int, *, y: float) -> None:
    left = plot.x((step.start_ns - arrival_ns) / NS_PER_S)
    right = max(left + 1, plot.x((step.end_ns - arrival_ns) / NS_PER_S))
    left = min(left, right - 1)
    label = _length(step)
    picture.text(plot.left - 10, y + 17, step.name, kind="label", anchor="end")
    picture.box((left, y + 5, right - left, 16), step.kind, title=f"{step.name}: {label}")
    if right + 12 + text_width(label) < _WIDTH:
        picture.text(right + 6, y + 17, label, kind="label")
    else:
        picture.text(left - 6, y + 17, label, kind="label", anchor="end")


def _length(step: Phase) -> str:
    return seconds((step.end_ns - step.start_ns) / NS_PER_S)


def _node(result: Result, index: int) -> str:
    return result.nodes[index].node if 0 <= index < len(result.nodes) else f"node {index}"
