"""Mooncake traces: every field, and a clear line for everything that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import Replay, Request, load
from tests.lab.sim.workloads.trace import line, write


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
    assert (load(path).block_size, load(path).notes) == (16, ())


def test_a_block_size_that_alone_fits_all_lines_is_taken_and_said(tmp_path: Path) -> None:
    lines = [line(0, 33, 1, [0, 1, 2]), line(1, 521, 1, range(33))]
    assert load(write(tmp_path / "t.jsonl", lines)).block_size == 16
    assert "in blocks of 16 tokens" in load(tmp_path / "t.jsonl").notes[0]
    wrong = write(tmp_path / "w.jsonl", [*lines, line(2, 33, 1, [0])])
    with pytest.raises(ConfigError, match=r"w\.jsonl:1: hash_ids has 3 ids; input_length 33 .* makes 1"):
        load(wrong)


ODD: list[tuple[dict[str, Any], Request, str]] = [
    ({"timestamp": 9.25}, Request(4_250_000, 700, 1, (3, 4)), "with a fraction in timestamp, taken as milli"),
    ({"timestamp": "9.0"}, Request(4_000_000, 700, 1, (3, 4)), ""),
    ({"input_length": 700.0, "output_length": "2"}, Request(4_000_000, 700, 2, (3, 4)), ""),
    ({"hash_ids": []}, Request(4_000_000, 700, 1), "without hash_ids, sharing nothing (1 line)"),
    ({"hash_ids": None}, Request(4_000_000, 700, 1), "without hash_ids, sharing nothing (1 line)"),
    ({"output_length": None}, Request(4_000_000, 700, 1, (3, 4)), "without output_length, taken as 1 (1 line)"),
    (
        {"session_id": "s", "delay": 3},
        Request(4_000_000, 700, 1, (3, 4)),
        "ignored session_id (1 line), delay (1 line)",
    ),
    ({"hash_ids": ["a", "b"]}, Request(4_000_000, 700, 1, (-1, -2)), ""),
    ({"hash_ids": [3.0, 4.0], "tenant": 7}, Request(4_000_000, 700, 1, (3, 4), "7"), ""),
]


@pytest.mark.parametrize(("fields", "request_", "note"), ODD)
def test_what_other_tools_write_is_read_and_what_is_made_up_is_said_once(
    tmp_path: Path, fields: dict[str, Any], request_: Request, note: str
) -> None:
    odd = {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [3, 4]} | fields
    path = write(tmp_path / "t.jsonl", [line(5, 1, 1, [0]), "", json.dumps(odd), " ", line(12, 1, 1, [0])])
    workload = load(path)
    assert workload.requests == [Request(0, 1, 1, (0,)), request_, Request(7_000_000, 1, 1, (0,))]
    assert len(workload.notes) == bool(note) and note in "".join(workload.notes)


def test_what_is_left_out_in_many_lines_is_one_note(tmp_path: Path) -> None:
    names = [f"field{number}" for number in range(20)]
    path = write(tmp_path / "t.jsonl", [line(at, 1, 1, [0], **dict.fromkeys(names, 1)) for at in range(50)])
    (note,) = load(path).notes
    assert note.startswith("t.jsonl: ignored field0 (50 lines), ") and note.endswith(", and 12 more")


def test_a_trace_out_of_order_is_sorted_and_said_so(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl", [line(at, length, 1, [0]) for at, length in ((7, 1), (5, 2), (9, 3), (7, 4))]
    )
    workload = load(path)
    assert [(each.arrival_ns, each.num_tokens) for each in workload.requests] == [
        (0, 2), (2_000_000, 1), (2_000_000, 4), (4_000_000, 3)
    ]  # fmt: skip
    assert workload.notes == ("t.jsonl: earlier than the line above, so sorted by time (2 lines)",)


def test_times_count_from_the_first_which_may_be_a_date(tmp_path: Path) -> None:
    for first, second in (
        (1_700_000_000_000, 1_700_000_000_500),
        ("2023-11-16 18:17:03Z", "2023-11-16T18:17:03.5"),
    ):
        path = tmp_path / "t.jsonl"
        path.write_text("".join(line(at, 1, 1, [0]) + "\n" for at in (first, second)))
        assert [each.arrival_ns for each in load(path).requests] == [0, 500_000_000]


WRONG: list[tuple[Any, str]] = [
    ("{", "truncated"),
    ("[1, 2]", "Expected `object`, got `array`"),
    (line(9, 1, 1, [0]) + "," + line(9, 1, 1, [0]), "malformed"),
    ('{"input_length": 9, "output_length": 1}', "missing required field `timestamp`"),
    ('{"timestamp": 9, "output_length": 1}', "missing required field `input_length`"),
    ('{"timestamp": NaN, "input_length": 9}', "malformed"),
    ('{"timestamp": 1e400, "input_length": 9}', "out of range"),
    ({"timestamp": "soon"}, "timestamp 'soon' is not like 2023-11-16"),
    ({"timestamp": "nan"}, "timestamp 'nan' is not like"),
    ({"timestamp": -4}, "timestamp -4 is no time"),
    ({"timestamp": 1e300}, "timestamp 1e.300 is no time"),
    ({"timestamp": True}, "timestamp True is no time"),
    ({"input_length": -1}, "input_length -1 is not a whole number of at least 1"),
    ({"input_length": 0, "hash_ids": []}, "input_length 0 is not a whole number of at least 1"),
    ({"input_length": 9.5}, "input_length 9.5 is not a whole number"),
    ({"output_length": -2}, "output_length -2 is not a whole number of at least 0"),
    ({"output_length": [1]}, r"output_length \[1\] is not a whole number"),
    ({"hash_ids": 5}, "hash_ids is no list of ids, one for each block"),
    ({"tenant": {"a": 1}}, "tenant is no name"),
    ({"hash_ids": [[3], 4]}, r"hash_ids \[3\] is not a whole number"),
    ({"hash_ids": [3, 4, 5]}, "hash_ids has 3 ids; input_length 700 in blocks of 512 tokens makes 2"),
    ({"hash_ids": [3, 3]}, "hash_ids has an id twice"),
    ({"block_size": 16}, "block_size 16 after 512"),
    ({"ttft_slo_ms": 0}, "ttft_slo_ms 0 is not a whole number of at least 1"),
    ({"tbt_slo_ms": -1}, "tbt_slo_ms -1 is not a whole number of at least 1"),
]


@pytest.mark.parametrize(("wrong", "complaint"), WRONG)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, wrong: Any, complaint: str) -> None:
    good = {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [3, 4]}
    if isinstance(wrong, dict):
        wrong = json.dumps(good | wrong)
    first = line(5, 600, 1, [0, 1], block_size=512)
    path = write(tmp_path / "t.jsonl", [first, "", wrong, line(12, 1, 1, [0])])
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: ")
    assert "\n" not in str(raised.value)


def test_only_the_lines_within_the_limit_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", [line(0, 1, 1, [0]), line(1, 1, 1, [0]), "rubbish"])
    assert len(load(path, Replay(limit=2)).requests) == 2
    with pytest.raises(ConfigError, match=r"t\.jsonl:3: "):
        load(path, Replay(limit=3))


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (line(0, 1, 1, [0]).encode() + b'\n{"timestamp": 0, "tenant": "\xff"}', "2: "),
        (line(0, 1, 1, [0]).replace(", ", ",\n", 1).encode(), "1: .*truncated"),
        (b'{"timestamp": 0, "input_length": 6, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "1: "),
        (line(0, 1, 1, [0], block_size=0).encode(), ".*block_size"),
        (line(0, 1, 1, [0], block_size=-512).encode(), ".*block_size"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_line(tmp_path: Path, data: bytes, complaint: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(data + b"\n")
    with pytest.raises(ConfigError, match=rf"t\.jsonl:{complaint}"):
        load(path)


UNIX = 1_700_000_000


@pytest.mark.parametrize(
    ("times", "fields", "note"),
    [
        *(
            ([UNIX * unit, (UNIX + 2) * unit], {}, "" if unit == 1000 else "since 1970")
            for unit in (1, 1000, 10**6)
        ),
        ([UNIX * 10**9, (UNIX + 2) * 10**9], {}, "in nanoseconds since 1970"),
        ([61, 63.0], {"parent_chat_id": -1}, "in seconds, as in Qwen's traces"),
    ],
)
def test_times_tell_their_unit(tmp_path: Path, times: list[float], fields: dict[str, Any], note: str) -> None:
    path = write(tmp_path / "t.jsonl", [line(time, 6, 1, [1], **fields) for time in times])
    workload = load(path)
    assert [request.arrival_ns for request in workload.requests] == [0, 2_000_000_000]
    assert bool(workload.notes) == bool(note) and note in "".join(workload.notes)
