"""Traces of requests as CSV: Azure's (AzurePublicDataset, LLM inference), BurstGPT's, and what simulators take.

One request a line, of three columns: when it came, tokens in, tokens out (0, or none given, counts as 1, since every
prefill makes one); other columns are ignored. Times are dates (UTC, up to ns), seconds, or Unix times. Such traces say
nothing of prefixes, so no request shares any.
"""

from __future__ import annotations

import csv
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import record
from isthmus.lab.sim.workloads.generators import ARRIVALS, generate, is_spec
from isthmus.lab.sim.workloads.lines import (
    Notes,
    TraceClock,
    in_order,
    is_unix,
    read_lines,
    trace_name,
    whole,
    wrong_line,
)
from isthmus.lab.sim.workloads.workload import AS_IT_STANDS, PLAIN_BLOCK_SIZE, Replay, Request, Workload

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


def read_azure(path: Path, lines: list[bytes], replay: Replay) -> Workload:
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


# Traces as Mooncake publishes them (FAST'25 release): one JSON object a line.
#
# | field | meaning |
# | --- | --- |
# | `timestamp` | arrival in ms, perhaps with a fraction, or a date, or a Unix time; the first counts as 0 |
# | `input_length` | prompt tokens |
# | `output_length` | generated tokens; 0, or none given, counts as 1, since every prefill makes one |
# | `hash_ids` | one id per block of the prompt, the last block perhaps partial; none given: the prompt shares nothing |
#
# and, of ours, all optional: `tenant`, `priority`, `ttft_slo_ms`, `tbt_slo_ms`, and `block_size` (tokens per id).
# Other fields are ignored, but Qwen's `parent_chat_id` means times in seconds. A trace is decoded as published, in
# one go; only if that fails line by line, as people bring it.


BLOCK_SIZE = 512
"""Tokens per id in the published traces."""
_MS, _S = 1_000_000, 1_000_000_000
_SIZES = [1 << power for power in range(21)]
_WHOLE = {"priority": None, "ttft_slo_ms": 1, "tbt_slo_ms": 1, "block_size": 1}
"""Optional fields that are whole numbers, and the least they may be."""

