"""Recordings of a live cluster, written by the real recorder, read back as workloads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.conductor import (
    Event,
    FirstToken,
    NodeJoined,
    PromptContent,
    RequestArrived,
    RequestEnded,
    Rules,
)
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.errors import ConfigError
from isthmus.core.types import NodeId, RequestId, Reuse, Role
from isthmus.lab.sim.workloads import Measured, Replay, Request, load
from isthmus.live.cluster.recorder import Recorder, RecordingHeader
from tests.lab.sim.workloads.trace import write

NODE = NodeJoined(NodeId("p0"), Role.MIXED, 10_000, 16)
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def arrived(request: str, num_tokens: int, names: tuple[bytes, ...], **extra: Any) -> RequestArrived:
    return RequestArrived(RequestId(request), "t", num_tokens, 64, names, **extra)


def ended(request: str, num_generated: int) -> RequestEnded:
    return RequestEnded(RequestId(request), num_generated)


def record(path: Path, events: list[tuple[int, Event]]) -> Path:
    recorder = Recorder(path, RecordingHeader(RECORDING_FORMAT, Rules()))
    for at_ns, event in events:
        recorder.record(at_ns, event, ())
    recorder.close()
    return path


def test_times_of_streamed_answers_are_kept(tmp_path: Path) -> None:
    path = record(
        tmp_path / "live.jsonl",
        [
            (5_000, NODE),
            (7_000, arrived("r1", 33, (A, B))),
            (7_500, arrived("r2", 32, (A, C))),
            (8_000, FirstToken(RequestId("r1"), 1)),
            (8_100, FirstToken(RequestId("r2"), 1)),
            (9_700, RequestEnded(RequestId("r2"), 30)),
            (9_900, RequestEnded(RequestId("r1"), 10, 250)),
        ],
    )
    assert load(path).measured == Measured((1_000,), (250,)), "of r2 nobody measured"
    assert load(path, Replay(limit=1)).measured == Measured((1_000,), (250,))


def test_a_recording_gives_the_requests_that_came(tmp_path: Path) -> None:
    path = record(
        tmp_path / "live.jsonl",
        [
            (5_000, NODE),
            (7_000, arrived("r1", 33, (A, B), priority=3, ttft_ms=200)),
            (8_000, FirstToken(RequestId("r1"), 1)),
            (9_500, arrived("r2", 32, (A, C))),
            (9_600, arrived("r3", 40, (A, B))),
            (9_700, ended("r2", 30)),
            (9_900, ended("r1", 10)),
        ],
    )
    workload = load(path)
    assert (workload.name, workload.block_size) == ("live", 16)
    assert workload.requests == [
        Request(0, 33, 10, (0, 1, 2), "t", 3, 200),
        Request(2_500, 32, 30, (0, 3), "t"),
        # It did not end: the mean of those that did. Its partial block is equal to no other.
        Request(2_600, 40, 20, (0, 1, 4), "t"),
    ]
    assert [each.arrival_ns for each in load(path, Replay(speed=0.5, limit=2)).requests] == [0, 5_000]


def test_a_request_that_did_not_end_keeps_its_own_limit(tmp_path: Path) -> None:
    events: list[tuple[int, Event]] = [
        (0, NODE),
        (1, arrived("r1", 5, ())),
        (2, arrived("r2", 5, ())),
        (3, ended("r1", 999)),
    ]
    assert [each.output_tokens for each in load(record(tmp_path / "r.jsonl", events)).requests] == [999, 64]


def test_a_recording_without_output_lengths_is_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", [(0, NODE), (1, arrived("r1", 5, ())), (2, ended("r1", 0))])
    with pytest.raises(ConfigError, match=r"r\.jsonl:4: RequestEnded without num_generated: no output lengths"):
        load(path)
    path = record(tmp_path / "r.jsonl", [(0, NODE), (1, arrived("r1", 5, ()))])
    with pytest.raises(ConfigError, match=r"r\.jsonl: no request of this recording ended"):
        load(path)


@pytest.mark.parametrize(
    ("events", "complaint"),
    [
        ([arrived("r1", 5, ()), arrived("r1", 5, ())], "request r1 arrives a second time"),
        ([arrived("r1", 0, ())], "request r1 has 0 prompt tokens"),
        ([arrived("r1", 31, (A, B))], "request r1 names 2 blocks; 31 tokens have 1 full blocks of 16"),
        ([ended("r1", 5)], "request r1 ends but never arrived"),
        ([NodeJoined(NodeId("p1"), Role.MIXED, 10_000, 32)], "blocks of 32 tokens after 16"),
        ([NodeJoined(NodeId("p1"), Role.MIXED, 10_000, 0)], "Expected `int` >= 1"),
    ],
)
def test_an_event_that_cannot_be_is_refused_with_its_line(
    tmp_path: Path, events: list[Event], complaint: str
) -> None:
    path = record(tmp_path / "r.jsonl", [(0, NODE), *((1, event) for event in events)])
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:{2 + len(events)}: ")


def test_names_without_a_block_size_are_refused(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", [(0, arrived("r1", 16, (A,)))])
    with pytest.raises(ConfigError, match=r"r\.jsonl:2: block names before any node"):
        load(path)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "no line of a recording: Input data was truncated"),
        ('{"at_ns": 1}', "missing required field `event`"),
        (
            '{"at_ns": 1, "event": {"type": "RequestArrived", "request": "r1"}}',
            "missing required field `tenant`",
        ),
        ('{"at_ns": 1, "event": {"type": "RequestArrived", "request": 7}}', "Expected `str`, got `int`"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(tmp_path: Path, line: str, complaint: str) -> None:
    path = record(tmp_path / "r.jsonl", [(0, NODE)])
    write(path, [*path.read_text().splitlines(), line])
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: ")


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", [json.dumps({"format": 1, "rules": {}}), "{}"])
    with pytest.raises(
        ConfigError, match=rf"r\.jsonl:1: recording format 1; this version reads {RECORDING_FORMAT}"
    ):
        load(path)


def test_what_prompts_say_is_replayed(tmp_path: Path) -> None:
    """So that reuse beyond the prefix is simulated as it was asked for live."""
    content = PromptContent(Reuse.SEMANTIC, b"salt", (b"piece", b"other"), (20, 33), b"signature")
    events: list[tuple[int, Event]] = [
        (5, NODE),
        (7, arrived("r1", 33, (A, B), content=content)),
        (9, ended("r1", 2)),
    ]
    [request] = load(record(tmp_path / "live.jsonl", events)).requests
    assert request == Request(0, 33, 2, (0, 1, 2), "t", content=content)
