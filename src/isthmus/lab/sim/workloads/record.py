"""Workload of a flight recording: the requests that a live cluster was asked to serve, when they came.

Reads the recorder's JSON lines by their field names, since this room does not know the live cluster's types.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from pathlib import Path

import msgspec

from isthmus.core.conductor import PromptContent
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads.lines import trace_name, wrong_line
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE, Replay, Request, Workload


class _Header(msgspec.Struct, frozen=True):
    format: int
    rules: msgspec.Raw


class _RecordedLine(msgspec.Struct, frozen=True):
    at_ns: int
    event: msgspec.Raw


class _Kind(msgspec.Struct, frozen=True):
    type: str


class _Joined(msgspec.Struct, frozen=True):
    block_size: int


class _Arrived(msgspec.Struct, frozen=True):
    request: str
    tenant: str
    num_tokens: int
    max_tokens: int
    names: tuple[str | int, ...]
    priority: int = 0
    ttft_ms: int | None = None
    tbt_ms: int | None = None
    content: PromptContent | None = None


class _Ended(msgspec.Struct, frozen=True):
    request: str
    num_generated: int = 0


def read(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """The requests of a recording; block names become numbers, a last partial block gets one of its own.

    A request that did not end (refused, cancelled, failed) would have generated nobody knows how much: it
    counts with the mean of those that did, within its own limit. Raises ConfigError with the number of the
    line at fault.
    """
    replay.refuse_spread(path)
    try:
        version = msgspec.json.decode(lines[0], type=_Header).format
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise wrong_line(path, 1, f"no recording header: {error}") from None
    if version != RECORDING_FORMAT:
        raise wrong_line(path, 1, f"recording format {version}; this version reads {RECORDING_FORMAT}")
    recording = _Recording()
    for number, line in enumerate(lines[1:], start=2):
        try:
            recording.take(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise wrong_line(path, number, f"no line of a recording: {error}") from None
        except ConfigError as error:
            raise wrong_line(path, number, str(error)) from None
    return recording.workload(path, replay)


class _Recording:
    """What has been read of a recording so far."""

    def __init__(self) -> None:
        self._line = msgspec.json.Decoder(_RecordedLine)
        self._kind = msgspec.json.Decoder(_Kind)
        self._joined = msgspec.json.Decoder(_Joined)
        self._request = msgspec.json.Decoder(_Arrived)
        self._ended = msgspec.json.Decoder(_Ended)
        self._block_size: int | None = None
        self._arrived: dict[str, tuple[int, _Arrived]] = {}
        self._generated: dict[str, int] = {}

    def take(self, text: bytes) -> None:
        line = self._line.decode(text)
        kind = self._kind.decode(line.event).type
        if kind == "NodeJoined":
            self._take_joined(self._joined.decode(line.event))
        elif kind == "RequestArrived":
            self._take_arrived(line.at_ns, self._request.decode(line.event))
        elif kind == "RequestEnded":
            self._take_ended(self._ended.decode(line.event))

    def _take_joined(self, event: _Joined) -> None:
        if event.block_size < 1:
            raise ConfigError(f"NodeJoined with blocks of {event.block_size} tokens")
        if self._block_size not in (None, event.block_size):
            raise ConfigError(
                f"blocks of {event.block_size} tokens after {self._block_size}; expected one size"
            )
        self._block_size = event.block_size

    def _take_arrived(self, at_ns: int, event: _Arrived) -> None:
        if event.request in self._arrived:
            raise ConfigError(f"request {event.request} arrives a second time")
        if event.num_tokens < 1:
            raise ConfigError(
                f"request {event.request} has {event.num_tokens} prompt tokens; expected at least 1"
            )
        if event.names and self._block_size is None:
            raise ConfigError("block names before any node has said its block size")
        if event.names and self._block_size and len(event.names) != event.num_tokens // self._block_size:
            raise ConfigError(
                f"request {event.request} names {len(event.names)} blocks; {event.num_tokens} tokens "
                f"have {event.num_tokens // self._block_size} full blocks of {self._block_size}"
            )
        if self._arrived and at_ns < next(reversed(self._arrived.values()))[0]:
            raise ConfigError(f"request {event.request} arrives before the one above")
        self._arrived[event.request] = (at_ns, event)

    def _take_ended(self, event: _Ended) -> None:
        if event.request not in self._arrived:
            raise ConfigError(f"request {event.request} ends but never arrived")
        if event.num_generated < 1:
            raise ConfigError(
                "RequestEnded without num_generated: no output lengths in this recording; make a new one"
            )
        self._generated[event.request] = event.num_generated

    def workload(self, path: Path, replay: Replay) -> Workload:
        if not self._generated:
            raise ConfigError(f"{path}: no request of this recording ended; output lengths are not known")
        taken = list(self._arrived.values())[: replay.limit]
        arrivals = replay.arrivals([at_ns - taken[0][0] for at_ns, _ in taken])
        mean = max(1, round(sum(self._generated.values()) / len(self._generated)))
        size = self._block_size or PLAIN_BLOCK_SIZE
        numbers = count()
        ids: defaultdict[str | int, int] = defaultdict(numbers.__next__)
        requests = []
        for arrival, (_, event) in zip(arrivals, taken, strict=True):
            blocks = [ids[name] for name in event.names]
            if blocks and event.num_tokens % size:
                blocks.append(next(numbers))
            output = self._generated.get(event.request) or max(1, min(mean, event.max_tokens))
            requests.append(
                Request(
                    arrival,
                    event.num_tokens,
                    output,
                    tuple(blocks),
                    event.tenant,
                    event.priority,
                    event.ttft_ms,
                    event.tbt_ms,
                    content=event.content,
                )
            )
        return Workload(trace_name(path), size, requests)
