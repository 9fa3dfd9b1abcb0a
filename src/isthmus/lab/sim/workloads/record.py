"""Workload of a flight recording: the requests of a live cluster, at their arrival times."""

from __future__ import annotations

from collections import defaultdict
from itertools import count
from pathlib import Path

import msgspec

from isthmus.core.conductor import Event, FirstToken, NodeJoined, RequestArrived, RequestEnded
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import ConfigError
from isthmus.core.types import BlockName, RequestId
from isthmus.lab.sim.workloads.lines import trace_name, wrong_line
from isthmus.lab.sim.workloads.workload import PLAIN_BLOCK_SIZE, Measured, Replay, Request, Workload


class _Header(msgspec.Struct, frozen=True):
    format: int
    rules: msgspec.Raw


class _RecordedLine(msgspec.Struct, frozen=True):
    at_ns: int
    event: Event


def read(path: Path, lines: list[bytes], replay: Replay) -> Workload:
    """The requests of a recording. Block names become numbers; a last partial block gets a number of its own.

    The output length of a request that did not end (refused, cancelled, failed) is unknown: it counts with the mean of
    those that did, within its own limit. Raises ConfigError with the number of the line at fault.
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
    """The events of a recording read so far."""

    def __init__(self) -> None:
        self._decode = msgspec.json.Decoder(_RecordedLine).decode
        self._block_size: int | None = None
        self._arrived: dict[RequestId, tuple[int, RequestArrived]] = {}
        self._generated: dict[RequestId, int] = {}
        self._first_ns: dict[RequestId, int] = {}
        self._tbt_ns: dict[RequestId, int] = {}

    def take(self, text: bytes) -> None:
        line = self._decode(text)
        match line.event:
            case NodeJoined() as event:
                self._take_joined(event)
            case RequestArrived() as event:
                self._take_arrived(line.at_ns, event)
            case FirstToken() as event:
                self._first_ns[event.request] = line.at_ns
            case RequestEnded() as event:
                self._take_ended(event)

    def _take_joined(self, event: NodeJoined) -> None:
        if self._block_size not in (None, event.block_size):
            raise ConfigError(
                f"blocks of {event.block_size} tokens after {self._block_size}; expected one size"
            )
        self._block_size = event.block_size

    def _take_arrived(self, at_ns: int, event: RequestArrived) -> None:
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

    def _take_ended(self, event: RequestEnded) -> None:
        if event.request not in self._arrived:
            raise ConfigError(f"request {event.request} ends but never arrived")
        if event.num_generated < 1:
            raise ConfigError(
                "RequestEnded without num_generated: no output lengths in this recording; make a new one"
            )
        self._generated[event.request] = event.num_generated
        if event.tbt_ns:
            self._tbt_ns[event.request] = event.tbt_ns

    def workload(self, path: Path, replay: Replay) -> Workload:
        if not self._generated:
            raise ConfigError(f"{path}: no request of this recording ended; output lengths are not known")
        taken = list(self._arrived.values())[: replay.limit]
        arrivals = replay.arrivals([at_ns - taken[0][0] for at_ns, _ in taken])
        mean = max(1, round(sum(self._generated.values()) / len(self._generated)))
        size = self._block_size or PLAIN_BLOCK_SIZE
        numbers = count()
        ids: defaultdict[BlockName, int] = defaultdict(numbers.__next__)
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
        return Workload(trace_name(path), size, requests, measured=self._measured(taken))

    def _measured(self, taken: list[tuple[int, RequestArrived]]) -> Measured | None:
        known = [(at_ns, event.request) for at_ns, event in taken if event.request in self._tbt_ns]
        if not known:
            return None
        return Measured(
            tuple([self._first_ns[request] - at_ns for at_ns, request in known]),
            tuple([self._tbt_ns[request] for _, request in known]),
        )
