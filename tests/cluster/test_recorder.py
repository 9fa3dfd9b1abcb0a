from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from isthmus.cluster.recorder import Entry, Header, Recorder, read, replay
from isthmus.conductor import (
    Abort,
    BlocksStored,
    Conductor,
    Event,
    NodeJoined,
    NodeLeft,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
    Rules,
)
from isthmus.errors import ConfigError
from isthmus.types import NodeId, RequestId, Role

P1, D1, M1 = NodeId("p1"), NodeId("d1"), NodeId("m1")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
NAMES = (b"\x00\xff" * 8, bytes(16))
RULES = Rules(max_requests=2, max_attempts=2)
EVENTS: list[Event] = [
    NodeJoined(P1, Role.PREFILL, 100, 4),
    NodeJoined(D1, Role.DECODE, 100, 4),
    RequestArrived(A, "tenant", 9, 10, NAMES),
    RequestArrived(B, "", 500, 10, ()),
    PrefillFinished(A, 1),
    BlocksStored(P1, NAMES),
    NodeJoined(M1, Role.MIXED, 100, 4),
    RequestArrived(B, "", 9, 10, NAMES),
    RequestArrived(C, "", 9, 10, ()),
    NodeLeft(D1),
    RequestFailed(B, 2, "a seal did not match"),
    RequestCancelled(B),
    RequestEnded(A),
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """A recording of EVENTS: line 1 is the header, event number i (from 0) is on line i + 2."""
    path = tmp_path / "flight.jsonl"
    recorder, conductor = Recorder(path, RULES), Conductor(RULES)
    for now, event in enumerate(EVENTS):
        recorder.record(now, event, conductor.on(event, now))
    recorder.close()
    return path


def rewrite(path: Path, line: int, text: bytes) -> None:
    lines = path.read_bytes().splitlines()
    lines[line - 1] = text
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_what_was_recorded_is_read_back(recording: Path) -> None:
    header, entries = read(recording)
    numbered = list(entries)
    assert header == Header(1, RULES)
    assert [number for number, _ in numbered] == list(range(2, len(EVENTS) + 2))
    assert [entry.event for _, entry in numbered] == EVENTS
    assert [entry.at_ns for _, entry in numbered] == list(range(len(EVENTS)))
    kinds = {type(action).__name__ for _, entry in numbered for action in entry.actions}
    assert kinds == {"Route", "Refuse", "Abort", "Fail"}


def test_a_recording_replays_identically(recording: Path) -> None:
    assert replay(recording) == (len(EVENTS), None)


def test_the_same_run_gives_the_same_file(recording: Path, tmp_path: Path) -> None:
    recorder, conductor = Recorder(tmp_path / "again", RULES), Conductor(RULES)
    for now, event in enumerate(EVENTS):
        recorder.record(now, event, conductor.on(event, now))
    recorder.close()
    assert (tmp_path / "again").read_bytes() == recording.read_bytes()


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "flight", RULES)
    for count, event in enumerate(EVENTS, start=2):
        recorder.record(0, event, [])
        assert (tmp_path / "flight").read_bytes().count(b"\n") == count
    recorder.close()


@pytest.mark.parametrize("line", [4, 5, 10])
def test_a_changed_decision_is_found_with_its_line(recording: Path, line: int) -> None:
    entry = dict(read(recording)[1])[line]
    changed = Entry(entry.at_ns, entry.event, (Abort(C, 9, (P1,)),))
    rewrite(recording, line, msgspec.json.encode(changed))
    count, difference = replay(recording)
    assert difference is not None
    assert (count, difference.line, difference.event) == (line - 1, line, entry.event)
    assert (difference.recorded, difference.replayed) == (changed.actions, entry.actions)


def test_a_missing_and_a_further_action_are_found(recording: Path) -> None:
    entry = dict(read(recording)[1])[4]
    for actions in ((), (*entry.actions, Route(A, 1, P1, D1))):
        rewrite(recording, 4, msgspec.json.encode(Entry(entry.at_ns, entry.event, actions)))
        difference = replay(recording)[1]
        assert difference is not None and difference.line == 4


def test_a_changed_event_is_found_where_it_first_matters(recording: Path) -> None:
    rewrite(recording, 3, msgspec.json.encode(Entry(1, NodeJoined(NodeId("d9"), Role.DECODE, 100, 4), ())))
    difference = replay(recording)[1]
    assert difference is not None and difference.line == 4


def test_other_rules_decide_otherwise(recording: Path) -> None:
    rewrite(recording, 1, msgspec.json.encode(Header(1, Rules(max_requests=99))))
    difference = replay(recording)[1]
    assert difference is not None and difference.line == 10


@pytest.mark.parametrize(
    "text",
    [b"", b"garbage", b"{}", b"[1, 2]", b"17", b'{"at_ns": 1, "event": {"type": "Nothing"}, "actions": []}',
     b'{"at_ns": "soon", "event": {"type": "NodeLeft", "node": "x"}, "actions": []}', b"\x00\x01"],
)  # fmt: skip
def test_a_garbage_line_is_refused_with_its_number(recording: Path, text: bytes) -> None:
    rewrite(recording, 6, text)
    with pytest.raises(ConfigError, match=r"line 6 cannot be read") as caught:
        replay(recording)
    assert str(caught.value).startswith(f"{recording}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (1, b'{"format": 1, "rules": {"policy": "\xff"}}'),
        (6, b'{"at_ns": 1, "event": {"type": "NodeLeft", "node": "\xff"}, "actions": []}'),
    ],
)
def test_a_line_that_is_no_utf8_is_refused(recording: Path, line: int, text: bytes) -> None:
    rewrite(recording, line, text)
    with pytest.raises(ConfigError, match=f"line {line} "):
        replay(recording)


def test_a_recording_of_an_unknown_policy_is_refused(recording: Path) -> None:
    rewrite(recording, 1, msgspec.json.encode(Header(1, Rules(policy="of tomorrow"))))
    with pytest.raises(ConfigError, match="of tomorrow"):
        replay(recording)


def test_a_truncated_line_is_refused_with_its_number(recording: Path) -> None:
    data = recording.read_bytes()
    recording.write_bytes(data[:-20])
    with pytest.raises(ConfigError, match=rf"line {len(EVENTS) + 1} cannot be read"):
        replay(recording)


@pytest.mark.parametrize("text", [b"garbage", b"{}", b'{"format": "x", "rules": {}}', b""])
def test_a_garbage_header_is_refused(recording: Path, text: bytes) -> None:
    rewrite(recording, 1, text)
    with pytest.raises(ConfigError, match="line 1 is no recording header"):
        replay(recording)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "flight").write_bytes(b"")
    with pytest.raises(ConfigError, match="empty"):
        replay(tmp_path / "flight")


def test_another_format_is_refused_with_both_numbers(recording: Path) -> None:
    rewrite(recording, 1, msgspec.json.encode(Header(2, RULES)))
    with pytest.raises(ConfigError, match="recording format 2; this version reads 1"):
        replay(recording)


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(tmp_path, RULES)
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(tmp_path / "no folder" / "flight", RULES)
