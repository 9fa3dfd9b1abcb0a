"""Azure's CSV traces: exact times, and a clear line for everything that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.core.errors import ConfigError
from isthmus.lab.sim.workloads import Replay, Request, load
from tests.lab.sim.workloads.trace import write

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
        ("2023-11-16 18:17:09", "1 fields"),
        ("yesterday,1,2", "TIMESTAMP 'yesterday' is not like 2023-11-16"),
        ("2023-13-16 18:17:09,1,2", "no such date as 2023-13-16 18:17:09: month"),
        ("2023-11-16 18:17:09.1234567890,1,2", "is not like"),
        ("-4,1,2", "TIMESTAMP '?-4.*is no time"),
        ("nan,1,2", "TIMESTAMP 'nan' is not like"),
        ('2023-11-16 18:17:09,"4,808",2', "ContextTokens '4,808' is not a whole number"),
        ('2023-11-16 18:17:09,"1,2', "unexpected end of data"),
        ("2023-11-16 18:17:09," + "1" * 200_000 + ",2", "field larger than field limit"),
        ("2023-11-16 18:17:09,0,2", "ContextTokens 0 is not a whole number of at least 1"),
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


def test_exact_times_cannot_be_spread(tmp_path: Path) -> None:
    path = write(tmp_path / "code.csv", [HEADER, "2023-11-16 18:17:03,1,1"])
    with pytest.raises(ConfigError, match="exact"):
        load(path, Replay(spread_seed=0))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1700000000000", "1700000001500"),
        ("1700000000000000", "1700000001500000"),
        ("1700000000000000000", "1700000001500000000"),
        ("1700000000.25", "1700000001.75"),
        ("2023-11-16 18:15 UTC", "2023-11-16 18:15:01,5+0000"),
        ("2023-11-16 18:15+00", "2023-11-16 19:15:01.5+01"),
    ],
)
def test_times_are_dates_or_unix_times_of_any_unit(tmp_path: Path, first: str, second: str) -> None:
    path = write(tmp_path / "code.csv", ["timestamp;prompt_tokens", f"{first};3", f"{second};4"])
    assert [request.arrival_ns for request in load(path).requests] == [0, 1_500_000_000]


FIRST = Request(0, 374, 44)


@pytest.mark.parametrize(
    ("text", "requests", "note"),
    [
        ("TIMESTAMP, ContextTokens, GeneratedTokens\n2023-11-16 18:15:46.68, 374, 44\n", [FIRST], ""),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374.0,44.0\n", [FIRST], ""),
        (
            "\n'TIMESTAMP';'ContextTokens';'GeneratedTokens';\n\n'2023-11-16 18:15:46';'374';'44';\n;;;\n",
            [FIRST],
            "",
        ),
        (
            "timestamp\tcontext_tokens\n2023-11-16 18:15:46\t374\n",
            [Request(0, 374, 1)],
            "without tokens out, taken as 1",
        ),
        (
            "Timestamp,Model,Request tokens,Response tokens,Log Type\n5,GPT-4,374,44,API log\n45.5,GPT-4,10,,API log\n",
            [FIRST, Request(40_500_000_000, 10, 1)],
            "ignored Model (2 lines), Log Type (2 lines); without tokens out, taken as 1 (1 line)",
        ),
        (
            "arrived_at,num_prefill_tokens,num_decode_tokens\n2.5,1,1\n0.5,374,44\n",
            [FIRST, Request(2_000_000_000, 1, 1)],
            "earlier than the line above, so sorted by time (1 line)",
        ),
    ],
)
def test_a_csv_is_read_however_it_was_exported(
    tmp_path: Path, text: str, requests: list[Request], note: str
) -> None:
    path = tmp_path / "export.csv"
    path.write_text(text.replace("'", '"'))
    workload = load(path)
    assert workload.requests == requests
    assert len(workload.notes) == bool(note) and note in "".join(workload.notes)


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        (["Timestamp,Model,Requests", "1,2,3"], "1: the first line should be TIMESTAMP,ContextTokens"),
        ([f"{HEADER},ContextTokens", "2023-11-16 18:17:03,1,1,2"], "1: the first line should be"),
        ([HEADER], "2: no request"),
        ([f"{HEADER},Model", '1,2,3,"GPT', "2,3,4,GPT", "3,4,5,GPT"], "2: "),  # its quote does not end
    ],
)
def test_a_csv_of_another_kind_is_refused(tmp_path: Path, lines: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=rf"t\.csv:{complaint}"):
        load(write(tmp_path / "t.csv", lines))
