"""Azure's CSV traces: exact times, and a clear line for everything that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import ConfigError
from isthmus.sim.workloads import Replay, Request, load
from tests.sim.workloads.trace import write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_times_are_exact_to_100_ns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "code.csv",
        [
            HEADER,
            "2023-11-16 18:17:03.9799600,4808,10",
            "2023-11-16 18:17:03.9799601,3180,0",
            "2023-11-17 18:17:04,1,1",
        ],
    )
    workload = load(path)
    assert workload.name == "code"
    assert workload.requests == [
        Request(0, 4808, 10),
        Request(100, 3180, 1),
        Request(86_400_020_040_000, 1, 1),
    ]
    assert [each.arrival_ns for each in load(path, Replay(speed=10, limit=2)).requests] == [0, 10]


def test_times_may_carry_their_zone_and_lines_a_carriage_return(tmp_path: Path) -> None:
    path = tmp_path / "conv.csv"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + HEADER.encode()
        + b"\r\n2024-05-10T01:00:00.00993+01:00,2,3\r\n2024-05-10 00:00:01Z,4,5\r\n"
    )
    assert load(path).requests == [Request(0, 2, 3), Request(990_070_000, 4, 5)]


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("2023-11-16 18:17:09,1", "2 fields; expected TIMESTAMP,ContextTokens,GeneratedTokens"),
        ("2023-11-16 18:17:09,1,2,3", "4 fields"),
        ("", "1 fields"),
        ("yesterday,1,2", "TIMESTAMP 'yesterday' is not like 2023-11-16"),
        ("2023-13-16 18:17:09,1,2", "TIMESTAMP '2023-13-16 18:17:09': month"),
        ("2023-11-16 18:17:09.1234567890,1,2", "is not like"),
        ("2023-11-16 18:17:02,1,2", "earlier than the line above"),
        ("2023-11-16 18:17:09,0,2", "ContextTokens '0' is not a whole number of at least 1"),
        ("2023-11-16 18:17:09,1,-2", "GeneratedTokens '-2' is not a whole number of at least 0"),
        ("2023-11-16 18:17:09,1.5,2", "ContextTokens '1.5'"),
        ("2023-11-16 18:17:09,²,2", "ContextTokens"),
    ],
)
def test_a_wrong_line_is_refused_with_its_number(tmp_path: Path, wrong: str, complaint: str) -> None:
    good = "2023-11-16 18:17:03.9799600,4808,10"
    path = write(tmp_path / "code.csv", [HEADER, good, wrong, good])
    with pytest.raises(ConfigError, match=complaint) as raised:
        load(path)
    assert str(raised.value).startswith(f"{path}:3: ")


def test_a_csv_of_another_kind_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "other.csv", ["Timestamp,Model,Request tokens", "1,2,3"])
    with pytest.raises(ConfigError, match=r"other\.csv:1: the first line should be TIMESTAMP,ContextTokens"):
        load(path)
    path = write(tmp_path / "none.csv", [HEADER])
    with pytest.raises(ConfigError, match=r"none\.csv:2: no request"):
        load(path)


def test_exact_times_cannot_be_spread(tmp_path: Path) -> None:
    path = write(tmp_path / "code.csv", [HEADER, "2023-11-16 18:17:03,1,1"])
    with pytest.raises(ConfigError, match="exact"):
        load(path, Replay(spread_seed=0))
