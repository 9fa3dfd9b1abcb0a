"""`isthmus plan`: the best split, threshold and bandwidth for a fleet and a workload."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isthmus.config import Config
    from isthmus.lab.planner.demand import Demand
    from isthmus.lab.planner.fleet import Fleet


def plan(
    config: Annotated[
        Path, typer.Option(help="Deployment file (YAML): the fleet, its links, prices and limits.")
    ],
    trace: Annotated[Path | None, typer.Option(help="Mooncake or Azure trace, or a flight recording.")] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="In place of a trace: lognormal:mu=9.9,sigma=1,min=128,max=131072, one length for all prompts, or a "
            "file with a prompt's tokens a line, or those and its answer's."
        ),
    ] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Tokens of every answer, with --lengths.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Folder, GGUF file or config.json in place of the file's model.")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help="Gbps of the links to try: 1,2,5,10.")] = None,
    top: Annotated[int, typer.Option(help="Show so many plans.", min=1)] = 3,
    simulate: Annotated[
        bool, typer.Option("--simulate/--no-simulate", help="Run the plans too, with queues and bursts.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(help="Of each simulation; 1000 if not given.", min=10, show_default=False)
    ] = None,
    goodput: Annotated[
        float | None, typer.Option(help="Share of requests that must be inside the limits; 0.9 if not given.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Simulations on the machines of a Ray cluster, side by side.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answer here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with charts here.")] = None,
) -> None:
    """Size a fleet: how many nodes prefill and decode, which prompts another cluster prefills, at what rate."""
    from isthmus.cli.outputs import check_writable, show, write_bytes
    from isthmus.config import load_config
    from isthmus.core.errors import ConfigError
    from isthmus.lab.planner.answer import to_json
    from isthmus.lab.planner.fleet import fleet_of
    from isthmus.lab.planner.report import analytic, simulated
    from isthmus.lab.planner.search import answer
    from isthmus.live.cluster.with_ray import with_ray

    for option, file in (("--json", json_file), ("--report", report)):
        check_writable(option, file)
    if not simulate and (requests, goodput, ray) != (None, None, False):
        raise ConfigError(
            "--requests, --goodput and --ray are of simulations; give --simulate too, or leave them out"
        )
    pool = with_ray("--ray").RayPool() if ray else None
    if goodput is not None and not 0 < goodput <= 1:
        raise ConfigError(f"--goodput {goodput}: is a share of requests, above 0 and at most 1")
    settings = load_config(config, {"model": None if model is None else str(model.absolute())})
    fleet = fleet_of(settings, config.parent)
    tried = _bandwidths(bandwidth, fleet)
    demand = _demand(settings, fleet, trace, lengths, output_tokens)
    found = answer(settings, fleet, demand, top=top, bandwidths=tried)
    show(*analytic(found))
    if simulate:
        from isthmus.cli.simulate import progress_bar
        from isthmus.lab.planner.trials import Trials

        trials = Trials(settings, config.parent, demand, num_requests=requests or 1000, goodput=goodput or 0.9)
        with progress_bar("simulating") as progress:
            found = trials.of(found, progress, pool)
        show(*simulated(found))
    for note in found.notes:
        print(f"Note: {note}.")
    if json_file is not None:
        write_bytes(json_file, to_json(found))
    if report is not None:
        from isthmus.lab.planner.report import report as page_of

        write_bytes(report, page_of(found, config.read_text(encoding="utf8", errors="replace")).encode())


def _demand(
    settings: Config, fleet: Fleet, trace: Path | None, lengths: str | None, output_tokens: int | None
) -> Demand:
    from isthmus.core.errors import ConfigError
    from isthmus.lab.planner.demand import demand_of_lengths, demand_of_trace

    if (trace is None) == (lengths is None):
        raise ConfigError("--trace FILE or --lengths SPEC: give one of them")
    if output_tokens is not None and output_tokens < 1:
        raise ConfigError(f"--output-tokens {output_tokens}: an answer has at least 1")
    if lengths is not None:
        return demand_of_lengths(lengths, output_tokens)
    if output_tokens is not None:
        raise ConfigError("--output-tokens: the trace has the lengths of answers; leave it out")
    assert trace is not None
    return demand_of_trace(trace, settings, fleet)


def _bandwidths(text: str | None, fleet: Fleet) -> list[float]:
    """In Gbps, ascending."""
    import math

    from isthmus.core.errors import ConfigError

    if text is None:
        return []
    if not fleet.remotes:
        raise ConfigError("--bandwidth: this fleet is one cluster and has no link; leave it out")
    try:
        values = sorted({float(part) for part in text.split(",")})
    except ValueError:
        values = []
    if not values or not all(0 < value < math.inf for value in values):
        raise ConfigError(f"--bandwidth {text!r}: expected Gbps above 0 with commas between, e.g. 1,2,5,10")
    return values
