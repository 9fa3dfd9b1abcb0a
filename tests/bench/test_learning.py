"""What servers take is learnt from recordings of their router, well enough to predict another load."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.bench.guess import PARTS, Answer, guessed
from isthmus.bench.learning import learn, predicted, recorded, searched
from isthmus.core.conductor import (
    Action,
    Event,
    FirstToken,
    NodeJoined,
    RequestArrived,
    RequestEnded,
    RequestFailed,
    Route,
    Rules,
)
from isthmus.core.conductor.events import RECORDING_FORMAT
from isthmus.core.cost import Curve
from isthmus.core.errors import ConfigError
from isthmus.core.types import NS_PER_MS, NodeId, RequestId, Role
from isthmus.live.cluster.recorder import Recorder, RecordingHeader
from tests.bench.recordings import NODES, RULES, TRUTH, record


def test_another_load_is_predicted_with_what_was_learnt(tmp_path: Path) -> None:
    """Servers teach under one load what they take under one that is half as large again."""
    found = recorded(record(tmp_path / "one.jsonl", 2.0, 240, 5))
    learnt = learn(found)
    assert learnt.num_requests == len(found.served) == 240
    assert learnt.curve.prefill_token_s == pytest.approx(TRUTH.prefill_token_s, rel=0.1)
    assert learnt.curve.decode_fixed_s == pytest.approx(TRUTH.decode_fixed_s, rel=0.1)
    other = recorded(record(tmp_path / "other.jsonl", 3.0, 240, 6))
    for errors in (learnt.errors, predicted(other, learnt.curve)):
        assert set(errors) == {"TTFT mean", "TTFT P90", "TBT mean", "TBT P90"}
        assert all(abs(error) < 0.15 for error in errors.values()), errors


def test_answers_one_after_another_tell_what_they_take() -> None:
    """Of answers that share no iteration the equations are exact."""
    answers, now = list[Answer](), 0.0
    for number in range(40):
        tokens, out = 100 + 37 * number % 400, 2 + 11 * number % 50
        context = sum(tokens + step for step in range(1, out))
        ttft_s, decode_s = 0.02 + 7e-4 * tokens, (out - 1) * (0.03 + 0.003) + 4e-6 * context
        answers.append(Answer(now, now + ttft_s, now + ttft_s + decode_s, tokens, tokens, out, True))
        now += ttft_s + decode_s + 1
    found = guessed([answers])
    assert found["prefill_fixed_s"] == pytest.approx(0.02, rel=0.02)
    assert found["prefill_token_s"] == pytest.approx(7e-4, rel=0.02)
    steps_s = found["decode_fixed_s"] + found["decode_sequence_s"]  # no two are told apart by batches of one
    assert steps_s + found["decode_context_s"] * 300 == pytest.approx(0.033 + 4e-6 * 300, rel=0.02)


def test_the_search_finds_what_lies_apart() -> None:
    truth = dict(zip(PARTS, (3e-3, 2e-5, 7e-2, 4e-4, 1e-7), strict=True))
    found = searched(
        lambda parts: sum(abs(parts[name] / truth[name] - 1) for name in PARTS),
        {name: 5 * value for name, value in truth.items()},
    )
    assert all(found[name] == pytest.approx(truth[name], rel=0.05) for name in PARTS), found


def test_what_teaches_nothing_is_told(tmp_path: Path) -> None:
    whole = recorded(record(tmp_path / "whole.jsonl", 3.0, 30, 1, streamed=False))
    with pytest.raises(ConfigError, match="0 streamed answers ended in this recording; 20 or more"):
        learn(whole)
    file = tmp_path / "ours.jsonl"
    recorder = Recorder(file, RecordingHeader(RECORDING_FORMAT, Rules()))
    with pytest.raises(ConfigError, match="no server joined"):
        recorded(file)
    recorder.record(0, NodeJoined(NodeId("n"), Role.MIXED, 100, 16, cost=Curve(1, 1)), ())
    recorder.close()
    with pytest.raises(ConfigError, match="not of `isthmus route`"):
        recorded(file)
    with pytest.raises(ConfigError, match=r"ours\.jsonl:3: no line of a recording"):
        recorded(_with(file, b"{}\n"))


def test_a_continued_answer_counts_until_it_broke_off_and_is_not_measured(tmp_path: Path) -> None:
    """A first token that was presumed is none, and an attempt that gave none is as if it had not been."""
    file, name = tmp_path / "broke.jsonl", RequestId("a")
    recorder = Recorder(file, RecordingHeader(RECORDING_FORMAT, RULES))
    for joined in NODES:
        recorder.record(0, joined, ())
    one, other = (joined.node for joined in NODES)
    failed = [RequestFailed(name, attempt, "it broke off") for attempt in (1, 2)]
    routes = [Route(name, number, node, node) for number, node in enumerate((one, other, one), start=1)]
    lines: list[tuple[int, Event, tuple[Action, ...]]] = [
        (100, RequestArrived(name, "", 50, 256, ()), (routes[0],)),
        (120, FirstToken(name, 1, presumed=True), ()),
        (150, failed[0], (routes[1],)),
        (180, FirstToken(name, 2), ()),
        (400, failed[1], (routes[2],)),
        (470, FirstToken(name, 3), ()),
        (900, RequestEnded(name, 30, 5 * NS_PER_MS), ()),
    ]
    for at_ms, event, actions in lines:
        recorder.record(at_ms * NS_PER_MS, event, actions)
    recorder.close()
    (served,) = recorded(file).served
    assert served.node == other and served.request.output_tokens == 30
    assert (served.ttft_ns, served.decode_ns, served.tbt_ns) == (30 * NS_PER_MS, 220 * NS_PER_MS, 0)
    assert recorded(file).measured == []


def test_servers_that_each_do_a_part_are_not_learnt_from(tmp_path: Path) -> None:
    file = tmp_path / "apart.jsonl"
    recorder = Recorder(file, RecordingHeader(RECORDING_FORMAT, Rules()))
    for role in (Role.PREFILL, Role.DECODE):
        recorder.record(0, NodeJoined(NodeId(role.name), role, 100, 16, cluster=role.name), ())
    recorder.close()
    with pytest.raises(ConfigError, match="apart: a recording of servers with --prefill or --decode"):
        learn(recorded(file))


def _with(file: Path, line: bytes) -> Path:
    file.write_bytes(file.read_bytes() + line)
    return file
