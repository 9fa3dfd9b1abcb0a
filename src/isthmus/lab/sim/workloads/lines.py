"""Files of one record a line: unpacking, fields, and errors with the number of the line.

Traces come as tools write them: packed, with a byte order mark, numbers as 374.0 or in quotes. Everything readable is
read; `Notes` keeps what was left out or made up.
"""

from __future__ import annotations

import gzip
import io
import math
import re
import zlib
from collections import Counter
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from isthmus.core.errors import ConfigError

MAX_UNPACKED = 1 << 30
"""Bytes that a packed file may unpack to."""
_GZIP = b"\x1f\x8b"
_OTHERS = {b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd", b"\xfd7zXZ": "xz", b"BZh": "bzip2"}
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_UTF8_MARK = b"\xef\xbb\xbf"
_MAX_NAMES = 8
_MAX_TIME = 1 << 63
_DATE = re.compile(
    r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d)?)(?:[.,](\d{1,9}))? ?(Z|UTC|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_UNIX = (
    ("nanoseconds", 10**18, 1),
    ("microseconds", 10**15, 1000),
    ("milliseconds", 10**12, 10**6),
    ("seconds", 10**9, 10**9),
)
"""Units of Unix times: the smallest number since 2001, and the unit in ns."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)

Record = TypeVar("Record")


class Notes:
    """Notes on fields that a reader left out or made up, in one line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ignored: Counter[str] = Counter()
        self._said: Counter[str] = Counter()

    def ignore(self, field: str, count: int = 1) -> None:
        self._ignored[field] += count

    def say(self, what: str, count: int = 1) -> None:
        """Notes that `what` was made up or changed in `count` lines."""
        self._said[what] += count

    def lines(self) -> tuple[str, ...]:
        """One line, or none if all was read as it stands."""
        names = [f"{_shown(name)} ({_count(count)})" for name, count in self._ignored.most_common(_MAX_NAMES)]
        if len(self._ignored) > _MAX_NAMES:
            names.append(f"and {len(self._ignored) - _MAX_NAMES} more")
        said = [f"{what} ({_count(count)})" for what, count in self._said.items()]
        parts = [*([f"ignored {', '.join(names)}"] if names else []), *said]
        return (f"{self._path.name}: {'; '.join(parts)}",) if parts else ()


def _count(lines: int) -> str:
    return f"{lines:,} line{'s' * (lines != 1)}"


def _shown(name: str) -> str:
    return name if name.isprintable() and 0 < len(name) <= 40 else repr(name[:40])


def trace_name(path: Path) -> str:
    """Name of a trace file without its suffixes."""
    return Path(path.stem).stem if path.suffix == ".gz" else path.stem


def read_lines(path: Path) -> list[bytes]:
    """The lines of a file, perhaps packed by gzip, in UTF-8 without their ends; blank ones too, but at the end.

    Raises ConfigError for one that cannot be read or is empty.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if data.startswith(_GZIP):
        data = _unpacked(path, data)
    for magic, name in _OTHERS.items():
        if data.startswith(magic):
            raise ConfigError(f"{path}: is packed by {name}; unpack it, or pack it by gzip")
    if data.startswith(_UTF16):
        try:
            data = data.decode("utf-16").encode()
        except UnicodeError as error:
            raise ConfigError(f"{path}: begins as UTF-16, but is none: {error}") from None
    lines = data.removeprefix(_UTF8_MARK).splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ConfigError(f"{path}: empty; it should hold one request a line")
    return lines


def _unpacked(path: Path, data: bytes) -> bytes:
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            found = file.read(MAX_UNPACKED + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: packed by gzip, but damaged: {error}") from None
    if len(found) > MAX_UNPACKED:
        raise ConfigError(f"{path}: unpacks to more than {MAX_UNPACKED >> 30} GiB; unpack it and cut it")
    return found


def wrong_line(path: Path, number: int, what: str) -> ConfigError:
    """The error for line `number`, counted from 1."""
    return ConfigError(f"{path}:{number}: {what}")


def whole(name: str, value: Any, least: int | None = None) -> int:
    """A whole number that was written as 374, 374.0 or "374". Raises ValueError for others, and for smaller ones than
    `least`."""
    if isinstance(value, str) and value.isdigit() and value.isascii() and len(value) < 20:
        value = int(value)  # nearly always so
    found = _number(value.strip()) if isinstance(value, str) else value
    if isinstance(found, float) and found.is_integer():
        found = int(found)
    if not isinstance(found, int) or isinstance(found, bool) or (least is not None and found < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} {_quoted(value)} is not a whole number{bound}")
    return found


def is_unix(time: float) -> bool:
    """Whether a number is a Unix time (since 2001); times from a trace's own start are smaller."""
    return time >= _UNIX[-1][1]


class TraceClock:
    """The times of a trace in ns: of dates and Unix times since 1970, of others as they count.

    `unit_ns`: of a number that is no Unix time. One that is tells its unit by its size, and the first one decides.
    """

    def __init__(self, name: str, unit_ns: int, notes: Notes) -> None:
        self._name, self.unit_ns, self._notes, self._has_unit = name, unit_ns, notes, False

    def ns(self, value: Any) -> int:
        """Raises ValueError for what is no time."""
        if isinstance(value, str):
            text = value.strip()
            if (match := _DATE.fullmatch(text)) is not None:
                second, fraction, zone = match.groups("")
                return _date_ns(second, zone) + int(f"{fraction:0<9}")
            value = _number(text)
            if value is None:
                raise ValueError(
                    f"{self._name} {_quoted(text)} is not like 2023-11-16 18:17:03.9799600, and no number"
                )
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MAX_TIME:
            raise ValueError(f"{self._name} {_quoted(value)} is no time, a number from 0 on")
        if not self._has_unit:
            self._has_unit = True
            self._take_unit(value)
        units, part = divmod(value, 1)
        return int(units) * self.unit_ns + round(part * self.unit_ns)

    def _take_unit(self, first: float) -> None:
        for unit, least, unit_ns in _UNIX:
            if first >= least:
                if unit_ns != self.unit_ns:
                    self._notes.say(f"{self._name} in {unit} since 1970, as its size says")
                self.unit_ns = unit_ns
                return


@lru_cache(maxsize=4096)  # many requests come in one second
def _date_ns(second: str, zone: str) -> int:
    try:
        date = datetime.fromisoformat(second + (zone if zone not in ("", "UTC") else "Z"))
        return (date - _EPOCH) // _SECOND * 1_000_000_000
    except ValueError as error:
        raise ValueError(f"no such date as {second}: {error}") from None


def _number(text: str) -> int | float | None:
    """A number in decimal digits, None for any other text."""
    try:
        found = float(text) if text.isascii() and "_" not in text else math.nan
    except ValueError:
        return None
    if not math.isfinite(found):
        return None
    return int(text) if text.isdigit() and len(text) < 20 else found


def _quoted(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def in_order(times_ns: list[int], records: list[Record], notes: Notes) -> tuple[list[int], list[Record]]:
    """Both sorted by time, from 0 on."""
    if times_ns != sorted(times_ns):
        late = sum(after < before for before, after in pairwise(times_ns))
        notes.say("earlier than the line above, so sorted by time", late)
        order = sorted(range(len(times_ns)), key=times_ns.__getitem__)
        times_ns, records = [times_ns[at] for at in order], [records[at] for at in order]
    start = times_ns[0]
    return ([time - start for time in times_ns] if start else times_ns), records
