"""`isthmus simulate`: a workload through the conductor and the schedulers that also serve, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.lab.sim import no_cycles

if TYPE_CHECKING:
    from isthmus.config import Config
    from isthmus.lab.sim.deployment import Deployment
    from isthmus.lab.sim.records import Result
    from isthmus.lab.sim.simulation import Progress
    from isthmus.lab.sim.summary import Summary
    from isthmus.lab.sim.workloads import Workload


@no_cycles()
def simulate(
    config: Annotated[
        Path | None,
        typer.Option(
            help="Deployment file (YAML); default: learnt from --trace, a recording of isthmus route."
        ),
    ] = None,
    trace: Annotated[Path | None, typer.Option(help="Mooncake or Azure trace, or a flight recording.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(help="In place of a trace, e.g. poisson:rate=8,num=1000,input=1024,output=128."),
    ] = None,
    speed: Annotated[float, typer.Option(help="Replay so many times as fast.")] = 1.0,
    spread_seed: Annotated[
        int | None, typer.Option(help="Spread arrivals with one timestamp up to the next, at random.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only so many requests, from the start.")] = None,
    policy: Annotated[str | None, typer.Option(help="How requests are placed, e.g. mooncake.")] = None,
    admission: Annotated[str | None, typer.Option(help="When requests are refused, e.g. early.")] = None,
    order: Annotated[str | None, typer.Option(help="Order of a node's queue: fcfs or promise.")] = None,
    link_fault: Annotated[
        list[str] | None,
        typer.Option(help="A link between clusters from START to STOP (s) at FACTOR of its rate, 0: down."),
    ] = None,
    node_fault: Annotated[
        list[str] | None, typer.Option(help="A node or a whole cluster dead from START to STOP (s).")
    ] = None,
    drain: Annotated[
        list[str] | None,
        typer.Option(help="A node or a whole cluster gets nothing new from START to STOP (s), and leaves."),
    ] = None,
    session_fault: Annotated[
        list[str] | None,
        typer.Option(help="What two nodes or clusters say to each other is DELAY (s) late, inf: cut off."),
    ] = None,
    disk_fault: Annotated[
        list[str] | None, typer.Option(help="SSDs of a node or a cluster dead from START to STOP (s).")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page with charts here.")] = None,
    log: Annotated[Path | None, typer.Option(help="Record the conductor's events here (JSONL).")] = None,
) -> None:
    """Replay a workload in virtual time: goodput, TTFT, TBT, hit rate, bytes moved, refusals, waste."""
    from isthmus.cli.outputs import check_writable, show, write_bytes
    from isthmus.lab.sim.deployment import deployment_of
    from isthmus.lab.sim.sheets import measured_sheet, summary_sheets
    from isthmus.lab.sim.summary import summarize
    from isthmus.lab.sim.workloads import Replay, load

    for option, file in (("--json", json_file), ("--report", report), ("--log", log)):
        check_writable(option, file)
    flags = {"policy": policy, "scheduling.admission": admission, "scheduling.order": order}
    settings = _settings(config, trace, flags)
    faults = [texts or [] for texts in (link_fault, node_fault, session_fault, disk_fault, drain)]
    requests = load(_source(trace, workload), Replay(speed, spread_seed, limit))
    for note in requests.notes:
        print(f"isthmus: {note}", file=sys.stderr)
    deployment = deployment_of(settings, requests.block_size, Path() if config is None else config.parent)
    deployment = _with_faults(deployment, faults)
    result = _run(deployment, requests, log)
    result.notes += requests.notes
    result.notes += _notes(speed, spread_seed, limit)
    result.notes += [f"fault {text}" for texts in faults for text in texts]
    summary = summarize(result)
    show(*summary_sheets(summary))
    if requests.measured is not None:
        show(measured_sheet(summary, requests.measured))
    if json_file is not None:
        from isthmus.lab.sim.report.curves import curves_of, to_json

        write_bytes(json_file, to_json(summary, curves_of(result)))
    if report is not None:
        _write_report(result, summary, settings, report)


def _settings(config: Path | None, trace: Path | None, flags: dict[str, Any]) -> Config:
    """The file's values, or what a recording teaches of its servers, with the flags on top."""
    from isthmus.config import load_config
    from isthmus.core.errors import ConfigError

    if config is not None:
        return load_config(config, flags)
    if trace is None:
        raise ConfigError("--config FILE: give the deployment, or in --trace a recording of `isthmus route`")
    from isthmus.bench.learning import deployment, learn, recorded
    from isthmus.facts import own_names

    try:
        found = recorded(trace)
    except ConfigError as error:
        raise ConfigError(f"{error}; without --config, --trace is a recording of `isthmus route`") from None
    for option, name, _ in own_names(found.rules):
        if not flags["policy"]:
            raise ConfigError(
                f"{trace}: {option} {name!r} is one of your own; if it may be run, give --policy {name}"
            )
    learnt = learn(found)
    print(
        f"isthmus: {learnt.curve.origin}; `isthmus profile --recording {trace}` writes it down", file=sys.stderr
    )
    given = {name: value for name, value in flags.items() if value is not None}
    return load_config(None, {**deployment(found, learnt.curve), **given})


