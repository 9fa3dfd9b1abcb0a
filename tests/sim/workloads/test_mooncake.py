"""Mooncake traces: every field, and a clear line for everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import ConfigError
from isthmus.sim.workloads import Replay, Request, load
from tests.sim.workloads.trace import line, write


def test_every_field_of_a_line_is_in_the_request(tmp_path: Path) -> None:
    extra = {"tenant": "a", "priority": 2, "ttft_slo_ms": 900, "tbt_slo_ms": 50}
    lines = [line(0, 513, 7, [0, 1]), line(0, 512, 0, [0]), line(27_000, 1025, 9, [0, 4, 5], **extra)]
    path = write(tmp_path / "chats.jsonl", lines)
    workload = load(path)
    assert (workload.name, workload.block_size) == ("chats", 512)
    assert workload.requests == [
        Request(0, 513, 7, (0, 1)),
        Request(0, 512, 1, (0,)),
        Request(27_000_000_000, 1025, 9, (0, 4, 5), "a", 2, 900, 50),
    ]


def test_a_trace_may_say_its_block_size(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [line(0, 33, 1, [0, 1, 2], block_size=16), line(1, 16, 1, [0])])
    assert load(path).block_size == 16
    plain = write(tmp_path / "p.jsonl", [line(0, 33, 1, [0, 1, 2])])
    assert load(plain, block_size=16).block_size == 16
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: hash_ids has 3 ids; input_length 33 .* makes 1"):
        load(plain)


WRONG: list[tuple[Any, str]] = [
    ("{", "truncated"),
    ("", "the line is empty"),
    ("[1, 2]", "Expected `object`, got `array`"),
    (line(9, 1, 1, [0])[:-1] + ', "hash_ids": ["a"]}', r"Expected `int`, got `str` - at `\$.hash_ids"),
    (line(9, 1, 1, [0]) + "," + line(9, 1, 1, [0]), "malformed"),
    ('{"timestamp": 9, "input_length": 1, "output_length": 1}', "missing required field `hash_ids`"),
    ({"colour": "red"}, "unknown field `colour`"),
    ({"timestamp": "9"}, r"Expected `int`, got `str` - at `\$.timestamp`"),
    ({"timestamp": 9.5}, r"Expected `int`, got `float` - at `\$.timestamp`"),
    ({"timestamp": 4}, "timestamp 4 is before 5 of the line above"),
    ({"timestamp": -4}, r"Expected `int` >= 0 - at `\$.timestamp`"),
    ({"input_length": -1}, r"Expected `int` >= 1 - at `\$.input_length`"),
    ({"input_length": 0, "hash_ids": []}, r"Expected `int` >= 1 - at `\$.input_length`"),
    ({"output_length": -2}, r"Expected `int` >= 0 - at `\$.output_length`"),
    ({"hash_ids": []}, "hash_ids has 0 ids; input_length 700 in blocks of 512 tokens makes 2"),
    ({"hash_ids": [3, 4, 5]}, "hash_ids has 3 ids"),
    ({"hash_ids": [3, 3]}, "hash_ids has an id twice"),
    ({"block_size": 16}, "block_size 16 after 512"),
    ({"ttft_slo_ms": 0}, r"Expected `int` >= 1 - at `\$.ttft_slo_ms`"),
    ({"tbt_slo_ms": -1}, r"Expected `int` >= 1 - at `\$.tbt_slo_ms`"),
]


@pytest.mark.parametrize(("wrong", "complaint"), WRONG)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, wrong: Any, complaint: str) -> None:
    good = {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [3, 4]}
    if isinstance(wrong, dict):
        wrong = json.dumps(good | wrong)
    path = write(tmp_path / "t.jsonl", [line(5, 1, 1, [0]), line(5, 1, 1, [0]), wrong, line(12, 1, 1, [0])])
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(line(0, 1, 1, [0]).encode() + b'\n{"timestamp": 0, "tenant": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"t\.jsonl:2: "):
        load(path)


def test_one_request_over_two_lines_is_refused(tmp_path: Path) -> None:
    first, second = line(0, 1, 1, [0]).split(", ", 1)
    path = write(tmp_path / "t.jsonl", [first + ",", second])
    with pytest.raises(ConfigError, match=r"t\.jsonl:1: .*truncated"):
        load(path)


def test_only_the_lines_within_the_limit_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [line(0, 1, 1, [0]), line(1, 1, 1, [0]), "rubbish"])
    assert len(load(path, Replay(limit=2)).requests) == 2
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: "):
        load(path, Replay(limit=3))


@pytest.mark.parametrize("size", [0, -512])
def test_a_block_holds_at_least_one_token(tmp_path: Path, size: int) -> None:
    path = write(tmp_path / "t.jsonl", [line(0, 1, 1, [0], block_size=size)])
    with pytest.raises(ConfigError, match="block_size"):
        load(path)
    with pytest.raises(ConfigError, match="block size"):
        load(path, block_size=size)
