"""Real English texts: those of a file, or what the standard library says of itself, which is always at hand."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.core.errors import ConfigError

MODULES = """
argparse asyncio base64 bisect calendar collections configparser contextlib copy csv datetime decimal
difflib email.message enum fractions functools gettext glob heapq html http.client inspect io ipaddress
itertools json logging mailbox math os pathlib queue random re sched selectors shutil socket statistics
string subprocess tarfile tempfile textwrap threading timeit tokenize unittest.case unittest.mock
urllib.parse urllib.request uuid warnings weakref xml.dom.minidom xml.etree.ElementTree zipfile
""".split()
SHORTEST, LONGEST = 120, 480
"""Characters of a text from the library: about 30 to 120 tokens."""


def texts_of(file: Path | None) -> list[str]:
    """One text for each line of the file, which is JSON with a `prompt` or the text itself; None: the library's.

    Raises ConfigError for a file that cannot be read, and for a line of JSON without a `prompt`.
    """
    if file is None:
        return library_texts()
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read as text: {error}") from None
    return [_text_of(file, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _text_of(file: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        found = json.loads(line)["prompt"]
    except (ValueError, KeyError):
        found = None
    if not isinstance(found, str):
        raise ConfigError(f'{file}, line {number}: is no JSON with a "prompt" that is text')
    return found


def library_texts() -> list[str]:
    """Docstrings of functions, classes and methods, on one line each, none twice; always in the same order."""
    found: dict[str, None] = {}
    for name in MODULES:
        for text in _docstrings(importlib.import_module(name)):
            flat = " ".join(text.split())
            if SHORTEST <= len(flat) <= LONGEST and ">>>" not in flat:
                found[flat] = None
    return list(found)


def _docstrings(module: Any) -> Iterator[str]:
    for owner in [module, *(each for each in _members(module) if inspect.isclass(each))]:
        for member in _members(owner):
            if isinstance(text := getattr(member, "__doc__", None), str):
                yield text


def _members(owner: Any) -> list[Any]:
    """Public ones in the order of their names."""
    return [
        value for name, value in sorted(vars(owner).items()) if not name.startswith("_") and callable(value)
    ]
