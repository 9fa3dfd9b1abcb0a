"""`isthmus compare`: two results beside each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def compare(
    first: Annotated[Path, typer.Argument(help="What --json of simulate wrote, or of another verb.")],
    second: Annotated[Path, typer.Argument(help="Another result of the same verb.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the table here.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write an HTML page with both in each chart here.")
    ] = None,
) -> None:
    """Two results beside each other: value, value, difference in percent."""
    from isthmus.cli.outputs import check_writable, show, write_bytes, write_json
    from isthmus.lab.sim.report.report import comparison_page, comparison_sheet

    for option, file in (("--json", json_file), ("--html", html)):
        check_writable(option, file)
    results = {f"{letter}: {file.name}": _read(file) for letter, file in (("A", first), ("B", second))}
    sheet = comparison_sheet(results)
    page = None if html is None else comparison_page(results)
    if json_file is not None:
        write_json(json_file, sheet.as_json())
    if html is not None and page is not None:
        write_bytes(html, page.encode())
    show(sheet)


def _read(file: Path) -> Any:
    """A result. Raises ConfigError."""
    import msgspec

    from isthmus.core.errors import ConfigError

    hint = "name what --json of a verb wrote"
    try:
        found = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; {hint}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file}: is no JSON: {error}; {hint}") from None
    if not isinstance(found, dict | list):
        raise ConfigError(f"{file}: is {found!r:.40}, which holds no figures; {hint}")
    return found
