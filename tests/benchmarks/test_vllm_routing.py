"""What both sides are asked, what a cache could have of it, and what is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.vllm_routing import Asked, Plan, config_of, possible, requests_of
from isthmus.config import Config

LINES = (
    (0, 1000, (0, 1)),
    (0, 1536, (0, 2, 3)),
    (3000, 2000, (0, 1, 4, 5)),
    (6000, 600, (0, 6)),
    (9000, 2560, (0, 1, 4, 7, 8)),
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    trace = tmp_path / "trace.jsonl"
    keys = ("timestamp", "input_length", "hash_ids")
    lines = [dict(zip(keys, line, strict=True)) | {"output_length": 9} for line in LINES]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Plan(Path("m"), "python", trace, tmp_path, sides=("pool/isthmus",), every=1, speed=3, max_length=100)


def test_equal_ids_are_equal_blocks_of_a_scaled_trace(plan: Plan) -> None:
    asked = requests_of(plan)
    assert asked == requests_of(plan)
    lengths = [len(each.prompt) for each in asked]
    assert lengths == [63, 96, 96, 38, 96], "512 tokens are 32; the longest are cut"
    assert all(each.prompt[:32] == asked[0].prompt[:32] for each in asked)
    assert asked[2].prompt[:63] == asked[0].prompt and asked[2].prompt == asked[4].prompt
    assert asked[1].prompt[32:64] != asked[2].prompt[32:64]
    times = [each.at_s for each in asked]
    assert times[0] == 0 and times == sorted(times) and 3 <= times[-1] <= 4
    assert all(3 <= token < 250 for each in asked for token in each.prompt)
    fewer = requests_of(replace(plan, every=2))
    assert [each.ids[:2] for each in fewer] == [(0, 1), (0, 1), (0, 6), (0, 1)], "conversations are taken whole"


def test_what_a_cache_could_have() -> None:
    asked = [Asked(0, [5] * 64, (0, 1)), Asked(0, [5] * 64, (0, 1)), Asked(0, [5] * 70, (0, 1, 2))]
    assert possible(asked, 32) == ((32 + 64) / (64 + 64 + 70), 64), "one token is always computed"


def test_sides_differ_in_mode_and_policy_alone(plan: Plan) -> None:
    nixl, turns, pool = (
        config_of(plan, side, 1 << 20) for side in ("nixl/isthmus", "nixl/round_robin", "pool/isthmus")
    )
    assert nixl | {"policy": "round_robin"} == turns
    for each in (nixl, turns, pool):
        Config.model_validate(each)
    assert pool["cache"] == {"dram": 1 << 20}
