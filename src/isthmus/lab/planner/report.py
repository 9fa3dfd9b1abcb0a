"""A plan as one HTML page that needs no network and no script."""

from __future__ import annotations

from isthmus.lab.planner import charts
from isthmus.lab.planner.answer import Answer
from isthmus.lab.planner.sheets import NONE, Sheet, analytic, simulated, threshold
from isthmus.lab.sim.report.charts import escape
from isthmus.lab.sim.report.scales import percent
from isthmus.lab.sim.report.style import CSS

_MORE_CSS = """
.best { --tone: var(--green); } .local { --tone: var(--purple); } .wire { --tone: var(--grey); }
svg .thick { stroke-width: 4; stroke-opacity: .7; } svg .dot { fill: var(--soft); }
"""


def page(answer: Answer, config_text: str) -> str:
    """The page's text, well-formed both as HTML and as XML."""
    body = "".join((_headline(answer), _notes(answer), *_answers(answer), *_simulations(answer)))
    configuration = f"<h2>Configuration</h2><pre>{escape(config_text)}</pre>"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>Isthmus plan: {escape(answer.demand.source)}</title><style>{CSS}{_MORE_CSS}</style></head>"
        f"<body><main>{body}{configuration}</main></body></html>\n"
    )


def _headline(answer: Answer) -> str:
    best = answer.plans[0]
    others = {plan.name: plan.exact.rate for plan in answer.baselines}
    tiles = [
        (f"{best.exact.rate:.2f}", f"requests/s; {best.exact.binds} binds"),
        (threshold(best.threshold), "threshold, uncached tokens"),
        (f"{best.prefill} / {best.decode}", "prefill / decode nodes at home"),
        (f"{best.exact.egress_gbps:.1f}" if best.remote else NONE, "Gbps on the link"),
        (percent(best.exact.share), "of requests offloaded"),
    ]
    for name in ("homogeneous", "naive", "equal cost"):
        if others.get(name):
            tiles.append((f"{best.exact.rate / others[name]:.2f} ×", f"the rate of {name}"))
    boxes = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for value, name in tiles
    )
    return f'<h1>Isthmus plan</h1><p class="soft">{escape(answer.demand.source)}</p><div class="tiles">{boxes}</div>'


def _notes(answer: Answer) -> str:
    return "".join(f'<p class="soft">Note: {escape(note)}.</p>' for note in answer.notes)


def _answers(answer: Answer) -> list[str]:
    """Tables, and below each the chart that shows it."""
    what_if = answer.what_if
    charted = {"Every split of the home cluster": _chart("Rate over the split", charts.split_figure(answer))}
    if what_if.threshold:
        charted["Stages"] = _chart(
            "What each stage allows, over the threshold", charts.threshold_figure(answer)
        )
    if what_if.bandwidth:
        charted["Other bandwidths"] = _chart("Rate over the bandwidth", charts.bandwidth_figure(answer))
    return [_section(sheet, charted.get(sheet.title, "")) for sheet in analytic(answer)]


def _simulations(answer: Answer) -> list[str]:
    found = answer.simulated
    if found is None:
        return []
    sustained = _chart("Formula and simulation", charts.sustained_figure(found)) if found.sustained else ""
    parts = _chart(f"TTFT in parts, at {charts.SHOWN:g} of the formula", charts.parts_figure(found))
    return [_section(sheet, chart) for sheet, chart in zip(simulated(found), (sustained, parts), strict=True)]


def _section(sheet: Sheet, chart: str) -> str:
    caption = f"<figcaption>{escape(sheet.caption)}</figcaption>" if sheet.caption else ""
    return (
        f"<h2>{escape(sheet.title)}</h2><figure>{caption}"
        f'<div class="scroll">{_table(sheet)}</div></figure>{chart}'
    )


def _chart(title: str, drawing: str) -> str:
    return f'<figure><h3>{escape(title)}</h3><div class="scroll">{drawing}</div></figure>'


def _table(sheet: Sheet) -> str:
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in sheet.head)
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in sheet.rows
    )
    return f"<table>{f'<thead><tr>{top}</tr></thead>' if any(sheet.head) else ''}<tbody>{rows}</tbody></table>"
