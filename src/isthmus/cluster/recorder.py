"""The flight recorder: every event and its actions as one JSON line, and their replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from io import BufferedWriter
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.conductor import Action, Conductor, Event, Rules
from isthmus.conductor.policies import POLICIES
from isthmus.errors import ConfigError

FORMAT = 1


class Header(msgspec.Struct, frozen=True):
    """First line of a recording."""

    format: int
    rules: Rules


class Entry(msgspec.Struct, frozen=True):
    """One event, when it came (ns, monotonic), and what the conductor answered."""

    at_ns: int
    event: Event
    actions: tuple[Action, ...]


class Tape(Protocol):
    """What keeps a recording."""

    def record(self, at_ns: int, event: Event, actions: Sequence[Action]) -> None: ...


class MemoryTape:
    """Keeps a recording in memory."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, at_ns: int, event: Event, actions: Sequence[Action]) -> None:
        self.entries.append(Entry(at_ns, event, tuple(actions)))


class Recorder:
    """Appends to a file; each line is written at once, so a crash loses at most the line under way."""

    def __init__(self, path: Path, rules: Rules) -> None:
        try:
            self._file: BufferedWriter = path.open("wb")
        except OSError as error:
            raise ConfigError(f"record: cannot write {path}: {error.strerror}") from None
        self._encoder = msgspec.json.Encoder()
        self._write(Header(FORMAT, rules))

    def record(self, at_ns: int, event: Event, actions: Sequence[Action]) -> None:
        self._write(Entry(at_ns, event, tuple(actions)))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Header | Entry) -> None:
        self._file.write(self._encoder.encode(line) + b"\n")
        self._file.flush()


def read(path: Path) -> tuple[Header, Iterator[tuple[int, Entry]]]:
    """Header and (line number, entry) pairs. Raises ConfigError naming the line that cannot be read."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not lines:
        raise ConfigError(f"{path}: empty; a recording starts with a header line")
    try:
        header = msgspec.json.decode(lines[0], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: line 1 is no recording header: {error}") from None
    if header.format != FORMAT:
        raise ConfigError(f"{path}: recording format {header.format}; this version reads {FORMAT}")
    return header, _entries(path, lines)


def _entries(path: Path, lines: Sequence[bytes]) -> Iterator[tuple[int, Entry]]:
    decoder = msgspec.json.Decoder(Entry)
    for number, line in enumerate(lines[1:], start=2):
        try:
            yield number, decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: line {number} cannot be read: {error}") from None


class Difference(msgspec.Struct, frozen=True):
    """The first line at which a replay decided otherwise."""

    line: int
    event: Event
    recorded: tuple[Action, ...]
    replayed: tuple[Action, ...]


def replay(path: Path) -> tuple[int, Difference | None]:
    """Feeds a recording to a fresh conductor. Returns (events replayed, first difference or None)."""
    header, entries = read(path)
    if header.rules.policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise ConfigError(f"{path}: line 1: policy {header.rules.policy!r} is not known; known: {known}")
    conductor = Conductor(header.rules)
    count = 0
    for number, entry in entries:
        count += 1
        actions = tuple(conductor.on(entry.event, entry.at_ns))
        if actions != entry.actions:
            return count, Difference(number, entry.event, entry.actions, actions)
    return count, None
