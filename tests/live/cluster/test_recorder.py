"""What a recording says, what is refused as one, and that the same is decided again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from isthmus.core.attempts import FetchOrder
from isthmus.core.conductor import (
    BlocksStored,
    Conductor,
    Event,
    NodeDrains,
    NodeJoined,
    NodeLeft,
    NodeStays,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestEnded,
    RequestFailed,
    Route,
    Rules,
)
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.cost import Curve
from isthmus.core.errors import ConfigError
from isthmus.core.node import Node
from isthmus.core.node.events import (
    Action,
    BlocksFetched,
    BlocksLost,
    Convert,
    LetterReceived,
    PrefixesRecovered,
    Progress,
    StartAttempt,
    Woken,
)
from isthmus.core.node.events import Event as NodeEvent
from isthmus.core.node.letters import FetchDone, FetchRequest, HandoverConfirmed, HandoverGranted
from isthmus.core.scheduler import BlockPool, Saved, Stepped
from isthmus.core.types import NS_PER_S, NodeId, RequestId, Role
from isthmus.facts import NodeFacts
from isthmus.live.cluster.private import private
from isthmus.live.cluster.recorder import (
    LiveRecorder,
    Recorder,
    RecordingHeader,
    node_recorder,
    opaque,
    read,
    replay,
)
from tests.inside import inside
from tests.served import LIMIT_S
from tests.tape import Entry

P1, D1, M1 = NodeId("p1"), NodeId("d1"), NodeId("m1")
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")
NAMES = (b"\x00\xff" * 8, bytes(16))
CHAIN, OTHER_CHAIN = [tuple([bytes([first + at]) * 16 for at in range(6)]) for first in (0, 10)]
CURVE = Curve(kv_token_bytes=16, num_layers=4, prefill_token_s=1e-6, decode_fixed_s=1e-6)
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
    NodeDrains(P1),
    NodeStays(P1),
    NodeDrains(P1),
    NodeLeft(D1),
    RequestFailed(B, 2, "a seal did not match"),
    RequestFailed(B, 3, "a seal did not match"),
    RequestCancelled(B),
    RequestEnded(A),
]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return record(tmp_path / "flight.jsonl")


def record(path: Path) -> Path:
    """A recording of EVENTS: line 1 is the header, event number i (from 0) is on line i + 2."""
    recorder, conductor = Recorder(path, RecordingHeader(RECORDING_FORMAT, RULES)), Conductor(RULES)
    for now, event in enumerate(EVENTS):
        recorder.record(now, event, conductor.on(event, now))
    recorder.close()
    return path


def entries(path: Path) -> dict[int, Entry]:
    """The lines of a conductor's recording after the first, by their numbers."""
    lines = path.read_bytes().splitlines()[1:]
    return {number: msgspec.json.decode(line, type=Entry) for number, line in enumerate(lines, start=2)}


def rewrite(path: Path, line: int, text: bytes) -> None:
    lines = path.read_bytes().splitlines()
    lines[line - 1] = text
    path.write_bytes(b"\n".join(lines) + b"\n")


def test_a_recording_replays_identically_and_the_same_run_gives_the_same_file(
    recording: Path, tmp_path: Path
) -> None:
    assert replay(recording) == (len(EVENTS), None)
    assert record(tmp_path / "again").read_bytes() == recording.read_bytes()


def test_each_line_is_in_the_file_at_once(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "flight", RecordingHeader(RECORDING_FORMAT, RULES))
    for count, event in enumerate(EVENTS, start=2):
        recorder.record(0, event, [])
        assert (tmp_path / "flight").read_bytes().count(b"\n") == count
    recorder.close()


@pytest.mark.parametrize(
    ("line", "text", "first"),
    [
        (1, RecordingHeader(RECORDING_FORMAT, Rules(max_requests=99)), 10),
        (3, Entry(1, NodeJoined(NodeId("d9"), Role.DECODE, 100, 4), ()), 4),
        (4, Entry(2, EVENTS[2], ()), 4),
        (4, Entry(2, EVENTS[2], (Route(A, 1, P1, D1), Route(A, 1, P1, D1))), 4),
    ],
    ids=["other rules", "another event", "no action", "an action more"],
)
def test_a_difference_is_found_where_it_first_matters(
    recording: Path, line: int, text: Any, first: int
) -> None:
    rewrite(recording, line, msgspec.json.encode(text))
    difference = replay(recording)[1]
    assert difference is not None and difference.line == first


GARBAGE = [
    b"", b"garbage", b'{"at_ns": 1, "eve', b'{"at_ns": 1, "event": {"type": "Nothing"}, "actions": []}',
    b'{"at_ns": 1, "event": {"type": "NodeLeft", "node": "\xff"}, "actions": []}',
]  # fmt: skip
HEADERS = [b"garbage", b"{}", b'{"format": 2, "rules": {"policy": "\xff"}}']


