"""Traces of requests as CSV: Azure's (AzurePublicDataset, LLM inference), BurstGPT's, and what simulators take.

One request a line, of three columns: when it came, tokens in, tokens out (0, or none given, counts as 1, since every
prefill makes one); other columns are ignored. Times are dates (UTC, up to ns) or seconds. Such traces say nothing of
prefixes, so no request shares any.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import msgspec

from isthmus.sim.workloads.lines import Notes, in_order, time_ns, trace_name, whole, wrong_line
from isthmus.sim.workloads.workload import PLAIN_BLOCK_SIZE, Replay, Request, Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_TIMES = ("timestamp", "arrivedat", "arrivaltime", "arrivaltimestamp")
_INPUTS = ("contexttokens", "requesttokens", "numprefilltokens", "promptsize")
_OUTPUTS = ("generatedtokens", "responsetokens", "numdecodetokens", "tokensize")
"""Names of columns: of Azure, BurstGPT, Vidur, splitwise-sim; less spaces, _ and upper case."""
_DELIMITERS = ",;\t|"
_SECOND = 1_000_000_000


class _Columns(msgspec.Struct, frozen=True):
    """Names of all columns, and which has what; `output`: None where there is none."""

    names: Sequence[str]
    time: int
    input: int
    output: int | None


def read(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """A trace file's lines as a workload.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    replay.refuse_spread(path)
    notes = Notes(path)
    start = next(number for number, line in enumerate(lines) if line.strip())
    delimiter = _delimiter(lines[start])
    columns = columns_of(lines[start])
    if columns is None:
        raise wrong_line(path, start + 1, f"the first line should be {HEADER}")
    rows = csv.reader(
        (line.decode(errors="replace") for line in lines[start + 1 :]),
        delimiter=delimiter,
        skipinitialspace=True,
    )
    times: list[int] = []
    lengths: list[tuple[int, int]] = []
    number = start + 2
    try:
        for row in rows:
            if len(times) == replay.limit:
                break
            if any(row):
                times.append(_time(columns, row))
                lengths.append(_lengths(columns, row, notes))
            number = start + 2 + rows.line_num
    except (csv.Error, ValueError) as error:
        raise wrong_line(path, number, str(error)) from None
    if not times:
        raise wrong_line(path, start + 2, "no request follows the header")
    for at, name in enumerate(columns.names):
        if name and at not in (columns.time, columns.input, columns.output):
            notes.ignore(name, len(times))
    times, lengths = in_order(times, lengths, notes)
    requests = [
        Request(arrival, num_tokens, output_tokens or 1)
        for arrival, (num_tokens, output_tokens) in zip(replay.arrivals(times), lengths, strict=True)
    ]
    return Workload(trace_name(path), PLAIN_BLOCK_SIZE, requests, notes.lines())


def columns_of(header: bytes) -> _Columns | None:
    """None for a first line that names no column with times and one with tokens in, or any of them twice."""
    text = header.decode(errors="replace")
    try:
        names = [
            name.strip()
            for name in next(csv.reader([text], delimiter=_delimiter(header), skipinitialspace=True))
        ]
    except (csv.Error, StopIteration):
        return None
    plain = ["".join(filter(str.isalnum, name)).lower() for name in names]
    found = [[at for at, name in enumerate(plain) if name in kind] for kind in (_TIMES, _INPUTS, _OUTPUTS)]
    if [len(each) for each in found] not in ([1, 1, 1], [1, 1, 0]):
        return None
    return _Columns(names, found[0][0], found[1][0], found[2][0] if found[2] else None)


def _delimiter(header: bytes) -> str:
    text = header.decode(errors="replace")
    return max(_DELIMITERS, key=text.count)


def _time(columns: _Columns, row: list[str]) -> int:
    width = len(columns.names)
    if len(row) < width or any(row[width:]):  # a short line was cut, so that its last number may be, too
        raise ValueError(f"{len(row)} fields; expected {','.join(columns.names)}")
    return time_ns(columns.names[columns.time], row[columns.time], _SECOND)


def _lengths(columns: _Columns, row: list[str], notes: Notes) -> tuple[int, int]:
    num_tokens = whole(columns.names[columns.input], row[columns.input], 1)
    if columns.output is None or not row[columns.output].strip():
        notes.say("without tokens out, taken as 1")
        return num_tokens, 1
    return num_tokens, whole(columns.names[columns.output], row[columns.output], 0)
