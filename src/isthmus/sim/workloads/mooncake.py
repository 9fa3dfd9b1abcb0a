"""Traces as Mooncake publishes them (FAST'25 release): one JSON object a line, sorted by time.

| field | meaning |
| --- | --- |
| `timestamp` | arrival, ms from the start of the trace |
| `input_length` | prompt tokens |
| `output_length` | generated tokens; 0 counts as 1, since every prefill makes one |
| `hash_ids` | one id per block of the prompt, the last block perhaps partial |

and, of ours, all optional: `tenant`, `priority`, `ttft_slo_ms`, `tbt_slo_ms`, and `block_size` (tokens per id).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from isthmus.errors import ConfigError
from isthmus.sim.workloads.lines import read_lines, wrong_line
from isthmus.sim.workloads.workload import Replay, Request, Workload

BLOCK_SIZE = 512
"""Tokens per id in the published traces."""


_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    timestamp: _Whole
    input_length: _Positive
    output_length: _Whole
    hash_ids: tuple[int, ...]
    tenant: str = ""
    priority: int = 0
    ttft_slo_ms: _Positive | None = None
    tbt_slo_ms: _Positive | None = None
    block_size: _Positive | None = None


def read(path: Path, replay: Replay, block_size: int | None = None) -> Workload:
    """A trace file as a workload. `block_size`: tokens per id, None takes the file's own, or else 512.

    Raises ConfigError with the number of the first line that is not a request, and what is wrong with it.
    """
    if block_size is not None and block_size < 1:
        raise ConfigError(f"block size: {block_size} tokens; a block holds at least 1")
    lines = _lines(path, replay.limit, block_size)
    arrivals = replay.arrivals([line.timestamp * 1_000_000 for line in lines])
    requests = [
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
        for arrival, line in zip(arrivals, lines, strict=True)
    ]
    return Workload(path.stem, block_size or lines[0].block_size or BLOCK_SIZE, requests)


def _lines(path: Path, limit: int | None, block_size: int | None) -> list[_Line]:
    lines = _decoded(path, read_lines(path)[:limit])
    size = block_size or lines[0].block_size or BLOCK_SIZE
    previous = 0
    for number, line in enumerate(lines, start=1):
        # One test for what every good line passes; only a bad one is asked what it is.
        if (
            line.timestamp < previous
            or len(line.hash_ids) != -(-line.input_length // size)
            or (line.block_size or size) != size
            or len(set(line.hash_ids)) != len(line.hash_ids)
        ):
            raise wrong_line(path, number, _complaint(line, previous, size))
        previous = line.timestamp
    return lines


def _decoded(path: Path, texts: list[bytes]) -> list[_Line]:
    # As one array a good trace is read in two thirds of the time; a bad one is then read again to find the
    # line.
    try:
        lines = msgspec.json.decode(b"[" + b",".join(texts) + b"]", type=list[_Line])
        if len(lines) == len(texts):
            return lines
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    decode = msgspec.json.Decoder(_Line).decode
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(decode(text))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            reason = str(error) if text.strip() else "the line is empty"
            raise wrong_line(path, number, f"no request of a Mooncake trace: {reason}") from None
    return lines


def _complaint(line: _Line, previous: int, size: int) -> str:
    if line.timestamp < previous:
        return f"timestamp {line.timestamp} is before {previous} of the line above; sort the trace by time"
    if (line.block_size or size) != size:
        return f"block_size {line.block_size} after {size}; a trace has one block size"
    if len(set(line.hash_ids)) != len(line.hash_ids):
        return "hash_ids has an id twice; an id stands for one block and all before it"
    expected = -(-line.input_length // size)
    return (
        f"hash_ids has {len(line.hash_ids)} ids; input_length {line.input_length} "
        f"in blocks of {size} tokens makes {expected}"
    )
