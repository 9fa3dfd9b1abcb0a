"""Traces as Azure publishes them (AzurePublicDataset, LLM inference): CSV, one request a line, sorted by time.

Columns `TIMESTAMP` (UTC, up to ns), `ContextTokens`, `GeneratedTokens` (0 counts as 1, since every prefill
makes one). They say nothing of prefixes, so no request shares any.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

from isthmus.sim.workloads.lines import read_lines, wrong_line
from isthmus.sim.workloads.workload import PLAIN_BLOCK_SIZE, Replay, Request, Workload

HEADER = b"TIMESTAMP,ContextTokens,GeneratedTokens"

_TIME = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND = timedelta(seconds=1)


def read(path: Path, replay: Replay) -> Workload:
    """A trace file as a workload.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    replay.refuse_spread(path)
    header, *lines = read_lines(path)
    if header.removeprefix(b"\xef\xbb\xbf").strip() != HEADER:
        raise wrong_line(path, 1, f"the first line should be {HEADER.decode()}")
    if not lines:
        raise wrong_line(path, 2, "no request follows the header")
    times: list[int] = []
    lengths: list[tuple[int, int]] = []
    for number, line in enumerate(lines[: replay.limit], start=2):
        try:
            time, num_tokens, output_tokens = _request(line)
        except ValueError as error:
            raise wrong_line(path, number, str(error)) from None
        if times and time < times[-1]:
            raise wrong_line(path, number, "earlier than the line above; sort the trace by time")
        times.append(time)
        lengths.append((num_tokens, output_tokens or 1))
    arrivals = replay.arrivals([time - times[0] for time in times])
    requests = [
        Request(arrival, num_tokens, output_tokens)
        for arrival, (num_tokens, output_tokens) in zip(arrivals, lengths, strict=True)
    ]
    return Workload(path.stem, PLAIN_BLOCK_SIZE, requests)


def _request(line: bytes) -> tuple[int, int, int]:
    """Time in ns since 1970, tokens in and out. Raises ValueError saying what is wrong."""
    fields = line.decode(errors="replace").split(",")
    if len(fields) != 3:
        raise ValueError(f"{len(fields)} fields; expected TIMESTAMP,ContextTokens,GeneratedTokens")
    num_tokens = _tokens("ContextTokens", fields[1], 1)
    return _time_ns(fields[0].strip()), num_tokens, _tokens("GeneratedTokens", fields[2], 0)


def _time_ns(text: str) -> int:
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueError(f"TIMESTAMP {text!r} is not like 2023-11-16 18:17:03.9799600")
    second, fraction, zone = match.groups()
    try:
        seconds = (datetime.fromisoformat(second + (zone or "+00:00")) - _EPOCH) // _SECOND
    except ValueError as error:
        raise ValueError(f"TIMESTAMP {text!r}: {error}") from None
    return seconds * 1_000_000_000 + int((fraction or "").ljust(9, "0"))


def _tokens(column: str, text: str, least: int) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < least:
        raise ValueError(f"{column} {digits!r} is not a whole number of at least {least}")
    return int(digits)