def _with_faults(deployment: Deployment, texts: list[list[str]]) -> Deployment:
    """`texts`: of links, nodes, sessions, disks, drains."""
    import msgspec

    from isthmus.lab.sim.faults import DiskFault, Drain, Faults, LinkFault, NodeFault, SessionFault, read

    links, nodes, sessions, disks, drains = texts
    faults = Faults(
        tuple([read(LinkFault, text) for text in links]),
        tuple([read(NodeFault, text) for text in nodes]),
        tuple([read(SessionFault, text) for text in sessions]),
        tuple([read(DiskFault, text) for text in disks]),
        tuple([read(Drain, text) for text in drains]),
    )
    faults.check(
        links=[(link.source, link.target) for link in deployment.rules.links],
        names=[name for facts in deployment.nodes for name in (facts.cluster, facts.node) if name],
    )
    return msgspec.structs.replace(deployment, faults=faults)


def _source(trace: Path | None, workload: str | None) -> Path | str:
    from isthmus.core.errors import ConfigError

    if (trace is None) == (workload is None):
        raise ConfigError("--trace FILE or --workload SPEC: give one of them")
    return trace if trace is not None else str(workload)


def _notes(speed: float, spread_seed: int | None, limit: int | None) -> list[str]:
    """Changes to the workload, for readers of the figures."""
    notes = []
    if speed != 1.0:
        notes.append(f"replayed {speed:g} times as fast")
    if spread_seed is not None:
        notes.append(f"arrivals with one timestamp are spread up to the next, seed {spread_seed}")
    if limit is not None:
        notes.append(f"only the first {limit:,} requests")
    return notes


def _run(deployment: Deployment, workload: Workload, log: Path | None) -> Result:
    """The simulation, timed; with `log` also its flight recording, which `isthmus replay` reads."""
    from time import perf_counter

    from isthmus.core.conductor.events import RECORDING_FORMAT
    from isthmus.lab.sim.simulation import Simulation
    from isthmus.live.cluster.recorder import Recorder, RecordingHeader

    recorder = None if log is None else Recorder(log, RecordingHeader(RECORDING_FORMAT, deployment.rules))
    try:
        with progress_bar("simulating") as progress:
            begin = perf_counter()
            simulation = Simulation(deployment, workload, log=None if recorder is None else recorder.record)
            result = simulation.run(progress)
            result.wall_s = perf_counter() - begin
    finally:
        if recorder is not None:
            recorder.close()
    return result


@contextmanager
def progress_bar(title: str) -> Iterator[Progress | None]:
    """A callback for (done, total) that draws a bar on standard error; None if that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        heard: Callable[[int, int], None] = lambda done, total: bar.update(task, completed=done, total=total)  # noqa: E731
        yield heard


def _write_report(result: Result, summary: Summary, settings: Config, path: Path) -> None:
    import yaml

    from isthmus.lab.sim.report import write_report

    given = settings.model_dump(mode="json", exclude_unset=True)
    write_report(result, summary, yaml.safe_dump(given, sort_keys=False), path)