@pytest.mark.parametrize(("line", "text"), [*[(6, text) for text in GARBAGE], *[(1, text) for text in HEADERS]])
def test_a_garbage_line_is_refused_with_its_number(recording: Path, line: int, text: bytes) -> None:
    rewrite(recording, line, text)
    told = "line 6 cannot be read" if line > 1 else "line 1 is no recording header"
    with pytest.raises(ConfigError, match=told) as caught:
        replay(recording)
    assert str(caught.value).startswith(f"{recording}: ") and "\n" not in str(caught.value)


def test_a_recording_of_an_unknown_policy_is_refused(recording: Path) -> None:
    rewrite(recording, 1, msgspec.json.encode(RecordingHeader(RECORDING_FORMAT, Rules(policy="of tomorrow"))))
    with pytest.raises(ConfigError, match="of tomorrow"):
        replay(recording)


@pytest.mark.parametrize("rules", [Rules(policy="os:system"), Rules(lending="evil.py:run")])
def test_what_a_recording_names_is_not_run_unless_the_user_names_it_too(recording: Path, rules: Rules) -> None:
    rewrite(recording, 1, msgspec.json.encode(RecordingHeader(RECORDING_FORMAT, rules)))
    with pytest.raises(ConfigError, match="if it may be run, give --policy"):
        replay(recording)


def test_another_format_is_refused_with_both_numbers(recording: Path) -> None:
    rewrite(recording, 1, msgspec.json.encode(RecordingHeader(1, RULES)))
    with pytest.raises(ConfigError, match=f"recording format 1; this version reads {RECORDING_FORMAT}"):
        replay(recording)
    recording.write_bytes(b"")
    with pytest.raises(ConfigError, match="empty"):
        replay(recording)


@pytest.mark.parametrize("there", [False, True])
def test_only_its_owner_may_read_a_recording(there: bool, tmp_path: Path) -> None:
    """From its creation on: nothing is written before its mode is right."""
    path, before = tmp_path / "flight.jsonl", os.umask(0)
    try:
        if there:
            path.write_text("an earlier run")
        recorder = Recorder(path, RecordingHeader(RECORDING_FORMAT, RULES))
        assert path.stat().st_mode & 0o777 == 0o600 and path.read_bytes().startswith(b'{"format"')
        recorder.close()
    finally:
        os.umask(before)


