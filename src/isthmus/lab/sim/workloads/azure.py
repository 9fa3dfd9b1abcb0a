"""Traces of requests as CSV: Azure's (AzurePublicDataset, LLM inference), BurstGPT's, and what simulators take.

One request a line, of three columns: when it came, tokens in, tokens out (0, or none given, counts as 1, since every
prefill makes one); other columns are ignored. Times are dates (UTC, up to ns), seconds, or Unix times. Such traces say
nothing of prefixes, so no request shares any.
"""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path

import msgspec

from isthmus.lab.sim.workloads.lines import Notes, TraceClock, in_order, trace_name, whole, wrong_line
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE, Replay, Request, Workload

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_KINDS = (
    ("timestamp", "arrivedat", "arrivaltime", "arrivaltimestamp"),
    ("contexttokens", "requesttokens", "numprefilltokens", "promptsize", "inputtokens", "prompttokens"),
    ("generatedtokens", "responsetokens", "numdecodetokens", "tokensize", "outputtokens", "completiontokens"),
)
"""Names of columns with times, tokens in and tokens out: of Azure, BurstGPT, Vidur, splitwise-sim, OpenAI's usage; less
spaces, _ and upper case."""
_DELIMITERS = ",;\t|"
_SECOND = 1_000_000_000


class _TraceColumns(msgspec.Struct, frozen=True):
    """Names of all columns, and which has what; `output`: None where there is none."""

    names: list[str]
    delimiter: str
    time: int
    input: int
    output: int | None


def read(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """A trace file's lines as a workload.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    replay.refuse_spread(path)
    notes = Notes(path)
    start = next(number for number, line in enumerate(lines, start=1) if line.strip())
    columns = columns_of(lines[start - 1])
    if columns is None:
        raise wrong_line(path, start, f"the first line should be {HEADER}")
    times, lengths = _rows(path, lines, start, columns, replay.limit, notes)
    for at, name in enumerate(columns.names):
        if name and at not in (columns.time, columns.input, columns.output):
            notes.ignore(name, len(times))
    times, lengths = in_order(times, lengths, notes)
    requests = [
        Request(arrival, num_tokens, output_tokens or 1)
        for arrival, (num_tokens, output_tokens) in zip(replay.arrivals(times), lengths, strict=True)
    ]
    return Workload(trace_name(path), PLAIN_BLOCK_SIZE, requests, notes.lines())


def columns_of(header: bytes) -> _TraceColumns | None:
    """None for a first line that names no column with times and one with tokens in, or any of them twice."""
    text = header.decode(errors="replace")
    delimiter = max(_DELIMITERS, key=text.count)
    names = [name.strip() for name in next(csv.reader([text], delimiter=delimiter, skipinitialspace=True))]
    plain = ["".join(filter(str.isalnum, name)).lower() for name in names]
    found = [[at for at, name in enumerate(plain) if name in kind] for kind in _KINDS]
    if [len(each) for each in found] not in ([1, 1, 1], [1, 1, 0]):
        return None
    (time,), (tokens_in,), tokens_out = found
    return _TraceColumns(names, delimiter, time, tokens_in, tokens_out[0] if tokens_out else None)


def _rows(
    path: Path, lines: list[bytes], start: int, columns: _TraceColumns, limit: int | None, notes: Notes
) -> tuple[list[int], list[tuple[int, int]]]:
    """Times, and tokens in and out, of the lines after line `start`."""
    text = StringIO(b"\n".join(lines[start:]).decode(errors="replace"))
    rows = csv.reader(text, delimiter=columns.delimiter, skipinitialspace=True, strict=True)
    names, width = columns.names, len(columns.names)
    at_time, at_input, at_output = columns.time, columns.input, columns.output
    clock = TraceClock(names[at_time], _SECOND, notes)
    times: list[int] = []
    lengths: list[tuple[int, int]] = []
    number = start + 1
    try:
        for row in rows:
            if len(times) == limit:
                break
            if not any(row):
                number = start + 1 + rows.line_num
                continue
            if len(row) != width and (
                len(row) < width or any(row[width:])
            ):  # one cut short may have lost digits, too
                raise ValueError(f"{len(row)} fields; expected {','.join(names)}")
            times.append(clock.ns(row[at_time]))
            tokens_in = whole(names[at_input], row[at_input], 1)
            if at_output is None or not row[at_output]:
                notes.say("without tokens out, taken as 1")
                lengths.append((tokens_in, 1))
            else:
                lengths.append((tokens_in, whole(names[at_output], row[at_output], 0)))
            number = start + 1 + rows.line_num
    except (csv.Error, ValueError) as error:
        raise wrong_line(path, number, str(error)) from None
    if not times:
        raise wrong_line(path, start + 1, "no request follows the header")
    return times, lengths
