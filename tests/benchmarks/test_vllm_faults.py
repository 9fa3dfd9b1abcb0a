"""Faults of a cluster whose nodes have a stand-in for vLLM: what is done is noticed, and nothing is left of it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from benchmarks.breaking import Cluster
from benchmarks.vllm_faults import EXACT, Found, Plan, Row, judged, outcome, prompts_of, run
from isthmus.bench.serve import DONE, Capture
from tests.live.servers.fake_server import stand_in
from tests.models import make_model
from tests.served import node_pid, serve


def test_every_answer_is_exact_while_parts_die(tmp_path: Path) -> None:
    make_model(tmp_path / "tiny", "llama")
    vllm = {"transfer": "pool", "env": stand_in(tmp_path)}
    engine = {"kind": "vllm", "device": "cpu", "kv_memory": 1 << 21, "vllm": vllm}
    roles = {"prefill": 1, "decode": 1}
    settings = {"model": str(tmp_path / "tiny"), "engine": engine, "roles": roles, "cache": {"dram": "16MiB"}}
    kinds = ("socket+link+abort+stall+page", "decode-adapter")
    with serve(tmp_path, settings) as served:
        before = node_pid(served.children().values(), "decode-0")
        size = {"clients": 3, "prompts": 16, "longest": 300}
        pace = {"pause": 0.2, "stall": 1.0, "settle": 90}
        plan = Plan(served.url, served.model, kinds, 1, **size, **pace)  # type: ignore[arg-type]
        said: list[str] = []
        found = run(plan, said.append)
        assert found.is_good, (found, said)
        rows = found.json["rows"]
        assert [row["faults"] for row in rows] == [0, 5, 1] and not found.json["left"]
        assert set(rows[0]["outcomes"]) == {EXACT}
        assert node_pid(served.children().values(), "decode-0") != before
        nodes = Cluster(int(served.url.rpartition(":")[2])).nodes()
        assert nodes.keys() == {"prefill-0", "decode-0"}


def test_half_of_the_prompts_begin_alike() -> None:
    prompts = prompts_of(Plan("http://localhost:1", "m", (), 1, prompts=100))
    assert 30 <= Counter([tuple(prompt[:2]) for prompt in prompts]).most_common(1)[0][1] <= 70


def test_a_token_that_is_wrong_or_a_pin_that_is_left_is_not_good() -> None:
    plan, row = Plan("http://localhost:1", "m", (), 1), Row("link", 2, again_s=[1.0, 3.0])
    row.outcomes.update({EXACT: 7, "error": 1})
    assert Found([row]).is_good and not Found([row], left=["x"]).is_good
    [shown] = outcome(plan, Found([row])).tables
    assert shown.rows[0][:7] == ["link", "2", 2.0, 3.0, 7, 0, 1]
    row.outcomes["wrong"] += 1
    assert not outcome(plan, Found([row])).is_good


def chunk(*tokens: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"token_ids": tokens, "finish_reason": finish}]}


@pytest.mark.parametrize(
    ("data", "tokens", "end"),
    [
        ((chunk(1), chunk(2, finish="length"), DONE), [1, 2], EXACT),
        ((chunk(1), chunk(2, finish="length")), [1, 2], "never ended"),
        ((chunk(1), {"error": "gone"}), [1], "error"),
        ((chunk(1, finish="length"), {"error": "gone"}), [1], "ended twice"),
        ((chunk(1, finish="length"), chunk(2)), [1], "ended twice"),
        ((chunk(1, finish="length"), DONE, DONE), [1], "ended twice"),
    ],
)
def test_an_answer_ends_once(data: tuple[Any, ...], tokens: list[int], end: str) -> None:
    lines = [b"data: " + (each if each == DONE else json.dumps(each).encode()) + b"\n\n" for each in data]
    assert judged(Capture(0.0, [(0.0, b"".join(lines))]))[:2] == (tokens, end)