_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _MooncakeLine(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    timestamp: _Whole
    input_length: _Positive
    output_length: _Whole
    hash_ids: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    ttft_slo_ms: _Positive | None = None
    tbt_slo_ms: _Positive | None = None
    block_size: _Positive | None = None


class _Read(msgspec.Struct, frozen=True):
    times_ns: list[int]
    lines: list[_MooncakeLine]
    block_size: int


def read_mooncake(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """A trace file's lines as a workload.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    notes = Notes(path)
    read_mooncake = _as_published(lines[: replay.limit]) or _as_brought(path, lines, replay.limit, notes)
    times, requests = in_order(read_mooncake.times_ns, read_mooncake.lines, notes)
    found = [
        Request(
            arrival,
            line.input_length,
            line.output_length or 1,
            line.hash_ids,
            line.tenant,
            line.priority,
            line.ttft_slo_ms,
            line.tbt_slo_ms,
        )
        for arrival, line in zip(replay.arrivals(times), requests, strict=True)
    ]
    return Workload(trace_name(path), read_mooncake.block_size, found, notes.lines(), exact=False)


def _as_published(texts: list[bytes]) -> _Read | None:
    """None for what is not exactly as published: as one array a good trace is read in two thirds of the time."""
    try:
        lines = msgspec.json.decode(b"[" + b",".join(texts) + b"]", type=list[_MooncakeLine])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if len(lines) != len(texts) or is_unix(lines[0].timestamp):
        return None
    size = lines[0].block_size or BLOCK_SIZE
    for line in lines:
        ids = line.hash_ids
        if (
            len(ids) != -(-line.input_length // size)
            or (line.block_size or size) != size
            or len(set(ids)) != len(ids)
        ):
            return None
    return _Read([line.timestamp * _MS for line in lines], lines, size)


def _as_brought(path: Path, texts: list[bytes], limit: int | None, notes: Notes) -> _Read:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    clock = TraceClock("timestamp", _MS, notes)
    times: list[int] = []
    lines: dict[int, _MooncakeLine] = {}
    names: dict[str, int] = {}
    for number, text in enumerate(texts, start=1):
        if len(lines) == limit:
            break
        if not text.strip():
            continue
        try:
            fields = {name: value for name, value in decode(text).items() if value not in (None, [])}
            for name in ("timestamp", "input_length"):
                if name not in fields:
                    raise ValueError(f"missing required field `{name}`")
            if not lines and "parent_chat_id" in fields:
                clock = TraceClock("timestamp", _S, notes)
                notes.say("timestamp in seconds, as in Qwen's traces")
            time = fields["timestamp"]
            times.append(clock.ns(time))
            if isinstance(time, float) and clock.unit_ns == _MS and not is_unix(time):
                notes.say("with a fraction in timestamp, taken as milliseconds")  # some traces have seconds
            lines[number] = _line(fields, names, notes)
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
            hint = "; expected one JSON object a line" if isinstance(error, msgspec.DecodeError) else ""
            raise wrong_line(path, number, f"no request of a Mooncake trace: {error}{hint}") from None
    size = _block_size(path, lines, notes)
    for number, line in lines.items():
        if line.hash_ids and len(line.hash_ids) != -(-line.input_length // size):
            raise wrong_line(
                path,
                number,
                f"hash_ids has {len(line.hash_ids)} ids; input_length {line.input_length} "
                f"in blocks of {size} tokens makes {-(-line.input_length // size)}",
            )
    return _Read(times, list(lines.values()), size)


def _line(fields: dict[str, Any], names: dict[str, int], notes: Notes) -> _MooncakeLine:
    """`names`: numbers of ids that are texts. Raises ValueError."""
    for name in fields:
        if name not in _MooncakeLine.__struct_fields__:
            notes.ignore(name)
    if "output_length" not in fields:
        notes.say("without output_length, taken as 1")
    if "hash_ids" not in fields:
        notes.say("without hash_ids, sharing nothing")
    tenant = fields.get("tenant", "")
    if not isinstance(tenant, str | int | float):
        raise ValueError("tenant is no name")
    return _MooncakeLine(
        0,
        whole("input_length", fields["input_length"], 1),
        whole("output_length", fields.get("output_length", 1), 0),
        _ids(fields["hash_ids"], names) if "hash_ids" in fields else (),
        str(tenant),
        **{name: whole(name, fields[name], least) for name, least in _WHOLE.items() if name in fields},
    )


def _ids(given: Any, names: dict[str, int]) -> tuple[int, ...]:
    if not isinstance(given, list):
        raise ValueError("hash_ids is no list of ids, one for each block of the prompt")
    # Numbers below 0 for ids that are texts, so that they are equal to none that is a number.
    ids = [
        names.setdefault(each, ~len(names)) if isinstance(each, str) else whole("hash_ids", each)
        for each in given
    ]
    if len(set(ids)) != len(ids):
        raise ValueError("hash_ids has an id twice; an id stands for one block and all before it")
    return tuple(ids)


def _block_size(path: Path, lines: dict[int, _MooncakeLine], notes: Notes) -> int:
    """Tokens per id: as the trace says, else as published, else the one power of two that fits all of its lines."""
    given = {line.block_size: number for number, line in lines.items() if line.block_size}
    if len(given) > 1:
        (first, _), (other, number), *_ = given.items()
        raise wrong_line(path, number, f"block_size {other} after {first}; a trace has one block size")
    if given:
        return int(next(iter(given)) or BLOCK_SIZE)
    counts = [(line.input_length, len(line.hash_ids)) for line in lines.values() if line.hash_ids]
    fitting = [
        size for size in _SIZES if all(-(-num_tokens // size) == num_ids for num_tokens, num_ids in counts)
    ]
    if len(fitting) == 1 and fitting[0] != BLOCK_SIZE:
        notes.say(f"in blocks of {fitting[0]} tokens, as lengths and hash_ids say", len(counts))
        return fitting[0]
    return BLOCK_SIZE


# One entry for every source of requests.


def load(source: str | Path, replay: Replay = AS_IT_STANDS) -> Workload:
    """The workload of a specification (`poisson:rate=8,...`) or of a file, whose first line tells what it is.

    Raises ConfigError, one line.
    """
    if isinstance(source, str) and is_spec(source):
        return _generated(source, replay)
    path = Path(source)
    lines = read_lines(path)
    first = next(filter(bytes.strip, lines)).lstrip()
    if first.startswith(b"{") and b'"rules"' in first:
        return record.read(path, lines, replay)
    if first.startswith(b"{") or not {".json", ".jsonl"}.isdisjoint(path.suffixes):
        return read_mooncake(path, lines, replay)
    if columns_of(first) or ".csv" in path.suffixes:
        return read_azure(path, lines, replay)
    raise ConfigError(
        f"{path}: no workload; expected a Mooncake trace (one JSON object a line), an Azure trace (CSV with "
        f"{HEADER}), a flight recording, or in place of a file {', '.join(ARRIVALS)} and a colon"
    )


def _generated(source: str, replay: Replay) -> Workload:
    replay.refuse_spread(source)
    return replayed(generate(source), replay)


def replayed(workload: Workload, replay: Replay) -> Workload:
    """A workload that was loaded as it stands, as `load` would give it for this replay."""
    requests = workload.requests[: replay.limit]
    arrivals = replay.arrivals([request.arrival_ns for request in requests])
    if replay.speed != 1.0 or replay.spread_seed is not None:
        requests = [
            msgspec.structs.replace(request, arrival_ns=arrival)
            for arrival, request in zip(arrivals, requests, strict=True)
        ]
    return msgspec.structs.replace(workload, requests=requests)
