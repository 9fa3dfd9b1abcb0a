"""`isthmus reproduce`: published tables beside ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from isthmus.lab.papers.lab import Lab
    from isthmus.lab.papers.table import Table


_STAR = "*: hangs on inputs inferred from the published results, so agreement is no independent test."


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="A table, or a paper for all of its tables; none lists them.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the rows here.")] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder with the published traces, e.g. conversation_trace.jsonl.")
    ] = None,
) -> None:
    """A published table: published, ours, difference."""
    from isthmus.cli.outputs import check_writable, show, write_bytes
    from isthmus.core.errors import ConfigError
    from isthmus.lab.papers.lab import Lab
    from isthmus.lab.papers.registry import named
    from isthmus.lab.papers.table import comparison_sheets

    check_writable("--json", json_file)
    if traces is not None and not traces.is_dir():
        raise ConfigError(f"--traces {traces}: is no folder; name the one that holds the published traces")
    if name is None:
        _list(json_file)
        return
    tables = named(name)
    lab = Lab(traces)
    rows: list[dict[str, Any]] = []
    for table in tables:
        with _status(lab):
            found = list(table.rows(lab))
        rows += found
        _head(table, starred=any(row.get("inferred") for row in found))
        show(*comparison_sheets(found))
    if json_file is not None:
        write_bytes(json_file, _as_json(rows))


def _list(json_file: Path | None) -> None:
    from isthmus.cli.outputs import show, write_bytes
    from isthmus.lab.papers.registry import PAPERS
    from isthmus.sheet import Sheet, texts

    rows: list[tuple[str | None, ...]] = []
    entries = []
    for paper, tables in PAPERS.items():
        rows.append((paper, "all of its tables", "", ""))
        for table in tables:
            traces = [trace.value for trace in table.traces]
            rows.append((table.name, table.title, table.source, ", ".join(traces) or None))
            entries.append(
                {
                    "name": table.name,
                    "paper": paper,
                    "title": table.title,
                    "source": table.source,
                    "traces": traces,
                }
            )
    show(Sheet("", texts("name", "what", "published in", "traces"), rows))
    if json_file is not None:
        write_bytes(json_file, _as_json(entries))


def _head(table: Table, *, starred: bool) -> None:
    """What is compared, how ours was measured, and what a star says if there is one."""
    star = f" {_STAR}" if starred else ""
    print(fill(f"{table.title} ({table.source}). {table.setup}{star}", 112), end="\n\n")


def _as_json(rows: list[dict[str, Any]]) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n"


@contextmanager
def _status(lab: Lab) -> Iterator[None]:
    """What runs, on standard error while that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status("measuring") as status:
        lab.report = status.update
        yield