def test_a_file_is_private_before_anything_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can open it between its creation and a change of its mode."""
    path, before = tmp_path / "file", os.umask(0)
    monkeypatch.setattr(os, "fchmod", None)
    try:
        os.close(private(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_tenant_has_one_opaque_name_and_nobody_none() -> None:
    names = [opaque(tenant, secret) for secret in ("one", "two") for tenant in ("acme", "globex", "Acme")]
    assert len(set(names)) == 6 and opaque("", "one") == ""
    assert opaque("acme", "one") == names[0] and "acme" not in "".join(names)


def test_a_file_that_cannot_be_read_or_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        replay(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(tmp_path, RecordingHeader(RECORDING_FORMAT, RULES))
    with pytest.raises(ConfigError, match="cannot write"):
        Recorder(tmp_path / "no folder" / "flight", RecordingHeader(RECORDING_FORMAT, RULES))


# Recordings of nodes.

FACTS = NodeFacts(P1, Role.PREFILL, CURVE, 32, 4, dram_blocks=4, ssd_blocks=8, transit_blocks=2, token_budget=8)


def told(node: Node) -> Iterator[NodeEvent]:
    """What a node hears that fetches a prefix, hands the KV of a prompt over, and keeps its blocks."""
    begin = StartAttempt(
        RequestId("a#1"), Role.PREFILL, Route(A, 1, P1, D1, FetchOrder(M1, 0, 2, until_ns=50), num_cached=2),
        num_tokens=25, stop_length=40, names=CHAIN,
    )  # fmt: skip
    yield PrefixesRecovered((OTHER_CHAIN,))
    yield StartAttempt(RequestId("b#1"), Role.PREFILL, Route(B, 1, P1, D1), 9, 20, OTHER_CHAIN[:2])
    yield begin
    yield LetterReceived(D1, HandoverGranted(RequestId("b#1")))
    yield Progress(begin.key)
    yield BlocksFetched(begin.key, 1, ended=False)
    yield BlocksFetched(begin.key, 2)
    yield LetterReceived(D1, HandoverGranted(begin.key))
    while node.scheduler.run is not None:
        yield Stepped(node.scheduler.run.steps)
    yield LetterReceived(D1, HandoverConfirmed(RequestId("b#1")))
    yield LetterReceived(M1, FetchRequest(RequestId("c#1"), CHAIN, 0))
    yield Saved(begin.key)
    yield BlocksLost(CHAIN[1:2])
    yield LetterReceived(D1, HandoverConfirmed(begin.key))
    yield LetterReceived(M1, FetchDone(RequestId("c#1")))
    yield Convert(P1, Role.DECODE)
    yield Woken()


def record_node(path: Path, start: int = 1) -> tuple[Path, list[tuple[Action, ...]]]:
    """Event number i (from 0) is on line i + 2."""
    before = set(path.parent.iterdir())
    recorder = node_recorder(path, FACTS, 0.25, start)
    (made,) = set(path.parent.iterdir()) - before
    node, answers = FACTS.node_of(BlockPool(FACTS.kv_blocks), transfer_ns=NS_PER_S // 4), []
    for now, event in enumerate(told(node)):
        actions = node.on(event, now)
        recorder.record(now, event, actions)
        answers.append(tuple(actions))
    recorder.close()
    return made, answers


def test_a_nodes_recording_replays_identically(tmp_path: Path) -> None:
    path, answers = record_node(tmp_path / "flight.jsonl")
    assert path.name == "flight.p1.jsonl"
    assert replay(path) == (len(answers), None)
    assert read(path)[0] == RecordingHeader(RECORDING_FORMAT, node=FACTS, transfer_ns=NS_PER_S // 4)
    kinds = {type(action).__name__ for actions in answers for action in actions}
    assert kinds >= {
        "Fetch", "OfferHandover", "Run", "Admitted", "LoadBlocks", "SendHandover", "FinishHandover",
        "SaveBlocks", "Give", "ReleaseResources",
        "FetchFinished", "PrefillFinished", "BlocksStored", "BlocksEvicted", "RoleChanged",
    }  # fmt: skip


def test_a_changed_answer_of_a_node_is_found_with_its_line(tmp_path: Path) -> None:
    path, _ = record_node(tmp_path / "flight.jsonl")
    for number, line in enumerate(path.read_bytes().splitlines()[1:], start=2):
        plain = msgspec.json.decode(line)
        if not plain["actions"]:
            continue
        copy = tmp_path / "changed.jsonl"
        copy.write_bytes(path.read_bytes())
        rewrite(copy, number, msgspec.json.encode(plain | {"actions": plain["actions"][1:]}))
        count, difference = replay(copy)
        assert difference is not None and (count, difference.line) == (number - 1, number)
        assert difference.replayed == msgspec.json.encode(plain["actions"]).decode()


@pytest.mark.parametrize(
    "header", [RecordingHeader(RECORDING_FORMAT), RecordingHeader(RECORDING_FORMAT, RULES, FACTS)]
)
def test_a_header_of_neither_or_both_is_refused(recording: Path, header: RecordingHeader) -> None:
    rewrite(recording, 1, msgspec.json.encode(header))
    with pytest.raises(ConfigError, match="it names neither rules nor a node, or both") as caught:
        replay(recording)
    assert str(caught.value).startswith(f"{recording}: line 1 ") and "\n" not in str(caught.value)


def test_a_node_started_again_leaves_what_it_recorded(tmp_path: Path) -> None:
    first, answers = record_node(tmp_path / "flight.jsonl")
    before = first.read_bytes()
    for start in (2, 3):
        again, _ = record_node(tmp_path / "flight.jsonl", start)
        assert again.name == f"flight.p1.{start}.jsonl" and again.read_bytes() == before
    assert first.read_bytes() == before and replay(first) == replay(again) == (len(answers), None)


def test_a_full_disk_ends_the_recording_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "flight.jsonl"
    recorder = LiveRecorder(path, RecordingHeader(RECORDING_FORMAT, RULES))
    recorder.record(0, EVENTS[0], [])
    with Path("/dev/full").open("wb") as full:
        os.dup2(full.fileno(), recorder._file.fileno())
    for at_ns in (1, 2):
        recorder.record(at_ns, EVENTS[1], [])
    recorder.close()
    assert path.read_bytes().count(b"\n") == 2
    assert caplog.messages == [f"the flight recording {path} ends here: No space left on device"]


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_clusters_recordings_replay_identically(pipeline: int, tmp_path: Path) -> None:
    """A few requests at once, a cancelled one, and then every file."""
    flight = tmp_path / "flight.jsonl"
    cost = {"kv_token_bytes": 2048, "num_layers": 4, "prefill_token_s": 1e-4, "decode_fixed_s": 0.001}
    sections = {
        "roles": {"prefill": {"count": pipeline, "pipeline": pipeline}, "decode": 1},
        "engine": {"kind": "emulated", "cost": cost, "token_budget": 256},
        "cache": {"dram": "1MiB", "ssd": "64MiB", "folder": str(tmp_path / "blocks")},
        "record": str(flight),
    }
    with inside(sections) as served:
        prompts = [[seed + at % 50 for at in range(length)] for seed, length in ((1, 500), (9, 900), (1, 700))]
        for _ in range(2):
            with ThreadPoolExecutor(3) as pool:
                list(pool.map(lambda prompt: served.tokens(prompt, 12, ignore_eos=True), prompts))
        with served.held(), pytest.raises(httpx.ReadTimeout):
            body = {"model": served.model, "prompt": [7] * 3000, "max_tokens": 9}
            served.http.post("/v1/completions", json=body, timeout=httpx.Timeout(LIMIT_S, read=0.15))
        served.tokens([7] * 3000, 5)
    for name in ("", ".prefill-0", ".decode-0"):
        count, difference = replay(flight.with_suffix(f"{name}.jsonl"))
        assert count > 20 and difference is None
    assert sorted(path.name for path in tmp_path.glob("flight*")) == [
        "flight.decode-0.jsonl", "flight.jsonl", "flight.prefill-0.jsonl",
    ]  # fmt: skip
