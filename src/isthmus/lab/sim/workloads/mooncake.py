"""Traces as Mooncake publishes them (FAST'25 release): one JSON object a line.

| field | meaning |
| --- | --- |
| `timestamp` | arrival in ms, perhaps with a fraction, or a date, or a Unix time; the first counts as 0 |
| `input_length` | prompt tokens |
| `output_length` | generated tokens; 0, or none given, counts as 1, since every prefill makes one |
| `hash_ids` | one id per block of the prompt, the last block perhaps partial; none given: the prompt shares nothing |

and, of ours, all optional: `tenant`, `priority`, `ttft_slo_ms`, `tbt_slo_ms`, and `block_size` (tokens per id). Other
fields are ignored, but Qwen's `parent_chat_id` means times in seconds. A trace is decoded as published, in one go; only
if that fails line by line, as people bring it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus.lab.sim.workloads.lines import Notes, TraceClock, in_order, is_unix, trace_name, whole, wrong_line
from isthmus.lab.sim.workloads.workload import Replay, Request, Workload

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


def read(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """A trace file's lines as a workload.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    notes = Notes(path)
    read = _as_published(lines[: replay.limit]) or _as_brought(path, lines, replay.limit, notes)
    times, requests = in_order(read.times_ns, read.lines, notes)
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
    return Workload(trace_name(path), read.block_size, found, notes.lines(), exact=False)


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
